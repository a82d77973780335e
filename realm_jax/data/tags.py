"""Named entities as tags: the schemes of annotated files, BIO labels of word pieces, and spans out of predicted labels.

A tagger labels the first piece of every *unit*: a run of letters and digits, or one mark, as BERT's tokenizer cuts text
before it looks for word pieces. Units do not depend on how an annotated file cuts its tokens ("don't", "do n't"), so
that a tagger reads plain text as it read the file. Labels are numbers: 0 is O, 2k + 1 is B and 2k + 2 is I of kind k.
Next to read: `windows` below, then `realm_jax/models/tagger.py`.
"""

import re
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from realm_jax.data import packing
from realm_jax.data.spans import Span
from realm_jax.data.tokenizer import Tokenizer, Tokens

OUTSIDE, IGNORED = 0, -1  # labels: of no entity; of a piece that has none
SPECIAL_PIECES = 2  # [CLS] and [SEP] around a window
TAG = re.compile(r"O|[BIESLU]-\S+")  # what a tag looks like in any scheme
_BEGINS, _ENDS = "BSU", "ESLU"  # prefixes that begin an entity whatever stands before, or end it whatever follows

OTHER, LOWER, TITLE, UPPER, DIGIT, MIXED = range(6)  # shapes of a unit
SHAPES = 6
_UPPER, _LOWER, _NUMBER = 1, 2, 4  # kinds of characters


class Entity(NamedTuple):
    """A half-open range of tokens, or of characters, and what it is."""

    start: int
    end: int
    kind: str


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of a sentence, as ranges of tokens, whatever the scheme: IOB1, IOB2 (BIO), IO, BIOES or BILOU.

    An entity begins at B, S or U, or where the kind changes, or after O, E, L, S or U. So all schemes are read as they
    are meant, and a sequence that a scheme forbids is read as the scorer of CoNLL does.
    """
    found: list[Entity] = []
    start, kind, open_ = 0, "", False
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, own = tag.partition("-")
        if open_ and (own != kind or prefix in _BEGINS):
            found.append(Entity(start, place, kind))
            open_ = False
        if own and not open_:
            start, kind, open_ = place, own, True
        if open_ and prefix in _ENDS:
            found.append(Entity(start, place + 1, kind))
            open_ = False
    return found


class TaggerTokens(NamedTuple):
    """The tokens of a text: ids, first character and end int64, whether a piece is the first of its unit, and the shape
    of its unit, uint8; all [pieces]."""

    ids: NDArray[Any]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    first: NDArray[np.bool_]
    shapes: NDArray[np.uint8]


class TaggerTokenizer:
    """Cuts texts into tokens, as a tagger reads them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, texts: Sequence[str]) -> list[TaggerTokens]:
        """The tokens of each text, without special ones. Many texts at once take far less time than one by one."""
        found = []
        for text, tokens in zip(texts, self.tokenizer.tokens(texts), strict=True):
            first = self.tokenizer.unit_starts(text, tokens)
            first[:1] = True
            found.append(TaggerTokens(*tokens, first, shapes(text, tokens.starts, tokens.ends, first)))
        return found


def shapes(
    text: str, starts: NDArray[np.int64], ends: NDArray[np.int64], first: NDArray[np.bool_]
) -> NDArray[np.uint8]:
    """How each piece's unit is written, which a vocabulary in lower case does not tell; uint8 [pieces].

    LOWER, TITLE (a capital, then none), UPPER (two or more), DIGIT, MIXED, or OTHER: marks and scripts without case.
    """
    if not len(starts):
        return np.zeros(0, np.uint8)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    table = _characters()
    kinds = table[np.minimum(codes, len(table) - 1)]
    begin = starts[first]
    last = np.append(np.flatnonzero(first)[1:], len(starts)) - 1
    upper, lower, number = (_count(kinds & bit != 0, begin, ends[last]) for bit in (_UPPER, _LOWER, _NUMBER))
    initial = (kinds[np.minimum(begin, len(kinds) - 1)] & _UPPER) != 0  # a token may be the space at the very end
    found = np.full(len(begin), MIXED, np.uint8)
    found[upper + lower + number == 0] = OTHER
    found[(upper + number == 0) & (lower > 0)] = LOWER
    found[(lower + number == 0) & (upper > 1)] = UPPER
    found[(upper == 1) & initial & (number == 0)] = TITLE
    found[(upper + lower == 0) & (number > 0)] = DIGIT
    return found[np.cumsum(first) - 1]


