"""`realm tag`: copy a prepared folder, replacing its salient spans by those of a trained tagger.

    OUTPUT.tagging/TAGS.json                    what is tagged, and with what
    OUTPUT.tagging/<store>/segment-00000/       a segment with other spans
    OUTPUT.tagging/<store>/segment-00000.json   what STORE.json will say of it; put last
    OUTPUT.tagging/whole/                       what becomes OUTPUT

A segment appears whole, so what is there is done: run the same command again to resume, and any number of
processes, each on its own devices, share the segments like builders of an index share their chunks. When all are there,
the first process writes OUTPUT and removes what led to it; a process still at work then sees OUTPUT and exits
successfully. OUTPUT has the newest version of the passages alone. Read `tag` next.
"""

import argparse
import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from realm_jax import processes
from realm_jax.cache import cache_programs
from realm_jax.console import StageProgress
from realm_jax.data.segments import Segment, SegmentWriter
from realm_jax.data.sources import open_sources
from realm_jax.data.staging import PREPARED, is_remote, staged
from realm_jax.data.store import MANIFEST as STORE
from realm_jax.data.store import PassageStore, new_version, segment_folder
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.errors import UserError
from realm_jax.eval.tagging import TextTagger, tag_passages
from realm_jax.host import Stop
from realm_jax.processes import WorkShare
from realm_jax.storage import exclusive_lock, make_folder, publish_folder, read_json, write_json_atomic
from realm_jax.train.tagger import open_tagger

logger = logging.getLogger(__name__)

RECORD = "TAGS.json"
EXAMPLES = """examples:
  realm tag --workdir=runs/tagger --data=data --output=data-tagged
  realm tag --workdir=runs/tagger --data=data --output=data-tagged --process=1 --processes=4     the second of four

Run the same command again to resume.
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
    share = processes.work_share(args)
    if args.batch_size is not None and args.batch_size < 1:
        raise UserError(f"--batch-size={args.batch_size}: must be positive")
    data, output = folders(args.data, args.output)
    cache_programs()
    tagger = open_tagger(Path(args.workdir), jax.local_devices(), args.batch_size)
    with Stop() as stop:
        tag(tagger, data, output, share, stop)


def folders(data: str, output: str) -> tuple[Path, Path]:
    """Where to read and what to make, on this machine. Raises UserError if nothing can be made."""
    if "://" in output:
        raise UserError(f"--output={output}: it is written to a disk; name a folder, and copy it to the bucket")
    source, final = staged(data) if is_remote(data) else Path(data), Path(output)
    if final.exists():
        raise UserError(f"--output={output} exists; choose another folder, or remove it")
    if final.resolve().is_relative_to(source.resolve()):
        raise UserError(f"--output={output} lies inside --data={data}; choose a folder beside it")
    return source, final


class SegmentWork(NamedTuple):
    """A segment of a store, and the folder of the same segment with other spans. number: of the segment."""

    store: PassageStore
    number: int
    folder: Path

    @property
    def record(self) -> Path:
        """The file with what STORE.json will say of it."""
        return self.folder.with_suffix(".json")

    @property
    def is_done(self) -> bool:
        return self.folder.is_dir() and self.record.is_file()

    @property
    def rows(self) -> range:
        """The rows of the store's version that lie in it."""
        return self.store.rows_in(self.number)[0]


def tag(tagger: TextTagger, data: Path, output: Path, share: WorkShare, stop: Stop) -> None:
    """Do this process's share and whatever others have not done; the first process then writes `output`.

    Raises UserError if the work cannot be resumed, Preempted after SIGTERM.
    """
    work = output.with_name(f"{output.name}.tagging")
    make_folder(work, "--output")
    try:
        with exclusive_lock(work, f".lock-{share.process}"):
            _take_part(tagger, data, output, work, share, stop)
    except (FileNotFoundError, UserError):
        if not output.exists():
            raise
        logger.info("another process has made %s meanwhile", output)
    if output.exists():
        _remove(work)


