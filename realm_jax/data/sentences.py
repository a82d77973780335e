"""Split a text into sentences, by small rules for prose and for tokenized text.

We measured libraries: the fast ones read the single quote of tokenized text ("world 's") as an open quotation and join
the sentences after it, and the careful ones take minutes for text that these rules split in seconds. This is not a
linguist's segmenter. Passages consist of sentences, and a query is one, so no text may be lost, names with full stops
must not be split, and the same text must always be split in the same way. The lists here are English;
`abbreviations.tsv` adds those of other languages. The packing of sentences into passages is next to read.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import regex

from realm_jax.data.languages import PLAIN

ABBREVIATIONS = Path(__file__).with_name("abbreviations.tsv")  # language, list (a field of `Words`), its words

# Characters that belong to the one before, even to white space: combining marks, joiners, variation selectors.
MARK = regex.compile(r"[\p{M}\p{GCB=Extend}\p{GCB=ZWJ}]")

# A blank line always ends a sentence: headings and list items have no full stop.
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*+")

# Marks that only end sentences, by script; white space need not follow.
_ENDS = "".join(
    (
        "。！？｡",  # Chinese and Japanese
        "।॥",  # Devanagari, Bengali and other scripts of India
        "؟",  # Arabic
        "።፧፨",  # Ethiopic
        "။",  # Burmese
        "។៕",  # Khmer
        "།༎",  # Tibetan
        "෴",  # Sinhala
        "᠃᠉",  # Mongolian
        "꯫",  # Meetei
        "᱾᱿",  # Ol Chiki
        "܀܁܂",  # Syriac
        "׃",  # Hebrew, of verses
    )
)
# Full stops of Urdu and of Armenian: abbreviations and times have them too, but without white space after them.
_ENDS_BEFORE_SPACE = "۔։"

# A run of stops, then marks that may close a sentence (quotes, brackets, footnote marks), then white space.
_FOOTNOTE = r"\[[^\[\]\n]{1,24}\]"
_CLOSE = rf"""(?:[”’」』）»)\]]|["'](?=\s|$)|{_FOOTNOTE})*"""
# Greek has a question mark that looks like a semicolon. The wide full stop of Japanese and Chinese may be in a number.
_ENGLISH_STOPS = ".!?…"
_STOPS = {"el": f"{_ENGLISH_STOPS};\u037e"}
_CLOSES = dict.fromkeys(("cs", "de", "et", "lt", "sr"), "“‘")  # „so“: the English opening quotes
_WIDE_STOPS = {"ja": r"|．(?!\d)", "zh": r"|．(?!\d)"}
# Thai has no full stop: a space between two of its letters ends a sentence, or a part of one.
_SPACES = {"th": r"|(?<=[\u0e00-\u0e4e])\s+(?=[\u0e00-\u0e4e])"}
_SHORTEST_THAI = 60  # characters of a sentence that ends at a space
_LAST_WORD = re.compile(r"[^\s(\[{\"'“‘«`—–/]*$")
_LONGEST_ABBREVIATION = 24
_WITH_ORDINALS = frozenset("cs da de et fi hu no sr tr".split())
_LONGEST_ORDINAL = 2  # digits: a day or a century; a year ends a sentence
_OPENING = re.compile(r"(?:[\"'“‘«(\[`]\s?)*")
_WORD = re.compile(r"[^\W\d_]+(?=[\s,’'])")
_ACRONYM = re.compile(r"(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,2}")  # U.S, p.m, Ph.D: the last full stop is the one in question
_ROMAN = re.compile(r"[IVXLC]+(?=[\s,.:;)])")
_CANNOT_OPEN = frozenset(",;:.!?)]}>%&/=+-–—<")
_QUOTE = '"'

# Always before a name or a number.
_TITLES = frozenset(
    "mr mrs ms mx dr prof gen lt col sgt capt cpt maj cmdr adm cpl pvt brig rev fr sr hon sen rep gov pres messrs mme "
    "mlle mgr msgr mt ss sts v vs cf c ca approx viz eg ie nr atty asst supt det insp pfc spc amb ald".split()
)
# Before a number they are abbreviations, elsewhere words or the end of a sentence.
_BEFORE_NUMBERS = frozenset(
    "no nos vol vols p pp fig figs ch chap sec art op pt ver ed jan feb mar apr jun jul aug sep sept oct nov dec "
    "r fl aft bef lit".split()
)
# Within a sentence as often as at its end: a word that usually opens a sentence decides.
_EITHER = frozenset(
    "inc ltd co corp bros llc plc jr esq etc al st ft ave blvd rd dept univ assn est eds trans dist hr min max oz lb "
    "lbs sq mi div fl cent mk isa bl gov't int'l orig prod var subsp sp spp".split()
)
# Likewise, where datelines have them ("SALEM, Ore. (AP)"). With a small letter some of them are words.
_STATES = frozenset(
    "Ala Ariz Ark Calif Colo Conn Del Fla Ga Ill Ind Kan Ky La Mass Md Mich Minn Miss Mo Mont Neb Nev Okla Ore Pa "
    "Tenn Tex Va Vt Wash Wis Wyo".split()
)
OPENERS = frozenset(
    "the a an in on at of he she it they we i you his her its their our my your this that these those there here when "
    "while where who what why how which after before although though however but and or as for from by with during "
    "since if then also some many most both one two three under until upon following according because another other "
    "such not no despite among between over through throughout once today later meanwhile additionally furthermore "
    "moreover thus therefore each every all several only just like to instead unlike within without about early "
    "originally initially eventually finally".split()
)


class Words(NamedTuple):
    """Words of a language, in lower case, that decide if a full stop ends a sentence.

    Attributes:
        titles: always before a name or a number.
        before_numbers: abbreviations before a number, elsewhere words or the end of a sentence.
        either: within a sentence as often as at its end; `openers` decide.
        openers: words that usually open a sentence.
    """

    titles: frozenset[str]
    before_numbers: frozenset[str]
    either: frozenset[str]
    openers: frozenset[str]


class _Rules(NamedTuple):
    """Rules of a language.

    Attributes:
        stop: pattern of a possible end of a sentence.
        words: the English lists and its own.
        ordinals: True if a number with a full stop may be an ordinal before a capital: "am 3. Oktober".
    """

    stop: re.Pattern[str]
    words: Words
    ordinals: bool


@cache
def _rules(language: str) -> _Rules:
    words = Words(_TITLES, _BEFORE_NUMBERS, _EITHER, OPENERS)._asdict()
    for line in ABBREVIATIONS.read_text(encoding="utf-8").splitlines():
        code, name, text = line.split("\t")
        if code == language:
            words[name] |= {*text.split()}
    stops, wide = _STOPS.get(language, _ENGLISH_STOPS), _WIDE_STOPS.get(language, "")
    closes = _CLOSES.get(language, "")
    pattern = rf"""(?P<stop>(?<![{stops}])[{stops}]++(?:\ [{stops}]+)*)
         (?P<close>(?:["'”’»)\]{closes}]|{_FOOTNOTE}|\s(?:''|[”»)\]](?=\s|$)))*)
         (?P<gap>\s+)
       | (?P<wide>(?:[{_ENDS}]|[{_ENDS_BEFORE_SPACE}](?=[{_ENDS_BEFORE_SPACE}]*{_CLOSE}(?:\s|$)){wide})
                  [{_ENDS}{_ENDS_BEFORE_SPACE}{stops}]*(?:\ [།༎]+)*{_CLOSE})\s*
       {_SPACES.get(language, "")}"""
    return _Rules(re.compile(pattern, re.VERBOSE), Words(**words), language in _WITH_ORDINALS)


def split(text: str, language: str = PLAIN) -> list[tuple[int, int]]:
    """Find the sentences of a text.

    Args:
        text: any text.
        language: one of `languages.CHOICES`; without rules of its own it is split like English.

    Returns:
        Half-open ranges of characters. They are in order, do not overlap, have no white space at either end, and
        together hold every character that is not white space. The same text always gives the same ranges.
    """
    rules = _rules(language)
    # A combining mark belongs to the white space before it, so a paragraph cannot begin with one.
    paragraphs = []
    start = 0
    for blank in _BLANK_LINES.finditer(text):
        if not MARK.match(text, blank.end()):
            paragraphs.append((start, blank.start()))
            start = blank.end()
    paragraphs.append((start, len(text)))
    sentences = []
    for start, end in paragraphs:
        for stop in [*_boundaries(text, start, end, rules), end]:
            first, last = _skip_space(text, start, stop), stop
            while first < last and text[last - 1].isspace():
                last -= 1
            if first < last:
                sentences.append((first, last))
            start = stop
    return sentences


def _boundaries(text: str, start: int, end: int, rules: _Rules) -> Iterator[int]:
    """Yield the positions at which a sentence ends and another follows within the paragraph `[start, end)`."""
    sentence, quotes, counted = start, 0, start
    for match in rules.stop.finditer(text, start, end):
        if match["wide"] is not None:
            boundary, ends = match.end("wide"), True
        elif match["stop"] is None:  # the space of Thai
            boundary, ends = match.start(), match.start() - sentence >= _SHORTEST_THAI
        else:
            boundary = match.end("close")
            quotes += text.count(_QUOTE, counted, boundary)
            counted = boundary
            after = match.end() + 1
            if quotes % 2 and text.startswith(_QUOTE, match.end(), end) and (after == end or text[after].isspace()):
                # Of two quotation marks with spaces around them, the second belongs to the sentence before it.
                boundary = after
            ends = _ends_sentence(text, sentence, match, boundary, end, rules)
        following = _skip_space(text, boundary, end)
        if ends and following < end and not MARK.match(text, following):
            yield boundary
            sentence = boundary


def _ends_sentence(text: str, sentence: int, match: re.Match[str], boundary: int, end: int, rules: _Rules) -> bool:
    """Return True if the stop of `match` ends the sentence from `sentence` on; the next may begin at `boundary`."""
    following = _skip_space(text, boundary, end)
    opening = _OPENING.match(text, following, end)
    word = opening.end() if opening else following
    if word >= end or text[word] in _CANNOT_OPEN:
        return False
    first = text[word]
    stop, last = match["stop"], match.end("stop") - 1
    apart = stop[-1] == "." and last > sentence and text[last - 1].isspace()
    word_start = max(sentence, match.start("stop") - _LONGEST_ABBREVIATION)
    last_word = _LAST_WORD.search(text[word_start : match.start("stop")].rstrip())
    before = last_word[0] if last_word else ""
    if "…" in stop or stop.count(".") > 2 or ".." in stop:
        return first.isupper()
    if first.islower():
        # "the earth . tRNA does": only tokenized text is sure enough of its full stops.
        return apart and boundary == last + 1 and word == following and not _is_title(before, rules)
    if stop[-1] != ".":
        # "Airplane ! ( 1980 )" is a title and its year; "014 ! 14" is a sort key of a table.
        return not first.isdigit() and text[following] != "("
    if apart:
        decimal = first.isdigit() and text[max(sentence, last - 3) : last].rstrip().endswith((",", "("))
        return not decimal and not _is_title(before, rules)
    is_first = match.start("stop") - len(before) == _skip_space(text, sentence, end)
    return _ends_after(before, is_first, text, word, rules)


def _ends_after(before: str, starts_sentence: bool, text: str, word: int, rules: _Rules) -> bool:
    """Return True if a full stop right after the word `before` ends a sentence, if the next word begins at `word`."""
    if _is_title(before, rules):
        return False
    lower = before.lower()
    if lower in rules.words.before_numbers and (text[word].isdigit() or _ROMAN.match(text, word)):
        return False
    initial = len(before) == 1 and before.isupper()
    ordinal = rules.ordinals and before.isdigit() and len(before) <= _LONGEST_ORDINAL and not starts_sentence
    if initial or ordinal or lower in rules.words.either or before in _STATES or _ACRONYM.fullmatch(before):
        next_word = _WORD.match(text, word)
        return next_word is not None and next_word[0].lower() in rules.words.openers
    return not (starts_sentence and before.isdigit())  # "1. Apples" is one item of a list


def _is_title(word: str, rules: _Rules) -> bool:
    return word.lower() in rules.words.titles and not (len(word) == 1 and word.isupper())  # "c. 1400", but "vitamin C."


def _skip_space(text: str, start: int, end: int) -> int:
    while start < end and text[start].isspace():
        start += 1
    return start
