"""How many steps fit in the minutes that there are, measured before the first one on the machine that takes them.

Not for promises: the estimate is of a machine that does nothing else. Read next: `adaptation.py`.
"""

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.data.examples import Examples, batches
from realm_jax.index.control import ControlSignal, put_control
from realm_jax.models.layers import Params
from realm_jax.retrieval import bm25
from realm_jax.run import Run, local_rows, make_global_batch
from realm_jax.tasks import make_task
from realm_jax.tasks.base import Task
from realm_jax.train.step import make_step, start_state

SAMPLE = 256  # passages that are embedded to see how long it takes
STEPS = 3  # of each task, after the first


class StepTime(NamedTuple):
    """Seconds of a task's first step, which is compiled anew whenever its steps are others, and of each later one."""

    first: float
    later: float


def seconds_of(work: Callable[[], Any]) -> float:
    """How long something takes, once it is compiled."""
    jax.block_until_ready(work())
    began = time.monotonic()
    jax.block_until_ready(work())
    return time.monotonic() - began


def seconds_to_embed(run: Run, params: Params) -> float:
    """How long the corpus takes, by SAMPLE passages spread evenly over it."""
    count = min(SAMPLE, run.context.rows)
    rows = np.linspace(0, run.context.rows - 1, count).astype(int)
    sample = run.corpus.take(rows)
    return seconds_of(lambda: run.embed(params, rows=sample)) * run.context.rows / count


def step_time(task: Task, params: Params) -> StepTime:
    """How long the steps of a task take; what its vectors hold makes no difference."""
    run, size = task.run, task.settings.batch_size
    zeros = np.zeros((run.context.rows, run.model.vector_size), np.float32)
    rows = local_rows(run.mesh, size)
    stream = batches(examples_of(task, params, zeros), run.config.seed, task.stream, size, 0, 1 + STEPS, rows)
    step, index, control = make_step(task), run.index(zeros), put_control(run.mesh, ControlSignal())
    state, seconds = start_state(task, jax.tree.map(jnp.copy, params)), list[float]()
    for batch in stream:
        began = time.monotonic()
        state, _ = step(state, make_global_batch(run.mesh, batch, rows, size), index, control)
        jax.block_until_ready(state)
        seconds.append(time.monotonic() - began)
    return StepTime(seconds[0], float(np.median(seconds[1:])))


def examples_of(task: Task, params: Params, vectors: NDArray) -> Examples:
    """What a task would learn from with these vectors, none of which it keeps for its training."""
    with tempfile.TemporaryDirectory() as folder:
        words = task.run.workdir / bm25.FOLDER
        if words.is_dir():
            (Path(folder) / bm25.FOLDER).symlink_to(words.absolute())
        task = make_task(task.name, dataclasses.replace(task.run, workdir=Path(folder)))
        return task.examples(params, lambda: vectors)


def steps_that_fit(most: Mapping[str, int], each: Mapping[str, float], seconds: float, least: int) -> dict[str, int]:
    """Steps of each task: the same share of its `most`, as large as fits, and `least` at least.

    each: seconds of a step.
    """
    whole = sum(most[name] * each[name] for name in most)
    share = min(1.0, max(0.0, seconds) / whole) if whole else 1.0
    return {name: max(min(least, count), int(count * share)) for name, count in most.items()}
