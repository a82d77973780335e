"""The exported model of a run: the bits of its checkpoint, complete or not there, opened by other libraries."""

import json
import os
import shutil

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from tiny_run import go_back_to, open_config, tiny_config

from realm_jax.errors import UserError
from realm_jax.models.layers import Params
from realm_jax.train import exported_model as exported_model_module
from realm_jax.train.checkpoints import SavedCheckpoint
from realm_jax.train.exported_model import (
    ExportedModel,
    exported_model,
    exported_vectors,
    find_exported_model,
    write_exported_model,
)
from realm_jax.train.recipe import train
from realm_jax.train.restore import restore_params, saved_vectors
from realm_jax.train.trained_run import open_run_for_inference, restore


def assert_same_bits(params: Params, expected: Params) -> None:
    assert params.keys() == expected.keys()
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True), params, expected
    )


@pytest.mark.parametrize("task", ["ict", "qa"])
def test_holds_the_parameters_and_vectors_of_the_last_checkpoint_of_a_task(trained_run, task):
    exported, checkpoint = exported_model(trained_run.workdir, task), restore_params(trained_run, task)
    assert (exported.task, exported.step) == (task, 2)
    assert_same_bits(exported.params(trained_run.model, [*checkpoint]), checkpoint)
    saved = SavedCheckpoint.newest(trained_run.workdir / task / "checkpoints").read("vectors")
    vectors = exported.vectors(trained_run.sources.passages.fingerprint)
    np.testing.assert_array_equal(vectors, saved[: trained_run.context.rows])
    assert exported.vectors("another corpus") is None


def test_vectors_of_a_checkpoint_are_taken_only_if_its_parameters_give_them(trained_run, monkeypatch):
    for task, fits in (("ict", False), ("qa", True)):  # fine-tuning leaves the passage encoder as it was
        saved = SavedCheckpoint.newest(trained_run.workdir / task / "checkpoints")
        np.testing.assert_allclose(
            saved_vectors(trained_run, saved), trained_run.embed(restore_params(trained_run, task, saved)), atol=1e-5
        )
        with monkeypatch.context() as patch:
            patch.setattr(SavedCheckpoint, "record", saved.record | {"index_step": 1})  # training went on for a step
            assert (saved_vectors(trained_run, saved) is not None) == fits


def test_vectors_are_read_after_process_0_wrote_them_and_only_if_every_process_sees_them(trained_run, monkeypatch):
    model = trained_run.workdir / "qa" / "model"
    model.rename(model.with_name("written later"))

    def wait_for_process_0(value):
        if model.with_name("written later").exists():
            model.with_name("written later").rename(model)
        return value

    monkeypatch.setattr(exported_model_module, "broadcast_from_process_0", wait_for_process_0)
    assert exported_vectors(trained_run, "qa") is not None
    monkeypatch.setattr(exported_model_module, "broadcast_from_process_0", lambda value: value and value + 1)
    assert exported_vectors(trained_run, "qa") is None  # process 0 has another model
    monkeypatch.setattr(exported_model_module, "broadcast_from_process_0", lambda value: value)
    other_process = [False, True]  # it sees no vectors
    monkeypatch.setattr(exported_model_module, "allgather_flags", lambda *flags: np.array([flags, other_process]))
    assert exported_vectors(trained_run, "qa") is None
    other_process[:] = [False, False]
    with pytest.raises(UserError, match="qa/model: another process cannot read it"):
        exported_vectors(trained_run, "qa")


def test_the_run_folder_has_the_model_of_the_last_task_by_links(trained_run):
    workdir = trained_run.workdir
    assert exported_model(workdir).task == "qa"
    file = "reader/model.safetensors"
    assert os.path.samefile(workdir / "model" / file, workdir / "qa" / "model" / file)


