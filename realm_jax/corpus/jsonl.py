"""Articles and questions in JSON Lines files, plain or packed as `.gz` or `.xz`.

Everything here streams, except questions, which are few. Each fault in a file is a UserError that names the file and
the line. Not for Wikipedia dumps or other formats. Read `realm_jax.corpus.build` next: what becomes of the articles.
"""

import gzip
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from realm_jax.errors import UserError
from realm_jax.storage import open_atomic

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # how JSON spells one, half of a pair or not
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
    """A question with the answer strings that count as right; `fields` holds whatever else its record had."""

    question: str
    answers: list[str]
    gold_passage_id: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    line: int = 0


def read_passages(path: str | os.PathLike[str]) -> Iterator[Article]:
    """Articles of a file with `{"id": …, "title": …, "text": …}` on each line; the title may be absent.

    Raises UserError for a malformed record, a missing, empty or non-string id or text, an id met twice, or a file
    without records.
    """
    lines_of_ids: dict[str, int] = {}
    for line, record in _records(path):
        where = f"{path}:{line}"
        article_id = _string(record, "id", where)
        first = lines_of_ids.setdefault(article_id, line)
        if first != line:
            raise UserError(f"{where}: id {article_id!r} was already given on line {first}; ids must be unique")
        yield Article(article_id, _string(record, "title", where, required=False), _string(record, "text", where), line)
    if not lines_of_ids:
        raise UserError(f'{path} holds no passages; give one {{"id", "title", "text"}} object a line')


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """Questions of a file with `{"question": …, "answers": […], "gold_passage_id": …?}` on each line.

    `answer`, the name that NQ-open gives to the list, is accepted too. Raises UserError as `read_passages` does, and
    for an empty or endless question and for a question without answers.
    """
    questions = [_question(record, line, f"{path}:{line}") for line, record in _records(path)]
    if not questions:
        raise UserError(f'{path} holds no questions; give one {{"question", "answers"}} object a line')
    return questions


def write_passages(path: str | os.PathLike[str], articles: Iterable[Article]) -> None:
    """Write articles so that `read_passages` gives them back; packed according to the ending of `path`."""
    _write(path, ({"id": article.id, "title": article.title, "text": article.text} for article in articles))


def write_questions(path: str | os.PathLike[str], questions: Iterable[Question]) -> None:
    """Write questions so that `read_questions` gives them back, all further fields included."""
    _write(path, (_question_record(question) for question in questions))


def _question(record: dict[str, Any], line: int, where: str) -> Question:
    """Check one record of a question file."""
    fields = dict(record)
    question = _string(record, "question", where)
    if len(question) > LONGEST_QUESTION:
        raise UserError(
            f"{where}: the question has {len(question):,} characters, more than {LONGEST_QUESTION:,};"
            " shorten it or remove the line"
        )
    key = "answers" if "answers" in record else "answer"
    answers = record.get(key)
    if not isinstance(answers, list) or not answers:
        raise UserError(f'{where}: "answers" must be a list with at least one string; add answers or remove the line')
    for answer in answers:
        _check_string(answer, key, where)
    gold = None if record.get("gold_passage_id") is None else _string(record, "gold_passage_id", where)
    for known in ("question", key, "gold_passage_id"):
        fields.pop(known, None)
    return Question(question, list(answers), gold, fields, line)


def _question_record(question: Question) -> dict[str, Any]:
    """The JSON object of a question: the fields that the system reads come first."""
    record: dict[str, Any] = {"question": question.question, "answers": question.answers}
    if question.gold_passage_id is not None:
        record["gold_passage_id"] = question.gold_passage_id
    return record | question.fields


def _string(record: dict[str, Any], key: str, where: str, required: bool = True) -> str:
    """The string under `key`; an absent optional one is empty."""
    if key not in record:
        if required:
            raise UserError(f'{where}: the record has no "{key}"; add it')
        return ""
    value = record[key]
    if not required and (value is None or (isinstance(value, str) and not value.strip())):
        return ""
    return _check_string(value, key, where)


def _check_string(value: Any, key: str, where: str) -> str:
    """`value` if it is a string with something in it."""
    if not isinstance(value, str):
        raise UserError(f'{where}: "{key}" must hold text but holds {json.dumps(value)[:60]}; put it in quotes')
    if not value.strip():
        raise UserError(f'{where}: "{key}" is empty; fill it or remove the line')
    return value


def _records(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers, from 1, and objects of a file; blank lines are passed over."""
    for number, raw in enumerate(_lines(path), start=1):
        if raw.strip():
            yield number, _record(raw, f"{path}:{number}")


def _record(raw: bytes, where: str) -> dict[str, Any]:
    """Parse one line."""
    try:
        record = json.loads(raw.decode("utf-8-sig").rstrip())
    except UnicodeDecodeError as fault:
        raise UserError(f"{where}: byte {fault.start + 1} of the line is not UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as fault:
        raise UserError(f"{where}: not JSON ({fault.msg} at column {fault.colno}); mend or remove the line") from None
    except (ValueError, RecursionError) as fault:
        raise UserError(f"{where}: not readable as JSON ({fault}); mend or remove the line") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: holds {str(record)[:40]!r}, not an object; write {{…}} with named fields")
    if _SURROGATE.search(raw):
        _check_characters(record, where)
    return record


def _check_characters(record: dict[str, Any], where: str) -> None:
    """Raise UserError for half of a surrogate pair, in any field: it is no character and no file can hold it."""
    for key, value in record.items():
        try:
            json.dumps({key: value}, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(
                f"{where}: {json.dumps(key)} holds half of a surrogate pair; write the whole character"
            ) from None


def _lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Raw lines of a plain or packed file; faults of the file itself become UserErrors."""
    try:
        with _open(path) as stream:
            yield from stream
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as fault:
        raise UserError(f"{path} is truncated or damaged ({fault}); fetch or make it again") from None
    except OSError as fault:
        _refuse(path, fault)


def _refuse(path: str | os.PathLike[str], fault: OSError) -> NoReturn:
    raise UserError(f"cannot read {path} ({fault.strerror or fault}); check the path and its permissions") from None


def _open(path: str | os.PathLike[str]) -> IO[bytes] | gzip.GzipFile | lzma.LZMAFile:
    """Open for reading; the ending of the name says how the file is packed."""
    suffix = Path(path).suffix
    if suffix == ".gz":
        return gzip.open(path, "rb")
    if suffix == ".xz":
        return lzma.open(path, "rb")
    return open(path, "rb")


def _write(path: str | os.PathLike[str], records: Iterable[dict[str, Any]]) -> None:
    """Write records, one a line, the same bytes for the same records whatever the clock says."""
    suffix = Path(path).suffix
    with open_atomic(path) as raw:
        packed: Any = raw
        if suffix == ".gz":
            packed = gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0)
        elif suffix == ".xz":
            packed = lzma.LZMAFile(raw, mode="wb")
        for record in records:
            packed.write(json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n")
        if packed is not raw:
            packed.close()
