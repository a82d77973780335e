"""Masked sentences of documents that no task learns from: what a run is measured with where it has no questions.

A sentence without its hidden span asks for its own document, as in the inverse cloze task, but with the sentence left
in its passage. Recall on such sentences does not say how well questions are answered; it does say whether a task made
the retriever worse on documents that it did not learn from. Passages of such documents are no candidates of a masked
sentence and no evidence for it. Else they stay in the corpus like all others: a task may draw them as unrelated ones,
or read them for a training question.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import farmhash
import numpy as np
from numpy.typing import NDArray

from realm_jax.data.evidence import Evidence
from realm_jax.data.examples import (
    MINIMUM_SENTENCE,
    Example,
    document_arrays,
    pieces_without,
    salient_sentences,
    spans_of,
)
from realm_jax.data.questions import Question
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer

_T = TypeVar("_T")

LEAST_LEFT = 20  # pieces of a passage without a sentence that it may still be found by
PARTS = 1000  # a share of documents is counted in such parts of all


def is_held_out(document_id: str, share: float) -> bool:
    """Whether a document is one of the share that is held out: a property of its id alone."""
    return int(farmhash.fingerprint64(document_id)) % PARTS < round(share * PARTS)


def trained_rows(store: PassageStore, share: float) -> NDArray[np.bool_] | None:
    """The rows whose sentences may be learned from, [rows]; None for all."""
    if not share:
        return None
    return np.array([not is_held_out(store.document_id(row), share) for row in range(len(store))], bool)


def held_out_share(share: float, questions: Mapping[str, Sequence[Question]]) -> float:
    """The share of documents that is kept out of training, to measure with where there are no questions for that."""
    return 0.0 if questions.get("dev") else share


def masked_sentences(
    store: PassageStore, tokenizer: Tokenizer, query_length: int, share: float, most: int
) -> list[Question]:
    """Sentences of held-out documents without one of their salient spans, as questions with a gold passage.

    At most `most` (0: all), evenly spread over the corpus.
    """
    masked = masked_pieces(store, query_length, share)
    chosen = evenly_spaced(masked, most or len(masked))
    return [Question(tokenizer.decode(pieces), [], {store.document_id(row): 1}) for row, pieces in chosen]


def masked_pieces(store: PassageStore, query_length: int, share: float) -> list[tuple[int, NDArray]]:
    """The passage of every sentence of `masked_sentences`, as a row, and the tokens that are left of it.

    Sentences of which too little is left are skipped.
    """
    is_trained = trained_rows(store, share)
    if is_trained is None:
        return []
    masked = []
    rows, numbers = salient_sentences(store, query_length)
    held_out = ~is_trained[rows]
    for row, number in zip(rows[held_out].tolist(), numbers[held_out].tolist(), strict=True):
        pieces, spans = spans_of(store, row, number)
        pieces = _without_one_of(spans, pieces, query_length - 2)
        if len(pieces) >= MINIMUM_SENTENCE:
            masked.append((row, pieces))
    return masked


def evenly_spaced(items: Sequence[_T], most: int) -> list[_T]:
    """At most so many of some items, evenly spaced over all of them."""
    places = np.linspace(0, len(items) - 1, min(most, len(items)))
    return [items[place] for place in places.round().astype(int)]


def _without_one_of(spans: NDArray, pieces: NDArray, room: int) -> NDArray:
    """The first `room` pieces of a sentence without one of the spans [n, 2] that end among them.

    None without such a span: a finder that is not ours may find one that goes beyond its sentence.
    """
    spans = spans[spans[:, 1] <= room]
    if not len(spans):
        return pieces[:0]
    return pieces_without(pieces, *spans[_chosen_place(len(spans), pieces)])[:room]


def _chosen_place(count: int, pieces: NDArray) -> int:
    """One of `count` places, which follows from the sentence's own pieces: names, which often come first, and dates
    are hidden alike."""
    return int(farmhash.fingerprint64(pieces.tobytes())) % count


# --- sentences that three searches are measured with ------------------------------------------------------------------


class HeldOutSentence(NamedTuple):
    """A sentence of a held-out document that stands in no other passage. row, number: its passage, and its place among
    the sentences there; text: all of it; masked: without a salient span, '' where there is none to hide; evidence: rows
    of other passages that say what is hidden."""

    row: int
    number: int
    text: str
    masked: str
    evidence: tuple[int, ...]


def held_out_sentences(
    store: PassageStore, tokenizer: Tokenizer, query_length: int, share: float, most: int, evidence: Evidence
) -> list[HeldOutSentence]:
    """At most `most` sentences of held-out documents: first those with evidence, then others with a span to hide, then
    others; of each kind they are spread evenly over the corpus."""
    # Sentences whose tokens stand elsewhere too, held out or not, are left out.
    hashes = [
        int(farmhash.fingerprint64(store.body_tokens(row)[start:end].tobytes()))
        for row in range(len(store))
        for start, end in store.sentences(row).tolist()
    ]
    _, places, times = np.unique(np.array(hashes, np.uint64), return_inverse=True, return_counts=True)
    is_unique = times[places] == 1  # [sentences]
    first_sentences = np.concatenate([[0], np.cumsum(store.counts("sentences"))])  # [rows + 1]
    kinds: tuple[list[HeldOutSentence], ...] = ([], [], [])
    for row in range(len(store)):
        if not is_held_out(store.document_id(row), share):
            continue
        starts, ends = store.sentences(row).T
        is_long = ends - starts >= MINIMUM_SENTENCE
        for number in np.flatnonzero(is_unique[first_sentences[row] : first_sentences[row + 1]] & is_long).tolist():
            sentence = _held_out_sentence(store, tokenizer, row, number, query_length - 2, evidence)
            kinds[0 if sentence.evidence else 1 if sentence.masked else 2].append(sentence)
    chosen: list[HeldOutSentence] = []
    for kind in kinds:
        chosen += evenly_spaced(kind, most - len(chosen))
    return chosen


def _held_out_sentence(
    store: PassageStore, tokenizer: Tokenizer, row: int, number: int, room: int, evidence: Evidence
) -> HeldOutSentence:
    """A sentence with a span hidden for which there is evidence, where it has one; else any within `room` pieces."""
    pieces, spans = spans_of(store, row, number)
    first, last = np.searchsorted(evidence.spans.rows, [row, row + 1])
    supported = first + np.flatnonzero(evidence.spans.sentences[first:last] == number)
    rows: tuple[int, ...] = ()
    if len(supported):
        span = supported[_chosen_place(len(supported), pieces)]
        begin = store.sentences(row)[number, 0]
        spans = np.array([[evidence.spans.starts[span], evidence.spans.ends[span]]]) - begin
        rows = tuple(evidence.rows_of(int(span)).tolist())
    remaining = _without_one_of(spans, pieces, room)
    is_enough = len(remaining) >= MINIMUM_SENTENCE
    masked = tokenizer.decode(remaining) if is_enough else ""
    return HeldOutSentence(row, number, tokenizer.decode(pieces[:room]), masked, rows if is_enough else ())


def passages_without(
    store: PassageStore, tokenizer: Tokenizer, length: int, sentences: Sequence[HeldOutSentence]
) -> tuple[list[int], list[Example]]:
    """Which of some sentences ask for their passage without them, and the `document_arrays` of what is left of it: the
    first of each passage of which LEAST_LEFT pieces are left.

    A sentence has all of its own words in common with its passage, and none but those of the subject with what is left.
    """
    shortened: dict[int, tuple[int, Example]] = {}  # row → number of the sentence, and the passage without it
    for index, sentence in enumerate(sentences):
        row = sentence.row
        body = pieces_without(store.body_tokens(row), *store.sentences(row)[sentence.number])
        if row not in shortened and len(body) >= LEAST_LEFT:
            shortened[row] = index, document_arrays(store.title_tokens(row), body, length, tokenizer)
    return [index for index, _ in shortened.values()], [arrays for _, arrays in shortened.values()]
