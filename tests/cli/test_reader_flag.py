"""`--reader`: a model with a question-answering head reads the passages of a run in place of its own reader."""

import json
import shutil

import pytest
from question_readers import save_question_reader
from tiny_run import go_back_to, question, with_config, write_lines

import realm_jax
from realm_jax.cli import main as cli
from realm_jax.config import with_values
from realm_jax.data.questions import Question
from realm_jax.errors import UserError
from realm_jax.eval import prediction
from realm_jax.eval.prediction_files import settings_file
from realm_jax.serving.service import Service
from realm_jax.train.trained_run import open_reader

QUESTION = question(3)["question"]
pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> str:
    return str(save_question_reader(tmp_path_factory.mktemp("reader") / "model", positions=128))


@pytest.fixture(scope="module")
def untrained(trained_run, tmp_path_factory):
    """The run before fine-tuning: its reader has learned nothing."""
    workdir = tmp_path_factory.mktemp("untrained") / "run"
    shutil.copytree(trained_run.workdir, workdir)
    shutil.rmtree(workdir / "qa")
    go_back_to(workdir, "ict")
    return workdir


@pytest.fixture(scope="module")
def model(untrained, reader):
    return realm_jax.Model(untrained, reader=reader)


def run(*arguments: object) -> int:
    return cli.main([*map(str, arguments)])


def last_line(capsys) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_a_run_without_a_trained_reader_answers_with_another(untrained, reader, model, capsys):
    assert run("ask", f"--workdir={untrained}", f"--reader={reader}", "--json", QUESTION) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer == model.ask(QUESTION) and "no reader was trained" not in err
    passage = answer["passage"]
    assert passage["text"][slice(*passage["span"])] == answer["answer"] != ""
    assert len(answer["candidates"]) == 3 and all(
        one["text"][slice(*one["span"])] == one["answer"] for one in answer["candidates"]
    )
    assert answer["measured"] is None or answer["measured"]["exact_match"] is None  # not of this reader
    assert 0 < answer["no_answer"] < 1 and answer["probability"] + answer["no_answer"] <= 1
    assert run("ask", f"--workdir={untrained}", f"--config.answering.reader={reader}", QUESTION) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{answer['answer']}  (probability {answer['probability']:.3g}, of no answer ")


def test_probabilities_of_all_spans_and_of_no_answer_sum_to_one(model, monkeypatch):
    monkeypatch.setattr(prediction, "SPANS", 100_000)
    trained = model.trained
    for asked in (QUESTION, "house"):
        (found,) = trained.evaluator([Question(asked, [])], 1).predict(trained.params, trained.index)
        assert sum(answer.probability for answer in found.nbest) + found.no_answer == pytest.approx(1)
        assert sum(passage.probability for passage in found.candidates) == pytest.approx(1)


def test_passages_are_those_of_the_run_and_answers_those_of_any_batch(model, untrained):
    own, asked = realm_jax.Model(untrained), [question(n)["question"] for n in range(5)]
    batch = model.ask(asked, batch_size=2)
    for text, answer in zip(asked, batch, strict=True):
        alone = model.ask(text)
        assert answer["answer"] == alone["answer"]
        assert answer["probability"] == pytest.approx(alone["probability"], rel=1e-3)
        found = {one["id"]: one["probability"] for one in answer["candidates"]}
        assert found == pytest.approx({one["id"]: one["probability"] for one in own.ask(text)["candidates"]}, rel=1e-4)
    probabilities = [one["probability"] for one in batch[0]["candidates"]]
    assert probabilities == sorted(probabilities, reverse=True)


def test_predictions_name_their_reader_and_are_measured(untrained, reader, tmp_path, capsys):
    asked = write_lines(tmp_path / "asked.jsonl", [question(n) for n in range(4)])
    output = tmp_path / "predictions.jsonl"
    command = ["predict", f"--workdir={untrained}", f"--questions={asked}", f"--output={output}"]
    assert run(*command, f"--reader={reader}") == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert all(line["probability"] + line["no_answer"] <= 1 for line in lines)
    for line in lines:  # every answer is short enough for the reader
        assert line["reader_oracle"] == any(one["has_answer"] for one in line["retrieved"][:3])
    before = output.read_bytes()
    other = save_question_reader(tmp_path / "other", positions=128, seed=2)
    assert run(*command, f"--reader={other}") == 2 and "was made with other reader" in last_line(capsys)
    assert run(*command) == 2 and "was made with other parameters" in last_line(capsys)
    assert output.read_bytes() == before
    evaluating = ["evaluate", f"--workdir={untrained}", f"--questions={asked}", "--json", "--no-bm25"]
    assert run(*evaluating, f"--reader={reader}") == 0
    measured = json.loads(capsys.readouterr().out)
    assert run("evaluate", output, "--json") == 0
    assert json.loads(capsys.readouterr().out)["measures"] == measured["measures"]
    assert measured["parameters"] == json.loads(settings_file(output).read_text())["parameters"]


def test_the_service_answers_with_the_reader(untrained, reader, model):
    service = Service(untrained, {"reader": reader}, most=1)
    assert service.facts()["reader"] == "questions"
    assert service.work("ask", [QUESTION]) == [model.ask(QUESTION)]
    assert service.work("inspect", [{"text": QUESTION}]) == [model.inspect(QUESTION)]


def test_what_explains_an_answer_adds_up_to_its_probability(model, monkeypatch):
    monkeypatch.setattr(prediction, "SPANS", 100_000)  # all, as what explains an answer adds up
    answer, seen = model.ask(QUESTION), model.inspect(QUESTION)
    assert seen["answer"] == answer["answer"] and seen["alone"] is None
    assert seen["probability"] == pytest.approx(answer["probability"], rel=1e-4)
    assert sum(passage["posterior"] for passage in seen["passages"]) == pytest.approx(1)
    assert 0 < seen["held"] <= 1
    assert model.inspect(QUESTION, answer="nowhere at all")["probability"] == 0


def test_a_reader_that_cannot_be_opened_is_named_before_anything_is_computed(untrained, tmp_path, capsys):
    nowhere = f"--reader={tmp_path}/nowhere"
    output = tmp_path / "predictions.jsonl"
    for command in (["ask", QUESTION], ["evaluate"], ["predict", f"--output={output}"]):
        assert run(*command, f"--workdir={untrained}", nowhere) == 2
        assert f"{nowhere}: there is no such folder" in last_line(capsys)
    assert not settings_file(output).exists()
    with pytest.raises(UserError, match="there is no such folder"):
        realm_jax.Model(untrained, reader=tmp_path / "nowhere")


def test_a_run_that_reads_no_passages_takes_no_reader(trained_run):
    run = with_config(trained_run, with_values(trained_run.config, {"answering.reader": "model"}))
    with pytest.raises(UserError, match=r"--reader=model: .* answers without passages \(closed_book\); leave it out"):
        open_reader(run, "closed_book")


def test_a_reader_does_not_go_with_a_generation_or_a_file(untrained, reader, tmp_path, capsys):
    assert run("ask", f"--workdir={untrained}", f"--reader={reader}", "--generation=newest", QUESTION) == 2
    assert "shows passages without an answer; leave one of them out" in last_line(capsys)
    with pytest.raises(UserError, match="cannot be combined with task, search, rerank or reader"):
        realm_jax.Model(untrained, reader=reader, generation="newest")
    assert run("evaluate", tmp_path / "predictions.jsonl", f"--reader={reader}") == 2
    assert "--reader: applies only to --workdir" in last_line(capsys)
