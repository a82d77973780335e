"""A per-machine cache of arrays that can be recomputed, in `$REALM_CACHE`, as memory-mapped files.

    ROOT/vectors/<encoder>/<item>.npy     the arrays of an item one after another, uint8
    ROOT/vectors/<encoder>/<item>.json    put last: name → dtype, shape, first byte and checksum of each

If space is needed, all items of an entry, ROOT/vectors/<encoder>, are evicted (`indexing/vector_cache.py` fills it).
Every read compares arrays with their checksums. JAX stores its compiled programs there too (`jax`).
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

from realm_jax.checksums import checksums
from realm_jax.errors import UserError
from realm_jax.storage import Damaged, cache_folder, open_atomic, write_json_atomic

VECTORS = "vectors"  # the only folder that this module evicts from
BYTES = 20_000_000_000  # of all entries together, unless REALM_CACHE_BYTES is set
ALIGNED = 64  # bytes: arrays begin at multiples of it, so that a CPU device can use them without a copy
Arrays = dict[str, NDArray]


def cache_bytes() -> int:
    """Return the size limit of the cache in bytes; 0 turns it off.

    Raises UserError if REALM_CACHE_BYTES is not a number.
    """
    text = os.environ.get("REALM_CACHE_BYTES", str(BYTES))
    if not text.isdecimal():
        raise UserError(f"REALM_CACHE_BYTES={text}: give a number of bytes, or 0 for no cache")
    return int(text)


def cache_programs() -> None:
    """Let JAX store compiled programs in the cache folder, unless JAX_COMPILATION_CACHE_DIR names another.

    Raises UserError as `cache_bytes` does.
    """
    cache_bytes()
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "jax"))


class CacheEntry:
    """The vectors of one encoder: named items, each of several arrays."""

    def __init__(self, name: str) -> None:
        self.path = cache_folder() / VECTORS / name

    def items(self) -> list[str]:
        """Return the names of its items. Raises OSError."""
        try:
            return sorted(name.removesuffix(".json") for name in os.listdir(self.path) if name.endswith(".json"))
        except FileNotFoundError:
            return []

    def read(self, item: str) -> Arrays:
        """Map the arrays of an item into memory. Raises FileNotFoundError if it is not there, and Damaged."""
        try:
            entries = json.loads((self.path / f"{item}.json").read_bytes())
            data = np.asarray(np.load(self.path / f"{item}.npy", mmap_mode="r"))
            arrays: Arrays = {}
            for name, (dtype, shape, first, _) in entries.items():
                size = np.dtype(dtype).itemsize * int(np.prod(shape))
                arrays[name] = data[first : first + size].view(dtype).reshape(shape)
            recorded = {name: entry[3] for name, entry in entries.items()}
            is_intact = checksums(arrays) == recorded
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"{self.path} has no {item}") from None
        except Exception:  # damaged bytes may raise anything, and a cache miss is never fatal
            is_intact = False
        if not is_intact:
            raise Damaged(f"{self.path}/{item}.npy is damaged or cannot be read")
        with contextlib.suppress(OSError):
            os.utime(self.path)  # least recently used entries are evicted first
        return arrays

    def write(self, item: str, arrays: Mapping[str, NDArray]) -> bool:
        """Store an item, evicting the least recently used entries.

        Args:
            item: its name.
            arrays: by name.

        Returns:
            False if the item exceeds the size limit.

        Raises:
            OSError: the folder cannot be written to.
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
        others = [other for other in (cache_folder() / VECTORS).glob("*") if other != self.path]
        total, limit = _size(self.path), cache_bytes()
        for other in sorted(others, key=_last_use, reverse=True):
            total += _size(other)
            if total > limit:
                shutil.rmtree(other, ignore_errors=True)


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder, 0 if it is gone."""
    with contextlib.suppress(OSError):
        return sum(file.stat().st_size for file in folder.glob("*"))
    return 0


def _last_use(folder: Path) -> float:
    """Return the time of the last read or write of an entry, 0 if it is gone."""
    with contextlib.suppress(OSError):
        return folder.stat().st_mtime
    return 0.0
