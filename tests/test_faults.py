"""What may go wrong between trainer and index builder, one fault after another.

After each, every row that a step saw is embedded again from its generation's parameters and compared (`Watch`), and
training has gone on, to the same bits where it adopts at fixed steps, or has stopped with a clear word.
"""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import jax
import numpy as np
import pytest
import small_chunks
from faulty_bucket import bucket, http
from orbax.checkpoint import v1 as ocp
from runs import Cut, Watch, adoptions, assert_same, builder, cut_at, make_job, metrics, open_tiny, spoil, train, until

from realm_jax import storage
from realm_jax.errors import UserError
from realm_jax.host import Preempted, Stop
from realm_jax.refresh import build_job, watcher
from realm_jax.refresh.build_job import Job
from realm_jax.refresh.generations import (
    EXPORT,
    MANIFEST,
    IncompatibleIndex,
    current_name,
    export_step,
    generation_names,
    read_export,
    read_manifest,
    reject,
    remove_generation,
)  # fmt: skip
from realm_jax.refresh.status import Status, StatusWriter, read_status
from realm_jax.refresh.watcher import IndexWatcher
from realm_jax.storage import PosixFolder, StorageError
from realm_jax.tasks import make_task
from realm_jax.train import index_source
from realm_jax.train.built_index import BuiltIndex
from realm_jax.train.checkpoints import SavedCheckpoint

pytestmark = pytest.mark.usefixtures("quick_steps")


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "realm_jax")
    return caplog


@pytest.fixture
def before_write(monkeypatch):
    """Register what is called with the path of every file that is about to be written; it may raise."""

    def register(act):
        write = storage.open_atomic

        def watched(path):
            act(str(path))
            return write(path)

        monkeypatch.setattr(storage, "open_atomic", watched)

    return register


def fails(code, when):
    """For `before_write`: the operating system's error for the paths that `when` picks."""

    def act(path):
        if when(path):
            raise OSError(code, os.strerror(code))

    return act


def built(run):
    return {export_step(name) for name in generation_names(PosixFolder(run.workdir))}


# --- Jobs that die, come late or meet ---------------------------------------------------------------------------------


@contextmanager
def mortal_builder(run, processes):
    """A builder that dies of `Cut` and is started again as so many processes."""
    stop, ended = Stop(), threading.Event()

    def live_twice():
        with suppress(Cut, Preempted):
            make_job(run).work(stop, None, False)
        with ExitStack() as others:
            for process in range(processes):
                others.enter_context(builder(run, process, processes))
            ended.wait()

    thread = threading.Thread(target=live_twice)
    thread.start()
    try:
        yield
    finally:
        stop.requested = True
        ended.set()
        thread.join()


@pytest.mark.parametrize("write", [1, slow(2), slow(3), 4])
def test_a_builder_is_killed_and_started_again(people, sturdy, tmp_path, before_write, watch, log, write):
    """Before each of the four writes of a generation: three chunks and the manifest; then one process comes, or two."""
    run, seen = open_tiny(people, tmp_path), []

    def kill(path):
        if "/index/2-" in path:
            seen.append(path)
            if len(seen) == write:
                raise Cut

    before_write(kill)
    with mortal_builder(run, processes=1 + write % 2):
        assert_same(train(run), sturdy.final)
    watch.check(run)
    assert len(seen) > write and log.text.count("published generation 2-") >= 1


@pytest.mark.parametrize("step", [slow(4), slow(7)])
def test_a_trainer_is_killed(people, sturdy, tmp_path, monkeypatch, watch, step):
    run = open_tiny(people, tmp_path)
    cut_at(monkeypatch, step)
    with builder(run):
        with pytest.raises(Cut):
            train(run)
        assert_same(train(run), sturdy.final)
    watch.check(run)
    assert metrics(run) == metrics(sturdy.run)
    assert adoptions(run) == adoptions(sturdy.run)


