"""BERT's optimiser against a loop in NumPy, and its schedule and exclusions by value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_realm

from realm_jax.train import optimizer as optimizer_module
from realm_jax.train.optimizer import (
    RateScales,
    learning_rate,
    make_optimizer,
    warmup_steps,
    weight_decay_mask,
    zero_frozen_gradients,
)

PEAK, TOTAL, WARMUP, DECAY, CLIP = 0.1, 20, 3, 0.01, 1.0


def published_loop(params: dict[str, np.ndarray], gradients: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """google-research/bert `optimization.py`, in float64: clip to a global norm; m and v without bias correction;
    u = m / (√v + 1e-6), plus 0.01 · w unless a bias or a LayerNorm; w ← w − lr · u."""
    params = {name: value.astype(np.float64) for name, value in params.items()}
    m = {name: np.zeros_like(value) for name, value in params.items()}
    v = {name: np.zeros_like(value) for name, value in params.items()}
    for step, gradient in enumerate(gradients):
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradient.values()))
        rate = PEAK * step / WARMUP if step < WARMUP else PEAK * (1 - step / TOTAL)
        for name in params:
            g = gradient[name].astype(np.float64) * min(1.0, CLIP / norm)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g**2
            update = m[name] / (np.sqrt(v[name]) + 1e-6)
            if name == "kernel":
                update = update + DECAY * params[name]
            params[name] = params[name] - rate * update
    return params


def test_five_steps_are_those_of_the_published_formula():
    """Gradients of which some are clipped and some are so small that ε counts."""
    rng = np.random.default_rng(0)
    shapes = {"kernel": (4, 3), "bias": (3,), "scale": (3,), "mlm_bias": (5,)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    sizes = (0.01, 3.0, 1e-6, 1.0, 0.1)
    gradients = [{n: (size * rng.normal(size=s)).astype(np.float32) for n, s in shapes.items()} for size in sizes]
    optimizer = make_optimizer(PEAK, TOTAL, WARMUP)

    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    state, found = optimizer.init(params), params
    for gradient in gradients:
        found, state = step(found, state, gradient)
    for name, wanted in published_loop(params, gradients).items():
        assert np.abs(wanted - params[name]).max() > 0.01
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6)


def test_the_rate_rises_to_the_peak_then_jumps_down_by_the_share_of_the_warm_up():
    """At step W the rate is peak · (1 − W / total): the decay counts from step 0."""
    rate = [float(learning_rate(step, 1.0, 1000, 100)) for step in (0, 1, 50, 99, 100, 500, 999, 1000, 1200)]
    np.testing.assert_allclose(rate, [0.0, 0.01, 0.5, 0.99, 0.9, 0.5, 0.001, 0.0, 0.0], atol=1e-6)


@pytest.mark.parametrize("total, wanted", [(10, 100), (1000, 100), (2059, 205), (100_000, 10_000), (200_000, 10_000)])
def test_the_warm_up_is_a_tenth_between_100_and_10000(total, wanted):
    assert warmup_steps(total) == wanted


def steps(optimizer, params, gradients, count):
    """The updates of so many steps with the same gradients; parameters stay."""
    state, updates = optimizer.init(params), []
    for _ in range(count):
        update, state = optimizer.update(gradients, state, params)
        updates.append(update)
    return updates


def test_a_warm_up_of_zero_takes_the_rule():
    params = {"kernel": jnp.ones((1, 1))}
    ruled, given = (steps(make_optimizer(1.0, 2000, warmup), params, params, 3) for warmup in (0, 200))
    assert ruled == given and ruled[-1]["kernel"] != 0


def test_biases_and_layer_norms_do_not_decay_and_all_matrices_do():
    params = jax.eval_shape(tiny_realm().init, jax.random.key(0))
    masked, sized = map(jax.tree_util.tree_leaves_with_path, (weight_decay_mask(params), params))
    flags = {jax.tree_util.keystr(path): flag for path, flag in masked}
    assert flags == {jax.tree_util.keystr(path): len(array.shape) == 2 for path, array in sized}
    assert not flags["['reader']['mlm_bias']"] and not flags["['reader']['span_norm']['scale']"]
    assert flags["['reader']['bert']['words']['embedding']"]


def test_a_held_retriever_stays_then_rises_to_full_updates():
    """The reader moves from the start; the retriever not before step `start`, and fully from twice that step on."""
    params = {"reader": {"kernel": jnp.ones(2)}, "query_embedder": {"kernel": jnp.ones(2)}}
    gradients = jax.tree.map(jnp.ones_like, params)

    def moves(start):
        updates = steps(make_optimizer(0.1, 100, 1, start), params, gradients, 7)
        return np.array([[float(one[name]["kernel"][0]) for name in ("reader", "query_embedder")] for one in updates])

    held, free = moves(3), moves(0)
    np.testing.assert_allclose(held[:, 0], free[:, 0], rtol=1e-6)
    share = [0, 0, 0, 0, 1 / 3, 2 / 3, 1]
    np.testing.assert_allclose(held[1:, 1], np.array(share[1:]) * free[1:, 1], rtol=1e-5)


def test_parts_of_the_model_move_at_rates_of_their_own_and_frozen_words_stay():
    """The reader's encoder at the rate of the task, fresh parts at five times it, the retriever at a tenth."""
    bert = {"words": {"embedding": jnp.ones((3, 2))}, "layer_0": {"query": {"kernel": jnp.ones((2, 2))}}}
    params = {
        "reader": {"bert": bert, "span_score": {"kernel": jnp.ones((2, 1))}},
        "query_embedder": {"bert": jax.tree.map(jnp.copy, bert), "pooler": {"kernel": jnp.ones((2, 2))}},
    }
    rates = RateScales(retriever=0.1, heads=5.0, words=False)
    gradients = zero_frozen_gradients(jax.tree.map(jnp.ones_like, params), rates)
    assert not gradients["reader"]["bert"]["words"]["embedding"].any()
    optimizer = make_optimizer(0.1, 100, 1, rates=rates, bias_correction=True)
    updates = steps(optimizer, params, gradients, 2)[-1]
    moved = {
        "encoder": updates["reader"]["bert"]["layer_0"]["query"]["kernel"],
        "head": updates["reader"]["span_score"]["kernel"],
        "retriever": updates["query_embedder"]["pooler"]["kernel"],
    }
    step = {name: float(update[0, 0]) for name, update in moved.items()}
    assert step["encoder"] < 0
    multiples = [step[name] / step["encoder"] for name in ("head", "retriever")]
    np.testing.assert_allclose(multiples, [5, 0.1], rtol=1e-5)
    for network in ("reader", "query_embedder"):
        assert not updates[network]["bert"]["words"]["embedding"].any()


@pytest.mark.parametrize("corrected", [True, False])
def test_bias_correction_makes_the_first_steps_as_long_as_the_rate(corrected, monkeypatch):
    monkeypatch.setattr(optimizer_module, "WEIGHT_DECAY", 0.0)
    optimizer = make_optimizer(0.1, 10**6, 1, bias_correction=corrected)
    params = {"reader": {"kernel": jnp.ones(1)}}
    updates = steps(optimizer, params, params, 2)[-1]
    step = -float(updates["reader"]["kernel"][0])
    assert step == pytest.approx(0.1, rel=1e-3) if corrected else step > 0.3
