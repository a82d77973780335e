"""The layouts on the device: masks, segments, queries joined with passages, and token matching.

The corpus lives on the device once, as passage rows `[CLS] title [SEP] body [SEP]` (`lengths` and `title_lengths` say
where the parts end). Everything else that a step needs of a passage is derived from such rows here, inside the step.
The reader's input is `[CLS] query [SEP] body [SEP]`, without the title, as in the reference; fine-tuning can have it
too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from realm_jax.models.prompts import Template

Array = jax.Array
DOCUMENT_SPECIALS = 2  # the [CLS] before and the [SEP] after the title, which the reader's input leaves out


class PassageBatch(NamedTuple):
    """Passage rows.

    Attributes:
        ids: tokens, [..., length] int.
        lengths: tokens of each row, special tokens included, [...].
        title_lengths: tokens of each title, without special tokens, [...].
    """

    ids: Array
    lengths: Array
    title_lengths: Array


class EncoderInput(NamedTuple):
    """Input of an encoder.

    Attributes:
        ids: tokens, [batch, length] int32.
        segments: 0 or 1, [batch, length] int32.
        mask: false on padding, [batch, length] bool.
    """

    ids: Array
    segments: Array
    mask: Array


class ReaderInput(NamedTuple):
    """Queries joined with passages.

    Attributes:
        ids: tokens, [..., length] int32.
        segments: 0 for the query, 1 for the passage, [..., length] int32.
        mask: false on padding, [..., length] bool.
        body_start: index of the body's first token, [...] int32.
        lengths: tokens, special tokens included, [...] int32.
    """

    ids: Array
    segments: Array
    mask: Array
    body_start: Array
    lengths: Array


def token_mask(lengths: Array, length: int) -> Array:
    """Return True on the first positions of each sequence.

    Args:
        lengths: tokens of each sequence, [...] int.
        length: number of positions.

    Returns:
        [..., length] bool.
    """
    return jnp.arange(length) < lengths[..., None]


# --- Inputs of the encoders -------------------------------------------------------------------------------------------


def document_segments(passages: PassageBatch) -> Array:
    """Return 0 through the first [SEP], then 1, and 0 on padding: [..., length] int32."""
    position = jnp.arange(passages.ids.shape[-1])
    after_title = position >= (passages.title_lengths + DOCUMENT_SPECIALS)[..., None]
    return (after_title & (position < passages.lengths[..., None])).astype(jnp.int32)


def document_sequences(passages: PassageBatch, template: Template | None = None) -> EncoderInput:
    """Lay passages out for the passage encoder: as they are, in two segments, or as one text that a template makes.

    The one text is `[CLS] before title between body [SEP]`, all in segment 0; a template without a title leaves titles
    out.

    Args:
        passages: ids [batch, d].
        template: None for two segments.

    Returns:
        Arrays [batch, d], with a template [batch, d − 1 + its tokens].
    """
    ids = passages.ids.astype(jnp.int32)
    if template is None:
        return EncoderInput(ids, document_segments(passages), token_mask(passages.lengths, ids.shape[-1]))
    front, gap = len(template.before), len(template.between)
    title_lengths = passages.title_lengths.astype(jnp.int32)[:, None]  # [batch, 1]
    shown = title_lengths if template.titled else jnp.zeros_like(title_lengths)
    position = jnp.arange(ids.shape[-1] - 1 + front + gap)[None]  # [1, length]
    body = 1 + front + shown + gap  # index of each body's first token, [batch, 1]; in the row it is title length + 2
    source = jnp.where(position < body, position - front, position - body + title_lengths + DOCUMENT_SPECIALS)
    text = jnp.take_along_axis(ids, jnp.clip(source, 0, ids.shape[-1] - 1), axis=-1)  # [batch, length]
    text = _insert(text, position, jnp.ones_like(title_lengths), template.before)
    text = _insert(text, position, body - gap, template.between)
    text = jnp.where(position == 0, ids[:, :1], text)
    lengths = passages.lengths.astype(jnp.int32) - 1 + (shown - title_lengths)[:, 0] + front + gap  # [batch]
    mask = token_mask(lengths, position.shape[-1])
    return EncoderInput(jnp.where(mask, text, 0), jnp.zeros_like(text), mask)


def _insert(ids: Array, position: Array, start: Array, literal: tuple[int, ...]) -> Array:
    """Write the tokens of a literal over ids [batch, length], from column `start` [batch, 1] on."""
    for offset, token in enumerate(literal):
        ids = jnp.where(position == start + offset, token, ids)
    return ids


def query_sequences(query: Array, lengths: Array, template: Template | None = None) -> EncoderInput:
    """Lay queries `[CLS] text [SEP]` out for the query encoder, with a template before the text, all in segment 0.

    Args:
        query: [batch, q] int.
        lengths: lengths of the queries, [batch].
        template: None for none.

    Returns:
        Arrays [batch, q + the template's tokens].
    """
    ids = query.astype(jnp.int32)
    if template is not None and template.before:
        before = jnp.broadcast_to(jnp.array(template.before, jnp.int32), (ids.shape[0], len(template.before)))
        ids = jnp.concatenate([ids[:, :1], before, ids[:, 1:]], axis=-1)
        lengths = lengths + len(template.before)
    return EncoderInput(ids, jnp.zeros_like(ids), token_mask(lengths, ids.shape[1]))


def document_text_mask(passages: PassageBatch, texts: EncoderInput, template: Template | None = None) -> Array:
    """Return True on the tokens of passages, special tokens included, without those of a template.

    Args:
        passages: ids [batch, d].
        texts: the same passages laid out by `document_sequences`, arrays [batch, length].
        template: template with which they were laid out.

    Returns:
        [batch, length] bool.
    """
    if template is None:
        return texts.mask
    front, gap = len(template.before), len(template.between)
    shown = passages.title_lengths.astype(jnp.int32)[:, None] if template.titled else 0  # [batch, 1]
    body = 1 + front + shown + gap  # index of each body's first token
    position = jnp.arange(texts.ids.shape[-1])
    is_literal = ((position >= 1) & (position < 1 + front)) | ((position >= body - gap) & (position < body))
    return texts.mask & ~is_literal


def query_text_mask(texts: EncoderInput, template: Template | None = None) -> Array:
    """Return True on the tokens of queries, special tokens included, without those of a template.

    Args:
        texts: queries laid out by `query_sequences`, arrays [batch, length].
        template: template with which they were laid out.

    Returns:
        [batch, length] bool.
    """
    position = jnp.arange(texts.ids.shape[-1])
    front = 0 if template is None else len(template.before)
    return texts.mask & ~((position >= 1) & (position < 1 + front))


def null_passages(batch: int, special: tuple[int, int]) -> PassageBatch:
    """Return the null document `[CLS] [SEP] [SEP]` for each example.

    Args:
        batch: number of examples.
        special: ids of [CLS] and [SEP].

    Returns:
        ids [batch, 3] int32.
    """
    cls, sep = special
    row = jnp.array([cls, sep, sep], jnp.int32)
    return PassageBatch(jnp.tile(row, (batch, 1)), jnp.full(batch, 3, jnp.int32), jnp.zeros(batch, jnp.int32))


# --- Inputs of the reader ---------------------------------------------------------------------------------------------


def reader_inputs(query: Array, query_lengths: Array, passages: PassageBatch, titles: bool = False) -> ReaderInput:
    """Join a query with each of its passages: `[CLS] query [SEP] body [SEP]`, with `titles` `title [SEP]` before the
    body.

    Nothing is cut: the input is as long as both can be together.

    Args:
        query: [batch, q] int.
        query_lengths: [batch].
        passages: ids [batch, k, d].
        titles: read titles too.

    Returns:
        Arrays [batch, k, q + d − 2], with titles [batch, k, q + d − 1].
    """
    width = passages.ids.shape[-1]
    body_offset = (passages.title_lengths + DOCUMENT_SPECIALS).astype(jnp.int32)  # [batch, k]
    offset = jnp.ones_like(body_offset) if titles else body_offset  # index in the row of the first joined token
    position = jnp.arange(query.shape[1] + width - (1 if titles else DOCUMENT_SPECIALS))
    behind_query = position - query_lengths[:, None]  # [batch, length]: negative inside the query
    source = jnp.clip(behind_query[:, None] + offset[..., None], 0, width - 1)  # [batch, k, length]
    body = jnp.take_along_axis(passages.ids.astype(jnp.int32), source, axis=-1)
    front = jnp.pad(query.astype(jnp.int32), ((0, 0), (0, position.size - query.shape[1])))  # [batch, length]
    lengths = query_lengths[:, None] + passages.lengths.astype(jnp.int32) - offset  # [batch, k]
    mask = position < lengths[..., None]  # [batch, k, length]
    is_body = (behind_query >= 0)[:, None] & mask
    ids = jnp.where(is_body, body, jnp.where(mask, front[:, None], 0))
    start = query_lengths[:, None] + body_offset - offset  # [batch, k]
    return ReaderInput(ids, is_body.astype(jnp.int32), mask, start, lengths)


def flatten_passages(reader_input: ReaderInput) -> ReaderInput:
    """Flatten arrays [batch, k, …] to [batch · k, …]."""
    return ReaderInput(*(x.reshape(-1, *x.shape[2:]) for x in reader_input))


# --- Token matching ---------------------------------------------------------------------------------------------------


def contains_phrase(passages: Array, phrase: Array, phrase_lengths: Array) -> Array:
    """Return True for passages that contain a phrase; an empty phrase occurs nowhere.

    Args:
        passages: ids [batch, k, d] int.
        phrase: [batch, p] int.
        phrase_lengths: [batch].

    Returns:
        [batch, k] bool.
    """
    passages = passages.astype(jnp.int32)
    padded = jnp.pad(passages, ((0, 0), (0, 0), (0, phrase.shape[1])), constant_values=-1)

    def check(offset: Array, match: Array) -> Array:
        shifted = jnp.roll(padded, -offset, axis=-1)[..., : match.shape[-1]]
        token = jax.lax.dynamic_index_in_dim(phrase, offset, axis=1, keepdims=True)[:, None]  # [batch, 1, 1]
        return match & ((shifted == token) | (offset >= phrase_lengths)[:, None, None])

    match = jax.lax.fori_loop(0, phrase.shape[1], check, jnp.ones(passages.shape, bool))  # [batch, k, d]
    return match.any(axis=-1) & (phrase_lengths > 0)[:, None]


def has_answer_span(passages: PassageBatch, answers: Array, answer_lengths: Array, span_width: int) -> Array:
    """Return True for passages whose body has an answer that a span can be.

    These are the passages with a correct span in `answer_spans`.

    Args:
        passages: ids [batch, k, d].
        answers: [batch, a, w] int.
        answer_lengths: [batch, a], see `answer_spans`.
        span_width: longest span.

    Returns:
        [batch, k] bool.
    """
    ids, width = passages.ids.astype(jnp.int32), min(answers.shape[2], span_width)
    position = jnp.arange(ids.shape[-1])
    in_body = position >= (passages.title_lengths + DOCUMENT_SPECIALS)[..., None]  # [batch, k, d]
    fits = position + answer_lengths[:, None, :, None] < passages.lengths[..., None, None]  # [batch, k, a, d]
    match = in_body[:, :, None] & fits
    match &= ((answer_lengths > 0) & (answer_lengths <= width))[:, None, :, None]
    for offset in range(width):
        token = answers[:, None, :, offset, None]  # [batch, 1, a, 1]
        match &= (_shifted(ids, offset)[:, :, None] == token) | (offset >= answer_lengths)[:, None, :, None]
    return match.any(axis=(2, 3))


def answer_spans(
    reader_input: ReaderInput, answers: Array, answer_lengths: Array, span_width: int
) -> tuple[Array, Array]:
    """Return the spans that may be answers, and those that are.

    Args:
        reader_input: arrays [batch, k, length].
        answers: [batch, a, w] int.
        answer_lengths: [batch, a] (0: no answer; longer than span_width never matches).
        span_width: longest span.

    Returns:
        (allowed, correct), both [batch, k, length, span_width] bool: entry [.., i, w] is the span of tokens i … i + w.
        Allowed spans are in the body, before its final [SEP].
    """
    position = jnp.arange(reader_input.ids.shape[-1])
    body_end = reader_input.lengths - 1
    starts = position >= reader_input.body_start[..., None]  # [batch, k, length]
    allowed = jnp.stack([starts & (position + width < body_end[..., None]) for width in range(span_width)], axis=-1)
    match = jnp.ones((*reader_input.ids.shape, answers.shape[1]), bool)  # [batch, k, length, a]
    for offset in range(min(answers.shape[2], span_width)):
        token = answers[:, None, None, :, offset]  # [batch, 1, 1, a]
        is_beyond = (offset >= answer_lengths)[:, None, None, :]
        match &= (_shifted(reader_input.ids, offset)[..., None] == token) | is_beyond
    by_width = [(match & (answer_lengths == width + 1)[:, None, None, :]).any(axis=-1) for width in range(span_width)]
    return allowed, jnp.stack(by_width, axis=-1) & allowed


def _shifted(x: Array, by: int) -> Array:
    """Return x[..., i + by] at i, −1 past the end."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, by),), constant_values=-1)[..., by:] if by else x
