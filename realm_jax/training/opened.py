"""A checkpoint that is asked again and again: its arrays are read from a copy that the first reading leaves.

A question needs two of three networks and the vectors, of a file format for many devices, within a second or two. The
copy is in the cache of this machine, never in the run folder, and a memory-mapped file an item:

    OPENED/<digest of the checkpoint's record>/reader.npy     the arrays one after another, uint8
    OPENED/<digest of the checkpoint's record>/reader.json    put last: name → dtype, shape and first byte of each

Arrays are compared with the checksums in the checkpoint's record, wherever they are read from; a copy that differs is
made again. Not for training, which reads everything once.
"""

import json
import logging
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.cache import cache_bytes, has_room, kept_in, make_room, used
from realm_jax.storage import open_atomic, write_json_atomic
from realm_jax.training.checkpoints import Saved
from realm_jax.training.checksums import checksums, differing, named_arrays

logger = logging.getLogger(__name__)

ALIGNED = 64  # bytes: where an array begins, so that a CPU device can use it where it lies
Arrays = Mapping[str, NDArray]  # by their names in a checkpoint's checksums


class CachedCheckpoint(Saved):
    """A checkpoint, of which networks and arrays on the host are read from the copy where there is a good one."""

    def params(self, names: Collection[str], shardings: Any = None) -> Any:
        if shardings is not None:
            return super().params(names, shardings)
        places = {name: self._place(name) for name in names}
        found = {name: kept for name in names if (kept := self._kept(name, places[name])) is not None}
        networks = {name: _tree(arrays, places[name]) for name, arrays in found.items()}
        if missing := [name for name in names if name not in found]:
            networks |= super().params(missing)
            for name in missing:
                self._keep(name, {places[name] + path: x for path, x in named_arrays(networks[name]).items()})
        return {name: networks[name] for name in names}

    def read(self, item: str, like: Any = None) -> Any:
        place = f"{item}.{item}"
        if like is not None or place not in self._sums:
            return super().read(item, like)
        if (kept := self._kept(item, place)) is not None:
            return kept[place]
        found = super().read(item)
        self._keep(item, {place: found})
        return found

    def _place(self, network: str) -> str:
        """What the names of a network's arrays begin with."""
        places = [f"state.{part}.{network}." for part in ("trained", "frozen")]
        return next((place for place in places if any(name.startswith(place) for name in self._sums)), places[0])

    @cached_property
    def _sums(self) -> dict[str, list[int]]:
        return dict(self.record["checksums"])

    @cached_property
    def _folder(self) -> Path | None:
        """Where copies are; None where nothing is kept, and where several processes read one checkpoint together."""
        keeps = cache_bytes() > 0 and jax.process_count() == 1
        return kept_in("opened", self.record["digest"][:32]) if keeps else None

    def _kept(self, item: str, place: str) -> Arrays | None:
        """The copy of all arrays whose names begin with `place`, if it is what was saved."""
        if self._folder is None:
            return None
        try:
            arrays = _read(self._folder, item)
            whole = arrays.keys() == {name for name in self._sums if name.startswith(place)}
            whole = whole and not differing(self._sums, checksums(arrays))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except Exception:  # of whatever kind torn bytes raise: no copy is worth stopping for
            whole = False
        if not whole:
            logger.warning("%s/%s.npy is damaged or cannot be read; the checkpoint is read again", self._folder, item)
            return None
        used(self._folder)
        return arrays

    def _keep(self, item: str, arrays: Mapping[str, Any]) -> None:
        """Leave a copy. Where that is not possible, the next question takes longer and nothing else."""
        if self._folder is None or not has_room(self._folder, sum(x.nbytes for x in arrays.values())):
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            host = {name: np.asarray(x) for name, x in arrays.items()}
            data, parts = _together(host)
            with open_atomic(self._folder / f"{item}.npy") as stream:
                np.save(stream, data, allow_pickle=False)
            write_json_atomic(self._folder / f"{item}.json", parts)
        except OSError as fault:
            logger.debug("%s: no copy of %s (%s)", self._folder, item, fault)
        make_room(self._folder)


def _read(folder: Path, item: str) -> Arrays:
    """The arrays of a copy, memory-mapped."""
    parts = json.loads((folder / f"{item}.json").read_bytes())
    data = np.asarray(np.load(folder / f"{item}.npy", mmap_mode="r"))
    return {name: _view(data, *part) for name, part in parts.items()}


def _together(arrays: Arrays) -> tuple[NDArray[np.uint8], dict[str, list[Any]]]:
    """The bytes of arrays one after another, and what `_view` needs to find each."""
    parts: dict[str, list[Any]] = {}
    size = 0
    for name, array in arrays.items():
        parts[name] = [array.dtype.name, list(array.shape), size]
        size += array.nbytes + -array.nbytes % ALIGNED
    data = np.zeros(size, np.uint8)
    for name, array in arrays.items():
        first = parts[name][2]
        data[first : first + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return data, parts


def _view(data: NDArray[np.uint8], dtype: str, shape: list[int], first: int) -> NDArray:
    kind = np.dtype(dtype)
    return data[first : first + kind.itemsize * int(np.prod(shape))].view(kind).reshape(shape)


def _tree(arrays: Arrays, place: str) -> Any:
    """A network from its arrays by name."""
    return flax.traverse_util.unflatten_dict({tuple(name[len(place) :].split(".")): x for name, x in arrays.items()})