def with_neighbours(
    own: NDArray[np.uint8], first: NDArray[np.bool_], used: NDArray[np.int32] | np.int32
) -> NDArray[np.uint8]:
    """own + 6 · (unit before) + 36 · (unit after) of windows `[CLS] pieces [SEP]`, uint8 [..., width].

    own [..., width]: shapes, OTHER at places without a piece; first [..., width]: first pieces of units; used [...]:
    places that are not padding. Beyond its window a unit has no neighbours, whatever stands there in the text.
    """
    places = np.arange(own.shape[-1])
    begins = np.maximum.accumulate(np.where(first, places, 1), axis=-1)
    following = np.where(np.roll(first, -1, axis=-1), places + 1, places[-1])
    ends = np.minimum.accumulate(following[..., ::-1], axis=-1)[..., ::-1]
    before, after = (np.take_along_axis(own, where, axis=-1) for where in (begins - 1, ends))
    inside = (places > 0) & (places < np.expand_dims(used, -1) - 1)
    return np.where(inside, own + SHAPES * before + SHAPES**2 * after, OTHER).astype(np.uint8)


def _count(marked: NDArray[np.bool_], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many characters of each range are marked."""
    sums = np.concatenate([[0], np.cumsum(marked)])
    return sums[ends] - sums[starts]


@cache
def _characters() -> NDArray[np.uint8]:
    """The kind of every character of the basic plane, and 0 for those beyond, at the end."""
    table = np.zeros(0x10001, np.uint8)
    for code in range(0x10000):
        character = chr(code)
        upper = character.isupper() or character.istitle()
        table[code] = _UPPER * upper + _LOWER * character.islower() + _NUMBER * character.isdigit()
    return table


def windows(text: str, pieces: TaggerTokens, sentences: Sequence[tuple[int, int]], room: int) -> list[tuple[int, int]]:
    """Half-open ranges of pieces that a tagger reads at a time: as many whole sentences as fit `room`, in order.

    text, pieces: a text and its pieces. sentences: ranges of characters, as `sentences.split` gives them. A sentence
    that is too long by itself is cut between words.
    """
    tokens = Tokens(pieces.ids, pieces.starts, pieces.ends)
    parts = [*chain.from_iterable(packing.sentence_parts(text, tokens, sentences, room))]
    packed = packing.pack([part.stop - part.start for part in parts], 0, room + packing.SPECIAL_TOKENS)
    return [(parts[first].start, parts[last - 1].stop) for first, last in packed]


def labels(pieces: TaggerTokens, spans: Sequence[Entity], kinds: Sequence[str]) -> NDArray[np.int16]:
    """The label of each piece, int16 [pieces]: IGNORED but for first pieces of units.

    spans: in characters, apart from each other. A unit belongs to the span that holds all of it; a span of a kind that
    is not among `kinds` counts as none.
    """
    found = np.where(pieces.first, OUTSIDE, IGNORED).astype(np.int16)
    for start, end, kind in spans:
        inside = np.flatnonzero(pieces.first & (pieces.starts >= start) & (pieces.ends <= end))
        if kind in kinds and len(inside):
            found[inside] = 2 * kinds.index(kind) + 2
            found[inside[0]] -= 1
    return found


def spans(
    pieces: TaggerTokens, tags: NDArray[np.integer], probabilities: NDArray[np.floating], kinds: Sequence[str]
) -> list[Span]:
    """Spans of characters from the labels of a text's pieces, which are a valid BIO sequence.

    tags, probabilities [pieces]; those of other than first pieces say nothing. The score of a span is the least
    probability of its labels: it is as sure as its least sure unit.
    """
    units = np.flatnonzero(pieces.first)
    tagged, sure = tags[units], probabilities[units]
    begins = np.flatnonzero(tagged % 2 == 1)
    if not len(begins):
        return []
    outside = np.append(np.flatnonzero((tagged == OUTSIDE) | (tagged % 2 == 1)), len(units))
    ends = outside[np.searchsorted(outside, begins, "right")]
    last = np.append(units, len(pieces.ids))[ends] - 1  # the last piece of the last unit
    scores = [float(sure[begin:end].min()) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    places = zip(pieces.starts[units[begins]].tolist(), pieces.ends[last].tolist(), strict=True)
    found = [kinds[number] for number in (tagged[begins] // 2).tolist()]
    return [Span(start, end, kind, score) for (start, end), kind, score in zip(places, found, scores, strict=True)]
