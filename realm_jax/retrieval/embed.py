"""The corpus as vectors: every passage through the document embedder, in length buckets; and those of earlier runs.

A passage's padded length is a function of the passage alone, so its vector does not depend on how rows are batched or
on how many devices share a batch. `VectorCache` keeps what this machine has computed, by the content of a passage. Read
next: `exact.py`, which searches the vectors.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.cache import CacheEntry, cache_bytes
from realm_jax.errors import UserError
from realm_jax.mesh import to_host
from realm_jax.models.inputs import Documents
from realm_jax.storage import Damaged, sha256_hex

logger = logging.getLogger(__name__)

EMBED_BATCH = 256  # passages that a device embeds at a time; more are no faster, and take memory
# Passages that a device embeds before the next, by platform. A GPU, whose attention writes no scores, takes a batch.
GROUPS = {"cpu": 8, "tpu": 16}
BUCKET = 32  # padded lengths are multiples of this, up to the document length


class CorpusRows(NamedTuple):
    """A whole corpus in document layout on the host: ids unsigned [rows, length]; lengths, title_lengths [rows]."""

    ids: NDArray[np.unsignedinteger]
    lengths: NDArray[np.uint16]
    title_lengths: NDArray[np.uint16]

    def take(self, rows: NDArray[np.integer]) -> "CorpusRows":
        """Some rows, in the order of their numbers `rows`."""
        return CorpusRows(*(part[rows] for part in self))


def in_groups(
    embed: Callable[[Documents], jax.Array], documents: Documents, group: int, skip_empty: bool = True
) -> jax.Array:
    """`embed` of a batch, `group` passages after another: what a layer makes of them, the scores of attention above
    all, then stays in a CPU's cache, or in a TPU's vector memory.

    skip_empty: groups that only fill up a batch (`embed_corpus` gives them the length 0) cost nothing, and their
    vectors are zero. On a TPU the choice costs more than it saves: it casts the parameters anew for every group.
    """
    rows = documents.ids.shape[0]
    size = group if rows % group == 0 else rows
    groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), documents)
    nothing = jax.eval_shape(embed, jax.tree.map(lambda x: x[0], groups))

    def one(group: Documents) -> jax.Array:
        return jax.lax.cond(group.lengths.max() > 0, embed, lambda _: jnp.zeros(nothing.shape, nothing.dtype), group)

    return jax.lax.map(one if skip_empty else embed, groups).reshape(rows, -1)


EmbedBatch = Callable[[CorpusRows], jax.Array]


def batches(corpus: CorpusRows, batch_size: int) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Rows and padded length of each batch: at most `batch_size` rows, all of one bucket."""
    longest = corpus.ids.shape[1]
    widths = np.minimum(-(-corpus.lengths.astype(np.int64) // BUCKET) * BUCKET, longest)
    for width in np.unique(widths):
        rows = np.flatnonzero(widths == width)
        for start in range(0, len(rows), batch_size):
            yield rows[start : start + batch_size], int(width)


def embed_corpus(
    embed: EmbedBatch, corpus: CorpusRows, batch_size: int, progress: Callable[[int], None] | None = None
) -> NDArray[np.float32]:
    """Vectors of all passages, float32 [rows, projection].

    embed: rows of [batch_size, width] → vectors; it is called with at most a handful of widths. A batch that is not
    full is filled up with rows of length 0, whose vectors are not looked at.
    progress: called with the number of passages done. Raises UserError when a vector is not finite.
    """
    vectors: NDArray[np.float32] | None = None
    pending: list[tuple[NDArray[np.int64], jax.Array]] = []
    done = 0

    def collect(entry: tuple[NDArray[np.int64], jax.Array]) -> None:
        nonlocal vectors
        rows, values = entry[0], to_host(entry[1]).astype(np.float32, copy=False)
        if vectors is None:
            vectors = np.empty((len(corpus.ids), values.shape[1]), np.float32)
        vectors[rows] = values[: len(rows)]

    for rows, width in batches(corpus, batch_size):
        batch = CorpusRows(corpus.ids[rows, :width], corpus.lengths[rows], corpus.title_lengths[rows])
        batch = CorpusRows(*(filled_up(part, batch_size) for part in batch))
        pending.append((rows, embed(batch)))  # dispatched; the one before is fetched while this one runs
        if len(pending) > 1:
            collect(pending.pop(0))
        done += len(rows)
        if progress is not None:
            progress(done)
    for entry in pending:
        collect(entry)
    if vectors is None or not np.isfinite(vectors).all():
        raise UserError("the document embedder gives values that are not finite; the run has diverged")
    return vectors


def filled_up(part: NDArray, rows: int) -> NDArray:
    """So many rows: zeros after those that there are."""
    missing = rows - len(part)
    return np.concatenate([part, np.zeros((missing, *part.shape[1:]), part.dtype)]) if missing else part


# --- Kept from run to run ---------------------------------------------------------------------------------------------


def row_keys(rows: CorpusRows) -> NDArray[np.uint64]:
    """What a passage is known by: a digest of its tokens and of where its title ends, uint64 [rows, 2]."""
    ids = rows.ids.astype(rows.ids.dtype.newbyteorder("<"), copy=False)
    parts = zip(ids, rows.lengths.tolist(), rows.title_lengths.astype("<u2"), strict=True)
    digests = (
        hashlib.blake2b(title.tobytes() + row[:length].tobytes(), digest_size=16).digest()
        for row, length, title in parts
    )
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64, copy=False).reshape(-1, 2)


class VectorCache:
    """The vectors of one encoder on this machine's disk, whatever the corpus and its rows.

    They are an entry of the cache, by a digest of all that makes the encoder a function. Each item of it holds some
    passages: keys, digests of rows, uint32 [rows, 4], and vectors, float32 [rows, width]. Not for towers that are being
    trained, whose vectors nobody asks for again.
    """

    def __init__(self, encoder: str) -> None:
        """encoder: its digest."""
        self._entry = CacheEntry(encoder)
        self.path = self._entry.path
        self._usable = True

    def find(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.float32] | None]:
        """Which of some rows are known, [rows], and their vectors, [rows, width]: arbitrary where a row is not, None
        if none is. Damaged parts are logged and skipped; so is a folder that cannot be read, once,
        and from then on nothing is kept either."""
        try:
            items = self._entry.items()
        except OSError as fault:
            logger.warning("%s; all passages are embedded, and their vectors are not kept", fault)
            self._usable, items = False, []
        parts: list[tuple[NDArray[np.uint64], NDArray[np.float32]]] = []  # keys and memory-mapped vectors of each item
        for item in items:
            try:
                arrays = self._entry.read(item)
                parts.append((arrays["keys"].view(np.uint64), arrays["vectors"]))
            except FileNotFoundError:  # another run made room
                continue
            except (Damaged, KeyError, ValueError) as fault:
                logger.warning("%s/%s: %s; its passages are embedded again", self.path, item, fault)
        known = np.concatenate([np.empty((0, 2), np.uint64), *(part_keys for part_keys, _ in parts)])
        if not len(known):
            return np.zeros(len(keys), np.bool_), None
        order = np.argsort(known[:, 0], kind="stable")
        place = order[np.minimum(np.searchsorted(known[order, 0], keys[:, 0]), len(known) - 1)]
        is_known = (known[place] == keys).all(axis=1)
        vectors = np.empty((len(keys), parts[0][1].shape[1]), np.float32)
        first = 0
        for part_keys, part_vectors in parts:
            rows = np.flatnonzero(is_known & (first <= place) & (place < first + len(part_keys)))
            vectors[rows] = part_vectors[place[rows] - first]
            first += len(part_keys)
        return is_known, vectors if is_known.any() else None

    def add(self, keys: NDArray[np.uint64], vectors: NDArray[np.float32]) -> None:
        """Store vectors of rows, evicting the least recently used. A failure is logged."""
        if not self._usable:
            return
        try:
            arrays = {"keys": keys.view(np.uint32), "vectors": vectors}
            if not self._entry.write(sha256_hex(keys.tobytes())[:16], arrays):
                logger.info("%d vectors are not kept: all together may have %d bytes", len(keys), cache_bytes())
        except OSError as fault:
            logger.warning("vectors are not kept for the next run: %s", fault)
