"""Training with an index that another job builds: adopted in time, served as exported, calm when something is amiss.

The builder runs in a thread of the test and works whenever it is told to, so that nothing depends on the clock.
"""

import logging
import threading
import time
from collections import deque
from contextlib import contextmanager, nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick_compiler
from tiny_run import prepare_people, tiny_config

from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.index.builder import Share, Stopped
from realm_jax.index.generations import (
    export_steps,
    generation_names,
    read_export,
    read_status,
    read_towers,
    remove_generation,
    step_of,
)  # fmt: skip
from realm_jax.jobs import build_index
from realm_jax.jobs.build_index import Job, for_embedding
from realm_jax.run import make_run
from realm_jax.storage import PosixFolder
from realm_jax.training import loop
from realm_jax.training.adoption import Adoption
from realm_jax.training.exporter import to_params
from realm_jax.training.follower import Follower
from realm_jax.training.loop import Stop, check_workdir, train_task
from realm_jax.training.metrics import read_lines
from realm_jax.training.refresh import Ready
from realm_jax.training.state import agreed, make_step

STEPS, EVERY, AFTER = 8, 2, 1


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    """Runs of one test after another share their compiled step."""
    steps = {}

    def make(run, task):
        key = task.name, run.setting, run.config[task.name].to_json()
        return steps.setdefault(key, make_step(run, task))

    with quick_compiler(tmp_path_factory.mktemp("compiled")), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_step", make)
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


def test_a_run_that_is_done_is_not_extended_and_its_builder_ends_at_once(data, sturdy, caplog):
    """The learning rate's schedule knows the number of steps: more of them would have been another run."""
    with pytest.raises(UserError, match=r"config.realm.steps is 20, but the run in .* has 8; set it back"):
        open_tiny(data, sturdy.workdir, steps=20)
    with caplog.at_level(logging.INFO):
        make_job(sturdy).work(Stop(), None, False)
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
