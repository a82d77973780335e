"""The retriever: text in, one vector out (Embed_input and Embed_doc of the paper, section 3.2).

hidden states → pooled → linear projection → normalized. The paper's: [CLS] through BERT's tanh layer, 128 features,
LayerNorm. With unit scale such a vector's norm is about √128, so inner products range over about ±128. Public encoders
for retrieval take the mean, have no projection, and divide by the length.

Read next: `bert.py` for the network, `inputs.py` for its inputs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from realm_jax.models.architectures.table import encoder_network
from realm_jax.models.bert import apply
from realm_jax.models.inputs import (
    EncoderInput,
    PassageBatch,
    document_sequences,
    document_text_mask,
    query_sequences,
    query_text_mask,
)
from realm_jax.models.layers import BertConfig, Dropout, Params, dense, layer_norm
from realm_jax.models.packing import fitting_mask
from realm_jax.models.prompts import Template, query_lengths

Array = jax.Array
MIN_NORM = 1e-12  # that a vector is divided by, as in PyTorch


# --- Poolings ---------------------------------------------------------------------------------------------------------


class Pooling(NamedTuple):
    """A way to make one vector of a text's hidden states.

    Attributes:
        library: its name in sentence-transformers.
        pool: (hidden states [batch, length, width], mask [batch, length]) → [batch, width].
        position: mask → the position of the only state that `pool` takes, [batch, 1] int32, so that the last layer is
            computed only there; None if it takes all.
        has_tanh_layer: BERT's own linear layer with tanh follows.
    """

    library: str
    pool: Callable[[Array, Array], Array]
    position: Callable[[Array], Array] | None = None
    has_tanh_layer: bool = False


def masked_mean(hidden: Array, mask: Array) -> Array:
    """Return the mean over tokens, 0 if there are none.

    Args:
        hidden: [batch, length, width].
        mask: [batch, length] bool, false on padding.

    Returns:
        [batch, width] float32.
    """
    hidden, weights = hidden.astype(jnp.float32), mask.astype(jnp.float32)
    return jnp.einsum("bld,bl->bd", hidden, weights) / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1)


def only_state(hidden: Array, _: Array) -> Array:
    """Return the one state [batch, 1, width] that was computed: [batch, width]."""
    return hidden[:, 0]


def first_position(mask: Array) -> Array:
    """Return the position of [CLS], [batch, 1]."""
    return jnp.zeros((mask.shape[0], 1), jnp.int32)


def last_position(mask: Array) -> Array:
    """Return the position of the last real token, [batch, 1]."""
    return jnp.maximum(mask.sum(axis=-1, keepdims=True, dtype=jnp.int32) - 1, 0)


POOLINGS = {  # values of config.encoder.pooling; exports, imports and FLOPs read this table
    "pooler": Pooling("cls", only_state, first_position, has_tanh_layer=True),
    "cls": Pooling("cls", only_state, first_position),
    "mean": Pooling("mean", masked_mean),  # over all real tokens, [CLS] and [SEP] included
    "last": Pooling("lasttoken", only_state, last_position),
}


def unit_vectors(vectors: Array) -> Array:
    """Divide vectors [..., size] by their lengths."""
    squares = jnp.square(vectors).sum(axis=-1, keepdims=True)  # [..., 1]
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, MIN_NORM**2))


# --- The network ------------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """The network of an encoder.

    Attributes:
        config: sizes of its transformer.
        projection: size of a linear layer after the pooling, 0 for none.
        norm_epsilon: epsilon of the LayerNorm.
        norm_scale: scale of the LayerNorm. A fresh vector's length is norm_scale × √size, so scores are within
            ± norm_scale² × size.
        pooling: a key of POOLINGS.
        normalization: "layer" (LayerNorm), "l2" (length 1) or "none".
        dimensions: first features of a vector that are kept, before it gets length 1; 0 for all.
    """

    config: BertConfig
    projection: int = 128
    norm_epsilon: float = 1e-12
    norm_scale: float = 1.0
    pooling: str = "pooler"
    normalization: str = "layer"
    dimensions: int = 0

    @nn.compact
    def __call__(self, ids: Array, segments: Array, mask: Array, sequence_numbers: Array | None = None) -> Array:
        """Embed texts.

        After a LayerNorm dropout reaches the final vector too, as in the released code (it acts on the retrieval
        scores). Vectors of length 1 and those without normalization stay as they are.

        Args:
            ids: tokens, [batch, length] int.
            segments: 0 or 1 for each token, [batch, length] int.
            mask: [batch, length] bool, false on padding.
            sequence_numbers: number of each sequence in the batch, [batch] int, for dropout; None for no dropout.

        Returns:
            [batch, size] float32.
        """
        c, compute, pooling = self.config, self.config.compute, POOLINGS[self.pooling]
        if compute.packed_length:  # a sequence that loses its last tokens is pooled as if it had ended there
            mask = fitting_mask(mask, compute.parts, compute.packed_length, compute.alignment)
        position = pooling.position(mask) if pooling.position else None
        hidden = encoder_network(c, "bert")(
            ids, segments, mask, position, sequence_numbers
        )  # [batch, length or 1, width]
        vector = pooling.pool(hidden, mask)  # [batch, width]
        if pooling.has_tanh_layer:
            vector = jnp.tanh(dense(c.width, ("embed", "embed_out"), c, "pooler")(vector))
        vector = vector.astype(jnp.float32)
        if self.projection:
            axes, init = ("embed", "projection"), nn.initializers.glorot_uniform()
            vector = dense(self.projection, axes, c, "projection", init, jnp.float32)(vector)  # [batch, projection]
        if self.dimensions and self.normalization != "layer":
            vector = vector[:, : self.dimensions]
        if self.normalization == "l2":
            return unit_vectors(vector)
        if self.normalization == "none":
            return vector
        vector = layer_norm("projection_norm", self.norm_epsilon, self.norm_scale)(vector)
        if self.dimensions:
            vector = vector[:, : self.dimensions]
        return Dropout(c.dropout)(vector, sequence_numbers=sequence_numbers)


# --- Both encoders ----------------------------------------------------------------------------------------------------


class TokenVectors(NamedTuple):
    """The token vectors of texts.

    Attributes:
        vectors: hidden states of the last layer, each divided by its length, [batch, length, width] float32.
        mask: True on tokens of the text and special tokens, false on padding and on a template, [batch, length] bool.
    """

    vectors: Array
    mask: Array


@dataclasses.dataclass(frozen=True)
class Retriever:
    """Both encoders as pure functions over one tree of parameters, in which each has its key.

    Attributes:
        bert: sizes of both encoders.
        projection: see `Encoder`, as for the next five.
        norm_epsilon: epsilon of the LayerNorm.
        norm_scale: scale of the LayerNorm.
        pooling: a key of POOLINGS.
        normalization: "layer", "l2" or "none".
        dimensions: first features of a vector that are kept; 0 for all.
        temperature: scores are inner products of passage vectors with query vectors divided by it.
        query_template: text around queries; None for none.
        passage_template: text around passages; None to read title and body as two segments.
        shared_tower: one encoder for queries and passages.
    """

    bert: BertConfig
    projection: int = 128
    norm_epsilon: float = 1e-12
    norm_scale: float = 1.0
    pooling: str = "pooler"
    normalization: str = "layer"
    dimensions: int = 0
    temperature: float = 1.0
    query_template: Template | None = None
    passage_template: Template | None = None
    shared_tower: bool = False

    @property
    def encoder(self) -> Encoder:
        """Return the network of an encoder, without parameters."""
        sizes = self.bert, self.projection, self.norm_epsilon, self.norm_scale
        return Encoder(*sizes, self.pooling, self.normalization, self.dimensions)

    @property
    def vector_size(self) -> int:
        """Return the number of features of a retrieval vector."""
        return self.dimensions or self.full_size

    @property
    def full_size(self) -> int:
        """Return the number of features of a vector before it is cut."""
        return self.projection or self.bert.width

    @property
    def embedder_names(self) -> tuple[str, ...]:
        """Return the top-level keys of the parameters: the query encoder first, the passage encoder last."""
        return ("embedder",) if self.shared_tower else ("query_embedder", "document_embedder")

    def init_encoders(self, key: Array) -> Params:
        """Return fresh parameters, boxed with their logical axis names.

        Both encoders start from the same numbers, as in the released code: the inner product of equal functions begins
        as a similarity, which training only has to sharpen. Each has its own copy, so that both can be donated.
        """
        ids = jnp.zeros((1, 8), jnp.int32)
        params = self.encoder.init(key, ids, ids, jnp.ones((1, 8), bool))["params"]
        return {name: jax.tree.map(jnp.copy, params) for name in self.embedder_names}

    def embed_queries(
        self, params: Params, query: Array, lengths: Array, key: Array | None = None, packed_length: int = 0
    ) -> Array:
        """Embed queries, so that an inner product with a passage's vector is a score (Embed_input).

        Args:
            params: all parameters.
            query: tokens of `[CLS] text [SEP]`, [batch, q] int.
            lengths: lengths of the queries, [batch].
            key: random key for dropout; None for none.
            packed_length: see `layers.Compute`.

        Returns:
            Vectors divided by the temperature, [batch, vector_size] float32.
        """
        vectors = self.query_vectors(params, query, lengths, key, packed_length)  # [batch, vector_size]
        return vectors if self.temperature == 1.0 else vectors / self.temperature

    def query_vectors(
        self, params: Params, query: Array, lengths: Array, key: Array | None = None, packed_length: int = 0
    ) -> Array:
        """Embed queries as other libraries do, before the temperature. Arguments: see `embed_queries`."""
        texts = query_sequences(query, lengths, self.query_template)
        return self._embed(params[self.embedder_names[0]], texts, key, packed_length)

    def embed_documents(
        self, params: Params, passages: PassageBatch, key: Array | None = None, packed_length: int = 0
    ) -> Array:
        """Embed passages (Embed_doc).

        Args:
            params: all parameters.
            passages: ids [batch, d].
            key: random key for dropout; None for none.
            packed_length: see `layers.Compute`.

        Returns:
            [batch, vector_size] float32.
        """
        texts = document_sequences(passages, self.passage_template)
        return self._embed(params[self.embedder_names[-1]], texts, key, packed_length)

    def query_tokens(self, params: Params, query: Array, lengths: Array) -> TokenVectors:
        """Return the token vectors of queries, without dropout.

        The tokens of the template are read, but masked out: they are the same in all queries.

        Args:
            params: all parameters.
            query: tokens of `[CLS] text [SEP]`, [batch, q] int.
            lengths: lengths of the queries, [batch].

        Returns:
            Arrays [batch, q + the template's tokens, …].
        """
        texts = query_sequences(query, lengths, self.query_template)
        vectors = self._token_vectors(params[self.embedder_names[0]], texts)
        return TokenVectors(vectors, query_text_mask(texts, self.query_template))

    def document_tokens(self, params: Params, passages: PassageBatch) -> TokenVectors:
        """Return the token vectors of passages, without dropout; see `query_tokens`.

        Args:
            params: all parameters.
            passages: ids [batch, d].

        Returns:
            Arrays [batch, length, …], in the layout of `document_sequences`.
        """
        texts = document_sequences(passages, self.passage_template)
        vectors = self._token_vectors(params[self.embedder_names[-1]], texts)
        return TokenVectors(vectors, document_text_mask(passages, texts, self.passage_template))

    def _token_vectors(self, encoder_params: Params, texts: EncoderInput) -> Array:
        hidden = apply(encoder_network(self.bert), encoder_params["bert"], texts, "__call__", None).astype(jnp.float32)
        return unit_vectors(hidden)  # [batch, length, width]

    def _embed(self, encoder_params: Params, texts: EncoderInput, key: Array | None, packed_length: int) -> Array:
        vectors: Array = apply(self.encoder, encoder_params, texts, "__call__", key, packed_length)
        return vectors

    def query_lengths(self, lengths: Any) -> Any:
        """Return tokens of queries for the query encoder. lengths: of `[CLS] text [SEP]`, a number or an array."""
        return query_lengths(lengths, self.query_template)

    def document_lengths(self, passages: PassageBatch) -> Array:
        """Return tokens of passages for the passage encoder. passages.ids [batch, k, d] → [batch, k] int32."""
        flat = PassageBatch(*(part.reshape(-1, *part.shape[2:]) for part in passages))  # ids [batch · k, d]
        lengths = document_sequences(flat, self.passage_template).mask.sum(axis=1, dtype=jnp.int32)
        return lengths.reshape(passages.lengths.shape)
