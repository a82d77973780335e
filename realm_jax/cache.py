"""A per-machine cache of arrays that can be recomputed, in `$REALM_CACHE`, as memory-mapped files.

    ROOT/<kind>/<name>/<item>.npy     the arrays of an item one after another, uint8
    ROOT/<kind>/<name>/<item>.json    put last: name → dtype, shape, first byte and checksum of each

An entry, ROOT/<kind>/<name>, is evicted as a whole when space is needed. Kinds are `vectors`, of passages by encoder
(`index/vector_cache.py`), and `opened`, of checkpoints that answer questions (`train/cached_checkpoint.py`).
Nothing that is read is trusted: arrays are compared with their checksums. JAX keeps its programs beside them (`jax`).
"""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.checksums import Sums, checksums
from realm_jax.errors import UserError
from realm_jax.storage import Damaged, cache_folder, open_atomic, write_json_atomic

KINDS = ("vectors", "opened")  # this module leaves other folders alone
BYTES = 20_000_000_000  # of everything together, unless REALM_CACHE_BYTES says otherwise
ALIGNED = 64  # bytes: where an array begins, so that a CPU device can use it where it lies
Arrays = dict[str, NDArray]


def cache_bytes() -> int:
    """The size limit of the cache in bytes; 0 turns it off. Raises UserError if REALM_CACHE_BYTES is not a number."""
    text = os.environ.get("REALM_CACHE_BYTES", str(BYTES))
    if not text.isdecimal():
        raise UserError(f"REALM_CACHE_BYTES={text}: give a number of bytes, or 0 to keep nothing")
    return int(text)


def cache_programs() -> None:
    """Let JAX keep what it compiles there, unless JAX_COMPILATION_CACHE_DIR names a folder already. Raises as
    `cache_bytes` does."""
    cache_bytes()
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "jax"))


class CacheEntry:
    """One cache entry: named items, each of several arrays."""

    def __init__(self, kind: str, name: str) -> None:
        assert kind in KINDS
        self.path = cache_folder() / kind / name

    def items(self) -> list[str]:
        """The names of its items. Raises OSError."""
        try:
            return sorted(name.removesuffix(".json") for name in os.listdir(self.path) if name.endswith(".json"))
        except FileNotFoundError:
            return []

    def read(self, item: str, expected: Sums | None = None) -> Arrays:
        """The arrays of an item, memory-mapped. expected: what their checksums must be.

        Raises FileNotFoundError if it is not there, and Damaged.
        """
        try:
            entries = json.loads((self.path / f"{item}.json").read_bytes())
            data = np.asarray(np.load(self.path / f"{item}.npy", mmap_mode="r"))
            arrays: Arrays = {}
            for name, (dtype, shape, first, _) in entries.items():
                size = np.dtype(dtype).itemsize * int(np.prod(shape))
                arrays[name] = data[first : first + size].view(dtype).reshape(shape)
            recorded = {name: entry[3] for name, entry in entries.items()}
            whole = checksums(arrays) == (recorded if expected is None else expected)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"{self.path} has no {item}") from None
        except Exception:  # damaged bytes may raise anything, and a cache miss is never fatal
            whole = False
        if not whole:
            raise Damaged(f"{self.path}/{item}.npy is damaged or cannot be read")
        with contextlib.suppress(OSError):
            os.utime(self.path)  # least recently used entries are evicted first
        return arrays

    def write(self, item: str, arrays: Mapping[str, NDArray]) -> bool:
        """Store an item, evicting the least recently used entries. Returns False if it exceeds the size limit.

        Raises OSError.
        """
        if _size(self.path) + sum(array.nbytes for array in arrays.values()) > cache_bytes():
            return False
        sums, size = checksums(dict(arrays)), 0
        entries: dict[str, list[Any]] = {}  # name → dtype, shape, first byte, checksum
        for name, array in arrays.items():
            entries[name] = [array.dtype.name, list(array.shape), size, sums[name]]
            size += array.nbytes + -array.nbytes % ALIGNED
        data = np.zeros(size, np.uint8)
        for name, array in arrays.items():
            first = entries[name][2]
            data[first : first + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.path.mkdir(parents=True, exist_ok=True)
        with open_atomic(self.path / f"{item}.npy") as stream:
            np.save(stream, data, allow_pickle=False)
        write_json_atomic(self.path / f"{item}.json", entries)
        self._evict()
        return True

    def _evict(self) -> None:
        """Evict the least recently used entries other than this one until the cache is within its size limit."""
        others = [other for kind in KINDS for other in (cache_folder() / kind).glob("*") if other != self.path]
        total, limit = _size(self.path), cache_bytes()
        for other in sorted(others, key=_last_use, reverse=True):
            total += _size(other)
            if total > limit:
                shutil.rmtree(other, ignore_errors=True)


def _size(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(file.stat().st_size for file in folder.glob("*"))
    return 0


def _last_use(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return folder.stat().st_mtime
    return 0.0
