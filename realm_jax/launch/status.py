"""Read the status of a run from its run directory, for every target, on any machine that can read the folder.

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
from realm_jax.indexing.files import MANIFEST, export_step, generation_names, read_manifests, read_rejection
from realm_jax.indexing.heartbeat import BUILDER, HEARTBEAT_SECONDS, TRAINER, Status, read_status, write_status
from realm_jax.mirror import COMMIT, is_url
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
UNKNOWN = "unknown"  # state of a job that was not watched for that long
EXPECTED = "jobs/expected.json"  # {"jobs": names of those that should live}
NEVER_STARTED = Status("", stage="never started", counter=-1)
POINTS = 120  # of a curve at most; each point of a longer curve is a mean
RECENT = 20  # records from which the speed is measured
GENERATIONS = 5  # the newest, which are reported
ADOPTION = ("step", "generation", "index_step", "waited", "drift")  # keys of a record that are reported
NOT_BEGUN, RUNNING, SILENT, STOPPED, DONE = "not begun", "running", "no heartbeat", "stopped", "done"
STATES = {"alive": RUNNING, "late": SILENT, "stopped": STOPPED, "done": DONE, UNKNOWN: UNKNOWN}  # by the trainer's
JSON = dict[str, Any]


class JobState(NamedTuple):
    """A job and its state.

    Attributes:
        name: name of the job.
        status: its last status.
        state: 'done', 'alive', 'late' if it should be alive but has had no heartbeat while we polled, 'stopped' if it
            need not be alive, UNKNOWN until that is clear.
    """

    name: str
    status: Status
    state: str


class RunState(NamedTuple):
    """A run at one time.

    Attributes:
        task: the newest that has records; '' for none.
        checkpoint: (task, step) of the newest; None for none.
        metrics: the task's last record.
        jobs: all of them.
        generation: step of the newest index, −1 for none.
    """

    task: str
    checkpoint: tuple[str, int] | None
    metrics: JSON
    jobs: list[JobState]
    generation: int

    @property
    def late(self) -> list[str]:
        """Return the names of jobs without a heartbeat."""
        return [job.name for job in self.jobs if job.state == "late"]

    def record(self) -> JSON:
        """Return it as JSON; a metric that is not finite is None.

        Its keys are {"task", "checkpoint", "metrics", "generation", "jobs": [{"name", "state", "stage", "step",
        "index"}]}.
        """
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
    """Replace numbers in a JSON value that are not finite, which JSON does not allow, by None."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- which jobs should live


def record_expected_jobs(workdir: str, jobs: Sequence[str]) -> None:
    """Record which jobs are being started, and remove the status of other jobs and of those that were done.

    The trainer's status stays, but not as done: it identifies the run and lists the required generations.

    Args:
        workdir: the run directory.
        jobs: their names.

    Raises:
        UserError: the folder cannot be written to.
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
    except UserError as error:
        logger.warning("%s; `realm launch status` will call the jobs late", error)


# ---- polling


class Heartbeats:
    """The states of a run's jobs, by the changes of their counters since the first poll."""

    def __init__(self, folder: Folder, needs_trainer: bool = True) -> None:
        """Watch a run.

        Args:
            folder: its run directory.
            needs_trainer: report a trainer that never started, if no expected jobs are recorded.
        """
        self._folder, self._default_jobs = folder, [TRAINER] if needs_trainer else []
        self.poll_seconds = min(2.5, max(0.5, folder.poll_seconds))  # between two polls; one of a bucket takes longer
        # Job → counter, time of its last change, True if a change was observed; None before the first poll.
        self._counters: dict[str, tuple[int, float, bool]] | None = None

    def poll(self, now: float) -> list[JobState]:
        """Return the states of the jobs; `now`: seconds of a clock that never goes back."""
        recorded, before = read_object(self._folder, EXPECTED).get("jobs"), self._counters
        expected = [str(name) for name in recorded] if isinstance(recorded, list) else None
        statuses = _statuses(shared_folder(self._folder), self._default_jobs if expected is None else expected)
        self._counters = {}
        jobs = []
        for name, status in statuses.items():
            counter, changed_at, is_alive = (before or {}).get(name, (None, now, False))
            if counter != status.counter:
                changed_at, is_alive = now, before is not None
            self._counters[name] = status.counter, changed_at, is_alive
            silent = "late" if expected is None or name in expected else "stopped"
            state = ("alive" if is_alive else UNKNOWN) if now - changed_at < STALE_AFTER else silent
            jobs.append(JobState(name, status, "done" if status.done else state))
        return jobs


def poll(folder: Folder, wait: Callable[[float], None] = time.sleep) -> RunState:
    """Return the state of a run; takes as long as `poll_jobs`.

    Args:
        folder: its run directory.
        wait: called with the seconds to wait.
    """
    return run_state(folder, poll_jobs(Heartbeats(folder), wait))


