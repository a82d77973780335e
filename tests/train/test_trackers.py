"""`config.log.to`: what TensorBoard and Weights & Biases get, and how a resumed task goes on there.

With a stand-in for the package of Weights & Biases, and with the package itself if it is installed.
"""

import errno
import logging
import os
import struct
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from runs import open_inline, train_measured
from tensorboardX.proto.event_pb2 import Event

from realm_jax.errors import UserError
from realm_jax.storage import read_json
from realm_jax.train import trackers
from realm_jax.train.metrics import MetricLogger, StepCost
from realm_jax.train.records import read_lines
from realm_jax.train.trackers import TaskRun, check_installed, open_trackers

SETTINGS = {"model.layers": 2, "model.reader": "", "log.to": "all"}
STEPS = 4
WANDB = """
calls = []
class Settings(dict): pass
class Run:
    def define_metric(self, *names, **options): calls.append(("define", names, options))
    def log(self, values): calls.append(("log", values))
    def finish(self): calls.append(("finish",))
def init(**options):
    calls.append(("init", options))
    return Run()
"""


@pytest.fixture
def stand_in(tmp_path_factory, monkeypatch):
    """A module in place of wandb, which notes what it is told in `calls`."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "wandb.py").write_text(WANDB)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    yield
    sys.modules.pop("wandb", None)


def log(folder: Path, named: str, start: int = 0, last: int = STEPS) -> None:
    """A task from a step to another, with a measurement before the first; the loss of a step is a half of it."""
    opened = open_trackers(named, TaskRun(folder, start, SETTINGS))
    with MetricLogger(folder, "realm", start, STEPS, StepCost(1.0, 1, None), {}, trackers=opened) as metrics:
        metrics.log_evaluation(start, {"recall@5": 0.5, "refresh": True, "generation": "4-f", "by": {"0": 1.0}})
        for step in range(start + 1, last + 1):
            metrics.log_step(step, {"loss": jnp.float32(step / 2), "gradient_norm": jnp.float32(1.0)}, {"index_age": 3})
        metrics.flush()


# ---- which


def test_a_tracker_that_is_not_installed_is_named_before_anything_begins(people, tmp_path, monkeypatch):
    there = ModuleSpec("there", None, origin="there.py")
    folder = ModuleSpec("wandb", None, is_package=True)
    folder.submodule_search_locations = ["wandb"]
    for wandb in (None, folder):  # nothing, or a folder without a module, as wandb itself leaves one where it ran
        specs = {"wandb": wandb}
        monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name, specs=specs: specs.get(name, there))
        check_installed("tensorboard")
        with pytest.raises(
            UserError, match="config.log.to=tensorboard,wandb: wandb is not installed; run `pip install"
        ):
            check_installed("tensorboard,wandb")


def test_none_is_imported_unless_it_is_named(stand_in, tmp_path):
    log(tmp_path / "run" / "realm", "")
    assert "wandb" not in sys.modules
    assert not (tmp_path / "run" / "realm" / "tensorboard").exists()
    assert len(read_lines(tmp_path / "run" / "realm" / "metrics.jsonl")) == STEPS


def test_of_several_processes_the_first_has_them(stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    log(tmp_path / "run" / "realm", "wandb,tensorboard")
    assert "wandb" not in sys.modules and not (tmp_path / "run" / "realm" / "tensorboard").exists()


# ---- what they get


def test_weights_and_biases_gets_every_number_over_the_task_s_own_steps(stand_in, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    log(tmp_path / "run" / "realm", "wandb")
    (_, options), (_, names, over), *logged, last = sys.modules["wandb"].calls
    told = {key: options[key] for key in ("project", "resume", "name", "group", "config", "dir")}
    assert told == {
        "project": "realm_jax", "resume": "allow", "name": "run/realm", "group": "run", "config": SETTINGS,
        "dir": str(tmp_path / "run" / "realm"),
    }  # fmt: skip
    assert (names, over) == (("*",), {"step_metric": "step"}) and last == ("finish",)
    first, *steps = [values for _, values in logged]
    assert first == {"step": 0, "evaluation/recall@5": 0.5, "evaluation/refresh": True}, "what is no number stays here"
    assert [(values["step"], values["train/loss"]) for values in steps] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]
    record = read_lines(tmp_path / "run" / "realm" / "metrics.jsonl")[-1]
    assert steps[-1] == {"step": record.pop("step")} | {f"train/{name}": value for name, value in record.items()}


def test_a_resumed_task_goes_on_with_its_run(stand_in, tmp_path):
    folder = tmp_path / "run" / "realm"
    log(folder, "wandb", last=3)
    log(folder, "wandb", start=2)
    log(tmp_path / "run" / "qa", "wandb")
    opened = [options for what, options, *_ in (call for call in sys.modules["wandb"].calls if call[0] == "init")]
    assert opened[0]["id"] == opened[1]["id"] == read_json(folder / "trackers.json")["wandb"] != opened[2]["id"]
    assert {options["resume"] for options in opened} == {"allow"}


def events(folder: Path) -> list[Event]:
    """Those of TensorBoard's files in a folder, file by file in the order of their making."""
    found = []
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def test_tensorboard_forgets_steps_that_are_trained_again(tmp_path):
    log(tmp_path, "tensorboard", last=3)
    for path in [*(tmp_path / "tensorboard").glob("*/*")]:  # files are named by the second, and restarts take longer
        path.rename(path.with_name("first"))
    log(tmp_path, "tensorboard", start=2)
    steps = events(tmp_path / "tensorboard" / "metrics")
    losses = [(one.step, value.simple_value) for one in steps for value in one.summary.value if value.tag == "loss"]
    assert losses == [(1, 0.5), (2, 1.0), (3, 1.5), (3, 1.5), (4, 2.0)]
    measured = events(tmp_path / "tensorboard" / "evaluations")
    starts = [[event.step for event in kind if event.session_log.status == 1] for kind in (steps, measured)]
    assert starts == [[1, 3], [0, 2]], "from here on earlier ones do not count"
    assert not (tmp_path / "trackers.json").exists()


