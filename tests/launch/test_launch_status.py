"""`realm launch status`: expected jobs, their heartbeats, and folders with damaged files."""

import json

import pytest
from runs import until

from realm_jax.cli import main as cli
from realm_jax.indexing import heartbeat as status
from realm_jax.indexing.heartbeat import (
    HEARTBEAT_SECONDS,
    Status,
    StatusWriter,
    read_status,
    trainer_status,
    write_status,
)
from realm_jax.launch.status import clear_expected_jobs, poll, record_expected_jobs, summary
from realm_jax.storage import PosixFolder, StorageError


@pytest.fixture
def folder(tmp_path) -> PosixFolder:
    return PosixFolder(tmp_path)


def put(folder: PosixFolder, **jobs) -> None:
    for name, (stage, step, counter) in jobs.items():
        write_status(folder, name.replace("_", "-"), Status("one", stage=stage, step=step, counter=counter))


def never(_seconds):
    pytest.fail("waits")


def states(folder, wait=lambda seconds: None) -> dict[str, str]:
    return {job.name: job.state for job in poll(folder, wait).jobs}


def test_a_job_whose_counter_stands_still_for_two_heartbeats_is_late(folder):
    waited = []
    put(folder, trainer=("realm", -1, 1), builder_0=("building", 8, 5))

    def wait(seconds: float) -> None:
        waited.append(seconds)
        put(folder, trainer=("qa", -1, 2))

    state = poll(folder, wait)
    assert state.late == ["builder-0"] and sum(waited) == pytest.approx(2 * HEARTBEAT_SECONDS)
    assert [job.name for job in state.jobs] == ["trainer", "builder-0"]


def test_a_job_that_is_done_is_not_late_and_status_does_not_wait_for_it(folder):
    write_status(folder, "trainer", Status("", stage="ended", counter=9, done=True))
    assert states(folder, never) == {"trainer": "done"}


def test_a_trainer_that_needs_no_further_index_still_has_to_live(folder):
    """After REALM the builders may end; fine-tuning goes on."""
    write_status(folder, "trainer", Status("one", stage="qa", step=20, counter=9, index_done=True, index=15))
    assert states(folder) == {"trainer": "late"} and poll(folder, lambda _: None).jobs[0].status.index == 15


def test_a_job_that_was_started_and_gave_no_heartbeat_is_late(folder, tmp_path):
    write_status(folder, "trainer", Status("", counter=1, done=True))
    record_expected_jobs(str(tmp_path), ["trainer", "builder-0", "builder-1"])
    put(folder, builder_0=("building", 8, 5))

    def wait(_seconds: float) -> None:
        put(folder, builder_0=("building", 8, 6))

    assert states(folder, wait) == {"trainer": "late", "builder-0": "alive", "builder-1": "late"}, "a new start"


