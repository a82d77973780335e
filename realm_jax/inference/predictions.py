"""Make the records and metrics of `realm predict` and `realm evaluate`.

`FIELDS` lists the fields of a record; `realm_jax/eval/prediction_files.py` reads and writes files of records.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from realm_jax.data.questions import Question
from realm_jax.eval.prediction import Evaluator
from realm_jax.eval.prediction_files import Record, question_record
from realm_jax.eval.question_metrics import summarize
from realm_jax.eval.retrieval_metrics import answer_hits, is_retrieval_measure
from realm_jax.forward import SearchPipeline
from realm_jax.inference.answers import scored_answer
from realm_jax.models.question_reader import QuestionReader
from realm_jax.run import Run
from realm_jax.tasks.answering import needs_vectors, reads_passages
from realm_jax.tasks.closed_book import predict_closed_book
from realm_jax.train.results import bm25_question_rows
from realm_jax.train.trained_run import NBEST, TrainedRun, float32_digits, has_reader

FIELDS = """  prediction, probability   the most probable answer, as its passage spells it
  passage                   {"id", "part", "title", "span"}; part: number of the passage in its document, from 0;
                            span: characters of the passage's text; null if no passage was retrieved
  nbest                     the most probable answers, each with probability and passage
  retrieved                 {"id", "score", "ranks", "has_answer"}: the best passages, of which the first are read;
                            score: of the retriever, plus that of the cross-encoder if there is one; ranks: from 1, in
                            each search that returned the passage and by the reranker that placed it, {"vectors": 3,
                            "bm25": 1, "tokens": 2}
  no_answer                 p(no answer|x), only with --reader
  reader_oracle             true if the reader could have chosen a right answer in the passages that it read

A reader without passages (task closed_book) writes only prediction and probability.
"""


def describe(
    run: Run, task: str, step: int, pipeline: SearchPipeline, reader: QuestionReader | None = None
) -> dict[str, Any]:
    """Return the facts reported with metrics: {"task", "step", "parameters", "passages", "passages_read"}.

    Args:
        run: its fixed parts.
        task: task that trained the parameters.
        step: step of the parameters.
        pipeline: how passages are found.
        reader: reads in place of the run's own reader; None for the run's.
    """
    encoders = run.model.embedder_names if needs_vectors(task, run.config, pipeline.search) else ()
    own_reader = ("reader",) if reader is None else ()
    networks = {*encoders, *own_reader, *(pipeline.rerank.networks if pipeline.rerank else ())}
    used = [run.abstract_params[name] for name in networks]
    return {
        "task": task,
        "step": step,
        "parameters": sum(x.size for x in jax.tree.leaves(used)) + (reader.parameters if reader else 0),
        "passages": run.context.rows,
        "passages_read": min(run.answering_qa.passages, run.context.rows) if reads_passages(task) else 0,
    }


def records(
    trained: TrainedRun, questions: Sequence[Question], nbest: int = NBEST, first: int = 0
) -> Iterator[list[Record]]:
    """Yield the records of questions, a batch at a time; see `FIELDS`.

    Args:
        trained: the opened run.
        questions: all of them.
        nbest: answers in a record.
        first: number of the first question to answer, from 0.
    """
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
        answered = questions[first : first + len(predictions)]
        rows = np.stack([prediction.retrieved for prediction in predictions])  # [batch, answering.retrieved]
        answers, is_regex = [q.answers for q in answered], [q.is_regex for q in answered]
        hits = answer_hits(store, rows, answers, is_regex)
        for question, prediction, has_answer in zip(answered, predictions, hits.tolist(), strict=True):
            first += 1
            ranked = [scored_answer(trained, answer) for answer in prediction.nbest[:nbest]]
            retrieved = []
            for row, score, ranks, hit in zip(
                prediction.retrieved.tolist(), prediction.scores.tolist(), prediction.ranks.tolist(), has_answer,
                strict=True,
            ):  # fmt: skip
                if row >= 0:
                    passage = {"id": store.document_id(row), "score": float32_digits(score)}
                    passage["ranks"] = trained.pipeline.ranks_by_stage(ranks)
                    retrieved.append(passage | ({"has_answer": hit} if question.answers else {}))
            record = question_record(question, first) | {
                "prediction": ranked[0]["answer"],
                "probability": ranked[0]["probability"],
                "passage": ranked[0]["passage"],
                "nbest": ranked,
                "retrieved": retrieved,
            }
            if trained.reader is not None:
                record["no_answer"] = float32_digits(prediction.no_answer)
            if question.answers:
                record["reader_oracle"] = evaluator.reader_oracle(question, prediction)
            batch.append(record)
        yield batch


def evaluate(
    trained: TrainedRun, questions: Sequence[Question], bm25: bool = True
) -> tuple[dict[str, Any], list[Record]]:
    """Answer questions and compute all metrics that some of them have.

    Args:
        trained: the opened run.
        questions: with answers or gold passages.
        bm25: measure BM25's recall too.

    Returns:
        {"task", "step", "parameters", "passages", "passages_read", "questions", "measures": {"exact_match": {"value",
        "low", "high", "questions"}, …}, "bm25": {"recall@1", …}}; and the records of all questions. An index without a
        trained reader has only metrics of retrieval.
    """
    scored = [record for batch in records(trained, questions) for record in batch]
    report = describe(trained.run, trained.task, trained.step, trained.pipeline, trained.reader)
    report["questions"] = len(scored)
    report["measures"] = summarize(scored)
    if not has_reader(trained.run, trained.task):
        report["measures"] = {name: value for name, value in report["measures"].items() if is_retrieval_measure(name)}
    if bm25 and reads_passages(trained.task):
        evaluator = Evaluator(trained.run, questions)
        recall = evaluator.recall_of(bm25_question_rows(trained.run, evaluator))
        report["bm25"] = {name: value for name, value in recall.items() if name in report["measures"]}
    return report, scored
