"""`realm prepare`: your documents and questions, turned once into a folder that every other job reads.

Everything is checked before the slow part begins, and everything is written into a hidden folder beside the output,
which takes the output's name at the very end: a crash or Ctrl-C leaves nothing that looks whole. Not for downloading
or converting data. Read `prepare` next; passages are made by `realm_jax.corpus.build`.
"""

import argparse
import errno
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from realm_jax.console import StageProgress
from realm_jax.corpus.build import Summary, build_store, check_limit
from realm_jax.corpus.jsonl import Article, Question, read_passages, read_questions, write_questions
from realm_jax.corpus.store import PassageStore
from realm_jax.errors import UserError
from realm_jax.storage import publish_folder, read_json, write_json_atomic
from realm_jax.text import spans as span_finders
from realm_jax.text.packing import DEFAULT_LIMIT
from realm_jax.text.wordpiece import WordPiece

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
MANIFEST = "PREPARED.json"
DEFAULT_VOCABULARY_SIZE = 30_522  # as many pieces as bert-base-uncased has
LEARN_FROM = 100_000_000  # characters of text to learn a vocabulary from: about a minute and a half

Path_ = str | os.PathLike[str]
_SPLIT_NAME = re.compile(r"[A-Za-z0-9_-]+")

EXAMPLES = """examples:
  realm prepare --passages passages.jsonl.gz --questions questions.jsonl.gz --output data
  realm prepare --passages wiki.jsonl.xz --pretraining news.jsonl.xz --questions train=NQ-open.train.jsonl \\
      --questions dev=NQ-open.dev.jsonl --vocab vocab.txt --max-answer-words 5 --output data

A line of a passage file is {"id": …, "title": …, "text": …}, of a question file {"question": …, "answers": […]} with
"gold_passage_id" and "split" if known. Files may be packed as .gz or .xz.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm prepare`."""
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--passages", required=True, metavar="FILE", help="JSONL file of the texts to retrieve from")
    add("--output", required=True, metavar="DIR", help="folder to make")
    add("--pretraining", metavar="FILE", help="JSONL file of the texts to pre-train on (default: the passages)")
    add(
        "--questions",
        metavar="[SPLIT=]FILE",
        nargs="+",
        action="extend",
        default=[],
        help='JSONL file of questions for a split such as train or dev; without SPLIT= the field "split" of each '
        "question decides",
    )
    add("--question-sources", metavar="NAME,NAME", help='keep only questions whose field "source" is one of these')
    add(
        "--max-answer-words",
        type=_positive,
        metavar="N",
        help="keep only answers of at most N words, and questions that have one; NQ-open has 5 (default: keep all)",
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
    add("--spans", default="rules", metavar="NAME", help="how salient spans are found (default: %(default)s)")
    add("--workers", type=_positive, metavar="N", help="processes to use (default: one a core)")


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
) -> None:
    """Write the prepared folder `output` (see docs/design.md) and print a summary.

    The arguments are those of the command, `realm prepare --help`; `vocab` goes before `vocabulary_size`. Does nothing
    when `output` was prepared from the same inputs with the same settings. Raises UserError for faults in the inputs
    and when `output` exists otherwise.
    """
    started = time.monotonic()
    output = Path(output)
    files = [_question_file(argument) for argument in questions]
    inputs = _inputs(passages, pretraining, vocab, files)
    settings = {
        "vocabulary_size": None if vocab else vocabulary_size,
        "limit": limit,
        "spans": spans,
        "question_sources": list(question_sources),
        "max_answer_words": max_answer_words,
    }
    if _is_prepared(output, inputs | {"settings": settings}):
        print(f"{output} was prepared from the same inputs with the same settings; nothing to do")
        return
    span_finders.finder(spans)
    check_limit(limit)
    given = None if vocab is None else _given_vocabulary(vocab)
    chosen = _read_all_questions(files, question_sources, max_answer_words)
    texts = {"passages": passages} | ({"pretraining": pretraining} if pretraining else {})
    counts, characters = _check_texts(texts, chosen)
    with _partial_folder(output) as folder:
        wordpiece = given or _learn_vocabulary(vocabulary_size, texts, characters)
        wordpiece.save(folder / "tokenizer")
        manifest: dict[str, Any] = {"format_version": FORMAT_VERSION, "tokenizer": wordpiece.fingerprint}
        manifest |= {"passages": None, "pretraining": None}
        summaries = {}
        for name, path in texts.items():
            with StageProgress(name, counts[name]) as bar:
                summaries[name] = build_store(
                    read_passages(path), wordpiece, folder / name, limit, spans, workers, bar.update
                )
            manifest[name] = _store_entry(folder / name)
        manifest["questions"] = _write_questions(chosen, folder)
        manifest |= {"limit": limit, "inputs": inputs | {"settings": settings}}
        write_json_atomic(folder / MANIFEST, manifest)
        publish_folder(folder, output)
    _print_summary(output, manifest, summaries, chosen.dropped, wordpiece.size, time.monotonic() - started)


