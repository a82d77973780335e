"""Packing: whole sentences in order, as many as fit, nothing lost."""

from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data.passage_packing import body_room, max_title, pack, split_long

lengths = st.lists(st.integers(0, 60), max_size=60)


def test_a_passage_counts_title_and_three_special_tokens() -> None:
    assert pack([100, 100, 80, 5], title_length=5, limit=288) == [(0, 3), (3, 4)]
    assert pack([100, 100, 81, 5], title_length=5, limit=288) == [(0, 2), (2, 4)]


def test_no_sentences_make_no_passage() -> None:
    assert pack([], title_length=4) == []


def test_a_sentence_over_the_limit_stands_alone() -> None:
    assert pack([10, 400, 10], title_length=5, limit=288) == [(0, 1), (1, 2), (2, 3)]


@given(lengths, st.integers(0, 100), st.integers(70, 120))
def test_packing_loses_nothing_keeps_order_and_is_greedy(sentences: list[int], title: int, limit: int) -> None:
    passages = pack(sentences, title, limit)
    assert [index for first, last in passages for index in range(first, last)] == list(range(len(sentences)))
    room = body_room(title, limit)
    for first, last in passages:
        assert last - first == 1 or sum(sentences[first:last]) <= room
        if last < len(sentences):
            assert sum(sentences[first : last + 1]) > room


def ranks_of(words: list[int]) -> list[int]:
    """How good the cut before each token is: 3 at a word, 1 inside of it."""
    return [1 if piece else 3 for pieces in words for piece in range(pieces)]


@given(st.lists(st.integers(0, 400), max_size=30), st.integers(0, 400), st.integers(7, 300))
def test_after_splitting_no_passage_is_over_the_limit(words: list[int], title: int, limit: int) -> None:
    parts = [end - start for start, end in split_long(ranks_of(words), body_room(title, limit))]
    kept_title = min(title, max_title(limit))
    for first, last in pack(parts, title, limit):
        assert 3 + kept_title + sum(parts[first:last]) <= limit


@given(st.lists(st.integers(1, 12), max_size=40), st.integers(1, 10))
def test_split_long_loses_nothing_and_cuts_between_words_where_it_can(words: list[int], room: int) -> None:
    parts = split_long(ranks_of(words), room)
    assert [piece for start, end in parts for piece in range(start, end)] == list(range(sum(words)))
    assert all(0 < end - start <= room for start, end in parts)
    position = 0
    for pieces in words:
        inside = [end for _, end in parts if position < end < position + pieces]
        assert pieces > room or not inside, "a word that fits was cut"
        position += pieces


def test_split_long_fills_a_part_before_it_begins_the_next() -> None:
    assert split_long(ranks_of([3, 3, 3, 3]), room=7) == [(0, 6), (6, 12)]
    assert split_long(ranks_of([2, 20, 2]), room=8) == [(0, 2), (2, 10), (10, 18), (18, 24)]


def test_split_long_takes_the_last_of_the_best_cuts() -> None:
    assert split_long([3, 1, 2, 1, 2, 0], room=4) == [(0, 4), (4, 6)]
    assert split_long([3, 0, 0, 0, 0, 0], room=4) == [(0, 4), (4, 6)]
