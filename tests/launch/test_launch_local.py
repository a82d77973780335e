"""`realm launch --target=local`: a gang and independent processes, and how their ends are taken."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from runs import until
from tiny_run import tiny_config

from realm_jax.cli import main as cli
from realm_jax.errors import UserError
from realm_jax.host import Preempted, Stop
from realm_jax.indexing.heartbeat import TRAINER, Status, write_status
from realm_jax.launch import local
from realm_jax.launch import spec as specs
from realm_jax.launch.local import Local, Supervisor, processes
from realm_jax.launch.spec import describe
from realm_jax.launch.status import poll
from realm_jax.storage import StorageError, open_folder
from realm_jax.train.records import read_lines

ROOT = Path(__file__).resolve().parents[2]


def launched(workdir: Path, trainers=2, builders=1, **changes):
    spec = specs.default()
    spec.trainer.processes, spec.builder.processes, spec.grace_seconds = trainers, builders, 5
    spec.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return describe(spec, "", [], str(workdir))


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """A supervisor whose processes run a script: `scripted(script, …)`; `runs` then says how often each was started.

    The script has `name`, `run` (the how-manieth of that name it is, from 0), `folder`, and `ready(count, number)`,
    with which the last of so many processes sends the supervisor a signal.
    """

    def make(script: str, **changes) -> Supervisor:
        (tmp_path / "logs").mkdir()
        program = tmp_path / "program.py"
        program.write_text(BEGIN + textwrap.dedent(script))
        runs: dict[str, int] = {}
        spawn = Supervisor._spawn

        def spawned(self, process):
            variables = {"NAME": process.name, "RUN": str(runs.get(process.name, 0)), "FOLDER": str(tmp_path)}
            runs[process.name] = runs.get(process.name, 0) + 1
            return spawn(self, process._replace(environment=process.environment | variables))

        monkeypatch.setattr(Supervisor, "_spawn", spawned)
        monkeypatch.setattr(local, "PROGRAM", [sys.executable, "-IS", str(program)])
        monkeypatch.setattr(local, "FIRST_PAUSE", 0.01)
        monkeypatch.setattr(local, "SHORT_GRACE", 1.0)
        supervisor = Supervisor.of(launched(tmp_path, **changes))
        supervisor.runs = runs
        return supervisor

    return make


BEGIN = """
import os, signal, sys, time
name, run, folder = os.environ["NAME"], int(os.environ["RUN"]), os.environ["FOLDER"]
def ready(count, number):
    os.mkdir(f"{folder}/{name}.ready")
    if sum(one.endswith(".ready") for one in os.listdir(folder)) == count:
        try:
            os.mkdir(f"{folder}/signalled")  # two may see that all are ready, and a second signal means to kill
        except FileExistsError:
            return
        os.kill(os.getppid(), number)
"""


# id: (script, changes of the spec, exit code, how often each process was started)
ENDS = {
    "a dead process restarts its group and nobody else": (
        """
if name == "trainer-1" and run == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if run == 0 and name.startswith("trainer"):
    signal.pause()
""", {}, 0, {"trainer-0": 2, "trainer-1": 2, "builder-0": 1},
    ),
    "a dead builder is started again by itself": (
        """
time.sleep(1.5 if name.startswith("trainer") else 0.1)
sys.exit(3 if name == "builder-1" and run < 2 else 0)
""", {"builders": 2}, 0, {"trainer-0": 1, "trainer-1": 1, "builder-0": 1, "builder-1": 3},
    ),
    "a builder that does not see the end of training is ended": (
        "sys.exit(0) if name == 'trainer-0' else signal.pause()",
        {"trainers": 1, "grace_seconds": 1}, 0, {"trainer-0": 1, "builder-0": 1},
    ),
    "a mistake is not repeated": (
        "sys.exit(2 if name == 'trainer-0' else signal.pause())",
        {}, 2, {"trainer-0": 1, "trainer-1": 1, "builder-0": 1},
    ),
    "a builder's mistake lets training end and is the exit code": (
        "time.sleep(0.5)\nsys.exit(2 if name == 'builder-0' else 0)",
        {}, 2, {"trainer-0": 1, "trainer-1": 1, "builder-0": 1},
    ),
    "preemptions do not count and crashes without progress do": (
        "sys.exit(75 if run < 4 else 9)", {"trainers": 1, "builders": 0, "restarts": 2}, 9, {"trainer-0": 4 + 3},
    ),
    "a checkpoint between crashes makes each of them the first": (
        """
