"""Hybrid search in runs: for questions, for fine-tuning, and for REALM's candidates."""

import jax
import numpy as np
import pytest
from runs import open_inline
from tiny_run import PEOPLE

from realm_jax.config import default, validate
from realm_jax.data.examples import dataset
from realm_jax.data.questions import Question
from realm_jax.errors import UserError
from realm_jax.eval.prediction import Evaluator
from realm_jax.forward import SearchPipeline
from realm_jax.inference.answers import answers
from realm_jax.inference.predictions import records
from realm_jax.retrieval.fusion import fuse
from realm_jax.tasks import make_task
from realm_jax.tasks.realm import unmasked_text
from realm_jax.train.recipe import train
from realm_jax.train.records import read_lines
from realm_jax.train.results import bm25_question_rows
from realm_jax.train.trained_run import TrainedRun

pytestmark = pytest.mark.usefixtures("quick_steps")


@pytest.fixture(scope="module")
def fine(people, tmp_path_factory):
    """A run that was fine-tuned on what hybrid search finds."""
    changes = {"tasks": "qa", "qa__steps": 4, "qa__learning_rate": 1e-2, "optimizer__warmup": 1}
    run = open_inline(people, tmp_path_factory.mktemp("hybrid"), qa__search="hybrid", **changes)
    first = jax.tree.map(np.asarray, run.initial_params())
    return run, first, train(run)


def test_fine_tuning_on_hybrid_candidates_trains_the_query_tower(fine):
    run, first, last = fine
    query, document = run.model.embedder_names
    moved = [
        np.abs(np.asarray(x) - y).max() for x, y in zip(*map(jax.tree.leaves, (last[query], first[query])), strict=True)
    ]
    assert max(moved) > 1e-4
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, last[document]), first[document])


def test_questions_retrieve_the_fused_list_and_record_where_it_is_from(fine):
    hybrid = SearchPipeline("hybrid")
    assert hybrid.ranks_by_stage([3, 1]) == {"vectors": 3, "bm25": 1} and hybrid.ranks_by_stage([0, 2]) == {"bm25": 2}
    run, _, params = fine
    questions = run.sources.questions["dev"]
    vectors = run.embed(params)
    evaluator = Evaluator(run, questions, hybrid)
    predictions = evaluator.predict(params, run.index(vectors))
    np.testing.assert_array_equal(
        [one.retrieved for one in predictions], evaluator.retrieve(params, run.index(vectors))
    )
    by_vectors = Evaluator(run, questions).predict(params, run.index(vectors))
    for question, prediction, other in zip(questions, predictions, by_vectors, strict=True):
        scores = dict(zip(other.retrieved.tolist(), other.scores.tolist(), strict=True))  # of all passages
        words = [part[0] for part in run.bm25().scored([question.question], len(PEOPLE))]
        cross = np.array([scores[row] for row in words[0].tolist()], np.float32)
        wanted = fuse(
            other.retrieved[None], other.scores[None], words[0][None], words[1][None], cross[None], len(PEOPLE)
        )
        np.testing.assert_array_equal(prediction.retrieved, wanted.rows[0])
        np.testing.assert_array_equal(prediction.ranks, wanted.ranks[0])
        np.testing.assert_allclose(prediction.scores, wanted.scores[0], rtol=1e-4)


def test_words_find_no_more_passages_than_share_one(fine):
    """No row is read, ranked or counted in the place of one that was not found."""
    run, _, params = fine
    nothing = Question("zzyzx qqqx", ["Ada"])
    evaluator = Evaluator(run, [nothing, *run.sources.questions["dev"][:2]], SearchPipeline("bm25"))
    np.testing.assert_array_equal(
        evaluator.retrieve(params, run.index_without_vectors), bm25_question_rows(run, evaluator)
    )
    trained = TrainedRun(run, "qa", 4, params, run.index(run.embed(params)), SearchPipeline("bm25"))
    first, *others = evaluator.predict(params, trained.index)
    assert not first.candidates and (first.answer, first.nbest[0].row) == ("", -1) and (first.retrieved == -1).all()
    for prediction in others:
        found = prediction.retrieved[prediction.retrieved >= 0]
        assert {one.row for one in prediction.candidates} <= set(found.tolist()) and len(found)
        assert sum(one.probability for one in prediction.candidates) == pytest.approx(1.0, abs=1e-4)
    record = next(records(trained, [nothing]))[0]
    assert record["retrieved"] == [] and record["passage"] is None and not record["reader_oracle"]
    (told,) = answers(trained, [nothing.question])
    assert told["passage"] is None and told["candidates"] == [] and told["nbest"] == []


@pytest.mark.slow
@pytest.mark.parametrize("search", ["hybrid", "bm25"])
def test_realm_trains_on_candidates_that_words_found(people, tmp_path, search):
    run = open_inline(people, tmp_path, tasks="realm", realm__steps=2, realm__search=search)
    task = make_task("realm", run)
    examples = task.examples({}, None)
    batch, again = (dataset(examples, run.config.seed, task.stream, 4)[0] for _ in range(2))
    np.testing.assert_array_equal(batch["bm25_rows"], again["bm25_rows"])
    if run.sources.pretraining_is_corpus:
        assert not (batch["bm25_rows"] == batch["own_row"][:, None]).any()
    train(run)
    assert all(np.isfinite(line["loss"]) for line in read_lines(run.workdir / "realm" / "metrics.jsonl"))


def test_hidden_words_are_no_words_of_a_query(people, tmp_path):
    """What BM25 looks for is what is left of the sentence."""
    run = open_inline(people, tmp_path, tasks="realm", realm__search="hybrid")
    store, tokenizer = run.sources.pretraining, run.sources.tokenizer
    whole = unmasked_text(store, tokenizer, 0, 0, np.zeros(0, np.int64))
    assert whole in store.text(0)
    without = unmasked_text(store, tokenizer, 0, 0, np.array([0]))
    first = tokenizer.encode(whole).offsets[0]
    assert without.startswith(" " * (first[1] - first[0])) and without.strip() == whole[first[1] :].strip()


def test_hosts_search_vectors_alone():
    config = default()
    config.data.path, config.retrieval.backend, config.realm.search = "data", "scann", "hybrid"
    with pytest.raises(UserError, match=r"realm\.search: retrieval\.backend=scann"):
        validate(config)
