"""Exports and generations: what trainer and index builder say to each other, as files in a shared folder.

    exports/<step>/<fingerprint>.safetensors      both towers of that step, float32
    exports/<step>/<fingerprint>.queries          sample query vectors of that step, float32
    exports/<step>/EXPORT.json                    put last; without it the export does not exist
    index/<step>-<nonce>/<rows>-<writer>.bin     vectors of a chunk of rows, and a `.done` mark with size and checksum
    index/<step>-<nonce>/scann-…/                 searchers of the hosts, if any: `searchers.py`
    index/<step>-<nonce>/MANIFEST.json            put last; without it the generation does not exist
    index/<step>-<nonce>.refused                  why a generation must not be served; outlives it
    jobs/trainer.json, jobs/builder-<n>.json      what each job is doing, and what it needs (pins)
    jobs/recipe.json                              how far the trainer is in its recipe, and whether it lives

Nothing that a record lists is ever written again. Writing exports is `training/exporter.py`, building generations
`builder.py`, following them `training/follower.py`. Read `Manifest` next.
"""

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from realm_jax.errors import UserError
from realm_jax.storage import Damaged, FileEntry, Folder, StorageError, digest

FORMAT_VERSION = 1
EXPORT, MANIFEST, REFUSED, DONE = "EXPORT.json", "MANIFEST.json", ".refused", ".done"
QUERIES = "queries"  # name of the one array in a file of sample query vectors
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
    queries: FileEntry

    def to_json(self) -> dict[str, Any]:
        files = {"file": self.file._asdict(), "queries": self.queries._asdict()}
        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self), **files}

    @classmethod
    def from_json(cls, found: Mapping[str, Any], where: str) -> Self:
        """Raises InvalidIndex for another version and for missing or wrong entries."""
        fields = _checked(found, where, cls)
        return cls(**fields | {name: _entry(fields[name], where) for name in ("file", "queries")})


def export_steps(folder: Folder) -> list[int]:
    """Steps that have a folder of an export, in order; it may be incomplete."""
    return sorted(int(name) for name in folder.names("exports") if name.isdigit())


def read_export(folder: Folder, step: int) -> Export | None:
    """The export of a step; None where there is none yet. Raises InvalidIndex."""
    name = f"exports/{step}/{EXPORT}"
    try:
        return Export.from_json(folder.read_json(name), folder.path(name))
    except FileNotFoundError:
        return None
    except Damaged as fault:
        raise InvalidIndex(str(fault)) from None


def read_towers(folder: Folder, export: Export) -> tuple[Arrays, NDArray[np.float32]]:
    """The towers' parameters by path ('document_embedder/bert/…') and the sample queries [count, width]."""
    try:
        arrays = load(folder.read_verified(export.file))
        queries = load(folder.read_verified(export.queries))
        return arrays, queries[QUERIES]
    except (Damaged, SafetensorError, KeyError) as fault:
        raise InvalidIndex(str(fault)) from None


def write_export(folder: Folder, export: Mapping[str, Any], towers: Arrays, queries: NDArray[np.float32]) -> Export:
    """Write an export, the record last. `export`: the fields of `Export` but parameters and files.

    An earlier export of the step that holds the same towers stays as it is, if it is sound.
    """
    data = save({name: np.ascontiguousarray(value) for name, value in sorted(towers.items())})
    fingerprint = digest(data)
    step = export["step"]
    earlier = _sound_export(folder, step)
    if earlier is not None and earlier.parameters == fingerprint:
        return earlier
    name = f"exports/{step}/{fingerprint[:16]}"
    sample = folder.put(f"{name}.queries", save({QUERIES: np.ascontiguousarray(queries)}))
    file = folder.put(f"{name}.safetensors", data)
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


def _sound_export(folder: Folder, step: int) -> Export | None:
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
        chunks = [chunk._asdict() | {"file": chunk.file._asdict()} for chunk in self.chunks]
        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self), "chunks": chunks}

    @classmethod
    def from_json(cls, found: Mapping[str, Any], where: str) -> Self:
        """Raises InvalidIndex for another version and for missing or wrong entries."""
        fields = _checked(found, where, cls)
        try:
            chunks = tuple(ChunkFile(**chunk | {"file": _entry(chunk["file"], where)}) for chunk in fields["chunks"])
        except (TypeError, KeyError) as fault:
            raise InvalidIndex(f"{where}: its list of chunks is damaged ({fault})") from None
        return cls(**fields | {"chunks": chunks})

    @property
    def files(self) -> list[FileEntry]:
        """Every file that the generation needs; names are relative to the shared folder."""
        shards = self.searcher["shards"] if self.searcher else []
        return [c.file for c in self.chunks] + [FileEntry(**file) for shard in shards for file in shard["files"]]


def generation_names(folder: Folder) -> list[str]:
    """Folders of generations, by step; a folder without a manifest is one that is being built or removed."""
    names = [name for name in folder.names("index") if re.fullmatch(r"\d+-[0-9a-f]+", name)]
    return sorted(names, key=lambda name: (export_step(name), name))


