"""Salient spans for which the corpus has evidence, in other passages or in another sentence of their own.

Most names recur by coincidence, so these spans are worth hiding.

A masked span y of a sentence x teaches retrieval only if another passage z mentions it. Such a passage contains y and
more of x: evidence(z) is the share of x's words, without those of y, that z has too, each word
weighted by its inverse document frequency. Words of more than a tenth of all passages do not count.
`docs/notebook/adaptation-2026-11-27.md` says how often this is right, and for what share of a corpus there is evidence.

A span that occurs again in another sentence of its passage can be read off the rest of the passage.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.store import PassageStore, Segment

if TYPE_CHECKING:
    from scipy import sparse  # otherwise in functions, so that answering starts sooner: it needs no evidence

LEAST, MOST = 0.35, 0.9  # of a sentence's words in another passage; above, it is nearly the same sentence again
LEAST_WEIGHT = 8.0  # nats: a sentence with fewer rare words says too little
HOLDERS = 50  # passages that may contain the span: a span of more passages is learned without retrieval
COMMON = 0.1  # share of the passages; a word of more passages does not count
PAIRS = 1 << 17  # of a sentence and a passage, compared at a time
HASH_BASE = np.uint64(0x9E37_79B9_7F4A_7C15)  # of polynomial hashes of tokens: odd, with well-mixed bits
_HASHED = 3  # tokens of a recurring run that are hashed; the others are compared
_BITS = 22  # of the table that says which hashes spans have


class EvidenceSpans(NamedTuple):
    """Spans for which some passage is evidence, in the order of rows.

    Attributes:
        rows: passage of each span, int64 [n].
        sentences: number of its sentence in the passage, int64 [n].
        starts: its first token in the body, int64 [n].
        ends: token behind its last one, int64 [n].
    """

    rows: NDArray[np.int64]
    sentences: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def of_row(self, row: int) -> "EvidenceSpans":
        """Return the spans of one passage."""
        first, last = np.searchsorted(self.rows, [row, row + 1])
        return EvidenceSpans(*(column[first:last] for column in self))

    def of_sentence(self, store: PassageStore, row: int, number: int) -> NDArray[np.int64]:
        """Return the spans of one sentence.

        Args:
            store: the passages.
            row: passage of the sentence.
            number: number of the sentence in the passage.

        Returns:
            Ranges of tokens relative to the start of the sentence, int64 [m, 2].
        """
        spans = self.of_row(row)
        inside = spans.sentences == number
        return np.stack([spans.starts[inside], spans.ends[inside]], axis=1) - store.sentences(row)[number, 0]


class Evidence(NamedTuple):
    """Spans, and pairs of a span and a passage that is evidence for it, in the order of spans and then of rows.

    Attributes:
        spans: the spans.
        numbers: index of the span of each pair, int64 [pairs].
        rows: passage of each pair, int64 [pairs].
    """

    spans: EvidenceSpans
    numbers: NDArray[np.int64]
    rows: NDArray[np.int64]

    def rows_of(self, number: int) -> NDArray[np.int64]:
        """Return the rows that are evidence for a span."""
        first, last = np.searchsorted(self.numbers, [number, number + 1])
        return self.rows[first:last]

    def among(self, is_selected: NDArray[np.bool_]) -> "Evidence":
        """Return the evidence among selected rows, bool [rows]: spans and passages of both sides."""
        pairs = is_selected[self.spans.rows[self.numbers]] & is_selected[self.rows]  # [pairs]
        supported, numbers = np.unique(self.numbers[pairs], return_inverse=True)
        return Evidence(EvidenceSpans(*(column[supported] for column in self.spans)), numbers, self.rows[pairs])


@lru_cache(maxsize=2)  # 20 s for 49,000 passages, and both tasks and their evaluation call it
def find_evidence(store: PassageStore, room: int, longest: int) -> Evidence:
    """Find the spans for which some other passage is evidence, and these passages.

    Args:
        store: the corpus.
        room: tokens of a sentence that are read; a span ends within them.
        longest: most tokens of a span.

    Returns:
        The evidence; it is cached for the last two corpora, so nobody may change it.
    """
    # --- The tokens of all bodies, one after another, and the sentences in them ---------------------------------------
    bodies = [store.body_tokens(row) for row in range(len(store))]
    titles = [store.title_tokens(row) for row in range(len(store))]
    tokens = np.concatenate(bodies).astype(np.int64)  # [tokens]
    bounds = np.concatenate([[0], np.cumsum([len(body) for body in bodies])])  # [rows + 1], in `tokens`
    sentence_counts = store.counts("sentences")
    sentences = store.column("sentences") + np.repeat(bounds[:-1], sentence_counts)[:, None]  # [sentences, 2]
    sentence_starts, sentence_lengths = sentences[:, 0], sentences[:, 1] - sentences[:, 0]

    # --- Spans that may be hidden, of 2 to HOLDERS passages -----------------------------------------------------------
    starts, ends = store.column("spans")[:, :2].astype(np.int64).T  # [spans] each, in their body
    rows = np.repeat(np.arange(len(store)), store.counts("spans"))  # [spans]
    owners = np.searchsorted(sentence_starts, bounds[rows] + starts, side="right") - 1  # sentence of each span
    offsets = sentence_starts[owners] - bounds[rows]  # [spans]: start of the sentence in its body
    is_candidate = (ends <= offsets + np.minimum(room, sentence_lengths[owners])) & (starts >= offsets)
    is_candidate &= ends - starts <= longest
    rows, owners, starts, ends = (part[is_candidate] for part in (rows, owners, starts, ends))
    # A number for each run of tokens, the same for the same tokens, from a hash of 64 bits.
    lengths, first_tokens = ends - starts, bounds[rows] + starts
    hashes = lengths.astype(np.uint64)
    for offset in range(int(lengths.max(initial=0))):
        step = tokens[np.minimum(first_tokens + offset, len(tokens) - 1)].astype(np.uint64)  # [spans]
        hashes = np.where(offset < lengths, (hashes ^ (step + np.uint64(1))) * HASH_BASE, hashes)  # [spans]
    names = np.unique(hashes, return_inverse=True)[1].astype(np.int64)  # [spans]: equal for equal tokens
    held = np.unique(np.stack([names, rows]), axis=1)  # [2, n]; a passage that has a name twice counts once
    holders = np.bincount(held[0], minlength=names.max(initial=-1) + 1)[names]  # [spans]: passages of the same name
    is_candidate = (holders > 1) & (holders <= HOLDERS)
    rows, owners, starts, ends, names = (part[is_candidate] for part in (rows, owners, starts, ends, names))

    # --- Words of passages with titles, words of sentences, and their weights -----------------------------------------
    vocabulary = 1 + max(int(part.max(initial=0)) for part in (tokens, *titles))
    in_bodies = np.repeat(np.arange(len(store)), np.diff(bounds))  # [tokens]: passage of each
    in_titles = np.repeat(np.arange(len(store)), [len(title) for title in titles])  # [title tokens]
    of_passages = np.concatenate([in_bodies, in_titles]), np.concatenate([tokens, *titles])
    passage_words = _incidence(*of_passages, (len(store), vocabulary))
    del bodies, titles, in_bodies, in_titles, of_passages  # about 24 bytes a token, not needed by the loop below
    frequency = np.asarray(passage_words.sum(axis=0), np.float64)[0]  # [vocabulary]
    weights = np.where(frequency > COMMON * len(store), 0.0, np.log((len(store) + 1) / (frequency + 0.5)))
    numbers, positions = _ranges(sentence_starts, sentence_lengths)
    sentence_words = _incidence(numbers, tokens[positions], (len(sentences), vocabulary)).multiply(weights).tocsr()
    numbers, positions = _ranges(bounds[rows] + starts, ends - starts)
    # Every passage with a span has the words of the span, so these count on neither side.
    span_weights = np.asarray(_incidence(numbers, tokens[positions], (len(rows), vocabulary)) @ weights)  # [spans]
    totals = np.asarray(sentence_words.sum(axis=1))[owners, 0] - span_weights  # [spans]

    # --- Every span with every other passage that has it, some PAIRS at a time ----------------------------------------
    held = np.unique(np.stack([names, rows]), axis=1)  # [2, n]
    first_holders = np.searchsorted(held[0], names)  # [spans]
    counts = np.searchsorted(held[0], names, side="right") - first_holders  # [spans]
    pairs = [np.zeros((0, 2), np.int64)]  # span and row of each pair
    for part in np.array_split(np.arange(len(counts)), -(-int(counts.sum()) // PAIRS) or 1):
        numbers, positions = _ranges(first_holders[part], counts[part])
        spans, passages = part[numbers], held[1, positions]
        spans, passages = (values[passages != rows[spans]] for values in (spans, passages))  # [pairs] each
        shared = np.asarray(sentence_words[owners[spans]].multiply(passage_words[passages]).sum(axis=1))[:, 0]
        share = (shared - span_weights[spans]) / np.maximum(totals[spans], LEAST_WEIGHT)  # [pairs]
        is_evidence = (share >= LEAST) & (share < MOST) & (totals[spans] >= LEAST_WEIGHT)
        pairs.append(np.stack([spans[is_evidence], passages[is_evidence]], axis=1))
    all_pairs = np.concatenate(pairs)  # [pairs, 2]: span and row
    supported, numbers = np.unique(all_pairs[:, 0], return_inverse=True)
    first_sentences = np.concatenate([[0], np.cumsum(sentence_counts)])[rows]  # [spans]
    columns = (rows, owners - first_sentences, starts, ends)
    return Evidence(EvidenceSpans(*(column[supported] for column in columns)), numbers, all_pairs[:, 1])


def _incidence(rows: NDArray[np.int64], words: NDArray[np.int64], shape: tuple[int, int]) -> "sparse.csr_matrix":
    """Return a sparse matrix with 1 for each word of each row."""
    from scipy import sparse

    matrix = sparse.csr_matrix((np.ones(len(rows), np.float32), (rows.astype(np.int32), words.astype(np.int32))), shape)
    matrix.data[:] = 1.0
    return matrix


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of several ranges one after another: the index of the range, and the number itself."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    return owners, np.arange(len(owners)) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)


# --- In the same passage ----------------------------------------------------------------------------------------------


def recurring_spans(store: PassageStore, max_tokens: int) -> NDArray[np.int32]:
    """List salient spans that end within `max_tokens` of their sentence's start and recur in their passage.

    A loop over the rows takes three quarters of an hour for thirteen million passages. So runs of tokens are compared
    by hashes for a whole segment at once, and the matches of hashes are then compared by tokens.

    Args:
        store: the passages.
        max_tokens: tokens of a sentence that a query has room for.

    Returns:
        int32 [n, 4], in order: row, sentence, number of the span in the row, and the first other sentence with its
        tokens. Sentences are numbered in their row.
    """
    parts = []
    for segment in store.segments:
        recurring = _recurring_in_segment(segment, max_tokens)  # [n, 4]
        recurring[:, 0] = store.rows_at(segment.start + recurring[:, 0])
        parts.append(recurring[recurring[:, 0] >= 0].astype(np.int32))
    return np.concatenate(parts)


def _recurring_in_segment(segment: Segment, max_tokens: int) -> NDArray[np.int64]:
    """Find the `recurring_spans` of one segment, with rows of the segment."""
    tokens, token_offsets = segment.columns["tokens"], segment.offsets["tokens"]
    body_starts = token_offsets[:-1] + segment.columns["title_lengths"]  # [rows], in `tokens`
    sentence_rows = segment.value_rows("sentences")  # [sentences]
    sentence_starts, sentence_ends = body_starts[sentence_rows] + segment.columns["sentences"].T  # [sentences] each
    span_rows, spans = segment.value_rows("spans"), segment.columns["spans"]
    starts = body_starts[span_rows] + spans[:, 0]  # [spans], in `tokens`
    lengths = spans[:, 1] - spans[:, 0]
    owners = np.searchsorted(sentence_starts, starts, "right") - 1  # [spans]: sentence of each span
    in_reach = np.flatnonzero(starts + lengths - sentence_starts[owners] <= max_tokens)  # [n], of spans
    others = np.full(len(spans), -1)  # [spans]: first other sentence with the same tokens
    # Runs of two passages have different hashes, because a hash begins with the row.
    hashes = segment.value_rows("tokens").astype(np.uint64) * HASH_BASE
    for length in range(1, _HASHED + 1):
        hashes = (hashes[: len(tokens) - length + 1] + tokens[length - 1 :]) * HASH_BASE  # [tokens - length + 1]
        pending = in_reach[np.minimum(lengths[in_reach], _HASHED) == length]  # [n], of spans
        # A small table of the spans' hashes proposes positions; most positions of a corpus are none.
        is_wanted = np.zeros(1 << _BITS, bool)  # [1 << _BITS]
        is_wanted[hashes[starts[pending]] >> np.uint64(64 - _BITS)] = True
        proposed = np.flatnonzero(is_wanted[hashes >> np.uint64(64 - _BITS)])  # [n], in `tokens`
        # Sorted by hash, and by position where hashes are equal: both in one number, which sorts five times faster.
        low = np.uint64((1 << len(proposed).bit_length()) - 1)
        keys = np.sort(hashes[proposed] & ~low | np.arange(len(proposed), dtype=np.uint64))
        proposed = proposed[keys & low]
        span_keys = hashes[starts[pending]] & ~low
        position, stop = np.searchsorted(keys, span_keys), np.searchsorted(keys, span_keys | low, "right")
        # Every pending span compares its next proposed position, until one has its tokens or no position remains.
        open_spans = np.arange(len(pending))  # [n], of pending
        while len(open_spans := open_spans[position[open_spans] < stop[open_spans]]):
            candidate, span = proposed[position[open_spans]], pending[open_spans]  # [open_spans] each
            other = np.searchsorted(sentence_starts, candidate, "right") - 1
            is_match = (other >= 0) & (other != owners[span]) & (sentence_rows[other] == span_rows[span])
            is_match &= candidate + lengths[span] <= sentence_ends[other]
            for offset in range(int(lengths[span[is_match]].max(initial=0))):
                within = np.flatnonzero(is_match & (offset < lengths[span]))
                is_match[within] = tokens[candidate[within] + offset] == tokens[starts[span[within]] + offset]
            others[span[is_match]] = other[is_match]
            position[open_spans] += 1
            open_spans = open_spans[~is_match]
    recurring = np.flatnonzero(others >= 0)  # [n], of spans
    rows = span_rows[recurring]
    first_sentences, first_spans = segment.offsets["sentences"][rows], segment.offsets["spans"][rows]
    sentences, other_sentences = owners[recurring] - first_sentences, others[recurring] - first_sentences
    return np.stack([rows, sentences, recurring - first_spans, other_sentences], axis=1)
