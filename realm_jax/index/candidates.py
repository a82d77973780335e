"""Retrieval inside a step: the corpus on the devices, candidates for a query, their scores, and reading them.

Pure functions of (setting, parameters, batch, index), shared by training and evaluation; a refreshed index is new data,
not a new program. The losses made of them are in `training/tasks.py`.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from realm_jax.index.exact import search
from realm_jax.index.fusion import LIST, Fused, fuse, ranks_of
from realm_jax.models.inputs import DOCUMENT_SPECIALS, Documents, Joint, contains, hold_answers, join, null_documents
from realm_jax.models.likelihood import NEGATIVE
from realm_jax.models.realm import Params, Realm, flatten_joint

Array = jax.Array
Batch = dict[str, Array]
BEAM_PART = 64  # passages of a beam that are looked through at a time


class Index(NamedTuple):
    """The corpus on the device: vectors [padded rows, projection] and the document rows they stand for.

    vectors: None where hosts search. tower: parameters of the query embedder that searches; None for the current one.
    """

    vectors: Any
    documents: Documents
    tower: Params | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """Everything a loss needs beside its arrays; fixed for a run, so it is part of the compiled program."""

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
    qa_search: str = "vectors"  # what finds them, one of `config.SEARCHES`
    search: str = "vectors"  # what finds REALM's candidates
    qa_documents: bool = False  # whether fine-tuning trains the document embedder as well

    @property
    def qa_words(self) -> bool:
        """Whether words alone find the passages of a question."""
        return self.qa_search == "bm25"


def dropout_keys(key: Array | None, count: int) -> list[Array | None]:
    """`count` keys from one; None stays None, which means no dropout."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def take(index: Index, rows: Array) -> Documents:
    """The document rows of candidates. rows [...] int32 → ids [..., length].

    No row (below 0) gives an empty passage: special pieces alone, where no answer can stand.
    """
    ids, lengths, titles = (part[jnp.maximum(rows, 0)] for part in index.documents)
    found = rows >= 0
    return Documents(ids, jnp.where(found, lengths, DOCUMENT_SPECIALS + 1), jnp.where(found, titles, 0))


class Candidates(NamedTuple):
    """Retrieved passages without the example's own. rows, valid [batch, k]; excluded [batch]: how many passages were
    dropped as its own."""

    rows: Array
    valid: Array
    excluded: Array


def retrieve(setting: Setting, params: Params, batch: Batch, index: Index, count: int) -> Candidates:
    """The `count` best passages for each masked sentence, with `exclude_own` the example's own passage left out.

    Own is the same row (`own_row`, −1 for none) or a passage in which the unmasked sentence occurs; no row (−1) is
    treated alike. One more than `count` is searched; what is still excluded after that is marked invalid, never
    replaced by a second search. Where hosts search, `found` of the batch are the rows. With another search than that of
    vectors the batch has BM25's list, as `word_rows` and `word_scores`.
    """
    if index.vectors is None:
        rows = batch["found"]
    else:
        queries = search_queries(setting, params, batch, index.tower)
        own_row = batch["own_row"] if setting.exclude_own else None
        rows = search_by(setting, setting.search, queries, batch, index, min(count + 1, setting.rows), own_row).rows
    own = rows < 0
    if setting.exclude_own:
        own |= contains(take(index, rows).ids, batch["sentence"], batch["sentence_length"])
        own |= rows == batch["own_row"][:, None]
    order = jnp.argsort(own, axis=1, stable=True)[:, :count]
    pick = partial(jnp.take_along_axis, indices=order, axis=1)
    return Candidates(pick(rows), ~pick(own), (own & (rows >= 0)).sum(axis=1))


def search_by(
    setting: Setting, how: str, queries: Array, batch: Batch, index: Index, depth: int, own_row: Array | None = None
) -> Fused:
    """The `depth` best passages of queries [batch, projection] by one of `config.SEARCHES`; scores: the retriever's.

    'bm25' and 'hybrid' take BM25's list from the batch (`word_rows`, `word_scores`). own_row [batch]: a row that takes
    no part in a list of vectors that is fused, where it would leave nothing to the others (−1 for none). Where words
    find fewer, rows are −1 and scores NEGATIVE. Scores carry gradient to the queries alone. The index has vectors.
    """
    if how == "bm25":
        rows = batch["word_rows"][:, :depth]
        return Fused(rows, stored_scores(queries, index, rows), ranks_of(how, jnp, rows))
    listed = depth if how == "vectors" else min(max(depth, LIST + (own_row is not None)), setting.rows)
    rows = search(setting.mesh, queries, index.vectors, setting.rows, listed, setting.search_block).rows
    scores = stored_scores(queries, index, rows)
    if how == "vectors":
        return Fused(rows, scores, ranks_of(how, jnp, rows))
    if own_row is not None:
        rows = jnp.where(rows == own_row[:, None], -1, rows)
    words = batch["word_rows"], batch["word_scores"]
    held = jax.lax.stop_gradient((scores, stored_scores(queries, index, words[0])))
    found = fuse(rows, held[0], *words, held[1], depth)
    return found._replace(scores=stored_scores(queries, index, found.rows))


