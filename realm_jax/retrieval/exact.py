"""Exact maximum inner product search over vectors that are sharded by rows over every device of a slice.

Exact means exact over the stored vectors: they may be bfloat16, and queries are rounded to the same dtype; products are
accumulated in float32. Ties go to the lower row. Each device compares groups of 32 rows by their largest score, then
the rows of the k best groups; one global top-k is taken over the candidates of all devices. Where all scores would take
much memory, rows are scored in blocks and those of the best groups once more. Pure and jittable; gradients do not flow
through a search.
"""

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from realm_jax.mesh import ROWS, corpus_devices

Array = jax.Array
EXACT = jax.lax.Precision.HIGHEST  # the default would round float32 to 10 bits on GPUs and to 8 on TPUs
GROUP = 32  # rows whose maximum is compared before a top-k over single rows
SUBLANES = 8  # rows of a TPU's register, whose maximum costs more than that of as many registers
KEPT = 2**27  # bytes of scores that are kept on a device while its best groups are found
BLOCK = 16_384  # rows scored at a time where all would be more: of 512 queries, what fits a TPU's vector memory
GATHERED = 2**26  # bytes of vectors that are gathered at a time


class Neighbours(NamedTuple):
    """scores [queries, k] float32 in falling order; rows [queries, k] int32."""

    scores: Array
    rows: Array


def padded_rows(rows: int, devices: int) -> int:
    """Rows of an array that holds `rows` passages on so many devices: the next multiple of GROUP × devices."""
    multiple = GROUP * devices
    return -(-rows // multiple) * multiple


def search(mesh: Mesh, queries: Array, vectors: Array, rows: int, k: int, block: int | None = None) -> Neighbours:
    """The k rows of largest inner product for every query.

    queries [q, d] float32, rounded to the dtype of the vectors; vectors [padded_rows(rows, corpus_devices(mesh)), d],
    sharded as `rows`, so that every slice has all of them and searches for its own queries; rows beyond `rows` are
    padding and never returned. k ≤ rows. block: rows scored at a time on each device; None: all of them where that
    takes KEPT bytes at most, or BLOCK.
    """
    count, slices = len(queries), mesh.shape["slices"]
    queries = jnp.pad(queries, ((0, -count % slices), (0, 0)))
    per_device = vectors.shape[0] // corpus_devices(mesh)
    if block is None:
        block = per_device if 4 * (len(queries) // slices) * per_device <= KEPT else BLOCK
    local = partial(_search_shard, rows=rows, k=k, block=min(block, per_device), axes=ROWS)
    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec("slices"), PartitionSpec(ROWS)),
        out_specs=(PartitionSpec("slices"), PartitionSpec("slices")),
        check_vma=False,  # every device of a slice ends with the same gathered top-k, which the checker cannot infer
    )
    queries = jax.lax.stop_gradient(queries).astype(vectors.dtype)
    scores, ids = sharded(queries, jax.lax.stop_gradient(vectors))
    return Neighbours(scores[:count], ids[:count])


def _search_shard(queries: Array, vectors: Array, *, rows: int, k: int, block: int, axes: tuple) -> tuple[Array, Array]:
    """Top-k of this device's rows, then of all devices' candidates (gathered in row order, so ties stay low).

    A row of the true top-k lies in one of the k groups whose maxima are largest: each better group would hold a better
    row. Groups are kept in row order, so that of equal scores the lower row stays first.
    """
    first = jax.lax.axis_index(axes) * vectors.shape[0]
    all_scores = _scores(queries, vectors, rows - first) if block == vectors.shape[0] else None
    maxima = _maxima_by_block(queries, vectors, rows - first, block) if all_scores is None else _maxima(all_scores)
    _, groups = jax.lax.top_k(maxima.T, min(k, len(maxima)))
    groups = jnp.sort(groups, axis=-1)
    if all_scores is None:
        scores = _scored_again(queries, vectors, groups)
    else:
        grouped = all_scores.reshape(-1, GROUP, len(queries))
        scores = jnp.take_along_axis(grouped, groups.T[:, None, :], axis=0).reshape(-1, len(queries)).T
    ids = first + (groups[:, :, None] * GROUP + jnp.arange(GROUP, dtype=jnp.int32)).reshape(len(queries), -1)
    scores = jnp.where(ids < rows, scores, -jnp.inf)
    best = _top(scores, ids, min(k, scores.shape[1]))
    scores, ids = (jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in best)
    return _top(scores, ids, k)


def _scores(queries: Array, vectors: Array, rows: Array) -> Array:
    """[n, queries] of all vectors, of which the first `rows` are no padding. Queries come last: TPUs compare whole
    registers then, and keep a block of scores in vector memory."""
    scores = jnp.einsum("nd,qd->nq", vectors, queries, precision=EXACT, preferred_element_type=jnp.float32)
    return jnp.where((jnp.arange(len(vectors), dtype=jnp.int32) < rows)[:, None], scores, -jnp.inf)


def _maxima(scores: Array) -> Array:
    """The largest score in each group of rows, [groups, queries]."""
    registers = scores.reshape(-1, GROUP // SUBLANES, SUBLANES, scores.shape[1])
    return reduce(jnp.maximum, jnp.unstack(registers, axis=1)).max(axis=1)


def _maxima_by_block(queries: Array, vectors: Array, rows: Array, block: int) -> Array:
    """As `_maxima`, of scores that are not kept."""

    def scan(_: None, start: Array) -> tuple[None, Array]:
        part = jax.lax.dynamic_slice_in_dim(vectors, start, block)
        return None, _maxima(_scores(queries, part, rows - start))

    blocks = len(vectors) // block
    _, maxima = jax.lax.scan(scan, None, jnp.arange(blocks, dtype=jnp.int32) * block)
    rest = _maxima(_scores(queries, vectors[blocks * block :], rows - blocks * block))
    return jnp.concatenate([maxima.reshape(-1, len(queries)), rest])


def _scored_again(queries: Array, vectors: Array, groups: Array) -> Array:
    """Scores [queries, groups × GROUP] of the rows of each query's own groups, as many queries at a time as GATHERED
    bytes allow. The vectors of a group lie in one piece of memory, which their scores did not."""
    grouped = vectors.reshape(-1, GROUP * vectors.shape[1])

    def of_query(query_and_groups: tuple[Array, Array]) -> Array:
        query, best_groups = query_and_groups
        gathered = grouped[best_groups].reshape(-1, vectors.shape[1])  # [groups × GROUP, d]
        return jnp.einsum("d,nd->n", query, gathered, precision=EXACT, preferred_element_type=jnp.float32)

    each = groups.shape[1] * GROUP * vectors.shape[1] * vectors.dtype.itemsize
    at_a_time = min(len(queries), max(1, GATHERED // each))
    scores: Array = jax.lax.map(of_query, (queries, groups), batch_size=at_a_time)
    return scores


def _top(scores: Array, ids: Array, k: int) -> tuple[Array, Array]:
    """Top-k of scores with their ids; `lax.top_k` is stable, so earlier entries win ties."""
    values, places = jax.lax.top_k(scores, k)
    return values, jnp.take_along_axis(ids, places, axis=1)
