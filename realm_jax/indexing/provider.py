"""Provide the index of a task: the trainer embeds the corpus itself, or adopts the index that another job built.

The train loop calls `maybe_refresh(step, …)` of both providers: it returns a new index to use from this step on, or
None. `InlineIndexProvider` embeds the corpus every so many steps; `AsyncIndexProvider` (`async_provider.py`) waits for
a generation.
"""

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.errors import UserError
from realm_jax.forward import Index, LoadedIndex
from realm_jax.indexing.control import ControlSignal
from realm_jax.indexing.files import numpy_dtype
from realm_jax.mirror import url_of
from realm_jax.models.layers import Params
from realm_jax.retrieval.scann import Searcher
from realm_jax.run import Run
from realm_jax.storage import Folder, open_folder
from realm_jax.tasks.answering import needs_vectors
from realm_jax.tasks.base import Task

StartVectors = Callable[[Run, str, Params, Callable[[], None]], NDArray[np.floating]]


class Interrupted(Exception):
    """SIGTERM reached a process while training waited for an index; every process raises it."""


def shared_folder(run: Run) -> Folder:
    """Return the folder of exports, generations and job status: the run directory, or `refresh.shared`."""
    return open_folder(run.config.refresh.shared or url_of(run.workdir))


class InlineIndexProvider:
    """Provide a task's index by embedding the corpus on the trainer's own devices.

    It does so at the start of the task, unless the task before left the vectors, and again for REALM every
    `refresh.every` steps, for fine-tuning every `qa.refresh_every` (0: never). A context manager.
    """

    def __init__(self, task: Task, on_progress: Callable[[], None], start_vectors: StartVectors | None = None) -> None:
        """Make the provider of a task's index.

        Args:
            task: the task.
            on_progress: called again and again while the corpus is embedded.
            start_vectors: returns the vectors by the parameters with which the task starts, [rows, width]; None if the
                first index comes from elsewhere.
        """
        self._run, self._task, self._on_progress, self._start_vectors = task.run, task, on_progress, start_vectors
        self._needs_vectors = needs_vectors(task.name, task.run.config)
        self._searches_exactly = task.name != "realm"  # hosts search for REALM only

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def maybe_refresh(
        self, step: int, params: Params, index: LoadedIndex | None, control: ControlSignal
    ) -> LoadedIndex | None:
        """Return a new index to use from `step` on, or None to go on with the one in use.

        Args:
            step: step of training.
            params: parameters of the model.
            index: the one in use; None if there is none yet.
            control: the reduced signal of two steps ago.

        Raises:
            Interrupted: a process was asked to stop.
            UserError: there is no index.
        """
        every = self._task.refresh_every
        due = every > 0 and step % every == 0 and index is not None and step != index.step
        return self._embed_for_search(step, params, first=index is None) if index is None or due else None

    def _embed_for_search(self, step: int, params: Params, first: bool = False) -> LoadedIndex:
        """Embed the corpus and return its index for the next steps; `first`: as `_embed`."""
        query_encoder = None
        if self._run.config.retrieval.query_params == "generation":  # a copy, because the step donates its state
            query_encoder = jax.tree.map(jnp.copy, params[self._run.model.embedder_names[0]])
        return self._embed(step, params, query_encoder, first=first, exact=self._searches_exactly)

    def control_signal(self, step: int) -> ControlSignal:
        """Return which generation this process has ready; called once a step, after `maybe_refresh`."""
        return ControlSignal()

    def on_checkpoint(self, step: int, generation: str, *, waits_for_exports: bool, last_failed: bool) -> None:
        """Prepare for the writing of a checkpoint.

        Args:
            step: step of the checkpoint.
            generation: generation that it names; '' for none.
            waits_for_exports: wait for the exports that a restart from it needs.
            last_failed: true if the checkpoint before this one could not be written.
        """

    def unwritten_export(self) -> int:
        """Return the step of an export that a restart needs and that is not written, or −1. All processes call it.

        A run that resumes from a checkpoint of this step or an earlier one exports it again.
        """
        return -1

    def resume(
        self, step: int, record: dict[str, Any], vectors: NDArray | None, query_encoder: Params | None
    ) -> LoadedIndex | None:
        """Return the index that was in use when a checkpoint was saved, from saved vectors or from its generation.

        Args:
            step: step of the checkpoint.
            record: record of the checkpoint.
            vectors: saved with it, [rows or more, width]; None if none were.
            query_encoder: the saved query encoder that searches; None for the current one.

        Raises:
            Interrupted: a process was asked to stop.
            UserError: the generation cannot be restored.
        """
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
        return self._of_vectors(vectors, index_step, query_encoder, exact=self._searches_exactly)

    def restore(self, generation: str, step: int) -> LoadedIndex:
        """Return the index of the generation that a checkpoint names.

        Args:
            generation: its name.
            step: step of the checkpoint.

        Raises:
            Interrupted: a process was asked to stop.
            UserError: the generation cannot be restored.
        """
        raise UserError(
            f"{self._run.workdir}: step {step} was trained with generation {generation}; set config.refresh.mode=async"
        )

    def as_exact(self, loaded: LoadedIndex) -> Index:
        """Return the index for exact search on the devices, which everything but REALM's own search needs."""
        if loaded.index.vectors is not None or not self._needs_vectors:
            return loaded.index
        assert loaded.vectors is not None, "hosts that search have the vectors"
        return self._run.index(loaded.vectors)

    def index_for_eval(self, step: int, params: Params, index: LoadedIndex | None) -> Index | None:
        """Return the index for an evaluation before `step`: the one in use, unless the passage encoder has changed.

        Args:
            step: step of training.
            params: parameters of the model.
            index: the one in use; None if there is none.
        """
        if index is None:
            return None
        return self.as_exact(index if self._is_current(step, index) else self._embed(step, params))

    def final_index(self, step: int, params: Params, index: LoadedIndex | None) -> LoadedIndex | None:
        """Return the index for the evaluation at the end: the one in use, unless the passage encoder has changed.

        None for a task that trains only the reader.

        Args:
            step: the last one.
            params: parameters of the model.
            index: the one in use; None if there is none.
        """
        if self._task.name in ("mlm", "closed_book"):
            return None
        return index if index is not None and self._is_current(step, index) else self._embed(step, params)

    def _is_current(self, step: int, index: LoadedIndex) -> bool:
        """Return True if an index has the vectors of the passage encoder at `step`."""
        frozen = self._task.retrieves and self._run.model.embedder_names[-1] not in self._task.trained
        return index.step == step or frozen

    def _embed(self, step: int, params: Params, query_encoder: Params | None = None, first: bool = False,
              exact: bool = True) -> LoadedIndex:  # fmt: skip
        """Embed the corpus and return its index; `first`: by the parameters with which the task starts."""
        if not self._needs_vectors:
            return LoadedIndex(self._run.index_without_vectors, None, step)
        if first:
            assert self._start_vectors is not None
            vectors = self._start_vectors(self._run, self._task.name, params, self._on_progress)
        else:
            vectors = self._run.embed(params, lambda _: self._on_progress())
        return self._of_vectors(vectors, step, query_encoder, exact)

    def _of_vectors(self, vectors: NDArray, step: int, query_encoder: Params | None, exact: bool) -> LoadedIndex:
        """Return the index of vectors that the trainer made.

        Args:
            vectors: [rows, width].
            step: at which they were made.
            query_encoder: the query encoder that searches; None for the current one.
            exact: devices search, also if hosts search for REALM.
        """
        run = self._run
        stored = vectors.astype(numpy_dtype(run.config.model.dtype))  # [rows, width]
        if run.scann_config is None or exact:
            return LoadedIndex(run.index(stored)._replace(query_encoder=query_encoder), stored, step)
        searcher = Searcher.build(stored, run.scann_config)
        return LoadedIndex(
            run.index_without_vectors._replace(query_encoder=query_encoder), stored, step, searcher=searcher
        )
