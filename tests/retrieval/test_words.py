"""Search by words: stems and stop words of the corpus' language, and an index that is kept."""

import logging
import re
import unicodedata

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.errors import UserError
from realm_jax.forward import Index, gather_passages, stored_scores
from realm_jax.models.inputs import PassageBatch, answer_spans, has_answer_span, reader_inputs
from realm_jax.models.losses import NEG_INF
from realm_jax.retrieval import bm25
from realm_jax.retrieval.analyzers import terms
from realm_jax.retrieval.bm25 import (
    ABOUT,
    FOLDER,
    Bm25,
    check_has_terms,
    language_of,
    load_or_build,
    save_index,
    searchable_texts,
)

GERMAN = "Die Brücke wurde im Jahre neunzehnhundert gebaut und überspannt den Fluss mit drei Bögen aus Stein."
ENGLISH = "The bridge was built in the year nineteen hundred and spans the river with three arches of stone."
VIETNAMESE = "Cây cầu được xây vào năm một nghìn chín trăm và bắc qua sông bằng ba nhịp đá."


class Shelf:
    """A passage store of titles and texts."""

    def __init__(self, *passages: tuple[str, str]) -> None:
        self.passages, self.fingerprint = passages, str(hash(passages))

    def __len__(self):
        return len(self.passages)

    def title(self, row):
        return self.passages[row][0]

    def text(self, row):
        return self.passages[row][1]


SHELF = Shelf(
    ("Moon", "The Moon orbits the Earth."),
    ("Paris", "Paris is the capital of France."),
    ("Paris", "The Eiffel tower stands there."),
    ("Tea", "Tea is a drink made of leaves."),
)


def kept_files(workdir):
    return sorted(path.name for path in (workdir / FOLDER).iterdir())


@pytest.mark.parametrize(
    "texts, language, questions, rows",
    [
        # titles and texts, whatever the case
        (searchable_texts(SHELF), "none", ["what orbits EARTH", "a drink of leaves", "paris tower"], [[0], [3], [2]]),
        # no candidate without a common word
        (["alpha beta", "gamma"], "none", ["omega", "", "gamma"], [[-1, -1], [-1, -1], [1, -1]]),
        (["🙂", "🙃🙃", ""], "none", ["smile", "🙂"], [[-1, -1], [-1, -1]]),
        # rare words count for more
        (["the cat and the dog", "the zebra", "the dog", "the bird", "the fish"], "none", ["the zebra"], [[1]]),
        # words of one stem, in a language that has stems
        (["The tallest towers of Paris", "A leaf of tea"], "en", ["Which tower is tall in Paris?", "tea leaves"],
         [[0], [1]]),
        (["towers", "leaf"], "none", ["tower"], [[-1]]),
        # a Turkish capital with a dot is an i
        (["Köprü İstanbul", "stanbul i"], "none", ["istanbul", "İSTANBUL"], [[0, -1], [0, -1]]),
        (["Köprü İstanbul", "stanbul i"], "tr", ["istanbul", "İSTANBUL"], [[0, -1], [0, -1]]),
        # vowel signs belong to their word
        (["किताब मेज पर है", "कलम"], "none", ["किताब", "क", "त"], [[0, -1], [-1, -1], [-1, -1]]),
        # of equal texts the lower row comes first
        (["tea"] * 9 + ["tea tea"], "none", ["tea"], [[9, *range(9)]]),
    ],
)  # fmt: skip
def test_bm25_finds(texts, language, questions, rows):
    assert Bm25(texts, language).search(questions, len(rows[0])).tolist() == rows


def test_no_question_has_no_rows():
    assert Bm25(["alpha", "gamma"]).search([], 5).shape == (0, 2)


def test_a_letter_with_a_mark_is_one_letter_in_either_form():
    composed, in_parts = (unicodedata.normalize(form, "Zoë sang") for form in ("NFC", "NFD"))
    for text in (composed, in_parts):
        index = Bm25([text, "Zoe spoke"])
        assert index.search([composed, in_parts, "ZOE"], 1).tolist() == [[0], [0], [1]]


@given(st.text(st.characters(codec="ascii")))
def test_plain_english_has_the_words_that_python_finds(text):
    assert terms(text, "none") == re.findall(r"\b\w+\b", text.lower())


def test_ties_at_the_cut_go_to_the_lower_row_whatever_is_asked_for():
    index = Bm25(["green tea"] * 200 + ["green green tea"])
    best = index.scored(["green"], 201)
    for k in (1, 2, 5, 100):
        rows, scores = index.scored(["green"], k)
        assert rows[0].tolist() == [200, *range(k - 1)] and scores[0].tolist() == best[1][0, :k].tolist()


def test_rows_without_a_common_word_are_no_rows():
    rows, scores = Bm25(["alpha beta", "gamma", "alpha"]).scored(["alpha", "omega"], 3)
    assert rows.tolist() == [[2, 0, -1], [-1, -1, -1]]
    assert (scores[0, :2] > 0).all() and scores[0, 2] == 0 and not scores[1].any()


