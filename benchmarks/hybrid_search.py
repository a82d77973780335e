"""Gold-passage recall of vectors, BM25 and rules that fuse them, on the questions of a prepared folder.

    python benchmarks/hybrid_search.py --data=data/wiki --encoder=MODEL_DIR --vectors=vectors/wiki --splits=masked
    python benchmarks/hybrid_search.py --data=data/wiki --encoder=MODEL_DIR --vectors=vectors/wiki --splits=dev,quoref

--encoder: a sentence-transformers folder, which embeds passages (title and text) and questions; --vectors: a folder in
which the vectors are kept, PASSAGES.npy and SPLIT.npy, so that the encoder is needed once. The rule of the package is
`realm_jax/retrieval/fusion.py`; the others are here because it was compared with them.

The split `masked` is made of the corpus itself, for choosing a rule without any question: a sentence without one of its
spans asks for the other passages of its document, and its own passage takes no part.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.held_out import evenly_spaced, masked_pieces
from realm_jax.data.sources import Sources, open_sources
from realm_jax.eval.retrieval_metrics import gold_hits
from realm_jax.retrieval.bm25 import PLAIN, Bm25, language_of, searchable_texts
from realm_jax.retrieval.fusion import FUSION_DEPTH, fuse

TEMPERATURE = 0.05  # of cosines, the retriever's
BLOCK = 256  # questions at a time
MASKED = "masked"  # the name of the split that is made of sentences
SENTENCES = 2000  # of that split at most
QUERY_LENGTH = 48  # tokens of a sentence at most


class Lists(NamedTuple):
    """The lists of both searches for some questions: rows and scores [questions, LIST], and the scores by vectors of
    the rows that words found."""

    rows: NDArray
    scores: NDArray
    bm25_rows: NDArray
    bm25_scores: NDArray
    bm25_vector_scores: NDArray


class Asked(NamedTuple):
    """Questions, and the id of the document that each asks for, None if it asks for none.

    own: int64 [questions], the row that each masked sentence was taken from, which is left out of what it finds; None
    for real questions.
    """

    texts: list[str]
    golds: list[set[str]]
    own: NDArray[np.int64] | None = None


Values = tuple[NDArray, NDArray, NDArray]  # of what vectors found, of what words found, of the latter by vectors
Rule = Callable[[Lists], Values]


def asked_of(sources: Sources, split: str) -> Asked:
    """The questions of a split, or masked sentences of documents with several passages."""
    if split != MASKED:
        questions = sources.questions[split]
        return Asked([one.question for one in questions], [{*one.gold} for one in questions])
    store = sources.passages
    documents = [store.document_id(row) for row in range(len(store))]
    several = {one for one, after in zip(documents, documents[1:], strict=False) if one == after}
    pieces = [entry for entry in masked_pieces(store, QUERY_LENGTH, 1.0) if documents[entry[0]] in several]
    if not pieces:
        raise SystemExit(f"--splits={MASKED}: no document has several passages and a sentence with a salient span")
    rows, sentences = zip(*evenly_spaced(pieces, SENTENCES), strict=True)
    texts = [sources.tokenizer.decode(sentence) for sentence in sentences]
    return Asked(texts, [{documents[row]} for row in rows], np.array(rows))


def vectors_of(folder: Path, name: str, encoder: str, texts: Callable[[], list[str]]) -> NDArray[np.float32]:
    """The vectors kept as `name`, or made by the encoder and kept."""
    path = folder / f"{name}.npy"
    if not path.is_file():
        from sentence_transformers import SentenceTransformer

        folder.mkdir(parents=True, exist_ok=True)
        np.save(path, SentenceTransformer(encoder).encode(texts(), normalize_embeddings=True))
    return np.load(path)


def lists_of(queries: NDArray, passages: NDArray, words: Bm25, asked: Asked) -> Lists:
    """The first LIST passages of each question by each search."""
    depth = FUSION_DEPTH if asked.own is None else FUSION_DEPTH + 1
    bm25_rows, bm25_scores = without_own(asked.own, *words.scored(asked.texts, depth))
    found = []
    for first in range(0, len(queries), BLOCK):
        scores = queries[first : first + BLOCK] @ passages.T / TEMPERATURE
        rows = np.argpartition(-scores, depth, axis=1)[:, :depth]
        order = np.argsort(-np.take_along_axis(scores, rows, axis=1), axis=1, kind="stable")
        rows = np.take_along_axis(rows, order, axis=1).astype(np.int32)
        both = np.take_along_axis(scores, bm25_rows[first : first + BLOCK], axis=1)
        found.append((rows, np.take_along_axis(scores, rows, axis=1), both))
    rows, scores, both = map(np.concatenate, zip(*found, strict=True))
    return Lists(*without_own(asked.own, rows, scores), bm25_rows, bm25_scores, both)


def without_own(own: NDArray | None, rows: NDArray, scores: NDArray) -> tuple[NDArray, NDArray]:
    """The first LIST entries that are not a question's own row."""
    if own is None:
        return rows, scores
    order = np.argsort(rows == own[:, None], axis=1, kind="stable")[:, :FUSION_DEPTH]
    return np.take_along_axis(rows, order, axis=1), np.take_along_axis(scores, order, axis=1)


