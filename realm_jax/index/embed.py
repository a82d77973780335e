"""Embed a corpus, and only the passages whose vectors this machine does not have yet.

The encoder that a run starts with, or that no task trains, is embedded here; what training changes goes through
`Run.embed`, because its vectors would fill the cache and never be asked for again. How a passage becomes a vector:
`retrieval/embed.py`.
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
from realm_jax.environment import environment
from realm_jax.index.export import tower_settings
from realm_jax.mesh import to_host
from realm_jax.models.layers import Params
from realm_jax.processes import is_process_0, same_on_all_processes
from realm_jax.retrieval.embed import BUCKET, EMBED_BATCH, GROUPS, CorpusRows, VectorCache, row_keys
from realm_jax.run import Run

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
        "program": [BUCKET, group, run.model.bert.compute.scan, run.mesh.shape["fsdp"], run.mesh.shape["model"]],
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
