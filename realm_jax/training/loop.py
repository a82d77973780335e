"""The train loop: one task from its first step, or from its newest checkpoint, to its last.

Read `train_loop` top to bottom, then `hooks.py`, what happens every so many steps. `train_task` says what the loop has
to know of a task of REALM (`Course`); a tagger takes the same loop: `tagging.py`. What a step computes is `tasks.py`;
where its arrays live is `state.py`; what watches over a run is `guards.py`.
"""

import dataclasses
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from realm_jax.config import task_names
from realm_jax.data import examples as make
from realm_jax.data.closed_book import closed_book_examples
from realm_jax.data.examples import Examples
from realm_jax.data.held_out import held_out_share, trained_rows
from realm_jax.data.pipeline import batches, padded_lengths
from realm_jax.host import Stop, free_heap
from realm_jax.index.candidates import Index
from realm_jax.models.realm import Params
from realm_jax.processes import any_process, broadcast_from_process_0
from realm_jax.run import BaseRun, Run, own_rows
from realm_jax.training import hooks
from realm_jax.training.adoption import BuiltIndex
from realm_jax.training.best import Best, keeps_best
from realm_jax.training.checkpoints import Checkpoints, Saved
from realm_jax.training.feed import Feed, Search
from realm_jax.training.flops import peak, step_flops
from realm_jax.training.guards import CompileGuard, Profiler, Watchdog
from realm_jax.training.hooks import Hook, Loop, run_due
from realm_jax.training.metrics import MetricLogger, Work
from realm_jax.training.refresh import IndexSource, InlineIndex, Interrupted, shared_folder
from realm_jax.training.reporter import Reporter
from realm_jax.training.restore import restore
from realm_jax.training.state import Control, make_step, put_control, start_state
from realm_jax.training.tasks import Task, make_task
from realm_jax.training.workdir import begins_with_reader

Measure = Callable[[Params, Index | None, bool], dict[str, Any]]
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
    one that does is measured then as at its end. over: called when the task turns out to be done.
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
    over: Callable[[], None] = lambda: None


def task_examples(run: Run, name: str, params: Params | None = None) -> Examples:
    """The examples that a task trains on, whatever the parameters."""
    sources, config, lengths = run.sources, run.config, run.lengths
    wordpiece, data = sources.wordpiece, config.data
    share = held_out_share(config, sources.questions)
    passages, pretraining = trained_rows(sources.passages, share), trained_rows(sources.pretraining, share)
    if name == "mlm":
        stores, kept = (sources.passages, sources.pretraining), (passages, pretraining)
        return make.warmup_examples(*stores, wordpiece, lengths, data.null_rate, data.unrelated_rate, kept)
    if name == "ict":
        return make.cloze_examples(sources.passages, wordpiece, lengths, data.ict_mask_rate, passages)
    if name == "realm":
        text, find = sources.pretraining, run.find_sentence
        return make.masked_examples(text, wordpiece, lengths, data.masking, sources.own_text, find, pretraining)
    if name == "closed_book":
        return closed_book_examples(sources.pretraining, sources.answered("train"), wordpiece, lengths)
    return make.question_examples(sources.answered("train"), wordpiece, lengths)


def train_task(
    run: Run,
    name: str,
    params: Params,
    measure: Measure | None = None,
    folder: str | None = None,
    examples: Callable[[Params], Examples] | None = None,
) -> Params:
    """Train one task of REALM to its last step and return all parameters.

    params: where a fresh task starts; it donates them. measure: see `Course`; there is no index in a task that neither
    retrieves nor trains the retriever. folder: name under the run folder, the task's own by default. examples: makes
    others than the task's own. Continues from the newest checkpoint of the folder. Raises Preempted after SIGTERM, once
    the state is saved.
    """
    task = make_task(name, run.setting)

    def over() -> None:
        if name == "realm" and folder is None and run.config.refresh.mode == "async":
            # the run may have been cut off before this word
            Reporter(run, shared_folder(run), name).finish(run.config[name].steps)

    hosts_search = run.searches is not None and name == "realm"  # fine-tuning searches exactly
    search = Search(run.setting, run.config.retrieval.ahead) if hosts_search else None
    refresh = partial(make_refresh, run, name, folder is None)
    course = Course(
        task, examples or partial(task_examples, run, name), work_of(run, task), refresh, search, measure, over=over
    )
    if measure is not None:
        every = run.config.evaluation.qa_every if name == "qa" else 0
        course = dataclasses.replace(
            course,
            every=every,
            keep_best=keeps_best(run.config, name) and folder is None,
            measure_start=name == "ict" and bool(run.config.init_from) and folder is None,
            answers_start=run.config.evaluation.keep_best
            and bool(broadcast_from_process_0(begins_with_reader(run.workdir))),
        )
    return train_loop(run, course, params, run.workdir / (folder or name))


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
            course.over()
            return state.params

        # --- What serves the steps

        def should_stop() -> bool:
            """Whether to stop waiting for an index; a process that asks is on_progress."""
            watchdog.heartbeat()
            return stop.asked

        def embedding() -> None:
            """Called again and again while the corpus is embedded."""
            if should_stop() and jax.process_count() == 1 and loop.step < total:
                raise Interrupted

        step_function = make_step(run, task)
        record = {} if saved is None else saved.record
        metrics = MetricLogger(folder, task.name, start, total, course.work, record, lambda: checkpoints.latest)
        watchdog = Watchdog(config.log.hang_seconds, folder.name)
        source = course.refresh(start, checkpoints, should_stop, embedding)
        rows = own_rows(run.mesh, size)
        examples = course.examples(state.params)
        stream = batches(examples, config.seed, task.name, size, start, total, rows)
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
        source.done(total)
        stop.asked = any_process(stop.asked)
        stop.check(f"saved {folder.name} at step {total}")
    return loop.state.params


def work_of(run: Run, task: Task) -> Work:
    """What a step of a task is to the devices, for the records."""
    parts = step_flops(run.config, task.name, run.model.bert.vocabulary_size, run.lengths.predictions, run.setting.rows)
    return Work(sum(parts.values()), run.mesh.size, peak(run.mesh.devices.flat[0].device_kind))


def make_refresh(
    run: Run, name: str, own_folder: bool, start: int, checkpoints: Checkpoints, should_stop: Callable[[], bool],
    on_progress: Callable[[], None],
) -> IndexSource:  # fmt: skip
    """Where a task's index comes from. Only REALM itself has a builder: a control and fine-tuning embed inline.

    should_stop: whether to stop waiting; on_progress: called again and again while the corpus is embedded.
    """
    if run.config.refresh.mode == "inline" or not own_folder:
        return InlineIndex(run, name, on_progress)
    if name == "realm":
        kept = checkpoints.generations()
        return BuiltIndex(run, name, start, kept, run.config.checkpoint.keep, should_stop, on_progress)
    later = "realm" in task_names(run.config)[task_names(run.config).index(name) :]
    return InlineIndex(run, name, on_progress, Reporter(run, shared_folder(run), name) if later else None)
