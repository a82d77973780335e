"""Gradients of a batch part by part against all at once: the same, up to the order of sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from tiny import (
    document_rows,
    embed_corpus,
    loud_params,
    masked_batch,
    one_device_mesh,
    query_rows,
    random_corpus,
    random_words,
    task_of,
    tiny_context,
    tiny_realm,
)

from realm_jax.models.bert import Bert
from realm_jax.models.layers import BertConfig
from realm_jax.train.step import gradients, loss_and_metrics, split

ROWS, BATCH = 20, 8
MODEL = tiny_realm(layers=1)
RNG = np.random.default_rng(3)
CORPUS = random_corpus(RNG, ROWS)
MASKED = masked_batch(RNG, CORPUS, BATCH)
LOUD = tiny_realm(layers=1, dropout=0.3)
VARIANTS = [
    ("mlm", {}),
    pytest.param("ict", {}, marks=pytest.mark.slow),
    ("ict", {"ict.null_weight": 0.5}),
    ("realm", {}),
    pytest.param("realm", {"realm.marginal": "token"}, marks=pytest.mark.slow),
    pytest.param("qa", {}, marks=pytest.mark.slow),
    pytest.param("qa", {"qa.objective": "orqa", "qa.beam": 6}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, loud_params(MODEL, seed=1))


@pytest.fixture(scope="module")
def index(params):
    return jax.jit(lambda params: embed_corpus(MODEL, params, CORPUS, devices=1))(params)


def example_batch(name):
    """Parts of it differ in how many pieces are masked and in how many questions have an answer."""
    if name == "qa":
        rng = np.random.default_rng(7)
        answers, lengths = np.zeros((BATCH, 1, 3), np.int32), np.zeros((BATCH, 1), np.int32)
        for example in range(0, BATCH, 3):
            answers[example, 0, :1], lengths[example, 0] = CORPUS[example][1][:1], 1
        asked = query_rows([random_words(rng, 5) for _ in range(BATCH)])
        return asked | {"answers": answers, "answer_lengths": lengths}
    documents = document_rows(CORPUS[:BATCH])
    names = ("document", "document_length", "document_title_length")
    return MASKED | dict(zip(names, documents, strict=True))


@pytest.mark.parametrize("name, changes", VARIANTS)
def test_parts_give_the_gradient_of_the_whole(params, index, name, changes):
    task = task_of(name, tiny_context(one_device_mesh(), ROWS, MODEL), changes)
    trained = {part: params[part] for part in task.trained}
    frozen = {part: value for part, value in params.items() if part not in task.trained}
    batch = jax.tree.map(jnp.asarray, example_batch(name))
    program = jax.jit(gradients, static_argnums=(0, 6))
    (whole, values), (parts, found) = (program(task, trained, frozen, batch, index, None, count) for count in (1, 4))
    largest = max(float(jnp.abs(slope).max()) for slope in jax.tree.leaves(whole))
    assert largest > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * largest), whole, parts)
    assert values.keys() == found.keys()
    for entry, value in values.items():
        np.testing.assert_allclose(found[entry], value, rtol=1e-4, atol=1e-6, err_msg=entry)


@pytest.mark.slow
def test_parts_of_the_inverse_cloze_task_drop_the_same_units_in_both_passes(params):
    """Otherwise the gradient would be of another function: one step along it would not lower the loss as it says."""
    key = jax.random.key(5)
    task = task_of("ict", tiny_context(one_device_mesh(), ROWS, LOUD))
    trained, frozen = {part: params[part] for part in task.trained}, {"reader": params["reader"]}
    batch = jax.tree.map(jnp.asarray, example_batch("ict"))
    found = jax.jit(lambda trained: gradients(task, trained, frozen, batch, None, key, 4))
    slopes, values = found(trained)
    squared = sum(float((slope**2).sum()) for slope in jax.tree.leaves(slopes))
    small = 1e-3 / squared**0.5
    _, after = found(jax.tree.map(lambda x, slope: x - small / squared**0.5 * slope, trained, slopes))
    expected = -small * squared**0.5
    assert float(after["loss"] - values["loss"]) == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat, scan, dropout",
    [("dots", False, 0.3), ("layer", False, 0.3), ("none", True, 0.0), ("dots", True, 0.0), ("layer", True, 0.0)],
)
def test_layers_computed_again_or_in_a_loop_have_the_same_gradient(params, remat, scan, dropout):
    """And less is kept for the backward pass if it is computed again. (A loop draws other dropout.)"""
    key = jax.random.key(5) if dropout else None
    found, kept = [], []
    batch = jax.tree.map(jnp.asarray, example_batch("mlm"))
    for changes in ({}, {"remat": remat, "scan": scan}):
        model = tiny_realm(layers=3, dropout=dropout, **changes)
        many = jax.jit(model.init)(jax.random.key(1))
        task = task_of("mlm", tiny_context(one_device_mesh(), ROWS, model))
        found.append(jax.jit(lambda many, task=task: gradients(task, many, {}, batch, None, key, 1)[0])(many))
        loss = lambda many, task=task: loss_and_metrics(task, many, batch, None, key)[0]  # noqa: E731
        back = jax.eval_shape(lambda many, loss=loss: jax.vjp(loss, many)[1], many)
        kept.append(sum(x.size for x in jax.tree.leaves(back)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *found)
    assert remat == "none" or kept[1] < 0.9 * kept[0]


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("attention", ["xla", "tpu"])
def test_what_products_give_is_kept_where_dots_are(attention, scan):
    """Of every layer the six products and what it attends to: the policy has to see them inside of custom gradients."""
    config = BertConfig(30, width=128, layers=3, heads=2, feed_forward=256, max_length=16)
    config = config.with_compute(attention=attention)
    ids = jnp.zeros((2, 16), jnp.int32)
    params = jax.eval_shape(lambda: nn.unbox(Bert(config).init(jax.random.key(0), ids, ids, ids == 0)))

    def kept(remat):
        bert = Bert(config.with_compute(remat=remat, scan=scan))
        rngs = {"dropout": jax.random.key(1)}
        run = lambda params: bert.apply(params, ids, ids, ids == 0, sequence_numbers=jnp.arange(2), rngs=rngs)  # noqa: E731
        back = jax.eval_shape(lambda params: jax.vjp(run, params)[1], params)
        return sum(leaf.size for leaf in jax.tree.leaves(back))

    layer, dots, whole = (kept(remat) for remat in ("layer", "dots", "none"))
    assert dots - layer == config.layers * ids.size * (6 * config.width + config.feed_forward)
    assert dots < whole


@pytest.mark.parametrize(
    ("attention", "remat", "rolled"), [("tpu", "dots", False), ("tpu", "layer", True), ("xla", "dots", True)]
)
def test_layers_are_unrolled_on_tpus_where_products_are_kept(attention, remat, rolled):
    config = BertConfig(30, width=128, layers=5, heads=2, feed_forward=256, max_length=16)
    config = config.with_compute(attention=attention)
    bert, ids = Bert(config.with_compute(remat=remat, scan=True)), jnp.zeros((2, 16), jnp.int32)
    params = jax.eval_shape(lambda: nn.unbox(Bert(config).init(jax.random.key(0), ids, ids, ids == 0)))
    traced = jax.make_jaxpr(lambda params: bert.apply(params, ids, ids, ids == 0))(params)
    loops = [equation.params for equation in traced.eqns if equation.primitive.name == "scan"]
    assert [loop["length"] > loop["unroll"] for loop in loops] == [rolled]


def test_layers_in_a_loop_drop_out_each_for_itself(params):
    batch = jax.tree.map(jnp.asarray, example_batch("mlm"))
    model = tiny_realm(layers=3, scan=True, dropout=0.3)
    many = jax.jit(model.init)(jax.random.key(1))
    task = task_of("mlm", tiny_context(one_device_mesh(), ROWS, model))
    loss = jax.jit(lambda key: loss_and_metrics(task, many, batch, None, key)[0])
    values = [float(loss(jax.random.key(n))) for n in (1, 1, 2)]
    assert values[0] == values[1] != values[2]


def test_every_device_keeps_its_own_examples():
    parts = split({"query": np.arange(8)}, 2)["query"]
    assert parts.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