def test_a_trainer_is_killed_before_it_says_that_it_is_done(people, sturdy, tmp_path, monkeypatch, log):
    """Its builder learns it from the next one, which finds nothing left to do."""
    run, update = open_tiny(people, tmp_path), StatusWriter.update

    def cut_at_the_end(self, **changes):
        if changes.get("index_done"):
            raise Cut
        update(self, **changes)

    with builder(run), monkeypatch.context() as patch:
        patch.setattr(StatusWriter, "update", cut_at_the_end)
        with pytest.raises(Cut):
            train(run)
    assert read_status(PosixFolder(run.workdir), "trainer").needs_index
    assert_same(train(run), sturdy.final)
    assert not read_status(PosixFolder(run.workdir), "trainer").needs_index


def test_two_builders_at_once(people, sturdy, tmp_path, before_write, watch, monkeypatch):
    """Neither knows of the other: work is done twice, but no chunk that somebody may read is written again."""
    run, listed, embedded = open_tiny(people, tmp_path), set(), []
    folder = PosixFolder(run.workdir)

    def listed_stay(path):
        for name in generation_names(folder):
            if (manifest := read_manifest(folder, name)) is not None:
                listed.update(folder.path(file.name) for file in manifest.files)
        assert path not in listed

    before_write(listed_stay)
    meet = threading.Barrier(2)
    embed = build_job.Builder._embed_missing

    def together(self, *rest):
        with suppress(threading.BrokenBarrierError):
            meet.wait(1.0)  # so that both begin with the same chunks
        embed(self, *rest)

    write = build_job.Builder._write

    def noted(self, name, chunk, vectors):
        embedded.append((name, chunk))
        write(self, name, chunk, vectors)

    monkeypatch.setattr(build_job.Builder, "_embed_missing", together)
    monkeypatch.setattr(build_job.Builder, "_write", noted)
    with builder(run), builder(run):
        assert_same(train(run), sturdy.final)
    watch.check(run)
    assert len(embedded) > len({*embedded}), "some chunk was embedded by both"
    assert len(listed) >= 12


@pytest.mark.slow
def test_no_builder_at_all(people, sturdy, tmp_path, watch):
    run = open_tiny(people, tmp_path, wait_seconds=0.05)
    with pytest.raises(UserError, match="the first generation did not come within config.refresh.wait_seconds=0.05"):
        train(run)
    run.config.refresh.wait_seconds = 60.0
    with builder(run):
        assert_same(train(run), sturdy.final)
    watch.check(run)


def test_the_builder_comes_first_and_ends_when_the_trainer_is_done(people, tmp_path, watch, log):
    run = open_tiny(people, tmp_path)
    thread = threading.Thread(target=make_job(run).work, args=(Stop(), None, False))
    thread.start()
    until(lambda: "waiting for exports" in log.text)
    train(run)
    thread.join(30)
    assert not thread.is_alive()
    assert read_status(PosixFolder(run.workdir), "trainer").done
    assert "the trainer needs no further index" in log.text
    watch.check(run)


def test_a_run_that_is_done_is_not_extended_and_its_builder_ends(people, sturdy, log):
    """The learning rate's schedule knows the number of steps: more of them would have been another run."""
    with pytest.raises(UserError, match=r"config.realm.steps is 20, but the run in .* has 8; set it back"):
        open_tiny(people, sturdy.run.workdir, steps=20)
    job = make_job(sturdy.run)
    job._patience = 0.1
    job.work(Stop(), None, False)
    assert "the trainer needs no further index" in log.text


def test_a_builder_that_gave_up_waiting_is_not_done(people, tmp_path, log):
    job = make_job(open_tiny(people, tmp_path))
    job._patience = 0.01
    job.work(Stop(), None, False)
    assert "no heartbeat of the trainer for 0.01 s" in log.text
    told = read_status(PosixFolder(job._run.workdir), "builder-0")
    assert (told.stage, told.done) == ("ended", False)


