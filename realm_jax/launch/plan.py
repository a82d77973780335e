"""Estimate memory, collectives, time and cost of a run before it starts (`realm launch plan`).

We compile the real step and the real embedding program ahead of time for the slices of the spec. That needs no TPU,
only its compiler (the extra `tpu`). Memory and collectives are the compiler's; times are ranges, from
its own estimate and the arithmetic in `cost.py`, and were not measured. Reading storage and waiting for hosts are not
included.
"""

import argparse
import dataclasses
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
from rich.console import Console
from rich.table import Table

from realm_jax.assemble import abstract_run
from realm_jax.config import REQUIRED, load_config, task_names, validate, with_values
from realm_jax.data.sources import open_sources
from realm_jax.data.staging import PREPARED
from realm_jax.data.tokenizer import id_dtype
from realm_jax.environment import image_versions
from realm_jax.errors import LESS_MEMORY, UserError, install_extra
from realm_jax.flops import Chip, chip, embedding_flops
from realm_jax.forward import Index
from realm_jax.host import enlarge_compiler_stacks
from realm_jax.indexing.build import for_embedding
from realm_jax.indexing.control import ControlSignal, control_sharding
from realm_jax.indexing.exporter import sample_queries
from realm_jax.indexing.heartbeat import BUILDER, TRAINER
from realm_jax.launch.cost import Cost, program_cost, program_time, sent, transferred
from realm_jax.launch.spec import Launch
from realm_jax.mesh import corpus_devices, logical_sharding, replicated, row_major, slice_of
from realm_jax.models.inputs import DOCUMENT_SPECIALS, PassageBatch
from realm_jax.retrieval.embed import EMBED_BATCH
from realm_jax.retrieval.exact import padded_rows
from realm_jax.run import Run, embed_program
from realm_jax.tasks import make_task
from realm_jax.tasks.answering import needs_vectors
from realm_jax.tasks.packed import clipped_lengths
from realm_jax.tasks.step_flops import step_flops
from realm_jax.train.init_from import fill_from_pretrained
from realm_jax.train.restore import abstract_state
from realm_jax.train.step import make_step

# The compiler asks for the host topology; there is a single host here.
SINGLE_HOST_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}
# Core-seconds of ScaNN for vectors of 128 numbers, measured on two cores over 13,353,718 of them
# (`benchmarks/README.md`): to learn, build and measure the searchers, a vector; to search them, a query and vector.
PAPER_REFRESH = 500  # steps between two indexes in the paper
SCANN_BUILD, SCANN_SEARCH = 2 * 368 / 13_353_718, 2 * 0.944 / 512 / 13_353_718


def plan_launch(launch: Launch, args: argparse.Namespace, usual: tuple[int, int]) -> dict[str, Any]:
    """Plan a launch, as `plan`; with "useful", as `useful_share`, if there are data.

    Args:
        launch: config and spec.
        args: flags of `realm launch plan`.
        usual: passages and vocabulary if neither flags nor data give them.

    Raises:
        UserError: if the config is wrong, or the compiler is missing or does not know a slice.
    """
    config = load_config(args.config, args.overrides)
    prepared = Path(config.data.path or "-", PREPARED).is_file()
    sources = open_sources(config.data.path) if prepared else None
    data_sizes = usual if sources is None else (len(sources.passages), sources.tokenizer.size)
    sizes = args.passages or data_sizes[0], args.vocabulary or data_sizes[1]
    config.data.path = config.data.path or "-"
    config.init_from = "" if config.init_from == REQUIRED else config.init_from  # the program is the same
    config = fill_from_pretrained(validate(config))
    names = task_names(config)
    task = args.task or ("realm" if "realm" in names else names[-1])
    if task not in names:
        raise UserError(f"--task={task}: the recipe has {', '.join(names)}")
    builders = launch.spec.builder.slices if task == "realm" else 0
    trainer = abstract_run(config, Path("."), *sizes, tpu_devices(launch, TRAINER, launch.spec.trainer.slices))
    builder = None
    if builders:
        devices = tpu_devices(launch, BUILDER, 1)  # every builder is a program of its own
        builder = abstract_run(for_embedding(config, len(devices)), Path("."), *sizes, devices)
    useful = {}
    if sources is not None:
        if config.data.text == "passages":
            sources = dataclasses.replace(sources, pretraining=sources.passages)
        trainer = dataclasses.replace(trainer, sources=sources)
        if task == "realm":  # it learns from sentences
            useful = {"useful": useful_share(trainer, task)}
    return plan(trainer, builder, task, args.price_per_chip_hour, builders) | useful


