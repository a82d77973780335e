"""Job status files: heartbeat, progress, and the generations that a job needs.

    jobs/trainer.json         the trainer, over its whole recipe
    jobs/builder-<n>.json     the builder's process n

Written by a thread when it changes and every HEARTBEAT_SECONDS, so that neither a long program nor slow storage hides a
job that is alive. Clocks are never compared: a reader checks if the counter has moved. Who reads it:
`job.py`, `launch/status.py`.

The trainer's status is also a fence. On storage without locks, a second trainer may start in a run directory while a
first one, which seemed lost, still trains. Each start has a larger number, so the first one sees that it must end.
"""

import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from realm_jax.errors import UserError
from realm_jax.mirror import RUN_ID, url_of
from realm_jax.storage import Damaged, Folder, StorageError, open_folder

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
TRAINER, BUILDER = "trainer", "builder"


def process_name(job: str, number: int) -> str:
    """Return the name of a process, for its status, its log and its machines in a cloud.

    Args:
        job: TRAINER or BUILDER.
        number: number of the process.
    """
    return f"{job}-{number}"


@dataclasses.dataclass(frozen=True)
class Status:
    """The status of one job.

    Attributes:
        run: id of the run, the same over restarts.
        stage: stage of the job, for people.
        step: step of REALM's training; of a builder, of the export that it builds; −1 for none.
        counter: grows while the job is alive.
        done: the job has finished.
        index_done: the trainer needs no further generation.
        index: export step of the generation in use, −1 for none.
        pins: export steps whose generations must stay.
        start: number of times that the job was started.
    """

    run: str
    stage: str = "starting"
    step: int = -1
    counter: int = 0
    done: bool = False
    index_done: bool = False
    index: int = -1
    pins: tuple[int, ...] = ()
    start: int = 0

    @property
    def needs_index(self) -> bool:
        """Return True if the trainer may still adopt a generation."""
        return not (self.index_done or self.done)


def read_status(folder: Folder, job: str) -> Status | None:
    """Read the status of a job.

    Args:
        folder: the shared folder.
        job: its name.

    Returns:
        The status; None if the job never wrote one, or if its file cannot be read.
    """
    try:
        fields = folder.read_json(f"jobs/{job}.json")
    except (FileNotFoundError, Damaged):
        return None
    types = {"run": str, "stage": str, "step": int, "counter": int, "done": bool, "index_done": bool, "index": int}
    types["start"] = int
    if any(type(fields.get(name)) is not kind for name, kind in (types | {"pins": list}).items()):
        return None
    return Status(**{name: fields[name] for name in types}, pins=tuple(fields["pins"]))


def write_status(folder: Folder, job: str, status: Status) -> None:
    """Write the status of a job.

    Args:
        folder: the shared folder.
        job: its name.
        status: status of the job.

    Raises:
        StorageError: the folder cannot be written to.
    """
    folder.write_json(f"jobs/{job}.json", dataclasses.asdict(status))


class BuilderMonitor:
    """Tells how long no index builder has given a heartbeat."""

    def __init__(self, folder: Folder) -> None:
        """Begin to count.

        Args:
            folder: the shared folder.
        """
        self._folder, self._counters = folder, dict[str, int]()
        self._last_heartbeat = time.monotonic()
        self.seconds_without_builder()
        self._last_heartbeat = time.monotonic()  # what earlier builders have left there is no heartbeat

    def seconds_without_builder(self) -> float:
        """Read the status of all builders, and return the seconds since one of them has changed."""
        try:
            names = [name.removesuffix(".json") for name in self._folder.names("jobs") if name.startswith(BUILDER)]
            statuses = {name: read_status(self._folder, name) for name in names}
        except StorageError as error:  # a builder may be alive
            logger.warning("%s; trying again", error)
            return 0.0
        counters = {name: status.counter for name, status in statuses.items() if status is not None}
        if counters != self._counters:
            self._counters, self._last_heartbeat = counters, time.monotonic()
        return time.monotonic() - self._last_heartbeat


