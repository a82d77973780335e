"""The approximate searchers of a generation, as files in a shared folder: built in shards, verified, loaded.

    index/<generation>/scann-<settings>/<first>-<last>-<writer>/…      files of ScaNN for the rows first … last − 1
    index/<generation>/scann-<settings>/<first>-<last>-<writer>.done   its settings; every file, size and checksum

Shards are distributed like chunks (`build.py`), and those with a `.done` mark are not built again. Learning the
centroids of a searcher's tree and the codebook of its quantizer takes a third of a build's time for 13 million rows and
two thirds for 400,000 (`benchmarks/README.md`). So the shards of a generation take both from an earlier generation, as
long as the measured recall is good enough (`MAX_RECALL_LOSS`). After an edit of the corpus, shards of unchanged rows
are shared, and the new rows have a shard of their own: it is searched exactly while it is small, and with a tree once
it is large (`ScannConfig.tree_from`). How shards are searched is `retrieval/scann.py`.
"""

import dataclasses
import json
import logging
import tempfile
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from realm_jax.corpora.pool import ordered_parallel_map
from realm_jax.host import usable_cores
from realm_jax.indexing.files import (
    IncompatibleIndex,
    Manifest,
    discard_damaged_file,
    export_step,
    files_by_row_range,
    generation_names,
    indexes_with_same_encoder,
    load_vectors,
    read_manifests,
    read_rejection,
    row_range_name,
)
from realm_jax.retrieval.scann import (
    ScannConfig,
    Searcher,
    Shard,
    build_shard,
    exact_rows,
    load_shard,
    recall,
    renew_shard,
    shard_ranges,
)
from realm_jax.storage import Damaged, FileEntry, Folder, StorageError, sha256_hex

logger = logging.getLogger(__name__)

DONE = ".done"
MEASURED_QUERIES = 256
MEASURED_DEPTH = 8  # K of the paper
# Recall that reused centroids and codebooks may cost: twice the standard error of 2,048 hits at 0.95.
MAX_RECALL_LOSS = 0.01
UNUSABLE = (Damaged, StorageError, FileNotFoundError, RuntimeError, ValueError)  # files: damaged, gone, another ScaNN's
PARALLEL_RENEWALS = 8  # shards, each of which needs up to 2 GB of memory


class ReusableIndex(NamedTuple):
    """A generation whose shards, or centroids and codebooks, another generation can use.

    Attributes:
        manifest: manifest of the earlier generation.
        shared: its first shards, if both begin with the same vectors. If there are none, every new shard takes the
            centroids and codebook of the shard of the same rows.
    """

    manifest: Manifest
    shared: tuple[dict[str, Any], ...] = ()


class ShardTask(NamedTuple):
    """A shard to build.

    Attributes:
        rows: first row, and row after the last.
        name: name of its folder.
        earlier: entry of the shard whose centroids and codebook it takes; None to learn them.
    """

    rows: tuple[int, int]
    name: str
    earlier: dict[str, Any] | None


