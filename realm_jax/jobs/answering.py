"""A trained run, opened to answer questions; shared by `realm ask`, `predict` and `evaluate`, which say what to do.

Nothing in the run folder changes, so a run can be asked while it trains. Read next: `ask.py`.
"""

import argparse
import contextlib
import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np

from realm_jax.config import TASKS, task_names
from realm_jax.console import StageProgress
from realm_jax.corpus.jsonl import Question, read_questions
from realm_jax.data.staging import is_remote
from realm_jax.errors import UserError
from realm_jax.evaluation.predict import Answer, Candidate
from realm_jax.index.candidates import Index
from realm_jax.index.generations import (
    Unusable,
    export_of,
    generation_names,
    load_vectors,
    read_manifest,
    read_towers,
)
from realm_jax.jobs.flags import positive
from realm_jax.jobs.opening import recorded_config, reopen_run, set_up_jax
from realm_jax.mesh import replicated
from realm_jax.models.realm import Params
from realm_jax.run import Run
from realm_jax.storage import read_json
from realm_jax.training.checkpoints import Gone, Saved
from realm_jax.training.exporter import to_arrays
from realm_jax.training.refresh import shared_folder
from realm_jax.training.restore import saved_index, saved_params
from realm_jax.training.workdir import check_data

logger = logging.getLogger(__name__)

NBEST = 5  # answers of a question that are shown or written, if nothing else is asked for
PASSAGES = 20  # to retrieve for a question, if nothing else is asked for


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run as it stands at the newest checkpoint of one of its tasks, with the corpus embedded."""

    run: Run
    task: str
    step: int
    params: Params
    index: Index

    def place(self, row: int) -> dict[str, Any]:
        """Where a passage is from: {"id", "part", "title"}; part: which of the passages of its document, from 0."""
        store = self.run.sources.passages
        document = store.document_id(row)
        return {"id": document, "part": row - store.rows_of(document).start, "title": store.title(row)}

    def source(self, answer: Answer) -> dict[str, Any]:
        """Where an answer stands: `place` with {"span"}, characters of the passage's text."""
        return self.place(answer.row) | {"span": list(answer.span)}

    def text(self, candidate: Candidate) -> str:
        """A candidate's own answer, as it stands in its passage."""
        return self.run.sources.passages.text(candidate.row)[slice(*candidate.span)]


def filled(text: str) -> str:
    """The type of an argument that says something."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; give a value or leave the flag out")
    return text


def add_run_arguments(parser: argparse._ActionsContainer, instead: argparse._ActionsContainer | None = None) -> None:
    """`--workdir` and `--data`. instead: where `--workdir` goes, if something else may stand in its place."""
    (instead or parser).add_argument(
        "--workdir", type=filled, required=instead is None, metavar="DIR", help="folder of a run of `realm train`"
    )
    parser.add_argument(
        "--data", type=filled, metavar="DIR", help="the run's prepared folder, where it was moved since"
    )


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Which questions, with which parameters, and how they are answered; see `questions_of` and `overrides_of`."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--split", type=filled, help="questions of the prepared folder (default: dev)")
    source.add_argument("--questions", type=filled, metavar="FILE", help="file of questions, in place of a split")
    parser.add_argument(
        "--task", type=filled, help="parameters at the end of this task (default: the last with a checkpoint)"
    )
    parser.add_argument(
        "--passages",
        type=positive,
        metavar="N",
        help=f"passages to retrieve (default: {PASSAGES}, or as many as --read)",
    )
    parser.add_argument("--read", type=positive, metavar="N", help="passages to read (default: as many as in training)")
    parser.add_argument(
        "--aggregate",
        choices=("marginal", "max"),
        help="probability of an answer: summed over passages and occurrences, or that of the likeliest (default: the "
        "run's, marginal unless it says otherwise)",
    )


def overrides_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the arguments of `add_question_arguments` change in the run's config."""
    found: dict[str, Any] = {"evaluation.passages": args.passages or max(PASSAGES, args.read or 0)}
    found |= {"evaluation.qa_passages": args.read} if args.read else {}
    return found | ({"evaluation.aggregate": args.aggregate} if args.aggregate else {})


