"""Masked sentences of documents that no task learns from: a run without questions is measured with them.

A sentence without its hidden span asks for its own document, as in the inverse cloze task, but its passage still has
the sentence. Recall on such sentences does not say how well a model answers questions, but it does say whether a task
made the retriever worse on documents that it did not learn from. Passages of such documents are no candidates of a
masked sentence and no evidence for it. Otherwise they stay in the corpus: a task may draw them as unrelated passages,
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

LEAST_LEFT = 20  # tokens: a shorter rest of a passage says too little to be found by
PARTS = 1000  # a share of documents is counted in such parts of all


def is_held_out(document_id: str, share: float) -> bool:
    """Return True if a document is held out, which depends on nothing but its id.

    Args:
        document_id: its id.
        share: share of documents that are held out.
    """
    return int(farmhash.fingerprint64(document_id)) % PARTS < round(share * PARTS)


def trained_rows(store: PassageStore, share: float) -> NDArray[np.bool_] | None:
    """Find the passages of documents that are not held out.

    Args:
        store: the passages.
        share: share of documents that are held out.

    Returns:
        True for rows whose sentences may be learned from, bool [rows]; None for all rows.
    """
    if not share:
        return None
    return np.array([not is_held_out(store.document_id(row), share) for row in range(len(store))], bool)


def held_out_share(share: float, questions: Mapping[str, Sequence[Question]]) -> float:
    """Return the share of documents that training must not see, for evaluation without questions.

    Args:
        share: share of the config, 0 to 1.
        questions: split → questions; with development questions no document is held out.
    """
    return 0.0 if questions.get("dev") else share


def masked_sentences(
    store: PassageStore, tokenizer: Tokenizer, query_length: int, share: float, most: int
) -> list[Question]:
    """Make questions with a gold passage of held-out sentences, each without one of its salient spans.

    Args:
        store: the passages.
        tokenizer: gives the text of tokens.
        query_length: tokens of a query, special ones included.
        share: share of documents that are held out.
        most: most questions, evenly spread over the corpus; 0 for all.
    """
    masked = masked_pieces(store, query_length, share)
    chosen = evenly_spaced(masked, most or len(masked))
    return [Question(tokenizer.decode(token_ids), [], {store.document_id(row): 1}) for row, token_ids in chosen]


def masked_pieces(store: PassageStore, query_length: int, share: float) -> list[tuple[int, NDArray]]:
    """List the sentences of `masked_sentences` as tokens, without those that become too short.

    Args:
        store: the passages.
        query_length: tokens of a query, special ones included.
        share: share of documents that are held out.

    Returns:
        For each sentence the row of its passage, and its tokens without the span [n].
    """
    is_trained = trained_rows(store, share)
    if is_trained is None:
        return []
    masked = []
    rows, numbers = salient_sentences(store, query_length)
    held_out = ~is_trained[rows]
    for row, number in zip(rows[held_out].tolist(), numbers[held_out].tolist(), strict=True):
        token_ids, spans = spans_of(store, row, number)
        remaining = _without_span(spans, token_ids, query_length - 2)
        if len(remaining) >= MINIMUM_SENTENCE:
            masked.append((row, remaining))
    return masked


def evenly_spaced(items: Sequence[_T], most: int) -> list[_T]:
    """Choose items that are evenly spaced over all of them.

    Args:
        items: all items.
        most: most items to choose.
    """
    indices = np.linspace(0, len(items) - 1, min(most, len(items)))
    return [items[index] for index in indices.round().astype(int)]


def _without_span(spans: NDArray, token_ids: NDArray, max_tokens: int) -> NDArray:
    """Return the first `max_tokens` tokens of a sentence without one of the spans [n, 2] that end among them.

    No tokens if there is no such span: a finder that is not ours may find one that goes beyond its sentence.
    """
    spans = spans[spans[:, 1] <= max_tokens]
    if not len(spans):
        return token_ids[:0]
    return pieces_without(token_ids, *spans[_chosen_index(len(spans), token_ids)])[:max_tokens]


def _chosen_index(count: int, token_ids: NDArray) -> int:
    """Choose one of `count` spans by a hash of the sentence, so that names, which often come first, and dates are
    hidden equally often."""
    return int(farmhash.fingerprint64(token_ids.tobytes())) % count


# --- Sentences for three searches -------------------------------------------------------------------------------------


class HeldOutSentence(NamedTuple):
    """A sentence of a held-out document that occurs in no other passage.

    Attributes:
        row: its passage.
        number: number of the sentence in the passage.
        text: all of it.
        masked: its text without a salient span; empty if there is no span to hide.
        evidence: rows of other passages that mention the masked span.
    """

    row: int
    number: int
    text: str
    masked: str
    evidence: tuple[int, ...]


def held_out_sentences(
    store: PassageStore, tokenizer: Tokenizer, query_length: int, share: float, most: int, evidence: Evidence
) -> list[HeldOutSentence]:
    """Choose sentences of held-out documents.

    Sentences with evidence come first, then others with a span to hide, then others; of each kind they are spread
    evenly over the corpus. Sentences that occur twice in the corpus are left out.

    Args:
        store: the passages.
        tokenizer: gives the text of tokens.
        query_length: tokens of a query, special ones included.
        share: share of documents that are held out.
        most: most sentences.
        evidence: evidence of the store.
    """
    # A sentence that occurs twice, held out or not, does not say which passage it is from.
    hashes = [
        int(farmhash.fingerprint64(store.body_tokens(row)[start:end].tobytes()))
        for row in range(len(store))
        for start, end in store.sentences(row).tolist()
    ]
    _, inverse, counts = np.unique(np.array(hashes, np.uint64), return_inverse=True, return_counts=True)
    is_unique = counts[inverse] == 1  # [sentences]
    first_sentences = np.concatenate([[0], np.cumsum(store.counts("sentences"))])  # [rows + 1]
    # With evidence, with another span to hide, and without a span.
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
    store: PassageStore, tokenizer: Tokenizer, row: int, number: int, max_tokens: int, evidence: Evidence
) -> HeldOutSentence:
    """Hide a span for which there is evidence, or else any span within `max_tokens` tokens."""
    token_ids, spans = spans_of(store, row, number)
    first, last = np.searchsorted(evidence.spans.rows, [row, row + 1])
    supported = first + np.flatnonzero(evidence.spans.sentences[first:last] == number)  # [n], of spans with evidence
    rows: tuple[int, ...] = ()
    if len(supported):
        span = supported[_chosen_index(len(supported), token_ids)]
        begin = store.sentences(row)[number, 0]
        spans = np.array([[evidence.spans.starts[span], evidence.spans.ends[span]]]) - begin
        rows = tuple(evidence.rows_of(int(span)).tolist())
    remaining = _without_span(spans, token_ids, max_tokens)
    is_enough = len(remaining) >= MINIMUM_SENTENCE
    masked = tokenizer.decode(remaining) if is_enough else ""
    return HeldOutSentence(row, number, tokenizer.decode(token_ids[:max_tokens]), masked, rows if is_enough else ())


class ShortenedPassage(NamedTuple):
    """A passage without one of its sentences.

    Attributes:
        position: position of the sentence, in the list that `passages_without` got.
        arrays: the passage as `document_arrays`.
        text: its text, without the title.
    """

    position: int
    arrays: Example
    text: str


def passages_without(
    store: PassageStore, tokenizer: Tokenizer, length: int, sentences: Sequence[HeldOutSentence]
) -> list[ShortenedPassage]:
    """Remove the first sentence of each passage from it, if LEAST_LEFT tokens remain.

    A sentence shares all of its words with its passage, but only those of the subject with the rest of it.

    Args:
        store: the passages.
        tokenizer: gives the special tokens and the dtype.
        length: tokens of a passage.
        sentences: sentences of `held_out_sentences`.
    """
    shortened: dict[int, ShortenedPassage] = {}  # by row
    for position, (row, number, *_) in enumerate(sentences):
        tokens, (start, end) = store.body_tokens(row), store.sentences(row)[number].tolist()
        body = pieces_without(tokens, start, end)
        if row not in shortened and len(body) >= LEAST_LEFT:
            arrays = document_arrays(store.title_tokens(row), body, length, tokenizer)
            text, offsets = store.text(row), tokenizer.offsets_of(store.text(row), tokens)
            if offsets is None:  # the passage was cut within a word
                text = tokenizer.decode(body.tolist())
            else:
                text = f"{text[: offsets[start, 0]]} {text[offsets[end - 1, 1] :]}"
            shortened[row] = ShortenedPassage(position, arrays, text)
    return [*shortened.values()]