def test_a_stopped_job_is_not_late(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("realm_jax.launch.status.STALE_AFTER", 0.0)
    record_expected_jobs(str(tmp_path), ["trainer"])
    put(folder, trainer=("realm", -1, 1))
    clear_expected_jobs(str(tmp_path))
    assert states(folder) == {"trainer": "stopped"}
    (tmp_path / "config.json").write_text('{"tasks": "realm"}')
    (tmp_path / "realm").mkdir()
    (tmp_path / "realm" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "retrieval_utility": NaN}\n')
    assert cli.main(["launch", "status", f"--workdir={tmp_path}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == {"step": 1, "loss": 2.5, "retrieval_utility": None}


def test_a_start_forgets_builders_of_an_earlier_one(folder, tmp_path):
    put(folder, builder_0=("building", 8, 5), builder_3=("building", 8, 5))
    write_status(folder, "builder-1", Status("one", counter=7, done=True))
    write_status(folder, "trainer", Status("one", counter=7, done=True, index_done=True, pins=(4,)))
    record_expected_jobs(str(tmp_path), ["trainer", "builder-0", "builder-1"])
    assert sorted(folder.names("jobs")) == ["builder-0.json", "expected.json", "trainer.json"]
    assert read_status(folder, "trainer") == Status("one", counter=7, pins=(4,)), "which run it is stays known"


def test_a_run_without_jobs_and_records_is_late(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("realm_jax.launch.status.STALE_AFTER", 0.0)
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["launch", "status", f"--workdir={tmp_path}"]) == 1
    assert "trainer: LATE: no heartbeat for 10 s; never started" in capsys.readouterr().out


@pytest.mark.parametrize(
    "damage",
    [
        {"jobs/trainer.json": {"pins": None}},
        {"jobs/builder-0.json": {"step": "x"}},
        {"jobs/builder-0.json": {"counter": None}},
        {"jobs/expected.json": {"jobs": None}},
        {"jobs/expected.json": []},
        {"config.json": {"refresh": None, "tasks": None}},
        {"config.json": {"refresh": {"shared": 3}}},
        {"qa/metrics.jsonl": {"loss": None, "step": None, "index_age": {}}},
    ],
)
def test_status_ignores_damaged_files(folder, tmp_path, capsys, monkeypatch, damage):
    monkeypatch.setattr("realm_jax.launch.status.STALE_AFTER", 0.0)
    (tmp_path / "config.json").write_text('{"tasks": "qa"}')
    put(folder, trainer=("qa", -1, 1), builder_0=("building", 8, 5))
    for name, content in damage.items():
        whole = folder.read_json(name) if name.startswith("jobs/") and (tmp_path / name).exists() else {}
        content = whole | content if isinstance(content, dict) else content
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content) + "\n")
    assert cli.main(["launch", "status", f"--workdir={tmp_path}"]) == 1
    assert "trainer: " in capsys.readouterr().out


def test_status_rejects_a_workdir_without_a_run(tmp_path, capsys):
    assert cli.main(["launch", "status", f"--workdir={tmp_path}"]) == 2
    assert "nothing is there yet" in capsys.readouterr().err


# ---- heartbeats


def flaky_writes(monkeypatch, fails: int) -> list[Status]:
    """What is written from now on; the write of that number fails."""
    written, write = [], status.write_status

    def flaky(folder, job, what):
        written.append(what)
        if len(written) == fails:
            raise StorageError("full")
        write(folder, job, what)

    monkeypatch.setattr(status, "write_status", flaky)
    return written


def test_a_job_counts_on_whatever_its_storage_does(folder, monkeypatch, caplog):
    written = flaky_writes(monkeypatch, fails=2)
    writer = StatusWriter(folder, "builder-0", Status("one"))
    writer.update(wait=True, stage="building", step=3)
    writer.update(wait=True, step=4)
    assert caplog.messages == ["full; other jobs cannot see that the builder-0 goes on"]
    assert read_status(folder, "builder-0").counter == 1
    writer.update(wait=True)
    assert read_status(folder, "builder-0") == Status("one", stage="building", step=4, counter=3) == written[-1]


def test_changes_are_written_at_once_and_steps_with_the_next_heartbeat(folder, monkeypatch):
    monkeypatch.setattr(status, "HEARTBEAT_SECONDS", 60.0)
    written = flaky_writes(monkeypatch, fails=0)
    with StatusWriter(folder, "trainer", Status("one")) as writer:
        until(lambda: written)
        writer.update(step=3)
        writer.update(step=4, index=2)
        until(lambda: len(written) > 1)
        writer.update(step=5)
        assert not writer._changed.is_set()
    assert [(each.counter, each.step, each.index) for each in written] == [(1, -1, -1), (2, 4, 2), (3, 5, 2)]


def test_updates_during_a_write_are_not_lost(folder, monkeypatch):
    """No two statuses have one counter, or the second is no heartbeat."""
    write, written = status.write_status, []

    def meanwhile(folder, job, what):
        if not written:
            writer.update(index=2)
        written.append(what)
        write(folder, job, what)

    monkeypatch.setattr(status, "write_status", meanwhile)
    writer = StatusWriter(folder, "trainer", Status("one"))
    with writer:
        until(lambda: len(written) > 1)
    assert [each.counter for each in written] == [*range(1, len(written) + 1)]
    assert read_status(folder, "trainer").index == 2


def test_only_the_end_of_a_recipe_is_done_and_a_restart_keeps_the_run(folder, tmp_path):
    with trainer_status(folder, tmp_path, needs_index=True) as writer:
        writer.update(wait=True, stage="realm", pins=(4,))
        assert read_status(folder, "trainer").stage == "realm" and read_status(folder, "trainer").needs_index
        writer.update(index_done=True)
    ended = read_status(folder, "trainer")
    assert ended.done and ended.index_done
    with pytest.raises(ZeroDivisionError), trainer_status(folder, tmp_path, needs_index=True) as writer:
        writer.update(stage="qa")
        raise ZeroDivisionError
    again = read_status(folder, "trainer")
    assert (again.run, again.stage, again.pins, again.done) == (ended.run, "qa", (4,), False)
    assert again.needs_index, "a builder that sees it start stays until it says that REALM is done"
    assert again.counter > ended.counter


def test_a_task_that_has_just_begun_does_not_hide_the_one_before(folder, tmp_path):
    (tmp_path / "config.json").write_text('{"tasks": "ict,realm"}')
    for task, line in (("ict", '{"step": 7, "loss": 1.5}\n'), ("realm", "")):
        (tmp_path / task).mkdir()
        (tmp_path / task / "metrics.jsonl").write_text(line)
    assert summary(folder) == "ict step 7, loss 1.5"
