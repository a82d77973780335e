"""What may go wrong between trainer and index builder, one fault after another.

After each, every row that a step saw is embedded again from its generation's parameters and compared (`Watch`), and
training has gone on, to the same bits where it adopts at fixed steps, or has stopped with a clear word.
"""

import errno
import logging
import os
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest
from faulty_bucket import bucket, http
from orbax.checkpoint import v1 as ocp
from runs import (
    Cut,
    Watch,
    adoptions,
    assert_same,
    builder,
    cut_at,
    make_job,
    metrics,
    open_tiny,
    set_key,
    spoil,
    train,
    train_with_builder,
    until,
)

from realm_jax import storage
from realm_jax.errors import UserError
from realm_jax.host import Preempted, Stop
from realm_jax.indexing import files as generations
from realm_jax.indexing import job as build_job
from realm_jax.indexing import watcher
from realm_jax.indexing.async_provider import AsyncIndexProvider
from realm_jax.indexing.files import EXPORT, MANIFEST, export_step, generation_names, read_export
from realm_jax.indexing.heartbeat import Status, StatusWriter, read_status
from realm_jax.indexing.job import Job
from realm_jax.indexing.watcher import IndexWatcher
from realm_jax.storage import PosixFolder, StorageError
from realm_jax.tasks import make_task
from realm_jax.train.checkpoints import SavedCheckpoint

pytestmark = pytest.mark.usefixtures("quick_steps")


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture
def run(people, tmp_path):
    return open_tiny(people, tmp_path)


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, "realm_jax")
    return caplog


@pytest.fixture
def ends_the_same(sturdy, watch):
    """Trains beside a builder to the bits of the undisturbed run."""

    def run_to_the_end(run, beside=builder):
        with beside(run):
            assert_same(train(run), sturdy.final)
        watch.check(run)

    return run_to_the_end


@pytest.fixture
def stops(sturdy, watch):
    """Beside a builder training stops; the fault is looked at and removed in the block, then training ends the same.

    same: as the undisturbed run; False where generations are adopted at other steps.
    """

    @contextmanager
    def stopped(run, error, match=None, same=True):
        with builder(run):
            with pytest.raises(error, match=match):
                train(run)
            yield
            set_key(run, "refresh.wait_seconds", 60.0)
            final = train(run)
        if same:
            assert_same(final, sturdy.final)
        watch.check(run)

    return stopped


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


@pytest.fixture
def cut_at_write(before_write):
    """The power goes off before a write of such files, the first one or a later one; gives what came so far."""

    def register(part, number=1):
        paths = []

        def cut(path):
            if part in path:
                paths.append(path)
                if len(paths) == number:
                    raise Cut

        before_write(cut)
        return paths

    return register


def built(run):
    return {export_step(name) for name in generation_names(PosixFolder(run.workdir))}


# --- Jobs that die, come late or meet ---------------------------------------------------------------------------------


def mortal_builder(processes):
    """A builder that dies of `Cut` and is started again as so many processes."""

    @contextmanager
    def beside(run):
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

    return beside


@pytest.mark.parametrize("write", [1, slow(2), slow(3), 4])
def test_a_builder_is_killed_and_started_again(run, ends_the_same, cut_at_write, log, write):
    """Before each of the four writes of a generation: three chunks and the manifest; then one process comes, or two."""
    written = cut_at_write("/index/2-", write)
    ends_the_same(run, mortal_builder(processes=1 + write % 2))
    assert len(written) > write and log.text.count("published generation 2-") >= 1


@pytest.mark.parametrize("step", [slow(4), slow(7)])
def test_a_trainer_is_killed(run, sturdy, stops, monkeypatch, step):
    cut_at(monkeypatch, step)
    with stops(run, Cut):
        pass
    assert metrics(run) == metrics(sturdy.run)
    assert adoptions(run) == adoptions(sturdy.run)


@pytest.mark.slow
def test_a_trainer_is_killed_before_it_says_that_it_is_done(run, sturdy, monkeypatch):
    """Its builder learns it from the next one, which finds nothing left to do."""
    folder, update = PosixFolder(run.workdir), StatusWriter.update

    def cut_at_the_end(self, **changes):
        if changes.get("index_done"):
            raise Cut
        update(self, **changes)

    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(StatusWriter, "update", cut_at_the_end)
        train_with_builder(run)
    assert read_status(folder, "trainer").needs_index
    assert_same(train(run), sturdy.final)
    assert not read_status(folder, "trainer").needs_index


@pytest.mark.slow
def test_two_builders_at_once(run, ends_the_same, before_write):
    """Neither knows of the other, and no chunk that somebody may read is written again."""
    listed, folder = set(), PosixFolder(run.workdir)

    def listed_stay(path):
        for name in generation_names(folder):
            if (manifest := generations.read_manifest(folder, name)) is not None:
                listed.update(folder.path(file.name) for file in manifest.files)
        assert path not in listed

    before_write(listed_stay)
    with builder(run):
        ends_the_same(run)
    assert len(listed) >= 12


