"""Sources to articles: every record is read, cleaned and sent to a shard by its id; the first half of `realm prepare`.

    FOLDER/00007.jsonl     the articles of a shard: [part, number, id, title, text, line, file] a line, in source order
    FOLDER/COUNTS.json     written last: what became of all records
    FOLDER/00007.copies    of the articles of a shard, which are left out as copies (see `near_duplicates`)

A shard depends on nothing but the source: `extract` is a pure function, which local processes (`Processes`, here) and
workers of a cluster (`realm_jax.corpora.pipelines`) call, so they write the same bytes. Read `extract` next, and
`realm_jax.corpora.packer` for passages.
"""

import json
import logging
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple

from realm_jax.corpora.pool import ordered_parallel_map
from realm_jax.errors import Resumable, UserError
from realm_jax.storage import Folder, flush_to_disk, read_json, write_json_atomic

logger = logging.getLogger(__name__)

COUNTS = "COUNTS.json"
PROGRESS = "PROGRESS.json"  # of an unfinished extraction by local processes: where to resume
SAVED_BYTES = 1 << 26  # of articles between two records of where to resume
BATCH_RECORDS = 64  # sent to a worker at once: about a second of work of a dump of Wikipedia
NAMES = 30  # kept of each kind of note when all is counted
SAMPLES = 3  # kept of each reason: the first ones, in the order of the source


# --- What becomes of a record -----------------------------------------------------------------------------------------


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
class Skipped:
    """A record that gives no article: a rule leaves it out, or it cannot be read, which is damage.

    reason: a short phrase that is the same for all such records. where: file and line, byte or page of damage.
    """

    reason: str
    sample: str
    where: str = ""

    @property
    def is_damage(self) -> bool:
        return bool(self.where)


Outcome = Article | Skipped