@pytest.mark.slow
def test_processes_that_are_killed_without_a_word(people, sturdy, tmp_path, watch):
    """SIGKILL to a real `realm build-index` while it writes; two others go on."""
    run = open_tiny(people, tmp_path, wait_seconds=300.0)
    command = [sys.executable, small_chunks.__file__, "build-index", f"--workdir={run.workdir}"]
    slow = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import small_chunks; small_chunks.shrink()\n"
    slow += "import time; from realm_jax import storage; put = storage.PosixFolder.put\n"
    slow += "storage.PosixFolder.put = lambda *args: (time.sleep(1), put(*args))[1]\n"
    slow += f"from realm_jax.cli import main as cli; cli.main({command[2:]})"
    first = subprocess.Popen([sys.executable, "-c", slow], env=os.environ)
    others = []

    def kill_and_replace():
        until(lambda: list(run.workdir.glob("index/2-*/*.bin")), 200)
        first.send_signal(signal.SIGKILL)
        for process in range(2):
            others.append(subprocess.Popen([*command, f"--process={process}", "--processes=2"], env=os.environ))

    thread = threading.Thread(target=kill_and_replace)
    thread.start()
    final = train(run)
    thread.join()
    assert first.wait(10) == -signal.SIGKILL
    assert [process.wait(120) for process in others] == [0, 0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), final, sturdy.final)
    watch.check(run)


# --- Files that are not what they should be ---------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["truncated", "flipped", "nan", "manifest"])
def test_a_generation_is_damaged(people, sturdy, tmp_path, monkeypatch, watch, log, fault):
    """Between publication and the trainer's look; the trainer adopts the second attempt in time."""
    run = open_tiny(people, tmp_path)
    build, look, damaged, gate = build_job.Builder.build, IndexWatcher._look, [], threading.Lock()

    def spoiled(self, export, embed, queries):
        with gate:
            manifest = build(self, export, embed, queries)
            if export.step == 2 and not damaged:
                damaged.append(manifest.generation)
                spoil(self.folder, manifest, fault)
        return manifest

    def gated(self):
        with gate:
            look(self)

    monkeypatch.setattr(IndexWatcher, "_look", gated)
    monkeypatch.setattr(build_job.Builder, "build", spoiled)
    with builder(run):
        assert_same(train(run), sturdy.final)
    watch.check(run)
    assert f"generation {damaged[0]} is refused: " in log.text


def test_another_process_finds_rows_damaged(copied):
    """Each process loads the rows of its own devices, so one may have ready what another refuses: it is dropped, and
    what the builder makes in its place is loaded."""
    folder = PosixFolder(copied.workdir)
    own = generation_names(folder)[-1]
    status = StatusWriter(folder, "trainer", Status("one"))
    with BuiltIndex(make_task("realm", copied), copied.config.realm.steps, {}, 1, status, lambda: False) as adoption:
        adoption._watcher.want(export_step(own), export_step(own), exactly=True)
        assert adoption._watcher.wait(10, lambda: False).generation == own
        reject(folder, own, "one of its files is damaged", again=True)
        until(lambda: adoption._watcher.wait(0, lambda: False) is None, 20)
        again = current_name(folder, read_export(folder, export_step(own)), copied.sources.passages.fingerprint)
        assert again != own
        manifest = folder.read_json(f"index/{own}/{MANIFEST}")
        folder.write_json(f"index/{again}/{MANIFEST}", manifest | {"generation": again})
        assert adoption._watcher.wait(20, lambda: False).generation == again


def test_a_generation_is_removed_while_it_is_loaded(people, sturdy, tmp_path, monkeypatch, watch, log):
    run, load, removed = open_tiny(people, tmp_path), watcher.load_parts, []

    def gone(folder, manifest, parts):
        if manifest.step == 2 and not removed:
            removed.append(manifest.generation)
            remove_generation(folder, manifest.generation)
        return load(folder, manifest, parts)

    monkeypatch.setattr(watcher, "load_parts", gone)
    with builder(run):
        assert_same(train(run), sturdy.final)
    watch.check(run)
    assert f"generation {removed[0]} was removed while it was read" in log.text
    assert log.text.count(f"published generation {removed[0]}") == 2


