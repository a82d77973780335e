"""The status of a run, from its work directory alone: for every target, from any machine that can read the folder.

`RunState` is what `realm launch status` shows, `run_status` what `realm watch` shows; neither needs JAX. A job that is
alive writes its status every HEARTBEAT_SECONDS. Clocks are never compared: a job whose counter does not move within two
heartbeats is late. Which jobs should be running is recorded by `record_expected_jobs` when they are started.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from realm_jax.errors import UserError
from realm_jax.index.files import MANIFEST, export_step, generation_names, read_manifests, read_rejection
from realm_jax.index.heartbeat import BUILDER, HEARTBEAT_SECONDS, TRAINER, Status, read_status, write_status
from realm_jax.storage import Damaged, Folder, open_folder
from realm_jax.train.records import (
    Lines,
    adoptions,
    compare_with_start,
    describe_regression,
    parse_lines,
    primary_metric,
    recall_history,
    retrieval_utility,
    seconds_spent,
)  # fmt: skip

logger = logging.getLogger(__name__)

STALE_AFTER = 2 * HEARTBEAT_SECONDS
UNKNOWN = "unknown"  # state of a job whose counter was not looked at for that long
EXPECTED = "jobs/expected.json"  # {"jobs": names of those that should live}
NEVER_STARTED = Status("", stage="never started", counter=-1)
POINTS = 120  # of a curve at most; longer ones are means of as many parts
RECENT = 20  # records that the speed is taken of
GENERATIONS = 5  # newest that are told of
ADOPTION = ("step", "generation", "index_step", "waited", "drift")  # of a record, what is told
NOT_BEGUN, RUNNING, SILENT, STOPPED, DONE = "not begun", "running", "no heartbeat", "stopped", "done"
STATES = {"alive": RUNNING, "late": SILENT, "stopped": STOPPED, "done": DONE, UNKNOWN: UNKNOWN}  # by the trainer's
JSON = dict[str, Any]


class JobState(NamedTuple):
    """A job and what it says of itself. state: 'done', 'alive', 'late' where it should live and has no heartbeat while
    somebody looks, 'stopped' where it need not, UNKNOWN until that is clear."""

    name: str
    status: Status
    state: str


class RunState(NamedTuple):
    """A run at one look."""

    task: str  # the newest that has records; '' for none
    checkpoint: tuple[str, int] | None  # (task, step) of the newest
    metrics: JSON  # the task's last record
    jobs: list[JobState]
    generation: int  # step of the newest index, −1 for none

    @property
    def late(self) -> list[str]:
        """The jobs without a heartbeat."""
        return [job.name for job in self.jobs if job.state == "late"]

    def record(self) -> JSON:
        """As JSON: {"task", "checkpoint", "metrics", "generation", "jobs": [{"name", "state", "stage", "step",
        "index"}]}; a metric that is not finite is None."""
        saved, jobs = self.checkpoint, []
        for name, status, state in self.jobs:
            details = {"stage": status.stage, "step": status.step, "index": status.index}
            jobs.append({"name": name, "state": state} | details)
        return {
            "task": self.task,
            "checkpoint": None if saved is None else {"task": saved[0], "step": saved[1]},
            "metrics": finite(self.metrics),
            "generation": self.generation,
            "jobs": jobs,
        }


def finite(value: Any) -> Any:
    """A value of JSON with None for numbers that are not finite, for which JSON has no number."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
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
        statuses = _statuses(shared_folder(self._folder), self._missed if expected is None else expected)
        self._moved = {}
        jobs = []
        for name, status in statuses.items():
            counter, since, seen = (before or {}).get(name, (None, now, False))
            if counter != status.counter:
                since, seen = now, before is not None
            self._moved[name] = status.counter, since, seen
            silent = "late" if expected is None or name in expected else "stopped"
            state = ("alive" if seen else UNKNOWN) if now - since < STALE_AFTER else silent
            jobs.append(JobState(name, status, "done" if status.done else state))
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
    """A run now, as far as can be read. jobs: what is known of them."""
    generation = max(map(export_step, generation_names(shared_folder(folder))), default=-1)
    for task in reversed(task_names(folder)):  # a task that has just started has no records yet
        if lines := read_records(folder, f"{task}/metrics.jsonl"):
            return RunState(task, newest_checkpoint(folder), lines[-1], jobs, generation)
    return RunState("", newest_checkpoint(folder), {}, jobs, generation)


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
    read = {name: read_status(folder, name) for name in (TRAINER, *names) if name.startswith((TRAINER, BUILDER))}
    return dict.fromkeys(wanted, NEVER_STARTED) | {name: status for name, status in read.items() if status is not None}


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


# ---- telling, in a line


def summary(folder: Folder) -> str:
    """A run in one line."""
    return one_line(run_state(folder, []), _statuses(shared_folder(folder)))


