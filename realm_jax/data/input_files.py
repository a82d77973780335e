"""Files that are read, on this machine or in a bucket (gs://…, s3://…), plain or packed (`PACKED`).

Errors of storage become UserErrors that name the file; those of unpacking are `UNPACKING_ERRORS`. Not for what the
bytes mean. Read `realm_jax.data.lines` next for files of records, `realm_jax.corpora.wikipedia` for dumps.
"""

import bz2
import errno
import glob
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from realm_jax.errors import UserError, install_extra
from realm_jax.storage import StorageError

try:
    from backports import zstd  # of the extra `documents`
except ImportError:
    zstd = None  # type: ignore[assignment]


def _open_zst(stored: Any, _mode: str) -> Any:
    if zstd is None:
        raise UserError(f".zst needs backports.zstd; {install_extra('documents')}")
    return zstd.open(stored, "rb")


# By the ending of the name, in small letters.
PACKED: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open, ".zst": _open_zst}
# OSError is one of unpacking, because _RawFile raises UserErrors for those of storage.
UNPACKING_ERRORS = (EOFError, OSError, lzma.LZMAError, zlib.error, *((zstd.ZstdError,) if zstd else ()))
_BUFFER = 1 << 18  # bytes


def file_system(path: str) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path in it. Raises UserError if nothing opens such a URL."""
    import fsspec  # here, since most jobs read no bucket

    try:
        files, root = fsspec.core.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise UserError(f"{path}: {error}; install a package for such URLs (gs://: gcsfs, s3://: s3fs)") from None
    return files, root


def size_of(path: str) -> int:
    """Return the bytes of a file as it is stored."""
    files, root = file_system(path)
    with storage_errors(path):
        return int(files.size(root))


def matching(pattern: str) -> list[str]:
    """List the files that have a name or fit a pattern, in order. Raises UserError if there are none."""
    with storage_errors(pattern):
        if "://" in pattern:
            files, root = file_system(pattern)
            paths = [f"{pattern.partition('://')[0]}://{path}" for path in sorted(files.glob(root))]
        else:
            names = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
            paths = [name for name in names if not Path(name).is_dir()]
    if not paths:
        raise UserError(f"no file fits {pattern}; name a file or a pattern such as news/*.jsonl.gz")
    return paths


def is_folder(path: str) -> bool:
    """Return True if a path is a folder, here or in a bucket."""
    if "://" not in path:
        return os.path.isdir(path)
    files, root = file_system(path)
    with storage_errors(path):
        return bool(files.isdir(root))


def files_below(folder: str) -> list[str]:
    """List the files in a folder and in its folders by their path in it with `/`, in order, without hidden ones."""
    files, root = file_system(folder)
    with storage_errors(folder):
        paths = [path.removeprefix(root).lstrip("/") for path in files.find(root)]
    return sorted(path for path in paths if not any(part.startswith(".") for part in path.split("/")))


@contextmanager
def storage_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of storage into UserErrors that name the file; a StorageError may pass, so trying again may help."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each file system has its own kinds
        is_missing = isinstance(error, FileNotFoundError)
        reason = os.strerror(errno.ENOENT) if is_missing else getattr(error, "strerror", None) or error
        message = f"cannot read {path} ({reason}); check the path and its permissions"
        is_wrong_path = is_missing or isinstance(error, IsADirectoryError | NotADirectoryError)
        raise (UserError if is_wrong_path else StorageError)(message) from None


@contextmanager
def open_unpacked(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open a file for reading; the ending of its name says how it is packed.

    Opening and reading raise UserError for errors of storage; reading raises UNPACKING_ERRORS for damage.
    """
    name = os.fspath(path)
    with ExitStack() as stack:
        with storage_errors(name):
            if "://" in name:
                files, root = file_system(name)
                raw = files.open(root, "rb")
            else:
                raw = open(name, "rb", buffering=0)
        stored = stack.enter_context(io.BufferedReader(_RawFile(raw, name), _BUFFER))
        unpack = PACKED.get(Path(name).suffix.lower())
        yield stack.enter_context(unpack(stored, "rb")) if unpack else stored


class _RawFile(io.RawIOBase):
    """A file of any file system that raises nothing but UserErrors."""

    def __init__(self, stream: Any, path: str):
        self.stream, self.path = stream, path

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        with storage_errors(self.path):
            return bool(self.stream.seekable())

    def readinto(self, buffer: Any) -> int:
        with storage_errors(self.path):
            data = self.stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        """Change the position, as files do.

        Args:
            position: in bytes.
            whence: origin of the position, as in `io`.
        """
        with storage_errors(self.path):
            return int(self.stream.seek(position, whence))

    def tell(self) -> int:
        with storage_errors(self.path):
            return int(self.stream.tell())

    def close(self) -> None:
        self.stream.close()
        super().close()
