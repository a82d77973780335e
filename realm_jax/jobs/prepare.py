"""`realm prepare`: your documents and questions, turned once into a folder that every other job reads.

Everything is written into a hidden folder beside the output, which takes the output's name at the very end; in a
bucket PREPARED.json comes last instead. What was cut off does not look whole, and goes on when the command is repeated.
Articles are read by `realm_jax.corpus.articles` and packed by `realm_jax.corpus.build`. Read `prepare` next.
"""

import argparse
import errno
import json
import logging
import os
import resource
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from realm_jax.console import StageProgress
from realm_jax.corpus.articles import Texts, extract, read_shard
from realm_jax.corpus.build import PassagePacker, Summary, check_limit, pack_shards, packed_shards
from realm_jax.corpus.copies import COPIES, fingerprint_shard, leave_out_copies
from realm_jax.corpus.jsonl import Article
from realm_jax.corpus.pool import map_in_order
from realm_jax.corpus.records import Counts
from realm_jax.corpus.store import MANIFEST as STORE
from realm_jax.corpus.store import first_version
from realm_jax.corpus.texts import Input, identity, open_texts
from realm_jax.data.sources import FORMAT_VERSION
from realm_jax.errors import Resumable, UserError
from realm_jax.jobs.questions import Chosen, QuestionFile, published_identity, question_file, read_all
from realm_jax.storage import Folder, StorageError, only_one, open_folder, publish_folder
from realm_jax.text import spans as span_finders
from realm_jax.text.packing import DEFAULT_LIMIT
from realm_jax.text.wordpiece import FILES, WordPiece, check_size

logger = logging.getLogger(__name__)

