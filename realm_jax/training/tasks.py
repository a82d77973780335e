"""The four tasks: what each trains and the loss of one batch, as pure functions.

A loss has the form `loss(params, batch, index, key) -> (scalar, metrics)`; `index` is None where nothing is retrieved
and `key` None turns dropout off. Retrieval happens inside the loss (`retrieve` below), so a step is one program.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from realm_jax.index.exact import search
from realm_jax.models import likelihood
from realm_jax.models.inputs import Documents, Joint, contains, find_answers, join, null_documents
from realm_jax.models.realm import Params, Realm, flatten_joint

Array = jax.Array
Batch = dict[str, Array]
Loss = Callable[[Params, Batch, Any, Array | None], tuple[Array, dict[str, Array]]]


class Index(NamedTuple):
    """The corpus on the device: vectors [padded rows, projection] and the document rows they stand for."""

    vectors: Array
    documents: Documents


@dataclasses.dataclass(frozen=True)
class Setting:
    """Everything a loss needs beside its arrays; fixed for a run, so it is part of the compiled program."""

    model: Realm
    mesh: Mesh
    cls_id: int
    sep_id: int
    rows: int  # passages in the corpus, padding not counted
    candidates: int = 8  # the null document counted
    marginal: str = "example"
    retriever_gradient: bool = True
    search_block: int = 65_536
    qa_objective: str = "marginal"
    qa_beam: int = 64  # passages that the retriever's term of 'orqa' ranks
    qa_passages: int = 5  # passages that are read


def _keys(key: Array | None, count: int) -> list[Array | None]:
    return [None] * count if key is None else list(jax.random.split(key, count))


def take(index: Index, rows: Array) -> Documents:
    """The document rows of candidates. rows [...] int32 → ids [..., length]."""
    return Documents(*(part[rows] for part in index.documents))


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
    """Softmax of each sentence against all passages of the global batch (Lee et al. 2019, section 4)."""
    keys = _keys(key, 2)
    queries = setting.model.embed_queries(params, batch["query"], batch["query_length"], keys[0])
    documents = Documents(*(batch[f"document{part}"] for part in ("", "_length", "_title_length")))
    vectors = setting.model.embed_documents(params, documents, keys[1])
    log_p = jax.nn.log_softmax(queries @ vectors.T, axis=-1)
    loss = -jnp.diagonal(log_p).mean()
    right = log_p.argmax(axis=-1) == jnp.arange(log_p.shape[0])
    return loss, {"loss": loss, "accuracy": right.mean()}


# --- REALM ------------------------------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """Retrieved passages without the example's own. rows, valid [batch, k]; excluded [batch]: how many were dropped."""

    rows: Array
    valid: Array
    excluded: Array


def retrieve(setting: Setting, params: Params, batch: Batch, index: Index, count: int) -> Candidates:
    """The `count` best passages for each masked sentence, the example's own passage left out.

    Own is the same row (`own_row`, −1 for none) or a passage in which the unmasked sentence occurs. One more than
    `count` is searched; what is still excluded after that is marked invalid, never replaced by a second search.
    The search uses current parameters without dropout.
    """
    queries = setting.model.embed_queries(params, batch["query"], batch["query_length"])
    depth = min(count + 1, setting.rows)
    rows = search(setting.mesh, queries, index.vectors, setting.rows, depth, setting.search_block).rows
    found = contains(take(index, rows).ids, batch["sentence"], batch["sentence_length"])
    own = (rows == batch["own_row"][:, None]) | found
    order = jnp.argsort(own, axis=1, stable=True)[:, :count]
    pick = partial(jnp.take_along_axis, indices=order, axis=1)
    return Candidates(pick(rows), ~pick(own), own.sum(axis=1))


def candidate_scores(setting: Setting, params: Params, batch: Batch, documents: Documents, key: Array | None) -> Array:
    """Inner products with current parameters, null document first. documents.ids [batch, k, d] → [batch, 1 + k]."""
    keys = _keys(key, 3)
    queries = setting.model.embed_queries(params, batch["query"], batch["query_length"], keys[0])
    batch_size, count = documents.ids.shape[:2]
    flat = Documents(*(part.reshape(-1, *part.shape[2:]) for part in documents))
    vectors = setting.model.embed_documents(params, flat, keys[1]).reshape(batch_size, count, -1)
    null = setting.model.embed_documents(params, null_documents(1, (setting.cls_id, setting.sep_id)), keys[2])
    scores = jnp.einsum("bd,bkd->bk", queries, vectors)
    return jnp.concatenate([queries @ null.T, scores], axis=1)


