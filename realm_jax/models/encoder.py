"""The retriever: text in, one vector out (Embed_input and Embed_doc of the paper, section 3.2).

hidden states → pooled → linear projection → normalised. The paper's: [CLS] through BERT's tanh layer, 128 features,
LayerNorm. With unit scale such a vector's norm is about √128, so inner products range over about ±128. The public
encoders of retrieval take the mean, have no projection, and divide by the length.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from realm_jax.models.attention import Dropout
from realm_jax.models.bert import Bert, BertConfig, Params, apply, dense, layer_norm
from realm_jax.models.inputs import Documents, EncoderInput, document_sequences, query_sequences
from realm_jax.models.packing import fitting_mask
from realm_jax.models.prompts import Template, query_lengths

Array = jax.Array
MIN_NORM = 1e-12  # that a vector is divided by, as in PyTorch


class Pooling(NamedTuple):
    """A way to make one vector of a text's hidden states.

    Attributes:
        library: what sentence-transformers calls it.
        pool: hidden states [batch, length, width] and their mask [batch, length] → [batch, width].
        position: mask → the position of the only state that `pool` takes, [batch, 1] int32, so that the last layer is
            computed there alone; None if it takes all.
    """

    library: str
    pool: Callable[[Array, Array], Array]
    position: Callable[[Array], Array] | None = None


def masked_mean(hidden: Array, mask: Array) -> Array:
    """The mean in float32 over positions where `mask` is true, 0 if there are none."""
    hidden, weights = hidden.astype(jnp.float32), mask.astype(jnp.float32)
    return jnp.einsum("bld,bl->bd", hidden, weights) / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1)


def _only(hidden: Array, _: Array) -> Array:
    """The one state [batch, 1, width] that was computed."""
    return hidden[:, 0]


def _first(mask: Array) -> Array:
    return jnp.zeros((mask.shape[0], 1), jnp.int32)


def _last(mask: Array) -> Array:
    return jnp.maximum(mask.sum(axis=-1, keepdims=True, dtype=jnp.int32) - 1, 0)


POOLINGS = {  # values of config.encoder.pooling
    "pooler": Pooling("cls", _only, _first),  # followed by BERT's tanh layer
    "cls": Pooling("cls", _only, _first),
    "mean": Pooling("mean", masked_mean),  # of all real tokens, [CLS] and [SEP] among them
    "last": Pooling("lasttoken", _only, _last),  # the last real token
}


class Embedder(nn.Module):
    """One tower.

    pooling: a key of POOLINGS. projection: size of a linear layer after it, 0 for none. normalization: 'layer'
    (LayerNorm), 'l2' (length 1) or 'none'. norm_epsilon, norm_scale: of the LayerNorm; a fresh vector's length is
    norm_scale × √size, so scores lie within ± norm_scale² × size.
    """

    config: BertConfig
    projection: int = 128
    norm_epsilon: float = 1e-12
    norm_scale: float = 1.0
    pooling: str = "pooler"
    normalization: str = "layer"

    @nn.compact
    def __call__(self, ids: Array, segments: Array, mask: Array, deterministic: bool = True, places: int = 0) -> Array:
        """ids, segments [batch, length] int, mask [batch, length] bool → vectors [batch, size] float32. places: as of
        `Bert`.

        After a LayerNorm dropout reaches the final vector too, as in the released code (it acts on the retrieval
        scores); vectors of length 1 and those that are left as they are keep what they are.
        """
        c, pooling = self.config, POOLINGS[self.pooling]
        mask = fitting_mask(mask, c.parts, places, c.alignment) if places else mask
        position = pooling.position(mask) if pooling.position else None
        hidden = Bert(c, name="bert")(ids, segments, mask, position, deterministic, places)
        vector = pooling.pool(hidden, mask)  # [batch, width]
        if self.pooling == "pooler":
            vector = jnp.tanh(dense(c.width, ("embed", "embed_out"), c, "pooler")(vector))
        vector = vector.astype(jnp.float32)
        if self.projection:
            axes, init = ("embed", "projection"), nn.initializers.glorot_uniform()
            vector = dense(self.projection, axes, c, "projection", init, jnp.float32)(vector)
        if self.normalization == "l2":
            squares = jnp.square(vector).sum(axis=-1, keepdims=True)
            return vector * jax.lax.rsqrt(jnp.maximum(squares, MIN_NORM**2))
        if self.normalization == "none":
            return vector
        vector = layer_norm("projection_norm", self.norm_epsilon, self.norm_scale)(vector)
        return Dropout(c.dropout)(vector, deterministic=deterministic)


@dataclasses.dataclass(frozen=True)
class Retriever:
    """The towers as pure functions over one tree of parameters, in which each has a key of its own.

    projection … normalization: of the towers (`Embedder`). temperature: scores are inner products of passages' vectors
    with queries' divided by it. query_template, passage_template: what goes around the texts; a passage without one is
    read in two segments, title and body. shared_tower: one tower for both.
    """

    bert: BertConfig
    projection: int = 128
    norm_epsilon: float = 1e-12
    norm_scale: float = 1.0
    pooling: str = "pooler"
    normalization: str = "layer"
    temperature: float = 1.0
    query_template: Template | None = None
    passage_template: Template | None = None
    shared_tower: bool = False

    @property
    def embedder(self) -> Embedder:
        return Embedder(
            self.bert, self.projection, self.norm_epsilon, self.norm_scale, self.pooling, self.normalization
        )

    @property
    def vector_size(self) -> int:
        """Features of a retrieval vector."""
        return self.projection or self.bert.width

    @property
    def embedder_names(self) -> tuple[str, ...]:
        """Top-level keys of the retriever's parameters."""
        return ("embedder",) if self.shared_tower else ("query_embedder", "document_embedder")

    def init_towers(self, key: Array) -> Params:
        """Fresh parameters, boxed with their logical axis names.

        Both towers start from the same numbers, as in the released code: the inner product of equal functions begins
        as a similarity, which training need only sharpen. Each has its own copy, so that both can be donated.
        """
        ids = jnp.zeros((1, 8), jnp.int32)
        tower = self.embedder.init(key, ids, ids, jnp.ones((1, 8), bool))["params"]
        return {name: jax.tree.map(jnp.copy, tower) for name in self.embedder_names}

    def embed_queries(
        self, params: Params, query: Array, lengths: Array, key: Array | None = None, places: int = 0
    ) -> Array:
        """Embed_input, divided by the temperature, so that an inner product with a passage's vector is a score.

        query [batch, q] int, lengths [batch] → [batch, vector_size] float32. places: as of `Bert`.
        """
        vectors = self.query_vectors(params, query, lengths, key, places)  # [batch, vector_size]
        return vectors if self.temperature == 1.0 else vectors / self.temperature

    def query_vectors(
        self, params: Params, query: Array, lengths: Array, key: Array | None = None, places: int = 0
    ) -> Array:
        """`embed_queries` before the temperature: what other libraries know as the vector of a query."""
        tower = params[self.embedder_names[0]]
        return self._embed(tower, query_sequences(query, lengths, self.query_template), key, places)

    def embed_documents(self, params: Params, documents: Documents, key: Array | None = None, places: int = 0) -> Array:
        """Embed_doc. documents.ids [batch, d] → [batch, vector_size] float32. places: as of `Bert`."""
        tower = params[self.embedder_names[-1]]
        return self._embed(tower, document_sequences(documents, self.passage_template), key, places)

    def query_lengths(self, lengths: Any) -> Any:
        """Tokens of queries as the tower reads them. lengths: of `[CLS] text [SEP]`, a number or an array."""
        return query_lengths(lengths, self.query_template)

    def document_lengths(self, documents: Documents) -> Array:
        """Tokens of passages as the tower reads them. documents.ids [batch, k, d] → [batch, k] int32."""
        flat = Documents(*(part.reshape(-1, *part.shape[2:]) for part in documents))
        lengths = document_sequences(flat, self.passage_template).mask.sum(axis=1, dtype=jnp.int32)
        return lengths.reshape(documents.lengths.shape)

    def _embed(self, tower: Params, texts: EncoderInput, key: Array | None, places: int) -> Array:
        vectors: Array = apply(self.embedder, tower, texts, "__call__", key, places)
        return vectors