def plan(trainer: Run, builder: Run | None, task: str, price: float | None = None, builders: int = 1) -> dict[str, Any]:
    """Return memory, collectives, FLOPs and times as [low, high] of a task, and values derived from them.

    Args:
        trainer: an abstract run on the devices to compile for.
        builder: an index builder's run on its own devices, for a task that has one.
        task: the task to plan.
        price: price of a chip and hour.
        builders: how many share the work.
    """
    config, chips, rows = trainer.config, trainer.mesh.size, trainer.context.rows
    planned: dict[str, Any] = {
        "task": task,
        "device": trainer.mesh.devices.flat[0].device_kind,
        "devices": chips,
        "passages": rows,
    }
    planned |= {"vocabulary": trainer.model.bert.vocabulary_size} | step_needs(trainer, task)
    operations = step_flops(make_task(task, trainer))
    planned |= {"flops": sum(operations.values()), "flops_by_part": operations}
    if builder is not None:
        planned |= plan_of_builder(builder, builders)
    if "seconds" not in planned or "seconds" not in planned.get("builder", planned):
        return planned
    low, high = planned["seconds"]
    planned["mfu"] = [planned["flops"] / (chips * known_chip(trainer).peak * seconds) for seconds in (high, low)]
    planned["hours"] = [seconds * config[task].steps / 3600 for seconds in (low, high)]
    if trainer.scann_config is not None and task == "realm":
        # Seconds of one core: of each of the trainer's hosts for a step, and of all builders' hosts for a generation
        # that learns its searchers, in proportion to the corpus.
        queries = config[task].batch_size / len({device.process_index for device in trainer.mesh.devices.flat})
        seconds = {"search_core_seconds": queries * rows * SCANN_SEARCH, "build_core_seconds": rows * SCANN_BUILD}
        planned["scann"] = {"queries_a_host": queries} | seconds
    if builder is not None:
        first, last = planned["refresh_seconds"]
        planned["steps_per_refresh"] = [first / high, last / low]
        planned["builder_devices_for_paper"] = math.ceil(planned["builder_devices"] * last / low / PAPER_REFRESH)
    if price is not None:
        planned["cost"] = [hours * (chips + planned.get("builder_devices", 0)) * price for hours in planned["hours"]]
    return planned


def plan_of_builder(builder: Run, builders: int) -> dict[str, Any]:
    """Plan the program of an index builder, and the time in which all builders embed every passage with it.

    Args:
        builder: an abstract run on the builder's devices.
        builders: how many share the work.
    """
    documents = abstract_documents(builder, EMBED_BATCH * builder.mesh.size, "batch")
    sharding = replicated(builder.mesh)
    params = {name: builder.abstract_params[name] for name in builder.model.embedder_names}
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), params)
    needs = compiled_needs(embed_program.lower(builder.model, builder.mesh, params, documents), builder)
    devices, rows = builder.mesh.size * builders, builder.context.rows
    planned: dict[str, Any] = {
        "builder": needs,
        "builder_device": builder.mesh.devices.flat[0].device_kind,
        "builder_devices": devices,
    }
    if "seconds" in needs:
        batches = math.ceil(rows / (EMBED_BATCH * devices))
        operations = rows * embedding_flops(builder.config, builder.config.data.document_length)
        planned["refresh_seconds"] = [seconds * batches for seconds in needs["seconds"]]
        peak = devices * known_chip(builder).peak
        planned["refresh_mfu"] = [operations / (peak * seconds) for seconds in reversed(planned["refresh_seconds"])]
    return planned


