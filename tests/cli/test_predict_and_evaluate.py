"""`realm predict` and `realm evaluate`: what a line says, a file that was cut off, measures, and two files compared."""

import dataclasses
import io
import json
import os
import signal
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console
from tiny_run import question, with_config, write_lines

from realm_jax.cli import arguments as run_arguments
from realm_jax.cli import evaluate, predict
from realm_jax.cli import main as cli
from realm_jax.cli.arguments import check_passages
from realm_jax.config import with_values
from realm_jax.errors import UserError
from realm_jax.eval.answer_matching import exact_match
from realm_jax.eval.prediction import Evaluator
from realm_jax.eval.prediction_files import settings_file
from realm_jax.eval.question_metrics import compare, over_seeds
from realm_jax.storage import read_json
from realm_jax.train import results
from realm_jax.train.trained_run import NBEST, open_run_for_inference, restore

UNANSWERED = {"question": "Who built it?", "id": "extra"}
THEIRS = {"question": "Who?", "prediction": "she", "answers": ["she"]}  # a line of another system


def run(*arguments: object) -> int:
    return cli.main([*map(str, arguments)])


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Path:
    """Twenty questions, two batches and a half; the last has no answers."""
    many = [question(n % 16, gold_passage_id=f"p{n % 16}", qid=f"q{n}") for n in range(19)]
    return write_lines(tmp_path_factory.mktemp("asked") / "questions.jsonl", [*many, UNANSWERED])


@pytest.fixture(scope="module")
def predicted(trained_run, asked, tmp_path_factory) -> Path:
    """Its predictions, made by the command and left as they are."""
    output = tmp_path_factory.mktemp("predicted") / "predictions.jsonl"
    assert run("predict", f"--workdir={trained_run.workdir}", f"--questions={asked}", f"--output={output}") == 0
    return output


@pytest.fixture(scope="module")
def trained(trained_run):
    return restore(open_run_for_inference(trained_run.workdir))


@pytest.fixture
def quick(trained, monkeypatch) -> list[str | None]:
    """The commands without opening and restoring the run again; the tasks that they would have restored."""
    restored: list[str | None] = []

    def opened(_workdir, changes):
        return with_config(trained.run, with_values(trained.run.config, changes))

    def given(run, task, **_):
        restored.append(task)
        return dataclasses.replace(trained, run=run)

    for job in (predict, evaluate):
        monkeypatch.setattr(job, "open_run_for_inference", opened)
        monkeypatch.setattr(job, "restore", given)
    return restored


@pytest.fixture
def predict_to(trained_run, asked):
    """`realm predict` of the questions, to a file."""

    def predicting(output: object, *arguments: str) -> int:
        given = arguments if any(one.startswith("--questions") for one in arguments) else (f"--questions={asked}",)
        return run("predict", f"--workdir={trained_run.workdir}", f"--output={output}", *{*given, *arguments})

    return predicting


@pytest.fixture
def measured(trained_run, capsys):
    """What `realm evaluate --json` says of the run."""

    def measuring(*arguments: str) -> dict:
        capsys.readouterr()
        assert run("evaluate", f"--workdir={trained_run.workdir}", "--json", *arguments) == 0
        return json.loads(capsys.readouterr().out)

    return measuring


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def copied(predicted: Path, folder: Path, content: bytes) -> Path:
    """A file of other content with the settings of `predicted`."""
    file = folder / "predictions.jsonl"
    file.write_bytes(content)
    settings_file(file).write_bytes(settings_file(predicted).read_bytes())
    return file


