"""Salient spans: the dates and names of a text, which masked queries hide and the retriever must find again.

REALM tagged entities with a trained model and dates with a regular expression (Guu et al. 2020, section 3.4). The rules
here need no model: dates in their usual forms, and runs of capitalised words. A better tagger is plugged in by name: a
BERT for token classification, a pipeline of spaCy, or a function of your own that takes a text and returns `Span`s.
Next to read: `masking.py`.
"""

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.sentences import OPENERS, split
from realm_jax.errors import UserError

T = TypeVar("T")
DATE, NAME = "date", "name"
# Finders with a model, by the first part of their name: what makes one, given the rest of the name.
FACTORIES = {
    "hf": "realm_jax.models.tagger:hugging_face",  # hf:NAME or hf:FOLDER; a name, since it brings JAX along
    "spacy": "realm_jax.data.span_adapters:spacy_model",  # spacy:NAME
}
CHOICES = (
    "choose rules, hf:NAME or hf:FOLDER of a BERT for token classification, spacy:NAME, or package.module:function"
)
MAX_NAME_WORDS = 8  # longer runs of capitalised words are rows of tables
MAX_CAPITALS_WORDS = 5  # longer runs in capital letters are headings


class Span(NamedTuple):
    """A half-open range of characters; `kind` is "date" or "name" (a plug-in may use others), `score` 0 to 1."""

    start: int
    end: int
    kind: str
    score: float


class SalientSpanFinder(Protocol):
    """Finds the salient spans of a text: in order, not overlapping, none empty.

    It may have further attributes. identity: distinguishes models of the same name. find_many: takes texts and returns
    the spans of each, for a model that reads batches. uses_devices: true if one process of a machine has to run it.
    """

    def __call__(self, text: str) -> list[Span]: ...


def finder(name: str) -> SalientSpanFinder:
    """Return the finder of that name: "rules", one of FACTORIES, or any `package.module:function` that can be imported.

    Raises:
        UserError: there is no such finder, or what it needs is not there. A finder that fails, or whose spans are not
            what they must be, raises it too, in one line that names the finder.
    """
    if name == "rules":
        return find_by_rules
    first, colon, rest = name.partition(":")
    if not (first and colon and rest):
        raise UserError(f"span finder {name!r}: there is no such finder; {CHOICES}")
    if first in FACTORIES:
        module, _, function = FACTORIES[first].partition(":")
        return _Checked(name, _function(module, function, name)(rest))
    return _Checked(name, _function(first, rest, name))


def identity(finder: SalientSpanFinder) -> str | None:
    """What identifies a finder beyond its name; None if the name is enough."""
    return getattr(finder, "identity", None)


def uses_devices(finder: SalientSpanFinder) -> bool:
    """True if a finder computes on JAX's devices, which one process of a machine has to itself."""
    return bool(getattr(finder, "uses_devices", False))


def find_many(finder: SalientSpanFinder, texts: Sequence[str]) -> list[list[Span]]:
    """Return the spans of each text, in one call of a finder that takes many."""
    batched = getattr(finder, "find_many", None)
    return batched(texts) if batched else [finder(text) for text in texts]


@dataclasses.dataclass(frozen=True)
class _Checked:
    """A finder from elsewhere, whose spans are looked at."""

    name: str
    find: SalientSpanFinder

    @property
    def identity(self) -> str | None:
        return identity(self.find)

    @property
    def uses_devices(self) -> bool:
        return uses_devices(self.find)

    def __call__(self, text: str) -> list[Span]:
        return self._check(text, self._run(text, lambda: list(self.find(text))))

    def find_many(self, texts: Sequence[str]) -> list[list[Span]]:
        if not hasattr(self.find, "find_many"):
            return [self(text) for text in texts]
        spans_of_texts = self._run("".join(texts[:1]), lambda: find_many(self.find, texts))
        return [self._check(text, spans) for text, spans in zip(texts, spans_of_texts, strict=True)]

    def _run(self, text: str, find: Callable[[], T]) -> T:
        try:
            return find()
        except UserError:
            raise
        except Exception as fault:
            raise UserError(f"span finder {self.name!r} fails: {_reason(fault)}; on {text[:40]!r}") from fault

    def _check(self, text: str, found: list[Span]) -> list[Span]:
        reached = 0
        for span in found:
            whole = isinstance(span, Span) and isinstance(span.start, Integral) and isinstance(span.end, Integral)
            if not (whole and isinstance(span.kind, str)):
                raise UserError(f"span finder {self.name!r} gives {span!r}, which is no Span(start, end, kind, score)")
            if not reached <= span.start < span.end <= len(text):
                raise UserError(
                    f"span finder {self.name!r} gives {span.start} to {span.end}, where {reached} of {len(text)} "
                    "characters are passed; spans must be in order, apart, not empty and inside the text"
                )
            reached = span.end
        return found


