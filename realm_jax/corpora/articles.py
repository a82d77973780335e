"""Sources to articles: every record is read, cleaned and sent to a shard by its id; the first half of `realm prepare`.

    FOLDER/00007.jsonl     the articles of a shard: [part, number, id, title, text, line, file] a line, in source order
    FOLDER/COUNTS.json     written last: counts of all records by outcome
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

    Attributes:
        id: unique in its source.
        title: may be empty.
        text: plain paragraphs.
        line: its line in `file`; 0 if it is not from a file.
        file: name of its file.
        notes: omissions and replacements in the text, by kind and name, for the counts of its source.
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

    Attributes:
        reason: a short phrase that is the same for all such records.
        sample: the beginning of the record.
        where: file and line, byte or page of damage; empty if a rule leaves the record out.
    """

    reason: str
    sample: str
    where: str = ""

    @property
    def is_damage(self) -> bool:
        """Return True if the record cannot be read."""
        return bool(self.where)


Outcome = Article | Skipped


@dataclass(slots=True)
class Counts:
    """Counts of the records of a source by outcome.

    Copies and articles without a word are left out, and counted, later (`near_duplicates.py`, `PassagePacker`).

    Attributes:
        records: records that were read.
        articles: records that became articles.
        characters: characters of these articles.
        dropped: records that a rule left out, by reason.
        damaged: records that cannot be read, by reason.
        notes: omissions in articles that stay, by kind and name.
        samples: the first few records of each reason, as part, number in the part, and text; part and number decide
            which come first, in whatever order workers send them.
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
        """Count a record that gives no article.

        Args:
            record: the record.
            part: part of the source.
            number: number of the record in the part.
        """
        (self.damaged if record.is_damage else self.dropped)[record.reason] += 1
        sample = f"{record.where}: {record.sample}" if record.is_damage else record.sample
        samples = [*self.samples.get(record.reason, []), (part, number, sample)]
        self.samples[record.reason] = sorted(samples)[:SAMPLES]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that does not depend on the order in which records were counted."""
        value: dict[str, Any] = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        value |= {name: dict(sorted(value[name].items())) for name in ("dropped", "damaged", "samples")}
        return value | {"notes": [[*note, times] for note, times in sorted(self.notes.items())]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Counts":
        """Read the counts of `to_json`."""
        notes = Counter({(kind, name): times for kind, name, times in value["notes"]})
        samples = {reason: [(p, n, text) for p, n, text in rows] for reason, rows in value["samples"].items()}
        counters = {name: Counter(value[name]) for name in ("dropped", "damaged")}
        return cls(**value | counters | {"notes": notes, "samples": samples})

    def common_notes(self) -> dict[str, dict[str, Any]]:
        """Return for each kind of note their number, and the most common names with their numbers."""
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
    """A source of articles, which can be sent to another process.

    Attributes:
        name: as the user wrote it.
        parts: picklable descriptions of parts that can be read independently, in order.
        read: yields the records of a part, raw ones if there is `clean`, and `Skipped` for unreadable ones.
        clean: pure function that makes the outcome of a raw record, and counts omissions by kind and name.
        identity: distinguishes the source from others: names, SHA-256 of files, settings.
        shards: their number unless the user sets it; it depends only on the source, so that a corpus is the same on
            all machines.
        small_parts: True if the articles of a part fit into memory many times over, so that a process can take one.
        without_copies: True if we leave out articles that say nearly the same as another one.
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
    """A record with its position, which orders a source.

    Attributes:
        part: number of its part.
        number: number of the record in the part.
        record: the record.
    """

    part: int
    number: int
    record: Any


Work = int | Sequence[LocatedRecord]  # the number of a part, or some records of one


class Extracted(NamedTuple):
    """Lines of shards from some records of a part.

    Attributes:
        part: number of the part.
        lines: lines of the articles, by shard.
        counts: counts of the records.
    """

    part: int
    lines: dict[int, bytes]
    counts: Counts


def shard_file(shard: int, kind: str) -> str:
    """Return the name of a file of a shard.

    Args:
        shard: its number.
        kind: ending of the name; "jsonl" for the articles.
    """
    return f"{shard:05d}.{kind}"


def read_part(source: ArticleSource, part: int) -> Iterator[LocatedRecord]:
    """Yield the records of a part with their positions.

    Args:
        source: the source.
        part: number of the part.
    """
    for number, record in enumerate(source.read(source.parts[part])):
        yield LocatedRecord(part, number, record)


def extract(source: ArticleSource, shards: int, work: Work) -> Extracted:
    """Turn records into lines of shards. A pure function.

    Args:
        source: the source.
        shards: number of shards.
        work: a part by its number, or some of its records.
    """
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
    """Check that no record is damaged.

    Args:
        source: the source.
        counts: counts of its records.
        skip_damage: accept damage.

    Raises:
        Resumable: a record is damaged.
    """
    for reason, times in [] if skip_damage else sorted(counts.damaged.items()):
        sample = counts.samples[reason][0][2]
        raise Resumable(f"{source.name}: {reason} ({times:,}×), first at {sample}; correct it, or give --skip-damage")


def check_counts(source: ArticleSource, counts: Counts, skip_damage: bool) -> None:
    """Check that there are articles and no damage.

    Args:
        source: the source.
        counts: counts of all its records.
        skip_damage: accept damage.

    Raises:
        UserError: a record is damaged, or there is no article.
    """
    check_damage(source, counts, skip_damage)
    if not counts.articles:
        reasons = ", ".join(f"{times:,} {reason}" for reason, times in (counts.dropped + counts.damaged).most_common())
        first = "".join(f"; the first: {samples[0][2]}" for samples in list(counts.samples.values())[:1])
        raise UserError(
            f"{source.name}: none of {counts.records:,} records is an article ({reasons or 'it is empty'}){first}"
        )


def read_lines(folder: Folder, shard: int) -> Iterator[tuple[str, Article]]:
    """Yield all articles of a shard.

    Args:
        folder: folder of the shards.
        shard: its number.

    Yields:
        The location of the article in the source, in words, and the article.
    """
    for raw in folder.read(shard_file(shard, "jsonl")).splitlines():
        part, number, *article_fields = json.loads(raw)
        article = Article(*article_fields)
        is_located = article.line and article.file
        line_of_file = f"line {article.line} of {article.file}"
        yield line_of_file if is_located else f"record {number + 1} of part {part + 1}", article


def read_shard(folder: Folder, shard: int) -> Iterator[Article]:
    """Yield the articles of a shard, without copies.

    Args:
        folder: folder of the shards.
        shard: its number.

    Raises:
        UserError: an id occurs twice; the message names both locations.
    """
    located = read_lines(folder, shard)
    if (copies := shard_file(shard, "copies")) in folder.names():
        located = compress(located, (not is_copy for is_copy in folder.read(copies)))
    locations: dict[str, str] = {}  # by id
    for location, article in located:
        if article.id in locations:
            raise UserError(
                f"id {article.id!r} was already given on {locations[article.id]}, and again on {location} "
                f"({article.title!r}); ids must be unique"
            )
        locations[article.id] = location
        yield article


# --- Processes of this machine ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Processes:
    """Processes of this machine that do the work. `pipelines.Beam` has the same methods."""

    workers: int

    def extract(
        self, source: ArticleSource, folder: str, shards: int, skip_damage: bool, progress: Callable[[int], None]
    ) -> Counts:
        """Write the shards of a source.

        Parts that an interrupted call finished stay; we read the unfinished part again from its start.

        Args:
            source: the source.
            folder: folder of the shards.
            shards: their number.
            skip_damage: accept damage.
            progress: called with the number of records so far.

        Returns:
            Counts of the records.

        Raises:
            UserError: a record is damaged, or there is no article.
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
        self, process: Callable[[str, int], int], folder: str, shards: Sequence[int], progress: Callable[[int], None]
    ) -> None:
        """Process shards of a folder.

        Args:
            process: takes the folder and the number of a shard, and returns the number of its articles.
            folder: folder of the shards.
            shards: their numbers.
            progress: called with the number of articles so far.
        """
        done = 0
        for articles in ordered_parallel_map(partial(process, folder), shards, self.workers, few=2):
            done += articles
            progress(done)


def _batches(source: ArticleSource, parts: Iterable[int]) -> Iterator[list[LocatedRecord]]:
    for part in parts:
        records = read_part(source, part)
        while batch := list(islice(records, BATCH_RECORDS)):
            yield batch
