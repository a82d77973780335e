"""The train loop: one task from its first step, or from its newest checkpoint, to its last.

Read `train_task` top to bottom, then `hooks.py`, what happens every so many steps. What a task needs and what a step
computes is said by the task (`realm_jax/tasks/`); where its arrays live is `step.py`; what watches over a run is
`guards.py`.
"""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import jax
import numpy as np

from realm_jax.data.examples import batches, padded_lengths
from realm_jax.flops import peak
from realm_jax.host import Stop, free_heap
from realm_jax.models.realm import Params
from realm_jax.processes import any_process, broadcast_from_process_0
from realm_jax.refresh.status import StatusWriter
from realm_jax.run import BaseRun, local_rows
from realm_jax.tasks import make_task
from realm_jax.tasks.base import Measure, Task
from realm_jax.train import hooks
from realm_jax.train.best import BestParameters
from realm_jax.train.built_index import BuiltIndex
from realm_jax.train.checkpoints import Checkpoints, SavedCheckpoint
from realm_jax.train.embedding import start_vectors
from realm_jax.train.feed import Feed, HostSearch
from realm_jax.train.guards import CompileGuard, Profiler, Watchdog
from realm_jax.train.hooks import Hook, Loop, run_due
from realm_jax.train.index_source import IndexSource, InlineIndex, Interrupted
from realm_jax.train.metrics import MetricLogger, StepCost
from realm_jax.train.restore import restore
from realm_jax.train.step import ControlWords, make_step, put_control, start_state
from realm_jax.train.workdir import begins_with_reader


