"""Compare answer strings: is a prediction right, and does a passage contain an answer.

Not for counting over many questions (read `retrieval.py`) and not for reading answers out of a model (`predict.py`).
Two measures with different ideas of sameness are in common use, and published numbers depend on both:

* `exact_match` compares whole strings after `normalise` (SQuAD; ORQA adds the canonical decomposition, NFD);
* `contains_answer` looks for the answer's words, in order and without gaps, among a passage's words (DPR).
"""

import re
import string
import unicodedata
from collections.abc import Sequence

import regex

from realm_jax.text import patterns

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# A word is a run of letters, numbers and combining marks; every other visible character is a word of its own. The
# standard library's `re` cannot name these Unicode classes.
_WORD = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")


def normalise(text: str) -> str:
    """Reduce an answer to what counts: decomposed (NFD), lower case, no ASCII punctuation, no articles, single spaces.

    Accents stay, as marks after their letters; so the composed and the decomposed spelling of a name are the same. As
    in ORQA's scorer a mark ends a word: the last letter of "Léa" is taken for an article, on both sides alike.
    """
    text = unicodedata.normalize("NFD", text).lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, answers: Sequence[str], is_regex: bool = False) -> bool:
    """True if the prediction is one of the answers after `normalise`.

    With `is_regex` (CuratedTREC) each answer is a regular expression that has to match from the start of the
    prediction, not to its end; one that is invalid or takes too long matches nothing.
    """
    if is_regex:
        return any(patterns.match(answer, prediction) is not None for answer in answers)
    wanted = normalise(prediction)
    return any(normalise(answer) == wanted for answer in answers)


def contains_answer(text: str, answers: Sequence[str], is_regex: bool = False) -> bool:
    """True if one of the answers occurs in the text, word for word and whatever the case.

    An answer without words occurs nowhere. With `is_regex` each answer is a regular expression, searched anywhere.
    """
    if is_regex:
        return find_answer(text, answers, is_regex=True) is not None
    return contains_words(words(text), [words(answer) for answer in answers])


def words(text: str) -> str:
    """The words of a text, in lower case and NFD, each between two spaces: `"Big Ben!"` gives `" big ben ! "`.

    One string instead of a list, so that a passage's words can be kept and searched with the speed of `in`.
    """
    found = _WORD.findall(unicodedata.normalize("NFD", text))
    return f" {' '.join(found).lower()} " if found else ""


def contains_words(text_words: str, answers_words: Sequence[str]) -> bool:
    """`contains_answer` for texts that went through `words` before."""
    return any(answer != "" and answer in text_words for answer in answers_words)


def find_answer(text: str, answers: Sequence[str], is_regex: bool = False) -> tuple[int, int] | None:
    """Where the first answer that occurs in the text does so: (start, end) in characters, or None.

    For showing answers to people: a word that only NFD would break in two is treated as one here.
    """
    if is_regex:
        return next((place for answer in answers if (place := patterns.search(answer, text)) is not None), None)
    tokens = list(_WORD.finditer(text))
    spelled = [unicodedata.normalize("NFD", token.group()).lower() for token in tokens]
    for answer in answers:
        wanted = words(answer).split()
        for first in range(len(spelled) - len(wanted) + 1 if wanted else 0):
            if spelled[first : first + len(wanted)] == wanted:
                return tokens[first].start(), tokens[first + len(wanted) - 1].end()
    return None
