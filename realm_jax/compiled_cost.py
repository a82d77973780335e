"""What the TPU compiler's own cost model says of a compiled program: cycles, read from its text.

The compiler annotates operations with `estimated_cycles`; kernels (Pallas), the largest of many numbers (TopK) and
collectives have none. A loop's body counts as often as the loop's condition says.
"""

import re

HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")


def program_cycles(text: str) -> int:
    """The cycles of a program on each device. Raises ValueError for a loop whose length it does not say."""
    entry, bodies = _computations(text)
    found: dict[str, int] = {}

    def cycles(name: str) -> int:
        if name not in found:
            found[name] = sum(_own(line) + _inner(line) for line in bodies[name])
        return found[name]

    def _inner(line: str) -> int:
        if (loop := re.search(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)", line)) is not None:
            return _trips(loop[1], bodies[loop[1]]) * cycles(loop[2])
        called = re.search(r" call\(.*to_apply=%?([\w.\-]+)", line)
        return cycles(called[1]) if called else 0

    return cycles(entry)


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


def _own(line: str) -> int:
    annotated = re.search(r'"estimated_cycles":"(\d+)"', line)
    return int(annotated[1]) if annotated else 0


def _trips(loop: str, lines: list[str]) -> int:
    """How often a loop runs whose condition is that a counter, which starts at 0, lies below a constant."""
    text = "\n".join(lines)
    constants = dict(re.findall(r"%([\w.\-]+) = s32\[\]\S* constant\((\d+)\)", text))
    compared = re.search(r"ROOT .*compare\((.*?)\), direction=[LG]T", text)
    names = re.findall(r"%([\w.\-]+)", compared[1]) if compared else []
    limits = [constants[name] for name in names if name in constants]
    if len(limits) != 1:
        raise ValueError(f"the compiled program does not say how often its loop {loop} runs")
    return int(limits[0])
