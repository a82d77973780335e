"""A run whose directory is in a bucket: killed and resumed, watched, verified, continued, read by other commands, with
an index builder, and with two processes."""

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from runs import (
    PATIENCE,
    STEPS,
    assert_same,
    assert_same_run,
    cut_off,
    finish,
    flags_of,
    inline_config,
    open_inline,
    train_measured,
    until,
)
from tiny_run import PEOPLE

import realm_jax
from realm_jax import mirror
from realm_jax.cli import main as cli
from realm_jax.launch.local import free_port
from realm_jax.mirror import COMMIT, Mirror, copy_of, download, is_mirrored, local_workdir, upload_changes, url_of
from realm_jax.storage import Bucket, PosixFolder, StorageError, open_folder
from realm_jax.train import recipe
from realm_jax.train.checkpoints import DAMAGED, METADATA, Checkpoints, SavedCheckpoint, saved_folders
from realm_jax.train.records import parse_lines

PROGRAMS = "gs://bucket/programs"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REALM_CACHE", str(tmp_path / "cache"))


# --- The copy ---------------------------------------------------------------------------------------------------------


class Recording(PosixFolder):
    """Lists what is written and removed; fails as often as `faults` says."""

    def __init__(self, root):
        super().__init__(root)
        self.done, self.faults = [], 0

    def upload(self, path, name):
        if self.faults:
            self.faults -= 1
            raise StorageError(f"{name}: cannot write it")
        super().upload(path, name)
        self.done.append(name)

    def remove(self, name):
        super().remove(name)
        self.done.append(f"-{name}")


def write(folder, *names, text="text"):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, ns=(len(text), len(write.order)))
        write.order.append(name)


@pytest.fixture
def copy(tmp_path):
    """A folder, and the bucket that it is uploaded to."""
    write.order = []
    (tmp_path / "copy").mkdir()
    return tmp_path / "copy", Recording(tmp_path / "bucket")


def test_a_file_is_uploaded_after_the_older_ones_and_removed_before_them(copy):
    folder, bucket = copy
    with Mirror(folder, bucket):
        write(folder, "z.jsonl", "model/vectors.npy", "model/manifest.json", "a.json")
        upload_changes(folder)
        assert bucket.done == ["z.jsonl", "model/vectors.npy", "model/manifest.json", "a.json"]
        bucket.done.clear()
        write(folder, "model/vectors.npy", "model/manifest.json", text="another")
        (folder / "a.json").unlink()
        upload_changes(folder)
        assert bucket.done == ["-a.json", "-model/manifest.json", "model/vectors.npy", "model/manifest.json"]
        bucket.done.clear()
        upload_changes(folder)
        assert bucket.done == []
    assert {*bucket.files()} == {"z.jsonl", "model/vectors.npy", "model/manifest.json"}


def test_what_machines_share_and_what_is_unfinished_is_not_uploaded(copy):
    folder, bucket = copy
    write(folder, "realm/checkpoints/2/state", "exports/3/x", "index/3/x", "jobs/trainer.json", "realm/best/2/state")
    write(folder, "realm/.model.partial/x", ".lock", "programs/x", "realm/metrics.jsonl", "realm/profile/index/x")
    with Mirror(folder, bucket) as copier:
        copier._uploaded.clear()  # as if nothing had been downloaded
    assert {*bucket.files()} == {"realm/metrics.jsonl", "realm/profile/index/x"}


def test_a_failed_upload_is_a_warning_until_the_end(copy, caplog):
    folder, bucket = copy
    with pytest.raises(StorageError, match="a.json: cannot write it"), Mirror(folder, bucket):
        write(folder, "a.json")
        bucket.faults = 1
        upload_changes(folder)
        assert "the next upload tries again" in caplog.text and not bucket.done
        upload_changes(folder)
        assert bucket.done == ["a.json"]
        write(folder, "a.json", text="another")
        bucket.faults = 1
    with pytest.raises(ZeroDivisionError), Mirror(folder, bucket):  # the first exception propagates
        write(folder, "a.json", text="a third")
        bucket.faults = 1
        raise ZeroDivisionError


