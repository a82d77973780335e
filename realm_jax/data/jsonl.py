"""Articles and questions: what the files that `realm prepare` takes are read into, and our own JSON Lines files.

A record that cannot be used is a `BadRecord` in its place; `read_passages` and `read_questions` raise a UserError with
file and line instead. Not for Wikipedia dumps; files of other projects are turned into our records by
`realm_jax.data.formats`. Read `realm_jax.corpora.build` next: what becomes of the articles.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from realm_jax.data import patterns
from realm_jax.data.formats import passage_records, question_records
from realm_jax.data.lines import Path_, applied, check_text, strictly, text_field
from realm_jax.data.records import BadRecord, CorruptRecord
from realm_jax.errors import UserError

MATCHES = (None, "string", "exact", "norm", "none", "regex")  # only "regex" makes patterns of the answers
LONGEST_QUESTION = 2_000  # characters; the longest question of Natural Questions and SQuAD has a few hundred


@dataclass(frozen=True, slots=True)
class Article:
    """A text to pack into passages. `line` is its line in the file that it came from (0: from no file)."""

    id: str
    title: str
    text: str
    line: int = 0


@dataclass(frozen=True, slots=True)
class Question:
    """A question with the answer strings that count as right; `fields` holds whatever else its record had.

    Without answers it has a gold passage, by which retrieval is measured, or it is only asked.
    """

    question: str
    answers: list[str]
    gold_passage_id: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    line: int = 0

    @property
    def is_regex(self) -> bool:
        """Whether the answers are regular expressions."""
        return self.fields.get("match") == "regex"


def parse_passages(path: Path_) -> Iterator[tuple[int, Article | BadRecord]]:
    """Lines and articles of a file with `{"id": …, "title": …, "text": …}` on each line; the title may be absent.

    Other files that it understands are listed in `realm_jax.data.formats`. A malformed record, or one with a missing,
    empty or non-string id or text, is a BadRecord. Raises UserError for an id met twice, or a file without records.
    """
    line, lines_of_ids = 0, dict[str, int]()
    for line, article in applied(_article, passage_records(path)):
        if isinstance(article, BadRecord):
            yield line, article
            continue
        first = lines_of_ids.setdefault(article.id, line)
        if first != line:
            raise UserError(f"{path}:{line}: id {article.id!r} was already given on line {first}; ids must be unique")
        yield line, Article(article.id, article.title, article.text, line)
    if not line:
        raise UserError(f'{path} holds no passages; give one {{"id", "title", "text"}} object a line')


def read_passages(path: Path_) -> Iterator[Article]:
    """The articles of `parse_passages`. Raises UserError, with file and line, for a bad record too."""
    return (article for _, article in strictly(path, parse_passages(path)))


def articles_and_corrupt_records(path: Path_) -> Iterator[Article | CorruptRecord]:
    """`parse_passages` as a source of `realm prepare`, which counts what cannot be read."""
    for line, found in parse_passages(path):
        yield CorruptRecord(f"{path}:{line}", found.reason, found.message) if isinstance(found, BadRecord) else found


def parse_questions(
    path: Path_, check_patterns: bool = True, need_right: bool = True
) -> Iterator[tuple[int, Question | BadRecord]]:
    """Lines and questions of a file with `{"question": …, "answers": […]?, "gold_passage_id": …?}` on each line.

    Other files that it understands are listed in `realm_jax.data.formats`; of `"match": "regex"` the answers are
    regular expressions. A BadRecord is a malformed record, an empty or endless question, with `need_right` a question
    with neither answers nor a gold passage, and with `check_patterns` a regular expression that does not compile.
    Raises UserError for the file as a whole.
    """
    read = partial(_question, check_patterns=check_patterns, need_right=need_right)
    for line, question in applied(read, question_records(path)):
        yield line, question if isinstance(question, BadRecord) else replace(question, line=line)


def read_questions(path: Path_, check_patterns: bool = True, need_right: bool = True) -> list[Question]:
    """`parse_questions` as a list. Raises UserError, with file and line, for a bad record, and if there is none."""
    found = [question for _, question in strictly(path, parse_questions(path, check_patterns, need_right))]
    if not found:
        raise UserError(f'{path} holds no questions; give one {{"question", "answers"}} object a line')
    return found


def answered(questions: Iterable[Question]) -> list[Question]:
    """Those that have answers, which a reader can be trained with and measured by."""
    return [question for question in questions if question.answers]


def pattern_fault(question: Question) -> str | None:
    """What is wrong with the regular expressions of a question; None for answers that compile or are plain strings."""
    for answer in question.answers if question.is_regex else []:
        if (fault := patterns.pattern_error(answer)) is not None:
            return f"{answer[:40]!r} is not a regular expression ({fault})"
    return None


def match_fault(kind: Any) -> BadRecord | None:
    """What is wrong with the kind of match of a record with answers; None for one of MATCHES."""
    if isinstance(kind, str | None) and kind in MATCHES:
        return None
    known = ", ".join(f'"{one}"' for one in MATCHES if one not in (None, "regex"))
    advice = f'write "regex" for answers that are patterns, or one of {known}'
    return BadRecord(f'"match" is {json.dumps(kind)[:40]}', advice)


def question_lines(questions: Iterable[Question]) -> bytes:
    """A file of questions that `read_questions` gives back, all further fields included."""
    lines = (json.dumps(_question_record(question), ensure_ascii=False) + "\n" for question in questions)
    return "".join(lines).encode("utf-8")


def _article(record: dict[str, Any]) -> Article:
    """Check one record of a passage file."""
    return Article(text_field(record, "id"), text_field(record, "title", required=False), text_field(record, "text"))


def _question(record: dict[str, Any], check_patterns: bool, need_right: bool) -> Question:
    """Check one record of a question file."""
    fields = dict(record)
    question = text_field(record, "question")
    if len(question) > LONGEST_QUESTION:
        message = f"the question has {len(question):,} characters, more than {LONGEST_QUESTION:,}"
        raise BadRecord(message, "shorten it or remove the line")
    key = "answers" if "answers" in record else "answer"
    answers = [] if record.get(key) is None else record[key]
    if not isinstance(answers, list):
        raise BadRecord(f'"{key}" must be a list of strings', "correct it or remove the line")
    for answer in answers:
        check_text(answer, key)
    gold = None if record.get("gold_passage_id") is None else text_field(record, "gold_passage_id")
    if need_right and not answers and gold is None:
        raise BadRecord('the question has no answers and no "gold_passage_id"', "add one or remove the line")
    if answers and (fault := match_fault(fields.get("match"))) is not None:
        raise fault
    for known in ("question", key, "gold_passage_id"):
        fields.pop(known, None)
    checked = Question(question, list(answers), gold, fields)
    if check_patterns and (wrong := pattern_fault(checked)) is not None:
        raise BadRecord(wrong, "correct the pattern or remove the line")
    return checked


def _question_record(question: Question) -> dict[str, Any]:
    """The JSON object of a question: the fields that the system reads come first."""
    record: dict[str, Any] = {"question": question.question, "answers": question.answers}
    if question.gold_passage_id is not None:
        record["gold_passage_id"] = question.gold_passage_id
    return record | question.fields
