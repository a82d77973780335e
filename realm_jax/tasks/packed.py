"""How many places the tokens of REALM's sequences take, by the lengths of its data.

Passages end before their row does and most sentences are short, so a fifth to a quarter of padded joints is padding.
Candidates are drawn at random here: what is retrieved differs little in length, and the slack is for that. Long queries
are dealt out to the parts of a batch, since a program has as many places as the fullest part needs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from realm_jax.data.examples import Lengths
from realm_jax.data.store import PassageStore
from realm_jax.forward import Batch, PackedPlaces, reader_query
from realm_jax.mesh import batch_parts, logical_sharding
from realm_jax.models.prompts import longest_passage, passage_lengths
from realm_jax.run import Run

RARE = 10_000  # one part in so many needs more places than there are, if candidates are as long as others
SLACK = 1.05  # places, as a multiple of what batches need in the mean, at least
WORTH = 0.92  # with more places than this share of the padded ones sequences stay padded
DRAWN = 4_000_000  # lengths drawn at most
MANY = 0.01  # share of a batch's pieces that are lost, from which on it is said
NOTHING = np.zeros(1, np.int64)  # lengths of what is not there


def packed_places(
    run: Run, queries: NDArray[np.int64], texts: NDArray[np.int64], examples: int, read: int, embedded: int
) -> PackedPlaces:
    """The places of a part of a batch. queries, texts: lengths of what is searched with and of what the reader reads,
    of the same sentences, specials counted; examples: of a whole batch; read, embedded: candidates of each that are
    read and embedded."""
    parts, points, longest = batch_parts(run.mesh), run.context.points, run.lengths.query
    own = examples // (parts * run.config.optimizer.microbatches)
    dealt_to = parts // run.mesh.shape["slices"]

    def needed(asked: NDArray[np.int64], passages: NDArray[np.int64], candidates: int, longest: int) -> int:
        return places_needed(asked, passages, (dealt_to, own, candidates), longest, run.model.bert.alignment, texts)

    lengths, widest = run.model.query_lengths(queries), run.model.query_lengths(longest)
    asked = needed(lengths, NOTHING, 1, widest)
    nulls = 0 if points else needed(texts + 1, NOTHING, 1, longest + 1)
    body, title = clipped_lengths(run.sources.for_reader.passages, run.lengths)
    joint = body + (title + 2 if points else 1)
    joints = needed(texts, joint, read, longest + run.lengths.document - (1 if points else 2))
    body, title = clipped_lengths(run.sources.passages, run.lengths)
    template, alone = run.model.passage_template, np.zeros_like(texts)  # a passage is embedded without a query
    tower, longest = passage_lengths(body, title, template), longest_passage(run.lengths.document, template)
    return PackedPlaces(own, asked, nulls, joints, needed(alone, tower, embedded, longest) if embedded else 0)


def spread_queries(batch: Batch, mesh: Mesh) -> Batch:
    """A batch in another order, in which all parts of a slice's share have texts of about the same length in all."""
    slices, (_, lengths) = mesh.shape["slices"], reader_query(batch)
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
            "their last ones; what is retrieved is longer than passages are in the mean (tasks/packed.py)"
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
