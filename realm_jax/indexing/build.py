"""Build one generation: embed the corpus chunk by chunk with an export's encoders, check it, publish its manifest.

Any number of processes may build the same generation, and any of them may die: each embeds missing chunks, its own
slice first and then those of the others from the far end. A chunk's bytes depend only on the export and the corpus, and
its name on its bytes: work may be done twice, but no listed file is ever written again. When to build which generation
is `job.py`; what the files mean is `files.py`. Read `Builder.build` next.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from realm_jax.config import TASK_SECTIONS, Config, with_values
from realm_jax.indexing.files import (
    MANIFEST,
    ChunkFile,
    Export,
    Manifest,
    check_vectors,
    current_name,
    discard_damaged_file,
    files_by_row_range,
    indexes_with_same_encoder,
    numpy_dtype,
    read_chunk,
    read_manifest,
    reject,
    row_range_name,
)  # fmt: skip
from realm_jax.indexing.searchers import (
    MAX_RECALL_LOSS,
    ReusableIndex,
    build_searchers,
    codebook_source,
    measure,
    reusable_codebooks,
    reusable_shards,
)
from realm_jax.processes import WorkerSlice
from realm_jax.retrieval.embed import CorpusRows
from realm_jax.retrieval.scann import ScannConfig
from realm_jax.storage import Damaged, FileEntry, Folder, sha256_hex

logger = logging.getLogger(__name__)

CHECKED_ROWS = 64  # rows of a generation that are embedded a second time before it is published
CHUNK = ".bin"
TOLERANCE = 0.02  # relative to such a vector's length: rounding to bfloat16 may change it so much


class Rejected(Exception):
    """A generation was built but failed its quality check."""


class Chunk(NamedTuple):
    """Rows first … last − 1 of the corpus, all in one segment.

    Attributes:
        segment: its fingerprint.
        within: index of the first row in the segment.
        first: first row of the corpus.
        last: row after the last.
    """

    segment: str
    within: int
    first: int
    last: int

    @property
    def name(self) -> str:
        """Return the prefix of the names of its files."""
        return row_range_name(self.first, self.last)

    @property
    def key(self) -> tuple[str, int, int]:
        """Return its segment and its rows there, which versions of a corpus may share."""
        return self.segment, self.within, self.within + self.last - self.first


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The corpus of a builder.

    Attributes:
        fingerprint: fingerprint of the version of the corpus.
        tokenizer: its fingerprint.
        segments: fingerprint and number of rows of each.
        read: (first, last) → rows in document layout.
    """

    fingerprint: str
    tokenizer: str
    segments: tuple[tuple[str, int], ...]
    read: Callable[[int, int], CorpusRows]

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.segments)

    def chunks(self, size: int) -> list[Chunk]:
        """Divide the corpus into chunks of at most `size` rows, each in one segment."""
        chunks, start = [], 0
        for segment, rows in self.segments:
            for within in range(0, rows, size):
                last = min(within + size, rows)
                chunks.append(Chunk(segment, within, start + within, start + last))
            start += rows
        return chunks


Embed = Callable[[CorpusRows], NDArray[np.float32]]
Check = Callable[[], None]  # called between chunks; an exception ends the work, and the next builder resumes there


