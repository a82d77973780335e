"""The forward pass of a step: retrieve, score, read; of a masked sentence (`read_masked`) and of a question
(`read_question`).

Pure functions of (config, context, parameters, batch, index), shared by training, evaluation and inspection: losses,
answers, the report and `realm inspect` are computed from what they return. A refreshed index is new data, not a new
program. `key` None turns dropout off. Symbols in shapes: k candidates or passages of an example, d tokens of a passage
row, q of a query row, m masked tokens. Read next: `models/likelihood.py` for the probabilities, `tasks/realm.py` and
`tasks/qa.py` for the losses.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from realm_jax.mesh import batch_parts
from realm_jax.models import likelihood
from realm_jax.models.inputs import (
    DOCUMENT_SPECIALS,
    Documents,
    ReaderInput,
    answer_spans,
    contains_phrase,
    has_answer_span,
    null_documents,
    reader_inputs,
)
from realm_jax.models.likelihood import NEGATIVE, Mean, answer_log_probabilities
from realm_jax.models.realm import Params, Realm, flatten_passages
from realm_jax.retrieval.exact import search
from realm_jax.retrieval.fusion import FUSION_DEPTH, FusedRanking, fuse, ranks_of
from realm_jax.retrieval.scann import Searcher
from realm_jax.sections import QaConfig, RealmConfig

Array = jax.Array
Batch = dict[str, Array]
POINTED = 3  # candidates read to point at a hidden span: with more, reading takes nearly all of a step


# --- What every forward pass is given ---------------------------------------------------------------------------------


class Index(NamedTuple):
    """The corpus on the devices.

    Attributes:
        vectors: [padded rows, projection]; None if hosts search.
        documents: the token rows that they stand for.
        tower: parameters of the query encoder that searches; None for the current one.
        held_out: rows that no masked sentence may learn from, bool [padded rows]; None for none.
    """

    vectors: Any
    documents: Documents
    tower: Params | None = None
    held_out: Array | None = None


@dataclasses.dataclass(frozen=True)
class LoadedIndex:
    """An index that a task can use.

    Attributes:
        index: what a step takes.
        vectors: on the host, [rows, width]; None for a generation that the devices search, and if only BM25 searches.
        step: of its parameters.
        generation: its name, '' for one that the trainer made.
        searcher: of the host, if hosts search.
        queries: the sample of its export, [count, width], if it is there.
        facts: what to record when it is adopted.
    """

    index: Index
    vectors: NDArray | None
    step: int
    generation: str = ""
    searcher: Searcher | None = None
    queries: NDArray[np.float32] | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


class PackingSpec(NamedTuple):
    """Into how many token slots a part of a batch packs its sequences; 0: it pads them.

    Attributes:
        examples: of the part.
        queries: slots of the queries that search.
        nulls: of the reader's texts with the null document.
        joints: of the reader's texts with passages.
        documents: of the passages that are embedded.
    """

    examples: int
    queries: int = 0
    nulls: int = 0
    joints: int = 0
    documents: int = 0


@dataclasses.dataclass(frozen=True)
class StaticContext:
    """What is compiled into every program of a run, whatever its task.

    Attributes:
        model: the networks.
        mesh: the devices.
        cls_id: of [CLS].
        sep_id: of [SEP].
        rows: passages in the corpus, without padding.
        packing: how texts and passages are packed; None: they are padded.
    """

    model: Realm
    mesh: Mesh
    cls_id: int
    sep_id: int
    rows: int
    packing: PackingSpec | None = None

    def slots(self, examples: int) -> PackingSpec:
        """Return how a batch of so many examples is packed: as was worked out for it; another one is padded."""
        packing = self.packing
        fits = packing is not None and examples == packing.examples * batch_parts(self.mesh)
        return packing if packing is not None and fits else PackingSpec(examples)


class Rerank(NamedTuple):
    """What orders the first passages of a search again before they are read.

    Attributes:
        passages: how many.
        network: the key of its parameters.
        added: (qa, context, params, batch, documents [batch, k, d]) → what it adds to the score of each passage,
            [batch, k] float32.
    """

    passages: int
    network: str
    added: Callable[[QaConfig, StaticContext, Params, Batch, Documents], Array]


def reader_query(batch: Batch) -> tuple[Array, Array]:
    """Return the texts that the reader reads, ids [batch, q] and lengths [batch]: `reader_query` of the batch, or the
    text that searches if there is none."""
    name = "reader_query" if "reader_query" in batch else "query"
    return batch[name], batch[f"{name}_length"]


def batch_passages(batch: Batch, prefix: str = "") -> Documents:
    """Return the passages that came with a batch, [batch, d]; prefix: of the names of their arrays."""
    return Documents(*(batch[f"{prefix}document{part}"] for part in ("", "_length", "_title_length")))


def batch_candidates(batch: Batch) -> Documents:
    """Return the passages that came with a batch, each the one candidate of its text: [batch, 1, d]."""
    return Documents(*(part[:, None] for part in batch_passages(batch)))


def dropout_keys(key: Array | None, count: int) -> list[Array | None]:
    """Split a key; None stays None, which means no dropout."""
    return [None] * count if key is None else list(jax.random.split(key, count))


# --- Retrieve ---------------------------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """Retrieved passages.

    Attributes:
        rows: [batch, k].
        valid: False for the example's own passage and for those that are held out, bool [batch, k].
        excluded: how many passages were dropped as the example's own, [batch].
    """

    rows: Array
    valid: Array
    excluded: Array


def retrieve(realm: RealmConfig, context: StaticContext, params: Params, batch: Batch, index: Index) -> Candidates:
    """Return the K − 1 best passages of each masked sentence, with `exclude_own` without the sentence's own passage.

    The own passage is the same row (`own_row`, −1 for none) or a passage in which the unmasked sentence occurs; no row
    (−1) and a row that is held out are treated alike. One more is searched; passages that are still excluded after that
    are marked invalid, not replaced. If hosts search, the rows are the batch's `retrieved_rows`; any other search than
    that of vectors takes BM25's list from the batch, as `bm25_rows` and `bm25_scores`.
    """
    count = realm.candidates - 1
    if index.vectors is None:
        rows = batch["retrieved_rows"]
    else:
        queries = embed_searching_queries(context, params, batch, index.tower)
        own_row = batch["own_row"] if realm.exclude_own else None
        depth = min(count + 1, context.rows)
        rows = search_passages(context, realm.search, queries, batch, index, depth, own_row).rows
    is_own = rows < 0  # [batch, depth]
    if realm.exclude_own:
        is_own |= contains_phrase(gather_passages(index, rows).ids, batch["sentence"], batch["sentence_length"])
        is_own |= rows == batch["own_row"][:, None]
    left_out = is_own if index.held_out is None else is_own | index.held_out[jnp.maximum(rows, 0)]
    order = jnp.argsort(left_out, axis=1, stable=True)[:, :count]
    pick = partial(jnp.take_along_axis, indices=order, axis=1)
    return Candidates(pick(rows), ~pick(left_out), (is_own & (rows >= 0)).sum(axis=1))


def search_depth(realm: RealmConfig, rows: int) -> int:
    """Return how many of `rows` passages are searched for a masked sentence: its candidates, with its own passage in
    the null document's place."""
    return min(realm.candidates, rows)


