"""Sequences without padding: the same numbers as padded ones, whatever the mesh, dropout and what is asked for."""

import dataclasses
import importlib.util
from functools import partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from tiny import mesh_of_slices
from tiny_run import prepare_people, tiny_config

from realm_jax.assemble import make_run
from realm_jax.config import QaConfig
from realm_jax.data.examples import batches
from realm_jax.data.sources import open_sources
from realm_jax.forward import PackingSpec, read_question, truncated_fraction
from realm_jax.launch.cost import program_cost
from realm_jax.launch.plan import devices_to_compile_for
from realm_jax.mesh import batch_parts, logical_sharding, make_mesh
from realm_jax.models.attention import (
    AttentionDropout,
    dot_product_attention,
    fits_packed,
    packed_attention,
    tpu_attention,
)
from realm_jax.models.bert import Bert
from realm_jax.models.layers import BertConfig, dropout_seeds
from realm_jax.models.packing import (
    BalancedPermutation,
    fitting_lengths,
    pack_tokens,
    packed_lengths,
    packing,
    snake_order,
    unpack_tokens,
)
from realm_jax.models.retriever import Encoder
from realm_jax.run import put_batch
from realm_jax.tasks import make_task
from realm_jax.tasks.packed import slots_needed
from realm_jax.train.monitors import TruncationMonitor
from realm_jax.train.step import gradients

LENGTHS = np.array([12, 1, 7, 3, 12, 9])
MASK = np.arange(12) < LENGTHS[:, None]
POSITIONS = np.array([[0, 11], [0, 0], [6, 2], [1, 2], [3, 4], [8, 0]])  # a few of each sequence


def states(width=4, batch=6):
    return np.random.default_rng(0).normal(size=(batch, 12, width)).astype(np.float32)


@pytest.mark.parametrize("parts, slots, alignment", [(1, 60, 1), (2, 40, 4), (3, 24, 1)])
def test_what_is_packed_comes_back(parts, slots, alignment):
    layout, padded = packing(jnp.array(MASK), parts, slots, alignment), states()
    packed = layout.pack(padded)
    assert packed.shape == (parts, slots, 4) and (np.asarray(layout.starts) % alignment == 0).all()
    np.testing.assert_array_equal(layout.unpack(packed), padded * MASK[..., None])
    np.testing.assert_array_equal(jnp.abs(packed).sum(-1) > 0, layout.used)
    wanted = np.take_along_axis(padded, POSITIONS[..., None], axis=1)
    np.testing.assert_array_equal(layout.take(packed, POSITIONS), wanted)
    numbers = np.arange(6) + 10
    of_rows = np.repeat(numbers, LENGTHS)
    np.testing.assert_array_equal(layout.per_token(numbers)[layout.used], of_rows)
    np.testing.assert_array_equal(layout.positions[layout.used], np.concatenate([np.arange(one) for one in LENGTHS]))


def test_packing_and_unpacking_are_transposes():
    layout, padded = packing(jnp.array(MASK), 2, 30), states()
    packed = np.random.default_rng(1).normal(size=(2, 30, 4)).astype(np.float32)
    for work, taken, given in ((pack_tokens, padded, packed), (unpack_tokens, packed, padded)):
        (found,) = jax.vjp(lambda one, work=work: work(one, layout), taken)[1](given)
        wanted = jax.linear_transpose(
            lambda one, work=work: work.fun(one, layout), jax.ShapeDtypeStruct(taken.shape, taken.dtype)
        )(given)
        np.testing.assert_allclose(found, wanted[0], rtol=1e-6)


def test_of_what_does_not_fit_the_longest_lose_their_last_tokens():
    lengths = np.array([[12, 1, 7, 9], [2, 2, 2, 2]])
    assert fitting_lengths(lengths, 12, 29, 1).tolist() == lengths.tolist()
    assert fitting_lengths(lengths, 12, 28, 1).tolist() == [[11, 1, 7, 9], [2, 2, 2, 2]]
    assert fitting_lengths(lengths, 12, 20, 1).tolist() == [[6, 1, 6, 6], [2, 2, 2, 2]]
    assert fitting_lengths(lengths, 12, 24, 4).tolist() == [[4, 1, 4, 4], [2, 2, 2, 2]], "tiles are what takes room"
    layout = packing(jnp.arange(12) < lengths.reshape(-1, 1), 2, 20)
    assert layout.mask.sum(1).tolist() == [6, 1, 6, 6, 2, 2, 2, 2] and int(layout.used.sum()) == 19 + 8


