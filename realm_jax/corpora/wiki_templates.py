"""What templates of the English Wikipedia say in words: the common ones that stand inside of sentences.

A template is a page of its own, which a dump of articles does not hold, so rules say here what they print. Numbers stay
as they were written: `convert` gives the first unit and converts nothing. A name without a rule is printed as nothing;
names that are known to have no words of the article are distinguished from unknown ones.
Not for finding templates: see `realm_jax.corpora.wikitext`. Read `render` next; the names are in `wiki_tables`.
"""

import re
from collections.abc import Callable

from realm_jax.corpora import wiki_tables as tables

Arguments = dict[str, str]  # "1", "2", … for those without names; in the order in which they were given
Rule = Callable[[Arguments], str]

RULES: dict[str, Rule] = {}
_MONTHS = "January February March April May June July August September October November December".split()
_UNIT_CODE = 40  # characters; a longer argument is no code
_MULTIPLE = re.compile(r"(e3|e6|e9|e12|[kMGT])(.+)")


def render(name: str, arguments: Arguments) -> str | None:
    """The words that a template prints, perhaps none; None when there is no rule for it.

    name: in lower case. Of arguments, white space at the ends does not matter.
    """
    arguments = {key: value.strip() for key, value in arguments.items()}
    if name in RULES:
        return RULES[name](arguments)
    if name.startswith("lang-"):
        return _labelled(name.removeprefix("lang-"), _first(arguments, "1", "text"))
    if name.startswith("script/"):
        return _first(arguments, "1")
    function, colon, value = name.partition(":")
    if colon and function in _FUNCTIONS:
        return _FUNCTIONS[function](value.strip())
    return None


def is_wordless(name: str) -> bool:
    """Whether a template is known to print nothing that belongs to the text of an article."""
    return (
        name.partition(":")[0] in tables.WORDLESS
        or name in tables.WORDLESS
        or name.startswith(tables.WORDLESS_BEGINNINGS)
        or name.endswith(tables.WORDLESS_ENDINGS)
    )


def _first(arguments: Arguments, *names: str) -> str:
    """The first of some arguments that is not empty."""
    return next((arguments[name] for name in names if arguments.get(name)), "")


def _given(arguments: Arguments) -> list[str]:
    """Arguments without names that are not empty."""
    return [value for name, value in arguments.items() if name.isdecimal() and value]


def _padded(arguments: Arguments, count: int) -> list[str]:
    """The first arguments without names, and nothing for those that were not given."""
    return (_given(arguments) + [""] * count)[:count]


# --- Languages --------------------------------------------------------------------------------------------------------


def _labelled(code: str, text: str) -> str:
    """`French: mot`; without the language when its code has no name here."""
    name = tables.LANGUAGES.get(code.lower())
    return f"{name}: {text}" if name and text else text


def _nihongo(arguments: Arguments) -> str:
    """`Aikido (合気道, Aikidō)`."""
    english, *japanese = (_first(arguments, name) for name in ("1", "2", "3", "4"))
    inside = ", ".join(text for text in japanese if text)
    return f"{english} ({inside})" if english and inside else english or inside


def _chinese(arguments: Arguments) -> str:
    """`Chinese: 中文; pinyin: Zhōngwén`."""
    names = {"c": "Chinese", "s": "simplified Chinese", "t": "traditional Chinese", "p": "pinyin", "l": "lit."}
    return "; ".join(f"{label}: {arguments[key]}" for key, label in names.items() if arguments.get(key))


def _interlanguage(arguments: Arguments) -> str:
    """A link to another Wikipedia: `ill|Name|de|…`, formerly `ill|de|Name|…`."""
    first = _first(arguments, "1")
    was_code = re.fullmatch(r"[a-z]{2,3}", first) is not None
    return _first(arguments, "lt") or (_first(arguments, "4", "3", "2") if was_code else first)


# --- Numbers and units ------------------------------------------------------------------------------------------------


def _number(text: str) -> str:
    """A number with commas between its thousands; anything else as it is."""
    match = re.fullmatch(r"([-−+]?)([0-9]{4,15})(\.[0-9]+)?", text)
    return f"{match[1]}{int(match[2]):,}{match[3] or ''}" if match else text


def _convert(arguments: Arguments) -> str:
    """`1,300 miles`, `10 to 20 kilometres`, `5 feet 11 inches`, `87 million acres`."""
    return " ".join(_with_unit(number, code, arguments) for number, code in _quantities(arguments))


def unknown_units(name: str, arguments: Arguments) -> list[str]:
    """The codes of units that `render` prints as they are, since they have no name here."""
    if name not in ("convert", "cvt"):
        return []
    codes = [code for _, code in _quantities({key: value.strip() for key, value in arguments.items()})]
    return [code for code in codes if code and _multiple(code)[1] is None]


