"""Inverse cloze task: find the passage that a sentence was taken from (Lee et al. 2019, section 4).

Negatives are the passages of the batch (`ict.negatives=batch`), or those that the sentence itself retrieves ('index').
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.config import IctConfig
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
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.forward import Batch, Index, StaticContext, batch_passages, dropout_keys, embed_null, stored_scores
from realm_jax.models import losses
from realm_jax.models.layers import Params
from realm_jax.retrieval.exact import search
from realm_jax.run import Run
from realm_jax.tasks.base import (
    ContrastiveLoss,
    EmbedCorpus,
    ExampleSpec,
    Metrics,
    Task,
    batch_mean,
    document_spec,
    query_spec,
)  # fmt: skip

Array = jax.Array
MASK_RATE = 0.9  # share of sentences removed from their passage (Lee et al. 2019), with negatives of the batch


class Ict(Task):
    """Train both encoders; with `ict.negatives=index` only the query encoder, so that passages keep their vectors."""

    name = "ict"
    stream = 2
    settings: IctConfig

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        encoders = run.context.model.embedder_names
        self.retrieves = self.settings.negatives == "index"
        self.trained = encoders[:1] if self.retrieves else encoders
        if not self.retrieves:
            self.contrast = ContrastiveLoss(
                partial(ict_vectors, run.context),
                partial(ict_null_vector, self.settings, run.context),
                partial(in_batch_softmax, null_weight=self.settings.null_weight),
            )

    @property
    def num_microbatches(self) -> int:
        """Return 1 if it retrieves, because it then embeds only short texts and there is little memory to save."""
        return 1 if self.retrieves else super().num_microbatches

    def examples(self, params: Params, embed: EmbedCorpus) -> Examples:
        passages = self.run.sources.passages
        rows = sentence_rows(passages, self.run.training_rows(passages))
        mask_rate = 0.0 if self.retrieves else MASK_RATE
        return ict_examples(passages, self.run.sources.tokenizer, self.run.lengths, mask_rate, rows)

    def example_spec(self) -> ExampleSpec:
        return query_spec(self.run) | document_spec(self.run) | {"own_row": ((), np.int32)}

    def loss(self, params: Params, batch: Batch, index: Any, key: Array | None) -> Metrics:
        if self.contrast is None:
            beam = self.run.config.qa.beam
            return retrieved_ict_loss(beam, self.run.context, params, batch, index, key)
        encode, null, loss = self.contrast
        return loss(encode(params, batch, key), null(params, key))


def ict_vectors(context: StaticContext, params: Params, batch: Batch, key: Array | None) -> tuple[Array, Array]:
    """Return the vectors of sentences and of their passages, [batch, projection] both.

    Args:
        context: static arguments of the step.
        params: all parameters.
        batch: arrays of `ict_examples`, [batch, …].
        key: random key for dropout; None for none.
    """
    keys = dropout_keys(key, 3)
    queries = context.model.embed_queries(params, batch["query"], batch["query_length"], keys[0])
    return queries, context.model.embed_documents(params, batch_passages(batch), keys[1])


def ict_null_vector(ict: IctConfig, context: StaticContext, params: Params, key: Array | None) -> Array | None:
    """Return the null document's vector, [1, projection]; None if it is no candidate.

    Args:
        ict: settings of the task.
        context: static arguments of the step.
        params: all parameters.
        key: random key for dropout; None for none.
    """
    return embed_null(context, params, dropout_keys(key, 3)[2]) if ict.null_weight else None


def in_batch_softmax(vectors: tuple[Array, Array], null: Array | None, null_weight: float) -> Metrics:
    """Return the loss of a softmax of each sentence over all passages of the global batch.

    With `null_weight` the null document is one more candidate, and the correct one if the sentence's passage is
    excluded. So its score becomes the threshold below which a passage does not fit. Without it REALM starts with
    p(null) near 0, and a query without helpful candidates teaches the retriever which one harms least.

    Args:
        vectors: vectors of sentences and of their passages, [batch, projection] both.
        null: vector of the null document, [1, projection]; None if it is no candidate.
        null_weight: weight of choosing the null document when the sentence's passage is excluded.

    Returns:
        loss: the loss that is minimized.
        accuracy: sentences whose passage has the largest score.
    """
    queries, documents = vectors
    scores = queries @ documents.T  # [batch, batch]
    if null is None:
        losses = -jnp.diagonal(jax.nn.log_softmax(scores, axis=-1))  # [batch]
    else:
        losses = _ict_loss_with_null(scores, queries @ null.T, null_weight)  # [batch]
    is_top1 = scores.argmax(axis=-1) == jnp.arange(scores.shape[0])  # [batch]
    return {"loss": batch_mean(losses), "accuracy": batch_mean(is_top1)}


def _ict_loss_with_null(scores: Array, null: Array, weight: float) -> Array:
    """Return −log p(passage | all passages and null) − weight · log p(null | all other passages and null).

    Args:
        scores: scores of sentences and passages, [batch, batch].
        null: scores of the null document, [batch, 1].
        weight: weight of the second term.

    Returns:
        The loss of each sentence, [batch].
    """
    is_source = jnp.eye(scores.shape[0], dtype=bool)  # [batch, batch]
    others = jnp.where(is_source, losses.NEG_INF, scores)  # [batch, batch]
    log_p = jax.nn.log_softmax(jnp.concatenate([scores, null], axis=1), axis=1)  # [batch, batch + 1]
    log_p_of_others = jax.nn.log_softmax(jnp.concatenate([others, null], axis=1), axis=1)  # [batch, batch + 1]
    return -(jnp.diagonal(log_p) + weight * log_p_of_others[:, -1])


def retrieved_ict_loss(
    beam: int, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None
) -> Metrics:
    """Return −log p(passage) among the sentence's passage and the `beam` best of the index, its hardest negatives.

    Only the query encoder learns, and passages keep their stored vectors. So a pretrained retriever improves without a
    new index.

    Args:
        beam: number of retrieved passages, at most all.
        context: static arguments of the step.
        params: all parameters.
        batch: arrays of `ict_examples`, [batch, …].
        index: the corpus.
        key: random key for dropout; None for none.

    Returns:
        loss: the loss that is minimized.
        accuracy: sentences whose passage has the largest score.
    """
    queries = context.model.embed_queries(params, batch["query"], batch["query_length"], key)  # [batch, projection]
    depth = min(beam, context.rows)
    rows = search(context.mesh, queries, index.vectors, context.rows, depth).rows  # [batch, depth]
    source_rows = batch["own_row"][:, None]  # [batch, 1]
    scores = stored_scores(queries, index, jnp.concatenate([source_rows, rows], axis=1))  # [batch, 1 + depth]
    others = jnp.where(rows == source_rows, losses.NEG_INF, scores[:, 1:])  # [batch, depth]
    log_p = jax.nn.log_softmax(jnp.concatenate([scores[:, :1], others], axis=1), axis=1)[:, 0]  # [batch]
    return {"loss": batch_mean(-log_p), "accuracy": batch_mean(scores[:, 0] >= others.max(axis=1))}


# --- Examples ---------------------------------------------------------------------------------------------------------


def sentence_rows(store: PassageStore, training_rows: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """Return the rows that have two or more sentences.

    Args:
        store: the corpus.
        training_rows: True for rows that may be trained on, bool [rows]; None for all.

    Raises:
        UserError: there is none.
    """
    has_several = store.counts("sentences") > 1  # [rows]
    rows = np.flatnonzero(has_several if training_rows is None else has_several & training_rows)
    require_passages(len(rows), store, "two or more sentences", "the inverse cloze task", training_rows)
    return rows


def ict_examples(
    store: PassageStore, tokenizer: Tokenizer, lengths: Lengths, mask_rate: float, rows: NDArray[np.int64]
) -> Examples:
    """Return examples: a sentence and its passage.

    Args:
        store: the corpus.
        tokenizer: tokenizer of the corpus.
        lengths: sizes of the arrays.
        mask_rate: share of the examples whose passage is without the sentence.
        rows: passages of two or more sentences each, in the order of the examples.
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
