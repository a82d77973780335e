"""Softmax attention in five implementations that give the same numbers, and the dropout of its weights.

query [batch, positions, width], key and value [batch, length, width], where width = heads · head size, mask [batch,
length] bool, dropout of the weights or None → [batch, positions, width] in the dtype of `value`; the softmax is
float32. `select_attention` chooses an implementation for the devices and `attend` calls it. Below follow dropout, and
the TPU kernel.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from realm_jax.mesh import batch_parts, logical_sharding
from realm_jax.models.packing import Packing, pack, unpack

Array = jax.Array
MASKED_BIAS = -1e9  # added to scores of places that may not be attended to; finite, so that gradients stay finite
LONG = 2**18  # scores of a sequence from which on it is worth attending in it alone
HEAD_SIZE, CAPABILITY = 128, 8.0  # largest head, and least compute capability, that cuDNN's kernel takes everywhere
SHORT = 16  # tokens of a sequence below which no kernel is called; not measured


class AttentionDropout(NamedTuple):
    """rate: the probability that a weight becomes 0, the others being divided by 1 − rate; seeds: [batch, heads]
    uint32."""

    rate: float
    seeds: Array


def dot_product_attention(
    query: Array, key: Array, value: Array, mask: Array, heads: int, dropout: AttentionDropout | None = None
) -> Array:
    """Softmax attention over key positions where `mask` is true."""
    q, k, v = (_split(x, heads) for x in (query, key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    bias = jnp.where(mask[:, None, None, :], 0.0, MASKED_BIAS).astype(jnp.float32)
    weights = jax.nn.softmax(scores * q.shape[-1] ** -0.5 + bias, axis=-1)
    if dropout:
        keep = keep_mask(dropout.seeds[:, :, None, None], weights.shape, dropout.rate)
        weights = jnp.where(keep, weights / (1 - dropout.rate), 0.0)
    # Asked for as "bqhd", XLA on a CPU multiplies transposed weights: three times the time of the product.
    return jnp.einsum("bhqk,bkhd->bhqd", weights.astype(value.dtype), v).swapaxes(1, 2).reshape(query.shape)


def _split(states: Array, heads: int) -> Array:
    """[batch, length, width] → [batch, length, heads, size]."""
    return states.reshape(*states.shape[:2], heads, states.shape[2] // heads)


def cudnn_attention(
    query: Array, key: Array, value: Array, mask: Array, heads: int, dropout: AttentionDropout | None = None
) -> Array:
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
    query: Array, key: Array, value: Array, mask: Array | Packing, heads: int,
    dropout: AttentionDropout | None = None, mesh: Mesh | None = None,
) -> Array:  # fmt: skip
    """`dot_product_attention`, or `packed_attention` with it, as one kernel that keeps scores in vector memory, if its
    shapes allow. mesh: of the devices that the arrays are spread over; None: they are on one."""
    bias: Array | Packing
    if isinstance(mask, Packing):
        if not fits_packed(query, mask.mask.shape, heads, mesh):
            return packed_attention(dot_product_attention, query, key, value, mask, heads, dropout)
        batch, bias = len(mask.mask), mask
    else:
        if not fits(query, key, heads, mesh):
            return dot_product_attention(query, key, value, mask, heads, dropout)
        batch, bias = len(query), jnp.where(mask, 0.0, MASKED_BIAS).astype(jnp.float32)[:, None, :]
    seeds = dropout.seeds if dropout else jnp.zeros((batch, heads), jnp.uint32)
    return fused_attention(query, key, value, bias, seeds, heads, dropout.rate if dropout else 0.0, mesh)


def packed_attention(
    way: Callable[..., Array], query: Array, key: Array, value: Array, layout: Packing, heads: int,
    dropout: AttentionDropout | None = None,
) -> Array:  # fmt: skip
    """Attention of packed sequences [parts, places, width] within each, by a function of ATTENTION that takes them
    padded. Places without a token get zeros."""
    padded = (unpack(states, layout) for states in (query, key, value))
    return pack(way(*padded, layout.mask, heads, dropout), layout)


def cpu_attention(
    query: Array, key: Array, value: Array, mask: Array, heads: int, dropout: AttentionDropout | None = None
) -> Array:
    """`dot_product_attention` for one CPU device: if a sequence has many scores, one after another, so that scores stay
    in the cache."""
    if dropout or query.shape[1] * heads * key.shape[1] < LONG:
        return dot_product_attention(query, key, value, mask, heads, dropout)
    return _attend_in_turn(*(_split(x, heads) for x in (query, key, value)), mask).reshape(query.shape)


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


def _attend_backward(residuals: tuple[Array, ...], cotangent: Array) -> tuple[Array, Array, Array, None]:
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

    gradients = jax.lax.map(one, (*residuals, cotangent))
    return *(gradient.astype(like.dtype) for gradient, like in zip(gradients, residuals[:3], strict=True)), None


_attend_in_turn.defvjp(_attend_forward, _attend_backward)


ATTENTION: dict[str, Callable[..., Array]] = {  # values of `BertConfig.attention`
    "xla": dot_product_attention,
    "cpu": cpu_attention,
    "cudnn": cudnn_attention,
    "tpu": tpu_attention,
}


def attend(
    way: str, mesh: Mesh | None, query: Array, key: Array, value: Array, mask: Array | Packing, heads: int,
    dropout: AttentionDropout | None = None,
) -> Array:  # fmt: skip
    """Attention of each sequence within itself. way: a key of ATTENTION; mesh: of the devices that have the arrays.

    With a layout in place of the mask keys and values are packed, and so are queries unless they are of few positions.
    """
    function = partial(tpu_attention, mesh=mesh) if way == "tpu" else ATTENTION[way]
    if not isinstance(mask, Packing) or (way == "tpu" and query.shape == key.shape):
        return function(query, key, value, mask, heads, dropout)
    if query.shape == key.shape:
        return packed_attention(function, query, key, value, mask, heads, dropout)
    return function(query, unpack(key, mask), unpack(value, mask), mask.mask, heads, dropout)


def select_attention(mesh: Mesh, dtype: Any) -> str:
    """The key of ATTENTION that suits the devices. Several CPU devices share a batch, which a loop over it would undo.
    dtype: of the matrix products."""
    device = mesh.devices.flat[0]
    if device.platform == "tpu":
        return "tpu"
    if device.platform == "cpu" and mesh.size == 1:
        return "cpu"
    fused = device.platform == "gpu" and dtype == jnp.bfloat16 and float(device.compute_capability) >= CAPABILITY
    return "cudnn" if fused else "xla"


# --- dropout, of hidden states and of attention's weights -------------------------------------------------------------
#
# A seed for each sequence (and head) decides what stays: a hash of that seed and of the number's place, nothing else.
# So padding, the mesh, and a kernel that never holds all weights change no draw, and the backward pass draws again what
# it did not keep. It costs a TPU less than the counter-based bits of `jax.random`, which we only take the seeds from.

UNITS = 2**32


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
        return jnp.where(keep_mask(seeds, states.shape, self.rate, rows=rows), scaled, jnp.zeros_like(states))


def dropout_seeds(key: Array, batch: int, heads: int) -> Array:
    """[batch, heads] uint32, of a key of `jax.random`."""
    return jax.random.bits(key, (batch, heads), jnp.uint32)


def keep_mask(
    seed: Array, shape: tuple[int, ...], rate: float, first: Array | int = 0, rows: Array | None = None
) -> Array:
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


# --- the TPU kernel ---------------------------------------------------------------------------------------------------
#
# One kernel (Pallas) keeps the scores of a sequence in a TPU's vector memory. It reads and writes hidden states as
# layers have them, [batch, length, width]: nothing is split into heads, padded or transposed before it. A block of work
# is one sequence and the heads that share 128 features, a register's lanes. For a product the lanes of the other heads
# are set to 0, which costs no more than a narrower product would, as the matrix unit is 128 wide. The backward pass
# computes the weights again, and needs nothing but what the forward pass was given.

Kernel = Callable[..., tuple[Array, ...]]
LANES = 128
TILE = 16  # rows of a tile of bfloat16 in a TPU's memory
LONGEST = 448  # tokens whose scores and gradients fit into a kernel's 16 MiB of vector memory in float32


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
    query: Array, key: Array, value: Array, bias: Array | Packing, seeds: Array, heads: int, rate: float,
    mesh: Mesh | None,
) -> Array:  # fmt: skip
    """Attend in one kernel.

    Args:
        query, key, value: [batch, length, width] of one dtype; or packed, [parts, places, width], of which a device has
            one part, and sequences begin at multiples of TILE.
        bias: [batch, 1, length] float32, added to scores; or the layout of packed sequences, each of which attends to
            itself.
        seeds: [batch, heads] uint32, of dropout.
        heads: their number.
        rate: of dropout.
        mesh: the devices that all this is spread over; None if one device has it.

    Returns:
        An array like `value`; zeros if no token is at a place.
    """
    return _forward(query, key, value, bias, seeds, heads, rate, mesh)[0]


def _forward(query: Array, key: Array, value: Array, bias: Any, seeds: Array, *static: Any) -> tuple[Array, Any]:
    (attended,) = _run(_attend, (query, key, value), bias, seeds, *static)
    return attended, (query, key, value, bias, seeds)


def _backward(heads: int, rate: float, mesh: Mesh | None, residuals: Any, cotangent: Array) -> tuple[Array | None, ...]:
    *states, bias, seeds = residuals
    return *_run(_differentiate, (*states, cotangent), bias, seeds, heads, rate, mesh), None, None


fused_attention.defvjp(_forward, _backward)


def _run(
    kernel: Kernel, states: tuple[Array, ...], bias: Array | Packing, seeds: Array, heads: int, rate: float,
    mesh: Mesh | None,
) -> tuple[Array, ...]:  # fmt: skip
    """Run a kernel on the part that each device has, because the compiler cannot divide a kernel. Its results have the
    shape and dtype of `states`."""
    size, results = states[0].shape[-1] // heads, 1 if kernel is _attend else 3
    of_states = ("batch", None, "heads")  # logical names of dimensions
    if isinstance(bias, Packing):
        longest = bias.mask.shape[1]
        call: Callable[..., Any] = partial(_call_packed, kernel, results, size, rate, longest)
        parted_seeds = seeds.reshape(*bias.starts.shape, -1)  # [parts, sequences, heads]
        arrays: tuple[Array, ...] = bias.starts, bias.lengths, parted_seeds, *states
        names: tuple[tuple[str | None, ...], ...] = ("batch",), ("batch",), of_states, *[of_states] * len(states)
    else:
        call = partial(_call, kernel, results, size, rate)
        arrays = seeds, *states[:3], bias, *states[3:]
        names = ("batch", "heads"), *[of_states] * 3, ("batch",), *[of_states] * len(states[3:])
    if mesh is not None and mesh.size > 1:
        taken = tuple(logical_sharding(mesh, *dimensions).spec for dimensions in names)
        given = (logical_sharding(mesh, *of_states).spec,) * results
        # Unchecked: what a kernel gives does not say over which devices it varies.
        call = jax.shard_map(call, mesh=mesh, in_specs=taken, out_specs=given, check_vma=False)
    outputs = call(*arrays)
    if isinstance(bias, Packing):  # a kernel leaves what was there before where no token is
        return tuple(jnp.where(bias.used[..., None], output, jnp.zeros_like(output)) for output in outputs)
    return tuple(outputs)


def _call(kernel: Kernel, results: int, size: int, rate: float, seeds: Array, *arrays: Array) -> Any:
    """Run a kernel for every sequence and group of heads. size: of a head; arrays: states [batch, length, width], with
    the bias as the fourth."""
    batch, length, width = arrays[0].shape
    groups = width // LANES
    of_states = pl.BlockSpec((None, length, LANES), lambda i, j: (i, 0, j))
    of_bias = pl.BlockSpec((None, 1, length), lambda i, j: (i, 0, 0))
    of_seeds = pl.BlockSpec((None, None, 1, LANES // size), lambda i, j: (i, j, 0, 0), memory_space=pltpu.SMEM)
    return pl.pallas_call(
        partial(_whole, kernel, len(arrays), size, rate),
        grid=(batch, groups),
        in_specs=[of_seeds, *(of_bias if array.shape[1] == 1 else of_states for array in arrays)],
        out_specs=(of_states,) * results,
        out_shape=tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays[:results]),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name=kernel.__name__.strip("_") + ("_and_drop" if rate else ""),
    )(seeds.reshape(batch, groups, 1, -1), *arrays)


def _call_packed(kernel: Kernel, results: int, size: int, rate: float, length: int, *arrays: Array) -> Any:
    """`_call` for packed sequences.

    length: of the longest sequence, whole tiles; arrays: starts and lengths [1, n], seeds [1, n, heads], then states
    [1, places, width] of the one part that a device has. The kernel's name says how many sequences there are and how
    long a window is, as a compiled program says it nowhere else.
    """
    starts, lengths, seeds, *states = (array[0] for array in arrays)
    sequences, (places, width) = len(seeds), states[0].shape
    groups = width // LANES

    def window(group: Any, sequence: Any, starts: Any, lengths: Any) -> tuple[Any, Any]:
        first = jnp.minimum(starts[sequence], places - length)
        return pl.multiple_of(first, TILE), pl.multiple_of(group * LANES, LANES)

    of_seeds = pl.BlockSpec((None, None, 1, LANES // size), lambda j, i, *_: (i, j, 0, 0), memory_space=pltpu.SMEM)
    around = pl.BlockSpec((pl.Element(length), pl.Element(LANES)), window)
    like = states[:results]
    outputs = pl.pallas_call(
        partial(_packed, kernel, len(states), size, rate),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(groups, sequences),
            in_specs=[of_seeds, *[around] * len(states)],
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * results,
            scratch_shapes=[
                *(pltpu.VMEM((2, length, LANES), array.dtype) for array in like),
                *[pltpu.SemaphoreType.DMA((2,))] * results,
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((places, width), array.dtype) for array in like],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="_".join((kernel.__name__.strip("_"), "packed", *(["and_drop"] if rate else []), f"{sequences}_{length}")),
    )(starts, lengths, seeds.reshape(sequences, groups, 1, -1), *states)
    return tuple(output[None] for output in outputs)


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
    """A kernel on a padded sequence. references: to `taken` arrays as of `_call`, and to the results."""
    states = [reference[...] for reference in references[:taken]]
    bias = states.pop(3)
    given = kernel(Work(seeds, bias, 0, size, rate), *states)
    for reference, result in zip(references[taken:], given, strict=True):
        reference[...] = result.astype(reference.dtype)


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
    return jnp.where(keep_mask(work.seeds[0, head], weights.shape, work.rate, work.first), weights, 0.0)


def _of_head(states: Array, head: int, size: int) -> Array:
    """States [length, 128] with zeros for the features of other heads."""
    lane = jax.lax.broadcasted_iota(jnp.int32, states.shape, 1)
    return jnp.where((lane >= head * size) & (lane < (head + 1) * size), states, jnp.zeros_like(states))


def _product(left: Array, left_axis: int, right: Array, right_axis: int) -> Array:
    """Of two matrices over the named axes, in float32; float32 ones are not rounded to bfloat16 first."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    axes = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, precision=precision, preferred_element_type=jnp.float32)
