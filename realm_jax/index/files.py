"""Exports and generations: the protocol between trainer and index builder, as files in a shared folder.

    exports/<step>/<fingerprint>.safetensors        both towers of that step, float32
    exports/<step>/<fingerprint>-queries.safetensors   vectors of sample queries by them, float32
    exports/<step>/EXPORT.json                      put last; without it the export does not exist
    index/<step>-<nonce>/<first>-<last>-<sha>.bin   vectors of the rows first … last − 1, by the checksum of their bytes
    index/<step>-<nonce>/scann-…/                   searchers of the hosts, if any: `searchers.py`
    index/<step>-<nonce>/MANIFEST.json              put last; without it the generation does not exist
    index/<step>-<nonce>.refused                    why a generation must not be served; outlives it

Nothing that a record lists is ever written again. Writing exports is `index/exporter.py`, building generations
`build.py`, following them `index/watcher.py`; the jobs' status files are `heartbeat.py`.
Read `Manifest` next.
"""

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from realm_jax.storage import Damaged, FileEntry, Folder, digest, side_by_side

logger = logging.getLogger(__name__)

FORMAT_VERSION = 3
CHUNK_ROWS = 65_536  # passages in a file of vectors: what a killed builder loses at most; every builder's the same
KEPT = 3  # newest generations that stay, beside those in use or in checkpoints
EXPORT, MANIFEST, REFUSED = "EXPORT.json", "MANIFEST.json", ".refused"
QUERIES = "queries"  # the one array in the file of the sample query vectors
Arrays = dict[str, NDArray]


class IncompatibleIndex(Damaged):
    """Perhaps whole, but not for this run or this machine: building it again would not help."""


@dataclasses.dataclass(frozen=True)
class _Record:
    """The base of what a JSON file says of an export or a generation."""

    def to_json(self) -> dict[str, Any]:
        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Raises TypeError or ValueError for wrong entries."""
        return cls(**fields)


Record = TypeVar("Record", bound=_Record)


def _read_record(folder: Folder, name: str, kind: type[Record]) -> Record | None:
    """What a JSON file says; None if it is not there. Raises Damaged, also for another version, and for missing or
    wrong entries."""
    where = folder.path(name)
    try:
        found = folder.read_json(name)
    except FileNotFoundError:
        return None
    if (version := found.get("format_version")) != FORMAT_VERSION:
        raise Damaged(f"{where} has format version {version}, not {FORMAT_VERSION}")
    try:
        return kind.from_json({field.name: found[field.name] for field in dataclasses.fields(kind)})
    except KeyError as fault:
        raise Damaged(f"{where} is damaged: it has no {fault}") from None
    except (TypeError, ValueError) as fault:
        raise Damaged(f"{where} is damaged: {fault}") from None


def _entry(found: Any) -> FileEntry:
    name, size, checksum = found
    return FileEntry(str(name), int(size), str(checksum))


# --- Exports ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Export(_Record):
    """What EXPORT.json says. parameters: fingerprint of the towers; towers: the config section they are made from;
    index: how the run wants its vectors stored and searched; file: of the towers; queries: of the sample queries."""

    step: int
    parameters: str
    tokenizer: str
    corpus: str
    towers: dict[str, Any]
    index: dict[str, Any]
    file: FileEntry
    queries: FileEntry

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields | {name: _entry(fields[name]) for name in ("file", "queries")})


def export_steps(folder: Folder) -> list[int]:
    """Steps that have a folder of an export, in order; it may be incomplete."""
    return sorted(int(name) for name in folder.names("exports") if name.isdigit())


def read_export(folder: Folder, step: int) -> Export | None:
    """The export of a step; None if there is none yet. Raises Damaged."""
    return _read_record(folder, f"exports/{step}/{EXPORT}", Export)


def read_towers(folder: Folder, export: Export) -> Arrays:
    """The towers' parameters by path ('document_embedder/bert/…'). Raises Damaged."""
    return _read_arrays(folder, export.file)


