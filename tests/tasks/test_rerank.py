"""The reranker: its loss, its start, what it changes for questions, and its training cut off and resumed."""

import dataclasses
import json
import logging

import jax
import numpy as np
import pytest
from runs import assert_same, cut_off, planned_parts
from tiny_run import open_config, tiny_config

from realm_jax.cli import main as cli
from realm_jax.data.examples import dataset
from realm_jax.eval.prediction import Evaluator
from realm_jax.eval.prediction_files import read_settings
from realm_jax.forward import SearchPipeline, read_question
from realm_jax.indexing.vector_cache import embed_with_cache
from realm_jax.run import put_batch
from realm_jax.tasks import make_task
from realm_jax.tasks.answering import search_pipeline
from realm_jax.tasks.rerank import CANDIDATES, NAME, added
from realm_jax.train.recipe import train
from realm_jax.train.restore import restore_params
from realm_jax.train.step import loss_and_metrics

PASSAGES = 4
pytestmark = pytest.mark.usefixtures("quick_steps")


def opened(data, workdir, search="vectors"):
    config = tiny_config(data)
    config.tasks = "qa,rerank"
    config.qa.search = search
    sizes = {"steps": 4, "batch_size": 8, "learning_rate": 1e-2}
    config.optimizer.warmup = 1
    config.rerank.update(sizes | {"passages": PASSAGES})
    config.update({"checkpoint": {"every": 2, "keep": 3}, "log": {"every": 1}})
    return open_config(config, workdir)


@pytest.fixture(scope="module")
def trained(people, tmp_path_factory):
    """A run that is done, and its parameters after fine-tuning and at the end."""
    run = opened(people, tmp_path_factory.mktemp("rerank") / "run")
    last = jax.tree.map(np.asarray, train(run))
    return run, jax.tree.map(np.asarray, restore_params(run, "qa")), last


def test_the_reranker_alone_learns_and_begins_with_the_reader(trained):
    run, tuned, last = trained
    for name in ("query_embedder", "document_embedder", "reader"):
        assert_same(tuned[name], last[name])
    start = make_task("rerank", run).start(tuned)
    assert_same(start[NAME]["bert"], tuned["reader"]["bert"])
    assert np.abs(last[NAME]["score"]["kernel"]).max() > 0


@pytest.mark.parametrize("search", ["vectors", "hybrid"])
def test_its_start_is_the_order_of_the_search(people, tmp_path, search):
    run = opened(people, tmp_path / "run", search)
    task, params = make_task("rerank", run), run.initial_params()
    index, questions = run.index(embed_with_cache(run, params)), run.sources.questions["dev"]
    plain = Evaluator(run, questions, SearchPipeline(search)).predict(params, index)
    start = Evaluator(run, questions, search_pipeline("rerank", run.config)).predict(task.start(params), index)
    for before, after in zip(plain, start, strict=True):
        assert before.nbest == after.nbest and before.retrieved.tolist() == after.retrieved.tolist()


def test_the_loss_is_the_cross_entropy_with_the_posterior_of_the_reader(trained):
    run, _, last = trained
    task, index = make_task("rerank", run), run.index(embed_with_cache(run, last))
    batch = put_batch(run.mesh, dataset(task.examples(last, None), 0, task.stream, 8)[0])
    qa = dataclasses.replace(run.config.qa, passages=CANDIDATES)
    read = read_question(qa, run.context, last, batch, index, None, CANDIDATES)
    loss, values = loss_and_metrics(task, last, batch, index, None)
    documents = type(run.documents)(*(part[read.beam.rows] for part in run.documents))
    scores = np.asarray(read.beam.scores + added(qa, run.context, last, batch, documents), np.float64)
    spans = np.where(read.correct, np.exp(np.asarray(read.spans, np.float64)), 0.0).sum(axis=(2, 3))
    joint = np.exp(np.asarray(read.prior, np.float64)) * spans
    answered = joint.sum(axis=1) > 0
    assert answered.any()
    posterior = joint[answered] / joint[answered].sum(axis=1, keepdims=True)
    log_p = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    np.testing.assert_allclose(loss, -(posterior * log_p[answered]).sum(axis=1).mean(), rtol=1e-4)
    np.testing.assert_allclose(values["answer_in_passages"], answered.mean())


def test_questions_are_answered_in_its_order(trained, tmp_path):
    """Of another task's parameters in the order of the search, and the files say which."""
    run, *_ = trained
    files = {task: tmp_path / f"{task}.jsonl" for task in ("qa", "rerank")}
    for task, file in files.items():
        assert cli.main(["predict", f"--workdir={run.workdir}", f"--task={task}", f"--output={file}"]) == 0
    before, after = ([json.loads(line) for line in file.read_text().splitlines()] for file in files.values())
    plain, anew = (read_settings(str(file)) for file in files.values())
    assert "reranked" not in plain and (anew["rerank"], anew["reranked"]) == ("cross-encoder", PASSAGES)
    assert anew["parameters"] > plain["parameters"]
    rows = [[[one["id"] for one in line["retrieved"]] for line in lines] for lines in (before, after)]
    assert rows[0] != rows[1]
    for searched, reranked in zip(*rows, strict=True):
        assert sorted(searched[:PASSAGES]) == sorted(reranked[:PASSAGES])
        assert searched[PASSAGES:] == reranked[PASSAGES:]
    placed = [one["ranks"].get("cross-encoder") for one in after[0]["retrieved"]]
    assert placed == [*range(1, PASSAGES + 1), *[None] * (len(placed) - PASSAGES)]


def test_parameters_after_a_kill_are_the_same(trained, people, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "realm_jax")
    run = opened(people, tmp_path / "run")
    cut_off(monkeypatch, lambda: train(run), 3)
    again = jax.tree.map(np.asarray, train(run))
    assert "rerank: resuming from step 2" in caplog.text
    assert_same(trained[2], again)


def test_a_step_can_be_planned_from_the_shapes_of_its_examples(people, tmp_path):
    parts = planned_parts(opened(people, tmp_path / "run", "hybrid"), "rerank")
    assert {*parts} == {"reader", "reranker", "search", "queries"}