def embed_searching_queries(context: StaticContext, params: Params, batch: Batch, tower: Params | None) -> Array:
    """Return the vectors that search, [batch, projection]: without dropout, by the current query encoder or `tower`."""
    if tower is not None:
        params = {**params, context.model.embedder_names[0]: tower}
    slots = context.slots(len(batch["query"])).queries
    return context.model.embed_queries(params, batch["query"], batch["query_length"], places=slots)


def retrieve_and_rerank(
    qa: QaConfig, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None, beam: int,
    rerank: Rerank | None = None,
) -> tuple[FusedRanking, Array | None]:  # fmt: skip
    """Return the best passages of each question: rows, scores, ranks [batch, beam]; and the query vectors.

    Scores are inner products with the stored vectors, and gradient reaches the query encoder alone. BM25's list comes
    with the batch, as `bm25_rows` and `bm25_scores`; without vectors its scores are all there is, and no query vectors.
    """
    if rerank is None:
        return retrieve_for_questions(qa, context, params, batch, index, key, beam)
    ranking, queries = retrieve_for_questions(qa, context, params, batch, index, key, max(beam, rerank.passages))
    # A passage has its own score and what is added to it, so where nothing is added all stays as it was.
    rows, scores, ranks = (part[:, : rerank.passages] for part in ranking)
    added = rerank.added(qa, context, params, batch, gather_passages(index, rows))  # [batch, k]
    order = jnp.argsort(-(falling_scores(scores) + added), axis=1, stable=True)
    first = rows, scores + added, ranks
    picked = (jnp.take_along_axis(part, order.reshape(order.shape + (1,) * (part.ndim - 2)), axis=1) for part in first)
    rest = (part[:, rerank.passages :] for part in ranking)
    joined = (jnp.concatenate(parts, axis=1) for parts in zip(picked, rest, strict=True))
    return FusedRanking(*(part[:, :beam] for part in joined)), queries


