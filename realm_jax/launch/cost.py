"""Estimate how long a compiled TPU program takes, from its text. Nothing here was measured on a TPU.

The compiler annotates operations with `estimated_cycles`, but not kernels (Pallas), TopK, gathers, scatters, sorts and
collectives. `program_cost` counts all of them, those of a loop as often as the loop runs; `program_time` makes seconds:

* Operations: estimated cycles over the clock. They include the bandwidth of memory, not launches or waiting for hosts.
  The compiler marks its estimates as invalid for operations without a matrix product. Their true time is between the
  time in which memory passes their arguments and results (low) and the estimate (high).
* Gathers, scatters and sorts: twice the bytes of their results over the bandwidth of memory. They take longer, the more
  so the smaller the rows are.
* Attention kernels: words of their schedule, a word a cycle (`benchmarks/tpu_attention.py`), in proportion to the
  scores that registers hold; for heads of 64.
* TopK: between one pass over its input and one pass for each number that it returns.
* Collectives: bytes that a chip sends, over the bandwidth of all its links (low), or bytes over the busiest link of one
  ring or line through its group (high). v5e and v6e have no links between the ends of a row below 16 chips, so a group
  in such a row is a line. Between slices, bytes over the chip's share of the hosts' network.

Low: all collectives overlap with other work, so the longer one counts. High: nothing overlaps.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from realm_jax.flops import V5E, V5P, V6E, Chip
from realm_jax.models.attention import LANES

# Cycles for a score of 128 features, for sequences of 384.
CYCLES = {
    "attend": {V5E: 0.0121, V5P: 0.0130, V6E: 0.0098},
    "attend_and_drop": {V5E: 0.0162, V5P: 0.0171, V6E: 0.0132},
    "differentiate": {V5E: 0.0267, V5P: 0.0272, V6E: 0.0180},
    "differentiate_and_drop": {V5E: 0.0301, V5P: 0.0313, V6E: 0.0234},
    "attend_packed": {V5E: 0.0150, V5P: 0.0150, V6E: 0.0121},
    "attend_packed_and_drop": {V5E: 0.0191, V5P: 0.0192, V6E: 0.0155},
    "differentiate_packed": {V5E: 0.0315, V5P: 0.0318, V6E: 0.0223},
    "differentiate_packed_and_drop": {V5E: 0.0349, V5P: 0.0349, V6E: 0.0276},
}
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")  # dtype, dimensions
COLLECTIVE = re.compile(
    r" = (.*) (all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)(-start)?\("
)
# Operations that run another computation; its name is the first group or, for fused operations, the second.
CALL = re.compile(r" call\(.*to_apply=%?([\w.\-]+)| (?:fusion|async-start)\(.*calls=%?([\w.\-]+)")
MOVE = re.compile(
    r"%(?!all-)[\w.\-]*(?:gather|scatter)[\w.\-]* = (\S.*?) (?:fusion|gather|scatter)\(| = (\S.*?) sort\("
)
RESULT = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) [a-z][a-z\-]*\(")  # name, types
INVALID = "COST_MODEL_TYPE_INVALID"  # how the compiler marks an estimate that its cost model does not make
LAID_OUT = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")  # an array and its layout
IN_VMEM = "S(1)"  # memory space in the layout of an array
TRANSFER = re.compile(r" = \((.*?), .*\) send\(.*_xla_megascale_transfer_type=\"(\w+)\"")


class Kernel(NamedTuple):
    """A Pallas kernel.

    Attributes:
        name: name of the kernel.
        shape: shape of its first result, [batch, length, width] for attention.
    """

    name: str
    shape: tuple[int, ...]


class Collective(NamedTuple):
    """A collective inside of a program.

    Attributes:
        kind: 'all-reduce', ….
        size: bytes on a device of the larger of input and output.
        group: one group that communicates: indices in the program's order of devices.
    """

    kind: str
    size: int
    group: tuple[int, ...]


class Transfer(NamedTuple):
    """A collective of the devices with the same index in every slice, over the hosts' network.

    Attributes:
        kind: kind of the collective.
        size: bytes that a device passes to its host.
    """

    kind: str
    size: int


class TopK(NamedTuple):
    """A selection of the largest numbers.

    Attributes:
        size: bytes of the input.
        k: numbers of each row that are returned.
    """

    size: int
    k: int


class Cost(NamedTuple):
    """The cost of a program on each device, and how often each kind of work without an estimate runs.

    Attributes:
        cycles: sum of the compiler's valid estimates.
        invalid_cycles: sum of the estimates that the compiler marks as invalid.
        invalid_bytes: arguments and results in HBM of the operations with such an estimate.
        moved: bytes of the results of gathers, scatters and sorts.
        kernels: how often each runs.
        top_k: how often each runs.
        collectives: how often each runs.
        transfers: how often each runs.
    """

    cycles: int
    invalid_cycles: int
    invalid_bytes: int
    moved: int
    kernels: Counter[Kernel]
    top_k: Counter[TopK]
    collectives: Counter[Collective]
    transfers: Counter[Transfer]


class Time(NamedTuple):
    """Estimated time on every device, in seconds.

    Attributes:
        low: if communication overlaps with computation.
        high: if it does not.
        parts: parts of each kind of work: the minimum, as if it did not overlap with other work.
    """

    low: float
    high: float
    parts: dict[str, float]


def program_time(cost: Cost, chip: Chip, slices: Sequence[int], coords: Sequence[Sequence[int]]) -> Time:
    """Estimate the time of a program.

    Args:
        cost: cost of the program.
        chip: on which it runs.
        slices: for each device, in the program's order, the number of its slice.
        coords: for each device, its place in the slice.

    Raises:
        KeyError: a kernel or a kind of transfer is unknown.
    """
    between = sum(times * sent(collective, slices)[1] for collective, times in cost.collectives.items())
    between += sum(times * transferred(transfer, len(set(slices))) for transfer, times in cost.transfers.items())
    sides = [1 + max(axis) for axis in zip(*coords, strict=True)]
    busiest_link = 0.0  # bytes
    for each, times in cost.collectives.items():
        in_slice = [coords[index] for index in each.group if slices[index] == slices[each.group[0]]]
        busiest_link += times * over_busiest_link(each, slices, is_ring(in_slice, sides, chip.wraps_from))
    parts = {
        "matrix products": cost.cycles / chip.clock,
        "other operations": cost.invalid_bytes / chip.bandwidth,
        "gathers, scatters and sorts": 2 * cost.moved / chip.bandwidth,
        "attention kernels": sum(n * kernel_cycles(kernel, chip) for kernel, n in cost.kernels.items()) / chip.clock,
        "top-k": sum(times * top.size for top, times in cost.top_k.items()) / chip.bandwidth,
        "collectives in a slice": sum(n * sent(each, slices)[0] for each, n in cost.collectives.items()) / chip.ici,
        "collectives between slices": between / chip.dcn,
    }
    products, others, moved, kernels, top_k, inside, between = parts.values()
    passes = sum(times * top.size * top.k for top, times in cost.top_k.items()) / chip.bandwidth
    low = max(products + others + moved + kernels + top_k, inside, between)
    estimated = max(others, cost.invalid_cycles / chip.clock)
    return Time(low, products + estimated + moved + kernels + passes + busiest_link / chip.link + between, parts)


def kernel_cycles(kernel: Kernel, chip: Chip) -> float:
    """Return the cycles of one run of an attention kernel over [batch, length, width].

    Args:
        kernel: the kernel.
        chip: on which it runs.

    Raises:
        KeyError: the kernel is unknown.
    """
    batch, length, width = kernel.shape
    scores = batch * (width // LANES) * scores_held(length)
    return scores * CYCLES[kernel.name][chip] / chip.cores


def scores_held(length: int) -> int:
    """Return the scores of a sequence that registers hold: its keys are padded to complete lanes."""
    return length * -(-length // LANES) * LANES


def sent(collective: Collective, slices: Sequence[int]) -> tuple[float, float]:
    """Return the bytes that a device sends inside of its slice, and to other slices.

    We assume a ring in every slice, whose members then exchange their share with those of the other slices.

    Args:
        collective: the collective.
        slices: for each device, in the program's order, the number of its slice.
    """
    size, members = collective.size, len(collective.group)
    num_slices = len({slices[index] for index in collective.group})
    in_slice = members // num_slices
    if collective.kind == "collective-permute":
        return (0.0, size) if num_slices > 1 else (size, 0.0)
    if collective.kind.endswith("all-to-all"):
        return size * (in_slice - 1) / members, size * (members - in_slice) / members
    both_ways = 2 if collective.kind == "all-reduce" else 1
    return both_ways * size * (in_slice - 1) / in_slice, both_ways * size * (num_slices - 1) / members


def is_ring(coords: Sequence[Sequence[int]], sides: Sequence[int], wraps_from: int) -> bool:
    """Return True if links connect the chips of a group in a ring.

    Args:
        coords: place of each chip in the slice.
        sides: of the slice.
        wraps_from: length of a side from which links connect its ends.
    """
    spans = [1 + max(axis) - min(axis) for axis in zip(*coords, strict=True)]
    if math.prod(spans) != len(coords):  # others are between them
        return False
    longer = [(span, side) for span, side in zip(spans, sides, strict=True) if span > 1]
    if len(longer) == 1:
        return longer[0][0] == longer[0][1] >= wraps_from
    return len(coords) % 2 == 0  # a block of an even number of chips


def over_busiest_link(collective: Collective, slices: Sequence[int], ring: bool) -> float:
    """Return the bytes over the busiest link, in one direction, of a collective in a slice.

    A ring sends both ways around. At the end of a line, all bytes come over one link.

    Args:
        collective: the collective.
        slices: for each device, in the program's order, the number of its slice.
        ring: true if links connect its group in a ring.
    """
    in_slice = len(collective.group) // len({slices[index] for index in collective.group})
    if collective.kind.endswith("all-to-all"):  # half of the chips send half of their bytes to the others
        return sent(collective, slices)[0] and collective.size * in_slice / (8 if ring else 4)
    return sent(collective, slices)[0] / (2 if ring and collective.kind != "collective-permute" else 1)


def transferred(transfer: Transfer, num_slices: int) -> float:
    """Return the bytes that a device sends to other slices.

    Args:
        transfer: the transfer.
        num_slices: number of slices.

    Raises:
        KeyError: its kind is unknown.
    """
    others = num_slices - 1
    shares = {
        "all-reduce": 2 * others / num_slices,
        "reduce-scatter": others / num_slices,
        "all-to-all": others / num_slices,
        "all-gather": others,
        "one-to-one": 1,
    }
    return transfer.size * shares[transfer.kind]


# --- the text of a compiled program -----------------------------------------------------------------------------------


def program_cost(text: str) -> Cost:
    """Count the cost of a compiled program.

    Raises ValueError for a loop of unknown length, for a condition (its text does not say which branch runs), and for
    operations that we cannot read.
    """
    # --- the lines of each computation
    entry, lines = "", []
    computations: dict[str, list[str]] = {}
    for line in text.splitlines():
        if (head := COMPUTATION.match(line)) is not None:
            lines = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        else:
            lines.append(line)
    if not entry:
        raise ValueError("the compiled program has no entry")

    # --- how often each computation runs, and which are parts of fused operations
    runs: Counter[str] = Counter()
    fused: set[str] = set()

    def visit(name: str, times: int, in_fusion: bool) -> None:
        runs[name] += times
        if in_fusion:
            fused.add(name)
        for line in computations[name]:
            if " while(" in line:
                condition, body = (_search(rf"\b{part}=%?([\w.\-]+)", line, line)[1] for part in ("condition", "body"))
                visit(body, times * _loop_length(condition, computations[condition]), in_fusion)
            elif " conditional(" in line:
                raise ValueError("the compiled program has a condition; how often its branches run is not known")
            elif (call := CALL.search(line)) is not None and (name := call[1] or call[2]) in computations:
                visit(name, times, in_fusion or call[1] is None)

    visit(entry, 1, False)

    # --- the cost of every line
    cycles = invalid_cycles = invalid_bytes = moved = 0
    kernels: Counter[Kernel] = Counter()
    top_k: Counter[TopK] = Counter()
    transfers: Counter[Transfer] = Counter()
    channels: dict[str, tuple[int, Collective]] = {}
    results_of = {
        name: {result[1]: result[2] for line in computations[name] if (result := RESULT.match(line)) is not None}
        for name in runs
    }  # computation → name of an operation → types of its results
    for computation, line in [(name, line) for name in runs for line in computations[name]]:
        times = runs[computation]
        annotated = re.search(r'"estimated_cycles":"(\d+)"', line)
        estimated = int(annotated[1]) if annotated else 0
        if INVALID in line:
            invalid_cycles += times * estimated
            invalid_bytes += times * _bytes_in_hbm(line, results_of[computation])
        else:
            cycles += times * estimated
        if not estimated and computation not in fused and (move := MOVE.search(line)):
            moved += times * sum(_sizes(move[1] or move[2]))
        if 'custom_call_target="tpu_custom_call"' in line:
            kernel = _search(r'op_name="[^"]*?(\w+)\)*/pallas_call', line, line)[1]
            shape = _numbers(_search(ARRAY, line.partition("custom-call(")[0], line)[2])
            # A kernel over packed rows has batch and length in its name.
            if packed := re.fullmatch(r"(\w+)_(\d+)_(\d+)", kernel):
                kernel, shape = packed[1], (int(packed[2]), int(packed[3]), shape[-1])
            kernels[Kernel(kernel, shape)] += times
        elif 'custom_call_target="TopK"' in line:
            results, _, arguments = line.partition("custom-call(%")
            argument = re.escape(re.split(r"[,)]", arguments)[0])
            compared = _search(rf"%{argument} = ([^(]+)", text, line)[1]
            top_k[TopK(sum(_sizes(compared)), _arrays(results)[0][1][-1])] += times
        elif collective := COLLECTIVE.search(line):
            results, kind, started = collective.groups()
            group = _group(line)
            # A start returns its input and its output, but an all-reduce-start only its outputs.
            size = max(_sizes(results)) if started and kind != "all-reduce" else sum(_sizes(results))
            if kind == "reduce-scatter":
                size *= len(group)
            if computation.startswith("all-reduce-scatter"):  # each device takes only a part of the sum
                kind = "reduce-scatter"
            # A collective that overlaps with other work is in several computations: each channel counts once.
            channel = re.search(r"channel_id=(\d+)", line)
            key, counted = channel[0] if channel else line, (times, Collective(kind, size, group))
            channels[key] = max(channels.get(key, counted), counted)
        elif transfer := TRANSFER.search(line):
            transfers[Transfer(transfer[2].lower().replace("_", "-"), sum(_sizes(transfer[1])))] += times
    collectives: Counter[Collective] = Counter()
    for times, counted_collective in channels.values():
        collectives[counted_collective] += times
    return Cost(cycles, invalid_cycles, invalid_bytes, moved, kernels, top_k, collectives, transfers)


def _search(pattern: str | re.Pattern[str], text: str, line: str) -> re.Match[str]:
    """Search a pattern that must be in the text. Raises ValueError, which names the line."""
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiled program has an operation that cannot be read: {line.strip()[:300]}")
    return match


def _loop_length(loop: str, lines: list[str]) -> int:
    """Return how often a loop runs: its condition compares a counter with a constant, and JAX counts from 0 by 1."""
    text = "\n".join(lines)
    constants = dict(re.findall(r"%([\w.\-]+) = s32\[\]\S* constant\((\d+)\)", text))
    compared = re.search(r"ROOT .*compare\((.*?)\), direction=[LG]T", text)
    names = re.findall(r"%([\w.\-]+)", compared[1]) if compared else []
    limits = [constants[name] for name in names if name in constants]
    if len(limits) != 1:
        raise ValueError(f"the compiled program does not say how often its loop {loop} runs")
    return int(limits[0])


def _group(line: str) -> tuple[int, ...]:
    """Return the first group of devices of a collective; of pairs, the first with two different devices."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        device_pairs = [(int(source), int(target)) for source, target in re.findall(r"\{(\d+),(\d+)", pairs[1] + "}")]
        return next((pair for pair in device_pairs if pair[0] != pair[1]), device_pairs[0])
    if explicit := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return _numbers(explicit[1])
    if tiled := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        groups = _device_ids(tiled[2], tiled[3]).reshape(_numbers(tiled[1]))  # [..., devices of a group]
        return tuple(groups.reshape(-1, groups.shape[-1])[0].tolist())
    order = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    named = _search(r"replica_groups=mesh\[(.*?)\]" + order + r" \{([\w',]*)\}", line, line)
    sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", named[1])}
    group_axes = re.findall(r"'\w+'", named[4])
    all_devices = named[2] or str(math.prod(sizes.values()))
    mesh = _device_ids(all_devices, named[3]).reshape(tuple(sizes.values()))
    return tuple(mesh[tuple(slice(None) if name in group_axes else 0 for name in sizes)].reshape(-1).tolist())


