"""Convert documents with markup to titles and plain paragraphs: web pages, Markdown, reStructuredText, Word.

A converter takes the bytes of a document and returns its title and text. `notes` counts omissions; BadRecord says that
the bytes are no text, or an empty page. Libraries of the extra `documents`, which we import only when they are needed,
convert Markdown, reStructuredText and Word to HTML. One function takes the words out of HTML, with a blank line between
paragraphs, headings, list items and rows of tables. We leave out text only if the page itself marks it as no content (a
script, a navigation bar), and count its words. Not for files: read `realm_jax.corpora.documents` next. Not for PDF: see
`pdf.py`.
"""

import io
import re
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from html import escape
from itertools import islice
from typing import Any, NamedTuple
from xml.etree import ElementTree

from realm_jax.corpora.encodings import Notes, decode
from realm_jax.data.lines import BadRecord


class Plain(NamedTuple):
    """A document without markup.

    Attributes:
        title: empty if the document has none.
        text: paragraphs with blank lines between them.
    """

    title: str
    text: str


_PROSE_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]{2}|[^\W\d_]{2,}")  # three of them are more than a name
LARGEST_UNPACKED = 1 << 29  # bytes of the XML of a Word file
WORDS_LEFT_OUT, KEYS_LEFT_OUT = "words of web pages left out", "keys of front matter left out"  # kinds of notes
UNKNOWN_ELEMENTS = "elements of Word files left out"


# --- HTML -------------------------------------------------------------------------------------------------------------

# Elements that no browser shows as text of the page, and copies of text: MathML repeats a formula as an annotation.
_NOT_SHOWN = ("script", "style", "template", "iframe", "rp")
_NOT_SHOWN_WITHIN = (
    "//svg//title | //svg//desc | //svg//metadata | //math//annotation | //math//*[name()='annotation-xml']"
    " | //*[contains(@class, 'katex')]/*[contains(@class, 'katex-html')]"
)
# Elements that a page marks as furniture: https://www.w3.org/TR/html-aam-1.0/ says that a footer is that of the page
# unless it is within one of these.
_SECTIONS = ("article", "aside", "blockquote", "details", "dialog", "fieldset", "figure", "li", "main", "section", "td")
_IS_OF_PAGE = f"not({' or '.join(f'ancestor::{name}' for name in _SECTIONS)})"
_HAS_NO_CONTENT = "not(.//main or .//article or .//h1)"
_FURNITURE = {
    "navigation": f"//nav[{_HAS_NO_CONTENT}] | //*[@role='navigation'][{_HAS_NO_CONTENT}]",
    "footers": f"(//footer[{_IS_OF_PAGE}] | //*[@role='contentinfo'])[{_HAS_NO_CONTENT}]",
    "choices of forms": "//select | //datalist",
}
# A list whose id or class is one of these is navigation, too, if it has only links.
_NAVIGATION_NAMES = frozenset("breadcrumb breadcrumbs nav navbar navigation pagination".split())
_MAIN = "//main | //*[@role='main']"
_BLOCKS = frozenset(
    "address article aside blockquote body button caption center dd details dialog dir div dl dt fieldset figcaption "
    "figure footer form h1 h2 h3 h4 h5 h6 header hgroup hr legend li main menu nav ol optgroup option p pre search "
    "section summary table tbody textarea tfoot thead ul xmp".split()
)
_LINES_COUNT = frozenset(("pre", "textarea", "listing", "xmp"))
_PERMALINKS = frozenset("¶ # § 🔗 ↑".split())
_LINKS_TO_HEADINGS = (
    "//a[ancestor::h1 or ancestor::h2 or ancestor::h3 or ancestor::h4 or ancestor::h5 or ancestor::h6 or ancestor::dt"
    " or ancestor::caption or ancestor::p[@class='caption'] or contains(@class, 'headerlink')]"
)
_CHARACTER_DATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)
_TAG = re.compile(r"(?is)<(script|style)\b.*?</\1\s*>|<!--.*?-->|<[a-z/!][^<>]*>")
_END_OF_PAGE = re.compile(r"</(?:body|html)\s*>", re.IGNORECASE)  # behind which the parser would stop
# They mark ends of rows, cells and item numbers until white space is normalized; no text has them.
_ROW, _CELL, _NUMBER_END = "\x02", "\x01", "\x03"
_CONTROL = re.compile("[\x01-\x03]")
_SPACE, _SPACE_IN_LINE, _BLANK_LINE = re.compile(r"\s+"), re.compile(r"[^\S\n]+"), re.compile(r"\n\s*\n")


