"""Runs without development questions: masked sentences of documents that no task learns from."""

import numpy as np
import pytest
from tiny_run import prepare_people, tiny_config

from realm_jax.data import held_out
from realm_jax.data.evidence import Evidence, EvidenceSpans
from realm_jax.data.held_out import held_out_sentences, is_held_out, masked_sentences, trained_rows
from realm_jax.data.sources import open_sources
from realm_jax.storage import read_json
from realm_jax.tasks import make_task
from realm_jax.train import trained_run
from realm_jax.train.recipe import open_run, run_recipe

SHARE = 0.3


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """The people's passages without any question."""
    return prepare_people(tmp_path_factory.mktemp("people"), asked=[])


@pytest.fixture(scope="module")
def sources(people):
    return open_sources(people)


def test_a_document_is_held_out_by_its_id_alone_and_about_as_many_as_asked():
    names = [f"document {number}" for number in range(2000)]
    held = {name for name in names if is_held_out(name, 0.1)}
    assert 0.07 < len(held) / len(names) < 0.13
    assert held < {name for name in names if is_held_out(name, 0.2)}


def test_masked_sentences_ask_for_their_own_document_without_the_hidden_span(sources):
    store = sources.passages
    questions = masked_sentences(store, sources.tokenizer, 32, SHARE, 0)
    assert questions and not any(question.answers for question in questions)
    for question in questions:
        assert all(is_held_out(name, SHARE) for name in question.gold)
        text = store.text(store.rows_of(*question.gold)[0]).lower()
        assert question.question not in text
        assert {*question.question.split()} <= {*text.replace(".", " .").split()}
    assert len(masked_sentences(store, sources.tokenizer, 32, SHARE, 2)) == 2
    assert masked_sentences(store, sources.tokenizer, 32, 0.0, 0) == []


def test_as_many_masked_sentences_as_asked_come_although_some_are_too_short(sources, monkeypatch):
    store = sources.passages
    every = masked_sentences(store, sources.tokenizer, 32, SHARE, 0)
    lengths = sorted(len(sources.tokenizer.encode(question.question).ids) for question in every)
    monkeypatch.setattr(held_out, "MINIMUM_SENTENCE", lengths[len(lengths) // 2])
    left = masked_sentences(store, sources.tokenizer, 32, SHARE, 0)
    assert 2 <= len(left) < len(every)
    assert len(masked_sentences(store, sources.tokenizer, 32, SHARE, len(left))) == len(left)


def test_first_and_later_spans_of_sentences_are_hidden(sources):
    asked = [question.question for question in masked_sentences(sources.passages, sources.tokenizer, 32, 1.0, 0)]
    of_birth = [text for text in asked if "born" in text]
    assert {text.startswith("was born in 18") for text in of_birth} == {True, False}


@pytest.fixture(scope="module")
def measured(people, one_device, tmp_path_factory):
    """A run of `ict` that holds documents out, and what it recorded."""
    config = tiny_config(people)
    config.tasks, config.evaluation.held_out = "ict", SHARE
    run = open_run(config, tmp_path_factory.mktemp("held") / "run")
    assert run_recipe(run, "realm train") == 0
    return run, read_json(run.workdir / "results.json")


def test_no_sentence_to_learn_from_is_of_a_held_out_document(measured):
    run, _ = measured
    examples = make_task("ict", run).examples({}, None)
    used = {int(examples.make(number, np.random.default_rng(0))["own_row"]) for number in range(examples.total)}
    kept = trained_rows(run.sources.passages, SHARE)
    assert used and all(kept[row] for row in used) and not kept.all()


def test_the_run_is_measured_against_its_own_start(measured):
    run, results = measured
    assert results["measured_on"] == "masked sentences of held-out documents"
    assert trained_run.recorded_metrics(run, "ict").on == results["measured_on"]
    stage = results["stages"]["ict"]
    assert stage["measure"] == "recall@5" and 0 <= stage["start"] <= 1 and 0 <= stage["end"] <= 1
    assert "bm25" in results["recall@5"]


def test_held_out_sentences_hide_first_what_another_passage_is_evidence_for(sources):
    """Evidence is said to be in rows 1 and 3, for a span of the first sentence of one held-out passage."""
    store = sources.passages
    rows = [row for row in range(len(store)) if is_held_out(store.document_id(row), SHARE)]
    row, (start, end) = rows[-1], store.spans(rows[-1])[0, :2].tolist()
    spans = EvidenceSpans(*(np.array([value]) for value in (row, 0, start, end)))
    evidence = Evidence(spans, np.array([0, 0]), np.array([1, 3]))
    found = held_out_sentences(store, sources.tokenizer, 32, SHARE, 100, evidence)
    assert (found[0].row, found[0].evidence) == (row, (1, 3))
    hidden = sources.tokenizer.decode(store.body_tokens(row)[start:end])
    assert hidden in found[0].text and hidden not in found[0].masked
    assert {one.row for one in found} <= {*rows} and not any(one.evidence for one in found[1:])
    assert held_out_sentences(store, sources.tokenizer, 32, SHARE, 1, evidence) == found[:1]
