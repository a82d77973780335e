"""`realm prepare`: your documents and questions, turned once into a folder that every other job reads.

Articles are read by `realm_jax.corpus.articles` and packed by `realm_jax.corpus.build`, by one of the runners of
`realm_jax.corpus.runners`; `realm_jax.jobs.unfinished` has the folder until it is whole. Read `prepare` next.
"""

import argparse
import json
import logging
import os
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from realm_jax.console import StageProgress
from realm_jax.corpus.articles import read_shard
from realm_jax.corpus.build import PassagePacker, Summary, check_limit, packed_shards
from realm_jax.corpus.copies import COPIES, fingerprint_shard, leave_out_copies
from realm_jax.corpus.jsonl import Article
from realm_jax.corpus.records import Counts
from realm_jax.corpus.runners import Runner, runner
from realm_jax.corpus.store import MANIFEST as STORE
from realm_jax.corpus.store import first_version
from realm_jax.corpus.texts import Input, identity, open_texts
from realm_jax.data.sources import FORMAT_VERSION
from realm_jax.errors import UserError
from realm_jax.jobs.flags import positive
from realm_jax.jobs.questions import Chosen, QuestionFile, published_identity, question_file, read_all
from realm_jax.jobs.unfinished import ARTICLES, MANIFEST, TOKENIZER, check_claim, is_prepared, unfinished
from realm_jax.storage import open_folder
from realm_jax.text import spans as span_finders
from realm_jax.text.packing import DEFAULT_LIMIT
from realm_jax.text.wordpiece import FILES, VocabularyFile, WordPiece, check_size, lower_case_of, vocabulary_file

logger = logging.getLogger(__name__)

DEFAULT_VOCABULARY_SIZE = 30_522  # as many pieces as bert-base-uncased has
LEARN_FROM = 100_000_000  # characters of text to learn a vocabulary from: about a minute and a half

Path_ = str | os.PathLike[str]

EXAMPLES = """examples:
  realm prepare --passages passages.jsonl.gz --questions questions.jsonl.gz --output data
  realm prepare --passages wiki.jsonl.xz --pretraining news.jsonl.xz --questions train=NQ-open.train.jsonl \\
      --questions dev=NQ-open.dev.jsonl --vocab vocab.txt --max-answer-words 5 --output data
  realm prepare --passages 'enwiki-20261101/*.xml*.bz2' --vocab vocab.txt --output data
  realm prepare --passages psgs_w100.tsv.gz --questions train=nq-train.json dev=nq-dev.json --output data
  realm prepare --passages wiki.jsonl --questions tfds:open_qa/web_questions --output data
  realm prepare --passages tfds:wikipedia/20230601.en --pretraining 'news:cc-news/*.jsonl.gz' --vocab vocab.txt \\
      --output data

A line of a passage file is {"id": …, "title": …, "text": …}, of a question file {"question": …, "answers": […]} with
"gold_passage_id" and "split" if known; with a gold passage it needs no answers, and retrieval alone is measured by it.
Files of DPR, Atlas, FiD, ORQA, DrQA and CuratedTREC are read as they are. Files may be packed as .gz, .xz or .bz2.
tfds:open_qa/nq_open, …/web_questions and …/curated_trec are the published questions with ORQA's splits train, dev and
test; they are downloaded, or taken from TFDS_DATA_DIR/downloads/manual. Texts may also be hf:NAME, tfds:NAME or a dump
of Wikipedia; news:SOURCE is raw news (JSON Lines with text or maintext, title, url, or hf:cc_news), of which prose in
English of a usual length stays, without near-duplicates.
A run that was cut off goes on when its command is repeated.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm prepare`."""
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--passages", required=True, metavar="FILE", help="file of the texts to retrieve from")
    add("--output", required=True, metavar="DIR", help="folder to make")
    add("--pretraining", metavar="FILE", help="file of the texts to pre-train on (default: the passages)")
    _add_question_arguments(add)
    _add_text_arguments(parser)
    add("--workers", type=positive, metavar="N", help="processes to use (default: one a core)")
    add(
        "--shards",
        type=positive,
        metavar="N",
        help="parts of a corpus that are packed one by one, by hash of the id (default: one for each 8 MiB of input)",
    )
    add(
        "--skip-damage",
        action="store_true",
        help="leave out what cannot be read of texts and of questions, and say so (default: stop)",
    )
    add(
        "--beam",
        metavar="OPTIONS",
        help="work with Apache Beam instead of processes of this machine, such as "
        "--beam='--runner=DataflowRunner --project=… --region=… --temp_location=gs://…'; --output may be a bucket then",
    )


