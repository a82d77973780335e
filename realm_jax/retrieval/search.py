"""Retrieval inside a step: the corpus on the devices, and candidates for a query.

Pure functions of (context, parameters, batch, index), shared by training and evaluation; a refreshed index is new data,
not a new program. How candidates are scored and read: `realm_jax/forward.py`, the one thing to read next.
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

from realm_jax.models.inputs import DOCUMENT_SPECIALS, Documents, contains_phrase, null_documents
from realm_jax.models.likelihood import NEGATIVE
from realm_jax.models.realm import Params, Realm
from realm_jax.retrieval.exact import search
from realm_jax.retrieval.fusion import FUSION_DEPTH, FusedRanking, fuse, ranks_of
from realm_jax.retrieval.scann import Searcher

Array = jax.Array
Batch = dict[str, Array]


class Index(NamedTuple):
    """The corpus on the device: vectors [padded rows, projection] and the document rows they stand for.

    vectors: None if hosts search. tower: parameters of the query embedder that searches; None for the current one.
    reader_documents: the same rows in the tokens of a reader that has its own; None if it reads `documents`.
    """

    vectors: Any
    documents: Documents
    tower: Params | None = None
    reader_documents: Documents | None = None


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
    search_block: int = 65_536  # vectors scored at a time on a device, a multiple of 32
    qa_objective: str = "marginal"
    qa_beam: int = 64  # passages that the retriever's term of fine-tuning, and the inverse cloze task, rank
    qa_passages: int = 5  # passages that are read
    qa_titles: bool = False  # with their titles
    qa_search: str = "vectors"  # what finds them, one of `sections.SEARCHES`
    search: str = "vectors"  # what finds REALM's candidates
    qa_documents: bool = False  # whether fine-tuning trains the document embedder as well
    rerank: Rerank | None = None  # what orders them anew; nothing does while a task is trained
    reader_special: tuple[int, int] | None = None  # ids of [CLS] and [SEP] of a reader with a tokenizer of its own

    @property
    def qa_words(self) -> bool:
        """Whether words alone find the passages of a question."""
        return self.qa_search == "bm25"


def dropout_keys(key: Array | None, count: int) -> list[Array | None]:
    """`count` keys from one; None stays None, which means no dropout."""
    return [None] * count if key is None else list(jax.random.split(key, count))


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


class Candidates(NamedTuple):
    """Retrieved passages without the example's own. rows, valid [batch, k]; excluded [batch]: how many passages were
    dropped as its own."""

    rows: Array
    valid: Array
    excluded: Array


def retrieve(context: StepContext, params: Params, batch: Batch, index: Index, count: int) -> Candidates:
    """The `count` best passages for each masked sentence, with `exclude_own` the example's own passage left out.

    The example's own passage is the same row (`own_row`, −1 for none) or a passage in which the unmasked sentence
    occurs; no row (−1) is treated alike. One more than `count` is searched; passages still excluded after that are
    marked invalid rather than replaced. Where hosts search, the rows are the batch's `retrieved_rows`. With another
    search than that of vectors the batch has BM25's list, as `bm25_rows` and `bm25_scores`.
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
    order = jnp.argsort(own, axis=1, stable=True)[:, :count]
    pick = partial(jnp.take_along_axis, indices=order, axis=1)
    return Candidates(pick(rows), ~pick(own), (own & (rows >= 0)).sum(axis=1))


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
    rows = search(context.mesh, queries, index.vectors, context.rows, listed, context.search_block).rows
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
    return context.model.embed_queries(params, batch["query"], batch["query_length"])


def bm25_list_length(search: str, depth: int, rows: int) -> int:
    """Passages in BM25's list of a search for `depth` of `rows` passages; 0 where BM25 takes no part."""
    return 0 if search == "vectors" else min(max(depth, FUSION_DEPTH), rows)


def search_depth(context: StepContext) -> int:
    """Rows searched for each masked sentence: its candidates, with its own passage in the null document's place."""
    return min(context.candidates, context.rows)


def embed_null(context: StepContext, params: Params, key: Array | None) -> Array:
    """The null document's vector [1, projection], through the document embedder."""
    return context.model.embed_documents(params, null_documents(1, (context.cls_id, context.sep_id)), key)


def embed_candidates(context: StepContext, params: Params, documents: Documents, key: Array | None) -> Array:
    """The vectors of candidates by current parameters. documents.ids [batch, k, d] → [batch, k, projection]."""
    flat = Documents(*(part.reshape(-1, *part.shape[2:]) for part in documents))
    return context.model.embed_documents(params, flat, key).reshape(*documents.ids.shape[:2], -1)


def stored_scores(queries: Array, index: Index, rows: Array) -> Array:
    """Inner products of queries [batch, d] with the stored vectors of rows [batch, k], without a gradient to those.

    NEGATIVE for no row (below 0), so that nothing of a softmax falls to it.
    """
    vectors = index.vectors[jnp.maximum(rows, 0)].astype(jnp.float32)
    return jnp.where(rows >= 0, jnp.einsum("bd,bkd->bk", queries, jax.lax.stop_gradient(vectors)), NEGATIVE)
