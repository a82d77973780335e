"""Embed the corpus with a frozen document encoder, computing only passages whose vectors are not cached.

For the tower that a run starts from, and for one that no task trains. What training changes goes through `Run.embed`:
its vectors would fill the cache and never be asked for again. How vectors are kept: `retrieval/vector_cache.py`.
"""

import contextlib
import json
import logging
import platform
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.cache import cache_bytes
from realm_jax.checksums import arrays_digest, named_arrays
from realm_jax.console import StageProgress
from realm_jax.mesh import to_host
from realm_jax.models.realm import Params
from realm_jax.processes import allgather_flags, broadcast_from_process_0, is_process_0
from realm_jax.refresh.exporter import tower_settings
from realm_jax.retrieval.embed import BUCKET, GROUP, CorpusRows
from realm_jax.retrieval.vector_cache import VectorCache, row_keys
from realm_jax.run import Run
from realm_jax.train.checkpoints import environment
from realm_jax.train.restore import vectors_from_earlier_task

logger = logging.getLogger(__name__)

PIECE = 1 << 14  # passages whose vectors are kept at a time: what a run that is stopped does not lose
BITS = ("realm_jax", "jax", "jaxlib", "platform", "device", "cores", "XLA_FLAGS")  # of `environment`
COMPILER = ("disable_most_optimizations", "default_matmul_precision")  # of JAX's config
EVERY_SECONDS = 60.0  # between two lines about what is done


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
            piece = CorpusRows(*(part[rows] for part in run.corpus))
            fresh = run.embed(params, _row_counter(shown, start, on_progress), piece)
            vectors = np.empty((len(known), fresh.shape[1]), np.float32) if vectors is None else vectors
            vectors[rows], new = fresh, ~known[rows]
            if is_process_0() and new.any():
                cache.add(keys[rows[new]], fresh[new])
    assert vectors is not None, "every row is known or embedded"
    return vectors


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
    mark = zlib.crc32(np.packbits(known).tobytes()) >> 1
    return bool(allgather_flags(broadcast_from_process_0(mark) == mark).all())


def encoder_digest(run: Run, params: Params) -> str:
    """What the vectors of an encoder are known by: its parameters, and all that its bits depend on beside them."""
    tower = run.model.embedder_names[-1]
    host = {name: to_host(array) for name, array in named_arrays(params[tower]).items()}
    return arrays_digest(host, json.dumps(_encoder_dependencies(run), sort_keys=True).encode())[:32]


def _encoder_dependencies(run: Run) -> dict[str, Any]:
    """All that makes a tower a function of these bits, but for its parameters.

    How many devices and processes share the work is not part of it, see `Run.embed`.
    """
    around = environment()
    return tower_settings(run) | {
        "program": [BUCKET, GROUP, run.model.bert.scan, run.mesh.shape["fsdp"], run.mesh.shape["model"]],
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
