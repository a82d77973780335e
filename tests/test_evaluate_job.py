"""`realm evaluate`: what it measures, how it tells, and the files for TREC's tools that it writes."""

import io
import json
import os
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console
from tiny_run import question, write_lines

from realm_jax import cli
from realm_jax.errors import UserError
from realm_jax.jobs import answering
from realm_jax.jobs import evaluate as job
from realm_jax.jobs.predict import checked_output
from realm_jax.run import Run

pytestmark = pytest.mark.usefixtures("quick_programs")


def evaluate(run: Run, *arguments: str) -> int:
    return cli.main(["evaluate", f"--workdir={run.workdir}", *arguments])


def test_the_measures_are_lines_where_there_is_no_terminal(trained_run, capsys):
    assert evaluate(trained_run) == 0
    out, err = capsys.readouterr()
    assert "bm25s" not in err
    lines = out.splitlines()
    others = dict(line.removeprefix("bm25 ").split(" ") for line in lines if line.startswith("bm25 "))
    values = {line.split(" ")[0]: line.split(" ")[1:] for line in lines if not line.startswith("bm25 ")}
    parameters = sum(x.size for x in jax.tree.leaves(jax.eval_shape(trained_run.initial_params)))
    counts = {"task": "qa", "step": "2", "questions": "8", "passages": "16", "passages_read": "3"}
    counts["parameters"] = str(parameters)
    assert {name: values.pop(name) for name in counts} == {name: [value] for name, value in counts.items()}
    assert {"exact_match", "exact_match_squad", "f1", "recall@1", "answer_recall@5", "reader_oracle"} < values.keys()
    for value, low, high in (map(float, line) for line in values.values()):
        assert 0 <= low <= value <= high <= 1
    assert float(values["answer_recall@5"][0]) >= float(values["recall@5"][0]), "the gold passage holds the answer"
    assert others["recall@1"] == others["answer_recall@1"] == "1.0000", "names are in one passage each"
    assert "recall@20" not in values, "there are only sixteen passages"


def test_what_was_retrieved_and_what_should_have_been_are_written_for_trec(trained_run, tmp_path, capsys):
    files = f"--trec={tmp_path}/run.txt", f"--qrels={tmp_path}/qrels.txt"
    assert evaluate(trained_run, "--json", "--no-bm25", "--passages=4", *files) == 0
    found = json.loads(capsys.readouterr().out)
    assert "bm25" not in found and "recall@5" not in found["measures"], "only four passages were retrieved"
    ranked = [line.split(" ") for line in (tmp_path / "run.txt").read_text().splitlines()]
    assert [line[0] for line in ranked] == [str(n) for n in range(1, 9) for _ in range(4)]
    assert [line[3] for line in ranked] == ["1", "2", "3", "4"] * 8
    judged = dict(line.split(" 0 ") for line in (tmp_path / "qrels.txt").read_text().splitlines())
    assert judged == {str(n + 1): f"p{n} 1" for n in range(8)}
    first = [judged[line[0]] == f"{line[2]} 1" for line in ranked if line[3] == "1"]
    assert found["measures"]["recall@1"]["value"] == sum(first) / 8


def put(path: Path, text: str) -> None:
    job.write_lines(checked_output(path, "--trec"), text)


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
    assert found["measures"]["recall@5"]["value"] == recorded[-1]["recall@5"], "what training measured at its end"


def test_questions_of_a_file_need_no_gold_passage(trained_run, tmp_path, capsys):
    file = write_lines(tmp_path / "mine.jsonl", [question(1), question(2)])
    assert evaluate(trained_run, f"--questions={file}", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["questions"] == 2
    assert found["bm25"].keys() == {"answer_recall@1", "answer_recall@5"}
    assert not any(name.startswith("recall") for name in found["measures"])


def test_gold_passages_that_are_not_there_and_questions_that_are_cut_are_warned_of(trained_run, tmp_path, capsys):
    records = [question(1, gold_passage_id="elsewhere"), question(2) | {"question": "who " * 30}]
    file = write_lines(tmp_path / "mine.jsonl", records)
    assert evaluate(trained_run, f"--questions={file}", "--json", "--no-bm25") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["measures"]["recall@5"] == {"value": 0, "low": None, "high": None, "questions": 1}
    assert "1 gold passages, such as 'elsewhere'" in err
    assert "1 questions are longer than the 14 word pieces" in err


def test_a_terminal_shows_a_table_with_a_dash_for_what_was_not_measured():
    found = {"task": "qa", "step": 2, "questions": 8, "passages": 16, "passages_read": 3, "parameters": 23278}
    found |= {"bm25": {"answer_recall@1": 1.0}, "measures": {}}
    for name, value in {"exact_match": 0.125, "answer_recall@1": 0.25}.items():
        found["measures"][name] = {"value": value, "low": 0.0, "high": 0.375, "questions": 8}
    to = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=120, highlight=False)
    job.show(found, to)
    rows = [line.split() for line in to.file.getvalue().splitlines()]
    assert rows[0] == ["measure", "after", "qa", "95", "%", "BM25", "questions"]
    assert rows[1][:7] == ["exact_match", "12.5%", "0.0%", "…", "37.5%", "–", "8"] and "ORQA's" in rows[1]
    assert rows[2][:7] == ["answer_recall@1", "25.0%", "0.0%", "…", "37.5%", "100.0%", "8"]
    assert "23,278" in rows[-1]