def test_an_export_is_half_written_while_the_builder_looks(people, sturdy, tmp_path, before_write, watch, monkeypatch):
    run, due, looks = open_tiny(people, tmp_path), Job._next_export, []

    def counted(self):
        looks.append(None)
        return due(self)

    def stall(path):
        if path.endswith(f"exports/2/{EXPORT}"):
            so_far = len(looks)
            until(lambda: len(looks) > so_far + 3)
            assert list(run.workdir.glob("exports/2/*.safetensors")) and 2 not in built(run)

    monkeypatch.setattr(Job, "_next_export", counted)
    before_write(stall)
    with builder(run):
        assert_same(train(run), sturdy.final)
    watch.check(run)


@pytest.mark.slow
def test_the_trainer_is_killed_in_the_middle_of_an_export(people, sturdy, tmp_path, before_write, watch):
    run, left = open_tiny(people, tmp_path), [EXPORT]

    def kill(path):
        if left and path.endswith(f"exports/2/{left[0]}"):
            left.clear()
            raise Cut

    before_write(kill)
    with builder(run):
        with pytest.raises(Cut):
            train(run)
        assert read_export(PosixFolder(run.workdir), 2) is None and 2 not in built(run)
        assert_same(train(run), sturdy.final)
    watch.check(run)


@pytest.mark.slow
def test_an_export_is_damaged(people, tmp_path, watch, log, monkeypatch):
    """Its towers lose their end before the builder looks. The trainer stops; started again it passes that index over,
    as nobody can make it any more."""
    run, read = open_tiny(people, tmp_path, wait_seconds=1.0), build_job.read_towers

    def cut(folder, export):
        if export.step == 2:
            folder.write(export.file.name, folder.read(export.file.name)[:-9])
        return read(folder, export)

    monkeypatch.setattr(build_job, "read_towers", cut)
    with builder(run):
        with pytest.raises(UserError, match="the generation of step 2, due at step 3 did not come within"):
            train(run)
        assert "bytes, not " in log.text and 2 not in built(run)
        run.config.refresh.wait_seconds = 60.0
        train(run)
    assert "exports/2 is not there; continuing with the index of step 0 until the next one is due" in log.text
    assert adoptions(run) == [(0, 0), (5, 4), (7, 6)]
    watch.check(run)


# --- What belongs to something else -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer", "corpus", "towers"])
def test_a_builder_of_something_else(copied, name):
    """Another tokenizer, another corpus, or vectors of another type than the trainer wants."""
    folder = PosixFolder(copied.workdir)
    job = make_job(copied)
    if name == "towers":
        job._run.config.model.dtype = "bfloat16"
    else:
        folder.write_json(f"exports/6/{EXPORT}", folder.read_json(f"exports/6/{EXPORT}") | {name: "another"})
    with pytest.raises(UserError, match=f"exports/6 was written by a run with other {name}; give this command the"):
        job.work(Stop(), 6, True)


@pytest.mark.parametrize("name", [slow("tokenizer"), slow("corpus")])
def test_a_generation_of_another_tokenizer_or_corpus(people, sturdy, tmp_path, watch, log, name):
    """It has the right name, and is skipped; nothing comes in its place until somebody removes it."""
    run = open_tiny(people, tmp_path, wait_seconds=2.0)
    folder = PosixFolder(run.workdir)
    [own] = [name for name in generation_names(PosixFolder(sturdy.run.workdir)) if export_step(name) == 2]
    manifest = PosixFolder(sturdy.run.workdir).read_json(f"index/{own}/{MANIFEST}")
    folder.write_json(f"index/{own}/{MANIFEST}", manifest | {name: "another"})
    with builder(run):
        with pytest.raises(UserError, match="the generation of step 2, due at step 3 did not come within"):
            train(run)
        assert f"its {name} is another, not" in log.text
        remove_generation(folder, own)
        run.config.refresh.wait_seconds = 60.0
        assert_same(train(run), sturdy.final)
    watch.check(run)


