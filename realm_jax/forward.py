"""The forward pass of a step: retrieve, score, read. Of a masked sentence (`read_masked`), and of a question
(`read_question`).

Pure functions of (context, parameters, batch, index), shared by training, evaluation and inspection: losses, answers,
the report and `realm inspect` are computed from what they return. A refreshed index is new data, not a new program.
`key` None turns dropout off. Read next: `models/likelihood.py` for the probabilities, `tasks/realm.py` and
`tasks/qa.py` for the losses; how vectors are searched is `retrieval/exact.py`.
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
from realm_jax.models.packing import Dealing, fitting_lengths
from realm_jax.models.realm import Params, Realm, flatten_passages
from realm_jax.retrieval.exact import search
from realm_jax.retrieval.fusion import FUSION_DEPTH, FusedRanking, fuse, ranks_of
from realm_jax.retrieval.scann import Searcher

POINTED = 3  # candidates read to point at a hidden span: with more, reading takes nearly all of a step
Array = jax.Array
Batch = dict[str, Array]


class Index(NamedTuple):
    """The corpus on the device: vectors [padded rows, projection] and the document rows they stand for.

    vectors: None if hosts search. tower: parameters of the query embedder that searches; None for the current one.
    reader_documents: the same rows in the tokens of a reader that has its own; None if it reads `documents`. held_out:
    which rows no masked sentence may learn from, bool [padded rows]; None for none.
    """

    vectors: Any
    documents: Documents
    tower: Params | None = None
    reader_documents: Documents | None = None
    held_out: Array | None = None


@dataclasses.dataclass(frozen=True)
class LoadedIndex:
    """An index that a task can use.

    vectors: on the host, [rows, width]; None for a generation that the devices search, and where words find passages.
    step: of its parameters. generation: its name, '' for one that the trainer made. searcher: where hosts search.
    queries: the sample of its export [count, width], if it is there. facts: what to record when it is adopted.
    """

    index: Index
    vectors: NDArray | None
    step: int
    generation: str = ""
    searcher: Searcher | None = None
    queries: NDArray[np.float32] | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


class Rerank(NamedTuple):
    """What orders the first passages of a search anew before they are read.

    passages: how many. network: the key of its parameters. added(context, params, batch, documents [batch, k, d]) →
    what it adds to the score of each passage, [batch, k] float32.
    """

    passages: int
    network: str
    added: Callable[["StepContext", Params, Batch, Documents], Array]


class PackedPlaces(NamedTuple):
    """Into how many places a part of a batch packs its tokens; 0: it pads them.

    examples: of the part. queries: what is searched with; nulls: the reader's texts with the null document, joints:
    those with passages; documents: passages that are embedded.
    """

    examples: int
    queries: int = 0
    nulls: int = 0
    joints: int = 0
    documents: int = 0


@dataclasses.dataclass(frozen=True)
class StepContext:
    """The static context of a step: everything a loss needs besides arrays. It is fixed for a run and compiled in."""

    model: Realm
    mesh: Mesh
    cls_id: int
    sep_id: int
    rows: int  # passages in the corpus, padding not counted
    candidates: int = 8  # the null document counted
    null_document: bool = True  # whether it takes part
    exclude_own: bool = True  # whether a sentence's own passage does not
    marginal: str = "example"
    ict_null_weight: float = 0.0  # weight of the null document in the inverse cloze task
    ict_from_index: bool = False  # its negatives are what the query retrieves, not the passages of the batch
    qa_objective: str = "marginal"
    qa_beam: int = 64  # passages that the retriever's term of fine-tuning, and the inverse cloze task, rank
    qa_passages: int = 5  # passages that are read
    qa_titles: bool = False  # with their titles
    qa_search: str = "vectors"  # what finds them, one of `sections.SEARCHES`
    search: str = "vectors"  # what finds REALM's candidates
    frozen_documents: bool = False  # whether REALM's candidates keep the vectors of the index
    qa_documents: bool = False  # whether fine-tuning trains the document embedder as well
    rerank: Rerank | None = None  # what orders them anew; nothing does while a task is trained
    reader_special: tuple[int, int] | None = None  # ids of [CLS] and [SEP] of a reader with a tokenizer of its own
    packed: PackedPlaces | None = None  # how texts and passages are packed; None: they are padded

    def places(self, examples: int) -> PackedPlaces:
        """How a batch of so many texts is packed: as was worked out for it, another is padded."""
        packed = self.packed
        fits = packed is not None and examples == packed.examples * batch_parts(self.mesh)
        return packed if packed is not None and fits else PackedPlaces(examples)

    @property
    def qa_words(self) -> bool:
        """Whether words alone find the passages of a question."""
        return self.qa_search == "bm25"

    @property
    def points(self) -> bool:
        """Whether the reader points at what is hidden. The retriever then never sees [MASK]: an encoder of sentences
        does not know it, and no question has it."""
        return self.marginal == "span"

    @property
    def asks_otherwise(self) -> bool:
        """Whether the retriever's query of a masked sentence has other tokens than the reader's."""
        return self.points or self.reader_special is not None


# --- search -----------------------------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """Retrieved passages without the example's own and those held out. rows, valid [batch, k]; excluded [batch]: how
    many passages were dropped as its own."""

    rows: Array
    valid: Array
    excluded: Array


def retrieve(context: StepContext, params: Params, batch: Batch, index: Index, count: int) -> Candidates:
    """The `count` best passages for each masked sentence, with `exclude_own` the example's own passage left out.

    The example's own passage is the same row (`own_row`, −1 for none) or a passage in which the unmasked sentence
    occurs; no row (−1) and a row that is held out are treated alike. One more than `count` is searched; passages still
    excluded after that are marked invalid rather than replaced. Where hosts search, the rows are the batch's
    `retrieved_rows`. With another search than that of vectors the batch has BM25's list, as `bm25_rows` and
    `bm25_scores`.
    """
    if index.vectors is None:
        rows = batch["retrieved_rows"]
    else:
        queries = search_queries(context, params, batch, index.tower)
        own_row = batch["own_row"] if context.exclude_own else None
        rows = search_passages(
            context, context.search, queries, batch, index, min(count + 1, context.rows), own_row
        ).rows
    own = rows < 0
    if context.exclude_own:
        own |= contains_phrase(gather_documents(index, rows).ids, batch["sentence"], batch["sentence_length"])
        own |= rows == batch["own_row"][:, None]
    left_out = own if index.held_out is None else own | index.held_out[jnp.maximum(rows, 0)]
    order = jnp.argsort(left_out, axis=1, stable=True)[:, :count]
    pick = partial(jnp.take_along_axis, indices=order, axis=1)
    return Candidates(pick(rows), ~pick(left_out), (own & (rows >= 0)).sum(axis=1))


def search_passages(
    context: StepContext,
    how: str,
    queries: Array,
    batch: Batch,
    index: Index,
    depth: int,
    own_row: Array | None = None,
) -> FusedRanking:
    """The `depth` best passages of queries [batch, projection] by one of `sections.SEARCHES`; scores: the retriever's.

    'bm25' and 'hybrid' take BM25's list from the batch (`bm25_rows`, `bm25_scores`). own_row [batch]: a row that takes
    no part in a list of vectors that is fused, where it would leave nothing to the others (−1 for none). Where words
    find fewer, rows are −1 and scores NEGATIVE. Scores carry gradient to the queries alone. The index has vectors.
    """
    if how == "bm25":
        rows = batch["bm25_rows"][:, :depth]
        return FusedRanking(rows, stored_scores(queries, index, rows), ranks_of(how, jnp, rows))
    listed = depth if how == "vectors" else min(max(depth, FUSION_DEPTH + (own_row is not None)), context.rows)
    rows = search(context.mesh, queries, index.vectors, context.rows, listed).rows
    scores = stored_scores(queries, index, rows)
    if how == "vectors":
        return FusedRanking(rows, scores, ranks_of(how, jnp, rows))
    if own_row is not None:
        rows = jnp.where(rows == own_row[:, None], -1, rows)
    words = batch["bm25_rows"], batch["bm25_scores"]
    held = jax.lax.stop_gradient((scores, stored_scores(queries, index, words[0])))
    found = fuse(rows, held[0], *words, held[1], depth)
    return found._replace(scores=stored_scores(queries, index, found.rows))


def search_queries(context: StepContext, params: Params, batch: Batch, tower: Params | None) -> Array:
    """What is searched with, [batch, projection]: without dropout, by the current query embedder or by `tower`."""
    if tower is not None:
        params = {**params, context.model.embedder_names[0]: tower}
    places = context.places(len(batch["query"])).queries
    return context.model.embed_queries(params, batch["query"], batch["query_length"], places=places)


def search_depth(context: StepContext) -> int:
    """Rows searched for each masked sentence: its candidates, with its own passage in the null document's place."""
    return min(context.candidates, context.rows)