def retrieve_for_questions(
    qa: QaConfig, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None, beam: int
) -> tuple[FusedRanking, Array | None]:
    """Return what `retrieve_and_rerank` does, in the order of the search."""
    depth = min(beam, context.rows)
    if index.vectors is None:
        rows = batch["bm25_rows"][:, :depth]
        scores = jnp.where(rows >= 0, batch["bm25_scores"][:, :depth], NEGATIVE)
        return FusedRanking(rows, scores, ranks_of("bm25", jnp, rows)), None
    slots = context.slots(len(batch["query"])).queries
    queries = context.model.embed_queries(params, batch["query"], batch["query_length"], key, slots)
    return search_passages(context, qa.search, queries, batch, index, depth), queries


def falling_scores(scores: Array) -> Array:
    """Sort the scores of a list, [batch, k]. A search by vectors has them sorted; in a list that words had a part in,
    the first passage need not have the largest inner product."""
    return -jnp.sort(-scores, axis=1)


def search_passages(
    context: StaticContext, method: str, queries: Array, batch: Batch, index: Index, depth: int,
    own_row: Array | None = None,
) -> FusedRanking:  # fmt: skip
    """Return the `depth` best passages of query vectors, with the retriever's scores.

    Args:
        context: of the run.
        method: one of `sections.SEARCHES`; 'bm25' and 'hybrid' take BM25's list from the batch.
        queries: [batch, projection].
        batch: with `bm25_rows` and `bm25_scores` [batch, list] if the method needs them.
        index: with vectors.
        depth: passages for each query.
        own_row: [batch]; a row that takes no part in a list of vectors that is fused, because it would leave nothing to
            the others (−1 for none).

    Returns:
        Where words find fewer, rows are −1 and scores NEGATIVE. Scores carry gradient to the queries alone.
    """
    if method == "bm25":
        rows = batch["bm25_rows"][:, :depth]
        return FusedRanking(rows, stored_scores(queries, index, rows), ranks_of(method, jnp, rows))
    listed = depth if method == "vectors" else min(max(depth, FUSION_DEPTH + (own_row is not None)), context.rows)
    rows = search(context.mesh, queries, index.vectors, context.rows, listed).rows  # [batch, listed]
    scores = stored_scores(queries, index, rows)
    if method == "vectors":
        return FusedRanking(rows, scores, ranks_of(method, jnp, rows))
    if own_row is not None:
        rows = jnp.where(rows == own_row[:, None], -1, rows)
    words = batch["bm25_rows"], batch["bm25_scores"]
    held = jax.lax.stop_gradient((scores, stored_scores(queries, index, words[0])))
    fused = fuse(rows, held[0], *words, held[1], depth)
    return fused._replace(scores=stored_scores(queries, index, fused.rows))


