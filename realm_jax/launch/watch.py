"""What is known of a run at a moment, as one JSON object: from its records alone, without JAX, and nothing is written.

`realm watch` shows it; whoever else tells of runs can take the same. Jobs and the newest checkpoint are those of
`realm launch status` (`launch/status.py`); what follows from records is what the report has (`train/records.py`).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from realm_jax.launch.status import (
    UNKNOWN,
    JobState,
    finite,
    read_object,
    read_records,
    run_state,
    shared_folder,
    task_names,
)
from realm_jax.refresh.generations import export_step, generation_names, manifests, rejection
from realm_jax.refresh.status import TRAINER
from realm_jax.storage import Folder
from realm_jax.train.records import (
    Lines,
    adoptions,
    compare_with_start,
    describe_regression,
    primary_metric,
    recall_history,
    retrieval_utility,
    seconds_spent,
)

POINTS = 120  # of a curve at most; longer ones are means of as many parts
RECENT = 20  # records that the speed is taken of
GENERATIONS = 5  # newest that are told of
ADOPTION = ("step", "generation", "index_step", "waited", "drift")  # of a record, what is told
NOT_BEGUN, RUNNING, SILENT, STOPPED, DONE = "not begun", "running", "no heartbeat", "stopped", "done"
STATES = {"alive": RUNNING, "late": SILENT, "stopped": STOPPED, "done": DONE, UNKNOWN: UNKNOWN}  # by the trainer's
JSON = dict[str, Any]


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
    run, state = _read(folder, jobs), run_state(folder, list(jobs))
    tasks, last = [_task(run, name) for name in run.metrics], state.progress.metrics
    utility = retrieval_utility(run.metrics)
    found = state.record() | {
        "state": run.state,
        "stage": run.stage,
        "tasks": tasks,
        "recall": _recall(run.evaluations),
        "retrieval_utility": None if utility is None else {"value": utility, "curve": _utility_curve(run)},
        "goodput": last.get("goodput"),
        "waits": {key.removeprefix("wait_"): value for key, value in last.items() if key.startswith("wait_")},
        "index": _index(run),
        "seconds": sum(task["seconds"] or 0.0 for task in tasks),
        "seconds_left": None if run.state == DONE else _seconds_left(run, tasks),
        "results": run.results,
        "adapted": _section(run.adaptation, "measured").get("promoted"),
        "warnings": [said for task in tasks if (said := describe_regression(task["name"], task["end"]))],
    }
    return finite(found)


class _Run(NamedTuple):
    """What the files of a run say. names: of the recipe's tasks; metrics, evaluations: theirs."""

    folder: Folder
    config: JSON
    names: list[str]
    metrics: dict[str, Lines]
    evaluations: dict[str, Lines]
    untrained: JSON
    adaptation: JSON
    results: JSON
    trainer: JobState | None

    @property
    def state(self) -> str:
        if self.trainer is not None:
            return STATES[self.trainer.state]
        if self.results or "export" in self.adaptation:
            return DONE
        return UNKNOWN if self.names else NOT_BEGUN

    @property
    def stage(self) -> str:
        return self.trainer.status.stage if self.trainer is not None else ""

    @property
    def current(self) -> str:
        """The task that is trained, or was last."""
        begun = [name for name, lines in self.metrics.items() if lines]
        return self.stage if self.stage in self.metrics else (begun or [""])[-1]


def _read(folder: Folder, jobs: Sequence[JobState]) -> _Run:
    names, there = task_names(folder), {*folder.names()}

    def records(kind: str, *needed: str) -> dict[str, Lines]:
        found = {name: read_records(folder, f"{name}/{kind}.jsonl") for name in names}
        return {name: [line for line in lines if _has_numbers(line, needed)] for name, lines in found.items()}

    def read(name: str) -> JSON:
        return read_object(folder, name) if name in there else {}

    return _Run(
        folder, read("config.json"), names, records("metrics", "step", "seconds"), records("evaluations", "step"),
        _section(read("baselines.json"), "untrained"), read("adapt.json"), read("results.json"),
        next((job for job in jobs if job.name == TRAINER), None),
    )  # fmt: skip


def _section(found: JSON, name: str) -> JSON:
    """A section of an object; {} where there is none."""
    section = found.get(name)
    return section if isinstance(section, dict) else {}


def _has_numbers(line: JSON, keys: Iterable[str]) -> bool:
    return all(isinstance(line.get(key), int | float) for key in keys)


# ---- tasks