@dataclass(slots=True)
class Counts:
    """What became of the records of a source.

    samples: for each reason the first few records, each with its place (part and number in it), which decides what
    "first" means whatever the order in which workers came. notes: what was left out of articles that stay, by kind and
    name. Copies and articles without a word are left out, and counted, later (`near_duplicates.py`, `packer.py`).
    """

    records: int = 0
    articles: int = 0
    characters: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    damaged: Counter[str] = field(default_factory=Counter)
    notes: Counter[tuple[str, str]] = field(default_factory=Counter)
    samples: dict[str, list[tuple[int, int, str]]] = field(default_factory=dict)

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

    def count_skipped(self, record: Skipped, part: int, number: int) -> None:
        """Count a record that gives no article."""
        (self.damaged if record.is_damage else self.dropped)[record.reason] += 1
        sample = f"{record.where}: {record.sample}" if record.is_damage else record.sample
        samples = [*self.samples.get(record.reason, []), (part, number, sample)]
        self.samples[record.reason] = sorted(samples)[:SAMPLES]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object that does not depend on the order in which records were counted."""
        value: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        value |= {name: dict(sorted(value[name].items())) for name in ("dropped", "damaged", "samples")}
        return value | {"notes": [[*note, times] for note, times in sorted(self.notes.items())]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Counts":
        notes = Counter({(kind, name): times for kind, name, times in value["notes"]})
        samples = {reason: [(p, n, text) for p, n, text in found] for reason, found in value["samples"].items()}
        counters = {name: Counter(value[name]) for name in ("dropped", "damaged")}
        return cls(**value | counters | {"notes": notes, "samples": samples})

    def common_notes(self) -> dict[str, dict[str, Any]]:
        """For each kind of note how many there are, and the most common names with their numbers."""
        kinds: dict[str, dict[str, int]] = {}
        for (kind, name), times in sorted(self.notes.items(), key=lambda note: (note[0][0], -note[1], note[0][1])):
            kinds.setdefault(kind, {})[name] = times
        return {
            kind: {"times": sum(names.values()), "names": dict(islice(names.items(), NAMES))}
            for kind, names in kinds.items()
        }


# --- From records to lines of shards ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArticleSource:
    """Where articles come from. Everything can be sent to another process.

    name: what the user called it. parts: descriptions of what can be read independently, in order. read: the records
    of a part, raw ones if there is `clean`, and `Skipped` for what cannot be read. clean: a pure function of a raw
    record, which counts what it leaves out of an article, by kind and name. identity: what tells the source from
    another one (names, SHA-256 of files, settings). shards: how many it gets unless the user says so; it follows from
    nothing but the source, so that a corpus is the same everywhere. small_parts: whether the articles of a part fit
    into memory many times over, so that a process can take a whole one. without_copies: whether articles that say
    nearly the same as another one are left out.
    """

    name: str
    parts: tuple[Any, ...]
    read: Callable[[Any], Iterator[Any]]
    clean: Callable[[Any, Counter[Any]], Outcome] | None
    identity: list[dict[str, Any]]
    shards: int
    small_parts: bool = False
    without_copies: bool = False


class LocatedRecord(NamedTuple):
    """A record and its place: the number of its part, and its number in the part. Places order a source."""

    part: int
    number: int
    record: Any


Work = int | Sequence[LocatedRecord]  # the number of a part, or some records of one


class Extracted(NamedTuple):
    """Lines for each shard, and what became of the records of `part` that they are made of."""

    part: int
    lines: dict[int, bytes]
    counts: Counts


def shard_file(shard: int, kind: str) -> str:
    """The name of a file of a shard. Its articles are "jsonl"."""
    return f"{shard:05d}.{kind}"


def read_part(source: ArticleSource, part: int) -> Iterator[LocatedRecord]:
    """The records of a part with their places."""
    for number, record in enumerate(source.read(source.parts[part])):
        yield LocatedRecord(part, number, record)


def extract(source: ArticleSource, shards: int, work: Work) -> Extracted:
    """Turn records into lines of shards. A pure function."""
    counts = Counts()
    shard_lines: defaultdict[int, bytearray] = defaultdict(bytearray)
    for part, number, record in read_part(source, work) if isinstance(work, int) else work:
        counts.records += 1
        outcome: Outcome = record
        if source.clean is not None and not isinstance(record, Skipped):
            outcome = source.clean(record, counts.notes)
        if isinstance(outcome, Skipped):
            counts.count_skipped(outcome, part, number)
            continue
        counts.articles += 1
        counts.characters += len(outcome.text)
        counts.notes.update(outcome.notes)
        # The shard of an id is the same in every version of a source.
        shard = zlib.crc32(outcome.id.encode("utf-8")) % shards
        line = [part, number, outcome.id, outcome.title, outcome.text, outcome.line, outcome.file]
        shard_lines[shard] += json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"
    lines = {shard: bytes(of_shard) for shard, of_shard in shard_lines.items()}
    return Extracted(work if isinstance(work, int) else work[-1].part, lines, counts)


def check_damage(source: ArticleSource, counts: Counts, skip_damage: bool) -> None:
    """Raise Resumable for damage unless it is skipped."""
    for reason, times in [] if skip_damage else sorted(counts.damaged.items()):
        sample = counts.samples[reason][0][2]
        raise Resumable(f"{source.name}: {reason} ({times:,}×), first at {sample}; correct it, or give --skip-damage")


def check_counts(source: ArticleSource, counts: Counts, skip_damage: bool) -> None:
    """Raise UserError for damage that is not to be skipped, and if no article is left."""
    check_damage(source, counts, skip_damage)
    if not counts.articles:
        reasons = ", ".join(f"{times:,} {reason}" for reason, times in (counts.dropped + counts.damaged).most_common())
        first = "".join(f"; the first: {samples[0][2]}" for samples in list(counts.samples.values())[:1])
        raise UserError(
            f"{source.name}: none of {counts.records:,} records is an article ({reasons or 'it is empty'}){first}"
        )


def read_lines(folder: Folder, shard: int) -> Iterator[tuple[str, Article]]:
    """All articles of a shard, each with its place in the source in words."""
    for raw in folder.read(shard_file(shard, "jsonl")).splitlines():
        part, number, *article_fields = json.loads(raw)
        article = Article(*article_fields)
        is_located = article.line and article.file
        place = f"line {article.line} of {article.file}" if is_located else f"record {number + 1} of part {part + 1}"
        yield place, article


def read_shard(folder: Folder, shard: int) -> Iterator[Article]:
    """The articles of a shard, without copies. Raises UserError, naming both places, for an id that occurs twice."""
    located = read_lines(folder, shard)
    if (copies := shard_file(shard, "copies")) in folder.names():
        located = compress(located, (not is_copy for is_copy in folder.read(copies)))
    places: dict[str, str] = {}
    for place, article in located:
        if article.id in places:
            raise UserError(
                f"id {article.id!r} was already given on {places[article.id]}, and again on {place} "
                f"({article.title!r}); ids must be unique"
            )
        places[article.id] = place
        yield article


# --- Processes of this machine ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Processes:
    """What does the work: so many processes of this machine. `pipelines.Beam` has the same methods."""

    workers: int

    def extract(
        self, source: ArticleSource, folder: str, shards: int, skip_damage: bool, progress: Callable[[int], None]
    ) -> Counts:
        """Write the shards of a source, and return what became of its records.

        What an interrupted call finished stays; a part that was not finished is read again from its start. progress:
        called with the number of records read. Raises UserError for damage unless `skip_damage`, and when no article is
        left.
        """
        root = Path(folder)
        if (root / COUNTS).exists():
            return Counts.from_json(read_json(root / COUNTS))
        root.mkdir(parents=True, exist_ok=True)
        saved: dict[str, Any] = {"parts": 0, "sizes": [0] * shards, "counts": Counts().to_json()}
        if (root / PROGRESS).exists():
            saved = read_json(root / PROGRESS)
            logger.info("%s: resuming after part %d", root, saved["parts"])
        finished, counts, unsaved = saved["parts"], Counts.from_json(saved["counts"]), 0
        with ExitStack() as stack:
            files = [stack.enter_context(open(root / shard_file(n, "jsonl"), "ab")) for n in range(shards)]
            for file, size in zip(files, saved["sizes"], strict=True):
                file.seek(file.truncate(size))
            parts = range(finished, len(source.parts))
            # With enough small parts a process takes a part, from reading on; otherwise parts are read here.
            takes_parts = source.small_parts and len(parts) > self.workers > 1
            work: Iterable[Work] = parts if takes_parts else _batches(source, parts)
            for part, lines, counted in ordered_parallel_map(partial(extract, source, shards), work, self.workers):
                if part > finished and unsaved >= SAVED_BYTES:
                    for file in files:
                        flush_to_disk(file)
                    saved = {"parts": part, "sizes": [file.tell() for file in files], "counts": counts.to_json()}
                    write_json_atomic(root / PROGRESS, saved)
                    unsaved = 0
                finished = part
                counts.add(counted)
                check_damage(source, counts, skip_damage)
                unsaved += sum(files[shard].write(of_shard) for shard, of_shard in lines.items())
                progress(counts.records)
            for file in files:  # before COUNTS.json, which says that all is there
                flush_to_disk(file)
        check_counts(source, counts, skip_damage)
        write_json_atomic(root / COUNTS, counts.to_json())
        (root / PROGRESS).unlink(missing_ok=True)
        return counts

    def each(
        self, act: Callable[[str, int], int], folder: str, shards: Sequence[int], progress: Callable[[int], None]
    ) -> None:
        """Do `act(folder, shard)` for each shard; it returns the number of its articles, and progress gets the sum."""
        done = 0
        for articles in ordered_parallel_map(partial(act, folder), shards, self.workers, few=2):
            done += articles
            progress(done)


def _batches(source: ArticleSource, parts: Iterable[int]) -> Iterator[list[LocatedRecord]]:
    for part in parts:
        records = read_part(source, part)
        while batch := list(islice(records, BATCH_RECORDS)):
            yield batch
