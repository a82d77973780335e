"""The terms of a text for BM25, by language: stems, words that a library finds, or pairs of characters.

Snowball reduces the words of most languages to stems, and the 12 that bm25s has lists for lose their stop words. For
Chinese, Japanese, Korean and Thai a library finds words (extra `languages`); Japanese and Korean lose particles and
endings. Without the library we match pairs of characters, as Lucene does. All other languages have plain words.
Next to read: `bm25.py`.
"""

import logging
import threading
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, pairwise
from typing import Any

import regex

from realm_jax.data.languages import BIGRAMS, LANGUAGES, PLAIN
from realm_jax.errors import UserError, install_extra

logger = logging.getLogger(__name__)

KEY = "config.retrieval.language"  # for messages
LIBRARIES = {  # packages that find the words of a language
    "ja": ("sudachipy", "sudachidict-small"),
    "ko": ("lindera-python-ko-dic",),
    "th": ("pythainlp",),
    "zh": ("rjieba",),
}
WITH_STOP_WORDS = frozenset("da de en es fr it nl no pt ru sv tr".split())  # languages that bm25s has a list for

# One-letter words are kept: BM25's weights judge how little a word says. Marks, such as the vowel signs of Hindi,
# belong to the letter before them; Python's own \w has none of them.
_WORD = regex.compile(r"[\p{L}\p{N}_][\p{L}\p{M}\p{N}_]*")
_DOT_ABOVE = "\N{COMBINING DOT ABOVE}"  # lower() makes an i and this of the Turkish capital İ
_UNSPACED = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}ー]\p{M}*+"
    r"(?:[\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{M}ー])*"
)
_HAN = regex.compile(r"\p{Han}")
_CHARACTER = regex.compile(r"\X")
# Stemmers and segmenters have memory that threads must not share, and batches are made in another thread.
_LOCK = threading.Lock()

_SUDACHI_CHARACTERS = 8192  # it takes 49,149 bytes at most
# Parts of speech: in Japanese particles, auxiliaries, punctuation and white space; in Korean particles, endings,
# suffixes, copulas and punctuation.
_JAPANESE_FUNCTION = frozenset(("助詞", "助動詞", "補助記号", "空白"))
_KOREAN_FUNCTION = ("J", "E", "XS", "VC", "SF", "SE", "SS", "SP", "SO", "SC", "SY")


def terms(text: str, language: str) -> list[str]:
    """Return the terms of a text, in the order of the text.

    Args:
        text: passage or question.
        language: one of `languages.CHOICES`.

    Raises:
        UserError: its library is not installed.
    """
    return _analyzer(language)(text)


def available(language: str) -> str:
    """Return the language itself, or BIGRAMS, with a warning, if the library that finds its words is not installed."""
    if not _missing(language):
        return language
    _warn_of_missing(language)
    return BIGRAMS


def check_available(language: str) -> None:
    """Raise UserError if `retrieval.language` names a language whose library is not installed."""
    if missing := _missing(language):
        raise UserError(
            f"{KEY}={language}: needs {' and '.join(missing)}; {install_extra('languages')}, or set {KEY}={BIGRAMS}"
        )


def library_versions(language: str) -> str:
    """Return names and versions of the packages that find the words of a language; '' for stems and plain words."""
    return ", ".join(f"{name} {_version(name)}" for name in LIBRARIES.get(language, ()))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _missing(language: str) -> list[str]:
    return [name for name in LIBRARIES.get(language, ()) if _version(name) is None]


@cache  # once in a process
def _warn_of_missing(language: str) -> None:
    logger.warning(
        "BM25 matches pairs of characters in %s texts without %s; %s, or set %s=%s",
        LANGUAGES[language].capitalize(),
        " and ".join(_missing(language)),
        install_extra("languages"),
        KEY,
        BIGRAMS,
    )


