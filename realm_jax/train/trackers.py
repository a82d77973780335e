"""Where the values of a task go beside its records: TensorBoard's files, Weights & Biases, MLflow, Trackio.

`config.log.to` names them. Each has one run for a task, and is imported only where it is named. Their own environment
variables say where they write and to which project (`WANDB_PROJECT`, `WANDB_MODE`, `MLFLOW_TRACKING_URI`,
`MLFLOW_EXPERIMENT_NAME`, `TRACKIO_DIR`, …). The ids of these runs are kept in TASK/trackers.json, so that a resumed
task goes on with them; steps that it repeats are sent again. What is recorded: `metrics.py`.
"""

import importlib.util
import logging
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from realm_jax.errors import UserError
from realm_jax.processes import run_on_process_0
from realm_jax.sections import tracker_names
from realm_jax.storage import read_json, write_json_atomic

logger = logging.getLogger(__name__)

PROJECT = "realm_jax"  # unless an environment variable names another
IDS = "trackers.json"
PREFIXES = {"metrics": "train", "evaluations": "evaluation"}  # by the file of the record, before the names of values
CLOSE_SECONDS = 20.0  # that the end of a task waits for trackers: less than what is left after SIGTERM
Numbers = Mapping[str, float]


class TaskRun(NamedTuple):
    """The run of a task as trackers see it. folder: the task's; start: steps that are done; settings: the config,
    dotted key → value; id: what the tracker called it before, '' if this is its first start."""

    folder: Path
    start: int
    settings: Mapping[str, Any]
    id: str = ""

    @property
    def group(self) -> str:
        """The name of the run folder."""
        return self.folder.absolute().parent.name

    @property
    def name(self) -> str:
        return f"{self.group}/{self.folder.name}"


class Tracker(ABC):
    """One run of one tracker. id: by which it is found again, '' where it needs none."""

    id: str = ""

    @abstractmethod
    def __init__(self, run: TaskRun) -> None:
        """Open it, or go on with it."""

    @abstractmethod
    def send(self, kind: str, step: int, values: Numbers) -> None:
        """The numbers of one record. kind: 'metrics' or 'evaluations'."""

    @abstractmethod
    def close(self) -> None:
        """Send all that was held back."""


class TensorBoard(Tracker):
    """Files in TASK/tensorboard/<kind>, without the steps that are trained again."""

    def __init__(self, run: TaskRun) -> None:
        from tensorboardX import SummaryWriter  # here, since it imports torch where that is installed: seconds

        # The evaluation of the step that a task resumes from is made again.
        first = {"metrics": run.start + 1, "evaluations": run.start}
        self._boards = {
            kind: SummaryWriter(str(run.folder / "tensorboard" / kind), purge_step=step) for kind, step in first.items()
        }

    def send(self, kind: str, step: int, values: Numbers) -> None:
        for name, value in values.items():
            self._boards[kind].add_scalar(name, value, step)

    def close(self) -> None:
        writers = [board.file_writer.event_writer for board in self._boards.values()]
        try:
            for board in self._boards.values():
                board.close()
        except OSError:  # on a full disk; at the end of the process the library would fail again, with tracebacks
            for writer in writers:
                if not writer._closed:
                    writer._worker.stop()
                    writer._closed = True
            raise


class WeightsAndBiases(Tracker):
    """A run of wandb. Its own steps only grow, so values are drawn over a value `step`."""

    def __init__(self, run: TaskRun) -> None:
        import wandb

        self.id = run.id or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), id=self.id, resume="allow", name=run.name,
            group=run.group, config=dict(run.settings), dir=str(run.folder), settings=wandb.Settings(console="off"),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def send(self, kind: str, step: int, values: Numbers) -> None:
        self._run.log({"step": step} | _named(kind, values))

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """A run of MLflow, by its client, which leaves the process's own active run alone."""

    def __init__(self, run: TaskRun) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        self.id = run.id or self._create(run)
        self._client.update_run(self.id, status="RUNNING")

    def _create(self, run: TaskRun) -> str:
        from mlflow.entities import Param

        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(experiment)
        place = self._client.create_experiment(experiment) if found is None else found.experiment_id
        made: str = self._client.create_run(place, run_name=run.name).info.run_id
        params = [Param(key, str(value)) for key, value in run.settings.items()]
        for first in range(0, len(params), 100):  # as many as it takes at once
            self._client.log_batch(made, params=params[first : first + 100])
        return made

    def send(self, kind: str, step: int, values: Numbers) -> None:
        from mlflow.entities import Metric

        now, named = int(time.time() * 1000), _named(kind, values)
        # A name has no @ there.
        metrics = [Metric(name.replace("@", "_at_"), float(value), now, step) for name, value in named.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self.id)


