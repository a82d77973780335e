"""Shared paths: a file or folder appears whole or not at all."""

import os
import stat

import pytest

from realm_jax import storage
from realm_jax.errors import UserError


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
