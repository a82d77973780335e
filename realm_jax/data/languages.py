"""The language of a text, and the languages that `sentences.py` and BM25 (`retrieval/analyzers.py`) know."""

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

# ISO 639-1 codes; names in lower case are those of Snowball's stemmers. Chinese, Japanese, Korean and Thai have no
# stemmer there; other libraries find their words.
LANGUAGES = {
    "ar": "arabic",
    "ca": "catalan",
    "cs": "czech",
    "da": "danish",
    "de": "german",
    "el": "greek",
    "en": "english",
    "eo": "esperanto",
    "es": "spanish",
    "et": "estonian",
    "eu": "basque",
    "fa": "persian",
    "fi": "finnish",
    "fr": "french",
    "ga": "irish",
    "hi": "hindi",
    "hu": "hungarian",
    "hy": "armenian",
    "id": "indonesian",
    "it": "italian",
    "ja": "japanese",
    "ko": "korean",
    "lt": "lithuanian",
    "ne": "nepali",
    "nl": "dutch",
    "no": "norwegian",
    "pl": "polish",
    "pt": "portuguese",
    "ro": "romanian",
    "ru": "russian",
    "sr": "serbian",
    "sv": "swedish",
    "ta": "tamil",
    "th": "thai",
    "tr": "turkish",
    "yi": "yiddish",
    "zh": "chinese",
}
PLAIN = "none"  # plain words, neither stems nor stop words
BIGRAMS = "bigrams"  # pairs of characters in scripts without spaces, plain words in others
CHOICES = (PLAIN, BIGRAMS, *LANGUAGES)
# Of detected languages: both standards of Norwegian are one, and no library here finds the words of Khmer and Lao.
_DETECTED = {"nb": "no", "nn": "no", "km": BIGRAMS, "lo": BIGRAMS}
LANGUAGE_FROM = 500  # characters; by so many, none of 7,030 English articles is taken for another language


def language(text: str) -> str:
    """Return the ISO 639-1 code (for some languages 639-3) of a text's language, by its beginning."""
    return _identifier().classify(text[:LANGUAGE_FROM])[0]


def most_common_language(texts: Iterable[str]) -> tuple[str, str]:
    """Detect the language of most texts.

    Returns:
        Its choice of CHOICES, PLAIN if we know nothing of it, and the code that was detected, "" without a text.
    """
    counts = Counter(language(text) for text in texts)
    code = counts.most_common(1)[0][0] if counts else ""
    choice = _DETECTED.get(code, code)
    return choice if choice in CHOICES else PLAIN, code


@cache
def _identifier() -> Any:
    # Here, since the model takes a second to load.
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)
