"""A task against its own start: what is compared, and what is reported when it ended below."""

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


RETURNED_START = lines(0.941, 0.941, best_step=0, last={"recall@5": 0.3})


@pytest.mark.parametrize(
    "records, stage",
    [
        (lines(0.5, 0.6), {"measure": "recall@5", "start": 0.5, "end": 0.6}),
        (RETURNED_START, {"measure": "recall@5", "start": 0.941, "end": 0.941, "kept_step": 0, "last": 0.3}),
        ([], None),
        (lines(0.5, 0.6)[1:], None),
        (lines(0.5, 0.6)[:2], None),
    ],
)
def test_both_ends_of_a_task_are_compared(records, stage):
    assert compare_with_start(records) == stage


def test_a_task_that_gained_reports_nothing():
    assert describe_regression("ict", compare_with_start(lines(0.5, 0.6))) is None
    baseline = compare_with_start(lines(0.5, 0.6)[1:], {"recall@5": 0.7})
    assert describe_regression("ict", baseline) is not None, "without a measurement of its start"


@pytest.mark.parametrize(
    "records, measure, message",
    [
        (lines(0.941, 0.3), None, "0.941 -> 0.300; set config.evaluation.keep_best=True"),
        (RETURNED_START, None, "0.941 -> 0.300; it returns the parameters of step 0 (0.941)"),
        # A loss of the returned parameters counts even if the last ones had none.
        (lines(0.9, 0.8, best_step=10, last={"recall@5": 0.91}), "", "0.900 -> 0.800; it returns the parameters of"),
        (
            lines(0.9, 0.8),
            "exact_match",
            "0.900 -> 0.800; it returns its last parameters, because they are kept by exa",
        ),
        (
            lines(0.9, 0.8),
            "",
            "0.900 -> 0.800; it returns its last parameters, because no measured question has an ans",
        ),
    ],
)
def test_a_task_that_lost_reports_what_it_hands_on_and_why(records, measure, message):
    told = describe_regression("qa", compare_with_start(records), measure)
    assert told.startswith(f"qa is worse than at its start: recall@5 {message}")


def test_a_measure_that_was_not_taken_selects_nothing():
    assert selection_metric("qa", {"exact_match": 0.4, "recall@5": 0.4}) == "exact_match"
    assert selection_metric("qa", {"recall@5": 0.4}) == ""
    assert selection_metric("realm", {"exact_match": 0.4, "recall@5": 0.4}) == "recall@5"