def read_queries(folder: Folder, export: Export) -> NDArray[np.float32]:
    """The vectors of an export's sample queries [count, width]. Raises Damaged."""
    return _read_arrays(folder, export.queries)[QUERIES]


def _read_arrays(folder: Folder, file: FileEntry) -> Arrays:
    data = folder.read_verified(file)
    try:
        return load(data)
    except SafetensorError as fault:
        raise Damaged(f"{folder.path(file.name)} is damaged: {fault}") from None


def intact_export(folder: Folder, step: int) -> Export | None:
    """The export of a step, from which a generation can be built; None, with a log line, where it is damaged."""
    try:
        export = read_export(folder, step)
        if export is not None:
            read_towers(folder, export)
            read_queries(folder, export)
        return export
    except Damaged as fault:
        logger.warning("%s", fault)
        return None


def write_export(folder: Folder, export: Mapping[str, Any], towers: Arrays, queries: NDArray[np.float32]) -> Export:
    """Write an export, the record last. `export`: the fields of `Export` but parameters and files.

    An earlier export of the step that holds the same towers stays as it is, if it is sound.
    """
    from realm_jax.checksums import arrays_digest  # here, since who reads a manifest needs no JAX

    fingerprint, step = arrays_digest(towers), export["step"]
    earlier = intact_export(folder, step)
    if earlier is not None and earlier.parameters == fingerprint:
        return earlier
    name = f"exports/{step}/{fingerprint[:16]}"
    arrays = {path: np.ascontiguousarray(value) for path, value in sorted(towers.items())}
    file = folder.put(f"{name}.safetensors", save(arrays))
    sample = folder.put(f"{name}-queries.safetensors", save({QUERIES: np.ascontiguousarray(queries)}))
    made = Export(parameters=fingerprint, file=file, queries=sample, **export)
    folder.write_json(f"exports/{step}/{EXPORT}", made.to_json())
    return made


def remove_export(folder: Folder, step: int) -> None:
    """The record first, so that nobody takes a half-removed export for a whole one; what was refused of it last."""
    folder.remove(f"exports/{step}/{EXPORT}")
    folder.remove(f"exports/{step}")
    for name in folder.names("index"):
        if name.endswith(REFUSED) and name.startswith(f"{step}-"):
            folder.remove(f"index/{name}")


# --- Generations ------------------------------------------------------------------------------------------------------


class ChunkFile(NamedTuple):
    """The vectors of rows first … last − 1 of a corpus segment, as they lie in a file."""

    segment: str  # fingerprint of the segment, so that an edited corpus can share what did not change
    first: int
    last: int
    file: FileEntry


@dataclasses.dataclass(frozen=True)
class Manifest(_Record):
    """What MANIFEST.json says of a generation.

    step, parameters: of the export. corpus, tokenizer: fingerprints. rows × width vectors of dtype ('float32', or
    'bfloat16', stored as uint16), in `chunks`, in the order of the rows. searcher: the ScaNN settings and files, if
    any. recall: {'recall@k': share} of the searcher against exact search with the export's sample queries. seconds:
    {part: time}.
    """

    generation: str
    step: int
    parameters: str
    corpus: str
    tokenizer: str
    rows: int
    width: int
    dtype: str
    chunks: tuple[ChunkFile, ...]
    searcher: dict[str, Any] | None
    recall: dict[str, float]
    seconds: dict[str, float]

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        chunks = tuple(ChunkFile(name, first, last, _entry(file)) for name, first, last, file in fields["chunks"])
        return cls(**fields | {"chunks": chunks})

    @property
    def files(self) -> list[FileEntry]:
        """Every file that the generation needs; names are relative to the shared folder."""
        shards = self.searcher["shards"] if self.searcher else []
        return [c.file for c in self.chunks] + [FileEntry(*file) for shard in shards for file in shard["files"]]


