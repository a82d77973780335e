"""Log lines and progress bars, on stderr, so that stdout is free for results.

Rich finds out what the other end can show (a terminal or a file, its width, `NO_COLOR`); here is decided what is said.
One console serves bars and log lines, so that a line appears above a running bar and not through it.
Not for metrics that are kept: those are written by `realm_jax/train/metrics.py`.
"""

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

logger = logging.getLogger(__name__)

# Below this width the bar itself is left out: steps, loss and time left say more than eight cells of a bar.
WIDTH_FOR_BAR = 72
BAR_WIDTH = 16
_CONTROLS = dict.fromkeys([*range(32), *range(127, 160)], " ")


class _Console(Console):
    """Discards output once the reader is gone: training outlives the terminal that started it."""

    def on_broken_pipe(self) -> None:
        go_silent()


def go_silent() -> None:
    """Discard all further and buffered output to stderr, since its reader is gone."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())


@functools.cache
def console() -> Console:
    """The console on stderr that all progress and log lines go through."""
    return _Console(stderr=True)


def printable(text: str) -> str:
    """`text` with a space for each control character, so that it cannot steer a terminal and spans stay in place.

    For what comes from passages and other files, which may hold anything. Print it as rich's `Text`: a str is markup.
    """
    return text.translate(_CONTROLS)


def set_up_logging(level: int = logging.INFO) -> None:
    """Sends the log lines of this package to the console; warnings of other libraries keep their own way."""
    package = logging.getLogger("realm_jax")
    package.setLevel(level)
    package.propagate = False  # absl, which other libraries set up, would print every line again
    package.handlers = [_ConsoleHandler()]


class _ConsoleHandler(logging.Handler):
    """Prints `12:34:56 message`, unwrapped, so that a log file has one line a message."""

    def emit(self, record: logging.LogRecord) -> None:
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        style = {logging.WARNING: "yellow", logging.ERROR: "bold red"}.get(record.levelno, "")
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        line = Text.assemble((moment, "dim"), " ", (prefix + record.getMessage(), style))
        with contextlib.suppress(OSError):  # a terminal that hung up, a full disk
            console().print(line, soft_wrap=True)


class StageProgress:
    """Progress of one stage of a run, used as a context manager.

        with StageProgress("realm", total=600, start=200) as bar:
            bar.update(201, {"loss": 1.2, "recall": 0.5})

    `total` (None: not known) and `start` are counts of finished steps; `start` is not zero for a stage that goes on
    from a checkpoint. On a terminal it is a bar with steps, metric values (plain floats; the first ones that fit) and
    time left. Elsewhere, and where another bar is shown already (`bar`), it is a log line at the first update, at most
    every `every_seconds`, and at the end; the time left is shown from the second on, by what came after the first.
    """

    def __init__(
        self, name: str, total: int | None, start: int = 0, *, to: Console | None = None,
        every_seconds: float = 10.0, bar: bool = True, clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self._name, self._total, self._start, self._step = name, total, start, start
        self._every_seconds, self._clock = every_seconds, clock
        self._metrics: Mapping[str, float] = {}
        self._first: tuple[float, int] | None = None  # of the updates: before it programs are compiled
        self._last_line: tuple[float, int] | None = None
        self._bar: Progress | None = None
        target = to or console()
        if bar and target.is_terminal:
            columns: list[ProgressColumn] = [TextColumn("{task.description}", style="bold"), MofNCompleteColumn()]
            columns[1:1] = [BarColumn(bar_width=BAR_WIDTH)] if target.width >= WIDTH_FOR_BAR else []
            columns += [TextColumn("{task.fields[metrics]}"), TimeRemainingColumn(compact=True)]
            self._bar = Progress(*columns, console=target)

    def __enter__(self) -> "StageProgress":
        if self._bar:
            self._task = self._bar.add_task(self._name, total=self._total, completed=self._start, metrics="")
            self._bar.start()
        return self

    def update(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Shows that `step` steps are finished; without `metrics` the last ones stay."""
        self._step = step
        self._first = self._first or (self._clock(), step)
        self._metrics = metrics or self._metrics
        if self._bar:
            # The first metrics, as many as there is room for; never a truncated number.
            width, shown = self._bar.console.width, dict(self._metrics)
            steps_and_time = 2 * len(str(self._total or step)) + len("/") + len("0:00:00")
            room = width - len(self._name) - steps_and_time - 3 - (BAR_WIDTH + 1 if width >= WIDTH_FOR_BAR else 0)
            while shown and len(describe(shown)) > room:
                shown.popitem()
            self._bar.update(self._task, completed=step, metrics=describe(shown))
        elif self._last_line is None or self._clock() - self._last_line[0] >= self._every_seconds:
            self._log()

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()
        elif self._last_line is None or self._last_line[1] != self._step:
            self._log()

    def _log(self) -> None:
        now = self._clock()
        self._last_line = (now, self._step)
        total = self._total or self._step
        parts = [f"{self._name} {self._step}" + (f"/{total}" if self._total else ""), describe(self._metrics)]
        began, start = self._first or (now, self._step)
        done, left = self._step - start, total - self._step
        if done > 0 and left > 0:
            parts.append(f"{timedelta(seconds=round((now - began) / done * left))} left")
        logger.info("  ".join(part for part in parts if part))


def describe(metrics: Mapping[str, float]) -> str:
    """`loss 1.234  recall 0.5`: names and values to four digits."""
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