os.makedirs(f"{folder}/qa/checkpoints/{run}", exist_ok=True)
open(f"{folder}/config.json", "w").write('{"tasks": "qa"}')
sys.exit(9 if run < 5 else 0)
""", {"trainers": 1, "builders": 0, "restarts": 1}, 0, {"trainer-0": 6},
    ),
    "a crash loop that writes a line of metrics each time ends all the same": (
        """
os.makedirs(f"{folder}/qa", exist_ok=True)
open(f"{folder}/config.json", "w").write('{"tasks": "qa"}')
open(f"{folder}/qa/metrics.jsonl", "a").write('{"step": %d}\\n' % run)
sys.exit(9)
""", {"trainers": 1, "builders": 0, "restarts": 2}, 9, {"trainer-0": 3},
    ),
    "a builder's progress is a generation (three with, one without) and not the trainer's checkpoint": (
        """
if name == "trainer-0":
    while not os.path.exists(f"{folder}/given_up"):
        time.sleep(0.02)
    sys.exit(0)
os.makedirs(f"{folder}/qa/checkpoints/{run}")
if run < 3:
    os.makedirs(f"{folder}/index/{run}-ab")
    open(f"{folder}/index/{run}-ab/MANIFEST.json", "w").close()
if run == 3:
    os.mkdir(f"{folder}/given_up")
sys.exit(1)
""", {"trainers": 1, "restarts": 1}, 1, {"trainer-0": 1, "builder-0": 4},
    ),
    "a trainer that a signal ends and that is given up is no success": (
        "time.sleep(0.5)\nos.kill(os.getpid(), signal.SIGSEGV) if name == 'trainer-0' else None",
        {"trainers": 1, "restarts": 0}, 128 + 11, {"trainer-0": 1, "builder-0": 1},
    ),
    "nor is a builder": (
        "time.sleep(0.5)\nos.kill(os.getpid(), signal.SIGSEGV) if name == 'builder-0' else None",
        {"trainers": 1, "restarts": 0}, 128 + 11, {"trainer-0": 1, "builder-0": 1},
    ),
    "a mistake that a process finds while the others are dying counts before their crash": (
        """
if name == "trainer-1":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(2))
    ready(-1, 0)
    while True:
        signal.pause()
