"""Make documents searchable with a public sentence encoder, without training: `realm index`.

    RUN/data/          the dataset directory
    RUN/model/         exported model: the encoders as they are, and the vectors of all passages and, if you want
                       them, of their tokens
    RUN/words/         BM25's index
    RUN/index.json     written last: {"settings", "command", "passages", "documents", "skipped", "seconds"}

Read `index` from top to bottom. `write_index` also serves `realm adapt`, and `update_index` serves `realm corpus`. The
result is a run without tasks, whose exported model names the task `config.INDEX`. Read next: `adaptation/run.py`.
"""

import dataclasses
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from realm_jax.assemble import make_run
from realm_jax.cache import cache_programs
from realm_jax.config import INDEX, flatten, load_config
from realm_jax.corpora.preparation import Options, PreparedOtherwise
from realm_jax.corpora.summary import prepare_and_print
from realm_jax.corpora.texts import NEWS, open_texts
from realm_jax.data.sources import Sources, open_sources
from realm_jax.data.staging import PREPARED
from realm_jax.data.store import PassageStore
from realm_jax.errors import UserError
from realm_jax.host import Stop
from realm_jax.indexing.token_file import TokenFile, can_stay, remove_unfinished
from realm_jax.indexing.vector_cache import embed_unknown, embed_with_cache, encoder_digest, row_keys
from realm_jax.models.architectures.table import read_architecture
from realm_jax.models.folders import resolve_model_path
from realm_jax.models.layers import Params
from realm_jax.models.sentence_transformers import sentence_model, transformer_folder
from realm_jax.models.weights import SETTINGS
from realm_jax.retrieval.analyzers import available
from realm_jax.retrieval.bm25 import is_saved
from realm_jax.run import Run
from realm_jax.storage import exclusive_lock, make_folder, read_json, sha256_hex, write_json_atomic
from realm_jax.train.exported_model import MODEL, find_exported_model, replace_vectors, write_exported_model
from realm_jax.train.init_from import check_sources, fill_from_pretrained
from realm_jax.train.recipe import starting_params
from realm_jax.train.results import save_bm25_index
from realm_jax.train.workdir import START, absolute_path, begins_with_reader, check_workdir, recorded_config

logger = logging.getLogger(__name__)

RECORD, DATA = "index.json", "data"  # in the run directory
CONFIG = "adapt"  # its keys are those of `realm adapt`, which may continue from the index
_COUNTS = ("passages", "documents", "skipped", "token_bytes")  # fields of the result that index.json has
_AS_BASE = "the vectors come from --from"
DECIDED = {  # key of the config that the request sets → why
    "data.path": "the folder is prepared from DOCUMENTS",
    "init_from": "the encoder comes from --from",
    "model.shared_tower": "two encoders are exported",
    "encoder.pooling": _AS_BASE,
    "encoder.projection": _AS_BASE,
    "encoder.normalization": _AS_BASE,
}


@dataclass(frozen=True)
class IndexRequest:
    """A request to make documents searchable.

    Attributes:
        documents: file, pattern or folder of the documents.
        model: encoder, a model of sentence-transformers: a folder, hf:NAME or py:NAME.
        workdir: run directory, created or resumed.
        config: from `load_config(CONFIG)`; tasks, `data.path` and `init_from` are set later.
        config_arguments: arguments that made the config; others are rejected later.
        language: language of the documents, one of `languages.CHOICES`; '' to detect it.
        store_tokens: store token vectors of all passages, for token rerank. You may add them to a finished index.
        command: the command line or Python call of the request.
    """

    documents: str
    model: str
    workdir: Path
    config: ConfigDict
    config_arguments: tuple[str, ...] = ()
    language: str = ""
    store_tokens: bool = False
    command: str = ""

    def settings(self) -> dict[str, Any]:
        """Return the settings that may not change, as index.json has them: with absolute paths."""
        documents, model = absolute_source(self.documents), absolute_path(self.model)
        config = [*self.config_arguments]
        return {"documents": documents, "from": model, "language": self.language, "config": config}


