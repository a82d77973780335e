"""Training with an index that another job builds: adopted in time, served as exported, calm when something is amiss.

The builder runs in a thread of the test and works whenever it is told to, so that nothing depends on the clock.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import shared_steps
from tiny_run import PEOPLE, prepare_people, tiny_config

from realm_jax import cli
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.index.builder import Share, Stopped
from realm_jax.index.generations import (
    Foreign,
    export_steps,
    generation_names,
    read_export,
    read_manifest,
    read_status,
    read_towers,
    remove_export,
    remove_generation,
    step_of,
    write_export,
)  # fmt: skip
from realm_jax.jobs import build_index
from realm_jax.jobs.build_index import Job, for_embedding
from realm_jax.run import make_run
from realm_jax.storage import PosixFolder, StorageError
from realm_jax.training import loop
from realm_jax.training.adoption import Adoption
from realm_jax.training.checkpoints import Saved
from realm_jax.training.exporter import export_record, sample_vectors, to_arrays, to_params
from realm_jax.training.follower import Follower
from realm_jax.training.loop import Stop, check_workdir, restore_params, train_task
from realm_jax.training.metrics import read_lines
from realm_jax.training.refresh import Ready
from realm_jax.training.state import agreed

STEPS, EVERY, AFTER = 8, 2, 1


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    with shared_steps(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_people(tmp_path_factory.mktemp("people"))


def open_tiny(data, workdir, steps=STEPS, retrieval=None, **refresh):
    config = tiny_config(data)
    config.retrieval.update(retrieval or {})
    config.tasks = "realm"
    for task in ("ict", "realm", "qa"):
        config[task].batch_size = 8
    config.realm.update({"steps": steps, "warmup": 2, "learning_rate": 1e-3})
    config.update({"checkpoint": {"every": 3, "keep": 2}, "log": {"every": 1}})
    config.refresh.update(
        {"mode": "async", "every": EVERY, "adopt_after": AFTER, "poll_seconds": 0.01, "chunk_rows": 6, "keep": 1}
        | {"wait_seconds": 60.0, "idle_exit": 60.0}
        | refresh
    )
    run = make_run(config, workdir, open_sources(config.data.path), jax.devices()[:1])
    check_workdir(run)
    return run


def train(run):
    return jax.tree.map(np.asarray, train_task(run, "realm", run.initial_params()))


def make_job(run, process=0, processes=1):
    own = make_run(for_embedding(run.config), run.workdir, run.sources, jax.devices()[:1])
    return Job(own, PosixFolder(run.workdir), Share(process, processes))


@contextmanager
def builder(run):
    """`realm build-index` in a thread; what it raises is raised at the end."""
    faults, stop = [], Stop()

    def work():
        try:
            make_job(run).work(stop, None, False)
        except (loop.Preempted, Stopped):
            pass
        except Exception as fault:
            faults.append(fault)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.asked = True
        thread.join()
    if faults:
        raise faults[0]


def adoptions(run):
    found = read_lines(run.workdir / "realm" / "evaluations.jsonl")
    return [(line["step"], line["index_step"]) for line in found if "generation" in line]


def metrics(run):
    times = ("seconds", "steps_per_second", "wait_data")
    lines = read_lines(run.workdir / "realm" / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in times} for line in lines]


def assert_served_as_exported(run, served):
    """Every row that a step saw is re-embedded from its generation's parameters and compared."""
    folder = PosixFolder(run.workdir)
    for step, vectors in served.items():
        arrays, _ = read_towers(folder, read_export(folder, step))
        fresh = run.embed(to_params(arrays))
        np.testing.assert_allclose(vectors[: len(fresh)], fresh, atol=1e-5)


@pytest.fixture(scope="module")
def sturdy(data, tmp_path_factory):
    """An undisturbed run that adopts at fixed steps."""
    run = open_tiny(data, tmp_path_factory.mktemp("sturdy"))
    with builder(run):
        run.__dict__["final"] = train(run)
    return run


def test_generations_are_adopted_at_their_steps(sturdy):
    assert adoptions(sturdy) == [(0, 0), (3, 2), (5, 4), (7, 6)]
    assert [line["index_age"] for line in metrics(sturdy)] == [0, 1, 2, 1, 2, 1, 2, 1]
    lines = [line for line in read_lines(sturdy.workdir / "realm" / "evaluations.jsonl") if "drift" in line]
    assert len(lines) == 3 and all(0 <= line["drift"] <= 1 for line in lines)


