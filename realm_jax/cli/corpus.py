"""`realm corpus`: add, replace or remove documents of a prepared corpus; a run then answers from the new text.

An edit makes a new version of the passages. Runs that train stay with the version they began with; `realm ask` and
`realm evaluate` read the newest one. With --workdir the changed passages are embedded by the run's passage encoder and
published as a generation that shares all other vectors, without training. An index (`realm index`) gets their vectors
into its exported model instead. The prepared folder changes by renames, after everything that may fail, so a command
that fails does not change it.
"""

import argparse
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax

from realm_jax.cli.argument_types import local_path
from realm_jax.cli.output import print_json
from realm_jax.config import INDEX
from realm_jax.corpora.packer import build_store
from realm_jax.corpora.texts import read_passages
from realm_jax.data import spans
from realm_jax.data.languages import PLAIN
from realm_jax.data.sources import open_sources
from realm_jax.data.staging import PREPARED, is_remote
from realm_jax.data.store import PassageStore, remove_documents
from realm_jax.data.tokenizer_files import open_tokenizer
from realm_jax.errors import UserError
from realm_jax.indexing.build import Rejected
from realm_jax.indexing.exporter import export_record, sample_vectors, to_arrays
from realm_jax.indexing.files import (
    export_step,
    generation_names,
    load_vectors,
    read_manifests,
    remove_generation,
    write_export,
)
from realm_jax.indexing.heartbeat import TRAINER, read_status
from realm_jax.indexing.job import run_builder
from realm_jax.indexing.provider import shared_folder
from realm_jax.indexing.vector_cache import embed_unknown
from realm_jax.mesh import replicated
from realm_jax.models.layers import Params
from realm_jax.retrieval.vector_files import VECTORS, write_vectors
from realm_jax.run import Run
from realm_jax.search_index import refresh_index, update_index
from realm_jax.storage import Damaged, StorageError, exclusive_lock, is_held, make_folder, read_json
from realm_jax.train.exported_model import exported_model
from realm_jax.train.trained_run import open_run_for_inference
from realm_jax.train.workdir import recorded_config, recorded_folder

logger = logging.getLogger(__name__)

COPY = ".edit"  # copy of a prepared folder, inside it, while it is edited

