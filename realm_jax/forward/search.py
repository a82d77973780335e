"""Which passages a step retrieves, and their scores: p(z|x). How vectors are searched is `retrieval/exact.py`."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from realm_jax.forward.context import Batch, Index, Rerank, StepContext, dropout_keys
from realm_jax.models.inputs import DOCUMENT_SPECIALS, Documents, contains_phrase, null_documents
from realm_jax.models.likelihood import NEGATIVE
from realm_jax.models.realm import Params
from realm_jax.retrieval.exact import search
from realm_jax.retrieval.fusion import FUSION_DEPTH, FusedRanking, fuse, ranks_of

Array = jax.Array


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


def search_queries(context: StepContext, params: Params, batch: Batch, tower: Params | None) -> Array:
    """What is searched with, [batch, projection]: without dropout, by the current query embedder or by `tower`."""
    if tower is not None:
        params = {**params, context.model.embedder_names[0]: tower}
    places = context.places(len(batch["query"])).queries
    return context.model.embed_queries(params, batch["query"], batch["query_length"], places=places)


def search_depth(context: StepContext) -> int:
    """Rows searched for each masked sentence: its candidates, with its own passage in the null document's place."""
    return min(context.candidates, context.rows)


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
    added = rerank.added(context, params, batch, gather_documents(index, rows))
    order = jnp.argsort(-(scores_by_place(scores) + added), axis=1, stable=True)
    first = rows, scores + added, ranks
    picked = (jnp.take_along_axis(part, order.reshape(order.shape + (1,) * (part.ndim - 2)), axis=1) for part in first)
    rest = (part[:, rerank.passages :] for part in found)
    return FusedRanking(*(jnp.concatenate(parts, axis=1) for parts in zip(picked, rest, strict=True)))


def scores_by_place(scores: Array) -> Array:
    """Scores that fall from place to place: those of a list [batch, k], sorted. A search by vectors has them so; in a
    list that words had a part in, the first passage need not have the largest inner product."""
    return -jnp.sort(-scores, axis=1)


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


def bm25_list_length(search: str, depth: int, rows: int) -> int:
    """Passages in BM25's list of a search for `depth` of `rows` passages; 0 where BM25 takes no part."""
    return 0 if search == "vectors" else min(max(depth, FUSION_DEPTH), rows)


def stored_scores(queries: Array, index: Index, rows: Array) -> Array:
    """Inner products of queries [batch, d] with the stored vectors of rows [batch, k], without a gradient to those.

    NEGATIVE for no row (below 0), so that nothing of a softmax falls to it.
    """
    vectors = index.vectors[jnp.maximum(rows, 0)].astype(jnp.float32)
    return jnp.where(rows >= 0, jnp.einsum("bd,bkd->bk", queries, jax.lax.stop_gradient(vectors)), NEGATIVE)


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


def gather_documents(index: Index, rows: Array) -> Documents:
    """The document rows of candidates. rows [...] int32 → ids [..., length].

    No row (below 0) gives an empty passage: special pieces alone, where no answer can stand.
    """
    ids, lengths, titles = (part[jnp.maximum(rows, 0)] for part in index.documents)
    found = rows >= 0
    return Documents(ids, jnp.where(found, lengths, DOCUMENT_SPECIALS + 1), jnp.where(found, titles, 0))
