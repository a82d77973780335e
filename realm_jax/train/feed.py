"""Put batches on the devices for the loop, with rows that the hosts retrieved if `retrieval.backend=scann`.

The `device` backend searches inside the step, so its batches have no rows. With `scann` the search for step t + d
starts before step t, with the parameters of exactly step t: the loop's thread embeds the queries on the devices, so
that device programs start in the same order everywhere; ScaNN then works in another thread while the devices train. d
is `scann.ahead`. A checkpoint holds the searches under way (`in_flight`), so a resumed run gets the same rows.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from realm_jax.forward import LoadedIndex, StaticContext, embed_searching_queries, search_depth
from realm_jax.mesh import replicated
from realm_jax.models.layers import Params
from realm_jax.retrieval.scann import Searcher
from realm_jax.run import make_global_batch
from realm_jax.tasks.base import Task

Batch = dict[str, Any]  # on the host or on the devices


class PendingBatch(NamedTuple):
    """A batch whose search is under way.

    Attributes:
        batch: arrays on the devices.
        rows: rows of the passages, [local batch, depth] int32.
    """

    batch: Batch
    rows: Future[NDArray[np.int32]]


class Feed:
    """Context manager that returns batches in order; leaving it ends the thread that searches."""

    def __init__(
        self, task: Task, source: Iterator[Batch], rows: NDArray[np.int64], in_flight: NDArray | None = None
    ) -> None:
        """Start a feed.

        Args:
            task: has the batch size and the run.
            source: this process's part of each batch, arrays on the host.
            rows: numbers of its examples in a global batch, [local batch] int64.
            in_flight: rows that a checkpoint holds for the next n batches, [n, batch, depth] int32.
        """
        self._task, self._source, self._rows = task, source, rows
        self._searches_ahead = task.name == "realm" and task.run.scann_config is not None
        self._depth = search_depth(task.run.config.realm, task.run.context.rows)  # rows that hosts search
        self._pool = ThreadPoolExecutor(1)
        self._queue: deque[PendingBatch] = deque()
        for rows in [] if in_flight is None else in_flight:
            finished_search: Future[NDArray[np.int32]] = Future()
            finished_search.set_result(np.asarray(rows, np.int32)[self._rows])
            self._queue.append(PendingBatch(self._next_on_devices(), finished_search))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def next(self, params: Params, index: LoadedIndex | None) -> Batch:
        """Return the next batch on the devices, and start the search of a later one.

        Args:
            params: parameters before this step; they embed the queries of the later batch.
            index: in use; None for a task that does not retrieve.
        """
        if not self._searches_ahead:
            return self._next_on_devices()
        assert index is not None and index.searcher is not None, "if hosts search, an index has a searcher"
        context, mesh = self._task.run.context, self._task.run.mesh
        while len(self._queue) <= self._task.run.config.scann.ahead:
            try:
                batch = self._next_on_devices()
            except StopIteration:
                break
            queries = _query_vectors(context, params, batch, index.index.query_encoder, replicated(mesh))
            search = self._pool.submit(self._search, index.searcher, queries, self._depth)
            self._queue.append(PendingBatch(batch, search))
        batch, rows = self._queue.popleft()
        return batch | self._to_devices({"retrieved_rows": rows.result()})

    def in_flight(self) -> jax.Array | None:
        """Wait for the searches under way, and return their rows, [n, batch, depth] int32; None if there are none."""
        if not self._queue:
            return None
        batches = [self._to_devices({"retrieved_rows": rows.result()}) for _, rows in self._queue]
        return jnp.stack([batch["retrieved_rows"] for batch in batches])

    def _next_on_devices(self) -> Batch:
        return self._to_devices(next(self._source))

    def _to_devices(self, batch: Batch) -> Batch:
        """Make a sharded global batch of the parts of all processes."""
        on_devices: Batch = make_global_batch(self._task.run.mesh, batch, self._rows, self._task.settings.batch_size)
        return on_devices

    def _search(self, searcher: Searcher, queries: jax.Array, depth: int) -> NDArray[np.int32]:
        return searcher.search(np.asarray(queries)[self._rows], depth)


@partial(jax.jit, static_argnums=(0, 4))
def _query_vectors(
    context: StaticContext, params: Params, batch: Batch, query_encoder: Params | None, on_all_devices: NamedSharding
) -> jax.Array:
    """Return the query vectors of a batch, [batch, width], replicated.

    Every process can read all of them, so that only the loop's thread starts device programs.
    """
    vectors = embed_searching_queries(context, params, batch, query_encoder)  # [batch, width]
    return jax.lax.with_sharding_constraint(vectors, on_all_devices)