def web_page(data: bytes, notes: Notes) -> Plain:
    """Take the text of a web page, without navigation and footer, which the page itself marks as such.

    If the page marks its main part, and that has most of the words that are no links, we leave out the rest, too.

    Args:
        data: the page.
        notes: counts replaced bytes and words that are left out.

    Raises:
        BadRecord: the bytes are no text, or the page is empty.
    """
    text = decode(data, notes, is_page=True)
    page, removed = _tree(text), Notes()
    page_words = _words(page)
    for kind, path in _FURNITURE.items():
        _remove(page, page.xpath(path), kind, removed)
    _remove(page, filter(_is_named_navigation, page.xpath("//div | //ul | //ol | //p")), "navigation", removed)
    if not _words(page) and page_words:  # the page marks all of itself, so the marks mean nothing
        page, removed = _tree(text), Notes()
    main = _outermost(page.xpath(_MAIN))
    if sum(map(_unlinked_words, main)) * 2 > _unlinked_words(page):
        # The heading of a page is often before its main part, with a first paragraph.
        headings = [] if any(part.xpath(".//h1") for part in main) else page.xpath("//h1")
        around_main = {ancestor for part in main for ancestor in part.iterancestors()}
        heads = [h1 if h1.getparent() in around_main else h1.getparent() for h1 in headings]
        parts = [*_outermost(list(dict.fromkeys(heads))), *main]
        removed[WORDS_LEFT_OUT, "outside of the main part"] += _words(page) - sum(map(_words, parts))
    else:
        parts = [page]
    notes.update(+removed)
    return _plain(parts, page)


def _words(element: Any) -> int:
    return len("".join(_pieces(element)).split())


def _unlinked_words(element: Any) -> int:
    return _words(element) - sum(map(_words, element.iter("a")))


def _is_named_navigation(element: Any) -> bool:
    names = f"{element.get('id', '')} {element.get('class', '')}".lower().split()
    has_heading = element.xpath("boolean(.//h1 or .//h2 or .//h3 or .//h4 or .//h5 or .//h6)")
    return not _NAVIGATION_NAMES.isdisjoint(names) and not has_heading and not _unlinked_words(element)


def _outermost(elements: list[Any]) -> list[Any]:
    """Return the elements that are not within others of the list."""
    listed = set(elements)
    return [element for element in elements if listed.isdisjoint(element.iterancestors())]


def _remove(page: Any, elements: Iterable[Any], kind: str, removed: Notes) -> None:
    """Remove elements from their page, and count their words."""
    for element in elements:
        if page in element.iterancestors():  # not within an element that is gone already
            removed[WORDS_LEFT_OUT, kind] += _words(element)
            element.drop_tree()


def _tree(text: str) -> Any:
    """Parse a page, without elements that are not shown. Raises BadRecord if nothing is on it."""
    from lxml import etree, html

    parser = html.HTMLParser(huge_tree=True)  # otherwise the parser stops at 256 levels
    # An XML declaration may name an encoding, which is wrong for decoded text.
    text = re.sub(r"^\s*<\?xml[^>]*>", "", _CONTROL.sub(" ", text))
    text = _END_OF_PAGE.sub("", _CHARACTER_DATA.sub(lambda data: escape(data[1]), text))
    try:
        page = html.document_fromstring(text, parser=parser)
        if any("depth" in entry.message for entry in parser.error_log):  # the parser stops at about 2,000 levels
            page = html.document_fromstring(_TAG.sub("<br>", text), parser=html.HTMLParser(huge_tree=True))
    except etree.ParserError:
        raise BadRecord("nothing on the page", "remove it", "without text") from None
    for formula in page.xpath("//script[starts-with(@type, 'math/')]"):
        formula.tag = "span"
    etree.strip_elements(page, *_NOT_SHOWN, etree.Comment, etree.ProcessingInstruction, with_tail=False)
    for element in page.xpath(_NOT_SHOWN_WITHIN):
        element.drop_tree()
    for link in page.xpath(_LINKS_TO_HEADINGS):
        if link.text_content().strip() in _PERMALINKS:
            link.drop_tree()
    return page


