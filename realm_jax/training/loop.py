"""The train loop: one task from its first step, or from its newest checkpoint, to its last.

Read `train_task` top to bottom. What a step computes is `tasks.py`; where its arrays live is `state.py`. The first-time
reader can skip `Stop` and `check_workdir`.
"""

import dataclasses
import hashlib
import json
import logging
import signal
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.config import completed, science, task_names
from realm_jax.data import examples as make
from realm_jax.data.examples import Examples
from realm_jax.data.pipeline import batches
from realm_jax.errors import UserError
from realm_jax.index.candidates import Index
from realm_jax.models.realm import Params
from realm_jax.processes import is_first
from realm_jax.run import Run, own_rows
from realm_jax.storage import read_json, write_json_atomic
from realm_jax.training.adoption import Adoption
from realm_jax.training.checkpoints import Checkpoints, Saved, differences, environment
from realm_jax.training.feed import Feed
from realm_jax.training.journal import Journal, fetch
from realm_jax.training.refresh import Fresh, Inline, Interrupted, Refresh, exact_index, made, shared_folder
from realm_jax.training.reporter import Reporter
from realm_jax.training.state import Control, State, make_step, put_control, start_state, state_shardings
from realm_jax.training.tasks import Task, make_task

logger = logging.getLogger(__name__)

Measure = Callable[[Params, Index | None, bool], dict[str, Any]]


PREEMPTED = 75  # exit code: saved, restart freely


class Preempted(Exception):
    """SIGTERM came and the state is saved; the process should end with exit code `PREEMPTED`."""


