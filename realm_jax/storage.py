"""Paths that several processes or runs share: everything appears whole, or not at all.

Two levels. The functions at the top are for files and folders of this machine: content is written beside its final
name, flushed to the disk and then renamed. `Folder` at the bottom is for what jobs on several machines share (exports,
index generations, job status): a POSIX folder or a bucket (`gs://…`, `s3://…`, whatever fsspec opens).
Not for scratch files of one process. Read `Folder` next.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from realm_jax.errors import UserError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@contextmanager
def open_atomic(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A binary file that takes the name `path` when the block ends well, and vanishes when it raises."""
    final = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            flush_to_disk(stream)
        # mkstemp makes files for the owner alone; a published file follows the umask like any other.
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, final)
    except BaseException as fault:
        Path(name).unlink(missing_ok=True)
        if isinstance(fault, OSError) and fault.filename is None:
            fault.filename = str(final)  # a write does not say where
        raise
    _flush(final.parent)


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a whole file (text as UTF-8); an earlier file of that name stays until the new one is complete."""
    with open_atomic(path) as stream:
        stream.write(data.encode("utf-8") if isinstance(data, str) else data)


def write_json_atomic(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as readable JSON with a stable order of keys: the order in which they were put in."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """The value of a JSON file. Raises UserError, naming the file, when it is missing or damaged."""
    try:
        return json.loads(Path(path).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist; check the path") from None
    except (ValueError, RecursionError) as fault:
        raise UserError(f"{path} is not readable JSON ({fault}); make it again") from None


def read_fetched_json(path: Path) -> Any:
    """The value of a JSON file that came with a model. Raises UserError, naming the file, where it cannot be read."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as fault:
        raise UserError(f"{path}: cannot be read ({' '.join(str(fault).split())[:150]}); fetch it again") from None


def read_settings(path: Path, needed: bool = False) -> dict[str, Any]:
    """A file of settings that came with a model; {} where there need be none. Raises UserError."""
    settings = read_fetched_json(path) if needed or path.is_file() else {}
    if not isinstance(settings, dict):
        raise UserError(f"{path}: holds no settings; fetch it again")
    return settings


def make_folder(path: str | os.PathLike[str], name: str) -> None:
    """Make a folder that can be written to, with those above it. `name`: of the flag or key that the user gave."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as fault:
        raise UserError(f"{name}={path}: no folder that can be written to ({fault.strerror}); name another") from None


@contextmanager
def exclusive_lock(folder: Path, lock: str = ".lock", wait: bool = False) -> Iterator[None]:
    """Lock a folder for this process. If another process of this machine holds the lock: wait for it, or UserError."""
    with open(folder / lock, "a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process is using it; wait for it, or stop it first") from None
        except OSError as fault:  # a file system without locks
            logger.debug("%s: not locked (%s)", folder, fault)
        yield


def is_held(folder: Path, lock: str = ".lock") -> bool:
    """Whether some process of this machine holds a folder (`exclusive_lock`)."""
    try:
        with open(folder / lock) as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # never held, or a file system without locks
        return False
    return False


def publish_folder(temporary: str | os.PathLike[str], final: str | os.PathLike[str]) -> None:
    """Give a finished folder its final name in one step, once all of it is on the disk. Raises UserError when that name
    is taken.

    Both must lie on one file system: make `temporary` beside `final`.
    """
    if os.path.lexists(final):
        raise UserError(f"{final} already exists; remove it or choose another folder")
    for path in (*Path(temporary).rglob("*"), Path(temporary)):
        _flush(path)
    os.chmod(temporary, 0o777 & ~_umask())
    os.rename(temporary, final)
    _flush(Path(final).parent)


def flush_to_disk(stream: IO[bytes]) -> None:
    """Flush `stream` to disk (fsync): what was written survives a power failure."""
    stream.flush()
    os.fsync(stream.fileno())


def _flush(path: Path) -> None:
    """Wait until a file is on the disk, or the names in a folder: a rename is durable only once they are."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """The process's umask, which can be read only by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


# --- Folders that jobs on several machines share ----------------------------------------------------------------------

AT_A_TIME = 16  # operations on a bucket, where they are many
TRIES = 6  # of an operation on a bucket; the waits between them add up to half a minute
FIRST_WAIT = 1.0  # seconds; doubled from try to try
MARGIN = 1 << 28  # bytes that staging leaves free


class StorageError(UserError):
    """An operation on shared storage failed for a reason that may be transient: full, read-only, or unreachable."""


class Damaged(UserError):
    """What is stored cannot be served: it is not what its record says. The message names the file."""


class FileEntry(NamedTuple):
    """What a record says of a file: its name in the folder, its size and its checksum."""

    name: str
    bytes: int
    sha256: str