def _plain(parts: list[Any], page: Any) -> Plain:
    """Return the words of some parts of a page. The title is their first heading, or else that of the page's head."""
    headings = [heading for part in parts for heading in part.xpath(".//h1")]
    headings += [*page.xpath("//head/title"), *page.xpath("//h1 | //h2")]
    titles = (" ".join(element.text_content().split()) for element in headings)
    words = re.sub(rf"{_NUMBER_END}\s*", " ", "\n\n".join("".join(_pieces(part)) for part in parts))
    rows = words.split(_ROW)
    text = "\n\n".join(", ".join(cell.strip() for cell in row.split(_CELL) if cell.strip()) for row in rows)
    paragraphs = ("\n".join(" ".join(line.split()) for line in part.split("\n")) for part in _BLANK_LINE.split(text))
    return Plain(next(filter(None, titles), ""), "\n\n".join(filter(None, map(str.strip, paragraphs))))


def _pieces(root: Any) -> Iterator[str]:
    """Yield the text of an element. Line ends come from its structure, and from the text within `pre`."""
    from lxml import etree

    depth = 0  # of elements whose line ends count
    walk = etree.iterwalk(root, events=("start", "end"))
    for event, element in walk:
        is_start, tag = event == "start", element.tag
        if is_start and tag == "head":
            walk.skip_subtree()
        if tag in _LINES_COUNT:
            depth += 1 if is_start else -1
        if tag in _BLOCKS:
            yield "\n\n"
        elif is_start and tag == "br":
            yield "\n"
        elif is_start and tag == "img" and len(_PROSE_WORD.findall(element.get("alt", ""))) >= 3:
            yield f" {element.get('alt')} "
        elif tag == "rt":  # pronunciation of the characters before it
            yield "(" if is_start else ")"
        elif isinstance(tag, str) and "-" in tag:  # an element of the page's own, perhaps a block
            yield " "
        elif tag == "tr":
            yield _ROW
        elif is_start and tag in ("td", "th") and element.getprevious() is not None:
            yield _CELL
        if is_start and tag == "li" and (number := _item_number(element)):
            yield f"{number}{_NUMBER_END}"
        if is_start or element is not root:
            yield (_SPACE_IN_LINE if depth else _SPACE).sub(" ", (element.text if is_start else element.tail) or "")


def _item_number(item: Any) -> str:
    """Return the number of an item, which may be a year or an initial, if its list has letters or begins after 1."""
    parent = item.getparent()
    if parent is None or parent.tag != "ol":
        return ""
    start, index = parent.get("start", "1"), len([*item.itersiblings("li", preceding=True)])
    style = parent.get("class", "")
    if "alpha" in style and start.isdecimal() and int(start) + index <= 26:
        letter = chr(ord("a") - 1 + int(start) + index)
        return f"{letter.upper() if 'upper' in style else letter}."
    if "upperroman" in style and index == 0 and len(parent) == 1:
        return "I."
    return f"{int(start) + index}." if start.isdecimal() and int(start) > 1 else ""


# --- Markdown ---------------------------------------------------------------------------------------------------------

# Front matter: the first line is `---` (YAML, as of Jekyll) or `+++` (TOML, as of Hugo), and no blank line follows.
_FRONT_MATTER = re.compile(
    r"\A(?P<mark>---|\+\+\+)[^\S\n]*\n(?P<keys>\S.*?)\n(?:(?P=mark)|\.\.\.)[^\S\n]*(?:\n|\Z)", re.DOTALL
)
_ALERT = re.compile(r"^(>\s*)\[!\w+\]", re.MULTILINE)  # GitHub's notes: > [!TIP]

