"""A prepared folder, opened: tokenizer, corpus Z, pre-training text X, questions. Read next: `examples.py`."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from realm_jax.data.jsonl import Question, answered, read_questions
from realm_jax.data.staging import is_remote, staged
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.data.tokenizer_files import open_tokenizer
from realm_jax.errors import UserError
from realm_jax.storage import digest, read_json

FORMAT_VERSION = 2


@dataclasses.dataclass(frozen=True)
class Sources:
    """What a run reads. `pretraining` is `passages` itself where X is Z (`own_text` is true then)."""

    wordpiece: Tokenizer
    passages: PassageStore
    pretraining: PassageStore
    questions: dict[str, list[Question]]

    @property
    def own_text(self) -> bool:
        """Whether a row of X is the same row of Z, so that a sentence must not retrieve its own passage."""
        return self.pretraining is self.passages

    def answered(self, split: str) -> list[Question]:
        """The questions of a split that have answers."""
        return answered(self.questions.get(split, []))

    def fingerprints(self) -> dict[str, str]:
        """Name → fingerprint of everything that is read."""
        names = [field.name for field in dataclasses.fields(Question)]  # `asdict` would copy what they hold
        asked = {
            split: [{name: getattr(one, name) for name in names} for one in some]
            for split, some in self.questions.items()
        }
        return {
            "tokenizer": self.wordpiece.fingerprint,
            "passages": self.passages.fingerprint,
            "pretraining": self.pretraining.fingerprint,
            "questions": digest(json.dumps(asked, sort_keys=True).encode()),
        }


def open_sources(
    folder: str | os.PathLike[str], version: str | None = None, flag: str = "config.data.path=", questions: bool = True
) -> Sources:
    """Open a folder written by `realm prepare`; one in a bucket is copied to this machine first.

    version: fingerprint of passages that were the newest once; one that is not there gives the newest. flag: what a
    message puts before the folder, as the user gave it. questions: whether they are read, or none. Raises UserError
    when the folder is none, or when its parts do not match.
    """
    folder = staged(os.fspath(folder), flag) if is_remote(os.fspath(folder)) else Path(folder)
    if not (folder / "PREPARED.json").is_file():
        raise UserError(f"{flag}{folder}: not a prepared folder (no PREPARED.json); make it with `realm prepare`")
    manifest = read_json(folder / "PREPARED.json")
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{folder}/PREPARED.json: unknown format version; prepare the folder again with this release")
    if not isinstance(manifest.get("questions"), dict):
        raise UserError(f"{folder}/PREPARED.json is damaged (no counts of questions); prepare the folder again")
    wordpiece = open_tokenizer(folder / "tokenizer")
    passages = _open_store(folder / "passages", wordpiece, version)
    pretraining = _open_store(folder / "pretraining", wordpiece) if manifest.get("pretraining") else passages
    return Sources(wordpiece, passages, pretraining, _read_questions(folder, manifest) if questions else {})


def _read_questions(folder: Path, manifest: dict[str, Any]) -> dict[str, list[Question]]:
    questions = {split: read_questions(folder / "questions" / f"{split}.jsonl") for split in manifest["questions"]}
    for split, found in questions.items():
        if len(found) != (wanted := manifest["questions"][split]):
            path = folder / "questions" / f"{split}.jsonl"
            raise UserError(f"{path} is damaged ({len(found)} questions, not {wanted}); prepare the folder again")
    return questions


def _open_store(folder: Path, wordpiece: Tokenizer, version: str | None = None) -> PassageStore:
    store = PassageStore.open(folder, wordpiece.size)
    if version in store.versions:
        store = PassageStore.open(folder, wordpiece.size, version)
    if store.tokenizer_fingerprint != wordpiece.fingerprint:
        raise UserError(
            f"{folder}: built with tokenizer {store.tokenizer_fingerprint}, but {folder.parent}/tokenizer is "
            f"{wordpiece.fingerprint}; prepare the folder again"
        )
    return store
