"""The train loop: one task from its first step, or from its newest checkpoint, to its last.

`train_task` is one page: restore, what serves the steps, the steps, the end. `realm_jax/tasks/` and `step.py` say what
a step computes, `realm_jax/index/provider.py` where the index comes from, and `guards.py` what watches over a run.
"""

import logging
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from realm_jax.config import flatten
from realm_jax.data.examples import batches, padded_lengths
from realm_jax.errors import UserError
from realm_jax.flops import peak
from realm_jax.forward import LoadedIndex
from realm_jax.host import Stop, free_heap
from realm_jax.index.async_provider import AsyncIndexProvider
from realm_jax.index.control import ControlSignal, put_control
from realm_jax.index.heartbeat import StatusWriter
from realm_jax.index.provider import InlineIndexProvider, Interrupted
from realm_jax.models.layers import Params
from realm_jax.processes import any_process, broadcast_from_process_0
from realm_jax.run import Run, local_rows
from realm_jax.tasks import make_task
from realm_jax.tasks.base import Task
from realm_jax.tasks.step_flops import step_flops
from realm_jax.train.best import BestParameters, keeps_best
from realm_jax.train.checkpoints import Checkpoints, SavedCheckpoint
from realm_jax.train.feed import Feed
from realm_jax.train.guards import CompileGuard, Profiler, Watchdog
from realm_jax.train.measure import Measure
from realm_jax.train.metrics import MetricLogger, StepCost
from realm_jax.train.monitors import task_monitors
from realm_jax.train.records import describe_regression, stage_summary
from realm_jax.train.restore import restore, start_vectors
from realm_jax.train.step import make_step, start_state
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
    """Train a task to its last step, resuming from its newest checkpoint.

    Exact resume: a batch follows from the seed, the task and the step. A save holds the state, the index in use (its
    vectors, or the name of its generation), the query encoder that searches, and the searches that are under way. The
    save after s steps comes before the index and the evaluation of step s, so a run that resumes from it makes both
    again; the records of evaluations are cut back to before s.

    Preemption: SIGTERM sets a flag, `stop.requested`, and nothing else. Where the flag is checked:
    before the first step    every finished task is saved; all processes raise Preempted if any got it
    before each step         of one process its own flag, of several what they announced two steps ago, so that all stop
                             at the same step: `Interrupted`, which saves what is trained and raises Preempted
    waiting for an index     the processes vote, and all raise Interrupted
    embedding the corpus     one process gives it up (Interrupted); several finish it, and stop before a later step
    after the last step      the last evaluation and save come first, so that no step is lost; then Preempted

    Args:
        run: the run, whose folder holds the task's folder.
        name: the task.
        params: all parameters that a fresh task starts from; their arrays are donated. If there is a checkpoint, their
            shapes are enough.
        measure: called with parameters, an index (None without one), and True every `evaluation.every` steps of
            fine-tuning and at the end, False at a new index. None: nothing is evaluated.
        status: the trainer's status file, if an index builder may make this task's index.

    Returns:
        All parameters after the last step; if the best ones are kept, those.

    Raises:
        Preempted: after SIGTERM, once the state is saved.
        UserError: if a loss is not finite, an index does not arrive in time, or every checkpoint is damaged.
    """
    task, folder = make_task(name, run), run.workdir / name
    config, total_steps = run.config, task.settings.steps

    # --- Restore: the newest intact checkpoint, or the start of the task ------------------------------------------
    free_heap()
    restored = SavedCheckpoint.newest_intact(folder / "checkpoints", lambda saved: restore(task, saved, params))
    state = start_state(task, task.start(params)) if restored is None else restored.state
    step = start_step = int(state.step)
    saved_step = -1 if restored is None else start_step

    with ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(folder / "checkpoints", config.checkpoint.keep))
        stop = stack.enter_context(Stop())
        stop.requested = any_process(stop.requested)
        stop.check("every finished task is saved")
        if step >= total_steps:
            release_builders(task, status)
            return state.params

        # --- What serves the steps: index, batches, records -------------------------------------------------------
        watchdog = Watchdog(config.log.hang_seconds, name)

        def should_stop() -> bool:
            """Polled while the run waits for an index; whoever polls is alive."""
            watchdog.heartbeat()
            return stop.requested

        def during_embedding() -> None:
            """Called again and again while the corpus is embedded for the index."""
            if should_stop() and jax.process_count() == 1 and step < total_steps:
                raise Interrupted

        def during_embedding_of_examples() -> None:
            if jax.process_count() == 1:
                stop.check(f"{name} is saved at step {start_step}" if start_step else "every finished task is saved")

        index_provider = make_index_provider(task, status, start_step, checkpoints, should_stop, during_embedding)
        examples = task.examples(
            state.params, partial(start_vectors, run, name, state.params, during_embedding_of_examples)
        )
        rows = local_rows(run.mesh, task.settings.batch_size)  # of each global batch, int64 [local batch]
        stream = batches(examples, config.seed, task.stream, task.settings.batch_size, start_step, total_steps, rows)
        trackers = open_trackers(config.log.to, TaskRun(folder, start_step, flatten(config.to_dict())))
        cost = StepCost(sum(step_flops(task).values()), run.mesh.size, peak(run.mesh.devices.flat[0].device_kind))
        metrics = MetricLogger(
            folder, name, start_step, total_steps, cost, {} if restored is None else restored.record,
            lambda: checkpoints.latest, task_monitors(name), trackers,
        )  # fmt: skip
        feed = Feed(task, stream, rows, None if restored is None else restored.in_flight)
        profiler = Profiler(folder / "profile")
        best = BestParameters(task, folder, measure is not None and keeps_best(name, config))
        # A run that starts from a reader measures it as it will measure the end, to hand on the better of the two.
        measures_reader_at_start = measure is not None and starts_with_reader(task)
        evaluate_every = config.evaluation.every if name == "qa" else 0
        for part in (watchdog, metrics, index_provider, feed, profiler):
            stack.enter_context(part)

        index: LoadedIndex | None = None  # the one in use
        values: dict[str, jax.Array] = {}  # metrics of the last step, on the devices
        control = ControlSignal()  # what all processes announced two steps ago

        def save() -> None:
            """Save in the background; raises UserError, and saves nothing, if a loss is not finite."""
            nonlocal saved_step
            if values:
                metrics.fetch(step, values)
            metrics.flush()
            with metrics.waiting("checkpoint"):
                generation = "" if index is None else index.generation
                record = {"index_step": -1 if index is None else index.step, "generation": generation}
                record |= {"seconds": metrics.seconds, "first_started": metrics.first_started}
                arrays: dict[str, Any] = {}
                if index is not None and not generation and index.vectors is not None:
                    arrays["vectors"] = index.vectors  # [passages, width]; a generation is named instead
                    if index.index.query_encoder is not None:
                        arrays["tower"] = index.index.query_encoder
                if (in_flight := feed.in_flight()) is not None:
                    arrays["in_flight"] = in_flight  # int32 [batches, batch, depth]
                index_provider.on_checkpoint(step, generation)
                checkpoints.save(step, state, arrays, record)
            saved_step = step

        def save_at_once() -> None:
            """Save if this step is not saved yet, and wait until it is on disk."""
            if saved_step != step:
                save()
            checkpoints.wait()

        def adopt_fresh_index() -> None:
            """Use a fresh index from here on, if there is one, and evaluate the parameters with it."""
            nonlocal index
            try:
                with metrics.waiting("index"):
                    fresh = index_provider.maybe_refresh(step, state.params, index, control)
            except UserError:  # none arrived in time: the run ends, and loses no step
                save_at_once()
                stop.check(f"saved {name} at step {step}")
                raise
            watchdog.heartbeat()
            if fresh is None:
                return
            index = fresh
            measures: dict[str, Any] = {}
            if measure is not None:
                with metrics.waiting("measurement"):
                    final = measures_reader_at_start and step == 0
                    measures = measure(state.params, index_provider.as_exact(fresh), final)
                watchdog.heartbeat()
            best.update(step, state, measures)
            metrics.log_evaluation(step, measures | {"refresh": True, "index_step": fresh.step} | fresh.facts)

        def measure_at_end(params_step: int) -> dict[str, Any]:
            """Measure the parameters, those of `params_step`, with an index that they give and that stays in use."""
            nonlocal index
            assert measure is not None
            index = index_provider.final_index(params_step, state.params, index)
            index = None if index is None else replace(index, step=total_steps)
            found = measure(state.params, None if index is None else index_provider.as_exact(index), True)
            watchdog.heartbeat()
            return found

        try:
            if restored is not None and task.retrieves:
                index = index_provider.resume(start_step, restored.record, restored.vectors, restored.tower)
            del restored  # so that its vectors go once the index is replaced
            starts_pretrained = step == 0 and config.init_from and name in ("ict", "evidence_contrast")
            if measure is not None and starts_pretrained and not task.retrieves:
                adopt_fresh_index()
                index = None  # it was measured with one; its steps use none

            # --- The steps ----------------------------------------------------------------------------------------
            step_function = make_step(task)
            compiles = CompileGuard(step_function, padded_lengths(examples))
            reduced_controls: deque[jax.Array] = deque(maxlen=2)  # of the last two steps, int32 [3] each
            while step < total_steps:
                watchdog.heartbeat()
                with metrics.step():
                    # This waits for the step before the last: the devices are behind, and a step would take no time.
                    if len(reduced_controls) == 2:
                        control = ControlSignal(*np.asarray(reduced_controls[0]).tolist())
                    must_stop = bool(control.stop) if jax.process_count() > 1 else stop.requested
                    if must_stop:
                        raise Interrupted
                    profiler.at(step, values)

                    if task.retrieves:
                        adopt_fresh_index()
                    if measure is not None and evaluate_every and step and step % evaluate_every == 0:
                        with metrics.waiting("measurement"):
                            measures = measure(
                                state.params, index_provider.index_for_eval(step, state.params, index), True
                            )
                            watchdog.heartbeat()
                            best.update(step, state, measures)
                        metrics.log_evaluation(step, measures)

                    with jax.profiler.StepTraceAnnotation(name, step_num=step):
                        with metrics.waiting("data"):
                            batch = feed.next(state.params, index)
                        local_control = index_provider.control_signal(step)._replace(stop=int(stop.requested))
                        arrays = None if index is None else index.index
                        state, values = step_function(state, batch, arrays, put_control(run.mesh, local_control))
                    del batch, arrays  # so that an index that is replaced goes at once
                    reduced_controls.append(values.pop("consensus"))
                    step += 1

                    compiles.check(step - 1)
                    metrics.flush()  # of the step before: the devices are at work on this one
                    if step % config.log.every == 0 or step == total_steps:
                        metrics.log_step(step, values, {} if index is None else {"index_age": step - 1 - index.step})
                    if step % config.checkpoint.every == 0 and step < total_steps:
                        save()
        except Interrupted:
            stop.requested = True  # whichever process got the signal
            save_at_once()
            stop.check(f"saved {name} at step {step}")
            raise

        # --- The end: the last evaluation, the best parameters, the last save -------------------------------------
        metrics.flush()
        watchdog.heartbeat()
        measures = {}
        if measure is not None:
            measures = measure_at_end(total_steps)
            best.update(total_steps, state, measures)
            if (better := best.parameters_other_than(total_steps)) is not None:
                best_step, trained = better
                state = state._replace(trained=trained)
                measures = measure_at_end(best_step) | {"best_step": best_step, "last": measures}
            metrics.log_evaluation(total_steps, measures | {"refresh": False, "seconds": metrics.seconds})
        watchdog.heartbeat()
        save_at_once()
        if warning := describe_regression(name, stage_summary(folder), best.selection_metric(measures)):
            logger.warning("%s", warning)
        release_builders(task, status)
        stop.requested = any_process(stop.requested)
        stop.check(f"saved {name} at step {total_steps}")
    return state.params