# Markup of HTML within Markdown; other text in angle brackets is words: <placeholder>, a<b and c>d.
_HTML = re.compile(
    r"""(?P<gone><!--.*?-->                                            # a comment
      |  <(?P<code>script|style)\b[^<>]*>(?:[^\S\n]*\n.*?)?\s*</(?P=code)\s*>   # whose first line holds nothing else
      |  <(?P<empty>iframe|object|noscript)\b[^<>]*>\s*</(?P=empty)\s*>)
      | </?(?P<name>[a-z][a-z0-9]*)
        (?P<attributes>(?:\s+[\w:@.-]+(?:\s*=\s*(?:"[^"]*"|'[^']*'|[^\s"'=<>`]+))?)*)\s*/?>""",
    re.DOTALL | re.VERBOSE | re.IGNORECASE,
)
_ATTRIBUTE = re.compile(r"""([\w:@.-]+)(\s*=\s*(?:"[^"]*"|'[^']*'|[^\s"'=<>`]+))?""")
_FLAGS = frozenset(
    "allowfullscreen async autoplay checked controls default defer disabled hidden loop muted nowrap open "
    "playsinline readonly required reversed selected".split()
)  # attributes without a value
_ALWAYS_MARKUP = frozenset(("br", "wbr"))
_BLOCK_MARKUP = frozenset("dd dt hr li p tbody td th thead tr".split())  # that need no end at the beginning of a line
_WITHOUT_CONTENT = frozenset("col img input link meta source".split())  # markup if they have attributes
_WITH_END = frozenset(  # markup if the document has their end as well
    "a abbr address article aside audio b blockquote caption center cite code colgroup del details dfn div dl em "
    "fieldset figcaption figure font footer form h1 h2 h3 h4 h5 h6 header i ins kbd label li main mark nav ol p "
    "picture pre q rp rt ruby s samp section small span strike strong sub summary sup svg table tfoot tt u ul var "
    "video".split()
)
_LINK_TARGET = re.compile(r"(\[[^\]\n]+\]):\s*(<[^>\n]*>|\S+)")
_ADDRESS = re.compile(r"<?(?:\w+:|[/#.])\S|<?[\w-]+(?:\.\w+)+[/#?>]?")
_DELIMITER_ROW = re.compile(r"\|?(?:\s*:?-+:?\s*\|?)+")
# Blocks of HTML that end at a mark, by CommonMark 4.6; all others end at a blank line.
_BEGIN = re.compile(r"<(?:(script\b|style\b|pre\b|textarea\b)|(!--)|(\?)|(!\[CDATA\[)|(![a-z]))", re.IGNORECASE)
_ENDS = ("", r"</(?:script|style|pre|textarea)>", "-->", r"\?>", r"\]\]>", ">")


def markdown(data: bytes, notes: Notes) -> Plain:
    """Take the text of a Markdown document. Its title is that of the front matter, otherwise the first heading.

    Args:
        data: the document.
        notes: counts replaced bytes and keys of front matter that are left out.

    Raises:
        BadRecord: the bytes are no text.
    """
    text = decode(data, notes).replace("\r\n", "\n")
    front = _FRONT_MATTER.match(text)
    keys = _front_matter(front["mark"], front["keys"]) if front else None
    if front and keys is not None:
        text = text[front.end() :]
    plain = _of_html(_markdown_to_html(_ALERT.sub(r"\1", text)))
    # Front matter may have sentences that the document does not repeat.
    title, prose = "", list[str]()
    for key, value in (keys or {}).items():
        strings = _strings(value)
        if str(key).lower() == "title" and isinstance(value, str):
            title = " ".join(strings[0].split())
        elif any(len(_PROSE_WORD.findall(text)) >= 3 for text in strings):  # a description, a summary, a note
            prose += [f"{key}: {' '.join(text.split())}" for text in strings]
        else:
            notes[KEYS_LEFT_OUT, str(key)] += 1
    return Plain(title or plain.title, "\n\n".join(filter(None, [*prose, plain.text])))


def _strings(value: Any) -> list[str]:
    """Return all strings in a value of front matter."""
    if isinstance(value, dict | list):
        return [text for part in (value.values() if isinstance(value, dict) else value) for text in _strings(part)]
    # YAML may spell a character as two halves, as JSON does.
    return [value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")] if isinstance(value, str) else []


def _front_matter(mark: str, text: str) -> dict[Any, Any] | None:
    """Return the keys of front matter; None if it is text: a rule, a line of prose, a rule."""
    import yaml

    try:
        # BaseLoader makes strings of all values, so that a title may be a number or a date.
        keys = tomllib.loads(text) if mark == "+++" else yaml.load(text, yaml.BaseLoader)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, RecursionError):
        return None
    return keys if isinstance(keys, dict) else None


def _markdown_to_html(text: str) -> str:
    """Convert Markdown to HTML, in which only real tags are markup. The inner functions are rules of the parser."""
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import html_block, reference, table
    from markdown_it.rules_block.table import escapedSplit

    ended = {name.lower() for name in re.findall(r"</([A-Za-z][A-Za-z0-9]*)\s*>", text)}

    def render_html(self: Any, tokens: Any, index: int, *_: Any) -> str:
        # Escape the tags that are words.
        html: str = tokens[index].content
        is_block, parts, end = tokens[index].type == "html_block", list[str](), 0
        for tag in _HTML.finditer(html):
            shown = tag[0] if is_markup(tag, is_block) else escape(tag[0], quote=False)
            parts += [_escaped(html[end : tag.start()]), shown]
            end = tag.end()
        return "".join([*parts, _escaped(html[end:])])

    def is_markup(tag: re.Match[str], is_block: bool) -> bool:
        if tag["gone"]:
            return True
        name, attributes = tag["name"].lower(), _ATTRIBUTE.findall(tag["attributes"])
        if any(not value and attribute.lower() not in _FLAGS for attribute, value in attributes):
            return False  # "a<b and c>d" has an element b with attributes by the letter
        if name in _WITHOUT_CONTENT:
            return bool(attributes)
        if name in _ALWAYS_MARKUP or (is_block and name in _BLOCK_MARKUP):
            return True
        return name in ended and name in _WITH_END | _BLOCK_MARKUP

    def closed_block(state: Any, line: int, end_line: int, silent: bool) -> bool:
        # Parse a block of HTML, unless it would go to the end of the document because nothing ends it.
        begin = state.bMarks[line] + state.tShift[line]
        if (opening := _BEGIN.match(state.src, begin)) and not re.compile(_ENDS[opening.lastindex or 0], re.I).search(
            state.src, begin, state.eMarks[end_line - 1]
        ):
            return False
        return html_block(state, line, end_line, silent)

    def full_table(state: Any, line: int, end_line: int, silent: bool) -> bool:
        # Parse a table, unless a row has more cells than the first one, because the parser would drop them.
        rows = []
        delimiters = state.getLines(line + 1, line + 2, 0, False) if line + 1 < end_line else ""
        if not _DELIMITER_ROW.fullmatch(delimiters.strip("> \t\n")):
            return False
        for number in range(line, end_line):
            if state.is_code_block(number) or not (row := state.getLines(number, number + 1, 0, False).strip()):
                break
            rows.append(len(escapedSplit(row.strip("|"))))
        return max(rows, default=0) <= rows[0] and table(state, line, end_line, silent) if rows else False

    def link_target(state: Any, line: int, end_line: int, silent: bool) -> bool:
        # Parse the target of a link such as `[1]: https://x.org`, unless it is words: `[Status]: done/released`.
        target = _LINK_TARGET.match(state.src, state.bMarks[line] + state.tShift[line])
        is_used = target is not None and text.lower().count(target[1].lower()) > 1
        if target is None or not (is_used or _ADDRESS.match(target[2])):
            return False
        return reference(state, line, end_line, silent)

    parser = MarkdownIt("commonmark", {"maxNesting": 200}).enable("table").enable("strikethrough")
    parser.block.ruler.at("html_block", closed_block, {"alt": ["paragraph", "reference", "blockquote"]})
    parser.block.ruler.at("table", full_table, {"alt": ["paragraph", "reference"]})
    parser.block.ruler.at("reference", link_target)
    parser.add_render_rule("html_block", render_html)
    parser.add_render_rule("html_inline", render_html)
    return str(parser.render(text))


def _escaped(html: str) -> str:
    """Escape text between tags, in which `<` is a character and entities stay."""
    return html.replace("<", "&lt;").replace(">", "&gt;")


# --- reStructuredText -------------------------------------------------------------------------------------------------

_DIRECTIVE = re.compile(r"^\s*\.\. (?:\|[^|\n]+\| )?([\w:+.-]+)::", re.MULTILINE)
_ROLE = re.compile(r":([\w:+.-]+):`")
_TARGET = re.compile(r"(?s)(?<=\S)\s+<[^<>]*>$")  # of `text <target>`
_OPTION = re.compile(r":([\w-]+):(?:\s+(.*))?$")
# Slips that would make a comment of a directive: `.. note::Text` and `.. note:`.
_SLIPS = re.compile(
    r"^(\s*\.\. (?:[\w+.-]+:)*[\w+.-]*\w::)(?=[^\s:])"
    r"|^(\s*\.\. (?:attention|caution|danger|deprecated|error|hint|important|note|seealso|tip|todo|versionadded"
    r"|versionchanged|warning):)(?=\s)",
    re.MULTILINE,
)
# Roles whose text may end with `<target>`.
_REFERENCES = frozenset(
    "any attr class const data doc download envvar exc func keyword meth mod numref obj option ref term token "
    "type".split()
)
_CODE = frozenset("code code-block doctest prompt sourcecode testcode testoutput testsetup".split())
# Directives whose words no reader sees: settings and names of files. They may have a body, or a caption.
_SETTINGS = frozenset(
    "currentmodule default-domain default-role highlight include literalinclude py:currentmodule rst-class "
    "tabularcolumns".split()
)
_SETTING_OPTIONS = frozenset(
    "align class dedent diff emphasize-lines encoding end-at end-before exclude-members figclass figwidth force format "
    "group height hidden inherited-members label language lineno-start lines linenos maxdepth member-order members "
    "module name nowrap number-lines options platform pyobject scale start-after start-at sync target template toctree "
    "width".split()
)
_OWN_DIRECTIVES = _CODE | _SETTINGS | {"class", "index"}  # docutils knows some of them as something else
_ERROR = 3  # docutils' level of text that it cannot read; text that it reads in spite of an error has a lower one


def restructured_text(data: bytes, notes: Notes) -> Plain:
    """Take the text of a reStructuredText document.

    All words of directives and roles that docutils does not know, such as those of Sphinx, are text. Markup that
    docutils cannot read, such as a malformed table, stays as it is written.

    Args:
        data: the document.
        notes: counts replaced bytes.

    Raises:
        BadRecord: the bytes are no text.
    """
    from docutils import nodes
    from docutils.core import publish_doctree, publish_from_doctree

    text = _SLIPS.sub(lambda slip: f"{slip[1]} " if slip[1] else f"{slip[2]}:", decode(data, notes))
    _know_names_in(text)
    # A document must not read other files, and a user's configuration must not change the corpus.
    settings = dict[str, Any](report_level=1, halt_level=5, warning_stream=False, _disable_config=True)
    settings |= {"file_insertion_enabled": False, "raw_enabled": True, "math_output": "LaTeX"}
    settings |= {"line_length_limit": len(text) + 1}  # docutils would read no line of a document with a longer one
    document = publish_doctree(text, settings_overrides=settings)
    for classifier in document.findall(nodes.classifier):
        classifier.insert(0, nodes.Text(" : "))  # which HTML leaves to a style sheet
    for section in document.findall(nodes.section):
        if "system-messages" in section["classes"]:
            section.pop(0)  # its title
    # Replace each error message by the source text that docutils could not read.
    for message in list(document.findall(nodes.system_message)):
        unread = list(message.findall(nodes.literal_block)) if message["level"] >= _ERROR else []
        message.parent.replace(message, unread)
    document.parse_messages, document.transform_messages = [], []
    settings["output_encoding"] = "unicode"
    html = publish_from_doctree(document, writer="html5", settings_overrides=settings)
    return _of_html("<body" + html.partition("<body")[2])  # its head says "<string>"


def _know_names_in(text: str) -> None:
    """Teach docutils the directives and roles that a text uses and that it does not know, or knows less well."""
    from docutils import nodes
    from docutils.parsers.rst import directives, languages, roles

    def words_of_role(role: str, raw: str, shown: str, *_: Any, **__: Any) -> tuple[list[Any], list[Any]]:
        is_reference = role.rpartition(":")[2] in _REFERENCES and not role.startswith(("c:", "cpp:"))
        return [nodes.inline(raw, _TARGET.sub("", shown).lstrip("~!") if is_reference else shown)], []

    known = languages.get_language("en")
    for name in {name.lower() for name in _DIRECTIVE.findall(text)} - {*known.directives} | _OWN_DIRECTIVES:
        directives.register_directive(name, _any_directive())
    for name in {name.lower() for name in _ROLE.findall(text)} - {*known.roles}:
        roles.register_local_role(name, words_of_role)


def _any_directive() -> Any:
    """Make a directive of any name whose words are text: on its line, below it, and in options that a reader sees."""
    from docutils import nodes
    from docutils.parsers.rst import Directive

    class AnyDirective(Directive):
        has_content = True  # and no arguments, for which docutils would take all lines up to the first blank one

        def run(self) -> list[Any]:
            if self.name == "index" or not self.content:
                return []
            has_line = bool(self.block_text.split("\n")[0].partition("::")[2].strip())
            lines, body = ([self.content[0]], self.content[1:]) if has_line else ([], self.content)
            # Options are lines `:name: value`, and their values may continue on indented lines.
            options = 0  # lines of them
            while options < len(body) and (option := _OPTION.match(body[options])):
                value = [option[2] or ""]
                options += 1
                while options < len(body) and body[options][:1].isspace():
                    value.append(body[options].strip())
                    options += 1
                if option[1] not in _SETTING_OPTIONS and any(value):
                    lines.append(" ".join(value))
            body = body[options:]
            if self.name in _SETTINGS:
                lines = lines[1 if has_line else 0 :]
            if self.name in _CODE and has_line and " " not in lines[0] and any(body):
                del lines[0]  # the language
            if self.name == "toctree":  # of whose entries a reader sees the titles
                lines, body = [*lines, *(_TARGET.sub("", entry) for entry in body if "<" in entry)], body[:0]
            if self.name in _CODE:
                return [*(nodes.paragraph("", line) for line in lines), nodes.literal_block("", "\n".join(body))]
            element = nodes.container()
            if has_line and not options and self.name != "toctree" and self.name not in _SETTINGS:
                body, lines = self.content, []  # the line may go on below
            for line in lines:
                inlines, _ = self.state.inline_text(line, self.lineno)
                element += nodes.paragraph("", "", *inlines)
            self.state.nested_parse(body, self.content_offset, element)
            return [element]

    return AnyDirective


# --- Word -------------------------------------------------------------------------------------------------------------

_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
_COMPATIBILITY = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
_WITH_TEXT = re.compile(r"word/(?:document|footnotes|endnotes)\d*\.xml")
_WRAPPERS = tuple(f"{_WORD}{name}" for name in ("fldSimple", "customXml", "dir", "bdo", "moveTo", "ruby", "rubyBase"))


def word_document(data: bytes, notes: Notes) -> Plain:
    """Take the text of a Word file (.docx). Its title is a heading, otherwise that of the file's properties.

    Args:
        data: the file.
        notes: counts elements that are left out.

    Raises:
        BadRecord: the file is too large.
    """
    import mammoth

    # Word files are zip archives; check the size before we unpack one.
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        if sum(entry.file_size for entry in packed.infolist()) > LARGEST_UNPACKED:
            raise BadRecord(f"it unpacks to more than {LARGEST_UNPACKED:,} bytes", "split it", "too large")
        parts = {name: packed.read(name) for name in packed.namelist() if not name.endswith("/")}
    with zipfile.ZipFile(target := io.BytesIO(), "w") as packed:
        for name, content in parts.items():
            packed.writestr(name, _readable(content) if _WITH_TEXT.fullmatch(name) else content)
    # Pictures have no text; a paragraph in the style "Title" is the first heading.
    style = "p[style-name='Title'] => h1:fresh"
    no_images = mammoth.images.img_element(lambda _: {})
    result = mammoth.convert_to_html(target, style_map=style, convert_image=no_images)
    messages = "\n".join(message.message for message in result.messages)
    for unknown in re.findall(r"unrecognised element was ignored: (\S+)", messages):
        notes[UNKNOWN_ELEMENTS, unknown] += 1
    plain, properties = _of_html(result.value), parts.get("docProps/core.xml")
    if plain.title or properties is None:
        return plain
    title = ElementTree.fromstring(properties).findtext("{http://purl.org/dc/elements/1.1/}title") or ""
    return plain._replace(title=" ".join(title.split()))


