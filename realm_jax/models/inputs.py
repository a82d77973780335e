"""The layouts on the device: masks, segments, the joint of a query and a passage, and token matching.

The corpus lives on the device once, as document rows `[CLS] title [SEP] body [SEP]` (`lengths` and `title_lengths` say
where the parts end). Everything else that a step needs of a passage is derived from such rows here, inside the step.
The joint layout is `[CLS] query [SEP] body [SEP]`, without the title, as in the reference; fine-tuning can have it too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from realm_jax.models.prompts import Template

Array = jax.Array
DOCUMENT_SPECIALS = 2  # the [CLS] before and the [SEP] after the title, which the joint layout leaves out


class Documents(NamedTuple):
    """Document rows: ids [..., length] int, lengths [...] (with specials), title_lengths [...] (without)."""

    ids: Array
    lengths: Array
    title_lengths: Array


class ReaderInput(NamedTuple):
    """Queries joined with passages.

    ids, segments [..., joint length] int32; mask [..., joint length] bool, false on padding; body_start [...] int32:
    index of the body's first piece; lengths [...] int32: places in use, specials counted.
    """

    ids: Array
    segments: Array
    mask: Array
    body_start: Array
    lengths: Array


def flatten_passages(joint: ReaderInput) -> ReaderInput:
    """Flatten arrays [batch, k, …] to [batch · k, …]."""
    return ReaderInput(*(x.reshape(-1, *x.shape[2:]) for x in joint))


def token_mask(lengths: Array, length: int) -> Array:
    """True on the first `lengths` of `length` positions. [...] → [..., length] bool."""
    return jnp.arange(length) < lengths[..., None]


def document_segments(documents: Documents) -> Array:
    """0 through the first [SEP], then 1, and 0 on padding."""
    place = jnp.arange(documents.ids.shape[-1])
    after_title = place >= (documents.title_lengths + DOCUMENT_SPECIALS)[..., None]
    return (after_title & (place < documents.lengths[..., None])).astype(jnp.int32)


class EncoderInput(NamedTuple):
    """What a tower reads: ids, segments [batch, length] int32; mask [batch, length] bool, false on padding."""

    ids: Array
    segments: Array
    mask: Array


def document_sequences(documents: Documents, template: Template | None = None) -> EncoderInput:
    """Document rows as a tower reads them: as they are, in two segments, or as one text that a template makes.

    The one text is `[CLS] before title between body [SEP]`, all in segment 0; a template without a title leaves titles
    out. ids [batch, d] → [batch, d], with a template [batch, d − 1 + its pieces].
    """
    ids = documents.ids.astype(jnp.int32)
    if template is None:
        return EncoderInput(ids, document_segments(documents), token_mask(documents.lengths, ids.shape[-1]))
    front, gap = len(template.before), len(template.between)
    titles = documents.title_lengths.astype(jnp.int32)[:, None]
    shown = titles if template.titled else jnp.zeros_like(titles)
    place = jnp.arange(ids.shape[-1] - 1 + front + gap)[None]
    body = 1 + front + shown + gap  # where bodies begin, [batch, 1]; in the row at titles + 2
    source = jnp.where(place < body, place - front, place - body + titles + DOCUMENT_SPECIALS)
    laid = jnp.take_along_axis(ids, jnp.clip(source, 0, ids.shape[-1] - 1), axis=-1)
    laid = _insert(laid, place, jnp.ones_like(titles), template.before)
    laid = _insert(laid, place, body - gap, template.between)
    laid = jnp.where(place == 0, ids[:, :1], laid)
    lengths = documents.lengths.astype(jnp.int32) - 1 + (shown - titles)[:, 0] + front + gap
    mask = token_mask(lengths, place.shape[-1])
    return EncoderInput(jnp.where(mask, laid, 0), jnp.zeros_like(laid), mask)


def query_sequences(query: Array, lengths: Array, template: Template | None = None) -> EncoderInput:
    """Queries `[CLS] text [SEP]` as a tower reads them, with a template's pieces before the text.

    query [batch, q] int, lengths [batch] → [batch, q + its pieces], all in segment 0.
    """
    ids = query.astype(jnp.int32)
    if template is not None and template.before:
        before = jnp.broadcast_to(jnp.array(template.before, jnp.int32), (ids.shape[0], len(template.before)))
        ids = jnp.concatenate([ids[:, :1], before, ids[:, 1:]], axis=-1)
        lengths = lengths + len(template.before)
    return EncoderInput(ids, jnp.zeros_like(ids), token_mask(lengths, ids.shape[1]))


def _insert(ids: Array, place: Array, start: Array, pieces: tuple[int, ...]) -> Array:
    """Literal pieces from column `start` [batch, 1] on, over what stands there."""
    for offset, piece in enumerate(pieces):
        ids = jnp.where(place == start + offset, piece, ids)
    return ids


def null_documents(batch: int, special: tuple[int, int]) -> Documents:
    """The empty document `[CLS] [SEP] [SEP]`, `batch` times. special: ids of [CLS] and [SEP]."""
    cls, sep = special
    row = jnp.array([cls, sep, sep], jnp.int32)
    return Documents(jnp.tile(row, (batch, 1)), jnp.full(batch, 3, jnp.int32), jnp.zeros(batch, jnp.int32))


def reader_inputs(query: Array, query_lengths: Array, documents: Documents, titles: bool = False) -> ReaderInput:
    """`[CLS] query [SEP] body [SEP]` for each of an example's passages; with `titles`, `title [SEP]` before the body.

    query [batch, q] int; query_lengths [batch]; documents.ids [batch, k, d] → arrays [batch, k, q + d − 2], with titles
    [batch, k, q + d − 1]. Nothing is cut: the joint is as long as both can be together.
    """
    width = documents.ids.shape[-1]
    body_offset = (documents.title_lengths + DOCUMENT_SPECIALS).astype(jnp.int32)
    offset = jnp.ones_like(body_offset) if titles else body_offset  # where in a row begins what is joined
    place = jnp.arange(query.shape[1] + width - (1 if titles else DOCUMENT_SPECIALS))
    in_body = place - query_lengths[:, None]  # [batch, joint]: index behind the query, negative inside it
    body_place = jnp.clip(in_body[:, None] + offset[..., None], 0, width - 1)
    body = jnp.take_along_axis(documents.ids.astype(jnp.int32), body_place, axis=-1)
    front = jnp.pad(query.astype(jnp.int32), ((0, 0), (0, place.size - query.shape[1])))
    lengths = query_lengths[:, None] + documents.lengths.astype(jnp.int32) - offset
    mask = place < lengths[..., None]
    is_body = (in_body >= 0)[:, None] & mask
    ids = jnp.where(is_body, body, jnp.where(mask, front[:, None], 0))
    start = query_lengths[:, None] + body_offset - offset
    return ReaderInput(ids, is_body.astype(jnp.int32), mask, start, lengths)


def shift_left(x: Array, by: int) -> Array:
    """x[..., i + by] at i, −1 past the end."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, by),), constant_values=-1)[..., by:] if by else x


