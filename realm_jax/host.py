"""Tune the host for training and handle signals: malloc, open files, compiler stacks, garbage collection. No JAX.

XLA allocates and frees hundreds of megabytes per step. glibc returns such blocks to the system and gets them back page
by page: a third of a step of the tiny recipe (`benchmarks/README.md` links a measurement of each setting). So
malloc keeps freed memory, in several arenas, because the compiler's threads would wait for each other in one. The
settings must precede the first allocation of other threads. If MALLOC_ARENA_MAX is set, nothing is changed.

The programs of a wide model leave holes in the heap that are too small for each other, so that the process holds twice
the memory that any program uses. `release_large_blocks` prevents that, before the first large block.
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
INTERRUPTED = 130  # exit code: Ctrl-C

# --- Memory -----------------------------------------------------------------------------------------------------------

M_ARENA_MAX, M_MMAP_MAX, M_MMAP_THRESHOLD, M_TOP_PAD, M_TRIM_THRESHOLD = -8, -4, -3, -2, -1  # of glibc's malloc.h
NUM_ARENAS = 4  # with eight or sixteen, two cores compile no faster
TOP_PAD_BYTES = 64 << 20  # of padding: as large as a heap of a secondary arena, so that no heap is returned
MIN_MAPPED_BYTES = 32 << 20  # of a block that is mapped separately: the largest threshold that glibc takes
MAX_MAPPED_BLOCKS = 1 << 16  # at a time: glibc's own limit
MAX_OPEN_FILES = 1 << 20  # if the system has no limit
WIDE_MODEL = 256  # hidden size from which a model's large blocks are returned to the system

_keeps_memory = False  # True after `keep_freed_memory` has set options
_releases_blocks = False  # True after `release_large_blocks` has set options


def keep_freed_memory() -> None:
    """Make malloc use few arenas, never mmap blocks and never return freed memory. Does nothing if JAX has a device."""
    global _keeps_memory
    if "MALLOC_ARENA_MAX" in os.environ or platform.libc_ver()[0] != "glibc" or not is_cpu_only():
        return
    _keeps_memory = True
    libc = ctypes.CDLL(None)
    options = {M_ARENA_MAX: NUM_ARENAS, M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: TOP_PAD_BYTES}
    for option, value in options.items():
        libc.mallopt(option, value)


def release_large_blocks() -> None:
    """Map large blocks separately again, so that the system gets them back. Undoes a part of `keep_freed_memory`.

    It costs a wide model a tenth to a fifth of its time, half of that with pages of 2 MB (`benchmarks/README.md`).
    """
    global _releases_blocks
    if _keeps_memory:
        _releases_blocks = True
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, MIN_MAPPED_BYTES)
        libc.mallopt(M_MMAP_MAX, MAX_MAPPED_BLOCKS)


def releases_memory() -> bool:
    """Return True if freed memory goes back to the system: for a wide model on a CPU, whose memory is scarce."""
    return _releases_blocks


def free_heap() -> None:
    """Collect reference cycles, and return free pages of the heap to the system, if large blocks are returned.

    Call it before a task, after a program is compiled and after a save: the compiler leaves half a gigabyte and more in
    blocks that are too small to be mapped separately.
    """
    if _releases_blocks:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def allow_open_files() -> None:
    """Let this process, and those that it starts, open as many files as the system permits.

    A memory-mapped file stays open, and the largest passage store has seven thousand; many systems begin with 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(ValueError, OSError):  # macOS permits fewer files than its limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


STACK_FLAG, COMPILER_STACK_BYTES = "fibers_default_thread_stack_size", 1 << 20  # of libtpu


