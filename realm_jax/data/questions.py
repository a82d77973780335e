"""Questions in one normal form, and a converter for each kind of question file.

| converter | files |
|---|---|
| `_judged_records` | judgments of BEIR or TREC, with `queries.jsonl` in the same folder or in the one above |
| `_answers_row` | `.tsv` or `.csv` of two columns: question, list of answers in Python's spelling (DPR) |
| `_curated_trec_row` | `.tsv` or `.csv` of four columns: id, type, question, regular expression (CuratedTREC) |
| `_squad_records` | `.json`, one object with `data[].paragraphs[].qas[]` (SQuAD, XQuAD, MLQA, GermanQuAD) |
| `_squad_question` | objects with `context`, `question` and `answers.text` (SQuAD on Hugging Face) |
| `_json_question` | objects of our own, NQ-open, DrQA, ORQA, WebQuestions, DPR, FiD, Atlas and FlashRAG |

JSON objects are one per line, or in one array, or the rows of a Parquet file. Any file may be packed. Read
`parse_questions` next. Not for passages: see `realm_jax.corpora.texts`.
"""

import ast
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from realm_jax.data import patterns
from realm_jax.data.input_files import UNPACKING_ERRORS, open_unpacked
from realm_jax.data.lines import (
    BadRecord,
    Path_,
    Records,
    applied,
    check_characters,
    ending_of,
    json_records,
    parquet_records,
    strictly,
    table_rows,
    text_lines,
)
from realm_jax.errors import UserError

PUBLISHED = "tfds:"  # begins the name of a dataset, `tfds:open_qa/nq_open`, which may replace a file name
CURATED_TREC = "curatedtrec"  # in a file name: its answers are regular expressions, as in ORQA
MATCHES = (None, "string", "exact", "norm", "none", "regex")  # only "regex" makes answers regular expressions
LONGEST_QUESTION = 10_000  # characters; queries of ArguAna are arguments of several thousand
LARGEST_GRADE = 1_000  # of a gold passage; nDCG needs memory in proportion to the largest grade
GRADES = f"each grade a whole number of at most {LARGEST_GRADE:,}"
IMPOSSIBLE, UNJUDGED = "that no passage answers (is_impossible)", "without a passage of a grade above 0"

# Judgments: their possible file endings, BEIR's header, and TREC's second column, which has no meaning.
JUDGMENT_ENDINGS = (".tsv", ".csv", ".txt", ".trec", ".qrels", ".qrel")
JUDGMENT_COLUMNS = ["query-id", "corpus-id", "score"]
ITERATIONS = ("0", "Q0", "q0")

