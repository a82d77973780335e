"""The parameters that measured best on their way, kept beside a task's checkpoints: TASK/best."""

import logging
from pathlib import Path
from typing import Any

from realm_jax.models.realm import Params
from realm_jax.run import BaseRun
from realm_jax.training.checkpoints import Checkpoints, Saved
from realm_jax.training.restore import task_params
from realm_jax.training.state import State
from realm_jax.training.tasks import Task

logger = logging.getLogger(__name__)


class Best:
    """Of a task in the folder `place`, by the largest value of one name in what is measured; '' keeps nothing.

    What is measured depends on the step alone, so a run that goes on from an earlier checkpoint finds the same ones.
    """

    def __init__(self, run: BaseRun, task: Task, place: Path, name: str) -> None:
        self._run, self._task, self._folder, self._name = run, task, place / "best", name

    def look(self, step: int, state: State, found: dict[str, Any]) -> None:
        """Keep the parameters of a step if they measured better than all before; of equals the first stay."""
        if not self._name:
            return
        saved = Saved.newest_of_first(self._folder)
        if saved is None or found[self._name] > saved.record["value"]:
            with Checkpoints(self._folder, keep=1) as checkpoints:
                checkpoints.save(step, state, {}, {"value": found[self._name]}, wait=True)

    def other_than(self, step: int, like: Params) -> tuple[int, Params] | None:
        """The step and parameters that were best; None where they are those of `step`. like: shapes of all of them."""
        saved = Saved.newest_of_first(self._folder) if self._name else None
        if saved is None or saved.step == step:
            return None
        value = saved.record["value"]
        logger.info("%s ends with the parameters of step %d: %s %.4f", self._task.name, saved.step, self._name, value)
        return saved.step, task_params(self._run, self._task, saved, like)
