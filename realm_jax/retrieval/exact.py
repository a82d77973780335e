"""Exact maximum inner product search over vectors that are sharded by rows over every device of a mesh.

Exact means exact over the stored vectors: they may be bfloat16, and queries are rounded to the same dtype; products are
accumulated in float32. Ties go to the lower row. No full score matrix exists: each device scans its rows in blocks with
a running top-k, then one global top-k is taken over the gathered candidates. Pure and jittable; gradients do not flow
through a search.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

Array = jax.Array
EXACT = jax.lax.Precision.HIGHEST  # the default would round float32 to 10 bits on GPUs and to 8 on TPUs
GROUP = 32  # rows whose maximum is compared before a top-k over single rows: 2-3 times faster on CPUs


class Neighbours(NamedTuple):
    """scores [queries, k] float32 in falling order; rows [queries, k] int32."""

    scores: Array
    rows: Array


def padded_rows(rows: int, devices: int) -> int:
    """Rows of a device array that holds `rows` passages: the next multiple of GROUP × devices."""
    multiple = GROUP * devices
    return -(-rows // multiple) * multiple


def search(mesh: Mesh, queries: Array, vectors: Array, rows: int, k: int, block: int = 65_536) -> Neighbours:
    """The k rows of largest inner product for every query.

    queries [q, d] float32, rounded to the dtype of the vectors; vectors [padded_rows(rows, devices), d], sharded by
    rows over all axes of `mesh`; rows beyond `rows` are padding and never returned. k ≤ rows. block: rows scored at a
    time on each device.
    """
    every_axis = tuple(mesh.axis_names)
    per_device = vectors.shape[0] // mesh.size
    local = partial(_search_shard, rows=rows, k=k, block=min(block, per_device), axes=every_axis)
    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(every_axis)),
        out_specs=(PartitionSpec(), PartitionSpec()),
        check_vma=False,  # every device ends with the same gathered top-k, which the checker cannot infer
    )
    queries = jax.lax.stop_gradient(queries).astype(vectors.dtype)
    return Neighbours(*sharded(queries, jax.lax.stop_gradient(vectors)))


def _search_shard(queries: Array, vectors: Array, *, rows: int, k: int, block: int, axes: tuple) -> tuple[Array, Array]:
    """Top-k of this device's rows, then of all devices' candidates (gathered in row order, so ties stay low)."""
    first = jax.lax.axis_index(axes) * vectors.shape[0]
    best = (jnp.full((queries.shape[0], k), -jnp.inf, jnp.float32), jnp.full((queries.shape[0], k), -1, jnp.int32))
    blocks = vectors.shape[0] // block

    def scan(best: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
        part = jax.lax.dynamic_slice_in_dim(vectors, start, block)
        return _merge(best, _search_block(queries, part, first + start, rows, k), k), None

    best, _ = jax.lax.scan(scan, best, jnp.arange(blocks, dtype=jnp.int32) * block)
    rest = vectors.shape[0] - blocks * block
    if rest:
        part = vectors[blocks * block :]
        best = _merge(best, _search_block(queries, part, first + blocks * block, rows, k), k)
    scores, ids = (jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in best)
    return _top(scores, ids, k)


def _search_block(queries: Array, vectors: Array, first: Array, rows: int, k: int) -> tuple[Array, Array]:
    """Top min(k, block) of one block: groups by their maximum first, then the rows of the k best groups.

    A row of the true top-k lies in one of the k best groups: each better group would hold a better row.
    """
    scores = jnp.einsum("qd,nd->qn", queries, vectors, precision=EXACT, preferred_element_type=jnp.float32)
    ids = first + jnp.arange(vectors.shape[0], dtype=jnp.int32)
    scores = jnp.where(ids < rows, scores, -jnp.inf)
    groups = vectors.shape[0] // GROUP
    if groups <= k:
        return _top(scores, jnp.broadcast_to(ids, scores.shape), min(k, vectors.shape[0]))
    grouped = scores.reshape(scores.shape[0], groups, GROUP)
    _, chosen = jax.lax.top_k(grouped.max(axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)  # row order again, so that ties stay with the lower row
    kept = jnp.take_along_axis(grouped, chosen[:, :, None], axis=1).reshape(scores.shape[0], -1)
    kept_ids = (first + chosen[:, :, None] * GROUP + jnp.arange(GROUP, dtype=jnp.int32)).reshape(kept.shape)
    return _top(kept, kept_ids, k)


def _merge(best: tuple[Array, Array], more: tuple[Array, Array], k: int) -> tuple[Array, Array]:
    scores, ids = (jnp.concatenate(pair, axis=1) for pair in zip(best, more, strict=True))
    return _top(scores, ids, k)


def _top(scores: Array, ids: Array, k: int) -> tuple[Array, Array]:
    """Top-k of scores with their ids; `lax.top_k` is stable, so earlier entries win ties."""
    values, places = jax.lax.top_k(scores, k)
    return values, jnp.take_along_axis(ids, places, axis=1)
