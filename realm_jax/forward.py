"""Retrieve, score and read: the forward pass of a step, for masked sentences (`read_masked`) and questions
(`read_question`).

Pure functions of (config, context, parameters, batch, index), shared by training, evaluation and inspection. A
refreshed index is new data, not a new program. Read next: `models/losses.py` for the probabilities, `tasks/realm.py`
and `tasks/qa.py` for the losses.

Symbols in shapes: k candidates or passages of an example, d tokens of a passage row, q of a query row, m masked tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from realm_jax.config import QaConfig, RealmConfig
from realm_jax.mesh import batch_parts
from realm_jax.models.inputs import (
    DOCUMENT_SPECIALS,
    PassageBatch,
    ReaderInput,
    answer_spans,
    contains_phrase,
    flatten_passages,
    has_answer_span,
    null_passages,
    reader_inputs,
)
from realm_jax.models.layers import Params
from realm_jax.models.losses import LOG_P_UNSEEN_SPAN, NEG_INF, WeightedSum, answer_log_probabilities, pointing
from realm_jax.models.networks import Realm
from realm_jax.models.packing import packed_lengths
from realm_jax.retrieval.exact import search
from realm_jax.retrieval.fusion import FUSION_DEPTH, FusedRanking, fuse, ranks_of
from realm_jax.retrieval.scann import Searcher
from realm_jax.retrieval.token_rerank import StoredTokens, combined_values, max_sims, query_words, stored_max_sims

Array = jax.Array
Batch = dict[str, Array]
MAX_POINTED = 3  # candidates read to point at a hidden span: with more, reading takes nearly all of a step


# --- Inputs of every forward pass -------------------------------------------------------------------------------------


class Index(NamedTuple):
    """The corpus on the devices.

    Attributes:
        vectors: [padded rows, projection]; None if hosts search.
        documents: the token rows of these vectors.
        query_encoder: parameters of the query encoder that searches; None for the current one.
        held_out: rows that no masked sentence may learn from, bool [padded rows]; None for none.
        words: True for words, the tokens of a query that token rerank compares, bool [vocabulary]; None for no rerank.
        tokens: stored token vectors [padded rows, …] for token rerank; None to encode passages at query time.
    """

    vectors: Any
    documents: PassageBatch
    query_encoder: Params | None = None
    held_out: Array | None = None
    words: Array | None = None
    tokens: StoredTokens | None = None


@dataclasses.dataclass(frozen=True)
class LoadedIndex:
    """An index that a task can use.

    Attributes:
        index: input of a step.
        vectors: on the host, [rows, width]; None for a generation that the devices search, and if only BM25 searches.
        step: step of its parameters.
        generation: its name; '' if the trainer embedded the corpus.
        searcher: searcher of the host, if hosts search.
        queries: sample queries of its export, [count, width]; None for none.
        facts: recorded when it is adopted.
    """

    index: Index
    vectors: NDArray | None
    step: int
    generation: str = ""
    searcher: Searcher | None = None
    queries: NDArray[np.float32] | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


class PackingSpec(NamedTuple):
    """Token slots into which each device's share of a batch packs its sequences; 0: it pads them.

    Attributes:
        examples: examples of the share.
        queries: slots of the queries that search.
        null_inputs: slots of the reader's inputs with the null document.
        reader_inputs: slots of the reader's inputs with passages.
        passages: slots of the passages that are embedded.
    """

    examples: int
    queries: int = 0
    null_inputs: int = 0
    reader_inputs: int = 0
    passages: int = 0


@dataclasses.dataclass(frozen=True)
class StaticContext:
    """Values that are compiled into every program of a run, whatever its task.

    Attributes:
        model: the networks.
        mesh: the devices.
        cls_id: id of [CLS].
        sep_id: id of [SEP].
        rows: passages in the corpus, without padding.
        packing: how sequences are packed; None: they are padded.
    """

    model: Realm
    mesh: Mesh
    cls_id: int
    sep_id: int
    rows: int
    packing: PackingSpec | None = None

    def packing_for(self, examples: int) -> PackingSpec:
        """Return the packing of a batch of this size; only the size for which `packing` was estimated is packed."""
        packing = self.packing
        fits = packing is not None and examples == packing.examples * batch_parts(self.mesh)
        return packing if packing is not None and fits else PackingSpec(examples)


class Rescored(NamedTuple):
    """The first k passages of a search, rescored by a reranker.

    Attributes:
        values: values by which they are ordered, the largest first, [batch, k].
        scores: new scores, whose softmax is p(z|x), [batch, k].
    """

    values: Array
    scores: Array


class Rerank(NamedTuple):
    """A reranker, which reorders the first passages of a search before they are read.

    Attributes:
        name: one of `config.RERANKERS`.
        passages: how many are reordered.
        networks: the keys of its parameters.
        rescore: (qa, context, params, batch, index, ranking of the passages [batch, k]) → `Rescored`.
    """

    name: str
    passages: int
    networks: tuple[str, ...]
    rescore: Callable[[QaConfig, StaticContext, Params, Batch, Index, FusedRanking], Rescored]


@dataclasses.dataclass(frozen=True)
class SearchPipeline:
    """Search for the passages of a question, then rerank them. `tasks.answering.search_pipeline` makes it for a run.

    Attributes:
        search: one of `config.SEARCHES`.
        rerank: reorders the first passages; None for the order of the search.
    """

    search: str = "vectors"
    rerank: Rerank | None = None

    @property
    def reranker(self) -> str:
        """Return the name of the reranker, one of `config.RERANKERS`."""
        return "none" if self.rerank is None else self.rerank.name

    def ranks_by_stage(self, ranks: Sequence[int]) -> dict[str, int]:
        """Return the ranks of a passage from 1, by the stages that ranked it: {"vectors": 3, "bm25": 1, "tokens": 2}.

        Args:
            ranks: ranks of `FusedRanking`, 0 for a stage that did not rank the passage.
        """
        stages = ["vectors", "bm25"] + ([] if self.rerank is None else [self.rerank.name])
        return {stage: rank for stage, rank in zip(stages, ranks, strict=True) if rank}


def reader_query(batch: Batch) -> tuple[Array, Array]:
    """Return the texts that the reader reads, ids [batch, q] and lengths [batch].

    They are the batch's `reader_query`, or the text that searches if there is none.
    """
    name = "reader_query" if "reader_query" in batch else "query"
    return batch[name], batch[f"{name}_length"]


def batch_passages(batch: Batch, prefix: str = "") -> PassageBatch:
    """Return the passages of a batch, ids [batch, d].

    Args:
        batch: with "document", "document_length" and "document_title_length".
        prefix: prefix of these names.
    """
    return PassageBatch(*(batch[f"{prefix}document{part}"] for part in ("", "_length", "_title_length")))


def batch_candidates(batch: Batch) -> PassageBatch:
    """Return the passages of a batch, each the only candidate of its text: ids [batch, 1, d]."""
    return PassageBatch(*(part[:, None] for part in batch_passages(batch)))


def null_candidates(context: StaticContext, batch: Batch) -> PassageBatch:
    """Return the null document as the only candidate of each text.

    Args:
        context: with the ids of special tokens.
        batch: batch of the texts.

    Returns:
        ids [batch, 1, 3].
    """
    null = null_passages(len(batch["query"]), (context.cls_id, context.sep_id))
    return PassageBatch(*(part[:, None] for part in null))


def dropout_keys(key: Array | None, count: int) -> list[Array | None]:
    """Split a dropout key.

    Args:
        key: None for no dropout.
        count: count of the keys.

    Returns:
        `count` keys, all None without dropout.
    """
    return [None] * count if key is None else list(jax.random.split(key, count))


# --- Retrieve for masked sentences ------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """Retrieved passages.

    Attributes:
        rows: [batch, k].
        valid: False for the example's source passage and for passages that are held out, bool [batch, k].
        excluded: number of passages dropped as the source passage or because they contain the sentence, [batch].
    """

    rows: Array
    valid: Array
    excluded: Array


def retrieve(realm: RealmConfig, context: StaticContext, params: Params, batch: Batch, index: Index) -> Candidates:
    """Return the K − 1 best passages of each masked sentence.

    With `exclude_own` we drop the source passage of the sentence (`own_row`, −1 for none) and every passage that
    contains the unmasked sentence. We also drop missing rows (−1) and rows that are held out. The search returns one
    passage more to replace one of them; if there are more, they are marked invalid.

    Args:
        realm: number of candidates, search method and exclusion.
        context: context of the run.
        params: all parameters.
        batch: masked sentences. If hosts search, their rows are `retrieved_rows`; a search that is not by vectors takes
            BM25's list, `bm25_rows` and `bm25_scores`.
        index: index that is searched.
    """
    count = realm.candidates - 1
    if index.vectors is None:
        rows = batch["retrieved_rows"]
    else:
        queries = embed_searching_queries(context, params, batch, index.query_encoder)
        own_row = batch["own_row"] if realm.exclude_own else None
        depth = min(count + 1, context.rows)
        rows = search_passages(context, realm.search, queries, batch, index, depth, own_row).rows
    is_source = rows < 0  # [batch, depth]
    if realm.exclude_own:
        is_source |= contains_phrase(gather_passages(index, rows).ids, batch["sentence"], batch["sentence_length"])
        is_source |= rows == batch["own_row"][:, None]
    is_excluded = is_source if index.held_out is None else is_source | index.held_out[jnp.maximum(rows, 0)]
    order = jnp.argsort(is_excluded, axis=1, stable=True)[:, :count]  # [batch, k]
    pick = partial(jnp.take_along_axis, indices=order, axis=1)
    return Candidates(pick(rows), ~pick(is_excluded), (is_source & (rows >= 0)).sum(axis=1))


def search_depth(realm: RealmConfig, rows: int) -> int:
    """Return the number of passages that a search returns for a masked sentence.

    They are as many as candidates: K − 1 passages, and one more in case the sentence's source passage is among them.

    Args:
        realm: with the number of candidates, K.
        rows: passages of the corpus.
    """
    return min(realm.candidates, rows)


def embed_searching_queries(
    context: StaticContext, params: Params, batch: Batch, query_encoder: Params | None
) -> Array:
    """Embed the queries that search, without dropout.

    Args:
        context: context of the run.
        params: all parameters.
        batch: with "query" [batch, q].
        query_encoder: parameters of the query encoder; None for those in `params`.

    Returns:
        [batch, projection] float32.
    """
    if query_encoder is not None:
        params = {**params, context.model.embedder_names[0]: query_encoder}
    packing = context.packing_for(len(batch["query"]))
    return context.model.embed_queries(params, batch["query"], batch["query_length"], packed_length=packing.queries)


# --- Retrieve for questions -------------------------------------------------------------------------------------------


def retrieve_and_rerank(
    qa: QaConfig, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None, beam: int,
    pipeline: SearchPipeline | None = None,
) -> tuple[FusedRanking, Array | None]:  # fmt: skip
    """Return the best passages of each question.

    Args:
        qa: settings of fine-tuning.
        context: context of the run.
        params: all parameters.
        batch: questions, with BM25's list as `bm25_rows` and `bm25_scores` if it takes part.
        index: index that is searched; without vectors, the scores are BM25's.
        key: random key for dropout; None for none.
        beam: passages of each question.
        pipeline: search and reranker; None for `qa.search` without reranker, as in fine-tuning.

    Returns:
        The ranking, arrays [batch, beam, …]; and the query vectors [batch, projection], None without vectors. Scores
        are inner products with the stored vectors, and gradient reaches only the query encoder.
    """
    pipeline = pipeline or SearchPipeline(qa.search)
    rerank = pipeline.rerank
    if rerank is None:
        return retrieve_for_questions(pipeline.search, context, params, batch, index, key, beam)
    depth = max(beam, rerank.passages)
    ranking, queries = retrieve_for_questions(pipeline.search, context, params, batch, index, key, depth)
    first = FusedRanking(*(part[:, : rerank.passages] for part in ranking))  # [batch, k, …]
    rescored = rerank.rescore(qa, context, params, batch, index, first)
    order = jnp.argsort(-rescored.values, axis=1, stable=True)  # [batch, k]

    def reorder(part: Array) -> Array:
        return jnp.take_along_axis(part, order.reshape(order.shape + (1,) * (part.ndim - 2)), axis=1)

    reordered = [reorder(part) for part in first._replace(scores=rescored.scores)]
    rest = (part[:, rerank.passages :] for part in ranking)
    joined = FusedRanking(*(jnp.concatenate(parts, axis=1) for parts in zip(reordered, rest, strict=True)))
    positions = jnp.arange(1, joined.rows.shape[1] + 1)
    reranked = jnp.where((joined.rows >= 0) & (positions <= rerank.passages), positions, 0).astype(jnp.int32)
    joined = joined._replace(ranks=jnp.concatenate([joined.ranks, reranked[..., None]], axis=2))  # [batch, depth, 3]
    return FusedRanking(*(part[:, :beam] for part in joined)), queries


def rescore_by_tokens(
    qa: QaConfig, context: StaticContext, params: Params, batch: Batch, index: Index, ranking: FusedRanking
) -> Rescored:
    """Rescore passages by z(value of the search) + WEIGHT · z(MaxSim), see `retrieval/token_rerank.py`.

    Token vectors of passages are those of the index, if it has them.

    Args:
        qa: settings of fine-tuning.
        context: has the encoders.
        params: all parameters.
        batch: questions.
        index: has the passages.
        ranking: ranking of the passages, [batch, k].

    Returns:
        With the scores of the ranking.
    """
    assert index.words is not None, "`Run.index` has them"
    queries = query_words(context.model, params, batch["query"], batch["query_length"], index.words)
    if index.tokens is None:
        similarities = max_sims(context.model, params, queries, gather_passages(index, ranking.rows))  # [batch, k]
    else:
        similarities = stored_max_sims(queries, index.tokens, ranking.rows)
    return Rescored(combined_values(ranking.values, similarities, ranking.rows >= 0), ranking.scores)


def retrieve_for_questions(
    method: str, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None, beam: int
) -> tuple[FusedRanking, Array | None]:
    """Return the best passages of each question by a search, without reranking.

    Args:
        method: one of `config.SEARCHES`.
        context: as in `retrieve_and_rerank`, like all other arguments and the result.
        params: all parameters.
        batch: questions.
        index: index that is searched.
        key: random key for dropout; None for none.
        beam: passages of each question.
    """
    depth = min(beam, context.rows)
    if index.vectors is None:
        rows = batch["bm25_rows"][:, :depth]
        scores = jnp.where(rows >= 0, batch["bm25_scores"][:, :depth], NEG_INF)
        return FusedRanking(rows, scores, ranks_of("bm25", jnp, rows), scores), None
    packing = context.packing_for(len(batch["query"]))
    queries = context.model.embed_queries(params, batch["query"], batch["query_length"], key, packing.queries)
    return search_passages(context, method, queries, batch, index, depth), queries


def falling_scores(scores: Array) -> Array:
    """Sort the scores of each list, [batch, k].

    A search by vectors returns them sorted. If BM25 takes part, the first passage may not have the largest inner
    product.
    """
    return -jnp.sort(-scores, axis=1)


# --- Search -----------------------------------------------------------------------------------------------------------


def search_passages(
    context: StaticContext, method: str, queries: Array, batch: Batch, index: Index, depth: int,
    own_row: Array | None = None,
) -> FusedRanking:  # fmt: skip
    """Return the `depth` best passages of query vectors, with the retriever's scores.

    Args:
        context: context of the run.
        method: one of `config.SEARCHES`; 'bm25' and 'hybrid' take BM25's list from the batch.
        queries: [batch, projection].
        batch: with `bm25_rows` and `bm25_scores` [batch, list] if the method needs them.
        index: with vectors.
        depth: passages for each query.
        own_row: [batch], −1 for none; 'hybrid' drops this row from the list of vectors before fusion, because its score
            would dominate the normalization.

    Returns:
        Arrays [batch, depth, …]. If BM25 returns fewer, rows are −1 and scores NEG_INF. Only the queries get a
        gradient from the scores.
    """
    if method == "bm25":
        rows, values = batch["bm25_rows"][:, :depth], batch["bm25_scores"][:, :depth]
        return FusedRanking(rows, stored_scores(queries, index, rows), ranks_of(method, jnp, rows), values)
    listed = depth if method == "vectors" else min(max(depth, FUSION_DEPTH + (own_row is not None)), context.rows)
    rows = search(context.mesh, queries, index.vectors, context.rows, listed).rows  # [batch, listed]
    scores = stored_scores(queries, index, rows)
    if method == "vectors":
        return FusedRanking(rows, scores, ranks_of(method, jnp, rows), jax.lax.stop_gradient(scores))
    if own_row is not None:
        rows = jnp.where(rows == own_row[:, None], -1, rows)
    bm25 = batch["bm25_rows"], batch["bm25_scores"]
    vector_scores, bm25_vector_scores = jax.lax.stop_gradient((scores, stored_scores(queries, index, bm25[0])))
    fused = fuse(rows, vector_scores, *bm25, bm25_vector_scores, depth)
    return fused._replace(scores=stored_scores(queries, index, fused.rows))


def bm25_list_length(method: str, depth: int, rows: int) -> int:
    """Return the length of BM25's list in a search; 0 if BM25 takes no part.

    Args:
        method: one of `config.SEARCHES`.
        depth: passages that the search returns.
        rows: passages of the corpus.
    """
    return 0 if method == "vectors" else min(max(depth, FUSION_DEPTH), rows)


def gather_passages(index: Index, rows: Array) -> PassageBatch:
    """Return the token rows of candidates.

    Args:
        index: with the token rows of the corpus.
        rows: [...] int32; a missing row (below 0) gives an empty passage, with special tokens only.

    Returns:
        ids [..., d].
    """
    ids, lengths, titles = (part[jnp.maximum(rows, 0)] for part in index.documents)
    exists = rows >= 0
    return PassageBatch(ids, jnp.where(exists, lengths, DOCUMENT_SPECIALS + 1), jnp.where(exists, titles, 0))


# --- Score: p(z|x) ----------------------------------------------------------------------------------------------------


def stored_scores(queries: Array, index: Index, rows: Array) -> Array:
    """Return inner products with stored vectors, which get no gradient.

    Args:
        queries: [batch, projection].
        index: with vectors.
        rows: [batch, k].

    Returns:
        [batch, k]; NEG_INF for a missing row (below 0), so that its softmax is 0.
    """
    vectors = index.vectors[jnp.maximum(rows, 0)].astype(jnp.float32)  # [batch, k, projection]
    return jnp.where(rows >= 0, jnp.einsum("bd,bkd->bk", queries, jax.lax.stop_gradient(vectors)), NEG_INF)


def candidate_scores(
    context: StaticContext, params: Params, batch: Batch, passages: PassageBatch, key: Array | None,
    index: Index | None = None, rows: Array | None = None,
) -> Array:  # fmt: skip
    """Return inner products with current parameters, the null document first.

    Args:
        context: context of the run.
        params: all parameters.
        batch: with "query" [batch, q].
        passages: ids [batch, k, d].
        key: random key for dropout; None for none.
        index: its stored vectors replace those of `passages` if `rows` is not None.
        rows: rows of the passages in the index, [batch, k].

    Returns:
        [batch, 1 + k] float32.
    """
    keys = dropout_keys(key, 3)
    packing = context.packing_for(len(passages.ids))
    queries = context.model.embed_queries(params, batch["query"], batch["query_length"], keys[0], packing.queries)
    null = embed_null(context, params, keys[2])  # [1, projection]
    if index is not None and rows is not None:
        scores = stored_scores(queries, index, rows)  # [batch, k]
    else:
        vectors = embed_candidates(context, params, passages, keys[1], packing.passages)
        scores = jnp.einsum("bd,bkd->bk", queries, vectors)
    return jnp.concatenate([queries @ null.T, scores], axis=1)


def embed_null(context: StaticContext, params: Params, key: Array | None) -> Array:
    """Embed the null document with the passage encoder.

    Args:
        context: context of the run.
        params: all parameters.
        key: random key for dropout; None for none.

    Returns:
        [1, projection] float32.
    """
    return context.model.embed_documents(params, null_passages(1, (context.cls_id, context.sep_id)), key)


def embed_candidates(
    context: StaticContext, params: Params, passages: PassageBatch, key: Array | None, packed_length: int = 0
) -> Array:
    """Embed candidates with current parameters.

    Args:
        context: context of the run.
        params: all parameters.
        passages: ids [batch, k, d].
        key: random key for dropout; None for none.
        packed_length: token slots, see `PackingSpec`; 0 pads.

    Returns:
        [batch, k, projection] float32.
    """
    flat = PassageBatch(*(part.reshape(-1, *part.shape[2:]) for part in passages))  # ids [batch · k, d]
    vectors = context.model.embed_documents(params, flat, key, packed_length)  # [batch · k, projection]
    return vectors.reshape(*passages.ids.shape[:2], -1)


# --- Read a masked sentence: p(y|z,x) ---------------------------------------------------------------------------------


class MaskedReading(NamedTuple):
    """A masked sentence read with each of its candidates, the null document first and then k passages.

    Attributes:
        candidates: the passages.
        valid: True if a candidate takes part, bool [batch, 1 + k].
        scores: inner products with current parameters, [batch, 1 + k].
        log_p: log p(y_j|z,x) of each target, [batch, 1 + k, m].
        is_top1: True if the target is the most probable token, bool [batch, 1 + k, m].
        truncated_fraction: share of the tokens to read and embed that packing had no slot for.
    """

    candidates: Candidates
    valid: Array
    scores: Array
    log_p: Array
    is_top1: Array
    truncated_fraction: WeightedSum


def read_masked(
    realm: RealmConfig, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None,
    frozen_passages: bool,
) -> MaskedReading:  # fmt: skip
    """Retrieve for masked sentences, score the candidates, and read the sentences with them.

    Args:
        realm: how candidates are retrieved and read.
        context: context of the run.
        params: all parameters.
        batch: `tasks/realm.py: MaskedSentences`, [batch, …].
        index: index that is searched.
        key: random key for dropout; None for none.
        frozen_passages: passages keep the vectors of the index.
    """
    candidates = retrieve(realm, context, params, batch, index)
    passages = gather_passages(index, candidates.rows)  # ids [batch, k, d]
    keys = dropout_keys(key, 2)
    stored = candidates.rows if frozen_passages else None
    scores = candidate_scores(context, params, batch, passages, keys[0], index, stored)  # [batch, 1 + k]
    if not realm.reads:
        read = presence_of_targets(context, batch, passages)
    elif realm.uses_span_marginal:
        # An invalid passage must not be one of the MAX_POINTED that are read.
        rows = jnp.where(candidates.valid, candidates.rows, -1)
        read = point_at_targets(context, params, batch, gather_passages(index, rows), keys[1])
    else:
        read = read_candidates(context, params, batch, passages, keys[1])
    valid = jnp.pad(candidates.valid, ((0, 0), (1, 0)), constant_values=realm.null_document)  # [batch, 1 + k]

    # Lengths of all sequences that packing may have truncated, each with its slots.
    packing = context.packing_for(len(candidates.rows))
    lengths = [(context.model.query_lengths(batch["query_length"]), packing.queries)]
    if realm.reads:
        lengths.append((read.lengths, packing.reader_inputs))
    if not realm.uses_span_marginal:
        lengths.append((reader_query(batch)[1] + 1, packing.null_inputs))
    if not frozen_passages:
        lengths.append((context.model.document_lengths(passages), packing.passages))
    longest = 2 * (batch["query"].shape[1] + passages.ids.shape[-1])  # twice as long, because templates add tokens
    truncated = truncated_fraction(context, lengths, longest)
    return MaskedReading(candidates, valid, scores, read.log_p, read.is_top1, truncated)


class TargetReading(NamedTuple):
    """Targets that were read with each candidate.

    Attributes:
        log_p: see `MaskedReading`, [batch, 1 + k, m].
        is_top1: see `MaskedReading`, [batch, 1 + k, m].
        lengths: lengths of the reader's inputs with passages, [batch, n]; n is 0 if nothing is read.
    """

    log_p: Array
    is_top1: Array
    lengths: Array


def read_candidates(
    context: StaticContext, params: Params, batch: Batch, passages: PassageBatch, key: Array | None
) -> TargetReading:
    """Predict the masked tokens with the null document and with each passage.

    The input with the null document is short, so it is read separately and not at the passages' length.

    Args:
        context: context of the run.
        params: all parameters.
        batch: masked sentences, [batch, …].
        passages: ids [batch, k, d].
        key: random key for dropout; None for none.
    """
    keys, packing = dropout_keys(key, 2), context.packing_for(len(passages.ids))
    null = read_targets(context, params, batch, null_candidates(context, batch), keys[0], packing.null_inputs)
    read = read_targets(context, params, batch, passages, keys[1], packing.reader_inputs)
    log_p, is_top1 = (jnp.concatenate(pair, axis=1) for pair in zip(null, read, strict=True))  # [batch, 1 + k, m]
    return TargetReading(log_p, is_top1, reader_inputs(*reader_query(batch), passages).lengths)


def read_targets(
    context: StaticContext, params: Params, batch: Batch, passages: PassageBatch, key: Array | None = None,
    packed_length: int = 0,
) -> tuple[Array, Array]:  # fmt: skip
    """Return log p(y_j|z,x) of every target with each passage.

    Args:
        context: context of the run.
        params: all parameters.
        batch: masked sentences, [batch, …].
        passages: ids [batch, k, d].
        key: random key for dropout; None for none.
        packed_length: slots of the reader's inputs, see `PackingSpec`; 0 pads.

    Returns:
        Log probabilities [batch, k, m] float32; and True if the target is the most probable token, [batch, k, m] bool.
    """
    reader_input, positions = masked_inputs(batch, passages)
    targets = jnp.repeat(batch["targets"], passages.ids.shape[1], axis=0)  # [batch · k, m]
    log_p, is_top1 = context.model.reader.read_targets(params, reader_input, positions, targets, key, packed_length)
    shape = (*passages.ids.shape[:2], -1)
    return log_p.reshape(shape), is_top1.reshape(shape)


def masked_inputs(batch: Batch, passages: PassageBatch) -> tuple[ReaderInput, Array]:
    """Join masked texts with passages for the reader.

    Args:
        batch: masked sentences, [batch, …].
        passages: ids [batch, k, d].

    Returns:
        Reader inputs [batch · k, length], and positions of the masked tokens [batch · k, m].
    """
    reader_input = flatten_passages(reader_inputs(*reader_query(batch), passages))
    return reader_input, jnp.repeat(batch["positions"], passages.ids.shape[1], axis=0)


def point_at_targets(
    context: StaticContext, params: Params, batch: Batch, passages: PassageBatch, key: Array | None = None
) -> TargetReading:
    """Read like `read_candidates`, but point at the hidden span in each passage instead of predicting its words.

    The first token has log p(y|z,x), and the others 0; `is_top1` is the same for all tokens. The null document
    has nothing to point at. We read only MAX_POINTED passages, first those that contain the span. All others and the
    null document get LOG_P_UNSEEN_SPAN. A span of more tokens than `span_width` is in no passage.

    Args:
        context: context of the run.
        params: all parameters.
        batch: masked sentences, [batch, …].
        passages: ids [batch, k, d].
        key: random key for dropout; None for none.
    """
    holds_span = has_answer_span(passages, *hidden_span(batch), context.model.reader.span_width)  # [batch, k]
    order = jnp.argsort(~holds_span, axis=1, stable=True)[:, :MAX_POINTED]
    examples = jnp.arange(len(order))[:, None]  # [batch, 1]
    first = PassageBatch(*(part[examples, order] for part in passages))  # ids [batch, MAX_POINTED, d]
    spans = masked_spans(context, params, batch, first, key)
    log_p, is_top1 = pointing(spans.scores, spans.allowed, spans.correct)  # [batch, MAX_POINTED]
    shape = (len(order), 1 + holds_span.shape[1])
    log_p = jnp.full(shape, LOG_P_UNSEEN_SPAN).at[examples, 1 + order].set(log_p)  # [batch, 1 + k]
    is_top1 = jnp.zeros(shape, bool).at[examples, 1 + order].set(is_top1)
    is_first = jnp.arange(batch["targets"].shape[1]) == 0  # [m]
    log_p = jnp.where(is_first, log_p[..., None], 0.0)  # [batch, 1 + k, m]
    is_top1 = jnp.broadcast_to(is_top1[..., None], (*shape, is_first.size))
    return TargetReading(log_p, is_top1, spans.reader_input.lengths)


def presence_of_targets(context: StaticContext, batch: Batch, passages: PassageBatch) -> TargetReading:
    """Return the reading of a reader that is certain: p(y|z,x) is 1 if a passage has the hidden span.

    All others and the null document get LOG_P_UNSEEN_SPAN. The result has the form of `point_at_targets`.

    Args:
        context: context of the run.
        batch: masked sentences, [batch, …].
        passages: ids [batch, k, d].
    """
    holds_span = has_answer_span(passages, *hidden_span(batch), context.model.reader.span_width)  # [batch, k]
    is_held = jnp.pad(holds_span, ((0, 0), (1, 0)))[..., None]  # [batch, 1 + k, 1], the null document first
    is_first = jnp.arange(batch["targets"].shape[1]) == 0  # [m]
    log_p = jnp.where(is_first & ~is_held, LOG_P_UNSEEN_SPAN, 0.0)  # [batch, 1 + k, m]
    is_top1 = jnp.broadcast_to(is_held, log_p.shape)
    return TargetReading(log_p, is_top1, jnp.zeros((len(log_p), 0), jnp.int32))


def hidden_span(batch: Batch) -> tuple[Array, Array]:
    """Return the hidden span of masked texts as the only answer of each: ids [batch, 1, m] and lengths [batch, 1]."""
    return batch["targets"][:, None], batch["weights"].sum(axis=1, keepdims=True).astype(jnp.int32)


def masked_spans(
    context: StaticContext, params: Params, batch: Batch, passages: PassageBatch, key: Array | None = None
) -> "SpanReading":
    """Read masked texts with passages and their titles, to point at the hidden span.

    Args:
        context: context of the run.
        params: all parameters.
        batch: masked sentences, [batch, …].
        passages: ids [batch, k, d].
        key: random key for dropout; None for none.
    """
    reader_input = reader_inputs(*reader_query(batch), passages, titles=True)
    return read_spans(context, params, reader_input, hidden_span(batch), key)


# --- Read a question --------------------------------------------------------------------------------------------------


class QuestionReading(NamedTuple):
    """A question read with the first k passages of its beam.

    Attributes:
        rows: rows of the passages, [batch, k].
        scores: scores of the passages, [batch, k].
        reader_input: questions joined with passages, arrays [batch, k, length].
        span_scores: [batch, k, length, width].
        beam: all retrieved passages.
        allowed: the spans that may be answers, like `span_scores`.
        correct: the spans that are one of the batch's answers, like `span_scores`.
        prior: log p(z|x), [batch, k].
        spans: log p(span|z,x), like `span_scores`.
        truncated_fraction: see `MaskedReading`.
    """

    rows: Array
    scores: Array
    reader_input: ReaderInput
    span_scores: Array
    beam: FusedRanking
    allowed: Array
    correct: Array
    prior: Array
    spans: Array
    truncated_fraction: WeightedSum


def read_question(
    qa: QaConfig, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None, beam: int,
    pipeline: SearchPipeline | None = None,
) -> QuestionReading:  # fmt: skip
    """Retrieve a beam for questions with the stored vectors and read its first `qa.passages`.

    Gradient reaches the query encoder through the scores, with `qa.trains_passages` the passage encoder through those
    of the passages that are read, and the reader through the spans. With `qa.uses_bm25_only` only the reader learns.

    Args:
        qa: how passages are retrieved and read.
        context: context of the run.
        params: all parameters.
        batch: questions, with BM25's list if it takes part; without answers no span is correct.
        index: index that is searched.
        key: random key for dropout; None for none.
        beam: passages that are retrieved.
        pipeline: search and reranker, see `retrieve_and_rerank`.
    """
    keys = dropout_keys(key, 3 if qa.trains_passages else 2)
    ranking, queries = retrieve_and_rerank(qa, context, params, batch, index, keys[0], beam, pipeline)
    scores, rows = ranking.scores, ranking.rows[:, : qa.passages]  # [batch, beam], [batch, k]
    passages = gather_passages(index, rows)  # ids [batch, k, d]
    packing = context.packing_for(len(rows))
    if qa.trains_passages and (pipeline is None or pipeline.rerank is None):
        vectors = embed_candidates(context, params, passages, keys[2], packing.passages)
        fresh = jnp.where(rows >= 0, jnp.einsum("bd,bkd->bk", queries, vectors), NEG_INF)  # [batch, k]
        scores = jnp.concatenate([fresh, scores[:, qa.passages :]], axis=1)
    reader_input = reader_inputs(*reader_query(batch), passages, qa.titles)
    read_scores = scores[:, : qa.passages]
    no_answer = jnp.zeros((len(batch["query"]), 1, 1), jnp.int32)
    answers = batch.get("answers", no_answer), batch.get("answer_lengths", no_answer[:, :, 0])
    read = read_spans(context, params, reader_input, answers, keys[1])
    prior, log_p = answer_log_probabilities(read_scores, read.scores, read.allowed, qa.objective)

    lengths = [(context.model.query_lengths(batch["query_length"]), packing.queries)]
    lengths.append((reader_input.lengths, packing.reader_inputs))
    if qa.trains_passages:
        lengths.append((context.model.document_lengths(passages), packing.passages))
    # Twice the reader's length, because templates add tokens.
    truncated = truncated_fraction(context, lengths, 2 * reader_input.ids.shape[-1])
    return QuestionReading(
        rows, read_scores, reader_input, read.scores, ranking._replace(scores=scores), read.allowed, read.correct,
        prior, log_p, truncated,
    )  # fmt: skip


# --- Spans and truncation ---------------------------------------------------------------------------------------------


class SpanReading(NamedTuple):
    """The spans of passages that are read with a text; arrays [batch, k, length, span_width].

    Attributes:
        reader_input: texts joined with passages, arrays [batch, k, length].
        scores: scores of the spans.
        allowed: spans that may be pointed at.
        correct: spans that are an answer.
    """

    reader_input: ReaderInput
    scores: Array
    allowed: Array
    correct: Array


def read_spans(
    context: StaticContext, params: Params, reader_input: ReaderInput, answers: tuple[Array, Array], key: Array | None
) -> SpanReading:
    """Read texts with passages to point at answers.

    No span may be pointed at in tokens that packing had no slot for.

    Args:
        context: context of the run.
        params: all parameters.
        reader_input: arrays [batch, k, length].
        answers: ids [batch, a, m] and their lengths [batch, a].
        key: random key for dropout; None for none.
    """
    reader, packed_length = context.model.reader, context.packing_for(len(reader_input.ids)).reader_inputs
    compute, length = reader.bert.compute, reader_input.ids.shape[-1]
    lengths = packed_lengths(reader_input.lengths, length, packed_length, compute.mesh, compute.alignment)
    allowed, correct = answer_spans(reader_input._replace(lengths=lengths), *answers, reader.span_width)
    scores = reader.read_spans(params, flatten_passages(reader_input), key, packed_length)  # [batch · k, length, width]
    return SpanReading(reader_input, scores.reshape(*reader_input.ids.shape, reader.span_width), allowed, correct)


def truncated_fraction(context: StaticContext, sequences: list[tuple[Array, int]], longest: int) -> WeightedSum:
    """Return the share of the tokens of sequences that packing has no slot for.

    Args:
        context: context of the run.
        sequences: lengths [batch, …], and the token slots of a device's share, 0 if they are padded.
        longest: no sequence is longer.
    """
    lost, total = jnp.float32(0), jnp.float32(0)
    compute = context.model.bert.compute
    for lengths, packed_length in sequences:
        fitting = packed_lengths(lengths, longest, packed_length, compute.mesh, compute.alignment)
        lost += (lengths - fitting).sum()
        total += lengths.sum()
    return WeightedSum(lost, total)
