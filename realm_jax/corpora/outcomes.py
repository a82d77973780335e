"""What becomes of the records of a source: an `Article`, or one of two other outcomes; and their counts.

Every dropped record is counted, and sampled with its location. Copies among the articles, and those without a word, are
left out later; they are counted there (`near_duplicates.py`, `build.py`).
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

NAMES = 30  # kept of each kind of note when all is counted
SAMPLES = 3  # kept of each reason: the first ones, in the order of the source


@dataclass(frozen=True, slots=True)
class Article:
    """A text to pack into passages.

    line: its line in `file`, the name of what it came from (0: from no file). notes: what was left out of it or
    replaced, by kind and name, for the counts of its source.
    """

    id: str
    title: str
    text: str
    line: int = 0
    file: str = field(default="", compare=False)
    notes: Counter[tuple[str, str]] = field(default_factory=Counter, compare=False)


@dataclass(frozen=True, slots=True)
class FilteredRecord:
    """A record that a rule leaves out. `reason`: a short phrase that is the same for all such records."""

    reason: str
    sample: str


@dataclass(frozen=True, slots=True)
class CorruptRecord:
    """A place of a source that cannot be read. `where`: file and line, byte or page."""

    where: str
    reason: str
    sample: str


@dataclass(slots=True)
class Counts:
    """What became of the records of a source.

    samples: for each reason the first few records, each with its place (part and number in it), which decides what
    "first" means whatever the order in which workers came. notes: what was left out of articles that stay, by kind and
    name.
    """

    records: int = 0
    articles: int = 0
    characters: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    damaged: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)
    notes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, other: "Counts") -> "Counts":
        """Add the counts of other records of the same source."""
        self.records += other.records
        self.articles += other.articles
        self.characters += other.characters
        self.dropped += other.dropped
        self.damaged += other.damaged
        self.notes += other.notes
        for reason, samples in other.samples.items():
            self.samples[reason] = sorted([*self.samples.get(reason, []), *samples])[:SAMPLES]
        return self

    def count_skipped(self, what: FilteredRecord | CorruptRecord, part: int, number: int) -> None:
        """Count a record that gives no article."""
        sample = what.sample
        if isinstance(what, CorruptRecord):
            self.damaged[what.reason] += 1
            sample = f"{what.where}: {what.sample}"
        else:
            self.dropped[what.reason] += 1
        self.samples.setdefault(what.reason, []).append((part, number, sample))
        self.samples[what.reason] = sorted(self.samples[what.reason])[:SAMPLES]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object that does not depend on the order in which records were counted."""
        return {
            "records": self.records,
            "articles": self.articles,
            "characters": self.characters,
            "dropped": dict(sorted(self.dropped.items())),
            "damaged": dict(sorted(self.damaged.items())),
            "notes": [[*note, times] for note, times in sorted(self.notes.items())],
            "samples": {reason: [list(one) for one in self.samples[reason]] for reason in sorted(self.samples)},
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Counts":
        samples = {reason: [(p, n, text) for p, n, text in found] for reason, found in value["samples"].items()}
        numbers = value["records"], value["articles"], value["characters"]
        notes = Counter({(kind, name): times for kind, name, times in value["notes"]})
        return cls(*numbers, Counter(value["dropped"]), Counter(value["damaged"]), samples, notes)

    def notes_to_json(self) -> dict[str, Any]:
        """`common_notes` as PREPARED.json has them."""
        return {kind: {"times": times, "names": dict(names)} for kind, times, names in self.common_notes()}

    def common_notes(self) -> list[tuple[str, int, list[tuple[str, int]]]]:
        """For each kind of note how many there are, and the most common names with their numbers."""
        kinds: dict[str, Counter[str]] = {}
        for (kind, name), times in self.notes.items():
            kinds.setdefault(kind, Counter())[name] = times
        ordered = {kind: sorted(names.items(), key=lambda one: (-one[1], one[0])) for kind, names in kinds.items()}
        return [(kind, kinds[kind].total(), ordered[kind][:NAMES]) for kind in sorted(kinds)]
