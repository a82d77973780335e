"""Sizes, precision and speed of networks, and their layers: linear, LayerNorm, embeddings and dropout.

The transformer is in `bert.py`, attention in `attention.py`.
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
from realm_jax.models.packing import TILE, Packing

Array = jax.Array
Params = dict[str, Any]
LAYER_NORM_EPSILON = 1e-12  # as in google-research/bert and every checkpoint descended from it
BASE_WIDTH, BASE_STDDEV = 768, 0.02  # BERT-base and its initializer
PRODUCT = "product"  # name of the result of a product with parameters, for `bert.REMAT`

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {  # names as in Hugging Face's config.json
    "gelu_new": partial(jax.nn.gelu, approximate=True),  # with tanh, as google-research/bert has it
    "gelu": partial(jax.nn.gelu, approximate=False),  # with erf, as Hugging Face's BERT; at most 0.0005 apart
}


# --- Sizes, and how a network is computed -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Compute:
    """Settings of an encoder's computation: speed, memory and rounding.

    Attributes:
        dtype: dtype of the matrix products, float32 or bfloat16; parameters, LayerNorm and softmax are always float32.
        state_dtype: dtype of hidden states and attention weights; None: like `dtype`.
        attention: a key of `attention.ATTENTION`.
        remat: a key of `bert.REMAT`: the values that are stored for the backward pass.
        scan: all layers but the last are one compiled loop over their stacked parameters; the parameter tree is the
            same.
        hidden_sharding: sharding of hidden states [batch, length, width]. Without it the compiler may shard them
            like parameters and keep all batches on every device.
        packed_length: token slots into which a device's share of the batch is packed (`packing.py`); 0: sequences stay
            padded.
    """

    dtype: Any = jnp.float32
    state_dtype: Any = None
    attention: str = "xla"
    remat: str = "none"
    scan: bool = False
    hidden_sharding: NamedSharding | None = None
    packed_length: int = 0

    @property
    def mesh(self) -> Mesh | None:
        """Return the mesh over which hidden states are sharded; None for one device."""
        return self.hidden_sharding.mesh if self.hidden_sharding else None  # type: ignore[return-value]

    @property
    def parts(self) -> int:
        """Return the number of shares of a batch, one for each device."""
        return batch_parts(self.mesh) if self.mesh else 1

    @property
    def alignment(self) -> int:
        """Return the number of slots to which packed sequences are aligned."""
        return TILE if self.attention == "tpu" else 1


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embeddings and local attention of ModernBERT.

    Attributes:
        global_theta: base of the angles in layers that attend to all tokens.
        local_theta: base of the angles in the other layers.
        global_every: one layer of so many attends to all tokens, beginning with the first.
        window: tokens that the other layers attend to, half of them on each side.
    """

    global_theta: float = 160_000.0
    local_theta: float = 10_000.0
    global_every: int = 3
    window: int = 128


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes of an encoder of any architecture.

    Attributes:
        vocabulary_size: tokens.
        width: features of a hidden state.
        layers: transformer layers.
        heads: attention heads of a layer.
        feed_forward: features between the two products of a feed-forward layer.
        max_length: longest sequence with a position embedding.
        dropout: probability, on embeddings, attention weights and both residual branches.
        hidden_act: the activation of the feed-forward layers, a key of ACTIVATIONS.
        architecture: a key of `architectures.table.ARCHITECTURES`.
        norm_epsilon: epsilon of every LayerNorm.
        segment_types: rows of the table of segments; with one all tokens have the first, 0 for no table.
        rotary: rotary sizes of ModernBERT.
        compute: precision, speed and memory.
    """

    vocabulary_size: int
    width: int = 768
    layers: int = 12
    heads: int = 12
    feed_forward: int = 3072
    max_length: int = 512
    dropout: float = 0.1
    hidden_act: str = "gelu_new"
    architecture: str = "bert"
    norm_epsilon: float = LAYER_NORM_EPSILON
    segment_types: int = 2
    rotary: Rotary = Rotary()
    compute: Compute = Compute()

    def with_compute(self, **changes: Any) -> "BertConfig":
        """Return the same sizes, computed with other fields of `Compute`."""
        return dataclasses.replace(self, compute=dataclasses.replace(self.compute, **changes))

    @property
    def state_dtype(self) -> Any:
        """Return the dtype of hidden states."""
        return self.compute.dtype if self.compute.state_dtype is None else self.compute.state_dtype


# --- Linear layers ----------------------------------------------------------------------------------------------------


def initializer_stddev(width: int) -> float:
    """Return the standard deviation of initial parameters: BERT's 0.02 at 768 features, more for narrower models.

    Their activations then start as large as those of BERT-base.

    With 0.02 at 64 features attention starts almost uniform and the tied output almost flat; a tiny reader then takes
    several times longer to learn to copy from its passage.
    """
    return BASE_STDDEV * (BASE_WIDTH / width) ** 0.5


def initializer(width: int) -> nn.initializers.Initializer:
    """Return BERT's truncated normal initializer for a model of this width."""
    return nn.initializers.truncated_normal(initializer_stddev(width))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matrix_product(x: Array, kernel: Array, dtype: Any) -> Array:
    """Multiply operands rounded to `dtype`, and add up in float32.

    The two products of the backward pass round their operands too. Derived from a float32 sum they would multiply
    float32 by bfloat16, which a device does as slowly as float32 (measured: `benchmarks/README.md`).

    Args:
        x: [..., inputs].
        kernel: [inputs, outputs].
        dtype: dtype that operands are rounded to.

    Returns:
        [..., outputs] in the dtype of `x`.
    """
    return _product_forward(x, kernel, dtype)[0]


