"""A tagger small enough for tests: three kinds of sentences with people and towns, and one layer of 32 features."""

import itertools
from pathlib import Path

import jax
from ml_collections import ConfigDict

from realm_jax.run import BaseRun
from realm_jax.tasks import tagger
from realm_jax.train.tagger import open_tagger_run, train

FIRST = "Ada Boris Clara Dmitri Edda Fjodor".split()
LAST = "Almgren Brandt Corvin Dahl Ebner Falk".split()
TOWNS = "Arendal Bergen Drammen Halden Larvik Moss".split()


def sentences() -> list[str]:
    """Tokens and tags of 72 sentences."""
    found = []
    for number, (first, last) in enumerate(itertools.product(FIRST, LAST)):
        town = TOWNS[(number * 5 + number // 6) % 6]
        person = f"{first} B-PER\n{last} I-PER\n"
        found.append(f"{person}was O\nborn O\nin O\n{town} B-LOC\nin O\n1843 O\n. O\n")
        found.append(f"In O\n{town} B-LOC\nthe O\nhouse O\nof O\n{person}stands O\n. O\n")
    return found


def write_corpus(folder: Path) -> Path:
    """Train, dev and test; every document is one sentence or two."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"train": [], "dev": [], "test": []}
    for number, sentence in enumerate(sentences()):
        split = {5: "dev", 6: "test"}.get(number % 7, "train")
        parts[split].append(sentence if number % 2 else f"-DOCSTART- O\n\n{sentence}")
    for split, own in parts.items():
        (folder / f"{split}.conll").write_text("\n".join(own))
    return folder


def tiny_config(corpus: Path, **changes) -> ConfigDict:
    """changes: keys with `__` for the dot."""
    config = tagger.default()
    config.data.update(path=str(corpus), vocabulary_size=200, length=24)
    config.model.update(layers=1, width=32, heads=2, feed_forward=32, dropout=0.0)
    config.tagger.update(steps=40, batch_size=8, learning_rate=2e-3)
    config.optimizer.warmup = 5
    config.checkpoint.every, config.evaluation.every, config.evaluation.batch_size, config.log.every = 10, 20, 4, 5
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return config


def open_tiny(corpus: Path, workdir: Path, devices: int = 1, **changes) -> BaseRun:
    return open_tagger_run(tiny_config(corpus, **changes), workdir, jax.devices()[:devices])


def train_tiny_tagger(folder: Path) -> Path:
    """Write `folder/corpus` and train in `folder/run`, on one device; the run folder."""
    train(open_tiny(write_corpus(folder / "corpus"), folder / "run"))
    return folder / "run"
