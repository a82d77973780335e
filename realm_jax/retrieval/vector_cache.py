"""A cache of passage vectors that runs on this machine have computed, by passage content.

An encoder, named by a digest of all that makes it a function, has an entry in the cache; a passage is known by a digest
of its tokens, so an edited or newly prepared corpus finds every passage that did not change, in whatever row it is
now. Each item of the entry holds some passages:

    keys       digests of rows, uint32 [rows, 4]
    vectors    float32 [rows, width]

Not for towers that are being trained, whose vectors nobody asks for again. Which encoder: `train/embedding.py`.
"""

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from realm_jax.cache import CacheEntry, cache_bytes
from realm_jax.retrieval.embed import CorpusRows
from realm_jax.storage import Damaged, digest

logger = logging.getLogger(__name__)


def row_keys(rows: CorpusRows) -> NDArray[np.uint64]:
    """What a passage is known by: a digest of its tokens and of where its title ends, uint64 [rows, 2]."""
    parts = zip(rows.ids, rows.lengths.tolist(), rows.title_lengths.astype("<u2"), strict=True)
    digests = (
        hashlib.blake2b(title.tobytes() + ids[:length].astype("<u2", copy=False).tobytes(), digest_size=16).digest()
        for ids, length, title in parts
    )
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64, copy=False).reshape(-1, 2)


class _Part(NamedTuple):
    keys: NDArray[np.uint64]
    vectors: NDArray[np.float32]  # memory-mapped


class VectorCache:
    """The vectors of one encoder on this machine's disk."""

    def __init__(self, encoder: str) -> None:
        """encoder: its digest."""
        self._entry = CacheEntry("vectors", encoder)
        self._usable = True

    @property
    def path(self) -> Path:
        """Where the vectors of this encoder lie."""
        return self._entry.path

    def find(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.float32] | None]:
        """Which of some rows are known, [rows], and their vectors, [rows, width]: arbitrary where a row is not, None
        if none is. Damaged parts are logged and skipped; so is a folder that cannot be read, once,
        and from then on nothing is kept either."""
        parts = list(self._parts())
        known = np.concatenate([np.empty((0, 2), np.uint64), *(part.keys for part in parts)])
        if not len(known):
            return np.zeros(len(keys), np.bool_), None
        order = np.argsort(known[:, 0], kind="stable")
        place = order[np.minimum(np.searchsorted(known[order, 0], keys[:, 0]), len(known) - 1)]
        found = (known[place] == keys).all(axis=1)
        vectors = np.empty((len(keys), parts[0].vectors.shape[1]), np.float32)
        first = 0
        for part in parts:
            rows = np.flatnonzero(found & (first <= place) & (place < first + len(part.keys)))
            vectors[rows] = part.vectors[place[rows] - first]
            first += len(part.keys)
        return found, vectors if found.any() else None

    def add(self, keys: NDArray[np.uint64], vectors: NDArray[np.float32]) -> None:
        """Store vectors of rows, evicting the least recently used. A failure is logged."""
        if not self._usable:
            return
        try:
            arrays = {"keys": keys.view(np.uint32), "vectors": vectors}
            if not self._entry.write(digest(keys.tobytes())[:16], arrays):
                logger.info("%d vectors are not kept: all together may have %d bytes", len(keys), cache_bytes())
        except OSError as fault:
            logger.warning("vectors are not kept for the next run: %s", fault)

    def _parts(self) -> Iterator[_Part]:
        for item in self._items():
            try:
                arrays = self._entry.read(item)
                yield _Part(arrays["keys"].view(np.uint64), arrays["vectors"])
            except FileNotFoundError:  # another run made room
                continue
            except (Damaged, KeyError, ValueError) as fault:
                logger.warning("%s/%s: %s; its passages are embedded again", self.path, item, fault)

    def _items(self) -> list[str]:
        """The names of the parts; none where the folder cannot be read."""
        try:
            return self._entry.items()
        except OSError as fault:
            logger.warning("%s; all passages are embedded, and their vectors are not kept", fault)
            self._usable = False
            return []
