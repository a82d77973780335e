"""How far a mean over questions can be trusted, and whether two runs differ on the same questions.

Questions are taken for a random sample of all that might have been asked; nothing is said about runs with other seeds,
but by `mean_of` and `paired_mean`, which say nothing of other questions. Every draw follows from a seed, so a table is
the same each time. Not for what is measured: read `question_metrics.py`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

LEVEL = 0.95
RESAMPLES = 2_000  # of a bootstrap: an end of an interval then moves by a hundredth of its width from seed to seed
PERMUTATIONS = 9_999
_AT_A_TIME = 2_000_000  # numbers drawn at once

METHODS = (
    f"intervals: {LEVEL:.0%}, percentile bootstrap over questions ({RESAMPLES:,} resamples), none if all "
    "differences are equal; "
    f"p: paired permutation test (signs of the differences, {PERMUTATIONS:,} draws); McNemar: exact, for "
    "measures that are right or wrong"
)


SEED_METHODS = f"intervals: {LEVEL:.0%}, Student's t over seeds on these questions; differences are paired by seed"


class Difference(NamedTuple):
    """b − a, means over the same questions. p: of a paired permutation test.

    low, high: ends of the interval, None for fewer than two questions or if all differences are equal. mcnemar: p of
    McNemar's exact test, None if values are others than 0 and 1. only_a, only_b: questions on which a, or b, is
    better.
    """

    value: float
    low: float | None
    high: float | None
    p: float
    mcnemar: float | None
    only_a: int
    only_b: int


Ends = tuple[float, float] | tuple[None, None]


def interval(values: ArrayLike, seed: int = 0) -> Ends:
    """Ends of the interval of a mean of shares; (None, None) for fewer than two values.

    values: float [questions], each of 0 to 1. The interval is the percentile bootstrap's. Where all values are equal
    that has no width: then it is Clopper and Pearson's exact one if they are all 0 or all 1, and there is none else.
    """
    sample = np.asarray(values, np.float64)
    if len(sample) > 1 and (sample == sample[0]).all() and sample[0] in (0, 1):
        found = stats.binomtest(int(sample.sum()), len(sample)).proportion_ci(LEVEL, method="exact")
        return float(found.low), float(found.high)
    return _bootstrap(sample, seed)


def _bootstrap(sample: NDArray[np.float64], seed: int) -> Ends:
    """The percentile bootstrap interval; (None, None) where there are no two different values to draw from."""
    if len(sample) < 2 or (sample == sample[0]).all():
        return None, None
    found = stats.bootstrap(
        (sample,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=max(1, _AT_A_TIME // len(sample)),
        vectorized=True,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def clustered_interval(changes: ArrayLike, clusters: ArrayLike) -> Ends:
    """Ends of the interval of a mean of changes of which those of one cluster are alike, as those of the sentences of a
    document are.

    changes: float [n]; clusters: int [n], the cluster of each. Student's t, with a degree of freedom fewer than
    clusters, times the cluster-robust standard error: with one change a cluster it is the usual interval of a mean.
    (None, None) for fewer than two clusters, or if no cluster differs from the mean.
    """
    sample = np.asarray(changes, np.float64)
    names, places = np.unique(np.asarray(clusters), return_inverse=True)
    count, centre = len(names), float(sample.mean())
    sums = np.bincount(places, sample - centre)
    if count < 2 or np.allclose(sums, 0):
        return None, None
    error = float(np.sqrt(count / (count - 1) * (sums**2).sum())) / len(sample)
    reach = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * error
    return centre - reach, centre + reach


class Mean(NamedTuple):
    """A mean over seeds with the ends of its interval; None for a single seed."""

    value: float
    low: float | None
    high: float | None


def mean_of(values: Sequence[float]) -> Mean:
    """The mean of a number over seeds, one at least, with the interval of Student's t."""
    centre = float(np.mean(values))
    if len(values) < 2:
        return Mean(centre, None, None)
    reach = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * stats.sem(values))
    return Mean(centre, centre - reach, centre + reach)


def paired_mean(a: Sequence[float], b: Sequence[float]) -> Mean:
    """The mean of b − a over seeds that both have, in one order. Raises ValueError for other numbers of seeds."""
    return mean_of([after - before for before, after in zip(a, b, strict=True)])


def difference(a: ArrayLike, b: ArrayLike) -> Difference:
    """Compare two runs on the same questions.

    Args:
        a: values of the first run, float [questions], at least one.
        b: values of the second run, in the same order.
    """
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    change = second - first
    only_a, only_b = int((change < 0).sum()), int((change > 0).sum())
    is_binary = bool(np.isin(np.concatenate([first, second]), (0, 1)).all())
    differ = only_a + only_b
    mcnemar = None if not is_binary else float(stats.binomtest(only_a, differ).pvalue) if differ else 1.0
    # Signs of the differences: each could as well have the other sign; those of 0 say nothing.
    p, moved = 1.0, change[change != 0]
    if len(moved) > 1:  # a single change is as likely in either direction
        found: Any = stats.permutation_test(
            (moved,),
            np.mean,
            permutation_type="samples",
            vectorized=True,
            n_resamples=PERMUTATIONS,
            batch=max(1, _AT_A_TIME // len(moved)),
            rng=np.random.default_rng(0),
        )
        p = float(found.pvalue)
    low, high = paired_interval(first, second)
    return Difference(float(change.mean()), low, high, p, mcnemar, only_a, only_b)


def paired_interval(a: ArrayLike, b: ArrayLike, seed: int = 0) -> Ends:
    """The interval of `difference` alone. a, b: float [questions], the same questions in the same order."""
    return _bootstrap(np.asarray(b, np.float64) - np.asarray(a, np.float64), seed)
