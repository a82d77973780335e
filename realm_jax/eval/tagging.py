"""Texts to names with a trained tagger, and passages of a store to salient spans.

A text is read in windows of whole sentences; windows of about the same length share a batch, so that little of it is
padding. Every padded length is two compiled programs, for whole batches and for what is left, and every batch is spread
over all devices of the mesh. Next to read: `models/tagger.decode`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.data import sentences as sentence_rules
from realm_jax.data.spans import DATE, Span, find_dates, to_token_spans, with_dates
from realm_jax.data.store import PassageStore
from realm_jax.data.tags import OTHER, SPECIAL_PIECES, TaggerTokenizer, TaggerTokens, spans, windows, with_neighbours
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.mesh import to_host
from realm_jax.models.tagger import Params, Tagger, decode
from realm_jax.run import BaseRun, put_batch

BUCKETS = 8  # padded lengths at most
SMALLEST_BUCKET = 16
SMALL = 8  # a small batch is this part of a whole one; both are compiled for every padded length

Ranges = Sequence[tuple[int, int]]


class Batch(NamedTuple):
    """Windows of one padded length: ids, shapes uint8, first bool [batch, width]; lengths int32 [batch]."""

    ids: NDArray[np.unsignedinteger]
    lengths: NDArray[np.int32]
    shapes: NDArray[np.uint8]
    first: NDArray[np.bool_]


class InFlight(NamedTuple):
    """Texts that the devices are working on. places: where in all pieces the results of a batch belong."""

    pieces: list[TaggerTokens]
    results: list[tuple[NDArray[np.int64], NDArray[np.bool_], tuple[jax.Array, jax.Array]]]


@dataclasses.dataclass
class PaddingStats:
    """How much of the computation was padding: tokens of text, and positions of padded windows."""

    pieces: int = 0
    places: int = 0

    @property
    def padding(self) -> float:
        """The share of places that hold no piece of text, [CLS] and [SEP] among them."""
        return 1 - self.pieces / self.places if self.places else 0.0


class WindowTagger:
    """A run's network over windows of texts, on its devices, for any parameters."""

    def __init__(self, run: BaseRun) -> None:
        tokenizer, batch = run.sources.tokenizer, run.config.evaluation.batch_size
        self.tagger, self.cutter, self.effort = run.model, TaggerTokenizer(tokenizer), PaddingStats()
        self._mesh, self._length = run.mesh, run.config.data.length
        self._size, self._small = (rows * run.mesh.size for rows in (batch, max(1, batch // SMALL)))
        self._step = max(SMALLEST_BUCKET, -(-self._length // BUCKETS))
        self._special = tokenizer.special

    def __call__(
        self, params: Params, texts: Sequence[str], sentences: Sequence[Ranges] | None = None
    ) -> list[list[Span]]:
        """The names of each text. sentences: ranges of characters of each, by rules if not given."""
        return self.finish(self.start(params, texts, sentences))

    def start(self, params: Params, texts: Sequence[str], sentences: Sequence[Ranges] | None = None) -> InFlight:
        """Dispatch the texts to the devices without waiting, so that the next ones can be prepared meanwhile."""
        pieces = self.cutter(texts)
        if sentences is None:
            sentences = [sentence_rules.split(text) for text in texts]
        bases = np.cumsum([0, *(len(one.ids) for one in pieces)])
        ranges = [
            (base + first, base + last)
            for base, text, one, own in zip(bases.tolist(), texts, pieces, sentences, strict=False)
            for first, last in windows(text, one, own, self._length - SPECIAL_PIECES)
        ]
        flat = TaggerTokens(*(np.concatenate(part) for part in zip(*pieces, strict=True))) if pieces else None
        results = []
        for starts, stops, width in self._batches(np.array(ranges, np.int64).reshape(-1, 2)):
            assert flat is not None
            places, valid = _token_positions(starts, stops, width)
            batch = self._batch(flat, places, valid)
            results.append((places, valid, tag_program(self.tagger, params, *put_batch(self._mesh, batch))))
        return InFlight(pieces, results)

    def finish(self, pending: InFlight) -> list[list[Span]]:
        """Wait for the devices; the names of each text."""
        total = sum(len(one.ids) for one in pending.pieces)
        labels, sure = np.zeros(total, np.int16), np.zeros(total, np.float32)
        for places, valid, found in pending.results:
            tags, probabilities = (to_host(part)[: len(places), 1:-1] for part in found)
            labels[places[valid]], sure[places[valid]] = tags[valid], probabilities[valid]
        names, base = [], 0
        for one in pending.pieces:
            own = slice(base, base + len(one.ids))
            names.append(spans(one, labels[own], sure[own], self.tagger.kinds))
            base += len(one.ids)
        return names

    def _batches(self, ranges: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], int]]:
        """Starts and stops of the windows of each batch, and its padded length, which depends on a window alone."""
        sizes = ranges[:, 1] - ranges[:, 0] + SPECIAL_PIECES
        widths = np.minimum(-(-sizes // self._step) * self._step, self._length)
        for width in np.unique(widths).tolist():
            rows, place = np.flatnonzero(widths == width), 0
            while place < len(rows):
                size = self._rows(len(rows) - place)
                chosen = ranges[rows[place : place + size]]
                yield chosen[:, 0], chosen[:, 1], width
                place += size

    def _rows(self, left: int) -> int:
        """The size of the next batch: whole, or small where several small ones are less to compute."""
        return self._size if -(-left // self._small) * self._small >= self._size else self._small

    def _batch(self, flat: TaggerTokens, places: NDArray[np.int64], valid: NDArray[np.bool_]) -> Batch:
        """Windows as arrays of a whole batch; one that is not full has empty rows at its end."""
        width, sizes, rows = places.shape[1] + SPECIAL_PIECES, valid.sum(axis=1), self._rows(len(places))
        shape = (rows, width)
        ids = np.full(shape, self._special.pad, flat.ids.dtype)
        shapes, first = np.full(shape, OTHER, np.uint8), np.zeros(shape, bool)
        lengths = np.full(rows, SPECIAL_PIECES, np.int32)
        own = slice(0, len(places)), slice(1, -1)
        ids[own] = np.where(valid, flat.ids[places], self._special.pad)
        shapes[own] = np.where(valid, flat.shapes[places], OTHER)
        first[own] = valid & flat.first[places]
        lengths[: len(places)] += sizes.astype(np.int32)
        ids[:, 0] = self._special.cls
        ids[np.arange(rows), lengths - 1] = self._special.sep
        self.effort.pieces += int(sizes.sum())
        self.effort.places += rows * width
        return Batch(ids, lengths, with_neighbours(shapes, first, lengths), first)


def _token_positions(
    starts: NDArray[np.int64], stops: NDArray[np.int64], width: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Of each window the pieces in its places between [CLS] and [SEP], and which of these are its own."""
    places = starts[:, None] + np.arange(width - SPECIAL_PIECES)
    valid = places < stops[:, None]
    return np.where(valid, places, starts[:, None]), valid


@partial(jax.jit, static_argnums=0)
def tag_program(
    tagger: Tagger, params: Params, ids: jax.Array, lengths: jax.Array, shapes: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Labels int16 and their probabilities float32, [batch, width]."""
    tags, probabilities = decode(tagger.scores(params, ids, lengths, shapes), first)
    return tags.astype(jnp.int16), probabilities


@dataclasses.dataclass(frozen=True)
class TextTagger:
    """A trained tagger as a finder of salient spans: its names, and the dates that rules find; dates win.

    name: `tagger:WORKDIR`. identity: of its parameters, the digest of their checkpoint.
    """

    windows: WindowTagger
    params: Params
    name: str
    identity: str

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the spans."""
        return tuple(dict.fromkeys((*self.windows.tagger.kinds, DATE)))

    def __call__(self, text: str) -> list[Span]:
        return self.finish([text], self.windows.start(self.params, [text]))[0]

    def finish(self, texts: Sequence[str], pending: InFlight) -> list[list[Span]]:
        """Names and dates of texts that the devices have begun."""
        dates = [find_dates(text) for text in texts]  # while the devices work
        names = self.windows.finish(pending)
        return [with_dates(text, own, when) for text, own, when in zip(texts, names, dates, strict=True)]


# --- passages ---------------------------------------------------------------------------------------------------------


class PassageSpans(NamedTuple):
    """The column `spans` of some rows of a store: values int32 [n, 3] (start and end in pieces of the body, index into
    `kinds`), and how many each row has, int64 [rows]. unread: rows whose text does not give their pieces again."""

    values: NDArray[np.int32]
    counts: NDArray[np.int64]
    kinds: tuple[str, ...]
    unread: int


def tag_passages(
    tagger: TextTagger,
    store: PassageStore,
    rows: range,
    tokenizer: Tokenizer,
    at_a_time: int = 2048,
    check: Callable[[], None] = lambda: None,
) -> PassageSpans:
    """Salient spans of some rows of a store, found as the corpus builder finds them, but passage by passage: the
    builder reads whole articles, so its windows, and with them some names, may differ.

    tokenizer: of the store; the tagger may have another one. at_a_time: passages that share batches. check: called
    between them. A row has no spans where its text does not give its pieces again: it was cut within a word.
    """
    same_pieces = tokenizer.fingerprint == tagger.windows.cutter.tokenizer.fingerprint
    cutter = None if same_pieces else TaggerTokenizer(tokenizer)
    values: list[NDArray[np.int32]] = [np.zeros((0, 3), np.int32)]
    unread = 0

    def begun() -> Iterator[tuple[range, list[str], InFlight]]:
        """Passages that the devices work on, and none at the end."""
        for start in range(rows.start, rows.stop, at_a_time):
            check()
            some = range(start, min(start + at_a_time, rows.stop))
            texts = [store.text(row) for row in some]
            yield some, texts, tagger.windows.start(tagger.params, texts)
        yield range(0), [], InFlight([], [])

    for (some, texts, own), _ in pairwise(begun()):  # the devices have the next passages already
        stored = own.pieces if cutter is None else cutter(texts)
        for row, found, pieces in zip(some, tagger.finish(texts, own), stored, strict=True):
            same = np.array_equal(pieces.ids, store.body_tokens(row))
            unread += not same
            columns = pieces.ids, pieces.starts, pieces.ends, store.sentences(row), tokenizer.unk_id
            kept = [
                (a, b, tagger.kinds.index(kind)) for a, b, kind in (to_token_spans(found, *columns) if same else [])
            ]
            values.append(np.array(kept, np.int32).reshape(-1, 3))
    counts = np.array([len(own) for own in values[1:]], np.int64)
    return PassageSpans(np.concatenate(values), counts, tagger.kinds, unread)
