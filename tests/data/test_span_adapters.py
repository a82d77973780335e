"""Models as finders of salient spans: a stand-in with spaCy's interface, and a BERT for token classification."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from capitals import TEXTS
from numpy_bert import gelu_erf, hidden_states, linear
from weight_folders import save_tensors

from realm_jax.cli.prepare import prepare
from realm_jax.data import spans as span_finders
from realm_jax.data.spans import Span, finder, without_overlaps
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokens
from realm_jax.errors import UserError
from realm_jax.models import tagger
from realm_jax.models.layers import BertConfig
from realm_jax.models.tagger import entities, load_tagger
from realm_jax.models.weights import encoder, token_classifier

TEXT = "Ada Lovelace met two men in May 1843. She lived in London last year.\n\nHe knew Turing."
FOUND = [
    ("Ada Lovelace", "PERSON"),
    ("two", "CARDINAL"),
    ("May 1843", "DATE"),
    ("London ", "GPE"),  # some models take the space behind
    ("last year", "DATE"),
    ("Turing", "PERSON"),
]
WANTED = [("Ada Lovelace", "PERSON"), ("May 1843", "date"), ("London", "GPE"), ("Turing", "PERSON")]


# --- spaCy ------------------------------------------------------------------------------------------------------------


class Spacy:
    """`spacy.load(name)` → a pipeline with `pipe_names` and `pipe(texts)`."""

    pipe_names = ("tok2vec", "ner")
    longest = 0

    def pipe(self, texts: Any) -> Any:
        for text in texts:
            Spacy.longest = max(Spacy.longest, len(text))
            names = [(m.start(), m.end(), kind) for name, kind in FOUND for m in re.finditer(re.escape(name), text)]
            yield SimpleNamespace(ents=[SimpleNamespace(start_char=a, end_char=b, label_=kind) for a, b, kind in names])


@pytest.fixture
def spacy(monkeypatch):
    def load(name: str) -> Spacy:
        if name == "en_core_web_sm":
            return Spacy()
        if name == "en_blank":
            blank = Spacy()
            blank.pipe_names = ("tok2vec",)
            return blank
        raise OSError(f"[E050] Can't find model '{name}'. It doesn't seem to be a Python package.")

    module = ModuleType("spacy")
    module.load = load
    monkeypatch.setitem(sys.modules, "spacy", module)


def test_spacy_gives_names_and_the_rules_dates(spacy):
    find = finder("spacy:en_core_web_sm")
    spans = find(TEXT)
    assert [(TEXT[span.start : span.end], span.kind) for span in spans] == WANTED
    assert {span.score for span in spans} == {1.0}
    assert find("") == [] and find("\n\n") == []


def test_an_absent_library_is_reported_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(UserError, match=r"spacy:en'.*needs spacy.*pip install -e '.\[spacy\]'"):
        finder("spacy:en")


@pytest.mark.parametrize(
    "name, message",
    [
        ("spacy:xx_none", r"OSError: \[E050\] Can't find model 'xx_none'.*; run `python -m spacy download xx_none`"),
        ("spacy:en_blank", "the pipeline has no named entities"),
    ],
)
def test_an_absent_pipeline_is_an_error_of_one_line(spacy, name, message):
    with pytest.raises(UserError, match=f"^span finder '{name}': {message}") as raised:
        finder(name)
    assert "\n" not in str(raised.value)


def test_spacy_gets_long_texts_in_parts_of_whole_sentences(spacy, monkeypatch):
    monkeypatch.setattr(span_finders, "SPACY_CHARACTERS", 100)
    Spacy.longest = 0
    text = " ".join([TEXT] * 20)
    spans = finder("spacy:en_core_web_sm")(text)
    assert [(text[span.start : span.end], span.kind) for span in spans] == WANTED * 20
    assert 60 < Spacy.longest <= 100


def test_the_first_of_two_overlapping_names_stays():
    text = "The New York Times"
    names = [Span(4, 12, "GPE", 1.0), Span(8, 18, "ORG", 1.0), Span(13, 18, "ORG", 1.0)]
    assert without_overlaps(text, names) == [names[0], names[2]]


# --- tags to names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tags, names",
    [
        ("B-PER I-PER O B-LOC", ["Ada Lovelace PER", "London LOC"]),
        ("I-PER I-PER O I-LOC", ["Ada Lovelace PER", "London LOC"]),  # IOB1
        ("B-PER B-PER O O", ["Ada PER", "Lovelace PER"]),
        ("B-PER E-PER O S-LOC", ["Ada Lovelace PER", "London LOC"]),  # BIOES
        ("B-PER L-PER O U-LOC", ["Ada Lovelace PER", "London LOC"]),  # BILOU
        ("U-PER U-PER U-LOC U-LOC", ["Ada PER", "Lovelace PER", "saw LOC", "London LOC"]),
        ("S-PER I-PER O O", ["Ada PER", "Lovelace PER"]),  # nothing goes on after S
        ("PER PER O geo-political", ["Ada Lovelace PER", "London geo-political"]),  # plain kinds
        ("B-PER I-ORG I-ORG O", ["Ada PER", "Lovelace saw ORG"]),
        ("O O O O", []),
    ],
)
def test_tags_of_any_scheme_become_names(tags, names):
    text = "Ada Lovelace saw London"
    words = list(re.finditer(r"\S+", text))
    starts, ends = np.array([word.span() for word in words]).T
    tokens, first = Tokens(np.zeros(4, np.uint16), starts, ends), np.ones(4, bool)
    spans = entities(tokens, first, tags.split(), np.ones(4))
    assert [f"{text[span.start : span.end]} {span.kind}" for span in spans] == names


def test_a_word_has_the_tag_of_its_first_token_and_a_name_its_words_mean_probability():
    tokens = Tokens(np.zeros(3, np.uint16), np.array([0, 3, 7]), np.array([3, 6, 9]))
    first = np.array([True, False, True])
    probabilities = np.array([0.5, 0.1, 1.0])
    assert entities(tokens, first, ["B-LOC", "O", "O"], probabilities) == [Span(0, 6, "LOC", 0.5)]
    assert entities(tokens, first, ["B-LOC", "O", "I-LOC"], probabilities) == [Span(0, 9, "LOC", 0.75)]


# --- a BERT for token classification ----------------------------------------------------------------------------------

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 40, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "type_vocab_size": 2,
}  # fmt: skip
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,0123"]
PIECES += [f"##{piece}" for piece in "abcdefghijklmnopqrstuvwxyz"] + ["Paris", "the", "of", "capital", "is"]


def save_tagger(folder: Path, labels: list[str] = LABELS, **settings: Any) -> Path:
    """A small random model with a cased vocabulary, as Hugging Face stores one."""
    config = BertConfig(len(PIECES), 16, 2, 2, 32, 40)
    rng = np.random.default_rng(1)
    tensors = {}
    for tensor in (*encoder(config).tensors, *token_classifier(config, len(labels)).tensors):
        name = tensor.name if tensor.name.startswith("classifier.") else f"bert.{tensor.name}"
        shape = tensor.shape[::-1] if tensor.is_transposed else tensor.shape
        tensors[name] = rng.normal(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.3, shape).astype(np.float32)
    names = {str(number): label for number, label in enumerate(labels)}
    whole = SIZES | {"model_type": "bert", "vocab_size": len(PIECES), "id2label": names} | settings
    save_tensors(folder, tensors, {key: value for key, value in whole.items() if value is not None})
    (folder / "vocab.txt").write_text("\n".join(PIECES))
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tagger(tmp_path_factory.mktemp("tagger") / "model")


@pytest.fixture(autouse=True)
def no_cached_finder():
    tagger.hugging_face.cache_clear()


def test_logits_are_those_of_numpy(folder):
    model = load_tagger(folder)
    ids = np.array([2, 60, 7, 33, 9, 3])
    weights = np_weights(folder)
    hidden = hidden_states(weights, ids, np.zeros(6, int), gelu_erf)
    padded = jnp.pad(jnp.asarray(ids), (0, 4))[None]
    logits = model.network.apply({"params": model.params}, padded, jnp.arange(10)[None] < 6)[0, :6]
    np.testing.assert_allclose(logits, linear(hidden, weights, "classifier"), atol=1e-5)


def np_weights(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    tensors = load_file(folder / "model.safetensors")
    return {name.removeprefix("bert."): array.astype(np.float64) for name, array in tensors.items()}


def test_spans_of_many_texts_are_those_of_each(folder):
    """No window affects another; one longer than the network's positions is cut between words."""
    find = finder(f"hf:{folder}")
    texts = [*TEXTS.values(), "", "\n\n", "Paris " * 60 + ".", "a" * 90, "Ada was born in May 1843."]
    spans_of_texts = find.find_many(texts)
    assert spans_of_texts == [find(text) for text in texts]
    kinds = {span.kind for spans in spans_of_texts for span in spans}
    assert {"PER", "LOC"} <= kinds <= {"PER", "LOC", "date"}
    assert ("May 1843", "date") in [(texts[-1][span.start : span.end], span.kind) for span in spans_of_texts[-1]]
    assert all(0 < span.score <= 1 for spans in spans_of_texts for span in spans)


