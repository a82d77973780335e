"""Word pieces with their units and shapes, windows of sentences, and labels to spans and back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realm_jax.data.spans import Span
from realm_jax.data.tags import (
    DIGIT,
    IGNORED,
    LOWER,
    MIXED,
    OTHER,
    SHAPES,
    TITLE,
    UPPER,
    Entity,
    TaggerTokenizer,
    TaggerTokens,
    labels,
    spans,
    windows,
    with_neighbours,
)
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
CHARACTERS = [*LETTERS, *"0123456789", *".,'-()É日本"]
VOCABULARY = [*SPECIAL_PIECES, "paris", "##ian", *CHARACTERS, *(f"##{letter}" for letter in [*LETTERS, *"0123456789"])]
CUTTER = TaggerTokenizer(WordPiece(VOCABULARY))
KINDS = ("LOC", "PER")


def pieces(text: str) -> TaggerTokens:
    return CUTTER([text])[0]


def units(text: str) -> list[str]:
    """The text of each unit."""
    found = pieces(text)
    bounds = [*np.flatnonzero(found.first).tolist(), len(found.ids)]
    return [text[found.starts[a] : found.ends[b - 1]] for a, b in zip(bounds, bounds[1:], strict=False)]


def test_units_do_not_depend_on_spaces_around_marks():
    assert units("Paris's U.S. techno-rock") == ["Paris", "'", "s", "U", ".", "S", ".", "techno", "-", "rock"]
    spaced = pieces("Paris 's U.S. techno - rock")
    np.testing.assert_array_equal(spaced.ids, pieces("Paris's U.S. techno-rock").ids)
    np.testing.assert_array_equal(spaced.first, pieces("Paris's U.S. techno-rock").first)


@pytest.mark.parametrize(
    "word, shape",
    [
        ("paris", LOWER),
        ("Parisian", TITLE),
        ("A", TITLE),
        ("Élan", TITLE),
        ("NASA", UPPER),
        ("1843", DIGIT),
        ("McDonald", MIXED),
        ("iPod", MIXED),
        ("6PR", MIXED),
        (".", OTHER),
        ("日", OTHER),
    ],
)
def test_the_shape_of_a_word(word, shape):
    assert set(pieces(f"a {word} b").shapes[1:-1].tolist()) == {shape}


def test_shapes_tell_of_the_neighbours_in_the_window_and_no_others():
    """Every piece of a word tells the same; [CLS], [SEP] and padding tell nothing."""
    found = pieces("He NASA Parisian 7 Paris")
    for start, stop in ((2, 9), (6, 9), (2, 10)):
        window, width = TaggerTokens(*(column[start:stop] for column in found)), stop - start
        own, first = np.full((2, 12), OTHER, np.uint8), np.zeros((2, 12), bool)
        own[:, 1 : width + 1], first[:, 1 : width + 1] = window.shapes, window.first
        codes = with_neighbours(own, first, np.array([width + 2, width + 2], np.int32))
        assert (codes[0] == codes[1]).all() and not codes[:, [0, *range(width + 1, 12)]].any()
        told = [(codes[0, 1 : width + 1] // SHAPES**place % SHAPES).tolist() for place in range(3)]
        units = [OTHER, *[int(shape) for shape in window.shapes[window.first]], OTHER]
        number = np.cumsum(window.first).tolist()
        assert told == [[units[one + step] for one in number] for step in (0, -1, 1)]
    assert told[1] == [OTHER] * 4 + [UPPER] * 2 + [TITLE, DIGIT]


@given(st.lists(st.text() | st.sampled_from(["Paris", "", "NASA 7", " a"]), max_size=5))
@settings(deadline=None)
def test_a_text_has_the_same_pieces_in_any_company(texts):
    for text, together in zip(texts, CUTTER(texts), strict=True):
        for one, other in zip(pieces(text), together, strict=True):
            np.testing.assert_array_equal(one, other)


def test_no_text_has_no_pieces_and_no_windows():
    assert all(len(column) == 0 for column in pieces("  "))
    assert windows("  ", pieces("  "), [], 10) == []


WORDS = st.lists(st.sampled_from(["Parisian", "x", "don't", "A.B.", "rock-roll", "1843"]), min_size=1, max_size=8)


@settings(deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=6), st.integers(4, 30))
def test_windows_hold_everything_once_and_whole_sentences_where_they_fit(sentences, room):
    texts = [" ".join(words) for words in sentences]
    starts = np.cumsum([0] + [len(text) + 1 for text in texts])[:-1].tolist()
    ranges = [(start, start + len(text)) for start, text in zip(starts, texts, strict=True)]
    found = pieces(" ".join(texts))
    cut = windows(" ".join(texts), found, ranges, room)
    assert [piece for start, stop in cut for piece in range(start, stop)] == list(range(len(found.ids)))
    assert all(stop - start <= room for start, stop in cut)
    sizes = [len(pieces(text).ids) for text in texts]
    if max(sizes) <= room:
        assert {start for start, _ in cut} <= set(np.cumsum([0, *sizes]).tolist())


def test_labels_of_first_pieces():
    text = "Parisian NASA in 1843 rock"
    wanted = [Entity(0, 13, "PER"), Entity(17, 21, "DATE"), Entity(22, 26, "LOC")]
    found = pieces(text)
    #       paris ##ian   n  ##a ##s ##a  i  ##n   1 ##8 ##4 ##3  r  ##o ##c ##k
    assert labels(found, wanted, KINDS).tolist() == [
        3, IGNORED, 4, *[IGNORED] * 3, 0, IGNORED, 0, *[IGNORED] * 3, 1, *[IGNORED] * 3,
    ]  # fmt: skip


def test_the_score_of_a_span_is_its_least_probability():
    found = pieces("NASA Parisian rock x")
    tags, sure = np.full(len(found.ids), 99), np.full(len(found.ids), 0.01)
    first = np.flatnonzero(found.first)
    tags[first], sure[first] = [3, 4, 1, 0], [0.9, 0.75, 0.5, 0.25]
    assert spans(found, tags, sure, KINDS) == [Span(0, 13, "PER", 0.75), Span(14, 18, "LOC", 0.5)]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.sampled_from(["K0", "K69"])), max_size=5))
def test_labels_and_spans_are_each_others_inverse(parts):
    """Names of whole words, beside each other and apart, up to the end of the text; there may be many kinds."""
    kinds = [f"K{number}" for number in range(70)]
    words = "Parisian x 1843 McDonald rock NASA a b".split() * 4
    starts = np.cumsum([0] + [len(word) + 1 for word in words]).tolist()
    wanted, place = [], 0
    for gap, size, kind in parts:
        wanted.append(Entity(starts[place + gap], starts[place + gap + size] - 1, kind))
        place += gap + size
    found = pieces(" ".join(words[:place]))
    tags = labels(found, wanted, kinds)
    again = spans(found, np.maximum(tags, 0), np.ones(len(tags)), kinds)
    assert again == [Span(*entity, 1.0) for entity in wanted]
