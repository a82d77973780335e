"""Dropout, of hidden states and of attention's weights, drawn from a seed for each sequence (and head).

What stays is a hash of that seed and of the number's place, nothing else: padding, the mesh, and a kernel that never
holds all weights change no draw, and the backward pass draws again what it did not keep. It costs a TPU less than the
counter-based bits of `jax.random`, of which it takes the seeds alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from realm_jax.models.packing import Packing

Array = jax.Array
UNITS = 2**32


class AttentionDropout(NamedTuple):
    """rate: the probability that a weight becomes 0, the others being divided by 1 − rate; seeds: [batch, heads]
    uint32."""

    rate: float
    seeds: Array


class Dropout(nn.Module):
    """Dropout of hidden states [batch, length, width], packed ones [parts, places, width] or vectors [batch, width];
    what stays is divided by 1 − rate. Packed states have the draws of the sequences that they are of."""

    rate: float

    @nn.compact
    def __call__(self, states: Array, deterministic: bool, layout: Packing | None = None) -> Array:
        if deterministic or not self.rate:
            return states
        batch = len(states) if layout is None else len(layout.mask)
        seeds = jax.random.bits(self.make_rng("dropout"), (batch, *[1] * (states.ndim - 1)), jnp.uint32)
        rows = None
        if layout is not None:
            seeds, rows = layout.of_sequence(seeds)[..., None], layout.rows[..., None]
        scaled = states * jnp.asarray(1 / (1 - self.rate), states.dtype)
        return jnp.where(kept(seeds, states.shape, self.rate, rows=rows), scaled, jnp.zeros_like(states))


def dropout_seeds(key: Array, batch: int, heads: int) -> Array:
    """[batch, heads] uint32, of a key of `jax.random`."""
    return jax.random.bits(key, (batch, heads), jnp.uint32)


def kept(seed: Array, shape: tuple[int, ...], rate: float, first: Array | int = 0, rows: Array | None = None) -> Array:
    """Which numbers stay, bool [..., rows, columns]; seed: uint32, a scalar or one that broadcasts to the shape.

    first: row and column that count as 0 (those before it are of no use). rows: what they count as, where they are of
    several sequences; columns then are features.

    A place is 65,536 · row + column, whatever the shape, so that padding changes no draw. The hash is MurmurHash3's
    finalizer, into which the seed is mixed: products and shifts, which a TPU's vector unit has.
    """
    first = jnp.asarray(first).astype(jnp.uint32)
    if rows is None:
        rows = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 2) - first
    columns = jax.lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1) - first
    bits = ((rows.astype(jnp.uint32) << 16) | columns) * jnp.uint32(0x9E3779B9)
    bits = (bits ^ (bits >> 16) ^ seed) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16) >= jnp.uint32(round(rate * UNITS))