def enlarge_compiler_stacks() -> None:
    """Give the threads of the TPU compiler (libtpu 0.0.42) larger stacks, before it is loaded, unless a flag is set.

    Their default is 64 kB. To estimate the cost of a matrix product that is fused with others, the compiler calls
    itself for each of these, with 10 kB per call; for the step of BERT-base the stack overflowed.
    """
    flags = os.environ.get("LIBTPU_INIT_ARGS", "")
    if STACK_FLAG not in flags:
        os.environ["LIBTPU_INIT_ARGS"] = f"{flags} --{STACK_FLAG}={COMPILER_STACK_BYTES}".strip()


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable the garbage collector while modules are imported, and exempt their objects from it afterwards.

    JAX makes a million permanent objects. Python would visit them again and again, for a tenth of `realm ask`'s time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def multiplies_bfloat16(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Return True if the processor has instructions for bfloat16 products (AMX or AVX-512); False if unknown.

    Other processors emulate them by float32 products, which are then faster.
    """
    try:
        with open(cpuinfo) as file:
            flags = next((line for line in file if line.startswith("flags")), "").split()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


def is_cpu_only() -> bool:
    """Return True if JAX will run on the CPU, as far as can be seen without importing it."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms == "cpu"
    return not any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))


# --- Signals ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def signal_handler(number: int, handler: Callable[..., Any] | signal.Handlers) -> Iterator[None]:
    """Handle a signal until the block ends; has no effect outside the main thread.

    Args:
        number: number of the signal.
        handler: as in `signal.signal`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def delayed_signals() -> Iterator[None]:
    """Deliver SIGTERM and Ctrl-C only when the block ends, as some libraries swallow exceptions of handlers."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    try:
        with signal_handler(signal.SIGTERM, note), signal_handler(signal.SIGINT, note):
            yield
    finally:
        for number in received:
            handler = signal.getsignal(number)
            if callable(handler):  # called here, because Python may run it in a callback that drops its exception
                handler(number, None)
            else:
                signal.raise_signal(number)


class Preempted(BaseException):
    """SIGTERM was received and the state is saved; the process should exit with code `PREEMPTED`.

    Like KeyboardInterrupt, it is no Exception, because a signal handler may raise it inside of a library that catches
    every Exception.
    """


class Stop:
    """SIGTERM as a flag that the loop polls, so that a step and its save are never cut in half.

    Nested instances share their flag.
    """

    def __init__(self, at_once: str = "") -> None:
        """Make a flag.

        Args:
            at_once: message about the state that is always saved; if set, the signal handler itself raises Preempted.
                The flag is set too, because Python drops exceptions in some callbacks.
        """
        self.requested, self._at_once = False, at_once
        self._before: Any = None
        self._outer: Stop | None = None

    def __enter__(self) -> Self:
        try:
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        except ValueError:  # not in the main thread, which handles the signals
            self._before = None
        outer = getattr(self._before, "__self__", None)  # of a bound method
        self._outer = outer if isinstance(outer, Stop) else None
        self.requested = self.requested or (self._outer is not None and self._outer.requested)
        return self

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        if self._at_once:
            self.check(self._at_once)

    def check(self, saved: str) -> None:
        """Raise Preempted if SIGTERM was received; `saved` is the message about the saved state."""
        if self.requested:
            raise Preempted(f"SIGTERM: {saved}; run the command again to resume")

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        if self._outer is not None:
            self._outer.requested = self._outer.requested or self.requested


class CtrlC:
    """A context manager around a command, in which Ctrl-C's KeyboardInterrupt is never lost.

    `received` is True after Ctrl-C, even if the exception was caught. If nothing can be raised, as in JAX's hook on
    garbage collection, the signal is sent again. Because the handler is not Python's own, asyncio does not replace it.
    """

    def __init__(self) -> None:
        self.received = False
        self._held = False
        is_main_thread = threading.current_thread() is threading.main_thread()
        # A shell ignores Ctrl-C for commands in the background, and that stays so.
        self._installs = is_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._unraisable_hook = sys.unraisablehook

    def __enter__(self) -> Self:
        if self._installs:
            signal.signal(signal.SIGINT, self._on_signal)
            sys.unraisablehook = self._repeat
        return self

    def __exit__(self, *_: object) -> None:
        if self._installs:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = self._unraisable_hook

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delay KeyboardInterrupt to the end of the block: C modules that are interrupted during import may crash."""
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

    def _repeat(self, unraisable: Any) -> None:
        """Send Ctrl-C again if its exception could not be raised; show other exceptions."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
        # A failed save reports one error. Each of its other writes raises this one when it ends, hundreds of them.
        elif str(unraisable.exc_value) != "Event loop is closed":
            self._unraisable_hook(unraisable)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
