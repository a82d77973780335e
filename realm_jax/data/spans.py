"""Salient spans: the dates and names of a text, which masked queries hide and the retriever must find again.

REALM tagged entities with a trained model and dates with a regular expression (Guu et al. 2020, section 3.4). Our rules
need no model: they find dates in their usual forms, and runs of capitalized words. You can choose a better tagger by
name: a BERT for token classification (`realm_jax/models/tagger.py`), a pipeline of spaCy, or your own function from a
text to `Span`s. Names then come from the model, and dates from the rules, as in REALM.
Next to read: `masking.py`.
"""

import importlib
import re
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.sentences import OPENERS, split
from realm_jax.errors import UserError, install_extra

T = TypeVar("T")
DATE, NAME = "date", "name"
CHOICES = (
    "choose rules, hf:NAME or hf:FOLDER of a BERT for token classification, spacy:NAME, or package.module:function"
)
MAX_NAME_WORDS = 8  # longer runs of capitalized words are rows of tables
MAX_CAPITALS_WORDS = 5  # longer runs in capital letters are headings
# OntoNotes' kinds of dates and numbers: "two", "last year", "40 %" are nothing that a passage is found by.
NO_NAMES = frozenset("DATE TIME CARDINAL ORDINAL QUANTITY PERCENT MONEY".split())
SPACY_CHARACTERS = 50_000  # that spaCy gets at a time; it refuses a million, and memory grows with the text


class Span(NamedTuple):
    """A salient span of a text.

    Attributes:
        start: its first character.
        end: character behind its last one.
        kind: "date" or "name"; a plug-in may use others.
        score: how sure the finder is, 0 to 1.
    """

    start: int
    end: int
    kind: str
    score: float


# --- Finders by name --------------------------------------------------------------------------------------------------


class SpanFinder:
    """Finds the salient spans of texts, and checks that they are in order, do not overlap and are not empty.

    A failure of `find`, and invalid spans, raise UserError in one line with the finder's name.

    Attributes:
        identity: distinguishes models of the same name; None if the name is enough.
        uses_devices: True if it computes on JAX's devices, which one process of a machine has to itself.
    """

    def __init__(self, name: str, find: Any) -> None:
        """Wrap a function from a text to its spans.

        Args:
            name: name of the finder, for messages.
            find: the function. Optional attributes are `identity` and `uses_devices` as above, and `find_many`, which
                takes texts and returns the spans of each, for a model that reads batches.
        """
        self._name, self._find = name, find
        self.identity: str | None = getattr(find, "identity", None)
        self.uses_devices = bool(getattr(find, "uses_devices", False))

    def __call__(self, text: str) -> list[Span]:
        """Return the spans of a text."""
        return self._check(text, self._run(text, lambda: list(self._find(text))))

    def find_many(self, texts: Sequence[str]) -> list[list[Span]]:
        """Return the spans of each text."""
        if not hasattr(self._find, "find_many"):
            return [self(text) for text in texts]
        spans_of_texts = self._run("".join(texts[:1]), lambda: self._find.find_many(texts))
        return [self._check(text, spans) for text, spans in zip(texts, spans_of_texts, strict=True)]

    def _run(self, text: str, find: Callable[[], T]) -> T:
        try:
            return find()
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"span finder {self._name!r} fails: {_reason(error)}; on {text[:40]!r}") from error

    def _check(self, text: str, spans: list[Span]) -> list[Span]:
        reached = 0
        for span in spans:
            is_range = isinstance(span, Span) and isinstance(span.start, Integral) and isinstance(span.end, Integral)
            if not (is_range and isinstance(span.kind, str)):
                raise UserError(f"span finder {self._name!r} gives {span!r}, which is no Span(start, end, kind, score)")
            if not reached <= span.start < span.end <= len(text):
                raise UserError(
                    f"span finder {self._name!r} gives {span.start} to {span.end}, where {reached} of {len(text)} "
                    "characters are passed; spans must be in order, apart, not empty and inside the text"
                )
            reached = span.end
        return spans