def build_searchers(
    folder: Folder,
    manifest: Manifest,
    settings: ScannConfig,
    work_order: Callable[[int], list[int]],
    check: Callable[[], None],
    reusable: ReusableIndex | None = None,
) -> dict[str, Any]:
    """Build every shard of a generation that has no done mark.

    Args:
        folder: the shared folder.
        manifest: manifest of the generation.
        settings: settings of ScaNN.
        work_order: gives the order in which this process builds so many shards.
        check: called between shards; an exception that it raises ends the work.
        reusable: the generation from which shards or codebooks are taken; None to learn everything.

    Returns:
        The entry of the searcher in the manifest.

    Raises:
        Damaged: a shard is missing, or its mark is damaged.
    """
    shards = list(reusable.shared) if reusable else []
    teacher = reusable.manifest if reusable and not reusable.shared else None  # its codebooks are taken
    start = shards[-1]["last"] if shards else 0
    ranges, settings_json = shard_ranges(manifest.rows, settings.shard_rows, start), dataclasses.asdict(settings)
    key = sha256_hex(json.dumps([settings_json, teacher and teacher.generation], sort_keys=True).encode())[:6]
    parent = f"index/{manifest.generation}/scann-{key}"  # builders with other settings use other folders

    def missing_shards() -> Iterator[ShardTask]:
        for number in work_order(len(ranges)):
            check()
            name = row_range_name(*ranges[number])
            if name not in files_by_row_range(folder, parent, DONE):
                earlier = teacher.searcher["shards"][number] if teacher and teacher.searcher else None
                yield ShardTask(ranges[number], f"{parent}/{name}-{uuid.uuid4().hex[:8]}", earlier)

    # ScaNN trains with all cores, but encodes rows by existing centroids with one core.
    workers = 1 if teacher is None else min(len(ranges), usable_cores(), PARALLEL_RENEWALS)
    build = partial(_build, folder, manifest, settings)
    for failure in ordered_parallel_map(build, missing_shards(), workers, few=2):
        if failure:
            logger.warning("%s; the shard learns new centroids", failure)
    marks = files_by_row_range(folder, parent, DONE)
    for first, last in ranges:
        path = f"{parent}/{marks.get(row_range_name(first, last))}"
        try:
            shards.append(folder.read_json(path) | {"first": first, "last": last})
        except FileNotFoundError:
            raise Damaged(f"{folder.path(parent)}: rows {first} to {last} have no searcher") from None
        except Damaged:
            folder.remove(path)
            raise
    source = codebook_source(reusable.manifest) if reusable else None
    return {"settings": settings_json, "shards": shards, "trained": source}


def codebook_source(manifest: Manifest) -> dict[str, Any]:
    """Return name and recall of the generation from whose vectors a searcher's centroids and codebooks were learned."""
    assert manifest.searcher is not None, "hosts search"
    return manifest.searcher.get("trained") or {"generation": manifest.generation, "recall": manifest.recall}


def reusable_codebooks(folder: Folder, manifest: Manifest, settings: ScannConfig) -> ReusableIndex | None:
    """Return the newest generation of an earlier step whose centroids and codebooks fit the shards of this one.

    Args:
        folder: the shared folder.
        manifest: manifest of the generation that is being built.
        settings: settings of ScaNN.
    """
    names = [name for name in reversed(generation_names(folder)) if export_step(name) < manifest.step]
    required = (dataclasses.asdict(settings), manifest.rows, manifest.width)
    ranges = shard_ranges(manifest.rows, settings.shard_rows)
    for other in read_manifests(folder, names):
        searcher = other.searcher
        if searcher is None or (searcher["settings"], other.rows, other.width) != required:
            continue
        trees = [(shard["first"], shard["last"]) for shard in searcher["shards"] if shard["leaves"]]
        if trees == ranges and read_rejection(folder, other.generation) is None:
            return ReusableIndex(other)
    return None


def reusable_shards(folder: Folder, manifest: Manifest, settings: ScannConfig) -> ReusableIndex | None:
    """Return the generation of the same encoder with the most shards of rows that an edit of the corpus did not change.

    Only its first shards count, and only those with a tree. None if it has no such shard.

    Args:
        folder: the shared folder.
        manifest: manifest of the generation that is being built.
        settings: settings of ScaNN.
    """
    best, settings_json = None, dataclasses.asdict(settings)
    for other in indexes_with_same_encoder(folder, manifest.step, manifest.parameters, manifest.dtype, manifest.width):
        if other.searcher is None or other.searcher["settings"] != settings_json:
            continue
        # Number of first rows that have the same vectors in both generations, in complete chunks.
        equal_chunks = takewhile(lambda pair: pair[0] == pair[1], zip(manifest.chunks, other.chunks, strict=False))
        rows = sum(chunk.last - chunk.first for chunk, _ in equal_chunks)
        trees = takewhile(lambda shard: shard["leaves"], other.searcher["shards"])
        shared = tuple(shard for shard in trees if shard["last"] <= rows)
        if shared and (best is None or shared[-1]["last"] > best.shared[-1]["last"]):
            best = ReusableIndex(other, shared)
    return best


