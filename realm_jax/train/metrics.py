"""Log the metrics of a task: records on disk, a progress bar, warnings and trackers.

Metrics come one step late, so that the host reads those of step s while the devices work on step s + 1. A resumed run
truncates its records to the step that it resumes from, so a file never holds a step twice.
Read next: `monitors.py`, which warns; `trackers.py`, which sends the values to other programs.
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

BAR_METRICS = ("loss", "retrieval_utility", "recall@5", "null_probability", "accuracy")
WAITS = ("data", "index", "measurement", "checkpoint")
SPEEDS = ("steps_per_second", "step_seconds", "tflops_per_device", "mfu", "goodput")
TIMES = ("seconds", *SPEEDS, *(f"wait_{name}" for name in WAITS))  # entries of a record that no two runs share
TIMED_STEPS = 100  # `step_seconds` is the median of the last ones
Values = dict[str, jax.Array]  # scalars on the devices


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The cost of a training step.

    Attributes:
        flops: floating-point operations of a step (`flops.py`).
        devices: number of devices that share them.
        peak: operations a second that a device can do; None if unknown.
    """

    flops: float
    devices: int
    peak: float | None


class Progress(NamedTuple):
    """A record of a run, for a listener.

    Attributes:
        task: name of the task's folder.
        kind: 'metrics' or 'evaluations', the file of the record.
        step: number of steps that are done.
        values: metric → value.
    """

    task: str
    kind: str
    step: int
    values: dict[str, Any]