@pytest.mark.parametrize(
    "positions, dropout, changes",
    [
        pytest.param(None, 0.3, {}, marks=pytest.mark.slow),
        (None, 0.0, {"attention": "cpu"}),
        pytest.param(POSITIONS, 0.3, {"remat": "dots"}, marks=pytest.mark.slow),
    ],
)
def test_a_tower_gives_the_same_of_packed_sequences(positions, dropout, changes):
    """Its gradients too, and what drops out of states and of attention's weights."""
    config = BertConfig(30, width=16, layers=3, heads=2, feed_forward=32, max_length=12, dropout=dropout)
    config = config.with_compute(scan="remat" in changes, **changes)
    ids = np.random.default_rng(0).integers(0, 30, MASK.shape)
    params = nn.unbox(Bert(config).init(jax.random.key(0), ids, ids % 2, MASK))

    @partial(jax.jit, static_argnums=1)
    def both(params, packed_length):
        tower = Bert(config.with_compute(packed_length=packed_length))

        def loss(params):
            rngs, numbers = {"dropout": jax.random.key(1)}, jnp.arange(6) if dropout else None
            found = tower.apply(params, ids, ids % 2, MASK, positions, sequence_numbers=numbers, rngs=rngs)
            found = found if positions is not None else found * MASK[..., None]
            return (found * jnp.cos(jnp.arange(found.size).reshape(found.shape))).sum(), found

        return jax.grad(loss, has_aux=True)(params)

    for wanted, found in zip(*map(jax.tree.leaves, (both(params, 0), both(params, 50))), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-5 * max(1, np.abs(wanted).max()))


@pytest.mark.parametrize("dtype, rate", [(jnp.float32, 0.25), (jnp.bfloat16, 0.0)])
@pytest.mark.parametrize("sizes", [None, {"fsdp": 2, "model": 2}])
def test_the_kernel_takes_sequences_from_where_they_lie(sizes, dtype, rate):
    """Four sequences a part, one as long as can be and one of a single token; the last one's window ends before it."""
    mesh = None if sizes is None else make_mesh(devices=jax.devices()[:4], data=1, **sizes)
    parts, heads, length, width = 1 if mesh is None else 2, 4, 48, 256
    lengths = jnp.array([48, 1, 24, 20] * parts)
    layout = packing(jnp.arange(length) < lengths[:, None], parts, 128, 16)
    assert fits_packed(jax.ShapeDtypeStruct((parts, 128, width), dtype), layout.mask.shape, heads, mesh)
    arrays = jax.random.normal(jax.random.key(0), (4, parts, 128, width), dtype)
    arrays = jnp.where(layout.used[None, ..., None], arrays, 0)
    dropout = AttentionDropout(rate, dropout_seeds(jax.random.key(1), jnp.arange(4 * parts), heads)) if rate else None

    def with_gradients(attend, query, key, value, cotangent):
        attended, back = jax.vjp(lambda *three: attend(*three, layout, heads, dropout), query, key, value)
        return attended, *back(cotangent)

    wanted = jax.jit(partial(with_gradients, partial(packed_attention, dot_product_attention)))(*arrays)
    spread = list(arrays)
    if mesh is not None:
        spread = [jax.device_put(one, logical_sharding(mesh, "batch", None, "heads")) for one in arrays]
    with pltpu.force_tpu_interpret_mode():
        found = jax.jit(partial(with_gradients, partial(tpu_attention, mesh=mesh)))(*spread)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    for one, other in zip(found, wanted, strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, atol=tolerance * max(1, np.abs(other).max()))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