def useful_share(trainer: Run, task: str) -> dict[str, float]:
    """Estimate the share of a step's operations that tokens need, and not padding.

    It is the operations at the mean lengths of the data over those at the padded lengths. Attention grows with the
    square of a length, so the true share is a little higher.

    Args:
        trainer: a run with data.
        task: to plan.

    Returns:
        The mean number of tokens of queries (of the sample queries of exports) and of passages, including special
        tokens, and the share.

    Raises:
        UserError: no passage has a salient span.
    """
    query = float(sample_queries(trainer)["query_length"].mean())
    bodies, titles = clipped_lengths(trainer.sources.passages, trainer.lengths.document)
    body, title = float(bodies.mean()) + DOCUMENT_SPECIALS + 1, float(titles.mean())

    def flops_at(passage: float) -> dict[str, float]:
        lengths = {"data.query_length": max(8, round(query)), "data.document_length": max(16, round(passage))}
        config = with_values(trainer.config, lengths)  # the least that the keys allow
        other = dataclasses.replace(trainer, config=config, sources=None)  # type: ignore[arg-type]
        return step_flops(make_task(task, other))

    computed, real = step_flops(make_task(task, trainer)), flops_at(body + title)
    if not trainer.config.realm.uses_span_marginal:
        real["reader"] = flops_at(body)["reader"]  # only a reader with a span head reads titles
    return {"query": query, "passage": body + title, "share": sum(real.values()) / sum(computed.values())}


# --- programs, compiled ahead of time ---------------------------------------------------------------------------------


def tpu_devices(launch: Launch, job: str, slices: int) -> list[jax.Device]:
    """Return devices of a job to compile for.

    Args:
        launch: the description.
        job: 'trainer' or 'builder'.
        slices: number of its slices.

    Raises:
        UserError: there is no compiler, or it does not know the slice.
    """
    name = str(launch.slice(job))
    try:
        return devices_to_compile_for(name, slices)
    except Exception as error:  # RuntimeError, ValueError or XLA's own, by version
        reason = " ".join(str(error).split())[:200]
        advice = f"to get the compiler, {install_extra('tpu')}"
        raise UserError(f"spec.{job}.slice={name}: {reason}; {advice}") from None


def devices_to_compile_for(name: str, slices: int = 1) -> list[jax.Device]:
    """Return devices of slices to compile for; they need not exist.

    Args:
        name: such as 'v5e:2x4'.
        slices: number of slices.

    Raises:
        Exception: the TPU compiler is missing or does not know the slice.
    """
    enlarge_compiler_stacks()
    from jax.experimental import topologies  # imported here because it starts the compiler

    for variable, value in SINGLE_HOST_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices).devices)


def step_needs(trainer: Run, task: str) -> dict[str, Any]:
    """Compile a task's step, and return its needs as `compiled_needs`, with the versions of the compiler.

    Args:
        trainer: an abstract run on the devices to compile for.
        task: to plan.
    """
    state, batch, index, control = abstract_arguments(trainer, task)
    lowered = make_step(make_task(task, trainer)).lower(state, batch, index, control)  # type: ignore[attr-defined]
    second_index = 0  # bytes per device of the vectors of an index that is being loaded
    for leaf in jax.tree.leaves(index.vectors if index is not None else None):
        second_index += jnp.dtype(leaf.dtype).itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
    compiler = {name: version(name) for name in ("jax", "jaxlib", "libtpu")}
    return {"compiler": compiler} | compiled_needs(lowered, trainer, second_index)


def compiled_needs(lowered: jax.stages.Lowered, run: Run, second: int = 0) -> dict[str, Any]:
    """Compile a program, and return its peak bytes, seconds and collectives on each device, or that it does not fit.

    Args:
        lowered: the program.
        run: on whose devices it runs.
        second: bytes that a device needs in addition, for an index that is being loaded.
    """
    try:
        compiled: Any = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needed = re.search(r"Used ([\d.]+[KMGT]) of ([\d.]+[KMGT]) hbm", str(error))
        return {"fits": False, "needs": needed[1] if needed else "?", "has": needed[2] if needed else "?"}
    sizes = compiled.memory_analysis()
    arguments, temporaries = sizes.argument_size_in_bytes, sizes.temp_size_in_bytes
    peak = arguments + temporaries + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    peak += sizes.generated_code_size_in_bytes + second
    device = known_chip(run)
    if peak > (capacity := device.memory or math.inf):  # known for all slices that a spec can name
        return {"fits": False, "needs": f"{peak / 2**30:.2f}G", "has": f"{capacity / 2**30:.2f}G"}
    memory = {"arguments": arguments, "temporaries": temporaries, "second_generation": second, "peak": peak}
    needs: dict[str, Any] = {"fits": True, "bytes": memory}
    slices = [slice_of(member) for member in run.mesh.devices.flat]
    coords = [member.coords for member in run.mesh.devices.flat]
    try:
        cost = program_cost(compiled.as_text())
        time = program_time(cost, device, slices, coords)
    except (ValueError, KeyError) as error:  # from a compiler with another text format
        return needs | {"time_unknown": f"{error}"}
    needs |= {"seconds": [time.low, time.high], "seconds_by_part": time.parts}
    needs |= {"cycles": cost.cycles, "invalid_seconds": cost.invalid_cycles / device.clock}
    return needs | {"collectives": collectives(cost, slices)}


