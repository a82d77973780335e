"""Exact search against NumPy's sort, on one device and on eight, with ties everywhere."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import mesh_of_slices

from realm_jax.mesh import corpus_devices, logical_sharding, make_mesh
from realm_jax.retrieval import exact
from realm_jax.retrieval.exact import GROUP, Neighbors, padded_rows, search

ONE = make_mesh(1, 1, 1, jax.devices()[:1])
EIGHT = make_mesh(2, 2, 2)
SLICES = mesh_of_slices(2, 2, 2, 1)  # a copy of rows each
WITHIN_SLICES = {  # as jax 0.10 and as jax 0.12 writes it
    "{{0,1,2,3},{4,5,6,7}}",
    "mesh['slices'=2,'data'=2,'fsdp'=2,'model'=1] {'data','fsdp','model'}",
}
SIZE = 6


def place(mesh, vectors: np.ndarray, rows: int, dtype=jnp.float32):
    """Vectors on the mesh; the padding rows would win every search if they were looked at."""
    padded = np.full((padded_rows(rows, corpus_devices(mesh)), vectors.shape[1]), 1e6, np.float32)
    padded[:rows] = vectors
    return jax.device_put(jnp.asarray(padded, dtype), logical_sharding(mesh, "rows", None))


@partial(jax.jit, static_argnames=("mesh", "rows", "k", "block"))
def compiled(mesh, queries, vectors, rows, k, block) -> Neighbors:
    return search(mesh, queries, vectors, rows, k, block)


def by_sorting(queries: np.ndarray, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and rows of the k largest inner products; of equal ones the lower row first."""
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, rows, axis=1), rows


