"""Compare a task with its start, and keep the best parameters on the way: TASK/best.

Fine-tuning a good retriever can make it worse, and a loss that falls does not show it. So what a task is measured by is
compared with what it was before the task's first step.
"""

import logging
from pathlib import Path
from typing import Any

from realm_jax.config import Config
from realm_jax.models.layers import Params
from realm_jax.tasks.base import Task
from realm_jax.train.checkpoints import Checkpoints, SavedCheckpoint
from realm_jax.train.records import primary_metric
from realm_jax.train.step import State

logger = logging.getLogger(__name__)

# Measures that the best parameters of a task are selected by; of the other tasks it is recall.
SELECTION_METRICS = {"qa": "exact_match", "closed_book": "exact_match", "rerank": "answer_recall@1"}


class BestParameters:
    """Keeps the parameters of a task with the largest value of its selection metric.

    What is measured depends on the step alone, so a run that is resumed from an earlier checkpoint keeps the same.
    """

    def __init__(self, task: Task, folder: Path, keep: bool) -> None:
        """Open what is kept.

        Args:
            task: whose parameters these are.
            folder: the task's.
            keep: False to keep none.
        """
        self._task, self._folder, self._keep = task, folder / "best", keep

    def selection_metric(self, measures: dict[str, Any]) -> str | None:
        """Return the measure by which parameters are kept, None if none are."""
        return selection_metric(self._task.name, measures) if self._keep else None

    def update(self, step: int, state: State, measures: dict[str, Any]) -> None:
        """Keep what the task trained if it measured better than at all earlier steps; of equals the first stay.

        Args:
            step: of the parameters.
            state: their training state.
            measures: what was measured.
        """
        if not (name := self.selection_metric(measures)):
            return
        saved = SavedCheckpoint.newest_on_process_0(self._folder)
        if saved is None or measures[name] > saved.record["value"]:
            with Checkpoints(self._folder, keep=1) as checkpoints:
                checkpoints.save(step, {"trained": state.trained}, {}, {"value": measures[name]}, wait=True)

    def parameters_other_than(self, step: int) -> tuple[int, Params] | None:
        """Return the step that was best and what the task had trained then; None if it is `step`."""
        saved = SavedCheckpoint.newest_on_process_0(self._folder) if self._keep else None
        if saved is None or saved.step == step:
            return None
        value = saved.record["value"]
        logger.info("%s ends with the parameters of step %d, which measured %.4f", self._task.name, saved.step, value)
        return saved.step, saved.params(self._task.trained, self._task.run.param_shardings)


def selection_metric(task: str, measures: dict[str, Any]) -> str:
    """Return the measure by which a task keeps its best parameters; '' if that was not measured."""
    name = SELECTION_METRICS.get(task) or primary_metric(measures)
    return name if name in measures else ""


def keeps_best(task: str, config: Config) -> bool:
    """Return True if a task hands on the parameters that measured best."""
    return bool(config.evaluation.keep_best or (task == "qa" and config.evaluation.every > 0))
