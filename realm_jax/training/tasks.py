"""The four tasks: what each trains and the loss of one batch, as pure functions.

A loss has the form `loss(params, batch, index, key) -> {name: Mean}`: its entry 'loss' is minimised, the others are
reported. Means of the parts of a batch add up to those of the whole. `index` is None where nothing is retrieved and
`key` None turns dropout off. Retrieval happens inside the loss (`index/candidates.py`), so a step is one program. Read
next: `gradients.py`.
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
    beam_answers,
    candidate_scores,
    candidate_words,
    dropout_keys,
    embed_null,
    question_beam,
    question_depth,
    read_joint,
    read_passages,
    retrieve,
    stored_scores,
    take,
)  # fmt: skip
from realm_jax.index.exact import search
from realm_jax.models import likelihood
from realm_jax.models.inputs import Documents, Joint, find_answers, join, token_mask
from realm_jax.models.likelihood import Mean
from realm_jax.models.realm import Params, flatten_joint

Array = jax.Array
Means = dict[str, Mean]
LOG_PERPLEXITY = "log_perplexity"
Loss = Callable[[Params, Batch, Any, Array | None], Means]


# --- warm-up: masked words beside a given passage ---------------------------------------------------------------------


def mlm_loss(setting: Setting, params: Params, batch: Batch, index: None, key: Array | None) -> Means:
    """Cross-entropy of masked words, mean over predicted pieces; the passage, if any, comes with the batch."""
    documents = Documents(*(batch[f"document{part}"][:, None] for part in ("", "_length", "_title_length")))
    joint = flatten_joint(join(batch["query"], batch["query_length"], documents))
    log_p, right = setting.model.read_targets(params, joint, batch["positions"], batch["targets"], key)
    weights = batch["weights"].astype(jnp.float32)
    loss, accuracy = -(log_p * weights).sum(), (right * weights).sum()
    return {"loss": Mean(loss, weights.sum()), "accuracy": Mean(accuracy, weights.sum())}


# --- inverse cloze task -----------------------------------------------------------------------------------------------


def ict_loss(setting: Setting, params: Params, batch: Batch, index: None, key: Array | None) -> Means:
    """Softmax of each sentence against all passages of the global batch (Lee et al. 2019, section 4)."""
    return contrast(setting, cloze_vectors(setting, params, batch, key), cloze_null(setting, params, key))


def cloze_vectors(setting: Setting, params: Params, batch: Batch, key: Array | None) -> tuple[Array, Array]:
    """The vectors of sentences and of their passages, [batch, projection] both."""
    keys = dropout_keys(key, 3)
    queries = setting.model.embed_queries(params, batch["query"], batch["query_length"], keys[0])
    documents = Documents(*(batch[f"document{part}"] for part in ("", "_length", "_title_length")))
    return queries, setting.model.embed_documents(params, documents, keys[1])


def cloze_null(setting: Setting, params: Params, key: Array | None) -> Array | None:
    """The null document's vector [1, projection] where it takes part."""
    return embed_null(setting, params, dropout_keys(key, 3)[2]) if setting.ict_null_weight else None


def contrast(setting: Setting, vectors: tuple[Array, Array], null: Array | None) -> Means:
    """The inverse cloze task between all vectors of a batch.

    With `ict_null_weight` the null document is one more candidate, and the right one for a sentence whose own passage
    is taken away: its score becomes the threshold under which a passage does not fit. Without that, REALM starts with
    p(null) near 0, and a query none of whose candidates helps teaches the retriever which one harms least.
    """
    queries, documents = vectors
    scores = queries @ documents.T
    if null is None:
        losses = -jnp.diagonal(jax.nn.log_softmax(scores, axis=-1))
    else:
        losses = _cloze_with_null(scores, queries @ null.T, setting.ict_null_weight)
    right = scores.argmax(axis=-1) == jnp.arange(scores.shape[0])
    return {"loss": over_examples(losses), "accuracy": over_examples(right)}


def _cloze_with_null(scores: Array, null: Array, weight: float) -> Array:
    """Losses [batch] of scores [batch, batch] and null [batch, 1]: own passage among all and null, plus `weight` × null
    among the others."""
    size = scores.shape[0]
    found = jax.nn.log_softmax(jnp.concatenate([scores, null], axis=1), axis=1)
    others = jnp.where(jnp.eye(size, dtype=bool), likelihood.NEGATIVE, scores)
    missed = jax.nn.log_softmax(jnp.concatenate([others, null], axis=1), axis=1)
    return -(jnp.diagonal(found) + weight * missed[:, -1])


