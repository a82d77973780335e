"""Answer waiting requests together: a bounded queue, and one thread that takes a batch of requests from it.

No request waits for a batch to fill: while one batch is computed, the next one gathers. The computation is in
`service.py`.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

Work = Callable[[str, list[Any]], list[Any]]  # kind and payloads → a result or an exception for each


class Full(Exception):
    """The queue has no room for a request."""


class _Item(NamedTuple):
    """A payload that waits, and the future of its result."""

    kind: str
    payload: Any
    done: asyncio.Future[Any]


class Batcher:
    """Compute payloads in batches. An async context manager, within which `submit` returns results."""

    def __init__(
        self, work: Work, max_batch: int, max_waiting: int, observe: Callable[[int], None] = lambda size: None
    ) -> None:
        """Make a batcher.

        Args:
            work: called in one thread, with payloads of one kind.
            max_batch: payloads of a batch at most.
            max_waiting: payloads that may wait.
            observe: called with the size of each batch.
        """
        self._work, self._max_batch, self._max_waiting, self._observe = work, max_batch, max_waiting, observe
        self._waiting: deque[_Item] = deque()
        self._filled = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="devices")

    async def __aenter__(self) -> "Batcher":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await asyncio.to_thread(self._thread.shutdown)

    @property
    def waiting(self) -> int:
        """Return the number of waiting payloads, including those of clients that went away."""
        return len(self._waiting)

    async def submit(self, kind: str, payloads: Sequence[Any]) -> list[Any]:
        """Compute payloads in the next batches.

        Args:
            kind: kind of the payloads.
            payloads: to compute.

        Returns:
            Their results.

        Raises:
            Full: the queue has no room for all of them.
            Exception: the one that the work returned for one of them.
        """
        if len(self._waiting) + len(payloads) > self._max_waiting:
            self._waiting = deque(item for item in self._waiting if not item.done.done())  # without canceled ones
        if len(self._waiting) + len(payloads) > self._max_waiting:
            raise Full
        loop = asyncio.get_running_loop()
        items = [_Item(kind, payload, loop.create_future()) for payload in payloads]
        self._waiting.extend(items)
        self._filled.set()
        try:
            return list(await asyncio.gather(*(item.done for item in items)))
        finally:
            for item in items:  # if the client went away, or another payload of the request failed
                item.done.cancel()

    async def _run(self) -> None:
        while True:
            await self._filled.wait()
            batch = self._take()
            if not batch:
                self._filled.clear()
                continue
            self._observe(len(batch))
            kind, payloads = batch[0].kind, [item.payload for item in batch]
            results = await asyncio.get_running_loop().run_in_executor(self._thread, self._results, kind, payloads)
            for item, result in zip(batch, results, strict=True):
                if not item.done.done():
                    set_result = item.done.set_exception if isinstance(result, Exception) else item.done.set_result
                    set_result(result)

    def _take(self) -> list[_Item]:
        """Take the first item and as many later ones of its kind as fit into a batch from the queue."""
        batch: list[_Item] = []
        still_waiting: deque[_Item] = deque()
        for item in self._waiting:
            if item.done.done():
                continue
            fits = len(batch) < self._max_batch and (not batch or item.kind == batch[0].kind)
            (batch if fits else still_waiting).append(item)
        self._waiting = still_waiting
        return batch

    def _results(self, kind: str, payloads: list[Any]) -> list[Any]:
        """Return the results of the work; a defect in it fails only these requests."""
        try:
            results = self._work(kind, payloads)
            if len(results) != len(payloads):
                raise RuntimeError(f"{len(results)} results of {len(payloads)} payloads")
            return results
        except Exception as error:
            logger.exception("%d requests (%s) failed", len(payloads), kind)
            return [error] * len(payloads)
