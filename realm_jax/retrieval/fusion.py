"""Hybrid search: the candidates of vectors and of words as one list. Pure functions; see `bm25.py` for the words.

Each search is read as a distribution over its own first FUSION_DEPTH passages: the retriever's p_v(z|x) is the softmax
of its scores, as in the marginal likelihood, and p_w(z|x) the softmax of BM25's, whose term weights are log odds
already (Robertson & Spärck Jones 1976) and so need no temperature. A passage is ranked by √p_v + √p_w: the mean of
exponent ½ of the two, half-way between a mixture (one search that is sure is enough) and a product (both have to
agree), also known as the α-mean for α = 0 (Amari 2007). How sure a search is decides its weight for each question by
itself: nothing is fitted. `benchmarks/README.md` links the comparison with other rules.
"""

from typing import Any, NamedTuple

FUSION_DEPTH = 100  # first passages of each search that take part, and over which it is normalized


class FusedRanking(NamedTuple):
    """Passages in the order of a search.

    Attributes:
        rows: int32 [queries, depth], the best first; −1 is not a candidate.
        scores: float32 [queries, depth].
        ranks: rank of each passage in the list of vectors and in that of BM25, from 1; 0 if it is not in it; int32
            [queries, depth, 2]. A reranker adds a third column, its own ranks.
        values: values by which the search ordered the passages, float32 [queries, depth]; without meaning for a row of
            −1.
    """

    rows: Any
    scores: Any
    ranks: Any
    values: Any


def fuse(
    vector_rows: Any, vector_scores: Any, bm25_rows: Any, bm25_scores: Any, bm25_vector_scores: Any, depth: int
) -> FusedRanking:
    """Rank two lists by √p_v + √p_w, with the retriever's scores.

    Arrays are of NumPy or of JAX, and so is the result. Rows below 0 are not candidates; a row occurs once in a list.
    Only the first FUSION_DEPTH of BM25 take part, however large b is, so that two long lists are never compared entry
    by entry; a longer beam is filled by vectors. Of equals the one that vectors rank higher comes first.

    Args:
        vector_rows: by vectors, best first, [queries, a].
        vector_scores: vector scores of these rows, as the retriever's softmax takes them, [queries, a].
        bm25_rows: by BM25, best first, [queries, b].
        bm25_scores: BM25 scores of these rows, [queries, b].
        bm25_vector_scores: the retriever's scores of these rows, [queries, b].
        depth: rows of the result, at most a + min(b, FUSION_DEPTH).
    """
    xp = vector_rows.__array_namespace__()
    bm25_rows, bm25_scores, bm25_vector_scores = (
        part[:, :FUSION_DEPTH] for part in (bm25_rows, bm25_scores, bm25_vector_scores)
    )
    by_vector, by_word = vector_rows >= 0, bm25_rows >= 0
    p_v, z_v, top = _softmax(xp, vector_scores, by_vector)
    p_w, _, _ = _softmax(xp, bm25_scores, by_word)
    same = vector_rows[:, :, None] == bm25_rows[:, None, :]  # [queries, a, b]
    same = same & by_word[:, None, :] & by_vector[:, :, None]
    is_repeated = same.any(axis=1)  # [queries, b]
    both = xp.where(same, xp.sqrt(p_w)[:, None, :], 0.0).sum(axis=2)  # [queries, a]
    # A passage that only BM25 found may be far down the list of vectors, but never above all passages in it.
    late = xp.exp(xp.minimum(xp.where(by_word, bm25_vector_scores, top) - top, 0.0)) / z_v  # [queries, b]
    late = xp.where(by_vector.any(axis=1)[:, None], late, 0.0)
    fused = xp.concat(  # [queries, a + b]
        [
            xp.where(by_vector, xp.sqrt(p_v) + both, -1.0),
            xp.where(by_word & ~is_repeated, xp.sqrt(late) + xp.sqrt(p_w), -1.0),
        ],
        axis=1,
    )
    best = xp.argsort(-fused, axis=1, stable=True)[:, :depth]
    rows = xp.concat([vector_rows, bm25_rows], axis=1)
    scores = xp.concat([vector_scores, bm25_vector_scores], axis=1)
    vector_ranks = xp.where(by_vector, xp.cumsum(by_vector, axis=1), 0)  # [queries, a]
    bm25_ranks = xp.where(same, xp.arange(1, same.shape[2] + 1)[None, None], 0).sum(axis=2)  # [queries, a]
    both_ranks = xp.stack([vector_ranks, bm25_ranks], axis=-1)
    ranks = xp.concat([both_ranks, ranks_of("bm25", xp, bm25_rows)], axis=1)  # [queries, a + b, 2]
    values = xp.take_along_axis(fused, best, axis=1)  # [queries, depth]
    is_candidate = values >= 0
    return FusedRanking(
        xp.where(is_candidate, xp.take_along_axis(rows, best, axis=1), -1).astype("int32"),
        xp.take_along_axis(scores, best, axis=1),
        xp.where(is_candidate[:, :, None], xp.take_along_axis(ranks, best[:, :, None], axis=1), 0).astype("int32"),
        values,
    )


def ranks_of(search: str, xp: Any, rows: Any) -> Any:
    """Return `FusedRanking.ranks` of the rows of one search.

    Args:
        search: 'vectors' or 'bm25'.
        xp: NumPy or jax.numpy.
        rows: best first, [queries, depth].

    Returns:
        int32 [queries, depth, 2].
    """
    ranks = xp.where(rows >= 0, xp.arange(1, rows.shape[1] + 1)[None], 0).astype("int32")  # [queries, depth]
    zeros = xp.zeros_like(ranks)
    return xp.stack([ranks, zeros] if search == "vectors" else [zeros, ranks], axis=-1)


def _softmax(xp: Any, scores: Any, valid: Any) -> tuple[Any, Any, Any]:
    """Return p over the first FUSION_DEPTH valid entries, its normalizer and the largest score, both [queries, 1].

    Later entries have the same normalizer.
    """
    scores = xp.where(valid, scores, -xp.inf)
    top = xp.where(valid.any(axis=1), scores.max(axis=1), 0.0)[:, None]
    weights = xp.where(valid, xp.exp(scores - top), 0.0)
    first = xp.where(xp.cumsum(valid, axis=1) <= FUSION_DEPTH, weights, 0.0)
    total = xp.maximum(first.sum(axis=1), 1e-30)[:, None]
    return weights / total, total, top
