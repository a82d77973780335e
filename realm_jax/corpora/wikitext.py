"""Wikitext to plain paragraphs, in time that grows with its length alone, whatever is wrong with the markup.

Elements whose content is not wikitext come out first. Then one pass over the brackets, innermost first: a template,
link or table becomes text when it closes, and what never closes gives its text back at the end. Lines come last.
Why no parser library: mwparserfromhell takes 30 s for 40 kB of templates that nobody closed, and six times as long for
ordinary pages; wikitextparser is under the GPL. Namespaces and templates are those of the English Wikipedia.
Not for deciding what is an article: see `realm_jax.corpora.wikipedia`. Read `plain` next, then `_Brackets`.
"""

import html
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from realm_jax.corpora.wiki_lines import GAP, paragraphs, without_quotes
from realm_jax.corpora.wiki_templates import Arguments, is_wordless, render, unknown_units

DEEPEST = 60  # brackets in brackets; MediaWiki itself ends at 40 templates

# What a Note counts.
UNKNOWN_TEMPLATE = "template without a rule left out"
WORDLESS_TEMPLATE = "template without words left out"
ELEMENT = "element left out"
UNKNOWN_UNIT = "unit without a name printed as its code"
UNCLOSED = "markup without its other half"


class Note(NamedTuple):
    """Something worth counting, such as ("template without a rule left out", "oldid").

    There are few kinds; names come from the articles, and there is no end of them.
    """

    kind: str
    name: str


Notes = Counter[Note]


def plain(wikitext: str, title: str, notes: Notes) -> str:
    """The words of some wikitext: paragraphs apart by blank lines, items of lists on lines of their own.

    wikitext: as `without_elements` returns it. title: of the page, which some templates print. What was left out is
    added to `notes`.
    """
    return paragraphs(_Brackets(title).without(without_quotes(wikitext), notes))


# --- Elements whose content is not wikitext ---------------------------------------------------------------------------

_LEFT_OUT = (
    "ref references gallery math chem ce timeline source syntaxhighlight pre score graph hiero imagemap inputbox "
    "categorytree templatedata templatestyles mapframe maplink indicator includeonly section charinsert"
).split()
_ELEMENT = re.compile(rf"<(?:(!--)|({'|'.join([*_LEFT_OUT, 'nowiki', 'poem'])})(?=[\s/>])([^<>]*+)>)", re.IGNORECASE)
_CLOSERS = {name: re.compile(rf"</{name}\s*>", re.IGNORECASE) for name in [*_LEFT_OUT, "nowiki", "poem"]}
_CLOSERS["!--"] = re.compile("-->")
_UNCOUNTED = ("!--", "ref", "references", "templatestyles", "section", "indicator")  # they have no words of the article
_MARKUP = re.compile(r"[\[\]{}|'<>=]")


def without_elements(wikitext: str, notes: Notes) -> str:
    """Wikitext without comments, references and other elements whose content is not wikitext, or not shown.

    Of `nowiki` the content stays, as HTML entities; short formulas stay as plain characters.
    """
    kept: list[str] = []
    done = 0
    endless: set[str] = set()  # elements that nothing closes from here on; found once, so that time stays linear
    wikitext = wikitext.replace(GAP, "")
    while match := _ELEMENT.search(wikitext, done):
        kept.append(wikitext[done : match.start()])
        done = match.end()
        name = (match[1] or match[2]).lower()
        if (match[3] or "").endswith("/"):
            kept.append(GAP if name in _LEFT_OUT else "")
            continue
        closer = None if name in endless else _CLOSERS[name].search(wikitext, done)
        if closer is None:
            endless.add(name)
            notes[Note(UNCLOSED, f"<{name}>")] += 1
            continue
        kept.append(_content(name, wikitext[done : closer.start()], notes))
        done = closer.end()
        if name == "!--" and wikitext[match.start() - 1 : match.start()] in ("", "\n"):
            done += wikitext.startswith("\n", done)  # a comment with a line to itself takes the line along
    kept.append(wikitext[done:])
    return "".join(kept)


def _content(name: str, inside: str, notes: Notes) -> str:
    """What an element shows."""
    if name == "!--":
        return ""
    if name == "nowiki":
        return _literal(inside)
    if name == "poem":
        return "\n:" + inside.strip().replace("\n", "\n:") + "\n"
    shown = _formula(inside) if name in ("math", "chem", "ce") else ""
    if not shown and name not in _UNCOUNTED:
        notes[Note(ELEMENT, name)] += 1
    return _literal(shown) or GAP


def _literal(text: str) -> str:
    """Text that is no markup, whatever its characters are."""
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", text)


