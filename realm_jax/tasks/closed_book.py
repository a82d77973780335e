"""A reader without passages, the baseline for retrieval: it fills `[CLS] question [MASK] … [MASK] [SEP]`.

There are as many [MASK] as a span may have tokens; the targets after the answer are [SEP]. The predicted answer has the
most probable token of each position, up to [SEP].
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

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
from realm_jax.data.questions import Question
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.errors import UserError
from realm_jax.eval.prediction import Evaluator
from realm_jax.forward import batch_candidates, masked_inputs
from realm_jax.mesh import to_host
from realm_jax.models.layers import Params
from realm_jax.models.networks import Realm
from realm_jax.run import Run, put_batch
from realm_jax.tasks.mlm import Mlm
from realm_jax.tasks.qa_examples import check_string_answers


class ClosedBook(Mlm):
    """Train the reader by the loss of `mlm`, on questions and masked sentences."""

    name = "closed_book"
    stream = 7

    @cached_property
    def fixed_examples(self) -> Examples:
        sources = self.run.sources
        return closed_book_examples(sources.pretraining, sources.answered("train"), sources.tokenizer, self.run.lengths)


# --- Examples ---------------------------------------------------------------------------------------------------------


def answer_length(lengths: Lengths) -> int:
    """Return the masked positions after a question: `span_width`, at most `predictions`."""
    return min(lengths.span_width, lengths.predictions)


def closed_book_query(question: str, tokenizer: Tokenizer, lengths: Lengths) -> Example:
    """Return a question, truncated so that the masked positions after it fit, and these positions.

    Args:
        question: the question.
        tokenizer: the run's.
        lengths: sizes of the arrays.

    Returns:
        The arrays of `query_arrays`, and `positions` int32 [predictions].
    """
    masked = answer_length(lengths)
    ids = tokenizer.encode(question).ids[: lengths.query - 2 - masked]
    positions = np.zeros(lengths.predictions, np.int32)
    positions[:masked] = 1 + len(ids) + np.arange(masked)
    query = query_arrays(np.array([*ids, *[tokenizer.mask_id] * masked], np.int32), lengths.query, tokenizer)
    return query | {"positions": positions}


def closed_book_answer(predicted_ids: NDArray, tokenizer: Tokenizer, lengths: Lengths) -> str:
    """Return the text of the predicted tokens, up to the first [SEP].

    Args:
        predicted_ids: tokens predicted at `positions`, int [predictions].
        tokenizer: the run's.
        lengths: sizes of the arrays.
    """
    answer_ids = predicted_ids[: answer_length(lengths)]
    ends = np.flatnonzero(answer_ids == tokenizer.sep_id)
    return tokenizer.decode(answer_ids[: ends[0]] if len(ends) else answer_ids)


def check_closed_book(questions: Sequence[Question], lengths: Lengths) -> None:
    """Check that the task can be trained.

    Args:
        questions: training questions with answers.
        lengths: sizes of the arrays.

    Raises:
        UserError: there are no questions, too little room for an answer, or answers are regular expressions.
    """
    room = lengths.query - 2 - answer_length(lengths)
    if room < 1:
        raise UserError(
            f"config.data.query_length: the task closed_book needs {1 - room} more, for an answer after the question; "
            "increase it"
        )
    if not questions:
        raise UserError("the task closed_book needs training questions; prepare some, or set config.tasks")
    check_string_answers(questions)


def closed_book_examples(
    store: PassageStore, questions: Sequence[Question], tokenizer: Tokenizer, lengths: Lengths
) -> Examples:
    """Return examples: half masked sentences of the pre-training text, half questions, all with the null document.

    Args:
        store: the pre-training text.
        questions: training questions with answers.
        tokenizer: the run's.
        lengths: sizes of the arrays.

    Raises:
        UserError: there are no questions, no sentences with a salient span, or too little room for an answer.
    """
    check_closed_book(questions, lengths)
    sentences = salient_sentences(store, lengths.query)
    if not len(sentences.rows):
        raise UserError("the task closed_book needs pre-training text with salient spans; leave it out of config.tasks")
    empty = empty_document(tokenizer, lengths)

    def make(index: int, rng: np.random.Generator) -> Example:
        if rng.random() < 0.5:
            sentence, spans = spans_of(store, int(sentences.rows[index]), int(sentences.numbers[index]))
            return masked_arrays(sentence, spans, "salient", rng, lengths, tokenizer) | empty
        question, masked = questions[int(rng.integers(len(questions)))], answer_length(lengths)
        answer = [*tokenizer.encode(question.answers[0]).ids[:masked], *[tokenizer.sep_id] * masked][:masked]
        targets = np.zeros(lengths.predictions, np.int32)
        weights = np.zeros(lengths.predictions, np.float32)
        targets[:masked], weights[:masked] = answer, 1.0
        query = closed_book_query(question.question, tokenizer, lengths)
        return query | {"targets": targets, "weights": weights} | empty

    return Examples(len(sentences.rows), make)


def empty_document(tokenizer: Tokenizer, lengths: Lengths) -> Example:
    """Return the arrays of the null document.

    Args:
        tokenizer: the run's.
        lengths: sizes of the arrays.
    """
    no_tokens = np.zeros(0, tokenizer.dtype)
    return document_arrays(no_tokens, no_tokens, lengths.document, tokenizer)


# --- Answers ----------------------------------------------------------------------------------------------------------


class ClosedBookAnswer(NamedTuple):
    """An answer predicted without passages.

    Attributes:
        text: the answer.
        probability: product of the probabilities of its tokens and of the end.
    """

    text: str
    probability: float


def predict_closed_book(run: Run, questions: Sequence[Question], params: Params) -> Iterator[list[ClosedBookAnswer]]:
    """Answer questions, as many at a time as `Evaluator` does.

    Args:
        run: the run.
        questions: the questions.
        params: all parameters.

    Yields:
        The answers to a batch of questions.
    """
    tokenizer, lengths = run.sources.tokenizer, run.lengths
    empty = empty_document(tokenizer, lengths)
    size, masked = Evaluator(run, questions).batch_size, answer_length(lengths)
    for start in range(0, len(questions), size):
        part = questions[start : start + size]
        rows = [closed_book_query(question.question, tokenizer, lengths) | empty for question in part]
        rows += [rows[0]] * (size - len(rows))
        batch = put_batch(run.mesh, {key: np.stack([row[key] for row in rows]) for key in rows[0]})
        predicted_ids, log_p = map(to_host, _predict_tokens(run.model, params, batch))  # [size, predictions] both
        answers = []
        for ids, token_log_p in zip(predicted_ids[: len(part)], log_p, strict=False):
            end = np.append(np.flatnonzero(ids[:masked] == tokenizer.sep_id), masked)[0]
            probability = float(np.exp(token_log_p[: min(end + 1, masked)].sum()))
            answers.append(ClosedBookAnswer(closed_book_answer(ids, tokenizer, lengths), probability))
        yield answers


@partial(jax.jit, static_argnums=0)
def _predict_tokens(model: Realm, params: Params, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Return the most probable token of each predicted position and its log probability, [batch, predictions] both."""
    joint, positions = masked_inputs(batch, batch_candidates(batch))
    log_p = jax.nn.log_softmax(model.reader.read_words(params, joint, positions))
    return log_p.argmax(axis=-1), log_p.max(axis=-1)