@cache
def _analyzer(language: str) -> Callable[[str], list[str]]:
    """Return the function that makes terms of a text."""
    if language == BIGRAMS:
        return _bigrams
    check_available(language)
    if language in _SEGMENTERS:
        segments = _SEGMENTERS[language]()

        def segmented(text: str) -> list[str]:
            with _LOCK:
                segmented_words = list(segments(unicodedata.normalize("NFKC", text)))
            return [word for segment in segmented_words for word in _WORD.findall(segment.lower())]

        return segmented
    if language == PLAIN:
        return _words
    import Stemmer
    from bm25s import stopwords

    name, stop_words = LANGUAGES[language], frozenset[str]()
    if language in WITH_STOP_WORDS:
        stop_words = frozenset(getattr(stopwords, f"STOPWORDS_{'EN' if language == 'en' else name.upper()}"))
    stemmer = Stemmer.Stemmer(name)

    def stems(text: str) -> list[str]:
        words = [word for word in _words(text) if word not in stop_words]
        with _LOCK:
            return list(stemmer.stemWords(words))

    return stems


def _words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    lowered = text.lower()
    if not text.isascii():  # a letter with a mark is the same whether it came as one character or as two
        lowered = unicodedata.normalize("NFC", text).lower().replace(_DOT_ABOVE, "")
    return _WORD.findall(lowered)


def _bigrams(text: str) -> list[str]:
    """Return pairs of adjacent characters of scripts without spaces, single Chinese ones, and the words of others."""
    result = []
    for word in _words(unicodedata.normalize("NFKC", text)):
        end = 0
        for run in _UNSPACED.finditer(word):
            characters = _CHARACTER.findall(run[0])
            pairs = ["".join(pair) for pair in pairwise(characters)] or characters
            single = [character for character in characters if len(characters) > 1 and _HAN.match(character)]
            result += [*_WORD.findall(word[end : run.start()]), *pairs, *single]
            end = run.end()
        result += _WORD.findall(word[end:])
    return result


# --- Libraries: each function returns one from text to words ----------------------------------------------------------


def _chinese() -> Callable[[str], Iterator[str]]:
    import rjieba

    return lambda text: iter(rjieba.cut_for_search(text))  # a long word, and the words in it


def _japanese() -> Callable[[str], Iterator[str]]:
    import sudachipy

    tokenizer = sudachipy.Dictionary(dict="small").tokenizer()

    def segments(text: str) -> Iterator[str]:
        for first in range(0, len(text), _SUDACHI_CHARACTERS):
            for morpheme in tokenizer.tokenize(text[first : first + _SUDACHI_CHARACTERS], sudachipy.SplitMode.A):
                if morpheme.part_of_speech()[0] not in _JAPANESE_FUNCTION:
                    yield morpheme.normalized_form()

    return segments


def _korean() -> Callable[[str], Iterator[str]]:
    import lindera

    tokenizer = lindera.Tokenizer(lindera.load_dictionary("embedded://ko-dic"), mode="normal")

    def morphemes(token: Any) -> Iterator[tuple[str, str]]:
        """Yield surface and part of speech of each part of a word: "배웠" is "배우/VV/*+었/EP/*"."""
        if len(token.details) > 7 and "/" in token.details[7]:
            for part in token.details[7].split("+"):
                surface, kind, *_ = part.split("/")
                yield surface, kind
        else:
            yield token.surface, token.details[0]

    def segments(text: str) -> Iterator[str]:
        for surface, kind in chain.from_iterable(map(morphemes, tokenizer.tokenize(text))):
            if not kind.startswith(_KOREAN_FUNCTION):
                yield surface

    return segments


def _thai() -> Callable[[str], Iterator[str]]:
    from pythainlp.tokenize import word_tokenize

    return lambda text: iter(word_tokenize(text, engine="newmm-safe"))  # no text takes it long


_SEGMENTERS: dict[str, Callable[[], Callable[[str], Iterator[str]]]] = {
    "ja": _japanese,
    "ko": _korean,
    "th": _thai,
    "zh": _chinese,
}
