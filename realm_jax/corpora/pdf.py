"""Titles and paragraphs of PDF files, whose pages hold nothing but lines.

Lines become paragraphs again, across pages too, and we join words that were broken at line ends. We leave out only two
things: page numbers, and a running head or foot after its first page. Other repeated lines are uncertain: a table of
contents looks like a price list, and "Chapter 3" looks like "Turn valve 3". A scan without a text layer has no text,
because we do no OCR. Read `pdf_document` next.
"""

import re
from collections import Counter
from collections.abc import Iterator

from realm_jax.corpora.encodings import Notes
from realm_jax.corpora.markup import Plain
from realm_jax.data.lines import BadRecord

LINES_LEFT_OUT = "lines of PDF files left out"  # kind of note
_EDGE = 2  # lines at the top, and at the bottom, that may be running heads, feet and page numbers
_REPEATS = 3  # pages that prove a head, a foot or page numbers: two may agree by chance
_FULL = 0.8  # of the width of a page's lines: a paragraph ends in a shorter one
_PASSWORD = 4  # PDFium's FPDF_ERR_PASSWORD

_NUMERAL = r"(?P<number>\d{1,4}|[ivxlc]+)"
_TOTAL = r"(?:\W*(?:of|/)\W*\d{1,4})?"
_PAGE_NUMBER_STYLES = {
    "alone": re.compile(rf"\W*(?:[Pp]age\W*)?{_NUMERAL}{_TOTAL}\W*(?P<head>)"),
    "left of the head": re.compile(rf"{_NUMERAL}\s(?P<head>.+)"),
    "right of the head": re.compile(rf"(?P<head>.+?)\s{_NUMERAL}{_TOTAL}"),
}
_TENS = ("", "x", "xx", "xxx", "xl", "l", "lx", "lxx", "lxxx", "xc")
_ONES = ("", "i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix")
_ROMAN = {ten + unit: 10 * tens + units for tens, ten in enumerate(_TENS) for units, unit in enumerate(_ONES)}
_BULLET = re.compile(r"[•▪●■►◦‣–*\ue000-\uf8ff-]\s|\(?[0-9a-zA-Z]{1,2}[.)]\s")
_HEADING = re.compile(
    r"(?:\d+\.?)+\s+[A-Z]\S*(?:\s\S+){0,8}|(?:CHAPTER|APPENDIX|Chapter|Appendix|Part|PART)\s+\w+.{0,60}"
)
_BREAK = "\x02"  # at the end of a line whose last word PDFium takes for a broken one, in place of its hyphen
_PDFIUM_BREAK = re.compile("[\ufffe\x02](?:\r?\n)?|\xad\r?\n")
_LETTERS = r"[^\W\d_]+"
_COMPOUND = re.compile(rf"\b(?=({_LETTERS}-{_LETTERS}))")
_BROKEN_WORD = re.compile(rf"({_LETTERS})[-{_BREAK}]\n(?=({_LETTERS}))")
_HYPHEN_AT_LINE_END = re.compile(rf"(?<=\w)[-{_BREAK}]\n(?=\w)")
_CJK = "\u2e80-\u312f\u31a0-\u9fff\uf900-\ufaff\ufe30-\ufe4f\uff01-\uff9f\U00020000-\U0003ffff"  # without Hangul
_WIDE = re.compile(rf"[{_CJK}]")  # as wide as two Latin letters
_CJK_LINE_END = re.compile(rf"(?<=[{_CJK}])\n(?=[{_CJK}])")
_INVISIBLE = re.compile("[\x00\x01\x03-\x08\x0b\x0e-\x1f\x7f\xad\ufffe\uffff]")
_LIGATURES = str.maketrans({"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl"})


def pdf_document(data: bytes, notes: Notes) -> Plain:
    """Take the text of a PDF file. Its title is that of the file's properties if the first pages show it.

    Args:
        data: the file.
        notes: counts the lines that are left out.

    Raises:
        BadRecord: the file is encrypted or damaged, or has no text.
    """
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
        pages = [page.get_textpage().get_text_range() for page in document]
        title = document.get_metadata_dict().get("Title", "")
    except pypdfium2.PdfiumError as error:
        reason = "encrypted" if getattr(error, "err_code", 0) == _PASSWORD else "damaged .pdf files"
        raise BadRecord(str(error), "open it in a PDF viewer and save a copy without a password", reason) from None
    page_lines = []  # of each page, without blank ones
    for page in pages:
        visible = _INVISIBLE.sub("", _PDFIUM_BREAK.sub(f"{_BREAK}\n", page).translate(_LIGATURES))
        page_lines.append([words for line in visible.splitlines() if (words := " ".join(line.split()))])
    text = "\n\n".join(paragraphs(page_lines, notes))
    if not text:
        raise BadRecord(f"{len(pages)} pages without a text layer", "run OCR on it", "PDF files without text")
    # Titles that the document does not show are names of programs and templates.
    title_words, shown_words = (" ".join(re.findall(r"\w+", part.lower())) for part in (title, "".join(pages[:2])))
    is_shown = title_words and f" {title_words} " in f" {shown_words} "
    return Plain(" ".join(title.split()) if is_shown else "", text)


