"""`realm quickstart` in small: from nothing to results and report, again, and after an interruption."""

import re
from pathlib import Path
from typing import Any

import pytest

from realm_jax.cli import main as cli
from realm_jax.cli import quickstart as job
from realm_jax.data import encyclopedia
from realm_jax.errors import UserError
from realm_jax.storage import read_json
from realm_jax.train.records import read_lines

pytestmark = pytest.mark.usefixtures("one_device")

SIZES = {
    "encoder": {"projection": 8},
    "model": {"layers": 1, "width": 16, "heads": 2, "feed_forward": 32},
    "data": {"query_length": 24, "document_length": 48},
    "refresh": {"every": 2},
    "log": {"every": 1},
    "evaluation": {"batch_size": 12},
    "mlm": {"steps": 2, "batch_size": 4},
    "ict": {"steps": 2, "batch_size": 8},
    "realm": {"steps": 4, "batch_size": 4, "candidates": 3},
    "qa": {"steps": 2, "batch_size": 4, "passages": 3, "beam": 4},
}


def quickstart(workdir: Path, *arguments: str, entities: int = 40) -> int:
    keys = {f"{section}.{key}": value for section, values in SIZES.items() for key, value in values.items()}
    overrides = [f"--config.{key}={value}" for key, value in keys.items()]
    return cli.main(["quickstart", f"--workdir={workdir}", f"--entities={entities}", *overrides, *arguments])


@pytest.mark.slow
def test_with_a_builder_beside_it(tmp_path, capsys):
    assert quickstart(tmp_path / "run", "--async", "--config.refresh.adopt_after=1") == 0
    lines = read_lines(tmp_path / "run" / "realm" / "evaluations.jsonl")
    assert [(line["step"], line["index_step"]) for line in lines if "generation" in line] == [(0, 0), (3, 2)]
    assert read_json(tmp_path / "run" / "jobs" / "trainer.json")["done"]
    capsys.readouterr()
    assert quickstart(tmp_path / "run", "--config.refresh.adopt_after=1") == 2
    assert "config.refresh.mode is 'inline', but the run in" in capsys.readouterr().err
    assert quickstart(tmp_path / "other", "--async", "--config.refresh.mode=inline") == 2
    assert "--async: implies --config.refresh.mode=async" in capsys.readouterr().err


def state_of(workdir: Path) -> dict[str, Any]:
    """Every file of data, records and checkpoints, with its time; a heartbeat (trainer.json) is none of these."""
    kept = ("results.json", "report.html", "config.json", "data.json", "trainer.json")
    return {
        str(path): path.stat().st_mtime_ns for path in workdir.rglob("*") if path.is_file() and path.name not in kept
    }


def check_whole(workdir: Path, results: dict[str, Any], stages: set[str], *arguments: str, entities: int = 40) -> None:
    """What every finished quickstart has, and that the same command does nothing new."""
    assert set(results["seconds"]) == {"baselines", *stages}
    for values in (results["recall@5"], results["answer_recall@5"], results["exact_match"]):
        assert all(0 <= value <= 1 for value in values.values())
    page = (workdir / "report.html").read_text()
    assert "realm quickstart --workdir=" in page
    links = re.findall(r"""\s(?:href|src|srcset|action|data)=["']?([^"'\s>]*)""", page)
    assert all(link.startswith(("#", "data:")) for link in links), "the page loads nothing"
    files = state_of(workdir)
    assert quickstart(workdir, *arguments, entities=entities) == 0
    assert state_of(workdir) == files
    again = read_json(workdir / "results.json")
    assert {**again, "seconds": None} == {**results, "seconds": None}


def test_two_tasks_end_with_results_and_a_report_and_a_second_call_does_nothing_new(tmp_path):
    workdir = tmp_path / "run"
    assert quickstart(workdir, "--config.tasks=ict,qa") == 0
    results = read_json(workdir / "results.json")
    assert set(results["recall@5"]) == {"untrained", "bm25", "ict", "qa"}
    assert set(results["exact_match"]) == {"retrieval", "chance"}
    check_whole(workdir, results, {"ict", "qa"}, "--config.tasks=ict,qa")


@pytest.mark.slow
def test_the_whole_recipe(tmp_path):
    workdir = tmp_path / "run"
    assert quickstart(workdir, entities=60) == 0
    results = read_json(workdir / "results.json")
    assert set(results["recall@5"]) == {"untrained", "bm25", "ict", "realm", "qa"}
    assert set(results["exact_match"]) == {"retrieval", "chance"}
    assert set(results["recall@5_by_replaced_words"]) == set(results["recall@5"])
    assert isinstance(results["retrieval_utility"], float)
    evaluations = read_lines(workdir / "realm" / "evaluations.jsonl")
    assert [(record["step"], record["refresh"]) for record in evaluations] == [(0, True), (2, True), (4, False)]
    assert results["recall@5"]["realm"] == evaluations[-1]["recall@5"]
    check_whole(workdir, results, {"mlm", "ict", "realm", "qa"}, entities=60)


# --- The data


class Interrupted(Exception):
    """Stands for the power going off."""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def test_data_that_were_interrupted_are_made_again(tmp_path, monkeypatch):
    """First while the encyclopedia is written, then while it is prepared: nothing that looks whole is left."""
    whole, workdir = tmp_path / "whole", tmp_path / "run"
    job.make_data(whole, 20, seed=0)

    def half(book: encyclopedia.Encyclopedia, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "passages.jsonl").write_text('{"id": "entity-0", "ti')
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(encyclopedia, "write", half)
        job.make_data(workdir, 20, seed=0)
    assert names(workdir) == {".text.partial"}

    def broken(*_: Any, **__: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr("realm_jax.corpora.preparation.pack_shard", broken)
        job.make_data(workdir, 20, seed=0)
    assert names(workdir) == {"text", ".data.partial"}
    job.make_data(workdir, 20, seed=0)
    assert names(workdir) == {"text", "data"}
    for path in [path for path in whole.rglob("*") if path.is_file()]:
        assert path.read_bytes() == (workdir / path.relative_to(whole)).read_bytes(), path


def test_data_alone_are_made_where_nothing_else_is_asked_for(tmp_path):
    assert quickstart(tmp_path / "run", "--data-only") == 0
    assert names(tmp_path / "run") == {"text", "data"}


def test_data_that_are_there_are_used_again_and_never_for_other_settings(tmp_path, capsys):
    job.make_data(tmp_path, 20, seed=0)
    before = state_of(tmp_path)
    job.make_data(tmp_path, 20, seed=0)
    assert state_of(tmp_path) == before
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"{tmp_path}/text was made with entities=20, not 21; use the same value, or"):
        job.make_data(tmp_path, 21, seed=0)
    with pytest.raises(UserError, match="was made with seed=0, not 1"):
        job.make_data(tmp_path, 20, seed=1)
