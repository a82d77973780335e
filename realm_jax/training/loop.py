"""The train loop: one task from its first step, or from its newest checkpoint, to its last.

Read `train_task` top to bottom. What a step computes is `tasks.py`; where its arrays live is `state.py`. The first-time
reader can skip `Stop` and `check_workdir`.
"""

import dataclasses
import hashlib
import json
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from realm_jax.config import science
from realm_jax.data import examples as make
from realm_jax.data.examples import Examples
from realm_jax.data.pipeline import batches
from realm_jax.errors import UserError
from realm_jax.index.candidates import Index
from realm_jax.models.realm import Params
from realm_jax.run import Run, put_batch
from realm_jax.storage import read_json, write_json_atomic
from realm_jax.training.checkpoints import Checkpoints, Saved, differences, environment
from realm_jax.training.journal import Journal, fetch
from realm_jax.training.state import State, make_step, start_state, state_shardings
from realm_jax.training.tasks import Task, make_task

logger = logging.getLogger(__name__)

Measure = Callable[[Params, Index | None, bool], dict[str, Any]]


class Preempted(Exception):
    """SIGTERM came and the state is saved; the process should end with exit code 75."""


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
    run.workdir.mkdir(parents=True, exist_ok=True)
    write_json_atomic(run.workdir / "data.json", _fingerprints(run))
    write_json_atomic(path, run.config.to_dict())


def _check_science(run: Run, path: Path) -> None:
    recorded = science(type(run.config)(read_json(path)))
    now = science(run.config)
    for key in sorted({*recorded, *now}):
        if recorded.get(key) != now.get(key):
            raise UserError(
                f"config.{key} is {now.get(key)!r}, but the run in {run.workdir} has {recorded.get(key)!r}; "
                "set it back, or start in another --workdir"
            )


def check_data(run: Run) -> None:
    """Raise UserError when tokenizer or stores are not those that the run folder's `data.json` records, if it does."""
    path = run.workdir / "data.json"
    recorded = read_json(path) if path.is_file() else {}
    for name, fingerprint in _fingerprints(run).items():
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
    total, batch_size = config[name].steps, config[name].batch_size
    place = run.workdir / (folder or name)

    # --- State: restored, else from `params`
    with Checkpoints(place / "checkpoints", config.checkpoint.keep) as checkpoints, Stop() as stop:
        saved = Saved.newest(place / "checkpoints")
        if saved is None:
            state, index, index_step, seconds = start_state(run, task, params), None, -1, 0.0
        else:
            state, index = _restore(run, task, saved, params)
            index_step, seconds = saved.record["index_step"], saved.record["seconds"]
        start = int(state.step)
        if start >= total:
            stop.check(f"{place.name} is done")
            return state.params

        # --- Examples, the compiled step, records
        source = batches(examples or task_examples(run, name), config.seed, name, batch_size, start, total)
        step_function = make_step(run, task)
        with Journal(place, name, start, total, seconds) as journal:

            def save(done: int, wait: bool = False) -> None:
                entry = {"index_step": index_step, "seconds": journal.seconds}
                checkpoints.save(done, state, None if index is None else index.vectors, entry, wait)

            # --- The loop
            for step in range(start, total):
                if task.retrieves and _refresh_due(config, name, step, index_step):
                    index, found = refresh(run, state.params, measure, final=False)
                    index_step = step
                    journal.measured(step, found | {"refresh": True})
                with journal.waiting_for_data():
                    batch = put_batch(run.mesh, next(source))
                state, values = step_function(state, batch, index)
                done, preempted = step + 1, stop.asked
                if done % config.log.every == 0 or done == total:
                    journal.stepped(done, values, {"index_age": step - index_step} if task.retrieves else {})
                if done < total and (preempted or done % config.checkpoint.every == 0):
                    fetch(name, done, values)  # so that what is saved is finite
                    journal.flush()
                    save(done, wait=preempted)
                if done < total and preempted:
                    stop.check(f"saved {place.name} at step {done}")

            # --- The last measurement and save
            journal.flush()
            if measure is not None:
                index, found = refresh(run, state.params, measure, final=True, embed=name != "mlm")
                index_step = -1 if index is None else total
                journal.measured(total, found | {"refresh": False, "seconds": journal.seconds})
            save(total, wait=True)
        stop.check(f"saved {place.name} at step {total}")
    return state.params


def refresh(
    run: Run, params: Params, measure: Measure | None, final: bool, embed: bool = True
) -> tuple[Index | None, dict[str, Any]]:
    """Re-embed the corpus with current parameters (unless not `embed`), and measure with the fresh index."""
    index = run.index(run.embed(params)) if embed else None
    return index, {} if measure is None else measure(params, index, final)


def _refresh_due(config: Any, name: str, step: int, index_step: int) -> bool:
    """At the start of a task; for REALM every `refresh.every` steps too. Fine-tuning keeps its index."""
    if index_step < 0:
        return True
    return name == "realm" and step % config.refresh.every == 0 and step != index_step


def _restore(run: Run, task: Task, saved: Saved, like: Params) -> tuple[State, Index | None]:
    """A saved state, with the index that was in use. Both may have been saved on other devices."""
    changed = differences(saved.record.get("environment", {}), environment())
    if changed:
        logger.warning("the environment differs, so bits may too: %s", "; ".join(changed))
    logger.info("%s: going on from step %d", task.name, saved.step)
    vectors = saved.vectors() if task.retrieves else None
    index = None if vectors is None else run.index(vectors[: run.setting.rows])
    return saved.state(_abstract_state(run, task, like)), index


def _abstract_state(run: Run, task: Task, like: Params) -> State:
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
    abstract = _abstract_state(run, make_task(name, run.setting), like)
    moments = jax.tree.map(lambda _: ..., abstract.optimizer)
    return saved.state(abstract._replace(optimizer=moments)).params


def saved_index(run: Run, name: str, saved: Saved) -> Index | None:
    """The index in a checkpoint of a task; None when the parameters there would give another one.

    It fits them when it was made of them, or when the task leaves the document embedder as it was.
    """
    task = make_task(name, run.setting)
    frozen = task.retrieves and run.model.embedder_names[-1] not in task.trained
    vectors = saved.vectors() if frozen or saved.record["index_step"] == saved.step else None
    return None if vectors is None else run.index(vectors[: run.setting.rows])
