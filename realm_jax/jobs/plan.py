"""`realm plan`: what a run needs and costs, before it is started: memory, traffic, time, money.

The real step and the real embedding program are compiled ahead of time for a TPU topology; no TPU is needed, only its
compiler (`pip install 'realm_jax[tpu]'`). Memory and collectives are the compiler's; times are arithmetic: operations
(`training/flops.py`) over devices × peak × MFU, with the MFU that is given, not measured.
"""

import argparse
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from realm_jax.config import default, task_names, validate
from realm_jax.data.examples import array_shapes
from realm_jax.errors import UserError
from realm_jax.index.candidates import Index
from realm_jax.index.exact import padded_rows
from realm_jax.jobs.flags import add_config_argument, load_config
from realm_jax.mesh import logical_sharding
from realm_jax.models.inputs import Documents
from realm_jax.run import Run, bare_run
from realm_jax.training.flops import embedding_flops, peak, step_flops
from realm_jax.training.loop import abstract_state
from realm_jax.training.state import Control, control_sharding, make_step
from realm_jax.training.tasks import make_task

ROWS = 13_353_718  # passages of the paper's Wikipedia
VOCABULARY = 30_522  # word pieces of BERT's uncased vocabulary
# The compiler asks for the machine's neighbours, of which there are none here.
ALONE = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
EXAMPLES = """examples:
  realm plan --config=configs/realm_wiki.py --topology=v5p:4x4x4
  realm plan --config=configs/realm_wiki.py --topology=v5e:8x8 --num-slices=2 --price-per-chip-hour=1.2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm plan`."""
    parser.epilog = EXAMPLES
    add_config_argument(parser, "the paper's sizes")
    add = parser.add_argument
    add("--topology", default="v5e:8x8", help="chips of the trainer: v5e:8x8, v5p:4x4x4, v6e:8x8, … (default: v5e:8x8)")
    add("--num-slices", type=int, default=1, metavar="N", help="slices of that topology (default: 1)")
    add("--builder-topology", default="v5e:4x4", help="chips of the index builder (default: v5e:4x4)")
    add("--task", help="plan this task (default: realm if it is in the recipe, else the last)")
    add("--passages", type=int, default=ROWS, metavar="N", help=f"of the corpus (default: {ROWS:,}, the paper's)")
    add("--vocabulary", type=int, default=VOCABULARY, metavar="N", help=f"word pieces (default: {VOCABULARY:,})")
    add("--mfu", type=float, default=0.4, help="share of peak that steps and embedding reach (default: 0.4)")
    add("--price-per-chip-hour", type=float, metavar="X", help="for the cost, in any currency")
    add("--json", action="store_true", help="one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when it does not fit."""
    config = load_config(args.config, args.overrides, default)
    config.data.path = config.data.path or "-"
    validate(config)
    names = task_names(config)
    task = args.task or ("realm" if "realm" in names else names[-1])
    if task not in names:
        raise UserError(f"--task={task}: the recipe has {', '.join(names)}")
    if not 0 < args.mfu <= 1:
        raise UserError(f"--mfu={args.mfu}: must lie above 0 and be at most 1")
    chips, helpers = devices_of(args.topology, args.num_slices), devices_of(args.builder_topology, 1)
    trainer = bare_run(config, Path("."), args.passages, args.vocabulary, chips)
    found = plan(trainer, task, args.vocabulary, args.mfu, helpers, args.price_per_chip_hour)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        show(found, args, task)
    return 0 if found["fits"] else 1


def devices_of(topology: str, slices: int) -> list[jax.Device]:
    """The devices of a TPU topology, for compiling only. Raises UserError."""
    from jax.experimental import topologies  # here, since it starts the TPU compiler

    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology, num_slices=slices)
        return list(found.devices)
    except Exception as fault:  # RuntimeError, ValueError or XLA's own, by version
        reason = " ".join(str(fault).split())[:200]
        raise UserError(
            f"--topology={topology}: {reason}; names are like v5e:8x8, v5p:4x4x4 and v6e:8x8, and the compiler comes "
            "with `pip install 'realm_jax[tpu]'`"
        ) from None


def plan(
    trainer: Run, task: str, vocabulary: int, mfu: float, helpers: list[jax.Device], price: float | None
) -> dict[str, Any]:
    """Everything that is known of a task: memory, collectives, FLOPs, and what follows by arithmetic."""
    config, chips = trainer.config, trainer.mesh.size
    found: dict[str, Any] = {"task": task, "device": trainer.mesh.devices.flat[0].device_kind, "devices": chips}
    found |= memory_of(trainer, task)
    operations = step_flops(config, task, vocabulary, trainer.lengths.predictions, trainer.setting.rows)
    found["flops"] = sum(operations.values())
    found["flops_by_part"] = operations
    speed = (peak(found["device"]) or 0.0) * mfu
    if speed:
        found["step_seconds"] = found["flops"] / (chips * speed)
        found["hours"] = found["step_seconds"] * config[task].steps / 3600
        if price is not None:
            found["cost"] = found["hours"] * chips * price
    if task == "realm" and (rate := (peak(helpers[0].device_kind) or 0.0) * mfu):
        work = embedding_flops(config, config.data.document_length) * trainer.setting.rows
        found["refresh_seconds"] = work / (len(helpers) * rate)
        found["builder_devices"] = len(helpers)
        if speed:
            found["steps_per_refresh"] = found["refresh_seconds"] / found["step_seconds"]
            if price is not None:
                found["cost"] += found["hours"] * len(helpers) * price
    return found


