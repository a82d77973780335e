"""Files that several processes or runs share: every file appears complete, or not at all.

There are two levels. The functions at the top are for files and folders of this machine: content is written under a
temporary name, flushed to the disk and then renamed. `Folder` at the bottom is for files that jobs on several machines
share (exports, index generations, job status): a POSIX folder or a bucket (`gs://…`, `s3://…`, all that fsspec opens).
Scratch files of one process need neither. Read `Folder` next.
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

from realm_jax.errors import TransientFault, UserError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
LOCK = ".lock"  # the lock file of a folder


@contextmanager
def open_atomic(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a binary file that takes the name `path` when the block ends well, and vanishes when it raises."""
    final = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            flush_to_disk(stream)
        # Only the owner can read the files of mkstemp; a published file follows the umask like any other.
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, final)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(final)  # the error of a write names no file
        raise
    _flush(final.parent)


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a complete file; an earlier file of that name stays until the new one is complete.

    Args:
        path: the file.
        data: its content; text is written as UTF-8.

    Raises:
        OSError: the file cannot be written; it names the file.
    """
    with open_atomic(path) as stream:
        stream.write(data.encode("utf-8") if isinstance(data, str) else data)


def write_json_atomic(path: str | os.PathLike[str], value: Any) -> None:
    """Write a value as readable JSON, with keys in the order in which they were inserted.

    Args:
        path: the file.
        value: value of types that `json` can write; NaN and infinity raise ValueError.
    """
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the value of a JSON file. Raises UserError, naming the file, if it is missing or damaged."""
    try:
        return json.loads(Path(path).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist; check the path") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON ({error}); make it again") from None


def read_fetched_json(path: Path) -> Any:
    """Return the value of a JSON file that came with a model. Raises UserError, naming the file, if that fails."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())[:150]}); fetch it again") from None


def read_settings(path: Path, needed: bool = False) -> dict[str, Any]:
    """Return the settings of a JSON file that came with a model.

    Args:
        path: the file.
        needed: True if it must exist; otherwise a missing file means {}.

    Raises:
        UserError: the file is missing, unreadable, or holds no JSON object.
    """
    settings = read_fetched_json(path) if needed or path.is_file() else {}
    if not isinstance(settings, dict):
        raise UserError(f"{path}: has no JSON object of settings; fetch it again")
    return settings


def make_folder(path: str | os.PathLike[str], name: str) -> None:
    """Make a writable folder, and its parents.

    Args:
        path: the folder.
        name: the flag or key with which the user named it, for the message.

    Raises:
        UserError: the folder cannot be made or written to.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(f"{name}={path}: cannot be written to ({error.strerror}); name another folder") from None


@contextmanager
def exclusive_lock(folder: Path, lock: str = LOCK, wait: bool = False) -> Iterator[None]:
    """Lock a folder for this process, against other processes of this machine.

    Args:
        folder: the folder.
        lock: name of the lock file in it.
        wait: True to wait for another process that holds the lock.

    Raises:
        UserError: another process holds the lock, and `wait` is False.
    """
    with open(folder / lock, "a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process is using it; wait for it, or stop it first") from None
        except OSError as error:  # a file system without locks
            logger.debug("%s: not locked (%s)", folder, error)
        yield


def is_held(folder: Path) -> bool:
    """Return True if a process of this machine holds the lock of a folder, see `exclusive_lock`."""
    try:
        with open(folder / LOCK) as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # never held, or a file system without locks
        return False
    return False


def publish_folder(temporary: str | os.PathLike[str], final: str | os.PathLike[str]) -> None:
    """Give a finished folder its final name in one step, after all of it is on the disk.

    Args:
        temporary: the finished folder, on the same file system: make it in the parent of `final`.
        final: its name from then on.

    Raises:
        UserError: `final` exists.
    """
    if os.path.lexists(final):
        raise UserError(f"{final} already exists; remove it or choose another folder")
    flush_folder(temporary)
    os.chmod(temporary, 0o777 & ~_umask())
    os.rename(temporary, final)
    _flush(Path(final).parent)


def flush_folder(folder: str | os.PathLike[str]) -> None:
    """Flush a folder and all that is in it to disk."""
    for path in (*Path(folder).rglob("*"), Path(folder)):
        _flush(path)


