"""How many places the tokens of a step's sequences take, by the lengths of its data.

Passages end before their row does and most sentences and questions are short, so a fifth to a quarter of padded joints
is padding, and half of those of the warm-up. What will be retrieved is not known, so passages are drawn at random: it
differs little from them in length, and the slack is for that. The longest texts, or joints, are dealt out to the parts
of a batch, since a program has as many places as the fullest part needs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from realm_jax.data.examples import Lengths
from realm_jax.data.store import PassageStore
from realm_jax.forward import Batch, StepContext, reader_query
from realm_jax.mesh import batch_parts, logical_sharding
from realm_jax.models.prompts import longest_passage, passage_lengths
from realm_jax.run import Run

RARE = 10_000  # one part in so many needs more places than there are, if candidates are as long as others
SLACK = 1.05  # places, as a multiple of what batches need in the mean, at least
WORTH = 0.92  # with more places than this share of the padded ones sequences stay padded
DRAWN = 4_000_000  # lengths drawn at most
SAMPLED = 2048  # texts whose lengths say how many places a batch takes
MANY = 0.01  # share of a batch's pieces that are lost, from which on it is said
NOTHING = np.zeros(1, np.int64)  # lengths of what is not there

Array = jax.Array


class TextLengths(NamedTuple):
    """Lengths of some texts of a task, specials counted: of what is searched with, and of what the reader reads."""

    queries: NDArray[np.int64]
    texts: NDArray[np.int64]


@dataclass(frozen=True)
class PlaceCounter:
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
        return self._needed(asked, NOTHING, 1, longest, lengths.texts)

    def nulls(self, lengths: TextLengths) -> int:
        """Of texts that are read with the null document."""
        return self._needed(lengths.texts + 1, NOTHING, 1, self.run.lengths.query + 1, lengths.texts)

    def joints(self, lengths: TextLengths, passages: int, titles: bool) -> int:
        """Of texts that are each read with so many passages, and with their titles or without."""
        sizes = self.run.lengths
        body, title = clipped_lengths(self.run.sources.for_reader.passages, sizes)
        added, longest = (title + 2, sizes.document - 1) if titles else (1, sizes.document - 2)
        return self._needed(lengths.texts, body + added, passages, sizes.query + longest, lengths.texts)

    def joined(self, lengths: NDArray[np.int64], longest: int) -> int:
        """Of texts that come with a passage each, by the lengths of some of these joints; longest: none is longer."""
        return self._needed(lengths, NOTHING, 1, longest, lengths)

    def documents(self, lengths: TextLengths, passages: int) -> int:
        """Of passages that are embedded, so many for each text."""
        template = self.run.model.passage_template
        body, title = clipped_lengths(self.run.sources.passages, self.run.lengths)
        longest = longest_passage(self.run.lengths.document, template)
        alone = np.zeros_like(lengths.texts)  # a passage is embedded without a query
        return self._needed(alone, passage_lengths(body, title, template), passages, longest, lengths.texts)

    def _needed(
        self, asked: NDArray[np.int64], passages: NDArray[np.int64], candidates: int, longest: int,
        dealt_by: NDArray[np.int64],
    ) -> int:  # fmt: skip
        """`places_needed` on these devices; dealt_by: the lengths by which a batch is dealt out."""
        mesh = self.run.mesh
        shape = batch_parts(mesh) // mesh.shape["slices"], self.examples, candidates
        return places_needed(asked, passages, shape, longest, self.run.model.bert.alignment, dealt_by)


def order_batch(context: StepContext, batch: Batch, lengths: Array | None = None) -> Batch:
    """A batch as it is packed: dealt out by these lengths, or as it came where it stays padded. lengths: as of
    `deal_out`."""
    places = context.places(len(batch["query"]))
    return deal_out(batch, context.mesh, lengths) if places.queries or places.nulls or places.joints else batch


def deal_out(batch: Batch, mesh: Mesh, lengths: Array | None = None) -> Batch:
    """A batch in another order, in which all parts of a slice's share have about the same length in all. lengths:
    [batch], by default of the texts that are read."""
    slices, lengths = mesh.shape["slices"], reader_query(batch)[1] if lengths is None else lengths
    parts = batch_parts(mesh) // slices
    if parts == 1:
        return batch
    ranked = jnp.argsort(lengths.reshape(slices, -1), axis=1, descending=True)
    order = ranked[:, dealing_order(ranked.shape[1], parts)]

    def ordered(values: jax.Array) -> jax.Array:
        shares = values.reshape(slices, -1, *values.shape[1:])
        taken = jax.vmap(lambda share, rows: share[rows])(shares, order).reshape(values.shape)
        return jax.lax.with_sharding_constraint(taken, logical_sharding(mesh, "batch", *[None] * (values.ndim - 1)))

    return jax.tree.map(ordered, batch)


def dealing_order(examples: int, parts: int) -> NDArray[np.int64]:
    """Which of ranked examples go to which part, one after another: each round of them the other way round."""
    rounds = np.arange(examples).reshape(-1, parts)
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds.T.reshape(-1)


class PlacesMonitor:
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


def clipped_lengths(store: PassageStore, lengths: Lengths) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pieces of bodies and of titles, as many as a document row has room for."""
    bodies, titles = (part.astype(np.int64) for part in store.lengths())
    titles = np.minimum(titles, lengths.document - 3)
    return np.minimum(bodies, lengths.document - 3 - titles), titles


def places_needed(
    queries: NDArray[np.int64], passages: NDArray[np.int64], shape: tuple[int, int, int], longest: int,
    alignment: int = 1, texts: NDArray[np.int64] | None = None,
) -> int:  # fmt: skip
    """Places of which a part of a batch seldom needs more; 0 where padding takes hardly more.

    queries, passages: lengths to draw from; shape: parts, examples of a part, candidates of each; longest: of a padded
    sequence; texts: lengths by which queries are dealt out (None: their own).
    """
    parts, examples, candidates = shape
    sequences = examples * candidates
    draws = max(16, min(20 * RARE, DRAWN // (parts * sequences)))
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(queries), size=(draws, parts * examples))
    order = np.argsort((queries if texts is None else texts)[drawn])[:, ::-1][:, dealing_order(parts * examples, parts)]
    asked = queries[np.take_along_axis(drawn, order, axis=1)].reshape(-1, examples, 1)
    joined = asked + rng.choice(passages, (draws * parts, examples, candidates))
    used = (-(-np.minimum(joined, longest) // alignment) * alignment).sum(axis=(1, 2))
    needed = max(np.quantile(used, 1 - 1 / RARE), SLACK * used.mean(), longest)
    places = -int(-needed // alignment) * alignment
    return places if places <= WORTH * sequences * longest else 0
