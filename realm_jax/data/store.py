"""The passage store: tokens, texts and annotations of a corpus in memory-mapped, append-only segments.

    FOLDER/STORE.json              written last, atomically: limit, tokenizer, fingerprints, exact file sizes, versions
    FOLDER/segment-00000/*.npy     one file per column; a ragged column also has a `.offsets.npy` of int64 [rows + 1]
    FOLDER/segment-00000/*.utf8    texts, titles and document ids as plain bytes, with offsets likewise

An edit appends a segment or leaves rows out, and so makes a new version. Stored rows never change, and every version
can still be opened. Readers ignore a folder without STORE.json. Columns are memory-mapped, so a store of millions of
passages opens at once. `realm_jax.corpora.packer` makes passages out of articles. Read the tables of columns next, then
`PassageStore` and `append_segment`.
"""

import errno
import hashlib
import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from realm_jax.data.layouts import SpecialTokens
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.errors import UserError
from realm_jax.storage import flush_to_disk, read_json, sha256_hex, write_json_atomic

FORMAT_VERSION = 2
MANIFEST = "STORE.json"

# Columns: dtype and shape of one value.
COLUMNS: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
    "tokens": (np.uint16, ()),  # of the title, then of the body; uint32 if the segment's entry says so
    "sentences": (np.int32, (2,)),  # start and end, in tokens of the body
    "spans": (np.int32, (3,)),  # start and end, in tokens of the body, and the code of the kind
    "texts": (np.uint8, ()),
    "titles": (np.uint8, ()),
    "document_ids": (np.uint8, ()),
    "title_lengths": (np.uint16, ()),
    "document_keys": (np.uint64, ()),  # hashes of ids, so that an id is found without reading them all
    # It follows from the other columns and is stored because it takes a minute for 13 million passages. Fingerprints do
    # not cover it, and stores of earlier releases lack it.
    "salient_reach": (np.uint16, ()),
}
FIXED = ("title_lengths", "document_keys", "salient_reach")  # one value per row; in a ragged column, any number
RAGGED = tuple(name for name in COLUMNS if name not in FIXED)
UTF8 = ("texts", "titles", "document_ids")  # bytes without a header
TOKEN_DTYPE = np.dtype(np.uint16)  # of token ids, unless a vocabulary is too large for it
NO_SPAN = np.iinfo(np.uint16).max  # in `salient_reach`
FILES_PER_SEGMENT = len(COLUMNS) + len(RAGGED)  # they stay open while the segment is mapped

_LONGEST_TITLE = np.iinfo(np.uint16).max
_NAMED_PASSAGES = 3  # passages whose documents an error names
_MATRIX_ROWS = 4096  # rows laid out at a time: keeps the index arrays near the processor


# --- One segment ------------------------------------------------------------------------------------------------------


