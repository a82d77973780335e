"""`realm predict`: answers to questions, one JSON object per line, with the passages that they come from.

The format of the file, and how one that was cut off is resumed: `realm_jax/eval/prediction_files.py`. Nothing is scored
here: `realm evaluate` evaluates such a file. Read `predict` next.
"""

import argparse
import json
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from realm_jax.cli.argument_types import positive
from realm_jax.cli.arguments import add_question_arguments, add_run_arguments, check_passages, config_changes
from realm_jax.cli.output import checked_output, is_special
from realm_jax.console import StageProgress
from realm_jax.data.questions import Question
from realm_jax.errors import UserError
from realm_jax.eval.prediction import SPANS, Evaluator, Prediction
from realm_jax.eval.prediction_files import Record, question_record, resume, write_record
from realm_jax.eval.retrieval import answer_hits
from realm_jax.host import Stop
from realm_jax.run import Run
from realm_jax.sections import answering_of
from realm_jax.storage import digest, exclusive_lock, flush_to_disk
from realm_jax.tasks import TASKS, make_task
from realm_jax.tasks.closed_book import predict_closed_book
from realm_jax.train.checkpoints import SavedCheckpoint
from realm_jax.train.trained_run import (
    NBEST,
    TrainedRun,
    float32_digits,
    latest_checkpoint,
    load_questions,
    open_run_for_inference,
    ranks_by_search,
    restore,
)

logger = logging.getLogger(__name__)

EXAMPLES = """examples:
  realm predict --workdir=runs/wiki --questions=test.jsonl --output=predictions.jsonl
  realm predict --workdir=runs/wiki --output=predictions.jsonl --search=hybrid --config.answering.read=50
  realm evaluate predictions.jsonl

A line of the questions is {"question": …, "id": …, "answers": […]}, of which only the question has to be there. A line
of the predictions has in addition
  prediction, probability   the likeliest answer, as it stands in its passage
  passage                   where: {"id", "part", "title", "span"}; span: characters of the passage's text, part: which
                            of the passages that its document was cut into; null where no passage was found
  nbest                     the likeliest answers, each with probability and passage
  retrieved                 {"id", "score", "ranks", "has_answer"}: the best passages, the first of them read; score:
                            the retriever's, with what a task adds that orders passages anew; ranks: the place in each
                            search that found it, {"vectors": 3, "bm25": 1}
  reader_oracle             whether a right answer could have been chosen in the passages that were read

Of a reader without passages (task closed_book) prediction and probability are all.

Run the same command again to resume.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm predict`."""
    parser.epilog = EXAMPLES
    add_run_arguments(parser)
    add_question_arguments(parser)
    parser.add_argument("--output", required=True, metavar="FILE", help="file of predictions to write or resume")
    parser.add_argument(
        "--nbest", type=positive, metavar="N", help=f"answers to write of a question (default: {NBEST})"
    )


def run(args: argparse.Namespace) -> None:
    """Predict. Raises Preempted after SIGTERM."""
    output = checked_output(args.output, "--output")
    opened = open_run_for_inference(Path(args.workdir), config_changes(args))
    check_passages(opened, args)
    questions = load_questions(opened, args.questions, need_right=False)
    with Stop() as stop:
        predict(opened, args.task, questions, output, args.nbest or NBEST, stop, args.search)


def predict(
    run: Run, task: str | None, questions: Sequence[Question], output: Path, nbest: int, stop: Stop | None = None,
    search: str | None = None,
) -> None:  # fmt: skip
    """Write the predictions that are not there yet. A pipe or a device gets them all.

    Raises UserError, before the model is loaded, where `output` was made by something else, Preempted after SIGTERM.
    """
    if is_special(output):
        with open(output, "wb") as stream:
            _append(stream, restore(run, task, search=search), questions, nbest, 0, stop)
        return
    name, saved = latest_checkpoint(run, task)
    settings = prediction_settings(run, name, saved, questions, nbest, search or make_task(name, run).question_search)
    with exclusive_lock(output.parent, output.name):
        done = resume(output, settings, len(questions))
        if done < len(questions):
            trained = restore(run, task, search=search)
            if (trained.task, trained.step) != (name, saved.step):
                raise UserError(
                    f"{run.workdir}: training continued in the meantime; run the command again when the run is done"
                )
            with open(output, "ab") as stream:
                _append(stream, trained, questions, nbest, done, stop)
    logger.info("%s: %d predictions", output, len(questions))


def prediction_settings(
    run: Run, task: str, saved: SavedCheckpoint, questions: Sequence[Question], nbest: int, search: str
) -> dict[str, Any]:
    """Everything that determines the bytes of a predictions file, and what readers of its metrics want to know."""
    asked = [question_record(question, number) for number, question in enumerate(questions, start=1)]
    answering, rerank = answering_of(run.config), make_task(task, run).rerank
    reranked = {"reranked": rerank.passages} if rerank else {}
    values = {
        "checkpoint": saved.record["digest"],
        "corpus": run.sources.passages.fingerprint,
        "questions": digest(json.dumps(asked).encode()),
        "lines": len(questions),
        "search": search,
        "retrieved": max(answering.retrieved, run.question_context.qa_passages),
        "spans": SPANS,
        "aggregate": answering.aggregate,
        "nbest": nbest,
        "batch_size": Evaluator(run, questions).batch_size,
        "devices": f"{run.mesh.size} × {run.mesh.devices.flat[0].device_kind}",
    }
    return describe(run, task, saved.step, search) | reranked | values


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


def _append(
    stream: IO[bytes], trained: TrainedRun, questions: Sequence[Question], nbest: int, done: int, stop: Stop | None
) -> None:
    """Write the predictions of questions `done` … a batch at a time, each durable before the next is begun."""
    with StageProgress("questions answered", len(questions)) as bar:
        for batch in records(trained, questions, nbest, done):
            stream.write("".join(map(write_record, batch)).encode())
            flush_to_disk(stream) if stat.S_ISREG(os.fstat(stream.fileno()).st_mode) else stream.flush()
            done += len(batch)
            bar.update(done)
            if stop is not None and done < len(questions):
                stop.check(f"{done} of {len(questions)} predictions are written")


# ---- records


def records(
    trained: TrainedRun, questions: Sequence[Question], nbest: int = NBEST, first: int = 0
) -> Iterator[list[Record]]:
    """The records of questions `first` …, a batch at a time; see `EXAMPLES` for their fields."""
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
    trained: TrainedRun, evaluator: Evaluator, question: Question, prediction: Prediction, has_answer: Any, nbest: int
) -> Record:
    """The record of a question with retrieved passages. has_answer: bool [retrieved]."""
    store, best = trained.run.sources.passages, trained.answer(prediction.nbest[0])
    retrieved = [
        {"id": store.document_id(row), "score": float32_digits(score), "ranks": ranks_by_search(ranks)}
        for row, score, ranks in zip(
            prediction.retrieved.tolist(), prediction.scores.tolist(), prediction.ranks.tolist(), strict=True
        )
        if row >= 0
    ]
    record: Record = {"prediction": best.pop("answer")} | best
    record["nbest"] = [trained.answer(answer) for answer in prediction.nbest[:nbest]]
    record["retrieved"] = retrieved
    if not question.answers:
        return record
    for passage, hit in zip(retrieved, has_answer[prediction.retrieved >= 0].tolist(), strict=True):
        passage["has_answer"] = hit
    return record | {"reader_oracle": evaluator.reader_oracle(question, prediction)}
