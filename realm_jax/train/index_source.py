"""Where a task's index comes from: the trainer embeds the corpus itself, or adopts what another job built.

Both answer the loop's one question, `next(step, …)`: is there a fresh index to use from this step on? `IndexSource`
embeds, every so many steps; `BuiltIndex` (`built_index.py`) waits for a generation. The tower that a run starts with,
or that no task trains, is embedded by `embed_with_cache`, which computes only passages whose vectors this machine does
not have; what training changes goes through `Run.embed`, as its vectors would fill the cache and never be asked for
again. How a passage becomes a vector: `retrieval/embed.py`.
"""

import contextlib
import json
import logging
import platform
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.cache import cache_bytes
from realm_jax.checksums import arrays_digest, named_arrays
from realm_jax.console import StageProgress
from realm_jax.errors import UserError
from realm_jax.forward import Index, LoadedIndex
from realm_jax.mesh import to_host
from realm_jax.models.realm import Params
from realm_jax.processes import is_process_0, same_on_all_processes
from realm_jax.refresh.exporter import tower_settings
from realm_jax.refresh.generations import numpy_dtype
from realm_jax.retrieval.embed import BUCKET, EMBED_BATCH, GROUPS, CorpusRows, VectorCache, row_keys
from realm_jax.retrieval.scann import Searcher
from realm_jax.run import Run
from realm_jax.storage import Folder, open_folder
from realm_jax.tasks.base import Task
from realm_jax.train.checkpoints import environment
from realm_jax.train.restore import Restored, vectors_from_earlier_task
from realm_jax.train.step import ControlWords

logger = logging.getLogger(__name__)

PIECE = 1 << 14  # passages whose vectors are kept at a time: what a run that is stopped does not lose
BITS = ("realm_jax", "jax", "jaxlib", "platform", "device", "cores", "XLA_FLAGS")  # of `environment`
COMPILER = ("disable_most_optimizations", "default_matmul_precision")  # of JAX's config
EVERY_SECONDS = 60.0  # between two lines about what is done


class Interrupted(Exception):
    """SIGTERM came to a process while training waited for an index; every process raises it."""


def shared_folder(run: Run) -> Folder:
    """Where exports, generations and job status lie: the run folder, or `refresh.shared`."""
    return open_folder(run.config.refresh.shared or run.workdir)


class IndexSource:
    """A task's index, embedded by the trainer on its own devices: at the start of the task, unless that before it left
    the vectors, for REALM every `refresh.every` steps, and for fine-tuning every `qa.refresh_every` (0: never again).

    A context manager. A task without a corpus asks for none.
    """

    def __init__(self, task: Task, on_progress: Callable[[], None]) -> None:
        """on_progress: called again and again while the corpus is embedded."""
        self._run, self._task, self._on_progress = task.run, task, on_progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def next(self, step: int, params: Params, index: LoadedIndex | None, consensus: ControlWords) -> LoadedIndex | None:
        """A fresh index to use from `step` on, or None to go on with the one in use.

        consensus: what the processes announced two steps ago. Raises Interrupted, UserError.
        """
        every = self._task.refresh_every
        due = every > 0 and step % every == 0 and index is not None and step != index.step
        if index is not None and not due:
            return None
        tower = None
        if self._run.config.retrieval.query_params == "generation":  # a copy: the step donates its state
            tower = jax.tree.map(jnp.copy, params[self._run.model.embedder_names[0]])
        return self._embed(step, params, tower, first=index is None, exact=not self._task.host_search)

    def announce(self, step: int) -> ControlWords:
        """The generation that this process has ready; called once a step, after `next`."""
        return ControlWords()

    def saving(self, step: int, generation: str) -> None:
        """A checkpoint of `step` is about to be written, which names this generation."""

    def resume(self, saved: Restored) -> LoadedIndex | None:
        """The index that was in use when a checkpoint was saved: of saved vectors, or the generation that it names.
        Raises Interrupted, UserError."""
        step = saved.record["index_step"]
        if step < 0:
            return None
        if generation := saved.record.get("generation"):
            return self.restore(generation, int(saved.state.step))
        if not self._task.needs_vectors():
            return LoadedIndex(self._run.index_without_vectors, None, step)
        if saved.vectors is None:
            return None
        vectors = saved.vectors[: self._run.context.rows]
        return self._of_vectors(vectors, step, saved.tower, exact=not self._task.host_search)

    def restore(self, generation: str, step: int) -> LoadedIndex:
        """The generation that a checkpoint of `step` names. Raises Interrupted, UserError."""
        raise UserError(
            f"{self._run.workdir}: step {step} was trained with generation {generation}; set config.refresh.mode=async"
        )

    def as_exact(self, fresh: LoadedIndex) -> Index:
        """The index for exact search on the devices, with which everything but REALM's own search works."""
        if fresh.index.vectors is not None or not self._task.needs_vectors():
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
        if not self._task.has_final_index:
            return None
        return index if index is not None and self._is_current(step, index) else self._embed(step, params)

    def _is_current(self, step: int, index: LoadedIndex) -> bool:
        """Whether the document embedder is at `step` what it was when an index was made."""
        frozen = self._task.retrieves and self._run.model.embedder_names[-1] not in self._task.trained
        return index.step == step or frozen

    def _embed(self, step: int, params: Params, tower: Params | None = None, first: bool = False,
              exact: bool = True) -> LoadedIndex:  # fmt: skip
        """An index of parameters. first: whether the task starts with them; else see `_of_vectors`."""
        if not self._task.needs_vectors():
            return LoadedIndex(self._run.index_without_vectors, None, step)
        if first:
            vectors = start_vectors(self._run, self._task.name, params, self._on_progress)
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
        searcher = Searcher.of(stored, run.scann_config)
        return LoadedIndex(run.index_without_vectors._replace(tower=tower), stored, step, searcher=searcher)