class Segment:
    """The memory-mapped columns of one segment; rows count from 0.

    Attributes:
        start: stored row of the store at which the segment begins.
        dtype: dtype of token ids.
        columns: values by column: [values, …] of a ragged column, one row after another; [rows] of a fixed one.
        offsets: int64 [rows + 1] by ragged column; row `r` has the values from `offsets[r]` to before `offsets[r + 1]`.
    """

    def __init__(self, folder: Path, entry: dict[str, Any], start: int = 0, span_kinds: Sequence[str] | None = None):
        """Map all files of a segment.

        Args:
            folder: the segment's folder.
            entry: its description in STORE.json.
            start: stored row of the store at which it begins.
            span_kinds: kinds of spans of the store; None: those of the segment.

        Raises:
            UserError: a file is not as `entry` says.
        """
        self.folder = folder
        self.start = start
        self.rows: int = entry["rows"]
        self.fingerprint: str = entry["fingerprint"]
        self.span_kinds: list[str] = entry["span_kinds"]
        self.dtype = np.dtype(entry.get("dtype", TOKEN_DTYPE))
        self.files: dict[str, dict[str, Any]] = entry["files"]
        store_kinds = list(self.span_kinds if span_kinds is None else span_kinds)
        self._kind_codes = np.array([store_kinds.index(kind) for kind in self.span_kinds], np.int32)  # [kinds]
        self.columns = {
            name: self._map(name) for name in COLUMNS if name != "salient_reach" or file_name(name) in self.files
        }
        self.offsets = {name: self._map(f"{name}.offsets") for name in RAGGED}

    def _map(self, name: str) -> NDArray[Any]:
        """Map one file. Raises UserError if its size, dtype or shape is not as it was written."""
        path = self.path(name)
        written_bytes = self.files[path.name]["bytes"]
        file_bytes = path.stat().st_size if path.exists() else None
        if file_bytes != written_bytes:
            state = "is missing" if file_bytes is None else f"has {file_bytes:,} bytes, not {written_bytes:,}"
            raise UserError(f"{path} {state}; the store is incomplete: copy or prepare it again")
        # NumPy cannot map an empty file.
        if path.suffix == ".utf8":
            return np.memmap(path, np.uint8, mode="r").view(np.ndarray) if written_bytes else np.zeros(0, np.uint8)
        try:
            array = np.lib.format.open_memmap(path, mode="r").view(np.ndarray)
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}); prepare the data again") from None
        dtype, shape = file_type(name, self.dtype)
        items = self.rows if name in FIXED else self.rows + 1 if name.endswith(".offsets") else len(array)
        if array.dtype != dtype or array.shape != (items, *shape):
            raise UserError(f"{path} holds {array.dtype} {array.shape}, not what was written; prepare the data again")
        return array

    def path(self, name: str) -> Path:
        """Return the file of a column."""
        return self.folder / file_name(name)

    def values(self, name: str, row: int) -> NDArray[Any]:
        """Return the values of one row of a ragged column.

        Args:
            name: name of the column.
            row: row of the segment.

        Returns:
            Values of the column's dtype [n, …].
        """
        offsets = self.offsets[name]
        return self.columns[name][offsets[row] : offsets[row + 1]]

    def value_rows(self, name: str) -> NDArray[np.int64]:
        """Return the row of each value of a ragged column, [values]."""
        return np.repeat(np.arange(self.rows), np.diff(self.offsets[name]))

    def string(self, name: str, row: int) -> str:
        """Return the text of one row of a UTF-8 column.

        Args:
            name: name of the column.
            row: row of the segment.

        Raises:
            UserError: the file is damaged.
        """
        try:
            return self.values(name, row).tobytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.path(name)} is damaged (row {row}: {error.reason}); prepare the data again"
            ) from None

    def with_store_kinds(self, spans: NDArray[np.int32]) -> NDArray[np.int32]:
        """Replace the segment's codes of kinds by the store's in spans [n, 3]. Raises UserError for an unknown code."""
        try:
            kinds = self._kind_codes[spans[:, 2].view(np.uint32)]  # unsigned, so that a negative code is unknown too
        except IndexError:
            raise UserError(f"{self.path('spans')} is damaged (a span of no kind); prepare the data again") from None
        return np.column_stack([spans[:, :2], kinds])

    @cached_property
    def documents_by_key(self) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the documents' keys in ascending order, their first rows and the rows after the last, [documents]."""
        row_keys = self.columns["document_keys"]
        starts = np.flatnonzero(np.concatenate([np.ones(min(1, self.rows), bool), row_keys[1:] != row_keys[:-1]]))
        order = np.argsort(row_keys[starts], kind="stable")  # [documents]
        return row_keys[starts][order], starts[order], np.append(starts[1:], self.rows)[order]


