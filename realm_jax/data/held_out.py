"""Masked sentences of documents that no task learns from: what a run is measured with where it has no questions.

A sentence without its hidden span asks for its own document, as in the inverse cloze task, but with the sentence left
in its passage. Recall on such sentences does not say how well questions are answered; it does say whether a task made
the retriever worse on documents whose own sentences it did not learn from. Passages of such documents stay in the
corpus like all others: a task may retrieve them, draw them as unrelated ones, or read them for a training question.
"""

import farmhash
import numpy as np
from numpy.typing import NDArray

from realm_jax.corpus.jsonl import Question
from realm_jax.corpus.store import PassageStore
from realm_jax.data.examples import MINIMUM_SENTENCE, salient_sentences, spans_of
from realm_jax.text.wordpiece import WordPiece

PARTS = 1000  # a share of documents is counted in such parts of all


def is_held_out(document_id: str, share: float) -> bool:
    """Whether a document is one of the share that is held out: a property of its id alone."""
    return int(farmhash.fingerprint64(document_id)) % PARTS < round(share * PARTS)


def trained_rows(store: PassageStore, share: float) -> NDArray[np.bool_] | None:
    """The rows whose sentences may be learned from, [rows]; None for all."""
    if not share:
        return None
    return np.array([not is_held_out(store.document_id(row), share) for row in range(len(store))], bool)


def masked_sentences(
    store: PassageStore, wordpiece: WordPiece, query_length: int, share: float, most: int
) -> list[Question]:
    """Sentences of held-out documents without one of their salient spans, as questions with a gold passage.

    At most `most` (0: all), evenly spread over the corpus. The span that is hidden is a sentence's first.
    """
    kept = trained_rows(store, share)
    sentences = salient_sentences(store, query_length)
    places = np.flatnonzero(~kept[sentences.rows]) if kept is not None else np.zeros(0, np.int64)
    if most and len(places) > most:
        places = places[np.linspace(0, len(places) - 1, most).round().astype(np.int64)]
    found = []
    for place in places.tolist():
        row = int(sentences.rows[place])
        pieces, spans = spans_of(store, row, int(sentences.numbers[place]))
        start, end = spans[0]
        left = np.concatenate([pieces[:start], pieces[end:]])[: query_length - 2]
        if len(left) >= MINIMUM_SENTENCE:
            found.append(Question(wordpiece.decode(left), [], store.document_id(row)))
    return found
