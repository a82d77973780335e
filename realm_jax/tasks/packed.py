"""Estimate the token slots into which a step packs its sequences, from the lengths of its data.

Most passages, sentences and questions are shorter than their rows, so a fifth to a quarter of padded reader inputs is
padding, and half in reader pre-training. We do not know which passages will be retrieved, so we draw random ones;
retrieved ones are a little longer (`LONGER`). We draw sequences and divide them into parts of a batch as a step does
(`models/packing.py`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.store import PassageStore
from realm_jax.mesh import batch_parts
from realm_jax.models.packing import snake_order
from realm_jax.models.prompts import longest_passage, passage_lengths
from realm_jax.run import Run

RARE = 10_000  # one part in so many needs more slots than there are, if candidates are as long as others
SLACK = 0.05  # at least this share more slots than sampled texts need on average
LONGER = 0.2  # the same for passages, in standard deviations of their lengths, because retrieved ones are longer
WORTH = 0.92  # with more slots than this share of the padded ones, sequences stay padded
MAX_DRAWN = 4_000_000  # lengths that are drawn
SAMPLED = 2048  # texts whose lengths are counted
ABSENT = np.zeros(1, np.int64)  # lengths of texts, or of passages, if there are none


class TextLengths(NamedTuple):
    """Lengths of some texts of a task, special tokens counted.

    Attributes:
        queries: tokens of the queries that search, int64 [texts].
        texts: tokens of the texts that the reader reads, int64 [texts].
    """

    queries: NDArray[np.int64]
    texts: NDArray[np.int64]


@dataclass(frozen=True)
class PackingEstimator:
    """Counts the token slots of a device's share of a microbatch.

    Attributes:
        run: provides data, networks and devices.
        microbatch_size: examples of a microbatch, on all devices.
    """

    run: Run
    microbatch_size: int

    @property
    def examples(self) -> int:
        """Return the examples of a device."""
        return self.microbatch_size // batch_parts(self.run.mesh)

    def queries(self, lengths: TextLengths) -> int:
        """Count the slots of the queries that search."""
        model = self.run.model
        queries, longest = (model.query_lengths(count) for count in (lengths.queries, self.run.lengths.query))
        return self._slots(queries, ABSENT, 1, longest)

    def null_inputs(self, lengths: TextLengths) -> int:
        """Count the slots of the reader's texts with the null document."""
        return self._slots(lengths.texts + 1, ABSENT, 1, self.run.lengths.query + 1)

    def reader_inputs(self, lengths: TextLengths, passages: int, titles: bool) -> int:
        """Count the slots of the reader's texts with retrieved passages.

        Args:
            lengths: lengths of the texts.
            passages: number of passages per text.
            titles: True if passages are read with their titles.
        """
        sizes = self.run.lengths
        body, title = clipped_lengths(self.run.sources.passages, sizes.document)  # [rows] both
        added, longest = (title + 2, sizes.document - 1) if titles else (1, sizes.document - 2)
        return self._slots(lengths.texts, body + added, passages, sizes.query + longest)

    def joined(self, lengths: NDArray[np.int64], longest: int) -> int:
        """Count the slots of texts that come with one passage each.

        Args:
            lengths: a sample of the tokens of texts with their passages, [n].
            longest: tokens of a padded sequence.
        """
        return self._slots(lengths, ABSENT, 1, longest)

    def documents(self, passages: int) -> int:
        """Count the slots of the embedded passages, of which there are `passages` per text."""
        template = self.run.model.passage_template
        body, title = clipped_lengths(self.run.sources.passages, self.run.lengths.document)  # [rows] both
        longest = longest_passage(self.run.lengths.document, template)
        return self._slots(ABSENT, passage_lengths(body, title, template), passages, longest)

    def _slots(self, queries: NDArray[np.int64], passages: NDArray[np.int64], candidates: int, longest: int) -> int:
        """Return `slots_needed` for a device's examples with `candidates` passages each."""
        mesh = self.run.mesh
        shape = batch_parts(mesh) // mesh.shape["slices"], self.examples, candidates
        return slots_needed(queries, passages, shape, longest, self.run.model.bert.compute.alignment)


def clipped_lengths(store: PassageStore, document_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the number of tokens of bodies and of titles, truncated to a document row: int64 [rows] both.

    Args:
        store: the corpus.
        document_length: tokens of a document row, with three special ones.
    """
    titles = store.column("title_lengths").astype(np.int64)
    bodies = store.counts("tokens") - titles
    titles = np.minimum(titles, document_length - 3)
    return np.minimum(bodies, document_length - 3 - titles), titles


def slots_needed(
    queries: NDArray[np.int64], passages: NDArray[np.int64], shape: tuple[int, int, int], longest: int,
    alignment: int = 1,
) -> int:  # fmt: skip
    """Estimate how many token slots almost always suffice for a part of a batch.

    Args:
        queries: lengths of texts to draw from, [n].
        passages: lengths of passages to draw from, [n].
        shape: parts per batch, examples per part, passages per example.
        longest: tokens of a padded sequence.
        alignment: slots of a sequence are a multiple of it.

    Returns:
        Slots of a part; 0 if padded sequences take only a little more.
    """
    parts, examples, candidates = shape
    sequences = examples * candidates
    draws = max(16, min(20 * RARE, MAX_DRAWN // (parts * sequences)))
    rng = np.random.default_rng(0)
    drawn_queries = rng.choice(queries, (draws, parts * examples, 1))
    drawn_passages = rng.choice(passages, (draws, parts * examples, candidates))
    lengths = (drawn_queries + drawn_passages).reshape(draws, -1)  # [draws, parts · sequences]
    used = slots_used(lengths, parts, longest, alignment)  # [draws, parts]
    slack = max(SLACK * queries.mean(), LONGER * passages.std())
    needed = max(np.quantile(used, 1 - 1 / RARE), used.mean() + slack * sequences, longest)
    slots = -int(-needed // alignment) * alignment
    return slots if slots <= WORTH * sequences * longest else 0


def slots_used(lengths: NDArray[np.int64], parts: int, longest: int, alignment: int = 1) -> NDArray[np.int64]:
    """Count the slots that the parts of batches use, if sequences are divided in balanced order.

    Args:
        lengths: tokens of sequences, [batches, sequences].
        parts: number of parts per batch.
        longest: tokens of a padded sequence.
        alignment: slots of a sequence are a multiple of it.

    Returns:
        [batches, parts].
    """
    if parts > 1:
        lengths = np.sort(lengths, axis=1)[:, ::-1][:, snake_order(lengths.shape[1], parts)]
    sizes = -(-np.minimum(lengths, longest) // alignment) * alignment  # [batches, sequences]
    return sizes.reshape(len(sizes), parts, -1).sum(axis=2)
