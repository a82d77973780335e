"""Regular expressions as answers, as in CuratedTREC: compiled in one way, with limits of time and memory.

They are compiled by the package `regex` and not by `re`, because it has a timeout. The two find the same matches of the
4,197 regular expressions of the CuratedTREC files in 186,061 characters of Wikipedia. Large repeat counts, and calls of
groups, which `re` does not have, could fill the memory, so they are refused before they are compiled.
"""

import logging
import re
import warnings
from functools import lru_cache
from typing import Any

import regex

logger = logging.getLogger(__name__)

SECONDS = 1.0  # for one pattern in one text; a usual one takes less than a thousandth of that
MOST_REPEATS = 1_000
MOST_SPELT_OUT = 1_000_000  # characters that a pattern becomes while it is compiled: about 300 MB and half a second
_FLAGS = regex.IGNORECASE | regex.MULTILINE | regex.VERSION0

# An escaped character, a set of characters, a call of a group, or a repeat count.
_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]|(\(\?(?:R|[0-9&]|[+-][0-9]|P[>&]))|\{([0-9\s]*),?([0-9\s]*)\}", re.DOTALL
)


@lru_cache(4096)
def _excess(pattern: str) -> str | None:
    """Return the part of a pattern that could take endless time or memory; None for a usual pattern."""
    spelt_out = len(pattern)
    for token in _TOKEN.finditer(pattern):
        if token[1]:
            return f"{token[1]}…) calls a group again; write it out"
        least, most = (int("".join((digits or "").split()) or 0) for digits in token.groups()[1:])
        spelt_out *= max(1, least)
        if max(least, most) > MOST_REPEATS or spelt_out > MOST_SPELT_OUT:
            return f"its repeat counts are above {MOST_REPEATS:,}, or multiply to too much; make them smaller"
    return None


@lru_cache(4096)
def _compiled(pattern: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of patterns whose meaning may change
        return regex.compile(pattern, _FLAGS)


def pattern_error(pattern: str) -> str | None:
    """Return why a pattern is refused or does not compile; None for one that does."""
    try:
        if (reason := _excess(pattern)) is None:
            _compiled(pattern)
        return reason
    except MemoryError:
        return "it takes too much memory"
    except (regex.error, ValueError, OverflowError, RecursionError) as error:
        return str(error)


def _run(method: str, pattern: str, text: str) -> Any:
    """Call a method of the compiled pattern; return None if it fails or takes too long."""
    if pattern_error(pattern) is not None:
        return None
    try:
        result = getattr(_compiled(pattern), method)(text, timeout=SECONDS)
        return list(result) if method == "finditer" else result
    except (TimeoutError, MemoryError):
        _warn_once(pattern)
        return None


@lru_cache(4096)
def _warn_once(pattern: str) -> None:
    logger.warning(
        "the pattern %.60r takes more than %g s or all memory in a text and counts as not found there", pattern, SECONDS
    )


def match(pattern: str, text: str) -> Any:
    """Match a pattern at the start of a text.

    Args:
        pattern: a regular expression.
        text: the text.

    Returns:
        The match; None if there is none, or if the pattern fails or takes too long.
    """
    return _run("match", pattern, text)


def full_match(pattern: str, text: str) -> Any:
    """Match all of a text.

    Args:
        pattern: a regular expression.
        text: the text.

    Returns:
        The match; None if there is none, or if the pattern fails or takes too long.
    """
    return _run("fullmatch", pattern, text)


def search(pattern: str, text: str) -> Any:
    """Find the first match of a pattern in a text.

    Args:
        pattern: a regular expression.
        text: the text.

    Returns:
        The match; None if there is none, or if the pattern fails or takes too long.
    """
    return _run("search", pattern, text)


def find_all(pattern: str, text: str) -> list[tuple[int, int]]:
    """Find all matches of a pattern in a text that do not overlap.

    Args:
        pattern: a regular expression.
        text: the text.

    Returns:
        (start, end) of each match; empty if the pattern fails or takes too long.
    """
    return [match.span() for match in _run("finditer", pattern, text) or ()]