def poll_jobs(heartbeats: Heartbeats, wait: Callable[[float], None] = time.sleep) -> list[JobState]:
    """Poll jobs until none is UNKNOWN: for STALE_AFTER seconds if one has no heartbeat, for less if all have one.

    Args:
        heartbeats: heartbeats of the run.
        wait: called with the seconds to wait.
    """
    waited = 0.0
    jobs = heartbeats.poll(waited)
    while any(job.state == UNKNOWN for job in jobs):
        wait(heartbeats.poll_seconds)
        waited += heartbeats.poll_seconds
        jobs = heartbeats.poll(waited)
    return jobs


def run_state(folder: Folder, jobs: list[JobState]) -> RunState:
    """Return the current state of a run, as far as it can be read.

    Args:
        folder: its run directory.
        jobs: their states.
    """
    generation = max(map(export_step, generation_names(shared_folder(folder))), default=-1)
    for task in reversed(task_names(folder)):  # a task that has just started has no records yet
        if lines := read_records(folder, f"{task}/metrics.jsonl"):
            return RunState(task, newest_checkpoint(folder), lines[-1], jobs, generation)
    return RunState("", newest_checkpoint(folder), {}, jobs, generation)


def newest_checkpoint(folder: Folder) -> tuple[str, int] | None:
    """Return task and step of the newest checkpoint of the last task that has one."""
    for task in reversed(task_names(folder)):
        saves = f"{task}/checkpoints"
        steps = sorted((int(name) for name in folder.names(saves) if name.isdigit()), reverse=True)
        # In a bucket, a save has its final name from the start, and a marker at the end.
        complete = (step for step in steps if not is_url(folder.url) or COMMIT in folder.names(f"{saves}/{step}"))
        if (newest := next(complete, None)) is not None:
            return task, newest
    return None


def newest_generation(folder: Folder) -> str:
    """Return the name of the newest published generation; '' for none."""
    shared = shared_folder(folder)
    published = (name for name in reversed(generation_names(shared)) if MANIFEST in shared.names(f"index/{name}"))
    return next(published, "")


def _statuses(folder: Folder, expected: Sequence[str] = ()) -> dict[str, Status]:
    """Return job → status, the trainer first, including expected jobs that never started."""
    names = [name.removesuffix(".json") for name in folder.names("jobs") if name.endswith(".json")]
    names = list(dict.fromkeys((TRAINER, *names)))  # a poll of a bucket is slow, so none is read twice
    read = {name: read_status(folder, name) for name in names if name.startswith((TRAINER, BUILDER))}
    started = {name: status for name, status in read.items() if status is not None}
    return dict.fromkeys(expected, NEVER_STARTED) | started


def read_object(folder: Folder, name: str) -> dict[str, Any]:
    """Return the JSON object of a file; {} if it is missing or damaged.

    Args:
        folder: folder of the file.
        name: name of the file.
    """
    try:
        return folder.read_json(name)
    except (FileNotFoundError, Damaged):
        return {}


def read_records(folder: Folder, name: str) -> list[dict[str, Any]]:
    """Return the complete lines of a file of records; [] if it is missing.

    Args:
        folder: folder of the file.
        name: name of the file.
    """
    try:
        return parse_lines(folder.read(name))
    except FileNotFoundError:
        return []


def shared_folder(folder: Folder) -> Folder:
    """Return the folder that the jobs of a run share: `refresh.shared`, or the run directory."""
    refresh = read_object(folder, "config.json").get("refresh")
    shared = refresh.get("shared") if isinstance(refresh, dict) else ""
    return open_folder(shared) if shared and isinstance(shared, str) else folder


def task_names(folder: Folder) -> list[str]:
    """Return the tasks of a run's recipe; [] if it has not begun."""
    tasks = read_object(folder, "config.json").get("tasks", "")
    return [name.strip() for name in str(tasks).split(",") if name.strip()]


# ---- one line


def summary(folder: Folder) -> str:
    """Return the state of a run in one line."""
    return status_line(run_state(folder, []), _statuses(shared_folder(folder)))


def status_line(state: RunState, jobs: Mapping[str, Status]) -> str:
    """Return step, loss and speed, the index's age, the last checkpoint, and the stages of the builders.

    Args:
        state: state of the run.
        jobs: job → status.
    """
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
    """Return a job's stage in words.

    Args:
        name: name of the job.
        status: status of the job.
    """
    if status.done:
        return "done"
    return f"{status.stage} {status.step}" if status.step >= 0 and name != TRAINER else status.stage


# ---- everything that is known, for `realm watch`


