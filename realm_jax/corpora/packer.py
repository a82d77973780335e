"""Articles to passages: sentences, tokens, greedy packing, salient spans; written as a passage store.

Each passage is a run of complete sentences of one article that fits the limit together with the title and three special
tokens; we split a sentence that is too long, between words if possible. The passages of an article contain every
character of its text, even those without tokens, except white space at the ends of passages. One worker packs a shard
of articles, on this machine or another; the store is the same, byte for byte, for any number of workers. Not for
reading files: see `realm_jax.corpora.texts`. Read `pack_shard` next, then `PassagePacker`.
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
from realm_jax.data.languages import PLAIN
from realm_jax.data.store import Passage, SegmentWriter, append_segment, segment_folder
from realm_jax.data.tokenizer import Tokenizer, Tokens
from realm_jax.errors import UserError
from realm_jax.storage import open_folder

PACKED = "packed.json"  # a file next to a shard that became a segment
SMALLEST_LIMIT = 16  # below this a title leaves no room for text
_BATCH_ARTICLES = 512
_BATCH_CHARACTERS = 1_000_000  # about a second of work and tens of MB of tokens with their offsets


@dataclass(slots=True)
class PackingSummary:
    """Counts of articles by outcome.

    Attributes:
        articles: articles that were read.
        documents: articles with passages.
        passages: passages of these documents.
        tokens: tokens of the texts.
        unknown: tokens that are [UNK].
        wordless: ids of articles that were skipped because they have no words.
        notes: counts of other changes.
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
        """Return the share of tokens that are [UNK]."""
        return self.unknown / max(1, self.tokens)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a JSON object; a Counter becomes one by itself."""
        return {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Read the counts of `to_json`."""
        return cls(**value | {"notes": Counter(value["notes"])})


def build_store(
    articles: Iterable[Article],
    tokenizer: Tokenizer,
    folder: str | os.PathLike[str],
    limit: int = passage_packing.DEFAULT_LIMIT,
    finder: str = "rules",
    replaces: Collection[str] = (),
    language: str = PLAIN,
) -> PackingSummary:
    """Pack articles into the passage store `folder` (a new one, or one more segment of an existing one).

    Args:
        articles: the articles.
        tokenizer: makes the tokens.
        folder: the store's folder.
        limit: most tokens of a passage, title and three special tokens included.
        finder: name of a salient-span finder.
        replaces: ids of documents of an existing store that the new segment replaces.
        language: language of the articles, one of `languages.CHOICES`.

    Raises:
        UserError: no article has words, or one of `replaces` has none; the folder is then as before.
    """
    packer = PassagePacker(tokenizer, limit, finder, language)
    with append_segment(folder, tokenizer, limit, replaces) as writer:
        summary = _write(writer, packer, articles)
        if not summary.passages:
            raise UserError(f"none of {summary.articles} articles has words to store; check the texts")
        if lost := [document for document in summary.wordless if document in replaces]:
            raise UserError(
                f"document {lost[0]!r} has no words to store; correct its text, or remove it with `realm corpus remove`"
            )
    return summary


def _write(writer: SegmentWriter, packer: "PassagePacker", articles: Iterable[Article]) -> PackingSummary:
    """Write the passages of articles."""
    summary = PackingSummary()
    for batch in _batches(articles):
        passages, batch_summary = packer(batch)
        writer.write(passages)
        summary.add(batch_summary)
    return summary


