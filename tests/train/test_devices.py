"""REALM steps on one device and on eight: the same numbers, whatever the mesh (`pytest -s` shows how nearly)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from runs import train as train_run
from tiny import (
    Texts,
    document_rows,
    loud_params,
    masked_batch,
    mesh_of_slices,
    random_corpus,
    task_of,
    tiny_context,
    tiny_realm,
)
from tiny_run import PEOPLE, open_config, prepare_people, tiny_config

from realm_jax.config import RealmConfig
from realm_jax.forward import Index, retrieve
from realm_jax.mesh import logical_sharding, make_mesh, parameter_shardings, replicated
from realm_jax.retrieval.exact import padded_rows
from realm_jax.tasks import make_task
from realm_jax.train.optimizer import make_optimizer
from realm_jax.train.step import loss_and_metrics

STEPS, REFRESH, BATCH, ROWS = 10, 5, 8, 40
MODEL = tiny_realm(layers=1)  # compiling takes nearly all of the time


class Trace(NamedTuple):
    """What ten steps did: per step the loss, the gradients and the retrieved rows; parameters before and after."""

    losses: list[float]
    gradients: list[Any]
    rows: list[np.ndarray]
    start: Any
    params: Any


def corpus_and_batches() -> tuple[Texts, list[dict[str, np.ndarray]]]:
    rng = np.random.default_rng(0)
    corpus = random_corpus(rng, ROWS)
    return corpus, [masked_batch(rng, corpus, BATCH) for _ in range(STEPS)]


def make_step(mesh: Mesh):
    """One optimiser step of the task 'realm', which also tells the gradients and the retrieved rows."""
    context = tiny_context(mesh, ROWS, MODEL)
    task = task_of("realm", context)
    optimizer = make_optimizer(peak=0.002, total=100, warmup=2)

    def step(params, state, batch, index):
        value = partial(loss_and_metrics, task)
        (loss, _), gradients = jax.value_and_grad(value, has_aux=True)(params, batch, index, None)
        updates, state = optimizer.update(gradients, state, params)
        rows = retrieve(RealmConfig(candidates=4), context, params, batch, index).rows
        return optax.apply_updates(params, updates), state, loss, gradients, rows

    return step, optimizer


def train(mesh: Mesh) -> Trace:
    """Ten steps from the same parameters over the same batches; the corpus is embedded again before the sixth."""
    corpus, batches = corpus_and_batches()
    shardings = parameter_shardings(mesh, jax.eval_shape(MODEL.init_boxed, jax.random.key(0)))
    params = jax.device_put(loud_params(MODEL, seed=0), shardings)
    by_row = logical_sharding(mesh, "rows")
    documents = jax.device_put(document_rows(corpus, rows=padded_rows(ROWS, mesh.size)), by_row)
    embed = jax.jit(MODEL.embed_documents, out_shardings=by_row)
    step, optimizer = make_step(mesh)
    state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, replicated(mesh)), optimizer.init(params))
    kept = jax.tree.map(lambda x: x.sharding, (params, state))  # the same program for every step
    step = jax.jit(step, out_shardings=(*kept, None, None, None))
    trace = Trace([], [], [], jax.tree.map(np.asarray, params), None)
    for number, batch in enumerate(batches):
        if number % REFRESH == 0:
            index = Index(embed(params, documents), documents)
        batch = jax.device_put(batch, logical_sharding(mesh, "batch"))
        params, state, loss, gradients, rows = step(params, state, batch, index)
        trace.losses.append(float(loss))
        trace.gradients.append(jax.tree.map(np.asarray, gradients))
        trace.rows.append(np.asarray(rows))
    return trace._replace(params=jax.tree.map(np.asarray, params))


@pytest.fixture(scope="module")
def on_one_device() -> Trace:
    return train(make_mesh(1, 1, 1, jax.devices()[:1]))


def norm(tree: Any) -> float:
    return float(np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in jax.tree.leaves(tree))))


def distance(a: Any, b: Any) -> float:
    """Norm of the difference of two trees relative to the norm of the first."""
    return norm(jax.tree.map(np.subtract, a, b)) / norm(a)


@pytest.mark.parametrize(
    "sizes", [(2, 2, 2, 1), *(pytest.param(one, marks=pytest.mark.slow) for one in ((1, 8, 1, 1), (1, 2, 2, 2)))]
)
def test_ten_steps_with_a_refresh_are_the_same_on_eight_devices(on_one_device, sizes):
    """Rows are equal; loss, gradients and parameters differ by the order of float32 sums alone.

    Tolerances, relative: 1e-5 for losses, 5e-5 for the norm of the difference of gradients and of parameters. (Among
    passages that score more nearly alike than that, rows may change places; parameters are chosen so that none do.)
    """
    one, eight = on_one_device, train(mesh_of_slices(*sizes))
    loss = max(abs(a - b) / abs(a) for a, b in zip(one.losses, eight.losses, strict=True))
    gradient = max(distance(a, b) for a, b in zip(one.gradients, eight.gradients, strict=True))
    parameter = distance(one.params, eight.params)
    sets = len({tuple(rows[0]) for rows in one.rows})
    print(f"\n{sizes}: loss {loss:.1e}, gradients {gradient:.1e}, parameters {parameter:.1e}; {sets} sets of rows")
    for a, b in zip(one.rows, eight.rows, strict=True):
        np.testing.assert_array_equal(a, b)
    assert loss < 1e-5 and gradient < 5e-5 and parameter < 5e-5


def test_the_ten_steps_do_train(on_one_device):
    """So that their agreement means something: the loss falls and every network moves."""
    for name, tree in on_one_device.params.items():
        assert distance(on_one_device.start[name], tree) > 0.01
    assert np.mean(on_one_device.losses[-3:]) < np.mean(on_one_device.losses[:3])
    assert all(norm(gradient) > 0 for gradient in on_one_device.gradients)


@pytest.fixture(scope="module")
def people_of_many_lengths(tmp_path_factory):
    """A prepared folder whose sentences differ in length, so that packing puts them into another order."""
    people = [name + " Quincy" * (number % 7) for number, name in enumerate(PEOPLE)]
    return prepare_people(tmp_path_factory.mktemp("lengths"), people)


def train_packed(data, workdir, devices: int) -> Any:
    """Parameters after three steps with dropout over packed sequences."""
    config = tiny_config(data)
    config.tasks, config.model.dropout, config.refresh.every, config.optimizer.warmup = "realm", 0.1, 0, 1
    config.realm.update({"steps": 3, "batch_size": 16, "learning_rate": 1e-3})
    run = open_config(config, workdir, devices)
    packing = make_task("realm", run).context.packing
    assert packing and packing.queries and packing.reader_inputs
    return train_run(run)


@pytest.fixture(scope="module")
def packed_on_eight_devices(people_of_many_lengths, tmp_path_factory):
    return train_packed(people_of_many_lengths, tmp_path_factory.mktemp("eight"), 8)


@pytest.mark.parametrize("devices", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_packed_sequences_have_the_same_dropout_on_fewer_devices(
    people_of_many_lengths, packed_on_eight_devices, tmp_path, devices
):
    """A sequence's draws follow from its number in the batch, not from the slots that it gets on these devices.

    Tolerance: 2e-6 for the norm of the difference of parameters, relative (measured: 3e-8; 1e-2 if draws follow slots).
    """
    difference = distance(packed_on_eight_devices, train_packed(people_of_many_lengths, tmp_path, devices))
    print(f"\n8 and {devices} devices, packed with dropout: parameters {difference:.1e}")
    assert difference < 2e-6
