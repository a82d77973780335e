"""Everything that is measured of a trained run on questions, from the records that a file of predictions holds."""

from collections.abc import Sequence
from typing import Any

from realm_jax.data.questions import Question
from realm_jax.eval.metrics import compute_metrics, summarise
from realm_jax.eval.prediction import Evaluator
from realm_jax.eval.prediction_files import Record
from realm_jax.inference.predictions import describe, records
from realm_jax.tasks import TASKS
from realm_jax.train.results import bm25_question_rows
from realm_jax.train.trained_run import TrainedRun


def evaluate(
    trained: TrainedRun, questions: Sequence[Question], bm25: bool = True
) -> tuple[dict[str, Any], list[Record]]:
    """Everything that is measured, and the records that it is measured on.

    {"task", "step", "parameters", "passages", "passages_read", "questions", "measures": {"exact_match": {"value",
    "low", "high", "questions"}, …}, "bm25": {"recall@1", …}}; a measure that no question has is left out.
    """
    scored = [record for batch in records(trained, questions) for record in batch]
    facts = describe(trained.run, trained.task, trained.step, trained.search) | {"questions": len(scored)}
    found = facts | {"measures": summarised(scored)}
    if bm25 and TASKS[trained.task].reads_passages:
        evaluator = Evaluator(trained.run, questions)
        others = evaluator.recall_of(bm25_question_rows(trained.run, evaluator))
        found["bm25"] = {name: value for name, value in others.items() if name in found["measures"]}
    return found, scored


def summarised(scored: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """{measure: {"value", "low", "high", "questions"}} of records; see `eval.metrics.summarise`."""
    return {name: summarise(values) for name, values in compute_metrics(scored).items()}
