"""Floating-point operations of steps and of embedding, by arithmetic: what MFU and `realm launch plan` count.

What a step of a task is made of stands in the task's file (`tasks/`).

Only matrix products count, two operations a multiply-add, and the backward pass twice the forward one. What is computed
again to save memory does not count, nor do lookups, softmax or LayerNorm; sequences count at their padded length, since
that is what is computed. MFU (model FLOPs utilisation) is these operations a second, over devices × their peak.
"""

import dataclasses

from ml_collections import ConfigDict

from realm_jax.run import Run
from realm_jax.sections import reader_section


@dataclasses.dataclass(frozen=True)
class Tower:
    """Sizes of one BERT."""

    layers: int
    width: int
    feed_forward: int

    def forward(self, length: int, positions: int | None = None) -> float:
        """One sequence through all layers; `positions`: the last one computes these alone (None: all)."""
        asked = length if positions is None else positions
        return (self.layers - 1) * self._layer(length, length) + self._layer(asked, length)

    def _layer(self, queries: int, keys: int) -> float:
        projections = 2 * (2 * queries + 2 * keys) * self.width**2  # query and output; key and value
        attention = 2 * 2 * queries * keys * self.width
        return projections + attention + 2 * 2 * queries * self.width * self.feed_forward


def tower_of(config: ConfigDict) -> Tower:
    """The size that the embedders have, or a tagger."""
    return _sized(config.model)


def reader_of(config: ConfigDict) -> Tower:
    """The reader's size."""
    return _sized(reader_section(config.model))


def _sized(model: ConfigDict) -> Tower:
    return Tower(model.layers, model.width, model.feed_forward)


def embedding_flops(config: ConfigDict, length: int, states: bool = False) -> float:
    """One sequence to its vector, forward; the literal pieces of prompts are left out. states: with the hidden states
    of all its tokens."""
    width, encoder = config.model.width, config.encoder
    head = 2 * width * ((width if encoder.pooling == "pooler" else 0) + encoder.projection)
    return tower_of(config).forward(length, None if states or encoder.pooling == "mean" else 1) + head


def word_flops(run: Run) -> float:
    """The reader's head over the masked tokens of one sequence, forward."""
    bert = run.model.reader.bert
    return 2 * run.lengths.predictions * bert.width * (bert.width + bert.vocabulary_size)


def score_flops(run: Run) -> float:
    """One inner product of two vectors."""
    return 2.0 * run.model.vector_size