def finder(name: str) -> SpanFinder:
    """Return the finder of that name: "rules", "hf:NAME", "spacy:NAME", or any `package.module:function`.

    Raises UserError if there is no such finder, or if a package or model that it needs is missing.
    """
    if name == "rules":
        return SpanFinder(name, find_by_rules)
    first, colon, rest = name.partition(":")
    if not (first and colon and rest):
        raise UserError(f"span finder {name!r}: there is no such finder; {CHOICES}")
    if first == "spacy":
        return SpanFinder(name, spacy_model(rest))
    module, function = ("realm_jax.models.tagger", "hugging_face") if first == "hf" else (first, rest)
    try:  # by name, because the tagger imports JAX
        find = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever a module does when it is imported
        raise UserError(f"span finder {name!r}: {_reason(error)}; {CHOICES}") from None
    if not callable(find):
        raise UserError(f"span finder {name!r}: {function} is not a function; {CHOICES}")
    return SpanFinder(name, find(rest) if first == "hf" else find)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def spacy_model(name: str) -> Callable[[str], list[Span]]:
    """Return the finder of `spacy:NAME`: a pipeline with named entities, such as en_core_web_trf. Its scores are all 1.

    Raises UserError if spaCy or the pipeline is not there, or if the pipeline has no named entities.
    """
    title = f"span finder 'spacy:{name}'"
    try:
        spacy = importlib.import_module("spacy")
    except ImportError as error:
        raise UserError(f"{title}: needs spacy ({error}); {install_extra('spacy')}") from None
    try:
        nlp = spacy.load(name)
    except Exception as error:
        raise UserError(f"{title}: {_reason(error)}; run `python -m spacy download {name}`") from None
    if "ner" not in nlp.pipe_names:
        raise UserError(f"{title}: the pipeline has no named entities; choose one with `ner`")

    def find(text: str) -> list[Span]:
        # spaCy needs the context of a sentence, so we cut between sentences.
        parts: list[list[int]] = []  # ranges of sentences
        for start, end in split(text):
            if parts and end - parts[-1][0] <= SPACY_CHARACTERS:
                parts[-1][1] = end
            else:
                parts.append([start, end])
        docs = nlp.pipe([text[start:end] for start, end in parts])
        names = [
            Span(entity.start_char + start, entity.end_char + start, entity.label_, 1.0)
            for (start, _), doc in zip(parts, docs, strict=True)
            for entity in doc.ents
        ]
        return with_dates(text, without_overlaps(text, names), find_dates(text))

    return find


def without_overlaps(text: str, names: Sequence[Span]) -> list[Span]:
    """Return a model's names in order, without white space at their ends and without the kinds in `NO_NAMES`.

    Of two names that overlap the first stays.

    Args:
        text: the text.
        names: spans that a model found in it, in any order.
    """
    distinct: list[Span] = []
    for name in sorted(names):
        characters = text[name.start : name.end]
        start = name.start + len(characters) - len(characters.lstrip())
        end = start + len(characters.strip())
        if name.kind not in NO_NAMES and (distinct[-1].end if distinct else 0) <= start < end:
            distinct.append(Span(start, end, name.kind, name.score))
    return distinct


# --- Rules ------------------------------------------------------------------------------------------------------------


def find_by_rules(text: str) -> list[Span]:
    """Find dates and names by rules; the finder named "rules".

    A date wins over a name around it. No name crosses the end of a sentence. Lower-case names are not found. Scores are
    all 1. On the Wikipedia text of wikigold (Balasuriya et al. 2009) 97 % of the annotated names are touched by a span
    and 91 % of the name spans touch an annotated name; 84 % and 77 % agree to the character.
    """
    dates = [Span(match.start(), match.end(), DATE, 1.0) for match in _DATE.finditer(text) if _is_date(match)]
    parts = []  # of the text, with as many characters in place of each date that no name contains
    last = 0
    for date in dates:
        parts += [text[last : date.start], _HIDDEN * (date.end - date.start)]
        last = date.end
    return sorted(dates + _names("".join([*parts, text[last:]])))


def to_token_spans(
    spans: Sequence[Span], ids: NDArray[Any], starts: NDArray[np.int64], ends: NDArray[np.int64],
    sentences: NDArray[np.integer], unknown: int,
) -> list[tuple[int, int, str]]:  # fmt: skip
    """Convert spans of characters to spans of tokens.

    A span stays if its ends are ends of tokens, it is within one sentence and none of its tokens is [UNK], which no
    model can predict.

    Args:
        spans: spans of characters.
        ids: tokens of the text [tokens].
        starts: first character of each token [tokens].
        ends: character behind each token [tokens].
        sentences: ranges of tokens [sentences, 2].
        unknown: id of [UNK].

    Returns:
        (first token, token behind the last one, kind) of each span, in order.
    """
    firsts = np.searchsorted(ends, [span.start for span in spans], "right").tolist()  # [spans]
    lasts = np.searchsorted(starts, [span.end for span in spans], "left").tolist()  # [spans]
    owners = (np.searchsorted(sentences[:, 0], firsts, "right") - 1).tolist()  # [spans]: sentence of each
    token_spans = set()
    for span, first, last, owner in zip(spans, firsts, lasts, owners, strict=True):
        is_aligned = first < last and starts[first] >= span.start and ends[last - 1] <= span.end
        if is_aligned and unknown not in ids[first:last] and owner >= 0 and last <= sentences[owner, 1]:
            token_spans.add((first, last, span.kind))
    return sorted(token_spans)


def find_dates(text: str) -> list[Span]:
    """Return the dates that the rules find; a month without a day or year is one of them."""
    return [span for span in find_by_rules(text) if span.kind == DATE]


def with_dates(text: str, names: Sequence[Span], dates: Sequence[Span]) -> list[Span]:
    """Merge names and dates in order; a date splits a name around it into its capitalized parts on either side.

    "1998 FIFA World Cup" is a date and "FIFA World Cup", and "the Summer of 1969" is "Summer" and a date.

    Args:
        text: the text.
        names: names, which do not overlap each other.
        dates: dates, which do not overlap each other.
    """
    spans = [*dates]
    for name in names:
        inside = [date for date in dates if date.start < name.end and name.start < date.end]
        if not inside:
            spans.append(name)
            continue
        edges = [name.start, *(edge for date in inside for edge in (date.start, date.end)), name.end]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            words = [word for word in _ANY_WORD.finditer(text, start, max(start, end)) if word[0][0].isupper()]
            if words:
                spans.append(Span(words[0].start(), words[-1].end(), name.kind, name.score))
    return sorted(spans)


# Dates

_MONTHS = ("January February March April May June July August September October November December").split()
_MONTH = rf"(?:{'|'.join(_MONTHS)}|(?:Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept|Sep|Oct|Nov|Dec)\b\.?)"
_DAY = r"(?:3[01]|[12]\d|0?[1-9])(?:st|nd|rd|th)?"
_DASH = r"\s?(?:--|[-–—])\s?"
_DAYS = rf"{_DAY}(?:{_DASH}{_DAY})?"
_YEAR = r"(?:1\d{3}|20\d{2})"
_ERA = r"(?:BCE?|AD|CE|B\.C\.(?:E\.)?|A\.D\.|C\.E\.)"
_ORDINAL = (
    r"(?:\d{1,2}(?:st|nd|rd|th)|[Ff]irst|[Ss]econd|[Tt]hird|[Ff]ourth|[Ff]ifth|[Ss]ixth|[Ss]eventh|[Ee]ighth|[Nn]inth"
    r"|[Tt]enth|[Ee]leventh|[Tt]welfth|(?:[Tt]hir|[Ff]our|[Ff]if|[Ss]ix|[Ss]even|[Ee]igh|[Nn]ine)teenth"
    r"|[Tt]wentieth|[Tt]wenty\s?-\s?first)"
)
# The longest form first: alternatives are tried in order. Spaces around commas and dashes: text with its tokens apart.
_DATE = re.compile(
    rf"""(?<![\w.,/$£€¥#]) (?<![^a-z]-) (?:
        {_YEAR}-\d\d-\d\d
      | \d{{1,2}}/\d{{1,2}}/(?:\d{{4}}|\d\d)
      | {_DAYS}\s(?:of\s)?{_MONTH}(?:\s?,?\s{_YEAR}(?!\d))?
      | {_MONTH}\s{_DAYS}(?!\d)(?:\s?,\s{_YEAR}(?!\d)|\s{_YEAR}(?!\d))?
      | {_MONTH}(?:\s?,|\sof)?\s{_YEAR}(?!\d)
      | {_ORDINAL}(?:\s|\s?-\s?)(?:century|centuries|millennium)(?:\s{_ERA})?
      | AD\s\d{{1,4}}
      | \d{{1,4}}(?:{_DASH}\d{{1,4}})?\s{_ERA}
      | (?P<range>{_YEAR}{_DASH}(?:{_YEAR}|\d\d))
      | (?:1\d|20)\d0['’]?s
      | (?P<year>{_YEAR})
    ) (?![\w/]|[.,:]\d|-\d|\s?[%°])""",
    re.VERBOSE,
)
# A number of these is a quantity, not a year.
_UNIT = re.compile(
    r"\s?(?:k?m²?|[kcm]m|k?g|kW|MW|[MG]Hz|ft|feet|foot|miles?|met(?:er|re)s?|acres?|hectares?|yards?|inch(?:es)?|lbs?"
    r"|pounds?|tons?|tonnes?|people|persons?|inhabitants|residents|men|women|students|seats|dollars|euros|votes|copies"
    r"|points|units|square|sq|cubic|years|days|hours|minutes|million|billion|thousand)\b"
)


def _is_date(match: re.Match[str]) -> bool:
    if match["range"] is not None:
        first, last = re.split(_DASH, match["range"])
        return int(first) < int(first[:2] + last if len(last) == 2 else last)
    return match["year"] is None or _UNIT.match(match.string, match.end()) is None


# Names

