"""Metrics of one task in training: records on disk, a progress bar, warnings; and what trackers get.

Metrics come one step late, so that the host reads those of step s while the devices work on step s + 1. A resumed run
cuts its records back to the step that it resumes from, so that a file never holds a step twice.
Read next: `monitors.py`, which watches the values; `trackers.py`, where else they go.
"""

import dataclasses
import json
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import jax
import numpy as np

from realm_jax.console import StageProgress
from realm_jax.errors import UserError
from realm_jax.processes import is_process_0
from realm_jax.storage import write_atomic
from realm_jax.train.monitors import Monitor
from realm_jax.train.records import read_lines
from realm_jax.train.trackers import CompositeTracker

logger = logging.getLogger(__name__)

SHOWN = ("loss", "retrieval_utility", "recall@5", "null_probability", "accuracy")
WAITS = ("data", "index", "measurement", "checkpoint")
SPEEDS = ("steps_per_second", "step_seconds", "tflops_per_device", "mfu", "goodput")
TIMES = ("seconds", *SPEEDS, *(f"wait_{name}" for name in WAITS))  # entries of a record that no two runs share
TIMED = 100  # steps that the median is taken of
Values = dict[str, jax.Array]  # scalars on the devices


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The cost of a step. flops: operations (`flops.py`); devices: how many; peak: of one, a second."""

    flops: float
    devices: int
    peak: float | None


class Progress(NamedTuple):
    """A record of a run as it is made. task: the name of its folder; kind: 'metrics' or 'evaluations', the file."""

    task: str
    kind: str
    step: int
    values: dict[str, Any]


Listener = Callable[[Progress], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Within it every record of tasks that begin is given to the listener, in the thread that trains, once it is
    written. What it raises ends the task as Ctrl-C does."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class MetricLogger:
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
        self, folder: Path, task: str, start: int, total: int, work: StepCost, record: dict[str, Any],
        last_saved: Callable[[], int | None] = lambda: None,
        monitors: Sequence[Monitor] = (),
        trackers: CompositeTracker | None = None,
    ) -> None:  # fmt: skip
        """start: steps that are done. record: of the checkpoint that the task resumes from, {} for none; of its entries
        `seconds` (spent) and `first_started` (of the task, as `time.time()`) count. last_saved: the newest step that is
        saved. monitors: each says a warning, or None, of each record. trackers: get the values of every record. The bar
        carries the folder's name."""
        self._folder, self._task, self._start = folder, task, start
        self._work, self._last_saved = work, last_saved
        self._trackers = CompositeTracker({}) if trackers is None else trackers
        self._listener = _listener.get()
        self._metrics = RecordWriter(folder, "metrics", start)
        # An evaluation follows the save of its step, so a run that resumes from that save makes it again.
        self._evaluations = RecordWriter(folder, "evaluations", start - 1)
        self._monitors = monitors
        for earlier in self._metrics.kept + self._evaluations.kept:
            for monitor in monitors:
                monitor(earlier)  # already warned about, but the monitor needs the history
        self._bar = StageProgress(folder.name, total, start)
        self._shown: dict[str, Any] = {}
        self._pending: tuple[int, Values, dict[str, int]] | None = None
        self._began, self._before = time.monotonic(), float(record.get("seconds", 0.0))
        self.first_started: float = record.get("first_started") or time.time()
        self._waited = dict.fromkeys(WAITS, 0.0)
        self._steps: deque[float] = deque(maxlen=TIMED)

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)
        self._trackers.finish()  # first, as closing the files fails on a full disk
        self._metrics.close()
        self._evaluations.close()

    # --- Time

    @property
    def seconds(self) -> float:
        """Spent on the task, earlier starts included."""
        return self._before + time.monotonic() - self._began

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Around what makes the devices wait, one of `WAITS`: counts the time."""
        began = time.monotonic()
        yield
        self._waited[cause] += time.monotonic() - began

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: times it without its waits, but for those for data, during which the devices work."""
        began, waited = time.monotonic(), self._idle()
        yield
        self._steps.append(time.monotonic() - began - (self._idle() - waited))

    def _idle(self) -> float:
        return sum(seconds for name, seconds in self._waited.items() if name != "data")

    # --- Records

    def log_evaluation(self, step: int, values: dict[str, Any]) -> None:
        """Record the evaluation of the parameters before a step."""
        self._shown |= values
        self._record(self._evaluations, "evaluations", step, values)

    def log_step(self, step: int, values: Values, further: dict[str, int]) -> None:
        """Take the metrics of a step that was only just started; `flush` fetches them, once the next one is started."""
        self.flush()
        self._pending = step, values, further

    def flush(self) -> None:
        """Fetch and record the metrics that were taken last. Raises UserError as `fetch` does."""
        if self._pending is None:
            return
        (step, values, further), self._pending = self._pending, None
        numbers: dict[str, Any] = self.fetch(step, values) | further
        elapsed = time.monotonic() - self._began
        times = {"steps_per_second": (step - self._start) / elapsed}
        times |= {f"wait_{name}": self._waited[name] / elapsed for name in WAITS}
        if self._steps:
            seconds = statistics.median(self._steps)
            speed = self._work.flops / seconds / self._work.devices  # operations a second of a device
            times |= {"step_seconds": seconds, "tflops_per_device": speed / 1e12}
            times["goodput"] = min(1.0, step * seconds / max(time.time() - self.first_started, seconds))
            times |= {"mfu": speed / self._work.peak} if self._work.peak else {}
        self._shown |= numbers
        self._bar.update(step, {key: self._shown[key] for key in SHOWN if key in self._shown})
        self._record(self._metrics, "metrics", step, numbers | times | {"seconds": self.seconds})

    def _record(self, writer: "RecordWriter", kind: str, step: int, values: dict[str, Any]) -> None:
        writer.write(step, values)
        self._trackers.log(kind, step, values)
        if self._listener is not None:
            self._listener(Progress(self._folder.name, kind, step, values))
        for monitor in self._monitors:
            if message := monitor({"step": step} | values):
                logger.warning(message)

    def fetch(self, step: int, values: Values) -> dict[str, float]:
        """The metrics of a step as floats. Raises UserError when its loss or gradient is not finite.

        If both are finite, so are the parameters that the step made.
        """
        numbers = {key: float(value) for key, value in jax.device_get(values).items()}
        for key in ("loss", "gradient_norm"):
            if not np.isfinite(numbers[key]):
                good = self._last_saved()
                newest = f"the last good checkpoint is {self._folder.name}/{good}"
                raise UserError(
                    f"step {step} of {self._task}: the {key.replace('_', ' ')} is not finite; "
                    f"{'nothing is saved yet' if good is None else newest}; lower "
                    f"config.{self._task}.learning_rate and start in another --workdir"
                )
        return numbers


# --- Files ------------------------------------------------------------------------------------------------------------


class RecordWriter:
    """Appends records {"step": …, name: value, …} to `folder/name.jsonl`. Of several processes the first one writes."""

    def __init__(self, folder: Path, name: str, last: int):
        """`last`: records of later steps are removed; those that stay are `kept`."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.jsonl"
        self.kept = [record for record in read_lines(path) if record["step"] <= last]
        self._stream: IO[str] | None = None
        if not is_process_0():
            return
        write_atomic(path, "".join(json.dumps(record) + "\n" for record in self.kept))
        self._stream = path.open("a")

    def write(self, step: int, values: dict[str, Any]) -> None:
        """One record, flushed, so that a killed run keeps it."""
        if self._stream is None:
            return
        self._stream.write(json.dumps({"step": step} | values) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file; nothing can be written afterwards."""
        if self._stream is not None:
            self._stream.close()
