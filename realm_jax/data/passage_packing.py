"""Sentences to passages: as many whole sentences as fit, in order, nothing lost and nothing twice.

The rule is ORQA's (Lee et al. 2019, preprocessing of Wikipedia): the layout `[CLS] title [SEP] body [SEP]` counts
against the limit. One thing differs: ORQA makes a passage that is too long of a sentence longer than the limit, and
truncates it when it is read; we split such a sentence first, so that every word stays reachable.
Next to read: `layouts.py`.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import regex

from realm_jax.data.sentences import MARK
from realm_jax.data.tokenizer import Tokens

SPECIAL_TOKENS = 3
DEFAULT_LIMIT = 288  # ORQA's and REALM's block length

# Where a long sentence may be cut: best at white space; then at a border of words as Unicode defines it (UAX 29), which
# scripts without spaces need; then between characters, which are letters with their combining marks.
_INSIDE, _LETTER, _WORD, _SPACE = range(4)
_WORD_BORDER = regex.compile(r"(?w)\b")
_CHARACTER = regex.compile(r"\X")
_SPACE_OR_MARK = regex.compile(rf"[\s\x1c-\x1f]++{MARK.pattern}?|{MARK.pattern}")


class Part(NamedTuple):
    """A sentence or a part of one.

    Attributes:
        start: its first token.
        stop: token behind the last one.
        begin: its first character in the text.
    """

    start: int
    stop: int
    begin: int


def max_title(limit: int = DEFAULT_LIMIT) -> int:
    """Return the most tokens of a title, half the limit. The caller truncates the title."""
    return limit // 2


def body_room(title_length: int, limit: int = DEFAULT_LIMIT) -> int:
    """Return how many tokens of a passage remain for its body.

    Args:
        title_length: tokens of the title; more than `max_title` count as that many.
        limit: most tokens of a passage, title and three special tokens included.
    """
    return limit - SPECIAL_TOKENS - min(title_length, max_title(limit))


def pack(sentence_lengths: Sequence[int], title_length: int, limit: int = DEFAULT_LIMIT) -> list[tuple[int, int]]:
    """Cut a document's sentences into passages, greedily.

    Args:
        sentence_lengths: tokens of each sentence, without special tokens.
        title_length: tokens of the title. A title of more than `max_title(limit)` tokens counts as that many, because
            only its first `max_title(limit)` tokens are stored.
        limit: most tokens of a passage, title and three special tokens included.

    Returns:
        Half-open ranges of sentences, in order, without gap or overlap. Only a sentence that is itself longer than
        `body_room(title_length, limit)` gives a passage over the limit; `split_long` prevents that.
    """
    max_tokens = body_room(title_length, limit)
    passages = []
    first, length = 0, 0
    for sentence, sentence_length in enumerate(sentence_lengths):
        if sentence > first and length + sentence_length > max_tokens:
            passages.append((first, sentence))
            first, length = sentence, 0
        length += sentence_length
    if first < len(sentence_lengths):
        passages.append((first, len(sentence_lengths)))
    return passages


def sentence_parts(text: str, tokens: Tokens, sentences: Sequence[tuple[int, int]], room: int) -> list[list[Part]]:
    """Divide the tokens of a text into sentences, and long sentences into parts of at most `room` tokens.

    Args:
        text: the text; normalizers drop some of its characters, so the tokens do not tell where a word ends.
        tokens: all tokens of the text.
        sentences: ranges of characters, as `sentences.split` gives them.
        room: most tokens of a part (`body_room` gives it).

    Returns:
        The parts of each sentence: one, none without tokens, or several. Together they hold every token.
    """
    begins = [begin for begin, _ in sentences]
    starts = np.searchsorted(tokens.starts, begins)  # [sentences]: first token of each
    starts[:1] = 0  # some tokenizers make tokens of the white space before the first sentence
    borders = zip(pairwise([*begins, len(text)]), pairwise([*starts.tolist(), len(tokens.ids)]), strict=True)
    # Most sentences are short, so only long ones pay for the search of cuts.
    parts = []
    for (begin, end), (start, stop) in borders:
        if stop - start <= room:
            parts.append([Part(start, stop, begin)] if stop > start else [])
        else:
            ranks, cuts = _cuts(text, begin, end, tokens.part(start, stop))
            parts.append([Part(start + first, start + last, cuts[first]) for first, last in split_long(ranks, room)])
    return parts


def _cuts(text: str, begin: int, end: int, tokens: Tokens) -> tuple[list[int], list[int]]:
    """Rank the cut before each token of the sentence [begin, end), and find the character that each cut falls before.

    Returns:
        Ranks from 0 (inside a character) to 3 (at white space), and characters, which never decrease.
    """
    starts = {match.start() for match in _CHARACTER.finditer(text, begin, end)}
    for match in _SPACE_OR_MARK.finditer(text, begin, end):
        if not match[0][-1].isspace():  # no passage begins with a mark, be it one behind white space
            starts -= {*range(*match.span())}
    characters = [*sorted(starts), end]
    words = {match.start() for match in _WORD_BORDER.finditer(text, begin, end)}
    ranks, cuts = [], []
    covered = begin  # end of the tokens so far
    for token_start, token_end in zip(tokens.starts.tolist(), tokens.ends.tolist(), strict=True):
        cut = characters[bisect_left(characters, min(max(token_start, covered), end))]
        rank = _INSIDE if cut > token_start else _WORD if cut in words else _LETTER
        # Characters without a token between the last white space and this token belong to its word.
        behind_space = [n for n, character in enumerate(text[covered:token_start], covered + 1) if character.isspace()]
        if behind_space and behind_space[-1] in starts:
            rank, cut = _SPACE, behind_space[-1]
        ranks.append(rank)
        cuts.append(cut)
        covered = max(covered, token_end)
    return ranks, [begin, *cuts[1:]]


def split_long(ranks: Sequence[int], room: int) -> list[tuple[int, int]]:
    """Split a sentence that is longer than a passage into parts of at most `room` tokens, at the best cuts.

    Args:
        ranks: how good a cut before each token of the sentence is; the higher, the better.
        room: most tokens of a part, 1 at least.

    Returns:
        Half-open ranges of the sentence's tokens, in order, without gap or overlap. A part ends at the last of the
        best cuts within its room.
    """
    parts = []
    start = 0
    while len(ranks) - start > room:
        stop = max(range(start + 1, start + room + 1), key=lambda cut: (ranks[cut], cut))
        parts.append((start, stop))
        start = stop
    if start < len(ranks):
        parts.append((start, len(ranks)))
    return parts
