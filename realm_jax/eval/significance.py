"""Compute confidence intervals of means over questions or seeds, and test if two runs differ.

Intervals over questions treat them as a random sample of all possible questions, and do not cover other seeds.
`mean_of` and `paired_mean` cover other seeds, and not other questions. Every draw follows from a seed, so results are
reproducible. The metrics: `question_metrics.py`.
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
    """The difference of two means over the same questions.

    Attributes:
        value: mean of b − a.
        low: lower end of the interval; None for fewer than two questions or if all differences are equal.
        high: upper end, like `low`.
        p: p-value of a paired permutation test.
        mcnemar: p of McNemar's exact test; None if not all values are 0 or 1.
        only_a: number of questions on which a is better.
        only_b: number of questions on which b is better.
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
    """Return the percentile bootstrap interval of a mean of shares.

    If all values are 0 or all are 1, the bootstrap has no width, so we use Clopper and Pearson's exact interval.

    Args:
        values: float [questions], each 0 to 1.
        seed: seed of the bootstrap.

    Returns:
        Both ends; (None, None) for fewer than two values, or if all have the same other value.
    """
    sample = np.asarray(values, np.float64)
    if len(sample) > 1 and (sample == sample[0]).all() and sample[0] in (0, 1):
        exact = stats.binomtest(int(sample.sum()), len(sample)).proportion_ci(LEVEL, method="exact")
        return float(exact.low), float(exact.high)
    return _bootstrap(sample, seed)


def _bootstrap(sample: NDArray[np.float64], seed: int) -> Ends:
    """Return the percentile bootstrap interval; (None, None) without two different values."""
    if len(sample) < 2 or (sample == sample[0]).all():
        return None, None
    bootstrap = stats.bootstrap(
        (sample,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=max(1, _AT_A_TIME // len(sample)),
        vectorized=True,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(bootstrap.confidence_interval.low), float(bootstrap.confidence_interval.high)


def clustered_interval(changes: ArrayLike, clusters: ArrayLike) -> Ends:
    """Return the interval of a mean of clustered values, for example of sentences that share a document.

    It is Student's t with (clusters − 1) degrees of freedom times the cluster-robust standard error. With one value in
    each cluster it is the usual interval of a mean.

    Args:
        changes: float [n].
        clusters: the cluster of each change, int [n].

    Returns:
        Both ends; (None, None) for fewer than two clusters, or if no cluster differs from the mean.
    """
    sample = np.asarray(changes, np.float64)
    names, members = np.unique(np.asarray(clusters), return_inverse=True)
    count, center = len(names), float(sample.mean())
    sums = np.bincount(members, sample - center)  # [clusters]
    if count < 2 or np.allclose(sums, 0):
        return None, None
    error = float(np.sqrt(count / (count - 1) * (sums**2).sum())) / len(sample)
    reach = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * error
    return center - reach, center + reach


class Mean(NamedTuple):
    """A mean over seeds.

    Attributes:
        value: the mean.
        low: lower end of its interval; None for a single seed.
        high: upper end, like `low`.
    """

    value: float
    low: float | None
    high: float | None


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean over one or more seeds, with the interval of Student's t."""
    center = float(np.mean(values))
    if len(values) < 2:
        return Mean(center, None, None)
    reach = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * stats.sem(values))
    return Mean(center, center - reach, center + reach)


def paired_mean(a: Sequence[float], b: Sequence[float]) -> Mean:
    """Return the mean of b − a over seeds.

    Args:
        a: values of the first system, seed by seed.
        b: values of the second system, with the same seeds in the same order.

    Raises:
        ValueError: the numbers of seeds differ.
    """
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
    # Under the null hypothesis each difference could have the other sign. Differences of 0 do not change.
    p, moved = 1.0, change[change != 0]
    if len(moved) > 1:  # a single change is as likely in either direction
        test: Any = stats.permutation_test(
            (moved,),
            np.mean,
            permutation_type="samples",
            vectorized=True,
            n_resamples=PERMUTATIONS,
            batch=max(1, _AT_A_TIME // len(moved)),
            rng=np.random.default_rng(0),
        )
        p = float(test.pvalue)
    low, high = paired_interval(first, second)
    return Difference(float(change.mean()), low, high, p, mcnemar, only_a, only_b)


def paired_interval(a: ArrayLike, b: ArrayLike) -> Ends:
    """Return the interval of `difference`, without its tests.

    Args:
        a: values of the first run, float [questions].
        b: values of the second run, in the same order.

    Returns:
        Both ends; (None, None) for fewer than two questions or if all differences are equal.
    """
    return _bootstrap(np.asarray(b, np.float64) - np.asarray(a, np.float64), seed=0)
