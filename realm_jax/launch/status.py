"""The status of a run, from its work directory alone: for every target, from any machine that can read the folder.

A job that is alive writes its status every HEARTBEAT_SECONDS. Clocks are never compared: a job whose counter does not
move within two heartbeats is late. Which jobs should be running is recorded by `record_expected_jobs` when they are
started.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from realm_jax.errors import UserError
from realm_jax.refresh.generations import MANIFEST, export_step, generation_names
from realm_jax.refresh.status import BUILDER, HEARTBEAT_SECONDS, TRAINER, Status, read_status, write_status
from realm_jax.storage import Damaged, Folder, open_folder
from realm_jax.train.records import parse_lines

logger = logging.getLogger(__name__)

STALE_AFTER = 2 * HEARTBEAT_SECONDS
UNKNOWN = "unknown"  # state of a job whose counter was not looked at for that long
EXPECTED = "jobs/expected.json"  # {"jobs": names of those that should live}
NEVER_STARTED = Status("", stage="never started", counter=-1)


class Progress(NamedTuple):
    """Where a run stands. checkpoint: (task, step) of the newest; metrics: the last line of the newest task's."""

    task: str
    checkpoint: tuple[str, int] | None
    metrics: dict[str, Any]


class JobState(NamedTuple):
    """A job and what it says of itself. state: 'done', 'alive', 'late' where it should live and has no heartbeat while
    somebody looks, 'stopped' where it need not, UNKNOWN until that is clear."""

    name: str
    status: Status
    state: str


class RunState(NamedTuple):
    """A run at one look. generation: step of the newest index, −1 for none."""

    progress: Progress
    jobs: list[JobState]
    generation: int

    @property
    def late(self) -> list[str]:
        """The jobs without a heartbeat."""
        return [job.name for job in self.jobs if job.state == "late"]

    def record(self) -> dict[str, Any]:
        """As JSON: {"task", "checkpoint", "metrics", "generation", "jobs": [{"name", "state", "stage", "step",
        "index"}]}; a metric that is not finite is None."""
        jobs = [
            {"name": job.name, "state": job.state}
            | {key: getattr(job.status, key) for key in ("stage", "step", "index")}
            for job in self.jobs
        ]
        saved = self.progress.checkpoint
        return {
            "task": self.progress.task,
            "checkpoint": None if saved is None else {"task": saved[0], "step": saved[1]},
            "metrics": finite(self.progress.metrics),
            "generation": self.generation,
            "jobs": jobs,
        }


