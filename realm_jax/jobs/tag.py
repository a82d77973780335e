"""`realm tag`: a prepared folder once more, with the salient spans of a trained tagger in place of those it has.

    OUTPUT.tagging/TAGS.json              what is tagged, and with what
    OUTPUT.tagging/<store>/000000.npy     spans of a chunk of rows, int32 [n, 4]: row, start, end (pieces), kind; a seal
    OUTPUT.tagging/whole/                 what becomes OUTPUT

A chunk's file appears whole, so what is there is done: the command goes on where it was cut off, and any number of
processes, each on its own devices, share the chunks like builders of an index share theirs. When all are there, the
first process writes OUTPUT and removes what led to it; one that is still at work then sees OUTPUT and ends well.
Read `tag` next.
"""

import argparse
import contextlib
import hashlib
import io
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax import processes
from realm_jax.console import StageProgress
from realm_jax.corpus.store import Passage, PassageStore, StoreWriter, columns
from realm_jax.data.sources import open_sources
from realm_jax.data.staging import is_remote, staged
from realm_jax.errors import UserError
from realm_jax.evaluation.tagging import TextTagger, tag_passages
from realm_jax.host import Stop
from realm_jax.index.builder import WorkShare
from realm_jax.jobs.opening import set_up_jax
from realm_jax.jobs.tagger import open_tagger
from realm_jax.storage import make_folder, only_one, publish_folder, read_json, write_atomic, write_json_atomic
from realm_jax.text.wordpiece import WordPiece

logger = logging.getLogger(__name__)

