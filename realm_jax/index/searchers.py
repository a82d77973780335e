"""The approximate searchers of a generation, as files in a shared folder: built in shards, verified, loaded.

    index/<generation>/scann-<settings>/<first>-<last>-<writer>/…      what ScaNN writes for the rows first … last − 1
    index/<generation>/scann-<settings>/<first>-<last>-<writer>.done   what was chosen; every file, size and checksum

Shards are shared out like chunks (`build.py`), and those with a `.done` mark are not built again. What a searcher
learns, the centroids of its tree and the codebook of its quantiser, takes a third of a build's time for 13 million rows
and two thirds for 400,000 (`benchmarks/README.md`). So the shards of a generation take both from the generation before,
as long as the measured recall holds (`LOSS`). After an edit of the corpus the shards of what it left as it was are
shared, and the rows that it added have a shard of their own: searched exactly while they are few, with a tree once they
are many (`ScannConfig.tree_from`). How they search is `retrieval/scann.py`.
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
from realm_jax.index.files import (
    IncompatibleIndex,
    Manifest,
    by_rows,
    drop_damaged,
    export_step,
    generation_names,
    load_vectors,
    manifests,
    of_same_towers,
    rejection,
    rows_name,
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
from realm_jax.storage import Damaged, FileEntry, Folder, StorageError, digest

logger = logging.getLogger(__name__)

DONE = ".done"
MEASURED_QUERIES = 256
MEASURED_DEPTH = 8  # K of the paper
LOSS = 0.01  # of recall that kept centroids and codebooks may cost; twice the standard error of 2,048 hits at .95
UNUSABLE = (Damaged, StorageError, FileNotFoundError, RuntimeError, ValueError)  # files: damaged, gone, another ScaNN's
RENEWED_AT_A_TIME = 8  # shards, each with 2 GB of its own where it has the most rows


class Earlier(NamedTuple):
    """A generation that spares another one some learning. shared: its first shards, which the other begins with too;
    without any, every shard of the other takes the centroids and the codebook of the one of the same rows."""

    generation: Manifest
    shared: tuple[dict[str, Any], ...] = ()


class ShardWork(NamedTuple):
    """A shard to be built: its rows, where its files go, and the done mark of the shard whose centroids it takes."""

    rows: tuple[int, int]
    name: str
    before: dict[str, Any] | None


def build_searchers(
    folder: Folder,
    manifest: Manifest,
    settings: ScannConfig,
    order: Callable[[int], list[int]],
    check: Callable[[], None],
    earlier: Earlier | None = None,
) -> dict[str, Any]:
    """Build every shard that has no done mark; the manifest's entry of the searcher. order: of this process's work;
    earlier: what to take from another generation (None: all is learnt)."""
    shards = list(earlier.shared) if earlier else []
    trained = earlier.generation if earlier and not earlier.shared else None
    start = shards[-1]["last"] if shards else 0
    ranges, chosen = shard_ranges(manifest.rows, settings.shard_rows, start), dataclasses.asdict(settings)
    key = digest(json.dumps([chosen, trained and trained.generation], sort_keys=True).encode())[:6]
    home = f"index/{manifest.generation}/scann-{key}"  # builders with other settings do not meet

    def missing() -> Iterator[ShardWork]:
        for number in order(len(ranges)):
            check()
            name = rows_name(*ranges[number])
            if name not in by_rows(folder, home, DONE):
                before = trained.searcher["shards"][number] if trained and trained.searcher else None
                yield ShardWork(ranges[number], f"{home}/{name}-{uuid.uuid4().hex[:8]}", before)

    # ScaNN learns with all cores, but encodes the rows of a searcher that it has with one.
    workers = 1 if trained is None else min(len(ranges), usable_cores(), RENEWED_AT_A_TIME)
    build = partial(_build, folder, manifest, settings)
    for failure in ordered_parallel_map(build, missing(), workers, few=2):
        if failure:
            logger.warning("%s; the shard learns its centroids anew", failure)
    marks = by_rows(folder, home, DONE)
    for first, last in ranges:
        path = f"{home}/{marks.get(rows_name(first, last))}"
        try:
            shards.append(folder.read_json(path) | {"first": first, "last": last})
        except FileNotFoundError:
            raise Damaged(f"{folder.path(home)}: rows {first} to {last} have no searcher") from None
        except Damaged:
            folder.remove(path)
            raise
    return {"settings": chosen, "shards": shards, "trained": trained_on(earlier.generation) if earlier else None}


def trained_on(manifest: Manifest) -> dict[str, Any]:
    """The generation that a searcher's centroids and codebooks were learnt from, and the recall that it had."""
    assert manifest.searcher is not None, "hosts search"
    return manifest.searcher.get("trained") or {"generation": manifest.generation, "recall": manifest.recall}


def earlier_searcher(folder: Folder, manifest: Manifest, settings: ScannConfig) -> Earlier | None:
    """The newest generation of an earlier step whose centroids and codebooks suit the shards of this one."""
    names = [name for name in reversed(generation_names(folder)) if export_step(name) < manifest.step]
    wanted = (dataclasses.asdict(settings), manifest.rows, manifest.width)
    ranges = shard_ranges(manifest.rows, settings.shard_rows)
    for other in manifests(folder, names):
        searcher = other.searcher
        if searcher is None or (searcher["settings"], other.rows, other.width) != wanted:
            continue
        trees = [(shard["first"], shard["last"]) for shard in searcher["shards"] if shard["leaves"]]
        if trees == ranges and rejection(folder, other.generation) is None:
            return Earlier(other)
    return None