def make_index_provider(
    task: Task, status: StatusWriter | None, start_step: int, checkpoints: Checkpoints,
    should_stop: Callable[[], bool], on_progress: Callable[[], None],
) -> InlineIndexProvider:  # fmt: skip
    """Choose where a task's index comes from: a builder's generations, or the trainer's own devices.

    Args:
        task: the task.
        status: through which the builder hears of the trainer; None: there is no builder.
        start_step: the step that training starts or resumes from.
        checkpoints: the task's, whose generations a restart may need.
        should_stop: polled while an index is waited for.
        on_progress: called again and again while the corpus is embedded.
    """
    config = task.run.config
    if task.name != "realm" or status is None or config.refresh.mode == "inline":
        return InlineIndexProvider(task, on_progress, start_vectors)
    return AsyncIndexProvider(
        task, start_step, checkpoints.generations(), config.checkpoint.keep, status, should_stop, on_progress
    )


def starts_with_reader(task: Task) -> bool:
    """True if the run began with a trained reader, which a task that retrieves may make worse."""
    return task.retrieves and bool(
        task.run.config.evaluation.keep_best and broadcast_from_process_0(begins_with_reader(task.run.workdir))
    )


def release_builders(task: Task, status: StatusWriter | None) -> None:
    """Tell index builders that a task needs no further index."""
    if task.name == "realm" and status is not None:
        status.update(index_done=True, step=task.settings.steps)