def one_line(state: RunState, jobs: Mapping[str, Status]) -> str:
    """Step, loss and speed, the index's age, the last checkpoint, and what the builders do."""
    parts = ["not started"]
    if state.metrics:
        numbers = {name: value for name, value in state.metrics.items() if isinstance(value, int | float)}
        parts = [f"{state.task} step {numbers.get('step')}"]
        parts += [f"{name} {numbers[name]:.4g}" for name in ("loss", "steps_per_second") if name in numbers]
        parts += [f"index_age {numbers['index_age']}"] if "index_age" in numbers else []
    if state.checkpoint is not None:
        parts.append("checkpoint {}/{}".format(*state.checkpoint))
    parts += [f"{name} {describe_status(name, status)}" for name, status in jobs.items() if name != TRAINER]
    return ", ".join(parts)


def describe_status(name: str, status: Status) -> str:
    """A job's stage in words."""
    if status.done:
        return "done"
    return f"{status.stage} {status.step}" if status.step >= 0 and name != TRAINER else status.stage


# ---- all that is known, for `realm watch`


def run_status(folder: Folder, jobs: Sequence[JobState]) -> JSON:
    """The status of the run in a folder. jobs: as `Heartbeats.look` finds them.

    Times are in seconds, steps those of the task; what is not known is None. The keys, beside those of
    `RunState.record`:

    * state: one of `STATES`' values, or 'not begun'; 'unknown' also of a run without a trainer's status.
    * stage: what the trainer says that it is at, '' where it says nothing.
    * tasks: of the recipe, each {"name", "state": 'waiting', 'running', 'stopped' or 'done', "step", "steps",
      "seconds", "seconds_left", "loss": curve, "end": as of `compare_with_start`}.
    * recall: {"measure", "points": [{"task", "step", "value", "refresh": whether the index was new}]}, or None.
    * retrieval_utility: {"value": nats, "curve"}, or None.
    * goodput, waits: shares of the time of the newest task; the latter by what was waited for.
    * index: {"mode", "task", "step": of the towers that made the one in use, "age": steps since, where it is made anew,
      "drift": of the last change, 1 for none, "generations": the newest, each {"generation", "step", "age", "state":
      'in use', 'published', 'being built' or 'refused', and once published "recall" of its searcher and "seconds" of
      building}, "adoptions": each {"step", "generation", "index_step", "waited", "drift"}}, or None.
    * seconds: that all tasks took; seconds_left: that they are still going to take, None where one has not begun and
      `realm adapt` did not plan it.
    * results: of `results.json`, {} where there is none; adapted: whether `realm adapt` kept what was learned;
      warnings: tasks that ended worse than they began.

    A curve is [[step, value], …] of at most POINTS points. Raises StorageError.
    """
    names, files = task_names(folder), {*folder.names()}

    def read(name: str) -> JSON:
        return read_object(folder, name) if name in files else {}

    def read_tasks(kind: str, *needed: str) -> dict[str, Lines]:
        """Task → its records that have these numbers."""
        records = {name: read_records(folder, f"{name}/{kind}.jsonl") for name in names}
        return {name: [line for line in lines if _has_numbers(line, *needed)] for name, lines in records.items()}

    config, adaptation, results = read("config.json"), read("adapt.json"), read("results.json")
    metrics, evaluations = read_tasks("metrics", "step", "seconds"), read_tasks("evaluations", "step")
    untrained = _section(read("baselines.json"), "untrained")

    # --- how it does: by the trainer's heartbeat, else by what is written at the end
    trainer = next((job for job in jobs if job.name == TRAINER), None)
    if trainer is not None:
        state, stage = STATES[trainer.state], trainer.status.stage
    elif results or "export" in adaptation:
        state, stage = DONE, ""
    else:
        state, stage = UNKNOWN if names else NOT_BEGUN, ""
    begun = [name for name, lines in metrics.items() if lines]
    current = stage if stage in metrics else (begun or [""])[-1]  # the task that is trained, or was last

    # --- tasks; one that has not begun is as long as `realm adapt` planned it
    planned = _section(_section(_section(adaptation, "plan"), "estimate"), "step")  # task → seconds a step
    tasks: list[JSON] = []
    seconds_left: list[float | None] = []
    for name, lines in metrics.items():
        step, steps = int(lines[-1]["step"]) if lines else 0, _section(config, name).get("steps")
        task_state = "stopped" if lines else "waiting"
        if state == DONE or (name != stage and steps is not None and step >= steps):
            task_state = "done"
        elif name == current and state in (RUNNING, UNKNOWN):
            task_state = "running"
        left = None  # seconds, at the speed of the last steps
        if task_state != "done" and steps is not None and lines:
            first = lines[-RECENT:][0] if len(lines) > 1 else {"step": 0, "seconds": 0.0}
            if (done := step - first["step"]) > 0:
                left = max(0, steps - step) * (lines[-1]["seconds"] - first["seconds"]) / done
        tasks.append({
            "name": name,
            "state": task_state,
            "step": step,
            "steps": steps,
            "seconds": seconds_spent(lines, evaluations[name]) if lines else None,
            "seconds_left": left,
            "loss": _curve(lines, "loss"),
            "end": compare_with_start(evaluations[name], untrained),
        })  # fmt: skip
        if left is None and steps is not None and _has_numbers(planned, name):
            left = steps * planned[name]
        seconds_left.append(0.0 if task_state == "done" else left)
    known = [seconds for seconds in seconds_left if seconds is not None]

    # --- what is learned
    history = recall_history(evaluations)
    measure = primary_metric({key: True for point in history for key in point})
    points = [
        {"task": point["stage"], "step": point["step"], "value": point[measure], "refresh": bool(point.get("refresh"))}
        for point in history
        if _has_numbers(point, measure) and math.isfinite(point[measure])
    ]
    utility = retrieval_utility(metrics)
    curves = [_curve(lines, "retrieval_utility") for lines in metrics.values()]
    # that of the last task that reads passages for masked words
    utility_curve = next((curve for curve in reversed(curves) if curve), [])

    run = run_state(folder, list(jobs))
    last = run.metrics
    status = run.record() | {
        "state": state,
        "stage": stage,
        "tasks": tasks,
        "recall": {"measure": measure, "points": points} if points else None,
        "retrieval_utility": None if utility is None else {"value": utility, "curve": utility_curve},
        "goodput": last.get("goodput"),
        "waits": {key.removeprefix("wait_"): value for key, value in last.items() if key.startswith("wait_")},
        "index": _index(shared_folder(folder), _section(config, "refresh").get("mode"), metrics, evaluations, current),
        "seconds": sum(task["seconds"] or 0.0 for task in tasks),
        "seconds_left": sum(known) if state != DONE and tasks and len(known) == len(tasks) else None,
        "results": results,
        "adapted": _section(adaptation, "measured").get("promoted"),
        "warnings": [line for task in tasks if (line := describe_regression(task["name"], task["end"]))],
    }
    return finite(status)


