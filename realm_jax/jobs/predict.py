"""`realm predict`: answers to questions, a JSON object a line, with the passages that they come from.

    OUTPUT                 a line a question, in the order of the questions
    OUTPUT.settings.json   what made it: checkpoint, corpus, questions, and all else that the bytes follow from

Lines are written a batch at a time, and a batch is always of the same questions. So a command that was cut off goes on
after its last whole batch and ends with the bytes of one that was not. What is right is not said here: `realm evaluate
--predictions` measures such a file (`realm_jax/evaluation/measures.py`). Read `predict` next.
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

from realm_jax.console import StageProgress
from realm_jax.corpus.jsonl import Question
from realm_jax.errors import UserError
from realm_jax.evaluation.closed_book import recall_answers
from realm_jax.evaluation.measures import Record, settings_file, surplus, write_record
from realm_jax.evaluation.predict import Answer, Evaluator, Prediction
from realm_jax.evaluation.retrieval import answer_hits
from realm_jax.host import PREEMPTED, Preempted, Stop
from realm_jax.jobs.answering import (
    NBEST,
    Trained,
    add_question_arguments,
    add_run_arguments,
    check_passages,
    newest,
    open_run_to_ask,
    overrides_of,
    questions_of,
    ranks_by_search,
    restore,
)
from realm_jax.jobs.flags import positive
from realm_jax.run import Run
from realm_jax.storage import digest, flush_to_disk, make_folder, only_one, read_json, write_json_atomic
from realm_jax.training.checkpoints import Saved

logger = logging.getLogger(__name__)

EXAMPLES = """examples:
  realm predict --workdir=runs/wiki --questions=test.jsonl --output=predictions.jsonl
  realm evaluate --predictions=predictions.jsonl

A line of the questions is {"question": …, "id": …, "answers": […]}, of which only the question has to be there. A line
of the predictions has in addition
  prediction, probability   the likeliest answer, as it stands in its passage
  passage                   where: {"id", "part", "title", "span"}; span: characters of the passage's text, part: which
                            of the passages that its document was cut into; null where no passage was found
  nbest                     the likeliest answers, each with probability and passage
  retrieved                 {"id", "score", "ranks", "has_answer"}: the best passages, the first of them read; score:
                            the retriever's; ranks: the place in each search that found it, {"vectors": 3, "bm25": 1}
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
        "--nbest",
        type=positive,
        metavar="N",
        help=f"answers to write of a question (default: {NBEST})",
    )


def run(args: argparse.Namespace) -> int:
    """Predict; exit code 75 after SIGTERM."""
    output = checked_output(Path(args.output), "--output")
    opened = open_run_to_ask(Path(args.workdir), args.data, overrides_of(args))
    check_passages(opened, args)
    questions = questions_of(opened, args, need_right=False)
    try:
        with Stop() as stop:
            predict(opened, args.task, questions, output, args.nbest or NBEST, stop, args.search)
    except Preempted as reason:
        logger.warning("%s", reason)
        return PREEMPTED
    return 0


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
    settings = settings_of(run, name, saved, questions, nbest, search or run.asked_by(name))
    with only_one(output.parent, output.name):
        done = _begin(output, settings, len(questions))
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
    asked = [known_of(question, number) for number, question in enumerate(questions, start=1)]
    evaluation = run.config.evaluation
    return describe(run, task, saved.step, search) | {
        "checkpoint": saved.record["digest"],
        "corpus": run.sources.passages.fingerprint,
        "questions": digest(json.dumps(asked).encode()),
        "lines": len(questions),
        "search": search,
        "retrieved": evaluation.passages,
        "spans": evaluation.spans,
        "aggregate": evaluation.aggregate,
        "nbest": nbest,
        "batch_size": Evaluator(run, questions).batch_size,
        "devices": f"{run.mesh.size} × {run.mesh.devices.flat[0].device_kind}",
    }


def describe(run: Run, task: str, step: int, search: str) -> dict[str, Any]:
    """What numbers of a run are told with: {"task", "step", "parameters", "passages", "passages_read"}."""
    shapes = jax.eval_shape(run.model.init, jax.random.key(0))
    used = shapes if run.needs_vectors(task, search) else {"reader": shapes["reader"]}
    return {
        "task": task,
        "step": step,
        "parameters": sum(x.size for x in jax.tree.leaves(used)),
        "passages": run.setting.rows,
        "passages_read": 0 if task == "closed_book" else min(run.answering.qa_passages, run.setting.rows),
    }


# ---- what is there already