def last_line(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()[-1]


# ---- predictions


def test_a_line_says_what_was_asked_what_was_answered_and_where_it_stands(trained_run, predicted):
    store, lines = trained_run.sources.passages, records(predicted)
    assert [line["id"] for line in lines] == [*(f"q{n}" for n in range(19)), "extra"]
    for number, line in enumerate(lines[:19]):
        known = question(number % 16, gold_passage_id=f"p{number % 16}")
        assert {key: line[key] for key in known} == known
        assert {**line["nbest"][0], "answer": line["prediction"]} == line["nbest"][0]
        assert (line["probability"], line["passage"]) == (line["nbest"][0]["probability"], line["nbest"][0]["passage"])
        assert 1 <= len(line["nbest"]) <= NBEST and line["probability"] <= 1
        for answer in line["nbest"]:
            place = answer["passage"]
            row = store.rows_of(place["id"])[place["part"]]
            assert (
                store.text(row)[slice(*place["span"])] == answer["answer"] != "" and store.title(row) == place["title"]
            )
        read = [passage["has_answer"] for passage in line["retrieved"][:3]]
        assert len(line["retrieved"]) == 16 and line["reader_oracle"] == any(read)
        assert [p["has_answer"] for p in line["retrieved"]] == [
            known["answers"][0] in store.text(store.rows_of(p["id"])[0]) for p in line["retrieved"]
        ]
    assert not {"answers", "gold_passage_id", "reader_oracle"} & lines[19].keys()


def test_the_keys_of_a_line_and_of_its_settings_stay_in_their_order(predicted):
    first, made = records(predicted)[0], json.loads(settings_file(predicted).read_text())
    right = ["id", "question", "answers", "gold_passage_id"]
    assert [*first] == [*right, "prediction", "probability", "passage", "nbest", "retrieved", "reader_oracle"]
    assert [*first["nbest"][0]] == ["answer", "probability", "passage"]
    assert [*first["passage"]] == ["id", "part", "title", "span"]
    assert [*first["retrieved"][0]] == ["id", "score", "ranks", "has_answer"]
    facts = ["task", "step", "parameters", "passages", "passages_read"]
    made_with = ["search", "retrieved", "spans", "aggregate", "nbest", "batch_size", "devices"]
    assert [*made] == [*facts, "checkpoint", "corpus", "questions", "lines", *made_with]


def test_a_reranker_is_recorded_in_settings_and_ranks(predict_to, predicted, tmp_path, capsys):
    output = tmp_path / "reranked.jsonl"
    assert predict_to(output, "--rerank=tokens") == 0
    made = json.loads(settings_file(output).read_text())
    assert (made["rerank"], made["reranked"]) == ("tokens", 10)
    for line, plain in zip(records(output), records(predicted), strict=True):
        ids = [[passage["id"] for passage in one["retrieved"]] for one in (line, plain)]
        assert sorted(ids[0][:10]) == sorted(ids[1][:10]) and ids[0][10:] == ids[1][10:]
        assert [passage["ranks"].get("tokens") for passage in line["retrieved"]] == [*range(1, 11), *[None] * 6]
    capsys.readouterr()
    assert predict_to(output, "--rerank=none") == 2
    assert "rerank" in last_line(capsys)


@pytest.mark.parametrize("cut", [0, 10, -1, 9_000])
def test_a_file_that_was_cut_off_ends_with_the_same_bytes(predict_to, predicted, quick, tmp_path, cut):
    output = copied(predicted, tmp_path, predicted.read_bytes()[:cut])
    assert predict_to(output) == 0
    assert output.read_bytes() == predicted.read_bytes() and quick == [None]


def test_lines_that_were_added_are_refused(predict_to, predicted, quick, tmp_path, capsys):
    file = copied(predicted, tmp_path, predicted.read_bytes() * 2)
    before = file.read_bytes()
    for code in (run("evaluate", file), predict_to(file)):
        assert code == 2
    assert capsys.readouterr().err.count(f"{file}: holds 40 lines for 20 questions") == 2
    assert file.read_bytes() == before and not quick


def test_a_file_that_is_done_needs_no_model(predict_to, predicted, quick, capsys):
    before = predicted.read_bytes()
    assert predict_to(predicted) == 0
    assert predicted.read_bytes() == before and not quick and "20 predictions" in capsys.readouterr().err


def test_sigterm_ends_after_a_batch_and_the_command_goes_on(predict_to, predicted, quick, tmp_path, monkeypatch):
    output = tmp_path / "predictions.jsonl"
    with monkeypatch.context() as patch:
        write = predict.write_record
        patch.setattr(predict, "write_record", lambda record: (os.kill(os.getpid(), signal.SIGTERM), write(record))[1])
        assert predict_to(output) == 75
    size = json.loads(settings_file(output).read_text())["batch_size"]
    assert len(records(output)) == min(size, 20)
    assert predict_to(output) == 0 and output.read_bytes() == predicted.read_bytes()


def test_another_run_question_or_setting_is_refused(predict_to, predicted, quick, tmp_path, capsys):
    before = predicted.read_bytes()
    other = write_lines(tmp_path / "other.jsonl", [question(1)])
    for argument, reason in (
        (f"--questions={other}", "was made with other questions"),
        ("--nbest=2", "was made with other nbest"),
        ("--task=ict", "was made with other task and checkpoint"),
        ("--config.answering.aggregate=max", "was made with other aggregate"),
    ):
        assert predict_to(predicted, argument) == 2
        assert reason in last_line(capsys)
    theirs = write_lines(tmp_path / "theirs.jsonl", [UNANSWERED])
    assert predict_to(theirs) == 2
    assert "theirs.jsonl: is not a file of `realm predict`" in last_line(capsys)
    assert predicted.read_bytes() == before and not quick


def test_a_pipe_or_a_device_gets_all_of_them(predict_to, quick, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    few = write_lines(tmp_path / "few.jsonl", [UNANSWERED])
    assert predict_to(tmp_path / "pipe", f"--questions={few}") == 0
    assert json.loads(os.read(reader, 100_000))["id"] == "extra"
    os.close(reader)
    assert predict_to("/dev/null", f"--questions={few}") == 0


# ---- measures


def test_the_file_is_measured_like_the_run(measured, asked, predicted, quick, tmp_path, capsys):
    """Without the question that has no answers, which a run is not measured on."""
    answered = write_lines(tmp_path / "answered.jsonl", records(asked)[:19])
    assert run("evaluate", predicted, "--json", f"--trec={tmp_path}/one.txt") == 0
    file = json.loads(capsys.readouterr().out)
    found = measured(f"--questions={answered}", "--no-bm25", f"--trec={tmp_path}/two.txt")
    assert (file.pop("questions"), found.pop("questions")) == (20, 19) and file == found
    right = [exact_match(line["prediction"], line["answers"]) for line in records(predicted)[:19]]
    assert found["measures"]["exact_match"]["value"] == pytest.approx(sum(right) / 19)
    first, second = ((tmp_path / name).read_text() for name in ("one.txt", "two.txt"))
    assert first.startswith(second) and len(first.splitlines()) == 20 * 16


def test_the_measures_are_lines_where_there_is_no_terminal(trained_run, capsys):
    assert run("evaluate", f"--workdir={trained_run.workdir}") == 0
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


def test_what_was_retrieved_and_what_should_have_been_are_written_for_trec(measured, quick, tmp_path):
    files = f"--trec={tmp_path}/run.txt", f"--qrels={tmp_path}/qrels.txt"
    found = measured("--no-bm25", "--config.answering.retrieved=4", *files)
    assert "bm25" not in found and "recall@5" not in found["measures"], "only four passages were retrieved"
    ranked = [line.split(" ") for line in (tmp_path / "run.txt").read_text().splitlines()]
    assert [line[0] for line in ranked] == [str(n) for n in range(1, 9) for _ in range(4)]
    assert [line[3] for line in ranked] == ["1", "2", "3", "4"] * 8
    judged = dict(line.split(" 0 ") for line in (tmp_path / "qrels.txt").read_text().splitlines())
    assert judged == {str(n + 1): f"p{n} 1" for n in range(8)}
    first = [judged[line[0]] == f"{line[2]} 1" for line in ranked if line[3] == "1"]
    assert found["measures"]["recall@1"]["value"] == sum(first) / 8


def test_as_many_passages_are_retrieved_as_are_read(predict_to, quick, tmp_path):
    few = write_lines(tmp_path / "few.jsonl", [question(1)])
    read = ("--config.answering.read=6", f"--questions={few}")
    assert predict_to(tmp_path / "p.jsonl", "--config.answering.retrieved=6", *read) == 0
    assert len(records(tmp_path / "p.jsonl")[0]["retrieved"]) == 6


def test_an_earlier_task_can_be_measured(trained_run, capsys):
    assert run("evaluate", f"--workdir={trained_run.workdir}", "--task=ict", "--json", "--no-bm25") == 0
    out, err = capsys.readouterr()
    found, recorded = json.loads(out), records(trained_run.workdir / "ict" / "evaluations.jsonl")
    assert found["task"] == "ict" and "span head that was not fine-tuned" in err
    assert found["measures"]["recall@5"]["value"] == recorded[-1]["recall@5"], "what training measured at its end"


def test_questions_of_a_file_need_no_gold_passage(measured, quick, tmp_path):
    file = write_lines(tmp_path / "mine.jsonl", [question(1), question(2)])
    found = measured(f"--questions={file}")
    assert found["questions"] == 2
    assert found["bm25"].keys() == {"answer_recall@1", "answer_recall@5"}
    assert not any(name.startswith("recall") for name in found["measures"])


def test_questions_of_a_split_are_named_like_a_file(measured, quick):
    train, dev = measured("--questions=train", "--no-bm25"), measured("--no-bm25")
    assert train == dev, "the same eight questions are in both"


def test_gold_passages_that_are_not_there_and_questions_that_are_cut_are_warned_of(
    trained_run, quick, tmp_path, capsys
):
    lines = [question(1, gold_passage_id="elsewhere"), question(2) | {"question": "who " * 30}]
    file = write_lines(tmp_path / "mine.jsonl", lines)
    assert run("evaluate", f"--workdir={trained_run.workdir}", f"--questions={file}", "--json", "--no-bm25") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["measures"]["recall@5"] == {"value": 0, "low": None, "high": None, "questions": 1}
    assert "1 gold passages, such as 'elsewhere'" in err
    assert "truncating 1 questions that have more than the 14 tokens" in err


def test_patterns_are_measured_in_both_senses(measured, quick, tmp_path):
    patterns = [question(n) | {"answers": ["\\w+"], "match": "regex"} for n in (1, 2)]
    found = measured(f"--questions={write_lines(tmp_path / 'mine.jsonl', patterns)}", "--no-bm25")["measures"]
    assert found["regex_match"] == found["exact_match"] and found["reader_oracle"]["value"] == 1
    assert found["regex_full_match"]["value"] <= found["regex_match"]["value"]
    assert not {"f1", "exact_match_squad"} & found.keys()


def test_questions_that_share_their_passage_with_training_can_be_left_out(trained_run, predicted, capsys):
    data = trained_run.config.data.path
    assert run("evaluate", predicted, f"--unseen={data}", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["questions"] == 9, "training asks about the first eight people; one question has no passage"
    assert found["measures"]["recall@1"]["questions"] == 8
    seen = write_lines(predicted.with_name("seen.jsonl"), records(predicted)[:8])
    assert run("evaluate", seen, f"--unseen={data}") == 2
    assert f"--unseen={data}: leaves no question" in last_line(capsys)
    assert run("evaluate", seen, f"--unseen={predicted.parent}") == 2
    assert f"--unseen={predicted.parent}: not a prepared folder" in last_line(capsys)


def test_a_terminal_shows_a_table_with_a_dash_for_what_was_not_measured():
    found = {"task": "qa", "step": 2, "questions": 8, "passages": 16, "passages_read": 3, "parameters": 23278}
    found |= {"bm25": {"answer_recall@1": 1.0}, "measures": {}}
    for name, value in {"exact_match": 0.125, "answer_recall@1": 0.25}.items():
        found["measures"][name] = {"value": value, "low": 0.0, "high": 0.375, "questions": 8}
    rows = [line.split() for line in on_terminal(evaluate.show, found).splitlines()]
    assert rows[0] == ["measure", "after", "qa", "95", "%", "BM25", "questions"]
    assert rows[1][:7] == ["exact_match", "12.5%", "0.0%", "…", "37.5%", "–", "8"] and "ORQA's" in rows[1]
    assert rows[2][:7] == ["answer_recall@1", "25.0%", "0.0%", "…", "37.5%", "100.0%", "8"]
    assert "23,278" in rows[-1]


def on_terminal(show, found: dict) -> str:
    to = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=120, highlight=False)
    show(found, to)
    return to.file.getvalue()


# ---- what is refused


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--questions=test"], "--questions=test: {data} has no such questions (it has: train, dev)"),
        (["--task=realm"], "--task=realm: the run in {run} has no such task; choose among ict, qa"),
        (["--trec=nowhere/run.txt"], "--trec=nowhere/run.txt: is not a file in an existing folder"),
        (["--questions=none.jsonl"], "cannot read none.jsonl"),
        (["--config.answering.retrieved=2"], "config.answering.retrieved=2: is less than the 3 that are read"),
        (
            ["--config.answering.retrieved=2", "--config.answering.read=6"],
            "config.answering.retrieved=2: is less than the 6 that are read",
        ),
        (["--config.data.path=nowhere"], "nowhere: the prepared folder of the run in {run} is not there"),
        (["file.jsonl"], "name a run with --workdir, or one file of predictions, or two to compare"),
    ],
)
def test_mistakes_are_told_in_one_line(trained_run, capsys, arguments, message):
    assert run("evaluate", f"--workdir={trained_run.workdir}", *arguments) == 2
    assert message.format(run=trained_run.workdir, data=trained_run.config.data.path) in last_line(capsys)


def test_what_would_be_written_over_or_be_empty_is_refused(tmp_path, capsys):
    file = write_lines(tmp_path / "mine.jsonl", [THEIRS, THEIRS])
    (tmp_path / "link.txt").symlink_to(file)
    before, one = file.read_bytes(), f"{tmp_path}/one"
    for arguments, message in (
        ([f"--trec={file}"], "is also the file of the predictions; choose another"),
        ([f"--qrels={tmp_path}/link.txt"], "is also the file of the predictions; choose another"),
        ([f"--trec={one}", f"--qrels={tmp_path}/../{tmp_path.name}/one"], "is also the file of --trec; choose another"),
        ([f"--trec={one}"], "no passages were retrieved"),
        ([f"--qrels={one}"], "no question has a gold passage"),
        ([f"--unseen={tmp_path}"], "no measured question has a gold passage"),
    ):
        assert run("evaluate", file, *arguments) == 2
        assert message in last_line(capsys)
    assert file.read_bytes() == before and not (tmp_path / "one").exists()


@pytest.mark.parametrize("flag", ["--workdir=", "--questions=", "--task=", "--unseen=", "--trec=", "--qrels=", ""])
def test_an_empty_argument_is_not_taken_for_an_absent_one(flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["evaluate", flag])
    name = flag.removesuffix("=") or "FILE"
    assert f"argument {name}: is empty; give a value or omit the flag" in capsys.readouterr().err


def test_what_is_in_files_is_fixed(capsys):
    for arguments in (["--config.answering.retrieved=5"], ["--no-bm25"], ["--task=qa"], ["--questions=dev"]):
        assert run("evaluate", "a.jsonl", *arguments) == 2
        assert (
            f"{arguments[0].partition('=')[0]}" in (line := last_line(capsys)) and "applies only to --workdir" in line
        )
    for arguments in (["--unseen=data"], ["--trec=run.txt"], ["--qrels=qrels.txt"]):
        assert run("evaluate", "a.jsonl", "b.jsonl", *arguments) == 2
        assert f"{arguments[0].partition('=')[0]}: applies to one file of predictions" in last_line(capsys)


def test_two_questions_of_one_id_are_told_before_anything_is_measured(trained_run, quick, tmp_path, capsys):
    file = write_lines(tmp_path / "mine.jsonl", [question(1, id="a"), question(2, id="a")])
    assert run("evaluate", f"--workdir={trained_run.workdir}", f"--questions={file}", f"--trec={tmp_path}/r.txt") == 2
    assert "two questions have the id a" in last_line(capsys) and not quick


@pytest.mark.parametrize(
    ("fields", "told"),
    [({"reader_oracle": None}, '"reader_oracle" must be'), ({"retrieved": [{"id": "a", "score": None}]}, '"score"')],
)
def test_predictions_of_others_are_looked_at_before_they_are_measured(tmp_path, capsys, fields, told):
    assert run("evaluate", write_lines(tmp_path / "file.jsonl", [THEIRS | fields])) == 2
    line = last_line(capsys)
    assert "file.jsonl:1: " in line and told in line


def test_a_corpus_has_no_more_passages_to_read_than_it_has(monkeypatch):
    monkeypatch.setattr(run_arguments, "find_task", lambda *_: SimpleNamespace(task="qa"))
    small = SimpleNamespace(answering_qa=SimpleNamespace(passages=5), context=SimpleNamespace(rows=3))
    check_passages(small, Namespace(task=None, overrides=["--config.answering.retrieved=3"]))
    with pytest.raises(UserError, match="retrieved=2: is less than the 3 that are read"):
        check_passages(small, Namespace(task=None, overrides=["--config.answering.retrieved=2"]))


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"overrides": ["--config.answering.retrieved=5"]}, "--config.answering.retrieved"),
        ({"overrides": ["--config.answering.aggregate=max"]}, "--config.answering.aggregate"),
        ({"nbest": 5}, "--nbest"),
        ({"search": "bm25"}, "--search"),
        ({"overrides": ["--config.evaluation.batch_size=5"]}, None),
    ],
)
def test_what_is_said_about_passages_does_nothing_without_passages(monkeypatch, given, refused):
    monkeypatch.setattr(run_arguments, "find_task", lambda *_: SimpleNamespace(task="closed_book"))
    args, opened = Namespace(**{"task": None, "overrides": []} | given), SimpleNamespace(workdir=Path("runs/mine"))
    if refused is None:
        check_passages(opened, args)
        return
    with pytest.raises(UserError, match=f"{refused}: runs/mine answers without passages"):
        check_passages(opened, args)


