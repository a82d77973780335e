"""The denoising autoencoder: what is deleted, a decoder that looks back alone, the loss by hand, and its training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import batch_of, losses, opened, planned_parts, same, trained_after_a_cut, trained_from_start
from runs import Cut

from realm_jax.config import default
from realm_jax.forward.context import batch_passages
from realm_jax.models.attention import causal_attention, dot_product_attention
from realm_jax.models.bert import Bert, apply
from realm_jax.tasks import make_task
from realm_jax.tasks.encoder_mlm import HEAD, WordHead
from realm_jax.tasks.tsdae import MEMORY, Decoder, damaged, damaged_passages
from realm_jax.train.step import loss_and_metrics

NAME = "tsdae"
pytestmark = pytest.mark.usefixtures("quick_steps")


@pytest.fixture(scope="module")
def trained(people, tmp_path_factory):
    """A run that is done, what it started from, and its last parameters."""
    run = opened(people, tmp_path_factory.mktemp(NAME) / "run", NAME)
    return run, *trained_from_start(run, NAME)


def test_the_loss_is_that_of_reading_each_beginning_of_the_text(trained):
    """One layer looks back alone if it is shown nothing else: token after token, by the encoder itself."""
    run, _, last = trained
    batch, model, own = batch_of(run, NAME), run.context.model, last[Decoder.name]
    vectors = np.asarray(model.embed_documents(last, batch_passages(batch)))
    memory = vectors @ own[MEMORY]["kernel"] + own[MEMORY]["bias"]
    bert, count = last["document_embedder"]["bert"], batch["text"].shape[1] - 1
    places, seen = jnp.arange(count)[:, None], jnp.tril(jnp.ones((count, count + 1), bool))

    @jax.jit
    def scores_of(ids, memory):
        beginnings = jnp.tile(ids, (count, 1))
        inputs = beginnings, jnp.zeros_like(beginnings), seen, places
        hidden = apply(Bert(model.bert), bert, inputs, "__call__", None, features=memory[None, None])
        return WordHead(model.bert).apply({"params": own[HEAD]}, hidden[:, 0], bert["words"]["embedding"])

    terms = []
    for ids, length, given in zip(batch["text"].astype(jnp.int32), batch["text_length"], memory, strict=True):
        scores = np.asarray(scores_of(ids, given), np.float64)[: int(length) - 1]
        terms += (np.logaddexp.reduce(scores, axis=1) - scores[np.arange(len(scores)), ids[1:length]]).tolist()
    loss, _ = loss_and_metrics(make_task(NAME, run), last, batch, None, None)
    np.testing.assert_allclose(loss, np.mean(terms), rtol=1e-4)


def test_causal_attention_is_that_over_each_beginning():
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(2, 5, 8)), jnp.float32) for _ in range(3))
    mask = jnp.array([[True] * 5, [True] * 3 + [False] * 2])
    found = causal_attention(query, key, value, mask, 2)
    for place in range(5):
        part = query[:, place : place + 1], key[:, : place + 1], value[:, : place + 1], mask[:, : place + 1]
        np.testing.assert_allclose(found[:, place], dot_product_attention(*part, 2)[:, 0], atol=1e-6)


def test_most_tokens_are_deleted_and_order_is_kept():
    rng = np.random.default_rng(0)
    left = damaged(np.arange(10_000), rng)
    assert len(left) == pytest.approx(4000, abs=150) and (np.diff(left) > 0).all()
    assert {len(damaged(np.arange(2), rng)) for _ in range(50)} == {1, 2} and len(damaged(np.arange(0), rng)) == 0


def test_an_example_has_what_is_left_and_the_whole_body(trained):
    run, *_ = trained
    passages = run.sources.passages
    example = damaged_passages(passages, run.sources.tokenizer, run.lengths).make(3, np.random.default_rng(0))
    body = passages.body_tokens(3)
    np.testing.assert_array_equal(example["text"][1 : example["text_length"] - 1], body)
    shown = example["document"][example["document_title_length"] + 2 : example["document_length"] - 1]
    assert 0 < len(shown) < len(body) and {*shown.tolist()} <= {*body.tolist()}


def test_it_learns_and_equal_towers_stay_equal(trained):
    run, start, last = trained
    before, after = losses(run, NAME, start, last)
    assert after < 0.95 * before
    same(last["query_embedder"], last["document_embedder"])
    same(start["reader"], last["reader"])


def test_the_encoder_learns_through_the_vector(trained):
    """Its projection is a part of nothing else; weight decay alone would not move it as far."""
    _, start, last = trained
    before, after = (params["document_embedder"]["projection"]["kernel"] for params in (start, last))
    assert np.abs(after - before).mean() > 0.01


def test_parameters_after_a_kill_are_the_same(trained, people, tmp_path, monkeypatch):
    again = trained_after_a_cut(opened(people, tmp_path / "run", NAME), monkeypatch, Cut)
    same(trained[2], again)


def test_its_operations_are_those_of_encoder_decoder_and_head(trained):
    """One layer of width 16 each, whose [CLS] alone the encoder needs, vectors of 8, and 300 words at 47 places."""
    run, *_ = trained
    length, width, wide, size, vector = 48, 16, 32, 300, 8
    parts = planned_parts(run, NAME)
    layer = 8 * length * width**2 + 4 * length**2 * width + 4 * length * width * wide
    assert parts["decoder"] == 3 * 8 * (layer + 2 * vector * width)
    assert parts["words"] == 3 * 8 * 2 * (length - 1) * width * (width + size)
    assert parts["documents"] < parts["decoder"] and set(parts) == {"documents", "decoder", "words"}


def test_recipes_are_without_it():
    assert NAME not in default()
