"""Answers that are regular expressions, as CuratedTREC has them: compiled in one way, and never run without an end.

The package `regex` reads them, not the standard library's `re`: it supports a timeout. On the 4,197 patterns of the
CuratedTREC files the two find the same places in 186,061 characters of Wikipedia. What could fill the memory is refused
before it is compiled: large repeat counts, and calls of groups, which `re` does not have. Not for the questions
themselves.
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


def pattern_error(pattern: str) -> str | None:
    """Why a pattern is refused or does not compile; None for one that does."""
    try:
        if (reason := _excess(pattern)) is not None:
            return reason
        _compiled(pattern)
    except MemoryError:
        return "it takes too much memory"
    except (regex.error, ValueError, OverflowError, RecursionError) as reason:
        return str(reason)
    return None


@lru_cache(4096)
def _excess(pattern: str) -> str | None:
    """What in a pattern could take endless time or memory to compile or to run; None for a usual one."""
    spelt_out = len(pattern)
    for token in _TOKEN.finditer(pattern):
        if token[1]:
            return f"{token[1]}…) calls a group again; write it out"
        least, most = (int("".join((digits or "").split()) or 0) for digits in token.groups()[1:])
        spelt_out *= max(1, least)
        if max(least, most) > MOST_REPEATS or spelt_out > MOST_SPELT_OUT:
            return f"its repeat counts are above {MOST_REPEATS:,}, or multiply to too much; make them smaller"
    return None


def match(pattern: str, text: str) -> tuple[int, int] | None:
    """(start, end) of what a pattern matches at the start of a text; None also where it fails or takes too long."""
    return _run("match", pattern, text)


def full_match(pattern: str, text: str) -> tuple[int, int] | None:
    """(start, end) of a text that a pattern matches as a whole; None as for `match`."""
    return _run("fullmatch", pattern, text)


def search(pattern: str, text: str) -> tuple[int, int] | None:
    """(start, end) of the first place that a pattern matches, whatever the case; None as for `match`."""
    return _run("search", pattern, text)


def find_all(pattern: str, text: str) -> list[tuple[int, int]]:
    """(start, end) of all places that a pattern matches, none within another; empty as `match` is None."""
    if pattern_error(pattern) is not None:
        return []
    try:
        return [found.span() for found in _compiled(pattern).finditer(text, timeout=SECONDS)]
    except (TimeoutError, MemoryError):
        _warn_once(pattern)
        return []


def _run(method: str, pattern: str, text: str) -> tuple[int, int] | None:
    if pattern_error(pattern) is not None:
        return None
    try:
        found = getattr(_compiled(pattern), method)(text, timeout=SECONDS)
    except (TimeoutError, MemoryError):
        _warn_once(pattern)
        return None
    span: tuple[int, int] | None = None if found is None else found.span()
    return span


@lru_cache(4096)
def _compiled(pattern: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of patterns whose meaning may change
        return regex.compile(pattern, _FLAGS)


@lru_cache(4096)
def _warn_once(pattern: str) -> None:
    """Warn once for each pattern."""
    logger.warning(
        "the pattern %.60r takes more than %g s or all memory in a text and counts as not found there", pattern, SECONDS
    )
