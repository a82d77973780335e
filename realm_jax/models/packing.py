"""Sequences of different lengths one after another, so that what is computed of each token is not computed of padding.

Each part of a batch, which is what a device has, is a row of `places`. Only attention has to know where a sequence
begins. A program has as many places as the fullest part needs, so sequences are shared out among the parts by length
(`BalancedOrder`). How many places do for a corpus follows from its lengths (`tasks/packed.py`); where one batch needs
more, its longest sequences lose their last tokens, which a step reports.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from realm_jax.mesh import batch_parts, logical_sharding

Array = jax.Array
Tree = TypeVar("Tree")


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
    length, fitting = mask.shape[1], fitting_mask(mask, parts, places, alignment)
    lengths = fitting.sum(axis=1, dtype=jnp.int32).reshape(parts, -1)
    sizes = _aligned(lengths, alignment)
    ends = jnp.cumsum(sizes, axis=1)
    starts = ends - sizes
    repeat = partial(jnp.repeat, jnp.arange(lengths.shape[1]), total_repeat_length=places)
    sequence = jax.vmap(repeat)(sizes)
    position = jnp.arange(places) - jnp.take_along_axis(starts, sequence, axis=1)
    used = position < jnp.take_along_axis(lengths, sequence, axis=1)
    source = sequence * length + jnp.minimum(position, length - 1)
    # Computed once: the compiler would do it all again in every operation that reads it.
    return jax.lax.optimization_barrier(Packing(starts, lengths, source, used, fitting))


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


@dataclass(frozen=True)
class BalancedOrder:
    """Another order of a batch's sequences, in which all parts of a slice's share have about the same length in all.

    order [slices, n] int32: which sequence of a slice's share stands at each place; None: each stays where it is.
    """

    mesh: Mesh | None
    order: Array | None

    @classmethod
    def of(cls, lengths: Array, mesh: Mesh | None) -> "BalancedOrder":
        """By lengths [batch]; mesh: of the devices that share the batch, None for one."""
        slices = 1 if mesh is None else mesh.shape["slices"]
        parts = 1 if mesh is None else batch_parts(mesh) // slices
        if parts == 1:
            return cls(mesh, None)
        ranked = jnp.argsort(lengths.reshape(slices, -1), axis=1, descending=True)
        return cls(mesh, ranked[:, snake_order(ranked.shape[1], parts)])

    def apply(self, values: Tree) -> Tree:
        """Values of the sequences, a tree of integers and bools [batch, …], in this order; without a gradient."""
        if self.mesh is None or self.order is None:
            return values
        return jax.tree.map(partial(_permuted, self.mesh, order=self.order), values)

    def undo(self, values: Tree) -> Tree:
        """Values in this order, a tree of arrays [batch, …], in that of the batch again. Floats have a gradient."""
        if self.mesh is None or self.order is None:
            return values
        mesh, order, back = self.mesh, self.order, jnp.argsort(self.order, axis=1)

        def restored(array: Array) -> Array:
            floats = jnp.issubdtype(array.dtype, jnp.floating)
            return _permuted_floats(mesh, array, back, order) if floats else _permuted(mesh, array, back)

        return jax.tree.map(restored, values)


def snake_order(sequences: int, parts: int) -> NDArray[np.int64]:
    """Which of ranked sequences go to which part, one after another: each round of them the other way round."""
    rounds = np.arange(sequences).reshape(-1, parts)
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds.T.reshape(-1)


def _permuted(mesh: Mesh, values: Array, order: Array) -> Array:
    """Values [batch, …] in an order [slices, n] of each slice's share.

    All of a share goes to every device of its slice, which takes what is its own: the compiler would have every device
    look for all sequences in its part, and add up.
    """
    shares = values.reshape(len(order), -1, *values.shape[1:])
    shares = jax.lax.with_sharding_constraint(shares, NamedSharding(mesh, PartitionSpec("slices")))
    taken = jax.vmap(lambda share, rows: share[rows])(shares, order).reshape(values.shape)
    return jax.lax.with_sharding_constraint(taken, logical_sharding(mesh, "batch", *[None] * (values.ndim - 1)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _permuted_floats(mesh: Mesh, values: Array, order: Array, back: Array) -> Array:
    """`_permuted` of floats. back: the order that undoes it, which gradients take."""
    return _permuted(mesh, values, order)


_permuted_floats.defvjp(
    lambda mesh, values, order, back: (_permuted(mesh, values, order), back),
    lambda mesh, back, given: (_permuted(mesh, given, back), None, None),
)


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
