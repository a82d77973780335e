"""Embed a corpus, and only the passages whose vectors this machine does not have yet.

We cache vectors of the encoder that a run starts with, or that no task trains. Encoders in training use `Run.embed`,
because their vectors would fill the cache and never be read again. `retrieval/embed.py` embeds a passage.
"""

import contextlib
import hashlib
import json
import logging
import platform
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.cache import CacheEntry, cache_bytes
from realm_jax.checksums import arrays_digest, named_arrays
from realm_jax.console import StageProgress
from realm_jax.environment import environment
from realm_jax.indexing.exporter import encoder_settings
from realm_jax.indexing.token_file import TokenFile
from realm_jax.mesh import to_host
from realm_jax.models.layers import Params
from realm_jax.processes import is_process_0, same_on_all_processes
from realm_jax.retrieval.embed import BUCKET, EMBED_BATCH, GROUPS, CorpusRows
from realm_jax.run import Run
from realm_jax.storage import Damaged, sha256_hex

logger = logging.getLogger(__name__)

PIECE = 1 << 12  # passages whose vectors are stored at a time, two minutes of two cores: a stop loses no more
BITS = ("realm_jax", "jax", "jaxlib", "platform", "device", "cores", "XLA_FLAGS")  # of `environment`
COMPILER = ("disable_most_optimizations", "default_matmul_precision")  # of JAX's config
EVERY_SECONDS = 60.0  # between two lines of progress


def embed_with_cache(
    run: Run, params: Params, on_progress: Callable[[], None] = lambda: None, bar: bool = False,
    tokens: TokenFile | None = None,
) -> NDArray[np.float32]:  # fmt: skip
    """Return the bits of `run.embed(params)`, computing only passages that are not in the cache.

    All processes have to call it.

    Args:
        run: with the corpus.
        params: all parameters.
        on_progress: called again and again meanwhile.
        bar: show a progress bar on a terminal.
        tokens: file to which missing token vectors are written, which the cache has not; None to store none.

    Returns:
        [rows, width].

    Raises:
        UserError: if a vector is not finite.
    """

    def show_progress(rows: int) -> StageProgress:
        return StageProgress("passages embedded", rows, every_seconds=EVERY_SECONDS, bar=bar)

    def progress_from(start: int, progress: StageProgress | None) -> Callable[[int], None]:
        def update(done: int) -> None:
            on_progress()
            if progress is not None:
                progress.update(start + done)

        return update

    if not cache_bytes() and tokens is None:
        with show_progress(run.context.rows) as all_rows:
            return run.embed(params, progress_from(0, all_rows))
    cache, keys = VectorCache(encoder_digest(run, params)), row_keys(run.corpus)
    known, vectors = cache.find(keys)
    # Processes embed the same rows together. If their caches differ, all of them embed all rows.
    are_same = same_on_all_processes(zlib.crc32(np.packbits(known).tobytes()) >> 1)
    has_all = known if tokens is None else known & tokens.is_stored
    missing = np.flatnonzero(~has_all if are_same else np.ones_like(known))
    cached = int(known.sum())
    logger.info("embedding %d of %d passages (%d cached in %s)", len(missing), len(known), cached, cache.path)
    missing = missing[np.argsort(run.corpus.lengths[missing], kind="stable")]  # so that pieces have few padded lengths
    with show_progress(len(missing)) if len(missing) else contextlib.nullcontext() as progress:
        for start in range(0, len(missing), PIECE):
            rows = missing[start : start + PIECE]
            update = progress_from(start, progress)
            if tokens is None:
                fresh = run.embed(params, update, run.corpus.take(rows))  # [≤ PIECE, width]
            else:
                fresh = tokens.embed(rows, update)
            vectors = np.empty((len(known), fresh.shape[1]), np.float32) if vectors is None else vectors
            vectors[rows], is_new = fresh, ~known[rows]
            if is_process_0() and is_new.any():
                cache.add(keys[rows[is_new]], fresh[is_new])
    assert vectors is not None, "every row is known or embedded"
    return vectors


def share_to_embed(run: Run, params: Params) -> float:
    """Return the share of the passages whose vectors are not in the cache.

    Args:
        run: with the corpus.
        params: with the passage encoder.

    Returns:
        0 to 1.
    """
    if not cache_bytes():
        return 1.0
    known, _ = VectorCache(encoder_digest(run, params)).find(row_keys(run.corpus))
    return float(1 - known.mean())


def embed_unknown(run: Run, params: Params) -> Callable[[CorpusRows], NDArray[np.float32]]:
    """Return a function that embeds rows with the passage encoder, with the bits of `run.embed`.

    It only computes passages that are not in the cache. It adds nothing to the cache, because an encoder that is not
    there may be in training.

    Args:
        run: with networks and tokenizer.
        params: with the passage encoder.
    """
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


# --- The cache --------------------------------------------------------------------------------------------------------


