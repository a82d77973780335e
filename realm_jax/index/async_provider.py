"""Asynchronous index: the trainer exports its encoders, another job embeds the corpus, and its generations are adopted.

`AsyncIndexProvider.maybe_refresh` decides step by step when a generation is adopted; `watcher.py` loads one, and
`exporter.py` writes exports. The rules: docs/design.md, "Exports and generations".
"""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.errors import UserError
from realm_jax.forward import LoadedIndex, StaticContext
from realm_jax.index.control import ControlSignal
from realm_jax.index.exporter import Exporter, index_settings
from realm_jax.index.files import (
    EXPORT,
    export_step,
    export_steps,
    generation_names,
    intact_export,
    names_of_export,
)  # fmt: skip
from realm_jax.index.heartbeat import HEARTBEAT_SECONDS, StatusWriter
from realm_jax.index.provider import InlineIndexProvider, Interrupted, shared_folder
from realm_jax.index.watcher import IndexWatcher
from realm_jax.mesh import to_host
from realm_jax.models.layers import Params
from realm_jax.processes import allgather_flags, broadcast_from_process_0, is_process_0, same_on_all_processes
from realm_jax.retrieval.exact import search
from realm_jax.storage import Damaged, StorageError, digest
from realm_jax.tasks.base import Task

logger = logging.getLogger(__name__)

EXPORT_SECONDS = 30.0  # how long a checkpoint waits for an export that a restart from it will need
DRIFT_QUERIES, DRIFT_DEPTH, DRIFT_K = 256, 100, 8
_T = TypeVar("_T")


