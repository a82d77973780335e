"""A second store beside one of a prepared folder: the same rows in the tokens of a reader with another tokenizer.

    DATA/reader/tokenizer/            as in DATA/tokenizer
    DATA/reader/passages/, …          a store for each of DATA: the same segments, rows, texts, sentences and versions
    DATA/reader/<store>/<segment>.json   a segment that is done: that of which it is, and what STORE.json says of it
    DATA/reader/READER.json           last: the tokenizer, and for each version of a store the version here

Passages are not packed again: a row keeps its text, so sentences and salient spans are carried over by their
characters. A span that does not begin and end with tokens of the other tokenizer is left out. Read
`write_reader_tokens`.
"""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realm_jax.console import StageProgress
from realm_jax.corpora.pool import ordered_parallel_map
from realm_jax.data import spans
from realm_jax.data.packing import max_title
from realm_jax.data.segments import Passage, Segment, SegmentWriter
from realm_jax.data.staging import READER, READER_MANIFEST
from realm_jax.data.store import PassageStore, mirror_versions
from realm_jax.data.tokenizer import Tokenizer, Tokens
from realm_jax.data.tokenizer_files import open_tokenizer
from realm_jax.errors import UserError
from realm_jax.storage import read_json, write_json_atomic

_BATCH_ROWS = 512


def write_reader_tokens(data: Path, reader: Tokenizer, workers: int) -> bool:
    """Write the reader's tokens of a prepared folder, or what is missing of them since its corpus was edited.

    Returns whether anything was missing. Raises UserError if the folder has those of another reader.
    """
    place, own = data / READER, open_tokenizer(data / "tokenizer")
    if reader.fingerprint == own.fingerprint:
        raise UserError(f"--reader-vocab: has the tokens of {data}, so reader and retriever share them; leave it out")
    known = read_json(place / READER_MANIFEST) if (place / READER_MANIFEST).is_file() else {}
    if known.get("tokenizer", reader.fingerprint) != reader.fingerprint:
        raise UserError(f"{place}: has the tokens of another reader; remove the folder to make it anew")
    if not known:
        shutil.rmtree(place / "tokenizer", ignore_errors=True)
        reader.save(place / "tokenizer")
    versions = {
        name: _mirror(data / name, place / name, own, reader, workers)
        for name in ("passages", "pretraining")
        if (data / name).is_dir()
    }
    record = {"tokenizer": reader.fingerprint} | versions
    if record == known:
        return False
    write_json_atomic(place / READER_MANIFEST, record)
    return True


def _mirror(source: Path, target: Path, own: Tokenizer, reader: Tokenizer, workers: int) -> dict[str, str]:
    """A store of the same rows: version there → version here."""
    store = PassageStore.open(source)
    target.mkdir(parents=True, exist_ok=True)
    numbers = [number for number, segment in enumerate(store.segments) if not _is_done(segment, target)]
    write = partial(_write_segment, source, target, own, reader)
    with StageProgress(f"{source.name} for the reader", sum(store.segments[number].rows for number in numbers)) as bar:
        done = 0
        for rows in ordered_parallel_map(write, numbers, workers, few=2):
            done += rows
            bar.update(done)
    entries = [read_json(target / f"{segment.folder.name}.json")["entry"] for segment in store.segments]
    return mirror_versions(source, target, reader, entries)


def _is_done(segment: Segment, target: Path) -> bool:
    """Whether a segment of the same rows is there."""
    record = target / f"{segment.folder.name}.json"
    return record.is_file() and read_json(record)["of"] == segment.fingerprint


def _write_segment(source: Path, target: Path, own: Tokenizer, reader: Tokenizer, number: int) -> int:
    """Write the counterpart of a segment; its number of rows."""
    store = PassageStore.open(source)
    segment = store.segments[number]
    with SegmentWriter(target / segment.folder.name, reader.fingerprint, reader.dtype) as writer:
        for passages in _translated(segment, own, reader, store.limit):
            writer.write(passages)
    record = {"of": segment.fingerprint, "entry": writer.entry}
    write_json_atomic(target / f"{segment.folder.name}.json", record)
    return segment.rows


def _translated(segment: Segment, own: Tokenizer, reader: Tokenizer, limit: int) -> Iterator[list[Passage]]:
    """The rows of a segment in the reader's tokens, a batch at a time."""
    for start in range(0, segment.rows, _BATCH_ROWS):
        rows = range(start, min(start + _BATCH_ROWS, segment.rows))
        titles = reader.tokens([segment.string("titles", row) for row in rows])
        bodies = reader.tokens([segment.string("texts", row) for row in rows])
        yield [
            _passage(segment, row, own, reader.unk_id, title.ids[: max_title(limit)], body)
            for row, title, body in zip(rows, titles, bodies, strict=True)
        ]


def _passage(segment: Segment, row: int, own: Tokenizer, unknown: int, title: NDArray[Any], body: Tokens) -> Passage:
    """A row with other tokens."""
    text, kinds = segment.string("texts", row), segment.span_kinds
    tokens = segment.ragged("tokens", row)[segment.fixed["title_lengths"][row] :]
    offsets = own.offsets_of(text, tokens)
    begins, found = _characters(segment, row, _by_itself(own, text, len(tokens)) if offsets is None else offsets)
    starts = [0, *np.searchsorted(body.starts, begins[1:], "left").tolist()]
    sentences = np.column_stack([starts, [*starts[1:], len(body.ids)]]).astype(np.int32)
    named = [spans.Span(start, end, kinds[kind], 1.0) for start, end, kind in found] if offsets is not None else []
    inside = spans.to_token_spans(named, body.ids, body.starts, body.ends, sentences, unknown)
    return Passage(
        document_id=segment.string("document_ids", row),
        title=segment.string("titles", row),
        text=text,
        title_tokens=title,
        body_tokens=body.ids,
        sentences=sentences,
        spans=inside,
    )


def _characters(segment: Segment, row: int, offsets: NDArray[np.int64]) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Where a row's sentences begin, and its salient spans, in characters. offsets: of its tokens [tokens, 2]."""
    begins = [int(offsets[start, 0]) for start, _ in segment.ragged("sentences", row)]
    found = segment.ragged("spans", row).tolist()
    return begins, [(int(offsets[start, 0]), int(offsets[end - 1, 1]), kind) for start, end, kind in found]


def _by_itself(own: Tokenizer, text: str, count: int) -> NDArray[np.int64]:
    """About where the `count` tokens of a text are that was cut within a word: its tokens are others at the ends."""
    offsets = np.array(own.encode(text).offsets, np.int64).reshape(-1, 2)
    offsets = offsets if len(offsets) else np.zeros((1, 2), np.int64)
    return offsets[np.minimum(np.arange(count), len(offsets) - 1)]
