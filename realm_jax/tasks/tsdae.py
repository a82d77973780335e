"""TSDAE (Wang et al. 2021): the encoder makes a vector of a damaged text, from which a decoder writes the whole text.
Without labels and without an index; a baseline for REALM.

Theirs: 60 % of the tokens deleted, the best of the noises that they tried; a decoder with the encoder's parameters that
sees nothing of the text but the vector and the tokens so far; the cross-entropy of every token. Different here:
* A text is a passage, not a sentence, since passages are what is searched. Tokens go from its title and body alike; the
  body alone is written.
* The vector is the one that passages are searched by, normalised if that is.
* They let every layer of the decoder attend to the vector. Over one vector a softmax is 1, so such a layer adds a
  linear map of it to each place, whatever the place asks for. Here one map is added once, to the decoder's input.
* The output is tied to the word embeddings through a fresh head, since a retriever has none (`encoder_mlm.WordHead`).

It is one encoder for queries and passages: the query tower is a copy. Read `tsdae_loss`.
"""

import dataclasses
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
    query_arrays,
    truncated_body,
    truncated_title,
)
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer, id_dtype
from realm_jax.flops import embedding_flops, tower_of
from realm_jax.forward.context import Batch, StepContext, batch_passages, dropout_keys
from realm_jax.models.bert import Bert, BertConfig, apply, dense
from realm_jax.models.inputs import query_sequences
from realm_jax.models.likelihood import target_log_probabilities
from realm_jax.models.realm import Network, Params, Realm
from realm_jax.sections import TaskSection
from realm_jax.tasks.base import Embed, Means, Shapes, document_shapes
from realm_jax.tasks.encoder_mlm import HEAD, OneEncoderTask, head_scores, init_head, passages_to_read, words_of
from realm_jax.tasks.mlm import cross_entropy

Array = jax.Array
DELETED = 0.6  # of a text's tokens (Wang et al. 2021)
MEMORY = "memory"  # of the parameters: the map from the vector to the decoder's input


@dataclasses.dataclass(frozen=True)
class Decoder(Network):
    """What the decoder has beside the encoder's parameters: the map of the vector, and a `WordHead`.

    vector_size: features of the vector.
    """

    name: ClassVar[str] = "decoder"
    vector_size: int = 0

    def init_boxed(self, key: Array) -> Params:
        first, second = jax.random.split(key)
        vector = jnp.zeros((1, self.vector_size))
        return {MEMORY: memory_map(self.bert).init(first, vector)["params"], HEAD: init_head(self.bert, second)}


def memory_map(bert: BertConfig) -> nn.Dense:
    """The map of vectors [..., vector_size] to hidden states [..., width]."""
    return dense(bert.width, ("projection", "embed_out"), bert, MEMORY)


class Tsdae(OneEncoderTask):
    """The encoder learns, which is the decoder as well, and what the decoder has of its own."""

    name = "tsdae"
    stream = 10
    title = "Denoising autoencoder"
    section = TaskSection(1000, 8, learning_rate=3e-5)
    network = Decoder

    @classmethod
    def networks(cls, model: Realm) -> tuple[Network, ...]:
        return (Decoder(model.bert, model.vector_size),)

    @classmethod
    def supervision(cls, config: ConfigDict) -> str:
        return "Passages that are written again from the vector of what is left of them. No questions, no labels."

    def examples(self, params: Params, embed: Embed) -> Examples:
        passages = self.run.sources.passages
        return damaged_passages(passages, self.run.sources.tokenizer, self.run.lengths, self.run.learned_rows(passages))

    def array_shapes(self) -> Shapes:
        ids = id_dtype(self.run.model.bert.vocabulary_size)
        text: Shapes = {"text": ((self.run.lengths.document,), ids), "text_length": ((), np.int32)}
        return document_shapes(self.run) | text

    def loss(self, params: Params, batch: Batch, index: None, key: Array | None) -> Means:
        return tsdae_loss(self.context, params, batch, key)

    def example_flops(self) -> dict[str, float]:
        config, length, model = self.run.config, self.run.lengths.document, self.run.model
        decoded = tower_of(config).forward(length) + 2 * model.vector_size * model.bert.width
        parts = {"documents": embedding_flops(config, length), "decoder": decoded, "words": self.head_flops(length - 1)}
        return {part: 3 * value for part, value in parts.items()}


def tsdae_loss(context: StepContext, params: Params, batch: Batch, key: Array | None) -> Means:
    """Cross-entropy of each token of the whole text after its first, given the vector of the damaged text and the
    tokens before it; mean over tokens."""
    model, own = context.model, params[Decoder.name]
    tower, keys = params[model.embedder_names[-1]], dropout_keys(key, 2)
    vectors = model.embed_documents(params, batch_passages(batch), keys[0])
    memory: Any = memory_map(model.bert).apply({"params": own[MEMORY]}, vectors)
    text = query_sequences(batch["text"], batch["text_length"])
    decoder = Bert(dataclasses.replace(model.bert, causal=True))
    hidden = apply(decoder, tower["bert"], tuple(text), "__call__", keys[1], features=memory[:, None])
    scores = head_scores(model.bert, own, hidden[:, :-1], words_of(tower))
    return cross_entropy(*target_log_probabilities(scores, text.ids[:, 1:]), text.mask[:, 1:])


# --- examples ---------------------------------------------------------------------------------------------------------


def damaged_passages(
    store: PassageStore, tokenizer: Tokenizer, lengths: Lengths, kept: NDArray[np.bool_] | None = None
) -> Examples:
    """What is left of passages, in the document layout, and their whole bodies: `text`, `[CLS] body [SEP]`. kept: rows
    that may be trained on, bool [rows]; None for all."""
    rows = passages_to_read(store, lengths, kept, "the denoising autoencoder")

    def make(index: int, rng: np.random.Generator) -> Example:
        row = int(rows[index])
        title, body = truncated_title(store, row, lengths), truncated_body(store, row, lengths)
        left = document_arrays(damaged(title, rng), damaged(body, rng), lengths.document, tokenizer)
        return left | query_arrays(body, lengths.document, tokenizer, "text")

    return Examples(len(rows), make)


def damaged(ids: NDArray, rng: np.random.Generator) -> NDArray:
    """Tokens [n] without a share of them, each deleted by chance, but with one left where there was one."""
    kept = rng.random(len(ids)) >= DELETED
    if len(ids) and not kept.any():
        kept[rng.integers(len(ids))] = True
    return ids[kept]
