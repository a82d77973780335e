"""Job status files: heartbeat, progress, and the generations that a job needs.

    jobs/trainer.json         the trainer, over its whole recipe
    jobs/builder-<n>.json     the builder's process n

Written by a thread when it changes and every HEARTBEAT_SECONDS, so that neither a long program nor slow storage hides a
job that is alive. Clocks are never compared: a reader checks whether the counter has moved. Who reads it:
`job.py`, `launch/status.py`.
"""

import dataclasses
import logging
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from realm_jax.errors import UserError
from realm_jax.storage import Damaged, Folder, read_json, write_json_atomic

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
TRAINER, BUILDER = "trainer", "builder"
RUN_ID = "run.json"  # in the run folder


def process_name(job: str, number: int) -> str:
    """What a process of TRAINER or BUILDER is called everywhere: its status, its log, its machines in a cloud."""
    return f"{job}-{number}"


@dataclasses.dataclass(frozen=True)
class Status:
    """The status of one job.

    run: id of the run, the same over restarts. stage: what it is at. step: of REALM's training; of a builder, that of
    the export it builds; −1 for none. counter: grows while the job is alive. index_done: whether the trainer needs no
    further generation. index: export step of the generation in use, −1 for none. pins: export steps whose generations
    must stay.
    """

    run: str
    stage: str = "starting"
    step: int = -1
    counter: int = 0
    done: bool = False
    index_done: bool = False
    index: int = -1
    pins: tuple[int, ...] = ()

    @property
    def needs_index(self) -> bool:
        """Whether the trainer may still take a generation."""
        return not (self.index_done or self.done)


def read_status(folder: Folder, job: str) -> Status | None:
    """The status of a job; None if it never wrote one, or where what is there cannot be read."""
    try:
        found = folder.read_json(f"jobs/{job}.json")
    except (FileNotFoundError, Damaged):
        return None
    kinds = {"run": str, "stage": str, "step": int, "counter": int, "done": bool, "index_done": bool, "index": int}
    if any(type(found.get(name)) is not kind for name, kind in (kinds | {"pins": list}).items()):
        return None
    return Status(**{name: found[name] for name in kinds}, pins=tuple(found["pins"]))


def write_status(folder: Folder, job: str, status: Status) -> None:
    """Raises StorageError."""
    folder.write_json(f"jobs/{job}.json", dataclasses.asdict(status))


class StatusWriter:
    """Writes the status of a job. A context manager: inside, a thread does so again and again; leaving writes the last
    one. The work is whole without it, so storage that fails is a warning."""

    def __init__(self, folder: Folder, job: str, status: Status, writes: bool = True) -> None:
        """writes: False in a process that leaves it to another."""
        self._folder, self._job, self._status, self._writes = folder, job, status, writes
        self._changing, self._writing = threading.Lock(), threading.Lock()
        self._changed, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)

    def __enter__(self) -> Self:
        if self._writes:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._changed.set()
        if self._writes:
            self._thread.join()

    def update(self, wait: bool = False, **changes: Any) -> None:
        """Set fields of `Status`, to be written soon; another step alone can wait for the next heartbeat.

        wait: return once it is written, or could not be.
        """
        with self._changing:
            before, self._status = self._status, dataclasses.replace(self._status, **changes)
            now = self._status != dataclasses.replace(before, step=self._status.step)
        if wait:
            self._write()
        elif now:
            self._changed.set()

    def _run(self) -> None:
        while not self._closed:
            self._write()
            self._changed.wait(HEARTBEAT_SECONDS)
            self._changed.clear()
        self._write()

    def _write(self) -> None:
        """The newest status with the next count, whichever thread asks: a counter seen twice is no heartbeat."""
        if not self._writes:
            return
        with self._writing:  # one after another, so that the newest stays
            with self._changing:
                self._status = dataclasses.replace(self._status, counter=self._status.counter + 1)
            try:
                write_status(self._folder, self._job, self._status)
            except Exception as fault:  # of whatever kind: the heartbeat goes on
                news = "is done" if self._status.done else "goes on"
                logger.warning("%s; other jobs cannot see that the %s %s", fault, self._job, news)


@contextmanager
def trainer_status(folder: Folder, workdir: Path, needs_index: bool) -> Iterator[StatusWriter]:
    """The trainer's status, which says at the end of the block that all is done, unless the block raises.

    needs_index: whether any step to come takes generations of a builder. Several processes call it together, and the
    first one writes. Raises UserError if the folder is another run's, StorageError where a builder has to hear of the
    trainer and the folder cannot be written to.
    """
    from realm_jax.processes import is_process_0, run_on_process_0  # here, since who reads a status needs no JAX

    status = Status("")

    def claim() -> None:
        nonlocal status
        run, earlier = _run_id(workdir), read_status(folder, TRAINER)
        if earlier is not None and earlier.run != run:
            raise UserError(f"config.refresh.shared: {folder.url} is another run's; give each a folder of its own")
        before = earlier or Status(run)
        status = dataclasses.replace(
            before, stage="starting", done=False, index_done=not needs_index, counter=before.counter + 1
        )
        if needs_index:  # else the writer says that it cannot be written
            write_status(folder, TRAINER, status)

    run_on_process_0(claim)
    with StatusWriter(folder, TRAINER, status, writes=is_process_0()) as writer:
        yield writer
        writer.update(stage="ended", done=True)


def _run_id(workdir: Path) -> str:
    """The name of a run, the same over its restarts."""
    path = workdir / RUN_ID
    if not path.is_file():
        write_json_atomic(path, {"id": uuid.uuid4().hex[:12]})
    return str(read_json(path)["id"])
