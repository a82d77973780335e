"""Tiny runs of one task: opened, cut off before a step, with an index builder beside them, and compared.

`open_inline` makes its index itself; `open_tiny` takes it from a builder, which runs in a thread of the test and works
whenever it is told to, so that nothing depends on the clock.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from tiny_run import open_config, tiny_config

from realm_jax.assemble import abstract_run, make_run
from realm_jax.config import flatten
from realm_jax.eval.prediction import Evaluator
from realm_jax.host import Preempted, Stop
from realm_jax.indexing.build import Builder, for_embedding
from realm_jax.indexing.exporter import Exporter
from realm_jax.indexing.job import Job
from realm_jax.indexing.provider import shared_folder
from realm_jax.launch.local import free_port
from realm_jax.launch.plan import abstract_arguments
from realm_jax.models.layers import Params
from realm_jax.processes import WorkerSlice
from realm_jax.run import Run
from realm_jax.tasks import make_task
from realm_jax.tasks.base import Task
from realm_jax.tasks.step_flops import step_flops
from realm_jax.train import loop
from realm_jax.train.loop import train_task
from realm_jax.train.metrics import TIMES
from realm_jax.train.recipe import report_status
from realm_jax.train.records import read_lines
from realm_jax.train.restore import restore_params
from realm_jax.train.step import make_step

STEPS = 8  # of every run, so that all have the same program: the schedule of the learning rate knows their number
EVERY = 2  # steps between two exports of a run that does not make its index itself
OPTIMISED = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}  # of a process that runs long; see conftest.py
PATIENCE = 300.0  # seconds that trainer and builder wait for each other, on a machine that does much else

# --- Opened and trained -----------------------------------------------------------------------------------------------


def set_key(run: Run, key: str, value: Any) -> None:
    """Change a key in the config of an opened run, such as one that a test cannot wait for."""
    section, _, name = key.partition(".")
    object.__setattr__(run.config[section], name, value)  # in place, since parts of the run hold the section


@contextmanager
def shared_steps() -> Iterator[None]:
    """Runs of one test after another share their compiled step."""
    steps: dict[Any, Any] = {}

    def make(task: Task) -> Any:
        config, settings = task.run.config, task.settings
        rates = settings.steps, settings.batch_size, settings.learning_rate  # which are not compared in settings
        key = task.name, task.context, settings, rates, config.qa, config.refresh.every == 0
        return steps.setdefault(key, make_step(task))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_step", make)
        yield


def inline_config(people: Path, **changes: Any) -> ConfigDict:
    """Eight steps of the task 'realm', a refresh and a checkpoint every second one.

    changes: dotted config keys, with two underscores for the dot.
    """
    config = tiny_config(people)
    config.tasks, config.ict.batch_size, config.qa.batch_size = "realm", 8, 8
    config.realm.update({"steps": STEPS, "batch_size": 8, "learning_rate": 1e-3})
    config.optimizer.warmup = 2
    config.update({"refresh": {"every": 2}, "checkpoint": {"every": 2, "keep": 2}, "log": {"every": 1}})
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return config


def open_inline(people: Path, workdir: Path, devices: int = 1, **changes: Any) -> Run:
    return open_config(inline_config(people, **changes), workdir, devices)


def open_tiny(data, workdir, steps=STEPS, retrieval=None, task="realm", ahead=1, **refresh):
    """Eight steps of a task whose index a builder makes: an export every second one, adopted a step later.

    retrieval, refresh: keys of these sections; ahead: of searches by the hosts.
    """
    config = inline_config(data, tasks=task, mlm__batch_size=8, checkpoint__every=3)
    config.scann.ahead = ahead
    config[task].update({"steps": steps, "learning_rate": 1e-3})
    config.retrieval.update(retrieval or {})
    config.refresh.update({"mode": "async", "every": EVERY, "adopt_after": 1, "wait_seconds": PATIENCE} | refresh)
    return open_config(config, workdir)


class Trained(NamedTuple):
    """A run that is done, and its last parameters."""

    run: Run
    final: Params


def train(run):
    with report_status(run) as status:
        final = train_task(run, run.config.tasks, run.initial_params(), status=status)
        return jax.tree.map(np.asarray, final)


def train_with_builder(run):
    """The last parameters of a run with an index builder beside it."""
    with builder(run):
        return train(run)


def train_measured(run: Run, name: str = "realm") -> Any:
    """With recall on the development questions."""
    evaluator = Evaluator(run, run.sources.questions["dev"])

    def measure(params: Any, index: Any, final: bool) -> dict[str, Any]:
        return evaluator.recall(params, index)

    return train_task(run, name, run.initial_params(), measure)


# --- Cut off ----------------------------------------------------------------------------------------------------------


class Cut(Exception):
    """Stands for the power going off."""


def at_step(monkeypatch, act: Callable[[int], None]) -> None:
    """Has `act(step)` called before each step of the loop."""
    make = loop.make_step

    def watched(task: Any) -> Any:
        step = make(task)
        return lambda state, *rest: act(int(state.step)) or step(state, *rest)

    monkeypatch.setattr(loop, "make_step", watched)


def cut_at(monkeypatch, *wanted: int) -> None:
    """Cut a run off before these steps, one after the other, each once."""
    left = list(wanted)

    def cut(step: int) -> None:
        if left and step == left[0]:
            left.pop(0)
            raise Cut

    at_step(monkeypatch, cut)


def cut_off(monkeypatch, work: Callable[[], Any], *steps: int) -> None:
    """Train by `work`, again and again; the power goes off before each of these steps."""
    with monkeypatch.context() as patch:
        cut_at(patch, *steps)
        for _ in steps:
            with pytest.raises(Cut):
                work()


# --- With a builder beside them ---------------------------------------------------------------------------------------


def make_job(run, process=0, processes=1):
    own = make_run(for_embedding(run.config, jax.local_device_count()), run.workdir, run.sources, jax.devices()[:1])
    return Job(own, shared_folder(run), WorkerSlice(process, processes))


@contextmanager
def builder(run, process=0, processes=1):
    """`realm build-index` in a thread; what it raises is raised at the end."""
    faults, stop = [], Stop()

    def work():
        try:
            make_job(run, process, processes).work(stop, None, False)
        except Preempted:
            pass
        except Exception as fault:
            faults.append(fault)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.requested = True
        thread.join()
    if faults:
        raise faults[0]


def spoil(folder, manifest, fault):
    """Damage a generation's first chunk, or its manifest."""
    chunk, record = manifest.chunks[0].file, f"index/{manifest.generation}/MANIFEST.json"
    data, text = folder.read(chunk.name), folder.read(record)
    if fault == "manifest":
        folder.write(record, text[:40])
    elif fault == "nan":
        written = folder.write_entry(chunk.name, np.full((6, manifest.width), np.nan, np.float32).tobytes())
        folder.write(record, text.replace(chunk.sha256.encode(), written.sha256.encode()))
    else:
        folder.write(chunk.name, data[:-3] if fault == "truncated" else data[:9] + bytes([data[9] ^ 4]) + data[10:])