def check_passages(run: Run, args: argparse.Namespace) -> None:
    """Raise UserError for arguments about passages that would do nothing, or that leave too few to read."""
    task, _ = newest(run, args.task)
    if task == "closed_book":
        given = [flag for flag in ("passages", "read", "aggregate", "nbest") if vars(args).get(flag) is not None]
        if given:
            raise UserError(f"--{given[0]}: {run.workdir} answers without passages (closed_book); leave it out")
        return
    read = min(run.answering.qa_passages, run.setting.rows)
    if args.passages is not None and args.passages < read:
        raise UserError(
            f"--passages={args.passages}: fewer than the {read} that are read; retrieve more, or read fewer with --read"
        )


def questions_of(run: Run, args: argparse.Namespace, need_answers: bool) -> list[Question]:
    """The questions that the arguments name. Warns of those that cannot be answered, or found, as they stand."""
    if args.questions:
        questions = read_questions(args.questions, need_answers=need_answers)
    else:
        questions = _split(run, args.split or "dev")
    most = run.config.data.query_length - 2
    encoded = run.sources.wordpiece.encode_batch([question.question for question in questions])
    if cut := sum(len(item.ids) > most for item in encoded):
        logger.warning("%d questions are longer than the %d word pieces that the run reads; they are cut", cut, most)
    gold = {question.gold_passage_id for question in questions if question.gold_passage_id is not None}
    if absent := [name for name in gold if not run.sources.passages.rows_of(name)]:
        logger.warning("%d gold passages, such as %r, are not in the corpus: misses", len(absent), min(absent))
    return questions


def _split(run: Run, split: str) -> list[Question]:
    questions = run.sources.questions.get(split)
    if not questions:
        known = ", ".join(run.sources.questions) or "none"
        raise UserError(
            f"--split={split}: {run.config.data.path} has no such questions (it has: {known}); "
            "choose another split, or give a file with --questions"
        )
    return questions


def open_run_to_ask(
    workdir: Path, data: str | None = None, overrides: dict[str, Any] | None = None, questions: bool = True
) -> Run:
    """The run of a folder on the devices that are here, with operations keys changed by `overrides`.

    questions: whether those of the prepared folder are read.
    Raises UserError when there is no run, or when its prepared folder is gone or another one.
    """
    _check_prepared(data or recorded_config(workdir).data.path, workdir)
    set_up_jax()
    # Trained on one machine and asked on another: every device takes a share of the passages and all parameters. Batch
    # sizes of training must suit the devices, but nothing is trained here.
    here: dict[str, Any] = {"mesh.data": -1, "mesh.fsdp": 1, "mesh.model": 1}
    for name in TASKS:
        here |= {f"{name}.batch_size": jax.device_count(), f"{name}.microbatches": 1}
    moved = {"data.path": data} if data else {}
    run = reopen_run(workdir, here | moved | (overrides or {}), questions)
    check_data(run, run.sources.passages.versions, questions)
    return run


def _check_prepared(folder: str, workdir: Path) -> None:
    if not is_remote(folder) and not (Path(folder) / "PREPARED.json").is_file():
        raise UserError(
            f"{folder}: the prepared folder of the run in {workdir} is not there (looked from {Path.cwd()}); "
            "name the place that it was moved to with --data=DIR"
        )


def check_reads(trained: Trained) -> None:
    """Raise UserError for a reader without passages: there is nothing to show beside its answers."""
    if trained.task == "closed_book":
        raise UserError(
            f"{trained.run.workdir}: closed_book was trained there, which answers without passages; use `realm predict`"
        )


