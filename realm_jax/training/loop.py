"""The train loop: one task from its first step, or from its newest checkpoint, to its last.

Read `train_loop` top to bottom, then `hooks.py`, what happens every so many steps. `train_task` says what the loop has
to know of a task (`Course`). What a step computes is the task's (`realm_jax/tasks/`); where its arrays live is
`state.py`; what watches over a run is `guards.py`.
"""

import dataclasses
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import jax
import numpy as np

from realm_jax.data.examples import Examples
from realm_jax.data.pipeline import batches, padded_lengths
from realm_jax.flops import peak
from realm_jax.host import Stop, free_heap
from realm_jax.index.status import StatusWriter
from realm_jax.models.realm import Params
from realm_jax.processes import any_process, broadcast_from_process_0
from realm_jax.run import BaseRun, own_rows
from realm_jax.tasks import make_task
from realm_jax.tasks.base import Measure, Task
from realm_jax.training import hooks
from realm_jax.training.adoption import BuiltIndex
from realm_jax.training.best import Best
from realm_jax.training.checkpoints import Checkpoints, Saved
from realm_jax.training.embedding import start_vectors
from realm_jax.training.feed import Feed, Search
from realm_jax.training.guards import CompileGuard, Profiler, Watchdog
from realm_jax.training.hooks import Hook, Loop, run_due
from realm_jax.training.metrics import MetricLogger, Work
from realm_jax.training.refresh import IndexSource, InlineIndex, Interrupted
from realm_jax.training.restore import restore
from realm_jax.training.state import Control, make_step, put_control, start_state
from realm_jax.training.workdir import begins_with_reader

MakeRefresh = Callable[[int, Checkpoints, Callable[[], bool], Callable[[], None]], IndexSource]


@dataclasses.dataclass(frozen=True)
class Course:
    """What the loop has to know of a task.

    examples: called when something is left to train, with the parameters that it goes on from. work: what a step is to
    the devices. refresh: where the index comes from, by (first step, checkpoints, whether to stop waiting, what to call
    again and again while the corpus is embedded). search: where hosts search ahead of a step. measure: called with
    parameters and an index (None without one) at every refresh and, its last argument true, every so many steps
    (`every`; 0: never) and at the end. keep_best: whether the task ends with the parameters that measured best
    (`best.py`).
    measure_start: whether a task that does not retrieve is measured before its first step too; answers_start: whether
    one that does is measured then as at its end.
    """

    task: Task
    examples: Callable[[Params], Examples]
    work: Work
    refresh: MakeRefresh
    search: Search | None = None
    measure: Measure | None = None
    every: int = 0
    keep_best: bool = False
    measure_start: bool = False
    answers_start: bool = False


def train_task(
    run: BaseRun,
    name: str,
    params: Params,
    measure: Measure | None = None,
    folder: str | None = None,
    status: StatusWriter | None = None,
) -> Params:
    """Train one task of a run to its last step and return all parameters.

    params: where a fresh task starts; it donates them. measure: see `Course`; there is no index in a task that neither
    retrieves nor trains the retriever. folder: name under the run folder, the task's own by default. status: for a task
    whose index a builder makes. Continues from the newest checkpoint of the folder. Raises Preempted after SIGTERM,
    once the state is saved.
    """
    task, own = make_task(name, run), folder is None
    course = Course(
        task,
        lambda params: task.examples(params, partial(start_vectors, task.run, name, params)),
        work_of(task),
        partial(make_refresh, task, status if own else None),
        Search(task.setting, run.config.retrieval.ahead) if task.host_search and task.run.searches else None,
    )
    if measure is not None:
        course = dataclasses.replace(
            course,
            measure=measure,
            every=task.evaluate_every,
            keep_best=task.keeps_best and own,
            measure_start=task.evaluates_start and own,
            answers_start=starts_with_answers(task),
        )
    params = train_loop(run, course, params, run.workdir / (folder or name))
    if task.follows_builder and status is not None and own:
        status.update(index_done=True, step=run.config[name].steps)
    return params


def starts_with_answers(task: Task) -> bool:
    """Whether what a task starts with is measured as at its end, to keep the better: it may come with a reader."""
    return task.retrieves and bool(
        task.run.config.evaluation.keep_best and broadcast_from_process_0(begins_with_reader(task.run.workdir))
    )