def finite(value: Any) -> Any:
    """A value of JSON with None for numbers that are not finite, for which JSON has no number."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- which jobs should live


def record_expected_jobs(workdir: str, jobs: Sequence[str]) -> None:
    """Record which jobs are being started, and clear those of an earlier start, and those that were done.

    The trainer's status stays, but that it is not done: it says which run this is, and what of its indexes is needed.
    Raises UserError for a folder that cannot be written to.
    """
    folder = open_folder(workdir)
    shared = shared_folder(folder)
    for name, status in _statuses(shared).items():
        if name == TRAINER and status.done:
            write_status(shared, name, dataclasses.replace(status, done=False, index_done=False))
        elif name not in jobs or status.done:
            shared.remove(f"jobs/{name}.json")
    folder.write_json(EXPECTED, {"jobs": list(jobs)})


def clear_expected_jobs(workdir: str) -> None:
    """Record that all jobs were stopped. An unreachable folder is only a warning."""
    try:
        open_folder(workdir).write_json(EXPECTED, {"jobs": []})
    except UserError as fault:
        logger.warning("%s; `realm launch status` will call the jobs late", fault)


# ---- looking


class Heartbeats:
    """The jobs of a run, by what their counters did since the first look."""

    def __init__(self, folder: Folder, needs_trainer: bool = True) -> None:
        """needs_trainer: whether a trainer is missed that never came to a run of which nothing is expected."""
        self._folder, self._missed = folder, [TRAINER] if needs_trainer else []
        # Counter, since when, and whether it was seen to move; None before the first look.
        self._moved: dict[str, tuple[int, float, bool]] | None = None

    def look(self, now: float) -> list[JobState]:
        """What the jobs say at a time in seconds, which does not go back."""
        recorded, before = read_object(self._folder, EXPECTED).get("jobs"), self._moved
        expected = [str(name) for name in recorded] if isinstance(recorded, list) else None
        found = _statuses(shared_folder(self._folder), self._missed if expected is None else expected)
        self._moved = {}
        jobs = []
        for name, one in found.items():
            counter, since, seen = (before or {}).get(name, (None, now, False))
            if counter != one.counter:
                since, seen = now, before is not None
            self._moved[name] = one.counter, since, seen
            silent = "late" if expected is None or name in expected else "stopped"
            fresh = "alive" if seen else UNKNOWN
            jobs.append(JobState(name, one, "done" if one.done else fresh if now - since < STALE_AFTER else silent))
        return jobs


def poll(folder: Folder, wait: Callable[[float], None] = time.sleep) -> RunState:
    """The state of a run; takes as long as `poll_jobs`."""
    return run_state(folder, poll_jobs(Heartbeats(folder), wait))


def poll_jobs(heartbeats: Heartbeats, wait: Callable[[float], None] = time.sleep) -> list[JobState]:
    """The jobs, none of them UNKNOWN; takes STALE_AFTER when one has no heartbeat, and less when all do."""
    waited = 0.0
    jobs = heartbeats.look(waited)
    while any(job.state == UNKNOWN for job in jobs):
        wait(0.5)
        waited += 0.5
        jobs = heartbeats.look(waited)
    return jobs


def run_state(folder: Folder, jobs: list[JobState]) -> RunState:
    """A run now. jobs: what is known of them."""
    built = [export_step(name) for name in generation_names(shared_folder(folder))]
    return RunState(progress(folder), jobs, max(built, default=-1))


def progress(folder: Folder) -> Progress:
    """Where a run stands, as far as can be read."""
    for task in reversed(task_names(folder)):  # a task that has just started has no records yet
        if lines := read_records(folder, f"{task}/metrics.jsonl"):
            return Progress(task, newest_checkpoint(folder), lines[-1])
    return Progress("", newest_checkpoint(folder), {})


def newest_checkpoint(folder: Folder) -> tuple[str, int] | None:
    """(task, step) of the newest checkpoint of the last task that has one."""
    for task in reversed(task_names(folder)):
        steps = [int(name) for name in folder.names(f"{task}/checkpoints") if name.isdigit()]
        if steps:
            return task, max(steps)
    return None


def newest_generation(folder: Folder) -> str:
    """The name of the newest whole generation; '' for none."""
    shared = shared_folder(folder)
    whole = (name for name in reversed(generation_names(shared)) if MANIFEST in shared.names(f"index/{name}"))
    return next(whole, "")


def _statuses(folder: Folder, wanted: Sequence[str] = ()) -> dict[str, Status]:
    """What the jobs say of themselves, the trainer first, and those that are wanted in any case."""
    names = [name.removesuffix(".json") for name in folder.names("jobs") if name.endswith(".json")]
    found = {name: read_status(folder, name) for name in (TRAINER, *names) if name.startswith((TRAINER, BUILDER))}
    return dict.fromkeys(wanted, NEVER_STARTED) | {name: one for name, one in found.items() if one is not None}


def read_object(folder: Folder, name: str) -> dict[str, Any]:
    """A JSON object; empty where there is none that can be read."""
    try:
        return folder.read_json(name)
    except (FileNotFoundError, Damaged):
        return {}


def read_records(folder: Folder, name: str) -> list[dict[str, Any]]:
    """The whole lines of a file of records; [] where there is none."""
    try:
        return parse_lines(folder.read(name))
    except FileNotFoundError:
        return []


def shared_folder(folder: Folder) -> Folder:
    """Where the jobs of a run meet: `refresh.shared`, or its own folder."""
    refresh = read_object(folder, "config.json").get("refresh")
    elsewhere = refresh.get("shared") if isinstance(refresh, dict) else ""
    return open_folder(elsewhere) if elsewhere and isinstance(elsewhere, str) else folder


def task_names(folder: Folder) -> list[str]:
    """The tasks of a run's recipe; [] where it has not begun."""
    tasks = read_object(folder, "config.json").get("tasks", "")
    return [name.strip() for name in str(tasks).split(",") if name.strip()]


# ---- telling


def summary(folder: Folder) -> str:
    """A run in one line."""
    return one_line(progress(folder), list(_statuses(shared_folder(folder)).items()))


def one_line(found: Progress, jobs: list[tuple[str, Status]]) -> str:
    """Step, loss and speed, the index's age, the last checkpoint, and what the builders do."""
    parts = ["not started"]
    if found.metrics:
        numbers = {name: value for name, value in found.metrics.items() if isinstance(value, int | float)}
        parts = [f"{found.task} step {numbers.get('step')}"]
        parts += [f"{name} {numbers[name]:.4g}" for name in ("loss", "steps_per_second") if name in numbers]
        parts += [f"index_age {numbers['index_age']}"] if "index_age" in numbers else []
    if found.checkpoint is not None:
        parts.append("checkpoint {}/{}".format(*found.checkpoint))
    parts += [f"{name} {describe_status(name, status)}" for name, status in jobs if name != TRAINER]
    return ", ".join(parts)


def describe_status(name: str, status: Status) -> str:
    """A job's stage in words."""
    if status.done:
        return "done"
    return f"{status.stage} {status.step}" if status.step >= 0 and name != TRAINER else status.stage