def sentences_of_spans(segment: Segment) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Find the sentence in which each salient span begins.

    Returns:
        The sentence's row, its number among all sentences of the segment, and the span's end in tokens from the start
        of the sentence, [spans] each.
    """
    sentences, spans = segment.columns["sentences"], segment.columns["spans"]
    sentence_keys = (segment.value_rows("sentences") << 32) + sentences[:, 0]  # [sentences], ascending
    span_keys = (segment.value_rows("spans") << 32) + spans[:, 0]  # [spans]
    numbers = np.searchsorted(sentence_keys, span_keys, "right") - 1  # [spans]: sentence of each
    ends = spans[:, 1] - sentences[numbers, 0] if len(sentences) else spans[:, 1]
    return np.searchsorted(segment.offsets["sentences"], numbers, "right") - 1, numbers, ends


def salient_reach(segment: Segment) -> NDArray[np.uint16]:
    """Return how many tokens of a sentence have to be read to see a whole salient span.

    The result is the minimum over the sentences of each row, NO_SPAN for a row without spans, [rows]. We compute it if
    the store was written without the column.
    """
    if "salient_reach" in segment.columns:
        return segment.columns["salient_reach"]
    rows, _, ends = sentences_of_spans(segment)
    reach = np.full(segment.rows, NO_SPAN, np.int64)  # [rows]
    np.minimum.at(reach, rows, np.clip(ends, 0, NO_SPAN - 1))
    return reach.astype(np.uint16)


# --- Reading ----------------------------------------------------------------------------------------------------------


class PassageStore:
    """One version of a corpus of passages, opened for reading.

    Rows count through all segments, without those that the version leaves out; within a version a row never changes its
    number. *Stored* rows are counted with them.

    Attributes:
        fingerprint: fingerprint of the version; it covers content and tokenizer.
        versions: fingerprints of all versions, oldest first.
        limit: number of tokens of the longest passages, special tokens included.
        dtype: dtype of token ids: uint16, or uint32 if the vocabulary is too large for it.
        span_kinds: kinds of salient spans; spans have indices into it.
        documents: number of documents that the rows come from.
        removed: [first, last): stored rows of each document that the version leaves out.
        stored_rows: number of stored rows.
        visible_rows: index that takes the rows of the version from an array over all stored rows: a slice of all, or
            int64 [rows] if the version leaves rows out.
        stored_to_row: row of each stored row, −1 for one that the version leaves out; None if it leaves out none.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], vocabulary_size: int | None, version: str | None):
        """Map the segments of a version; use `PassageStore.open`."""
        versions = versions_of(manifest)
        chosen = next((v for v in versions if v["fingerprint"] == (version or manifest["fingerprint"])), None)
        if chosen is None:
            raise UserError(
                f"{folder} has no version {version}; the folder was prepared again; train from the new version"
            )
        self.folder = folder
        self._vocabulary_size = vocabulary_size
        self.limit: int = manifest["limit"]
        self.tokenizer_fingerprint: str = manifest["tokenizer"]
        self.fingerprint: str = chosen["fingerprint"]
        self.versions: list[str] = [v["fingerprint"] for v in versions]
        self.removed: list[list[int]] = chosen["removed"]
        entries = manifest["segments"][: chosen["segments"]]
        self.documents: int = sum(entry["documents"] for entry in entries) - len(self.removed)
        self.span_kinds = tuple(dict.fromkeys(kind for entry in entries for kind in entry["span_kinds"]))
        *self._starts, self.stored_rows = np.cumsum([0, *(entry["rows"] for entry in entries)]).tolist()
        self.segments = [
            Segment(folder / entry["folder"], entry, start, self.span_kinds)
            for start, entry in zip(self._starts, entries, strict=True)
        ]
        self.dtype = self.segments[0].dtype
        self.visible_rows: slice | NDArray[np.int64] = slice(None)
        self.stored_to_row: NDArray[np.int32] | None = None
        self._rows = self.stored_rows
        # A version that leaves out rows needs the maps between its rows and stored ones.
        if self.removed:
            is_visible = np.ones(self.stored_rows, bool)  # [stored rows]
            for first, last in self.removed:
                is_visible[first:last] = False
            self.visible_rows = np.flatnonzero(is_visible)
            self._rows = len(self.visible_rows)
            self.stored_to_row = np.full(self.stored_rows, -1, np.int32)  # [stored rows]
            self.stored_to_row[self.visible_rows] = np.arange(self._rows)

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], vocabulary_size: int | None = None, version: str | None = None
    ) -> Self:
        """Open a version of a store without reading its content.

        Args:
            folder: the store's folder.
            vocabulary_size: number of tokens; larger ids are damage. None: they are not checked.
            version: fingerprint of an earlier version; None: the newest.

        Raises:
            UserError: there is no such store or version, or a file has another size than STORE.json says. `verify`
                finds flipped bits; so do readers if these make no text, no token or no kind of span.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        try:
            return cls(folder, manifest, vocabulary_size, version)
        except (KeyError, TypeError) as error:
            raise UserError(f"{folder / MANIFEST} is damaged (at {error}); prepare the data again") from None
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise UserError(
                f"{folder}: too many open files ({len(manifest['segments']):,} segment(s) of "
                f"{FILES_PER_SEGMENT} each); raise `ulimit -n`"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process open the files itself: pickling memory maps would copy the whole corpus."""
        return (type(self).open, (self.folder, self._vocabulary_size, self.fingerprint))

    def __eq__(self, other: object) -> bool:
        """Return True if both have the same passages in the same order, in any folders."""
        return isinstance(other, PassageStore) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __len__(self) -> int:
        return self._rows

    # One row.

    def title_tokens(self, row: int) -> NDArray[Any]:
        """Return the tokens of the title, `dtype` [t]."""
        segment, local = self._locate(row)
        return segment.values("tokens", local)[: segment.columns["title_lengths"][local]]

    def body_tokens(self, row: int) -> NDArray[Any]:
        """Return the tokens of the passage without its title, `dtype` [b]."""
        segment, local = self._locate(row)
        return segment.values("tokens", local)[segment.columns["title_lengths"][local] :]

    def sentences(self, row: int) -> NDArray[np.int32]:
        """Return start and end of each sentence in tokens of the body, int32 [s, 2]."""
        segment, local = self._locate(row)
        return segment.values("sentences", local)

    def spans(self, row: int) -> NDArray[np.int32]:
        """Return start and end in tokens of the body, and index into `span_kinds`, of each salient span, int32 [m, 3].

        Raises UserError for a damaged file.
        """
        segment, local = self._locate(row)
        return segment.with_store_kinds(segment.values("spans", local))

    def title(self, row: int) -> str:
        """Return the whole title, even if `title_tokens` holds only the first part of a very long one."""
        return self._string("titles", row)

    def text(self, row: int) -> str:
        """Return the slice of the article that the row's sentences cover."""
        return self._string("texts", row)

    def document_id(self, row: int) -> str:
        """Return the id of the article that the row was taken from."""
        return self._string("document_ids", row)

    def _string(self, name: str, row: int) -> str:
        segment, local = self._locate(row)
        return segment.string(name, local)

    def _locate(self, row: int) -> tuple[Segment, int]:
        """Return the segment of a row and the row's number in it."""
        if not 0 <= row < self._rows:
            raise IndexError(f"row {row} is not among the {self._rows} rows of {self.folder}")
        stored_row = row if isinstance(self.visible_rows, slice) else int(self.visible_rows[row])
        segment = self.segments[bisect_right(self._starts, stored_row) - 1]
        return segment, stored_row - segment.start

    # Many rows.

    def rows_of(self, document_id: str) -> range:
        """Return the rows of a document, which are adjacent; an empty range for an unknown id."""
        key, id_bytes = np.uint64(_document_key(document_id)), document_id.encode("utf-8")
        for segment in self.segments:
            keys, starts, stops = segment.documents_by_key
            for number in range(int(np.searchsorted(keys, key, "left")), int(np.searchsorted(keys, key, "right"))):
                start, stop = int(starts[number]), int(stops[number])
                row = int(self.rows_at(segment.start + starts[number]))
                if row >= 0 and segment.values("document_ids", start).tobytes() == id_bytes:  # two ids may share a key
                    return range(row, row + stop - start)
        return range(0)

    def rows_at(self, stored_rows: Any) -> Any:
        """Return the row of each stored row, −1 for one that the version leaves out; int64 of the same shape."""
        return stored_rows if self.stored_to_row is None else self.stored_to_row[stored_rows].astype(np.int64)

    def stored_range(self, rows: slice) -> tuple[slice, slice | NDArray[np.int64]]:
        """Return adjacent stored rows that contain adjacent rows, and the index of the rows among them."""
        start, stop, _ = rows.indices(self._rows)
        if isinstance(self.visible_rows, slice) or stop <= start:
            return slice(start, max(start, stop)), slice(None)
        stored = self.visible_rows[start:stop]
        return slice(int(stored[0]), int(stored[-1]) + 1), stored - stored[0]

    def counts(self, name: str) -> NDArray[np.int64]:
        """Return how many values of a ragged column each row has, [rows]."""
        return np.concatenate([np.diff(segment.offsets[name]) for segment in self.segments])[self.visible_rows]

    def column(self, name: str) -> NDArray[Any]:
        """Return the values of a column of all rows, one row after another; spans with indices into `span_kinds`.

        Raises UserError for a damaged file.
        """
        parts = []
        for segment in self.segments:
            values = segment.columns[name]
            if self.stored_to_row is not None:
                is_visible = self.stored_to_row[segment.start : segment.start + segment.rows] >= 0  # [rows]
                values = values[np.repeat(is_visible, np.diff(segment.offsets[name])) if name in RAGGED else is_visible]
            parts.append(segment.with_store_kinds(values) if name == "spans" else values)
        return np.concatenate(parts)

    def document_matrix(
        self, length: int, special: SpecialTokens, rows: slice = slice(None)
    ) -> tuple[NDArray[Any], NDArray[np.uint16], NDArray[np.uint16]]:
        """Lay rows out as `[CLS] title [SEP] body [SEP]`, padded on the right.

        A title is cut to `length` - 3 tokens and the body to the rest, as in REALM's release.

        Args:
            length: tokens of a row, special tokens included.
            special: ids of the special tokens.
            rows: adjacent rows; ask for large corpora in slices.

        Returns:
            Ids `dtype` [rows, length]; lengths uint16 [rows], special tokens counted; title lengths uint16 [rows],
            after the cut.

        Raises:
            UserError: a token is beyond the vocabulary.
        """
        stored, index = self.stored_range(rows)
        ids, lengths, title_lengths = self.stored_matrix(length, special, stored.start, stored.stop)
        return ids[index], lengths[index], title_lengths[index]

    def stored_matrix(
        self, length: int, special: SpecialTokens, start: int, stop: int
    ) -> tuple[NDArray[Any], NDArray[np.uint16], NDArray[np.uint16]]:
        """Return `document_matrix` of stored rows.

        Args:
            length: tokens of a row, special tokens included.
            special: ids of the special tokens.
            start: first stored row.
            stop: stored row behind the last one.

        Raises:
            UserError: a token is beyond the vocabulary.
        """
        ids = np.full((stop - start, length), special.pad, self.dtype)  # [rows, length]
        lengths = np.empty(stop - start, np.uint16)  # [rows]
        title_lengths = np.empty(stop - start, np.uint16)  # [rows]
        blocks = (
            (segment, first, min(first + _MATRIX_ROWS, stop, segment.start + segment.rows))
            for segment in self.segments
            for first in range(max(start, segment.start), min(stop, segment.start + segment.rows), _MATRIX_ROWS)
        )
        for segment, first, last in blocks:
            block = slice(first - start, last - start)
            offsets = segment.offsets["tokens"][first - segment.start : last - segment.start + 1]  # [rows + 1]
            tokens = segment.columns["tokens"][offsets[0] : offsets[-1]]  # [tokens of all rows]
            counts = np.diff(offsets)  # [rows]
            titles = segment.columns["title_lengths"][first - segment.start : last - segment.start].astype(np.int64)
            bodies = counts - titles  # [rows]
            cut_titles = np.minimum(titles, length - 3)  # [rows]: lengths after truncation
            used = np.minimum(cut_titles + bodies + 3, length)  # [rows]
            cut_bodies = used - cut_titles - 3  # [rows]
            # Remove the truncated tokens, so that the rest fills the matrix in one assignment.
            if (titles > cut_titles).any() or (bodies > cut_bodies).any():
                column = np.arange(len(tokens)) - np.repeat(offsets[:-1] - offsets[0], counts)  # of a token, in its row
                is_cut_title = (column >= np.repeat(cut_titles, counts)) & (column < np.repeat(titles, counts))
                tokens = tokens[~(is_cut_title | (column >= np.repeat(titles + cut_bodies, counts)))]
            columns = np.arange(length, dtype=np.int32)  # [length]
            last_columns, separators = (values.astype(np.int32)[:, None] for values in (used - 1, cut_titles + 1))
            is_token = (columns < last_columns) & (columns != separators)  # [rows, length]: all but special tokens
            is_token[:, 0] = False
            block_ids, rows = ids[block], np.arange(last - first)
            block_ids[is_token] = tokens
            block_ids[:, 0] = special.cls
            block_ids[rows, cut_titles + 1] = special.sep
            block_ids[rows, used - 1] = special.sep
            lengths[block], title_lengths[block] = used, cut_titles
            # A token without an embedding would spread through the results as "not a number".
            largest = block_ids.max(initial=0)
            if self._vocabulary_size is not None and largest >= self._vocabulary_size:
                raise UserError(
                    f"{self.folder} is damaged: it holds token {largest}, but the vocabulary ends before "
                    f"{self._vocabulary_size}; prepare the data again"
                )
        return ids, lengths, title_lengths

    def verify(self) -> None:
        """Read everything and compare checksums. Raises UserError that names the first damaged file."""
        for segment in self.segments:
            offsets = {f"{name}.offsets": array for name, array in segment.offsets.items()}
            for name, array in (segment.columns | offsets).items():
                if sha256_hex(np.ascontiguousarray(array).data) != segment.files[file_name(name)]["sha256"]:
                    raise UserError(f"{segment.path(name)} is damaged; prepare the data again")


