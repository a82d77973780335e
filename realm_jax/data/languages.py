"""The language of a text, and the languages whose words can be reduced to stems."""

from functools import cache
from typing import Any

# ISO 639-1 codes and the names of Snowball's stemmers: languages with both a stemmer and a list of stop words in the
# libraries that `retrieval/bm25.py` uses.
LANGUAGES = {
    "da": "danish",
    "de": "german",
    "en": "english",
    "es": "spanish",
    "fr": "french",
    "it": "italian",
    "nl": "dutch",
    "no": "norwegian",
    "pt": "portuguese",
    "ru": "russian",
    "sv": "swedish",
    "tr": "turkish",
}
PLAIN = "none"  # neither stems nor stop words
LANGUAGE_FROM = 500  # characters; by so many, none of 7,030 English articles is taken for another language


def language(text: str) -> str:
    """Return the ISO 639-1 code (for some languages 639-3) of a text's language, by its beginning."""
    return _identifier().classify(text[:LANGUAGE_FROM])[0]


@cache
def _identifier() -> Any:
    # Here, since the model takes a second to load.
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE)
