"""Where a task's index comes from: embedded by the trainer itself, or built by another job and adopted.

Both answer the loop's one question, `next(step, …)`: is there a fresh index to use from this step on? Inline, every
`refresh.every` steps; asynchronous, when a generation is due by `refresh.adopt_after` or is ready in every process.
Read `InlineIndex.next` and then `built_index.py`; how generations are found and verified is `refresh/watcher.py`.
"""

import abc
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
from numpy.typing import NDArray

from realm_jax.errors import UserError
from realm_jax.forward import Index, LoadedIndex
from realm_jax.models.realm import Params
from realm_jax.refresh.generations import numpy_dtype
from realm_jax.retrieval.scann import Searcher
from realm_jax.run import Run
from realm_jax.storage import Folder, open_folder
from realm_jax.tasks import make_task
from realm_jax.tasks.base import Task
from realm_jax.train.embedding import start_vectors
from realm_jax.train.restore import Restored
from realm_jax.train.step import ControlWords


class Interrupted(Exception):
    """SIGTERM came to a process while training waited for an index; every process raises it."""


class IndexSource:
    """Where a task's index comes from: nowhere, for a task that has no corpus. A context manager."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def next(self, step: int, params: Params, index: LoadedIndex | None, consensus: ControlWords) -> LoadedIndex | None:
        """A fresh index to use from `step` on, or None to go on with the one in use.

        consensus: what the processes announced two steps ago. Raises Interrupted, UserError.
        """
        return None

    def resume(self, saved: Restored) -> LoadedIndex | None:
        """The index that was in use when a checkpoint was saved. Raises Interrupted, UserError."""
        return None

    def as_exact(self, fresh: LoadedIndex) -> Index:
        """The index for exact search on the devices, with which everything but REALM's own search works."""
        return fresh.index

    def index_for_eval(self, step: int, params: Params, index: LoadedIndex | None) -> Index | None:
        """The index that the parameters are measured with before `step`. index: the one in use."""
        return None

    def final_index(self, step: int, params: Params, index: LoadedIndex | None) -> LoadedIndex | None:
        """The index that the parameters at the end of the task are measured with. index: the one in use."""
        return None

    def announce(self, step: int) -> ControlWords:
        """The generation that this process has ready; called once a step, after `next`."""
        return ControlWords()

    def saving(self, step: int, generation: str) -> None:
        """A checkpoint of `step` is about to be written, which names this generation."""


def shared_folder(run: Run) -> Folder:
    """Where exports, generations and job status lie: the run folder, or `refresh.shared`."""
    return open_folder(run.config.refresh.shared or run.workdir)


def index_from_vectors(run: Run, vectors: NDArray, step: int, tower: Params | None, exact: bool = False) -> LoadedIndex:
    """An index of vectors that the trainer made itself. tower: the query embedder that shall search, None for the
    current one. exact: on the devices also where hosts search for REALM."""
    stored = vectors.astype(numpy_dtype(run.config.model.dtype))
    if run.scann_config is None or exact:
        return LoadedIndex(run.index(stored)._replace(tower=tower), stored, step)
    return LoadedIndex(
        run.index_without_vectors._replace(tower=tower), stored, step, searcher=Searcher.of(stored, run.scann_config)
    )


def document_encoder_is_frozen(run: Run, task: Task) -> bool:
    """Whether a task retrieves and leaves the document embedder as it is, so that its first index stays right."""
    return task.retrieves and run.model.embedder_names[-1] not in task.trained


class CorpusIndexSource(IndexSource, abc.ABC):
    """The base of index sources over a run's corpus."""

    def __init__(self, run: Run, task: str, on_progress: Callable[[], None]) -> None:
        """on_progress: called again and again while the corpus is embedded."""
        self._run, self._task, self._on_progress = run, make_task(task, run), on_progress

    @abc.abstractmethod
    def restore(self, generation: str, step: int) -> LoadedIndex:
        """The generation that a checkpoint of `step` names. Raises Interrupted, UserError."""

    def resume(self, saved: Restored) -> LoadedIndex | None:
        """Of saved vectors, or the generation that the checkpoint names."""
        if saved.record["index_step"] < 0:
            return None
        if generation := saved.record.get("generation"):
            return self.restore(generation, int(saved.state.step))
        if not self._task.needs_vectors():
            return LoadedIndex(self._run.index_without_vectors, None, saved.record["index_step"])
        if saved.vectors is None:
            return None
        vectors, step = saved.vectors[: self._run.context.rows], saved.record["index_step"]
        return index_from_vectors(self._run, vectors, step, saved.tower, exact=not self._task.host_search)

    def as_exact(self, fresh: LoadedIndex) -> Index:
        if fresh.index.vectors is not None or not self._task.needs_vectors():
            return fresh.index
        assert fresh.vectors is not None, "where hosts search, they have the vectors"
        return self._run.index(fresh.vectors)

    def index_for_eval(self, step: int, params: Params, index: LoadedIndex | None) -> Index | None:
        """Of the index in use, unless the document tower has moved since it was made."""
        if index is None:
            return None
        if self._is_current(step, index):
            return self.as_exact(index)
        return self._embed_index(step, params).index

    def final_index(self, step: int, params: Params, index: LoadedIndex | None) -> LoadedIndex | None:
        """Of the index in use, unless the document tower has moved since; None for a reader's own task."""
        if not self._task.has_final_index:
            return None
        if index is not None and self._is_current(step, index):
            return index
        return self._embed_index(step, params)

    def _is_current(self, step: int, index: LoadedIndex) -> bool:
        """Whether the document embedder is at `step` what it was when an index was made."""
        return index.step == step or document_encoder_is_frozen(self._run, self._task)

    def _embed_index(self, step: int, params: Params, tower: Params | None = None, first: bool = False,
              exact: bool = True) -> LoadedIndex:  # fmt: skip
        """An index of parameters. first: whether the task starts with them; else see `index_from_vectors`."""
        if not self._task.needs_vectors():
            return LoadedIndex(self._run.index_without_vectors, None, step)
        if first:
            vectors = start_vectors(self._run, self._task.name, params, self._on_progress)
        else:
            vectors = self._run.embed(params, lambda _: self._on_progress())
        return index_from_vectors(self._run, vectors, step, tower, exact)


# --- On the trainer's own devices -------------------------------------------------------------------------------------


class InlineIndex(CorpusIndexSource):
    """The trainer embeds the corpus: at the start of a task, unless that before it left the vectors, for REALM every
    `refresh.every` steps, and for fine-tuning every `qa.refresh_every` (0: never again)."""

    def __init__(self, run: Run, name: str, on_progress: Callable[[], None]) -> None:
        """on_progress: called again and again while it embeds."""
        super().__init__(run, name, on_progress)
        self._every = self._task.refresh_every
        self._exact = not self._task.host_search

    def next(self, step: int, params: Params, index: LoadedIndex | None, consensus: ControlWords) -> LoadedIndex | None:
        due = self._every > 0 and step % self._every == 0 and index is not None and step != index.step
        if index is not None and not due:
            return None
        tower = None
        if self._run.config.retrieval.query_params == "generation":  # a copy: the step donates its state
            tower = jax.tree.map(jnp.copy, params[self._run.model.embedder_names[0]])
        return self._embed_index(step, params, tower, index is None, self._exact)

    def restore(self, generation: str, step: int) -> LoadedIndex:
        raise UserError(
            f"{self._run.workdir}: step {step} was trained with generation {generation}; set config.refresh.mode=async"
        )
