"""Inverse cloze task: which passage was this sentence taken from (Lee et al. 2019, section 4).

Against the passages of the batch (`ict.negatives=batch`), or against what the sentence itself retrieves ('index').
"""

from dataclasses import dataclass
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
    query_arrays,
    require_passages,
)
from realm_jax.data.held_out import held_out_share, trained_rows
from realm_jax.data.sources import Sources
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.flops import embedding_flops, score_flops
from realm_jax.forward import given_documents
from realm_jax.models import likelihood
from realm_jax.models.realm import Params
from realm_jax.retrieval.exact import search
from realm_jax.retrieval.search import Batch, Index, Setting, dropout_keys, embed_null, stored_scores
from realm_jax.run import Run
from realm_jax.schema import NOT_NEGATIVE, key, one_of, require
from realm_jax.sections import TaskSection, task_names
from realm_jax.tasks.base import Contrast, Embed, Means, Shapes, Task, document_shapes, over_examples, query_shapes

Array = jax.Array
MASK_RATE = 0.9  # sentences taken out of their passage (Lee et al. 2019): none where it keeps its stored vector


@dataclass(frozen=True)
class Section(TaskSection):
    """The training of the inverse cloze task, and what a sentence's passage is held against."""

    negatives: str = key(
        "batch",
        "'batch': the passages of the batch, both towers trained (the paper); 'index': the qa.beam passages that the "
        "sentence retrieves, whose vectors stay, the query tower trained",
        one_of("batch", "index"),
    )
    null_weight: float = key(
        0.0,
        "'batch': weight of picking the null document when the own passage is taken away (the paper: 0)",
        NOT_NEGATIVE,
    )


class Ict(Task):
    """Both towers learn, or against the index the query tower alone, whose passages keep their vectors."""

    name = "ict"
    stream = 2
    title = "Inverse cloze task"
    section = Section(100_000, 4096, learning_rate=1e-4)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.retrieves = run.setting.ict_from_index
        self.is_parted = not self.retrieves  # it embeds short texts alone: there is little memory to save
        self.evaluates_start = bool(run.config.init_from)
        self.trained = run.setting.model.embedder_names
        if self.retrieves:
            self.trained = self.trained[:1]
        else:
            given = partial(cloze_vectors, run.setting), partial(cloze_null, run.setting)
            self.contrast = Contrast(*given, partial(contrast, null_weight=run.setting.ict_null_weight))

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
        several, kept = sources.passages.sentence_counts() > 1, trained_rows(sources.passages, share)
        if not several.any():
            return what
        left = kept is None or bool((several & kept).any())
        return "" if left else f"{what} that config.evaluation.held_out={share} leaves to learn from"

    @classmethod
    def supervision(cls, config: ConfigDict) -> str:
        return "Which passage was this sentence taken from? Passages only; no questions, no labels."

    def examples(self, params: Params, embed: Embed) -> Examples:
        passages, rate = self.run.sources.passages, 0.0 if self.retrieves else MASK_RATE
        kept = self.learned_rows(passages)
        return cloze_examples(passages, self.run.sources.wordpiece, self.run.lengths, rate, kept)

    def array_shapes(self) -> Shapes:
        return query_shapes(self.run) | document_shapes(self.run) | {"own_row": ((), np.int32)}

    def loss(self, params: Params, batch: Batch, index: Any, key: Array | None) -> Means:
        if self.contrast is None:
            return retrieved_ict_loss(self.setting, params, batch, index, key)
        encode, null, loss = self.contrast
        return loss(encode(params, batch, key), null(params, key))

    def example_flops(self) -> dict[str, float]:
        config, score = self.run.config, score_flops(self.run)
        queries = 3 * embedding_flops(config, config.data.query_length)
        if self.retrieves:  # stored vectors have no gradient: a product each way
            scores = 2 * score * (1 + self.setting.qa_beam)
            return {"search": self.setting.rows * score, "queries": queries, "scores": scores}
        documents = 3 * embedding_flops(config, config.data.document_length)
        return {"queries": queries, "documents": documents, "scores": 3 * score * self.settings.batch_size}


