"""Keep the run directory of a bucket on this machine's disk, and copy its changes to the bucket.

Programs append to files, rename folders and memory-map arrays, and an object store can do none of that. So a process
that is given `--workdir=gs://BUCKET/FOLDER` works in a local copy, whose name is the quoted URL:

    CACHE/runs/trainer-0/gs%3A%2F%2FBUCKET%2FFOLDER/realm/metrics.jsonl    uploaded every SECONDS when it has changed

Files that several machines write are in the bucket only (`SHARED`, `SAVED`): `url_of` turns a path in the copy into its
URL, with which Orbax writes checkpoints, and trainer and builder their shared folder. Process 0 uploads; the others
only read, except that each keeps its own log (`run_log.py`). Read next: `Folder` in `storage.py`.
"""

import contextlib
import functools
import hashlib
import logging
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote

from realm_jax.errors import UserError
from realm_jax.storage import (
    Folder,
    StorageError,
    StoredFile,
    cache_folder,
    exclusive_lock,
    open_folder,
    parallel_map,
)

logger = logging.getLogger(__name__)

BUCKET_SCHEME = "gs://"  # of a run directory in a bucket
SECONDS = 15.0  # between two uploads: later changes are lost if the machine vanishes
SCHEME = quote("://", safe="")  # in the name of every copy
LOCK = ".mirror.lock"  # held by the process that works in the copy
SHARED = {"exports", "index", "jobs", "logs", "programs"}  # folders that several machines write, in the bucket only
SAVED = {"checkpoints", "best"}  # folders of a task that Orbax writes, in the bucket only
COMMIT = "commit_success.txt"  # in a checkpoint of a bucket: Orbax's file of a finished save
RUN_ID = "run.json"  # in the bucket only, because it is written before the status that names it
MANIFEST = "manifest.json"  # lists the files of an exported model: written after them, removed before them
DOWNLOADING = ".download.lock"  # held while the copy becomes equal to the bucket

_mirrors: dict[Path, "Mirror"] = {}  # copy → what uploads it, in this process


def is_url(path: str) -> bool:
    """Return True for the URL of a bucket's folder, such as gs://bucket/runs/one."""
    return "://" in path and not path.startswith("file://")


def url_of(path: Path) -> str:
    """Return the URL of a path in the copy of a bucket's run; any other path stays."""
    for number, part in enumerate(path.parts):
        if SCHEME in part:
            return "/".join((unquote(part), *path.parts[number + 1 :]))
    return str(path)


def is_mirrored(name: str) -> bool:
    """Return True for a file of the copy, False for one that is in the bucket only, or on the disk only (hidden)."""
    first, *rest = name.split("/")
    is_in_bucket_only = first in SHARED or name == RUN_ID or bool(rest and rest[0] in SAVED)
    return not is_in_bucket_only and not any(part.startswith(".") for part in (first, *rest))


def copy_of(url: str, process: str) -> Path:
    """Return the folder of this machine in which a process works on the run of a bucket.

    Args:
        url: URL of the run directory.
        process: name of the process; two that work at the same time have different ones.
    """
    return cache_folder() / "runs" / process / quote(url.rstrip("/"), safe="")


def download(url: str, process: str, is_needed: Callable[[str], bool] = is_mirrored) -> Path:
    """Copy the files of a run from its bucket, except those that are in the copy already.

    Args:
        url: URL of the run directory.
        process: see `copy_of`. A second process of this name waits.
        is_needed: True for the name of a file to copy, if `is_mirrored` is True too.

    Returns:
        The copy, which has only these files, as they are in the bucket.

    Raises:
        StorageError: the bucket cannot be read, or the disk is full.
    """
    bucket, folder = open_folder(url), copy_of(url, process)
    folder.mkdir(parents=True, exist_ok=True)

    def listed() -> dict[str, StoredFile]:
        return {name: file for name, file in bucket.files().items() if is_mirrored(name) and is_needed(name)}

    def manifests(files: dict[str, StoredFile]) -> dict[str, StoredFile]:
        return {name: file for name, file in files.items() if name.rpartition("/")[2] == MANIFEST}

    def copy(name: str, file: StoredFile) -> None:
        path = folder / name
        if not _is_copy(path, file):
            path.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                bucket.download(name, path)

    with exclusive_lock(folder, DOWNLOADING, wait=True):
        while True:
            files = listed()
            known_names = {*files, LOCK, DOWNLOADING}
            for path in sorted(folder.rglob("*"), reverse=True):  # the content of a folder before the folder
                if path.is_dir():
                    with contextlib.suppress(OSError):  # it is not empty
                        path.rmdir()
                elif path.relative_to(folder).as_posix() not in known_names:
                    path.unlink()
            parallel_map(copy, files.keys(), files.values())
            if manifests(files) == manifests(listed()):  # else the run has replaced a model meanwhile
                return folder


