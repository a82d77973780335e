"""What the TPU compiler's own cost model says of a compiled program: cycles, read from its text.

The compiler annotates operations with `estimated_cycles`; kernels (Pallas), the largest of many numbers (TopK) and
collectives have none. A loop's body counts as often as the loop's condition says.
"""

import re
from collections import Counter
from typing import NamedTuple

HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")


class Cost(NamedTuple):
    """cycles: of a program on each device, without its kernels; kernels: how often each of them runs, by name."""

    cycles: int
    kernels: Counter[str]


def program_cost(text: str) -> Cost:
    """The cost of a compiled program. Raises ValueError for a loop whose length it does not say, and for a condition,
    of which it does not say which branch runs."""
    entry, bodies = _computations(text)
    found: dict[str, Cost] = {}

    def cost(name: str) -> Cost:
        if name not in found:
            lines = bodies[name]
            found[name] = _sum([(1, _own(line)) for line in lines] + [part for line in lines for part in called(line)])
        return found[name]

    def called(line: str) -> list[tuple[int, Cost]]:
        if (loop := re.search(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)", line)) is not None:
            return [(_trips(loop[1], bodies[loop[1]]), cost(loop[2]))]
        if " conditional(" in line:
            raise ValueError("the compiled program has a condition; how often its branches run is not known")
        call = re.search(r" call\(.*to_apply=%?([\w.\-]+)", line)
        return [(1, cost(call[1]))] if call else []

    return cost(entry)


def _sum(parts: list[tuple[int, Cost]]) -> Cost:
    """Of costs, each so many times."""
    kernels: Counter[str] = Counter()
    for times, part in parts:
        kernels.update({name: times * count for name, count in part.kernels.items()})
    return Cost(sum(times * part.cycles for times, part in parts), kernels)


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


def _own(line: str) -> Cost:
    """Of one operation."""
    annotated = re.search(r'"estimated_cycles":"(\d+)"', line)
    kernel = re.search(r'custom_call_target="tpu_custom_call".*op_name="[^"]*?(\w+)\)*/pallas_call', line)
    return Cost(int(annotated[1]) if annotated else 0, Counter([kernel[1]] if kernel else []))


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
