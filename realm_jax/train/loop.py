"""The train loop: one task from its first step, or from its newest checkpoint, to its last.

Read `train_task` top to bottom; what happens every so many steps is done by the hooks below it. What a task needs and
what a step computes is said by the task (`realm_jax/tasks/`); where its arrays live is `step.py`; what watches over a
run is `guards.py`.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from realm_jax.data.examples import batches, padded_lengths
from realm_jax.errors import UserError
from realm_jax.flops import peak
from realm_jax.forward.context import Index, LoadedIndex
from realm_jax.host import Stop, free_heap
from realm_jax.models.realm import Params
from realm_jax.processes import any_process, broadcast_from_process_0
from realm_jax.refresh.status import StatusWriter
from realm_jax.run import Run, local_rows
from realm_jax.schema import flatten
from realm_jax.tasks import make_task
from realm_jax.tasks.base import Measure, Task
from realm_jax.train.best import BestParameters
from realm_jax.train.built_index import BuiltIndex
from realm_jax.train.checkpoints import Checkpoints, SavedCheckpoint
from realm_jax.train.feed import Feed
from realm_jax.train.guards import CompileGuard, Profiler, Watchdog
from realm_jax.train.index_source import IndexSource, Interrupted, start_vectors
from realm_jax.train.metrics import MetricLogger, StepCost
from realm_jax.train.records import describe_regression, stage_summary
from realm_jax.train.restore import Restored, restore
from realm_jax.train.step import ControlWords, State, make_step, put_control, start_state
from realm_jax.train.trackers import TaskRun, open_trackers
from realm_jax.train.workdir import begins_with_reader

logger = logging.getLogger(__name__)


def train_task(
    run: Run,
    name: str,
    params: Params,
    measure: Measure | None = None,
    status: StatusWriter | None = None,
) -> Params:
    """Train a task to its last step, resuming from its newest checkpoint; returns all parameters.

    params: where a fresh task starts; it donates them. Their shapes are enough where there is a checkpoint. measure:
    called with parameters and an index (None without one) at every new index and, its last argument true, every
    `task.evaluate_every` steps and at the end. status: for a task whose index a builder makes. Raises Preempted after
    SIGTERM, once the state is saved.

    Exact resume: a batch follows from the seed, the task and the step. A save holds the state, the index in use (its
    vectors, or the name of its generation), the query tower that searches, and searches under way. The save after s
    steps comes before the index and the evaluation of step s, so a run that resumes from it makes both again; the
    records of evaluations are cut back to before s.

    Preemption: SIGTERM sets a flag, `stop.requested`, and nothing else. Where the flag is checked:
    before the first step    every finished task is saved; all processes raise Preempted if any got it
    before each step         of one process its own flag, of several what they announced two steps ago, so that all stop
                             at the same step: `Interrupted`, which saves what is trained and raises Preempted
    waiting for an index     the processes vote, and all raise Interrupted
    embedding the corpus     one process gives it up (Interrupted); several finish it, and stop before a later step
    after the last step      the last evaluation and save come first, so that no step is lost; then Preempted
    """
    task, place = make_task(name, run), run.workdir / name
    free_heap()
    saved = SavedCheckpoint.newest_intact(place / "checkpoints", lambda saved: restore(task, saved, params))
    state = start_state(task, task.start(params)) if saved is None else saved.state
    with ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(place / "checkpoints", run.config.checkpoint.keep))
        stop = stack.enter_context(Stop())
        stop.requested = any_process(stop.requested)
        stop.check("every finished task is saved")
        if int(state.step) >= task.settings.steps:
            release_builders(task, status)
            return state.params
        loop = make_loop(task, place, state, saved, checkpoints, stop, measure, status)
        for part in (loop.watchdog, loop.metrics, loop.source, loop.feed, loop.profiler):
            stack.enter_context(part)
        try:
            if saved is not None and task.retrieves:
                loop.index = loop.source.resume(saved)
            del saved, state  # their arrays go when the loop needs them no longer
            run_steps(loop)
        except Interrupted:
            stop.requested = True  # whichever process got the signal
            save_and_stop(loop)
            raise
        finish(loop)
        release_builders(task, status)
        stop.requested = any_process(stop.requested)
        stop.check(f"saved {place.name} at step {loop.total}")
    return loop.state.params


# --- the steps --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Loop:
    """The state of the loop: first what stays, then what changes from step to step.

    folder: the task's, under the run folder. programs: how many the steps are compiled into at most. measure: see
    `train_task`. evaluate_reader_at_start: whether the start of a task that retrieves is measured as its end is. step:
    steps that are done; saved: those of the newest save, −1 for none. index: the one in use. values: metrics of the
    last step, on the devices. consensus: what all processes announced two steps ago.
    """

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
    profiler: Profiler
    programs: int
    measure: Measure | None
    evaluate_reader_at_start: bool
    state: State
    step: int
    saved: int
    index: LoadedIndex | None = None
    values: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    consensus: ControlWords = ControlWords()


def run_steps(loop: Loop) -> None:
    """Take the steps that are left. The order of a step: adopt an index, evaluate, batch, step, log, save.

    Raises Interrupted at the step before which the processes agreed to stop.
    """
    task = loop.task
    step_function = make_step(task)
    compiles = CompileGuard(step_function, loop.programs)
    before_step = (
        Hook(lambda loop: loop.profiler.at(loop.step, loop.values)),
        Hook(adopt, every=int(task.retrieves)),
        Hook(evaluate, every=task.evaluate_every if loop.measure is not None else 0, at_ends=False),
    )
    after_step = (
        Hook(lambda loop: compiles.check(loop.step - 1)),
        Hook(lambda loop: loop.metrics.flush()),
        Hook(log, every=task.run.config.log.every),
        Hook(save, every=task.run.config.checkpoint.every, at_ends=False),
    )
    reduced: deque[jax.Array] = deque(maxlen=2)  # control words of all processes, of the last two steps
    if loop.measure is not None and task.evaluates_start and loop.step == 0 and not task.retrieves:
        adopt(loop)
        loop.index = None  # it was evaluated with one; its steps use none
    while loop.step < loop.total:
        loop.watchdog.heartbeat()
        with loop.metrics.step():
            # Waits for the step before the last, as the devices are behind: without it a step would take no time.
            loop.consensus = ControlWords(*np.asarray(reduced[0]).tolist()) if len(reduced) == 2 else ControlWords()
            if loop.consensus.stop if jax.process_count() > 1 else loop.stop.requested:
                raise Interrupted
            run_due(before_step, loop)
            with jax.profiler.StepTraceAnnotation(task.name, step_num=loop.step):
                with loop.metrics.waiting("data"):
                    batch = loop.feed.next(loop.state.params, loop.index)
                said = loop.source.announce(loop.step)._replace(stop=int(loop.stop.requested))
                arrays = None if loop.index is None else loop.index.index
                control = put_control(task.run.mesh, said)
                loop.state, loop.values = step_function(loop.state, batch, arrays, control)
            del batch, arrays  # so that an index that is replaced goes at once
            reduced.append(loop.values.pop("consensus"))
            loop.step += 1
            run_due(after_step, loop)


class Hook(NamedTuple):
    """Something to do every so many steps; `every` 0: never. at_ends: also before the first step, or after the last.

    It sees the whole `Loop`. One hook changes what is computed: `adopt` replaces the index.
    """

    act: Callable[[Loop], None]
    every: int = 1
    at_ends: bool = True


def run_due(hooks: tuple[Hook, ...], loop: Loop) -> None:
    """The hooks that are due at the loop's step, in their order."""
    for hook in hooks:
        at_end = loop.step in (0, loop.total)
        if hook.every and (hook.at_ends if at_end else loop.step % hook.every == 0):
            hook.act(loop)


