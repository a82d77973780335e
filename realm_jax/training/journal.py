"""What one task tells while it trains: records on disk, a progress bar, warnings. The loop's side of `metrics.py`.

Metrics come one step late, so that the host reads those of step s while the devices work on step s + 1.
Read next: `health.py`, which watches the values.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from realm_jax.console import StageProgress
from realm_jax.errors import UserError
from realm_jax.training.health import Watch
from realm_jax.training.metrics import MetricsWriter

logger = logging.getLogger(__name__)

SHOWN = ("loss", "retrieval_utility", "recall@5", "null_probability", "accuracy")
Values = dict[str, jax.Array]  # scalars on the devices


class Journal:
    """The records, progress and warnings of one task. A context manager: leaving closes bar and files."""

    def __init__(self, folder: Path, task: str, start: int, total: int, seconds: float):
        """start: steps that are done, in `seconds`. The bar carries the folder's name, warnings go by the task's."""
        self._task, self._start, self._before = task, start, seconds
        self._metrics = MetricsWriter(folder, "metrics", start)
        # A refresh follows the save of its step, so a run that goes on from that save makes and measures it again.
        self._evaluations = MetricsWriter(folder, "evaluations", start - 1)
        self._watch = Watch()
        for record in self._metrics.kept + self._evaluations.kept:
            self._warning(record)  # told already, but the watch compares with what was
        self._bar = StageProgress(folder.name, total, start)
        self._shown: dict[str, Any] = {}
        self._pending: tuple[int, Values, dict[str, int]] | None = None
        self._waited, self._began = 0.0, time.monotonic()

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
    def waiting_for_data(self) -> Iterator[None]:
        """Around what may wait for data: counts the time."""
        asked = time.monotonic()
        yield
        self._waited += time.monotonic() - asked

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
        numbers = fetch(self._task, step, values) | further
        elapsed = time.monotonic() - self._began
        speed = {"steps_per_second": (step - self._start) / elapsed, "wait_data": self._waited / elapsed}
        self._metrics.write(step, numbers | speed | {"seconds": self.seconds})
        self._shown |= numbers
        self._bar.update(step, {key: self._shown[key] for key in SHOWN if key in self._shown})
        self._tell({"step": step} | numbers)

    def _tell(self, record: dict[str, Any]) -> None:
        message = self._warning(record)
        if message:
            logger.warning(message)

    def _warning(self, record: dict[str, Any]) -> str | None:
        """What the watch says of a record of metrics or of a measurement."""
        if "answer_in_passages" in record:
            return self._watch.answers(record["step"], record["answer_in_passages"])
        if self._task != "realm":
            return None
        if "null_probability" in record:
            return self._watch.step(record["step"], record["null_probability"], record["best_candidate_gain"])
        return self._watch.recall(record["step"], record["recall@5"]) if "recall@5" in record else None


def fetch(task: str, step: int, values: Values) -> dict[str, float]:
    """The metrics of a step as floats. Raises UserError when its loss or gradient is not finite.

    If both are finite, so are the parameters that the step made.
    """
    numbers = {key: float(value) for key, value in jax.device_get(values).items()}
    for key in ("loss", "gradient_norm"):
        if not np.isfinite(numbers[key]):
            raise UserError(
                f"step {step} of {task}: the {key.replace('_', ' ')} is not finite; lower config.{task}.learning_rate "
                "and start in another --workdir"
            )
    return numbers
