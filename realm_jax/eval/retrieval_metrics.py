"""Measure retrieval: recall, reciprocal rank and nDCG of the candidates of questions.

The rows may come from any search (`retrieval/exact.py`, `retrieval/bm25.py`). `answer_matching.py` decides if a passage
contains an answer.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from realm_jax.data.store import PassageStore
from realm_jax.eval.answer_matching import contains_pattern, contains_words, words

DEPTHS = (1, 5, 20, 100)  # values of k for recall@k, up to the number of retrieved passages
RANKED = 10  # documents that count for reciprocal rank (MS MARCO) and nDCG (BEIR)
RANKINGS = {"RR": f"mrr@{RANKED}", "nDCG": f"ndcg@{RANKED}"}  # names in ir_measures → our names
_MEASURE = re.compile(rf"(answer_)?recall@\d+|{'|'.join(RANKINGS.values())}")


def is_retrieval_measure(name: str) -> bool:
    """Return True for the name of a retrieval metric over all questions."""
    return _MEASURE.fullmatch(name) is not None


def hit_at_k(hits: NDArray[np.bool_]) -> dict[int, NDArray[np.bool_]]:
    """Return k → True for each question with a hit among its first k candidates, bool [questions].

    The result lacks values of k above the depth, because recall@20 of ten candidates would look worse than it is.

    Args:
        hits: True for candidates that are right, the best candidate first, bool [questions, depth].
    """
    return {k: np.any(hits[:, :k], axis=1) for k in DEPTHS if k <= hits.shape[1]}


def mean_by_group(values: ArrayLike, groups: Sequence[Any]) -> dict[str, float]:
    """Return group name → mean value, in `group_order`, for example by the number of replaced words of a question.

    Args:
        values: bool [questions], from `hit_at_k`.
        groups: groups of each question.
    """
    values, names = np.asarray(values, bool), np.array([*map(str, groups)])
    return {name: float(values[names == name].mean()) for name in sorted({*names.tolist()}, key=group_order)}


def group_order(name: str) -> tuple[float, str]:
    """Return the sort key of a group name: numbers by value, other names after them."""
    try:
        return float(name), name
    except ValueError:
        return math.inf, name


def gold_hits(store: PassageStore, rows: ArrayLike, golds: Sequence[Collection[str]]) -> NDArray[np.bool_]:
    """Mark the candidates that belong to a gold document of their question.

    All rows of a gold document are gold, because they share its id.

    Args:
        store: the passages.
        rows: rows of the candidates, int [questions, depth]; below 0 for no candidate.
        golds: ids of the gold documents of each question.

    Returns:
        bool [questions, depth].
    """
    rows = np.asarray(rows, np.int64)
    documents = zip(documents_of(store, rows), golds, strict=True)
    hits = [[name in gold for name in candidates] for candidates, gold in documents]
    return np.array(hits, bool).reshape(rows.shape)


def documents_of(store: PassageStore, rows: NDArray[np.int64]) -> list[list[str]]:
    """Return the document id of each candidate, "" for no candidate.

    Args:
        store: the passages.
        rows: see `gold_hits`.
    """
    names = {row: store.document_id(row) for row in _distinct(rows)}
    return [[names.get(row, "") for row in candidates] for candidates in rows.tolist()]


def rank_measures(
    documents: Sequence[Sequence[str]], golds: Sequence[Mapping[str, int]]
) -> dict[str, NDArray[np.float64]]:
    """Return reciprocal rank of the first gold document, and nDCG, at 10: {"mrr@10", "ndcg@10": float64 [questions]}.

    Args:
        documents: ids of each question's candidates, the best first, "" for none; a repeated document counts once, at
            its first rank.
        golds: id → grade, for each question.

    Returns:
        Empty if no question has 10 candidates, or if ir-measures is not installed.
    """
    if max(map(len, documents), default=0) < RANKED:
        return {}
    try:
        import ir_measures  # here, because most commands do not measure
    except ImportError:
        return {}
    # trec_eval sorts by scores, and equal ones by name.
    run = {
        str(number): {name: -float(rank) for rank, name in enumerate(dict.fromkeys(filter(None, ranked)))}
        for number, ranked in enumerate(documents)
    }
    judged = {str(number): dict(gold) for number, gold in enumerate(golds)}
    measures = {name: np.zeros(len(golds)) for name in RANKINGS.values()}
    for score in ir_measures.iter_calc([ir_measures.RR @ RANKED, ir_measures.nDCG @ RANKED], judged, run):
        measures[RANKINGS[str(score.measure.NAME)]][int(score.query_id)] = score.value
    return measures


def answer_hits(
    store: PassageStore, rows: ArrayLike, answers: Sequence[Sequence[str]], is_regex: Sequence[bool] | bool = False
) -> NDArray[np.bool_]:
    """Mark the candidates that contain an answer of their question in the text. The title does not count.

    Args:
        store: the passages.
        rows: see `gold_hits`.
        answers: answers of each question.
        is_regex: True if answers are regular expressions, for each question or for all.

    Returns:
        bool [questions, depth].
    """
    rows = np.asarray(rows, np.int64)
    texts = {row: store.text(row) for row in _distinct(rows)}
    words_of = cache(lambda row: words(texts[row]))
    hits = np.zeros(rows.shape, bool)
    for question, regular in enumerate(np.broadcast_to(is_regex, len(answers)).tolist()):
        searched = answers[question] if regular else [words(answer) for answer in answers[question]]
        for rank, row in enumerate(rows[question].tolist()):
            if row >= 0 and regular:
                hits[question, rank] = contains_pattern(texts[row], searched)
            elif row >= 0:
                hits[question, rank] = contains_words(words_of(row), searched)
    return hits


def _distinct(rows: NDArray[np.int64]) -> list[int]:
    return [row for row in np.unique(rows).tolist() if row >= 0]
