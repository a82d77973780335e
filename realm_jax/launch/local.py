"""Local target: supervise the trainer's processes as a group, and each builder process separately, until training ends.

When a trainer process dies, the others cannot go on (a collective would wait for it forever), so all of them are ended
and started again, on a new port. A builder process is started again separately. Exit code 0 is an end; 2 is an error in
the configuration, after which nothing is restarted; 75 is a preemption, which does not count. Every other code is a
failure: the job is restarted after a pause that doubles, and not after `spec.restarts` failures without progress.
Progress is a new checkpoint for the trainer, a new generation for a builder.

The output of a process goes to this terminal, each line after its name, and to WORKDIR/logs/NAME.log. Read
`Supervisor.run`, which polls all processes; `Supervisor.in_background` does so for the builders of a trainer that is
this process.
"""

import contextlib
import functools
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple, TypeVar

from realm_jax.console import go_silent
from realm_jax.errors import USER_ERROR, UserError
from realm_jax.host import INTERRUPTED, PREEMPTED
from realm_jax.indexing.heartbeat import BUILDER, TRAINER, process_name
from realm_jax.launch.spec import Launch, choose, process_flags
from realm_jax.launch.status import (
    clear_expected_jobs,
    newest_checkpoint,
    newest_generation,
    record_expected_jobs,
    summary,
)
from realm_jax.storage import exclusive_lock, is_held, make_folder, open_folder, read_json, write_json_atomic

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
STATUS_SECONDS = 30.0  # between two lines about the run
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a failed job is started again
SHORT_GRACE = 5.0  # seconds for the other processes of a job that crashed, which cannot save without it
LONGEST_LINE = 1 << 16  # bytes
PROGRAM = [sys.executable, "-m", "realm_jax"]  # `realm` of this environment
# Executes its arguments in a process that gets SIGTERM when the supervisor dies for any reason.
EXIT_WITH_PARENT = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"  # PR_SET_PDEATHSIG
    f"os.getppid() == int(sys.argv[1]) or sys.exit({PREEMPTED})\n"
    "os.execv(sys.argv[2], sys.argv[2:])"
)
# In WORKDIR/logs: {"host": of the supervisor, "pid": its process, "grace_seconds": how long it lets others save}.
LAUNCH_RECORD = "launch.json"

_T = TypeVar("_T")


class Process(NamedTuple):
    """A process to run.

    Attributes:
        name: name of the process.
        command: its words.
        environment: variables in addition to those of this process.
    """

    name: str
    command: list[str]
    environment: dict[str, str]


Jobs = dict[str, list[Process]]  # job → its processes, which live and die together


def processes(launch: Launch, port: int | str) -> Jobs:
    """Return the jobs of a launch.

    Args:
        launch: the description.
        port: port of this machine, through which the processes of a trainer connect.
    """
    trainers, builders, local = launch.spec.trainer.processes, launch.spec.builder.processes, launch.spec.local
    jobs = Jobs()
    for number in range(trainers + builders):
        if number < trainers:
            job, name = TRAINER, process_name(TRAINER, number)
            flags = [*process_flags(number, trainers), f"--coordinator=localhost:{port}"] if trainers > 1 else []
        else:
            job, name = BUILDER, process_name(BUILDER, number - trainers)
            flags = process_flags(number - trainers, builders)
        environment = {"CUDA_VISIBLE_DEVICES": local.gpus[number]} if local.gpus else {}
        if local.devices:
            environment = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(local.devices)}
        process = Process(name, launch.command(job, *flags), environment | launch.environment)
        jobs.setdefault(TRAINER if job == TRAINER else name, []).append(process)
    return jobs


