"""How many places the tokens of a step's sequences take, by the lengths of its data.

Passages end before their row does and most sentences and questions are short, so a fifth to a quarter of padded joints
is padding, and half of those of the warm-up. What will be retrieved is not known, so passages are drawn at random:
those that are retrieved are a little longer (`LONGER`). Sequences are drawn, and shared out among the parts of a batch,
as a step does it (`models/packing.py`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.store import PassageStore
from realm_jax.mesh import batch_parts
from realm_jax.models.packing import snake_order
from realm_jax.models.prompts import longest_passage, passage_lengths
from realm_jax.run import Run

RARE = 10_000  # one part in so many needs more places than there are, if candidates are as long as others
SLACK = 0.05  # at least this share more places than texts need in the mean, of which a sample is counted
LONGER = 0.2  # the same for passages, in standard deviations of their lengths: those that are retrieved are longer
WORTH = 0.92  # with more places than this share of the padded ones sequences stay padded
DRAWN = 4_000_000  # lengths drawn at most
SAMPLED = 2048  # texts whose lengths say how many places a batch takes
MANY = 0.01  # share of a batch's pieces that are lost, from which on it is said
NOTHING = np.zeros(1, np.int64)  # lengths of what is not there


class TextLengths(NamedTuple):
    """Lengths of some texts of a task, specials counted: of what is searched with, and of what the reader reads."""

    queries: NDArray[np.int64]
    texts: NDArray[np.int64]


@dataclass(frozen=True)
class PackingEstimator:
    """Counts the places of a device's share of the examples whose gradients are computed at once (`microbatch`)."""

    run: Run
    microbatch: int

    @property
    def examples(self) -> int:
        """Of a device."""
        return self.microbatch // batch_parts(self.run.mesh)

    def queries(self, lengths: TextLengths) -> int:
        """Of what is searched with."""
        model = self.run.model
        asked, longest = (model.query_lengths(of) for of in (lengths.queries, self.run.lengths.query))
        return self._needed(asked, NOTHING, 1, longest)

    def null_inputs(self, lengths: TextLengths) -> int:
        """Of texts that are read with the null document."""
        return self._needed(lengths.texts + 1, NOTHING, 1, self.run.lengths.query + 1)

    def reader_inputs(self, lengths: TextLengths, passages: int, titles: bool) -> int:
        """Of texts that are each read with so many passages, and with their titles or without."""
        sizes = self.run.lengths
        body, title = clipped_lengths(self.run.sources.passages, sizes.document)
        added, longest = (title + 2, sizes.document - 1) if titles else (1, sizes.document - 2)
        return self._needed(lengths.texts, body + added, passages, sizes.query + longest)

    def joined(self, lengths: NDArray[np.int64], longest: int) -> int:
        """Of texts that come with a passage each, by the lengths of some of these joints; longest: none is longer."""
        return self._needed(lengths, NOTHING, 1, longest)

    def documents(self, passages: int) -> int:
        """Of passages that are embedded, so many for each text."""
        template = self.run.model.passage_template
        body, title = clipped_lengths(self.run.sources.passages, self.run.lengths.document)
        longest = longest_passage(self.run.lengths.document, template)
        return self._needed(NOTHING, passage_lengths(body, title, template), passages, longest)

    def _needed(self, asked: NDArray[np.int64], passages: NDArray[np.int64], candidates: int, longest: int) -> int:
        """`slots_needed` on these devices."""
        mesh = self.run.mesh
        shape = batch_parts(mesh) // mesh.shape["slices"], self.examples, candidates
        return slots_needed(asked, passages, shape, longest, self.run.model.bert.compute.alignment)


class TruncationMonitor:
    """Feed it every logged record; it returns a warning, once, where sequences have lost more than a few pieces."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, record: dict[str, Any]) -> str | None:
        lost = record.get("unplaced", 0.0)
        if self._said or lost <= MANY:
            return None
        self._said = True
        return (
            f"step {record['step']}: packing had no place for {lost:.1%} of the pieces, so the longest sequences lost "
            "their last ones; texts or passages of batches are longer than those of the data (tasks/packed.py)"
        )


def clipped_lengths(store: PassageStore, document_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pieces of bodies and of titles, as many as a document row has room for."""
    titles = store.column("title_lengths").astype(np.int64)  # [rows]
    bodies = store.counts("tokens") - titles
    titles = np.minimum(titles, document_length - 3)
    return np.minimum(bodies, document_length - 3 - titles), titles


def slots_needed(
    queries: NDArray[np.int64], passages: NDArray[np.int64], shape: tuple[int, int, int], longest: int,
    alignment: int = 1,
) -> int:  # fmt: skip
    """Places of which a part of a batch seldom needs more; 0 where padding takes hardly more.

    queries, passages: lengths to draw from; shape: parts, examples of a part, candidates of each; longest: of a padded
    sequence.
    """
    parts, examples, candidates = shape
    sequences = examples * candidates
    draws = max(16, min(20 * RARE, DRAWN // (parts * sequences)))
    rng = np.random.default_rng(0)
    asked = rng.choice(queries, (draws, parts * examples, 1))
    joined = (asked + rng.choice(passages, (draws, parts * examples, candidates))).reshape(draws, -1)
    used = slots_taken(joined, parts, longest, alignment)
    slack = max(SLACK * queries.mean(), LONGER * passages.std())
    needed = max(np.quantile(used, 1 - 1 / RARE), used.mean() + slack * sequences, longest)
    places = -int(-needed // alignment) * alignment
    return places if places <= WORTH * sequences * longest else 0


def slots_taken(lengths: NDArray[np.int64], parts: int, longest: int, alignment: int = 1) -> NDArray[np.int64]:
    """Places that the parts of batches take, [batches, parts], with the sequences of each batch in balanced order.

    lengths [batches, sequences]; longest: of a padded sequence.
    """
    if parts > 1:
        lengths = np.sort(lengths, axis=1)[:, ::-1][:, snake_order(lengths.shape[1], parts)]
    sizes = -(-np.minimum(lengths, longest) // alignment) * alignment
    return sizes.reshape(len(sizes), parts, -1).sum(axis=2)