def collectives(cost: Cost, slices: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return how often collectives run and how many bytes a device sends, by kind, number of devices and of slices.

    Args:
        cost: cost of the program.
        slices: for each device, in the program's order, the number of its slice.
    """
    by_name: dict[str, Counter[str]] = {}
    for collective, times in cost.collectives.items():
        num_slices = len({slices[index] for index in collective.group})
        over = f" over {num_slices} slices" if num_slices > 1 else ""
        inside, outside = sent(collective, slices)
        entry = by_name.setdefault(f"{collective.kind} of {len(collective.group)}{over}", Counter())
        entry.update({"times": times, "bytes": round(times * (inside + outside))})
        if num_slices > 1:
            entry.update({"bytes_between_slices": round(times * outside)})
    for transfer, times in cost.transfers.items():
        size = round(times * transferred(transfer, len(set(slices))))
        entry = by_name.setdefault(f"{transfer.kind} between slices", Counter())
        entry.update({"times": times, "bytes": size, "bytes_between_slices": size})
    return {name: dict(by_name[name]) for name in sorted(by_name)}


def known_chip(run: Run) -> Chip:
    """Return the accelerator of a run's devices; a spec can name only those in our table."""
    accelerator = chip(run.mesh.devices.flat[0].device_kind)
    assert accelerator is not None
    return accelerator


# --- arguments of programs: shapes, dtypes and shardings --------------------------------------------------------------


def abstract_arguments(trainer: Run, task: str) -> tuple[Any, Any, Any, Any]:
    """Return the arguments of a step: state, batch, index and control signals.

    Args:
        trainer: an abstract run on the devices to compile for.
        task: to plan.
    """
    mesh, config = trainer.mesh, trainer.config
    planned_task = make_task(task, trainer)
    state = abstract_state(planned_task, trainer.abstract_params)
    size = config[task].batch_size
    shapes = planned_task.example_spec().items()
    batch = {name: abstract_sharded(trainer, (size, *shape), dtype, "batch") for name, (shape, dtype) in shapes}
    index = None
    if planned_task.retrieves:
        rows = padded_rows(trainer.context.rows, corpus_devices(mesh))
        on_hosts = task == "realm" and trainer.scann_config is not None
        if on_hosts:
            batch["retrieved_rows"] = abstract_sharded(trainer, (size, config.realm.candidates), jnp.int32, "batch")
        vectors: Any = None
        if needs_vectors(task, config) and not on_hosts:
            shape = (rows, trainer.model.vector_size)
            vectors = abstract_sharded(trainer, shape, jnp.dtype(config.model.dtype), "rows")
        index = Index(vectors, abstract_documents(trainer, rows, "rows"))
    control = jax.ShapeDtypeStruct((mesh.size, len(ControlSignal())), jnp.int32, sharding=control_sharding(mesh))
    return state, batch, index, control


def abstract_documents(run: Run, rows: int, axis: str) -> PassageBatch:
    """Return abstract passages as in the corpus.

    Args:
        run: the abstract run.
        rows: number of passages.
        axis: logical axis as which rows are sharded.
    """
    shape = (rows, run.config.data.document_length)
    ids = abstract_sharded(run, shape, id_dtype(run.model.bert.vocabulary_size), axis)
    lengths = abstract_sharded(run, (rows,), jnp.uint16, axis)
    return PassageBatch(ids, lengths, lengths)  # type: ignore[arg-type]


def abstract_sharded(run: Run, shape: tuple[int, ...], dtype: Any, axis: str) -> jax.ShapeDtypeStruct:
    """Return an abstract array whose first dimension is sharded.

    Args:
        run: the abstract run.
        shape: shape of the array.
        dtype: dtype of the array.
        axis: logical axis as which the first dimension is sharded.
    """
    sharding = logical_sharding(run.mesh, axis, *[None] * (len(shape) - 1))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=row_major(sharding, len(shape)) if axis == "rows" else sharding)


