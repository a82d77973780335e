"""Masked words of the encoder: what is hidden, the loss by hand, and towers that stay equal."""

import jax.numpy as jnp
import numpy as np
import pytest
from adapted import batch_of, losses, opened, planned_parts, same, trained_after_a_cut, trained_from_start
from runs import Cut

from realm_jax.config import default
from realm_jax.errors import UserError
from realm_jax.models.bert import Bert, apply
from realm_jax.models.inputs import Documents, body_starts, document_sequences
from realm_jax.models.prompts import Template
from realm_jax.tasks import make_task
from realm_jax.tasks.encoder_mlm import HEAD, Head, masked_passages
from realm_jax.tasks.mlm import Mlm
from realm_jax.train.step import loss_and_metrics

NAME = "encoder_mlm"
TEMPLATES = [None, Template((7, 8), (9,), titled=True), Template((7, 8), (), titled=False)]
pytestmark = pytest.mark.usefixtures("quick_steps")


@pytest.fixture(scope="module")
def trained(people, tmp_path_factory):
    """A run that is done, what it started from, and its last parameters."""
    run = opened(people, tmp_path_factory.mktemp(NAME) / "run", NAME)
    return run, *trained_from_start(run, NAME)


def test_the_loss_is_the_cross_entropy_of_the_hidden_tokens(trained):
    run, _, last = trained
    batch, model = batch_of(run, NAME), run.context.model
    documents = Documents(*(batch[f"document{part}"] for part in ("", "_length", "_title_length")))
    tower, head = last["document_embedder"], last[Head.name][HEAD]
    hidden = np.asarray(apply(Bert(model.bert), tower["bert"], tuple(document_sequences(documents)), "__call__", None))
    terms = []
    for row, place in zip(*np.nonzero(batch["weights"]), strict=True):
        position = int(batch["positions"][row, place]) + int(batch["document_title_length"][row]) + 2
        x = hidden[row, position].astype(np.float64)
        changed = x @ head["transform"]["kernel"] + head["transform"]["bias"]
        x = x + 0.5 * changed * (1 + np.tanh(np.sqrt(2 / np.pi) * (changed + 0.044715 * changed**3)))
        x = (x - x.mean()) / x.std() * head["norm"]["scale"] + head["norm"]["bias"]
        scores = tower["bert"]["words"]["embedding"] @ x + head["bias"]
        terms.append(np.logaddexp.reduce(scores) - scores[int(batch["targets"][row, place])])
    loss, values = loss_and_metrics(make_task(NAME, run), last, batch, None, None)
    np.testing.assert_allclose(loss, np.mean(terms), rtol=1e-4)
    assert 0 <= values["accuracy"] <= 1


@pytest.mark.parametrize("template", TEMPLATES)
def test_hidden_tokens_are_found_whatever_stands_around_a_passage(trained, template):
    run, *_ = trained
    passages, tokenizer = run.sources.passages, run.sources.tokenizer
    example = masked_passages(passages, tokenizer, run.lengths, 40).make(3, np.random.default_rng(0))
    documents = Documents(*(jnp.asarray(example[f"document{part}"])[None] for part in ("", "_length", "_title_length")))
    start = int(body_starts(documents, template)[0])
    laid = np.asarray(document_sequences(documents, template).ids)[0]
    count, body = int(example["weights"].sum()), passages.body_tokens(3).astype(int)
    assert count == round(0.15 * len(body))
    body[example["positions"][:count]] = laid[start + example["positions"][:count]]
    np.testing.assert_array_equal(laid[start : start + len(body)], body)
    np.testing.assert_array_equal(passages.body_tokens(3)[example["positions"][:count]], example["targets"][:count])


def test_it_learns_and_equal_towers_stay_equal(trained):
    run, start, last = trained
    before, after = losses(run, NAME, start, last)
    assert after < 0.9 * before
    same(last["query_embedder"], last["document_embedder"])
    moved = (params["query_embedder"]["bert"]["layer_0"]["query"]["kernel"] for params in (start, last))
    assert np.abs(np.subtract(*moved)).max() > 0
    same(start["reader"], last["reader"])


def test_towers_that_are_apart_are_refused_but_for_a_temperature(trained):
    run, start, last = trained
    task, query = make_task(NAME, run), start["query_embedder"]
    task.start(start | {"query_embedder": query | {"log_temperature": np.float32(0.5)}})
    with pytest.raises(UserError, match="has two that differ"):
        task.start(start | {"query_embedder": last["query_embedder"]})


def test_frequent_words_begin_likelier(trained):
    run, start, _ = trained
    tokenizer, bias = run.sources.tokenizer, start[Head.name][HEAD]["bias"]
    born, never = tokenizer.encode("born").ids[0], tokenizer.mask_id
    np.testing.assert_allclose(np.exp(bias.astype(np.float64)).sum(), 1, rtol=1e-5)
    assert bias[born] > bias[never] + 2


def test_its_head_moves_faster_than_the_encoder(trained):
    run, *_ = trained
    assert make_task(NAME, run).fresh == (Head.name,)


def test_parameters_after_a_kill_are_the_same(trained, people, tmp_path, monkeypatch):
    again = trained_after_a_cut(opened(people, tmp_path / "run", NAME), monkeypatch, Cut)
    same(trained[2], again)


def test_its_operations_are_those_of_reading_and_of_the_head(trained):
    """One layer of width 16: projections and feed-forward of the hidden places, attention, and 300 words."""
    run, *_ = trained
    length, places, width, wide, size = 48, round(0.15 * 45), 16, 32, 300
    layer = 4 * (places + length) * width**2 + 4 * places * length * width + 4 * places * width * wide
    words = 2 * places * width * (width + size)
    assert planned_parts(run, NAME) == {"documents": 3 * 8 * layer, "words": 3 * 8 * words}


def test_held_out_passages_are_not_learned_from(trained):
    run, *_ = trained
    kept = np.arange(len(run.sources.passages)) < 5
    made = masked_passages(run.sources.passages, run.sources.tokenizer, run.lengths, 6, kept)
    assert made.total == 5
    with pytest.raises(UserError, match="needs at least one passage"):
        masked_passages(run.sources.passages, run.sources.tokenizer, run.lengths, 6, ~kept & kept)


def test_recipes_are_without_it():
    assert NAME not in default() and Mlm.name in default()