@pytest.mark.slow
def test_one_tower_for_both_is_read_back(people, tmp_path):
    config = tiny_config(people)
    config.model.shared_tower, config.tasks = True, "ict"
    run = open_config(config, tmp_path)
    train(run)
    exported = exported_model(tmp_path)
    assert exported.manifest["networks"] == ["embedder", "reader"]
    assert_same_bits(exported.params(run.model, ["embedder", "reader"]), restore_params(run, "ict"))


def test_a_missing_model_is_written_again_without_a_step(copied_run, monkeypatch):
    before = {path.relative_to(copied_run): path.read_bytes() for path in (copied_run / "model").rglob("*.safetensors")}
    config = json.loads((copied_run / "config.json").read_text())
    for folder in ("model", "qa/model"):
        shutil.rmtree(copied_run / folder)
    train(open_config(ConfigDict(config), copied_run))
    after = {path.relative_to(copied_run): path.read_bytes() for path in (copied_run / "model").rglob("*.safetensors")}
    assert after == before


def test_a_run_that_is_started_again_keeps_its_model_in_place(copied_run):
    """No task before the last one puts its own model there, not even for a moment."""
    before = (copied_run / "model" / "manifest.json").stat().st_ino
    train(open_config(ConfigDict(json.loads((copied_run / "config.json").read_text())), copied_run))
    assert (copied_run / "model" / "manifest.json").stat().st_ino == before


def test_a_task_of_which_only_the_run_has_the_model_is_found(copied_run):
    shutil.rmtree(copied_run / "qa" / "model")
    assert exported_model(copied_run, "qa").task == "qa"


def test_a_model_that_is_replaced_while_it_is_read_is_read_again(copied_run, monkeypatch):
    read = ExportedModel.params

    def replaced(model, *arguments):
        monkeypatch.setattr(ExportedModel, "params", read)
        go_back_to(copied_run, "ict")
        raise UserError("a file is gone")

    monkeypatch.setattr(ExportedModel, "params", replaced)
    assert restore(open_run_for_inference(copied_run), warn=False).task == "ict"


def test_a_kill_between_the_two_renames_of_a_replacement_leaves_the_model_before(copied_run):
    identity = exported_model(copied_run).identity
    (copied_run / "model").rename(copied_run / ".model.old")
    assert exported_model(copied_run).identity == identity


def test_a_write_that_fails_leaves_the_model_before(trained_run, tmp_path, monkeypatch):
    params = restore_params(trained_run, "qa")
    write_exported_model(tmp_path / "model", trained_run, "ict", 1, params, None, False)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exported_model_module, "write_sentence_transformer", full)
    with pytest.raises(UserError, match="model: cannot be written .No space left on device.; make room"):
        write_exported_model(tmp_path / "model", trained_run, "qa", 2, params, None, False)
    left = find_exported_model(tmp_path / "model")
    assert left is not None and left.task == "ict"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_another_format_is_named(trained_run, tmp_path):
    path = shutil.copytree(trained_run.workdir / "model", tmp_path / "model") / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 9}))
    with pytest.raises(UserError, match="manifest.json: has another format than 1"):
        exported_model(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_sentence_transformers_opens_it_with_the_vectors_of_the_run(people, tmp_path, shared):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from realm_jax import Model

    config = tiny_config(people)
    config.model.shared_tower, config.tasks = shared, "ict"
    config.encoder.update({"query_prompt": "query: {text}", "passage_prompt": "passage: {title} {text}"})
    run = open_config(config, tmp_path)
    train(run)
    theirs, ours = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu"), Model(tmp_path)
    # Of a shared encoder the library knows only the longest input, so it would not cut a longer query as we do.
    texts = ["When was he born?", "The house in it."]
    assert all(len(run.sources.tokenizer.encode(text).ids) <= config.data.query_length - 2 for text in texts)
    np.testing.assert_allclose(theirs.encode_query(texts), ours.encode(texts), atol=2e-5)
    np.testing.assert_allclose(theirs.encode_document(texts), ours.encode(texts, "document"), atol=2e-5)
