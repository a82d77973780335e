"""Guards of a run against hangs and recompilation; and the profiler.

None of them changes what is computed.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax

from realm_jax.host import free_heap, signal_handler

logger = logging.getLogger(__name__)

HUNG = 70  # exit code: no progress for too long
TRACED = 5  # steps in a profile


class Watchdog:
    """Ends the process with exit code `HUNG` when `heartbeat` is not called for `limit` seconds; 0: never.

    A collective that waits for a dead process waits for ever; an orchestrator restarts only what ends. The stacks of
    all threads go to stderr first. A context manager.
    """

    def __init__(self, limit: float, what: str, end: Callable[[int], Any] = os._exit) -> None:
        """what: is said to be stuck. end: ends the process."""
        self._limit, self._what, self._end = limit, what, end
        self._over = threading.Event()
        self._moved = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._limit:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._limit:
            self._thread.join()

    def heartbeat(self) -> None:
        """Report progress."""
        self._moved = True

    def _watch(self) -> None:
        tick = min(1.0, self._limit / 4)
        silent, looked = 0.0, time.monotonic()
        while not self._over.wait(tick):
            now = time.monotonic()
            passed, looked = min(now - looked, 2 * tick), now  # a suspended machine is not a hang
            silent, self._moved = 0.0 if self._moved else silent + passed, False
            if silent > self._limit:
                faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
                logger.error(
                    "%s: no progress for %.0f s (config.log.hang_seconds), see the stacks of all threads above; "
                    "run the command again to resume from the newest checkpoint", self._what, silent,
                )  # fmt: skip
                self._end(HUNG)
                return


class Profiler:
    """Traces `TRACED` steps for TensorBoard or Perfetto whenever SIGUSR1 comes.

    A context manager. Of several processes only those that get the signal trace.
    """

    def __init__(self, folder: Path) -> None:
        """folder: of the traces, one folder a trace."""
        self._folder = folder
        self._asked = False
        self._until: int | None = None  # step before which the running trace ends
        self._handling = signal_handler(signal.SIGUSR1, self._request)

    def __enter__(self) -> Self:
        self._handling.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._until is not None:
            self._stop()
        self._handling.__exit__(None, None, None)

    def _request(self, *_: object) -> None:
        self._asked = True

    def at(self, step: int, last: Any = None) -> None:
        """Start or end a trace before this step. last: an array of the step before, which is waited for at the end."""
        if self._until is not None and step >= self._until:
            jax.block_until_ready(last)
            self._stop()
        if self._until is None and (self._asked):
            self._asked = False
            try:
                jax.profiler.start_trace(self._folder / str(step))
                self._until = step + TRACED
            except (OSError, RuntimeError) as fault:
                logger.warning("no profile of step %d: %s", step, fault)

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._until = None
        logger.info("a profile of %d steps is in %s", TRACED, self._folder)


class CompileGuard:
    """Warns when a step's program is compiled more often than for the lengths that its batches have: recompiling takes
    minutes and is never intended. What the compiler leaves behind is returned after each program."""

    def __init__(self, step: Any, expected: int = 1) -> None:
        self._count: Callable[[], int] = getattr(step, "_cache_size", lambda: 1)
        self._compiled = self._count()
        self._known = max(expected, self._compiled)

    def check(self, step: int) -> None:
        """To be called after a step."""
        count = self._count()
        if count > self._compiled:
            self._compiled = count
            free_heap()
        if count > self._known:
            logger.warning(
                "step %d: its program was compiled again (%d programs now): shape, dtype or place of an argument "
                "changed", step, count,
            )  # fmt: skip
            self._known = count