class StatusWriter:
    """Write the status of a job again and again, in a thread.

    A context manager: leaving writes the last status. The job does not depend on it, so failing storage is only a
    warning.
    """

    def __init__(self, folder: Folder, job: str, status: Status, writes: bool = True) -> None:
        """Make a writer that has not started.

        Args:
            folder: the shared folder.
            job: its name.
            status: its first status.
            writes: False in a process that leaves it to another one.
        """
        self._folder, self._job, self._status, self._writes = folder, job, status, writes
        self._newer_start = 0
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
        """Set fields of the status, to be written soon; a change of only the step can wait for the next heartbeat.

        Args:
            wait: return only after a try to write it.
            **changes: fields of `Status`.
        """
        with self._changing:
            before, self._status = self._status, dataclasses.replace(self._status, **changes)
            is_urgent = self._status != dataclasses.replace(before, step=self._status.step)
        if wait:
            self._write()
        elif is_urgent:
            self._changed.set()

    def check_fence(self) -> None:
        """Raise UserError if the job was started again in the same folder while this process runs it."""
        if self._newer_start:
            raise UserError(
                f"{self._folder.url}: the {self._job} was started again elsewhere (start {self._newer_start}, this is "
                f"start {self._status.start}), so this process ends without saving; run one at a time"
            )

    def _run(self) -> None:
        while not self._closed:
            self._write()
            self._changed.wait(HEARTBEAT_SECONDS)
            self._changed.clear()
        self._write()

    def _write(self) -> None:
        """Write the newest status with the next count: a counter that is read twice is no heartbeat.

        Once the job was started again elsewhere, nothing is written.
        """
        if not self._writes or self._newer_start:
            return
        with self._writing:  # one write after another, so that the newest status stays
            with self._changing:
                self._status = dataclasses.replace(self._status, counter=self._status.counter + 1)
            try:
                other = read_status(self._folder, self._job)
                if other is not None and other.start > self._status.start:
                    self._newer_start = other.start
                    return
                write_status(self._folder, self._job, self._status)
            except Exception as error:  # of any kind: the heartbeat goes on
                state = "is done" if self._status.done else "goes on"
                logger.warning("%s; other jobs cannot see that the %s %s", error, self._job, state)


@contextmanager
def trainer_status(folder: Folder, workdir: Path, needs_index: bool) -> Iterator[StatusWriter]:
    """Write the trainer's status within the block, and at its end that the trainer is done, unless the block raises.

    All processes call it together, and process 0 writes.

    Args:
        folder: the shared folder.
        workdir: the run directory.
        needs_index: a later step adopts generations of a builder.

    Raises:
        UserError: the shared folder is another run's.
        StorageError: a builder needs the status, and it cannot be written.
    """
    # Imported here because readers of a status need no JAX.
    from realm_jax.processes import is_process_0, run_on_process_0

    status = Status("")

    def claim_folder() -> None:
        nonlocal status
        home = open_folder(url_of(workdir))
        if RUN_ID not in home.names():  # the id of a run is the same over its restarts
            home.write_json(RUN_ID, {"id": uuid.uuid4().hex[:12]})
        run, earlier = str(home.read_json(RUN_ID)["id"]), read_status(folder, TRAINER)
        if earlier is not None and earlier.run != run:
            raise UserError(f"config.refresh.shared: {folder.url} belongs to another run; give each run its own folder")
        before = earlier or Status(run)
        status = dataclasses.replace(
            before, stage="starting", done=False, index_done=not needs_index, counter=before.counter + 1,
            start=before.start + 1,
        )  # fmt: skip
        if needs_index:  # else a status that cannot be written is only a warning
            write_status(folder, TRAINER, status)

    run_on_process_0(claim_folder)
    with StatusWriter(folder, TRAINER, status, writes=is_process_0()) as writer:
        yield writer
        writer.update(stage="ended", done=True)
