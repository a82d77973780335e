"""Raw records: every shape that is known is read, in parts of any size, and damage is counted and never raised."""

import bz2
import gzip
import json
import lzma
import pickle
import sys
import types
from pathlib import Path

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realm_jax.corpora import raw_records
from realm_jax.corpora.articles import Article, Outcome, Skipped
from realm_jax.corpora.raw_records import article, parts
from realm_jax.corpora.texts import read_passages
from realm_jax.data import lines
from realm_jax.errors import UserError

GOOD = b'{"id": "a", "title": "A", "text": "Some text."}\n'


def read(source: object) -> list[Outcome]:
    """All records, each part read from a pickled copy as another process would."""
    copies = pickle.loads(pickle.dumps(parts(str(source))))
    return [record for part in copies for record in part()]


def read_bytes(path: Path, content: bytes) -> list[Outcome]:
    path.write_bytes(content)
    return read(path)


@pytest.mark.parametrize(
    "record",
    [
        {"url": "u", "title": "T", "maintext": "X", "text": None, "language": "en", "date_publish": "2018-01-02"},
        {"url": "u", "title": "T", "text": "X", "domain": "d", "date": "2018-01-02", "image_url": None},
        {"id": "u", "title": "T", "text": "X", "url": "another"},
        {"id": "u", "title": b"T", "text": b"X"},
        {"id": "", "url": "u", "title": "T", "maintext": "", "text": "X"},
    ],
    ids=["news-please", "cc_news", "own", "bytes", "the first that holds something"],
)
def test_the_known_shapes_give_the_same_article(record):
    assert article(record, "here") == Article("u", "T", "X")


def test_an_id_is_made_of_the_content_where_there_is_none():
    one, same, other = (article({"text": text, "n": n}, str(n)) for n, text in enumerate(["x", "x", "y"]))
    assert one.id == same.id != other.id
    assert one.title == ""


@pytest.mark.parametrize("record", [{"text": ""}, {"text": " \n"}, {"text": "", "contents": None}])
def test_the_title_is_the_text_of_a_record_with_an_empty_text(record):
    assert article({"id": "u", "title": "Tides of Oslo"} | record, "here") == Article("u", "", "Tides of Oslo")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"id": "a"}, raw_records.NO_FIELD),
        ({"id": "a", "title": "T", "summary": "words under a name that is unknown"}, raw_records.NO_FIELD),
        ({"id": "a", "text": None}, "the text is null"),
        ({"text": 3}, "the text is not a string"),
        ({"text": ["x"]}, "the text is not a string"),
        ({"text": "x", "title": {"a": 1}}, "the title is not a string"),
        ({"text": "x", "id": 1.5}, "the id is not a string"),
        ({"text": "x", "id": True}, "the id is not a string"),
        ({"text": "x\ud83d"}, "the text has half of a surrogate pair"),
        ({"text": "x", "title": "\udc00"}, "the title has half of a surrogate pair"),
        ({"text": b"\xff"}, "the text is not UTF-8"),
        (["text"], "not a record with named fields"),
        (None, "not a record with named fields"),
    ],
)
def test_what_is_no_article_is_damage_with_a_sample(record, reason):
    found = article(record, "here")
    assert (found.where, found.reason) == ("here", reason)
    assert len(found.sample) <= lines.SAMPLE and "\n" not in found.sample
    found.sample.encode("utf-8")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": "b", "text": "x"', "not JSON"),
        (b'{"id": "b", "text": "\xff"}', "not UTF-8"),
        (b"[1, 2]", "not a record with named fields"),
        (b'{"text": "\\ud83d"}', "the text has half of a surrogate pair"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\x00\x01\x02", "not JSON"),
    ],
)
def test_a_damaged_line_is_counted_at_its_place_and_the_others_are_read(tmp_path, line, reason):
    first, damage, last = read_bytes(tmp_path / "n.jsonl", GOOD + line + b"\n" + GOOD)
    assert first == last == Article("a", "A", "Some text.")
    assert (damage.where, damage.reason) == (f"{tmp_path}/n.jsonl at byte {len(GOOD)}", reason)


