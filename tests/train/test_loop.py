"""The train loop on a tiny REALM run: cut off and repeated, on other devices, with other configs, and diverging.

`straight` runs eight steps, and every second one refreshes the index and saves; every test compares with it.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import (
    OPTIMISED,
    STEPS,
    Cut,
    assert_same,
    assert_same_run,
    at_step,
    cut_off,
    final_params,
    finish,
    flags_of,
    inline_config,
    open_inline,
    records,
    start,
    train_measured,
    until,
)

from realm_jax.errors import UserError
from realm_jax.host import Preempted, Stop
from realm_jax.indexing.control import ControlSignal
from realm_jax.run import Run
from realm_jax.storage import exclusive_lock, read_json, write_json_atomic
from realm_jax.tasks import make_task
from realm_jax.train import loop, recipe
from realm_jax.train.checkpoints import SavedCheckpoint, saved_folders
from realm_jax.train.loop import train_task
from realm_jax.train.metrics import MetricLogger, RecordWriter
from realm_jax.train.recipe import preemptible, run_recipe
from realm_jax.train.records import averaged_steps, read_lines
from realm_jax.train.results import collect_results
from realm_jax.train.workdir import load_run

pytestmark = pytest.mark.usefixtures("quick_steps")

# --- Cut off and repeated


def test_a_run_that_is_cut_off_twice_ends_as_one_that_never_was(people, straight, tmp_path, monkeypatch):
    """Once between two checkpoints, and once when a checkpoint and a refresh have just been made."""
    run = open_inline(people, tmp_path)
    cut_off(monkeypatch, lambda: train_measured(run), 3, 4)
    train_measured(run)
    assert_same_run(run, straight)


def test_what_is_done_is_not_repeated(straight, monkeypatch):
    """And makes no first parameters, which would stay on the devices until the task ends."""
    files = {path: path.stat().st_mtime_ns for path in straight.workdir.rglob("*") if path.is_file()}
    monkeypatch.setattr(loop, "make_step", None)
    assert_same(final_params(straight), jax.tree.map(np.asarray, train_measured(straight)))
    assert files == {path: path.stat().st_mtime_ns for path in straight.workdir.rglob("*") if path.is_file()}
    monkeypatch.setattr(Run, "initial_params", None)
    assert_same(final_params(straight), jax.tree.map(np.asarray, recipe.train(straight)))


def test_sigterm_between_tasks_is_heard_by_the_next_where_python_drops_its_exception():
    """It does so in callbacks of weak references, for one."""
    before = signal.getsignal(signal.SIGTERM)
    with preemptible():
        with pytest.raises(Preempted, match="every finished task is saved; run the command again"):
            os.kill(os.getpid(), signal.SIGTERM)
        with Stop() as task, pytest.raises(Preempted):
            task.check("nothing is lost")
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_between_tasks_ends_a_library_that_catches_every_exception():
    with preemptible(), pytest.raises(Preempted, match="every finished task is saved"), suppress(Exception):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("last", [2, pytest.param(STEPS - 1, marks=pytest.mark.slow), STEPS])
def test_sigterm_saves_and_the_next_start_loses_no_step(people, straight, tmp_path, monkeypatch, last):
    """It comes within a step, within the last step, or while the last index is being made."""
    calls, embed = [], Run.embed

    def note(step):
        calls.append(step)
        if step == last:
            os.kill(os.getpid(), signal.SIGTERM)

    def late(*arguments, **options):
        if last == STEPS and len(calls) == STEPS:
            os.kill(os.getpid(), signal.SIGTERM)
        return embed(*arguments, **options)

    run = open_inline(people, tmp_path, checkpoint__every=100)
    at_step(monkeypatch, note)
    monkeypatch.setattr(Run, "embed", late)
    with pytest.raises(Preempted, match=f"saved realm at step {min(last + 1, STEPS)}; run the command again"):
        train_measured(run)
    last = -1
    train_measured(run)
    assert calls == list(range(STEPS))
    assert_same_run(run, straight)


def test_sigterm_does_not_wait_for_a_corpus_that_is_being_embedded(people, straight, tmp_path, monkeypatch):
    run, made, embed = open_inline(people, tmp_path, checkpoint__every=100), [], Run.embed

    def preempted(self, params, progress):
        def told(done):
            if len(made) == 1:  # the index of the first refresh
                os.kill(os.getpid(), signal.SIGTERM)
            progress(done)

        made.append(embed(self, params, told))
        return made[-1]

    with monkeypatch.context() as patch, pytest.raises(Preempted, match="saved realm at step 2; run the command again"):
        patch.setattr(Run, "embed", preempted)
        train_measured(run)
    assert len(made) == 1
    train_measured(run)
    assert_same_run(run, straight)


# --- A compiled step, and others in its place


def test_a_refreshed_index_and_a_restored_state_need_no_new_program(straight):
    """All runs before this one used the same step: over refreshes, checkpoints and restarts."""
    assert loop.make_step(make_task("realm", straight))._cache_size() == 1


def replace_step(monkeypatch, step):
    """Has `step(state, batch, index)` give the metrics of each step, of which nothing but the counter moves."""

    def make(task):
        def call(state, batch, index, control):
            values = {"loss": 1.0, "gradient_norm": 1.0, "consensus": (-1, -1, 0)} | step(state, batch, index)
            return state._replace(step=state.step + 1), {key: np.float32(value) for key, value in values.items()}

        return call

    monkeypatch.setattr(loop, "make_step", make)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_state_and_index_on_other_devices(people, tmp_path, monkeypatch):
    """Sixteen passages are padded to 32 rows on one device and to 256 on eight."""
    seen, devices = {}, 1

    def look(state, batch, index):
        seen[int(state.step)] = jax.tree.map(np.asarray, ((state.params, state.optimizer), index.vectors))
        assert len(jax.tree.leaves(state.trained)[0].devices()) == len(index.vectors.devices()) == devices
        if int(state.step) == 3 and devices == 1:
            raise Cut
        return {}

    replace_step(monkeypatch, look)
    changes = {"model__dtype": "bfloat16", "refresh__every": 100}
    run = open_inline(people, tmp_path, **changes)
    with pytest.raises(Cut):
        train_task(run, "realm", run.initial_params())
    state, vectors = seen[2]
    devices = 8
    run = open_inline(people, tmp_path, devices, mesh__fsdp=2, **changes)
    train_task(run, "realm", jax.eval_shape(run.initial_params))
    state_on_eight, vectors_on_eight = seen[2]
    assert_same(state_on_eight, state)
    assert (len(vectors), len(vectors_on_eight)) == (32, 256)
    np.testing.assert_array_equal(vectors_on_eight[:16], vectors[:16])
    assert np.abs(vectors[:16].astype(np.float32)).min() > 0


@pytest.mark.parametrize("key", ["loss", "gradient_norm"])
def test_what_is_not_finite_is_reported_with_its_step_and_never_saved(people, tmp_path, monkeypatch, key):
    """Metrics are logged every tenth step, but a save looks at those of its own step."""
    replace_step(monkeypatch, lambda state, *_: {key: np.nan if int(state.step) == 3 else 1.0})
    message = f"step 4 of realm: the {key.replace('_', ' ')} is not finite; the last good checkpoint is realm/2; lower"
    with pytest.raises(UserError, match=message):
        train_measured(open_inline(people, tmp_path, log__every=10))
    assert SavedCheckpoint.newest(tmp_path / "realm" / "checkpoints").step == 2


def test_metrics_are_fetched_once_the_next_step_is_started(people, tmp_path, monkeypatch):
    """However seldom they are logged: a line of the log, and what it says of time, is a step late and no more."""
    order: list[str] = []
    fetch = MetricLogger.fetch
    replace_step(monkeypatch, lambda state, *_: order.append("start") or {})
    monkeypatch.setattr(MetricLogger, "fetch", lambda *given: order.append(f"fetch {given[1]}") or fetch(*given))
    train_measured(open_inline(people, tmp_path, log__every=3, checkpoint__every=100))
    assert order[:7] == [*["start"] * 4, "fetch 3", *["start"] * 2]


def test_the_wait_for_the_devices_is_part_of_a_step(people, tmp_path, monkeypatch):
    """They are waited for where the control words of the step before the last are read."""

    def late(*words):
        time.sleep(0.5 if words else 0.0)
        return ControlSignal(*words)

    replace_step(monkeypatch, lambda *_: {})
    monkeypatch.setattr(loop, "ControlSignal", late)
    train_measured(open_inline(people, tmp_path, checkpoint__every=100))
    assert read_lines(tmp_path / "realm" / "metrics.jsonl")[-1]["step_seconds"] >= 0.5


# --- The run folder


def test_a_training_key_stays_and_a_runtime_key_may_change(people, tmp_path):
    """A key that the recorded config does not have yet had its default."""
    open_inline(people, tmp_path)
    recorded = read_json(tmp_path / "config.json")
    del recorded["refresh"]["mode"], recorded["encoder"]["norm_scale"]
    write_json_atomic(tmp_path / "config.json", recorded)
    for key, value, default in (("realm.batch_size", 16, 8), ("encoder.norm_scale", 0.5, 1.0)):
        message = rf"config.{key} is {value}, but the run in {tmp_path} has {default}; set it back, or start in another"
        with pytest.raises(UserError, match=message):
            open_inline(people, tmp_path, **{key.replace(".", "__"): value})
    assert read_json(tmp_path / "config.json")["realm"]["batch_size"] == 8
    open_inline(people, tmp_path, checkpoint__every=3, optimizer__microbatches=2)
    assert read_json(tmp_path / "config.json")["checkpoint"]["every"] == 3


def test_results_do_not_depend_on_how_often_metrics_are_recorded(people, tmp_path):
    """Up to twenty steps of the last tenth are always recorded; results average these."""
    found, recorded = [], []
    for every in (1, 7):
        run = open_inline(people, tmp_path / str(every), realm__steps=30, refresh__every=0, log__every=every)
        write_json_atomic(run.workdir / "baselines.json", {})
        train_task(run, "realm", run.initial_params())
        found.append(collect_results(run, [], {})["retrieval_utility"])
        recorded.append([line["step"] for line in read_lines(run.workdir / "realm" / "metrics.jsonl")])
    assert found[0] == found[1]
    assert recorded == [list(range(1, 31)), [7, 14, 21, 28, 29, 30]]
    assert list(averaged_steps(30)) == [30, 29, 28] and list(averaged_steps(1)) == [1]
    assert list(averaged_steps(200_000)) == list(range(200_000, 180_000, -1000))


def test_other_data_are_refused(people, tmp_path):
    """Other questions in another folder, or other passages under the same path."""
    open_inline(people, tmp_path / "run")
    shutil.copytree(people, tmp_path / "other")
    path = tmp_path / "other" / "questions" / "train.jsonl"
    path.write_text(path.read_text().replace("1801", "1999"))
    with pytest.raises(UserError, match="not the data of the run: other questions"):
        open_inline(tmp_path / "other", tmp_path / "run")
    record = tmp_path / "run" / "data.json"
    write_json_atomic(record, read_json(record) | {"passages": "other"})
    with pytest.raises(UserError, match=f"{people}: .* other passages than {record} records"):
        open_inline(people, tmp_path / "run")


def test_one_process_trains_in_a_folder(people, tmp_path):
    run = open_inline(people, tmp_path)
    with exclusive_lock(tmp_path), pytest.raises(UserError, match="another process is using it"):
        run_recipe(run, "realm train")


def test_sigterm_between_tasks_ends_with_75(people, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "measure_baselines", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert run_recipe(open_inline(people, tmp_path), "realm train") == 75
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_records_are_cut_back_to_a_step_and_a_torn_line_is_dropped(tmp_path):
    first = RecordWriter(tmp_path, "metrics", 0)
    for step in (1, 2, 3):
        first.write(step, {"loss": 0.5, "by": {"a": 1.0}})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')
    second = RecordWriter(tmp_path, "metrics", 2)
    assert [record["step"] for record in second.earlier_records] == [1, 2]
    second.write(3, {"loss": 0.25})
    second.close()
    found = [(record["step"], record["loss"]) for record in read_lines(tmp_path / "metrics.jsonl")]
    assert found == [(1, 0.5), (2, 0.5), (3, 0.25)]
    assert read_lines(tmp_path / "none.jsonl") == []


# --- Processes that are killed


@pytest.mark.slow
def test_a_process_that_is_killed_and_repeated_ends_as_one_that_never_was(people, tmp_path):
    """`kill -9` at four steps, a SIGTERM that saves and exits with 75, then to the end."""
    config = inline_config(people, realm__steps=60, refresh__every=5, checkpoint__every=5)
    quiet, killed, flags = tmp_path / "quiet", tmp_path / "killed", flags_of(config)
    finish(start(quiet, flags, devices=1, quick=False))
    for step, end, code in [(3, "KILL", -9), (11, "KILL", -9), (17, "KILL", -9), (33, "TERM", 75), (44, "KILL", -9)]:
        started, lines = start(killed, flags, devices=1, quick=False), killed / "realm" / "metrics.jsonl"
        until(lambda: any(line["step"] >= step for line in read_lines(lines)), 300.0)  # noqa: B023
        started[0].send_signal(getattr(signal, f"SIG{end}"))
        [told] = finish(started, code)
        assert code != 75 or "run the command again to resume" in told
    finish(start(killed, flags, devices=1, quick=False))
    assert_same_run(*(load_run(workdir) for workdir in (quiet, killed)))
    assert records(load_run(quiet), "metrics")[-1]["step"] == 60
    same, again = (read_json(workdir / "results.json") | {"seconds": None} for workdir in (quiet, killed))
    assert same == again


@pytest.mark.nightly
def test_sigterm_saves_the_quickstart_s_model_within_ten_seconds(tmp_path):
    """And the restart goes on from the very step, once in the middle of each task."""
    options = {"env": os.environ | {"JAX_PLATFORMS": "cpu"} | OPTIMISED, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "realm_jax", "quickstart", f"--workdir={tmp_path}/run"]
    for task in ("mlm", "ict", "realm", "qa"):
        process = subprocess.Popen(command, **options)
        until(lambda folder=tmp_path / "run" / task: len(read_lines(folder / "metrics.jsonl")) >= 2, 600.0)
        process.terminate()
        began = time.monotonic()
        told = process.communicate(timeout=60)[1]
        seconds = time.monotonic() - began
        saved = saved_folders(tmp_path / "run" / task / "checkpoints")[0].name
        print(f"{task}: exit code {process.returncode} {seconds:.1f} s after SIGTERM at step {saved}")
        assert process.returncode == 75 and seconds < 10 and f"saved {task} at step {saved}" in told
    ended = subprocess.run(command, **options)
    assert ended.returncode == 0 and f"qa: resuming from step {saved}" in ended.stderr
    steps = [line["step"] for line in read_lines(tmp_path / "run" / "realm" / "metrics.jsonl")]
    assert steps == list(range(10, 401, 10))


@pytest.mark.nightly
def test_host_memory_does_not_grow_over_two_thousand_steps(people, tmp_path, monkeypatch):
    """Memory of its own after a quarter of the steps, and at the end, with saves, refreshes and records meanwhile.

    Not all that is resident: the system takes back pages of files, and what grows would hide behind them.
    """
    anonymous = []

    def note(_):
        status = Path("/proc/self/status").read_text()
        anonymous.append(int(status.partition("RssAnon:")[2].split()[0]) * 1024 / 1e6)

    at_step(monkeypatch, note)
    changes = {"realm__steps": 2000, "refresh__every": 50, "checkpoint__every": 100, "log__every": 10}
    train_measured(open_inline(people, tmp_path, **changes))
    early, late = max(anonymous[400:600]), max(anonymous[-200:])
    print(f"anonymous {early:.0f} MB after 600 steps, {late:.0f} MB after 2,000")
    assert late < early + 20