_LONGEST_FORMULA = 60  # characters
_TEX_WORD = re.compile(r"\\([A-Za-z]+)")
_TEX = {
    name: html.unescape(f"&{name};")
    for name in (
        "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon "
        "phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega pm times le ge ne equiv approx sum int"
    ).split()
}
_TEX |= {"cdot": "·", "leq": "≤", "geq": "≥", "neq": "≠", "infty": "∞", "to": "→", "rightarrow": "→", "in": "∈"}
_TEX |= {"ldots": "…", "dots": "…", "cdots": "…", "circ": "°", "quad": " ", "qquad": " "}
_TEX |= dict.fromkeys(("displaystyle", "left", "right"), "")
_TEX |= {name: name for name in ("sin", "cos", "tan", "log", "ln", "exp", "max", "min")}


def _formula(tex: str) -> str:
    """A formula of letters, digits and signs as plain text; nothing for one that needs a typesetter."""
    text = re.sub(r"\\[,;:! ]|~", " ", tex)
    text = _TEX_WORD.sub(lambda match: _TEX.get(match[1], match[0]), text)
    text = " ".join(re.sub(r"([_^])\{([^{}\\]*)\}", r"\1\2", text).split())
    return text if len(text) <= _LONGEST_FORMULA and not re.search(r"[\\{}&]", text) else ""


# --- Brackets ---------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"\{\{+|\}\}+|\[\[|\]\]|\||\n[ \t:*#]*+(?:\{\||\|\})|<table(?=[\s>])[^<>]*+>|</table\s*>", re.IGNORECASE
)
_HIDDEN_LINKS = ("file", "image", "media", "category")
_LANGUAGE_LINK = re.compile(r"[a-z]{2,3}(?:-[a-z]+)*+:\S")


class _OpenBracket:
    """A bracket that was opened: a template ("{"), a link ("["), a table ("|"), or the whole text ("").

    braces: how many of them are open; three in a row can be a parameter or belong to two brackets. fields: what stands
    between its bars, as pieces of text in which nothing is left to do. names: what stands before the "=" of a field.
    lost: what was left out inside.
    """

    __slots__ = ("kind", "braces", "fields", "names", "lost")

    def __init__(self, kind: str, braces: int = 0):
        self.kind, self.braces = kind, braces
        self.fields: list[list[str]] = [[]]
        self.names: list[str | None] = [None]
        self.lost: list[Note] = []

    def add(self, text: str) -> None:
        """Add text as it stands in the page."""
        if self.kind == "{" and self.names[-1] is None and "=" in text and len(self.fields) > 1:
            before, _, text = text.partition("=")
            self.names[-1] = "".join(self.fields.pop()) + before
            self.fields.append([])
        self.fields[-1].append(text)

    def put(self, text: str, lost: Iterable[Note] = ()) -> None:
        """Add what a bracket inside has become, and what was lost by that."""
        self.fields[-1].append(text)
        self.lost.extend(lost)

    def bar(self) -> None:
        self.fields.append([])
        self.names.append(None)

    def texts(self) -> list[str]:
        return ["".join(field) for field in self.fields]

    def text_if_unclosed(self) -> str:
        """The text behind an opening bracket that never closes.

        A link's target, and what stands on the line of a template's name, are no words of the article.
        """
        first, *rest = self.texts()
        if self.kind == "[":
            hidden = first.partition(":")[0].strip().lower() in _HIDDEN_LINKS
            return "\n".join("|".join(rest).split("\n")[1:]) if hidden else "|".join(rest or [first])
        text = "|".join([first, *rest])
        if self.kind == "{":
            return "".join(text.partition("\n")[1:])
        return "\n".join(line for line in text.split("\n")[1:] if not line.lstrip().startswith(("|", "!")))


