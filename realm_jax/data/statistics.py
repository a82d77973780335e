"""What a passage store holds, in numbers: lengths, sentences, salient spans, unknown words."""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer

COMMON_SPANS = 20
SAMPLED_ROWS = 20_000  # evenly spread rows whose spans are counted by their words


class Histogram(NamedTuple):
    """How often a whole number occurs. edges: the first number of each bin, and one past the last, [bins + 1]."""

    edges: NDArray[np.int64]
    counts: NDArray[np.int64]
    mean: float
    median: float
    most: int


class Statistics(NamedTuple):
    """Numbers of a store. histograms: what is counted, by name; spans: most common spans (words, kind, times)."""

    numbers: dict[str, Any]
    histograms: dict[str, Histogram]
    kinds: dict[str, int]
    spans: list[tuple[str, str, int]]


def statistics(store: PassageStore, tokenizer: Tokenizer) -> Statistics:
    """Numbers of all rows of a store; words of spans are those of evenly spread rows."""
    bodies, titles = store.lengths()
    sentences, spans, sizes, kinds = store.sentence_counts(), store.span_counts(), *_spans(store)
    unknown, pieces = store.count_piece(tokenizer.unk_id)
    numbers = {
        "passages": len(store),
        "documents": store.documents,
        "tokens": int(bodies.sum()),
        "unknown tokens": unknown / max(1, pieces),
        "salient spans": int(spans.sum()),
        "passages without a span": float((spans == 0).mean()) if len(spans) else 0.0,
    }
    histograms = {
        "tokens of a passage": histogram(store.passage_lengths()),
        "sentences of a passage": histogram(sentences),
        "salient spans of a passage": histogram(spans),
        "tokens of a salient span": histogram(sizes),
        "tokens of a title": histogram(titles),
    }
    return Statistics(numbers, histograms, kinds, _common(store, tokenizer))


def histogram(values: NDArray[Any], bins: int = 16) -> Histogram:
    """At most so many bins of equal whole width from 0 (or 1) to the largest value."""
    if not len(values):
        return Histogram(np.arange(2), np.zeros(1, np.int64), 0.0, 0.0, 0)
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // bins)
    edges = np.arange(low, high + 1 + width, width)
    counts = np.histogram(values, edges - 0.5)[0]
    return Histogram(edges, counts.astype(np.int64), float(values.mean()), float(np.median(values)), high)


def _spans(store: PassageStore) -> tuple[NDArray[np.int64], dict[str, int]]:
    """Sizes of all salient spans in pieces, and how many there are of each kind."""
    spans = store.all_spans()
    counts = np.bincount(spans[:, 2], minlength=len(store.span_kinds))
    by_kind = {kind: int(count) for kind, count in zip(store.span_kinds, counts, strict=True)}
    return (spans[:, 1] - spans[:, 0]).astype(np.int64), dict(sorted(by_kind.items(), key=lambda one: -one[1]))


def _common(store: PassageStore, tokenizer: Tokenizer) -> list[tuple[str, str, int]]:
    found: Counter[tuple[bytes, int]] = Counter()
    for row in range(0, len(store), -(-len(store) // SAMPLED_ROWS) or 1):
        body = store.body_tokens(row)
        found.update((body[start:end].tobytes(), int(kind)) for start, end, kind in store.spans(row))
    common = sorted(found.items(), key=lambda one: (-one[1], one[0]))[:COMMON_SPANS]
    return [(tokenizer.decode(np.frombuffer(p, store.dtype)), store.span_kinds[k], times) for (p, k), times in common]