def test_what_is_served_is_what_was_exported(data, tmp_path, monkeypatch):
    run, served = open_tiny(data, tmp_path), {}
    run.config.checkpoint.every = 1
    make = loop.make_step

    def watched(run, task):
        step = make(run, task)

        def call(state, batch, index, control):
            served[int(state.step)] = np.asarray(index.vectors)
            return step(state, batch, index, control)

        return call

    monkeypatch.setattr(loop, "make_step", watched)
    monkeypatch.setattr("realm_jax.training.exporter.KEPT", 100)
    with builder(run):
        train(run)
    folder = PosixFolder(run.workdir)
    assert read_status(folder, "trainer").pins == (4, 6)
    left = {step_of(name) for name in generation_names(folder)}
    assert {4, 6} <= left and 0 not in left, "nobody needs that any more"
    at = dict(adoptions(run))
    assert_served_as_exported(run, {at[step]: served[step] for step in at})


def test_what_a_restart_needs_stays(sturdy):
    folder = PosixFolder(sturdy.workdir)
    pins = read_status(folder, "trainer").pins
    assert pins == (0, 2, 4, 6), "in use or due at steps 3, 6 and 8: one more stays, as a save may be cut off"
    assert {*pins} <= set(export_steps(folder)) & {step_of(name) for name in generation_names(folder)}


class Cut(Exception):
    """Stands for the power going off."""


def cut_at(monkeypatch, wanted):
    make, left = loop.make_step, [wanted]

    def cutting(run, task):
        step = make(run, task)

        def call(state, *rest):
            if left and int(state.step) == left[0]:
                left.clear()
                raise Cut
            return step(state, *rest)

        return call

    monkeypatch.setattr(loop, "make_step", cutting)


@pytest.mark.parametrize("step", [4, 7])
def test_a_trainer_that_is_killed_ends_with_the_same_bits(data, sturdy, tmp_path, monkeypatch, step):
    run = open_tiny(data, tmp_path)
    cut_at(monkeypatch, step)
    with builder(run):
        with pytest.raises(Cut):
            train(run)
        final = train(run)
    jax.tree.map(np.testing.assert_array_equal, final, sturdy.__dict__["final"])
    assert metrics(run) == metrics(sturdy)
    assert adoptions(run) == adoptions(sturdy)


@pytest.mark.parametrize("mode", ["async", "inline"])
@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(3, marks=pytest.mark.slow)])
def test_hosts_that_search_ahead_end_with_the_same_bits_after_a_kill(data, tmp_path, monkeypatch, ahead, mode):
    """Searches that were under way are part of the checkpoint of step 6."""
    pytest.importorskip("scann", reason="ScaNN runs on Linux alone")
    finals = []
    for name, cut in (("quiet", None), ("killed", 7)):
        run = open_tiny(data, tmp_path / name, retrieval={"backend": "scann", "ahead": ahead}, mode=mode)
        with builder(run) if mode == "async" else nullcontext(), monkeypatch.context() as patch:
            if cut is not None:
                cut_at(patch, cut)
                with pytest.raises(Cut):
                    train(run)
            finals.append(train(run))
    jax.tree.map(np.testing.assert_array_equal, *finals)
    assert metrics(run) == metrics(
        open_tiny(data, tmp_path / "quiet", retrieval={"backend": "scann", "ahead": ahead}, mode=mode)
    )


def test_without_searching_ahead_hosts_find_what_devices_find(data, sturdy, tmp_path):
    """Sixteen passages are scored whole, so ScaNN's answer is exact."""
    pytest.importorskip("scann", reason="ScaNN runs on Linux alone")
    run = open_tiny(data, tmp_path, retrieval={"backend": "scann", "ahead": 0})
    with builder(run):
        final = train(run)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), final, sturdy.__dict__["final"])


@pytest.mark.slow
def test_the_query_tower_of_the_generation_searches_where_asked(data, sturdy, tmp_path):
    run = open_tiny(data, tmp_path, retrieval={"query_params": "generation"})
    with builder(run):
        final = train(run)
    folder = PosixFolder(run.workdir)
    assert adoptions(run) == adoptions(sturdy)
    assert {4, 6} <= set(export_steps(folder)), "the towers that search stay as long as their vectors"
    same = jax.tree.leaves(jax.tree.map(np.array_equal, final, sturdy.__dict__["final"]))
    assert not all(same)


