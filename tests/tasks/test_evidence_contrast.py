"""Contrast over passages that are evidence: its loss by loops, what comes in a batch, and that both towers learn."""

import dataclasses

import jax
import numpy as np
import pytest
from articles import prepared_articles
from runs import assert_same, cut_off, largest_change, planned_parts
from tiny_run import open_config, tiny_config, with_config

from realm_jax.config import with_values
from realm_jax.data.evidence import find_evidence
from realm_jax.data.examples import dataset
from realm_jax.data.held_out import trained_rows
from realm_jax.errors import UserError
from realm_jax.models.inputs import PassageBatch
from realm_jax.run import put_batch
from realm_jax.tasks import make_task
from realm_jax.tasks.evidence_contrast import GROUP, evidence_loss, without_span
from realm_jax.tasks.step_flops import example_flops
from realm_jax.train.recipe import check_data, train
from realm_jax.train.step import loss_and_metrics

NAME = "evidence_contrast"
pytestmark = pytest.mark.usefixtures("quick_steps")


@pytest.fixture(scope="module")
def articles(tmp_path_factory):
    return prepared_articles(tmp_path_factory.mktemp("articles"))


def opened(data, workdir, **changes):
    """Twelve steps, with the head at five times the rate; a checkpoint every fourth. changes: of the task's section."""
    config = tiny_config(data)
    config.tasks = NAME
    config[NAME].update({"steps": 12, "batch_size": 8, "learning_rate": 1e-2} | changes)
    config.optimizer.update({"preset": "short", "warmup": 1})
    config.update({"checkpoint": {"every": 4, "keep": 3}, "log": {"every": 1}})
    return open_config(config, workdir)


@pytest.fixture(scope="module")
def trained(articles, tmp_path_factory):
    """A run that is done, what it started from, and its last parameters."""
    run = opened(articles, tmp_path_factory.mktemp(NAME) / "run")
    start = make_task(NAME, run).start(run.initial_params())
    return run, *(jax.tree.map(np.array, part) for part in (start, train(run)))


def batch_of(run, size):
    task = make_task(NAME, run)
    return put_batch(run.mesh, dataset(task.examples(run.initial_params(), None), 0, task.stream, size)[0])


def by_loops(scores, own, owners, right):
    """The mean loss, one sentence and one passage at a time. scores [n, 2n]: own passages, then the others."""
    total = 0.0
    for number, row in enumerate(own[: len(scores)]):
        seen, likely, weight = set(), 0.0, 0.0
        for place, other in enumerate(own):
            is_right = other == row or other in right[number]
            if other in seen or (owners[place] == owners[number] and not is_right):
                continue
            seen.add(other)
            weight += np.exp(scores[number, place])
            likely += np.exp(scores[number, place]) * is_right
        total -= np.log(likely / weight)
    return total / len(scores)


