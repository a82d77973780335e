"""Made articles, and a tiny encoder of sentences with their words, for tests of `realm index` and `realm adapt`."""

import json
from pathlib import Path

import numpy as np
from articles import NAMES, WORDS
from tiny import loud_params
from tiny_run import tiny_config, write_lines
from weight_folders import edit_settings, save_network

from realm_jax.assemble import make_model
from realm_jax.cli.prepare import prepare
from realm_jax.data.sources import open_sources

LIBRARY = "sentence_transformers.models."


def article(number: int, rng: np.random.Generator) -> dict[str, str]:
    """Two sentences of words drawn at random, and what is told of a name in two articles in most of the same words."""
    words = [rng.choice(WORDS, size=7, replace=False) for _ in range(2)]
    sentences = [f"The {first} of {rng.choice(NAMES)} was {' '.join(others)}." for first, *others in words]
    name = number % len(NAMES)
    fact = rng.permutation(WORDS[8 * name : 8 * name + 8])[: rng.integers(4, 8)]
    text = " ".join([*sentences, f"Once {NAMES[name]} had {' '.join(fact)}."])
    return {"id": f"a{number}", "title": f"Life {number}", "text": text}


def write_articles(path: Path, count: int = 60) -> Path:
    """Write a file of articles."""
    rng = np.random.default_rng(0)
    return write_lines(path, [article(number, rng) for number in range(count)])


def save_encoder(documents: Path) -> Path:
    """Write a folder of sentence-transformers without anything that was trained, beside the documents."""
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