def bm25_list_length(method: str, depth: int, rows: int) -> int:
    """Return how many passages BM25's list has in a search for `depth` of `rows`; 0 if BM25 takes no part."""
    return 0 if method == "vectors" else min(max(depth, FUSION_DEPTH), rows)


def gather_passages(index: Index, rows: Array) -> Documents:
    """Return the token rows of candidates: rows [...] int32 → ids [..., d].

    No row (below 0) gives an empty passage: special tokens alone, in which no answer can be.
    """
    ids, lengths, titles = (part[jnp.maximum(rows, 0)] for part in index.documents)
    exists = rows >= 0
    return Documents(ids, jnp.where(exists, lengths, DOCUMENT_SPECIALS + 1), jnp.where(exists, titles, 0))


# --- Score: p(z|x) ----------------------------------------------------------------------------------------------------


def stored_scores(queries: Array, index: Index, rows: Array) -> Array:
    """Return inner products of queries [batch, projection] with the stored vectors of rows [batch, k], without a
    gradient to those; NEGATIVE for no row (below 0), so that nothing of a softmax falls to it."""
    vectors = index.vectors[jnp.maximum(rows, 0)].astype(jnp.float32)  # [batch, k, projection]
    return jnp.where(rows >= 0, jnp.einsum("bd,bkd->bk", queries, jax.lax.stop_gradient(vectors)), NEGATIVE)


def candidate_scores(
    context: StaticContext, params: Params, batch: Batch, documents: Documents, key: Array | None,
    index: Index | None = None, rows: Array | None = None,
) -> Array:  # fmt: skip
    """Return inner products with current parameters, the null document first.

    Args:
        context: of the run.
        params: all parameters.
        batch: with the queries.
        documents: ids [batch, k, d].
        key: of dropout.
        index: whose stored vectors take the place of those of `documents`, if `rows` is given.
        rows: [batch, k], of the passages that keep their stored vectors.

    Returns:
        [batch, 1 + k] float32.
    """
    keys = dropout_keys(key, 3)
    slots = context.slots(len(documents.ids))
    queries = context.model.embed_queries(params, batch["query"], batch["query_length"], keys[0], slots.queries)
    null = embed_null(context, params, keys[2])  # [1, projection]
    if index is not None and rows is not None:
        scores = stored_scores(queries, index, rows)
    else:
        vectors = embed_candidates(context, params, documents, keys[1], slots.documents)
        scores = jnp.einsum("bd,bkd->bk", queries, vectors)
    return jnp.concatenate([queries @ null.T, scores], axis=1)


def embed_null(context: StaticContext, params: Params, key: Array | None) -> Array:
    """Return the null document's vector [1, projection], by the passage encoder."""
    return context.model.embed_documents(params, null_documents(1, (context.cls_id, context.sep_id)), key)


def embed_candidates(
    context: StaticContext, params: Params, documents: Documents, key: Array | None, slots: int = 0
) -> Array:
    """Return the vectors of candidates by current parameters: ids [batch, k, d] → [batch, k, projection].

    slots: into which they are packed, see `PackingSpec`.
    """
    flat = Documents(*(part.reshape(-1, *part.shape[2:]) for part in documents))  # ids [batch · k, d]
    return context.model.embed_documents(params, flat, key, slots).reshape(*documents.ids.shape[:2], -1)


# --- Read a masked sentence: p(y|z,x) ---------------------------------------------------------------------------------


class MaskedReading(NamedTuple):
    """A masked sentence read with each of its candidates, the null document first and then k passages.

    Attributes:
        candidates: the passages.
        valid: whether a candidate takes part, [batch, 1 + k].
        scores: its inner product with current parameters, [batch, 1 + k].
        log_p: log p(y_j|z,x) of each target, [batch, 1 + k, m].
        is_top1: whether no token is likelier, [batch, 1 + k, m].
        unplaced: the share of the tokens of what is read and embedded for which packing had no slot.
    """

    candidates: Candidates
    valid: Array
    scores: Array
    log_p: Array
    is_top1: Array
    unplaced: Mean


