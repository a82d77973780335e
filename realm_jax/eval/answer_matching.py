"""Compare answer strings: is a prediction right, and does a passage contain an answer.

Not here: counting over many questions (`question_metrics.py`, and `retrieval_metrics.py` for passages), and reading
answers out of a model (`prediction.py`). Several ideas of sameness are in common use, and published numbers depend on
them:

* `exact_match` is ORQA's, which is NQ-open's and EfficientQA's too: equal strings after `normalize`; patterns
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


def normalize(text: str, decomposed: bool = True) -> str:
    """Normalize an answer: decomposed (NFD), lower case, no ASCII punctuation, no articles, single spaces.

    Accents stay, as marks after their letters; so the composed and the decomposed spelling of a name are the same. As
    in ORQA's scorer a mark ends a word: the last letter of "Léa" is taken for an article, on both sides alike.

    Args:
        text: the answer.
        decomposed: decompose Unicode first; SQuAD's and DPR's scorers do not.
    """
    text = unicodedata.normalize("NFD", text) if decomposed else text
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str], is_regex: bool = False) -> bool:
    """Return True if the prediction equals one of the answers after `normalize`.

    Args:
        prediction: the predicted text.
        answers: right answers.
        is_regex: the answers are regular expressions (CuratedTREC), which must match from the start of the prediction
            but not to its end. An expression that is invalid or takes too long matches nothing.
    """
    if is_regex:
        return any(patterns.match(answer, prediction) is not None for answer in answers)
    normalized = normalize(prediction)
    return any(normalize(answer) == normalized for answer in answers)


def full_match(prediction: str, answers: Sequence[str]) -> bool:
    """Return True if a regular expression matches the prediction to its end.

    Args:
        prediction: the predicted text.
        answers: regular expressions, as in `exact_match`.
    """
    return any(patterns.full_match(answer, prediction) is not None for answer in answers)


def squad_match(prediction: str, answers: Sequence[str]) -> bool:
    """Return True if the prediction equals one of the answers after `normalize` without the decomposition.

    Args:
        prediction: the predicted text.
        answers: right answers.
    """
    normalized = normalize(prediction, decomposed=False)
    return any(normalize(answer, decomposed=False) == normalized for answer in answers)


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over words, with the best answer, as SQuAD 1.1 counts it.

    A word that occurs twice counts twice. Texts without words score 0, also against each other.

    Args:
        prediction: the predicted text.
        answers: right answers.

    Returns:
        F1, 0 to 1.
    """
    predicted = Counter(normalize(prediction, decomposed=False).split())
    references = (Counter(normalize(answer, decomposed=False).split()) for answer in answers)
    scores = (2 * (predicted & right).total() / ((predicted + right).total() or 1) for right in references)
    return max(scores, default=0.0)


def contains_pattern(text: str, answers: Sequence[str]) -> bool:
    """Return True if a regular expression matches anywhere in the text.

    Args:
        text: text of a passage.
        answers: regular expressions, as in `exact_match`.
    """
    return any(patterns.search(answer, text) is not None for answer in answers)


def words(text: str) -> str:
    """Return the words of a text, in lower case and NFD, each between two spaces: `"Big Ben!"` gives `" big ben ! "`.

    One string instead of a list, so that `in` searches a passage's words fast.
    """
    words_in_text = _WORD.findall(unicodedata.normalize("NFD", text))
    return f" {' '.join(words_in_text).lower()} " if words_in_text else ""


def contains_words(text_words: str, answers_words: Sequence[str]) -> bool:
    """Return True if the words of an answer occur in a text, in order and without gaps.

    Args:
        text_words: `words` of the text.
        answers_words: `words` of each answer; an answer without words occurs nowhere.
    """
    return any(answer != "" and answer in text_words for answer in answers_words)


def find_answer(text: str, answers: Sequence[str]) -> tuple[int, int] | None:
    """Find the first answer that occurs in a text, to show it to people.

    A word that only NFD would break in two is one word here.

    Args:
        text: text of a passage.
        answers: the first has precedence.

    Returns:
        (start, end) in characters, or None.
    """
    tokens = list(_WORD.finditer(text))
    spelled = [unicodedata.normalize("NFD", token.group()).lower() for token in tokens]
    for answer in answers:
        answer_words = words(answer).split()
        for first in range(len(spelled) - len(answer_words) + 1 if answer_words else 0):
            if spelled[first : first + len(answer_words)] == answer_words:
                return tokens[first].start(), tokens[first + len(answer_words) - 1].end()
    return None
