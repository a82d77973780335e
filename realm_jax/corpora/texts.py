"""Open the sources of articles that `--passages` and `--pretraining` name. Read `open_texts`, then `articles.py`."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from operator import call
from pathlib import Path
from typing import Any

from realm_jax.corpora import documents, news, raw_records, wikipedia
from realm_jax.corpora.articles import Article, ArticleSource, Outcome, Skipped
from realm_jax.data.input_files import is_folder, matching, size_of
from realm_jax.data.lines import Path_
from realm_jax.errors import UserError, install_extra
from realm_jax.storage import file_digest

SHARD_BYTES, MOST_SHARDS = 2 << 20, 512  # of packed input; a worker takes one shard at a time
UNKNOWN_SHARDS = 64  # of a source of unknown size
NEWS, HUBS = "news:", ("hf:", "tfds:")
# Of MediaWiki, or a pattern of such names: pages-articles1.xml-p1p41242.bz2, *.xml*.bz2.
_DUMP = re.compile(r"\.xml[\w*?\[\]-]*(\.bz2|\.gz)?$")


def open_texts(name: Path_) -> ArticleSource:
    """Open the source of articles that a user names. Raises UserError if it cannot be read.

    `news:SOURCE` is a source of raw news, which we clean, filter and free of copies; `hf:NAME` and `tfds:NAME` are data
    sets of these hubs; a folder with dumps of MediaWiki, a dump, or a pattern of dumps is a dump; every other name is
    that of documents: a file, a pattern, a folder.
    """
    source = os.fspath(name)
    if source.startswith(HUBS):
        parts = tuple(raw_records.parts(source))
        return ArticleSource(source, parts, call, None, [{"source": source}], UNKNOWN_SHARDS)
    if source.startswith(NEWS):
        _require("datasketch", f"{source}: news")
        records = source.removeprefix(NEWS)
        if records.startswith(HUBS):
            identities, shards = [{"source": records, "news": news.RULES}], UNKNOWN_SHARDS
        else:
            files = matching(records)
            identities, shards = [*map(_identity, files), {"news": news.RULES}], _shards(files)
        parts = tuple(raw_records.parts(records))
        return ArticleSource(source, parts, call, _clean_news, identities, shards, without_copies=True)
    if _DUMP.search(source) or (is_folder(source) and wikipedia.is_dump_folder(source)):
        _require("mwparserfromhell", f"{source}: a dump of Wikipedia")
        files = wikipedia.dump_files(source)
        identities = [*map(_identity, files)]
        return ArticleSource(
            source, tuple(files), wikipedia.read_pages, wikipedia.clean_page, identities, _shards(files)
        )
    document_files = documents.find(source)
    # The identity of a file that is not read is only its name.
    identities = [(_identity(file.path) if file.ending else {}) | {"file": file.name} for file in document_files]
    shards = _shards([file.path for file in document_files if file.ending])
    # A worker reads a small file as one task.
    is_small = all(
        not file.ending or not documents.FORMATS[file.ending].any_size or size_of(file.path) <= documents.SMALL
        for file in document_files
    )
    return ArticleSource(source, tuple(document_files), documents.read, None, identities, shards, small_parts=is_small)


def _require(library: str, subject: str) -> None:
    if find_spec(library) is None:
        raise UserError(f"{subject} needs {library}; {install_extra('documents')}")


def identity(path: Path_) -> dict[str, Any]:
    """Return name and SHA-256 of a file. Raises UserError for a pipe or device, which cannot be read twice."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise UserError(
            f"{path} is not a regular file, and inputs are read more than once; save it to a file and name that file"
        )
    try:
        return {"file": Path(path).name, "sha256": file_digest(path)}
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); check the path and its permissions") from None


def _identity(path: str) -> dict[str, Any]:
    return {"file": path, "bytes": size_of(path)} if "://" in path else identity(path)


def _shards(files: list[str]) -> int:
    return min(MOST_SHARDS, max(1, -(-sum(map(size_of, files)) // SHARD_BYTES)))


def _clean_news(article: Article, _: Counter[Any]) -> Outcome:
    return news.clean(article)


def read_passages(path: Path_) -> Iterator[Article]:
    """Yield the articles of one file. Raises UserError, with file and line, for a damaged record or a repeated id."""
    lines_of_ids: dict[str, int] = {}
    for outcome in chain.from_iterable(map(documents.read, documents.find(os.fspath(path)))):
        if isinstance(outcome, Skipped):
            if outcome.is_damage:
                raise UserError(f"{outcome.where}: {outcome.sample}")
            raise UserError(f"{outcome.sample} ({outcome.reason}); correct it, or name another file")
        if outcome.id in lines_of_ids:
            before = f"was already given on line {lines_of_ids[outcome.id]}; ids must be unique"
            raise UserError(f"{os.fspath(path)}:{outcome.line}: id {outcome.id!r} {before}")
        lines_of_ids[outcome.id] = outcome.line
        yield outcome
