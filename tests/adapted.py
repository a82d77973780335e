"""Tiny runs of tasks that adapt the encoder to the passages without labels."""

import jax
import numpy as np
from runs import cut_at
from tiny_run import open_config, tiny_config

from realm_jax.assemble import abstract_run
from realm_jax.config import add_sections
from realm_jax.data.examples import dataset
from realm_jax.launch.plan import abstract_arguments
from realm_jax.run import put_batch
from realm_jax.tasks import make_task
from realm_jax.train.recipe import train
from realm_jax.train.step import loss_and_metrics, make_step

STEPS, BATCH = 12, 8


def opened(data, workdir, name, **changes):
    """Steps of one task, with its head at five times the rate; a checkpoint every fourth. changes: of its section."""
    config = tiny_config(data)
    config.tasks = name
    add_sections(config, [name])
    config[name].update({"steps": STEPS, "batch_size": BATCH, "learning_rate": 1e-2} | changes)
    config.optimizer.update({"preset": "short", "warmup": 1})
    config.update({"checkpoint": {"every": 4, "keep": 3}, "log": {"every": 1}})
    return open_config(config, workdir)


def trained_from_start(run, name):
    """What a run's task starts from, and its last parameters, on the host."""
    start = make_task(name, run).start(run.initial_params())
    return (jax.tree.map(np.array, part) for part in (start, train(run)))


def batch_of(run, name, size=BATCH):
    task = make_task(name, run)
    return put_batch(run.mesh, dataset(task.examples(run.initial_params(), None), 0, task.stream, size)[0])


def losses(run, name, *params):
    """Of parameters on one batch."""
    batch, task = batch_of(run, name, 16), make_task(name, run)
    loss = jax.jit(lambda params: loss_and_metrics(task, params, batch, None, None)[0])
    return [float(loss(one)) for one in params]


def trained_after_a_cut(run, monkeypatch, exception):
    """The last parameters of a run that is cut off between two checkpoints, and goes on."""
    with monkeypatch.context() as patch:
        cut_at(patch, 6)
        try:
            train(run)
        except exception:
            return jax.tree.map(np.asarray, train(run))
    raise AssertionError("the run was not cut off")


def planned_parts(run, name):
    """The parts of a step's operations; its examples are as its shapes say, and a step compiles from those alone."""
    task = make_task(name, run)
    example = task.examples(run.initial_params(), None).make(0, np.random.default_rng(0))
    found = {name: (np.shape(value), np.asarray(value).dtype) for name, value in example.items()}
    assert found == {name: (shape, np.dtype(dtype)) for name, (shape, dtype) in task.array_shapes().items()}
    bare = abstract_run(run.config, run.workdir, 1000, 300, jax.devices()[:1])
    task = make_task(name, bare)
    jax.eval_shape(make_step(task), *abstract_arguments(bare, name))
    return task.flops()


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)