def bm25_list_length(search: str, depth: int, rows: int) -> int:
    """Passages in BM25's list of a search for `depth` of `rows` passages; 0 where BM25 takes no part."""
    return 0 if search == "vectors" else min(max(depth, FUSION_DEPTH), rows)


def stored_scores(queries: Array, index: Index, rows: Array) -> Array:
    """Inner products of queries [batch, d] with the stored vectors of rows [batch, k], without a gradient to those.

    NEGATIVE for no row (below 0), so that nothing of a softmax falls to it.
    """
    vectors = index.vectors[jnp.maximum(rows, 0)].astype(jnp.float32)
    return jnp.where(rows >= 0, jnp.einsum("bd,bkd->bk", queries, jax.lax.stop_gradient(vectors)), NEGATIVE)


# --- a masked sentence ------------------------------------------------------------------------------------------------


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
        read = point_at_targets(context, params, batch, take_for_reader(index, rows), keys[1])
    else:
        read = read_candidates(context, params, batch, take_for_reader(index, found.rows), keys[1])
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


def unplaced_pieces(context: StepContext, packed: list[tuple[Array, int]], longest: int) -> Mean:
    """The share of the pieces of sequences for which packing has no place. packed: lengths [batch, …] of sequences, and
    the places of a part; 0 where they are padded. longest: no sequence is longer."""
    lost, total = jnp.float32(0), jnp.float32(0)
    for lengths, places in packed:
        lost += (lengths - placed_lengths(context, lengths, places, longest)).sum()
        total += lengths.sum()
    return Mean(lost, total)


