"""The passage store: tokens, texts and annotations of a corpus in memory-mapped, append-only segments.

    FOLDER/STORE.json              written last, atomically: limit, tokenizer, fingerprints, exact file sizes, versions
    FOLDER/segment-00000/*.npy     one file a column; a ragged column has a `.offsets.npy` of int64 [rows + 1] beside it
    FOLDER/segment-00000/*.utf8    texts, titles and document ids as plain bytes, with offsets likewise

An edit appends a segment or leaves rows out, and so makes a new version; what is stored is never changed, and every
version can still be opened. A folder without STORE.json does not exist for readers. Nothing is read before it is asked
for, so that a store of millions of passages opens at once. Not for making passages out of articles: see
`realm_jax.corpora.build`. Read `PassageStore` next, then `append_segment`; the files are `realm_jax.data.segments`.
"""

import errno
import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.layouts import SpecialTokens
from realm_jax.data.recurring import recurring_spans
from realm_jax.data.segments import FILES, NO_SPAN, Segment, SegmentWriter
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.errors import UserError
from realm_jax.storage import digest, read_json, write_json_atomic

FORMAT_VERSION = 2
MANIFEST = "STORE.json"

_NAMED = 3  # passages whose documents an error names
_MATRIX_ROWS = 4096  # rows laid out at a time: keeps the index arrays of `document_matrix` near the processor


