"""Checkpoints that went bad, storage that fails, and those that stay."""

import errno
import json
import logging
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.checkpointers import async_checkpointer
from runs import STEPS, assert_same_run, cut_off, open_inline, train_measured

from realm_jax.cli import main as cli
from realm_jax.errors import UserError
from realm_jax.host import Preempted, signal_handler
from realm_jax.indexing.control import SaveState
from realm_jax.storage import StorageError, record_digest
from realm_jax.train import checkpoints
from realm_jax.train.checkpoints import SavedCheckpoint, saved_folders
from realm_jax.train.recipe import preemptible

pytestmark = pytest.mark.usefixtures("quick_steps")


def flip(folder: Path, rng: np.random.Generator) -> None:
    """Flip one bit of one file of a checkpoint, files chosen by their size."""
    files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file() and path.stat().st_size]
    sizes = np.array([path.stat().st_size for path in files], float)
    path = files[rng.choice(len(files), p=sizes / sizes.sum())]
    content = bytearray(path.read_bytes())
    content[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)


def test_a_disk_that_is_full_for_a_checkpoint_is_named_without_the_tracebacks_of_threads(tmp_path):
    """As TensorStore and Orbax 0.12 report it."""
    fault = ValueError(f'RESOURCE_EXHAUSTED: Failed writing: "{300 * "x"}": No space left on device [os_error_code]')
    message = r"saves: a checkpoint could not be written \(No space left on device\); check the storage, then"
    with checkpoints.Checkpoints(tmp_path / "saves", keep=1) as saves, pytest.raises(StorageError, match=message):
        with saves._writing():
            raise fault
    (is_logged,) = logging.getLogger("absl").filters[-1:]
    for level, module, wanted in (
        (logging.ERROR, "orbax/checkpoint/_src/futures/future.py", False),
        (logging.WARNING, "orbax/checkpoint/_src/futures/future.py", True),
        (logging.ERROR, "jax/_src/interpreters/pxla.py", True),
    ):
        record = logging.LogRecord("absl", level, f"/lib/{module}", 1, "raised an exception", (), None)
        assert is_logged(record) is wanted


def fail_saves(monkeypatch, count: int) -> list[OSError]:
    """Let the next saves fail in the background, as on a full disk; returns the faults that are left."""
    commit = async_checkpointer._background_wait_for_commit_futures
    faults = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) for _ in range(count)]

    def fail(directory, writes, *args, **keywords):
        if not faults:
            return commit(directory, writes, *args, **keywords)
        for write in writes:
            write.result()
        raise faults.pop()

    monkeypatch.setattr(async_checkpointer, "_background_wait_for_commit_futures", fail)
    return faults


def test_a_failed_save_is_reported_and_the_next_one_removes_its_files(tmp_path, monkeypatch, caplog):
    fail_saves(monkeypatch, 1)
    with checkpoints.Checkpoints(tmp_path, keep=2) as saves:
        saves.save(3, {"bias": np.zeros(2)}, {}, {})
        assert saves.finish() == saves.state == SaveState.FAILED
        with pytest.raises(StorageError, match=r"could not be written \(No space left on device\)"):
            saves.wait()
        assert caplog.text.count("could not be written") == 1
        saves.save(4, {"bias": np.ones(2)}, {}, {})
        saves.wait()
        assert saves.state == SaveState.COMPLETE
    assert [path.name for path in tmp_path.iterdir()] == ["4"]
    assert SavedCheckpoint.newest(tmp_path).read("state")["bias"].tolist() == [1, 1]


@pytest.mark.parametrize(("failures", "saved"), [(1, ["8", "7"]), (2, ["8"])])
def test_training_goes_on_after_a_failed_save_and_repeats_it(
    people, straight, tmp_path, monkeypatch, caplog, failures, saved
):
    """The save of step 4 fails, and perhaps that of step 7, with which it is repeated."""
    faults, save = fail_saves(monkeypatch, failures), checkpoints.Checkpoints.save

    def save_and_finish(saves, *args):  # so that the step in which the failure is noticed does not depend on the clock
        save(saves, *args)
        saves.finish()

    monkeypatch.setattr(checkpoints.Checkpoints, "save", save_and_finish)
    run = open_inline(people, tmp_path, checkpoint__every=4)
    train_measured(run)
    assert not faults and caplog.text.count("could not be written") == failures
    assert [folder.name for folder in saved_folders(tmp_path / "realm" / "checkpoints")] == saved
    assert_same_run(run, straight)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_bit_of_a_checkpoint_changes_no_result(people, straight, tmp_path, monkeypatch, caplog, seed):
    """Cut off after step 4, whose checkpoint then goes bad: training goes on from step 2, to the same bits. A bit that
    no array needs may go unnoticed."""
    run = open_inline(people, tmp_path)
    cut_off(monkeypatch, lambda: train_measured(run), 5)
    newest = saved_folders(tmp_path / "realm" / "checkpoints")[0]
    assert newest.name == "4"
    flip(newest, np.random.default_rng(seed))
    train_measured(run)
    is_noticed = f"{newest} is damaged" in caplog.text
    assert is_noticed == ("falling back to the previous checkpoint" in caplog.text) and (is_noticed or seed > 0)
    assert_same_run(run, straight)