def generation_names(folder: Folder) -> list[str]:
    """Folders of generations, by step; a folder without a manifest is one that is being built or removed."""
    names = [name for name in folder.names("index") if re.fullmatch(r"\d+-[0-9a-f]+", name)]
    return sorted(names, key=lambda name: (export_step(name), name))


def export_step(generation: str) -> int:
    """The export step in a generation's name."""
    return int(generation.partition("-")[0])


def read_manifest(folder: Folder, generation: str) -> Manifest | None:
    """The manifest of a generation; None if there is none (yet). Raises Damaged."""
    return _read_record(folder, f"index/{generation}/{MANIFEST}", Manifest)


def manifests(folder: Folder, names: Iterable[str]) -> Iterator[Manifest]:
    """The manifests of these generations, in their order, where they have a sound one. Each is read when it is asked
    for, since a folder may be a bucket."""
    for name in names:
        with contextlib.suppress(Damaged):
            if (manifest := read_manifest(folder, name)) is not None:
                yield manifest


def of_same_towers(folder: Folder, step: int, parameters: str, dtype: str, width: int) -> Iterator[Manifest]:
    """The published generations of the towers of an export that are not refused, of any version of the corpus."""
    names = [name for name in generation_names(folder) if export_step(name) == step]
    for other in manifests(folder, names):
        same = (other.parameters, other.dtype, other.width) == (parameters, dtype, width)
        if same and rejection(folder, other.generation) is None:
            yield other


def export_of(folder: Folder, manifest: Manifest) -> Export | None:
    """The export that a generation was built from; None when it is gone, or another took its place. Raises Damaged."""
    export = read_export(folder, manifest.step)
    return export if export is not None and export.parameters == manifest.parameters else None


def load_vectors(
    folder: Folder, manifest: Manifest, first: int = 0, last: int | None = None, dtype: Any = None
) -> NDArray:
    """Rows first … last − 1 of a generation, all by default, verified: [rows, width] of its dtype, or of another.

    Raises Damaged, naming the file.
    """
    return load_parts(folder, manifest, [slice(first, manifest.rows if last is None else last)], dtype)[0]


def load_parts(folder: Folder, manifest: Manifest, parts: Sequence[slice], dtype: Any = None) -> list[NDArray]:
    """`load_vectors` of several parts, rows start … stop − 1 each: a file is read once, and only if a part needs it."""
    ends = np.cumsum([chunk.last - chunk.first for chunk in manifest.chunks], dtype=np.int64).tolist()
    if (ends or [0])[-1] != manifest.rows:
        raise Damaged(f"{folder.path('index/' + manifest.generation)}: its chunks hold other rows than it says")
    kind = dtype or numpy_dtype(manifest.dtype)
    found = [np.empty((part.stop - part.start, manifest.width), kind) for part in parts]

    def read(chunk: ChunkFile, stop: int) -> None:
        start = stop - (chunk.last - chunk.first)
        common = [(max(start, part.start), min(stop, part.stop)) for part in parts]
        if any(low < high for low, high in common):
            vectors = read_chunk(folder, manifest, chunk)
            for one, part, (low, high) in zip(found, parts, common, strict=True):
                if low < high:
                    one[low - part.start : high - part.start] = vectors[low - start : high - start]

    side_by_side(read, manifest.chunks, ends)
    return found


def read_chunk(folder: Folder, manifest: Manifest, chunk: ChunkFile) -> NDArray:
    """The vectors of a chunk, verified: its checksum, and no vector that is zero or not finite."""
    stored = np.frombuffer(folder.read_verified(chunk.file), numpy_dtype(manifest.dtype))
    if len(stored) != (chunk.last - chunk.first) * manifest.width:
        raise Damaged(f"{folder.path(chunk.file.name)} holds other rows than its manifest says")
    vectors = stored.reshape(-1, manifest.width)
    check_vectors(vectors, folder.path(chunk.file.name))
    return vectors


