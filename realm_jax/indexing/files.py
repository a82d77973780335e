"""Exports and generations: the protocol between trainer and index builder, as files in a shared folder.

    exports/<step>/<fingerprint>.safetensors        both encoders of that step, float32
    exports/<step>/<fingerprint>-queries.safetensors   vectors of sample queries by them, float32
    exports/<step>/EXPORT.json                      put last; without it the export does not exist
    index/<step>-<nonce>/<first>-<last>-<sha>.bin   vectors of the rows first … last − 1, by the checksum of their bytes
    index/<step>-<nonce>/scann-…/                   searchers of the hosts, if any: `searchers.py`
    index/<step>-<nonce>/MANIFEST.json              put last; without it the generation does not exist
    index/<step>-<nonce>.refused                    why a generation must not be served; outlives it

An export holds both encoders of a training step. A generation is one version of the index: the vectors of all
passages by the passage encoder of one export, and perhaps a searcher over them.

Nothing that a record lists is ever written again. Writing exports is `indexing/exporter.py`, building generations
`build.py`, following them `indexing/watcher.py`; the jobs' status files are `heartbeat.py`.
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

from realm_jax.storage import Damaged, FileEntry, Folder, parallel_map, sha256_hex

logger = logging.getLogger(__name__)

FORMAT_VERSION = 3
CHUNK_ROWS = 65_536  # passages in a file of vectors: what a killed builder loses at most; every builder's the same
RETAINED_GENERATIONS = 3  # newest generations that stay, in addition to those in use or in checkpoints
EXPORT, MANIFEST, REJECTED = "EXPORT.json", "MANIFEST.json", ".refused"
QUERIES = "queries"  # the one array in the file of the sample query vectors
Arrays = dict[str, NDArray]


class IncompatibleIndex(Damaged):
    """A generation may be sound, but not for this run or this machine: building it again would not help."""


@dataclasses.dataclass(frozen=True)
class _Record:
    """The base class of the JSON records of exports and generations."""

    def to_json(self) -> dict[str, Any]:
        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Make a record of the fields of its JSON file. Raises TypeError or ValueError for wrong entries."""
        return cls(**fields)


Record = TypeVar("Record", bound=_Record)


def _read_record(folder: Folder, name: str, kind: type[Record]) -> Record | None:
    """Return the record in a JSON file; None if there is no file. Raises Damaged, also for another format version."""
    path = folder.path(name)
    try:
        fields = folder.read_json(name)
    except FileNotFoundError:
        return None
    if (version := fields.get("format_version")) != FORMAT_VERSION:
        raise Damaged(f"{path} has format version {version}, not {FORMAT_VERSION}")
    try:
        return kind.from_json({field.name: fields[field.name] for field in dataclasses.fields(kind)})
    except KeyError as error:
        raise Damaged(f"{path} is damaged: it has no {error}") from None
    except (TypeError, ValueError) as error:
        raise Damaged(f"{path} is damaged: {error}") from None


def _file_entry(fields: Any) -> FileEntry:
    """Return the file entry in a JSON list. Raises TypeError or ValueError."""
    name, size, checksum = fields
    return FileEntry(str(name), int(size), str(checksum))


# --- Exports ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Export(_Record):
    """The record of an export, in EXPORT.json.

    Attributes:
        step: step of training.
        parameters: fingerprint of the encoders.
        tokenizer: its fingerprint.
        corpus: its fingerprint.
        towers: config keys of the encoders.
        index: how the run stores and searches vectors.
        file: parameters of the encoders.
        queries: vectors of the sample queries.
    """

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
        return cls(**fields | {name: _file_entry(fields[name]) for name in ("file", "queries")})


def export_steps(folder: Folder) -> list[int]:
    """Return the steps that have an export's folder, in order; an export may be incomplete."""
    return sorted(int(name) for name in folder.names("exports") if name.isdigit())