@pytest.mark.slow
def test_no_builder_at_all(people, ends_the_same, tmp_path):
    run = open_tiny(people, tmp_path, wait_seconds=0.05)
    with pytest.raises(UserError, match="the first generation did not come within config.refresh.wait_seconds=0.05"):
        train(run)
    set_key(run, "refresh.wait_seconds", 60.0)
    ends_the_same(run)


def test_the_builder_comes_first_and_ends_when_the_trainer_is_done(run, watch, log):
    thread = threading.Thread(target=make_job(run).work, args=(Stop(), None, False))
    thread.start()
    until(lambda: "waiting for exports" in log.text)
    train(run)
    thread.join(30)
    assert not thread.is_alive() and read_status(PosixFolder(run.workdir), "trainer").done
    assert "the trainer needs no further index" in log.text
    watch.check(run)


def test_a_run_that_is_done_is_not_extended_and_its_builder_ends(people, sturdy, tmp_path, log):
    """The learning rate's schedule knows the number of steps: more of them would have been another run. A builder that
    gives up waiting for a trainer is not done."""
    with pytest.raises(UserError, match=r"config.realm.steps is 20, but the run in .* has 8; set it back"):
        open_tiny(people, sturdy.run.workdir, steps=20)
    for run, word in ((sturdy.run, "needs no further index"), (open_tiny(people, tmp_path), "no heartbeat of the tr")):
        job = make_job(run)
        job._patience = 0.01
        job.work(Stop(), None, False)
        assert word in log.text
    told = read_status(PosixFolder(tmp_path), "builder-0")
    assert (told.stage, told.done) == ("ended", False)


# --- Files that are not what they should be ---------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [slow("truncated"), "flipped", slow("nan"), "manifest"])
def test_a_generation_is_damaged(run, ends_the_same, monkeypatch, log, fault):
    """Between publication and the trainer's look; the trainer adopts the second attempt in time."""
    build, look, damaged, gate = build_job.Builder.build, IndexWatcher._poll, [], threading.Lock()

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

    monkeypatch.setattr(IndexWatcher, "_poll", gated)
    monkeypatch.setattr(build_job.Builder, "build", spoiled)
    ends_the_same(run)
    assert f"generation {damaged[0]} is rejected: " in log.text


@contextmanager
def adopting(run):
    """The newest generation of a run, and what looks for others."""
    status = StatusWriter(PosixFolder(run.workdir), "trainer", Status("one"))
    with AsyncIndexProvider(make_task("realm", run), run.config.realm.steps, {}, 1, status, lambda: False) as adoption:
        yield generation_names(PosixFolder(run.workdir))[-1], adoption._watcher


def test_another_process_finds_rows_damaged(copied):
    """Each process loads the rows of its own devices, so one may have ready what another refuses: it is dropped, and
    what the builder makes in its place is loaded."""
    folder = PosixFolder(copied.workdir)
    with adopting(copied) as (own, watching):
        watching.request_steps(export_step(own), export_step(own), exactly=True)
        assert watching.wait(10, lambda: False).generation == own
        generations.reject(folder, own, "one of its files is damaged", retryable=True)
        until(lambda: watching.wait(0, lambda: False) is None, 20)
        export, corpus = read_export(folder, export_step(own)), copied.sources.passages.fingerprint
        again = generations.current_name(folder, export, corpus)
        assert again != own
        manifest = folder.read_json(f"index/{own}/{MANIFEST}")
        folder.write_json(f"index/{again}/{MANIFEST}", manifest | {"generation": again})
        assert watching.wait(20, lambda: False).generation == again


def test_a_generation_of_another_name(copied):
    """Names follow from parameters and corpus, so that others are not even looked at; asked for, they are refused."""
    folder = PosixFolder(copied.workdir)
    with adopting(copied) as (own, watching):
        manifest, foreign = folder.read_json(f"index/{own}/{MANIFEST}"), f"{export_step(own)}-f123abcd"
        folder.write_json(f"index/{foreign}/{MANIFEST}", manifest | {"generation": foreign, "corpus": "another"})
        watching.request_steps(0, 100)
        assert watching.wait(10, lambda: False).generation == own
        with pytest.raises(generations.IncompatibleIndex, match="its corpus is another, not"):
            watching.load(foreign)


