"""`realm evaluate`: what it measures, how it tells, and the predictions that it writes."""

import io
import json
import os
from pathlib import Path

import jax
import pytest
from rich.console import Console
from tiny_run import question, write_lines

from realm_jax import cli
from realm_jax.evaluation.answers import exact_match
from realm_jax.jobs import evaluate as job
from realm_jax.run import Run


def evaluate(run: Run, *arguments: str) -> int:
    return cli.main(["evaluate", f"--workdir={run.workdir}", *arguments])


def test_the_measures_are_lines_where_there_is_no_terminal(trained_run, capsys):
    assert evaluate(trained_run) == 0
    out, err = capsys.readouterr()
    assert "bm25s" not in err
    values = dict(line.rsplit(" ", 1) for line in out.splitlines())
    parameters = sum(x.size for x in jax.tree.leaves(jax.eval_shape(trained_run.initial_params)))
    counts = {"task": "qa", "step": "2", "questions": "8", "passages": "16", "parameters": str(parameters)}
    assert {name: values[name] for name in counts} == counts
    assert 0 <= float(values["recall@1"]) <= float(values["recall@5"]) <= 1
    assert float(values["answer_recall@5"]) >= float(values["recall@5"]), "the gold passage holds the answer"
    assert values["bm25 recall@1"] == values["bm25 answer_recall@1"] == "1.0000", "names are in one passage each"
    assert "recall@20" not in values, "there are only sixteen passages"


def test_predictions_are_written_one_a_line_and_agree_with_the_score(trained_run, tmp_path, capsys):
    output = tmp_path / "predictions.jsonl"
    assert evaluate(trained_run, "--json", "--no-bm25", f"--output={output}") == 0
    found = json.loads(capsys.readouterr().out)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(records) == found["questions"] == 8 and "bm25" not in found
    assert found["exact_match"] == sum(record["correct"] for record in records) / 8
    store = trained_run.sources.passages
    for number, record in enumerate(records):
        asked = question(number)
        assert (record["question"], record["answers"]) == (asked["question"], asked["answers"])
        assert record["gold_passage_id"] == f"p{number}" and 0 < record["probability"] <= 1
        assert record["prediction"] in store.text(store.rows_of(record["passage_id"])[0])
        assert record["correct"] == exact_match(record["prediction"], record["answers"])


def put(path: Path, text: str) -> None:
    job.write_lines(job.checked_output(path), text)


def test_a_link_stays_and_the_file_that_it_leads_to_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "there" / "file.jsonl")
    for text in ("one\n", "two\n"):
        put(link, text)
        assert link.is_symlink() and (tmp_path / "there" / "file.jsonl").read_text() == text


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    put(tmp_path / "pipe", "one\n")
    assert os.read(reader, 100) == b"one\n" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    put(Path("/dev/null"), "one\n")
    assert Path("/dev/null").is_char_device()


def test_an_earlier_task_can_be_measured(trained_run, capsys):
    assert evaluate(trained_run, "--task=ict", "--json", "--no-bm25") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    recorded = [
        json.loads(line) for line in (trained_run.workdir / "ict" / "evaluations.jsonl").read_text().splitlines()
    ]
    assert found["task"] == "ict" and "span head that qa did not train" in err
    assert found["retrieval"]["recall@5"] == recorded[-1]["recall@5"], "what training measured at its end"


def test_questions_of_a_file_need_no_gold_passage(trained_run, tmp_path, capsys):
    file = write_lines(tmp_path / "mine.jsonl", [question(1), question(2)])
    assert evaluate(trained_run, f"--questions={file}", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["questions"] == 2
    assert set(found["retrieval"]) == set(found["bm25"]) == {"answer_recall@1", "answer_recall@5"}


def test_gold_passages_that_are_not_there_and_questions_that_are_cut_are_warned_of(trained_run, tmp_path, capsys):
    records = [question(1, gold_passage_id="elsewhere"), question(2) | {"question": "who " * 30}]
    file = write_lines(tmp_path / "mine.jsonl", records)
    assert evaluate(trained_run, f"--questions={file}", "--json", "--no-bm25") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["retrieval"]["recall@5"] == 0
    assert "1 gold passages, such as 'elsewhere'" in err
    assert "1 questions are longer than the 14 word pieces" in err


def test_a_terminal_shows_a_table_with_a_dash_for_what_was_not_measured():
    found = {"task": "qa", "step": 2, "questions": 8, "passages": 16, "parameters": 23278, "exact_match": 0.125}
    found |= {"retrieval": {"answer_recall@1": 0.25, "answer_recall@5": 0.5}, "bm25": {"answer_recall@1": 1.0}}
    to = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=100, highlight=False)
    job.show(found, to)
    rows = [line.split() for line in to.file.getvalue().splitlines()]
    assert rows[0] == ["measure", "after", "qa", "BM25"]
    assert ["answer_recall@1", "answer", "in", "a", "passage", "25.0%", "100.0%"] in rows
    assert ["answer_recall@20", "answer", "in", "a", "passage", "–", "–"] in rows
    assert ["exact", "match", "12.5%", "–"] in rows
    assert not any(row[0].startswith("recall@") for row in rows)
    assert "23,278" in rows[-1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--split=test"], "--split=test: {data} has no such questions (it has: train, dev)"),
        (["--task=realm"], "--task=realm: the run in {run} has no such task; choose among ict, qa"),
        (["--output=nowhere/out.jsonl"], "--output=nowhere/out.jsonl: name a file in a folder that exists"),
        (["--output=/proc/out.jsonl"], "--output=/proc: no folder that can be written to"),
        (["--questions=none.jsonl"], "cannot read none.jsonl"),
        (["--data=nowhere"], "nowhere: the prepared folder of the run in {run} is not there"),
    ],
)
def test_mistakes_are_told_in_one_line(trained_run, capsys, arguments, message):
    assert evaluate(trained_run, *arguments) == 2
    out, err = capsys.readouterr()
    data = trained_run.config.data.path
    assert out == "" and message.format(run=trained_run.workdir, data=data) in err.splitlines()[-1]
