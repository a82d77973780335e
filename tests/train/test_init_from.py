"""A run that starts from another run's parameters: once, from the same vocabulary and sizes, and from nothing else."""

import json
import shutil

import jax
import numpy as np
import pytest
from tiny_run import PEOPLE, prepare_people, tiny_config, train_tiny_run

from realm_jax.assemble import make_run
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.run import Run
from realm_jax.storage import read_json, sha256_hex
from realm_jax.train.checkpoints import DamagedCheckpoint, SavedCheckpoint
from realm_jax.train.init_from import find_source, record_start
from realm_jax.train.loop import train_task
from realm_jax.train.recipe import starting_params, train
from realm_jax.train.records import stage_summary
from realm_jax.train.restore import restore_params, vectors_from_earlier_task
from realm_jax.train.workdir import begins_with_reader, check_workdir


def heir(source, folder, **changes):
    """A run in `folder` over the same data that names the first one in init_from."""
    config = tiny_config(source.config.data.path)
    config.init_from = str(source.workdir)
    config.update(changes)
    return make_run(config, folder, open_sources(config.data.path), jax.devices()[:1])


def check(run):
    tokenizer = run.sources.tokenizer
    find_source(run.config.init_from).check(run.config, run.model, tokenizer)


@pytest.mark.slow
def test_borrows_again_after_dying_before_the_first_checkpoint(trained_run, tmp_path):
    run = heir(trained_run, tmp_path)
    (tmp_path / "ict" / "checkpoints").mkdir(parents=True)
    theirs = restore_params(trained_run, "qa")
    jax.tree.map(lambda a, b: None if (a == b).all() else pytest.fail("differs"), starting_params(run), theirs)


def test_refuses_a_source_that_is_not_done(trained_run, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(trained_run.workdir, source)
    config = json.loads((source / "config.json").read_text())
    config["qa"]["steps"] = 9
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="init_from: .*exported qa at step 2, and trains qa for 9 steps; let it finish"):
        check(heir(trained_run, tmp_path / "run", init_from=str(source)))


def test_starts_from_the_final_parameters_even_with_another_optimiser(trained_run, tmp_path):
    run = heir(trained_run, tmp_path, realm={"retriever_start": 1})
    theirs = restore_params(trained_run, "qa")
    jax.tree.map(lambda a, b: None if (a == b).all() else pytest.fail("differs"), starting_params(run), theirs)


@pytest.fixture
def embeddings(monkeypatch):
    """A list that grows with every time that the corpus is embedded."""
    found, embed = [], Run.embed

    def counted(run, *arguments):
        found.append(run.workdir)
        return embed(run, *arguments)

    monkeypatch.setattr(Run, "embed", counted)
    return found


@pytest.mark.slow
def test_the_corpus_is_embedded_once_for_the_same_parameters(tmp_path, embeddings):
    """At the end of ict. Fine-tuning, which leaves the document tower as it is, and an heir take the vectors."""
    run = train_tiny_run(tmp_path)
    assert len(embeddings) == 1
    saved = SavedCheckpoint.newest(run.workdir / "qa" / "checkpoints").read("vectors")
    np.testing.assert_array_equal(saved, SavedCheckpoint.newest(run.workdir / "ict" / "checkpoints").read("vectors"))
    np.testing.assert_array_equal(saved, embed_anew(run))
    embeddings.clear()
    other = heir(run, tmp_path / "other", tasks="qa")
    check_workdir(other)
    train(other)
    assert embeddings == []


@pytest.mark.slow
def test_a_task_that_leaves_the_towers_alone_is_looked_behind(tmp_path, embeddings):
    config = tiny_config(prepare_people(tmp_path, house="of {}"))
    config.update({"tasks": "ict,mlm", "mlm": {"steps": 1, "batch_size": 4}})
    run = make_run(config, tmp_path / "run", open_sources(config.data.path), jax.devices()[:1])
    check_workdir(run)
    train(run)
    other = heir(run, tmp_path / "other", tasks="mlm,qa", mlm={"steps": 1, "batch_size": 4})
    check_workdir(other)
    train(other)
    assert embeddings == [run.workdir]


@pytest.mark.slow
def test_vectors_that_were_made_otherwise_are_made_anew(trained_run, tmp_path, embeddings):
    other = heir(trained_run, tmp_path, tasks="qa", model={"dtype": "bfloat16"})
    check_workdir(other)
    train(other)
    assert len(embeddings) == 1