RECORD, MANIFEST = "TAGS.json", "PREPARED.json"
SEAL_BYTES = 32  # at the end of a chunk's file
CHUNK_ROWS = 16_384  # passages in a chunk: what a killed process loses at most
WRITTEN_ROWS = 1024  # passages that are written at a time
EXAMPLES = """examples:
  realm tag --workdir=runs/tagger --data=data --output=data-tagged
  realm tag --workdir=runs/tagger --data=data --output=data-tagged --process=1 --processes=4     the second of four

The same command goes on where it was cut off.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm tag`."""
    parser.epilog = EXAMPLES
    parser.add_argument("--workdir", required=True, metavar="DIR", help="folder of a tagger of `realm train`")
    parser.add_argument("--data", required=True, metavar="DIR", help="folder written by `realm prepare`, or its URL")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--batch-size", type=int, metavar="N", help="windows on each device (default: the tagger's)")
    processes.add_share_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Tag. Raises Preempted after SIGTERM."""
    share = WorkShare(*processes.share_of(args))
    if args.batch_size is not None and args.batch_size < 1:
        raise UserError(f"--batch-size={args.batch_size}: must be positive")
    data, output = folders(args.data, args.output)
    set_up_jax()
    tagger = open_tagger(Path(args.workdir), jax.local_devices(), args.batch_size)
    with Stop() as stop:
        tag(tagger, data, output, share, stop)


def folders(data: str, output: str) -> tuple[Path, Path]:
    """Where to read and what to make, on this machine. Raises UserError where nothing can be made."""
    if "://" in output:
        raise UserError(f"--output={output}: it is written to a disk; name a folder, and copy it to the bucket")
    source, final = staged(data) if is_remote(data) else Path(data), Path(output)
    if final.exists():
        raise UserError(f"--output={output} exists; choose another folder, or remove it")
    if final.resolve().is_relative_to(source.resolve()):
        raise UserError(f"--output={output} lies inside --data={data}; choose a folder beside it")
    return source, final


class Chunk(NamedTuple):
    """Some rows of a store, and the file of their spans. key: of all that decides them."""

    store: str
    rows: range
    file: Path
    key: str


def tag(
    tagger: TextTagger, data: Path, output: Path, share: WorkShare, stop: Stop, chunk_rows: int = CHUNK_ROWS
) -> None:
    """Do this process's share and what nobody else has done; the first process then writes `output`.

    Raises UserError for what cannot be gone on with, Preempted after SIGTERM.
    """
    work = output.with_name(f"{output.name}.tagging")
    make_folder(work, "--output")
    try:
        with only_one(work, f".lock-{share.process}"):
            _take_part(tagger, data, output, work, share, stop, chunk_rows)
    except (FileNotFoundError, UserError):
        if not output.exists():
            raise
        logger.info("another process has made %s meanwhile", output)
    if output.exists():
        _remove(work)


def _take_part(
    tagger: TextTagger, data: Path, output: Path, work: Path, share: WorkShare, stop: Stop, chunk_rows: int
) -> None:
    sources, manifest = open_sources(data, flag="--data="), read_json(data / MANIFEST)
    stores = {"passages": sources.passages} | ({} if sources.own_text else {"pretraining": sources.pretraining})
    fingerprints = {name: store.fingerprint for name, store in stores.items()}
    record = {"tagger": tagger.identity, "kinds": list(tagger.kinds), "stores": fingerprints, "chunk_rows": chunk_rows}
    _check_record(work, record)
    key = json.dumps(record)
    chunks = [chunk for name, store in stores.items() for chunk in _chunks(work, name, len(store), chunk_rows, key)]
    with StageProgress("tag", sum(len(chunk.rows) for chunk in chunks)) as bar:
        for number in share.order(len(chunks)):
            stop.check(f"finished chunks stay in {work}")
            if not chunks[number].file.is_file():
                if output.exists():  # and the chunks were removed
                    return
                _tag_chunk(tagger, stores[chunks[number].store], sources.wordpiece, chunks[number])
            effort = tagger.windows.effort
            done = sum(len(chunk.rows) for chunk in chunks if chunk.file.is_file())
            bar.update(done, {"pieces": effort.pieces, "padding": effort.padding})
    if share.process == 0:
        manifest["tagged"] = {"spans": tagger.name, "spans_identity": tagger.identity}
        _write(tagger, data, work / "whole", manifest, stores, chunks, stop)
        publish_folder(work / "whole", output)
        logger.info("%s is ready", output)


def _remove(work: Path) -> None:
    """Out of sight first, so that nobody takes half a folder for work that is left."""
    hidden = work.with_name(f".{work.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        os.rename(work, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _check_record(work: Path, record: dict[str, Any]) -> None:
    """Write what decides the content of the chunks, or compare it with what is there."""
    path = work / RECORD
    if not path.is_file():
        write_json_atomic(path, record)
    elif (found := read_json(path)) != record:
        differ = (key for key in record if not isinstance(found, dict) or found.get(key) != record[key])
        raise UserError(f"{work}: was begun with other {next(differ, 'settings')}; remove the folder to begin anew")


def _chunks(work: Path, name: str, rows: int, size: int, key: str) -> Iterator[Chunk]:
    folder = work / name
    folder.mkdir(exist_ok=True)
    for start in range(0, rows, size):
        yield Chunk(name, range(start, min(start + size, rows)), folder / f"{start:09d}.npy", key)


def _tag_chunk(tagger: TextTagger, store: PassageStore, wordpiece: WordPiece, chunk: Chunk) -> None:
    found = tag_passages(tagger, store, chunk.rows, wordpiece)
    if found.unread:
        logger.warning("%d of %d passages were cut within a word and have no spans", found.unread, len(chunk.rows))
    rows = np.repeat(np.arange(chunk.rows.start, chunk.rows.stop, dtype=np.int32), found.counts)
    content = io.BytesIO()
    np.save(content, np.column_stack([rows, found.values]), allow_pickle=False)
    write_atomic(chunk.file, content.getvalue() + _seal(chunk, content.getvalue()))


def _seal(chunk: Chunk, content: bytes) -> bytes:
    """A digest of the content and of what it belongs to."""
    return hashlib.sha256(f"{chunk.key} {chunk.store} {chunk.rows}".encode() + content).digest()


def _read_chunk(chunk: Chunk) -> NDArray[np.int32]:
    """Spans [n, 4]. Raises UserError for a file that is damaged, or of another place."""
    sealed = chunk.file.read_bytes()
    content = sealed[:-SEAL_BYTES]
    if sealed[-SEAL_BYTES:] != _seal(chunk, content):
        raise UserError(f"{chunk.file} is damaged; remove it and repeat the command")
    found: NDArray[np.int32] = np.load(io.BytesIO(content), allow_pickle=False)
    return found


def _write(
    tagger: TextTagger, data: Path, folder: Path, manifest: dict[str, Any], stores: dict[str, PassageStore],
    chunks: list[Chunk], stop: Stop,
) -> None:  # fmt: skip
    """The prepared folder anew, in the place of what a process that was cut off left of it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(data, folder, ignore=shutil.ignore_patterns("passages", "pretraining", MANIFEST, ".lock"))
    wordpiece = WordPiece.load(data / "tokenizer")
    for name, store in stores.items():
        own = [chunk for chunk in chunks if chunk.store == name]
        _write_store(tagger, store, own, folder / name, wordpiece, stop)
        written = PassageStore.open(folder / name)
        manifest[name] = {"rows": len(written), "documents": written.documents, "fingerprint": written.fingerprint}
    write_json_atomic(folder / MANIFEST, manifest)


def _write_store(
    tagger: TextTagger, store: PassageStore, chunks: list[Chunk], folder: Path, wordpiece: WordPiece, stop: Stop
) -> None:
    """The store's rows with the chunks' spans, as one segment."""
    with StoreWriter(folder, wordpiece, store.limit) as writer:
        for chunk in chunks:
            stop.check(f"finished chunks stay in {chunk.file.parent.parent}")
            spans = _read_chunk(chunk)
            bounds = np.searchsorted(spans[:, 0], [*chunk.rows, chunk.rows.stop])
            for start in range(0, len(chunk.rows), WRITTEN_ROWS):
                some = chunk.rows[start : start + WRITTEN_ROWS]
                own = [spans[bounds[row - chunk.rows.start] : bounds[row + 1 - chunk.rows.start], 1:] for row in some]
                writer.write(columns([_passage(tagger, store, row, of) for row, of in zip(some, own, strict=True)]))


def _passage(tagger: TextTagger, store: PassageStore, row: int, spans: NDArray[np.int32]) -> Passage:
    return Passage(
        document_id=store.document_id(row),
        title=store.title(row),
        text=store.text(row),
        title_tokens=store.title_tokens(row),
        body_tokens=store.body_tokens(row),
        sentences=store.sentences(row),
        spans=[(start, end, tagger.kinds[kind]) for start, end, kind in spans.tolist()],
    )
