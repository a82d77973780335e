"""Checksums of arrays that do not depend on how the arrays are sharded.

Two sums modulo 2³² over the bits of an array, one plain and one weighted by position: any single changed bit changes
the first, exchanged values change the second. Integer sums are exact in any order, so a checkpoint that one mesh saved
can be verified on another, without gathering anything. They do not protect against malicious changes.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

Array = jax.Array
Sums = dict[str, list[int]]
MIX = 2_654_435_761  # odd, about 2³² divided by the golden ratio
BLOCK = 1 << 16  # words summed at a time on the host: they stay in the cache


def checksums(tree: Any) -> Sums:
    """Return path → [plain sum, weighted sum] of every array of a tree, on devices or on the host.

    If arrays are sharded over several processes, every process has to call this.
    """
    tree_sums = Sums()
    for name, array in named_arrays(tree).items():
        if isinstance(array, jax.Array):
            # A program for each shape: one for all takes seconds to compile. Several CPU devices share a pool of
            # threads, in which programs that wait for each other could block all threads forever.
            array.block_until_ready()
            tree_sums[name] = np.asarray(sums(array)).tolist()
            continue
        # On the host, BLOCK words at a time.
        words = np.ascontiguousarray(array).reshape(-1).view(np.dtype(f"uint{8 * array.dtype.itemsize}"))
        total = np.zeros(2, np.uint32)
        for start in range(0, len(words), BLOCK):
            block = words[start : start + BLOCK].astype(np.uint32)
            positions = np.arange(start, start + len(block), dtype=np.uint64).astype(np.uint32)
            weighted = block * (positions * np.uint32(MIX) | np.uint32(1))
            total += np.array([block.sum(dtype=np.uint32), weighted.sum(dtype=np.uint32)])
        tree_sums[name] = total.tolist()
    return tree_sums


def named_arrays(tree: Any) -> dict[str, Any]:
    """Return path → array for every array of a tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves if hasattr(x, "dtype")}


def mismatched(saved: Sums, current: Sums) -> list[str]:
    """Return the names of arrays whose checksums have changed.

    Args:
        saved: checksums that were saved.
        current: checksums of the arrays now.
    """
    return [name for name, sums in current.items() if saved.get(name) != sums]


def arrays_digest(arrays: Mapping[str, NDArray], about: bytes = b"") -> str:
    """Return the SHA-256 of named arrays on the host, in hexadecimal.

    Args:
        arrays: by name.
        about: other bytes to include.
    """
    summary = hashlib.sha256(about)
    for name, array in sorted(arrays.items()):
        summary.update(f"{name} {array.dtype} {array.shape}".encode())
        summary.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return summary.hexdigest()


@jax.jit
def sums(x: Array) -> Array:
    """Return the two sums of an array, uint32 [2]: Σ w and Σ w · (i · MIX | 1) over its words w at positions i."""
    dtype = jnp.uint32 if x.dtype == jnp.bool_ else jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    words = (x if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, dtype)).astype(jnp.uint32)
    position = jnp.zeros((), jnp.uint32)
    for axis in range(words.ndim):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        position = position + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride)
    # One pass for both sums: as two, XLA would first write all the words and their products to memory.
    both, zero = (words, words * (position * jnp.uint32(MIX) | 1)), jnp.uint32(0)
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])  # noqa: E731
    return jnp.stack(jax.lax.reduce(both, (zero, zero), add, tuple(range(words.ndim))))
