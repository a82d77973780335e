"""Questions: what the files that `realm prepare` takes are read into, and our own JSON Lines files.

| files | recognised by |
|---|---|
| `{"question", "answers"}`; NQ-open, DrQA, ORQA: `answer`; Atlas, FiD: `target`, `ctxs` | JSON objects |
| FlashRAG: `golden_answers` | JSON objects |
| `nq-train.json` of DPR, retriever or reader: `positive_ctxs`, `ctxs`, … | JSON objects |
| WebQuestions of brmson: `{"qId", "qText", "answers"}` | JSON objects |
| `nq-test.qa.csv` of DPR: question, list of answers in Python's spelling | `.tsv`, `.csv` with two columns |
| CuratedTREC of brmson: id, type, question, regular expression | `.tsv`, `.csv` with four columns |
| judgements of BEIR and TREC, whose questions lie in `queries.jsonl` | `has_judgements` of `beir.py` |
| SQuAD: `data[].paragraphs[].qas[]` | `.json`, an object with `data` |
| SQuAD as Hugging Face has it: `context`, `question`, `answers.text` | JSON objects with all three |

JSON objects stand one a line or in one array, or are the rows of a Parquet file; any file may be packed as `.gz`, `.xz`
or `.bz2`. The answers of a file with `curatedtrec` in its name are regular expressions, as ORQA has it. Passages that
came with a question are left out, the first positive one of DPR becomes its gold passage. A record that cannot be used
is a `BadRecord` in its place; `read_questions` raises a UserError with file and line instead. A question that a set
itself says has nothing right is only counted. Not for passages: see `realm_jax.corpora.texts`.
"""

import ast
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from realm_jax.data import patterns
from realm_jax.data.beir import has_judgements, judged_records
from realm_jax.data.lines import (
    OTHER_COLUMNS,
    Records,
    is_parquet,
    is_table,
    json_records,
    parquet_records,
    table_rows,
    text_lines,
)
from realm_jax.data.records import BadRecord, Path_, applied, check_text, strictly, text_field
from realm_jax.data.squad import is_squad, squad_records, with_answers
from realm_jax.errors import UserError

