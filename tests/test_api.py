"""The Python API as its users write it: nothing but what `realm_jax` lists as public."""

import json
import subprocess
import sys

import numpy as np
import pytest
from tiny_run import PEOPLE, question, tiny_config, write_lines

import realm_jax

QUESTION = question(3)["question"]


@pytest.fixture(scope="module")
def model(trained_run):
    return realm_jax.Model(trained_run.workdir)


def test_importing_the_package_loads_neither_jax_nor_the_api():
    code = "import sys, realm_jax; print(*sorted({'jax', 'flax', 'realm_jax.api'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_what_is_listed_as_public_is_there_and_nothing_else_is_found():
    assert {name for name in realm_jax.__all__ if getattr(realm_jax, name) is not None} == {*dir(realm_jax)}
    with pytest.raises(AttributeError, match="has no attribute 'models_'"):
        realm_jax.models_  # noqa: B018


def test_texts_are_prepared_trained_on_and_asked_about(tmp_path):
    passages = [
        {"id": f"p{n}", "title": name, "text": f"{name} was born in {1800 + n}."} for n, name in enumerate(PEOPLE)
    ]
    asked = [question(n, gold_passage_id=f"p{n}", split=split) for n in range(8) for split in ("train", "dev")]
    files = write_lines(tmp_path / "p.jsonl", passages), write_lines(tmp_path / "q.jsonl", asked)
    realm_jax.prepare(files[0], tmp_path / "data", questions=[files[1]], vocabulary_size=300, workers=1)
    config = tiny_config(tmp_path / "data")
    config.ict.batch_size = config.qa.batch_size = 8
    seen: list[realm_jax.Progress] = []
    results = realm_jax.train_model(config, tmp_path / "run", callback=seen.append)
    assert [(one.task, one.step) for one in seen if one.kind == "metrics"][-1] == ("qa", 2)
    assert any("recall@5" in one.values for one in seen if one.kind == "evaluations")
    assert 0 <= results["exact_match"]["retrieval"] <= 1
    model = realm_jax.Model(tmp_path / "run", task="qa", config={"answering.read": 2})
    assert repr(model).endswith("task qa at step 2, 16 passages)")
    assert len(model.ask(QUESTION)["candidates"]) == 2


@pytest.mark.slow
def test_a_callback_can_end_a_training_which_then_goes_on(people, tmp_path):
    config = tiny_config(people)
    config.tasks, config.ict.batch_size, config.ict.steps, config.checkpoint.every, config.log.every = "ict", 8, 4, 1, 1

    def stop(progress: realm_jax.Progress) -> None:
        steps.append(progress.step)
        if progress.kind == "metrics" and progress.step == 2:
            raise RuntimeError("enough")

    steps: list[int] = []
    with pytest.raises(RuntimeError, match="enough"):
        realm_jax.train_model(config, tmp_path / "run", callback=stop)
    realm_jax.train_model(config, tmp_path / "run", callback=lambda progress: steps.append(progress.step))
    assert steps[-1] == 4 and steps.count(1) < steps.count(4)


def test_an_answer_is_that_of_the_command(trained_run, model, capsys):
    from realm_jax.cli.main import main

    assert main(["ask", f"--workdir={trained_run.workdir}", "--json", QUESTION]) == 0
    assert model.ask(QUESTION) == json.loads(capsys.readouterr().out)


def test_many_questions_are_answered_as_one_by_one(model):
    asked = [question(n)["question"] for n in range(5)]
    together = model.ask(asked, top=1, batch_size=4)
    assert [one["question"] for one in together] == asked
    for found, alone in zip(together, map(model.ask, asked), strict=True):
        assert found["answer"] == alone["answer"] and len(found["candidates"]) == 1
        assert found["probability"] == pytest.approx(alone["probability"], rel=1e-5)
    assert model.ask([]) == []


def test_a_search_finds_what_the_inner_products_of_vectors_say(model):
    store = model.run.sources.passages
    rows = range(len(store))
    documents = model.encode([store.text(row) for row in rows], "document", titles=[store.title(row) for row in rows])
    np.testing.assert_allclose(documents, np.asarray(model.trained.index.vectors)[: len(store)], atol=1e-5)
    queries = model.encode([QUESTION, "who?", "and where?"], batch_size=2)
    assert queries.shape == (3, model.vector_size) and queries.dtype == documents.dtype == np.float32
    scores = documents @ queries[0]
    found = model.search(QUESTION, top=3)
    assert [one["score"] for one in found["candidates"]] == pytest.approx(sorted(scores, reverse=True)[:3], abs=1e-4)
    best = int(scores.argmax())
    assert found["candidates"][0]["id"] == store.document_id(best)
    assert found["candidates"][0]["text"] == store.text(best)
    assert model.encode([]).shape == model.encode([], "document").shape == (0, model.vector_size)


