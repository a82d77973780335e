"""The retriever's towers: text in, one vector out (Embed_input and Embed_doc of the paper, section 3.2).

hidden states → pooled → linear projection → normalised. The paper's: [CLS] through BERT's tanh layer, 128 features,
LayerNorm. With unit scale such a vector's norm is about √128, so inner products range over about ±128. The public
encoders of retrieval take the mean, have no projection, and divide by the length.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from realm_jax.models.bert import Bert, BertConfig, dense, layer_norm

Array = jax.Array
SMALLEST_LENGTH = 1e-12  # that a vector is divided by, as in PyTorch


class Embedder(nn.Module):
    """One tower.

    pooling: of the hidden states, 'pooler' ([CLS] through a tanh layer), 'cls', 'mean' (of all real tokens, [CLS] and
    [SEP] among them) or 'last' (the last real token). projection: size of a linear layer after it, 0 for none.
    normalization: 'layer' (LayerNorm), 'l2' (length 1) or 'none'. norm_epsilon, norm_scale: of the LayerNorm; a fresh
    vector's length is norm_scale × √size, so scores lie within ± norm_scale² × size.
    """

    config: BertConfig
    projection: int = 128
    norm_epsilon: float = 1e-12
    norm_scale: float = 1.0
    pooling: str = "pooler"
    normalization: str = "layer"

    @nn.compact
    def __call__(self, ids: Array, segments: Array, mask: Array, deterministic: bool = True) -> Array:
        """ids, segments [batch, length] int, mask [batch, length] bool → vectors [batch, size] float32.

        After a LayerNorm dropout reaches the final vector too, as in the released code (it acts on the retrieval
        scores); vectors of length 1 and those that are left as they are keep what they are.
        """
        vector = self._pooled(ids, segments, mask, deterministic)
        if self.projection:
            vector = nn.Dense(
                self.projection,
                dtype=jnp.float32,
                kernel_init=nn.with_logical_partitioning(nn.initializers.glorot_uniform(), ("embed", "projection")),
                bias_init=nn.with_logical_partitioning(nn.initializers.zeros_init(), ("projection",)),
                name="projection",
            )(vector)
        if self.normalization == "l2":
            return unit(vector)
        if self.normalization == "none":
            return vector
        vector = layer_norm("projection_norm", self.norm_epsilon, self.norm_scale)(vector)
        return nn.Dropout(self.config.dropout)(vector, deterministic=deterministic)

    def _pooled(self, ids: Array, segments: Array, mask: Array, deterministic: bool) -> Array:
        c = self.config
        bert = Bert(c, name="bert")
        if self.pooling == "mean":
            hidden = bert(ids, segments, mask, deterministic=deterministic).astype(jnp.float32)
            return masked_mean(hidden, mask)
        place = jnp.zeros((ids.shape[0], 1), jnp.int32)
        if self.pooling == "last":
            place = jnp.maximum(mask.sum(axis=-1, keepdims=True, dtype=jnp.int32) - 1, 0)
        hidden = bert(ids, segments, mask, positions=place, deterministic=deterministic)[:, 0]
        if self.pooling == "pooler":
            hidden = jnp.tanh(dense(c.width, ("embed", "embed_out"), c, "pooler")(hidden))
        return hidden.astype(jnp.float32)


def vector_size(projection: int, width: int) -> int:
    """Features of a tower's vector. projection: of its linear layer, 0 for none; width: of its hidden states."""
    return projection or width


def masked_mean(hidden: Array, mask: Array) -> Array:
    """The mean over positions where `mask` is true. hidden [batch, length, width], mask [batch, length] → [batch,
    width]; 0 where there are none."""
    weights = mask.astype(hidden.dtype)
    return jnp.einsum("bld,bl->bd", hidden, weights) / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1)


def unit(vectors: Array) -> Array:
    """Vectors [..., size] divided by their length."""
    squares = jnp.square(vectors).sum(axis=-1, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, SMALLEST_LENGTH**2))
