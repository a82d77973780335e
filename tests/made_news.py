"""News-like records with known labels, made from article texts and a seed, for runs of which every count is known.

`made_texts` invents articles; any other texts will do as well. `make_news` turns them into records as crawls have them:
copies, edited copies, other versions of a page, pages in other languages, stubs, page furniture, and damage.
"""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from realm_jax.corpora import near_duplicates
from realm_jax.corpora.articles import Article
from realm_jax.corpora.near_duplicates import find_near_duplicates, fingerprint
from realm_jax.corpora.news import RULES
from realm_jax.data import sentences

DAMAGED = ("null", "not UTF-8", "not JSON", "surrogate")
KINDS = ("article", "furnished", "copy", "version", "edited", "foreign", "stub", *DAMAGED)
PAIRED = ("copy", "version", "edited")
SHARES = (40, 10, 8, 4, 14, 8, 8, 2, 2, 2, 2)  # of a hundred; the paired ones bring an article each
REASONS = {
    "copy": "the text of another article",
    "version": "the id of another article",
    "edited": "nearly the text of another article",
    "stub": f"fewer than {RULES['characters'][0]} characters",
    "null": "the text is null",
    "not UTF-8": "not UTF-8",
    "not JSON": "not JSON",
    "surrogate": "the text has half of a surrogate pair",
}


@dataclass(frozen=True)
class MadeRecord:
    """A line of a JSON Lines file, what kind of record it is, and the text that is left of it (of those that stay)."""

    line: bytes
    kind: str
    reason: str
    text: str


def make_news(texts: Sequence[str], count: int, seed: int = 0) -> list[MadeRecord]:
    """`count` records in a random order. Each kind that needs another article has one of its own.

    `texts`: at least `count` texts of 150 words or more that say different things.
    """
    rng = Random(seed)
    bodies = (_body(text) for text in texts)
    made: list[MadeRecord] = []
    for number in itertools.count():
        kind = KINDS[_share(number * 37 % 100)]
        if len(made) == count:
            break
        if kind in PAIRED and len(made) == count - 1:
            kind = "article"
        if kind in PAIRED:
            made.extend(_pair(kind, next(bodies), number, rng))
        elif kind == "foreign":
            code = rng.choice(sorted(FOREIGN))
            made.append(_record(kind, number, FOREIGN[code], rng, f"in another language ({code})"))
        elif kind == "stub":
            made.append(_record(kind, number, next(bodies)[:1], rng, REASONS[kind], shortest=True))
        elif kind == "furnished":
            body = next(bodies)
            made.append(_record(kind, number, _furnished(body, rng), rng, text="\n\n".join(body)))
        else:
            made.append(_record(kind, number, next(bodies), rng, REASONS.get(kind, "")))
    rng.shuffle(made)
    return made


def expected(made: Sequence[MadeRecord]) -> Counter[str]:
    """How many records are left out or damaged, by reason, and how many stay (under "")."""
    return Counter(record.reason for record in made)


def made_texts(count: int, seed: int = 0) -> list[str]:
    """Articles that were never written: a dozen sentences each, none of them in two articles but by rare chance."""
    rng = Random(f"texts {seed}")
    return [" ".join(_sentence(rng) for _ in range(12)) for _ in range(count)]


def without_copies(articles: Sequence[Article]) -> tuple[list[Article], Counter[str]]:
    """Those that are no near-duplicates, in their order, and how many are, by reason."""
    found = find_near_duplicates([fingerprint(article) for article in articles])
    staying = [article for article, code in zip(articles, found, strict=True) if not code]
    return staying, Counter(near_duplicates.REASONS[code] for code in found if code)


def _share(percent: int) -> int:
    for kind, share in enumerate(SHARES):
        percent -= share
        if percent < 0:
            return kind
    raise AssertionError("the shares add up to a hundred")


def _body(text: str) -> list[str]:
    """Two or more paragraphs of two sentences (the last may have one), 150 words or a little more in all."""
    whole = [" ".join(text[start:end].split()) for start, end in sentences.split(text)]
    paragraphs = [" ".join(whole[at : at + 2]) for at in range(0, len(whole), 2)]
    words = 0
    for number, paragraph in enumerate(paragraphs, start=1):
        words += len(paragraph.split())
        if words >= 150 and number > 1:
            return paragraphs[:number]
    raise ValueError(f"a text of {words} words in {len(paragraphs)} paragraphs, too few: {text[:40]!r}")


def _pair(kind: str, body: list[str], number: int, rng: Random) -> list[MadeRecord]:
    """An article and what is left out beside it; which of the two stays is for the hashes to say."""
    page = number if kind == "version" else number + 1_000_000
    other = body if kind == "copy" else [*body, _sentence(rng)] if kind == "version" else _edited(body, rng)
    return [_record("article", number, body, rng), _record(kind, page, other, rng, REASONS[kind])]


def _edited(body: list[str], rng: Random) -> list[str]:
    """Another first word, or a short line more: at least 95 % of the runs of five words are the same."""
    if rng.random() < 0.5:
        return ["Yesterday " + body[0].split(" ", 1)[1], *body[1:]]
    return [*body, "Agencies contributed to it."]


def _furnished(body: list[str], rng: Random) -> list[str]:
    lines = [*rng.sample(TOP, 2), *body]
    lines.insert(3, rng.choice(MIDDLE))
    return [line.replace(" ", rng.choice(["  ", " \u200b", "\u00a0", " \x07"]), 2) for line in lines] + rng.sample(
        BOTTOM, 2
    )


