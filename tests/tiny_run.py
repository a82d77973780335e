"""A whole run small enough for tests: sixteen people, their years of birth, and two tasks of two steps each."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
from ml_collections import ConfigDict

from realm_jax.assemble import make_run
from realm_jax.cli.prepare import prepare
from realm_jax.config import Config, default
from realm_jax.data.sources import open_sources
from realm_jax.run import Run
from realm_jax.train.recipe import train
from realm_jax.train.workdir import check_workdir

FIRST_NAMES, LAST_NAMES = ("Ada", "Boris", "Clara", "Dmitri"), ("Almgren", "Brandt", "Corvin", "Dahl")
PEOPLE = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]


def write_lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def question(number: int, **fields) -> dict:
    """A question about a person whose passage is `p<number>`."""
    return {"question": f"When was {PEOPLE[number]} born?", "answers": [str(1800 + number)]} | fields


def prepare_people(folder: Path, people: list[str] = PEOPLE, house: str = "in {:.3}ville", asked=None) -> Path:
    """A prepared folder with a passage for each person, and questions about eight of them in both splits.

    house: where a person's house stands; with the whole name there is something that the warm-up can mask.
    asked: other questions; an empty list for none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    passages = [
        {"id": f"p{n}", "title": name, "text": f"{name} was born in {1800 + n}. The house {house.format(name)} stands."}
        for n, name in enumerate(people)
    ]
    if asked is None:
        asked = [question(n, gold_passage_id=f"p{n}", split=split) for n in range(8) for split in ("train", "dev")]
    passages_file = write_lines(folder / "passages.jsonl", passages)
    questions = [write_lines(folder / "questions.jsonl", asked)] if asked else []
    prepare(passages_file, folder / "data", questions=questions, vocabulary_size=300, workers=1)
    return folder / "data"


def tiny_config(data: Path) -> ConfigDict:
    """One layer of width 16, and the tasks `ict` and `qa`."""
    config = default()
    sizes = {"layers": 1, "width": 16, "heads": 2, "feed_forward": 32}
    config.update({"tasks": "ict,qa", "model": sizes | {"dropout": 0.0}, "encoder": {"projection": 8}})
    config.update({"data": {"path": str(data), "query_length": 16, "document_length": 48}})
    config.update({"realm": {"candidates": 4}, "qa": {"passages": 3}, "evaluation": {"batch_size": 8}})
    for task in ("ict", "qa"):
        config[task].update({"steps": 2, "batch_size": 4})
    return config


def train_tiny_run(folder: Path) -> Run:
    """Prepare `folder/data` and train in `folder/run`, on one device."""
    run = open_config(tiny_config(prepare_people(folder)), folder / "run")
    train(run)
    return run


def go_back_to(workdir: Path, task: str) -> None:
    """Make the exported model of a run that of an earlier task, as it was when that task ended."""
    shutil.rmtree(workdir / "model")
    shutil.copytree(workdir / task / "model", workdir / "model")


def open_tiny_run(folder: Path) -> Run:
    """That run, once it is trained."""
    data = folder / "data"
    return make_run(tiny_config(data), folder / "run", open_sources(data), jax.devices()[:1])


def open_config(config: ConfigDict, workdir: Path, devices: int = 1) -> Run:
    """The run of a config in a folder that is new or its own."""
    sources = open_sources(config.data.path)
    run = make_run(config, workdir, sources, jax.devices()[:devices])
    check_workdir(run)
    return run


def with_config(run: Run, config: Config) -> Run:
    """A run under another config of the same data, lengths and networks; the corpus on the devices is shared."""
    other = dataclasses.replace(run, config=config)
    own = {name: getattr(run, name) for name in ("corpus", "documents")}
    other.__dict__.update(own)  # as cached_property does
    return other
