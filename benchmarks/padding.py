"""How much of what a step of `realm_wiki` computes is of tokens, and what other ways to batch would leave of padding.

Lengths are those of real passages and of sentences drawn as REALM draws them; a query's candidates are drawn at random.
Sorted: the batches of a window of steps are made of like lengths, and a step is compiled for each of `widths`, whose
smallest that holds the longest query of a batch is taken. Packed: a chip's joints one after another, in as many places
as `tasks/packed.py` takes.

    python benchmarks/padding.py --data=DIR
"""

import argparse

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.sources import open_sources
from realm_jax.data.store import PassageStore
from realm_jax.models.tpu_attention import TILE
from realm_jax.recipes import paper
from realm_jax.tasks.packed import clipped_lengths, places_needed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--chips", type=int, default=64)
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
    places = places_needed(queries.astype(np.int64), bodies + 1, (args.chips, own, candidates), longest, TILE)
    row(f"packed, {args.chips} chips", 1, places / (own * candidates), tokens)


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
