"""News-like records of which every count is known: copies, edited copies, other versions of a page, pages in other
languages, stubs, and damage."""

import itertools
import json
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from realm_jax.corpora.news import RULES

REASONS = {  # kind of a record → why it is left out; "" if it stays
    "article": "",
    "copy": "the text of another article",
    "version": "the id of another article",
    "edited": "nearly the text of another article",
    "foreign": "in another language ({})",
    "stub": f"fewer than {RULES['characters'][0]} characters",
    "null": "the text is null",
    "not UTF-8": "not UTF-8",
    "not JSON": "not JSON",
    "surrogate": "the text has half of a surrogate pair",
}


class MadeRecord(NamedTuple):
    """A line of a JSON Lines file, and why it is left out."""

    line: bytes
    reason: str


def make_news(count: int) -> list[MadeRecord]:
    """As many records, of every kind in turn, in a random order. A copy, a version and an edit bring their original."""
    rng = Random(0)
    records: list[MadeRecord] = []
    for number, kind in enumerate(itertools.cycle(REASONS)):
        if len(records) >= count:
            break
        sentences = [made_sentence(rng) for _ in range(12)]
        code = rng.choice(sorted(FOREIGN))
        if kind in ("copy", "version", "edited"):
            records.append(made_record("article", number, sentences, rng))
        if kind == "version":
            sentences = [*sentences, made_sentence(rng)]
        elif kind == "edited":
            sentences = ["Yesterday " + sentences[0].split(" ", 1)[1], *sentences[1:]]
        elif kind == "foreign":
            sentences = list(FOREIGN[code])
        elif kind == "stub":
            sentences = sentences[:1]
        page = number + 1_000_000 if kind in ("copy", "edited") else number
        record = made_record(kind, page, sentences, rng)
        records.append(record._replace(reason=record.reason.format(code)))
    rng.shuffle(records)
    return records


def made_texts(count: int) -> list[str]:
    """Articles of a dozen sentences, none of them in two articles but by rare chance."""
    rng = Random("texts")
    return [" ".join(made_sentence(rng) for _ in range(12)) for _ in range(count)]


def made_record(kind: str, page: int, sentences: Sequence[str], rng: Random) -> MadeRecord:
    """A record in one of the three shapes that are read, two sentences a paragraph, damaged as its kind says."""
    text: str | None = "\n".join(" ".join(sentences[at : at + 2]) for at in range(0, len(sentences), 2))
    if kind == "null":
        text = None
    elif kind == "surrogate":
        text = f"{text} \ud83d"
    url = f"https://news.example/{page:07d}"
    crawled = {"url": url, "maintext": text, "language": "en", "date_publish": "2018-02-03 04:05:06"}
    hub = {"url": url, "text": text, "domain": "news.example", "date": "2018-02-03", "image_url": None}
    line = json.dumps(rng.choice([crawled, hub, {"id": url, "text": text}]) | {"title": f"Report {page}"}).encode()
    if kind == "not UTF-8":
        line = line.replace(b"news.example", b"news.ex\xe4mple")
    return MadeRecord(line[:-9] if kind == "not JSON" else line, REASONS[kind])


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


def made_sentence(rng: Random) -> str:
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
