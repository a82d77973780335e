"""Synthetic articles in which some names have evidence in other articles."""

import json
from pathlib import Path

import numpy as np
from tiny_run import write_lines

from realm_jax.cli.prepare import prepare

STEMS, ENDINGS = [f"{a}{b}" for a in "bdfgklmnprstvwz" for b in "aeiou"], ("ard", "lo", "nt", "eck", "sk", "mm")
WORDS = [stem + ending for stem in STEMS for ending in ENDINGS]
NAMES = [f"{first} {last}" for first in ("Ada", "Karl", "Marie", "Alan") for last in ("Moss", "Reed", "Stone", "Wolf")]


def article(number: int, rng: np.random.Generator) -> dict[str, str]:
    """Two sentences of random words, and a fact about a name, which other articles state in most of the same words."""
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


def write_questions(articles: Path, count: int = 12) -> Path:
    """Write questions with gold passages: the first words of each article."""
    records = [json.loads(line) for line in articles.read_text().splitlines()[:count]]
    questions = [{"question": one["text"][:60], "answers": [], "gold_passage_id": one["id"]} for one in records]
    return write_lines(articles.parent / "questions.jsonl", questions)


def prepared_articles(folder: Path) -> Path:
    """A dataset directory of eighty articles."""
    prepare(write_articles(folder / "passages.jsonl", 80), folder / "ready", vocabulary_size=800, limit=64, workers=1)
    return folder / "ready"
