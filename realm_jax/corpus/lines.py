"""Records of text files, plain or packed (`PACKED`): lines, JSON objects, columns; and checks of their fields.

Everything streams, a JSON array of any size too. Each fault in a file is a UserError that names the file and the line.
Not for what the records mean. Read `realm_jax.corpus.formats` next: which files are understood.
"""

import bz2
import codecs
import csv
import gzip
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, Any

from realm_jax.errors import UserError

Path_ = str | os.PathLike[str]
Numbered = tuple[int, dict[str, Any]]  # the line that a record begins on, from 1, and the record
Damaged = Callable[[UserError], None]  # what becomes of a fault of one record; if it returns, the record is left out

PACKED: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}  # by the ending of the name
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # how JSON spells one, half of a pair or not
_CHUNK = 1 << 20  # bytes of an array that are read at a time, at the least
LONGEST_OBJECT = 1 << 26  # characters, of a line bytes; a question of DPR with all its passages has about 200,000
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")  # what JSON takes for white space


def refuse(fault: UserError) -> None:
    """The `Damaged` that stops at the first fault."""
    raise fault


def ending(path: Path_) -> str:
    """The ending of a file's name in lower case, whatever it is packed with: `.tsv` of `psgs_w100.tsv.gz`."""
    name = Path(path)
    return (Path(name.stem) if name.suffix in PACKED else name).suffix.lower()


def text_lines(path: Path_) -> Iterator[tuple[int, str]]:
    """Numbers and texts of all lines, blank ones too, without `\\n` or `\\r\\n` at their ends."""
    with _opened(path) as stream:
        for number, raw in _lines(stream, path, 1):
            yield number, _text(raw, f"{path}:{number}").removesuffix("\n").removesuffix("\r")


def table_rows(path: Path_) -> Iterator[tuple[int, list[str]]]:
    """Lines that rows begin on, and fields of the rows, of columns between tabs; quoted fields as in CSV files.

    A quoted field may hold tabs and line ends; a quote in it is written twice. Blank lines are passed over.
    """
    texts = (text + "\n" for _, text in text_lines(path))
    csv.field_size_limit(LONGEST_OBJECT)  # 131,072 unless told; a long article has more
    reader = csv.reader(texts, delimiter="\t", strict=True)
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as fault:
            raise UserError(f"{path}:{line}: no row of columns ({fault}); correct its quotes and line ends") from None
        if row:
            yield line, row


def json_records(path: Path_, damaged: Damaged = refuse) -> Iterator[Numbered]:
    """JSON objects: one a line, or the elements of one array, which may stretch over lines or fill a single one.

    damaged: is given the fault of a line that is no object. In an array no fault leaves a place to go on from.
    """
    with _opened(path) as stream:
        skipped = 0
        # What a file begins with says which of the two it is; it need not be on the first line.
        while (head := stream.peek(1)) and not head.strip():
            skipped += head.count(b"\n")
            stream.read(len(head))
        if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            yield from _Array(stream, path, skipped + 1).objects()
            return
        for number, raw in _lines(stream, path, skipped + 1):
            if raw.strip():
                where = f"{path}:{number}"
                try:
                    record = _object(_text(raw, where).rstrip(), where)
                except UserError as fault:
                    damaged(fault)
                else:
                    yield number, record


def _lines(stream: IO[bytes], path: Path_, first: int) -> Iterator[tuple[int, bytes]]:
    """Numbers and bytes of lines. A file of another kind may be one endless line, which is not held in memory."""
    for number in count(first):
        raw = stream.readline(LONGEST_OBJECT + 1)
        if len(raw) > LONGEST_OBJECT:
            raise UserError(f"{path}:{number}: the line has more than {LONGEST_OBJECT:,} bytes; is this a text file?")
        if not raw:
            return
        yield number, raw


