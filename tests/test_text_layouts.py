"""Layouts: special tokens kept, the earlier sequence first, padding at the right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data.layouts import SpecialTokens, document, joint, query

SPECIAL = SpecialTokens(pad=0, cls=1, sep=2, mask=3)
pieces = st.lists(st.integers(10, 99), max_size=40)


def test_query() -> None:
    laid_out = query([7, 8], 6, SPECIAL)
    assert laid_out.ids.tolist() == [1, 7, 8, 2, 0, 0]
    assert laid_out.segments.tolist() == [0] * 6
    assert laid_out.used == 4


def test_a_query_of_length_96_keeps_94_pieces() -> None:
    laid_out = query(np.arange(100, 300), 96, SPECIAL)
    assert laid_out.ids[1:95].tolist() == list(range(100, 194))
    assert (laid_out.ids[95], laid_out.used) == (2, 96)


def test_document_has_title_then_body_in_segment_one() -> None:
    laid_out = document([5], [21, 22], 8, SPECIAL)
    assert laid_out.ids.tolist() == [1, 5, 2, 21, 22, 2, 0, 0]
    assert laid_out.segments.tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    assert laid_out.used == 6


def test_a_document_of_length_288_keeps_285_pieces_the_title_first() -> None:
    laid_out = document(np.full(5, 50), np.full(400, 60), 288, SPECIAL)
    assert [int((laid_out.ids == piece).sum()) for piece in (50, 60)] == [5, 280]
    assert [int((document(np.full(400, 50), [60], 288, SPECIAL).ids == piece).sum()) for piece in (50, 60)] == [285, 0]


def test_the_null_document_is_its_special_tokens() -> None:
    laid_out = document([], [], 5, SPECIAL)
    assert laid_out.ids.tolist() == [1, 2, 2, 0, 0]
    assert laid_out.segments.tolist() == [0, 0, 1, 0, 0]


def test_joint_follows_the_reader_layout_of_orqa() -> None:
    cut, short = (joint([7, 8], body, 8, SPECIAL) for body in ([21, 22, 23, 24], [31, 32]))
    assert cut.ids.tolist() == [1, 7, 8, 2, 21, 22, 23, 2]
    assert short.ids.tolist() == [1, 7, 8, 2, 31, 32, 2, 0]
    assert short.segments.tolist() == [0, 0, 0, 0, 1, 1, 1, 0]
    assert (cut.used, short.used) == (8, 7)


def test_the_joint_query_is_cut_as_the_query_alone_is() -> None:
    long_query, body = np.full(200, 50), np.full(400, 60)
    laid_out = joint(long_query, body, 384, SPECIAL, max_query=94)
    assert [int((laid_out.ids == piece).sum()) for piece in (50, 60)] == [94, 287]
    assert (laid_out.ids[:96] == query(long_query, 96, SPECIAL).ids).all()


def test_a_title_stands_between_query_and_body_and_in_the_body_s_segment() -> None:
    laid_out = joint([7, 8], [21, 22], 10, SPECIAL, title=[5])
    assert laid_out.ids.tolist() == [1, 7, 8, 2, 5, 2, 21, 22, 2, 0]
    assert laid_out.segments.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 0]
    assert laid_out.used == 9


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


def test_a_layout_without_room_for_its_special_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="2 places cannot hold its 3 special tokens"):
        joint([7], [8], 2, SPECIAL)
    with pytest.raises(ValueError, match="one row"):
        query([[7]], 5, SPECIAL)
