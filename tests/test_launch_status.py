"""`realm launch status`: who should live, who does, and what is told of a folder in which something is damaged."""

import dataclasses
import json
import threading

import pytest

from realm_jax import cli
from realm_jax.index import generations
from realm_jax.index.generations import BEAT_SECONDS, Living, Status, read_status, write_status
from realm_jax.jobs import recipe
from realm_jax.launch.status import expect, expect_none, look, summary
from realm_jax.storage import PosixFolder, StorageError
from realm_jax.training.reporter import Reporter


def put(folder: PosixFolder, **jobs) -> None:
    for name, (stage, step, counter) in jobs.items():
        write_status(folder, name.replace("_", "-"), Status("one", stage=stage, step=step, counter=counter))


def never(_seconds):
    pytest.fail("waits")


def states(folder, wait=lambda seconds: None) -> dict[str, str]:
    return {job.name: job.state for job in look(folder, wait).jobs}


def test_a_job_whose_counter_stands_still_for_two_beats_is_late(tmp_path):
    folder, waited = PosixFolder(tmp_path), []
    put(folder, recipe=("realm", -1, 1), builder_0=("building", 8, 5))

    def wait(seconds: float) -> None:
        waited.append(seconds)
        put(folder, recipe=("qa", -1, 2))

    state = look(folder, wait)
    assert state.late == ["builder-0"] and sum(waited) == pytest.approx(2 * BEAT_SECONDS)
    assert [job.name for job in state.jobs] == ["trainer", "builder-0"]


def test_who_is_done_is_not_late_and_nobody_waits_for_them(tmp_path):
    folder = PosixFolder(tmp_path)
    write_status(folder, "recipe", Status("", stage="ended", counter=9, done=True))
    assert states(folder, never) == {"trainer": "done"}


def test_a_trainer_whose_exports_are_done_still_has_to_live(tmp_path):
    """After REALM its word to the builders is that it is done; fine-tuning goes on."""
    folder = PosixFolder(tmp_path)
    write_status(folder, "trainer", Status("one", stage="realm", step=20, counter=9, done=True, index=15))
    put(folder, recipe=("qa", -1, 4))
    assert states(folder) == {"trainer": "late"} and look(folder, lambda _: None).jobs[0].status.index == 15


def test_who_was_started_and_never_came_is_late(tmp_path):
    folder = PosixFolder(tmp_path)
    write_status(folder, "recipe", Status("", counter=1, done=True))
    expect(str(tmp_path), ["trainer", "builder-0", "builder-1"])
    put(folder, builder_0=("building", 8, 5))

    def wait(_seconds: float) -> None:
        put(folder, builder_0=("building", 8, 6))

    assert states(folder, wait) == {"trainer": "late", "builder-0": "alive", "builder-1": "late"}, "a new start"


def test_who_was_stopped_is_not_late(tmp_path, monkeypatch):
    monkeypatch.setattr("realm_jax.launch.status.PATIENCE", 0.0)
    folder = PosixFolder(tmp_path)
    expect(str(tmp_path), ["trainer"])
    put(folder, recipe=("realm", -1, 1))
    expect_none(str(tmp_path))
    assert states(folder) == {"trainer": "stopped"}
    assert cli.main(["launch", "status", f"--workdir={tmp_path}", "--json"]) == 0


def test_a_start_forgets_builders_of_an_earlier_one(tmp_path):
    folder = PosixFolder(tmp_path)
    put(folder, recipe=("realm", -1, 1), builder_0=("building", 8, 5), builder_3=("building", 8, 5))
    write_status(folder, "builder-1", Status("one", counter=7, done=True))
    write_status(folder, "trainer", Status("one", counter=7, done=True, pins=(4,)))
    expect(str(tmp_path), ["trainer", "builder-0", "builder-1"])
    assert sorted(folder.names("jobs")) == ["builder-0.json", "expected.json", "recipe.json", "trainer.json"]


def test_a_run_that_nobody_works_on_is_late_without_any_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("realm_jax.launch.status.PATIENCE", 0.0)
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["launch", "status", f"--workdir={tmp_path}"]) == 1
    assert "trainer: LATE: no sign of life for two beats; not heard of" in capsys.readouterr().out


