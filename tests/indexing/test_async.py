"""Training with an index that another job builds: adopted in time, the same everywhere, told and tended by hand."""

import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_chunks
from runs import (
    EVERY,
    PATIENCE,
    STEPS,
    Watch,
    adoptions,
    assert_same,
    at_step,
    builder,
    make_job,
    metrics,
    open_tiny,
    set_key,
    spoil,
    train,
    train_with_builder,
    until,
)

from realm_jax.cli import main as cli
from realm_jax.errors import UserError
from realm_jax.host import Stop
from realm_jax.indexing import files as generations
from realm_jax.indexing import heartbeat as status
from realm_jax.indexing import job as build_job
from realm_jax.indexing.async_provider import AsyncIndexProvider
from realm_jax.indexing.control import ControlSignal, reduce_control
from realm_jax.indexing.exporter import export_record, sample_vectors, to_arrays
from realm_jax.indexing.heartbeat import TRAINER, BuilderMonitor, Status, read_status, trainer_status, write_status
from realm_jax.indexing.watcher import IndexWatcher
from realm_jax.run import Run
from realm_jax.storage import PosixFolder
from realm_jax.tasks import make_task
from realm_jax.train.checkpoints import saved_folders
from realm_jax.train.recipe import report_status
from realm_jax.train.records import read_lines

pytestmark = pytest.mark.usefixtures("quick_steps")


def test_generations_are_adopted_at_their_steps_and_what_a_restart_needs_stays(sturdy):
    assert adoptions(sturdy.run) == [(0, 0), (3, 2), (5, 4), (7, 6)]
    assert [line["index_age"] for line in metrics(sturdy.run)] == [0, 1, 2, 1, 2, 1, 2, 1]
    lines = [line for line in read_lines(sturdy.run.workdir / "realm" / "evaluations.jsonl") if "drift" in line]
    assert len(lines) == 3 and all(0 <= line["drift"] <= 1 for line in lines)
    folder = PosixFolder(sturdy.run.workdir)
    pins = read_status(folder, "trainer").pins
    assert pins == (0, 2, 4, 6), "in use or due at steps 3, 6 and 8: one more stays, as a save may be cut off"
    assert {*pins} <= {*generations.export_steps(folder)} & built(folder)


def built(folder):
    return {generations.export_step(name) for name in generations.generation_names(folder)}


@pytest.mark.slow
def test_what_is_served_is_what_was_exported_and_what_nobody_needs_goes(people, tmp_path, monkeypatch):
    run, watch, folder = open_tiny(people, tmp_path), Watch(monkeypatch), PosixFolder(tmp_path)
    set_key(run, "checkpoint.every", 1)
    train_with_builder(run)
    watch.check(run)
    assert read_status(folder, "trainer").pins == (4, 6)
    assert {4, 6} <= built(folder) and 0 not in built(folder)


@pytest.mark.slow
def test_without_searching_ahead_hosts_find_what_devices_find(people, sturdy, tmp_path):
    """Sixteen passages are scored whole, so ScaNN's answer is exact."""
    pytest.importorskip("scann", reason="ScaNN runs on Linux alone")
    run = open_tiny(people, tmp_path, retrieval={"backend": "scann"}, ahead=0)
    final = train_with_builder(run)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), final, sturdy.final)


@pytest.mark.slow
def test_the_query_tower_of_the_generation_searches_where_asked(people, sturdy, tmp_path):
    run = open_tiny(people, tmp_path, retrieval={"query_params": "generation"})
    final = train_with_builder(run)
    assert adoptions(run) == adoptions(sturdy.run)
    kept = {*generations.export_steps(PosixFolder(tmp_path))}
    assert {4, 6} <= kept, "the towers that search stay as long as their vectors"
    assert not all(jax.tree.leaves(jax.tree.map(np.array_equal, final, sturdy.final)))


