"""Keep the best parameters of a task: TASK/best.

Fine-tuning a good retriever can make it worse, and a falling loss does not show it. So we compare a task's selection
metric with its value before the first step.
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

# Task → metric that selects its best parameters; recall (`primary_metric`) for all other tasks.
SELECTION_METRICS = {"qa": "exact_match", "closed_book": "exact_match", "rerank": "answer_recall@1"}


class BestParameters:
    """Keeps the parameters of a task with the largest value of its selection metric.

    Measures depend only on the step, so a run that resumes from an earlier checkpoint keeps the same parameters.
    """

    def __init__(self, task: Task, folder: Path, keep: bool) -> None:
        """Open the saved parameters of a task.

        Args:
            task: names the trained networks and their shardings.
            folder: WORKDIR/TASK.
            keep: false to save and return nothing.
        """
        self._task, self._folder, self._keep = task, folder / "best", keep

    def selection_metric(self, measures: dict[str, Any]) -> str | None:
        """Return the metric that selects parameters, '' if it was not measured, None if none are kept."""
        return selection_metric(self._task.name, measures) if self._keep else None

    def update(self, step: int, state: State, measures: dict[str, Any]) -> None:
        """Save the trained parameters if they measured better than those of all earlier steps.

        Args:
            step: number of training steps that made the parameters.
            state: has the parameters.
            measures: metric → value, of an evaluation of these parameters.
        """
        if not (name := self.selection_metric(measures)):
            return
        saved = SavedCheckpoint.newest_on_process_0(self._folder)
        if saved is None or measures[name] > saved.record["value"]:
            with Checkpoints(self._folder, keep=1) as checkpoints:
                checkpoints.save(step, {"trained": state.trained}, {}, {"value": measures[name]})
                checkpoints.wait()

    def parameters_other_than(self, step: int) -> tuple[int, Params] | None:
        """Return the best step and the parameters that the task had trained then; None if it is `step`."""
        saved = SavedCheckpoint.newest_on_process_0(self._folder) if self._keep else None
        if saved is None or saved.step == step:
            return None
        value = saved.record["value"]
        logger.info("%s: keeping the parameters of step %d, the best with %.4f", self._task.name, saved.step, value)
        return saved.step, saved.params(self._task.trained, self._task.run.param_shardings)


def selection_metric(task: str, measures: dict[str, Any]) -> str:
    """Return the metric that selects a task's best parameters; '' if it is not among `measures`.

    Args:
        task: a task's name.
        measures: metric → value, of an evaluation.
    """
    name = SELECTION_METRICS.get(task) or primary_metric(measures)
    return name if name in measures else ""


def keeps_best(task: str, config: Config) -> bool:
    """Return True if a task returns the parameters that measured best, not its last ones.

    Args:
        task: a task's name.
        config: `evaluation.keep_best` decides, and `evaluation.every` for fine-tuning.
    """
    return bool(config.evaluation.keep_best or (task == "qa" and config.evaluation.every > 0))