def cloze_vectors(setting: Setting, params: Params, batch: Batch, key: Array | None) -> tuple[Array, Array]:
    """The vectors of sentences and of their passages, [batch, projection] both."""
    keys = dropout_keys(key, 3)
    queries = setting.model.embed_queries(params, batch["query"], batch["query_length"], keys[0])
    return queries, setting.model.embed_documents(params, given_documents(batch), keys[1])


def cloze_null(setting: Setting, params: Params, key: Array | None) -> Array | None:
    """The null document's vector [1, projection] where it takes part."""
    return embed_null(setting, params, dropout_keys(key, 3)[2]) if setting.ict_null_weight else None


def contrast(vectors: tuple[Array, Array], null: Array | None, null_weight: float) -> Means:
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
        losses = _cloze_with_null(scores, queries @ null.T, null_weight)
    right = scores.argmax(axis=-1) == jnp.arange(scores.shape[0])
    return {"loss": over_examples(losses), "accuracy": over_examples(right)}


def _cloze_with_null(scores: Array, null: Array, weight: float) -> Array:
    """Losses [batch] of scores [batch, batch] and null [batch, 1]: own passage among all and null, plus `weight` × null
    among the others."""
    size = scores.shape[0]
    found = jax.nn.log_softmax(jnp.concatenate([scores, null], axis=1), axis=1)
    others = jnp.where(jnp.eye(size, dtype=bool), likelihood.NEGATIVE, scores)
    missed = jax.nn.log_softmax(jnp.concatenate([others, null], axis=1), axis=1)
    return -(jnp.diagonal(found) + weight * missed[:, -1])


def retrieved_ict_loss(setting: Setting, params: Params, batch: Batch, index: Index, key: Array | None) -> Means:
    """The inverse cloze task against what the sentence itself retrieves, its hardest negatives: −log p(own passage)
    among it and the best `qa_beam` of the index.

    Passages keep their stored vectors and the query embedder alone learns, so a pretrained retriever is sharpened
    without moving the space that its passages live in.
    """
    queries = setting.model.embed_queries(params, batch["query"], batch["query_length"], key)
    depth = min(setting.qa_beam, setting.rows)
    rows = search(setting.mesh, queries, index.vectors, setting.rows, depth, setting.search_block).rows
    own = batch["own_row"][:, None]
    scores = stored_scores(queries, index, jnp.concatenate([own, rows], axis=1))
    others = jnp.where(rows == own, likelihood.NEGATIVE, scores[:, 1:])
    log_p = jax.nn.log_softmax(jnp.concatenate([scores[:, :1], others], axis=1), axis=1)[:, 0]
    return {"loss": over_examples(-log_p), "accuracy": over_examples(scores[:, 0] >= others.max(axis=1))}


# --- examples ---------------------------------------------------------------------------------------------------------


def cloze_examples(
    store: PassageStore, wordpiece: Tokenizer, lengths: Lengths, mask_rate: float, kept: NDArray[np.bool_] | None = None
) -> Examples:
    """Inverse cloze task: a sentence and its passage, out of which a share `mask_rate` of the sentences is taken.

    kept: rows that may be trained on, bool [rows]; None for all.
    """
    several = store.sentence_counts() > 1
    rows = np.flatnonzero(several if kept is None else several & kept)
    require_passages(len(rows), store, "two or more sentences", "the inverse cloze task", kept)

    def make(index: int, rng: np.random.Generator) -> Example:
        row = int(rows[index])
        sentences, body = store.sentences(row), store.body_tokens(row)
        long_enough = np.flatnonzero(sentences[:, 1] - sentences[:, 0] >= MINIMUM_SENTENCE)
        number = rng.choice(long_enough) if len(long_enough) else rng.integers(len(sentences))
        start, end = sentences[number]
        query = query_arrays(body[start:end], lengths.query, wordpiece)
        if rng.random() < mask_rate:
            body = np.concatenate([body[:start], body[end:]])
        document = document_arrays(store.title_tokens(row), body, lengths.document, wordpiece)
        return query | document | {"own_row": np.int32(row)}

    return Examples(len(rows), make)
