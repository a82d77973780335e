"""Batches for the loop, with the rows retrieved by the hosts if retrieval is approximate.

`retrieval.backend=device` searches inside the step, and a batch is a batch. With `scann` the search for step t + d
starts before step t, with the parameters of exactly step t: the queries are embedded on the devices by the loop's own
thread, so that device programs start in one order; ScaNN then works in another thread while the devices train. d is
`scann.ahead`. Searches under way are part of a checkpoint (`in_flight`): a resumed run finds what it would have.
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
    """A batch on the devices, and the rows that are being searched for it."""

    batch: Batch
    rows: Future[NDArray[np.int32]]


class Feed:
    """Hands out batches in order. A context manager: leaving ends the searching thread."""

    def __init__(
        self, task: Task, source: Iterator[Batch], rows: NDArray[np.int64], in_flight: NDArray | None = None
    ) -> None:
        """source: host batches of this process's `rows` of each global batch of a task. in_flight: rows in a
        checkpoint, [n, batch, k]."""
        self._task, self._source, self._rows = task, source, rows
        self._searches_ahead = task.name == "realm" and task.run.scann_config is not None
        self._depth = search_depth(task.run.config.realm, task.run.context.rows)  # rows that hosts search
        self._pool = ThreadPoolExecutor(1)
        self._queue: deque[PendingBatch] = deque()
        for rows in [] if in_flight is None else in_flight:
            found: Future[NDArray[np.int32]] = Future()
            found.set_result(np.asarray(rows, np.int32)[self._rows])
            self._queue.append(PendingBatch(self._put(), found))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def next(self, params: Params, index: LoadedIndex | None) -> Batch:
        """The batch of this step. params: its parameters, with which the search of a later step starts; index: the one
        in use."""
        if not self._searches_ahead:
            return self._put()
        assert index is not None and index.searcher is not None, "where hosts search, an index has a searcher"
        context, mesh = self._task.run.context, self._task.run.mesh
        while len(self._queue) <= self._task.run.config.scann.ahead:
            try:
                batch = self._put()
            except StopIteration:
                break
            queries = _queries(context, params, batch, index.index.query_encoder, replicated(mesh))
            found = self._pool.submit(self._search, index.searcher, queries, self._depth)
            self._queue.append(PendingBatch(batch, found))
        batch, rows = self._queue.popleft()
        return batch | self._spread({"retrieved_rows": rows.result()})

    def in_flight(self) -> jax.Array | None:
        """Rows of the batches after this one, [n, batch, k]; waits for the searches. None if there are none."""
        if not self._queue:
            return None
        return jnp.stack([self._spread({"retrieved_rows": rows.result()})["retrieved_rows"] for _, rows in self._queue])

    def _put(self) -> Batch:
        return self._spread(next(self._source))

    def _spread(self, batch: Batch) -> Batch:
        found: Batch = make_global_batch(self._task.run.mesh, batch, self._rows, self._task.settings.batch_size)
        return found

    def _search(self, searcher: Searcher, queries: jax.Array, depth: int) -> NDArray[np.int32]:
        return searcher.search(np.asarray(queries)[self._rows], depth)


@partial(jax.jit, static_argnums=(0, 4))
def _queries(
    context: StaticContext, params: Params, batch: Batch, query_encoder: Params | None, whole: NamedSharding
) -> jax.Array:
    """Whole in every process, so that no other thread than the loop's starts a device program."""
    return jax.lax.with_sharding_constraint(embed_searching_queries(context, params, batch, query_encoder), whole)
