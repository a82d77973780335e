"""Revela (Cai et al. 2026, "Dense Retriever Learning via Language Modeling"): words of a text are predicted with the
help of the other texts of its batch, each as much as the retriever finds it alike. Without labels and without an index;
a baseline for REALM.

Theirs, and here: the weight of text j for text i is the softmax over the batch of the retriever's scores, without i's
own; what i takes from j by attention is multiplied with it, so the retriever learns from the words alone which texts
help. Batches hold texts of the same document, which makes help likely.

Different here, since our encoders see a whole text at once:
* Hidden words are predicted, not the next one. i is a masked sentence, read by the query tower; j is a passage, read by
  the document tower. The passage of i's batch that comes with it is of the same article, which nobody says.
* Theirs is a language model beside the retriever, with such attention in each of its layers. Here one layer attends,
  from the query tower's own hidden states to the document tower's: a batch is read once, for vectors and words alike.
* Both towers so learn in two ways, through the weights and through what they say of their tokens.

Read `revela_loss`, then `InBatchReaderNetwork`.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

from realm_jax.data.examples import (
    Example,
    Examples,
    Lengths,
    document_arrays,
    require_passages,
    truncated_body,
    truncated_title,
)
from realm_jax.data.neighbours import numbered
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.flops import embedding_flops, score_flops
from realm_jax.forward.context import Batch, StepContext, batch_passages, dropout_keys
from realm_jax.models.attention import MASKED_BIAS
from realm_jax.models.bert import BertConfig, dense, layer_norm
from realm_jax.models.inputs import document_sequences, query_sequences
from realm_jax.models.likelihood import log_prior, target_log_probabilities
from realm_jax.models.realm import Network, Params
from realm_jax.run import Run
from realm_jax.schema import key, one_of
from realm_jax.sections import TaskSection
from realm_jax.tasks.base import Embed, Means, Shapes, batch_mean, document_shapes, masked_shapes, query_shapes
from realm_jax.tasks.encoder_mlm import HEAD, EncoderTask, WordHead, words_of
from realm_jax.tasks.mlm import cross_entropy
from realm_jax.tasks.realm import masked_examples

Array = jax.Array
QUERY = ("query", "query_length", "positions", "targets", "weights", "own_row")  # of a masked sentence


@dataclass(frozen=True)
class Section(TaskSection):
    """The training of Revela's in-batch attention."""

    masking: str = key(
        "salient",
        "what a sentence hides, `data.predictions` tokens at most",
        one_of("salient", "uniform", "random_span"),
    )


class InBatchReaderNetwork(nn.Module):
    """A layer that attends to the texts of a batch, and a `WordHead`."""

    config: BertConfig

    @nn.compact
    def __call__(self, hidden: Array, weights: Array, states: Array, mask: Array, words: Array) -> Array:
        """hidden [batch, m, width]: of hidden tokens; weights [batch, texts]: of texts, 1 in all; states [texts,
        length, width], mask [texts, length]: of their tokens; words [vocabulary, width] → [batch, m, vocabulary].

        Attention is over the tokens of one text at a time, Σ_j weights_ij softmax(q·k_j) v_j: a text cannot get more
        than its weight, so what it is worth is the retriever's to say.
        """
        c = self.config
        query, to_key, value = (dense(c.width, ("embed", "heads"), c, name) for name in ("query", "key", "value"))
        within = token_weights(self._heads(query(hidden)), self._heads(to_key(states)), mask)
        shared = (within * weights[:, None, None, :, None]).astype(c.state_dtype)
        attended = jnp.einsum("bmhtl,tlhd->bmhd", shared, self._heads(value(states))).reshape(hidden.shape)
        attended = dense(c.width, ("heads", "embed"), c, "output")(attended)
        return WordHead(c, name=HEAD)(layer_norm("attention_norm")(hidden + attended).astype(c.state_dtype), words)

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], self.config.heads, -1)


def token_weights(query: Array, keys: Array, mask: Array) -> Array:
    """The softmax over the tokens of each text. query [batch, m, heads, size], keys [texts, length, heads, size], mask
    [texts, length] → [batch, m, heads, texts, length] float32."""
    scores = jnp.einsum("bmhd,tlhd->bmhtl", query, keys, preferred_element_type=jnp.float32)
    return jax.nn.softmax(scores * query.shape[-1] ** -0.5 + jnp.where(mask, 0.0, MASKED_BIAS), axis=-1)


@dataclasses.dataclass(frozen=True)
class InBatchReader(Network):
    """The network as pure functions over a tree in which its parameters have the key 'in_batch_reader'."""

    name: ClassVar[str] = "in_batch_reader"

    def init_boxed(self, key: Array) -> Params:
        c, texts = self.bert, jnp.zeros((1, 2, self.bert.width))
        given = texts, jnp.ones((1, 1)), texts, jnp.ones((1, 2), bool), jnp.zeros((c.vocabulary_size, c.width))
        params: Params = InBatchReaderNetwork(c).init(key, *given)["params"]
        return params

    def scores(self, params: Params, *given: Array) -> Array:
        """As of the network."""
        found: Any = InBatchReaderNetwork(self.bert).apply({"params": params[self.name]}, *given)
        return jnp.asarray(found)


