"""Layouts: special tokens kept, the earlier sequence first, padding at the right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data.layouts import SpecialTokens, document, joint, query

SPECIAL = SpecialTokens(pad=0, cls=1, sep=2, mask=3)
pieces = st.lists(st.integers(10, 99), max_size=40)


@pytest.mark.parametrize(
    "layout, ids, segments, used",
    [
        (query([7, 8], 6, SPECIAL), [1, 7, 8, 2, 0, 0], [0] * 6, 4),
        # title, then body in segment one; the null document is its special tokens
        (document([5], [21, 22], 8, SPECIAL), [1, 5, 2, 21, 22, 2, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0], 6),
        (document([], [], 5, SPECIAL), [1, 2, 2, 0, 0], [0, 0, 1, 0, 0], 3),
        # the reader's input, as in ORQA
        (joint([7, 8], [21, 22, 23, 24], 8, SPECIAL), [1, 7, 8, 2, 21, 22, 23, 2], [0, 0, 0, 0, 1, 1, 1, 1], 8),
        (joint([7, 8], [31, 32], 8, SPECIAL), [1, 7, 8, 2, 31, 32, 2, 0], [0, 0, 0, 0, 1, 1, 1, 0], 7),
        # a title between query and body, in the body's segment
        (joint([7, 8], [21, 22], 10, SPECIAL, title=[5]), [1, 7, 8, 2, 5, 2, 21, 22, 2, 0],
         [0, 0, 0, 0, 1, 1, 1, 1, 1, 0], 9),
    ],
)  # fmt: skip
def test_layouts_by_hand(layout, ids, segments, used) -> None:
    assert (layout.ids.tolist(), layout.segments.tolist(), layout.used) == (ids, segments, used)


@pytest.mark.parametrize(
    "layout, counts",
    [
        (query(np.full(200, 50), 96, SPECIAL), (94, 0)),
        (document(np.full(5, 50), np.full(400, 60), 288, SPECIAL), (5, 280)),  # the title first
        (document(np.full(400, 50), [60], 288, SPECIAL), (285, 0)),
        (joint(np.full(200, 50), np.full(400, 60), 384, SPECIAL, max_query=94), (94, 287)),  # as the query alone is
    ],
)
def test_long_texts_are_cut_to_the_room_beside_the_special_tokens(layout, counts) -> None:
    assert tuple(int((layout.ids == piece).sum()) for piece in (50, 60)) == counts


@given(pieces, pieces, st.integers(3, 60))
def test_nothing_but_the_overhang_is_lost(first: list[int], second: list[int], length: int) -> None:
    laid_out = document(first, second, length, SPECIAL)
    kept_first = first[: length - 3]
    kept_second = second[: length - 3 - len(kept_first)]
    expected = [1, *kept_first, 2, *kept_second, 2]
    assert laid_out.used == len(expected) <= length
    assert laid_out.ids.tolist() == expected + [0] * (length - len(expected))
    assert laid_out.ids.dtype == laid_out.segments.dtype == np.int32
    assert int(laid_out.segments.sum()) == len(kept_second) + 1