@pytest.mark.parametrize("chips", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_kernel_compiles_for_every_chip(chips):
    place = jax.sharding.SingleDeviceSharding(devices_to_compile_for(chips)[0])
    shapes = [((1, 18560, 768), jnp.bfloat16)] * 4 + [((56, 384), bool), ((56, 12), jnp.uint32)]

    def both(query, key, value, cotangent, mask, seeds):
        layout = packing(mask, 1, 18560, 16)
        attend = partial(tpu_attention, mask=layout, heads=12, dropout=AttentionDropout(0.1, seeds))
        attended, back = jax.vjp(lambda *three: attend(*three), query, key, value)
        return attended, back(cotangent)

    arrays = [jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes]
    text = jax.jit(both).lower(*arrays).compile().as_text()
    assert "attend_packed_and_drop" in text and "differentiate_packed_and_drop" in text


def test_places_are_what_batches_need():
    """Of sequences that are all alike as many as they have; of others seldom fewer than a batch needs."""
    same = slots_needed(np.array([10]), np.array([21]), (1, 8, 5), 64)
    assert same == 8 * 5 * (31 + 0.05 * 10), "texts are a sample"
    longer = slots_needed(np.array([10]), np.array([15, 27]), (100, 8, 50), 64)
    assert 8 * 50 * (31 + 0.199 * 6) < longer < 8 * 50 * (31 + 0.201 * 6), "what is retrieved is longer"
    aligned = slots_needed(np.array([10]), np.array([21]), (1, 8, 5), 64, alignment=16)
    assert aligned == np.ceil(8 * 5 * (32 + 0.05 * 10) / 16) * 16
    assert slots_needed(np.array([10]), np.array([53]), (1, 8, 5), 64) == 0, "hardly anything is padding"
    assert slots_needed(np.array([1]), np.array([2]), (1, 1, 2), 64) == 64, "a kernel's window fits"
    rng = np.random.default_rng(1)
    queries, passages = rng.integers(5, 30, 1000), rng.integers(20, 60, 1000)
    places = slots_needed(queries, passages, (1, 8, 5), 90)
    drawn = (rng.choice(queries, (20_000, 8, 1)) + rng.choice(passages, (20_000, 8, 5))).sum(axis=(1, 2))
    assert 0 < (drawn > places).sum() < 20 and places < 0.8 * 8 * 5 * 90
    assert slots_needed(queries, passages, (16, 8, 5), 90) < places, "long joints are shared out"


def test_parts_have_about_the_same_length():
    assert snake_order(12, 3).tolist() == [0, 5, 6, 11, 1, 4, 7, 10, 2, 3, 8, 9]
    mesh = make_mesh(devices=jax.devices()[:4], data=1, fsdp=4)
    lengths = np.random.default_rng(0).integers(5, 90, 32)
    ids = np.repeat(lengths[:, None], 3, 1)

    @jax.jit
    def there_and_back(lengths, ids):
        order = BalancedPermutation.by_length(lengths, mesh)
        found = order.apply((lengths, ids))
        return found, order.inverse((found, found[1] > 40))

    (found, rows), ((again, _), long) = there_and_back(lengths, ids)
    np.testing.assert_array_equal(rows[:, 2], found)
    sums = found.reshape(4, 8).sum(1)
    assert sums.max() - sums.min() < 0.2 * np.ptp(lengths.reshape(4, 8).sum(1))
    assert rows.sharding.is_equivalent_to(logical_sharding(mesh, "batch", None), 2)
    np.testing.assert_array_equal(again, lengths)
    np.testing.assert_array_equal(long, ids > 40)
    alone = make_mesh(devices=jax.devices()[:1], data=1, fsdp=1)
    assert all(BalancedPermutation.by_length(lengths, devices).order is None for devices in (alone, None))


def test_sequences_stay_within_a_slice():
    mesh = mesh_of_slices(2, 2, 2, 1)
    lengths = np.random.default_rng(0).integers(5, 90, 32)
    batch = {"length": lengths, "ids": np.stack([lengths, 2 * lengths], axis=1)}
    batch = {name: jax.device_put(one, logical_sharding(mesh, "batch")) for name, one in batch.items()}

    def gradient(batch):
        order = BalancedPermutation.by_length(batch["length"], mesh)
        found = order.apply(batch)
        weights = jnp.arange(64.0).reshape(32, 2)
        floats = found["ids"].astype(jnp.float32)
        gradients = jax.grad(lambda states: (order.inverse(states) * weights).sum())(floats)
        return found, order.inverse(found), gradients, weights

    work = jax.jit(gradient)
    found, again, gradients, weights = work(batch)
    for name, wanted in batch.items():
        np.testing.assert_array_equal(again[name], wanted)
    ids, weights = np.asarray(batch["ids"]), np.asarray(weights)
    assert sorted(zip(found["ids"][:, 0].tolist(), gradients.sum(1).tolist(), strict=True)) == sorted(
        zip(ids[:, 0].tolist(), weights.sum(1).tolist(), strict=True)
    ), "each has the gradient of its own"
    for share in (slice(0, 16), slice(16, 32)):
        assert sorted(found["length"][share].tolist()) == sorted(lengths[share].tolist())
    np.testing.assert_array_equal(found["ids"][:, 1], 2 * found["length"])
    travels = program_cost(work.lower(batch).compile().as_text()).collectives
    assert travels and all(len({place // 4 for place in one.group}) == 1 for one in travels), "within a slice alone"


@pytest.mark.parametrize("pooling", ["mean", "last", "cls", "pooler"])
def test_a_vector_is_that_of_what_has_a_place(pooling):
    """Sequences that lose their last tokens are embedded as if they had ended there."""
    config = BertConfig(30, width=16, layers=2, heads=2, feed_forward=32, max_length=12, dropout=0.0)
    tower = Encoder(config, projection=0, pooling=pooling, normalization="none")
    ids = np.random.default_rng(0).integers(0, 30, MASK.shape)
    params = nn.unbox(tower.init(jax.random.key(0), ids, 0 * ids, MASK))
    kept = np.arange(12) < np.minimum(LENGTHS, 8)[:, None]
    packed = tower.clone(config=config.with_compute(packed_length=36))
    found, wanted = packed.apply(params, ids, 0 * ids, MASK), tower.apply(params, ids, 0 * ids, kept)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_lost_pieces_are_said_once():
    monitor = TruncationMonitor()
    assert monitor({"step": 1, "unplaced": 0.005}) is None and monitor({"step": 2, "recall@5": 0.5}) is None
    assert "step 3: packing truncated 2.0% of the tokens" in monitor({"step": 3, "unplaced": 0.02})
    assert monitor({"step": 4, "unplaced": 0.02}) is None


@pytest.mark.parametrize(
    "devices, marginal",
    [(1, "example"), (4, "example"), (4, "span")],
)
@pytest.mark.slow
def test_a_step_of_realm_is_the_same_packed(people, tmp_path, devices, marginal):
    config = tiny_config(people)
    config.tasks = "realm"
    config.realm.update(batch_size=8, steps=2, marginal=marginal)
    config.optimizer.microbatches = 2
    config.model.dropout = 0.2
    run = make_run(config, tmp_path, open_sources(people), jax.devices()[:devices])
    task = make_task("realm", run)
    packed = task.context.packing
    assert packed is not None and packed.examples == 8 // devices // 2
    sequences = packed.examples * 3
    assert 0 < packed.reader_inputs < sequences * 62 and 0 < packed.passages < sequences * 48
    params = run.initial_params()
    index = run.index(np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32))
    stream = batches(task.examples(params, lambda: None), 0, task.stream, 8, 0, 1)
    batch = put_batch(run.mesh, next(stream))

    assert_same_step(task, params, batch, index, ("loss", "accuracy", "retrieval_utility"))


def assert_same_step(task, params, batch, index, names):
    """A step's gradients and values are the same packed, as its task works it out, and padded."""
    context = task.context
    packed, rows = context.packing, batch_parts(context.mesh)
    states = f"tensor<{rows}x{packed.reader_inputs}x{context.model.reader.bert.width}x"

    def of(places):
        task.__dict__["context"] = dataclasses.replace(context, packing=places)
        work = jax.jit(
            lambda params, batch: gradients(task, params, {}, batch, index, jax.random.key(0), task.num_microbatches)
        )
        lowered = work.lower(params, batch)
        return states in lowered.as_text(), *lowered.compile()(params, batch)

    (is_packed, found, values), (is_not, wanted, others) = of(packed), of(None)
    assert is_packed and not is_not, "hidden states of as many places as were counted"
    for name in names:
        np.testing.assert_allclose(values[name], others[name], rtol=1e-5)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * max(1, np.abs(other).max()))
    assert values["unplaced"] == others["unplaced"] == 0


@pytest.fixture(scope="module")
def named_people(tmp_path_factory):
    """People whose names occur twice in their passages, as the warm-up needs them."""
    return prepare_people(tmp_path_factory.mktemp("named"), house="of {}")


NO_VECTORS = {"search": "bm25"}
OTHER_TASKS = {  # task → what a step reports that packing leaves as it is
    "mlm": ("loss", "accuracy"),
    "closed_book": ("loss", "accuracy"),
    "qa": ("loss", "accuracy", "answer_in_passages", "log_likelihood"),
}


@pytest.mark.parametrize(
    "name, devices, parts, changes",
    [
        ("mlm", 1, 1, {}),
        pytest.param("mlm", 4, 2, {}, marks=pytest.mark.slow),
        ("closed_book", 1, 1, {}),
        ("qa", 1, 2, {}),
        pytest.param("qa", 4, 1, {"refresh_every": 1}, marks=pytest.mark.slow),
        pytest.param("qa", 1, 1, {"refresh_every": 1, "titles": True}, marks=pytest.mark.slow),
        pytest.param("qa", 1, 1, NO_VECTORS, marks=pytest.mark.slow),
    ],
)
def test_a_step_of_other_tasks_is_the_same_packed(named_people, tmp_path, name, devices, parts, changes):
    config = tiny_config(named_people)
    config.tasks = name
    config[name].update({"batch_size": 16, "steps": 2, **changes})
    config.optimizer.microbatches = parts
    config.model.dropout = 0.2
    run = make_run(config, tmp_path, open_sources(named_people), jax.devices()[:devices])
    task = make_task(name, run)
    packed = task.context.packing
    assert packed.examples == 16 // devices // parts
    read = packed.examples * (3 if name == "qa" else 1)
    assert 0 < packed.reader_inputs < read * 62
    assert (0 < packed.passages < read * 48) == ("refresh_every" in changes)
    assert packed.queries == 0 or changes != NO_VECTORS, "no tower reads questions"
    params = run.initial_params()
    vectors = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    index = None
    if name == "qa":
        index = run.index_without_vectors if changes == NO_VECTORS else run.index(vectors)
    batch = put_batch(run.mesh, next(batches(task.examples(params, lambda: None), 0, task.stream, 16, 0, 1)))
    assert_same_step(task, params, batch, index, OTHER_TASKS[name])


def test_a_task_without_passages_has_its_own_lengths(people, tmp_path):
    """No name occurs twice in these passages, which the warm-up could not learn from."""
    config = tiny_config(people)
    config.tasks = "closed_book"
    task = make_task("closed_book", make_run(config, tmp_path, open_sources(people), jax.devices()[:1]))
    longest = max(int(task.fixed_examples.make(n, np.random.default_rng(0))["query_length"]) for n in range(8))
    packed = task.context.packing
    assert 0 < packed.reader_inputs <= packed.examples * (longest + 1), "nothing stands beside them"


def test_fine_tuning_beside_one_passage_stays_padded(people, tmp_path):
    config = tiny_config(people)
    config.update({"tasks": "qa", "qa": {"objective": "positive"}})
    task = make_task("qa", make_run(config, tmp_path, open_sources(people), jax.devices()[:1]))
    assert task.context.packing is None, "batches are of questions of like length"


def test_no_answer_is_pointed_at_in_what_has_no_place(people, tmp_path):
    config = tiny_config(people)
    config.update({"tasks": "qa", "qa": {"batch_size": 8}})
    run = make_run(config, tmp_path, open_sources(people), jax.devices()[:1])
    context = dataclasses.replace(run.context, packing=PackingSpec(8, reader_inputs=8 * 3 * 20))
    batch = next(batches(make_task("qa", run).examples({}, lambda: None), 0, 0, 8, 0, 1))
    index = run.index(np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32))
    work = jax.jit(lambda params, batch: read_question(QaConfig(passages=3), context, params, batch, index, None, 3))
    read = work(run.initial_params(), batch)
    lengths = read.reader_input.lengths
    kept = fitting_lengths(lengths.reshape(1, -1), 62, 8 * 3 * 20, 1).reshape(lengths.shape)
    assert (kept < lengths).any() and read.truncated_fraction.total > 0
    allowed = read.allowed.any(axis=-1)
    assert allowed.any(axis=-1).all() and not (allowed & (np.arange(62) >= kept[..., None])).any()
    assert not (read.correct & ~read.allowed).any()


@pytest.mark.slow
def test_what_is_cut_is_the_same_on_several_devices(people, tmp_path):
    """What is reported of sequences that lose their last tokens is what a network reads of them."""
    run = make_run(tiny_config(people), tmp_path, open_sources(people), jax.devices()[:4])
    documents = jax.tree.map(lambda part: jnp.asarray(np.asarray(part)[:16]), run.documents)
    documents = documents._replace(lengths=documents.lengths - jnp.arange(16, dtype=documents.lengths.dtype) % 5)
    lengths = run.model.document_lengths(documents)
    places = int(0.9 * lengths.sum() / 4)
    placed = packed_lengths(lengths, 48, places, run.mesh, 1)
    assert 0 < (placed < lengths).sum() < 16
    params, embed = run.initial_params(), jax.jit(run.model.embed_documents, static_argnums=3)
    found, wanted = embed(params, documents, None, places), embed(params, documents._replace(lengths=placed), None, 0)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert np.abs(found - embed(params, documents, None, 0)).max() > 1e-3


def test_what_has_no_place_is_reported():
    mesh = make_mesh(devices=jax.devices()[:2], data=1, fsdp=2)
    bert = BertConfig(30).with_compute(hidden_sharding=logical_sharding(mesh, "batch", None, None))
    context = SimpleNamespace(model=SimpleNamespace(bert=bert))
    joints, passages = jnp.array([[12, 1], [7, 9], [2, 2], [2, 2]]), jnp.array([[5], [5], [5], [5]])
    lost = truncated_fraction(context, [(joints, 15), (passages, 0)], 12)
    assert (lost.total, lost.weight) == (8, 37 + 20), "10 stay of 12 beside 2, 2 and 1, and 5 of 9 and 7 beside 2, 2"
