"""`realm adapt` in small: sixty made articles and an encoder of one layer, from documents to a folder of weights."""

import json
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import loud_params
from tiny_run import tiny_config, write_lines
from weight_folders import edit_settings, save_network

from realm_jax.assemble import make_model, make_run
from realm_jax.cli import main as cli
from realm_jax.cli.prepare import prepare
from realm_jax.data.sources import open_sources
from realm_jax.storage import read_json
from realm_jax.train import adaptation, recipe, workdir

STEMS, ENDINGS = [f"{a}{b}" for a in "bdfgklmnprstvwz" for b in "aeiou"], ("ard", "lo", "nt", "eck", "sk", "mm")
WORDS = [stem + ending for stem in STEMS for ending in ENDINGS]
NAMES = [f"{first} {last}" for first in ("Ada", "Karl", "Marie", "Alan") for last in ("Moss", "Reed", "Stone", "Wolf")]
LIBRARY = "sentence_transformers.models."
SIZES = {
    "data.query_length": 32,
    "data.document_length": 64,
    "ict.steps": 3,
    "ict.batch_size": 4,
    "realm.steps": 3,
    "realm.batch_size": 4,
    "qa.beam": 8,
    "log.every": 1,
}


def article(number: int, rng: np.random.Generator) -> dict[str, str]:
    """Two sentences of words drawn at random, and what is told of a name in two articles in most of the same words."""
    said = [rng.choice(WORDS, size=7, replace=False) for _ in range(2)]
    sentences = [f"The {one[0]} of {rng.choice(NAMES)} was {' '.join(one[1:])}." for one in said]
    name = number % len(NAMES)
    fact = rng.permutation(WORDS[8 * name : 8 * name + 8])[: rng.integers(4, 8)]
    text = " ".join([*sentences, f"Once {NAMES[name]} had {' '.join(fact)}."])
    return {"id": f"a{number}", "title": f"Life {number}", "text": text}


@pytest.fixture(scope="module", autouse=True)
def one_device():
    with pytest.MonkeyPatch.context() as patch:
        for module in (recipe, workdir):
            patch.setattr(module, "make_run", partial(make_run, devices=jax.devices()[:1]))
        yield


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("documents") / "articles.jsonl"
    return write_lines(path, [article(number, rng) for number in range(60)])


@pytest.fixture(scope="module")
def encoder(documents) -> Path:
    """A folder of sentence-transformers without anything that was trained."""
    prepare(documents, documents.parent / "vocabulary", vocabulary_size=600, limit=64, workers=1)
    tokenizer = open_sources(documents.parent / "vocabulary").tokenizer
    config = tiny_config(documents.parent / "vocabulary")
    config.data.update(query_length=33, document_length=64)
    model = make_model(config, tokenizer.size)
    folder = save_network(documents.parent / "encoder", model, "reader", loud_params(model, 0), parts=1)
    tokenizer.save(folder)
    edit_settings(folder, retriever_proj_size=None, projection_layer_norm_eps=None)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"path": path, "type": LIBRARY + kind} for kind, path in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def adapt(documents: Path, encoder: Path, output: Path, *arguments: str) -> int:
    overrides = [f"--config.{key}={value}" for key, value in SIZES.items()]
    return cli.main(["adapt", str(documents), f"--from={encoder}", f"--output={output}", *overrides, *arguments])


@pytest.fixture(scope="module")
def done(documents, encoder, tmp_path_factory) -> Path:
    """A finished adaptation."""
    output = tmp_path_factory.mktemp("adapted") / "run"
    assert adapt(documents, encoder, output) == 0
    return output


def test_from_documents_to_a_model_and_a_report(done):
    record = read_json(done / "adapt.json")
    assert record["plan"]["steps"] == {"ict": 3, "realm": 3}
    assert record["measured"]["table"]["start"]["mean_recall@5"]["queries"] >= 8
    assert (done / "model" / "README.md").is_file() and (done / "vectors.npy").is_file()
