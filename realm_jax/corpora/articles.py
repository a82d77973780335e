"""Sources to articles: every record is read, cleaned and sent to a shard by its id; the first half of `realm prepare`.

    FOLDER/00007.jsonl     the articles of a shard: [part, number, id, title, text] a line, in the order of the source
    FOLDER/COUNTS.json     written last: what became of all records
    FOLDER/00007.copies    of the articles of a shard, which are left out as copies (see `near_duplicates`)

A shard depends on nothing but the source, so the runners, local processes (`Processes`, here) and workers of a cluster
(`realm_jax.corpora.pipelines`), write the same bytes. Not for passages: read `realm_jax.corpora.build` next.
"""

import json
import logging
import os
import resource
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import BufferedWriter
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from realm_jax.corpora.outcomes import Article, CorruptRecord, Counts, FilteredRecord
from realm_jax.corpora.pool import ordered_parallel_map
from realm_jax.errors import Resumable, UserError
from realm_jax.storage import Folder, read_json, write_json_atomic

logger = logging.getLogger(__name__)

COUNTS = "COUNTS.json"
PROGRESS = "PROGRESS.json"  # of an unfinished extraction by local processes: where to resume
UNREADABLE = "unreadable"  # a part from some point on; an error that ends the work
SAVED_BYTES = 1 << 26  # of articles between two records of where to resume
OTHER_FILES = 100  # that a process has open beside the shards
BATCH_RECORDS = 64  # sent to a worker at once: about a second of work of a dump of Wikipedia


@dataclass(frozen=True)
class ArticleSource:
    """Where articles come from. Everything can be sent to another process.

    name: what the user called it. parts: descriptions of what can be read independently, in order. read: the raw
    records of a part, and `CorruptRecord` for each place that cannot be read. clean: a pure function of a raw record,
    which counts what it leaves out of an article, by kind and name. identity: what tells the source from another one
    (names, SHA-256 of files, settings). shards: how many it gets unless the user says so; it follows from nothing but
    the source, so that a corpus is the same everywhere. small_parts: whether the articles of a part fit into memory
    many times over, so that a process can take a whole one. without_copies: whether articles that say nearly the same
    as another one are left out.
    """

    name: str
    parts: tuple[Any, ...]
    read: Callable[[Any], Iterator[Any]]
    clean: Callable[[Any, Counter[Any]], Article | FilteredRecord]
    identity: list[dict[str, Any]]
    shards: int
    small_parts: bool = False
    without_copies: bool = False


class LocatedRecord(NamedTuple):
    """A record and its place: the number of its part, and its number in the part. Places order a source."""

    part: int
    number: int
    record: Any


def shard_of(article_id: str, shards: int) -> int:
    """The shard of a document: the same in every version of a source."""
    return zlib.crc32(article_id.encode("utf-8")) % shards


def shard_name(shard: int) -> str:
    return f"{shard:05d}.jsonl"


def duplicates_name(shard: int) -> str:
    return f"{shard:05d}.copies"


def read_part(texts: ArticleSource, number: int) -> Iterator[LocatedRecord]:
    """The raw records of a part with their places."""
    for index, record in enumerate(texts.read(texts.parts[number])):
        yield LocatedRecord(number, index, record)


def clean(texts: ArticleSource, shards: int, records: Iterable[LocatedRecord]) -> tuple[dict[int, bytes], Counts]:
    """Lines of each shard for some records, in their order, and what became of them. A pure function."""
    counts = Counts()
    lines: defaultdict[int, bytearray] = defaultdict(bytearray)
    for part, number, record in records:
        counts.records += 1
        found = record if isinstance(record, CorruptRecord) else texts.clean(record, counts.notes)
        if isinstance(found, Article):
            counts.articles += 1
            counts.characters += len(found.text)
            lines[shard_of(found.id, shards)] += line_of(part, number, found)
        else:
            counts.count_skipped(found, part, number)
    return {shard: bytes(found) for shard, found in lines.items()}, counts


def line_of(part: int, number: int, article: Article) -> bytes:
    """How an article stands in a shard."""
    record = [part, number, article.id, article.title, article.text, article.line, article.file]
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"


def check_damage(texts: ArticleSource, counts: Counts, skip: bool) -> None:
    """Raise UserError for damage that is not to be skipped, and for what kept a part from being read to its end."""
    if UNREADABLE in counts.damaged:
        raise UserError(counts.samples[UNREADABLE][0][2].removeprefix(f"{texts.name}: "))
    for reason, times in sorted(counts.damaged.items()):
        if not skip:
            sample = counts.samples[reason][0][2]
            raise Resumable(
                f"{texts.name}: {reason} ({times:,}×), first at {sample}; correct it, or give --skip-damage"
            )


def check(texts: ArticleSource, counts: Counts, skip_damage: bool) -> None:
    """Raise UserError for damage that is not to be skipped, and where no article is left."""
    check_damage(texts, counts, skip_damage)
    if not counts.articles:
        reasons = ", ".join(f"{times:,} {reason}" for reason, times in (counts.dropped + counts.damaged).most_common())
        first = "".join(f"; the first: {samples[0][2]}" for samples in list(counts.samples.values())[:1])
        raise UserError(
            f"{texts.name}: none of {counts.records:,} records is an article ({reasons or 'it is empty'}){first}"
        )


