"""A checkpoint with a local cache: its arrays are read from a copy that the first read leaves.

A question needs two of three networks and the vectors, of a file format for many devices, within a second or two. The
copy is in the cache of this machine (`cache.py`), never in the run folder: an entry for each checkpoint, by the digest
of its record, and an item for each network. It is compared with the checksums in the checkpoint's record; one that
differs is made again. Not for training, which reads everything once.
"""

import logging
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import flax
import jax
import numpy as np

from realm_jax.cache import Arrays, CacheEntry, cache_bytes
from realm_jax.checksums import Sums, named_arrays
from realm_jax.storage import Damaged
from realm_jax.train.checkpoints import SavedCheckpoint

logger = logging.getLogger(__name__)


class CachedCheckpoint(SavedCheckpoint):
    """A checkpoint, of which networks and arrays on the host are read from the copy where there is a good one."""

    def params(self, names: Collection[str], shardings: Any = None) -> Any:
        if shardings is not None:
            return super().params(names, shardings)
        prefixes = {name: self._prefix(name) for name in names}
        found = {name: kept for name in names if (kept := self._kept(name, prefixes[name])) is not None}
        networks = {name: _tree(arrays, prefixes[name]) for name, arrays in found.items()}
        if missing := [name for name in names if name not in found]:
            networks |= super().params(missing)
            for name in missing:
                self._keep(name, {prefixes[name] + path: x for path, x in named_arrays(networks[name]).items()})
        return {name: networks[name] for name in names}

    def read(self, item: str, like: Any = None) -> Any:
        prefix = f"{item}.{item}"
        if like is not None or prefix not in self._sums:
            return super().read(item, like)
        if (kept := self._kept(item, prefix)) is not None:
            return kept[prefix]
        found = super().read(item)
        self._keep(item, {prefix: found})
        return found

    def _prefix(self, network: str) -> str:
        """What the names of a network's arrays begin with."""
        prefixes = [f"state.{part}.{network}." for part in ("trained", "frozen")]
        return next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in self._sums)), prefixes[0])

    @cached_property
    def _sums(self) -> Sums:
        return dict(self.record["checksums"])

    @cached_property
    def _entry(self) -> CacheEntry | None:
        """Where copies are; None if nothing is kept, and where several processes read one checkpoint together."""
        keeps = cache_bytes() > 0 and jax.process_count() == 1
        return CacheEntry("opened", self.record["digest"][:32]) if keeps else None

    def _kept(self, item: str, prefix: str) -> Arrays | None:
        """The copy of all arrays whose names begin with `prefix`, if it is what was saved."""
        if self._entry is None:
            return None
        try:
            return self._entry.read(item, {name: sums for name, sums in self._sums.items() if name.startswith(prefix)})
        except FileNotFoundError:
            return None
        except Damaged as fault:
            logger.warning("%s; the checkpoint is read again", fault)
            return None

    def _keep(self, item: str, arrays: Mapping[str, Any]) -> None:
        """Cache a copy. If that fails, the next question only takes longer."""
        if self._entry is None:
            return
        try:
            self._entry.write(item, {name: np.asarray(x) for name, x in arrays.items()})
        except OSError as fault:
            logger.debug("%s: no copy of %s (%s)", self._entry.path, item, fault)


def _tree(arrays: Arrays, prefix: str) -> Any:
    """A network from its arrays by name."""
    return flax.traverse_util.unflatten_dict({tuple(name[len(prefix) :].split(".")): x for name, x in arrays.items()})
