"""BERT (Devlin et al. 2019) as a Flax Linen module: embeddings and post-norm transformer layers, nothing above them.

Not here: attention (`attention.py`), pooling and projection (`encoder.py`), word prediction and span scores
(`realm.py`).

The last layer can be asked for a few positions only (`positions`). A retriever needs `[CLS]` alone and a masked
language model only the masked places, so the rest of that layer need not be computed: the same numbers for
about 40 % less work in a two-layer model, and 7 % in a twelve-layer one.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding

from realm_jax.mesh import batch_parts
from realm_jax.models.attention import TILE, AttentionDropout, Dropout, attend, dropout_seeds
from realm_jax.models.packing import BalancedOrder, Packing, fitting_lengths, pack, packing, take_positions, unpack

Array = jax.Array
Params = dict[str, Any]
LAYER_NORM_EPSILON = 1e-12  # as in google-research/bert and every checkpoint descended from it
BASE_WIDTH, BASE_STDDEV = 768, 0.02  # BERT-base and its initialiser


def initializer_stddev(width: int) -> float:
    """BERT's 0.02 at 768 features, and more for narrower models, whose activations then start as large as BERT-base's.

    With 0.02 at 64 features attention starts almost uniform and the tied output almost flat; a tiny reader then takes
    several times longer to learn to copy from its passage.
    """
    return BASE_STDDEV * (BASE_WIDTH / width) ** 0.5


def initializer(width: int) -> nn.initializers.Initializer:
    """BERT's truncated normal for a model of this width."""
    return nn.initializers.truncated_normal(initializer_stddev(width))


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes of one tower.

    vocabulary_size: tokens. max_length: longest sequence with a position embedding. dropout: probability, on
    embeddings, on the weights of attention and on both residual branches, as BERT has it. dtype: of the matrix products
    ('float32' or 'bfloat16'); parameters, LayerNorm and softmax are float32 always. states: the dtype of what lies
    between products with parameters, attention among it; None for that of the products. attention: a key of
    `attention.ATTENTION`. remat: 'none' keeps all that the backward pass needs, 'dots' of a layer the results of
    products with parameters and of attention, 'layer' nothing of it. scan: layers but for the last are one compiled
    loop over their stacked parameters; the tree of parameters stays as it is. hidden_act: the activation function of
    the feed-forward layers (a key of ACTIVATIONS). hidden: the sharding of hidden states [batch, length, width];
    without it the compiler may shard them like parameters, and keep whole batches on every device.
    """

    vocabulary_size: int
    width: int = 768
    layers: int = 12
    heads: int = 12
    feed_forward: int = 3072
    max_length: int = 512
    dropout: float = 0.1
    dtype: Any = jnp.float32
    states: Any = None
    attention: str = "xla"
    remat: str = "none"
    scan: bool = False
    hidden_act: str = "gelu_new"
    hidden: NamedSharding | None = None

    @property
    def state_dtype(self) -> Any:
        """The dtype of hidden states and of what else lies between products with parameters."""
        return self.dtype if self.states is None else self.states

    @property
    def mesh(self) -> Mesh | None:
        """The mesh, which packing and a kernel need to work on the part that each device has."""
        return self.hidden.mesh if self.hidden else None  # type: ignore[return-value]

    @property
    def parts(self) -> int:
        """Into how many parts a batch is packed: one a device."""
        return batch_parts(self.mesh) if self.mesh else 1

    @property
    def alignment(self) -> int:
        """Packed sequences begin at multiples of this."""
        return TILE if self.attention == "tpu" else 1

    def placed_lengths(self, lengths: Array, places: int, longest: int) -> Array:
        """How many tokens of sequences of these lengths [batch, …] have a place. places: as of `Bert`; longest: no
        sequence is longer."""
        if not places:
            return lengths
        flat = lengths.reshape(-1)
        order = BalancedOrder.of(flat, self.mesh)
        of_parts = order.apply(flat).reshape(self.parts, -1)
        fitting = fitting_lengths(of_parts, longest, places, self.alignment)
        return order.undo(fitting.reshape(-1)).reshape(lengths.shape)


PRODUCT, ATTENDED = "product", "attended"  # names of what a policy may keep: it does not see inside of custom gradients
REMAT = {  # what is kept of a layer for the backward pass, beside what it was given; the rest is computed again
    "none": None,
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT, ATTENDED),
    "layer": jax.checkpoint_policies.nothing_saveable,
}


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {  # names as in Hugging Face's config.json
    "gelu_new": partial(jax.nn.gelu, approximate=True),  # with tanh, as google-research/bert has it
    "gelu": partial(jax.nn.gelu, approximate=False),  # with erf, as Hugging Face's BERT; at most 0.0005 apart
}


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matrix_product(x: Array, kernel: Array, dtype: Any) -> Array:
    """x [..., inputs] times kernel [inputs, outputs], rounded to `dtype` and added up in float32, in the dtype of both.

    So are the two products of the backward pass: derived from a float32 sum they would be of float32 and bfloat16,
    which a device does as slowly as float32 (measured: `benchmarks/README.md`).
    """
    return _product_forward(x, kernel, dtype)[0]


def _product_forward(x: Array, kernel: Array, dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    rounded = x.astype(dtype), kernel.astype(dtype)
    return _sum_in_float32(*rounded, ((x.ndim - 1,), (0,))).astype(x.dtype), rounded


def _product_backward(dtype: Any, kept: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    (x, kernel), rounded = kept, cotangent.astype(dtype)
    leading = tuple(range(x.ndim - 1))
    # XLA on a CPU transposes the left operand in a copy and computes what is fused into it again, element by element:
    # so the narrower one goes left, and not the activations (measured: `benchmarks/README.md`). Where only operands are
    # bfloat16 it would make the transposition a part of the product, for which it then has no kernel.
    if x.shape[-1] > cotangent.shape[-1] and cotangent.dtype == dtype:
        of_kernel = _sum_in_float32(rounded, x, (leading, leading)).astype(dtype).T
    else:
        of_kernel = _sum_in_float32(x, rounded, (leading, leading)).astype(cotangent.dtype)
    of_x = _sum_in_float32(rounded, kernel, ((x.ndim - 1,), (1,)))
    return of_x.astype(cotangent.dtype), of_kernel


matrix_product.defvjp(_product_forward, _product_backward)


def _sum_in_float32(left: Array, right: Array, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    return jax.lax.dot_general(left, right, (contracted, ((), ())), preferred_element_type=jnp.float32)


def dense(
    features: int,
    axes: tuple[str | None, str | None],
    config: BertConfig,
    name: str,
    kernel_init: nn.initializers.Initializer | None = None,
    dtype: Any = None,
) -> nn.Dense:
    """A linear layer with logical axis names for (input, output), BERT's initialiser and the config's dtypes, unless
    others are given."""

    def product(x: Array, kernel: Array, *_: Any, **__: Any) -> Array:
        """The last axis with the first, which is all that `nn.Dense` asks for."""
        return checkpoint_name(matrix_product(x, kernel, dtype or config.dtype), PRODUCT)

    return nn.Dense(
        features,
        dtype=dtype or config.state_dtype,
        dot_general=product,
        kernel_init=nn.with_logical_partitioning(kernel_init or initializer(config.width), axes),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros_init(), (axes[1],)),
        name=name,
    )


class LayerNorm(nn.LayerNorm):
    """Flax's. Of states [1, places, width] XLA takes three times as long on a CPU, backward, as of [places, width]."""

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        one_row = len(x) == 1 and mask is None
        return super().__call__(x[0])[None] if one_row else super().__call__(x, mask=mask)