def load_searcher(
    folder: Folder, manifest: Manifest, vectors: NDArray, stored_to_row: NDArray[np.int32] | None = None
) -> Searcher:
    """Load the searcher of a generation.

    Args:
        folder: the shared folder.
        manifest: manifest of the generation.
        vectors: its stored vectors, [stored rows, width].
        stored_to_row: the row in the corpus of each stored row, as in `Searcher`.

    Raises:
        Damaged: a file is missing or damaged.
        IncompatibleIndex: there is no searcher, or this machine's ScaNN cannot load it.
    """
    if manifest.searcher is None:
        raise IncompatibleIndex(
            f"generation {manifest.generation} has no searcher; its builder needs retrieval.backend=scann"
        )
    shards = tuple(_load(folder, shard) for shard in manifest.searcher["shards"])
    return Searcher(shards, vectors, manifest.searcher["settings"]["budget"], stored_to_row)


def _load(folder: Folder, shard: dict[str, Any]) -> Shard:
    searcher_name = f"searcher of rows {shard['first']} to {shard['last']}"
    try:
        paths = [folder.local_path(FileEntry(*file)) for file in shard["files"]]
        return load_shard(paths[0].parent, shard["first"], shard["last"])
    except Damaged as error:
        raise Damaged(f"{searcher_name}: {error}") from None
    except FileNotFoundError as error:  # staged, and removed by another process of this machine
        raise StorageError(f"{searcher_name}: {error}") from None
    except (RuntimeError, ValueError, OSError) as error:  # its files are sound
        raise IncompatibleIndex(f"{searcher_name} cannot be loaded here: {error}") from None


def measure(folder: Folder, manifest: Manifest, queries: NDArray[np.float32]) -> dict[str, float]:
    """Measure the recall of a generation's searcher against exact search.

    A shard that cannot be loaded loses its done mark, or the generation that it is shared with is rejected, so that it
    is built again.

    Args:
        folder: the shared folder.
        manifest: manifest of the generation.
        queries: vectors of the export's sample queries, [count, width].

    Returns:
        {'recall@k': share}.

    Raises:
        Damaged: a shard cannot be loaded.
    """
    assert manifest.searcher is not None, "hosts search"
    vectors, shards = load_vectors(folder, manifest), []
    try:
        for shard in manifest.searcher["shards"]:
            try:
                shards.append(_load(folder, shard))
            except Damaged as error:
                parent = shard["files"][0][0].rpartition("/")[0]
                discard_damaged_file(folder, manifest, f"{parent}{DONE}", error)
                raise
    finally:
        folder.remove_local_copies(f"index/{manifest.generation}")
    searcher = Searcher(tuple(shards), vectors, manifest.searcher["settings"]["budget"])
    queries, depth = queries[:MEASURED_QUERIES], min(MEASURED_DEPTH, manifest.rows)
    approximate_rows = searcher.search(queries, depth)  # [queries, depth]
    return {f"recall@{depth}": recall(approximate_rows, exact_rows(queries, vectors, depth))}


def _build(folder: Folder, manifest: Manifest, settings: ScannConfig, task: ShardTask) -> str:
    """Build one shard; return why an earlier shard's centroids could not be used, '' if they were or none exist."""
    vectors = load_vectors(folder, manifest, *task.rows, np.float32)  # [rows, width]
    with tempfile.TemporaryDirectory(prefix="realm-scann-") as scratch:
        output, tree_size, failure = Path(scratch, "renewed"), None, ""
        output.mkdir()
        if task.earlier is not None:
            try:
                with tempfile.TemporaryDirectory(
                    prefix="realm-scann-"
                ) as copy:  # others may remove the files meanwhile
                    for file in task.earlier["files"]:
                        entry = FileEntry(*file)
                        Path(copy, Path(entry.name).name).write_bytes(folder.read_verified(entry))
                    renew_shard(vectors, Path(copy), output)
                tree_size = {key: task.earlier[key] for key in ("leaves", "leaves_searched")}
            except UNUSABLE as error:
                failure = str(error)
        if tree_size is None:
            output = Path(scratch, "learned")
            output.mkdir()
            tree_size = build_shard(vectors, settings, output)
        files = [folder.write_entry(f"{task.name}/{path.name}", path.read_bytes()) for path in sorted(output.iterdir())]
    folder.write_json(f"{task.name}{DONE}", tree_size | {"files": files})
    return failure