# ---- what fails


def test_tensorboard_on_a_full_disk_fails_once_and_not_again_at_the_end_of_the_process(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    board = trackers.TensorBoard(TaskRun(tmp_path, 0, SETTINGS))
    writers = [one.file_writer.event_writer for one in board._writers.values()]
    workers = [writer._worker for writer in writers]
    monkeypatch.setattr("tensorboardX.event_file_writer.EventsWriter.flush", full)
    with pytest.raises(OSError, match="No space left"):
        board.finish()
    for writer, worker in zip(writers, workers, strict=True):
        writer.close()
        assert not worker.is_alive()


def test_tensorboard_goes_on_in_a_new_file_after_a_full_disk(tmp_path, monkeypatch):
    """Its thread ends, and nothing waits for it."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    board = trackers.TensorBoard(TaskRun(tmp_path, 0, SETTINGS))
    with monkeypatch.context() as patch:
        patch.setattr("tensorboardX.event_file_writer.EventsWriter.write_event", full)
        patch.setattr(threading, "excepthook", lambda ended: None)
        worker = board._writers["metrics"].file_writer.event_writer._worker
        board.log("metrics", 1, {"loss": 3.0})
        worker.join(10)
        assert not worker.is_alive()
    board.log("metrics", 2, {"loss": 1.0})
    assert board._writers["metrics"].file_writer.event_writer._worker.is_alive()
    board.finish()


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_one_that_fails_on_the_way_is_one_warning_and_the_others_go_on(stand_in, tmp_path, monkeypatch, caplog):
    import wandb

    def full(*_):
        raise OSError("no room\nat all")

    monkeypatch.setattr(wandb.Run, "log", full)
    log(tmp_path / "run" / "realm", "wandb,tensorboard")
    assert warnings_in(caplog) == ["config.log.to: wandb misses values (no room at all); metrics.jsonl has them"]
    assert len(events(tmp_path / "run" / "realm" / "tensorboard" / "metrics")) > STEPS
    assert wandb.calls[-1] == ("finish",)


def test_one_that_hangs_at_its_end_holds_up_nothing(stand_in, tmp_path, monkeypatch, caplog):
    import wandb

    released = threading.Event()
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(wandb.Run, "finish", lambda *_: released.wait(60))
    log(tmp_path / "run" / "realm", "wandb")
    released.set()
    assert warnings_in(caplog) == [
        "config.log.to: wandb misses values (is not done after 0.1 s); metrics.jsonl has them"
    ]
    assert len(read_lines(tmp_path / "run" / "realm" / "metrics.jsonl")) == STEPS


def test_one_that_does_not_open_is_named(stand_in, tmp_path, monkeypatch):
    import wandb

    def init(**_):
        raise RuntimeError("no key")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(UserError, match=r"config.log.to=wandb: wandb cannot be opened \(no key\); set it up, or leave"):
        log(tmp_path / "run" / "realm", "wandb")


# ---- a training run, and the packages themselves


@pytest.mark.usefixtures("quick_steps")
def test_a_run_sends_what_it_records(people, stand_in, tmp_path):
    train_measured(open_inline(people, tmp_path / "run", log__to="wandb,tensorboard"))
    import wandb

    sent = [values for what, *(values,) in (call for call in wandb.calls if call[0] == "log")]
    for kind, prefix in (("metrics", "train"), ("evaluations", "evaluation")):
        for record in read_lines(tmp_path / "run" / "realm" / f"{kind}.jsonl"):
            numbers = {f"{prefix}/{key}": value for key, value in record.items() if isinstance(value, int | float)}
            assert {"step": numbers.pop(f"{prefix}/step")} | numbers in sent
    assert wandb.calls[0][1]["config"]["realm.batch_size"] == 8


def test_wandb_itself_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "run" / "realm"
    log(folder, "wandb", last=3)
    log(folder, "wandb", start=2)
    made = sorted(path.name for path in (folder / "wandb").glob("offline-run-*"))
    name = read_json(folder / "trackers.json")["wandb"]
    assert len(made) == 2 and all(one.endswith(name) for one in made), "two parts of one run, to be synchronised"