def restore(run: Run, task: str | None = None, for_answers: bool = True) -> Trained:
    """Parameters at the end of `task`, or of the last task of the recipe that has a checkpoint, and the index.

    for_answers: whether questions will be answered with them, of which those of other tasks than qa know nothing. The
    corpus is embedded unless the checkpoint holds vectors that fit its parameters. Raises UserError for a task that
    the recipe does not have, and where there is no checkpoint.
    """
    while True:
        name, saved = newest(run, task)
        try:
            edited = is_edited(run) and run.needs_vectors(name)
            index = None if edited else saved_index(run, name, saved)
            params = _params(run, saved, documents=index is None or not for_answers)
            index = published_index(run, params) if edited else index
            break
        except Gone:  # the run went on and removed it; there is a newer one
            continue
    if name not in ("qa", "closed_book") and for_answers:
        logger.warning("these are the parameters of task %s: answers come from a span head that qa did not train", name)
    if saved.step < run.config[name].steps:
        logger.warning("task %s is not done: step %d of %d", name, saved.step, run.config[name].steps)
    return Trained(run, name, saved.step, params, index or _embed(run, params))


def _params(run: Run, saved: Saved, documents: bool) -> Params:
    """What answers are made with. documents: the document tower too, which answers from stored vectors do without."""
    query, *others = run.model.embedder_names
    names = [query, "reader", *(others if documents or run.setting.qa_documents else ())]
    return saved.params(names, replicated(run.mesh))  # as `open_run_to_ask` lays out the mesh


def restore_towers(run: Run) -> tuple[int, Params]:
    """The towers at the end of what was trained, and the step of REALM that they count as."""
    name, saved = newest(run)
    params = saved_params(run, name, saved, jax.eval_shape(run.model.init, jax.random.key(0)))
    return run.config.realm.steps, {tower: params[tower] for tower in run.model.embedder_names}


def is_edited(run: Run) -> bool:
    """Whether the corpus was edited since the run was trained."""
    return bool(read_json(run.workdir / "data.json")["passages"] != run.sources.passages.fingerprint)


def published_index(run: Run, params: Params) -> Index | None:
    """The index of a generation of this version of the corpus and of the towers of `params`, if there is a good one."""
    folder, name = shared_folder(run), run.model.embedder_names[-1]
    tower = to_arrays({name: params[name]})
    for generation in reversed(generation_names(folder)):
        with contextlib.suppress(Unusable):
            manifest = read_manifest(folder, generation)
            if manifest is None or manifest.corpus != run.sources.passages.fingerprint:
                continue
            export = export_of(folder, manifest)
            if export is None:
                continue
            exported, _ = read_towers(folder, export)
            if all(np.array_equal(exported[path], value) for path, value in tower.items()):
                return run.index(run.sources.passages.kept(load_vectors(folder, manifest)))
    return None


def newest(run: Run, task: str | None = None) -> tuple[str, Saved]:
    """The newest checkpoint of `task`, or of the last task that has one, with the task's name. Raises as `restore`."""
    names = task_names(run.config)
    if task is not None and task not in names:
        raise UserError(f"--task={task}: the run in {run.workdir} has no such task; choose among {', '.join(names)}")
    names = names if task is None else [task]
    for name in reversed(names):
        if (saved := Saved.newest(run.workdir / name / "checkpoints")) is not None:
            return name, saved
    what = f"of task {names[0]} " if len(names) == 1 else ""
    raise UserError(f"{run.workdir}: no checkpoint {what}yet; give the `realm train` command that started it again")


def _embed(run: Run, params: Params) -> Index:
    with StageProgress("passages embedded", run.setting.rows) as bar:
        return run.index(run.embed(params, bar.update))


def check_question(run: Run, question: str) -> str:
    """A question without the space around it. Raises UserError when it is empty or longer than the run reads."""
    question = question.strip()
    try:
        question.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("the question is not valid UTF-8; type or save it as UTF-8 text") from None
    pieces = len(run.sources.wordpiece.encode(question).ids)
    if pieces == 0:
        raise UserError('the question is empty; write one, such as "When was the bridge built?"')
    most = run.config.data.query_length - 2
    if pieces > most:
        raise UserError(f"the question has {pieces:,} word pieces, but this run reads at most {most}; shorten it")
    return question