class _QuestionFile(NamedTuple):
    split: str | None
    path: str


@dataclass
class _Chosen:
    """Questions by split, each with the place it came from, and how many were left out by reason."""

    splits: dict[str, list[tuple[Question, str]]]
    dropped: Counter[str]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _question_file(argument: Path_) -> _QuestionFile:
    """Take `SPLIT=FILE` apart; a path with a folder before its `=` has no split."""
    split, equals, path = os.fspath(argument).partition("=")
    if equals and _SPLIT_NAME.fullmatch(split):
        return _QuestionFile(split, path)
    return _QuestionFile(None, os.fspath(argument))


def _inputs(
    passages: Path_, pretraining: Path_ | None, vocab: Path_ | None, questions: list[_QuestionFile]
) -> dict[str, Any]:
    """Name and SHA-256 of each input file: what tells two preparations apart."""

    def entry(path: Path_ | None) -> dict[str, str] | None:
        return None if path is None else {"file": Path(path).name, "sha256": _sha256(path)}

    return {
        "passages": entry(passages),
        "pretraining": entry(pretraining),
        "vocab": entry(vocab),
        "questions": [{"split": file.split} | (entry(file.path) or {}) for file in questions],
    }


def _sha256(path: Path_) -> str:
    """The hash of a file's content. Raises UserError for a pipe or device: it would be empty at the second reading."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise UserError(f"{path} is no regular file, and inputs are read more than once; save it to one and name that")
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as fault:
        raise UserError(f"cannot read {path} ({fault.strerror}); check the path and its permissions") from None


def _is_prepared(output: Path, inputs: dict[str, Any]) -> bool:
    """Whether `output` is already what would be made. Raises UserError when it is anything else."""
    if not os.path.lexists(output):
        return False
    advice = "choose another --output or remove the folder"
    if not (output / MANIFEST).exists():
        raise UserError(f"{output} exists and is no prepared folder; {advice}")
    manifest = read_json(output / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{output} was prepared by another version of this program; {advice}")
    if manifest.get("inputs") != inputs:
        changed = [name for name, value in inputs.items() if manifest.get("inputs", {}).get(name) != value]
        raise UserError(f"{output} was prepared with other {' and '.join(changed)}; {advice}")
    return True


def _read_all_questions(files: list[_QuestionFile], sources: Sequence[str], max_answer_words: int | None) -> _Chosen:
    """Read the questions, divide them by split and leave out what the filters say."""
    splits: dict[str, list[tuple[Question, str]]] = defaultdict(list)
    dropped: Counter[str] = Counter()
    for file in files:
        for question in read_questions(file.path):
            where = f"{file.path}:{question.line}"
            split = file.split or _split_of(question, where)
            if sources and question.fields.get("source") not in sources:
                dropped["of other sources"] += 1
                continue
            answers = [answer for answer in question.answers if _is_short(answer, max_answer_words)]
            if not answers:
                dropped[f"without an answer of at most {max_answer_words} words"] += 1
                continue
            kept = Question(question.question, answers, question.gold_passage_id, question.fields, question.line)
            splits[split].append((kept, where))
    if files and not splits:
        raise UserError(f"no question is left of {sum(dropped.values()):,}; check --question-sources and the files")
    return _Chosen(dict(splits), dropped)


def _split_of(question: Question, where: str) -> str:
    """The split that a question names itself; it becomes a file name."""
    split = question.fields.get("split")
    if not isinstance(split, str) or not _SPLIT_NAME.fullmatch(split):
        raise UserError(f'{where}: the question has no usable "split"; add one or give the file as train=FILE')
    return split


def _is_short(answer: str, most: int | None) -> bool:
    return most is None or len(answer.split()) <= most


def _check_texts(texts: dict[str, Path_], chosen: _Chosen) -> tuple[dict[str, int], int]:
    """Read all texts once, so that faults show before hours of work; numbers of articles, and of characters in all.

    Raises UserError for a faulty line, and for a question whose gold passage does not exist.
    """
    places: dict[str, str] = {}
    for question, where in chain(*chosen.splits.values()):
        if question.gold_passage_id is not None:
            places.setdefault(question.gold_passage_id, where)
    counts = {}
    characters = 0
    for name, path in texts.items():
        counts[name] = 0
        for article in read_passages(path):
            counts[name] += 1
            characters += len(article.text)
            if name == "passages":
                places.pop(article.id, None)
    for gold, where in places.items():
        raise UserError(f"{where}: gold_passage_id {gold!r} is not in {texts['passages']}; mend or remove it")
    return counts, characters


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


def _learn_vocabulary(size: int, texts: dict[str, Path_], characters: int) -> WordPiece:
    """A vocabulary learned from all texts, or from articles evenly spread over them when they are large."""
    articles: Iterator[Article] = chain.from_iterable(read_passages(path) for path in texts.values())
    articles = islice(articles, 0, None, 1 + characters // LEARN_FROM)
    return WordPiece.train((f"{article.title}\n{article.text}" for article in articles), size)


@contextmanager
def _partial_folder(output: Path) -> Iterator[Path]:
    """A hidden folder beside `output`, gone at the end unless it was given another name."""
    parent = output.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for left in sorted(parent.glob(f".{output.name}.partial-*")):
            logger.warning("%s is left from an interrupted or running preparation; remove it if none is running", left)
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=parent))
    except OSError as fault:
        raise UserError(f"cannot write into {parent} ({fault.strerror}); choose another --output") from None
    try:
        yield folder
    except OSError as fault:
        if fault.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"the disk of {parent} is full; make room or choose another --output") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _store_entry(folder: Path) -> dict[str, Any]:
    """What PREPARED.json says of a store."""
    store = PassageStore.open(folder)
    return {"rows": len(store), "documents": store.documents, "fingerprint": store.fingerprint}


def _write_questions(chosen: _Chosen, folder: Path) -> dict[str, int]:
    """Write each split; the numbers of questions. A question whose gold passage had no words to store is left out."""
    store = PassageStore.open(folder / "passages")
    (folder / "questions").mkdir()
    counts = {}
    for split, questions in chosen.splits.items():
        kept = [
            question
            for question, _ in questions
            if question.gold_passage_id is None or store.rows_of(question.gold_passage_id)
        ]
        if len(kept) < len(questions):
            chosen.dropped["whose gold passage has no words"] += len(questions) - len(kept)
        if kept:
            write_questions(folder / "questions" / f"{split}.jsonl", kept)
            counts[split] = len(kept)
    return counts


def _print_summary(
    output: Path,
    manifest: dict[str, Any],
    summaries: dict[str, Summary],
    dropped_questions: Counter[str],
    vocabulary: int,
    seconds: float,
) -> None:
    """Say on stdout what was made and what was left out."""
    for name, summary in summaries.items():
        line = f"{name}: {summary.articles:,} articles -> {summary.passages:,} passages"
        print(_with_reasons(line, "dropped", summary.dropped) + _with_reasons("", "", summary.notes))
    counts = ", ".join(f"{split} {count:,}" for split, count in manifest["questions"].items()) or "none"
    print(_with_reasons(f"questions: {counts}", "dropped", dropped_questions))
    print(f"vocabulary: {vocabulary:,} word pieces")
    print(f"{output} is ready after {seconds:.0f} seconds")


def _with_reasons(line: str, verb: str, reasons: Counter[str]) -> str:
    """`line; dropped 3 without words, 4 of other sources`: reasons that never happened are left out."""
    counted = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
    return f"{line}; {verb} {counted}".replace("  ", " ") if counted else line