def test_changes_are_uploaded_in_the_background(copy, monkeypatch):
    monkeypatch.setattr(mirror, "SECONDS", 0.01)
    folder, bucket = copy
    with Mirror(folder, bucket):
        write(folder, "metrics.jsonl")
        until(lambda: "metrics.jsonl" in bucket.done)


def test_a_copy_begins_as_the_bucket_is(bucket):
    """Changes of an earlier process, which was killed before it uploaded them, are removed."""
    url = f"{bucket}/runs/one"
    with local_workdir(url, "trainer-0") as workdir:
        assert url_of(workdir / "realm" / "best") == f"{url}/realm/best"
        write.order = []
        write(workdir, "config.json", "model/vectors.npy", "realm/model/vectors.npy", "data.json", "realm/m.jsonl")
        big = np.arange(2_000_000)
        np.save(workdir / "big.npy", big)
        upload_changes(workdir)
    write(workdir, "late.json", "realm/.model.old/x", "realm/checkpoints/2/x")
    open_folder(url).write("realm/m.jsonl", b"more")
    with local_workdir(url, "trainer-0") as again:
        assert again == workdir and (again / "realm" / "m.jsonl").read_bytes() == b"more"
        assert not (again / "late.json").exists() and not (again / "realm" / ".model.old").exists()
        np.testing.assert_array_equal(np.load(again / "big.npy"), big)
        with pytest.raises(Exception, match="another process is using it"), local_workdir(url, "trainer-0"):
            pass
    assert open_folder(url).read("realm/m.jsonl") == b"more"
    model = mirror.download_model(url)
    assert {path.name for path in model.rglob("[!.]*")} == {"config.json", "data.json"}  # no vectors
    few = download(url, "few", {"config.json", "missing.json"}.__contains__)
    assert [path.name for path in few.glob("[!.]*")] == ["config.json"]


