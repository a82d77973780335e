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
from realm_jax.indexing.vector_cache import embed_with_cache
from realm_jax.mirror import download_model, is_url
from realm_jax.models.layers import Params
from realm_jax.processes import allgather_flags
from realm_jax.run import Run
from realm_jax.storage import read_json
from realm_jax.tasks.base import Task
from realm_jax.train.checkpoints import CheckpointRemoved, DamagedCheckpoint, SavedCheckpoint
from realm_jax.train.step import State, start_state, state_shardings

logger = logging.getLogger(__name__)


class Restored(NamedTuple):
    """The content of a checkpoint; None for an item that it does not have.

    Attributes:
        state: on this run's devices.
        record: see `SavedCheckpoint.record`.
        vectors: vectors of an index that the trainer embedded, [passages, width].
        query_encoder: parameters that search this index, on this run's devices.
        in_flight: rows of searches under way, [n, batch, depth] int32.
    """

    state: State
    record: dict[str, Any]
    vectors: NDArray | None
    query_encoder: Params | None
    in_flight: NDArray | None


def restore(task: Task, saved: SavedCheckpoint, like: Params) -> Restored:
    """Read all items of a task's checkpoint.

    Args:
        task: the task that continues.
        saved: its checkpoint.
        like: all parameters, or abstract arrays of their shapes.

    Raises:
        DamagedCheckpoint: an array is not as it was saved.
        CheckpointRemoved: the checkpoint was removed meanwhile.
        StorageError: the storage failed, perhaps not for long.
    """
    changed = differences(saved.record.get("environment", {}), environment())
    if changed:
        logger.warning("the environment differs, so bitwise reproducibility is not guaranteed: %s", "; ".join(changed))
    logger.info("%s: resuming from step %d", task.name, saved.step)
    abstract = abstract_state(task, like)
    query_encoder = saved.read("tower", abstract.trained[task.trained[0]]) if task.retrieves else None
    state, vectors, in_flight = saved.read("state", abstract), saved.read("vectors"), saved.read("in_flight")
    return Restored(state, saved.record, vectors, query_encoder, in_flight)


def abstract_state(task: Task, like: Params) -> State:
    """Return a task's state as abstract arrays with shardings.

    Args:
        task: names the networks that it trains.
        like: all parameters, or abstract arrays of their shapes.
    """
    shapes = jax.eval_shape(lambda params: start_state(task, params), like)
    shardings = state_shardings(task)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def restore_params(run: Run, task: str, saved: SavedCheckpoint | None = None) -> Params:
    """Read all parameters of a task's checkpoint onto this run's devices, without changing the run directory.

    Args:
        run: has the shapes and shardings.
        task: a task's name.
        saved: the checkpoint; None for the newest one in the run directory.

    Raises:
        UserError: the task has no checkpoint, or it is damaged.
    """
    saved = saved or SavedCheckpoint.newest(run.workdir / task / "checkpoints")
    if saved is None:
        raise UserError(f"{run.workdir}: task {task} has no checkpoint; train it first (`realm train`)")
    return saved.params(run.param_shardings, run.param_shardings)


def saved_vectors(run: Run, saved: SavedCheckpoint) -> NDArray | None:
    """Read the passage vectors of a checkpoint, if its passage encoder gives them.

    It does if the index has the same step, or if the task does not train the passage encoder.

    Args:
        run: has the number of passages.
        saved: the checkpoint.

    Returns:
        [passages, width]; None if there are no vectors, or those of another passage encoder.
    """
    fits = not saved.trained(run.model.embedder_names[-1]) or saved.record["index_step"] == saved.step
    vectors = saved.read("vectors") if fits else None
    return None if vectors is None else vectors[: run.context.rows]


def start_vectors(
    run: Run, task: str, params: Params, on_progress: Callable[[], None] = lambda: None
) -> NDArray[np.floating]:
    """Return the passage vectors of the parameters that a task starts from.

    Args:
        run: has the passages.
        task: its name.
        params: all parameters, of which the passage encoder embeds.
        on_progress: called between batches of passages, if no checkpoint has the vectors and we embed them.

    Returns:
        [passages, width].
    """
    saved = vectors_from_earlier_task(run, task, params)
    return embed_with_cache(run, params, on_progress) if saved is None else saved


def vectors_from_earlier_task(run: Run, name: str, params: Params) -> NDArray | None:
    """Read the passage vectors of an earlier task that ended with the same passage encoder.

    Args:
        run: its earlier tasks are tried, then those of the run in `init_from`.
        name: the task that starts.
        params: all parameters that it starts from.

    Returns:
        [passages, width]; None if no checkpoint has them.
    """
    names = task_names(run.config)
    before = [(run.workdir, task) for task in names[: names.index(name)]]
    for folder, task in reversed(_tasks_of_source(run) + before):
        saved = SavedCheckpoint.newest_on_process_0(folder / task / "checkpoints")
        if saved is None or not _has_network(saved, run.model.embedder_names[-1], params):
            return None  # even older checkpoints have other encoders
        vectors = None
        with contextlib.suppress(CheckpointRemoved, DamagedCheckpoint):
            vectors = saved_vectors(run, saved)
        if allgather_flags(vectors is not None).all():
            return vectors
    return None


def _tasks_of_source(run: Run) -> list[tuple[Path, str]]:
    """Return run directory and name of each task of the run in `init_from`, if it embeds the same
    passages in the same way."""
    name = run.config.init_from
    folder = download_model(name) if is_url(name) else Path(name)
    if not name or not (folder / "config.json").is_file() or not (folder / "data.json").is_file():
        return []
    source_config, data = with_defaults(read_json(folder / "config.json")), read_json(folder / "data.json")
    sections = ("model", "encoder")  # as dictionaries: a locked config is never equal to one that is not
    same = all(source_config[name].to_dict() == run.config[name].to_dict() for name in sections)
    same = same and source_config.data.document_length == run.config.data.document_length
    same = same and data.get("passages") == run.sources.passages.fingerprint
    return [(folder, task) for task in task_names(source_config)] if same else []


def _has_network(saved: SavedCheckpoint, network: str, params: Params) -> bool:
    """Return True if a checkpoint was saved with the same bits of a network."""
    wanted, recorded = checksums({network: params[network]}), saved.record["checksums"]
    prefixes = (f"state.{part}." for part in ("trained", "frozen"))
    return any(all(recorded.get(prefix + path) == sums for path, sums in wanted.items()) for prefix in prefixes)
