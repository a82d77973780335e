"""A prepared folder, opened: tokenizer, corpus Z, pre-training text X, questions. Read next: `examples.py`."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from realm_jax.data.questions import Question, answered, gold_record, read_questions
from realm_jax.data.staging import PREPARED, READER, READER_MANIFEST, is_remote, staged
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.data.tokenizer_files import open_tokenizer
from realm_jax.errors import UserError
from realm_jax.storage import digest, read_json

FORMAT_VERSION = 2


class Tokenized(NamedTuple):
    """Passages and pre-training text in the tokens of one tokenizer; `pretraining` is `passages` where X is Z."""

    tokenizer: Tokenizer
    passages: PassageStore
    pretraining: PassageStore


@dataclasses.dataclass(frozen=True)
class Sources:
    """What a run reads. `pretraining` is `passages` itself where X is Z (`pretraining_is_corpus` is true then).

    reader: the same rows in the tokens of a reader that has a tokenizer of its own.
    """

    tokenizer: Tokenizer
    passages: PassageStore
    pretraining: PassageStore
    questions: dict[str, list[Question]]
    reader: Tokenized | None = None

    @property
    def for_reader(self) -> Tokenized:
        """What the reader reads: tokens of its own, or the retriever's."""
        return self.reader or Tokenized(self.tokenizer, self.passages, self.pretraining)

    def of_passages_alone(self) -> "Sources":
        """The same with X = Z."""
        reader = self.reader and self.reader._replace(pretraining=self.reader.passages)
        return dataclasses.replace(self, pretraining=self.passages, reader=reader)

    @property
    def pretraining_is_corpus(self) -> bool:
        """Whether a row of X is the same row of Z, so that a sentence must not retrieve its own passage."""
        return self.pretraining is self.passages

    def answered(self, split: str) -> list[Question]:
        """The questions of a split that have answers."""
        return answered(self.questions.get(split, []))

    def fingerprints(self) -> dict[str, str]:
        """Name → fingerprint of everything that is read."""
        asked = {split: [_content(one) for one in some] for split, some in self.questions.items()}
        found = {
            "tokenizer": self.tokenizer.fingerprint,
            "passages": self.passages.fingerprint,
            "pretraining": self.pretraining.fingerprint,
            "questions": digest(json.dumps(asked, sort_keys=True).encode()),
        }
        return found | ({"reader": self.reader.tokenizer.fingerprint} if self.reader else {})


def _content(question: Question) -> dict[str, Any]:
    """A question as JSON. Runs have recorded the digest of this, so its keys stay."""
    kept = {name: getattr(question, name) for name in ("question", "answers", "fields", "line")}
    return kept | {"gold_passage_id": None} | gold_record(question.gold)


def open_sources(
    folder: str | os.PathLike[str], version: str | None = None, flag: str = "config.data.path=", questions: bool = True,
    reader: bool = False,
) -> Sources:  # fmt: skip
    """Open a folder written by `realm prepare`; one in a bucket is copied to this machine first.

    version: fingerprint of passages that were the newest once; one that is not there gives the newest. flag: what a
    message puts before the folder, as the user gave it. questions: whether they are read, or none. reader: whether the
    tokens of `--reader-vocab` are opened. Raises UserError when the folder is none, or when its parts do not match.
    """
    folder = staged(os.fspath(folder), flag) if is_remote(os.fspath(folder)) else Path(folder)
    if not (folder / PREPARED).is_file():
        raise UserError(f"{flag}{folder}: not a prepared folder (no {PREPARED}); make it with `realm prepare`")
    manifest = read_json(folder / PREPARED)
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{folder}/PREPARED.json: unknown format version; prepare the folder again with this release")
    if not isinstance(manifest.get("questions"), dict):
        raise UserError(f"{folder}/PREPARED.json is damaged (no counts of questions); prepare the folder again")
    tokenizer = open_tokenizer(folder / "tokenizer")
    passages = _open_store(folder / "passages", tokenizer, version)
    pretraining = _open_store(folder / "pretraining", tokenizer) if manifest.get("pretraining") else passages
    asked = _read_questions(folder, manifest) if questions else {}
    return Sources(
        tokenizer, passages, pretraining, asked, _open_reader(folder, passages, pretraining) if reader else None
    )


def tokenizers_of(folder: str) -> tuple[str | None, str | None]:
    """Fingerprints of a prepared folder's tokenizer and of that of `--reader-vocab`; None for what is not there."""
    place = staged(folder) if is_remote(folder) else Path(folder)
    found = [place / PREPARED, place / READER / READER_MANIFEST]
    first, second = (read_json(path).get("tokenizer") if path.is_file() else None for path in found)
    return first, second


def _open_reader(folder: Path, passages: PassageStore, pretraining: PassageStore) -> Tokenized:
    """The reader's tokens of opened stores. Raises UserError if there are none."""
    place = folder / READER
    again = f"`realm prepare --output={folder} --reader-vocab="
    if not (place / READER_MANIFEST).is_file():
        raise UserError(f"{place}: no tokens for a reader with a tokenizer of its own; make them with {again}FILE`")
    versions, tokenizer = read_json(place / READER_MANIFEST), open_tokenizer(place / "tokenizer")

    def open_store(name: str, like: PassageStore) -> PassageStore:
        version = versions.get(name, {}).get(like.fingerprint)
        if version is None:
            raise UserError(f"{place}: older than {like.folder}; bring it up to date with {again}{place}/tokenizer`")
        return _open_store(place / name, tokenizer, version)

    own = open_store("passages", passages)
    return Tokenized(tokenizer, own, own if pretraining is passages else open_store("pretraining", pretraining))


def _read_questions(folder: Path, manifest: dict[str, Any]) -> dict[str, list[Question]]:
    questions = {split: read_questions(folder / "questions" / f"{split}.jsonl") for split in manifest["questions"]}
    for split, found in questions.items():
        if len(found) != (wanted := manifest["questions"][split]):
            path = folder / "questions" / f"{split}.jsonl"
            raise UserError(f"{path} is damaged ({len(found)} questions, not {wanted}); prepare the folder again")
    return questions


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