def _reason(fault: Exception) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split())[:200]}"


def _function(module: str, function: str, name: str) -> Any:
    """A function of a module. name: of the finder, for errors."""
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as fault:  # whatever a module does when it is imported
        raise UserError(f"span finder {name!r}: {_reason(fault)}; {CHOICES}") from None
    if not callable(found):
        raise UserError(f"span finder {name!r}: {function} is not a function; {CHOICES}")
    return found


def find_by_rules(text: str) -> list[Span]:
    """Find dates and names by rules; the finder named "rules".

    A date wins over a name around it. No name crosses the end of a sentence. Lower-case names are not found. Scores are
    all 1. On the Wikipedia text of wikigold (Balasuriya et al. 2009) 97 % of the annotated names are touched by a span
    and 91 % of the name spans touch an annotated name; 84 % and 77 % agree to the character.
    """
    dates = [Span(match.start(), match.end(), DATE, 1.0) for match in _DATE.finditer(text) if _is_date(match)]
    names = _names(_without(text, dates))
    return sorted(dates + names)


def to_token_spans(
    found: Sequence[Span], ids: NDArray[Any], starts: NDArray[np.int64], ends: NDArray[np.int64],
    sentences: NDArray[np.integer], unknown: int,
) -> list[tuple[int, int, str]]:  # fmt: skip
    """Spans of characters as they are stored: (first piece, piece behind the last, kind), in order.

    ids, starts, ends: pieces and their ranges of characters; sentences: ranges of pieces [sentences, 2]; unknown: the
    id of [UNK]. A span counts if its ends are ends of pieces, it lies in one sentence and no piece of it is [UNK],
    which nobody can predict.
    """
    firsts = np.searchsorted(ends, [span.start for span in found], "right").tolist()
    lasts = np.searchsorted(starts, [span.end for span in found], "left").tolist()
    owners = (np.searchsorted(sentences[:, 0], firsts, "right") - 1).tolist()
    kept = set()
    for span, first, last, owner in zip(found, firsts, lasts, owners, strict=True):
        whole = first < last and starts[first] >= span.start and ends[last - 1] <= span.end
        if whole and unknown not in ids[first:last] and owner >= 0 and last <= sentences[owner, 1]:
            kept.add((first, last, span.kind))
    return sorted(kept)


def find_dates(text: str) -> list[Span]:
    """The dates that the rules find, a month alone among them."""
    return [span for span in find_by_rules(text) if span.kind == DATE]


def with_dates(text: str, names: Sequence[Span], dates: Sequence[Span]) -> list[Span]:
    """Names and dates in order; dates win: of a name around one stays what is written like a name on either side.

    "1998 FIFA World Cup" is a date and "FIFA World Cup", and "the Summer of 1969" is "Summer" and a date.
    """
    kept = []
    for name in names:
        start = name.start
        for date in (date for date in dates if date.start < name.end and name.start < date.end):
            kept += _part_of(text, name, start, date.start)
            start = date.end
        kept += _part_of(text, name, start, name.end) if start > name.start else [name]
    return sorted([*kept, *dates])


def _part_of(text: str, name: Span, start: int, end: int) -> list[Span]:
    """What of a name lies in a range, from its first word with a capital to its last."""
    words = [word for word in _ANY_WORD.finditer(text, start, max(start, end)) if word[0][0].isupper()]
    return [Span(words[0].start(), words[-1].end(), name.kind, name.score)] if words else []


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


