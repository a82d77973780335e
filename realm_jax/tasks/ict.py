"""Inverse cloze task: which passage was this sentence taken from (Lee et al. 2019, section 4).

Against the passages of the batch (`ict.negatives=batch`), or against what the sentence itself retrieves ('index').
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

from realm_jax.data.examples import (
    MINIMUM_SENTENCE,
    Example,
    Examples,
    Lengths,
    document_arrays,
    pieces_without,
    query_arrays,
    require_passages,
)
from realm_jax.data.held_out import held_out_share, trained_rows
from realm_jax.data.sources import Sources
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.flops import embedding_flops, score_flops
from realm_jax.forward import Batch, Index, StaticContext, batch_passages, dropout_keys, embed_null, stored_scores
from realm_jax.models import likelihood
from realm_jax.models.realm import Params
from realm_jax.retrieval.exact import search
from realm_jax.run import Run
from realm_jax.schema import require
from realm_jax.sections import IctConfig, task_names
from realm_jax.tasks.base import (
    ContrastiveLoss,
    Embed,
    Means,
    Shapes,
    Task,
    batch_mean,
    document_shapes,
    query_shapes,
)  # fmt: skip

Array = jax.Array
MASK_RATE = 0.9  # sentences taken out of their passage (Lee et al. 2019) where negatives are drawn at random: else none


class Ict(Task):
    """Both towers learn, or against the index the query tower alone, whose passages keep their vectors."""

    name = "ict"
    stream = 2
    title = "Inverse cloze task"
    section = IctConfig(100_000, 4096, learning_rate=1e-4)
    settings: IctConfig

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.retrieves = self.settings.negatives == "index"
        self.is_parted = not self.retrieves  # it embeds short texts alone: there is little memory to save
        self.evaluates_start = bool(run.config.init_from)
        self.trained = run.context.model.embedder_names
        if self.retrieves:
            self.trained = self.trained[:1]
        else:
            given = partial(ict_vectors, run.context), partial(ict_null_vector, self.settings, run.context)
            self.contrast = ContrastiveLoss(*given, partial(in_batch_softmax, null_weight=self.settings.null_weight))

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        if cls.name not in task_names(config) or config.ict.negatives != "index":
            return
        apart = not config.model.shared_tower
        require(apart, "ict.negatives", "'index' trains the query tower alone; set model.shared_tower=False")
        unused = "ict.negatives=index has no null document; set it to 0"
        require(config.ict.null_weight == 0, "ict.null_weight", unused)

    @classmethod
    def missing(cls, config: ConfigDict, sources: Sources) -> str:
        what, share = "passage of two or more sentences", held_out_share(config, sources.questions)
        several, kept = sources.passages.counts("sentences") > 1, trained_rows(sources.passages, share)
        if not several.any():
            return what
        left = kept is None or bool((several & kept).any())
        return "" if left else f"{what} that config.evaluation.held_out={share} leaves to learn from"

    @classmethod
    def supervision(cls, config: ConfigDict) -> str:
        return "Which passage was this sentence taken from? Passages only; no questions, no labels."

    def examples(self, params: Params, embed: Embed) -> Examples:
        passages = self.run.sources.passages
        rows = sentence_rows(passages, self.run.training_rows(passages))
        mask_rate = MASK_RATE if self.settings.negatives == "batch" else 0.0
        return ict_examples(passages, self.run.sources.tokenizer, self.run.lengths, mask_rate, rows)

    def array_shapes(self) -> Shapes:
        return query_shapes(self.run) | document_shapes(self.run) | {"own_row": ((), np.int32)}

    def loss(self, params: Params, batch: Batch, index: Any, key: Array | None) -> Means:
        if self.contrast is None:
            return retrieved_ict_loss(self.run.config.qa.beam, self.context, params, batch, index, key)
        encode, null, loss = self.contrast
        return loss(encode(params, batch, key), null(params, key))

    def example_flops(self) -> dict[str, float]:
        config, score = self.run.config, score_flops(self.run)
        queries = 3 * embedding_flops(config, config.data.query_length)
        if self.retrieves:  # stored vectors have no gradient: a product each way
            scores = 2 * score * (1 + config.qa.beam)
            return {"search": self.context.rows * score, "queries": queries, "scores": scores}
        documents = 3 * embedding_flops(config, config.data.document_length)
        return {"queries": queries, "documents": documents, "scores": 3 * score * self.settings.batch_size}


def ict_vectors(context: StaticContext, params: Params, batch: Batch, key: Array | None) -> tuple[Array, Array]:
    """The vectors of sentences and of their passages, [batch, projection] both."""
    keys = dropout_keys(key, 3)
    queries = context.model.embed_queries(params, batch["query"], batch["query_length"], keys[0])
    return queries, context.model.embed_documents(params, batch_passages(batch), keys[1])


def ict_null_vector(ict: IctConfig, context: StaticContext, params: Params, key: Array | None) -> Array | None:
    """The null document's vector [1, projection] where it takes part."""
    return embed_null(context, params, dropout_keys(key, 3)[2]) if ict.null_weight else None


