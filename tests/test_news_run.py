"""REALM that learns from news while it reads an encyclopedia: X ≠ Z, with real jobs on real articles."""

import json
import lzma
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from made_news import expected, make_news

from realm_jax.data.sources import open_sources
from realm_jax.train.records import read_lines

RECORDS, STEPS, REFRESH, BATCH = 2000, 300, 100, 8


def realm(*arguments: str) -> str:
    """The output of a command that must succeed."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-m", "realm_jax", *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=1500).stdout


@pytest.mark.nightly
def test_news_is_learned_from_beside_whole_articles(shared_data, tmp_path):
    """A quarter of an hour on two cores. The news quote the encyclopedia: so there is something to exclude."""
    articles = shared_data / "wiki_articles" / "articles.jsonl.xz"
    with lzma.open(articles, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    made = make_news([text for text in texts if len(text.split()) > 400], RECORDS, seed=1)
    news = tmp_path / "news.jsonl"
    news.write_bytes(b"".join(record.line + b"\n" for record in made))
    data, run = str(tmp_path / "data"), str(tmp_path / "run")
    vocabulary = str(shared_data / "bert_vocab" / "vocab.txt")
    print(realm("prepare", f"--passages={articles}", f"--pretraining=news:{news}", f"--vocab={vocabulary}",
                "--skip-damage", f"--output={data}"))  # fmt: skip
    check_counts(data, made)
    # Sentences stay in their passages, so that the retriever soon finds them there.
    cloze = {
        "ict.negatives": "index",
        "ict.null_weight": 0.0,
        "ict.steps": 500,
        "ict.batch_size": 32,
        "ict.learning_rate": 5e-4,
    }
    lengths = {"data.query_length": 64, "data.document_length": 288, "data.predictions": 6, "model.span_width": 10}
    overrides = {"data.path": data, "log.every": 1, "tasks": "ict,realm", "realm.steps": STEPS,
                 "realm.batch_size": BATCH, "realm.learning_rate": 3e-4, "realm.candidates": 5,
                 "refresh.every": REFRESH} | cloze | lengths  # fmt: skip
    flags = [f"--config.{key}={value}" for key, value in overrides.items()]
    realm("train", "--config=quickstart", f"--workdir={run}", *flags)
    steps = read_lines(tmp_path / "run" / "realm" / "metrics.jsonl")
    refreshes = read_lines(tmp_path / "run" / "realm" / "evaluations.jsonl")
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert np.isfinite([line["loss"] for line in steps]).all()
    assert [line["index_step"] for line in refreshes if line["refresh"]] == list(range(0, STEPS, REFRESH))
    excluded = round(sum(line["excluded"] for line in steps) * BATCH)
    speed = BATCH / float(np.median([line["step_seconds"] for line in steps[10:]]))
    print(f"{STEPS * BATCH} examples, {excluded} passages excluded, {speed:.1f} examples/s, {len(refreshes)} refreshes")
    assert excluded > 0


def check_counts(data: str, made: list) -> None:
    """Every record is accounted for, with its reason, and X is another store than Z."""
    with open(f"{data}/PREPARED.json", encoding="utf-8") as file:
        counts = json.load(file)["counts"]["pretraining"]
    reasons = expected(made)
    stay = reasons.pop("")
    print(counts)
    assert counts["records"] == RECORDS and counts["articles"] == stay > 1000
    assert Counter(counts["dropped"]) + Counter(counts["damaged"]) == reasons
    sources = open_sources(data)
    assert (
        not sources.pretraining_is_corpus
        and sources.pretraining.documents == stay
        and sources.passages.documents > 7000
    )
