"""Read and summarize the records of a run's tasks, without JAX, so that `realm launch status` starts fast.

    TASK/metrics.jsonl        an object for each logged step: {"step", name: value, …}
    TASK/evaluations.jsonl    an object for each evaluation

`metrics.py` writes them; `results.py` reads them at the end of a run, `launch/status.py` while it trains.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from realm_jax.storage import read_json

Lines = Sequence[dict[str, Any]]  # the records of a file

AVERAGED = 20  # steps over which results average a metric of single steps
RECALLS = ("recall@5", "answer_recall@5")  # the primary metric of a retriever is the first that was measured


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """Return the records of a JSON-lines file up to a truncated line, or one that is no object."""
    records: list[dict[str, Any]] = []
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict):
            break
        records.append(record)
    return records


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file on this machine; [] if there is none."""
    return parse_lines(path.read_bytes()) if path.is_file() else []


def primary_metric(measures: Mapping[str, Any]) -> str:
    """Return the first metric of `RECALLS` that an evaluation has; '' if it has none."""
    return next((name for name in RECALLS if name in measures), "")


def recall_history(evaluations: Mapping[str, Lines]) -> list[dict[str, Any]]:
    """Return recall at every evaluation, in order. evaluations: task → its records, in the order of the recipe."""
    return [
        {"stage": name} | {key: value for key, value in line.items() if key in ("step", "refresh") or "call@5" in key}
        for name, lines in evaluations.items()
        for line in lines
    ]


def adoptions(evaluations: Mapping[str, Lines]) -> list[dict[str, Any]]:
    """Return the records of adopted generations of an index builder, in order."""
    return [line for lines in evaluations.values() for line in lines if "generation" in line]


def averaged_steps(total: int) -> range:
    """Return the steps of a task over which results average: up to `AVERAGED` of its last tenth, the last one first.

    They are recorded whatever `log.every` is, so that no result depends on that key.

    Args:
        total: number of steps of the task.
    """
    tenth = max(1, total // 10)
    return range(total, total - tenth, -tenth // AVERAGED)  # every step, or every second, …


def retrieval_utility(metrics: Mapping[str, Lines], steps: Mapping[str, int] | None = None) -> float | None:
    """Return the nats that retrieval gained on a masked word, as the mean of records near the end of training.

    Args:
        metrics: task → its records.
        steps: task → its number of steps, to take the mean over the `averaged_steps`; None for the last tenth of all
            records, while a run trains.

    Returns:
        None if no record has it.
    """
    records = [(name, record) for name, lines in metrics.items() for record in lines if "retrieval_utility" in record]
    if steps is None:
        records = records[-max(1, len(records) // 10) :]
    else:
        records = [(name, record) for name, record in records if record["step"] in averaged_steps(steps[name])]
    return float(np.mean([record["retrieval_utility"] for _, record in records])) if records else None


def seconds_spent(metrics: Lines, evaluations: Lines) -> float:
    """Return the seconds that a task has taken, with its last evaluation if that is recorded.

    Args:
        metrics: records of its steps, at least one.
        evaluations: records of its evaluations.
    """
    last = evaluations[-1] if evaluations else {}
    return float(last["seconds"] if "seconds" in last else metrics[-1]["seconds"])


# --- Compare the end of a task with its start -------------------------------------------------------------------------


def compare_with_start(lines: Lines, baseline: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Compare the evaluation at the end of a task with the one at its start.

    Args:
        lines: records of its evaluations, in order.
        baseline: evaluation of the parameters that it started from, if the task did not evaluate them.

    Returns:
        {"measure": name, "start": value, "end": value}, and if the task returned better parameters than its last ones
        "kept_step", their step, and "last", the value of the last ones. None if start or end is unknown.
    """
    first = lines[0] if lines and lines[0].get("step") == 0 else baseline
    if not first or not lines:
        return None
    end, name = lines[-1], primary_metric(lines[-1])
    if not name or name not in first or end.get("refresh") is not False:
        return None
    summary = {"measure": name, "start": first[name], "end": end[name]}
    if "best_step" in end:
        summary |= {"kept_step": end["best_step"], "last": end["last"].get(name)}
    return summary


def stage_summary(folder: Path) -> dict[str, Any] | None:
    """Return `compare_with_start` of the task in WORKDIR/TASK, from its records.

    The first task of fresh parameters does not evaluate its start: baselines.json has the untrained retriever's.
    """
    file = folder.parent / "baselines.json"
    untrained = read_json(file).get("untrained") if file.is_file() else None
    return compare_with_start(read_lines(folder / "evaluations.jsonl"), untrained)


def describe_regression(task: str, stage: Mapping[str, Any] | None, measure: str | None = None) -> str | None:
    """Return a warning in one line if a task is worse at its end than before its first step, else None.

    Args:
        task: its name.
        stage: stage of `compare_with_start`.
        measure: metric that selected its best parameters, '' if it was not measured; None if the task kept none.
    """
    if stage is None:
        return None
    worst = min(stage["end"], stage["end"] if stage.get("last") is None else stage["last"])
    if worst >= stage["start"]:
        return None
    result = "set config.evaluation.keep_best=True to keep the best ones"
    if "kept_step" in stage:
        result = f"it returns the parameters of step {stage['kept_step']} ({stage['end']:.3f})"
    elif measure is not None:
        reason = f"they are kept by {measure.replace('_', ' ')}" if measure else "no measured question has an answer"
        result = f"it returns its last parameters, because {reason}"
    return f"{task} is worse than at its start: {stage['measure']} {stage['start']:.3f} -> {worst:.3f}; {result}"