MANIFEST = "PREPARED.json"
ARTICLES = "articles"  # while the work is not done
INPUTS, CLAIM = "INPUTS.json", "CLAIM.json"  # in it: what is prepared, and by which command
TOKENIZER = "tokenizer"
OTHER_FILES = 100  # that a process has open beside the shards
OWN = (ARTICLES, TOKENIZER, "passages", "pretraining", "questions")  # what a command that was cut off may leave
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
"gold_passage_id" and "split" if known. Files of DPR, Atlas, FiD, ORQA, DrQA and CuratedTREC are read as they are. Files
may be packed as .gz, .xz or .bz2. tfds:open_qa/nq_open, …/web_questions and …/curated_trec are the published questions
with ORQA's splits train, dev and test; they are downloaded, or taken from TFDS_DATA_DIR/downloads/manual. Texts may
also be hf:NAME, tfds:NAME or a dump of Wikipedia; news:SOURCE is raw news (JSON Lines with text or maintext, title,
url, or hf:cc_news), of which prose in English of a usual length stays, without near-duplicates.
A run that was cut off goes on when its command is repeated.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm prepare`."""
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--passages", required=True, metavar="FILE", help="file of the texts to retrieve from")
    add("--output", required=True, metavar="DIR", help="folder to make")
    add("--pretraining", metavar="FILE", help="file of the texts to pre-train on (default: the passages)")
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
        type=_positive,
        metavar="N",
        help="keep only answers of at most N words, and questions that have one; NQ-open has 5; regular expressions "
        "stay (default: keep all)",
    )
    add(
        "--ignore-gold",
        action="store_true",
        help="forget which passages the questions come with: for questions made with other passages than these",
    )
    vocabulary = parser.add_mutually_exclusive_group()
    vocabulary.add_argument("--vocab", metavar="FILE", help="vocab.txt of a BERT to use")
    vocabulary.add_argument(
        "--vocabulary-size",
        type=_positive,
        default=DEFAULT_VOCABULARY_SIZE,
        metavar="N",
        help="most word pieces of a vocabulary learned from the texts, or from every n-th article of large ones "
        "(default: %(default)s)",
    )
    add(
        "--limit",
        type=_positive,
        default=DEFAULT_LIMIT,
        metavar="N",
        help="most word pieces of a passage, its title and three special ones included (default: %(default)s)",
    )
    add(
        "--spans",
        default="rules",
        metavar="NAME",
        help=f"how salient spans are found (default: %(default)s): {span_finders.CHOICES}",
    )
    add("--workers", type=_positive, metavar="N", help="processes to use (default: one a core)")
    add(
        "--shards",
        type=_positive,
        metavar="N",
        help="parts of a corpus that are packed one by one, by hash of the id (default: one for each 8 MiB of input)",
    )
    add(
        "--skip-damage",
        action="store_true",
        help="leave out what cannot be read of dumps and of raw news, and say so (default: stop)",
    )
    add(
        "--beam",
        metavar="OPTIONS",
        help="work with Apache Beam instead of processes of this machine, such as "
        "--beam='--runner=DataflowRunner --project=… --region=… --temp_location=gs://…'; --output may be a bucket then",
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
    if vocab is None:
        check_size(vocabulary_size)
    if not questions and (question_sources or max_answer_words or ignore_gold):
        raise UserError("--question-sources, --max-answer-words and --ignore-gold are about --questions; give some")
    runner = _runner(workers, beam)
    files = [question_file(argument) for argument in questions]
    sources = {"passages": open_texts(passages)} | ({"pretraining": open_texts(pretraining)} if pretraining else {})
    parts = {name: shards or source.shards for name, source in sources.items()}
    runner.check(max(parts.values()))
    settings = {
        "vocabulary_size": None if vocab else vocabulary_size,
        "limit": limit,
        "spans": spans,
        "question_sources": list(question_sources),
        "max_answer_words": max_answer_words,
        "ignore_gold": ignore_gold,
        "shards": parts,
    }
    if (own := span_finders.identity(finder)) is not None:
        settings["spans_identity"] = own
    inputs = _inputs(sources, vocab, files) | {"settings": settings}
    if _is_prepared(os.fspath(output), inputs):
        print(f"{output} was prepared from the same inputs with the same settings; nothing to do")
        return
    given = None if vocab is None else _given_vocabulary(vocab)
    chosen = read_all(files, question_sources, max_answer_words, ignore_gold)
    claim = uuid.uuid4().hex
    with _unfinished(os.fspath(output), inputs, beam is not None, claim) as root:
        counts = {name: _extract(runner, root, name, sources[name].texts, parts[name], skip_damage) for name in sources}
        _check_gold(chosen, root, parts["passages"], os.fspath(passages))
        wordpiece = _vocabulary(root, given, vocabulary_size, parts, sum(c.characters for c in counts.values()))
        packer = PassagePacker(wordpiece, limit, spans)
        summaries, entries = {}, {}
        for name in sources:
            _check_claim(root, claim)
            summaries[name], entries[name] = _pack(runner, root, name, parts[name], packer, counts[name].articles)
        manifest: dict[str, Any] = {"format_version": FORMAT_VERSION, "tokenizer": wordpiece.fingerprint}
        manifest |= {"passages": None, "pretraining": None} | entries
        manifest["questions"] = _write_questions(root, chosen, summaries["passages"])
        manifest |= {"limit": limit, "inputs": inputs}
        manifest["counts"] = {name: _told(counts[name]) for name in sources}
        _check_claim(root, claim)
        open_folder(root).write_json(MANIFEST, manifest)
    _print_summary(output, manifest, counts, summaries, chosen.dropped, wordpiece.size, time.monotonic() - started)


class Runner(Protocol):
    """What does the work: processes of this machine, or Apache Beam. Folders are paths or URLs."""

    def check(self, shards: int) -> None:
        """Raise UserError for more shards than it can write."""

    def extract(
        self, texts: Texts, folder: str, shards: int, skip_damage: bool, progress: Callable[[int], None]
    ) -> Counts:
        """Write the shards of a source, or what is missing of them."""

    def each(self, act: Callable[[str, int], None], folder: str, shards: int) -> None:
        """Do `act(folder, shard)` for each shard."""

    def pack(
        self, articles: str, shards: int, packer: PassagePacker, store: str, progress: Callable[[int], None]
    ) -> None:
        """Make each shard a segment, where it is none yet."""


@dataclass(frozen=True)
class Processes:
    """A `Runner` of so many processes of this machine."""

    workers: int

    def check(self, shards: int) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES
        if shards > most:
            raise UserError(f"--shards={shards}: this machine may open {most} files; give fewer, or raise `ulimit -n`")

    def extract(
        self, texts: Texts, folder: str, shards: int, skip_damage: bool, progress: Callable[[int], None]
    ) -> Counts:
        return extract(texts, Path(folder), shards, self.workers, skip_damage, progress)

    def each(self, act: Callable[[str, int], None], folder: str, shards: int) -> None:
        for _ in map_in_order(partial(act, folder), range(shards), self.workers):
            pass

    def pack(
        self, articles: str, shards: int, packer: PassagePacker, store: str, progress: Callable[[int], None]
    ) -> None:
        pack_shards(open_folder(articles), shards, packer, Path(store), self.workers, progress)


def _runner(workers: int | None, beam: str | None) -> Runner:
    if beam is None:
        return Processes(workers or os.cpu_count() or 1)
    if workers is not None:
        raise UserError("--workers: Beam's runners have options of their own for it; leave it out, or leave --beam out")
    from realm_jax.corpus.pipelines import Beam  # here, since few have Apache Beam

    return Beam.of(beam)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


def _inputs(sources: dict[str, Input], vocab: Path_ | None, questions: list[QuestionFile]) -> dict[str, Any]:
    """Names and SHA-256 of the input files: what tells two preparations apart."""
    return {
        "passages": sources["passages"].identity,
        "pretraining": sources["pretraining"].identity if "pretraining" in sources else None,
        "vocab": None if vocab is None else identity(vocab),
        "questions": [{"split": file.split} | (published_identity(file) or identity(file.path)) for file in questions],
    }


def _is_prepared(output: str, inputs: dict[str, Any]) -> bool:
    """Whether `output` is already what would be made. Raises UserError when it is anything else."""
    folder = open_folder(output)
    names = folder.names()
    if not (names or os.path.lexists(output)):
        return False
    advice = "choose another --output or remove the folder"
    if MANIFEST not in names:
        if "://" in output and INPUTS in folder.names(ARTICLES):
            return False  # begun, and not done
        raise UserError(f"{output} exists and is no prepared folder; {advice}")
    manifest = folder.read_json(MANIFEST)
    if not isinstance(manifest.get("inputs"), dict):
        raise UserError(f"{output}/{MANIFEST} is damaged; {advice}")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{output} was prepared by another version of this program; {advice}")
    if "tagged" in manifest:
        raise UserError(f"{output} was made by `realm tag`; {advice}")
    if manifest.get("inputs") != inputs:
        changed = [name for name, value in inputs.items() if manifest["inputs"].get(name) != value]
        raise UserError(f"{output} was prepared with other {' and '.join(changed)}; {advice}")
    return True


@contextmanager
def _unfinished(output: str, inputs: dict[str, Any], anywhere: bool, claim: str) -> Iterator[str]:
    """Where to work: a hidden folder beside `output`, which takes its name at the end, or the bucket itself.

    What an earlier run with the same inputs left is gone on with. After a UserError nothing stays, unless the same
    inputs can be gone on with.
    """
    if "://" in output:
        if not anywhere:
            raise UserError(f"--output={output}: processes of this machine write to its disk; give --beam, or a path")
        _begin(open_folder(output), inputs, claim)
        yield output
        open_folder(output).remove(ARTICLES)
        return
    final = Path(output)
    root = final.absolute().parent / f".{final.name}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(f"cannot write into {root.parent} ({fault.strerror}); choose another --output") from None
    with only_one(root):
        _begin(open_folder(root), inputs, claim)
        try:
            yield str(root)
        except (Resumable, StorageError):
            raise
        except UserError:
            shutil.rmtree(root, ignore_errors=True)
            raise
        except OSError as fault:
            if fault.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            place = Path(fault.filename or root).parent
            raise UserError(f"the disk of {place} is full; make room and repeat the command to go on") from None
        done = root.with_name(f".{final.name}.articles")
        shutil.rmtree(done, ignore_errors=True)
        (root / ARTICLES).rename(done)
        (root / ".lock").unlink()
        publish_folder(root, final)
        shutil.rmtree(done, ignore_errors=True)


def _begin(folder: Folder, inputs: dict[str, Any], claim: str) -> None:
    """Go on with what an earlier command with the same inputs left; what others left is removed."""
    record, wanted, found = f"{ARTICLES}/{INPUTS}", json.loads(json.dumps(inputs)), None
    if INPUTS in folder.names(ARTICLES):
        with suppress(UserError):
            found = folder.read_json(record)
    if found == wanted:
        logger.info("%s: going on with what was begun", folder.url)
    else:
        begun = sorted({*folder.names()} & {*OWN})
        if begun:
            logger.warning("%s: what was begun there with other inputs is removed: %s", folder.url, ", ".join(begun))
        for name in begun:
            folder.remove(name)
        folder.write_json(record, inputs)
    folder.write_json(f"{ARTICLES}/{CLAIM}", {"command": claim})


def _check_claim(root: str, claim: str) -> None:
    """Raise UserError where another command has taken the folder over: a bucket has no locks."""
    folder = open_folder(root)
    if CLAIM not in folder.names(ARTICLES) or folder.read_json(f"{ARTICLES}/{CLAIM}") != {"command": claim}:
        raise UserError(f"{root}: another command works there now; wait for it, or stop it and repeat this one")


def _extract(runner: Runner, root: str, name: str, texts: Texts, shards: int, skip_damage: bool) -> Counts:
    where = f"{root}/{ARTICLES}/{name}"
    with StageProgress(f"reading {name}", None) as bar:
        counts = runner.extract(texts, where, shards, skip_damage, bar.update)
    if texts.without_copies:
        if COPIES not in open_folder(where).names():
            runner.each(fingerprint_shard, where, shards)
        copies = leave_out_copies(where, shards)
        counts.dropped += copies
        counts.articles -= copies.total()
    return counts


def _pack(
    runner: Runner, root: str, name: str, shards: int, packer: PassagePacker, articles: int
) -> tuple[Summary, dict[str, Any]]:
    """Make a store of the shards of a source; what became of its articles, and what PREPARED.json says of the store."""
    where = f"{root}/{ARTICLES}/{name}"
    with StageProgress(name, articles) as bar:
        runner.pack(where, shards, packer, f"{root}/{name}", bar.update)
    summary, entries = Summary(), []
    for packed in packed_shards(open_folder(where), shards):
        summary.add(packed.summary)
        entries.append(packed.entry)
    if not summary.passages:
        raise UserError(f"none of {summary.articles} articles has words to store; check the texts")
    manifest = first_version(packer.limit, packer.tokenizer, entries)
    open_folder(f"{root}/{name}").write_json(STORE, manifest)
    rows, documents = (sum(entry[key] for entry in entries) for key in ("rows", "documents"))
    return summary, {"rows": rows, "documents": documents, "fingerprint": manifest["fingerprint"]}


def _check_gold(chosen: Chosen, root: str, shards: int, passages: str) -> None:
    """Raise UserError for a question whose gold passage does not exist, before the slow part begins."""
    places = chosen.gold()
    if not places:
        return
    for article in _articles(root, {"passages": shards}):
        places.pop(article.id, None)
    for gold, where in places.items():
        raise UserError(f"{where}: gold_passage_id {gold!r} is not in {passages}; mend it, or use --ignore-gold")


def _articles(root: str, shards: dict[str, int]) -> Iterator[Article]:
    """The articles of some sources, shard after shard."""
    for name, count in shards.items():
        folder = open_folder(f"{root}/{ARTICLES}/{name}")
        yield from chain.from_iterable(read_shard(folder, shard) for shard in range(count))


def _given_vocabulary(path: Path_) -> WordPiece:
    """A vocabulary from a file, with a warning where text in lower case never meets some of its pieces."""
    wordpiece = WordPiece.from_vocab(os.fspath(path))
    if cased := wordpiece.cased:
        logger.warning(
            "%s: %d word pieces have capital letters, such as %r, and are never used: text is lower-cased",
            path,
            len(cased),
            cased[0],
        )
    return wordpiece


def _vocabulary(root: str, given: WordPiece | None, size: int, shards: dict[str, int], characters: int) -> WordPiece:
    """The vocabulary, in its place: the one that is there, the given one, or one that is learned.

    It is learned from all texts, or from articles evenly spread over them when they are large.
    """
    folder = open_folder(root)
    with tempfile.TemporaryDirectory() as scratch:
        local = Path(scratch) / TOKENIZER
        if FILES[-1] in folder.names(TOKENIZER):
            local.mkdir()
            for name in FILES:
                (local / name).write_bytes(folder.read(f"{TOKENIZER}/{name}"))
            return WordPiece.load(local)
        articles = islice(_articles(root, shards), 0, None, 1 + characters // LEARN_FROM)
        texts = (f"{article.title}\n{article.text}" for article in articles)
        wordpiece = given or WordPiece.train(texts, size)
        wordpiece.save(local)
        for name in FILES:
            folder.write(f"{TOKENIZER}/{name}", (local / name).read_bytes())
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


def _print_summary(
    output: Path_,
    manifest: dict[str, Any],
    counts: dict[str, Counts],
    summaries: dict[str, Summary],
    dropped_questions: Counter[str],
    vocabulary: int,
    seconds: float,
) -> None:
    """Say on stdout what was made and what was left out, with a sample of it."""
    for name, summary in summaries.items():
        line = f"{name}: {summary.articles:,} articles -> {summary.passages:,} passages"
        dropped = counts[name].dropped + counts[name].damaged + Counter({"no words in the text": len(summary.wordless)})
        print(_with_reasons(line, "dropped", dropped) + _with_reasons("", "", summary.notes))
        for kind, times, names in counts[name].common_notes():
            print(f"  {times:,} × {kind}, such as {', '.join(one for one, _ in names[:5])}")
        for reason, samples in counts[name].samples.items():
            print(f"  {reason}, such as: " + " | ".join(sample[:100] for _, _, sample in samples))
    told = ", ".join(f"{split} {count:,}" for split, count in manifest["questions"].items()) or "none"
    print(_with_reasons(f"questions: {told}", "dropped", dropped_questions))
    print(f"vocabulary: {vocabulary:,} word pieces")
    print(f"{output} is ready after {seconds:.0f} seconds")


def _with_reasons(line: str, verb: str, reasons: Counter[str]) -> str:
    """`line; dropped 3 without words, 4 of other sources`: reasons that never happened are left out."""
    counted = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
    return f"{line}; {verb} {counted}".replace("  ", " ") if counted else line
