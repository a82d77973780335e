"""Print logs from the run directory, which has them after the machines are gone.

`realm_jax/run_log.py` writes them if the run directory is in a bucket, and the local launcher if it is a path.
"""

import re
import subprocess
import sys
import time

from realm_jax.errors import UserError
from realm_jax.indexing.heartbeat import BUILDER, TRAINER, process_name
from realm_jax.mirror import is_url
from realm_jax.run_log import LOGS, START, after
from realm_jax.storage import Folder, open_folder

FOLLOW_SECONDS = 15.0  # between two readings of a log in a bucket, which is uploaded every minute
PREVIOUS_LINES = 200  # of each process, as for the pods of a job


def show_host(workdir: str, job: str, host: int, follow: bool) -> int:
    """Print the log of one process.

    Args:
        workdir: the run directory.
        job: 'trainer' or 'builder'.
        host: number of the process.
        follow: wait for further lines, until Ctrl-C.

    Returns:
        The exit code.

    Raises:
        UserError: there is no such log.
        StorageError: the bucket cannot be read.
    """
    folder, name = _open(workdir, job, host)[0], f"{process_name(job, host)}.log"
    if not is_url(workdir):
        return subprocess.call(["tail", "-n", "+1", *(["-F"] if follow else []), folder.path(name)])
    printed = b""
    while True:
        text = folder.read(name)
        _print(after(text, printed))
        if not follow:
            return 0
        printed = text
        time.sleep(FOLLOW_SECONDS)


def show_previous(workdir: str, job: str, host: int | None) -> int:
    """Print what processes wrote between their last two starts, each line after the name of its process.

    Args:
        workdir: the run directory.
        job: 'trainer' or 'builder'.
        host: number of a process; None for all of the job.

    Returns:
        The exit code, 0.

    Raises:
        UserError: there is no such log, or no earlier start in it.
        StorageError: the bucket cannot be read.
    """
    folder, hosts = _open(workdir, job, host)
    has_previous = False
    for number in hosts if host is None else [host]:
        name = process_name(job, number)
        text = folder.read(f"{name}.log")
        starts = [match.start() for match in START.finditer(text)]
        if len(starts) > 1:
            has_previous = True
            lines = text[starts[-2] : starts[-1]].splitlines(keepends=True)[-PREVIOUS_LINES:]
            _print(b"".join(f"{name} | ".encode() + line for line in lines))
    if not has_previous:
        advice = "read the log with --host=N" if host is None else "leave out --previous"
        raise UserError(f"--previous: {folder.url} has no earlier start of {job}; {advice}")
    return 0


def _open(workdir: str, job: str, host: int | None) -> tuple[Folder, list[int]]:
    """Return the folder of the logs and the numbers of a job's processes. Raises UserError if `host` has no log."""
    if job not in (TRAINER, BUILDER):
        raise UserError(f"--job={job}: --host and --previous need the name of a job; give {TRAINER} or {BUILDER}, "
            "and the number of a process by --host")  # fmt: skip
    folder = open_folder(f"{workdir.rstrip('/')}/{LOGS}")
    matches = [re.fullmatch(rf"{job}-(\d+)\.log", name) for name in folder.names()]
    hosts = sorted(int(match[1]) for match in matches if match)
    if not hosts:
        raise UserError(f"--job={job}: {folder.url} has no log of it; start the run, or check --workdir")
    if host is not None and host not in hosts:
        raise UserError(f"--host={host}: there is no log of {job}-{host}; choose among {', '.join(map(str, hosts))}")
    return folder, hosts


def _print(text: bytes) -> None:
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()
