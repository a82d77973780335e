"""One machine: real processes, the trainer's as a gang, the builder's each for itself, watched until training ends.

When a trainer process dies the others cannot go on (a collective would wait for it for ever), so all of them are ended
and started again, on a new port. A builder process is started again by itself. Exit code 0 is an end, 2 a mistake that
no restart mends, 75 a preemption that does not count; all else is a failure, after which there is a pause that doubles,
and after `spec.restarts` of them without a new checkpoint between them the job is given up.

Everything that a process prints goes to this terminal with its name before it, and to WORKDIR/logs/NAME.log. Read
`Supervisor.run`, which looks at all processes once a `LOOK_SECONDS`.
"""

import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from realm_jax.errors import USER_ERROR, UserError
from realm_jax.launch.spec import Launch, Role
from realm_jax.launch.status import progress, summary
from realm_jax.storage import make_folder, only_one, open_folder, read_json, write_json_atomic
from realm_jax.training.preemption import PREEMPTED

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
STATUS_SECONDS = 30.0  # between two lines about the run
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # before a failed job is started again
PROGRAM = [sys.executable, "-m", "realm_jax.cli"]  # `realm` of this environment
INTERRUPTED = 130
RECORD = "launch.json"  # in WORKDIR/logs: the supervisor's process


@dataclass
class Child:
    """A process under its name."""

    name: str
    process: subprocess.Popen[bytes]
    reader: threading.Thread

    def signal(self, number: int) -> None:
        """To the process and all that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


@dataclass
class Job:
    """Processes that live and die together. start: makes them; failures: without progress between them."""

    name: str
    start: Callable[[], list[Child]]
    children: list[Child] = field(default_factory=list)
    failures: int = 0
    resume_at: float = 0.0  # when it is started again
    code: int | None = None  # with which it ended for good
    progress: object = None  # what had been reached when it was started

    @property
    def is_over(self) -> bool:
        return self.code is not None


class Supervisor:
    """Starts the processes of a launch and watches over them; `run` returns the exit code."""

    def __init__(self, launch: Launch, workdir: Path) -> None:
        self._launch, self._workdir = launch, workdir
        self._folder = open_folder(workdir)
        self._asked: list[int] = []  # signals that came
        self._told_at = time.monotonic()
        self._print = threading.Lock()
        self._trainer = Job("trainer", self._start_trainers)
        self._builders = [
            Job(name, lambda number=number, name=name: [self._start_builder(number, name)])  # type: ignore[misc]
            for number, name in enumerate(_names("builder", launch.builder.processes))
        ]

    def run(self) -> int:
        """Until training has ended and the builders with it, or until a signal has ended them."""
        before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while not self._asked:
                for job in self._jobs:
                    self._look_after(job)
                if self._trainer.is_over and (self._trainer.code or all(job.is_over for job in self._builders)):
                    break
                self._tell()
                time.sleep(LOOK_SECONDS)
            return self._end()
        finally:
            self._kill()
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def _jobs(self) -> list[Job]:
        return [self._trainer, *self._builders]

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self._asked.append(number)
        if len(self._asked) > 1:  # once more: no time left for saving
            self._kill()

    # ---- one job

    def _look_after(self, job: Job) -> None:
        """Start it, or see how it ended."""
        if job.is_over:
            return
        if not job.children:
            if time.monotonic() >= job.resume_at:
                job.progress = progress(self._folder)
                job.children = job.start()
            return
        codes = [child.process.poll() for child in job.children]
        if all(code == 0 for code in codes):
            self._ended(job, 0)
        elif any(code not in (None, 0) for code in codes):
            first = next(code for code in codes if code not in (None, 0))
            assert first is not None
            self._finish(job)
            self._failed(job, first)

    def _failed(self, job: Job, code: int) -> None:
        """Decide what follows from the exit code of the process that ended first."""
        if code == USER_ERROR:
            logger.error("%s: exit code 2, a mistake that no restart mends; its last lines say which", job.name)
            self._ended(job, code)
            return
        pause = 0.0
        if code != PREEMPTED:
            reached = progress(self._folder)
            job.failures = 1 if reached != job.progress else job.failures + 1
            if job.failures > self._launch.restarts:
                logger.error("%s: %s, for the %dth time without progress; given up", job.name, _how(code), job.failures)
                self._ended(job, code)
                return
            pause = min(FIRST_PAUSE * 2.0 ** (job.failures - 1), LONGEST_PAUSE)
        job.children, job.resume_at = [], time.monotonic() + pause
        logger.warning("%s: %s; starting it again in %g s", job.name, _how(code), pause)

    def _ended(self, job: Job, code: int) -> None:
        job.code, job.children = code, []
        logger.info("%s: ended with %d", job.name, code)

    def _finish(self, job: Job) -> None:
        """End what is left of a job: SIGTERM, and SIGKILL when the grace period is over."""
        for child in job.children:
            child.signal(signal.SIGTERM)
        until = time.monotonic() + self._launch.grace_seconds
        for child in job.children:
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.signal(signal.SIGKILL)
                child.process.wait()
            child.reader.join(5)

    # ---- the end

    def _end(self) -> int:
        """End what still runs; the exit code of it all."""
        if self._asked:
            logger.warning("%s: saving and ending", signal.Signals(self._asked[0]).name)
        running = Job("all", list, [child for job in self._jobs for child in job.children])
        self._finish(running)
        if self._asked:
            return INTERRUPTED if self._asked[0] == signal.SIGINT else PREEMPTED
        return self._trainer.code or max((job.code or 0 for job in self._builders), default=0)

    def _kill(self) -> None:
        for job in self._jobs:
            for child in job.children:
                child.signal(signal.SIGKILL)

    def _tell(self) -> None:
        if time.monotonic() - self._told_at > STATUS_SECONDS:
            self._told_at = time.monotonic()
            logger.info("%s", summary(self._folder))

    # ---- processes

    def _start_trainers(self) -> list[Child]:
        role, count = self._launch.trainer, self._launch.trainer.processes
        if count == 1:
            return [self._start("trainer", self._launch.command(role), 0)]
        where = f"--coordinator=localhost:{_free_port()}"
        return [
            self._start(name, self._launch.command(role, f"--processes={count}", f"--process={number}", where), number)
            for number, name in enumerate(_names("trainer", count))
        ]

    def _start_builder(self, number: int, name: str) -> Child:
        role: Role = self._launch.builder
        share = [f"--process={number}", f"--processes={role.processes}"]
        return self._start(name, self._launch.command(role, *share), self._launch.trainer.processes + number)

    def _start(self, name: str, words: list[str], number: int) -> Child:
        """number: among all processes of the launch."""
        log = open(self._workdir / "logs" / f"{name}.log", "ab")
        process = subprocess.Popen(
            [*PROGRAM, *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment(number),
            start_new_session=True,  # Ctrl-C comes here, and from here in order
        )
        assert process.stdout is not None
        reader = threading.Thread(target=self._copy, args=(name, process.stdout, log), daemon=True)
        reader.start()
        logger.info("%s: process %d", name, process.pid)
        return Child(name, process, reader)

    def _environment(self, number: int) -> dict[str, str]:
        local, found = self._launch.spec.local, dict(os.environ, PYTHONUNBUFFERED="1")
        if local.devices:
            found |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(local.devices)}
        if local.gpus:
            found["CUDA_VISIBLE_DEVICES"] = local.gpus[number]
        return found

    def _copy(self, name: str, stream: IO[bytes], log: IO[bytes]) -> None:
        """Every line of a process, to its log and, with its name, to this terminal."""
        with stream, log:
            for line in stream:
                log.write(line)
                log.flush()
                with self._print:
                    sys.stderr.write(f"{name} | {line.decode(errors='replace')}")
                    sys.stderr.flush()


def _names(job: str, count: int) -> list[str]:
    return [job] if count == 1 else [f"{job}-{number}" for number in range(count)]


def _how(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


# ---- the target


class Local:
    """The target `local`."""

    def __init__(self, launch: Launch) -> None:
        self._launch, self._workdir = launch, Path(launch.workdir)

    def plan(self) -> str:
        """The commands, one a line."""
        self._check()
        launch, lines = self._launch, []
        for role in (launch.trainer, launch.builder):
            for number, name in enumerate(_names(role.name, role.processes)):
                share = [f"--process={number}", f"--processes={role.processes}"]
                port = ["--coordinator=localhost:PORT"] if role is launch.trainer and role.processes > 1 else []
                alone = role is launch.trainer and role.processes == 1
                lines.append(f"{name}: {shlex.join(launch.command(role, *([] if alone else [*share, *port])))}\n")
        return "".join(lines)

    def start(self) -> int:
        """Run it here, until it ends; the exit code."""
        self._check()
        make_folder(self._workdir / "logs", "--workdir")
        with only_one(self._workdir / "logs"):
            write_json_atomic(self._record, {"pid": os.getpid(), "name": self._launch.name})
            try:
                return Supervisor(self._launch, self._workdir).run()
            finally:
                self._record.unlink(missing_ok=True)

    def items(self) -> list[dict[str, str]]:
        """{"name", "state", "detail"} of the supervisor."""
        pid = self._pid()
        state = "not running" if pid is None else "running"
        return [{"name": self._launch.name, "state": state, "detail": "" if pid is None else f"process {pid}"}]

    def logs(self, job: str, follow: bool) -> int:
        """What a process printed. job: 'trainer', 'builder', 'trainer-1', …"""
        file = self._workdir / "logs" / f"{job}.log"
        if not file.is_file():
            known = sorted(path.stem for path in (self._workdir / "logs").glob("*.log"))
            raise UserError(f"{file}: there is no such log; choose among {', '.join(known) or 'none'}")
        return subprocess.call(["tail", "-n", "200", *(["-F"] if follow else []), str(file)])

    def stop(self) -> None:
        """SIGTERM to the supervisor, which hands it on, and waits until everything is saved."""
        pid = self._pid()
        if pid is None:
            raise UserError(f"--workdir={self._workdir}: nothing runs there")
        os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + self._launch.grace_seconds + 10
        while self._pid() is not None:
            if time.monotonic() > until:
                raise UserError(f"process {pid} does not end; look into {self._workdir / 'logs'}")
            time.sleep(LOOK_SECONDS)

    def delete(self) -> None:
        """There is nothing here but the work directory."""
        raise UserError("--target=local: has nothing to delete but the work directory; remove that yourself")

    @property
    def _record(self) -> Path:
        return self._workdir / "logs" / RECORD

    def _pid(self) -> int | None:
        """The supervisor's process, if it lives."""
        if not self._record.is_file():
            return None
        pid = int(read_json(self._record)["pid"])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        return pid

    def _check(self) -> None:
        launch = self._launch
        if launch.is_remote:
            raise UserError(f"--workdir={launch.workdir}: --target=local needs a folder of this machine")
        wanted = launch.trainer.processes + launch.builder.processes
        if launch.spec.local.gpus and len(launch.spec.local.gpus) != wanted:
            raise UserError(f"spec.local.gpus: name the devices of each of the {wanted} processes")
