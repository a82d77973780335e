"""`realm launch --target=local`: a gang and independent processes, how their ends are taken, and what `status` says."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from tiny_run import tiny_config

from realm_jax import cli
from realm_jax.errors import UserError
from realm_jax.index.generations import BEAT_SECONDS, Status, write_status
from realm_jax.launch import local
from realm_jax.launch import spec as specs
from realm_jax.launch.local import Local, Supervisor
from realm_jax.launch.spec import describe
from realm_jax.launch.status import look
from realm_jax.storage import PosixFolder
from realm_jax.training.metrics import read_lines

ROOT = Path(__file__).resolve().parents[1]


def launched(workdir: Path, trainers=2, builders=1, **changes):
    spec = specs.default()
    spec.trainer.processes, spec.builder.processes, spec.grace_seconds = trainers, builders, 5
    spec.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return describe(spec, "", [], str(workdir))


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """A supervisor whose processes run a script: `scripted(script, …)`, with NAME and RUN (from 0) set."""

    def make(script: str, **changes) -> Supervisor:
        (tmp_path / "logs").mkdir()
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(script))
        runs: dict[str, int] = {}
        start, environment = Supervisor._start, Supervisor._environment

        def started(self, name, words, number):
            self.now = {"NAME": name, "RUN": str(runs.get(name, 0)), "HOME_OF_TEST": str(tmp_path)}
            runs[name] = runs.get(name, 0) + 1
            return start(self, name, words, number)

        monkeypatch.setattr(Supervisor, "_start", started)
        monkeypatch.setattr(Supervisor, "_environment", lambda self, number: environment(self, number) | self.now)
        monkeypatch.setattr(local, "PROGRAM", [sys.executable, str(program)])
        monkeypatch.setattr(local, "FIRST_PAUSE", 0.01)
        supervisor = Supervisor(launched(tmp_path, **changes), tmp_path)
        supervisor.runs = runs
        return supervisor

    return make


BEGIN = """
import os, signal, sys, time
name, run = os.environ["NAME"], int(os.environ["RUN"])
folder = os.environ["HOME_OF_TEST"]
"""


def test_a_dead_process_restarts_its_gang_and_nobody_else(scripted):
    supervisor = scripted(
        BEGIN
        + """
if name == "trainer-1" and run == 0:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60 if run == 0 and name.startswith("trainer") else 0.5)
"""
    )
    assert supervisor.run() == 0
    assert supervisor.runs == {"trainer-0": 2, "trainer-1": 2, "builder": 1}


def test_a_dead_builder_is_started_again_by_itself(scripted):
    supervisor = scripted(
        BEGIN
        + """
time.sleep(1.5 if name.startswith("trainer") else 0.1)
sys.exit(3 if name == "builder-1" and run < 2 else 0)
""",
        builders=2,
    )
    assert supervisor.run() == 0
    assert supervisor.runs == {"trainer-0": 1, "trainer-1": 1, "builder-0": 1, "builder-1": 3}


def test_a_mistake_is_not_repeated(scripted):
    supervisor = scripted(BEGIN + "sys.exit(2 if name == 'trainer-0' else time.sleep(60))")
    assert supervisor.run() == 2
    assert supervisor.runs == {"trainer-0": 1, "trainer-1": 1, "builder": 1}


def test_a_builder_s_mistake_lets_training_end_and_is_the_exit_code(scripted):
    supervisor = scripted(BEGIN + "time.sleep(0.5)\nsys.exit(2 if name == 'builder' else 0)")
    assert supervisor.run() == 2
    assert supervisor.runs == {"trainer-0": 1, "trainer-1": 1, "builder": 1}


def test_preemptions_do_not_count_and_crashes_without_progress_do(scripted, caplog):
    supervisor = scripted(BEGIN + "sys.exit(75 if run < 4 else 9)", trainers=1, builders=0, restarts=2)
    assert supervisor.run() == 9
    assert supervisor.runs == {"trainer": 4 + 3}
    assert "exit code 9, for the 3th time without progress; given up" in caplog.text


def test_progress_between_crashes_forgives_them(scripted):
    """A checkpoint more at every run: five crashes are five times the first."""
    supervisor = scripted(
        BEGIN
        + """
os.makedirs(f"{folder}/qa/checkpoints/{run}", exist_ok=True)
open(f"{folder}/config.json", "w").write('{"tasks": "qa"}')
sys.exit(9 if run < 5 else 0)
""",
        trainers=1,
        builders=0,
        restarts=1,
    )
    assert supervisor.run() == 0 and supervisor.runs == {"trainer": 6}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_is_handed_on_and_waited_for(scripted, tmp_path, number, code):
    supervisor = scripted(
        BEGIN
        + """