def test_a_generation_is_removed_while_it_is_loaded(run, ends_the_same, monkeypatch, log):
    load, removed = watcher.load_parts, []

    def gone(folder, manifest, parts):
        if manifest.step == 2 and not removed:
            removed.append(manifest.generation)
            generations.remove_generation(folder, manifest.generation)
        return load(folder, manifest, parts)

    monkeypatch.setattr(watcher, "load_parts", gone)
    ends_the_same(run)
    assert f"generation {removed[0]} was removed while it was read" in log.text
    assert log.text.count(f"published generation {removed[0]}") == 2


@pytest.mark.slow
def test_an_export_is_half_written_while_the_builder_looks(run, ends_the_same, before_write, monkeypatch):
    due, looks = Job._next_export, []

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
    ends_the_same(run)


@pytest.mark.slow
def test_the_trainer_is_killed_in_the_middle_of_an_export(run, stops, cut_at_write):
    cut_at_write(f"exports/2/{EXPORT}")
    with stops(run, Cut):
        assert read_export(PosixFolder(run.workdir), 2) is None and 2 not in built(run)


@pytest.mark.slow
def test_an_export_is_damaged(people, stops, tmp_path, log, monkeypatch):
    """Its towers lose their end before the builder looks. The trainer stops; started again it passes that index over,
    as nobody can make it any more."""
    run, read = open_tiny(people, tmp_path, wait_seconds=1.0), build_job.read_encoders

    def cut(folder, export):
        if export.step == 2:
            folder.write(export.file.name, folder.read(export.file.name)[:-9])
        return read(folder, export)

    monkeypatch.setattr(build_job, "read_encoders", cut)
    with stops(run, UserError, "the generation of step 2, due at step 3 did not come within", same=False):
        assert "bytes, not " in log.text and 2 not in built(run)
    assert "exports/2 is not there; continuing with the index of step 0 until the next one is due" in log.text
    assert adoptions(run) == [(0, 0), (5, 4), (7, 6)]


# --- What belongs to something else -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer", "corpus", "towers"])
def test_a_builder_of_something_else(copied, name):
    """Another tokenizer, another corpus, or vectors of another type than the trainer wants."""
    folder = PosixFolder(copied.workdir)
    job = make_job(copied)
    if name == "towers":
        set_key(job._run, "model.dtype", "bfloat16")
    else:
        folder.write_json(f"exports/6/{EXPORT}", folder.read_json(f"exports/6/{EXPORT}") | {name: "another"})
    with pytest.raises(UserError, match=f"exports/6 was written by a run with other {name}; give this command the"):
        job.work(Stop(), 6, True)


@pytest.mark.parametrize("name", [slow("tokenizer"), slow("corpus")])
def test_a_generation_of_another_tokenizer_or_corpus(people, sturdy, stops, tmp_path, log, name):
    """It has the right name, and is skipped; nothing comes in its place until somebody removes it."""
    run = open_tiny(people, tmp_path, wait_seconds=2.0)
    folder, other = PosixFolder(run.workdir), PosixFolder(sturdy.run.workdir)
    [own] = [generation for generation in generation_names(other) if export_step(generation) == 2]
    folder.write_json(f"index/{own}/{MANIFEST}", other.read_json(f"index/{own}/{MANIFEST}") | {name: "another"})
    with stops(run, UserError, "the generation of step 2, due at step 3 did not come within"):
        assert f"its {name} is another, not" in log.text
        generations.remove_generation(folder, own)


def test_a_shared_folder_of_another_run(people, sturdy, tmp_path):
    run = open_tiny(people, tmp_path / "run", shared=str(sturdy.run.workdir))
    with pytest.raises(UserError, match=r"config.refresh.shared: .* belongs to another run"):
        train(run)


# --- Storage that does not take more ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_disk_is_full_for_a_while(run, ends_the_same, before_write, log):
    """The builder tries again and loses nothing."""
    left = ["full"] * 3
    before_write(fails(errno.ENOSPC, lambda path: "/index/2-" in path and ".bin" in path and left and left.pop()))
    ends_the_same(run)
    assert not left and log.text.count("No space left on device; trying again") == 3


@pytest.mark.slow
def test_the_disk_is_full_for_exports(people, tmp_path, before_write, watch, log):
    """Storage takes the first export and no other: training goes on with what it has."""
    run = open_tiny(people, tmp_path, adopt_after=-1)
    before_write(fails(errno.ENOSPC, lambda path: "/exports/" in path and "/exports/0/" not in path))
    train_with_builder(run)
    watch.check(run)
    assert "the export of step 2 is not written yet: " in log.text and "No space left on device" in log.text
    assert "skipping the export of step 4: an earlier export is still being written" in log.text
    assert "abandoned the export of step 2" in log.text
    assert {index for _, index in adoptions(run)} == {0}


