"""The records of `realm predict` and `realm evaluate`: what a trained run answers to each question, with its passages.

Their fields: `FIELDS`. Files of them: `realm_jax/eval/prediction_files.py`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.data.questions import Question
from realm_jax.eval.prediction import Evaluator, Prediction
from realm_jax.eval.prediction_files import Record, question_record
from realm_jax.eval.retrieval import answer_hits
from realm_jax.inference.answers import placed
from realm_jax.run import Run
from realm_jax.tasks import TASKS, make_task
from realm_jax.tasks.closed_book import predict_closed_book
from realm_jax.train.trained_run import NBEST, TrainedRun, float32_digits, ranks_by_search

FIELDS = """  prediction, probability   the likeliest answer, as it stands in its passage
  passage                   where: {"id", "part", "title", "span"}; span: characters of the passage's text, part: which
                            of the passages that its document was cut into; null where no passage was found
  nbest                     the likeliest answers, each with probability and passage
  retrieved                 {"id", "score", "ranks", "has_answer"}: the best passages, the first of them read; score:
                            the retriever's, with what a task adds that orders passages anew; ranks: the place in each
                            search that found it, {"vectors": 3, "bm25": 1}
  reader_oracle             whether a right answer could have been chosen in the passages that were read

Of a reader without passages (task closed_book) prediction and probability are all.
"""


def describe(run: Run, task: str, step: int, search: str) -> dict[str, Any]:
    """The facts reported with a run's metrics: {"task", "step", "parameters", "passages", "passages_read"}."""
    asked, shapes = make_task(task, run), run.abstract_params
    towers = run.model.embedder_names if asked.needs_vectors(search) else ()
    used = [shapes[name] for name in (*towers, "reader", *([asked.rerank.network] if asked.rerank else []))]
    return {
        "task": task,
        "step": step,
        "parameters": sum(x.size for x in jax.tree.leaves(used)),
        "passages": run.context.rows,
        "passages_read": min(run.question_context.qa_passages, run.context.rows) if TASKS[task].reads_passages else 0,
    }


def records(
    trained: TrainedRun, questions: Sequence[Question], nbest: int = NBEST, first: int = 0
) -> Iterator[list[Record]]:
    """The records of questions `first` …, a batch at a time; see `FIELDS`."""
    if not TASKS[trained.task].reads_passages:
        yield from _closed_book_records(trained, questions, first)
        return
    evaluator = trained.evaluator(questions[first:])
    for predictions in evaluator.predict_batches(trained.params, trained.index):
        asked = questions[first : first + len(predictions)]
        rows = np.stack([prediction.retrieved for prediction in predictions])
        hits = answer_hits(
            trained.run.sources.passages, rows, [one.answers for one in asked], [one.is_regex for one in asked]
        )
        found = zip(asked, predictions, hits, strict=True)
        yield [
            question_record(one, number) | _retrieval_record(trained, evaluator, one, prediction, has_answer, nbest)
            for number, (one, prediction, has_answer) in enumerate(found, first + 1)
        ]
        first += len(predictions)


def _closed_book_records(trained: TrainedRun, questions: Sequence[Question], first: int) -> Iterator[list[Record]]:
    """The records of a reader without passages: one answer to each question, from nowhere."""
    for answers in predict_closed_book(trained.run, questions[first:], trained.params):
        yield [
            question_record(questions[number], number + 1)
            | {"prediction": answer.text, "probability": float32_digits(answer.probability)}
            for number, answer in enumerate(answers, first)
        ]
        first += len(answers)


def _retrieval_record(
    trained: TrainedRun,
    evaluator: Evaluator,
    question: Question,
    prediction: Prediction,
    has_answer: NDArray[np.bool_],
    nbest: int,
) -> Record:
    """The record of a question with retrieved passages. has_answer: bool [retrieved]."""
    store = trained.run.sources.passages
    found = [placed(trained, answer) for answer in prediction.nbest[:nbest]]
    retrieved: list[dict[str, Any]] = [
        {"id": store.document_id(row), "score": float32_digits(score), "ranks": ranks_by_search(ranks)}
        for row, score, ranks in zip(
            prediction.retrieved.tolist(), prediction.scores.tolist(), prediction.ranks.tolist(), strict=True
        )
        if row >= 0
    ]
    record: Record = {"prediction": found[0]["answer"], "probability": found[0]["probability"]}
    record |= {"passage": found[0]["passage"], "nbest": found, "retrieved": retrieved}
    if not question.answers:
        return record
    for passage, hit in zip(retrieved, has_answer[prediction.retrieved >= 0].tolist(), strict=True):
        passage["has_answer"] = hit
    return record | {"reader_oracle": evaluator.reader_oracle(question, prediction)}
