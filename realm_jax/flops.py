"""Floating-point operations of steps and of embedding, by arithmetic: what MFU and `realm launch plan` count.

What a step of a task is made of stands in the task's file (`tasks/`).

Only matrix products count, two operations a multiply-add, and the backward pass twice the forward one. What is computed
again to save memory does not count, nor do lookups, softmax or LayerNorm. Sequences count at their padded length or,
where packed, as the places that they have, since that is what is computed. MFU (model FLOPs utilisation) is these
operations a second, over devices × their peak.
"""

import dataclasses

from realm_jax.config import Config, reader_section
from realm_jax.models.retriever import POOLINGS
from realm_jax.run import Run

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Tower:
    """Sizes of one BERT."""

    layers: int
    width: int
    feed_forward: int

    def forward(self, length: int, positions: int | None = None, places: float = 0) -> float:
        """One sequence through all layers; `positions`: the last one computes these alone (None: all). places: of a
        packed sequence, 0 for one that is padded to `length`; it attends at its padded length."""
        queries, places = length if positions is None else positions, places or length
        last = places if positions is None else positions
        layer = self._products(places, places) + self._attention(length, length)
        return (self.layers - 1) * layer + self._products(last, places) + self._attention(queries, length)

    def _products(self, queries: float, keys: float) -> float:
        projections = 2 * (2 * queries + 2 * keys) * self.width**2  # query and output; key and value
        return projections + 2 * 2 * queries * self.width * self.feed_forward

    def _attention(self, queries: int, keys: int) -> float:
        return 2.0 * 2 * queries * keys * self.width


def tower_of(config: Config) -> Tower:
    """The size that the embedders have."""
    return Tower(config.model.layers, config.model.width, config.model.feed_forward)


def reader_of(config: Config) -> Tower:
    """The reader's size."""
    reader = reader_section(config.model)
    return Tower(reader.layers, reader.width, reader.feed_forward)


def embedding_flops(config: Config, length: int, places: float = 0) -> float:
    """One sequence to its vector, forward; the literal pieces of prompts are left out. places: as of
    `Tower.forward`."""
    width, encoder = config.model.width, config.encoder
    pooling = POOLINGS[encoder.pooling]
    head = 2 * width * ((width if pooling.has_tanh_layer else 0) + encoder.projection)
    positions = 1 if pooling.position else None
    return tower_of(config).forward(length, positions, places) + head


def word_flops(run: Run) -> float:
    """The reader's head over the masked tokens of one sequence, forward."""
    bert = run.model.reader.bert
    return 2 * run.lengths.predictions * bert.width * (bert.width + bert.vocabulary_size)


def score_flops(run: Run) -> float:
    """One inner product of two vectors."""
    return 2.0 * run.model.vector_size


# --- what accelerators can do -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
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