@pytest.mark.slow
def test_processes_adopt_the_same_generation_at_the_same_step(people, tmp_path, monkeypatch):
    """Two trainer processes, of which the second looks for generations now and then: none is adopted before both have
    it, although newer ones come faster than the second looks."""
    run = open_tiny(people, tmp_path, adopt_after=-1, every=3)
    params, look, deadline = run.initial_params(), IndexWatcher._poll, time.monotonic() + PATIENCE
    words, used, adopted = deque(maxlen=2), [None, None], []
    with builder(run), report_status(run) as status, ExitStack() as stack:
        own = make_task("realm", run), 0, {}, 1, status, lambda: False
        first, second = both = [stack.enter_context(AsyncIndexProvider(*own)) for _ in range(2)]
        for step in itertools.count():
            if step >= 90 and len(adopted) > 2:
                break
            assert time.monotonic() < deadline, f"{len(adopted)} generations in {step} steps"
            if step == 1:
                monkeypatch.setattr(IndexWatcher, "_poll", lambda self: look(self) if self is first._watcher else None)
            if step % 10 == 9:
                look(second._watcher)
            reduced = reduce_control(jnp.array(words[0])).tolist() if len(words) == 2 else []
            found = [
                index.maybe_refresh(step, params, used[i], ControlSignal(*reduced)) for i, index in enumerate(both)
            ]
            used = [now or before for now, before in zip(found, used, strict=True)]
            assert used[0].generation == used[1].generation
            if found[0] is not None:
                adopted.append(used[0].step)
            words.append([index.control_signal(step) for index in both])
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


def test_a_builder_that_starts_before_the_trainer_says_so(tmp_path, capsys):
    assert cli.main(["build-index", f"--workdir={tmp_path}"]) == 2
    message = "has no config yet; start the trainer first, or give the trainer's --config flags too\n"
    assert capsys.readouterr().err == f"realm: error: --workdir={tmp_path}: {message}"


def test_the_earlier_of_two_trainers_in_a_run_directory_ends(tmp_path, monkeypatch):
    """As on storage without locks. The later one goes on, whichever of them writes last."""
    monkeypatch.setattr(status, "HEARTBEAT_SECONDS", 0.05)
    folder = PosixFolder(tmp_path)
    with trainer_status(folder, tmp_path, True) as earlier:
        earlier.check_fence()
        with trainer_status(folder, tmp_path, True) as later:
            write_status(folder, TRAINER, replace(read_status(folder, TRAINER), start=1))  # written at the same time
            time.sleep(0.5)
            later.check_fence()
            with pytest.raises(UserError, match=r"started again elsewhere \(start 2, this is start 1\)"):
                earlier.check_fence()
    assert read_status(folder, TRAINER).start == 2


@pytest.mark.parametrize(("adopt_after", "steps"), [(-1, [0]), (1, [0, 3, 5, 7])])
def test_the_trainer_embeds_the_corpus_if_no_builder_runs(people, tmp_path, caplog, adopt_after, steps):
    """At each step at which it would wait; a restart goes on with the vectors of the checkpoint."""
    run = open_tiny(people, tmp_path, adopt_after=adopt_after, inline_after=0.1)
    write_status(PosixFolder(tmp_path), "builder-0", Status("one", counter=7))  # of a builder that died
    final = train(run)
    assert [step for step, _ in adoptions(run)] == steps
    assert caplog.text.count("no index builder since 0 s (config.refresh.inline_after)") == len(steps)
    last = tmp_path / "realm" / "checkpoints" / f"{STEPS}"
    shutil.rmtree(last)
    assert_same(train(run), final)


def test_a_builder_counts_as_alive_while_its_status_changes(tmp_path):
    folder = PosixFolder(tmp_path)
    write_status(folder, "builder-1", Status("one", counter=7))
    builders = BuilderMonitor(folder)
    time.sleep(0.2)
    assert builders.seconds_without_builder() >= 0.2
    write_status(folder, "builder-1", Status("one", counter=8))
    assert builders.seconds_without_builder() < 0.2


@pytest.mark.slow
def test_a_builder_that_is_slower_than_three_exports_is_not_in_vain(people, tmp_path, monkeypatch):
    """What it works on stays."""
    run, steps = open_tiny(people, tmp_path, steps=30, adopt_after=-1), []
    read, announce = build_job.read_encoders, AsyncIndexProvider.control_signal

    def slow(folder, export):
        until(lambda: not steps or steps[-1] >= min(export.step + 4 * EVERY, 29))
        return read(folder, export)

    def watched(self, step):
        steps.append(step)
        time.sleep(0.05)
        return announce(self, step)

    monkeypatch.setattr(build_job, "read_encoders", slow)
    monkeypatch.setattr(AsyncIndexProvider, "control_signal", watched)
    train_with_builder(run)
    assert len(adoptions(run)) > 2


