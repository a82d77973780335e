"""What the trainer says of itself to the builder: that it lives, how far it is, what must not be removed.

Written by a thread, so that slow storage does not slow training. What a status holds: `index/generations.Status`.
"""

import dataclasses
import logging
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from realm_jax.errors import UserError
from realm_jax.index.generations import BEAT_SECONDS, Beat, Status, read_status, write_status
from realm_jax.processes import is_process_0, run_on_process_0
from realm_jax.run import Run
from realm_jax.storage import Folder, StorageError, read_json, write_json_atomic

logger = logging.getLogger(__name__)

RUN_ID = "run.json"  # in the run folder


class Reporter:
    """Writes jobs/trainer.json. A context manager: entering writes the first one, so that storage which cannot be
    written to is known before training; leaving waits for the last one."""

    def __init__(self, run: Run, folder: Folder, task: str) -> None:
        """Raises UserError when the shared folder is another run's."""
        self._folder = folder
        name, earlier = "", None

        def is_taken() -> int:
            nonlocal name, earlier
            name, earlier = _run_id(run), read_status(folder, "trainer")
            return int(earlier is not None and earlier.run != name)

        if run_on_process_0(is_taken):
            raise UserError(f"config.refresh.shared: {folder.url} is another run's; give each a folder of its own")
        self._status = dataclasses.replace(earlier or Status(name), stage=task, done=False)
        self._told_at = -BEAT_SECONDS
        self._pool = ThreadPoolExecutor(1)
        self._pending: list[Future[None]] = []
        self._beat, self._counting = Beat(self._live), threading.Lock()

    def __enter__(self) -> Self:
        """Raises StorageError."""
        if is_process_0():
            write_status(self._folder, "trainer", self._status)
        self._beat.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._beat.__exit__()
        self._pool.shutdown(wait=True)

    def tell(self, step: int, now: bool = False, **changes: Any) -> None:
        """A sign of life, now and then; at once when `now`, or when something else changes than the step."""
        with self._counting:
            changed = dataclasses.replace(self._status, **changes)
            now = now or changed != self._status
            changed.step, self._status = step, changed
        if now or time.monotonic() - self._told_at >= BEAT_SECONDS:
            self._live()

    def _live(self) -> None:
        """Write it with the next count, whichever thread asks."""
        with self._counting:
            self._told_at = time.monotonic()
            self._status.counter += 1
            self._submit()

    def _submit(self) -> None:
        self._pending = [write for write in self._pending if not write.done()]
        if is_process_0() and len(self._pending) < 2:  # one that waits will take the newest
            self._pending.append(self._pool.submit(self._write))

    def finish(self, step: int) -> None:
        """The task is done, and this is the last word of it. The run is whole without it, so a failure is a warning."""
        self._beat.__exit__()
        self._pool.shutdown(wait=True)
        self._status = dataclasses.replace(self._status, step=step, done=True, counter=self._status.counter + 1)
        if is_process_0():
            self._write()

    def _write(self) -> None:
        try:
            write_status(self._folder, "trainer", self._status)
        except StorageError as fault:
            news = "is done" if self._status.done else "goes on"
            logger.warning("%s; the builder cannot see that training %s", fault, news)


def _run_id(run: Run) -> str:
    """The name of a run, the same over its restarts. Of several processes the first alone makes it up."""
    path = run.workdir / RUN_ID
    if not path.is_file():
        write_json_atomic(path, {"id": uuid.uuid4().hex[:12]})
    return str(read_json(path)["id"])
