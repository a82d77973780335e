"""The corpus as vectors: every passage through the passage encoder, in length buckets.

A passage's padded length is a function of only the passage, so its vector does not depend on how rows are batched or
on how many devices share a batch. Read next: `exact.py`, which searches the vectors. `indexing/vector_cache.py` keeps
vectors from run to run.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.errors import UserError
from realm_jax.mesh import to_host
from realm_jax.models.inputs import PassageBatch

EMBED_BATCH = 256  # passages that a device embeds at a time; more are no faster, and take memory
# Passages that a device embeds before the next, by platform. A GPU, whose attention writes no scores, takes a batch.
GROUPS = {"cpu": 8, "tpu": 16}
BUCKET = 32  # padded lengths are multiples of this, up to the document length


class CorpusRows(NamedTuple):
    """A corpus as passage rows on the host.

    Attributes:
        ids: tokens, unsigned [rows, length].
        lengths: tokens of each row, special tokens included, [rows].
        title_lengths: tokens of each title, without special tokens, [rows].
    """

    ids: NDArray[np.unsignedinteger]
    lengths: NDArray[np.uint16]
    title_lengths: NDArray[np.uint16]

    def take(self, rows: NDArray[np.integer]) -> "CorpusRows":
        """Return the rows with these numbers, in their order."""
        return CorpusRows(*(part[rows] for part in self))


def in_groups(embed: Callable[[PassageBatch], Any], passages: PassageBatch, group: int, skip_empty: bool = True) -> Any:
    """Embed a batch in groups, one after another.

    Hidden states of a group, and above all its attention scores, then stay in a CPU's cache, or in a TPU's vector
    memory.

    Args:
        embed: passages [group, length] → vectors [group, projection], or a tree of arrays [group, …].
        passages: ids [batch, length].
        group: passages at a time; all if it does not divide the batch.
        skip_empty: groups that only fill up a batch (`embed_corpus` gives them the length 0) cost nothing, and their
            vectors are zero. On a TPU the choice costs more than it saves: it casts the parameters again for every
            group.

    Returns:
        [batch, projection], or a tree of arrays [batch, …].
    """
    rows = passages.ids.shape[0]
    size = group if rows % group == 0 else rows
    groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), passages)  # ids [groups, size, length]
    shapes = jax.eval_shape(embed, jax.tree.map(lambda x: x[0], groups))

    def embed_or_skip(group: PassageBatch) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.cond(group.lengths.max() > 0, embed, lambda _: zeros, group)

    embedded = jax.lax.map(embed_or_skip if skip_empty else embed, groups)
    return jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), embedded)


EmbedBatch = Callable[[CorpusRows], Any]  # rows → vectors, or a tree of arrays


def batches(corpus: CorpusRows, batch_size: int) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Yield batches of rows that have the same padded length.

    Args:
        corpus: the passages.
        batch_size: most rows of a batch.

    Yields:
        Row numbers [≤ batch_size] and padded length.
    """
    longest = corpus.ids.shape[1]
    widths = np.minimum(-(-corpus.lengths.astype(np.int64) // BUCKET) * BUCKET, longest)
    for width in np.unique(widths):
        rows = np.flatnonzero(widths == width)
        for start in range(0, len(rows), batch_size):
            yield rows[start : start + batch_size], int(width)


def embedded_batches(
    embed: EmbedBatch, corpus: CorpusRows, batch_size: int, progress: Callable[[int], None] | None = None
) -> Iterator[tuple[NDArray[np.int64], Any]]:
    """Yield all passages in batches.

    Args:
        embed: rows [batch_size, width] → vectors or a tree of arrays, [batch_size, …]; it is called with at most a
            handful of widths. A batch that is not full is filled up with rows of length 0.
        corpus: the passages.
        batch_size: rows that `embed` takes.
        progress: called with the number of passages done.

    Yields:
        Row numbers [≤ batch_size], and the results of `embed` for them, on the host.
    """
    pending: list[tuple[NDArray[np.int64], Any]] = []
    done = 0

    def fetch() -> tuple[NDArray[np.int64], Any]:
        rows, values = pending.pop(0)
        return rows, jax.tree.map(lambda x: to_host(x)[: len(rows)], values)

    for rows, width in batches(corpus, batch_size):
        batch = CorpusRows(corpus.ids[rows, :width], corpus.lengths[rows], corpus.title_lengths[rows])
        batch = CorpusRows(*(pad_rows(part, batch_size) for part in batch))
        pending.append((rows, embed(batch)))  # dispatched; the previous batch is fetched while this one runs
        if len(pending) > 1:
            yield fetch()
        done += len(rows)
        if progress is not None:
            progress(done)
    if pending:
        yield fetch()


def embed_corpus(
    embed: EmbedBatch, corpus: CorpusRows, batch_size: int, progress: Callable[[int], None] | None = None
) -> NDArray[np.float32]:
    """Embed all passages.

    Args:
        embed: rows [batch_size, width] → vectors [batch_size, projection]; see `embedded_batches`.
        corpus: the passages.
        batch_size: rows that `embed` takes.
        progress: called with the number of passages done.

    Returns:
        float32 [rows, projection].

    Raises:
        UserError: if a vector is not finite.
    """
    vectors: NDArray[np.float32] | None = None
    for rows, values in embedded_batches(embed, corpus, batch_size, progress):
        if vectors is None:
            vectors = np.empty((len(corpus.ids), values.shape[1]), np.float32)
        vectors[rows] = values
    return checked_vectors(vectors)


def checked_vectors(vectors: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Return the vectors of an encoder. Raises UserError if one is not finite, or if there are none."""
    if vectors is None or not np.isfinite(vectors).all():
        raise UserError("the passage encoder gives values that are not finite; the run has diverged")
    return vectors


def pad_rows(array: NDArray, rows: int) -> NDArray:
    """Pad an array with zero rows.

    Args:
        array: [n, …].
        rows: at least n.

    Returns:
        [rows, …].
    """
    missing = rows - len(array)
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)]) if missing else array
