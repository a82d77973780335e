"""Training with an index that another job builds: adopted in time, the same everywhere, told and tended by hand."""

import itertools
import json
import logging
import os
import subprocess
import sys
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_chunks
from runs import (
    EVERY,
    PATIENCE,
    Watch,
    adoptions,
    assert_same,
    at_step,
    builder,
    make_job,
    metrics,
    open_tiny,
    spoil,
    train,
    until,
)

from realm_jax.cli import main as cli
from realm_jax.host import Stop
from realm_jax.refresh import build_job, status
from realm_jax.refresh.exporter import export_record, sample_vectors, to_arrays
from realm_jax.refresh.generations import (
    export_step,
    export_steps,
    generation_names,
    read_manifest,
    remove_generation,
    write_export,
)  # fmt: skip
from realm_jax.refresh.status import TRAINER, read_status, trainer_status
from realm_jax.refresh.watcher import IndexWatcher
from realm_jax.run import Run
from realm_jax.storage import PosixFolder
from realm_jax.tasks import make_task
from realm_jax.train.built_index import BuiltIndex
from realm_jax.train.checkpoints import saved_folders
from realm_jax.train.recipe import report_status
from realm_jax.train.records import read_lines
from realm_jax.train.restore import restore_params
from realm_jax.train.step import ControlWords, reduce_control

pytestmark = pytest.mark.usefixtures("quick_steps")


def test_generations_are_adopted_at_their_steps(sturdy):
    assert adoptions(sturdy.run) == [(0, 0), (3, 2), (5, 4), (7, 6)]
    assert [line["index_age"] for line in metrics(sturdy.run)] == [0, 1, 2, 1, 2, 1, 2, 1]
    lines = [line for line in read_lines(sturdy.run.workdir / "realm" / "evaluations.jsonl") if "drift" in line]
    assert len(lines) == 3 and all(0 <= line["drift"] <= 1 for line in lines)


def test_what_is_served_is_what_was_exported_and_what_nobody_needs_goes(people, tmp_path, monkeypatch):
    run, watch = open_tiny(people, tmp_path), Watch(monkeypatch)
    run.config.checkpoint.every = 1
    with builder(run):
        train(run)
    watch.check(run)
    folder = PosixFolder(run.workdir)
    assert read_status(folder, "trainer").pins == (4, 6)
    left = {export_step(name) for name in generation_names(folder)}
    assert {4, 6} <= left and 0 not in left


def test_what_a_restart_needs_stays(sturdy):
    folder = PosixFolder(sturdy.run.workdir)
    pins = read_status(folder, "trainer").pins
    assert pins == (0, 2, 4, 6), "in use or due at steps 3, 6 and 8: one more stays, as a save may be cut off"
    assert {*pins} <= set(export_steps(folder)) & {export_step(name) for name in generation_names(folder)}


@pytest.mark.slow
def test_without_searching_ahead_hosts_find_what_devices_find(people, sturdy, tmp_path):
    """Sixteen passages are scored whole, so ScaNN's answer is exact."""
    pytest.importorskip("scann", reason="ScaNN runs on Linux alone")
    run = open_tiny(people, tmp_path, retrieval={"backend": "scann"}, ahead=0)
    with builder(run):
        final = train(run)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), final, sturdy.final)


@pytest.mark.slow
def test_the_query_tower_of_the_generation_searches_where_asked(people, sturdy, tmp_path):
    run = open_tiny(people, tmp_path, retrieval={"query_params": "generation"})
    with builder(run):
        final = train(run)
    folder = PosixFolder(run.workdir)
    assert adoptions(run) == adoptions(sturdy.run)
    assert {4, 6} <= set(export_steps(folder)), "the towers that search stay as long as their vectors"
    same = jax.tree.leaves(jax.tree.map(np.array_equal, final, sturdy.final))
    assert not all(same)