# Passages that came with a question; they are not read, because passages come from the corpus.
_RETRIEVED = ("ctxs", "passages", "positive_ctxs", "negative_ctxs", "hard_negative_ctxs")
_SQUAD_START = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*("version"\s*:[^,]*,\s*)?"data"\s*:\s*\[')
_STRING = r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+\""""
# A list of nothing but strings, so that ast.literal_eval takes time in proportion to the length of any text.
_STRINGS = re.compile(rf"\s*\[\s*(?:(?:{_STRING})\s*(?:,\s*(?:{_STRING})\s*)*+,?\s*)?\]\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its correct answers; one without answers has gold passages, or is only asked.

    Attributes:
        question: its text.
        answers: regular expressions if `is_regex`, else strings.
        gold: grades from 1, by passage id.
        fields: all other fields of the record.
        line: line of its file, from 1; the number of the record in formats without lines.
    """

    question: str
    answers: list[str]
    gold: dict[str, int] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    line: int = 0

    @property
    def is_regex(self) -> bool:
        """Return True if the answers are regular expressions."""
        return self.fields.get("match") == "regex"


class Unanswerable(BadRecord):
    """A question that has no answer according to its own dataset; it is counted and is no error."""


# --- Judgments of BEIR and TREC ---------------------------------------------------------------------------------------


def queries_file(path: Path_) -> str:
    """Return the path of the question texts of a judgment file: in its folder, or in the one above."""
    folder = os.path.dirname(os.path.abspath(path))
    same, above = (os.path.join(parent, "queries.jsonl") for parent in (folder, os.path.dirname(folder)))
    return same if os.path.isfile(same) else above


def has_judgments(path: Path_) -> bool:
    """Return True if a file holds judgments, which is decided by the first row that can only be one kind of row.

    Raises UserError for a TREC ranking, and if every row may be a judgment of TREC or a question of CuratedTREC.
    """
    if ending_of(path) not in JUDGMENT_ENDINGS:
        return False
    # Read on while a row may be a judgment of TREC or a question of CuratedTREC.
    unclear_line = width = 0
    for line, text in text_lines(path):
        row, has_tabs = _columns(text), "\t" in text
        width = width or len(row)
        match row:
            case []:
                continue
            case _ if len(row) != width:
                break
            case [_, iteration, _, _] if iteration in ITERATIONS:
                return True
            case [_, _, name, _] if has_tabs and len(name.split()) > 1:
                return False  # a question of CuratedTREC, because document ids of TREC have no spaces
            case [_, _, _, grade] if _whole_number(grade) is not None:
                unclear_line = unclear_line or line
            case [_, _, _, _] if has_tabs:
                continue
            case [_, _, grade]:
                return (has_tabs and _is_table(path)) or row == JUDGMENT_COLUMNS or _whole_number(grade) is not None
            case [_, iteration, _, rank, _, _] if iteration in ITERATIONS and _whole_number(rank) is not None:
                raise UserError(f"{path}:{line}: is a ranking (a run of TREC), not judgments; name the file of qrels")
            case _:
                return False
    if unclear_line:
        raise UserError(
            f"{path}:{unclear_line}: may be a judgment of TREC or a question of CuratedTREC; write 0 into the second "
            'column of judgments, or give questions as {"question", "answers", "match": "regex"}, one per line'
        )
    return False


def _judged_records(path: Path_) -> Records:
    """Yield a record for each query of a judgment file, with the line of its first judgment."""
    # --- The judgments of each query
    golds: dict[str, dict[str, int]] = {}
    lines: dict[str, int] = {}
    may_be_ranking = True
    for line, text in text_lines(path):
        row = _columns(text)
        may_be_ranking &= row != JUDGMENT_COLUMNS and len(row) != 4
        if row in ([], JUDGMENT_COLUMNS):
            continue
        cells = row[:1] + row[2:] if len(row) == 4 and row[1] in ITERATIONS else row
        if len(cells) != 3 or (grade := _whole_number(cells[2])) is None:
            message = f"holds {' '.join(row)[:60]!r}, not {', '.join(JUDGMENT_COLUMNS)} (a whole number)"
            yield line, BadRecord(message, "correct or remove the line")
            continue
        query, document, _ = cells
        lines.setdefault(query, line)
        golds.setdefault(query, {})[document] = grade
    counts_up = all([*gold.values()] == [*range(1, len(gold) + 1)] for gold in golds.values())
    if may_be_ranking and counts_up and len(golds) < sum(map(len, golds.values())):
        raise UserError(
            f"{path}: may be a ranking (query, document, rank), as the numbers of each query are 1, 2, 3 …; "
            f"put {'<tab>'.join(JUDGMENT_COLUMNS)} into the first line of judgments, or name the file of qrels"
        )
    # --- The texts of these queries
    queries = queries_file(path)
    if not os.path.isfile(queries):
        raise UserError(f"{queries} is not there; put queries.jsonl of the judgments there")
    records = (record for _, record in strictly(queries, json_records(queries)))
    texts = {query: record.get("text", "") for record in records if (query := str(record.get("_id"))) in golds}
    for query, gold in golds.items():
        if max(gold.values()) <= 0:
            yield lines[query], Unanswerable(UNJUDGED, "judge a passage")
        elif query in texts:
            yield lines[query], {"question": texts[query], "gold_passages": gold, "id": query}
        else:
            yield lines[query], BadRecord(f"query {query!r} is not in {queries}", "put both files of one set there")


def _columns(text: str) -> list[str]:
    """Return the columns of a judgment: between tabs, or between spaces if the line has no tab; [] if it is blank."""
    return text.split("\t") if "\t" in text and text.strip() else text.split()


def _whole_number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


# --- Tables -----------------------------------------------------------------------------------------------------------


def _is_table(path: Path_) -> bool:
    return ending_of(path) in (".tsv", ".csv")


def _table_records(path: Path_) -> Records:
    """Return the questions of a table; the number of columns of its first line tells its kind."""
    lines = ((line, text) for line, text in text_lines(path) if text.strip())
    first = next(lines, (1, "\t"))
    columns = first[1].count("\t") + 1
    if columns == 2:
        return applied(_answers_row, table_rows(path))
    if columns == 4:
        return applied(_curated_trec_row, chain([first], lines))
    raise UserError(
        f"{path}:1: the first line has {columns} columns; tables of questions have two (question, list of "
        "answers) or four (id, type, question, regular expression), judgments three (query-id, corpus-id, score) "
        "or four (query-id, 0, corpus-id, score); write tabs between them"
    )


def _answers_row(row: list[str]) -> dict[str, Any]:
    """Convert a row `question, ['answer', 'answer']`."""
    if len(row) != 2:
        raise BadRecord(f"the row has {len(row)} columns, not two: question, list of answers", "correct it")
    try:
        if not _STRINGS.fullmatch(row[1]):
            raise ValueError
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about backslashes of regular expressions
            answers: list[str] = ast.literal_eval(row[1].strip())
        "".join(answers).encode("utf-8")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        message = f"the second column holds {row[1][:40]!r}, not a list of quoted answers"
        raise BadRecord(message, "write ['one', 'two']") from None
    return {"question": row[0], "answers": answers}


def _curated_trec_row(text: str) -> dict[str, Any]:
    """Convert a row `id, type, question, regular expression`, in which a quote is a character like any other."""
    row = text.split("\t")
    if len(row) != 4:
        raise BadRecord(f"the row has {len(row)} columns, the first line four", "correct the row")
    return {"question": row[2], "answers": [row[3]], "match": "regex", "id": row[0]}


# --- JSON -------------------------------------------------------------------------------------------------------------


def _is_squad(path: Path_) -> bool:
    """Return True if a `.json` file, packed or not, begins as SQuAD's do."""
    if ".json" not in Path(str(path).lower()).suffixes:
        return False
    with open_unpacked(path) as stream:
        try:
            return _SQUAD_START.match(stream.read(1_000)) is not None
        except UNPACKING_ERRORS:
            return False


def _squad_records(path: Path_) -> Records:
    """Return the questions of a SQuAD file, with their numbers from 1 instead of lines."""
    try:
        with open_unpacked(path) as stream:
            articles = json.load(stream)["data"]
        questions = []
        for article in articles:
            is_question = "question" in article  # as in files of Hugging Face
            questions += [article] if is_question else [qa for part in article["paragraphs"] for qa in part["qas"]]
        return applied(_squad_question, enumerate(questions, start=1))
    except UNPACKING_ERRORS as error:
        reason = f"truncated or damaged ({error})"
    except (ValueError, RecursionError) as error:
        reason = f"not readable as JSON ({error})"
    except (KeyError, TypeError) as error:
        reason = f"not data[].paragraphs[].qas[], as SQuAD's are ({error!r})"
    raise UserError(f"{path}: {reason}; fetch or make it again")


def is_flat_squad(record: Any) -> bool:
    """Return True if a record is a SQuAD question as Hugging Face has it, next to its context."""
    if not isinstance(record, dict) or not {"context", "question"} <= record.keys():
        return False
    answers = record.get("answers")
    return isinstance(answers, dict) and isinstance(answers.get("text"), list)


def _squad_question(record: Any) -> dict[str, Any]:
    """Convert a question of SQuAD. Raises Unanswerable if it is marked as impossible, or flat and without answers."""
    try:
        check_characters(record)
        entries = record.get("answers") or ()
        texts = entries["text"] if isinstance(entries, dict) else [answer["text"] for answer in entries]
        if not isinstance(texts, list):
            raise TypeError
        answers = [*dict.fromkeys(texts)]
    except (AttributeError, KeyError, TypeError):
        raise BadRecord('no "question" with "answers" of a "text" each', "correct or remove it") from None
    # SQuAD 2 marks impossible questions; Hugging Face gives them no answers.
    is_impossible = record.get("is_impossible")
    if is_impossible or (is_impossible is None and not answers and is_flat_squad(record)):
        raise Unanswerable(IMPOSSIBLE, "remove it")
    names = ("question", "id", "gold_passage_id", "gold_passages")
    return {name: record[name] for name in names if name in record} | {"answers": answers}


def _json_question(record: dict[str, Any]) -> dict[str, Any]:
    """Convert a JSON object: give its fields our names, and leave out the passages that came with it."""
    if is_flat_squad(record):
        return _squad_question(record)
    if "qText" in record and "question" not in record:  # WebQuestions
        record["question"] = record.pop("qText")
    if "qId" in record:
        record.setdefault("id", record.pop("qId"))
    if record.get("answers") is None and record.get("answer") is None:
        if "golden_answers" in record:  # FlashRAG
            record["answers"] = record.pop("golden_answers")
        elif "target" in record:  # Atlas, FiD
            record["answers"] = [record.pop("target")]
    positives = record.get("positive_ctxs")  # DPR: the best one comes first, and its id has two names
    if record.get("gold_passage_id") is None and isinstance(positives, list) and positives:
        passage = positives[0] if isinstance(positives[0], dict) else {}
        name = passage.get("passage_id", passage.get("psg_id"))
        record["gold_passage_id"] = str(name) if isinstance(name, str | int) and str(name).strip() else None
    return {name: value for name, value in record.items() if name not in _RETRIEVED}


# --- Reading ----------------------------------------------------------------------------------------------------------

# A test of a file, and its records `{"question", "answers", …}` with their lines; the first match counts.
FORMATS: tuple[tuple[Callable[[Path_], bool], Callable[[Path_], Records]], ...] = (
    (has_judgments, _judged_records),
    (_is_table, _table_records),
    (_is_squad, _squad_records),
    (lambda path: ending_of(path) == ".parquet", lambda path: applied(_json_question, parquet_records(path))),
    (lambda path: True, lambda path: applied(_json_question, json_records(path))),
)


def parse_questions(
    path: Path_, need_right: bool = True, dropped: Counter[str] | None = None
) -> Iterator[tuple[int, Question | BadRecord]]:
    """Yield the lines and questions of a file of any known kind; a record that cannot be used is a BadRecord.

    Args:
        path: the file, whose kind is told by its name and its first bytes (see the top of this page).
        need_right: refuse questions with neither answers nor gold passages.
        dropped: counts, by reason, the questions that have no answer according to their own dataset.

    Raises:
        UserError: the file as a whole cannot be read.
    """
    records = next(read for looks_like, read in FORMATS if looks_like(path))(path)
    defaults = {"match": "regex"} if CURATED_TREC in Path(path).name.lower() else {}
    for line, question in applied(lambda record: _checked(defaults | record, need_right), records):
        if isinstance(question, Unanswerable):
            if dropped is not None:
                dropped[question.reason] += 1
        else:
            yield line, question if isinstance(question, BadRecord) else replace(question, line=line)


def read_questions(path: Path_, need_right: bool = True, dropped: Counter[str] | None = None) -> list[Question]:
    """Return the questions of `parse_questions` as a list.

    Args:
        path: the file.
        need_right: refuse questions with neither answers nor gold passages.
        dropped: counts, by reason, the questions that have no answer according to their own dataset.

    Raises:
        UserError: a record is bad, with file and line; or there are no questions.
    """
    questions = [question for _, question in strictly(path, parse_questions(path, need_right, dropped))]
    if not questions:
        raise UserError(f'{path} holds no questions; give one {{"question", "answers"}} object per line')
    return questions


def checked_questions(records: Iterable[Mapping[str, Any]]) -> list[Question]:
    """Return the questions of records in our own form. Raises UserError with the number, from 0, of a bad record."""
    questions = []
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise UserError(f'question {number}: is no record; give {{"question": …, "answers": […]}}')
        try:
            questions.append(_checked(dict(record)))
        except BadRecord as error:
            raise UserError(f"question {number}: {error}") from None
    if not questions:
        raise UserError("there are no questions; give at least one")
    return questions


def _checked(record: dict[str, Any], need_right: bool = True) -> Question:
    """Return the question of a record in our own form. Raises BadRecord."""
    if "question" not in record:
        raise BadRecord('the record has no "question"', "add it")
    question = _checked_text(record["question"], "question")
    if len(question) > LONGEST_QUESTION:
        message = f"the question has {len(question):,} characters, more than {LONGEST_QUESTION:,}"
        raise BadRecord(message, "shorten it or remove the line")
    # --- Answers
    key = "answer" if record.get("answers") is None and "answer" in record else "answers"  # NQ-open, DrQA, ORQA
    answers = [] if record.get(key) is None else record[key]
    if not isinstance(answers, list):
        raise BadRecord(f'"{key}" must be a list of strings', "correct it or remove the line")
    for answer in answers:
        _checked_text(answer, key)
    # --- Gold passages
    single, several = record.get("gold_passage_id"), record.get("gold_passages")
    if single is not None and several is not None:
        raise BadRecord('the question has "gold_passage_id" and "gold_passages"', "leave one out")
    if single is not None:
        _checked_text(single, "gold_passage_id")
    if several is not None and not are_grades(several):
        raise BadRecord('"gold_passages" is no object of ids and grades', f"write {{id: grade}}, {GRADES}")
    gold = gold_of(record)
    if need_right and not answers and not gold:
        raise BadRecord('the question has no answers and no "gold_passage_id"', "add one or remove the line")
    # --- Regular expressions
    if answers and (error := match_error(record.get("match"))) is not None:
        raise error
    normal = ("question", "answers", key, "gold_passage_id", "gold_passages")
    checked = Question(question, list(answers), gold, {name: record[name] for name in record if name not in normal})
    for answer in answers if checked.is_regex else []:
        if (reason := patterns.pattern_error(answer)) is not None:
            message = f"{answer[:40]!r} is not a regular expression ({reason})"
            raise BadRecord(message, "correct the pattern or remove the line")
    return checked


def _checked_text(value: Any, key: str) -> str:
    """Return a field's value if it is a string that is not blank. Raises BadRecord otherwise."""
    if not isinstance(value, str):
        message = f'"{key}" must hold text but holds {json.dumps(value, default=str)[:60]}'
        raise BadRecord(message, "put it in quotes")
    if not value.strip():
        raise BadRecord(f'"{key}" is empty', "fill it or remove the line")
    return value


def match_error(kind: Any) -> BadRecord | None:
    """Return the error in the field `match` of a record with answers; None if it is one of MATCHES."""
    if isinstance(kind, str | None) and kind in MATCHES:
        return None
    names = ", ".join(f'"{name}"' for name in MATCHES if name not in (None, "regex"))
    advice = f'write "regex" for answers that are patterns, or one of {names}'
    return BadRecord(f'"match" is {json.dumps(kind, default=str)[:40]}', advice)


def answered(questions: Iterable[Question]) -> list[Question]:
    """Return the questions that have answers, which can train and measure a reader."""
    return [question for question in questions if question.answers]


# --- Gold passages and writing ----------------------------------------------------------------------------------------


def are_grades(value: Any) -> bool:
    """Return True if a value is an object of passage ids and grades."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and name.strip() and type(grade) is int and grade <= LARGEST_GRADE
        for name, grade in value.items()
    )


def gold_of(record: dict[str, Any]) -> dict[str, int]:
    """Return the grades of the gold passages that a record names, by id; the inverse of `gold_record`."""
    if (single := record.get("gold_passage_id")) is not None:
        return {str(single): 1}
    return {name: grade for name, grade in (record.get("gold_passages") or {}).items() if grade > 0}


def gold_record(gold: dict[str, int]) -> dict[str, Any]:
    """Return the field for gold passages: `gold_passage_id` for a single one of grade 1, else `gold_passages`."""
    if not gold:
        return {}
    return {"gold_passage_id": next(iter(gold))} if [*gold.values()] == [1] else {"gold_passages": gold}


def question_lines(questions: Iterable[Question]) -> bytes:
    """Return the bytes of a question file that `read_questions` gives back: the normal form, one object per line."""
    records = (
        {"question": question.question, "answers": question.answers} | gold_record(question.gold) | question.fields
        for question in questions
    )
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode("utf-8")
