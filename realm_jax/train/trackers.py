"""Send the values of a task to the trackers in `config.log.to`: TensorBoard's files, Weights & Biases.

A tracker has one run for each task, and its package is imported only if the config names it. Weights & Biases reads
environment variables (`WANDB_PROJECT`, `WANDB_MODE`, …). TASK/trackers.json has the id of its run, so that a resumed
task continues it; repeated steps are sent again. For other trackers see `callback` of `realm_jax.train_model`.
"""

import importlib.util
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from realm_jax.config import tracker_names
from realm_jax.errors import UserError
from realm_jax.processes import run_on_process_0
from realm_jax.storage import read_json, write_json_atomic

logger = logging.getLogger(__name__)

PROJECT = "realm_jax"  # unless WANDB_PROJECT names another
IDS = "trackers.json"
PREFIXES = {"metrics": "train", "evaluations": "evaluation"}  # file of the record → prefix of its values' names
CLOSE_SECONDS = 20.0  # maximal wait for uploads at the end of a task: less than the grace period after SIGTERM
QUEUE = 1000  # values that may wait for TensorBoard's file


class TaskRun(NamedTuple):
    """The run of a task as trackers see it.

    Attributes:
        folder: WORKDIR/TASK.
        start: number of steps that are done.
        settings: dotted key of the config → value.
    """

    folder: Path
    start: int
    settings: Mapping[str, Any]


class TensorBoard:
    """Writes files to TASK/tensorboard/<kind>, in which repeated steps replace the earlier ones."""

    def __init__(self, run: TaskRun) -> None:
        self._folder = run.folder / "tensorboard"
        # A resumed task repeats the evaluation of its first step.
        first_steps = {"metrics": run.start + 1, "evaluations": run.start}
        self._writers = {kind: self._open(kind, step) for kind, step in first_steps.items()}

    def _open(self, kind: str, step: int) -> Any:
        """Open a new file, whose values replace those of earlier files from a step on."""
        from tensorboardX import SummaryWriter  # here, since it imports torch if that is installed: seconds

        return SummaryWriter(str(self._folder / kind), purge_step=step, max_queue=QUEUE)

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a record.

        Args:
            kind: 'metrics' or 'evaluations'.
            step: number of steps of the task that are done.
            values: metric → value.
        """
        # A full disk ends the library's thread. Then its queue would fill up, and training would wait for it forever.
        if not self._writers[kind].file_writer.event_writer._worker.is_alive():
            self._writers[kind] = self._open(kind, step)
        for name, value in values.items():
            self._writers[kind].add_scalar(name, value, step)

    def finish(self) -> None:
        """Flush and close the files."""
        event_writers = [writer.file_writer.event_writer for writer in self._writers.values()]
        try:
            for writer in self._writers.values():
                writer.close()
        except OSError:  # on a full disk; at exit the library would fail again, with tracebacks
            for event_writer in event_writers:
                if not event_writer._closed:
                    event_writer._worker.stop()
                    event_writer._closed = True
            raise


class WeightsAndBiases:
    """Sends values to a run of wandb, with the methods of `TensorBoard`.

    The steps of wandb can only grow, so we plot values over our own `step`.
    """

    def __init__(self, run: TaskRun) -> None:
        import wandb

        ids = run.folder / IDS
        run_id = (read_json(ids) if ids.is_file() else {}).get("wandb") or uuid.uuid4().hex[:12]
        group = run.folder.absolute().parent.name
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), id=run_id, resume="allow", group=group,
            name=f"{group}/{run.folder.name}", config=dict(run.settings), dir=str(run.folder),
            settings=wandb.Settings(console="off"),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")
        run.folder.mkdir(parents=True, exist_ok=True)
        write_json_atomic(ids, {"wandb": run_id})

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a record. Arguments: see `TensorBoard.log`."""
        self._run.log({"step": step} | {f"{PREFIXES[kind]}/{name}": value for name, value in values.items()})

    def finish(self) -> None:
        """Finish uploads, and end the run of wandb."""
        self._run.finish()


Tracker = TensorBoard | WeightsAndBiases


class CompositeTracker:
    """Sends values to all trackers of a task. If a tracker fails, we warn once and training continues."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = trackers
        self._failed = set[str]()

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers among the values of a record to every tracker. Arguments: see `TensorBoard.log`."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for name, tracker in self._trackers.items():
            self._attempt(name, tracker.log, kind, step, numbers)

    def finish(self) -> None:
        """Close all trackers at the same time, and stop waiting after CLOSE_SECONDS."""
        threads = []
        for name, tracker in self._trackers.items():
            threads.append((name, Thread(target=self._attempt, args=(name, tracker.finish), daemon=True)))
            threads[-1][1].start()
        end = time.monotonic() + CLOSE_SECONDS
        for name, thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self._warn(name, f"is not done after {CLOSE_SECONDS:g} s")

    def _attempt(self, name: str, send: Callable[..., None], *args: Any) -> None:
        try:
            send(*args)
        except Exception as error:  # each tracker has errors of its own
            self._warn(name, _one_line(error))

    def _warn(self, name: str, reason: str) -> None:
        if name not in self._failed:
            logger.warning("config.log.to: %s misses values (%s); metrics.jsonl has them", name, reason)
        self._failed.add(name)


TRACKERS: dict[str, tuple[type[Tracker], str]] = {  # name → tracker, module that it imports
    "tensorboard": (TensorBoard, "tensorboardX"),
    "wandb": (WeightsAndBiases, "wandb"),
}


def check_installed(log_to: str) -> None:
    """Raise UserError if a tracker of `config.log.to` is not installed, without importing any."""
    for name in tracker_names(log_to):
        spec = importlib.util.find_spec(TRACKERS[name][1])
        # wandb makes a folder `wandb` in the current directory, which Python takes for a package without files.
        is_folder = spec is not None and spec.origin is None and bool(spec.submodule_search_locations)
        if spec is None or is_folder:
            raise UserError(
                f"config.log.to={log_to}: {name} is not installed; run `pip install {name}`, or leave it out"
            )


def open_trackers(log_to: str, run: TaskRun) -> CompositeTracker:
    """Open the trackers of a task in process 0, and none in others. Every process has to call this.

    Args:
        log_to: `config.log.to`.
        run: the run of the task.

    Raises:
        UserError: a tracker cannot be opened.
    """
    opened: dict[str, Tracker] = {}

    def open_all() -> None:
        for name in tracker_names(log_to):
            try:
                opened[name] = TRACKERS[name][0](run)
            except Exception as error:
                raise UserError(
                    f"config.log.to={log_to}: {name} cannot be opened ({_one_line(error)}); set it up, or leave it out"
                ) from error

    run_on_process_0(open_all)
    return CompositeTracker(opened)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