class _Brackets:
    """Takes the brackets out of wikitext. stack: the open ones, the whole text first."""

    def __init__(self, title: str):
        self.title = title
        self.stack = [_OpenBracket("")]

    def without(self, text: str, notes: Notes) -> str:
        """Text without templates, links between articles, and tables."""
        text = "\n" + text  # a table is known by the line end before it
        done = 0
        while match := _TOKEN.search(text, done):
            if match.start() > done:
                self.stack[-1].add(text[done : match.start()])
            done = match.end() - self._take(match[0], text[match.end() : match.end() + 1])
        self.stack[-1].add(text[done:])
        self._unwind(0)
        notes.update(self.stack[0].lost)
        return self.stack[0].texts()[0]

    def _take(self, token: str, following: str) -> int:
        """Do what a token asks for; how many of its characters are to be looked at again."""
        if token == "|":
            self._bar()
        elif token == "[[":
            self._open(_OpenBracket("["))
        elif token == "]]":
            self._close_link()
        elif token[0] == "{":
            self._open(_OpenBracket("{", len(token)))
        elif token[0] == "}":
            self._close_braces(len(token))
        elif token.endswith("{|") or token[:2] in ("<t", "<T"):
            self._put("\n", [])
            self._open(_OpenBracket("|"))
        elif token[0] == "<" or self.stack[-1].kind == "|" or (following != "}" and self._nearest("|")):
            self._close_table()
        else:  # the last bar of a template, and one of its closing braces
            self.stack[-1].add(token[:-2])
            self._bar()
            return 1
        return 0

    def _open(self, bracket: _OpenBracket) -> None:
        if len(self.stack) <= DEEPEST:
            self.stack.append(bracket)
        else:
            self._put("", [Note(UNCLOSED, "too many in each other")])

    def _put(self, text: str, lost: Iterable[Note]) -> None:
        self.stack[-1].put(text, lost)

    def _nearest(self, kind: str) -> int:
        """Where in the stack the innermost bracket of a kind is; 0 when there is none."""
        return next((depth for depth in range(len(self.stack) - 1, 0, -1) if self.stack[depth].kind == kind), 0)

    def _unwind(self, depth: int) -> None:
        """Give up brackets that are deeper than `depth`."""
        while len(self.stack) > depth + 1:
            bracket = self.stack.pop()
            sign = {"{": "{{", "[": "[[", "|": "{|"}[bracket.kind]
            self._put(bracket.text_if_unclosed(), [*bracket.lost, Note(UNCLOSED, sign)])

    def _bar(self) -> None:
        if self.stack[-1].kind in ("{", "["):
            self.stack[-1].bar()
        else:
            self._put("|", [])

    def _close_link(self) -> None:
        if self.stack[-1].kind != "[":
            self._put("", [Note(UNCLOSED, "]]")])
            return
        link = self.stack.pop()
        text = _link(link)
        self._put(text or GAP, link.lost if text else [])

    def _close_table(self) -> None:
        depth = self._nearest("|")
        if not depth:
            self._put("", [Note(UNCLOSED, "|}")])
            return
        self._unwind(depth)
        self.stack.pop()
        self._put("\n", [Note(ELEMENT, "table")])

    def _close_braces(self, count: int) -> None:
        """Close as many brackets as a row of closing braces can."""
        while count >= 2:
            depth = self._nearest("{")
            if not depth:
                self._put("", [Note(UNCLOSED, "}}")])
                return
            self._unwind(depth)
            bracket = self.stack.pop()
            used = 3 if min(count, bracket.braces) >= 3 else 2
            text, lost = self._template(bracket) if used == 2 else ("".join(bracket.texts()[1:2]), bracket.lost)
            count -= used
            if bracket.braces - used >= 2:
                self.stack.append(_OpenBracket("{", bracket.braces - used))
            self._put(text, lost)

    def _template(self, bracket: _OpenBracket) -> tuple[str, list[Note]]:
        """The words of a template, and what was left out of it."""
        first, *fields = bracket.texts()
        name = " ".join(first.replace("_", " ").replace(GAP, "").split())
        name = re.sub(r"^(?:safesubst|subst|template):\s*", "", name, flags=re.IGNORECASE).lower()
        if name == "pagename":
            return self.title, []
        arguments: Arguments = {}
        count = 0
        for key, value in zip(bracket.names[1:], fields, strict=True):
            count += key is None
            arguments[str(count) if key is None else key.strip()] = value
        text = render(name, arguments)
        if text is not None:
            unnamed = [Note(UNKNOWN_UNIT, code[:60]) for code in unknown_units(name, arguments)]
            return text or GAP, bracket.lost + unnamed
        return GAP, [Note(WORDLESS_TEMPLATE if is_wordless(name) else UNKNOWN_TEMPLATE, name[:60])]


def _link(bracket: _OpenBracket) -> str:
    """The words of a link; of a picture or category none."""
    target, *labels = bracket.texts()
    target, label = target.strip(), "|".join(labels)
    if target.partition(":")[0].strip().lower() in _HIDDEN_LINKS or (not labels and _LANGUAGE_LINK.match(target)):
        return ""
    if label:
        return label
    target = target.removeprefix(":")
    if not labels:
        return target
    return re.sub(r" \([^()]*+\)$", "", target.partition(":")[2] or target)  # of "[[Mercury (planet)|]]", Mercury
