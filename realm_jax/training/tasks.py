"""The four tasks: what each trains and the loss of one batch, as pure functions.

A loss has the form `loss(params, batch, index, key) -> (scalar, metrics)`; `index` is None where nothing is retrieved
and `key` None turns dropout off. Retrieval happens inside the loss (`index/candidates.py`), so a step is one program.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from realm_jax.index.candidates import (
    Batch,
    Candidates,
    Index,
    Setting,
    candidate_scores,
    candidate_words,
    dropout_keys,
    embed_null,
    read_passages,
    retrieve,
    take,
)  # fmt: skip
from realm_jax.models import likelihood
from realm_jax.models.inputs import Documents, find_answers, join
from realm_jax.models.realm import Params, flatten_joint

Array = jax.Array
Loss = Callable[[Params, Batch, Any, Array | None], tuple[Array, dict[str, Array]]]


# --- warm-up: masked words beside a given passage ---------------------------------------------------------------------


def mlm_loss(setting: Setting, params: Params, batch: Batch, index: None, key: Array | None) -> tuple[Array, dict]:
    """Cross-entropy of masked words, mean over predicted pieces; the passage comes with the batch."""
    documents = Documents(*(batch[f"document{part}"][:, None] for part in ("", "_length", "_title_length")))
    joint = flatten_joint(join(batch["query"], batch["query_length"], documents))
    words = setting.model.read_words(params, joint, batch["positions"], key)
    weights = batch["weights"].astype(jnp.float32)
    total = jnp.maximum(weights.sum(), 1.0)
    log_p = jnp.take_along_axis(words, batch["targets"][..., None], axis=-1)[..., 0]
    right = (words.argmax(axis=-1) == batch["targets"]) * weights
    loss = -(log_p * weights).sum() / total
    return loss, {"loss": loss, "accuracy": right.sum() / total}


# --- inverse cloze task -----------------------------------------------------------------------------------------------


def ict_loss(setting: Setting, params: Params, batch: Batch, index: None, key: Array | None) -> tuple[Array, dict]:
    """Softmax of each sentence against all passages of the global batch (Lee et al. 2019, section 4).

    With `ict_null_weight` the null document is one more candidate, and the right one for a sentence whose own passage
    is taken away: its score becomes the threshold under which a passage does not fit. Without that, REALM starts with
    p(null) near 0, and a query none of whose candidates helps teaches the retriever which one harms least.
    """
    keys = dropout_keys(key, 3)
    queries = setting.model.embed_queries(params, batch["query"], batch["query_length"], keys[0])
    documents = Documents(*(batch[f"document{part}"] for part in ("", "_length", "_title_length")))
    vectors = setting.model.embed_documents(params, documents, keys[1])
    scores = queries @ vectors.T
    if setting.ict_null_weight:
        null = embed_null(setting, params, keys[2])
        loss = _cloze_with_null(scores, queries @ null.T, setting.ict_null_weight)
    else:
        loss = -jnp.diagonal(jax.nn.log_softmax(scores, axis=-1)).mean()
    right = scores.argmax(axis=-1) == jnp.arange(scores.shape[0])
    return loss, {"loss": loss, "accuracy": right.mean()}


def _cloze_with_null(scores: Array, null: Array, weight: float) -> Array:
    """scores [batch, batch], null [batch, 1]: own passage among all and null, plus `weight` × null among the others."""
    size = scores.shape[0]
    found = jax.nn.log_softmax(jnp.concatenate([scores, null], axis=1), axis=1)
    others = jnp.where(jnp.eye(size, dtype=bool), likelihood.NEGATIVE, scores)
    missed = jax.nn.log_softmax(jnp.concatenate([others, null], axis=1), axis=1)
    return -(jnp.diagonal(found) + weight * missed[:, -1]).mean()


# --- REALM ------------------------------------------------------------------------------------------------------------


def realm_loss(setting: Setting, params: Params, batch: Batch, index: Index, key: Array | None) -> tuple[Array, dict]:
    """−log Σ_z p(z|x) p(y|z,x) over the null document and the retrieved candidates (paper, section 3.3)."""
    found = retrieve(setting, params, batch, index, setting.candidates - 1)
    documents = take(index, found.rows)
    keys = dropout_keys(key, 2)
    scores = candidate_scores(setting, params, batch, documents, keys[0])
    log_p, guesses = candidate_words(setting, params, batch, documents, keys[1])
    valid = jnp.pad(found.valid, ((0, 0), (1, 0)), constant_values=True)
    result = likelihood.masked_word_marginal(scores, log_p, batch["weights"], valid, setting.marginal)
    return result.loss, realm_metrics(result, guesses, batch, found)


def realm_metrics(result: likelihood.Marginal, guesses: Array, batch: Batch, found: Candidates) -> dict[str, Array]:
    """What a REALM step reports; means over the examples of the batch.

    retrieval_utility: log p(y|x) − log p(y|null, x), nats. useful_candidates: share of examples whose best candidate
    beats the null document by more than a tenth of a nat. accuracy: pieces that the reader gets right beside the
    candidate of largest p(z|x). excluded: own passages dropped, per example.
    """
    prior = jnp.exp(result.log_prior)
    weights = batch["weights"].astype(jnp.float32)
    likeliest = result.log_prior.argmax(axis=1)
    guess = jnp.take_along_axis(guesses, likeliest[:, None, None], axis=1)[:, 0]
    right = ((guess == batch["targets"]) * weights).sum() / jnp.maximum(weights.sum(), 1.0)
    gain = result.best_log_likelihood - result.null_log_likelihood
    return {
        "loss": result.loss,
        "perplexity": jnp.exp(-result.log_likelihood.sum() / jnp.maximum(weights.sum(), 1.0)),
        "accuracy": right,
        "retrieval_utility": (result.log_likelihood - result.null_log_likelihood).mean(),
        "useful_candidates": (gain > 0.1).mean(),
        "best_candidate_gain": gain.mean(),
        "null_probability": prior[:, 0].mean(),
        "prior_entropy": -jnp.sum(prior * result.log_prior, axis=1).mean(),
        "excluded": found.excluded.mean(),
    }


# --- question answering -----------------------------------------------------------------------------------------------


def qa_loss(setting: Setting, params: Params, batch: Batch, index: Index, key: Array | None) -> tuple[Array, dict]:
    """Fine-tuning: the paper's marginal over passages and spans, or ORQA's L_ret + L_read."""
    beam = setting.qa_beam if setting.qa_objective == "orqa" else setting.qa_passages
    reading, rows, scores = read_passages(setting, params, batch, index, key, beam, setting.qa_passages)
    answers = (batch["answers"], batch["answer_lengths"], setting.model.span_width)
    allowed, correct = find_answers(reading.joint, *answers)
    loss, log_likelihood = likelihood.answer_marginal(reading.scores, reading.span_scores, allowed, correct)
    has_answer = correct.any(axis=(2, 3))
    if setting.qa_objective == "orqa":
        beam_joint = join(batch["query"], batch["query_length"], take(index, rows))
        beam_correct = find_answers(beam_joint, *answers)[1].any(axis=(2, 3))
        loss = likelihood.orqa_loss(scores, beam_correct, reading.scores, reading.span_scores, allowed, correct)
    final = jax.nn.log_softmax(reading.scores)[:, :, None, None] + likelihood.span_log_probabilities(
        reading.span_scores, allowed
    )
    flat = final.reshape(final.shape[0], -1)
    right = jnp.take_along_axis(correct.reshape(flat.shape), flat.argmax(axis=1)[:, None], axis=1)
    answered = has_answer.any(axis=1)
    return loss, {
        "loss": loss,
        "accuracy": right.mean(),
        "answer_in_passages": answered.mean(),
        "log_likelihood": jnp.where(answered, log_likelihood, 0.0).sum() / jnp.maximum(answered.sum(), 1),
    }


@dataclasses.dataclass(frozen=True)
class Task:
    """A task by name: the parameters it trains (top-level keys), its loss, and whether it retrieves."""

    name: str
    trained: tuple[str, ...]
    loss: Loss
    retrieves: bool


def make_task(name: str, setting: Setting) -> Task:
    """The task called `name` ('mlm', 'ict', 'realm' or 'qa')."""
    towers = setting.model.embedder_names
    table: dict[str, tuple[tuple[str, ...], Callable[..., Any], bool]] = {
        "mlm": (("reader",), mlm_loss, False),
        "ict": (towers, ict_loss, False),
        "realm": ((*towers, "reader"), realm_loss, True),
        "qa": ((towers[0], "reader"), qa_loss, True),
    }
    trained, loss, retrieves = table[name]
    return Task(name, trained, partial(loss, setting), retrieves)