def layer_norm(name: str, epsilon: float = LAYER_NORM_EPSILON, scale: float = 1.0) -> nn.LayerNorm:
    """LayerNorm in float32, whatever the dtype of states, that starts with the given scale."""
    return LayerNorm(
        epsilon=epsilon,
        dtype=jnp.float32,
        scale_init=nn.with_logical_partitioning(nn.initializers.constant(scale), ("norm",)),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros_init(), ("norm",)),
        name=name,
    )


def embedding(rows: int, width: int, axis: str | None, name: str) -> nn.Embed:
    """A lookup table [rows, width] with BERT's initialiser."""
    init = nn.with_logical_partitioning(initializer(width), (axis, "embed"))
    return nn.Embed(rows, width, embedding_init=init, name=name)


class Layer(nn.Module):
    """One post-norm transformer layer; queries may be fewer than keys.

    A fresh layer hands on what it attends to unchanged: its value matrix is orthogonal and its output matrix the
    inverse. So a model without BERT's weights copies and compares words from its first steps, instead of after the
    hundreds that two random matrices need to find each other (measured: `benchmarks/README.md`).
    """

    config: BertConfig

    @nn.compact
    def __call__(self, queries: Array, keys: Array, mask: Array | Packing, deterministic: bool) -> Array:
        """queries [batch, positions, width], keys [batch, length, width], mask [batch, length] → like queries.

        With a packing in place of the mask, keys are packed, and so are queries unless they are of few positions.
        """
        c = self.config

        def undo_value(*_: Any) -> Array:
            return nn.unbox(self.get_variable("params", "value"))["kernel"].T

        query = dense(c.width, ("embed", "heads"), c, "query")(queries)
        key = dense(c.width, ("embed", "heads"), c, "key")(keys)
        value = dense(c.width, ("embed", "heads"), c, "value", nn.initializers.orthogonal())(keys)
        layout = mask if isinstance(mask, Packing) else None
        dropout = None
        if c.dropout and not deterministic:
            batch = len(keys) if layout is None else len(layout.mask)
            dropout = AttentionDropout(c.dropout, dropout_seeds(self.make_rng("dropout"), batch, c.heads))
        attended = attend(c.attention, c.mesh, query, key, value, mask, c.heads, dropout)
        attended = checkpoint_name(attended, ATTENDED)
        attended = dense(c.width, ("heads", "embed"), c, "attention_output", undo_value)(attended)
        whole = layout if queries.shape == keys.shape else None
        attended = Dropout(c.dropout)(attended, deterministic, whole)
        x = layer_norm("attention_norm")(queries + attended).astype(c.state_dtype)
        hidden = dense(c.feed_forward, ("embed", "mlp"), c, "intermediate")(x)
        hidden = dense(c.width, ("mlp", "embed"), c, "output")(ACTIVATIONS[c.hidden_act](hidden))
        hidden = Dropout(c.dropout)(hidden, deterministic, whole)
        return layer_norm("output_norm")(x + hidden).astype(c.state_dtype)