# --- Writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Passage:
    """One row to be written.

    Attributes:
        document_id: id of its document.
        title: the complete title.
        text: text of the passage.
        title_tokens: tokens of the title, truncated [t].
        body_tokens: tokens of the text [b].
        sentences: ranges of tokens of the body [s, 2].
        spans: start and end in tokens of the body, and kind, of each salient span.
    """

    document_id: str
    title: str
    text: str
    title_tokens: NDArray[Any]
    body_tokens: NDArray[Any]
    sentences: NDArray[Any]
    spans: Sequence[tuple[int, int, str]]


class SegmentWriter:
    """Writes one segment: a context manager that leaves no folder behind after an exception.

    All rows of a document must be written one after another, and a document is written once. `entry` is the segment's
    description for STORE.json, once the block has ended well.
    """

    def __init__(self, folder: Path, tokenizer: str, dtype: DTypeLike = TOKEN_DTYPE):
        """Prepare to write a segment.

        Args:
            folder: the segment's folder.
            tokenizer: fingerprint of the tokenizer.
            dtype: dtype of token ids.
        """
        self.folder = folder
        self.entry: dict[str, Any] = {}
        self._tokenizer, self._dtype = tokenizer, np.dtype(dtype)
        self.span_kinds: dict[str, int] = {}

    def __enter__(self) -> Self:
        shutil.rmtree(self.folder, ignore_errors=True)  # an interrupted writer may have left files
        self.folder.mkdir(parents=True)
        self.sinks: dict[str, Sink] = {}
        for name in COLUMNS:
            if name != "salient_reach":
                self.sinks[name] = Sink(self.folder, name, self._dtype)
            if name in RAGGED:
                self.sinks[f"{name}.offsets"] = Sink(self.folder, f"{name}.offsets", self._dtype)
                self.sinks[f"{name}.offsets"].write(np.zeros(1, np.int64))
        return self

    def write(self, passages: Sequence[Passage]) -> None:
        """Add rows. Raises UserError, with the document's id, for a title that is too long to be stored."""
        for passage in passages:
            if len(passage.title_tokens) > _LONGEST_TITLE:
                raise UserError(
                    f"document {passage.document_id!r}: its title keeps {len(passage.title_tokens):,} tokens, "
                    f"more than {_LONGEST_TITLE:,}; shorten it, or set a smaller --limit, to which titles are cut"
                )
        kinds = self.span_kinds  # numbered in the order in which they come
        ragged_rows: dict[str, list[Any]] = {
            "tokens": [np.concatenate([passage.title_tokens, passage.body_tokens]) for passage in passages],
            "sentences": [passage.sentences for passage in passages],
            "spans": [
                [(start, end, kinds.setdefault(kind, len(kinds))) for start, end, kind in p.spans] for p in passages
            ],
            "texts": [passage.text.encode("utf-8") for passage in passages],
            "titles": [passage.title.encode("utf-8") for passage in passages],
            "document_ids": [passage.document_id.encode("utf-8") for passage in passages],
        }
        for name, rows in ragged_rows.items():
            sink, ends = self.sinks[name], np.cumsum([len(row) for row in rows], dtype=np.int64)  # [passages]
            self.sinks[f"{name}.offsets"].write(sink.items + ends)
            if name in UTF8:
                sink.write(np.frombuffer(b"".join(rows), np.uint8))
            else:
                sink.write(np.concatenate([row for row in rows if len(row)] or [np.zeros(0)]))
        self.sinks["title_lengths"].write(np.array([len(passage.title_tokens) for passage in passages]))
        keys = [_document_key(passage.document_id) for passage in passages]
        self.sinks["document_keys"].write(np.array(keys, np.uint64))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Check the written segment, add the derived columns and describe it.

        Raises UserError for a document that was written twice and for a span outside of all sentences.
        """
        try:
            files = {sink.path.name: sink.close() for sink in self.sinks.values()}
            if kind is not None:
                return
            # --- The entry of the segment, whose fingerprint covers the written columns
            kinds = list(self.span_kinds)
            digests = {name: file["sha256"] for name, file in sorted(files.items())}
            content = json.dumps({"tokenizer": self._tokenizer, "span_kinds": kinds, "files": digests}, sort_keys=True)
            entry = {
                "folder": self.folder.name,
                "rows": self.sinks["title_lengths"].items,
                "fingerprint": sha256_hex(content.encode()),
                "span_kinds": kinds,
                **({} if self._dtype == TOKEN_DTYPE else {"dtype": self._dtype.name}),
                "files": files,
            }
            # --- Check the rows as readers will see them
            segment = Segment(self.folder, entry)
            keys, starts, _ = segment.documents_by_key
            if len(repeated := starts[1:][keys[1:] == keys[:-1]]):
                document = segment.string("document_ids", int(repeated[0]))
                raise UserError(f"document {document!r} was written twice; give each document its own id")
            span_rows = segment.value_rows("spans")
            if len(outside := span_rows[span_rows != sentences_of_spans(segment)[0]]):
                document = segment.string("document_ids", int(outside[0]))
                raise UserError(f"document {document!r} has a salient span outside of its sentences; leave it out")
            # --- The derived column
            sink = Sink(self.folder, "salient_reach", self._dtype)
            sink.write(salient_reach(segment))
            self.entry = entry | {"files": files | {sink.path.name: sink.close()}, "documents": len(keys)}
        finally:
            if not self.entry:
                shutil.rmtree(self.folder, ignore_errors=True)


class Sink:
    """One column file being written: appended to in parts and hashed on the way; `close` completes the header."""

    def __init__(self, folder: Path, name: str, token_dtype: np.dtype[Any]):
        """Open the file of a column, or of a column's offsets."""
        self.path = path = folder / file_name(name)
        self.items = 0
        self._dtype, self._shape = file_type(name, token_dtype)
        self._hash = hashlib.sha256()
        self._stream = open(path, "wb")
        self._write_header()

    def write(self, values: NDArray[Any]) -> None:
        """Append values [n, *shape], cast to the column's dtype."""
        data = np.ascontiguousarray(values, self._dtype).data
        self._hash.update(data)
        self._stream.write(data)
        self.items += len(values)

    def close(self) -> dict[str, Any]:
        """Complete the header and flush the file to the disk; returns its size and digest for the segment's entry."""
        self._stream.seek(0)
        self._write_header()
        flush_to_disk(self._stream)
        self._stream.close()
        return {"bytes": self.path.stat().st_size, "sha256": self._hash.hexdigest()}

    def _write_header(self) -> None:
        """Write the header, at first and again at the end: NumPy pads it, so that its size stays the same."""
        if self.path.suffix == ".npy":
            description = np.lib.format.dtype_to_descr(self._dtype)
            header = {"descr": description, "fortran_order": False, "shape": (self.items, *self._shape)}
            np.lib.format.write_array_header_1_0(self._stream, header)


