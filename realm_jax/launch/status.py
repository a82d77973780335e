"""The status of a run, from its work directory alone: for every target, from any machine that can read the folder.

A job that is alive writes its status every HEARTBEAT_SECONDS. Clocks are never compared: a job whose counter does not
move within two heartbeats is late. Which jobs should be running is recorded by `record_expected_jobs` when they are
started.
"""

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from realm_jax.errors import UserError
from realm_jax.refresh.generations import MANIFEST, export_step, generation_names
from realm_jax.refresh.status import BUILDER, HEARTBEAT_SECONDS, TRAINER, Status, read_status, write_status
from realm_jax.storage import Damaged, Folder, open_folder

logger = logging.getLogger(__name__)

STALE_AFTER = 2 * HEARTBEAT_SECONDS
EXPECTED = "jobs/expected.json"  # {"jobs": names of those that should live}
NEVER_STARTED = Status("", stage="never started", counter=-1)


class Progress(NamedTuple):
    """Where a run stands. checkpoint: (task, step) of the newest; metrics: the last line of the newest task's."""

    task: str
    checkpoint: tuple[str, int] | None
    metrics: dict[str, Any]


class JobState(NamedTuple):
    """A job and what it says of itself. state: 'done', 'alive', 'late' where it should live and has no heartbeat while
    somebody looks, 'stopped' where it need not."""

    name: str
    status: Status
    state: str


class RunState(NamedTuple):
    """A run as `poll` saw it. generation: step of the newest index, −1 for none."""

    progress: Progress
    jobs: list[JobState]
    generation: int

    @property
    def late(self) -> list[str]:
        """The jobs without a heartbeat."""
        return [job.name for job in self.jobs if job.state == "late"]


# ---- which jobs should live


def record_expected_jobs(workdir: str, jobs: Sequence[str]) -> None:
    """Record which jobs are being started, and clear those of an earlier start, and those that were done.

    The trainer's status stays, but that it is not done: it says which run this is, and what of its indexes is needed.
    Raises UserError for a folder that cannot be written to.
    """
    folder = open_folder(workdir)
    shared = _shared(folder)
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


def _expected(folder: Folder) -> list[str] | None:
    """None if not recorded."""
    found = _object(folder, EXPECTED).get("jobs")
    return [str(name) for name in found] if isinstance(found, list) else None


# ---- looking


def poll(folder: Folder, wait: Callable[[float], None] = time.sleep) -> RunState:
    """The state of a run; takes STALE_AFTER when a job has no heartbeat, and less when all do."""
    shared, expected = _shared(folder), _expected(folder)
    wanted = [TRAINER] if expected is None else expected
    before = _statuses(shared, wanted)
    now, waited = before, 0.0
    while waited < STALE_AFTER and any(_is_stale(name, one, before) for name, one in now.items()):
        wait(0.5)
        waited += 0.5
        now = _statuses(shared, wanted)
    jobs = []
    for name, one in now.items():
        silent = "late" if expected is None or name in expected else "stopped"
        jobs.append(JobState(name, one, "done" if one.done else silent if _is_stale(name, one, before) else "alive"))
    built = [export_step(name) for name in generation_names(shared)]
    return RunState(progress(folder), jobs, max(built, default=-1))


def progress(folder: Folder) -> Progress:
    """Where a run stands, as far as can be read."""
    for task in reversed(_tasks(folder)):  # a task that has just started has no records yet
        if metrics := _last_line(folder, f"{task}/metrics.jsonl"):
            return Progress(task, newest_checkpoint(folder), metrics)
    return Progress("", newest_checkpoint(folder), {})


def newest_checkpoint(folder: Folder) -> tuple[str, int] | None:
    """(task, step) of the newest checkpoint of the last task that has one."""
    for task in reversed(_tasks(folder)):
        steps = [int(name) for name in folder.names(f"{task}/checkpoints") if name.isdigit()]
        if steps:
            return task, max(steps)
    return None


def newest_generation(folder: Folder) -> str:
    """The name of the newest whole generation; '' for none."""
    shared = _shared(folder)
    whole = (name for name in reversed(generation_names(shared)) if MANIFEST in shared.names(f"index/{name}"))
    return next(whole, "")


def _is_stale(name: str, now: Status, before: dict[str, Status]) -> bool:
    """Whether a job has said nothing new since."""
    return not now.done and name in before and before[name].counter == now.counter


def _statuses(folder: Folder, wanted: Sequence[str] = ()) -> dict[str, Status]:
    """What the jobs say of themselves, the trainer first, and those that are wanted in any case."""
    names = [name.removesuffix(".json") for name in folder.names("jobs") if name.endswith(".json")]
    found = {name: read_status(folder, name) for name in (TRAINER, *names) if name.startswith((TRAINER, BUILDER))}
    return dict.fromkeys(wanted, NEVER_STARTED) | {name: one for name, one in found.items() if one is not None}


def _object(folder: Folder, name: str) -> dict[str, Any]:
    """A JSON object; empty where there is none that can be read."""
    try:
        return folder.read_json(name)
    except (FileNotFoundError, Damaged):
        return {}


def _shared(folder: Folder) -> Folder:
    """Where the jobs of a run meet: `refresh.shared`, or its own folder."""
    refresh = _object(folder, "config.json").get("refresh")
    elsewhere = refresh.get("shared") if isinstance(refresh, dict) else ""
    return open_folder(elsewhere) if elsewhere and isinstance(elsewhere, str) else folder


def _tasks(folder: Folder) -> list[str]:
    tasks = _object(folder, "config.json").get("tasks", "")
    return [name.strip() for name in str(tasks).split(",") if name.strip()]


def _last_line(folder: Folder, name: str) -> dict[str, Any]:
    """The last whole line of a file of records."""
    try:
        lines = folder.read(name).rpartition(b"\n")[0].rsplit(b"\n", 1)
        found = json.loads(lines[-1]) if lines[-1] else {}
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# ---- telling


def summary(folder: Folder) -> str:
    """A run in one line."""
    return one_line(progress(folder), list(_statuses(_shared(folder)).items()))


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
