"""Build one generation: embed the corpus chunk by chunk with an export's towers, check it, publish its manifest.

Any number of processes may build the same generation, and any of them may die: each takes
unclaimed chunks, its own share first and then the others' from the far end, and skips what is there. A chunk's bytes
depend on the export and the corpus alone, and its name on its bytes: work may be done twice, but no listed file is ever
written again. When to build what is `job.py`; what the files mean is `files.py`. Read
`Builder.build` next.
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
from realm_jax.index.files import (
    MANIFEST,
    ChunkFile,
    Export,
    Manifest,
    by_rows,
    check_vectors,
    current_name,
    drop_damaged,
    numpy_dtype,
    of_same_towers,
    read_chunk,
    read_manifest,
    reject,
    rows_name,
)  # fmt: skip
from realm_jax.index.searchers import (
    LOSS,
    Earlier,
    build_searchers,
    earlier_searcher,
    measure,
    shared_shards,
    trained_on,
)
from realm_jax.processes import WorkShare
from realm_jax.retrieval.embed import CorpusRows
from realm_jax.retrieval.scann import ScannConfig
from realm_jax.storage import Damaged, FileEntry, Folder, digest

logger = logging.getLogger(__name__)

CHECKED_ROWS = 64  # rows of a generation that are embedded a second time before it is published
CHUNK = ".bin"
TOLERANCE = 0.02  # of such a vector's length: what rounding to bfloat16 may change


class Rejected(Exception):
    """A generation was built but failed its quality check."""


class Chunk(NamedTuple):
    """Rows first … last − 1 of the corpus, which lie in one segment, where they begin at row `within`."""

    segment: str
    within: int
    first: int
    last: int

    @property
    def name(self) -> str:
        """How its files begin."""
        return rows_name(self.first, self.last)

    @property
    def key(self) -> tuple[str, int, int]:
        """What it holds: rows of a segment, which any version of a corpus may have."""
        return self.segment, self.within, self.within + self.last - self.first


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What a builder needs of a corpus. segments: (fingerprint, rows) in order; read: rows in document layout."""

    fingerprint: str
    tokenizer: str
    segments: tuple[tuple[str, int], ...]
    read: Callable[[int, int], CorpusRows]

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.segments)

    def chunks(self, size: int) -> list[Chunk]:
        """The corpus in chunks of at most `size` rows, none over the border of two segments."""
        found, start = [], 0
        for segment, rows in self.segments:
            for within in range(0, rows, size):
                last = min(within + size, rows)
                found.append(Chunk(segment, within, start + within, start + last))
            start += rows
        return found


Embed = Callable[[CorpusRows], NDArray[np.float32]]
Check = Callable[[], None]  # called between chunks; what it raises ends the work, and the next builder resumes there


