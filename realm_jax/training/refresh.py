"""Where a task's index comes from: embedded by the trainer itself, or built by another job and adopted.

Both answer the loop's one question, `at(step, …)`: is there a fresh index to use from this step on? Inline, every
`refresh.every` steps; asynchronous, when a generation is due by `refresh.adopt_after` or is ready in every process.
Read `Adoption.at` after `Inline.at`; how generations are found and verified is `follower.py`.
"""

import dataclasses
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

from realm_jax.errors import UserError
from realm_jax.index.approximate import Searcher
from realm_jax.index.candidates import Index, Setting
from realm_jax.index.exact import search
from realm_jax.index.generations import (
    Status,
    Unusable,
    generation_names,
    numpy_dtype,
    read_export,
    read_status,
    step_of,
    write_status,
)  # fmt: skip
from realm_jax.models.realm import Params
from realm_jax.run import Run
from realm_jax.storage import Folder, StorageError, open_folder
from realm_jax.training.exporter import Exporter
from realm_jax.training.follower import Follower, Loaded

logger = logging.getLogger(__name__)

STATUS_SECONDS = 5.0  # between two signs of life
DRIFT_QUERIES, DRIFT_DEPTH, DRIFT_K = 256, 100, 8
Stopping = Callable[[], bool]


@dataclasses.dataclass(frozen=True)
class Fresh:
    """An index to use from now on.

    vectors: on the host, [rows, width]. step: of its parameters. generation: its name, '' for one that the trainer
    made. searcher: where hosts search. facts: what to record of a change.
    """

    index: Index
    vectors: NDArray
    step: int
    generation: str = ""
    searcher: Searcher | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


class Refresh(Protocol):
    """Where a task's index comes from. A context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def at(self, step: int, params: Params, index: Fresh | None, agreed: int, stopping: Stopping) -> Fresh | None:
        """A fresh index to use from `step` on, or None to go on with the one in use.

        agreed: export step of the generation that every process announced two steps ago, −1 where they differed.
        stopping: whether to stop waiting; then the answer is None even when there is no index at all.
        """

    def restore(self, generation: str, step: int, stopping: Stopping) -> Fresh | None:
        """The index that a checkpoint of `step` names; None when stopping."""

    def announce(self) -> int:
        """Export step of the newest generation that this process has ready, −1 for none; called once a step."""

    def saved(self, step: int, generation: str) -> None:
        """A checkpoint of `step` names this generation."""

    def done(self, step: int) -> None:
        """The task is done."""


def shared_folder(run: Run) -> Folder:
    """Where exports, generations and job status lie: the run folder, or `refresh.shared`."""
    return open_folder(run.config.refresh.shared or run.workdir)


def made(run: Run, vectors: NDArray, step: int, tower: Params | None, exact: bool = False) -> Fresh:
    """An index of vectors that the trainer made itself. tower: the query embedder that shall search, None for the
    current one. exact: on the devices also where hosts search for REALM."""
    stored = vectors.astype(numpy_dtype(run.config.retrieval.dtype))
    if run.searches is None or exact:
        return Fresh(run.index(stored)._replace(tower=tower), stored, step)
    return Fresh(Index(None, run.documents, tower), stored, step, searcher=Searcher.of(stored, run.searches))


def exact_index(run: Run, fresh: Fresh) -> Index:
    """The index for exact search on the devices, with which everything but REALM's own search works."""
    return fresh.index if fresh.index.vectors is not None else run.index(fresh.vectors)


# --- On the trainer's own devices -------------------------------------------------------------------------------------


class Inline:
    """The trainer embeds the corpus: at the start of a task, and for REALM every `refresh.every` steps."""

    def __init__(self, run: Run, name: str) -> None:
        self._run, self._every = run, run.config.refresh.every if name == "realm" else 0
        self._exact = name != "realm"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def at(self, step: int, params: Params, index: Fresh | None, agreed: int, stopping: Stopping) -> Fresh | None:
        due = self._every > 0 and step % self._every == 0 and index is not None and step != index.step
        if index is not None and not due:
            return None
        tower = None
        if self._run.config.retrieval.query_params == "generation":  # a copy: the step gives its state away
            tower = jax.tree.map(jnp.copy, params[self._run.model.embedder_names[0]])
        return made(self._run, self._run.embed(params), step, tower, self._exact)

    def announce(self) -> int:
        return -1

    def restore(self, generation: str, step: int, stopping: Stopping) -> Fresh | None:
        raise UserError(
            f"{self._run.workdir}: step {step} was trained with generation {generation}; set config.refresh.mode=async"
        )

    def saved(self, step: int, generation: str) -> None:
        pass

    def done(self, step: int) -> None:
        pass


