"""Text with annotated names: files in the format of CoNLL-2003 and its many relatives, or a TensorFlow data set.

A line holds a token and its tag, with other columns between; a blank line ends a sentence and `-DOCSTART-` begins a
document. What schemes a tag may be of is `realm_jax/data/tags.py`. Read `open_tagged` next.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from realm_jax.data.lines import text_lines
from realm_jax.data.tags import TAG, Entity, entities
from realm_jax.errors import UserError

DOCUMENT = "-DOCSTART-"
TFDS = "tfds:"
# What the name of a split's file contains; CoNLL-2003 calls its dev set testa.
SPLITS = {"train": r"train", "dev": r"dev|valid|testa", "test": r"test"}
TENTHS = {"test": 2, "dev": 1}  # of the documents of a single file; the rest is for training
_COLUMNS = re.compile(r"[ \t]+")


class Sentence(NamedTuple):
    """Tokens, and the entities as ranges of them."""

    tokens: tuple[str, ...]
    entities: tuple[Entity, ...]


Document = list[Sentence]


def open_tagged(path: str | os.PathLike[str]) -> dict[str, list[Document]]:
    """Split → documents: 'train' and 'dev', and 'test' where there is one.

    path: a folder with a file a split, whose names say which (train; dev, valid or testa; test or testb); a single
    file, of which whole documents (sentences where it has but one) go into splits by a hash of their words, so that the
    same text always is in the same one; or `tfds:NAME`. Files may be packed. Raises UserError.
    """
    if str(path).startswith(TFDS):
        return _from_tfds(str(path).removeprefix(TFDS))
    folder = Path(path)
    if folder.is_dir():
        return {split: read_conll(file) for split, file in _files(folder).items()}
    if not folder.exists():
        raise UserError(f"config.data.path={path}: there is no such file; name CoNLL files, or {TFDS}conll2003")
    return split_by_hash(read_conll(path), str(path))


def read_conll(path: str | os.PathLike[str]) -> list[Document]:
    """All documents of a file. Raises UserError, with file and line, for a line that is no token with a tag."""
    documents: list[Document] = [[]]
    tokens: list[str] = []
    tags: list[str] = []
    for number, line in text_lines(path):
        columns = _columns(line.strip(" \t\r"), f"{path}:{number}")
        if columns and columns[0] != DOCUMENT:
            tokens.append(columns[0])
            tags.append(columns[-1])
            continue
        documents[-1] += _sentence(tokens, tags)
        tokens, tags = [], []
        if columns:
            documents.append([])
    documents[-1] += _sentence(tokens, tags)
    found = [document for document in documents if document]
    if not _has_names(found):
        raise UserError(f"{path}: holds no tagged name; give one token per line, its tag (B-LOC, I-PER, O) at the end")
    return found


def _columns(line: str, where: str) -> list[str]:
    """The columns of a line, empty for a blank one."""
    if not line:
        return []
    columns = _COLUMNS.split(line)
    if columns[0] == DOCUMENT:
        return columns
    if len(columns) < 2:
        raise UserError(f"{where}: {line[:40]!r} is a token without a tag; put its tag at the end of the line")
    if not TAG.fullmatch(columns[-1]):
        raise UserError(f"{where}: {columns[-1][:40]!r} is not a tag; the last column holds O or, say, B-LOC or I-LOC")
    return columns


def _sentence(tokens: Sequence[str], tags: Sequence[str]) -> Document:
    return [Sentence(tuple(tokens), tuple(entities(tags)))] if tokens else []


def split_by_hash(documents: list[Document], name: str) -> dict[str, list[Document]]:
    """Splits of one set of documents, each by the hash of its words. Raises UserError if one would be empty."""
    parts = documents if len(documents) > 1 else [[sentence] for sentence in documents[0]]
    splits: dict[str, list[Document]] = {"train": [], "dev": [], "test": []}
    for part in parts:
        splits[_split_of(part)].append(part)
    for split, chosen in splits.items():
        if not _has_names(chosen):
            raise UserError(f"{name}: too small to be split: {split} has no name; give a folder with a file a split")
    return splits


def _has_names(documents: list[Document]) -> bool:
    return any(sentence.entities for document in documents for sentence in document)


def _split_of(document: Document) -> str:
    words = "\n".join(" ".join(sentence.tokens) for sentence in document)
    tenth = int.from_bytes(hashlib.sha256(words.encode("utf-8", "surrogatepass")).digest()[:8], "little") % 10
    for split, share in TENTHS.items():
        if tenth < share:
            return split
        tenth -= share
    return "train"


def _files(folder: Path) -> dict[str, Path]:
    """The file of each split."""
    found: dict[str, Path] = {}
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        split = next((split for split, names in SPLITS.items() if re.search(names, file.name.lower())), None)
        if split is None:
            continue
        if split in found:
            raise UserError(f"{folder}: {found[split].name} or {file.name}, which one is {split}? Leave one there")
        found[split] = file
    for split in ("train", "dev"):
        if split not in found:
            raise UserError(f"{folder}: no file of {split}; its name must contain {SPLITS[split].replace('|', ' or ')}")
    return found


def _from_tfds(name: str) -> dict[str, list[Document]]:
    """A data set with the features `tokens` and `ner` (conll2003). Its sentences are documents of their own."""
    try:
        import tensorflow_datasets as tfds  # here: it takes seconds

        builder = tfds.builder(name, file_format="array_record")
        builder.download_and_prepare()
        names: list[str] = builder.info.features["ner"].feature.names
        sources: dict[str, Any] = builder.as_data_source()
    except Exception as fault:  # of its own kinds, and of whatever it downloads with
        reason = " ".join(str(fault).split())[:200]
        raise UserError(f"config.data.path={TFDS}{name}: {type(fault).__name__}: {reason}; name CoNLL files") from None
    splits = {"dev" if split == "validation" else split: rows for split, rows in sources.items()}
    for split in ("train", "dev"):
        if split not in splits:
            raise UserError(f"config.data.path={TFDS}{name}: it has no split {split}; name CoNLL files")
    return {split: list(_tfds_sentences(splits[split], names)) for split in SPLITS if split in splits}


def _tfds_sentences(rows: Iterable[dict[str, Any]], names: Sequence[str]) -> Iterator[Document]:
    for row in rows:
        tokens = tuple(token.decode("utf-8") if isinstance(token, bytes) else str(token) for token in row["tokens"])
        if tokens and tokens[0] != DOCUMENT:
            yield [Sentence(tokens, tuple(entities([names[number] for number in row["ner"]])))]
