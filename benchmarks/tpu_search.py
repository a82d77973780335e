"""How long the exact search of a step takes on TPU slices, by their compiler's own cost model.

No TPU is needed: the search of `realm_wiki` (512 queries, 13,353,718 vectors of 128 in bfloat16, k = 8) is compiled
ahead of time. The `estimated_cycles` of its operations are added up, a loop as often as it runs, and of gathers and
sorts the least that memory allows; top-k (how many there are is printed) and collectives are left out.

    pip install -e '.[tpu]'
    python benchmarks/tpu_search.py [--slices v5e:8x8 …]
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from realm_jax.assemble import abstract_run
from realm_jax.cli.launch import ROWS, VOCABULARY
from realm_jax.launch.cost import program_cost, program_time
from realm_jax.launch.plan import abstract_sharded, devices_to_compile_for, known_chip
from realm_jax.mesh import corpus_devices
from realm_jax.recipes import paper
from realm_jax.retrieval.exact import padded_rows, search

SLICES = ("v5e:8x8", "v5e:4x4", "v5p:4x4x4", "v6e:8x8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", nargs="+", default=SLICES)
    args = parser.parse_args()
    config = paper("realm")
    config.data.path = "-"
    print("| slice | rows a chip | ms | MB of temporaries | top-k |\n|---|---|---|---|---|")
    for chips in args.slices:
        run = abstract_run(config, Path("."), ROWS, VOCABULARY, devices_to_compile_for(chips))
        rows, size = padded_rows(ROWS, corpus_devices(run.mesh)), config.encoder.projection
        queries = abstract_sharded(run, (config.realm.batch_size, size), jnp.float32, "batch")
        vectors = abstract_sharded(run, (rows, size), jnp.bfloat16, "rows")
        find = jax.jit(partial(search, run.mesh, rows=ROWS, k=config.realm.candidates))
        compiled = find.lower(queries, vectors).compile()
        cost = program_cost(compiled.as_text())
        parts = program_time(cost, known_chip(run), [0] * run.mesh.size).parts
        milliseconds = (parts["operations"] + parts["gathers, scatters and sorts"]) * 1e3
        kept = compiled.memory_analysis().temp_size_in_bytes / 1e6
        cells = f"{rows // run.mesh.size:,} | {milliseconds:.2f} | {kept:.1f} | {cost.top_k.total()}"
        print(f"| {chips} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
