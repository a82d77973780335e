"""The three token layouts that the models read, for one example each.

    query     [CLS] query [SEP]               segments 0
    document  [CLS] title [SEP] body [SEP]    segments 0 through the first [SEP], then 1
    joint     [CLS] query [SEP] body [SEP]    the same; fine-tuning can have `title [SEP]` before the body

Special tokens are always kept; an earlier sequence takes the room first, a later one gets what is left. Padding stands
on the right, with segment 0. Pure functions on NumPy arrays; the step that trains builds the same joint layout on the
device, and these are what it is tested against. Next to read: `tokenizer.py`, where the ids come from.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class SpecialTokens(NamedTuple):
    """Ids of the tokens that make up a layout; `WordPiece.special` gives those of a vocabulary."""

    pad: int
    cls: int
    sep: int
    mask: int


class Layout(NamedTuple):
    """One example laid out: `ids` and `segments` are int32 `[length]`; the first `used` places are not padding."""

    ids: NDArray[np.int32]
    segments: NDArray[np.int32]
    used: int


def query(ids: ArrayLike, length: int, special: SpecialTokens) -> Layout:
    """Lay out `[CLS] query [SEP]`; the query keeps its first `length - 2` pieces."""
    return _join_sequences([ids], length, special)


def document(title: ArrayLike, body: ArrayLike, length: int, special: SpecialTokens) -> Layout:
    """Lay out `[CLS] title [SEP] body [SEP]`; title and body share `length - 3` pieces, the title first.

    An empty title and body give the null document, `[CLS] [SEP] [SEP]`.
    """
    return _join_sequences([title, body], length, special)


def joint(
    query_ids: ArrayLike,
    body: ArrayLike,
    length: int,
    special: SpecialTokens,
    max_query: int | None = None,
    title: ArrayLike | None = None,
) -> Layout:
    """Lay out `[CLS] query [SEP] body [SEP]` for the reader.

    Args:
        query_ids: pieces of the query without special tokens `[m]`.
        body: pieces of the passage without title and special tokens `[n]`.
        length: places of the layout.
        special: ids of the special tokens.
        max_query: pieces that the query keeps at most, so that it is the same query that the embedder saw (its length
            less 2); without it the query may take all the room and leave none to the body.
        title: pieces that stand before the body, with a [SEP] of their own; None: the layout has no title.
    """
    titles = [] if title is None else [title]
    return _join_sequences([np.asarray(query_ids)[:max_query], *titles, body], length, special)


def _join_sequences(sequences: list[ArrayLike], length: int, special: SpecialTokens) -> Layout:
    room = length - 1 - len(sequences)
    ids = np.full(length, special.pad, np.int32)
    segments = np.zeros(length, np.int32)
    ids[0] = special.cls
    used = 1
    for number, sequence in enumerate(sequences):
        kept = np.asarray(sequence, np.int32)[:room]
        room -= len(kept)
        end = used + len(kept)
        ids[used:end] = kept
        ids[end] = special.sep
        segments[used : end + 1] = min(number, 1)
        used = end + 1
    return Layout(ids, segments, used)
