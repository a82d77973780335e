"""How much of what a step of `realm_wiki` computes is of tokens, and what other ways to batch would leave of padding.

Lengths are those of real passages and of sentences drawn as REALM draws them; a query's candidates are drawn at random.
Sorted: the batches of a window of steps are made of like lengths, and a step is compiled for each of `widths`, whose
smallest that holds the longest query of a batch is taken. Packed: a chip's joints one after another, in as many places
as do but once in 10,000 chips, or as `tasks/packed.py` takes.

    python benchmarks/padding.py --data=DIR [--vectors=FILE.npy --first=ROW]

With vectors of passages that follow one another, ROW the first, also how much longer those are that each of them
retrieves, and how many chips, and pieces, then have no place where there is room for so much more than in the mean.
"""

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.sources import open_sources
from realm_jax.data.store import PassageStore
from realm_jax.models.attention import TILE
from realm_jax.models.packing import snake_order
from realm_jax.recipes import paper
from realm_jax.tasks.packed import RARE, clipped_lengths, places_needed, places_taken

BATCHES = 1000  # drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--chips", type=int, default=64)
    parser.add_argument("--vectors", type=Path)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    config = paper("realm")
    data, batch, candidates = config.data, config.realm.batch_size, config.realm.candidates - 1
    store = open_sources(args.data, questions=False).passages
    rng = np.random.default_rng(0)
    passages = np.minimum(store.passage_lengths(), data.document_length).astype(np.float64)
    queries = query_lengths(rng, store, data.query_length)
    of_passages = passages.mean() / data.document_length
    print(f"passages of {passages.mean():.1f} in {data.document_length}: {of_passages:.3f} are tokens")
    print(f"queries of {queries.mean():.1f} in {data.query_length}\n")
    bodies, _ = clipped_lengths(store, data.document_length)
    tokens = queries.mean() + bodies.mean() + 1  # a joint is without the title
    print("| joints | programs | padded to | tokens |\n|---|---|---|---|")
    row("as they come", 1, data.query_length + data.document_length, tokens)
    for multiple in (32, 16, 8):
        widths = np.arange(multiple, data.query_length + multiple, multiple).clip(max=data.query_length)
        for window in (8, 32):
            padded = sorted_width(rng.permutation(queries), widths, batch, window) + data.document_length
            row(f"sorted in windows of {window}, by {multiple}", len(np.unique(widths)), padded, tokens)
    own, longest = batch // args.chips, data.query_length + data.document_length
    shape, added, asked = (args.chips, own, candidates), bodies + 1, queries.astype(np.int64)
    drawn = rng.choice(asked, (BATCHES, batch, 1))
    taken = rng.choice(added, (BATCHES, batch, candidates))
    shared_out = np.sort(drawn, axis=1)[:, ::-1][:, snake_order(batch, args.chips)]
    for name, ordered in (("as they come", drawn), ("queries shared out", shared_out)):
        of_chips = (ordered + taken).reshape(BATCHES * args.chips, -1)
        rare = np.quantile(places_taken(of_chips, 1, longest, TILE), 1 - 1 / RARE)
        row(f"packed, {name}", 1, rare / (own * candidates), tokens)
    places = places_needed(asked, added, shape, longest, TILE)
    row("packed, joints shared out", 1, places / (own * candidates), tokens)
    if args.vectors:
        retrieved(rng, np.load(args.vectors), added, args.first, drawn, shape, longest)


def retrieved(
    rng: np.random.Generator, vectors: NDArray, added: NDArray[np.int64], first: int, drawn: NDArray[np.int64],
    shape: tuple[int, int, int], longest: int,
) -> None:  # fmt: skip
    """How much longer retrieved passages are, and how often places are too few for them. drawn: queries of batches."""
    chips, own, candidates = shape
    scores = vectors @ vectors.T
    np.fill_diagonal(scores, -np.inf)
    nearest = np.argsort(-scores, axis=1)[:, :candidates]
    lengths = added[first : first + len(vectors)]
    longer = (lengths[nearest].mean() - lengths.mean()) / lengths.std()
    print(f"\nthe {candidates} that each of {len(vectors)} passages retrieves are {longer:.3f} deviations longer\n")
    of_random = drawn + rng.choice(added, (*drawn.shape[:2], candidates))
    found = drawn + lengths[nearest[rng.integers(len(vectors), size=drawn.shape[:2])]]
    at_random, used = (places_taken(one.reshape(BATCHES, -1), chips, longest, TILE) for one in (of_random, found))
    print(
        "| deviations | places, of the mean | chips with too few | share of pieces without a place |\n|---|---|---|---|"
    )
    for deviations in (0.15, 0.2, 0.25):
        places = at_random.mean() + deviations * added.std() * own * candidates
        lost, of_mean = np.maximum(used - places, 0), places / at_random.mean()
        print(f"| {deviations} | {of_mean:.4f} | {(lost > 0).mean():.4f} | {lost.sum() / used.sum():.2g} |", flush=True)


def query_lengths(rng: np.random.Generator, store: PassageStore, longest: int) -> NDArray[np.float64]:
    """Pieces of a query of each passage, [CLS] and [SEP] counted: of the sentence that one of its spans stands in."""
    lengths = []
    for row in store.salient_rows(longest - 2).tolist():
        sentences, spans = store.sentences(row), store.spans(row)
        owner = np.searchsorted(sentences[:, 0], spans[:, 0], side="right") - 1
        within = owner[spans[:, 1] - sentences[owner, 0] <= longest - 2]
        lengths.append(np.diff(sentences[rng.choice(within)])[0])
    return np.minimum(np.asarray(lengths) + 2.0, longest)


def sorted_width(queries: NDArray, widths: NDArray, batch: int, window: int) -> float:
    """The mean width of batches that are sorted by length within windows of so many."""
    whole = len(queries) // (batch * window) * batch * window
    longest = np.sort(queries[:whole].reshape(-1, window * batch)).reshape(-1, batch).max(axis=1)
    return float(widths[np.searchsorted(widths, longest)].mean())


def row(name: str, programs: object, padded: float, tokens: float) -> None:
    print(f"| {name} | {programs} | {padded:.1f} | {tokens / padded:.3f} |", flush=True)


if __name__ == "__main__":
    main()
