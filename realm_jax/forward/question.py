"""A question: retrieve, and read it with the first passages. `read_question` first."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from realm_jax.forward.context import Batch, Index, StepContext, dropout_keys, reader_query
from realm_jax.forward.reading import read_spans, unplaced_pieces
from realm_jax.forward.search import embed_candidates, gather_documents, question_beam
from realm_jax.models.inputs import ReaderInput, reader_inputs
from realm_jax.models.likelihood import NEGATIVE, Mean, answer_log_probabilities
from realm_jax.models.realm import Params
from realm_jax.retrieval.fusion import FusedRanking

Array = jax.Array


class QuestionReading(NamedTuple):
    """A question read with the first k passages of its beam.

    rows, scores [batch, k]; joint and span_scores of [batch, k, length(, width)]. beam: of all that was retrieved;
    allowed, correct [batch, k, length, width]: the spans that may be answers, and those that are one of the batch's
    answers; prior [batch, k]: log p(z|x); spans, like `allowed`: log p(span|z,x). unplaced: as of `MaskedReading`.
    """

    rows: Array
    scores: Array
    joint: ReaderInput
    span_scores: Array
    beam: FusedRanking
    allowed: Array
    correct: Array
    prior: Array
    spans: Array
    unplaced: Mean


def read_question(
    context: StepContext, params: Params, batch: Batch, index: Index, key: Array | None, beam: int, passages: int
) -> QuestionReading:
    """Retrieve a beam for questions with the stored vectors and read its first `passages`. Without answers in the batch
    no span is correct.

    Gradient reaches the query embedder through the scores, with `qa_documents` the document embedder through those of
    the passages that are read, and the reader through the spans. With `qa_words` the reader alone learns.
    """
    keys = dropout_keys(key, 3 if context.qa_documents else 2)
    found, queries = question_beam(context, params, batch, index, keys[0], beam)
    scores, rows = found.scores, found.rows[:, :passages]
    if context.qa_documents and context.rerank is None:
        documents, places = gather_documents(index, rows), context.places(len(rows)).documents
        taken = embed_candidates(context, params, documents, keys[2], places)
        fresh = jnp.einsum("bd,bkd->bk", queries, taken)
        fresh = jnp.where(rows >= 0, fresh, NEGATIVE)
        scores = jnp.concatenate([fresh, scores[:, passages:]], axis=1)
    joint = reader_inputs(*reader_query(batch), gather_documents(index, rows), context.qa_titles)
    read_scores = scores[:, :passages]
    nothing = jnp.zeros((len(batch["query"]), 1, 1), jnp.int32)
    answers = batch.get("answers", nothing), batch.get("answer_lengths", nothing[:, :, 0])
    read = read_spans(context, params, joint, answers, keys[1])
    prior, log_p = answer_log_probabilities(read_scores, read.scores, read.allowed, context.qa_objective)
    found, unplaced = found._replace(scores=scores), unplaced_of_question(context, batch, index, rows, joint)
    return QuestionReading(
        rows, read_scores, joint, read.scores, found, read.allowed, read.correct, prior, log_p, unplaced
    )


def unplaced_of_question(context: StepContext, batch: Batch, index: Index, rows: Array, joint: ReaderInput) -> Mean:
    """`unplaced_pieces` of questions, of their passages where these are embedded, and of both read together."""
    places = context.places(len(rows))
    packed = [(context.model.query_lengths(batch["query_length"]), places.queries), (joint.lengths, places.joints)]
    if context.qa_documents:
        packed.append((context.model.document_lengths(gather_documents(index, rows)), places.documents))
    return unplaced_pieces(context, packed, 2 * joint.ids.shape[-1])  # whatever templates add