def pack_shard(packer: "PassagePacker", store: str, articles: str, shard: int) -> int:
    """Make a segment of a store from a shard of articles, and write its summary next to the shard.

    A segment in a bucket is first written to this machine's disk, and then copied file by file.

    Args:
        packer: makes passages.
        store: path or URL of the store's folder.
        articles: path or URL of the folder of the shards.
        shard: its number.

    Returns:
        Number of articles.
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
        raise UserError(f"a limit of {limit} tokens leaves no room for text; use at least {SMALLEST_LIMIT}")


class PassagePacker:
    """Turns articles into rows of a store; a pure function of an article, cheap to send to another process."""

    def __init__(self, tokenizer: Tokenizer, limit: int, finder: str, language: str = PLAIN):
        check_limit(limit)
        self.tokenizer = tokenizer
        self.limit = limit
        self.language = language
        self._finder_name = finder
        self._find = spans.finder(finder)

    def __reduce__(self) -> tuple[Any, ...]:
        return (PassagePacker, (self.tokenizer, self.limit, self._finder_name, self.language))

    def __call__(self, articles: list[Article]) -> tuple[list[Passage], PackingSummary]:
        """Return the rows of a batch of articles, in order, and their counts."""
        summary = PackingSummary(articles=len(articles))
        texts = []
        for article in articles:  # without a first line that repeats the title, as old versions of WikiExtractor write
            first, _, rest = article.text.lstrip().partition("\n")
            repeats_title = rest.strip() and first.strip() == article.title.strip()
            texts.append(rest if repeats_title else article.text)
        tokenizer = self.tokenizer.placed(behind_space=True)  # as the passage encoder reads them
        titles, bodies = tokenizer.tokens([article.title for article in articles]), tokenizer.tokens(texts)
        spans_of_texts = self._find.find_many(texts)
        passages: list[Passage] = []
        for article, text, title, tokens, spans_of_text in zip(
            articles, texts, titles, bodies, spans_of_texts, strict=True
        ):
            rows = self._passages(article, text, title, tokens, spans_of_text, summary)
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
        """Return the passages of one article, and count in `summary`."""
        title_tokens = title.ids[: passage_packing.max_title(self.limit)]
        summary.notes["long titles shortened"] += len(title.ids) > len(title_tokens)
        max_tokens = passage_packing.body_room(len(title_tokens), self.limit)
        ranges = sentences.split(text, self.language)
        parts_of_sentences = passage_packing.sentence_parts(text, tokens, ranges, max_tokens)
        summary.notes["long sentences split"] += sum(len(parts) > 1 for parts in parts_of_sentences)
        parts = [*chain.from_iterable(parts_of_sentences)]
        if not parts:
            return []
        borders = np.array([(part.start, part.stop) for part in parts])  # [parts, 2], in tokens
        token_spans = spans.to_token_spans(spans_of_text, *tokens, borders, self.tokenizer.unk_id)
        rows = passage_packing.pack([part.stop - part.start for part in parts], len(title_tokens), self.limit)
        begins = [*(parts[first].start for first, _ in rows), len(tokens.ids)]
        bounds = np.searchsorted([start for start, _, _ in token_spans], begins).tolist()  # [rows + 1], in token_spans
        # Passages divide the text: characters without tokens, such as a single mark, belong to the passage before them.
        cuts = [0, *(parts[first].begin for first, _ in rows[1:]), len(text)]
        passages = []
        for (begin, end), (first, last), inside in zip(pairwise(cuts), rows, pairwise(bounds), strict=True):
            if not text[begin:end].strip():  # a token of white space, or the rest of a letter of many tokens
                continue
            base = parts[first].start  # sentences and spans count tokens from the first one of the row
            passages.append(
                Passage(
                    document_id=article.id,
                    title=article.title,
                    text=text[begin:end].strip(),
                    title_tokens=title_tokens,
                    body_tokens=tokens.ids[base : parts[last - 1].stop],
                    sentences=np.array([(part.start - base, part.stop - base) for part in parts[first:last]], np.int32),
                    spans=[(start - base, stop - base, kind) for start, stop, kind in token_spans[slice(*inside)]],
                )
            )
        return passages


def _batches(articles: Iterable[Article]) -> Iterator[list[Article]]:
    """Cut the stream of articles by number and by characters; the last batch may be empty."""
    batch: list[Article] = []
    characters = 0
    for article in articles:
        batch.append(article)
        characters += len(article.text)
        if len(batch) == _BATCH_ARTICLES or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch
