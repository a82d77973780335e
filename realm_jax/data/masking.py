"""Choose the tokens of a sentence to hide and predict: salient spans, or the two ablations of the REALM paper.

    salient      one date or name of the sentence, all of it: REALM's own (Guu et al. 2020, section 3.4)
    uniform      15 % of the tokens, one by one, as BERT does (Devlin et al. 2019, section 3.1)
    random_span  15 % of the tokens, in spans at random (Joshi et al. 2020, SpanBERT, section 3.1)

Pure functions of their arguments and the generator: the same generator state gives the same masks.
Next to read: `layouts.py`, which turns the masked sentence into model input.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from realm_jax.data.tokenizer import Tokenizer

KINDS = ("salient", "evidence", "uniform", "random_span")
OF_SPANS = ("salient", "evidence")  # that hide a salient span, "evidence" one of `data/evidence.py`
MASKED_SHARE = 0.15  # BERT's and SpanBERT's
SALIENT_PREDICTIONS = 10  # REALM's M
UNCHANGED_SHARE = RANDOM_SHARE = 0.1  # of the tokens that "uniform" predicts
LONGEST_RANDOM_SPAN = 10
_SPAN_LENGTHS = np.arange(1, LONGEST_RANDOM_SPAN + 1)
_SPAN_WEIGHTS = 0.2 * 0.8 ** (_SPAN_LENGTHS - 1)  # geometric, p = 0.2, without lengths above ten
_SPAN_PROBABILITIES = _SPAN_WEIGHTS / _SPAN_WEIGHTS.sum()


class Masked(NamedTuple):
    """A masked sentence.

    Attributes:
        ids: its tokens after masking, int32 [tokens].
        positions: sorted positions to predict, int32 [m].
        targets: their original tokens, int32 [m].
    """

    ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    targets: NDArray[np.int32]


def mask(
    kind: str,
    ids: ArrayLike,
    spans: ArrayLike,
    rng: np.random.Generator,
    vocabulary: Tokenizer,
    max_predictions: int,
    room: int | None = None,
) -> Masked | None:
    """Mask one sentence.

    Args:
        kind: one of `KINDS`.
        ids: tokens of the sentence without special ones [n]; not changed.
        spans: half-open ranges of tokens that may be hidden [m, 2]; only OF_SPANS read them, and skip those that
            contain [UNK].
        rng: the only source of randomness.
        vocabulary: gives the id of [MASK], and for "uniform" the tokens that may replace another.
        max_predictions: most positions that are predicted. A salient span of more tokens is masked completely and its
            first `max_predictions` tokens are predicted; the other kinds mask no more than they predict.
        room: tokens that the query layout keeps (its length less 2); nothing beyond is masked, and a salient span that
            reaches beyond is not chosen. None: all of `ids`.

    Returns:
        The masked sentence, or None if there is nothing to mask: no span that fits, or no token.
    """
    row = np.array(ids, dtype=np.int32)  # [tokens]
    length = len(row) if room is None else min(room, len(row))
    if kind in OF_SPANS:
        token_ids, special = row[:length].tolist(), vocabulary.special_ids
        fitting = [
            (first, last)
            for first, last in np.asarray(spans, dtype=np.int32).reshape(-1, 2).tolist()
            if 0 <= first < last <= length and special.isdisjoint(token_ids[first:last])  # [UNK] is no answer
        ]
        hidden = np.arange(*fitting[rng.integers(len(fitting))]) if fitting else np.zeros(0, np.int64)
    elif kind == "uniform":
        hidden = np.sort(rng.permutation(length)[: _budget(length, max_predictions)])
    else:
        hidden = _random_spans(length, _budget(length, max_predictions), rng)
    if not len(hidden):
        return None
    # A long salient span is hidden completely, so that no part of the answer is visible.
    positions = hidden[:max_predictions].astype(np.int32)
    targets = row[positions]
    row[hidden] = _bert_replacements(targets, rng, vocabulary) if kind == "uniform" else vocabulary.mask_id
    return Masked(row, positions, targets)


def predictions_needed(kind: str, length: int) -> int:
    """Return the size of the fixed prediction arrays.

    Args:
        kind: one of `KINDS`.
        length: most tokens of a sentence.
    """
    if kind in OF_SPANS:
        return min(SALIENT_PREDICTIONS, length)
    return _budget(length, length)


def _budget(length: int, max_predictions: int) -> int:
    """Return 15 % of the tokens, but at least one if there is one."""
    return min(max(1, round(MASKED_SHARE * length)), max_predictions, length)


def _random_spans(length: int, budget: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Place spans until the budget is used up, truncating the last one; return the hidden positions."""
    hidden = np.zeros(length, bool)  # [length]
    while (remaining := budget - int(hidden.sum())) > 0:
        span = min(remaining, int(rng.choice(_SPAN_LENGTHS, p=_SPAN_PROBABILITIES)))
        # All free stretches of that length are equally likely; since the budget is small, one is nearly always left.
        starts = np.flatnonzero(np.convolve(hidden, np.ones(span), mode="valid") == 0)
        if len(starts):
            start = rng.choice(starts)
            hidden[start : start + span] = True
    return np.flatnonzero(hidden)


def _bert_replacements(
    targets: NDArray[np.int32], rng: np.random.Generator, vocabulary: Tokenizer
) -> NDArray[np.int32]:
    """Replace 80 % of the tokens by [MASK] and 10 % by any ordinary token; 10 % stay."""
    draw = rng.random(len(targets))  # [m]
    replaced = np.full(len(targets), vocabulary.mask_id, np.int32)  # [m]
    # Ordinary tokens are numbered without the special ones; each special id below a number moves it up by one.
    anything = rng.integers(vocabulary.size - len(vocabulary.special_ids), size=len(targets))
    for special in sorted(vocabulary.special_ids):
        anything += anything >= special
    is_random = draw < RANDOM_SHARE
    is_unchanged = (draw >= RANDOM_SHARE) & (draw < RANDOM_SHARE + UNCHANGED_SHARE)
    replaced[is_random] = anything[is_random]
    replaced[is_unchanged] = targets[is_unchanged]
    return replaced