class Stop:
    """SIGTERM as a flag that the loop polls, so that a step and its save are never cut in half."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> "Stop":
        try:
            self._before = signal.signal(signal.SIGTERM, self._ask)
        except ValueError:  # not in the main thread: someone else owns the signals
            self._before = None
        return self

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True

    def check(self, kept: str) -> None:
        """Raise Preempted if SIGTERM came. kept: what is safe."""
        if self.asked:
            raise Preempted(f"SIGTERM: {kept}; repeat the command to go on")

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)


def task_examples(run: Run, name: str) -> Examples:
    """The examples that a task trains on."""
    sources, config, lengths = run.sources, run.config, run.lengths
    wordpiece, data = sources.wordpiece, config.data
    if name == "mlm":
        stores = (sources.passages, sources.pretraining)
        return make.warmup_examples(*stores, wordpiece, lengths, data.null_rate, data.unrelated_rate)
    if name == "ict":
        return make.cloze_examples(sources.passages, wordpiece, lengths, data.ict_mask_rate)
    if name == "realm":
        return make.masked_examples(sources.pretraining, wordpiece, lengths, data.masking, sources.own_text)
    return make.question_examples(sources.questions.get("train", []), wordpiece, lengths)


def check_workdir(run: Run) -> None:
    """Record config and data in the run folder, or compare them with what is recorded there.

    Raises UserError when a science key or the data differ; another value of an operations key is recorded.
    """
    path = run.workdir / "config.json"
    if path.is_file():
        _check_science(run, path)
        check_data(run)
    if is_first():
        run.workdir.mkdir(parents=True, exist_ok=True)
        write_json_atomic(run.workdir / "data.json", _fingerprints(run))
        write_json_atomic(path, run.config.to_dict())


def _check_science(run: Run, path: Path) -> None:
    recorded = science(completed(read_json(path)))
    now = science(run.config)
    for key in sorted({*recorded, *now}):
        if recorded.get(key) != now.get(key):
            raise UserError(
                f"config.{key} is {now.get(key)!r}, but the run in {run.workdir} has {recorded.get(key)!r}; "
                "set it back, or start in another --workdir"
            )


def check_data(run: Run, edited: bool = False) -> None:
    """Raise UserError when tokenizer, stores or questions are not those that the run folder's `data.json` records, if
    it does. edited: a later version of the passages will do, too."""
    path = run.workdir / "data.json"
    recorded = read_json(path) if path.is_file() else {}
    for name, fingerprint in _fingerprints(run).items():
        if edited and name in ("passages", "pretraining") and recorded.get(name) in run.sources.passages.versions:
            continue
        if recorded.get(name, fingerprint) != fingerprint:
            raise UserError(
                f"{run.config.data.path}: not the data of the run: other {name} than {path} records; "
                "name the folder that it was trained with, or start in another --workdir"
            )


def _fingerprints(run: Run) -> dict[str, str]:
    sources = run.sources
    stores = {"passages": sources.passages.fingerprint, "pretraining": sources.pretraining.fingerprint}
    asked = {split: [dataclasses.asdict(one) for one in questions] for split, questions in sources.questions.items()}
    questions = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return {"tokenizer": sources.wordpiece.fingerprint} | stores | {"questions": questions}


def train_task(
    run: Run,
    name: str,
    params: Params,
    measure: Measure | None = None,
    folder: str | None = None,
    examples: Examples | None = None,
) -> Params:
    """Train one task to its last step and return all parameters.

    params: where a fresh task starts. measure: called with parameters and an index (None in a task that neither
    retrieves nor trains the retriever) at every refresh and, its last argument true, at the end. folder: name under the
    run folder, the task's own by default. examples: others than the task's own. Continues from the newest checkpoint of
    the folder.
    Raises Preempted after SIGTERM, once the state is saved.
    """
    config, task = run.config, make_task(name, run.setting)
    hosts_search = run.searches is not None and name == "realm"  # fine-tuning searches exactly
    total, batch_size = config[name].steps, config[name].batch_size
    place = run.workdir / (folder or name)

    # --- State: restored, else from `params`
    saved = Saved.newest_sound(place / "checkpoints", lambda saved: _restore(run, task, saved, params))
    state = start_state(run, task, params) if saved is None else saved.state
    keep = config.checkpoint
    with Checkpoints(place / "checkpoints", keep.keep, keep.keep_every) as checkpoints, Stop() as stop:
        start = int(state.step)
        if start >= total:
            if name == "realm" and folder is None and config.refresh.mode == "async":
                Reporter(run, shared_folder(run), name).finish(total)  # the run may have been cut off before this word
            stop.check(f"{place.name} is done")
            return state.params

        # --- Examples, the compiled step, records, where the index comes from
        rows = own_rows(run.mesh, batch_size)
        source = batches(examples or task_examples(run, name), config.seed, name, batch_size, start, total, rows)
        step_function = make_step(run, task)
        seconds = 0.0 if saved is None else saved.record["seconds"]
        with (
            Journal(place, name, start, total, seconds) as journal,
            make_refresh(run, name, folder is None, start, checkpoints, lambda: stop.asked) as refreshes,
            ExitStack() as stack,
        ):
            try:
                index = None if saved is None else _restore_index(run, task, saved, refreshes)
            except Interrupted:
                stop.check(f"{place.name} stays saved at step {start}")
                raise
            in_flight = None if saved is None else saved.in_flight
            feed = stack.enter_context(Feed(run, source, rows, batch_size, task.retrieves and hosts_search, in_flight))
            answers: deque[jax.Array] = deque(maxlen=2)  # to what was announced at the last two steps

            def save(done: int, wait: bool = False) -> None:
                entry = {"index_step": -1 if index is None else index.step, "seconds": journal.seconds}
                generation = index.generation if index is not None else ""
                own: dict[str, Any] = {} if index is None or generation else {"vectors": index.vectors}
                if own and index is not None and index.index.tower is not None:
                    own["tower"] = index.index.tower
                if (rows := feed.in_flight()) is not None:
                    own["in_flight"] = rows
                refreshes.saving(done, generation)
                checkpoints.save(done, state, own, entry | {"generation": generation}, wait)

            def save_and_stop(step: int) -> None:
                if step > start or saved is None:
                    journal.flush()  # raises if what would be saved is not finite
                    save(step, wait=True)
                stop.check(f"saved {place.name} at step {step}")

            def told_to_stop() -> bool:
                """Several processes stop at the same step, whichever of them was told to."""
                if jax.process_count() == 1:
                    return stop.asked
                stop.asked = stop.asked or bool(heard.stop)
                return bool(heard.stop)

            # --- The loop
            for step in range(start, total):
                heard = Control(*np.asarray(answers[0]).tolist()) if len(answers) == 2 else Control()
                if task.retrieves:
                    try:
                        fresh = refreshes.at(step, state.params, index, heard)
                    except (UserError, Interrupted):
                        save_and_stop(step)
                        raise
                    if fresh is not None:
                        index = fresh
                        found = {} if measure is None else measure(state.params, exact_index(run, index), False)
                        journal.measured(step, found | {"refresh": True, "index_step": index.step} | index.facts)
                with journal.waiting_for_data():
                    searcher, tower = (None, None) if index is None else (index.searcher, index.index.tower)
                    batch = feed.next(state.params, searcher, tower)
                control = put_control(run.mesh, refreshes.announce(step)._replace(stop=int(stop.asked)))
                state, values = step_function(state, batch, None if index is None else index.index, control)
                answers.append(values.pop("heard"))
                done, preempted = step + 1, told_to_stop()
                if done % config.log.every == 0 or done == total:
                    journal.stepped(done, values, {} if index is None else {"index_age": step - index.step})
                if done < total and (preempted or done % config.checkpoint.every == 0):
                    fetch(name, done, values)  # so that what is saved is finite
                    journal.flush()
                    save(done, wait=preempted)
                if done < total and preempted:
                    stop.check(f"saved {place.name} at step {done}")

            # --- The last measurement and save
            journal.flush()
            if measure is not None:
                index = None if name == "mlm" else made(run, run.embed(state.params), total, None, exact=True)
                found = measure(state.params, None if index is None else exact_index(run, index), True)
                journal.measured(total, found | {"refresh": False, "seconds": journal.seconds})
            save(total, wait=True)
            refreshes.done(total)
        stop.check(f"saved {place.name} at step {total}")
    return state.params


def make_refresh(
    run: Run, name: str, own_folder: bool, start: int, checkpoints: Checkpoints, stopping: Callable[[], bool]
) -> Refresh:
    """Where a task's index comes from. Only REALM itself has a builder: a control and fine-tuning embed inline."""
    if run.config.refresh.mode == "inline" or not own_folder:
        return Inline(run, name)
    if name == "realm":
        return Adoption(run, name, start, checkpoints.generations(), run.config.checkpoint.keep, stopping)
    later = "realm" in task_names(run.config)[task_names(run.config).index(name) :]
    return Inline(run, name, Reporter(run, shared_folder(run), name) if later else None)


