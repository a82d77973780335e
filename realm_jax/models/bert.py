"""BERT (Devlin et al. 2019) as a Flax Linen module: embeddings and post-norm transformer layers, nothing above them.

Not here: attention (`attention.py`), linear layers and sizes (`layers.py`), pooling and projection (`retriever.py`),
word prediction and span scores (`reader.py`).

The last layer can be asked for a few positions only (`positions`). A retriever only needs `[CLS]`, and a masked
language model only the masked tokens, so the rest of that layer need not be computed.

Two hooks make it fast, and change no result but for rounding: `attend` calls the attention of the device, and a layout
(`packing.py`) can put the sequences of a batch one after another, without padding.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from realm_jax.models.attention import AttentionDropout, attend
from realm_jax.models.layers import (
    ACTIVATIONS,
    PRODUCT,
    BertConfig,
    Compute,
    Dropout,
    Params,
    dense,
    dropout_seeds,
    embedding,
    layer_norm,
    unfused_gradient,
)
from realm_jax.models.packing import TILE, BalancedPermutation, Packing, Padded, packing

Array = jax.Array
ATTENDED = "attended"  # name of attention's result; a policy does not see inside of custom gradients
REMAT = {  # values of a layer that are stored for the backward pass with its inputs; others are computed again
    "none": None,  # all that the backward pass needs
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT, ATTENDED),  # products with parameters, attention
    "layer": jax.checkpoint_policies.nothing_saveable,
}


def constrained(x: Array, compute: Compute) -> Array:
    """Constrain the sharding of hidden states, if there are several devices and they divide the batch.

    Args:
        x: [batch, length, width] or [parts, slots, width].
        compute: has the sharding.
    """
    spread = compute.mesh is not None and compute.mesh.size > 1 and x.shape[0] % compute.parts == 0
    return jax.lax.with_sharding_constraint(x, compute.hidden_sharding) if spread else x


class Layer(nn.Module):
    """One post-norm transformer layer; queries may be fewer than keys.

    A new layer returns the values that it attends to: its value matrix is orthogonal and its output matrix the
    inverse. So a model without BERT's weights copies and compares words from its first steps, instead of after the
    hundreds that two random matrices need to find each other (measured: `benchmarks/README.md`).
    """

    config: BertConfig

    @nn.compact
    def __call__(
        self,
        queries: Array,
        keys: Array,
        layout: Padded | Packing,
        sequence_numbers: Array | None,
        bias: Array | None = None,
    ) -> Array:
        """Compute hidden states of the queries.

        Args:
            queries: [batch, positions, width]; packed like keys if all positions are computed.
            keys: [batch, length, width], or packed, [parts, slots, width].
            layout: layout of the sequences in `keys`.
            sequence_numbers: number of each sequence in the batch, [batch] int, for dropout; None for no dropout.
            bias: bias of attention, see `attend`.

        Returns:
            Hidden states like `queries`.
        """
        c = self.config

        def inverse_value(*_: Any) -> Array:
            return nn.unbox(self.get_variable("params", "value"))["kernel"].T

        # Attention, with a residual branch.
        query = dense(c.width, ("embed", "heads"), c, "query")(queries)
        # The key's bias adds the same number to all scores of a query, which the softmax takes away again, before
        # dropout. So its gradient is 0, and biases do not decay (`train/optimizer.py`): it stays as it was initialized.
        key = dense(c.width, ("embed", "heads"), c, "key", is_bias_trained=False)(keys)
        value = dense(c.width, ("embed", "heads"), c, "value", nn.initializers.orthogonal())(keys)
        dropout = None
        if c.dropout and sequence_numbers is not None:
            seeds = dropout_seeds(self.make_rng("dropout"), sequence_numbers, c.heads)  # [batch, heads]
            dropout = AttentionDropout(c.dropout, seeds)
        attended = checkpoint_name(attend(c.compute, query, key, value, layout, c.heads, dropout, bias), ATTENDED)
        attended = dense(c.width, ("heads", "embed"), c, "attention_output", inverse_value)(attended)
        packed = layout if isinstance(layout, Packing) and queries.shape == keys.shape else None
        attended = Dropout(c.dropout)(attended, sequence_numbers, packed)
        x = layer_norm("attention_norm", c.norm_epsilon)(queries + attended).astype(c.state_dtype)
        x = unfused_gradient(x) if c.compute.attention == "tpu" else x

        # Feed-forward, with a residual branch.
        hidden = dense(c.feed_forward, ("embed", "mlp"), c, "intermediate")(x)
        hidden = dense(c.width, ("mlp", "embed"), c, "output")(ACTIVATIONS[c.hidden_act](hidden))
        hidden = Dropout(c.dropout)(hidden, sequence_numbers, packed)
        return layer_norm("output_norm", c.norm_epsilon)(x + hidden).astype(c.state_dtype)


class Bert(nn.Module):
    """Embeddings and `config.layers` layers. Call it for hidden states; `tied_logits` ties an output layer to it."""

    config: BertConfig

    def setup(self) -> None:
        c = self.config
        self.words = embedding(c.vocabulary_size, c.width, "vocab", "words")
        self.positions = embedding(c.max_length, c.width, None, "positions")
        if c.segment_types:
            self.segments = embedding(c.segment_types, c.width, None, "segments")
        self.norm = layer_norm("embedding_norm", c.norm_epsilon)
        self.dropout = Dropout(c.dropout)
        remat = c.compute.remat
        layer = Layer if remat == "none" else nn.remat(Layer, policy=REMAT[remat])
        self.blocks = [layer(c, name=f"layer_{i}") for i in range(c.layers)]

    def __call__(
        self,
        ids: Array,
        segments: Array,
        mask: Array,
        positions: Array | None = None,
        sequence_numbers: Array | None = None,
    ) -> Array:
        """Compute hidden states of the last layer.

        Args:
            ids: tokens, [batch, length] int.
            segments: 0 or 1 for each token, [batch, length] int; all count as 0 if there are not two of them.
            mask: [batch, length] bool, true on real tokens; they come first in a sequence if it is packed.
            positions: [batch, m] int, the only ones for which the last layer is computed; None for all.
            sequence_numbers: number of each sequence in the batch, [batch] int, for dropout; None for no dropout.

        Returns:
            [batch, length or m, width] in the dtype of states; 0 for tokens that packing had no slot for.
        """
        c, compute, length = self.config, self.config.compute, ids.shape[1]
        x = self.words(ids)  # [batch, length, width]
        if c.segment_types:
            x = x + self.segments(segments if c.segment_types > 1 else jnp.zeros_like(segments))
        x = x + self.positions(jnp.arange(length))[None]
        x = self.dropout(self.norm(x), sequence_numbers=sequence_numbers)  # [batch, length, width]
        x = x.astype(c.state_dtype)
        if compute.attention == "tpu" and length % TILE:
            # The kernel takes whole tiles. The compiler would arrange other lengths in another way, and copy them at
            # every layer.
            x, mask = (jnp.pad(array, [(0, 0), (0, -length % TILE), (0, 0)][: array.ndim]) for array in (x, mask))
        layout: Padded | Packing = Padded(mask)
        if compute.packed_length:
            layout = packing(mask, compute.parts, compute.packed_length, compute.alignment)
        x = constrained(layout.pack(x), compute)  # [batch, length, width] or [parts, slots, width]
        bias = self.attention_bias(mask.shape[1])
        if compute.scan and len(self.blocks) > 2 and not self.is_initializing():
            x = self._scan(x, layout, sequence_numbers, bias)
        else:
            for block in self.blocks[:-1]:
                x = constrained(block(x, x, layout, sequence_numbers, bias), compute)
        if positions is None:
            return layout.unpack(self.blocks[-1](x, x, layout, sequence_numbers, bias))[:, :length]
        queries = layout.take(x, positions)  # [batch, m, width]
        return self.blocks[-1](queries, x, layout, sequence_numbers, self.attention_bias(mask.shape[1], positions))

    def attention_bias(self, length: int, positions: Array | None = None) -> Array | None:
        """Return the bias that is added to attention scores; zero for a BERT.

        Args:
            length: length of the sequences, in tokens.
            positions: positions of the queries, [batch, m] int; None for all.

        Returns:
            An array that broadcasts to [batch, heads, length or m, length]; None for nothing.
        """
        return None

    def _scan(self, x: Array, layout: Padded | Packing, sequence_numbers: Array | None, bias: Array | None) -> Array:
        """Run all layers but the last in a loop: compiled once, whatever their number, unless it is unrolled.

        Matrices are stacked in the dtype of products, to which a layer would round them anyway.
        """
        c, compute = self.config, self.config.compute

        def stack(*arrays: Array) -> Array:
            return jnp.stack([array.astype(compute.dtype) if array.ndim > 1 else array for array in arrays])

        def layer(x: Array, params_and_key: tuple[Any, Array | None]) -> tuple[Array, None]:
            params, key = params_and_key
            rngs = {} if key is None else {"dropout": key}
            x = Layer(c, parent=None).apply({"params": params}, x, x, layout, sequence_numbers, bias, rngs=rngs)  # type: ignore[assignment]
            return constrained(x, compute), None

        if compute.remat != "none":
            layer = jax.checkpoint(layer, policy=REMAT[compute.remat], prevent_cse=False)
        stacked = jax.tree.map(stack, *(nn.unbox(block.variables["params"]) for block in self.blocks[:-1]))
        keys = None if sequence_numbers is None else jax.random.split(self.make_rng("dropout"), len(self.blocks) - 1)
        # Unrolled, stored products need not be copied into the loop's stacks (`benchmarks/README.md`). The compiler may
        # then store more than that. With "layer" it would store everything, so "layer" is always a loop.
        unroll = compute.attention == "tpu" and compute.remat == "dots"
        return jax.lax.scan(layer, x, (stacked, keys), unroll=unroll)[0]

    def tied_logits(self, hidden: Array) -> Array:
        """Return float32 logits [..., vocabulary] of hidden states against the word embeddings."""
        return jnp.einsum("...d,vd->...v", hidden.astype(jnp.float32), self.words.embedding.astype(jnp.float32))


def apply(
    network: nn.Module, params: Params, inputs: tuple[Any, ...], method: str, key: Array | None, packed_length: int = 0
) -> Any:
    """Call a method of a network of one BERT.

    Args:
        network: a module with a field `config` and methods that take `sequence_numbers`.
        params: its parameters.
        inputs: ids, segments, mask [batch, length], and the method's other arrays [batch, …].
        method: its name.
        key: random key for dropout; None for none.
        packed_length: see `Compute`. Packed sequences are read in balanced order, and results returned in theirs.
    """
    config: BertConfig = network.config.with_compute(packed_length=packed_length)
    lengths = inputs[2].sum(axis=1, dtype=jnp.int32)  # [batch]
    permutation = BalancedPermutation.by_length(lengths, config.compute.mesh if packed_length else None)
    sequence_numbers = None if key is None else permutation.apply(jnp.arange(len(lengths), dtype=jnp.int32))  # [batch]
    results = network.clone(config=config).apply(
        {"params": params},
        *permutation.apply(inputs),
        method=method,
        sequence_numbers=sequence_numbers,
        rngs={} if key is None else {"dropout": key},
    )
    return permutation.inverse(results)
