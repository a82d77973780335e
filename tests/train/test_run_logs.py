"""Logs of the processes of a run in a bucket: over several starts, after errors, kills and hangs."""

import argparse
import logging
import re

import jax
import pytest
from runs import until

from realm_jax import console, mirror, processes, run_log
from realm_jax.cli import main as cli
from realm_jax.errors import UserError
from realm_jax.host import Preempted
from realm_jax.run_log import REMOVED, START, RunLog, after, newest
from realm_jax.storage import PosixFolder, StorageError, open_folder
from realm_jax.train.guards import EXIT_HUNG, Watchdog

URL = "gs://bucket/runs/one"
NAME = "logs/trainer-7.log"

logger = logging.getLogger("realm_jax.test")


class FaultyFolder(PosixFolder):
    """A folder that cannot be written or read while `fails` is true."""

    fails = False

    def write(self, name, data):
        if self.fails:
            raise StorageError(f"{name}: cannot write it")
        super().write(name, data)

    def read(self, name):
        if self.fails:
            raise StorageError(f"{name}: cannot read it")
        return super().read(name)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REALM_CACHE", str(tmp_path / "cache"))
    console.set_up_logging()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of this machine instead of the bucket."""
    folder = FaultyFolder(tmp_path / "bucket")
    monkeypatch.setattr(run_log, "open_folder", lambda _url: folder)
    return folder


def messages(folder, name=NAME):
    """Return level and message of every record, without times."""
    lines = folder.read(name).decode().splitlines()
    return [re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", "", line) for line in lines]


def local_files(tmp_path):
    return [path for path in (tmp_path / "cache").rglob("trainer-7.log*") if path.is_file()]


def killed_start(folder, tmp_path, *lines):
    """Write lines to a log of which only the first is uploaded, as a process that is killed does."""
    with run_log.run_log(URL, "trainer-7"):
        until(lambda: NAME in folder.files())
        folder.fails = True
        for line in lines:
            logger.info(line)
    folder.fails = False
    assert local_files(tmp_path)


def test_the_log_of_a_process_continues_over_its_starts(bucket, tmp_path):
    url = f"{bucket}/runs/one"
    for number in range(2):
        with run_log.run_log(url, "trainer-7"):
            logger.info("step %d", number)
            logger.debug("not in the log")
    lines = messages(open_folder(url))
    assert [line for line in lines if "start of" not in line] == [
        "INFO step 0", "INFO end of trainer-7", "INFO step 1", "INFO end of trainer-7"
    ]  # fmt: skip
    assert re.fullmatch(r"INFO start of trainer-7 on \S+ \(process \d+\)", lines[0]) and lines[0] == lines[3]
    assert not local_files(tmp_path)


def test_nothing_is_written_for_a_path(tmp_path):
    with run_log.run_log(str(tmp_path / "run"), "trainer-7"):
        assert not any(isinstance(handler, RunLog) for handler in logging.getLogger("realm_jax").handlers)
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("data: is missing; name another folder"), "ERROR realm: error: data: is missing; name another"),
        (ZeroDivisionError("a defect"), "ZeroDivisionError: a defect"),
        (Preempted("SIGTERM: realm is saved at step 3"), "WARNING Preempted: SIGTERM: realm is saved at step 3"),
        (KeyboardInterrupt(), "WARNING KeyboardInterrupt: "),
    ],
)
def test_a_log_says_how_a_process_ended(folder, error, line):
    with pytest.raises(type(error)), run_log.run_log(URL, "trainer-7"):
        raise error
    lines = messages(folder)
    assert lines[-1].startswith(line)
    assert ("Traceback (most recent call last):" in lines) == isinstance(error, ZeroDivisionError)


def test_the_next_start_uploads_the_rest_of_a_killed_process(folder, tmp_path):
    killed_start(folder, tmp_path, "step 1", "step 2")
    with run_log.run_log(URL, "trainer-7"):
        logger.info("step 3")
    assert [line for line in messages(folder) if "step" in line] == ["INFO step 1", "INFO step 2", "INFO step 3"]
    assert len(START.findall(folder.read(NAME))) == 2 and not local_files(tmp_path)


def test_the_rest_of_a_killed_process_follows_the_lines_of_another_machine(folder, tmp_path):
    killed_start(folder, tmp_path, "step 1")
    folder.write(NAME, folder.read(NAME) + b"2026-01-01T00:00:00.000Z INFO elsewhere\n")
    with run_log.run_log(URL, "trainer-7"):
        pass
    lines = messages(folder)
    assert lines.count("INFO step 1") == 1 and lines.index("INFO elsewhere") < lines.index("INFO step 1")
    assert len(START.findall(folder.read(NAME))) == 2


def test_a_bucket_that_fails_is_only_a_warning(folder, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(run_log, "SECONDS", 0.01)
    folder.fails = True
    with run_log.run_log(URL, "trainer-7"):
        logger.info("step 1")
    assert f"{NAME}: cannot read it; the next upload tries again" in capfd.readouterr().err
    assert local_files(tmp_path) and not folder.files()


def test_a_log_that_cannot_be_opened_does_not_end_a_process(tmp_path, monkeypatch, capfd):
    (tmp_path / "cache").write_text("no folder")
    with run_log.run_log(URL, "trainer-7"):
        logger.info("step 1")
    assert "the run directory gets no log of trainer-7" in capfd.readouterr().err


def test_an_upload_that_takes_long_does_not_delay_the_end(folder, monkeypatch, capfd):
    monkeypatch.setattr(run_log, "LAST_SECONDS", 0.01)
    write, blocked = folder.write, run_log.threading.Event()
    monkeypatch.setattr(folder, "write", lambda *words: (blocked.wait(), write(*words)))
    with run_log.run_log(URL, "trainer-7"):
        logger.info("step 1")
    assert "not uploaded within" in capfd.readouterr().err
    blocked.set()


def test_a_second_process_of_the_same_name_leaves_the_log_to_the_first(folder, capfd):
    with run_log.run_log(URL, "trainer-7"):
        with run_log.run_log(URL, "trainer-7"):
            logger.info("step 1")
        logger.info("step 2")
    assert [line for line in messages(folder) if "step" in line] == ["INFO step 1", "INFO step 2"]
    assert "another process is using it" in capfd.readouterr().err


def test_a_log_keeps_its_newest_lines(folder, monkeypatch):
    monkeypatch.setattr(run_log, "LOG_BYTES", 2000)
    monkeypatch.setattr(run_log, "SECONDS", 0.001)
    with run_log.run_log(URL, "trainer-7"):
        for number in range(200):
            logger.info("step %d", number)
    text = folder.read(NAME)
    assert text.startswith(REMOVED + b"20") and len(text) <= 2000 + len(REMOVED)
    steps = [int(line.removeprefix("INFO step ")) for line in messages(folder) if "step" in line]
    assert steps == sorted({*steps}) and steps[-1] == 199 and len(steps) > 10


def test_a_log_is_cut_at_a_record(monkeypatch):
    monkeypatch.setattr(run_log, "LOG_BYTES", 60)
    record = b"2026-01-01T00:00:00.000Z ERROR x\nTraceback\n"
    text = newest(record * 3)
    assert text == REMOVED + record and newest(text) == text


def test_the_rest_of_a_log_begins_after_the_last_common_record():
    first, second = (f"2026-01-01T00:00:0{number}.000Z ERROR x\nline\n".encode() for number in range(2))
    assert after(first + second, first) == second and after(first + second, b"") == first + second
    assert after(first + b"stacks\n", first) == b"stacks\n"
    assert after(second, first) == second and after(first, first) == b""


def test_a_process_that_hangs_uploads_the_stacks_of_its_threads(folder):
    ended = []
    with run_log.run_log(URL, "trainer-7"), Watchdog(0.05, 0.05, "realm", ended.append):
        while not ended:
            pass
        text = folder.read(NAME).decode()
    assert ended == [EXIT_HUNG] and "realm: no progress for" in text
    assert "most recent call first" in text and "test_run_logs.py" in text


def test_processes_other_than_0_have_a_quiet_console_and_a_complete_log(folder, monkeypatch, capfd):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_: None)
    monkeypatch.setattr(processes.global_state, "process_id", 7)
    number = processes.connect_processes(argparse.Namespace(processes="auto", process=0, coordinator=None))
    with run_log.run_log(URL, f"trainer-{number}"):
        logger.info("step 1")
        logger.warning("disk is slow")
    assert {"INFO step 1", "WARNING disk is slow"} <= {*messages(folder)}
    shown = capfd.readouterr().err
    assert "disk is slow" in shown and "step 1" not in shown


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("train",), "logs/trainer-0.log"),
        (("build-index", "--process=1", "--processes=2"), "logs/builder-1.log"),
    ],
)
def test_commands_keep_the_error_that_ends_them(bucket, tmp_path, capsys, command, name):
    url = f"{bucket}/runs/one"
    assert cli.main([*command, "--config=quickstart", f"--config.data.path={tmp_path}/none", f"--workdir={url}"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("realm: error: ") and f"{tmp_path}/none" in error
    assert messages(open_folder(url), name)[-1] == f"ERROR {error}"


def test_process_0_does_not_copy_logs(bucket):
    """Other processes write theirs meanwhile."""
    url = f"{bucket}/runs/one"
    open_folder(url).write(NAME, b"text")
    with mirror.local_workdir(url, "trainer-0") as workdir:
        assert not (workdir / "logs").exists()
    assert open_folder(url).read(NAME) == b"text"