@pytest.mark.slow
def test_as_soon_as_it_is_ready(people, tmp_path):
    """Without fixed steps every generation that is adopted is newer than the one before, and none is from later."""
    run = open_tiny(people, tmp_path, steps=40, adopt_after=-1)
    with builder(run):
        train(run)
    found = adoptions(run)
    assert found[0] == (0, 0) and len(found) > 1
    assert all(index < later and index <= step for (_, index), (step, later) in zip(found, found[1:], strict=False))


@pytest.mark.slow
def test_processes_adopt_the_same_generation_at_the_same_step(people, tmp_path, monkeypatch):
    """Two trainer processes, of which the second looks for generations now and then: none is adopted before both have
    it, although newer ones come faster than the second looks."""
    run = open_tiny(people, tmp_path, adopt_after=-1, every=3)
    params, look = run.initial_params(), IndexWatcher._look
    words, used, adopted, began = deque(maxlen=2), [None, None], [], time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(builder(run))
        own = make_task("realm", run), 0, {}, 1, stack.enter_context(report_status(run)), lambda: False
        first, second = (stack.enter_context(BuiltIndex(*own)) for _ in range(2))
        for step in itertools.count():
            if step >= 90 and len(adopted) > 2:
                break
            assert time.monotonic() - began < PATIENCE, f"{len(adopted)} generations in {step} steps"
            if step == 1:
                monkeypatch.setattr(
                    IndexWatcher, "_look", lambda follower: look(follower) if follower is first._watcher else None
                )
            if step % 10 == 9:
                look(second._watcher)
            consensus = (
                ControlWords(*reduce_control(jnp.array(words[0])).tolist()) if len(words) == 2 else ControlWords()
            )
            found = [one.next(step, params, used[i], consensus) for i, one in enumerate((first, second))]
            used = [now or before for now, before in zip(found, used, strict=True)]
            assert used[0].generation == used[1].generation
            if found[0] is not None:
                adopted.append(used[0].step)
            words.append([first.announce(step), second.announce(step)])
            time.sleep(0.02)
    assert adopted == sorted({*adopted})


def test_the_first_process_alone_names_a_run(tmp_path, monkeypatch):
    """Two that start together and each make up a name would take each other for another run."""
    folder = PosixFolder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("realm_jax.processes.is_process_0", lambda: False)
        with trainer_status(folder, tmp_path, True):
            pass
        assert not list(tmp_path.iterdir())
    with trainer_status(folder, tmp_path, True):
        assert (tmp_path / status.RUN_ID).is_file()


@pytest.mark.slow
def test_a_builder_that_is_slower_than_three_exports_is_not_in_vain(people, tmp_path, monkeypatch):
    """What it works on stays."""
    run, read = open_tiny(people, tmp_path, steps=30, adopt_after=-1), build_job.read_towers
    step = []

    def slow(folder, export):
        until(lambda: not step or step[-1] >= min(export.step + 4 * EVERY, 29))
        return read(folder, export)

    announce = BuiltIndex.announce

    def watched(self, now):
        step.append(now)
        time.sleep(0.05)
        return announce(self, now)

    monkeypatch.setattr(build_job, "read_towers", slow)
    monkeypatch.setattr(BuiltIndex, "announce", watched)
    with builder(run):
        train(run)
    assert len(adoptions(run)) > 2


def test_a_builder_serves_steps_that_are_trained_again(copied, sturdy, monkeypatch):
    """The checkpoint of the last step is damaged, so a run that looks finished needs an index again, and says so."""
    folder, steps = PosixFolder(copied.workdir), []

    def look(step):
        steps.append(step)
        until(lambda: not read_status(folder, TRAINER).index_done)

    at_step(monkeypatch, look)
    newest = saved_folders(copied.workdir / "realm" / "checkpoints")[0]
    largest = max(filter(Path.is_file, newest.rglob("*")), key=lambda path: path.stat().st_size)
    largest.write_bytes(bytes(byte ^ 1 for byte in largest.read_bytes()))
    with builder(copied):
        again = train(copied)
    assert_same(again, sturdy.final)
    assert steps and read_status(folder, TRAINER).index_done


