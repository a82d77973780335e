"""`realm predict`: write answers to questions, one JSON object per line, with the passages that they come from.

`realm_jax/eval/prediction_files.py` defines the format and resumes an incomplete file. `realm evaluate` scores it.
"""

import argparse
import json
import logging
import os
import stat
from collections.abc import Sequence
from typing import IO, Any

from realm_jax.cli.argument_types import positive
from realm_jax.cli.arguments import (
    add_question_arguments,
    add_run_arguments,
    check_passages,
    config_changes,
    run_directory,
)
from realm_jax.cli.output import checked_output, is_special
from realm_jax.console import StageProgress
from realm_jax.data.questions import Question
from realm_jax.errors import UserError
from realm_jax.eval.prediction import SPANS, Evaluator
from realm_jax.eval.prediction_files import question_record, resume, write_record
from realm_jax.forward import SearchPipeline
from realm_jax.host import Stop
from realm_jax.inference.predictions import FIELDS, describe, records
from realm_jax.mirror import url_of
from realm_jax.run import Run
from realm_jax.storage import exclusive_lock, flush_to_disk, sha256_hex
from realm_jax.tasks.answering import search_pipeline
from realm_jax.train.exported_model import ExportedModel
from realm_jax.train.trained_run import (
    NBEST,
    TrainedRun,
    find_task,
    load_questions,
    open_reader,
    open_run_for_inference,
    restore,
)

logger = logging.getLogger(__name__)

EXAMPLES = f"""examples:
  realm predict --workdir=runs/wiki --questions=test.jsonl --output=predictions.jsonl
  realm predict --workdir=runs/wiki --output=predictions.jsonl --search=hybrid --config.answering.read=50
  realm evaluate predictions.jsonl

A line of the questions is {{"question": …, "id": …, "answers": […]}}; only the question is required. A line of the
predictions also has
{FIELDS}
Run the same command again to resume.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm predict`."""
    parser.epilog = EXAMPLES
    add_run_arguments(parser)
    add_question_arguments(parser)
    parser.add_argument("--output", required=True, metavar="FILE", help="predictions file, created or resumed")
    parser.add_argument(
        "--nbest", type=positive, metavar="N", help=f"number of answers to write per question (default: {NBEST})"
    )


def run(args: argparse.Namespace) -> None:
    """Write the predictions that the file lacks; a pipe or a device gets all of them.

    Raises:
        UserError: the output was made with other settings; raised before the model is loaded.
        Preempted: after SIGTERM.
    """
    output, nbest = checked_output(args.output, "--output"), args.nbest or NBEST
    run = open_run_for_inference(run_directory(args.workdir, args.task), config_changes(args))
    check_passages(run, args)
    questions = load_questions(run, args.questions, need_right=False)
    with Stop() as stop:
        if is_special(output):
            trained = restore(run, args.task, search=args.search, rerank=args.rerank)
            with open(output, "wb") as stream:
                _append(stream, trained, questions, nbest, 0, stop)
            return
        exported = find_task(run, args.task)
        pipeline = search_pipeline(exported.task, run.config, args.search, args.rerank)
        settings = prediction_settings(run, exported, questions, nbest, pipeline)
        with exclusive_lock(output.parent, output.name):
            done = resume(output, settings, len(questions))
            if done < len(questions):
                trained = restore(run, args.task, search=args.search, rerank=args.rerank)
                if trained.model is None or trained.model.identity != exported.identity:
                    raise UserError(
                        f"{url_of(run.workdir)}: training continued in the meantime; run the command again "
                        "when the run is done"
                    )
                with open(output, "ab") as stream:
                    _append(stream, trained, questions, nbest, done, stop)
    logger.info("%s: %d predictions", output, len(questions))


def prediction_settings(
    run: Run, exported: ExportedModel, questions: Sequence[Question], nbest: int, pipeline: SearchPipeline
) -> dict[str, Any]:
    """Return everything that determines the bytes of a predictions file, and facts for its readers.

    Args:
        run: the run.
        exported: the exported model that answers.
        questions: the questions.
        nbest: answers per question.
        pipeline: how passages are found.
    """
    question_records = [question_record(question, number) for number, question in enumerate(questions, start=1)]
    answering, rerank, reader = run.config.answering, pipeline.rerank, open_reader(run, exported.task)
    settings = describe(run, exported.task, exported.step, pipeline, reader)
    settings |= {} if rerank is None else {"rerank": rerank.name, "reranked": rerank.passages}
    settings |= {} if reader is None else {"reader": reader.identity, "answer_tokens": answering.answer_tokens}
    return settings | {
        "checkpoint": exported.identity,
        "corpus": run.sources.passages.fingerprint,
        "questions": sha256_hex(json.dumps(question_records).encode()),
        "lines": len(questions),
        "search": pipeline.search,
        "retrieved": max(answering.retrieved, run.answering_qa.passages),
        "spans": SPANS,
        "aggregate": answering.aggregate,
        "nbest": nbest,
        "batch_size": Evaluator(run, questions).batch_size,
        "devices": f"{run.mesh.size} × {run.mesh.devices.flat[0].device_kind}",
    }


def _append(
    stream: IO[bytes], trained: TrainedRun, questions: Sequence[Question], nbest: int, done: int, stop: Stop
) -> None:
    """Write the predictions of the questions from number `done` on, flushing each batch before the next."""
    with StageProgress("questions answered", len(questions)) as bar:
        for batch in records(trained, questions, nbest, done):
            stream.write("".join(map(write_record, batch)).encode())
            flush_to_disk(stream) if stat.S_ISREG(os.fstat(stream.fileno()).st_mode) else stream.flush()
            done += len(batch)
            bar.update(done)
            if done < len(questions):
                stop.check(f"{done} of {len(questions)} predictions are written")
