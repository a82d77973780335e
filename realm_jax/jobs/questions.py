"""The questions of `realm prepare`: read from files, divided by split, and filtered. Read `read_all` next."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from realm_jax.corpus.jsonl import Question, read_questions, write_questions
from realm_jax.data.question_sets import PREFIX
from realm_jax.errors import UserError

_SPLIT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class QuestionFile(NamedTuple):
    split: str | None
    path: str


@dataclass
class Chosen:
    """Questions by split, each with the place it came from, and how many were left out by reason."""

    splits: dict[str, list[tuple[Question, str]]]
    dropped: Counter[str]

    def gold(self) -> dict[str, str]:
        """Passages that hold the answer of a question, each with the place of the first such question."""
        places: dict[str, str] = {}
        for question, where in chain(*self.splits.values()):
            if question.gold_passage_id is not None:
                places.setdefault(question.gold_passage_id, where)
        return places

    def write(self, folder: Path, wordless: Collection[str]) -> dict[str, int]:
        """Write each split; the numbers of questions. Left out are those whose gold passage is `wordless`."""
        counts = {}
        for split, questions in self.splits.items():
            kept = [question for question, _ in questions if question.gold_passage_id not in wordless]
            if len(kept) < len(questions):
                self.dropped["whose gold passage has no words"] += len(questions) - len(kept)
            if kept:
                folder.mkdir(exist_ok=True)
                write_questions(folder / f"{split}.jsonl", kept)
                counts[split] = len(kept)
        return counts


def question_file(argument: str | os.PathLike[str]) -> QuestionFile:
    """Take `SPLIT=FILE` apart; a path with a folder before its `=` has no split."""
    split, equals, path = os.fspath(argument).partition("=")
    if equals and _SPLIT_NAME.fullmatch(split):
        return QuestionFile(split, path)
    return QuestionFile(None, os.fspath(argument))


def published_identity(file: QuestionFile) -> dict[str, str] | None:
    """Name and SHA-256 of the questions of a published set; None for a file."""
    if not file.path.startswith(PREFIX):
        return None
    return {"file": file.path, "sha256": _open_qa().fingerprint(_open_qa().read(file.path, file.split))}


def _open_qa() -> Any:
    """The module of published question sets; it takes a second to import."""
    try:
        from realm_jax.data import open_qa
    except (ImportError, AttributeError) as fault:  # TFDS goes on without what it could not import
        raise UserError(f"{PREFIX}: tensorflow-datasets cannot be imported ({fault}); install it again") from None
    return open_qa


def read_all(
    files: list[QuestionFile], sources: Sequence[str], max_answer_words: int | None, ignore_gold: bool
) -> Chosen:
    """Read the questions, divide them by split and leave out what the filters say."""
    splits: dict[str, list[tuple[Question, str]]] = defaultdict(list)
    dropped: Counter[str] = Counter()
    for file in files:
        published = file.path.startswith(PREFIX)
        for question in _open_qa().read(file.path, file.split) if published else read_questions(file.path):
            where = f"{file.path}:{question.line}"
            split = file.split or _split_of(question, where)
            if sources and question.fields.get("source") not in sources:
                dropped["of other sources"] += 1
                continue
            most = None if question.is_regex else max_answer_words  # patterns are no words
            answers = [answer for answer in question.answers if _is_short(answer, most)]
            if not answers:
                dropped[f"without an answer of at most {max_answer_words} words"] += 1
                continue
            gold = None if ignore_gold else question.gold_passage_id
            kept = Question(question.question, answers, gold, question.fields, question.line)
            splits[split].append((kept, where))
    if files and not splits:
        raise UserError(f"no question is left of {sum(dropped.values()):,}; check --question-sources and the files")
    return Chosen(dict(splits), dropped)


def _split_of(question: Question, where: str) -> str:
    """The split that a question names itself; it becomes a file name."""
    split = question.fields.get("split")
    if not isinstance(split, str) or not _SPLIT_NAME.fullmatch(split):
        raise UserError(f'{where}: the question has no usable "split"; add one or give the file as train=FILE')
    return split


def _is_short(answer: str, most: int | None) -> bool:
    return most is None or len(answer.split()) <= most
