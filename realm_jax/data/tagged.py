"""What a tagger reads: windows of whole sentences as fixed-shape arrays, with labels where they are known.

Training and tagging pack sentences into windows in the same way; the sentences are the annotators' here, and those of
rules where plain text is tagged. Where the text is from: `conll.py`. Keys of the arrays are those that
`training/tagging.py` reads.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.conll import Document, text_of
from realm_jax.data.examples import Example, Examples
from realm_jax.text import layouts
from realm_jax.text.layouts import Special
from realm_jax.text.tags import IGNORED, OTHER, OUTSIDE, Cutter, Entity, Pieces, labels, windows, with_neighbours

SPECIAL_PIECES = 2  # [CLS] and [SEP]


class Annotated(NamedTuple):
    """A document as one text: ranges of its sentences, and its entities, in characters."""

    text: str
    sentences: list[tuple[int, int]]
    entities: list[Entity]


def annotated(document: Document) -> Annotated:
    """Tokens and sentences with a space between them."""
    parts, sentences, found, start = [], [], [], 0
    for sentence in document:
        text, entities = text_of(sentence)
        parts.append(text)
        sentences.append((start, start + len(text)))
        found += [Entity(entity.start + start, entity.end + start, entity.kind) for entity in entities]
        start += len(text) + 1
    return Annotated(" ".join(parts), sentences, found)


def kinds_of(documents: Sequence[Document]) -> tuple[str, ...]:
    """All kinds of entities, in alphabetical order."""
    sentences = (sentence for document in documents for sentence in document)
    return tuple(sorted({entity.kind for sentence in sentences for entity in sentence.entities}))


def tagger_examples(
    documents: Sequence[Document], cutter: Cutter, kinds: Sequence[str], length: int, hidden: float = 0.0
) -> Examples:
    """Every window of every document. Arrays of [length]: ids, shapes uint8, labels int16; `length` int32.

    hidden: the share of units whose pieces are [UNK], others every time, so that a tagger looks at what is around.
    """
    whole = [annotated(document) for document in documents]
    made: list[Example] = []
    for text, pieces in zip(whole, cutter([text.text for text in whole]), strict=True):
        wanted = labels(pieces, text.entities, kinds)
        for start, stop in windows(pieces, text.sentences, length - SPECIAL_PIECES):
            made.append(_example(pieces, wanted, slice(start, stop), length, cutter.wordpiece.special))
    unknown = cutter.wordpiece.unk_id

    def make(index: int, rng: np.random.Generator) -> Example:
        example = made[index]
        if not hidden:
            return example
        units = np.cumsum(example["labels"] != IGNORED)  # 0 at [CLS]
        gone = rng.random(len(units) + 1) < hidden
        inside = (units > 0) & (np.arange(len(units)) < example["length"] - 1)
        return example | {"ids": np.where(gone[units] & inside, example["ids"].dtype.type(unknown), example["ids"])}

    return Examples(len(made), make)


def _example(pieces: Pieces, wanted: NDArray[np.int16], window: slice, length: int, special: Special) -> Example:
    """One window. A name that it was cut out of begins in it: its first label is a B, as `decode` would have it."""
    layout = layouts.query(pieces.ids[window], length, special)
    inside = slice(1, layout.used - 1)
    shapes, first = np.full(length, OTHER, np.uint8), np.zeros(length, bool)
    shapes[inside], first[inside] = pieces.shapes[window], pieces.first[window]
    tags = np.full(length, IGNORED, np.int16)
    tags[inside] = wanted[window]
    begin = int(first.argmax())
    if tags[begin] > OUTSIDE and tags[begin] % 2 == 0:
        tags[begin] -= 1
    used = np.int32(layout.used)
    shapes = with_neighbours(shapes, first, used)
    return {"ids": layout.ids.astype(pieces.ids.dtype), "length": used, "shapes": shapes, "labels": tags}
