"""The train loop: one task from its first step, or from its newest checkpoint, to its last.

`train_task` is one page: restore, prepare, the steps, the end. For the computation of a step see `realm_jax/tasks/` and
`step.py`; for the source of the index `realm_jax/indexing/provider.py`; for the watchdog and the profiler `guards.py`.
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
from realm_jax.indexing.async_provider import AsyncIndexProvider
from realm_jax.indexing.control import ControlSignal, SaveState, put_control
from realm_jax.indexing.heartbeat import StatusWriter
from realm_jax.indexing.provider import InlineIndexProvider, Interrupted
from realm_jax.mirror import upload_changes
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
from realm_jax.train.records import averaged_steps, describe_regression, stage_summary
from realm_jax.train.restore import restore, start_vectors
from realm_jax.train.step import make_step, start_state
from realm_jax.train.trackers import TaskRun, open_trackers
from realm_jax.train.workdir import begins_with_reader

logger = logging.getLogger(__name__)

CONTROL_DELAY = 3  # steps from a change on one process to the step in which all processes can act on it


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
    again; the records of evaluations are truncated to before s.

    Preemption: SIGTERM sets a flag, `stop.requested`, and nothing else. The loop checks the flag:
    before the first step    every finished task is saved; all processes raise Preempted if any of them got the signal
    before each step         one process reads its flag; several read the flags that they announced two steps ago, so
                             that all stop at the same step: `Interrupted`, which saves the state and raises Preempted
    waiting for an index     the processes vote, and all raise Interrupted
    embedding the corpus     one process stops it (Interrupted); several finish it, and stop before a later step
    after the last step      the last evaluation and save come first, so that no step is lost; then Preempted

    A failed save does not end training: all processes learn of it two steps later and save the step that they have
    reached. If that fails too, they try again after twice as many steps each time.

    Args:
        run: its directory holds the task's folder.
        name: the task.
        params: all parameters that a fresh task starts from; their arrays are donated. With a checkpoint, abstract
            arrays are enough.
        measure: (parameters, index or None, final) → measures; `final` is false at a new index, and true at the end and
            every `evaluation.every` steps of fine-tuning. None to evaluate nothing.
        status: the trainer's status file, if an index builder may make this task's index.

    Returns:
        All parameters after the last step, or the best ones if the task keeps them.

    Raises:
        Preempted: after SIGTERM, once the state is saved.
        UserError: if a loss is not finite, every checkpoint is damaged, or another trainer started in this directory.
        TransientFault: if an index does not arrive in time, or the last step cannot be saved.
    """
    task, folder = make_task(name, run), run.workdir / name
    config, total_steps = run.config, task.settings.steps

    # --- Restore: the newest intact checkpoint, or the start of the task ------------------------------------------
    free_heap()
    restored = SavedCheckpoint.newest_intact(folder / "checkpoints", lambda saved: restore(task, saved, params))
    state = start_state(task, task.start(params)) if restored is None else restored.state
    step = start_step = int(state.step)

    with ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(folder / "checkpoints", config.checkpoint.keep))
        stop = stack.enter_context(Stop())
        stop.requested = any_process(stop.requested)
        stop.check("every finished task is saved")
        if step >= total_steps:
            release_builders(task, status)
            return state.params

        # --- Prepare: index, batches, records ---------------------------------------------------------------------
        watchdog = Watchdog(config.log.hang_seconds, config.log.compile_seconds, name)

        def should_stop() -> bool:
            """Return the stop flag to whoever waits for an index, and count the call as progress."""
            watchdog.heartbeat()
            if status is not None:
                status.check_fence()
            return stop.requested

        def during_embedding() -> None:
            """Raise Interrupted between batches of the corpus, if this is the only process."""
            if should_stop() and jax.process_count() == 1 and step < total_steps:
                raise Interrupted

        def during_embedding_of_examples() -> None:
            """Raise Preempted between batches of the corpus: nothing of this start is worth a save."""
            if jax.process_count() == 1:
                stop.check(f"{name} is saved at step {start_step}" if start_step else "every finished task is saved")

        index_provider = make_index_provider(task, status, start_step, checkpoints, should_stop, during_embedding)
        examples = task.examples(
            state.params, partial(start_vectors, run, name, state.params, during_embedding_of_examples)
        )
        rows = local_rows(run.mesh, task.settings.batch_size)  # [local batch] int64, in each global batch
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
        # A task that retrieves may make a trained reader worse. So a run that starts from one measures it as it will
        # measure the end, and keeps the better of the two.
        compares_readers = measure is not None and task.retrieves and config.evaluation.keep_best
        starts_with_reader = compares_readers and bool(broadcast_from_process_0(begins_with_reader(run.workdir)))
        evaluate_every = config.evaluation.every if name == "qa" else 0
        for manager in (watchdog, metrics, index_provider, feed, profiler):
            stack.enter_context(manager)

        index: LoadedIndex | None = None  # in use
        values: dict[str, jax.Array] = {}  # metrics of the last step, scalars on the devices
        control = ControlSignal()  # reduced over all processes, two steps old

        def save(waits_for_exports: bool = True) -> None:
            """Save in the background. Raises UserError and saves nothing if a loss is not finite."""
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
                    arrays["in_flight"] = in_flight  # [batches, batch, depth] int32
                upload_changes(run.workdir)  # so that no record is missing that comes before the checkpoint
                last_failed = checkpoints.finish() == SaveState.FAILED
                index_provider.on_checkpoint(
                    step, generation, waits_for_exports=waits_for_exports, last_failed=last_failed
                )
                checkpoints.save(step, state, arrays, record)

        def save_at_once() -> None:
            """Save this step unless that was done, and wait until it is on disk. Raises StorageError if it fails.

            If a restart from this step would lack an export, and one from the newest checkpoint writes it again, we
            keep to that checkpoint: the run repeats some steps, and ends with the same bits.
            """
            has_failed = any_process(checkpoints.state == SaveState.FAILED)
            may_restart = step < total_steps and task.retrieves
            unwritten = index_provider.unwritten_export() if may_restart else -1
            if not has_failed and checkpoints.latest is not None and checkpoints.latest <= unwritten:
                logger.warning(
                    "step %d is not saved, because the export of step %d is not written; a restart begins at step %d",
                    step, unwritten, checkpoints.latest,
                )  # fmt: skip
            elif any_process(has_failed or checkpoints.latest != step):
                save(waits_for_exports=not may_restart)  # `unwritten_export` has waited
            checkpoints.wait()

        def adopt_fresh_index() -> None:
            """Switch to a fresh index, if there is one, and evaluate the parameters with it."""
            nonlocal index
            try:
                with metrics.waiting("index"):
                    fresh = index_provider.maybe_refresh(step, state.params, index, control)
            except UserError:  # no index arrived in time: the run ends, and loses no step
                save_at_once()
                stop.check(f"saved {name} at step {checkpoints.latest}")
                raise
            watchdog.heartbeat()
            if fresh is None:
                return
            index = fresh
            measures: dict[str, Any] = {}
            if measure is not None:
                with metrics.waiting("measurement"):
                    final = starts_with_reader and step == 0
                    measures = measure(state.params, index_provider.as_exact(fresh), final)
                watchdog.heartbeat()
            best.update(step, state, measures)
            metrics.log_evaluation(step, measures | {"refresh": True, "index_step": fresh.step} | fresh.facts)

        def measure_at_end(params_step: int) -> dict[str, Any]:
            """Measure the parameters of `params_step` with their own index, which then stays in use."""
            nonlocal index
            assert measure is not None
            index = index_provider.final_index(params_step, state.params, index)
            index = None if index is None else replace(index, step=total_steps)
            measures = measure(state.params, None if index is None else index_provider.as_exact(index), True)
            watchdog.heartbeat()
            return measures

        try:
            if restored is not None and task.retrieves:
                index = index_provider.resume(start_step, restored.record, restored.vectors, restored.query_encoder)
            del restored  # so that its vectors are freed once the index is replaced
            starts_pretrained = step == 0 and config.init_from and name in ("ict", "evidence_contrast")
            if measure is not None and starts_pretrained and not task.retrieves:
                adopt_fresh_index()
                index = None  # only the measurement needs it; the steps of this task use none

            # --- The steps ----------------------------------------------------------------------------------------
            step_function = make_step(task)
            compiles = CompileGuard(step_function, padded_lengths(examples))
            reduced_controls: deque[jax.Array] = deque(maxlen=2)  # of the last two steps, each [4] int32
            retry_step = 0  # before which a failed save is not repeated
            retry_pause = CONTROL_DELAY  # steps between two tries
            while step < total_steps:
                watchdog.heartbeat()
                if status is not None:
                    status.check_fence()
                with metrics.step():
                    # Reading it waits for the step before the last. So the host is at most two steps ahead of the
                    # devices, and the time of a step is the time that the devices take.
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
                        local_control = index_provider.control_signal(step)._replace(
                            stop=int(stop.requested), save=checkpoints.state
                        )
                        arrays = None if index is None else index.index
                        state, values = step_function(state, batch, arrays, put_control(run.mesh, local_control))
                    del batch, arrays  # so that a replaced index is freed at once
                    reduced_controls.append(values.pop("consensus"))
                    step += 1

                    watchdog.is_warm = step - start_step > CONTROL_DELAY  # a step of this program is done everywhere
                    compiles.check(step - 1)
                    metrics.flush()  # of the step before, while the devices work on this one
                    if step % config.log.every == 0 or step in averaged_steps(total_steps):
                        metrics.log_step(step, values, {} if index is None else {"index_age": step - 1 - index.step})
                    if control.save == SaveState.COMPLETE:
                        retry_pause = CONTROL_DELAY
                    is_retry = control.save == SaveState.FAILED and step >= retry_step
                    if (is_retry or step % config.checkpoint.every == 0) and step < total_steps:
                        save()
                        # Before `retry_step`, `control` still has the state of the save before this one.
                        retry_step, retry_pause = step + retry_pause, 2 * retry_pause if is_retry else retry_pause
        except Interrupted:
            stop.requested = True  # in every process, whichever got the signal
            save_at_once()
            stop.check(f"saved {name} at step {checkpoints.latest}")
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
    """Return the provider of a task's index: from a builder's generations, or embedded on the trainer's devices.

    Args:
        task: only REALM uses a builder.
        status: the trainer's status file, which the builder reads; None if there is no builder.
        start_step: the step that training starts or resumes from.
        checkpoints: checkpoints of the task; a restart may need their generations.
        should_stop: polled while the trainer waits for an index.
        on_progress: called between batches while the corpus is embedded.
    """
    config = task.run.config
    if task.name != "realm" or status is None or config.refresh.mode == "inline":
        return InlineIndexProvider(task, on_progress, start_vectors)
    return AsyncIndexProvider(
        task, start_step, checkpoints.generations(), config.checkpoint.keep, status, should_stop, on_progress
    )


def release_builders(task: Task, status: StatusWriter | None) -> None:
    """Tell index builders that a task needs no further index.

    Args:
        task: only REALM has builders.
        status: the trainer's status file; None if there is no builder.
    """
    if task.name == "realm" and status is not None:
        status.update(index_done=True, step=task.settings.steps)