def run_status(folder: Folder, jobs: Sequence[JobState]) -> JSON:
    """Return the status of a run.

    Times are in seconds, steps those of the task; unknown values are None. The keys, in addition to those of
    `RunState.record`:

    * state: one of `STATES`' values, or 'not begun'; 'unknown' also of a run without a trainer's status.
    * stage: as the trainer reports it, '' if it does not.
    * tasks: of the recipe, each {"name", "state": 'waiting', 'running', 'stopped' or 'done', "step", "steps",
      "seconds", "seconds_left", "loss": curve, "end": as in `compare_with_start`}.
    * recall: {"measure", "points": [{"task", "step", "value", "refresh": true if the index was new}]}, or None.
    * retrieval_utility: {"value": nats, "curve"}, or None.
    * goodput, waits: shares of the time of the newest task; the latter by their reasons.
    * index: {"mode", "task", "step": of the encoders of the index in use, "age": steps since, if it is refreshed,
      "drift": of the last change, 1 for none, "generations": the newest, each {"generation", "step", "age", "state":
      'in use', 'published', 'being built' or 'refused', and once published "recall" of its searcher and "seconds" of
      building}, "adoptions": each {"step", "generation", "index_step", "waited", "drift"}}, or None.
    * seconds: that all tasks took; seconds_left: that they are still going to take, None if one has not begun and
      `realm adapt` did not plan it.
    * results: of `results.json`, {} if there is none; adapted: true if `realm adapt` chose the adapted model;
      warnings: tasks that ended worse than they began.

    A curve is [[step, value], …] of at most POINTS points.

    Args:
        folder: the run directory.
        jobs: as `Heartbeats.poll` returns them.

    Raises:
        StorageError: the folder cannot be read.
    """
    names, files = task_names(folder), {*folder.names()}

    def read(name: str) -> JSON:
        return read_object(folder, name) if name in files else {}

    def read_tasks(kind: str, *keys: str) -> dict[str, Lines]:
        """Return task → its records that have numbers under these keys."""
        records = {name: read_records(folder, f"{name}/{kind}.jsonl") for name in names}
        return {name: [line for line in lines if _has_numbers(line, *keys)] for name, lines in records.items()}

    config, adaptation, results = read("config.json"), read("adapt.json"), read("results.json")
    metrics, evaluations = read_tasks("metrics", "step", "seconds"), read_tasks("evaluations", "step")
    untrained = _section(read("baselines.json"), "untrained")

    # --- state: by the trainer's heartbeat, else by the files that are written at the end
    trainer = next((job for job in jobs if job.name == TRAINER), None)
    if trainer is not None:
        state, stage = STATES[trainer.state], trainer.status.stage
    elif results or "export" in adaptation or ("index.json" in files and not adaptation):
        state, stage = DONE, ""
    else:
        state, stage = UNKNOWN if names else NOT_BEGUN, ""
    started_tasks = [name for name, lines in metrics.items() if lines]
    current = stage if stage in metrics else (started_tasks or [""])[-1]  # the task that is trained, or was last

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
        remaining_seconds = None  # at the speed of the last steps
        if task_state != "done" and steps is not None and lines:
            first = lines[-RECENT:][0] if len(lines) > 1 else {"step": 0, "seconds": 0.0}
            if (recent_steps := step - first["step"]) > 0:
                seconds = lines[-1]["seconds"] - first["seconds"]
                remaining_seconds = max(0, steps - step) * seconds / recent_steps
        tasks.append({
            "name": name,
            "state": task_state,
            "step": step,
            "steps": steps,
            "seconds": seconds_spent(lines, evaluations[name]) if lines else None,
            "seconds_left": remaining_seconds,
            "loss": _curve(lines, "loss"),
            "end": compare_with_start(evaluations[name], untrained),
        })  # fmt: skip
        if remaining_seconds is None and steps is not None and _has_numbers(planned, name):
            remaining_seconds = steps * planned[name]
        seconds_left.append(0.0 if task_state == "done" else remaining_seconds)
    known = [seconds for seconds in seconds_left if seconds is not None]

    # --- metrics
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
    """Return a section of an object; {} if it is missing."""
    section = record.get(name)
    return section if isinstance(section, dict) else {}


def _has_numbers(line: JSON, *keys: str) -> bool:
    return all(isinstance(line.get(key), int | float) for key in keys)


def _curve(lines: Lines, key: str) -> list[list[float]]:
    """Return a value by step in at most POINTS parts: the last step of each part, and its mean."""
    # [records, 2]: step and value
    points = np.array([(line["step"], line[key]) for line in lines if _has_numbers(line, key)], np.float64)
    if not len(points):
        return []
    parts = np.array_split(points, min(POINTS, len(points)))
    return [[int(part[-1, 0]), float(part[:, 1].mean())] for part in parts]


def _index(
    shared: Folder, mode: str | None, metrics: dict[str, Lines], evaluations: dict[str, Lines], current: str
) -> JSON | None:
    """Return the index of the task that last had its passages embedded again, and the builders' generations."""
    refreshes = {
        name: [line for line in lines if line.get("refresh") and _has_numbers(line, "index_step")]
        for name, lines in evaluations.items()
    }
    # A task that refreshed twice takes precedence over one that only made its first index.
    tasks = [name for minimum in (1, 2) for name, lines in refreshes.items() if len(lines) >= minimum]
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