def test_once_builds_the_newest_export_or_finds_it_built(copied, caplog, monkeypatch):
    """With its tower on every device from the start, so that no batch has to send it there."""
    embed = Run.embed

    def watched(self, params, progress=None, rows=None):
        assert all(one.committed and len(one.sharding.device_set) == self.mesh.size for one in jax.tree.leaves(params))
        return embed(self, params, progress, rows)

    monkeypatch.setattr(Run, "embed", watched)
    folder = PosixFolder(copied.workdir)
    [newest] = [name for name in generation_names(folder) if export_step(name) == 6]
    before = read_manifest(folder, newest)
    with caplog.at_level(logging.INFO):
        make_job(copied).work(Stop(), None, True)
        assert f"generation {newest} is there already" in caplog.text and "published" not in caplog.text
        remove_generation(folder, newest)
        make_job(copied).work(Stop(), None, True)
    assert f"published generation {newest}" in caplog.text
    after = read_manifest(folder, newest)
    assert [chunk.file.sha256 for chunk in after.chunks] == [chunk.file.sha256 for chunk in before.chunks]


def test_generations_are_listed_verified_and_removed_by_hand(copied, capsys):
    workdir, folder = f"--workdir={copied.workdir}", PosixFolder(copied.workdir)
    assert cli.main(["storage", "ls", "--json", workdir]) == 0
    listed = map(json.loads, capsys.readouterr().out.splitlines())
    found = {entry["step"]: entry for entry in listed if "checkpoint" not in entry}
    assert found[6]["state"] == "published" and found[6]["in_use"] and found[4]["pinned"]
    assert (found[6]["rows"], found[6]["age"]) == (16, 2)
    assert cli.main(["storage", "verify", workdir]) == 0
    name = found[6]["generation"]
    spoil(folder, read_manifest(folder, name), "flipped")
    assert cli.main(["storage", "verify", workdir]) == 1
    assert f"{name}: DAMAGED: " in capsys.readouterr().out
    assert cli.main(["storage", "rm", name, workdir]) == 2
    assert "is needed to resume the run; remove it anyway with --force" in capsys.readouterr().err
    assert cli.main(["storage", "rm", name, "--force", workdir]) == 0
    assert name not in generation_names(folder)
    assert cli.main(["storage", "rm", name, workdir]) == 2
    assert f"there is no {name} stored; `realm storage ls` lists what there is" in capsys.readouterr().err
    assert cli.main(["storage", "rm", "realm/8", workdir]) == 2
    assert "a checkpoint is removed by training itself" in capsys.readouterr().err


def test_the_final_parameters_are_in_the_checkpoint(sturdy):
    saved = restore_params(sturdy.run, "realm")
    assert_same(jax.tree.map(np.asarray, saved), sturdy.final)


@pytest.mark.slow
def test_bytes_do_not_depend_on_processes_and_devices(people, tmp_path):
    """`realm build-index` as one process with one device, and as two processes with four devices each."""
    chunks = []
    for processes, devices in ((1, 1), (2, 4)):
        run = open_tiny(people, tmp_path / str(processes))
        params = run.initial_params()
        towers = to_arrays({name: params[name] for name in run.model.embedder_names})
        folder = PosixFolder(run.workdir)
        write_export(folder, export_record(run, 0), towers, sample_vectors(run, params))
        flags = {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, small_chunks.__file__, "build-index", f"--workdir={run.workdir}", "--step=0"]
        started = [
            subprocess.Popen([*command, f"--process={one}", f"--processes={processes}"], env=os.environ | flags)
            for one in range(processes)
        ]
        assert [process.wait(120) for process in started] == [0] * processes
        manifest = read_manifest(folder, generation_names(folder)[0])
        chunks.append([(chunk[:3], chunk.file.bytes, chunk.file.sha256) for chunk in manifest.chunks])
    assert len(chunks[0]) == 3 and chunks[0] == chunks[1]
