"""Hybrid search: two lists as one, by how sure each search is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.retrieval.fusion import FUSION_DEPTH, fuse, ranks_of


def lists(vectors, words, cross=None):
    """Arguments of `fuse` for one question: {row: score} of each list, {row: the retriever's score} of words' rows."""
    rows = [np.array([list(one)], np.int32) for one in (vectors, words)]
    scores = [np.array([list(one.values())], np.float32) for one in (vectors, words)]
    known = [(cross or {}).get(row, vectors.get(row, -9.0)) for row in words]
    return rows[0], scores[0], rows[1], scores[1], np.array([known], np.float32)


def softmax(*scores):
    weights = np.exp(np.array(scores) - max(scores))
    return weights / weights.sum()


def test_a_passage_is_ranked_by_the_roots_of_both_probabilities():
    vectors, words = {7: 2.0, 3: 1.0, 5: 0.0}, {3: 4.0, 9: 3.5}
    p_v, p_w = softmax(2.0, 1.0, 0.0), softmax(4.0, 3.5)
    late = np.exp(-1.0 - 2.0) / np.exp(np.array([2.0, 1.0, 0.0]) - 2.0).sum()  # of row 9, by the same normalizer
    wanted = {
        7: np.sqrt(p_v[0]), 3: np.sqrt(p_v[1]) + np.sqrt(p_w[0]), 5: np.sqrt(p_v[2]), 9: np.sqrt(late) + np.sqrt(p_w[1])
    }  # fmt: skip
    found = fuse(*lists(vectors, words, {9: -1.0}), 4)
    assert found.rows[0].tolist() == sorted(wanted, key=wanted.__getitem__, reverse=True)
    scores = dict(zip(found.rows[0].tolist(), found.scores[0].tolist(), strict=True))
    assert scores == {7: 2.0, 3: 1.0, 5: 0.0, 9: -1.0}, "the retriever's, also of what words alone found"
    values = [wanted[row] for row in found.rows[0].tolist()]
    np.testing.assert_allclose(found.values[0], values, rtol=1e-6)
    ranks = dict(zip(found.rows[0].tolist(), found.ranks[0].tolist(), strict=True))
    assert ranks == {7: [1, 0], 3: [2, 1], 5: [3, 0], 9: [0, 2]}


@pytest.mark.parametrize(("spread", "first"), [(0.1, 50), (20.0, 0)])
def test_the_search_that_is_sure_decides(spread, first):
    vectors = {row: -spread * row for row in range(10)}  # nearly the same for all, or one far above the others
    words = {50: 12.0, 51: 9.0} if first == 50 else {50: 1.1, 51: 1.0, 52: 0.9, 53: 0.8}
    assert fuse(*lists(vectors, words), 3).rows[0, 0] == first


def test_without_words_vectors_decide():
    vectors = {4: 0.3, 2: 0.2, 8: 0.1}
    whole = lists(vectors, {0: 0.0, 1: 0.0})
    found = fuse(*whole[:2], np.full((1, 2), -1, np.int32), *whole[3:], 4)  # as BM25 gives it, where no word is shared
    assert found.rows[0].tolist() == [4, 2, 8, -1]
    assert found.ranks[0].tolist() == [[1, 0], [2, 0], [3, 0], [0, 0]]


def test_a_row_that_is_left_out_has_no_part():
    whole = lists({4: 90.0, 2: 0.2, 8: 0.1}, {8: 5.0, 1: 4.0})
    without = (np.where(whole[0] == 4, -1, whole[0]), *whole[1:])
    found = fuse(*without, 3)
    assert found.rows[0].tolist() == [8, 2, 1] and found.ranks[0].tolist() == [[2, 1], [1, 0], [0, 2]]


def test_a_long_beam_is_filled_by_vectors_and_takes_the_first_of_words():
    rng, beam = np.random.default_rng(0), 300
    rows = [rng.permutation(900)[None, :beam].astype(np.int32) for _ in range(2)]
    scores = [-np.sort(-rng.gamma(2.0, size=(1, beam)).astype(np.float32), axis=1) for _ in range(2)]
    cross = rng.normal(size=(1, beam)).astype(np.float32)
    found = fuse(rows[0], scores[0], rows[1], scores[1], cross, beam)
    cut = fuse(
        rows[0], scores[0], rows[1][:, :FUSION_DEPTH], scores[1][:, :FUSION_DEPTH], cross[:, :FUSION_DEPTH], beam
    )
    np.testing.assert_array_equal(found.rows, cut.rows)
    assert (
        set(rows[1][0, : FUSION_DEPTH // 2]) & set(found.rows[0].tolist())
        and found.ranks[0, :, 1].max() <= FUSION_DEPTH
    )
    assert len(set(found.rows[0].tolist())) == beam


def test_a_beam_of_thousands_is_fused_without_comparing_all_with_all():
    long = jax.ShapeDtypeStruct((8, 5000), jnp.int32), jax.ShapeDtypeStruct((8, 5000), jnp.float32)
    program = jax.make_jaxpr(fuse, static_argnums=5)(*long, *long, long[1], 5000)
    sizes = [v.aval.size for equation in program.eqns for v in equation.outvars]
    assert max(sizes) == 8 * 5000 * FUSION_DEPTH


def test_the_host_and_the_device_agree():
    rng = np.random.default_rng(0)
    rows = [np.stack([rng.permutation(200)[:120] for _ in range(5)]).astype(np.int32) for _ in range(2)]
    scores = [-np.sort(-rng.gamma(2.0, size=(5, 120)).astype(np.float32), axis=1) for _ in range(2)]
    arguments = rows[0], scores[0], rows[1], scores[1], rng.normal(size=(5, 120)).astype(np.float32)
    host = fuse(*arguments, 40)
    device = jax.jit(fuse, static_argnums=5)(*map(jnp.asarray, arguments), 40)
    for ours, theirs in zip(host, device, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert all(len(set(row)) == 40 for row in host.rows.tolist())


def test_ranks_of_one_search_alone():
    assert ranks_of("vectors", np, np.array([[5, 2]])).tolist() == [[[1, 0], [2, 0]]]
    assert ranks_of("bm25", np, np.array([[5, -1]])).tolist() == [[[0, 1], [0, 0]]]