def read_masked(
    realm: RealmConfig, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None,
    frozen_passages: bool,
) -> MaskedReading:  # fmt: skip
    """Retrieve for masked sentences, score the candidates, and read the sentences with them.

    Args:
        realm: how candidates are found and read.
        context: of the run.
        params: all parameters.
        batch: `tasks/realm.py: MaskedSentences`, [batch, …].
        index: that is searched.
        key: of dropout; None: none.
        frozen_passages: whether the passages keep the vectors of the index.
    """
    candidates = retrieve(realm, context, params, batch, index)
    documents = gather_passages(index, candidates.rows)  # ids [batch, k, d]
    keys = dropout_keys(key, 2)
    stored = candidates.rows if frozen_passages else None
    scores = candidate_scores(context, params, batch, documents, keys[0], index, stored)
    if realm.uses_span_marginal:
        rows = jnp.where(candidates.valid, candidates.rows, -1)  # the own passage would take the place of another
        read = point_at_targets(context, params, batch, gather_passages(index, rows), keys[1])
    else:
        read = read_candidates(context, params, batch, documents, keys[1])
    slots, embedded = context.slots(len(candidates.rows)), context.model.document_lengths(documents)
    packed = [
        (context.model.query_lengths(batch["query_length"]), slots.queries),
        (read.lengths, slots.joints),
        *([] if realm.uses_span_marginal else [(reader_query(batch)[1] + 1, slots.nulls)]),
        *([] if frozen_passages else [(embedded, slots.documents)]),
    ]
    longest = 2 * (batch["query"].shape[1] + documents.ids.shape[-1])  # whatever templates add
    valid = jnp.pad(candidates.valid, ((0, 0), (1, 0)), constant_values=realm.null_document)
    unplaced = unplaced_share(context, packed, longest)
    return MaskedReading(candidates, valid, scores, read.log_p, read.is_top1, unplaced)


class TargetsRead(NamedTuple):
    """log_p, is_top1 [batch, 1 + k, m]: see `MaskedReading`. lengths [batch, n]: of the texts with passages."""

    log_p: Array
    is_top1: Array
    lengths: Array


def read_candidates(
    context: StaticContext, params: Params, batch: Batch, documents: Documents, key: Array | None
) -> TargetsRead:
    """Predict the masked tokens with the null document and with each passage, ids [batch, k, d].

    The null document's text is short, so it is read on its own and not at the passages' length.
    """
    keys, slots = dropout_keys(key, 2), context.slots(len(documents.ids))
    null = read_targets(context, params, batch, null_candidates(context, batch), keys[0], slots.nulls)
    parts = [null, read_targets(context, params, batch, documents, keys[1], slots.joints)]
    log_p, is_top1 = (jnp.concatenate(pair, axis=1) for pair in zip(*parts, strict=True))
    return TargetsRead(log_p, is_top1, reader_inputs(*reader_query(batch), documents).lengths)


def read_targets(
    context: StaticContext, params: Params, batch: Batch, documents: Documents, key: Array | None = None, slots: int = 0
) -> tuple[Array, Array]:
    """Return log p(y_j|z,x) of every target, and whether no token is likelier, given each passage.

    documents.ids [batch, k, d] → ([batch, k, m] float32, [batch, k, m] bool). slots: see `PackingSpec`.
    """
    joint, positions = masked_inputs(batch, documents)
    targets = jnp.repeat(batch["targets"], documents.ids.shape[1], axis=0)  # [batch · k, m]
    log_p, is_top1 = context.model.reader.read_targets(params, joint, positions, targets, key, slots)
    shape = (*documents.ids.shape[:2], -1)
    return log_p.reshape(shape), is_top1.reshape(shape)


def masked_inputs(batch: Batch, documents: Documents) -> tuple[ReaderInput, Array]:
    """Join masked texts with passages, ids [batch, k, d], for the reader: arrays and positions [batch · k, …]."""
    joint = flatten_passages(reader_inputs(*reader_query(batch), documents))
    return joint, jnp.repeat(batch["positions"], documents.ids.shape[1], axis=0)


