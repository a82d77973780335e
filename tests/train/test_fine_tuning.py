"""Fine-tuning beyond the paper's: the best parameters on the way, and a document tower that is trained."""

import dataclasses

import jax
import numpy as np
import pytest
from runs import assert_same, cut_off, largest_change, open_inline
from tiny_run import PEOPLE, prepare_people, question, with_config

from realm_jax.config import with_values
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.eval.prediction import Evaluator
from realm_jax.forward import SearchPipeline
from realm_jax.retrieval.bm25 import Bm25
from realm_jax.storage import read_json, write_json_atomic
from realm_jax.tasks import make_task
from realm_jax.tasks.qa_examples import matching_strings, training_questions
from realm_jax.train.loop import train_task
from realm_jax.train.recipe import train as train_recipe
from realm_jax.train.records import read_lines
from realm_jax.train.restore import restore_params, start_vectors

pytestmark = pytest.mark.usefixtures("quick_steps")
STEPS = 6


def open_fine(people, workdir, **changes):
    """Six steps of fine-tuning, measured before the third and the fifth and at the end."""
    fixed = {"tasks": "qa", "qa__steps": STEPS, "qa__learning_rate": 1e-2, "evaluation__every": 2}
    return open_inline(people, workdir, **fixed | {"optimizer__warmup": 1} | changes)


def train(run, sign=-1.0):
    """Fine-tune, exact match said to fall (sign −1) or to rise the further parameters are from the first ones.

    Returns the last parameters on the host, and those that were measured together with the index.
    """
    first, seen = jax.tree.map(np.asarray, run.initial_params()), []

    def measure(params, index, final):
        params = jax.tree.map(np.asarray, params)
        seen.append((params, np.asarray(index.vectors)[: run.context.rows]))
        distances = jax.tree.map(lambda a, b: float(np.abs(a - b).sum()), params, first)
        return {"exact_match": sign * sum(jax.tree.leaves(distances))} if final else {}

    last = train_task(run, "qa", run.initial_params(), measure)
    return jax.tree.map(np.asarray, last), seen


def measurements(run):
    """Lines of the record that say how good parameters are, without times."""
    lines = [line for line in read_lines(run.workdir / "qa" / "evaluations.jsonl") if "exact_match" in line]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def fallen(people, tmp_path_factory):
    """A run whose first measurement was its best."""
    run = open_fine(people, tmp_path_factory.mktemp("fallen"))
    return run, *train(run)


def test_fine_tuning_ends_with_the_parameters_that_measured_best(fallen):
    """With the document tower as it was at the start."""
    run, last, seen = fallen
    found = measurements(run)
    assert [line["step"] for line in found] == [2, 4, STEPS] and found[0]["exact_match"] > found[1]["exact_match"]
    assert found[-1]["best_step"] == 2 and found[-1]["exact_match"] == found[0]["exact_match"]
    assert_same(last, seen[1][0])  # the first was measured with the first index, before any step
    assert_same(last, restore_params(run, "qa"))
    assert_same(last["document_embedder"], jax.tree.map(np.asarray, run.initial_params()["document_embedder"]))


@pytest.mark.slow
def test_the_last_parameters_stay_when_they_are_the_best(people, tmp_path):
    run = open_fine(people, tmp_path)
    last, seen = train(run, sign=1.0)
    assert "best_step" not in measurements(run)[-1]
    assert_same(last, seen[-1][0])


