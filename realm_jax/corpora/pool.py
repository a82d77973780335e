"""A pure function over many batches in worker processes, results in the order of the batches."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing.queues import Queue
from types import FrameType
from typing import Any, TypeVar

from realm_jax.errors import Resumable, UserError

SENDING_SECONDS = 10  # for a worker to finish sending its result once it is asked to stop
NO_WORKER = (
    'worker processes ended at startup; in a script, put the call under `if __name__ == "__main__":`, or pass workers=1'
)
_BATCHES_WORTH_A_POOL = 4  # starting processes takes about as long as doing this many batches

_T = TypeVar("_T")
_R = TypeVar("_R")


def ordered_parallel_map(
    function: Callable[[_T], _R], batches: Iterable[_T], workers: int, few: int = _BATCHES_WORTH_A_POOL
) -> Iterator[_R]:
    """Apply a function to batches in several processes.

    A script that uses more than one process needs the usual `if __name__ == "__main__":` guard.

    Args:
        function: function of a batch.
        batches: the batches.
        workers: number of processes.
        few: fewer batches are done in this process.

    Yields:
        Results in the order of the batches.

    Raises:
        UserError: no worker could start, for example because the guard is missing.
        Resumable: the system killed a worker.
    """
    batches = iter(batches)
    first = list(islice(batches, few))
    batches = chain(first, batches)
    if workers == 1 or len(first) < few:
        yield from map(function, batches)
        return
    # "spawn": a forked child would inherit locks of threads that JAX and the tokenizer may have started.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, _start_worker, (function,))
    try:
        can_start = pool.submit(_can_start)
        waiting: deque[Future[_R]] = deque()
        for batch in batches:
            waiting.append(pool.submit(_work, batch))
            if len(waiting) > 2 * workers:  # enough to keep all busy, and no more of the corpus in memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        if can_start.exception() is not None:
            raise UserError(NO_WORKER) from None
        raise Resumable("a worker process was killed, probably for lack of memory; use fewer workers") from None
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()  # its batch may take minutes; the worker finishes sending a result first
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_function: Callable[[Any], Any]
_working = False  # True during a batch; otherwise the worker sends a result or waits for a batch
_ending = False  # True once it was asked to stop


def _can_start() -> None:
    """Do nothing: the first task of a worker, which fails if the process imports a script without its guard."""


def _start_worker(function: Callable[[Any], Any]) -> None:
    """Set up a worker process: it leaves Ctrl-C to its parent and exits when the parent dies."""
    global _function
    _function = function
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end(_: int, frame: FrameType | None) -> None:
    """End at once during a batch or while waiting for one, otherwise before the next batch.

    Half a result in its pipe would make the parent wait for the other half forever. SIGALRM ends a worker whose parent
    does not read any more.
    """
    global _ending
    if _working or _waits(frame):
        os._exit(1)
    _ending = True
    signal.alarm(SENDING_SECONDS)


def _waits(frame: FrameType | None) -> bool:
    """Return True if a frame waits for a batch: in `Queue.get` of multiprocessing, called by ProcessPoolExecutor."""
    while frame is not None and frame.f_code is not Queue.get.__code__:
        frame = frame.f_back
    return frame is not None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(batch: Any) -> Any:
    global _working
    _working = True
    if _ending:
        os._exit(1)  # here nothing is being sent
    try:
        return _function(batch)
    finally:
        _working = False
