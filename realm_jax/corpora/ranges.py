"""The unpacked bytes of a range of a file that is plain, `.gz` or `.bz2`, on this machine or in a bucket.

A `.bz2` file is a row of streams (a multistream dump of Wikipedia has one for every hundred pages), and each of them
can be unpacked without those before it; a `.gz` file has to be read from its beginning. Memory does not grow with the
file, nor with what is unpacked. Not for what the bytes mean: read `realm_jax.corpora.dumps` next.
"""

import bz2
import gzip
import re
import zlib
from collections.abc import Iterator
from typing import IO, NamedTuple

from realm_jax.corpora.outcomes import CorruptRecord
from realm_jax.data.files import open_stored

CUT_OFF = "ends too early"
BAD_PACKING = "packed data is damaged"

_CHUNK = 1 << 18  # bytes that are read or unpacked at a time
# The header of a stream and of its first block, or of the end of an empty one: 76 bits that chance puts nowhere else.
_STREAM = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")
_STREAM_BYTES = 10


class UnpackedChunk(NamedTuple):
    """Unpacked bytes that follow the last piece. `own`: they lie in the range, not behind it."""

    data: bytes
    own: bool


def is_splittable(head: bytes) -> bool:
    """Whether ranges of a file that begins like this can be read, rather than the whole file alone."""
    return not head.startswith(b"\x1f\x8b")


def count_streams(data: bytes) -> int:
    """How many streams of bz2 begin in some bytes of a file."""
    return sum(1 for _ in _STREAM.finditer(data))


def read_range(path: str, start: int = 0, stop: int | None = None) -> Iterator[UnpackedChunk | CorruptRecord]:
    """What the bytes [start, stop) of a file hold, and everything behind them: whoever has enough stops reading.

    Of a `.bz2` file a stream belongs to the range that its first byte lies in. Bytes behind damage follow those before
    it with a gap. Raises UserError for a file that cannot be read.
    """
    with open_stored(path) as stream:
        head = stream.read(3)
        stream.seek(start)
        if not is_splittable(head):
            yield from _gzip(stream, path)
        elif head == b"BZh":
            yield from _Bzip2(stream, path, start, stop).read()
        else:
            yield from _plain(stream, start, stop)


def _plain(stream: IO[bytes], place: int, stop: int | None) -> Iterator[UnpackedChunk]:
    while True:
        own = stop is None or place < stop
        data = stream.read(min(_CHUNK, stop - place) if own and stop is not None else _CHUNK)
        if not data:
            return
        yield UnpackedChunk(data, own)
        place += len(data)


def _gzip(stream: IO[bytes], path: str) -> Iterator[UnpackedChunk | CorruptRecord]:
    unpacked = gzip.GzipFile(fileobj=stream)
    done = 0
    while True:
        try:
            data = unpacked.read(_CHUNK)
        except (EOFError, gzip.BadGzipFile, zlib.error) as fault:
            reason = CUT_OFF if isinstance(fault, EOFError) else BAD_PACKING
            yield CorruptRecord(f"{path}, after {done:,} unpacked bytes", reason, str(fault))
            return
        if not data:
            return
        yield UnpackedChunk(data, True)
        done += len(data)


class _Bzip2:
    """The streams of a file from the first that begins at `place` or behind it.

    data, place: bytes that were read and are not unpacked yet, and where in the file they begin. torn: a stream need
    not begin there, since what is before it was damaged or belongs to another range.
    """

    def __init__(self, stream: IO[bytes], path: str, place: int, stop: int | None):
        self.stream, self.path, self.stop = stream, path, stop
        self.data, self.place, self.torn = b"", place, place > 0

    def read(self) -> Iterator[UnpackedChunk | CorruptRecord]:
        """What all streams hold, to the end of the file."""
        while (passed := self._find()) is not None:
            own = self.stop is None or self.place < self.stop
            if not own:
                yield UnpackedChunk(b"", False)  # before any damage of another range
            if passed and not self.torn:
                yield CorruptRecord(f"{self.path}, {passed:,} bytes before byte {self.place:,}", BAD_PACKING, "")
            yield from self._unpack(own)

    def _find(self) -> int | None:
        """Go to the next stream; the number of bytes that were skipped, or None when there is none."""
        passed = 0
        while True:
            match = _STREAM.search(self.data)
            skip = match.start() if match else max(len(self.data) - _STREAM_BYTES + 1, 0)
            self.data, self.place, passed = self.data[skip:], self.place + skip, passed + skip
            if match:
                return passed
            more = self.stream.read(_CHUNK)
            if not more:
                return None
            self.data += more

    def _unpack(self, own: bool) -> Iterator[UnpackedChunk | CorruptRecord]:
        """The stream that begins here."""
        start, where = self.place, f"{self.path}, stream at byte {self.place:,}"
        unpacker = bz2.BZ2Decompressor()
        while not unpacker.eof:
            packed = b""
            if unpacker.needs_input:
                packed = self.data or self.stream.read(_CHUNK)
                self.data, self.place = b"", self.place + len(packed)
                if not packed:
                    yield CorruptRecord(where, CUT_OFF, "")
                    return
            try:
                data = unpacker.decompress(packed, _CHUNK)
            except (OSError, ValueError) as fault:
                yield CorruptRecord(where, BAD_PACKING, str(fault))
                self._go_to(start + _STREAM_BYTES)  # the next stream may have been taken for data of this one
                return
            yield UnpackedChunk(data, own)
        self.torn = False
        self.data, self.place = unpacker.unused_data, self.place - len(unpacker.unused_data)

    def _go_to(self, place: int) -> None:
        self.stream.seek(place)
        self.data, self.place, self.torn = b"", place, True
