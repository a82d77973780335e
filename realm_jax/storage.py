"""Paths that several processes or runs share: everything appears whole, or not at all.

A reader never sees a half-written file or folder: content is written beside its final name, flushed to the disk and
then renamed. POSIX file systems only. Not for scratch files of one process. Read `publish_folder` next.
"""

import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from realm_jax.errors import UserError

logger = logging.getLogger(__name__)


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
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _flush_folder(final.parent)


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


def make_folder(path: str | os.PathLike[str], name: str) -> None:
    """Make a folder that can be written to, with those above it. `name`: of the flag or key that the user gave."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as fault:
        raise UserError(f"{name}={path}: no folder that can be written to ({fault.strerror}); name another") from None


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold a folder for this process. Raises UserError while another process of this machine holds it."""
    with open(folder / ".lock", "a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process is training there; wait for it, or stop it first") from None
        except OSError as fault:  # a file system without locks
            logger.debug("%s: not locked (%s)", folder, fault)
        yield


def publish_folder(temporary: str | os.PathLike[str], final: str | os.PathLike[str]) -> None:
    """Give a finished folder its final name in one step. Raises UserError when that name is taken.

    Both must lie on one file system: make `temporary` beside `final`.
    """
    if os.path.lexists(final):
        raise UserError(f"{final} already exists; remove it or choose another folder")
    _flush_folder(Path(temporary))
    os.chmod(temporary, 0o777 & ~_umask())
    os.rename(temporary, final)
    _flush_folder(Path(final).parent)


def flush_to_disk(stream: IO[bytes]) -> None:
    """Return only when what was written to `stream` would outlive a power cut."""
    stream.flush()
    os.fsync(stream.fileno())


def _flush_folder(folder: Path) -> None:
    """A rename is durable only once the folder that holds the name is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """The process's umask, which can be read only by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