def test_blank_lines_and_a_byte_order_mark_are_no_damage(tmp_path):
    assert (
        read_bytes(tmp_path / "n.jsonl", b"\xef\xbb\xbf" + GOOD + b"\n \r\n" + GOOD[:-1])
        == [Article("a", "A", "Some text.")] * 2
    )


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)])
def test_packed_files_are_read_up_to_where_they_are_cut_off(tmp_path, suffix, pack):
    lines = b"".join(json.dumps({"id": str(n), "text": f"Text {n}."}).encode() + b"\n" for n in range(60_000))
    whole = pack(lines)
    assert len(read_bytes(tmp_path / f"n.jsonl{suffix}", whole)) == 60_000
    *records, damage = read_bytes(tmp_path / f"n.jsonl{suffix}", whole[: len(whole) * 3 // 4])
    assert damage.reason == "the rest of the file is truncated or damaged"
    assert 0 < len(records) < 60_000
    assert records == [Article(str(n), "", f"Text {n}.") for n in range(len(records))]
    spoilt = bytearray(whole)
    spoilt[len(whole) // 2 : len(whole) // 2 + 64] = b"\xaa" * 64
    assert isinstance(read_bytes(tmp_path / f"n.jsonl{suffix}", bytes(spoilt))[-1], Skipped)
    assert isinstance(read_bytes(tmp_path / f"n.jsonl{suffix}", lines)[-1], Skipped)  # not packed at all


def test_an_endless_line_is_damage_and_not_held_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST_LINE", 100)
    first, damage, last = read_bytes(tmp_path / "n.jsonl", GOOD + b"x" * 1000 + b"\n" + GOOD)
    assert first == last == Article("a", "A", "Some text.")
    assert damage.reason == "a line of more than 100 bytes"


def test_a_pattern_gives_the_files_in_order_and_nothing_is_an_error(tmp_path):
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / name).write_text(json.dumps({"id": name, "text": "x"}))
    (tmp_path / "folder.jsonl").mkdir()
    assert [record.id for record in read(tmp_path / "*.jsonl")] == ["a.jsonl", "b.jsonl"]
    for nothing in (tmp_path / "*.json", tmp_path / "folder.jsonl", tmp_path / "absent.jsonl"):
        with pytest.raises(UserError, match="no file fits"):
            parts(str(nothing))


def test_a_file_that_goes_away_is_the_users_error(tmp_path):
    (tmp_path / "n.jsonl").write_bytes(GOOD)
    (part,) = parts(str(tmp_path / "n.jsonl"))
    (tmp_path / "n.jsonl").unlink()
    with pytest.raises(UserError, match=r"cannot read .*n\.jsonl"):
        list(part())


def test_buckets_are_read_as_files_are():
    bucket = fsspec.filesystem("memory")
    bucket.pipe_file("/news/one.jsonl.gz", gzip.compress(GOOD))
    bucket.pipe_file("/news/two.jsonl", GOOD * 3)
    try:
        assert read("memory:///news/*.jsonl*") == [Article("a", "A", "Some text.")] * 4
        assert list(read_passages("memory:///news/one.jsonl.gz")) == [Article("a", "A", "Some text.", 1)]
        with pytest.raises(UserError, match="no file fits"):
            parts("memory:///news/*.xml")
        with pytest.raises(UserError, match="install a package for such URLs"):
            parts("nothing://news/*.jsonl")
    finally:
        bucket.rm("/news", recursive=True)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(
        st.one_of(st.binary(max_size=40), st.text(max_size=10).map(lambda text: json.dumps({"text": text}).encode())),
        max_size=12,
    ),
    size=st.integers(1, 60),
)
def test_parts_of_any_size_give_every_record_once(tmp_path, monkeypatch, lines, size):
    path = tmp_path / "n.jsonl"
    path.write_bytes(b"\n".join(lines))
    whole = read(path)
    with monkeypatch.context() as patch:
        patch.setattr(raw_records, "PART_BYTES", size)
        assert read(path) == whole


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(), st.lists))
def test_no_value_is_raised_at(value):
    for record in (value, {"text": value}, {"text": "x", "title": value, "id": value}):
        found = article(record, "here")
        assert isinstance(found, Outcome)


# --- Hubs, by stand-ins with the calls and shapes of the real libraries (datasets 5.2, tensorflow-datasets 4.9.10) ----


class Stream:
    """As datasets.IterableDataset: shards are whole files."""

    def __init__(self, files):
        self._files = files

    @property
    def num_shards(self):
        return len(self._files)

    def shard(self, num_shards, index):
        return Stream(self._files[index::num_shards])

    def __iter__(self):
        return (dict(record) for file in self._files for record in file)


@pytest.fixture
def hub(monkeypatch):
    def load_dataset(path, name=None, *, split=None, streaming=False):
        assert streaming
        if path != "cc_news":
            raise FileNotFoundError(f"Dataset '{path}' doesn't exist on the Hub or cannot be accessed.")
        if split != "train":
            raise ValueError(f"Bad split: {split}. Available splits: ['train']")
        files = [
            [{"text": f"{name} {file} {row}", "title": "T", "url": f"{file}/{row}"} for row in range(3)]
            for file in range(4)
        ]
        files[3][1]["text"] = None
        return Stream(files)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


