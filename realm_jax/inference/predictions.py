"""Records of `realm predict` and `realm evaluate`: what a run answers to each question, from which passages; measures.

Their fields: `FIELDS`. Files of them: `realm_jax/eval/prediction_files.py`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from realm_jax.data.questions import Question
from realm_jax.eval.prediction import Evaluator
from realm_jax.eval.prediction_files import Record, question_record
from realm_jax.eval.question_metrics import summarise
from realm_jax.eval.retrieval_metrics import answer_hits
from realm_jax.inference.answers import scored_answer
from realm_jax.run import Run
from realm_jax.tasks.answering import needs_vectors, reads_passages, reranker
from realm_jax.tasks.closed_book import predict_closed_book
from realm_jax.train.results import bm25_question_rows
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
    rerank, shapes = reranker(task, run.config), run.abstract_params
    towers = run.model.embedder_names if needs_vectors(task, run.config, search) else ()
    used = [shapes[name] for name in (*towers, "reader", *([rerank.network] if rerank else []))]
    return {
        "task": task,
        "step": step,
        "parameters": sum(x.size for x in jax.tree.leaves(used)),
        "passages": run.context.rows,
        "passages_read": min(run.answering_qa.passages, run.context.rows) if reads_passages(task) else 0,
    }


def records(
    trained: TrainedRun, questions: Sequence[Question], nbest: int = NBEST, first: int = 0
) -> Iterator[list[Record]]:
    """The records of questions `first` …, a batch at a time; see `FIELDS`."""
    if not reads_passages(trained.task):
        for guesses in predict_closed_book(trained.run, questions[first:], trained.params):
            yield [
                question_record(questions[number], number + 1)
                | {"prediction": guess.text, "probability": float32_digits(guess.probability)}
                for number, guess in enumerate(guesses, first)
            ]
            first += len(guesses)
        return
    store, evaluator = trained.run.sources.passages, trained.evaluator(questions[first:])
    for predictions in evaluator.predict_batches(trained.params, trained.index):
        batch = list[Record]()
        asked = questions[first : first + len(predictions)]
        rows = np.stack([prediction.retrieved for prediction in predictions])
        hits = answer_hits(store, rows, [one.answers for one in asked], [one.is_regex for one in asked])
        for question, prediction, has_answer in zip(asked, predictions, hits.tolist(), strict=True):
            first += 1
            ranked = [scored_answer(trained, answer) for answer in prediction.nbest[:nbest]]
            retrieved = []
            for row, score, ranks, hit in zip(
                prediction.retrieved.tolist(), prediction.scores.tolist(), prediction.ranks.tolist(), has_answer,
                strict=True,
            ):  # fmt: skip
                if row >= 0:
                    passage = {"id": store.document_id(row), "score": float32_digits(score)}
                    passage["ranks"] = ranks_by_search(ranks)
                    retrieved.append(passage | ({"has_answer": hit} if question.answers else {}))
            record = question_record(question, first) | {
                "prediction": ranked[0]["answer"],
                "probability": ranked[0]["probability"],
                "passage": ranked[0]["passage"],
                "nbest": ranked,
                "retrieved": retrieved,
            }
            if question.answers:
                record["reader_oracle"] = evaluator.reader_oracle(question, prediction)
            batch.append(record)
        yield batch


def evaluate(
    trained: TrainedRun, questions: Sequence[Question], bm25: bool = True
) -> tuple[dict[str, Any], list[Record]]:
    """Everything that is measured, and the records that it is measured on.

    {"task", "step", "parameters", "passages", "passages_read", "questions", "measures": {"exact_match": {"value",
    "low", "high", "questions"}, …}, "bm25": {"recall@1", …}}; a measure that no question has is left out.
    """
    scored = [record for batch in records(trained, questions) for record in batch]
    report = describe(trained.run, trained.task, trained.step, trained.search) | {"questions": len(scored)}
    report["measures"] = summarise(scored)
    if bm25 and reads_passages(trained.task):
        evaluator = Evaluator(trained.run, questions)
        recall = evaluator.recall_of(bm25_question_rows(trained.run, evaluator))
        report["bm25"] = {name: value for name, value in recall.items() if name in report["measures"]}
    return report, scored
