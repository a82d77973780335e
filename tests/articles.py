"""Made articles in which some names have evidence elsewhere."""

import json
from pathlib import Path

import numpy as np

from realm_jax.cli.prepare import prepare

STEMS, ENDINGS = [f"{a}{b}" for a in "bdfgklmnprstvwz" for b in "aeiou"], ("ard", "lo", "nt", "eck", "sk", "mm")
WORDS = [stem + ending for stem in STEMS for ending in ENDINGS]
NAMES = [f"{first} {last}" for first in ("Ada", "Karl", "Marie", "Alan") for last in ("Moss", "Reed", "Stone", "Wolf")]


def article(number: int, rng: np.random.Generator) -> dict[str, str]:
    """Three sentences of some of the names and of words drawn at random, and a fact about a name: some of its eight
    words, so that two articles tell the same fact in more or fewer of the same words."""
    sentences = []
    for _ in range(3):
        said = rng.choice(WORDS, size=rng.integers(3, 9), replace=False)
        sentences.append(f"The {said[0]} of {rng.choice(NAMES)} was {' '.join(said[1:])}.")
    name = int(rng.integers(len(NAMES)))
    fact = rng.permutation(WORDS[8 * name : 8 * name + 8])[: rng.integers(3, 9)]
    return {
        "id": f"a{number}",
        "title": f"Life {number}",
        "text": " ".join([*sentences, f"Once {NAMES[name]} had {' '.join(fact)}."]),
    }


def prepared_articles(folder: Path) -> Path:
    """A prepared folder of eighty."""
    rng = np.random.default_rng(0)
    path = folder / "passages.jsonl"
    path.write_text("".join(json.dumps(article(number, rng)) + "\n" for number in range(80)))
    prepare(path, folder / "ready", vocabulary_size=800, limit=64, workers=1)
    return folder / "ready"
