"""Training with an index that another job builds, cut off and resumed: the same bits, or a word."""

import logging
import os
import shutil
import signal

import jax
import pytest
from runs import (
    Cut,
    adoptions,
    assert_same,
    cut_off,
    first_generation_only,
    make_job,
    metrics,
    open_tiny,
    train,
    train_with_builder,
)

from realm_jax.errors import UserError
from realm_jax.host import Preempted, Stop
from realm_jax.indexing import files as generations
from realm_jax.indexing.async_provider import AsyncIndexProvider
from realm_jax.indexing.exporter import Exporter, export_record, sample_vectors, to_arrays
from realm_jax.indexing.files import export_step, generation_names
from realm_jax.storage import PosixFolder
from realm_jax.train.checkpoints import SavedCheckpoint

pytestmark = pytest.mark.usefixtures("quick_steps")


def checkpoints(run):
    return run.workdir / "realm" / "checkpoints"


def remove_generations(run, first=0):
    folder = PosixFolder(run.workdir)
    for name in generation_names(folder):
        if export_step(name) >= first:
            generations.remove_generation(folder, name)


@pytest.mark.slow
def test_a_generation_that_is_gone_at_a_restart_is_built_again(people, sturdy, tmp_path, monkeypatch):
    run = open_tiny(people, tmp_path)
    cut_off(monkeypatch, lambda: train_with_builder(run), 7)
    remove_generations(run)
    assert_same(train_with_builder(run), sturdy.final)
    built = {export_step(name) for name in generation_names(PosixFolder(run.workdir))}
    assert 4 in built, "the checkpoint of step 6 names it"


@pytest.mark.slow
def test_sigterm_while_waiting_saves_and_goes_on_with_the_same_bits(people, sturdy, tmp_path, monkeypatch):
    """The generation of step 2 is due at step 3, where there is nobody to build it."""
    run, wait = open_tiny(people, tmp_path), AsyncIndexProvider._wait

    def preempted(self, step, *rest, **options):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return wait(self, step, *rest, **options)

    with monkeypatch.context() as patch, first_generation_only(run):
        patch.setattr(AsyncIndexProvider, "_wait", preempted)
        with pytest.raises(Preempted, match="saved realm at step 3"):
            train(run)
    assert SavedCheckpoint.newest(checkpoints(run)).step == 3
    assert_same(train_with_builder(run), sturdy.final)
    assert adoptions(run) == adoptions(sturdy.run)


@pytest.mark.slow
def test_a_generation_that_does_not_come_in_time_costs_no_step(people, sturdy, tmp_path):
    run = open_tiny(people, tmp_path)
    with first_generation_only(run, seconds=3.0):
        with pytest.raises(UserError, match="generation of step 2, due at step 3 did not come"):
            train(run)
    assert SavedCheckpoint.newest(checkpoints(run)).step == 3
    assert_same(train_with_builder(run), sturdy.final)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 2, 5])
def test_any_checkpoint_that_is_kept_can_be_gone_on_from(people, tmp_path, after):
    """Also the one before the newest, and with several generations on their way."""
    run = open_tiny(people, tmp_path, adopt_after=after)
    final, seen = train_with_builder(run), metrics(run)
    shutil.rmtree(checkpoints(run) / "8")
    assert SavedCheckpoint.newest(checkpoints(run)).step == 6
    assert_same(train_with_builder(run), final)
    assert metrics(run) == seen


@pytest.mark.slow
def test_what_is_due_at_the_step_of_a_checkpoint_is_exported_again(people, tmp_path, monkeypatch):
    """The power goes off once step 6 is saved, before its towers are exported for use at that very step."""
    quiet, run, export = (*(open_tiny(people, tmp_path / name, adopt_after=0) for name in "ab"), Exporter.export)

    def cut(exporter, step, *rest):
        if step == 6:
            raise Cut
        export(exporter, step, *rest)

    final = train_with_builder(quiet)
    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(Exporter, "export", cut)
        train_with_builder(run)
    assert SavedCheckpoint.newest(checkpoints(run)).step == 6
    assert_same(train_with_builder(run), final)
    assert adoptions(run) == adoptions(quiet) == [(0, 0), (2, 2), (4, 4), (6, 6)]


@pytest.mark.slow
def test_without_the_generation_and_its_export_training_goes_on_with_another(copied, caplog):
    """And with newer ones afterwards."""
    shutil.rmtree(checkpoints(copied) / "8")  # the one before names the generation of step 4
    remove_generations(copied, first=4)
    for step in (4, 6):
        generations.remove_export(PosixFolder(copied.workdir), step)
    with caplog.at_level(logging.WARNING):
        train_with_builder(copied)
    assert "continuing with generation 2-" in caplog.text
    assert "exports/4 is not there; continuing with the index of step 2 until the next one is due" in caplog.text
    assert adoptions(copied)[-1] == (7, 6)


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, -1])
def test_what_rolled_back_steps_left_is_never_served(people, tmp_path, after):
    run, folder = open_tiny(people, tmp_path, adopt_after=after), PosixFolder(tmp_path)
    train_with_builder(run)
    shutil.rmtree(checkpoints(run) / "8")
    other = jax.tree.map(lambda x: x * 1.5, run.initial_params())
    towers = to_arrays({name: other[name] for name in run.model.embedder_names})
    generations.write_export(folder, export_record(run, 7), towers, sample_vectors(run, other))
    make_job(run).work(Stop(), 7, True)
    assert 7 in {export_step(name) for name in generation_names(folder)}
    train_with_builder(run)
    assert generations.read_export(folder, 7) is None
    assert 7 not in {index for _, index in adoptions(run)}
