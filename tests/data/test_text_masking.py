"""Masking: what is hidden, what is predicted, and that both follow from the generator alone."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data.masking import KINDS, OF_SPANS, Masked, mask, predictions_needed


class Vocabulary(NamedTuple):
    mask_id: int = 4
    size: int = 1_000
    special_ids: frozenset[int] = frozenset({0, 1, 2, 4, 700})


VOCABULARY = Vocabulary()
NO_SPANS = np.zeros((0, 2), np.int32)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def masked(kind: str, length: int, spans=NO_SPANS, seed: int = 0, most: int = 10, room: int | None = None) -> Masked:
    result = mask(kind, np.arange(100, 100 + length), spans, generator(seed), VOCABULARY, most, room)
    assert result is not None
    return result


def test_a_salient_span_is_masked_as_a_whole_and_at_most_ten_of_its_pieces_are_predicted() -> None:
    result = masked("salient", 6, spans=[(2, 5)])
    assert result.ids.tolist() == [100, 101, 4, 4, 4, 105]
    assert result.positions.tolist() == [2, 3, 4]
    assert result.targets.tolist() == [102, 103, 104]
    result = masked("salient", 20, spans=[(3, 15)], most=10)
    assert (result.ids == VOCABULARY.mask_id).sum() == 12
    assert result.positions.tolist() == list(range(3, 13))


def test_a_span_that_the_query_would_cut_or_with_an_unknown_piece_is_not_chosen() -> None:
    assert mask("salient", np.arange(100, 200), [(93, 95)], generator(), VOCABULARY, 10, room=94) is None
    assert masked("salient", 100, spans=[(93, 95), (92, 94)], room=94).positions.tolist() == [92, 93]
    assert mask("salient", [100, 1, 102], [(0, 2)], generator(), VOCABULARY, 10) is None  # 1 is [UNK]


def test_each_span_is_as_likely() -> None:
    spans = [(0, 1), (2, 4), (5, 9)]
    first = [masked("salient", 10, spans=spans, seed=seed).positions[0] for seed in range(600)]
    counts = np.bincount(first, minlength=6)[[0, 2, 5]]
    assert counts.sum() == 600 and counts.min() > 150


def test_uniform_masking_replaces_as_bert_does() -> None:
    kinds = np.zeros(3)
    places = np.zeros(40)
    for seed in range(1_000):
        result = masked("uniform", 40, seed=seed)
        assert len(result.positions) == 6  # 15 % of 40
        now = result.ids[result.positions]
        kinds += [(now == 4).sum(), (now == result.targets).sum(), ((now != 4) & (now != result.targets)).sum()]
        places[result.positions] += 1
        assert not np.isin(now[now != 4], list(VOCABULARY.special_ids)).any()
    assert kinds / kinds.sum() == pytest.approx([0.8, 0.1, 0.1], abs=0.02)
    assert places / 1_000 == pytest.approx(np.full(40, 0.15), abs=0.05)


def test_random_spans_are_whole_masks_of_geometric_length() -> None:
    lengths = []
    for seed in range(500):
        result = masked("random_span", 200, seed=seed, most=30)
        assert len(result.positions) == 30
        assert (result.ids[result.positions] == VOCABULARY.mask_id).all()
        lengths += [len(run) for run in np.split(result.positions, np.flatnonzero(np.diff(result.positions) > 1) + 1)]
    assert 3 < np.mean(lengths) < 4.6  # 3.8 in SpanBERT; some spans touch, the last is cut


@given(
    kind=st.sampled_from(KINDS),
    length=st.integers(0, 60),
    spans=st.lists(st.tuples(st.integers(-2, 70), st.integers(-2, 70)), max_size=6),
    most=st.integers(1, 20),
    room=st.none() | st.integers(0, 70),
    seed=st.integers(0, 1_000),
)
def test_masks_of_any_sentence_can_be_undone_and_repeated(kind, length, spans, most, room, seed) -> None:
    ids = np.arange(100, 100 + length)
    spans = np.array(spans, np.int32).reshape(-1, 2)
    result = mask(kind, ids, spans, generator(seed), VOCABULARY, most, room)
    again = mask(kind, ids, spans, generator(seed), VOCABULARY, most, room)
    reach = length if room is None else min(length, room)
    fits = [(first, last) for first, last in spans.tolist() if 0 <= first < last <= reach]
    if result is None or again is None:
        assert result is again and not (fits if kind in OF_SPANS else reach)
        return
    assert all((one == other).all() for one, other in zip(result, again, strict=True))
    assert (np.diff(result.positions) > 0).all() and 0 < len(result.positions) <= most
    assert result.positions[-1] < reach
    hidden = np.flatnonzero(result.ids != ids)
    if kind in OF_SPANS:
        assert (hidden[0], hidden[-1] + 1) in fits and len(hidden) == hidden[-1] + 1 - hidden[0]
        assert result.positions.tolist() == hidden[:most].tolist()
    else:
        assert set(hidden) <= set(result.positions)
        assert len(result.positions) <= predictions_needed(kind, length)
    assert (ids[result.positions] == result.targets).all()


def test_predictions_are_sized_to_the_kind() -> None:
    assert predictions_needed("salient", 94) == 10
    assert predictions_needed("uniform", 94) == predictions_needed("random_span", 94) == 14
    assert predictions_needed("salient", 3) == 3
