"""Softmax attention as one kernel (Pallas) that keeps the scores of a sequence in a TPU's vector memory.

It reads and writes hidden states as layers have them, [batch, length, width]: nothing is split into heads, padded or
transposed before it. A block of work is one sequence and the heads that share 128 features, a register's lanes. For a
product the lanes of the other heads are set to 0, which costs no more than a narrower product would, as the matrix unit
is 128 wide. The backward pass computes the weights again, and needs nothing but what the forward pass was given.

Read next: `attention.py`, whose other functions give the same numbers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from realm_jax.mesh import batch_parts, logical_sharding
from realm_jax.models.dropout import kept

Array = jax.Array
Residuals = tuple[Array, ...]
LANES = 128
LONGEST = 448  # tokens whose scores and gradients fit into a kernel's 16 MiB of vector memory in float32
# Logical names of the dimensions of what a kernel takes and gives.
SEEDS, STATES, BIAS = ("batch", "heads"), ("batch", None, "heads"), ("batch",)


def fits(query: Array, key: Array, heads: int, mesh: Mesh | None) -> bool:
    """Whether the kernel takes these [batch, positions or length, width]: as many queries as keys, of which every
    device has whole sequences and whole groups of 128 features."""
    batch, length, width = key.shape
    parts, spread = (mesh.shape["model"], batch_parts(mesh)) if mesh else (1, 1)
    in_groups = LANES % (width // heads) == 0 and width % (LANES * parts) == 0
    return in_groups and batch % spread == 0 and query.shape[1] == length <= LONGEST


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


def _on_every_device(call: Callable[..., Any], mesh: Mesh | None, taken: Any, given: Any) -> Callable[..., Any]:
    """`call` on the part that each device has, as the compiler cannot divide a kernel. taken, given: logical names."""
    if mesh is None or mesh.size == 1:
        return call
    specs = [tuple(logical_sharding(mesh, *names).spec for names in side) for side in (taken, given)]
    # Unchecked: what a kernel gives does not say over which devices it varies.
    return jax.shard_map(call, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)


def _call(
    kernel: Callable[..., None], size: int, rate: float, arrays: tuple[Array, ...], like: tuple[Array, ...]
) -> Any:
    """Run a kernel for every sequence and group of heads. size: of a head; arrays: seeds, then states [batch, length,
    width] and what is added to scores; like: of which shapes and dtypes the results are."""
    seeds, (batch, length, width) = arrays[0], arrays[1].shape
    groups = width // LANES
    states = pl.BlockSpec((None, length, LANES), lambda i, j: (i, 0, j))
    added = pl.BlockSpec((None, 1, length), lambda i, j: (i, 0, 0))
    own = pl.BlockSpec((None, None, 1, LANES // size), lambda i, j: (i, j, 0, 0), memory_space=pltpu.SMEM)
    return pl.pallas_call(
        partial(kernel, size=size, rate=rate),
        grid=(batch, groups),
        in_specs=[own, *(added if array.shape[1] == 1 else states for array in arrays[1:])],
        out_specs=(states,) * len(like),
        out_shape=tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in like),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name=kernel.__name__.strip("_") + ("_and_drop" if rate else ""),
    )(seeds.reshape(batch, groups, 1, -1), *arrays[1:])


# --- the kernels: references to a block of each array; all of one sequence and group of heads -------------------------


def _attend(seeds: Any, query: Any, key: Any, value: Any, bias: Any, attended: Any, *, size: int, rate: float) -> None:
    """attended: softmax(query keyᵀ / √size + bias) value."""
    total = jnp.zeros(query.shape, jnp.float32)
    for head in range(LANES // size):
        weights, row = _exponentials(_of_head(query[...], head, size), key[...], bias[...], size)
        weights = _left(weights, seeds, head, rate)
        total += _product(weights.astype(value.dtype), 1, _of_head(value[...], head, size), 0) / (row * (1 - rate))
    attended[...] = total.astype(attended.dtype)


def _differentiate(
    seeds: Any, query: Any, key: Any, value: Any, bias: Any, cotangent: Any,
    of_query: Any, of_key: Any, of_value: Any, *, size: int, rate: float,
) -> None:  # fmt: skip
    """The gradients of `_attend`. That of a softmax s of scores is s · (g − Σ s g), where g is what dropout leaves of
    the weights' gradient. The sum is over whole rows in float32: taken from the output instead, as is usual where rows
    come in parts, it would have the output's rounding."""
    totals = [jnp.zeros(query.shape, jnp.float32)] * 3
    for head in range(LANES // size):
        q, g = _of_head(query[...], head, size), _of_head(cotangent[...], head, size)
        weights, row = _exponentials(q, key[...], bias[...], size)
        weights = weights * (1 / row)
        used = _left(weights, seeds, head, rate)
        of_weights = used * _product(g, 1, value[...], 1)
        of_scores = of_weights - weights * of_weights.sum(axis=-1, keepdims=True)
        of_scores = (of_scores * (size**-0.5 / (1 - rate))).astype(query.dtype)
        found = (
            _product(of_scores, 1, _of_head(key[...], head, size), 0),
            _product(of_scores, 0, q, 0),
            _product(used.astype(value.dtype), 0, g, 0) / (1 - rate),
        )
        totals = [total + one for total, one in zip(totals, found, strict=True)]
    for reference, total in zip((of_query, of_key, of_value), totals, strict=True):
        reference[...] = total.astype(reference.dtype)


def _exponentials(query: Array, key: Array, bias: Array, size: int) -> tuple[Array, Array]:
    """A softmax before it is divided, [positions, length] float32, and the sum of each row."""
    scores = _product(query, 1, key, 1) * size**-0.5 + bias
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights, weights.sum(axis=-1, keepdims=True)


def _left(weights: Array, seeds: Any, head: int, rate: float) -> Array:
    """Weights with zeros for those that drop out; the others as they are."""
    return jnp.where(kept(seeds[0, head], weights.shape, rate), weights, 0.0) if rate else weights


def _of_head(states: Array, head: int, size: int) -> Array:
    """States [length, 128] with zeros for the features of other heads."""
    lane = jax.lax.broadcasted_iota(jnp.int32, states.shape, 1)
    return jnp.where((lane >= head * size) & (lane < (head + 1) * size), states, jnp.zeros_like(states))


def _product(left: Array, left_axis: int, right: Array, right_axis: int) -> Array:
    """Of two matrices over the named axes, in float32; float32 ones are not rounded to bfloat16 first."""
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    axes = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, precision=precision, preferred_element_type=jnp.float32)