def test_a_copy_keeps_equal_files_and_replaces_others_of_the_same_size(bucket, monkeypatch):
    url, downloaded = f"{bucket}/runs/one", []
    get = Bucket.download
    monkeypatch.setattr(Bucket, "download", lambda *args: downloaded.append(args[1]) or get(*args))
    store = open_folder(url)
    for name in ("equal", "replaced", "model/equal", "removed/file"):
        store.write(name, b"first")
    folder = download(url, "reader")
    assert sorted(downloaded) == ["equal", "model/equal", "removed/file", "replaced"]

    downloaded.clear()
    store.write("replaced", b"other")
    store.remove("removed")
    (folder / "model" / "equal").write_bytes(b"local")  # in the copy only, at the same time and of the same size
    stat = (folder / "equal").stat()
    os.utime(folder / "model" / "equal", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert download(url, "reader") == folder and sorted(downloaded) == ["model/equal", "replaced"]
    assert (folder / "replaced").read_bytes() == b"other" and (folder / "model" / "equal").read_bytes() == b"first"
    assert not (folder / "removed").exists()


def test_a_copy_of_a_live_run_has_the_files_of_one_model(bucket, monkeypatch):
    """The run replaces its exported model after the first file was copied."""
    url = f"{bucket}/runs/one"
    store, get = open_folder(url), Bucket.download
    for name in ("model/a.npy", "model/b.npy", "model/manifest.json"):
        store.write(name, b"first")

    def download_and_replace(*args):
        get(*args)
        monkeypatch.setattr(Bucket, "download", get)
        for name in ("model/a.npy", "model/b.npy", "model/manifest.json"):
            store.write(name, b"other")

    monkeypatch.setattr(Bucket, "download", download_and_replace)
    folder = download(url, "reader")
    assert {path.read_bytes() for path in (folder / "model").iterdir()} == {b"other"}


def test_python_trains_in_a_bucket(bucket, monkeypatch):
    def run_recipe(workdir, command):
        write.order = []
        write(workdir, "results.json", text="{}")
        return 75 if (workdir / "config.json").exists() else write(workdir, "config.json") or 0

    monkeypatch.setattr("realm_jax.api.open_run", lambda config, workdir: workdir)
    monkeypatch.setattr("realm_jax.api.run_recipe", run_recipe)
    assert realm_jax.train_model(None, f"{bucket}/runs/one") == {}
    assert open_folder(f"{bucket}/runs/one").names() == ["config.json", "results.json"]
    with pytest.raises(realm_jax.Resumable, match=f"{bucket}/runs/one: stopped by SIGTERM"):
        realm_jax.train_model(None, f"{bucket}/runs/one")


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_are_written_to_the_bucket_and_damaged_or_unfinished_ones_are_left_out(bucket, caplog):
    url = f"{bucket}/runs/one"
    with local_workdir(url, "trainer-0") as workdir:
        folder, store = workdir / "realm" / "checkpoints", open_folder(f"{url}/realm/checkpoints")
        assert saved_folders(folder) == [] and SavedCheckpoint.newest(folder) is None
        with Checkpoints(folder, keep=3) as saves:
            for step in range(1, 5):
                saves.save(step, {"bias": np.full(3, step)}, {"vectors": np.ones((2, 2))}, {"generation": f"{step}-a"})
                saves.wait()
            assert saves.latest == 4 and saves.generations() == {2: "2-a", 3: "3-a", 4: "4-a"}
        assert not folder.exists() and store.names() == ["2", "3", "4"]
        assert SavedCheckpoint.newest(folder).read("state")["bias"].tolist() == [4, 4, 4]

        content = json.loads(store.read(f"3/{METADATA}"))
        content["custom_metadata"]["checksums"]["state.bias"][0] ^= 1
        store.write_json(f"3/{METADATA}", content)
        store.remove(f"4/{COMMIT}")  # as if the machine had vanished during the save
        assert [entry.name for entry in saved_folders(folder)] == ["3", "2"]
        assert SavedCheckpoint.newest_intact(folder, lambda saved: saved.read("state"))["bias"].tolist() == [2, 2, 2]
        assert f"{url}/realm/checkpoints/3 is damaged" in caplog.text
        assert store.names() == ["2", f"3{DAMAGED}", "4"]
        with Checkpoints(folder, keep=3) as saves:
            assert saves.latest == 2
            until(lambda: store.names() == ["2", f"3{DAMAGED}"])  # Orbax removes the unfinished one in the background
            saves.save(4, {"bias": np.full(3, 5)}, {}, {})
        assert SavedCheckpoint.newest(folder).read("state")["bias"].tolist() == [5, 5, 5]


def test_a_bucket_that_fails_is_no_damage(bucket, monkeypatch):
    """Nothing is set aside, and a checkpoint that cannot be seen does not start the run again from its beginning."""
    from gcsfs.retry import HttpError

    with local_workdir(f"{bucket}/runs/one", "trainer-0") as workdir:
        folder = workdir / "realm" / "checkpoints"
        with Checkpoints(folder, keep=1) as saves:
            saves.save(1, {"bias": np.ones(3)}, {}, {})
        [entry] = saved_folders(folder)
        for method in ("iterdir", "exists", "read_bytes"):
            with monkeypatch.context() as patch, pytest.raises(StorageError, match="run the command again"):
                error = HttpError({"message": "not now", "code": 503})
                patch.setattr(type(entry), method, lambda *_, error=error: (_ for _ in ()).throw(error))
                SavedCheckpoint.newest_intact(folder, lambda saved: saved.read("state"))
        assert [entry.name for entry in saved_folders(folder)] == ["1"]


# --- Commands that read a run -----------------------------------------------------------------------------------------


def test_commands_read_a_run_from_its_bucket(bucket, trained_run, one_device, tmp_path, capsys):
    """They print and write what they do for the same run on a disk, and change nothing in the bucket."""
    run, url = trained_run.workdir, f"{bucket}/runs/one"
    store = open_folder(url)
    for path in run.rglob("*"):
        if path.is_file() and is_mirrored(name := path.relative_to(run).as_posix()):
            store.upload(path, name)
    files = store.files()

    def outputs(workdir, folder):
        folder.mkdir()
        commands = {
            "ask": ["ask", "When was Ada Almgren born?", "--json"],
            "evaluate": ["evaluate", "--task=ict", "--json"],
            "predict": ["predict", f"--output={folder / 'predictions.jsonl'}"],
            "export": ["weights", "export", f"--output={folder / 'weights'}"],
            "inspect": ["inspect", "text", "When was Ada Almgren born?", "--json"],
        }
        printed = {name: shown(capsys, *words, f"--workdir={workdir}") for name, words in commands.items()}
        written = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return printed, written

    printed, written = outputs(run, tmp_path / "disk")
    assert {code for code, _ in printed.values()} == {0}
    assert json.loads(printed["ask"][1])["passage"]["title"] in PEOPLE and len(written) > 5
    assert outputs(url, tmp_path / "bucket") == (printed, written)
    assert store.files() == files
    assert not (copy_of(url, "reader") / "qa" / "model").exists()  # only --task needs the model of a task

    code = cli.main(["ask", "Who?", f"--workdir={bucket}/runs/two"])
    assert code == 2 and f"--workdir={bucket}/runs/two: no run there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, flag",
    [
        ("serve --workdir=URL", "--workdir="),
        ("corpus remove p1 --workdir=URL", "--workdir="),
        ("index docs --from=py:encoder --output=URL", "--output="),
        ("adapt docs --from=py:encoder --output=URL", "--output="),
        ("adapt URL", ""),
        ("quickstart --workdir=URL", "--workdir="),
        ("ablate --workdir=URL", "--workdir="),
    ],
)
def test_commands_that_need_a_disk_reject_a_bucket(capsys, words, flag):
    url = "gs://bucket/runs/one"
    assert cli.main(words.replace("URL", url).split()) == 2
    message = f"realm: error: {flag}{url}: the command needs a run directory on a disk; name one there"
    assert message in capsys.readouterr().err