def read_export(folder: Folder, step: int) -> Export | None:
    """Return the export of a step; None if there is none yet.

    Args:
        folder: the shared folder.
        step: step of the export.

    Raises:
        Damaged: its record cannot be used.
    """
    return _read_record(folder, f"exports/{step}/{EXPORT}", Export)


def read_encoders(folder: Folder, export: Export) -> Arrays:
    """Return the parameters of an export's encoders by path ('document_embedder/bert/…').

    Args:
        folder: the shared folder.
        export: to read.

    Raises:
        Damaged: the file is missing or damaged.
    """
    return _read_arrays(folder, export.file)


def read_queries(folder: Folder, export: Export) -> NDArray[np.float32]:
    """Return the vectors of an export's sample queries, [count, width].

    Args:
        folder: the shared folder.
        export: whose sample queries.

    Raises:
        Damaged: the file is missing or damaged.
    """
    return _read_arrays(folder, export.queries)[QUERIES]


def _read_arrays(folder: Folder, file: FileEntry) -> Arrays:
    data = folder.read_verified(file)
    try:
        return load(data)
    except SafetensorError as error:
        raise Damaged(f"{folder.path(file.name)} is damaged: {error}") from None


def intact_export(folder: Folder, step: int) -> Export | None:
    """Return the export of a step after reading all of it; None if it is missing or damaged, which is logged.

    Args:
        folder: the shared folder.
        step: step of the export.
    """
    try:
        export = read_export(folder, step)
        if export is not None:
            read_encoders(folder, export)
            read_queries(folder, export)
        return export
    except Damaged as error:
        logger.warning("%s", error)
        return None


def write_export(folder: Folder, export: Mapping[str, Any], params: Arrays, queries: NDArray[np.float32]) -> Export:
    """Write an export, its record last.

    An earlier valid export of the step with the same encoders stays as it is.

    Args:
        folder: the shared folder.
        export: the fields of `Export` without parameters, file and queries.
        params: parameters of both encoders, by path.
        queries: vectors of the sample queries, [count, width].

    Returns:
        The export, or the earlier one.
    """
    from realm_jax.checksums import arrays_digest  # imported here because readers of a manifest need no JAX

    fingerprint, step = arrays_digest(params), export["step"]
    earlier = intact_export(folder, step)
    if earlier is not None and earlier.parameters == fingerprint:
        return earlier
    name = f"exports/{step}/{fingerprint[:16]}"
    arrays = {path: np.ascontiguousarray(value) for path, value in sorted(params.items())}
    params_file = folder.write_entry(f"{name}.safetensors", save(arrays))
    query_file = folder.write_entry(f"{name}-queries.safetensors", save({QUERIES: np.ascontiguousarray(queries)}))
    record = Export(parameters=fingerprint, file=params_file, queries=query_file, **export)
    folder.write_json(f"exports/{step}/{EXPORT}", record.to_json())
    return record


def remove_export(folder: Folder, step: int) -> None:
    """Remove an export, and the rejections of its generations.

    Args:
        folder: the shared folder.
        step: step of the export.
    """
    folder.remove(f"exports/{step}/{EXPORT}")  # first, so that nobody takes a half-removed export for a complete one
    folder.remove(f"exports/{step}")
    for name in folder.names("index"):
        if name.endswith(REJECTED) and name.startswith(f"{step}-"):
            folder.remove(f"index/{name}")


# --- Generations ------------------------------------------------------------------------------------------------------


class ChunkFile(NamedTuple):
    """A file with the vectors of rows first … last − 1 of a corpus segment.

    Attributes:
        segment: its fingerprint, so that versions of a corpus share the files of unchanged segments.
        first: first row in the segment.
        last: row after the last.
        file: name, size and checksum.
    """

    segment: str
    first: int
    last: int
    file: FileEntry


