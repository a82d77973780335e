"""Measure parameters while a task trains: recall and exact match on development questions."""

from collections.abc import Callable
from typing import Any

from realm_jax.data.held_out import held_out_share, masked_sentences
from realm_jax.data.questions import Question, answered
from realm_jax.data.sources import Sources
from realm_jax.eval.answer_matching import exact_match
from realm_jax.eval.prediction import Evaluator
from realm_jax.forward import Index
from realm_jax.models.layers import Params
from realm_jax.run import Run
from realm_jax.tasks.answering import evaluation_pipeline, reads_passages, trains_qa_reader
from realm_jax.tasks.base import Task
from realm_jax.tasks.closed_book import predict_closed_book

Measure = Callable[[Params, Index | None, bool], dict[str, Any]]
# Development questions at most: enough for a share ± 0.02, and fast; `realm evaluate` takes all.
MAX_QUESTIONS = 2000


def make_measure(task: Task) -> Measure | None:
    """Return a function that measures a task's parameters on the development questions.

    Returns:
        (parameters, index or None, final) → measures. It measures recall, and exact match if `final` is true and the
        task trains the reader with questions: at the first index the reader may not have learned to answer yet. None
        if there are no questions, and for the warm-up, which trains no retriever.
    """
    run, name = task.run, task.name
    if name == "mlm":
        return None
    questions = dev_questions(run)
    with_answers = answered(questions)
    if not reads_passages(name):

        def measure_closed_book(params: Params, index: Index | None, final: bool) -> dict[str, Any]:
            answers = [answer.text for batch in predict_closed_book(run, with_answers, params) for answer in batch]
            correct = [exact_match(a, q.answers, q.is_regex) for a, q in zip(answers, with_answers, strict=True)]
            return {"exact_match": sum(correct) / len(correct)}

        return measure_closed_book if with_answers else None
    if not questions:
        return None
    evaluator = Evaluator(run, questions, evaluation_pipeline(name, run.config))

    def measure(params: Params, index: Index | None, final: bool) -> dict[str, Any]:
        if index is None:
            return {}
        measures = evaluator.recall(params, index)
        if final and trains_qa_reader(name) and with_answers:
            measures["exact_match"] = evaluator.exact_match(evaluator.predict(params, index))
        return measures

    return measure


def dev_questions(run: Run) -> list[Question]:
    """Return the development questions of a run, or else masked sentences of held-out documents.

    The list is empty if the prepared folder has no such questions and `evaluation.held_out` holds out nothing.
    """
    sources = run.sources
    if questions := evaluation_questions(sources):
        return questions
    share = held_out_share(run.config.evaluation.held_out, sources.questions)
    return (
        masked_sentences(sources.passages, sources.tokenizer, run.lengths.query, share, MAX_QUESTIONS) if share else []
    )


def evaluation_questions(sources: Sources) -> list[Question]:
    """Return the first `MAX_QUESTIONS` development questions."""
    return sources.questions.get("dev", [])[:MAX_QUESTIONS]