def rows_name(first: int, last: int) -> str:
    """How the files of rows first … last − 1 begin, so that builders with other chunk sizes do not meet."""
    return f"{first:09d}-{last:09d}"


def by_rows(folder: Folder, home: str, suffix: str) -> dict[str, str]:
    """`rows_name` → file of a kind in a folder; of several writers' the first by name."""
    names = [name for name in folder.names(home) if name.endswith(suffix)]
    return {name.rpartition("-")[0]: name for name in reversed(names)}


def check_vectors(vectors: NDArray, where: str) -> None:
    """Raise Damaged when a vector is zero or not finite: from a diverged tower or faulty memory."""
    lengths = np.linalg.norm(vectors.astype(np.float32), axis=1)
    bad = np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))
    if len(bad):
        raise Damaged(f"{where}: row {bad[0]} and {len(bad) - 1} others have a vector that is zero or not finite")


def numpy_dtype(name: str) -> Any:
    """The NumPy dtype of stored vectors."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def sharing(folder: Folder, generation: str) -> list[Manifest]:
    """The other generations, of edited corpora, that have files of this one."""
    others = manifests(folder, [name for name in generation_names(folder) if name != generation])
    return [other for other in others if any(file.name.startswith(f"index/{generation}/") for file in other.files)]


def remove_generation(folder: Folder, generation: str) -> None:
    """The manifest first; then every file that no other generation shares."""
    folder.remove(f"index/{generation}/{MANIFEST}")
    home = f"index/{generation}"
    needed = {file.name for other in sharing(folder, generation) for file in other.files}
    if not needed:
        folder.remove(home)
        return
    used = {name.removeprefix(f"{home}/").partition("/")[0] for name in needed if name.startswith(f"{home}/")}
    for name in folder.names(home):
        if name not in used:
            folder.remove(f"{home}/{name}")


# --- Names, and generations that must not be served -------------------------------------------------------------------


def names_of_export(folder: Folder, export: Export, corpus: str) -> list[str]:
    """The names of an export's generation: those found damaged after they were published, and the one that counts.

    They are the same for every builder process, so that all work on one generation without talking to each other.
    """
    names: list[str] = []
    while True:
        made_of = f"{export.parameters} {corpus} {len(names)}"
        names.append(f"{export.step}-{digest(made_of.encode())[:8]}")
        if not (rejection(folder, names[-1]) or {}).get("again"):
            return names


def current_name(folder: Folder, export: Export, corpus: str) -> str:
    """The generation of an export: the first one that was not found damaged after it was published."""
    return names_of_export(folder, export, corpus)[-1]


def rejection(folder: Folder, generation: str) -> dict | None:
    """Why a generation must not be served: {"reason", "again": whether it is worth building once more}."""
    try:
        return folder.read_json(f"index/{generation}{REFUSED}")
    except FileNotFoundError:
        return None
    except Damaged as fault:
        return {"reason": str(fault), "again": True}


def reject(folder: Folder, generation: str, reason: str, again: bool) -> None:
    """Mark a generation as not to be served."""
    folder.write_json(f"index/{generation}{REFUSED}", {"reason": reason, "again": again})


def drop_damaged(folder: Folder, manifest: Manifest, path: str, fault: Damaged) -> None:
    """Have a file of a generation that is being built made again: remove it (`path`: it, or its done mark), or refuse
    the generation that it is shared with."""
    home = path.split("/")[1]
    if home == manifest.generation:
        folder.remove(path)
    else:
        reject(folder, home, str(fault), again=True)


def clear_rejections(folder: Folder) -> None:
    """Clear rejections that depend on settings: the next builder resumes where the last one stopped."""
    for name in folder.names("index"):
        generation = name.removesuffix(REFUSED)
        if generation != name and not (rejection(folder, generation) or {}).get("again"):
            folder.remove(f"index/{name}")
