"""What one task tells while it trains: records on disk, a progress bar, warnings. The loop's side of `metrics.py`.

Metrics come one step late, so that the host reads those of step s while the devices work on step s + 1.
Read next: `tasks/collapse.py`, which watches the values.
"""

import dataclasses
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from realm_jax.console import StageProgress
from realm_jax.errors import UserError
from realm_jax.training.metrics import MetricsWriter

logger = logging.getLogger(__name__)

SHOWN = ("loss", "retrieval_utility", "recall@5", "null_probability", "f1", "accuracy")
WAITS = ("data", "index", "measurement", "checkpoint")
SPEEDS = ("steps_per_second", "step_seconds", "tflops_per_device", "mfu", "goodput")
TIMES = ("seconds", *SPEEDS, *(f"wait_{name}" for name in WAITS))  # entries of a record that no two runs share
TIMED = 100  # steps that the median is taken of
Values = dict[str, jax.Array]  # scalars on the devices


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step is, for the records. flops: operations (`flops.py`); devices: how many; peak: of one, a second."""

    flops: float
    devices: int
    peak: float | None


class Journal:
    """The records, progress and warnings of one task. A context manager: leaving closes bar and files.

    What every record says of time; waits are shares of the seconds since this start:
    wait_data, wait_index, wait_measurement, wait_checkpoint
                                             the loop waited for input or a search, for an index, for the measurement
                                             that follows it, for a save to be taken over
    step_seconds                             median of the last `TIMED` steps; of these waits it holds the one for data
    tflops_per_device, mfu                   operations over step_seconds and devices; over the peak, if that is known
    goodput                                  steps done × step_seconds over all seconds since the first start that a
                                             save remembers: what restarts, compiling, waits and repeats leave
    """

    def __init__(
        self, folder: Path, task: str, start: int, total: int, seconds: float, work: Work, born: float | None = None,
        last_good: Callable[[], int | None] = lambda: None,
        monitor: Callable[[dict[str, Any]], str | None] = lambda record: None,
    ) -> None:  # fmt: skip
        """start: steps that are done, in `seconds`. born: when the task was first started, as `time.time()`; None: now.
        last_good: newest step that is saved. monitor: says a warning, or None, of each record. The bar carries the
        folder's name."""
        self._folder, self._task, self._start, self._before = folder, task, start, seconds
        self._work, self._last_good = work, last_good
        self._metrics = MetricsWriter(folder, "metrics", start)
        # A refresh follows the save of its step, so a run that goes on from that save makes and measures it again.
        self._evaluations = MetricsWriter(folder, "evaluations", start - 1)
        self._monitor = monitor
        for record in self._metrics.kept + self._evaluations.kept:
            self._monitor(record)  # told already, but it compares with what was
        self._bar = StageProgress(folder.name, total, start)
        self._shown: dict[str, Any] = {}
        self._pending: tuple[int, Values, dict[str, int]] | None = None
        self._began, self.born = time.monotonic(), time.time() if born is None else born
        self._waited = dict.fromkeys(WAITS, 0.0)
        self._steps: deque[float] = deque(maxlen=TIMED)

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)
        self._metrics.close()
        self._evaluations.close()

    @property
    def seconds(self) -> float:
        """Spent on the task, earlier starts included."""
        return self._before + time.monotonic() - self._began

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around what makes the devices wait, one of `WAITS`: counts the time."""
        asked = time.monotonic()
        yield
        self._waited[what] += time.monotonic() - asked

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: times it without its waits, but for those for data, during which the devices work."""
        began, waited = time.monotonic(), self._idle()
        yield
        self._steps.append(time.monotonic() - began - (self._idle() - waited))

    def _idle(self) -> float:
        return sum(seconds for name, seconds in self._waited.items() if name != "data")

    def measured(self, step: int, found: dict[str, Any]) -> None:
        """Record a measurement."""
        self._evaluations.write(step, found)
        self._shown |= found
        self._tell({"step": step} | found)

    def stepped(self, step: int, values: Values, further: dict[str, int]) -> None:
        """Hand over the metrics of a step that was only just started; they are fetched at the next call or `flush`."""
        self.flush()
        self._pending = step, values, further

    def flush(self) -> None:
        """Fetch and record the metrics that were handed over last. Raises UserError as `fetch` does."""
        if self._pending is None:
            return
        (step, values, further), self._pending = self._pending, None
        numbers = self.fetch(step, values) | further
        self._metrics.write(step, numbers | self._times(step) | {"seconds": self.seconds})
        self._shown |= numbers
        self._bar.update(step, {key: self._shown[key] for key in SHOWN if key in self._shown})
        self._tell({"step": step} | numbers)

    def _tell(self, record: dict[str, Any]) -> None:
        message = self._monitor(record)
        if message:
            logger.warning(message)

    def _times(self, step: int) -> dict[str, float]:
        elapsed = time.monotonic() - self._began
        found = {"steps_per_second": (step - self._start) / elapsed}
        found |= {f"wait_{name}": self._waited[name] / elapsed for name in WAITS}
        if not self._steps:
            return found
        seconds = statistics.median(self._steps)
        speed = self._work.flops / seconds / self._work.devices
        found |= {"step_seconds": seconds, "tflops_per_device": speed / 1e12}
        found["goodput"] = min(1.0, step * seconds / max(time.time() - self.born, seconds))
        return found | ({"mfu": speed / self._work.peak} if self._work.peak else {})

    def fetch(self, step: int, values: Values) -> dict[str, float]:
        """The metrics of a step as floats. Raises UserError when its loss or gradient is not finite.

        If both are finite, so are the parameters that the step made.
        """
        numbers = {key: float(value) for key, value in jax.device_get(values).items()}
        for key in ("loss", "gradient_norm"):
            if not np.isfinite(numbers[key]):
                good = self._last_good()
                saved = (
                    "nothing is saved yet"
                    if good is None
                    else f"the last good checkpoint is {self._folder.name}/{good}"
                )
                raise UserError(
                    f"step {step} of {self._task}: the {key.replace('_', ' ')} is not finite; {saved}; lower "
                    f"config.{self._task}.learning_rate and start in another --workdir"
                )
        return numbers
