"""Log lines and progress bars, on stderr, so that stdout is free for results.

Rich detects the abilities of the output (a terminal or a file, its width, `NO_COLOR`). One console serves bars and log
lines, so that a line appears above a running bar and not through it. `realm_jax/train/metrics.py` writes metrics to
files.
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

# Narrower terminals show no bar: steps, loss and remaining time are more useful than eight cells of a bar.
WIDTH_FOR_BAR = 72
BAR_WIDTH = 16
_CONTROLS = dict.fromkeys([*range(32), *range(127, 160)], " ")


class _Console(Console):
    """Discard output once the reader is gone, because training outlives the terminal that started it."""

    def on_broken_pipe(self) -> None:
        go_silent()


def go_silent() -> None:
    """Discard buffered and later output to stderr, after its reader is gone."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())


@functools.cache
def console() -> Console:
    """Return the console on stderr for all progress bars and log lines."""
    return _Console(stderr=True)


def printable(text: str) -> str:
    """Replace each control character of a text by a space, so that the text cannot control a terminal.

    Use it for text from passages and other files. Print it as rich's `Text`, because a str is markup.
    """
    return text.translate(_CONTROLS)


def set_up_logging() -> None:
    """Send the log lines of this package to the console; those of other libraries are not changed."""
    package = logging.getLogger("realm_jax")
    package.setLevel(logging.INFO)
    package.propagate = False  # absl, which other libraries set up, would print every line again
    package.handlers = [_ConsoleHandler()]


class _ConsoleHandler(logging.Handler):
    """Print `12:34:56 message`, unwrapped, so that a log file has one line per message."""

    def emit(self, record: logging.LogRecord) -> None:
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        style = {logging.WARNING: "yellow", logging.ERROR: "bold red"}.get(record.levelno, "")
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        line = Text.assemble((moment, "dim"), " ", (prefix + record.getMessage(), style))
        with contextlib.suppress(OSError):  # a terminal that hung up, a full disk
            console().print(line, soft_wrap=True)


class StageProgress:
    """Show the progress of one stage of a run. A context manager.

        with StageProgress("realm", total=600, start=200) as bar:
            bar.update(201, {"loss": 1.2, "recall": 0.5})

    On a terminal it is a bar with steps, the first metric values that fit, and the remaining time. Elsewhere it is a
    log line at the first update, at most every `every_seconds`, and at the end; from the second line on with the
    remaining time, estimated from the steps after the first update.
    """

    def __init__(
        self, name: str, total: int | None, start: int = 0, *, to: Console | None = None,
        every_seconds: float = 10.0, bar: bool = True, clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        """Prepare the progress of a stage.

        Args:
            name: name of the stage.
            total: its steps; None if unknown.
            start: steps that are finished already, if the stage goes on from a checkpoint.
            to: console that shows it; None for stderr.
            every_seconds: between two log lines.
            bar: False for log lines even on a terminal, if it shows another bar.
            clock: returns seconds.
        """
        self._name, self._total, self._start, self._step = name, total, start, start
        self._every_seconds, self._clock = every_seconds, clock
        self._metrics: Mapping[str, float] = {}
        self._first: tuple[float, int] | None = None  # time and step of the first update, after compilation
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
        """Show that steps are finished.

        Args:
            step: number of finished steps.
            metrics: values to show; None to keep the last ones.
        """
        self._step = step
        self._first = self._first or (self._clock(), step)
        self._metrics = metrics or self._metrics
        if self._bar:
            # As many of the first metrics as there is space for; never a truncated number.
            width, shown = self._bar.console.width, dict(self._metrics)
            steps_and_time = 2 * len(str(self._total or step)) + len("/") + len("0:00:00")
            max_length = width - len(self._name) - steps_and_time - 3 - (BAR_WIDTH + 1 if width >= WIDTH_FOR_BAR else 0)
            while shown and len(describe(shown)) > max_length:
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
        finished, remaining = self._step - start, total - self._step
        if finished > 0 and remaining > 0:
            parts.append(f"{timedelta(seconds=round((now - began) / finished * remaining))} left")
        logger.info("  ".join(part for part in parts if part))


def describe(metrics: Mapping[str, float]) -> str:
    """Return names and values with four digits, such as 'loss 1.234  recall 0.5'."""
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