def _take_part(tagger: TextTagger, data: Path, output: Path, work: Path, share: WorkShare, stop: Stop) -> None:
    sources = open_sources(data, flag="--data=")
    stores = {"passages": sources.passages} | (
        {} if sources.pretraining_is_corpus else {"pretraining": sources.pretraining}
    )
    fingerprints = {name: store.fingerprint for name, store in stores.items()}
    _check_record(work, {"tagger": tagger.identity, "kinds": list(tagger.kinds), "stores": fingerprints})
    units = {name: _units(store, work / name) for name, store in stores.items()}
    every = [unit for own in units.values() for unit in own]

    def check() -> None:
        stop.check(f"finished segments stay in {work}")

    with StageProgress("tag", sum(len(unit.rows) for unit in every)) as bar:
        for number in share.order(len(every)):
            check()
            if not every[number].is_done:
                if output.exists():  # and the segments were removed
                    return
                _tag_unit(tagger, every[number], sources.tokenizer, share.process, check)
            effort = tagger.windows.effort
            done = sum(len(unit.rows) for unit in every if unit.is_done)
            bar.update(done, {"pieces": effort.pieces, "padding": effort.padding})
    if share.process == 0:
        _write(tagger, data, work / "whole", units, check)
        publish_folder(work / "whole", output)
        logger.info("%s is ready", output)


def _remove(work: Path) -> None:
    """Renamed first, so that no process mistakes a half-removed folder for unfinished work."""
    hidden = work.with_name(f".{work.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        os.rename(work, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _check_record(work: Path, record: dict[str, Any]) -> None:
    """Write what decides the spans, or compare it with what is there."""
    path = work / RECORD
    if not path.is_file():
        write_json_atomic(path, record)
    elif (found := read_json(path)) != record:
        differ = (key for key in record if not isinstance(found, dict) or found.get(key) != record[key])
        raise UserError(f"{work}: was started with other {next(differ, 'settings')}; remove the folder to begin anew")


def _units(store: PassageStore, folder: Path) -> list[SegmentWork]:
    folder.mkdir(exist_ok=True)
    return [SegmentWork(store, number, segment_folder(folder, number)) for number in range(len(store.segments))]


def _tag_unit(
    tagger: TextTagger, unit: SegmentWork, tokenizer: Tokenizer, process: int, check: Callable[[], None]
) -> None:
    """Write a segment with the tagger's spans; rows that the version leaves out have none."""
    segment, (rows, places) = unit.store.segments[unit.number], unit.store.rows_in(unit.number)
    found = tag_passages(tagger, unit.store, rows, tokenizer, check=check)
    if found.unread:
        logger.warning("%d of %d passages were cut within a word and have no spans", found.unread, len(rows))
    counts = np.zeros(segment.rows, np.int64)
    counts[places] = found.counts
    scratch = unit.folder.parent / f".{process}" / unit.folder.name
    with SegmentWriter(scratch, tokenizer.fingerprint, tokenizer.dtype) as writer:
        writer.copy(segment, found.values, counts, found.kinds)
    if not unit.is_done:  # by another process meanwhile
        shutil.rmtree(unit.folder, ignore_errors=True)  # of a process that ended before it wrote the record
        os.rename(scratch, unit.folder)
        write_json_atomic(unit.record, writer.entry)


def _write(
    tagger: TextTagger, data: Path, folder: Path, units: dict[str, list[SegmentWork]], check: Callable[[], None]
) -> None:
    """The prepared folder anew, in the place of what a process that was cut off left of it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(data, folder, ignore=shutil.ignore_patterns("passages", "pretraining", PREPARED, ".lock"))
    manifest = read_json(data / PREPARED)
    manifest["tagged"] = {"spans": tagger.name, "spans_identity": tagger.identity}
    for name, own in units.items():
        written = _write_store(own, folder / name, check)
        manifest[name] = {"rows": len(written), "documents": written.documents, "fingerprint": written.fingerprint}
    write_json_atomic(folder / PREPARED, manifest)


def _write_store(units: list[SegmentWork], folder: Path, check: Callable[[], None]) -> PassageStore:
    """The store of the tagged segments, which are the same files in both folders. Raises UserError for damage."""
    store, entries = units[0].store, [read_json(unit.record) for unit in units]
    for unit, entry in zip(units, entries, strict=True):
        check()
        try:
            Segment(unit.folder, entry).verify()
        except (UserError, KeyError, TypeError):
            raise UserError(f"{unit.folder} is damaged; remove it and run the command again") from None
        shutil.copytree(unit.folder, folder / unit.folder.name, copy_function=os.link)
    settings = {"limit": store.limit, "tokenizer": store.tokenizer_fingerprint}
    write_json_atomic(folder / STORE, new_version(settings, entries, store.removed))
    return PassageStore.open(folder)