@pytest.mark.parametrize("before", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_a_run_that_is_cut_off_ends_with_the_same_best(people, tmp_path, monkeypatch, fallen, before):
    run, *_ = fallen
    cut_off(monkeypatch, lambda: train(open_fine(people, tmp_path)), before)
    again = open_fine(people, tmp_path)
    assert_same(train(again)[0], fallen[1])
    assert measurements(again) == measurements(run)


@pytest.mark.slow
def test_a_document_tower_that_is_trained_is_embedded_again(people, tmp_path):
    """Every two steps, and for what is measured."""
    run = open_fine(people, tmp_path, qa__refresh_every=2)
    last, seen = train(run, sign=1.0)
    assert largest_change(last["document_embedder"], run.initial_params()["document_embedder"]) > 1e-3
    for params, vectors in seen:
        np.testing.assert_allclose(vectors, run.embed(params), atol=1e-5)
    lines = read_lines(run.workdir / "qa" / "evaluations.jsonl")
    assert [line["index_step"] for line in lines if line.get("refresh")] == [0, 2, 4]


@pytest.mark.slow
def test_passages_are_read_with_their_titles(people, tmp_path):
    run = open_fine(people, tmp_path, qa__titles=True)
    assert run.model.bert.max_length == run.config.data.query_length + run.config.data.document_length - 1
    train(run)
    assert len(measurements(run)) == 3
    params, questions = run.initial_params(), run.sources.questions["dev"]
    index = run.index(run.embed(params))
    without = dataclasses.replace(run, config=with_values(run.config, {"qa.titles": False}))
    told, untold = (Evaluator(one, questions).predict(params, index) for one in (run, without))
    assert [one.probability for one in told] != pytest.approx([one.probability for one in untold], rel=1e-3)


# --- passages found by their words -----------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["marginal", pytest.param("orqa", marks=pytest.mark.slow)])
def test_a_reader_learns_from_what_bm25_finds(people, tmp_path, objective):
    """Nothing else learns; predictions read BM25's passages in its order, with its scores as p(z|x)."""
    changes = {"qa__search": "bm25", "qa__objective": objective, "qa__beam": 8, "evaluation__every": 0}
    run = open_fine(people, tmp_path, **changes)
    first, last = jax.tree.map(np.asarray, run.initial_params()), train_recipe(run)
    for name in run.model.embedder_names:
        assert_same(jax.tree.map(np.asarray, last[name]), first[name])
    assert largest_change(last["reader"], first["reader"]) > 1e-3
    questions, index = run.sources.questions["dev"], run.index_without_vectors
    evaluator = Evaluator(run, questions, SearchPipeline("bm25"))
    rows, scores = run.bm25().scored([question.question for question in questions], len(PEOPLE))
    np.testing.assert_array_equal(evaluator.retrieve(last, index), rows)
    for found, wanted, score in zip(evaluator.predict(last, index), rows, scores, strict=True):
        assert [one.row for one in found.candidates] == wanted[:3].tolist()
        np.testing.assert_allclose(found.scores, score, rtol=1e-6)
        if objective == "marginal":
            prior = np.exp(score[:3] - np.logaddexp.reduce(score[:3]))
            np.testing.assert_allclose([one.probability for one in found.candidates], prior, rtol=1e-5)


def test_texts_that_share_no_word_are_no_candidates():
    rows, scores = Bm25(["alpha beta", "gamma", "delta"]).scored(["gamma"], 3)
    assert rows[0].tolist() == [1, -1, -1]
    assert scores[0, 0] > 0 and scores[0, 1:].tolist() == [0, 0]


# --- more passages than in training -----------------------------------------------------------------------------------


def test_more_passages_can_be_read_than_in_training(fallen):
    run, last, _ = fallen
    more, index = with_config(run, with_values(run.config, {"answering.read": 7})), run.index(run.embed(last))
    few, many = (Evaluator(one, run.sources.questions["dev"]).predict(last, index) for one in (run, more))
    for a, b in zip(few, many, strict=True):
        assert (len(a.candidates), len(b.candidates)) == (3, 7)
        assert [one.row for one in b.candidates[:3]] == [one.row for one in a.candidates]
        assert sum(one.probability for one in b.candidates) == pytest.approx(1, abs=1e-5)


# --- regular expressions for answers ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def patterned(tmp_path_factory):
    """A prepared folder whose training questions have patterns for answers, one of which matches nowhere."""
    answers = [[f"180[{n}]", "in 18\\d\\d"] for n in range(8)]
    answers[0] = ["nowhere", "no (one|body)"]
    asked = [
        question(n, split=split, match="regex") | {"answers": answers[n]}
        for n in range(8)
        for split in ("train", "dev")
    ]
    return prepare_people(tmp_path_factory.mktemp("patterned"), asked=asked)


def test_patterns_become_the_strings_that_they_match(patterned):
    tokenizer = open_sources(patterned).tokenizer
    texts = ["Born in 1801, or 1802.", "In 1802 she went.", "1802 to 1803"]
    assert matching_strings(["180[1-2]"], texts, tokenizer, 10) == ["1802", "1801"]
    assert matching_strings(["IN 1802|in 1802", "("], texts, tokenizer, 10) == ["In 1802"], "no pattern, and no case"
    assert matching_strings(["Born.*1802"], texts, tokenizer, 3) == [], "too long for a span"


def questions_of(run):
    params = run.initial_params()
    return training_questions(make_task("qa", run), params, lambda: start_vectors(run, "qa", params))


@pytest.mark.slow
def test_fine_tuning_learns_from_patterns(patterned, tmp_path):
    """The answers stand in the passages found first; a run that goes on has the same."""
    run = open_fine(patterned, tmp_path, qa__beam=16, evaluation__every=0)
    train_recipe(run)
    answers = read_json(tmp_path / "qa" / "answers.json")["answers"]
    assert len(answers) == 8 and answers[0] == []
    assert all(text.removeprefix("in ").startswith("18") for some in answers[1:] for text in some)
    assert {"1803", "in 1803"} <= set(answers[3])
    metrics = read_lines(tmp_path / "qa" / "metrics.jsonl")
    assert metrics[-1]["answer_in_passages"] > 0 and metrics[-1]["loss"] > 0
    write_json_atomic(tmp_path / "qa" / "answers.json", {"answers": [["1800"]] * 8})
    assert [q.answers for q in questions_of(run)] == [["1800"]] * 8
    assert not any(q.is_regex for q in questions_of(run))


def test_patterns_that_match_nothing_at_all_are_an_error(patterned, tmp_path):
    run = open_fine(patterned, tmp_path)
    for one in run.sources.questions["train"]:
        one.answers[:] = ["nowhere"]
    with pytest.raises(UserError, match="no pattern of 8 training questions matches in the 16 passages"):
        questions_of(run)
