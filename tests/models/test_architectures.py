"""Encoders of every architecture against transformers and sentence-transformers, from the same random weights.

Needs `pip install '.[parity]'`.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from pretrained_encoders import (
    KINDS,
    QUESTIONS,
    TEXTS,
    config_of,
    folder_tokenizer,
    load,
    passage_texts,
    passage_vectors,
    query_vectors,
    save_encoder,
    sentence_encoder,
)
from tiny_run import open_config, tiny_config
from weight_folders import edit_settings

from realm_jax import Model
from realm_jax.cli.prepare import prepare
from realm_jax.cli.weights import write_networks
from realm_jax.config import INHERITED, KEYS
from realm_jax.errors import UserError
from realm_jax.models.architectures.table import ARCHITECTURES, encoder_network
from realm_jax.models.layers import Params
from realm_jax.models.weights import encoder, encoder_config, find, read
from realm_jax.train.init_from import fill_from_pretrained
from realm_jax.train.recipe import train

torch = pytest.importorskip("torch")
library = pytest.importorskip("sentence_transformers")
models = pytest.importorskip("sentence_transformers.models")
pytest.importorskip("transformers")

CLOSE = 1e-4
LENGTHS = (3, 20, 126, 47)


def random_batch(words: int, lengths: tuple[int, ...] = LENGTHS) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that are not special, and the mask of some lengths; padding is 0 as in a step."""
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    return np.random.default_rng(0).integers(5, words, mask.shape) * mask, mask


def open_encoder(folder: Path, **compute: Any) -> tuple[Any, Params]:
    """The network of the encoder in a folder, and its parameters. compute: fields of `Compute`."""
    config = encoder_config(folder).with_compute(**compute)
    return encoder_network(config), read(find(folder, config, [encoder(config)]))["bert"]


def their_states(model: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    ids = np.where(mask, ids, model.config.pad_token_id)
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask.astype(int))}
        return model(**inputs).last_hidden_state.numpy()


