"""Intervals and comparisons: against closed forms, and on samples where one can count."""

import math

import numpy as np
import pytest
from scipy import stats

from realm_jax.eval.significance import PERMUTATIONS, clustered_interval, difference, interval, mean_of


def test_an_interval_is_that_of_the_normal_distribution_where_there_are_many_questions():
    right = np.arange(1000) % 10 < 3
    low, high = interval(right)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    assert (low, high) == (pytest.approx(0.3 - half, abs=0.003), pytest.approx(0.3 + half, abs=0.003))
    assert interval(right) == (low, high) and interval(right, seed=1) != (low, high)


def test_one_question_has_no_interval_and_equal_ones_an_exact_one():
    assert interval([1.0]) == (None, None)
    wrong = 0.025 ** (1 / 8)  # none of eight right is as likely as this level's half, and no less, at this share wrong
    assert interval([0.0] * 8) == (0, pytest.approx(1 - wrong))
    assert interval([1.0] * 8) == (pytest.approx(wrong), 1)
    assert interval([0.5] * 8) == (None, None)


def test_few_questions_that_differ_are_counted_out():
    """Five changes to the better, none to the worse: 2 of the 32 ways to give them signs are as far from 0."""
    a, b = np.zeros(50), np.zeros(50)
    b[:5] = 1
    found = difference(a, b)
    assert found.value == 0.1 and (found.only_a, found.only_b) == (0, 5)
    assert found.p == found.mcnemar == pytest.approx(2 / 32)
    assert found.low <= 0.1 <= found.high


def test_a_clear_difference_has_the_smallest_p_that_can_be_drawn():
    found = difference(np.zeros(200), np.arange(200) % 2)
    assert found.p == pytest.approx(2 / (PERMUTATIONS + 1)) and found.mcnemar == pytest.approx(2 / 2.0**100)
    assert found.low > 0.4


def test_shares_of_words_have_no_mcnemar():
    found = difference([0.5, 0.2, 1.0], [0.5, 0.4, 1.0])
    assert found.mcnemar is None and found.p == 1 and found.value == pytest.approx(0.2 / 3)


def test_a_run_does_not_differ_from_itself():
    found = difference([0, 1, 1], [0, 1, 1])
    assert found[:3] == (0, None, None) and found.p == found.mcnemar == 1
    assert difference([0, 0, 0], [1, 1, 1])[:3] == (1, None, None), "a difference is no share of right answers"


def test_with_one_change_a_cluster_the_interval_is_student_s():
    changes = np.random.default_rng(0).normal(0.1, 1, 30)
    wanted = stats.ttest_1samp(changes, 0).confidence_interval(0.95)
    assert clustered_interval(changes, np.arange(30)) == pytest.approx(tuple(wanted))


def test_what_a_cluster_repeats_says_nothing_more():
    changes, clusters = np.array([0.0, 1.0, 0.5, -0.5]), np.arange(4)
    once = clustered_interval(changes, clusters)
    assert clustered_interval(np.repeat(changes, 9), np.repeat(clusters, 9)) == pytest.approx(once)
    assert clustered_interval([0.0, 1.0], [3, 3]) == (None, None) == clustered_interval([0.5, 0.5], [0, 1])


@pytest.mark.parametrize("documents", [4, 30])
def test_sentences_of_few_documents_hardly_ever_show_a_gain_that_is_not_there(documents):
    """Fourteen sentences each, which gain or lose together; a bound that is above 0 by chance in one of forty."""
    rng, clusters = np.random.default_rng(0), np.repeat(np.arange(documents), 14)
    shared = rng.normal(0, 0.2, (8000, documents)).repeat(14, axis=1)
    drawn = shared + rng.normal(0, 0.5, shared.shape)
    lows = [clustered_interval(changes, clusters)[0] for changes in drawn]
    assert 0.019 < np.mean(np.array(lows) > 0) < 0.031


def test_intervals_over_seeds_are_students_t():
    mean = mean_of([0.1, 0.2, 0.3])
    assert mean.value == pytest.approx(0.2)
    assert mean.high - mean.value == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-6)  # t of 2 degrees of freedom
    assert mean_of([0.4]) == (0.4, None, None)