def test_the_next_commands_of_a_run_name_its_bucket(capsys):
    url = "gs://bucket/runs/one"
    recipe.show({"exact_match": {}, "seconds": {}}, copy_of(url, "trainer-0"), "Who?")
    printed = capsys.readouterr().err
    assert f"report: {url}/report.html" in printed and f"ask:    realm ask --workdir={url} 'Who?'" in printed


# --- Runs -------------------------------------------------------------------------------------------------------------


def command(*words):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "REALM_CACHE_BYTES": "1000000"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": PROGRAMS, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    return subprocess.Popen([sys.executable, "-m", "realm_jax", *words], **options)


def final_params(url):
    with local_workdir(url, "reader", uploads=False) as workdir:
        return SavedCheckpoint.newest(workdir / "realm" / "checkpoints").read("state")


def shown(capsys, *words):
    code = cli.main([*words])
    return code, capsys.readouterr().out


def test_a_run_that_is_cut_off_resumes_on_another_machine(bucket, people, straight, monkeypatch, quick_steps):
    url = f"{bucket}/runs/one"
    with local_workdir(url, "trainer-0") as workdir:
        run = open_inline(people, workdir)
        cut_off(monkeypatch, lambda: train_measured(run), 5)
    shutil.rmtree(workdir)
    with local_workdir(url, "trainer-0") as workdir:
        run = open_inline(people, workdir)
        train_measured(run)
        assert_same_run(run, straight)


