"""Hooks of the train loop: adopt an index, evaluate, log, save.

A hook sees the whole `Loop`. One changes what is computed: `adopt` replaces the index. Which hooks there are, how often
and in which order, stands in `loop.py`; read that first.
"""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from realm_jax.errors import UserError
from realm_jax.host import Stop
from realm_jax.models.realm import Params
from realm_jax.retrieval.search import Index, LoadedIndex
from realm_jax.run import BaseRun
from realm_jax.tasks.base import Task
from realm_jax.train.best import BestParameters, describe_regression, stage_summary
from realm_jax.train.checkpoints import Checkpoints
from realm_jax.train.feed import Feed
from realm_jax.train.guards import Watchdog, check_replicas
from realm_jax.train.index_source import IndexSource
from realm_jax.train.metrics import MetricLogger
from realm_jax.train.step import ControlWords, State

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Loop:
    """The state of the loop: first what stays, then what changes from step to step.

    folder: under the run folder. measure: see `loop.train_task`. answers_start: whether the start of a task that
    retrieves is measured as its end is. step: steps that are done; saved: those of the newest save, −1 for none. index:
    the one in use. values: metrics of the last step, on the devices. consensus: what all processes announced two steps
    ago.
    """

    run: BaseRun
    task: Task
    folder: Path
    total: int
    stop: Stop
    watchdog: Watchdog
    metrics: MetricLogger
    checkpoints: Checkpoints
    best: BestParameters
    source: IndexSource
    feed: Feed
    measure: Callable[[Params, Index | None, bool], dict[str, Any]] | None
    answers_start: bool
    state: State
    step: int
    saved: int
    index: LoadedIndex | None = None
    values: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    consensus: ControlWords = ControlWords()


class Hook(NamedTuple):
    """Something to do every so many steps; `every` 0: never. at_ends: also before the first step, or after the last."""

    act: Callable[[Loop], None]
    every: int = 1
    at_ends: bool = True


def run_due(hooks: tuple[Hook, ...], loop: Loop) -> None:
    """The hooks that are due at the loop's step, in their order."""
    for hook in hooks:
        at_end = loop.step in (0, loop.total)
        if hook.every and (hook.at_ends if at_end else loop.step % hook.every == 0):
            hook.act(loop)


# --- Before a step


def adopt(loop: Loop) -> None:
    """Use a fresh index from here on, if there is one, and evaluate the parameters with it.

    If an index does not arrive in time, the run saves its state and ends.
    """
    try:
        with loop.metrics.waiting("index"):
            fresh = loop.source.next(loop.step, loop.state.params, loop.index, loop.consensus)
    except UserError:
        save_and_stop(loop)
        raise
    loop.watchdog.heartbeat()
    if fresh is None:
        return
    loop.index = fresh
    measures: dict[str, Any] = {}
    if loop.measure is not None:
        with loop.metrics.waiting("measurement"):
            measures = _evaluate(loop, loop.source.as_exact(fresh), loop.answers_start and loop.step == 0)
    loop.best.look(loop.step, loop.state, measures)
    loop.metrics.log_evaluation(loop.step, measures | {"refresh": True, "index_step": fresh.step} | fresh.facts)


def evaluate(loop: Loop) -> None:
    """Evaluate what was learnt so far."""
    with loop.metrics.waiting("measurement"):
        measures = _evaluate(loop, loop.source.index_for_eval(loop.step, loop.state.params, loop.index), True)
        loop.best.look(loop.step, loop.state, measures)
    loop.watchdog.heartbeat()
    loop.metrics.log_evaluation(loop.step, measures)


def _evaluate(loop: Loop, index: Index | None, final: bool) -> dict[str, Any]:
    assert loop.measure is not None, "a task that sets evaluate_every has a measure"
    measures = loop.measure(loop.state.params, index, final)
    loop.watchdog.heartbeat()
    return measures


# --- After a step


def log(loop: Loop) -> None:
    """The metrics of the step that was just started; they are fetched one step late."""
    further = {} if loop.index is None else {"index_age": loop.step - 1 - loop.index.step}
    loop.metrics.log_step(loop.step, loop.values, further)


def save(loop: Loop) -> None:
    """Save in the background: the state, the index in use or the name of its generation, and the searches under way.

    Raises UserError, and saves nothing, where a loss is not finite or devices that should hold the same bits do not.
    """
    if loop.values:
        loop.metrics.fetch(loop.step, loop.values)
    loop.metrics.flush()
    with loop.metrics.waiting("checkpoint"):
        check_replicas(loop.run.mesh, loop.state, loop.step)
        index = loop.index
        generation = "" if index is None else index.generation
        record = {"index_step": -1 if index is None else index.step, "generation": generation}
        record |= {"seconds": loop.metrics.seconds, "first_started": loop.metrics.first_started}
        arrays: dict[str, Any] = {}
        if index is not None and not generation and index.vectors is not None:
            arrays["vectors"] = index.vectors
            if index.index.tower is not None:
                arrays["tower"] = index.index.tower
        if (rows := loop.feed.in_flight()) is not None:
            arrays["in_flight"] = rows
        loop.source.saving(loop.step, generation)
        loop.checkpoints.save(loop.step, loop.state, arrays, record)
    loop.saved = loop.step


def save_at_once(loop: Loop) -> None:
    """Save if needed, and wait until it is on disk."""
    if loop.saved != loop.step:
        save(loop)
    loop.checkpoints.wait()


def save_and_stop(loop: Loop) -> None:
    """Save what is trained, and raise Preempted if SIGTERM came."""
    save_at_once(loop)
    loop.stop.check(f"saved {loop.folder.name} at step {loop.step}")


# --- After the last step


def evaluate_end(loop: Loop) -> dict[str, Any]:
    """The final evaluation of a task, {} if it has none. The best parameters replace the last where they
    are kept."""
    if loop.measure is None:
        return {}
    measures = _evaluate_own_index(loop, loop.total)
    loop.best.look(loop.total, loop.state, measures)
    if (better := loop.best.parameters_other_than(loop.total)) is not None:
        step, trained = better
        loop.state = loop.state._replace(trained=trained)
        measures = _evaluate_own_index(loop, step) | {"best_step": step, "last": measures}
    loop.metrics.log_evaluation(loop.total, measures | {"refresh": False, "seconds": loop.metrics.seconds})
    return measures


def _evaluate_own_index(loop: Loop, step: int) -> dict[str, Any]:
    """The parameters, those of `step`, with an index that they give, which stays."""
    index = loop.source.final_index(step, loop.state.params, loop.index)
    loop.index = None if index is None else dataclasses.replace(index, step=loop.total)
    return _evaluate(loop, None if loop.index is None else loop.source.as_exact(loop.index), True)


def warn_if_below_start(loop: Loop, measures: dict[str, Any]) -> None:
    """Warn if a task of the recipe is worse at its end than at its start. measures: as of `evaluate_end`."""
    stage = stage_summary(loop.folder) if loop.folder.name == loop.task.name else None  # not of a control
    if warning := describe_regression(loop.task.name, stage, loop.best.selection_metric(measures)):
        logger.warning("%s", warning)