def test_vectors_of_a_damaged_checkpoint_are_made_anew(trained_run, tmp_path, monkeypatch):
    run = heir(trained_run, tmp_path, tasks="qa")
    params = starting_params(run)
    assert vectors_from_earlier_task(run, "qa", params) is not None
    assert vectors_from_earlier_task(run, "qa", run.initial_params()) is None
    monkeypatch.setattr(
        SavedCheckpoint, "read", lambda *_: (_ for _ in ()).throw(DamagedCheckpoint("not as it was saved"))
    )
    assert vectors_from_earlier_task(run, "qa", params) is None


def embed_anew(run):
    return run.embed(restore_params(run, "ict"))


@pytest.mark.slow
def test_goes_on_without_the_source(trained_run, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(trained_run.workdir, source)
    run = heir(trained_run, tmp_path / "run", init_from=str(source))
    check_workdir(run)
    once = train(run)
    shutil.rmtree(source)
    jax.tree.map(lambda a, b: None if (a == b).all() else pytest.fail("differs"), train(run), once)


def test_names_what_does_not_fit(trained_run, tmp_path):
    with pytest.raises(UserError, match="init_from=.*is not a run directory"):
        check(heir(trained_run, tmp_path, init_from=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match=r"init_from: .* is \(.*set config.model"):
        check(heir(trained_run, tmp_path, model={"feed_forward": 64}))
    config = tiny_config(prepare_people(tmp_path / "other", [name[::-1].title() for name in PEOPLE]))
    config.init_from = str(trained_run.workdir)
    other = make_run(config, tmp_path, open_sources(config.data.path), jax.devices()[:1])
    with pytest.raises(UserError, match="init_from: .*another vocabulary"):
        check(other)


def test_a_reader_can_come_from_another_run_than_the_retriever(trained_run, tmp_path):
    """The retriever is fresh here, the reader that of the trained run."""
    run = heir(trained_run, tmp_path, init_from="", reader_from=str(trained_run.workdir))
    theirs = restore_params(trained_run, "qa")
    fresh, found = run.initial_params(), starting_params(run)
    jax.tree.map(np.testing.assert_array_equal, found["reader"], theirs["reader"])
    for tower in run.model.embedder_names:
        jax.tree.map(np.testing.assert_array_equal, found[tower], fresh[tower])


def test_a_run_that_trained_other_networks_in_its_last_task_is_read_by_their_names(trained_run, tmp_path):
    """The source fine-tuned the query tower; here fine-tuning by BM25 would train the reader alone."""
    run = heir(trained_run, tmp_path, qa={"search": "bm25"})
    check(run)
    theirs = restore_params(trained_run, "qa")
    jax.tree.map(np.testing.assert_array_equal, starting_params(run), theirs)
    assert begins_with_reader(tmp_path)


def test_a_task_that_only_lost_hands_on_the_parameters_that_it_started_from(trained_run, tmp_path):
    run = heir(trained_run, tmp_path, tasks="ict", evaluation={"keep_best": True})
    check_workdir(run)
    params = starting_params(run)
    before = jax.tree.map(np.array, params)
    worth = iter([0.9, 0.8, 0.9])
    ended = train_task(run, "ict", params, lambda params, index, final: {"recall@5": next(worth)})
    jax.tree.map(np.testing.assert_array_equal, ended, before)
    assert stage_summary(tmp_path / "ict") == {
        "measure": "recall@5", "start": 0.9, "end": 0.9, "kept_step": 0, "last": 0.8
    }  # fmt: skip
    arrays = SavedCheckpoint.newest(tmp_path / "ict" / "best").record["checksums"]
    assert arrays and all(name.startswith("state.trained.") for name in arrays)  # no moments, nothing frozen


def test_what_another_start_left_is_removed_before_the_first_checkpoint(trained_run, tmp_path):
    run = heir(trained_run, tmp_path, tasks="ict")
    params = starting_params(run)
    (tmp_path / "ict" / "best").mkdir(parents=True)
    starting_params(run)
    assert (tmp_path / "ict" / "best").exists()
    record_start(run, jax.tree.map(lambda x: x + 1, params))
    assert not (tmp_path / "ict").exists()
    starting_params(heir(trained_run, tmp_path, tasks="ict", init_from=""))
    assert read_json(tmp_path / "start.json") == {"reader": False, "params": sha256_hex(b"{}")}