def test_patterns_are_measured_in_both_senses(trained_run, tmp_path, capsys):
    patterns = [question(n) | {"answers": ["\\w+"], "match": "regex"} for n in (1, 2)]
    file = write_lines(tmp_path / "mine.jsonl", patterns)
    assert evaluate(trained_run, f"--questions={file}", "--json", "--no-bm25") == 0
    found = json.loads(capsys.readouterr().out)["measures"]
    assert found["regex_match"] == found["exact_match"] and found["reader_oracle"]["value"] == 1
    assert found["regex_full_match"]["value"] <= found["regex_match"]["value"]
    assert not {"f1", "exact_match_squad"} & found.keys()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--split=test"], "--split=test: {data} has no such questions (it has: train, dev)"),
        (["--task=realm"], "--task=realm: the run in {run} has no such task; choose among ict, qa"),
        (["--trec=nowhere/run.txt"], "--trec=nowhere/run.txt: name a file in a folder that exists"),
        (["--trec=/proc/run.txt"], "--trec=/proc: no folder that can be written to"),
        (["--questions=none.jsonl"], "cannot read none.jsonl"),
        (["--passages=2"], "--passages=2: fewer than the 3 that are read"),
        (["--passages=2", "--read=6"], "--passages=2: fewer than the 6 that are read"),
        (["--data=nowhere"], "nowhere: the prepared folder of the run in {run} is not there"),
    ],
)
def test_mistakes_are_told_in_one_line(trained_run, capsys, arguments, message):
    assert evaluate(trained_run, *arguments) == 2
    out, err = capsys.readouterr()
    data = trained_run.config.data.path
    assert out == "" and message.format(run=trained_run.workdir, data=data) in err.splitlines()[-1]


def test_what_would_be_written_over_or_be_empty_is_refused(tmp_path, capsys):
    line = {"question": "Who?", "prediction": "she", "answers": ["she"]}
    file = write_lines(tmp_path / "mine.jsonl", [line, line])
    (tmp_path / "link.txt").symlink_to(file)
    before = file.read_bytes()
    for arguments, message in (
        ([f"--trec={file}"], "is the file of --predictions; name another"),
        ([f"--qrels={tmp_path}/link.txt"], "is the file of --predictions; name another"),
        (
            [f"--trec={tmp_path}/one", f"--qrels={tmp_path}/../{tmp_path.name}/one"],
            "is the file of --trec; name another",
        ),
        ([f"--trec={tmp_path}/one"], "nothing was retrieved"),
        ([f"--qrels={tmp_path}/one"], "no question has a gold passage"),
        ([f"--unseen={tmp_path}"], "no measured question has a gold passage"),
    ):
        assert cli.main(["evaluate", f"--predictions={file}", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == "" and message in err.splitlines()[-1]
    assert file.read_bytes() == before and not (tmp_path / "one").exists()


@pytest.mark.parametrize(
    "flag", ["workdir", "data", "split", "questions", "task", "predictions", "unseen", "trec", "qrels"]
)
def test_an_empty_flag_is_not_taken_for_an_absent_one(flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["evaluate", f"--{flag}="])
    assert f"argument --{flag}: it is empty; give a value or leave the flag out" in capsys.readouterr().err


def test_two_questions_of_one_id_are_told_before_anything_is_measured(trained_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(job, "restore", lambda *_, **options: pytest.fail("the model was loaded"))
    file = write_lines(tmp_path / "mine.jsonl", [question(1, id="a"), question(2, id="a")])
    assert evaluate(trained_run, f"--questions={file}", f"--trec={tmp_path}/run.txt") == 2
    assert "two questions have the id a" in capsys.readouterr().err


def test_a_file_that_may_not_be_written_to_is_refused(tmp_path, monkeypatch):
    (tmp_path / "there").write_text("kept")
    monkeypatch.setattr(os, "access", lambda *_: False)  # the administrator may write to all files
    with pytest.raises(UserError, match="--output=.*there: may not be written to"):
        checked_output(tmp_path / "there", "--output")


def test_as_many_passages_are_retrieved_as_are_read():
    args = Namespace(passages=None, read=30, aggregate=None)
    assert answering.overrides_of(args) == {"evaluation.passages": 30, "evaluation.qa_passages": 30}
    assert answering.overrides_of(Namespace(passages=None, read=3, aggregate=None))["evaluation.passages"] == 20


def test_a_corpus_has_no_more_passages_to_read_than_it_has(monkeypatch):
    monkeypatch.setattr(answering, "newest", lambda *_: ("qa", None))
    small = SimpleNamespace(answering=SimpleNamespace(qa_passages=5), setting=SimpleNamespace(rows=3))
    answering.check_passages(small, Namespace(task=None, passages=3))
    with pytest.raises(UserError, match="--passages=2: fewer than the 3 that are read"):
        answering.check_passages(small, Namespace(task=None, passages=2))


@pytest.mark.parametrize("flags", [{"passages": 5}, {"read": 5}, {"aggregate": "max"}, {"nbest": 5}, {}])
def test_flags_about_passages_do_nothing_without_passages(monkeypatch, flags):
    monkeypatch.setattr(answering, "newest", lambda *_: ("closed_book", None))
    args = Namespace(**{"task": None, "passages": None, "read": None, "aggregate": None} | flags)
    run = SimpleNamespace(workdir="runs/mine")
    if flags:
        with pytest.raises(UserError, match=f"--{next(iter(flags))}: runs/mine answers without passages"):
            answering.check_passages(run, args)
    else:
        answering.check_passages(run, args)
