"""Count the documents that adaptation can learn from, if it hides names or terms.

    python benchmarks/learnable_documents.py data/medquad

A passage can be learned from if it has a span that occurs in few other passages, and if one of them shares enough
words with the sentence (`realm_jax/data/evidence.py`). Names are those that `realm prepare` finds. A term is a sequence
of one to three words, without a stop word at an end, that occurs in 2 to 50 passages. Terms need no capitals.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from realm_jax.data import evidence
from realm_jax.data.sources import open_sources
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer

WORDS, PIECES = 3, 6  # of a term at most
FEWEST_LETTERS = 4  # of a term of one word, unless it has a digit
QUERY, LONGEST = 46, 6  # tokens of a sentence and of a span, as in the recipe of `realm adapt`
OVERLAPS = ((0.35, 0.9), (0.1, 0.35))  # shares of a sentence's words
STOP_WORDS = frozenset(
    """
    a about after all also an and any are as at be been before being between both but by can did do does
    during each for from had has have he her his how i if in into is it its many may more most must no not of
    on one only or other our over she should so some such than that the their them then there these they this
    those through to two under use used using very was we were what when where which while who why will with
    within without would you your
    """.split()
)


class TermStore:
    """A corpus with terms in the place of its names."""

    def __init__(self, store: PassageStore, terms: list[list[tuple[int, int]]]) -> None:
        self._store, self._terms = store, terms
        self._counts = np.array([len(spans) for spans in terms])
        self._column = np.array([span for spans in terms for span in spans], np.int32).reshape(-1, 2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __len__(self) -> int:
        return len(self._store)

    def counts(self, name: str) -> NDArray:
        return self._counts if name == "spans" else self._store.counts(name)

    def column(self, name: str) -> NDArray:
        return self._column if name == "spans" else self._store.column(name)


class Word(NamedTuple):
    """A word of a sentence.

    Attributes:
        start: first token in the body.
        end: token behind its last one.
        text: in lower case.
    """

    start: int
    end: int
    text: str

    @property
    def is_stop_word(self) -> bool:
        """Return True if no term begins or ends with it."""
        return self.text in STOP_WORDS


def words_of(tokens: NDArray, pieces: list[str], start: int, end: int) -> list[Word]:
    """Return the words of a sentence of word pieces.

    Args:
        tokens: of the body.
        pieces: text of each id.
        start: first token of the sentence.
        end: token behind its last one.
    """
    words: list[Word] = []
    for position in range(start, end):
        piece = pieces[tokens[position]]
        if piece.startswith("##") and words:
            words[-1] = Word(words[-1].start, position + 1, words[-1].text + piece[2:])
        else:
            words.append(Word(position, position + 1, piece))
    return words


def candidates(words: list[Word], first: int) -> Iterator[tuple[Word, ...]]:
    """Yield the sequences of words that may be a term and begin with a word, the longest first."""
    for count in range(min(WORDS, len(words) - first), 0, -1):
        part = tuple(words[first : first + count])
        is_plain = all(word.text.isalnum() for word in part)
        if is_plain and not part[0].is_stop_word and not part[-1].is_stop_word:
            yield part


def find_terms(store: PassageStore, tokenizer: Tokenizer) -> TermStore:
    """Return the corpus with terms in the place of names, no two of which overlap."""
    pieces = tokenizer.pieces(range(tokenizer.size))
    sentences = [
        [words_of(store.body_tokens(row), pieces, start, end) for start, end in store.sentences(row).tolist()]
        for row in range(len(store))
    ]
    frequencies = Counter[str]()  # number of passages that have a sequence of words
    for passage in sentences:
        of_sentences = (candidates(words, first) for words in passage for first in range(len(words)))
        frequencies.update({text_of(part) for parts in of_sentences for part in parts})
    terms = []
    for passage in sentences:
        spans: list[tuple[int, int]] = []
        for words in passage:
            first = 0
            while first < len(words):
                parts = (part for part in candidates(words, first) if is_term(part, frequencies))
                if (part := next(parts, None)) is not None:
                    spans.append((part[0].start, part[-1].end))
                first += 1 if part is None else len(part)
        terms.append(spans)
    return TermStore(store, terms)


def text_of(part: tuple[Word, ...]) -> str:
    """Return the text of a sequence of words."""
    return " ".join(word.text for word in part)


def is_term(part: tuple[Word, ...], frequencies: Counter[str]) -> bool:
    """Return True if a sequence of words occurs in few passages, and is no short word."""
    text = text_of(part)
    is_long = len(part) > 1 or len(text) >= FEWEST_LETTERS or any(letter.isdigit() for letter in text)
    is_rare = 2 <= frequencies[text] <= evidence.HOLDERS
    return is_long and is_rare and part[-1].end - part[0].start <= PIECES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="prepared folder with a WordPiece tokenizer")
    sources = open_sources(parser.parse_args().data, flag="data: ")
    store = sources.passages
    documents = np.array([store.document_id(row) for row in range(len(store))])
    print("| hidden | shared words | spans | passages | documents |\n|---|---|---|---|---|")
    for hidden, corpus in (("names", store), ("terms", find_terms(store, sources.tokenizer))):
        for evidence.LEAST, evidence.MOST in OVERLAPS:  # of the module, which reads them
            evidence.find_evidence.cache_clear()
            rows = evidence.find_evidence(cast(PassageStore, corpus), QUERY, LONGEST).spans.rows
            counts = (f"{len(each):,}" for each in (rows, np.unique(rows), np.unique(documents[rows])))
            print(f"| {hidden} | {evidence.LEAST:g} to {evidence.MOST:g} |", " | ".join(counts), "|", flush=True)
    print(f"of {len(store):,} passages, {len(np.unique(documents)):,} documents")


if __name__ == "__main__":
    main()
