"""Records of text files, plain or packed, here or in a bucket: lines, JSON objects, columns.

Everything streams, a JSON array of any size too. A record that cannot be read becomes a `BadRecord`, and the reader
decides: `strictly` raises a UserError with file and line, others count it. We raise an error only if reading cannot
continue (in an array, in a table, in storage). Not for the meaning of the records: read `realm_jax.data.questions`, or
`realm_jax.corpora.texts` for passages.
"""

import codecs
import csv
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from realm_jax.data.input_files import PACKED, UNPACKING_ERRORS, open_unpacked
from realm_jax.errors import UserError, install_extra

SAMPLE = 80  # characters
OTHER_COLUMNS = "a row with other columns than the first line"  # reason of a bad record
BATCH_ROWS = 256  # of a Parquet file
MOST_LINES = 10_000  # of a quoted field between tabs
TRUNCATED = "the rest of the file is truncated or damaged"
LONGEST_LINE = 1 << 26  # bytes, of an object in an array characters; the longest articles have a few million
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON spells one, half of a pair or not
_SPECIAL = re.compile(r'["\r]')  # a line of a table without these is plain text between delimiters
_CHUNK = 1 << 20  # bytes of an array that are read at a time, at the least
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")  # white space of JSON

Path_ = str | os.PathLike[str]
_T = TypeVar("_T")
_R = TypeVar("_R")


# --- Good and bad records ---------------------------------------------------------------------------------------------


class BadRecord(UserError):
    """A record of a file that cannot be read, in words that follow file and line, which the caller adds.

    Attributes:
        message: the fault.
        reason: the same for all such records, to count them by.
        sample: the beginning of the record.
    """

    def __init__(self, message: str, advice: str, reason: str = "", sample: str = ""):
        """Join message and advice to the text of the error; without a reason, the message is the reason."""
        super().__init__(f"{message}; {advice}")
        self.message, self.reason, self.sample = message, reason or message, sample


def sample(value: Any) -> str:
    """Return the beginning of a record, as one line that any file or terminal takes."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    # Few characters of each field, because a record may have millions.
    if isinstance(value, dict):
        value = {str(key)[:SAMPLE]: str(field)[:SAMPLE] for key, field in list(value.items())[:8]}
    line = " ".join(str(value)[: 4 * SAMPLE].split())[:SAMPLE]
    return line.encode("utf-8", "replace").decode("utf-8")


def applied(
    function: Callable[[_T], _R], records: Iterable[tuple[int, _T | BadRecord]]
) -> Iterator[tuple[int, _R | BadRecord]]:
    """Apply a function to each record; a BadRecord that it raises takes the record's place.

    Args:
        function: function of a record.
        records: records, or BadRecords, with their lines.

    Yields:
        Results, or BadRecords, with their lines.
    """
    for line, record in records:
        if isinstance(record, BadRecord):
            yield line, record
            continue
        try:
            result = function(record)
        except BadRecord as error:
            yield line, error
        else:
            yield line, result


def strictly(path: Path_, records: Iterable[tuple[int, _T | BadRecord]]) -> Iterator[tuple[int, _T]]:
    """Yield the records with their lines up to the first bad one.

    Args:
        path: the file, for the message.
        records: records, or BadRecords, with their lines.

    Raises:
        UserError: a record is bad, with file and line.
    """
    for line, record in records:
        if isinstance(record, BadRecord):
            raise UserError(f"{path}:{line}: {record}")
        yield line, record


# --- Lines ------------------------------------------------------------------------------------------------------------


Records = Iterator[tuple[int, dict[str, Any] | BadRecord]]  # each with the line that it begins on, from 1


class Line(NamedTuple):
    """A line with its end.

    Attributes:
        number: from 1, among the lines that were read.
        byte: at which it begins in the unpacked file.
        data: its bytes, or why they cannot be read.
    """

    number: int
    byte: int
    data: bytes | BadRecord


def ending_of(path: Path_) -> str:
    """Return the ending of a file's name in small letters, without that of its packing."""
    name = Path(path)
    return (Path(name.stem) if name.suffix.lower() in PACKED else name).suffix.lower()