def test_a_builder_serves_steps_that_are_trained_again(copied, sturdy, monkeypatch):
    """The checkpoint of the last step is damaged, so a run that looks finished needs an index again, and says so."""
    folder, steps = PosixFolder(copied.workdir), []

    def look(step):
        steps.append(step)
        until(lambda: not read_status(folder, TRAINER).index_done)

    at_step(monkeypatch, look)
    newest = Path(saved_folders(copied.workdir / "realm" / "checkpoints")[0])
    largest = max(filter(Path.is_file, newest.rglob("*")), key=lambda path: path.stat().st_size)
    largest.write_bytes(bytes(byte ^ 1 for byte in largest.read_bytes()))
    with builder(copied):
        again = train(copied)
    assert_same(again, sturdy.final)
    assert steps and read_status(folder, TRAINER).index_done


def test_once_builds_the_newest_export_or_finds_it_built(copied, caplog, monkeypatch):
    """With its tower on every device from the start, so that no batch has to send it there."""
    folder, embed = PosixFolder(copied.workdir), Run.embed

    def watched(self, params, progress=None, rows=None):
        assert all(one.committed and len(one.sharding.device_set) == self.mesh.size for one in jax.tree.leaves(params))
        return embed(self, params, progress, rows)

    monkeypatch.setattr(Run, "embed", watched)
    [newest] = [name for name in generations.generation_names(folder) if generations.export_step(name) == 6]
    before = generations.read_manifest(folder, newest)
    with caplog.at_level(logging.INFO):
        make_job(copied).work(Stop(), None, True)
        assert f"generation {newest} is there already" in caplog.text and "published" not in caplog.text
        generations.remove_generation(folder, newest)
        make_job(copied).work(Stop(), None, True)
    assert f"published generation {newest}" in caplog.text
    assert generations.read_manifest(folder, newest).chunks == before.chunks


def test_generations_are_listed_verified_and_removed_by_hand(copied, capsys):
    folder = PosixFolder(copied.workdir)

    def storage(*words):
        code = cli.main(["storage", *words, f"--workdir={copied.workdir}"])
        return code, "".join(capsys.readouterr())

    code, listed = storage("ls", "--json")
    found = {entry["step"]: entry for entry in map(json.loads, listed.splitlines()) if "checkpoint" not in entry}
    assert code == 0 and found[6]["state"] == "published" and found[6]["in_use"] and found[4]["pinned"]
    assert (found[6]["rows"], found[6]["age"]) == (16, 2)
    assert storage("verify")[0] == 0
    name = found[6]["generation"]
    spoil(folder, generations.read_manifest(folder, name), "flipped")
    for words, wanted, message in (
        (["verify"], 1, f"{name}: DAMAGED: "),
        (["rm", name], 2, "is needed to resume the run; remove it anyway with --force"),
        (["rm", name, "--force"], 0, ""),
        (["rm", name], 2, f"no {name} is stored; `realm storage ls` lists all names"),
        (["rm", "realm/8"], 2, "is a checkpoint, which only training removes"),
    ):
        code, told = storage(*words)
        assert code == wanted and message in told
    assert name not in generations.generation_names(folder)


@pytest.mark.slow
def test_bytes_do_not_depend_on_processes_and_devices(people, tmp_path):
    """`realm build-index` as one process with one device, and as two processes with four devices each."""
    chunks = []
    for processes, devices in ((1, 1), (2, 4)):
        run = open_tiny(people, tmp_path / str(processes))
        params, folder = run.initial_params(), PosixFolder(run.workdir)
        towers = to_arrays({name: params[name] for name in run.model.embedder_names})
        generations.write_export(folder, export_record(run, 0), towers, sample_vectors(run, params))
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, small_chunks.__file__, "build-index", f"--workdir={run.workdir}", "--step=0"]
        commands = [[*command, f"--process={one}", f"--processes={processes}"] for one in range(processes)]
        started = [subprocess.Popen(command, env=environment) for command in commands]
        assert [process.wait(120) for process in started] == [0] * processes
        manifest = generations.read_manifest(folder, generations.generation_names(folder)[0])
        chunks.append([(chunk[:3], chunk.file.bytes, chunk.file.sha256) for chunk in manifest.chunks])
    assert len(chunks[0]) == 3 and chunks[0] == chunks[1]