def _add_question_arguments(add: Callable[..., Any]) -> None:
    add(
        "--questions",
        metavar="[SPLIT=]FILE",
        nargs="+",
        action="extend",
        default=[],
        help="file of questions for a split such as train or dev, or tfds:open_qa/NAME; without SPLIT= the field "
        '"split" of each question decides',
    )
    add("--question-sources", metavar="NAME,NAME", help='keep only questions whose field "source" is one of these')
    add(
        "--max-answer-words",
        type=positive,
        metavar="N",
        help="keep only answers of at most N words, and questions that have one; NQ-open has 5; regular expressions "
        "stay (default: keep all)",
    )
    add(
        "--ignore-gold",
        action="store_true",
        help="forget which passages the questions come with: for questions made with other passages than these",
    )


def _add_text_arguments(parser: argparse.ArgumentParser) -> None:
    vocabulary = parser.add_mutually_exclusive_group()
    vocabulary.add_argument(
        "--vocab",
        metavar="FILE",
        help="vocabulary of a pretrained encoder, whose tokenizer says whether capitals are kept: its vocab.txt, "
        "tokenizer.json or folder, hf:NAME, or py:NAME of an installed package",
    )
    vocabulary.add_argument(
        "--vocabulary-size",
        type=positive,
        default=DEFAULT_VOCABULARY_SIZE,
        metavar="N",
        help="most word pieces of a vocabulary learned from the texts, or from every n-th article of large ones "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--limit",
        type=positive,
        default=DEFAULT_LIMIT,
        metavar="N",
        help="most word pieces of a passage, its title and three special ones included (default: %(default)s)",
    )
    parser.add_argument(
        "--spans",
        default="rules",
        metavar="NAME",
        help=f"how salient spans are found (default: %(default)s): {span_finders.CHOICES}",
    )


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    prepare(
        args.passages,
        args.output,
        questions=args.questions,
        pretraining=args.pretraining,
        vocab=args.vocab,
        vocabulary_size=args.vocabulary_size,
        limit=args.limit,
        spans=args.spans,
        workers=args.workers,
        question_sources=[name for name in (args.question_sources or "").split(",") if name],
        max_answer_words=args.max_answer_words,
        ignore_gold=args.ignore_gold,
        shards=args.shards,
        skip_damage=args.skip_damage,
        beam=args.beam,
    )


def prepare(
    passages: Path_,
    output: Path_,
    *,
    questions: Sequence[Path_] = (),
    pretraining: Path_ | None = None,
    vocab: Path_ | None = None,
    vocabulary_size: int = DEFAULT_VOCABULARY_SIZE,
    limit: int = DEFAULT_LIMIT,
    spans: str = "rules",
    workers: int | None = None,
    question_sources: Sequence[str] = (),
    max_answer_words: int | None = None,
    ignore_gold: bool = False,
    shards: int | None = None,
    skip_damage: bool = False,
    beam: str | None = None,
) -> None:
    """Write the prepared folder `output` (see docs/design.md) and print a summary.

    The arguments are those of the command, `realm prepare --help`; `vocab` goes before `vocabulary_size`. Does nothing
    when `output` was prepared from the same inputs with the same settings. Raises UserError for faults in the inputs
    and when `output` exists otherwise.
    """
    started = time.monotonic()
    finder = span_finders.finder(spans)
    check_limit(limit)
    vocabulary = None if vocab is None else _vocabulary_file(os.fspath(vocab))
    if vocabulary is None:
        check_size(vocabulary_size)
    if not questions and (question_sources or max_answer_words or ignore_gold):
        raise UserError("--question-sources, --max-answer-words and --ignore-gold are about --questions; give some")
    worker = runner(workers, beam)
    files = [question_file(argument) for argument in questions]
    sources = {"passages": open_texts(passages)} | ({"pretraining": open_texts(pretraining)} if pretraining else {})
    shards_of = {name: shards or source.shards for name, source in sources.items()}
    worker.check(max(shards_of.values()))
    settings = {
        "vocabulary_size": None if vocabulary else vocabulary_size,
        "limit": limit,
        "spans": spans,
        "question_sources": list(question_sources),
        "max_answer_words": max_answer_words,
        "ignore_gold": ignore_gold,
        "shards": shards_of,
    }
    if (own := span_finders.identity(finder)) is not None:
        settings["spans_identity"] = own
    inputs = _inputs(sources, vocabulary, files, settings)
    if is_prepared(os.fspath(output), inputs, skip_damage):
        print(f"{output} was prepared from the same inputs with the same settings; nothing to do")
        return
    given = None if vocabulary is None else vocabulary.read()
    chosen = read_all(files, question_sources, max_answer_words, ignore_gold, skip_damage)
    claim = uuid.uuid4().hex
    with unfinished(os.fspath(output), inputs, beam is not None, claim) as root:
        made = Work(worker, root, claim, sources, inputs, skip_damage).make(given, chosen)
    _print_summary(output, made, chosen.counts, time.monotonic() - started)


def _inputs(
    sources: dict[str, Input],
    vocabulary: VocabularyFile | None,
    questions: list[QuestionFile],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Names and SHA-256 of the input files, and settings: what tells two preparations apart, as it is read again."""
    if vocabulary is not None and not vocabulary.lower_case:
        settings = settings | {"lower_case": False}  # what folders do not record in which it is true
    inputs = {
        "passages": sources["passages"].identity,
        "pretraining": sources["pretraining"].identity if "pretraining" in sources else None,
        "vocab": None if vocabulary is None else identity(vocabulary.path),
        "questions": [{"split": file.split} | (published_identity(file) or identity(file.path)) for file in questions],
        "settings": settings,
    }
    return dict(json.loads(json.dumps(inputs)))


class Made(NamedTuple):
    """What was made: PREPARED.json, and by source what became of its records and of its articles."""

    manifest: dict[str, Any]
    counts: dict[str, Counts]
    summaries: dict[str, Summary]
    vocabulary: int


@dataclass(frozen=True)
class Work:
    """A preparation in its folder `root`, a path or a URL; `inputs` has its settings."""

    runner: Runner
    root: str
    claim: str
    sources: dict[str, Input]
    inputs: dict[str, Any]
    skip_damage: bool

    def make(self, given: WordPiece | None, chosen: Chosen) -> Made:
        """All files, PREPARED.json last."""
        settings = self.inputs["settings"]
        counts = {name: self.extract(name) for name in self.sources}
        self.check_gold(chosen)
        size, characters = settings["vocabulary_size"], sum(count.characters for count in counts.values())
        wordpiece = _vocabulary(self.root, given, size, self.articles(*self.sources), characters)
        packer = PassagePacker(wordpiece, settings["limit"], settings["spans"])
        summaries, entries = {}, {}
        for name in self.sources:
            check_claim(self.root, self.claim)
            summaries[name], entries[name] = self.pack(name, packer, counts[name].articles)
        manifest: dict[str, Any] = {"format_version": FORMAT_VERSION, "tokenizer": wordpiece.fingerprint}
        manifest |= {"passages": None, "pretraining": None} | entries
        manifest["questions"] = _write_questions(self.root, chosen, summaries["passages"])
        manifest |= {"limit": settings["limit"], "inputs": self.inputs}
        manifest["counts"] = {name: _told(count) for name, count in counts.items()}
        manifest["counts"] |= {"questions": chosen.told()} if self.inputs["questions"] else {}
        check_claim(self.root, self.claim)
        open_folder(self.root).write_json(MANIFEST, manifest)
        return Made(manifest, counts, summaries, wordpiece.size)

    def shards(self, name: str) -> int:
        """The number of shards of a source."""
        return int(self.inputs["settings"]["shards"][name])

    def articles(self, *names: str) -> Iterator[Article]:
        """The articles of some sources, shard after shard, once they are extracted."""
        for name in names:
            folder = open_folder(f"{self.root}/{ARTICLES}/{name}")
            yield from chain.from_iterable(read_shard(folder, shard) for shard in range(self.shards(name)))

    def extract(self, name: str) -> Counts:
        """The articles of a source into shards, without copies where the source says so."""
        texts, shards, where = self.sources[name].texts, self.shards(name), f"{self.root}/{ARTICLES}/{name}"
        with StageProgress(f"reading {name}", None) as bar:
            counts = self.runner.extract(texts, where, shards, self.skip_damage, bar.update)
        if texts.without_copies:
            if COPIES not in open_folder(where).names():
                self.runner.each(fingerprint_shard, where, shards)
            copies = leave_out_copies(where, shards)
            counts.dropped += copies
            counts.articles -= copies.total()
        return counts

    def check_gold(self, chosen: Chosen) -> None:
        """Raise UserError for a question whose gold passage does not exist, before the slow part begins.

        It is damage like any other, so with `skip_damage` it is left out.
        """
        places = chosen.gold()
        if not places:
            return
        for article in self.articles("passages"):
            places.pop(article.id, None)
        if self.skip_damage:
            chosen.leave_out_gold(places)
            return
        for gold, where in places.items():
            passages = self.sources["passages"].texts.name
            raise UserError(f"{where}: gold_passage_id {gold!r} is not in {passages}; correct it, or use --ignore-gold")

    def pack(self, name: str, packer: PassagePacker, articles: int) -> tuple[Summary, dict[str, Any]]:
        """A store of the shards of a source: what became of its articles, and what PREPARED.json says of the store."""
        where, shards = f"{self.root}/{ARTICLES}/{name}", self.shards(name)
        with StageProgress(name, articles) as bar:
            self.runner.pack(where, shards, packer, f"{self.root}/{name}", bar.update)
        summary, entries = Summary(), []
        for packed in packed_shards(open_folder(where), shards):
            summary.add(packed.summary)
            entries.append(packed.entry)
        if not summary.passages:
            raise UserError(f"none of {summary.articles} articles has words to store; check the texts")
        manifest = first_version(packer.limit, packer.tokenizer, entries)
        open_folder(f"{self.root}/{name}").write_json(STORE, manifest)
        rows, documents = (sum(entry[key] for entry in entries) for key in ("rows", "documents"))
        return summary, {"rows": rows, "documents": documents, "fingerprint": manifest["fingerprint"]}


def _vocabulary_file(name: str) -> VocabularyFile:
    """What `--vocab` names: a file, or a model as `config.init_from` takes it.

    Text is put in lower case unless the tokenizer that the file belongs to keeps capitals. Raises UserError where the
    model is not there, or has no word pieces.
    """
    path = Path(name)
    if not path.is_file():
        from realm_jax.jobs.starting import local_source, tokenizer_folder  # here, since it brings JAX along

        model = local_source(name, "--vocab")
        path = _of_model(name, tokenizer_folder(model)) if model.is_dir() else model
    said = lower_case_of(path.parent)
    return VocabularyFile(path, said is None or said.value)


def _of_model(name: str, folder: Path) -> Path:
    path = vocabulary_file(folder)
    if path is None:
        raise UserError(f"--vocab={name}: {folder} has no vocab.txt and no tokenizer.json; name an encoder with one")
    return path


def _vocabulary(
    root: str, given: WordPiece | None, size: int, articles: Iterator[Article], characters: int
) -> WordPiece:
    """The vocabulary, in its place: the one that is there, the given one, or one that is learned.

    It is learned from all articles, which have so many characters, or from every n-th when they are large.
    """
    folder = open_folder(root)
    if FILES[-1] in folder.names(TOKENIZER):
        return WordPiece.from_files({name: folder.read(f"{TOKENIZER}/{name}") for name in FILES}, TOKENIZER)
    some = islice(articles, 0, None, 1 + characters // LEARN_FROM)
    wordpiece = given or WordPiece.train((f"{article.title}\n{article.text}" for article in some), size)
    for name, content in wordpiece.files().items():
        folder.write(f"{TOKENIZER}/{name}", content)
    return wordpiece


def _write_questions(root: str, chosen: Chosen, passages: Summary) -> dict[str, int]:
    """Write each split; the numbers of questions."""
    with tempfile.TemporaryDirectory() as scratch:
        local = Path(scratch) / "questions"
        counts = chosen.write(local, set(passages.wordless))
        for split in counts:
            open_folder(root).write(f"questions/{split}.jsonl", (local / f"{split}.jsonl").read_bytes())
    return counts


def _told(counts: Counts) -> dict[str, Any]:
    """What PREPARED.json says of what became of a source."""
    notes = {kind: {"times": times, "names": dict(names)} for kind, times, names in counts.common_notes()}
    return counts.to_json() | {"notes": notes}


def _print_summary(output: Path_, made: Made, questions: Counts, seconds: float) -> None:
    """Say on stdout what was made and what was left out, with a sample of it."""
    for name, summary in made.summaries.items():
        line = f"{name}: {summary.articles:,} articles -> {summary.passages:,} passages"
        counts, wordless = made.counts[name], Counter({"no words in the text": len(summary.wordless)})
        dropped = counts.dropped + counts.damaged + wordless
        print(_with_reasons(line, "dropped", dropped) + _with_reasons("", "", summary.notes))
        for kind, times, names in counts.common_notes():
            print(f"  {times:,} × {kind}, such as {', '.join(one for one, _ in names[:5])}")
        _print_samples(counts)
    told = ", ".join(f"{split} {count:,}" for split, count in made.manifest["questions"].items()) or "none"
    print(_with_reasons(f"questions: {told}", "dropped", questions.dropped + questions.damaged))
    _print_samples(questions)
    print(f"vocabulary: {made.vocabulary:,} word pieces")
    print(f"{output} is ready after {seconds:.0f} seconds")


def _print_samples(counts: Counts) -> None:
    for reason, samples in sorted(counts.samples.items()):
        print(f"  {reason}, such as: " + " | ".join(sample[:100] for _, _, sample in samples))


def _with_reasons(line: str, verb: str, reasons: Counter[str]) -> str:
    """`line; dropped 4 of other sources, 3 without words`: most often first, without reasons that never happened."""
    often = sorted(reasons.items(), key=lambda reason: (-reason[1], reason[0]))
    counted = ", ".join(f"{count:,} {reason}" for reason, count in often if count)
    return f"{line}; {verb} {counted}".replace("  ", " ") if counted else line