@dataclasses.dataclass(frozen=True)
class Builder:
    """Build generations.

    Attributes:
        folder: shared with the trainer.
        corpus: corpus that is embedded.
        dtype: dtype of the stored vectors, 'float32' or 'bfloat16'.
        chunk_rows: rows of a chunk.
        worker: share of this process.
        check: called between chunks; an exception ends the work.
        on_progress: called with the numbers of finished and of all chunks.
        searches: how hosts search; None if they do not.
        min_recall: minimum recall that a searcher must have, 0 to 1.
    """

    folder: Folder
    corpus: Corpus
    dtype: str
    chunk_rows: int
    worker: WorkerSlice = WorkerSlice()
    check: Check = lambda: None
    on_progress: Callable[[int, int], None] = lambda done, total: None
    searches: ScannConfig | None = None
    min_recall: float = 0.0

    def build(self, export: Export, embed: Embed, queries: NDArray[np.float32]) -> Manifest:
        """Build and publish the generation of an export, or return the published one.

        Args:
            export: whose encoders embed the corpus.
            embed: rows → vectors [rows, width].
            queries: vectors of the export's sample queries, [count, width].

        Raises:
            Damaged: a check failed; another build makes the damaged part again.
            Rejected: the recall of the searcher is too low.
            StorageError: the shared folder cannot be read or written.
        """
        width = queries.shape[1]
        name = current_name(self.folder, export, self.corpus.fingerprint)
        published = read_manifest(self.folder, name)
        if published is not None:
            logger.info("generation %s is there already", name)
            return published
        began = time.monotonic()
        chunks = self.corpus.chunks(self.chunk_rows)
        # An edit of the corpus keeps the chunks of unchanged segments: those of a published generation are shared.
        same = indexes_with_same_encoder(self.folder, export.step, export.parameters, self.dtype, width)
        shared: dict[tuple[str, int, int], FileEntry] = {c[:3]: c.file for other in same for c in other.chunks}
        self._embed_missing(name, [chunk for chunk in chunks if chunk.key not in shared], embed, width)
        embedded = time.monotonic()

        # --- The manifest's files, checked
        written = self._written_files(name)
        chunk_files: list[ChunkFile] = []
        for chunk in chunks:
            entry = shared.get(chunk.key)
            if entry is None:
                if (file := written.get(chunk.name)) is None:
                    raise Damaged(f"{self.folder.path(f'index/{name}')}: the rows {chunk.name} were removed")
                size = (chunk.last - chunk.first) * width * numpy_dtype(self.dtype).itemsize
                entry = FileEntry(f"index/{name}/{file}", size, file.removesuffix(CHUNK).rpartition("-")[2])
            chunk_files.append(ChunkFile(*chunk.key, entry))
        manifest = Manifest(
            name, export.step, export.parameters, self.corpus.fingerprint, self.corpus.tokenizer, self.corpus.rows,
            width, self.dtype, tuple(chunk_files), searcher=None, recall={}, seconds={},
        )  # fmt: skip
        self._self_check(manifest, chunks, embed)
        checked = time.monotonic()
        manifest = self._with_searcher(manifest, queries)
        times = {"embed": embedded - began, "check": checked - embedded, "searcher": time.monotonic() - checked}
        manifest = dataclasses.replace(manifest, seconds={key: round(value, 3) for key, value in times.items()})

        # --- Publication, unless another process was faster
        published = read_manifest(self.folder, name)
        if published is not None:
            logger.info("generation %s was published by another process", name)
            return published
        files = [(file.name, *file.name.rsplit("/", 1)) for file in manifest.files]
        present = {parent: {*self.folder.names(parent)} for parent in {parent for _, parent, _ in files}}
        for path, parent, file_name in files:
            if file_name not in present[parent]:
                raise Damaged(f"{self.folder.path(path)} was removed while its generation was built")
        self.folder.write_json(f"index/{name}/{MANIFEST}", manifest.to_json())
        logger.info("published generation %s (%.1f s)", name, time.monotonic() - began)
        return manifest

    def _with_searcher(self, manifest: Manifest, queries: NDArray[np.float32]) -> Manifest:
        """Return the manifest with the searcher's files and recall, if hosts search. Raises Rejected, Damaged."""
        if self.searches is None:
            return manifest
        reusable = reusable_shards(self.folder, manifest, self.searches)
        reusable = reusable or reusable_codebooks(self.folder, manifest, self.searches)
        if reusable is not None:
            with_searcher = self._build_and_measure(manifest, queries, reusable)
            name, value = next(iter(with_searcher.recall.items()))
            recall_before = codebook_source(reusable.manifest)["recall"].get(name, 1.0)
            if value >= max(self.min_recall, recall_before - MAX_RECALL_LOSS):
                return with_searcher
            message = "the centroids of generation %s no longer fit: %s %.3f after %.3f; learning new ones"
            logger.info(message, reusable.manifest.generation, name, value, recall_before)
        with_searcher = self._build_and_measure(manifest, queries)
        name, value = next(iter(with_searcher.recall.items()))
        if value < self.min_recall:
            reason = f"{name} of its searcher is {value:.3f}, below config.scann.min_recall={self.min_recall:g}"
            reject(self.folder, manifest.generation, reason, retryable=False)
            raise Rejected(f"generation {manifest.generation} is not published: {reason}; raise scann.leaves_searched")
        return with_searcher

    def _build_and_measure(
        self, manifest: Manifest, queries: NDArray[np.float32], reusable: ReusableIndex | None = None
    ) -> Manifest:
        """Return the manifest with a new searcher and its recall; for `reusable` see `build_searchers`."""
        assert self.searches is not None
        work_order = self.worker.work_order
        searcher = build_searchers(self.folder, manifest, self.searches, work_order, self.check, reusable)
        manifest = dataclasses.replace(manifest, searcher=searcher)
        return dataclasses.replace(manifest, recall=measure(self.folder, manifest, queries))

    def _embed_missing(self, name: str, chunks: list[Chunk], embed: Embed, width: int) -> None:
        """Embed every chunk that is not written.

        Reading, the devices and writing overlap; a write that fails ends the work at the next chunk.
        """

        def missing_chunks() -> Iterator[Chunk]:
            for number in self.worker.work_order(len(chunks)):
                self.check()
                written = self._written_files(name)  # listed again for each chunk, because other processes write too
                self.on_progress(len({*written} & {chunk.name for chunk in chunks}), len(chunks))
                if chunks[number].name not in written:
                    yield chunks[number]

        with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
            reads = ((chunk, reader.submit(self.corpus.read, *chunk[2:])) for chunk in missing_chunks())
            next_read, write = next(reads, None), None
            while next_read is not None:
                (chunk, rows), next_read = next_read, next(reads, None)
                vectors = embed(rows.result())  # [rows, width]
                if vectors.shape[1] != width:
                    raise Damaged(f"the exported encoders give vectors of size {vectors.shape[1]}, not {width}")
                if write is not None:
                    write.result()
                write = writer.submit(self._write, name, chunk, vectors)
            if write is not None:
                write.result()

    def _written_files(self, name: str) -> dict[str, str]:
        """Return the name of each written chunk of a generation → the name of its file."""
        return files_by_row_range(self.folder, f"index/{name}", CHUNK)

    def _write(self, name: str, chunk: Chunk, vectors: NDArray[np.float32]) -> None:
        stored = vectors.astype(numpy_dtype(self.dtype))
        parent, data = f"index/{name}", np.ascontiguousarray(stored).view(np.uint8).reshape(-1).data
        file = f"{chunk.name}-{sha256_hex(data)}{CHUNK}"
        check_vectors(stored, self.folder.path(f"{parent}/{file}"))
        if file not in self.folder.names(parent):  # another process may have written it, and published
            self.folder.write(f"{parent}/{file}", data)

    def _self_check(self, manifest: Manifest, chunks: list[Chunk], embed: Embed) -> None:
        """Read every chunk back, and embed a few rows a second time.

        A damaged chunk is removed, or the generation that it is shared with is rejected, so that it is embedded again.
        Raises Damaged.
        """
        rows = np.linspace(0, manifest.rows - 1, min(CHECKED_ROWS, manifest.rows)).astype(np.int64)
        for chunk, chunk_file in zip(chunks, manifest.chunks, strict=True):
            self.check()
            try:
                vectors = read_chunk(self.folder, manifest, chunk_file)  # [rows, width]
            except Damaged as error:
                discard_damaged_file(self.folder, manifest, chunk_file.file.name, error)
                raise
            sample = rows[(rows >= chunk.first) & (rows < chunk.last)]
            if not len(sample):
                continue
            sample_rows = [self.corpus.read(row, row + 1) for row in sample.tolist()]
            recomputed = embed(CorpusRows(*(np.concatenate(parts) for parts in zip(*sample_rows, strict=True))))
            distances = np.linalg.norm(
                recomputed - vectors[sample - chunk.first].astype(np.float32), axis=1
            )  # [sample]
            if (distances > TOLERANCE * np.linalg.norm(recomputed, axis=1)).any():
                path = self.folder.path(chunk_file.file.name)
                raise Damaged(f"{path} holds vectors of other passages")


def for_embedding(config: Config, devices: int) -> Config:
    """Return the config of a builder, which trains nothing, so that its devices need not divide training batches.

    Args:
        config: config of the trainer.
        devices: devices of the builder.
    """
    changes: dict[str, Any] = {"mesh.fsdp": 1, "mesh.model": 1, "optimizer.microbatches": 1}
    changes |= {f"model.reader.{name}": None for name in config.model.reader.changes}  # nothing is read
    return with_values(config, changes | {f"{name}.batch_size": devices for name in TASK_SECTIONS})
