"""Questions beside one positive passage each: what `objective.qa=positive` trains the reader with.

A positive passage holds an answer as a span. It is one of the gold document where that is known, else the first that is
retrieved. Which rows those are is decided here; where they are kept for a run is `realm_jax/jobs/matched_answers.py`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from realm_jax.corpus.jsonl import Question
from realm_jax.corpus.store import PassageStore
from realm_jax.data.examples import Example, Examples, Lengths, question_arrays
from realm_jax.models.inputs import DOCUMENT_SPECIALS
from realm_jax.text import layouts
from realm_jax.text.tokenizer import Tokenizer

NONE = -1  # in place of a row: no passage is known to hold an answer


def gold_row(store: PassageStore, question: Question, wordpiece: Tokenizer, lengths: Lengths) -> int:
    """The row of a question's gold document that holds an answer; NONE where none does or there is no gold document.

    Of several the one with the most pieces of the question, then the first.
    """
    if question.gold_passage_id is None:
        return NONE
    answers = answer_pieces(question, wordpiece, lengths)
    rows = [row for row in store.rows_of(question.gold_passage_id) if holds_answer(store, row, answers, lengths)]
    asked = set(wordpiece.encode(question.question).ids)
    shared = [len(asked.intersection(store.body_tokens(row).tolist())) for row in rows]
    return rows[int(np.argmax(shared))] if rows else NONE


def first_row(
    store: PassageStore, question: Question, rows: Sequence[int], wordpiece: Tokenizer, lengths: Lengths
) -> int:
    """The first of some rows that holds an answer; NONE where none does."""
    answers = answer_pieces(question, wordpiece, lengths)
    return next((row for row in rows if row >= 0 and holds_answer(store, row, answers, lengths)), NONE)


def answer_pieces(question: Question, wordpiece: Tokenizer, lengths: Lengths) -> list[NDArray]:
    """The answers that can be spans, as the reader is trained with them."""
    arrays = question_arrays([], question.answers, wordpiece, lengths)
    return [
        pieces[:size].astype(wordpiece.dtype)
        for pieces, size in zip(arrays["answers"], arrays["answer_lengths"], strict=True)
        if size
    ]


def holds_answer(store: PassageStore, row: int, answers: Sequence[NDArray], lengths: Lengths) -> bool:
    """Whether the body of a row, as far as it is read, has one of some runs of pieces."""
    body = body_read(store, row, lengths)
    text = body.tobytes()
    return any(occurs(text, answer.tobytes(), body.itemsize) for answer in answers)


def occurs(text: bytes, wanted: bytes, size: int) -> bool:
    """Whether some items of `size` bytes each stand in a row of such items."""
    place = text.find(wanted)
    while place >= 0 and place % size:
        place = text.find(wanted, place + 1)
    return place >= 0


def body_read(store: PassageStore, row: int, lengths: Lengths) -> NDArray:
    """The body of a row as far as it is read: beside its title and three special pieces."""
    return store.body_tokens(row)[: lengths.document - 3 - len(title_read(store, row, lengths))]


def title_read(store: PassageStore, row: int, lengths: Lengths) -> NDArray:
    """The title of a row as far as it is read: beside three special pieces."""
    return store.title_tokens(row)[: lengths.document - 3]


def positive_examples(
    questions: Sequence[Question],
    rows: Sequence[int],
    store: PassageStore,
    wordpiece: Tokenizer,
    lengths: Lengths,
    titles: bool,
) -> Examples:
    """Questions with their answers, and each joined with its passage; batched by the length of that.

    rows: the passage of each. Arrays: those of `question_arrays`, and `joint` [query + document − 1 or 2], its
    places in use `joint_length`, and `body_start`; the layout is that of `realm_jax.models.inputs.join`.
    """
    encoded = [encoding.ids for encoding in wordpiece.encode_batch([question.question for question in questions])]
    places = lengths.query + lengths.document - (1 if titles else DOCUMENT_SPECIALS)

    def used(number: int) -> int:
        row = rows[number]
        title = len(title_read(store, row, lengths)) + 1 if titles else 0
        query = min(len(encoded[number]), lengths.query - 2) + 2
        return query + title + len(body_read(store, row, lengths)) + 1

    def make(number: int, rng: np.random.Generator) -> Example:
        title, body = title_read(store, rows[number], lengths), body_read(store, rows[number], lengths)
        special, most = wordpiece.special, lengths.query - 2
        laid = layouts.joint(encoded[number], body, places, special, most, title if titles else None)
        return question_arrays(encoded[number], questions[number].answers, wordpiece, lengths) | {
            "joint": laid.ids.astype(wordpiece.dtype),
            "joint_length": np.int32(laid.used),
            "body_start": np.int32(laid.used - len(body) - 1),
        }

    return Examples(len(questions), make, np.array([used(number) for number in range(len(questions))], np.int64))
