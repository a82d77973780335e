"""A reader that differs from the encoders in the sizes of its BERT."""

import json

import jax
import numpy as np
import pytest
from tiny_run import prepare_people, question, tiny_config

from realm_jax.cli import main as cli
from realm_jax.errors import UserError
from realm_jax.storage import read_json
from realm_jax.train.recipe import open_run, starting_params, train
from realm_jax.train.restore import restore_params

WIDE = {"layers": 2, "width": 24, "heads": 3, "feed_forward": 40}
WIDE_KEYS = {f"model__reader__{name}": size for name, size in WIDE.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_people(tmp_path_factory.mktemp("people"), house="of {}")


def config_of(data, tasks="qa", **changes):
    """A config of the tiny run; changes: dotted keys, with two underscores for the dot."""
    config = tiny_config(data)
    config.tasks = tasks
    for task in tasks.split(","):
        config[task].update({"steps": 2, "batch_size": 8})
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return config


def trained(config, workdir):
    run = open_run(config, workdir)
    train(run)
    return run


def ask(workdir, capsys):
    capsys.readouterr()
    assert cli.main(["ask", f"--workdir={workdir}", "--json", question(3)["question"]]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["answer"] in answer["passage"]["text"]
    return answer


@pytest.fixture(scope="module")
def wide(data, tmp_path_factory):
    return trained(config_of(data, "mlm,ict,realm,qa", **WIDE_KEYS), tmp_path_factory.mktemp("wide"))


@pytest.mark.slow
def test_a_reader_of_other_sizes_is_trained_and_asked(wide, capsys):
    shapes = jax.tree.map(np.shape, restore_params(wide, "qa"))
    assert shapes["reader"]["bert"]["words"]["embedding"][1] == 24 and "layer_1" in shapes["reader"]["bert"]
    assert shapes["query_embedder"]["bert"]["words"]["embedding"][1] == 16
    assert wide.model.reader.bert.heads == 3 and wide.model.bert.heads == 2
    ask(wide.workdir, capsys)


@pytest.mark.slow
def test_sizes_follow_from_where_the_reader_comes_from(wide, data, tmp_path, capsys):
    """They are recorded, so that the run goes on without its source, or without its name."""
    run = trained(config_of(data, reader_from=str(wide.workdir)), tmp_path / "run")
    recorded = read_json(tmp_path / "run" / "config.json")["model"]["reader"]
    assert run.config.model.reader.changes == WIDE and recorded == WIDE | {"hidden_act": None}
    assert open_run(config_of(data), tmp_path / "run").config.model.reader.changes == WIDE
    with pytest.raises(UserError, match="config.model.reader.feed_forward is None, but the run in .* has 40"):
        open_run(config_of(data, model__reader__layers=2), tmp_path / "run")
    begun = open_run(config_of(data, reader_from=str(wide.workdir)), tmp_path / "begun")
    jax.tree.map(np.testing.assert_array_equal, starting_params(begun)["reader"], restore_params(wide, "qa")["reader"])
    ask(run.workdir, capsys)


@pytest.mark.slow
def test_exported_weights_have_both_sizes(wide, data, tmp_path):
    assert cli.main(["weights", "export", f"--workdir={wide.workdir}", f"--output={tmp_path / 'weights'}"]) == 0
    config = config_of(data, init_from=str(tmp_path / "weights"))
    with pytest.raises(
        UserError, match=r"its reader differs from its encoders \(layers=2, .*\); set config.reader_from"
    ):
        open_run(config, tmp_path / "run")
    config.reader_from = config.init_from
    run = open_run(config, tmp_path / "run")
    assert run.config.model.reader.changes == WIDE
    jax.tree.map(np.testing.assert_array_equal, starting_params(run), restore_params(wide, "qa"))


def test_a_run_with_one_size_leaves_another_reader_fresh(wide, data, tmp_path):
    """`init_from` is about the embedders alone where the reader has sizes of its own and the source has not."""
    plain = trained(config_of(data), tmp_path / "plain")
    run = open_run(config_of(data, init_from=str(plain.workdir), **WIDE_KEYS), tmp_path / "run")
    found, theirs = starting_params(run), restore_params(plain, "qa")
    jax.tree.map(np.testing.assert_array_equal, found["query_embedder"], theirs["query_embedder"])
    jax.tree.map(np.testing.assert_array_equal, found["reader"], run.initial_params()["reader"])