def _readable(xml: bytes) -> bytes:
    """Rewrite a part of a Word file so that mammoth reads formulas, text boxes and text in elements that it ignores."""
    from lxml import etree

    root = etree.fromstring(xml, etree.XMLParser(resolve_entities=False, huge_tree=True))
    for formula in list(root.iter(f"{_MATH}oMath")):
        run = etree.Element(f"{_WORD}r")
        etree.SubElement(run, f"{_WORD}t").text = f" {_formula(formula)} "
        run.tail = formula.tail
        formula.getparent().replace(formula, run)
    for box in list(root.iter(f"{_WORD}txbxContent")):
        # mammoth reads text boxes of old versions of Word, which newer ones write as well, as a fallback.
        around = [ancestor.tag for ancestor in box.iterancestors()]
        alternatives = box.iterancestors(f"{_COMPATIBILITY}AlternateContent")
        has_fallback = any(choice.find(f"{_COMPATIBILITY}Fallback") is not None for choice in alternatives)
        if not has_fallback and f"{_WORD}pict" not in around:
            for paragraph in islice(box.iterancestors(f"{_WORD}p"), 1):
                for content in reversed(box):
                    paragraph.addnext(content)
    for line_break in root.iter(f"{_WORD}cr"):
        line_break.tag = f"{_WORD}br"
    etree.strip_elements(root, f"{_WORD}rt", with_tail=False)  # pronunciation of the characters of a ruby
    etree.strip_tags(root, *_WRAPPERS, f"{_MATH}oMathPara")
    return bytes(etree.tostring(root))


def _formula(element: Any) -> str:
    """Write a formula of Word as one line, such as (x+1)/(y+2)."""
    name = element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""
    if name == "t":
        return element.text or ""
    if name.endswith("Pr"):  # properties
        return ""
    part: dict[str, list[str]] = {}  # texts of the children by name
    for child in element:
        part.setdefault(str(child.tag).rpartition("}")[2], []).append(_formula(child))
    e, sub, sup = ("".join(part.get(key, ())) for key in ("e", "sub", "sup"))
    # Elements: e is the base, sub and sup are the indices, num and den the parts of a fraction.
    limits = (f"_{_grouped(sub)}" if sub else "") + (f"^{_grouped(sup)}" if sup else "")

    def character(key: str, default: str) -> str:
        chosen = element.find(f"{_MATH}{name}Pr/{_MATH}{key}")
        return default if chosen is None else chosen.get(f"{_MATH}val", "")

    match name:
        case "f":
            return "/".join(_grouped("".join(part.get(key, ()))) for key in ("num", "den"))
        case "d":
            inside = character("sepChr", "|").join(part.get("e", ()))
            return f"{character('begChr', '(')}{inside}{character('endChr', ')')}"
        case "sSup" | "sSub" | "sSubSup" | "sPre":
            return e + limits
        case "nary":
            return f"{character('chr', '∫')}{limits} {e}"
        case "rad":
            return f"{''.join(part.get('deg', ()))}√{_grouped(e)}"
        case "acc":
            return f"{e}{character('chr', chr(0x302))}"
        case "limLow" | "limUpp":
            return f"{e}{'_' if name == 'limLow' else '^'}{_grouped(''.join(part.get('lim', ())))}"
        case "func":
            return f"{''.join(part.get('fName', ()))} {e}"
        case "m":
            return "; ".join(part.get("mr", ()))
        case "mr":
            return " ".join(part.get("e", ()))
    return "".join(map(_formula, element))


def _grouped(text: str) -> str:
    return text if len(text) < 2 or text.isalnum() else f"({text})"


def _of_html(text: str) -> Plain:
    """Take title and text of HTML that a converter made, in which nothing is boilerplate."""
    if not text.strip():
        return Plain("", "")
    page = _tree(text)
    return _plain([page], page)
