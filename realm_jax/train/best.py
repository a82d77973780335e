"""Compare a task with its start, and keep the best parameters on the way: TASK/best.

Fine-tuning a good retriever can make it worse, and a loss that falls does not show it. So what a task is measured by is
compared with what it was before the task's first step.
"""

import logging
from pathlib import Path
from typing import Any

from realm_jax.models.realm import Params
from realm_jax.storage import read_json
from realm_jax.tasks.base import Task
from realm_jax.train.checkpoints import Checkpoints, SavedCheckpoint
from realm_jax.train.metrics import read_lines
from realm_jax.train.step import State

logger = logging.getLogger(__name__)

RECALLS = ("recall@5", "answer_recall@5")  # what a retriever is judged by: the first that was measured


class BestParameters:
    """Of a task in the folder `place`, by the largest value of `selection_metric` in what is measured.

    What is measured depends on the step alone, so a run that is resumed from an earlier checkpoint finds the same.
    """

    def __init__(self, task: Task, place: Path, keep: bool) -> None:
        """keep: whether parameters are kept at all."""
        self._task, self._folder, self._keep = task, place / "best", keep

    def selection_metric(self, found: dict[str, Any]) -> str | None:
        """The measure by which parameters are kept, None if none are."""
        return selection_metric(self._task.selects_by, found) if self._keep else None

    def update(self, step: int, state: State, found: dict[str, Any]) -> None:
        """Keep what the task trained, at a step, if it measured better than all before; of equals the first stay."""
        if not (name := self.selection_metric(found)):
            return
        saved = SavedCheckpoint.newest_on_process_0(self._folder)
        if saved is None or found[name] > saved.record["value"]:
            with Checkpoints(self._folder, keep=1) as checkpoints:
                checkpoints.save(step, {"trained": state.trained}, {}, {"value": found[name]}, wait=True)

    def parameters_other_than(self, step: int) -> tuple[int, Params] | None:
        """The step that was best and what the task had trained then; None if it is `step`."""
        saved = SavedCheckpoint.newest_on_process_0(self._folder) if self._keep else None
        if saved is None or saved.step == step:
            return None
        value = saved.record["value"]
        logger.info("%s ends with the parameters of step %d, which measured %.4f", self._task.name, saved.step, value)
        return saved.step, saved.params(self._task.trained, self._task.run.param_shardings)


def selection_metric(selects_by: str, found: dict[str, Any]) -> str:
    """The measure by which a task keeps its best parameters, its `selects_by` or recall; '' where that was not
    measured."""
    name = selects_by or primary_metric(found)
    return name if name in found else ""


def primary_metric(found: dict[str, Any]) -> str:
    """The name of what a measurement is judged by; '' where it holds nothing to judge by."""
    return next((name for name in RECALLS if name in found), "")


def compare_with_start(lines: list[dict[str, Any]], baseline: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """How a task ended against its start: {"measure", "start", "end", "kept_step"?, "last"?}; None if unknown.

    lines: the records of its measurements, in order. baseline: what the parameters were worth that it started from,
    where the task did not measure them. kept_step, last: the step whose parameters it handed on, and what its last ones
    were worth, where those are not the same.
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


def describe_regression(task: str, stage: dict[str, Any] | None, measure: str | None = None) -> str | None:
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
