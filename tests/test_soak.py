"""A soak: trainer and index builder, killed again and again at bad moments, end as if nobody had touched them.

    REALM_SOAK_ROUNDS=30 REALM_SOAK_LOG=soak.log pytest -m nightly -s -n0 tests/test_soak.py

A round is a whole tiny run of `realm train` beside `realm build-index`, both real processes. What is killed, when and
how follows from the round's number; it is started again by the same command. A round passes when parameters and records
are bit for bit those of an undisturbed run. The log has one line a round. Start reading at
`test_a_round_ends_as_the_undisturbed_run`.
"""

import glob
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import small_chunks
from runs import flags_of
from tiny_run import tiny_config

from realm_jax.config import add_sections, task_names
from realm_jax.launch.local import free_port
from realm_jax.refresh.status import TRAINER, read_status
from realm_jax.storage import open_folder, read_json
from realm_jax.train.metrics import TIMES
from realm_jax.train.records import read_lines
from realm_jax.train.restore import restore_params
from realm_jax.train.workdir import load_run

pytestmark = pytest.mark.nightly

ROUNDS = int(os.environ.get("REALM_SOAK_ROUNDS", "30"))
LIMIT = 400.0  # seconds that a round may take
STEPS = 24
PREEMPTED, EARLY = 75, -signal.SIGTERM  # early: SIGTERM came before the program listened, or after it was done

# --- What is run


class Setting(NamedTuple):
    """changes: config keys that differ from those of `flags`. processes: of the trainer."""

    changes: dict[str, Any]
    processes: int = 1


SETTINGS = {
    "device": Setting({}),
    "scann": Setting({"retrieval.backend": "scann", "scann.ahead": 1}),  # sixteen passages are scored whole
    "recipe": Setting({"tasks": "ict,realm,qa", "refresh.adopt_after": 0}),
    "two": Setting({}, processes=2),
}
ORDER = ("device", "scann", "recipe", "scann", "device", "two", "scann", "device", "recipe", "device")  # over and over


def flags(data: Path, changes: dict[str, Any]) -> list[str]:
    config = tiny_config(data)
    config.tasks = "realm"
    for task in ("ict", "realm", "qa"):
        steps = STEPS if task == "realm" else 6
        config[task].update({"steps": steps, "batch_size": 8, "learning_rate": 1e-3})
    config.optimizer.warmup = 2
    config.update({"checkpoint": {"every": 3, "keep": 2}, "log": {"every": 1}})
    config.refresh.update({"mode": "async", "every": 3, "adopt_after": 2, "wait_seconds": LIMIT})
    add_sections(config, ["scann"])
    config.update_from_flattened_dict(changes)
    return flags_of(config)


@dataclass
class Job:
    """One of the two commands, in one process or several."""

    commands: list[list[str]]
    output: Path
    starts: int = 0
    read: int = 0  # bytes of the output that are of earlier starts
    running: list[subprocess.Popen] = field(default_factory=list)

    def start(self) -> None:
        self.starts += 1
        with self.output.open("ab") as stream:
            self.read = stream.tell()
            self.running = [
                subprocess.Popen(
                    command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=stream, stderr=subprocess.STDOUT
                )
                for command in self.commands
            ]

    def send(self, number: signal.Signals) -> None:
        for process in self.running:
            process.send_signal(number)

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.running]

    def over(self) -> bool:
        """Whether it ended well; AssertionError if it ended otherwise without having been killed."""
        assert {*self.codes()} <= {None, 0}, f"{self.output.name} ended by itself with {self.codes()}\n{self.tail()}"
        return self.codes() == [0] * len(self.running)

    def listens(self) -> bool:
        """Whether it has said a word since it was started; from then on SIGTERM is answered."""
        said = self.output.read_bytes()[self.read :].splitlines()
        return any(not line.startswith(b"[Gloo]") for line in said)  # the words of a library

    def tail(self) -> str:
        return f"--- {self.output}\n" + self.output.read_text(errors="replace")[-4000:]


