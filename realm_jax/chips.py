"""What accelerators can do, by their vendors' data sheets: of one JAX device each, found by its `device_kind`."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """peak: dense bfloat16 operations a second. memory: bytes that a program can have, as the TPU compiler says.

    What follows is known of TPUs alone. clock: cycles a second, which make the peak of its matrix units (128 × 128, of
    v6e 256 × 256) the data sheet's; with it the compiler's cost model has a product of 4,096³ reach .97 of a v5e's
    peak, .96 of a v5p's and .87 of a v6e's. Bytes a second: bandwidth of memory; ici, out of a chip over all its
    links; dcn, a chip's share of its host's network. axes: of the torus that the links make. cores: that share a
    program's kernels.
    """

    peak: float
    memory: float | None = None
    clock: float = 0.0
    bandwidth: float = 0.0
    ici: float = 0.0
    axes: int = 2
    dcn: float = 0.0
    cores: int = 1


V5E = Chip(197e12, 15.75 * GIB, 1.5e9, bandwidth=819e9, ici=200e9, dcn=3.125e9)
V5P = Chip(459e12, 95.74 * GIB, 1.75e9, bandwidth=2765e9, ici=600e9, axes=3, dcn=6.25e9, cores=2)
V6E = Chip(918e12, 31.25 * GIB, 1.75e9, bandwidth=1638e9, ici=400e9, dcn=12.5e9)
CHIPS = {
    "TPU v4": Chip(275e12, 31.75 * GIB),
    "TPU v5 lite": V5E,
    "TPU v5e": V5E,
    "TPU v5": V5P,
    "TPU v6 lite": V6E,
    "TPU v6e": V6E,
    "NVIDIA A100": Chip(312e12),
    "NVIDIA H100": Chip(989e12),
    "NVIDIA H200": Chip(989e12),
}


def chip(device_kind: str) -> Chip | None:
    """What is known of a device; None for others than those above."""
    names = [name for name in CHIPS if device_kind.startswith(name)]
    return CHIPS[max(names, key=len)] if names else None


def peak(device_kind: str) -> float | None:
    """Peak bfloat16 operations a second of a device; None if it is not known."""
    known = chip(device_kind)
    return known.peak if known else None
