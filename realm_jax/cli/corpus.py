"""`realm corpus`: add, replace or remove documents of a prepared corpus; a trained run then answers from the new text.

An edit makes a new version of the passages. Runs that train stay with the version they began with; `realm ask` and
`realm evaluate` read the newest one. With --workdir the passages that changed are embedded with the run's towers and
published as a generation that shares everything else, without any training.
"""

import argparse
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from realm_jax.cli.build_index import run_builder
from realm_jax.cli.output import print_json
from realm_jax.corpora.build import build_store
from realm_jax.corpora.reader_tokens import write_reader_tokens
from realm_jax.corpora.texts import read_passages
from realm_jax.data import spans
from realm_jax.data.sources import READER, READER_MANIFEST, open_sources
from realm_jax.data.staging import PREPARED, is_remote
from realm_jax.data.store import PassageStore, remove_documents
from realm_jax.data.tokenizer_files import open_tokenizer
from realm_jax.errors import UserError
from realm_jax.refresh.builder import Rejected
from realm_jax.refresh.exporter import export_record, sample_vectors, to_arrays
from realm_jax.refresh.generations import (
    Manifest,
    export_step,
    generation_names,
    load_vectors,
    manifests,
    remove_generation,
    write_export,
)
from realm_jax.refresh.status import TRAINER, read_status
from realm_jax.retrieval.vector_files import VECTORS, write_vectors
from realm_jax.run import Run
from realm_jax.storage import Damaged, Folder, StorageError, exclusive_lock, read_json
from realm_jax.train.index_source import embed_unknown, shared_folder
from realm_jax.train.trained_run import open_run_for_inference, restore_towers
from realm_jax.train.workdir import recorded_config, recorded_folder

logger = logging.getLogger(__name__)

