"""The approximate searchers of a generation, as files in a shared folder: built in shards, verified, loaded.

    index/<generation>/scann-<settings>/<first>-<last>-<writer>/…      what ScaNN writes for the rows first … last − 1
    index/<generation>/scann-<settings>/<first>-<last>-<writer>.done   what was chosen; every file, size and checksum

Shards are shared out like chunks (`builder.py`), and those with a `.done` mark are not built again. Most of a build's
time goes into what a searcher learns: the centroids of its tree and the codebook of its quantiser. So the shards of a
generation take both from the generation before, as long as the measured recall holds (`LOSS`). How they search is
`retrieval/scann.py`.
"""

import dataclasses
import json
import logging
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realm_jax.refresh.generations import (
    IncompatibleIndex,
    Manifest,
    by_rows,
    export_step,
    generation_names,
    load_vectors,
    manifests,
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
LOSS = 0.005  # of recall, against the generation that centroids and codebooks were learnt from, before they are anew


def build_searchers(
    folder: Folder,
    manifest: Manifest,
    settings: ScannConfig,
    order: Callable[[int], list[int]],
    check: Callable[[], None],
    trained: Manifest | None = None,
) -> dict[str, Any]:
    """Build every shard that has no done mark; the manifest's entry of the searcher. order: of this process's work;
    trained: the generation whose centroids and codebooks to use (None: to be learnt)."""
    ranges, chosen = shard_ranges(manifest.rows, settings.shard_rows), dataclasses.asdict(settings)
    source = None if trained is None else trained_on(trained)
    settled = json.dumps([chosen, trained and trained.generation], sort_keys=True)
    key = digest(settled.encode())[:6]  # builders with other settings do not meet
    home = f"index/{manifest.generation}/scann-{key}"
    for number in order(len(ranges)):
        check()
        name = rows_name(*ranges[number])
        if name not in by_rows(folder, home, DONE):
            before = None if trained is None or trained.searcher is None else trained.searcher["shards"][number]
            _build(folder, manifest, settings, ranges[number], f"{home}/{name}-{uuid.uuid4().hex[:8]}", before)
    if trained is not None:
        folder.unstage(f"index/{trained.generation}")
    marks, shards = by_rows(folder, home, DONE), []
    for first, last in ranges:
        path = f"{home}/{marks.get(rows_name(first, last))}"
        try:
            shards.append(folder.read_json(path) | {"first": first, "last": last})
        except FileNotFoundError:
            raise Damaged(f"{folder.path(home)}: rows {first} to {last} have no searcher") from None
        except Damaged:
            folder.remove(path)
            raise
    return {"settings": chosen, "shards": shards, "trained": source}


def trained_on(manifest: Manifest) -> dict[str, Any]:
    """The generation that a searcher's centroids and codebooks were learnt from, and the recall that it had."""
    assert manifest.searcher is not None, "hosts search"
    return manifest.searcher.get("trained") or {"generation": manifest.generation, "recall": manifest.recall}


def earlier_searcher(folder: Folder, manifest: Manifest, settings: ScannConfig) -> Manifest | None:
    """The newest generation of an earlier step whose centroids and codebooks suit the shards of this one."""
    names = [name for name in reversed(generation_names(folder)) if export_step(name) < manifest.step]
    wanted = (dataclasses.asdict(settings), manifest.rows, manifest.width)
    for other in manifests(folder, names):
        searcher = other.searcher
        if searcher is None or (searcher["settings"], other.rows, other.width) != wanted:
            continue
        if all(shard["leaves"] for shard in searcher["shards"]) and rejection(folder, other.generation) is None:
            return other
    return None


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

    A shard that cannot be loaded loses its done mark, so that it is built again. Raises Damaged.
    """
    assert manifest.searcher is not None, "hosts search"
    vectors, shards = load_vectors(folder, manifest), []
    try:
        for shard in manifest.searcher["shards"]:
            try:
                shards.append(_load(folder, shard))
            except Damaged:
                folder.remove(shard["files"][0][0].rpartition("/")[0] + DONE)
                raise
    finally:
        folder.unstage(f"index/{manifest.generation}")
    searcher = Searcher(tuple(shards), vectors, manifest.searcher["settings"]["budget"])
    asked, depth = queries[:MEASURED_QUERIES], min(MEASURED_DEPTH, manifest.rows)
    return {f"recall@{depth}": recall(searcher.search(asked, depth), exact_rows(asked, vectors, depth))}


def _build(
    folder: Folder, manifest: Manifest, settings: ScannConfig, rows: tuple[int, int], name: str,
    before: dict[str, Any] | None,
) -> None:  # fmt: skip
    """Build one shard. before: what the done mark of the shard says whose centroids and codebook it takes."""
    vectors = load_vectors(folder, manifest, *rows, np.float32)
    with tempfile.TemporaryDirectory(prefix="realm-scann-") as scratch:
        trained = None if before is None else _files_of(folder, before)
        if trained is None:
            chosen = build_shard(vectors, settings, Path(scratch))
        else:
            renew_shard(vectors, trained, Path(scratch))
            chosen = {key: before[key] for key in ("leaves", "leaves_searched")}  # type: ignore[index]
        files = [folder.put(f"{name}/{path.name}", path.read_bytes()) for path in sorted(Path(scratch).iterdir())]
    folder.write_json(f"{name}{DONE}", chosen | {"files": files})


def _files_of(folder: Folder, shard: dict[str, Any]) -> Path | None:
    """The folder of a shard's verified files; None, with a log line, if they cannot be had."""
    try:
        return [folder.local(FileEntry(*file)) for file in shard["files"]][0].parent
    except (Damaged, StorageError, FileNotFoundError) as fault:
        logger.warning("%s; the shard learns its centroids anew", fault)
        return None
