"""`realm predict`: answers to questions, a JSON object a line, with the passages that they come from.

The format of the file, and how one that was cut off is resumed: `realm_jax/eval/prediction_files.py`. What is right is
not said here: `realm evaluate` measures such a file. Read `predict` next.
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
from realm_jax.cli.arguments import add_question_arguments, add_run_arguments, changes_of, check_passages
from realm_jax.cli.output import checked_output, is_special
from realm_jax.console import StageProgress
from realm_jax.data.jsonl import Question
from realm_jax.errors import UserError
from realm_jax.eval.prediction import SPANS, Evaluator, Prediction
from realm_jax.eval.prediction_files import Record, question_record, resume, write_record
from realm_jax.eval.retrieval import answer_hits
from realm_jax.host import Stop
from realm_jax.run import Run
from realm_jax.sections import answering_of
from realm_jax.storage import digest, flush_to_disk, only_one
from realm_jax.tasks import TASKS, make_task
from realm_jax.tasks.closed_book import recall_answers
from realm_jax.train.checkpoints import Saved
from realm_jax.train.trained_run import (
    NBEST,
    Trained,
    newest,
    open_run_to_ask,
    questions_of,
    ranks_by_search,
    restore,
    short,
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

The same command goes on where it was cut off.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm predict`."""
    parser.epilog = EXAMPLES
    add_run_arguments(parser)
    add_question_arguments(parser)
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="file of predictions to write, or to go on with"
    )
    parser.add_argument(
        "--nbest", type=positive, metavar="N", help=f"answers to write of a question (default: {NBEST})"
    )


def run(args: argparse.Namespace) -> None:
    """Predict. Raises Preempted after SIGTERM."""
    output = checked_output(args.output, "--output")
    opened = open_run_to_ask(Path(args.workdir), changes_of(args))
    check_passages(opened, args)
    questions = questions_of(opened, args.questions, need_right=False)
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
    name, saved = newest(run, task)
    settings = settings_of(run, name, saved, questions, nbest, search or make_task(name, run).question_search)
    with only_one(output.parent, output.name):
        done = resume(output, settings, len(questions))
        if done < len(questions):
            trained = restore(run, task, search=search)
            if (trained.task, trained.step) != (name, saved.step):
                raise UserError(f"{run.workdir}: trained on meanwhile; repeat the command when the run is done")
            with open(output, "ab") as stream:
                _append(stream, trained, questions, nbest, done, stop)
    logger.info("%s: %d predictions", output, len(questions))


def settings_of(
    run: Run, task: str, saved: Saved, questions: Sequence[Question], nbest: int, search: str
) -> dict[str, Any]:
    """All that the bytes of a predictions file follow from, and what readers of its measures want to know."""
    asked = [question_record(question, number) for number, question in enumerate(questions, start=1)]
    answering, rerank = answering_of(run.config), make_task(task, run).rerank
    reranked = {"reranked": rerank.passages} if rerank else {}
    values = {
        "checkpoint": saved.record["digest"],
        "corpus": run.sources.passages.fingerprint,
        "questions": digest(json.dumps(asked).encode()),
        "lines": len(questions),
        "search": search,
        "retrieved": max(answering.retrieved, run.answering.qa_passages),
        "spans": SPANS,
        "aggregate": answering.aggregate,
        "nbest": nbest,
        "batch_size": Evaluator(run, questions).batch_size,
        "devices": f"{run.mesh.size} × {run.mesh.devices.flat[0].device_kind}",
    }
    return describe(run, task, saved.step, search) | reranked | values


def describe(run: Run, task: str, step: int, search: str) -> dict[str, Any]:
    """What numbers of a run are told with: {"task", "step", "parameters", "passages", "passages_read"}."""
    asked, shapes = make_task(task, run), jax.eval_shape(run.model.init, jax.random.key(0))
    towers = run.model.embedder_names if asked.needs_vectors(search) else ()
    used = [shapes[name] for name in (*towers, "reader", *([asked.rerank.network] if asked.rerank else []))]
    return {
        "task": task,
        "step": step,
        "parameters": sum(x.size for x in jax.tree.leaves(used)),
        "passages": run.setting.rows,
        "passages_read": min(run.answering.qa_passages, run.setting.rows) if TASKS[task].reads_passages else 0,
    }


def _append(
    stream: IO[bytes], trained: Trained, questions: Sequence[Question], nbest: int, done: int, stop: Stop | None
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
    trained: Trained, questions: Sequence[Question], nbest: int = NBEST, first: int = 0
) -> Iterator[list[Record]]:
    """The records of questions `first` …, a batch at a time; see `EXAMPLES` for their fields."""
    if not TASKS[trained.task].reads_passages:
        yield from _recalled(trained, questions, first)
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
            question_record(one, number) | _found(trained, evaluator, one, prediction, has_answer, nbest)
            for number, (one, prediction, has_answer) in enumerate(found, first + 1)
        ]
        first += len(predictions)


def _recalled(trained: Trained, questions: Sequence[Question], first: int) -> Iterator[list[Record]]:
    """The records of a reader without passages: one answer to each question, from nowhere."""
    for answers in recall_answers(trained.run, questions[first:], trained.params):
        yield [
            question_record(questions[number], number + 1)
            | {"prediction": answer.text, "probability": short(answer.probability)}
            for number, answer in enumerate(answers, first)
        ]
        first += len(answers)


def _found(
    trained: Trained, evaluator: Evaluator, question: Question, prediction: Prediction, has_answer: Any, nbest: int
) -> Record:
    """What was found for a question. has_answer: bool [retrieved]."""
    store, best = trained.run.sources.passages, trained.answer(prediction.nbest[0])
    retrieved = [
        {"id": store.document_id(row), "score": short(score), "ranks": ranks_by_search(ranks)}
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
