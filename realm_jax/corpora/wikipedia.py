"""Pages of the English Wikipedia to articles: which of them are kept, and which of their sections.

A pure function of a page: the same text in every process and version of a corpus. Not for reading dumps (see
`realm_jax.corpora.dumps`) nor for markup (`realm_jax.corpora.wikitext`). Read `article` next.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from realm_jax.corpora.dumps import Page
from realm_jax.corpora.outcomes import Article, FilteredRecord
from realm_jax.corpora.wiki_lines import GAP, one_line
from realm_jax.corpora.wiki_tables import DISAMBIGUATIONS
from realm_jax.corpora.wikitext import Note, Notes, plain, without_elements

# Why a page is not an article.
OTHER_NAMESPACE = "not in the namespace of articles"
REDIRECT = "redirect"
NOT_WIKITEXT = "not wikitext"
LIST = "list, index or outline"
DISAMBIGUATION = "disambiguation page"
EMPTY = "no text"

SECTION = "section left out"  # a kind of notes

# The pages that ORQA leaves out by title are those that begin like this.
_LISTS = ("List of ", "Index of ", "Outline of ")
_DISAMBIGUATION_TITLE = "(disambiguation)"
# Sections that hold references, links and titles of books rather than sentences, by what their headings say.
_SECTIONS = frozenset(
    "references/external links/external link/see also/further reading/notes/bibliography/footnotes/citations/sources"
    "/notes and references/references and notes/works cited/external sources/notes and citations/references and sources"
    "/sources and references/notes and sources/sources and further reading/references and further reading"
    "/bibliography and further reading/explanatory notes/general references/cited sources/gallery/image gallery".split(
        "/"
    )
)
_REDIRECT = re.compile(r"\s*#redirect\b", re.IGNORECASE)
_DISAMBIGUATION = re.compile(
    rf"\{{\{{\s*+(?:(?![^{{}}|\n]*needed)[^{{}}|\n]*disambig|(?:{DISAMBIGUATIONS.replace('/', '|')})\s*[|}}])"
    r"|__DISAMBIG__",
    re.IGNORECASE,
)
_HEADING = re.compile(r"^=.*$", re.MULTILINE)


class _Section(NamedTuple):
    """What follows a heading. level: 0 for the text above all headings, else 1 to 6."""

    level: int
    heading: str
    body: str


def article(page: Page, notes: Counter[Any] | None = None) -> Article | FilteredRecord:
    """The text of a page, or why it has none.

    Headings are paragraphs of their own; paragraphs are apart by blank lines. notes: templates, sections and elements
    that were left out, and markup that was fixed, are counted there. Time grows with the length of the page alone, and
    nothing that a page may hold raises.
    """
    notes = Counter() if notes is None else notes
    if page.namespace != 0:
        return FilteredRecord(OTHER_NAMESPACE, page.title)
    if page.redirect is not None or _REDIRECT.match(page.wikitext):
        return FilteredRecord(REDIRECT, page.title)
    if page.model != "wikitext":
        return FilteredRecord(NOT_WIKITEXT, page.title)
    if page.title.startswith(_LISTS):
        return FilteredRecord(LIST, page.title)
    wikitext = without_elements(page.wikitext, notes)
    if _DISAMBIGUATION_TITLE in page.title or _DISAMBIGUATION.search(wikitext):
        return FilteredRecord(DISAMBIGUATION, page.title)
    text = "\n\n".join(_paragraphs(wikitext, page.title, notes))
    return Article(page.id, page.title, text) if text else FilteredRecord(EMPTY, page.title)


def _paragraphs(wikitext: str, title: str, notes: Notes) -> Iterator[str]:
    """Headings and texts of the sections that are kept. A heading without text under it is left out."""
    waiting: list[tuple[int, str]] = []  # headings that no text came after yet
    dropped = 7  # the level of the section that is being left out
    for level, heading, body in _sections(wikitext):
        if level > dropped:
            continue
        dropped = 7
        name = one_line(plain(heading, title, notes))
        if name.lower().rstrip(":") in _SECTIONS:
            notes[Note(SECTION, name.lower().rstrip(":"))] += 1
            dropped = level
            continue
        waiting = [(other, above) for other, above in waiting if other < level]
        if name:
            waiting.append((level, name))
        text = plain(body, title, notes)
        if text:
            yield from (above for _, above in waiting)
            yield text
            waiting = []


def _sections(wikitext: str) -> Iterator[_Section]:
    """Wikitext cut at its headings."""
    level, heading, start = 0, "", 0
    for match in _HEADING.finditer(wikitext):
        line = match[0].strip(f" \t{GAP}")
        left, right = len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("="))
        marks = min(left, right, 6, (len(line) - 1) // 2)
        if marks > 0:
            yield _Section(level, heading, wikitext[start : match.start()])
            level, heading, start = marks, line[marks:-marks], match.end()
    yield _Section(level, heading, wikitext[start:])
