"""Salient spans that occur again in another sentence of their passage, found for a whole segment at once.

Only such a span can be read off the rest of its passage. A loop over the rows takes three quarters of an hour for
thirteen million passages; here runs of tokens are compared by hashes, and what hashes propose by their tokens.
Read next: `PassageStore.recurring_spans`.
"""

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.segments import Segment

_BASE = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial hash of a run of tokens: odd, with well-mixed bits
_HASHED = 3  # tokens of a run that are hashed; the others are compared
_BITS = 22  # of the table that says which hashes spans have


def recurring_spans(segment: Segment, room: int) -> NDArray[np.int64]:
    """Spans that end within `room` pieces of their sentence's start and recur, in order: int64 [n, 4].

    A row is (passage, sentence, place of the span among the passage's, the first other sentence that holds it). Spans
    and sentences are counted in their passage.
    """
    tokens, (span_rows, spans) = segment.values["tokens"], segment.all_spans()
    bodies = segment.offsets["tokens"][:-1] + segment.fixed["title_lengths"]
    sentences = _Sentences(segment, bodies)
    starts, lengths = bodies[span_rows] + spans[:, 0], spans[:, 1] - spans[:, 0]
    own = sentences.at(starts)
    near = np.flatnonzero(starts + lengths - sentences.starts[own] <= room)
    others = np.full(len(spans), -1)
    token_rows = np.repeat(np.arange(segment.rows), np.diff(segment.offsets["tokens"]))
    hashes = token_rows.astype(np.uint64) * _BASE  # so that runs of two passages differ
    for length in range(1, _HASHED + 1):
        hashes = (hashes[: len(tokens) - length + 1] + tokens[length - 1 :]) * _BASE
        these = near[np.minimum(lengths[near], _HASHED) == length]
        others[these] = _first_other(tokens, hashes, starts[these], lengths[these], own[these], sentences)
    found = np.flatnonzero(others >= 0)
    rows = span_rows[found]
    first = segment.offsets["sentences"][rows]
    places = found - segment.offsets["spans"][rows]
    return np.stack([rows, own[found] - first, places, others[found] - first], axis=1)


class _Sentences:
    """All sentences of a segment: passage, first token and that after the last, in all tokens: int64 [n] each."""

    def __init__(self, segment: Segment, bodies: NDArray[np.int64]) -> None:
        self.rows = np.repeat(np.arange(segment.rows), np.diff(segment.offsets["sentences"]))
        base = bodies[self.rows]
        self.starts, self.ends = (base + column for column in segment.values["sentences"].T)

    def at(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The last sentence that begins at or before each token; −1 for none."""
        return np.searchsorted(self.starts, tokens, "right") - 1


def _first_other(
    tokens: NDArray, hashes: NDArray[np.uint64], starts: NDArray[np.int64], lengths: NDArray[np.int64],
    own: NDArray[np.int64], sentences: _Sentences,
) -> NDArray[np.int64]:  # fmt: skip
    """The first sentence of the same passage but `own` that holds each run of tokens, −1 for none: int64 [n].

    hashes: of the first tokens of a run that begins at each token, which depend on the passage too. starts, lengths: of
    the runs.
    """
    table = np.zeros(1 << _BITS, bool)
    table[hashes[starts] >> np.uint64(64 - _BITS)] = True
    proposed = np.flatnonzero(table[hashes >> np.uint64(64 - _BITS)])
    # Sorted by hash, and by place where hashes are equal: both in one number, which sorts five times faster than two.
    low = np.uint64((1 << len(proposed).bit_length()) - 1)
    keys = np.sort(hashes[proposed] & ~low | np.arange(len(proposed), dtype=np.uint64))
    proposed = proposed[keys & low]
    wanted = hashes[starts] & ~low
    place, stop = np.searchsorted(keys, wanted), np.searchsorted(keys, wanted | low, "right")
    found, left = np.full(len(starts), -1), np.arange(len(starts))
    while len(left := left[place[left] < stop[left]]):
        at = proposed[place[left]]
        other = sentences.at(at)
        good = (other >= 0) & (other != own[left]) & (sentences.rows[other] == sentences.rows[own[left]])
        good &= at + lengths[left] <= sentences.ends[other]
        for offset in range(int(lengths[left[good]].max(initial=0))):
            within = np.flatnonzero(good & (offset < lengths[left]))
            good[within] = tokens[at[within] + offset] == tokens[starts[left[within]] + offset]
        found[left[good]] = other[good]
        place[left] += 1
        left = left[~good]
    return found
