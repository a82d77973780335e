"""Records of text files, plain or packed, here or in a bucket: lines, JSON objects, columns.

Everything streams, a JSON array of any size too. What cannot be read is a `BadRecord` in its place, and whoever reads
decides: `strictly` raises a UserError with file and line, others count it. Only what leaves no place to go on from (in
an array, in a table, in storage) is raised here. Not for what the records mean: read `realm_jax.data.questions`, or
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

from realm_jax.data.files import PACKED, UNPACKING_FAULTS, open_unpacked
from realm_jax.errors import UserError

SAMPLE = 80  # characters
OTHER_COLUMNS = "a row with other columns than the first line"  # why a row is a bad record
BATCH_ROWS = 256  # of a Parquet file
MOST_LINES = 10_000  # of a quoted field between tabs
TRUNCATED = "the rest of the file is truncated or damaged"
LONGEST_LINE = 1 << 26  # bytes, of an object in an array characters; the longest articles have a few million
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON spells one, half of a pair or not
_SPECIAL = re.compile(r'["\r]')  # what makes of a line of a table more than text between delimiters
_CHUNK = 1 << 20  # bytes of an array that are read at a time, at the least
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")  # what JSON takes for white space

Path_ = str | os.PathLike[str]
_T = TypeVar("_T")
_R = TypeVar("_R")


# --- Good and bad records ---------------------------------------------------------------------------------------------


class BadRecord(UserError):
    """A record of a file that cannot be read, in words that follow file and line, which the caller adds.

    message, advice: what is wrong, and what to do. reason: the same for all such records, to count them by; the message
    unless given. sample: the beginning of the record.
    """

    def __init__(self, message: str, advice: str, reason: str = "", sample: str = ""):
        super().__init__(f"{message}; {advice}")
        self.message, self.reason, self.sample = message, reason or message, sample


def sample(value: Any) -> str:
    """The beginning of a record, as one line that any file or terminal takes."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    # Few characters of each field: a record may hold millions.
    if isinstance(value, dict):
        value = {str(key)[:SAMPLE]: str(field)[:SAMPLE] for key, field in list(value.items())[:8]}
    line = " ".join(str(value)[: 4 * SAMPLE].split())[:SAMPLE]
    return line.encode("utf-8", "replace").decode("utf-8")


def applied(
    function: Callable[[_T], _R], records: Iterable[tuple[int, _T | BadRecord]]
) -> Iterator[tuple[int, _R | BadRecord]]:
    """What a function gives for each record, with its line; what it raises as a BadRecord takes the record's place."""
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
    """The records with their lines. Raises UserError, with file and line, at the first bad one."""
    for line, record in records:
        if isinstance(record, BadRecord):
            raise UserError(f"{path}:{line}: {record}")
        yield line, record


# --- Lines ------------------------------------------------------------------------------------------------------------


Records = Iterator[tuple[int, dict[str, Any] | BadRecord]]  # each with the line that it begins on, from 1


class Line(NamedTuple):
    """A line with its end. number: from 1, of what was read; byte: the place in the unpacked file that it begins at."""

    number: int
    byte: int
    data: bytes | BadRecord


def ending_of(path: Path_) -> str:
    """The ending of a file's name in small letters, without that of its packing."""
    name = Path(path)
    return (Path(name.stem) if name.suffix.lower() in PACKED else name).suffix.lower()


def read_lines(path: Path_, start: int = 0, stop: int | None = None) -> Iterator[Line]:
    """The lines that begin in the bytes [start, stop) of an unpacked file, blank ones too.

    Of a line that is too long, and where a packed file is cut off or damaged, there is a BadRecord in its place; what
    follows damage of a packed file is lost.
    """
    with open_unpacked(path) as stream:
        yield from _lines(stream, start, stop)


def text_lines(path: Path_, encoding: str = "utf-8") -> Iterator[tuple[int, str]]:
    """Numbers and texts of all lines, blank ones too, without `\\n` or `\\r\\n` at their ends. Raises UserError.

    In another encoding than UTF-8 what stands for no character is replaced: an encoding that was guessed may not fit.
    """
    if encoding != "utf-8":
        try:
            with open_unpacked(path) as stream:
                texts = TextIOWrapper(stream, encoding, "replace")
                yield from enumerate((line.removesuffix("\n") for line in texts), 1)
        except UNPACKING_FAULTS as error:
            raise _damaged(path, error) from None
        return
    lines = ((line.number, line.data) for line in read_lines(path))
    for number, text in strictly(path, applied(_text, lines)):
        yield number, text.removesuffix("\n").removesuffix("\r")


