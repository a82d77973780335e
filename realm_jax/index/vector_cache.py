"""Vectors of passages that some run of this machine embedded before, by the content of the passages.

An encoder, named by a digest of all that makes it a function, has a folder; a passage is known by a digest of its word
pieces, so an edited or newly prepared corpus finds every passage that did not change, in whatever row it is now:

    VECTORS/<encoder>/<part>.rows.npy       digests of rows, uint64 [rows, 2]
    VECTORS/<encoder>/<part>.vectors.npy    float32 [rows, width]
    VECTORS/<encoder>/<part>.json           put last: both files with sizes and checksums

Not for towers that are being trained, whose vectors nobody asks for again. Which encoder: `training/embedding.py`.
"""

import hashlib
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from realm_jax.cache import cache_bytes, has_room, kept_in, make_room, used
from realm_jax.errors import UserError
from realm_jax.index.embed import CorpusRows
from realm_jax.storage import Damaged, FileEntry, PosixFolder, StorageError, digest

logger = logging.getLogger(__name__)


def row_keys(rows: CorpusRows) -> NDArray[np.uint64]:
    """What a passage is known by: a digest of its word pieces and of where its title ends, uint64 [rows, 2]."""
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
        self._folder = PosixFolder(kept_in("vectors", encoder))
        self._usable = True

    @property
    def path(self) -> Path:
        """Where the vectors of this encoder lie."""
        return self._folder.root

    def find(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.float32] | None]:
        """Which of some rows are known, [rows], and their vectors, [rows, width]: arbitrary where a row is not, None
        where none is. Damage is logged, and its rows are not known; so is a folder that cannot be read, once,
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
        used(self.path)
        return found, vectors if found.any() else None

    def add(self, keys: NDArray[np.uint64], vectors: NDArray[np.float32]) -> None:
        """Keep vectors of rows; what was used less lately makes room. Where that is not possible it is told."""
        if not self._usable:
            return
        if not has_room(self.path, keys.nbytes + vectors.nbytes):
            logger.info("%d vectors are not kept: all together may have %d bytes", len(keys), cache_bytes())
            return
        name = digest(keys.tobytes())[:16]
        try:
            files = [
                self._folder.put(f"{name}.rows.npy", _npy(keys)),
                self._folder.put(f"{name}.vectors.npy", _npy(vectors)),
            ]
            self._folder.write_json(f"{name}.json", {"files": files})
        except StorageError as fault:
            logger.warning("vectors are not kept for the next run: %s", fault)
        make_room(self.path)

    def _parts(self) -> Iterator[_Part]:
        for name in self._records():
            try:
                files = self._folder.read_json(name)["files"]
                keys, vectors = (np.load(self._folder.local(FileEntry(*file)), mmap_mode="r") for file in files)
                yield _Part(np.asarray(keys), vectors)
            except FileNotFoundError:  # another run made room
                continue
            except (Damaged, StorageError, KeyError, TypeError, ValueError) as fault:
                reason = fault if isinstance(fault, UserError) else f"{self._folder.path(name)} is damaged"
                logger.warning("%s; the passages that it was of are embedded again", reason)

    def _records(self) -> list[str]:
        """The names of the parts' records; none where the folder cannot be read."""
        try:
            return [name for name in self._folder.names() if name.endswith(".json")]
        except StorageError as fault:
            logger.warning("%s; all passages are embedded, and their vectors are not kept", fault)
            self._usable = False
            return []


def _npy(array: NDArray) -> memoryview:
    """An array as the content of a .npy file."""
    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(array), allow_pickle=False)
    return stream.getbuffer()
