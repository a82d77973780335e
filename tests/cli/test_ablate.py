"""`realm ablate`: rows that start from each other, seeds, and the table of what they come to."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from tiny_run import tiny_config

from realm_jax.assemble import make_run
from realm_jax.cli import ablate
from realm_jax.cli import main as cli
from realm_jax.config import default, flatten
from realm_jax.configs.ablations import get_config as ablations
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.eval.ablations import HEADS, Row, SeedResult, cells, html, markdown, paired_difference
from realm_jax.train.init_from import init_from_sources
from realm_jax.train.restore import restore_params


def tiny_ablations(data: Path) -> ConfigDict:
    """Two towers of one layer: what others start from, REALM, a mixture, the baseline, and two of the controls."""
    config = ablations()
    config.rows.no_retriever_gradient.changes = ("realm.retriever_start=2",)
    config.table = ("realm", "realm_retriever", "baseline", "no_retriever_gradient", "closed_book")
    config.base = tiny_config(data)
    for task in ("realm", "closed_book"):
        config.base[task].update(steps=2, batch_size=4)
    config.base.refresh.every = 1
    config.encyclopedia = ConfigDict()
    config.rows.start.tasks = "ict"
    return config


def run_ablations(folder: Path, config: ConfigDict, *commands: list[str]) -> Path:
    """Run `realm ablate` with each of some flags; return the config's file. The runs are in folder / "runs"."""
    file = folder / "config.py"
    file.write_text(
        f"from ml_collections import ConfigDict\ndef get_config(): return ConfigDict({config.to_dict()!r})\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "clear_caches", lambda: None)  # the rows of a test share their programs
        for flags in commands:
            assert cli.main(["ablate", f"--config={file}", f"--workdir={folder / 'runs'}", *flags]) == 0
    return file


@pytest.fixture(scope="module")
def ablated(people, tmp_path_factory, one_device, quick_steps):
    """The folder of all rows of one seed."""
    folder = tmp_path_factory.mktemp("ablated")
    run_ablations(folder, tiny_ablations(people), ["--config.seeds=0"])
    return folder / "runs"


def params_of(folder: Path, row: str, task: str):
    config = ConfigDict(json.loads((folder / row / "config.json").read_text()))
    run = make_run(config, folder / row, open_sources(config.data.path), jax.devices()[:1])
    return run, restore_params(run, task)


def same(a, b) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((np.asarray(x) == np.asarray(y)).all()), a, b)))