def null_candidates(context: StaticContext, batch: Batch) -> Documents:
    """Return the null document as the one candidate of each text, for the reader: [batch, 1, 3]."""
    null = null_documents(len(batch["query"]), (context.cls_id, context.sep_id))
    return Documents(*(part[:, None] for part in null))


def point_at_targets(
    context: StaticContext, params: Params, batch: Batch, documents: Documents, key: Array | None = None
) -> TargetsRead:
    """Read like `read_candidates`, but point at the hidden span in each passage instead of predicting its words.

    log p(y|z,x) takes the place of the first token, and 0 that of the others; `is_top1` is the same for all tokens. The
    null document has nothing to point at. Only POINTED passages are read, those that hold the span first: all others
    leave it to be guessed, as the null document does. A span of more tokens than `span_width` is in no passage.
    """
    holds = has_answer_span(documents, *hidden_span(batch), context.model.reader.span_width)  # [batch, k]
    order = jnp.argsort(~holds, axis=1, stable=True)[:, :POINTED]
    first = Documents(*(part[jnp.arange(len(order))[:, None], order] for part in documents))  # ids [batch, POINTED, d]
    spans = masked_spans(context, params, batch, first, key)
    log_p, is_top1 = likelihood.pointing(spans.scores, spans.allowed, spans.correct)
    examples, shape = jnp.arange(len(order))[:, None], (len(order), 1 + holds.shape[1])
    log_p = jnp.full(shape, likelihood.UNSEEN).at[examples, 1 + order].set(log_p)
    is_top1 = jnp.zeros(shape, bool).at[examples, 1 + order].set(is_top1)
    is_first = jnp.arange(batch["targets"].shape[1]) == 0  # [m]
    log_p = jnp.where(is_first, log_p[..., None], 0.0)  # [batch, 1 + k, m]
    is_top1 = jnp.broadcast_to(is_top1[..., None], (*shape, is_first.size))
    return TargetsRead(log_p, is_top1, spans.joint.lengths)


def hidden_span(batch: Batch) -> tuple[Array, Array]:
    """Return what is hidden in masked texts as the one answer of each: ids [batch, 1, m] and lengths [batch, 1]."""
    return batch["targets"][:, None], batch["weights"].sum(axis=1, keepdims=True).astype(jnp.int32)


def masked_spans(
    context: StaticContext, params: Params, batch: Batch, documents: Documents, key: Array | None = None
) -> "SpanReading":
    """Read masked texts with passages, ids [batch, k, d], titles too, to point at what is hidden."""
    joint = reader_inputs(*reader_query(batch), documents, titles=True)
    return read_spans(context, params, joint, hidden_span(batch), key)


# --- Read a question --------------------------------------------------------------------------------------------------


