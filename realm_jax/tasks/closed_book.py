"""A reader without passages, the baseline for retrieval: `[CLS] question [MASK] … [MASK] [SEP]`, answers as masked
words.

The places of an answer are as many as a span may have; those after the answer are to be filled with [SEP]. An answer is
the likeliest tokens in those places, up to [SEP].
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.config import Config
from realm_jax.data.examples import (
    Example,
    Examples,
    Lengths,
    document_arrays,
    masked_arrays,
    query_arrays,
    salient_sentences,
    spans_of,
)  # fmt: skip
from realm_jax.data.questions import Question, answered
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.errors import UserError
from realm_jax.eval.answer_matching import exact_match
from realm_jax.eval.prediction import Evaluator
from realm_jax.forward import Index, batch_candidates, masked_inputs
from realm_jax.mesh import to_host
from realm_jax.models.layers import Params
from realm_jax.models.networks import Realm
from realm_jax.run import Run, put_batch
from realm_jax.tasks.base import Measure, Short, dev_questions
from realm_jax.tasks.mlm import Mlm
from realm_jax.tasks.qa_examples import check_string_answers


class ClosedBook(Mlm):
    """The loss of the warm-up over other examples."""

    name = "closed_book"
    stream = 7
    title = "Without passages"
    short = Short(40)
    learns_to_answer = True
    reads_passages = False
    selects_by = "exact_match"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.question_search = "vectors"

    @classmethod
    def supervision(cls, config: Config) -> str:
        return "Questions with answer strings, and names and dates hidden in a sentence; no passages."

    def check_data(self) -> None:
        check_closed_book(self.run.sources.answered("train"), self.run.lengths)

    def needs_vectors(self, search: str = "") -> bool:
        return False

    @cached_property
    def fixed_examples(self) -> Examples:
        sources = self.run.sources
        return closed_book_examples(sources.pretraining, sources.answered("train"), sources.tokenizer, self.run.lengths)

    def measure(self) -> Measure | None:
        """Exact match of answers without passages; None if no development question has answers."""
        questions = answered(dev_questions(self.run))
        if not questions:
            return None

        def measure(params: Params, index: Index | None, final: bool) -> dict[str, Any]:
            answers = [answer.text for batch in predict_closed_book(self.run, questions, params) for answer in batch]
            right = [exact_match(a, q.answers, q.is_regex) for a, q in zip(answers, questions, strict=True)]
            return {"exact_match": sum(right) / len(right)}

        return measure


# --- examples ---------------------------------------------------------------------------------------------------------


def answer_positions(lengths: Lengths) -> int:
    """Masked places after a question: `span_width`, at most `predictions`."""
    return min(lengths.span_width, lengths.predictions)


def closed_book_query(question: str, tokenizer: Tokenizer, lengths: Lengths) -> Example:
    """A question, cut where it would leave no room, followed by the masked places, and their positions."""
    places = answer_positions(lengths)
    ids = tokenizer.encode(question).ids[: lengths.query - 2 - places]
    positions = np.zeros(lengths.predictions, np.int32)
    positions[:places] = 1 + len(ids) + np.arange(places)
    query = query_arrays(np.array([*ids, *[tokenizer.mask_id] * places], np.int32), lengths.query, tokenizer)
    return query | {"positions": positions}


def closed_book_answer(pieces: NDArray, tokenizer: Tokenizer, lengths: Lengths) -> str:
    """The answer that pieces predicted at `positions` spell: those in the places, up to the first [SEP]."""
    guesses = pieces[: answer_positions(lengths)]
    ends = np.flatnonzero(guesses == tokenizer.sep_id)
    return tokenizer.decode(guesses[: ends[0]] if len(ends) else guesses)


def check_closed_book(questions: Sequence[Question], lengths: Lengths) -> None:
    """Raise UserError if the task cannot be trained on these questions."""
    room = lengths.query - 2 - answer_positions(lengths)
    if room < 1:
        raise UserError(
            f"config.data.query_length: the task closed_book needs {1 - room} more, for an answer after the question"
        )
    if not questions:
        raise UserError("the task closed_book needs training questions; prepare some, or set config.tasks")
    check_string_answers(questions)


def closed_book_examples(
    store: PassageStore, questions: Sequence[Question], tokenizer: Tokenizer, lengths: Lengths
) -> Examples:
    """Half masked sentences of the pre-training text, half training questions; all with the empty document."""
    check_closed_book(questions, lengths)
    sentences = salient_sentences(store, lengths.query)
    if not len(sentences.rows):
        raise UserError("the task closed_book needs pre-training text with salient spans; there are none")
    empty = empty_document(tokenizer, lengths)

    def make(index: int, rng: np.random.Generator) -> Example:
        if rng.random() < 0.5:
            sentence, spans = spans_of(store, int(sentences.rows[index]), int(sentences.numbers[index]))
            return masked_arrays(sentence, spans, "salient", rng, lengths, tokenizer) | empty
        question = questions[int(rng.integers(len(questions)))]
        return _question_example(question, tokenizer, lengths) | empty

    return Examples(len(sentences.rows), make)


def _question_example(question: Question, tokenizer: Tokenizer, lengths: Lengths) -> Example:
    places = answer_positions(lengths)
    answer = [*tokenizer.encode(question.answers[0]).ids[:places], *[tokenizer.sep_id] * places][:places]
    targets = np.zeros(lengths.predictions, np.int32)
    weights = np.zeros(lengths.predictions, np.float32)
    targets[:places], weights[:places] = answer, 1.0
    return closed_book_query(question.question, tokenizer, lengths) | {"targets": targets, "weights": weights}


def empty_document(tokenizer: Tokenizer, lengths: Lengths) -> Example:
    """The arrays of the passage that is read where there is none."""
    nothing = np.zeros(0, tokenizer.dtype)
    return document_arrays(nothing, nothing, lengths.document, tokenizer)


# --- answers ----------------------------------------------------------------------------------------------------------


class ClosedBookAnswer(NamedTuple):
    """An answer predicted without passages. probability: of its pieces and of the end, each on its own."""

    text: str
    probability: float


def predict_closed_book(run: Run, questions: Sequence[Question], params: Params) -> Iterator[list[ClosedBookAnswer]]:
    """The answers to all questions, a batch at a time, as `Evaluator` has them."""
    tokenizer, lengths = run.sources.tokenizer, run.lengths
    empty = empty_document(tokenizer, lengths)
    size = Evaluator(run, questions).batch_size
    for start in range(0, len(questions), size):
        asked = questions[start : start + size]
        rows = [closed_book_query(question.question, tokenizer, lengths) | empty for question in asked]
        rows += [rows[0]] * (size - len(rows))
        batch = put_batch(run.mesh, {key: np.stack([row[key] for row in rows]) for key in rows[0]})
        pieces, chances = map(to_host, _predict_tokens(run.model, params, batch))
        places = answer_positions(lengths)
        ends = [np.append(np.flatnonzero(row[:places] == tokenizer.sep_id), places)[0] for row in pieces]
        yield [
            ClosedBookAnswer(
                closed_book_answer(row, tokenizer, lengths), float(np.exp(log_p[: min(end + 1, places)].sum()))
            )
            for row, log_p, end in zip(pieces[: len(asked)], chances, ends, strict=False)
        ]


@partial(jax.jit, static_argnums=0)
def _predict_tokens(model: Realm, params: Params, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The likeliest piece of every predicted position and its log probability, [batch, predictions] both."""
    joint, positions = masked_inputs(batch, batch_candidates(batch))
    log_p = jax.nn.log_softmax(model.reader.read_words(params, joint, positions))
    return log_p.argmax(axis=-1), log_p.max(axis=-1)