def test_a_generation_that_is_gone_at_a_restart_is_built_again_with_the_same_bits(data, sturdy, tmp_path, monkeypatch):
    run = open_tiny(data, tmp_path)
    cut_at(monkeypatch, 7)
    with builder(run), pytest.raises(Cut):
        train(run)
    folder = PosixFolder(run.workdir)
    for name in generation_names(folder):
        remove_generation(folder, name)
    with builder(run):
        final = train(run)
    assert 4 in {step_of(name) for name in generation_names(folder)}, "the checkpoint of step 6 names it"
    jax.tree.map(np.testing.assert_array_equal, final, sturdy.__dict__["final"])


def test_a_run_without_a_builder_says_so_and_goes_on_once_there_is_one(data, sturdy, tmp_path, caplog):
    run = open_tiny(data, tmp_path, wait_seconds=0.05)
    with pytest.raises(UserError, match="the first generation did not come within config.refresh.wait_seconds=0.05"):
        train(run)
    run.config.refresh.wait_seconds = 60.0
    with builder(run):
        jax.tree.map(np.testing.assert_array_equal, train(run), sturdy.__dict__["final"])


@pytest.mark.slow
def test_a_builder_may_come_first_and_ends_when_the_trainer_is_done(data, tmp_path):
    run = open_tiny(data, tmp_path)
    job, stop = make_job(run), Stop()
    thread = threading.Thread(target=job.work, args=(stop, None, False))
    thread.start()
    train(run)
    thread.join(30)
    assert not thread.is_alive()
    assert read_status(PosixFolder(run.workdir), "trainer").done


def test_a_run_that_is_done_is_not_extended_and_its_builder_ends(data, sturdy, caplog):
    """The learning rate's schedule knows the number of steps: more of them would have been another run."""
    with pytest.raises(UserError, match=r"config.realm.steps is 20, but the run in .* has 8; set it back"):
        open_tiny(data, sturdy.workdir, steps=20)
    job = make_job(sturdy)
    job._options.idle_exit = 0.1
    with caplog.at_level(logging.INFO):
        job.work(Stop(), None, False)
    assert "the trainer is done" in caplog.text


@pytest.mark.parametrize("fault", ["truncated", "flipped", "nan", "manifest"])
def test_a_damaged_generation_is_refused_and_built_again(data, sturdy, tmp_path, monkeypatch, caplog, fault):
    """The damage is done between publication and the trainer's look; the trainer adopts the second attempt in time."""
    run = open_tiny(data, tmp_path)
    build, look, damaged, gate = build_index.Builder.build, Follower._look, [], threading.Lock()

    def spoiled(self, export, embed, queries):
        with gate:
            manifest = build(self, export, embed, queries)
            if export.step == 2 and not damaged:
                damaged.append(manifest.generation)
                spoil(self.folder, manifest, fault)
        return manifest

    def gated(self):
        with gate:
            look(self)

    monkeypatch.setattr(Follower, "_look", gated)
    monkeypatch.setattr(build_index.Builder, "build", spoiled)
    with caplog.at_level(logging.WARNING), builder(run):
        final = train(run)
    jax.tree.map(np.testing.assert_array_equal, final, sturdy.__dict__["final"])
    assert damaged and damaged[0] in caplog.text


def spoil(folder, manifest, fault):
    name = manifest.chunks[0].file.name
    if fault == "manifest":
        folder.write(f"index/{manifest.generation}/MANIFEST.json", b'{"format_version": 1, "generation')
    elif fault == "nan":
        data = np.full((6, manifest.width), np.nan, np.float32).tobytes()
        text = folder.read(f"index/{manifest.generation}/MANIFEST.json").decode()
        entry = folder.put(name, data)
        text = text.replace(manifest.chunks[0].file.sha256, entry.sha256)
        folder.write(f"index/{manifest.generation}/MANIFEST.json", text.encode())
    else:
        data = folder.read(name)
        folder.write(name, data[:-3] if fault == "truncated" else data[:9] + bytes([data[9] ^ 4]) + data[10:])


