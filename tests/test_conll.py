"""Annotated files: every tagging scheme means the same, every bad line is named, and splits do not depend on order."""

import gzip
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realm_jax.data.conll import Document, Sentence, open_tagged, read_conll, split_by_hash
from realm_jax.data.tags import Entity, entities
from realm_jax.errors import UserError

FOUND = [Entity(0, 2, "PER"), Entity(3, 5, "ORG"), Entity(6, 7, "LOC")]


@pytest.mark.parametrize(
    "tags",
    [
        "I-PER I-PER O I-ORG I-ORG O I-LOC",  # IOB1 and IO
        "B-PER I-PER O B-ORG I-ORG O B-LOC",  # IOB2, BIO
        "B-PER E-PER O B-ORG E-ORG O S-LOC",  # BIOES
        "B-PER L-PER O B-ORG L-ORG O U-LOC",  # BILOU
    ],
)
def test_every_scheme_gives_the_same_names(tags):
    assert entities(tags.split()) == FOUND


@pytest.mark.parametrize(
    "tags, found",
    [
        ("I-PER B-PER", [Entity(0, 1, "PER"), Entity(1, 2, "PER")]),  # what B is for in IOB1
        ("I-PER I-LOC", [Entity(0, 1, "PER"), Entity(1, 2, "LOC")]),
        ("E-PER I-PER", [Entity(0, 1, "PER"), Entity(1, 2, "PER")]),
        ("B-PER S-PER", [Entity(0, 1, "PER"), Entity(1, 2, "PER")]),
        ("O O", []),
        ("", []),
    ],
)
def test_names_beside_each_other(tags, found):
    assert entities(tags.split()) == found


def as_tags(found: list[Entity], length: int, scheme: str) -> list[str]:
    tags = ["O"] * length
    last: Entity | None = None
    for entity in found:
        size = entity.end - entity.start
        prefixes = ["I"] * size
        if scheme == "IOB2" or scheme == "IOB1" and last and last.end == entity.start and last.kind == entity.kind:
            prefixes[0] = "B"
        if scheme == "BIOES":
            prefixes = ["S"] if size == 1 else ["B", *["I"] * (size - 2), "E"]
        tags[entity.start : entity.end] = [f"{prefix}-{entity.kind}" for prefix in prefixes]
        last = entity
    return tags


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.sampled_from(["PER", "LOC"])), max_size=6),
    st.sampled_from(["IOB1", "IOB2", "BIOES"]),
)
def test_what_a_scheme_writes_is_read_again(parts, scheme):
    found, place = [], 0
    for gap, size, kind in parts:
        found.append(Entity(place + gap, place + gap + size, kind))
        place += gap + size
    assert entities(as_tags(found, place + 1, scheme)) == found


def write(path, text: str, packed: bool = False):
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_columns_sentences_and_documents(tmp_path, packed):
    """Spaces or tabs, any columns between, Windows line ends, blank lines of spaces, and a document line with a tag."""
    text = "\ufeff-DOCSTART- -X- O O\n\nAda NNP I-NP B-PER\nLovelace NNP I-NP I-PER\r\n \t\nslept\tO\n"
    text += "-DOCSTART- O\nParis\tS-LOC"
    path = write(tmp_path / ("a.conll.gz" if packed else "a.conll"), text, packed)
    first = Sentence(("Ada", "Lovelace"), (Entity(0, 2, "PER"),))
    assert read_conll(path) == [[first, Sentence(("slept",), ())], [Sentence(("Paris",), (Entity(0, 1, "LOC"),))]]