def test_two_seeds_of_a_row_are_trained_once_and_written_as_a_table(people, tmp_path, capsys, one_device, quick_steps):
    config = tiny_ablations(people)
    config.table = ("closed_book", "baseline")
    seeds = [["--config.seeds=0", "--rows=closed_book"], ["--config.seeds=3", "--rows=closed_book"]]
    file, folder = run_ablations(tmp_path, config, *seeds), tmp_path / "runs"
    titles = [config.rows[name].title for name in config.table]
    rows = ablate.table_rows(config, folder)
    assert [(row.title, sorted(row.seeds)) for row in rows] == [(titles[0], [0, 3]), (titles[1], [])]
    assert titles[0] in (folder / "ablations.md").read_text() and titles[0] in (folder / "ablations.html").read_text()
    records = json.loads((folder / "ablations.json").read_text())
    assert [row["title"] for row in records] == titles and {*records[0]["seeds"]} == {"0", "3"}
    closed = rows[0].seeds[0]
    assert 0 <= closed.exact_match <= 1 and closed.answer_recall is None and cells(rows)[0][3] == ""

    before = {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")}
    capsys.readouterr()
    assert cli.main(["ablate", f"--config={file}", f"--workdir={folder}", *seeds[1]]) == 0
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")}
    assert "ablations.md" in capsys.readouterr().out


@pytest.mark.slow
def test_the_table_has_every_row(ablated, people):
    config = tiny_ablations(people)
    rows = ablate.table_rows(config, ablated)
    assert [row.title for row in rows] == [config.rows[name].title for name in config.table]
    assert [sorted(row.seeds) for row in rows] == [[0]] * 5 and rows[0].title == "REALM"
    text = (ablated / "ablations.md").read_text()
    assert all(row.title in text for row in rows) and "38.2" in text
    assert "Baseline (ORQA)" in (ablated / "ablations.html").read_text()


@pytest.mark.slow
def test_a_mixture_has_the_towers_of_one_row_and_the_reader_of_another(ablated):
    folder = ablated / "seed-0"
    _, towers = params_of(folder, "pretrained", "realm")
    _, reader = params_of(folder, "start", "ict")
    run, _ = params_of(folder, "realm_retriever", "qa")
    mixed = init_from_sources(run, run.initial_params())
    assert same(mixed["query_embedder"], towers["query_embedder"])
    assert same(mixed["document_embedder"], towers["document_embedder"])
    assert same(mixed["reader"], reader["reader"]) and not same(mixed["reader"], towers["reader"])
    assert not json.loads((folder / "realm_retriever" / "start.json").read_text())["reader"], "none was trained yet"


@pytest.mark.slow
def test_zero_shot_recall_is_that_of_the_towers_a_row_begins_with(ablated):
    folder = ablated / "seed-0"
    first = {}
    for row in ("realm", "realm_retriever", "baseline"):
        found = ablate.seed_result(folder / row)
        first[row] = found.answer_recall, found.recall
    assert first["realm"] == first["realm_retriever"]
    last = [json.loads(line) for line in (folder / "start" / "ict" / "evaluations.jsonl").read_text().splitlines()][-1]
    assert first["baseline"] == (last["answer_recall@5"], last["recall@5"])


@pytest.mark.slow
def test_a_retriever_whose_gradient_is_stopped_finds_what_its_start_found(ablated):
    folder = ablated / "seed-0"
    _, before = params_of(folder, "start", "ict")
    run, after = params_of(folder, "no_retriever_gradient", "realm")
    assert all(same(before[name], after[name]) for name in run.model.embedder_names)
    assert not same(before["reader"], after["reader"])
    recalls = {name: ablate.seed_result(folder / name).recall for name in ("no_retriever_gradient", "baseline")}
    assert recalls["no_retriever_gradient"] == recalls["baseline"]


def test_rows_bring_those_that_they_start_from():
    config = ablations()
    assert ablate.rows_to_train(config, "realm_encoder") == ["start", "pretrained", "realm_encoder"]
    assert ablate.rows_to_train(config, "no_ict") == ["no_ict"]
    assert sorted(ablate.rows_to_train(config, None)) == sorted(config.rows)
    with pytest.raises(UserError, match="--rows: there is no row 'relam'; choose among baseline"):
        ablate.rows_to_train(config, "relam")


def test_the_shipped_rows_hold_together_and_differ():
    config = ablations()
    ablate.check(config)
    made = [ablate.row_config(config, name, 0, Path("x")).to_json() for name in config.rows]
    assert len({*made}) == len(made)
    base = flatten(config.base.to_dict())
    for name, row in config.rows.items():
        changed = flatten(ablate.row_config(config, name, 0, Path("x")).to_dict())
        for change in row.changes:
            key = change.partition("=")[0]
            assert changed[key] != base[key], (name, change)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("start", "later", "config.rows.realm.start: there is no row 'later'"),
        ("start", "realm", "config.rows.realm.start: it would start from itself, via realm"),
        ("start", "", "config.rows.realm.reader: needs a start"),
        ("changes", ("data.maskng=uniform",), "data.maskng"),
        ("changes", ("realm.masking=none",), "realm.masking: must be one of"),
        ("changes", "realm.candidates=32", "config.rows.realm.changes: takes a tuple"),
        ("changes", ("seed=9",), "config.rows.realm.changes: seed is computed from tasks, start and seeds"),
        ("tasks", "realm", "config.rows.realm.tasks: a row of the table has to end with qa or closed_book"),
        ("paper", (1.0,), "config.rows.realm.paper: takes exact match and recall@5"),
        ("seeds", (), "config.seeds: takes at least one whole number"),
        ("seeds", (0, -1), "config.seeds: takes at least one whole number"),
        ("seeds", "x", "config.seeds: takes at least one whole number"),
        ("encyclopedia", {"entitees": 3200}, "config.encyclopedia: takes entities, held_out"),
        ("encyclopedia", {}, "config.encyclopedia: has no entities; set them, or name a prepared folder"),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused(key, value, told):
    shipped = ablations().to_dict()
    if key in shipped:
        shipped[key] = value
    else:
        reader = {"reader": "start"} if value == "" else {}
        shipped["rows"]["realm"] |= {key: value} | reader
    with pytest.raises(UserError, match=re.escape(told)):
        ablate.check(ConfigDict(shipped))


def test_a_config_of_another_kind_is_refused(tmp_path, capsys):
    file = tmp_path / "config.py"
    file.write_text("from realm_jax.config import default as get_config\n")
    assert cli.main(["ablate", f"--config={file}", f"--workdir={tmp_path / 'out'}"]) == 2
    assert "no such key" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert cli.main(["ablate", f"--workdir={tmp_path / 'out'}", "--config.seeds=a"]) == 2
    assert "config.seeds: takes at least one whole number" in capsys.readouterr().err
    assert cli.main(["ablate", f"--workdir={tmp_path / 'out'}", "--config.base.tasks=qa"]) == 2
    assert "--config.base.tasks: every row sets its tasks" in capsys.readouterr().err


def evaluated(folder: Path, config: ConfigDict, exact: float, **changes) -> None:
    """A run that was measured: zero-shot recall 0.25, more at the end, 100 + 20 seconds."""
    other = ConfigDict(config.to_dict())
    with other.unlocked():
        other.update_from_flattened_dict(changes)
    (folder / "qa").mkdir(parents=True)
    (folder / "config.json").write_text(other.to_json())
    lines = [{"answer_recall@5": 0.25, "recall@5": 0.5}, {"exact_match": exact, "answer_recall@5": 1, "seconds": 20.0}]
    (folder / "qa" / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "realm").mkdir()
    (folder / "realm" / "metrics.jsonl").write_text('{"step": 9, "seconds": 100.0}\n')


def test_zero_shot_recall_is_the_first_and_exact_match_the_last_of_a_run(tmp_path):
    evaluated(tmp_path / "row", default(), 0.75)
    assert ablate.seed_result(tmp_path / "row") == SeedResult(0.75, 0.25, 0.5, 120.0)
    assert ablate.seed_result(tmp_path / "row", [tmp_path / "row"]).seconds == 240.0


def test_what_was_trained_with_another_config_is_left_out_and_named(tmp_path, caplog):
    config = ablations()
    for seed, steps in ((0, 300), (1, 2), (2, 300)):
        place = tmp_path / f"seed-{seed}"
        now = ablate.row_config(config, "baseline", seed, place)
        evaluated(place / "baseline", now, 0.5, **{"qa.steps": steps})
    evaluated(tmp_path / "seed-2" / "start", ablate.row_config(config, "start", 2, tmp_path), 0.5, **{"mlm.steps": 9})
    evaluated(tmp_path / "seed-0.old" / "baseline", now, 0.5)
    found = {row.title: sorted(row.seeds) for row in ablate.table_rows(config, tmp_path, warn=True)}
    assert found["Baseline (ORQA)"] == [0]
    assert "seed-1/baseline in the table: baseline has qa.steps=2, the config 300" in caplog.text
    assert "seed-2/baseline in the table: start has mlm.steps=9, the config 1600" in caplog.text


def test_titles_are_no_markup(tmp_path, capsys):
    rows = [row("REALM [no null] [/]", {0: 0.5}), row("K=8 | null", {0: 0.5})]
    ablate.show(rows, tmp_path)
    assert "REALM" in (shown := capsys.readouterr().out) and "[no" in shown
    assert r"| K=8 \| null |" in markdown(rows, "note")


def row(title: str, exact: dict[int, float], recall: float | None = 0.5) -> Row:
    return Row(title, (), {seed: SeedResult(value, 0.25, recall, 61.0) for seed, value in exact.items()})


def test_a_lead_is_taken_seed_by_seed():
    first, other = row("a", {0: 0.5, 1: 0.9, 2: 0.7}), row("b", {1: 0.7, 2: 0.5, 9: 0.0})
    found = paired_difference(first, other)
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.2, 0.2))
    assert paired_difference(first, row("c", {7: 0.1})) is None


def test_a_table_has_no_row_without_a_seed_and_no_gold_where_there_is_none():
    rows = [row("a <b>", {0: 0.5}, None), row("c", {})]
    assert cells(rows) == [["a <b>", "50.0", "", "25.0", "", "", "", "1", "1 min 1 s"]]
    assert len(cells(rows)[0]) == len(HEADS)
    assert "| a <b> | 50.0 |" in markdown(rows, "note") and "a &lt;b&gt;" in html(rows, "note")
