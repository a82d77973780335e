"""`realm watch`: what it says of runs that have not begun, train, wait for an index, were stopped or are done."""

import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from runs import until

from realm_jax.cli import main as cli
from realm_jax.cli.watch import BLOCKS, sparkline, view
from realm_jax.indexing.files import ChunkFile, Manifest, reject
from realm_jax.indexing.heartbeat import Status, write_status
from realm_jax.launch.status import POINTS, Heartbeats, run_status
from realm_jax.storage import FileEntry, Folder, PosixFolder, open_folder
from realm_jax.train.records import parse_lines

USED, NEWER, BUILT, BAD = "40-aaaaaaaa", "80-bbbbbbbb", "120-cccccccc", "100-dddddddd"


def lines(*records: dict) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def step(number: int, seconds: float, **others: float) -> dict:
    return {"step": number, "loss": 5.0 - number / 50, "seconds": seconds} | others


def manifest(name: str) -> Manifest:
    chunks = (ChunkFile("s", 0, 9, FileEntry(f"index/{name}/0-9-f.bin", 1, "f")),)
    made_of = {"corpus": "c", "tokenizer": "t", "rows": 9, "width": 8, "dtype": "float32"}
    return Manifest(name, int(name.split("-")[0]), "p", chunks=chunks, searcher=None, recall={}, seconds={"embed": 3.0},
                    **made_of)  # fmt: skip


def put_run(folder: Folder) -> None:
    """An asynchronous run at step 100 of 160 of REALM, which took two seconds a step."""
    config = {"tasks": "ict,realm,qa", "refresh": {"mode": "async", "every": 40}, "realm": {"steps": 160}}
    folder.write_json("config.json", config | {"ict": {"steps": 20}, "qa": {"steps": 50}})
    folder.write("ict/metrics.jsonl", lines(*(step(n, n / 10) for n in range(1, 21))))
    folder.write("ict/evaluations.jsonl", lines({"step": 20, "recall@5": 0.4, "refresh": False, "seconds": 2.5}))
    shares = {"goodput": 0.75, "wait_data": 0.01, "wait_index": 0.1}
    trained = [step(n, 2.0 * n, retrieval_utility=n / 100, index_age=n % 40, **shares) for n in range(10, 101, 10)]
    folder.write("realm/metrics.jsonl", lines(*trained) + b'{"step": 110, "lo')
    adopted = {"step": 45, "recall@5": 0.6, "refresh": True, "index_step": 40, "generation": USED, "drift": 0.875}
    first = {"step": 0, "recall@5": 0.4, "refresh": True, "index_step": 0, "generation": "0-eeeeeeee", "waited": 2.0}
    folder.write("realm/evaluations.jsonl", lines(first, adopted | {"waited": 0.0}) + b'{"st')
    for name in (USED, NEWER, BAD):
        folder.write_json(f"index/{name}/MANIFEST.json", manifest(name).to_json())
    folder.write(f"index/{BUILT}/000-009-f.bin", b"")
    reject(folder, BAD, "zero", retryable=True)
    beat(folder, 7)


@pytest.fixture
def folder(tmp_path) -> PosixFolder:
    """The folder of that run."""
    put_run(PosixFolder(tmp_path))
    return PosixFolder(tmp_path)


def beat(folder: Folder, counter: int) -> None:
    write_status(folder, "trainer", Status("one", stage="realm", step=100, counter=counter, index=40))
    write_status(folder, "builder-0", Status("one", stage="building", step=120, counter=counter))


def alive(folder: Folder) -> dict:
    """Its status between two heartbeats."""
    heartbeats = Heartbeats(folder, needs_trainer=False)
    heartbeats.poll(0.0)
    beat(folder, 8)
    return run_status(folder, heartbeats.poll(5.0))


def once(folder: Folder) -> dict:
    """Its status at one look, which is too short for a heartbeat."""
    return run_status(folder, Heartbeats(folder, needs_trainer=False).poll(0.0))


def shown(status: dict, width: int, **options) -> str:
    console = Console(width=width, color_system=None, record=True, file=open(os.devnull, "w"), **options)
    console.print(view(status, "runs/one", console))
    return console.export_text()


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


# ---- what is known


def test_a_run_that_trains(folder):
    found = alive(folder)
    assert [found[key] for key in ("state", "stage", "task")] == ["running", "realm", "realm"]
    assert found["metrics"]["step"] == 100
    told = [(task["name"], task["state"], task["step"], task["steps"]) for task in found["tasks"]]
    assert told == [("ict", "done", 20, 20), ("realm", "running", 100, 160), ("qa", "waiting", 0, 50)]
    assert [task["seconds"] for task in found["tasks"]] == [2.5, 200.0, None]
    assert [task["seconds_left"] for task in found["tasks"]] == [None, pytest.approx(120.0), None]
    assert found["seconds_left"] is None, "nobody knows how long qa takes"
    points = [(point["task"], point["value"], point["refresh"]) for point in found["recall"]["points"]]
    assert points == [("ict", 0.4, False), ("realm", 0.4, True), ("realm", 0.6, True)]
    assert found["retrieval_utility"]["value"] == 1.0 and found["goodput"] == 0.75
    assert found["waits"] == {"data": 0.01, "index": 0.1}