MATCHES = (None, "string", "exact", "norm", "none", "regex")  # only "regex" makes patterns of the answers
LONGEST_QUESTION = 2_000  # characters; the longest question of Natural Questions and SQuAD has a few hundred
LARGEST_GRADE = 1_000  # of a gold passage
GRADES = f"each grade a whole number of at most {LARGEST_GRADE:,}"
PUBLISHED = "tfds:"  # begins the name of a set, `tfds:open_qa/nq_open`, where a file of questions may stand
PATTERNS = "curatedtrec"  # in the name of a file whose answers are regular expressions
_RETRIEVED = ("ctxs", "passages", "positive_ctxs", "negative_ctxs", "hard_negative_ctxs")
_STRING = r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+\""""
# Nothing but strings and commas, so that no text, however long or deep, does more than its length of work.
_STRINGS = re.compile(rf"\s*\[\s*(?:(?:{_STRING})\s*(?:,\s*(?:{_STRING})\s*)*+,?\s*)?\]\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Question:
    """A question with the answer strings that count as right; `fields` holds whatever else its record had.

    gold: the documents that are right for it, with grades from 1. Without answers it has one at least, by which
    retrieval is measured, or it is only asked.
    """

    question: str
    answers: list[str]
    gold: dict[str, int] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    line: int = 0

    @property
    def is_regex(self) -> bool:
        """Whether the answers are regular expressions."""
        return self.fields.get("match") == "regex"


def parse_questions(
    path: Path_, check_patterns: bool = True, need_right: bool = True, dropped: Counter[str] | None = None
) -> Iterator[tuple[int, Question | BadRecord]]:
    """Lines and questions of a file with `{"question": …, "answers": […]?, "gold_passage_id": …?}` on each line.

    `"gold_passages": {id: grade}` names several gold passages; what has a grade of 0 or less is none. Other files are
    understood too, as listed above; of `"match": "regex"` the answers are regular expressions. A BadRecord is a
    malformed record, an empty or endless question, with `need_right` a question with neither answers nor gold passages,
    and with `check_patterns` a regular expression that does not compile. dropped: counts, by reason, what is no
    question by the file's own word. Raises UserError for the file as a whole.
    """
    read = partial(_question, check_patterns=check_patterns, need_right=need_right)
    for line, question in applied(read, _records(path, Counter() if dropped is None else dropped)):
        yield line, question if isinstance(question, BadRecord) else replace(question, line=line)


def read_questions(
    path: Path_, check_patterns: bool = True, need_right: bool = True, dropped: Counter[str] | None = None
) -> list[Question]:
    """`parse_questions` as a list. Raises UserError, with file and line, for a bad record, and if there is none."""
    found = [question for _, question in strictly(path, parse_questions(path, check_patterns, need_right, dropped))]
    if not found:
        raise UserError(f'{path} holds no questions; give one {{"question", "answers"}} object a line')
    return found


def checked_questions(records: Iterable[Mapping[str, Any]]) -> list[Question]:
    """Questions of records as a file has them. Raises UserError, with the number of the record from 0, for a bad one,
    and if there is none."""
    found = []
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise UserError(f'question {number}: is no record; give {{"question": …, "answers": […]}}')
        try:
            found.append(_question(dict(record), check_patterns=True, need_right=True))
        except BadRecord as fault:
            raise UserError(f"question {number}: {fault}") from None
    if not found:
        raise UserError("there are no questions; give one at least")
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
    gold = _checked_gold(record)
    if need_right and not answers and not gold:
        raise BadRecord('the question has no answers and no "gold_passage_id"', "add one or remove the line")
    if answers and (fault := match_fault(fields.get("match"))) is not None:
        raise fault
    for known in ("question", key, "gold_passage_id", "gold_passages"):
        fields.pop(known, None)
    checked = Question(question, list(answers), gold, fields)
    if check_patterns and (wrong := pattern_fault(checked)) is not None:
        raise BadRecord(wrong, "correct the pattern or remove the line")
    return checked


def _question_record(question: Question) -> dict[str, Any]:
    """The JSON object of a question: the fields that the system reads come first."""
    return {"question": question.question, "answers": question.answers} | gold_record(question.gold) | question.fields


def gold_record(gold: dict[str, int]) -> dict[str, Any]:
    """The field that names gold passages: `gold_passage_id` of a single one of grade 1, else `gold_passages`."""
    if not gold:
        return {}
    return {"gold_passage_id": next(iter(gold))} if [*gold.values()] == [1] else {"gold_passages": gold}


def gold_of(record: dict[str, Any]) -> dict[str, int]:
    """Grades of the gold passages that a record names, by id; `gold_record` the other way."""
    if (single := record.get("gold_passage_id")) is not None:
        return {str(single): 1}
    return {name: grade for name, grade in (record.get("gold_passages") or {}).items() if grade > 0}


def are_grades(value: Any) -> bool:
    """Whether it is an object of ids and grades; of larger ones nDCG would take much memory."""
    return isinstance(value, dict) and all(
        name.strip() and type(grade) is int and grade <= LARGEST_GRADE for name, grade in value.items()
    )


def _checked_gold(record: dict[str, Any]) -> dict[str, int]:
    single, several = (record.get(key) is not None for key in ("gold_passage_id", "gold_passages"))
    if single and several:
        raise BadRecord('the question has "gold_passage_id" and "gold_passages"', "leave one out")
    if single:
        text_field(record, "gold_passage_id")
    if several and not are_grades(record["gold_passages"]):
        raise BadRecord('"gold_passages" is no object of ids and grades', f"write {{id: grade}}, {GRADES}")
    return gold_of(record)


# --- Files of other projects ------------------------------------------------------------------------------------------


def _records(path: Path_, dropped: Counter[str]) -> Records:
    """Lines and records `{"question", "answers", …}` of a file. Raises UserError for the file as a whole.

    `"match": "regex"` marks answers that are regular expressions; `answer` may stand for `answers`.
    """
    if has_judgements(path):
        records = judged_records(path, dropped)
    elif is_table(path):
        records = _table(path)
    elif is_squad(path):
        records = squad_records(path, dropped)
    else:
        read = parquet_records if is_parquet(path) else json_records
        records = applied(_question_object, with_answers(read(path), dropped))
    has_patterns = PATTERNS in Path(path).name.lower()
    return applied(lambda record: {"match": "regex"} | record, records) if has_patterns else records


def _table(path: Path_) -> Records:
    """Questions of a table; the columns of its first line that has any say which one it is."""
    columns = next((text for _, text in text_lines(path) if text.strip()), "\t").count("\t") + 1
    if columns not in (2, 4):
        raise UserError(
            f"{path}:1: the first line has {columns} columns; tables of questions have two (question, list of "
            "answers) or four (id, type, question, regular expression), judgements three (query-id, corpus-id, score) "
            "or four (query-id, 0, corpus-id, score); write tabs between them"
        )
    return applied(_listed_answers, table_rows(path)) if columns == 2 else applied(_curated_trec, _tabbed(path))


def _listed_answers(row: list[str]) -> dict[str, Any]:
    """A row `question, ['answer', 'answer']`."""
    if len(row) != 2:
        raise BadRecord(
            f"the row has {len(row)} columns, not two: question, list of answers", "correct it", OTHER_COLUMNS
        )
    return {"question": row[0], "answers": _string_list(row[1])}


def _string_list(text: str) -> list[str]:
    """The strings of a list in Python's spelling."""
    try:
        if not _STRINGS.fullmatch(text):
            raise ValueError
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of the backslashes of regular expressions
            warnings.simplefilter("ignore", DeprecationWarning)  # the same, before Python 3.12
            strings: list[str] = ast.literal_eval(text.strip())
        "".join(strings).encode("utf-8")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        message = f"the second column holds {text[:40]!r}, not a list of quoted answers"
        raise BadRecord(message, "write ['one', 'two']", "not a list of quoted answers") from None
    return strings


