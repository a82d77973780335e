"""Articles to passages: sentences, word pieces, greedy packing, salient spans; written as a passage store.

Each passage is a run of whole sentences of one article that fits the limit together with the title and three special
pieces; a sentence that is too long by itself is split at word boundaries, so that no text is lost. Batches of articles
go through worker processes; the store is the same, byte for byte, whatever their number. Not for reading files: see
`realm_jax.corpus.jsonl`. Read `build_store` next, then `PassagePacker`.
"""

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realm_jax.corpus.jsonl import Article
from realm_jax.corpus.store import Columns, Passage, StoreWriter, columns
from realm_jax.errors import UserError
from realm_jax.text import packing, sentences, spans
from realm_jax.text.wordpiece import Encoding, WordPiece

SMALLEST_LIMIT = 16  # below this a title leaves no room worth packing into
_BATCH_ARTICLES = 512
_BATCH_CHARACTERS = 1_000_000  # about a second of work and tens of MB of word pieces with their offsets
_BATCHES_WORTH_A_POOL = 4  # starting processes takes about as long as doing this many batches


@dataclass(slots=True)
class Summary:
    """What became of the articles; `dropped` counts articles left out by reason, `notes` what else was done."""

    articles: int = 0
    documents: int = 0
    passages: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Summary") -> None:
        """Add the counts of another batch."""
        self.articles += other.articles
        self.documents += other.documents
        self.passages += other.passages
        self.dropped += other.dropped
        self.notes += other.notes


def build_store(
    articles: Iterable[Article],
    wordpiece: WordPiece,
    folder: str | os.PathLike[str],
    limit: int = packing.DEFAULT_LIMIT,
    finder: str = "rules",
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
    replaces: Collection[str] = (),
) -> Summary:
    """Pack articles into the passage store `folder` (a new one, or one more segment of an existing one).

    `limit` counts the pieces of title and body and the three special ones of the document layout. `finder` names a
    salient-span finder. `workers` is the number of processes (None: one a core); a script that uses more than one
    needs the usual `if __name__ == "__main__":` guard. `progress` is told the number of articles done. `replaces`: ids
    of documents of an existing store that the new segment takes the place of.

    Raises UserError when nothing is left to store, for faults in `articles`, and for a limit that is too small.
    """
    packer = PassagePacker(wordpiece, limit, finder)
    total = Summary()
    with StoreWriter(folder, wordpiece, limit, replaces) as writer:
        for batch, summary in _pack_in_order(packer, _batches(articles), workers or os.cpu_count() or 1):
            writer.write(batch)
            total.add(summary)
            if progress is not None:
                progress(total.articles)
        if not total.passages:
            raise UserError(f"none of {total.articles} articles has words to store; check the texts")
    return total


def check_limit(limit: int) -> None:
    """Raise UserError for a limit that is too small for a title and a body."""
    if limit < SMALLEST_LIMIT:
        raise UserError(f"a limit of {limit} pieces leaves no room for text; use at least {SMALLEST_LIMIT}")


