"""Exports: both encoders of a step and sample query vectors, written while training goes on.

One small program copies the step's parameters on the devices; a thread fetches and writes them. What an export is:
`indexing/files.py`. Read next: `watcher.py`, which reads the index versions that builders make of it.
"""

import contextlib
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import flax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from realm_jax.config import Model
from realm_jax.data.examples import SAMPLE, dataset
from realm_jax.indexing.files import (
    Arrays,
    export_step,
    export_steps,
    generation_names,
    remove_export,
    write_export,
)
from realm_jax.indexing.heartbeat import BUILDER, read_status
from realm_jax.mesh import replicated
from realm_jax.models.layers import Params
from realm_jax.models.networks import Realm
from realm_jax.processes import is_process_0
from realm_jax.run import Run, put_batch
from realm_jax.storage import Folder, StorageError
from realm_jax.tasks.realm import MaskedSentences

logger = logging.getLogger(__name__)

SAMPLES = 1024  # query vectors of an export at most, with which a builder measures its searcher
RETAINED_EXPORTS = 3  # newest exports that stay, in addition to those in use
RETRY_SECONDS = 5.0


class Exporter:
    """Write exports in a thread, one after another. A context manager: leaving waits for the last one."""

    def __init__(self, run: Run, folder: Folder) -> None:
        self._run, self._folder = run, folder
        self._pool, self._closing = ThreadPoolExecutor(1), threading.Event()
        self._pending: Future[None] | None = None
        self._pending_step = -1
        self._batch = put_batch(run.mesh, sample_queries(run))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._pool.shutdown(wait=True)

    def export(self, step: int, params: Params, needed: set[int]) -> None:
        """Export the encoders of a step, unless an earlier export is still being written (`flush`).

        Args:
            step: step of training.
            params: parameters of the model.
            needed: steps whose exports must stay; other old exports are removed afterwards.
        """
        encoders = {name: params[name] for name in self._run.model.embedder_names}
        copies, queries = _snapshot(self._run.model, self._run.mesh, encoders, self._batch)
        if not is_process_0():
            return
        if self.flush(0):
            self._pending = self._pool.submit(self._write, step, [copies], queries, needed)
            self._pending_step = step
        else:
            logger.warning("skipping the export of step %d: an earlier export is still being written", step)

    def flush(self, seconds: float) -> bool:
        """Wait up to `seconds` until everything is written; return True if it is."""
        if self._pending is None:
            return True
        with contextlib.suppress(TimeoutError):
            self._pending.result(seconds)
        return self._pending.done()

    def unwritten_step(self, seconds: float) -> int:
        """Wait up to `seconds` for the last export; return its step if it is not written then, else −1."""
        return -1 if self.flush(seconds) else self._pending_step

    def _write(self, step: int, encoders: list[Params], queries: jax.Array, needed: set[int]) -> None:
        record = export_record(self._run, step)
        arrays = to_arrays(encoders.pop())  # popped, so that devices hold no copy while storage is slow
        while True:
            try:
                write_export(self._folder, record, arrays, np.asarray(queries, np.float32))
                # Exports later than the newest are of rolled-back steps. They stay, because retraining may repeat them.
                needed = needed | {step}
                past = [past_step for past_step in export_steps(self._folder) if past_step <= max(needed)]
                needed |= _steps_being_built(self._folder)
                for past_step in past[:-RETAINED_EXPORTS]:
                    if past_step not in needed:
                        remove_export(self._folder, past_step)
                return
            except StorageError as error:
                logger.warning("the export of step %d is not written yet: %s", step, error)
                if self._closing.wait(RETRY_SECONDS):
                    logger.warning("abandoned the export of step %d", step)
                    return


def _steps_being_built(folder: Folder) -> set[int]:
    """Return the export steps that a builder works on or has built: a generation is of no use without its export."""
    jobs = (job.removesuffix(".json") for job in folder.names("jobs") if job.startswith(BUILDER))
    statuses = (read_status(folder, job) for job in jobs)
    return {status.step for status in statuses if status} | {export_step(name) for name in generation_names(folder)}


@partial(jax.jit, static_argnums=(0, 1))
def _snapshot(model: Realm, mesh: Mesh, encoders: Params, batch: Any) -> tuple[Params, jax.Array]:
    """Return copies of the encoders, replicated, and the vectors of the sample queries [count, width]."""
    queries = model.embed_queries(encoders, batch["query"], batch["query_length"])  # [count, width]
    return jax.lax.with_sharding_constraint((jax.tree.map(jnp.copy, encoders), queries), replicated(mesh))


def export_record(run: Run, step: int) -> dict[str, Any]:
    """Return the fields of an `Export` without its files and fingerprint.

    Args:
        run: run that exports.
        step: step of the export.
    """
    sources = run.sources
    return {
        "step": step,
        "tokenizer": sources.tokenizer.fingerprint,
        "corpus": sources.passages.fingerprint,
        "towers": encoder_settings(run),
        "index": index_settings(run),
    }


def sample_vectors(run: Run, encoders: Params) -> NDArray[np.float32]:
    """Embed the sample queries.

    Args:
        run: whose pre-training text the queries are from.
        encoders: parameters of the encoders.

    Returns:
        [count, width].
    """
    batch = put_batch(run.mesh, sample_queries(run))
    return np.asarray(_snapshot(run.model, run.mesh, encoders, batch)[1], np.float32)


def sample_queries(run: Run) -> dict[str, Any]:
    """Return masked sentences of the pre-training text as query arrays [count, …].

    The seed chooses them. They are at most SAMPLES, rounded up to a multiple of the devices.
    """
    sources = run.sources
    examples = MaskedSentences(
        sources.pretraining, sources.tokenizer, run.lengths, "salient", sources.pretraining_is_corpus
    ).examples()
    count = min(SAMPLES, examples.total)
    batch = dataset(examples, run.config.seed, SAMPLE, count + -count % run.mesh.size)[0]
    return {name: batch[name] for name in ("query", "query_length")}


def index_settings(run: Run) -> dict[str, Any]:
    """Return how a generation of this run must be stored and searched."""
    return {"dtype": run.config.model.dtype, "backend": run.config.retrieval.backend}


def encoder_settings(run: Run) -> dict[str, Any]:
    """Return the config keys that the vectors of an encoder depend on, in addition to its parameters."""
    model, encoder = run.config.model.to_dict(), run.config.encoder.to_dict()
    names = ("layers", "width", "heads", "feed_forward", "hidden_act", "dtype", "shared_tower")
    # New keys count only if they are set, so that vectors of earlier versions stay valid.
    defaults = Model().to_dict()
    added = ("architecture", "norm_epsilon", "rotary")
    changed = {name: model[name] for name in added if model[name] != defaults[name]}
    if not encoder["dimensions"]:
        del encoder["dimensions"]
    document_length = {"document_length": run.config.data.document_length}
    return {name: model[name] for name in names} | changed | {"encoder": encoder} | document_length


def to_arrays(encoders: Params) -> Arrays:
    """Return parameters by path, on the host."""
    return {name: np.asarray(value) for name, value in flax.traverse_util.flatten_dict(encoders, sep="/").items()}


def to_params(arrays: Arrays) -> Params:
    """Return the tree of parameters by path: the inverse of `to_arrays`."""
    return flax.traverse_util.unflatten_dict(arrays, sep="/")
