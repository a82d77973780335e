"""The two forward passes, of a masked sentence and of a question, shared by training, evaluation and inspection.

Pure functions of (context, parameters, batch, index); `key` None turns dropout off. Losses, answers, the report and
`realm inspect` are computed from what they return. What retrieval does: `retrieval/search.py`. Read next:
`models/likelihood.py` for the probabilities, `tasks/realm.py` and `tasks/qa.py` for the losses.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from realm_jax.models.inputs import Documents, ReaderInput, answer_spans, null_documents, reader_inputs
from realm_jax.models.likelihood import NEGATIVE, answer_log_probabilities
from realm_jax.models.realm import Params, flatten_passages
from realm_jax.retrieval.fusion import FusedRanking, ranks_of
from realm_jax.retrieval.search import (
    Batch,
    Candidates,
    Index,
    Rerank,
    StepContext,
    dropout_keys,
    embed_candidates,
    embed_null,
    gather_documents,
    retrieve,
    search_passages,
    take_for_reader,
)  # fmt: skip

Array = jax.Array


# --- a masked sentence ------------------------------------------------------------------------------------------------


class MaskedReading(NamedTuple):
    """A masked sentence read with each of its candidates, the null document first and then k passages.

    found: the passages; valid, scores [batch, 1 + k]: whether a candidate takes part, and its inner product with
    current parameters; log_p, right [batch, 1 + k, m]: log p(y_j|z,x) of each target, and whether no piece is likelier.
    """

    found: Candidates
    valid: Array
    scores: Array
    log_p: Array
    right: Array


def read_masked(context: StepContext, params: Params, batch: Batch, index: Index, key: Array | None) -> MaskedReading:
    """Retrieve for masked sentences, score the candidates, and read the sentences with them."""
    found = retrieve(context, params, batch, index, context.candidates - 1)
    documents = gather_documents(index, found.rows)
    keys = dropout_keys(key, 2)
    scores = candidate_scores(context, params, batch, documents, keys[0])
    log_p, right = read_candidates(context, params, batch, take_for_reader(index, found.rows), keys[1])
    valid = jnp.pad(found.valid, ((0, 0), (1, 0)), constant_values=context.null_document)
    return MaskedReading(found, valid, scores, log_p, right)


def candidate_scores(
    context: StepContext, params: Params, batch: Batch, documents: Documents, key: Array | None
) -> Array:
    """Inner products with current parameters, null document first. documents.ids [batch, k, d] → [batch, 1 + k]."""
    keys = dropout_keys(key, 3)
    queries = context.model.embed_queries(params, batch["query"], batch["query_length"], keys[0])
    vectors = embed_candidates(context, params, documents, keys[1])
    null = embed_null(context, params, keys[2])
    scores = jnp.einsum("bd,bkd->bk", queries, vectors)
    return jnp.concatenate([queries @ null.T, scores], axis=1)


def read_candidates(
    context: StepContext, params: Params, batch: Batch, documents: Documents, key: Array | None
) -> tuple[Array, Array]:
    """`read_targets` with the null document first: [batch, 1 + k, m] both.

    The null document's joint is short, so it is read on its own and not at the passages' length.
    """
    keys = dropout_keys(key, 2)
    null = read_targets(context, params, batch, null_candidates(context, batch), keys[0])
    parts = [null, read_targets(context, params, batch, documents, keys[1])]
    return tuple(jnp.concatenate(pair, axis=1) for pair in zip(*parts, strict=True))  # type: ignore[return-value]


def read_targets(
    context: StepContext, params: Params, batch: Batch, documents: Documents, key: Array | None = None
) -> tuple[Array, Array]:
    """log p(y_j|z,x) of every target, and whether no piece is likelier, given each passage.

    documents.ids [batch, k, d] → ([batch, k, m] float32, [batch, k, m] bool).
    """
    joint, positions = masked_inputs(batch, documents)
    targets = jnp.repeat(batch["targets"], documents.ids.shape[1], axis=0)
    log_p, right = context.model.reader.read_targets(params, joint, positions, targets, key)
    shape = (*documents.ids.shape[:2], -1)
    return log_p.reshape(shape), right.reshape(shape)


def masked_inputs(batch: Batch, documents: Documents) -> tuple[ReaderInput, Array]:
    """Masked texts joined with passages [batch, k, d] for the reader: joint arrays, positions [batch · k, …]."""
    joint = flatten_passages(reader_inputs(*reader_query(batch), documents))
    return joint, jnp.repeat(batch["positions"], documents.ids.shape[1], axis=0)


def reader_query(batch: Batch) -> tuple[Array, Array]:
    """What the reader reads of a batch's texts: ids [batch, q] and lengths [batch], of the reader's tokens where it has
    its own (`reader_query`), else those that search."""
    name = "reader_query" if "reader_query" in batch else "query"
    return batch[name], batch[f"{name}_length"]


def null_candidates(context: StepContext, batch: Batch) -> Documents:
    """The null document as the one candidate of each text of a batch, for the reader: [batch, 1, …]."""
    null = null_documents(len(batch["query"]), context.reader_special or (context.cls_id, context.sep_id))
    return Documents(*(part[:, None] for part in null))


def batch_passages(batch: Batch) -> Documents:
    """The passages that came with a batch, [batch, …]."""
    return Documents(*(batch[f"document{part}"] for part in ("", "_length", "_title_length")))


def batch_candidates(batch: Batch) -> Documents:
    """The passages that came with a batch, each the one candidate of its text: [batch, 1, …]."""
    return Documents(*(part[:, None] for part in batch_passages(batch)))


# --- a question -------------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """Passages read for a question. rows, scores [batch, k]; joint and span_scores of [batch, k, length(, width)]."""

    rows: Array
    scores: Array
    joint: ReaderInput
    span_scores: Array


class QuestionReading(NamedTuple):
    """A question read with the first passages of its beam.

    beam: of all that was retrieved; allowed, correct [batch, k, length, width]: the spans that may be answers, and
    those that are one of the batch's answers; prior [batch, k]: log p(z|x); spans, like `allowed`: log p(span|z,x).
    """

    reading: Reading
    beam: FusedRanking
    allowed: Array
    correct: Array
    prior: Array
    spans: Array


def read_question(
    context: StepContext, params: Params, batch: Batch, index: Index, key: Array | None, beam: int, passages: int
) -> QuestionReading:
    """Retrieve a beam for questions and read its first `passages`. Without answers in the batch no span is correct."""
    reading, found = read_passages(context, params, batch, index, key, beam, passages)
    nothing = jnp.zeros((len(batch["query"]), 1, 1), jnp.int32)
    answers = batch.get("answers", nothing), batch.get("answer_lengths", nothing[:, :, 0])
    allowed, correct = answer_spans(reading.joint, *answers, context.model.reader.span_width)
    prior, spans = answer_log_probabilities(reading.scores, reading.span_scores, allowed, context.qa_objective)
    return QuestionReading(reading, found, allowed, correct, prior, spans)


def question_beam(
    context: StepContext, params: Params, batch: Batch, index: Index, key: Array | None, beam: int
) -> tuple[FusedRanking, Array | None]:
    """The best passages of each question by `qa_search` and `rerank`: rows, scores, ranks [batch, beam]; and queries.

    Scores are inner products with the stored vectors, and gradient reaches the query embedder alone. BM25's list comes
    with the batch, as `bm25_rows` and `bm25_scores`; without vectors its scores are all there is, and no queries.
    """
    if context.rerank is None:
        return searched(context, params, batch, index, key, beam)
    found, queries = searched(context, params, batch, index, key, max(beam, context.rerank.passages))
    found = reranked(context, context.rerank, params, batch, index, found)
    return FusedRanking(*(part[:, :beam] for part in found)), queries


def searched(
    context: StepContext, params: Params, batch: Batch, index: Index, key: Array | None, beam: int
) -> tuple[FusedRanking, Array | None]:
    """`question_beam` in the order of the search."""
    depth = min(beam, context.rows)
    if index.vectors is None:
        rows = batch["bm25_rows"][:, :depth]
        scores = jnp.where(rows >= 0, batch["bm25_scores"][:, :depth], NEGATIVE)
        return FusedRanking(rows, scores, ranks_of("bm25", jnp, rows)), None
    queries = context.model.embed_queries(params, batch["query"], batch["query_length"], key)
    return search_passages(context, context.qa_search, queries, batch, index, depth), queries


def reranked(
    context: StepContext, rerank: Rerank, params: Params, batch: Batch, index: Index, found: FusedRanking
) -> FusedRanking:
    """What was found, its first passages by `scores_by_place` and what is added to those. A passage has its own score
    and what is added to it, so where nothing is added all stays as it was."""
    rows, scores, ranks = (part[:, : rerank.passages] for part in found)
    added = rerank.added(context, params, batch, take_for_reader(index, rows))
    order = jnp.argsort(-(scores_by_place(scores) + added), axis=1, stable=True)
    first = rows, scores + added, ranks
    picked = (jnp.take_along_axis(part, order.reshape(order.shape + (1,) * (part.ndim - 2)), axis=1) for part in first)
    rest = (part[:, rerank.passages :] for part in found)
    return FusedRanking(*(jnp.concatenate(parts, axis=1) for parts in zip(picked, rest, strict=True)))


def scores_by_place(scores: Array) -> Array:
    """Scores that fall from place to place: those of a list [batch, k], sorted. A search by vectors has them so; in a
    list that words had a part in, the first passage need not have the largest inner product."""
    return -jnp.sort(-scores, axis=1)


def read_passages(
    context: StepContext, params: Params, batch: Batch, index: Index, key: Array | None, beam: int, passages: int
) -> tuple[Reading, FusedRanking]:
    """Retrieve a beam with the stored vectors and read its first passages.

    Returns the reading and the whole beam. Gradient reaches the query embedder
    through the scores, with `qa_documents` the document embedder through those of the passages that are read, and the
    reader through the spans. With `qa_words` the reader alone learns.
    """
    keys = dropout_keys(key, 3 if context.qa_documents else 2)
    found, queries = question_beam(context, params, batch, index, keys[0], beam)
    scores, read_rows = found.scores, found.rows[:, :passages]
    if context.qa_documents and context.rerank is None:
        taken = embed_candidates(context, params, gather_documents(index, read_rows), keys[2])
        fresh = jnp.einsum("bd,bkd->bk", queries, taken)
        fresh = jnp.where(read_rows >= 0, fresh, NEGATIVE)
        scores = jnp.concatenate([fresh, scores[:, passages:]], axis=1)
    joint = reader_inputs(*reader_query(batch), take_for_reader(index, read_rows), context.qa_titles)
    spans = score_spans(context, params, joint, keys[1])
    return Reading(read_rows, scores[:, :passages], joint, spans), found._replace(scores=scores)


def score_spans(context: StepContext, params: Params, joint: ReaderInput, key: Array | None) -> Array:
    """Span scores of joint arrays [batch, k, length] → [batch, k, length, span_width] float32."""
    spans = context.model.reader.read_spans(params, flatten_passages(joint), key)
    return spans.reshape(*joint.ids.shape, context.model.reader.span_width)
