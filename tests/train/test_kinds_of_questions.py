"""Runs over questions of every kind: with answers, with a gold passage alone, or without any; asked from anywhere."""

import json

import pytest
from ml_collections import ConfigDict
from tiny_run import PEOPLE, prepare_people, question, tiny_config, write_lines

from realm_jax.cli import main as cli
from realm_jax.cli.prepare import prepare
from realm_jax.errors import UserError
from realm_jax.storage import read_json
from realm_jax.train import measure
from realm_jax.train.recipe import open_run, run_recipe
from realm_jax.train.records import read_lines
from realm_jax.train.results import POSITIVE_QUESTIONS, STAGES, majority_exact_match
from realm_jax.train.trained_run import RecordedMetrics

pytestmark = pytest.mark.usefixtures("one_device")


def gold_only(number: int, split: str) -> dict:
    """A question about a person that is measured by the passage alone."""
    return {"question": question(number)["question"], "gold_passage_id": f"p{number}", "split": split}


def small(data, **changes) -> ConfigDict:
    config = tiny_config(data)
    config.update(changes)
    config.closed_book.update(batch_size=4, steps=2)
    return config


def trained(config: ConfigDict, workdir) -> dict:
    """Train the whole recipe; its results, empty where nothing could be measured."""
    assert run_recipe(open_run(config, workdir), "realm train") == 0
    return read_json(workdir / "results.json") if (workdir / "results.json").is_file() else {}