def test_the_config_names_every_architecture():
    assert all(KEYS["model.architecture"].limit.holds(name) for name in ARCHITECTURES)
    assert {"bert", *KINDS} == {*ARCHITECTURES}


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_those_of_transformers_with_padding(kind, tmp_path):
    theirs = save_encoder(tmp_path / "model", kind)
    network, params = open_encoder(tmp_path / "model")
    ids, mask = random_batch(theirs.config.vocab_size)
    states = np.asarray(network.apply({"params": params}, ids, np.ones_like(ids), mask))
    np.testing.assert_allclose(states[mask], their_states(theirs, ids, mask)[mask], atol=CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute", ["packed", "loop", "positions"])
def test_hidden_states_do_not_depend_on_how_they_are_computed(kind, compute, tmp_path):
    theirs = save_encoder(tmp_path / "model", kind, num_hidden_layers=4, n_layers=4)
    ids, mask = random_batch(theirs.config.vocab_size)
    network, params = open_encoder(tmp_path / "model")
    expected = np.asarray(network.apply({"params": params}, ids, ids, mask))
    if compute == "positions":
        positions = np.array([[0, 2], [1, 19], [125, 64], [46, 0]])
        states = np.asarray(network.apply({"params": params}, ids, ids, mask, positions=positions))
        np.testing.assert_allclose(states, np.take_along_axis(expected, positions[..., None], 1), atol=1e-5)
        return
    options = {"packed": {"packed_length": 256}, "loop": {"remat": "layer", "scan": True}}
    other, _ = open_encoder(tmp_path / "model", **options[compute])
    states = np.asarray(other.apply({"params": params}, ids, ids, mask))
    np.testing.assert_allclose(states[mask], expected[mask], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_words_are_predicted_as_in_transformers(kind, tmp_path):
    theirs = save_encoder(tmp_path / "model", kind, "ForMaskedLM")
    tokenizer = folder_tokenizer(tmp_path / "model")
    model, params = load(config_of(tmp_path / "model"), tokenizer)
    ids, mask = random_batch(tokenizer.size, (20, 9))
    positions = np.array([[3, 7], [1, 8]])
    arrays = ids, np.zeros_like(ids), mask, positions
    ours = model.reader.network.apply({"params": params["reader"]}, *arrays, method="word_logits")
    with torch.no_grad():
        logits = theirs(torch.tensor(ids), attention_mask=torch.tensor(mask.astype(int))).logits.numpy()
    np.testing.assert_allclose(ours, np.take_along_axis(logits, positions[..., None], 1), atol=1e-3)


PROMPTS = {"prompts": {"query": "query: ", "document": "passage: "}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooling, options", [("mean", {}), ("cls", PROMPTS)])
def test_vectors_are_those_of_sentence_transformers(kind, pooling, options, tmp_path):
    theirs = sentence_encoder(tmp_path, kind, pooling, **options)
    config, tokenizer = config_of(tmp_path / "model"), folder_tokenizer(tmp_path / "model")
    model, params = load(config, tokenizer)
    assert (model.bert.architecture, model.pooling) == (kind, pooling)
    expected = theirs.encode_query(QUESTIONS)
    np.testing.assert_allclose(query_vectors(model, params, tokenizer, QUESTIONS), expected, atol=CLOSE)
    one_by_one = [query_vectors(model, params, tokenizer, [text])[0] for text in QUESTIONS]
    np.testing.assert_allclose(one_by_one, expected, atol=CLOSE)
    texts = passage_texts(config, "passage: " if options else "")
    expected = theirs.encode_document(texts)
    np.testing.assert_allclose(passage_vectors(model, params, tokenizer), expected, atol=CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, PROMPTS], ids=["plain", "prompts"])
def test_an_export_gives_the_same_vectors_in_sentence_transformers(kind, options, tmp_path):
    sentence_encoder(tmp_path, kind, **options)
    config, tokenizer = config_of(tmp_path / "model"), folder_tokenizer(tmp_path / "model")
    model, params = load(config, tokenizer)
    (tmp_path / "out").mkdir()
    write_networks(tmp_path / "out", config, model, params, tokenizer)
    query, document = (library.SentenceTransformer(str(tmp_path / "out" / name)) for name in model.embedder_names)
    assert query[0].auto_model.config.model_type == kind
    ours = query_vectors(model, params, tokenizer, QUESTIONS), passage_vectors(model, params, tokenizer)
    np.testing.assert_allclose(query.encode_query(QUESTIONS), ours[0], atol=CLOSE)
    texts = passage_texts(config, document.prompts["document"])
    np.testing.assert_allclose(document.encode_document(texts), ours[1], atol=CLOSE)
    again, same = load(config_of(tmp_path / "out"), tokenizer)
    assert again == model
    for name in model.embedder_names:
        jax.tree.map(np.testing.assert_array_equal, same[name], params[name])


def test_a_vocabulary_of_250000_with_unused_rows_gives_the_vectors_of_the_library(tmp_path):
    """As multilingual encoders have: ids that 16 bits do not hold, and more rows than the tokenizer has tokens."""
    sizes = {"vocabulary": 250_002}
    theirs = sentence_encoder(tmp_path, "xlm-roberta", sizes=sizes)
    tokenizer = folder_tokenizer(tmp_path / "model")
    assert (tokenizer.size, tokenizer.dtype) == (250_002, np.uint32)
    model, params = load(config_of(tmp_path / "model"), tokenizer)
    queries = [*QUESTIONS, "zq240000 zq9 the harbor"]
    assert max(tokenizer.encode(queries[-1]).ids) > 2**16
    np.testing.assert_allclose(
        query_vectors(model, params, tokenizer, queries), theirs.encode_query(queries), atol=CLOSE
    )


def test_vectors_are_cut_as_by_sentence_transformers_and_by_an_export(tmp_path):
    theirs = sentence_encoder(tmp_path, "xlm-roberta", truncate_dim=12)
    config, tokenizer = config_of(tmp_path / "model"), folder_tokenizer(tmp_path / "model")
    model, params = load(config, tokenizer)
    ours, expected = query_vectors(model, params, tokenizer, QUESTIONS), theirs.encode_query(QUESTIONS)
    assert ours.shape == (len(QUESTIONS), model.vector_size) == (len(QUESTIONS), 12)
    np.testing.assert_allclose(ours, theirs.encode_query(QUESTIONS, normalize_embeddings=True), atol=CLOSE)
    np.testing.assert_allclose(ours @ ours.T, theirs.similarity(expected, expected), atol=CLOSE)
    (tmp_path / "out").mkdir()
    write_networks(tmp_path / "out", config, model, params, tokenizer)
    exported = library.SentenceTransformer(str(tmp_path / "out" / "query_embedder"))
    np.testing.assert_allclose(exported.encode_query(QUESTIONS, normalize_embeddings=True), ours, atol=CLOSE)
    assert load(config_of(tmp_path / "out"), tokenizer)[0] == model


def test_more_dimensions_than_a_vector_has_are_rejected(tmp_path):
    sentence_encoder(tmp_path, "distilbert")
    config = config_of(tmp_path / "model", **{"encoder.dimensions": 33})
    with pytest.raises(UserError, match="config.encoder.dimensions: is 33, but vectors have 32 features; set at most"):
        load(config, folder_tokenizer(tmp_path / "model"))


def router(folder: Path, *after: Any, **routes: str) -> Any:
    """Save a Router of two encoders with different poolings, with modules after it; returns the library's model."""
    modules: dict[str, list[Any]] = {}
    for seed, (route, pooling) in enumerate(routes.items()):
        save_encoder(folder / route, "distilbert", initializer_range=0.3 + seed / 9)
        modules[route] = [models.Transformer(str(folder / route)), models.Pooling(32, pooling_mode=pooling)]
    made = library.SentenceTransformer(modules=[models.Router(modules), *after], device="cpu", **PROMPTS)
    made.save(str(folder / "model"))
    return made


def test_a_router_gives_each_encoder_its_route(tmp_path):
    theirs = router(tmp_path, models.Normalize(), query="mean", document="mean")
    tokenizer = folder_tokenizer(tmp_path / "document")
    config = config_of(tmp_path / "model")
    model, params = load(config, tokenizer)
    ours = query_vectors(model, params, tokenizer, QUESTIONS), passage_vectors(model, params, tokenizer)
    np.testing.assert_allclose(ours[0], theirs.encode_query(QUESTIONS), atol=CLOSE)
    np.testing.assert_allclose(ours[1], theirs.encode_document(passage_texts(config, "passage: ")), atol=CLOSE)
    with pytest.raises(UserError, match="has two encoders; set config.model.shared_tower=False"):
        load(config_of(tmp_path / "model", **{"model.shared_tower": True}), tokenizer)


def test_a_router_whose_routes_we_cannot_represent_is_rejected(tmp_path):
    router(tmp_path / "poolings", query="mean", document="cls")
    with pytest.raises(UserError, match="its encoders differ in pooling; set config.encoder.pooling"):
        config_of(tmp_path / "poolings" / "model")
    router(tmp_path / "routes", document="mean", title="mean")
    with pytest.raises(UserError, match="router_config.json: has no modules for the route 'query'; choose a model"):
        config_of(tmp_path / "routes" / "model")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tasks", ["ict", "realm"])
def test_a_run_trains_a_task_of_an_adaptation_and_exports_its_model(kind, tasks, people, tmp_path):
    passages = people.parent / "passages.jsonl"
    # A unigram tokenizer knows only the letters of its corpus, and an unknown token is no salient span.
    corpus = (
        [json.loads(line)["text"] for line in passages.read_text().splitlines()] if kind == "xlm-roberta" else TEXTS
    )
    sentence_encoder(tmp_path, kind, **PROMPTS, sizes={"num_hidden_layers": 2, "corpus": corpus})
    prepare(passages, tmp_path / "data", vocab=tmp_path / "model", workers=1)
    config = tiny_config(tmp_path / "data")
    config.update_from_flattened_dict(INHERITED | {"init_from": str(tmp_path / "model"), "tasks": tasks})
    config.data.update(query_length=24, document_length=80)
    config.realm.update(steps=2, batch_size=4, marginal="span", candidates=4)
    train(open_config(fill_from_pretrained(config), tmp_path / "run"))
    ours, theirs = Model(tmp_path / "run"), library.SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu")
    texts = ["When was he born?", "The house in it."]
    np.testing.assert_allclose(ours.encode(texts), theirs.encode_query(texts), atol=CLOSE)
    np.testing.assert_allclose(ours.encode(texts, "document"), theirs.encode_document(texts), atol=CLOSE)


def test_only_a_byte_level_tokenizer_has_other_tokens_behind_a_space(tmp_path):
    for kind in ("roberta", "xlm-roberta", "mpnet"):
        save_encoder(tmp_path / kind, kind)
    tokenizer = folder_tokenizer(tmp_path / "roberta")
    spaced, text = tokenizer.placed(behind_space=True), "The harbor\n\n is closed\nIn winter"
    encoding = spaced.encode(text)
    lines = "".join(f" {line.strip()}" for line in text.splitlines() if line)
    assert encoding.ids == tokenizer.encode(lines).ids != tokenizer.encode(text).ids
    assert "".join(text[start:end] for start, end in encoding.offsets) == "".join(text.split())
    assert spaced.placed(behind_space=False).encode(text) == tokenizer.encode(text)
    for kind in ("xlm-roberta", "mpnet"):
        other = folder_tokenizer(tmp_path / kind)
        assert other.placed(behind_space=True) is other


def test_word_pieces_of_mpnet_are_framed_by_its_own_tokens(tmp_path):
    """Its vocabulary has [CLS] and [SEP] of BERT as well."""
    save_encoder(tmp_path / "model", "mpnet")
    tokenizer = folder_tokenizer(tmp_path / "model")
    assert tokenizer.pieces(tokenizer.special) == ["<pad>", "<s>", "</s>", "<mask>"]


@pytest.mark.parametrize("name", ["t5", "deberta-v2", "nomic_bert"])
def test_an_unknown_model_type_is_rejected_by_name(name, tmp_path):
    save_encoder(tmp_path / "model", "roberta")
    edit_settings(tmp_path / "model", model_type=name)
    with pytest.raises(UserError, match=f"config.json: model_type is '{name}'; choose a model of one of the types"):
        config_of(tmp_path / "model")


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"]},
            "layer_types is",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type is 'yarn', not 'default'"),
        ({"norm_bias": True}, "norm_bias is True, not False"),
    ],
)
def test_a_modernbert_that_we_cannot_represent_is_rejected(changes, message, tmp_path):
    save_encoder(tmp_path / "model", "modernbert")
    edit_settings(tmp_path / "model", **changes)
    with pytest.raises(UserError, match=message):
        open_encoder(tmp_path / "model")


def test_an_encoder_of_one_segment_needs_a_template_for_passages(tmp_path):
    save_encoder(tmp_path / "model", "roberta")
    tokenizer = folder_tokenizer(tmp_path / "model")
    assert config_of(tmp_path / "model").encoder.passage_prompt == " {title} {text}"
    with pytest.raises(UserError, match="config.encoder.passage_prompt: 'roberta' does not read title and body as two"):
        load(config_of(tmp_path / "model", **{"encoder.passage_prompt": ""}), tokenizer)
