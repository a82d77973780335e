"""Shared folders: whole files or none, on a POSIX disk and on a bucket that fails in every way that buckets do."""

import errno
import os
import stat

import pytest
from faulty_bucket import bucket, http

from realm_jax import storage
from realm_jax.errors import UserError
from realm_jax.storage import Bucket, Damaged, FileEntry, PosixFolder, StorageError, open_folder


@pytest.fixture(params=["posix", "bucket"])
def folder(request, tmp_path):
    return PosixFolder(tmp_path / "shared") if request.param == "posix" else bucket()


def test_files_are_written_listed_read_and_removed(folder):
    assert folder.names("index") == []
    folder.write("index/5-aa/MANIFEST.json", b"{}")
    folder.write("index/5-aa/b.bin", memoryview(b"12"))
    folder.write("index/5-aa/b.bin", b"123")
    assert folder.names("index") == ["5-aa"]
    assert folder.names("index/5-aa") == ["MANIFEST.json", "b.bin"]
    assert folder.read("index/5-aa/b.bin") == b"123"
    folder.remove("index/5-aa/b.bin")
    folder.remove("index/5-aa/b.bin")
    assert folder.names("index/5-aa") == ["MANIFEST.json"]
    folder.remove("index/5-aa")
    assert folder.names("index") == []
    with pytest.raises(FileNotFoundError):
        folder.read("index/5-aa/b.bin")


def test_what_is_read_is_what_was_written_or_named_as_damaged(folder):
    entry = folder.write_entry("a/b.bin", b"some vectors")
    assert folder.read_verified(entry) == b"some vectors"
    folder.write("a/b.bin", b"same vectors")
    with pytest.raises(Damaged, match="a/b.bin is damaged: its checksum"):
        folder.read_verified(entry)
    folder.write("a/b.bin", b"some")
    with pytest.raises(Damaged, match="a/b.bin has 4 bytes, not 12"):
        folder.read_verified(entry)
    folder.remove("a/b.bin")
    with pytest.raises(Damaged, match="a/b.bin is missing"):
        folder.read_verified(entry)


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff"])
def test_json_that_was_cut_is_damaged(folder, text):
    folder.write("a.json", text)
    with pytest.raises(Damaged, match="a.json"):
        folder.read_json("a.json")


# --- Buckets


def test_a_bucket_that_fails_for_a_while_is_asked_again():
    folder = bucket(write=[http(429), http(503)], read=[http(500)], list=[PermissionError("403")])
    folder.write("a/b", b"1")
    assert folder.read("a/b") == b"1"
    assert folder.names("a") == ["b"]
    assert folder.waited == [1.0, 2.0, 1.0, 1.0]


def test_a_write_that_raised_may_have_happened():
    folder = bucket(late=[http(503)])
    entry = folder.write_entry("a/b", b"1")
    assert folder.read_verified(entry) == b"1"


def test_a_bucket_that_stays_out_of_reach_is_named_after_the_last_try():
    folder = bucket(write=[http(403)] * 20)
    with pytest.raises(StorageError, match=r"memory://runs/one/a/b: cannot write it after 6 tries \(HTTP 403\)"):
        folder.write("a/b", b"1")
    assert folder.names("a") == []
    assert sum(folder.waited) == 31


def test_a_listing_never_comes_from_a_cache():
    folder = bucket()
    folder.write("a/b", b"1")
    assert folder.names("a") == ["b"]
    folder._files.pipe_file("/runs/one/a/c", b"1")  # another machine
    assert folder.names("a") == ["b", "c"]


def test_a_file_of_a_bucket_is_staged_once_and_verified(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "staging_folder", lambda: tmp_path)
    folder = bucket()
    entry = folder.write_entry("scann/0.bin", b"tree")
    path = folder.local_path(entry)
    assert path.read_bytes() == b"tree" and path.is_relative_to(tmp_path)
    folder.remove("scann/0.bin")
    assert folder.local_path(entry) == path, "it is here already"
    path.write_bytes(b"tre3")
    with pytest.raises(Damaged, match="is missing"):
        folder.local_path(entry)


def test_staging_looks_for_room_first(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "staging_folder", lambda: tmp_path)
    folder = bucket()
    entry = folder.write_entry("scann/0.bin", b"tree")._replace(bytes=1 << 60)
    with pytest.raises(UserError, match="set REALM_STAGING to a folder with more room"):
        folder.local_path(entry)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_an_unknown_kind_of_url_is_refused():
    with pytest.raises(UserError, match="sftp://host/x: readers may see incomplete files there; use one of gs, "):
        open_folder("sftp://host/x")
    with pytest.raises(UserError, match="nowhere://x: .*install a package for such URLs"):
        Bucket("nowhere://x")


def test_a_file_url_is_a_path(tmp_path):
    assert open_folder(f"file://{tmp_path}").root == tmp_path


# --- POSIX


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    folder = PosixFolder(tmp_path)
    folder.write("a/b", b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "flush_to_disk", full)
    with pytest.raises(StorageError, match="a/b: No space left on device"):
        folder.write("a/b", b"new")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/a/b'"):
        storage.write_atomic(tmp_path / "a" / "b", b"new")
    assert folder.read("a/b") == b"old"
    assert os.listdir(tmp_path / "a") == ["b"]


def test_a_local_file_is_served_in_place(tmp_path):
    folder = PosixFolder(tmp_path)
    entry = folder.write_entry("a/b", b"12")
    assert folder.local_path(entry) == tmp_path / "a" / "b"
    with pytest.raises(Damaged, match="has 2 bytes, not 3"):
        folder.local_path(FileEntry("a/b", 3, entry.sha256))


# --- Files and folders by their paths


def test_a_file_is_replaced_in_one_step(tmp_path):
    path = tmp_path / "value.json"
    storage.write_json_atomic(path, {"b": 1, "ä": [None]})
    assert storage.read_json(path) == {"b": 1, "ä": [None]}
    storage.write_atomic(path, "täxt")
    assert path.read_text(encoding="utf-8") == "täxt"
    storage.write_atomic(path, b"\xff")
    assert path.read_bytes() == b"\xff"
    assert os.listdir(tmp_path) == ["value.json"]


def test_a_failed_write_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "value"
    storage.write_atomic(path, "earlier")
    with pytest.raises(RuntimeError), storage.open_atomic(path) as stream:
        stream.write(b"half")
        raise RuntimeError
    assert path.read_text() == "earlier" and os.listdir(tmp_path) == ["value"]


def test_published_names_follow_the_umask(tmp_path):
    earlier = os.umask(0o027)
    try:
        storage.write_atomic(tmp_path / "file", "x")
        (tmp_path / "partial").mkdir(mode=0o700)
        storage.publish_folder(tmp_path / "partial", tmp_path / "final")
    finally:
        os.umask(earlier)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "final").stat().st_mode) == 0o750


def test_a_folder_is_published_under_a_free_name_only(tmp_path):
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / "content").write_text("x")
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="taken already exists; remove it or choose another folder"):
        storage.publish_folder(tmp_path / "partial", tmp_path / "taken")
    storage.publish_folder(tmp_path / "partial", tmp_path / "free")
    assert (tmp_path / "free" / "content").read_text() == "x" and not (tmp_path / "partial").exists()


def test_unreadable_json_is_named(tmp_path):
    with pytest.raises(UserError, match=r"absent\.json does not exist"):
        storage.read_json(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match=r"bad\.json is not readable JSON"):
        storage.read_json(tmp_path / "bad.json")
