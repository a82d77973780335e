"""What the TPU compiler's own cost model says of a compiled program, read from its text, and what the model leaves out.

The compiler annotates operations with `estimated_cycles`; kernels (Pallas), the largest of many numbers (TopK),
gathers, scatters, sorts and collectives have none, and are listed. What a loop does counts as often as the loop's
condition says.

How long a compiled TPU program takes, as a range: the compiler's cycles, and arithmetic for what it leaves out.

Nothing of it is measured on a TPU.

* Operations: estimated cycles over the clock. They know of memory's bandwidth, not of launches or of waiting for hosts.
* Gathers, scatters and sorts: twice the bytes that they give, over memory's bandwidth; they take longer, the more so
  the smaller the pieces.
* Kernels of attention: words of their schedule, a word a cycle (`benchmarks/tpu_attention.py`), in proportion to the
  scores that registers hold; of heads of 64.
* TopK: between one reading of what it compares and one for each of the numbers wanted.
* Collectives: bytes that a chip sends, over the bandwidth of all its links at best, and of one axis of the torus at
  worst; between slices, over its share of the hosts' network.

Low: all collectives go on beside other work, and what takes longer counts. High: nothing goes on beside them.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from realm_jax.flops import V5E, V5P, V6E, Chip
from realm_jax.models.tpu_attention import LANES

HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
COLLECTIVE = re.compile(
    r" = (.*) (all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)(-start)?\("
)
# What runs another computation, whose name is the first or, of fused operations, the second group.
CALL = re.compile(r" call\(.*to_apply=%?([\w.\-]+)| (?:fusion|async-start)\(.*calls=%?([\w.\-]+)")
MOVES = re.compile(
    r"%(?!all-)[\w.\-]*(?:gather|scatter)[\w.\-]* = (\S.*?) (?:fusion|gather|scatter)\(| = (\S.*?) sort\("
)
One = TypeVar("One")


class Kernel(NamedTuple):
    """A Pallas kernel by its name, and the shape of the first array that it gives."""

    name: str
    shape: tuple[int, ...]


class Collective(NamedTuple):
    """kind: 'all-reduce', …; size: bytes on a device of the larger of what it takes and gives; group: places in the
    program's order of devices, of those that one group of it joins."""

    kind: str
    size: int
    group: tuple[int, ...]


class Transfer(NamedTuple):
    """What devices of the same place in every slice do together, over the hosts' network: as `Collective`, of what a
    device hands to its host."""

    kind: str
    size: int


class TopK(NamedTuple):
    """The largest of many numbers. size: bytes that it reads; wanted: numbers of each row."""

    size: int
    wanted: int


class Cost(NamedTuple):
    """Of a program, on each device: cycles, without all that follows; bytes that gathers, scatters and sorts give; and
    how often each of the others runs."""

    cycles: int
    moved: int
    kernels: Counter[Kernel]
    top_k: Counter[TopK]
    collectives: Counter[Collective]
    transfers: Counter[Transfer]


def program_cost(text: str) -> Cost:
    """The cost of a compiled program. Raises ValueError for a loop whose length it does not say, for a condition, of
    which it does not say which branch runs, and for what it cannot read."""
    entry, bodies = _computations(text)
    if not entry:
        raise ValueError("the compiled program has no entry")
    runs, fused = _runs(entry, bodies)
    lines = [(runs[name], name, line) for name in runs for line in bodies[name]]
    cycles = sum(times * _cycles(line) for times, _, line in lines)
    moved = sum(times * _moved(line) for times, name, line in lines if name not in fused)
    kernels = _counted((times, _kernel(line)) for times, _, line in lines)
    top_k = _counted((times, _top_k(line, text)) for times, _, line in lines)
    transfers = _counted((times, _transfer(line)) for times, _, line in lines)
    return Cost(cycles, moved, kernels, top_k, _counted(_collectives(lines)), transfers)


def _counted(found: Iterable[tuple[int, One | None]]) -> Counter[One]:
    counts: Counter[One] = Counter()
    for times, one in found:
        if one is not None:
            counts[one] += times
    return counts


def _computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """The name of the program's entry, and the lines of each of its computations."""
    entry, lines = "", []
    bodies: dict[str, list[str]] = {}
    for line in text.splitlines():
        if (head := HEAD.match(line)) is not None:
            lines = bodies.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        else:
            lines.append(line)
    return entry, bodies


def _runs(entry: str, bodies: dict[str, list[str]]) -> tuple[Counter[str], set[str]]:
    """How often each computation runs, and which are parts of fused operations."""
    runs: Counter[str] = Counter()
    fused: set[str] = set()

    def visit(name: str, times: int, within: bool) -> None:
        runs[name] += times
        fused.update([name] if within else [])
        for line in bodies[name]:
            for called, inner, joined in _called(line, bodies):
                visit(called, times * inner, within or joined)

    visit(entry, 1, False)
    return runs, fused