def export_step(generation: str) -> int:
    """The export step in a generation's name."""
    return int(generation.partition("-")[0])


def generation_name(step: int, parameters: str, corpus: str, attempt: int) -> str:
    """The same for every builder process, so that they work on one generation without a word between them."""
    return f"{step}-{digest(f'{parameters} {corpus} {attempt}'.encode())[:8]}"


def read_manifest(folder: Folder, generation: str) -> Manifest | None:
    """The manifest of a generation; None where there is none (yet). Raises InvalidIndex."""
    name = f"index/{generation}/{MANIFEST}"
    try:
        return Manifest.from_json(folder.read_json(name), folder.path(name))
    except FileNotFoundError:
        return None
    except Damaged as fault:
        raise InvalidIndex(str(fault)) from None


def export_of(folder: Folder, manifest: Manifest) -> Export | None:
    """The export that a generation was built from; None when it is gone, or another took its place.

    Raises InvalidIndex.
    """
    export = read_export(folder, manifest.step)
    return export if export is not None and export.parameters == manifest.parameters else None


def load_vectors(folder: Folder, manifest: Manifest) -> NDArray:
    """All vectors of a generation, verified: [rows, width] of its dtype. Raises InvalidIndex, naming the file."""
    vectors = np.empty((manifest.rows, manifest.width), numpy_dtype(manifest.dtype))
    start = 0
    for chunk in manifest.chunks:
        stop = start + chunk.last - chunk.first
        if stop > manifest.rows:
            break
        vectors[start:stop] = read_chunk(folder, manifest, chunk)
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


def done_marks(folder: Folder, home: str) -> dict[str, str]:
    """`rows_name` → done mark of the chunks or shards in a folder; of several writers' the first by name."""
    marks = [mark for mark in folder.names(home) if mark.endswith(DONE)]
    return {mark.rpartition("-")[0]: mark for mark in reversed(marks)}


def check_vectors(vectors: NDArray, where: str) -> None:
    """Raise InvalidIndex when a vector is zero or not finite: a tower that diverged, or memory that went bad."""
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
        return FileEntry(str(found["name"]), int(found["bytes"]), str(found["sha256"]))
    except (TypeError, KeyError, ValueError) as fault:
        raise InvalidIndex(f"{where} is damaged: an entry of a file lacks {fault}") from None


# --- Job status -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Status:
    """What a job says of itself, in jobs/<job>.json.

    run: id of the run, the same over restarts. counter: grows while the job is alive; nobody compares clocks. index:
    export step of the generation in use, −1 for none. pins: export steps whose generations must stay.
    """

    run: str
    stage: str = ""
    step: int = 0
    counter: int = 0
    done: bool = False
    index: int = -1
    pins: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}


BEAT_SECONDS = 5.0  # between two signs of life
TRAINER, BUILDER = "trainer", "builder"
RECIPE = "recipe"  # what the trainer says of the whole recipe; its word to the builders is TRAINER's


def process_name(job: str, number: int) -> str:
    """What a process of 'trainer' or 'builder' is called everywhere: its status, its log, its machines in a cloud."""
    return f"{job}-{number}"


class Beat:
    """Calls `act` every BEAT_SECONDS in a thread, however long the work takes between. A context manager."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act, self._over = act, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to do where it was never entered, or is left again."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            self._act()


class Living:
    """The status of a job, written when it changes and every BEAT_SECONDS, however long the work takes between.

    A context manager. What storage does to a sign of life is told where work is stored, so here it is passed over.
    """

    def __init__(self, folder: Folder, job: str, status: Status) -> None:
        self._folder, self._job, self._status = folder, job, status
        self._lock, self._beat = threading.Lock(), Beat(self._live)

    def __enter__(self) -> Self:
        self._live()
        self._beat.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._beat.__exit__()

    def tell(self, **changes: Any) -> None:
        """Write fields of `Status` that are other than before."""
        with self._lock:
            changed = dataclasses.replace(self._status, **changes)
            if changed != self._status:
                self._status = changed
                self._write()

    def _live(self) -> None:
        with self._lock:
            self._write()

    def _write(self) -> None:
        self._status.counter += 1
        with contextlib.suppress(StorageError):
            write_status(self._folder, self._job, self._status)


def read_status(folder: Folder, job: str) -> Status | None:
    """The status of a job; None where it never wrote one, or where what is there cannot be read."""
    try:
        found = _checked(folder.read_json(f"jobs/{job}.json"), job, Status)
    except (FileNotFoundError, Damaged, InvalidIndex):
        return None
    kinds = {"run": str, "stage": str, "step": int, "counter": int, "done": bool, "index": int, "pins": list}
    if any(type(found[name]) is not kind for name, kind in kinds.items()):
        return None
    return Status(**found | {"pins": tuple(found["pins"])})


def write_status(folder: Folder, job: str, status: Status) -> None:
    """Raises StorageError."""
    folder.write_json(f"jobs/{job}.json", status.to_json())
