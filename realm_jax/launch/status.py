"""How a run is doing, from its work directory alone: the same for every target, from any machine that sees the folder.

A job that is alive writes its status every BEAT_SECONDS. Nobody compares clocks: who looks, looks for two beats, and a
counter that did not move by then is late.
"""

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from realm_jax.index.generations import BEAT_SECONDS, Status, generation_names, read_status, step_of
from realm_jax.storage import Damaged, Folder, open_folder

PATIENCE = 2 * BEAT_SECONDS
TRAINER = "trainer"


class Progress(NamedTuple):
    """Where a run stands. checkpoint: (task, step) of the newest; metrics: the last line of the newest task's."""

    task: str
    checkpoint: tuple[str, int] | None
    metrics: dict[str, Any]


class JobState(NamedTuple):
    """A job: what it says of itself, and whether that changed while somebody looked. late: None once it is done."""

    name: str
    status: Status
    late: bool | None


class RunState(NamedTuple):
    """A run as `look` saw it. generation: step of the newest index, −1 for none."""

    progress: Progress
    jobs: list[JobState]
    generation: int

    @property
    def late(self) -> list[str]:
        """The jobs that gave no sign of life."""
        return [job.name for job in self.jobs if job.late]


def progress(folder: Folder) -> Progress:
    """Where a run stands, as far as can be read."""
    tasks = _tasks(folder)
    begun = [task for task in tasks if "metrics.jsonl" in folder.names(task)]
    saved = [(task, step) for task in tasks if (step := _newest(folder, task)) is not None]
    task = begun[-1] if begun else ""
    return Progress(task, saved[-1] if saved else None, _last_line(folder, f"{task}/metrics.jsonl") if task else {})


def look(folder: Folder, wait: Callable[[float], None] = time.sleep) -> RunState:
    """The state of a run; takes two beats when a job gives no sign of life, and less when all do."""
    shared = _shared(folder)
    before = _statuses(shared)
    now, waited = before, 0.0
    while waited < PATIENCE and any(_is_due(name, one, before) for name, one in now.items()):
        wait(0.5)
        waited += 0.5
        now = _statuses(shared)
    jobs = [JobState(name, one, None if one.done else _is_due(name, one, before)) for name, one in now.items()]
    built = [step_of(name) for name in generation_names(shared)]
    return RunState(progress(folder), jobs, max(built, default=-1))


def _is_due(name: str, now: Status, before: dict[str, Status]) -> bool:
    return not now.done and (name in before and before[name].counter == now.counter)


def _statuses(folder: Folder) -> dict[str, Status]:
    names = sorted(name.removesuffix(".json") for name in folder.names("jobs") if name.endswith(".json"))
    found = {name: read_status(folder, name) for name in names if name == TRAINER or name.startswith("builder")}
    return {name: one for name, one in sorted(found.items(), key=lambda item: item[0] != TRAINER) if one is not None}


def _config(folder: Folder) -> dict[str, Any]:
    try:
        return folder.read_json("config.json")
    except (FileNotFoundError, Damaged):
        return {}


def _shared(folder: Folder) -> Folder:
    """Where the jobs of a run meet: `refresh.shared`, or its own folder."""
    elsewhere = _config(folder).get("refresh", {}).get("shared", "")
    return open_folder(elsewhere) if elsewhere else folder


def _tasks(folder: Folder) -> list[str]:
    config = _config(folder)
    return [name.strip() for name in str(config.get("tasks", "")).split(",") if name.strip()]


def _newest(folder: Folder, task: str) -> int | None:
    return max((int(name) for name in folder.names(f"{task}/checkpoints") if name.isdigit()), default=None)


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
    parts = ["nothing trained yet"]
    if found.metrics:
        values = found.metrics
        parts = [f"{found.task} step {values.get('step')}"]
        parts += [f"{name} {values[name]:.4g}" for name in ("loss", "steps_per_second") if name in values]
        parts += [f"index_age {values['index_age']}"] if "index_age" in values else []
    if found.checkpoint is not None:
        parts.append("checkpoint {}/{}".format(*found.checkpoint))
    parts += [f"{name} {told(status)}" for name, status in jobs if name != TRAINER]
    return ", ".join(parts)


def told(status: Status) -> str:
    """What a job is at, in words."""
    if status.done:
        return "done"
    return f"{status.stage} {status.step}" if status.step >= 0 else status.stage
