"""`realm prepare`: your documents and questions, turned once into a folder that every other job reads.

Articles are read by `realm_jax.corpora.articles`, which has the runners too, and packed by `realm_jax.corpora.build`;
`realm_jax.corpora.partial_output` has the folder until it is whole. Read `prepare` next.
"""

import argparse
import json
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from realm_jax.cli.argument_types import positive
from realm_jax.console import StageProgress
from realm_jax.corpora.articles import ArticleSource, Processes, Runner, read_shard
from realm_jax.corpora.build import PackingSummary, PassagePacker, check_limit, pack_shard, packed_name
from realm_jax.corpora.near_duplicates import COPIES, drop_near_duplicates, fingerprint_shard
from realm_jax.corpora.outcomes import Article, Counts
from realm_jax.corpora.partial_output import ARTICLES, TOKENIZER, check_owner, is_prepared, staged_output
from realm_jax.corpora.questions import QuestionFile, SelectedQuestions, published_identity, question_files, read_all
from realm_jax.corpora.texts import identity, open_texts
from realm_jax.data import spans as span_finders
from realm_jax.data.beir import has_judgements, queries_file
from realm_jax.data.packing import DEFAULT_LIMIT
from realm_jax.data.questions import question_lines
from realm_jax.data.sources import FORMAT_VERSION
from realm_jax.data.staging import PREPARED
from realm_jax.data.store import MANIFEST as STORE
from realm_jax.data.store import new_version
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.data.tokenizer_files import FoundTokenizer, are_complete, lower_case_of, tokenizer_file, tokenizer_of
from realm_jax.data.wordpiece import WordPiece, check_size
from realm_jax.errors import UserError
from realm_jax.storage import open_folder

logger = logging.getLogger(__name__)

DEFAULT_VOCABULARY_SIZE = 30_522  # the size of bert-base-uncased's vocabulary
UNKNOWN_SHARE = 0.05  # more [UNK] than this says that the vocabulary is for another language
LEARN_FROM = 100_000_000  # characters of text to learn a vocabulary from: about a minute and a half

Path_ = str | os.PathLike[str]

EXAMPLES = """examples:
  realm prepare --passages passages.jsonl.gz --questions questions.jsonl.gz --output data
  realm prepare --passages wiki.jsonl.xz --pretraining news.jsonl.xz --questions train=NQ-open.train.jsonl \\
      --questions dev=NQ-open.dev.jsonl --vocab vocab.txt --max-answer-words 5 --output data
  realm prepare --passages docs/ --output data      a folder of .txt .md .rst .html .pdf .docx .csv .json .parquet
  realm prepare --passages 'enwiki-20261101/*.xml*.bz2' --vocab vocab.txt --output data
  realm prepare --passages psgs_w100.tsv.gz --questions train=nq-train.json dev=nq-dev.json --output data
  realm prepare --passages wiki.jsonl --questions tfds:open_qa/web_questions --output data
  realm prepare --passages scifact.jsonl --questions scifact --output data      judged questions in the folder of BEIR
  realm prepare --passages tfds:wikipedia/20230601.en --pretraining 'news:cc-news/*.jsonl.gz' --vocab vocab.txt \\
      --output data

A line of a passage file is {"id": …, "title": …, "text": …}, of a question file {"question": …, "answers": […]} with
"gold_passage_id" and "split" if known; with a gold passage it needs no answers, and retrieval alone is measured by it.
"gold_passages": {id: grade} names several. Files of DPR, Atlas, FiD, BEIR, Pyserini, FlashRAG, SQuAD, ORQA, DrQA and
CuratedTREC are read as they are; of BEIR's folders queries.jsonl and qrels/{train,dev,test}.tsv are the questions, of
TREC's qrels queries.jsonl.
Files may be packed as .gz, .xz or .bz2. Documents of a folder or pattern that cannot be read are left out and counted.
tfds:open_qa/nq_open, …/web_questions and …/curated_trec are the published questions with ORQA's splits train, dev and
test; they are downloaded, or taken from TFDS_DATA_DIR/downloads/manual. Texts may also be hf:NAME, tfds:NAME or a dump
of Wikipedia; news:SOURCE is raw news (JSON Lines with text or maintext, title, url, or hf:cc_news), of which prose in
English of a usual length stays, without near-duplicates.
Run the same command again to resume an interrupted run.
"""


