"""Compare answer strings: is a prediction right, and does a passage contain an answer.

Not here: counting over many questions (`question_metrics.py`, and `retrieval_metrics.py` for passages), and reading
answers out of a model (`prediction.py`). Several ideas of sameness are in common use, and published numbers depend on
them:

* `exact_match` is ORQA's, which is NQ-open's and EfficientQA's too: whole strings after `normalise`; patterns
  (CuratedTREC) match from the start of the prediction, and `full_match` wants them to reach its end;
* `squad_match` is SQuAD's and that of DPR's reader: the same without the decomposition (NFD), so that the two
  spellings of an accent differ; `token_f1` is SQuAD's over the same words;
* `contains_words` is DPR's retriever's: the answer's words, in order and without gaps, among a passage's words;
  `contains_pattern` searches for patterns anywhere.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

import regex

from realm_jax.data import patterns

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# A word is a run of letters, numbers and combining marks; every other visible character is a word of its own. The
# standard library's `re` cannot name these Unicode classes.
_WORD = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")


def normalise(text: str, decomposed: bool = True) -> str:
    """Reduce an answer to what counts: decomposed (NFD), lower case, no ASCII punctuation, no articles, single spaces.

    Accents stay, as marks after their letters; so the composed and the decomposed spelling of a name are the same. As
    in ORQA's scorer a mark ends a word: the last letter of "Léa" is taken for an article, on both sides alike. Without
    `decomposed` Unicode stays as it is, as SQuAD's scorer and DPR's have it.
    """
    text = unicodedata.normalize("NFD", text) if decomposed else text
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str], is_regex: bool = False) -> bool:
    """True if the prediction is one of the answers after `normalise`.

    With `is_regex` (CuratedTREC) each answer is a regular expression that has to match from the start of the
    prediction, not to its end; one that is invalid or takes too long matches nothing.
    """
    if is_regex:
        return any(patterns.match(answer, prediction) is not None for answer in answers)
    wanted = normalise(prediction)
    return any(normalise(answer) == wanted for answer in answers)


def full_match(prediction: str, answers: Sequence[str]) -> bool:
    """True if one of the answers, all regular expressions, matches the whole prediction; fails as in `exact_match`."""
    return any(patterns.full_match(answer, prediction) is not None for answer in answers)


def squad_match(prediction: str, answers: Sequence[str]) -> bool:
    """True if the prediction is one of the answers after `normalise` without the decomposition."""
    wanted = normalise(prediction, decomposed=False)
    return any(normalise(answer, decomposed=False) == wanted for answer in answers)


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over the words of the best answer, 0 to 1, as SQuAD 1.1 counts them.

    Words are what `normalise` without the decomposition leaves; one that occurs twice counts twice. Texts that have no
    word left score 0, also against each other.
    """
    found = Counter(normalise(prediction, decomposed=False).split())
    right = (Counter(normalise(answer, decomposed=False).split()) for answer in answers)
    return max((2 * (found & wanted).total() / ((found + wanted).total() or 1) for wanted in right), default=0.0)


def contains_pattern(text: str, answers: Sequence[str]) -> bool:
    """True if one of the answers, all regular expressions, matches anywhere in the text; fails as in `exact_match`."""
    return any(patterns.search(answer, text) is not None for answer in answers)


def words(text: str) -> str:
    """The words of a text, in lower case and NFD, each between two spaces: `"Big Ben!"` gives `" big ben ! "`.

    One string instead of a list, so that a passage's words can be kept and searched with the speed of `in`.
    """
    found = _WORD.findall(unicodedata.normalize("NFD", text))
    return f" {' '.join(found).lower()} " if found else ""


def contains_words(text_words: str, answers_words: Sequence[str]) -> bool:
    """True if one of the answers occurs in the text, word for word; both went through `words`.

    An answer without words occurs nowhere.
    """
    return any(answer != "" and answer in text_words for answer in answers_words)


def find_answer(text: str, answers: Sequence[str]) -> tuple[int, int] | None:
    """Where the first answer that occurs in the text does so: (start, end) in characters, or None.

    For showing answers to people: a word that only NFD would break in two is treated as one here.
    """
    tokens = list(_WORD.finditer(text))
    spelled = [unicodedata.normalize("NFD", token.group()).lower() for token in tokens]
    for answer in answers:
        wanted = words(answer).split()
        for first in range(len(spelled) - len(wanted) + 1 if wanted else 0):
            if spelled[first : first + len(wanted)] == wanted:
                return tokens[first].start(), tokens[first + len(wanted) - 1].end()
    return None
