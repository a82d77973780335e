"""Count the floating-point operations of networks, for MFU and `realm launch plan`.

`tasks/step_flops.py` adds them up for the step of each task.

Only matrix products count: two operations per multiply-add, and the backward pass twice the forward one. Rematerialized
activations do not count, nor do lookups, softmax or LayerNorm. Sequences count at their padded or packed length, which
is what devices compute. MFU (model FLOPs utilization) is these operations per second, over devices × their peak.
"""

import dataclasses

from realm_jax.config import Config, Model, reader_section
from realm_jax.models.retriever import POOLINGS
from realm_jax.run import Run

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class BertSize:
    """The sizes of an encoder that its operations depend on.

    Attributes:
        layers: number of layers.
        width: features of a hidden state.
        feed_forward: width of the feed-forward layers.
        is_gated: true if these have a gate, which is a third product.
    """

    layers: int
    width: int
    feed_forward: int
    is_gated: bool = False

    def forward(self, length: int, positions: int | None = None, packed_length: float = 0) -> float:
        """Return the operations of one sequence through all layers.

        Args:
            length: padded length, at which attention is computed.
            positions: positions that the last layer computes; None for all.
            packed_length: tokens that are computed for a packed sequence, on average; 0 for a padded sequence.
        """
        queries, tokens = length if positions is None else positions, packed_length or length
        last_tokens = tokens if positions is None else positions
        layer = self._products(tokens, tokens) + self._attention(length, length)
        return (self.layers - 1) * layer + self._products(last_tokens, tokens) + self._attention(queries, length)

    def _products(self, queries: float, keys: float) -> float:
        """Return the operations of a layer's linear layers."""
        projections = 2 * (2 * queries + 2 * keys) * self.width**2  # query and output; key and value
        return projections + 2 * (3 if self.is_gated else 2) * queries * self.width * self.feed_forward

    def _attention(self, queries: int, keys: int) -> float:
        """Return the operations of a layer's attention: scores, and weighted sums of values."""
        return 2.0 * 2 * queries * keys * self.width


def reader_size(config: Config) -> BertSize:
    """Return the size of the reader."""
    return _bert_size(reader_section(config.model))


def _bert_size(model: Model) -> BertSize:
    return BertSize(model.layers, model.width, model.feed_forward, model.architecture == "modernbert")


def embedding_flops(config: Config, length: int, packed_length: float = 0) -> float:
    """Return the operations that embed one sequence, forward, without the tokens of prompts.

    Args:
        config: config of the run.
        length: as in `BertSize.forward`.
        packed_length: as in `BertSize.forward`.
    """
    width, encoder = config.model.width, config.encoder
    bert = _bert_size(config.model)
    pooling = POOLINGS[encoder.pooling]
    head = 2 * width * ((width if pooling.has_tanh_layer else 0) + encoder.projection)
    positions = 1 if pooling.position else None
    return bert.forward(length, positions, packed_length) + head


def word_flops(run: Run) -> float:
    """Return the operations of the reader's head over the masked tokens of one sequence, forward."""
    bert = run.model.reader.bert
    return 2 * run.lengths.predictions * bert.width * (bert.width + bert.vocabulary_size)


def score_flops(run: Run) -> float:
    """Return the operations of one inner product of two vectors."""
    return 2.0 * run.model.vector_size


# --- Accelerators -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Chip:
    """An accelerator. Fields other than `peak` are known only for TPUs; for others they have their defaults.

    Attributes:
        peak: dense bfloat16 operations per second.
        memory: bytes that a program can use, by the TPU compiler.
        clock: cycles per second, from the data sheet's peak and the size of the matrix units (128 × 128, for v6e
            256 × 256). With it the compiler's cost model estimates that a product of 4,096³ reaches 0.97 of a v5e's
            peak, 0.96 of a v5p's and 0.87 of a v6e's.
        bandwidth: bandwidth of the memory, bytes per second.
        ici: bytes per second out of a chip, over all its links.
        link: bytes per second that a link reaches in one direction (jax-ml/scaling-book).
        wraps_from: number of chips in a row from which links connect its two ends; shorter rows are lines.
        dcn: a chip's share of its host's network, bytes per second.
        cores: number of cores that share a program's kernels.
    """

    peak: float
    memory: float | None = None
    clock: float = 0.0
    bandwidth: float = 0.0
    ici: float = 0.0
    link: float = 0.0
    wraps_from: int = 16
    dcn: float = 0.0
    cores: int = 1


V5E = Chip(197e12, 15.75 * GIB, 1.5e9, bandwidth=819e9, ici=200e9, link=45e9, dcn=3.125e9)
V5P = Chip(459e12, 95.74 * GIB, 1.75e9, bandwidth=2765e9, ici=600e9, link=90e9, wraps_from=4, dcn=6.25e9, cores=2)
V6E = Chip(918e12, 31.25 * GIB, 1.75e9, bandwidth=1638e9, ici=400e9, link=90e9, dcn=12.5e9)
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
    """Return the accelerator of a device kind; None for a kind that is not in the table."""
    names = [name for name in CHIPS if device_kind.startswith(name)]
    return CHIPS[max(names, key=len)] if names else None


def peak(device_kind: str) -> float | None:
    """Return the peak bfloat16 operations per second of a device kind; None if it is unknown."""
    accelerator = chip(device_kind)
    return accelerator.peak if accelerator else None