def by_rule(lists: Lists, depth: int, rule: Rule) -> NDArray[np.int32]:
    """Rows [questions, depth] by the sum of two values of each passage, all ≥ 0."""
    values, word_values, late = rule(lists)
    same = lists.rows[:, :, None] == lists.bm25_rows[:, None]
    total = np.concatenate([values + (same * word_values[:, None]).sum(axis=2), word_values + late], axis=1)
    total[:, FUSION_DEPTH:][same.any(axis=1)] = -1
    best = np.argsort(-total, axis=1, kind="stable")[:, :depth]
    return np.take_along_axis(np.concatenate([lists.rows, lists.bm25_rows], axis=1), best, axis=1)


def reciprocal_ranks(lists: Lists) -> Values:
    """Reciprocal rank fusion with its usual constant, 60."""
    one = np.broadcast_to(1 / (60 + np.arange(1, FUSION_DEPTH + 1)), lists.rows.shape)
    return one, np.where(lists.bm25_scores > 0, one, 0.0), np.zeros_like(one)


def standardised(lists: Lists) -> Values:
    """Sums of z-scores, each against ranks 10 to 100 of its list."""
    return _z(lists.scores), _z(lists.bm25_scores), np.zeros_like(lists.scores)


def sharpened(lists: Lists) -> Values:
    """Sums of squared z-scores: nearly the larger of the two."""
    return _z(lists.scores) ** 2, _z(lists.bm25_scores) ** 2, np.zeros_like(lists.scores)


def power(exponent: float, temperature: float = TEMPERATURE, word_temperature: float = 1.0) -> Rule:
    """p_v^e + p_w^e: 1 is the mixture, ½ with the other defaults the rule of the package."""

    def rule(lists: Lists) -> Values:
        scores, late = (part * TEMPERATURE / temperature for part in (lists.scores, lists.bm25_vector_scores))
        top = scores.max(axis=1, keepdims=True)
        total = np.exp(scores - top).sum(axis=1, keepdims=True)
        p_v, p_late = np.exp(scores - top) / total, np.exp(np.minimum(late - top, 0.0)) / total
        shared = lists.bm25_scores > 0
        p_w = np.where(shared, _softmax(lists.bm25_scores / word_temperature), 0.0)
        return p_v**exponent, p_w**exponent, np.where(shared, p_late**exponent, 0.0)

    return rule


RULES: dict[str, Rule] = {
    "reciprocal ranks": reciprocal_ranks,
    "z-scores": standardised,
    "squared z-scores": sharpened,
    "mixture": power(1.0),
}
GRID: dict[str, Rule] = {  # what is looked at on masked sentences alone
    f"power {exponent}, {temperature}, {word}": power(exponent, temperature, word)
    for exponent in (0.25, 0.35, 0.5, 0.7, 1.0)
    for temperature in (0.03, 0.05, 0.07)
    for word in (0.6, 1.0, 1.5)
}


def _z(scores: NDArray) -> NDArray:
    rest = scores[:, 9:]
    return np.maximum((scores - rest.mean(axis=1, keepdims=True)) / (rest.std(axis=1, keepdims=True) + 1e-6), 0.0)


def _softmax(scores: NDArray) -> NDArray:
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def measure(sources: Sources, split: str, asked: Asked, lists: Lists, plain: Bm25) -> None:
    """Print a line for each way to search: gold@1, 5 and 20, and its difference to the rule of the package at 5."""
    found = {
        "BM25, plain words": without_own(asked.own, *plain.scored(asked.texts, FUSION_DEPTH))[0],
        "BM25": lists.bm25_rows,
        "vectors": lists.rows,
        "hybrid": fuse(*lists, 20).rows,
    }
    rules = RULES | GRID if split == MASKED else RULES
    found |= {name: by_rule(lists, 20, rule) for name, rule in rules.items()}
    hits = {name: gold_hits(sources.passages, rows[:, :20], asked.golds) for name, rows in found.items()}
    ours = hits["hybrid"][:, :5].any(axis=1).astype(float)
    print(f"{split}, {len(asked.texts)} questions".ljust(34), "gold@1  gold@5  gold@20  hybrid − this at 5, 95 %")
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
        asked = asked_of(sources, split)
        queries = vectors_of(args.vectors, split, args.encoder, asked.texts.copy)
        measure(sources, split, asked, lists_of(queries, passages, words, asked), plain)


if __name__ == "__main__":
    main()
