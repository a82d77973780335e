"""What this machine keeps although it could be made again, in `$REALM_CACHE`: how much of it, and what goes first.

Each thing that is kept has a folder of its own, ROOT/<kind>/<digest>, so that it can go as a whole: vectors of passages
by encoder (`index/vector_cache.py`), arrays of checkpoints that are asked (`training/opened.py`).
"""

import contextlib
import os
import shutil
from pathlib import Path

from realm_jax.errors import UserError
from realm_jax.storage import cache_folder

KINDS = ("vectors", "opened")
BYTES = 20_000_000_000  # of all kinds together, unless REALM_CACHE_BYTES says otherwise


def cache_bytes() -> int:
    """How much may be kept; 0: nothing is. Raises UserError where REALM_CACHE_BYTES is no number."""
    text = os.environ.get("REALM_CACHE_BYTES", str(BYTES))
    if not text.isdecimal():
        raise UserError(f"REALM_CACHE_BYTES={text}: give a number of bytes, or 0 to keep nothing")
    return int(text)


def kept_in(kind: str, name: str) -> Path:
    """The folder of one thing that is kept; kind: one of KINDS."""
    assert kind in KINDS
    return cache_folder() / kind / name


def has_room(folder: Path, more: int) -> bool:
    """Whether a folder may have so many bytes more, if everything else went."""
    return _size(folder) + more <= cache_bytes()


def used(folder: Path) -> None:
    """What was used last is removed last."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def make_room(folder: Path) -> None:
    """Remove what was used least lately, but for `folder`, until all have the bytes that they may have."""
    others = [other for kind in KINDS for other in (cache_folder() / kind).glob("*") if other != folder]
    total, limit = _size(folder), cache_bytes()
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