def paragraphs(pages: list[list[str]], notes: Notes) -> Iterator[str]:
    """Yield the paragraphs of a document, without page numbers and repeated heads.

    Args:
        pages: lines of each page.
        notes: counts the lines that are left out.
    """
    text = "\n".join("\n".join(lines) for lines in pages).lower()
    words, compounds = set(re.findall(_LETTERS, text)), set(_COMPOUND.findall(text))

    def join_word(broken_word: re.Match[str]) -> str:
        # A hyphen at the end of a line may be part of the word: remove it only if the document has the word without it.
        start, end = broken_word[1].lower(), broken_word[2].lower()
        is_hyphenation = start + end in words and f"{start}-{end}" not in compounds
        return broken_word[1] + ("" if is_hyphenation else "-")

    def join_lines(paragraph: list[str]) -> str:
        lines = _HYPHEN_AT_LINE_END.sub("-", _BROKEN_WORD.sub(join_word, "\n".join(paragraph)))
        return _CJK_LINE_END.sub("", lines).replace("\n", " ").replace(_BREAK, "-")

    paragraph: list[str] = []
    is_ended = True
    for lines in _without_furniture(pages, notes):
        widths = [len(line) + len(_WIDE.findall(line)) for line in lines]
        full_width = _FULL * sorted(widths)[len(lines) * 9 // 10] if lines else 0
        for line, width in zip(lines, widths, strict=True):
            begins = is_ended and not line[0].islower() or _BULLET.match(line) or _HEADING.fullmatch(line)
            if begins and paragraph and not paragraph[-1].endswith(_BREAK):
                yield join_lines(paragraph)
                paragraph = []
            paragraph.append(line)
            is_ended = width < full_width or _HEADING.fullmatch(line) is not None
    if paragraph:
        yield join_lines(paragraph)


def _without_furniture(pages: list[list[str]], notes: Notes) -> Iterator[list[str]]:
    """Yield the lines of every page, without page numbers and all but the first copy of running heads and feet."""
    removed: list[set[int]] = [set() for _ in pages]  # indices of lines
    seen_heads: set[str] = set()
    for is_top in (True, False):
        outer_pages = list(range(len(pages)))  # pages with only heads and page numbers between this depth and the edge
        for depth in range(_EDGE):
            indices = {n: depth if is_top else len(pages[n]) - 1 - depth for n in outer_pages if depth < len(pages[n])}
            edge_lines = {n: pages[n][index] for n, index in indices.items()}
            copies = Counter(edge_lines.values())
            side_copies = Counter((n % 2, line) for n, line in edge_lines.items())  # left and right pages may differ
            heads_by_run = {n: _heads_by_run(line, n) for n, line in edge_lines.items()}
            run_pages = Counter(run for heads in heads_by_run.values() for run in heads)
            runs = {run for run, count in run_pages.items() if count >= _REPEATS}
            styles = {(style, is_roman) for style, is_roman, _ in runs}
            # "Step 3" may be text. Page numbers are certain if they have a line of their own, or change sides.
            is_certain = len(styles) > 1 or any(style == "alone" for style, _ in styles)
            if not is_certain or 2 * sum(not runs.isdisjoint(heads) for heads in heads_by_run.values()) <= len(pages):
                runs = set()
            outer_pages = []
            for n, line in edge_lines.items():
                numbered_heads = [head for run, head in heads_by_run[n].items() if run in runs]
                is_on_most_pages = 2 * side_copies[n % 2, line] > len(pages[n % 2 :: 2])
                if numbered_heads or is_on_most_pages and copies[line] >= _REPEATS:
                    head = numbered_heads[0] if numbered_heads else line
                    has_body = len(pages[n]) > 2 * _EDGE  # of a slide with few lines all are at its edges
                    if not head or (has_body and head in seen_heads):
                        removed[n].add(indices[n])
                        notes[LINES_LEFT_OUT, "repeated heads and feet" if head else "page numbers"] += 1
                    seen_heads.add(head)
                    outer_pages.append(n)
    for lines, removed_indices in zip(pages, removed, strict=True):
        yield [line for index, line in enumerate(lines) if index not in removed_indices]


def _heads_by_run(line: str, page: int) -> dict[tuple[str, bool, int], str]:
    """Return the runs of page numbers that a line at the edge of a page may belong to.

    From (style, is Roman, index of the page with number 0) to the line without its number. No number is above the
    count of pages so far: 1984, 1985 and 1986 on the first three pages are years of a chronicle.
    """
    heads = {}
    for style, pattern in _PAGE_NUMBER_STYLES.items():
        if match := pattern.fullmatch(line):
            numeral = match["number"]
            number = int(numeral) if numeral.isdecimal() else _ROMAN.get(numeral, 0)
            if 0 < number <= page + 1:
                heads[style, numeral in _ROMAN, page - number] = match["head"]
    return heads
