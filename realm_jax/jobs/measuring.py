"""What a run is measured with while it trains: its development questions, as the train loop wants them asked."""

from typing import Any

from realm_jax.corpus.jsonl import Question
from realm_jax.evaluation.answers import exact_match
from realm_jax.evaluation.closed_book import recall_answers
from realm_jax.evaluation.predict import Evaluator
from realm_jax.index.candidates import Index
from realm_jax.models.realm import Params
from realm_jax.run import Run
from realm_jax.training.loop import Measure


def dev_questions(run: Run) -> list[Question]:
    """The development questions that a run is measured on; empty when the prepared folder has none."""
    questions = run.sources.questions.get("dev", [])
    most = run.config.evaluation.questions
    return questions[:most] if most else questions


def measure_of(run: Run, task: str) -> Measure | None:
    """What a task is measured with; None for the warm-up, and without development questions."""
    if task == "mlm":
        return None
    return closed_book_measure(run) if task == "closed_book" else retrieval_measure(run, task)


def retrieval_measure(run: Run, task: str) -> Measure | None:
    """Recall on the development questions, and exact match at the end of fine-tuning, as the loop wants it.

    Before, nothing has taught the reader which words answer a question.
    """
    questions = dev_questions(run)
    if not questions:
        return None
    evaluator = Evaluator(run, questions, run.search_of(task))

    def measure(params: Params, index: Index | None, final: bool) -> dict[str, Any]:
        if index is None:
            return {}
        found = evaluator.recall(params, index)
        if final and task == "qa":
            found["exact_match"] = evaluator.exact_match(evaluator.predict(params, index))
        return found

    return measure


def closed_book_measure(run: Run) -> Measure | None:
    """Exact match of answers without passages."""
    questions = dev_questions(run)
    if not questions:
        return None

    def measure(params: Params, index: Index | None, final: bool) -> dict[str, Any]:
        answers = [answer.text for batch in recall_answers(run, questions, params) for answer in batch]
        right = [exact_match(a, q.answers, q.is_regex) for a, q in zip(answers, questions, strict=True)]
        return {"exact_match": sum(right) / len(right)}

    return measure
