"""Pages of a MediaWiki XML dump (`pages-articles`): plain, `.gz` or `.bz2`, on this machine or in a bucket.

A dump is read in parts that need nothing of each other, so that many processes or machines can share one file. A part
is a range of bytes of a file, and the pages that begin in it belong to it. Plain XML is cut anywhere; a `.bz2` file
before any of its streams, which are found by their headers, so that the index of a multistream dump is not needed; of a
file with a single stream the first part has all pages. A `.gz` file is one part.

Pages are found by their tags, which no text can hold, and each is given to the XML parser by itself: what is broken in
one page does not reach the next, and no document type, so no entity of anybody's making, is ever parsed.
Not for what is on a page: read `realm_jax.corpora.wikipedia` next.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from realm_jax.corpora.outcomes import CorruptRecord
from realm_jax.corpora.ranges import CUT_OFF, UnpackedChunk, count_streams, is_splittable, read_range
from realm_jax.data.files import (
    UNPACKING_FAULTS,
    file_system,
    files_below,
    open_stored,
    open_unpacked,
    size_of,
    storage_errors,
)
from realm_jax.errors import UserError

PART_BYTES = 32 << 20  # of a file as it is stored: about 120 MB of XML
LARGEST_PAGE = 16 << 20  # bytes of XML; MediaWiki's limit is 2 MiB of text, of which escaping makes at most 12
SAMPLE = 120  # characters

NO_BEGINNING = "does not begin as a MediaWiki XML dump"
STRAY = "data between pages"
NO_END = "page without an end"
TOO_LARGE = "page is too large"
BROKEN_XML = "broken XML"
NOT_UTF8 = "not UTF-8"
NO_FIELD = "page without a title, id, namespace or revision"

_OPEN, _CLOSE, _ROOT, _END = b"<page>", b"</page>", b"<mediawiki", b"</mediawiki>"
_BEGINNING = 4096  # bytes in which the first tag stands
_TAIL = 64  # bytes that are kept of what is skipped: part of a tag, or the end of the dump
_BETWEEN = re.compile(
    rb"(?:\s++|<\?xml[^>]*+>|<mediawiki\b[^>]*+>|<siteinfo>.*?</siteinfo>|</mediawiki\s*+>)*+", re.DOTALL
)
_NUMBER = re.compile(r"-?[0-9]{1,6}")
_NOT_DUMPS = ("-rss.xml", ".partial")  # news about a dump, and what is still being written
# Wikimedia publishes a dump whole and in numbered files, each of them as one stream and as many.
_EDITION = re.compile(r"(?P<dump>.*?-pages-[a-z-]*?)(?P<streams>-multistream)?(?P<number>\d*)\.xml")


@dataclass(frozen=True, slots=True)
class Part:
    """The pages of a dump that begin in the bytes [start, stop) of a file as it is stored. `path` may be a URL."""

    path: str
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """A page as the dump has it. `redirect`: the title that it leads to; `where`: for a person who looks for it."""

    id: str
    title: str
    namespace: int
    redirect: str | None
    model: str
    wikitext: str
    where: str


def parts(source: str | os.PathLike[str], part_bytes: int = PART_BYTES) -> list[Part]:
    """What can be read independently of a dump: of a file, of a folder's files, or of those that a pattern names.

    The order is that of the names and of the places in a file. Only the beginnings of the files are read. Raises
    UserError when there are none or they cannot be read, and for a folder that holds the same dump twice.
    """
    files, root = file_system(str(source))
    found = []
    for path in _paths(files, root, str(source)):
        url = files.unstrip_protocol(path) if "://" in str(source) else path
        size = size_of(url)
        with open_stored(url) as stream:
            cuttable = is_splittable(stream.read(2))
        # The last part may be half as long again, so that none is much smaller than the others.
        cuts = list(range(0, max(size - part_bytes // 2, 1), part_bytes)) if cuttable else [0]
        found += [Part(url, start, stop) for start, stop in zip(cuts, [*cuts[1:], None], strict=True)]
    return found


def is_dump_folder(folder: str) -> bool:
    """Whether a folder has a file that begins as a dump does. A packed one that is damaged counts too."""
    names = [name for name in files_below(folder) if "/" not in name and _is_dump(name)]
    return any(_begins_as_dump(f"{folder.rstrip('/')}/{name}") for name in names)


def _begins_as_dump(path: str) -> bool:
    with open_unpacked(path) as stream:
        try:
            return _ROOT in stream.read(_BEGINNING)
        except UNPACKING_FAULTS:
            return True


def has_small_parts(path: str) -> bool:
    """Whether every part of a file holds about as much as its bytes say: not where one stream has all the pages."""
    if size_of(path) <= 2 * PART_BYTES:
        return True
    with open_stored(path) as stream:
        head = stream.read(PART_BYTES // 4)
    return is_splittable(head) and (not head.startswith(b"BZh") or count_streams(head) > 1)


def read_pages(part: Part) -> Iterator[Page | CorruptRecord]:
    """The pages of a part and the damaged places, in the order in which they were met.

    Behind damage reading goes on where that is possible: with the next page, or with the next stream of a `.bz2` file.
    Memory does not grow with the file. Raises UserError for a file that cannot be read at all.
    """
    return _Pages(part).read(read_range(part.path, part.start, part.stop))


def _paths(files: Any, root: str, source: str) -> list[str]:
    """The dump files that a source names."""
    with storage_errors(source):
        if files.isfile(root):
            return [root]
        if files.isdir(root):
            listed = [entry["name"] for entry in files.ls(root, detail=True) if entry["type"] == "file"]
            paths = [path for path in listed if _is_dump(path.rpartition("/")[2])]
        else:
            paths = [path for path in files.glob(root) if files.isfile(path)]
    if not paths:
        raise UserError(f"{source}: no dump files (*.xml, *.xml.gz, *.xml.bz2) there; check the path")
    _check_editions(paths, source)
    return sorted(paths)


def _is_dump(name: str) -> bool:
    return ".xml" in name and not name.startswith(".") and not name.endswith(_NOT_DUMPS)


def _check_editions(paths: list[str], source: str) -> None:
    """Raise UserError for a folder that has one dump in two ways of packing it."""
    editions: defaultdict[str, dict[tuple[bool, bool], str]] = defaultdict(dict)
    for path in sorted(paths):
        name = path.rpartition("/")[2]
        match = _EDITION.match(name)
        if match:
            editions[match["dump"]].setdefault((bool(match["streams"]), bool(match["number"])), name)
    for names in editions.values():
        if len(names) > 1:
            first, second, *_ = names.values()
            raise UserError(f"{source}: {first} and {second} hold the same pages; name one of them, or use a pattern")


class _Pages:
    """Cuts pages out of pieces of XML.

    data: what follows the last page. border: where in it the data of the next part begins. whole: `data` begins where
    a page ended, so that nothing but pages should follow; not behind damage, nor at the start of a later part.
    """

    def __init__(self, part: Part):
        self.part = part
        self.data, self.pages = b"", 0
        self.border: int | None = None
        self.whole, self.ended = part.start == 0, False

    def read(self, pieces: Iterator[UnpackedChunk | CorruptRecord]) -> Iterator[Page | CorruptRecord]:
        """Every page that begins before the border."""
        for piece in pieces:
            if isinstance(piece, CorruptRecord):
                if self.border is not None:  # reported by the part that it lies in
                    break
                yield piece
                self.data, self.whole = b"", False
                continue
            if not piece.own and self.border is None:
                self.border = len(self.data)
            self.data += piece.data
            while (found := self._next()) is not None:
                yield from found
            if self.ended:
                return
        yield from self._rest()

    def _next(self) -> list[Page | CorruptRecord] | None:
        """What lies before the next page, and the page; None when more must be read first."""
        start = self.data.find(_OPEN)
        if self.ended or start < 0:
            return None if self.ended else self._between_pages()
        if self.border is not None and start >= self.border:
            self.ended = True
            return self._stray(self.data[:start])
        end = self.data.find(_CLOSE, start)
        following = self.data.find(_OPEN, start + len(_OPEN), end if end >= 0 else len(self.data))
        if following >= 0:
            return self._take(
                start, following, CorruptRecord(self._place(), NO_END, _sample(self.data[start:following]))
            )
        if end >= 0:
            end += len(_CLOSE)
            return self._take(start, end, _page(self.data[start:end], self._place()))
        if len(self.data) - start <= LARGEST_PAGE:
            return None
        damage = CorruptRecord(self._place(), TOO_LARGE, _sample(self.data[start:]))
        found = self._take(start, len(self.data) - _TAIL, damage)
        self.whole = False
        return found

    def _take(self, start: int, end: int, page: Page | CorruptRecord) -> list[Page | CorruptRecord]:
        """Go on behind `end`."""
        found = [*self._stray(self.data[:start]), page]
        self.whole = True
        self.pages += 1
        self._pass(end)
        return found

    def _pass(self, end: int) -> None:
        self.data = self.data[end:]
        if self.border is not None:
            self.border = max(self.border - end, 0)

    def _between_pages(self) -> list[Page | CorruptRecord] | None:
        """Keep what may be needed of data without a page."""
        found: list[Page | CorruptRecord] = []
        if self.whole and len(self.data) > LARGEST_PAGE:
            found = self._stray(self.data)
            self.whole = False
        if not self.whole:
            self._pass(max(len(self.data) - _TAIL, 0))
        return found or None

    def _stray(self, data: bytes) -> list[Page | CorruptRecord]:
        """Damage for data before a page that is not what dumps begin or end with."""
        if not self.whole:
            return []
        if not self.pages and _ROOT not in data:
            return [CorruptRecord(self._place(), NO_BEGINNING, _sample(data))]
        known = _BETWEEN.match(data)
        rest = data[known.end() :] if known else data
        return [CorruptRecord(self._place(), STRAY, _sample(rest))] if rest else []

    def _rest(self) -> list[Page | CorruptRecord]:
        """Damage at the end of the file, reported by the part that has the last page."""
        start = self.data.find(_OPEN)
        if start >= 0 and (self.border is None or start < self.border):
            return [*self._stray(self.data[:start]), CorruptRecord(self._place(), CUT_OFF, _sample(self.data[start:]))]
        cut_off = self.whole and _END not in self.data
        return self._stray(self.data) or ([CorruptRecord(self._place(), CUT_OFF, "")] if cut_off else [])

    def _place(self) -> str:
        after = f" from byte {self.part.start:,}" if self.part.start else ""
        return f"{self.part.path}, page {self.pages + 1:,}{after}"


def _page(data: bytes, where: str) -> Page | CorruptRecord:
    """One `<page>` element; of several revisions the last one."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as fault:
        around = data[max(fault.start - SAMPLE // 2, 0) : fault.start + SAMPLE // 2]
        return CorruptRecord(where, NOT_UTF8, _sample(around))
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError as fault:
        number, column = fault.position
        line = b"".join(data.splitlines()[number - 1 : number])
        return CorruptRecord(where, BROKEN_XML, _sample(line[max(column - SAMPLE // 2, 0) :]))
    title, page_id, namespace = (root.findtext(name, "").strip() for name in ("title", "id", "ns"))
    revisions = root.findall("revision")
    if not (title and page_id and _NUMBER.fullmatch(namespace) and revisions):
        return CorruptRecord(where, NO_FIELD, _sample(data))
    redirect = root.find("redirect")
    return Page(
        id=page_id,
        title=title,
        namespace=int(namespace),
        redirect=None if redirect is None else redirect.get("title", ""),
        model=revisions[-1].findtext("model") or "wikitext",
        wikitext=revisions[-1].findtext("text") or "",
        where=where,
    )


def _sample(data: bytes) -> str:
    """The beginning of some bytes as one line that any terminal can show."""
    text = " ".join(data[: 4 * SAMPLE].decode("utf-8", "replace").split())[:SAMPLE]
    return "".join(character if character.isprintable() else "�" for character in text)