def _called(line: str, bodies: dict[str, list[str]]) -> Iterator[tuple[str, int, bool]]:
    """The computations that an operation runs, how often, and whether it is them, fused."""
    if " while(" in line:
        condition, body = (_named(part, line) for part in ("condition", "body"))
        yield body, _trips(condition, bodies[condition]), False
    elif " conditional(" in line:
        raise ValueError("the compiled program has a condition; how often its branches run is not known")
    elif (call := CALL.search(line)) is not None and (name := call[1] or call[2]) in bodies:
        yield name, 1, call[1] is None


def _named(part: str, line: str) -> str:
    found = re.search(rf"\b{part}=%?([\w.\-]+)", line)
    if found is None:
        raise _unknown(line)
    return found[1]


def _unknown(line: str) -> ValueError:
    return ValueError(f"the compiled program has an operation that cannot be read: {line.strip()[:300]}")


def _trips(loop: str, lines: list[str]) -> int:
    """How often a loop runs whose condition is that a counter lies below a constant; JAX's loops count from 0 by 1."""
    text = "\n".join(lines)
    constants = dict(re.findall(r"%([\w.\-]+) = s32\[\]\S* constant\((\d+)\)", text))
    compared = re.search(r"ROOT .*compare\((.*?)\), direction=[LG]T", text)
    names = re.findall(r"%([\w.\-]+)", compared[1]) if compared else []
    limits = [constants[name] for name in names if name in constants]
    if len(limits) != 1:
        raise ValueError(f"the compiled program does not say how often its loop {loop} runs")
    return int(limits[0])


def _cycles(line: str) -> int:
    annotated = re.search(r'"estimated_cycles":"(\d+)"', line)
    return int(annotated[1]) if annotated else 0


def _moved(line: str) -> int:
    """Bytes that a gather, a scatter or a sort gives, where it is an operation of its own without an estimate."""
    found = MOVES.search(line)
    return _together(found[1] or found[2]) if found and not _cycles(line) else 0


def _kernel(line: str) -> Kernel | None:
    if 'custom_call_target="tpu_custom_call"' not in line:
        return None
    name, shapes = re.search(r'op_name="[^"]*?(\w+)\)*/pallas_call', line), _shapes(line.partition("custom-call(")[0])
    if name is None or not shapes:
        raise _unknown(line)
    if packed := re.fullmatch(r"(\w+)_(\d+)_(\d+)", name[1]):
        return Kernel(packed[1], (int(packed[2]), int(packed[3]), shapes[0][1][-1]))
    return Kernel(name[1], shapes[0][1])


def _top_k(line: str, text: str) -> TopK | None:
    if 'custom_call_target="TopK"' not in line:
        return None
    given, _, taken = line.partition("custom-call(%")
    name = re.escape(re.split(r"[,)]", taken)[0])
    compared = re.search(rf"%{name} = ([^(]+)", text)
    if compared is None:
        raise _unknown(line)
    return TopK(_together(compared[1]), _shapes(given)[0][1][-1])


def _collectives(lines: list[tuple[int, str, str]]) -> Iterable[tuple[int, Collective]]:
    """Each channel once: a collective that goes on beside other work stands in several computations. lines: how often
    each runs, in which computation."""
    channels: dict[str, tuple[int, Collective]] = {}
    for times, computation, line in lines:
        if (found := COLLECTIVE.search(line)) is None:
            continue
        channel, group = re.search(r"channel_id=(\d+)", line), _group(line)
        kind, in_and_out = found[2], found[3] and found[2] != "all-reduce"  # what has started names both
        size = (_largest if in_and_out else _together)(found[1]) * (len(group) if kind == "reduce-scatter" else 1)
        if computation.startswith("all-reduce-scatter"):  # a part of the sum is taken at once, so no more is sent
            kind = "reduce-scatter"
        one = times, Collective(kind, size, group)
        key = channel[0] if channel else line
        channels[key] = max(channels.get(key, one), one)
    return channels.values()


def _transfer(line: str) -> Transfer | None:
    found = re.search(r" = \((.*?), .*\) send\(.*_xla_megascale_transfer_type=\"(\w+)\"", line)
    return Transfer(found[2].lower().replace("_", "-"), _together(found[1])) if found else None


