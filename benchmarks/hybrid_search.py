"""Gold-passage recall of vectors, BM25 and rules that fuse them, on the questions of a prepared folder.

    python benchmarks/hybrid_search.py --data=data/wiki --encoder=MODEL_DIR --vectors=vectors/wiki --splits=dev,quoref

--encoder: a sentence-transformers folder, which embeds passages (title and text) and questions; --vectors: a folder in
which the vectors are kept, PASSAGES.npy and SPLIT.npy, so that the encoder is needed once. The rule of the package is
`realm_jax/index/fusion.py`; the others are here because it was compared with them.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.sources import Sources, open_sources
from realm_jax.evaluation.retrieval import gold_hits
from realm_jax.index.fusion import LIST, fuse
from realm_jax.index.words import PLAIN, Bm25, language_of, searchable_texts

TEMPERATURE = 0.05  # of cosines, the retriever's
BLOCK = 256  # questions at a time


class Lists(NamedTuple):
    """The lists of both searches for some questions: rows and scores [questions, LIST], and the scores by vectors of
    the rows that words found."""

    rows: NDArray
    scores: NDArray
    word_rows: NDArray
    word_scores: NDArray
    word_vector_scores: NDArray


def vectors_of(folder: Path, name: str, encoder: str, texts: Callable[[], list[str]]) -> NDArray[np.float32]:
    """The vectors kept as `name`, or made by the encoder and kept."""
    path = folder / f"{name}.npy"
    if not path.is_file():
        from sentence_transformers import SentenceTransformer

        folder.mkdir(parents=True, exist_ok=True)
        np.save(path, SentenceTransformer(encoder).encode(texts(), normalize_embeddings=True))
    return np.load(path)


def lists_of(queries: NDArray, passages: NDArray, words: Bm25, questions: Sequence[str]) -> Lists:
    """The first LIST passages of each question by each search."""
    word_rows, word_scores = words.scored(questions, LIST)
    found = []
    for first in range(0, len(queries), BLOCK):
        scores = queries[first : first + BLOCK] @ passages.T / TEMPERATURE
        rows = np.argpartition(-scores, LIST, axis=1)[:, :LIST]
        order = np.argsort(-np.take_along_axis(scores, rows, axis=1), axis=1, kind="stable")
        rows = np.take_along_axis(rows, order, axis=1).astype(np.int32)
        both = np.take_along_axis(scores, word_rows[first : first + BLOCK], axis=1)
        found.append((rows, np.take_along_axis(scores, rows, axis=1), both))
    rows, scores, both = map(np.concatenate, zip(*found, strict=True))
    return Lists(rows, scores, word_rows, word_scores, both)


def by_rule(lists: Lists, depth: int, rule: Callable[[Lists], tuple[NDArray, NDArray]]) -> NDArray[np.int32]:
    """Rows [questions, depth] by the sum of two values of each passage; `rule` gives those of both lists, ≥ 0."""
    values, word_values = rule(lists)
    same = lists.rows[:, :, None] == lists.word_rows[:, None]
    total = np.concatenate([values + (same * word_values[:, None]).sum(axis=2), word_values], axis=1)
    total[:, LIST:][same.any(axis=1)] = -1
    best = np.argsort(-total, axis=1, kind="stable")[:, :depth]
    return np.take_along_axis(np.concatenate([lists.rows, lists.word_rows], axis=1), best, axis=1)


def reciprocal_ranks(lists: Lists) -> tuple[NDArray, NDArray]:
    """Reciprocal rank fusion with its usual constant, 60."""
    one = np.broadcast_to(1 / (60 + np.arange(1, LIST + 1)), lists.rows.shape)
    return one, np.where(lists.word_scores > 0, one, 0.0)


def standardised(lists: Lists) -> tuple[NDArray, NDArray]:
    """Sums of z-scores, each against ranks 10 to 100 of its list."""
    return _z(lists.scores), _z(lists.word_scores)


def sharpened(lists: Lists) -> tuple[NDArray, NDArray]:
    """Sums of squared z-scores: nearly the larger of the two."""
    return _z(lists.scores) ** 2, _z(lists.word_scores) ** 2


def mixture(lists: Lists) -> tuple[NDArray, NDArray]:
    """p_v + p_w, the rule of the package without its roots."""
    return _softmax(lists.scores), np.where(lists.word_scores > 0, _softmax(lists.word_scores), 0.0)


def _z(scores: NDArray) -> NDArray:
    rest = scores[:, 9:]
    return np.maximum((scores - rest.mean(axis=1, keepdims=True)) / (rest.std(axis=1, keepdims=True) + 1e-6), 0.0)


def _softmax(scores: NDArray) -> NDArray:
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def measure(sources: Sources, split: str, queries: NDArray, passages: NDArray, plain: Bm25, words: Bm25) -> None:
    """Print a line for each way to search: gold@1, 5 and 20, and its difference to the rule of the package at 5."""
    asked = sources.questions[split]
    texts, golds = [one.question for one in asked], [one.gold_passage_id for one in asked]
    lists = lists_of(queries, passages, words, texts)
    found = {
        "BM25, plain words": plain.search(texts, 20),
        "BM25": words.search(texts, 20),
        "vectors": lists.rows[:, :20],
        "hybrid": fuse(*lists, 20).rows,
        "reciprocal ranks": by_rule(lists, 20, reciprocal_ranks),
        "z-scores": by_rule(lists, 20, standardised),
        "squared z-scores": by_rule(lists, 20, sharpened),
        "mixture": by_rule(lists, 20, mixture),
    }
    hits = {name: gold_hits(sources.passages, rows, golds) for name, rows in found.items()}
    ours = hits["hybrid"][:, :5].any(axis=1).astype(float)
    print(f"{split}, {len(asked)} questions".ljust(34), "gold@1  gold@5  gold@20  hybrid − this at 5, 95 %")
    for name, hit in hits.items():
        shares = "   ".join(f"{hit[:, :k].any(axis=1).mean():.3f}" for k in (1, 5, 20))
        difference, low, high = interval(ours - hit[:, :5].any(axis=1))
        print(f"  {name:32} {shares}    {difference:+.3f} [{low:+.3f}, {high:+.3f}]", flush=True)


def interval(differences: NDArray) -> tuple[float, float, float]:
    """The mean of paired differences and the ends of its bootstrap interval."""
    rng = np.random.default_rng(0)
    means = differences[rng.integers(len(differences), size=(2000, len(differences)))].mean(axis=1)
    return float(differences.mean()), *np.quantile(means, (0.025, 0.975)).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--vectors", required=True, type=Path)
    parser.add_argument("--encoder", default="")
    parser.add_argument("--splits", default="dev")
    args = parser.parse_args()
    sources = open_sources(args.data, flag="--data=")
    store = sources.passages
    passages = vectors_of(args.vectors, "PASSAGES", args.encoder, lambda: list(searchable_texts(store)))
    plain, words = (Bm25(searchable_texts(store), language) for language in (PLAIN, language_of(store)))
    for split in args.splits.split(","):
        texts = [one.question for one in sources.questions[split]]
        queries = vectors_of(args.vectors, split, args.encoder, texts.copy)
        measure(sources, split, queries, passages, plain, words)


if __name__ == "__main__":
    main()