Listener = Callable[[Progress], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Call the listener with every record of tasks that begin in this context, after the record is written.

    It is called in the thread that trains. If it raises an exception, the task ends as after Ctrl-C.
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class MetricLogger:
    """Context manager for the records, progress bar and warnings of a task; leaving it closes bar and files.

    Every record of a step has these times; waits are shares of the seconds since this start:
    wait_data          the loop waited for input or a search
    wait_index         for an index
    wait_measurement   for an evaluation
    wait_checkpoint    until a save had copied the arrays
    step_seconds       median of the last `TIMED_STEPS` steps, with the wait for data and without the others
    tflops_per_device  operations / step_seconds / devices / 1e12
    mfu                operations / step_seconds / devices / peak, if the peak is known
    goodput            steps × step_seconds / seconds since the first start; restarts, compilation, waits and repeated
                       steps make it less than 1
    """

    def __init__(
        self, folder: Path, task: str, start: int, total: int, cost: StepCost, record: dict[str, Any],
        last_saved: Callable[[], int | None] = lambda: None,
        monitors: Sequence[Monitor] = (),
        trackers: CompositeTracker | None = None,
    ) -> None:  # fmt: skip
        """Open the files and the bar.

        Args:
            folder: folder of the files; its name is the bar's title.
            task: its name, for the error of a loss that is not finite.
            start: number of steps that are done.
            total: number of steps of the task.
            cost: cost of a step.
            record: record of the checkpoint that the task resumes from, {} for none; we read `seconds` (spent) and
                `first_started` (Unix time).
            last_saved: returns the newest saved step.
            monitors: each returns a warning or None for a record.
            trackers: get the values of every record.
        """
        self._folder, self._task, self._start = folder, task, start
        self._cost, self._last_saved = cost, last_saved
        self._trackers = CompositeTracker({}) if trackers is None else trackers
        self._listener = _listener.get()
        self._metrics = RecordWriter(folder, "metrics", start)
        # An evaluation follows the save of its step, so a run that resumes from that save repeats the evaluation.
        self._evaluations = RecordWriter(folder, "evaluations", start - 1)
        self._monitors = monitors
        for earlier in self._metrics.earlier_records + self._evaluations.earlier_records:
            for monitor in monitors:
                monitor(earlier)  # its warning was logged before, but the monitor needs the history
        self._bar = StageProgress(folder.name, total, start)
        self._shown: dict[str, Any] = {}
        self._pending: tuple[int, Values, dict[str, int]] | None = None
        self._began, self._before = time.monotonic(), float(record.get("seconds", 0.0))
        self.first_started: float = record.get("first_started") or time.time()
        self._waited = dict.fromkeys(WAITS, 0.0)
        self._steps: deque[float] = deque(maxlen=TIMED_STEPS)

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)
        self._trackers.finish()  # first, because closing the files fails on a full disk
        self._metrics.close()
        self._evaluations.close()

    # --- Time

    @property
    def seconds(self) -> float:
        """Return the seconds spent on the task, earlier starts included."""
        return self._before + time.monotonic() - self._began

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Count the time of this context as a wait for a cause, one of `WAITS`."""
        began = time.monotonic()
        yield
        self._waited[cause] += time.monotonic() - began

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a step without its waits, except for data: the devices work during that one."""
        began, waited = time.monotonic(), self._idle()
        yield
        self._steps.append(time.monotonic() - began - (self._idle() - waited))

    def _idle(self) -> float:
        return sum(seconds for name, seconds in self._waited.items() if name != "data")

    # --- Records

    def log_evaluation(self, step: int, values: dict[str, Any]) -> None:
        """Record an evaluation.

        Args:
            step: number of training steps that made the parameters.
            values: metric → value.
        """
        self._shown |= values
        self._record(self._evaluations, "evaluations", step, values)

    def log_step(self, step: int, values: Values, host_values: dict[str, int]) -> None:
        """Keep the metrics of a step that has just started, until `flush` fetches them after the next start.

        Args:
            step: number of steps with this one.
            values: on the devices.
            host_values: metrics that the host knows.
        """
        self.flush()
        self._pending = step, values, host_values

    def flush(self) -> None:
        """Fetch and record the pending metrics. Raises UserError as `fetch` does."""
        if self._pending is None:
            return
        (step, values, host_values), self._pending = self._pending, None
        numbers: dict[str, Any] = self.fetch(step, values) | host_values
        elapsed = time.monotonic() - self._began
        times = {"steps_per_second": (step - self._start) / elapsed}
        times |= {f"wait_{name}": self._waited[name] / elapsed for name in WAITS}
        if self._steps:
            seconds = statistics.median(self._steps)
            speed = self._cost.flops / seconds / self._cost.devices  # operations a second of a device
            times |= {"step_seconds": seconds, "tflops_per_device": speed / 1e12}
            times["goodput"] = min(1.0, step * seconds / max(time.time() - self.first_started, seconds))
            times |= {"mfu": speed / self._cost.peak} if self._cost.peak else {}
        self._shown |= numbers
        self._bar.update(step, {key: self._shown[key] for key in BAR_METRICS if key in self._shown})
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
        """Return the metrics of a step as floats.

        If loss and gradient are finite, so are the parameters that the step made.

        Args:
            step: number of steps with this one.
            values: on the devices.

        Raises:
            UserError: the loss or the gradient is not finite.
        """
        numbers = {key: float(value) for key, value in jax.device_get(values).items()}
        for key in ("loss", "gradient_norm"):
            if not np.isfinite(numbers[key]):
                saved_step = self._last_saved()
                newest = f"the last good checkpoint is {self._folder.name}/{saved_step}"
                raise UserError(
                    f"step {step} of {self._task}: the {key.replace('_', ' ')} is not finite; "
                    f"{'nothing is saved yet' if saved_step is None else newest}; lower "
                    f"config.{self._task}.learning_rate and start in another --workdir"
                )
        return numbers


# --- Files ------------------------------------------------------------------------------------------------------------


class RecordWriter:
    """Appends records {"step": …, name: value, …} to `folder/name.jsonl`, in process 0.

    Attributes:
        earlier_records: records that were in the file and stay.
    """

    def __init__(self, folder: Path, name: str, last: int):
        """Open a file, and truncate it.

        Args:
            folder: made if it is missing.
            name: name of the file, without ending.
            last: step after which records are removed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.jsonl"
        self.earlier_records = [record for record in read_lines(path) if record["step"] <= last]
        self._stream: IO[str] | None = None
        if not is_process_0():
            return
        write_atomic(path, "".join(json.dumps(record) + "\n" for record in self.earlier_records))
        self._stream = path.open("a")

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Append a record, and flush it so that it survives a killed run.

        Args:
            step: number of steps that are done.
            values: metric → value.
        """
        if self._stream is None:
            return
        self._stream.write(json.dumps({"step": step} | values) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
