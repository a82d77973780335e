"""`realm train` as two processes with four devices each: the same run as one process with eight, whoever is killed."""

import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import assert_same, finish, flags_of, inline_config, records, start, until
from tiny_run import open_config, tiny_config

from realm_jax import processes
from realm_jax.cli import main as cli
from realm_jax.data.examples import batches
from realm_jax.storage import read_json
from realm_jax.tasks import make_task
from realm_jax.train.checkpoints import saved_folders
from realm_jax.train.restore import restore_params
from realm_jax.train.workdir import load_run


def tiny_flags(data, **changes):
    """The command line of a run of three tasks; dotted keys with two underscores for the dot."""
    config = inline_config(data, **{"tasks": "ict,realm,qa"} | changes)
    for task in ("ict", "realm", "qa"):
        config[task].update({"steps": 4, "learning_rate": 1e-3})
    return flags_of(config)


@pytest.fixture(scope="module")
def alone(people, tmp_path_factory):
    """One process with eight devices, undisturbed."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    finish(start(workdir, tiny_flags(people)))
    return workdir


def assert_nearly_same(one, other):
    """Other collectives add up in another order; nothing else may differ."""
    runs = [load_run(workdir) for workdir in (one, other)]
    for task in ("ict", "realm", "qa"):
        final = [restore_params(run, task) for run in runs]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *final)
        lines = [records(run, "metrics", task) for run in runs]
        assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]] == [1, 2, 3, 4]
        for mine, theirs in zip(*lines, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    results = [read_json(run.workdir / "results.json") for run in runs]
    assert results[0]["recall@5"] == results[1]["recall@5"] and results[0]["exact_match"] == results[1]["exact_match"]


@pytest.mark.slow
def test_two_processes_do_what_one_does(people, alone, tmp_path):
    outputs = finish(start(tmp_path / "run", tiny_flags(people), 2))
    assert_nearly_same(alone, tmp_path / "run")
    assert "Results" in outputs[0] and "Results" not in outputs[1]
    assert (tmp_path / "run" / "report.html").is_file()


def end_after_saves(people, tmp_path, saves, signal_number):
    """Start two processes, and send both a signal once `realm` has saved so often; what was started, and its flags."""
    flags, folder = tiny_flags(people, checkpoint__every=1), tmp_path / "run" / "realm" / "checkpoints"
    started = start(tmp_path / "run", flags, 2)
    until(lambda: any(int(entry.name) >= saves for entry in saved_folders(folder)), 200.0)
    for process in started:
        process.send_signal(signal_number)
    finish(started, code=-signal.SIGKILL if signal_number == signal.SIGKILL else 75)
    return flags


@pytest.mark.parametrize("steps", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_two_processes_make_the_batches_of_one(people, tmp_path, steps):
    """Every example of the first batches of three tasks, whichever process makes it, of the rows that it holds."""
    config = tiny_config(people)
    run = open_config(config, tmp_path)
    for task in (make_task(name, run) for name in ("ict", "realm", "qa")):
        examples = task.examples({}, None)
        rows = np.arange(16), np.arange(8), np.arange(8, 16)
        made = (batches(examples, config.seed, task.stream, 16, 0, steps, part) for part in rows)
        for whole, *parts in zip(*made, strict=True):
            assert_same(jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts), whole)


@pytest.mark.slow
@pytest.mark.parametrize("is_damaged, processes", [(False, 1), (True, 2)])
def test_processes_that_are_killed_go_on(people, alone, tmp_path, is_damaged, processes):
    """As one, or as two that pass over the same damaged checkpoint, of which only one reads the damaged bytes."""
    flags = end_after_saves(people, tmp_path, 2, signal.SIGKILL)
    assert len(saved_folders(tmp_path / "run" / "qa" / "checkpoints")) == 0
    newest = Path(saved_folders(tmp_path / "run" / "realm" / "checkpoints")[0])
    if is_damaged:
        largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 16
        largest.write_bytes(bytes(content))
    outputs = finish(start(tmp_path / "run", flags, processes))
    assert (f"{newest} is damaged" in outputs[0]) == is_damaged
    assert_nearly_same(alone, tmp_path / "run")


@pytest.mark.slow
def test_sigterm_to_all_saves_and_loses_no_step(people, alone, tmp_path):
    flags = end_after_saves(people, tmp_path, 1, signal.SIGTERM)
    finish(start(tmp_path / "run", flags, 2))
    assert_nearly_same(alone, tmp_path / "run")


@pytest.mark.slow
def test_one_process_that_is_told_to_stop_while_all_wait_for_an_index_stops_all(people, tmp_path):
    """There is no builder. They save what they have; the same command would go on."""
    flags = tiny_flags(people, tasks="realm", refresh__mode="async", log__hang_seconds=120.0)
    started = start(tmp_path / "run", flags, 2)
    until(lambda: (tmp_path / "run" / "exports" / "0" / "EXPORT.json").exists(), 200.0)
    started[1].send_signal(signal.SIGTERM)
    outputs = finish(started, code=75)
    assert all("saved realm at step 0; run the command again to resume" in output for output in outputs)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--processes=none", "--processes=none: is not a number of processes; give one, or 'auto'"),
        ("--processes=²", "--processes=²: is not a number of processes; give one, or 'auto'"),
        ("--processes=2", "--coordinator: name a machine and a free port"),
        ("--processes=2 --process=2", "--process=2: must be at least 0 and below --processes=2"),
    ],
)
def test_processes_that_cannot_be_are_refused(people, tmp_path, capsys, flags, message):
    assert cli.main(["train", f"--workdir={tmp_path}", *tiny_flags(people), *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_single_process_needs_nobody():
    assert processes.is_process_0() and processes.broadcast_from_process_0(7) == 7
    assert processes.allgather_flags(True, False).tolist() == [[True, False]] and not processes.any_process(False)
    assert processes.run_on_process_0(lambda: 7) == 7
    with pytest.raises(KeyError):
        processes.run_on_process_0(lambda: {}["missing"])
