"""Approximate search with ScaNN on the host, for corpora that do not fit the devices.

The corpus is cut into shards of rows, each with a searcher of its own, so that building one needs the memory of a
shard. Every shard returns a full budget of rows; the best of all by ScaNN's scores are scored again exactly with the
stored vectors, and ties go to the lower row. So a row can be missed, but the order of the others is exact.
Not here: the devices' exact search (`exact.py`). Read next: `Searcher`.
"""

import dataclasses
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from realm_jax.errors import UserError
from realm_jax.host import usable_cores

logger = logging.getLogger(__name__)

DIMENSIONS_PER_BLOCK = 2  # of the product quantizer, as in ORQA's release
NOISE_SHAPING = 0.2  # anisotropic quantization threshold that ScaNN's authors recommend for inner products
TRAINING_ROWS = 250_000  # sample of a shard that its tree and its quantizer learn from
BUDGET = 200  # rows that a shard returns: enough for recall of 8 (`benchmarks/README.md`), soon scored exactly
BLOCK = 65_536  # rows scored at a time by `exact_rows`


@dataclasses.dataclass(frozen=True)
class ScannConfig:
    """Settings for building and searching the shards of an index.

    Attributes:
        budget: rows that every shard returns, and that are scored exactly.
        searched: leaves of a shard's tree that are searched; 0: they follow from the size of the shard.
        leaves: leaves of a shard's tree; 0: they follow from the size of the shard.
        shard_rows: rows of a shard at most, which decides the memory to build one: 1 GB of vectors of 128, and twice
            that.
        tree_from: rows from which a shard has a tree; we score all of a smaller one, which takes no longer.
    """

    budget: int = BUDGET
    searched: int = 0
    leaves: int = 0
    shard_rows: int = 2_000_000
    tree_from: int = 20_000

    def leaves_of(self, rows: int) -> tuple[int, int]:
        """Return the leaves of a shard's tree and how many are searched; (0, 0) for brute force.

        Twice √rows leaves balance the search of centroids against that of leaves. An eighth of them and at least 32
        are searched, which is enough for vectors of trained encoders (`benchmarks/README.md`).
        """
        if rows < self.tree_from:
            return 0, 0
        leaves = min(self.leaves or int(2 * np.sqrt(rows)), max(1, rows // 4))
        return leaves, min(leaves, self.searched or max(32, leaves // 8))


class Shard(NamedTuple):
    """A searcher over rows first … last − 1.

    Attributes:
        first: first row.
        last: row after the last.
        searcher: searcher of ScaNN.
    """

    first: int
    last: int
    searcher: Any


def shard_ranges(rows: int, shard_rows: int, start: int = 0) -> list[tuple[int, int]]:
    """Divide a corpus into shards of nearly equal size.

    Args:
        rows: rows of the corpus.
        shard_rows: most rows of a shard.
        start: first row.

    Returns:
        First row of each shard, and the row after its last.
    """
    count = -(-(rows - start) // shard_rows)
    edges = np.linspace(start, rows, count + 1).astype(np.int64).tolist()
    return list(zip(edges, edges[1:], strict=False))


def build_shard(vectors: NDArray[np.float32], settings: ScannConfig, folder: Path) -> dict[str, Any]:
    """Build the searcher of a shard and write its files.

    Args:
        vectors: [rows, width].
        settings: how it is built.
        folder: folder of its files.

    Returns:
        The sizes of its tree, to be recorded.
    """
    pybind = load_scann()
    rows = len(vectors)
    leaves, searched = settings.leaves_of(rows)
    builder = pybind.builder(vectors, min(settings.budget, rows), "dot_product").set_n_training_threads(usable_cores())
    if leaves:
        sample = min(rows, TRAINING_ROWS)
        builder = builder.tree(leaves, searched, training_sample_size=sample).score_ah(
            DIMENSIONS_PER_BLOCK, anisotropic_quantization_threshold=NOISE_SHAPING, training_sample_size=sample
        )
    else:
        builder = builder.score_brute_force()
    with _quiet():
        builder.build().serialize(str(folder), relative_path=True)
    return {"leaves": leaves, "leaves_searched": searched}


def renew_shard(vectors: NDArray[np.float32], trained: Path, folder: Path) -> None:
    """Write the searcher of a shard whose vectors have changed, with the tree and the codebook of its earlier searcher.

    Every row finds its leaf and its code again, but nothing is trained.

    Args:
        vectors: [rows, width], as many as before.
        trained: folder of the earlier searcher.
        folder: folder of the new one.
    """
    searcher = load_shard(trained, 0, len(vectors)).searcher.searcher
    with _quiet():
        for start in range(0, len(vectors), BLOCK):
            rows = range(start, min(start + BLOCK, len(vectors)))
            searcher.upsert(list(rows), vectors[rows.start : rows.stop], len(rows))
        searcher.serialize(str(folder), True)


def load_shard(folder: Path, first: int, last: int) -> Shard:
    """Load a shard's searcher from its files, which the caller has verified. Nothing is unpickled.

    Args:
        folder: folder of its files.
        first: first row of the shard.
        last: row after the last.
    """
    pybind = load_scann()
    assets = (folder / "scann_assets.pbtxt").read_text()
    with _quiet():
        return Shard(first, last, pybind.ScannSearcher(pybind.scann_pybind.ScannNumpy(str(folder), assets)))


@dataclasses.dataclass(frozen=True)
class Searcher:
    """All shards of an index.

    Attributes:
        shards: in the order of their rows.
        vectors: stored, [rows, width]; an array or a memory map.
        budget: see `ScannConfig`.
        corpus_rows: the row of the corpus for each stored row, −1 for a removed one; None if they are the same.
    """

    shards: tuple[Shard, ...]
    vectors: NDArray
    budget: int
    corpus_rows: NDArray[np.int32] | None = None

    @classmethod
    def build(cls, vectors: NDArray, settings: ScannConfig) -> Self:
        """Build all shards, without keeping files.

        Args:
            vectors: [rows, width].
            settings: settings of the shards.
        """
        shards = []
        for first, last in shard_ranges(len(vectors), settings.shard_rows):
            with tempfile.TemporaryDirectory() as scratch:
                build_shard(vectors[first:last].astype(np.float32), settings, Path(scratch))
                shards.append(load_shard(Path(scratch), first, last))
        return cls(tuple(shards), vectors, settings.budget)

    def search(self, queries: NDArray[np.float32], k: int, searched: int | None = None) -> NDArray[np.int32]:
        """Return the rows of the k largest inner products, best first.

        Args:
            queries: [queries, width].
            k: at most the budget and the number of rows.
            searched: leaves of every shard's tree to search; None for the number that it was built with.

        Returns:
            int32 [queries, k].
        """
        queries = round_to_dtype(queries, self.vectors.dtype)
        row_parts, score_parts = [], []  # [queries, ≤ budget] for each shard
        for shard in self.shards:
            shard_rows = shard.last - shard.first
            local, scores = shard.searcher.search_batched_parallel(
                queries, final_num_neighbors=min(self.budget, shard_rows), leaves_to_search=searched
            )
            is_missing = ~np.isfinite(scores) | (local >= shard_rows)  # a shard may return fewer
            row_parts.append(np.where(is_missing, -1, local.astype(np.int64) + shard.first))
            score_parts.append(np.where(is_missing, -np.inf, scores))
        rows, scores = np.concatenate(row_parts, axis=1), np.concatenate(score_parts, axis=1)
        if self.budget < rows.shape[1]:
            best = np.argpartition(-scores, self.budget - 1, axis=1)[:, : self.budget]
            rows = np.take_along_axis(rows, best, axis=1)  # [queries, budget]
        rows = np.sort(rows, axis=1)  # then a stable sort leaves ties with the lower row
        candidates = self.vectors[np.maximum(rows, 0)].astype(np.float32)  # [queries, budget, width]
        scores = np.einsum("qd,qrd->qr", queries, candidates)
        if self.corpus_rows is not None:
            rows = np.where(rows < 0, -1, self.corpus_rows[rows])
        scores[rows < 0] = -np.inf
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(rows, best, axis=1).astype(np.int32)


def exact_rows(queries: NDArray[np.float32], vectors: NDArray, k: int) -> NDArray[np.int32]:
    """Return the k rows of largest inner product by brute force on the host, best first; ties go to the lower row.

    Blocks grow with the rows that are done, so that few of a block beat the best so far.

    Args:
        queries: [queries, width].
        vectors: [rows, width].
        k: at most the number of rows.

    Returns:
        int32 [queries, k].
    """
    queries, numbers = round_to_dtype(queries, vectors.dtype), np.arange(len(queries))
    scores: NDArray = np.full((len(queries), k), -np.inf, np.float32)
    rows: NDArray = np.full((len(queries), k), np.iinfo(np.int32).max, np.int64)
    start = 0
    while start < len(vectors):
        stop = min(len(vectors), start + min(BLOCK, max(1024, start)))
        block = queries @ round_to_dtype(vectors[start:stop], vectors.dtype).T  # [queries, rows of the block]
        query, column = np.nonzero(block > scores[:, -1:])
        owner = np.concatenate([np.repeat(numbers, k), query])  # the query of each entry
        all_scores = np.concatenate([scores.ravel(), block[query, column]])
        all_rows = np.concatenate([rows.ravel(), column + start])
        order = np.lexsort((all_rows, -all_scores, owner))
        best = order[np.searchsorted(owner[order], numbers)[:, None] + np.arange(k)]  # [queries, k]
        scores, rows, start = all_scores[best], all_rows[best], stop
    return rows.astype(np.int32)


def recall(rows: NDArray[np.int32], exact: NDArray[np.int32]) -> float:
    """Return recall: the share of the exact rows that the search returned, mean over the queries.

    Args:
        rows: rows of the approximate search, [queries, n].
        exact: rows of exact search, [queries, k].

    Returns:
        0 to 1.
    """
    hits = (rows[:, :, None] == exact[:, None, :]).any(axis=1)  # [queries, k]
    return float(hits.mean())


def round_to_dtype(queries: NDArray, dtype: Any) -> NDArray[np.float32]:
    """Round vectors to the dtype of stored vectors, as the devices' search rounds them.

    Args:
        queries: [n, width].
        dtype: dtype of the stored vectors.

    Returns:
        [n, width] float32.
    """
    rounded = queries.astype(dtype) if dtype == ml_dtypes.bfloat16 else queries
    return np.ascontiguousarray(rounded, np.float32) if rounded.dtype == np.float32 else rounded.astype(np.float32)


def load_scann() -> Any:
    """Import ScaNN's NumPy interface, without TensorFlow: ScaNN does not load together with its libraries.

    Raises:
        UserError: if ScaNN cannot be loaded.
    """
    if "scann.scann_ops.py.scann_ops_pybind" not in sys.modules:
        is_hidden = "tensorflow" not in sys.modules
        if is_hidden:
            sys.modules["tensorflow"] = None  # type: ignore[assignment]  # as if it were not installed
        try:
            import scann.scann_ops.py.scann_ops_pybind  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"config.retrieval.backend=scann: ScaNN cannot be loaded ({error}); it runs on Linux only: "
                "install it there, or set config.retrieval.backend=device"
            ) from None
        finally:
            if is_hidden:
                del sys.modules["tensorflow"]
    return sys.modules["scann.scann_ops.py.scann_ops_pybind"]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the log of ScaNN on the process's stderr from C++ while it builds and loads."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    sys.stderr.flush()
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