def train_task(
    run: BaseRun,
    name: str,
    params: Params,
    measure: Measure | None = None,
    folder: str | None = None,
    status: StatusWriter | None = None,
) -> Params:
    """Train a task to its last step, resuming from its newest checkpoint; returns all parameters.

    params: where a fresh task starts; it donates them. measure: called with parameters and an index (None without one)
    at every new index and, its last argument true, every `task.evaluate_every` steps and at the end. folder: name of a
    control's folder under the run folder, None for the task's own; a control hands on its last parameters. status: for
    a task whose index a builder makes. Raises Preempted after SIGTERM, once the state is saved.

    The order of a step: adopt an index, evaluate, batch, step, log, save.

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
    config, task, own = run.config, make_task(name, run), folder is None
    total, size, place = task.settings.steps, task.settings.batch_size, run.workdir / (folder or name)
    status = status if own else None

    # --- Restore: the newest checkpoint that is intact, else the start

    free_heap()
    saved = SavedCheckpoint.newest_intact(place / "checkpoints", lambda saved: restore(run, task, saved, params))
    state = start_state(run, task, task.start(params)) if saved is None else saved.state
    start = int(state.step)
    with ExitStack() as stack:
        keep = config.checkpoint
        checkpoints = stack.enter_context(Checkpoints(place / "checkpoints", keep.keep, keep.keep_every))
        stop = stack.enter_context(Stop())
        stop.requested = any_process(stop.requested)
        stop.check("every finished task is saved")
        if start >= total:
            release_builders(task, status)
            return state.params

        # --- What serves the steps

        def should_stop() -> bool:
            """Whether to stop waiting for an index; a process that asks is alive."""
            watchdog.heartbeat()
            return stop.requested

        def embedding() -> None:
            """Called again and again while the corpus is embedded."""
            if should_stop() and jax.process_count() == 1 and loop.step < total:
                raise Interrupted

        step_function = make_step(run, task)
        record = {} if saved is None else saved.record
        metrics = MetricLogger(
            place, name, start, total, step_cost(task), record, lambda: checkpoints.latest, task.monitor()
        )
        watchdog = Watchdog(config.log.hang_seconds, place.name)
        source = make_index_source(task, status, start, checkpoints, should_stop, embedding)
        rows = local_rows(run.mesh, size)
        examples = task.examples(state.params, partial(start_vectors, task.run, name, state.params))
        stream = batches(examples, config.seed, task.stream, size, start, total, rows)
        feed = Feed(run.mesh, stream, rows, size, host_search(task), None if saved is None else saved.in_flight)
        profiler = Profiler(place / "profile")
        compiles = CompileGuard(step_function, padded_lengths(examples))
        measured = measure is not None
        best = BestParameters(run, task, place, measured and task.keeps_best and own)
        loop = Loop(
            run=run, task=task, folder=place, total=total, stop=stop, watchdog=watchdog, metrics=metrics,
            checkpoints=checkpoints, best=best, source=source, feed=feed, measure=measure,
            answers_start=measured and evaluates_reader_at_start(task), state=state, step=start,
            saved=-1 if saved is None else start,
        )  # fmt: skip
        before_step = (
            Hook(lambda loop: profiler.at(loop.step, loop.values)),
            Hook(hooks.adopt, every=int(task.retrieves)),
            Hook(hooks.evaluate, every=task.evaluate_every if measured else 0, at_ends=False),
        )
        after_step = (
            Hook(lambda loop: compiles.check(loop.step - 1)),
            Hook(hooks.log, every=config.log.every),
            Hook(hooks.save, every=config.checkpoint.every, at_ends=False),
        )
        answers: deque[jax.Array] = deque(maxlen=2)  # of all processes, to what was announced at the last two steps
        for part in (watchdog, metrics, source, feed, profiler):
            stack.enter_context(part)

        # --- The steps

        try:
            if saved is not None and task.retrieves:
                loop.index = source.resume(saved)
            del saved, state  # their arrays go when the loop needs them no longer
            if measured and own and task.evaluates_start and start == 0 and not task.retrieves:
                hooks.adopt(loop)
                loop.index = None  # it was evaluated with one; its steps use none
            while loop.step < total:
                watchdog.heartbeat()
                loop.consensus = ControlWords(*np.asarray(answers[0]).tolist()) if len(answers) == 2 else ControlWords()
                stop_here = loop.consensus.stop if jax.process_count() > 1 else stop.requested
                if stop_here:
                    raise Interrupted
                with metrics.step():
                    run_due(before_step, loop)
                    with jax.profiler.StepTraceAnnotation(name, step_num=loop.step):
                        with metrics.waiting("data"):
                            batch = feed.next(loop.state.params, loop.index)
                        said = source.announce(loop.step)._replace(stop=int(stop.requested))
                        arrays = None if loop.index is None else loop.index.index
                        loop.state, loop.values = step_function(loop.state, batch, arrays, put_control(run.mesh, said))
                    del batch, arrays  # so that an index that is replaced goes at once
                    answers.append(loop.values.pop("consensus"))
                    loop.step += 1
                    run_due(after_step, loop)
        except Interrupted:
            stop.requested = True  # whichever process got the signal
            hooks.save_and_stop(loop)
            raise

        # --- The end

        metrics.flush()
        watchdog.heartbeat()
        measures = hooks.evaluate_end(loop)
        watchdog.heartbeat()
        hooks.save_at_once(loop)
        hooks.warn_if_below_start(loop, measures)
        release_builders(task, status)
        stop.requested = any_process(stop.requested)
        stop.check(f"saved {place.name} at step {total}")
    return loop.state.params


def release_builders(task: Task, status: StatusWriter | None) -> None:
    """Tell index builders that a task needs no further index."""
    if task.follows_builder and status is not None:
        status.update(index_done=True, step=task.settings.steps)


def host_search(task: Task) -> HostSearch | None:
    """Where hosts search ahead of a step; None if the step searches itself."""
    return HostSearch(task.context, task.run.config.scann.ahead) if task.host_search and task.run.searches else None


def evaluates_reader_at_start(task: Task) -> bool:
    """Whether what a task starts with is measured as at its end, to keep the better: it may come with a reader."""
    return task.retrieves and bool(
        task.run.config.evaluation.keep_best and broadcast_from_process_0(begins_with_reader(task.run.workdir))
    )


def step_cost(task: Task) -> StepCost:
    """The cost of a step on the devices, for the records."""
    mesh = task.run.mesh
    return StepCost(sum(task.flops().values()), mesh.size, peak(mesh.devices.flat[0].device_kind))


def make_index_source(
    task: Task, status: StatusWriter | None, start: int, checkpoints: Checkpoints, should_stop: Callable[[], bool],
    on_progress: Callable[[], None],
) -> IndexSource:  # fmt: skip
    """Where a task's index comes from. A control embeds inline, and so does what follows no builder.

    status: through which the builder hears of the trainer, None for a control. should_stop: whether to stop waiting.
    on_progress: called again and again while the corpus is embedded.
    """
    if not task.has_corpus:
        return IndexSource()
    run, name = task.run, task.name
    if run.config.refresh.mode == "inline" or not task.follows_builder or status is None:
        return InlineIndex(run, name, on_progress)
    kept = checkpoints.generations()
    return BuiltIndex(run, name, start, kept, run.config.checkpoint.keep, status, should_stop, on_progress)
