"""Retrieval metrics: hit matrices, recall, and break-down by group."""

import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from realm_jax.eval.retrieval_metrics import (
    answer_hits,
    documents_of,
    gold_hits,
    hit_at_k,
    mean_by_group,
    rank_measures,
)


class Shelf:
    """A passage store of three documents in four rows; it counts how often a text is read."""

    passages = [
        ("moon", "Moon", "The Moon orbits the Earth."),
        ("paris", "Paris", "Paris lies on the Seine."),
        ("paris", "Paris", "The Eiffel Tower stands there since 1889."),
        ("tea", "Tea", "Tea is a drink from leaves."),
    ]

    def __init__(self) -> None:
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.passages)

    def document_id(self, row: int) -> str:
        return self.passages[row][0]

    def title(self, row: int) -> str:
        return self.passages[row][1]

    def text(self, row: int) -> str:
        self.reads[row] += 1
        return self.passages[row][2]


def test_every_row_of_the_gold_document_is_a_hit():
    hits = gold_hits(Shelf(), [[0, 2, 1], [3, -1, 0], [0, 1, 2]], [{"paris"}, {"moon"}, {}])
    assert hits.tolist() == [[False, True, True], [False, False, True], [False, False, False]]


def test_strings_and_patterns_in_one_set_of_questions():
    hits = answer_hits(Shelf(), [[2], [2], [0]], [["18\\d+"], ["18\\d+"], ["the moon"]], [True, False, False])
    assert hits.tolist() == [[True], [False], [True]]


def test_an_answer_counts_in_the_text_and_not_in_the_title():
    hits = answer_hits(Shelf(), [[1, 2], [3, 1]], [["Eiffel tower"], ["Paris"]])
    assert hits.tolist() == [[False, True], [False, True]]
    assert not answer_hits(Shelf(), [[2]], [["Paris"]]).any()


def test_answers_may_be_patterns():
    assert answer_hits(Shelf(), [[2, 0, -1]], [["18[89]\\d"]], is_regex=True).tolist() == [[True, False, False]]


def test_a_passage_is_read_once_however_often_it_is_retrieved():
    shelf = Shelf()
    answer_hits(shelf, np.zeros((50, 3), int), [["moon"]] * 50)
    assert shelf.reads == {0: 1}


def test_recall_counts_questions_and_not_hits():
    hits = np.array([[True, True, True], [False, False, True], [False, False, False], [False, True, False]])
    deeper = np.concatenate([hits, np.zeros((4, 1), bool), hits[::-1, :1]], axis=1)
    found = {k: within.tolist() for k, within in hit_at_k(deeper).items()}
    assert found == {1: [True, False, False, False], 5: [True, True, False, True]}


def test_of_recall_deeper_than_the_candidates_nothing_is_said():
    assert {*hit_at_k(np.zeros((2, 4), bool))} == {1} and not hit_at_k(np.zeros((2, 0), bool))


@given(arrays.arrays(bool, st.tuples(st.integers(1, 6), st.integers(1, 21))))
def test_recall_never_falls_with_k(hits: np.ndarray):
    recalls = [within.mean() for within in hit_at_k(hits).values()]
    assert recalls == sorted(recalls)


def ranked(*found: str, depth: int = 10) -> list[str]:
    return [*found, *(f"other {rank}" for rank in range(depth - len(found)))]


def test_reciprocal_rank_and_ndcg_by_hand():
    """Gains are the grades, discounts log2(rank + 1), as in Järvelin and Kekäläinen 2002 and in trec_eval."""
    found = rank_measures(
        [ranked("x", "b", "c", "a"), ranked("a"), ranked(), ranked(*"xxxxxyyyyb", depth=20), ["b"]],
        [{"a": 3, "b": 1}, {"a": 1}, {"a": 1}, {"b": 2}, {"b": 1, "absent": 2}],
    )
    assert found["mrr@10"] == pytest.approx([1 / 2, 1, 0, 1 / 3, 1])
    first = (1 / np.log2(3) + 3 / np.log2(5)) / (3 + 1 / np.log2(3))
    last = 1 / (2 + 1 / np.log2(3))
    assert found["ndcg@10"] == pytest.approx([first, 1, 0, 1 / np.log2(4), last])


def test_equal_names_and_places_decide_nothing():
    """A document's rank is that of its first passage, and what is no candidate has none."""
    documents = documents_of(Shelf(), np.array([[2, -1, 1, 0, *[-1] * 6]]))
    assert documents[0][:4] == ["paris", "", "paris", "moon"]
    assert rank_measures(documents, [{"moon": 1}])["mrr@10"].tolist() == [1 / 2]


def test_of_ranks_deeper_than_the_candidates_nothing_is_said(monkeypatch):
    assert rank_measures([ranked("a", depth=9)], [{"a": 1}]) == {} == rank_measures([], [])
    monkeypatch.setitem(sys.modules, "ir_measures", None)
    assert rank_measures([ranked("a")], [{"a": 1}]) == {}


@given(st.permutations(range(12)), st.dictionaries(st.integers(0, 15), st.integers(1, 4), min_size=1))
def test_a_better_order_never_has_a_smaller_ndcg(order, gold):
    grades = {str(name): grade for name, grade in gold.items()}
    names = [str(name) for name in order]
    best = sorted(names, key=lambda name: -grades.get(name, 0))
    found = rank_measures([names, best], [grades, grades])
    assert all(0 <= values[0] <= values[1] + 1e-9 <= 1 + 2e-9 for values in found.values())


def test_groups_come_in_their_own_order_under_their_names_as_text():
    shares = mean_by_group([True, False, True, True, False], [10, 2, 2, 0, 10])
    assert list(shares.items()) == [("0", 1.0), ("2", 0.5), ("10", 0.5)]
    shares = mean_by_group([True, False, True, False, True], ["two", 10, ["a"], 2.5, "two"])
    assert list(shares.items()) == [("2.5", 0.0), ("10", 0.0), ("['a']", 1.0), ("two", 1.0)]


def test_the_answer_test_agrees_with_the_reference_verdicts(shared_lines):
    vectors, shelf = shared_lines("gold/dpr_has_answer_vectors.jsonl.gz"), Shelf()
    wanted = {vector["passage_id"] for vector in vectors}
    assert {vector["has_answer"] for vector in vectors} == {True, False}
    passages = [passage for passage in shared_lines("wiki_qa/passages.jsonl.gz") if passage["id"] in wanted]
    shelf.passages = [(passage["id"], passage["title"], passage["text"]) for passage in passages]
    row_of = {passage["id"]: row for row, passage in enumerate(passages)}
    hits = answer_hits(shelf, [[row_of[v["passage_id"]]] for v in vectors], [v["answers"] for v in vectors])
    assert hits[:, 0].tolist() == [vector["has_answer"] for vector in vectors]