def test_prepared_data_are_the_same_for_any_number_of_workers(folder, passages, tmp_path):
    """The network runs in this process: no worker makes a finder of its own."""
    stores = []
    for workers in (1, 3):
        output = tmp_path / f"data{workers}"
        prepare(passages, output, vocabulary_size=300, shards=3, workers=workers, spans=f"hf:{folder}")
        stores.append({path.name: path.read_bytes() for path in sorted((output / "passages").rglob("*.npy"))})
    assert stores[0] == stores[1]
    store = PassageStore.open(tmp_path / "data1" / "passages")
    assert {kind for row in range(len(store)) for _, _, kind in store.spans(row)}


def test_other_weights_are_another_finder(folder, passages, tmp_path):
    prepare(passages, tmp_path / "data", vocabulary_size=300, workers=1, spans=f"hf:{folder}")
    other = save_tagger(tmp_path / "model", hidden_act="gelu_new")
    assert finder(f"hf:{folder}").identity != finder(f"hf:{other}").identity


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"id2label": None}, "has no `id2label` that names its labels"),
        ({"id2label": {}}, "has no `id2label` that names its labels"),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}, "`id2label` has no names but LABEL_0"),
        ({"hidden_size": None}, "hidden_size is None, which is no size"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; choose a model with gelu_new, gelu"),
        ({"model_type": "roberta"}, "model_type is 'roberta', not 'bert'"),
        ({"num_attention_heads": 3}, "num_attention_heads"),
    ],
)
def test_a_model_that_cannot_be_run_is_reported_in_one_line(tmp_path, settings, message):
    model = save_tagger(tmp_path / "model", **settings)
    with pytest.raises(UserError, match=message) as raised:
        finder(f"hf:{model}")
    assert "\n" not in str(raised.value)