def candidate_words(
    setting: Setting, params: Params, batch: Batch, documents: Documents, key: Array | None
) -> tuple[Array, Array]:
    """log p(y_j|z,x) of every target and the likeliest pieces, null document first.

    documents.ids [batch, k, d] → ([batch, 1 + k, m] float32, [batch, 1 + k, m] int32). The null document's joint is
    short, so it is read on its own and not at the passages' length.
    """
    keys = _keys(key, 2)
    batch_size, count = documents.ids.shape[:2]
    null = null_documents(batch_size, (setting.cls_id, setting.sep_id))
    null = Documents(*(part[:, None] for part in null))

    def read(candidates: Documents, part_key: Array | None) -> tuple[Array, Array]:
        repeats = candidates.ids.shape[1]
        joint = flatten_joint(join(batch["query"], batch["query_length"], candidates))
        positions = jnp.repeat(batch["positions"], repeats, axis=0)
        words = setting.model.read_words(params, joint, positions, part_key)
        targets = jnp.repeat(batch["targets"], repeats, axis=0)
        log_p = jnp.take_along_axis(words, targets[..., None], axis=-1)[..., 0]
        shape = (batch_size, repeats, -1)
        return log_p.reshape(shape), words.argmax(axis=-1).reshape(shape)

    parts = [read(null, keys[0]), read(documents, keys[1])]
    return tuple(jnp.concatenate(pair, axis=1) for pair in zip(*parts, strict=True))  # type: ignore[return-value]


def realm_loss(setting: Setting, params: Params, batch: Batch, index: Index, key: Array | None) -> tuple[Array, dict]:
    """−log Σ_z p(z|x) p(y|z,x) over the null document and the retrieved candidates (paper, section 3.3)."""
    found = retrieve(setting, params, batch, index, setting.candidates - 1)
    documents = take(index, found.rows)
    keys = _keys(key, 2)
    scores = candidate_scores(setting, params, batch, documents, keys[0])
    if not setting.retriever_gradient:
        scores = jax.lax.stop_gradient(scores)
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


class Reading(NamedTuple):
    """Passages read for a question. rows, scores [batch, k]; joint and span_scores of [batch, k, length(, width)]."""

    rows: Array
    scores: Array
    joint: Joint
    span_scores: Array


def read_passages(
    setting: Setting, params: Params, batch: Batch, index: Index, key: Array | None, beam: int, passages: int
) -> tuple[Reading, Array, Array]:
    """Retrieve a beam with the frozen vectors and read its first passages.

    Returns the reading, the beam's rows [batch, beam] and scores [batch, beam]. Gradient reaches the query embedder
    through the scores and the reader through the spans.
    """
    keys = _keys(key, 2)
    queries = setting.model.embed_queries(params, batch["query"], batch["query_length"], keys[0])
    rows = search(
        setting.mesh, queries, index.vectors, setting.rows, min(beam, setting.rows), setting.search_block
    ).rows
    vectors = index.vectors[rows].astype(jnp.float32)
    scores = jnp.einsum("bd,bkd->bk", queries, jax.lax.stop_gradient(vectors))
    read_rows = rows[:, :passages]
    joint = join(batch["query"], batch["query_length"], take(index, read_rows))
    spans = setting.model.read_spans(params, flatten_joint(joint), keys[1])
    spans = spans.reshape(*joint.ids.shape, setting.model.span_width)
    return Reading(read_rows, scores[:, :passages], joint, spans), rows, scores


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
    table = {
        "mlm": (("reader",), mlm_loss, False),
        "ict": (towers, ict_loss, False),
        "realm": ((*towers, "reader"), realm_loss, True),
        "qa": ((towers[0], "reader"), qa_loss, True),
    }
    trained, loss, retrieves = table[name]
    return Task(name, trained, partial(loss, setting), retrieves)
