"""`realm predict`: what a line says, and that a file that was cut off ends like one that was not; `realm compare`."""

import io
import json
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import question, write_lines

from realm_jax import cli
from realm_jax.evaluation.answers import exact_match
from realm_jax.jobs import compare, predict
from realm_jax.jobs.answering import open_run_to_ask, restore

UNANSWERED = {"question": "Who built it?", "id": "extra"}


def run(*arguments: str) -> int:
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


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def copied(predicted: Path, folder: Path, content: bytes) -> Path:
    """A file of other content with the settings of `predicted`."""
    file = folder / "predictions.jsonl"
    file.write_bytes(content)
    predict.settings_file(file).write_bytes(predict.settings_file(predicted).read_bytes())
    return file


@pytest.fixture(scope="module")
def trained(trained_run):
    return restore(open_run_to_ask(trained_run.workdir, overrides={"evaluation.passages": 20}))


@pytest.fixture
def quick(trained, monkeypatch) -> list[str | None]:
    """The command without opening and restoring the run again; the tasks that it would have restored."""
    restored: list[str | None] = []

    def opened(_workdir, _data, overrides):
        config = type(trained.run.config)(trained.run.config.to_dict())
        config.update_from_flattened_dict(overrides)
        return trained.run.with_config(config)

    monkeypatch.setattr(predict, "open_run_to_ask", opened)
    monkeypatch.setattr(predict, "restore", lambda _, task, **options: restored.append(task) or trained)
    return restored


def test_a_line_says_what_was_asked_what_was_answered_and_where_it_stands(trained_run, predicted):
    store, lines = trained_run.sources.passages, records(predicted)
    assert [line["id"] for line in lines] == [*(f"q{n}" for n in range(19)), "extra"]
    for number, line in enumerate(lines[:19]):
        known = question(number % 16, gold_passage_id=f"p{number % 16}")
        assert {key: line[key] for key in known} == known
        assert {**line["nbest"][0], "answer": line["prediction"]} == line["nbest"][0]
        assert (line["probability"], line["passage"]) == (line["nbest"][0]["probability"], line["nbest"][0]["passage"])
        assert 1 <= len(line["nbest"]) <= predict.NBEST and line["probability"] <= 1
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


