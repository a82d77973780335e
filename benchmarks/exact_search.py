"""How fast exact search on the devices is beside NumPy's float32 brute force, in the same run.

Vectors in clusters, as learnt towers give them; every way returns the same rows, which is checked. NumPy scores blocks
of the best of several sizes with all threads of its BLAS and keeps a running top-k with `argpartition`. Prints the
median time of each way and the ratio.

    python benchmarks/exact_search.py [--rows 1000000] [--width 128] [--k 8]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.mesh import make_mesh
from realm_jax.retrieval.exact import padded_rows, search

BLOCKS = (4_096, 16_384, 65_536, 262_144, 1_048_576)
QUERIES = (512, 64, 1)
REPEATS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--k", type=int, default=8)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(1000, args.width)).astype(np.float32)
    vectors = centres[rng.integers(0, 1000, args.rows)] + rng.normal(size=(args.rows, args.width)).astype(np.float32)
    mesh = make_mesh()
    padded = np.zeros((padded_rows(args.rows, mesh.size), args.width), np.float32)
    padded[: args.rows] = vectors
    on_device = jnp.asarray(padded)
    print(f"{args.rows:,} x {args.width} float32, k = {args.k}, {jax.devices()[0].device_kind}, {jax.__version__}")
    print(f"{'queries':>8} {'numpy ms':>10} {'block':>8} {'device ms':>10} {'block':>8} {'ratio':>7}")
    for count in QUERIES:
        queries = centres[rng.integers(0, 1000, count)] + rng.normal(size=(count, args.width)).astype(np.float32)
        expected = _numpy(queries, vectors, args.k, 65_536)
        ours = {}
        for block in BLOCKS:
            find = jax.jit(lambda q, v, block=block: search(mesh, q, v, args.rows, args.k, block).rows)
            found = np.asarray(find(queries, on_device))
            assert (found == expected).mean() > 0.999, "rows differ by more than rounding can"
            ours[block] = _median(find, queries, on_device)
        theirs = {block: _median(_numpy, queries, vectors, args.k, block) for block in BLOCKS}
        (a, numpy_ms), (b, device_ms) = (min(times.items(), key=lambda item: item[1]) for times in (theirs, ours))
        print(f"{count:8} {numpy_ms:10.1f} {a:8} {device_ms:10.1f} {b:8} {device_ms / numpy_ms:7.2f}", flush=True)


def _numpy(queries: NDArray[np.float32], vectors: NDArray[np.float32], k: int, block: int) -> NDArray[np.int64]:
    scores = np.zeros((len(queries), 0), np.float32)
    rows = np.zeros((len(queries), 0), np.int64)
    for start in range(0, len(vectors), block):
        part = queries @ vectors[start : start + block].T
        places = np.argpartition(-part, k - 1, axis=1)[:, :k]
        scores = np.concatenate([scores, np.take_along_axis(part, places, axis=1)], axis=1)
        rows = np.concatenate([rows, places + start], axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(rows, order, axis=1)


def _median(call: Callable[..., object], *arguments: object) -> float:
    """Milliseconds."""
    call(*arguments)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


if __name__ == "__main__":
    main()
