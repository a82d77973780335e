"""Estimate the time of the parts of a BERT layer on a TPU, forward and backward, one way against another.

No TPU is needed. We compile two layers for one chip's share of the reader in a step of `realm_wiki` on 64 chips, and
print the compiler's cycles. Those of operations without a matrix product are marked as invalid by the compiler, so the
table has them apart, and the time in which memory passes their data. Kernels of attention have no estimate and are not
included (`tpu_attention.py`).

    pip install -e '.[tpu]' -c realm_jax/launch/image-lock.txt
    python benchmarks/tpu_layer.py [WAY …] [--chip v5e:2x2]                    fused+ones: two ways at once
"""

import argparse
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import normalization
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from realm_jax.flops import chip
from realm_jax.launch.cost import program_cost
from realm_jax.launch.plan import devices_to_compile_for
from realm_jax.models import bert, layers
from realm_jax.models.packing import TILE, packing

SEQUENCES, LENGTH = 56, 384  # a chip's reader inputs in that step
LAYERS = 2
SIZES = layers.BertConfig(30_522, layers=LAYERS, dropout=0.1, compute=layers.Compute(jnp.bfloat16, None, "tpu", "dots"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=list(WAYS), metavar="WAY", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--chip", default="v5e:2x2")
    args = parser.parse_args()
    if unknown := {part for way in args.ways for part in way.split("+")} - {*WAYS}:
        parser.error(f"{', '.join(unknown)}: is none of {', '.join(WAYS)}")
    device = devices_to_compile_for(args.chip)[0]
    accelerator = chip(device.device_kind)
    assert accelerator is not None
    print(f"{SEQUENCES} sequences of {LENGTH}, bfloat16, dropout 0.1; ms for a layer on {args.chip.partition(':')[0]}")
    print("| way | with a matrix product | others | the least for others | stored, MB | compiled in, s |")
    print("|---|---|---|---|---|---|", flush=True)
    for way in args.ways:
        began = time.monotonic()
        with ExitStack() as stack:
            for part in way.split("+"):
                stack.enter_context(WAYS[part]())
            program = compiled(device)
        cost = program_cost(program.as_text())
        times = [cycles / accelerator.clock for cycles in (cost.cycles, cost.invalid_cycles)]
        times.append(cost.invalid_bytes / accelerator.bandwidth)
        cells = [f"{1e3 * seconds / LAYERS:.2f}" for seconds in times]
        cells += [f"{program.memory_analysis().temp_size_in_bytes / 1e6:.0f}", f"{time.monotonic() - began:.0f}"]
        print(f"| {way} | {' | '.join(cells)} |", flush=True)


def compiled(device: jax.Device) -> Any:
    """Return the compiled gradients of the layers' inputs and parameters."""
    sharding = NamedSharding(Mesh([device], ("one",)), PartitionSpec())
    layer = nn.remat(bert.Layer, policy=bert.REMAT["dots"])

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x: Any, mask: jax.Array, numbers: jax.Array) -> Any:
            layout = packing(mask, 1, SEQUENCES * LENGTH, TILE)
            for number in range(LAYERS):
                x = layer(SIZES, name=f"layer_{number}")(x, x, layout, numbers)
            return x

    def gradients(params: Any, x: jax.Array, mask: jax.Array, numbers: jax.Array, key: jax.Array, dy: jax.Array) -> Any:
        def apply(params: Any, x: jax.Array) -> Any:
            return Layers().apply({"params": params}, x, mask, numbers, rngs={"dropout": key})

        return jax.vjp(apply, params, x)[1](dy)

    packed = 1, SEQUENCES * LENGTH, SIZES.width
    x = jax.ShapeDtypeStruct(packed, jnp.bfloat16, sharding=sharding)  # [parts, slots, width]
    mask = jax.ShapeDtypeStruct((SEQUENCES, LENGTH), bool, sharding=sharding)  # [sequences, length]
    numbers = jax.ShapeDtypeStruct((SEQUENCES,), jnp.int32, sharding=sharding)  # [sequences]
    key = jax.eval_shape(lambda: jax.random.key(0))
    boxed = jax.eval_shape(
        lambda: Layers().init(jax.random.key(0), *(jnp.zeros(a.shape, a.dtype) for a in (x, mask, numbers)))
    )
    on_device = partial(jax.tree.map, lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))
    return jax.jit(gradients).lower(*on_device((nn.unbox(boxed["params"]), x, mask, numbers, key, x))).compile()


# --- The ways ---------------------------------------------------------------------------------------------------------


def trained_key_bias() -> AbstractContextManager[Any]:
    """The gradient of the key's bias, which is 0, is computed."""

    def dense(*args: Any, is_bias_trained: bool = True, **keywords: Any) -> layers.Dense:
        return layers.dense(*args, **keywords)

    return patch.object(bert, "dense", dense)


def bfloat16_sums() -> AbstractContextManager[Any]:
    """Gradients of biases add up in bfloat16."""
    return patch.object(layers, "add_bias", lambda states, bias: states + bias.astype(states.dtype))


def product_with_ones() -> AbstractContextManager[Any]:
    """Gradients of biases are products with ones."""

    @jax.custom_vjp
    def add_bias(states: jax.Array, bias: jax.Array) -> jax.Array:
        return states + bias.astype(states.dtype)

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = cotangent.reshape(-1, cotangent.shape[-1])
        ones = jax.lax.optimization_barrier(jnp.ones((8, len(rows)), rows.dtype))  # or it becomes a sum again
        return cotangent, jnp.dot(ones, rows, preferred_element_type=jnp.float32)[0]

    add_bias.defvjp(lambda states, bias: (add_bias(states, bias), None), backward)
    return patch.object(layers, "add_bias", add_bias)


def fused_gradient() -> AbstractContextManager[Any]:
    """The compiler may move sums of LayerNorm's gradient into the product before them."""
    return patch.object(bert, "unfused_gradient", lambda x: x)


def stored_statistics() -> AbstractContextManager[Any]:
    """Mean and variance of LayerNorm are stored for the backward pass."""
    compute = normalization._compute_stats

    def named(*args: Any, **keywords: Any) -> Any:
        return jax.tree.map(lambda x: checkpoint_name(x, "statistics"), compute(*args, **keywords))

    policy = jax.checkpoint_policies.save_only_these_names(bert.PRODUCT, bert.ATTENDED, "statistics")
    patches = ExitStack()
    patches.enter_context(patch.object(normalization, "_compute_stats", named))
    patches.enter_context(patch.dict(bert.REMAT, {"dots": policy}))
    return patches


WAYS = {
    "shipped": nullcontext,
    "key-bias": trained_key_bias,
    "bfloat16-sums": bfloat16_sums,
    "ones": product_with_ones,
    "fused": fused_gradient,
    "statistics": stored_statistics,
}

if __name__ == "__main__":
    main()
