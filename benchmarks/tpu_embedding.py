"""How long a TPU takes to embed a batch of passages, by the compiler's own cost model, in groups of several sizes.

No TPU is needed: the builder's program of `realm_wiki` (BERT-base, 256 passages of 288 a chip, bfloat16) is compiled
ahead of time, and the `estimated_cycles` of its operations are added up at 1.5 GHz, a loop as often as it runs, with
those of the kernel's schedule. The model leaves out what it has no number for; plain products score 79 to 96 % of a
chip's peak with it. The least time is that of the products at the peak.

    pip install -e '.[tpu]'
    python benchmarks/tpu_embedding.py [--groups 4 8 16 32]
"""

import argparse
from pathlib import Path

import jax

from realm_jax import run as runs
from realm_jax.assemble import abstract_run
from realm_jax.cli.launch import ROWS, VOCABULARY
from realm_jax.flops import embedding_flops
from realm_jax.launch.cost import program_cost, program_time
from realm_jax.launch.plan import devices_to_compile_for, known_chip, lower_builder
from realm_jax.recipes import paper
from realm_jax.refresh.builder import for_embedding
from realm_jax.retrieval.embed import EMBED_BATCH, GROUPS

CHIPS = "v5e:2x4"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", type=int, default=[256, 32, 16, 8, 4])
    args = parser.parse_args()
    devices = devices_to_compile_for(CHIPS)
    config = paper("realm")
    config.data.path = "-"
    builder = abstract_run(for_embedding(config, len(devices)), Path("."), ROWS, VOCABULARY, devices)
    operations = EMBED_BATCH * embedding_flops(builder.config, config.data.document_length)
    least = operations / known_chip(builder).peak
    print(f"{EMBED_BATCH} passages of {config.data.document_length}: at least {least * 1e3:.0f} ms")
    print("| passages at a time | ms | share of peak | MB of temporaries |\n|---|---|---|---|")
    for group in args.groups:
        jax.clear_caches()
        runs.GROUPS = {} if group == EMBED_BATCH else {"tpu": group}
        compiled = lower_builder(builder).compile()
        seconds = program_time(program_cost(compiled.as_text()), known_chip(builder), [0] * len(devices)).low
        kept = compiled.memory_analysis().temp_size_in_bytes / 1e6
        own = " (ours)" if group == GROUPS["tpu"] else ""
        print(f"| {group}{own} | {seconds * 1e3:.0f} | {least / seconds:.0%} | {kept:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