class Pair:
    """A run folder with both jobs."""

    def __init__(self, data: Path, workdir: Path, context: Setting) -> None:
        self.workdir = workdir
        workdir.mkdir()
        given = [f"--workdir={workdir}", *flags(data, context.changes)]
        train, build = ([sys.executable, small_chunks.__file__, job, *given] for job in ("train", "build-index"))
        together = [f"--processes={context.processes}", f"--coordinator=localhost:{free_port()}"]
        trains = [[*train, *together, f"--process={one}"] for one in range(context.processes)]
        self.trainer = Job([train] if context.processes == 1 else trains, workdir / "trainer.out")
        self.builder = Job([build], workdir / "builder.out")
        self.jobs = {"trainer": [self.trainer], "builder": [self.builder], "both": [self.trainer, self.builder]}
        self.until = time.monotonic() + LIMIT

    def __enter__(self) -> "Pair":
        for job in self.jobs["both"]:
            job.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.trainer.running + self.builder.running:
            process.kill()
            process.wait()

    def wait(self, true: Callable[[], bool]) -> None:
        """Return once `true()` is. AssertionError, with what both jobs said last, when the round's time is over."""
        while not true():
            if time.monotonic() > self.until:
                raise AssertionError("\n".join(["this round hangs", *(job.tail() for job in self.jobs["both"])]))
            time.sleep(0.003)

    def over(self) -> bool:
        trained, built = self.trainer.over(), self.builder.over()
        assert trained or not built or index_done(self.workdir), f"the builder left the trainer\n{self.builder.tail()}"
        return trained and built

    @property
    def step(self) -> str:
        """How far training is, for people."""
        found = [(path.parent.name, lines[-1]["step"]) for path in self.metrics() if (lines := read_lines(path))]
        return "before step 1" if not found else "at {} {}".format(*found[-1])

    def metrics(self) -> list[Path]:
        return sorted(self.workdir.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime_ns)


# --- When it is killed


def files(pattern: str, workdir: Path) -> set[Hashable]:
    """The files of a pattern, each with the time of its last change."""
    found = set()
    for path in glob.iglob(pattern, root_dir=workdir, include_hidden=True):  # a folder may go meanwhile
        with suppress(FileNotFoundError):  # it has its final name by now, or it was removed
            found.add((path, (workdir / path).stat().st_mtime_ns))
    return found


def adoptions(workdir: Path) -> set[Hashable]:
    """The adoptions that are on record; after a restart they may come again."""
    path = workdir / "realm" / "evaluations.jsonl"
    if not path.is_file():
        return set()
    return {(line["step"], path.stat().st_ino) for line in read_lines(path) if "generation" in line}


def index_done(workdir: Path) -> set[Hashable]:
    """Whether the trainer has said that it needs no further index: a builder may leave from then on."""
    trainer = read_status(open_folder(workdir), TRAINER)
    return set() if trainer is None or trainer.needs_index else {"index done"}


def steps(workdir: Path) -> set[Hashable]:
    return {(path, path.stat().st_size) for path in workdir.glob("*/metrics.jsonl")}


# What shows a moment: something that was not there when waiting for it began.
MOMENTS: dict[str, Callable[[Path], set[Hashable]]] = {
    "step": steps,
    "save under way": partial(files, "*/checkpoints/*tmp*"),
    "saved": partial(files, "*/checkpoints/*/_CHECKPOINT_METADATA"),
    "half an export": partial(files, "exports/*/*.safetensors"),
    "export": partial(files, "exports/*/EXPORT.json"),
    "chunk": partial(files, "index/*/*.bin"),
    "generation": partial(files, "index/*/MANIFEST.json"),
    "adoption": adoptions,
    "index done": index_done,
    "start": lambda workdir: {time.monotonic()},
}


class Kill(NamedTuple):
    """victim: 'trainer', 'builder' or 'both'; it gets `signal` some seconds after the `nth` coming of a moment."""

    victim: str
    signal: signal.Signals
    moment: str
    seconds: float
    nth: int


def kills(round_number: int) -> list[Kill]:
    rng = random.Random(round_number)
    moments = rng.sample(sorted({*MOMENTS} - {"index done"}), 3)
    if rng.random() < 0.25:
        moments.append("index done")
    return [
        Kill(
            rng.choice(("trainer", "builder", "both")),
            rng.choice((signal.SIGKILL, signal.SIGTERM)),
            moment,
            rng.uniform(0, 10) if moment == "start" else rng.choice((0, rng.uniform(0, 0.02), rng.uniform(0, 0.5))),
            1 if moment in ("start", "index done") else rng.choice((1, 1, 2, 4)),
        )
        for moment in moments
    ]


def carry_out(kill: Kill, pair: Pair) -> str:
    """Wait for the moment, kill, look at the exit codes and start again; returns what to log."""
    look = MOMENTS[kill.moment]
    seen = look(pair.workdir)
    enough = len(seen) + kill.nth

    def came() -> bool:
        seen.update(look(pair.workdir))
        return len(seen) >= enough

    pair.wait(lambda: pair.over() or came())
    time.sleep(kill.seconds)
    victims = [job for job in pair.jobs[kill.victim] if not job.over()]
    moment = kill.moment if kill.nth == 1 else f"{kill.moment} no. {kill.nth}"
    told = f"{kill.victim} {kill.signal.name[3:]} {1000 * kill.seconds:.0f} ms after {moment} {pair.step}"
    allowed = [strike(kill, job) for job in victims]
    codes = [end(pair, job, codes) for job, codes in zip(victims, allowed, strict=True)]
    return f"{told} -> {' '.join(map(str, codes)) or 'it was over'}"