class _Array:
    """A JSON array that is read piece by piece: the piece, how far it was understood, and the line of that place."""

    def __init__(self, stream: IO[bytes], path: Path_, line: int):
        self.stream, self.path, self.line = stream, path, line
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.at, self.ended = "", 0, False

    def objects(self) -> Iterator[Numbered]:
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
            except json.JSONDecodeError as fault:
                if self._is_malformed(fault) or not self._more():
                    raise self._fault(fault.msg, fault.pos) from None
            except (ValueError, RecursionError) as fault:
                raise self._fault(str(fault), self.at) from None
        if _SURROGATE.search(self.text, self.at, end):
            _check_characters(record, f"{self.path}:{self.line}")
        self._advance(end)
        return record

    def _is_malformed(self, fault: json.JSONDecodeError) -> bool:
        """Whether no further text could complete it: what is merely cut off fails at its end, or in an open string."""
        unfinished = fault.msg.startswith("Unterminated string") or fault.pos > len(self.text) - len("-Infinity")
        return not unfinished

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
        if len(rest) > LONGEST_OBJECT:
            raise self._fault(f"an object is longer than {LONGEST_OBJECT:,} characters", self.at)
        if self.ended:
            return False
        raw = self.stream.read(max(_CHUNK, len(rest)))
        self.ended = not raw
        try:
            new = self.decoder.decode(raw, final=self.ended)
        except UnicodeDecodeError as fault:
            line = self.line + rest.count("\n") + fault.object[: fault.start].count(b"\n")
            raise UserError(f"{self.path}:{line}: a byte of the line is not UTF-8; save the file as UTF-8") from None
        self.text, self.at = rest + new, 0
        return bool(new) or not self.ended

    def _fault(self, reason: str, at: int) -> UserError:
        line = self.line + self.text.count("\n", self.at, at)
        return UserError(
            f"{self.path}:{line}: not readable as JSON ({reason}); correct the array, or write one object a line"
        )


def text_field(record: dict[str, Any], key: str, where: str, required: bool = True) -> str:
    """The string under `key`; an absent optional one is empty. Raises UserError for anything else."""
    if key not in record:
        if required:
            raise UserError(f'{where}: the record has no "{key}"; add it')
        return ""
    value = record[key]
    if not required and (value is None or (isinstance(value, str) and not value.strip())):
        return ""
    return check_text(value, key, where)


def check_text(value: Any, key: str, where: str) -> str:
    """`value` if it is a string with something in it. Raises UserError otherwise."""
    if not isinstance(value, str):
        raise UserError(f'{where}: "{key}" must hold text but holds {json.dumps(value)[:60]}; put it in quotes')
    if not value.strip():
        raise UserError(f'{where}: "{key}" is empty; fill it or remove the line')
    return value


def _object(text: str, where: str) -> dict[str, Any]:
    """Parse one line."""
    try:
        record = json.loads(text)
    except json.JSONDecodeError as fault:
        raise UserError(
            f"{where}: not JSON ({fault.msg} at column {fault.colno}); correct or remove the line"
        ) from None
    except (ValueError, RecursionError) as fault:
        raise UserError(f"{where}: not readable as JSON ({fault}); correct or remove the line") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: holds {str(record)[:40]!r}, not an object; write {{…}} with named fields")
    if _SURROGATE.search(text):
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


def _text(raw: bytes, where: str) -> str:
    """The text of a line."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise UserError(f"{where}: byte {fault.start + 1} of the line is not UTF-8; save the file as UTF-8") from None


@contextmanager
def _opened(path: Path_) -> Iterator[Any]:
    """A plain or packed file, open for reading; faults of the file itself become UserErrors."""
    try:
        with _open(path) as stream:
            yield stream
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as fault:
        raise UserError(f"{path} is truncated or damaged ({fault}); fetch or make it again") from None
    except OSError as fault:
        if fault.errno is None:  # so bz2 speaks of data that is not bz2
            raise UserError(f"{path} is truncated or damaged ({fault}); fetch or make it again") from None
        reason = fault.strerror or fault
        raise UserError(f"cannot read {path} ({reason}); check the path and its permissions") from None


def _open(path: Path_) -> Any:
    """Open for reading; the ending of the name says how the file is packed."""
    return PACKED.get(Path(path).suffix, open)(path, "rb")