class QuestionReading(NamedTuple):
    """A question read with the first k passages of its beam.

    Attributes:
        rows: [batch, k].
        scores: [batch, k].
        joint: what the reader reads, arrays [batch, k, length].
        span_scores: [batch, k, length, width].
        beam: all that was retrieved.
        allowed: the spans that may be answers, like `span_scores`.
        correct: those that are one of the batch's answers, like `span_scores`.
        prior: log p(z|x), [batch, k].
        spans: log p(span|z,x), like `span_scores`.
        unplaced: see `MaskedReading`.
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
    qa: QaConfig, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None, beam: int,
    rerank: Rerank | None = None,
) -> QuestionReading:  # fmt: skip
    """Retrieve a beam for questions with the stored vectors and read its first `qa.passages`.

    Gradient reaches the query encoder through the scores, with `qa.trains_passages` the passage encoder through those
    of the passages that are read, and the reader through the spans. With `qa.uses_bm25_only` the reader alone learns.

    Args:
        qa: how passages are found and read.
        context: of the run.
        params: all parameters.
        batch: with the questions, and BM25's list if it takes part; without answers no span is correct.
        index: that is searched.
        key: of dropout; None: none.
        beam: passages that are retrieved.
        rerank: what orders them again before they are read.
    """
    passages = qa.passages
    keys = dropout_keys(key, 3 if qa.trains_passages else 2)
    ranking, queries = retrieve_and_rerank(qa, context, params, batch, index, keys[0], beam, rerank)
    scores, rows = ranking.scores, ranking.rows[:, :passages]  # [batch, beam], [batch, k]
    slots = context.slots(len(rows))
    if qa.trains_passages and rerank is None:
        vectors = embed_candidates(context, params, gather_passages(index, rows), keys[2], slots.documents)
        fresh = jnp.where(rows >= 0, jnp.einsum("bd,bkd->bk", queries, vectors), NEGATIVE)
        scores = jnp.concatenate([fresh, scores[:, passages:]], axis=1)
    joint = reader_inputs(*reader_query(batch), gather_passages(index, rows), qa.titles)
    read_scores = scores[:, :passages]
    no_answer = jnp.zeros((len(batch["query"]), 1, 1), jnp.int32)
    answers = batch.get("answers", no_answer), batch.get("answer_lengths", no_answer[:, :, 0])
    read = read_spans(context, params, joint, answers, keys[1])
    prior, log_p = answer_log_probabilities(read_scores, read.scores, read.allowed, qa.objective)
    packed = [(context.model.query_lengths(batch["query_length"]), slots.queries), (joint.lengths, slots.joints)]
    if qa.trains_passages:
        packed.append((context.model.document_lengths(gather_passages(index, rows)), slots.documents))
    unplaced = unplaced_share(context, packed, 2 * joint.ids.shape[-1])  # whatever templates add
    return QuestionReading(
        rows, read_scores, joint, read.scores, ranking._replace(scores=scores), read.allowed, read.correct, prior,
        log_p, unplaced,
    )  # fmt: skip


# --- Spans, for both --------------------------------------------------------------------------------------------------


class SpanReading(NamedTuple):
    """The spans of passages that are read with a text; all arrays but `joint`: [batch, k, length, span_width].

    Attributes:
        joint: what the reader reads.
        scores: of the spans.
        allowed: which may be pointed at.
        correct: which are an answer.
    """

    joint: ReaderInput
    scores: Array
    allowed: Array
    correct: Array


def read_spans(
    context: StaticContext, params: Params, joint: ReaderInput, answers: tuple[Array, Array], key: Array | None
) -> SpanReading:
    """Read joint arrays [batch, k, length] to point at answers: ids [batch, a, m] and their lengths [batch, a].

    No span may be pointed at in what packing had no slot for.
    """
    slots, reader = context.slots(len(joint.ids)).joints, context.model.reader
    lengths = reader.bert.placed_lengths(joint.lengths, slots, joint.ids.shape[-1])
    allowed, correct = answer_spans(joint._replace(lengths=lengths), *answers, reader.span_width)
    return SpanReading(joint, score_spans(context, params, joint, key, slots), allowed, correct)


def score_spans(context: StaticContext, params: Params, joint: ReaderInput, key: Array | None, slots: int = 0) -> Array:
    """Return span scores of joint arrays [batch, k, length]: [batch, k, length, span_width] float32."""
    spans = context.model.reader.read_spans(params, flatten_passages(joint), key, slots)
    return spans.reshape(*joint.ids.shape, context.model.reader.span_width)


def unplaced_share(context: StaticContext, packed: list[tuple[Array, int]], longest: int) -> Mean:
    """Return the share of the tokens of sequences for which packing has no slot.

    Args:
        context: of the run.
        packed: lengths [batch, …] of sequences, and the slots of a part of the batch; 0 if they are padded.
        longest: no sequence is longer.
    """
    lost, total = jnp.float32(0), jnp.float32(0)
    for lengths, slots in packed:
        lost += (lengths - context.model.bert.placed_lengths(lengths, slots, longest)).sum()
        total += lengths.sum()
    return Mean(lost, total)