@pytest.fixture(scope="module")
def mixed(one_device, tmp_path_factory):
    """A run whose questions have answers, or a gold passage, or both; trained with paths that are relative."""
    folder = tmp_path_factory.mktemp("mixed")
    with_answers = [question(n, gold_passage_id=f"p{n}", split=split) for n in range(4) for split in ("train", "dev")]
    prepare_people(
        folder, asked=with_answers + [gold_only(n, split) for n in range(4, 8) for split in ("train", "dev")]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        results = trained(small("data"), folder / "run")
    return folder, results


def test_questions_without_answers_are_measured_by_retrieval_alone(mixed, tmp_path, capsys):
    folder, results = mixed
    right = results["exact_match"]
    assert {"retrieval", "chance"} <= {*right} and right["chance"] in (0, 0.25)
    assert "bm25" in results["recall@5"] and "bm25" in results["answer_recall@5"]
    assert "no answer" not in (folder / "run" / "report.html").read_text()
    predictions = tmp_path / "p.jsonl"
    assert cli.main(["predict", f"--workdir={folder}/run", f"--output={predictions}"]) == 0
    lines = [json.loads(line) for line in predictions.read_text().splitlines()]
    assert [len(line.get("answers", [])) for line in lines] == [1] * 4 + [0] * 4
    capsys.readouterr()
    assert cli.main(["evaluate", str(predictions), "--json"]) == 0
    measures = json.loads(capsys.readouterr().out)["measures"]
    assert measures["exact_match"]["questions"] == measures["answer_recall@5"]["questions"] == 4
    assert measures["recall@5"]["questions"] == 8
    for name in ("recall@5", "mrr@10", "ndcg@10"):
        assert measures[name]["value"] == pytest.approx(results[name]["qa"])
    assert measures["exact_match"]["value"] == pytest.approx(right["retrieval"])
    assert cli.main(["evaluate", str(predictions), str(predictions), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measures"]["recall@5"]["questions"] == 8


def test_for_questions_without_answers_next_to_nothing_is_read(mixed, tmp_path, capsys):
    folder, _ = mixed
    asked = write_lines(tmp_path / "asked.jsonl", [gold_only(n, "dev") for n in range(8)])
    capsys.readouterr()
    assert cli.main(["evaluate", f"--workdir={folder}/run", f"--questions={asked}", "--json", "--no-bm25"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passages_read"] == 1 and found["measures"]["recall@5"]["questions"] == 8


def test_a_run_is_asked_from_any_folder_and_says_how_far_to_trust_it(mixed, tmp_path, monkeypatch, capsys):
    folder, results = mixed
    recorded = read_json(folder / "run" / "config.json")
    assert recorded["data"]["path"] == str(folder / "data") and recorded["init_from"] == ""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["ask", f"--workdir={folder}/run", "--json", question(3)["question"]]) == 0
    out, err = capsys.readouterr()
    exact, found = results["exact_match"]["retrieval"], results["recall@5"]["qa"]
    assert json.loads(out)["measured"] == {"exact_match": exact, "recall@5": found, "on": "development questions"}
    low = exact < 0.2 or found < 0.5
    assert (f"answers {exact:.0%} of its development questions right" in err) == low


def test_a_run_goes_on_when_its_data_are_named_by_another_path(mixed, monkeypatch):
    folder, _ = mixed
    monkeypatch.chdir(folder.parent)
    open_run(small(f"{folder.name}/data"), folder / "run")
    assert read_json(folder / "run" / "config.json")["data"]["path"] == str(folder / "data")


@pytest.mark.slow
def test_without_answers_fine_tuning_is_left_out_and_retrieval_is_measured(tmp_path, caplog, capsys):
    caplog.set_level("INFO")
    data = prepare_people(tmp_path, asked=[gold_only(n, split) for n in range(8) for split in ("train", "dev")])
    results = trained(small(data, qa={"search": "hybrid"}), tmp_path / "run")
    assert f"skipping task qa of the recipe: {data} has no training questions with answers" in caplog.text
    assert results["exact_match"] == {} and {*results["recall@5"]} == {"bm25", "untrained", "ict", "hybrid"}
    assert "answer_recall@5" not in results and not (tmp_path / "run" / "qa").exists()
    assert "✗" not in (tmp_path / "run" / "report.html").read_text()
    open_run(small(data, qa={"search": "hybrid"}), tmp_path / "run")  # goes on, with the same left out
    assert open_run(small(data, evaluation={"every": 1}), tmp_path / "other-run").config.tasks == "ict"
    capsys.readouterr()
    assert cli.main(["evaluate", f"--workdir={tmp_path}/run", "--json"]) == 0
    measures = json.loads(capsys.readouterr().out)["measures"]
    assert {*measures} == {"recall@1", "recall@5", "mrr@10", "ndcg@10"}
    assert measures["recall@5"]["value"] == pytest.approx(results["recall@5"]["hybrid"])


def test_without_any_questions_the_recipe_is_what_needs_none(tmp_path, caplog, capsys):
    caplog.set_level("INFO")
    data = prepare_people(tmp_path, asked=[])
    assert trained(small(data, qa={"search": "hybrid"}), tmp_path / "run") == {}
    assert "skipping task qa of the recipe" in caplog.text
    assert (
        f"{data} has no development questions, and evaluation.held_out=0.0 leaves no sentence to evaluate on"
        in caplog.text
    )
    capsys.readouterr()
    assert cli.main(["ask", f"--workdir={tmp_path}/run", "--json", question(3)["question"]]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["measured"] is None and answer["answer"] is None and answer["candidates"]
    assert {search for passage in answer["candidates"] for search in passage["ranks"]} == {"vectors", "bm25"}


def test_a_reader_that_nothing_measures_is_handed_on_as_it_was_trained(tmp_path):
    """Recall says nothing of a reader: of equal recall the fresh one that fine-tuning began with would stay."""
    asked = [question(n, gold_passage_id=f"p{n}", split="train") for n in range(8)]
    data = prepare_people(tmp_path, asked=asked + [gold_only(n, "dev") for n in range(8)])
    trained(small(data, tasks="qa", evaluation={"keep_best": True}), tmp_path / "run")
    assert not (tmp_path / "run" / "qa" / "best").exists()
    assert "best_step" not in read_lines(tmp_path / "run" / "qa" / "evaluations.jsonl")[-1]
    unmeasured = prepare_people(tmp_path / "other", asked=asked)
    with pytest.raises(UserError, match=r"^config\.evaluation\.every: measures exact match, but no measured dev"):
        open_run(small(unmeasured, evaluation={"every": 1}), tmp_path / "other-run")


def test_exact_match_is_asked_for_of_the_questions_that_are_measured(tmp_path, monkeypatch):
    """Answers beyond the first `MAX_QUESTIONS` questions are never looked at."""
    asked = [question(n, split="train") for n in range(4)]
    data = prepare_people(tmp_path, asked=[*asked, gold_only(0, "dev"), question(1, split="dev")])
    config = small(data, evaluation={"every": 1})
    monkeypatch.setattr(measure, "MAX_QUESTIONS", 2)
    assert open_run(config, tmp_path / "both").config.evaluation
    monkeypatch.setattr(measure, "MAX_QUESTIONS", 1)
    with pytest.raises(UserError, match="no measured development question in .* has answers"):
        open_run(config, tmp_path / "first")


def test_a_corpus_of_single_sentences_leaves_the_inverse_cloze_task_out(tmp_path, caplog):
    caplog.set_level("INFO")
    passages = [{"id": f"p{n}", "text": f"{name} was born in {1800 + n}."} for n, name in enumerate(PEOPLE)]
    asked = [question(n, split="train") for n in range(4)]
    files = write_lines(tmp_path / "passages.jsonl", passages), write_lines(tmp_path / "questions.jsonl", asked)
    prepare(files[0], tmp_path / "short", questions=[files[1]], vocabulary_size=300, workers=1)
    run = open_run(small(tmp_path / "short"), tmp_path / "run")
    assert run.config.tasks == "qa"
    assert "has no passage of two or more sentences" in caplog.text
    with pytest.raises(UserError, match="no passage of two or more sentences, and config.tasks has nothing but ict"):
        open_run(small(tmp_path / "short", tasks="ict"), tmp_path / "other")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("qa", "no training questions with answers, and config.tasks has nothing but qa"),
        ("closed_book", "no training questions with answers, and config.tasks has nothing but closed_book"),
        ("ict", r"that config\.evaluation\.held_out=1\.0 leaves to learn from, and config"),
    ],
)
def test_a_recipe_of_which_nothing_is_left_is_refused(tmp_path, tasks, message):
    data = prepare_people(tmp_path, asked=[])
    with pytest.raises(UserError, match=message):
        open_run(small(data, tasks=tasks, evaluation={"held_out": 1.0}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_report_says_where_a_passage_with_the_answer_was_named():
    assert "without a label for the right passage" in STAGES["qa"][1]
    assert "gold document" in POSITIVE_QUESTIONS and "Nobody" not in POSITIVE_QUESTIONS


def test_chance_is_over_questions_that_have_answers():
    from realm_jax.data.questions import Question

    some, none = Question("a", ["x"]), Question("b", [], {"p": 1})
    assert majority_exact_match([none, some], [some, none]) == 1 and majority_exact_match([none], [none]) == 0


FOUND = "finds the right passage for 30%"


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ((0.04, 0.3), f"answers 4% of its development questions right and {FOUND}"),
        ((0.04, None), "answers 4% of its development questions right: check the passages below"),
        ((None, 0.3), f"{FOUND} of its development questions: check"),
        ((None, 0.3, "headlines"), f"{FOUND} of its headlines: check"),
        ((None, 0.3, None), f"{FOUND} of the questions that it was measured on: check"),
    ],
)
def test_a_low_measure_of_a_run_is_reported_in_one_line(measured, words):
    metrics = RecordedMetrics(*measured)
    assert metrics.is_low and metrics.advice().startswith(f"this run {words}")
    assert not RecordedMetrics(0.2, 0.5).is_low and not RecordedMetrics(None, 0.9).is_low
