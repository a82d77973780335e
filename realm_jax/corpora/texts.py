"""What `--passages` and `--pretraining` may name, as sources of articles. Read `realm_jax.corpora.articles` next."""

import os
import re
from collections import Counter
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

from realm_jax.corpora import dumps, news, raw_records, wikipedia
from realm_jax.corpora.articles import ArticleSource
from realm_jax.data.files import matching, size_of
from realm_jax.data.jsonl import Article, articles_and_corrupt_records
from realm_jax.data.records import FilteredRecord
from realm_jax.errors import UserError
from realm_jax.storage import file_digest

SHARD_BYTES, MOST_SHARDS = 2 << 20, 512  # of packed input; a worker takes a shard at a time
UNKNOWN_SHARDS = 64  # of a source whose size nobody knows
NEWS, HUBS = "news:", ("hf:", "tfds:")
# Of MediaWiki, or a pattern of such names: pages-articles1.xml-p1p41242.bz2, *.xml*.bz2.
_DUMP = re.compile(r"\.xml[\w*?\[\]-]*(\.bz2|\.gz)?$")


class OpenedTexts(NamedTuple):
    """A source, what tells it from another one (names, SHA-256 of files, settings), and how many shards it gets.

    shards: a function of nothing but the source, so that a corpus is the same everywhere.
    """

    texts: ArticleSource
    identity: list[dict[str, Any]]
    shards: int


def open_texts(name: str | os.PathLike[str]) -> OpenedTexts:
    """A source of articles by what a user calls it. Raises UserError if it cannot be read.

    `news:SOURCE` is a source of raw news that is cleaned, filtered and freed of copies; `hf:NAME` and `tfds:NAME` are
    data sets of these hubs; a folder, and what ends like a dump of MediaWiki or like a pattern of such names, is one;
    anything else is a file of passages.
    """
    source = os.fspath(name)
    if source.startswith(NEWS):
        records = source.removeprefix(NEWS)
        texts = ArticleSource(
            source, tuple(raw_records.parts(records)), methodcaller("read"), _clean_news, without_copies=True
        )
        if records.startswith(HUBS):
            return OpenedTexts(texts, [{"source": records, "news": news.RULES}], UNKNOWN_SHARDS)
        files = matching(records)
        return OpenedTexts(texts, [*_identities(files), {"news": news.RULES}], _shards(files))
    if source.startswith(HUBS):
        texts = ArticleSource(source, tuple(raw_records.parts(source)), methodcaller("read"), _keep)
        return OpenedTexts(texts, [{"source": source}], UNKNOWN_SHARDS)
    if _DUMP.search(source) or os.path.isdir(source):
        parts = tuple(dumps.parts(source))
        files = sorted({part.path for part in parts})
        small = all(map(dumps.has_small_parts, files))
        texts = ArticleSource(source, parts, dumps.read_pages, wikipedia.article, small)
        return OpenedTexts(texts, _identities(files), _shards(files))
    found = _identities([source])  # says what is wrong with it
    return OpenedTexts(ArticleSource(source, (source,), articles_and_corrupt_records, _keep), found, _shards([source]))


def identity(path: str | os.PathLike[str]) -> dict[str, Any]:
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