def test_a_generation_of_another_name(copied):
    """Names follow from parameters and corpus, so that others are not even looked at; asked for, they are refused."""
    folder = PosixFolder(copied.workdir)
    own = generation_names(folder)[-1]
    manifest = folder.read_json(f"index/{own}/{MANIFEST}")
    foreign = f"{export_step(own)}-f123abcd"
    folder.write_json(f"index/{foreign}/{MANIFEST}", manifest | {"generation": foreign, "corpus": "another"})
    status = StatusWriter(folder, "trainer", Status("one"))
    with BuiltIndex(make_task("realm", copied), copied.config.realm.steps, {}, 1, status, lambda: False) as adoption:
        adoption._watcher.want(0, 100)
        assert adoption._watcher.wait(10, lambda: False).generation == own
        with pytest.raises(IncompatibleIndex, match="its corpus is another, not"):
            adoption._watcher.load(foreign)


def test_a_shared_folder_of_another_run(people, sturdy, tmp_path):
    run = open_tiny(people, tmp_path / "run", shared=str(sturdy.run.workdir))
    with pytest.raises(UserError, match=r"config.refresh.shared: .* is another run's"):
        train(run)


# --- Storage that does not take more ----------------------------------------------------------------------------------


def test_the_disk_is_full_for_a_while(people, sturdy, tmp_path, before_write, watch, log):
    """The builder tries again and loses nothing."""
    run, left = open_tiny(people, tmp_path), ["full"] * 3
    before_write(fails(errno.ENOSPC, lambda path: "/index/2-" in path and ".bin" in path and left and left.pop()))
    with builder(run):
        assert_same(train(run), sturdy.final)
    watch.check(run)
    assert not left and log.text.count("No space left on device; trying again") == 3


def test_the_disk_is_full_for_exports(people, tmp_path, before_write, watch, log):
    """Storage takes the first export and no other: training goes on with what it has."""
    run = open_tiny(people, tmp_path, adopt_after=-1)
    before_write(fails(errno.ENOSPC, lambda path: "/exports/" in path and "/exports/0/" not in path))
    with builder(run):
        train(run)
    watch.check(run)
    assert "the export of step 2 is not written yet: " in log.text and "No space left on device" in log.text
    assert "the export of step 4 is left out: an earlier one is still being written" in log.text
    assert "the export of step 2 is given up" in log.text
    assert {index for _, index in adoptions(run)} == {0}


@pytest.mark.slow
def test_the_disk_is_full_for_a_checkpoint(people, sturdy, tmp_path, monkeypatch, watch):
    """Training stops with a word, and goes on from the checkpoint before."""
    run, write = open_tiny(people, tmp_path), ocp.training.Checkpointer.save_checkpointables_async

    def full(self, step, *rest, **options):
        if step == 6:
            raise ValueError("RESOURCE_EXHAUSTED: Failed writing")
        return write(self, step, *rest, **options)

    with builder(run):
        with monkeypatch.context() as patch:
            patch.setattr(ocp.training.Checkpointer, "save_checkpointables_async", full)
            with pytest.raises(StorageError, match="a checkpoint could not be written .*RESOURCE_EXHAUSTED.*make room"):
                train(run)
        assert SavedCheckpoint.newest(tmp_path / "realm" / "checkpoints").step == 3
        assert_same(train(run), sturdy.final)
    watch.check(run)


