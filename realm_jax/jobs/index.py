"""`realm index`: look after the generations of an index: list, verify, remove, search by hand.

What a generation is: `realm_jax/index/generations.py`. Nothing here needs the trainer or the builder to run.
"""

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from realm_jax.errors import UserError
from realm_jax.index.builder import rejection
from realm_jax.index.exact import search
from realm_jax.index.generations import (
    InvalidIndex,
    Manifest,
    export_of,
    export_step,
    generation_names,
    load_vectors,
    read_manifest,
    read_towers,
    remove_generation,
)  # fmt: skip
from realm_jax.index.status import TRAINER, read_status
from realm_jax.jobs.answering import add_run_arguments, check_question, open_run_to_ask
from realm_jax.jobs.opening import recorded_folder
from realm_jax.run import Run
from realm_jax.storage import Damaged, Folder
from realm_jax.training.exporter import to_params

EXAMPLES = """examples:
  realm index ls --workdir=runs/wiki
  realm index verify --workdir=runs/wiki                  every file of every generation against its checksum
  realm index rm 1500-3f09a2c1 --workdir=runs/wiki
  realm index search "the bridge over the river" --workdir=runs/wiki --top=5
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm index`."""
    parser.epilog = EXAMPLES
    parser.add_argument("action", choices=("ls", "verify", "rm", "search"), help="what to do")
    parser.add_argument("what", nargs="*", metavar="NAME|TEXT", help="rm, verify: generations; search: a text")
    add_run_arguments(parser)
    parser.add_argument("--generation", metavar="NAME", help="search: in this one (default: the newest)")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="search: passages to show (default: 5)")
    parser.add_argument("--force", action="store_true", help="rm: also a generation that a run needs to go on")
    parser.add_argument("--json", action="store_true", help="ls, search: one JSON object a line")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when `verify` finds damage."""
    folder = recorded_folder(Path(args.workdir))
    if args.action == "ls":
        return _list(folder, args.json)
    if args.action == "verify":
        return _verify(folder, args.what)
    if args.action == "rm":
        return _remove(folder, args.what, args.force)
    return _search(folder, args)


def describe(folder: Folder, name: str) -> dict[str, Any]:
    """What there is to know of a generation without reading its vectors."""
    trainer = read_status(folder, TRAINER)
    found: dict[str, Any] = {"generation": name, "step": export_step(name), "state": "unfinished"}
    try:
        manifest = read_manifest(folder, name)
    except InvalidIndex as fault:
        return found | {"state": "damaged", "reason": str(fault)}
    reason = rejection(folder, name)
    if reason is not None:
        found |= {"state": "refused", "reason": reason.get("reason", "")}
    elif manifest is not None:
        found["state"] = "published"
    if manifest is not None:
        found |= {
            "rows": manifest.rows,
            "bytes": sum(file.bytes for file in manifest.files),
            "age": None if trainer is None else max(trainer.step - manifest.step, 0),
            "recall": manifest.recall,
            "seconds": sum(manifest.seconds.values()),
        }
    found["in_use"] = trainer is not None and trainer.index == export_step(name)
    found["pinned"] = trainer is not None and export_step(name) in trainer.pins
    return found


def _list(folder: Folder, as_json: bool) -> int:
    found = [describe(folder, name) for name in generation_names(folder)]
    if as_json:
        for entry in found:
            print(json.dumps(entry))
        return 0
    table = Table(
        "generation", "state", "passages", "MB", "age, steps", "recall", "needed by", box=None, pad_edge=False
    )
    for entry in found:
        recall = ", ".join(f"{name[7:]}: {value:.3f}" for name, value in entry.get("recall", {}).items()) or "exact"
        needed = ", ".join(text for key, text in (("in_use", "trainer"), ("pinned", "checkpoints")) if entry.get(key))
        table.add_row(
            entry["generation"],
            entry["state"],
            f"{entry['rows']:,}" if "rows" in entry else "–",
            f"{entry['bytes'] / 1e6:,.1f}" if "bytes" in entry else "–",
            f"{entry['age']:,}" if entry.get("age") is not None else "–",
            recall if entry["state"] == "published" else "–",
            needed or "nobody",
        )
    Console(highlight=False).print(table if found else f"no generations in {folder.path('index')}")
    return 0


def _verify(folder: Folder, names: list[str]) -> int:
    """Every listed file against its size and checksum, and every vector for being one."""
    damaged = 0
    for name in names or generation_names(folder):
        try:
            manifest = _manifest(folder, name) if names else read_manifest(folder, name)
            if manifest is None:
                print(f"{name}: unfinished")
                continue
            began = time.monotonic()
            load_vectors(folder, manifest)
            for file in manifest.files[len(manifest.chunks) :]:
                folder.read_verified(file)
            print(f"{name}: sound ({manifest.rows:,} vectors, {time.monotonic() - began:.1f} s)")
        except (InvalidIndex, Damaged) as fault:
            damaged += 1
            print(f"{name}: DAMAGED: {fault}")
    return 1 if damaged else 0


def _remove(folder: Folder, names: list[str], force: bool) -> int:
    if not names:
        raise UserError("realm index rm: name the generations to remove; `realm index ls` lists them")
    known = generation_names(folder)
    for name in names:
        if name not in known:
            raise UserError(f"{folder.path('index')}: there is no generation {name}; `realm index ls` lists them")
        entry = describe(folder, name)
        if not force and (entry.get("in_use") or entry.get("pinned")):
            raise UserError(f"generation {name} is needed by the run to go on; remove it all the same with --force")
    for name in names:
        remove_generation(folder, name)
        print(f"{name}: removed")
    return 0


def _search(folder: Folder, args: argparse.Namespace) -> int:
    """The passages nearest to a text, by the query tower that was exported with the generation."""
    if args.top < 1:
        raise UserError(f"--top={args.top}: must be at least 1")
    opened = open_run_to_ask(Path(args.workdir), args.data)
    text = check_question(opened, " ".join(args.what))
    corpus = opened.sources.passages.fingerprint
    manifest = _manifest(folder, args.generation) if args.generation else _newest(folder, corpus)
    for entry in nearest(opened, folder, manifest, text, args.top):
        if args.json:
            print(json.dumps(entry, ensure_ascii=False))
        else:
            print(f"{entry['score']:8.2f}  {entry['id']}  {entry['title']}: {' '.join(entry['text'].split())[:100]}")
    return 0


def nearest(run: Run, folder: Folder, manifest: Manifest, text: str, top: int) -> list[dict[str, Any]]:
    """The `top` passages by inner product: {"score", "id", "title", "text"}. Raises UserError."""
    export = export_of(folder, manifest)
    if export is None:
        raise UserError(
            f"{folder.path('exports')}: the export of generation {manifest.generation} is gone; name another"
        )
    if manifest.corpus != run.sources.passages.fingerprint:
        raise UserError(f"generation {manifest.generation} is of another corpus than {run.config.data.path}")
    arrays, _ = read_towers(folder, export)
    index = run.index(run.sources.passages.kept(load_vectors(folder, manifest)))
    wordpiece, length = run.sources.wordpiece, run.config.data.query_length
    ids = [wordpiece.cls_id, *wordpiece.encode(text).ids, wordpiece.sep_id]
    query = np.full((1, length), wordpiece.pad_id, np.int32)
    query[0, : len(ids)] = ids
    vector = run.model.embed_queries(to_params(arrays), jnp.asarray(query), jnp.asarray([len(ids)]))
    count = min(top, run.setting.rows)
    found = search(run.mesh, vector, index.vectors, run.setting.rows, count, run.setting.search_block)
    store = run.sources.passages
    return [
        {"score": float(score), "id": store.document_id(row), "title": store.title(row), "text": store.text(row)}
        for score, row in zip(np.asarray(found.scores)[0], np.asarray(found.rows)[0].tolist(), strict=True)
    ]


def _manifest(folder: Folder, name: str) -> Manifest:
    manifest = read_manifest(folder, name)
    if manifest is None:
        raise UserError(f"{folder.path('index')}: there is no generation {name}; `realm index ls` lists them")
    return manifest


def _newest(folder: Folder, corpus: str) -> Manifest:
    """The newest generation of a version of the corpus."""
    for name in reversed(generation_names(folder)):
        with contextlib.suppress(InvalidIndex):
            manifest = read_manifest(folder, name)
            if manifest is not None and manifest.corpus == corpus and rejection(folder, name) is None:
                return manifest
    raise UserError(
        f"{folder.path('index')}: no generation of the corpus as it is now; train with refresh.mode=async, or publish "
        "one with `realm corpus`"
    )
