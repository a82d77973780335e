"""Answers without passages: the likeliest word pieces in the places of an answer after the question, up to [SEP]."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from realm_jax.corpus.jsonl import Question
from realm_jax.data.closed_book import answer_places, closed_book_answer, closed_book_query
from realm_jax.data.examples import document_arrays
from realm_jax.evaluation.predict import Evaluator
from realm_jax.mesh import to_host
from realm_jax.models.inputs import Documents, join
from realm_jax.models.realm import Params, Realm, flatten_joint
from realm_jax.run import Run, put_batch


class Recalled(NamedTuple):
    """An answer that was not read anywhere; probability: of its pieces and of the end, each on its own."""

    text: str
    probability: float


def recall_answers(run: Run, questions: Sequence[Question], params: Params) -> Iterator[list[Recalled]]:
    """The answers to all questions, a batch at a time, as `Evaluator` has them."""
    wordpiece, lengths, nothing = run.sources.wordpiece, run.lengths, np.zeros(0, np.uint16)
    empty = document_arrays(nothing, nothing, lengths.document, wordpiece)
    size = Evaluator(run, questions).batch_size
    for start in range(0, len(questions), size):
        asked = questions[start : start + size]
        rows = [closed_book_query(question.question, wordpiece, lengths) | empty for question in asked]
        rows += [rows[0]] * (size - len(rows))
        batch = put_batch(run.mesh, {key: np.stack([row[key] for row in rows]) for key in rows[0]})
        pieces, chances = map(to_host, _guess(run.model, params, batch))
        places = answer_places(lengths)
        ends = [np.append(np.flatnonzero(row[:places] == wordpiece.sep_id), places)[0] for row in pieces]
        yield [
            Recalled(closed_book_answer(row, wordpiece, lengths), float(np.exp(log_p[: min(end + 1, places)].sum())))
            for row, log_p, end in zip(pieces[: len(asked)], chances, ends, strict=False)
        ]


@partial(jax.jit, static_argnums=0)
def _guess(model: Realm, params: Params, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The likeliest piece of every predicted position and its log probability, [batch, predictions] both."""
    documents = Documents(*(batch[f"document{part}"][:, None] for part in ("", "_length", "_title_length")))
    joint = flatten_joint(join(batch["query"], batch["query_length"], documents))
    log_p = jax.nn.log_softmax(model.read_words(params, joint, batch["positions"]))
    return log_p.argmax(axis=-1), log_p.max(axis=-1)
