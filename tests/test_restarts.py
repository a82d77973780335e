"""Training with an index that another job builds, cut off and resumed: the same bits, or a word."""

import logging
import shutil
import threading

import jax
import pytest
from runs import (
    Cut,
    adoptions,
    assert_same,
    builder,
    cut_at,
    make_job,
    metrics,
    open_tiny,
    train,
    with_first_generation_only,
)

from realm_jax.errors import UserError
from realm_jax.host import Preempted, Stop
from realm_jax.refresh.exporter import Exporter, export_record, sample_vectors, to_arrays
from realm_jax.refresh.generations import (
    export_step,
    generation_names,
    read_export,
    remove_export,
    remove_generation,
    write_export,
)  # fmt: skip
from realm_jax.storage import PosixFolder
from realm_jax.train import loop
from realm_jax.train.built_index import BuiltIndex
from realm_jax.train.checkpoints import SavedCheckpoint

pytestmark = pytest.mark.usefixtures("quick_steps")


@pytest.mark.slow
def test_a_generation_that_is_gone_at_a_restart_is_built_again(people, sturdy, tmp_path, monkeypatch):
    run = open_tiny(people, tmp_path)
    cut_at(monkeypatch, 7)
    with builder(run), pytest.raises(Cut):
        train(run)
    folder = PosixFolder(run.workdir)
    for name in generation_names(folder):
        remove_generation(folder, name)
    with builder(run):
        final = train(run)
    assert 4 in {export_step(name) for name in generation_names(folder)}, "the checkpoint of step 6 names it"
    assert_same(final, sturdy.final)


class StopWhen(Stop):
    """SIGTERM comes once `due` says so."""

    due = staticmethod(lambda: False)

    @property
    def requested(self):
        return self.due()

    @requested.setter
    def requested(self, value):
        pass


def test_sigterm_while_waiting_saves_and_goes_on_with_the_same_bits(people, sturdy, tmp_path, monkeypatch):
    """The generation of step 2 is due at step 3, where there is nobody to build it."""
    run = open_tiny(people, tmp_path)
    with_first_generation_only(run, lambda: train_until_waiting(run, monkeypatch))
    assert SavedCheckpoint.newest(run.workdir / "realm" / "checkpoints").step == 3
    with builder(run):
        assert_same(train(run), sturdy.final)
    assert adoptions(run) == adoptions(sturdy.run)


def train_until_waiting(run, monkeypatch):
    with monkeypatch.context() as patch:
        waiting = threading.Event()
        wait = BuiltIndex._wait

        def watched(self, step, what):
            if step == 2:
                waiting.set()
            return wait(self, step, what)

        patch.setattr(BuiltIndex, "_wait", watched)
        patch.setattr(StopWhen, "due", staticmethod(waiting.is_set))
        patch.setattr(loop, "Stop", StopWhen)
        with pytest.raises(Preempted, match="saved realm at step 3"):
            train(run)


@pytest.mark.slow
def test_a_generation_that_does_not_come_in_time_costs_no_step(people, sturdy, tmp_path):
    run = open_tiny(people, tmp_path)
    with pytest.raises(UserError, match="generation of step 2, due at step 3 did not come"):
        with_first_generation_only(run, lambda: train(run), seconds=3.0)
    assert SavedCheckpoint.newest(run.workdir / "realm" / "checkpoints").step == 3
    with builder(run):
        assert_same(train(run), sturdy.final)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 2, 5])
def test_any_checkpoint_that_is_kept_can_be_gone_on_from(people, tmp_path, after):
    """Also the one before the newest, and with several generations on their way."""
    run = open_tiny(people, tmp_path, adopt_after=after)
    with builder(run):
        final = train(run)
    seen = metrics(run)
    checkpoints = run.workdir / "realm" / "checkpoints"
    shutil.rmtree(checkpoints / "8")
    assert SavedCheckpoint.newest(checkpoints).step == 6
    with builder(run):
        assert_same(train(run), final)
    assert metrics(run) == seen


@pytest.mark.slow
def test_what_is_due_at_the_step_of_a_checkpoint_is_exported_again(people, tmp_path, monkeypatch):
    """The power goes off once step 6 is saved, before its towers are exported for use at that very step."""

    def cut(exporter, step, *rest):
        if step == 6:
            raise Cut
        export(exporter, step, *rest)

    quiet, run, export = (*(open_tiny(people, tmp_path / name, adopt_after=0) for name in "ab"), Exporter.export)
    with builder(quiet):
        final = train(quiet)
    with builder(run):
        with monkeypatch.context() as patch, pytest.raises(Cut):
            patch.setattr(Exporter, "export", cut)
            train(run)
        assert SavedCheckpoint.newest(run.workdir / "realm" / "checkpoints").step == 6
        assert_same(train(run), final)
    assert adoptions(run) == adoptions(quiet) == [(0, 0), (2, 2), (4, 4), (6, 6)]


@pytest.mark.slow
def test_without_the_generation_and_its_export_training_goes_on_with_another(copied, caplog):
    """And with newer ones afterwards."""
    folder = PosixFolder(copied.workdir)
    shutil.rmtree(copied.workdir / "realm" / "checkpoints" / "8")  # the one before names the generation of step 4
    for name in generation_names(folder):
        if export_step(name) >= 4:
            remove_generation(folder, name)
    remove_export(folder, 4)
    remove_export(folder, 6)
    with builder(copied), caplog.at_level(logging.WARNING):
        train(copied)
    assert "continuing with generation 2-" in caplog.text
    assert "exports/4 is not there; continuing with the index of step 2 until the next one is due" in caplog.text
    assert adoptions(copied)[-1] == (7, 6)


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, pytest.param(-1, marks=pytest.mark.slow)])
def test_what_rolled_back_steps_left_is_never_served(people, tmp_path, after):
    run = open_tiny(people, tmp_path, adopt_after=after)
    with builder(run):
        train(run)
    folder = PosixFolder(run.workdir)
    shutil.rmtree(run.workdir / "realm" / "checkpoints" / "8")
    other = jax.tree.map(lambda x: x * 1.5, run.initial_params())
    towers = to_arrays({name: other[name] for name in run.model.embedder_names})
    write_export(folder, export_record(run, 7), towers, sample_vectors(run, other))
    make_job(run).work(Stop(), 7, True)
    assert 7 in {export_step(name) for name in generation_names(folder)}
    with builder(run):
        train(run)
    assert read_export(folder, 7) is None
    assert 7 not in {index for _, index in adoptions(run)}