def contains_phrase(documents: Array, phrase: Array, phrase_lengths: Array) -> Array:
    """Whether a run of pieces occurs in each passage.

    documents [batch, k, d] int, phrase [batch, p] int, phrase_lengths [batch]; → [batch, k] bool.
    An empty phrase occurs nowhere.
    """
    documents = documents.astype(jnp.int32)

    def check(offset: Array, match: Array) -> Array:
        shifted = jnp.roll(padded, -offset, axis=-1)[..., : match.shape[-1]]
        wanted = jax.lax.dynamic_index_in_dim(phrase, offset, axis=1, keepdims=True)[:, None]
        return match & ((shifted == wanted) | (offset >= phrase_lengths)[:, None, None])

    padded = jnp.pad(documents, ((0, 0), (0, 0), (0, phrase.shape[1])), constant_values=-1)
    match = jax.lax.fori_loop(0, phrase.shape[1], check, jnp.ones(documents.shape, bool))
    return match.any(axis=-1) & (phrase_lengths > 0)[:, None]


def has_answer_span(documents: Documents, answers: Array, answer_lengths: Array, span_width: int) -> Array:
    """Whether a passage's body has an answer that a span can be: the passages with a correct span in `answer_spans`.

    documents.ids [batch, k, d]; answers [batch, a, w] int, answer_lengths [batch, a] as there → [batch, k] bool.
    """
    ids, width = documents.ids.astype(jnp.int32), min(answers.shape[2], span_width)
    place = jnp.arange(ids.shape[-1])
    match = place >= (documents.title_lengths + DOCUMENT_SPECIALS)[..., None]  # where a body's pieces begin
    match = match[:, :, None] & (place + answer_lengths[:, None, :, None] < documents.lengths[..., None, None])
    match &= ((answer_lengths > 0) & (answer_lengths <= width))[:, None, :, None]
    for offset in range(width):
        wanted = answers[:, None, :, offset, None]
        match &= (shift_left(ids, offset)[:, :, None] == wanted) | (offset >= answer_lengths)[:, None, :, None]
    return match.any(axis=(2, 3))


def answer_spans(joint: ReaderInput, answers: Array, answer_lengths: Array, span_width: int) -> tuple[Array, Array]:
    """The spans that may be answers, and those that are.

    answers [batch, a, w] int and answer_lengths [batch, a] (0: no answer; longer than span_width never matches).
    Returns (allowed, correct), both [batch, k, joint length, span_width] bool: entry [.., i, w] is the span of pieces
    i … i + w. Allowed spans lie in the body, before its final [SEP].
    """
    place = jnp.arange(joint.ids.shape[-1])
    body_end = joint.lengths - 1
    starts = place >= joint.body_start[..., None]
    allowed = jnp.stack([starts & (place + width < body_end[..., None]) for width in range(span_width)], axis=-1)
    match = jnp.ones((*joint.ids.shape, answers.shape[1]), bool)
    for offset in range(min(answers.shape[2], span_width)):
        wanted = answers[:, None, None, :, offset]
        beyond = (offset >= answer_lengths)[:, None, None, :]
        match &= (shift_left(joint.ids, offset)[..., None] == wanted) | beyond
    found = [(match & (answer_lengths == width + 1)[:, None, None, :]).any(axis=-1) for width in range(span_width)]
    return allowed, jnp.stack(found, axis=-1) & allowed
