"""Read dumps of the English Wikipedia: pages of MediaWiki XML, and their wikitext as plain paragraphs.

The library mwparserfromhell parses wikitext. We leave out the words of templates and count them by name, except for
those in `_SHOWN`, whose words are part of sentences. Read `read_pages` next, then `clean_page`.
"""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from realm_jax.corpora.articles import Article, Outcome, Skipped
from realm_jax.corpora.encodings import Notes
from realm_jax.data.input_files import UNPACKING_ERRORS, files_below, is_folder, matching, open_unpacked
from realm_jax.errors import UserError


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a dump.

    Attributes:
        id: id of the page.
        title: its title.
        namespace: "0" for articles.
        is_redirect: True if it only leads to another page.
        model: "wikitext", or another format.
        wikitext: wikitext of its last revision.
        where: file and number of the page.
    """

    id: str
    title: str
    namespace: str
    is_redirect: bool
    model: str
    wikitext: str
    where: str


# --- Dumps ------------------------------------------------------------------------------------------------------------

UNREADABLE_DUMP = "a dump that cannot be read to its end"
NO_FIELD = "page without a title, id, namespace or revision"
# Wikimedia publishes a dump in one file and in numbered files, each of them as one stream and as many.
_EDITION = re.compile(r"(?P<dump>.*?-pages-[a-z-]*?)(?P<streams>-multistream)?(?P<number>\d*)\.xml")
_NOT_DUMPS = ("-rss.xml", ".partial")  # news about a dump, and an unfinished download


def dump_files(source: str) -> list[str]:
    """Return the dump files of a folder or pattern, or the one file that is named, in order of their names.

    Raises UserError if there are none, and for a folder that holds the same dump twice.
    """
    if is_folder(source):
        names = [name for name in files_below(source) if "/" not in name and _is_dump(name)]
        paths = [f"{source.rstrip('/')}/{name}" for name in names]
    else:
        paths = matching(source)
    if not paths:
        raise UserError(f"{source}: no dump files (*.xml, *.xml.gz, *.xml.bz2) there; check the path")
    # Two editions of a dump would give every page twice.
    editions: dict[str, dict[tuple[bool, bool], str]] = {}  # by dump, in streams or not, and numbered or not
    for name in (path.rpartition("/")[2] for path in paths):
        if edition := _EDITION.match(name):
            ways = editions.setdefault(edition["dump"], {})
            ways.setdefault((bool(edition["streams"]), bool(edition["number"])), name)
            if len(ways) > 1:
                first, second = list(ways.values())[:2]
                raise UserError(
                    f"{source}: {first} and {second} hold the same pages; name one of them, or use a pattern"
                )
    return paths


def _is_dump(name: str) -> bool:
    return ".xml" in name and not name.startswith(".") and not name.endswith(_NOT_DUMPS)


def is_dump_folder(folder: str) -> bool:
    """Return True if a folder has a file that begins like a dump. A packed file that is damaged counts too."""
    for name in files_below(folder):
        if "/" not in name and _is_dump(name):
            with open_unpacked(f"{folder.rstrip('/')}/{name}") as stream:
                try:
                    if b"<mediawiki" in stream.read(4096):
                        return True
                except UNPACKING_ERRORS:
                    return True
    return False


def read_pages(path: str) -> Iterator[Page | Skipped]:
    """Yield the pages of a dump with their last revisions, while memory does not grow with the file.

    Damage is a page without its fields, or the position after which the file cannot be read.
    """
    number = 0
    with open_unpacked(path) as stream:
        try:
            events = ElementTree.iterparse(stream, events=("start", "end"))
            _, root = next(events)
            for event, element in events:
                if event == "end" and _name(element) == "page":
                    number += 1
                    yield _page(element, f"{path}, page {number:,}")
                    root.clear()
        # LookupError, ValueError: the dump declares an unknown encoding
        except (ElementTree.ParseError, LookupError, ValueError, *UNPACKING_ERRORS) as error:
            yield Skipped(UNREADABLE_DUMP, " ".join(str(error).split()), f"{path}, after page {number:,}")


def _name(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]  # without the namespace, which has the version of the format


def _page(element: Any, where: str) -> Page | Skipped:
    fields: dict[str, Any] = {_name(child): child for child in element}  # of several revisions the last one
    revision = {_name(child): child.text for child in fields.get("revision", ())}
    page_id, title, namespace = ((fields[n].text or "").strip() if n in fields else "" for n in ("id", "title", "ns"))
    if not (page_id and title and namespace and "revision" in fields):
        return Skipped(NO_FIELD, title or page_id, where)
    model, wikitext = revision.get("model") or "wikitext", revision.get("text") or ""
    return Page(page_id, title, namespace, "redirect" in fields, model, wikitext, where)


# --- Which pages are articles -----------------------------------------------------------------------------------------

TEMPLATE, ELEMENT, SECTION = "template left out", "element left out", "section left out"  # kinds of notes
TOO_MANY_OPEN = "markup that nothing closes"
_MOST_OPEN = 500  # brackets that nothing closes; the parser's time grows with their square
_LISTS = ("List of ", "Index of ", "Outline of ")  # ORQA leaves out the pages that begin like this
_REDIRECT = re.compile(r"\s*#redirect\b", re.IGNORECASE)
_DISAMBIGUATION = re.compile(
    r"\{\{\s*(?:(?![^{}|\n]*needed)[^{}|\n]*disambig|(?:hndis|geodis|numberdis|letter-?numbercombdisambig|surname|"
    r"given name|hospitaldis|schooldis|roaddis|callsigndis|mathdab|airport ?dis|shipindex|set index(?: article)?)"
    r"\s*[|}])|__DISAMBIG__",
    re.IGNORECASE,
)
# Sections of references, links and titles of books, which are no sentences.
_SECTIONS = frozenset(
    "references/external links/external link/see also/further reading/notes/bibliography/footnotes/citations/sources"
    "/notes and references/references and notes/works cited/external sources/notes and citations/references and sources"
    "/sources and references/notes and sources/sources and further reading/references and further reading"
    "/bibliography and further reading/explanatory notes/general references/cited sources/gallery/image gallery".split(
        "/"
    )
)


def clean_page(page: Page, notes: Notes) -> Outcome:
    """Return the text of a page, or why it has none. A pure function.

    Headings are separate paragraphs; we leave out a heading without text under it.

    Args:
        page: the page.
        notes: counts templates, elements and sections that are left out.
    """
    if page.namespace != "0":
        return Skipped("not in the namespace of articles", page.title)
    if page.is_redirect or _REDIRECT.match(page.wikitext):
        return Skipped("redirect", page.title)
    if page.model != "wikitext":
        return Skipped("not wikitext", page.title)
    if page.title.startswith(_LISTS):
        return Skipped("list, index or outline", page.title)
    wikitext = _COMMENT.sub("", page.wikitext)
    if "(disambiguation)" in page.title or _DISAMBIGUATION.search(wikitext):
        return Skipped("disambiguation page", page.title)

    paragraphs: list[str] = []
    headings: list[tuple[int, str]] = []  # (level, text) of those that no text came after yet
    dropped_level = 7  # of the section that is being left out
    # A section is parsed by itself, so that a bracket that nothing closes does not reach the next one.
    _, *sections = _HEADING.split(f"\n= =\n{wikitext}")  # marks, heading, text below it, marks, heading, ...
    for marks, heading, body in zip(sections[::3], sections[1::3], sections[2::3], strict=True):
        level = min(len(marks), 6)
        if level > dropped_level:
            continue
        title = " ".join(_plain(heading, page, notes).split())
        is_dropped = title.lower().rstrip(":") in _SECTIONS
        notes[SECTION, title.lower().rstrip(":")] += is_dropped
        dropped_level = level if is_dropped else 7
        if is_dropped:
            continue
        headings = [*((higher, above) for higher, above in headings if higher < level), (level, title)]
        if text := _plain(body, page, notes):
            paragraphs += [*(above for _, above in headings if above), text]
            headings = []
    text = "\n\n".join(paragraphs)
    return Article(page.id, page.title, text) if text else Skipped("no text", page.title)


# --- Wikitext ---------------------------------------------------------------------------------------------------------

_COMMENT = re.compile(
    r"(?:(?<=\n)|\A)<!--.*?-->[ \t]*\n|<!--.*?-->", re.DOTALL
)  # with its line if nothing else is on it
_HEADING = re.compile(r"^(={1,6})(?=.*?[^=\s].*\1\s*$|[ ]\1$)(.*?)\1[^\S\n]*$", re.MULTILINE)
_QUOTES = re.compile(r"'{2,}")  # bold and italic type
_PICTURE = re.compile(r"\s*(?:file|image|media|category)\s*:", re.IGNORECASE)
_HIDDEN_LINK = re.compile(rf"{_PICTURE.pattern}|\s*[a-z]{{2,3}}(?:-[a-z]+)*:\S", re.IGNORECASE)  # or to a language
_NOT_SHOWN = frozenset(
    "ref references gallery math chem ce timeline source syntaxhighlight score graph hiero imagemap inputbox table "
    "categorytree templatedata templatestyles mapframe maplink indicator includeonly section charinsert".split()
)
_WITHOUT_WORDS = frozenset("ref references templatestyles section indicator".split())  # not worth a note
_PARAGRAPHS = frozenset("blockquote center div dl hr ol p poem pre ul".split())
# Templates that are part of a sentence, and their words: {1} is their first argument, {*} all of them, {-1} the last
# one, {quote} the one of that name. Text in square brackets is printed if its argument exists.
_SHOWN = {
    name: shown
    for line in """
        convert cvt = {1} {2}
        lang langx transl transliteration resize script = {-1}
        nowrap nobr small smaller big abbr angbr vanchor anchored formatnum val ill interlanguage_link sic sup sub = {1}
        quote blockquote cquote quotation quote_box poem_quote poemquote = {1}{text}{quote}
        citation_needed_span cn_span clarify_span = {1}{text}
        nihongo zh = {1} ([{2}][, {3}][{t}][, {s}][, {p}])
        nihongo3 = {3} ([{2}][, {1}])
        as_of = as of {1}[-{2}][-{3}]
        birth_date birth_date_and_age death_date death_date_and_age start_date end_date = {1}[-{2}][-{3}]
        circa c. = c. {1}
        reign = r. {1}–{2}
        frac sfrac = {1}[/{2}]
        chem su ship sclass hms uss sortname bibleverse = {1}[ {2}]
        us$ = US${1}
        £ = £{1}
        hlist unbulleted_list ubl plainlist flatlist div_col columns-list harvtxt = {*}
        ndash snd spaced_ndash mdash dash spaced_en_dash = –
        nbsp space = \x20
        ' = '
    """.strip().splitlines()
    for names, _, shown in [line.strip().partition(" = ")]
    for name in names.replace("\\x20", " ").split()
}
_RANGES = frozenset("- – and or to by x and(-) to(-) +/- ±".split())  # between two numbers of {{convert}}
_ARGUMENT = re.compile(r"\[([^\[\]{}]*)\{([^{}]+)\}\]|\{([^{}]+)\}")


def _plain(wikitext: str, page: Page, notes: Notes) -> str:
    """Return the words of wikitext, with blank lines between paragraphs, and each item of a list on its own line."""
    import mwparserfromhell  # here, since it is in the extra `documents`

    # The parser's time grows with the square of the brackets that nothing closes, and no signal interrupts it. A time
    # limit would make the text depend on the machine, so we limit the brackets.
    if max(abs(wikitext.count(left) - wikitext.count(right)) for left, right in ("{}", "[]", "<>")) > _MOST_OPEN:
        notes[TOO_MANY_OPEN, page.title] += 1
        wikitext = re.sub(r"[{}\[\]<>]+", " ", wikitext)
    wikitext = _QUOTES.sub(lambda run: "'" * max(len(run[0]) - 5, len(run[0]) == 4), wikitext)
    text = _words(mwparserfromhell.parse(wikitext, skip_style_tags=True), notes)
    for gap, replacement in _AROUND_GAPS:
        text = gap.sub(replacement, text)
    paragraphs, was_item = [""], False
    for line in _LEFT_OVER.sub("", text).split("\n"):
        line = " ".join(line.split())
        is_item = line.startswith(_ITEM)
        words = line.lstrip(f"{_ITEM} ")
        if not line or (was_item and not is_item):
            paragraphs.append("")
        if words:
            paragraphs[-1] += (("\n" if is_item else " ") if paragraphs[-1] else "") + words
            was_item = is_item
    return "\n\n".join(filter(None, paragraphs))


# No XML file can contain these characters.
_ITEM = "\x02"  # begins an item of a list
_GAP = "\x03"  # in place of an omission
_AROUND_GAPS = (
    (
        re.compile(rf" ?\((?=[^()]*{_GAP})(?:[\s,;:/–-]|{_GAP}|e\.g\.|i\.e\.|see)*\)", re.IGNORECASE),
        "",
    ),  # empty brackets
    (re.compile(rf"(?<=\()(?:{_GAP}[ ,;:]*)+"), ""),
    (re.compile(rf"(?:[ ,;]*{_GAP})+(?=[ ]*[,.;:)])"), ""),
    (re.compile(rf"(?:^|(?<=[\n{_ITEM}]))[ ]*(?:{_GAP}[ ]*[,.;:|]*[ ]*)+"), ""),  # at the beginning of a line
    (re.compile(_GAP), ""),
)
_LEFT_OVER = re.compile(r"__[A-Z]{3,30}__|\[\[(?:File|Image|Category):[^|\]]*|\{\{+|\}\}+|\[\[+|\]\]+|\{\||\|\}")
_EXPONENT = re.compile(r"[-−–+]?[0-9]")


def _words(code: Any, notes: Notes) -> str:
    """Return the words of parsed wikitext, in which `_ITEM` begins an item of a list."""
    from mwparserfromhell import nodes

    words = list[str]()
    for node in code.nodes if code is not None else ():
        if isinstance(node, nodes.Text):
            words.append(str(node.value))
        elif isinstance(node, nodes.HTMLEntity):
            words.append(html.unescape(str(node)))
        elif isinstance(node, nodes.Wikilink):
            target = str(node.title)
            if node.text is not None and not _PICTURE.match(target):
                # The pipe trick: an empty text prints the target without its brackets.
                bare = re.sub(r" \([^()]*\)$", "", target.partition(":")[2] or target)  # of [[Mercury (planet)|]]
                words.append(_words(node.text, notes) or bare)
            elif not _HIDDEN_LINK.match(target):
                words.append(_words(node.title, notes).removeprefix(":"))
        elif isinstance(node, nodes.ExternalLink):
            # A link in brackets prints its title, another one its address.
            words.append(_words(node.title, notes) if node.brackets else str(node.url))
        elif isinstance(node, nodes.Template):
            words.append(_template(node, notes))
        elif isinstance(node, nodes.Tag):
            name = str(node.tag).strip().lower()
            if name in ("li", "dt", "dd"):
                words.append(_ITEM if node.wiki_markup else f"\n{_ITEM}")
            if name in _NOT_SHOWN:
                notes[ELEMENT, name] += name not in _WITHOUT_WORDS
                words.append("\n\n" if name == "table" else _GAP)
            else:
                inside = "\n" if name == "br" else _words(node.contents, notes)
                is_power = name == "sup" and words and words[-1][-1:].isdigit() and _EXPONENT.match(inside)
                inside = f"^{inside}" if is_power else inside  # 10^6 is not 106
                words.append(f"\n\n{inside}\n\n" if name in _PARAGRAPHS else inside)
    return "".join(words)


def _template(node: Any, notes: Notes) -> str:
    """Return the words that a template prints, or `_GAP` if it is unknown."""
    name = "_".join(str(node.name).replace("_", " ").split()).lower()
    shown = "{1}" if name.startswith("lang-") else _SHOWN.get(name)
    if shown is None:
        notes[TEMPLATE, name[:60]] += 1
        return _GAP
    arguments = {str(parameter.name).strip(): parameter.value for parameter in node.params}
    positional = [parameter.value for parameter in node.params if not parameter.showkey]
    if name in ("convert", "cvt") and str(arguments.get("2")).strip() in _RANGES:
        shown = "{1} {2} {3} {4}"

    def argument(match: re.Match[str]) -> str:
        key = match[2] or match[3]
        values = positional if key == "*" else positional[-1:] if key == "-1" else [arguments.get(key)]
        text = ", ".join(filter(None, (_words(value, notes).strip() for value in values)))
        return f"{match[1] or ''}{text}" if text else ""

    return _ARGUMENT.sub(argument, shown)
