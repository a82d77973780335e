"""Exact maximum inner product search over vectors that are sharded by rows over every device of a slice.

Exact means exact over the stored vectors: they may be bfloat16, and queries are rounded to the same dtype; products are
accumulated in float32. Ties go to the lower row. Each device compares groups of 32 rows by their largest score, then
the rows of the k best groups; one global top-k is taken over the candidates of all devices. If all scores would take
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
MAX_SCORE_BYTES = 2**27  # that a device keeps while it finds its best groups
BLOCK = 16_384  # rows scored at a time if all would be more: for 512 queries they fit a TPU's vector memory
MAX_GATHERED_BYTES = 2**26  # of vectors that are gathered at a time


class Neighbors(NamedTuple):
    """The best rows of each query.

    Attributes:
        scores: [queries, k] float32, in falling order.
        rows: [queries, k] int32.
    """

    scores: Array
    rows: Array


def padded_rows(rows: int, devices: int) -> int:
    """Return the padded number of rows: the next multiple of GROUP × devices.

    Args:
        rows: passages.
        devices: over which they are sharded.
    """
    multiple = GROUP * devices
    return -(-rows // multiple) * multiple


def search(mesh: Mesh, queries: Array, vectors: Array, rows: int, k: int, block: int | None = None) -> Neighbors:
    """Return the k rows of largest inner product for every query.

    Args:
        mesh: the devices.
        queries: [q, d] float32, rounded to the dtype of the vectors.
        vectors: [padded_rows(rows, corpus_devices(mesh)), d], sharded as `rows`, so that every slice has all of them
            and searches for its own queries.
        rows: vectors that are not padding.
        k: at most `rows`.
        block: rows scored at a time on each device; None: all of them if their scores take MAX_SCORE_BYTES at most,
            else BLOCK.
    """
    count, slices = len(queries), mesh.shape["slices"]
    queries = jnp.pad(queries, ((0, -count % slices), (0, 0)))  # [a multiple of slices, d]
    per_device = vectors.shape[0] // corpus_devices(mesh)
    if block is None:
        block = per_device if 4 * (len(queries) // slices) * per_device <= MAX_SCORE_BYTES else BLOCK
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
    return Neighbors(scores[:count], ids[:count])


def _search_shard(queries: Array, vectors: Array, *, rows: int, k: int, block: int, axes: tuple) -> tuple[Array, Array]:
    """Find the top k of this device's rows, then of all devices' candidates (gathered in row order, so ties stay low).

    A row of the true top-k is in one of the k groups whose maxima are largest, because each better group has a better
    row. Groups stay in row order, so that of equal scores the lower row is first.
    """
    first = jax.lax.axis_index(axes) * vectors.shape[0]
    all_scores = _scores(queries, vectors, rows - first) if block == vectors.shape[0] else None
    maxima = _maxima_by_block(queries, vectors, rows - first, block) if all_scores is None else _maxima(all_scores)
    _, groups = jax.lax.top_k(maxima.T, min(k, len(maxima)))
    groups = jnp.sort(groups, axis=-1)  # [queries, best groups]
    if all_scores is None:
        scores = _scored_again(queries, vectors, groups)
    else:
        grouped = all_scores.reshape(-1, GROUP, len(queries))  # [groups, GROUP, queries]
        scores = jnp.take_along_axis(grouped, groups.T[:, None, :], axis=0).reshape(-1, len(queries)).T
    # scores and ids: [queries, best groups × GROUP]
    ids = first + (groups[:, :, None] * GROUP + jnp.arange(GROUP, dtype=jnp.int32)).reshape(len(queries), -1)
    scores = jnp.where(ids < rows, scores, -jnp.inf)
    best = _top(scores, ids, min(k, scores.shape[1]))
    scores, ids = (jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in best)
    return _top(scores, ids, k)


def _scores(queries: Array, vectors: Array, rows: Array) -> Array:
    """Score vectors [n, d] with queries [q, d]: [n, q], −inf from row `rows` on, which is padding.

    Queries come last: TPUs compare whole registers then, and keep a block of scores in vector memory.
    """
    scores = jnp.einsum("nd,qd->nq", vectors, queries, precision=EXACT, preferred_element_type=jnp.float32)
    return jnp.where((jnp.arange(len(vectors), dtype=jnp.int32) < rows)[:, None], scores, -jnp.inf)


def _maxima(scores: Array) -> Array:
    """Return the largest score in each group of rows, [groups, queries]."""
    registers = scores.reshape(-1, GROUP // SUBLANES, SUBLANES, scores.shape[1])  # [groups, registers, rows, queries]
    return reduce(jnp.maximum, jnp.unstack(registers, axis=1)).max(axis=1)


def _maxima_by_block(queries: Array, vectors: Array, rows: Array, block: int) -> Array:
    """Return `_maxima` block by block, without storing all scores."""

    def scan(_: None, start: Array) -> tuple[None, Array]:
        part = jax.lax.dynamic_slice_in_dim(vectors, start, block)
        return None, _maxima(_scores(queries, part, rows - start))

    blocks = len(vectors) // block
    _, maxima = jax.lax.scan(scan, None, jnp.arange(blocks, dtype=jnp.int32) * block)
    rest = _maxima(_scores(queries, vectors[blocks * block :], rows - blocks * block))
    return jnp.concatenate([maxima.reshape(-1, len(queries)), rest])


def _scored_again(queries: Array, vectors: Array, groups: Array) -> Array:
    """Score the rows of each query's best groups again: [queries, groups × GROUP].

    Takes as many queries at a time as MAX_GATHERED_BYTES allow. A group's vectors are contiguous in memory;
    their scores were not.
    """
    grouped = vectors.reshape(-1, GROUP * vectors.shape[1])  # [groups, GROUP × d]

    def score_query(query_and_groups: tuple[Array, Array]) -> Array:
        query, best_groups = query_and_groups
        gathered = grouped[best_groups].reshape(-1, vectors.shape[1])  # [groups × GROUP, d]
        return jnp.einsum("d,nd->n", query, gathered, precision=EXACT, preferred_element_type=jnp.float32)

    query_bytes = groups.shape[1] * GROUP * vectors.shape[1] * vectors.dtype.itemsize
    batch_size = min(len(queries), max(1, MAX_GATHERED_BYTES // query_bytes))
    scores: Array = jax.lax.map(score_query, (queries, groups), batch_size=batch_size)
    return scores


def _top(scores: Array, ids: Array, k: int) -> tuple[Array, Array]:
    """Return the top k of scores with their ids; `lax.top_k` is stable, so earlier entries win ties."""
    values, indices = jax.lax.top_k(scores, k)  # [queries, k]
    return values, jnp.take_along_axis(ids, indices, axis=1)