def read_lines(path: Path_, start: int = 0, stop: int | None = None) -> Iterator[Line]:
    """Yield the lines that begin in the bytes [start, stop) of an unpacked file, blank ones too.

    A line that is too long becomes a BadRecord, and so does the rest of a packed file that is truncated or damaged.

    Args:
        path: the file.
        start: first byte.
        stop: byte behind the last one; None for the end of the file.
    """
    with open_unpacked(path) as stream:
        yield from _lines(stream, start, stop)


def text_lines(path: Path_, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
    """Yield numbers and texts of all lines, blank ones too, without `\\n` or `\\r\\n` at their ends.

    Args:
        path: the file.
        encoding: encoding of its text; other encodings than UTF-8 were guessed, so we replace the bytes that do not
            fit.

    Raises:
        UserError: the file cannot be read, or is not in UTF-8.
    """
    if encoding != "utf-8":
        try:
            with open_unpacked(path) as stream:
                texts = TextIOWrapper(stream, encoding, "replace")
                yield from enumerate((line.removesuffix("\n") for line in texts), 1)
        except UNPACKING_ERRORS as error:
            raise _damaged(path, error) from None
        return
    lines = ((line.number, line.data) for line in read_lines(path))
    for number, text in strictly(path, applied(_text, lines)):
        yield number, text.removesuffix("\n").removesuffix("\r")


def _lines(stream: IO[bytes], start: int = 0, stop: int | None = None, first: int = 1) -> Iterator[Line]:
    """Yield the `read_lines` of a stream. A binary file may be one endless line, which must not fill the memory."""
    byte, number = start, first
    try:
        if start:  # the line with the byte before `start` belongs to the part before this one
            stream.seek(start - 1)
            byte = start - 1 + _rest_of_line(stream)
        while (stop is None or byte < stop) and (data := stream.readline(LONGEST_LINE)):
            is_cut = len(data) == LONGEST_LINE and not data.endswith(b"\n")
            line: bytes | BadRecord = data
            if is_cut:
                size = f"more than {LONGEST_LINE:,} bytes"
                beginning = sample(data[: 4 * SAMPLE])
                line = BadRecord(f"the line has {size}", "is this a text file?", f"a line of {size}", beginning)
            yield Line(number, byte, line)
            byte += len(data) + (_rest_of_line(stream) if is_cut else 0)
            number += 1
    except UNPACKING_ERRORS as error:
        bad = BadRecord(f"{TRUNCATED} ({error})", "fetch or make it again", TRUNCATED, sample(str(error)))
        yield Line(number, byte, bad)


def _rest_of_line(stream: IO[bytes]) -> int:
    """Skip to the beginning of the next line; return the number of skipped bytes."""
    skipped = 0
    while chunk := stream.readline(LONGEST_LINE):
        skipped += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return skipped


def _damaged(path: Path_, error: Exception) -> UserError:
    return UserError(f"{path} is truncated or damaged ({' '.join(str(error).split())}); fetch or make it again")


def _text(raw: bytes) -> str:
    """Return the text of a line. Raises BadRecord if it is not in UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"byte {error.start + 1} of the line is not UTF-8"
        raise BadRecord(message, "save the file as UTF-8", "not UTF-8", sample(raw)) from None


# --- Tables -----------------------------------------------------------------------------------------------------------


def table_rows(path: Path_, delimiter: str = "\t", encoding: str = "utf-8") -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a table, quoted as in CSV files or not, with the lines on which they begin.

    A quoted field may contain delimiters and line ends; a quote in it is written twice. But many programs write tabs
    and never quote. So in a table with tabs, a line that begins a quoted field of several lines is a row of its own if
    each of these lines has the columns of the first row, or if no quote closes the field. Blank lines are skipped.

    Args:
        path: the file.
        delimiter: between the columns.
        encoding: as for `text_lines`.

    Raises:
        UserError: the file cannot be read, or the quotes of a row do not match; with file and line.
    """
    csv.field_size_limit(LONGEST_LINE)  # 131,072 by default; a long article has more
    lines, width = text_lines(path, encoding), 0
    ahead = deque[tuple[int, str]]()  # lines that were read and belong to no row yet

    def texts() -> Iterator[str]:
        yield from (text for _, text in ahead)
        for line in lines:
            ahead.append(line)
            yield line[1]

    # Most rows have no quotes, so they need no parser.
    while ahead or next(texts(), None) is not None:
        number, text = ahead[0]
        try:
            row, used = _row(texts, text, delimiter, width) if _SPECIAL.search(text) else (text.split(delimiter), 1)
        except csv.Error as error:
            raise UserError(f"{path}:{number}: no row of columns ({error}): check its quotes and line ends") from None
        for _ in range(used):
            ahead.popleft()
        if text and row:
            width = width or len(row)
            yield number, row


def _row(texts: Callable[[], Iterator[str]], text: str, delimiter: str, width: int) -> tuple[list[str], int]:
    """Parse the row that begins with a line; also return the number of its lines. Raises csv.Error.

    texts: gives this line and those below. width: columns of the first row; 0 for that row itself.
    """
    if delimiter != "\t" or "\r" in text:
        return _quoted_row(texts(), delimiter)
    plain = text.split(delimiter)
    with suppress(csv.Error):
        row, _ = _quoted_row(iter([text]), delimiter)
        return (plain if len(row) != width == len(plain) else row), 1
    try:
        row, used = _quoted_row(islice(texts(), MOST_LINES), delimiter)
    except csv.Error:
        return plain, 1
    spanned = filter(None, islice(texts(), used))
    are_rows = width > 1 and all(line.count(delimiter) == width - 1 for line in spanned)
    return (plain, 1) if are_rows or (width and len(row) != width) else (row, used)


def _quoted_row(texts: Iterator[str], delimiter: str) -> tuple[list[str], int]:
    """Parse the first row of some lines by the rules of CSV; also return the number of its lines. Raises csv.Error."""
    reader = csv.reader((text + "\n" for text in texts), delimiter=delimiter, strict=True)
    return next(reader), reader.line_num


# --- JSON -------------------------------------------------------------------------------------------------------------


def json_records(path: Path_) -> Records:
    """Yield JSON objects: one per line, or the elements of one array, which may have many lines or a single one.

    Reading cannot continue after an error in an array, so that raises UserError.
    """
    with open_unpacked(path) as stream:
        try:
            skipped, is_array = _beginning(stream)
            if is_array:
                yield from _Array(stream, path, skipped + 1).objects()
                return
        except UNPACKING_ERRORS as error:
            raise _damaged(path, error) from None
        lines = ((line.number, line.data) for line in _lines(stream, first=skipped + 1))
        yield from applied(_object, (line for line in lines if isinstance(line[1], BadRecord) or line[1].strip()))


def parquet_records(path: Path_) -> Records:
    """Yield the rows of a Parquet file, with their numbers instead of lines.

    Values are those of JSON: bytes as text, NaN as null, and values of other types as strings.
    """
    try:
        from pyarrow import ArrowException, parquet  # here, as it is optional
    except ImportError:
        raise UserError(f"{path}: reading Parquet needs pyarrow; {install_extra('documents')}") from None
    with open_unpacked(path) as stream:
        try:
            batches = parquet.ParquetFile(stream).iter_batches(BATCH_ROWS)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, 1):
                text = json.dumps(row, default=_parquet_text)
                yield number, json.loads(text, parse_constant=lambda _: None)
        except (ArrowException, ValueError, OverflowError, LookupError, *UNPACKING_ERRORS) as error:
            raise _damaged(path, error) from None