def _quantities(arguments: Arguments) -> list[tuple[str, str]]:
    """The numbers or ranges that `convert` is given, with the codes of their units; two of feet and inches."""
    number, *rest = _given(arguments) or [""]
    text = _number(number)
    while len(rest) > 1 and rest[0] in tables.RANGES:
        text, rest = text + tables.RANGES[rest[0]] + _number(rest[1]), rest[2:]
    found = [(text, rest[0] if rest else "")]
    if len(rest) > 2 and re.fullmatch(r"[0-9.,/+]+", rest[1]):
        found.append((rest[1], rest[2]))
    return found


def _unit(code: str) -> tables.Unit | None:
    """A unit of the table, or one by another: `t/ha`."""
    if code in tables.UNITS or "/" not in code or len(code) > _UNIT_CODE:
        return tables.UNITS.get(code)
    above, below = map(_unit, code.split("/", 1))
    if above is None or below is None:
        return None
    return f"{above[0]} per {below[0]}", f"{above[1]} per {below[0]}", f"{above[2]}/{below[2]}"


def _multiple(code: str) -> tuple[str, tables.Unit | None]:
    """The word for the multiple in a code, perhaps none, and the unit: `million` and acres of `e6acre`."""
    unit, match = _unit(code), _MULTIPLE.fullmatch(code)
    return (tables.MULTIPLES[match[1]], _unit(match[2])) if unit is None and match else ("", unit)


def _with_unit(number: str, code: str, arguments: Arguments) -> str:
    multiple, unit = _multiple(code)
    if unit is None:
        return f"{number} {code}".strip()
    one, several, symbol = unit
    if arguments.get("sp") == "us":
        one, several = (name.replace("metre", "meter").replace("litre", "liter") for name in (one, several))
    words = [number, multiple] if multiple else [number]
    if arguments.get("adj") == "on" and one.isascii():
        return "-".join([*words, one.replace(" ", "-")])
    if arguments.get("abbr") in ("on", "in"):
        return " ".join([*words, symbol])
    return " ".join([*words, one if words == ["1"] or arguments.get("adj") == "on" else several])


def _fraction(arguments: Arguments) -> str:
    """`1/3`, `3/2`, `1 1/2`."""
    given = _given(arguments)
    if len(given) < 2:
        return f"1/{given[0]}" if given else ""
    return " ".join([*given[:-2], "/".join(given[-2:])])


def _value(arguments: Arguments) -> str:
    """`6.241×10^18 C`."""
    text = _number(_first(arguments, "1"))
    power = f"×10^{arguments['e']}" if arguments.get("e") else ""
    unit = _first(arguments, "u", "ul")
    return f"{text}{power} {unit}" if unit else text + power


# --- Dates ------------------------------------------------------------------------------------------------------------


def _date(year: str, month: str, day: str, day_first: bool) -> str:
    """`February 12, 1809` or `12 February 1809`."""
    if re.fullmatch(r"0?[1-9]|1[0-2]", month):
        month = _MONTHS[int(month) - 1]
    day = day.lstrip("0")
    if month and day:
        return f"{day} {month} {year}" if day_first else f"{month} {day}, {year}"
    return f"{month} {year}" if month else year


def _full_date(arguments: Arguments) -> str:
    year, month, day = _padded(arguments, 3)
    return _date(year, month, day, arguments.get("df", "")[:1] == "y")


def _as_of(arguments: Arguments) -> str:
    """`As of March 2014`."""
    if arguments.get("alt"):
        return arguments["alt"]
    verb = "since" if arguments.get("since") else "as of"
    year, month, day = _padded(arguments, 3)
    date = _date(year, month, day, arguments.get("df", "").upper() != "US")
    return f"{verb if arguments.get('lc') else verb.capitalize()} {date}"


def _years(prefix: str) -> Rule:
    """`c. 1400`, `r. 1066–1087`."""
    return lambda arguments: " ".join([prefix, "–".join(_given(arguments)[:2])]).strip()


def _old_style(arguments: Arguments) -> str:
    """`February 2 [O.S. January 20] 1905`."""
    day, year, old = _padded(arguments, 3)
    return f"{day} [O.S. {old}] {year}"


# --- Ships, citations and quotations ----------------------------------------------------------------------------------


def _ship(prefix: str, name: str, number: str, form: str) -> str:
    """`USS Hornet (CV-12)`; `form` may ask for less. A year or pennant number is not shown."""
    hull = f" ({number})" if number and not number.isdecimal() else ""
    return {"2": name, "3": name + hull, "6": f"{prefix} {name}"}.get(form, f"{prefix} {name}{hull}").strip()


