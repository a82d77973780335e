"""Train a recipe, from its config to its report, for `realm train` and `realm quickstart`.

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
from realm_jax.config import INDEX, Config, check, task_names, validate, with_values
from realm_jax.console import console, printable
from realm_jax.data.held_out import held_out_share, trained_rows
from realm_jax.data.questions import Question, answered
from realm_jax.data.sources import Sources, open_sources
from realm_jax.errors import UserError
from realm_jax.eval.prediction import Evaluator
from realm_jax.host import PREEMPTED, Preempted, Stop, signal_handler
from realm_jax.indexing.heartbeat import StatusWriter, trainer_status
from realm_jax.indexing.provider import shared_folder
from realm_jax.mirror import upload_changes, url_of
from realm_jax.models.layers import Params
from realm_jax.processes import is_process_0
from realm_jax.retrieval.analyzers import check_available
from realm_jax.retrieval.scann import load_scann
from realm_jax.run import Run
from realm_jax.storage import exclusive_lock, make_folder
from realm_jax.tasks import make_task
from realm_jax.tasks.answering import ANSWERING_TASKS, question_search, reads_passages
from realm_jax.tasks.base import Task
from realm_jax.tasks.closed_book import check_closed_book
from realm_jax.tasks.evidence_contrast import GROUP
from realm_jax.train.checkpoints import SavedCheckpoint
from realm_jax.train.exported_model import MODEL, export_task, find_exported_model
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

FEW_SENTENCES = 50  # with fewer masked sentences the confidence interval is wider than the effect of any task


# --- Open a run -------------------------------------------------------------------------------------------------------


def open_run(config: Config | ConfigDict, workdir: Path) -> Run:
    """Open a run, and record its config and data in the run directory, or compare them with the record.

    Args:
        config: is validated and completed from its source.
        workdir: the run directory, made if it is missing.

    Raises:
        UserError: the config is invalid, does not fit the data, or differs from the record in a training key.
    """
    run = checked_run(config, workdir)
    make_folder(workdir, "--workdir")
    check_workdir(run)
    _warn_of_cut_passages(run)
    return run


def checked_run(config: Config | ConfigDict, workdir: Path) -> Run:
    """Open a run without writing to the run directory.

    Args:
        config: is validated and completed from its source.
        workdir: the run directory; if there is a run, it keeps its values and its version of the corpus.

    Raises:
        UserError: the config is invalid or does not fit the data.
    """
    config = validate(config)
    if config.retrieval.backend == "scann":
        load_scann()
    check_installed(config.log.to)
    check_available(config.retrieval.language)
    if (workdir / "config.json").is_file():
        recorded_config(workdir)  # raises UserError if it is malformed or of another version
    config = fill_from_pretrained(config, workdir)
    sources = open_sources(config.data.path, recorded_corpus(workdir))
    config = _with_possible_tasks(config, sources)
    check_sources(config, workdir, sources.tokenizer)
    run = make_run(config, workdir, sources)
    check_data(run)
    return run


def _with_possible_tasks(config: Config, sources: Sources) -> Config:
    """Return the config without the tasks that its data do not allow. Raises UserError if no task remains."""
    names = task_names(config)
    missing = {name: data for name in names if (data := missing_data(name, config, sources))}
    possible = [name for name in names if name not in missing]
    if not possible:
        raise UserError(
            f"{config.data.path}: no {' and no '.join(dict.fromkeys(missing.values()))}, and config.tasks has nothing "
            f"but {' and '.join(missing)}; prepare some, or set config.tasks"
        )
    for name, data in missing.items():
        logger.info("skipping task %s of the recipe: %s has no %s", name, config.data.path, data)
    return with_values(config, {"tasks": ",".join(possible)}) if missing else config


def missing_data(task: str, config: Config | ConfigDict, sources: Sources) -> str:
    """Describe the data that a task needs and the prepared folder lacks.

    Args:
        task: the task's name.
        config: has the share of held-out documents.
        sources: the prepared folder.

    Returns:
        A singular or plural noun without article, for messages; '' if nothing is missing.
    """
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
    """Raise UserError if a task of the recipe cannot train with this config and these data."""
    config, sources = run.config, run.sources
    for name in task_names(config):
        if name == "realm" and config.realm.masking == "evidence" and not sources.pretraining_is_corpus:
            raise UserError(
                "config.realm.masking: 'evidence' searches the passages of the sentences, but "
                f"{config.data.path} has other pre-training text; set config.data.text=passages"
            )
        if name == "qa" and config.evaluation.every and not answered(evaluation_questions(sources)):
            raise UserError(
                "config.evaluation.every: measures exact match, but no measured development question in "
                f"{config.data.path} has answers; set it to 0"
            )
        if name == "closed_book":
            check_closed_book(sources.answered("train"), run.lengths)
        if name == "evidence_contrast":
            in_groups = f"passages come in groups of {GROUP}; set a multiple of it"
            check(config[name].batch_size % GROUP == 0, f"{name}.batch_size", in_groups)


def _warn_of_cut_passages(run: Run) -> None:
    """Warn if passages with [CLS] and two [SEP] are longer than `data.document_length`."""
    length = run.config.data.document_length
    cut = int((run.sources.passages.counts("tokens") + 3 > length).sum())
    if cut:
        logger.warning(
            "%d of %d passages are longer than config.data.document_length=%d and are truncated",
            cut,
            len(run.sources.passages),
            length,
        )


# --- Train the recipe -------------------------------------------------------------------------------------------------


def run_recipe(run: Run, command: str) -> int:
    """Measure baselines, train the tasks, and write results and report.

    Without questions to measure, or with a task that reads no passages, this only trains.

    Args:
        run: opened with `open_run`.
        command: the command line, for the report.

    Returns:
        Exit code: 0, or 75 after SIGTERM, when the state is saved.
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
                run.bm25()  # raises UserError before anything is trained
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
        dev = run.sources.questions.get("dev")  # without them we measure masked sentences
        show(results, run.workdir, dev[0].question if dev else "your question")
    return 0


