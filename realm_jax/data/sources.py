"""A prepared folder, opened: tokenizer, corpus Z, pre-training text X, questions. Read next: `examples.py`.

A folder in a bucket is copied to this machine's disk once, because nothing remote is memory-mapped. We verify a copy
before we put PREPARED.json into it. A copy of a store that was edited since gets only the new segments. Processes of
one machine wait for the one that copies.
"""

import dataclasses
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from realm_jax.data.questions import Question, answered, gold_record, read_questions
from realm_jax.data.store import MANIFEST as STORE
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.data.tokenizer_files import open_tokenizer
from realm_jax.errors import UserError
from realm_jax.storage import (
    Folder,
    StorageError,
    digest,
    exclusive_lock,
    open_folder,
    read_json,
    side_by_side,
    staging_folder,
    write_atomic,
)

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
PREPARED = "PREPARED.json"
MARGIN = 1 << 30  # bytes of the disk that stay free


@dataclasses.dataclass(frozen=True)
class Sources:
    """Dataset of a run: corpus Z, pre-training text X, questions.

    Attributes:
        tokenizer: makes the tokens of all texts.
        passages: Z.
        pretraining: X; the same store if X is Z.
        questions: by split.
    """

    tokenizer: Tokenizer
    passages: PassageStore
    pretraining: PassageStore
    questions: dict[str, list[Question]]

    @property
    def pretraining_is_corpus(self) -> bool:
        """Return True if a row of X is the same row of Z, so that a sentence must not retrieve its own passage."""
        return self.pretraining is self.passages

    def answered(self, split: str) -> list[Question]:
        """Return the questions of a split that have answers."""
        return answered(self.questions.get(split, []))

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of each file that is read, by name."""
        # Runs have recorded the digest of these objects, so their keys stay.
        contents = {
            split: [
                {name: getattr(question, name) for name in ("question", "answers", "fields", "line")}
                | {"gold_passage_id": None}
                | gold_record(question.gold)
                for question in questions
            ]
            for split, questions in self.questions.items()
        }
        return {
            "tokenizer": self.tokenizer.fingerprint,
            "passages": self.passages.fingerprint,
            "pretraining": self.pretraining.fingerprint,
            "questions": digest(json.dumps(contents, sort_keys=True).encode()),
        }


def open_sources(
    folder: str | os.PathLike[str], version: str | None = None, flag: str = "config.data.path=", questions: bool = True
) -> Sources:
    """Open a folder written by `realm prepare`; one in a bucket is copied to this machine first.

    Args:
        folder: the folder, or its URL.
        version: fingerprint of passages that were the newest once; an unknown one gives the newest.
        flag: precedes the folder in messages, as the user wrote it.
        questions: whether to read the questions.

    Raises:
        UserError: it is no prepared folder, or its parts do not match.
    """
    folder = staged(os.fspath(folder), flag) if is_remote(os.fspath(folder)) else Path(folder)
    if not (folder / PREPARED).is_file():
        raise UserError(f"{flag}{folder}: not a prepared folder (no {PREPARED}); make it with `realm prepare`")
    manifest = read_json(folder / PREPARED)
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{folder}/PREPARED.json: unknown format version; prepare the folder again with this release")
    if not isinstance(manifest.get("questions"), dict):
        raise UserError(f"{folder}/PREPARED.json is damaged (no counts of questions); prepare the folder again")
    # --- Tokenizer and stores, which must match
    tokenizer = open_tokenizer(folder / "tokenizer")
    passages = _open_store(folder / "passages", tokenizer, version)
    pretraining = _open_store(folder / "pretraining", tokenizer) if manifest.get("pretraining") else passages
    # --- Questions
    by_split = {}
    for split, count in manifest["questions"].items() if questions else ():
        path = folder / "questions" / f"{split}.jsonl"
        by_split[split] = read_questions(path)
        if len(by_split[split]) != count:
            raise UserError(
                f"{path} is damaged ({len(by_split[split])} questions, not {count}); prepare the folder again"
            )
    return Sources(tokenizer, passages, pretraining, by_split)


def _open_store(folder: Path, tokenizer: Tokenizer, version: str | None = None) -> PassageStore:
    store = PassageStore.open(folder, tokenizer.size)
    if version in store.versions:
        store = PassageStore.open(folder, tokenizer.size, version)
    if store.tokenizer_fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"{folder}: built with tokenizer {store.tokenizer_fingerprint}, but {folder.parent}/tokenizer is "
            f"{tokenizer.fingerprint}; prepare the folder again"
        )
    return store


# --- A folder in a bucket ---------------------------------------------------------------------------------------------


def is_remote(path: str) -> bool:
    """Return True if a path is the URL of a bucket."""
    return "://" in path and not path.startswith("file://")


def staged(url: str, flag: str = "config.data.path=") -> Path:
    """Copy a prepared folder to this machine's disk, if it is not there yet.

    Args:
        url: of the folder in a bucket.
        flag: precedes the URL in messages, as the user wrote it.

    Returns:
        The folder on this machine.

    Raises:
        UserError: there is no such folder.
        StorageError: it cannot be read, or the disk is too small.
    """
    folder = open_folder(url)
    copy = staging_folder() / f"data-{digest(folder.url.encode())[:16]}"
    copy.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(copy, wait=True):
        try:
            prepared = folder.read(PREPARED)
        except FileNotFoundError:
            raise UserError(
                f"{flag}{url}: not a prepared folder (no {PREPARED}); make it with `realm prepare`"
            ) from None
        manifest = folder.read_json(PREPARED)
        names = [name for name in ("passages", "pretraining") if manifest.get(name)]
        stores = {name: folder.read(f"{name}/{STORE}") for name in names}
        # The copy is current if its records are those of the bucket.
        records = {PREPARED: prepared} | {f"{name}/{STORE}": data for name, data in stores.items()}
        if not all((copy / name).is_file() and (copy / name).read_bytes() == data for name, data in records.items()):
            (copy / PREPARED).unlink(missing_ok=True)
            _copy(folder, copy, manifest, stores)
            write_atomic(copy / PREPARED, prepared)
    return copy


def _copy(folder: Folder, copy: Path, manifest: dict[str, Any], stores: dict[str, bytes]) -> None:
    """Copy the missing files of a prepared folder, and verify its stores. Raises StorageError for a full disk."""
    # Small files may have changed, so we always copy them; files of segments never change once they are written.
    small = [f"tokenizer/{name}" for name in folder.names("tokenizer")]
    small += [f"questions/{split}.jsonl" for split in manifest["questions"]]
    large = {
        f"{name}/{segment['folder']}/{file}": known["bytes"]
        for name in stores
        for segment in folder.read_json(f"{name}/{STORE}")["segments"]
        for file, known in segment["files"].items()
    }
    present = {name for name, size in large.items() if (copy / name).is_file() and (copy / name).stat().st_size == size}
    missing = {name: size for name, size in large.items() if name not in present}
    wanted, free = sum(missing.values()) + MARGIN, shutil.disk_usage(copy).free
    if free < wanted:
        raise StorageError(
            f"{folder.url} needs {wanted:,} bytes of {copy}, which has {free:,} free; set REALM_STAGING to a folder "
            "with more room"
        )
    logger.info("%s: copying %d files, %.1f GB, to %s", folder.url, len(missing), sum(missing.values()) / 1e9, copy)

    def fetch(name: str) -> None:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(copy / name, folder.read(name))

    side_by_side(fetch, [*small, *missing])
    # STORE.json makes a store complete, so it comes after the files of its segments.
    for name, record in stores.items():
        write_atomic(copy / name / STORE, record)
        try:
            PassageStore.open(copy / name).verify()
        except UserError:
            shutil.rmtree(copy / name)  # so that it is copied again
            raise