def _lines(stream: IO[bytes], start: int = 0, stop: int | None = None, first: int = 1) -> Iterator[Line]:
    """`read_lines` of a stream. A file of another kind may be one endless line, which is not held in memory."""
    byte, number = start, first
    try:
        if start:  # the line that holds the byte before `start` belongs to the part before this one
            stream.seek(start - 1)
            byte = start - 1 + _rest_of_line(stream)
        while (stop is None or byte < stop) and (data := stream.readline(LONGEST_LINE)):
            is_cut = len(data) == LONGEST_LINE and not data.endswith(b"\n")
            yield Line(number, byte, _too_long(data) if is_cut else data)
            byte += len(data) + (_rest_of_line(stream) if is_cut else 0)
            number += 1
    except UNPACKING_FAULTS as error:
        bad = BadRecord(f"{TRUNCATED} ({error})", "fetch or make it again", TRUNCATED, sample(str(error)))
        yield Line(number, byte, bad)


def _rest_of_line(stream: IO[bytes]) -> int:
    """Go to the beginning of the next line; the number of bytes skipped."""
    passed = 0
    while chunk := stream.readline(LONGEST_LINE):
        passed += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return passed


def _damaged(path: Path_, error: Exception) -> UserError:
    return UserError(f"{path} is truncated or damaged ({' '.join(str(error).split())}); fetch or make it again")


def _too_long(data: bytes) -> BadRecord:
    size = f"more than {LONGEST_LINE:,} bytes"
    return BadRecord(f"the line has {size}", "is this a text file?", f"a line of {size}", sample(data[: 4 * SAMPLE]))


def _text(raw: bytes) -> str:
    """The text of a line."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"byte {error.start + 1} of the line is not UTF-8"
        raise BadRecord(message, "save the file as UTF-8", "not UTF-8", sample(raw)) from None


# --- Tables -----------------------------------------------------------------------------------------------------------


def table_rows(path: Path_, delimiter: str = "\t", encoding: str = "utf-8") -> Iterator[tuple[int, list[str]]]:
    """Lines that rows begin on, and fields of the rows, quoted as in CSV files or not. Raises UserError with the line.

    A quoted field may hold delimiters and line ends; a quote in it is written twice. Many a program writes tabs and
    never quotes, though. So with tabs between the columns, lines that each have the columns of the first row as they
    stand are rows of their own, unless one of them alone is a row of quoted fields; and so is what no quote closes.
    Blank lines are skipped. encoding: as of `text_lines`.
    """
    csv.field_size_limit(LONGEST_LINE)  # 131,072 by default; a long article has more
    lines, width = text_lines(path, encoding), 0
    ahead = deque[tuple[int, str]]()  # lines that were looked at and are not taken yet

    def texts() -> Iterator[str]:
        yield from (text for _, text in ahead)
        for line in lines:
            ahead.append(line)
            yield line[1]

    while ahead or next(texts(), None) is not None:
        number, text = ahead[0]
        try:
            row, used = _row(texts, text, delimiter, width) if _SPECIAL.search(text) else (text.split(delimiter), 1)
        except csv.Error as error:
            raise UserError(f"{path}:{number}: no row of columns ({error}): look at its quotes and line ends") from None
        for _ in range(used):
            ahead.popleft()
        if text and row:
            width = width or len(row)
            yield number, row


def _row(texts: Callable[[], Iterator[str]], text: str, delimiter: str, width: int) -> tuple[list[str], int]:
    """The row that begins with this line, and how many lines it stretches over. Raises csv.Error.

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
    are_rows = width > 1 and all(one.count(delimiter) == width - 1 for one in spanned)
    return (plain, 1) if are_rows or (width and len(row) != width) else (row, used)


def _quoted_row(texts: Iterator[str], delimiter: str) -> tuple[list[str], int]:
    """The first row of lines, and how many of them it stretches over. Raises csv.Error for what breaks the rules."""
    reader = csv.reader((text + "\n" for text in texts), delimiter=delimiter, strict=True)
    return next(reader), reader.line_num


# --- JSON -------------------------------------------------------------------------------------------------------------


def json_records(path: Path_) -> Records:
    """JSON objects: one a line, or the elements of one array, which may stretch over lines or fill a single one.

    In an array no fault leaves a place to go on from, so it is a UserError.
    """
    with open_unpacked(path) as stream:
        try:
            skipped, is_array = _beginning(stream)
            if is_array:
                yield from _Array(stream, path, skipped + 1).objects()
                return
        except UNPACKING_FAULTS as error:
            raise _damaged(path, error) from None
        lines = ((line.number, line.data) for line in _lines(stream, first=skipped + 1))
        yield from applied(_object, (line for line in lines if isinstance(line[1], BadRecord) or line[1].strip()))


