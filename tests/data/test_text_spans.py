"""Salient spans: which dates and names the rules find, and what they leave alone."""

import sys
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data.spans import Span, find_by_rules, finder
from realm_jax.errors import UserError


def found(text: str, kind: str) -> list[str]:
    return [text[span.start : span.end] for span in find_by_rules(text) if span.kind == kind]


DATES = """
    12 May 1843 | 12th of May 1843 | May 12, 1843 | May 12 , 1843 | May 1843 | May , 1843 | 12 May | May 12 | 1843
    | 1840s | 1840's | 5th century | 5th century BC | nineteenth century | 5th - century | 1843–45 | 1843–1845
    | 1843 -- 1845 | 1914-18 | 12/05/1843 | 1843-05-12 | 44 BC | AD 79 | Jan. 3, 1910 | 4–6 June 1944
"""


@pytest.mark.parametrize("date", [date.strip() for date in DATES.split("|")])
def test_usual_forms_of_dates(date: str) -> None:
    assert found(f"the river rose around {date} and the mill was lost", "date") == [date]


def test_a_date_at_the_end_of_a_sentence_leaves_the_full_stop() -> None:
    assert found("It was built in 1843. It fell in the mid-1990s.", "date") == ["1843", "1990s"]


NUMBERS = """
    a flat of 1200 square feet | it weighs 1500 kg | it costs $1999 today | some 1,500 of them | a ratio of 1.1843
    | room 18435 | 1843 people came | they may go | about 1200 % more
"""


@pytest.mark.parametrize("text", [text.strip() for text in NUMBERS.split("|")])
def test_other_numbers_are_no_dates(text: str) -> None:
    assert found(text, "date") == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("they met Ludwig van Beethoven in Vienna", ["Ludwig van Beethoven", "Vienna"]),
        ("he read J. R. R. Tolkien and J.K. Rowling aloud", ["J. R. R. Tolkien", "J.K. Rowling"]),
        ("the Battle of the Bulge was won", ["Battle of the Bulge"]),
        ("he left the U.S. Navy after that", ["U.S. Navy"]),
        ("the port of St. Louis is old", ["St. Louis"]),
        ("he fed Jeanne O'Brien's cat", ["Jeanne O'Brien"]),
        ("Alaska 's coast is long. He saw Alaska", ["Alaska", "Alaska"]),
        ("the Proto - Canaanite script", ["Proto - Canaanite"]),
        ("the singer Björk met Đorđe Šagić", ["Björk", "Đorđe Šagić"]),
        ("he read The Hobbit twice", ["The Hobbit"]),
    ],
)
def test_runs_of_capitalised_words_are_names(text: str, names: list[str]) -> None:
    assert found(text, "name") == names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("The river is long.", []),
        ("The Beatles were four.", ["Beatles"]),
        ("In Paris he slept.", ["Paris"]),
        ("Most of Europe agreed.", ["Europe"]),
        ("Scientists think so. He knows that I do.", []),
        ("He came. Napoleon left. Then Napoleon slept.", ["Napoleon", "Napoleon"]),
        ("NASA did it.", ["NASA"]),
        ('He said "Stop it" and left.', []),
        ("he likes vitamin C. It helps. And The end.", []),
        ("A NOTE ON THE USE OF THIS BOOK", []),
    ],
)
def test_a_capital_that_the_sentence_asks_for_makes_no_name(text: str, names: list[str]) -> None:
    assert found(text, "name") == names


def test_a_date_wins_over_the_name_around_it() -> None:
    text = "a law of May 1843 Parliament made; in September John Smith left"
    assert found(text, "date") == ["May 1843"]
    assert found(text, "name") == ["Parliament", "September John Smith"]
    assert found("it closed in September", "date") == ["September"]


TOKENS = "The May 12 1843 , . - – of Paris J. 's in \" I".split()


@given(st.lists(st.sampled_from([*TOKENS, "\n\n", "5th century"]), max_size=25).map(" ".join) | st.text())
def test_spans_are_in_order_apart_and_trimmed(text: str) -> None:
    last = 0
    for span in find_by_rules(text):
        assert last <= span.start < span.end <= len(text)
        assert text[span.start : span.end] == text[span.start : span.end].strip()
        assert span.kind in ("date", "name") and 0 <= span.score <= 1
        last = span.end


@pytest.mark.parametrize("unit", ["A ", "A. ", "A-", "Paris of the ", "1", "1843 ", "1843-", "May 1", '"A'])
def test_no_text_takes_quadratic_time(unit: str) -> None:
    began = time.perf_counter()
    find_by_rules(unit * 20_000)
    assert time.perf_counter() - began < 5


def whole_text(text: str) -> list[Span]:
    return [Span(0, len(text), "all", 0.5)]


def test_a_finder_of_ones_own_is_plugged_in_by_name() -> None:
    assert finder("rules")("in 1843") == [Span(3, 7, "date", 1.0)]
    assert finder(f"{__name__}:whole_text")("abc") == [Span(0, 3, "all", 0.5)]


def faulty(found: object) -> Callable[[str], list[Span]]:
    def find(text: str) -> list[Span]:
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[return-value]

    return find


@pytest.mark.parametrize(
    "found, says",
    [
        (RuntimeError("no\nmemory"), "fails: RuntimeError: no memory"),
        ([Span(0, 2, "X", 1.0), Span(1, 3, "X", 1.0)], "gives 1 to 3, where 2 of 8 characters are passed"),
        ([Span(4, 6, "X", 1.0), Span(0, 2, "X", 1.0)], "gives 0 to 2, where 6 of 8"),
        ([Span(2, 2, "X", 1.0)], "gives 2 to 2, .*spans must be in order, apart, not empty and inside the text"),
        ([Span(-5, 2, "X", 1.0)], "gives -5 to 2"),
        ([Span(0, 9, "X", 1.0)], "gives 0 to 9, where 0 of 8"),
        ([Span(0, 2, None, 1.0)], "gives Span.*, which is no Span"),  # type: ignore[arg-type]
        ([(0, 2, "X", 1.0)], "gives .0, 2, 'X', 1.0., which is no Span"),
        (None, "fails: TypeError"),
    ],
)
def test_what_a_finder_of_ones_own_does_wrong_is_one_line_that_names_it(monkeypatch, found, says) -> None:
    monkeypatch.setattr(sys.modules[__name__], "broken", faulty(found), raising=False)
    with pytest.raises(UserError, match=f"^span finder '{__name__}:broken' {says}") as raised:
        finder(f"{__name__}:broken")("in Paris")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("code, says", [("x = (", "SyntaxError"), ("raise RuntimeError('here')", "RuntimeError: here")])
def test_a_module_that_cannot_be_imported_is_one_line(monkeypatch, tmp_path, code, says) -> None:
    (tmp_path / "broken_finder.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=f"span finder 'broken_finder:find': {says}.*; choose rules"):
        finder("broken_finder:find")


@pytest.mark.parametrize("name", ["ruels", "nowhere.at_all:tag", "realm_jax.data.spans:absent", "json:__name__", ""])
def test_an_unknown_finder_is_an_error_that_lists_the_choices(name: str) -> None:
    with pytest.raises(UserError, match=f"span finder '{name}'.*choose rules, hf:NAME"):
        finder(name)