def _group(line: str) -> tuple[int, ...]:
    """The first group of devices of a collective; of pairs, the first that are two devices."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        both = [tuple(int(place) for place in pair) for pair in re.findall(r"\{(\d+),(\d+)", pairs[1] + "}")]
        return next((pair for pair in both if pair[0] != pair[1]), both[0])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return tuple(int(place) for place in listed[1].split(","))
    if tiled := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        places = _places(tiled[2], tiled[3]).reshape(_numbers(tiled[1]))
        return tuple(places.reshape(-1, places.shape[-1])[0].tolist())
    order = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    if named := re.search(r"replica_groups=mesh\[(.*?)\]" + order + r" \{(.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", named[1])}
        joined = re.findall(r"'\w+'", named[4])
        whole = named[2] or str(math.prod(sizes.values()))
        if re.fullmatch(r"[\w',]*", named[4]):
            places = _places(whole, named[3]).reshape(tuple(sizes.values()))
            return tuple(places[tuple(slice(None) if name in joined else 0 for name in sizes)].reshape(-1).tolist())
    raise _unknown(line)


def _places(dimensions: str, order: str | None) -> np.ndarray:
    places = np.arange(math.prod(_numbers(dimensions))).reshape(_numbers(dimensions))
    return places.transpose(_numbers(order)) if order else places


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and dimensions of each array that a text names."""
    return [(found[1], _numbers(found[2])) for found in SHAPE.finditer(re.sub(r"\{[^}]*\}", "", text))]


def _largest(text: str) -> int:
    """Bytes of the largest array that a text names."""
    return max(math.prod(shape) * _width(dtype) for dtype, shape in _shapes(text))


def _together(text: str) -> int:
    """Bytes of all arrays that a text names."""
    return sum(math.prod(shape) * _width(dtype) for dtype, shape in _shapes(text))


def _width(dtype: str) -> int:
    """Bytes of a number; of less than eight bits, one."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


# Cycles for a score of 128 features, of sequences of 384.
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


class Time(NamedTuple):
    """Seconds on every device. parts: of each kind of work, at its least, as if nothing went on beside it."""

    low: float
    high: float
    parts: dict[str, float]


def program_time(cost: Cost, chip: Chip, slices: Sequence[int]) -> Time:
    """The time of a program. slices: of each device in the program's order, the number of its slice. Raises KeyError
    for a kernel, or a transfer between slices, that is not known."""
    operations = cost.cycles / chip.clock
    moved = 2 * cost.moved / chip.bandwidth
    kernels = sum(times * kernel_cycles(kernel, chip) for kernel, times in cost.kernels.items()) / chip.clock
    top_k = sum(times * one.size for one, times in cost.top_k.items()) / chip.bandwidth
    a_pass_each = sum(times * one.size * one.wanted for one, times in cost.top_k.items()) / chip.bandwidth
    inside = sum(times * sent(one, slices)[0] for one, times in cost.collectives.items()) / chip.ici
    between = sum(times * sent(one, slices)[1] for one, times in cost.collectives.items())
    between += sum(times * transferred(one, len(set(slices))) for one, times in cost.transfers.items())
    between /= chip.dcn
    low = max(operations + moved + kernels + top_k, inside, between)
    high = operations + moved + kernels + a_pass_each + inside * chip.axes + between
    parts = {
        "operations": operations,
        "gathers, scatters and sorts": moved,
        "attention kernels": kernels,
        "top-k": top_k,
        "collectives in a slice": inside,
        "collectives between slices": between,
    }
    return Time(low, high, parts)


def kernel_cycles(kernel: Kernel, chip: Chip) -> float:
    """Of one run over [batch, length, width]."""
    batch, length, width = kernel.shape
    scores = batch * (width // LANES) * scores_held(length)
    return scores * CYCLES[kernel.name][chip] / chip.cores


def scores_held(length: int) -> int:
    """Of a sequence: those that registers hold, whose lanes keys fill up."""
    return length * -(-length // LANES) * LANES


def sent(collective: Collective, slices: Sequence[int]) -> tuple[float, float]:
    """Bytes that a device sends in its slice, and to other slices: of rings in every slice, whose members then exchange
    their own share with those of the other slices."""
    size, members = collective.size, len(collective.group)
    apart = len({slices[place] for place in collective.group})
    here = members // apart
    if collective.kind == "collective-permute":
        return (0.0, size) if apart > 1 else (size, 0.0)
    if collective.kind.endswith("all-to-all"):
        return size * (here - 1) / members, size * (members - here) / members
    both_ways = 2 if collective.kind == "all-reduce" else 1
    return both_ways * size * (here - 1) / here, both_ways * size * (apart - 1) / members


def transferred(transfer: Transfer, slices: int) -> float:
    """Bytes that a device sends to other slices."""
    others = slices - 1
    shares = {
        "all-reduce": 2 * others / slices,
        "reduce-scatter": others / slices,
        "all-to-all": others / slices,
        "all-gather": others,
        "one-to-one": 1,
    }
    return transfer.size * shares[transfer.kind]
