"""ModernBERT (Warner et al. 2024): pre-norm layers with rotary positions, gated feed-forward layers and no biases.

Every third layer attends to all tokens, the others only to 64 on each side. If a sequence is longer than that, these
local layers need a bias, which our fast kernels do not take, so their attention is plain JAX. Because layers differ,
they are never one compiled loop (`Compute.scan`).
"""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from realm_jax.models.architectures.base import Architecture, Settings, Tensor, WordHead, linear, norm
from realm_jax.models.attention import MASKED_BIAS, AttentionDropout, attend
from realm_jax.models.bert import ATTENDED, REMAT, constrained
from realm_jax.models.layers import (
    ACTIVATIONS,
    BertConfig,
    Dropout,
    Rotary,
    dense,
    dropout_seeds,
    embedding,
    layer_norm,
)
from realm_jax.models.packing import TILE, Packing, Padded, packing

Array = jax.Array
EPSILON = 1e-5  # of LayerNorm if config.json has none
WORDS = "embeddings.tok_embeddings.weight"
FULL, LOCAL = "full_attention", "sliding_attention"  # types of layers in config.json
REGULAR = "regular"  # order of these types


def rotate(states: Array, angles: Array, heads: int) -> Array:
    """Rotate the two halves of each head's features by angles that grow with the position (Su et al. 2021).

    Args:
        states: queries or keys, [..., tokens, width].
        angles: angles of each token, [..., tokens, head size / 2] float32.
        heads: attention heads.

    Returns:
        An array like `states`.
    """
    split = states.reshape(*states.shape[:-1], heads, -1).astype(jnp.float32)  # [..., tokens, heads, head size]
    first, second = jnp.split(split, 2, axis=-1)
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]  # [..., tokens, 1, head size / 2]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.reshape(states.shape).astype(states.dtype)


class ModernLayer(nn.Module):
    """One pre-norm layer.

    Attributes:
        config: sizes of the network.
        number: number of the layer. The first has no norm before attention, because the embeddings have one.
    """

    config: BertConfig
    number: int

    @nn.compact
    def __call__(
        self, x: Array, layout: Padded | Packing, sequence_numbers: Array | None, positions: Array | None = None
    ) -> Array:
        """Compute hidden states.

        Args:
            x: [batch, length, width], or packed, [parts, slots, width].
            layout: layout of the sequences in `x`.
            sequence_numbers: number of each sequence in the batch, [batch] int, for dropout; None for no dropout.
            positions: [batch, m] int, the only ones that are computed; None for all.

        Returns:
            States like `x`, or [batch, m, width].
        """
        c, rotary, length = self.config, self.config.rotary, layout.mask.shape[1]
        is_global = self.number % rotary.global_every == 0

        def product(features: int, axes: tuple[str, str], name: str) -> Callable[[Array], Array]:
            return dense(features, axes, c, name, has_bias=False)

        # Attention, with a residual branch.
        normed = layer_norm("attention_norm", c.norm_epsilon, has_bias=False)(x) if self.number else x
        projected = product(3 * c.width, ("embed", "heads"), "query_key_value")(normed.astype(c.state_dtype))
        query, key, value = jnp.split(projected, 3, axis=-1)
        size = c.width // c.heads
        theta = rotary.global_theta if is_global else rotary.local_theta
        frequencies = theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)  # [head size / 2]
        token_positions = layout.positions if isinstance(layout, Packing) else jnp.arange(length)[None]
        angles = token_positions[..., None] * frequencies  # [1 or parts, tokens, head size / 2]
        query, key = rotate(query, angles, c.heads), rotate(key, angles, c.heads)
        if positions is not None:
            query, x = layout.take(query, positions), layout.take(x, positions)  # [batch, m, width] both
        bias = None
        if not is_global and length - 1 > rotary.window // 2:
            queries = jnp.arange(length)[None] if positions is None else positions  # [1 or batch, m]
            is_far = jnp.abs(jnp.arange(length) - queries[..., None]) > rotary.window // 2  # [1 or batch, m, length]
            bias = jnp.where(is_far, MASKED_BIAS, 0.0)[:, None]
        dropout = None
        if c.dropout and sequence_numbers is not None:
            seeds = dropout_seeds(self.make_rng("dropout"), sequence_numbers, c.heads)  # [batch, heads]
            dropout = AttentionDropout(c.dropout, seeds)
        attended = attend(c.compute, query, key, value, layout, c.heads, dropout, bias)
        attended = product(c.width, ("heads", "embed"), "attention_output")(checkpoint_name(attended, ATTENDED))
        packed = layout if isinstance(layout, Packing) and positions is None else None
        x = (x + Dropout(c.dropout)(attended, sequence_numbers, packed)).astype(c.state_dtype)

        # Gated feed-forward, with a residual branch.
        normed = layer_norm("feed_forward_norm", c.norm_epsilon, has_bias=False)(x).astype(c.state_dtype)
        hidden, gate = jnp.split(product(2 * c.feed_forward, ("embed", "mlp"), "intermediate")(normed), 2, axis=-1)
        hidden = Dropout(c.dropout)(ACTIVATIONS[c.hidden_act](hidden) * gate, sequence_numbers, packed)
        return (x + product(c.width, ("mlp", "embed"), "output")(hidden)).astype(c.state_dtype)


