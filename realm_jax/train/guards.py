"""Detect hangs and recompilation of a run, and profile it.

Nothing here changes the result of a run.
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
from realm_jax.run_log import save_stacks

logger = logging.getLogger(__name__)

EXIT_HUNG = 70  # exit code after no progress for too long
COMPILER = os.path.join("jax", "_src", "compiler.py")  # the module of JAX that calls XLA's compiler
TRACED_STEPS = 5  # in a profile


class Watchdog:
    """Context manager that ends the process with exit code `EXIT_HUNG` if `heartbeat` is not called for too long.

    A collective that waits for a dead process waits forever, and a supervisor restarts only processes that end. The
    stacks of all threads go to stderr and to the run's log first.

    Attributes:
        is_warm: set to true when the step's program is compiled, in all processes.
    """

    def __init__(self, limit: float, compile_limit: float, name: str, end: Callable[[int], Any] = os._exit) -> None:
        """Make a watchdog of this thread; entering its context starts the thread that watches.

        Args:
            limit: seconds without a heartbeat; 0 for no limit.
            compile_limit: the same while this thread compiles, and before `is_warm`.
            name: name of the task, for the error message.
            end: ends the process with an exit code.
        """
        self._limit, self._compile_limit, self._name, self._end = limit, compile_limit, name, end
        self._watched = threading.get_ident()
        self.is_warm = False
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
        silent, last_check = 0.0, time.monotonic()
        while not self._over.wait(tick):
            now = time.monotonic()
            passed, last_check = min(now - last_check, 2 * tick), now  # a suspended machine is not a hang
            silent, self._moved = 0.0 if self._moved else silent + passed, False
            if silent > self._limit and (silent > self._compile_limit > 0 or not self._may_compile()):
                faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
                logger.error(
                    "%s: no progress for %.0f s (config.log.hang_seconds, or log.compile_seconds while it compiles); "
                    "the log has the stacks of all threads; run the command again to resume from the newest "
                    "checkpoint", self._name, silent,
                )  # fmt: skip
                save_stacks()
                self._end(EXIT_HUNG)
                return

    def _may_compile(self) -> bool:
        """Return True if the watched thread compiles a program, or waits for other processes that compile the first."""
        if not self.is_warm:
            return True
        frame = sys._current_frames().get(self._watched)
        while frame is not None:
            if frame.f_code.co_filename.endswith(COMPILER):
                return True
            frame = frame.f_back
        return False


class Profiler:
    """Context manager that traces `TRACED_STEPS` steps for TensorBoard or Perfetto after each SIGUSR1.

    Of several processes only those that get the signal trace.
    """

    def __init__(self, folder: Path) -> None:
        """Make a profiler that writes each trace to `folder`/STEP."""
        self._folder = folder
        self._is_requested = False
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
        self._is_requested = True

    def at(self, step: int, last: Any = None) -> None:
        """Start or end a trace before a step.

        Args:
            step: number of steps that are done.
            last: arrays of the step before; a trace ends when they are computed.
        """
        if self._until is not None and step >= self._until:
            jax.block_until_ready(last)
            self._stop()
        if self._until is None and self._is_requested:
            self._is_requested = False
            try:
                jax.profiler.start_trace(self._folder / str(step))
                self._until = step + TRACED_STEPS
            except (OSError, RuntimeError) as error:
                logger.warning("no profile of step %d: %s", step, error)

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._until = None
        logger.info("a profile of %d steps is in %s", TRACED_STEPS, self._folder)


class CompileGuard:
    """Warns if a step's program is compiled more often than its batches have lengths.

    Recompiling takes minutes and is never intended. After each compilation we free the compiler's memory.
    """

    def __init__(self, step: Any, expected: int = 1) -> None:
        """Count the programs from now on.

        Args:
            step: a jitted function.
            expected: number of programs without a warning.
        """
        self._count: Callable[[], int] = getattr(step, "_cache_size", lambda: 1)
        self._compiled = self._count()
        self._known = max(expected, self._compiled)

    def check(self, step: int) -> None:
        """Compare the number of programs after a step, and warn if it grew beyond the expected one."""
        count = self._count()
        if count > self._compiled:
            self._compiled = count
            free_heap()
        if count > self._known:
            logger.warning(
                "step %d: its program was compiled again (%d programs now): shape, dtype or sharding of an argument "
                "changed", step, count,
            )  # fmt: skip
            self._known = count