def _product_forward(x: Array, kernel: Array, dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    rounded = x.astype(dtype), kernel.astype(dtype)
    return _sum_in_float32(*rounded, ((x.ndim - 1,), (0,))).astype(x.dtype), rounded


def _product_backward(dtype: Any, residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    (x, kernel), rounded = residuals, cotangent.astype(dtype)
    leading = tuple(range(x.ndim - 1))
    # XLA on a CPU transposes the left operand in a copy and computes what is fused into it again, element by element.
    # So the narrower operand goes left, not the activations (measured: `benchmarks/README.md`). If only operands are
    # bfloat16, it would make the transposition a part of the product, for which it then has no kernel.
    if x.shape[-1] > cotangent.shape[-1] and cotangent.dtype == dtype:
        kernel_gradient = _sum_in_float32(rounded, x, (leading, leading)).astype(dtype).T  # [inputs, outputs]
    else:
        kernel_gradient = _sum_in_float32(x, rounded, (leading, leading)).astype(cotangent.dtype)  # [inputs, outputs]
    x_gradient = _sum_in_float32(rounded, kernel, ((x.ndim - 1,), (1,)))  # [..., inputs]
    return x_gradient.astype(cotangent.dtype), kernel_gradient


matrix_product.defvjp(_product_forward, _product_backward)


def _sum_in_float32(a: Array, b: Array, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    return jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.float32)


@jax.custom_vjp
def add_bias(states: Array, bias: Array) -> Array:
    """Add a bias [outputs], rounded to the dtype of states [..., outputs].

    The bias's gradient adds up in float32, like the products. Derived, it would add up thousands of tokens in bfloat16.
    """
    return states + bias.astype(states.dtype)


def _bias_backward(_: None, cotangent: Array) -> tuple[Array, Array]:
    return cotangent, cotangent.sum(axis=tuple(range(cotangent.ndim - 1)), dtype=jnp.float32)


add_bias.defvjp(lambda states, bias: (add_bias(states, bias), None), _bias_backward)


@jax.custom_vjp
def unfused_gradient(x: Array) -> Array:
    """Return x; in the backward pass, its gradient is complete before another operation reads it.

    If the TPU compiler moves the sums of LayerNorm's gradient into the product that computes this gradient, the product
    takes 2.2 times as long (estimated: `benchmarks/tpu_layer.py`).
    """
    return x


unfused_gradient.defvjp(lambda x: (x, None), lambda _, gradient: (jax.lax.optimization_barrier(gradient),))


class Dense(nn.Module):
    """A linear layer with the parameters of `nn.Dense`, kernel [inputs, outputs] and bias [outputs], both float32.

    Attributes:
        features: outputs.
        dtype: dtype that operands of the product are rounded to.
        state_dtype: dtype of the result.
        kernel_init: initializer of the kernel.
        bias_init: initializer of the bias; None for no bias.
        is_bias_trained: False to give the bias no gradient.
    """

    features: int
    dtype: Any
    state_dtype: Any
    kernel_init: nn.initializers.Initializer
    bias_init: nn.initializers.Initializer | None
    is_bias_trained: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Compute x · kernel + bias: [..., inputs] → [..., outputs]."""
        kernel: Array = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), jnp.float32)
        x, kernel = x.astype(self.state_dtype), kernel.astype(self.state_dtype)
        product = checkpoint_name(matrix_product(x, kernel, self.dtype), PRODUCT)  # [..., outputs]
        if self.bias_init is None:
            return product
        bias: Array = self.param("bias", self.bias_init, (self.features,), jnp.float32)
        if not self.is_bias_trained:
            return product + jax.lax.stop_gradient(bias).astype(product.dtype)
        return add_bias(product, bias)


def dense(
    features: int,
    axes: tuple[str | None, str | None],
    config: BertConfig,
    name: str,
    kernel_init: nn.initializers.Initializer | None = None,
    dtype: Any = None,
    has_bias: bool = True,
    is_bias_trained: bool = True,
) -> Dense:
    """Make a linear layer.

    Args:
        features: outputs.
        axes: logical axis names of (inputs, outputs), see `mesh.RULES`.
        config: config of the encoder that it belongs to.
        name: name of its parameters.
        kernel_init: None for BERT's initializer.
        dtype: dtype of the product and its result; None for those of the config.
        has_bias: add a bias.
        is_bias_trained: False to give the bias no gradient.
    """
    zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), (axes[1],))
    return Dense(
        features,
        dtype=dtype or config.compute.dtype,
        state_dtype=dtype or config.state_dtype,
        kernel_init=nn.with_logical_partitioning(kernel_init or initializer(config.width), axes),
        bias_init=zeros if has_bias else None,
        is_bias_trained=is_bias_trained,
        name=name,
    )


# --- LayerNorm and embeddings -----------------------------------------------------------------------------------------


class LayerNorm(nn.LayerNorm):
    """Flax's. Backward, XLA takes three times as long on a CPU for states [1, tokens, width] as for [tokens, width]."""

    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        is_single_row = len(x) == 1 and mask is None
        return super().__call__(x[0])[None] if is_single_row else super().__call__(x, mask=mask)


def layer_norm(
    name: str, epsilon: float = LAYER_NORM_EPSILON, scale: float = 1.0, has_bias: bool = True
) -> nn.LayerNorm:
    """Make a LayerNorm in float32, for states of any dtype.

    Args:
        name: name of its parameters.
        epsilon: added to the variance.
        scale: initial value of its scale.
        has_bias: add a bias.
    """
    return LayerNorm(
        epsilon=epsilon,
        use_bias=has_bias,
        dtype=jnp.float32,
        scale_init=nn.with_logical_partitioning(nn.initializers.constant(scale), ("norm",)),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros_init(), ("norm",)),
        name=name,
    )


def embedding(rows: int, width: int, axis: str | None, name: str) -> nn.Embed:
    """Make a lookup table [rows, width] with BERT's initializer.

    Args:
        rows: rows of the table.
        width: features.
        axis: logical axis name of the rows, see `mesh.RULES`.
        name: name of its parameters.
    """
    init = nn.with_logical_partitioning(initializer(width), (axis, "embed"))
    return nn.Embed(rows, width, embedding_init=init, name=name)


# --- Dropout, of hidden states and of attention weights ---------------------------------------------------------------
#
# A draw is a hash of the seed of its sequence (and head) and of the number's row and column, and of nothing else. So
# padding, the mesh, and a kernel that never holds all weights do not change it, and the backward pass can repeat it. It
# costs a TPU less than the counter-based bits of `jax.random`, which only give one seed for each layer (and head). The
# seed of a sequence is a hash of it and of the sequence's number in the batch, which packing takes along. Drawn for the
# order of packed sequences, it would depend on the number of devices.


class Dropout(nn.Module):
    """Dropout of hidden states [batch, length, width], packed ones [parts, slots, width] or vectors [batch, width].

    Values that are not dropped are divided by 1 − rate. Packed states have the draws of their sequences.
    """

    rate: float

    @nn.compact
    def __call__(self, states: Array, sequence_numbers: Array | None, packing: Packing | None = None) -> Array:
        """Drop values.

        Args:
            states: [batch, length, width], [parts, slots, width] or [batch, width].
            sequence_numbers: number of each sequence in the batch, [batch] int, for dropout; None for no dropout.
            packing: layout of packed states; None for others.

        Returns:
            An array like `states`.
        """
        if sequence_numbers is None or not self.rate:
            return states
        seeds = dropout_seeds(self.make_rng("dropout"), sequence_numbers, 1)  # [batch, 1]
        seeds = seeds.reshape(-1, *[1] * (states.ndim - 1))
        # A vector is one row of its sequence; its row in the array would be its place in the order of packing.
        rows = None if states.ndim > 2 else jnp.zeros((1, 1), jnp.uint32)
        if packing is not None:
            seeds = packing.per_token(seeds)[..., None]  # [parts, slots, 1]
            rows = packing.positions[..., None]  # [parts, slots, 1]
        scaled = states * jnp.asarray(1 / (1 - self.rate), states.dtype)
        return jnp.where(keep_mask(seeds, states.shape, self.rate, rows=rows), scaled, jnp.zeros_like(states))


def dropout_seeds(key: Array, sequence_numbers: Array, heads: int) -> Array:
    """Return seeds for `keep_mask`.

    Args:
        key: random key of a layer.
        sequence_numbers: number of each sequence in the batch, [batch] int.
        heads: seeds of a sequence.

    Returns:
        [batch, heads] uint32.
    """
    return _mixed(_scrambled(sequence_numbers[:, None]), jax.random.bits(key, (heads,), jnp.uint32))


def keep_mask(
    seed: Array, shape: tuple[int, ...], rate: float, first: Array | int = 0, rows: Array | None = None
) -> Array:
    """Draw the numbers that dropout keeps.

    The hash is of 65,536 · row + column, whatever the shape, so padding changes no draw.

    Args:
        seed: uint32, a scalar or one that broadcasts to the shape.
        shape: [..., rows, columns].
        rate: rate of dropout.
        first: row and column that count as 0; those before it are not used.
        rows: numbers of the rows, if they belong to several sequences; columns then are features.

    Returns:
        bool, of the shape.
    """
    first = jnp.asarray(first).astype(jnp.uint32)
    if rows is None:
        rows = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 2) - first
    columns = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1) - first
    bits = _mixed(_scrambled((rows.astype(jnp.uint32) << 16) | columns), seed)
    return bits >= jnp.uint32(round(rate * 2**32))


def _scrambled(numbers: Array) -> Array:
    """Spread small numbers over 32 bits."""
    return numbers.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)


def _mixed(bits: Array, seed: Array) -> Array:
    """Hash bits with a seed, both uint32.

    It is MurmurHash3's finalizer, into which the seed is mixed: products and shifts, which a TPU's vector unit has.
    """
    bits = (bits ^ (bits >> 16) ^ seed) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
