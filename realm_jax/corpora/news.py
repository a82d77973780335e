"""Clean news articles for pre-training, and choose which ones stay.

`clean` is a pure function of one article. It removes lines that are not prose (share buttons, copyright notices,
headings), makes a paragraph of every other line, and keeps the article if it is prose of a usual length in a wanted
language. The rules are few and for English. If each of 286,000 sentences of Wikipedia were a line, the rules would
remove 21. Not for copies of one article, which are common in news: see `near_duplicates.py`. Not for files: see
`raw_records.py`.
"""

import re
from collections.abc import Sequence
from typing import Any

from realm_jax.corpora.articles import Article, Outcome, Skipped
from realm_jax.data import sentences
from realm_jax.data.languages import language
from realm_jax.data.lines import sample

# Rules for articles to stay; PREPARED.json records these. Ranges include both ends and count the cleaned text: shorter
# texts are stubs, galleries and failed extractions; longer ones are lists, transcripts and several pages in one.
# Languages are ISO 639-1 codes, none for all. An article needs no title.
RULES: dict[str, Any] = {
    "languages": ["en"],
    "characters": [200, 100_000],
    "words": [40, 20_000],
    "sentences": [3, 1_500],
    "title_required": False,
}


def clean(article: Article, rules: dict[str, Any] = RULES) -> Outcome:
    """Return an article with a title of one line and blank lines between paragraphs, or why it is left out.

    Args:
        article: as it was extracted from a page.
        rules: like `RULES`.
    """
    title = " ".join(_lines(article.title))
    text = "\n\n".join(_paragraphs(_lines(article.text)))
    for name, parts in (("characters", str), ("words", str.split), ("sentences", sentences.split)):
        low, high = rules[name]
        if not low <= (count := len(parts(text))) <= high:
            reason = f"fewer than {low:,} {name}" if count < low else f"more than {high:,} {name}"
            return Skipped(reason, sample(text or article.text))
    if rules["languages"] and (code := language(text)) not in rules["languages"]:
        return Skipped(f"in another language ({code})", sample(text))
    return Article(article.id, title, text, article.line, article.file)


# --- Lines ------------------------------------------------------------------------------------------------------------

_LINE_END = re.compile("\r\n?|[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
# Control characters, marks of direction and of possible breaks, and halves of surrogate pairs. The two joiners stay:
# some scripts are spelled with them.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
_MARKUP_LEFT = re.compile(r"^(?:[•·▪●■►–*-]\s+)+")

# A line that begins like this is not part of the article, unless it is as long as a paragraph.
_BOILERPLATE = re.compile(
    r"""(?ix) \W*(?:
        copyright\b .{0,60} \b(?:19|20)\d\d | (?:©|\(c\)) .{0,40} \b(?:19|20)\d\d | all\ rights\ reserved\b
      | this\ (?:material|article|content|story)\ (?:may\ not\ be|has\ been\ (?:archived|updated)
            |(?:originally|first)\ appeared)\b
      | (?:image|photo|picture|media|video)\ (?:copyright|caption|credit|courtesy|playback|source)\b
      | (?:photo|photograph|image|picture|video|credit|source)s?\ ?(?:by|:) | getty\ images\b
      | (?:read|see|watch|view|listen|find\ out|learn)\ (?:more|also|next|full|all)\b .{0,3}[:>»]
      | (?:also\ (?:read|see|watch)|more|related|recommended|watch|read|see\ also|must\ read|trending|tags?|topics?)\ ?:
      | (?:click|tap|swipe)\ (?:here|to|on|through|the)\b
      | (?:share|tweet|email|e-mail|print|pin|save|like)\ (?:this|on|via|it|with)\b
      | (?:sign\ up|log\ in|register|subscribe)\ (?:here|now|today|to|for|with|and|below)\b
      | (?:(?:like|find|join)\ us|(?:follow|contact|email|e-mail)\ (?:us|him|her|me|the\ (?:author|writer|reporter)))\b
      | follow\ .{1,60}\ on\ (?:twitter|facebook|instagram)\b
      | (?:get|download|install)\ (?:the|our)\ .{0,40}\b(?:app|newsletter|inbox|alerts|headlines|updates)\b
      | (?:story|article)\ continues\b | continue\ reading\b | scroll\ (?:down|for)\b | advertisement\b
      | (?:please\ )?(?:enable|turn\ on)\ (?:java|cookies) | your\ browser\b
      | (?:we|this\ (?:web)?site)\ uses?\ cookies\b
      | by\ (?:continuing\ to|using\ (?:this|our)|signing\ up|clicking|submitting|subscribing)\b
      | (?:terms\ of\ (?:use|service)|privacy\ policy|cookie\ policy)\b
      | (?:leave|post|add|write)\ a\ (?:comment|reply)\b | comments?\ (?:are|\(\d) | be\ the\ first\ to\ comment\b
      | for\ more\ information\b .{0,20}\b(?:visit|contact|call|go\ to|see)\b
      | (?:additional\ )?(?:reporting|writing|editing|compiled)\ by\b
      | thank\ you\ for\ (?:reading|registering|subscribing)\b | (?:an\ )?error\b .{0,30}\b(?:occurred|processing)\b
    )"""
)
_LONGEST_BOILERPLATE = 60  # words; a copyright notice of an agency has about 30
_SENTENCE_END = re.compile(r"""[.!?…。！？]["'”’»)\]]*$""")
_SHORTEST_PROSE = 6  # words, unless a full stop ends them
# Tags that were taken out of a page took the space between two sentences with them.
_GLUED = re.compile(
    rf"(?<=[a-z][a-z][.?!])(?=(?:{'|'.join(sorted(word.capitalize() for word in sentences.OPENERS))})\s)"
)


def _lines(text: str) -> list[str]:
    """Return the lines that are not blank, without control characters, and with single spaces."""
    text = _INVISIBLE.sub("", _LINE_END.sub("\n", text))
    return [line for line in (" ".join(line.split()) for line in text.split("\n")) if line]


def _paragraphs(lines: Sequence[str]) -> list[str]:
    """Return the lines that are prose. A line that begins with a small letter may continue the one before."""
    paragraphs: list[str] = []
    for line in lines:
        line = _GLUED.sub(" ", _MARKUP_LEFT.sub("", line))
        if _is_boilerplate(line):
            continue
        if line[0].islower() and paragraphs and not _SENTENCE_END.search(paragraphs[-1]):
            paragraphs[-1] += f" {line}"
        elif line.count(" ") + 1 >= _SHORTEST_PROSE or _SENTENCE_END.search(line):  # no heading, button, name or date
            paragraphs.append(line)
    return paragraphs


def _is_boilerplate(line: str) -> bool:
    """Return True if a line belongs to the page around an article."""
    return not line or (line.count(" ") < _LONGEST_BOILERPLATE and _BOILERPLATE.match(line) is not None)
