"""Asynchronous index: the trainer exports its encoders, another job builds generations, and the trainer adopts them.

`AsyncIndexProvider.maybe_refresh` decides step by step when a generation is adopted; `watcher.py` loads one, and
`exporter.py` writes exports. The rules: docs/design/contracts.md, "Index versions".
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

from realm_jax.errors import TransientFault, UserError
from realm_jax.forward import LoadedIndex, StaticContext
from realm_jax.indexing.control import ControlSignal
from realm_jax.indexing.exporter import Exporter, index_settings
from realm_jax.indexing.files import (
    EXPORT,
    export_step,
    export_steps,
    generation_names,
    intact_export,
    names_of_export,
)  # fmt: skip
from realm_jax.indexing.heartbeat import HEARTBEAT_SECONDS, BuilderMonitor, StatusWriter
from realm_jax.indexing.provider import InlineIndexProvider, Interrupted, shared_folder
from realm_jax.indexing.watcher import IndexWatcher
from realm_jax.mesh import to_host
from realm_jax.models.layers import Params
from realm_jax.processes import allgather_flags, broadcast_from_process_0, is_process_0, same_on_all_processes
from realm_jax.retrieval.exact import search
from realm_jax.storage import Damaged, StorageError, sha256_hex
from realm_jax.tasks.base import Task

logger = logging.getLogger(__name__)

EXPORT_SECONDS = 30.0  # how long a checkpoint waits for an export that a restart from it will need
DRIFT_QUERIES, DRIFT_DEPTH, DRIFT_K = 256, 100, 8
_T = TypeVar("_T")


class AsyncIndexProvider(InlineIndexProvider):
    """Provide a task's index from the generations that another job builds."""

    def __init__(
        self, task: Task, start: int, checkpoint_generations: dict[int, str], keep: int, status: StatusWriter,
        should_stop: Callable[[], bool], on_progress: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Make the provider of a task's index.

        Args:
            task: the task.
            start: step to begin or resume with.
            checkpoint_generations: step → generation of the existing checkpoints.
            keep: number of checkpoints that are retained.
            status: publishes which generations are needed, for builders.
            should_stop: returns True to stop waiting.
            on_progress: called again and again while the corpus is embedded.
        """
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
        self._builders = BuilderMonitor(self._folder) if is_process_0() else None
        # Step and export step of the checkpoints that a restart may find, including one that is still being written.
        named = ((step, generation) for step, generation in checkpoint_generations.items() if generation)
        saves = sorted((step, export_step(generation)) for step, generation in named)
        self._saves: deque[tuple[int, int]] = deque(saves, maxlen=keep + 1)
        self._step, self._used = start, -1  # current step, and export step of the index in use
        self._newest = -1  # export step of the newest generation that any process has ready
        self._abandoned = -1  # export steps up to this one are not waited for
        # Indexes announced at the last two steps stay loaded until all processes have read the reduced signal.
        self._announced: deque[LoadedIndex | None] = deque(maxlen=2)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # A finished run may need an index too: if the checkpoint of its last step is damaged, it repeats steps.
            self._status.update(step=self._start, index_done=False)
            if is_process_0():
                self._retry_storage(self._remove_rolled_back_exports)
            self._folder.remove_local_copies("index")
            for manager in (self._exporter, self._watcher):
                stack.enter_context(manager)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _remove_rolled_back_exports(self) -> None:
        # Their generations stay, and are valid again if retraining gives the same bits.
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
            return self._adopt(self._wait_or_embed(step, step, params, "the first generation"), None, 0.0)
        if self._options.adopt_after >= 0:
            return self._adopt_at_fixed_delay(step, params, index)
        self._request_newest(control.step, step)
        announced = self._announced[0] if len(self._announced) == 2 else None  # two steps ago, as `control`
        if announced is not None and control[:2] == _ready_control(announced)[:2] and control.step > self._used:
            return self._adopt(announced, index, 0.0)
        return None

    def control_signal(self, step: int) -> ControlSignal:
        self._update_status()
        ready = self._watcher.ready
        self._announced.append(ready)
        return ControlSignal() if ready is None else _ready_control(ready)

    def _request_newest(self, newest: int, step: int) -> None:
        """Have this process load the newest generation that any process has ready, or else any new one.

        All processes meet at the newest one. A ready generation stays until it is adopted or another process has a
        newer one.
        """
        ready = self._watcher.ready
        self._newest = max(newest, ready.step if ready is not None else -1)
        if self._newest > self._used and self._newest not in self._watcher.missing_steps:
            self._watcher.request_steps(self._newest, self._newest, exactly=True)
        else:
            self._watcher.request_steps(self._used + 1, step)

    def _adopt_at_fixed_delay(self, step: int, params: Params, index: LoadedIndex) -> LoadedIndex | None:
        """Adopt the generation of export step s at step s + `adopt_after`, waiting if necessary.

        So a repeated run adopts the same generations at the same steps.
        """
        every, done = self._options.every, max(self._used, self._abandoned)
        following = done - done % every + every  # the next export step
        if following <= step:
            self._watcher.request_steps(following, following, exactly=True)
        due = (step - self._options.adopt_after) // every * every  # the export step that is due now
        if due <= done:
            return None
        if due < self._start and broadcast_from_process_0(
            int(self._retry_storage(lambda: intact_export(self._folder, due)) is None)
        ):
            logger.warning(
                "%s is not there; continuing with the index of step %d until the next one is due: bitwise "
                "reproducibility is not guaranteed from here on", self._folder.path(f"exports/{due}"), self._used,
            )  # fmt: skip
            self._abandoned = due
            return None
        began = time.monotonic()
        loaded = self._wait_or_embed(due, step, params, f"the generation of step {due}, due at step {step}")
        return self._adopt(loaded, index, time.monotonic() - began)

    def _export(self, step: int, params: Params) -> None:
        """Export the encoders of `step`.

        If an earlier export is still being written: wait for it if its generation is waited for too, or else skip this
        one.
        """
        if self._options.adopt_after >= 0 or self._used < 0:
            self._wait_on_all_processes(
                lambda seconds: self._exporter.flush(seconds) or None,
                EXPORT_SECONDS,
                "waiting for an export that is still being written",
                f"{self._folder.path('exports')}: an export could not be written within "
                f"config.refresh.wait_seconds={self._options.wait_seconds:g}; make the folder writable, then repeat "
                "the command",
            )
        self._exporter.export(step, params, self._required_export_steps() | {step})

    def _wait_or_embed(self, export_step: int, step: int, params: Params, description: str) -> LoadedIndex:
        """Return the generation of an export step, or if no builder runs, an index that this job embeds itself.

        Args:
            export_step: step of the export.
            step: current step.
            params: its parameters.
            description: the generation, for messages.

        Raises:
            TransientFault: a builder runs, and the generation does not come within `refresh.wait_seconds`.
            Interrupted: a process was asked to stop.
        """
        loaded = self._wait(export_step, description, can_embed=self._options.inline_after > 0)
        if loaded is None:
            logger.warning(
                "no index builder since %.0f s (config.refresh.inline_after): embedding the corpus here at step %d; "
                "bitwise reproducibility is not guaranteed from here on", self._options.inline_after, step,
            )  # fmt: skip
            loaded = self._embed_for_search(step, params)
        return loaded

    def _wait(self, step: int, description: str, can_embed: bool = False) -> LoadedIndex | None:
        """Return the generation of an export step, or None if the corpus can be embedded here and no builder runs.

        Raises TransientFault after `refresh.wait_seconds`, Interrupted.
        """

        def is_alone() -> bool:
            limit = self._options.inline_after
            return can_embed and self._builders is not None and self._builders.seconds_without_builder() > limit

        self._watcher.request_steps(step, step, exactly=True)
        return self._wait_on_all_processes(
            lambda seconds: self._watcher.wait(seconds, self._should_stop),
            min(1.0, self._folder.poll_seconds),
            f"waiting for {description}; `realm build-index` with the same config and --workdir makes it",
            f"{self._folder.path('index')}: {description} did not come within config.refresh.wait_seconds="
            f"{self._options.wait_seconds:g}; start `realm build-index`, then run the command again",
            lambda loaded: _ready_control(loaded).generation_hash,
            is_alone,
        )

    def _wait_on_all_processes(
        self, poll: Callable[[float], _T | None], seconds: float, waiting: str, late: str,
        fingerprint: Callable[[_T], int] = lambda _: 0, give_up: Callable[[], bool] = lambda: False,
    ) -> _T | None:  # fmt: skip
        """Return the result of `poll(seconds)` as soon as every process has one, of the same fingerprint.

        None if a process gives up first.

        Processes see a file, a signal or a timeout at different times, so they agree first: otherwise one would enter a
        program that another never runs. A process may lose its result again, if another finds it damaged, so each polls
        again every time.

        Args:
            poll: gives a result, or None if there is none within so many seconds.
            seconds: seconds of the first poll.
            waiting: logged once, if there is no result at once.
            late: the message of the TransientFault.
            fingerprint: fingerprint of a result, below 2**31.
            give_up: returns True to wait no longer.

        Raises:
            TransientFault: there is no result within `refresh.wait_seconds`.
            Interrupted: a process was asked to stop.
        """
        began, result, logged = time.monotonic(), None, False
        while True:
            result = poll(seconds if result is None else 0.0)
            remaining = self._options.wait_seconds - (time.monotonic() - began)
            ready, stopped, timed_out, gave_up = allgather_flags(
                result is not None, self._should_stop(), remaining < 0, give_up()
            ).T
            if result is not None and ready.all() and same_on_all_processes(fingerprint(result)):
                return result
            if stopped.any():
                raise Interrupted
            if gave_up.any():
                return None
            if timed_out.any():
                raise TransientFault(late)
            if ready.all():  # with different results: soon all processes see which of them is rejected
                time.sleep(self._folder.poll_seconds)
            if not logged:
                logger.info("%s", waiting)
            self._update_status()
            logged, seconds = True, max(0.0, min(HEARTBEAT_SECONDS, remaining))

    def _adopt(self, loaded: LoadedIndex, index: LoadedIndex | None, waited: float) -> LoadedIndex:
        """Return a loaded index with facts to record, and publish that it is in use."""
        facts: dict[str, Any] = {"generation": loaded.generation, "waited": round(waited, 3)}
        if index is not None:  # drift is a device program, so every process runs it, with zeros if it has no queries
            zeros = np.zeros((DRIFT_QUERIES, self._run.model.vector_size), np.float32)
            queries = zeros if loaded.queries is None else loaded.queries[:DRIFT_QUERIES]  # [queries, width]
            drift = self._ranking_overlap(queries, index, loaded)
            facts |= {} if loaded.queries is None else {"drift": drift}
        self._used = loaded.step
        self._update_status()  # before the builder removes generations that seem unused
        return dataclasses.replace(loaded, facts=facts)

    def _ranking_overlap(self, queries: NDArray[np.float32], old: LoadedIndex, new: LoadedIndex) -> float:
        """Return the drift: the share of the old index's top 8 that the new vectors rank in the top 8 of its top 100.

        1 means no change.
        """
        depth, k = min(DRIFT_DEPTH, self._run.context.rows), min(DRIFT_K, self._run.context.rows)
        if old.searcher is not None and new.vectors is not None:
            rows = old.searcher.search(queries, min(depth, old.searcher.budget))  # [queries, depth]
            scores = np.einsum("qd,qkd->qk", queries, new.vectors[rows].astype(np.float32))  # [queries, depth]
        else:
            scores = to_host(_drift_scores(self._run.context, queries, old.index.vectors, new.index.vectors, depth))
        return float((np.argsort(-scores, axis=1, kind="stable")[:, :k] < k).mean())

    # --- Restarts

    def restore(self, generation: str, step: int) -> LoadedIndex:
        """Return the generation itself, or one that is built again from its export, or the newest available one.

        The last is not bitwise reproducible.

        Args:
            generation: named by the checkpoint.
            step: step of the checkpoint.

        Raises:
            UserError: no generation can be used.
            Interrupted: a process was asked to stop.
        """
        self._step, self._used = step, export_step(generation)
        self._update_status()
        loaded = self._load_on_all_processes([generation])
        return self._adopt(loaded or self._load_replacement(generation, step), None, 0.0)

    def _load_on_all_processes(self, names: list[str]) -> LoadedIndex | None:
        """Load the first loadable of several generations; None unless every process has one. Errors are logged."""
        loaded = None
        for name in names:
            try:
                loaded = loaded or self._retry_storage(partial(self._watcher.load, name))
            except Damaged as error:
                logger.warning("%s", error)
        return loaded if allgather_flags(loaded is not None).all() else None

    def _load_replacement(self, generation: str, step: int) -> LoadedIndex:
        """Wait until a missing generation is built again, if its export exists, or load an earlier generation."""
        index_step, corpus = export_step(generation), self._run.sources.passages.fingerprint
        export = self._retry_storage(lambda: intact_export(self._folder, index_step))
        if broadcast_from_process_0(
            int(export is not None and generation in names_of_export(self._folder, export, corpus))
        ):
            logger.warning("rebuilding it from its export, with bitwise identical vectors")
            rebuilt = self._wait(index_step, f"generation {generation} again")
            assert rebuilt is not None, "the parameters of that step are not here to embed with"
            return rebuilt
        earlier_step = step + 1
        while True:
            # The last export step before that has a generation, as process 0 sees it.
            steps = map(export_step, generation_names(self._folder))
            earlier_step = broadcast_from_process_0(max((s for s in steps if s < earlier_step), default=-1))
            if earlier_step < 0:
                raise UserError(
                    f"{self._folder.path('index')}: generation {generation} and its export are missing, and no "
                    f"other fits step {step}; restore it, or start in another --workdir"
                )
            names = reversed(generation_names(self._folder))
            loaded = self._load_on_all_processes([name for name in names if export_step(name) == earlier_step])
            if loaded is not None:
                logger.warning(
                    "continuing with generation %s: bitwise reproducibility is not guaranteed from here on",
                    loaded.generation,
                )
                return loaded

    def _retry_storage(self, operation: Callable[[], _T]) -> _T:
        """Return the result of an operation on storage, trying again for `refresh.wait_seconds` while it fails."""
        began = time.monotonic()
        while True:
            try:
                return operation()
            except StorageError as error:
                if self._should_stop() or time.monotonic() - began > self._options.wait_seconds:
                    raise
                logger.warning("%s; trying again", error)
                time.sleep(self._folder.poll_seconds)

    def unwritten_export(self) -> int:
        if self._options.adopt_after < 0:
            return -1
        return broadcast_from_process_0(self._exporter.unwritten_step(EXPORT_SECONDS))

    def on_checkpoint(self, step: int, generation: str, *, waits_for_exports: bool, last_failed: bool) -> None:
        if last_failed:
            self._saves.pop()
        self._saves.append((step, export_step(generation) if generation else -1))
        seconds = EXPORT_SECONDS if waits_for_exports else 0.0
        if self._options.adopt_after >= 0 and not self._exporter.flush(seconds):
            logger.warning("an export that a restart from the checkpoint of step %d needs is not written yet", step)
        self._update_status()  # the builder must know which exports are required before it removes anything

    def _required_export_steps(self) -> set[int]:
        """Return the export steps that must stay, with their generations.

        They are in use, or still to be adopted, now or after a restart from one of the checkpoints.
        """
        required, every = {self._newest}, self._options.every
        for saved, used in [*self._saves, (self._step + 1, self._used)]:
            required.add(used)
            if self._options.adopt_after >= 0 and used >= 0:
                required |= set(range(used - used % every + every, saved, every))  # that of `saved` is exported again
        return required - {-1}

    def _update_status(self) -> None:
        self._status.update(step=self._step, index=self._used, pins=tuple(sorted(self._required_export_steps())))


def _ready_control(loaded: LoadedIndex) -> ControlSignal:
    """Return the signal for a loaded index: 28 bits of the digest of its generation's name, and its step."""
    return ControlSignal(int(sha256_hex(loaded.generation.encode())[:7], 16), loaded.step)


@partial(jax.jit, static_argnums=(0, 4))
def _drift_scores(context: StaticContext, queries: jax.Array, old: jax.Array, new: jax.Array, depth: int) -> jax.Array:
    """Return the new vectors' scores of the passages that the old ones rank highest, float32 [queries, depth]."""
    rows = search(context.mesh, queries, old, context.rows, depth).rows  # [queries, depth]
    return jnp.einsum("qd,qkd->qk", queries, new[rows].astype(jnp.float32))