def save(*_):
    time.sleep(0.3)
    open(f"{folder}/{name}.saved", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open(f"{folder}/{name}.ready", "w").close()
time.sleep(60)
"""
    )
    threading.Thread(target=when_ready, args=(tmp_path, 3, number), daemon=True).start()
    assert supervisor.run() == code
    assert sorted(path.stem for path in tmp_path.glob("*.saved")) == ["builder", "trainer-0", "trainer-1"]


def test_what_does_not_end_in_its_grace_period_is_killed(scripted, tmp_path):
    supervisor = scripted(
        BEGIN
        + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"{folder}/{name}.ready", "w").close()
time.sleep(60)
""",
        grace_seconds=1,
    )
    threading.Thread(target=when_ready, args=(tmp_path, 3, signal.SIGTERM), daemon=True).start()
    began = time.monotonic()
    assert supervisor.run() == 75 and time.monotonic() - began < 30


def when_ready(folder: Path, count: int, number: int) -> None:
    while len(list(folder.glob("*.ready"))) < count:
        time.sleep(0.05)
    os.kill(os.getpid(), number)


def test_lines_come_with_the_name_of_their_process_and_lie_in_its_log(scripted, tmp_path, capfd):
    assert scripted(BEGIN + "print('hello from', name)", trainers=1).run() == 0
    err = capfd.readouterr().err
    assert "trainer | hello from trainer" in err and "builder | hello from builder" in err
    assert (tmp_path / "logs" / "builder.log").read_text() == "hello from builder\n"


def test_devices_are_shared_out(tmp_path):
    (tmp_path / "logs").mkdir()
    supervisor = Supervisor(launched(tmp_path, local__gpus=("0,1", "2", "3")), tmp_path)
    assert [supervisor._environment(number)["CUDA_VISIBLE_DEVICES"] for number in range(3)] == ["0,1", "2", "3"]
    with pytest.raises(UserError, match="spec.local.gpus: name the devices of each of the 3 processes"):
        Local(launched(tmp_path, local__gpus=("0",))).plan()


# ---- status


def put(folder: PosixFolder, **jobs) -> None:
    for name, (stage, step, counter) in jobs.items():
        write_status(folder, name, Status("one", stage=stage, step=step, counter=counter))


def test_a_job_whose_counter_stands_still_for_two_beats_is_late(tmp_path):
    folder, waited = PosixFolder(tmp_path), []
    put(folder, trainer=("realm", 10, 1), builder=("building", 8, 5))

    def wait(seconds: float) -> None:
        waited.append(seconds)
        put(folder, trainer=("realm", 11, 2))

    state = look(folder, wait)
    assert state.late == ["builder"] and sum(waited) == pytest.approx(2 * BEAT_SECONDS)
    assert [job.name for job in state.jobs] == ["trainer", "builder"]


def test_who_is_done_is_not_late_and_nobody_waits_for_them(tmp_path):
    folder = PosixFolder(tmp_path)
    write_status(folder, "trainer", Status("one", stage="realm", step=20, counter=9, done=True))
    assert look(folder, lambda _: pytest.fail("waits")).late == []


def test_nothing_there_is_said(tmp_path, capsys):
    assert cli.main(["launch", "status", f"--workdir={tmp_path}"]) == 2
    assert "nothing is there yet" in capsys.readouterr().err


def test_logs_and_stop_say_what_is_missing(tmp_path, capsys):
    for action, told in (("logs", "there is no such log"), ("stop", "nothing runs there"), ("delete", "remove that")):
        assert cli.main(["launch", action, "--target=local", f"--workdir={tmp_path}"]) == 2
        assert told in capsys.readouterr().err


# ---- the real thing


def test_two_trainer_processes_and_a_builder_train_a_tiny_run(people, tmp_path):
    config = tiny_config(people)
    config.tasks = "realm,qa"
    for task in ("realm", "qa"):
        config[task].update(steps=6, batch_size=4)
    config.update({"checkpoint": {"every": 3, "keep": 2}, "log": {"every": 1}})
    config.refresh.update(every=2, adopt_after=1, poll_seconds=0.05, chunk_rows=6)
    file = tmp_path / "config.py"
    file.write_text(
        f"from ml_collections import ConfigDict\ndef get_config(): return ConfigDict({config.to_dict()!r})\n"
    )
    workdir = tmp_path / "run"
    command = [sys.executable, "-m", "realm_jax.cli", "launch", "--target=local", f"--config={file}"]
    command += [f"--workdir={workdir}", "--spec.trainer.processes=2", "--spec.local.devices=1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    assert read_lines(workdir / "realm" / "metrics.jsonl")[-1]["step"] == 6
    assert any("generation" in line for line in read_lines(workdir / "realm" / "evaluations.jsonl"))
    assert (workdir / "results.json").is_file()
    for name in ("trainer-0 | ", "trainer-1 | ", "builder | "):
        assert name in done.stderr
    assert cli.main(["launch", "status", f"--workdir={workdir}"]) == 0