def retrieved_ict_loss(setting: Setting, params: Params, batch: Batch, index: Index, key: Array | None) -> Means:
    """The inverse cloze task against what the sentence itself retrieves, its hardest negatives: −log p(own passage)
    among it and the best `qa_beam` of the index.

    Passages keep their stored vectors and the query embedder alone learns, so a pretrained retriever is sharpened
    without moving the space that its passages live in.
    """
    queries = setting.model.embed_queries(params, batch["query"], batch["query_length"], key)
    depth = min(setting.qa_beam, setting.rows)
    rows = search(setting.mesh, queries, index.vectors, setting.rows, depth, setting.search_block).rows
    own = batch["own_row"][:, None]
    scores = stored_scores(queries, index, jnp.concatenate([own, rows], axis=1))
    others = jnp.where(rows == own, likelihood.NEGATIVE, scores[:, 1:])
    log_p = jax.nn.log_softmax(jnp.concatenate([scores[:, :1], others], axis=1), axis=1)[:, 0]
    return {"loss": over_examples(-log_p), "accuracy": over_examples(scores[:, 0] >= others.max(axis=1))}


# --- REALM ------------------------------------------------------------------------------------------------------------


def realm_loss(setting: Setting, params: Params, batch: Batch, index: Index, key: Array | None) -> Means:
    """−log Σ_z p(z|x) p(y|z,x) over the null document and the retrieved candidates (paper, section 3.3)."""
    found = retrieve(setting, params, batch, index, setting.candidates - 1)
    documents = take(index, found.rows)
    keys = dropout_keys(key, 2)
    scores = candidate_scores(setting, params, batch, documents, keys[0])
    log_p, right = candidate_words(setting, params, batch, documents, keys[1])
    valid = jnp.pad(found.valid, ((0, 0), (1, 0)), constant_values=setting.null_document)
    result = likelihood.masked_word_marginal(scores, log_p, batch["weights"], valid, setting.marginal)
    return realm_metrics(result, right, batch, found)


def realm_metrics(result: likelihood.Marginal, right: Array, batch: Batch, found: Candidates) -> Means:
    """What a REALM step reports; means over the examples of the batch.

    retrieval_utility: log p(y|x) − log p(y|null, x), nats. useful_candidates: share of examples whose best candidate
    beats the null document by more than a tenth of a nat. accuracy: pieces that the reader gets right beside the
    candidate of largest p(z|x). excluded: own passages dropped, per example.
    """
    prior = jnp.exp(result.log_prior)
    weights = batch["weights"].astype(jnp.float32)
    likeliest = result.log_prior.argmax(axis=1)
    right = jnp.take_along_axis(right, likeliest[:, None, None], axis=1)[:, 0] * weights
    gain = result.best_log_likelihood - result.null_log_likelihood
    return {
        "loss": result.loss,
        LOG_PERPLEXITY: Mean(-result.log_likelihood.sum(), weights.sum()),
        "accuracy": Mean(right.sum(), weights.sum()),
        "retrieval_utility": over_examples(result.log_likelihood - result.null_log_likelihood),
        "useful_candidates": over_examples(gain > 0.1),
        "best_candidate_gain": over_examples(gain),
        "null_probability": over_examples(prior[:, 0]),
        "prior_entropy": over_examples(-jnp.sum(prior * result.log_prior, axis=1)),
        "excluded": over_examples(found.excluded),
    }


# --- question answering -----------------------------------------------------------------------------------------------


def qa_loss(setting: Setting, params: Params, batch: Batch, index: Index, key: Array | None) -> Means:
    """Fine-tuning on what is retrieved: the paper's marginal over passages and spans, or ORQA's L_ret + L_read."""
    beam = question_depth(setting)
    reading, found = read_passages(setting, params, batch, index, key, beam, setting.qa_passages)
    answers = (batch["answers"], batch["answer_lengths"], setting.model.span_width)
    allowed, correct = find_answers(reading.joint, *answers)
    loss, log_likelihood = likelihood.answer_marginal(reading.scores, reading.span_scores, allowed, correct)
    has_answer = correct.any(axis=(2, 3))
    if setting.qa_objective == "orqa":
        beam_correct = beam_answers(setting, batch, index, found.rows)
        loss = likelihood.orqa_loss(found.scores, beam_correct, reading.scores, reading.span_scores, allowed, correct)
    prior, spans = likelihood.answer_log_probabilities(
        reading.scores, reading.span_scores, allowed, setting.qa_objective
    )
    final = prior[:, :, None, None] + spans
    flat = final.reshape(final.shape[0], -1)
    right = jnp.take_along_axis(correct.reshape(flat.shape), flat.argmax(axis=1)[:, None], axis=1)
    answered = has_answer.any(axis=1)
    return {
        "loss": loss,
        "accuracy": over_examples(right[:, 0]),
        "answer_in_passages": over_examples(answered),
        "log_likelihood": Mean(jnp.where(answered, log_likelihood, 0.0).sum(), answered.sum().astype(jnp.float32)),
    }