def _section(record: JSON, name: str) -> JSON:
    """A section of an object; {} where there is none."""
    section = record.get(name)
    return section if isinstance(section, dict) else {}


def _has_numbers(line: JSON, *keys: str) -> bool:
    return all(isinstance(line.get(key), int | float) for key in keys)


def _curve(lines: Lines, key: str) -> list[list[float]]:
    """A value by step, at most POINTS of them: the last step of each part, and its mean."""
    points = np.array([(line["step"], line[key]) for line in lines if _has_numbers(line, key)], np.float64)
    if not len(points):
        return []
    parts = np.array_split(points, min(POINTS, len(points)))
    return [[int(part[-1, 0]), float(part[:, 1].mean())] for part in parts]


def _index(
    shared: Folder, mode: str | None, metrics: dict[str, Lines], evaluations: dict[str, Lines], current: str
) -> JSON | None:
    """The index of the task that last had its passages embedded anew, and what the builders have made."""
    refreshes = {
        name: [line for line in lines if line.get("refresh") and _has_numbers(line, "index_step")]
        for name, lines in evaluations.items()
    }
    # A task that refreshed twice counts before one that only made its first index.
    tasks = [name for least in (1, 2) for name, lines in refreshes.items() if len(lines) >= least]
    names, adopted = generation_names(shared)[-GENERATIONS:], adoptions(evaluations)
    if not tasks and not names:
        return None
    task = tasks[-1] if tasks else current
    now = max((int(line["step"]) for records in (metrics, evaluations) for line in records.get(task, [])), default=0)
    index_step = refreshes[task][-1]["index_step"] if tasks else -1
    in_use = adopted[-1]["generation"] if adopted else ""
    published = {manifest.generation: manifest for manifest in read_manifests(shared, names)}
    generations: list[JSON] = []
    for name in names:
        manifest, step = published.get(name), export_step(name)
        state = "in use" if name == in_use else "published" if manifest else "being built"
        state = "refused" if read_rejection(shared, name) else state
        measured = {"recall": manifest.recall, "seconds": sum(manifest.seconds.values())} if manifest else {}
        generations.append({"generation": name, "step": step, "age": max(0, now - step), "state": state} | measured)
    is_refreshed = adopted or len(refreshes.get(task, [])) > 1
    return {
        "mode": mode,
        "task": task,
        "step": index_step if tasks else None,
        "age": now - index_step if is_refreshed else None,
        "drift": next((line["drift"] for line in reversed(adopted) if "drift" in line), None),
        "generations": generations,
        "adoptions": [{key: line.get(key) for key in ADOPTION} for line in adopted],
    }