@pytest.mark.slow
def test_a_run_in_a_bucket_is_killed_and_resumed_and_another_starts_from_it(bucket, people, capsys):
    """The machine vanishes with its disk. Then `status`, `watch` and `storage` read the live run from the bucket."""
    flags = flags_of(inline_config(people, checkpoint__every=1))
    undisturbed, killed, next_run = (f"{bucket}/runs/{name}" for name in ("one", "two", "three"))
    finish([command("train", *flags, f"--workdir={undisturbed}")])
    assert open_folder(PROGRAMS).names()  # what JAX has compiled

    store = open_folder(killed)
    first = command("train", *flags, f"--workdir={killed}")
    until(lambda: COMMIT in store.names("realm/checkpoints/3"), PATIENCE)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    steps = store.names("realm/checkpoints")
    saved = max(int(step) for step in steps if COMMIT in store.names(f"realm/checkpoints/{step}"))
    lines = parse_lines(store.read("realm/metrics.jsonl"))
    assert [line["step"] for line in lines][:saved] == [*range(1, saved + 1)]  # no record before the checkpoint is lost

    code, out = shown(capsys, "launch", "status", f"--workdir={killed}", "--json")
    state = json.loads(out)
    assert code == 1 and state["checkpoint"]["step"] == saved and state["metrics"]["step"] >= saved
    finish([command("train", *flags, f"--workdir={killed}")])
    assert_same(final_params(killed), final_params(undisturbed))
    assert {*open_folder(undisturbed).names()} == {*store.names()}

    code, out = shown(capsys, "watch", f"--workdir={killed}", "--json")
    status = json.loads(out)
    assert code == 0 and status["state"] == "done" and status["tasks"][0]["step"] == STEPS
    code, out = shown(capsys, "storage", "verify", f"--workdir={killed}")
    assert code == 0 and out.count(": sound (") == 2
    code, out = shown(capsys, "storage", "ls", f"--workdir={killed}", "--json")
    assert code == 0 and all(json.loads(line)["bytes"] > 1000 for line in out.splitlines())

    finish([command("train", *flags, f"--config.init_from={killed}", f"--workdir={next_run}")])
    with local_workdir(next_run, "reader", uploads=False) as workdir:
        assert json.loads((workdir / "config.json").read_text())["init_from"] == killed


@pytest.mark.slow
def test_an_index_builder_meets_the_trainer_in_the_bucket(bucket, people):
    url, flags = f"{bucket}/runs/one", flags_of(inline_config(people, checkpoint__every=3))
    refresh = {"mode": "async", "adopt_after": 1, "wait_seconds": PATIENCE}
    store = open_folder(url)
    trainer = command("train", *flags, *(f"--config.refresh.{k}={v}" for k, v in refresh.items()), f"--workdir={url}")
    until(lambda: "config.json" in store.names(), PATIENCE)
    builder = command("build-index", f"--workdir={url}")
    finish([trainer, builder])
    lines = parse_lines(store.read("realm/evaluations.jsonl"))
    adopted = [(line["step"], line["index_step"]) for line in lines if "generation" in line]
    assert adopted == [(0, 0), (3, 2), (5, 4), (7, 6)]


@pytest.mark.slow
def test_two_processes_in_a_bucket_are_killed_and_resumed(bucket, people):
    """Process 1 vanishes, which ends process 0. Process 0 alone uploads; each has its own copy."""
    flags = flags_of(inline_config(people, checkpoint__every=1))
    undisturbed, killed = (f"{bucket}/runs/{name}" for name in ("one", "two"))
    store = open_folder(killed)

    def start_both(url):
        together = [*flags, f"--workdir={url}", "--processes=2", f"--coordinator=localhost:{free_port()}"]
        return [command("train", *together, f"--process={process}") for process in range(2)]

    finish(start_both(undisturbed))
    first = start_both(killed)
    until(lambda: COMMIT in store.names("realm/checkpoints/3"), PATIENCE)
    first[1].send_signal(signal.SIGKILL)
    for process in first:
        process.communicate(timeout=PATIENCE)
    assert first[0].returncode != 0 and "results.json" not in store.names()

    outputs = finish(start_both(killed))
    assert "Results" in outputs[0] and "Results" not in outputs[1]
    assert_same(final_params(killed), final_params(undisturbed))
    lines = parse_lines(store.read("realm/metrics.jsonl"))
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    assert {*store.names()} == {*open_folder(undisturbed).names()}