def parquet_records(path: Path_) -> Records:
    """The rows of a Parquet file, with their numbers in place of lines; what JSON has no type for as a string."""
    try:
        from pyarrow import ArrowException, parquet  # here, as it is optional
    except ImportError:
        raise UserError(f"{path}: Parquet is read by pyarrow; pip install 'realm_jax[documents]'") from None
    with open_unpacked(path) as stream:
        try:
            batches = parquet.ParquetFile(stream).iter_batches(BATCH_ROWS)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            yield from enumerate(map(_plain_row, rows), 1)
        except (ArrowException, ValueError, OverflowError, LookupError, *UNPACKING_FAULTS) as error:
            raise _damaged(path, error) from None


def _plain_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row with values of JSON alone: bytes as text, what is no number as null."""

    def plain(value: Any) -> str:
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

    found: dict[str, Any] = json.loads(json.dumps(row, default=plain), parse_constant=lambda _: None)
    return found


def parse_json(raw: bytes) -> Any:
    """The value of a line. Raises BadRecord."""
    text = _text(raw).rstrip()
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        message = f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
    except (ValueError, RecursionError) as error:
        message = f"not readable as JSON ({error})"
    raise BadRecord(message, "correct or remove the line", "not JSON", sample(raw))


def _beginning(stream: Any) -> tuple[int, bool]:
    """Go past blank lines: how many there are, and whether an array begins behind them."""
    skipped = 0
    while (head := stream.peek(1)) and not head.strip():
        skipped += head.count(b"\n")
        stream.read(len(head))
    return skipped, head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _object(raw: bytes) -> dict[str, Any]:
    """The object of a line, in which every string is text. Raises BadRecord."""
    record = parse_json(raw)
    if not isinstance(record, dict):
        message = f"holds {str(record)[:40]!r}, not an object"
        raise BadRecord(message, "write {…} with named fields", "not an object", sample(raw))
    if _SURROGATE.search(raw.decode("utf-8")):
        check_characters(record)
    return record


def check_characters(record: dict[str, Any]) -> None:
    """Raise BadRecord for half of a surrogate pair, in any field: it is no character and no file can hold it."""
    for key, value in record.items():
        try:
            json.dumps({key: value}, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            message = f"{json.dumps(key)} holds half of a surrogate pair"
            raise BadRecord(message, "write the whole character", "half of a surrogate pair") from None


class _Array:
    """A JSON array that is read piece by piece: the piece, how far it was understood, and the line of that place."""

    def __init__(self, stream: IO[bytes], path: Path_, line: int):
        self.stream, self.path, self.line = stream, path, line
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.at, self.ended = "", 0, False

    def objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The elements, with the lines that they begin on."""
        self._next()
        self._advance(self.at + 1)  # past the bracket
        following = self._next()
        if following == "]":
            self._advance(self.at + 1)
        while following != "]":
            yield self.line, self._element()
            following = self._next()
            if following not in (",", "]"):
                raise self._fault("no comma after an object" if following else "the array does not end", self.at)
            self._advance(self.at + 1)
            self._next()
        if self._next():
            raise self._fault("there is more after the end of the array", self.at)

    def _element(self) -> dict[str, Any]:
        """The object that begins here. Reads on until it is whole."""
        if not self.text.startswith("{", self.at):
            found = self.text[self.at : self.at + 40].partition("\n")[0]
            where = f"{self.path}:{self.line}"
            raise UserError(f"{where}: the array holds {found!r}, not an object; write {{…}} with named fields")
        while True:
            try:
                record, end = _DECODER.raw_decode(self.text, self.at)
                break
            except json.JSONDecodeError as error:
                # What is merely cut off fails at its end, or in an open string.
                is_cut = error.msg.startswith("Unterminated string") or error.pos > len(self.text) - len("-Infinity")
                if not is_cut or not self._more():
                    raise self._fault(error.msg, error.pos) from None
            except (ValueError, RecursionError) as error:
                raise self._fault(str(error), self.at) from None
        if _SURROGATE.search(self.text, self.at, end):
            try:
                check_characters(record)
            except BadRecord as error:
                raise UserError(f"{self.path}:{self.line}: {error}") from None
        self._advance(end)
        return record

    def _next(self) -> str:
        """The next character that is not white space, or nothing at the end of the file."""
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
        """Read on; each time as much again as is not understood yet, so that a long object costs its length."""
        rest = self.text[self.at :]
        if len(rest) > LONGEST_LINE:
            raise self._fault(f"an object is longer than {LONGEST_LINE:,} characters", self.at)
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

    def _fault(self, reason: str, at: int) -> UserError:
        line = self.line + self.text.count("\n", self.at, at)
        return UserError(
            f"{self.path}:{line}: not readable as JSON ({reason}); correct the array, or write one object per line"
        )
