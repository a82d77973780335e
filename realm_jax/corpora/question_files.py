"""The questions of `realm prepare`: read from files, divided by split, and filtered. Read `read_all` next."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from realm_jax.corpora.articles import Counts, Skipped
from realm_jax.data.lines import BadRecord
from realm_jax.data.questions import PUBLISHED, Question, parse_questions
from realm_jax.errors import UserError

_SPLIT_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # it becomes a file name
UNREADABLE, NO_SUCH_GOLD = "that cannot be read", "whose gold passage is not there"
ABSENT = "gold passage that is not there, of questions that have others"


class QuestionFile(NamedTuple):
    """A file of questions.

    Attributes:
        split: split of all questions; None if each question names its own.
        path: path of the file.
    """

    split: str | None
    path: str


class LocatedQuestion(NamedTuple):
    """A question with its location.

    Attributes:
        question: the question.
        where: path and line.
        file: number of its file.
    """

    question: Question
    where: str
    file: int

    def has_only(self, names: Collection[str]) -> bool:
        """Return True if the question has gold passages, and all of them are among these."""
        return bool(self.question.gold) and all(name in names for name in self.question.gold)


@dataclass
class SelectedQuestions:
    """Questions by split, and counts of the others.

    Attributes:
        splits: questions by split.
        counts: counts of all records.
        absent: gold passages that do not exist; they count as misses if a question has others.
    """

    splits: dict[str, list[LocatedQuestion]]
    counts: Counts
    absent: set[str] = field(default_factory=set)

    def gold(self) -> set[str]:
        """Return the ids of all gold passages."""
        return {name for located in chain.from_iterable(self.splits.values()) for name in located.question.gold}

    def check_golds(self, existing: Iterable[str], passages: str, skip_damage: bool) -> None:
        """Leave out, as damage, the questions of which no gold passage exists, and count the others that lack one.

        Args:
            existing: ids of the passages.
            passages: name of the passages, as the user wrote it.
            skip_damage: count such questions; otherwise raise UserError for the first one.
        """
        # `existing` may be the ids of millions of passages, so we keep only the few that are absent.
        self.absent = self.gold().difference(existing)
        for split, questions in self.splits.items():
            for located in questions:
                question, where, file = located
                if not located.has_only(self.absent):
                    self.counts.notes.update((ABSENT, name) for name in self.absent.intersection(question.gold))
                    continue
                gold = next(iter(question.gold))
                if not skip_damage:
                    raise UserError(
                        f"{where}: gold_passage_id {gold!r} is not in {passages}; correct it, or use --ignore-gold"
                    )
                lost = Skipped(NO_SUCH_GOLD, f"gold_passage_id {gold!r} is not there", where)
                self.counts.count_skipped(lost, file, question.line)
            self.splits[split] = [located for located in questions if not located.has_only(self.absent)]

    def with_stored_golds(self, wordless: Collection[str]) -> dict[str, list[Question]]:
        """Return the questions by split without those whose gold passages are all `wordless`, which are counted."""
        splits, gone = {}, self.absent.union(wordless)
        for split, questions in self.splits.items():
            stored = [located.question for located in questions if not located.has_only(gone)]
            if len(stored) < len(questions):
                self.counts.dropped["whose gold passage has no words"] += len(questions) - len(stored)
            if stored:
                splits[split] = stored
        return splits


def question_files(argument: str | os.PathLike[str]) -> list[QuestionFile]:
    """Return the file of `[SPLIT=]FILE`, or the judgment files of a folder of BEIR. Raises UserError if it has none."""
    name = os.fspath(argument)
    prefix, _, path = name.partition("=")
    split = prefix if path and _SPLIT_NAME.fullmatch(prefix) else None  # not part of a path
    path = path if split else name
    if not os.path.isdir(path):
        return [QuestionFile(split, path)]
    # A folder of BEIR has a file of judgments for each split.
    judgments = {name: os.path.join(path, "qrels", f"{name}.tsv") for name in ("train", "dev", "test")}
    judgments = {name: file for name, file in judgments.items() if os.path.isfile(file)}
    if not judgments:
        raise UserError(f"{path}: a folder without qrels/test.tsv, as BEIR has it; name a file of questions")
    if split not in (None, *judgments):
        raise UserError(
            f"--questions={name}: there are judgments of {', '.join(judgments)} there; leave out {split}=, or "
            f"name the file, as in {split}={next(iter(judgments.values()))}"
        )
    return [QuestionFile(name, file) for name, file in judgments.items() if split in (None, name)]


def published_questions(file: QuestionFile) -> list[Question] | None:
    """Return the questions of a published dataset; None for a file."""
    if not file.path.startswith(PUBLISHED):
        return None
    from realm_jax.data import open_qa  # here, because TFDS takes a second to import

    return open_qa.read(file.path, file.split)


def read_all(
    files: list[QuestionFile],
    sources: Collection[str],
    max_answer_words: int | None,
    ignore_gold: bool,
    skip_damage: bool = False,
) -> SelectedQuestions:
    """Read the questions, divide them by split and filter them.

    Args:
        files: as `question_files` returns them.
        sources: the values of the field `source` to keep; all if it is empty.
        max_answer_words: leave out longer answers, but no regular expressions.
        ignore_gold: forget the gold passages.
        skip_damage: count a bad record, with a sample, and do not raise UserError for it.

    Raises:
        UserError: a file or record cannot be read, or no question is left.
    """
    splits: dict[str, list[LocatedQuestion]] = defaultdict(list)
    counts = Counts()
    for number, file in enumerate(files):
        unanswerable, before = Counter[str](), counts.records
        # --- Open the file, or the published set
        questions: Iterable[tuple[int, Question | BadRecord]]
        if (published := published_questions(file)) is not None:
            questions = ((question.line, question) for question in published)
        else:
            questions = parse_questions(file.path, dropped=unanswerable)
        # --- Count, filter and sort its questions by split
        for line, question in questions:
            counts.records += 1
            split: Any = file.split
            if isinstance(question, Question) and split is None:
                split = question.fields.get("split")
                if not isinstance(split, str) or not _SPLIT_NAME.fullmatch(split):
                    question = BadRecord('the question has no usable "split"', "add one or give the file as train=FILE")
            if isinstance(question, BadRecord):
                if not skip_damage:
                    raise UserError(f"{file.path}:{line}: {question}")
                where = f"{Path(file.path).name}:{line}"
                counts.count_skipped(Skipped(UNREADABLE, str(question), where), number, line)
                continue
            if sources and question.fields.get("source") not in sources:
                counts.dropped["of other sources"] += 1
                continue
            # The words of a pattern say nothing about the length of an answer.
            most = None if question.is_regex else max_answer_words
            answers = [answer for answer in question.answers if most is None or len(answer.split()) <= most]
            gold = {} if ignore_gold else question.gold
            if question.answers and not answers:
                counts.dropped[f"without an answer of at most {max_answer_words} words"] += 1
            elif not answers and not gold:
                counts.dropped["without answers, their gold passages ignored"] += 1
            else:
                selected = replace(question, answers=answers, gold=gold)
                splits[split].append(LocatedQuestion(selected, f"{file.path}:{line}", number))
        if counts.records == before and not skip_damage:
            raise UserError(f'{file.path} holds no questions; give one {{"question", "answers"}} object per line')
        counts.dropped += unanswerable
        counts.records += unanswerable.total()
    if files and not splits:
        num_dropped = counts.dropped.total() + counts.damaged.total()
        raise UserError(f"no question is left of {num_dropped:,}; check --question-sources and the files")
    return SelectedQuestions(dict(splits), counts)