class Revela(EncoderTask):
    """Both towers learn, and the layer that reads a batch."""

    name = "revela"
    stream = 12
    title = "In-batch attention"
    section = Section(1000, 32, learning_rate=2e-5)
    network = InBatchReader
    is_parted = False  # a part of a batch would have fewer texts to learn from

    @classmethod
    def supervision(cls, config: ConfigDict) -> str:
        return (
            "Words hidden in a sentence, and other passages of its batch, one of the same article among them. Nobody "
            "says which passage helps."
        )

    def examples(self, params: Params, embed: Embed) -> Examples:
        passages, tokenizer = self.run.sources.passages, self.run.sources.tokenizer
        kept = self.run.learned_rows(passages)
        return paired_examples(passages, tokenizer, self.run.lengths, self.settings.masking, kept)

    def array_shapes(self) -> Shapes:
        rows: Shapes = {name: ((), np.int32) for name in ("own_row", "document_row")}
        return masked_shapes(self.run, query_shapes(self.run)) | document_shapes(self.run) | rows

    def loss(self, params: Params, batch: Batch, index: None, key: Array | None) -> Means:
        return revela_loss(self.context, params, batch, key)

    def example_flops(self) -> dict[str, float]:
        lengths, size = self.run.lengths, self.settings.batch_size
        towers = {"queries": lengths.query, "documents": lengths.document}
        parts = {name: embedding_flops(self.run.config, length, states=True) for name, length in towers.items()}
        parts |= {"scores": score_flops(self.run) * size, "attention": attention_flops(self.run, size)}
        return {part: 3 * value for part, value in (parts | {"words": self.head_flops(lengths.predictions)}).items()}


def attention_flops(run: Run, texts: int) -> float:
    """Of the layer that attends to so many texts, for one sentence and the projections of one text, forward."""
    width, places, length = run.model.bert.width, run.lengths.predictions, run.lengths.document
    return 2.0 * (2 * places + 2 * length) * width**2 + 4.0 * places * texts * length * width


def revela_loss(context: StepContext, params: Params, batch: Batch, key: Array | None) -> Means:
    """Cross-entropy of hidden tokens, mean over them; `article_probability`: the weight of the passage of the same
    article that comes with a sentence, mean over the batch."""
    model, documents, keys = context.model, batch_passages(batch), dropout_keys(key, 2)
    towers = [params[model.embedder_names[place]] for place in (0, -1)]
    query = query_sequences(batch["query"], batch["query_length"], model.query_template)
    texts = document_sequences(documents, model.passage_template)
    queries, hidden = model.read(towers[0], query, keys[0])
    vectors, states = model.read(towers[1], texts, keys[1])
    others = batch["own_row"][:, None] != batch["document_row"]
    weights = jnp.exp(log_prior(model.tempered(params, queries) @ vectors.T, others))
    places = batch["positions"] + query.ids.shape[1] - batch["query"].shape[1]  # a prompt stands before the text
    hidden = jnp.take_along_axis(hidden, places[..., None], axis=1)
    reader = InBatchReader(model.bert)
    scores = reader.scores(params, hidden, weights, states, texts.mask, words_of(towers[0]))
    found = cross_entropy(*target_log_probabilities(scores, batch["targets"]), batch["weights"])
    return found | {"article_probability": batch_mean(jnp.diagonal(weights))}


# --- examples ---------------------------------------------------------------------------------------------------------


def paired_examples(
    store: PassageStore, tokenizer: Tokenizer, lengths: Lengths, masking: str, kept: NDArray[np.bool_] | None = None
) -> Examples:
    """A masked sentence of one passage, and another passage of the same article; where it has none, any other.

    kept: rows whose sentences may be learned from, bool [rows]; None for all.
    """
    require_passages(len(store) - 1, store, "another passage beside it", "in-batch attention", None)
    sentences = masked_examples(store, tokenizer, lengths, masking, True, None, kept)
    draw = other_passages(store)

    def make(index: int, rng: np.random.Generator) -> Example:
        arrays = sentences.make(index, rng)
        row = draw(int(arrays["own_row"]), rng)
        title, body = truncated_title(store, row, lengths), truncated_body(store, row, lengths)
        document = document_arrays(title, body, lengths.document, tokenizer) | {"document_row": np.int32(row)}
        return {name: arrays[name] for name in QUERY} | document

    return Examples(sentences.total, make)


def other_passages(store: PassageStore) -> Callable[[int, np.random.Generator], int]:
    """What draws, for a row, another one of the same article, or any other where it has one row alone.

    Passages of one title are of one article; those without a title where they are of one document.
    """
    article = numbered(store.title(row) or store.document_id(row) for row in range(len(store)))
    order = np.argsort(article, kind="stable")
    starts = np.searchsorted(article[order], np.arange(article.max(initial=-1) + 2))

    def draw(row: int, rng: np.random.Generator) -> int:
        first, last = starts[article[row] : article[row] + 2]
        if last - first == 1:
            return (row + 1 + int(rng.integers(len(store) - 1))) % len(store)
        drawn = order[rng.integers(first, last - 1)]
        return int(order[last - 1] if drawn == row else drawn)  # the last stands in for the row itself

    return draw
