"""The questions of `realm prepare`: read from files, divided by split, and filtered. Read `read_all` next."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from realm_jax.corpora.outcomes import CorruptRecord, Counts
from realm_jax.data.beir import judgement_files
from realm_jax.data.questions import PUBLISHED, Question, parse_questions, read_questions
from realm_jax.data.records import BadRecord, applied, strictly
from realm_jax.errors import UserError

_SPLIT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
UNREADABLE, NO_SUCH_GOLD = "that cannot be read", "whose gold passage is not there"
ABSENT = "gold passage that is not there, of questions that have others"


class QuestionFile(NamedTuple):
    split: str | None
    path: str


class LocatedQuestion(NamedTuple):
    """A question with the place it came from: path and line, and the number of its file."""

    question: Question
    where: str
    file: int


@dataclass
class SelectedQuestions:
    """Questions by split, and what became of the others (of Counts: records, dropped, damaged, samples, notes).

    absent: gold passages that do not exist. A question that has others keeps them, as misses.
    """

    splits: dict[str, list[LocatedQuestion]]
    counts: Counts
    absent: set[str] = field(default_factory=set)

    def to_manifest(self) -> dict[str, Any]:
        """What PREPARED.json says of questions that were left out."""
        found = self.counts.to_json()
        kept = {key: found[key] for key in ("records", "dropped", "damaged", "samples")}
        return kept | ({"notes": self.counts.notes_to_json()} if found["notes"] else {})

    def note_absent_golds(self, existing: Iterable[str]) -> list[LocatedQuestion]:
        """Find the gold passages that do not exist, and count them; the questions that have no other."""
        self.absent = self.gold().difference(existing)
        lost = [one for one in self.all() if _has_no_gold_but(one.question, self.absent)]
        kept = (one.question.gold for one in self.all() if not _has_no_gold_but(one.question, self.absent))
        self.counts.notes.update((ABSENT, name) for gold in kept for name in self.absent.intersection(gold))
        return lost

    def drop(self, lost: Collection[LocatedQuestion]) -> None:
        """Leave out, as damage, the questions about passages that do not exist."""
        for question, where, file in lost:
            fault = f"gold_passage_id {next(iter(question.gold))!r} is not there"
            self.counts.count_skipped(CorruptRecord(where, NO_SUCH_GOLD, fault), file, question.line)
        for split, questions in self.splits.items():
            self.splits[split] = [one for one in questions if not _has_no_gold_but(one.question, self.absent)]

    def all(self) -> Iterator[LocatedQuestion]:
        """The questions, split after split."""
        return chain.from_iterable(self.splits.values())

    def gold(self) -> set[str]:
        """Passages that are right for a question."""
        return {name for one in self.all() for name in one.question.gold}

    def with_stored_golds(self, wordless: Collection[str]) -> dict[str, list[Question]]:
        """The questions of each split that has any; one whose gold passages are `wordless` is left out and counted."""
        splits, gone = {}, self.absent.union(wordless)
        for split, questions in self.splits.items():
            kept = [one.question for one in questions if not _has_no_gold_but(one.question, gone)]
            if len(kept) < len(questions):
                self.counts.dropped["whose gold passage has no words"] += len(questions) - len(kept)
            if kept:
                splits[split] = kept
        return splits


def _has_no_gold_but(question: Question, names: Collection[str]) -> bool:
    return bool(question.gold) and all(name in names for name in question.gold)


def question_files(argument: str | os.PathLike[str]) -> list[QuestionFile]:
    """The file of `[SPLIT=]FILE`; of a folder of BEIR's the judgements of the split, or of each that it has.

    Raises UserError for a folder without them.
    """
    file = question_file(argument)
    if not os.path.isdir(file.path):
        return [file]
    found = judgement_files(file.path)
    if file.split not in (None, *found):
        known = ", ".join(found)
        raise UserError(
            f"--questions={file.split}={file.path}: there are judgements of {known} there; leave out {file.split}=, or "
            f"name the file, as in {file.split}={next(iter(found.values()))}"
        )
    return [QuestionFile(split, path) for split, path in found.items() if file.split in (None, split)]


def question_file(argument: str | os.PathLike[str]) -> QuestionFile:
    """Take `SPLIT=FILE` apart; a path with a folder before its `=` has no split."""
    split, equals, path = os.fspath(argument).partition("=")
    if equals and _SPLIT_NAME.fullmatch(split):
        return QuestionFile(split, path)
    return QuestionFile(None, os.fspath(argument))


def published_identity(file: QuestionFile) -> dict[str, str] | None:
    """Name and SHA-256 of the questions of a published set; None for a file."""
    if not file.path.startswith(PUBLISHED):
        return None
    return {"file": file.path, "sha256": _open_qa().fingerprint(_open_qa().read(file.path, file.split))}


def _open_qa() -> Any:
    """The module of published question sets; it takes a second to import."""
    try:
        from realm_jax.data import open_qa
    except (ImportError, AttributeError) as fault:  # TFDS goes on without what it could not import
        raise UserError(f"{PUBLISHED}: tensorflow-datasets cannot be imported ({fault}); install it again") from None
    return open_qa


def read_all(
    files: list[QuestionFile],
    sources: Sequence[str],
    max_answer_words: int | None,
    ignore_gold: bool,
    skip_damage: bool = False,
) -> SelectedQuestions:
    """Read the questions, divide them by split and leave out what the filters say.

    skip_damage: count a question that cannot be read, with a sample, in place of raising UserError for it.
    """
    splits: dict[str, list[LocatedQuestion]] = defaultdict(list)
    counts = Counts()
    for number, file in enumerate(files):
        unasked = Counter[str]()
        for line, record in _records(file, skip_damage, unasked):
            counts.records += 1
            if isinstance(record, BadRecord):
                where = f"{Path(file.path).name}:{line}"
                counts.count_skipped(CorruptRecord(where, UNREADABLE, str(record)), number, line)
                continue
            split, question = record
            if sources and question.fields.get("source") not in sources:
                counts.dropped["of other sources"] += 1
                continue
            kept, reason = _filtered(question, max_answer_words, ignore_gold)
            if reason:
                counts.dropped[reason] += 1
            else:
                splits[split].append(LocatedQuestion(kept, f"{file.path}:{line}", number))
        counts.dropped += unasked
        counts.records += unasked.total()
    if files and not splits:
        left_out = counts.dropped.total() + counts.damaged.total()
        raise UserError(f"no question is left of {left_out:,}; check --question-sources and the files")
    return SelectedQuestions(dict(splits), counts)


def _records(
    file: QuestionFile, skip_damage: bool, dropped: Counter[str]
) -> Iterator[tuple[int, tuple[str, Question] | BadRecord]]:
    """Lines, and questions with their splits. Raises UserError for a bad record unless `skip_damage`."""
    found: Iterator[tuple[int, Question | BadRecord]]
    if file.path.startswith(PUBLISHED):
        found = ((question.line, question) for question in _open_qa().read(file.path, file.split))
    elif skip_damage:
        found = parse_questions(file.path, dropped=dropped)
    else:
        found = ((question.line, question) for question in read_questions(file.path, dropped=dropped))
    records = applied(partial(_with_split, file.split), found)
    return records if skip_damage else strictly(file.path, records)


def _filtered(question: Question, max_answer_words: int | None, ignore_gold: bool) -> tuple[Question, str]:
    """A question with the answers and the gold passage that count, and why it is left out, if it is."""
    most = None if question.is_regex else max_answer_words  # patterns are no words
    answers = [answer for answer in question.answers if most is None or len(answer.split()) <= most]
    gold = {} if ignore_gold else question.gold
    kept = Question(question.question, answers, gold, question.fields, question.line)
    if question.answers and not answers:
        return kept, f"without an answer of at most {max_answer_words} words"
    return kept, "" if answers or gold else "without answers, their gold passages ignored"


def _with_split(split: str | None, question: Question) -> tuple[str, Question]:
    """A question with the split of its file, or that it names itself; it becomes a file name."""
    split = split or question.fields.get("split")
    if not isinstance(split, str) or not _SPLIT_NAME.fullmatch(split):
        raise BadRecord('the question has no usable "split"', "add one or give the file as train=FILE")
    return split, question
