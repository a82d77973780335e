"""A synthetic encyclopedia made from a seed, on which a tiny REALM can learn within minutes and be measured.

Every fact is drawn at random, so it can be known only by retrieving its passage. Pre-training text and questions
replace words of a name by synonyms that passages never use, so word matching does not find the passage. Some
entities are held out: their passages are in the corpus, but no pre-training sentence and no training question speaks
of them, and all development questions are about them.

Not for judging answers on natural language: use real passages and questions for that.
Every record has its own random generator, so a million passages need no big tables. Read `PHRASINGS` next: it has all
English sentences.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

from realm_jax.errors import UserError

Record = dict[str, Any]
Item = TypeVar("Item")


class Phrasings(NamedTuple):
    """The sentences that can state or ask one relation.

    {the} and {The} become "the <name>", in articles also "it"; {name} is the two-word name. Articles and news share
    their phrasings, as real ones share a language, but the news on an entity never uses those of its own article.
    The words of questions occur in statements too, because a model cannot understand a word that it never read.
    Sentences open with function words, so that only values have capitals.

    Attributes:
        statement: sentences that state the relation.
        question: questions about it.
    """

    statement: tuple[str, ...]
    question: tuple[str, ...]


# fmt: off
PHRASINGS: dict[str, Phrasings] = {
    "discoverer": Phrasings(
        statement=(
            "{The} was first described by {value}.", "Some books say that {value} was the finder of {the}.",
            "The finder of {the} was {value}.", "It was {value} who first drew {the}.",
            "The first notes on {the} are by {value}.", "At first only {value} knew of {the}.",
            "If you ask who discovered {the}, most books name {value}.",
            "The person by whom {the} was found is {value}.",
        ),
        question=(
            "who first described the {name}?", "who discovered the {name}?", "who was the finder of the {name}?",
            "by whom was the {name} first described?",
        ),
    ),
    "region": Phrasings(
        statement=(
            "{The} is found only in {value}.", "In {value} {the} is very common.", "The home of {the} is {value}.",
            "Many people see {the} in {value}.", "{The} came from the hills of {value}.",
            "To see {the}, people travel to {value}.", "If you ask where {the} is found, people name {value}.",
            "The region in which {the} is most common is {value}.",
        ),
        question=(
            "where is the {name} found?", "in which region is the {name} common?",
            "which region is home to the {name}?", "where is the home of the {name}?",
        ),
    ),
    "date": Phrasings(
        statement=(
            "{The} was first seen in {value}.", "In {value} {the} was found.",
            "The first record of {the} is from {value}.", "Some say {the} has been known since {value}.",
            "{The} was still new in {value}.", "It was in {value} that {the} was listed.",
            "If you ask when {the} was discovered, most books say {value}.",
            "The year in which {the} was first seen is {value}.",
        ),
        question=(
            "when was the {name} discovered?", "in which year was the {name} first seen?",
            "since when has the {name} been known?", "from which year is the first record of the {name}?",
        ),
    ),
}
# fmt: on
RELATIONS = tuple(PHRASINGS)
REPEATED_FACTS = 1  # lets a sentence taken out of an article often be rebuilt from the rest
NEWS_SENTENCES = 2 * len(RELATIONS)  # pre-training sentences on an entity, in phrasings that its article does not use
PRONOUN_RATE = 0.25  # of the sentences of an article after the first say "it" for the name
SYNONYM_RATE = 0.95  # of name words with a synonym, outside the passages; 0.36 * 0.95 changes 57 % of the names
VALUES = 160  # distinct ones that a relation draws from, so chance is about 1 / 160
QUESTION_PHRASINGS = min(len(phrasings.question) for phrasings in PHRASINGS.values())
MONTHS = ("January", "March", "April", "June", "August", "October")  # not May: it is a common word too


@dataclass(frozen=True)
class EncyclopediaSettings:
    """All that an encyclopedia follows from. Raises UserError if the sizes or rates are impossible.

    Attributes:
        seed: seeds all random draws.
        entities: number of entities, and so of passages.
        held_out: entities that only the corpus and the development questions mention; every relation of each is asked.
        train_questions: questions about the other entities; no fact is asked twice before every fact was asked once.
        synonym_share: share of name words that have a synonym.
        plain_questions: training questions use no synonyms, so that only the pre-training text can teach them.
    """

    seed: int
    entities: int = 3200
    held_out: int = 200
    train_questions: int = 4000
    synonym_share: float = 0.36
    plain_questions: bool = False

    def __post_init__(self) -> None:
        most_questions = (self.entities - self.held_out) * len(RELATIONS) * QUESTION_PHRASINGS
        for key, value, low, high in (
            ("entities", self.entities, 2, math.inf),
            ("held_out", self.held_out, 1, self.entities - 1),
            ("train_questions", self.train_questions, 0, most_questions),
            ("synonym_share", self.synonym_share, 0, 1),
        ):
            if not low <= value <= high:
                raise UserError(f"encyclopedia: {key} is {value}; choose a value from {low} to {high}")


class Entity(NamedTuple):
    """An invented thing.

    Attributes:
        number: number of the entity.
        name: its plain two-word name.
        values: its value for every relation, in the order of RELATIONS.
    """

    number: int
    name: tuple[str, str]
    values: tuple[str, ...]


class Encyclopedia:
    """Small tables (words, synonyms, value pools), and the records that follow from them.

    Held-out entities are spread evenly: entity floor(j * entities / held_out) is the j-th of them, so that no
    position in the corpus tells them apart.
    """

    def __init__(self, settings: EncyclopediaSettings) -> None:
        self.settings = settings
        self.known = settings.entities - settings.held_out
        rng = self._random("words", 0)

        # Distinct pronounceable lower-case words that no phrasing uses.
        pool = math.ceil(2.2 * math.sqrt(settings.entities))  # so 26 of 3,200 entities share a name word
        count = 4 * pool + 3 * VALUES
        onsets = "b br d dr f fl g gr h j k kr l m n p pl r s st t tr v w z".split()
        vowels, codas = "aeiou", "k l lm m n nd r rk rn sk st x".split()
        phrases = [phrase for phrasings in PHRASINGS.values() for group in phrasings for phrase in group]
        taken = {word.lower() for text in (*phrases, *MONTHS) for word in re.findall(r"\w+", text)}
        words: list[str] = []
        syllables = 2 if count < 50_000 else 3  # two syllables make 187,500 words
        while len(words) < count:
            parts = [onsets[_below(rng, len(onsets))] + vowels[_below(rng, len(vowels))] for _ in range(syllables)]
            word = "".join(parts) + codas[_below(rng, len(codas))]
            if word not in taken:
                taken.add(word)
                words.append(word)
        self.firsts, self.seconds = words[:pool], words[pool : 2 * pool]
        common = round(settings.synonym_share * pool)
        replaceable = self.firsts[:common] + self.seconds[:common]
        self.synonyms = dict(zip(replaceable, words[2 * pool :], strict=False))

        # Distinct values of each relation; no word serves two relations.
        names = [word.capitalize() for word in words[4 * pool :]]
        surnames, regions, given_names = (names[start : start + VALUES] for start in range(0, 3 * VALUES, VALUES))
        given_names = given_names[: VALUES // 2]  # shared, to keep words few
        years = _shuffled(rng, range(1500, 2000))[:VALUES]
        self.pools = {
            "discoverer": [f"{given_names[_below(rng, len(given_names))]} {surname}" for surname in surnames],
            "region": regions,
            "date": [
                f"{MONTHS[_below(rng, len(MONTHS))]} {year}" if number % 4 == 0 else str(year)
                for number, year in enumerate(years)
            ],
        }
        self.rounds = [[_below(rng, pool) for _ in range(pool)] for _ in range(4)]

    def passages(self) -> Iterator[Record]:
        """Yield {"id", "title", "text"}, one an entity: the corpus Z."""
        for number in range(self.settings.entities):
            entity, rng = self.entity(number), self._random("passage", number)
            name = " ".join(entity.name)
            sentences: list[str] = []
            for relation, phrasing in _shuffled(rng, self._article_plan(number)):
                is_pronoun = bool(sentences) and rng.random() < PRONOUN_RATE
                the, capital = ("it", "It") if is_pronoun else (f"the {name}", f"The {name}")
                sentences.append(phrasing.format(the=the, The=capital, value=entity.values[relation]))
            yield {"id": f"entity-{number}", "title": name, "text": " ".join(sentences)}

    def pretraining(self) -> Iterator[Record]:
        """Yield {"id", "title", "text"}, a news item of one to three sentences: the pre-training text X."""
        index = 0
        for position in range(self.known):
            entity = self.entity(self._known_entity(position))
            rng = self._random("news plan", entity.number)
            used = {phrasing for _, phrasing in self._article_plan(entity.number)}
            # Each fact is stated in phrasings that the entity's article does not use.
            plan: list[tuple[int, str]] = []  # relation and phrasing of every sentence
            for relation, repeats in enumerate(_counts(rng, NEWS_SENTENCES)):
                phrasings = _shuffled(rng, PHRASINGS[RELATIONS[relation]].statement)
                plan += [(relation, phrasing) for phrasing in phrasings if phrasing not in used][:repeats]
            sizes = [1] * math.ceil(NEWS_SENTENCES / 2)  # sentences of each item
            while sum(sizes) < NEWS_SENTENCES:
                open_items = [item for item, size in enumerate(sizes) if size < 3]
                sizes[open_items[_below(rng, len(open_items))]] += 1
            plan = _shuffled(rng, plan)
            for start, stop in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
                rng = self._random("news", index)
                sentences = []
                for relation, phrasing in plan[start:stop]:
                    name, _ = self._spoken_name(rng, entity)
                    value = entity.values[relation]
                    sentences.append(phrasing.format(the=f"the {name}", The=f"The {name}", value=value))
                yield {"id": f"news-{index}", "title": f"dispatch {index + 1}", "text": " ".join(sentences)}
                index += 1

    def train_questions(self) -> Iterator[Record]:
        """Yield {"question", "answers", "gold_passage_id", "relation", "replaced_words", "entity"}."""
        facts = self.known * len(RELATIONS)
        # A stride without a common divisor visits every fact once before any fact twice.
        stride = max(int(facts * 0.618), 1)
        while math.gcd(stride, facts) != 1:
            stride += 1
        for index in range(self.settings.train_questions):
            around, position = divmod(index, facts)
            fact = position * stride % facts
            known, relation = divmod(fact, len(RELATIONS))
            yield self._question("train", index, self._known_entity(known), relation, around, fact)

    def dev_questions(self) -> Iterator[Record]:
        """Yield the same fields, about held-out entities only."""
        for index in range(self.settings.held_out * len(RELATIONS)):
            number, relation = divmod(index, len(RELATIONS))
            entity = number * self.settings.entities // self.settings.held_out
            yield self._question("dev", index, entity, relation, 0, index)

    def entity(self, index: int) -> Entity:
        """Make an entity from its number."""
        # A Feistel network is a bijection of the pairs, so no two entities share a name and no table is needed.
        first, second = divmod(index, len(self.firsts))
        for table in self.rounds:
            first, second = second, (first + table[second]) % len(table)
        rng = self._random("facts", index)
        values = tuple(self.pools[relation][_below(rng, len(self.pools[relation]))] for relation in RELATIONS)
        return Entity(index, (self.firsts[first], self.seconds[second]), values)

    def _article_plan(self, entity: int) -> list[tuple[int, str]]:
        """Return relation and phrasing of an article's sentences: every fact, and a random one of them twice."""
        rng = self._random("article plan", entity)
        return [
            (relation, phrasing)
            for relation, repeats in enumerate(_counts(rng, len(RELATIONS) + REPEATED_FACTS))
            for phrasing in _shuffled(rng, PHRASINGS[RELATIONS[relation]].statement)[:repeats]
        ]

    def _question(self, split: str, index: int, number: int, relation: int, around: int, fact: int) -> Record:
        entity = self.entity(number)
        choices = _shuffled(self._random(f"{split} phrasing", fact), PHRASINGS[RELATIONS[relation]].question)
        name, replaced = self._spoken_name(self._random(f"{split} question", index), entity)
        if split == "train" and self.settings.plain_questions:
            name, replaced = " ".join(entity.name), 0
        return {
            "question": choices[around].format(name=name),
            "answers": [entity.values[relation]],
            "gold_passage_id": f"entity-{entity.number}",
            "relation": RELATIONS[relation],
            "replaced_words": replaced,
            "entity": " ".join(entity.name),
        }

    def _known_entity(self, position: int) -> int:
        """Return an entity by its position among those not held out: the complement of floor(j N / H)."""
        return -(-(position + 1) * self.settings.entities // self.known) - 1

    def _spoken_name(self, rng: Random, entity: Entity) -> tuple[str, int]:
        """Replace each word of a name by its synonym at the synonym rate; also return how many were replaced."""
        replaced = [rng.random() < SYNONYM_RATE and word in self.synonyms for word in entity.name]
        words = [self.synonyms[word] if swap else word for word, swap in zip(entity.name, replaced, strict=True)]
        return " ".join(words), sum(replaced)

    def _random(self, purpose: str, index: int) -> Random:
        return Random(f"{self.settings.seed}/{purpose}/{index}")


def write(encyclopedia: Encyclopedia, folder: Path | str) -> list[Path]:
    """Write the four JSONL files, one record at a time.

    Args:
        encyclopedia: gives the records.
        folder: made if it does not exist.

    Returns:
        Paths of the files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, Iterator[Record]] = {
        "passages.jsonl": encyclopedia.passages(),
        "pretraining.jsonl": encyclopedia.pretraining(),
        "questions-train.jsonl": encyclopedia.train_questions(),
        "questions-dev.jsonl": encyclopedia.dev_questions(),
    }
    for name, records in files.items():
        with open(folder / name, "w", encoding="utf-8", newline="\n") as lines:
            lines.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return [folder / name for name in files]


def _below(rng: Random, limit: int) -> int:
    """Draw from 0 to limit - 1; Python promises the same sequence in all versions only for `random()`."""
    return int(rng.random() * limit)


def _shuffled(rng: Random, items: Sequence[Item]) -> list[Item]:
    keys = [rng.random() for _ in items]
    return [items[position] for position in sorted(range(len(items)), key=keys.__getitem__)]


def _counts(rng: Random, sentences: int) -> list[int]:
    """Spread sentences over the relations as evenly as possible, the rest at random."""
    every, rest = divmod(sentences, len(RELATIONS))
    return _shuffled(rng, [every + 1] * rest + [every] * (len(RELATIONS) - rest))
