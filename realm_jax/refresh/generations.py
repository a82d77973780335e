"""Exports and generations: the protocol between trainer and index builder, as files in a shared folder.

    exports/<step>/<fingerprint>.safetensors        both towers of that step and sample query vectors, float32
    exports/<step>/EXPORT.json                      put last; without it the export does not exist
    index/<step>-<nonce>/<first>-<last>-<sha>.bin   vectors of the rows first … last − 1, by the checksum of their bytes
    index/<step>-<nonce>/scann-…/                   searchers of the hosts, if any: `searchers.py`
    index/<step>-<nonce>/MANIFEST.json              put last; without it the generation does not exist
    index/<step>-<nonce>.refused                    why a generation must not be served; outlives it

Nothing that a record lists is ever written again. Writing exports is `refresh/exporter.py`, building generations
`builder.py`, following them `refresh/watcher.py`; the jobs' status files are `status.py`.
Read `Manifest` next.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from realm_jax.checksums import arrays_digest
from realm_jax.errors import UserError
from realm_jax.storage import Damaged, FileEntry, Folder, digest

FORMAT_VERSION = 2
CHUNK_ROWS = 65_536  # passages in a file of vectors: what a killed builder loses at most; every builder's the same
KEPT = 3  # newest generations that stay, beside those in use or in checkpoints
EXPORT, MANIFEST, REFUSED = "EXPORT.json", "MANIFEST.json", ".refused"
QUERIES = "queries"  # name of the sample query vectors among the arrays of an export
Record = TypeVar("Record")
Arrays = dict[str, NDArray]


class InvalidIndex(UserError):
    """A generation or an export cannot be served: damaged, incomplete, or of something else. The message says why."""


class IncompatibleIndex(InvalidIndex):
    """Perhaps whole, but not for this run or this machine: building it again would not help."""


# --- Exports ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Export:
    """What EXPORT.json says. parameters: fingerprint of the towers; towers: the config section they are made from;
    index: how the run wants its vectors stored and searched."""

    step: int
    parameters: str
    tokenizer: str
    corpus: str
    towers: dict[str, Any]
    index: dict[str, Any]
    file: FileEntry

    def to_json(self) -> dict[str, Any]:
        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any], where: str) -> Self:
        """Raises InvalidIndex for another version and for missing or wrong entries."""
        fields = _checked(found, where, cls)
        return cls(**fields | {"file": _entry(fields["file"], where)})


def _read_record(folder: Folder, name: str, parse: Callable[[Any, str], Record]) -> Record | None:
    """What a JSON file says; None if it is not there. Raises InvalidIndex."""
    try:
        return parse(folder.read_json(name), folder.path(name))
    except FileNotFoundError:
        return None
    except Damaged as fault:
        raise InvalidIndex(str(fault)) from None


def export_steps(folder: Folder) -> list[int]:
    """Steps that have a folder of an export, in order; it may be incomplete."""
    return sorted(int(name) for name in folder.names("exports") if name.isdigit())


def read_export(folder: Folder, step: int) -> Export | None:
    """The export of a step; None if there is none yet. Raises InvalidIndex."""
    return _read_record(folder, f"exports/{step}/{EXPORT}", Export.from_json)


def read_towers(folder: Folder, export: Export) -> tuple[Arrays, NDArray[np.float32]]:
    """The towers' parameters by path ('document_embedder/bert/…') and the sample queries [count, width]."""
    try:
        arrays = load(folder.read_verified(export.file))
        return arrays, arrays.pop(QUERIES)
    except (Damaged, SafetensorError, KeyError) as fault:
        raise InvalidIndex(str(fault)) from None


def write_export(folder: Folder, export: Mapping[str, Any], towers: Arrays, queries: NDArray[np.float32]) -> Export:
    """Write an export, the record last. `export`: the fields of `Export` but parameters and files.

    An earlier export of the step that holds the same towers stays as it is, if it is sound.
    """
    fingerprint, step = arrays_digest(towers), export["step"]
    earlier = _intact_export(folder, step)
    if earlier is not None and earlier.parameters == fingerprint:
        return earlier
    arrays = {name: np.ascontiguousarray(value) for name, value in [*sorted(towers.items()), (QUERIES, queries)]}
    file = folder.put(f"exports/{step}/{fingerprint[:16]}.safetensors", save(arrays))
    made = Export(parameters=fingerprint, file=file, **export)
    folder.write_json(f"exports/{step}/{EXPORT}", made.to_json())
    return made


def remove_export(folder: Folder, step: int) -> None:
    """The record first, so that nobody takes a half-removed export for a whole one; what was refused of it last."""
    folder.remove(f"exports/{step}/{EXPORT}")
    folder.remove(f"exports/{step}")
    for name in folder.names("index"):
        if name.endswith(REFUSED) and name.startswith(f"{step}-"):
            folder.remove(f"index/{name}")


def _intact_export(folder: Folder, step: int) -> Export | None:
    try:
        export = read_export(folder, step)
        if export is not None:
            read_towers(folder, export)
        return export
    except InvalidIndex:
        return None


# --- Generations ------------------------------------------------------------------------------------------------------


class ChunkFile(NamedTuple):
    """The vectors of rows first … last − 1 of a corpus segment, as they lie in a file."""

    segment: str  # fingerprint of the segment, so that an edited corpus can share what did not change
    first: int
    last: int
    file: FileEntry