while not os.path.exists(f"{folder}/trainer-1.ready"):
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGSEGV)
""", {"builders": 0}, 2, {"trainer-0": 1, "trainer-1": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("script", "changes", "code", "runs"), ENDS.values(), ids=ENDS)
def test_exit_codes_decide_restarts(scripted, caplog, script, changes, code, runs):
    supervisor = scripted(script, **changes)
    assert (supervisor.run(), supervisor.runs) == (code, runs)
    assert ("exit code 9; failures without progress: 3; giving up" in caplog.text) == (code == 9)


def test_a_run_directory_that_cannot_be_read_ends_no_process(scripted, monkeypatch, caplog):
    def broken(folder):
        raise StorageError("gs://b: cannot read it")

    for name in ("summary", "newest_checkpoint", "newest_generation"):
        monkeypatch.setattr(local, name, broken)
    monkeypatch.setattr(local, "STATUS_SECONDS", 0.0)
    assert scripted("sys.exit(0 if run else 75)", trainers=1).run() == 0
    assert "cannot be read (gs://b: cannot read it)" in caplog.text


def test_processes_save_when_the_supervisor_ends(scripted, tmp_path, monkeypatch):
    """Whatever it stumbles over: here it cannot start the second process."""
    (tmp_path / "logs" / "trainer-1.log").mkdir(parents=True)
    (tmp_path / "logs").rename(tmp_path / "kept")
    supervisor = scripted(SAVES)
    (tmp_path / "logs").rmdir()
    (tmp_path / "kept").rename(tmp_path / "logs")
    spawn = Supervisor._spawn

    def patiently(self, process):
        child = spawn(self, process)
        while not (tmp_path / f"{process.name}.ready").exists():
            assert child.process.poll() is None
        return child

    monkeypatch.setattr(Supervisor, "_spawn", patiently)
    with pytest.raises(UserError, match="trainer-1 cannot be started: .*logs/trainer-1.log"):
        supervisor.run()
    assert [path.name for path in tmp_path.glob("*.saved")] == ["trainer-0.saved"]


SAVES = """
def save(*_):
    os.mkdir(f"{folder}/{name}.saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
ready(3, SIGNAL)
while True:
    signal.pause()
""".replace("SIGNAL", "int(os.environ.get('SIGNAL', '0'))")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGHUP, 75)])
def test_signals_are_forwarded_and_the_supervisor_waits(scripted, tmp_path, monkeypatch, number, code):
    monkeypatch.setenv("SIGNAL", str(int(number)))
    before = signal.signal(number, signal.SIG_DFL)  # tests that are run in the background begin with it ignored
    try:
        assert scripted(SAVES).run() == code
    finally:
        signal.signal(number, before)
    assert sorted(path.stem for path in tmp_path.glob("*.saved")) == ["builder-0", "trainer-0", "trainer-1"]


@pytest.mark.parametrize(("code", "state"), [(130, "stopped"), (75, "late"), (9, "late")])
def test_only_ctrl_c_counts_as_a_stop(tmp_path, monkeypatch, code, state):
    monkeypatch.setattr(Supervisor, "run", lambda self: code)
    folder = open_folder(tmp_path)
    write_status(folder, TRAINER, Status("one", stage="realm"))
    assert Local(launched(tmp_path, builders=0)).start() == code
    assert [job.state for job in poll(folder, wait=lambda seconds: None).jobs] == [state]


def test_a_process_that_exceeds_its_grace_period_is_killed(scripted):
    supervisor = scripted(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready(3, signal.SIGTERM)
while True:
    signal.pause()
""",
        grace_seconds=1,
    )
    began = time.monotonic()
    assert supervisor.run() == 75 and time.monotonic() - began < 30


def test_children_of_a_dead_process_are_ended(scripted, tmp_path):
    supervisor = scripted(
        """
if run == 0 and os.fork() == 0:
    open(f"{folder}/left.pid", "w").write(str(os.getpid()))
    while True:
        signal.pause()
while not (os.path.exists(f"{folder}/left.pid") and open(f"{folder}/left.pid").read()):
    pass
sys.exit(0 if run else 9)
""",
        trainers=1,
        builders=0,
    )
    assert supervisor.run() == 0
    assert not is_running(int((tmp_path / "left.pid").read_text()))


def is_running(pid: int) -> bool:
    """Whether a process is there and not merely unburied."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_lines_are_printed_with_the_name_of_their_process_and_kept_in_its_log(scripted, tmp_path, capfd):
    assert scripted("print('hello from', name, end='')", trainers=1).run() == 0
    lines = capfd.readouterr().err.splitlines()
    assert {"trainer-0 | hello from trainer-0", "builder-0 | hello from builder-0"} <= {*lines}
    assert (tmp_path / "logs" / "builder-0.log").read_text() == "hello from builder-0\n"


def test_a_line_without_an_end_is_shown_in_pieces(scripted, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(local, "LONGEST_LINE", 4)
    assert scripted("print('abcdefg', end='')", trainers=1, builders=0).run() == 0
    assert (tmp_path / "logs" / "trainer-0.log").read_text() == "abcd\nefg\n"
    assert "trainer-0 | abcd\ntrainer-0 | efg\n" in capfd.readouterr().err


def test_a_closed_terminal_does_not_end_training(scripted, tmp_path, monkeypatch):
    class Lost(io.TextIOBase):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Lost())
    assert scripted("for number in range(100000): print(number)", trainers=1, builders=0).run() == 0
    assert (tmp_path / "logs" / "trainer-0.log").read_text().endswith("99999\n")


def test_a_full_disk_of_the_log_does_not_end_training(scripted, tmp_path, capfd):
    supervisor = scripted("print('still here')", trainers=1, builders=0)
    (tmp_path / "logs" / "trainer-0.log").symlink_to("/dev/full")
    assert supervisor.run() == 0 and "trainer-0 | still here" in capfd.readouterr().err


def test_the_other_processes_of_a_crashed_job_end_soon(scripted):
    """Without the others it cannot, and nothing else is looked after meanwhile."""
    supervisor = scripted(
        """
