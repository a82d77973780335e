"""The networks: against a NumPy transformer that never sees padding, and in the precisions that they may be run in."""

import dataclasses
import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from numpy_bert import gelu_tanh, hidden_states, linear, norm
from tiny import VOCABULARY, document_rows, query_rows, random_words, tiny_bert, tiny_realm

from realm_jax.models import attention, bert
from realm_jax.models.attention import cpu_attention, dot_product_attention, select_attention
from realm_jax.models.bert import Bert
from realm_jax.models.inputs import PassageBatch, ReaderInput, document_segments, flatten_passages, reader_inputs
from realm_jax.models.layers import BertConfig, dense, initializer, matrix_product, unfused_gradient
from realm_jax.models.networks import Realm
from realm_jax.models.weights import networks

BATCH = 3
WAYS = dot_product_attention, cpu_attention
MODEL = tiny_realm()
embed_queries = jax.jit(MODEL.embed_queries)
embed_documents = jax.jit(MODEL.embed_documents)
query_tokens, document_tokens = jax.jit(MODEL.query_tokens), jax.jit(MODEL.document_tokens)
read_words = jax.jit(MODEL.reader.read_words)
read_spans = jax.jit(MODEL.reader.read_spans)
init = jax.jit(MODEL.init)


@functools.cache
def parameters() -> dict:
    """Fresh parameters, all of them shifted a little, so that no bias is zero, no scale one and no tower the other."""
    params = init(jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(scale=0.05, size=x.shape), x.dtype), params)


def queries() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return query_rows([random_words(rng, size) for size in (5, 3, 8)])


def documents() -> PassageBatch:
    rng = np.random.default_rng(2)
    sizes = ((2, 9), (0, 4), (3, 7))
    return document_rows([(random_words(rng, title), random_words(rng, body)) for title, body in sizes])


def joint() -> ReaderInput:
    """Each query joined with one passage."""
    query = queries()
    whole = reader_inputs(query["query"], query["query_length"], PassageBatch(*(part[:, None] for part in documents())))
    return ReaderInput(*map(np.asarray, flatten_passages(whole)))


