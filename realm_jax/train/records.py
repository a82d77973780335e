"""What the tasks of a run have recorded, and what follows from that alone. Without JAX, for who only looks.

    TASK/metrics.jsonl        one object a logged step: {"step", name: value, …}
    TASK/evaluations.jsonl    one object a measurement

Who writes them: `metrics.py`. Who reads them: `results.py` at the end of a run, `launch/status.py` while it trains.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from realm_jax.storage import read_json

Lines = Sequence[dict[str, Any]]  # the records of a file

RECALLS = ("recall@5", "answer_recall@5")  # what a retriever is judged by: the first that was measured


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """All whole records of a JSON-lines file. It ends before a line that was cut off, or is no object."""
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
    """`parse_lines` of a file of this machine; [] when there is none."""
    return parse_lines(path.read_bytes()) if path.is_file() else []


def primary_metric(found: Mapping[str, Any]) -> str:
    """The name of what a measurement is judged by; '' where it holds nothing to judge by."""
    return next((name for name in RECALLS if name in found), "")


def recall_history(evaluations: Mapping[str, Lines]) -> list[dict[str, Any]]:
    """Recall at every measurement, in order. evaluations: task → its records, in the order of the recipe."""
    return [
        {"stage": name} | {key: value for key, value in line.items() if key in ("step", "refresh") or "call@5" in key}
        for name, lines in evaluations.items()
        for line in lines
    ]


def adoptions(evaluations: Mapping[str, Lines]) -> list[dict[str, Any]]:
    """The records that tell of a generation of an index builder that was adopted, in order."""
    return [line for lines in evaluations.values() for line in lines if "generation" in line]


def retrieval_utility(metrics: Mapping[str, Lines]) -> float | None:
    """Nats that retrieval gained on a masked word: the mean of the last tenth of the steps that say it; None if none
    does. metrics: task → its records."""
    found = [line["retrieval_utility"] for lines in metrics.values() for line in lines if "retrieval_utility" in line]
    return float(np.mean(found[-max(1, len(found) // 10) :])) if found else None


def seconds_spent(metrics: Lines, evaluations: Lines) -> float:
    """The seconds that a task has taken, its last measurement included once that is recorded. It has metrics."""
    last = evaluations[-1] if evaluations else {}
    return float(last["seconds"] if "seconds" in last else metrics[-1]["seconds"])


# --- the end of a task against its start ------------------------------------------------------------------------------


def compare_with_start(lines: Lines, baseline: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """How a task ended against its start: {"measure", "start", "end", "kept_step"?, "last"?}; None if unknown.

    lines: its measurements, in order. baseline: that of the parameters that it started from, if it did not measure
    them. kept_step, last: the step whose parameters it handed on, and the measure of its last ones, if they differ.
    """
    first = lines[0] if lines and lines[0].get("step") == 0 else baseline
    if not first or not lines:
        return None
    end, name = lines[-1], primary_metric(lines[-1])
    if not name or name not in first or end.get("refresh") is not False:
        return None
    found = {"measure": name, "start": first[name], "end": end[name]}
    if "best_step" in end:
        found |= {"kept_step": end["best_step"], "last": end["last"].get(name)}
    return found


def stage_summary(place: Path) -> dict[str, Any] | None:
    """`compare_with_start` of the task in a folder of a run, by what is recorded there.

    The first task of fresh parameters does not measure its start: that of the untrained retriever is in baselines.json.
    """
    file = place.parent / "baselines.json"
    untrained = read_json(file).get("untrained") if file.is_file() else None
    return compare_with_start(read_lines(place / "evaluations.jsonl"), untrained)


def describe_regression(task: str, stage: Mapping[str, Any] | None, measure: str | None = None) -> str | None:
    """One line for a task that is worse at its end than before its first step; else None.

    measure: by which it kept its best parameters, '' where that was not measured; None if it kept none.
    """
    if stage is None:
        return None
    worst = min(stage["end"], stage["end"] if stage.get("last") is None else stage["last"])
    if worst >= stage["start"]:
        return None
    handed_on = "set config.evaluation.keep_best=True to hand on the best ones"
    if "kept_step" in stage:
        handed_on = f"it hands on the parameters of step {stage['kept_step']} ({stage['end']:.3f})"
    elif measure is not None:
        why = f"they are kept by {measure.replace('_', ' ')}" if measure else "no measured question has an answer"
        handed_on = f"it hands on its last parameters, since {why}"
    return f"{task} is worse than at its start: {stage['measure']} {stage['start']:.3f} -> {worst:.3f}; {handed_on}"