def _task(run: _Run, name: str) -> JSON:
    lines = run.metrics[name]
    step = int(lines[-1]["step"]) if lines else 0
    steps = _section(run.config, name).get("steps")
    past = name != run.stage and steps is not None and step >= steps
    if run.state == DONE or past:
        state = "done"
    elif name == run.current and run.state in (RUNNING, UNKNOWN):
        state = "running"
    else:
        state = "stopped" if lines else "waiting"
    return {
        "name": name,
        "state": state,
        "step": step,
        "steps": steps,
        "seconds": seconds_spent(lines, run.evaluations[name]) if lines else None,
        "seconds_left": None if state == "done" or steps is None else _steps_left(lines, steps),
        "loss": _curve(lines, "loss"),
        "end": compare_with_start(run.evaluations[name], run.untrained),
    }


def _steps_left(lines: Lines, steps: int) -> float | None:
    """Seconds for the steps that are left, at the speed of the last ones; None before the first."""
    recent = lines[-RECENT:]
    if not recent:
        return None
    first = recent[0] if len(recent) > 1 else {"step": 0, "seconds": 0.0}
    done, taken = recent[-1]["step"] - first["step"], recent[-1]["seconds"] - first["seconds"]
    return max(0, steps - recent[-1]["step"]) * taken / done if done > 0 else None


def _seconds_left(run: _Run, tasks: Sequence[JSON]) -> float | None:
    """Seconds for the recipe; a task that has not begun is as long as `realm adapt` planned it."""
    planned = _section(_section(_section(run.adaptation, "plan"), "estimate"), "step")
    total = 0.0
    for task in tasks:
        left = task["seconds_left"]
        if left is None and _has_numbers(planned, [task["name"]]) and task["steps"] is not None:
            left = task["steps"] * planned[task["name"]]
        if task["state"] == "done":
            continue
        if left is None:
            return None
        total += left
    return total if tasks else None


# ---- what is learned


def _recall(evaluations: dict[str, Lines]) -> JSON | None:
    history = recall_history(evaluations)
    measure = primary_metric({key: True for point in history for key in point})
    points = [
        {"task": point["stage"], "step": point["step"], "value": point[measure], "refresh": bool(point.get("refresh"))}
        for point in history
        if _has_numbers(point, [measure]) and math.isfinite(point[measure])
    ]
    return {"measure": measure, "points": points} if points else None


def _utility_curve(run: _Run) -> list[list[float]]:
    """Of the last task that reads passages for masked words."""
    curves = (_curve(lines, "retrieval_utility") for lines in reversed(run.metrics.values()))
    return next((curve for curve in curves if curve), [])


def _curve(lines: Lines, key: str) -> list[list[float]]:
    """A value by step, at most POINTS of them: the last step of each part, and its mean."""
    found = np.array([(line["step"], line[key]) for line in lines if _has_numbers(line, [key])], np.float64)
    if not len(found):
        return []
    parts = np.array_split(found, min(POINTS, len(found)))
    return [[int(part[-1, 0]), float(part[:, 1].mean())] for part in parts]


# ---- the index


def _index(run: _Run) -> JSON | None:
    """The index of the task that last had its passages embedded anew, and what the builders have made."""
    made = {
        name: [line for line in lines if line.get("refresh") and _has_numbers(line, ["index_step"])]
        for name, lines in run.evaluations.items()
    }
    tasks = [name for least in (1, 2) for name, lines in made.items() if len(lines) >= least]
    shared, adopted = shared_folder(run.folder), adoptions(run.evaluations)
    names = generation_names(shared)[-GENERATIONS:]
    if not tasks and not names:
        return None
    task = tasks[-1] if tasks else run.current
    now = max(
        (int(line["step"]) for lines in (run.metrics, run.evaluations) for line in lines.get(task, [])), default=0
    )
    used = made[task][-1]["index_step"] if tasks else -1
    generation = adopted[-1]["generation"] if adopted else ""
    return {
        "mode": _section(run.config, "refresh").get("mode"),
        "task": task,
        "step": used if tasks else None,
        "age": now - used if adopted or len(made.get(task, [])) > 1 else None,
        "drift": next((line["drift"] for line in reversed(adopted) if "drift" in line), None),
        "generations": _generations(shared, names, generation, now),
        "adoptions": [{key: line.get(key) for key in ADOPTION} for line in adopted],
    }


def _generations(shared: Folder, names: Sequence[str], used: str, now: int) -> list[JSON]:
    """The generations of these names. used: the name of the one in use; now: the step of training."""
    published = {manifest.generation: manifest for manifest in manifests(shared, names)}
    found = []
    for name in names:
        manifest, step = published.get(name), export_step(name)
        state = "published" if manifest else "being built"
        state = "refused" if rejection(shared, name) else "in use" if name == used else state
        told = {"recall": manifest.recall, "seconds": sum(manifest.seconds.values())} if manifest else {}
        found.append({"generation": name, "step": step, "age": max(0, now - step), "state": state} | told)
    return found