@dataclasses.dataclass(frozen=True)
class Builder:
    """Where and how to build.

    on_progress: called with chunks done and chunks. searches: how hosts search, None if they do not; then min_recall
    is the least that a searcher must find.
    """

    folder: Folder
    corpus: Corpus
    dtype: str
    chunk_rows: int
    share: WorkShare = WorkShare()
    check: Check = lambda: None
    on_progress: Callable[[int, int], None] = lambda done, total: None
    searches: ScannConfig | None = None
    min_recall: float = 0.0

    def build(self, export: Export, embed: Embed, queries: NDArray[np.float32]) -> Manifest:
        """Build and publish the generation of an export, or take the one that is published already.

        queries: the export's sample [count, width]. Raises Damaged when a check fails; Rejected when the
        searcher finds too little; StorageError when storage fails.
        """
        width = queries.shape[1]
        name = current_name(self.folder, export, self.corpus.fingerprint)
        published = read_manifest(self.folder, name)
        if published is not None:
            logger.info("generation %s is there already", name)
            return published
        began = time.monotonic()
        chunks = self.corpus.chunks(self.chunk_rows)
        shared = self._shared(export, width)
        self._embed_missing(name, [chunk for chunk in chunks if chunk.key not in shared], embed, width)
        embedded = time.monotonic()
        written = self._written(name)
        files = [shared.get(chunk.key) or self._file(name, chunk, written, width) for chunk in chunks]
        listed = tuple(ChunkFile(*chunk.key, file) for chunk, file in zip(chunks, files, strict=True))
        manifest = Manifest(
            name, export.step, export.parameters, self.corpus.fingerprint, self.corpus.tokenizer, self.corpus.rows,
            width, self.dtype, listed, searcher=None, recall={}, seconds={},
        )  # fmt: skip
        self._self_check(manifest, chunks, embed)
        checked = time.monotonic()
        manifest = self._with_searcher(manifest, queries)
        times = {"embed": embedded - began, "check": checked - embedded, "searcher": time.monotonic() - checked}
        manifest = dataclasses.replace(manifest, seconds={key: round(value, 3) for key, value in times.items()})
        earlier = read_manifest(self.folder, name)
        if earlier is not None:
            logger.info("generation %s was published by another process", name)
            return earlier
        self._check_presence(manifest)
        self.folder.write_json(f"index/{name}/{MANIFEST}", manifest.to_json())
        logger.info("published generation %s (%.1f s)", name, time.monotonic() - began)
        return manifest

    def _check_presence(self, manifest: Manifest) -> None:
        """Raise Damaged when somebody removed what is about to be published."""
        files = [(file.name, *file.name.rsplit("/", 1)) for file in manifest.files]
        there = {home: {*self.folder.names(home)} for home in {home for _, home, _ in files}}
        for path, home, name in files:
            if name not in there[home]:
                raise Damaged(f"{self.folder.path(path)} was removed while its generation was built")

    def _with_searcher(self, manifest: Manifest, queries: NDArray[np.float32]) -> Manifest:
        """The manifest with the searcher's files and recall, where hosts search."""
        if self.searches is None:
            return manifest
        earlier = shared_shards(self.folder, manifest, self.searches)
        earlier = earlier or earlier_searcher(self.folder, manifest, self.searches)
        if earlier is not None:
            found = self._measured(manifest, queries, earlier)
            (name, value), wanted = next(iter(found.recall.items())), trained_on(earlier.generation)["recall"]
            if value >= max(self.min_recall, wanted.get(name, 1.0) - LOSS):
                return found
            message = "the centroids of generation %s no longer suit: %s %.3f after %.3f; they are learnt anew"
            logger.info(message, earlier.generation.generation, name, value, wanted.get(name, 1.0))
        found = self._measured(manifest, queries)
        name, value = next(iter(found.recall.items()))
        if value < self.min_recall:
            reason = f"{name} of its searcher is {value:.3f}, below config.scann.min_recall={self.min_recall:g}"
            reject(self.folder, manifest.generation, reason, again=False)
            raise Rejected(f"generation {manifest.generation} is not published: {reason}; raise scann.leaves_searched")
        return found

    def _measured(self, manifest: Manifest, queries: NDArray[np.float32], earlier: Earlier | None = None) -> Manifest:
        """The manifest with a searcher and its recall. earlier: as of `build_searchers`."""
        assert self.searches is not None
        built = build_searchers(self.folder, manifest, self.searches, self.share.order, self.check, earlier)
        manifest = dataclasses.replace(manifest, searcher=built)
        return dataclasses.replace(manifest, recall=measure(self.folder, manifest, queries))

    def _shared(self, export: Export, width: int) -> dict[tuple[str, int, int], FileEntry]:
        """Chunks that a published generation of the same towers has: what an edit of the corpus left as it was."""
        same = of_same_towers(self.folder, export.step, export.parameters, self.dtype, width)
        return {chunk[:3]: chunk.file for other in same for chunk in other.chunks}

    def _embed_missing(self, name: str, chunks: list[Chunk], embed: Embed, width: int) -> None:
        """Embed every chunk that is not written. Reading, the devices and writing overlap; a write that fails ends
        the work at the next chunk."""
        with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
            todo = ((chunk, reader.submit(self.corpus.read, *chunk[2:])) for chunk in self._todo(name, chunks))
            ahead, written = next(todo, None), None
            while ahead is not None:
                (chunk, rows), ahead = ahead, next(todo, None)
                vectors = embed(rows.result())
                if vectors.shape[1] != width:
                    raise Damaged(f"the export's towers give vectors of {vectors.shape[1]}, not {width}")
                if written is not None:
                    written.result()
                written = writer.submit(self._write, name, chunk, vectors)
            if written is not None:
                written.result()

    def _todo(self, name: str, chunks: list[Chunk]) -> Iterator[Chunk]:
        for number in self.share.order(len(chunks)):
            self.check()
            written = self._written(name)  # anew each time: others are at work
            self.on_progress(len({*written} & {chunk.name for chunk in chunks}), len(chunks))
            if chunks[number].name not in written:
                yield chunks[number]

    def _written(self, name: str) -> dict[str, str]:
        """Chunk's name → its file in a generation."""
        return by_rows(self.folder, f"index/{name}", CHUNK)

    def _write(self, name: str, chunk: Chunk, vectors: NDArray[np.float32]) -> None:
        stored = vectors.astype(numpy_dtype(self.dtype))
        home, data = f"index/{name}", np.ascontiguousarray(stored).view(np.uint8).reshape(-1).data
        file = f"{chunk.name}-{digest(data)}{CHUNK}"
        check_vectors(stored, self.folder.path(f"{home}/{file}"))
        if file not in self.folder.names(home):  # another process may have written it, and published
            self.folder.write(f"{home}/{file}", data)

    def _file(self, name: str, chunk: Chunk, written: dict[str, str], width: int) -> FileEntry:
        """What a manifest says of the file of a chunk. Raises Damaged if somebody removed it."""
        if (file := written.get(chunk.name)) is None:
            raise Damaged(f"{self.folder.path(f'index/{name}')}: the rows {chunk.name} were removed")
        size = (chunk.last - chunk.first) * width * numpy_dtype(self.dtype).itemsize
        return FileEntry(f"index/{name}/{file}", size, file.removesuffix(CHUNK).rpartition("-")[2])

    def _self_check(self, manifest: Manifest, chunks: list[Chunk], embed: Embed) -> None:
        """Read every chunk back, and embed a few rows a second time.

        A damaged chunk is removed, or the generation that it is shared with is refused, so that it is embedded again.
        Raises Damaged.
        """
        rows = np.linspace(0, manifest.rows - 1, min(CHECKED_ROWS, manifest.rows)).astype(np.int64)
        for chunk, listed in zip(chunks, manifest.chunks, strict=True):
            self.check()
            try:
                vectors = read_chunk(self.folder, manifest, listed)
            except Damaged as fault:
                drop_damaged(self.folder, manifest, listed.file.name, fault)
                raise
            sample = rows[(rows >= chunk.first) & (rows < chunk.last)]
            if not len(sample):
                continue
            read = [self.corpus.read(row, row + 1) for row in sample.tolist()]
            fresh = embed(CorpusRows(*(np.concatenate(parts) for parts in zip(*read, strict=True))))
            error = np.linalg.norm(fresh - vectors[sample - chunk.first].astype(np.float32), axis=1)
            if (error > TOLERANCE * np.linalg.norm(fresh, axis=1)).any():
                raise Damaged(f"{self.folder.path(listed.file.name)} holds vectors that are not those of its passages")


def for_embedding(config: Config, devices: int) -> Config:
    """The config on so many devices of the builder's own: nothing is trained there, so training batch sizes are
    irrelevant."""
    own: dict[str, Any] = {"mesh.fsdp": 1, "mesh.model": 1, "optimizer.microbatches": 1}
    own |= {f"model.reader.{name}": None for name in config.model.reader.changes}  # nothing is read
    return with_values(config, own | {f"{name}.batch_size": devices for name in TASK_SECTIONS})
