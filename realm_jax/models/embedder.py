"""The retriever's towers: text in, one vector out (Embed_input and Embed_doc of the paper, section 3.2).

pooled [CLS] (tanh layer, as BERT's pooler) → linear projection → LayerNorm. No length normalisation and no temperature:
with unit scale a vector's norm is about √128, so inner products range over about ±128.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from realm_jax.models.bert import Bert, BertConfig, dense, layer_norm

Array = jax.Array


class Embedder(nn.Module):
    """One tower.

    `projection`: size of the vector (128 in the paper). `norm_epsilon`, `norm_scale`: of the final LayerNorm; a fresh
    vector's length is norm_scale × √projection, so scores lie within ± norm_scale² × projection.
    """

    config: BertConfig
    projection: int = 128
    norm_epsilon: float = 1e-12
    norm_scale: float = 1.0

    @nn.compact
    def __call__(self, ids: Array, segments: Array, mask: Array, deterministic: bool = True) -> Array:
        """ids, segments [batch, length] int, mask [batch, length] bool → vectors [batch, projection] float32.

        Dropout reaches the final vector too, as in the released code (it acts on the retrieval scores).
        """
        c = self.config
        first = jnp.zeros((ids.shape[0], 1), jnp.int32)
        hidden = Bert(c, name="bert")(ids, segments, mask, positions=first, deterministic=deterministic)[:, 0]
        pooled = jnp.tanh(dense(c.width, ("embed", "embed_out"), c, "pooler")(hidden))
        projected = nn.Dense(
            self.projection,
            dtype=jnp.float32,
            kernel_init=nn.with_logical_partitioning(nn.initializers.glorot_uniform(), ("embed", "projection")),
            bias_init=nn.with_logical_partitioning(nn.initializers.zeros_init(), ("projection",)),
            name="projection",
        )(pooled.astype(jnp.float32))
        vector = layer_norm("projection_norm", self.norm_epsilon, self.norm_scale)(projected)
        return nn.Dropout(c.dropout)(vector, deterministic=deterministic)