@pytest.mark.slow
def test_as_soon_as_it_is_ready(data, tmp_path):
    """Without fixed steps every generation that is adopted is newer than the one before, and none is from later."""
    run = open_tiny(data, tmp_path, steps=40, adopt_after=-1)
    with builder(run):
        train(run)
    found = adoptions(run)
    assert found[0] == (0, 0) and len(found) > 1
    assert all(index < later and index <= step for (_, index), (step, later) in zip(found, found[1:], strict=False))


def test_processes_adopt_the_same_generation_at_the_same_step(data, tmp_path, monkeypatch):
    """Two trainer processes, of which the second looks for generations now and then: none is adopted before both have
    it, although newer ones come faster than the second looks."""
    run = open_tiny(data, tmp_path, adopt_after=-1, every=3)
    params, look = run.initial_params(), Follower._look
    words, used, adopted = deque(maxlen=2), [None, None], []
    with builder(run), Adoption(run, "realm", 0, {}, 1) as first, Adoption(run, "realm", 0, {}, 1) as second:
        for step in range(90):
            if step == 1:
                monkeypatch.setattr(
                    Follower, "_look", lambda follower: look(follower) if follower is first._follower else None
                )
            if step % 10 == 9:
                look(second._follower)
            heard = Ready(*agreed(jnp.array(words[0])).tolist()) if len(words) == 2 else Ready()
            found = [one.at(step, params, used[i], heard, lambda: False) for i, one in enumerate((first, second))]
            used = [now or before for now, before in zip(found, used, strict=True)]
            assert used[0].generation == used[1].generation
            if found[0] is not None:
                adopted.append(used[0].step)
            words.append([first.announce(step), second.announce(step)])
            time.sleep(0.02)
    assert len(adopted) > 2 and adopted == sorted({*adopted})


