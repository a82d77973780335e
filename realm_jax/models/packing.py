"""Packing: sequences of different lengths one after another, so that layers compute no padding.

Each part of a batch, which is a device's share, is a row of token slots. Only attention has to know where a sequence
begins. A program has as many slots as the fullest part needs, so sequences are shared out among the parts by length
(`BalancedPermutation`). How many slots are enough for a corpus follows from its lengths (`tasks/packed.py`). If one
batch needs more, its longest sequences lose their last tokens, which a step reports.

`bert.py` calls the methods that `Packing` and `Padded` share: pack, unpack and take.
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
TILE = 16  # rows of a tile of bfloat16 in a TPU's memory, at which packed sequences begin if the TPU kernel attends


class Padded(NamedTuple):
    """Padded sequences.

    Attributes:
        mask: [batch, length] bool, false on padding.
    """

    mask: Array

    def pack(self, states: Array) -> Array:
        """Return states [batch, length, width] as they are."""
        return states

    def unpack(self, states: Array) -> Array:
        """Return states [batch, length, width] as they are."""
        return states

    def take(self, states: Array, positions: Array) -> Array:
        """Return hidden states at positions of every sequence.

        Args:
            states: [batch, length, width].
            positions: [batch, m] int.

        Returns:
            [batch, m, width].
        """
        return jnp.take_along_axis(states, positions[:, :, None], axis=1)


class Packing(NamedTuple):
    """Slots of packed sequences: P parts of n sequences of at most `length` tokens, with C slots for each part.

    Attributes:
        starts: the slot of each sequence's first token, a multiple of the alignment, [P, n] int32.
        lengths: tokens of each sequence that have a slot, [P, n] int32.
        source: the token in each slot, as sequence · length + position, [P, C] int32.
        used: true on slots that have a token, [P, C] bool.
        mask: true on tokens of the padded sequences that have a slot, [P · n, length] bool.
    """

    starts: Array
    lengths: Array
    source: Array
    used: Array
    mask: Array

    @property
    def positions(self) -> Array:
        """Return the position of each slot's token in its sequence, [P, C]."""
        return self.source % self.mask.shape[1]

    def per_token(self, values: Array) -> Array:
        """Spread values of sequences [P · n] over their tokens: [P, C]."""
        sequence = self.source // self.mask.shape[1]
        return jnp.take_along_axis(values.reshape(self.starts.shape), sequence, axis=1)

    def pack(self, states: Array) -> Array:
        """Pack states [P · n, length, width] into [P, C, width], zeros in unused slots."""
        return pack_tokens(states, self)

    def unpack(self, states: Array) -> Array:
        """Unpack states [P, C, width] into [P · n, length, width], zeros for tokens without a slot."""
        return unpack_tokens(states, self)

    def take(self, states: Array, positions: Array) -> Array:
        """Return hidden states at positions of every sequence.

        Args:
            states: [P, C, width].
            positions: [P · n, m] int.

        Returns:
            [P · n, m, width].
        """
        parts, slots, width = states.shape
        start = self.starts.reshape(-1, 1)  # [P · n, 1]
        last = jnp.maximum(self.lengths.reshape(-1, 1) - 1, 0)  # [P · n, 1]
        slot = start + jnp.minimum(positions, last)  # [P · n, m]
        slot = jnp.minimum(slot, slots - 1)  # an empty sequence may start behind the last slot
        return _rows(states, slot.reshape(parts, -1)).reshape(*positions.shape, width)