def _tabbed(path: Path_) -> Iterator[tuple[int, list[str]]]:
    """Rows of columns between tabs; quotes in them are characters like any other. Blank lines are skipped."""
    yield from ((line, text.split("\t")) for line, text in text_lines(path) if text.strip())


def _curated_trec(row: list[str]) -> dict[str, Any]:
    """A row `id, type, question, regular expression`."""
    if len(row) != 4:
        raise BadRecord(f"the row has {len(row)} columns, the first line four", "correct the row", OTHER_COLUMNS)
    return {"question": row[2], "answers": [row[3]], "match": "regex", "id": row[0]}


def _question_object(record: dict[str, Any]) -> dict[str, Any]:
    """A question of a JSON object, with our names for its fields."""
    if "qText" in record and "question" not in record:
        record["question"] = record.pop("qText")
    if "qId" in record:
        record.setdefault("id", record.pop("qId"))
    if record.get("answers") is None and record.get("answer") is None:
        if "golden_answers" in record:
            record["answers"] = record.pop("golden_answers")
        elif "target" in record:
            record["answers"] = [record.pop("target")]
    if record.get("gold_passage_id") is None and "positive_ctxs" in record:
        record["gold_passage_id"] = _first_passage(record["positive_ctxs"])
    for key in _RETRIEVED:
        record.pop(key, None)
    return record


def _first_passage(passages: Any) -> str | None:
    """The id of the first passage, where it has one; DPR puts the best first, and has two names for ids."""
    first = passages[0] if isinstance(passages, list) and passages else None
    if not isinstance(first, dict):
        return None
    found = first.get("passage_id", first.get("psg_id"))
    return str(found) if isinstance(found, str | int) and str(found).strip() else None