_HIDDEN = "\0"  # replaces a date while we look for names
_OPENING_QUOTES = ("`", "“", "‘", "«")
_UPPER = "".join(chr(code) for code in range(0x1F00) if chr(code).isupper())  # Latin, Greek, Cyrillic, Armenian
_INITIALS = rf"(?:[{_UPPER}]\.)+(?:-?[{_UPPER}]\.)*"
_CAPITALIZED = rf"[{_UPPER}]\w*(?:['’](?!s\b)\w+)*"
_TITLES = ("Mr.", "Mrs.", "Ms.", "Dr.", "Prof.", "St.", "Gen.", "Col.", "Capt.", "Sgt.", "Lt.", "Rev.", "Sen.", "Gov.")
_NAME_WORD = rf"(?:{'|'.join(map(re.escape, _TITLES))}|{_INITIALS}|{_CAPITALIZED})"
_JOINING = (
    r"(?:of\sthe|of|de\sla|de\slos|de\slas|de|la|le|du|des|della|delle|del|degli|dei|di|da|dos|das|do|van\sder|van\sden"
    r"|van\sde|van|von\sder|von|zu|zum|zur|der|den|ter|ten|ibn|bin|bint|al|el|y|upon|&)"
)
_NAME = re.compile(rf"(?<![\w'’]){_NAME_WORD}(?:(?:\s(?:{_JOINING}\s)?|\s?-\s?){_NAME_WORD})*")
_WORD = re.compile(r"[^\s-]+")
_ANY_WORD = re.compile(r"\w+")
# Words that open a sentence or a quotation and are no part of the name after them, and are never a complete name.
_FUNCTION_WORDS = OPENERS | frozenset(
    "i'm i've i'd is are was were be been has have had does did can could would shall should might must if so too very "
    "more less much few any none nobody someone anyone everyone everything nothing he's she's it's they're we're "
    "you're that's there's don't me him them us mine yours who's whom whose whether neither either because yet still "
    "even ever never always often sometimes usually again perhaps maybe now soon unfortunately recently currently "
    "previously subsequently consequently similarly specifically generally typically especially particularly including "
    "near around outside inside above below across along behind beside besides beyond against toward towards via per "
    "amid oh yes jr sr".split()
)


class _Run(NamedTuple):
    """Capitalized words that follow each other.

    Attributes:
        start: in characters.
        end: in characters.
        opens: even a common word would have a capital here.
    """

    start: int
    end: int
    opens: bool


def _names(text: str) -> list[Span]:
    # --- Runs of capitalized words, and whether their first word has a capital in any case
    runs = []
    for start, end in split(text):
        is_first = True
        for match in _NAME.finditer(text, start, end):
            first, before = match.start(), text[start : match.start()]
            opens = is_first and not any(character.isalnum() or character == _HIDDEN for character in before)
            is_after_quote = text[max(0, first - 2) : first].rstrip()[-1:] in _OPENING_QUOTES
            is_after_quote |= text[max(0, first - 1) : first] == '"'
            is_first = False
            runs.append(_Run(first, match.end(), opens or is_after_quote))
    # --- Names: a word at the beginning of a sentence is one if it has a capital elsewhere too
    sure = {word for run in runs for word in _WORD.findall(text, run.start, run.end)[run.opens :]}
    names = []
    for run in runs:
        trimmed = _trim(text, run)
        if trimmed is not None and _is_name(text, trimmed, sure):
            kind = DATE if text[trimmed.start : trimmed.end] in _MONTHS else NAME
            names.append(Span(trimmed.start, trimmed.end, kind, 1.0))
    return names


def _trim(text: str, run: _Run) -> _Run | None:
    """Cut function words from the front of an opening run ("In Paris", "Most of Europe"), and a full stop at its end.

    Within a sentence they stay: there a capital says that they belong to a title ("The Hobbit", "In Utero").
    """
    # One initial may end the sentence too: "vitamin C.", not "the U.S.".
    last_word = text[run.start : run.end].rsplit(maxsplit=1)[-1]
    ends_sentence = len(last_word) == 2 and last_word[1] == "." and not text[run.end : run.end + 2].strip()
    end = run.end - ends_sentence
    if not run.opens:
        return _Run(run.start, end, False)
    for match in _WORD.finditer(text, run.start, end):
        if match[0][0].isupper() and match[0].lower() not in _FUNCTION_WORDS:
            return _Run(match.start(), end, match.start() == run.start)
    return None


def _is_name(text: str, run: _Run, sure: set[str]) -> bool:
    words = _WORD.findall(text, run.start, run.end)
    if len(words) > MAX_NAME_WORDS:
        return False
    if len(words) > MAX_CAPITALS_WORDS and text[run.start : run.end].isupper():
        return False
    if len(words) > 1:
        return any(word.lower() not in _FUNCTION_WORDS for word in words)
    word = words[0]
    if len(word.strip(".")) < 2 or word in _TITLES or word.lower() in _FUNCTION_WORDS:
        return False
    return not run.opens or word in sure or not word[1:].islower()