@pytest.mark.slow
def test_an_index_that_grows_too_old_is_told_or_waited_for(data, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    run = open_tiny(data, tmp_path / "warn", adopt_after=-1, max_age=3)
    with_first_generation_only(run, lambda: train(run))
    assert "the index is 4 steps old (config.refresh.max_age=3); is `realm build-index` running?" in caplog.text
    caplog.clear()
    run = open_tiny(data, tmp_path / "wait", adopt_after=-1, max_age=3, when_stale="wait")
    with_first_generation_only(run, lambda: train(run), seconds=0.2)
    assert "the index is 4 steps old; waiting for a newer one" in caplog.text
    assert "going on with the old index" in caplog.text


def with_first_generation_only(run, act, seconds=60.0):
    """`act` beside a builder that dies after the first generation; then `wait_seconds` is `seconds`."""
    folder = PosixFolder(run.workdir)
    done = threading.Event()

    def first():
        while not done.is_set():
            if 0 in export_steps(folder) and read_export(folder, 0):
                make_job(run).work(Stop(), 0, True)
                run.config.refresh.wait_seconds = seconds
                return
            time.sleep(0.01)

    thread = threading.Thread(target=first)
    thread.start()
    try:
        act()
    finally:
        done.set()
        thread.join()
        run.config.refresh.wait_seconds = 60.0


def test_a_builder_of_another_corpus_is_refused(data, sturdy, tmp_path):
    other = prepare_people(tmp_path, [f"{name} Junior" for name in PEOPLE])
    config = for_embedding(sturdy.config)
    config.data.path = str(other)
    job = Job(
        make_run(config, sturdy.workdir, open_sources(other), jax.devices()[:1]), PosixFolder(sturdy.workdir), Share()
    )
    with pytest.raises(UserError, match=r"exports/6 was written by a run with other (tokenizer|corpus)"):
        job.work(Stop(), 6, True)


def test_a_generation_of_another_corpus_is_never_adopted(data, sturdy, tmp_path):
    """Its name follows from parameters and corpus, so that a foreign one is not even looked at; by name it is refused
    with a word, and not built again."""
    run = open_tiny(data, tmp_path)
    with builder(run):
        train(run)
    folder = PosixFolder(run.workdir)
    own = generation_names(folder)[-1]
    manifest = folder.read_json(f"index/{own}/MANIFEST.json")
    foreign = f"{step_of(own)}-f123abcd"
    folder.write_json(f"index/{foreign}/MANIFEST.json", manifest | {"generation": foreign, "corpus": "another"})
    with Adoption(run, "realm", STEPS, {}, 1) as adoption:
        follower = adoption._follower
        follower.want(0, 100)
        assert follower.wait(10, lambda: False).manifest.generation == own
        with pytest.raises(Foreign, match="its corpus is another, not"):
            follower.load(foreign)


def test_a_builder_with_other_vectors_than_the_trainer_wants_is_told(sturdy):
    config = for_embedding(sturdy.config)
    config.retrieval.dtype = "bfloat16"
    opened = make_run(config, sturdy.workdir, sturdy.sources, jax.devices()[:1])
    with pytest.raises(UserError, match="exports/6 was written by a run with other index"):
        Job(opened, PosixFolder(sturdy.workdir), Share()).work(Stop(), 6, True)


def test_once_builds_the_newest_export_or_finds_it_built(sturdy, caplog):
    with caplog.at_level(logging.INFO):
        make_job(sturdy).work(Stop(), None, True)
    assert "generation 6-" in caplog.text


class StopWhen(Stop):
    """SIGTERM comes once `due` says so."""

    due = staticmethod(lambda: False)

    @property
    def asked(self):
        return self.due()

    @asked.setter
    def asked(self, value):
        pass


def test_sigterm_while_waiting_saves_and_goes_on_with_the_same_bits(data, sturdy, tmp_path, monkeypatch):
    """The generation of step 2 is due at step 3, where there is nobody to build it."""
    run = open_tiny(data, tmp_path)
    with_first_generation_only(run, lambda: train_until_waiting(run, monkeypatch))
    assert Saved.newest(run.workdir / "realm" / "checkpoints").step == 3
    with builder(run):
        jax.tree.map(np.testing.assert_array_equal, train(run), sturdy.__dict__["final"])
    assert adoptions(run) == adoptions(sturdy)


def train_until_waiting(run, monkeypatch):
    with monkeypatch.context() as patch:
        waiting = threading.Event()
        wait = Adoption._wait

        def watched(self, first, *rest):
            if first == 2:
                waiting.set()
            return wait(self, first, *rest)

        patch.setattr(Adoption, "_wait", watched)
        patch.setattr(StopWhen, "due", staticmethod(waiting.is_set))
        patch.setattr(loop, "Stop", StopWhen)
        with pytest.raises(loop.Preempted, match="saved realm at step 3"):
            train(run)


def test_a_generation_that_does_not_come_in_time_costs_no_step(data, sturdy, tmp_path):
    run = open_tiny(data, tmp_path)
    with pytest.raises(UserError, match="generation of step 2, due at step 3 did not come"):
        with_first_generation_only(run, lambda: train(run), seconds=3.0)
    assert Saved.newest(run.workdir / "realm" / "checkpoints").step == 3
    with builder(run):
        jax.tree.map(np.testing.assert_array_equal, train(run), sturdy.__dict__["final"])


@pytest.mark.parametrize("after", [0, 2, pytest.param(5, marks=pytest.mark.slow)])
def test_any_checkpoint_that_is_kept_can_be_gone_on_from(data, tmp_path, after):
    """Also the one before the newest, and with several generations on their way."""
    run = open_tiny(data, tmp_path, adopt_after=after, keep=1)
    with builder(run):
        final = train(run)
    seen = metrics(run)
    checkpoints = run.workdir / "realm" / "checkpoints"
    shutil.rmtree(checkpoints / "8")
    assert Saved.newest(checkpoints).step == 6
    with builder(run):
        jax.tree.map(np.testing.assert_array_equal, train(run), final)
    assert metrics(run) == seen


def test_without_the_generation_and_its_export_training_goes_on_with_another(data, tmp_path, caplog):
    """And with newer ones afterwards."""
    run = open_tiny(data, tmp_path)
    with builder(run):
        train(run)
    folder = PosixFolder(run.workdir)
    shutil.rmtree(run.workdir / "realm" / "checkpoints" / "8")  # the one before names the generation of step 4
    for name in generation_names(folder):
        if step_of(name) >= 4:
            remove_generation(folder, name)
    remove_export(folder, 4)
    remove_export(folder, 6)
    with builder(run), caplog.at_level(logging.WARNING):
        train(run)
    assert "going on with generation 2-" in caplog.text
    assert "exports/4 is not there; going on with the index of step 2 until the next one is due" in caplog.text
    assert adoptions(run)[-1] == (7, 6)


@pytest.mark.parametrize("after", [1, -1])
def test_what_a_cut_off_timeline_left_is_never_served(data, tmp_path, after):
    run = open_tiny(data, tmp_path, adopt_after=after)
    with builder(run):
        train(run)
    folder = PosixFolder(run.workdir)
    shutil.rmtree(run.workdir / "realm" / "checkpoints" / "8")
    other = jax.tree.map(lambda x: x * 1.5, run.initial_params())
    towers = to_arrays({name: other[name] for name in run.model.embedder_names})
    write_export(folder, export_record(run, 7), towers, sample_vectors(run, other))
    make_job(run).work(Stop(), 7, True)
    assert 7 in {step_of(name) for name in generation_names(folder)}
    with builder(run):
        train(run)
    assert read_export(folder, 7) is None
    assert 7 not in {index for _, index in adoptions(run)}


def test_training_goes_on_while_exports_cannot_be_written(data, tmp_path, monkeypatch, caplog):
    """Storage takes the first export and no other."""
    run = open_tiny(data, tmp_path, adopt_after=-1)
    put = PosixFolder.put

    def full(self, name, content):
        if name.startswith("exports/") and not name.startswith("exports/0/"):
            raise StorageError(f"{name}: No space left on device")
        return put(self, name, content)

    monkeypatch.setattr(PosixFolder, "put", full)
    with caplog.at_level(logging.WARNING), builder(run):
        train(run)
    assert "the export of step 2 is not written yet: exports/2/" in caplog.text
    assert "the export of step 4 is left out: an earlier one is still being written" in caplog.text
    assert "the export of step 2 is given up" in caplog.text
    assert {index for _, index in adoptions(run)} == {0}


def test_a_shared_folder_of_another_run_is_refused(data, sturdy, tmp_path):
    run = open_tiny(data, tmp_path / "run", shared=str(sturdy.workdir))
    with pytest.raises(UserError, match=r"config.refresh.shared: .* is another run's"):
        train(run)


def test_generations_are_listed_verified_and_removed_by_hand(sturdy, tmp_path, capsys):
    shutil.copytree(sturdy.workdir, tmp_path / "run")
    workdir, folder = f"--workdir={tmp_path}/run", PosixFolder(tmp_path / "run")
    assert cli.main(["index", "ls", "--json", workdir]) == 0
    found = {entry["step"]: entry for entry in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found[6]["state"] == "published" and found[6]["in_use"] and found[4]["pinned"]
    assert (found[6]["rows"], found[6]["age"]) == (16, 2)
    assert cli.main(["index", "verify", workdir]) == 0
    name = found[6]["generation"]
    spoil(folder, read_manifest(folder, name), "flipped")
    assert cli.main(["index", "verify", workdir]) == 1
    assert f"{name}: DAMAGED: " in capsys.readouterr().out
    assert cli.main(["index", "rm", name, workdir]) == 2
    assert "is needed by the run to go on; remove it all the same with --force" in capsys.readouterr().err
    assert cli.main(["index", "rm", name, "--force", workdir]) == 0
    assert name not in generation_names(folder)
    assert cli.main(["index", "rm", name, workdir]) == 2


def test_the_final_parameters_are_in_the_checkpoint(sturdy):
    saved = restore_params(sturdy, sturdy.workdir, "realm", sturdy.initial_params())
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, saved), sturdy.__dict__["final"])


def test_bytes_do_not_depend_on_processes_and_devices(data, tmp_path):
    """`realm build-index` as one process with one device, and as two processes with four devices each."""
    chunks = []
    for processes, devices in ((1, 1), (2, 4)):
        run = open_tiny(data, tmp_path / str(processes))
        params = run.initial_params()
        towers = to_arrays({name: params[name] for name in run.model.embedder_names})
        folder = PosixFolder(run.workdir)
        write_export(folder, export_record(run, 0), towers, sample_vectors(run, params))
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "realm_jax.cli", "build-index", f"--workdir={run.workdir}", "--step=0"]
        started = [
            subprocess.Popen([*command, f"--process={one}", f"--processes={processes}"], env=os.environ | flags)
            for one in range(processes)
        ]
        assert [process.wait(120) for process in started] == [0] * processes
        manifest = read_manifest(folder, generation_names(folder)[0])
        chunks.append([(chunk[:3], chunk.file.bytes, chunk.file.sha256) for chunk in manifest.chunks])
    assert len(chunks[0]) == 3 and chunks[0] == chunks[1]