def _parquet_text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def parse_json(raw: bytes) -> Any:
    """Return the value of a line. Raises BadRecord."""
    text = _text(raw).rstrip()
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        message = f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
    except (ValueError, RecursionError) as error:
        message = f"not readable as JSON ({error})"
    raise BadRecord(message, "correct or remove the line", "not JSON", sample(raw))


def _beginning(stream: Any) -> tuple[int, bool]:
    """Skip blank lines; return their number, and True if an array begins behind them."""
    skipped = 0
    while (head := stream.peek(1)) and not head.strip():
        skipped += head.count(b"\n")
        stream.read(len(head))
    return skipped, head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _object(raw: bytes) -> dict[str, Any]:
    """Return the object of a line, in which every string is text. Raises BadRecord."""
    record = parse_json(raw)
    if not isinstance(record, dict):
        message = f"holds {str(record)[:40]!r}, not an object"
        raise BadRecord(message, "write {…} with named fields", "not an object", sample(raw))
    if _SURROGATE.search(raw.decode("utf-8")):
        check_characters(record)
    return record


def check_characters(record: dict[str, Any]) -> None:
    """Check that no field has half of a surrogate pair, which is no character and cannot be encoded.

    Raises:
        BadRecord: a field has one.
    """
    for key, value in record.items():
        try:
            json.dumps({key: value}, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            message = f"{json.dumps(key)} holds half of a surrogate pair"
            raise BadRecord(message, "write the whole character", "half of a surrogate pair") from None


class _Array:
    """A JSON array that is read piece by piece: the piece, how far it was understood, and the line of that place.

    Not by ijson, which turns half of a surrogate pair into "?" without a message.
    """

    def __init__(self, stream: IO[bytes], path: Path_, line: int):
        self.stream, self.path, self.line = stream, path, line
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.at, self.ended = "", 0, False

    def objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the elements, with the lines on which they begin."""
        self._next()
        self._advance(self.at + 1)  # past the bracket
        following = self._next()
        if following == "]":
            self._advance(self.at + 1)
        while following != "]":
            yield self.line, self._element()
            following = self._next()
            if following not in (",", "]"):
                raise self._error_at("no comma after an object" if following else "the array does not end", self.at)
            self._advance(self.at + 1)
            self._next()
        if self._next():
            raise self._error_at("there is more after the end of the array", self.at)

    def _element(self) -> dict[str, Any]:
        """Return the object that begins here, reading on until it is complete."""
        if not self.text.startswith("{", self.at):
            element = self.text[self.at : self.at + 40].partition("\n")[0]
            where = f"{self.path}:{self.line}"
            raise UserError(f"{where}: the array holds {element!r}, not an object; write {{…}} with named fields")
        while True:
            try:
                record, end = _DECODER.raw_decode(self.text, self.at)
                break
            except json.JSONDecodeError as error:
                # An object that is only cut off fails at its end, or in an open string.
                is_cut = error.msg.startswith("Unterminated string") or error.pos > len(self.text) - len("-Infinity")
                if not is_cut or not self._more():
                    raise self._error_at(error.msg, error.pos) from None
            except (ValueError, RecursionError) as error:
                raise self._error_at(str(error), self.at) from None
        if _SURROGATE.search(self.text, self.at, end):
            try:
                check_characters(record)
            except BadRecord as error:
                raise UserError(f"{self.path}:{self.line}: {error}") from None
        self._advance(end)
        return record

    def _next(self) -> str:
        """Return the next character that is not white space, or an empty string at the end of the file."""
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            self._advance(match.end())
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._more():
                return ""

    def _advance(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def _more(self) -> bool:
        """Read more; return False at the end of the file.

        We read as much as is not parsed yet, so that the time of a long object is proportional to its length.
        """
        rest = self.text[self.at :]
        if len(rest) > LONGEST_LINE:
            raise self._error_at(f"an object is longer than {LONGEST_LINE:,} characters", self.at)
        # An element that needs more text at the end of the file is incomplete.
        if self.ended:
            return False
        raw = self.stream.read(max(_CHUNK, len(rest)))
        self.ended = not raw
        try:
            new = self.decoder.decode(raw, final=self.ended)
        except UnicodeDecodeError as error:
            line = self.line + rest.count("\n") + error.object[: error.start].count(b"\n")
            raise UserError(f"{self.path}:{line}: a byte of the line is not UTF-8; save the file as UTF-8") from None
        self.text, self.at = rest + new, 0
        return bool(new) or not self.ended

    def _error_at(self, reason: str, at: int) -> UserError:
        line = self.line + self.text.count("\n", self.at, at)
        return UserError(
            f"{self.path}:{line}: not readable as JSON ({reason}); correct the array, or write one object per line"
        )