def read_shard(folder: Folder, shard: int) -> Iterator[Article]:
    """The articles of a shard, without copies. Raises UserError, naming both places, for an id that occurs twice."""
    found = read_lines(folder, shard)
    if duplicates_name(shard) in folder.names():
        found = compress(found, (not copy for copy in folder.read(duplicates_name(shard))))
    places: dict[str, str] = {}
    for place, article in found:
        if article.id in places:
            raise UserError(
                f"id {article.id!r} was already given on {places[article.id]}, and again on {place} "
                f"({article.title!r}); ids must be unique"
            )
        places[article.id] = place
        yield article


def read_lines(folder: Folder, shard: int) -> Iterator[tuple[str, Article]]:
    """All articles of a shard, each with its place in the source in words."""
    for raw in folder.read(shard_name(shard)).splitlines():
        part, number, *fields = json.loads(raw)
        article = Article(*fields)
        is_located = article.line and article.file
        place = f"line {article.line} of {article.file}" if is_located else f"record {number + 1} of part {part + 1}"
        yield place, article


# --- What does the work ----------------------------------------------------------------------------------------------


class Runner(Protocol):
    """Works on shards in folders, which are paths or URLs."""

    def check(self, shards: int) -> None:
        """Raise UserError for more shards than it can write."""

    def extract(
        self, texts: ArticleSource, folder: str, shards: int, skip_damage: bool, progress: Callable[[int], None]
    ) -> Counts:
        """Write the shards of a source; does what is left when it was cut off before.

        progress: called with the number of records read, if the runner does not report progress itself. Raises
        UserError for damage unless `skip_damage`, and when no article is left.
        """

    def each(
        self, act: Callable[[str, int], int], folder: str, shards: Sequence[int], progress: Callable[[int], None]
    ) -> None:
        """Do `act(folder, shard)` for each shard; it gives the number of articles of the shard.

        progress: called with the sum of these, if the runner does not report progress itself.
        """


@dataclass(frozen=True)
class Processes:
    """A `Runner` of so many processes of this machine."""

    workers: int

    def check(self, shards: int) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES
        if shards > most:
            raise UserError(f"--shards={shards}: this machine may open {most} files; give fewer, or raise `ulimit -n`")

    def extract(
        self, texts: ArticleSource, folder: str, shards: int, skip_damage: bool, progress: Callable[[int], None]
    ) -> Counts:
        """A part that was not finished is read again from its start."""
        root = Path(folder)
        if (root / COUNTS).exists():
            return Counts.from_json(read_json(root / COUNTS))
        root.mkdir(parents=True, exist_ok=True)
        done, counts = _resume(root, shards)
        with ExitStack() as stack:
            files = [stack.enter_context(open(root / shard_name(shard), "ab")) for shard in range(shards)]
            unsaved = 0
            for part, results in self._cleaned(texts, shards, done):
                for found, counted in results:
                    counts.add(counted)
                    check_damage(texts, counts, skip_damage)
                    for shard, lines in found.items():
                        unsaved += files[shard].write(lines)
                    progress(counts.records)
                if unsaved >= SAVED_BYTES or part + 1 == len(texts.parts):
                    _save(files, root / PROGRESS, part + 1, counts)
                    unsaved = 0
        check(texts, counts, skip_damage)
        write_json_atomic(root / COUNTS, counts.to_json())
        (root / PROGRESS).unlink(missing_ok=True)
        return counts

    def _cleaned(
        self, texts: ArticleSource, shards: int, first: int
    ) -> Iterator[tuple[int, Iterable[tuple[dict[int, bytes], Counts]]]]:
        """Of each part from `first` on, in order, its number and the results of `clean`: of small parts where there are
        enough of them one, made by one process from reading on; else of each batch, read here."""
        numbers = range(first, len(texts.parts))
        if texts.small_parts and len(numbers) > self.workers > 1:
            results = ordered_parallel_map(partial(_clean_part, texts, shards), numbers, self.workers)
            yield from ((part, [result]) for part, result in zip(numbers, results, strict=True))
        else:
            for part in numbers:
                batches = _batches(read_part(texts, part))
                yield part, ordered_parallel_map(partial(clean, texts, shards), batches, self.workers)

    def each(
        self, act: Callable[[str, int], int], folder: str, shards: Sequence[int], progress: Callable[[int], None]
    ) -> None:
        done = 0
        for articles in ordered_parallel_map(partial(act, folder), shards, self.workers, few=2):
            done += articles
            progress(done)


def _clean_part(texts: ArticleSource, shards: int, part: int) -> tuple[dict[int, bytes], Counts]:
    return clean(texts, shards, read_part(texts, part))


def _save(files: list[BufferedWriter], progress: Path, parts: int, counts: Counts) -> None:
    """Flush what was written, and record where to resume."""
    for file in files:
        file.flush()
        os.fsync(file.fileno())
    sizes = [file.tell() for file in files]
    write_json_atomic(progress, {"parts": parts, "sizes": sizes, "counts": counts.to_json()})


def _resume(folder: Path, shards: int) -> tuple[int, Counts]:
    """Cut the shards back to the last part that was ended; the number of such parts, and their counts."""
    progress = read_json(folder / PROGRESS) if (folder / PROGRESS).exists() else None
    sizes = progress["sizes"] if progress else [0] * shards
    for shard, size in enumerate(sizes):
        with open(folder / shard_name(shard), "ab") as stream:
            stream.truncate(size)
    if progress is None:
        return 0, Counts()
    logger.info("%s: resuming after part %d", folder, progress["parts"])
    return progress["parts"], Counts.from_json(progress["counts"])


def _batches(records: Iterator[LocatedRecord]) -> Iterator[list[LocatedRecord]]:
    while batch := list(islice(records, BATCH_RECORDS)):
        yield batch