def test_the_file_is_measured_like_the_run(trained_run, asked, predicted, tmp_path, capsys):
    """Without the question that has no answers, which a run is not measured on."""
    answered = write_lines(
        tmp_path / "answered.jsonl", [json.loads(line) for line in asked.read_text().splitlines()[:19]]
    )
    capsys.readouterr()
    assert run("evaluate", f"--predictions={predicted}", "--json", f"--trec={tmp_path}/one.txt") == 0
    file = json.loads(capsys.readouterr().out)
    whole = f"--workdir={trained_run.workdir}", f"--questions={answered}", "--no-bm25", f"--trec={tmp_path}/two.txt"
    assert run("evaluate", *whole, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (file.pop("questions"), found.pop("questions")) == (20, 19) and file == found
    right = [exact_match(line["prediction"], line["answers"]) for line in records(predicted)[:19]]
    assert found["measures"]["exact_match"]["value"] == pytest.approx(sum(right) / 19)
    first, second = ((tmp_path / name).read_text() for name in ("one.txt", "two.txt"))
    assert first.startswith(second) and len(first.splitlines()) == 20 * 16


@pytest.mark.parametrize("cut", [0, 10, -1, 9_000])
def test_a_file_that_was_cut_off_ends_with_the_same_bytes(trained_run, asked, predicted, quick, tmp_path, cut):
    output = copied(predicted, tmp_path, predicted.read_bytes()[:cut])
    assert run("predict", f"--workdir={trained_run.workdir}", f"--questions={asked}", f"--output={output}") == 0
    assert output.read_bytes() == predicted.read_bytes() and quick == [None]


def test_lines_that_were_added_are_refused(trained_run, asked, predicted, quick, tmp_path, capsys):
    file = copied(predicted, tmp_path, predicted.read_bytes() * 2)
    before = file.read_bytes()
    for command in (
        ["evaluate", f"--predictions={file}"],
        ["predict", f"--workdir={trained_run.workdir}", f"--questions={asked}", f"--output={file}"],
    ):
        assert run(*command) == 2
        assert f"{file}: holds 40 lines for 20 questions" in capsys.readouterr().err
    assert file.read_bytes() == before and not quick


def test_a_file_that_is_done_needs_no_model(trained_run, asked, predicted, quick, capsys):
    before = predicted.read_bytes()
    assert run("predict", f"--workdir={trained_run.workdir}", f"--questions={asked}", f"--output={predicted}") == 0
    assert predicted.read_bytes() == before and not quick and "20 predictions" in capsys.readouterr().err


def test_sigterm_ends_after_a_batch_and_the_command_goes_on(
    trained_run, asked, predicted, quick, tmp_path, monkeypatch
):
    output = tmp_path / "predictions.jsonl"
    command = "predict", f"--workdir={trained_run.workdir}", f"--questions={asked}", f"--output={output}"
    with monkeypatch.context() as patch:
        write = predict.write_record
        patch.setattr(predict, "write_record", lambda record: (os.kill(os.getpid(), signal.SIGTERM), write(record))[1])
        assert (
            run(
                *command,
            )
            == 75
        )
    size = json.loads(predict.settings_file(output).read_text())["batch_size"]
    assert len(records(output)) == min(size, 20)
    assert run(*command) == 0 and output.read_bytes() == predicted.read_bytes()


def test_another_run_question_or_setting_is_refused(trained_run, asked, predicted, quick, tmp_path, capsys):
    before = predicted.read_bytes()
    other = write_lines(tmp_path / "other.jsonl", [question(1)])
    for arguments, reason in (
        ([f"--questions={other}"], "was made with other questions"),
        ([f"--questions={asked}", "--nbest=2"], "was made with other nbest"),
        ([f"--questions={asked}", "--task=ict"], "was made with other task and checkpoint"),
        ([f"--questions={asked}", "--aggregate=max"], "was made with other aggregate"),
    ):
        assert run("predict", f"--workdir={trained_run.workdir}", *arguments, f"--output={predicted}") == 2
        assert reason in capsys.readouterr().err.splitlines()[-1]
    theirs = write_lines(tmp_path / "theirs.jsonl", [UNANSWERED])
    assert run("predict", f"--workdir={trained_run.workdir}", f"--questions={asked}", f"--output={theirs}") == 2
    assert "theirs.jsonl: is no file of `realm predict`" in capsys.readouterr().err
    assert predicted.read_bytes() == before and not quick


def test_a_pipe_gets_all_of_them(trained_run, asked, predicted, quick, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    few = write_lines(tmp_path / "few.jsonl", [UNANSWERED])
    assert run("predict", f"--workdir={trained_run.workdir}", f"--questions={few}", f"--output={tmp_path}/pipe") == 0
    assert json.loads(os.read(reader, 100_000))["id"] == "extra"
    os.close(reader)


def test_a_file_needs_nothing_of_a_run(predicted, capsys):
    assert run("evaluate", f"--predictions={predicted}", "--task=qa") == 2
    assert "--task: goes with --workdir" in capsys.readouterr().err


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
    assert run("compare", predicted, better, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    exact = found["measures"]["exact_match"]
    assert exact["difference"] == pytest.approx(6 / 19) and (exact["only_a"], exact["only_b"]) == (0, 6)
    assert exact["p"] == exact["mcnemar"] == pytest.approx(2 / 2**6) and exact["low"] > 0
    assert found["measures"]["recall@1"]["p"] == 1 and found["a"]["passages_read"] == 3 and "task" not in found["b"]
    assert run("compare", predicted, better) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("exact_match "))
    assert line.split(" ")[3::3] == ["0.3158", "0.03125"] and line.endswith(" 19")


def test_a_terminal_says_what_the_tests_are(predicted, better):
    found = {name: {"file": f"{name}.jsonl", "parameters": 23278} for name in "ab"}
    found |= compare.compare(records(predicted), records(better), "b.jsonl")
    to = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=120, highlight=False)
    compare.show(found, to)
    text = to.file.getvalue()
    assert "parameters 23,278" in text and "+31.6%" in text and "McNemar: exact" in text


def test_other_questions_are_not_compared(predicted, tmp_path, capsys):
    lines = records(predicted)
    lines[3]["answers"] = ["1999"]
    other, short = write_lines(tmp_path / "o.jsonl", lines), write_lines(tmp_path / "s.jsonl", lines[:2])
    assert run("compare", predicted, other) == 2
    assert "o.jsonl: question 4 is" in capsys.readouterr().err
    assert run("compare", predicted, short) == 2
    assert "s.jsonl: has 2 predictions, the other file 20" in capsys.readouterr().err


def test_a_device_gets_all_predictions(trained_run, asked):
    assert run("predict", f"--workdir={trained_run.workdir}", f"--questions={asked}", "--output=/dev/null") == 0


@pytest.mark.parametrize(
    ("fields", "told"),
    [({"reader_oracle": None}, '"reader_oracle" must be'), ({"retrieved": [{"id": "a", "score": None}]}, '"score"')],
)
def test_predictions_of_others_are_looked_at_before_they_are_measured(tmp_path, capsys, fields, told):
    line = {"question": "Who?", "prediction": "she", "answers": ["she"]} | fields
    assert run("evaluate", f"--predictions={write_lines(tmp_path / 'file.jsonl', [line])}") == 2
    err = capsys.readouterr().err
    assert "file.jsonl:1: " in err and told in err


def test_a_file_s_measures_cannot_be_asked_for_otherwise(predicted, capsys):
    for flag in ("--passages=5", "--no-bm25", "--task=qa"):
        assert run("evaluate", f"--predictions={predicted}", flag) == 2
        assert f"{flag.partition('=')[0]}: goes with --workdir" in capsys.readouterr().err


def test_questions_that_share_their_passage_with_training_can_be_left_out(trained_run, predicted, capsys):
    data = trained_run.config.data.path
    assert run("evaluate", f"--predictions={predicted}", f"--unseen={data}", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["questions"] == 9, "training asks about the first eight people; one question has no passage"
    assert found["measures"]["recall@1"]["questions"] == 8
    seen = write_lines(predicted.with_name("seen.jsonl"), records(predicted)[:8])
    assert run("evaluate", f"--predictions={seen}", f"--unseen={data}") == 2
    assert f"--unseen={data}: leaves no question" in capsys.readouterr().err
    assert run("evaluate", f"--predictions={seen}", f"--unseen={predicted.parent}") == 2
    assert f"--unseen={predicted.parent}: not a prepared folder" in capsys.readouterr().err