def test_checkpoints_are_listed_and_verified(straight, tmp_path, capsys):
    shutil.copytree(straight.workdir, tmp_path / "run")
    last = f"realm/{STEPS}"

    def storage(*words):
        code = cli.main(["storage", *words, f"--workdir={tmp_path}/run"])
        return code, capsys.readouterr().out

    def storage_json(*words):
        code, lines = storage(*words, "--json")
        return code, [json.loads(line) for line in lines.splitlines()]

    code, entries = storage_json("ls")
    listed = {entry["checkpoint"]: entry["state"] for entry in entries}
    assert code == 0 and listed[last] == "complete"
    code, told = storage("verify")
    assert code == 0 and told.count(": sound (") == len(listed)
    code, entries = storage_json("verify")
    assert code == 0 and {entry["name"]: entry["state"] for entry in entries} == dict.fromkeys(listed, "sound")
    flip(tmp_path / "run" / "realm" / "checkpoints" / str(STEPS), np.random.default_rng(0))
    code, told = storage("verify", last)
    assert code == 1 and f"{last}: DAMAGED: " in told
    code, [entry] = storage_json("verify", last)
    assert code == 1 and entry["state"] == "damaged" and "damaged" in entry["reason"] and entry["seconds"] >= 0
    assert storage("verify", "realm/77")[0] == 2


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_while_a_checkpoint_is_read_is_no_damage(straight, monkeypatch, number, error):
    """Orbax catches every BaseException there. A shell's background jobs ignore SIGINT, so its handler is set."""
    metadata = ocp.checkpointables_metadata

    def swallowing(path):
        with suppress(BaseException):
            os.kill(os.getpid(), number)
        return metadata(path)

    monkeypatch.setattr(ocp, "checkpointables_metadata", swallowing)
    folder = straight.workdir / "realm" / "checkpoints"
    names = [entry.name for entry in saved_folders(folder)]
    with signal_handler(signal.SIGINT, signal.default_int_handler), preemptible(), pytest.raises(error):
        SavedCheckpoint.newest_intact(folder, lambda saved: saved.read("state"))
    assert [entry.name for entry in saved_folders(folder)] == names


def test_storage_that_fails_is_no_damage(straight, tmp_path, monkeypatch):
    """Nothing is set aside; and the same step may be damaged twice, or lack the file that makes it a checkpoint."""
    folder, error = tmp_path / "checkpoints", OSError(5, "Input/output error")
    shutil.copytree(straight.workdir / "realm" / "checkpoints", folder)
    names = {entry.name for entry in folder.iterdir()}
    message = "could not be read .OSError: .Errno 5. Input/output error.; run the command again"
    with monkeypatch.context() as patch, pytest.raises(StorageError, match=message):
        patch.setattr(type(saved_folders(folder)[0]), "read_bytes", Mock(side_effect=error))
        SavedCheckpoint.newest_intact(folder, lambda saved: saved.step)
    assert {entry.name for entry in folder.iterdir()} == names
    for _ in range(2):
        shutil.copytree(folder / str(STEPS - 2), folder / str(STEPS), dirs_exist_ok=True)
        (folder / str(STEPS) / "_CHECKPOINT_METADATA").write_text("{")
        assert SavedCheckpoint.newest_intact(folder, lambda saved: saved.step) == STEPS - 2
    assert {f"{STEPS}.damaged", f"{STEPS}.damaged2"} <= {entry.name for entry in folder.iterdir()}


def test_when_all_are_damaged_training_stops(people, straight, tmp_path):
    shutil.copytree(straight.workdir, tmp_path, dirs_exist_ok=True)
    for folder in saved_folders(tmp_path / "realm" / "checkpoints"):
        flip(folder, np.random.default_rng(0))
    with pytest.raises(UserError, match="every checkpoint is damaged; start in another --workdir"):
        train_measured(open_inline(people, tmp_path))


def test_where_memory_is_short_a_save_holds_what_a_step_may_overwrite(tmp_path, monkeypatch):
    """A few arrays are copied at a time, all of them before training goes on and donates them."""
    monkeypatch.setattr(checkpoints, "releases_memory", lambda: True)
    monkeypatch.setattr(checkpoints, "COPY_BYTES", 1)
    state = {str(number): jnp.full((64, 64), float(number)) for number in range(20)} | {"step": jnp.asarray(3)}
    vectors = np.ones((1000, 8), np.float32)
    with checkpoints.Checkpoints(tmp_path / "saves", keep=1) as saves:
        saves.save(3, state, {"vectors": vectors}, {})
        donate = jax.jit(lambda tree: jax.tree.map(lambda x: x - 1, tree), donate_argnums=0)
        jax.block_until_ready(donate(state))
    saved = SavedCheckpoint.newest(tmp_path / "saves")
    assert saved is not None
    like = {str(number): np.empty((64, 64), np.float32) for number in range(20)} | {"step": np.empty((), np.int32)}
    found = saved.read("state", like)  # whose checksums are compared
    assert [float(found[str(number)][0, 0]) for number in range(20)] == [float(number) for number in range(20)]
    assert np.array_equal(saved.read("vectors"), vectors)


def test_damage_is_reported_with_the_name_of_the_array(tmp_path):
    with checkpoints.Checkpoints(tmp_path, keep=1) as saves:
        saves.save(3, {"bias": np.ones(2), "kernel": np.arange(4.0)}, {}, {})
    (tmp_path / "3" / "CHECKSUMS.json").write_text("{}")  # as earlier versions wrote it
    assert SavedCheckpoint.newest_intact(tmp_path, lambda saved: saved.read("state"))["kernel"].tolist() == [0, 1, 2, 3]
    record_file = tmp_path / "3" / checkpoints.METADATA
    content = json.loads(record_file.read_text())
    record = content["custom_metadata"]
    record["checksums"]["state.kernel"][0] ^= 1
    record_file.write_text(json.dumps(content | {"custom_metadata": record | {"digest": record_digest(record)}}))
    with pytest.raises(UserError, match=r"3 is damaged \(state\.kernel does not match the checksums of the save\)"):
        SavedCheckpoint.newest(tmp_path).verify()