EXAMPLES = """examples:
  realm corpus replace new-articles.jsonl --workdir=runs/wiki      ids that are there already get the new text
  realm corpus add more-articles.jsonl --workdir=runs/wiki
  realm corpus remove article-17 article-18 --workdir=runs/wiki
  realm corpus add more-articles.jsonl --data=data                 the corpus alone; runs embed it when they are asked

A line of the files is {"id": …, "title": …, "text": …}; other files are read as by `realm prepare`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm corpus`."""
    parser.epilog = EXAMPLES
    parser.add_argument("action", choices=("add", "replace", "remove"), help="what to do")
    parser.add_argument("what", nargs="+", metavar="FILE|ID", help="add, replace: one file; remove: document ids")
    parser.add_argument("--workdir", metavar="DIR", help="a trained run over the corpus; publish a generation for it")
    parser.add_argument("--data", metavar="DIR", help="the prepared folder (default: the run's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Edit, then embed what changed."""
    if args.data is None and args.workdir is None:
        raise UserError("realm corpus: name the prepared folder with --data, or a run over it with --workdir")
    if args.workdir:
        _check_not_training(Path(args.workdir))
    place = args.data or recorded_config(Path(args.workdir)).data.path
    if is_remote(place):
        raise UserError(f"{place}: a corpus is edited on a disk; edit it there, and copy the folder to its bucket")
    data = Path(place)
    open_sources(data, flag="--data=" if args.data else "config.data.path=")  # says what is wrong with it
    with exclusive_lock(data):
        before = PassageStore.open(data / "passages")
        after = edit(data, args.action, args.what)
        if (data / READER / READER_MANIFEST).is_file():
            write_reader_tokens(data, open_tokenizer(data / READER / "tokenizer"), workers=1)
    record: dict[str, Any] = {"data": place, "passages_before": len(before), "passages": len(after)}
    record |= {"version": after.fingerprint}
    if args.workdir:
        opened = open_run_for_inference(Path(args.workdir), {"data.path": place})
        manifest = publish(opened)
        record |= {"generation": manifest.generation, "stored_vectors": manifest.rows}
        if (opened.workdir / VECTORS).is_file():  # of an adaptation
            record["written_anew"] = _write_vectors_anew(opened, manifest)
    if args.json:
        print_json(record)
    else:
        show(record)


def show(record: dict[str, Any]) -> None:
    """What an edit made, for people."""
    sizes = f"{record['passages_before']:,} -> {record['passages']:,} passages"
    print(f"{record['data']}: {sizes}, version {record['version'][:12]}")
    if "generation" in record:
        print(f"generation {record['generation']}: {record['stored_vectors']:,} stored vectors")
    if "written_anew" in record:
        print(f"written anew: {', '.join(record['written_anew'])}")


def _check_not_training(workdir: Path) -> None:
    """Raise UserError while a trainer and its builder are using the unedited corpus."""
    trainer = read_status(recorded_folder(workdir), TRAINER)
    if trainer is not None and trainer.needs_index:
        raise UserError(
            f"--workdir={workdir}: the run is at step {trainer.step} of {trainer.stage} and stays with its corpus; "
            "edit with --data alone (`realm ask` embeds what changed), or wait until the run is done"
        )


def edit(data: Path, action: str, what: list[str]) -> PassageStore:
    """Make a new version of the passages of a prepared folder."""
    folder = data / "passages"
    if action == "remove":
        return remove_documents(folder, what)
    if len(what) != 1:
        raise UserError(f"realm corpus {action}: name one file; put the documents of several into one")
    articles = list(read_passages(what[0]))
    if not articles:
        raise UserError(f"{what[0]} holds no passages")
    replaced = _documents_to_replace(PassageStore.open(folder), [article.id for article in articles], action, what[0])
    store, manifest = PassageStore.open(folder), read_json(data / PREPARED)
    made = manifest.get("tagged") or manifest["inputs"]["settings"]
    if spans.identity(spans.finder(made["spans"])) != made.get("spans_identity"):
        raise UserError(
            f"{data}: {made['spans']} is not the span finder used there; restore it, or prepare the folder again"
        )
    build_store(articles, open_tokenizer(data / "tokenizer"), folder, store.limit, made["spans"], replaced)
    return PassageStore.open(folder)


def _documents_to_replace(store: PassageStore, documents: list[str], action: str, file: str) -> Collection[str]:
    """The documents that are there already: all of them for `replace`, none for `add`."""
    known = [document for document in documents if store.stored_rows_of(document)]
    if action == "add" and known:
        raise UserError(f"{file}: document {known[0]!r} is in the corpus already; use `realm corpus replace`")
    missing = sorted({*documents} - {*known})
    if action == "replace" and missing:
        raise UserError(f"{file}: document {missing[0]!r} is not in the corpus; use `realm corpus add`")
    return known


def _remove_outdated_generations(folder: Folder, newest: Manifest, versions: list[str]) -> None:
    """Remove generations published for versions between the first, which runs train with, and the newest."""
    same_step = [name for name in generation_names(folder) if export_step(name) == newest.step]
    for manifest in manifests(folder, same_step):
        if manifest.generation != newest.generation and manifest.corpus in versions[1:]:
            remove_generation(folder, manifest.generation)


def publish(run: Run) -> Manifest:
    """A generation of the newest version of the corpus by the run's final towers; embeds only what is not there yet."""
    folder = shared_folder(run)
    step, towers = restore_towers(run)
    try:
        queries = sample_vectors(run, towers)
        export = write_export(folder, export_record(run, step), to_arrays(towers), queries)
        manifest = run_builder(run, folder).build(export, embed_unknown(run, towers), queries)
        _remove_outdated_generations(folder, manifest, run.sources.passages.versions)
        return manifest
    except (StorageError, Damaged, Rejected) as fault:
        raise UserError(f"{fault}; the corpus is edited, but nothing is published for the run") from None


def _write_vectors_anew(run: Run, manifest: Manifest) -> list[str]:
    """The files of the passages' vectors as the corpus is now; returns their names."""
    store = run.sources.passages
    try:
        vectors = store.kept(load_vectors(shared_folder(run), manifest))
    except Damaged as fault:
        raise UserError(f"{fault}; the corpus is edited, but {run.workdir / VECTORS} is of the corpus before") from None
    return write_vectors(run.workdir, store, vectors, anew=True)
