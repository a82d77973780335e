"""The corpus as vectors: every passage through the document embedder, in length buckets.

A passage's padded length is a function of the passage alone, so its vector does not depend on how rows are batched or
on how many devices share a batch. Read next: `exact.py`, which searches the vectors.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.errors import UserError
from realm_jax.mesh import to_host
from realm_jax.models.inputs import Documents

EMBED_BATCH = 256  # passages that a device embeds at a time; more are no faster, and take memory
GROUP = 8  # passages that a CPU embeds at a time
BUCKET = 32  # padded lengths are multiples of this, up to the document length


class CorpusRows(NamedTuple):
    """A whole corpus in document layout on the host: ids unsigned [rows, length]; lengths, title_lengths [rows]."""

    ids: NDArray[np.unsignedinteger]
    lengths: NDArray[np.uint16]
    title_lengths: NDArray[np.uint16]


def in_groups(embed: Callable[[Documents], jax.Array], documents: Documents) -> jax.Array:
    """`embed` of a batch, a few passages after another: what a layer makes of them then stays in a CPU's cache.

    Groups that only fill up a batch (`embed_corpus` gives them the length 0) cost nothing; their vectors are zero.
    """
    rows = documents.ids.shape[0]
    size = GROUP if rows % GROUP == 0 else rows
    groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), documents)
    nothing = jax.eval_shape(embed, jax.tree.map(lambda x: x[0], groups))

    def one(group: Documents) -> jax.Array:
        return jax.lax.cond(group.lengths.max() > 0, embed, lambda _: jnp.zeros(nothing.shape, nothing.dtype), group)

    return jax.lax.map(one, groups).reshape(rows, -1)


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
        batch = CorpusRows(*(_filled(part, batch_size) for part in batch))
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


def _filled(part: NDArray, rows: int) -> NDArray:
    """So many rows: zeros after those that there are."""
    return np.concatenate([part, np.zeros((rows - len(part), *part.shape[1:]), part.dtype)])