def in_batch_softmax(vectors: tuple[Array, Array], null: Array | None, null_weight: float) -> Means:
    """Softmax of each sentence against all passages of the global batch.

    With `null_weight` the null document is one more candidate, and the right one for a sentence whose own passage
    is taken away: its score becomes the threshold under which a passage does not fit. Without that, REALM starts with
    p(null) near 0, and a query none of whose candidates helps teaches the retriever which one harms least.
    """
    queries, documents = vectors
    scores = queries @ documents.T
    if null is None:
        losses = -jnp.diagonal(jax.nn.log_softmax(scores, axis=-1))
    else:
        losses = _ict_loss_with_null(scores, queries @ null.T, null_weight)
    right = scores.argmax(axis=-1) == jnp.arange(scores.shape[0])
    return {"loss": batch_mean(losses), "accuracy": batch_mean(right)}


def _ict_loss_with_null(scores: Array, null: Array, weight: float) -> Array:
    """Losses [batch] of scores [batch, batch] and null [batch, 1]: own passage among all and null, plus `weight` × null
    among the others."""
    size = scores.shape[0]
    found = jax.nn.log_softmax(jnp.concatenate([scores, null], axis=1), axis=1)
    others = jnp.where(jnp.eye(size, dtype=bool), likelihood.NEGATIVE, scores)
    missed = jax.nn.log_softmax(jnp.concatenate([others, null], axis=1), axis=1)
    return -(jnp.diagonal(found) + weight * missed[:, -1])


def retrieved_ict_loss(
    beam: int, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None
) -> Means:
    """The inverse cloze task against what the sentence itself retrieves, its hardest negatives: −log p(own passage)
    among it and the `beam` best of the index.

    Passages keep their stored vectors and the query embedder alone learns, so a pretrained retriever is sharpened
    without moving the space that its passages live in.
    """
    queries = context.model.embed_queries(params, batch["query"], batch["query_length"], key)
    depth = min(beam, context.rows)
    rows = search(context.mesh, queries, index.vectors, context.rows, depth).rows
    own = batch["own_row"][:, None]
    scores = stored_scores(queries, index, jnp.concatenate([own, rows], axis=1))
    others = jnp.where(rows == own, likelihood.NEGATIVE, scores[:, 1:])
    log_p = jax.nn.log_softmax(jnp.concatenate([scores[:, :1], others], axis=1), axis=1)[:, 0]
    return {"loss": batch_mean(-log_p), "accuracy": batch_mean(scores[:, 0] >= others.max(axis=1))}


# --- examples ---------------------------------------------------------------------------------------------------------


def sentence_rows(store: PassageStore, kept: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """The rows of two or more sentences. kept: rows that may be trained on, bool [rows]; None for all. Raises UserError
    if there is none."""
    several = store.counts("sentences") > 1
    rows = np.flatnonzero(several if kept is None else several & kept)
    require_passages(len(rows), store, "two or more sentences", "the inverse cloze task", kept)
    return rows


def ict_examples(
    store: PassageStore, tokenizer: Tokenizer, lengths: Lengths, mask_rate: float, rows: NDArray[np.int64]
) -> Examples:
    """Inverse cloze task: a sentence and its passage, out of which a share `mask_rate` of the sentences is taken.

    rows: of the passages, of two or more sentences each, in the order of the examples.
    """

    def make(index: int, rng: np.random.Generator) -> Example:
        row = int(rows[index])
        sentences, body = store.sentences(row), store.body_tokens(row)
        long_enough = np.flatnonzero(sentences[:, 1] - sentences[:, 0] >= MINIMUM_SENTENCE)
        number = rng.choice(long_enough) if len(long_enough) else rng.integers(len(sentences))
        start, end = sentences[number]
        query = query_arrays(body[start:end], lengths.query, tokenizer)
        if rng.random() < mask_rate:
            body = pieces_without(body, start, end)
        document = document_arrays(store.title_tokens(row), body, lengths.document, tokenizer)
        return query | document | {"own_row": np.int32(row)}

    return Examples(len(rows), make)
