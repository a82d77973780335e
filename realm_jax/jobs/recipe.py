"""A recipe from its first task to its report: what `realm train` and `realm quickstart` have in common."""

import logging
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.table import Table

from realm_jax.config import task_names
from realm_jax.console import console
from realm_jax.corpus.jsonl import Question
from realm_jax.data.examples import Examples, question_examples
from realm_jax.errors import UserError
from realm_jax.evaluation.predict import Evaluator
from realm_jax.host import PREEMPTED, Preempted, Stop, handling
from realm_jax.index.generations import RECIPE, Living, Status
from realm_jax.jobs.controls import run_controls
from realm_jax.jobs.init_from import borrow_params, borrows, record_start, starts_with_pca
from realm_jax.jobs.matched_answers import training_questions
from realm_jax.jobs.measuring import dev_questions, measure_of
from realm_jax.jobs.positives import beam_by_words, examples_with_positives
from realm_jax.jobs.projection import with_principal_components
from realm_jax.jobs.results import keep_words, measure_baselines, write_results
from realm_jax.models.realm import Params
from realm_jax.processes import is_process_0
from realm_jax.run import Run
from realm_jax.storage import only_one
from realm_jax.training.loop import train_task
from realm_jax.training.refresh import shared_folder
from realm_jax.training.workdir import has_checkpoint

logger = logging.getLogger(__name__)

FEW = 50  # masked sentences; the interval of a share of fewer is wider than what any stage changes


def run_recipe(run: Run, controls: bool, command: str) -> int:
    """Baselines, the tasks, the controls if wanted, results and report; returns the exit code.

    Without development questions there is nothing to measure, and without passages nothing to report: the tasks are
    all then. 75 after SIGTERM, once the state is saved.
    """
    questions = dev_questions(run)
    if controls and not questions:
        raise UserError(f"--controls: {run.config.data.path} has no development questions to measure them with")
    if controls and "closed_book" in task_names(run.config):
        raise UserError("--controls: closed_book is a control itself; leave it out")
    try:
        with only_one(run.workdir) if is_process_0() else nullcontext(), living(run) as tell, preemptible():
            if searched_by(run) - {"vectors"}:
                run.words()  # raises before anything is trained
                keep_words(run)
            warn_of_few(run, questions)
            if not questions or "closed_book" in task_names(run.config):
                train(run, tell)
                return 0
            tell("baselines")
            evaluator = Evaluator(run, questions)
            measure_baselines(run, evaluator, run.initial_params())
            params = train(run, tell)
            if controls:
                tell("controls")
                run_controls(run, evaluator)
            tell("results")
            results = write_results(run, params, questions, command)
    except Preempted as reason:
        logger.warning("%s", reason)
        return PREEMPTED
    if is_process_0():
        show(results, run.workdir)
    return 0


def warn_of_few(run: Run, questions: Sequence[Question]) -> None:
    """Say where there are no development questions, and masked sentences are too few to stand in for them."""
    if run.sources.questions.get("dev") or len(questions) >= FEW or not is_process_0():
        return
    held_out = f"evaluation.held_out={run.config.evaluation.held_out}"
    few = f"{len(questions)} masked sentences of documents that {held_out} keeps out of training" if questions else ""
    logger.warning(
        "%s has no development questions: the run is measured on %s; prepare questions, or hold out more documents",
        run.config.data.path,
        few or f"nothing, as {held_out} keeps no sentence out of training",
    )


def searched_by(run: Run) -> set[str]:
    """How the tasks of a recipe find passages, and questions to what it trained, of `config.SEARCHES`."""
    names = task_names(run.config)
    return {run.asked_by(name) for name in names} | ({run.setting.search} if "realm" in names else set())


@contextmanager
def living(run: Run) -> Iterator[Callable[[str], None]]:
    """Signs of life (jobs/recipe.json) until the block ends, and once it has ended well the word that all is done.

    Gives a function that takes what the recipe is at. Of several processes the first alone says anything.
    """
    if not is_process_0():
        yield lambda stage: None
        return
    with Living(shared_folder(run), RECIPE, Status("", stage="starting", step=-1)) as job:
        yield lambda stage: job.tell(stage=stage)
        job.tell(stage="ended", done=True)


@contextmanager
def preemptible() -> Iterator[None]:
    """SIGTERM between tasks, where everything that is done is saved, ends the run at once.

    Inside a task the loop takes the signal and saves first. One of several processes notes it for the next task, before
    which all of them stop. A request for a profile between tasks is ignored.
    """
    at_once = "" if jax.process_count() > 1 else "every finished task is saved"
    with handling(signal.SIGUSR1, signal.SIG_IGN), Stop(at_once):
        yield


def train(run: Run, tell: Callable[[str], None] = lambda task: None) -> Params:
    """All tasks of the recipe; returns the final parameters. tell: is given the name of each."""
    params = starting_params(run)
    for name in task_names(run.config):
        tell(name)
        examples = partial(questions_to_learn, run) if name == "qa" else None
        params = train_task(run, name, params, measure_of(run, name), examples=examples)
    return params


def questions_to_learn(run: Run, params: Params) -> Examples:
    """The examples of fine-tuning from `params`; patterns for answers become strings."""
    questions = training_questions(run, params)
    if run.config.objective.qa == "positive":
        return examples_with_positives(run, params, questions)
    found = beam_by_words(run, questions) if run.setting.qa_search != "vectors" else None
    return question_examples(questions, run.sources.wordpiece, run.lengths, found)


def starting_params(run: Run) -> Params:
    """Fresh parameters, or those that `init_from` and `reader_from` name, until the first checkpoint is there.

    A projection that would be fresh then may start as principal components of the corpus.
    """
    params = run.initial_params()
    if has_checkpoint(run.config, run.workdir):
        return params
    if borrows(run.config, run.workdir):
        params = borrow_params(run, params)
    record_start(run, params)
    return with_principal_components(run, params) if starts_with_pca(run) else params


def show(results: dict[str, Any], workdir: Path) -> None:
    """The results as a table, and where to look next."""
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
        f'ask:    realm ask --workdir={shlex.quote(str(workdir))} "question"',
    ):
        console().print(line, soft_wrap=True, markup=False)