def _device_ids(dimensions: str, order: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_numbers(dimensions))).reshape(_numbers(dimensions))
    return ids.transpose(_numbers(order)) if order else ids


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and dimensions of each array that a text names, without layouts in braces."""
    return [(array[1], _numbers(array[2])) for array in ARRAY.finditer(re.sub(r"\{[^}]*\}", "", text))]


def _bytes_in_hbm(line: str, results: dict[str, str]) -> int:
    """Return the bytes of an operation's results and arguments that are in HBM.

    Args:
        line: of the operation.
        results: types of the results of each operation of its computation, by name.
    """
    own = RESULT.match(line)
    if own is None:
        return 0
    arguments = re.findall(r"%([\w.\-]+)", line[own.end() :].partition(")")[0])
    arrays = LAID_OUT.findall(" ".join([own[2], *(results.get(name, "") for name in arguments)]))
    return sum(sum(_sizes(array)) for array in arrays if IN_VMEM not in array)


def _sizes(text: str) -> list[int]:
    """Return the bytes of each array that a text names; a number of fewer than eight bits takes one byte."""
    sizes = []
    for dtype, shape in _arrays(text):
        bits = re.search(r"\d+", dtype)
        sizes.append(math.prod(shape) * (max(1, int(bits[0]) // 8) if bits else 1))
    return sizes
