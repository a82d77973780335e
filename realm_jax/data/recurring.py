"""Salient spans that occur again in another sentence of their passage.

Only such a span can be read off the rest of its passage. A loop over the rows takes three quarters of an hour for
thirteen million passages. So runs of tokens are compared by hashes for a whole segment at once, and what hashes propose
is compared by tokens.
"""

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.store import PassageStore, Segment

_BASE = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial hash of a run of tokens: odd, with well-mixed bits
_HASHED = 3  # tokens of a run that are hashed; the others are compared
_BITS = 22  # of the table that says which hashes spans have


def recurring_spans(store: PassageStore, max_tokens: int) -> NDArray[np.int32]:
    """List salient spans that end within `max_tokens` of their sentence's start and recur in their passage.

    Args:
        store: the passages.
        max_tokens: tokens of a sentence that a query has room for.

    Returns:
        int32 [n, 4], in order: row, sentence, number of the span in the row, and the first other sentence that holds
        its tokens. Sentences are numbered in their row.
    """
    parts = []
    for segment in store.segments:
        found = _recurring_in_segment(segment, max_tokens)  # [n, 4]
        found[:, 0] = store.rows_at(segment.start + found[:, 0])
        parts.append(found[found[:, 0] >= 0].astype(np.int32))
    return np.concatenate(parts)


def _recurring_in_segment(segment: Segment, max_tokens: int) -> NDArray[np.int64]:
    """Do the work of `recurring_spans` for one segment, with rows of the segment."""
    tokens, token_offsets = segment.columns["tokens"], segment.offsets["tokens"]
    body_starts = token_offsets[:-1] + segment.columns["title_lengths"]  # [rows], in `tokens`
    sentence_rows = segment.value_rows("sentences")  # [sentences]
    sentence_starts, sentence_ends = body_starts[sentence_rows] + segment.columns["sentences"].T  # [sentences] each
    span_rows, spans = segment.value_rows("spans"), segment.columns["spans"]
    starts = body_starts[span_rows] + spans[:, 0]  # [spans], in `tokens`
    lengths = spans[:, 1] - spans[:, 0]
    owners = np.searchsorted(sentence_starts, starts, "right") - 1  # [spans]: sentence of each span
    in_reach = np.flatnonzero(starts + lengths - sentence_starts[owners] <= max_tokens)
    others = np.full(len(spans), -1)  # [spans]: first other sentence with the same tokens
    # Runs of two passages have different hashes, because a hash begins with the row.
    hashes = segment.value_rows("tokens").astype(np.uint64) * _BASE
    for length in range(1, _HASHED + 1):
        hashes = (hashes[: len(tokens) - length + 1] + tokens[length - 1 :]) * _BASE  # [tokens - length + 1]
        pending = in_reach[np.minimum(lengths[in_reach], _HASHED) == length]
        # A small table of the spans' hashes proposes positions; most positions of a corpus are none.
        is_wanted = np.zeros(1 << _BITS, bool)
        is_wanted[hashes[starts[pending]] >> np.uint64(64 - _BITS)] = True
        proposed = np.flatnonzero(is_wanted[hashes >> np.uint64(64 - _BITS)])
        # Sorted by hash, and by position where hashes are equal: both in one number, which sorts five times faster.
        low = np.uint64((1 << len(proposed).bit_length()) - 1)
        keys = np.sort(hashes[proposed] & ~low | np.arange(len(proposed), dtype=np.uint64))
        proposed = proposed[keys & low]
        span_keys = hashes[starts[pending]] & ~low
        position, stop = np.searchsorted(keys, span_keys), np.searchsorted(keys, span_keys | low, "right")
        # Every pending span compares its next proposed position, until one holds its tokens or none is left.
        open_spans = np.arange(len(pending))
        while len(open_spans := open_spans[position[open_spans] < stop[open_spans]]):
            at, here = proposed[position[open_spans]], pending[open_spans]
            other = np.searchsorted(sentence_starts, at, "right") - 1
            good = (other >= 0) & (other != owners[here]) & (sentence_rows[other] == span_rows[here])
            good &= at + lengths[here] <= sentence_ends[other]
            for offset in range(int(lengths[here[good]].max(initial=0))):
                within = np.flatnonzero(good & (offset < lengths[here]))
                good[within] = tokens[at[within] + offset] == tokens[starts[here[within]] + offset]
            others[here[good]] = other[good]
            position[open_spans] += 1
            open_spans = open_spans[~good]
    recurring = np.flatnonzero(others >= 0)
    rows = span_rows[recurring]
    first_sentences, first_spans = segment.offsets["sentences"][rows], segment.offsets["spans"][rows]
    sentences, other_sentences = owners[recurring] - first_sentences, others[recurring] - first_sentences
    return np.stack([rows, sentences, recurring - first_spans, other_sentences], axis=1)
