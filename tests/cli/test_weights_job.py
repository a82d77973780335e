"""`realm weights export` and `push`, and runs that start from weights: a folder, one for each network, or a model of
the hub."""

import dataclasses
import json
import logging
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hub import serving
from tiny_run import tiny_config
from weight_folders import assert_same_bits, save_tiny_network

from realm_jax.assemble import make_model, make_run
from realm_jax.cli import main as cli
from realm_jax.cli import weights as job
from realm_jax.config import with_values
from realm_jax.data.sources import open_sources
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import UserError
from realm_jax.models.folders import resolve_model_path
from realm_jax.models.layers import Params
from realm_jax.run import Run
from realm_jax.train import recipe
from realm_jax.train.init_from import find_source
from realm_jax.train.recipe import open_run, starting_params
from realm_jax.train.restore import restore_params
from realm_jax.train.workdir import begins_with_reader

NEEDED = {"model.safetensors", "config.json", "vocab.txt", "tokenizer_config.json", "modules.json"}
NEEDED |= {"1_Pooling/config.json", "2_Dense/model.safetensors"}  # of the files of a repository
NEEDED |= {"reader/config.json", "query_embedder/2_Dense/model.safetensors"}  # of networks
LEFT_OUT = {"pytorch_model.bin", "onnx/model.onnx", "onnx/config.json", "reader/onnx/model.onnx"}
TOKEN = "hf_a_secret"
FILES = ["config.json", "model.safetensors", "modules.json", "tokenizer_config.json", "vocab.txt"]
MODULES = ["1_Pooling", "2_Dense", "3_Dense", "4_LayerNorm", "README.md", "config_sentence_transformers.json"]
MODULES += ["sentence_bert_config.json"]


