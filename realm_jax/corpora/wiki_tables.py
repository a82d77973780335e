"""Names that templates of the English Wikipedia go by, and the words of those that print a sign, a unit or a language.

Chosen by counting templates outside of references, tables and notes. Only data: what is done with it stands in
`realm_jax.corpora.wiki_templates`. A name is in lower case; `/` stands between names of one thing.
"""


def _by_name(table: dict[str, str]) -> dict[str, str]:
    """One entry for every name in a key."""
    return {name: value for names, value in table.items() for name in names.split("/")}


# fmt: off
SIGNS = _by_name({
    "'": "'", "'s": "'s", '"': '"', "' \"": "' \"", "\" '": "\" '", '-"': '"', "!": "|", "=": "=",
    "·/dot/middot/•/bullet/bull": " · ", "\\": " / ", "nbsp/sp/space/spaces/thinsp/thin space/hair space/hairsp": " ",
    "br/break/-": "\n", "pb/paragraph break": "\n\n", "snd/snds/spnd/spaced ndash/spaced en dash": " – ",
    "ndash/en dash": "–", "mdash/em dash/mdashb": "—", "spaced mdash/spaced em dash": " — ", "hyphen": "-",
    "minus": "−", "±": "±", "times": "×", "pi": "π", "ellipsis/...": "…", "okina": "ʻ", "ayin": "ʿ", "hamza": "ʾ",
    "prime": "′", "°/degree": "°", "eqm": "⇌", "flat": "♭", "sharp": "♯", "natural": "♮", "bce": "BCE", "ce": "CE",
    "wbr/shy/zwsp/zwj/zwnj/lrm/rlm": "",
})

LANGUAGES = _by_name({
    "af": "Afrikaans", "sq": "Albanian", "am": "Amharic", "grc/grc-gre": "Ancient Greek", "ar": "Arabic",
    "arc": "Aramaic", "hy": "Armenian", "az": "Azerbaijani", "eu": "Basque", "be": "Belarusian", "bn": "Bengali",
    "ber": "Berber", "bs": "Bosnian", "br": "Breton", "bg": "Bulgarian", "my": "Burmese", "ca": "Catalan",
    "zh": "Chinese", "kw": "Cornish", "hr": "Croatian", "cs": "Czech", "da": "Danish", "nl": "Dutch",
    "eo": "Esperanto", "et": "Estonian", "fil": "Filipino", "fi": "Finnish", "fr": "French", "gl": "Galician",
    "ka": "Georgian", "de": "German", "el": "Greek", "gu": "Gujarati", "ha": "Hausa", "haw": "Hawaiian", "he": "Hebrew",
    "hi": "Hindi", "hu": "Hungarian", "is": "Icelandic", "id": "Indonesian", "ga": "Irish", "it": "Italian",
    "ja": "Japanese", "kn": "Kannada", "kk": "Kazakh", "km": "Khmer", "ko": "Korean", "ku": "Kurdish", "ky": "Kyrgyz",
    "lo": "Lao", "la": "Latin", "lv": "Latvian", "lt": "Lithuanian", "lb": "Luxembourgish", "mk": "Macedonian",
    "ms": "Malay", "ml": "Malayalam", "mt": "Maltese", "mi": "Māori", "mr": "Marathi", "mn": "Mongolian",
    "ne": "Nepali", "no/nb/nn": "Norwegian", "oc": "Occitan", "ang": "Old English", "fro": "Old French",
    "non": "Old Norse", "ps": "Pashto", "fa": "Persian", "pl": "Polish", "pt": "Portuguese", "pa": "Punjabi",
    "ro": "Romanian", "ru/rus": "Russian", "sa": "Sanskrit", "sco": "Scots", "gd": "Scottish Gaelic", "sr": "Serbian",
    "sh": "Serbo-Croatian", "si": "Sinhala", "sk": "Slovak", "sl": "Slovene", "so": "Somali", "es": "Spanish",
    "sw": "Swahili", "sv": "Swedish", "tl": "Tagalog", "ta": "Tamil", "tt": "Tatar", "te": "Telugu", "th": "Thai",
    "bo": "Tibetan", "tr": "Turkish", "tk": "Turkmen", "uk": "Ukrainian", "ur": "Urdu", "uz": "Uzbek",
    "vi": "Vietnamese", "cy": "Welsh", "yi": "Yiddish", "yo": "Yoruba", "zu": "Zulu",
})