def _ship_of(prefix: str) -> Rule:
    return lambda arguments: _ship(prefix, *(_first(arguments, key) for key in ("1", "2", "3")))


def _author_year(arguments: Arguments) -> str:
    """`Boolos & Jeffrey (1999)`: a citation that a sentence is about."""
    *names, year = _given(arguments) or [""]
    return f"{' & '.join(names)} ({year})" if names else year


def _quotation(arguments: Arguments) -> str:
    """A paragraph of its own, and who said it."""
    text = _first(arguments, "text", "quote", "1")
    source = (_first(arguments, *names) for names in (("author", "sign", "2"), ("source", "3")))
    return "\n\n" + " — ".join([text, *filter(None, [", ".join(filter(None, source))])]) + "\n\n"


def _poem(arguments: Arguments) -> str:
    """A list of lines."""
    lines = _first(arguments, "text", "1").replace("\n", "\n:")
    return _quotation(arguments | {"text": f":{lines}"})


def _list(arguments: Arguments) -> str:
    return "".join(f"\n* {item}" for item in _given(arguments)) + "\n"


# --- The rules --------------------------------------------------------------------------------------------------------


def _add(names: str, rule: Rule) -> None:
    for name in names.split("/"):
        RULES[name] = rule


def _words(*names: str) -> Rule:
    return lambda arguments: _first(arguments, *names)


def _constant(text: str) -> Rule:
    return lambda arguments: text


def _before(prefix: str) -> Rule:
    return lambda arguments: prefix + _number(_first(arguments, "1"))


_add(tables.FIRST_ARGUMENT, _words("1", "text"))
_add(tables.SECOND_ARGUMENT, _words("2", "text"))
_add(tables.LAST_ARGUMENT, lambda arguments: (_given(arguments) or [""])[-1])
_add(tables.SPANS, _words("text", "1"))
_add("su", lambda arguments: _first(arguments, "p") + _first(arguments, "b"))
_add(tables.JOINED_ARGUMENTS, lambda arguments: "".join(_given(arguments)))
_add("hlist/flat list", lambda arguments: ", ".join(_given(arguments)))
_add("sortname", lambda arguments: " ".join(_padded(arguments, 2)))
_add("bibleverse/bibleref/bibleref2", lambda arguments: " ".join(_given(arguments)[:2]))
_add("lit/literal translation/literally", lambda arguments: f"lit. '{_first(arguments, '1')}'")
_add("angbr/angle bracket", lambda arguments: f"⟨{_first(arguments, '1')}⟩")
_add("columns", lambda arguments: "\n".join(v for name, v in arguments.items() if re.fullmatch(r"col\d+", name)))
for _name, _sign in tables.SIGNS.items():
    RULES[_name] = _constant(_sign)
_add("langx", lambda arguments: _labelled(_first(arguments, "1"), _first(arguments, "2", "text")))
_add("nihongo/nihongo krt/nihongo2", _nihongo)
_add("nihongo3", lambda arguments: _nihongo(dict(zip("123", _padded(arguments, 3)[::-1], strict=True))))
_add("zh/lang-zh", _chinese)
_add("ill/interlanguage link", _interlanguage)
_add("convert/cvt", _convert)
_add("frac/fraction/sfrac", _fraction)
_add("val", _value)
_add("e", lambda arguments: f"×10^{_first(arguments, '1')}")
_add("nts/format price", _before(""))
_add("nuclide/nuclide2/simplenuclide", lambda arguments: "-".join(_given(arguments)[:2]))
_add("us patent", _before("U.S. Patent "))
for _name, _sign in tables.CURRENCIES.items():
    RULES[_name] = _before(_sign)
_add(tables.DATES, _full_date)
_add("as of/asof", _as_of)
_add("circa/c./ca.", _years("c."))
_add("floruit/fl.", _years("fl."))
_add("reign/r.", _years("r."))
_add("oldstyledate", _old_style)
for _name in tables.SHIPS.split("/"):
    RULES[_name] = _ship_of(_name.upper())
_add("ship", lambda arguments: _ship(*(_first(arguments, key) for key in ("1", "2", "3", "4"))))
_add("sclass/sclass-/sclass2/sclass2-", lambda arguments: "-class ".join(_given(arguments)[:2]))
_add("harvtxt", _author_year)
_add(tables.QUOTATIONS, _quotation)
_add("poem quote/poemquote", _poem)
_add(tables.LISTS, _list)

_FUNCTIONS: dict[str, Callable[[str], str]] = {"formatnum": _number, "lc": str.lower, "lcfirst": str, "ucfirst": str}