# --- what serves the steps --------------------------------------------------------------------------------------------


def make_loop(
    task: Task, folder: Path, state: State, saved: Restored | None, checkpoints: Checkpoints, stop: Stop,
    measure: Measure | None, status: StatusWriter | None,
) -> Loop:  # fmt: skip
    """All that serves the steps of a task from `state` on.

    saved: where the state came from, None for the start.
    """
    run, config, start, total = task.run, task.run.config, int(state.step), task.settings.steps
    watchdog = Watchdog(config.log.hang_seconds, folder.name)

    def should_stop() -> bool:
        """Whether to stop waiting for an index; a process that asks is alive."""
        watchdog.heartbeat()
        return stop.requested

    def embedding() -> None:
        """Called again and again while the corpus is embedded."""
        if should_stop() and jax.process_count() == 1 and loop.step < total:
            raise Interrupted

    def stop_if_asked() -> None:
        """Called while the corpus is embedded for the examples: what is trained is saved."""
        if jax.process_count() == 1:
            stop.check(f"{folder.name} is saved at step {start}" if start else "every finished task is saved")

    rows = local_rows(run.mesh, task.settings.batch_size)
    cost = StepCost(sum(task.flops().values()), run.mesh.size, peak(run.mesh.devices.flat[0].device_kind))
    record = {} if saved is None else saved.record
    source = make_index_source(task, status, start, checkpoints, should_stop, embedding)
    examples = task.examples(state.params, partial(start_vectors, run, task.name, state.params, stop_if_asked))
    stream = batches(examples, config.seed, task.stream, task.settings.batch_size, start, total, rows)
    trackers = open_trackers(config.log.to, TaskRun(folder, start, flatten(config.to_dict())))
    loop = Loop(
        task=task, folder=folder, total=total, stop=stop, watchdog=watchdog, checkpoints=checkpoints,
        metrics=MetricLogger(
            folder, task.name, start, total, cost, record, lambda: checkpoints.latest, task.monitors(), trackers
        ),
        best=BestParameters(task, folder, measure is not None and task.keeps_best),
        source=source, feed=Feed(task, stream, rows, None if saved is None else saved.in_flight),
        profiler=Profiler(folder / "profile"), programs=padded_lengths(examples), measure=measure,
        evaluate_reader_at_start=measure is not None and evaluates_reader_at_start(task),
        state=state, step=start, saved=-1 if saved is None else start,
    )  # fmt: skip
    return loop