class Restored(NamedTuple):
    """All that a checkpoint holds, on this run's devices; they may be others than those that it was saved on.

    vectors, tower: of an index that the trainer made; in_flight: searches under way. None where there are none.
    """

    state: State
    record: dict[str, Any]
    vectors: NDArray | None
    tower: Params | None
    in_flight: NDArray | None


def _restore(run: Run, task: Task, saved: Saved, like: Params) -> Restored:
    changed = differences(saved.record.get("environment", {}), environment())
    if changed:
        logger.warning("the environment differs, so bits may too: %s", "; ".join(changed))
    logger.info("%s: going on from step %d", task.name, saved.step)
    state = saved.state(abstract_state(run, task, like))
    tower = saved.tree("tower", run.param_shardings[run.model.embedder_names[0]])
    return Restored(state, saved.record, saved.array("vectors"), tower, saved.array("in_flight"))


def _restore_index(run: Run, task: Task, saved: Restored, refreshes: Refresh) -> Fresh | None:
    """The index that was in use: saved vectors, or the generation that the checkpoint names."""
    if not task.retrieves or saved.record["index_step"] < 0:
        return None
    if generation := saved.record.get("generation"):
        return refreshes.restore(generation, int(saved.state.step))
    if saved.vectors is None:
        return None
    vectors, step = saved.vectors[: run.setting.rows], saved.record["index_step"]
    return made(run, vectors, step, saved.tower, exact=task.name != "realm")


def abstract_state(run: Run, task: Task, like: Params) -> State:
    """Shapes and places of a task's state. `like`: shapes of all parameters."""
    shapes = jax.eval_shape(lambda params: start_state(run, task, params), like)
    places = state_shardings(run, task)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def restore_params(run: Run, workdir: Path, name: str, like: Params) -> Params:
    """The newest parameters of a task in a run folder, on this run's devices. `like`: their shapes.

    Changes nothing there. Raises UserError when there are none.
    """
    saved = Saved.newest(workdir / name / "checkpoints")
    if saved is None:
        raise UserError(f"{workdir}: task {name} has no checkpoint; train it first (`realm train`)")
    return saved_params(run, name, saved, like)


def saved_params(run: Run, name: str, saved: Saved, like: Params) -> Params:
    """The parameters in a checkpoint of a task, on this run's devices. `like`: their shapes."""
    abstract = abstract_state(run, make_task(name, run.setting), like)
    moments = jax.tree.map(lambda _: ..., abstract.optimizer)
    return saved.state(abstract._replace(optimizer=moments)).params


def saved_index(run: Run, name: str, saved: Saved) -> Index | None:
    """The index in a checkpoint of a task; None when the parameters there would give another one.

    It fits them when it was made of them, or when the task leaves the document embedder as it was.
    """
    task = make_task(name, run.setting)
    frozen = task.retrieves and run.model.embedder_names[-1] not in task.trained
    vectors = saved.array("vectors") if frozen or saved.record["index_step"] == saved.step else None
    return None if vectors is None else run.index(vectors[: run.setting.rows])