class Trackio(Tracker):
    """A run of Trackio, which knows it by its name."""

    def __init__(self, run: TaskRun) -> None:
        import trackio

        self.id = run.id or f"{run.name}-{uuid.uuid4().hex[:6]}"
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT), name=self.id, group=run.group, resume="allow",
            config=dict(run.settings), auto_log_gpu=False, auto_log_cpu=False, embed=False,
        )  # fmt: skip

    def send(self, kind: str, step: int, values: Numbers) -> None:
        self._run.log(_named(kind, values), step=step)

    def close(self) -> None:
        self._run.finish()


def _named(kind: str, values: Numbers) -> dict[str, float]:
    """Values by names that tell those of steps from those of measurements."""
    return {f"{PREFIXES[kind]}/{name}": value for name, value in values.items()}


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
MODULES = {"tensorboard": "tensorboardX"}  # where it is not the tracker's name


# --- all that are named -----------------------------------------------------------------------------------------------


def check_installed(named: str) -> None:
    """Raise UserError for a tracker of `config.log.to` that is not installed; imports none of them."""
    for name in tracker_names(named):
        found = importlib.util.find_spec(MODULES.get(name, name))
        # wandb leaves a folder of its name where it ran, which Python takes for a package without files.
        is_folder = found is not None and found.origin is None and bool(found.submodule_search_locations)
        if found is None or is_folder:
            raise UserError(f"config.log.to={named}: {name} is not installed; `pip install {name}`, or leave it out")


class _Sender:
    """Sends to one tracker from a thread of its own, so that training waits for no network. What fails is a warning."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker, self._failed = name, tracker, False
        self._queue: SimpleQueue[tuple[str, int, Numbers] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, record: tuple[str, int, Numbers] | None) -> None:
        """The next record, None after the last one."""
        self._queue.put(record)

    def join(self, seconds: float) -> None:
        """Wait until all is sent, but no longer."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn(f"is not done after {CLOSE_SECONDS:g} s")

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            self._try(partial(self._tracker.send, *record))
        self._try(self._tracker.close)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as fault:  # each tracker has errors of its own
            self._warn(_one_line(fault))

    def _warn(self, why: str) -> None:
        if not self._failed:
            logger.warning("config.log.to: %s misses values (%s); metrics.jsonl has them", self._name, why)
        self._failed = True


class Trackers:
    """The trackers of a task, by name; in all processes but the first there are none. They are not the work: training
    goes on whatever becomes of them."""

    def __init__(self, opened: Mapping[str, Tracker] | None = None) -> None:
        self._senders = [_Sender(name, tracker) for name, tracker in (opened or {}).items()]

    def send(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers of a record, in the background. kind: 'metrics' or 'evaluations'."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for sender in self._senders:
            sender.put((kind, step, numbers))

    def close(self) -> None:
        """Send what is left, and close them; gives up after CLOSE_SECONDS."""
        for sender in self._senders:
            sender.put(None)
        until = time.monotonic() + CLOSE_SECONDS
        for sender in self._senders:
            sender.join(max(0.0, until - time.monotonic()))


def open_trackers(named: str, run: TaskRun) -> Trackers:
    """The trackers of `config.log.to`. All processes have to call it; the first one opens them.

    Raises UserError where one cannot be opened.
    """
    opened: dict[str, Tracker] = {}

    def open_all() -> None:
        path = run.folder / IDS
        ids = read_json(path) if path.is_file() else {}
        for name in tracker_names(named):
            try:
                opened[name] = TRACKERS[name](run._replace(id=ids.get(name, "")))
            except Exception as fault:
                raise UserError(
                    f"config.log.to={named}: {name} cannot be opened ({_one_line(fault)}); set it up, or leave it out"
                ) from fault
            if opened[name].id:
                ids[name] = opened[name].id
                run.folder.mkdir(parents=True, exist_ok=True)
                write_json_atomic(path, ids)

    run_on_process_0(open_all)
    return Trackers(opened)


def _one_line(fault: Exception) -> str:
    return " ".join(str(fault).split())[:200] or type(fault).__name__