def file_name(name: str) -> str:
    """Return the name of the file of a column, or of its offsets."""
    return f"{name}.utf8" if name in UTF8 else f"{name}.npy"


def file_type(name: str, token_dtype: np.dtype[Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return dtype and shape of one value in a column's file.

    Args:
        name: name of the column, or of its offsets.
        token_dtype: dtype of token ids.
    """
    dtype, shape = (np.int64, ()) if name.endswith(".offsets") else COLUMNS[name]
    return token_dtype if name == "tokens" else np.dtype(dtype), shape


def segment_folder(store: Path, number: int) -> Path:
    """Return the folder of a segment.

    Args:
        store: folder of the store.
        number: number of the segment.
    """
    return store / f"segment-{number:05d}"


def _document_key(document_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(document_id.encode("utf-8"), digest_size=8).digest(), "little")


# --- Versions ---------------------------------------------------------------------------------------------------------


@contextmanager
def append_segment(
    folder: str | os.PathLike[str], tokenizer: Tokenizer, limit: int, replaces: Collection[str] = ()
) -> Iterator[SegmentWriter]:
    """Write one more segment of a store, or the only one of a new store, as a new version.

    Readers see the rows once the block ends well; after an exception the folder is as before.

    Args:
        folder: the store's folder.
        tokenizer: made the tokens.
        limit: number of tokens of the longest passages.
        replaces: documents of the newest version that the new one leaves out, or has in the new segment.

    Raises:
        UserError: an existing store was made with another tokenizer or limit, has no document of `replaces`, or has a
            document that is written and not replaced.
    """
    folder, settings = Path(folder), {"limit": limit, "tokenizer": tokenizer.fingerprint}
    is_new_folder, earlier, manifest = not folder.exists(), None, None
    if (folder / MANIFEST).exists():
        earlier, manifest = PassageStore.open(folder), read_manifest(folder)
        for key, value in settings.items():
            if manifest[key] != value:
                raise UserError(f"{folder}: {key} is {manifest[key]}, not {value}; append with the same one")
    entries = manifest["segments"] if manifest else []
    number = 1 + max((int(entry["folder"].rpartition("-")[2]) for entry in entries), default=-1)
    try:
        with SegmentWriter(segment_folder(folder, number), tokenizer.fingerprint, tokenizer.dtype) as writer:
            yield writer
        # A document may be in a version only once.
        removed: list[list[int]] = []
        if earlier is not None:
            segment = Segment(writer.folder, writer.entry)
            keys, starts, _ = segment.documents_by_key
            known_keys = np.concatenate([known.documents_by_key[0] for known in earlier.segments])
            for row in np.sort(starts[np.isin(keys, known_keys)]).tolist():
                document = segment.string("document_ids", row)
                if document not in replaces and earlier.rows_of(document):
                    raise UserError(
                        f"document {document!r} is in {folder} already; append new documents only, or replace it"
                    )
            removed = _removed_with(earlier, replaces)
        write_json_atomic(folder / MANIFEST, new_version(settings, [*entries, writer.entry], removed, manifest))
    except BaseException:
        shutil.rmtree(folder if is_new_folder else segment_folder(folder, number), ignore_errors=True)
        raise


def remove_documents(folder: Path, documents: Collection[str]) -> PassageStore:
    """Make a version of a store without some documents of the newest one.

    Args:
        folder: the store's folder.
        documents: their ids.

    Returns:
        The new version.

    Raises:
        UserError: a document is unknown, or no passage would remain.
    """
    manifest, store = read_manifest(folder), PassageStore.open(folder)
    settings = {key: manifest[key] for key in ("limit", "tokenizer")}
    removed = _removed_with(store, documents)
    if sum(last - first for first, last in removed) == store.stored_rows:
        raise UserError(f"{folder}: nothing would be left; a corpus needs at least one document")
    write_json_atomic(folder / MANIFEST, new_version(settings, manifest["segments"], removed, manifest))
    return PassageStore.open(folder)


def _removed_with(store: PassageStore, documents: Collection[str]) -> list[list[int]]:
    """Add the stored rows of documents to those that a version leaves out. Raises UserError for an unknown document."""
    removed = list(store.removed)
    for document in dict.fromkeys(documents):
        rows = store.rows_of(document)
        if not rows:
            first_rows = range(min(_NAMED_PASSAGES, len(store)))
            names = ", ".join(dict.fromkeys(repr(store.document_id(row)) for row in first_rows))
            raise UserError(f"{store.folder} has no document {document!r}; its first ones are called {names}")
        stored, _ = store.stored_range(slice(rows.start, rows.stop))
        removed.append([stored.start, stored.stop])
    return sorted(removed)


def new_version(
    settings: dict[str, Any],
    segments: list[Any],
    removed: Sequence[list[int]] = (),
    earlier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return STORE.json with one more version than `earlier` has, or with the first one.

    Args:
        settings: limit, and fingerprint of the tokenizer.
        segments: entries of all segments, as their writers describe them.
        removed: [first, last) stored rows of each document that the version leaves out.
        earlier: STORE.json so far; None for a new store.
    """
    fingerprints = [segment["fingerprint"] for segment in segments]
    content = {"segments": fingerprints, "removed": removed} if removed else fingerprints
    fingerprint = sha256_hex(json.dumps(content, sort_keys=True).encode())
    version = {"fingerprint": fingerprint, "segments": len(segments), "removed": [*removed]}
    manifest = {"format_version": FORMAT_VERSION, **settings, "fingerprint": fingerprint, "segments": segments}
    earlier_versions = [v for v in (versions_of(earlier) if earlier else []) if v["fingerprint"] != fingerprint]
    return manifest | {"versions": [*earlier_versions, version]}


def versions_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all versions, oldest first; a store that was never edited has one."""
    only = {"fingerprint": manifest["fingerprint"], "segments": len(manifest["segments"]), "removed": []}
    return manifest.get("versions") or [only]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read STORE.json of a folder. Raises UserError if it is missing or has another format."""
    if not (folder / MANIFEST).exists():
        raise UserError(f"{folder} holds no finished passage store ({MANIFEST} is missing); run `realm prepare`")
    manifest = read_json(folder / MANIFEST)
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(f"{folder / MANIFEST} has format version {version}, not {FORMAT_VERSION}; prepare it again")
    return manifest