@dataclass(frozen=True)
class IndexResult:
    """A finished index.

    Attributes:
        passages: number of passages.
        documents: number of documents.
        skipped: reason → number of documents that were left out.
        token_bytes: bytes of the stored token vectors of a passage, 0 for none.
        seconds: duration of the command that finished it.
        is_new: false if it was finished before.
    """

    passages: int
    documents: int
    skipped: Mapping[str, int]
    token_bytes: int
    seconds: float
    is_new: bool


def index(request: IndexRequest) -> IndexResult:
    """Prepare the documents, embed their passages, and export encoders and vectors. Finished stages are skipped.

    Raises:
        UserError: before anything is written, if the request is invalid; or no document can be read.
        Preempted: after SIGTERM.
    """
    began, workdir = time.monotonic(), request.workdir

    # --- Check the request, before anything is read or written --------------------------------------------------------
    finished = read_index(workdir)
    has_config = (workdir / "config.json").is_file()
    exported = find_exported_model(workdir / MODEL)
    is_done = finished is not None and exported is not None
    if finished is not None:
        check_settings(workdir, finished["settings"], request.settings())
    if has_config and not is_done and not has_empty_recipe(workdir):
        raise UserError(f"--output={workdir}: is the directory of another run; choose another one")
    if not has_config and (workdir / MODEL).exists():
        raise UserError(f"--output={workdir}: contains a {MODEL} of another run; choose another folder")
    check_model(request.model)
    check_decided(request.config, DECIDED | {"tasks": "an index trains nothing"}, "leave it out")
    check_outside(workdir, request.documents, "the folder of the documents")
    check_outside(workdir, str(resolve_model_path(request.model, "--from")), "the folder of the encoder")
    has_documents = finished is not None and (workdir / DATA / PREPARED).is_file()
    if has_documents:
        _check_unchanged(request, read_json(workdir / DATA / PREPARED))
    if finished is not None and is_done and has_documents:
        sources = open_sources(workdir / DATA, questions=False)  # `realm corpus` may have edited them
        is_adapted = not has_empty_recipe(workdir)
        stores_tokens = exported is not None and exported.stores_tokens
        if is_adapted and request.store_tokens and not stores_tokens:
            raise UserError(f"--store-tokens: {workdir} was adapted; leave it out, or index into another --output")
        if is_adapted or _is_current(workdir, sources, request.store_tokens):
            counts = {key: finished[key] for key in (*_COUNTS, "seconds")}
            counts |= {"passages": len(sources.passages), "documents": sources.passages.documents}
            counts |= {} if stores_tokens else {"token_bytes": 0}
            return IndexResult(is_new=False, **counts)

    # --- Prepare the documents ----------------------------------------------------------------------------------------
    limit, language = request.config.data.document_length, request.language
    try:
        if not has_documents:  # else the folder may have edits, and questions of `realm adapt`
            prepare_documents(request.documents, request.model, workdir / DATA, limit, language=language)
    except PreparedOtherwise:  # until the index is finished you can add documents
        if not has_config:  # without a config.json the folder may be yours
            raise
        with exclusive_lock(workdir):
            for name in ("config.json", "data.json", START):
                (workdir / name).unlink(missing_ok=True)
            shutil.rmtree(workdir / DATA)
            shutil.rmtree(workdir / MODEL, ignore_errors=True)
        prepare_documents(request.documents, request.model, workdir / DATA, limit, language=language)

    # --- Open the run: the config of `realm adapt`, with an empty recipe ----------------------------------------------
    cache_programs()
    make_folder(workdir, "--output")
    with exclusive_lock(workdir), Stop("finished stages and most vectors are saved"):
        config = ConfigDict(request.config.to_dict())
        config.tasks, config.data.path, config.init_from = "", str(workdir / DATA), request.model
        sources = follow_corpus(workdir)
        store = sources.passages
        resolved = fill_from_pretrained(config, workdir)
        check_sources(resolved, workdir, sources.tokenizer)
        run = make_run(resolved, workdir, sources)
        check_workdir(run)

        # --- Embed, and export ----------------------------------------------------------------------------------------
        token_bytes = write_index(run, starting_params(run), request.store_tokens)

        # --- Record ---------------------------------------------------------------------------------------------------
        counts = read_json(workdir / DATA / PREPARED)["counts"]["passages"]
        skipped = dict(Counter(counts["dropped"]) + Counter(counts["damaged"]))
        seconds = round(time.monotonic() - began, 3)
        result = IndexResult(len(store), store.documents, skipped, token_bytes, seconds, is_new=True)
        record = {"settings": request.settings(), "command": request.command, "seconds": result.seconds}
        record |= {name: getattr(result, name) for name in _COUNTS}
        write_json_atomic(workdir / RECORD, record)
    return result