@dataclasses.dataclass(frozen=True)
class Manifest(_Record):
    """The record of a generation, in MANIFEST.json.

    Attributes:
        generation: its name.
        step: step of its export.
        parameters: fingerprint of the export's encoders.
        corpus: its fingerprint.
        tokenizer: its fingerprint.
        rows: rows of the corpus.
        width: features of a vector.
        dtype: 'float32', or 'bfloat16', which is stored as uint16.
        chunks: in the order of the rows.
        searcher: settings and files of ScaNN; None if hosts do not search.
        recall: {'recall@k': share} of the searcher against exact search, by the sample queries.
        seconds: seconds of each part of the build.
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
        chunks = tuple(ChunkFile(name, first, last, _file_entry(file)) for name, first, last, file in fields["chunks"])
        return cls(**fields | {"chunks": chunks})

    @property
    def files(self) -> list[FileEntry]:
        """Return all files of the generation; names are relative to the shared folder."""
        shards = self.searcher["shards"] if self.searcher else []
        return [c.file for c in self.chunks] + [FileEntry(*file) for shard in shards for file in shard["files"]]


def generation_names(folder: Folder) -> list[str]:
    """Return the names of generations by step; one without a manifest is being built or removed."""
    names = [name for name in folder.names("index") if re.fullmatch(r"\d+-[0-9a-f]+", name)]
    return sorted(names, key=lambda name: (export_step(name), name))


def export_step(generation: str) -> int:
    """Return the export step in a generation's name."""
    return int(generation.partition("-")[0])


def read_manifest(folder: Folder, generation: str) -> Manifest | None:
    """Return the manifest of a generation; None if there is none (yet).

    Args:
        folder: the shared folder.
        generation: its name.

    Raises:
        Damaged: the manifest cannot be used.
    """
    return _read_record(folder, f"index/{generation}/{MANIFEST}", Manifest)


def read_manifests(folder: Folder, names: Iterable[str]) -> Iterator[Manifest]:
    """Yield the manifests of those generations that have a sound one, in their order.

    Each is read only when the caller takes it, because the folder may be a bucket.

    Args:
        folder: the shared folder.
        names: names of generations.
    """
    for name in names:
        with contextlib.suppress(Damaged):
            if (manifest := read_manifest(folder, name)) is not None:
                yield manifest


def indexes_with_same_encoder(folder: Folder, step: int, parameters: str, dtype: str, width: int) -> Iterator[Manifest]:
    """Yield the published generations of an export that are not rejected, of any version of the corpus.

    Args:
        folder: the shared folder.
        step: step of the export.
        parameters: fingerprint of its encoders.
        dtype: dtype of the stored vectors.
        width: width of a vector.
    """
    names = [name for name in generation_names(folder) if export_step(name) == step]
    for other in read_manifests(folder, names):
        same = (other.parameters, other.dtype, other.width) == (parameters, dtype, width)
        if same and read_rejection(folder, other.generation) is None:
            yield other


def export_of(folder: Folder, manifest: Manifest) -> Export | None:
    """Return the export of a generation; None if it is gone, or replaced by one of other parameters.

    Args:
        folder: the shared folder.
        manifest: manifest of the generation.

    Raises:
        Damaged: the export's record cannot be used.
    """
    export = read_export(folder, manifest.step)
    return export if export is not None and export.parameters == manifest.parameters else None


def load_vectors(
    folder: Folder, manifest: Manifest, first: int = 0, last: int | None = None, dtype: Any = None
) -> NDArray:
    """Return the verified vectors of rows first … last − 1 of a generation.

    Args:
        folder: the shared folder.
        manifest: manifest of the generation.
        first: first row.
        last: row after the last one; None for all rows.
        dtype: dtype of the result; None for that of the generation.

    Returns:
        [last − first, width].

    Raises:
        Damaged: a file is missing or damaged; the message names it.
    """
    return load_parts(folder, manifest, [slice(first, manifest.rows if last is None else last)], dtype)[0]