def candidate_scores(
    context: StepContext, params: Params, batch: Batch, documents: Documents, key: Array | None,
    index: Index | None = None, rows: Array | None = None,
) -> Array:  # fmt: skip
    """Inner products with current parameters, null document first. documents.ids [batch, k, d] → [batch, 1 + k].

    rows [batch, k]: where the passages keep their vectors, which `index` has.
    """
    keys = dropout_keys(key, 3)
    places = context.places(len(documents.ids))
    queries = context.model.embed_queries(params, batch["query"], batch["query_length"], keys[0], places.queries)
    null = embed_null(context, params, keys[2])
    if index is not None and rows is not None:
        scores = stored_scores(queries, index, rows)
    else:
        taken = embed_candidates(context, params, documents, keys[1], places.documents)
        scores = jnp.einsum("bd,bkd->bk", queries, taken)
    return jnp.concatenate([queries @ null.T, scores], axis=1)


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


class SpanReading(NamedTuple):
    """The spans of passages that are read with a text. Arrays but `joint`: [batch, k, length, span_width]; allowed:
    which may be pointed at; correct: which are an answer."""

    joint: ReaderInput
    scores: Array
    allowed: Array
    correct: Array


def masked_spans(
    context: StepContext, params: Params, batch: Batch, documents: Documents, key: Array | None = None
) -> SpanReading:
    """Read masked texts with passages [batch, k, d], titles too, to point at what is hidden."""
    joint = reader_inputs(*reader_query(batch), documents, titles=True)
    return read_spans(context, params, joint, hidden_span(batch), key)


def read_spans(
    context: StepContext, params: Params, joint: ReaderInput, answers: tuple[Array, Array], key: Array | None
) -> SpanReading:
    """Read joint arrays [batch, k, length] to point at answers: pieces [batch, a, m] and their numbers [batch, a].

    No span may be pointed at in what packing had no place for.
    """
    places = context.places(len(joint.ids)).joints
    placed = joint._replace(lengths=placed_lengths(context, joint.lengths, places, joint.ids.shape[-1]))
    allowed, correct = answer_spans(placed, *answers, context.model.reader.span_width)
    return SpanReading(joint, score_spans(context, params, joint, key, places), allowed, correct)


