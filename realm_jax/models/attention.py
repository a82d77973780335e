"""Softmax attention in five implementations that give the same numbers, and the TPU kernel of one of them.

`attend` is the hook that layers call. `select_attention` chooses the implementation for the devices. Each takes
query [batch, positions, width], key and value [batch, length, width], where width = heads · head size, mask [batch,
length] bool, heads, and the dropout of its weights, and returns [batch, positions, width] in the dtype of `value`; the
softmax is float32.
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
from realm_jax.models.layers import Compute, keep_mask
from realm_jax.models.packing import TILE, Packing, Padded

Array = jax.Array
MASKED_BIAS = -1e9  # added to scores of tokens that may not be attended to; finite, so that gradients stay finite
MIN_LOOP_SCORES = 2**18  # scores of a sequence from which on a CPU attends in one sequence after another
MAX_HEAD_SIZE, MIN_CAPABILITY = 128, 8.0  # of a head and of a GPU that cuDNN's kernel takes everywhere
MIN_KERNEL_LENGTH = 16  # tokens of a sequence below which cuDNN is not called; not measured


class AttentionDropout(NamedTuple):
    """Dropout of attention weights.

    Attributes:
        rate: the probability that a weight becomes 0; the others are divided by 1 − rate.
        seeds: [batch, heads] uint32.
    """

    rate: float
    seeds: Array


def attend(
    compute: Compute, query: Array, key: Array, value: Array, layout: Padded | Packing, heads: int,
    dropout: AttentionDropout | None = None, bias: Array | None = None,
) -> Array:  # fmt: skip
    """Attend within each sequence. With a bias this is plain JAX, because no kernel takes one.

    Args:
        compute: selects the implementation and the mesh.
        query: [batch, positions, width]; packed like keys if all positions are computed.
        key: [batch, length, width], or packed, [parts, slots, width].
        value: like `key`.
        layout: layout of the sequences in keys and values.
        heads: attention heads.
        dropout: dropout of the weights; None for none.
        bias: added to scores, broadcasts to [batch, heads, positions, length]; None for none.

    Returns:
        An array like `query`.
    """
    is_tpu, is_self_attention = compute.attention == "tpu" and bias is None, query.shape == key.shape
    method = partial(tpu_attention, mesh=compute.mesh) if is_tpu else ATTENTION[compute.attention]
    if bias is not None:
        method = partial(dot_product_attention, bias=bias)
    if isinstance(layout, Packing) and is_self_attention:
        if is_tpu:
            return method(query, key, value, layout, heads, dropout)
        return packed_attention(method, query, key, value, layout, heads, dropout)
    return method(query, layout.unpack(key), layout.unpack(value), layout.mask, heads, dropout)


def select_attention(mesh: Mesh, dtype: Any) -> str:
    """Return the key of ATTENTION for the devices.

    Several CPU devices share a batch, which a loop over it would undo.

    Args:
        mesh: the devices.
        dtype: dtype of the matrix products.
    """
    device = mesh.devices.flat[0]
    if device.platform == "tpu":
        return "tpu"
    if device.platform == "cpu" and mesh.size == 1:
        return "cpu"
    is_fused = device.platform == "gpu" and dtype == jnp.bfloat16 and float(device.compute_capability) >= MIN_CAPABILITY
    return "cudnn" if is_fused else "xla"


# --- Implementations --------------------------------------------------------------------------------------------------


def dot_product_attention(
    query: Array, key: Array, value: Array, mask: Array, heads: int, dropout: AttentionDropout | None = None,
    bias: Array | None = None,
) -> Array:  # fmt: skip
    """Attend in plain JAX. Arguments and result: see the docstring of this module; for the bias see `attend`."""
    q, k, v = (_split_heads(x, heads) for x in (query, key, value))  # [batch, positions or length, heads, size]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    padding = jnp.where(mask[:, None, None, :], 0.0, MASKED_BIAS).astype(jnp.float32)  # [batch, 1, 1, length]
    scores = scores * q.shape[-1] ** -0.5 + padding  # [batch, heads, positions, length]
    weights = jax.nn.softmax(scores if bias is None else scores + bias, axis=-1)
    if dropout:
        keep = keep_mask(dropout.seeds[:, :, None, None], weights.shape, dropout.rate)
        weights = jnp.where(keep, weights / (1 - dropout.rate), 0.0)
    # For a result "bqhd", XLA on a CPU multiplies transposed weights, which triples the time of the product.
    return jnp.einsum("bhqk,bkhd->bhqd", weights.astype(value.dtype), v).swapaxes(1, 2).reshape(query.shape)


def _split_heads(states: Array, heads: int) -> Array:
    """Reshape [batch, length, width] to [batch, length, heads, size]."""
    return states.reshape(*states.shape[:2], heads, states.shape[2] // heads)


def packed_attention(
    method: Callable[..., Array], query: Array, key: Array, value: Array, layout: Packing, heads: int,
    dropout: AttentionDropout | None = None,
) -> Array:  # fmt: skip
    """Attend within packed sequences by a function of ATTENTION that takes them padded.

    Args:
        method: a function of ATTENTION.
        query: [parts, slots, width].
        key: like `query`.
        value: like `query`.
        layout: layout of the packed sequences.
        heads: attention heads.
        dropout: dropout of the weights; None for none.

    Returns:
        [parts, slots, width], zeros in unused slots.
    """
    padded = (layout.unpack(states) for states in (query, key, value))
    return layout.pack(method(*padded, layout.mask, heads, dropout))


def cudnn_attention(
    query: Array, key: Array, value: Array, mask: Array, heads: int, dropout: AttentionDropout | None = None
) -> Array:
    """Attend in one kernel of cuDNN that stores no scores: for NVIDIA GPUs, in bfloat16.

    We use plain attention for short sequences and the few queries of a last layer, which have few scores, and for
    dropout, because the kernel would draw other weights. Arguments and result: see the docstring of this module; a mask
    must be true on the first tokens only.
    """
    length, size = query.shape[1], query.shape[-1] // heads
    if dropout or length != key.shape[1] or length < MIN_KERNEL_LENGTH or size > MAX_HEAD_SIZE or size % 8:
        return dot_product_attention(query, key, value, mask, heads, dropout)
    lengths = jnp.maximum(mask.sum(axis=-1), 1)  # [batch]
    # JAX 0.11 refuses odd lengths as soon as there is a backward pass ("Unsupported sequence length Q 3, KV 3").
    even = (jnp.pad(x, ((0, 0), (0, length % 2), (0, 0))) for x in (query, key, value))
    split = (_split_heads(x, heads) for x in even)
    attended = jax.nn.dot_product_attention(*split, key_value_seq_lengths=lengths, implementation="cudnn")
    return attended[:, :length].reshape(query.shape)


def tpu_attention(
    query: Array, key: Array, value: Array, mask: Array | Packing, heads: int,
    dropout: AttentionDropout | None = None, mesh: Mesh | None = None,
) -> Array:  # fmt: skip
    """Attend in one kernel that keeps scores in a TPU's vector memory, if its shapes allow; else in plain JAX.

    Args:
        query: [batch, positions, width], or [parts, slots, width] if sequences are packed.
        key: [batch, length, width], or like a packed query.
        value: like `key`.
        mask: [batch, length] bool, or the layout of packed sequences.
        heads: attention heads.
        dropout: dropout of the weights; None for none.
        mesh: the devices over which the arrays are sharded; None for one device.

    Returns:
        An array like `query`.
    """
    bias: Array | Packing
    if isinstance(mask, Packing):
        if not fits_packed(query, mask.mask.shape, heads, mesh):
            return packed_attention(dot_product_attention, query, key, value, mask, heads, dropout)
        batch, bias = len(mask.mask), mask
    else:
        if not fits(query, key, heads, mesh):
            return dot_product_attention(query, key, value, mask, heads, dropout)
        batch = len(query)
        bias = jnp.where(mask, 0.0, MASKED_BIAS).astype(jnp.float32)[:, None, :]  # [batch, 1, length]
    seeds = dropout.seeds if dropout else jnp.zeros((batch, heads), jnp.uint32)
    return fused_attention(
        query, key, value, bias, seeds, KernelSettings(heads, dropout.rate if dropout else 0.0, mesh)
    )


def cpu_attention(
    query: Array, key: Array, value: Array, mask: Array, heads: int, dropout: AttentionDropout | None = None
) -> Array:
    """Attend on one CPU device. We loop over sequences with many scores, so that the scores stay in the cache.

    Arguments and result: see the docstring of this module.
    """
    if dropout or query.shape[1] * heads * key.shape[1] < MIN_LOOP_SCORES:
        return dot_product_attention(query, key, value, mask, heads, dropout)
    return _attend_in_turn(*(_split_heads(x, heads) for x in (query, key, value)), mask).reshape(query.shape)


@jax.custom_vjp
def _attend_in_turn(query: Array, key: Array, value: Array, mask: Array) -> Array:
    """Attend in one sequence after another, and compute the scores again in the backward pass.

    Query, key and value are [batch, positions or length, heads, size], mask [batch, length]. What a loop collects is
    float32: to add a bfloat16 row to the others, XLA converts them all to float32 and back on a CPU, which took as long
    as the rest (measured: `benchmarks/README.md`).
    """
    return _attend_forward(query, key, value, mask)[0]


def _scores(query: Array, key: Array, mask: Array) -> Array:
    """Return the scores of one sequence, [heads, positions, length] float32."""
    scores = jnp.einsum("qhd,khd->hqk", query, key, preferred_element_type=jnp.float32)
    return scores * query.shape[-1] ** -0.5 + jnp.where(mask, 0.0, MASKED_BIAS)


def _attend_forward(query: Array, key: Array, value: Array, mask: Array) -> tuple[Array, tuple[Array, ...]]:
    """Return the output and the residuals of the backward pass; of the scores only their log-sum-exp."""

    def attend_in_sequence(entry: tuple[Array, ...]) -> tuple[Array, Array]:
        query, key, value, mask = entry
        scores = _scores(query, key, mask)  # [heads, positions, length]
        top = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        attended = jnp.einsum("hqk,khd->qhd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
        return attended / total[..., 0].T[..., None], top + jnp.log(total)  # after the product, which is smaller

    attended, log_total = jax.lax.map(attend_in_sequence, (query, key, value, mask))
    attended = attended.astype(value.dtype)
    return attended, (query, key, value, mask, attended, log_total)


def _attend_backward(residuals: tuple[Array, ...], cotangent: Array) -> tuple[Array, Array, Array, None]:
    """Return the gradients of query, key and value.

    That of a softmax s of scores is s · (g − Σ s g); Σ s g is the output's product with its cotangent.
    """

    def differentiate_sequence(entry: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        query, key, value, mask, attended, log_total, cotangent = entry
        weights = jnp.exp(_scores(query, key, mask) - log_total)
        weight_gradient = jnp.einsum("qhd,khd->hqk", cotangent, value, preferred_element_type=jnp.float32)
        mean = (cotangent.astype(jnp.float32) * attended).sum(axis=-1).T[..., None]
        score_gradient = (weights * (weight_gradient - mean) * query.shape[-1] ** -0.5).astype(query.dtype)
        return (
            jnp.einsum("hqk,khd->qhd", score_gradient, key, preferred_element_type=jnp.float32),
            jnp.einsum("hqk,qhd->khd", score_gradient, query, preferred_element_type=jnp.float32),
            jnp.einsum("hqk,qhd->khd", weights.astype(value.dtype), cotangent, preferred_element_type=jnp.float32),
        )

    gradients = jax.lax.map(differentiate_sequence, (*residuals, cotangent))
    return *(gradient.astype(like.dtype) for gradient, like in zip(gradients, residuals[:3], strict=True)), None


_attend_in_turn.defvjp(_attend_forward, _attend_backward)


ATTENTION: dict[str, Callable[..., Array]] = {  # values of `Compute.attention`
    "xla": dot_product_attention,
    "cpu": cpu_attention,
    "cudnn": cudnn_attention,
    "tpu": tpu_attention,
}


# --- The TPU kernel ---------------------------------------------------------------------------------------------------
#
# One kernel (Pallas) keeps the scores of a sequence in a TPU's vector memory. It reads and writes hidden states as
# layers have them, [batch, length, width]: nothing is split into heads, padded or transposed before it. A block of work
# is one sequence and the heads that share 128 features, a register's lanes. For a product the lanes of the other heads
# are set to 0, which costs no more than a narrower product would, as the matrix unit is 128 wide. The backward pass
# computes the weights again from the inputs of the forward pass, so nothing else is stored.

Kernel = Callable[..., tuple[Array, ...]]
LANES = 128
MAX_LENGTH = 448  # tokens whose scores and gradients fit into a kernel's 16 MiB of vector memory in float32


def fits(query: Array | jax.ShapeDtypeStruct, key: Array | jax.ShapeDtypeStruct, heads: int, mesh: Mesh | None) -> bool:
    """Return True if the kernel takes padded sequences.

    It takes as many queries as keys, if every device has complete sequences and complete groups of 128 features.

    Args:
        query: [batch, positions, width].
        key: [batch, length, width].
        heads: attention heads.
        mesh: None for one device.
    """
    batch, length, width = key.shape
    feature_parts, batch_shares = (mesh.shape["model"], batch_parts(mesh)) if mesh else (1, 1)
    in_groups = LANES % (width // heads) == 0 and width % (LANES * feature_parts) == 0
    return in_groups and batch % batch_shares == 0 and query.shape[1] == length <= MAX_LENGTH


def fits_packed(packed: Array, padded: tuple[int, ...], heads: int, mesh: Mesh | None) -> bool:
    """Return True if the kernel takes packed sequences.

    It does if every device has one part, with room for the longest sequence in complete tiles.

    Args:
        packed: [parts, slots, width].
        padded: batch and length.
        heads: attention heads.
        mesh: None for one device.
    """
    parts, slots, width = packed.shape
    states = jax.ShapeDtypeStruct((*padded, width), packed.dtype)
    has_part_per_device = parts == (batch_parts(mesh) if mesh else 1)
    return has_part_per_device and padded[1] % TILE == 0 and padded[1] <= slots and fits(states, states, heads, mesh)


class KernelSettings(NamedTuple):
    """Values that are compiled into the kernel.

    Attributes:
        heads: attention heads.
        rate: rate of dropout.
        mesh: the devices that the arrays are spread over; None for one.
    """

    heads: int
    rate: float
    mesh: Mesh | None


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def fused_attention(
    query: Array, key: Array, value: Array, bias: Array | Packing, seeds: Array, settings: KernelSettings
) -> Array:
    """Attend in one kernel.

    Args:
        query: [batch, length, width]; or packed, [parts, slots, width], of which a device has one part, and sequences
            begin at multiples of TILE.
        key: like `query`.
        value: like `query`.
        bias: [batch, 1, length] float32, added to scores; or the layout of packed sequences, each of which attends to
            itself.
        seeds: seeds of dropout, [batch, heads] uint32.
        settings: heads, dropout and mesh.

    Returns:
        An array like `value`; zeros in unused slots.
    """
    return _forward(query, key, value, bias, seeds, settings)[0]


def _forward(
    query: Array, key: Array, value: Array, bias: Any, seeds: Array, settings: KernelSettings
) -> tuple[Array, Any]:
    (attended,) = _run(_attend, (query, key, value), bias, seeds, settings)
    return attended, (query, key, value, bias, seeds)


def _backward(settings: KernelSettings, residuals: Any, cotangent: Array) -> tuple[Array | None, ...]:
    *states, bias, seeds = residuals
    return *_run(_differentiate, (*states, cotangent), bias, seeds, settings), None, None


fused_attention.defvjp(_forward, _backward)


def _run(
    kernel: Kernel, states: tuple[Array, ...], bias: Array | Packing, seeds: Array, settings: KernelSettings
) -> tuple[Array, ...]:
    """Run a kernel on the part that each device has, because the compiler cannot divide a kernel.

    Results have the shape and dtype of `states`.
    """
    heads, rate, mesh = settings
    size, results = states[0].shape[-1] // heads, 1 if kernel is _attend else 3
    state_axes = ("batch", None, "heads")  # logical names of dimensions
    if isinstance(bias, Packing):
        longest = bias.mask.shape[1]
        call: Callable[..., Any] = partial(_call_packed, kernel, results, size, rate, longest)
        seeds_of_parts = seeds.reshape(*bias.starts.shape, -1)  # [parts, sequences, heads]
        arrays: tuple[Array, ...] = bias.starts, bias.lengths, seeds_of_parts, *states
        names: tuple[tuple[str | None, ...], ...] = ("batch",), ("batch",), state_axes, *[state_axes] * len(states)
    else:
        call = partial(_call, kernel, results, size, rate)
        arrays = seeds, *states[:3], bias, *states[3:]
        names = ("batch", "heads"), *[state_axes] * 3, ("batch",), *[state_axes] * len(states[3:])
    if mesh is not None and mesh.size > 1:
        in_specs = tuple(logical_sharding(mesh, *dimensions).spec for dimensions in names)
        out_specs = (logical_sharding(mesh, *state_axes).spec,) * results
        # Unchecked: results of a kernel do not say over which devices they vary.
        call = jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    outputs = call(*arrays)
    if isinstance(bias, Packing):  # a kernel writes nothing into unused slots
        return tuple(jnp.where(bias.used[..., None], output, jnp.zeros_like(output)) for output in outputs)
    return tuple(outputs)


def _call(kernel: Kernel, results: int, size: int, rate: float, seeds: Array, *arrays: Array) -> Any:
    """Run a kernel for every sequence and group of heads.

    size: size of a head. arrays: states [batch, length, width], with the bias as the fourth.
    """
    batch, length, width = arrays[0].shape
    groups = width // LANES
    state_block = pl.BlockSpec((None, length, LANES), lambda i, j: (i, 0, j))
    bias_block = pl.BlockSpec((None, 1, length), lambda i, j: (i, 0, 0))
    seed_block = pl.BlockSpec((None, None, 1, LANES // size), lambda i, j: (i, j, 0, 0), memory_space=pltpu.SMEM)
    return pl.pallas_call(
        partial(_run_padded, kernel, len(arrays), size, rate),
        grid=(batch, groups),
        in_specs=[seed_block, *(bias_block if array.shape[1] == 1 else state_block for array in arrays)],
        out_specs=(state_block,) * results,
        out_shape=tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays[:results]),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name=kernel.__name__.strip("_") + ("_and_drop" if rate else ""),
    )(seeds.reshape(batch, groups, 1, -1), *arrays)


def _call_packed(kernel: Kernel, results: int, size: int, rate: float, length: int, *arrays: Array) -> Any:
    """Run a kernel like `_call` for packed sequences.

    length: length of the longest sequence, in whole tiles. arrays: starts and lengths [1, n], seeds [1, n, heads], then
        states
    [1, slots, width] of the one part that a device has. The kernel's name says how many sequences there are and how
    long a window is, as a compiled program says it nowhere else.
    """
    starts, lengths, seeds, *states = (array[0] for array in arrays)
    sequences, (slots, width) = len(seeds), states[0].shape
    groups = width // LANES

    def window(group: Any, sequence: Any, starts: Any, lengths: Any) -> tuple[Any, Any]:
        first = jnp.minimum(starts[sequence], slots - length)
        return pl.multiple_of(first, TILE), pl.multiple_of(group * LANES, LANES)

    seed_block = pl.BlockSpec((None, None, 1, LANES // size), lambda j, i, *_: (i, j, 0, 0), memory_space=pltpu.SMEM)
    window_block = pl.BlockSpec((pl.Element(length), pl.Element(LANES)), window)
    like = states[:results]
    outputs = pl.pallas_call(
        partial(_run_packed, kernel, len(states), size, rate),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(groups, sequences),
            in_specs=[seed_block, *[window_block] * len(states)],
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * results,
            scratch_shapes=[
                *(pltpu.VMEM((2, length, LANES), array.dtype) for array in like),
                *[pltpu.SemaphoreType.DMA((2,))] * results,
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((slots, width), array.dtype) for array in like],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="_".join((kernel.__name__.strip("_"), "packed", *(["and_drop"] if rate else []), f"{sequences}_{length}")),
    )(starts, lengths, seeds.reshape(sequences, groups, 1, -1), *states)
    return tuple(output[None] for output in outputs)


class Work(NamedTuple):
    """Inputs of a kernel in addition to the states [length, 128] of a sequence and a group of heads.

    Attributes:
        seeds: a reference, [1, heads of the group].
        bias: added to scores, [1, length] float32.
        first: the row of the sequence's first token.
        size: size of a head.
        rate: rate of dropout.
    """

    seeds: Any
    bias: Array
    first: Array | int
    size: int
    rate: float


def _run_padded(kernel: Kernel, inputs: int, size: int, rate: float, seeds: Any, *references: Any) -> None:
    """Run a kernel on a padded sequence. references: to `inputs` arrays of `_call`, and to the results."""
    states = [reference[...] for reference in references[:inputs]]
    bias = states.pop(3)
    results = kernel(Work(seeds, bias, 0, size, rate), *states)
    for reference, result in zip(references[inputs:], results, strict=True):
        reference[...] = result.astype(reference.dtype)


def _run_packed(
    kernel: Kernel, inputs: int, size: int, rate: float, starts: Any, lengths: Any, seeds: Any, *references: Any
) -> None:
    """Run a kernel on a packed sequence.

    Its states come with their neighbors in a window. Only its own rows are written, in copies of 2ⁿ tiles, while the
    kernel computes the next sequence.

    references: to the input states; to all of the results, in the device's memory; last, buffers [2, length, 128] and
    semaphores [2] of each.
    """
    group, current, sequences = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    outputs = (len(references) - inputs) // 3
    targets, buffers, semaphores = (references[inputs + i * outputs : inputs + (i + 1) * outputs] for i in range(3))
    window, slots = buffers[0].shape[1], targets[0].shape[0]

    def copies(sequence: Any) -> Iterator[tuple[Any, Any]]:
        """Yield each copy with True if it is needed."""
        buffer_index, start = jax.lax.rem(sequence, 2), starts[sequence]
        first = start - jnp.minimum(start, slots - window)
        tiles = jax.lax.div(lengths[sequence] + TILE - 1, TILE)
        for power in reversed(range((window // TILE).bit_length())):
            done, rows = (tiles >> (power + 1) << (power + 1)) * TILE, TILE << power
            source, target = (pl.ds(pl.multiple_of(at + done, TILE), rows) for at in (first, start))
            lanes = pl.ds(pl.multiple_of(group * LANES, LANES), LANES)
            for buffer, array, semaphore in zip(buffers, targets, semaphores, strict=True):
                source_rows, target_rows = buffer.at[buffer_index, source], array.at[target, lanes]
                copy = pltpu.make_async_copy(source_rows, target_rows, semaphore.at[buffer_index])
                yield (tiles >> power) & 1 == 1, copy

    def finish(sequence: Any) -> None:
        for is_needed, copy in copies(sequence):
            pl.when(is_needed)(copy.wait)

    pl.when(current >= 2)(lambda: finish(current - 2))
    start = starts[current]
    first = start - jnp.minimum(start, slots - window)
    position = jax.lax.broadcasted_iota(jnp.int32, (1, window), 1) - first
    bias = jnp.where((position >= 0) & (position < lengths[current]), 0.0, MASKED_BIAS)
    states = [reference[...] for reference in references[:inputs]]
    row = jax.lax.broadcasted_iota(jnp.int32, states[0].shape, 0) - first
    in_sequence = (row >= 0) & (row < lengths[current])
    # The window has queries of other sequences too, which move no key or value of this one.
    states[3:] = [jnp.where(in_sequence, cotangent, jnp.zeros_like(cotangent)) for cotangent in states[3:]]
    results = kernel(Work(seeds, bias, first, size, rate), *states)
    for buffer, result in zip(buffers, results, strict=True):
        buffer[jax.lax.rem(current, 2)] = result.astype(buffer.dtype)
    for is_needed, copy in copies(current):
        pl.when(is_needed)(copy.start)

    @pl.when(current == sequences - 1)
    def _() -> None:
        pl.when(current >= 1)(lambda: finish(current - 1))
        finish(current)


def _attend(work: Work, query: Array, key: Array, value: Array) -> tuple[Array]:
    """Compute softmax(query keyᵀ / √size + bias) value."""
    total = jnp.zeros(query.shape, jnp.float32)
    for head in range(LANES // work.size):
        weights, row_sum = _exponentials(work, _of_head(query, head, work.size), key)
        weights = _drop(work, weights, head)
        attended = _product(weights.astype(value.dtype), 1, _of_head(value, head, work.size), 0)
        total += attended / (row_sum * (1 - work.rate))
    return (total,)


def _differentiate(work: Work, query: Array, key: Array, value: Array, cotangent: Array) -> tuple[Array, Array, Array]:
    """Compute the gradients of `_attend`.

    That of a softmax s of scores is s · (g − Σ s g), where g is the weights' gradient after dropout. The sum is over
    whole rows in float32: taken from the output instead, as is usual if rows come in parts, it would have the output's
    rounding.
    """
    size, stays = work.size, 1 - work.rate
    totals = [jnp.zeros(query.shape, jnp.float32)] * 3
    for head in range(LANES // size):
        q, g = _of_head(query, head, size), _of_head(cotangent, head, size)
        weights, row_sum = _exponentials(work, q, key)
        weights = weights * (1 / row_sum)
        used = _drop(work, weights, head)
        weight_gradient = used * _product(g, 1, value, 1)
        score_gradient = weight_gradient - weights * weight_gradient.sum(axis=-1, keepdims=True)
        score_gradient = (score_gradient * (size**-0.5 / stays)).astype(query.dtype)
        gradients = (
            _product(score_gradient, 1, _of_head(key, head, size), 0),
            _product(score_gradient, 0, q, 0),
            _product(used.astype(value.dtype), 0, g, 0) / stays,
        )
        totals = [total + gradient for total, gradient in zip(totals, gradients, strict=True)]
    return totals[0], totals[1], totals[2]


def _exponentials(work: Work, query: Array, key: Array) -> tuple[Array, Array]:
    """Return a softmax before its division, [positions, length] float32, and the sum of each row."""
    scores = _product(query, 1, key, 1) * work.size**-0.5 + work.bias
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights, weights.sum(axis=-1, keepdims=True)


def _drop(work: Work, weights: Array, head: int) -> Array:
    """Set the weights that drop out to zero; the others stay as they are."""
    if not work.rate:
        return weights
    return jnp.where(keep_mask(work.seeds[0, head], weights.shape, work.rate, work.first), weights, 0.0)


def _of_head(states: Array, head: int, size: int) -> Array:
    """Return states [length, 128] with zeros for the features of other heads."""
    lane = jax.lax.broadcasted_iota(jnp.int32, states.shape, 1)
    return jnp.where((lane >= head * size) & (lane < (head + 1) * size), states, jnp.zeros_like(states))


def _product(a: Array, a_axis: int, b: Array, b_axis: int) -> Array:
    """Multiply two matrices over the named axes, in float32; float32 ones are not rounded to bfloat16 first."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)
