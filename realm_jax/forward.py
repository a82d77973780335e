"""The two forward passes: of a masked sentence, and of a question. Training, evaluation and inspection share them.

Pure functions of (setting, parameters, batch, index); `key` None turns dropout off. A loss takes what they return, and
so do answers, the report and `realm inspect`. What retrieval does: `retrieval/search.py`. Read next:
`models/likelihood.py` for the probabilities, `tasks/realm.py` and `tasks/qa.py` for the losses.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from realm_jax.models.inputs import Documents, Joint, find_answers, join, null_documents
from realm_jax.models.likelihood import NEGATIVE, answer_log_probabilities
from realm_jax.models.realm import Params, flatten_joint
from realm_jax.retrieval.fusion import Fused, ranks_of
from realm_jax.retrieval.search import (
    Batch,
    Candidates,
    Index,
    Rerank,
    Setting,
    dropout_keys,
    embed_null,
    embed_taken,
    retrieve,
    search_by,
    take,
    take_for_reader,
)  # fmt: skip

Array = jax.Array


# --- a masked sentence ------------------------------------------------------------------------------------------------


class MaskedReading(NamedTuple):
    """A masked sentence read beside each of its candidates, the null document first and then k passages.

    found: the passages; valid, scores [batch, 1 + k]: whether a candidate takes part, and its inner product with
    current parameters; log_p, right [batch, 1 + k, m]: log p(y_j|z,x) of each target, and whether no piece is likelier.
    """

    found: Candidates
    valid: Array
    scores: Array
    log_p: Array
    right: Array


def read_masked(setting: Setting, params: Params, batch: Batch, index: Index, key: Array | None) -> MaskedReading:
    """Retrieve for masked sentences, score the candidates, and read the sentences beside them."""
    found = retrieve(setting, params, batch, index, setting.candidates - 1)
    documents = take(index, found.rows)
    keys = dropout_keys(key, 2)
    scores = candidate_scores(setting, params, batch, documents, keys[0])
    log_p, right = candidate_words(setting, params, batch, take_for_reader(index, found.rows), keys[1])
    valid = jnp.pad(found.valid, ((0, 0), (1, 0)), constant_values=setting.null_document)
    return MaskedReading(found, valid, scores, log_p, right)


def candidate_scores(setting: Setting, params: Params, batch: Batch, documents: Documents, key: Array | None) -> Array:
    """Inner products with current parameters, null document first. documents.ids [batch, k, d] → [batch, 1 + k]."""
    keys = dropout_keys(key, 3)
    queries = setting.model.embed_queries(params, batch["query"], batch["query_length"], keys[0])
    vectors = embed_taken(setting, params, documents, keys[1])
    null = embed_null(setting, params, keys[2])
    scores = jnp.einsum("bd,bkd->bk", queries, vectors)
    return jnp.concatenate([queries @ null.T, scores], axis=1)


def candidate_words(
    setting: Setting, params: Params, batch: Batch, documents: Documents, key: Array | None
) -> tuple[Array, Array]:
    """`read_targets` with the null document first: [batch, 1 + k, m] both.

    The null document's joint is short, so it is read on its own and not at the passages' length.
    """
    keys = dropout_keys(key, 2)
    null = read_targets(setting, params, batch, null_candidates(setting, batch), keys[0])
    parts = [null, read_targets(setting, params, batch, documents, keys[1])]
    return tuple(jnp.concatenate(pair, axis=1) for pair in zip(*parts, strict=True))  # type: ignore[return-value]


def read_targets(
    setting: Setting, params: Params, batch: Batch, documents: Documents, key: Array | None = None
) -> tuple[Array, Array]:
    """log p(y_j|z,x) of every target, and whether no piece is likelier, beside each passage.

    documents.ids [batch, k, d] → ([batch, k, m] float32, [batch, k, m] bool).
    """
    joint, positions = masked_inputs(batch, documents)
    targets = jnp.repeat(batch["targets"], documents.ids.shape[1], axis=0)
    log_p, right = setting.model.read_targets(params, joint, positions, targets, key)
    shape = (*documents.ids.shape[:2], -1)
    return log_p.reshape(shape), right.reshape(shape)


def masked_inputs(batch: Batch, documents: Documents) -> tuple[Joint, Array]:
    """Masked texts beside passages [batch, k, d] as the reader takes them: joint arrays, positions [batch · k, …]."""
    joint = flatten_joint(join(*reader_query(batch), documents))
    return joint, jnp.repeat(batch["positions"], documents.ids.shape[1], axis=0)


def reader_query(batch: Batch) -> tuple[Array, Array]:
    """What the reader reads of a batch's texts: ids [batch, q] and lengths [batch], of the reader's tokens where it has
    its own (`reader_query`), else those that search."""
    name = "reader_query" if "reader_query" in batch else "query"
    return batch[name], batch[f"{name}_length"]


def null_candidates(setting: Setting, batch: Batch) -> Documents:
    """The null document as the one candidate of each text of a batch, for the reader: [batch, 1, …]."""
    null = null_documents(len(batch["query"]), setting.reader_special or (setting.cls_id, setting.sep_id))
    return Documents(*(part[:, None] for part in null))


def given_documents(batch: Batch) -> Documents:
    """The passages that came with a batch, [batch, …]."""
    return Documents(*(batch[f"document{part}"] for part in ("", "_length", "_title_length")))


def given_candidates(batch: Batch) -> Documents:
    """The passages that came with a batch, each the one candidate of its text: [batch, 1, …]."""
    return Documents(*(part[:, None] for part in given_documents(batch)))


# --- a question -------------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """Passages read for a question. rows, scores [batch, k]; joint and span_scores of [batch, k, length(, width)]."""

    rows: Array
    scores: Array
    joint: Joint
    span_scores: Array


class QuestionReading(NamedTuple):
    """A question read beside the first passages of its beam.

    beam: of all that was retrieved; allowed, correct [batch, k, length, width]: the spans that may be answers, and
    those that are one of the batch's answers; prior [batch, k]: log p(z|x); spans, like `allowed`: log p(span|z,x).
    """

    reading: Reading
    beam: Fused
    allowed: Array
    correct: Array
    prior: Array
    spans: Array


def read_question(
    setting: Setting, params: Params, batch: Batch, index: Index, key: Array | None, beam: int, passages: int
) -> QuestionReading:
    """Retrieve a beam for questions and read its first `passages`. Without answers in the batch no span is correct."""
    reading, found = read_passages(setting, params, batch, index, key, beam, passages)
    nothing = jnp.zeros((len(batch["query"]), 1, 1), jnp.int32)
    answers = batch.get("answers", nothing), batch.get("answer_lengths", nothing[:, :, 0])
    allowed, correct = find_answers(reading.joint, *answers, setting.model.span_width)
    prior, spans = answer_log_probabilities(reading.scores, reading.span_scores, allowed, setting.qa_objective)
    return QuestionReading(reading, found, allowed, correct, prior, spans)


def question_beam(
    setting: Setting, params: Params, batch: Batch, index: Index, key: Array | None, beam: int
) -> tuple[Fused, Array | None]:
    """The best passages of each question by `qa_search` and `rerank`: rows, scores, ranks [batch, beam]; and queries.

    Scores are inner products with the stored vectors, and gradient reaches the query embedder alone. BM25's list comes
    with the batch, as `word_rows` and `word_scores`; without vectors its scores are all there is, and no queries.
    """
    if setting.rerank is None:
        return searched(setting, params, batch, index, key, beam)
    found, queries = searched(setting, params, batch, index, key, max(beam, setting.rerank.passages))
    found = reranked(setting, setting.rerank, params, batch, index, found)
    return Fused(*(part[:, :beam] for part in found)), queries


def searched(
    setting: Setting, params: Params, batch: Batch, index: Index, key: Array | None, beam: int
) -> tuple[Fused, Array | None]:
    """`question_beam` in the order of the search."""
    depth = min(beam, setting.rows)
    if index.vectors is None:
        rows = batch["word_rows"][:, :depth]
        scores = jnp.where(rows >= 0, batch["word_scores"][:, :depth], NEGATIVE)
        return Fused(rows, scores, ranks_of("bm25", jnp, rows)), None
    queries = setting.model.embed_queries(params, batch["query"], batch["query_length"], key)
    return search_by(setting, setting.qa_search, queries, batch, index, depth), queries


def reranked(setting: Setting, rerank: Rerank, params: Params, batch: Batch, index: Index, found: Fused) -> Fused:
    """What was found, its first passages by `scores_by_place` and what is added to those. A passage has its own score
    and what is added to it, so where nothing is added all stays as it was."""
    rows, scores, ranks = (part[:, : rerank.passages] for part in found)
    added = rerank.added(setting, params, batch, take_for_reader(index, rows))
    order = jnp.argsort(-(scores_by_place(scores) + added), axis=1, stable=True)
    first = rows, scores + added, ranks
    picked = (jnp.take_along_axis(part, order.reshape(order.shape + (1,) * (part.ndim - 2)), axis=1) for part in first)
    rest = (part[:, rerank.passages :] for part in found)
    return Fused(*(jnp.concatenate(parts, axis=1) for parts in zip(picked, rest, strict=True)))


def scores_by_place(scores: Array) -> Array:
    """Scores that fall from place to place: those of a list [batch, k], sorted. A search by vectors has them so; in a
    list that words had a part in, the first passage need not have the largest inner product."""
    return -jnp.sort(-scores, axis=1)


def read_passages(
    setting: Setting, params: Params, batch: Batch, index: Index, key: Array | None, beam: int, passages: int
) -> tuple[Reading, Fused]:
    """Retrieve a beam with the stored vectors and read its first passages.

    Returns the reading and the whole beam. Gradient reaches the query embedder
    through the scores, with `qa_documents` the document embedder through those of the passages that are read, and the
    reader through the spans. With `qa_words` the reader alone learns.
    """
    keys = dropout_keys(key, 3 if setting.qa_documents else 2)
    found, queries = question_beam(setting, params, batch, index, keys[0], beam)
    scores, read_rows = found.scores, found.rows[:, :passages]
    if setting.qa_documents and setting.rerank is None:
        taken = embed_taken(setting, params, take(index, read_rows), keys[2])
        fresh = jnp.einsum("bd,bkd->bk", queries, taken)
        fresh = jnp.where(read_rows >= 0, fresh, NEGATIVE)
        scores = jnp.concatenate([fresh, scores[:, passages:]], axis=1)
    joint = join(*reader_query(batch), take_for_reader(index, read_rows), setting.qa_titles)
    spans = read_joint(setting, params, joint, keys[1])
    return Reading(read_rows, scores[:, :passages], joint, spans), found._replace(scores=scores)


def read_joint(setting: Setting, params: Params, joint: Joint, key: Array | None) -> Array:
    """Span scores of joint arrays [batch, k, length] → [batch, k, length, span_width] float32."""
    spans = setting.model.read_spans(params, flatten_joint(joint), key)
    return spans.reshape(*joint.ids.shape, setting.model.span_width)