class Child(NamedTuple):
    """A started process.

    Attributes:
        process: in its own process group.
        reader: the thread that copies its output.
    """

    process: subprocess.Popen[bytes]
    reader: threading.Thread

    def signal(self, number: int) -> None:
        """Send a signal to the process and its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@dataclass
class Job:
    """Processes that live and die together.

    Attributes:
        name: name of the job.
        read_progress: returns a value that changes when the job makes progress.
        children: its processes.
        failures: since the last progress.
        resume_at: time of its next start.
        exit_code: of its last end; None before.
        ended_at: time of its last end.
        progress: at its last start.
    """

    name: str
    read_progress: Callable[[], object]
    children: list[Child] = field(default_factory=list)
    failures: int = 0
    resume_at: float = 0.0
    exit_code: int | None = None
    ended_at: float = 0.0
    progress: object = None


class Supervisor:
    """Start and supervise jobs, in this thread or in the background; for a single use."""

    def __init__(
        self, jobs: Callable[[int], Jobs], workdir: Path, restarts: int, grace_seconds: float, echo: bool = True
    ) -> None:
        """Make a supervisor.

        Args:
            jobs: returns the jobs for a free port of this machine.
            workdir: the run directory.
            restarts: failures without progress after which a job is not restarted.
            grace_seconds: from SIGTERM to SIGKILL.
            echo: show the progress of the run and the output of its processes here.
        """
        self._make_jobs, self._workdir, self._echo = jobs, workdir, echo
        self._restarts, self._grace_seconds = restarts, grace_seconds
        folder = open_folder(workdir)
        self._signals: list[int] = []  # signals that were received
        self._error: Exception | None = None  # why builders in the background ended
        self._status_at = time.monotonic()  # of the last line about the run
        self._print = threading.Lock()
        self._summary = functools.partial(summary, folder)
        self._jobs = [
            Job(name, functools.partial(newest_checkpoint if name == TRAINER else newest_generation, folder))
            for name in jobs(0)
        ]

    @classmethod
    def of(cls, launch: Launch) -> "Supervisor":
        """Return the supervisor of a launch on this machine."""
        jobs, spec = functools.partial(processes, launch), launch.spec
        return cls(jobs, Path(launch.workdir), spec.restarts, spec.grace_seconds)

    def run(self) -> int:
        """Supervise until training and the builders have ended, by themselves or by a signal.

        Returns:
            The exit code for a signal, else the trainer's, else the first that is not 0.

        Raises:
            UserError: a process cannot be started.
        """
        signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
        # A signal that is ignored, by nohup or in a shell's background, stays ignored.
        handled = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in handled}
        try:
            self._watch()
            if self._signals:
                logger.warning("%s: saving and ending", signal.Signals(self._signals[0]).name)
        finally:
            self._end_all()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._signals:
            return INTERRUPTED if self._signals[0] == signal.SIGINT else PREEMPTED
        code = next((job.exit_code for job in self._jobs if job.exit_code), 0)
        return 128 - code if code < 0 else code  # as shells encode a signal

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:  # a second signal: stop without saving
            for job in self._jobs:
                for child in job.children:
                    child.signal(signal.SIGKILL)

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Supervise builders while the block trains in this process.

        If a builder fails for good, SIGTERM ends the block, which saves, and UserError is raised.
        """
        watcher = threading.Thread(target=self._watch_builders, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self._signals.append(signal.SIGTERM)
            watcher.join()
            if self._error:
                raise self._error

    def _watch_builders(self) -> None:
        try:
            self._watch()
            for job in self._jobs:
                if job.exit_code:
                    log = self._workdir / "logs" / f"{job.name}.log"
                    raise UserError(f"{job.name} failed; no index will arrive. {log} says why")
        except Exception as error:  # also a defect: training would wait for an index that no builder makes
            self._error = error
            if not self._signals:
                os.kill(os.getpid(), signal.SIGTERM)
        finally:
            self._end_all()

    def _watch(self) -> None:
        while not self._signals and not self._is_over():
            for job in self._jobs:
                if job.exit_code is None:
                    self._check_job(job)
            if self._echo and time.monotonic() - self._status_at > STATUS_SECONDS:
                self._status_at = time.monotonic()
                logger.info("%s", self._try_read(self._summary, "status unknown"))
            time.sleep(POLL_SECONDS)

    def _is_over(self) -> bool:
        trainer = next((job for job in self._jobs if job.name == TRAINER), None)
        if trainer is None:  # it is this process
            return any(job.exit_code for job in self._jobs)
        if trainer.exit_code is None:
            return False
        # Builders read in the run directory that training has ended; for the grace period we wait for them.
        is_waiting = trainer.exit_code == 0 and time.monotonic() - trainer.ended_at < self._grace_seconds
        return not is_waiting or all(job.exit_code is not None for job in self._jobs)

    def _check_job(self, job: Job) -> None:
        """Start a job that does not run, or end or restart one by the exit code of the process that ended first.

        Raises UserError if a process cannot be started; those that were started before are among the job's children.
        """
        if not job.children:
            if time.monotonic() < job.resume_at:
                return
            job.progress = self._try_read(job.read_progress, job.progress)
            for process in self._make_jobs(free_port())[job.name]:
                try:
                    job.children.append(self._spawn(process))
                except OSError as error:
                    raise UserError(f"{process.name} cannot be started: {error}") from None
            return
        codes = [child.process.poll() for child in job.children]
        if not any(codes):
            if 0 in codes and None not in codes:
                self._end_children(job.children, SHORT_GRACE)
                self._end(job, 0)
            return
        # Of several failures report a user error first, and a preemption last.
        code = min((code for code in codes if code), key=lambda code: {USER_ERROR: 0, PREEMPTED: 2}.get(code, 1))
        self._end_children(job.children, self._grace_seconds if code == PREEMPTED else SHORT_GRACE)
        if any(child.process.returncode == USER_ERROR for child in job.children):
            logger.error(
                "%s: exit code 2, an error in the configuration; not restarted, its last lines say which", job.name
            )
            self._end(job, USER_ERROR)
            return
        cause = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        pause = 0.0
        if code != PREEMPTED:
            has_progress = self._try_read(job.read_progress, job.progress) != job.progress
            job.failures = 1 if has_progress else job.failures + 1
            if job.failures > self._restarts:
                logger.error("%s: %s; failures without progress: %d; giving up", job.name, cause, job.failures)
                self._end(job, code)
                return
            pause = min(FIRST_PAUSE * 2.0 ** (job.failures - 1), LONGEST_PAUSE)
        job.children, job.resume_at = [], time.monotonic() + pause
        logger.warning("%s: %s; restarting it in %g s", job.name, cause, pause)

    def _end(self, job: Job, code: int) -> None:
        job.exit_code, job.ended_at, job.children = code, time.monotonic(), []
        logger.info("%s: ended with %d", job.name, code)

    def _end_all(self) -> None:
        self._end_children([child for job in self._jobs for child in job.children], self._grace_seconds)

    def _end_children(self, children: Sequence[Child], seconds: float) -> None:
        """End processes and their children: SIGTERM, and SIGKILL for the remaining ones after so many seconds."""
        for child in children:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
            child.signal(signal.SIGKILL)
            child.process.wait()
            child.reader.join(5)

    def _try_read(self, read: Callable[[], _T], default: _T) -> _T:
        """Read the run directory; an error is logged, gives `default`, and never ends the run."""
        try:
            return read()
        except Exception as error:
            logger.warning("%s: cannot be read (%s)", self._workdir, error)
            return default

    def _spawn(self, process: Process) -> Child:
        log = open(self._workdir / "logs" / f"{process.name}.log", "ab", buffering=0)
        popen = subprocess.Popen(
            [sys.executable, "-IS", "-c", EXIT_WITH_PARENT, str(os.getpid()), *PROGRAM, *process.command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | process.environment,
            start_new_session=True,  # only this process gets Ctrl-C, and ends the others in order
        )
        assert popen.stdout is not None
        reader = threading.Thread(target=self._copy, args=(process.name, popen.stdout, log), daemon=True)
        reader.start()
        logger.info("%s: process %d", process.name, popen.pid)
        return Child(popen, reader)

    def _copy(self, name: str, stream: IO[bytes], log: IO[bytes]) -> None:
        """Copy every line of a process to its log and, after its name, to this terminal.

        Errors of the log or the terminal are ignored: a process whose output nobody reads would stop.
        """
        with stream, log:
            while part := stream.readline(LONGEST_LINE):
                line = part if part.endswith(b"\n") else part + b"\n"
                with contextlib.suppress(OSError):
                    log.write(line)
                if not self._echo:
                    continue
                with self._print, contextlib.suppress(OSError, ValueError):
                    try:
                        sys.stderr.write(f"{name} | {line.decode(errors='replace')}")
                        sys.stderr.flush()
                    except BrokenPipeError:
                        go_silent()


def free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


# ---- the target


class LauncherRecord(NamedTuple):
    """Facts that a running supervisor writes about itself.

    Attributes:
        host: name of its machine, because others may share the run directory.
        pid: its process.
        grace_seconds: from SIGTERM to SIGKILL of the processes that it started.
    """

    host: str
    pid: int
    grace_seconds: float


class Local:
    """The target `local`."""

    def __init__(self, launch: Launch) -> None:
        self._launch, self._workdir = launch, Path(launch.workdir)
        self._logs = self._workdir / "logs"

    def plan(self) -> str:
        """Return the commands, one per line, with their additional environment variables."""
        self._check()
        lines = []
        for job in processes(self._launch, "PORT").values():
            for process in job:
                environment = [f"{key}={shlex.quote(value)}" for key, value in process.environment.items()]
                lines.append(" ".join([f"{process.name}:", *environment, shlex.join(process.command)]) + "\n")
        return "".join(lines)

    def start(self) -> int:
        """Run the launch here until it ends; return the exit code."""
        self._check()
        make_folder(self._logs, "--workdir")
        with exclusive_lock(self._logs):
            grace_seconds = self._launch.spec.grace_seconds
            write_json_atomic(
                self._logs / LAUNCH_RECORD, LauncherRecord(socket.gethostname(), os.getpid(), grace_seconds)._asdict()
            )
            record_expected_jobs(self._launch.workdir, list(processes(self._launch, 0)))
            try:
                code = Supervisor.of(self._launch).run()
                if code == INTERRUPTED:  # Ctrl-C is a stop; a signal of the machine is not
                    clear_expected_jobs(self._launch.workdir)
                return code
            finally:
                (self._logs / LAUNCH_RECORD).unlink(missing_ok=True)

    def items(self) -> list[dict[str, str]]:
        """Return {"name", "state", "detail"} of the supervisor."""
        record = self._running()
        state, detail = ("not running", "") if record is None else ("running", f"process {record.pid} on {record.host}")
        return [{"name": self._launch.spec.name, "state": state, "detail": detail}]

    def logs(self, job: str, follow: bool) -> int:
        """Show the output of a process.

        Args:
            job: 'trainer-0' or 'trainer', 'builder-1', …
            follow: wait for further lines.

        Returns:
            The exit code of tail.
        """
        name = choose(job, sorted(path.stem for path in self._logs.glob("*.log")))
        return subprocess.call(["tail", "-n", "200", *(["-F"] if follow else []), str(self._logs / f"{name}.log")])

    def stop(self) -> None:
        """Send SIGTERM to the supervisor, which ends its processes, and wait until everything is saved."""
        record = self._running()
        if record is None:
            raise UserError(f"--workdir={self._workdir}: no launcher runs there; check --workdir")
        if record.host != socket.gethostname():
            raise UserError(f"--workdir={self._workdir}: its launcher runs on {record.host}; stop it there")
        try:
            os.kill(record.pid, signal.SIGTERM)
        except ProcessLookupError:  # it has just ended
            pass
        except PermissionError:
            raise UserError(f"process {record.pid} belongs to someone else; ask them to stop it") from None
        deadline = time.monotonic() + record.grace_seconds + 10
        while is_held(self._logs):
            if time.monotonic() > deadline:
                raise UserError(
                    f"process {record.pid} does not end; read the logs in {self._logs}, then end it with "
                    f"`kill -KILL {record.pid}`"
                )
            time.sleep(POLL_SECONDS)
        print(f"{self._launch.spec.name}: stopped")

    def delete(self) -> None:
        """Raise UserError: there is nothing to delete but the run directory."""
        raise UserError("--target=local: has nothing to delete except the run directory; remove that yourself")

    def _running(self) -> LauncherRecord | None:
        """Return the record of the supervisor; None if it is dead and does not lock the folder of the logs."""
        if not is_held(self._logs):
            return None
        try:
            record = read_json(self._logs / LAUNCH_RECORD)
            return LauncherRecord(str(record["host"]), int(record["pid"]), float(record["grace_seconds"]))
        except (UserError, KeyError, TypeError, ValueError):  # not written yet, or by another version
            return None

    def _check(self) -> None:
        launch, local = self._launch, self._launch.spec.local
        if "://" in launch.workdir:
            raise UserError(f"--workdir={launch.workdir}: --target=local needs a folder of this machine")
        if local.devices and local.gpus:
            raise UserError("spec.local.devices: emulates devices of a CPU; leave it or spec.local.gpus out")
        count = launch.spec.trainer.processes + launch.spec.builder.processes
        if local.gpus and (len(local.gpus) != count or not all(isinstance(gpus, str) for gpus in local.gpus)):
            example = str(tuple(str(number) for number in range(count)))
            raise UserError(f"spec.local.gpus: name the devices of each of the {count} processes, such as {example}")