@pytest.fixture(scope="module")
def exported(trained_run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "weights"
    job.export(trained_run.workdir, folder)
    return folder


def heir(people: Path, folder: Path, init_from: Path | str, **model) -> Run:
    """A fresh run over the same data that names weights in init_from."""
    config = tiny_config(people)
    config.update({"init_from": str(init_from), "model": model})
    return make_run(config, folder, open_sources(config.data.path), jax.devices()[:1])


def on_host(params: Params) -> Params:
    return jax.tree.map(np.asarray, params)


# ---- out


def test_an_exported_run_is_what_another_starts_from_bit_for_bit(trained_run, exported, tmp_path):
    theirs = restore_params(trained_run, "qa")
    run = heir(Path(trained_run.config.data.path), tmp_path, exported)
    assert_same_bits(on_host(starting_params(run)), on_host(theirs))


def test_each_network_has_a_folder_that_is_whole(trained_run, exported):
    assert sorted(path.name for path in exported.parent.iterdir()) == ["weights"]
    networks = ["document_embedder", "query_embedder", "reader"]
    assert sorted(path.name for path in exported.iterdir()) == ["README.md", *networks]
    for folder in (exported / network for network in networks):
        modules = [] if folder.name == "reader" else MODULES
        assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, *modules])
        found = WordPiece.from_vocab(folder / "vocab.txt")
        assert found.fingerprint == trained_run.sources.tokenizer.fingerprint
    assert json.loads((exported / "reader" / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]


@pytest.mark.slow
def test_a_task_and_transformers_realm_can_be_asked_for(trained_run, tmp_path):
    command = ["weights", "export", f"--workdir={trained_run.workdir}", f"--output={tmp_path / 'ict'}"]
    assert cli.main([*command, "--task=ict", "--names=realm"]) == 0
    assert json.loads((tmp_path / "ict" / "reader" / "config.json").read_text())["architectures"] == ["RealmReader"]
    card = (tmp_path / "ict" / "README.md").read_text()
    assert card.startswith("# A retriever") and "* `reader/` opens with `RealmReader` of transformers 4\n" in card
    assert "the parameters of step 2 of `ict`" in card and "* qa: " not in card
    theirs = restore_params(trained_run, "ict")
    run = heir(Path(trained_run.config.data.path), tmp_path / "run", tmp_path / "ict")
    assert_same_bits(on_host(starting_params(run)), on_host(theirs))


def test_an_exported_reader_says_whether_it_was_trained_with_questions(trained_run, exported, people, tmp_path):
    job.export(trained_run.workdir, tmp_path / "earlier", task="ict")
    for name, folder, trained in (("end", exported, True), ("earlier", tmp_path / "earlier", False)):
        run = heir(people, tmp_path / name, folder)
        starting_params(run)
        assert begins_with_reader(run.workdir) == trained
    changes = {"init_from": str(exported), "reader_from": str(tmp_path / "earlier")}  # the reader is the latter's
    run = dataclasses.replace(run, config=with_values(run.config, changes))
    starting_params(run)
    assert not begins_with_reader(run.workdir)


def test_what_cannot_be_exported_is_told_and_leaves_nothing(trained_run, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--task=mlm: the run in .* has no such task; choose among ict, qa"):
        job.export(trained_run.workdir, tmp_path / "out", task="mlm")
    other = tmp_path / "run"
    shutil.copytree(trained_run.workdir, other)
    config = json.loads((other / "config.json").read_text())
    config["encoder"]["norm_epsilon"] = 1e-3
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="the run has config.encoder.norm_epsilon=0.001; give --names=bert"):
        job.export(other, tmp_path / "out", names="realm")

    config["encoder"] |= {"norm_epsilon": 1e-12, "passage_prompt": "{title} {text}"}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="the paper's encoder, but the run has another config.encoder.passage_prompt"):
        job.export(other, tmp_path / "out", names="realm")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("realm_jax.train.exported_model.save_tokenizer", full)
    with pytest.raises(OSError, match="No space"):
        job.export(trained_run.workdir, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_is_there_is_not_written_over(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert cli.main(["weights", "export", "--workdir=nowhere", f"--output={tmp_path / 'out'}"]) == 2
    assert "out already exists; remove it or choose another folder" in capsys.readouterr().err
    for wrong in (["export"], ["convert", "--task=qa"]):
        with pytest.raises(SystemExit):
            cli.main(["weights", *wrong, f"--output={tmp_path / 'other'}"])
    said = capsys.readouterr().err
    assert "arguments are required: --workdir" in said and "unrecognized arguments: --task=qa" in said


def test_the_card_says_what_the_networks_are_and_nothing_of_this_machine(trained_run, exported):
    card = (exported / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: sentence-transformers\n")
    assert "the parameters of step 2 of `qa`" in card and "* `reader/` opens with `BertForMaskedLM`" in card
    assert "On development questions:\n\n* exact match: " in card
    assert f"16 passages of 16 documents, fingerprint `{trained_run.sources.passages.fingerprint}`" in card
    assert "* ict: 2 steps of 4, learning rate " in card
    assert str(trained_run.workdir.parent) not in card


# ---- to the hub and back


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on this machine, with a token that may write there."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with serving(TOKEN) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def push(workdir: Path, *arguments: str) -> int:
    return cli.main(["weights", "push", f"--workdir={workdir}", "--repo=someone/mine", *arguments])


def test_what_is_pushed_to_the_hub_is_what_another_run_starts_from(hub, trained_run, exported, people, tmp_path, capfd):
    assert push(trained_run.workdir) == 0
    told = capfd.readouterr()
    assert told.out == f"{hub.url}/someone/mine\n" and TOKEN not in told.err
    there = hub.files["someone/mine"]
    assert there == {str(path.relative_to(exported)): path.read_bytes() for path in exported.rglob("*.*")}
    assert not hub.private["someone/mine"]
    run = heir(people, tmp_path / "run", "hf:someone/mine")
    assert_same_bits(on_host(starting_params(run)), on_host(restore_params(trained_run, "qa")))


def test_an_adapted_model_is_pushed_as_it_is_and_privately_where_that_is_asked_for(hub, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "adapt.json").write_text('{"measured": {}}')
    (tmp_path / "model" / "README.md").write_text("# An encoder\n")
    private = ("vectors.npy", "tokens.npy", "token_projection.npy", "token_frequencies.npy")
    for name in (*private, "config.json", "manifest.json"):  # these reveal the documents, or folders of this machine
        (tmp_path / "model" / name).write_text("{}")
    assert push(tmp_path) == 2 and not hub.files
    assert "the adaptation is not done; run its command again" in capsys.readouterr().err
    (tmp_path / "adapt.json").write_text('{"export": ["model"]}')
    assert push(tmp_path, "--private") == 0 and push(tmp_path, "--private") == 0
    assert hub.files == {"someone/mine": {"README.md": b"# An encoder\n"}} and hub.private == {"someone/mine": True}
    hub.private["someone/mine"] = False
    (tmp_path / "model" / "README.md").write_text("# Another\n")
    assert push(tmp_path, "--private") == 2
    assert "--repo=someone/mine: exists and is public; make it private there" in capsys.readouterr().err
    assert hub.files["someone/mine"] == {"README.md": b"# An encoder\n"}
    assert push(tmp_path, "--config.data.path=x") == 2
    assert "--config.data.path: changes nothing in an adapted model" in capsys.readouterr().err


def test_without_a_token_that_may_write_nothing_is_pushed_and_no_token_is_shown(hub, tmp_path, monkeypatch, capfd):
    (tmp_path / "model").mkdir()
    (tmp_path / "adapt.json").write_text('{"export": ["model"]}')
    hub.token = "another"
    assert push(tmp_path) == 2
    error = capfd.readouterr().err
    assert "--repo=someone/mine: cannot be uploaded (" in error and "check the name" in error
    assert "may not write: Bearer …" in error and TOKEN[:6] not in error
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert push(tmp_path) == 2 and not hub.files
    assert "no token of the hub is known; run `hf auth login`, or set HF_TOKEN" in capfd.readouterr().err


# ---- in


def test_one_bert_goes_into_every_network_and_the_rest_is_fresh(people, tmp_path, caplog):
    folder, theirs = save_tiny_network(people, tmp_path / "bert")
    run = heir(people, tmp_path / "run", folder)
    with caplog.at_level(logging.INFO):
        found = on_host(starting_params(run))
    fresh = on_host(run.initial_params())
    for network in found:
        assert_same_bits(found[network]["bert"], theirs["bert"])
    for name in ("mlm_transform", "mlm_norm", "mlm_bias"):
        assert_same_bits(found["reader"][name], theirs[name])
    for name in ("pooler", "projection", "projection_norm"):
        assert_same_bits(found["query_embedder"][name], fresh["query_embedder"][name])
    assert_same_bits(found["reader"]["span_score"], fresh["reader"]["span_score"])
    (line,) = [record.message for record in caplog.records if "init_from" in record.message]
    assert line.endswith(
        "query_embedder: encoder; fresh: pooler, projection | document_embedder: encoder; fresh: pooler, projection | "
        "reader: encoder, MLM head; fresh: span head"
    )


@pytest.mark.slow
def test_a_folder_may_have_one_tower_for_both_and_no_reader(people, tmp_path):
    _, theirs = save_tiny_network(people, tmp_path / "embedder", "query_embedder", 3)
    run = heir(people, tmp_path / "run", tmp_path)
    found = on_host(starting_params(run))
    assert_same_bits(found["query_embedder"], theirs)
    assert_same_bits(found["document_embedder"], theirs)
    assert_same_bits(found["reader"], on_host(run.initial_params()["reader"]))


def test_two_towers_do_not_go_into_one(people, tmp_path):
    save_tiny_network(people, tmp_path / "query_embedder", "query_embedder", 3)
    config = tiny_config(people)
    config.model.shared_tower, config.tasks = True, "ict"
    model, tokenizer = make_model(config, open_sources(people).tokenizer.size), open_sources(people).tokenizer
    with pytest.raises(UserError, match="has two encoders; set config.model.shared_tower=False"):
        find_source(str(tmp_path)).files(model, tokenizer)


def test_what_does_not_fit_is_told_before_a_device_is_asked_for(people, tmp_path, monkeypatch):
    folder, _ = save_tiny_network(people, tmp_path / "bert")
    config = tiny_config(people)
    config.update({"init_from": str(folder), "data": {"document_length": 86}})
    monkeypatch.setattr(recipe, "make_run", lambda *_: pytest.fail("a mesh was made"))
    with pytest.raises(UserError, match="has 62 positions, but the model 100"):
        open_run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_vocabulary_is_refused(people, tmp_path):
    folder, _ = save_tiny_network(people, tmp_path / "bert")
    config = tiny_config(people)
    config.init_from = str(folder)
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    with pytest.raises(UserError, match="do_lower_case is False, but the data were prepared with True; prepare the"):
        open_run(config, tmp_path / "run")
    path = folder / "vocab.txt"
    pieces = path.read_text().splitlines()
    path.write_text("".join(f"{piece}\n" for piece in [*pieces[:-2], pieces[-1], pieces[-2]]))
    with pytest.raises(UserError, match="vocab.txt: not the tokens of the prepared data; prepare the data with"):
        open_run(config, tmp_path / "run")
    path.unlink()
    (folder / "tokenizer_config.json").unlink()
    tokenizer = open_sources(people).tokenizer
    model = make_model(config, tokenizer.size)
    assert find_source(str(folder)).files(model, tokenizer)  # nothing to compare


# ---- from the hub


def test_a_model_of_the_hub_is_fetched_without_what_is_not_needed(people, tmp_path, monkeypatch):
    folder, theirs = save_tiny_network(people, tmp_path / "bert")
    asked = []

    def snapshot_download(name: str, **options) -> str:
        asked.append((name, options))
        return str(folder)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    run = heir(people, tmp_path / "run", "hf:someone/bert@v2")
    assert_same_bits(on_host(starting_params(run))["reader"]["bert"], theirs["bert"])
    ((name, options),) = asked
    assert (name, options["revision"]) == ("someone/bert", "v2")
    wanted = options["allow_patterns"]
    assert {file for file in NEEDED | LEFT_OUT if any(fnmatch(file, one) for one in wanted)} == NEEDED


def test_a_hub_that_is_out_of_reach_or_not_installed_is_told_in_one_line(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=fail))
    with pytest.raises(UserError, match=r"init_from=hf:bert: cannot be fetched \(ConnectionError: no route to host\)"):
        resolve_model_path("hf:bert")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"init_from=hf:bert: needs Hugging Face's hub; run `pip install"):
        resolve_model_path("hf:bert")