def beam_answers(setting: Setting, batch: Batch, index: Index, rows: Array) -> Array:
    """Which passages of a beam hold an answer of their question, as spans of word pieces: [batch, beam] bool.

    rows [batch, beam]. The texts of BEAM_PART passages a question are on hand at a time, however long the beam is.
    """
    count, beam = rows.shape
    parts = -(-beam // BEAM_PART)
    padded = jnp.pad(rows, ((0, 0), (0, parts * BEAM_PART - beam)))
    split = padded.reshape(count, parts, BEAM_PART).swapaxes(0, 1)
    answers = (batch["answers"], batch["answer_lengths"], setting.model.span_width)
    found = jax.lax.map(lambda part: hold_answers(take(index, part), *answers), split)
    return found.swapaxes(0, 1).reshape(count, -1)[:, :beam]


def search_queries(setting: Setting, params: Params, batch: Batch, tower: Params | None) -> Array:
    """What is searched with, [batch, projection]: without dropout, by the current query embedder or by `tower`."""
    if tower is not None:
        params = {**params, setting.model.embedder_names[0]: tower}
    return setting.model.embed_queries(params, batch["query"], batch["query_length"])


def search_depth(setting: Setting) -> int:
    """Rows searched for each masked sentence: its candidates, with its own passage in the null document's place."""
    return min(setting.candidates, setting.rows)


def question_depth(setting: Setting) -> int:
    """Passages that a question of fine-tuning retrieves."""
    return min(setting.qa_passages if setting.qa_objective == "marginal" else setting.qa_beam, setting.rows)


def words_listed(setting: Setting, task: str) -> int:
    """Passages in BM25's list that comes with an example of a task; 0 where none does."""
    how = {"realm": setting.search, "qa": setting.qa_search}.get(task, "vectors")
    depth = question_depth(setting) if task == "qa" else search_depth(setting)
    return 0 if how == "vectors" else min(max(depth, LIST), setting.rows)


def embed_null(setting: Setting, params: Params, key: Array | None) -> Array:
    """The null document's vector [1, projection], through the document embedder."""
    return setting.model.embed_documents(params, null_documents(1, (setting.cls_id, setting.sep_id)), key)


def embed_taken(setting: Setting, params: Params, documents: Documents, key: Array | None) -> Array:
    """The vectors of candidates by current parameters. documents.ids [batch, k, d] → [batch, k, projection]."""
    flat = Documents(*(part.reshape(-1, *part.shape[2:]) for part in documents))
    return setting.model.embed_documents(params, flat, key).reshape(*documents.ids.shape[:2], -1)


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
    """log p(y_j|z,x) of every target and whether no piece is likelier, null document first.

    documents.ids [batch, k, d] → ([batch, 1 + k, m] float32, [batch, 1 + k, m] bool). The null document's joint is
    short, so it is read on its own and not at the passages' length.
    """
    keys = dropout_keys(key, 2)
    batch_size, count = documents.ids.shape[:2]
    null = null_documents(batch_size, (setting.cls_id, setting.sep_id))
    null = Documents(*(part[:, None] for part in null))

    def read(candidates: Documents, part_key: Array | None) -> tuple[Array, Array]:
        repeats = candidates.ids.shape[1]
        joint = flatten_joint(join(batch["query"], batch["query_length"], candidates))
        positions = jnp.repeat(batch["positions"], repeats, axis=0)
        targets = jnp.repeat(batch["targets"], repeats, axis=0)
        log_p, right = setting.model.read_targets(params, joint, positions, targets, part_key)
        shape = (batch_size, repeats, -1)
        return log_p.reshape(shape), right.reshape(shape)

    parts = [read(null, keys[0]), read(documents, keys[1])]
    return tuple(jnp.concatenate(pair, axis=1) for pair in zip(*parts, strict=True))  # type: ignore[return-value]


class Reading(NamedTuple):
    """Passages read for a question. rows, scores [batch, k]; joint and span_scores of [batch, k, length(, width)]."""

    rows: Array
    scores: Array
    joint: Joint
    span_scores: Array


def question_beam(
    setting: Setting, params: Params, batch: Batch, index: Index, key: Array | None, beam: int
) -> tuple[Fused, Array | None]:
    """The best passages of each question by `qa_search`: rows, scores, ranks [batch, beam], and the queries.

    Scores are inner products with the stored vectors, and gradient reaches the query embedder alone. BM25's list comes
    with the batch, as `word_rows` and `word_scores`; without vectors its scores are all there is, and no queries.
    """
    depth = min(beam, setting.rows)
    if index.vectors is None:
        rows = batch["word_rows"][:, :depth]
        scores = jnp.where(rows >= 0, batch["word_scores"][:, :depth], NEGATIVE)
        return Fused(rows, scores, ranks_of("bm25", jnp, rows)), None
    queries = setting.model.embed_queries(params, batch["query"], batch["query_length"], key)
    return search_by(setting, setting.qa_search, queries, batch, index, depth), queries


def stored_scores(queries: Array, index: Index, rows: Array) -> Array:
    """Inner products of queries [batch, d] with the stored vectors of rows [batch, k], without a gradient to those.

    NEGATIVE for no row (below 0), so that nothing of a softmax falls to it.
    """
    vectors = index.vectors[jnp.maximum(rows, 0)].astype(jnp.float32)
    return jnp.where(rows >= 0, jnp.einsum("bd,bkd->bk", queries, jax.lax.stop_gradient(vectors)), NEGATIVE)


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
    documents = take(index, read_rows)
    if setting.qa_documents:
        fresh = jnp.einsum("bd,bkd->bk", queries, embed_taken(setting, params, documents, keys[2]))
        fresh = jnp.where(read_rows >= 0, fresh, NEGATIVE)
        scores = jnp.concatenate([fresh, scores[:, passages:]], axis=1)
    joint = join(batch["query"], batch["query_length"], documents, setting.qa_titles)
    spans = read_joint(setting, params, joint, keys[1])
    return Reading(read_rows, scores[:, :passages], joint, spans), found._replace(scores=scores)


def read_joint(setting: Setting, params: Params, joint: Joint, key: Array | None) -> Array:
    """Span scores of joint arrays [batch, k, length] → [batch, k, length, span_width] float32."""
    spans = setting.model.read_spans(params, flatten_joint(joint), key)
    return spans.reshape(*joint.ids.shape, setting.model.span_width)