def test_the_index_and_its_generations(folder):
    index = alive(folder)["index"]
    assert [index[key] for key in ("mode", "task", "step", "age", "drift")] == ["async", "realm", 40, 60, 0.875]
    states = [(one["generation"], one["state"], one["age"]) for one in index["generations"]]
    assert states == [(USED, "in use", 60), (NEWER, "published", 20), (BAD, "refused", 0), (BUILT, "being built", 0)]
    assert index["generations"][0]["seconds"] == 3.0 and "seconds" not in index["generations"][-1]
    assert [line["waited"] for line in index["adoptions"]] == [2.0, 0.0]


def test_heartbeats_say_whether_it_runs(folder):
    heartbeats = Heartbeats(folder, needs_trainer=False)
    assert run_status(folder, heartbeats.poll(0.0))["state"] == "unknown"
    beat(folder, 8)
    assert run_status(folder, heartbeats.poll(5.0))["state"] == "running"
    assert run_status(folder, heartbeats.poll(14.0))["state"] == "running"
    silent = run_status(folder, heartbeats.poll(15.0))
    assert silent["state"] == "no heartbeat" and {job["state"] for job in silent["jobs"]} == {"late"}
    assert [task["state"] for task in silent["tasks"]] == ["done", "stopped", "waiting"]
    beat(folder, 9)
    assert run_status(folder, heartbeats.poll(16.0))["state"] == "running", "it was started again"


def test_a_run_that_is_done(folder):
    write_status(folder, "trainer", Status("one", stage="ended", counter=9, done=True))
    worse = lines({"step": 0, "recall@5": 0.6}, {"step": 50, "recall@5": 0.5, "refresh": False})
    folder.write("qa/evaluations.jsonl", worse)
    folder.write_json("results.json", {"exact_match": {"retrieval": 0.3}})
    found = once(folder)
    assert found["state"] == "done" and found["results"] == {"exact_match": {"retrieval": 0.3}}
    assert {task["state"] for task in found["tasks"]} == {"done"}
    assert len(found["warnings"]) == 1 and found["warnings"][0].startswith("qa is worse than at its start")


def test_an_adaptation_and_how_long_what_has_not_begun_takes(tmp_path):
    folder = PosixFolder(tmp_path)
    folder.write_json("adapt.json", {"plan": {"estimate": {"step": {"contrast": 1.0, "realm": 4.0}}}})
    config = {"tasks": "contrast,realm", "contrast": {"steps": 10}, "realm": {"steps": 20}}
    folder.write_json("config.json", config)
    folder.write("contrast/metrics.jsonl", lines(step(5, 10.0)))
    found = once(folder)
    assert (found["state"], found["seconds_left"], found["adapted"]) == ("unknown", 5 * 2 + 20 * 4, None)
    folder.write_json("adapt.json", {"measured": {"promoted": False}, "export": []})
    assert (once(folder)["state"], once(folder)["adapted"]) == ("done", False)
    assert "base encoder kept" in shown(once(folder), 80)


def test_a_curve_is_short_however_long_the_run(tmp_path):
    folder = PosixFolder(tmp_path)
    folder.write_json("config.json", {"tasks": "ict", "ict": {"steps": 5000}})
    folder.write("ict/metrics.jsonl", lines(*(step(n, 1.0 * n) for n in range(1, 1001))))
    (task,) = once(folder)["tasks"]
    assert len(task["loss"]) == POINTS and task["loss"][-1][0] == 1000
    assert task["loss"][0][1] == pytest.approx(5.0 - 5 / 50), "the mean of its part, the first nine records"


@pytest.mark.parametrize(
    "damage",
    [
        {"config.json": b"{"},
        {"config.json": b'{"tasks": null, "realm": 3, "refresh": []}'},
        {"realm/metrics.jsonl": b'{"step": null}\n{"loss": NaN, "step": 1, "seconds": 2}\n7\n'},
        {"realm/metrics.jsonl": b'{"step": 1, "seconds": 2, "goodput": Infinity}\n{"step": 2, "los\xc3'},
        {"realm/evaluations.jsonl": b'{"refresh": true, "index_step": null, "step": 1}\n[]\n'},
        {f"index/{USED}/MANIFEST.json": b"["},
        {"results.json": b'""', "baselines.json": b'{"untrained": 3}', "adapt.json": b'{"plan": 1, "measured": []}'},
        {"jobs/trainer.json": b'{"counter": "x"}'},
    ],
)
def test_damage_and_what_is_being_written_are_passed_over(folder, damage):
    for name, data in damage.items():
        folder.write(name, data)
    found = once(folder)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert shown(found, 60)


