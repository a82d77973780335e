"""Articles to passages: sentences, word pieces, greedy packing, salient spans; written as a passage store.

Each passage is a run of whole sentences of one article that fits the limit together with the title and three special
pieces; a sentence that is too long by itself is split at word boundaries, so that no text is lost. A shard of articles
is packed by one worker, on this machine or another; the store is the same, byte for byte, whatever their number. Not
for reading files: see `realm_jax.corpus.jsonl`. Read `pack_shard` next, then `PassagePacker`.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from realm_jax.corpus.articles import read_shard
from realm_jax.corpus.jsonl import Article
from realm_jax.corpus.segments import SegmentWriter
from realm_jax.corpus.store import Columns, Passage, StoreWriter, columns, segment_folder
from realm_jax.errors import UserError
from realm_jax.storage import Folder, open_folder
from realm_jax.text import packing, sentences, spans
from realm_jax.text.wordpiece import Encoding, WordPiece

SMALLEST_LIMIT = 16  # below this a title leaves no room worth packing into
_BATCH_ARTICLES = 512
_BATCH_CHARACTERS = 1_000_000  # about a second of work and tens of MB of word pieces with their offsets


@dataclass(slots=True)
class Summary:
    """What became of articles. wordless: ids of those left out, as no word is in them; notes: what else was done."""

    articles: int = 0
    documents: int = 0
    passages: int = 0
    wordless: list[str] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Summary") -> None:
        """Add the counts of another batch."""
        self.articles += other.articles
        self.documents += other.documents
        self.passages += other.passages
        self.wordless += other.wordless
        self.notes += other.notes


def build_store(
    articles: Iterable[Article],
    wordpiece: WordPiece,
    folder: str | os.PathLike[str],
    limit: int = packing.DEFAULT_LIMIT,
    finder: str = "rules",
    replaces: Collection[str] = (),
) -> Summary:
    """Pack articles into the passage store `folder` (a new one, or one more segment of an existing one).

    `limit` counts the pieces of title and body and the three special ones of the document layout. `finder` names a
    salient-span finder. `replaces`: ids of documents of an existing store that the new segment takes the place of.
    Raises UserError when no article has words; the folder is then as before.
    """
    packer = PassagePacker(wordpiece, limit, finder)
    with StoreWriter(folder, wordpiece, limit, replaces) as writer:
        summary = _write(writer, packer, articles)
        if not summary.passages:
            raise UserError(f"none of {summary.articles} articles has words to store; check the texts")
    return summary


def _write(writer: SegmentWriter, packer: "PassagePacker", articles: Iterable[Article]) -> Summary:
    """Add the passages of articles; what became of these."""
    summary = Summary()
    for batch in _batches(articles):
        passages, of_batch = packer(batch)
        writer.write(passages)
        summary.add(of_batch)
    return summary


class Packed(NamedTuple):
    """A shard that became a segment. entry: what STORE.json says of it."""

    entry: dict[str, Any]
    summary: Summary

    def to_json(self) -> dict[str, Any]:
        summary = {one.name: getattr(self.summary, one.name) for one in fields(Summary)}
        return {"entry": self.entry, "summary": summary}  # a Counter is a JSON object

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        summary = value["summary"]
        return cls(value["entry"], Summary(**summary | {"notes": Counter(summary["notes"])}))


def pack_shard(packer: "PassagePacker", store: str, articles: str, shard: int) -> int:
    """Make a shard of articles a segment of `store`, and write beside the shard what became of it.

    articles, store: paths or URLs. Into a bucket a segment is carried file by file. Returns the number of articles.
    """
    source = open_folder(articles)
    with tempfile.TemporaryDirectory() as scratch:
        is_remote = "://" in store
        segment = segment_folder(Path(scratch if is_remote else store), shard)
        with SegmentWriter(segment, packer.tokenizer) as writer:
            summary = _write(writer, packer, read_shard(source, shard))
        for path in sorted(segment.iterdir()) if is_remote else ():
            open_folder(store).write(f"{segment.name}/{path.name}", path.read_bytes())
    source.write_json(packed_name(shard), Packed(writer.entry, summary).to_json())
    return summary.articles


def packed_name(shard: int) -> str:
    """The file beside a shard that says what became of it."""
    return f"{shard:05d}.packed.json"


def packed_shards(articles: Folder, shards: int) -> list[Packed]:
    """What became of each shard."""
    return [Packed.from_json(articles.read_json(packed_name(shard))) for shard in range(shards)]


def check_limit(limit: int) -> None:
    """Raise UserError for a limit that is too small for a title and a body."""
    if limit < SMALLEST_LIMIT:
        raise UserError(f"a limit of {limit} pieces leaves no room for text; use at least {SMALLEST_LIMIT}")


class PassagePacker:
    """Turns articles into rows of a store; a pure function of an article, cheap to send to another process."""

    def __init__(self, wordpiece: WordPiece, limit: int, finder: str):
        check_limit(limit)
        self._wordpiece = wordpiece
        self.limit = limit
        self._finder_name = finder
        self._find = spans.finder(finder)

    @property
    def tokenizer(self) -> str:
        """The fingerprint of the tokenizer."""
        return self._wordpiece.fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        return (PassagePacker, (self._wordpiece, self.limit, self._finder_name))

    def __call__(self, articles: list[Article]) -> tuple[Columns, Summary]:
        """Rows of a batch of articles, in order, and what became of them."""
        summary = Summary(articles=len(articles))
        texts = [_without_title_line(article) for article in articles]
        titles = self._wordpiece.encode_batch([article.title for article in articles])
        passages: list[Passage] = []
        for article, text, title, pieces in zip(articles, texts, titles, self._pieces(texts), strict=True):
            rows = self._passages(article, text, title, pieces, summary)
            if rows:
                summary.documents += 1
            else:
                summary.wordless.append(article.id)
            passages.extend(rows)
        summary.passages = len(passages)
        return columns(passages), summary

    def _pieces(self, texts: list[str]) -> Iterator["_Pieces"]:
        """The word pieces of each text. Lines are encoded one by one: no piece reaches over the end of a line, and the
        tokenizer takes up to twice as long over many lines in one."""
        lines = [text.split("\n") for text in texts]
        encodings = self._wordpiece.encode_batch([*chain.from_iterable(lines)])
        counts = np.array([len(encoding.ids) for encoding in encodings], np.int64)
        ids = np.fromiter(chain.from_iterable(e.ids for e in encodings), np.uint16, counts.sum())
        offsets = chain.from_iterable(chain.from_iterable(e.offsets for e in encodings))
        places = np.fromiter(offsets, np.int64, 2 * len(ids)).reshape(-1, 2)
        begins = np.fromiter(chain.from_iterable(map(_line_begins, lines)), np.int64, len(counts))
        places += np.repeat(begins, counts)[:, None]
        starts, ends = places.T.copy()
        bounds = np.concatenate([[0], np.cumsum(counts)])[np.cumsum([0, *map(len, lines)])].tolist()
        for first, last in pairwise(bounds):
            yield _Pieces(ids[first:last], starts[first:last], ends[first:last])

    def _passages(
        self, article: Article, text: str, title: Encoding, pieces: "_Pieces", summary: Summary
    ) -> list[Passage]:
        """All passages of one article."""
        title_tokens = np.array(title.ids[: packing.max_title(self.limit)], np.uint16)
        summary.notes["long titles shortened"] += len(title.ids) > len(title_tokens)
        ranges = self._sentences(text, pieces, packing.body_room(len(title_tokens), self.limit), summary)
        if not ranges:
            return []
        borders = np.array([(sentence.start, sentence.stop) for sentence in ranges])
        columns = pieces.ids, pieces.starts, pieces.ends, borders, self._wordpiece.unk_id
        found = spans.in_pieces(self._find(text), *columns)
        rows = packing.pack([s.stop - s.start for s in ranges], len(title_tokens), self.limit)
        begins = [*(ranges[first].start for first, _ in rows), len(pieces.ids)]
        bounds = np.searchsorted([start for start, _, _ in found], begins)
        own = [found[start:stop] for start, stop in pairwise(bounds.tolist())]
        return [
            _passage(article, text, title_tokens, pieces, ranges[first:last], inside)
            for (first, last), inside in zip(rows, own, strict=True)
        ]

    def _sentences(self, text: str, pieces: "_Pieces", room: int, summary: Summary) -> list["_Sentence"]:
        """Sentences that have pieces, none with more than `room`."""
        boundaries = sentences.split(text)
        starts = np.searchsorted(pieces.starts, [start for start, _ in boundaries])
        stops = [*starts.tolist()[1:], len(pieces.ids)][: len(boundaries)]
        result: list[_Sentence] = []
        for (begin, end), start, stop in zip(boundaries, starts.tolist(), stops, strict=True):
            sentence = _Sentence(begin, end, start, stop)
            if stop - start > room:
                summary.notes["long sentences split"] += 1
                result.extend(self._split(sentence, pieces, room))
            elif stop > start:
                result.append(sentence)
        return result

    def _split(self, sentence: "_Sentence", pieces: "_Pieces", room: int) -> list["_Sentence"]:
        """Cut a sentence into parts of at most `room` pieces, between words wherever possible."""
        own = slice(sentence.start, sentence.stop)
        words = packing.word_lengths(list(zip(pieces.starts[own].tolist(), pieces.ends[own].tolist(), strict=True)))
        parts = []
        for first, last in packing.split_long(words, room):
            start, stop = sentence.start + first, sentence.start + last
            begin = sentence.begin if first == 0 else int(pieces.starts[start])
            end = sentence.end if stop == sentence.stop else int(pieces.ends[stop - 1])
            parts.append(_Sentence(begin, end, start, stop))
        return parts


@dataclass(frozen=True, slots=True)
class _Sentence:
    """A sentence as characters [begin, end) of the text and as pieces [start, stop) of the article."""

    begin: int
    end: int
    start: int
    stop: int


class _Pieces(NamedTuple):
    """Word pieces of an article: ids uint16, first characters and ends int64, all [pieces]."""

    ids: NDArray[np.uint16]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def _line_begins(lines: list[str]) -> Iterator[int]:
    """Where each line begins in the text."""
    place = 0
    for line in lines:
        yield place
        place += len(line) + 1


def _passage(
    article: Article,
    text: str,
    title_tokens: NDArray[np.uint16],
    pieces: _Pieces,
    ranges: list[_Sentence],
    found: list[tuple[int, int, str]],
) -> Passage:
    """One row: its sentences and spans count pieces from the row's first piece."""
    base = ranges[0].start
    return Passage(
        document_id=article.id,
        title=article.title,
        text=text[ranges[0].begin : ranges[-1].end],
        title_tokens=title_tokens,
        body_tokens=pieces.ids[base : ranges[-1].stop],
        sentences=np.array([(sentence.start - base, sentence.stop - base) for sentence in ranges], np.int32),
        spans=[(start - base, end - base, kind) for start, end, kind in found],
    )


def _without_title_line(article: Article) -> str:
    """The text without a first line that repeats the title, as older versions of WikiExtractor write it."""
    first, _, rest = article.text.lstrip().partition("\n")
    return rest if rest.strip() and first.strip() == article.title.strip() else article.text


def _batches(articles: Iterable[Article]) -> Iterator[list[Article]]:
    """Cut the stream of articles by number and by characters; the last batch of all may be empty."""
    batch: list[Article] = []
    characters = 0
    for article in articles:
        batch.append(article)
        characters += len(article.text)
        if len(batch) == _BATCH_ARTICLES or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch
