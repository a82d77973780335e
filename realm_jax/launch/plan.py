"""`realm launch plan`: estimate what a run needs and costs before it is started: memory, traffic, time, money.

The real step and the real embedding program are compiled ahead of time for the slices of the spec; no TPU is needed,
only its compiler (`pip install 'realm_jax[tpu]'`). Memory and collectives are the compiler's; times are ranges, of its
own estimate and of stated arithmetic (`cost.py`), not measured. What reads storage or waits for hosts is not
among them.
"""

import argparse
import dataclasses
import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from realm_jax.assemble import abstract_run
from realm_jax.config import default, task_names, validate
from realm_jax.config_flags import load_config
from realm_jax.data.sources import open_sources
from realm_jax.data.staging import PREPARED
from realm_jax.data.tokenizer import id_dtype
from realm_jax.errors import LESS_MEMORY, UserError
from realm_jax.flops import Chip, chip, embedding_flops
from realm_jax.forward.context import Index
from realm_jax.host import enlarge_compiler_stacks
from realm_jax.launch.cost import Cost, program_cost, program_time, sent, transferred
from realm_jax.launch.spec import Launch
from realm_jax.mesh import corpus_devices, logical_sharding, replicated, row_major, slice_of
from realm_jax.models.inputs import DOCUMENT_SPECIALS, Documents
from realm_jax.refresh.builder import for_embedding
from realm_jax.refresh.exporter import sample_queries
from realm_jax.refresh.status import BUILDER, TRAINER
from realm_jax.retrieval.embed import EMBED_BATCH
from realm_jax.retrieval.exact import padded_rows
from realm_jax.run import Run, embed_program
from realm_jax.tasks import TASKS, make_task
from realm_jax.tasks.packed import clipped_lengths
from realm_jax.train.init_from import fill_from_pretrained
from realm_jax.train.restore import abstract_state
from realm_jax.train.step import ControlWords, control_sharding, make_step

# The compiler asks for the host topology; there is a single host here.
SINGLE_HOST_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}
COMPILER = ("jax", "jaxlib", "libtpu")
# Core-seconds of ScaNN, of 128 numbers a vector, measured on two cores over 13,353,718 of them
# (`benchmarks/README.md`): to learn, build and measure the searchers, a vector; to search them, a query and vector.
SCANN_BUILD, SCANN_SEARCH = 2 * 368 / 13_353_718, 2 * 0.944 / 512 / 13_353_718


def plan_launch(launch: Launch, args: argparse.Namespace, usual: tuple[int, int]) -> int:
    """Show the plan of a launch; exit code 1 when it does not fit. args: flags of `realm launch plan`; usual: passages
    and vocabulary where neither flags nor data say them."""
    config = load_config(args.config, args.overrides, default)
    prepared = Path(config.data.path or "-", PREPARED).is_file()
    sources = open_sources(config.data.path) if prepared else None
    known = usual if sources is None else (len(sources.passages), sources.tokenizer.size)
    sizes = args.passages or known[0], args.vocabulary or known[1]
    config.data.path = config.data.path or "-"
    validate(config)
    config = fill_from_pretrained(config)
    names = task_names(config)
    task = args.task or next((name for name in names if TASKS[name].follows_builder), names[-1])
    if task not in names:
        raise UserError(f"--task={task}: the recipe has {', '.join(names)}")
    builders = launch.spec.builder.slices if TASKS[task].follows_builder else 0
    chips = tpu_devices(launch, TRAINER, launch.spec.trainer.slices)
    trainer = abstract_run(config, Path("."), *sizes, chips)
    builder = None
    if builders:
        chips = tpu_devices(launch, BUILDER, 1)  # every builder is a program of its own
        builder = abstract_run(for_embedding(config, len(chips)), Path("."), *sizes, chips)
    useful = {}
    if sources is not None:
        if config.data.text == "passages":
            sources = dataclasses.replace(sources, pretraining=sources.passages)
        trainer = dataclasses.replace(trainer, sources=sources)
        useful = useful_share(trainer, task) if TASKS[task].follows_builder else {}  # it learns from sentences
    found = plan(trainer, builder, task, args.price_per_chip_hour, builders)
    found |= {"useful": useful} if useful else {}
    if args.json:
        print(json.dumps(found, ensure_ascii=False, allow_nan=False), flush=True)
    else:
        show(found, task)
    return 0 if found["fits"] and found.get("builder", found)["fits"] else 1


def tpu_devices(launch: Launch, job: str, slices: int) -> list[jax.Device]:
    """The devices of so many slices of a job, for compiling only. Raises UserError."""
    chips = str(launch.slice(job))
    try:
        return devices_to_compile_for(chips, slices)
    except Exception as fault:  # RuntimeError, ValueError or XLA's own, by version
        reason = " ".join(str(fault).split())[:200]
        advice = "the compiler comes with `pip install 'realm_jax[tpu]'`"
        raise UserError(f"spec.{job}.slice={chips}: {reason}; {advice}") from None