@functools.cache
def download_model(url: str) -> Path:
    """Copy the exported model of a run, or a folder of weights, from its bucket, once in a process.

    Args:
        url: URL of the run directory or of the weights.

    Returns:
        The copy, without passage vectors and records; empty if there is nothing.

    Raises:
        StorageError: the bucket cannot be read, or the disk is full.
    """
    is_run = {"config.json", "data.json"} <= {*open_folder(url).names()}

    def is_needed(name: str) -> bool:
        in_model = name.startswith("model/") or not is_run
        return not name.endswith(".npy") and ("/" not in name or in_model)

    return download(url, "model", is_needed)


@contextmanager
def local_workdir(workdir: str, process: str, uploads: bool = True) -> Iterator[Path]:
    """Give a process a run directory on this machine; changes reach the bucket within the block and at its end.

    Args:
        workdir: a path, which stays, or the URL of a bucket's folder.
        process: see `copy_of`.
        uploads: False in a process that leaves it to another one.

    Raises:
        StorageError: the bucket cannot be read, or the last changes could not be uploaded.
        UserError: the URL has another scheme, or another process of this machine works in the same copy.
    """
    if not is_url(workdir):
        yield Path(workdir)
        return
    if not workdir.startswith(BUCKET_SCHEME):
        raise UserError(f"--workdir={workdir}: checkpoints need gs://BUCKET/FOLDER or a path; name one of them")
    folder = copy_of(workdir, process)
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(folder, LOCK):
        download(workdir, process)  # removes what a killed process has not uploaded
        if not uploads:
            yield folder
            return
        with Mirror(folder, open_folder(workdir)):
            yield folder


def upload_changes(workdir: Path) -> None:
    """Upload what has changed in a run directory, if it is a copy that this process uploads; a failure is a warning."""
    if (mirror := _mirrors.get(workdir)) is not None:
        mirror.upload()


class Mirror:
    """Uploads a folder in a thread. A context manager: leaving it uploads the last changes."""

    def __init__(self, folder: Path, bucket: Folder) -> None:
        """Begin with a copy.

        Args:
            folder: has the files of the bucket.
            bucket: the run directory in the bucket.
        """
        self._folder, self._bucket = folder, bucket
        self._uploaded = _stamps(folder)  # of every file that is in the bucket
        self._uploading, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def __enter__(self) -> "Mirror":
        _mirrors[self._folder] = self
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        del _mirrors[self._folder]
        self._closed.set()
        self._thread.join()
        try:
            self._upload()
        except StorageError as error:
            if kind is None:
                raise
            logger.error("%s", error)  # and the first exception propagates

    def _run(self) -> None:
        while not self._closed.wait(SECONDS):
            self.upload()

    def upload(self) -> None:
        """Upload what has changed; a failure is a warning, and the next call tries again."""
        try:
            self._upload()
        except (OSError, StorageError) as error:
            logger.warning("%s; the next upload tries again", error)

    def _upload(self) -> None:
        """Make the bucket equal to the folder. Raises StorageError.

        A file refers only to older ones. So the newest is removed first, and the oldest uploaded first.
        """
        with self._uploading:
            stamps = _stamps(self._folder)
            changed = [name for name, stamp in stamps.items() if self._uploaded.get(name) != stamp]
            replaced = {name for name in changed if name.rpartition("/")[2] == MANIFEST}
            for name in sorted(self._uploaded, key=self._uploaded.__getitem__, reverse=True):
                if name not in stamps or name in replaced:
                    self._bucket.remove(name)
                    del self._uploaded[name]
            for name in sorted(changed, key=stamps.__getitem__):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    self._bucket.upload(self._folder / name, name)
                    self._uploaded[name] = stamps[name]


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return name → time of the last change in nanoseconds, and size, of the mirrored files of a folder."""
    stamps = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        with contextlib.suppress(FileNotFoundError):
            if is_mirrored(name) and path.is_file():
                stat = path.stat()
                stamps[name] = stat.st_mtime_ns, stat.st_size
    return stamps


def _is_copy(path: Path, file: StoredFile) -> bool:
    """Return True if a file of this machine has the content of a file in a bucket, by its size and checksum."""
    if not file.md5 or not path.is_file() or path.stat().st_size != file.bytes:
        return False
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, "md5").digest()
    return b64encode(digest).decode() == file.md5
