"""How long a compiled TPU program takes, as a range: the compiler's cycles, and arithmetic for what it leaves out.

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

from collections.abc import Sequence
from typing import NamedTuple

from realm_jax.chips import V5E, V5P, V6E, Chip
from realm_jax.compiled_cost import Collective, Cost, Kernel, Transfer
from realm_jax.models.tpu_attention import LANES

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