def load_parts(folder: Folder, manifest: Manifest, parts: Sequence[slice], dtype: Any = None) -> list[NDArray]:
    """Return the verified vectors of several row ranges of a generation; each file is read at most once.

    Args:
        folder: the shared folder.
        manifest: manifest of the generation.
        parts: row ranges, with start and stop.
        dtype: dtype of the results; None for that of the generation.

    Returns:
        [rows of the part, width] for each part.

    Raises:
        Damaged: a file is missing or damaged; the message names it.
    """
    chunk_ends = np.cumsum([chunk.last - chunk.first for chunk in manifest.chunks], dtype=np.int64).tolist()
    if (chunk_ends or [0])[-1] != manifest.rows:
        raise Damaged(
            f"{folder.path('index/' + manifest.generation)}: its chunks hold other rows than its manifest lists"
        )
    part_dtype = dtype or numpy_dtype(manifest.dtype)
    part_vectors = [np.empty((part.stop - part.start, manifest.width), part_dtype) for part in parts]  # [rows, width]

    def copy_chunk(chunk: ChunkFile, stop: int) -> None:
        start = stop - (chunk.last - chunk.first)
        overlaps = [(max(start, part.start), min(stop, part.stop)) for part in parts]
        if any(low < high for low, high in overlaps):
            chunk_vectors = read_chunk(folder, manifest, chunk)
            for vectors, part, (low, high) in zip(part_vectors, parts, overlaps, strict=True):
                if low < high:
                    vectors[low - part.start : high - part.start] = chunk_vectors[low - start : high - start]

    parallel_map(copy_chunk, manifest.chunks, chunk_ends)
    return part_vectors


def read_chunk(folder: Folder, manifest: Manifest, chunk: ChunkFile) -> NDArray:
    """Return the vectors of a chunk, [rows, width], after checking their checksum and values.

    Args:
        folder: the shared folder.
        manifest: manifest of the generation.
        chunk: one of its chunks.

    Raises:
        Damaged: the file is missing or damaged, or holds a vector that is zero or not finite.
    """
    stored = np.frombuffer(folder.read_verified(chunk.file), numpy_dtype(manifest.dtype))
    if len(stored) != (chunk.last - chunk.first) * manifest.width:
        raise Damaged(f"{folder.path(chunk.file.name)} holds other rows than its manifest says")
    vectors = stored.reshape(-1, manifest.width)  # [rows, width]
    check_vectors(vectors, folder.path(chunk.file.name))
    return vectors


def row_range_name(first: int, last: int) -> str:
    """Return how the names of files of a row range begin, so that builders with other chunk sizes use other files.

    Args:
        first: first row.
        last: row after the last one.
    """
    return f"{first:09d}-{last:09d}"


def files_by_row_range(folder: Folder, parent: str, suffix: str) -> dict[str, str]:
    """Return `row_range_name` → file name; if several processes wrote the same rows, the first by name.

    Args:
        folder: the shared folder.
        parent: the folder in it whose files are listed.
        suffix: ending of their names.
    """
    names = [name for name in folder.names(parent) if name.endswith(suffix)]
    return {name.rpartition("-")[0]: name for name in reversed(names)}


def check_vectors(vectors: NDArray, path: str) -> None:
    """Check that vectors are finite and not zero, as those of a diverged encoder or of faulty memory may be.

    Args:
        vectors: [rows, width].
        path: path of their file, for the message.

    Raises:
        Damaged: a vector is zero or not finite.
    """
    lengths = np.linalg.norm(vectors.astype(np.float32), axis=1)  # [rows]
    bad_rows = np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))
    if len(bad_rows):
        others = len(bad_rows) - 1
        raise Damaged(f"{path}: row {bad_rows[0]} and {others} others have a vector that is zero or not finite")


