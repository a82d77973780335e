"""One segment of a passage store: its columns, how they are written and how they are mapped back.

A fixed column has one value a row. A ragged column has any number of values a row, and a file of offsets, int64
[rows + 1], beside it. Not for what makes a segment part of a store: see `realm_jax.data.store`.
Read the tables of columns next.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from realm_jax.data.layouts import SpecialTokens
from realm_jax.errors import UserError
from realm_jax.storage import digest, flush_to_disk

# Columns with any number of values a row: dtype and shape of one value. UTF-8 columns are bytes without a header.
RAGGED: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
    "tokens": (np.uint16, ()),  # of the title, then of the body; uint32 where the segment's entry says so
    "sentences": (np.int32, (2,)),  # start and end, in tokens of the body
    "spans": (np.int32, (3,)),  # start and end, in tokens of the body, and the code of the kind
    "texts": (np.uint8, ()),
    "titles": (np.uint8, ()),
    "document_ids": (np.uint8, ()),
}
TOKENS = np.dtype(np.uint16)  # of ids, unless a vocabulary is too large for it
_UTF8 = ("texts", "titles", "document_ids")
# Columns with one value a row. A document's key is a hash of its id: ids are found without reading all of them.
FIXED: dict[str, type[np.generic]] = {"title_lengths": np.uint16, "document_keys": np.uint64}
# What follows from the other columns, written so that no start has to work it out; not a part of the fingerprint, and
# absent from stores of earlier releases.
DERIVED: dict[str, type[np.generic]] = {"salient_reach": np.uint16}
NO_SPAN = np.iinfo(np.uint16).max  # in `salient_reach`
FILES = 2 * len(RAGGED) + len(FIXED) + len(DERIVED)  # of a segment, which stay open while it is mapped
_LONGEST_TITLE = np.iinfo(np.uint16).max


@dataclass(frozen=True, slots=True)
class Passage:
    """One row to be written. Ranges count pieces of the body: sentences [s, 2], spans (start, end, kind)."""

    document_id: str
    title: str
    text: str
    title_tokens: NDArray[Any]
    body_tokens: NDArray[Any]
    sentences: NDArray[Any]
    spans: Sequence[tuple[int, int, str]]


class Segment:
    """The memory-mapped files of one segment; rows count from 0."""

    def __init__(self, folder: Path, entry: dict[str, Any]):
        self.rows: int = entry["rows"]
        self.fingerprint: str = entry["fingerprint"]
        self.documents: int = entry["documents"]
        self.span_kinds: list[str] = entry["span_kinds"]
        self.folder = folder
        self._files = entry["files"]
        self.dtype = np.dtype(entry.get("dtype", TOKENS))
        """Of the ids of tokens."""
        self.values = {
            name: self._open(name, self.dtype if name == "tokens" else dtype, shape)
            for name, (dtype, shape) in RAGGED.items()
        }
        self.offsets = {name: self._open(f"{name}.offsets", np.int64, (), self.rows + 1) for name in RAGGED}
        self.fixed = {
            name: self._open(name, dtype, (), self.rows)
            for name, dtype in (FIXED | DERIVED).items()
            if name in FIXED or file_name(name) in self._files
        }

    def ragged(self, name: str, row: int) -> NDArray[Any]:
        """The values of one row of a ragged column."""
        offsets = self.offsets[name]
        return self.values[name][offsets[row] : offsets[row + 1]]

    def path(self, name: str) -> Path:
        """The file of a column."""
        return self.folder / file_name(name)

    def string(self, name: str, row: int) -> str:
        """The text of one row of a UTF-8 column. Raises UserError, naming the file, where it is damaged."""
        try:
            return self.ragged(name, row).tobytes().decode("utf-8")
        except UnicodeDecodeError as fault:
            raise UserError(
                f"{self.path(name)} is damaged (row {row}: {fault.reason}); prepare the data again"
            ) from None

    def fill(
        self, ids: NDArray[Any], first: int, last: int, special: SpecialTokens
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lay rows [first, last) out in `ids` (padding given); lengths and title lengths of the rows, after the cut."""
        length = ids.shape[1]
        offsets = self.offsets["tokens"][first : last + 1]
        tokens = self.values["tokens"][offsets[0] : offsets[-1]]
        counts = np.diff(offsets)
        titles = self.fixed["title_lengths"][first:last].astype(np.int64)
        kept_titles = np.minimum(titles, length - 3)
        lengths = np.minimum(kept_titles + (counts - titles) + 3, length)
        kept_bodies = lengths - kept_titles - 3
        if (titles > kept_titles).any() or (counts - titles > kept_bodies).any():
            within = np.arange(len(tokens)) - np.repeat(offsets[:-1] - offsets[0], counts)
            of_title, of_body = np.repeat(titles, counts), np.repeat(titles + kept_bodies, counts)
            cut = (within >= np.repeat(kept_titles, counts)) & (within < of_title) | (within >= of_body)
            tokens = tokens[~cut]
        column = np.arange(length, dtype=np.int32)
        ends, titles_end = (values.astype(np.int32)[:, None] for values in (lengths - 1, kept_titles + 1))
        places = (column < ends) & (column != titles_end)  # of what is stored: all but the special pieces
        places[:, 0] = False
        ids[places] = tokens
        every = np.arange(last - first)
        ids[:, 0] = special.cls
        ids[every, kept_titles + 1] = special.sep
        ids[every, lengths - 1] = special.sep
        return lengths, kept_titles

    @cached_property
    def document_starts(self) -> NDArray[np.int64]:
        """First row of each document."""
        keys = self.fixed["document_keys"]
        return np.flatnonzero(np.concatenate([np.ones(min(1, len(keys)), bool), keys[1:] != keys[:-1]]))

    @cached_property
    def _sorted_documents(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Keys of the documents in ascending order, and the number of each document."""
        keys = self.fixed["document_keys"][self.document_starts]
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    def rows_of(self, document_id: str) -> range:
        """The rows of a document, or an empty range."""
        keys, order = self._sorted_documents
        key = np.uint64(_document_key(document_id))
        wanted = document_id.encode("utf-8")
        for position in range(int(np.searchsorted(keys, key, "left")), int(np.searchsorted(keys, key, "right"))):
            document = int(order[position])
            start = int(self.document_starts[document])
            if self.ragged("document_ids", start).tobytes() == wanted:
                following = self.document_starts[document + 1 : document + 2]
                return range(start, int(following[0]) if len(following) else self.rows)
        return range(0)

    def repeated_document(self) -> str | None:
        """The id of a document whose rows are not adjacent, if there is one."""
        keys, order = self._sorted_documents
        repeated = order[1:][keys[1:] == keys[:-1]]
        return self._id(int(repeated[0])) if len(repeated) else None

    def shared_document(self, other: "Segment") -> str | None:
        """The id of a document that the other segment has too, if there is one."""
        keys, order = self._sorted_documents
        shared = order[np.isin(keys, other._sorted_documents[0])]
        return self._id(int(shared[0])) if len(shared) else None

    def document_ids(self) -> Iterator[str]:
        """The ids of all documents, in order."""
        return (self._id(document) for document in range(len(self.document_starts)))

    def all_spans(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The rows of all salient spans, int64 [n], and the spans, int32 [n, 3]."""
        return np.repeat(np.arange(self.rows), np.diff(self.offsets["spans"])), self.values["spans"]

    def count_piece(self, piece: int) -> tuple[int, int]:
        """How often a token occurs, titles too, and how many pieces there are."""
        return int(np.count_nonzero(self.values["tokens"] == piece)), len(self.values["tokens"])

    @cached_property
    def salient_reach(self) -> NDArray[np.uint16]:
        """How many pieces of a sentence of each row have to be seen for one of its salient spans to be among them: the
        fewest of all its sentences, NO_SPAN in a row without spans, uint16 [rows]."""
        if "salient_reach" in self.fixed:
            return self.fixed["salient_reach"]
        rows, _, ends = self._span_owners()
        reach = np.full(self.rows, NO_SPAN, np.int64)
        np.minimum.at(reach, rows, np.clip(ends, 0, NO_SPAN - 1))
        return reach.astype(np.uint16)

    def row_of_span_outside(self) -> int | None:
        """A row with a salient span that begins in none of its sentences, if there is one."""
        rows = self.all_spans()[0]
        outside = rows[rows != self._span_owners()[0]]
        return int(outside[0]) if len(outside) else None

    def _span_owners(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """The sentence that each salient span begins in: its row, its place among all sentences, and where in it the
        span ends, [n] each."""
        rows, spans = self.all_spans()
        sentence_rows = np.repeat(np.arange(self.rows), np.diff(self.offsets["sentences"]))
        keys = (sentence_rows << 32) + self.values["sentences"][:, 0]
        owners = np.searchsorted(keys, (rows << 32) + spans[:, 0], "right") - 1
        ends = spans[:, 1] - self.values["sentences"][owners, 0] if len(self.values["sentences"]) else spans[:, 1]
        return np.searchsorted(self.offsets["sentences"], owners, "right") - 1, owners, ends

    def salient_sentences(self, room: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sentences with a salient span that ends within `room` pieces of the sentence's start, in order.

        Rows, and numbers of the sentences in their rows, int64 [n] each.
        """
        rows, owners, ends = self._span_owners()
        owners, first = np.unique(owners[ends <= room], return_index=True)
        rows = rows[ends <= room][first]
        return rows, owners - self.offsets["sentences"][rows]

    def verify(self) -> None:
        """Raise UserError naming the first file whose content is not what was written."""
        arrays = {**self.values, **{f"{name}.offsets": self.offsets[name] for name in RAGGED}, **self.fixed}
        for name, array in arrays.items():
            if digest(np.ascontiguousarray(array).data) != self._files[file_name(name)]["sha256"]:
                raise UserError(f"{self.path(name)} is damaged; prepare the data again")

    def _id(self, document: int) -> str:
        return self.string("document_ids", int(self.document_starts[document]))

    def _open(self, name: str, dtype: DTypeLike, shape: tuple[int, ...], items: int | None = None) -> NDArray[Any]:
        """Map one file after a look at its size; `items` is how many values it must hold, if that is known."""
        path = self.path(name)
        size = self._files[path.name]["bytes"]
        found = path.stat().st_size if path.exists() else None
        if found != size:
            state = "is missing" if found is None else f"has {found:,} bytes, not {size:,}"
            raise UserError(f"{path} {state}; the store is incomplete: copy or prepare it again")
        if path.suffix == ".utf8":
            return np.memmap(path, np.uint8, mode="r").view(np.ndarray) if size else np.zeros(0, np.uint8)
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        except ValueError as fault:
            raise UserError(f"{path} is damaged ({fault}); prepare the data again") from None
        if array.dtype != dtype or array.shape[1:] != shape or items not in (None, len(array)):
            raise UserError(f"{path} holds {array.dtype} {array.shape}, not what was written; prepare the data again")
        return array


class SegmentWriter:
    """Writes one segment: a context manager that leaves no folder behind after an exception.

    All rows of a document must be written one after another, and a document is written once.
    """

    def __init__(self, folder: Path, tokenizer: str, dtype: DTypeLike = TOKENS):
        """folder: is made anew, whatever an interrupted writer left there. tokenizer: its fingerprint; dtype: of its
        ids."""
        self.folder = folder
        self.rows = 0
        self.entry: dict[str, Any] = {}
        """What STORE.json says of the segment, once the block has ended well."""
        self._tokenizer, self._dtype = tokenizer, np.dtype(dtype)
        self._span_kinds: dict[str, int] = {}

    def __enter__(self) -> Self:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._sinks: dict[str, Sink] = {}
        for name, (dtype, shape) in RAGGED.items():
            own = self._dtype if name == "tokens" else dtype
            self._sinks[name] = Sink(self.folder / file_name(name), own, shape)
            self._sinks[f"{name}.offsets"] = Sink(self.folder / file_name(f"{name}.offsets"), np.int64, ())
            self._sinks[f"{name}.offsets"].write(np.zeros(1, np.int64))
        for name, dtype in FIXED.items():
            self._sinks[name] = Sink(self.folder / file_name(name), dtype, ())
        return self

    def write(self, passages: Sequence[Passage]) -> None:
        """Add rows. Raises UserError, with the document's id, for a title that is too long to be stored."""
        for passage in passages:
            if len(passage.title_tokens) > _LONGEST_TITLE:
                raise UserError(
                    f"document {passage.document_id!r}: its title keeps {len(passage.title_tokens):,} tokens, "
                    f"more than {_LONGEST_TITLE:,}; shorten it, or set a smaller --limit, to which titles are cut"
                )
        self._write_ragged("tokens", [np.concatenate([one.title_tokens, one.body_tokens]) for one in passages])
        self._write_ragged("sentences", [np.asarray(one.sentences, np.int32).reshape(-1, 2) for one in passages])
        self._write_ragged("spans", [self._coded(one.spans) for one in passages])
        self._write_ragged("texts", [_utf8(one.text) for one in passages])
        self._write_ragged("titles", [_utf8(one.title) for one in passages])
        self._write_ragged("document_ids", [_utf8(one.document_id) for one in passages])
        self._sinks["title_lengths"].write(np.array([len(one.title_tokens) for one in passages], np.uint16))
        keys = [_document_key(one.document_id) for one in passages]
        self._sinks["document_keys"].write(np.array(keys, np.uint64))
        self.rows += len(passages)

    def _write_ragged(self, name: str, rows: list[NDArray[Any]]) -> None:
        """Add the values of some rows to a column, and the places where they end."""
        sink = self._sinks[name]
        self._sinks[f"{name}.offsets"].write(sink.items + np.cumsum([len(row) for row in rows], dtype=np.int64))
        if rows:
            sink.write(np.concatenate(rows))

    def _coded(self, spans: Sequence[tuple[int, int, str]]) -> NDArray[np.int32]:
        """Spans as int32 [m, 3]. Kinds are numbered in the order in which they come."""
        kinds = self._span_kinds
        rows = [(start, end, kinds.setdefault(kind, len(kinds))) for start, end, kind in spans]
        return np.array(rows, np.int32).reshape(-1, 3)

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            entry = self._finish()
            if kind is None:
                self.entry = self._checked(entry)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        if not self.entry:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _finish(self) -> dict[str, Any]:
        """Complete all files."""
        files = {}
        for sink in self._sinks.values():
            files[sink.path.name] = sink.close()
        digests = {name: value["sha256"] for name, value in sorted(files.items())}
        kinds = list(self._span_kinds)
        content = json.dumps({"tokenizer": self._tokenizer, "span_kinds": kinds, "files": digests}, sort_keys=True)
        fingerprint = digest(content.encode())
        about = {"folder": self.folder.name, "rows": self.rows, "fingerprint": fingerprint, "span_kinds": kinds}
        return about | ({} if self._dtype == TOKENS else {"dtype": self._dtype.name}) | {"files": files}

    def _checked(self, entry: dict[str, Any]) -> dict[str, Any]:
        """The entry of a segment that is as it should be, with the columns that follow from the others."""
        segment = Segment(self.folder, entry | {"documents": 0})
        if (document := segment.repeated_document()) is not None:
            raise UserError(f"document {document!r} was written twice; give each document its own id")
        if (row := segment.row_of_span_outside()) is not None:
            document = segment.string("document_ids", row)
            raise UserError(f"document {document!r} has a salient span outside of its sentences; leave it out")
        derived = {}
        for name, dtype in DERIVED.items():
            sink = Sink(self.folder / file_name(name), dtype, ())
            sink.write(getattr(segment, name))
            derived[sink.path.name] = sink.close()
        return entry | {"files": entry["files"] | derived, "documents": len(segment.document_starts)}


class Sink:
    """One column file being written: appended to in pieces, hashed on the way, its header completed at the end."""

    def __init__(self, path: Path, dtype: DTypeLike, shape: tuple[int, ...]):
        self.path = path
        self.items = 0
        self._dtype = np.dtype(dtype)
        self._shape = shape
        self._hash = hashlib.sha256()
        self._stream = open(path, "wb")
        self._header()

    def write(self, values: NDArray[Any]) -> None:
        """Append values [n, *shape], cast to the column's dtype."""
        data = np.ascontiguousarray(values, self._dtype).data
        self._hash.update(data)
        self._stream.write(data)
        self.items += len(values)

    def close(self) -> dict[str, Any]:
        """Complete the header; returns, once the file is on the disk, what a segment's entry says of it. Nothing can be
        written afterwards."""
        self._stream.seek(0)
        self._header()
        flush_to_disk(self._stream)
        self._stream.close()
        return {"bytes": self.path.stat().st_size, "sha256": self._hash.hexdigest()}

    def _header(self) -> None:
        """NumPy pads a header so that it keeps its size while the first axis grows, which lets us write it twice."""
        if self.path.suffix == ".npy":
            description = np.lib.format.dtype_to_descr(self._dtype)
            header = {"descr": description, "fortran_order": False, "shape": (self.items, *self._shape)}
            np.lib.format.write_array_header_1_0(self._stream, header)


def file_name(name: str) -> str:
    return f"{name}.utf8" if name in _UTF8 else f"{name}.npy"


def _utf8(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode("utf-8"), np.uint8)


def _document_key(document_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(document_id.encode("utf-8"), digest_size=8).digest(), "little")
