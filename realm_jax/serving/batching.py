"""Requests that wait, answered together: a bounded queue, and one thread that takes from it as many as a batch holds.

Nothing waits for a batch to fill: while one is computed the next gathers. Not for what is computed: `service.py`.
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
    kind: str
    payload: Any
    done: asyncio.Future[Any]


class Batcher:
    """An async context manager: within it `submit` gives the results of payloads.

    work: called in one thread, with at most `most` payloads of one kind. room: payloads that may wait. observe: called
    with the size of each batch.
    """

    def __init__(self, work: Work, most: int, room: int, observe: Callable[[int], None] = lambda size: None) -> None:
        self._work, self._most, self._room, self._observe = work, most, room, observe
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
        """Payloads that wait, those of requests that went away included."""
        return len(self._waiting)

    async def submit(self, kind: str, payloads: Sequence[Any]) -> list[Any]:
        """The results of some payloads. Raises Full where not all have room, and what the work gave for one of them."""
        if len(self._waiting) + len(payloads) > self._room:
            self._waiting = deque(item for item in self._waiting if not item.done.done())  # those that were given up
        if len(self._waiting) + len(payloads) > self._room:
            raise Full
        loop = asyncio.get_running_loop()
        items = [_Item(kind, payload, loop.create_future()) for payload in payloads]
        self._waiting.extend(items)
        self._filled.set()
        try:
            return list(await asyncio.gather(*(item.done for item in items)))
        finally:
            for item in items:  # of a request that went away, or of which another part failed
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
        """The first that waits, and those of its kind after it, as far as a batch holds them."""
        taken: list[_Item] = []
        left: deque[_Item] = deque()
        for item in self._waiting:
            if item.done.done():
                continue
            fits = len(taken) < self._most and (not taken or item.kind == taken[0].kind)
            (taken if fits else left).append(item)
        self._waiting = left
        return taken

    def _results(self, kind: str, payloads: list[Any]) -> list[Any]:
        """What the work gives; a defect in it ends these requests and no others."""
        try:
            results = self._work(kind, payloads)
            if len(results) != len(payloads):
                raise RuntimeError(f"{len(results)} results of {len(payloads)} payloads")
            return results
        except Exception as error:
            logger.exception("%d requests (%s) failed", len(payloads), kind)
            return [error] * len(payloads)
