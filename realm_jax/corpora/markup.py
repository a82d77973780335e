"""Titles and plain paragraphs of documents with markup: web pages, Markdown, reStructuredText, Word.

All become HTML first, of which one function keeps the words: a blank line stands between paragraphs, headings, list
items and rows of tables. The converters are libraries of the extra `documents`, imported where they are needed.
Not for files: read `realm_jax.corpora.documents` next. Not for PDF: see `pdf.py`.
"""

import codecs
import io
import re
import zipfile
from collections.abc import Iterator
from typing import Any, NamedTuple
from xml.etree import ElementTree

from realm_jax.data.records import BadRecord


class Plain(NamedTuple):
    """What a document says. title: empty where it names none."""

    title: str
    text: str


BINARY, ENCODING = "binary in place of text", "in no known encoding"
LARGEST_UNPACKED = 1 << 29  # bytes of the XML of a Word file
MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_DECLARED = re.compile(rb"""<meta[^>]+charset\s*=\s*["']?([\w-]+)""", re.IGNORECASE)
# Candidates for text that is not UTF-8. Of all that Python knows, rare ones win for short texts.
_ENCODINGS = "cp1252 cp1250 cp1251 cp1253 cp1254 koi8_r shift_jis euc_jp gb18030 big5 euc_kr".split()


def encoding_of(head: bytes) -> str:
    """The name of the encoding of a text by its beginning. Raises BadRecord for what is no text.

    A byte order mark decides, then whether it is UTF-8, then what a web page says of itself, then its letters.
    """
    for mark, name in MARKS.items():
        if head.startswith(mark):
            return name
    if b"\0" in head:
        raise BadRecord("it has NUL bytes", "remove it", BINARY)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
        return "utf-8"
    except UnicodeDecodeError:
        declared = _DECLARED.search(head[:4096])
    try:
        return codecs.lookup(declared[1].decode()).name if declared else _guessed(head)
    except LookupError:
        return _guessed(head)


def _guessed(head: bytes) -> str:
    try:
        import charset_normalizer
    except ImportError:
        raise BadRecord("it is not UTF-8", "save it as that, or pip install 'realm_jax[documents]'", ENCODING) from None
    whole = head.rpartition(b"\n")[0] or head  # behind the last line end a character may be cut
    found = list(charset_normalizer.from_bytes(whole, cp_isolation=_ENCODINGS))
    if not found:
        raise BadRecord("no known encoding fits", "save it as UTF-8", ENCODING)
    return str(max(found, key=lambda one: (-one.chaos, one.coherence, one.encoding == "cp1252")).encoding)


def decoded(data: bytes) -> str:
    """The text of a whole file; of pages that are not what they declare as browsers show it. Raises BadRecord."""
    return data.decode(encoding_of(data), "replace")


# --- HTML -------------------------------------------------------------------------------------------------------------

# Of HTML, and of what trafilatura makes of it.
_BLOCKS = frozenset(
    "address article aside blockquote body caption dd details div dl dt fieldset figcaption figure h1 h2 h3 h4 h5 h6 "
    "head header hr item legend li list main ol p pre quote section summary table tbody tfoot thead ul".split()
)
_NO_PROSE = frozenset("button footer iframe math nav noscript script select style svg template title".split())
_MAIN_PARTS = ("//article", "//main", "//*[@role='main']")  # each only where there is one of it
_PERMALINKS = frozenset("¶ # § 🔗 ↑".split())
_ROWS, _CELLS, _BREAKS = frozenset(("tr", "row")), frozenset(("td", "th", "cell")), frozenset(("br", "lb"))
_ROW, _CELL = "\0", "\1"  # stand between rows and cells until white space is in order
_SPACE, _LINES = re.compile(r"\s+"), re.compile(r"\n\s*\n")


def web_page(data: bytes) -> Plain:
    """A web page without the furniture around its text.

    What the page itself marks as its main part is taken whole; of other pages what trafilatura takes for it.
    """
    import trafilatura

    page = _tree(decoded(data))
    for parts in map(page.xpath, _MAIN_PARTS):
        if len(parts) == 1:
            return _plain(parts[0], page)
    found = trafilatura.bare_extraction(page, include_comments=False, favor_recall=True, with_metadata=False)
    return _plain(getattr(found, "body", page), page)


def _tree(text: str) -> Any:
    """The root of a page. An XML declaration may name an encoding, which text has no more. Raises BadRecord."""
    from lxml import etree, html

    try:
        page = html.document_fromstring(re.sub(r"^\s*<\?xml[^>]*>", "", text))
    except etree.ParserError:
        raise BadRecord("nothing on the page", "remove it", "without text") from None
    for link in page.xpath("//a"):
        if link.text_content().strip() in _PERMALINKS:
            link.drop_tree()
    return page


def _plain(part: Any, page: Any) -> Plain:
    """The words of a part of a page. Its title is its first heading; without one what the head of the page says."""
    headings = [*part.xpath(".//h1 | .//head[@rend='h1']"), *page.xpath("//head/title"), *page.xpath("//h1 | //h2")]
    titles = (" ".join(element.text_content().split()) for element in headings)
    cells = (row.split(_CELL) for row in "".join(_pieces(part)).split(_ROW))
    text = "\n\n".join(", ".join(filter(None, map(str.strip, row))) for row in cells)
    paragraphs = ("\n".join(" ".join(line.split()) for line in one.split("\n")) for one in _LINES.split(text))
    return Plain(next(filter(None, titles), ""), "\n\n".join(one.strip() for one in paragraphs if one.strip()))


def _pieces(root: Any) -> Iterator[str]:
    """The text of an element, in which line ends come from its structure alone."""
    from lxml import etree

    walk = etree.iterwalk(root, events=("start", "end", "comment", "pi"))
    for event, element in walk:
        is_start, tag = event == "start", element.tag
        if is_start and tag in _NO_PROSE:
            walk.skip_subtree()
        elif tag in _BLOCKS:
            yield "\n\n"
        elif is_start and tag in _BREAKS:
            yield "\n"
        elif tag in _ROWS:
            yield _ROW
        elif is_start and tag in _CELLS and element.getprevious() is not None:
            yield _CELL
        text = element.text if is_start and tag not in _NO_PROSE else element.tail if not is_start else ""
        if element is not root or is_start:
            yield _SPACE.sub(" ", text or "")


# --- Markdown, reStructuredText, Word ---------------------------------------------------------------------------------

_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n(?:---|\.\.\.)\s*?(?:\n|\Z)", re.DOTALL)
_ALERT = re.compile(r"^(>\s*)\[!\w+\]", re.MULTILINE)  # GitHub's notes: > [!TIP]
_TITLE_LINE = re.compile(r"^title\s*:\s*(.+)$", re.MULTILINE | re.IGNORECASE)


def markdown(data: bytes) -> Plain:
    """Markdown, with the title that its first lines between `---` may name."""
    from markdown_it import MarkdownIt

    text = _ALERT.sub(r"\1", decoded(data))
    front = _FRONT_MATTER.match(text)
    found = _of_html(MarkdownIt("commonmark").enable("table").render(text[front.end() :] if front else text))
    named = _TITLE_LINE.search(front[1]) if front else None
    return found._replace(title=named[1].strip().strip("\"'")) if named else found


def restructured_text(data: bytes) -> Plain:
    """reStructuredText. Of directives and roles that docutils does not know, such as Sphinx's, the text is kept."""
    from docutils.core import publish_parts

    text = decoded(data)
    _know_names_in(text)
    settings = dict[str, Any](report_level=5, halt_level=5, warning_stream=False, _disable_config=True)
    settings |= {"file_insertion_enabled": False, "raw_enabled": False, "math_output": "LaTeX"}
    return _of_html(publish_parts(text, writer="html5", settings_overrides=settings)["html_body"])


_DIRECTIVE = re.compile(r"^\s*\.\. (?:\|[^|\n]+\| )?([\w:+.-]+)::", re.MULTILINE)
_ROLE = re.compile(r":([\w:+.-]+):`")
_TARGET = re.compile(r"(?s)(?<=\S)\s*<[^<>]*>$")  # of `text <target>`
_CODE = frozenset(("code", "code-block", "sourcecode", "highlight", "prompt", "testcode"))
_LISTS_OF_NAMES = frozenset(("toctree", "autosummary"))


def _know_names_in(text: str) -> None:
    """Teach docutils the directives and roles that a text uses and that it does not know, or knows less well."""
    from docutils import nodes
    from docutils.parsers.rst import directives, languages, roles

    def words(role: str, raw: str, shown: str, *_: Any, **__: Any) -> tuple[list[Any], list[Any]]:
        return [nodes.inline(raw, _TARGET.sub("", shown).lstrip("~!"))], []

    known = languages.get_language("en")
    for name in {*_DIRECTIVE.findall(text)} - {*known.directives} | _CODE:
        directives.register_directive(name, _body_directive())
    for name in {*_ROLE.findall(text)} - {*known.roles}:
        roles.register_local_role(name, words)


def _body_directive() -> Any:
    """A directive whose arguments and paragraphs are text like any other."""
    from docutils import nodes
    from docutils.parsers.rst import Directive

    class Body(Directive):
        optional_arguments, final_argument_whitespace, has_content = 1, True, True
        option_spec = _AnyOption()

        def run(self) -> list[Any]:
            if self.name in _LISTS_OF_NAMES or not self.content:
                return []
            if self.name in _CODE:
                return [nodes.literal_block("", "\n".join(self.content))]
            element = nodes.container()
            self.state.nested_parse(self.content, self.content_offset, element)
            return [*(nodes.paragraph("", text) for text in self.arguments), element]

    return Body


class _AnyOption(dict[str, Any]):
    """Options of every name and value."""

    def __bool__(self) -> bool:
        return True

    def __missing__(self, _: str) -> Any:
        return lambda value: value


def word_document(data: bytes) -> Plain:
    """A Word file (.docx). Its title is a heading, or that of its properties. Raises BadRecord for a damaged one."""
    import mammoth

    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        if sum(entry.file_size for entry in packed.infolist()) > LARGEST_UNPACKED:
            raise BadRecord(f"it unpacks to more than {LARGEST_UNPACKED:,} bytes", "split it", "too large")
        has_properties = "docProps/core.xml" in packed.namelist()
        properties = ElementTree.fromstring(packed.read("docProps/core.xml")) if has_properties else None
    style = "p[style-name='Title'] => h1:fresh"
    no_images = mammoth.images.img_element(lambda _: {})
    found = _of_html(mammoth.convert_to_html(io.BytesIO(data), style_map=style, convert_image=no_images).value)
    named = None if properties is None else properties.findtext("{http://purl.org/dc/elements/1.1/}title")
    return found if found.title or not named else found._replace(title=" ".join(named.split()))


def _of_html(text: str) -> Plain:
    if not text.strip():
        return Plain("", "")
    page = _tree(text)
    return _plain(page, page)