def noise(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The same sequences with random words where their padding was."""
    words = np.random.default_rng(3).integers(4, VOCABULARY, ids.shape)
    return np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, words).astype(ids.dtype)


def by_names(network: str) -> dict[str, np.ndarray]:
    """The parameters of a network in float64, by Hugging Face's names."""
    found = {}
    for part in networks(MODEL)[network]:
        for tensor in part.tensors:
            array = np.asarray(functools.reduce(dict.__getitem__, tensor.path, parameters()[network]), np.float64)
            found[tensor.name] = array.T if tensor.is_transposed else array
    return found


def numpy_embedder(w, ids, segments):
    pooled = np.tanh(linear(hidden_states(w, ids, segments)[0], w, "pooler.dense"))
    return norm(linear(pooled, w, "cls.dense"), w, "cls.LayerNorm")


def test_the_query_tower_is_a_transformer_a_tanh_a_projection_and_a_layer_norm():
    query, w = queries(), by_names("query_embedder")
    found = embed_queries(parameters(), query["query"], query["query_length"])
    for row, length in enumerate(query["query_length"]):
        wanted = numpy_embedder(w, query["query"][row, :length], np.zeros(length, int))
        np.testing.assert_allclose(found[row], wanted, atol=2e-5)


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_other_poolings_take_the_hidden_states_as_they_are(pooling):
    query, w = queries(), by_names("query_embedder")
    model = dataclasses.replace(MODEL, pooling=pooling, projection=0, normalization="none")
    found = model.embed_queries(parameters(), query["query"], query["query_length"])
    for row, length in enumerate(query["query_length"]):
        hidden = hidden_states(w, query["query"][row, :length], np.zeros(length, int))
        wanted = {"cls": hidden[0], "mean": hidden.mean(axis=0), "last": hidden[-1]}[pooling]
        np.testing.assert_allclose(found[row], wanted, atol=2e-5)


def test_the_document_tower_is_the_same_network_with_segments():
    texts, w = documents(), by_names("document_embedder")
    segments = np.asarray(document_segments(texts))
    found = embed_documents(parameters(), texts)
    for row, length in enumerate(texts.lengths):
        wanted = numpy_embedder(w, texts.ids[row, :length], segments[row, :length])
        np.testing.assert_allclose(found[row], wanted, atol=2e-5)


def test_token_vectors_are_the_hidden_states_at_unit_length():
    query, texts = queries(), documents()
    segments = np.asarray(document_segments(texts))
    found = query_tokens(parameters(), query["query"], query["query_length"]), document_tokens(parameters(), texts)
    rows = (query["query"], np.zeros_like(query["query"]), query["query_length"]), (texts.ids, segments, texts.lengths)
    for tokens, network, (ids, kinds, lengths) in zip(found, MODEL.embedder_names, rows, strict=True):
        np.testing.assert_array_equal(tokens.mask, np.arange(ids.shape[1]) < lengths[:, None])
        for row, length in enumerate(lengths):
            hidden = hidden_states(by_names(network), ids[row, :length], kinds[row, :length])
            wanted = hidden / np.linalg.norm(hidden, axis=1, keepdims=True)
            np.testing.assert_allclose(tokens.vectors[row, :length], wanted, atol=2e-5)


def test_words_are_predicted_by_a_gelu_layer_and_the_word_embeddings():
    inputs, positions = joint(), np.array([[1, 3], [2, 2], [8, 0]])
    found = read_words(parameters(), inputs, positions)
    w = by_names("reader")
    for row, length in enumerate(inputs.lengths):
        hidden = hidden_states(w, inputs.ids[row, :length], inputs.segments[row, :length])[positions[row]]
        hidden = gelu_tanh(linear(hidden, w, "cls.predictions.transform.dense"))
        hidden = norm(hidden, w, "cls.predictions.transform.LayerNorm")
        logits = hidden @ w["embeddings.word_embeddings.weight"].T + w["cls.predictions.bias"]
        wanted = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        np.testing.assert_allclose(found[row], wanted, atol=3e-5)


def test_a_span_is_scored_by_its_ends():
    inputs = joint()
    found = read_spans(parameters(), inputs)
    assert found.shape == (*inputs.ids.shape, MODEL.reader.span_width)
    w = by_names("reader")
    for row, length in enumerate(inputs.lengths):
        hidden = hidden_states(w, inputs.ids[row, :length], inputs.segments[row, :length])
        start, end = np.split(linear(hidden, w, "qa_outputs.dense_intermediate"), 2, axis=-1)
        for first, width in np.ndindex(length, MODEL.reader.span_width):
            if first + width < length:
                span = np.maximum(start[first] + end[first + width], 0)
                span = norm(span, w, "qa_outputs.layer_normalization", epsilon=1e-3)
                wanted = linear(span, w, "qa_outputs.dense_output")[0]
                np.testing.assert_allclose(found[row, first, width], wanted, atol=3e-5)


def test_what_stands_in_the_padding_changes_nothing():
    query, texts, inputs = queries(), documents(), joint()
    noisy_query = noise(query["query"], query["query_length"])
    noisy_texts = texts._replace(ids=noise(texts.ids, texts.lengths))
    noisy_joint = inputs._replace(ids=noise(inputs.ids, inputs.lengths))
    positions = np.array([[1, 3], [2, 2], [8, 0]])
    pairs = [
        [embed_queries(parameters(), ids, query["query_length"]) for ids in (query["query"], noisy_query)],
        [embed_documents(parameters(), documents) for documents in (texts, noisy_texts)],
        [read_words(parameters(), joint, positions) for joint in (inputs, noisy_joint)],
        [np.asarray(read_spans(parameters(), joint))[inputs.mask][:, 0] for joint in (inputs, noisy_joint)],
    ]
    for plain, noisy in pairs:
        np.testing.assert_array_equal(plain, noisy)


def test_the_last_layer_at_some_positions_is_the_full_computation_there():
    inputs, positions = joint(), jnp.array([[0, 11, 5], [6, 6, 0], [8, 1, 2]])
    bert = jax.jit(Bert(tiny_bert()).apply)
    arrays = ({"params": parameters()["reader"]["bert"]}, inputs.ids, inputs.segments, inputs.mask)
    whole = jnp.take_along_axis(bert(*arrays), positions[:, :, None], axis=1)
    np.testing.assert_allclose(bert(*arrays, positions), whole, atol=2e-6)


# --- towers -----------------------------------------------------------------------------------------------------------


def test_both_towers_start_equal_and_can_be_donated():
    """Two copies: a step that is given its state for good cannot be given one array twice."""
    params = init(jax.random.key(3))
    assert set(params) == {"query_embedder", "document_embedder", "reader"}
    jax.tree.map(np.testing.assert_array_equal, params["query_embedder"], params["document_embedder"])
    step = jax.jit(lambda p: jax.tree.map(lambda x: x + 1.0, p), donate_argnums=0)
    assert float(step(params)["query_embedder"]["bert"]["embedding_norm"]["scale"][0]) == 2.0


def test_a_shared_tower_embeds_queries_and_documents():
    """One tree of parameters; a document that is all title has segments 0, as a query has."""
    model, query = tiny_realm(shared_tower=True, layers=1), queries()
    as_document = PassageBatch(query["query"], query["query_length"], query["query_length"] - 2)
    assert set(jax.eval_shape(model.init, jax.random.key(0))) == {"embedder", "reader"}
    params = {"embedder": parameters()["query_embedder"]}
    from_query = jax.jit(model.embed_queries)(params, query["query"], query["query_length"])
    from_document = jax.jit(model.embed_documents)(params, as_document)
    np.testing.assert_allclose(from_query, from_document, atol=1e-6)


@pytest.mark.parametrize("width, stddev", [(768, 0.02), (64, 0.02 * 12**0.5)])
def test_narrow_models_start_as_loud_as_bert_base(width, stddev):
    """As in BERT the deviation is that of the normal before it is cut at two deviations, which leaves 0.88 of it."""
    sample = initializer(width)(jax.random.key(0), (200, 200))
    np.testing.assert_allclose(sample.std(), 0.8796 * stddev, rtol=0.02)
    assert jnp.abs(sample).max() <= 2 * stddev


def test_dropout_is_off_without_a_key_and_a_function_of_the_key():
    query = queries()
    embed = jax.jit(tiny_realm(dropout=0.5, layers=1).embed_queries)
    arrays = (parameters(), query["query"], query["query_length"])
    assert "random" not in str(jax.make_jaxpr(embed)(*arrays))
    one, again, other = (np.asarray(embed(*arrays, jax.random.key(seed))) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 0.01
    assert (one == 0).any(), "dropout reaches the vector itself, and so the retrieval scores"


# --- bfloat16 ---------------------------------------------------------------------------------------------------------

POSITIONS = np.ones((BATCH, 2), int)


def everything(model: Realm, inputs: ReaderInput, params):
    """Vectors, scores, words and spans of one batch, as the tasks compute them."""
    query = queries()
    vectors = model.embed_queries(params, query["query"], query["query_length"])
    scores = vectors @ model.embed_documents(params, documents()).T
    return vectors, scores, model.reader.read_words(params, inputs, POSITIONS), model.reader.read_spans(params, inputs)


def primitives(jaxpr):
    """Every equation of a program, those inside its calls too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


def test_a_temperature_divides_the_vectors_of_queries():
    plain = tiny_realm()
    params = jax.jit(plain.init)(jax.random.key(0))
    query = query_rows([[5, 6, 7], [8, 9]])
    rows = query["query"], query["query_length"]
    vectors = plain.embed_queries(params, *rows)
    scaled = dataclasses.replace(plain, temperature=0.05)
    np.testing.assert_array_equal(scaled.query_vectors(params, *rows), vectors)
    np.testing.assert_allclose(scaled.embed_queries(params, *rows), vectors / 0.05, rtol=1e-6)


@pytest.mark.parametrize("states", [None, jnp.float32])
def test_bfloat16_is_for_matrix_products_alone(states):
    """LayerNorm (its reciprocal root and sums), softmax (its exponential, maximum and sum) and all results: float32."""
    program = functools.partial(everything, tiny_realm(dtype=jnp.bfloat16, state_dtype=states), joint())
    equations = list(primitives(jax.make_jaxpr(program)(parameters()).jaxpr))
    sensitive = {"exp", "rsqrt", "log", "reduce_sum", "reduce_max", "div"}
    assert {"exp", "rsqrt", "log", "reduce_sum", "reduce_max"} <= {e.primitive.name for e in equations}
    floats = [v.aval.dtype for e in equations if e.primitive.name in sensitive for v in e.invars]
    assert jnp.bfloat16 not in floats
    assert {x.dtype for x in jax.eval_shape(program, parameters())} == {jnp.dtype("float32")}
    products = [e for e in equations if e.primitive.name == "dot_general"]
    low = [e for e in products if all(v.aval.dtype == jnp.bfloat16 for v in e.invars)]
    of_layer = 8 if states is None else 6  # two of them are of attention
    towers = 2 * (2 * of_layer + 1)  # products in each of two layers, and the pooler
    reader = 2 * 2 * of_layer + 2  # the same layers for words and for spans, the MLM head's layer, the span projection
    assert len(low) == towers + reader


@pytest.mark.parametrize("states", [jnp.bfloat16, jnp.float32])
def test_gradients_of_bfloat16_products_are_products_in_bfloat16_that_add_up_in_float32(states):
    """And those of float32 are what they are without a rule of their own."""
    x, kernel = (jnp.asarray(np.random.default_rng(0).normal(size=size), states) for size in ((3, 5, 8), (8, 6)))

    def total(product, *given):
        return (product(*given).astype(jnp.float32) ** 2).sum()

    def rounded(*given):
        return matrix_product(*given, jnp.bfloat16)

    found = jax.grad(functools.partial(total, rounded), argnums=(0, 1))
    program = jax.make_jaxpr(found)(x, kernel)
    assert {part.dtype for part in (rounded(x, kernel), *found(x, kernel))} == {jnp.dtype(states)}
    products = [e for e in primitives(program.jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) == 3 and all(v.aval.dtype == jnp.bfloat16 for e in products for v in e.invars)
    assert all(e.params["preferred_element_type"] == jnp.float32 for e in products)
    transposed = any(e.primitive.name == "transpose" for e in primitives(program.jaxpr))
    assert transposed == (states == jnp.bfloat16)  # XLA has no kernel for one that is transposed into float32
    full = tuple(part.astype(jnp.float32) for part in (x, kernel))
    ways = functools.partial(matrix_product, dtype=jnp.float32), jnp.matmul
    ours, plain = (jax.grad(functools.partial(total, way), argnums=(0, 1))(*full) for way in ways)
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_the_gradient_of_a_bias_adds_up_in_float32():
    """Over four thousand tokens, whose cotangents are bfloat16; a bfloat16 sum is off by percents. The result has the
    bits of `nn.Dense`."""
    rng = np.random.default_rng(0)
    states = jnp.asarray(rng.normal(size=(1, 4096, 16)), jnp.bfloat16)
    cotangents = jnp.asarray(rng.uniform(size=(1, 4096, 8)), jnp.bfloat16)
    layer = dense(8, ("embed", "mlp"), tiny_bert(dtype=jnp.bfloat16), "layer")
    params = nn.unbox(layer.init(jax.random.key(0), states))["params"] | {"bias": jnp.linspace(-1, 1, 8)}

    result, back = jax.vjp(lambda params: layer.apply({"params": params}, states), params)
    gradient = back(cotangents)[0]["bias"]
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, cotangents.astype(jnp.float32).sum((0, 1)), rtol=1e-6)
    plain = nn.Dense(8, dtype=jnp.bfloat16, dot_general=lambda x, kernel, *_, **__: matrix_product(x, kernel, x.dtype))
    np.testing.assert_array_equal(result, plain.apply({"params": params}, states))


def test_the_bias_of_keys_has_no_gradient(monkeypatch):
    """It adds a constant to all scores of a query. All other gradients are what they are if it is differentiated."""
    network = Bert(tiny_bert(dropout=0.2))
    ids, numbers = jnp.asarray(np.random.default_rng(0).integers(4, VOCABULARY, (3, 12))), jnp.arange(3)
    params = jax.tree.map(
        lambda leaf: np.random.default_rng(leaf.size).normal(0, 0.3, leaf.shape).astype(np.float32),
        nn.unbox(network.init(jax.random.key(0), ids, 0 * ids, ids >= 0)),
    )

    def gradients():
        def loss(params):
            rngs = {"dropout": jax.random.key(1)}
            states = network.apply(params, ids, 0 * ids, ids >= 0, sequence_numbers=numbers, rngs=rngs)
            return (states * jnp.cos(jnp.arange(states.size).reshape(states.shape))).sum()

        return flatten_dict(jax.jit(jax.grad(loss))(params)["params"], sep="/")

    found = gradients()
    monkeypatch.setattr(bert, "dense", lambda *sizes, is_bias_trained=True: dense(*sizes))
    wanted = gradients()
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        if name.endswith("key/bias"):
            assert not gradient.any() and np.abs(wanted[name]).max() < 1e-5
        else:
            assert gradient.any()
            np.testing.assert_allclose(gradient, wanted[name], rtol=1e-5, atol=1e-5)


def test_the_gradient_of_attention_norm_is_complete_before_it_is_read_on_tpus():
    """A barrier, which the compiler cannot move operations across; it changes neither the result nor the gradient."""
    x = jnp.linspace(-1, 1, 12).reshape(3, 4)
    result, back = jax.vjp(unfused_gradient, x)
    np.testing.assert_array_equal(result, x)
    np.testing.assert_array_equal(back(2 * x)[0], 2 * x)
    ids = jnp.ones((2, 8), jnp.int32)
    for way, barriers in (("xla", 0), ("tpu", 2)):  # one of each layer
        network = Bert(tiny_bert(layers=2).with_compute(attention=way))
        params = jax.eval_shape(network.init, jax.random.key(0), ids, ids * 0, ids > 0)
        gradient = jax.grad(lambda params, network=network: network.apply(params, ids, ids * 0, ids > 0).sum())
        assert str(jax.make_jaxpr(gradient)(params)).count("optimization_barrier") == barriers


def test_parameters_are_float32_whatever_the_dtype_of_products():
    fresh = jax.eval_shape(tiny_realm(dtype=jnp.bfloat16).init, jax.random.key(0))
    assert {x.dtype for x in jax.tree.leaves(fresh)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("states", [None, jnp.float32])
def test_bfloat16_stays_near_float32(states):
    """Vectors have unit variance, so that their errors are relative; a score is the sum of eight products of them."""
    query, inputs = queries(), joint()
    vectors = embed_queries(parameters(), query["query"], query["query_length"])
    scores = vectors @ embed_documents(parameters(), documents()).T
    exact = (vectors, scores, read_words(parameters(), inputs, POSITIONS), read_spans(parameters(), inputs))
    near = tiny_realm(dtype=jnp.bfloat16, state_dtype=states)
    close = jax.jit(functools.partial(everything, near, inputs))(parameters())
    for a, b, tolerance in zip(exact, close, (0.1, 0.3, 0.1, 0.1), strict=True):
        assert 0 < np.abs(a - b).max() < tolerance


def test_a_fresh_layer_hands_on_what_it_attends_to():
    for tower in init(jax.random.key(3)).values():
        for layer in ("layer_0", "layer_1"):
            block = tower["bert"][layer]
            product = block["value"]["kernel"] @ block["attention_output"]["kernel"]
            np.testing.assert_allclose(product, np.eye(product.shape[0]), atol=1e-5)


def test_norm_scale_sets_the_length_of_fresh_vectors():
    model = dataclasses.replace(MODEL, norm_scale=0.5)
    rows = queries()
    vectors = jax.jit(lambda key, *rows: model.embed_queries(model.init(key), *rows))(
        jax.random.key(0), rows["query"], rows["query_length"]
    )
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 0.5 * model.projection**0.5, rtol=1e-4)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 0.05)])
def test_attending_in_turn_has_the_values_and_gradients_of_attending_at_once(monkeypatch, dtype, tolerance):
    """Its backward pass is written by hand. Queries may be fewer than keys."""
    monkeypatch.setattr(attention, "MIN_LOOP_SCORES", 1)
    parts = jax.random.normal(jax.random.key(0), (4, 3, 20, 16), dtype)
    mask = jnp.arange(20) < jnp.array([20, 7, 1])[:, None]

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(way, query, key, value, cotangent):
        attended, back = jax.vjp(lambda *parts: way(*parts, mask, 2), query, key, value)
        return attended, *back(cotangent)

    for positions in (20, 3):
        arrays = (parts[0][:, :positions], parts[1], parts[2], parts[3][:, :positions])
        for at_once, in_turn in zip(*(with_gradients(way, *arrays) for way in WAYS), strict=True):
            assert in_turn.dtype == at_once.dtype == dtype
            np.testing.assert_allclose(in_turn.astype(float), at_once.astype(float), atol=tolerance)


@pytest.mark.parametrize("length", [20, 21, 3])
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 0.05)])
def test_a_fused_kernel_is_given_lengths_and_scale(monkeypatch, dtype, tolerance, length):
    """XLA's own version of the kernel, since cuDNN's is for GPUs; a passage without a word disturbs no other."""
    called_with = []  # lengths

    def of_xla(*parts, implementation, **options):
        called_with.append(parts[0].shape[1])
        return fused(*parts, implementation="xla", **options)

    fused = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", of_xla)
    parts = jax.random.normal(jax.random.key(0), (3, 4, length, 16), dtype)
    mask = jnp.arange(length) < jnp.array([length, 7, 1, 0])[:, None]
    for positions in (length, 3):
        arrays = parts[0][:, :positions], parts[1], parts[2]

        def total(way, *arrays):
            return (way(*arrays, mask, 2)[:3].astype(jnp.float32) ** 2).sum()

        both = dot_product_attention, attention.cudnn_attention
        ways = [jax.value_and_grad(functools.partial(total, way), (0, 1, 2))(*arrays) for way in both]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a.astype(float), b.astype(float), atol=tolerance), *ways)
    assert called_with == {20: [20], 21: [22], 3: []}[length]


@pytest.mark.parametrize(
    "platform, devices, dtype, wanted",
    [
        ("cpu", 1, jnp.float32, "cpu"),
        ("cpu", 8, jnp.float32, "xla"),
        ("gpu", 8, jnp.bfloat16, "cudnn"),
        ("gpu 7.5", 8, jnp.bfloat16, "xla"),
        ("gpu", 8, jnp.float32, "xla"),
        ("tpu", 8, jnp.bfloat16, "tpu"),
    ],
)
def test_layers_attend_in_the_way_that_suits_the_devices(platform, devices, dtype, wanted):
    kind, _, capability = platform.partition(" ")
    device = types.SimpleNamespace(platform=kind, compute_capability=capability or "9.0")
    mesh = types.SimpleNamespace(size=devices, devices=np.array([device] * devices))
    assert select_attention(mesh, jnp.dtype(dtype)) == wanted


def test_long_sequences_are_embedded_in_turn_where_asked(monkeypatch):
    """The same vectors, and no product over the whole batch's scores."""
    monkeypatch.setattr(attention, "MIN_LOOP_SCORES", 1)
    config = BertConfig(30, width=8, layers=2, heads=2, feed_forward=16, max_length=12, dropout=0.0)
    ids = jax.random.randint(jax.random.key(1), (5, 12), 0, 30)
    mask = jnp.arange(12) < jnp.arange(8, 13)[:, None]
    towers = [Bert(config.with_compute(attention=way)) for way in ("xla", "cpu")]
    params = towers[0].init(jax.random.key(0), ids, ids * 0, mask)
    states = [np.asarray(tower.apply(params, ids, ids * 0, mask)) for tower in towers]
    np.testing.assert_allclose(*states, atol=1e-5)
    programs = [jax.jit(tower.apply).lower(params, ids, ids * 0, mask).as_text() for tower in towers]
    assert ["stablehlo.while" in program for program in programs] == [False, True]
