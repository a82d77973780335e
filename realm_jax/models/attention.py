"""Softmax attention in five implementations that give the same numbers, and which of them suits the devices.

query [batch, positions, width], key and value [batch, length, width], where width = heads · head size, mask [batch,
length] bool, dropout of the weights or None → [batch, positions, width] in the dtype of `value`; the softmax is
float32.
Read next: `bert.py`, whose layers call them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from realm_jax.models.dropout import AttentionDropout, kept
from realm_jax.models.packing import Packing, pack, unpack
from realm_jax.models.tpu_attention import MASKED_BIAS, fits, fits_packed, fused_attention, fused_packed_attention

Array = jax.Array
Dropout = AttentionDropout | None
LONG = 2**18  # scores of a sequence from which on it is worth attending in it alone
HEAD_SIZE, CAPABILITY = 128, 8.0  # largest head, and least compute capability, that cuDNN's kernel takes everywhere
SHORT = 16  # tokens of a sequence below which no kernel is called; not measured


def dot_product_attention(
    query: Array, key: Array, value: Array, mask: Array, heads: int, dropout: Dropout = None
) -> Array:
    """Softmax attention over key positions where `mask` is true."""
    q, k, v = (_split(x, heads) for x in (query, key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    bias = jnp.where(mask[:, None, None, :], 0.0, MASKED_BIAS).astype(jnp.float32)
    weights = jax.nn.softmax(scores * q.shape[-1] ** -0.5 + bias, axis=-1)
    if dropout:
        keep = kept(dropout.seeds[:, :, None, None], weights.shape, dropout.rate)
        weights = jnp.where(keep, weights / (1 - dropout.rate), 0.0)
    # Asked for as "bqhd", XLA on a CPU multiplies transposed weights: three times the time of the product.
    return jnp.einsum("bhqk,bkhd->bhqd", weights.astype(value.dtype), v).swapaxes(1, 2).reshape(query.shape)


def _split(states: Array, heads: int) -> Array:
    """[batch, length, width] → [batch, length, heads, size]."""
    return states.reshape(*states.shape[:2], heads, states.shape[2] // heads)


def cudnn_attention(query: Array, key: Array, value: Array, mask: Array, heads: int, dropout: Dropout = None) -> Array:
    """`dot_product_attention` as one kernel of cuDNN that keeps no scores: for NVIDIA GPUs, in bfloat16.

    A mask has to be a length. Short sequences, and the few queries of a last layer, have few scores; they are attended
    to as a whole, and so is where weights drop out, as the kernel would draw others. Lengths are made even: JAX 0.11
    refuses odd ones as soon as there is a backward pass ("Unsupported sequence length Q 3, KV 3").
    """
    length, size = query.shape[1], query.shape[-1] // heads
    if dropout or length != key.shape[1] or length < SHORT or size > HEAD_SIZE or size % 8:
        return dot_product_attention(query, key, value, mask, heads, dropout)
    lengths = jnp.maximum(mask.sum(axis=-1), 1)
    even = (jnp.pad(x, ((0, 0), (0, length % 2), (0, 0))) for x in (query, key, value))
    parts = (_split(x, heads) for x in even)
    attended = jax.nn.dot_product_attention(*parts, key_value_seq_lengths=lengths, implementation="cudnn")
    return attended[:, :length].reshape(query.shape)


def tpu_attention(
    query: Array, key: Array, value: Array, mask: Array, heads: int, dropout: Dropout = None, mesh: Mesh | None = None
) -> Array:
    """`dot_product_attention` as one kernel that keeps scores in vector memory, where its shapes allow. mesh: the
    devices that the arrays are spread over; None: they are on one."""
    if not fits(query, key, heads, mesh):
        return dot_product_attention(query, key, value, mask, heads, dropout)
    bias = jnp.where(mask, 0.0, MASKED_BIAS).astype(jnp.float32)[:, None, :]
    seeds = dropout.seeds if dropout else jnp.zeros((len(query), heads), jnp.uint32)
    return fused_attention(query, key, value, bias, seeds, heads, dropout.rate if dropout else 0.0, mesh)


def packed_attention(
    attend: Callable[..., Array], query: Array, key: Array, value: Array, layout: Packing, heads: int,
    dropout: Dropout = None,
) -> Array:  # fmt: skip
    """Attention of packed sequences [parts, places, width] within each, by a function of ATTENTION that takes them
    padded. Places without a token get zeros."""
    padded = (unpack(states, layout) for states in (query, key, value))
    return pack(attend(*padded, layout.mask, heads, dropout), layout)


def tpu_packed_attention(
    query: Array, key: Array, value: Array, layout: Packing, heads: int, dropout: Dropout = None,
    mesh: Mesh | None = None,
) -> Array:  # fmt: skip
    """`packed_attention` as one kernel that takes sequences from where they lie, where its shapes allow."""
    if not fits_packed(query, layout.mask.shape, heads, mesh):
        return packed_attention(dot_product_attention, query, key, value, layout, heads, dropout)
    seeds = dropout.seeds if dropout else jnp.zeros((len(layout.mask), heads), jnp.uint32)
    return fused_packed_attention(query, key, value, layout, seeds, heads, dropout.rate if dropout else 0.0, mesh)


def cpu_attention(query: Array, key: Array, value: Array, mask: Array, heads: int, dropout: Dropout = None) -> Array:
    """`per_sequence_attention` where a sequence has many scores, else `dot_product_attention`: for one CPU device."""
    long = query.shape[1] * heads * key.shape[1] >= LONG
    if dropout or not long:
        return dot_product_attention(query, key, value, mask, heads, dropout)
    return per_sequence_attention(query, key, value, mask, heads)


def per_sequence_attention(query: Array, key: Array, value: Array, mask: Array, heads: int) -> Array:
    """`dot_product_attention`, sequence after sequence, so that scores stay in the cache."""
    parts = (_split(x, heads) for x in (query, key, value))
    return _attend_in_turn(*parts, mask).reshape(query.shape)


@jax.custom_vjp
def _attend_in_turn(query: Array, key: Array, value: Array, mask: Array) -> Array:
    """query, key, value [batch, positions or length, heads, size], mask [batch, length].

    The backward pass computes them again. What a loop collects is float32: to add a bfloat16 row to the others, XLA
    converts them all to float32 and back on a CPU, which took as long as the rest (measured: `benchmarks/README.md`).
    """
    return _attend_forward(query, key, value, mask)[0]


def _scores(query: Array, key: Array, mask: Array) -> Array:
    """Of one sequence, [heads, positions, length] float32."""
    scores = jnp.einsum("qhd,khd->hqk", query, key, preferred_element_type=jnp.float32)
    return scores * query.shape[-1] ** -0.5 + jnp.where(mask, 0.0, MASKED_BIAS)


def _attend_forward(query: Array, key: Array, value: Array, mask: Array) -> tuple[Array, tuple[Array, ...]]:
    """What is attended to, and the residuals of the backward pass; of the scores the log-sum-exp."""

    def one(entry: tuple[Array, ...]) -> tuple[Array, Array]:
        query, key, value, mask = entry
        scores = _scores(query, key, mask)
        top = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        attended = jnp.einsum("hqk,khd->qhd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
        return attended / total[..., 0].T[..., None], top + jnp.log(total)  # after the product, which is smaller

    attended, log_total = jax.lax.map(one, (query, key, value, mask))
    attended = attended.astype(value.dtype)
    return attended, (query, key, value, mask, attended, log_total)


def _attend_backward(kept: tuple[Array, ...], cotangent: Array) -> tuple[Array, Array, Array, None]:
    """The gradient of a softmax s of scores is s · (g − Σ s g); Σ s g is the output's product with its cotangent."""

    def one(entry: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        query, key, value, mask, attended, log_total, cotangent = entry
        weights = jnp.exp(_scores(query, key, mask) - log_total)
        of_weights = jnp.einsum("qhd,khd->hqk", cotangent, value, preferred_element_type=jnp.float32)
        mean = (cotangent.astype(jnp.float32) * attended).sum(axis=-1).T[..., None]
        of_scores = (weights * (of_weights - mean) * query.shape[-1] ** -0.5).astype(query.dtype)
        return (
            jnp.einsum("hqk,khd->qhd", of_scores, key, preferred_element_type=jnp.float32),
            jnp.einsum("hqk,qhd->khd", of_scores, query, preferred_element_type=jnp.float32),
            jnp.einsum("hqk,qhd->khd", weights.astype(value.dtype), cotangent, preferred_element_type=jnp.float32),
        )

    gradients = jax.lax.map(one, (*kept, cotangent))
    return *(gradient.astype(like.dtype) for gradient, like in zip(gradients, kept[:3], strict=True)), None


_attend_in_turn.defvjp(_attend_forward, _attend_backward)


ATTENTION: dict[str, Callable[..., Array]] = {
    "xla": dot_product_attention,
    "cpu": cpu_attention,
    "cudnn": cudnn_attention,
    "tpu": tpu_attention,
}


def select_attention(mesh: Mesh, dtype: Any) -> str:
    """The key of ATTENTION that suits the devices. Several CPU devices share a batch, which a loop over it would undo.
    dtype: of the matrix products."""
    platform = mesh.devices.flat[0].platform
    if platform == "tpu":
        return "tpu"
    if platform == "cpu" and mesh.size == 1:
        return "cpu"
    fused = platform == "gpu" and dtype == jnp.bfloat16
    return "cudnn" if fused and float(mesh.devices.flat[0].compute_capability) >= CAPABILITY else "xla"