def test_a_folder_without_a_head_weights_or_tokenizer_is_rejected(tmp_path, folder):
    plain = save_tagger(tmp_path / "plain")
    kept = {name: array for name, array in np_weights(plain).items() if not name.startswith("classifier.")}
    save_tensors(plain, {name: array.astype(np.float32) for name, array in kept.items()})
    with pytest.raises(UserError, match="has no token classifier; choose a model for token classification"):
        finder(f"hf:{plain}")
    (plain / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        finder(f"hf:{plain}")
    other = save_tagger(tmp_path / "other")
    (other / "vocab.txt").write_text("\n".join([*PIECES, "Rome"]))
    with pytest.raises(UserError, match=f"vocab.txt: has {len(PIECES) + 1} tokens, but the model {len(PIECES)}"):
        finder(f"hf:{other}")
    bare = save_tagger(tmp_path / "bare")
    (bare / "vocab.txt").unlink()
    with pytest.raises(UserError, match=r"has no vocab\.txt and no tokenizer\.json"):
        finder(f"hf:{bare}")


@pytest.mark.slow
def test_logits_are_those_of_transformers(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = save_tagger(tmp_path / "model")
    theirs = transformers.BertForTokenClassification.from_pretrained(folder).eval()
    model, rng = load_tagger(folder), np.random.default_rng(0)
    ids = rng.integers(5, len(PIECES), (3, 20))
    mask = np.arange(20) < np.array([20, 11, 3])[:, None]
    with torch.no_grad():
        wanted = theirs(torch.tensor(ids), torch.tensor(mask)).logits.numpy()
    logits = np.asarray(model.network.apply({"params": model.params}, jnp.asarray(ids), jnp.asarray(mask)))
    np.testing.assert_allclose(logits[mask], wanted[mask], atol=1e-5)
    assert [theirs.config.id2label[number] for number in range(5)] == list(model.labels)