class AsyncIndexProvider(InlineIndexProvider):
    """A task's index made by another job."""

    def __init__(
        self, task: Task, start: int, kept: dict[int, str], keep: int, status: StatusWriter,
        should_stop: Callable[[], bool], on_progress: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """start: step to begin or resume with. kept: step → generation of the checkpoints that are there; `keep` of
        them stay. status: through which builders hear what is needed. should_stop: whether to stop waiting.
        on_progress: called again and again while the corpus is embedded."""
        super().__init__(task, on_progress)
        run = task.run
        self._start, self._should_stop = start, should_stop
        self._options = run.config.refresh
        self._folder = shared_folder(run)
        expected: dict[str, object] = {
            "corpus": run.sources.passages.fingerprint,
            "tokenizer": run.sources.tokenizer.fingerprint,
            "rows": run.sources.passages.stored_rows,
            "width": run.model.vector_size,
            "dtype": index_settings(run)["dtype"],
        }
        self._watcher = IndexWatcher(self._folder, expected, run)
        self._exporter = Exporter(run, self._folder)
        self._status = status
        # Step and index of the checkpoints that a restart may find: those kept, and one that is still being written.
        saves = sorted((step, export_step(generation)) for step, generation in kept.items() if generation)
        self._saves: deque[tuple[int, int]] = deque(saves, maxlen=keep + 1)
        self._step, self._used = start, -1  # where training is, and the export step of the index in use
        self._newest = -1  # export step of the newest generation that any process has ready
        self._given_up = -1  # export steps up to this one are not waited for
        # What was announced at the last two steps stays loaded until the processes have answered.
        self._announced: deque[LoadedIndex | None] = deque(maxlen=2)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # Said anew: where the checkpoint of the last step is damaged, steps are trained again that need an index.
            self._status.update(step=self._start, index_done=False)
            if is_process_0():
                self._retry_storage(self._drop_rolled_back_exports)
            self._folder.unstage("index")
            for part in (self._exporter, self._watcher):
                stack.enter_context(part)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _drop_rolled_back_exports(self) -> None:
        """Remove exports of rolled-back steps. Their generations stay, and are valid again if retraining gives the same
        bits."""
        for step in export_steps(self._folder):
            if step > self._start:
                self._folder.remove(f"exports/{step}/{EXPORT}")

    # --- Step by step

    def maybe_refresh(
        self, step: int, params: Params, index: LoadedIndex | None, control: ControlSignal
    ) -> LoadedIndex | None:
        self._step, self._used = step, -1 if index is None else index.step
        if step % self._options.every == 0 or index is None:
            self._export(step, params)
        if index is None:  # training needs an index
            return self._adopt(self._wait(step, "the first generation"), None, 0.0)
        if self._options.adopt_after >= 0:
            return self._adopt_at_fixed_delay(step, index)
        self._look_for(control.step, step)
        found = self._announced[0] if len(self._announced) == 2 else None
        if found is not None and control[:2] == _ready_control(found)[:2] and control.step > self._used:
            return self._adopt(found, index, 0.0)
        return None

    def control_signal(self, step: int) -> ControlSignal:
        self._update_status()
        found = self._watcher.ready
        self._announced.append(found)
        return ControlSignal() if found is None else _ready_control(found)

    def _look_for(self, newest: int, step: int) -> None:
        """What this process should load: the newest that any process has, so that all meet there; else any new one.

        What is ready stays until it is adopted or some process has a newer one.
        """
        own = self._watcher.ready
        self._newest = max(newest, own.step if own is not None else -1)
        if self._newest > self._used and self._newest not in self._watcher.missing_steps:
            self._watcher.want(self._newest, self._newest, exactly=True)
        else:
            self._watcher.want(self._used + 1, step)

    def _adopt_at_fixed_delay(self, step: int, index: LoadedIndex) -> LoadedIndex | None:
        """The generation of export step s at step s + `adopt_after`, waiting if it must: the same bits every time."""
        every, done = self._options.every, max(self._used, self._given_up)
        following = done - done % every + every
        if following <= step:
            self._watcher.want(following, following, exactly=True)
        due = (step - self._options.adopt_after) // every * every
        if due <= done:
            return None
        if due < self._start and broadcast_from_process_0(
            int(self._retry_storage(lambda: intact_export(self._folder, due)) is None)
        ):
            logger.warning(
                "%s is not there; continuing with the index of step %d until the next one is due: bitwise "
                "reproducibility is not guaranteed from here on", self._folder.path(f"exports/{due}"), self._used,
            )  # fmt: skip
            self._given_up = due
            return None
        began = time.monotonic()
        found = self._wait(due, f"the generation of step {due}, due at step {step}")
        return self._adopt(found, index, time.monotonic() - began)

    def _export(self, step: int, params: Params) -> None:
        """Export the towers of `step`. An earlier export that is still being written is waited for where its generation
        is, too; elsewhere this one is left out."""
        if self._options.adopt_after >= 0 or self._used < 0:
            self._wait_on_all_processes(
                lambda seconds: self._exporter.flush(seconds) or None,
                EXPORT_SECONDS,
                "waiting for an export that is still being written",
                f"{self._folder.path('exports')}: an export could not be written within "
                f"config.refresh.wait_seconds={self._options.wait_seconds:g}; make the folder writable, then repeat "
                "the command",
            )
        self._exporter.export(step, params, self._needed() | {step})

    def _wait(self, step: int, what: str) -> LoadedIndex:
        """The generation of an export step. Raises UserError after `refresh.wait_seconds`, Interrupted."""
        self._watcher.want(step, step, exactly=True)
        return self._wait_on_all_processes(
            lambda seconds: self._watcher.wait(seconds, self._should_stop),
            min(1.0, self._folder.poll_seconds),
            f"waiting for {what}; `realm build-index` with the same config and --workdir makes it",
            f"{self._folder.path('index')}: {what} did not come within config.refresh.wait_seconds="
            f"{self._options.wait_seconds:g}; start `realm build-index`, then run the command again",
            lambda found: _ready_control(found)[0],
        )

    def _wait_on_all_processes(
        self, look: Callable[[float], _T | None], seconds: float, waiting: str, late: str,
        mark: Callable[[_T], int] = lambda _: 0,
    ) -> _T:  # fmt: skip
        """What `look(seconds)` gives, as soon as it gives something in every process, of the same `mark`.

        Processes see a file, a signal or a timeout at different times, so they agree first: otherwise one would enter a
        program that another never runs. What one has it may lose again, where another finds it damaged, so each looks
        anew every time. Raises UserError(late) after `refresh.wait_seconds`, Interrupted.
        """
        began, found, said = time.monotonic(), None, False
        while True:
            found = look(seconds if found is None else 0.0)
            patience = self._options.wait_seconds - (time.monotonic() - began)
            here, asked, tired = allgather_flags(found is not None, self._should_stop(), patience < 0).T
            if found is not None and here.all() and same_on_all_processes(mark(found)):
                return found
            if asked.any():
                raise Interrupted
            if tired.any():
                raise UserError(late)
            if here.all():  # soon all see which of them is refused
                time.sleep(self._folder.poll_seconds)
            if not said:
                logger.info("%s", waiting)
            self._update_status()
            said, seconds = True, max(0.0, min(HEARTBEAT_SECONDS, patience))

    def _adopt(self, found: LoadedIndex, index: LoadedIndex | None, waited: float) -> LoadedIndex:
        facts: dict[str, Any] = {"generation": found.generation, "waited": round(waited, 3)}
        if index is not None:  # a device program, so every process runs it, even without queries to run it with
            none = np.zeros((DRIFT_QUERIES, self._run.model.vector_size), np.float32)
            queries = none if found.queries is None else found.queries[:DRIFT_QUERIES]
            drift = self._ranking_overlap(queries, index, found)
            facts |= {} if found.queries is None else {"drift": drift}
        self._used = found.step
        self._update_status()  # before the builder removes generations that seem unused
        return dataclasses.replace(found, facts=facts)

    def _ranking_overlap(self, queries: NDArray[np.float32], old: LoadedIndex, new: LoadedIndex) -> float:
        """Drift: of the old index's top 100 for each query, how much of their top 8 the new vectors keep; 1 is none."""
        depth, k = min(DRIFT_DEPTH, self._run.context.rows), min(DRIFT_K, self._run.context.rows)
        if old.searcher is not None and new.vectors is not None:
            rows = old.searcher.search(queries, min(depth, old.searcher.budget))
            scores = np.einsum("qd,qkd->qk", queries, new.vectors[rows].astype(np.float32))
        else:
            scores = to_host(_drift_scores(self._run.context, queries, old.index.vectors, new.index.vectors, depth))
        return float((np.argsort(-scores, axis=1, kind="stable")[:, :k] < k).mean())

    # --- Restarts

    def restore(self, generation: str, step: int) -> LoadedIndex:
        """The generation itself; else one built anew from its export; else the newest available, without bitwise
        reproducibility."""
        self._step, self._used = step, export_step(generation)
        self._update_status()
        return self._adopt(self._load([generation]) or self._rebuilt(generation, step), None, 0.0)

    def _load(self, names: list[str]) -> LoadedIndex | None:
        """The first of some generations that can be loaded, if every process has one; what is wrong is logged."""
        found = None
        for name in names:
            try:
                found = found or self._retry_storage(partial(self._watcher.load, name))
            except Damaged as fault:
                logger.warning("%s", fault)
        return found if allgather_flags(found is not None).all() else None

    def _rebuilt(self, generation: str, step: int) -> LoadedIndex:
        wanted, corpus = export_step(generation), self._run.sources.passages.fingerprint
        export = self._retry_storage(lambda: intact_export(self._folder, wanted))
        if broadcast_from_process_0(
            int(export is not None and generation in names_of_export(self._folder, export, corpus))
        ):
            logger.warning("it has to be built again from its export; the bits will be the same")
            return self._wait(wanted, f"generation {generation} again")
        before = self._step_before(step + 1)
        while before >= 0:
            names = reversed(generation_names(self._folder))
            found = self._load([name for name in names if export_step(name) == before])
            if found is not None:
                logger.warning(
                    "continuing with generation %s: bitwise reproducibility is not guaranteed from here on",
                    found.generation,
                )
                return found
            before = self._step_before(before)
        raise UserError(
            f"{self._folder.path('index')}: neither generation {generation} nor its export is there, and no other that "
            f"can be used at step {step}; put it back, or start in another --workdir"
        )

    def _step_before(self, step: int) -> int:
        """The last export step before `step` that has a generation, as the first process sees it; −1 for none."""
        steps = map(export_step, generation_names(self._folder))
        return broadcast_from_process_0(max((found for found in steps if found < step), default=-1))

    def _retry_storage(self, act: Callable[[], _T]) -> _T:
        """What storage gives, trying again for `refresh.wait_seconds` while it fails."""
        began = time.monotonic()
        while True:
            try:
                return act()
            except StorageError as fault:
                if self._should_stop() or time.monotonic() - began > self._options.wait_seconds:
                    raise
                logger.warning("%s; trying again", fault)
                time.sleep(self._folder.poll_seconds)

    def on_checkpoint(self, step: int, generation: str) -> None:
        self._saves.append((step, export_step(generation) if generation else -1))
        if self._options.adopt_after >= 0 and not self._exporter.flush(EXPORT_SECONDS):
            logger.warning("an export that a restart from the checkpoint of step %d needs is not written yet", step)
        self._update_status()  # the builder must know what is needed before it removes anything

    def _needed(self) -> set[int]:
        """Export steps that must stay, with their generations: in use, or still to be adopted, now or after a restart
        from one of the checkpoints."""
        needed, every = {self._newest}, self._options.every
        for saved, used in [*self._saves, (self._step + 1, self._used)]:
            needed.add(used)
            if self._options.adopt_after >= 0 and used >= 0:
                needed |= set(range(used - used % every + every, saved, every))  # that of `saved` is exported again
        return needed - {-1}

    def _update_status(self) -> None:
        self._status.update(step=self._step, index=self._used, pins=tuple(sorted(self._needed())))


def _ready_control(found: LoadedIndex) -> ControlSignal:
    """What processes agree on: 28 bits of the digest of a generation's name, and its step."""
    return ControlSignal(int(digest(found.generation.encode())[:7], 16), found.step)


@partial(jax.jit, static_argnums=(0, 4))
def _drift_scores(context: StaticContext, queries: jax.Array, old: jax.Array, new: jax.Array, depth: int) -> jax.Array:
    """Scores of the new vectors for what the old ones find, best first by the old: float32 [queries, depth]."""
    rows = search(context.mesh, queries, old, context.rows, depth).rows
    return jnp.einsum("qd,qkd->qk", queries, new[rows].astype(jnp.float32))
