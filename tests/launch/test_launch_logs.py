"""`realm launch logs --host` and `--previous`: logs in the run directory, after the machines are gone."""

import pytest

from realm_jax.cli import main as cli
from realm_jax.host import INTERRUPTED
from realm_jax.launch import logs
from realm_jax.storage import PosixFolder

URL = "gs://bucket/runs/one"
DAY = "2026-01-01T00:00:"


def start(number, process, *lines):
    """Return the log of one start of a process."""
    record = f"{DAY}{number:02}.000Z INFO"
    head = f"{record} start of {process} on host (process 1)"
    return "".join(f"{line}\n" for line in (head, *(f"{record} {line}" for line in lines)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the logs of two trainer processes and a builder."""
    for process in ("trainer-0", "trainer-12", "builder-1"):
        text = start(1, process, f"first {process}", "crash") + start(2, process, f"second {process}")
        (tmp_path / f"{process}.log").write_text(text)
    (tmp_path / "launch.json").write_text("{}")
    folder = PosixFolder(tmp_path)
    monkeypatch.setattr(logs, "open_folder", lambda _url: folder)
    return folder


def shown(capsys, *words, workdir=URL):
    code = cli.main(["launch", "logs", f"--workdir={workdir}", *words])
    return code, *capsys.readouterr()


def test_the_log_of_a_host_is_read_from_the_run_directory(folder, capsys):
    code, out, _ = shown(capsys, "--host=12")
    assert code == 0 and out == folder.read("trainer-12.log").decode()
    code, out, _ = shown(capsys, "--job=builder", "--host=1", "--target=jobset", "--spec.image=IMAGE")
    assert code == 0 and out == folder.read("builder-1.log").decode()


def test_the_log_of_a_process_of_this_machine_is_the_file_of_the_launcher(tmp_path, capfd):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer-1.log").write_text("line\n" * 300)
    code, out, _ = shown(capfd, "--target=local", "--host=1", workdir=tmp_path)
    assert code == 0 and out == "line\n" * 300


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host=1"], "--host=1: there is no log of trainer-1; choose among 0, 12"),
        (["--host=-1"], "--host=-1: there is no log of trainer--1; choose among 0, 12"),
        (
            ["--host=1", "--job=builder-1"],
            "--job=builder-1: --host and --previous need the name of a job; give trainer",
        ),
        (["--previous", "--follow"], "--previous: prints an earlier start, which has ended; leave out --follow"),
        (["--previous", "--host=3"], "--host=3: there is no log of trainer-3; choose among 0, 12"),
        ([], "--target: name one of local, skypilot, jobset"),
    ],
)
def test_errors_name_the_hosts_that_have_logs(folder, capsys, flags, message):
    code, out, err = shown(capsys, *flags)
    assert code == 2 and not out and err.startswith(f"realm: error: {message}") and err.count("\n") == 1


def test_a_run_without_logs_is_an_error(tmp_path, capsys):
    code, _, err = shown(capsys, "--host=0", workdir=tmp_path)
    assert code == 2 and f"--job=trainer: {tmp_path}/logs has no log of it; start the run" in err


def test_previous_prints_the_start_before_the_last_of_all_hosts(folder, capsys):
    code, out, _ = shown(capsys, "--previous")
    assert code == 0 and out == (
        f"trainer-0 | {DAY}01.000Z INFO start of trainer-0 on host (process 1)\n"
        f"trainer-0 | {DAY}01.000Z INFO first trainer-0\ntrainer-0 | {DAY}01.000Z INFO crash\n"
        f"trainer-12 | {DAY}01.000Z INFO start of trainer-12 on host (process 1)\n"
        f"trainer-12 | {DAY}01.000Z INFO first trainer-12\ntrainer-12 | {DAY}01.000Z INFO crash\n"
    )
    code, out, _ = shown(capsys, "--previous", "--host=12")
    assert code == 0 and "trainer-0" not in out and "first trainer-12" in out
    folder.write("trainer-12.log", start(1, "trainer-12").encode())
    code, _, err = shown(capsys, "--previous", "--host=12")
    assert code == 2 and "has no earlier start of trainer; leave out --previous" in err


def test_follow_prints_each_new_line_once(folder, capsys, monkeypatch):
    first = folder.read("trainer-12.log")
    newer = [first + b"a traceback\n", b"(older lines were removed)\n" + first[-60:] + b"a traceback\n", None]

    def sleep(_seconds):
        if (text := newer.pop(0)) is None:
            raise KeyboardInterrupt
        folder.write("trainer-12.log", text)

    monkeypatch.setattr(logs.time, "sleep", sleep)
    code, out, _ = shown(capsys, "--host=12", "--follow")
    assert code == INTERRUPTED and out == (first + b"a traceback\n").decode()
