"""Groups of passages that are alike, for the tasks that compare the passages of a batch (`data/neighbours.py`)."""

import logging

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.neighbours import GROUP, groups_of_neighbours
from realm_jax.errors import UserError
from realm_jax.schema import require
from realm_jax.tasks.base import Embed, Task, load_or_create

logger = logging.getLogger(__name__)
FILE = "neighbours.json"


def check_groups(task: Task) -> None:
    """Raise UserError for a batch that is not made of whole groups."""
    fits, what = task.settings.batch_size % GROUP == 0, f"passages come in groups of {GROUP}; set a multiple of it"
    require(fits, f"{task.name}.batch_size", what)


def grouped_rows(task: Task, embed: Embed, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows in groups of GROUP, one group after another: as many as the steps of the task take, or as there are.

    rows: those that may be in a group. Kept in a file of the task. Raises UserError if there are none.
    """
    found = load_or_create(task, FILE, "groups", lambda: _groups(task, embed(), rows).tolist())
    return np.array(found, np.int64).reshape(-1)


def _groups(task: Task, vectors: NDArray, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    store, wanted = task.run.sources.passages, task.settings.steps * task.settings.batch_size // GROUP
    allowed = np.isin(np.arange(len(store)), rows)
    documents = [store.document_id(row) for row in range(len(store))]
    rng = np.random.default_rng((task.run.config.seed, task.stream))
    groups = groups_of_neighbours(vectors, documents, allowed, wanted, rng)
    if not len(groups):
        raise UserError(
            f"{store.folder}: {task.name} needs {GROUP} documents to learn from; leave it out of config.tasks"
        )
    logger.info("%d groups of %d passages that are alike, of %d wanted", len(groups), GROUP, wanted)
    return groups