def test_the_disk_is_full_for_a_checkpoint(run, ends_the_same, monkeypatch, log):
    """The save of step 6 fails as soon as it begins; training goes on, and its end is saved."""
    kind, left = ocp.training.Checkpointer, ["full"]
    write = kind.save_checkpointables_async

    def full(self, step, *rest, **options):
        if step == 6 and left:
            left.clear()
            raise ValueError("RESOURCE_EXHAUSTED: Failed writing")
        return write(self, step, *rest, **options)

    monkeypatch.setattr(kind, "save_checkpointables_async", full)
    ends_the_same(run)
    assert not left and "a checkpoint could not be written (ValueError: RESOURCE_EXHAUSTED" in log.text


def test_a_bucket_that_fails_now_and_then(people, ends_the_same, tmp_path, monkeypatch, log):
    """Writes that raise before or after they happened, reads and listings that raise: tried again, never half done."""
    some = [None, http(503), None, None, http(429), None, None]
    folder = bucket(
        write=some * 20, late=some[3:] * 20, read=some * 40, list=[None, *some, PermissionError("403")] * 40
    )
    monkeypatch.setattr("realm_jax.indexing.provider.open_folder", lambda url: folder)
    ends_the_same(open_tiny(people, tmp_path, shared="memory://runs/one"))
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
    final = train_with_builder(run)
    watch.check(run)
    assert f"jobs/trainer.json: {os.strerror(errno.EROFS)}; other jobs cannot see that the trainer goes on" in log.text
    assert f"the export of step 2 is not written yet: {shared}/exports/2/" in log.text
    assert "other jobs cannot see that the trainer is done" in log.text
    assert {index for _, index in adoptions(run)} == {0}
    assert_same(train(run), final)


@pytest.mark.slow
def test_the_disk_stays_full_for_an_export_that_is_due(people, stops, tmp_path, before_write, monkeypatch):
    """With several on their way nobody waits for its generation yet; the trainer saves, and stops in time."""
    run, left = open_tiny(people, tmp_path, wait_seconds=2.0, adopt_after=5), ["full"]
    for name, seconds in (("EXPORT_SECONDS", 0.5), ("HEARTBEAT_SECONDS", 0.5)):
        monkeypatch.setattr(f"realm_jax.indexing.async_provider.{name}", seconds)
    monkeypatch.setattr("realm_jax.indexing.exporter.RETRY_SECONDS", 0.1)
    before_write(fails(errno.ENOSPC, lambda path: left and "/exports/2/" in path))
    with stops(run, UserError, "an export could not be written within config.refresh.wait_seconds=2", same=False):
        assert SavedCheckpoint.newest(tmp_path / "realm" / "checkpoints").step == 4
        left.clear()


@pytest.mark.slow
def test_a_restart_writes_the_export_again_that_no_disk_took(people, stops, tmp_path, before_write, monkeypatch, log):
    """The step at which the run ended would need that export, so it is not saved."""
    run, left = open_tiny(people, tmp_path, wait_seconds=2.0), ["full"]
    set_key(run, "checkpoint.every", 2)
    monkeypatch.setattr("realm_jax.indexing.async_provider.EXPORT_SECONDS", 0.5)
    monkeypatch.setattr("realm_jax.indexing.exporter.RETRY_SECONDS", 0.1)
    before_write(fails(errno.ENOSPC, lambda path: left and "/exports/4/" in path))
    with stops(run, UserError, "the generation of step 4, due at step 5 did not come within"):
        assert (
            "step 5 is not saved, because the export of step 4 is not written; a restart begins at step 4" in log.text
        )
        assert SavedCheckpoint.newest(tmp_path / "realm" / "checkpoints").step == 4
        left.clear()


def test_a_trainer_that_cannot_clear_up_at_its_start_hears_sigterm(run, monkeypatch):
    """Exports of rolled-back steps cannot be removed."""
    folder, asked = PosixFolder(run.workdir), []
    folder.write("exports/90/EXPORT.json", b"{}")

    def read_only(self, name):
        raise StorageError(f"{name}: Read-only file system")

    def stopping():
        asked.append(len(asked) == 2)
        return asked[-1]

    monkeypatch.setattr(PosixFolder, "remove", read_only)
    status = StatusWriter(folder, "trainer", Status("one"))
    with pytest.raises(StorageError, match="exports/90/EXPORT.json: Read-only file system"):
        with AsyncIndexProvider(make_task("realm", run), 0, {}, 1, status, stopping):
            pass
    assert asked == [False, False, True], "it tries again until it is told, and then no more"


def test_shared_storage_is_read_only_from_the_start(people, tmp_path, before_write):
    shared = tmp_path / "shared"
    run = open_tiny(people, tmp_path / "run", shared=str(shared))
    before_write(fails(errno.EROFS, lambda path: str(shared) in path))
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"shared/jobs/trainer.json: Read-only file system"):
        train(run)
    assert time.monotonic() - began < run.config.refresh.wait_seconds / 2, "nobody waits for what cannot come"