def devices_to_compile_for(chips: str, slices: int = 1) -> list[jax.Device]:
    """The devices of slices such as 'v5e:2x4', which need not be there. Raises what the TPU compiler raises."""
    enlarge_compiler_stacks()
    from jax.experimental import topologies  # here, since it starts the compiler

    for name, value in SINGLE_HOST_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return list(topologies.get_topology_desc(platform="tpu", topology_name=chips, num_slices=slices).devices)


def plan(trainer: Run, builder: Run | None, task: str, price: float | None = None, builders: int = 1) -> dict[str, Any]:
    """Everything that is known of a task: memory, collectives, FLOPs, times as [low, high], and what follows.

    builder: an index builder's run on its own devices, for the task that has one; builders: how many share the work.
    """
    config, chips = trainer.config, trainer.mesh.size
    found: dict[str, Any] = {"task": task, "device": device_kind(trainer), "devices": chips}
    found |= {"passages": trainer.context.rows, "vocabulary": trainer.model.bert.vocabulary_size}
    found |= step_needs(trainer, task)
    made = make_task(task, trainer)
    operations = made.flops()
    found["flops"], found["flops_by_part"] = sum(operations.values()), operations
    if builder is not None:
        found |= plan_of_builder(builder, builders)
    if "seconds" not in found or "seconds" not in found.get("builder", found):
        return found
    low, high = found["seconds"]
    found["mfu"] = [found["flops"] / (chips * known_chip(trainer).peak * seconds) for seconds in (high, low)]
    found["hours"] = [seconds * config[task].steps / 3600 for seconds in (low, high)]
    if trainer.scann_config is not None and made.host_search:
        found["scann"] = host_search(trainer, task)
    if builder is not None:
        first, last = found["refresh_seconds"]
        found["steps_per_refresh"] = [first / high, last / low]
    if price is not None:
        found["cost"] = [hours * (chips + found.get("builder_devices", 0)) * price for hours in found["hours"]]
    return found


def useful_share(trainer: Run, task: str) -> dict[str, float]:
    """How many of a step's operations are of tokens and not of padding: those at the mean lengths of some data over
    those that are computed. Attention grows with the square of a length, so the truth is a little more.

    Returns the mean pieces of queries, by the sentences that exports are sampled with, and of passages, specials
    counted, and the share. Raises UserError where no passage has a salient span.
    """
    query = float(sample_queries(trainer)["query_length"].mean())
    bodies, titles = clipped_lengths(trainer.sources.passages, trainer.lengths.document)
    body, title = float(bodies.mean()) + DOCUMENT_SPECIALS + 1, float(titles.mean())

    def padded_flops(passage: float) -> dict[str, float]:
        config = ConfigDict(trainer.config.to_dict())
        config.data.query_length, config.data.document_length = round(query), round(passage)
        padded = dataclasses.replace(trainer, config=config, sources=None)  # type: ignore[arg-type]
        return make_task(task, padded).flops()

    computed, real = make_task(task, trainer).flops(), padded_flops(body + title)
    if not trainer.context.points:
        real["reader"] = padded_flops(body)["reader"]  # titles are read where it points
    return {"query": query, "passage": body + title, "share": sum(real.values()) / sum(computed.values())}


def host_search(trainer: Run, task: str) -> dict[str, float]:
    """What ScaNN takes of the trainer's hosts in a step, and of all builders' hosts for a generation that learns anew,
    in proportion to the corpus: seconds of one core."""
    hosts = len({device.process_index for device in trainer.mesh.devices.flat})
    queries, rows = trainer.config[task].batch_size / hosts, trainer.context.rows
    return {
        "queries_a_host": queries,
        "search_core_seconds": queries * rows * SCANN_SEARCH,
        "build_core_seconds": rows * SCANN_BUILD,
    }


def plan_of_builder(builder: Run, builders: int) -> dict[str, Any]:
    """An index builder's program, and the time in which all builders embed every passage with it."""
    needs = compiled_needs(lower_builder(builder), builder)
    devices, rows = builder.mesh.size * builders, builder.context.rows
    found: dict[str, Any] = {"builder": needs, "builder_device": device_kind(builder), "builder_devices": devices}
    if "seconds" in needs:
        batches = math.ceil(rows / (EMBED_BATCH * devices))
        least = rows * embedding_flops(builder.config, builder.config.data.document_length)
        found["refresh_seconds"] = [seconds * batches for seconds in needs["seconds"]]
        full = devices * known_chip(builder).peak
        found["refresh_mfu"] = [least / (full * seconds) for seconds in reversed(found["refresh_seconds"])]
    return found