EXAMPLES = """examples:
  realm corpus replace new-articles.jsonl --workdir=runs/wiki      give existing ids new text
  realm corpus add more-articles.jsonl --workdir=runs/wiki
  realm corpus remove article-17 article-18 --workdir=runs/wiki
  realm corpus add more-articles.jsonl --data=data         edit only the corpus; `realm ask` embeds the new passages

A line of a file is {"id": …, "title": …, "text": …}; other formats are read as in `realm prepare`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm corpus`."""
    parser.epilog = EXAMPLES
    parser.add_argument("action", choices=("add", "replace", "remove"), help="edit to make")
    parser.add_argument(
        "subjects",
        nargs="+",
        metavar="FILE|ID",
        help="one file of documents to add or replace, or ids of documents to remove",
    )
    parser.add_argument(
        "--workdir", metavar="DIR", help="run directory whose corpus to edit; the changed passages are embedded for it"
    )
    parser.add_argument("--data", metavar="DIR", help="prepared folder to edit (default: that of the run)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Edit a copy of the corpus, publish the edit for the run, and move the copy's new files into the folder."""
    if args.data is None and args.workdir is None:
        raise UserError(
            "realm corpus: no corpus is named; pass --data=DIR (prepared folder) or --workdir=DIR (run directory)"
        )
    workdir = local_path(args.workdir, "--workdir=") if args.workdir else None
    if workdir is not None:
        # A trainer, which locks the run directory, and its builder use the unedited corpus.
        trainer = read_status(recorded_folder(workdir), TRAINER)
        if is_held(workdir) or (trainer is not None and trainer.needs_index):
            stage = f"at step {trainer.step} of {trainer.stage}" if trainer and trainer.step >= 0 else "training"
            raise UserError(
                f"--workdir={workdir}: the run is {stage} and cannot change its corpus; "
                "edit with --data instead of --workdir (`realm ask` embeds the new passages), or wait until it is done"
            )
    data_path = args.data or recorded_config(Path(args.workdir)).data.path
    if is_remote(data_path):
        raise UserError(f"{data_path}: a corpus in a bucket cannot be edited; edit a local copy, and copy that back")
    data = Path(data_path)
    open_sources(data, flag="--data=" if args.data else "config.data.path=")  # checks the folder
    with exclusive_lock(workdir) if workdir else nullcontext(), exclusive_lock(data, PREPARED):
        if workdir is not None:  # the encoders of the run, which count as those of REALM's last step
            opened, exported = open_run_for_inference(workdir, {"data.path": data_path}), exported_model(workdir)
            host_params = exported.params(opened.model, opened.model.embedder_names)
            encoders = jax.device_put(host_params, replicated(opened.mesh))
            if exported.task == INDEX:
                refresh_index(opened, encoders)
        before = PassageStore.open(data / "passages")
        with _copy_to_edit(data) as copy:
            after, wordless = edit(copy, args.action, args.subjects)
            record: dict[str, Any] = {"data": data_path, "passages_before": len(before), "passages": len(after)}
            record |= {"version": after.fingerprint, "skipped": wordless}
            if workdir is not None:
                edited = open_run_for_inference(workdir, {"data.path": str(copy)})
                if exported.task == INDEX:  # no run was trained on the corpus as it was, so no version has to stay
                    record["embedded"] = update_index(opened, edited, encoders, partial(_publish_copy, copy, data))
                else:
                    record |= publish(edited, edited.config.realm.steps, encoders)
    if args.json:
        print_json(record)
        return
    print(f"{data_path}: {len(before):,} -> {len(after):,} passages, version {after.fingerprint[:12]}")
    if wordless:
        print(f"skipped {len(wordless):,} without words to store, such as {wordless[0]!r}")
    if "embedded" in record:
        print(f"embedded {record['embedded']:,} of {len(after):,} passages")
    if "generation" in record:
        print(f"generation {record['generation']}: {record['stored_vectors']:,} stored vectors")
    if "rewritten" in record:
        print(f"rewritten: {', '.join(record['rewritten'])}")


@contextmanager
def _copy_to_edit(data: Path) -> Iterator[Path]:
    """Yield a copy of a prepared folder, made of links; move its new files into the folder if the block succeeds.

    The block writes files under other names and renames them, so it never writes through a link. A UserError of the
    block then names the folder, not the copy.
    """
    copy = data / COPY
    shutil.rmtree(copy, ignore_errors=True)  # of a command that was killed
    try:
        make_folder(copy, "--data")
        shutil.copytree(
            data.resolve(), copy, ignore=shutil.ignore_patterns(COPY), copy_function=os.symlink, dirs_exist_ok=True
        )
        yield copy
        _publish_copy(copy, data)
    except UserError as error:
        error.args = (str(error).replace(str(copy), str(data)),)
        raise
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _publish_copy(copy: Path, data: Path) -> None:
    """Move the new files of a copy into its prepared folder. If it has no new files, nothing changes.

    Args:
        copy: copy of the prepared folder.
        data: the prepared folder.
    """
    for path in sorted(copy.rglob("*")):
        if path.is_dir() and not (target := data / path.relative_to(copy)).exists():
            path.rename(target)
    new_files = [path for path in copy.rglob("*") if path.is_file() and not path.is_symlink()]
    # The files of `passages` last, because they make the version the newest.
    for path in sorted(new_files, key=lambda path: path.parent == copy / "passages"):
        path.replace(data / path.relative_to(copy))


def edit(data: Path, action: str, subjects: list[str]) -> tuple[PassageStore, list[str]]:
    """Write a new version of the passages of a prepared folder.

    Args:
        data: the prepared folder.
        action: "add", "replace" or "remove".
        subjects: one file of documents to add or replace, or ids of documents to remove.

    Returns:
        The new version, and the ids of documents that were not added, because they have no words.

    Raises:
        UserError: documents exist that should not, or the reverse; no document has words, or one to replace has none;
            or the folder's span finder is not here.
    """
    folder = data / "passages"
    if action == "remove":
        return remove_documents(folder, subjects), []
    if len(subjects) != 1:
        raise UserError(f"realm corpus {action}: takes one file; merge several files into one")
    file = subjects[0]
    articles = list(read_passages(file))
    if not articles:
        raise UserError(f"{file}: has no passages; name another file")
    store, manifest = PassageStore.open(folder), read_json(data / PREPARED)
    known = [article.id for article in articles if store.rows_of(article.id)]
    missing = sorted({article.id for article in articles} - {*known})
    if action == "add" and known:
        raise UserError(f"{file}: document {known[0]!r} is in the corpus already; use `realm corpus replace`")
    if action == "replace" and missing:
        raise UserError(f"{file}: document {missing[0]!r} is not in the corpus; use `realm corpus add`")
    if "tagged" in manifest:
        raise UserError(f"{data}: was prepared with a tagger that this version cannot run; prepare the folder again")
    settings = manifest["inputs"]["settings"]
    finder = settings["spans"]
    if spans.finder(finder).identity != settings.get("spans_identity"):
        raise UserError(
            f"{data}: {finder} is not the span finder that prepared the folder; restore it, or prepare the folder again"
        )
    language = manifest.get("language", PLAIN)
    tokenizer = open_tokenizer(data / "tokenizer")
    try:
        summary = build_store(articles, tokenizer, folder, store.limit, finder, known, language)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return PassageStore.open(folder), summary.wordless


def publish(run: Run, step: int, encoders: Params) -> dict[str, Any]:
    """Publish a generation of the newest version of the corpus, embedding only passages that have no vector yet.

    Args:
        run: the run over that version.
        step: export step that the encoders count as.
        encoders: parameters of the run's final encoders, on its devices.

    Returns:
        {"generation", "stored_vectors"}; for an adaptation also "rewritten", the names of its vector files.

    Raises:
        UserError: storage fails, or the generation is damaged or fails its checks.
    """
    folder, store = shared_folder(run), run.sources.passages
    try:
        queries = sample_vectors(run, encoders)
        export = write_export(folder, export_record(run, step), to_arrays(encoders), queries)
        newest = run_builder(run, folder).build(export, embed_unknown(run, encoders), queries)
        # Generations for versions between the first, which runs train with, and the newest are outdated.
        same_step = [name for name in generation_names(folder) if export_step(name) == newest.step]
        for manifest in read_manifests(folder, same_step):
            if manifest.generation != newest.generation and manifest.corpus in store.versions[1:]:
                remove_generation(folder, manifest.generation)
        record: dict[str, Any] = {"generation": newest.generation, "stored_vectors": newest.rows}
        if (run.workdir / VECTORS).is_file():
            vectors = load_vectors(folder, newest)[store.visible_rows]
            record["rewritten"] = write_vectors(run.workdir, store, vectors, overwrite=True)
        return record
    except (StorageError, Damaged, Rejected) as error:
        raise UserError(f"{error}; the corpus is unchanged, so run the command again") from None
