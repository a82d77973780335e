"""Lines of wikitext without brackets to paragraphs of plain text; and gaps closed where something was left out.

Every expression takes time that grows with the length of its text alone: what could be tried twice is possessive or
begins where nothing of its kind stands before. Read `paragraphs` next.
"""

import html
import re

GAP = "\x1a"  # stands where something was left out, until its line is cleaned; no XML file can hold it

_EXTERNAL_LINK = re.compile(
    r"\[(?:(?:https?|ftps?|irc|gopher|news|mailto):(?://)?|//)[^\s\[\]<>\"]*+[ \t]*+([^\[\]\n]*+)\]", re.IGNORECASE
)
_TAG = re.compile(
    r"<(/?)(abbr|b|bdi|bdo|big|blockquote|br|caption|center|cite|code|data|dd|del|dfn|div|dl|dt|em|font|h[1-6]|hr|i|ins|kbd"
    r"|li|mark|noinclude|nowiki|ol|onlyinclude|p|poem|q|rb|rp|rt|ruby|s|samp|small|span|strike|strong|sub|sup|td|th|tr|time"
    r"|tt|u|ul|var|wbr)(?=[\s/>])[^<>]*+>",
    re.IGNORECASE,
)
_ENDS_PARAGRAPH = frozenset("blockquote center dd div dl dt h1 h2 h3 h4 h5 h6 hr ol p poem ul".split())
_EXPONENT = re.compile(r"[-−–+]?[0-9]")
_QUOTES = re.compile(r"'{2,}")
_POSSESSIVE = re.compile(r"(?<=\w)'''(?=\w)")
_SWITCH = re.compile(r"__[A-Z]{3,30}__")
_LIST = re.compile(r"[*#:;]+[ \t]*")
_RULE = re.compile(r"-{4,}")
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_LEFTOVER = re.compile(r"\{\{+|\}\}+|\[\[+|\]\]+|'{2,}|</?(?:ref|table)\b[^<>]*+>?|<!--|-->", re.IGNORECASE)
_INVISIBLE = dict.fromkeys(map(ord, "\xad\u200b\u200e\u200f\u2060\ufeff"))
_SPACES = re.compile(r"[ \t\xa0]+|&nbsp;|&thinsp;|&#160;|&#32;")
_EMPTY_BRACKETS = re.compile(
    rf"\([ ,;:/–-]*+(?:(?:e\.g\.|i\.e\.|cf\.|see also|see)[ ,;:]*+)?{GAP}[ ,;:/–{GAP}-]*+\)"
    rf"|\[{GAP}+\]|⟨{GAP}+⟩|“{GAP}+”",
    re.IGNORECASE,
)
# The price of something in the money of another year, which a template would have computed.
_UNKNOWN_PRICE = re.compile(rf"\([^()\n{GAP}]*[$£€¥]{GAP}[^()\n]*+\)")
# A mark that followed what was left out at the beginning of a line; not the point of `.NET` or of an ellipsis.
_LEADING = re.compile(rf"(?=[ ,;:]*+{GAP})[ ,;:{GAP}]*+[.|](?![.|\w])")
_CLOSING = re.compile(r"[,;.](?: |$)")  # belongs to the line before
_GAPS = re.compile(rf"(?<![ ,;:{GAP}])[ ,;:]*+{GAP}[ ,;:{GAP}]*+")


def paragraphs(text: str) -> str:
    """Paragraphs apart by blank lines. Items of a list are lines of one paragraph, with the line that leads to them."""
    found: list[list[str]] = [[]]  # pieces of text, each with the white space before it
    in_list = False
    for raw in _without_tags(text).split("\n"):
        raw = raw.strip()
        item = _LIST.match(raw)
        line = "" if raw.startswith("|") else _clean_line(raw[item.end() :] if item else raw)
        if (not line and not item) or (line and in_list and not item):
            found.append([])
            in_list = False
        if line:
            in_list = item is not None
            closes = found[-1] and _CLOSING.match(line)
            found[-1].append(("\n" if in_list else "" if closes else " ") + line)
    return "\n\n".join("".join(pieces).strip() for pieces in found if pieces)


def without_quotes(wikitext: str) -> str:
    """Wikitext without marks of bold and italic type; to be called before brackets and tags go, which part marks."""
    return "\n".join(map(_without_quotes, wikitext.split("\n"))) if "''" in wikitext else wikitext


def _without_quotes(line: str) -> str:
    """A line without those marks. A row of apostrophes may hold one that is meant."""
    runs = [len(run) for run in _QUOTES.findall(line)]
    bold, italic = sum(run > 2 for run in runs), sum(run == 2 or run > 4 for run in runs)
    if bold % 2 and italic % 2:  # a mark of three is an apostrophe and a mark of two, as in ''Time'''s
        line = _POSSESSIVE.sub("'", line, count=1)
    return _QUOTES.sub(lambda match: "'" * (len(match[0]) - 5 if len(match[0]) > 5 else len(match[0]) == 4), line)


def one_line(text: str) -> str:
    """Text of a heading."""
    return " ".join(paragraphs(text).split())


def _without_tags(text: str) -> str:
    """Text without links to other sites and HTML tags."""
    text = _EXTERNAL_LINK.sub(lambda match: match[1] or GAP, text)
    return _TAG.sub(_tag, text)


def _tag(match: re.Match[str]) -> str:
    """What stands in the place of an HTML tag."""
    name = match[2].lower()
    if name == "br":
        return "\n"
    if name == "li":
        return "" if match[1] else "\n* "
    if name == "sup" and not match[1]:
        power = match.string[match.start() - 1 : match.start()].isdigit() and _EXPONENT.match(match.string, match.end())
        return "^" if power else ""
    return "\n\n" if name in _ENDS_PARAGRAPH else ""


def _clean_line(line: str) -> str:
    """A line with its entities as characters, single spaces, and no trace of what was left out."""
    if "__" in line or "----" in line:
        line = _RULE.sub("", _SWITCH.sub("", line))
    line = _SPACES.sub(" ", line)
    if GAP in line:
        line = _EMPTY_BRACKETS.sub(GAP, _UNKNOWN_PRICE.sub(GAP, line))
        leading = _LEADING.match(line)
        line = _GAPS.sub(_close_gap, line[leading.end() :] if leading else line)
    line = _LEFTOVER.sub(" ", line)
    if "&" in line:
        line = _ENTITY.sub(lambda match: html.unescape(match[0]), line)
    return " ".join(line.translate(_INVISIBLE).split())


def _close_gap(match: re.Match[str]) -> str:
    """What is left of a gap with the separators around it."""
    run, text = match[0], match.string
    before, after = text[match.start() - 1 : match.start()], text[match.end() : match.end() + 1]
    first, last = run.split(GAP, 1)[0].strip(), run.rsplit(GAP, 1)[1].strip()
    if not after:
        return first
    if not before or before in "([" or after in ")]":
        return ""
    space = " " if " " in run else ""
    if after in ".!?" and not text[match.end() + 1 : match.end() + 2].isalnum():
        return ""
    if first and last:
        return (";" if ";" in first + last else last[-1]) + space
    return (first or last)[-1:] + space
