"""Checksums of arrays that do not depend on how they are spread over devices or processes.

Two sums modulo 2³² over the bits of an array, one plain and one weighted by position: any single changed bit changes
the first, exchanged values change the second. Integer sums are exact in any order, so a checkpoint that one mesh saved
can be verified on another, without gathering anything. Not against malice.
"""

import hashlib
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

Array = jax.Array
Sums = dict[str, list[int]]
MIX = 2_654_435_761  # odd, about 2³² divided by the golden ratio
BLOCK = 1 << 16  # words summed at a time on the host, even: they and their weights stay in the cache


def checksums(tree: Any) -> Sums:
    """Path → [plain sum, weighted sum] of every array of a tree, on devices or on the host.

    Where arrays belong to several processes, every process has to call this.
    """
    arrays = named_arrays(tree)
    # A program for each shape: one for all the arrays of a state takes seconds to compile, at the first save of every
    # task. Accelerators get all of them before the first is waited for.
    on_devices = {name: _started(x) for name, x in arrays.items() if isinstance(x, jax.Array)}
    found = {name: np.asarray(pair).tolist() for name, pair in on_devices.items()}
    return {name: found[name] if name in found else _host_sums(x) for name, x in arrays.items()}


def named_arrays(tree: Any) -> dict[str, Any]:
    """Path → array of every array of a tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves if hasattr(x, "dtype")}


def mismatched(saved: Sums, found: Sums) -> list[str]:
    """Names whose sums are not those that were saved."""
    return [name for name, sums in found.items() if saved.get(name) != sums]


def arrays_digest(arrays: Mapping[str, NDArray], about: bytes = b"") -> str:
    """SHA-256 of arrays on the host by their names, and of what else belongs to them, in hexadecimal."""
    summary = hashlib.sha256(about)
    for name, array in sorted(arrays.items()):
        summary.update(f"{name} {array.dtype} {array.shape}".encode())
        summary.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return summary.hexdigest()


@jax.jit
def sums(x: Array) -> Array:
    """The two sums of an array, uint32 [2]."""
    words = _words(x)
    place = jnp.zeros((), jnp.uint32)
    for axis in range(words.ndim):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        place = place + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride)
    # One pass for both sums: as two, XLA would first write all the words and their products to memory.
    both = (words, words * (place * jnp.uint32(MIX) | 1))
    return jnp.stack(jax.lax.reduce(both, (jnp.uint32(0), jnp.uint32(0)), _add, tuple(range(words.ndim))))


def _started(x: Array) -> Array:
    """`sums` of an array under way. Several CPU devices share a pool of threads, in which programs that wait for one
    another would take each other's places for ever, and those of what makes the array: there one is done at a time."""
    devices = jax.tree.leaves(x.devices())
    alone = len(devices) > 1 and devices[0].platform == "cpu"
    if alone:
        x.block_until_ready()
    found = sums(x)
    return found.block_until_ready() if alone else found


def _add(sums: tuple[Array, Array], others: tuple[Array, Array]) -> tuple[Array, Array]:
    return sums[0] + others[0], sums[1] + others[1]


def _words(x: Array) -> Array:
    """The bits of every value as one uint32."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)


def _host_sums(x: NDArray) -> list[int]:
    flat = np.ascontiguousarray(x).reshape(-1)
    flat = flat.view(np.dtype(f"uint{8 * x.dtype.itemsize}"))
    weights = _weights()
    plain = weighted = 0
    for start in range(0, len(flat), BLOCK):
        words = flat[start : start + BLOCK].astype(np.uint32, copy=False)
        total = int(words.sum(dtype=np.uint32))
        plain += total
        # (start + i) · MIX | 1 = start · MIX + (i · MIX | 1), because start is even
        weighted += int((words * weights[: len(words)]).sum(dtype=np.uint32)) + start * MIX * total
    return [plain % 2**32, weighted % 2**32]


@cache
def _weights() -> NDArray[np.uint32]:
    """Of the first BLOCK words."""
    return (np.arange(BLOCK, dtype=np.uint64) * MIX).astype(np.uint32) | np.uint32(1)
