"""A recipe from its config to its report, for `realm train` and `realm quickstart`.

Read `open_run` (config, prepared folder, mesh, networks) and `run_recipe` (the tasks in order); next `loop.py`.
"""

import logging
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict
from rich.table import Table
from rich.text import Text

from realm_jax.assemble import make_run
from realm_jax.config import Config, check, task_names, validate, with_values
from realm_jax.console import console, printable
from realm_jax.data.held_out import held_out_share, trained_rows
from realm_jax.data.questions import Question, answered
from realm_jax.data.sources import Sources, open_sources
from realm_jax.errors import UserError
from realm_jax.eval.prediction import Evaluator
from realm_jax.host import PREEMPTED, Preempted, Stop, signal_handler
from realm_jax.index.heartbeat import StatusWriter, trainer_status
from realm_jax.index.provider import shared_folder
from realm_jax.models.layers import Params
from realm_jax.processes import is_process_0
from realm_jax.retrieval.scann import load_scann
from realm_jax.run import Run
from realm_jax.storage import exclusive_lock, make_folder
from realm_jax.tasks import make_task
from realm_jax.tasks.answering import ANSWERING_TASKS, question_search, reads_passages
from realm_jax.tasks.base import Task
from realm_jax.tasks.closed_book import check_closed_book
from realm_jax.tasks.evidence_contrast import GROUP
from realm_jax.train.checkpoints import SavedCheckpoint
from realm_jax.train.exported_model import export_task
from realm_jax.train.init_from import (
    check_sources,
    fill_from_pretrained,
    init_from_sources,
    record_start,
)
from realm_jax.train.loop import train_task
from realm_jax.train.measure import dev_questions, evaluation_questions, make_measure
from realm_jax.train.results import measure_baselines, save_bm25_index, write_results
from realm_jax.train.trackers import check_installed
from realm_jax.train.trained_run import reader_is_trained
from realm_jax.train.workdir import check_workdir, has_checkpoint, recorded_config, recorded_corpus

logger = logging.getLogger(__name__)

FEW_SENTENCES = 50  # masked sentences; the interval of a share of fewer is wider than what any stage changes


# --- open a run -------------------------------------------------------------------------------------------------------


def open_run(config: Config | ConfigDict, workdir: Path) -> Run:
    """A validated run over its prepared folder; its config is recorded in `workdir`, or compared with the one there."""
    run = checked_run(config, workdir)
    make_folder(workdir, "--workdir")
    check_workdir(run)
    _warn_of_cut_passages(run)
    return run


def checked_run(config: Config | ConfigDict, workdir: Path) -> Run:
    """`open_run` that leaves nothing in `workdir` and compares nothing with what is recorded there."""
    config = validate(config)
    if config.retrieval.backend == "scann":
        load_scann()
    check_installed(config.log.to)
    if (workdir / "config.json").is_file():
        recorded_config(workdir)  # raises UserError if it is damaged, or of another version
    config = fill_from_pretrained(config, workdir)
    sources = open_sources(config.data.path, recorded_corpus(workdir))
    config = _with_possible_tasks(config, sources)
    check_sources(config, workdir, sources.tokenizer)
    run = make_run(config, workdir, sources)
    check_data(run)
    return run


def _with_possible_tasks(config: Config, sources: Sources) -> Config:
    """The config with the tasks that its data allow. Raises UserError if none is left."""
    names = task_names(config)
    lacking = {name: what for name in names if (what := missing_data(name, config, sources))}
    left = [name for name in names if name not in lacking]
    if not left:
        raise UserError(
            f"{config.data.path}: no {' and no '.join(dict.fromkeys(lacking.values()))}, and config.tasks has nothing "
            f"but {' and '.join(lacking)}; prepare some, or set config.tasks"
        )
    for name, what in lacking.items():
        logger.info("%s has no %s: %s left out of the recipe", config.data.path, what, name)
    return with_values(config, {"tasks": ",".join(left)}) if lacking else config


def missing_data(task: str, config: Config | ConfigDict, sources: Sources) -> str:
    """Say what the data lack for a task, which is then left out of the recipe; '' for nothing."""
    if task in ANSWERING_TASKS:
        return "" if sources.answered("train") else "training questions with answers"
    if task != "ict":
        return ""
    share = held_out_share(config.evaluation.held_out, sources.questions)
    has_several, training_rows = sources.passages.counts("sentences") > 1, trained_rows(sources.passages, share)
    if not has_several.any():
        return "passage of two or more sentences"
    if training_rows is None or (has_several & training_rows).any():
        return ""
    return f"passage of two or more sentences that config.evaluation.held_out={share} leaves to learn from"


def check_data(run: Run) -> None:
    """Raise UserError if config and data do not allow to train a task of the recipe."""
    config, sources = run.config, run.sources
    for name in task_names(config):
        if name == "realm" and config.realm.masking == "evidence" and not sources.pretraining_is_corpus:
            raise UserError(
                "config.realm.masking: 'evidence' looks for it among the passages that sentences stand in, but "
                f"{config.data.path} has other pre-training text; set config.data.text=passages"
            )
        if name == "qa" and config.evaluation.every and not answered(evaluation_questions(sources)):
            raise UserError(
                "config.evaluation.every: goes by exact match, but no development question that is measured has "
                f"answers in {config.data.path}; set it to 0"
            )
        if name == "closed_book":
            check_closed_book(sources.answered("train"), run.lengths)
        if name == "evidence_contrast":
            in_groups = f"passages come in groups of {GROUP}; set a multiple of it"
            check(config[name].batch_size % GROUP == 0, f"{name}.batch_size", in_groups)