def test_no_row_is_an_empty_passage_without_a_score():
    ids = jnp.arange(30).reshape(3, 10)
    index = Index(jnp.eye(3), PassageBatch(ids, jnp.full(3, 9), jnp.full(3, 2)))
    rows = jnp.array([[1, -1]])
    assert stored_scores(jnp.ones((1, 3)), index, rows).tolist() == [[1.0, NEG_INF]]
    documents = gather_passages(index, rows)
    answers = ids[:, None, 4:5], jnp.ones((3, 1), jnp.int32)  # a piece of each body
    held = has_answer_span(PassageBatch(*(part.repeat(3, 0) for part in documents)), *answers, 4)
    assert held.tolist() == [[False, False], [True, False], [False, False]]
    joint = reader_inputs(jnp.array([[50, 51, 52]]), jnp.array([3]), documents)
    allowed, _ = answer_spans(joint, answers[0][:1], answers[1][:1], 4)
    assert allowed.any(axis=(2, 3)).tolist() == [[True, False]]


def test_a_question_of_stop_words_finds_nothing():
    index = Bm25(["the of and", "tea"], "en")
    assert not index.has_terms("is it of the") and index.has_terms("the tea")
    assert index.search(["is it of the", "the tea"], 2).tolist() == [[-1, -1], [1, -1]]


def test_the_language_is_that_of_most_passages(caplog):
    assert language_of(Shelf(("", GERMAN), ("", GERMAN), ("", ENGLISH))) == "de"
    assert language_of(Shelf(("", ENGLISH))) == "en"
    with caplog.at_level(logging.INFO):
        assert language_of(Shelf(("", VIETNAMESE))) == "none"
    assert "'vi', for which BM25 has no stems" in caplog.text


def test_a_kept_index_is_the_same_and_is_not_made_again(tmp_path, monkeypatch):
    made = load_or_build(SHELF, "en", tmp_path)
    save_index(SHELF, "en", tmp_path)
    load_or_build.cache_clear()
    monkeypatch.setattr(Bm25, "__init__", None)  # nothing is indexed
    loaded = load_or_build(SHELF, "en", tmp_path)
    questions = ["what orbits the earth?", "towers", "of the", "omega"]
    for ours, theirs in zip(loaded.scored(questions, 3), made.scored(questions, 3), strict=True):
        assert ours.tolist() == theirs.tolist()


def test_another_corpus_takes_the_place_of_the_kept_one(tmp_path):
    save_index(SHELF, "en", tmp_path)
    first = kept_files(tmp_path)
    save_index(SHELF, "en", tmp_path)
    assert kept_files(tmp_path) == first
    save_index(Shelf(("", ENGLISH)), "en", tmp_path)
    assert kept_files(tmp_path) != first and len(kept_files(tmp_path)) == 1


@pytest.fixture
def kept(tmp_path):
    """The folder of an index that is kept, as a new process finds it."""
    save_index(SHELF, "en", tmp_path)
    load_or_build.cache_clear()
    (place,) = (tmp_path / FOLDER).iterdir()
    return place


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def tear(path):
    path.write_bytes(b"torn")


@pytest.mark.parametrize(
    "name, damage",
    [
        ("data.csc.index.npy", flip_a_bit), ("indices.csc.index.npy", flip_a_bit), ("vocab.index.json", flip_a_bit),
        ("indices.csc.index.npy", tear),
    ],
)  # fmt: skip
def test_a_damaged_index_is_made_anew_in_memory_and_where_a_run_keeps_it(tmp_path, kept, caplog, name, damage):
    damage(kept / name)
    assert load_or_build(SHELF, "en", tmp_path).search(["towers", "tea"], 1).tolist() == [[2], [3]]
    assert f"{kept} is damaged" in caplog.text
    save_index(SHELF, "en", tmp_path)
    assert Bm25.load(kept).search(["towers"], 1).tolist() == [[2]]
    before = (kept / ABOUT).stat().st_mtime_ns
    save_index(SHELF, "en", tmp_path)
    assert (kept / ABOUT).stat().st_mtime_ns == before, "what is whole is left as it is"


def test_a_record_of_an_index_with_another_number_is_not_believed(tmp_path, kept, caplog):
    (kept / ABOUT).write_text((kept / ABOUT).read_text().replace('"size": 4', '"size": 5'))
    assert len(load_or_build(SHELF, "en", tmp_path).search(["towers"], 9)[0]) == 4
    assert "WORDS.json: its checksum is different" in caplog.text


def test_of_a_large_index_a_question_compares_sizes_and_the_trainer_everything(tmp_path, kept, caplog, monkeypatch):
    monkeypatch.setattr(bm25, "MAX_CHECKED_BYTES", 0)
    flip_a_bit(kept / "data.csc.index.npy")
    load_or_build(SHELF, "en", tmp_path)
    assert "is damaged" not in caplog.text
    save_index(SHELF, "en", tmp_path)
    assert "is damaged" in caplog.text
    assert Bm25.load(kept).search(["towers"], 1).tolist() == [[2]]


def test_what_else_lies_where_the_index_is_kept_goes(tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "notes.txt").write_text("a file")
    save_index(SHELF, "en", tmp_path)
    (only,) = kept_files(tmp_path)
    assert (tmp_path / FOLDER / only / ABOUT).is_file()


def test_a_corpus_of_stop_words_cannot_be_searched_by_words(tmp_path):
    words = load_or_build(Shelf(("", "of the"), ("", "and")), "en", tmp_path)
    with pytest.raises(UserError, match="no word that is no stop word|has a word"):
        check_has_terms(words, "--search=hybrid")
    save_index(Shelf(("", "of the"), ("", "and")), "en", tmp_path)
    load_or_build.cache_clear()
    assert load_or_build(Shelf(("", "of the"), ("", "and")), "en", tmp_path).is_empty