def test_a_bucket_that_fails_now_and_then(people, sturdy, tmp_path, monkeypatch, watch, log):
    """Writes that raise before or after they happened, reads and listings that raise: tried again, never half done."""
    some = [None, http(503), None, None, http(429), None, None]
    folder = bucket(
        write=some * 20, late=some[3:] * 20, read=some * 40, list=[None, *some, PermissionError("403")] * 40
    )
    monkeypatch.setattr(index_source, "open_folder", lambda url: folder)
    run = open_tiny(people, tmp_path, shared="memory://runs/one")
    with builder(run):
        assert_same(train(run), sturdy.final)
    watch.check(run)
    assert {0, 2, 4, 6} == {export_step(name) for name in generation_names(folder)}
    for what in ("write", "read", "list"):
        assert f"cannot {what} it (" in log.text
    assert not list(tmp_path.glob("index")), "everything that is shared is in the bucket"


@pytest.mark.slow
def test_shared_storage_becomes_read_only(people, tmp_path, before_write, watch, log):
    """After the first generation: both jobs say so, training goes on, and the run ends whole."""
    shared = tmp_path / "shared"
    run = open_tiny(people, tmp_path / "run", adopt_after=-1, shared=str(shared))
    before_write(fails(errno.EROFS, lambda path: str(shared) in path and list(shared.glob(f"index/0-*/{MANIFEST}"))))
    with builder(run):
        final = train(run)
    watch.check(run)
    assert f"jobs/trainer.json: {os.strerror(errno.EROFS)}; other jobs cannot see that the trainer goes on" in log.text
    assert f"the export of step 2 is not written yet: {shared}/exports/2/" in log.text
    assert "other jobs cannot see that the trainer is done" in log.text
    assert {index for _, index in adoptions(run)} == {0}
    assert_same(train(run), final)


@pytest.mark.slow
def test_the_disk_stays_full_for_an_export_that_is_due(people, sturdy, tmp_path, before_write, monkeypatch, watch, log):
    """With several on their way nobody waits for its generation yet; the trainer saves, and stops in time."""
    run, left = open_tiny(people, tmp_path, wait_seconds=2.0), ["full"]
    monkeypatch.setattr("realm_jax.train.built_index.EXPORT_SECONDS", 0.5)
    monkeypatch.setattr("realm_jax.train.built_index.HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setattr("realm_jax.refresh.exporter.RETRY_SECONDS", 0.1)
    run.config.refresh.adopt_after = 5
    before_write(fails(errno.ENOSPC, lambda path: left and "/exports/2/" in path))
    with builder(run):
        with pytest.raises(UserError, match="an export could not be written within config.refresh.wait_seconds=2"):
            train(run)
        assert SavedCheckpoint.newest(tmp_path / "realm" / "checkpoints").step == 4
        left.clear()
        run.config.refresh.wait_seconds = 60.0
        train(run)
    watch.check(run)


def test_a_trainer_that_cannot_clear_up_at_its_start_hears_sigterm(people, tmp_path, monkeypatch):
    """Exports of rolled-back steps cannot be removed."""
    task = make_task("realm", open_tiny(people, tmp_path))
    PosixFolder(tmp_path).write("exports/90/EXPORT.json", b"{}")

    def read_only(self, name):
        raise StorageError(f"{name}: Read-only file system")

    requested = []

    def stopping():
        requested.append(len(requested) == 2)
        return requested[-1]

    monkeypatch.setattr(PosixFolder, "remove", read_only)
    with pytest.raises(StorageError, match="exports/90/EXPORT.json: Read-only file system"):
        with BuiltIndex(task, 0, {}, 1, StatusWriter(PosixFolder(tmp_path), "trainer", Status("one")), stopping):
            pass
    assert requested == [False, False, True], "it tries again until it is told, and then no more"


def test_shared_storage_is_read_only_from_the_start(people, tmp_path, before_write):
    shared = tmp_path / "shared"
    run = open_tiny(people, tmp_path / "run", shared=str(shared))
    before_write(fails(errno.EROFS, lambda path: str(shared) in path))
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"shared/jobs/trainer.json: Read-only file system"):
        train(run)
    assert time.monotonic() - began < run.config.refresh.wait_seconds / 2, "nobody waits for what cannot come"