def _warn_of_cut_passages(run: Run) -> None:
    length = run.config.data.document_length
    cut = int((run.sources.passages.counts("tokens") + 3 > length).sum())
    if cut:
        logger.warning(
            "%d of %d passages are longer than config.data.document_length=%d and are cut to it",
            cut,
            len(run.sources.passages),
            length,
        )


# --- train it ---------------------------------------------------------------------------------------------------------


def run_recipe(run: Run, command: str) -> int:
    """Baselines, the tasks, results and report; returns the exit code.

    Without development questions there is nothing to measure, and without passages nothing to report: the tasks are
    all then. 75 after SIGTERM, once the state is saved.
    """
    questions = dev_questions(run)
    names = task_names(run.config)
    searches = {question_search(name, run.config) for name in names}
    if "realm" in names:
        searches.add(run.config.realm.search)
    try:
        with (
            exclusive_lock(run.workdir) if is_process_0() else nullcontext(),
            report_status(run) as status,
            preemptible(),
        ):
            if searches - {"vectors"}:
                run.bm25()  # raises before anything is trained
                save_bm25_index(run)
            warn_if_few_sentences(run, questions)
            if not questions or not all(map(reads_passages, names)):
                train(run, status)
                return 0
            status.update(stage="baselines")
            evaluator = Evaluator(run, questions)
            measure_baselines(run, evaluator)
            params = train(run, status)
            status.update(stage="results")
            results = write_results(run, params, questions, command)
    except Preempted as reason:
        logger.warning("%s", reason)
        return PREEMPTED
    if is_process_0():
        asked = run.sources.questions.get("dev")  # without them masked sentences are measured
        show(results, run.workdir, asked[0].question if asked else "your question")
    return 0


def warn_if_few_sentences(run: Run, questions: Sequence[Question]) -> None:
    """Warn if there are no development questions and too few masked sentences in their place."""
    if run.sources.questions.get("dev") or len(questions) >= FEW_SENTENCES or not is_process_0():
        return
    held_out = f"evaluation.held_out={run.config.evaluation.held_out}"
    few = f"{len(questions)} masked sentences of documents that {held_out} keeps out of training" if questions else ""
    logger.warning(
        "%s has no development questions: the run is measured on %s; prepare questions, or hold out more documents",
        run.config.data.path,
        few or f"nothing, as {held_out} keeps no sentence out of training",
    )


def recipe_tasks(run: Run) -> list[Task]:
    """The tasks of the recipe, in order."""
    return [make_task(name, run) for name in task_names(run.config)]


def report_status(run: Run) -> AbstractContextManager[StatusWriter]:
    """The trainer's status until the block ends; see `trainer_status`."""
    waits = "realm" in task_names(run.config) and not is_trained(make_task("realm", run))
    needs_index = run.config.refresh.mode == "async" and waits
    return trainer_status(shared_folder(run), run.workdir, needs_index)


def is_trained(task: Task) -> bool:
    """Whether the last step of a task is saved."""
    saved = SavedCheckpoint.newest(task.run.workdir / task.name / "checkpoints")
    return saved is not None and saved.step >= task.settings.steps


@contextmanager
def preemptible() -> Iterator[None]:
    """Between tasks, where everything is saved, SIGTERM ends the run at once.

    Inside a task the loop takes the signal and saves first. One of several processes notes it for the next task, before
    which all of them stop. A request for a profile between tasks is ignored.
    """
    at_once = "" if jax.process_count() > 1 else "every finished task is saved"
    with signal_handler(signal.SIGUSR1, signal.SIG_IGN), Stop(at_once):
        yield


def train(run: Run, status: StatusWriter | None = None) -> Params:
    """Train and export the tasks of the recipe in order.

    Args:
        run: the run.
        status: the trainer's status file; needed if a builder makes REALM's index.

    Returns:
        All parameters after the last task.
    """
    params = starting_params(run)
    for task in recipe_tasks(run):
        if status is not None:
            status.update(stage=task.name)
        params = train_task(run, task.name, params, make_measure(task), status=status)
        export_task(run, task.name, params, reader_is_trained(run.workdir, task.name))
    return params


def starting_params(run: Run) -> Params:
    """Fresh parameters, or those that `init_from` and `reader_from` name; their shapes alone, without numbers, once the
    first checkpoint is there."""
    if has_checkpoint(run.config, run.workdir):
        return run.abstract_params
    params = init_from_sources(run, run.initial_params())
    record_start(run, params)
    return params


def show(results: dict[str, Any], workdir: Path, question: str) -> None:
    """The results as a table, and where to look next. question: one that could be asked."""
    table = Table(title="Results", title_justify="left", show_header=False)
    for measure in ("recall@5", "answer_recall@5"):
        for name, value in results.get(measure, {}).items():
            table.add_row(measure, name, f"{value:.3f}")
    for name, value in results["exact_match"].items():
        table.add_row("exact match", name, f"{value:.3f}")
    if "retrieval_utility" in results:
        table.add_row("retrieval utility", "nats", f"{results['retrieval_utility']:.2f}")
    for name, value in results["seconds"].items():
        table.add_row("seconds", name, f"{value:.0f}")
    console().print(table)
    for line in (
        f"report: {shlex.quote(str(workdir / 'report.html'))}",
        f"ask:    realm ask --workdir={shlex.quote(str(workdir))} {shlex.quote(question)}",
    ):
        console().print(Text(printable(line)), soft_wrap=True)