def test_the_loss_is_that_of_every_right_passage_among_all_of_the_batch(trained):
    run, _, last = trained
    batch = dict(batch_of(run, 8))
    batch["other_row"] = batch["other_row"].at[2].set(batch["other_row"][1])  # came twice
    for name in ("", "_length", "_title_length"):
        other = batch[f"other_document{name}"]
        batch[f"other_document{name}"] = other.at[2].set(other[1])
    batch["other_owner"] = batch["other_owner"].at[3].set(batch["owner"][0])  # may tell sentence 0 as well
    passages = [
        [batch[f"{kind}document{part}"] for part in ("", "_length", "_title_length")] for kind in ("", "other_")
    ]
    vectors = np.concatenate([run.model.embed_documents(last, PassageBatch(*parts)) for parts in passages])
    queries = np.asarray(run.model.embed_queries(last, batch["query"], batch["query_length"]))
    rows, owners = (
        np.concatenate([batch[name], batch[f"other_{other}"]]).tolist()
        for name, other in [("own_row", "row"), ("owner", "owner")]
    )
    wanted = by_loops(queries @ vectors.T, rows, owners, np.asarray(batch["right_rows"]).tolist())
    found = jax.jit(lambda batch: evidence_loss(run.context, last, batch, None)["loss"].mean)(batch)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_a_sentence_comes_without_its_name_and_with_a_passage_that_is_evidence_for_it(trained):
    run, *_ = trained
    task, store = make_task(NAME, run), run.sources.passages
    examples = task.examples({}, None)
    evidence = find_evidence(store, run.lengths.query - 2, min(run.lengths.predictions, run.lengths.span_width))
    assert examples.group == GROUP and examples.total % GROUP == 0
    left = {row: [] for row in evidence.spans.rows.tolist()}
    for number, row in enumerate(evidence.spans.rows.tolist()):
        pieces = without_span(store, evidence, number)[: run.lengths.query - 2]
        left[row].append((pieces.tolist(), evidence.rows_of(number).tolist()))
    for number in range(examples.total):
        one = examples.make(number, np.random.default_rng(number))
        query = one["query"][1 : one["query_length"] - 1].tolist()
        (right,) = [rows for pieces, rows in left[int(one["own_row"])] if pieces == query][:1]
        known = [row for row in one["right_rows"].tolist() if row >= 0]
        assert one["other_row"] in known and known == right
        for kind, place in (("", "own_row"), ("other_", "other_row")):
            row = run.corpus.ids[int(one[place])]
            np.testing.assert_array_equal(one[f"{kind}document"], row[: len(one[f"{kind}document"])])


def test_no_passage_of_a_held_out_document_is_learned_from_not_even_as_evidence(trained, tmp_path):
    share = 0.3
    config = with_values(trained[0].config, {"evaluation.held_out": share})
    run = dataclasses.replace(with_config(trained[0], config), workdir=tmp_path)
    task, store = make_task(NAME, run), run.sources.passages
    kept, evidence = trained_rows(store, share), find_evidence(store, *run.lengths.hidden)
    assert (kept[evidence.spans.rows[evidence.numbers]] & ~kept[evidence.rows]).any(), "some have evidence there alone"
    zeros = np.zeros((len(store), run.model.vector_size), np.float32)
    examples = task.examples({}, lambda: zeros)
    made = [examples.make(number, np.random.default_rng(number)) for number in range(examples.total)]
    assert made and all(kept[int(one[name])] for one in made for name in ("own_row", "other_row"))


def test_it_learns_and_moves_both_towers(trained):
    run, start, last = trained
    batch, task = batch_of(run, 16), make_task(NAME, run)
    loss = jax.jit(lambda params: loss_and_metrics(task, params, batch, None, None)[0])
    assert loss(last) < loss(start)
    assert all(largest_change(start[tower], last[tower]) > 0.001 for tower in run.model.embedder_names)


def test_parameters_after_a_kill_between_two_checkpoints_are_the_same(trained, articles, tmp_path, monkeypatch):
    run = opened(articles, tmp_path / "run")
    cut_off(monkeypatch, lambda: train(run), 6)
    assert_same(trained[2], jax.tree.map(np.asarray, train(run)))


def test_its_operations_are_those_of_the_inverse_cloze_task_with_twice_as_many_passages(trained):
    run, *_ = trained
    parts, (ict, size) = planned_parts(run, NAME), (make_task("ict", run), run.config[NAME].batch_size)
    single = {name: size * value for name, value in example_flops(ict).items()}
    assert parts["queries"] == single["queries"] and parts["documents"] == 2 * single["documents"]
    assert {*parts} == {"queries", "documents", "scores"} and parts["scores"] == 3 * size * 2 * size * 2 * 8


def test_what_it_cannot_learn_from_is_refused(articles, tmp_path):
    with pytest.raises(UserError, match=r"config\.evidence_contrast\.batch_size: passages come in groups of 8"):
        check_data(opened(articles, tmp_path / "a", batch_size=4))