def _begin(output: Path, settings: dict[str, Any], questions: int) -> int:
    """How many predictions are there and stay; the rest of the file is cut off. A new file gets its record first."""
    file = settings_file(output)
    if output.stat().st_size == 0:
        write_json_atomic(file, settings)
        return 0
    if not file.is_file():
        raise UserError(f"--output={output}: is no file of `realm predict` (there is no {file.name}); name another")
    made = read_json(file)
    changed = [key for key, value in settings.items() if not isinstance(made, dict) or made.get(key) != value]
    if changed:
        raise UserError(
            f"--output={output}: was made with other {' and '.join(changed)} ({file.name} has them); "
            "name another file, or remove this one"
        )
    done = _cut(output, questions, settings["batch_size"])
    logger.info("%s: going on after %d of %d predictions", output, done, questions)
    return done


def _cut(output: Path, questions: int, batch_size: int) -> int:
    """Cut a file off after its last whole batch; returns the number of lines that are left.

    Raises UserError where there are more lines than questions: which of them are right is not known.
    """
    ends = [0]
    with open(output, "r+b") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                ends.append(ends[-1] + len(line))
        lines = len(ends) - 1
        if lines > questions:
            raise UserError(surplus(f"--output={output}", lines, questions))
        kept = lines if lines == questions else lines - lines % batch_size
        stream.truncate(ends[kept])
    return kept


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
    if trained.task == "closed_book":
        yield from _recalled(trained, questions, first)
        return
    evaluator = Evaluator(trained.run, questions[first:], trained.search)
    for predictions in evaluator.predict_batches(trained.params, trained.index):
        asked = questions[first : first + len(predictions)]
        rows = np.stack([prediction.retrieved for prediction in predictions])
        hits = answer_hits(
            trained.run.sources.passages, rows, [one.answers for one in asked], [one.is_regex for one in asked]
        )
        yield [
            known_of(question, first + number) | _found(trained, evaluator, question, prediction, has_answer, nbest)
            for number, (question, prediction, has_answer) in enumerate(zip(asked, predictions, hits, strict=True), 1)
        ]
        first += len(predictions)


def _recalled(trained: Trained, questions: Sequence[Question], first: int) -> Iterator[list[Record]]:
    """The records of a reader without passages: one answer to each question, from nowhere."""
    for answers in recall_answers(trained.run, questions[first:], trained.params):
        yield [
            known_of(questions[number], number + 1)
            | {"prediction": answer.text, "probability": _short(answer.probability)}
            for number, answer in enumerate(answers, first)
        ]
        first += len(answers)


def known_of(question: Question, number: int) -> Record:
    """What is known of a question before it is asked; its number stands for an id that it does not have."""
    found = next((question.fields[key] for key in ("id", "qid") if question.fields.get(key) is not None), number)
    record: Record = {"id": str(found), "question": question.question}
    if question.answers:
        record["answers"] = question.answers
    if question.is_regex:
        record["match"] = "regex"
    return record if question.gold_passage_id is None else record | {"gold_passage_id": question.gold_passage_id}


def _found(
    trained: Trained, evaluator: Evaluator, question: Question, prediction: Prediction, has_answer: Any, nbest: int
) -> Record:
    """What was found for a question. has_answer: bool [retrieved]."""
    store, best = trained.run.sources.passages, _told(trained, prediction.nbest[0])
    retrieved = [
        {"id": store.document_id(row), "score": _short(score), "ranks": ranks_by_search(ranks)}
        for row, score, ranks in zip(
            prediction.retrieved.tolist(), prediction.scores.tolist(), prediction.ranks.tolist(), strict=True
        )
        if row >= 0
    ]
    record: Record = {"prediction": best.pop("answer")} | best
    record["nbest"] = [_told(trained, answer) for answer in prediction.nbest[:nbest]]
    record["retrieved"] = retrieved
    if not question.answers:
        return record
    for passage, hit in zip(retrieved, has_answer[prediction.retrieved >= 0].tolist(), strict=True):
        passage["has_answer"] = hit
    return record | {"reader_oracle": evaluator.reader_oracle(question, prediction)}


def _told(trained: Trained, answer: Answer) -> Record:
    passage = trained.source(answer) if answer.row >= 0 else None
    return {"answer": answer.text, "probability": _short(answer.probability), "passage": passage}


def _short(value: float) -> float:
    """As many digits as a float32 has."""
    return float(f"{value:.9g}")


# ---- files to write


def checked_output(path: Path, flag: str) -> Path:
    """The file that `path` leads to, through links. Raises UserError, with the flag, where nothing can be written."""
    if is_special(path):
        if not os.access(path, os.W_OK):
            raise UserError(f"{flag}={path}: may not be written to; name another")
        return path
    file = Path(os.path.realpath(path))
    if file.is_dir() or not file.parent.is_dir():
        raise UserError(f"{flag}={path}: name a file in a folder that exists")
    make_folder(file.parent, flag)
    if file.exists() and not os.access(file, os.W_OK):
        raise UserError(f"{flag}={path}: may not be written to; name another")
    return file


def is_special(path: Path) -> bool:
    """Whether it is there and neither a file nor a folder: a pipe or a device, which is written to as it is."""
    return path.exists() and not path.is_file() and not path.is_dir()