def packing(mask: Array, parts: int, packed_length: int, alignment: int = 1) -> Packing:
    """Lay the sequences of a batch one after another.

    Args:
        mask: [batch, length] bool, true on the first tokens of each sequence. If a part has more tokens than slots, its
            longest sequences are cut to one length, the largest that fits.
        parts: parts of the batch.
        packed_length: slots of a part; at least `alignment` for each sequence.
        alignment: sequences begin at multiples of it.
    """
    length = mask.shape[1]
    fitting = fitting_mask(mask, parts, packed_length, alignment)  # [batch, length]
    lengths = fitting.sum(axis=1, dtype=jnp.int32).reshape(parts, -1)  # [P, n]
    sizes = _aligned(lengths, alignment)
    ends = jnp.cumsum(sizes, axis=1)
    starts = ends - sizes
    repeat = partial(jnp.repeat, jnp.arange(lengths.shape[1]), total_repeat_length=packed_length)
    sequence = jax.vmap(repeat)(sizes)  # [P, C]
    position = jnp.arange(packed_length) - jnp.take_along_axis(starts, sequence, axis=1)  # [P, C]
    used = position < jnp.take_along_axis(lengths, sequence, axis=1)
    source = sequence * length + jnp.minimum(position, length - 1)
    # The barrier makes the compiler compute it once, and not again in every operation that reads it.
    return jax.lax.optimization_barrier(Packing(starts, lengths, source, used, fitting))


def fitting_mask(mask: Array, parts: int, packed_length: int, alignment: int) -> Array:
    """Return the mask of tokens that have a slot, [batch, length] bool. Arguments: see `packing`."""
    lengths = mask.sum(axis=1, dtype=jnp.int32).reshape(parts, -1)  # [P, n]
    return jnp.arange(mask.shape[1]) < fitting_lengths(lengths, mask.shape[1], packed_length, alignment).reshape(-1, 1)


def fitting_lengths(lengths: Array, longest: int, packed_length: int, alignment: int) -> Array:
    """Cut lengths [parts, n] to the largest multiple of `alignment` with which each part's sequences fit.

    Args:
        lengths: lengths of sequences.
        longest: no sequence is longer.
        packed_length: slots of a part.
        alignment: sequences begin at multiples of it.
    """
    limits = jnp.arange(alignment, longest + alignment, alignment)
    needed = jnp.minimum(_aligned(lengths, alignment)[..., None], limits).sum(axis=1)  # [parts, limits]
    fitting = jnp.where(needed <= packed_length, limits, alignment).max(axis=1, keepdims=True)  # [parts, 1]
    return jnp.minimum(lengths, fitting)