def release_builders(task: Task, status: StatusWriter | None) -> None:
    """Tell index builders that a task needs no further index."""
    if task.follows_builder and status is not None:
        status.update(index_done=True, step=task.settings.steps)


def evaluates_reader_at_start(task: Task) -> bool:
    """Whether what a task starts with is measured as at its end, to keep the better: it may come with a reader."""
    return task.retrieves and bool(
        task.run.config.evaluation.keep_best and broadcast_from_process_0(begins_with_reader(task.run.workdir))
    )


def make_index_source(
    task: Task, status: StatusWriter | None, start: int, checkpoints: Checkpoints, should_stop: Callable[[], bool],
    on_progress: Callable[[], None],
) -> IndexSource:  # fmt: skip
    """Where a task's index comes from. What follows no builder embeds inline.

    status: through which the builder hears of the trainer. should_stop: whether to stop waiting.
    on_progress: called again and again while the corpus is embedded.
    """
    config = task.run.config
    if not task.follows_builder or status is None or config.refresh.mode == "inline":
        return IndexSource(task, on_progress)
    kept = checkpoints.generations()
    return BuiltIndex(task, start, kept, config.checkpoint.keep, status, should_stop, on_progress)


# --- hooks: before a step ---------------------------------------------------------------------------------------------


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
            measures = _evaluate(loop, loop.source.as_exact(fresh), loop.evaluate_reader_at_start and loop.step == 0)
    loop.best.update(loop.step, loop.state, measures)
    loop.metrics.log_evaluation(loop.step, measures | {"refresh": True, "index_step": fresh.step} | fresh.facts)


def evaluate(loop: Loop) -> None:
    """Evaluate what was learnt so far."""
    with loop.metrics.waiting("measurement"):
        measures = _evaluate(loop, loop.source.index_for_eval(loop.step, loop.state.params, loop.index), True)
        loop.best.update(loop.step, loop.state, measures)
    loop.watchdog.heartbeat()
    loop.metrics.log_evaluation(loop.step, measures)


def _evaluate(loop: Loop, index: Index | None, final: bool) -> dict[str, Any]:
    assert loop.measure is not None, "a task that sets evaluate_every has a measure"
    measures = loop.measure(loop.state.params, index, final)
    loop.watchdog.heartbeat()
    return measures


# --- hooks: after a step ----------------------------------------------------------------------------------------------


def log(loop: Loop) -> None:
    """The metrics of the step that was just started; they are fetched one step late."""
    further = {} if loop.index is None else {"index_age": loop.step - 1 - loop.index.step}
    loop.metrics.log_step(loop.step, loop.values, further)


def save(loop: Loop) -> None:
    """Save in the background: the state, the index in use or the name of its generation, and the searches under way.

    Raises UserError, and saves nothing, if a loss is not finite.
    """
    if loop.values:
        loop.metrics.fetch(loop.step, loop.values)
    loop.metrics.flush()
    with loop.metrics.waiting("checkpoint"):
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


# --- after the last step ----------------------------------------------------------------------------------------------


def finish(loop: Loop) -> None:
    """The last evaluation and save."""
    loop.metrics.flush()
    loop.watchdog.heartbeat()
    measures = evaluate_end(loop)
    loop.watchdog.heartbeat()
    save_at_once(loop)
    warn_if_below_start(loop, measures)


def evaluate_end(loop: Loop) -> dict[str, Any]:
    """The final evaluation of a task, {} if it has none. The best parameters replace the last where they
    are kept."""
    if loop.measure is None:
        return {}
    measures = _evaluate_own_index(loop, loop.total)
    loop.best.update(loop.total, loop.state, measures)
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
    if warning := describe_regression(loop.task.name, stage_summary(loop.folder), loop.best.selection_metric(measures)):
        logger.warning("%s", warning)
