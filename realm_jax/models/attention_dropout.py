"""Dropout of attention weights, drawn from a seed for each sequence and head.

Which weight stays is a hash of that seed and of the weight's place, nothing else: a kernel that never holds all weights
draws the same ones as a plain product of matrices, on every mesh, and the backward pass draws them again. BERT (Devlin
et al. 2019) has .1 here (`attention_probs_dropout_prob`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
UNITS = 2**32


class AttentionDropout(NamedTuple):
    """rate: the probability that a weight becomes 0, the others being divided by 1 − rate; seeds: [batch, heads]
    uint32."""

    rate: float
    seeds: Array


def dropout_seeds(key: Array, batch: int, heads: int) -> Array:
    """[batch, heads] uint32, of a key of `jax.random`."""
    return jax.random.bits(key, (batch, heads), jnp.uint32)


def kept(seed: Array, shape: tuple[int, ...], rate: float) -> Array:
    """Which weights stay, bool [..., positions, length]; seed: uint32, a scalar or one that broadcasts to the shape.

    A place is 65,536 · row + column, whatever the shape, so that padding changes no draw. The hash is MurmurHash3's
    finalizer, into which the seed is mixed: products and shifts, which a TPU's vector unit has.
    """
    rows = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 2)
    columns = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    bits = ((rows << 16) | columns) * jnp.uint32(0x9E3779B9)
    bits = (bits ^ (bits >> 16) ^ seed) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16) >= jnp.uint32(round(rate * UNITS))
