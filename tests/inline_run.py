"""A tiny REALM run that makes its index itself: six steps, a refresh and a checkpoint every second step."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from tiny_run import tiny_config

from realm_jax.data.sources import open_sources
from realm_jax.evaluation.predict import Evaluator
from realm_jax.run import Run, make_run
from realm_jax.training.loop import train_task
from realm_jax.training.metrics import TIMES, read_lines
from realm_jax.training.restore import restore_params
from realm_jax.training.workdir import check_workdir

STEPS = 6


def open_tiny(people: Path, workdir: Path, devices: int = 1, **changes: Any) -> Run:
    """A run of the task 'realm'; `changes`: dotted config keys, with two underscores for the dot."""
    config = tiny_config(people)
    config.tasks, config.ict.batch_size, config.qa.batch_size = "realm", 8, 8
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


def records(run: Run, name: str, folder: str = "realm") -> list[dict[str, Any]]:
    """The lines of a records file but for times."""
    lines = read_lines(run.workdir / folder / f"{name}.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def final_params(run: Run) -> Any:
    return jax.tree.map(np.asarray, restore_params(run, "realm"))


def assert_same_run(a: Run, b: Run) -> None:
    """Equal parameters, metrics and measurements, bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, final_params(a), final_params(b))
    for name in ("metrics", "evaluations"):
        assert records(a, name) == records(b, name)
        assert records(a, name)