CURRENCIES = _by_name({
    "us$/usd/usdollar": "US$", "£/gbp/pound sterling": "£", "€/eur/euro": "€", "¥/jpy/yen": "¥",
    "inr/indian rupee": "₹", "a$/aud": "A$", "cad/c$": "CA$", "nz$": "NZ$", "hk$": "HK$",
})

# What stands between two numbers of `convert`.
RANGES = _by_name({
    "to/to(-)/to-": " to ", "-/–/&ndash;": "–", "and/and(-)/and-": " and ", "or": " or ", "by/by(x)": " by ",
    "x/xx/×/&times;/*": " × ", "±/&plusmn;": " ± ", "to about": " to about ", ",": ", ", ", and": ", and ",
    ", or": ", or ", "+": " + ",
}) | {"+/-": " ± "}
MULTIPLES = _by_name({"k/e3": "thousand", "M/e6": "million", "G/e9": "billion", "T/e12": "trillion"})

Unit = tuple[str, str, str]

# Codes of `convert`: one, several, and the symbol that `abbr=on` shows.
UNITS: dict[str, Unit] = {
    code: unit
    for codes, unit in {
        # length
        "mi|mile|miles": ("mile", "miles", "mi"), "ft|foot|feet": ("foot", "feet", "ft"),
        "yd|yard": ("yard", "yards", "yd"), "in|inch|inches": ("inch", "inches", "in"),
        "nmi": ("nautical mile", "nautical miles", "nmi"), "ly": ("light-year", "light-years", "ly"),
        "AU|au": ("astronomical unit", "astronomical units", "AU"), "pc": ("parsec", "parsecs", "pc"),
        "kpc": ("kiloparsec", "kiloparsecs", "kpc"), "Mpc": ("megaparsec", "megaparsecs", "Mpc"),
        "furlong": ("furlong", "furlongs", "furlongs"), "fathom|ftm": ("fathom", "fathoms", "ftm"),
        "chain": ("chain", "chains", "chains"), "rod": ("rod", "rods", "rods"),
        "league": ("league", "leagues", "leagues"), "ångström|angstrom|Å": ("ångström", "ångströms", "Å"),
        "micrometre|micron": ("micrometre", "micrometres", "μm"), "metre|meter": ("metre", "metres", "m"),
        "kilometre|kilometer": ("kilometre", "kilometres", "km"), "hand": ("hand", "hands", "h"),
        # area
        "sqmi|mi2": ("square mile", "square miles", "sq mi"),
        "km2|sqkm": ("square kilometre", "square kilometres", "km2"),
        "sqft|ft2": ("square foot", "square feet", "sq ft"), "m2|sqm": ("square metre", "square metres", "m2"),
        "sqin|in2": ("square inch", "square inches", "sq in"), "sqyd|yd2": ("square yard", "square yards", "sq yd"),
        "cm2|sqcm": ("square centimetre", "square centimetres", "cm2"),
        "mm2|sqmm": ("square millimetre", "square millimetres", "mm2"), "acre|acres": ("acre", "acres", "acres"),
        "sqnmi": ("square nautical mile", "square nautical miles", "sq nmi"),
        "ha|hectare": ("hectare", "hectares", "ha"), "dunam": ("dunam", "dunams", "dunams"),
        # volume
        "cuft|ft3": ("cubic foot", "cubic feet", "cu ft"), "cumi|mi3": ("cubic mile", "cubic miles", "cu mi"),
        "cuin|in3": ("cubic inch", "cubic inches", "cu in"), "cuyd|yd3": ("cubic yard", "cubic yards", "cu yd"),
        "m3": ("cubic metre", "cubic metres", "m3"), "km3": ("cubic kilometre", "cubic kilometres", "km3"),
        "cm3|cc": ("cubic centimetre", "cubic centimetres", "cm3"),
        "dm3": ("cubic decimetre", "cubic decimetres", "dm3"), "L|l|litre": ("litre", "litres", "L"),
        "ml|mL": ("millilitre", "millilitres", "mL"), "cl|cL": ("centilitre", "centilitres", "cL"),
        "hl|hL": ("hectolitre", "hectolitres", "hL"), "Ml|ML": ("megalitre", "megalitres", "ML"),
        "Gl|GL": ("gigalitre", "gigalitres", "GL"), "USgal|U.S.gal": ("US gallon", "US gallons", "US gal"),
        "impgal": ("imperial gallon", "imperial gallons", "imp gal"), "USqt": ("US quart", "US quarts", "US qt"),
        "USpt": ("US pint", "US pints", "US pt"), "USfloz": ("US fluid ounce", "US fluid ounces", "US fl oz"),
        "imppt": ("imperial pint", "imperial pints", "imp pt"),
        "impfloz": ("imperial fluid ounce", "imperial fluid ounces", "imp fl oz"),
        "USbsh": ("US bushel", "US bushels", "US bsh"), "impbsh": ("imperial bushel", "imperial bushels", "imp bsh"),
        "oilbbl|bbl": ("barrel", "barrels", "bbl"), "acre.ft|acreft|acre·ft": ("acre-foot", "acre-feet", "acre⋅ft"),
        # mass and force
        "lb|lbs|pound": ("pound", "pounds", "lb"), "oz": ("ounce", "ounces", "oz"), "st": ("stone", "stone", "st"),
        "t|MT|tonne": ("tonne", "tonnes", "t"), "LT": ("long ton", "long tons", "long tons"),
        "ST": ("short ton", "short tons", "short tons"),
        "long cwt": ("long hundredweight", "long hundredweight", "long cwt"),
        "short cwt": ("short hundredweight", "short hundredweight", "short cwt"),
        "ozt": ("troy ounce", "troy ounces", "ozt"), "gr": ("grain", "grains", "gr"),
        "carat": ("carat", "carats", "carats"), "lbf": ("pound-force", "pounds-force", "lbf"),
        "kgf": ("kilogram-force", "kilograms-force", "kgf"),
        # speed, power, energy, pressure
        "mph|mi/h": ("mile per hour", "miles per hour", "mph"), "kn|knot": ("knot", "knots", "kn"),
        "kph|km/h": ("kilometre per hour", "kilometres per hour", "km/h"),
        "m/s2": ("metre per second squared", "metres per second squared", "m/s2"),
        "ft/s2": ("foot per second squared", "feet per second squared", "ft/s2"),
        "hp|bhp": ("horsepower", "horsepower", "hp"), "shp": ("shaft horsepower", "shaft horsepower", "shp"),
        "ihp": ("indicated horsepower", "indicated horsepower", "ihp"),
        "PS": ("metric horsepower", "metric horsepower", "PS"),
        "psi": ("pound per square inch", "pounds per square inch", "psi"), "bar": ("bar", "bars", "bar"),
        "mbar": ("millibar", "millibars", "mbar"), "atm": ("standard atmosphere", "standard atmospheres", "atm"),
        "inHg": ("inch of mercury", "inches of mercury", "inHg"),
        "mmHg": ("millimetre of mercury", "millimetres of mercury", "mmHg"), "cal": ("calorie", "calories", "cal"),
        "kcal|Cal": ("kilocalorie", "kilocalories", "kcal"),
        "BTU|Btu": ("British thermal unit", "British thermal units", "BTU"),
        "lbft|lb.ft|lbfft|lbf.ft|lb·ft|lbf·ft": ("pound-foot", "pound-feet", "lb⋅ft"),
        "ftlb|ftlbf|ft.lbf": ("foot-pound", "foot-pounds", "ft⋅lb"),
        "Nm|N.m|N·m": ("newton-metre", "newton-metres", "N⋅m"),
        "mpgus|mpgUS|mpg": ("mile per US gallon", "miles per US gallon", "mpg‑US"),
        "mpgimp": ("mile per imperial gallon", "miles per imperial gallon", "mpg‑imp"),
        "L/100km|l/100km": ("litre per 100 kilometres", "litres per 100 kilometres", "L/100 km"),
        # temperature and time
        "C|°C|C-change": ("°C", "°C", "°C"), "F|°F|F-change": ("°F", "°F", "°F"), "K|K-change": ("K", "K", "K"),
        "R": ("°R", "°R", "°R"), "s|second": ("second", "seconds", "s"), "min|minute": ("minute", "minutes", "min"),
        "h|hour": ("hour", "hours", "h"), "d|day": ("day", "days", "d"), "week": ("week", "weeks", "weeks"),
        "month": ("month", "months", "months"), "year|yr|a": ("year", "years", "years"),
        "PD": ("inhabitant", "inhabitants", ""), "mol": ("mole", "moles", "mol"),
        "$|US$": ("US dollar", "US dollars", "US$"),
    }.items()
    for code in codes.split("|")
}
_SI = {
    "m": "metre", "g": "gram", "W": "watt", "Wh": "watt-hour", "J": "joule", "eV": "electronvolt", "N": "newton",
    "Pa": "pascal", "Hz": "hertz", "V": "volt", "A": "ampere", "s": "second", "t": "tonne", "B": "byte", "bit": "bit",
}
_SI_PREFIXES = {
    "": "", "k": "kilo", "M": "mega", "G": "giga", "T": "tera", "h": "hecto", "c": "centi", "m": "milli", "μ": "micro",
    "µ": "micro", "u": "micro", "n": "nano",
}
for _prefix, _times in _SI_PREFIXES.items():
    for _symbol, _name in _SI.items():
        _one = _times + _name
        UNITS.setdefault(_prefix + _symbol, (_one, _one if _name == "hertz" else _one + "s", _prefix + _symbol))
