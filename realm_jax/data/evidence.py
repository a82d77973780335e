"""Salient spans for which the corpus holds evidence: what is worth hiding, where most names recur by coincidence.

A span that is hidden in a sentence x teaches retrieval only where another passage z says what it is. Such a passage
holds the span y, and more of x besides: evidence(z) is the share of x's words, without those of y, that z has too, each
word weighted by its inverse document frequency. Words that a tenth of all passages have count for nothing. How often
this is right, and what share of a corpus it leaves, stands in `docs/results/adaptation.md`.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.store import PassageStore

if TYPE_CHECKING:
    from scipy import sparse  # in functions otherwise: what only answers needs no evidence, and starts sooner

LEAST, MOST = 0.35, 0.9  # of a sentence's words in another passage; above, it is nearly the same sentence again
LEAST_WEIGHT = 8.0  # nats: a sentence with fewer rare words says too little
HOLDERS = 50  # passages that may hold the span: what stands everywhere is learned without retrieval
COMMON = 0.1  # share of the passages that have a word which counts for nothing
PAIRS = 1 << 17  # of a sentence and a passage, compared at a time
HASH_BASE = np.uint64(0x9E37_79B9_7F4A_7C15)


class EvidenceSpans(NamedTuple):
    """Spans for which some passage is evidence, in the order of rows: the row, its sentence's number, and the span's
    first and last + 1 piece in the row's body. int64 [n] each."""

    rows: NDArray[np.int64]
    sentences: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def of_row(self, row: int) -> "EvidenceSpans":
        """Those of one row."""
        first, last = np.searchsorted(self.rows, [row, row + 1])
        return EvidenceSpans(*(part[first:last] for part in self))

    def of_sentence(self, store: PassageStore, row: int, number: int) -> NDArray[np.int64]:
        """Those of one sentence, relative to its start, [m, 2]."""
        found = self.of_row(row)
        own = found.sentences == number
        return np.stack([found.starts[own], found.ends[own]], axis=1) - store.sentences(row)[number, 0]


class Evidence(NamedTuple):
    """Spans, and what is evidence for them: pairs of a span, by its number, and the row of a passage, both int64
    [pairs], in the order of spans and then of rows."""

    spans: EvidenceSpans
    numbers: NDArray[np.int64]
    rows: NDArray[np.int64]

    def rows_of(self, number: int) -> NDArray[np.int64]:
        """The rows that are evidence for a span."""
        first, last = np.searchsorted(self.numbers, [number, number + 1])
        return self.rows[first:last]

    def among(self, kept: NDArray[np.bool_]) -> "Evidence":
        """Spans of the rows that are kept, bool [rows], with what is evidence for them among these rows."""
        pairs = kept[self.spans.rows[self.numbers]] & kept[self.rows]
        good, numbers = np.unique(self.numbers[pairs], return_inverse=True)
        return Evidence(EvidenceSpans(*(part[good] for part in self.spans)), numbers, self.rows[pairs])


class _Spans(NamedTuple):
    """All salient spans within their sentences: row, number of the sentence among all of the store, start and end in
    the body, and a number that is the same for the same pieces. int64 [n] each."""

    rows: NDArray[np.int64]
    sentences: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    names: NDArray[np.int64]


class _Words(NamedTuple):
    """sentences: each with the weights of its words, [sentences, vocabulary]; passages: which words each has, titles
    too, [rows, vocabulary]; weights [vocabulary]."""

    sentences: "sparse.csr_matrix"
    passages: "sparse.csr_matrix"
    weights: NDArray[np.float64]


def evidence_spans(store: PassageStore, room: int, longest: int) -> EvidenceSpans:
    """Every span that ends within `room` pieces of its sentence's start, has `longest` pieces at most, and for which
    some other passage is evidence."""
    return find_evidence(store, room, longest).spans


@lru_cache(maxsize=2)  # 20 s for 49,000 passages, and tasks and what measures them ask for the same
def find_evidence(store: PassageStore, room: int, longest: int) -> Evidence:
    """`evidence_spans`, with the passages that are evidence for each. Kept for the last two corpora: not to be written
    to."""
    tokens, bounds = _bodies(store)
    found = _spans(store, tokens, bounds, room, longest)
    words = _words(store, tokens, bounds)
    own = _own_weights(words, tokens, bounds, found)
    totals = np.asarray(words.sentences.sum(axis=1))[found.sentences, 0] - own
    pairs = [np.zeros((0, 2), np.int64)]
    for spans, rows in _pairs(found):
        shared = _overlaps(words, found.sentences[spans], rows) - own[spans]
        share = shared / np.maximum(totals[spans], LEAST_WEIGHT)
        kept = (share >= LEAST) & (share < MOST) & (totals[spans] >= LEAST_WEIGHT)
        pairs.append(np.stack([spans[kept], rows[kept]], axis=1))
    good, numbers = np.unique(np.concatenate(pairs)[:, 0], return_inverse=True)
    first = np.concatenate([[0], np.cumsum(store.counts("sentences"))])[found.rows]
    parts = (found.rows, found.sentences - first, found.starts, found.ends)
    return Evidence(EvidenceSpans(*(part[good] for part in parts)), numbers, np.concatenate(pairs)[:, 1])