# --- the plan as a table ----------------------------------------------------------------------------------------------


def show(planned: dict[str, Any]) -> None:
    """Print a plan as a table."""
    head = f"{planned['task']} on {planned['devices']} × {planned['device']}"
    table = Table(title=head, title_justify="left", show_header=False)
    add, builder = table.add_row, planned.get("builder", planned)
    add("corpus", f"{planned['passages']:,} passages, {planned['vocabulary']:,} word pieces")
    if not planned["fits"]:
        add("memory a device", f"needs {planned['needs']}, has {planned['has']}: does NOT fit")
        add("try", LESS_MEMORY)
    for name, size in planned.get("bytes", {}).items():
        add(f"memory a device: {name.replace('_', ' ')}", f"{size / 2**30:.2f} GiB")
    for name, entry in planned.get("collectives", {}).items():
        outside = entry.get("bytes_between_slices", 0)
        partly = f", {outside / 1e6:,.1f} of it to other slices" if 0 < outside < entry["bytes"] else ""
        add(f"{entry['times']} × {name}", f"{entry['bytes'] / 1e6:,.1f} MB sent by a device{partly}")
    add("operations a step", f"{planned['flops'] / 1e12:,.1f} T")
    for name, value in planned["flops_by_part"].items():
        add(f"  {name}", f"{value / 1e12:,.1f} T")
    if useful := planned.get("useful"):
        means = f"queries of {useful['query']:.0f} and passages of {useful['passage']:.0f} tokens on average"
        add("  of tokens, not padding", f"{useful['share']:.0%}: {means}")
    if "hours" in planned:
        add("a step (estimated)", between(planned["seconds"], 1e3, " ms"))
        for name, seconds in planned["seconds_by_part"].items():
            add(f"  only {name}", f"{seconds * 1e3:,.1f} ms at least")
        invalid = planned["invalid_seconds"]
        add("  other operations by the compiler", f"{invalid * 1e3:,.1f} ms, which it marks as invalid")
        add("MFU", between(planned["mfu"], 100, " %"))
        add("all steps", between(planned["hours"], 1, " hours", 1))
        if "builder" in planned:
            add("the builder's memory a device", f"{builder['bytes']['peak'] / 2**30:.2f} GiB")
            name = f"embedding all passages on {planned['builder_devices']} devices"
            add(name, between(planned["refresh_seconds"], 1 / 60, " minutes", 1))
            add("MFU of embedding", between(planned["refresh_mfu"], 100, " %"))
            add("steps between two indexes", f"{between(planned['steps_per_refresh'])} (paper: {PAPER_REFRESH})")
            add(f"builder devices for {PAPER_REFRESH} steps", f"{planned['builder_devices_for_paper']}")
        if scann := planned.get("scann"):
            add("a host's search for a step", f"{scann['search_core_seconds'] * 1e3:,.0f} ms of one core")
            minutes = scann["build_core_seconds"] / 60
            add("learning and building all searchers", f"{minutes:,.0f} minutes of one core")
        if "cost" in planned:
            add("cost", between(planned["cost"]))
        compiler, image = planned["compiler"], image_versions()
        other = [f"{name} {image[name]}" for name in compiler if image[name] != compiler[name]]
        note = f"; the image has {', '.join(other)}, so the program that runs may differ" if other else ""
        add("compiled with", ", ".join(f"{name} {number}" for name, number in compiler.items()) + note)
    for name, program in (("a step's time", planned), ("time of embedding", planned.get("builder", {}))):
        if "time_unknown" in program:
            add(name, f"not known: {program['time_unknown']}")
    if not builder["fits"]:
        add("the builder's memory a device", "does NOT fit: set config.model.dtype=bfloat16")
    Console(highlight=False).print(table)


def between(values: Sequence[float], factor: float = 1, unit: str = "", digits: int = 0) -> str:
    """Format a range, or one number if both ends are printed alike.

    Args:
        values: low and high.
        factor: factor by which they are multiplied.
        unit: after the last number.
        digits: after the decimal point.
    """
    low, high = (f"{value * factor:,.{digits}f}" for value in values)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"