def strike(kill: Kill, job: Job) -> set[int]:
    """Send the signal; returns the exit codes that may follow."""
    early = kill.signal == signal.SIGTERM and not job.listens()
    if kill.signal == signal.SIGKILL or (early and len(job.running) > 1):  # one would wait for another that is gone
        job.send(signal.SIGKILL)
        return {-signal.SIGKILL}
    job.send(kill.signal)
    return {PREEMPTED, EARLY} if early else {PREEMPTED}


def end(pair: Pair, job: Job, allowed: set[int]) -> int:
    """The exit code of a job that was killed; it is started again unless it was done."""
    pair.wait(lambda: None not in job.codes())
    finished = index_done(pair.workdir) if job is pair.builder else (pair.workdir / "results.json").is_file()
    codes = {*job.codes()}
    expected = allowed | ({0, EARLY} if finished else set())
    assert len(codes) == 1 and codes <= expected, f"{job.output.name} ended with {job.codes()}\n{job.tail()}"
    if codes != {0}:
        job.start()
    return codes.pop()


# --- How it ends


class Outcome(NamedTuple):
    """What a run leaves: the checksum of all parameters, and its records but for times."""

    sha256: str
    records: dict[str, Any]


def outcome(workdir: Path) -> Outcome:
    run = load_run(workdir)
    names = task_names(run.config)
    checksum = hashlib.sha256()
    for name in names:
        for path, value in jax.tree_util.tree_leaves_with_path(restore_params(run, name)):
            checksum.update(jax.tree_util.keystr(path).encode() + np.asarray(value).tobytes())
    lines = {f"{name}/{kind}": records(workdir, name, kind) for name in names for kind in ("metrics", "evaluations")}
    results = read_json(workdir / "results.json") | {"seconds": None}
    return Outcome(checksum.hexdigest(), lines | {"results": results})


def records(workdir: Path, task: str, kind: str) -> list[dict[str, Any]]:
    lines = read_lines(workdir / task / f"{kind}.jsonl")
    return [{key: value for key, value in line.items() if key not in (*TIMES, "waited")} for line in lines]


def differing(one: Outcome, other: Outcome) -> list[str]:
    """Names of what differs between two outcomes."""
    found = [name for name in one.records if one.records[name] != other.records[name]]
    return found if one.sha256 == other.sha256 else ["parameters", *found]


# --- The soak


@pytest.fixture(scope="module")
def undisturbed(people, tmp_path_factory) -> Callable[[str], Outcome]:
    """The outcome of a setting that nobody kills, worked out once."""

    @cache
    def run(name: str) -> Outcome:
        workdir = tmp_path_factory.mktemp("undisturbed") / name
        with Pair(people, workdir, SETTINGS[name]) as pair:
            pair.wait(pair.over)
        return outcome(workdir)

    return run


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Callable[[str], None]:
    """Prints a line, and appends it to the file that REALM_SOAK_LOG names."""
    path = Path(os.environ.get("REALM_SOAK_LOG") or tmp_path_factory.mktemp("soak") / "soak.log")
    print(f"\nlog: {path}")

    def write(line: str) -> None:
        print(line, flush=True)
        with path.open("a") as stream:
            stream.write(line + "\n")

    return write


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_round_ends_as_the_undisturbed_run(people, undisturbed, log, tmp_path, number):
    name = ORDER[number % len(ORDER)]
    wanted, began = undisturbed(name), time.monotonic()
    pair, told, verdict = Pair(people, tmp_path / "run", SETTINGS[name]), [], "FAILED"
    try:
        with pair:
            for kill in kills(number):
                told.append(carry_out(kill, pair))
            pair.wait(pair.over)
        found = outcome(pair.workdir)
        different = differing(wanted, found)
        verdict = f"{found.sha256[:16]} {'DIFFERENT' if different else 'same'}"
        assert not different, f"{', '.join(different)} of {pair.workdir}"
    finally:
        restarts = sum(job.starts - 1 for job in pair.jobs["both"])
        seconds = time.monotonic() - began
        log(f"round {number} {name}: {'; '.join(told)}; {restarts} restarts, {seconds:.0f} s, {verdict}")