def _option(help_: str, default: Any = MISSING, recorded: bool = False, **argument: Any) -> Any:
    """A field of `Options`. recorded: whether PREPARED.json keeps it as a setting; argument: keyword arguments for
    argparse."""
    metadata = {"recorded": recorded, "argument": argument | {"help": help_}}
    if default == []:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """What is prepared and how: every field is a flag of `realm prepare`, and an argument of `prepare`."""

    passages: Path_ = _option("file, pattern or folder of the texts to retrieve from", metavar="FILE")
    output: Path_ = _option("folder to make", metavar="DIR")
    pretraining: Path_ | None = _option(
        "the same of the texts to pre-train on (default: the passages)", None, metavar="FILE"
    )
    questions: Sequence[Path_] = _option(
        "file of questions for a split such as train or dev, BEIR's folder, or tfds:open_qa/NAME; without SPLIT= the "
        'field "split" of each question decides',
        [],
        metavar="[SPLIT=]FILE",
        nargs="+",
        action="extend",
    )
    vocab: Path_ | None = _option(
        "tokenizer of a pretrained encoder, which says whether capitals are kept: its vocab.txt, any tokenizer.json, "
        "its folder, hf:NAME, or py:NAME of an installed package",
        None,
        metavar="FILE",
    )
    vocabulary_size: int = _option(
        "most word pieces of a vocabulary learned from the texts, or from every n-th article of large ones "
        "(default: %(default)s)",
        DEFAULT_VOCABULARY_SIZE,
        recorded=True,
        type=positive,
        metavar="N",
    )
    limit: int = _option(
        "most word pieces of a passage, its title and three special ones included (default: %(default)s)",
        DEFAULT_LIMIT,
        recorded=True,
        type=positive,
        metavar="N",
    )
    spans: str = _option(
        f"how salient spans are found (default: %(default)s): {span_finders.CHOICES}",
        "rules",
        recorded=True,
        metavar="NAME",
    )
    question_sources: Sequence[str] = _option(
        'keep only questions whose field "source" is one of these',
        [],
        recorded=True,
        type=lambda names: [name for name in names.split(",") if name],
        metavar="NAME,NAME",
    )
    max_answer_words: int | None = _option(
        "keep only answers of at most N words, and questions that have one; NQ-open has 5; regular expressions "
        "stay (default: keep all)",
        None,
        recorded=True,
        type=positive,
        metavar="N",
    )
    ignore_gold: bool = _option(
        "forget which passages the questions come with: for questions made with other passages than these",
        False,
        recorded=True,
        action="store_true",
    )
    workers: int | None = _option("processes to use (default: one a core)", None, type=positive, metavar="N")
    shards: int | None = _option(
        "parts of a corpus that are packed one by one, by hash of the id (default: one for each 2 MiB of input)",
        None,
        type=positive,
        metavar="N",
    )
    skip_damage: bool = _option(
        "skip texts and questions that cannot be read, and report them (default: stop)",
        False,
        action="store_true",
    )
    beam: str | None = _option(
        "work with Apache Beam instead of processes of this machine, such as "
        "--beam='--runner=DataflowRunner --project=… --region=… --temp_location=gs://…'; --output may be a bucket then",
        None,
        metavar="OPTIONS",
    )

    def settings(self) -> dict[str, Any]:
        """What PREPARED.json keeps."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.metadata["recorded"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm prepare`: the fields of `Options`."""
    parser.epilog = EXAMPLES
    vocabulary = parser.add_mutually_exclusive_group()
    for one in fields(Options):
        group = vocabulary if one.name in ("vocab", "vocabulary_size") else parser
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        argument = {"required": True} if default is MISSING else {"default": default}
        group.add_argument(f"--{one.name.replace('_', '-')}", **argument | one.metadata["argument"])


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    prepare(**{one.name: getattr(args, one.name) for one in fields(Options)})