# --- The request ------------------------------------------------------------------------------------------------------


def read_index(workdir: Path) -> dict[str, Any] | None:
    """Return the content of index.json; None if the folder has no finished index."""
    record = read_json(workdir / RECORD) if (workdir / RECORD).is_file() and (workdir / "config.json").is_file() else {}
    return record if isinstance(record, dict) and "settings" in record else None


def has_empty_recipe(workdir: Path) -> bool:
    """Return True if `realm index` recorded the config of a run directory, and nothing was trained there since."""
    config = read_json(workdir / "config.json")
    return isinstance(config, dict) and config.get("tasks") == ""


def absolute_source(documents: str) -> str:
    """Return the name of documents with an absolute path, so that a run can be continued from any current directory."""
    prefix = NEWS if documents.startswith(NEWS) else ""
    return f"{prefix}{absolute_path(documents.removeprefix(prefix))}"


def check_settings(workdir: Path, recorded: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Compare the settings of a command with those of the command that began the run.

    Args:
        workdir: the run directory.
        recorded: settings of the first command, by name, with absolute paths.
        settings: settings of this command, in the same way. Paths of the same file or folder are equal.

    Raises:
        UserError: a setting differs.
    """

    def resolved(value: Any) -> Any:
        return os.path.realpath(value) if isinstance(value, str) else value

    for name, value in settings.items():
        if resolved(recorded.get(name)) != resolved(value):
            was = f"{name} {recorded.get(name)!r}, not {value!r}"
            raise UserError(f"--output={workdir}: was started with {was}; use the same, or another --output")


def check_model(name: str) -> None:
    """Check that a name is a model of sentence-transformers that the encoders can start from. Raises UserError."""
    folder = resolve_model_path(name, "--from")
    if not folder.is_dir():
        raise UserError(f"--from={name}: no such folder; write hf:NAME for a model of the hub, py:NAME for a package")
    read_architecture(transformer_folder(folder) / SETTINGS)  # raises UserError for a network that cannot be loaded
    if sentence_model(folder) is None:
        raise UserError(
            f"--from={name}: {folder} has no modules.json with a pooling layer, so it is not a sentence encoder; name "
            "a sentence-transformers model"
        )


def check_decided(config: ConfigDict, decided: Mapping[str, str], advice: str) -> None:
    """Check that a config does not change keys that the command sets.

    Args:
        config: config of the request.
        decided: key → the reason why the command sets it.
        advice: remedy, for the message.

    Raises:
        UserError: a key is changed.
    """
    default_values = flatten(load_config(CONFIG).to_dict())
    for key, value in flatten(config.to_dict()).items():
        if key in decided and value != default_values[key]:
            raise UserError(f"config.{key}: {decided[key]}; {advice}")


def check_outside(workdir: Path, source: str, description: str) -> None:
    """Check that the files of a run directory are not among those of a source.

    Args:
        workdir: the run directory.
        source: a folder, or a pattern of files.
        description: relative clause about the source, for the message.

    Raises:
        UserError: the run directory is inside the source.
    """
    path, run_parts = Path(source).absolute(), workdir.resolve().parts
    first_wildcard = next((number for number, part in enumerate(path.parts) if set("*?[") & {*part}), None)
    if first_wildcard is None:
        is_inside = path.is_dir() and workdir.resolve().is_relative_to(path.resolve())
    else:
        # The pattern has to match the folders down to the run directory, or down to its "**", and then go deeper.
        parts = [*Path(*path.parts[:first_wildcard]).resolve().parts, *path.parts[first_wildcard:]]
        is_deeper = "**" in parts or len(parts) > len(run_parts)
        parts = parts[: parts.index("**")] if "**" in parts else parts[: len(run_parts)]
        is_inside = is_deeper and len(parts) <= len(run_parts) and all(map(fnmatchcase, run_parts, parts))
    if is_inside:
        raise UserError(f"--output={workdir}: is inside {source}, {description}; name a folder outside")


def _check_unchanged(request: IndexRequest, prepared: Mapping[str, Any]) -> None:
    """Raise UserError if the documents are no longer those that PREPARED.json records."""
    current = json.loads(json.dumps(open_texts(request.documents).identity))  # to compare with what was read from JSON
    if current != prepared["inputs"]["passages"]:
        raise UserError(
            f"{request.documents}: has changed since it was indexed; add, replace or remove documents with "
            f"`realm corpus`, or index it into another --output"
        )


def _is_current(workdir: Path, sources: Sources, store_tokens: bool) -> bool:
    """Return True if the vectors, words and, if wanted, token vectors of an index are those of its corpus.

    Args:
        workdir: the run directory.
        sources: its dataset directory.
        store_tokens: it must have token vectors too.
    """
    exported = find_exported_model(workdir / MODEL)
    language = recorded_config(workdir).retrieval.language or available(sources.language)
    has_vectors = exported is not None and exported.manifest["corpus"] == sources.passages.fingerprint
    has_tokens = not store_tokens or exported is not None and exported.stores_tokens
    return has_vectors and has_tokens and is_saved(sources.passages, language, workdir)


# --- Stages that other commands share ---------------------------------------------------------------------------------


def prepare_documents(
    documents: str, model: str, folder: Path, limit: int, questions: Sequence[str] = (), language: str = ""
) -> None:
    """Write a dataset directory with the tokenizer of an encoder, and print a summary.

    Unreadable documents are skipped and counted.

    Args:
        documents: file, pattern or folder.
        model: the encoder.
        folder: the dataset directory.
        limit: tokens of a passage at most.
        questions: files of evaluation questions, SPLIT=FILE each.
        language: language of the documents; '' to detect it.

    Raises:
        PreparedOtherwise: the folder has other documents or questions.
        UserError: nothing can be read.
    """
    options = Options(
        documents, folder, questions=questions, vocab=model, limit=limit, language=language, skip_damage=True
    )
    prepare_and_print(options)


def follow_corpus(workdir: Path) -> Sources:
    """Open the newest version of a run's corpus, and record it as the run's. Only for a run that has trained nothing.

    Args:
        workdir: the run directory, with its dataset directory.
    """
    sources = open_sources(workdir / DATA)
    write_json_atomic(workdir / "data.json", sources.fingerprints())
    return sources


def refresh_index(run: Run, params: Params) -> None:
    """Embed the passages that a model of an earlier version of the corpus lacks.

    `realm corpus --data` edits only the corpus, and an edit may have been killed before it replaced the vectors.

    Args:
        run: the run over the newest version.
        params: parameters of the encoders.
    """
    exported, store = find_exported_model(run.workdir / MODEL), run.sources.passages
    if exported is None or exported.manifest["corpus"] == store.fingerprint:
        return
    before = run
    if (version := exported.manifest["corpus"]) in store.versions:
        passages = PassageStore.open(store.folder, run.sources.tokenizer.size, version)
        before = dataclasses.replace(run, sources=dataclasses.replace(run.sources, passages=passages))
    number = update_index(before, run, params, lambda: None)
    logger.info("%s: the corpus was edited; embedded %d of %d passages", run.workdir, number, len(store))


def write_index(run: Run, params: Params, store_tokens: bool = False) -> int:
    """Write the index of a run's corpus: BM25's words, and an exported model with the vectors of all passages.

    Nothing is done again if the run directory has it.

    Args:
        run: the run.
        params: parameters of the encoders that embed.
        store_tokens: the exported model must have token vectors too.

    Returns:
        Bytes of the stored token vectors of a passage, 0 for none.
    """
    refresh_index(run, params)
    save_bm25_index(run)
    fingerprint, exported = run.sources.passages.fingerprint, find_exported_model(run.workdir / MODEL)
    has_tokens = not store_tokens or exported is not None and exported.stores_tokens
    if exported is None or exported.vectors(fingerprint) is None or not has_tokens:
        key = sha256_hex(f"{encoder_digest(run, params)} {fingerprint}".encode())
        tokens = TokenFile(run, params, key) if store_tokens else None
        vectors = embed_with_cache(run, params, bar=True, tokens=tokens)  # [passages, width]
        has_reader, folder = begins_with_reader(run.workdir), None if tokens is None else tokens.folder
        write_exported_model(
            run.workdir / MODEL, run, INDEX, 0, params, vectors, trained_reader=has_reader, token_folder=folder
        )
        exported = find_exported_model(run.workdir / MODEL)
    remove_unfinished(run.workdir)
    tokens_by_passage = None if exported is None else exported.tokens(fingerprint)
    return 0 if tokens_by_passage is None else tokens_by_passage[0].nbytes


def update_index(before: Run, after: Run, params: Params, publish_corpus: Callable[[], None]) -> int:
    """Write the vectors and words of an edited corpus, embedding only passages without a vector.

    Token vectors are updated too if the index stores them. Their compression stays, unless it was fitted to a few
    passages and the corpus has doubled since.

    Args:
        before: the run over the corpus as it was.
        after: the run over the edited corpus.
        params: parameters of the encoders.
        publish_corpus: makes the edit visible in the dataset directory. It comes after everything that may fail, and
            before the model is replaced: `refresh_index` completes an edit that is cut off in between.

    Returns:
        The number of passages that were embedded.
    """
    exported, fingerprint = find_exported_model(after.workdir / MODEL), before.sources.passages.fingerprint
    assert exported is not None, "the run is an index"
    known = exported.vectors(fingerprint)  # [passages before, width]
    if known is None:  # the dataset directory was prepared again
        known = embed_with_cache(before, params, bar=True)
    row_before = {key.tobytes(): row for row, key in enumerate(row_keys(before.corpus))}
    source = np.array([row_before.get(key.tobytes(), -1) for key in row_keys(after.corpus)])  # [passages], -1 if new
    new_rows = np.flatnonzero(source < 0)
    vectors = known[np.maximum(source, 0)]  # [passages, width]
    token_folder, compression = None, exported.token_compression()
    if compression is not None:
        is_fitting = can_stay(compression, after.context.rows, int(after.corpus.lengths.max()))
        key = sha256_hex(f"{exported.identity} {after.sources.passages.fingerprint}".encode())
        tokens = TokenFile(after, params, key, compression if is_fitting else None)
        known_tokens = exported.tokens(fingerprint)  # [passages before, tokens, dimensions]
        if known_tokens is not None and is_fitting:
            tokens.copy(known_tokens, source)
        new_rows = np.flatnonzero((source < 0) | ~tokens.is_stored)
        vectors[new_rows], token_folder = tokens.embed(new_rows), tokens.folder
    elif len(new_rows):
        vectors[new_rows] = embed_unknown(after, params)(after.corpus.take(new_rows))
    save_bm25_index(after)
    replace_vectors(after.workdir / MODEL, after, vectors, publish_corpus, token_folder)
    remove_unfinished(after.workdir)
    return len(new_rows)
