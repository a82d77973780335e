"""The kernel that TPUs attend with, interpreted on a CPU: the numbers of plain attention, its gradients, and the same
weights dropped on every mesh. Ahead of time it is compiled for three chips where their compiler is installed."""

import importlib.util
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from realm_jax.launch.plan import devices_to_compile_for
from realm_jax.mesh import logical_sharding, make_mesh
from realm_jax.models.attention import (
    AttentionDropout,
    cpu_attention,
    cudnn_attention,
    dot_product_attention,
    fits,
    tpu_attention,
)
from realm_jax.models.bert import Bert
from realm_jax.models.layers import BertConfig, Compute, Dropout, dropout_seeds, keep_mask

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}


def arrays(batch: int, length: int, width: int, dtype=jnp.float32):
    """Query, key, value and cotangent; a mask with sequences of every kind, one of them empty."""
    parts = jax.random.normal(jax.random.key(0), (4, batch, length, width), dtype)
    lengths = jnp.array([length, 1, 0, length // 2])[jnp.arange(batch) % 4]
    return parts, jnp.arange(length) < lengths[:, None]


def with_gradients(attend, parts, mask, heads, dropout):
    """What is attended to and the three gradients."""

    @jax.jit
    def both(query, key, value, cotangent):
        attended, back = jax.vjp(lambda *parts: attend(*parts, mask, heads, dropout), query, key, value)
        return attended, *back(cotangent)

    return [np.asarray(array, np.float32) for array in both(*parts)]


@pytest.mark.parametrize("dtype, rate", [(jnp.float32, 0.25), (jnp.bfloat16, 0.0)])
@pytest.mark.parametrize(
    "length, width, heads",
    [(24, 128, 2), (19, 256, 8), (16, 256, 2), pytest.param(384, 768, 12, marks=pytest.mark.slow)],
)
def test_the_kernel_gives_what_plain_attention_gives(length, width, heads, dtype, rate):
    """Heads of 64, of 32 and of 128; a length that fills no tile; the length of the paper."""
    parts, mask = arrays(4, length, width, dtype)
    dropout = AttentionDropout(rate, dropout_seeds(jax.random.key(1), jnp.arange(4), heads)) if rate else None
    plain = with_gradients(dot_product_attention, parts, mask, heads, dropout)
    with pltpu.force_tpu_interpret_mode():
        kernel = with_gradients(tpu_attention, parts, mask, heads, dropout)
    for wanted, found in zip(plain, kernel, strict=True):
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE[dtype] * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2, "model": 2}])
def test_each_device_attends_to_its_own_part_and_drops_the_same_weights(sizes):
    parts, mask = arrays(8, 16, 256)
    dropout = AttentionDropout(0.25, dropout_seeds(jax.random.key(1), jnp.arange(8), 4))
    with pltpu.force_tpu_interpret_mode():
        alone = with_gradients(tpu_attention, parts, mask, 4, dropout)
        mesh = make_mesh(**sizes)
        spread = [jax.device_put(part, logical_sharding(mesh, "batch", None, "heads")) for part in parts]
        together = with_gradients(partial(tpu_attention, mesh=mesh), spread, mask, 4, dropout)
    for wanted, found in zip(alone, together, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "positions, length, width, heads, sizes, wanted",
    [
        (384, 384, 768, 12, None, True),
        (384, 384, 768, 12, {}, True),
        (1, 384, 768, 12, None, False),  # the last layer of a retriever
        (16, 16, 64, 2, None, False),  # no whole group of features
        (16, 16, 384, 4, None, False),  # heads of 96
        (449, 449, 768, 12, None, False),
        (16, 16, 384, 12, {"model": 2}, False),  # half of three groups
        (16, 16, 256, 4, {"model": 2}, True),
    ],
)
def test_what_the_kernel_takes(positions, length, width, heads, sizes, wanted):
    mesh = None if sizes is None else make_mesh(**sizes)
    query, key = (jax.ShapeDtypeStruct((8, size, width), jnp.float32) for size in (positions, length))
    assert fits(query, key, heads, mesh) == wanted
    assert not fits(query, jax.ShapeDtypeStruct((7, length, width), jnp.float32), heads, make_mesh())


def test_weights_drop_out_at_their_rate_and_independently():
    seeds = dropout_seeds(jax.random.key(0), jnp.arange(64), 8)
    keep = np.asarray(keep_mask(seeds[:, :, None, None], (64, 8, 40, 40), 0.1), np.float64)
    count = keep.size
    assert abs(keep.mean() - 0.9) < 4 * (0.09 / count) ** 0.5
    for other in (np.roll(keep, 1, 3), np.roll(keep, 1, 2), np.roll(keep, 1, 1), np.roll(keep, 1, 0)):
        correlation = ((keep - 0.9) * (other - 0.9)).mean() / 0.09
        assert abs(correlation) < 4 / count**0.5


