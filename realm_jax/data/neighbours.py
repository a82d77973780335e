"""Groups of passages that are alike: the hard negatives of one another in a batch of `evidence_contrast`.

In a batch of passages drawn at random almost any word of a sentence tells which one it comes from, and there is nothing
to learn. A group is a passage drawn at random and those of other documents whose vectors are nearest to its own.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

GROUP = 8  # passages
SEEDS = 64  # groups that are begun at a time


def groups_of_neighbours(
    vectors: NDArray[np.floating], documents: Sequence[str], allowed: NDArray[np.bool_], most: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:  # fmt: skip
    """Rows in groups of GROUP, [groups, GROUP], at most `most`; no row is in two, no document twice in one.

    vectors [rows, width]: neighbours have large inner products. documents: of each row. allowed [rows]: rows that may
    be in a group. Groups end where the rows that are left have too few documents.
    """
    free, seeds = allowed.copy(), rng.permutation(np.flatnonzero(allowed))
    owners = numbered(documents)
    groups: list[NDArray[np.int64]] = []
    for start in range(0, len(seeds), SEEDS):
        if len(groups) == most:
            break
        part = seeds[start : start + SEEDS]
        scores = vectors[part] @ vectors.T
        for seed, score in zip(part, scores, strict=True):
            if len(groups) == most:
                break
            if free[seed] and len(group := _group(int(seed), score, free, owners)):
                groups.append(group)
                free[group] = False
    return np.array(groups, np.int64).reshape(-1, GROUP)


def numbered(names: Iterable[str]) -> NDArray[np.int64]:
    """A number for each name, the same for the same, in the order in which they first come."""
    known: dict[str, int] = {}
    return np.array([known.setdefault(name, len(known)) for name in names], np.int64)


def _group(seed: int, scores: NDArray, free: NDArray[np.bool_], owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """A row and the GROUP − 1 free rows of largest score, each the best of its document; none where there are fewer."""
    rows = np.flatnonzero(free & (owners != owners[seed]))
    rows = rows[np.argsort(-scores[rows], kind="stable")]
    _, first = np.unique(owners[rows], return_index=True)
    others = rows[np.sort(first)][: GROUP - 1]
    return np.concatenate([[seed], others]) if len(others) == GROUP - 1 else others[:0]
