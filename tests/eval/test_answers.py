"""Answer comparison: what counts as the same answer, and what counts as a passage that contains it."""

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data import patterns
from realm_jax.eval.answer_matching import (
    contains_pattern,
    contains_words,
    exact_match,
    find_answer,
    full_match,
    normalize,
    squad_match,
    token_f1,
    words,
)

MOON = "In 1969, Apollo-11 landed on the Moon."


def contains_answer(text: str, answers: list[str]) -> bool:
    return contains_words(words(text), [words(answer) for answer in answers])


def pattern_match(prediction: str, answers: list[str]) -> bool:
    return exact_match(prediction, answers, is_regex=True)


COMPOSED, DECOMPOSED = "Beyonc\u00e9", "Beyonce\u0301"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  The  Battle of St.-L\u00f4, a siege ", "battle of stlo\u0302 siege"),
        ("Theatre and Anthem", "theatre and anthem"),
    ],
)
def test_normalize_drops_case_punctuation_articles_and_spaces(text, expected):
    assert normalize(text) == expected


@pytest.mark.parametrize(
    ("compare", "prediction", "answers", "expected"),
    [
        (exact_match, "the Beatles!", ["Rolling Stones", "Beatles"], True),
        (exact_match, "Beatles songs", ["Rolling Stones", "Beatles"], False),
        (exact_match, "Beatles", [], False),
        (exact_match, DECOMPOSED, [COMPOSED], True),
        (exact_match, "Beyonce", [COMPOSED], False),
        (squad_match, DECOMPOSED, [COMPOSED], False),  # SQuAD's scorer tells the two spellings apart
        (squad_match, f"the {COMPOSED}!", [COMPOSED], True),
        (pattern_match, "Sept 11", ["sept(ember)?"], True),  # from the start, not to the end
        (pattern_match, "on Sept 11", ["sept(ember)?"], False),
        (pattern_match, "(", ["("], False),
        (full_match, "September", ["june", "sept(ember)?"], True),
        (full_match, "Sept 11", ["sept(ember)?"], False),
        (full_match, "(", ["("], False),
        (contains_pattern, "(", ["("], False),
        (contains_pattern, MOON, ["18", "19[67]9"], True),
        (contains_answer, MOON, ["apollo - 11"], True),
        (contains_answer, MOON, ["MOON"], True),
        (contains_answer, MOON, ["196"], False),
        (contains_answer, MOON, ["Apollo landed"], False),
        (contains_answer, MOON, [""], False),
    ],
)
def test_a_prediction_or_passage_is_compared_with_answers(compare, prediction, answers, expected):
    assert compare(prediction, answers) == expected


def test_f1_counts_words_as_often_as_they_occur_and_takes_the_best_answer():
    assert token_f1("the new New York", ["York"]) == pytest.approx(2 * (1 / 3) * 1 / (1 / 3 + 1))
    assert token_f1("New York, New York", ["new york", "new york new york"]) == 1
    assert token_f1("Paris", ["Rome"]) == token_f1("the", ["a"]) == token_f1("Paris", []) == 0


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?V1)[[a]--[b]", "incompatible"),
        ("(?a)(?u)", "incompatible"),
        ("i{9999999}a", "its repeat counts are above 1,000"),
        ("i{0,9999999}a", "its repeat counts are above 1,000"),
        ("(?x)i{99 99 999}a", "its repeat counts are above 1,000"),
        ("i{" + "9" * 5000 + "}", "Exceeds the limit"),
        ("(?:(?:a{1000}){1000}){1000}", "multiply to too much"),
        ("a(?R)?b", r"\(\?R…\) calls a group again"),
        ("(?0)", r"\(\?0…\) calls a group again"),
        ("(a(?1))", r"\(\?1…\) calls a group again"),
        ("(a(?-1))", r"\(\?-1…\) calls a group again"),
        ("(?<n>a(?&n))", r"\(\?&…\) calls a group again"),
        ("(?P<n>a(?P>n))", r"\(\?P>…\) calls a group again"),
    ],
)
def test_a_pattern_that_could_fill_the_memory_is_refused_with_a_reason(pattern, reason):
    assert re.search(reason, patterns.pattern_error(pattern))
    assert patterns.search(pattern, "iab") is None


def test_a_usual_pattern_that_looks_like_those_is_none_of_them():
    for usual in (
        r"\(?Rome\)?",
        r"[(?1]",
        r"\{9999\}",
        r"[{9999}]",
        r"(?:\d{4}-){7}\d{4}",
        r".{0,900}.{0,900}",
        "(?>a)(?i)",
    ):
        assert patterns.pattern_error(usual) is None, usual


def test_a_pattern_that_takes_all_memory_counts_as_not_found(monkeypatch, caplog):
    class Greedy:
        def search(self, text, timeout):
            raise MemoryError

    monkeypatch.setattr(patterns, "_compiled", lambda pattern: Greedy())
    assert patterns.search("greedy", "text") is None and "'greedy' takes" in caplog.text

    def greedy(pattern):
        raise MemoryError

    monkeypatch.setattr(patterns, "_compiled", greedy)
    assert patterns.pattern_error("greedy") == "it takes too much memory"


def test_a_pattern_that_never_ends_counts_as_not_found_and_is_named_once(caplog, monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 0.05)
    endless = "(a|aa)+[^a]"
    for _ in range(2):
        assert not contains_pattern("a" * 100, [endless])
    assert contains_pattern("a" * 100, [endless, "a{100}"])
    assert [record.getMessage()[:29] for record in caplog.records] == [f"the pattern '{endless}' takes"[:29]]


def test_the_place_of_an_answer_is_given_in_characters_of_the_text():
    text = "Caf\u00e9 de Flore, Paris"
    start, end = find_answer(text, ["nowhere", "Cafe\u0301 de"])
    assert text[start:end] == "Caf\u00e9 de"
    assert find_answer(text, ["nowhere"]) is None


@given(st.text(alphabet="abé Î.,-", max_size=30), st.text(alphabet="abé Î.,-", min_size=1, max_size=6))
def test_what_is_found_is_contained_and_the_other_way_round(text: str, answer: str):
    place = find_answer(text, [answer])
    assert (place is not None) == contains_answer(text, [answer])
    if place is not None:
        assert contains_answer(text[place[0] : place[1]], [answer])


@given(st.text(alphabet="aAtThHeE é,.-"))
def test_a_normalized_answer_has_single_spaces_and_still_matches(text: str):
    normalized = normalize(text)
    assert normalized == " ".join(normalized.split())
    assert exact_match(text.upper(), [text])


def test_normalize_agrees_with_the_reference_scorers(shared_lines):
    """ORQA's, SQuAD's, that of DPR's reader, and what DPR's retriever does to a text before it takes words."""
    vectors = shared_lines("gold/normalise_vectors.jsonl.gz")
    assert len(vectors) > 500
    for vector in vectors:
        text = vector["in"]
        assert normalize(text) == vector["orqa"]
        assert normalize(text, decomposed=False) == vector["squad"] == vector["dpr"]
        assert unicodedata.normalize("NFD", text) == vector["dpr_nfd"] and words(text) == words(vector["dpr_nfd"])


@pytest.mark.parametrize("is_regex", [False, True])
def test_exact_match_agrees_with_the_reference_scorer(shared_lines, is_regex: bool):
    vectors = [v for v in shared_lines("gold/orqa_is_correct_vectors.jsonl.gz") if v["is_regex"] == is_regex]
    assert len(vectors) > 500
    wrong = [v for v in vectors if exact_match(v["prediction"], v["answers"], is_regex) != v["correct"]]
    assert wrong == []