# ---- two files


@pytest.fixture
def better(predicted, tmp_path) -> Path:
    """The same, with the answers to six more questions."""
    lines = records(predicted)
    for line in lines[:6]:
        assert not exact_match(line["prediction"], line["answers"])
        line["prediction"] = line["answers"][0]
    return write_lines(tmp_path / "better.jsonl", lines)


def test_two_files_are_compared_question_by_question(predicted, better, capsys):
    assert run("evaluate", predicted, better, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    exact = found["measures"]["exact_match"]
    assert exact["difference"] == pytest.approx(6 / 19) and (exact["only_a"], exact["only_b"]) == (0, 6)
    assert exact["p"] == exact["mcnemar"] == pytest.approx(2 / 2**6) and exact["low"] > 0
    assert found["measures"]["recall@1"]["p"] == 1 and found["a"]["passages_read"] == 3 and "task" not in found["b"]
    assert run("evaluate", predicted, better) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("exact_match "))
    assert line.split(" ")[3::3] == ["0.3158", "0.03125"] and line.endswith(" 19")


def test_files_of_several_seeds_are_one_system(predicted, better, capsys):
    assert run("evaluate", "--seeds", predicted, better, "--seeds", better, better, "--json") == 0
    exact = json.loads(capsys.readouterr().out)["measures"]["exact_match"]
    assert exact["difference"] == pytest.approx(3 / 19) and exact["low"] < 0 < exact["high"] and exact["seeds"] == 2
    assert run("evaluate", "--seeds", predicted, better) == 0
    assert any(line.startswith("exact_match ") and line.endswith(" 2") for line in capsys.readouterr().out.splitlines())
    text = on_terminal(evaluate.show_comparison, over_seeds([records(predicted), records(better)]))
    assert "Student's t over seeds" in text and "%" in text


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ((), "needs two or more files; give a second system as many"),
        (("--seeds", "b.jsonl", "c.jsonl"), "needs two or more files; give a second system as many"),
        (("--trec=run.txt",), "can only be combined with --json; leave out trec"),
    ],
)
def test_seeds_that_are_no_pairs_are_refused(others, told, capsys):
    assert run("evaluate", "--seeds", "a.jsonl", *others) == 2
    assert told in last_line(capsys)


def test_a_terminal_says_what_the_tests_are(predicted, better):
    found = {name: {"file": f"{name}.jsonl", "parameters": 23278} for name in "ab"}
    found |= compare(records(predicted), records(better), "b.jsonl")
    text = on_terminal(evaluate.show_comparison, found)
    assert "parameters 23,278" in text and "+31.6%" in text and "McNemar: exact" in text


def test_other_questions_are_not_compared(predicted, tmp_path, capsys):
    lines = records(predicted)
    lines[3]["answers"] = ["1999"]
    other, short = write_lines(tmp_path / "o.jsonl", lines), write_lines(tmp_path / "s.jsonl", lines[:2])
    assert run("evaluate", predicted, other) == 2
    assert "o.jsonl: question 4 is" in last_line(capsys)
    assert run("evaluate", predicted, short) == 2
    assert "s.jsonl: has 2 predictions, the other file 20" in last_line(capsys)


def test_bm25_is_no_baseline_of_a_corpus_that_is_too_large_for_it(trained, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    run, found = dataclasses.replace(trained.run, workdir=tmp_path), []
    evaluator = Evaluator(run, run.sources.questions["dev"])
    for largest in (len(run.sources.passages) - 1, len(run.sources.passages)):
        monkeypatch.setattr(results, "MAX_BM25_PASSAGES", largest)
        results.measure_baselines(run, evaluator)
        found.append(read_json(tmp_path / "baselines.json"))
        (tmp_path / "baselines.json").unlink()
        assert (tmp_path / "words").exists() == ("bm25" in found[-1])
    assert [{*one} for one in found] == [{"untrained", "seconds"}, {"untrained", "bm25", "seconds"}]
    assert "skipping the BM25 baseline" in caplog.text
