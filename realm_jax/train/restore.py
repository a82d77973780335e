"""Restore checkpoints onto a run's devices, which may differ from those they were saved on."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.checksums import checksums
from realm_jax.config import task_names, with_defaults
from realm_jax.environment import differences, environment
from realm_jax.errors import UserError
from realm_jax.index.vector_cache import embed_with_cache
from realm_jax.models.layers import Params
from realm_jax.processes import allgather_flags
from realm_jax.run import Run
from realm_jax.storage import read_json
from realm_jax.tasks.base import Task
from realm_jax.train.checkpoints import CheckpointRemoved, DamagedCheckpoint, SavedCheckpoint
from realm_jax.train.step import State, start_state, state_shardings

logger = logging.getLogger(__name__)


class Restored(NamedTuple):
    """The content of a checkpoint, on this run's devices, which may differ from those it was saved on.

    vectors, tower: of an index that the trainer made; in_flight: searches under way. None if there are none.
    """

    state: State
    record: dict[str, Any]
    vectors: NDArray | None
    tower: Params | None
    in_flight: NDArray | None


def restore(task: Task, saved: SavedCheckpoint, like: Params) -> Restored:
    """All of a checkpoint of a task, on this run's devices. like: shapes of all parameters. Raises as `SavedCheckpoint`
    does."""
    changed = differences(saved.record.get("environment", {}), environment())
    if changed:
        logger.warning("the environment differs, so bitwise reproducibility is not guaranteed: %s", "; ".join(changed))
    logger.info("%s: resuming from step %d", task.name, saved.step)
    abstract = abstract_state(task, like)
    tower = saved.read("tower", abstract.trained[task.trained[0]]) if task.retrieves else None
    return Restored(
        saved.read("state", abstract), saved.record, saved.read("vectors"), tower, saved.read("in_flight")
    )  # fmt: skip


def abstract_state(task: Task, like: Params) -> State:
    """Shapes and places of a task's state. `like`: shapes of all parameters."""
    shapes = jax.eval_shape(lambda params: start_state(task, params), like)
    places = state_shardings(task)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def restore_params(run: Run, task: str, saved: SavedCheckpoint | None = None) -> Params:
    """All parameters in a checkpoint of a task, on this run's devices; None: the newest one in the run folder.

    Changes nothing there. Raises UserError when there is none.
    """
    saved = saved or SavedCheckpoint.newest(run.workdir / task / "checkpoints")
    if saved is None:
        raise UserError(f"{run.workdir}: task {task} has no checkpoint; train it first (`realm train`)")
    return saved.params(run.param_shardings, run.param_shardings)


def saved_vectors(run: Run, saved: SavedCheckpoint) -> NDArray | None:
    """Read the passage vectors of a checkpoint, if its passage encoder gives them.

    It does if it made them, or if the task leaves it as it was.

    Args:
        run: the run.
        saved: the checkpoint.

    Returns:
        [passages, width]; None if the vectors there are others, or if there are none.
    """
    fits = not saved.trained(run.model.embedder_names[-1]) or saved.record["index_step"] == saved.step
    vectors = saved.read("vectors") if fits else None
    return None if vectors is None else vectors[: run.context.rows]


def start_vectors(
    run: Run, task: str, params: Params, on_progress: Callable[[], None] = lambda: None
) -> NDArray[np.floating]:
    """The corpus as the parameters that a task starts with embed it, [rows, width]: from a checkpoint with the same
    document tower (`vectors_from_earlier_task`), or `embed_with_cache`."""
    known = vectors_from_earlier_task(run, task, params)
    return embed_with_cache(run, params, on_progress) if known is None else known


def vectors_from_earlier_task(run: Run, name: str, params: Params) -> NDArray | None:
    """The corpus as the parameters embed it, where a task before `name`, or one of the run that this one starts from,
    ended with the same document embedder; else None. [rows, projection]."""
    names = task_names(run.config)
    before = [(run.workdir, task) for task in names[: names.index(name)]]
    for folder, task in reversed(_tasks_of_source(run) + before):
        saved = SavedCheckpoint.newest_on_process_0(folder / task / "checkpoints")
        if saved is None or not _has_tower(saved, run.model.embedder_names[-1], params):
            return None  # what is older has another embedder still
        found = None
        with contextlib.suppress(CheckpointRemoved, DamagedCheckpoint):
            found = saved_vectors(run, saved)
        if allgather_flags(found is not None).all():
            return found
    return None


def _tasks_of_source(run: Run) -> list[tuple[Path, str]]:
    """Folder and name of each task of the run in `init_from`, if it embeds the same passages in the same way."""
    folder = Path(run.config.init_from)
    if not run.config.init_from or not (folder / "config.json").is_file() or not (folder / "data.json").is_file():
        return []
    theirs, data = with_defaults(read_json(folder / "config.json")), read_json(folder / "data.json")
    sections = ("model", "encoder")  # as dictionaries: a locked config is never equal to one that is not
    same = all(theirs[name].to_dict() == run.config[name].to_dict() for name in sections)
    same = same and theirs.data.document_length == run.config.data.document_length
    alike = same and data.get("passages") == run.sources.passages.fingerprint
    return [(folder, task) for task in task_names(theirs)] if alike else []


def _has_tower(saved: SavedCheckpoint, tower: str, params: Params) -> bool:
    """Whether a checkpoint was saved with these very bits of an embedder."""
    found = checksums({tower: params[tower]})
    places = (f"state.{part}." for part in ("trained", "frozen"))
    known = saved.record["checksums"]
    return any(all(known.get(place + path) == sums for path, sums in found.items()) for place in places)