def _aligned(lengths: Array, alignment: int) -> Array:
    return -(-lengths // alignment) * alignment


# --- Sharing sequences out among the parts of a batch -----------------------------------------------------------------


@dataclass(frozen=True)
class BalancedPermutation:
    """A permutation of a batch's sequences that gives all parts of a slice's share about the same number of tokens.

    Attributes:
        mesh: the devices that share the batch; None for one.
        order: index of the sequence in a slice's share that moves to each position, [slices, n] int32; None for the
            identity.
    """

    mesh: Mesh | None
    order: Array | None

    @classmethod
    def by_length(cls, lengths: Array, mesh: Mesh | None) -> "BalancedPermutation":
        """Balance the parts of a batch by the lengths of its sequences.

        Args:
            lengths: [batch] int.
            mesh: the devices that share the batch; None for one.
        """
        slices = 1 if mesh is None else mesh.shape["slices"]
        parts = 1 if mesh is None else batch_parts(mesh) // slices
        if parts == 1:
            return cls(mesh, None)
        ranked = jnp.argsort(lengths.reshape(slices, -1), axis=1, descending=True)  # [slices, n]
        return cls(mesh, ranked[:, snake_order(ranked.shape[1], parts)])

    def apply(self, values: Tree) -> Tree:
        """Permute values of the sequences, a tree of integers and bools [batch, …]; without a gradient."""
        if self.mesh is None or self.order is None:
            return values
        return jax.tree.map(partial(_permuted, self.mesh, order=self.order), values)

    def inverse(self, values: Tree) -> Tree:
        """Return permuted values, a tree of arrays [batch, …], to the order of the batch. Floats have a gradient."""
        if self.mesh is None or self.order is None:
            return values
        mesh, order, back = self.mesh, self.order, jnp.argsort(self.order, axis=1)

        def restored(array: Array) -> Array:
            floats = jnp.issubdtype(array.dtype, jnp.floating)
            return _permuted_floats(mesh, array, back, order) if floats else _permuted(mesh, array, back)

        return jax.tree.map(restored, values)


def snake_order(sequences: int, parts: int) -> NDArray[np.int64]:
    """Deal ranked sequences out to parts, every other round backwards.

    Args:
        sequences: how many, a multiple of `parts`.
        parts: parts of a batch.

    Returns:
        Ranks, part after part, [sequences].
    """
    rounds = np.arange(sequences).reshape(-1, parts)  # [rounds, parts]
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds.T.reshape(-1)


def packed_lengths(lengths: Array, longest: int, packed_length: int, mesh: Mesh | None, alignment: int) -> Array:
    """Return the number of tokens of each sequence that have a slot, if they are packed in balanced order.

    Args:
        lengths: lengths of the sequences, [batch, …].
        longest: no sequence is longer.
        packed_length: slots of a device's share; 0: the sequences are padded.
        mesh: the devices that share the batch; None for one.
        alignment: sequences begin at multiples of it.
    """
    if not packed_length:
        return lengths
    flat = lengths.reshape(-1)  # [batch · …]
    permutation = BalancedPermutation.by_length(flat, mesh)
    by_part = permutation.apply(flat).reshape(batch_parts(mesh) if mesh else 1, -1)  # [parts, n]
    fitting = fitting_lengths(by_part, longest, packed_length, alignment)
    return permutation.inverse(fitting.reshape(-1)).reshape(lengths.shape)


def _permuted(mesh: Mesh, values: Array, order: Array) -> Array:
    """Put values [batch, …] into an order [slices, n] of each slice's share.

    Every device of a slice gets the slice's share and takes its part. Without this the compiler would have every device
    search its part for all sequences, and sum the results.
    """
    shares = values.reshape(len(order), -1, *values.shape[1:])  # [slices, n, …]
    shares = jax.lax.with_sharding_constraint(shares, NamedSharding(mesh, PartitionSpec("slices")))
    permuted = jax.vmap(lambda share, rows: share[rows])(shares, order).reshape(values.shape)
    return jax.lax.with_sharding_constraint(permuted, logical_sharding(mesh, "batch", *[None] * (values.ndim - 1)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _permuted_floats(mesh: Mesh, values: Array, order: Array, back: Array) -> Array:
    """Permute floats like `_permuted`; back: the inverse order, which gradients take."""
    return _permuted(mesh, values, order)


_permuted_floats.defvjp(
    lambda mesh, values, order, back: (_permuted(mesh, values, order), back),
    lambda mesh, back, cotangent: (_permuted(mesh, cotangent, back), None, None),
)


# --- Between padded and packed states ---------------------------------------------------------------------------------


@jax.custom_vjp
def pack_tokens(padded: Array, layout: Packing) -> Array:
    """Pack states, see `Packing.pack`."""
    parts = len(layout.source)
    flat = padded.reshape(parts, -1, padded.shape[-1])  # [P, n · length, width]
    packed = _rows(flat, layout.source)  # [P, C, width]
    return jnp.where(layout.used[..., None], packed, jnp.zeros_like(packed))


@jax.custom_vjp
def unpack_tokens(packed: Array, layout: Packing) -> Array:
    """Unpack states, see `Packing.unpack`."""
    length, (parts, slots, width) = layout.mask.shape[1], packed.shape
    slot = layout.starts[..., None] + jnp.arange(length)  # [P, n, length]
    slot = jnp.minimum(slot, slots - 1).reshape(parts, -1)  # [P, n · length]
    padded = _rows(packed, slot).reshape(-1, length, width)  # [P · n, length, width]
    return jnp.where(layout.mask[..., None], padded, jnp.zeros_like(padded))


# Each is the transpose of the other, because a token has one slot. Derived gradients would use slow scatter-adds.
pack_tokens.defvjp(
    lambda padded, layout: (pack_tokens(padded, layout), layout),
    lambda layout, cotangent: (unpack_tokens(cotangent, layout), None),
)
unpack_tokens.defvjp(
    lambda packed, layout: (unpack_tokens(packed, layout), layout),
    lambda layout, cotangent: (pack_tokens(cotangent, layout), None),
)


def _rows(states: Array, rows: Array) -> Array:
    """Take rows [P, m] of each part of states [P, n, width]: [P, m, width]."""
    return jax.vmap(lambda part, indices: part.at[indices].get(mode="promise_in_bounds"))(states, rows)