@contextmanager
def first_generation_only(run, seconds=PATIENCE):
    """A builder beside a run that dies after the first generation; then `wait_seconds` is `seconds`."""
    build = Builder.build

    def die(self, export, *rest):
        if export.step > 0:
            set_key(run, "refresh.wait_seconds", seconds)
            raise Preempted
        return build(self, export, *rest)

    with pytest.MonkeyPatch.context() as patch, builder(run):
        patch.setattr(Builder, "build", die)
        yield
    set_key(run, "refresh.wait_seconds", PATIENCE)


# --- As commands, in processes of their own ---------------------------------------------------------------------------


def flags_of(config):
    """The command line that gives a config. Keys that are None keep that default."""
    return [f"--config.{key}={value}" for key, value in flatten(config.to_dict()).items() if value not in ("", None)]


def start(workdir, flags, count=1, devices=8, quick=True):
    """`realm train` in `count` processes that share the devices. quick: compile as the tests do.

    Runs in folders side by side share the vectors that they start with.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options["env"] = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices // count),
        "REALM_CACHE": str(workdir.parent / "cache"),
        "REALM_CACHE_BYTES": "1000000",
        **({} if quick else OPTIMISED),
    }
    command = [sys.executable, "-m", "realm_jax", "train", f"--workdir={workdir}", *flags]
    if count == 1:
        return [subprocess.Popen(command, **options)]
    command += [f"--processes={count}", f"--coordinator=localhost:{free_port()}"]
    return [subprocess.Popen([*command, f"--process={process}"], **options) for process in range(count)]


def finish(started, code=0, seconds=300):
    outputs = [process.communicate(timeout=seconds)[0] for process in started]
    assert [process.returncode for process in started] == [code] * len(started), "\n".join(outputs)[-5000:]
    return outputs


def planned_parts(run: Run, name: str) -> dict[str, float]:
    """The parts of a step's operations; its examples are as its shapes say, and a step compiles from those alone."""
    task = make_task(name, run)
    example = task.examples(run.initial_params(), None).make(0, np.random.default_rng(0))
    shapes = {key: (np.shape(value), np.asarray(value).dtype) for key, value in example.items()}
    assert shapes == {key: (shape, np.dtype(dtype)) for key, (shape, dtype) in task.example_spec().items()}
    bare = abstract_run(run.config, run.workdir, 1000, 300, jax.devices()[:1])
    jax.eval_shape(make_step(make_task(name, bare)), *abstract_arguments(bare, name))
    return step_flops(make_task(name, bare))


# --- Looked at --------------------------------------------------------------------------------------------------------


def records(run: Run, name: str, folder: str = "") -> list[dict[str, Any]]:
    """The lines of a task's records but for times. folder: the task's, where the run has one task only."""
    lines = read_lines(run.workdir / (folder or run.config.tasks) / f"{name}.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def metrics(run):
    return records(run, "metrics")


def adoptions(run):
    found = read_lines(run.workdir / "realm" / "evaluations.jsonl")
    return [(line["step"], line["index_step"]) for line in found if "generation" in line]


class Watch:
    """Every index that training steps saw, and the towers of every export, on their way to storage."""

    def __init__(self, monkeypatch):
        self._seen, self._exported = [], {}
        make, export = loop.make_step, Exporter.export

        def watched(task):
            step = make(task)

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
        assert {step for step, _ in self._seen} == {*range(run.config.realm.steps)}
        fresh = {index: run.embed(self._exported[index]) for _, index in adopted}
        for step, vectors in self._seen:
            index = max(entry for entry in adopted if entry[0] <= step)[1]
            np.testing.assert_allclose(vectors[: len(fresh[index])], fresh[index], atol=1e-5)


def final_params(run: Run) -> Any:
    return jax.tree.map(np.asarray, restore_params(run, "realm"))


def assert_same_run(a: Run, b: Run) -> None:
    """Equal parameters, metrics and measurements, bit for bit."""
    assert_same(final_params(a), final_params(b))
    for name in ("metrics", "evaluations"):
        assert records(a, name) == records(b, name)
        assert records(a, name)


def assert_same(params, others):
    """The same bits."""
    jax.tree.map(np.testing.assert_array_equal, params, others)


def largest_change(params, others) -> float:
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), params, others)))


def until(true, seconds=60.0):
    """Return once `true()` is; AssertionError if that takes too long."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, "it did not happen"
        time.sleep(0.01)