def lower_builder(builder: Run) -> jax.stages.Lowered:
    """An index builder's program, for a batch of passages of full length."""
    documents = abstract_documents(builder, EMBED_BATCH * builder.mesh.size, "batch")
    whole = replicated(builder.mesh)
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
        builder.abstract_params,
    )
    tower = {name: params[name] for name in builder.model.embedder_names}
    return embed_program.lower(builder.model, builder.mesh, tower, documents)


def device_kind(run: Run) -> str:
    """What the devices of a run are called."""
    return str(run.mesh.devices.flat[0].device_kind)


def known_chip(run: Run) -> Chip:
    """What the devices of a run can do: it is known of those that a spec can name."""
    known = chip(device_kind(run))
    assert known is not None, device_kind(run)
    return known


def step_needs(trainer: Run, task: str) -> dict[str, Any]:
    """Peak bytes a device and collectives of a task's step, as the compiler has them, and which compiler it was; or
    that it does not fit."""
    state, batch, index, control = abstract_arguments(trainer, task)
    step = make_step(make_task(task, trainer))
    second = sum(shard_bytes(leaf) for leaf in jax.tree.leaves(index.vectors)) if index is not None else 0
    needs = compiled_needs(step.lower(state, batch, index, control), trainer, second)  # type: ignore[attr-defined]
    return {"compiler": {name: version(name) for name in COMPILER}} | needs


def compiled_needs(lowered: jax.stages.Lowered, run: Run, second: int = 0) -> dict[str, Any]:
    """What a program needs of each device. second: bytes beside it, of the generation that is being loaded."""
    try:
        compiled: Any = lowered.compile()
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
    known = known_chip(run)
    capacity = known.memory or math.inf  # of every slice that a spec can name it is known
    if peak_bytes + second > capacity:
        return {"fits": False, "needs": _gib(peak_bytes + second), "has": _gib(capacity)}
    needs: dict[str, Any] = {
        "fits": True,
        "bytes": {
            "arguments": sizes.argument_size_in_bytes,
            "temporaries": sizes.temp_size_in_bytes,
            "second_generation": second,
            "peak": peak_bytes + second,
        },
    }
    slices = [slice_of(device) for device in run.mesh.devices.flat]
    try:
        cost = program_cost(compiled.as_text())
        time = program_time(cost, known, slices)
    except (ValueError, KeyError) as fault:  # of a compiler that writes its programs otherwise
        return needs | {"time_unknown": f"{fault}"}
    needs |= {"seconds": [time.low, time.high], "seconds_by_part": time.parts, "cycles": cost.cycles}
    return needs | {"collectives": collectives(cost, slices)}


def collectives(cost: Cost, slices: Sequence[int]) -> dict[str, dict[str, float]]:
    """Of each kind and number of devices, with the number of slices where it is more than one: how often it runs, and
    the bytes that a device sends."""
    found: dict[str, Counter[str]] = {}
    for one, times in cost.collectives.items():
        apart = len({slices[place] for place in one.group})
        over = f" over {apart} slices" if apart > 1 else ""
        inside, outside = sent(one, slices)
        entry = found.setdefault(f"{one.kind} of {len(one.group)}{over}", Counter())
        entry.update({"times": times, "bytes": round(times * (inside + outside))})
        if apart > 1:
            entry.update({"bytes_between_slices": round(times * outside)})
    for transfer, times in cost.transfers.items():
        moved = round(times * transferred(transfer, len(set(slices))))
        entry = found.setdefault(f"{transfer.kind} between slices", Counter())
        entry.update({"times": times, "bytes": moved, "bytes_between_slices": moved})
    return {name: dict(found[name]) for name in sorted(found)}


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}G"


def shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on each device."""
    assert leaf.sharding is not None
    shape = leaf.sharding.shard_shape(leaf.shape)
    return int(jnp.dtype(leaf.dtype).itemsize) * math.prod(shape)


def abstract_arguments(trainer: Run, task: str) -> tuple[Any, Any, Any, Any]:
    """Shapes, dtypes and places of what a step takes: state, batch, index, control words."""
    mesh, config = trainer.mesh, trainer.config
    like = trainer.abstract_params
    made = make_task(task, trainer)
    state = abstract_state(made, like)
    size = config[task].batch_size
    shapes = made.array_shapes().items()
    batch = {name: abstract_sharded(trainer, (size, *shape), dtype, "batch") for name, (shape, dtype) in shapes}
    index = None
    if made.retrieves:
        rows = padded_rows(trainer.context.rows, corpus_devices(mesh))
        on_hosts = made.host_search and trainer.scann_config is not None
        if on_hosts:
            batch["retrieved_rows"] = abstract_sharded(trainer, (size, config.realm.candidates), jnp.int32, "batch")
        vectors: Any = None
        if made.needs_vectors() and not on_hosts:
            shape = (rows, trainer.model.vector_size)
            vectors = abstract_sharded(trainer, shape, jnp.dtype(config.model.dtype), "rows")
        index = Index(vectors, abstract_documents(trainer, rows, "rows"))
    words = jax.ShapeDtypeStruct((mesh.size, len(ControlWords())), jnp.int32, sharding=control_sharding(mesh))
    return state, batch, index, words


def abstract_documents(run: Run, rows: int, axis: str) -> Documents:
    """Passages as the corpus has them, spread over the devices like others of that name."""
    pieces = (rows, run.config.data.document_length)
    ids = abstract_sharded(run, pieces, id_dtype(run.model.bert.vocabulary_size), axis)
    lengths = abstract_sharded(run, (rows,), jnp.uint16, axis)
    return Documents(ids, lengths, lengths)  # type: ignore[arg-type]


def abstract_sharded(run: Run, shape: tuple[int, ...], dtype: Any, axis: str) -> jax.ShapeDtypeStruct:
    """An array whose first dimension is spread over the devices like others of that name."""
    places = logical_sharding(run.mesh, axis, *[None] * (len(shape) - 1))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=row_major(places, len(shape)) if axis == "rows" else places)


def show(found: dict[str, Any], task: str) -> None:
    """The plan as a table."""
    table = Table(title=f"{task} on {found['devices']} × {found['device']}", title_justify="left", show_header=False)
    table.add_row("corpus", f"{found['passages']:,} passages, {found['vocabulary']:,} word pieces")
    if not found["fits"]:
        table.add_row("memory a device", f"needs {found['needs']}, has {found['has']}: does NOT fit")
        table.add_row("try", LESS_MEMORY)
    else:
        for name, size in found["bytes"].items():
            table.add_row(f"memory a device: {name.replace('_', ' ')}", f"{size / 2**30:.2f} GiB")
        for name, entry in found.get("collectives", {}).items():
            apart = entry.get("bytes_between_slices", 0)
            partly = f", {apart / 1e6:,.1f} of it to other slices" if 0 < apart < entry["bytes"] else ""
            table.add_row(f"{entry['times']} × {name}", f"{entry['bytes'] / 1e6:,.1f} MB sent by a device{partly}")
    table.add_row("operations a step", f"{found['flops'] / 1e12:,.1f} T")
    for name, value in found["flops_by_part"].items():
        table.add_row(f"  {name}", f"{value / 1e12:,.1f} T")
    if "useful" in found:
        useful = found["useful"]
        means = f"queries of {useful['query']:.0f} and passages of {useful['passage']:.0f} pieces in the mean"
        table.add_row("  of tokens, not padding", f"{useful['share']:.0%}: {means}")
    if "hours" in found:
        add_times(table, found)
    for name, program in (("a step's time", found), ("time of embedding", found.get("builder", {}))):
        if "time_unknown" in program:
            table.add_row(name, f"not known: {program['time_unknown']}")
    if not found.get("builder", found)["fits"]:
        table.add_row("the builder's memory a device", "does NOT fit: set config.model.dtype=bfloat16")
    Console(highlight=False).print(table)


def add_times(table: Table, found: dict[str, Any]) -> None:
    """What is known where everything fits."""
    table.add_row("a step (estimated)", between(found["seconds"], 1e3, " ms"))
    for name, seconds in found["seconds_by_part"].items():
        table.add_row(f"  {name}, alone", f"{seconds * 1e3:,.1f} ms at least")
    table.add_row("MFU", between(found["mfu"], 100, " %"))
    table.add_row("all steps", between(found["hours"], 1, " hours", 1))
    if "builder" in found:
        table.add_row("the builder's memory a device", f"{found['builder']['bytes']['peak'] / 2**30:.2f} GiB")
        devices = f"embedding all passages on {found['builder_devices']} devices"
        table.add_row(devices, between(found["refresh_seconds"], 1 / 60, " minutes", 1))
        table.add_row("MFU of embedding", between(found["refresh_mfu"], 100, " %"))
        table.add_row("steps between two generations", between(found["steps_per_refresh"]))
    if "scann" in found:
        work = found["scann"]
        table.add_row("a host's search for a step", f"{work['search_core_seconds'] * 1e3:,.0f} ms of one core")
        table.add_row(
            "learning and building all searchers", f"{work['build_core_seconds'] / 60:,.0f} minutes of one core"
        )
    if "cost" in found:
        table.add_row("cost", between(found["cost"]))
    table.add_row("compiled with", ", ".join(f"{name} {number}" for name, number in found["compiler"].items()))


def between(values: Sequence[float], times: float = 1, unit: str = "", digits: int = 0) -> str:
    """A range, as one number where both ends are printed alike."""
    low, high = (f"{value * times:,.{digits}f}" for value in values)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"