@pytest.mark.parametrize(
    "damage",
    [
        {"jobs/recipe.json": {"pins": None}},
        {"jobs/builder-0.json": {"step": "x"}},
        {"jobs/builder-0.json": {"counter": None}},
        {"jobs/expected.json": {"jobs": None}},
        {"jobs/expected.json": []},
        {"config.json": {"refresh": None, "tasks": None}},
        {"config.json": {"refresh": {"shared": 3}}},
        {"qa/metrics.jsonl": {"loss": None, "step": None, "index_age": {}}},
    ],
)
def test_damage_is_passed_over(tmp_path, capsys, monkeypatch, damage):
    monkeypatch.setattr("realm_jax.launch.status.PATIENCE", 0.0)
    folder = PosixFolder(tmp_path)
    (tmp_path / "config.json").write_text('{"tasks": "qa"}')
    put(folder, recipe=("qa", -1, 1), builder_0=("building", 8, 5))
    for name, content in damage.items():
        whole = folder.read_json(name) if name.startswith("jobs/") and (tmp_path / name).exists() else {}
        content = whole | content if isinstance(content, dict) else content
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content) + "\n")
    assert cli.main(["launch", "status", f"--workdir={tmp_path}"]) == 1
    assert "trainer: " in capsys.readouterr().out


def test_nothing_there_is_said(tmp_path, capsys):
    assert cli.main(["launch", "status", f"--workdir={tmp_path}"]) == 2
    assert "nothing is there yet" in capsys.readouterr().err


# ---- signs of life


def test_a_living_job_counts_on_whatever_its_storage_does(tmp_path, monkeypatch):
    folder = PosixFolder(tmp_path)
    written, write = [], generations.write_status

    def flaky(*status):
        written.append(status)
        if len(written) == 2:
            raise StorageError("full")
        write(*status)

    monkeypatch.setattr(generations, "write_status", flaky)
    with Living(folder, "builder-0", Status("one")) as job:
        job.tell(stage="building", step=3)
        job.tell(stage="building", step=3)
        assert len(written) == 2, "nothing new is not written again"
        job.tell(step=4)
    assert read_status(folder, "builder-0") == Status("one", stage="building", step=4, counter=3)


class OfRun:
    """As much of a run as signs of life need."""

    def __init__(self, workdir):
        from realm_jax.config import default

        self.workdir, self.config = workdir, default()


def test_a_beat_while_the_trainer_tells_something_is_not_lost(tmp_path, monkeypatch):
    """No two statuses have one counter, or the second is no sign of life."""
    told = Reporter(OfRun(tmp_path), PosixFolder(tmp_path), "realm")
    beat, replace = threading.Thread(target=told._live), dataclasses.replace

    def meanwhile(status, **changes):
        changed = replace(status, **changes)
        beat.start()
        while beat.is_alive() and not told._counting.locked():
            pass
        return changed

    monkeypatch.setattr(dataclasses, "replace", meanwhile)
    told.tell(3, index=2)
    beat.join()
    assert (told._status.counter, told._status.index) == (2, 2)


def test_a_recipe_lives_to_its_end_and_is_done_only_then(tmp_path):
    folder = PosixFolder(tmp_path)
    with recipe.living(OfRun(tmp_path)) as tell:
        tell("realm")
        tell("qa")
        assert read_status(folder, "recipe") == Status("", stage="qa", step=-1, counter=3)
    assert read_status(folder, "recipe").done
    with pytest.raises(ZeroDivisionError), recipe.living(OfRun(tmp_path)) as tell:
        tell("qa")
        raise ZeroDivisionError
    assert not read_status(folder, "recipe").done


def test_a_task_that_has_just_begun_does_not_hide_the_one_before(tmp_path):
    (tmp_path / "config.json").write_text('{"tasks": "ict,realm"}')
    for task, line in (("ict", '{"step": 7, "loss": 1.5}\n'), ("realm", "")):
        (tmp_path / task).mkdir()
        (tmp_path / task / "metrics.jsonl").write_text(line)
    assert summary(PosixFolder(tmp_path)) == "ict step 7, loss 1.5"
