"""A soak: trainer and index builder, killed again and again at bad moments, end as if nobody had touched them.

    REALM_SOAK_ROUNDS=30 REALM_SOAK_LOG=soak.log pytest -m nightly -s -n0 tests/indexing/test_soak.py

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
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import small_chunks
from runs import flags_of, inline_config

from realm_jax.config import task_names
from realm_jax.indexing.heartbeat import TRAINER, read_status
from realm_jax.launch.local import free_port
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


def flags(data, changes):
    config = inline_config(data, realm__steps=STEPS, checkpoint__every=3)
    for task in ("ict", "qa"):
        config[task].update({"steps": 6, "learning_rate": 1e-3})
    config.refresh.update({"mode": "async", "every": 3, "adopt_after": 2, "wait_seconds": LIMIT})
    config.update_from_flattened_dict(changes)
    return flags_of(config)


class Job:
    """One of the two commands, in one process or several."""

    def __init__(self, commands: list[list[str]], output: Path) -> None:
        self.commands, self.output = commands, output
        self.starts = self.read = 0  # read: bytes of the output that are of earlier starts
        self.running: list[subprocess.Popen] = []

    def start(self) -> None:
        self.starts += 1
        options = {"env": os.environ | {"JAX_PLATFORMS": "cpu"}, "stderr": subprocess.STDOUT}
        with self.output.open("ab") as stream:
            self.read = stream.tell()
            self.running = [subprocess.Popen(command, stdout=stream, **options) for command in self.commands]

    def send(self, number: signal.Signals) -> None:
        for process in self.running:
            process.send_signal(number)

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.running]

    def over(self) -> bool:
        """True if it ended well; AssertionError if it ended otherwise without having been killed."""
        assert {*self.codes()} <= {None, 0}, f"{self.output.name} ended by itself with {self.codes()}\n{self.tail()}"
        return self.codes() == [0] * len(self.running)

    def listens(self) -> bool:
        """True if it has logged something since it was started; from then on SIGTERM is answered."""
        lines = self.output.read_bytes()[self.read :].splitlines()
        return any(not line.startswith(b"[Gloo]") for line in lines)  # a library's

    def tail(self) -> str:
        return f"--- {self.output}\n" + self.output.read_text(errors="replace")[-4000:]


class Pair:
    """A run directory with both jobs."""

    def __init__(self, data: Path, workdir: Path, setting: Setting) -> None:
        self.workdir = workdir
        workdir.mkdir()
        given = [f"--workdir={workdir}", *flags(data, setting.changes)]
        train, build = ([sys.executable, small_chunks.__file__, job, *given] for job in ("train", "build-index"))
        together = [f"--processes={setting.processes}", f"--coordinator=localhost:{free_port()}"]
        trains = [[*train, *together, f"--process={one}"] for one in range(setting.processes)]
        self.trainer = Job([train] if setting.processes == 1 else trains, workdir / "trainer.out")
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
        """Return once `true()` is. AssertionError, with the last lines of both jobs, when the round's time is over."""
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
        files = sorted(self.workdir.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime_ns)
        last = [(path.parent.name, lines[-1]["step"]) for path in files if (lines := read_lines(path))]
        return "at {} {}".format(*last[-1]) if last else "before step 1"


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


def outcome(workdir: Path) -> dict[str, Any]:
    """What a run leaves: the checksum of all parameters, and its records but for times."""
    run = load_run(workdir)
    checksum, records = hashlib.sha256(), {"results": read_json(workdir / "results.json") | {"seconds": None}}
    for name in task_names(run.config):
        for path, value in jax.tree_util.tree_leaves_with_path(restore_params(run, name)):
            checksum.update(jax.tree_util.keystr(path).encode() + np.asarray(value).tobytes())
        for kind in ("metrics", "evaluations"):
            lines = read_lines(workdir / name / f"{kind}.jsonl")
            records[f"{name}/{kind}"] = [
                {key: value for key, value in line.items() if key not in (*TIMES, "waited")} for line in lines
            ]
    return {"parameters": checksum.hexdigest()} | records


# --- The soak


@pytest.fixture(scope="module")
def undisturbed(people, tmp_path_factory):
    """The outcome of a setting that nobody kills, worked out once."""

    @cache
    def run(name):
        with Pair(people, tmp_path_factory.mktemp("undisturbed") / name, SETTINGS[name]) as pair:
            pair.wait(pair.over)
        return outcome(pair.workdir)

    return run


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_round_ends_as_the_undisturbed_run(people, undisturbed, tmp_path, number):
    name = ORDER[number % len(ORDER)]
    wanted, began = undisturbed(name), time.monotonic()
    pair, told, verdict = Pair(people, tmp_path / "run", SETTINGS[name]), [], "FAILED"
    try:
        with pair:
            for kill in kills(number):
                told.append(carry_out(kill, pair))
            pair.wait(pair.over)
        found = outcome(pair.workdir)
        different = [key for key in wanted if wanted[key] != found[key]]
        verdict = f"{found['parameters'][:16]} {'DIFFERENT' if different else 'same'}"
        assert not different, f"{', '.join(different)} of {pair.workdir}"
    finally:
        restarts, seconds = sum(job.starts - 1 for job in pair.jobs["both"]), time.monotonic() - began
        line = f"round {number} {name}: {'; '.join(told)}; {restarts} restarts, {seconds:.0f} s, {verdict}"
        print(line, flush=True)
        if path := os.environ.get("REALM_SOAK_LOG"):
            with open(path, "a") as stream:
                stream.write(line + "\n")