def placed_lengths(context: StepContext, lengths: Array, places: int, longest: int) -> Array:
    """Of sequences of these lengths [batch, …] the tokens for which packing has a place. places: of a part, 0 where
    they are padded; longest: no sequence is longer."""
    if not places:
        return lengths
    flat = lengths.reshape(-1)
    dealing = Dealing.of(flat, context.mesh)  # as the networks deal them out
    of_parts = dealing.deal(flat).reshape(batch_parts(context.mesh), -1)
    fitting = fitting_lengths(of_parts, longest, places, context.model.bert.alignment)
    return dealing.restore(fitting.reshape(-1)).reshape(lengths.shape)


def masked_inputs(batch: Batch, documents: Documents) -> tuple[ReaderInput, Array]:
    """Masked texts joined with passages [batch, k, d] for the reader: joint arrays, positions [batch · k, …]."""
    joint = flatten_passages(reader_inputs(*reader_query(batch), documents))
    return joint, jnp.repeat(batch["positions"], documents.ids.shape[1], axis=0)


def null_candidates(context: StepContext, batch: Batch) -> Documents:
    """The null document as the one candidate of each text of a batch, for the reader: [batch, 1, …]."""
    null = null_documents(len(batch["query"]), context.reader_special or (context.cls_id, context.sep_id))
    return Documents(*(part[:, None] for part in null))


def batch_passages(batch: Batch, prefix: str = "") -> Documents:
    """The passages that came with a batch, [batch, …]. prefix: of their arrays' names."""
    return Documents(*(batch[f"{prefix}document{part}"] for part in ("", "_length", "_title_length")))


def batch_candidates(batch: Batch) -> Documents:
    """The passages that came with a batch, each the one candidate of its text: [batch, 1, …]."""
    return Documents(*(part[:, None] for part in batch_passages(batch)))


# --- a question -------------------------------------------------------------------------------------------------------


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
    joint = reader_inputs(*reader_query(batch), take_for_reader(index, rows), context.qa_titles)
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


def score_spans(context: StepContext, params: Params, joint: ReaderInput, key: Array | None, places: int = 0) -> Array:
    """Span scores of joint arrays [batch, k, length] → [batch, k, length, span_width] float32. places: as of
    `PackedPlaces`."""
    spans = context.model.reader.read_spans(params, flatten_passages(joint), key, places)
    return spans.reshape(*joint.ids.shape, context.model.reader.span_width)


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
    places = context.places(len(batch["query"])).queries
    queries = context.model.embed_queries(params, batch["query"], batch["query_length"], key, places)
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


# --- passages, by their rows and as vectors ---------------------------------------------------------------------------


def gather_documents(index: Index, rows: Array) -> Documents:
    """The document rows of candidates, in the retriever's tokens. rows [...] int32 → ids [..., length].

    No row (below 0) gives an empty passage: special pieces alone, where no answer can stand.
    """
    return _taken(index.documents, rows)


def take_for_reader(index: Index, rows: Array) -> Documents:
    """`gather_documents` in the tokens that the reader reads."""
    return _taken(index.reader_documents or index.documents, rows)


def _taken(documents: Documents, rows: Array) -> Documents:
    ids, lengths, titles = (part[jnp.maximum(rows, 0)] for part in documents)
    found = rows >= 0
    return Documents(ids, jnp.where(found, lengths, DOCUMENT_SPECIALS + 1), jnp.where(found, titles, 0))


def embed_null(context: StepContext, params: Params, key: Array | None) -> Array:
    """The null document's vector [1, projection], through the document embedder."""
    return context.model.embed_documents(params, null_documents(1, (context.cls_id, context.sep_id)), key)


def embed_candidates(
    context: StepContext, params: Params, documents: Documents, key: Array | None, places: int = 0
) -> Array:
    """The vectors of candidates by current parameters. documents.ids [batch, k, d] → [batch, k, projection]. places: as
    of `PackedPlaces`."""
    flat = Documents(*(part.reshape(-1, *part.shape[2:]) for part in documents))
    return context.model.embed_documents(params, flat, key, places).reshape(*documents.ids.shape[:2], -1)


def reader_query(batch: Batch) -> tuple[Array, Array]:
    """What the reader reads of a batch's texts: ids [batch, q] and lengths [batch], of the reader's tokens where it has
    its own (`reader_query`), else those that search."""
    name = "reader_query" if "reader_query" in batch else "query"
    return batch[name], batch[f"{name}_length"]


def dropout_keys(key: Array | None, count: int) -> list[Array | None]:
    """`count` keys from one; None stays None, which means no dropout."""
    return [None] * count if key is None else list(jax.random.split(key, count))
