"""Softmax attention as one kernel (Pallas) that keeps the scores of a sequence in a TPU's vector memory.

It reads and writes hidden states as layers have them, [batch, length, width]: nothing is split into heads, padded or
transposed before it. A block of work is one sequence and the heads that share 128 features, a register's lanes. For a
product the lanes of the other heads are set to 0, which costs no more than a narrower product would, as the matrix unit
is 128 wide. The backward pass computes the weights again, and needs nothing but what the forward pass was given.

Read next: `attention.py`, whose other functions give the same numbers.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from realm_jax.mesh import batch_parts, logical_sharding
from realm_jax.models.dropout import kept
from realm_jax.models.packing import Packing

Array = jax.Array
Residuals = tuple[Array, ...]
Kernel = Callable[..., tuple[Array, ...]]
LANES = 128
TILE = 16  # rows of a tile of bfloat16 in a TPU's memory
MASKED_BIAS = -1e9  # added to scores of places that may not be attended to; finite, so that gradients stay finite
LONGEST = 448  # tokens whose scores and gradients fit into a kernel's 16 MiB of vector memory in float32
# Logical names of the dimensions of what a kernel takes and gives.
SEEDS, STATES, BIAS = ("batch", "heads"), ("batch", None, "heads"), ("batch",)
STARTS, PACKED_SEEDS = ("batch",), ("batch", None, "heads")


def fits(query: Array | jax.ShapeDtypeStruct, key: Array | jax.ShapeDtypeStruct, heads: int, mesh: Mesh | None) -> bool:
    """Whether the kernel takes these [batch, positions or length, width]: as many queries as keys, of which every
    device has whole sequences and whole groups of 128 features."""
    batch, length, width = key.shape
    parts, spread = (mesh.shape["model"], batch_parts(mesh)) if mesh else (1, 1)
    in_groups = LANES % (width // heads) == 0 and width % (LANES * parts) == 0
    return in_groups and batch % spread == 0 and query.shape[1] == length <= LONGEST


def fits_packed(packed: Array, padded: tuple[int, ...], heads: int, mesh: Mesh | None) -> bool:
    """Whether the kernel takes packed sequences [parts, places, width]: every device has one part, with room for the
    longest of them in whole tiles. padded: batch and length."""
    parts, places, width = packed.shape
    states = jax.ShapeDtypeStruct((*padded, width), packed.dtype)
    spread = batch_parts(mesh) if mesh else 1
    return parts == spread and padded[1] % TILE == 0 and padded[1] <= places and fits(states, states, heads, mesh)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def fused_attention(
    query: Array, key: Array, value: Array, bias: Array, seeds: Array, heads: int, rate: float, mesh: Mesh | None
) -> Array:
    """query, key, value [batch, length, width] of one dtype, bias [batch, 1, length] float32 to be added to scores,
    seeds [batch, heads] uint32 and rate of dropout → like `value`.

    mesh: the devices that all this is spread over; None: one device has it.
    """
    return _forward(query, key, value, bias, seeds, heads, rate, mesh)[0]


def _forward(
    query: Array, key: Array, value: Array, bias: Array, seeds: Array, heads: int, rate: float, mesh: Mesh | None
) -> tuple[Array, Residuals]:
    def call(*arrays: Array) -> Any:
        return _call(_attend, query.shape[-1] // heads, rate, arrays, arrays[3:4])

    (attended,) = _on_every_device(call, mesh, (SEEDS, STATES, STATES, STATES, BIAS), (STATES,))(
        seeds, query, key, value, bias
    )
    return attended, (query, key, value, bias, seeds)


def _backward(
    heads: int, rate: float, mesh: Mesh | None, residuals: Residuals, cotangent: Array
) -> tuple[Array | None, ...]:
    query, key, value, bias, seeds = residuals

    def call(*arrays: Array) -> Any:
        return _call(_differentiate, query.shape[-1] // heads, rate, arrays, arrays[1:4])

    taken = (SEEDS, STATES, STATES, STATES, BIAS, STATES)
    spread = _on_every_device(call, mesh, taken, (STATES, STATES, STATES))
    return *spread(seeds, query, key, value, bias, cotangent), None, None


fused_attention.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def fused_packed_attention(
    query: Array, key: Array, value: Array, layout: Packing, seeds: Array, heads: int, rate: float, mesh: Mesh | None
) -> Array:
    """`fused_attention` of packed sequences [parts, places, width], each within itself; zeros where no token is. seeds
    [batch, heads]. A device has one part; sequences begin at multiples of TILE."""
    return _forward_packed(query, key, value, layout, seeds, heads, rate, mesh)[0]


def _forward_packed(
    query: Array, key: Array, value: Array, layout: Packing, seeds: Array, heads: int, rate: float, mesh: Mesh | None
) -> tuple[Array, tuple[Any, ...]]:
    def call(*arrays: Array) -> Any:
        return _call_packed(_attend, layout.mask.shape[1], query.shape[-1] // heads, rate, arrays, arrays[3:4])

    taken = (STARTS, STARTS, PACKED_SEEDS, STATES, STATES, STATES)
    (attended,) = _on_every_device(call, mesh, taken, (STATES,))(*_places(layout, seeds), query, key, value)
    return _of_tokens(attended, layout), (query, key, value, layout, seeds)


def _backward_packed(
    heads: int, rate: float, mesh: Mesh | None, residuals: tuple[Any, ...], cotangent: Array
) -> tuple[Array | None, ...]:
    query, key, value, layout, seeds = residuals

    def call(*arrays: Array) -> Any:
        return _call_packed(_differentiate, layout.mask.shape[1], query.shape[-1] // heads, rate, arrays, arrays[3:6])

    taken = (STARTS, STARTS, PACKED_SEEDS, STATES, STATES, STATES, STATES)
    spread = _on_every_device(call, mesh, taken, (STATES, STATES, STATES))
    found = spread(*_places(layout, seeds), query, key, value, cotangent)
    return *(_of_tokens(one, layout) for one in found), None, None


fused_packed_attention.defvjp(_forward_packed, _backward_packed)


def _places(layout: Packing, seeds: Array) -> tuple[Array, Array, Array]:
    """Starts and lengths [parts, n], and seeds [parts, n, heads]."""
    return layout.starts, layout.lengths, seeds.reshape(*layout.starts.shape, -1)


def _of_tokens(states: Array, layout: Packing) -> Array:
    """States with zeros where no token is: a kernel leaves there what was there before."""
    return jnp.where(layout.used[..., None], states, jnp.zeros_like(states))


def _on_every_device(call: Callable[..., Any], mesh: Mesh | None, taken: Any, given: Any) -> Callable[..., Any]:
    """`call` on the part that each device has, as the compiler cannot divide a kernel. taken, given: logical names."""
    if mesh is None or mesh.size == 1:
        return call
    specs = [tuple(logical_sharding(mesh, *names).spec for names in side) for side in (taken, given)]
    # Unchecked: what a kernel gives does not say over which devices it varies.
    return jax.shard_map(call, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)


def _call(kernel: Kernel, size: int, rate: float, arrays: tuple[Array, ...], like: tuple[Array, ...]) -> Any:
    """Run a kernel for every sequence and group of heads. size: of a head; arrays: seeds, then states [batch, length,
    width] and what is added to scores; like: of which shapes and dtypes the results are."""
    seeds, (batch, length, width) = arrays[0], arrays[1].shape
    groups = width // LANES
    states = pl.BlockSpec((None, length, LANES), lambda i, j: (i, 0, j))
    added = pl.BlockSpec((None, 1, length), lambda i, j: (i, 0, 0))
    own = pl.BlockSpec((None, None, 1, LANES // size), lambda i, j: (i, j, 0, 0), memory_space=pltpu.SMEM)
    return pl.pallas_call(
        partial(_whole, kernel, len(arrays) - 2, size, rate),
        grid=(batch, groups),
        in_specs=[own, *(added if array.shape[1] == 1 else states for array in arrays[1:])],
        out_specs=(states,) * len(like),
        out_shape=tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in like),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name=kernel.__name__.strip("_") + ("_and_drop" if rate else ""),
    )(seeds.reshape(batch, groups, 1, -1), *arrays[1:])


def _call_packed(
    kernel: Kernel, length: int, size: int, rate: float, arrays: tuple[Array, ...], like: tuple[Array, ...]
) -> Any:
    """`_call` for packed sequences. arrays: starts and lengths [1, n], seeds [1, n, heads], then states [1, places,
    width] of the one part that a device has; length: of the longest sequence, whole tiles. The kernel's name says how
    many sequences there are and how long a window is, as a compiled program says it nowhere else."""
    starts, lengths, seeds, *states = (array[0] for array in arrays)
    sequences, (places, width) = len(seeds), states[0].shape
    groups = width // LANES

    def window(group: Any, one: Any, starts: Any, lengths: Any) -> tuple[Any, Any]:
        first = jnp.minimum(starts[one], places - length)
        return pl.multiple_of(first, TILE), pl.multiple_of(group * LANES, LANES)

    own = pl.BlockSpec((None, None, 1, LANES // size), lambda j, i, *_: (i, j, 0, 0), memory_space=pltpu.SMEM)
    around = pl.BlockSpec((pl.Element(length), pl.Element(LANES)), window)
    given = pl.pallas_call(
        partial(_packed, kernel, len(states), size, rate),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(groups, sequences),
            in_specs=[own, *[around] * len(states)],
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(like),
            scratch_shapes=[
                *(pltpu.VMEM((2, length, LANES), one.dtype) for one in like),
                *[pltpu.SemaphoreType.DMA((2,))] * len(like),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((places, width), one.dtype) for one in like],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="_".join((kernel.__name__.strip("_"), "packed", *(["and_drop"] if rate else []), f"{sequences}_{length}")),
    )(starts, lengths, seeds.reshape(sequences, groups, 1, -1), *states)
    return tuple(one[None] for one in given)


# --- the kernels ------------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """What a kernel needs beside the states [length, 128] of a sequence and a group of heads.

    seeds: a reference, [1, heads of the group]; bias [1, length] float32: added to scores; first: the row of the
    sequence's first token; size: of a head.
    """

    seeds: Any
    bias: Array
    first: Array | int
    size: int
    rate: float


def _whole(kernel: Kernel, taken: int, size: int, rate: float, seeds: Any, *references: Any) -> None:
    """A kernel on a padded sequence. references: to the states that are taken, with what is added to scores as the
    fourth, and to what is given."""
    arrays = [one[...] for one in references[: taken + 1]]
    bias = arrays.pop(3)
    given = kernel(Work(seeds, bias, 0, size, rate), *arrays)
    for reference, one in zip(references[taken + 1 :], given, strict=True):
        reference[...] = one.astype(reference.dtype)


def _packed(
    kernel: Kernel, taken: int, size: int, rate: float, starts: Any, lengths: Any, seeds: Any, *references: Any
) -> None:
    """A kernel on a packed sequence. Its states come with what stands around them, and its rows alone are written, in
    copies of 2ⁿ tiles, while the next sequence is worked on.

    references: to the states that are taken; to all of what is given, in the device's memory; last, buffers [2, length,
    128] and semaphores [2] of each.
    """
    group, one, sequences = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    outputs = (len(references) - taken) // 3
    given, buffers, semaphores = (references[taken + i * outputs : taken + (i + 1) * outputs] for i in range(3))
    window, places = buffers[0].shape[1], given[0].shape[0]

    def copies(sequence: Any) -> Iterator[tuple[Any, Any]]:
        """Whether each of the copies is made, and the copy."""
        slot, start = jax.lax.rem(sequence, 2), starts[sequence]
        first = start - jnp.minimum(start, places - window)
        tiles = jax.lax.div(lengths[sequence] + TILE - 1, TILE)
        for power in reversed(range((window // TILE).bit_length())):
            done, rows = (tiles >> (power + 1) << (power + 1)) * TILE, TILE << power
            source, target = (pl.ds(pl.multiple_of(at + done, TILE), rows) for at in (first, start))
            lanes = pl.ds(pl.multiple_of(group * LANES, LANES), LANES)
            for buffer, array, semaphore in zip(buffers, given, semaphores, strict=True):
                copy = pltpu.make_async_copy(buffer.at[slot, source], array.at[target, lanes], semaphore.at[slot])
                yield (tiles >> power) & 1 == 1, copy

    def finish(sequence: Any) -> None:
        for made, copy in copies(sequence):
            pl.when(made)(copy.wait)

    pl.when(one >= 2)(lambda: finish(one - 2))
    start = starts[one]
    first = start - jnp.minimum(start, places - window)
    place = jax.lax.broadcasted_iota(jnp.int32, (1, window), 1) - first
    bias = jnp.where((place >= 0) & (place < lengths[one]), 0.0, MASKED_BIAS)
    states = [reference[...] for reference in references[:taken]]
    row = jax.lax.broadcasted_iota(jnp.int32, states[0].shape, 0) - first
    own = (row >= 0) & (row < lengths[one])  # of other sequences there are queries too, which move no key or value
    states[3:] = [jnp.where(own, cotangent, jnp.zeros_like(cotangent)) for cotangent in states[3:]]
    found = kernel(Work(seeds, bias, first, size, rate), *states)
    for buffer, given_states in zip(buffers, found, strict=True):
        buffer[jax.lax.rem(one, 2)] = given_states.astype(buffer.dtype)
    for made, copy in copies(one):
        pl.when(made)(copy.start)

    @pl.when(one == sequences - 1)
    def _() -> None:
        pl.when(one >= 1)(lambda: finish(one - 1))
        finish(one)


def _attend(work: Work, query: Array, key: Array, value: Array) -> tuple[Array]:
    """softmax(query keyᵀ / √size + bias) value."""
    total = jnp.zeros(query.shape, jnp.float32)
    for head in range(LANES // work.size):
        weights, row = _exponentials(work, _of_head(query, head, work.size), key)
        weights = _left(work, weights, head)
        taken = _product(weights.astype(value.dtype), 1, _of_head(value, head, work.size), 0)
        total += taken / (row * (1 - work.rate))
    return (total,)


def _differentiate(work: Work, query: Array, key: Array, value: Array, cotangent: Array) -> tuple[Array, Array, Array]:
    """The gradients of `_attend`. That of a softmax s of scores is s · (g − Σ s g), where g is what dropout leaves of
    the weights' gradient. The sum is over whole rows in float32: taken from the output instead, as is usual where rows
    come in parts, it would have the output's rounding."""
    size, left = work.size, 1 - work.rate
    totals = [jnp.zeros(query.shape, jnp.float32)] * 3
    for head in range(LANES // size):
        q, g = _of_head(query, head, size), _of_head(cotangent, head, size)
        weights, row = _exponentials(work, q, key)
        weights = weights * (1 / row)
        used = _left(work, weights, head)
        of_weights = used * _product(g, 1, value, 1)
        of_scores = of_weights - weights * of_weights.sum(axis=-1, keepdims=True)
        of_scores = (of_scores * (size**-0.5 / left)).astype(query.dtype)
        found = (
            _product(of_scores, 1, _of_head(key, head, size), 0),
            _product(of_scores, 0, q, 0),
            _product(used.astype(value.dtype), 0, g, 0) / left,
        )
        totals = [total + one for total, one in zip(totals, found, strict=True)]
    return totals[0], totals[1], totals[2]


def _exponentials(work: Work, query: Array, key: Array) -> tuple[Array, Array]:
    """A softmax before it is divided, [positions, length] float32, and the sum of each row."""
    scores = _product(query, 1, key, 1) * work.size**-0.5 + work.bias
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights, weights.sum(axis=-1, keepdims=True)


def _left(work: Work, weights: Array, head: int) -> Array:
    """Weights with zeros for those that drop out; the others as they are."""
    if not work.rate:
        return weights
    return jnp.where(kept(work.seeds[0, head], weights.shape, work.rate, work.first), weights, 0.0)


def _of_head(states: Array, head: int, size: int) -> Array:
    """States [length, 128] with zeros for the features of other heads."""
    lane = jax.lax.broadcasted_iota(jnp.int32, states.shape, 1)
    return jnp.where((lane >= head * size) & (lane < (head + 1) * size), states, jnp.zeros_like(states))


def _product(left: Array, left_axis: int, right: Array, right_axis: int) -> Array:
    """Of two matrices over the named axes, in float32; float32 ones are not rounded to bfloat16 first."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    axes = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, precision=precision, preferred_element_type=jnp.float32)