def test_hidden_states_that_drop_out_do_not_depend_on_padding():
    """Rate and scale, other draws for every sequence and key, and none where nothing is asked for."""
    states, in_order = jnp.ones((4, 64, 128)), jnp.arange(4)

    def drop(states, seed=0, numbers=in_order):
        return np.asarray(Dropout(0.25).apply({}, states, numbers, rngs={"dropout": jax.random.key(seed)}))

    found = drop(states)
    assert set(np.unique(found)) == {0.0, np.float32(1 / 0.75)}
    assert (found == 0).mean() == pytest.approx(0.25, abs=0.01)
    assert not np.array_equal(found[0], found[1]) and not np.array_equal(found, drop(states, seed=1))
    np.testing.assert_array_equal(drop(jnp.pad(states, ((0, 0), (0, 16), (0, 0))))[:, :64], found)
    np.testing.assert_array_equal(drop(states, numbers=jnp.array([2, 0, 3, 1])), found[[2, 0, 3, 1]])
    np.testing.assert_array_equal(drop(states, numbers=None), states)
    assert drop(states.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert drop(states[:, 0]).shape == (4, 128)


@pytest.mark.parametrize("way", [dot_product_attention, cpu_attention, cudnn_attention])
def test_weights_drop_out_in_every_way_of_attending(way):
    """With one-hot values the output is the weights: those that stay are divided by the rate at which they do."""
    query, mask = jnp.zeros((2, 8, 16)), jnp.ones((2, 8), bool)
    value = jnp.tile(jnp.eye(8), (2, 1, 2))
    dropout = AttentionDropout(0.5, dropout_seeds(jax.random.key(0), jnp.arange(2), 2))
    weights = np.asarray(way(query, query, value, mask, 2, dropout)).reshape(2, 8, 2, 8).transpose(0, 2, 1, 3)
    keep = np.asarray(keep_mask(dropout.seeds[:, :, None, None], (2, 2, 8, 8), 0.5))
    np.testing.assert_allclose(weights, 2 * keep / 8, atol=1e-6)


@pytest.mark.parametrize("remat", ["none", "layer"])
@pytest.mark.slow
def test_a_tower_draws_other_weights_in_each_layer_and_step(remat):
    config = BertConfig(30, width=128, layers=3, heads=2, feed_forward=16, max_length=16, dropout=0.5)
    config = config.with_compute(remat=remat, scan=remat != "none")
    ids = jnp.ones((2, 16), jnp.int32)
    tower = Bert(config)
    params = tower.init(jax.random.key(0), ids, ids * 0, ids > 0)

    def states(way, key):
        bert = Bert(config.with_compute(attention=way))
        return np.asarray(
            bert.apply(params, ids, ids * 0, ids > 0, sequence_numbers=jnp.arange(2), rngs={"dropout": key})
        )

    first, second = (states("xla", jax.random.key(seed)) for seed in (1, 2))
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(first, states("xla", jax.random.key(1)))
    with pltpu.force_tpu_interpret_mode():
        np.testing.assert_allclose(states("tpu", jax.random.key(1)), first, atol=1e-5)


@pytest.mark.slow
def test_a_tower_over_a_mesh_has_the_gradients_of_plain_attention():
    """Layers in one loop, features over two devices. (What is computed again cannot be interpreted.)"""
    mesh = make_mesh(fsdp=2, model=2)
    config = BertConfig(
        30, width=256, layers=3, heads=4, feed_forward=32, max_length=16, dropout=0.25,
        compute=Compute(scan=True, hidden_sharding=logical_sharding(mesh, "batch", None, None)),
    )  # fmt: skip
    ids = jax.device_put(jnp.arange(64).reshape(4, 16) % 30, logical_sharding(mesh, "batch"))
    params = nn.unbox(Bert(config).init(jax.random.key(0), ids, ids * 0, ids >= 0))

    def gradients(way):
        bert = Bert(config.with_compute(attention=way))

        def loss(params):
            rngs = {"dropout": jax.random.key(1)}
            states = bert.apply(params, ids, ids * 0, ids >= 0, sequence_numbers=jnp.arange(4), rngs=rngs)
            return (states * jax.random.normal(jax.random.key(2), states.shape)).sum()

        return jax.jit(jax.grad(loss))(params)

    with pltpu.force_tpu_interpret_mode():
        found = gradients("tpu")
    for one, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(gradients("xla")), strict=True):
        np.testing.assert_allclose(one, wanted, atol=1e-4 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("asked", [None, [[0, 5], [3, 1]]])
def test_a_length_that_fills_no_tile_is_padded_in_between(asked):
    config = BertConfig(30, width=128, layers=2, heads=2, feed_forward=16, max_length=11, dropout=0.0)
    ids, mask = jnp.arange(22).reshape(2, 11), jnp.arange(11) < jnp.array([11, 4])[:, None]
    params = Bert(config).init(jax.random.key(0), ids, ids * 0, mask)
    positions = None if asked is None else jnp.array(asked)
    wanted = Bert(config).apply(params, ids, ids * 0, mask, positions)
    with pltpu.force_tpu_interpret_mode():
        found = Bert(config.with_compute(attention="tpu")).apply(params, ids, ids * 0, mask, positions)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, atol=1e-5)


COMPILER = importlib.util.find_spec("libtpu") is not None


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER, reason="the TPU compiler is not installed")
@pytest.mark.parametrize("chips", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
    "batch, length, width, heads, dtype",
    [
        (8, 384, 768, 12, jnp.bfloat16),  # the paper's joints
        (8, 384, 768, 12, jnp.float32),
        (8, 448, 256, 8, jnp.float32),  # the longest, and heads of 32
        (16384, 64, 128, 2, jnp.bfloat16),  # many short queries
    ],
)
def test_the_kernel_compiles_for(chips, batch, length, width, heads, dtype):
    """With its gradient and dropout, over a mesh."""
    mesh = make_mesh(devices=devices_to_compile_for(chips))

    def abstract(shape, dtype, *names):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=logical_sharding(mesh, *names))

    states = abstract((batch, length, width), dtype, "batch", None, "heads")
    mask, seeds = abstract((batch, length), bool, "batch"), abstract((batch, heads), jnp.uint32, "batch")

    def both(query, key, value, cotangent, mask, seeds):
        dropout = AttentionDropout(0.1, seeds)
        attend = partial(tpu_attention, mask=mask, heads=heads, dropout=dropout, mesh=mesh)
        attended, back = jax.vjp(lambda *parts: attend(*parts), query, key, value)
        return attended, back(cotangent)

    text = jax.jit(both).lower(*[states] * 4, mask, seeds).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2