def train_loop(run: BaseRun, course: Course, params: Params, folder: Path) -> Params:
    """Train a task to its last step, or on from the newest checkpoint in `folder`; returns all parameters.

    `params`, where a fresh task starts, are donated. Raises Preempted after SIGTERM, once the state is saved.

    The order of a step: adopt an index, evaluate, batch, step, log, save.

    Exact resume: a batch follows from the seed, the task and the step. A save holds the state, the index in use (its
    vectors, or the name of its generation), the query tower that searches, and searches under way. The save after s
    steps comes before the index and the evaluation of step s, so a run that resumes from it makes both again; the
    records of evaluations are cut back to before s.

    Preemption: SIGTERM sets a flag, `stop.asked`, and nothing else. Where the flag counts:
    before the first step    every finished task is saved; all processes raise Preempted if any was told
    before each step         of one process its own flag, of several what they announced two steps ago, so that all stop
                             at the same step: `Interrupted`, which saves what is trained and raises Preempted
    waiting for an index     the processes vote, and all raise Interrupted
    embedding the corpus     one process gives it up (Interrupted); several finish it, and stop before a later step
    after the last step      the last evaluation and save come first, so that no step is lost; then Preempted
    """
    config, task = run.config, course.task
    total, size = config[task.name].steps, config[task.name].batch_size

    # --- Restore: the newest checkpoint that is intact, else the start

    free_heap()
    saved = Saved.newest_sound(folder / "checkpoints", lambda saved: restore(run, task, saved, params))
    state = start_state(run, task, params) if saved is None else saved.state
    start = int(state.step)
    with ExitStack() as stack:
        keep = config.checkpoint
        checkpoints = stack.enter_context(Checkpoints(folder / "checkpoints", keep.keep, keep.keep_every))
        stop = stack.enter_context(Stop())
        stop.asked = any_process(stop.asked)
        stop.check("every finished task is saved")
        if start >= total:
            return state.params

        # --- What serves the steps

        def should_stop() -> bool:
            """Whether to stop waiting for an index; a process that asks is alive."""
            watchdog.heartbeat()
            return stop.asked

        def embedding() -> None:
            """Called again and again while the corpus is embedded."""
            if should_stop() and jax.process_count() == 1 and loop.step < total:
                raise Interrupted

        step_function = make_step(run, task)
        record = {} if saved is None else saved.record
        metrics = MetricLogger(
            folder, task.name, start, total, course.work, record, lambda: checkpoints.latest, task.monitor()
        )
        watchdog = Watchdog(config.log.hang_seconds, folder.name)
        source = course.refresh(start, checkpoints, should_stop, embedding)
        rows = own_rows(run.mesh, size)
        examples = course.examples(state.params)
        stream = batches(examples, config.seed, task.stream, size, start, total, rows)
        feed = Feed(run.mesh, stream, rows, size, course.search, None if saved is None else saved.in_flight)
        profiler = Profiler(folder / "profile", config.log.profile_step)
        compiles = CompileGuard(step_function, padded_lengths(examples))
        best = Best(run, task, folder, course.keep_best)
        loop = Loop(
            run=run, task=task, folder=folder, total=total, stop=stop, watchdog=watchdog, metrics=metrics,
            checkpoints=checkpoints, best=best, source=source, feed=feed, measure=course.measure,
            answers_start=course.answers_start, state=state, step=start, saved=-1 if saved is None else start,
        )  # fmt: skip
        before_step = (
            Hook(lambda loop: profiler.at(loop.step, loop.values)),
            Hook(hooks.adopt, every=int(task.retrieves)),
            Hook(hooks.evaluate, every=course.every, at_ends=False),
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
            if course.measure_start and start == 0 and not task.retrieves:
                hooks.adopt(loop)
                loop.index = None  # it was evaluated with one; its steps use none
            while loop.step < total:
                watchdog.heartbeat()
                loop.heard = Control(*np.asarray(answers[0]).tolist()) if len(answers) == 2 else Control()
                stop_here = loop.heard.stop if jax.process_count() > 1 else stop.asked
                if stop_here:
                    raise Interrupted
                with metrics.step():
                    run_due(before_step, loop)
                    with jax.profiler.StepTraceAnnotation(task.name, step_num=loop.step):
                        with metrics.waiting("data"):
                            batch = feed.next(loop.state.params, loop.index)
                        said = source.announce(loop.step)._replace(stop=int(stop.asked))
                        arrays = None if loop.index is None else loop.index.index
                        loop.state, loop.values = step_function(loop.state, batch, arrays, put_control(run.mesh, said))
                    del batch, arrays  # so that an index that is replaced goes at once
                    answers.append(loop.values.pop("heard"))
                    loop.step += 1
                    run_due(after_step, loop)
        except Interrupted:
            stop.asked = True  # whichever process was told to
            hooks.save_and_stop(loop)
            raise

        # --- The end

        metrics.flush()
        watchdog.heartbeat()
        measures = hooks.evaluate_end(loop)
        watchdog.heartbeat()
        hooks.save_at_once(loop)
        hooks.warn_if_below_start(loop, measures)
        stop.asked = any_process(stop.asked)
        stop.check(f"saved {folder.name} at step {total}")
    return loop.state.params


def work_of(task: Task) -> Work:
    """What a step of a task is to the devices, for the records."""
    mesh = task.run.mesh
    return Work(sum(task.flops().values()), mesh.size, peak(mesh.devices.flat[0].device_kind))


def make_refresh(
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
