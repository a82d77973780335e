"""A checkpoint that is asked: its copy has the same bits, is compared with the checksums, and is never trusted."""

import jax
import numpy as np
import pytest

from realm_jax.train.cached_checkpoint import CachedCheckpoint
from realm_jax.train.checkpoints import SavedCheckpoint

NETWORKS = ("query_embedder", "reader")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache; its folder of copies."""
    monkeypatch.setenv("REALM_CACHE", str(tmp_path))
    monkeypatch.setenv("REALM_CACHE_BYTES", "1000000")
    return tmp_path / "opened"


def read(run, kind=CachedCheckpoint):
    """What a question needs."""
    saved = kind.newest(run.workdir / "qa" / "checkpoints")
    return saved.params(NETWORKS), saved.read("vectors")


def check_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


@pytest.fixture
def no_checkpoint(monkeypatch):
    """Call it, and from then on a checkpoint's arrays cannot be read."""

    def forbid():
        for name in ("params", "read"):
            monkeypatch.setattr(SavedCheckpoint, name, lambda *_: pytest.fail("the copy has it"))

    return forbid


def test_the_second_reading_is_of_the_copy_and_has_the_same_bits(trained_run, cache, no_checkpoint):
    expected = read(trained_run, SavedCheckpoint)
    check_same(read(trained_run), expected)
    no_checkpoint()
    check_same(read(trained_run), expected)


def flipped(data: bytes) -> bytes:
    """With another bit in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("files, harm", [("*", flipped), ("*.npy", lambda _: b""), ("*.json", lambda _: b"")])
def test_a_damaged_copy_is_told_and_made_again(trained_run, cache, caplog, no_checkpoint, files, harm):
    expected = read(trained_run)
    for file in sorted(cache.glob(f"*/{files}")):
        file.write_bytes(harm(file.read_bytes()))
    check_same(read(trained_run), expected)
    assert caplog.text.count("is damaged or cannot be read; the checkpoint is read again") == 3
    no_checkpoint()
    check_same(read(trained_run), expected)


def test_a_copy_of_another_checkpoint_is_not_looked_at(trained_run, cache):
    read(trained_run)
    folder = trained_run.workdir / "ict" / "checkpoints"
    check_same(*(kind.newest(folder).params(NETWORKS[:1]) for kind in (CachedCheckpoint, SavedCheckpoint)))
    assert len(list(cache.iterdir())) == 2


def test_nothing_is_copied_where_nothing_may_be_kept(trained_run, cache, monkeypatch):
    monkeypatch.setenv("REALM_CACHE_BYTES", "0")
    read(trained_run)
    assert not cache.exists()
    monkeypatch.setenv("REALM_CACHE_BYTES", "1")
    read(trained_run)
    assert not cache.exists()


def test_what_was_not_saved_is_not_there(trained_run, cache):
    assert CachedCheckpoint.newest(trained_run.workdir / "qa" / "checkpoints").read("in_flight") is None
