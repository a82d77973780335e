"""What is known of a run at a moment, as one JSON object: from its records alone, without JAX, and nothing is written.

`realm watch` shows it; whoever else tells of runs can take the same. Jobs and the newest checkpoint are those of
`realm launch status` (`launch/status.py`); what follows from records is what the report has (`train/records.py`).
"""

import math
from collections.abc import Sequence
from typing import Any

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
        left = None if task_state == "done" or steps is None else _steps_left(lines, steps)
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

    found = run_state(folder, list(jobs))
    last = found.progress.metrics
    status = found.record() | {
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


def _steps_left(lines: Lines, steps: int) -> float | None:
    """Seconds for the steps that are left, at the speed of the last ones; None before the first."""
    recent = lines[-RECENT:]
    if not recent:
        return None
    first = recent[0] if len(recent) > 1 else {"step": 0, "seconds": 0.0}
    done, seconds = recent[-1]["step"] - first["step"], recent[-1]["seconds"] - first["seconds"]
    return max(0, steps - recent[-1]["step"]) * seconds / done if done > 0 else None


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
    published = {manifest.generation: manifest for manifest in manifests(shared, names)}
    generations: list[JSON] = []
    for name in names:
        manifest, step = published.get(name), export_step(name)
        state = "in use" if name == in_use else "published" if manifest else "being built"
        state = "refused" if rejection(shared, name) else state
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
