"""The train loop on a tiny REALM run: cut off and repeated, on other devices, with other configs, and diverging.

`sturdy` runs six steps with an index refreshed and a checkpoint saved every second step; every test compares with it.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from quick import quick_compiler
from tiny_run import prepare_people, tiny_config

from realm_jax.data.sources import open_sources
from realm_jax.evaluation.predict import Evaluator
from realm_jax.run import Run, make_run
from realm_jax.training import loop
from realm_jax.training.loop import Preempted, check_workdir, refresh, restore_params, train_task
from realm_jax.training.metrics import read_lines
from realm_jax.training.state import make_step

STEPS = 6
TIMES = ("seconds", "steps_per_second", "wait_data")


class Cut(Exception):
    """Stands for the power going off."""


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    """Runs of one test after another share their compiled step."""
    steps: dict[Any, Any] = {}

    def make(run: Run, task: Any) -> Any:
        key = task.name, run.setting, run.config[task.name].to_json()
        return steps.setdefault(key, make_step(run, task))

    with quick_compiler(tmp_path_factory.mktemp("compiled")), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_step", make)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return prepare_people(tmp_path_factory.mktemp("people"))


def open_tiny(data: Path, workdir: Path, devices: int = 1, **changes: Any) -> Run:
    """A run of the task 'realm'; `changes`: dotted config keys, with two underscores for the dot."""
    config = tiny_config(data)
    config.tasks = "realm"
    config.realm.update({"steps": STEPS, "batch_size": 8, "warmup": 2, "learning_rate": 1e-3})
    config.update({"refresh": {"every": 2}, "checkpoint": {"every": 2, "keep": 2}, "log": {"every": 1}})
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    run = make_run(config, workdir, open_sources(config.data.path), jax.devices()[:devices])
    check_workdir(run)
    return run


def train(run: Run, name: str = "realm") -> Any:
    evaluator = Evaluator(run, run.sources.questions["dev"])

    def measure(params: Any, index: Any, final: bool) -> dict[str, Any]:
        return evaluator.recall(params, index)

    return train_task(run, name, run.initial_params(), measure)


@pytest.fixture(scope="module")
def sturdy(data, tmp_path_factory) -> Run:
    run = open_tiny(data, tmp_path_factory.mktemp("sturdy"))
    train(run)
    return run


def at_step(monkeypatch, act: Callable[[int], None]) -> None:
    """Has `act(step)` called before each step of the loop."""
    make = loop.make_step

    def watched(run: Run, task: Any) -> Any:
        step = make(run, task)

        def call(state: Any, *rest: Any) -> Any:
            act(int(state.step))
            return step(state, *rest)

        return call

    monkeypatch.setattr(loop, "make_step", watched)


def records(run: Run, name: str, folder: str = "realm") -> list[dict[str, Any]]:
    """The lines of a records file but for times."""
    lines = read_lines(run.workdir / folder / f"{name}.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def final_params(run: Run) -> Any:
    return jax.tree.map(np.asarray, restore_params(run, run.workdir, "realm", jax.eval_shape(run.initial_params)))


def assert_same_run(a: Run, b: Run) -> None:
    """Equal parameters, metrics and measurements, bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, final_params(a), final_params(b))
    for name in ("metrics", "evaluations"):
        assert records(a, name) == records(b, name)
        assert records(a, name)


# --- Cut off and repeated


def test_a_run_that_is_cut_off_twice_ends_as_one_that_never_was(data, sturdy, tmp_path, monkeypatch):
    """Once between two checkpoints, and once when a checkpoint and a refresh have just been made."""
    left = [3, 4]

    def cut(step: int) -> None:
        if left and step == left[0]:
            left.pop(0)
            raise Cut

    run = open_tiny(data, tmp_path)
    with monkeypatch.context() as patch:
        at_step(patch, cut)
        for _ in range(2):
            with pytest.raises(Cut):
                train(run)
    train(run)
    assert not left
    assert_same_run(run, sturdy)


def test_what_is_done_is_not_repeated(sturdy, monkeypatch):
    monkeypatch.setattr(loop, "make_step", None)
    files = {path: path.stat().st_mtime_ns for path in sturdy.workdir.rglob("*") if path.is_file()}
    params = train(sturdy)
    jax.tree.map(np.testing.assert_array_equal, final_params(sturdy), jax.tree.map(np.asarray, params))
    assert files == {path: path.stat().st_mtime_ns for path in sturdy.workdir.rglob("*") if path.is_file()}


@pytest.mark.parametrize("last", [2, STEPS - 1, STEPS])
def test_sigterm_saves_and_the_next_start_loses_no_step(data, sturdy, tmp_path, monkeypatch, last):
    """It comes within a step, within the last step, or while the last index is being made."""
    calls = []

    def note(step: int) -> None:
        calls.append(step)
        if step == last:
            os.kill(os.getpid(), signal.SIGTERM)

    def late(*arguments: Any, **options: Any) -> Any:
        if last == STEPS and len(calls) == STEPS:
            os.kill(os.getpid(), signal.SIGTERM)
        return refresh(*arguments, **options)

    run = open_tiny(data, tmp_path, checkpoint__every=100)
    at_step(monkeypatch, note)
    monkeypatch.setattr(loop, "refresh", late)
    with pytest.raises(Preempted, match=f"saved realm at step {min(last + 1, STEPS)}; repeat the command"):
        train(run)
    last = -1
    train(run)
    assert calls == list(range(STEPS))
    assert_same_run(run, sturdy)