def positive_qa_loss(setting: Setting, params: Params, batch: Batch, index: Index, key: Array | None) -> Means:
    """Fine-tuning with one positive passage a question, which comes with the batch.

    The reader's term is −log p(correct span) among the spans of that passage; the retriever's is ORQA's L_ret over a
    beam of the index, whose passages are not read. `joint` of the batch: ids [batch, length]; see `positive_examples`.
    """
    keys = dropout_keys(key, 2)
    joint, answers = given_joint(batch), (batch["answers"], batch["answer_lengths"], setting.model.span_width)
    allowed, correct = find_answers(joint, *answers)
    spans = read_joint(setting, params, joint, keys[1])
    terms = likelihood.reader_terms(jnp.zeros(joint.lengths.shape), spans, allowed, correct)
    flat = jnp.where(allowed, spans, likelihood.NEGATIVE).reshape(len(spans), -1)
    right = jnp.take_along_axis(correct.reshape(flat.shape), flat.argmax(axis=1)[:, None], axis=1)
    found = {"accuracy": over_examples(right[:, 0]), "reader_loss": over_examples(terms)}
    if not setting.qa_words:
        beam, _ = question_beam(setting, params, batch, index, keys[0], question_depth(setting))
        hits = beam_answers(setting, batch, index, beam.rows)
        retriever = likelihood.retriever_terms(beam.scores, hits)
        terms += retriever
        found |= {"answer_in_beam": over_examples(hits.any(axis=1)), "retriever_loss": over_examples(retriever)}
    return {"loss": over_examples(terms)} | found


def given_joint(batch: Batch) -> Joint:
    """The joint layout that came with the batch, one passage a question: arrays [batch, 1, …]."""
    ids, lengths = batch["joint"].astype(jnp.int32)[:, None], batch["joint_length"][:, None]
    mask = token_mask(lengths, ids.shape[-1])
    is_passage = (jnp.arange(ids.shape[-1]) >= batch["query_length"][:, None, None]) & mask
    return Joint(ids, is_passage.astype(jnp.int32), mask, batch["body_start"][:, None], lengths)


# --- what a step needs of them ----------------------------------------------------------------------------------------


def over_examples(values: Array) -> Mean:
    """The mean of one value an example, [batch]."""
    return Mean(values.astype(jnp.float32).sum(), jnp.float32(values.shape[0]))


def reported(means: Means) -> dict[str, Array]:
    """The values of means; a perplexity is the exponential of one."""
    values = {name: mean.value for name, mean in means.items()}
    if LOG_PERPLEXITY in values:
        values["perplexity"] = jnp.exp(values.pop(LOG_PERPLEXITY))
    return values


@dataclasses.dataclass(frozen=True)
class Task:
    """A task by name: the parameters it trains (top-level keys), its loss, and whether it retrieves.

    encode, contrast: of a loss that compares every example with every other: the vectors of some examples, and the loss
    of all vectors and of the null document's (`null`). None where the losses of examples add up.
    """

    name: str
    trained: tuple[str, ...]
    loss: Loss
    retrieves: bool
    encode: Callable[[Params, Batch, Array | None], Any] | None = None
    null: Callable[[Params, Array | None], Any] | None = None
    contrast: Callable[[Any, Any], Means] | None = None

    def value(self, params: Params, batch: Batch, index: Any, key: Array | None) -> tuple[Array, dict[str, Array]]:
        """The loss of a whole batch, and everything that is reported of it."""
        values = reported(self.loss(params, batch, index, key))
        return values["loss"], values


def question_towers(setting: Setting) -> tuple[str, ...]:
    """The embedders that fine-tuning trains."""
    if setting.qa_words:
        return ()
    return setting.model.embedder_names if setting.qa_documents else setting.model.embedder_names[:1]


def make_task(name: str, setting: Setting) -> Task:
    """The task called `name`, one of `config.TASKS`."""
    towers = setting.model.embedder_names
    if name == "ict" and setting.ict_from_index:
        return Task(name, towers[:1], partial(retrieved_ict_loss, setting), True)
    if name == "ict":
        encode, null = partial(cloze_vectors, setting), partial(cloze_null, setting)
        return Task(name, towers, partial(ict_loss, setting), False, encode, null, partial(contrast, setting))
    qa_losses = {"marginal": qa_loss, "orqa": qa_loss, "positive": positive_qa_loss}
    table: dict[str, tuple[tuple[str, ...], Callable[..., Means], bool]] = {
        "mlm": (("reader",), mlm_loss, False),
        "closed_book": (("reader",), mlm_loss, False),
        "realm": ((*towers, "reader"), realm_loss, True),
        "qa": ((*question_towers(setting), "reader"), qa_losses[setting.qa_objective], True),
    }
    trained, loss, retrieves = table[name]
    return Task(name, trained, partial(loss, setting), retrieves)