def memory_of(trainer: Run, task: str) -> dict[str, Any]:
    """Peak bytes a device and collectives of a task's step, as the compiler has them; or that it does not fit."""
    state, batch, index, control = abstract_arguments(trainer, task)
    step = make_step(trainer, make_task(task, trainer.setting))
    try:
        compiled = step.lower(state, batch, index, control).compile()  # type: ignore[attr-defined]
    except jax.errors.JaxRuntimeError as fault:
        if "RESOURCE_EXHAUSTED" not in str(fault):
            raise
        needed = re.search(r"Used ([\d.]+[KMGT]) of ([\d.]+[KMGT]) hbm", str(fault))
        return {"fits": False, "needs": needed.group(1) if needed else "?", "has": needed.group(2) if needed else "?"}
    sizes = compiled.memory_analysis()
    peak_bytes = (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        + sizes.temp_size_in_bytes
        - sizes.alias_size_in_bytes
        + sizes.generated_code_size_in_bytes
    )
    second = sum(shard_bytes(leaf) for leaf in jax.tree.leaves(index.vectors)) if index is not None else 0
    words = re.findall(rf"= \S+ ({'|'.join(COLLECTIVES)})(?:-start)?\(", compiled.as_text())
    return {
        "fits": True,
        "bytes": {
            "arguments": sizes.argument_size_in_bytes,
            "temporaries": sizes.temp_size_in_bytes,
            "second_generation": second,
            "peak": peak_bytes + second,
        },
        "collectives": dict(Counter(words)),
    }


def shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on each device."""
    assert leaf.sharding is not None
    shape = leaf.sharding.shard_shape(leaf.shape)
    return int(jnp.dtype(leaf.dtype).itemsize * jnp.prod(jnp.array(shape, jnp.float32)))


def abstract_arguments(trainer: Run, task: str) -> tuple[Any, Any, Any, Any]:
    """Shapes, dtypes and places of what a step takes: state, batch, index, control words."""
    mesh, config = trainer.mesh, trainer.config

    def spread(shape: tuple[int, ...], dtype: Any, axis: str) -> jax.ShapeDtypeStruct:
        places = logical_sharding(mesh, axis, *[None] * (len(shape) - 1))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=places)

    like = jax.eval_shape(trainer.model.init, jax.random.key(0))
    state = abstract_state(trainer, make_task(task, trainer.setting), like)
    size = config[task].batch_size
    shapes = array_shapes(task, trainer.lengths)
    batch = {name: spread((size, *shape), dtype, "batch") for name, (shape, dtype) in shapes.items()}
    index = None
    if task in ("realm", "qa"):
        rows, length = padded_rows(trainer.setting.rows, mesh.size), config.data.document_length
        sizes = ((rows, length), (rows,), (rows,))
        documents: Any = Documents(*(spread(shape, jnp.uint16, "rows") for shape in sizes))  # type: ignore[arg-type]
        vectors: Any = spread((rows, trainer.model.projection), jnp.dtype(config.retrieval.dtype), "rows")
        if task == "realm" and trainer.searches is not None:
            batch["found"] = spread((size, config.retrieval.candidates), jnp.int32, "batch")
            vectors = None
        index = Index(vectors, documents)
    words = jax.ShapeDtypeStruct((mesh.size, len(Control())), jnp.int32, sharding=control_sharding(mesh))
    return state, batch, index, words


def show(found: dict[str, Any], args: argparse.Namespace, task: str) -> None:
    """The plan as a table."""
    table = Table(title=f"{task} on {found['devices']} × {found['device']}", title_justify="left", show_header=False)
    if not found["fits"]:
        table.add_row("memory a device", f"needs {found['needs']}, has {found['has']}: does NOT fit")
        table.add_row("try", advice(task))
    else:
        for name, size in found["bytes"].items():
            table.add_row(f"memory a device: {name.replace('_', ' ')}", f"{size / 2**30:.2f} GiB")
        together = ", ".join(f"{count} × {name}" for name, count in sorted(found["collectives"].items()))
        table.add_row("collectives a step", together or "none")
    table.add_row("operations a step", f"{found['flops'] / 1e12:,.1f} T")
    for name, value in found["flops_by_part"].items():
        table.add_row(f"  {name}", f"{value / 1e12:,.1f} T")
    if "step_seconds" in found:
        table.add_row(f"a step at {args.mfu:.0%} MFU", f"{found['step_seconds'] * 1e3:,.0f} ms")
        table.add_row("all steps", f"{found['hours']:,.1f} hours")
    if "refresh_seconds" in found:
        table.add_row(
            f"embedding {args.passages:,} passages on {found['builder_devices']} devices",
            f"{found['refresh_seconds'] / 60:,.1f} minutes",
        )
    if "steps_per_refresh" in found:
        table.add_row("steps between two generations", f"{found['steps_per_refresh']:,.0f}")
    if "cost" in found:
        table.add_row("cost", f"{found['cost']:,.0f}")
    Console(highlight=False).print(table)


def advice(task: str) -> str:
    """Which keys change what is needed."""
    return (
        f"--config.{task}.microbatches=2 or more, --config.model.remat=dots or layer, --config.model.dtype=bfloat16, "
        "--config.retrieval.dtype=bfloat16, --config.mesh.fsdp=N, or more chips"
    )