def test_shards_of_a_hugging_face_dataset_are_read_apart(hub):
    assert len(parts("hf:cc_news")) == 4
    records = read("hf:cc_news:plain_text@train")
    assert records[0] == Article("0/0", "T", "plain_text 0 0") and len(records) == 12
    (damage,) = (record for record in records if isinstance(record, Skipped))
    assert damage.where == "hf:cc_news:plain_text@train, shard 3, row 1"
    assert damage.reason == "the text is null"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf:cc_nws", r"hf:cc_nws@train cannot be read \(Dataset 'cc_nws' doesn't exist"),
        ("hf:cc_news@dev", r"hf:cc_news@dev cannot be read \(Bad split: dev"),
        ("hf:", "hf: names no dataset; write hf:NAME"),
    ],
)
def test_a_hugging_face_dataset_that_is_not_there_is_the_users_error(hub, source, message):
    with pytest.raises(UserError, match=message):
        parts(source)


def test_a_real_hugging_face_dataset_is_read(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "news").mkdir()
    for number in range(3):
        (tmp_path / "news" / f"train-{number}.jsonl").write_text(json.dumps({"url": f"u{number}", "text": "Café"}))
    assert len(parts(f"hf:{tmp_path}/news")) == 3
    assert read(f"hf:{tmp_path}/news") == [Article(f"u{number}", "", "Café") for number in range(3)]


class Builder:
    """As tfds.core.DatasetBuilder, of nine records whose text features are bytes."""

    data_dir = "/data/wikipedia"
    name = "wikipedia"

    def __init__(self, file_format, prepared):
        self._prepared = prepared
        self.info = types.SimpleNamespace(
            splits={"train": types.SimpleNamespace(num_examples=9)},
            file_format=types.SimpleNamespace(value=file_format),
        )

    def is_prepared(self):
        return self._prepared

    def as_data_source(self, split):
        if self.info.file_format.value != "array_record":
            raise NotImplementedError(f"Random access data source for file format {self.info.file_format.value}")
        start, stop = split.removeprefix("train[").removesuffix("]").split(":")
        return [{"title": b"T", "text": f"Caf\u00e9 {row}".encode()} for row in range(int(start), int(stop))]

    def as_dataset(self, split, shuffle_files):
        assert not shuffle_files
        return iter(Builder("array_record", True).as_data_source(split))


def tfds_with(monkeypatch, builder):
    def find(name):
        if name != "wikipedia/20230601.en":
            raise KeyError(f"Dataset {name} not found.")
        return builder

    module = types.SimpleNamespace(builder=find, as_numpy=lambda dataset: dataset)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    monkeypatch.setattr(raw_records, "PART_RECORDS", 4)


@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
def test_a_tensorflow_dataset_is_read_in_ranges(monkeypatch, file_format):
    tfds_with(monkeypatch, Builder(file_format, prepared=True))
    monkeypatch.setitem(sys.modules, "tensorflow", types.SimpleNamespace())
    assert [part.args[2:] for part in parts("tfds:wikipedia/20230601.en")] == [(0, 4), (4, 8), (8, 9)]
    assert [record.text for record in read("tfds:wikipedia/20230601.en@train")] == [f"Café {row}" for row in range(9)]


def test_only_other_formats_need_tensorflow(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # as where it is not installed
    tfds_with(monkeypatch, Builder("array_record", prepared=True))
    assert len(read("tfds:wikipedia/20230601.en")) == 9
    tfds_with(monkeypatch, Builder("tfrecord", prepared=True))
    with pytest.raises(UserError, match="needs tensorflow .*pip install tensorflow"):
        read("tfds:wikipedia/20230601.en")


def test_a_tensorflow_dataset_that_is_not_there_is_the_users_error(monkeypatch):
    tfds_with(monkeypatch, Builder("array_record", prepared=False))
    with pytest.raises(UserError, match="is not prepared in /data/wikipedia; run `tfds build wikipedia/20230601.en"):
        parts("tfds:wikipedia/20230601.en")
    tfds_with(monkeypatch, Builder("array_record", prepared=True))
    with pytest.raises(UserError, match="has no split 'test'; it has train"):
        parts("tfds:wikipedia/20230601.en@test")
    with pytest.raises(UserError, match="tfds:wikpedia@train cannot be read .*Dataset wikpedia not found"):
        parts("tfds:wikpedia")


@pytest.mark.parametrize(("source", "module"), [("hf:cc_news", "datasets"), ("tfds:x", "tensorflow_datasets")])
def test_a_library_that_is_missing_is_named_with_how_to_install_it(monkeypatch, source, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"needs {module} .*install"):
        parts(source)