if run == 0 and name == "trainer-1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready(-1, 0)
    while True:
        signal.pause()
while run == 0 and not os.path.exists(f"{folder}/trainer-1.ready"):
    time.sleep(0.02)
sys.exit(0 if run else 9)
""",
        builders=0,
        grace_seconds=600,
    )
    began = time.monotonic()
    assert supervisor.run() == 0 and time.monotonic() - began < 60


def test_processes_do_not_outlive_their_supervisor(tmp_path):
    """SIGKILL, which nobody can hand on; its process hears of it from the kernel, and says so."""
    os.mkfifo(tmp_path / "pipe")
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import os, signal
def save(*_):
    open({str(tmp_path / "pipe")!r}, "w").write("saved")
    os._exit(75)
signal.signal(signal.SIGTERM, save)
os.kill(os.getppid(), signal.SIGKILL)
while True:
    signal.pause()
"""
    )
    (tmp_path / "logs").mkdir()
    code = f"""
import sys
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(ROOT / "tests/launch")!r}]
from realm_jax.launch import local
from test_launch_local import launched
local.PROGRAM = [sys.executable, "-IS", {str(program)!r}]
local.Supervisor.of(launched(Path({str(tmp_path)!r}), 1, 0)).run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert subprocess.run(["cat", str(tmp_path / "pipe")], capture_output=True, timeout=60).stdout == b"saved"


def test_each_process_gets_its_devices(tmp_path):
    def environments(**changes):
        found = processes(launched(tmp_path, **changes), 0)
        return [one.environment for job in found.values() for one in job]

    shared = environments(local__gpus=("0,1", "2", "3"))
    assert shared == [{"CUDA_VISIBLE_DEVICES": one} for one in ("0,1", "2", "3")]
    assert environments(local__devices=2) == [{"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local__gpus": ("0",)}, "spec.local.gpus: name the devices of each of the 3 processes, such as"),
        ({"local__gpus": (0, 1, 2)}, "spec.local.gpus: name the devices of each of the 3 processes, such as"),
        ({"local__devices": 1, "local__gpus": ("0", "1", "2")}, "spec.local.devices: emulates devices of a CPU"),
    ],
)
def test_a_dry_run_rejects_invalid_devices_too(tmp_path, changes, message):
    for act in (Local(launched(tmp_path, **changes)).plan, Local(launched(tmp_path, **changes)).start):
        with pytest.raises(UserError, match=message):
            act()


def test_logs_and_stop_say_what_is_missing(tmp_path, capsys):
    for action, message in (
        ("logs", "there is no such job"),
        ("stop", "no launcher runs there"),
        ("delete", "remove that"),
    ):
        assert cli.main(["launch", action, "--target=local", f"--workdir={tmp_path}"]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("record", ["{}", "[]", '{"pid": null}', "{", '{"pid": OURS}'])
def test_stop_ignores_the_record_of_a_crashed_launcher(tmp_path, monkeypatch, record):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "launch.json").write_text(record.replace("OURS", str(os.getpid())))
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("signals a stranger"))
    target = Local(launched(tmp_path))
    assert target.items()[0]["state"] == "not running"
    with pytest.raises(UserError, match="no launcher runs there"):
        target.stop()


def test_stop_signals_no_process_of_another_machine(tmp_path, monkeypatch):
    """The run directory is on a disk that several machines share."""

    def stopped_meanwhile(supervisor):
        assert target.items()[0]["state"] == "running"
        with monkeypatch.context() as patch, pytest.raises(UserError, match="its launcher runs on .*; stop it there"):
            patch.setattr(local.socket, "gethostname", lambda: "another")
            patch.setattr(os, "kill", lambda *_: pytest.fail("signals a stranger"))
            target.stop()
        return 0

    target = Local(launched(tmp_path))
    monkeypatch.setattr(Supervisor, "run", stopped_meanwhile)
    assert target.start() == 0


def test_stop_waits_as_long_as_the_start_allowed(tmp_path, monkeypatch):
    """Not as its own flags say, which need not be those of the start."""
    clock = [0.0]

    class Clock:
        monotonic = staticmethod(lambda: clock[0])
        sleep = staticmethod(lambda seconds: clock.append(clock.pop() + 1))

    def stopped_meanwhile(supervisor):
        monkeypatch.setattr(local, "time", Clock)
        monkeypatch.setattr(os, "kill", lambda *_: None)
        with pytest.raises(UserError, match="does not end"):
            Local(launched(tmp_path, grace_seconds=5)).stop()
        return 0

    monkeypatch.setattr(Supervisor, "run", stopped_meanwhile)
    assert Local(launched(tmp_path, grace_seconds=600)).start() == 0
    assert clock[0] == 611


# ---- builders of a trainer that is this process


def builders_alone(monkeypatch):
    """Leaves a launch its builders."""
    whole = local.processes
    monkeypatch.setattr(
        local,
        "processes",
        lambda launch, port: {name: one for name, one in whole(launch, port).items() if name != "trainer"},
    )


def test_builders_in_the_background_are_started_again_and_ended_with_the_trainer(
    scripted, tmp_path, monkeypatch, capfd
):
    builders_alone(monkeypatch)
    supervisor = scripted("print('hello')\nsys.exit(9) if run < 2 else open(f'{folder}/ready', 'w')\nsignal.pause()")
    with supervisor.in_background():
        until((tmp_path / "ready").is_file)
    assert supervisor.runs == {"builder-0": 3} and (tmp_path / "logs" / "builder-0.log").is_file()


@pytest.mark.parametrize(
    ("script", "message"), [("sys.exit(2)", "builder-0 failed; no index will arrive"), (None, "cannot")]
)
def test_a_builder_in_the_background_that_fails_ends_the_trainer(scripted, tmp_path, monkeypatch, script, message):
    """By SIGTERM, at which it saves what it has."""
    builders_alone(monkeypatch)
    supervisor = scripted(script or "")
    if script is None:
        (tmp_path / "logs" / "builder-0.log").mkdir()
    with pytest.raises(UserError, match=message), Stop() as stop, supervisor.in_background():
        until(lambda: stop.requested)
        raise Preempted("SIGTERM: saved")


# ---- the real thing


@pytest.mark.slow
def test_two_trainer_processes_and_a_builder_train_a_tiny_run(people, tmp_path):
    config = tiny_config(people)
    config.tasks = "realm"
    config.realm.update(steps=6, batch_size=4)
    config.update({"checkpoint": {"every": 3, "keep": 2}, "log": {"every": 1}})
    config.refresh.update(every=2, adopt_after=1)
    file = tmp_path / "config.py"
    file.write_text(
        f"from ml_collections import ConfigDict\ndef get_config(): return ConfigDict({config.to_dict()!r})\n"
    )
    workdir = tmp_path / "run"
    command = [sys.executable, "-m", "realm_jax", "launch", "--target=local", f"--config={file}"]
    command += [f"--workdir={workdir}", "--spec.trainer.processes=2", "--spec.local.devices=1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"did not end: {(error.stderr or b'').decode()[-3000:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert read_lines(workdir / "realm" / "metrics.jsonl")[-1]["step"] == 6
    assert any("generation" in line for line in read_lines(workdir / "realm" / "evaluations.jsonl"))
    assert (workdir / "results.json").is_file()
    for name in ("trainer-0 | ", "trainer-1 | ", "builder-0 | "):
        assert name in done.stderr
    assert cli.main(["launch", "status", f"--workdir={workdir}"]) == 0
