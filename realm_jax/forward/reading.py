"""What reading masked sentences and reading questions share: spans to point at, and what packing has no place for.

What is read stands in `masked.py` and `question.py`. Read next: `models/realm.py`, the reader.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from realm_jax.forward.context import StepContext
from realm_jax.models.inputs import ReaderInput, answer_spans
from realm_jax.models.likelihood import Mean
from realm_jax.models.realm import Params, flatten_passages

Array = jax.Array


class SpanReading(NamedTuple):
    """The spans of passages that are read with a text. Arrays but `joint`: [batch, k, length, span_width]; allowed:
    which may be pointed at; correct: which are an answer."""

    joint: ReaderInput
    scores: Array
    allowed: Array
    correct: Array


def read_spans(
    context: StepContext, params: Params, joint: ReaderInput, answers: tuple[Array, Array], key: Array | None
) -> SpanReading:
    """Read joint arrays [batch, k, length] to point at answers: pieces [batch, a, m] and their numbers [batch, a].

    No span may be pointed at in what packing had no place for.
    """
    places, reader = context.places(len(joint.ids)).joints, context.model.reader
    lengths = reader.bert.placed_lengths(joint.lengths, places, joint.ids.shape[-1])
    allowed, correct = answer_spans(joint._replace(lengths=lengths), *answers, reader.span_width)
    return SpanReading(joint, score_spans(context, params, joint, key, places), allowed, correct)


def score_spans(context: StepContext, params: Params, joint: ReaderInput, key: Array | None, places: int = 0) -> Array:
    """Span scores of joint arrays [batch, k, length] → [batch, k, length, span_width] float32. places: as of
    `PackedPlaces`."""
    spans = context.model.reader.read_spans(params, flatten_passages(joint), key, places)
    return spans.reshape(*joint.ids.shape, context.model.reader.span_width)


def unplaced_pieces(context: StepContext, packed: list[tuple[Array, int]], longest: int) -> Mean:
    """The share of the pieces of sequences for which packing has no place. packed: lengths [batch, …] of sequences, and
    the places of a part; 0 where they are padded. longest: no sequence is longer."""
    lost, total = jnp.float32(0), jnp.float32(0)
    for lengths, places in packed:
        lost += (lengths - context.model.bert.placed_lengths(lengths, places, longest)).sum()
        total += lengths.sum()
    return Mean(lost, total)
