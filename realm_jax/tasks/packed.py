"""How many places the tokens of a step's sequences take, by the lengths of its data.

Passages end before their row does and most sentences and questions are short, so a fifth to a quarter of padded joints
is padding. Passages are drawn at random here: what is retrieved differs little in length, and the slack is for that.
Long queries are dealt out to the parts of a batch, since a program has as many places as the fullest part needs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from realm_jax.data.examples import Lengths
from realm_jax.data.store import PassageStore
from realm_jax.forward import Batch, PackedPlaces, StepContext, reader_query
from realm_jax.mesh import batch_parts, logical_sharding
from realm_jax.models.prompts import longest_passage, passage_lengths
from realm_jax.run import Run

RARE = 10_000  # one part in so many needs more places than there are, if candidates are as long as others
SLACK = 1.05  # places, as a multiple of what batches need in the mean, at least
WORTH = 0.92  # with more places than this share of the padded ones sequences stay padded
DRAWN = 4_000_000  # lengths drawn at most
SAMPLED = 2048  # texts whose lengths say how many places a batch takes
MANY = 0.01  # share of a batch's pieces that are lost, from which on it is said
Array = jax.Array
NOTHING = np.zeros(1, np.int64)  # lengths of what is not there


class Texts(NamedTuple):
    """Lengths of some texts of a task, specials counted: of what is searched with, and of what the reader reads."""

    queries: NDArray[np.int64]
    read: NDArray[np.int64]


def packed_places(
    run: Run, sampled: Texts, examples: int, read: int, embedded: int, titles: bool, null: bool
) -> PackedPlaces:
    """The places of what retrieves. examples: whose gradients are computed at once; read, embedded: passages of each
    that are read and embedded; titles: they are read with their titles; null: so is the null document."""
    (queries, texts), longest = sampled, run.lengths.query
    dealt_to, own = _shares(run, examples)

    def needed(asked: NDArray[np.int64], passages: NDArray[np.int64], candidates: int, longest: int) -> int:
        return places_needed(asked, passages, (dealt_to, own, candidates), longest, run.model.bert.alignment, texts)

    lengths, widest = run.model.query_lengths(queries), run.model.query_lengths(longest)
    asked = needed(lengths, NOTHING, 1, widest)
    nulls = needed(texts + 1, NOTHING, 1, longest + 1) if null else 0
    body, title = clipped_lengths(run.sources.for_reader.passages, run.lengths)
    joint = body + (title + 2 if titles else 1)
    joints = needed(texts, joint, read, longest + run.lengths.document - (1 if titles else 2))
    body, title = clipped_lengths(run.sources.passages, run.lengths)
    template, alone = run.model.passage_template, np.zeros_like(texts)  # a passage is embedded without a query
    tower, longest = passage_lengths(body, title, template), longest_passage(run.lengths.document, template)
    return PackedPlaces(own, asked, nulls, joints, needed(alone, tower, embedded, longest) if embedded else 0)


def packed_joints(run: Run, lengths: NDArray[np.int64], longest: int, examples: int) -> PackedPlaces:
    """The places of what is read beside a passage that comes with it. lengths: of some joints; longest: none is longer;
    examples: as above."""
    dealt_to, own = _shares(run, examples)
    joints = places_needed(lengths, NOTHING, (dealt_to, own, 1), longest, run.model.bert.alignment)
    return PackedPlaces(own, joints=joints)


def _shares(run: Run, examples: int) -> tuple[int, int]:
    """Among how many devices examples are dealt out, and how many each has."""
    parts = batch_parts(run.mesh)
    return parts // run.mesh.shape["slices"], examples // parts


def dealt_batch(context: StepContext, batch: Batch, lengths: Array | None = None) -> Batch:
    """`deal_out` of a batch of which any lengths differ that places were worked out for; another as it is."""
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
    order = ranked[:, dealt(ranked.shape[1], parts)]

    def ordered(values: jax.Array) -> jax.Array:
        shares = values.reshape(slices, -1, *values.shape[1:])
        taken = jax.vmap(lambda share, rows: share[rows])(shares, order).reshape(values.shape)
        return jax.lax.with_sharding_constraint(taken, logical_sharding(mesh, "batch", *[None] * (values.ndim - 1)))

    return jax.tree.map(ordered, batch)


def dealt(examples: int, parts: int) -> NDArray[np.int64]:
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
    order = np.argsort((queries if texts is None else texts)[drawn])[:, ::-1][:, dealt(parts * examples, parts)]
    asked = queries[np.take_along_axis(drawn, order, axis=1)].reshape(-1, examples, 1)
    joined = asked + rng.choice(passages, (draws * parts, examples, candidates))
    used = (-(-np.minimum(joined, longest) // alignment) * alignment).sum(axis=(1, 2))
    needed = max(np.quantile(used, 1 - 1 / RARE), SLACK * used.mean(), longest)
    places = -int(-needed // alignment) * alignment
    return places if places <= WORTH * sequences * longest else 0