def shared_shards(folder: Folder, manifest: Manifest, settings: ScannConfig) -> Earlier | None:
    """What an edit of the corpus left as it was: of the generations of the same towers, the longest run of shards with
    a tree over rows that this one begins with too. None if there is none."""
    best, chosen = None, dataclasses.asdict(settings)
    for other in of_same_towers(folder, manifest.step, manifest.parameters, manifest.dtype, manifest.width):
        if other.searcher is None or other.searcher["settings"] != chosen:
            continue
        trees = takewhile(lambda shard: shard["leaves"], other.searcher["shards"])
        rows = equal_rows(manifest, other)
        shared = tuple(shard for shard in trees if shard["last"] <= rows)
        if shared and (best is None or shared[-1]["last"] > best.shared[-1]["last"]):
            best = Earlier(other, shared)
    return best


def equal_rows(one: Manifest, other: Manifest) -> int:
    """How many rows two generations begin with that have the same vectors, in whole chunks."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one.chunks, other.chunks, strict=False))
    return sum(chunk.last - chunk.first for chunk, _ in pairs)


def load_searcher(
    folder: Folder, manifest: Manifest, vectors: NDArray, places: NDArray[np.int32] | None = None
) -> Searcher:
    """The searcher of a generation over its stored vectors. places: as of `Searcher`. Raises Damaged."""
    if manifest.searcher is None:
        raise IncompatibleIndex(
            f"generation {manifest.generation} has no searcher; its builder needs retrieval.backend=scann"
        )
    shards = tuple(_load(folder, shard) for shard in manifest.searcher["shards"])
    return Searcher(shards, vectors, manifest.searcher["settings"]["budget"], places)


def _load(folder: Folder, shard: dict[str, Any]) -> Shard:
    where = f"searcher of rows {shard['first']} to {shard['last']}"
    try:
        paths = [folder.local(FileEntry(*file)) for file in shard["files"]]
        return load_shard(paths[0].parent, shard["first"], shard["last"])
    except Damaged as fault:
        raise Damaged(f"{where}: {fault}") from None
    except FileNotFoundError as fault:  # staged, and removed by another process of this machine
        raise StorageError(f"{where}: {fault}") from None
    except (RuntimeError, ValueError, OSError) as fault:  # its files are sound
        raise IncompatibleIndex(f"{where} cannot be loaded here: {fault}") from None


def measure(folder: Folder, manifest: Manifest, queries: NDArray[np.float32]) -> dict[str, float]:
    """Recall of a generation's searcher against exact search, with sample queries of the same export.

    A shard that cannot be loaded loses its done mark, or the generation that it is shared with is refused, so that it
    is built again. Raises Damaged.
    """
    assert manifest.searcher is not None, "hosts search"
    vectors, shards = load_vectors(folder, manifest), []
    try:
        for shard in manifest.searcher["shards"]:
            try:
                shards.append(_load(folder, shard))
            except Damaged as fault:
                home = shard["files"][0][0].rpartition("/")[0]
                drop_damaged(folder, manifest, f"{home}{DONE}", fault)
                raise
    finally:
        folder.unstage(f"index/{manifest.generation}")
    searcher = Searcher(tuple(shards), vectors, manifest.searcher["settings"]["budget"])
    asked, depth = queries[:MEASURED_QUERIES], min(MEASURED_DEPTH, manifest.rows)
    return {f"recall@{depth}": recall(searcher.search(asked, depth), exact_rows(asked, vectors, depth))}


def _build(folder: Folder, manifest: Manifest, settings: ScannConfig, work: ShardWork) -> str:
    """Build one shard; why it could not be with what an earlier one has learnt, '' if it was or was not meant to."""
    vectors = load_vectors(folder, manifest, *work.rows, np.float32)
    with tempfile.TemporaryDirectory(prefix="realm-scann-") as scratch:
        made, chosen, failure = Path(scratch, "renewed"), None, ""
        made.mkdir()
        if work.before is not None:
            try:
                chosen = _renew(folder, vectors, work.before, made)
            except UNUSABLE as fault:
                failure = str(fault)
        if chosen is None:
            made = Path(scratch, "learnt")
            made.mkdir()
            chosen = build_shard(vectors, settings, made)
        files = [folder.put(f"{work.name}/{path.name}", path.read_bytes()) for path in sorted(made.iterdir())]
    folder.write_json(f"{work.name}{DONE}", chosen | {"files": files})
    return failure


def _renew(folder: Folder, vectors: NDArray[np.float32], before: dict[str, Any], made: Path) -> dict[str, Any]:
    """Write the files of a shard with the centroids and the codebook of an earlier one into `made`; what was chosen."""
    with tempfile.TemporaryDirectory(prefix="realm-scann-") as copied:  # others may remove the files meanwhile
        for file in before["files"]:
            entry = FileEntry(*file)
            Path(copied, Path(entry.name).name).write_bytes(folder.read_verified(entry))
        renew_shard(vectors, Path(copied), made)
    return {key: before[key] for key in ("leaves", "leaves_searched")}
