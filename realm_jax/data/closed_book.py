"""Examples for a reader without passages: `[CLS] question [MASK] … [MASK] [SEP]`, answers as masked words.

The places of an answer are as many as a span may have; those after the answer are to be filled with [SEP].
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from realm_jax.corpus.jsonl import Question
from realm_jax.corpus.store import PassageStore
from realm_jax.data.examples import (
    Example,
    Examples,
    Lengths,
    check_strings,
    document_arrays,
    masked_arrays,
    query_arrays,
    salient_sentences,
    spans_of,
)  # fmt: skip
from realm_jax.errors import UserError
from realm_jax.text.tokenizer import Tokenizer


def answer_places(lengths: Lengths) -> int:
    """Masked places after a question: `span_width`, at most `predictions`."""
    return min(lengths.span_width, lengths.predictions)


def closed_book_query(question: str, wordpiece: Tokenizer, lengths: Lengths) -> Example:
    """A question, cut where it would leave no room, followed by the masked places, and their positions."""
    places = answer_places(lengths)
    ids = wordpiece.encode(question).ids[: lengths.query - 2 - places]
    positions = np.zeros(lengths.predictions, np.int32)
    positions[:places] = 1 + len(ids) + np.arange(places)
    query = query_arrays(np.array([*ids, *[wordpiece.mask_id] * places], np.int32), lengths.query, wordpiece)
    return query | {"positions": positions}


def closed_book_answer(pieces: NDArray, wordpiece: Tokenizer, lengths: Lengths) -> str:
    """The answer that pieces predicted at `positions` spell: those in the places, up to the first [SEP]."""
    guesses = pieces[: answer_places(lengths)]
    ends = np.flatnonzero(guesses == wordpiece.sep_id)
    return wordpiece.decode(guesses[: ends[0]] if len(ends) else guesses)


def check_closed_book(questions: Sequence[Question], lengths: Lengths) -> None:
    """Raise UserError where the task cannot be trained on these questions."""
    room = lengths.query - 2 - answer_places(lengths)
    if room < 1:
        raise UserError(
            f"config.data.query_length: the task closed_book needs {1 - room} more, for an answer after the question"
        )
    if not questions:
        raise UserError("the task closed_book needs training questions; prepare some, or set config.tasks")
    check_strings(questions)


def closed_book_examples(
    store: PassageStore, questions: Sequence[Question], wordpiece: Tokenizer, lengths: Lengths
) -> Examples:
    """Half masked sentences of the pre-training text, half training questions; all beside the empty document."""
    check_closed_book(questions, lengths)
    sentences = salient_sentences(store, lengths.query)
    if not len(sentences.rows):
        raise UserError("the task closed_book needs pre-training text with salient spans; there are none")
    empty = document_arrays(np.zeros(0, np.uint16), np.zeros(0, np.uint16), lengths.document, wordpiece)

    def make(index: int, rng: np.random.Generator) -> Example:
        if rng.random() < 0.5:
            sentence, spans = spans_of(store, int(sentences.rows[index]), int(sentences.numbers[index]))
            return masked_arrays(sentence, spans, "salient", rng, lengths, wordpiece) | empty
        question = questions[int(rng.integers(len(questions)))]
        return _question_example(question, wordpiece, lengths) | empty

    return Examples(len(sentences.rows), make)


def _question_example(question: Question, wordpiece: Tokenizer, lengths: Lengths) -> Example:
    places = answer_places(lengths)
    answer = [*wordpiece.encode(question.answers[0]).ids[:places], *[wordpiece.sep_id] * places][:places]
    targets = np.zeros(lengths.predictions, np.int32)
    weights = np.zeros(lengths.predictions, np.float32)
    targets[:places], weights[:places] = answer, 1.0
    return closed_book_query(question.question, wordpiece, lengths) | {"targets": targets, "weights": weights}