def test_an_explanation_adds_up(model):
    seen = model.inspect(QUESTION, answer="1803")
    assert sum(one["prior"] for one in seen["passages"]) == pytest.approx(1, abs=1e-5)
    assert seen["probability"] == pytest.approx(sum(one["prior"] * one["likelihood"] for one in seen["passages"]))
    blank = model.inspect("Ada Almgren was born in [1800].")
    assert blank["answer"] == "1800" and blank["passages"] and blank["task"] == "qa"
    named = realm_jax.Model(model.workdir, task="ict").inspect("Ada Almgren was born in [1800].")
    assert named["task"] == "ict" and named["probability"] != blank["probability"]


def test_a_run_is_measured_on_a_split_and_on_records(model):
    on_split = model.evaluate(bm25=False)
    records = [question(n, gold_passage_id=f"p{n}") for n in range(8)]
    assert model.evaluate(records, bm25=False) == on_split
    assert on_split["questions"] == 8 and 0 <= on_split["measures"]["recall@5"]["value"] <= 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model: model.ask(""), "the question is empty"),
        (lambda model: model.ask([QUESTION, "who " * 40]), "tokens, but this run reads at most 14"),
        (lambda model: model.ask("\udcff"), "not valid UTF-8"),
        (lambda model: model.encode(QUESTION), "takes a list"),
        (lambda model: model.encode(["\udcff"]), "texts: number 0 is not valid UTF-8"),
        (lambda model: model.encode([QUESTION], "passage"), "choose 'query' or 'document'"),
        (lambda model: model.encode([QUESTION], titles=["a"]), "apply only to kind='document'"),
        (lambda model: model.encode([QUESTION], "document", titles=[]), "1 texts have 0 titles"),
        (lambda model: model.inspect("___ and ___"), "2 blanks"),
        (lambda model: model.inspect("a [b]", answer="c"), "applies to questions only"),
        (lambda model: model.ask(None), "questions: takes a list of texts"),
        (lambda model: model.ask([None]), "questions: number 0 is a NoneType; give a text"),
        (lambda model: model.ask("a" * 20_001), "20,001 characters"),
        (lambda model: model.ask(QUESTION, top=-1), "top=-1: give a whole number from 1"),
        (lambda model: model.search(QUESTION, top=1.5), "top=1.5: give a whole number from 1"),
        (lambda model: model.encode([QUESTION], batch_size=0), "batch_size=0"),
        (lambda model: model.encode(["a", "b"], "document", titles="xy"), "titles: takes a list"),
        (lambda model: model.inspect(None), "text: number 0 is a NoneType; give a text"),
        (lambda model: model.inspect(QUESTION, answer="\ud800"), "answer: number 0 is not valid UTF-8"),
        (lambda model: model.inspect("a ___", pieces=0), "pieces=0"),
        (lambda model: model.evaluate(["who?"]), "question 0: is no record"),
        (lambda model: realm_jax.prepare("a", "b", questions="train=q.json"), "questions: takes a list of files"),
        (lambda model: model.evaluate([]), "give at least one"),
        (lambda model: model.evaluate(5), "a file or a list of records, not 5"),
        (lambda model: model.evaluate([{"question": "who?"}]), "question 0: the question has no answers"),
        (lambda model: model.evaluate("test"), "no such questions"),
        (lambda model: realm_jax.Model(model.workdir, search="words"), "choose among vectors, bm25, hybrid"),
        (lambda model: realm_jax.Model(model.workdir, rerank="token"), "choose among tokens, cross-encoder, none"),
        (lambda model: realm_jax.Model(model.workdir, rerank="cross-encoder"), "no cross-encoder was trained"),
        (lambda model: realm_jax.Model(model.workdir, task="realm"), "has no such task"),
        (lambda model: realm_jax.Model(model.workdir, config={"model.width": 8}), "fixed by the run"),
        (lambda model: realm_jax.Model(model.workdir, config={"answering.reed": 8}), "no such key"),
        (lambda model: realm_jax.Model(model.workdir, config="quickstart"), "takes the keys to change as a dict"),
        (lambda model: realm_jax.Model(model.workdir / "nothing"), "no run there"),
        (lambda model: realm_jax.Model("gs://bucket/run"), "workdir=gs://bucket/run: a model is opened from a folder"),
        (lambda model: realm_jax.prepare("a", "b", vocabulary=3), "no option vocabulary"),
        (lambda model: realm_jax.load_config("quickstrat"), "there is no config 'quickstrat'"),
        (lambda model: realm_jax.load_config("quickstart", {"realm.steps": "many"}), "value of type int"),
    ],
)
def test_what_the_caller_can_correct_is_one_line(model, call, said):
    with pytest.raises(realm_jax.UserError, match="^[^\n]*$") as fault:
        call(model)
    assert said in str(fault.value)


def test_a_config_has_the_changes_with_their_types():
    config = realm_jax.load_config("quickstart", {"realm.steps": 7, "qa.learning_rate": 1e-3})
    assert config.realm.steps == 7 and config.qa.learning_rate == 1e-3
