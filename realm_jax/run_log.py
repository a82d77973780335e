"""Keep the log of every process of a run in its bucket, because machines are deleted with their disks.

    gs://BUCKET/FOLDER/logs/trainer-7.log    process 7 of the trainer, over all its starts

A process writes its lines to a file on this machine's disk. A thread adds them to the log in the bucket every SECONDS
and at the end, after errors too. A process that is killed uploads nothing more. Its file stays, and the next start of
the process on the same machine uploads the rest. The console shows only warnings of processes other than 0; the log has
all their lines. For a run directory that is a path nothing is written, because `realm launch --target=local` copies the
output of processes. Read next: `launch/logs.py`, which prints the logs.
"""

import contextlib
import faulthandler
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

from realm_jax.errors import user_message
from realm_jax.mirror import BUCKET_SCHEME, copy_of
from realm_jax.storage import Folder, exclusive_lock, open_folder

logger = logging.getLogger(__name__)

LOGS = "logs"  # folder of a run
SECONDS = 60.0  # between two uploads: later lines stay on the machine if the process is killed
LAST_SECONDS = 15.0  # for the last upload: a bucket that fails must not delay the restart of a job
LOG_BYTES = 4 << 20  # of a log in the bucket; older lines are removed, because an upload writes all of it
REMOVED = b"(older lines were removed)\n"
RECORD = re.compile(rb"^(?=\d{4}-\d\d-\d\dT)", re.MULTILINE)  # where a record begins; lines of a traceback do not
START = re.compile(rb"\d{4}-\d\d-\d\dT\S+ INFO start of ")  # begins the first record of each start of a process


@contextmanager
def run_log(workdir: str, process: str) -> Iterator[None]:
    """Keep the log lines of the block, and how it ended, in the run directory. A failure is only a warning.

    Args:
        workdir: the run directory; nothing happens if it is not in a bucket.
        process: name of the process, such as trainer-7.
    """
    with contextlib.ExitStack() as stack:
        log = None
        if workdir.startswith(BUCKET_SCHEME):  # `local_workdir` rejects other URLs
            try:
                folder = copy_of(workdir, f"{process}.log")
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(exclusive_lock(folder))
                log = RunLog(folder, open_folder(workdir), process)
            except Exception as error:  # of any kind: training goes on
                logger.warning("%s; the run directory gets no log of %s", error, process)
        if log is None:
            yield
            return
        package = logging.getLogger("realm_jax")
        package.addHandler(log)
        try:
            yield
            log.add(logging.INFO, f"end of {process}")
        except Exception as error:
            message = user_message(error)
            log.add(logging.ERROR, f"realm: error: {message}" if message else f"{process} failed", not message)
            raise
        except BaseException as error:  # preempted, or Ctrl-C
            log.add(logging.WARNING, f"{type(error).__name__}: {error}")
            raise
        finally:
            package.removeHandler(log)
            log.finish()


def save_stacks() -> None:
    """Add the stacks of all threads to the log of this process and upload it, before the process ends at once."""
    for log in list(logging.getLogger("realm_jax").handlers):
        if isinstance(log, RunLog) and log.stream is not None:
            with contextlib.suppress(OSError, ValueError):
                faulthandler.dump_traceback(log.stream, all_threads=True)
            log.finish()


class RunLog(RotatingFileHandler):
    """Write log lines to a file and upload it in a thread, which starts at once."""

    def __init__(self, folder: Path, bucket: Folder, process: str) -> None:
        """Begin with a line about this start.

        Args:
            folder: folder of this machine, which may have the file of a process that was killed.
            bucket: the run directory.
            process: name of the process.
        """
        file = folder / f"{process}.log"
        super().__init__(file, maxBytes=LOG_BYTES // 2, backupCount=1, encoding="utf-8", errors="replace")
        formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
        formatter.converter = time.gmtime  # one clock for machines in all zones
        self.setFormatter(formatter)
        self._files = [folder / f"{process}.log.1", file]
        self._bucket, self._name = bucket, f"{LOGS}/{process}.log"
        self._uploaded: bytes | None = None  # content in the bucket; None until it is read
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="run log", daemon=True)
        self.add(logging.INFO, f"start of {process} on {socket.gethostname()} (process {os.getpid()})")
        self._thread.start()

    def add(self, level: int, message: str, with_traceback: bool = False) -> None:
        """Write a line that is in the log only.

        Args:
            level: level of the line.
            message: its text.
            with_traceback: add the traceback of the exception that is being handled.
        """
        raised = sys.exc_info() if with_traceback else None
        self.handle(logger.makeRecord(logger.name, level, "", 0, message, (), raised))

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop a line that cannot be written, for example to a full disk."""

    def finish(self) -> None:
        """Upload the last lines, for at most `LAST_SECONDS`."""
        self._is_over.set()
        self._thread.join(LAST_SECONDS)
        if self._thread.is_alive():
            logger.warning("%s: not uploaded within %.0f s", self._bucket.path(self._name), LAST_SECONDS)
        self.close()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_over.is_set()
            try:
                self._upload()
                if is_last:  # so that a file that is there at a start was left by a process that was killed
                    for file in self._files:
                        file.unlink(missing_ok=True)
            except Exception as error:  # of any kind: training goes on
                logger.warning("%s; the next upload tries again", error)
            self._is_over.wait(0.0 if is_last else SECONDS)

    def _upload(self) -> None:
        """Add the lines of the file to the log in the bucket. Raises StorageError."""
        if self._uploaded is None:
            with contextlib.suppress(FileNotFoundError):
                self._uploaded = self._bucket.read(self._name)
        uploaded = self._uploaded or b""
        self.acquire()  # so that no line is cut
        try:
            lines = b"".join(file.read_bytes() for file in self._files if file.is_file())
        finally:
            self.release()
        text = newest(uploaded + after(lines, uploaded))
        if text != uploaded:
            self._bucket.write(self._name, text)
        self._uploaded = text


def after(text: bytes, earlier: bytes) -> bytes:
    """Return the part of a log that follows its newest record which an earlier copy has; all of it if there is none.

    Args:
        text: the log, or its last lines.
        earlier: an earlier copy. Its last record may have become longer.
    """
    earlier_records = RECORD.split(earlier)[1:]
    if earlier_records and earlier_records[-1] in text:
        return text.rpartition(earlier_records[-1])[2]
    known = set(earlier_records)  # the last one may be of another machine
    records = RECORD.split(text)
    newest_known = max((number for number, record in enumerate(records) if record in known), default=-1)
    return b"".join(records[newest_known + 1 :])


def newest(text: bytes) -> bytes:
    """Return the last `LOG_BYTES` of a log, from the beginning of a record on."""
    if len(text) <= LOG_BYTES + len(REMOVED):
        return text
    record = RECORD.search(text, len(text) - LOG_BYTES)
    return REMOVED + text[record.start() if record else -LOG_BYTES :]