@pytest.mark.parametrize(
    "line, says",
    [
        ("Paris", ":2: 'Paris' is a token without a tag"),
        ("Paris B_LOC", ":2: 'B_LOC' is not a tag"),
        ("Paris LOC", ":2: 'LOC' is not a tag"),
        ("Paris B-", ":2: 'B-' is not a tag"),
        ("Par\udcff B-LOC", ":2: byte 4 of the line is not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says):
    path = tmp_path / "a.conll"
    path.write_bytes(b"Ada B-PER\n" + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(UserError, match=f"{path}{says}"):
        read_conll(path)


def test_a_file_without_names_or_without_existence_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no tagged name"):
        read_conll(write(tmp_path / "a", "it O\nrains O\n"))
    with pytest.raises(UserError, match="there is no such file"):
        open_tagged(tmp_path / "b")


def many(count: int) -> list[Document]:
    return [[Sentence((f"City{n}", "slept"), (Entity(0, 1, "LOC"),))] for n in range(count)]


def test_a_document_goes_into_one_split_whatever_stands_around_it():
    documents = many(60)
    splits = split_by_hash(documents, "a")
    assert sum(splits.values(), []) != documents and sorted(sum(splits.values(), [])) == sorted(documents)
    fewer = split_by_hash(documents[::-1][:40], "a")
    for split, part in fewer.items():
        assert all(document in splits[split] for document in part)
    assert len(splits["train"]) > len(splits["test"]) > 0


def test_a_single_document_is_split_by_sentences():
    sentences = [document[0] for document in many(60)]
    splits = split_by_hash([sentences], "a")
    assert sorted(one for part in splits.values() for document in part for one in document) == sorted(sentences)
    with pytest.raises(UserError, match="a: too small to be split: .* has no name"):
        split_by_hash([sentences[:2]], "a")


def test_a_folder_has_a_file_a_split(tmp_path):
    for name, city in [("eng.train", "A"), ("eng.testa", "B"), ("eng.testb", "C"), ("README", "D")]:
        write(tmp_path / name, f"{city} B-LOC\n")
    splits = open_tagged(tmp_path)
    assert {split: documents[0][0].tokens for split, documents in splits.items()} == {
        "train": ("A",), "dev": ("B",), "test": ("C",),
    }  # fmt: skip
    write(tmp_path / "more.train", "E B-LOC\n")
    with pytest.raises(UserError, match="eng.train or more.train, which one is train"):
        open_tagged(tmp_path)
    (tmp_path / "more.train").unlink()
    (tmp_path / "eng.testa").unlink()
    with pytest.raises(UserError, match="no file of dev; its name must contain dev or valid or testa"):
        open_tagged(tmp_path)


def test_wikigold_and_wnut17(shared_data):
    splits = open_tagged(shared_data / "wikigold" / "wikigold.conll.txt")
    sentences = [sentence for documents in splits.values() for document in documents for sentence in document]
    assert sum(len(sentence.tokens) for sentence in sentences) == 39_007
    assert {split: len(documents) for split, documents in splits.items()} == {"train": 102, "dev": 8, "test": 35}
    kinds = Counter(entity.kind for sentence in sentences for entity in sentence.entities)
    assert sum(kinds.values()) == 3558 and set(kinds) == {"LOC", "MISC", "ORG", "PER"}
    sizes = {split: sum(map(len, part)) for split, part in open_tagged(shared_data / "wnut17").items()}
    assert sizes == {"train": 3394, "dev": 1009, "test": 1287}


# --- TensorFlow data sets


ROWS = [
    {"tokens": np.array([b"Ada", b"Lovelace"], object), "ner": np.array([1, 2])},
    {"tokens": np.array([b"Paris"], object), "ner": np.array([3])},
]


def data_sets(monkeypatch, splits: list[str]) -> None:
    """A stand-in for the package, which has the builder that `open_tagged` needs and nothing else."""
    names = ["O", "B-PER", "I-PER", "B-LOC"]
    info = SimpleNamespace(features={"ner": SimpleNamespace(feature=SimpleNamespace(names=names))})

    def builder(name: str, file_format: str) -> SimpleNamespace:
        if name != "conll2003":
            raise ValueError(f"Dataset {name} not found.")
        assert file_format == "array_record"  # what is read without TensorFlow
        sources = {split: ROWS for split in splits}
        return SimpleNamespace(info=info, download_and_prepare=lambda: None, as_data_source=lambda: sources)

    module = ModuleType("tensorflow_datasets")
    module.builder = builder
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)


@pytest.mark.parametrize("dev", ["dev", "validation"])
def test_a_data_set_by_name(monkeypatch, dev):
    data_sets(monkeypatch, ["train", dev, "test"])
    splits = open_tagged("tfds:conll2003")
    wanted = [[Sentence(("Ada", "Lovelace"), (Entity(0, 2, "PER"),))], [Sentence(("Paris",), (Entity(0, 1, "LOC"),))]]
    assert splits == {"train": wanted, "dev": wanted, "test": wanted}
    with pytest.raises(UserError, match="config.data.path=tfds:conll2004: ValueError: Dataset conll2004 not found"):
        open_tagged("tfds:conll2004")


def test_a_data_set_that_cannot_be_used_is_an_error_of_one_line(monkeypatch):
    data_sets(monkeypatch, ["train", "test"])
    with pytest.raises(UserError, match="config.data.path=tfds:conll2003: it has no split dev; name CoNLL files"):
        open_tagged("tfds:conll2003")
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match="config.data.path=tfds:conll2003: ModuleNotFoundError: .*; name CoNLL files"):
        open_tagged("tfds:conll2003")


def test_the_real_builder_reads_local_files(monkeypatch, tmp_path):
    pytest.importorskip("importlib_resources")
    pytest.importorskip("tensorflow_datasets")
    from tensorflow_datasets.text.conll2003.conll2003 import Conll2003

    path = write(tmp_path / "a.txt", "-DOCSTART- -X- -X- O\n\nAda NNP B-NP B-PER\nslept VBD B-VP O\n")
    splits = ("train", "dev", "test")
    monkeypatch.setattr(
        Conll2003, "_split_generators", lambda self, _: {s: self._generate_examples(path) for s in splits}
    )
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data"))
    assert open_tagged("tfds:conll2003")["dev"] == [[Sentence(("Ada", "slept"), (Entity(0, 1, "PER"),))]]
