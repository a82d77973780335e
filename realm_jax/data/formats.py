"""Files of other projects as records of our own, recognised by their file extension and first bytes.

| texts to retrieve from | recognised by |
|---|---|
| `{"id", "title", "text"}` (ours, with `section` Atlas's) | JSON objects |
| `psgs_w100.tsv` of DPR | `.tsv`, `.csv`; the first line names the columns `id`, `text`, `title` |

| questions | recognised by |
|---|---|
| `{"question", "answers"}`; NQ-open, DrQA, ORQA: `answer`; Atlas, FiD: `target`, `ctxs` | JSON objects |
| `nq-train.json` of DPR, retriever or reader: `positive_ctxs`, `ctxs`, … | JSON objects |
| WebQuestions of brmson: `{"qId", "qText", "answers"}` | JSON objects |
| `nq-test.qa.csv` of DPR: question, list of answers in Python's spelling | `.tsv`, `.csv` with two columns |
| CuratedTREC of brmson: id, type, question, regular expression | `.tsv`, `.csv` with four columns |

JSON objects stand one a line or in one array; any file may be packed as `.gz`, `.xz` or `.bz2`. The answers of a file
with `curatedtrec` in its name are regular expressions, as ORQA has it. Passages that came with a question are left out,
the first positive one of DPR becomes its gold passage. Not for checking records: read `realm_jax.data.jsonl` next.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from realm_jax.data.lines import Path_, Records, applied, ending, json_records, table_rows, text_lines
from realm_jax.data.records import BadRecord
from realm_jax.errors import UserError

TABLES = (".tsv", ".csv")
ROW = "a row with other columns than the first line"
PATTERNS = "curatedtrec"  # in the name of a file whose answers are regular expressions
_RETRIEVED = ("ctxs", "passages", "positive_ctxs", "negative_ctxs", "hard_negative_ctxs")
_STRING = r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+\""""
# Nothing but strings and commas, so that no text, however long or deep, does more than its length of work.
_STRINGS = re.compile(rf"\s*\[\s*(?:(?:{_STRING})\s*(?:,\s*(?:{_STRING})\s*)*+,?\s*)?\]\s*", re.DOTALL)


def passage_records(path: Path_) -> Records:
    """Lines and records `{"id", "title", "text"}` of a file of passages. Raises UserError for the file as a whole."""
    return _passage_table(path) if ending(path) in TABLES else applied(_with_section, json_records(path))


def question_records(path: Path_) -> Records:
    """Lines and records `{"question", "answers", …}` of a file of questions. Raises UserError for the file as a whole.

    `"match": "regex"` marks answers that are regular expressions; `answer` may stand for `answers`.
    """
    records = _question_table(path) if ending(path) in TABLES else applied(_question_object, json_records(path))
    has_patterns = PATTERNS in Path(path).name.lower()
    return applied(lambda record: {"match": "regex"} | record, records) if has_patterns else records


def _with_section(record: dict[str, Any]) -> dict[str, Any]:
    """The section of an article goes behind its title, as Atlas has it: sections of one article share the title."""
    title, section = record.get("title"), record.get("section")
    if isinstance(title, str) and isinstance(section, str) and title.strip() and section.strip():
        return record | {"title": f"{title}: {section}"}
    return record


def _passage_table(path: Path_) -> Records:
    """Passages of a table whose first line names its columns."""
    rows = table_rows(path)
    line, names = next(rows, (1, ["id", "text", "title"]))
    if not {"id", "text", "title"} <= {*names}:
        raise UserError(f"{path}:{line}: the first line of a table of passages must name its columns: id, text, title")

    def named(row: list[str]) -> dict[str, Any]:
        if len(row) != len(names):
            message = f"the row has {len(row)} columns, the first line names {len(names)}"
            raise BadRecord(message, "correct it", ROW)
        return dict(zip(names, row, strict=True))

    yield from applied(named, rows)


def _question_table(path: Path_) -> Records:
    """Questions of a table; the columns of its first line say which one it is."""
    first = next((text for _, text in text_lines(path) if text.strip()), "\t")
    columns = first.count("\t") + 1
    if columns not in (2, 4):
        raise UserError(
            f"{path}:1: the first line has {columns} columns; tables of questions have two (question, list of answers) "
            "or four (id, type, question, regular expression), with tabs between them"
        )
    return applied(_listed_answers, table_rows(path)) if columns == 2 else applied(_curated_trec, _tabbed(path))


def _listed_answers(row: list[str]) -> dict[str, Any]:
    """A row `question, ['answer', 'answer']`."""
    if len(row) != 2:
        raise BadRecord(f"the row has {len(row)} columns, not two: question, list of answers", "correct it", ROW)
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
        raise BadRecord(f"the row has {len(row)} columns, the first line four", "correct the row", ROW)
    return {"question": row[2], "answers": [row[3]], "match": "regex", "id": row[0]}


def _question_object(record: dict[str, Any]) -> dict[str, Any]:
    """A question of a JSON object, with our names for its fields."""
    if "qText" in record and "question" not in record:
        record["question"] = record.pop("qText")
    if "qId" in record:
        record.setdefault("id", record.pop("qId"))
    if "target" in record and not {"answers", "answer"} & record.keys():
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
