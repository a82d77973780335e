"""Where a task's index comes from: the trainer embeds the corpus itself, or adopts what another job built.

Both answer the loop's one question, `maybe_refresh(step, …)`: is there a fresh index to use from this step on?
`InlineIndexProvider` embeds, every so many steps; `AsyncIndexProvider` (`async_provider.py`) waits for a generation.
"""

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.errors import UserError
from realm_jax.forward import Index, LoadedIndex
from realm_jax.index.control import ControlSignal
from realm_jax.index.files import numpy_dtype
from realm_jax.models.layers import Params
from realm_jax.retrieval.scann import Searcher
from realm_jax.run import Run
from realm_jax.storage import Folder, open_folder
from realm_jax.tasks.answering import needs_vectors
from realm_jax.tasks.base import Task

StartVectors = Callable[[Run, str, Params, Callable[[], None]], NDArray[np.floating]]


class Interrupted(Exception):
    """SIGTERM came to a process while training waited for an index; every process raises it."""


def shared_folder(run: Run) -> Folder:
    """Where exports, generations and job status lie: the run folder, or `refresh.shared`."""
    return open_folder(run.config.refresh.shared or run.workdir)


class InlineIndexProvider:
    """A task's index, embedded by the trainer on its own devices: at the start of the task, unless that before it left
    the vectors, for REALM every `refresh.every` steps, and for fine-tuning every `qa.refresh_every` (0: never again).

    A context manager. A task without a corpus asks for none.
    """

    def __init__(self, task: Task, on_progress: Callable[[], None], start_vectors: StartVectors | None = None) -> None:
        """Make the provider of a task's index.

        Args:
            task: whose index it is.
            on_progress: called again and again while the corpus is embedded.
            start_vectors: gives the corpus by the parameters that the task starts with, [rows, width]; None if the
                first index comes from elsewhere.
        """
        self._run, self._task, self._on_progress, self._start_vectors = task.run, task, on_progress, start_vectors
        self._needs_vectors = needs_vectors(task.name, task.run.config)
        self._searches_exactly = task.name != "realm"  # hosts search for REALM alone

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def maybe_refresh(
        self, step: int, params: Params, index: LoadedIndex | None, control: ControlSignal
    ) -> LoadedIndex | None:
        """A fresh index to use from `step` on, or None to go on with the one in use.

        control: what the processes announced two steps ago. Raises Interrupted, UserError.
        """
        every = self._task.refresh_every
        due = every > 0 and step % every == 0 and index is not None and step != index.step
        if index is not None and not due:
            return None
        tower = None
        if self._run.config.retrieval.query_params == "generation":  # a copy: the step donates its state
            tower = jax.tree.map(jnp.copy, params[self._run.model.embedder_names[0]])
        return self._embed(step, params, tower, first=index is None, exact=self._searches_exactly)

    def control_signal(self, step: int) -> ControlSignal:
        """The generation that this process has ready; called once a step, after `maybe_refresh`."""
        return ControlSignal()

    def on_checkpoint(self, step: int, generation: str) -> None:
        """A checkpoint of `step` is about to be written, which names this generation."""

    def resume(
        self, step: int, record: dict[str, Any], vectors: NDArray | None, tower: Params | None
    ) -> LoadedIndex | None:
        """The index that was in use when a checkpoint was saved: of saved vectors, or the generation that it names.
        Raises Interrupted, UserError."""
        index_step = record["index_step"]
        if index_step < 0:
            return None
        if generation := record.get("generation"):
            return self.restore(generation, step)
        if not self._needs_vectors:
            return LoadedIndex(self._run.index_without_vectors, None, index_step)
        if vectors is None:
            return None
        vectors = vectors[: self._run.context.rows]
        return self._of_vectors(vectors, index_step, tower, exact=self._searches_exactly)

    def restore(self, generation: str, step: int) -> LoadedIndex:
        """The generation that a checkpoint of `step` names. Raises Interrupted, UserError."""
        raise UserError(
            f"{self._run.workdir}: step {step} was trained with generation {generation}; set config.refresh.mode=async"
        )

    def as_exact(self, fresh: LoadedIndex) -> Index:
        """The index for exact search on the devices, with which everything but REALM's own search works."""
        if fresh.index.vectors is not None or not self._needs_vectors:
            return fresh.index
        assert fresh.vectors is not None, "where hosts search, they have the vectors"
        return self._run.index(fresh.vectors)

    def index_for_eval(self, step: int, params: Params, index: LoadedIndex | None) -> Index | None:
        """The index that the parameters are measured with before `step`: the one in use, unless the document tower has
        moved since it was made."""
        if index is None:
            return None
        return self.as_exact(index if self._is_current(step, index) else self._embed(step, params))

    def final_index(self, step: int, params: Params, index: LoadedIndex | None) -> LoadedIndex | None:
        """The index that the parameters at the end of the task are measured with: the one in use, unless the document
        tower has moved since; None for a reader's own task."""
        if self._task.name in ("mlm", "closed_book"):
            return None
        return index if index is not None and self._is_current(step, index) else self._embed(step, params)

    def _is_current(self, step: int, index: LoadedIndex) -> bool:
        """Whether the document embedder is at `step` what it was when an index was made."""
        frozen = self._task.retrieves and self._run.model.embedder_names[-1] not in self._task.trained
        return index.step == step or frozen

    def _embed(self, step: int, params: Params, tower: Params | None = None, first: bool = False,
              exact: bool = True) -> LoadedIndex:  # fmt: skip
        """An index of parameters. first: whether the task starts with them; else see `_of_vectors`."""
        if not self._needs_vectors:
            return LoadedIndex(self._run.index_without_vectors, None, step)
        if first:
            assert self._start_vectors is not None
            vectors = self._start_vectors(self._run, self._task.name, params, self._on_progress)
        else:
            vectors = self._run.embed(params, lambda _: self._on_progress())
        return self._of_vectors(vectors, step, tower, exact)

    def _of_vectors(self, vectors: NDArray, step: int, tower: Params | None, exact: bool) -> LoadedIndex:
        """An index of vectors that the trainer made itself. tower: the query embedder that shall search, None for the
        current one. exact: on the devices also where hosts search for REALM."""
        run = self._run
        stored = vectors.astype(numpy_dtype(run.config.model.dtype))
        if run.scann_config is None or exact:
            return LoadedIndex(run.index(stored)._replace(tower=tower), stored, step)
        searcher = Searcher.build(stored, run.scann_config)
        return LoadedIndex(run.index_without_vectors._replace(tower=tower), stored, step, searcher=searcher)