# --- Generations of another job ---------------------------------------------------------------------------------------


class Adoption:
    """REALM's index in asynchronous mode: towers are exported, another job embeds, what it publishes is adopted."""

    def __init__(self, run: Run, task: str, kept: Callable[[], list[str]]) -> None:
        """kept: generations that the checkpoints still there name."""
        self._run, self._kept = run, kept
        self._options: ConfigDict = run.config.refresh
        self._folder = shared_folder(run)
        expected: dict[str, object] = {
            "corpus": run.sources.passages.fingerprint,
            "tokenizer": run.sources.wordpiece.fingerprint,
            "rows": run.sources.passages.stored,
            "width": run.model.projection,
            "dtype": run.config.retrieval.dtype,
        }
        self._follower = Follower(self._folder, expected, run, self._options.poll_seconds)
        self._exporter = Exporter(run, self._folder)
        earlier = read_status(self._folder, "trainer")
        self._status = Status(earlier.run if earlier else uuid.uuid4().hex[:12], stage=task)
        self._status.counter = earlier.counter if earlier else 0
        self._told_at = -STATUS_SECONDS
        self._stale_since: int | None = None
        # What was announced at the last two steps stays loaded until the processes have answered.
        self._announced: deque[Loaded | None] = deque(maxlen=2)
        self._waited = 0.0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._exporter)
        self._stack.enter_context(self._follower)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def announce(self) -> int:
        found = self._follower.ready
        self._announced.append(found)
        return -1 if found is None else found.manifest.step

    def at(self, step: int, params: Params, index: Fresh | None, agreed: int, stopping: Stopping) -> Fresh | None:
        used = -1 if index is None else index.step
        self._tell(step, index)
        if step % self._options.every == 0 or index is None:
            self._exporter.export(step, params, self._needed(used))
        if index is None:  # nothing can be trained without an index
            return self._adopt(self._wait(step, step, True, stopping, "the first generation"), index, 0.0)
        due = self._due(step, used)
        if due is not None:
            self._follower.want(due, due, exactly=True)
        if due is not None and step == due + self._options.adopt_after:
            began = time.monotonic()
            found = self._wait(due, due, True, stopping, f"the generation of step {due}, due at step {step}")
            return self._adopt(found, index, time.monotonic() - began)
        if self._options.adopt_after < 0:
            self._follower.want(used + 1, step)
            if agreed > used:
                return self._adopt(self._announced[0], index, self._waited)
            self._when_stale(step, params, index, stopping)
        return None

    def _due(self, step: int, used: int) -> int | None:
        """The next export step whose generation is adopted `adopt_after` steps later, if it is exported already.

        The mode that promises the same bits.
        """
        following = used + self._options.every - used % self._options.every
        return following if self._options.adopt_after >= 0 and following <= step else None

    def _wait(self, first: int, last: int, exactly: bool, stopping: Stopping, what: str) -> Loaded | None:
        """A generation of these export steps; None when stopping. Raises UserError after `refresh.wait_seconds`."""
        self._follower.want(first, last, exactly)
        found = self._follower.wait(min(1.0, self._options.poll_seconds), stopping)
        began = time.monotonic()
        if found is None and not stopping():
            logger.info("waiting for %s; `realm build-index` with the same config and --workdir makes it", what)
        while found is None and not stopping():
            self._tell(self._status.step, None, alive=True)
            if time.monotonic() - began > self._options.wait_seconds:
                raise UserError(
                    f"{self._folder.path('index')}: {what} did not come within config.refresh.wait_seconds="
                    f"{self._options.wait_seconds:g}; start `realm build-index`, then repeat the command"
                )
            found = self._follower.wait(STATUS_SECONDS, stopping)
        return found

    def _adopt(self, found: Loaded | None, index: Fresh | None, waited: float) -> Fresh | None:
        if found is None:
            return None
        facts: dict[str, Any] = {"generation": found.manifest.generation, "waited": round(waited, 3)}
        if index is not None and found.queries is not None:
            queries = found.queries[:DRIFT_QUERIES]
            facts["drift"] = self._kept_share(queries, index, found)
        manifest = found.manifest
        fresh = Fresh(found.index, found.vectors, manifest.step, manifest.generation, found.searcher, facts)
        self._stale_since, self._waited = None, 0.0
        self._tell(self._status.step, fresh)  # before the builder removes what nobody seems to need
        return fresh

    def _kept_share(self, queries: NDArray[np.float32], old: Fresh, new: Loaded) -> float:
        """Drift: of the old index's top 100 for each query, how much of their top 8 the new vectors keep; 1 is none."""
        depth, k = min(DRIFT_DEPTH, self._run.setting.rows), min(DRIFT_K, self._run.setting.rows)
        if old.searcher is not None:
            rows = old.searcher.search(queries, min(depth, self._run.config.index.budget))
        else:
            rows = np.asarray(_top_rows(self._run.setting, queries, old.index.vectors, depth))
        scores = np.einsum("qd,qkd->qk", queries, new.vectors[rows].astype(np.float32))
        return float((np.argsort(-scores, axis=1, kind="stable")[:, :k] < k).mean())

    def _when_stale(self, step: int, params: Params, index: Fresh, stopping: Stopping) -> None:
        """Training goes on with an old index, and says so; or waits for a newer one, for a while.

        The newer one is then adopted like any other: once every process has announced it.
        """
        limit, age = self._options.max_age, step - index.step
        if not limit or age <= limit or self._stale_since == index.step:
            return
        self._stale_since = index.step
        if self._options.when_stale == "wait":
            logger.warning("step %d: the index is %d steps old; waiting for a newer one", step, age)
            self._exporter.export(step, params, self._needed(index.step))
            began = time.monotonic()
            try:
                self._wait(index.step + 1, step, False, stopping, "a newer generation")
            except UserError as fault:
                logger.warning("%s; going on with the old index", fault)
            self._waited = time.monotonic() - began
            return
        logger.warning(
            "step %d: the index is %d steps old (config.refresh.max_age=%d); is `realm build-index` running?",
            step, age, limit,
        )  # fmt: skip

    def restore(self, generation: str, step: int, stopping: Stopping) -> Fresh | None:
        """The generation itself; else one built anew from its export; else the newest there is, without the promise
        of the same bits."""
        self._status.pins = tuple({*self._kept(), generation})
        try:
            found: Loaded | None = self._follower.load(generation)
        except Unusable as fault:
            logger.warning("%s", fault)
            found = self._rebuilt(generation, step, stopping)
        return self._adopt(found, None, 0.0)

    def _rebuilt(self, generation: str, step: int, stopping: Stopping) -> Loaded | None:
        wanted = step_of(generation)
        if read_export(self._folder, wanted) is not None:
            logger.warning("it has to be built again from its export; the bits will be the same")
            self._tell(step, None, alive=True)
            return self._wait(wanted, wanted, True, stopping, f"generation {generation} again")
        names = [name for name in generation_names(self._folder) if step_of(name) <= step]
        for name in reversed(names):
            try:
                found = self._follower.load(name)
            except Unusable:
                continue
            logger.warning("going on with generation %s: from here the bits may differ from an undisturbed run's", name)
            return found
        raise UserError(
            f"{self._folder.path('index')}: neither generation {generation} nor its export is there, and no other that "
            f"can be used at step {step}; put it back, or start in another --workdir"
        )

    def saved(self, step: int, generation: str) -> None:
        self._status.pins = tuple(sorted({*self._kept(), generation} - {""}))
        self._told_at = -STATUS_SECONDS  # a builder should know of the pins before it removes anything

    def done(self, step: int) -> None:
        self._status.done = True
        self._tell(step, None, alive=True)

    def _needed(self, used: int) -> set[int]:
        """Export steps that must stay: those of pinned generations, and those still to be adopted."""
        steps = {step_of(name) for name in self._status.pins} | {used}
        after = self._options.adopt_after
        if after > 0:
            steps |= set(range(used, self._status.step + 1, self._options.every)) if used >= 0 else set()
        return steps - {-1}

    def _tell(self, step: int, index: Fresh | None, alive: bool = False) -> None:
        """A sign of life for the builder, now and then."""
        self._status.step = step
        if index is not None and index.step != self._status.index:
            self._status.index = index.step
            self._status.pins = tuple(sorted({*self._status.pins, index.generation}))
            alive = True
        if not alive and time.monotonic() - self._told_at < STATUS_SECONDS:
            return
        self._told_at = time.monotonic()
        self._status.counter += 1
        if jax.process_index() == 0:
            try:
                write_status(self._folder, "trainer", self._status)
            except StorageError as fault:
                logger.warning("%s; the builder cannot see that training goes on", fault)


@partial(jax.jit, static_argnums=(0, 3))
def _top_rows(setting: Setting, queries: jax.Array, vectors: jax.Array, depth: int) -> jax.Array:
    return search(setting.mesh, queries, vectors, setting.rows, depth, setting.search_block).rows
