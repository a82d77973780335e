"""Articles to passages: sentences, tokens, greedy packing, salient spans; written as a passage store.

Each passage is a run of whole sentences of one article that fits the limit together with the title and three special
pieces; a sentence that is too long by itself is split between words where it can be. The passages of an article hold
every character of its text, those without tokens too, but for white space at the ends of passages. A shard of articles
is packed by one worker, on this machine or another; the store is the same, byte for byte, whatever their number. Not
for reading files: see `realm_jax.corpora.texts`. Read `pack_shard` next, then `PassagePacker`.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from realm_jax.corpora.articles import Article, read_shard, shard_file
from realm_jax.data import passage_packing, sentences, spans
from realm_jax.data.store import Passage, SegmentWriter, append_segment, segment_folder
from realm_jax.data.tokenizer import Tokenizer, Tokens
from realm_jax.errors import UserError
from realm_jax.storage import open_folder

PACKED = "packed.json"  # a file beside a shard that became a segment
SMALLEST_LIMIT = 16  # below this a title leaves no room worth packing into
_BATCH_ARTICLES = 512
_BATCH_CHARACTERS = 1_000_000  # about a second of work and tens of MB of tokens with their offsets


@dataclass(slots=True)
class PackingSummary:
    """Counts of articles by outcome. wordless: ids of those skipped for having no words; notes: other changes.

    tokens, unknown: tokens of the texts, and how many of them are [UNK].
    """

    articles: int = 0
    documents: int = 0
    passages: int = 0
    tokens: int = 0
    unknown: int = 0
    wordless: list[str] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, other: "PackingSummary") -> None:
        """Add the counts of another batch."""
        self.articles += other.articles
        self.documents += other.documents
        self.passages += other.passages
        self.tokens += other.tokens
        self.unknown += other.unknown
        self.wordless += other.wordless
        self.notes += other.notes

    @property
    def unknown_share(self) -> float:
        """The share of tokens that are [UNK]."""
        return self.unknown / max(1, self.tokens)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, which a Counter is too."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**value | {"notes": Counter(value["notes"])})


def build_store(
    articles: Iterable[Article],
    tokenizer: Tokenizer,
    folder: str | os.PathLike[str],
    limit: int = passage_packing.DEFAULT_LIMIT,
    finder: str = "rules",
    replaces: Collection[str] = (),
) -> PackingSummary:
    """Pack articles into the passage store `folder` (a new one, or one more segment of an existing one).

    `limit` counts the pieces of title and body and the three special ones of the document layout. `finder` names a
    salient-span finder. `replaces`: ids of documents of an existing store that the new segment takes the place of.
    Raises UserError when no article has words; the folder is then as before.
    """
    packer = PassagePacker(tokenizer, limit, finder)
    with append_segment(folder, tokenizer, limit, replaces) as writer:
        summary = _write(writer, packer, articles)
        if not summary.passages:
            raise UserError(f"none of {summary.articles} articles has words to store; check the texts")
    return summary


def _write(writer: SegmentWriter, packer: "PassagePacker", articles: Iterable[Article]) -> PackingSummary:
    """Add the passages of articles; what became of these."""
    summary = PackingSummary()
    for batch in _batches(articles):
        passages, of_batch = packer(batch)
        writer.write(passages)
        summary.add(of_batch)
    return summary


def pack_shard(packer: "PassagePacker", store: str, articles: str, shard: int) -> int:
    """Make a shard of articles a segment of `store`, and write beside the shard what became of it.

    articles, store: paths or URLs. Into a bucket a segment is carried file by file. Returns the number of articles.
    """
    source = open_folder(articles)
    with tempfile.TemporaryDirectory() as scratch:
        is_remote = "://" in store
        segment = segment_folder(Path(scratch if is_remote else store), shard)
        with SegmentWriter(segment, packer.tokenizer.fingerprint, packer.tokenizer.dtype) as writer:
            summary = _write(writer, packer, read_shard(source, shard))
        for path in sorted(segment.iterdir()) if is_remote else ():
            open_folder(store).write(f"{segment.name}/{path.name}", path.read_bytes())
    packed = {"entry": writer.entry, "summary": summary.to_json()}  # "entry": of the segment, for STORE.json
    source.write_json(shard_file(shard, PACKED), packed)
    return summary.articles


def check_limit(limit: int) -> None:
    """Raise UserError for a limit that is too small for a title and a body."""
    if limit < SMALLEST_LIMIT:
        raise UserError(f"a limit of {limit} pieces leaves no room for text; use at least {SMALLEST_LIMIT}")


class PassagePacker:
    """Turns articles into rows of a store; a pure function of an article, cheap to send to another process."""

    def __init__(self, tokenizer: Tokenizer, limit: int, finder: str):
        check_limit(limit)
        self.tokenizer = tokenizer
        self.limit = limit
        self._finder_name = finder
        self._find = spans.finder(finder)

    def __reduce__(self) -> tuple[Any, ...]:
        return (PassagePacker, (self.tokenizer, self.limit, self._finder_name))

    def __call__(self, articles: list[Article]) -> tuple[list[Passage], PackingSummary]:
        """Rows of a batch of articles, in order, and what became of them."""
        summary = PackingSummary(articles=len(articles))
        texts = [_without_title_line(article) for article in articles]
        titles, bodies = self.tokenizer.tokens([article.title for article in articles]), self.tokenizer.tokens(texts)
        spans_of_texts = self._find.find_many(texts)
        passages: list[Passage] = []
        for article, text, title, tokens, found in zip(articles, texts, titles, bodies, spans_of_texts, strict=True):
            rows = self._passages(article, text, title, tokens, found, summary)
            if rows:
                summary.documents += 1
            else:
                summary.wordless.append(article.id)
            passages.extend(rows)
            summary.tokens += len(tokens.ids)
            summary.unknown += int(np.count_nonzero(tokens.ids == self.tokenizer.unk_id))
        summary.passages = len(passages)
        return passages, summary

    def _passages(
        self, article: Article, text: str, title: Tokens, tokens: Tokens, spans_of_text: list[spans.Span],
        summary: PackingSummary,
    ) -> list[Passage]:  # fmt: skip
        """All passages of one article."""
        title_tokens = title.ids[: passage_packing.max_title(self.limit)]
        summary.notes["long titles shortened"] += len(title.ids) > len(title_tokens)
        room = passage_packing.body_room(len(title_tokens), self.limit)
        of_sentences = passage_packing.sentence_parts(text, tokens, sentences.split(text), room)
        summary.notes["long sentences split"] += sum(len(parts) > 1 for parts in of_sentences)
        parts = [*chain.from_iterable(of_sentences)]
        if not parts:
            return []
        borders = np.array([(part.start, part.stop) for part in parts])
        columns = *tokens, borders, self.tokenizer.unk_id
        found = spans.to_token_spans(spans_of_text, *columns)
        rows = passage_packing.pack([part.stop - part.start for part in parts], len(title_tokens), self.limit)
        begins = [*(parts[first].start for first, _ in rows), len(tokens.ids)]
        bounds = np.searchsorted([start for start, _, _ in found], begins).tolist()
        # Passages divide the whole text: what has no tokens, such as a mark alone, belongs to the passage before it.
        cuts = [0, *(parts[first].begin for first, _ in rows[1:]), len(text)]
        passages = []
        for (begin, end), (first, last), inside in zip(pairwise(cuts), rows, pairwise(bounds), strict=True):
            if not text[begin:end].strip():  # a token of white space, or the rest of a letter of many tokens
                continue
            base = parts[first].start  # sentences and spans count pieces from the first one of the row
            passages.append(
                Passage(
                    document_id=article.id,
                    title=article.title,
                    text=text[begin:end].strip(),
                    title_tokens=title_tokens,
                    body_tokens=tokens.ids[base : parts[last - 1].stop],
                    sentences=np.array([(one.start - base, one.stop - base) for one in parts[first:last]], np.int32),
                    spans=[(start - base, stop - base, kind) for start, stop, kind in found[slice(*inside)]],
                )
            )
        return passages


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