def prepare(passages: Path_, output: Path_, **further: Any) -> None:
    """Write the prepared folder `output` (see docs/design.md) and print a summary.

    further: as `Options` has them; `vocab` goes before `vocabulary_size`. Does nothing when `output` was prepared from
    the same inputs with the same settings. Raises UserError for faults in the inputs and when `output` exists
    otherwise.
    """
    if not os.fspath(output):
        raise UserError("--output: is empty; name a folder to make")
    started, options = time.monotonic(), Options(passages, output, **further)
    finder = span_finders.finder(options.spans)
    check_limit(options.limit)
    vocabulary = None if options.vocab is None else _vocabulary_file(os.fspath(options.vocab))
    if vocabulary is None:
        check_size(options.vocabulary_size)
    if not options.questions and (options.question_sources or options.max_answer_words or options.ignore_gold):
        raise UserError("--question-sources, --max-answer-words and --ignore-gold are about --questions; give some")
    worker = _runner(options.workers, options.beam)
    files = [file for argument in options.questions for file in question_files(argument)]
    sources = {"passages": open_texts(passages)}
    sources |= {"pretraining": open_texts(options.pretraining)} if options.pretraining else {}
    shards = {name: options.shards or source.shards for name, source in sources.items()}
    worker.check(max(shards.values()))
    settings = options.settings() | {"shards": shards} | ({"vocabulary_size": None} if vocabulary else {})
    if (own := span_finders.identity(finder)) is not None:
        settings["spans_identity"] = own
    inputs = _inputs(sources, vocabulary, files, settings)
    if is_prepared(os.fspath(output), inputs, options.skip_damage):
        print(f"{output} was prepared from the same inputs with the same settings; nothing to do")
        return
    given = None if vocabulary is None else vocabulary.read()
    chosen = read_all(
        files, options.question_sources, options.max_answer_words, options.ignore_gold, options.skip_damage
    )
    claim = uuid.uuid4().hex
    with staged_output(os.fspath(output), inputs, options.beam is not None, claim) as root:
        made = PrepareJob(worker, root, claim, sources, inputs, options.skip_damage).make(given, chosen)
    _print_summary(output, made, chosen.counts, time.monotonic() - started)


def _runner(workers: int | None, beam: str | None) -> Runner:
    """What does the work, by --workers or by the options of --beam. Raises UserError for both at once."""
    if beam is None:
        return Processes(workers or os.cpu_count() or 1)
    if workers is not None:
        raise UserError("--workers: Beam's runners have options of their own for it; leave it out, or leave --beam out")
    from realm_jax.corpora.pipelines import Beam  # here, since few have Apache Beam

    return Beam.of(beam)


