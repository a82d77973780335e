"""A task against its own start: what is compared, and what is said when it ended below."""

import pytest

from realm_jax.train.best import selection_metric
from realm_jax.train.records import compare_with_start, describe_regression


def lines(start: float, end: float, **last) -> list[dict]:
    """Records of a task's measurements: before its first step, on the way, and at its end."""
    return [
        {"step": 0, "recall@5": start, "answer_recall@5": 0.9, "refresh": True},
        {"step": 10, "recall@5": 0.99, "refresh": True},
        {"step": 20, "recall@5": end, "answer_recall@5": 0.1, "refresh": False, **last},
    ]


def test_a_task_that_gained_is_compared_and_says_nothing():
    stage = compare_with_start(lines(0.5, 0.6))
    assert stage == {"measure": "recall@5", "start": 0.5, "end": 0.6}
    assert describe_regression("ict", stage) is None


def test_a_task_that_lost_says_what_to_set():
    stage = compare_with_start(lines(0.941, 0.3))
    wanted = "ict is worse than at its start: recall@5 0.941 -> 0.300; set config.evaluation.keep_best=True"
    assert describe_regression("ict", stage).startswith(wanted)


def test_a_task_that_handed_on_its_best_says_what_the_last_were_worth():
    stage = compare_with_start(lines(0.941, 0.941, best_step=0, last={"recall@5": 0.3}))
    assert stage == {"measure": "recall@5", "start": 0.941, "end": 0.941, "kept_step": 0, "last": 0.3}
    assert describe_regression("realm", stage) == (
        "realm is worse than at its start: recall@5 0.941 -> 0.300; it hands on the parameters of step 0 (0.941)"
    )


@pytest.mark.parametrize("records", [[], lines(0.5, 0.6)[1:], lines(0.5, 0.6)[:2]])
def test_nothing_is_compared_without_both_ends(records):
    assert compare_with_start(records) is None


def test_a_task_without_a_measurement_of_its_start_takes_the_baseline():
    stage = compare_with_start(lines(0.5, 0.6)[1:], {"recall@5": 0.7})
    assert describe_regression("ict", stage) is not None


@pytest.mark.parametrize(
    "end, why", [({"exact_match": 0.4}, "they are kept by exact match"), ({}, "no measured question has an answer")]
)
def test_a_task_that_keeps_its_last_parameters_says_why(end, why):
    records = lines(0.9, 0.8, **end)
    measure = selection_metric("exact_match", records[-1])
    assert describe_regression("qa", compare_with_start(records), measure) == (
        f"qa is worse than at its start: recall@5 0.900 -> 0.800; it hands on its last parameters, since {why}"
    )


def test_a_loss_of_what_is_handed_on_counts_even_if_the_last_parameters_had_none():
    stage = compare_with_start(lines(0.9, 0.8, best_step=10, last={"recall@5": 0.91}))
    assert "recall@5 0.900 -> 0.800; it hands on the parameters of step 10 (0.800)" in describe_regression(
        "qa", stage, ""
    )