# --- What a run starts with: only passages whose vectors are not known yet --------------------------------------------


def embed_with_cache(
    run: Run, params: Params, on_progress: Callable[[], None] = lambda: None, bar: bool = False
) -> NDArray[np.float32]:
    """The bits of `run.embed(params)`, [rows, width], of which only passages that are not known yet are computed.

    on_progress: called again and again meanwhile. bar: whether a terminal may show one, beside no other. All processes
    have to call it. Raises UserError when a vector is not finite.
    """
    if not cache_bytes():
        with _progress(run.context.rows, bar) as shown:
            return run.embed(params, _row_counter(shown, 0, on_progress))
    cache, keys = VectorCache(encoder_digest(run, params)), row_keys(run.corpus)
    known, vectors = cache.find(keys)
    missing = np.flatnonzero(~known if _on_all_processes(known) else np.ones_like(known))
    counts = len(known), len(known) - len(missing), cache.path, len(missing)
    logger.info("%d passages: %d have their vectors in %s, %d are to be embedded", *counts)
    missing = missing[np.argsort(run.corpus.lengths[missing], kind="stable")]  # so that pieces have few buckets
    with _progress(len(missing), bar) if len(missing) else contextlib.nullcontext() as shown:
        for start in range(0, len(missing), PIECE):
            rows = missing[start : start + PIECE]
            piece = run.corpus.take(rows)
            fresh = run.embed(params, _row_counter(shown, start, on_progress), piece)
            vectors = np.empty((len(known), fresh.shape[1]), np.float32) if vectors is None else vectors
            vectors[rows], new = fresh, ~known[rows]
            if is_process_0() and new.any():
                cache.add(keys[rows[new]], fresh[new])
    assert vectors is not None, "every row is known or embedded"
    return vectors


def share_to_embed(run: Run, params: Params) -> float:
    """The share of the passages whose vectors by `params` the cache does not have."""
    if not cache_bytes():
        return 1.0
    known, _ = VectorCache(encoder_digest(run, params)).find(row_keys(run.corpus))
    return float(1 - known.mean())


def embed_unknown(run: Run, params: Params) -> Callable[[CorpusRows], NDArray[np.float32]]:
    """What embeds any rows by the document tower of `params`: the bits of `run.embed`, of which only passages that the
    cache does not have are computed. Nothing is added to it: a tower that is not there may be one in training."""
    if not cache_bytes():
        return lambda rows: run.embed(params, rows=rows)
    cache = VectorCache(encoder_digest(run, params))

    def embed(rows: CorpusRows) -> NDArray[np.float32]:
        known, vectors = cache.find(row_keys(rows))
        if vectors is None:
            return run.embed(params, rows=rows)
        missing = np.flatnonzero(~known)
        if len(missing):
            vectors[missing] = run.embed(params, rows=rows.take(missing))
        return vectors

    return embed


def start_vectors(
    run: Run, task: str, params: Params, on_progress: Callable[[], None] = lambda: None
) -> NDArray[np.floating]:
    """The corpus as the parameters that a task starts with embed it, [rows, width]: from a checkpoint with the same
    document tower (`vectors_from_earlier_task`), or `embed_with_cache`."""
    known = vectors_from_earlier_task(run, task, params)
    return embed_with_cache(run, params, on_progress) if known is None else known


def _progress(rows: int, bar: bool) -> StageProgress:
    return StageProgress("passages embedded", rows, every_seconds=EVERY_SECONDS, bar=bar)


def _row_counter(shown: StageProgress | None, before: int, on_progress: Callable[[], None]) -> Callable[[int], None]:
    """What is called with the number of passages that are done, beside `before` earlier ones."""

    def tell(done: int) -> None:
        on_progress()
        if shown is not None:
            shown.update(before + done)

    return tell


def _on_all_processes(known: NDArray[np.bool_]) -> bool:
    """Whether every process has vectors of the same rows: they have to embed the same ones together."""
    return same_on_all_processes(zlib.crc32(np.packbits(known).tobytes()) >> 1)


def encoder_digest(run: Run, params: Params) -> str:
    """What the vectors of an encoder are known by: its parameters, and all that its bits depend on beside them."""
    tower = run.model.embedder_names[-1]
    host = {name: to_host(array) for name, array in named_arrays(params[tower]).items()}
    return arrays_digest(host, json.dumps(_encoder_dependencies(run), sort_keys=True).encode())[:32]


def _encoder_dependencies(run: Run) -> dict[str, Any]:
    """All that makes a tower a function of these bits, but for its parameters.

    How many devices and processes share the work is not part of it, see `Run.embed`.
    """
    around, group = environment(), GROUPS.get(run.mesh.devices.flat[0].platform, EMBED_BATCH)
    return tower_settings(run) | {
        "program": [BUCKET, group, run.model.bert.scan, run.mesh.shape["fsdp"], run.mesh.shape["model"]],
        "tokenizer": run.sources.tokenizer.fingerprint,  # of the tokens around a passage
        "environment": {name: around[name] for name in BITS},
        "compiler": [jax.config.values[f"jax_{name}"] for name in COMPILER],
        "processor": _processor(),
    }


def _processor() -> str:
    """What this machine's processor can do: compiled programs differ with it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