def _inputs(
    sources: dict[str, ArticleSource],
    vocabulary: FoundTokenizer | None,
    questions: list[QuestionFile],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Names and SHA-256 of the input files, and settings: what tells two preparations apart, as it is read again."""
    inputs = {
        "passages": sources["passages"].identity,
        "pretraining": sources["pretraining"].identity if "pretraining" in sources else None,
        "vocab": None if vocabulary is None else identity(vocabulary.path),
        "questions": [{"split": file.split} | _question_identity(file) for file in questions],
        "settings": settings | ({} if vocabulary is None else vocabulary.settings()),
    }
    return dict(json.loads(json.dumps(inputs)))


def _question_identity(file: QuestionFile) -> dict[str, Any]:
    """What tells questions from others; judgements have their texts in a file of their own."""
    if (published := published_identity(file)) is not None:
        return published
    texts = {"queries": identity(queries_file(file.path))["sha256"]} if has_judgements(file.path) else {}
    return identity(file.path) | texts


class PrepareResult(NamedTuple):
    """What was made: PREPARED.json, and for each source the counts of records and articles by outcome."""

    manifest: dict[str, Any]
    counts: dict[str, Counts]
    summaries: dict[str, PackingSummary]
    vocabulary: int


@dataclass(frozen=True)
class PrepareJob:
    """A preparation in its folder `root`, a path or a URL; `inputs` has its settings."""

    runner: Runner
    root: str
    claim: str
    sources: dict[str, ArticleSource]
    inputs: dict[str, Any]
    skip_damage: bool

    def make(self, given: Tokenizer | None, chosen: SelectedQuestions) -> PrepareResult:
        """All files, PREPARED.json last."""
        settings = self.inputs["settings"]
        counts = {name: self.extract(name) for name in self.sources}
        self.check_gold(chosen)
        size, characters = settings["vocabulary_size"], sum(count.characters for count in counts.values())
        tokenizer = _vocabulary(self.root, given, size, self.articles(*self.sources), characters)
        packer = PassagePacker(tokenizer, settings["limit"], settings["spans"])
        summaries, entries = {}, {}
        for name in self.sources:
            check_owner(self.root, self.claim)
            summaries[name], entries[name] = self.pack(name, packer, counts[name].articles)
            if (share := summaries[name].unknown_share) > UNKNOWN_SHARE:
                (unknown,) = tokenizer.pieces([tokenizer.unk_id])
                logger.warning(
                    "%s: %.0f %% of the tokens are %s: the vocabulary does not cover this text; choose a tokenizer for "
                    "its language with --vocab",
                    name,
                    100 * share,
                    unknown,
                )
        manifest: dict[str, Any] = {"format_version": FORMAT_VERSION, "tokenizer": tokenizer.fingerprint}
        manifest |= {"passages": None, "pretraining": None} | entries
        manifest["questions"] = self.write_questions(chosen, summaries["passages"])
        manifest |= {"limit": settings["limit"], "inputs": self.inputs}
        for name, summary in summaries.items():
            counts[name].dropped += Counter({"no words in the text": len(summary.wordless)})
        manifest["counts"] = {
            name: count.to_json()
            | {"notes": count.notes_to_json(), "unknown_token_share": round(summaries[name].unknown_share, 4)}
            for name, count in counts.items()
        }
        manifest["counts"] |= {"questions": chosen.to_manifest()} if self.inputs["questions"] else {}
        check_owner(self.root, self.claim)
        open_folder(self.root).write_json(PREPARED, manifest)
        return PrepareResult(manifest, counts, summaries, tokenizer.size)

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
        texts, shards, where = self.sources[name], self.shards(name), f"{self.root}/{ARTICLES}/{name}"
        with StageProgress(f"reading {name}", None) as bar:
            counts = self.runner.extract(texts, where, shards, self.skip_damage, bar.update)
        if texts.without_copies:
            if COPIES not in open_folder(where).names():
                with StageProgress(f"comparing {name}", counts.articles) as bar:
                    self.runner.each(fingerprint_shard, where, range(shards), bar.update)
            copies = drop_near_duplicates(where, shards)
            counts.dropped += copies
            counts.articles -= copies.total()
        return counts

    def check_gold(self, chosen: SelectedQuestions) -> None:
        """Raise UserError for a question of which no gold passage exists, before the slow part begins.

        It is damage like any other, so with `skip_damage` it is left out.
        """
        if not chosen.gold():
            return
        lost = chosen.note_absent_golds(article.id for article in self.articles("passages"))
        if self.skip_damage:
            chosen.drop(lost)
        elif lost:
            name, passages = next(iter(lost[0].question.gold)), self.sources["passages"].name
            raise UserError(
                f"{lost[0].where}: gold_passage_id {name!r} is not in {passages}; correct it, or use --ignore-gold"
            )

    def pack(self, name: str, packer: PassagePacker, articles: int) -> tuple[PackingSummary, dict[str, Any]]:
        """A store of the shards of a source: what became of its articles, and what PREPARED.json says of the store."""
        where, shards = f"{self.root}/{ARTICLES}/{name}", self.shards(name)
        with StageProgress(name, articles) as bar:
            done = {*open_folder(where).names()}
            missing = [shard for shard in range(shards) if packed_name(shard) not in done]
            if missing:
                # A network has the devices of this process; workers would each need the memory of all of them.
                one_process = packer.uses_devices and isinstance(self.runner, Processes)
                runner = Processes(1) if one_process else self.runner
                runner.each(partial(pack_shard, packer, f"{self.root}/{name}"), where, missing, bar.update)
        packed = [open_folder(where).read_json(packed_name(shard)) for shard in range(shards)]
        entries, summary = [one["entry"] for one in packed], PackingSummary()
        for one in packed:
            summary.add(PackingSummary.from_json(one["summary"]))
        if not summary.passages:
            raise UserError(f"none of {summary.articles} articles has words to store; check the texts")
        manifest = new_version({"limit": packer.limit, "tokenizer": packer.tokenizer.fingerprint}, entries)
        open_folder(f"{self.root}/{name}").write_json(STORE, manifest)
        rows, documents = (sum(entry[key] for entry in entries) for key in ("rows", "documents"))
        return summary, {"rows": rows, "documents": documents, "fingerprint": manifest["fingerprint"]}

    def write_questions(self, chosen: SelectedQuestions, passages: PackingSummary) -> dict[str, int]:
        """Write each split, without questions whose gold passage has no words; the numbers of questions."""
        splits = chosen.with_stored_golds(passages.wordless)
        for split, questions in splits.items():
            open_folder(self.root).write(f"questions/{split}.jsonl", question_lines(questions))
        return {split: len(questions) for split, questions in splits.items()}


def _vocabulary_file(name: str) -> FoundTokenizer:
    """What --vocab names: a file, or a model as `config.init_from` takes it.

    Text is put in lower case unless the tokenizer that the file belongs to keeps capitals. Raises UserError if the
    model is not there, or has no tokenizer.
    """
    path = Path(name)
    if not path.is_file():
        from realm_jax.models.folders import resolve_model_path, tokenizer_folder  # here, since it brings JAX along

        model = resolve_model_path(name, "--vocab")
        path = _of_model(f"--vocab={name}", tokenizer_folder(model)) if model.is_dir() else model
    said = lower_case_of(path.parent)
    return FoundTokenizer(path, said is None or said.value)


def _of_model(name: str, folder: Path) -> Path:
    path = tokenizer_file(folder)
    if path is None:
        raise UserError(f"{name}: {folder} has no vocab.txt and no tokenizer.json; name an encoder with one")
    return path


def _vocabulary(
    root: str, given: Tokenizer | None, size: int, articles: Iterator[Article], characters: int
) -> Tokenizer:
    """The tokenizer, in its place: the one that is there, the given one, or one that is learned.

    It is learned from all articles, or from every n-th if they have too many characters.
    """
    folder = open_folder(root)
    if are_complete(names := folder.names(TOKENIZER)):
        return tokenizer_of({name: folder.read(f"{TOKENIZER}/{name}") for name in names}, TOKENIZER)
    some = islice(articles, 0, None, 1 + characters // LEARN_FROM)
    tokenizer = given or WordPiece.train((f"{article.title}\n{article.text}" for article in some), size)
    for name, content in tokenizer.files().items():
        folder.write(f"{TOKENIZER}/{name}", content)
    return tokenizer


def _print_summary(output: Path_, made: PrepareResult, questions: Counts, seconds: float) -> None:
    """Print what was made and what was skipped, with samples."""
    for name, summary in made.summaries.items():
        line = f"{name}: {summary.articles:,} articles -> {summary.passages:,} passages"
        counts = made.counts[name]
        print(_with_reasons(line, "dropped", counts.dropped + counts.damaged) + _with_reasons("", "", summary.notes))
        _print_notes(counts)
        _print_samples(counts)
    asked = ", ".join(f"{split} {count:,}" for split, count in made.manifest["questions"].items()) or "none"
    print(_with_reasons(f"questions: {asked}", "dropped", questions.dropped + questions.damaged))
    _print_notes(questions)
    _print_samples(questions)
    print(f"vocabulary: {made.vocabulary:,} word pieces")
    print(f"{output} is ready after {seconds:.0f} seconds")


def _print_notes(counts: Counts) -> None:
    for kind, times, names in counts.common_notes():
        print(f"  {times:,} × {kind}, such as {', '.join(one for one, _ in names[:5])}")


def _print_samples(counts: Counts) -> None:
    for reason, samples in sorted(counts.samples.items()):
        print(f"  {reason}, such as: " + " | ".join(sample[:100] for _, _, sample in samples))


def _with_reasons(line: str, verb: str, reasons: Counter[str]) -> str:
    """`line; dropped 4 of other sources, 3 without words`: most often first, without reasons that never happened."""
    often = sorted(reasons.items(), key=lambda reason: (-reason[1], reason[0]))
    counted = ", ".join(f"{count:,} {reason}" for reason, count in often if count)
    return f"{line}; {verb} {counted}".replace("  ", " ") if counted else line
