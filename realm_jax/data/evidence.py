"""Salient spans for which the corpus holds evidence: what is worth hiding, where most names recur by coincidence.

A span that is hidden in a sentence x teaches retrieval only where another passage z says what it is. Such a passage
holds the span y, and more of x besides: evidence(z) is the share of x's words, without those of y, that z has too, each
word weighted by its inverse document frequency. Words that a tenth of all passages have count for nothing. How often
this is right, and what share of a corpus it leaves, stands in `docs/results/adaptation.md`.
"""

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
        spans = self.of_row(row)
        inside = spans.sentences == number
        return np.stack([spans.starts[inside], spans.ends[inside]], axis=1) - store.sentences(row)[number, 0]


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


@lru_cache(maxsize=2)  # 20 s for 49,000 passages, and tasks and what measures them ask for the same
def find_evidence(store: PassageStore, room: int, longest: int) -> Evidence:
    """Find the spans for which some other passage is evidence, and these passages.

    Args:
        store: the corpus.
        room: tokens of a sentence that are looked at; a span ends within them.
        longest: most tokens of a span.

    Returns:
        What was found; it is kept for the last two corpora, so it must not be written to.
    """
    # --- The tokens of all bodies, one after another, and the sentences in them ---------------------------------------
    bodies = [store.body_tokens(row) for row in range(len(store))]
    titles = [store.title_tokens(row) for row in range(len(store))]
    tokens = np.concatenate(bodies).astype(np.int64)
    bounds = np.concatenate([[0], np.cumsum([len(body) for body in bodies])])  # [rows + 1], in `tokens`
    sentence_counts = store.counts("sentences")
    sentences = store.column("sentences") + np.repeat(bounds[:-1], sentence_counts)[:, None]  # [sentences, 2]
    sentence_starts, sentence_lengths = sentences[:, 0], sentences[:, 1] - sentences[:, 0]

    # --- Spans that may be hidden, held by 2 to HOLDERS passages ------------------------------------------------------
    starts, ends = store.column("spans")[:, :2].astype(np.int64).T  # [spans] each, in their body
    rows = np.repeat(np.arange(len(store)), store.counts("spans"))
    owners = np.searchsorted(sentence_starts, bounds[rows] + starts, side="right") - 1  # sentence of each span
    offsets = sentence_starts[owners] - bounds[rows]
    is_candidate = (ends <= offsets + np.minimum(room, sentence_lengths[owners])) & (starts >= offsets)
    is_candidate &= ends - starts <= longest
    rows, owners, starts, ends = (part[is_candidate] for part in (rows, owners, starts, ends))
    # A number for each run of tokens, the same for the same tokens, from a hash of 64 bits.
    lengths, first_tokens = ends - starts, bounds[rows] + starts
    hashes = lengths.astype(np.uint64)
    for offset in range(int(lengths.max(initial=0))):
        step = tokens[np.minimum(first_tokens + offset, len(tokens) - 1)].astype(np.uint64)
        hashes = np.where(offset < lengths, (hashes ^ (step + np.uint64(1))) * HASH_BASE, hashes)
    names = np.unique(hashes, return_inverse=True)[1].astype(np.int64)
    held = np.unique(np.stack([names, rows]), axis=1)  # a passage that has a name twice holds it once
    holders = np.bincount(held[0], minlength=names.max(initial=-1) + 1)[names]
    is_candidate = (holders > 1) & (holders <= HOLDERS)
    rows, owners, starts, ends, names = (part[is_candidate] for part in (rows, owners, starts, ends, names))

    # --- Words of passages, titles too, and of sentences, and what they weigh -----------------------------------------
    vocabulary = 1 + max(int(part.max(initial=0)) for part in (tokens, *titles))
    in_bodies = np.repeat(np.arange(len(store)), np.diff(bounds))
    in_titles = np.repeat(np.arange(len(store)), [len(title) for title in titles])
    of_passages = np.concatenate([in_bodies, in_titles]), np.concatenate([tokens, *titles])
    passage_words = _incidence(*of_passages, (len(store), vocabulary))
    frequency = np.asarray(passage_words.sum(axis=0), np.float64)[0]
    weights = np.where(frequency > COMMON * len(store), 0.0, np.log((len(store) + 1) / (frequency + 0.5)))
    numbers, positions = _ranges(sentence_starts, sentence_lengths)
    sentence_words = _incidence(numbers, tokens[positions], (len(sentences), vocabulary)).multiply(weights).tocsr()
    numbers, positions = _ranges(bounds[rows] + starts, ends - starts)
    # Every passage that holds a span has the words of the span, so these count on neither side.
    span_weights = np.asarray(_incidence(numbers, tokens[positions], (len(rows), vocabulary)) @ weights)
    totals = np.asarray(sentence_words.sum(axis=1))[owners, 0] - span_weights

    # --- Every span with every other passage that holds it, some PAIRS at a time --------------------------------------
    held = np.unique(np.stack([names, rows]), axis=1)
    first_holders = np.searchsorted(held[0], names)
    counts = np.searchsorted(held[0], names, side="right") - first_holders
    pairs = [np.zeros((0, 2), np.int64)]
    for part in np.array_split(np.arange(len(counts)), -(-int(counts.sum()) // PAIRS) or 1):
        numbers, positions = _ranges(first_holders[part], counts[part])
        spans, passages = part[numbers], held[1, positions]
        spans, passages = (values[passages != rows[spans]] for values in (spans, passages))
        shared = np.asarray(sentence_words[owners[spans]].multiply(passage_words[passages]).sum(axis=1))[:, 0]
        share = (shared - span_weights[spans]) / np.maximum(totals[spans], LEAST_WEIGHT)
        is_evidence = (share >= LEAST) & (share < MOST) & (totals[spans] >= LEAST_WEIGHT)
        pairs.append(np.stack([spans[is_evidence], passages[is_evidence]], axis=1))
    all_pairs = np.concatenate(pairs)
    supported, numbers = np.unique(all_pairs[:, 0], return_inverse=True)
    first_sentences = np.concatenate([[0], np.cumsum(sentence_counts)])[rows]
    columns = (rows, owners - first_sentences, starts, ends)
    return Evidence(EvidenceSpans(*(part[supported] for part in columns)), numbers, all_pairs[:, 1])


def _incidence(rows: NDArray[np.int64], words: NDArray[np.int64], shape: tuple[int, int]) -> "sparse.csr_matrix":
    """Return a matrix of 1 where a row has a word."""
    from scipy import sparse

    matrix = sparse.csr_matrix((np.ones(len(rows), np.float32), (rows.astype(np.int32), words.astype(np.int32))), shape)
    matrix.data[:] = 1.0
    return matrix


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of several ranges one after another: which range each is of, and the number itself."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    return owners, np.arange(len(owners)) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
