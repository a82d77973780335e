"""Estimate the time of attention on TPUs, forward and backward, plain and by the kernels, from their compiler.

No TPU is needed. Plain attention is what XLA makes of it: the `estimated_cycles` of its operations. The cycles of a
kernel are the instruction words of its schedule for one block (a sequence and 128 features), times the blocks, one word
per cycle. The compiler writes that schedule into a folder if you ask for it. Neither includes waits for memory. The two
cores of a v5p share a kernel's blocks. The kernel of packed sequences computes as many scores as that of padded ones,
and we count all of its words, as if it made every one of its copies. `launch/cost.py` computes with the last column,
words for each score of 128 features.

"splash" is JAX's own kernel. It drops no weights and takes complete tiles, so its row needs `--rate=0` and lengths that
are multiples of 128. Its blocks are complete sequences of one head. It reads arrays by head, and the time to copy them
is in the column "plain".

    pip install -e '.[tpu]' -c realm_jax/launch/image-lock.txt
    python benchmarks/tpu_attention.py [--chips v5e:2x2 …] [--lengths 288 384]
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from realm_jax.flops import chip
from realm_jax.launch.cost import program_cost, scores_held
from realm_jax.launch.plan import devices_to_compile_for
from realm_jax.models.attention import ATTENTION, LANES, AttentionDropout, tpu_attention
from realm_jax.models.packing import TILE, packing

CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
SEQUENCES, WIDTH, HEADS = 56, 768, 12  # a chip's reader inputs in a step of `realm_wiki` on 64 of them
DUMPED = "*schedule-analysis_final_bundles.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=CHIPS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[288, 384])
    parser.add_argument("--rate", type=float, default=0.1, help="of dropout")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # where the compiler writes schedules
    args = parser.parse_args()
    if args.one:
        compare(args.chips[0], args.lengths[0], args.rate, args.folder)
        return
    print(f"{SEQUENCES} sequences, {HEADS} heads of {WIDTH // HEADS}, bfloat16, dropout {args.rate}; one layer")
    print("| chip | length | plain, ms | kernel | forward | backward | together, ms | words per score |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for chips in args.chips:
        for length in args.lengths:  # the compiler reads where to write when it is loaded
            with tempfile.TemporaryDirectory() as folder:
                flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={folder}"
                environment = os.environ | {"LIBTPU_INIT_ARGS": flags.strip()}
                command = [sys.executable, __file__, "--one", "--chips", chips, "--lengths", str(length)]
                command += ["--rate", str(args.rate), "--folder", folder]
                subprocess.run(command, env=environment, check=True)


def compare(chips: str, length: int, rate: float, folder: Path) -> None:
    """Print a row for each kernel.

    Args:
        chips: what to compile for, such as v5e:2x2.
        length: tokens of a sequence.
        rate: of dropout.
        folder: where the compiler writes schedules.
    """
    device = devices_to_compile_for(chips)[0]
    sharding, accelerator = NamedSharding(Mesh([device], ("one",)), PartitionSpec()), chip(device.device_kind)
    assert accelerator is not None
    cost = program_cost(compiled_text("xla", sharding, length, rate))
    plain = (cost.cycles + cost.invalid_cycles) / accelerator.clock
    blocks = SEQUENCES * WIDTH // LANES
    for way, added in (("tpu", ""), ("packed", "_packed")):
        for file in folder.iterdir():
            file.unlink()
        compiled_text(way, sharding, length, rate)
        counts = [words(folder, kernel + added) for kernel in ("attend", "differentiate")]
        forward, backward = (blocks * count / accelerator.cores / accelerator.clock for count in counts)
        cells = [f"{1e3 * seconds:.2f}" for seconds in (forward, backward, forward + backward)]
        words_per_score = ", ".join(f"{count / scores_held(length):.5f}" for count in counts)
        name = "packed" if added else "padded"
        print(
            f"| {chips} | {length} | {1e3 * plain:.2f} | {name} | " + " | ".join(cells) + f" | {words_per_score} |",
            flush=True,
        )
    if rate or length % LANES:
        return
    for file in folder.iterdir():
        file.unlink()
    lines = compiled_text("splash", sharding, length, rate).splitlines(keepends=True)
    cost = program_cost("".join(line for line in lines if "tpu_custom_call" not in line))
    copies = (cost.cycles + cost.invalid_cycles) / accelerator.clock
    counts = [words(folder, f"splash_mha_{phase}") for phase in ("fwd", "dkv")]
    blocks = SEQUENCES * HEADS
    forward, backward = (blocks * count / accelerator.cores / accelerator.clock for count in counts)
    cells = [f"{1e3 * seconds:.2f}" for seconds in (forward, backward, forward + backward)]
    print(f"| {chips} | {length} | copies {1e3 * copies:.2f} | splash | " + " | ".join(cells) + " | |", flush=True)


def compiled_text(way: str, sharding: NamedSharding, length: int, rate: float) -> str:
    """Return the text of the compiled attention of one layer with its gradients.

    Args:
        way: "xla" for plain attention, "tpu" for the padded kernel, "packed" or "splash".
        sharding: puts arrays on one device.
        length: tokens of a sequence.
        rate: of dropout.
    """
    shape = (1, SEQUENCES * length, WIDTH) if way == "packed" else (SEQUENCES, length, WIDTH)
    states = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)  # [1, slots, width] if packed
    mask = jax.ShapeDtypeStruct((SEQUENCES, length), bool, sharding=sharding)  # [sequences, length]
    seeds = jax.ShapeDtypeStruct((SEQUENCES, HEADS), jnp.uint32, sharding=sharding)  # [sequences, heads]

    def attention_and_gradients(
        query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array, *others: jax.Array
    ) -> object:
        mask, seeds = others
        dropout = AttentionDropout(rate, seeds) if rate else None
        if way == "splash":
            attend = partial(splash_attention, mask=mask)
        elif way == "packed":
            layout = packing(mask, 1, SEQUENCES * length, TILE)
            attend = partial(tpu_attention, mask=layout, heads=HEADS, dropout=dropout)
        else:
            attend = partial(ATTENTION[way], mask=mask, heads=HEADS, dropout=dropout)
        attended, back = jax.vjp(lambda *parts: attend(*parts), query, key, value)
        return attended, back(cotangent)

    return str(jax.jit(attention_and_gradients).lower(states, states, states, states, mask, seeds).compile().as_text())


def splash_attention(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Return what JAX's kernel attends to.

    Args:
        query: [sequences, length, width], as key and value.
        key: of the same shape.
        value: of the same shape.
        mask: True for tokens, [sequences, length].
    """
    sequences, length, width = query.shape
    names = ["block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"]
    sizes: Any = splash.BlockSizes(**dict.fromkeys(names, length), use_fused_bwd_kernel=True)  # type: ignore[arg-type]
    full = splash.MultiHeadMask([splash.FullMask((length, length))] * HEADS)
    kernel = splash.make_splash_mha_single_device(full, block_sizes=sizes)
    by_head = [
        x.reshape(sequences, length, HEADS, -1).swapaxes(1, 2) for x in (query, key, value)
    ]  # [sequences, heads, length, 64]
    segments = mask.astype(jnp.int32)  # [sequences, length]; a token sees those of its own segment
    scale = (width // HEADS) ** -0.5
    attended = jax.vmap(kernel)(by_head[0] * scale, *by_head[1:], splash.SegmentIds(segments, segments))
    return attended.swapaxes(1, 2).reshape(query.shape)


def words(folder: Path, kernel: str) -> int:
    """Return the number of instruction words of a kernel's schedule.

    Args:
        folder: where the compiler wrote schedules.
        kernel: part of the kernel's name.
    """
    file = next(file for file in folder.glob(DUMPED) if kernel in file.name)
    count = re.search(r"total scheduled bundles:\s*(\d+)", file.read_text())
    assert count is not None, f"{file.name} has no count"
    return int(count[1])


if __name__ == "__main__":
    main()
