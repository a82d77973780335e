"""Floating-point operations of steps and of embedding, by arithmetic: what MFU and `realm launch plan` count.

What a step of a task is made of stands in the task's file (`tasks/`).

Only matrix products count, two operations a multiply-add, and the backward pass twice the forward one. What is computed
again to save memory does not count, nor do lookups, softmax or LayerNorm. Sequences count at their padded length or,
where packed, as the places that they have, since that is what is computed. MFU (model FLOPs utilisation) is these
operations a second, over devices × their peak.
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

    def forward(self, length: int, positions: int | None = None, places: float = 0) -> float:
        """One sequence through all layers; `positions`: the last one computes these alone (None: all). places: of a
        packed sequence, 0 for one that is padded to `length`; it attends at its padded length."""
        asked, places = length if positions is None else positions, places or length
        last = places if positions is None else positions
        whole = self._products(places, places) + self._attention(length, length)
        return (self.layers - 1) * whole + self._products(last, places) + self._attention(asked, length)

    def _products(self, queries: float, keys: float) -> float:
        projections = 2 * (2 * queries + 2 * keys) * self.width**2  # query and output; key and value
        return projections + 2 * 2 * queries * self.width * self.feed_forward

    def _attention(self, queries: int, keys: int) -> float:
        return 2.0 * 2 * queries * keys * self.width


def tower_of(config: ConfigDict) -> Tower:
    """The size that the embedders have."""
    return _sized(config.model)


def reader_of(config: ConfigDict) -> Tower:
    """The reader's size."""
    return _sized(reader_section(config.model))


def _sized(model: ConfigDict) -> Tower:
    return Tower(model.layers, model.width, model.feed_forward)


def embedding_flops(config: ConfigDict, length: int, places: float = 0) -> float:
    """One sequence to its vector, forward; the literal pieces of prompts are left out. places: as of
    `Tower.forward`."""
    width, encoder = config.model.width, config.encoder
    head = 2 * width * ((width if encoder.pooling == "pooler" else 0) + encoder.projection)
    return tower_of(config).forward(length, None if encoder.pooling == "mean" else 1, places) + head


def word_flops(run: Run) -> float:
    """The reader's head over the masked tokens of one sequence, forward."""
    bert = run.model.reader.bert
    return 2 * run.lengths.predictions * bert.width * (bert.width + bert.vocabulary_size)


def score_flops(run: Run) -> float:
    """One inner product of two vectors."""
    return 2.0 * run.model.vector_size
