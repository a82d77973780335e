"""What a run is measured with while it trains: its development questions, as the train loop wants them asked."""

from typing import Any

from ml_collections import ConfigDict

from realm_jax.corpus.jsonl import Question, answered
from realm_jax.data.held_out import held_out_share, masked_sentences
from realm_jax.data.sources import Sources
from realm_jax.evaluation.answers import exact_match
from realm_jax.evaluation.closed_book import recall_answers
from realm_jax.evaluation.predict import Evaluator
from realm_jax.index.candidates import Index
from realm_jax.models.realm import Params
from realm_jax.run import Run
from realm_jax.training.loop import Measure


def dev_questions(run: Run) -> list[Question]:
    """What a run is measured on: its development questions, else masked sentences of held-out documents.

    Empty where the prepared folder has no such questions and `evaluation.held_out` holds out nothing.
    """
    sources, most = run.sources, run.config.evaluation.questions
    if questions := measured_questions(run.config, sources):
        return questions
    share = held_out_share(run.config, sources.questions)
    return masked_sentences(sources.passages, sources.wordpiece, run.lengths.query, share, most) if share else []


def measured_questions(config: ConfigDict, sources: Sources) -> list[Question]:
    """The development questions that are measured: `evaluation.questions` of them at most."""
    return sources.questions.get("dev", [])[: config.evaluation.questions or None]


def measure_of(run: Run, task: str) -> Measure | None:
    """What a task is measured with; None for the warm-up, and without development questions."""
    if task == "mlm":
        return None
    return closed_book_measure(run) if task == "closed_book" else retrieval_measure(run, task)


def retrieval_measure(run: Run, task: str) -> Measure | None:
    """Recall on the development questions, and exact match of those with answers at the end of fine-tuning.

    Before, nothing has taught the reader which words answer a question.
    """
    questions = dev_questions(run)
    if not questions:
        return None
    evaluator = Evaluator(run, questions, run.measured_by(task))

    def measure(params: Params, index: Index | None, final: bool) -> dict[str, Any]:
        if index is None:
            return {}
        found = evaluator.recall(params, index)
        if final and task == "qa" and answered(questions):
            found["exact_match"] = evaluator.exact_match(evaluator.predict(params, index))
        return found

    return measure


def closed_book_measure(run: Run) -> Measure | None:
    """Exact match of answers without passages; None where no development question has answers."""
    questions = answered(dev_questions(run))
    if not questions:
        return None

    def measure(params: Params, index: Index | None, final: bool) -> dict[str, Any]:
        answers = [answer.text for batch in recall_answers(run, questions, params) for answer in batch]
        right = [exact_match(a, q.answers, q.is_regex) for a, q in zip(answers, questions, strict=True)]
        return {"exact_match": sum(right) / len(right)}

    return measure