# fmt: on

# The words stand in the argument of that number.
FIRST_ARGUMENT = (
    "nowrap/nobr/nobreak/small/smaller/big/large/larger/huge/midsize/bold/em/strong/mono/monospace/code/kbd/samp/var"
    "/mvar/math/nobold/noitalic/normal/underline/overline/small caps/smallcaps/sc/sup/sub/music/vanchor/visible anchor"
    "/not a typo/notatypo/typo/proper name/as written/chem2/unicode/polytonic/iast/abbr/tooltip/abbrlink/nq/hebrew"
    "/railgauge/rail gauge/track gauge/flag/flagcountry/flagu/center/block indent/gloss/plainlist/flatlist/longitem"
    "/crossreference/crossref/interlanguage link multi/illm/sic/font"
)
SECOND_ARGUMENT = "lang/langr/rtl-lang/script/font color/color/colored text/align/audio/wikt-lang"
LAST_ARGUMENT = "transl/translit/transliteration/columns-list/columns list/resize"
SPANS = "citation needed span/cns/clarify span/fact span"
JOINED_ARGUMENTS = "chem/simple chem/linktext/gaps"
DATES = (
    "birth date/birth-date/birth date and age/birth-date and age/bda/death date/death-date/death date and age/dob/dda"
    "/birth year and age/death year and age/start date/end date/start-date/end-date/start date and age/film date/dts"
)
SHIPS = "uss/hms/ss/ms/mv/rms/hmas/hmcs/hmnzs/sms/ins/uscgc/usns"
QUOTATIONS = "quote/blockquote/bquote/cquote/quotation/centered pull quote/long quotation/bq"
LISTS = "unbulleted list/ubl/ublist/bulleted list/unordered list/ordered list"