def digest(data: bytes | memoryview) -> str:
    """SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def file_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file on a disk, in hexadecimal. Raises OSError."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def list_files(folder: Path) -> list[FileEntry]:
    """What a record says of every file below a folder, by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [FileEntry(path.relative_to(folder).as_posix(), path.stat().st_size, file_digest(path)) for path in files]


def check_files(folder: Path, listed: Iterable[Sequence[Any]], content: bool = True) -> None:
    """Compare files with what `list_files` said, as a record in JSON has it. Raises Damaged for the first that differs.

    content: False compares sizes alone.
    """
    for entry in listed:
        _verify_file(folder / entry[0], FileEntry(*entry), str(folder / entry[0]), content)


def record_digest(record: Mapping[str, Any]) -> str:
    """A checksum of a record but for its entry `digest`, which holds it."""
    rest = {key: value for key, value in record.items() if key != "digest"}
    return digest(json.dumps(rest, sort_keys=True).encode())


OBJECT_STORES = ("gs", "gcs", "s3", "s3a", "az", "abfs", "abfss", "oci", "memory")  # what is written appears whole


class Folder(ABC):
    """A shared folder. Names are relative and have forward slashes: `index/500-1f0c/MANIFEST.json`.

    A file appears whole or not at all and never changes unless it is written again. Every method raises StorageError,
    naming the path, when storage fails; what is not there raises FileNotFoundError. poll_seconds: between two looks of
    who waits for something to appear.
    """

    url: str
    poll_seconds: float

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of a file."""

    @abstractmethod
    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write a file, in the place of an earlier one of that name; folders on the way are made."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """What lies directly in a folder, in order; nothing for a folder that is not there. Never from a cache."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, or a folder with everything in it; what is not there is removed already."""

    @abstractmethod
    def local(self, entry: FileEntry) -> Path:
        """A verified file as one of this machine, which can be memory-mapped. Raises Damaged, and StorageError also
        when the disk for staged files has no room."""

    def unstage(self, folder: str) -> None:  # noqa: B027 (most folders copy nothing)
        """Forget what `local` copied of a folder to this machine."""

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON object. Raises Damaged when the file does not hold one."""
        try:
            value = json.loads(self.read(name))
        except ValueError as fault:
            raise Damaged(f"{self.path(name)} is not readable JSON ({fault})") from None
        if not isinstance(value, dict):
            raise Damaged(f"{self.path(name)} holds no JSON object")
        return value

    def read_verified(self, entry: FileEntry) -> bytes:
        """The content of a file that is what its record says. Raises Damaged."""
        try:
            data = self.read(entry.name)
        except FileNotFoundError:
            raise Damaged(f"{self.path(entry.name)} is missing") from None
        _verify(self.path(entry.name), entry, len(data), lambda: digest(data))
        return data

    def put(self, name: str, data: bytes | memoryview) -> FileEntry:
        """Write a file and say what it is."""
        self.write(name, data)
        return FileEntry(name, len(data), digest(data))

    def path(self, name: str) -> str:
        """How a person calls a file."""
        return f"{self.url}/{name}" if name else self.url


def open_folder(url: str | os.PathLike[str]) -> Folder:
    """A folder by path or URL.

    Raises UserError for a URL that no installed file system knows, and for file systems on which a file that is being
    written can be read.
    """
    scheme, is_url, path = str(url).partition("://")
    if not is_url or scheme == "file":
        return PosixFolder(Path(path if is_url else url))
    if scheme not in OBJECT_STORES:
        raise UserError(f"{url}: files do not appear whole there; use one of {', '.join(OBJECT_STORES)}, or a path")
    return Bucket(str(url))


class PosixFolder(Folder):
    """A folder of a POSIX file system, which may be a network's."""

    poll_seconds = 0.2  # a generation of a small corpus takes a second

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, str(root)

    def read(self, name: str) -> bytes:
        with self._storage_errors(name):
            return (self.root / name).read_bytes()

    def write(self, name: str, data: bytes | memoryview) -> None:
        with self._storage_errors(name):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                with open_atomic(self.root / name) as stream:
                    stream.write(data)
            except FileNotFoundError:
                raise StorageError(f"{self.path(name)}: its folder was removed while it was written") from None

    def names(self, folder: str = "") -> list[str]:
        with self._storage_errors(folder):
            try:
                return sorted(name for name in os.listdir(self.root / folder) if not name.endswith(".partial"))
            except FileNotFoundError:
                return []

    def remove(self, name: str) -> None:
        path = self.root / name
        with self._storage_errors(name), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def local(self, entry: FileEntry) -> Path:
        path = self.root / entry.name
        with self._storage_errors(entry.name):
            _verify_file(path, entry, self.path(entry.name))
        return path

    @contextmanager
    def _storage_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as fault:
            raise StorageError(f"{self.path(name)}: {fault.strerror or fault}") from fault


