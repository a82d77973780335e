"""Masked sentences of documents that no task learns from: what a run is measured with where it has no questions.

A sentence without its hidden span asks for its own document, as in the inverse cloze task, but with the sentence left
in its passage. Recall on such sentences does not say how well questions are answered; it does say whether a task made
the retriever worse on documents whose own sentences it did not learn from. Passages of such documents stay in the
corpus like all others: a task may retrieve them, draw them as unrelated ones, or read them for a training question.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import farmhash
import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

from realm_jax.data.examples import MINIMUM_SENTENCE, salient_sentences, spans_of
from realm_jax.data.questions import Question
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer

_T = TypeVar("_T")

PARTS = 1000  # a share of documents is counted in such parts of all


def is_held_out(document_id: str, share: float) -> bool:
    """Whether a document is one of the share that is held out: a property of its id alone."""
    return int(farmhash.fingerprint64(document_id)) % PARTS < round(share * PARTS)


def trained_rows(store: PassageStore, share: float) -> NDArray[np.bool_] | None:
    """The rows whose sentences may be learned from, [rows]; None for all."""
    if not share:
        return None
    return np.array([not is_held_out(store.document_id(row), share) for row in range(len(store))], bool)


def held_out_share(config: ConfigDict, questions: Mapping[str, Sequence[Question]]) -> float:
    """The share of documents that is kept out of training, to measure with where there are no questions for that."""
    return 0.0 if questions.get("dev") else float(config.evaluation.held_out)


def masked_sentences(
    store: PassageStore, tokenizer: Tokenizer, query_length: int, share: float, most: int
) -> list[Question]:
    """Sentences of held-out documents without one of their salient spans, as questions with a gold passage.

    At most `most` (0: all), evenly spread over the corpus.
    """
    left = masked_pieces(store, query_length, share)
    chosen = evenly_spaced(left, most or len(left))
    return [Question(tokenizer.decode(pieces), [], {store.document_id(row): 1}) for row, pieces in chosen]


def masked_pieces(store: PassageStore, query_length: int, share: float) -> list[tuple[int, NDArray]]:
    """The passage of every sentence of `masked_sentences`, as a row, and the tokens that are left of it.

    Sentences of which too little is left are skipped.
    """
    kept = trained_rows(store, share)
    if kept is None:
        return []
    sentences = salient_sentences(store, query_length)
    places = zip(*(part[~kept[sentences.rows]].tolist() for part in sentences), strict=True)
    left = [(row, _without_span(store, row, number, query_length - 2)) for row, number in places]
    return [(row, pieces) for row, pieces in left if len(pieces) >= MINIMUM_SENTENCE]


def evenly_spaced(items: Sequence[_T], most: int) -> list[_T]:
    """At most so many of some items, evenly spaced over all of them."""
    places = np.linspace(0, len(items) - 1, min(most, len(items)))
    return [items[place] for place in places.round().astype(int)]


def _without_span(store: PassageStore, row: int, number: int, room: int) -> NDArray:
    """The first `room` tokens of a sentence without one of the salient spans that end among them.

    Which one follows from the sentence's own pieces: names, which often come first, and dates are hidden alike.
    """
    pieces, spans = spans_of(store, row, number)
    spans = spans[spans[:, 1] <= room]
    if not len(spans):  # a finder that is not ours may find one that goes beyond its sentence
        return pieces[:0]
    start, end = spans[int(farmhash.fingerprint64(pieces.tobytes())) % len(spans)]
    return np.concatenate([pieces[:start], pieces[end:]])[:room]