def _bodies(store: PassageStore) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The pieces of all bodies, one after another, and where each begins, [rows + 1]."""
    bodies = [store.body_tokens(row) for row in range(len(store))]
    bounds = np.concatenate([[0], np.cumsum([len(body) for body in bodies])])
    return np.concatenate(bodies).astype(np.int64), bounds


def _spans(
    store: PassageStore, tokens: NDArray[np.int64], bounds: NDArray[np.int64], room: int, longest: int
) -> _Spans:
    """The salient spans that may be hidden, and are held by 2 to HOLDERS passages."""
    starts, ends = store.column("spans")[:, :2].astype(np.int64).T
    rows = np.repeat(np.arange(len(store)), store.counts("spans"))
    sentences = np.concatenate([store.sentences(row) for row in range(len(store))]).astype(np.int64)
    counts = store.counts("sentences")
    begin = np.repeat(bounds[:-1], counts) + sentences[:, 0]  # of each sentence, in `tokens`: they increase
    number = np.searchsorted(begin, bounds[rows] + starts, side="right") - 1
    offset = begin[number] - bounds[rows]
    kept = (ends <= offset + np.minimum(room, sentences[number, 1] - sentences[number, 0])) & (starts >= offset)
    kept &= ends - starts <= longest
    rows, number, starts, ends = (part[kept] for part in (rows, number, starts, ends))
    names = _names(tokens, bounds[rows] + starts, ends - starts)
    held = np.unique(np.stack([names, rows]), axis=1)  # a passage that has it twice holds it once
    holders = np.bincount(held[0], minlength=names.max(initial=-1) + 1)[names]
    kept = (holders > 1) & (holders <= HOLDERS)
    return _Spans(*(part[kept] for part in (rows, number, starts, ends, names)))


def _names(tokens: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number for each run of pieces, the same for the same pieces, from a hash of 64 bits."""
    hashes = lengths.astype(np.uint64)
    for offset in range(int(lengths.max(initial=0))):
        pieces = tokens[np.minimum(starts + offset, len(tokens) - 1)].astype(np.uint64)
        hashes = np.where(offset < lengths, (hashes ^ (pieces + np.uint64(1))) * HASH_BASE, hashes)
    return np.unique(hashes, return_inverse=True)[1].astype(np.int64)


def _words(store: PassageStore, tokens: NDArray[np.int64], bounds: NDArray[np.int64]) -> _Words:
    rows, titles = len(store), [store.title_tokens(row) for row in range(len(store))]
    size = int(max(tokens.max(initial=0), max((title.max(initial=0) for title in titles), default=0))) + 1
    in_titles = np.repeat(np.arange(rows), [len(title) for title in titles])
    in_bodies = np.repeat(np.arange(rows), np.diff(bounds))
    pieces = np.concatenate([tokens, *titles]).astype(np.int64)
    passages = _which(np.concatenate([in_bodies, in_titles]), pieces, (rows, size))
    frequency = np.asarray(passages.sum(axis=0), np.float64)[0]
    weights = np.where(frequency > COMMON * rows, 0.0, np.log((rows + 1) / (frequency + 0.5)))
    sentences = [store.sentences(row) + bounds[row] for row in range(rows)]
    begin, end = np.concatenate(sentences).T
    owner = np.repeat(np.arange(len(begin)), end - begin)
    places = np.arange(len(owner)) + np.repeat(begin - np.cumsum(end - begin) + end - begin, end - begin)
    held = _which(owner, tokens[places], (len(begin), size))
    return _Words(held.multiply(weights).tocsr(), passages, weights)


def _which(rows: NDArray[np.int64], words: NDArray[np.int64], shape: tuple[int, int]) -> "sparse.csr_matrix":
    """A matrix of 1 where a row has a word."""
    from scipy import sparse

    places = rows.astype(np.int32), words.astype(np.int32)
    found = sparse.csr_matrix((np.ones(len(rows), np.float32), places), shape)
    found.data[:] = 1.0
    return found


def _own_weights(
    words: _Words, tokens: NDArray[np.int64], bounds: NDArray[np.int64], spans: _Spans
) -> NDArray[np.float64]:
    """The weight of the different words of each span, which every passage that holds it has, [n]."""
    lengths = spans.ends - spans.starts
    owner = np.repeat(np.arange(len(lengths)), lengths)
    places = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    pieces = tokens[(bounds[spans.rows] + spans.starts)[owner] + places]
    held = _which(owner, pieces, (len(lengths), len(words.weights)))
    return np.asarray(held @ words.weights)


def _pairs(spans: _Spans) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Every span with every other passage that holds it, some PAIRS at a time: numbers of spans, and rows."""
    held = np.unique(np.stack([spans.names, spans.rows]), axis=1)
    first = np.searchsorted(held[0], spans.names)
    counts = np.searchsorted(held[0], spans.names, side="right") - first
    for part in np.array_split(np.arange(len(counts)), -(-int(counts.sum()) // PAIRS) or 1):
        which = np.repeat(part, counts[part])
        places = np.arange(len(which)) - np.repeat(np.cumsum(counts[part]) - counts[part], counts[part])
        rows = held[1, first[which] + places]
        others = rows != spans.rows[which]
        yield which[others], rows[others]


def _overlaps(words: _Words, sentences: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """The weight of the words that a sentence and a passage share, for each pair [n]."""
    return np.asarray(words.sentences[sentences].multiply(words.passages[rows]).sum(axis=1))[:, 0]