class ModernBert(nn.Module):
    """Embeddings and `config.layers` layers, with the methods of `Bert`."""

    config: BertConfig

    def setup(self) -> None:
        c = self.config
        self.words = embedding(c.vocabulary_size, c.width, "vocab", "words")
        self.norm = layer_norm("embedding_norm", c.norm_epsilon, has_bias=False)
        self.last_norm = layer_norm("last_norm", c.norm_epsilon, has_bias=False)
        self.dropout = Dropout(c.dropout)
        remat = c.compute.remat
        layer = ModernLayer if remat == "none" else nn.remat(ModernLayer, policy=REMAT[remat])
        self.blocks = [layer(c, number, name=f"layer_{number}") for number in range(c.layers)]

    def __call__(
        self,
        ids: Array,
        segments: Array,
        mask: Array,
        positions: Array | None = None,
        sequence_numbers: Array | None = None,
    ) -> Array:
        """Compute hidden states after the last LayerNorm. Segments are not used. Arguments and result: see `Bert`."""
        c, compute, length = self.config, self.config.compute, ids.shape[1]
        x = self.dropout(self.norm(self.words(ids)), sequence_numbers=sequence_numbers).astype(c.state_dtype)
        if compute.attention == "tpu" and length % TILE:  # see `Bert`
            x, mask = (jnp.pad(array, [(0, 0), (0, -length % TILE), (0, 0)][: array.ndim]) for array in (x, mask))
        layout: Padded | Packing = Padded(mask)
        if compute.packed_length:
            layout = packing(mask, compute.parts, compute.packed_length, compute.alignment)
        x = constrained(layout.pack(x), compute)  # [batch, length, width] or [parts, slots, width]
        for block in self.blocks[:-1]:
            x = constrained(block(x, layout, sequence_numbers), compute)
        x = self.last_norm(self.blocks[-1](x, layout, sequence_numbers, positions)).astype(c.state_dtype)
        return x if positions is not None else layout.unpack(x)[:, :length]

    def tied_logits(self, hidden: Array) -> Array:
        """Return float32 logits [..., vocabulary] of hidden states against the word embeddings."""
        return jnp.einsum("...d,vd->...v", hidden.astype(jnp.float32), self.words.embedding.astype(jnp.float32))


def tensors(c: BertConfig) -> tuple[Tensor, ...]:
    """Return the parameters of a `ModernBert`."""
    words = Tensor(("bert", "words", "embedding"), WORDS, (c.vocabulary_size, c.width), is_table=True)
    listed = [words, *norm(("bert", "embedding_norm"), "embeddings.norm", c.width, has_bias=False)]
    products = {
        "query_key_value": ("attn.Wqkv", (c.width, 3 * c.width)),
        "attention_output": ("attn.Wo", (c.width, c.width)),
        "intermediate": ("mlp.Wi", (c.width, 2 * c.feed_forward)),
        "output": ("mlp.Wo", (c.feed_forward, c.width)),
    }
    norms = {"attention_norm": "attn_norm", "feed_forward_norm": "mlp_norm"}
    for number in range(c.layers):
        layer, theirs = ("bert", f"layer_{number}"), f"layers.{number}."
        for part, name in norms.items():
            if number or part != "attention_norm":
                listed += norm((*layer, part), theirs + name, c.width, has_bias=False)
        for part, (name, shape) in products.items():
            listed += linear((*layer, part), theirs + name, shape, has_bias=False)
    return (*listed, *norm(("bert", "last_norm"), "final_norm", c.width, has_bias=False))


def fill(settings: Settings) -> Settings:
    """Add the keys of rotary positions and local layers to a config.json of transformers 5, which has other keys."""
    filled = dict(settings)
    rope = settings.get("rope_parameters")
    for kind, key in ((FULL, "global_rope_theta"), (LOCAL, "local_rope_theta")):
        table = rope.get(kind) if isinstance(rope, dict) else None
        if isinstance(table, dict):
            filled["rope_type"] = table.get("rope_type", "default")
            filled.setdefault(key, table.get("rope_theta"))
    types = settings.get("layer_types")
    if isinstance(types, list) and types:
        every = next((number for number, kind in enumerate(types[1:], start=1) if kind == FULL), len(types))
        expected = [LOCAL if number % every else FULL for number in range(len(types))]
        if types == expected:
            filled |= {"global_attn_every_n_layers": every, "layer_types": REGULAR}
    return filled


MODERNBERT = Architecture(
    model_type="modernbert",
    network=ModernBert,
    tensors=tensors,
    words=WORDS,
    positions="",
    layers="layers.",
    prefix="model.",
    head=WordHead(
        transform="head.dense", norm="head.norm", bias="decoder.bias", tied="decoder.weight", has_biases=False
    ),
    masked_lm_class="ModernBertForMaskedLM",
    base_class="ModernBertModel",
    settings={
        "vocabulary_size": "vocab_size",
        "width": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "feed_forward": "intermediate_size",
        "hidden_act": "hidden_activation",
        "dropout": "attention_dropout",
        "max_length": "max_position_embeddings",
        "norm_epsilon": "norm_eps",
        "rotary.global_theta": "global_rope_theta",
        "rotary.local_theta": "local_rope_theta",
        "rotary.global_every": "global_attn_every_n_layers",
        "rotary.window": "local_attention",
    },
    defaults={"norm_epsilon": EPSILON}
    | {f"rotary.{name}": value for name, value in dataclasses.asdict(Rotary()).items()},
    required={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "norm_bias": (False,),
        "rope_type": ("default",),
        "layer_types": (REGULAR,),
    },
    segment_types=0,
    has_pooler=False,
    fill=fill,
    extra=lambda c: {"embedding_dropout": c.dropout, "mlp_dropout": c.dropout},
)
