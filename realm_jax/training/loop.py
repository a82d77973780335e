"""The train loop: one task from its first step, or from its newest checkpoint, to its last.

Read `train_task`, which says what the loop needs to know of a task of REALM (`Course`), then `follow` and `_Training`
top to bottom. What a step computes is `tasks.py`; where its arrays live is `state.py`; what watches over a run is
`guards.py`. A tagger takes the same loop: `tagging.py`.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from realm_jax.data import examples as make
from realm_jax.data.closed_book import closed_book_examples
from realm_jax.data.examples import Examples
from realm_jax.data.held_out import held_out_share, trained_rows
from realm_jax.data.pipeline import batches, padded_lengths
from realm_jax.errors import UserError
from realm_jax.index.candidates import Index
from realm_jax.index.status import StatusWriter
from realm_jax.memory import free_heap
from realm_jax.models.realm import Params
from realm_jax.processes import any_process, broadcast_from_process_0
from realm_jax.run import BaseRun, Run, own_rows
from realm_jax.training.adoption import BuiltIndex
from realm_jax.training.best import Best, describe_loss, keeps_best, stage_of
from realm_jax.training.checkpoints import Checkpoints, Saved
from realm_jax.training.feed import Feed, Search
from realm_jax.training.flops import peak, step_flops
from realm_jax.training.guards import CompileGuard, Profiler, Watchdog, check_replicas
from realm_jax.training.journal import Journal, Work
from realm_jax.training.preemption import Stop
from realm_jax.training.refresh import IndexSource, InlineIndex, Interrupted, LoadedIndex
from realm_jax.training.restore import Restored, restore
from realm_jax.training.state import Control, State, make_step, put_control, start_state
from realm_jax.training.tasks import Task, make_task
from realm_jax.training.workdir import begins_with_reader

logger = logging.getLogger(__name__)

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
    status: StatusWriter | None = None,
) -> Params:
    """Train one task of REALM to its last step and return all parameters.

    params: where a fresh task starts; it donates them. measure: see `Course`; there is no index in a task that neither
    retrieves nor trains the retriever. folder: name under the run folder, the task's own by default. examples: makes
    others than the task's own. status: for a task whose index a builder makes. Continues from the newest checkpoint of
    the folder. Raises Preempted after SIGTERM, once the state is saved.
    """
    task = make_task(name, run.setting)
    hosts_search = run.searches is not None and name == "realm"  # fine-tuning searches exactly
    search = Search(run.setting, run.config.retrieval.ahead) if hosts_search else None
    refresh = partial(make_refresh, run, name, status if folder is None else None)
    course = Course(task, examples or partial(task_examples, run, name), work_of(run, task), refresh, search, measure)
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
    params = follow(run, course, params, run.workdir / (folder or name))
    if name == "realm" and status is not None and folder is None:
        status.update(index_done=True, step=run.config.realm.steps)
    return params


def follow(run: BaseRun, course: Course, params: Params, place: Path) -> Params:
    """Train to the last step in the folder `place` and return all parameters; see `train_task`."""
    task, keep = course.task, run.config.checkpoint
    free_heap()
    saved = Saved.newest_sound(place / "checkpoints", lambda saved: restore(run, task, saved, params))
    state = start_state(run, task, params) if saved is None else saved.state
    with Checkpoints(place / "checkpoints", keep.keep, keep.keep_every) as checkpoints, Stop() as stop:
        stop.asked = any_process(stop.asked)
        stop.check("every finished task is saved")
        if int(state.step) >= run.config[task.name].steps:
            return state.params
        training = _Training(run, course, place, state, saved, checkpoints, stop)
        del saved, state  # their arrays go when the training needs them no longer
        with training:
            training.run_to_the_end()
    return training.params


class _Training:
    """A task's state, and everything that serves it on its way. A context manager."""

    def __init__(
        self, run: BaseRun, course: Course, place: Path, state: State, saved: Restored | None, checkpoints: Checkpoints,
        stop: Stop,
    ) -> None:  # fmt: skip
        """place: the folder under the run folder."""
        config, task = run.config, course.task
        self._run, self._task, self._place = run, task, place
        self._measure, self._every = course.measure, course.every
        self._best = Best(run, task, place, course.keep_best)
        self._measure_start, self._answers_start = course.measure_start, course.answers_start
        self._state, self._saved, self._resumed = state, saved, saved is not None
        self._checkpoints, self._stop = checkpoints, stop
        self._start, self._total, size = int(state.step), config[task.name].steps, config[task.name].batch_size
        self._finishing = False
        self._index: LoadedIndex | None = None
        self._values: dict[str, jax.Array] = {}  # what the last step reports
        self._answers: deque[jax.Array] = deque(maxlen=2)  # to what was announced at the last two steps
        self._step_function = make_step(run, task)
        seconds, born = (0.0, None) if saved is None else (saved.record["seconds"], saved.record["born"])
        counted = (self._start, self._total, seconds, course.work, born, lambda: checkpoints.latest)
        self._journal = Journal(place, task.name, *counted)
        self._watchdog = Watchdog(config.log.hang_seconds, place.name)
        self._refreshes = course.refresh(self._start, checkpoints, self._stopping, self._embedding)
        rows = own_rows(run.mesh, size)
        examples = course.examples(state.params)
        source = batches(examples, config.seed, task.name, size, self._start, self._total, rows)
        in_flight = None if saved is None else saved.in_flight
        self._feed = Feed(run.mesh, source, rows, size, course.search, in_flight)
        self._profiler = Profiler(place / "profile", config.log.profile_step)
        self._compiles = CompileGuard(self._step_function, padded_lengths(examples))

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for part in (self._watchdog, self._journal, self._refreshes, self._feed, self._profiler):
                stack.enter_context(part)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @property
    def params(self) -> Params:
        """All parameters, as they are now."""
        return self._state.params

    def run_to_the_end(self) -> None:
        """Every step that is left, then the last measurement and save."""
        try:
            if self._saved is not None:
                self._index = self._refreshes.resume(self._saved) if self._task.retrieves else None
                self._saved = None
            if self._measure_start and not self._resumed and not self._task.retrieves:
                self._measured_first()
        except Interrupted:
            self._stop.asked = True  # whichever process was told to
            self._stop.check(f"{self._place.name} stays saved at step {self._start}")
        for step in range(self._start, self._total):
            self._watchdog.beat()
            self._profiler.at(step, self._answers[-1] if self._answers else None)
            with self._journal.step(), jax.profiler.StepTraceAnnotation(self._task.name, step_num=step):
                self._one(step)
        self._finish()

    def _stopping(self) -> bool:
        """Whether to stop waiting for an index; who asks is alive."""
        self._watchdog.beat()
        return self._stop.asked

    def _embedding(self) -> None:
        """Called while the corpus is embedded: one process that is told to stop gives it up at once.

        Several embed together, to the end, and so does one after its last step: what was learnt since the last save is
        saved only then.
        """
        if self._stopping() and jax.process_count() == 1 and not self._finishing:
            raise Interrupted

    def _one(self, step: int) -> None:
        heard = Control(*np.asarray(self._answers[0]).tolist()) if len(self._answers) == 2 else Control()
        if self._task.retrieves:
            self._look_for_index(step, heard)
        if self._every and step and step % self._every == 0:
            self._look_in_between(step)
        index = self._index
        with self._journal.waiting("data"):
            searcher, tower = (None, None) if index is None else (index.searcher, index.index.tower)
            batch = self._feed.next(self.params, searcher, tower)
        control = put_control(self._run.mesh, self._refreshes.announce(step)._replace(stop=int(self._stop.asked)))
        arrays = None if index is None else index.index
        self._state, values = self._step_function(self._state, batch, arrays, control)
        self._answers.append(values.pop("heard"))
        self._compiles.check(step)
        self._after(step + 1, values, {} if index is None else {"index_age": step - index.step}, heard)

    def _look_for_index(self, step: int, heard: Control) -> None:
        """Use a fresh index, if there is one, and measure it."""
        try:
            with self._journal.waiting("index"):
                fresh = self._refreshes.next(step, self.params, self._index, heard)
        except (UserError, Interrupted) as reason:
            self._stop.asked = self._stop.asked or isinstance(reason, Interrupted)  # whichever process was told to
            self._save_and_stop(step)
            raise
        self._watchdog.beat()
        if fresh is not None:
            self._index = fresh
            with self._journal.waiting("measurement"):
                exact = self._refreshes.as_exact(fresh)
                final = self._answers_start and step == 0
                found = {} if self._measure is None else self._measure(self.params, exact, final)
            self._watchdog.beat()
            self._best.look(step, self._state, found)
            self._journal.measured(step, found | {"refresh": True, "index_step": fresh.step} | fresh.facts)

    def _measured_first(self) -> None:
        """Measure the parameters that a task without an index starts from, with an index of their own."""
        assert self._measure is not None
        fresh = self._refreshes.next(0, self.params, None, Control())
        if fresh is None:
            return
        found = self._measure(self.params, self._refreshes.as_exact(fresh), False)
        self._watchdog.beat()
        self._best.look(0, self._state, found)
        self._journal.measured(0, found | {"refresh": True, "index_step": 0})

    def _look_in_between(self, step: int) -> None:
        """Measure what was learnt so far."""
        assert self._measure is not None, "a course that says when to measure says how"
        with self._journal.waiting("measurement"):
            try:
                found = self._measure(self.params, self._refreshes.index_for_eval(step, self.params, self._index), True)
            except Interrupted:
                self._save_and_stop(step)
                raise
            self._watchdog.beat()
            self._best.look(step, self._state, found)
        self._watchdog.beat()
        self._journal.measured(step, found)

    def _after(self, done: int, values: dict[str, jax.Array], further: dict[str, int], heard: Control) -> None:
        """Records, and a save where one is due."""
        self._values = values
        config, preempted = self._run.config, self._told_to_stop(heard)
        if done % config.log.every == 0 or done == self._total:
            self._journal.stepped(done, values, further)
        if done < self._total and (preempted or done % config.checkpoint.every == 0):
            self._journal.fetch(done, values)  # so that what is saved is finite
            self._journal.flush()
            with self._journal.waiting("checkpoint"):
                self._save(done, wait=preempted)
        if done < self._total and preempted:
            self._stop.check(f"saved {self._place.name} at step {done}")

    def _told_to_stop(self, heard: Control) -> bool:
        """Several processes stop at the same step, whichever of them was told to."""
        if jax.process_count() == 1:
            return self._stop.asked
        self._stop.asked = self._stop.asked or bool(heard.stop)
        return bool(heard.stop)

    def _save(self, done: int, wait: bool = False) -> None:
        check_replicas(self._run.mesh, self._state, done)
        index = self._index
        entry: dict[str, Any] = {"index_step": -1 if index is None else index.step}
        entry |= {"seconds": self._journal.seconds, "born": self._journal.born}
        generation = index.generation if index is not None else ""
        own: dict[str, Any] = {}
        if index is not None and not generation and index.vectors is not None:
            own["vectors"] = index.vectors
        if own and index is not None and index.index.tower is not None:
            own["tower"] = index.index.tower
        if (rows := self._feed.in_flight()) is not None:
            own["in_flight"] = rows
        self._refreshes.saving(done, generation)
        self._checkpoints.save(done, self._state, own, entry | {"generation": generation}, wait)

    def _save_and_stop(self, step: int) -> None:
        if step > self._start or not self._resumed:
            if self._values:
                self._journal.fetch(step, self._values)  # so that what is saved is finite
            self._journal.flush()
            self._save(step, wait=True)
        self._stop.check(f"saved {self._place.name} at step {step}")

    def _measured_last(self, step: int) -> dict[str, Any]:
        """What the parameters, those of `step`, are worth, with an index of their own, which stays."""
        assert self._measure is not None
        index = self._refreshes.final_index(step, self.params, self._index)
        self._index = None if index is None else dataclasses.replace(index, step=self._total)
        exact = None if self._index is None else self._refreshes.as_exact(self._index)
        found = self._measure(self.params, exact, True)
        self._watchdog.beat()
        return found

    def _finish(self) -> None:
        """The last measurement, with a fresh index, and the last save."""
        total, self._finishing = self._total, True
        found: dict[str, Any] = {}
        self._journal.flush()
        self._watchdog.beat()
        if self._measure is not None:
            found = self._measured_last(total)
            self._best.look(total, self._state, found)
            if (better := self._best.other_than(total, self.params)) is not None:
                step, trained = better
                self._state = self._state._replace(trained=trained)
                found = self._measured_last(step) | {"best_step": step, "last": found}
            self._journal.measured(total, found | {"refresh": False, "seconds": self._journal.seconds})
        self._watchdog.beat()
        self._save(total, wait=True)
        stage = stage_of(self._place) if self._place.name == self._task.name else None  # not of a control
        if loss := describe_loss(self._task.name, stage, self._best.kept_by(found)):
            logger.warning("%s", loss)
        self._stop.asked = any_process(self._stop.asked)
        self._stop.check(f"saved {self._place.name} at step {total}")


def work_of(run: Run, task: Task) -> Work:
    """What a step of a task is to the devices, for the records."""
    parts = step_flops(run.config, task.name, run.model.bert.vocabulary_size, run.lengths.predictions, run.setting.rows)
    return Work(sum(parts.values()), run.mesh.size, peak(run.mesh.devices.flat[0].device_kind))


def make_refresh(
    run: Run, name: str, status: StatusWriter | None, start: int, checkpoints: Checkpoints,
    should_stop: Callable[[], bool], on_progress: Callable[[], None],
) -> IndexSource:  # fmt: skip
    """Where a task's index comes from. Only REALM itself has a builder: a control and fine-tuning embed inline.

    status: through which the builder hears of the trainer, None for a control. should_stop: whether to stop waiting.
    on_progress: called again and again while the corpus is embedded.
    """
    if run.config.refresh.mode == "inline" or name != "realm" or status is None:
        return InlineIndex(run, name, on_progress)
    kept = checkpoints.generations()
    return BuiltIndex(run, name, start, kept, run.config.checkpoint.keep, status, should_stop, on_progress)
