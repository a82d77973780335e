"""The three token layouts that the models read, for one example each.

    query     [CLS] query [SEP]               segments 0
    document  [CLS] title [SEP] body [SEP]    segments 0 through the first [SEP], then 1
    joint     [CLS] query [SEP] body [SEP]    the same; fine-tuning can have `title [SEP]` before the body

Special tokens always stay; if the sequences do not fit, the last one is truncated first. Padding is on the right, with
segment 0. These are pure functions of NumPy arrays. The train step builds the same joint layout on the device, and
tests compare the two. Read next: `tokenizer.py`, which makes the ids.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class SpecialTokens(NamedTuple):
    """Ids of the special tokens of a layout; `WordPiece.special` gives those of a vocabulary.

    Attributes:
        pad: [PAD], which fills a layout to its length.
        cls: [CLS], the first token.
        sep: [SEP], behind each sequence.
        mask: [MASK], in place of a hidden token.
    """

    pad: int
    cls: int
    sep: int
    mask: int


class Layout(NamedTuple):
    """One example as the models read it.

    Attributes:
        ids: tokens, int32 [length].
        segments: 0 or 1 for each token, int32 [length].
        used: number of tokens before the padding.
    """

    ids: NDArray[np.int32]
    segments: NDArray[np.int32]
    used: int


def query(ids: ArrayLike, length: int, special: SpecialTokens) -> Layout:
    """Lay out `[CLS] query [SEP]`; the query keeps its first `length - 2` tokens.

    Args:
        ids: tokens of the query without special ones [n].
        length: tokens of the layout.
        special: ids of the special tokens.
    """
    return _join_sequences([ids], length, special)


def document(title: ArrayLike, body: ArrayLike, length: int, special: SpecialTokens) -> Layout:
    """Lay out `[CLS] title [SEP] body [SEP]`; title and body share `length - 3` tokens, the title first.

    An empty title and body give the null document, `[CLS] [SEP] [SEP]`.

    Args:
        title: tokens of the title [m].
        body: tokens of the body [n].
        length: tokens of the layout.
        special: ids of the special tokens.
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
        query_ids: tokens of the query without special ones [m].
        body: tokens of the passage without title and special ones [n].
        length: tokens of the layout.
        special: ids of the special tokens.
        max_query: most tokens of the query, so that it is the same query that the embedder saw (its length less 2);
            without it the query may leave no room for the body.
        title: tokens before the body, with a [SEP] of their own; None: the layout has no title.
    """
    titles = [] if title is None else [title]
    return _join_sequences([np.asarray(query_ids)[:max_query], *titles, body], length, special)


def _join_sequences(sequences: list[ArrayLike], length: int, special: SpecialTokens) -> Layout:
    max_tokens = length - 1 - len(sequences)  # of the remaining sequences, without [CLS] and [SEP]
    ids = np.full(length, special.pad, np.int32)  # [length]
    segments = np.zeros(length, np.int32)  # [length]
    ids[0] = special.cls
    used = 1
    for number, sequence in enumerate(sequences):
        sequence_ids = np.asarray(sequence, np.int32)[:max_tokens]  # [n]
        max_tokens -= len(sequence_ids)
        end = used + len(sequence_ids)
        ids[used:end] = sequence_ids
        ids[end] = special.sep
        segments[used : end + 1] = min(number, 1)
        used = end + 1
    return Layout(ids, segments, used)