class Bucket(Folder):
    """A folder of an object store or of anything else that fsspec opens.

    Trusts little: an operation that fails is tried again (a write that raised may have happened; writing the same bytes
    again does no harm), listings are never taken from a cache, nothing is renamed, and what was written is looked at.
    """

    poll_seconds = 5.0  # every look is a request that costs money

    def __init__(self, url: str, filesystem: Any = None, wait: Callable[[float], None] = time.sleep) -> None:
        """filesystem, wait: others than those of the URL and the clock, for tests."""
        import fsspec  # here, since most runs need no bucket

        self.url, self._wait = url.rstrip("/"), wait
        try:
            default, self._root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as fault:
            raise UserError(f"{url}: {fault}; install what opens such paths (gs://: gcsfs, s3://: s3fs)") from None
        self._files = filesystem or default

    def read(self, name: str) -> bytes:
        return self._try("read", name, lambda path: self._files.cat_file(path))

    def write(self, name: str, data: bytes | memoryview) -> None:
        def write(path: str) -> None:
            self._files.pipe_file(path, bytes(data))
            self._files.invalidate_cache()
            size = self._files.info(path)["size"]
            if size != len(data):
                raise OSError(f"{size:,} bytes of {len(data):,} arrived")

        self._try("write", name, write)

    def names(self, folder: str = "") -> list[str]:
        def ls(path: str) -> list[str]:
            self._files.invalidate_cache()
            try:
                paths = self._files.ls(path, detail=False)
            except FileNotFoundError:
                return []
            return sorted({path.rstrip("/").rpartition("/")[2] for path in paths} - {""})

        return self._try("list", folder, ls)

    def remove(self, name: str) -> None:
        def rm(path: str) -> None:
            self._files.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(path, recursive=True)

        self._try("remove", name, rm)

    def local(self, entry: FileEntry) -> Path:
        """Staged once on this machine: downloaded, verified, and only then given its name."""
        path = self._staged(entry.name)
        if path.is_file():
            with contextlib.suppress(Damaged):
                _verify_file(path, entry, str(path))
                return path
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if free < entry.bytes + MARGIN:
            raise StorageError(
                f"{self.path(entry.name)} needs {entry.bytes + MARGIN:,} bytes of {path.parent}, which has {free:,} "
                "free; set REALM_STAGING to a folder with more room"
            )
        write_atomic(path, self.read_verified(entry))
        return path

    def unstage(self, folder: str) -> None:
        shutil.rmtree(self._staged(folder), ignore_errors=True)

    def _staged(self, name: str) -> Path:
        return staging_folder() / digest(self.url.encode())[:16] / name

    def _try(self, verb: str, name: str, operation: Callable[[str], _T]) -> _T:
        for attempt in range(TRIES):
            try:
                return operation(f"{self._root}/{name}" if name else self._root)
            except FileNotFoundError:
                raise
            except Exception as fault:  # every file system has errors of its own
                if attempt == TRIES - 1:
                    raise StorageError(f"{self.path(name)}: cannot {verb} it after {TRIES} tries ({fault})") from fault
                logger.warning("%s: cannot %s it (%s); trying again", self.path(name), verb, fault)
                self._wait(FIRST_WAIT * 2**attempt)
        raise AssertionError("the last try returns or raises")


@functools.cache
def staging_folder() -> Path:
    """Where files of buckets are kept on this machine: REALM_STAGING, else a folder of the user's cache."""
    home = os.environ.get("REALM_STAGING")
    return Path(home) if home else cache_folder() / "staged"


def side_by_side(act: Callable[..., None], *items: Iterable[Any]) -> None:
    """Call `act` for each of some items, as `map` does, a few at a time: a bucket answers after tens of milliseconds.

    Raises what the first of them in order raises; those that have not begun are left out then.
    """
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        try:
            list(pool.map(act, *items))
        finally:
            pool.shutdown(cancel_futures=True)


def cache_folder() -> Path:
    """Where this machine keeps what can be made again: REALM_CACHE, else a folder of the user's cache."""
    home = os.environ.get("REALM_CACHE")
    return Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "realm_jax"


def _verify_file(path: Path, entry: FileEntry, name: str, content: bool = True) -> None:
    try:
        _verify(name, entry, path.stat().st_size, lambda: file_digest(path) if content else entry.sha256)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None


def _verify(name: str, entry: FileEntry, size: int, checksum: Callable[[], str]) -> None:
    if size != entry.bytes:
        raise Damaged(f"{name} has {size:,} bytes, not {entry.bytes:,}")
    if checksum() != entry.sha256:
        raise Damaged(f"{name} is damaged: its checksum is another")
