"""A masked sentence: retrieve, score, read it with each candidate. `read_masked` first."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from realm_jax.forward.context import Batch, Index, StepContext, dropout_keys, reader_query
from realm_jax.forward.reading import SpanReading, read_spans, unplaced_pieces
from realm_jax.forward.search import Candidates, candidate_scores, gather_documents, retrieve
from realm_jax.models import likelihood
from realm_jax.models.inputs import Documents, ReaderInput, has_answer_span, null_documents, reader_inputs
from realm_jax.models.likelihood import Mean
from realm_jax.models.realm import Params, flatten_passages

POINTED = 3  # candidates read to point at a hidden span: with more, reading takes nearly all of a step
Array = jax.Array


class MaskedReading(NamedTuple):
    """A masked sentence read with each of its candidates, the null document first and then k passages.

    found: the passages; valid, scores [batch, 1 + k]: whether a candidate takes part, and its inner product with
    current parameters; log_p, right [batch, 1 + k, m]: log p(y_j|z,x) of each target, and whether no piece is likelier.
    unplaced: the share of the pieces of what is read and embedded for which packing had no place.
    """

    found: Candidates
    valid: Array
    scores: Array
    log_p: Array
    right: Array
    unplaced: Mean


def read_masked(context: StepContext, params: Params, batch: Batch, index: Index, key: Array | None) -> MaskedReading:
    """Retrieve for masked sentences, score the candidates, and read the sentences with them."""
    found = retrieve(context, params, batch, index, context.candidates - 1)
    documents = gather_documents(index, found.rows)
    keys = dropout_keys(key, 2)
    stored = found.rows if context.frozen_documents else None
    scores = candidate_scores(context, params, batch, documents, keys[0], index, stored)
    if context.points:
        rows = jnp.where(found.valid, found.rows, -1)  # the own passage would take the place of another
        read = point_at_targets(context, params, batch, gather_documents(index, rows), keys[1])
    else:
        read = read_candidates(context, params, batch, documents, keys[1])
    places, embedded = context.places(len(found.rows)), context.model.document_lengths(documents)
    packed = [
        (context.model.query_lengths(batch["query_length"]), places.queries),
        (read.lengths, places.joints),
        *([] if context.points else [(reader_query(batch)[1] + 1, places.nulls)]),
        *([] if context.frozen_documents else [(embedded, places.documents)]),
    ]
    longest = 2 * (batch["query"].shape[1] + documents.ids.shape[-1])  # whatever templates add
    valid = jnp.pad(found.valid, ((0, 0), (1, 0)), constant_values=context.null_document)
    return MaskedReading(found, valid, scores, read.log_p, read.right, unplaced_pieces(context, packed, longest))


class TargetsRead(NamedTuple):
    """log_p, right [batch, 1 + k, m]: as of `MaskedReading`. lengths [batch, n]: of the joints of passages that were
    read."""

    log_p: Array
    right: Array
    lengths: Array


def read_candidates(
    context: StepContext, params: Params, batch: Batch, documents: Documents, key: Array | None
) -> TargetsRead:
    """`read_targets` with the null document first.

    The null document's joint is short, so it is read on its own and not at the passages' length.
    """
    keys, places = dropout_keys(key, 2), context.places(len(documents.ids))
    null = read_targets(context, params, batch, null_candidates(context, batch), keys[0], places.nulls)
    parts = [null, read_targets(context, params, batch, documents, keys[1], places.joints)]
    log_p, right = (jnp.concatenate(pair, axis=1) for pair in zip(*parts, strict=True))
    return TargetsRead(log_p, right, reader_inputs(*reader_query(batch), documents).lengths)


def read_targets(
    context: StepContext, params: Params, batch: Batch, documents: Documents, key: Array | None = None, places: int = 0
) -> tuple[Array, Array]:
    """log p(y_j|z,x) of every target, and whether no piece is likelier, given each passage.

    documents.ids [batch, k, d] → ([batch, k, m] float32, [batch, k, m] bool). places: as of `PackedPlaces`.
    """
    joint, positions = masked_inputs(batch, documents)
    targets = jnp.repeat(batch["targets"], documents.ids.shape[1], axis=0)
    log_p, right = context.model.reader.read_targets(params, joint, positions, targets, key, places)
    shape = (*documents.ids.shape[:2], -1)
    return log_p.reshape(shape), right.reshape(shape)


def masked_inputs(batch: Batch, documents: Documents) -> tuple[ReaderInput, Array]:
    """Masked texts joined with passages [batch, k, d] for the reader: joint arrays, positions [batch · k, …]."""
    joint = flatten_passages(reader_inputs(*reader_query(batch), documents))
    return joint, jnp.repeat(batch["positions"], documents.ids.shape[1], axis=0)


def null_candidates(context: StepContext, batch: Batch) -> Documents:
    """The null document as the one candidate of each text of a batch, for the reader: [batch, 1, …]."""
    null = null_documents(len(batch["query"]), (context.cls_id, context.sep_id))
    return Documents(*(part[:, None] for part in null))


def point_at_targets(
    context: StepContext, params: Params, batch: Batch, documents: Documents, key: Array | None = None
) -> TargetsRead:
    """As `read_candidates`, by pointing at the hidden span in each passage instead of predicting its words.

    log p(y|z,x) stands in the place of the first piece, and 0 in the others; `right` is the same for all pieces. The
    null document has nothing to point at. Only POINTED passages are read, those that hold the span first: all others
    leave it to be guessed, as the null document does. A span of more pieces than `span_width` is found nowhere.
    """
    holds = has_answer_span(documents, *hidden_span(batch), context.model.reader.span_width)
    order = jnp.argsort(~holds, axis=1, stable=True)[:, :POINTED]
    spans = masked_spans(context, params, batch, _picked(documents, order), key)
    log_p, right = likelihood.pointing(spans.scores, spans.allowed, spans.correct)
    examples, shape = jnp.arange(len(order))[:, None], (len(order), 1 + holds.shape[1])
    log_p = jnp.full(shape, likelihood.UNSEEN).at[examples, 1 + order].set(log_p)
    right = jnp.zeros(shape, bool).at[examples, 1 + order].set(right)
    is_first = jnp.arange(batch["targets"].shape[1]) == 0
    log_p = jnp.where(is_first, log_p[..., None], 0.0)
    right = jnp.broadcast_to(right[..., None], (*shape, is_first.size))
    return TargetsRead(log_p, right, spans.joint.lengths)


def _picked(documents: Documents, places: Array) -> Documents:
    """Some of each example's passages: [batch, k, …] and places [batch, n] → [batch, n, …]."""
    return Documents(*(part[jnp.arange(len(places))[:, None], places] for part in documents))


def hidden_span(batch: Batch) -> tuple[Array, Array]:
    """What is hidden in masked texts, as the one answer of each: pieces [batch, 1, m] and their number [batch, 1]."""
    return batch["targets"][:, None], batch["weights"].sum(axis=1, keepdims=True).astype(jnp.int32)


def masked_spans(
    context: StepContext, params: Params, batch: Batch, documents: Documents, key: Array | None = None
) -> SpanReading:
    """Read masked texts with passages [batch, k, d], titles too, to point at what is hidden."""
    joint = reader_inputs(*reader_query(batch), documents, titles=True)
    return read_spans(context, params, joint, hidden_span(batch), key)
