"""Sentences to passages: as many whole sentences as fit, in order, nothing lost and nothing twice.

The rule is ORQA's (Lee et al. 2019, preprocessing of Wikipedia): what counts against the limit is the layout
`[CLS] title [SEP] body [SEP]`. It differs in one place: there a sentence longer than the limit makes a passage that is
too long and is cut when it is read; here such a sentence is split first, so that no word becomes unreachable.
Next to read: `layouts.py`.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from realm_jax.data.tokenizer import Tokens

SPECIAL_TOKENS = 3
DEFAULT_LIMIT = 288  # ORQA's and REALM's block length


def max_title(limit: int = DEFAULT_LIMIT) -> int:
    """Pieces that a title may take: half the limit. The caller cuts the rest of the title's pieces away."""
    return limit // 2


def body_room(title_length: int, limit: int = DEFAULT_LIMIT) -> int:
    """Pieces left to the body beside a title of `title_length` pieces (cut to `max_title`) and three special tokens.

    Raises:
        ValueError: the limit leaves no room for a body.
    """
    left = limit - SPECIAL_TOKENS - min(title_length, max_title(limit))
    if left < 1:
        raise ValueError(f"a limit of {limit} pieces leaves no room for a body")
    return left


def pack(sentence_lengths: Sequence[int], title_length: int, limit: int = DEFAULT_LIMIT) -> list[tuple[int, int]]:
    """Cut a document's sentences into passages, greedily.

    Args:
        sentence_lengths: tokens of each sentence, without special tokens.
        title_length: tokens of the title. A title of more than `max_title(limit)` pieces is counted as that many:
            whoever stores it keeps its first `max_title(limit)` pieces.
        limit: most pieces of a passage, title and three special tokens included.

    Returns:
        Half-open ranges of sentences, in order, without gap or overlap. Only a sentence that alone is longer than
        `body_room(title_length, limit)` gives a passage over the limit; `split_long` prevents that.
    """
    most = body_room(title_length, limit)
    passages = []
    first, length = 0, 0
    for sentence, pieces in enumerate(sentence_lengths):
        if sentence > first and length + pieces > most:
            passages.append((first, sentence))
            first, length = sentence, 0
        length += pieces
    if first < len(sentence_lengths):
        passages.append((first, len(sentence_lengths)))
    return passages


def word_lengths(offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Count the pieces of each word of a sentence from the pieces' character offsets (`Encoding.offsets`).

    Pieces that touch are one word: "don't" is one of three pieces, "a b" are two of one.
    """
    lengths: list[int] = []
    last_end = -1
    for start, end in offsets:
        if start > last_end or not lengths:
            lengths.append(0)
        lengths[-1] += 1
        last_end = end
    return lengths


def sentence_parts(tokens: Tokens, sentences: Sequence[tuple[int, int]], room: int) -> list[list[tuple[int, int]]]:
    """Half-open ranges of the tokens of each sentence: one, none without tokens, or several of at most `room`.

    sentences: ranges of characters, as `sentences.split` gives them. A long sentence is cut as `split_long` does.
    """
    starts = np.searchsorted(tokens.starts, [start for start, _ in sentences]).tolist()
    parts = []
    for start, stop in pairwise([*starts, len(tokens.ids)]):
        if stop - start <= room:
            parts.append([(start, stop)] if stop > start else [])
        else:
            own = tokens.part(start, stop)
            words = word_lengths(list(zip(own.starts.tolist(), own.ends.tolist(), strict=True)))
            parts.append([(start + first, start + last) for first, last in split_long(words, room)])
    return parts


def split_long(word_lengths: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Split a sentence that is longer than a passage into parts of at most `room` pieces, between words where it can.

    Args:
        word_lengths: tokens of each word of the sentence.
        room: most pieces of a part (`body_room` gives it).

    Returns:
        Half-open ranges of the sentence's *pieces*, in order, without gap or overlap. A part ends between two words,
        save where one word alone is longer than `room`: that one is cut every `room` pieces.

    Raises:
        ValueError: `room` is below 1.
    """
    if room < 1:
        raise ValueError(f"no sentence can be split into parts of {room} pieces")
    parts = []
    start = end = 0
    for pieces in word_lengths:
        if end > start and end + pieces - start > room:
            parts.append((start, end))
            start = end
        end += pieces
        while end - start > room:
            parts.append((start, start + room))
            start += room
    if end > start:
        parts.append((start, end))
    return parts