def warn_if_few_sentences(run: Run, questions: Sequence[Question]) -> None:
    """Warn if there are no development questions and only few masked sentences instead.

    Args:
        run: has the questions of the prepared folder.
        questions: to measure: development questions or masked sentences.
    """
    if run.sources.questions.get("dev") or len(questions) >= FEW_SENTENCES or not is_process_0():
        return
    held_out = f"evaluation.held_out={run.config.evaluation.held_out}"
    sentences = f"{len(questions)} held-out sentences" if questions else "no sentence"
    logger.warning(
        "%s has no development questions, and %s leaves %s to evaluate on; prepare questions, or hold out more "
        "documents",
        run.config.data.path,
        held_out,
        sentences,
    )


def recipe_tasks(run: Run) -> list[Task]:
    """Return the tasks of the recipe, in order."""
    return [make_task(name, run) for name in task_names(run.config)]


def report_status(run: Run) -> AbstractContextManager[StatusWriter]:
    """Return a context manager that publishes the trainer's status for index builders; see `trainer_status`."""
    waits = "realm" in task_names(run.config) and not is_trained(make_task("realm", run))
    needs_index = run.config.refresh.mode == "async" and waits
    return trainer_status(shared_folder(run), run.workdir, needs_index)


def is_trained(task: Task) -> bool:
    """Return True if the last step of a task is saved."""
    saved = SavedCheckpoint.newest(task.run.workdir / task.name / "checkpoints")
    return saved is not None and saved.step >= task.settings.steps


@contextmanager
def preemptible() -> Iterator[None]:
    """Let SIGTERM end a run between tasks, when everything is saved; inside a task the loop saves first.

    One process ends at once. Several processes all stop before the next task. SIGUSR1 (profile) is ignored between
    tasks.
    """
    at_once = "" if jax.process_count() > 1 else "every finished task is saved"
    with signal_handler(signal.SIGUSR1, signal.SIG_IGN), Stop(at_once):
        yield


def train(run: Run, status: StatusWriter | None = None) -> Params:
    """Train and export the tasks of the recipe in order.

    Args:
        run: opened with `open_run`.
        status: the trainer's status file; None if no builder makes REALM's index.

    Returns:
        All parameters after the last task, on the devices.
    """
    params = starting_params(run)
    for task in recipe_tasks(run):
        if status is not None:
            status.update(stage=task.name)
        params = train_task(run, task.name, params, make_measure(task), status=status)
        export_task(run, task.name, params, reader_is_trained(run.workdir, task.name))
        upload_changes(run.workdir)
    return params


def starting_params(run: Run) -> Params:
    """Return the parameters that a run starts from: those of its sources, else fresh ones.

    If the run has a checkpoint, these are only abstract arrays.

    Raises:
        UserError: the run continues from an index that other encoders embedded.
    """
    if has_checkpoint(run.config, run.workdir):
        return run.abstract_params
    params = init_from_sources(run, run.initial_params())
    exported = find_exported_model(run.workdir / MODEL)
    if exported is not None and exported.task == INDEX:
        if not exported.has({name: params[name] for name in run.model.embedder_names}):
            raise UserError(
                f"config.init_from={run.config.init_from}: has other weights than when {run.workdir} was indexed; "
                "restore them, or start in another folder"
            )
    record_start(run, params)
    return params


def show(results: dict[str, Any], workdir: Path, question: str) -> None:
    """Print the results as a table, and the next commands.

    Args:
        results: result of `write_results`.
        workdir: the run directory.
        question: example for `realm ask`.
    """
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
        f"report: {shlex.quote(url_of(workdir / 'report.html'))}",
        f"ask:    realm ask --workdir={shlex.quote(url_of(workdir))} {shlex.quote(question)}",
    ):
        console().print(Text(printable(line)), soft_wrap=True)
