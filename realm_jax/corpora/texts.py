"""What `--passages` and `--pretraining` may name, as sources of articles; files of passages are read here.

| files of passages | recognised by |
|---|---|
| `{"id", "title", "text"}` (ours, with `section` Atlas's) | JSON objects |
| `psgs_w100.tsv` of DPR | `.tsv`, `.csv`; the first line names the columns `id`, `text`, `title` |

JSON objects stand one a line or in one array; any file may be packed as `.gz`, `.xz` or `.bz2`. Read
`realm_jax.corpora.articles` next.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from operator import call
from pathlib import Path
from typing import Any

from realm_jax.corpora import dumps, news, raw_records, wikipedia
from realm_jax.corpora.articles import ArticleSource
from realm_jax.corpora.outcomes import Article, CorruptRecord, FilteredRecord
from realm_jax.data.files import matching, size_of
from realm_jax.data.lines import OTHER_COLUMNS, Records, is_table, json_records, table_rows
from realm_jax.data.records import BadRecord, Path_, applied, strictly, text_field
from realm_jax.errors import UserError
from realm_jax.storage import file_digest

SHARD_BYTES, MOST_SHARDS = 2 << 20, 512  # of packed input; a worker takes a shard at a time
UNKNOWN_SHARDS = 64  # of a source whose size nobody knows
NEWS, HUBS = "news:", ("hf:", "tfds:")
# Of MediaWiki, or a pattern of such names: pages-articles1.xml-p1p41242.bz2, *.xml*.bz2.
_DUMP = re.compile(r"\.xml[\w*?\[\]-]*(\.bz2|\.gz)?$")


def open_texts(name: Path_) -> ArticleSource:
    """A source of articles by what a user calls it. Raises UserError if it cannot be read.

    `news:SOURCE` is a source of raw news that is cleaned, filtered and freed of copies; `hf:NAME` and `tfds:NAME` are
    data sets of these hubs; a folder, and what ends like a dump of MediaWiki or like a pattern of such names, is one;
    anything else is a file of passages.
    """
    source = os.fspath(name)
    if source.startswith(NEWS):
        return _open_news(source)
    if source.startswith(HUBS):
        parts = tuple(raw_records.parts(source))
        return ArticleSource(source, parts, call, _keep, [{"source": source}], UNKNOWN_SHARDS)
    if _DUMP.search(source) or os.path.isdir(source):
        pieces = tuple(dumps.parts(source))
        files = sorted({part.path for part in pieces})
        small = all(map(dumps.has_small_parts, files))
        return ArticleSource(
            source, pieces, dumps.read_pages, wikipedia.article, _identities(files), _shards(files), small_parts=small
        )
    known = _identities([source])  # says what is wrong with it
    return ArticleSource(source, (source,), articles_and_corrupt_records, _keep, known, _shards([source]))


def _open_news(source: str) -> ArticleSource:
    records = source.removeprefix(NEWS)
    if records.startswith(HUBS):
        known, shards = [{"source": records, "news": news.RULES}], UNKNOWN_SHARDS
    else:
        files = matching(records)
        known, shards = [*_identities(files), {"news": news.RULES}], _shards(files)
    parts = tuple(raw_records.parts(records))
    return ArticleSource(source, parts, call, _clean_news, known, shards, without_copies=True)


def identity(path: Path_) -> dict[str, Any]:
    """Name and SHA-256 of a file. Raises UserError for a pipe or device: it would be empty at the second reading."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise UserError(
            f"{path} is not a regular file, and inputs are read more than once; save it to one and name that"
        )
    try:
        return {"file": Path(path).name, "sha256": file_digest(path)}
    except OSError as fault:
        raise UserError(f"cannot read {path} ({fault.strerror}); check the path and its permissions") from None


def _identities(files: list[str]) -> list[dict[str, Any]]:
    """What tells files from others; one in a bucket goes by name and size."""
    return [{"file": path, "bytes": size_of(path)} if "://" in path else identity(path) for path in files]


def _shards(files: list[str]) -> int:
    return min(MOST_SHARDS, max(1, -(-sum(map(size_of, files)) // SHARD_BYTES)))


def _clean_news(article: Article, _: Counter[Any]) -> Article | FilteredRecord:
    return news.clean(article)


def _keep(article: Article, _: Counter[Any]) -> Article:
    return article


# --- Files of passages ------------------------------------------------------------------------------------------------


def parse_passages(path: Path_) -> Iterator[tuple[int, Article | BadRecord]]:
    """Lines and articles of a file with `{"id": …, "title": …, "text": …}` on each line; the title may be absent.

    A malformed record, or one with a missing, empty or non-string id or text, is a BadRecord. Raises UserError for an
    id met twice, or a file without records.
    """
    records = _table(path) if is_table(path) else applied(_with_section, json_records(path))
    line, lines_of_ids = 0, dict[str, int]()
    for line, article in applied(_article, records):
        if isinstance(article, BadRecord):
            yield line, article
            continue
        first = lines_of_ids.setdefault(article.id, line)
        if first != line:
            raise UserError(f"{path}:{line}: id {article.id!r} was already given on line {first}; ids must be unique")
        yield line, Article(article.id, article.title, article.text, line)
    if not line:
        raise UserError(f'{path} holds no passages; give one {{"id", "title", "text"}} object a line')


def read_passages(path: Path_) -> Iterator[Article]:
    """The articles of `parse_passages`. Raises UserError, with file and line, for a bad record too."""
    return (article for _, article in strictly(path, parse_passages(path)))


def articles_and_corrupt_records(path: Path_) -> Iterator[Article | CorruptRecord]:
    """`parse_passages` as a source of `realm prepare`, which counts what cannot be read."""
    for line, found in parse_passages(path):
        yield CorruptRecord(f"{path}:{line}", found.reason, found.message) if isinstance(found, BadRecord) else found


def _article(record: dict[str, Any]) -> Article:
    """Check one record of a passage file."""
    return Article(text_field(record, "id"), text_field(record, "title", required=False), text_field(record, "text"))


def _with_section(record: dict[str, Any]) -> dict[str, Any]:
    """The section of an article goes behind its title, as Atlas has it: sections of one article share the title."""
    title, section = record.get("title"), record.get("section")
    if isinstance(title, str) and isinstance(section, str) and title.strip() and section.strip():
        return record | {"title": f"{title}: {section}"}
    return record


def _table(path: Path_) -> Records:
    """Passages of a table whose first line names its columns."""
    rows = table_rows(path)
    line, names = next(rows, (1, ["id", "text", "title"]))
    if not {"id", "text", "title"} <= {*names}:
        raise UserError(f"{path}:{line}: the first line of a table of passages must name its columns: id, text, title")

    def named(row: list[str]) -> dict[str, Any]:
        if len(row) != len(names):
            message = f"the row has {len(row)} columns, the first line names {len(names)}"
            raise BadRecord(message, "correct it", OTHER_COLUMNS)
        return dict(zip(names, row, strict=True))

    yield from applied(named, rows)
