"""Weights of Hugging Face's BERT and of REALM's networks under its names: every tensor finds its place, in and out."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from numpy_bert import gelu_erf, hidden_states
from safetensors.numpy import load_file
from tiny import loud_params
from weight_folders import assert_same_bits, cut_into_shards, edit_settings, load_bert, save_network, save_tensors

from realm_jax.errors import UserError
from realm_jax.models.bert import Bert
from realm_jax.models.layers import BertConfig
from realm_jax.models.networks import Realm
from realm_jax.models.reader import Reader
from realm_jax.models.weights import NetworkFiles, find, networks, read

WIDTH, HEADS, LAYERS, HIDDEN, WORDS, POSITIONS = 8, 2, 2, 12, 11, 9
SETTINGS = {"num_attention_heads": HEADS, "hidden_act": "gelu", "layer_norm_eps": 1e-12}


def config(**changes) -> BertConfig:
    sizes = {"width": WIDTH, "layers": LAYERS, "heads": HEADS, "feed_forward": HIDDEN, "max_length": POSITIONS}
    return BertConfig(**{"vocabulary_size": WORDS} | sizes | {"dropout": 0.0, "hidden_act": "gelu"} | changes)


def random_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of a BertModel by its name, and those of a pooler, which an encoder does not need."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (WORDS, WIDTH),
        "embeddings.position_embeddings.weight": (POSITIONS, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
    }
    linear = {"pooler.dense": (WIDTH, WIDTH)}
    norms = ["embeddings.LayerNorm"]
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        linear |= {f"{layer}.attention.self.{part}": (WIDTH, WIDTH) for part in ("query", "key", "value")}
        linear |= {f"{layer}.attention.output.dense": (WIDTH, WIDTH)}
        linear |= {f"{layer}.intermediate.dense": (HIDDEN, WIDTH), f"{layer}.output.dense": (WIDTH, HIDDEN)}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, segments and mask of sequences of 7 and 4 pieces."""
    ids = np.random.default_rng(1).integers(0, WORDS, (2, 7))
    mask = np.arange(7) < np.array([[7], [4]])
    return ids * mask, ((np.arange(7) >= 3) & mask).astype(int), mask


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_imported_weights_compute_what_they_did(tmp_path, prefix):
    weights = random_weights()
    folder = save_tensors(tmp_path, {prefix + name: array for name, array in weights.items()}, SETTINGS)
    short = config(max_length=7)  # positions beyond those are left out
    params = load_bert(folder, short)
    ids, segments, mask = inputs()
    found = Bert(short).apply({"params": params}, ids, segments, mask)
    exact = {name: array.astype(np.float64) for name, array in weights.items()}
    for row, length in enumerate(mask.sum(axis=1)):
        wanted = hidden_states(exact, ids[row, :length], segments[row, :length], gelu_erf)
        np.testing.assert_allclose(found[row, :length], wanted, atol=1e-5)


def test_old_names_of_layer_norm_are_known(tmp_path):
    weights = random_weights()
    old = {n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): x for n, x in weights.items()}
    assert set(old) != set(weights)
    new = load_bert(save_tensors(tmp_path / "new", weights), config())
    jax.tree.map(np.testing.assert_array_equal, load_bert(save_tensors(tmp_path / "old", old), config()), new)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"layers": 3}, "has no encoder.layer.2.attention.self.query.weight; set config.model"),
        ({"layers": 1}, "has more than the model's 1 layers; set config.model.layers"),
        ({"width": 4}, r"embeddings.word_embeddings.weight is \(11, 8\), but the model needs \(11, 4\)"),
        (
            {"vocabulary_size": 12},
            "has 11 word embeddings, but the vocabulary has 12 tokens; name the vocabulary of this",
        ),
        ({"feed_forward": 16}, r"0.intermediate.dense.weight is \(8, 12\), but the model needs \(8, 16\)"),
        ({"max_length": 20}, "has 9 positions, but the model 20; set the lengths of config.data to at most 9"),
        ({"heads": 4}, "num_attention_heads is 2, but config.model.heads is 4"),
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu', but config.model.hidden_act is 'gelu_new'"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, changes, says):
    folder = save_tensors(tmp_path, random_weights(), SETTINGS)
    with pytest.raises(UserError, match=f"^{tmp_path}.*{says}"):
        load_bert(folder, config(**changes))


