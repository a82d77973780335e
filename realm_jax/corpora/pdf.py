"""Titles and paragraphs of PDF files, whose pages hold nothing but lines.

What repeats at the edges of pages is left out, with page numbers and the dotted lines of tables of contents; lines
become paragraphs again, across pages too, and words that were broken at line ends are joined (PDFium marks these). A
scan without a layer of text has none: nothing here recognises letters. Read `pdf_document` next.
"""

import re
from collections import Counter
from collections.abc import Iterator

from realm_jax.corpora.markup import Plain
from realm_jax.data.records import BadRecord

_EDGE = 2  # lines at the top, and at the bottom, that may repeat from page to page
_REPEATS = 3  # pages that make a line furniture; in a document of two pages both
_FULL = 0.8  # of the width of a page's lines: a paragraph ends in a shorter one
_PASSWORD = 4  # PDFium's FPDF_ERR_PASSWORD

_NUMBER = re.compile(r"\d+")
_PAGE_NUMBER = re.compile(r"\W*(?:page\W*)?(?:\d{1,4}|[ivxlc]{1,7})\W*(?:(?:of|/)\W*\d{1,4}\W*)?", re.IGNORECASE)
_LEADERS = re.compile(r"(?:\. ?){4,}\W*\w*$")
_BULLET = re.compile(r"[•▪●■►◦‣–*\ue000-\uf8ff-]\s|\(?[0-9a-zA-Z]{1,2}[.)]\s")
_HEADING = re.compile(
    r"(?:\d+\.?)+\s+[A-Z]\S*(?:\s\S+){0,8}|(?:CHAPTER|APPENDIX|Chapter|Appendix|Part|PART)\s+\w+.{0,60}"
)
_BROKEN_WORD = re.compile("[\ufffe\x02](?:\r?\n)?")
_INVISIBLE = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f\ufffe\uffff]")
_LIGATURES = str.maketrans({"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl"})


def pdf_document(data: bytes) -> Plain:
    """A PDF file. Raises BadRecord for one that is encrypted or damaged, or has no text."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
        pages = [page.get_textpage().get_text_range() for page in document]
        named = document.get_metadata_dict().get("Title", "")
    except pypdfium2.PdfiumError as fault:
        reason = "encrypted" if getattr(fault, "err_code", 0) == _PASSWORD else "damaged .pdf files"
        raise BadRecord(str(fault), "open it and save it anew", reason) from None
    text = "\n\n".join(paragraphs([_lines(page) for page in pages]))
    if not text:
        raise BadRecord(f"{len(pages)} pages", "recognise its letters (OCR)", "PDF files without text")
    return Plain(_sensible_title(named, "".join(pages[:2])), text)


def _lines(page: str) -> list[str]:
    """The lines of a page that hold something."""
    whole = _INVISIBLE.sub("", _BROKEN_WORD.sub("", page).translate(_LIGATURES))
    return [line for line in (" ".join(one.split()) for one in whole.splitlines()) if line]


def _sensible_title(named: str, beginning: str) -> str:
    """The title that the file gives itself if the document shows it: others are names of programs and templates."""
    words, shown = (" ".join(re.findall(r"\w+", text.lower())) for text in (named, beginning))
    return " ".join(named.split()) if words and f" {words} " in f" {shown} " else ""


def paragraphs(pages: list[list[str]]) -> Iterator[str]:
    """Paragraphs of the lines of all pages, without what stands at the edges of many pages."""
    paragraph: list[str] = []
    is_ended = True
    for lines in _without_furniture(pages):
        width = sorted(map(len, lines))[len(lines) * 9 // 10] if lines else 0
        for line in lines:
            begins = is_ended and not line[0].islower() or _BULLET.match(line) or _HEADING.fullmatch(line)
            if begins and paragraph:
                yield " ".join(paragraph)
                paragraph = []
            paragraph.append(line)
            is_ended = len(line) < _FULL * width or _HEADING.fullmatch(line) is not None
    if paragraph:
        yield " ".join(paragraph)


def _without_furniture(pages: list[list[str]]) -> Iterator[list[str]]:
    """Pages without running heads and feet, page numbers and lines of a table of contents."""
    edges = Counter(key for lines in pages for key in {_key(line) for line in lines[:_EDGE] + lines[-_EDGE:]})
    needed = min(_REPEATS, max(2, len(pages)))
    for number, lines in enumerate(pages):
        kept = []
        for place, line in enumerate(lines):
            is_edge = min(place, len(lines) - 1 - place) < _EDGE
            is_repeated = number > 0 and edges[_key(line)] >= needed  # on the first page it may be the title
            is_furniture = is_edge and (is_repeated or _PAGE_NUMBER.fullmatch(line))
            if not is_furniture and not _LEADERS.search(line):
                kept.append(line)
        yield kept


def _key(line: str) -> str:
    """What is the same in a running head on all its pages."""
    return _NUMBER.sub("0", line)
