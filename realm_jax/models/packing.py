"""Sequences of different lengths one after another, so that what is computed of each token is not computed of padding.

Each part of a batch, which is what a device has, is a row of `places`. Only attention has to know where a sequence
begins. How many places do for a corpus follows from its lengths (`tasks/packed.py`); where one batch needs more, its
longest sequences lose their last tokens, which a step reports.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Packing(NamedTuple):
    """Where the sequences of a batch lie: P parts of n sequences of at most `length` tokens, C places a part.

    starts, lengths [P, n] int32: the place of a sequence's first token, and its tokens; sequences begin at multiples of
    the alignment. source [P, C] int32: for every place the token that is there, as sequence · length + position; used
    [P, C] bool: whether there is one. mask [P · n, length] bool: which tokens of the padded sequences have a place.
    """

    starts: Array
    lengths: Array
    source: Array
    used: Array
    mask: Array

    @property
    def rows(self) -> Array:
        """The position of each place's token in its sequence, [P, C]."""
        return self.source % self.mask.shape[1]

    def of_sequence(self, values: Array) -> Array:
        """Values of sequences [P · n] → of the places of each, [P, C]."""
        sequence = self.source // self.mask.shape[1]
        return jnp.take_along_axis(values.reshape(self.starts.shape), sequence, axis=1)


def packing(mask: Array, parts: int, places: int, alignment: int = 1) -> Packing:
    """Sequences of a batch in order, those of each of `parts` in `places`.

    mask [batch, length] bool: true on the first tokens of each sequence. Where a part has more tokens than places, its
    longest sequences are cut to one length, the largest that fits. places: at least `alignment` for each sequence.
    """
    length, kept = mask.shape[1], fitting_mask(mask, parts, places, alignment)
    lengths = kept.sum(axis=1, dtype=jnp.int32).reshape(parts, -1)
    sizes = _aligned(lengths, alignment)
    ends = jnp.cumsum(sizes, axis=1)
    starts = ends - sizes
    repeat = partial(jnp.repeat, jnp.arange(lengths.shape[1]), total_repeat_length=places)
    sequence = jax.vmap(repeat)(sizes)
    position = jnp.arange(places) - jnp.take_along_axis(starts, sequence, axis=1)
    used = position < jnp.take_along_axis(lengths, sequence, axis=1)
    source = sequence * length + jnp.minimum(position, length - 1)
    # Computed once: the compiler would do it all again in every operation that reads it.
    return jax.lax.optimization_barrier(Packing(starts, lengths, source, used, kept))


def fitting_mask(mask: Array, parts: int, places: int, alignment: int) -> Array:
    """A mask [batch, length] without the tokens for which there is no place. Arguments as of `packing`."""
    lengths = mask.sum(axis=1, dtype=jnp.int32).reshape(parts, -1)
    return jnp.arange(mask.shape[1]) < fitting_lengths(lengths, mask.shape[1], places, alignment).reshape(-1, 1)


def fitting_lengths(lengths: Array, longest: int, places: int, alignment: int) -> Array:
    """Lengths [parts, n] cut to the largest multiple of `alignment` with which each part's sequences fit."""
    limits = jnp.arange(alignment, longest + alignment, alignment)
    needed = jnp.minimum(_aligned(lengths, alignment)[..., None], limits).sum(axis=1)
    fitting = jnp.where(needed <= places, limits, alignment).max(axis=1, keepdims=True)
    return jnp.minimum(lengths, fitting)


def _aligned(lengths: Array, alignment: int) -> Array:
    return -(-lengths // alignment) * alignment


@jax.custom_vjp
def pack(padded: Array, layout: Packing) -> Array:
    """[P · n, length, width] → [P, C, width], zeros where no token is."""
    parts = len(layout.source)
    flat = padded.reshape(parts, -1, padded.shape[-1])
    taken = _rows(flat, layout.source)
    return jnp.where(layout.used[..., None], taken, jnp.zeros_like(taken))


@jax.custom_vjp
def unpack(packed: Array, layout: Packing) -> Array:
    """[P, C, width] → [P · n, length, width], zeros for what has no place."""
    length, (parts, places, width) = layout.mask.shape[1], packed.shape
    place = layout.starts[..., None] + jnp.arange(length)
    place = jnp.minimum(place, places - 1).reshape(parts, -1)
    taken = _rows(packed, place).reshape(-1, length, width)
    return jnp.where(layout.mask[..., None], taken, jnp.zeros_like(taken))


# Each is the transpose of the other: a token has one place. Derived, both would add up into zeros, which is slow.
pack.defvjp(lambda padded, layout: (pack(padded, layout), layout), lambda layout, given: (unpack(given, layout), None))
unpack.defvjp(
    lambda packed, layout: (unpack(packed, layout), layout), lambda layout, given: (pack(given, layout), None)
)


def take_positions(packed: Array, layout: Packing, positions: Array) -> Array:
    """Hidden states of some positions of every sequence. positions [P · n, m] → [P · n, m, width]."""
    parts, places, width = packed.shape
    place = layout.starts.reshape(-1, 1) + jnp.minimum(positions, jnp.maximum(layout.lengths.reshape(-1, 1) - 1, 0))
    place = jnp.minimum(place, places - 1)  # of an empty sequence behind the last place
    return _rows(packed, place.reshape(parts, -1)).reshape(*positions.shape, width)


def _rows(states: Array, rows: Array) -> Array:
    """Rows of each part: states [P, n, width], rows [P, m], each of the n → [P, m, width]."""
    return jax.vmap(lambda part, taken: part.at[taken].get(mode="promise_in_bounds"))(states, rows)
