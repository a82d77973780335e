"""Groups of passages that are alike: the hard negatives of one another in a batch of `evidence_contrast`.

In a batch of passages drawn at random almost any word of a sentence tells which one it comes from, and there is nothing
to learn. A group is a passage drawn at random and those of other documents whose vectors are nearest to its own.
"""

import logging
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from realm_jax.config import check
from realm_jax.errors import UserError
from realm_jax.tasks.base import Embed, Task, load_or_create

logger = logging.getLogger(__name__)
FILE = "neighbours.json"
GROUP = 8  # passages
SEEDS = 64  # groups that are begun at a time


def check_groups(task: Task) -> None:
    """Raise UserError for a batch that is not made of whole groups."""
    fits, what = task.settings.batch_size % GROUP == 0, f"passages come in groups of {GROUP}; set a multiple of it"
    check(fits, f"{task.name}.batch_size", what)


def grouped_rows(task: Task, embed: Embed, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return rows in groups of GROUP, one group after another: as many as the task's steps take, or as there are.

    rows: those that may be in a group. The groups are kept in a file of the task, so that a resumed run has the same.

    Raises UserError if there are none.
    """

    def make_groups() -> list[list[int]]:
        store, wanted = task.run.sources.passages, task.settings.steps * task.settings.batch_size // GROUP
        allowed = np.isin(np.arange(len(store)), rows)
        documents = [store.document_id(row) for row in range(len(store))]
        rng = np.random.default_rng((task.run.config.seed, task.stream))
        groups = groups_of_neighbours(embed(), documents, allowed, wanted, rng)
        if not len(groups):
            raise UserError(
                f"{store.folder}: {task.name} needs {GROUP} documents to learn from; leave it out of config.tasks"
            )
        logger.info("%d groups of %d passages that are alike, of %d wanted", len(groups), GROUP, wanted)
        return groups.tolist()

    return np.array(load_or_create(task, FILE, "groups", make_groups), np.int64).reshape(-1)


def groups_of_neighbours(
    vectors: NDArray[np.floating], documents: Sequence[str], allowed: NDArray[np.bool_], most: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:  # fmt: skip
    """Return rows in groups of GROUP, [groups, GROUP], at most `most`; no row is in two, no document twice in one.

    vectors [rows, width]: neighbours have large inner products. documents: of each row. allowed [rows]: rows that may
    be in a group. Groups end where the rows that are left have too few documents.
    """
    free, seeds = allowed.copy(), rng.permutation(np.flatnonzero(allowed))
    owners = numbered(documents)
    groups: list[NDArray[np.int64]] = []
    for start in range(0, len(seeds), SEEDS):
        if len(groups) == most:
            break
        seed_scores = vectors[seeds[start : start + SEEDS]] @ vectors.T  # [SEEDS, rows]
        for seed, scores in zip(seeds[start : start + SEEDS], seed_scores, strict=True):
            if len(groups) == most:
                break
            if not free[seed]:
                continue
            # The free rows of largest score, each the best of its document.
            rows = np.flatnonzero(free & (owners != owners[seed]))
            rows = rows[np.argsort(-scores[rows], kind="stable")]
            _, first = np.unique(owners[rows], return_index=True)
            others = rows[np.sort(first)][: GROUP - 1]
            if len(others) == GROUP - 1:
                groups.append(np.concatenate([[seed], others]))
                free[groups[-1]] = False
    return np.array(groups, np.int64).reshape(-1, GROUP)


def numbered(names: Iterable[str]) -> NDArray[np.int64]:
    """Return a number for each name, the same for the same, in the order in which they first come."""
    known: dict[str, int] = {}
    return np.array([known.setdefault(name, len(known)) for name in names], np.int64)