@pytest.mark.parametrize("theirs", ["gelu_new", "gelu_fast", "gelu_pytorch_tanh"])
def test_one_activation_has_several_names(tmp_path, theirs):
    folder = save_tensors(tmp_path, random_weights(), SETTINGS | {"hidden_act": theirs})
    load_bert(folder, config(hidden_act="gelu_new"))
    with pytest.raises(UserError, match="hidden_act is 'gelu_new', but config.model.hidden_act is 'gelu'"):
        load_bert(folder, config())


@pytest.mark.parametrize(
    "name, value",
    [
        *(("model_type", kind) for kind in ("megatron-bert", "t5", "deberta-v2", "electra")),
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
    ],
)
def test_a_network_that_is_no_plain_bert_is_refused_by_its_settings_whatever_its_tensors_are(tmp_path, name, value):
    tensors = {"distilbert.embeddings.word_embeddings.weight": np.zeros((WORDS, WIDTH), np.float32)}
    with pytest.raises(UserError, match=f"config.json: {name} is {value!r}[,;] .*choose a"):
        load_bert(save_tensors(tmp_path, tensors, SETTINGS | {name: value}), config())


def test_shards_are_read_as_one_file(tmp_path):
    whole = load_bert(save_tensors(tmp_path / "whole", random_weights(), SETTINGS), config())
    shards = cut_into_shards(save_tensors(tmp_path / "shards", random_weights(), SETTINGS), 3)
    assert_same_bits(load_bert(shards, config()), whole)


SHARD, INDEX = "model-00001-of-00002.safetensors", "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (SHARD, None, f"{SHARD}: is missing, but {INDEX} has tensors in it"),
        (SHARD, "cut", f"{SHARD}: cannot be read"),
        (INDEX, "{", f"{INDEX}: cannot be read"),
        (INDEX, "{}", f'{INDEX}: has no "weight_map" of tensors and files in its folder'),
        (INDEX, '{"weight_map": {"a": "../b"}}', f'{INDEX}: has no "weight_map" of tensors and files in its folder'),
        (INDEX, json.dumps({"weight_map": {"a": SHARD}}), f"{SHARD}: has no a, which {INDEX} has there"),
    ],
)
def test_shards_that_are_missing_or_damaged_are_named_in_a_line(tmp_path, file, content, says):
    folder = cut_into_shards(save_tensors(tmp_path, random_weights(), SETTINGS))
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(UserError, match=f"^{tmp_path}/{says}.*; fetch") as fault:
        load_bert(folder, config())
    assert "\n" not in str(fault.value)


def test_a_bert_of_another_kind_is_refused_by_its_tensors(tmp_path):
    weights = random_weights() | {"embeddings.position_ids": np.arange(POSITIONS)[None]}
    load_bert(save_tensors(tmp_path, weights), config())
    more = {"encoder.layer.0.crossattention.self.query.weight": np.zeros((WIDTH, WIDTH), np.float32)}
    with pytest.raises(UserError, match="crossattention.self.query.weight, which our bert does not have"):
        load_bert(save_tensors(tmp_path, weights | more), config())


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda x: (10 * x).astype(np.int8), "is I8; fetch the model in float32"),
        (lambda x: np.where(x > 0, x, np.nan).astype(np.float32), "holds numbers that are not finite"),
        (lambda x: np.full_like(x, np.inf), "holds numbers that are not finite"),
        (lambda x: x.astype(ml_dtypes.bfloat16) * np.nan, "holds numbers that are not finite"),
    ],
)
def test_numbers_that_are_none_are_refused(tmp_path, change, says):
    weights, name = random_weights(), "encoder.layer.0.output.dense.weight"
    with pytest.raises(UserError, match=f"model.safetensors: {name} {says}"):
        load_bert(save_tensors(tmp_path, weights | {name: change(weights[name])}), config())


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="has no model.safetensors"):
        load_bert(tmp_path, config())
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="model.safetensors: cannot be read"):
        load_bert(tmp_path, config())
    with pytest.raises(UserError, match="it is not a BertModel"):
        load_bert(save_tensors(tmp_path / "other", {"lstm.weight": np.zeros((2, 2), np.float32)}), config())
    folder = save_tensors(tmp_path / "settings", random_weights())
    (folder / "config.json").write_text("[1]")
    with pytest.raises(UserError, match="config.json: has no JSON object of settings"):
        load_bert(folder, config())


# ---- the parts beside the encoder, in and out


def realm(**changes) -> Realm:
    model = Realm(config(), projection=3, norm_epsilon=1e-12, reader=Reader(config(), span_hidden=4, span_width=2))
    return dataclasses.replace(model, **changes)


@functools.cache
def loud(model: Realm) -> dict:
    return loud_params(model, 1)


