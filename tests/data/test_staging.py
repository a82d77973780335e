"""A prepared folder in a bucket: made there by Beam, copied to the disk once, and never trusted when it is damaged."""

import json
import shutil
import threading

import fsspec
import pytest
from capitals import digests
from tiny_run import PEOPLE, prepare_people

from realm_jax.cli import main as cli
from realm_jax.cli.prepare import prepare
from realm_jax.data import staging
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.storage import StorageError, open_folder

URL = "memory://bucket/data"
BEAM = "--runner=DirectRunner --direct_num_workers=2 --direct_running_mode=multi_threading"


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """An empty bucket, and a folder for what is copied from it."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    monkeypatch.setattr(staging, "staging_folder", lambda: tmp_path / "staged")
    yield tmp_path
    files.store.clear()


@pytest.fixture
def in_bucket(disk, passages, questions):
    pytest.importorskip("apache_beam")
    prepare(passages, URL, questions=[questions], vocabulary_size=300, shards=2, beam=BEAM)
    return passages, questions


def test_what_workers_put_into_a_bucket_is_what_processes_write(in_bucket, disk):
    prepare(in_bucket[0], disk / "data", questions=[in_bucket[1]], vocabulary_size=300, shards=2)
    copy = staging.staged(URL)
    (copy / ".lock").unlink()
    assert digests(copy) == digests(disk / "data")
    assert "articles" not in open_folder(URL).names(), "what was made on the way is gone"
    sources = open_sources(URL)
    assert len(sources.passages) == 3 and sources.questions["dev"][0].answers == ["1624", "in the year 1624"]


def test_it_is_copied_once_and_after_an_edit_only_what_is_new(in_bucket, disk, monkeypatch, tmp_path):
    copy = staging.staged(URL)
    times = {path: path.stat().st_mtime_ns for path in copy.rglob("*.npy")}
    with monkeypatch.context() as patch:
        patch.setattr(staging, "_copy", lambda *_: pytest.fail("copied again"))
        staging.staged(URL)
    shutil.copytree(copy, tmp_path / "data")
    (tmp_path / "new.jsonl").write_text(json.dumps({"id": "bern", "text": "Bern is the capital of Switzerland."}))
    assert cli.main(f"corpus add {tmp_path}/new.jsonl --data={tmp_path}/data".split()) == 0
    for path in (tmp_path / "data").rglob("*"):
        if path.is_file():
            open_folder(URL).write(str(path.relative_to(tmp_path / "data")), path.read_bytes())
    assert len(open_sources(URL).passages) == 4
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_damaged_copy_is_refused_and_made_again(in_bucket, disk):
    name = "passages/segment-00000/texts.utf8"
    whole = open_folder(URL).read(name)
    open_folder(URL).write(name, whole[:-1] + bytes([whole[-1] ^ 1]))
    for _ in range(2):
        with pytest.raises(UserError, match=r"texts.utf8 is damaged"):
            open_sources(URL)
    open_folder(URL).write(name, whole)
    assert len(open_sources(URL).passages) == 3


def test_what_cannot_be_staged_is_said(disk, passages, capsys):
    with pytest.raises(UserError, match=f"config.data.path={URL}: not a prepared folder"):
        open_sources(URL)
    with pytest.raises(UserError, match=f"--output={URL}: only --beam writes to a bucket; add --beam"):
        prepare(passages, URL)
    assert cli.main(f"corpus remove paris --data={URL}".split()) == 2
    assert "a corpus in a bucket cannot be edited" in capsys.readouterr().err


def test_a_disk_without_room_is_named(in_bucket, disk, monkeypatch):
    monkeypatch.setattr(staging, "MARGIN", 1 << 60)
    with pytest.raises(StorageError, match="free; set REALM_STAGING to a folder with more room"):
        staging.staged(URL)


def test_files_are_fetched_side_by_side(disk, monkeypatch):
    data, bucket = prepare_people(disk), type(open_folder(URL))
    for path in data.rglob("*"):
        if path.is_file():
            open_folder(URL).write(str(path.relative_to(data)), path.read_bytes())
    two = sorted(str(path.relative_to(data)) for path in data.rglob("*.npy"))[:2]
    both, read = threading.Barrier(2), bucket.read

    def waiting(self, name):
        if name in two:
            both.wait(20)  # BrokenBarrierError where one is read after the other
        return read(self, name)

    monkeypatch.setattr(bucket, "read", waiting)
    assert len(open_sources(URL).passages) == len(PEOPLE)