class Bert(nn.Module):
    """Embeddings and `config.layers` layers. Call it for hidden states; `tied_logits` ties an output layer to it."""

    config: BertConfig

    def setup(self) -> None:
        c = self.config
        self.words = embedding(c.vocabulary_size, c.width, "vocab", "words")
        self.positions = embedding(c.max_length, c.width, None, "positions")
        self.segments = embedding(2, c.width, None, "segments")
        self.norm = layer_norm("embedding_norm")
        self.dropout = Dropout(c.dropout)
        layer = Layer if c.remat == "none" else nn.remat(Layer, static_argnums=(4,), policy=REMAT[c.remat])
        self.blocks = [layer(c, name=f"layer_{i}") for i in range(c.layers)]

    def __call__(
        self, ids: Array, segments: Array, mask: Array, positions: Array | None = None, deterministic: bool = True,
        places: int = 0,
    ) -> Array:  # fmt: skip
        """Hidden states of the last layer.

        ids, segments [batch, length] int; mask [batch, length] bool, true on real tokens;
        positions [batch, m] int: compute the last layer for these alone (None: for all). Returns [batch, length or m,
        width] in the dtype of states.

        places: of each part of the batch, into which its tokens are packed for the layers (0: they stay padded); the
        mask is then true on the first tokens of a sequence, and what is returned beyond them 0.
        """
        c, length = self.config, ids.shape[1]
        x = self.words(ids) + self.segments(segments) + self.positions(jnp.arange(length))[None]
        x = self.dropout(self.norm(x), deterministic=deterministic).astype(c.state_dtype)  # [batch, length, width]
        if c.attention == "tpu" and length % TILE:
            # Whole tiles, which the kernel takes: the compiler would arrange other lengths otherwise, and copy them at
            # every layer.
            x, mask = (jnp.pad(part, [(0, 0), (0, -length % TILE), (0, 0)][: part.ndim]) for part in (x, mask))
        layout = packing(mask, c.parts, places, c.alignment) if places else None
        where: Array | Packing = mask if layout is None else layout
        x = x if layout is None else pack(x, layout)  # [parts, places, width]
        x = self._constrain(x)
        if c.scan and len(self.blocks) > 2 and not self.is_initializing():
            x = self._scan(x, where, deterministic)
        else:
            for block in self.blocks[:-1]:
                x = self._constrain(block(x, x, where, deterministic))
        if positions is None:
            states = self.blocks[-1](x, x, where, deterministic)
            return (states if layout is None else unpack(states, layout))[:, :length]
        if layout is not None:
            queries = take_positions(x, layout, positions)  # [batch, m, width]
        else:
            queries = jnp.take_along_axis(x, positions[:, :, None], axis=1)
        return self.blocks[-1](queries, x, where, deterministic)

    def _constrain(self, x: Array) -> Array:
        """Constrain the sharding of hidden states, if there are several devices and they divide the batch."""
        c = self.config
        spread = c.mesh is not None and c.mesh.size > 1 and x.shape[0] % c.parts == 0
        return jax.lax.with_sharding_constraint(x, c.hidden) if spread else x

    def _scan(self, x: Array, mask: Array | Packing, deterministic: bool) -> Array:
        """All layers but the last, as a loop: compiled once, whatever their number, where it is not unrolled.

        Matrices are stacked in the dtype of products, which is what a layer would make of them anyway.
        """
        c = self.config

        def stack(*arrays: Array) -> Array:
            return jnp.stack([array.astype(c.dtype) if array.ndim > 1 else array for array in arrays])

        def layer(x: Array, own: tuple[Any, Array | None]) -> tuple[Array, None]:
            params, key = own
            rngs = {} if key is None else {"dropout": key}
            x = Layer(c, parent=None).apply({"params": params}, x, x, mask, deterministic, rngs=rngs)  # type: ignore[assignment]
            return self._constrain(x), None

        if c.remat != "none":
            layer = jax.checkpoint(layer, policy=REMAT[c.remat], prevent_cse=False)
        stacked = jax.tree.map(stack, *(nn.unbox(block.variables["params"]) for block in self.blocks[:-1]))
        keys = None if deterministic else jax.random.split(self.make_rng("dropout"), len(self.blocks) - 1)
        # Unrolled, what is kept of products need not be copied into the loop's stacks (benchmarks/README.md). The
        # compiler may then keep more than that; with nothing kept it would keep all, so that stays a loop.
        unroll = c.attention == "tpu" and c.remat == "dots"
        return jax.lax.scan(layer, x, (stacked, keys), unroll=unroll)[0]

    def tied_logits(self, hidden: Array) -> Array:
        """Float32 logits [..., vocabulary] of hidden states against the word embeddings (tied output layer)."""
        return jnp.einsum("...d,vd->...v", hidden.astype(jnp.float32), self.words.embedding.astype(jnp.float32))


def apply(
    network: nn.Module, params: Params, inputs: tuple[Any, ...], method: str, key: Array | None, places: int = 0
) -> Any:
    """A method of a network of one BERT with parameters of its own.

    inputs: ids, segments, mask [batch, length], and what else the method takes for each sequence. key: turns dropout
    on. places: as of `Bert`; sequences that are packed are read in their balanced order.
    """
    bert: BertConfig = network.config
    order = BalancedOrder.of(inputs[2].sum(axis=1, dtype=jnp.int32), bert.mesh) if places else None
    options: dict[str, Any] = {"deterministic": key is None} | ({"rngs": {"dropout": key}} if key is not None else {})
    options |= {"places": places} if places else {}
    arrays = inputs if order is None else order.apply(inputs)
    results = network.apply({"params": params}, *arrays, method=method, **options)
    return results if order is None else order.undo(results)
