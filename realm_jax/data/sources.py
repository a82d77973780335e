"""A prepared folder, opened: tokenizer, corpus Z, pre-training text X, questions. Read next: `examples.py`."""

import dataclasses
import json
import os
from pathlib import Path

from realm_jax.data.languages import CHOICES
from realm_jax.data.questions import Question, answered, gold_record, read_questions
from realm_jax.data.staging import PREPARED, is_remote, staged
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.data.tokenizer_files import open_tokenizer
from realm_jax.errors import UserError
from realm_jax.storage import read_json, sha256_hex

FORMAT_VERSION = 2


@dataclasses.dataclass(frozen=True)
class Sources:
    """Dataset of a run: corpus Z, pre-training text X, questions.

    Attributes:
        tokenizer: makes the tokens of all texts.
        passages: Z.
        pretraining: X; the same store if X is Z.
        questions: by split.
        language: language of the passages as `realm prepare` recorded it, one of `languages.CHOICES`; '' if it did not.
    """

    tokenizer: Tokenizer
    passages: PassageStore
    pretraining: PassageStore
    questions: dict[str, list[Question]]
    language: str = ""

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
            "questions": sha256_hex(json.dumps(contents, sort_keys=True).encode()),
        }


def open_sources(
    folder: str | os.PathLike[str], version: str | None = None, flag: str = "config.data.path=", questions: bool = True
) -> Sources:
    """Open a folder written by `realm prepare`; one in a bucket is copied to this machine first.

    Args:
        folder: the folder, or its URL.
        version: fingerprint of passages that were the newest once; an unknown one gives the newest.
        flag: precedes the folder in messages, as the user wrote it.
        questions: read the questions too.

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
    language = str(manifest.get("language", ""))
    if language not in ("", *CHOICES):
        raise UserError(f"{folder}/PREPARED.json: unknown language {language!r}; prepare the folder again")
    return Sources(tokenizer, passages, pretraining, by_split, language)


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