def whole_numbers(rows: int, seed: int, queries: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Few different vectors of small whole numbers: inner products are exact, and most of them equal to others."""
    rng = np.random.default_rng(seed)
    return rng.integers(-2, 3, (queries, SIZE)).astype(np.float32), rng.integers(-1, 2, (rows, SIZE)).astype(np.float32)


# (rows, k, block): fewer rows than devices; no multiple of anything; blocks with a rest; more groups than k; all rows.
SIZES = ((3, 2, 32), (70, 5, 32), (333, 4, 96), (1000, 3, 512), (1000, 40, 64), (5, 5, 65_536), (40, 40, 32))


@pytest.mark.parametrize("mesh", [ONE, EIGHT, SLICES], ids=["one device", "eight devices", "two slices"])
@settings(max_examples=25, deadline=None)
@given(size=st.sampled_from(SIZES), seed=st.integers(0, 1000))
def test_rows_are_those_of_a_stable_sort_so_that_ties_go_to_the_lower_row(mesh, size, seed):
    rows, k, block = size
    queries, vectors = whole_numbers(rows, seed)
    found = compiled(mesh, queries, place(mesh, vectors, rows), rows, k, block)
    scores, wanted = by_sorting(queries, vectors, k)
    np.testing.assert_array_equal(found.rows, wanted)
    np.testing.assert_array_equal(found.scores, scores)


def test_slices_search_for_their_own_queries_alone():
    """Nothing of them, nor of what is found, travels between slices."""
    queries, vectors = whole_numbers(300, seed=3, queries=6)
    placed = place(SLICES, vectors, 300)
    program = compiled.lower(SLICES, queries, placed, 300, 4, 64).compile().as_text()
    groups = re.findall(r" (?:all-\w+|collective-\w+)\(.*?replica_groups=(mesh\[.*?\] \{.*?\}|\S+),", program)
    assert groups and set(groups) <= WITHIN_SLICES
    found = compiled(SLICES, queries, placed, 300, 4, 64)
    np.testing.assert_array_equal(found.rows, by_sorting(queries, vectors, 4)[1])


def test_negative_scores_do_not_bring_padding_in():
    """Rows whose inner products are all below zero still come before padding, which stands for no passage."""
    rows = 33
    vectors = -np.ones((rows, SIZE), np.float32)
    padded = np.zeros((padded_rows(rows, 8), SIZE), np.float32)
    padded[:rows] = vectors
    sharded = jax.device_put(padded, logical_sharding(EIGHT, "rows", None))
    found = compiled(EIGHT, np.ones((1, SIZE), np.float32), sharded, rows, 33, 32)
    assert found.rows.tolist() == [list(range(rows))]


def test_one_device_and_eight_agree_on_real_numbers():
    rng = np.random.default_rng(0)
    queries, vectors = rng.normal(size=(16, 128)).astype(np.float32), rng.normal(size=(900, 128)).astype(np.float32)
    one, eight = (compiled(mesh, queries, place(mesh, vectors, 900), 900, 10, 128) for mesh in (ONE, EIGHT))
    np.testing.assert_array_equal(one.rows, eight.rows)
    np.testing.assert_allclose(one.scores, eight.scores, rtol=1e-5)
    np.testing.assert_array_equal(one.rows, by_sorting(queries, vectors, 10)[1])


def test_bfloat16_vectors_are_searched_exactly_as_they_are_stored():
    """Products of bfloat16 numbers are exact in float32, so that only the rounding when storing is lost."""
    rng = np.random.default_rng(0)
    rounded = lambda shape: np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16), np.float32)  # noqa: E731
    queries, vectors = rounded((8, 16)), rounded((400, 16))
    found = compiled(EIGHT, queries, place(EIGHT, vectors, 400, jnp.bfloat16), 400, 6, 64)
    scores, wanted = by_sorting(queries, vectors, 6)
    np.testing.assert_array_equal(found.rows, wanted)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5)
    assert found.scores.dtype == jnp.float32 and found.rows.dtype == jnp.int32


def test_float32_products_are_not_rounded_on_accelerators():
    """By default a GPU multiplies float32 in TF32 and a TPU in bfloat16: three digits rank nothing exactly."""
    queries, vectors = whole_numbers(70, seed=0)
    program = str(jax.make_jaxpr(lambda q, v: search(ONE, q, v, 70, 5))(queries, place(ONE, vectors, 70)))
    assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in program


def test_as_many_rows_are_scored_at_a_time_as_memory_is_given_for(monkeypatch):
    """All at once, or in blocks, after which queries score their best groups again, three and one: the same rows."""
    queries, vectors = whole_numbers(1000, seed=2, queries=7)
    wanted = by_sorting(queries, vectors, 4)
    programs = set()
    usual, three = exact.MAX_GATHERED_BYTES, 3 * 4 * GROUP * SIZE * 4
    for kept, gathered in ((exact.MAX_SCORE_BYTES, usual), (0, usual), (0, three), (0, 0)):
        monkeypatch.setattr(exact, "MAX_SCORE_BYTES", kept)
        monkeypatch.setattr(exact, "BLOCK", 384)
        monkeypatch.setattr(exact, "MAX_GATHERED_BYTES", gathered)
        find = jax.jit(lambda q, v: search(ONE, q, v, 1000, 4))
        placed = place(ONE, vectors, 1000)
        found = find(queries, placed)
        np.testing.assert_array_equal(found.rows, wanted[1])
        np.testing.assert_array_equal(found.scores, wanted[0])
        programs.add(find.lower(queries, placed).as_text())
    assert len(programs) == 4


def test_no_gradient_flows_through_a_search():
    queries, vectors = whole_numbers(70, seed=0)

    def total(queries, vectors):
        return search(ONE, queries, vectors, 70, 5, 32).scores.sum()

    slopes = jax.jit(jax.grad(total, argnums=(0, 1)))(queries, place(ONE, vectors, 70))
    assert all(not slope.any() for slope in slopes)


@pytest.mark.parametrize("rows, devices, wanted", [(1, 1, 32), (32, 1, 32), (33, 1, 64), (33, 8, 256), (257, 8, 512)])
def test_padding_fills_every_device_alike(rows, devices, wanted):
    assert padded_rows(rows, devices) == wanted
    assert wanted % (GROUP * devices) == 0