class PassageStore:
    """One version of a corpus of passages, opened for reading.

    Rows count through all segments, without those that the version leaves out; within a version a row never changes its
    number. *Stored* rows are counted with them.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], vocabulary_size: int | None, version: str | None):
        """For `PassageStore.open` alone."""
        versions = _versions(manifest)
        chosen = next((v for v in versions if v["fingerprint"] == (version or manifest["fingerprint"])), None)
        if chosen is None:
            raise UserError(f"{folder} has no version {version}; it was prepared anew")
        self.folder = folder
        self._vocabulary_size = vocabulary_size
        self.limit: int = manifest["limit"]
        self.tokenizer_fingerprint: str = manifest["tokenizer"]
        self.fingerprint: str = chosen["fingerprint"]
        self.versions: list[str] = [v["fingerprint"] for v in versions]
        """Fingerprints of all versions, oldest first."""
        entries = manifest["segments"][: chosen["segments"]]
        self.segments = [Segment(folder / entry["folder"], entry) for entry in entries]
        self.dtype: np.dtype[Any] = self.segments[0].dtype
        """Of the ids of tokens: uint16, or uint32 where the vocabulary is too large for it."""
        kinds = dict.fromkeys(kind for segment in self.segments for kind in segment.span_kinds)
        self.span_kinds: tuple[str, ...] = tuple(kinds)
        self._codes = [np.array([[*kinds].index(kind) for kind in s.span_kinds], np.int32) for s in self.segments]
        self.removed: list[list[int]] = chosen["removed"]
        """[first, last): the stored rows of each document that the version leaves out."""
        self._starts = np.cumsum([0] + [segment.rows for segment in self.segments]).tolist()
        self._kept = _kept_rows(self._starts[-1], self.removed)

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], vocabulary_size: int | None = None, version: str | None = None
    ) -> Self:
        """Open a store without reading its content. With a `vocabulary_size`, tokens beyond it are damage.

        version: fingerprint of an earlier version; None: the newest. Raises UserError when there is no store, its
        format or the version is unknown, or a file is missing or has another size than STORE.json says. Flipped bits
        are found by `verify`, and by readers where they make no text, no token or no kind of span.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        try:
            return cls(folder, manifest, vocabulary_size, version)
        except (KeyError, TypeError) as fault:
            raise UserError(f"{folder / MANIFEST} is damaged (at {fault}); prepare the data again") from None
        except OSError as fault:
            if fault.errno != errno.EMFILE:
                raise
            raise UserError(
                f"{folder}: too many open files; it has {len(manifest['segments']):,} segment(s) with {FILES} each: "
                "raise `ulimit -n`"
            ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the files itself: pickling memory maps would copy the whole corpus."""
        return (type(self).open, (self.folder, self._vocabulary_size, self.fingerprint))

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same passages in the same order, wherever they lie."""
        return isinstance(other, PassageStore) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __len__(self) -> int:
        return self.stored if self._kept is None else len(self._kept)

    @property
    def stored(self) -> int:
        """Rows of all segments, those that the version leaves out among them."""
        return self._starts[-1]

    def kept(self, stored: NDArray[Any]) -> NDArray[Any]:
        """The rows of this version of an array over all stored rows."""
        return stored if self._kept is None else stored[self._kept]

    def stored_part(self, rows: slice) -> tuple[slice, slice | NDArray[np.int64]]:
        """Adjacent stored rows among which some adjacent rows of this version are, and which of them those are."""
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise ValueError(f"rows must be adjacent, not a slice with step {step}")
        if self._kept is None or stop <= start:
            return slice(start, max(start, stop)), slice(None)
        wanted = self._kept[start:stop]
        return slice(int(wanted[0]), int(wanted[-1]) + 1), wanted - wanted[0]

    def places(self) -> NDArray[np.int32] | None:
        """The row of each stored row, −1 for one that the version leaves out; None if it leaves out nothing."""
        if self._kept is None:
            return None
        places = np.full(self.stored, -1, np.int32)
        places[self._kept] = np.arange(len(self._kept))
        return places

    @property
    def documents(self) -> int:
        """How many documents the rows come from."""
        return sum(segment.documents for segment in self.segments) - len(self.removed)

    def title_tokens(self, row: int) -> NDArray[Any]:
        """Tokens of the title, `dtype` [t]."""
        segment, local = self._locate(row)
        return segment.ragged("tokens", local)[: segment.fixed["title_lengths"][local]]

    def body_tokens(self, row: int) -> NDArray[Any]:
        """Tokens of the passage without its title, `dtype` [b]."""
        segment, local = self._locate(row)
        return segment.ragged("tokens", local)[segment.fixed["title_lengths"][local] :]

    def sentences(self, row: int) -> NDArray[np.int32]:
        """Start and end of each sentence in pieces of the body, int32 [s, 2]."""
        segment, local = self._locate(row)
        return segment.ragged("sentences", local)

    def spans(self, row: int) -> NDArray[np.int32]:
        """Start and end, in pieces of the body, and index into `span_kinds` of each salient span, int32 [m, 3]."""
        number, local = self._place(row)
        return self._recoded(number, self.segments[number].ragged("spans", local))

    def title(self, row: int) -> str:
        """The whole title, also where `title_tokens` holds only the first part of a very long one."""
        return self._string("titles", row)

    def text(self, row: int) -> str:
        """The slice of the article that the row's sentences cover."""
        return self._string("texts", row)

    def document_id(self, row: int) -> str:
        """The id of the article that the row was taken from."""
        return self._string("document_ids", row)

    def rows_of(self, document_id: str) -> range:
        """The rows of a document, which are adjacent; an empty range for an unknown id."""
        stored = self.stored_rows_of(document_id)
        if self._kept is None or not stored:
            return stored
        first = int(np.searchsorted(self._kept, stored.start))
        return range(first, first + len(stored))

    def stored_rows_of(self, document_id: str) -> range:
        """The stored rows of a document of this version, which are adjacent."""
        gone = {first for first, _ in self.removed}
        for start, segment in zip(self._starts, self.segments, strict=False):
            rows = segment.rows_of(document_id)
            if rows and start + rows.start not in gone:
                return range(start + rows.start, start + rows.stop)
        return range(0)

    def lengths(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Numbers of pieces of all bodies and of all titles, int32 [rows] each."""
        titles = np.concatenate([segment.fixed["title_lengths"].astype(np.int32) for segment in self.segments])
        totals = np.concatenate([np.diff(segment.offsets["tokens"]).astype(np.int32) for segment in self.segments])
        return self.kept(totals - titles), self.kept(titles)

    def passage_lengths(self) -> NDArray[np.int32]:
        """Numbers of pieces of all passages as they are embedded, uncut: [CLS], title, [SEP], body, [SEP]; [rows]."""
        bodies, titles = self.lengths()
        return bodies + titles + 3

    def sentence_counts(self) -> NDArray[np.int64]:
        """How many sentences each row has, int64 [rows]."""
        return self.kept(np.concatenate([np.diff(segment.offsets["sentences"]) for segment in self.segments]))

    def span_counts(self) -> NDArray[np.int64]:
        """How many salient spans each row has, int64 [rows]."""
        return self.kept(np.concatenate([np.diff(segment.offsets["spans"]) for segment in self.segments]))

    def all_spans(self) -> NDArray[np.int32]:
        """`spans` of all rows, one after another, int32 [n, 3]."""
        found, places = [], self.places()
        for number, (start, segment) in enumerate(zip(self._starts, self.segments, strict=False)):
            rows, spans = segment.all_spans()
            if places is not None:
                spans = spans[places[start + rows] >= 0]
            found.append(self._recoded(number, spans))
        return np.concatenate(found)

    def count_piece(self, piece: int) -> tuple[int, int]:
        """How often a token occurs in all stored rows, titles too, and how many pieces there are."""
        counts = [segment.count_piece(piece) for segment in self.segments]
        return sum(found for found, _ in counts), sum(every for _, every in counts)

    def salient_sentences(self, room: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Sentences with a salient span that ends within `room` pieces of the sentence's start: segment by segment
        their rows and their numbers in the row, int64 [n] each, in order."""
        places = self.places()
        for start, segment in zip(self._starts, self.segments, strict=False):
            rows, numbers = segment.salient_sentences(room)
            rows = _rows_of_version(rows + start, places)
            yield rows[rows >= 0], numbers[rows >= 0]

    def salient_rows(self, room: int) -> NDArray[np.int64]:
        """The rows of `salient_sentences`, in order."""
        pairs = zip(self._starts, self.segments, strict=False)
        seen = min(room, NO_SPAN - 1)
        stored = np.concatenate([start + np.flatnonzero(segment.salient_reach <= seen) for start, segment in pairs])
        rows = _rows_of_version(stored, self.places())
        return rows[rows >= 0]

    def recurring_spans(self, room: int) -> NDArray[np.int32]:
        """Salient spans that end within `room` pieces of their sentence's start and occur again in another sentence of
        their passage, in order: int32 [n, 4].

        A row is (passage, sentence, place of the span among the passage's, the first other sentence that holds it).
        """
        found, places = [], self.places()
        for start, segment in zip(self._starts, self.segments, strict=False):
            spans = recurring_spans(segment, room)
            spans[:, 0] = _rows_of_version(spans[:, 0] + start, places)
            found.append(spans[spans[:, 0] >= 0].astype(np.int32))
        return np.concatenate(found)

    def document_matrix(
        self, length: int, special: SpecialTokens, rows: slice = slice(None)
    ) -> tuple[NDArray[Any], NDArray[np.uint16], NDArray[np.uint16]]:
        """Rows in the document layout `[CLS] title [SEP] body [SEP]`, padded at the right.

        A title is cut to `length` - 3 pieces and the body to the rest, as in REALM's release. Returns ids `dtype`
        [rows, length], lengths uint16 [rows] (specials counted) and title lengths uint16 [rows] (after the cut).
        Large corpora go through in slices of rows. Raises UserError for a token beyond the vocabulary.
        """
        stored, kept = self.stored_part(rows)
        ids, lengths, title_lengths = self.stored_matrix(length, special, stored.start, stored.stop)
        return ids[kept], lengths[kept], title_lengths[kept]

    def stored_matrix(
        self, length: int, special: SpecialTokens, start: int, stop: int
    ) -> tuple[NDArray[Any], NDArray[np.uint16], NDArray[np.uint16]]:
        """`document_matrix` of the stored rows start … stop − 1."""
        if length < 3:
            raise ValueError(f"length must hold the three special pieces, not {length}")
        ids = np.full((stop - start, length), special.pad, self.dtype)
        lengths = np.empty(stop - start, np.uint16)
        title_lengths = np.empty(stop - start, np.uint16)
        for segment, first, last, target in self._runs(start, stop):
            out = slice(target, target + last - first)
            lengths[out], title_lengths[out] = segment.fill(ids[out], first, last, special)
            self._check_pieces(ids[out])
        return ids, lengths, title_lengths

    def verify(self) -> None:
        """Read everything and compare checksums. Raises UserError that names the first damaged file."""
        for segment in self.segments:
            segment.verify()

    def _check_pieces(self, ids: NDArray[Any]) -> None:
        """A token that no embedding exists for would spread through the results as "not a number"."""
        if self._vocabulary_size is not None and ids.size and ids.max() >= self._vocabulary_size:
            raise UserError(
                f"{self.folder} is damaged: it holds token {ids.max()}, but the vocabulary ends before "
                f"{self._vocabulary_size}; prepare the data again"
            )

    def _recoded(self, number: int, spans: NDArray[np.int32]) -> NDArray[np.int32]:
        """Spans of a segment, which numbers its kinds itself, with indices into `span_kinds`."""
        try:
            kinds = self._codes[number][spans[:, 2].view(np.uint32)]  # so that a negative one is none either
        except IndexError:
            path = self.segments[number].path("spans")
            raise UserError(f"{path} is damaged (a span of no kind); prepare the data again") from None
        return np.column_stack([spans[:, :2], kinds])

    def _string(self, name: str, row: int) -> str:
        segment, local = self._locate(row)
        return segment.string(name, local)

    def _locate(self, row: int) -> tuple["Segment", int]:
        """The segment of a row and the row's number in it."""
        number, local = self._place(row)
        return self.segments[number], local

    def _place(self, row: int) -> tuple[int, int]:
        """The number of a row's segment and the row's number in it."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is not among the {len(self)} rows of {self.folder}")
        row = row if self._kept is None else int(self._kept[row])
        index = bisect_right(self._starts, row) - 1
        return index, row - self._starts[index]

    def _runs(self, start: int, stop: int) -> Iterator[tuple["Segment", int, int, int]]:
        """Cut [start, stop) into runs inside one segment: (segment, first, last, offset from start)."""
        for base, segment in zip(self._starts, self.segments, strict=False):
            low, high = max(start, base), min(stop, base + segment.rows)
            for row in range(low, high, _MATRIX_ROWS):
                yield segment, row - base, min(row + _MATRIX_ROWS, high) - base, row - start


@contextmanager
def append_segment(
    folder: str | os.PathLike[str], tokenizer: Tokenizer, limit: int, replaces: Collection[str] = ()
) -> Iterator[SegmentWriter]:
    """Write one more segment of a store, or the only one of a new store, as a new version.

    The rows exist for readers once the block ends well; after an exception the folder is as before. replaces: documents
    of the newest version that the new one leaves out, or has in the new segment. Raises UserError if an existing store
    was made with another tokenizer or limit, has no such document, or has one that is written and not replaced.
    """
    folder, settings = Path(folder), {"limit": limit, "tokenizer": tokenizer.fingerprint}
    is_new_folder, earlier, manifest = not folder.exists(), None, None
    if (folder / MANIFEST).exists():
        earlier, manifest = PassageStore.open(folder), _read_manifest(folder)
        for key, value in settings.items():
            if manifest[key] != value:
                raise UserError(f"{folder}: {key} is {manifest[key]}, not {value}; append with the same one")
    entries = manifest["segments"] if manifest else []
    number = 1 + max((int(entry["folder"].rpartition("-")[2]) for entry in entries), default=-1)
    try:
        with SegmentWriter(segment_folder(folder, number), tokenizer.fingerprint, tokenizer.dtype) as writer:
            yield writer
        removed: list[list[int]] = []
        if earlier is not None:
            _check_new(Segment(writer.folder, writer.entry), earlier, replaces)
            removed = _leave_out(earlier, replaces)
        write_json_atomic(folder / MANIFEST, new_version(settings, [*entries, writer.entry], removed, manifest))
    except BaseException:
        shutil.rmtree(folder if is_new_folder else segment_folder(folder, number), ignore_errors=True)
        raise


def _check_new(segment: Segment, store: PassageStore, replaces: Collection[str]) -> None:
    """Raise UserError for a document of a new segment that the store's version has already, unless it is replaced."""
    if all(segment.shared_document(earlier) is None for earlier in store.segments):
        return
    for document in segment.document_ids():
        if document not in replaces and store.stored_rows_of(document):
            raise UserError(
                f"document {document!r} is in {store.folder} already; append new documents only, or replace it"
            )


def segment_folder(store: Path, number: int) -> Path:
    """Where a segment of a store lies."""
    return store / f"segment-{number:05d}"


def remove_documents(folder: Path, documents: Collection[str]) -> PassageStore:
    """Make a version of a store without some documents of the newest one. Raises UserError for an unknown one."""
    manifest, store = _read_manifest(folder), PassageStore.open(folder)
    settings = {key: manifest[key] for key in ("limit", "tokenizer")}
    removed = _leave_out(store, documents)
    if sum(last - first for first, last in removed) == store.stored:
        raise UserError(f"{folder}: nothing would be left; a corpus needs at least one document")
    write_json_atomic(folder / MANIFEST, new_version(settings, manifest["segments"], removed, manifest))
    return PassageStore.open(folder)


def _leave_out(store: PassageStore, documents: Collection[str]) -> list[list[int]]:
    """What a version leaves out that has none of these documents of `store`. Raises UserError for an unknown one."""
    removed = list(store.removed)
    for document in dict.fromkeys(documents):
        rows = store.stored_rows_of(document)
        if not rows:
            names = ", ".join(dict.fromkeys(repr(store.document_id(row)) for row in range(min(_NAMED, len(store)))))
            raise UserError(f"{store.folder} has no document {document!r}; its first ones are called {names}")
        removed.append([rows.start, rows.stop])
    return sorted(removed)


def new_version(
    settings: dict[str, Any],
    segments: list[Any],
    removed: Sequence[list[int]] = (),
    earlier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """STORE.json with one more version than `earlier` has, or with the first one.

    settings: limit and fingerprint of the tokenizer; segments: in the store's folder, as their writer describes them.
    """
    fingerprints = [segment["fingerprint"] for segment in segments]
    content = {"segments": fingerprints, "removed": removed} if removed else fingerprints
    fingerprint = digest(json.dumps(content, sort_keys=True).encode())
    version = {"fingerprint": fingerprint, "segments": len(segments), "removed": [*removed]}
    manifest = {"format_version": FORMAT_VERSION, **settings, "fingerprint": fingerprint, "segments": segments}
    kept = [one for one in (_versions(earlier) if earlier else []) if one["fingerprint"] != fingerprint]
    return manifest | {"versions": [*kept, version]}


def _versions(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """All versions, oldest first; a store that was never edited has one."""
    only = {"fingerprint": manifest["fingerprint"], "segments": len(manifest["segments"]), "removed": []}
    return manifest.get("versions") or [only]


def _rows_of_version(stored: NDArray[np.int64], places: NDArray[np.int32] | None) -> NDArray[np.int64]:
    """The rows of stored rows, −1 for what a version leaves out. places: of the version, as `PassageStore.places`."""
    return stored if places is None else places[stored].astype(np.int64)


def _kept_rows(stored: int, removed: list[list[int]]) -> NDArray[np.int64] | None:
    """Numbers of the stored rows that are left, or None for all."""
    if not removed:
        return None
    kept = np.ones(stored, bool)
    for first, last in removed:
        kept[first:last] = False
    return np.flatnonzero(kept)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """STORE.json of a folder, if its format is ours."""
    if not (folder / MANIFEST).exists():
        raise UserError(f"{folder} holds no finished passage store ({MANIFEST} is missing); run `realm prepare`")
    manifest = read_json(folder / MANIFEST)
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(f"{folder / MANIFEST} has format version {version}, not {FORMAT_VERSION}; prepare it again")
    return manifest
