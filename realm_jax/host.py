"""Tune the host for training and handle signals: malloc, open files, compiler stacks, garbage collection. No JAX.

XLA allocates and frees hundreds of megabytes per step. glibc returns such blocks to the system and gets them back page
by page: a third of a step of the tiny recipe (`benchmarks/README.md` has a measurement for each setting here). So
malloc keeps freed memory, in several arenas, because the compiler's threads would wait for each other in one. It must
be told before other threads have allocated anything. MALLOC_ARENA_MAX in the environment leaves malloc alone.

The programs of a wide model leave each other holes that are too small, so that twice the memory is held that any of
them uses: hence `release_large_blocks`, before the first large block.
"""

import contextlib
import ctypes
import gc
import importlib.util
import os
import platform
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

PREEMPTED = 75  # exit code: the state is saved, restart at any time

# --- Memory -----------------------------------------------------------------------------------------------------------

M_ARENA_MAX, M_MMAP_MAX, M_MMAP_THRESHOLD, M_TOP_PAD, M_TRIM_THRESHOLD = -8, -4, -3, -2, -1  # of glibc's malloc.h
ARENAS = 4  # with eight or sixteen two cores compile no faster
HEAP = 64 << 20  # bytes of a heap of an arena beside the main one; with as much padding wanted no heap is given back
LARGE = 32 << 20  # bytes of a block that is mapped apart: the most that glibc takes
BLOCKS = 1 << 16  # that may be mapped at a time: glibc's own limit
MANY_FILES = 1 << 20  # open at a time, where the system has no limit
WIDE = 256  # hidden size from which a model's large blocks are returned

_keeps_memory = False  # whether `keep_freed_memory` has set anything
_releases_blocks = False  # whether `release_large_blocks` has


def keep_freed_memory() -> None:
    """Make malloc use few arenas, never mmap blocks and never return freed memory. Does nothing if JAX has a device."""
    global _keeps_memory
    if "MALLOC_ARENA_MAX" in os.environ or platform.libc_ver()[0] != "glibc" or not is_cpu_only():
        return
    _keeps_memory = True
    libc = ctypes.CDLL(None)
    for option, value in ((M_ARENA_MAX, ARENAS), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, HEAP)):
        libc.mallopt(option, value)


def release_large_blocks() -> None:
    """Map large blocks apart after all, and return them when they are freed. Does nothing if nothing is kept.

    It costs a wide model a tenth to a fifth of its time, half of that with pages of 2 MB (`benchmarks/README.md`).
    """
    global _releases_blocks
    if _keeps_memory:
        _releases_blocks = True
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
        libc.mallopt(M_MMAP_MAX, BLOCKS)


def releases_memory() -> bool:
    """Whether freed memory goes back to the system, as it does for a wide model on a CPU, which is short of it."""
    return _releases_blocks


def free_heap() -> None:
    """Collect reference cycles, and return free pages of the heap to the system, if large blocks are returned.

    Before a task, after a program is compiled and after a save: the compiler leaves half a gigabyte and more in blocks
    that are too small to be mapped apart.
    """
    if _releases_blocks:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def allow_open_files() -> None:
    """Let this process, and those that it starts, open as many files as the system permits.

    A memory-mapped file stays open, and the largest passage store has seven thousand; many systems begin with 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):  # macOS permits fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


STACK_FLAG, COMPILER_STACK = "fibers_default_thread_stack_size", 1 << 20  # of libtpu; bytes


def enlarge_compiler_stacks() -> None:
    """Give the threads of the TPU compiler (libtpu 0.0.42) larger stacks, before it is loaded, unless a flag is set.

    64 kB are their default. To estimate the cost of a matrix product that is fused with others the compiler calls
    itself for each of these, with 10 kB a call; the step of BERT-base ended it with an overflow.
    """
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    if STACK_FLAG not in given:
        os.environ["LIBTPU_INIT_ARGS"] = f"{given} --{STACK_FLAG}={COMPILER_STACK}".strip()


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable the garbage collector while modules are imported, and freeze what they made.

    JAX makes a million objects that stay. Python would walk through them again and again: a tenth of `realm ask`.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def multiplies_bfloat16(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Whether the processor has instructions for products of bfloat16 (AMX or AVX-512): then they are faster than those
    of float32, which they are made of elsewhere. False where it does not say."""
    try:
        with open(cpuinfo) as file:
            flags = next((line for line in file if line.startswith("flags")), "").split()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


def is_cpu_only() -> bool:
    """Whether JAX will run on the CPU, as far as one can tell without importing it."""
    if wanted := os.environ.get("JAX_PLATFORMS"):
        return wanted == "cpu"
    return not any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))


# --- Signals ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def signal_handler(number: int, handler: Callable[..., Any] | signal.Handlers) -> Iterator[None]:
    """Handle a signal until the block ends; has no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


class Preempted(Exception):
    """SIGTERM was received and the state is saved; the process should exit with code `PREEMPTED`."""


class Stop:
    """SIGTERM as a flag that the loop polls, so that a step and its save are never cut in half.

    Nested instances share their flag. at_once: what is safe wherever the signal comes; then Preempted is raised on the
    spot. The flag stays, because Python drops exceptions in some callbacks, and libraries catch what they do not know.
    """

    def __init__(self, at_once: str = "") -> None:
        self.requested, self._at_once = False, at_once
        self._before: Any = None
        self._outer: Stop | None = None

    def __enter__(self) -> Self:
        try:
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        except ValueError:  # not in the main thread: someone else owns the signals
            self._before = None
        outer = getattr(self._before, "__self__", None)  # of a bound method
        self._outer = outer if isinstance(outer, Stop) else None
        self.requested = self.requested or (self._outer is not None and self._outer.requested)
        return self

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        if self._at_once:
            self.check(self._at_once)

    def check(self, kept: str) -> None:
        """Raise Preempted if SIGTERM came. kept: what is safe."""
        if self.requested:
            raise Preempted(f"SIGTERM: {kept}; run the command again to resume")

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        if self._outer is not None:
            self._outer.requested = self._outer.requested or self.requested


class CtrlC:
    """A context manager around a whole command, in which Ctrl-C's KeyboardInterrupt is never lost.

    `received` says that it came, whatever became of the exception. Where nothing can be raised, as in JAX's hook on
    garbage collection, it comes again. With a handler that is not Python's own, asyncio leaves the signal alone too.
    """

    def __init__(self) -> None:
        self.received = False
        self._held = False
        in_charge = threading.current_thread() is threading.main_thread()
        # In the background of a shell it is to be ignored, and stays so.
        self._installs = in_charge and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._otherwise = sys.unraisablehook

    def __enter__(self) -> Self:
        if self._installs:
            signal.signal(signal.SIGINT, self._on_signal)
            sys.unraisablehook = self._repeat
        return self

    def __exit__(self, *_: object) -> None:
        if self._installs:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = self._otherwise

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait with it: modules in C that are interrupted while they are imported crash or say something else."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self.received:
            raise KeyboardInterrupt

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True
        if not self._held:
            raise KeyboardInterrupt

    def _repeat(self, lost: Any) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
        else:
            self._otherwise(lost)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