def flush_to_disk(stream: IO[bytes]) -> None:
    """Flush `stream` to disk (fsync), so that its content survives a power failure."""
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
    """Return the process's umask, which can be read only by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


# --- Folders that jobs on several machines share ----------------------------------------------------------------------

AT_A_TIME = 16  # parallel operations on a bucket
TRIES = 6  # of an operation on a bucket; the waits between them add up to half a minute
FIRST_WAIT = 1.0  # seconds; doubled from try to try
MARGIN = 1 << 28  # bytes of the disk that local copies leave free


class StorageError(TransientFault):
    """An operation on shared storage failed for a reason that may be transient: full, read-only, or unreachable."""


class Damaged(UserError):
    """A stored file is missing, or differs from its record. The message names the file."""


class FileEntry(NamedTuple):
    """The entry of a file in a record.

    Attributes:
        name: its path relative to the folder.
        bytes: its size.
        sha256: its checksum, in hexadecimal.
    """

    name: str
    bytes: int
    sha256: str


def sha256_hex(data: bytes | memoryview) -> str:
    """Return the SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def file_digest(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file on a disk, in hexadecimal. Raises OSError."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class StoredFile(NamedTuple):
    """A file of a `Folder` as its storage lists it.

    Attributes:
        bytes: its size.
        md5: its checksum, in base64; '' if the storage lists none.
    """

    bytes: int
    md5: str = ""


def list_files(folder: Path) -> list[FileEntry]:
    """Return the entry of every file below a folder, sorted by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [FileEntry(path.relative_to(folder).as_posix(), path.stat().st_size, file_digest(path)) for path in files]


def check_files(folder: Path, listed: Iterable[Sequence[Any]], content: bool = True) -> None:
    """Compare the files of a folder with their entries.

    Args:
        folder: the folder.
        listed: entries of `list_files`, as read back from JSON.
        content: True to compare checksums too, and not only sizes.

    Raises:
        Damaged: a file is missing or differs; the message names the first one.
    """
    for entry in listed:
        _verify_file(folder / entry[0], FileEntry(*entry), str(folder / entry[0]), content)


def record_digest(record: Mapping[str, Any]) -> str:
    """Return the checksum of a record without its entry `digest`, which stores the checksum."""
    content = {key: value for key, value in record.items() if key != "digest"}
    return sha256_hex(json.dumps(content, sort_keys=True).encode())


# Schemes whose files appear only when they are complete.
OBJECT_STORES = ("gs", "gcs", "s3", "s3a", "az", "abfs", "abfss", "oci", "memory")


class Folder(ABC):
    """A shared folder. Names are relative and have forward slashes: `index/500-1f0c/MANIFEST.json`.

    A file appears complete or not at all, and never changes unless it is written again. Every method raises
    StorageError, naming the path, if storage fails, and FileNotFoundError for a missing file.

    Attributes:
        url: path or URL.
        poll_seconds: time between two polls of a job that waits for a file to appear.
    """

    url: str
    poll_seconds: float

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of a file."""

    @abstractmethod
    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write a file and the folders above it; an earlier file of that name is replaced.

        Args:
            name: name of the file.
            data: its content.
        """

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """List the names directly in a folder, sorted; [] for a missing folder. Never from a cache."""

    @abstractmethod
    def files(self) -> dict[str, StoredFile]:
        """Return every file in the folder and below, by name; never from a cache."""

    @abstractmethod
    def upload(self, path: Path, name: str) -> None:
        """Write a file from a file of this machine, which may be larger than the memory, and may grow meanwhile.

        Args:
            path: the file to copy.
            name: its name in the folder; an earlier file of that name is replaced.
        """

    @abstractmethod
    def download(self, name: str, path: Path) -> None:
        """Copy a file to this machine.

        Args:
            name: name of the file.
            path: gets the complete file, and its folders are made.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, or a folder with everything in it, if it exists."""

    @abstractmethod
    def local_path(self, entry: FileEntry) -> Path:
        """Return the path on this machine of a verified file, or of its copy, to memory-map it.

        Raises Damaged, and StorageError if the disk for the copy is full.
        """

    def remove_local_copies(self, folder: str) -> None:  # noqa: B027 (a folder on a disk needs no copies)
        """Remove the copies that `local_path` made of the files of a folder."""

    def write_json(self, name: str, value: Any) -> None:
        """Write a value as JSON.

        Args:
            name: name of the file.
            value: value of types that `json` can write; NaN and infinity raise ValueError.
        """
        self.write(name, (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object of a file. Raises Damaged if the file does not hold one."""
        try:
            value = json.loads(self.read(name))
        except ValueError as error:
            raise Damaged(f"{self.path(name)} is not readable JSON ({error})") from None
        if not isinstance(value, dict):
            raise Damaged(f"{self.path(name)} holds no JSON object")
        return value

    def read_verified(self, entry: FileEntry) -> bytes:
        """Return the content of a file that agrees with its entry. Raises Damaged if it does not."""
        try:
            data = self.read(entry.name)
        except FileNotFoundError:
            raise Damaged(f"{self.path(entry.name)} is missing") from None
        _verify(self.path(entry.name), entry, len(data), lambda: sha256_hex(data))
        return data

    def write_entry(self, name: str, data: bytes | memoryview) -> FileEntry:
        """Write a file and return its entry for a record.

        Args:
            name: name of the file.
            data: its content.
        """
        self.write(name, data)
        return FileEntry(name, len(data), sha256_hex(data))

    def path(self, name: str) -> str:
        """Return the path or URL of a file, for messages."""
        return f"{self.url}/{name}" if name else self.url


def open_folder(url: str | os.PathLike[str]) -> Folder:
    """Return the folder of a path or URL.

    Raises UserError for a URL that no installed file system knows, and for file systems on which others can read a file
    that is only half written.
    """
    scheme, is_url, path = str(url).partition("://")
    if not is_url or scheme == "file":
        return PosixFolder(Path(path if is_url else url))
    if scheme not in OBJECT_STORES:
        raise UserError(
            f"{url}: readers may see incomplete files there; use one of {', '.join(OBJECT_STORES)}, or a path"
        )
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

    def files(self) -> dict[str, StoredFile]:
        with self._storage_errors(""):
            paths = [path for path in self.root.rglob("*") if path.is_file() and path.suffix != ".partial"]
            return {path.relative_to(self.root).as_posix(): StoredFile(path.stat().st_size) for path in paths}

    def upload(self, path: Path, name: str) -> None:
        with self._storage_errors(name), open(path, "rb") as source:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            with open_atomic(self.root / name) as target:
                shutil.copyfileobj(source, target)

    def download(self, name: str, path: Path) -> None:
        with self._storage_errors(name), open(self.root / name, "rb") as source:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_atomic(path) as target:
                shutil.copyfileobj(source, target)

    def remove(self, name: str) -> None:
        path = self.root / name
        with self._storage_errors(name), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def local_path(self, entry: FileEntry) -> Path:
        path = self.root / entry.name
        with self._storage_errors(entry.name):
            _verify_file(path, entry, self.path(entry.name))
        return path

    @contextmanager
    def _storage_errors(self, name: str) -> Iterator[None]:
        """Raise StorageError for an OSError of the block other than FileNotFoundError."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError(f"{self.path(name)}: {error.strerror or error}") from error


class Bucket(Folder):
    """A folder of an object store or of anything else that fsspec opens.

    A failed operation is tried again. A write that raised may have happened, and writing the same bytes again is
    harmless. Listings never come from a cache, nothing is renamed, and the size of every written file is checked.
    """

    poll_seconds = 5.0  # every poll is a request that costs money

    def __init__(self, url: str, filesystem: Any = None, wait: Callable[[float], None] = time.sleep) -> None:
        """Open a bucket.

        Args:
            url: URL of the folder, such as gs://bucket/folder.
            filesystem: an fsspec file system to use instead of the URL's, for tests.
            wait: called with the seconds to wait before the next try.

        Raises:
            UserError: no installed file system knows the URL.
        """
        import fsspec  # imported here because most runs need no bucket

        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs tracebacks of failures, which we report
        self.url, self._wait = url.rstrip("/"), wait
        try:
            default, self._root = fsspec.core.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise UserError(f"{url}: {error}; install a package for such URLs (gs://: gcsfs, s3://: s3fs)") from None
        self._files = filesystem or default

    def read(self, name: str) -> bytes:
        return self._with_retries("read", name, lambda path: self._files.cat_file(path))

    def write(self, name: str, data: bytes | memoryview) -> None:
        def write_and_check(path: str) -> None:
            self._files.pipe_file(path, bytes(data))
            self._files.invalidate_cache()
            size = self._files.info(path)["size"]
            if size != len(data):
                raise OSError(f"{size:,} bytes of {len(data):,} arrived")

        self._with_retries("write", name, write_and_check)

    def names(self, folder: str = "") -> list[str]:
        def ls(path: str) -> list[str]:
            self._files.invalidate_cache()
            try:
                paths = self._files.ls(path, detail=False)
            except FileNotFoundError:
                return []
            return sorted({path.rstrip("/").rpartition("/")[2] for path in paths} - {""})

        return self._with_retries("list", folder, ls)

    def files(self) -> dict[str, StoredFile]:
        def find(path: str) -> dict[str, StoredFile]:
            self._files.invalidate_cache()
            entries = self._files.find(path, detail=True)
            return {
                name.removeprefix(f"{self._root}/"): StoredFile(entry["size"], entry.get("md5Hash", ""))
                for name, entry in entries.items()
                if entry["type"] == "file" and not name.endswith("/")
            }

        return self._with_retries("list", "", find)

    def upload(self, path: Path, name: str) -> None:
        def put(target: str) -> None:
            size = path.stat().st_size
            self._files.put_file(str(path), target)
            self._files.invalidate_cache()
            arrived = self._files.info(target)["size"]
            if arrived < size:
                raise OSError(f"{arrived:,} bytes of {size:,} arrived")

        self._with_retries("write", name, put)

    def download(self, name: str, path: Path) -> None:
        def get(source: str) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            self._files.get_file(source, str(partial))
            os.replace(partial, path)

        self._with_retries("read", name, get)

    def remove(self, name: str) -> None:
        def rm(path: str) -> None:
            self._files.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(path, recursive=True)

        self._with_retries("remove", name, rm)

    def local_path(self, entry: FileEntry) -> Path:
        # Copied once to this machine: downloaded, verified, and renamed last.
        path = self._staged_path(entry.name)
        if path.is_file():
            with contextlib.suppress(Damaged):
                _verify_file(path, entry, str(path))
                return path
        path.parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(path.parent).free
        if free_bytes < entry.bytes + MARGIN:
            raise StorageError(
                f"{self.path(entry.name)} needs {entry.bytes + MARGIN:,} bytes of {path.parent}, which has "
                f"{free_bytes:,} free; set REALM_STAGING to a folder with more room"
            )
        write_atomic(path, self.read_verified(entry))
        return path

    def remove_local_copies(self, folder: str) -> None:
        shutil.rmtree(self._staged_path(folder), ignore_errors=True)

    def _staged_path(self, name: str) -> Path:
        """Return the path of a file's copy on this machine."""
        return staging_folder() / sha256_hex(self.url.encode())[:16] / name

    def _with_retries(self, verb: str, name: str, operation: Callable[[str], _T]) -> _T:
        """Return `operation(path)`, tried up to TRIES times. Raises FileNotFoundError at once, else StorageError."""
        for attempt in range(TRIES):
            try:
                return operation(f"{self._root}/{name}" if name else self._root)
            except FileNotFoundError:
                raise
            except Exception as error:  # every file system has other classes of errors
                if attempt == TRIES - 1:
                    raise StorageError(f"{self.path(name)}: cannot {verb} it after {TRIES} tries ({error})") from error
                logger.warning("%s: cannot %s it (%s); trying again", self.path(name), verb, error)
                self._wait(FIRST_WAIT * 2**attempt)
        raise AssertionError("the last try returns or raises")


@functools.cache
def staging_folder() -> Path:
    """Return the folder for copies of a bucket's files: REALM_STAGING, else a folder of the user's cache."""
    folder = os.environ.get("REALM_STAGING")
    return Path(folder) if folder else cache_folder() / "staged"


def parallel_map(function: Callable[..., None], *items: Iterable[Any]) -> None:
    """Call `function` for each item in AT_A_TIME threads, because a bucket answers only after tens of milliseconds.

    Args:
        function: the function.
        *items: an iterable for each argument, as in `map`.

    Raises:
        Exception: the first failed call, in order, raised it; calls that have not begun are canceled.
    """
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        try:
            list(pool.map(function, *items))
        finally:
            pool.shutdown(cancel_futures=True)


def cache_folder() -> Path:
    """Return this machine's folder for files that can be recomputed: REALM_CACHE, else one in the user's cache."""
    folder = os.environ.get("REALM_CACHE")
    return Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "realm_jax"


def _verify_file(path: Path, entry: FileEntry, name: str, content: bool = True) -> None:
    """Raise Damaged if a file on a disk does not agree with its entry; `name` is for the message."""
    try:
        _verify(name, entry, path.stat().st_size, lambda: file_digest(path) if content else entry.sha256)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None


def _verify(name: str, entry: FileEntry, size: int, checksum: Callable[[], str]) -> None:
    """Raise Damaged if a size or a checksum does not agree with an entry; `name` is for the message."""
    if size != entry.bytes:
        raise Damaged(f"{name} has {size:,} bytes, not {entry.bytes:,}")
    if checksum() != entry.sha256:
        raise Damaged(f"{name} is damaged: its checksum is different")
