"""A tiny REALM run whose index another job builds.

The builder runs in a thread of the test and works whenever it is told to, so that nothing depends on the clock.
"""

import threading
import time
from contextlib import contextmanager
from typing import NamedTuple

import jax
import numpy as np
from tiny_run import tiny_config

from realm_jax.data.sources import open_sources
from realm_jax.index.builder import Stopped, WorkShare
from realm_jax.index.generations import export_steps, read_export
from realm_jax.jobs.build_index import Job, for_embedding
from realm_jax.jobs.recipe import reported
from realm_jax.models.realm import Params
from realm_jax.run import Run, make_run
from realm_jax.training import loop
from realm_jax.training.exporter import Exporter
from realm_jax.training.journal import TIMES
from realm_jax.training.loop import train_task
from realm_jax.training.metrics import read_lines
from realm_jax.training.preemption import Preempted, Stop
from realm_jax.training.refresh import shared_folder
from realm_jax.training.workdir import check_workdir

STEPS, EVERY, AFTER = 8, 2, 1
PATIENCE = 300.0  # seconds that either job waits for the other, on a machine that does much else


class Trained(NamedTuple):
    """A run that is done, and its last parameters."""

    run: Run
    final: Params


def open_tiny(data, workdir, steps=STEPS, retrieval=None, task="realm", **refresh):
    config = tiny_config(data)
    config.retrieval.update(retrieval or {})
    config.tasks = task
    for name in ("mlm", "ict", "realm", "qa"):
        config[name].batch_size = 8
    config[task].update({"steps": steps, "warmup": 2, "learning_rate": 1e-3})
    config.update({"checkpoint": {"every": 3, "keep": 2}, "log": {"every": 1}})
    config.refresh.update(
        {"mode": "async", "every": EVERY, "adopt_after": AFTER, "wait_seconds": PATIENCE, "idle_exit": PATIENCE}
        | refresh
    )
    run = make_run(config, workdir, open_sources(config.data.path), jax.devices()[:1])
    check_workdir(run)
    return run


def train(run):
    with reported(run) as status:
        final = train_task(run, run.config.tasks, run.initial_params(), status=status)
        return jax.tree.map(np.asarray, final)


def make_job(run, process=0, processes=1):
    own = make_run(for_embedding(run.config, jax.local_device_count()), run.workdir, run.sources, jax.devices()[:1])
    return Job(own, shared_folder(run), WorkShare(process, processes))


@contextmanager
def builder(run, process=0, processes=1):
    """`realm build-index` in a thread; what it raises is raised at the end."""
    faults, stop = [], Stop()

    def work():
        try:
            make_job(run, process, processes).work(stop, None, False)
        except (Preempted, Stopped):
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
    lines = read_lines(run.workdir / run.config.tasks / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def spoil(folder, manifest, fault):
    name = manifest.chunks[0].file.name
    if fault == "manifest":
        folder.write(f"index/{manifest.generation}/MANIFEST.json", b'{"format_version": 2, "generation')
    elif fault == "nan":
        data = np.full((6, manifest.width), np.nan, np.float32).tobytes()
        text = folder.read(f"index/{manifest.generation}/MANIFEST.json").decode()
        entry = folder.put(name, data)
        text = text.replace(manifest.chunks[0].file.sha256, entry.sha256)
        folder.write(f"index/{manifest.generation}/MANIFEST.json", text.encode())
    else:
        data = folder.read(name)
        folder.write(name, data[:-3] if fault == "truncated" else data[:9] + bytes([data[9] ^ 4]) + data[10:])


def with_first_generation_only(run, act, seconds=PATIENCE):
    """`act` beside a builder that dies after the first generation; then `wait_seconds` is `seconds`."""
    folder = shared_folder(run)
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
        run.config.refresh.wait_seconds = PATIENCE


class Watch:
    """Every index that training steps saw, and the towers of every export, on their way to storage."""

    def __init__(self, monkeypatch):
        self._seen, self._exported = [], {}
        make, export = loop.make_step, Exporter.export

        def watched(run, task):
            step = make(run, task)

            def call(state, batch, index, control):
                self._seen.append((int(state.step), np.asarray(index.vectors)))
                return step(state, batch, index, control)

            return call

        def kept(exporter, step, params, *rest, **options):
            names = exporter._run.model.embedder_names
            self._exported[step] = jax.tree.map(np.asarray, {name: params[name] for name in names})
            return export(exporter, step, params, *rest, **options)

        monkeypatch.setattr(loop, "make_step", watched)
        monkeypatch.setattr(Exporter, "export", kept)

    def check(self, run):
        """Every row that a step saw is what its generation's towers give; the adoption log says which one that is."""
        adopted = adoptions(run)
        assert {step for step, _ in self._seen} == set(range(run.config.realm.steps))
        fresh = {index: run.embed(self._exported[index]) for _, index in adopted}
        for step, vectors in self._seen:
            index = max(entry for entry in adopted if entry[0] <= step)[1]
            np.testing.assert_allclose(vectors[: len(fresh[index])], fresh[index], atol=1e-5)


def assert_same(params, others):
    """The same bits."""
    jax.tree.map(np.testing.assert_array_equal, params, others)


def until(true, seconds=60.0):
    """Return once `true()` is; AssertionError if that takes too long."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, "it did not happen"
        time.sleep(0.01)