class PassagePacker:
    """Turns articles into rows of a store; a pure function of an article, cheap to send to another process."""

    def __init__(self, wordpiece: WordPiece, limit: int, finder: str):
        check_limit(limit)
        self._wordpiece = wordpiece
        self._limit = limit
        self._finder_name = finder
        self._find = spans.finder(finder)

    def __reduce__(self) -> tuple[Any, ...]:
        return (PassagePacker, (self._wordpiece, self._limit, self._finder_name))

    def __call__(self, articles: list[Article]) -> tuple[Columns, Summary]:
        """Rows of a batch of articles, in order, and what became of them."""
        summary = Summary(articles=len(articles))
        texts = [_without_title_line(article) for article in articles]
        titles = self._wordpiece.encode_batch([article.title for article in articles])
        bodies = self._wordpiece.encode_batch(texts)
        passages: list[Passage] = []
        for article, text, title, body in zip(articles, texts, titles, bodies, strict=True):
            rows = self._passages(article, text, title, body, summary)
            if rows:
                summary.documents += 1
            else:
                summary.dropped["no words in the text"] += 1
            passages.extend(rows)
        summary.passages = len(passages)
        return columns(passages), summary

    def _passages(
        self, article: Article, text: str, title: Encoding, body: Encoding, summary: Summary
    ) -> list[Passage]:
        """All passages of one article."""
        title_tokens = np.array(title.ids[: packing.max_title(self._limit)], np.uint16)
        summary.notes["long titles shortened"] += len(title.ids) > len(title_tokens)
        pieces = _Pieces(body)
        ranges = self._sentences(text, pieces, packing.body_room(len(title_tokens), self._limit), summary)
        if not ranges:
            return []
        found = self._spans(text, pieces, ranges)
        rows = packing.pack([s.stop - s.start for s in ranges], len(title_tokens), self._limit)
        return [
            _passage(article, text, title_tokens, pieces, ranges[first:last], found[first:last]) for first, last in rows
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
        words = packing.word_lengths(pieces.offsets[sentence.start : sentence.stop])
        parts = []
        for first, last in packing.split_long(words, room):
            start, stop = sentence.start + first, sentence.start + last
            begin = sentence.begin if first == 0 else int(pieces.starts[start])
            end = sentence.end if stop == sentence.stop else int(pieces.ends[stop - 1])
            parts.append(_Sentence(begin, end, start, stop))
        return parts

    def _spans(self, text: str, pieces: "_Pieces", ranges: list["_Sentence"]) -> list[list[tuple[int, int, str]]]:
        """For each sentence its spans (start, end, kind) in pieces of the article, in order.

        A span counts if its ends are ends of pieces, it lies inside one sentence and no piece of it is [UNK], which
        nobody can predict.
        """
        found = self._find(text)
        firsts = np.searchsorted(pieces.ends, [span.start for span in found], "right")
        lasts = np.searchsorted(pieces.starts, [span.end for span in found], "left")
        owners = np.searchsorted([sentence.start for sentence in ranges], firsts, "right") - 1
        result: list[set[tuple[int, int, str]]] = [set() for _ in ranges]
        for span, first, last, owner in zip(found, firsts.tolist(), lasts.tolist(), owners.tolist(), strict=True):
            whole = first < last and pieces.starts[first] >= span.start and pieces.ends[last - 1] <= span.end
            known = self._wordpiece.unk_id not in pieces.ids[first:last]
            if whole and known and owner >= 0 and last <= ranges[owner].stop:
                result[owner].add((first, last, span.kind))
        return [sorted(inside) for inside in result]


@dataclass(frozen=True, slots=True)
class _Sentence:
    """A sentence as characters [begin, end) of the text and as pieces [start, stop) of the article."""

    begin: int
    end: int
    start: int
    stop: int


class _Pieces:
    """Word pieces of an article: ids uint16, first characters and ends int64, all [pieces]."""

    def __init__(self, encoding: Encoding):
        self.offsets = encoding.offsets
        self.ids = np.array(encoding.ids, np.uint16)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        self.starts: NDArray[np.int64] = np.ascontiguousarray(offsets[:, 0])
        self.ends: NDArray[np.int64] = np.ascontiguousarray(offsets[:, 1])


def _passage(
    article: Article,
    text: str,
    title_tokens: NDArray[np.uint16],
    pieces: _Pieces,
    ranges: list[_Sentence],
    found: list[list[tuple[int, int, str]]],
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
        spans=[(start - base, end - base, kind) for start, end, kind in chain(*found)],
    )


def _without_title_line(article: Article) -> str:
    """The text without a first line that repeats the title, as older versions of WikiExtractor write it."""
    first, _, rest = article.text.lstrip().partition("\n")
    return rest if rest.strip() and first.strip() == article.title.strip() else article.text


def _batches(articles: Iterable[Article]) -> Iterator[list[Article]]:
    """Cut the stream of articles by number and by characters."""
    batch: list[Article] = []
    characters = 0
    for article in articles:
        batch.append(article)
        characters += len(article.text)
        if len(batch) == _BATCH_ARTICLES or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _pack_in_order(
    packer: PassagePacker, batches: Iterator[list[Article]], workers: int
) -> Iterator[tuple[Columns, Summary]]:
    """Pack all batches, in this process when they are few, and hand the results on in order."""
    first = list(islice(batches, _BATCHES_WORTH_A_POOL))
    batches = chain(first, batches)
    if workers == 1 or len(first) < _BATCHES_WORTH_A_POOL:
        yield from map(packer, batches)
        return
    # "spawn": a forked child would inherit locks of threads that JAX and the tokenizer may have started.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (packer,))
    try:
        waiting: deque[Future[tuple[Columns, Summary]]] = deque()
        for batch in batches:
            waiting.append(pool.submit(_work, batch))
            if len(waiting) > 2 * workers:  # enough to keep all busy, and no more of the corpus in memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError("a worker process was killed, probably for lack of memory; use fewer workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_packer: PassagePacker


def _start_worker(packer: PassagePacker) -> None:
    """Set up a worker process: it leaves Ctrl-C to its parent and ends when the parent is gone."""
    global _packer
    _packer = packer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(batch: list[Article]) -> tuple[Columns, Summary]:
    return _packer(batch)
