"""Memory of the process: let malloc keep what is freed, where JAX computes on the CPU alone, and collect no modules.

XLA takes and gives back hundreds of megabytes a step, and gigabytes with larger models. glibc returns such blocks to
the system and gets them anew, with a page fault and a zeroed page each: a third of a step of the tiny recipe
(`benchmarks/README.md`). It helps only before other threads have allocated anything, so `cli.py` calls it before it
imports a job. MALLOC_ARENA_MAX in the environment leaves malloc alone.

What is kept serves a small model. The programs of a wide one, one for each length of its batches, leave each other
holes that are too small, and twice the memory is held that any of them uses: `return_blocks`, before the first large
block.
"""

import ctypes
import gc
import importlib.util
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

M_ARENA_MAX, M_MMAP_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -8, -4, -3, -1  # of glibc's malloc.h
LARGE = 32 << 20  # bytes of a block that is mapped apart: the most that glibc takes
BLOCKS = 1 << 16  # that may be mapped at a time: glibc's own limit
WIDE = 256  # hidden size from which a model's large blocks are returned

_kept = False  # whether `keep_memory` has set anything
_returned = False  # whether `return_blocks` has


def keep_memory() -> None:
    """One arena that maps no block apart, however large, and returns nothing. Does nothing where JAX has a device."""
    global _kept
    if "MALLOC_ARENA_MAX" in os.environ or platform.libc_ver()[0] != "glibc" or not on_cpu_alone():
        return
    _kept = True
    _set((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1))


def return_blocks() -> None:
    """Map large blocks apart after all, and return them when they are freed. Does nothing where nothing is kept.

    It costs a wide model a tenth to a fifth of its time, half of that with pages of 2 MB (`benchmarks/README.md`).
    """
    global _returned
    if _kept:
        _returned = True
        _set((M_MMAP_THRESHOLD, LARGE), (M_MMAP_MAX, BLOCKS))


def returns_memory() -> bool:
    """Whether freed memory goes back to the system, as it does for a wide model on a CPU, which is short of it."""
    return _returned


def free_heap() -> None:
    """Collect reference cycles, and return free pages of the heap to the system.

    Before a task, after a program is compiled and after a save: the compiler leaves half a gigabyte and more in blocks
    that are too small to be mapped apart (`benchmarks/README.md`). Does nothing where large blocks are not returned.
    """
    if _returned:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def _set(*options: tuple[int, int]) -> None:
    libc = ctypes.CDLL(None)
    for option, value in options:
        libc.mallopt(option, value)


@contextmanager
def no_collection() -> Iterator[None]:
    """Look for no garbage while modules are imported, and never among what they made.

    A process that imports JAX makes a million objects that stay, and Python would walk through them again and again: a
    tenth of the time of a question (`realm ask`).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def on_cpu_alone() -> bool:
    """Whether JAX will run on the CPU, as far as one can tell without importing it."""
    if wanted := os.environ.get("JAX_PLATFORMS"):
        return wanted == "cpu"
    return not any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))