# Templates that print nothing of an article's text.
WORDLESS = frozenset(
    # doubts of editors
    "citation needed/cn/fact/clarify/when/who/which/where/why/by whom/according to whom/page needed/verify source/full"
    "/failed verification/better source/better source needed/dubious/vague/full citation needed/unreliable source?"
    "/update inline/update after/weasel-inline/qualify evidence/refimprove/refimprove section/unreferenced/update"
    "/unreferenced section/more footnotes/multiple issues/expand section/undue weight section/lead rewrite/mergefrom"
    "/disambiguation needed/dn/original research inline/or/technical reasons/contains special characters/globalize"
    # references and notes
    "/rp/r/nb/ref/note/notetag/reflist/refbegin/refend/refn/efn/notelist/inflation-fn/sfn/sfnp/sfnm/isbn/oclc/doi"
    "/#tag/gutenberg author/cref/ref label/note label/listen/external media/official website/harv/harvnb"
    # links to other articles
    "/main/main article/see also/see/further/further information/details/details3/about/redirect/redirect2/redirect4"
    "/for/other uses/other uses2/other people/distinguish/distinguish2/redirect-distinguish/hatnote/main category/also"
    "/related articles/broader/elect/wiktionary/wikisource/wikinews/commons/commons category/portal"
    # layout and pictures
    "/clear/clear left/clear right/clearleft/div col/div col end/col-begin/col-break/col-end/col-2/col-3/col-4/col-5"
    "/colbegin/colend/toc right/toc left/toc limit/compact toc/anchor/coord/flagicon/multiple image/multiple images"
    "/double image/wide image/css image crop/quote box/chart/chart top/chart bottom/chart/start/chart/end/legend/clade"
    "/bar box/bar chart/historical populations/us census population/weather box/largest cities/taxobox/speciesbox"
    "/automatic taxobox/italic title/good article/featured article/short description/engvarb/bots/defaultsort"
    "/displaytitle/authority control"
    # pronunciation
    "/respell/audio-ipa/pronunciation".split("/")
)
WORDLESS_BEGINNINGS = ("infobox", "cite ", "citation", "navbox", "pp-", "use ", "ipa", "campaignbox")
WORDLESS_ENDINGS = ("-stub", " stub", " sidebar", " navbox")

# Templates that say that a page tells namesakes apart; others have "disambig" in their names.
DISAMBIGUATIONS = "dab/disamb/hndis/geodis/mathdab/numberdis/schooldis/roaddis"
