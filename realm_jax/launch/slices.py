"""TPU slices: what `v5e:8x8` is called by gcloud and by GKE, and how its chips are spread over machines.

The facts are those of Google's pages on each TPU version (cloud.google.com/tpu/docs/v5e, …/v5p, …/v6e) and on TPUs in
GKE (cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus).
"""

import dataclasses
import math
import re

from realm_jax.errors import UserError

FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")


@dataclasses.dataclass(frozen=True)
class Generation:
    """A version of TPUs.

    accelerator: GKE's name. gcloud: its name; a slice's has a number behind it, which counts `cores_per_chip` for every
    chip. runtime: image of its machines.
    """

    accelerator: str
    gcloud: str
    cores_per_chip: int
    runtime: str


GENERATIONS = {
    "v5e": Generation("tpu-v5-lite-podslice", "v5litepod", 1, "v2-alpha-tpuv5-lite"),
    "v5p": Generation("tpu-v5p-slice", "v5p", 2, "v2-alpha-tpuv5"),
    "v6e": Generation("tpu-v6e-slice", "v6e", 1, "v2-alpha-tpuv6e"),
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips that are wired together, such as v5e:8x8."""

    version: str
    topology: str

    def __str__(self) -> str:
        return f"{self.version}:{self.topology}"

    @property
    def generation(self) -> Generation:
        """What is true of all slices of its version."""
        return GENERATIONS[self.version]

    @property
    def chips(self) -> int:
        """Of the whole slice."""
        return math.prod(map(int, self.topology.split("x")))

    @property
    def chips_per_host(self) -> int:
        """Of a machine of GKE: all of a slice up to eight where the version has such machines, else four."""
        return self.chips if self.version != "v5p" and self.chips <= 8 else 4

    @property
    def hosts(self) -> int:
        """Machines of GKE."""
        return self.chips // self.chips_per_host

    @property
    def gcloud(self) -> str:
        """The accelerator type with which gcloud is asked for the `default_topology` slice of as many chips."""
        return f"{self.generation.gcloud}-{self.chips * self.generation.cores_per_chip}"

    @property
    def default_topology(self) -> "Slice":
        """The most compact one of as many chips, which is what an accelerator type of so many means."""
        if self.version != "v5p" or self.topology in SMALL_CUBES:
            return self
        sides = range(4, self.chips + 1, 4)
        shapes = [(a, b, self.chips // (a * b)) for a in sides for b in sides if self.chips % (4 * a * b) == 0]
        return Slice(self.version, "x".join(map(str, sorted(min(shapes, key=sum)))))


def parse(name: str, key: str) -> Slice:
    """The slice of a name such as 'v5e:8x8'. key: of the spec, for messages. Raises UserError."""
    version, colon, topology = name.partition(":")
    if version not in GENERATIONS or not colon:
        known = ", ".join(GENERATIONS)
        raise UserError(f"{key}={name}: write VERSION:TOPOLOGY, such as v5e:8x8; versions are {known}")
    if not _exists(version, topology):
        some = ", ".join(FLAT) if version != "v5p" else f"{', '.join(SMALL_CUBES)}, 4x4x4, 4x4x8, …"
        raise UserError(f"{key}={name}: {version} has no such topology; choose among {some}")
    return Slice(version, topology)


def _exists(version: str, topology: str) -> bool:
    """v5e and v6e: the flat ones. v5p: small ones, and whole cubes of 4 × 4 × 4, their sides in order, to 16x16x24."""
    if version != "v5p":
        return topology in FLAT
    if topology in SMALL_CUBES:
        return True
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", topology):
        return False
    sides = [int(side) for side in topology.split("x")]
    return all(side % 4 == 0 for side in sides) and sides == sorted(sides) and math.prod(sides) <= 16 * 16 * 24
