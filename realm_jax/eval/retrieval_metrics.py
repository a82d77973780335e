"""Measure retrieval: which questions find their passage among the first k candidates.

Not for retrieving (`retrieval/exact.py` and `retrieval/bm25.py` do); this file takes rows of passages from anywhere
and says how good they are. Read `answer_matching.py` for what it means that a passage contains an answer.
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

DEPTHS = (1, 5, 20, 100)  # at which recall is reported, as far as passages are retrieved
RANKED = 10  # documents that reciprocal rank (MS MARCO) and nDCG (BEIR) look at
RANKINGS = {"RR": f"mrr@{RANKED}", "nDCG": f"ndcg@{RANKED}"}  # what the library calls them, and we
_MEASURE = re.compile(rf"(answer_)?recall@\d+|{'|'.join(RANKINGS.values())}")


def is_retrieval_measure(name: str) -> bool:
    """Whether it is one of retrieval, for all questions."""
    return _MEASURE.fullmatch(name) is not None


def hit_at_k(hits: NDArray[np.bool_]) -> dict[int, NDArray[np.bool_]]:
    """k → for each question, whether one of its first k candidates is a hit, bool [questions], for k of DEPTHS.

    `hits` is bool [questions, depth], best candidate first. Of a k beyond the depth nothing is said: recall@20 of ten
    candidates would look worse than it is.
    """
    return {k: np.any(hits[:, :k], axis=1) for k in DEPTHS if k <= hits.shape[1]}


def mean_by_group(values: ArrayLike, groups: Sequence[Any]) -> dict[str, float]:
    """The share found in each group, for example by the number of replaced words of a question.

    values: bool [questions] (from `hit_at_k`). Groups come back with their names as text, in `group_order`.
    """
    values, names = np.asarray(values, bool), np.array([*map(str, groups)])
    return {name: float(values[names == name].mean()) for name in sorted({*names.tolist()}, key=group_order)}


def group_order(name: str) -> tuple[float, str]:
    """Sort key of group names: numbers by value, other names after them."""
    try:
        return float(name), name
    except ValueError:
        return math.inf, name


def gold_hits(store: PassageStore, rows: ArrayLike, golds: Sequence[Collection[str]]) -> NDArray[np.bool_]:
    """Which candidates are of a document that is right for their question; golds: ids of these, for each question.

    `rows` is int [questions, depth] into the store, below 0 for "no candidate". A document that was cut into several
    rows is gold as a whole, because rows share its id. Returns bool [questions, depth].
    """
    rows = np.asarray(rows, np.int64)
    documents = zip(documents_of(store, rows), golds, strict=True)
    hits = [[one in gold for one in found] for found, gold in documents]
    return np.array(hits, bool).reshape(rows.shape)


def documents_of(store: PassageStore, rows: NDArray[np.int64]) -> list[list[str]]:
    """The id of each candidate's document, "" for no candidate. rows: as in `gold_hits`."""
    names = {row: store.document_id(row) for row in _distinct(rows)}
    return [[names.get(row, "") for row in found] for found in rows.tolist()]


def rank_measures(
    documents: Sequence[Sequence[str]], golds: Sequence[Mapping[str, int]]
) -> dict[str, NDArray[np.float64]]:
    """Reciprocal rank of the first gold document, and nDCG, at 10: {"mrr@10", "ndcg@10": float64 [questions]}.

    documents: those of each question's candidates, best first, "" for none; one that comes again counts once, at its
    first place. golds: grades by id. Empty where no question has 10 candidates, or ir-measures is not installed.
    """
    if max(map(len, documents), default=0) < RANKED:
        return {}
    try:
        import ir_measures  # here, since most commands measure nothing
    except ImportError:
        return {}
    # trec_eval sorts by scores, and equal ones by name.
    run = {
        str(number): {name: -float(rank) for rank, name in enumerate(dict.fromkeys(filter(None, ranked)))}
        for number, ranked in enumerate(documents)
    }
    judged = {str(number): dict(gold) for number, gold in enumerate(golds)}
    measures = {name: np.zeros(len(golds)) for name in RANKINGS.values()}
    for one in ir_measures.iter_calc([ir_measures.RR @ RANKED, ir_measures.nDCG @ RANKED], judged, run):
        measures[RANKINGS[str(one.measure.NAME)]][int(one.query_id)] = one.value
    return measures


def answer_hits(
    store: PassageStore, rows: ArrayLike, answers: Sequence[Sequence[str]], is_regex: Sequence[bool] | bool = False
) -> NDArray[np.bool_]:
    """Which candidates contain an answer of their question in the text; the title does not count.

    Arguments and result as for `gold_hits`; is_regex: whether answers are regular expressions, of each question or of
    all. Each passage is read and split into words once, however often it is retrieved.
    """
    rows = np.asarray(rows, np.int64)
    texts = {row: store.text(row) for row in _distinct(rows)}
    words_of = cache(lambda row: words(texts[row]))
    hits = np.zeros(rows.shape, bool)
    for question, regular in enumerate(np.broadcast_to(is_regex, len(answers)).tolist()):
        wanted = answers[question] if regular else [words(answer) for answer in answers[question]]
        for rank, row in enumerate(rows[question].tolist()):
            if row >= 0 and regular:
                hits[question, rank] = contains_pattern(texts[row], wanted)
            elif row >= 0:
                hits[question, rank] = contains_words(words_of(row), wanted)
    return hits


def _distinct(rows: NDArray[np.int64]) -> list[int]:
    return [row for row in np.unique(rows).tolist() if row >= 0]