def numpy_dtype(name: str) -> Any:
    """Return the NumPy dtype of stored vectors."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def indexes_sharing_files(folder: Folder, generation: str) -> list[Manifest]:
    """Return the other generations, of edited corpora, whose manifests list files of this one.

    Args:
        folder: the shared folder.
        generation: its name.
    """
    others = read_manifests(folder, [name for name in generation_names(folder) if name != generation])
    return [other for other in others if any(file.name.startswith(f"index/{generation}/") for file in other.files)]


def remove_generation(folder: Folder, generation: str) -> None:
    """Remove the manifest of a generation, then every file of it that no other generation shares.

    Args:
        folder: the shared folder.
        generation: its name.
    """
    folder.remove(f"index/{generation}/{MANIFEST}")
    parent = f"index/{generation}"
    shared_files = {file.name for other in indexes_sharing_files(folder, generation) for file in other.files}
    if not shared_files:
        folder.remove(parent)
        return
    used = {name.removeprefix(f"{parent}/").partition("/")[0] for name in shared_files if name.startswith(f"{parent}/")}
    for name in folder.names(parent):
        if name not in used:
            folder.remove(f"{parent}/{name}")


# --- Names, and generations that must not be served -------------------------------------------------------------------


class RejectedIndex(NamedTuple):
    """The record of a generation that must not be served.

    Attributes:
        reason: for people.
        retryable: another build may succeed, because files were damaged and the settings are right.
    """

    reason: str
    retryable: bool


def names_of_export(folder: Folder, export: Export, corpus: str) -> list[str]:
    """Return the names of an export's generations: those found damaged after publication, then the current one.

    Every builder process gets the same names, so all work on one generation without talking to each other.

    Args:
        folder: the shared folder.
        export: export of the generation.
        corpus: fingerprint of the corpus.
    """
    names: list[str] = []
    while True:
        content = f"{export.parameters} {corpus} {len(names)}"
        names.append(f"{export.step}-{sha256_hex(content.encode())[:8]}")
        rejection = read_rejection(folder, names[-1])
        if rejection is None or not rejection.retryable:
            return names


def current_name(folder: Folder, export: Export, corpus: str) -> str:
    """Return the name of an export's generation: the first one that was not found damaged after publication.

    Args:
        folder: the shared folder.
        export: export of the generation.
        corpus: fingerprint of the corpus.
    """
    return names_of_export(folder, export, corpus)[-1]


def read_rejection(folder: Folder, generation: str) -> RejectedIndex | None:
    """Return why a generation must not be served; None if it may be.

    Args:
        folder: the shared folder.
        generation: its name.
    """
    try:
        fields = folder.read_json(f"index/{generation}{REJECTED}")
    except FileNotFoundError:
        return None
    except Damaged as error:
        return RejectedIndex(str(error), retryable=True)
    return RejectedIndex(str(fields.get("reason", "")), bool(fields.get("again")))


def reject(folder: Folder, generation: str, reason: str, retryable: bool) -> None:
    """Mark a generation as one that must not be served.

    Args:
        folder: the shared folder.
        generation: its name.
        reason: for messages.
        retryable: another build may succeed.
    """
    folder.write_json(f"index/{generation}{REJECTED}", {"reason": reason, "again": retryable})


def discard_damaged_file(folder: Folder, manifest: Manifest, path: str, error: Damaged) -> None:
    """Remove a damaged file, so that it is made again, or reject the generation that it is shared with.

    Args:
        folder: the shared folder.
        manifest: manifest of the generation that is being built.
        path: path of the file, or of the mark that its shard is done.
        error: how it is damaged.
    """
    owner = path.split("/")[1]
    if owner == manifest.generation:
        folder.remove(path)
    else:
        reject(folder, owner, str(error), retryable=True)


def clear_rejections(folder: Folder) -> None:
    """Clear rejections that depend on settings: the next builder resumes where the last one stopped."""
    for name in folder.names("index"):
        generation = name.removesuffix(REJECTED)
        if generation == name:
            continue
        rejection = read_rejection(folder, generation)
        if rejection is None or not rejection.retryable:
            folder.remove(f"index/{name}")