def _without(text: str, dates: list[Span]) -> str:
    """Overwrite the dates by as many characters that no name contains."""
    parts = []
    last = 0
    for date in dates:
        parts += [text[last : date.start], _HIDDEN * (date.end - date.start)]
        last = date.end
    return "".join([*parts, text[last:]])


# Names

_HIDDEN = "\0"  # stands for a date where names are looked for
_OPENING_QUOTES = ("`", "“", "‘", "«")
_UPPER = "".join(chr(code) for code in range(0x1F00) if chr(code).isupper())  # Latin, Greek, Cyrillic, Armenian
_INITIALS = rf"(?:[{_UPPER}]\.)+(?:-?[{_UPPER}]\.)*"
_CAPITALISED = rf"[{_UPPER}]\w*(?:['’](?!s\b)\w+)*"
_TITLES = ("Mr.", "Mrs.", "Ms.", "Dr.", "Prof.", "St.", "Gen.", "Col.", "Capt.", "Sgt.", "Lt.", "Rev.", "Sen.", "Gov.")
_NAME_WORD = rf"(?:{'|'.join(map(re.escape, _TITLES))}|{_INITIALS}|{_CAPITALISED})"
_JOINING = (
    r"(?:of\sthe|of|de\sla|de\slos|de\slas|de|la|le|du|des|della|delle|del|degli|dei|di|da|dos|das|do|van\sder|van\sden"
    r"|van\sde|van|von\sder|von|zu|zum|zur|der|den|ter|ten|ibn|bin|bint|al|el|y|upon|&)"
)
_NAME = re.compile(rf"(?<![\w'’]){_NAME_WORD}(?:(?:\s(?:{_JOINING}\s)?|\s?-\s?){_NAME_WORD})*")
_WORD = re.compile(r"[^\s-]+")
_ANY_WORD = re.compile(r"\w+")
# Words that open a sentence or a quotation and are no part of the name behind them, and are never a name alone.
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
    """Capitalised words that follow each other; `opens`: here even a common word would have a capital."""

    start: int
    end: int
    opens: bool


def _names(text: str) -> list[Span]:
    runs = list(_runs(text))
    sure = {word for run in runs for word in _WORD.findall(text, run.start, run.end)[run.opens :]}
    names = []
    for run in runs:
        trimmed = _trim(text, run)
        if trimmed is not None and _is_name(text, trimmed, sure):
            kind = DATE if text[trimmed.start : trimmed.end] in _MONTHS else NAME
            names.append(Span(trimmed.start, trimmed.end, kind, 1.0))
    return names


def _runs(text: str) -> Iterator[_Run]:
    for start, end in split(text):
        first = True
        for match in _NAME.finditer(text, start, end):
            opens = first and not any(
                character.isalnum() or character == _HIDDEN for character in text[start : match.start()]
            )
            first = False
            yield _Run(match.start(), match.end(), opens or _is_after_opening_quote(text, match.start()))


def _is_after_opening_quote(text: str, start: int) -> bool:
    return text[max(0, start - 2) : start].rstrip()[-1:] in _OPENING_QUOTES or text[max(0, start - 1) : start] == '"'


def _trim(text: str, run: _Run) -> _Run | None:
    """Cut function words from the front of an opening run ("In Paris", "Most of Europe"), and a full stop at its end.

    Within a sentence they stay: there a capital says that they belong to a title ("The Hobbit", "In Utero").
    """
    start, opens = run.start, run.opens
    end = run.end - 1 if _ends_in_full_stop(text, run) else run.end
    if not opens:
        return _Run(start, end, opens)
    for match in _WORD.finditer(text, run.start, end):
        if match[0][0].isupper() and match[0].lower() not in _FUNCTION_WORDS:
            return _Run(match.start(), end, opens and match.start() == run.start)
    return None


def _ends_in_full_stop(text: str, run: _Run) -> bool:
    """Whether the run ends in one initial that ends the sentence too: "vitamin C.", not "the U.S."."""
    last = text[run.start : run.end].rsplit(maxsplit=1)[-1]
    return len(last) == 2 and last[1] == "." and text[run.end : run.end + 2].strip() == ""


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