def _record(
    kind: str,
    page: int,
    paragraphs: Sequence[str],
    rng: Random,
    reason: str = "",
    text: str | None = None,
    shortest: bool = False,
) -> MadeRecord:
    """One record in one of the three shapes that are read."""
    body = "\n".join(paragraphs)
    body = body[: RULES["characters"][0] // 2] + "." if shortest else body
    url = f"https://news.example/{page:07d}"
    title = f"Report {page}"
    crawled = {"maintext": body, "language": "en", "date_publish": "2018-02-03 04:05:06"}
    hub = {"text": body, "domain": "news.example", "date": "2018-02-03", "image_url": None}
    shape = rng.choice([{"url": url} | crawled, {"url": url} | hub, {"id": url, "text": body}]) | {"title": title}
    return MadeRecord(_line(shape, kind), kind, reason, "\n\n".join(paragraphs) if text is None else text)


def _line(record: dict[str, str | None], kind: str) -> bytes:
    field = "maintext" if "maintext" in record else "text"
    if kind == "null":
        record = record | {field: None}
    if kind == "surrogate":
        record = record | {field: f"{record[field]} \ud83d"}
    line = json.dumps(record).encode()
    if kind == "not UTF-8":
        line = line.replace(b"news.example", b"news.ex\xe4mple")
    return line[:-9] if kind == "not JSON" else line


# --- Words ------------------------------------------------------------------------------------------------------------

_PEOPLE = "Adler Baines Corwin Dunmore Ellery Falk Garrick Holt Ives Jarrow Kemp Lister Morrow Nash Orton Pryce".split()
_FIRST = "Anna Boris Clara David Edith Frank Grace Henry Irene James Karen Louis Maria Nigel Olive Peter".split()
_ROLES = "mayor treasurer governor spokesman director chairwoman engineer inspector trustee analyst".split()
_PLACES = (
    "Ashford Brinmoor Calder Dunwick Eastleigh Fairview Glenrock Harwell Inverlea Kingsbury Langport Midvale".split()
)
_THINGS = "bridge harbour school hospital railway library airport reservoir stadium market museum refinery".split()
_ACTS = "close rebuild inspect widen finance auction repair expand postpone insure relocate modernise".split()
_REASONS = "floods strikes complaints delays storms debts surveys elections lawsuits shortages fires protests".split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_FORMS = (
    "{first} {last}, the {role} of {place}, said on {day} that it would {act} the {thing} after {number} {reason}.",
    "The {thing} in {place} had cost {number} million dollars before {last} asked the council to {act} it in {year}.",
    "Residents of {place} told reporters that {reason} had forced {number} families to leave the {thing} near {other}.",
    "On {day} a court in {other} heard that {first} {last} had paid {number} workers to {act} the {thing} by night.",
    "Figures for {year} show that {number} people used the {thing} of {place}, while {reason} kept others away.",
)


def _sentence(rng: Random) -> str:
    place, other = rng.sample(_PLACES, 2)
    return rng.choice(_FORMS).format(
        first=rng.choice(_FIRST),
        last=rng.choice(_PEOPLE),
        role=rng.choice(_ROLES),
        place=place,
        other=other,
        thing=rng.choice(_THINGS),
        act=rng.choice(_ACTS),
        reason=rng.choice(_REASONS),
        day=rng.choice(_DAYS),
        number=rng.randrange(11, 990),
        year=rng.randrange(1950, 2018),
    )


TOP = (
    "Image copyright Getty Images Image caption The council met behind closed doors",
    "Share this: Click to share on Twitter (Opens in new window)",
    "Photo: A. Nonymous",
    "By Staff Writer",
    "3 February 2018",
    "Follow us on Twitter and like us on Facebook.",
)
MIDDLE = (
    "Advertisement",
    "Story continues below advertisement",
    "READ MORE: Council defers vote",
    "Related: What the budget means for you and for your family",
    "Sign up for our newsletter and never miss a story from your town again.",
)
BOTTOM = (
    "Copyright 2018 The Example Press. All rights reserved. This material may not be published or redistributed.",
    "(c) 2018 Example News",
    "(Reporting by Jane Roe in Ashford; Editing by John Doe)",
    "Click here to read the latest headlines and to see our photos of the day.",
    "Leave a comment",
    "Get the day's headlines in our newsletter",
)
FOREIGN = {
    "de": (
        "Der Stadtrat hat am Montag beschlossen, die alte Brücke über den Fluss ein Jahr lang zu sperren.",
        "Die Kosten sollen nach Angaben der Bürgermeisterin bei rund zwölf Millionen Euro liegen, doppelt so viel.",
        "Viele Anwohner befürchten, dass der Verkehr nun durch die engen Straßen der Altstadt geleitet wird.",
    ),
    "fr": (
        "Le conseil municipal a décidé lundi de fermer le vieux pont pendant un an afin de le reconstruire.",
        "Selon la maire, les travaux coûteront environ douze millions d'euros, soit le double de ce qui était prévu.",
        "De nombreux habitants craignent que la circulation ne soit déviée par les rues étroites de la vieille ville.",
    ),
    "es": (
        "El ayuntamiento decidió el lunes cerrar el viejo puente durante un año para volver a construirlo.",
        "Según la alcaldesa, las obras costarán unos doce millones de euros, más del doble de lo que estaba previsto.",
        "Muchos vecinos temen que el tráfico se desvíe ahora por las calles estrechas del casco antiguo de la ciudad.",
    ),
    "ru": (
        "Городской совет решил в понедельник закрыть старый мост на один год, чтобы полностью построить его заново.",
        "По словам мэра, работы обойдутся примерно в двенадцать миллионов евро, вдвое дороже, чем планировалось.",
        "Многие жители опасаются, что движение теперь пойдёт по узким улицам старого города, где и так мало места.",
    ),
}
