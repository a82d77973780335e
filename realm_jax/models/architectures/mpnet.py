"""MPNet (Song et al. 2020): a BERT whose attention adds a bias that depends on the distance of two tokens.

It has no segments, and its position embeddings begin at row 2, like RoBERTa's. Our fast kernels take no bias, so its
attention is plain JAX on every device.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.models.architectures.base import Tensor, WordHead
from realm_jax.models.architectures.bert import BERT, bert_tensors
from realm_jax.models.architectures.roberta import FIRST_POSITION, PADDING
from realm_jax.models.bert import Bert
from realm_jax.models.layers import BertConfig, embedding

Array = jax.Array
BUCKETS, LONGEST = 32, 128  # of distances; longer ones share the last bucket of their direction

LAYER = {  # our name → Hugging Face's
    "query": "attention.attn.q",
    "key": "attention.attn.k",
    "value": "attention.attn.v",
    "attention_output": "attention.attn.o",
    "attention_norm": "attention.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}


def distance_buckets(length: int) -> NDArray[np.int32]:
    """Return the bucket of each distance key − query, from 1 − length to length − 1, int32 [2 · length − 1].

    Half of the buckets are for keys after the query. In each half the first 8 distances have a bucket each, and longer
    ones share buckets on a logarithmic scale (Raffel et al. 2020, section 2.1).
    """
    half, exact = BUCKETS // 2, BUCKETS // 4
    distance = np.arange(1 - length, length)
    size = np.abs(distance)
    scale = np.log(np.maximum(size, 1).astype(np.float32) / exact) / np.log(LONGEST / exact) * (half - exact)
    bucket = np.where(size < exact, size, np.minimum(exact + scale.astype(np.int64), half - 1))
    return (bucket + half * (distance > 0)).astype(np.int32)


class MPNet(Bert):
    """A `Bert` with a table of biases [buckets, heads], which all layers share."""

    def setup(self) -> None:
        super().setup()
        self.distances = embedding(BUCKETS, self.config.heads, None, "distances")

    def attention_bias(self, length: int, positions: Array | None = None) -> Array | None:
        by_distance = self.distances(jnp.asarray(distance_buckets(length))).astype(jnp.float32)  # [distances, heads]
        queries = jnp.arange(length)[None] if positions is None else positions  # [1 or batch, m]
        distance = jnp.arange(length) - queries[..., None]  # [1 or batch, m, length]
        return by_distance[distance + length - 1].transpose(0, 3, 1, 2)  # [1 or batch, heads, m, length]


def tensors(c: BertConfig) -> tuple[Tensor, ...]:
    """Return the parameters of an MPNet of these sizes."""
    name = "encoder.relative_attention_bias.weight"
    table = Tensor(("bert", "distances", "embedding"), name, (BUCKETS, c.heads))
    return (*bert_tensors(c, layer=LAYER, first_position=FIRST_POSITION), table)


MPNET = dataclasses.replace(
    BERT,
    model_type="mpnet",
    network=MPNet,
    tensors=tensors,
    prefix="mpnet.",
    head=WordHead(
        transform="lm_head.dense", norm="lm_head.layer_norm", bias="lm_head.bias", tied="lm_head.decoder.weight"
    ),
    masked_lm_class="MPNetForMaskedLM",
    base_class="MPNetModel",
    required={"relative_attention_num_buckets": (BUCKETS,), "pad_token_id": (PADDING,)},
    first_position=FIRST_POSITION,
    segment_types=0,
    extra=lambda c: {"attention_probs_dropout_prob": c.dropout, "relative_attention_num_buckets": BUCKETS},
)
