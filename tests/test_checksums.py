"""Checksums of trees of arrays: the same on any devices, another for any changed bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from realm_jax import checksums as module
from realm_jax.checksums import checksums, mismatched
from realm_jax.mesh import logical_sharding, make_mesh

RNG = np.random.default_rng(0)
ARRAYS = {
    "float32": RNG.normal(size=(16, 3, 5)).astype(np.float32),
    "bfloat16": RNG.normal(size=(8, 4)).astype(ml_dtypes.bfloat16),
    "int32": RNG.integers(-9, 9, 24).astype(np.int32),
    "uint16": RNG.integers(0, 9, (8, 3)).astype(np.uint16),
    "scalar": np.float32(3.5),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_host_and_devices_agree(name, monkeypatch):
    array = np.asarray(ARRAYS[name])
    on_host = checksums({"x": array})
    assert checksums({"x": jnp.asarray(array)}) == on_host
    if array.ndim:
        spread = jax.device_put(array, logical_sharding(make_mesh(-1), "batch", *[None] * (array.ndim - 1)))
        assert checksums({"x": spread}) == on_host
    monkeypatch.setattr(module, "BLOCK", 6)
    assert checksums({"x": array}) == on_host


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32", "uint16"])
def test_any_flipped_bit_is_noticed(name):
    array = ARRAYS[name]
    before = checksums({"x": array})
    for bit in range(8 * array.dtype.itemsize):
        raw = bytearray(array.tobytes())
        place = int(RNG.integers(array.size)) * array.dtype.itemsize + bit // 8
        raw[place] ^= 1 << bit % 8
        changed = np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)
        assert mismatched(before, checksums({"x": jnp.asarray(changed)})) == ["x"]


def test_exchanged_values_and_other_places_are_noticed():
    array = np.arange(12, dtype=np.float32)
    before = checksums({"a": {"b": array}, "c": array})
    assert set(before) == {"a.b", "c"} and before["a.b"] == before["c"]
    swapped = array.copy()
    swapped[[2, 7]] = swapped[[7, 2]]
    assert mismatched(before, checksums({"a": {"b": swapped}, "c": array})) == ["a.b"]
    assert mismatched(before, checksums({"a": {"b": array[::-1]}})) == ["a.b"]


def test_what_is_no_array_is_left_out():
    assert checksums({"x": ..., "y": np.float32(1.0)}).keys() == {"y"}


def test_no_copy_of_what_is_summed_is_made():
    array = jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    needed = module.sums.lower(array).compile().memory_analysis()
    assert needed is not None and needed.temp_size_in_bytes < 10_000