@dataclasses.dataclass(frozen=True)
class Manifest:
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

    def to_json(self) -> dict[str, Any]:
        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any], where: str) -> Self:
        """Raises InvalidIndex for another version and for missing or wrong entries."""
        fields = _checked(found, where, cls)
        try:
            listed: list[tuple[str, int, int, Any]] = fields["chunks"]
            chunks = tuple(ChunkFile(name, first, last, _entry(file, where)) for name, first, last, file in listed)
        except (TypeError, ValueError) as fault:
            raise InvalidIndex(f"{where}: its list of chunks is damaged ({fault})") from None
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


def generation_name(step: int, parameters: str, corpus: str, attempt: int) -> str:
    """The same for every builder process, so that they work on one generation without talking to each other."""
    return f"{step}-{digest(f'{parameters} {corpus} {attempt}'.encode())[:8]}"


def read_manifest(folder: Folder, generation: str) -> Manifest | None:
    """The manifest of a generation; None if there is none (yet). Raises InvalidIndex."""
    return _read_record(folder, f"index/{generation}/{MANIFEST}", Manifest.from_json)


def export_of(folder: Folder, manifest: Manifest) -> Export | None:
    """The export that a generation was built from; None when it is gone, or another took its place.

    Raises InvalidIndex.
    """
    export = read_export(folder, manifest.step)
    return export if export is not None and export.parameters == manifest.parameters else None


def load_vectors(
    folder: Folder, manifest: Manifest, first: int = 0, last: int | None = None, dtype: Any = None
) -> NDArray:
    """Rows first … last − 1 of a generation, all by default, verified: [rows, width] of its dtype, or of another.

    Raises InvalidIndex, naming the file.
    """
    last = manifest.rows if last is None else last
    vectors = np.empty((last - first, manifest.width), dtype or numpy_dtype(manifest.dtype))
    start = 0
    for chunk in manifest.chunks:
        stop = start + chunk.last - chunk.first
        low, high = max(start, first), min(stop, last)
        if low < high:
            vectors[low - first : high - first] = read_chunk(folder, manifest, chunk)[low - start : high - start]
        start = stop
    if start != manifest.rows:
        raise InvalidIndex(f"{folder.path('index/' + manifest.generation)}: its chunks hold other rows than it says")
    return vectors


def read_chunk(folder: Folder, manifest: Manifest, chunk: ChunkFile) -> NDArray:
    """The vectors of a chunk, verified: its checksum, and no vector that is zero or not finite."""
    try:
        data = folder.read_verified(chunk.file)
    except Damaged as fault:
        raise InvalidIndex(str(fault)) from None
    stored = np.frombuffer(data, np.uint16 if manifest.dtype == "bfloat16" else manifest.dtype)
    if len(stored) != (chunk.last - chunk.first) * manifest.width:
        raise InvalidIndex(f"{folder.path(chunk.file.name)} holds other rows than its manifest says")
    vectors = stored.view(numpy_dtype(manifest.dtype)).reshape(-1, manifest.width)
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
    """Raise InvalidIndex when a vector is zero or not finite: from a diverged tower or faulty memory."""
    lengths = np.linalg.norm(vectors.astype(np.float32), axis=1)
    bad = np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))
    if len(bad):
        raise InvalidIndex(f"{where}: row {bad[0]} and {len(bad) - 1} others have a vector that is zero or not finite")


def numpy_dtype(name: str) -> Any:
    """The NumPy dtype of stored vectors."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def raw_bytes(vectors: NDArray) -> memoryview:
    """The bytes that a chunk file holds."""
    return np.ascontiguousarray(vectors).view(np.uint8).reshape(-1).data


def remove_generation(folder: Folder, generation: str) -> None:
    """The manifest first; then every file that no other generation shares."""
    folder.remove(f"index/{generation}/{MANIFEST}")
    kept = {file.name for other in generation_names(folder) for file in _files_or_none(folder, other)}
    home = f"index/{generation}"
    if not any(name.startswith(f"{home}/") for name in kept):
        folder.remove(home)
        return
    for name in folder.names(home):
        if f"{home}/{name}" not in kept:
            folder.remove(f"{home}/{name}")


def _files_or_none(folder: Folder, generation: str) -> Sequence[FileEntry]:
    try:
        manifest = read_manifest(folder, generation)
    except InvalidIndex:
        return ()
    return manifest.files if manifest else ()


def _checked(found: Mapping[str, Any], where: str, kind: type) -> dict[str, Any]:
    """The fields of a record, if it has them all and its version is ours."""
    version = found.get("format_version")
    if version != FORMAT_VERSION:
        raise InvalidIndex(f"{where} has format version {version}, not {FORMAT_VERSION}")
    names = [field.name for field in dataclasses.fields(kind)]
    if missing := [name for name in names if name not in found]:
        raise InvalidIndex(f"{where} is damaged: it has no {missing[0]!r}")
    return {name: found[name] for name in names}


def _entry(found: Any, where: str) -> FileEntry:
    try:
        name, size, checksum = found
        return FileEntry(str(name), int(size), str(checksum))
    except (TypeError, ValueError) as fault:
        raise InvalidIndex(f"{where} is damaged: an entry of a file is none ({fault})") from None