class VectorCache:
    """The vectors of one encoder on this machine's disk, for passages of any corpus.

    They are an entry of the cache, named by a digest of everything on which the encoder's output depends. Each item
    holds some passages: keys, which are digests of rows, uint32 [rows, 4], and vectors, float32 [rows, width].
    """

    def __init__(self, encoder: str) -> None:
        """Open the entry of an encoder, by its digest."""
        self._entry = CacheEntry(encoder)
        self.path = self._entry.path
        self._usable = True

    def find(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.float32] | None]:
        """Look rows up by their keys (`row_keys`).

        Damaged parts are logged and skipped. A folder that cannot be read is logged once, and nothing is stored in it.

        Returns:
            True for known rows, [rows]; and vectors [rows, width], arbitrary for unknown rows, None if no row is known.
        """
        try:
            items = self._entry.items()
        except OSError as error:
            logger.warning("%s; embedding all passages, without a cache", error)
            self._usable, items = False, []
        parts: list[tuple[NDArray[np.uint64], NDArray[np.float32]]] = []  # keys and memory-mapped vectors of each item
        for item in items:
            try:
                arrays = self._entry.read(item)
                parts.append((arrays["keys"].view(np.uint64), arrays["vectors"]))
            except FileNotFoundError:  # another run made room
                continue
            except (Damaged, KeyError, ValueError) as error:
                logger.warning("%s/%s: %s; embedding its passages again", self.path, item, error)
        stored = np.concatenate([np.empty((0, 2), np.uint64), *(part_keys for part_keys, _ in parts)])  # [stored, 2]
        if not len(stored):
            return np.zeros(len(keys), np.bool_), None
        order = np.argsort(stored[:, 0], kind="stable")
        nearest = order[np.minimum(np.searchsorted(stored[order, 0], keys[:, 0]), len(stored) - 1)]  # [rows]
        is_known = (stored[nearest] == keys).all(axis=1)
        vectors = np.empty((len(keys), parts[0][1].shape[1]), np.float32)
        first = 0
        for part_keys, part_vectors in parts:
            rows = np.flatnonzero(is_known & (first <= nearest) & (nearest < first + len(part_keys)))
            vectors[rows] = part_vectors[nearest[rows] - first]
            first += len(part_keys)
        return is_known, vectors if is_known.any() else None

    def add(self, keys: NDArray[np.uint64], vectors: NDArray[np.float32]) -> None:
        """Store vectors, and evict the least recently used items. A failure is logged.

        Args:
            keys: keys of the rows, see `row_keys`.
            vectors: [rows, width] float32.
        """
        if not self._usable:
            return
        try:
            arrays = {"keys": keys.view(np.uint32), "vectors": vectors}
            if not self._entry.write(sha256_hex(keys.tobytes())[:16], arrays):
                logger.info(
                    "did not cache %d vectors, because the cache is limited to %d bytes", len(keys), cache_bytes()
                )
        except OSError as error:
            logger.warning("could not cache the vectors for the next run: %s", error)


def row_keys(rows: CorpusRows) -> NDArray[np.uint64]:
    """Return the keys of passages: a digest of their tokens and the title's length, uint64 [rows, 2]."""
    ids = rows.ids.astype(rows.ids.dtype.newbyteorder("<"), copy=False)
    parts = zip(ids, rows.lengths.tolist(), rows.title_lengths.astype("<u2"), strict=True)
    digests = (
        hashlib.blake2b(title.tobytes() + row[:length].tobytes(), digest_size=16).digest()
        for row, length, title in parts
    )
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64, copy=False).reshape(-1, 2)


def encoder_digest(run: Run, params: Params) -> str:
    """Return a digest of the passage encoder: its parameters, and everything else on which the bits of vectors depend.

    It does not depend on the number of devices and processes that share the work, see `Run.embed`.

    Args:
        run: with networks and tokenizer.
        params: with the passage encoder.
    """
    variables, platform_name = environment(), run.mesh.devices.flat[0].platform
    file = Path("/proc/cpuinfo")  # compiled programs differ with what the processor can do
    lines = file.read_text().splitlines() if file.is_file() else []
    processor = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    dependencies = encoder_settings(run) | {
        "program": [
            BUCKET,
            GROUPS.get(platform_name, EMBED_BATCH),
            run.model.bert.compute.scan,
            run.mesh.shape["fsdp"],
            run.mesh.shape["model"],
        ],
        "tokenizer": run.sources.tokenizer.fingerprint,  # of the tokens around a passage
        "environment": {name: variables[name] for name in BITS},
        "compiler": [jax.config.values[f"jax_{name}"] for name in COMPILER],
        "processor": processor,
    }
    encoder = named_arrays(params[run.model.embedder_names[-1]])
    host = {name: to_host(array) for name, array in encoder.items()}
    return arrays_digest(host, json.dumps(dependencies, sort_keys=True).encode())[:32]