def written(folder: Path, network: str, kind: str = "bert", model: Realm | None = None) -> tuple[Path, dict]:
    """A network with loud parameters, saved; the folder and the parameters."""
    model = model or realm()
    return save_network(folder / f"{network}-{kind}", model, network, loud(model), kind), loud(model)[network]


def rewrite(folder: Path, change) -> Path:
    """A saved network with its tensors changed in place by a function of the dictionary."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    return save_tensors(folder, tensors)


def found(folder: Path, network: str, model: Realm | None = None) -> NetworkFiles:
    model = model or realm()
    return find(folder, model.bert, networks(model)[network])


@pytest.mark.parametrize("kind", ["bert", "realm"])
@pytest.mark.parametrize("network", ["query_embedder", "document_embedder", "reader"])
def test_a_round_trip_changes_no_bit(tmp_path, network, kind):
    folder, params = written(tmp_path, network, kind)
    source = found(folder, network)
    assert source.missing == ()
    assert_same_bits(read(source), params)


def test_parts_cover_every_parameter_once(tmp_path):
    wide = Reader(config(width=12, heads=3), span_hidden=4, span_width=2)  # of other sizes than the retriever
    for model in (realm(), realm(shared_tower=True), realm(reader=wide)):
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        for network, parts in networks(model).items():
            listed = [(tensor.path, tensor.shape) for part in parts for tensor in part.tensors]
            leaves = jax.tree_util.tree_leaves_with_path(shapes.pop(network))
            assert sorted(listed) == sorted((tuple(key.key for key in path), leaf.shape) for path, leaf in leaves)
        assert not shapes


def test_what_a_file_does_not_have_is_missing(tmp_path):
    folder = save_tensors(tmp_path, random_weights(), SETTINGS)
    tower, reader = found(folder, "query_embedder"), found(folder, "reader")
    assert (tower.present, tower.missing) == (("encoder", "pooler"), ("projection",))
    assert (reader.present, reader.missing) == (("encoder",), ("MLM head", "span head"))
    assert set(read(tower)) == {"bert", "pooler"}


def test_half_a_head_is_refused(tmp_path):
    folder, _ = written(tmp_path, "reader")
    rewrite(folder, lambda tensors: tensors.pop("cls.predictions.transform.LayerNorm.bias"))
    with pytest.raises(UserError, match="has no cls.predictions.transform.LayerNorm.bias"):
        found(folder, "reader")


def test_a_head_of_another_size_is_named_with_both_shapes(tmp_path):
    folder, _ = written(tmp_path, "query_embedder")
    with pytest.raises(UserError, match=r"cls.dense.weight is \(8, 3\), but the model needs \(8, 5\)"):
        found(folder, "query_embedder", realm(projection=5))


@pytest.mark.parametrize("tied, has", [(True, True), (False, False)])
def test_a_word_head_with_an_output_layer_of_its_own_is_left_out(tmp_path, tied, has):
    folder, _ = written(tmp_path, "reader")

    def add(tensors: dict) -> None:
        words = tensors["bert.embeddings.word_embeddings.weight"]
        tensors["cls.predictions.decoder.weight"] = words.copy() if tied else words + 1
        tensors["cls.predictions.decoder.bias"] = tensors.pop("cls.predictions.bias")

    assert ("MLM head" in found(rewrite(folder, add), "reader").present) == has


def test_epsilons_of_the_heads_are_compared(tmp_path):
    ours = realm(norm_epsilon=1e-3)
    folder, _ = written(tmp_path, "query_embedder", model=ours)
    found(folder, "query_embedder", ours)
    says = "projection_layer_norm_eps is 0.001, but config.encoder.norm_epsilon is 1e-12"
    with pytest.raises(UserError, match=says):
        found(folder, "query_embedder")
    folder, _ = written(tmp_path, "reader")
    edit_settings(folder, reader_layer_norm_eps=1e-12)
    with pytest.raises(UserError, match="reader_layer_norm_eps is 1e-12, but the epsilon of the span head, which is"):
        found(folder, "reader")


def test_a_tower_of_transformers_realm_has_one_epsilon(tmp_path):
    folder, _ = written(tmp_path, "query_embedder", "realm")
    edit_settings(folder, projection_layer_norm_eps=None)
    found(folder, "query_embedder")
    with pytest.raises(UserError, match="projection_layer_norm_eps is 1e-12, but config.encoder.norm_epsilon is 0.001"):
        found(folder, "query_embedder", realm(norm_epsilon=1e-3))
