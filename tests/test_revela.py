"""In-batch attention: its loss by hand, what the retriever learns from it, and which passages come together."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import batch_of, losses, opened, planned_parts, same, trained_after_a_cut, trained_from_start
from runs import Cut
from tiny import DOCUMENT, document_rows, loud_params, random_corpus, tiny_bert, tiny_realm

from realm_jax.config import default
from realm_jax.models.inputs import Documents, document_sequences, query_sequences
from realm_jax.models.prompts import Template
from realm_jax.tasks.encoder_mlm import HEAD, WordHead
from realm_jax.tasks.revela import InBatchReader, other_passages, paired_examples, revela_loss

NAME = "revela"
PROMPT = Template((7, 8), (), titled=False)
pytestmark = pytest.mark.usefixtures("quick_steps")


@pytest.fixture(scope="module")
def trained(people, tmp_path_factory):
    """A run that is done, what it started from, and its last parameters."""
    run = opened(people, tmp_path_factory.mktemp(NAME) / "run", NAME)
    return run, *trained_from_start(run, NAME)


def softmax(scores):
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return scores / scores.sum(axis=-1, keepdims=True)


def attended(own, hidden, weights, states, mask, heads=2):
    """What the hidden tokens [m, width] of one sentence take from texts [texts, length, width], by loops over both."""

    def mapped(name, x):
        return x @ own[name]["kernel"] + own[name]["bias"]

    total = np.zeros(hidden.shape)
    for weight, text, length in zip(weights, states, mask.sum(axis=1), strict=True):
        parts = (
            np.split(mapped(n, x), heads, axis=-1)
            for n, x in [("query", hidden), ("key", text[:length]), ("value", text[:length])]
        )
        for head, (q, k, v) in enumerate(zip(*parts, strict=True)):
            size = q.shape[-1]
            total[:, head * size : (head + 1) * size] += weight * softmax(q @ k.T / np.sqrt(size)) @ v
    x = hidden + mapped("output", total)
    x = (x - x.mean(axis=-1, keepdims=True)) / x.std(axis=-1, keepdims=True)
    return x * own["attention_norm"]["scale"] + own["attention_norm"]["bias"]


@pytest.mark.parametrize("prompt", [None, PROMPT])
def test_the_loss_is_that_of_attending_to_the_other_texts_by_their_weights(trained, prompt):
    run, _, last = trained
    batch = dict(batch_of(run, NAME))
    batch["document_row"] = batch["document_row"].at[3].set(batch["own_row"][0])  # it may not help sentence 0
    model = dataclasses.replace(run.context.model, query_template=prompt, temperature=2.0)
    texts = document_sequences(Documents(*(batch[f"document{part}"] for part in ("", "_length", "_title_length"))))
    query = query_sequences(batch["query"], batch["query_length"], prompt)
    queries, hidden = map(np.asarray, jax.jit(model.read)(last["query_embedder"], query))
    vectors, states = (np.asarray(x, np.float64) for x in jax.jit(model.read)(last["document_embedder"], texts))
    own_row, row = (np.asarray(batch[name]) for name in ("own_row", "document_row"))
    weights = softmax(np.where(own_row[:, None] == row, -np.inf, queries @ vectors.T / 2))
    assert weights[0, 3] == 0
    own, places = last[InBatchReader.name], np.asarray(batch["positions"]) + (2 if prompt else 0)
    words, terms = last["query_embedder"]["bert"]["words"]["embedding"], []
    for i in range(len(queries)):
        x = attended(own, hidden[i][places[i]].astype(np.float64), weights[i], states, np.asarray(texts.mask))
        scores = WordHead(model.bert).apply({"params": own[HEAD]}, jnp.asarray(x, jnp.float32), words)
        scores = np.asarray(scores, np.float64)
        term = np.logaddexp.reduce(scores, axis=1) - scores[np.arange(len(x)), batch["targets"][i]]
        terms += term[np.asarray(batch["weights"][i]) > 0].tolist()
    context = dataclasses.replace(run.context, model=model)
    found = jax.jit(lambda params: revela_loss(context, params, batch, None))(last)
    np.testing.assert_allclose(found["loss"].value, np.mean(terms), rtol=1e-4)
    np.testing.assert_allclose(found["article_probability"].value, np.diagonal(weights).mean(), rtol=1e-4)


def retriever_gradient(states, target=None):
    """The gradient of the loss by the retriever's scores of two texts, and what each alone says of the target: the
    word by default that the first text makes likelier than the second does by most."""
    rng, reader = np.random.default_rng(0), InBatchReader(tiny_bert())
    shapes = jax.eval_shape(reader.init_boxed, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape)), shapes)
    hidden, words = (jnp.asarray(rng.normal(size=shape)) for shape in ((1, 1, 16), (50, 16)))
    mask = jnp.ones(states.shape[:2], bool)

    @jax.jit
    def log_p(weights):
        return jax.nn.log_softmax(reader.scores({reader.name: params}, hidden, weights, states, mask, words))[0, 0]

    alone = np.array([log_p(weights) for weights in jnp.eye(2)[:, None]])
    target = int((alone[0] - alone[1]).argmax()) if target is None else target
    scores = jnp.zeros((1, 2))
    return np.asarray(jax.grad(lambda scores: -log_p(jax.nn.softmax(scores))[target])(scores))[0], alone[:, target]


def test_the_retriever_learns_nothing_from_texts_that_are_equal():
    text = jnp.asarray(np.random.default_rng(1).normal(size=(1, 5, 16)), jnp.float32)
    gradient, alone = retriever_gradient(jnp.concatenate([text, text]), target=7)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)
    assert alone[0] == pytest.approx(alone[1])


def test_the_retriever_learns_to_prefer_the_text_that_helps():
    texts = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 16)), jnp.float32)
    gradient, alone = retriever_gradient(texts)
    assert alone[0] > alone[1] and gradient[0] < -0.01 < 0.01 < gradient[1]


@pytest.mark.parametrize("pooling", ["pooler", "cls", "mean", "last"])
def test_a_text_that_is_read_has_the_vector_that_it_is_searched_by(pooling):
    model = dataclasses.replace(tiny_realm(layers=1), pooling=pooling)
    params = loud_params(model, 0)
    documents = Documents(*map(jnp.asarray, document_rows(random_corpus(np.random.default_rng(0), 4))))
    vectors, states = jax.jit(model.read)(params["document_embedder"], document_sequences(documents))
    np.testing.assert_allclose(vectors, jax.jit(model.embed_documents)(params, documents), atol=1e-5)
    assert states.shape == (4, DOCUMENT, 16)


def test_it_learns(trained):
    run, start, last = trained
    before, after = losses(run, NAME, start, last)
    assert after < 0.9 * before
    same(start["reader"], last["reader"])
    for tower in ("query_embedder", "document_embedder"):
        assert np.abs(last[tower]["projection"]["kernel"] - start[tower]["projection"]["kernel"]).max() > 0.001


def test_parameters_after_a_kill_are_the_same(trained, people, tmp_path, monkeypatch):
    again = trained_after_a_cut(opened(people, tmp_path / "run", NAME), monkeypatch, Cut)
    same(trained[2], again)


def test_its_operations_are_those_of_towers_attention_and_head(trained):
    """Ten hidden tokens of a sentence, eight texts of 48, width 16, vectors of 8, 300 words."""
    run, *_ = trained
    parts, times = planned_parts(run, NAME), 3 * 8
    assert parts["attention"] == times * (4 * 10 + 4 * 48) * 16**2 + times * 4 * 10 * 8 * 48 * 16
    assert parts["words"] == times * 2 * 10 * 16 * (16 + 300)
    assert parts["scores"] == times * 2 * 8 * 8
    layer = 8 * 48 * 16**2 + 4 * 48**2 * 16 + 4 * 48 * 16 * 32
    assert parts["documents"] == times * (layer + 2 * 16 * (16 + 8))
    assert set(parts) == {"queries", "documents", "scores", "attention", "words"}


# --- examples ---------------------------------------------------------------------------------------------------------


class Articles:
    """Rows by title and document."""

    rows = [("Sea", "a"), ("", "b"), ("Sea", "c"), ("", "b"), ("Sea", "a"), ("Sky", "d")]

    def __len__(self):
        return len(self.rows)

    def title(self, row):
        return self.rows[row][0]

    def document_id(self, row):
        return self.rows[row][1]


def test_a_passage_comes_with_another_one_of_its_article():
    draw, rng = other_passages(Articles()), np.random.default_rng(0)
    drawn = {row: {draw(row, rng) for _ in range(100)} for row in range(6)}
    assert drawn == {0: {2, 4}, 1: {3}, 2: {0, 4}, 3: {1}, 4: {0, 2}, 5: {0, 1, 2, 3, 4}}


@pytest.mark.parametrize("masking", ["salient", "uniform"])
def test_sentences_are_those_of_rows_that_may_be_learned_from(trained, masking):
    run, *_ = trained
    passages, tokenizer = run.sources.passages, run.sources.tokenizer
    kept, rng = np.arange(len(passages)) < 5, np.random.default_rng(0)
    made = paired_examples(passages, tokenizer, run.lengths, masking, kept)
    examples = [made.make(index, rng) for index in range(made.total)]
    assert {int(one["own_row"]) for one in examples} == set(range(5))
    for one in examples:
        assert one["own_row"] != one["document_row"] and one["weights"].sum() > 0
        body = passages.body_tokens(int(one["document_row"]))
        np.testing.assert_array_equal(one["document"][one["document_length"] - 1 - len(body) :][: len(body)], body)


def test_recipes_are_without_it():
    assert NAME not in default()