@given(st.lists(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3))), st.integers(0, 200))
def test_a_file_that_is_cut_anywhere_gives_the_records_before(records, cut):
    data = lines(*records)[:cut]
    found = parse_lines(data)
    assert found == records[: len(found)] and len(found) >= data.count(b"\n")


def test_a_run_in_a_bucket():
    url = "memory://watched/run"
    put_run(open_folder(url))
    try:
        assert alive(open_folder(url))["index"]["age"] == 60
    finally:
        fsspec.filesystem("memory").rm("/watched", recursive=True)


# ---- how it looks


@pytest.mark.parametrize("width", [40, 60, 120])
def test_no_line_is_wider_than_the_terminal(folder, width):
    text = shown(alive(folder), width)
    assert max(map(len, text.splitlines())) <= width
    assert "running, realm" in text and "100/160" in text and "aaaaaaaa" in text and "builder-0" in text


def test_a_wide_terminal_shows_all_columns_and_a_narrow_one_the_first(folder):
    wide, narrow = (next(line for line in shown(alive(folder), w).splitlines() if USED in line) for w in (120, 60))
    assert wide.split() == [USED, "60", "in", "use", "0.88", "45", "3", "s", "0", "s"]
    assert wide.startswith(narrow.rstrip()) and len(narrow.rstrip()) < len(wide.rstrip())


def test_a_terminal_without_unicode_gets_other_curves(folder):
    console = Console(width=80, file=open(os.devnull, "w", encoding="ascii", errors="replace"), record=True)
    console.print(view(alive(folder), "runs/one", console))
    assert not {*console.export_text()} & {*BLOCKS}


def test_a_curve_of_characters():
    assert sparkline([0.0, 1.0, 2.0, 7.0], 8) == "▁▂▃█"
    assert sparkline([0.0, 2.0, 6.0, 8.0], 2) == "▁█" and sparkline([3.0] * 3, 8) == "▁▁▁"
    assert sparkline([], 8) == sparkline([None], 8) == ""
    assert len(sparkline([float(n) for n in range(1001)], 40)) == 40


# ---- the command


def test_a_run_without_a_task_is_shown_and_nothing_is_written(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    before = contents(tmp_path)
    assert cli.main(["watch", f"--workdir={tmp_path}"]) == 0
    assert f"{tmp_path.name}: not begun" in "".join(capsys.readouterr().out.split("\n"))
    assert cli.main(["watch", f"--workdir={tmp_path}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "not begun" and found["tasks"] == [] and found["index"] is None
    assert contents(tmp_path) == before and [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys):
    assert cli.main(["watch", f"--workdir={tmp_path / 'none'}"]) == 2
    assert "nothing is there yet; name a run directory" in capsys.readouterr().err


def test_it_needs_no_jax(tmp_path):
    put_run(PosixFolder(tmp_path))
    shutil.rmtree(tmp_path / "jobs")  # else it waits for heartbeats
    program = (
        "import sys\nfrom realm_jax.cli.main import main\n"
        f"assert main(['watch', '--workdir={tmp_path}', '--json']) == 0\nassert 'jax' not in sys.modules"
    )
    before = contents(tmp_path)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["task"] == "realm"
    assert contents(tmp_path) == before


def test_on_a_terminal_it_follows_the_run_to_its_end(folder):
    process, terminal = on_terminal(folder.root, rows=50, columns=100)
    read_until(terminal, "100/160")
    folder.write("realm/metrics.jsonl", lines(step(160, 300.0)))
    write_status(folder, "trainer", Status("one", stage="ended", counter=10, done=True))
    read_until(terminal, "160/160")
    assert process.wait(60) == 0
    os.close(terminal)


def test_ctrl_c_ends_the_view_and_is_no_failure(folder):
    process, terminal = on_terminal(folder.root, rows=10, columns=60)
    text = read_until(terminal, "ict")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert "Traceback" not in text + os.read(terminal, 1 << 16).decode(errors="replace")
    os.close(terminal)


def on_terminal(workdir: Path, rows: int, columns: int) -> tuple[subprocess.Popen, int]:
    """`realm watch` on a terminal of its own, and our end of it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    command = [sys.executable, "-m", "realm_jax", "watch", f"--workdir={workdir}", "--every=1"]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment | {"TERM": "xterm"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )  # fmt: skip
    os.close(theirs)
    return process, ours


def read_until(terminal: int, wanted: str) -> str:
    """What is printed until something stands there."""
    text = ""

    def there() -> bool:
        nonlocal text
        text += os.read(terminal, 1 << 16).decode(errors="replace")
        return wanted in text

    until(there, 60.0)
    return text
