"""Folders of weights that several tests start from, as Hugging Face's library and `realm weights` write them."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file
from tiny import loud_params
from tiny_run import tiny_config

from realm_jax.assemble import make_model
from realm_jax.data.sources import open_sources
from realm_jax.models import weights
from realm_jax.models.layers import BertConfig, Params
from realm_jax.models.networks import Realm


def load_bert(folder: Path, config: BertConfig) -> Params:
    """The parameters of a `Bert` of this config, float32 on the host."""
    params: Params = weights.read(weights.find(folder, config, [weights.encoder(config)]))["bert"]
    return params


def save_tensors(folder: Path, tensors: dict[str, np.ndarray], settings: dict | None = None) -> Path:
    """A file of tensors by their names, and its config.json."""
    folder.mkdir(exist_ok=True)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    if settings is not None:
        (folder / "config.json").write_text(json.dumps(settings))
    return folder


def cut_into_shards(folder: Path, number: int = 2) -> Path:
    """Put shards and their index in the place of a folder's one file of tensors, as Hugging Face's library does."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{1 + n % number:05d}-of-{number:05d}.safetensors" for n, name in enumerate(sorted(tensors))}
    for file in {*files.values()}:
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    index = {"metadata": {"total_size": sum(array.nbytes for array in tensors.values())}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def save_network(
    folder: Path, model: Realm, network: str, params: Params, kind: str = "bert", parts: int | None = None
) -> Path:
    """One of a model's networks, or its first parts, under the names of a kind."""
    chosen = weights.networks(model)[network][:parts]
    weights.save(folder, params[network], chosen, kind, weights.settings_of(model, network, kind))
    return folder


def save_tiny_network(data: Path, folder: Path, network: str = "reader", parts: int = 2) -> tuple[Path, Params]:
    """A network of the tiny run's sizes without its last part, beside the vocabulary of its data; its parameters."""
    tokenizer = open_sources(data).tokenizer
    model = make_model(tiny_config(data), tokenizer.size)
    params = loud_params(model, 0)
    tokenizer.save(save_network(folder, model, network, params, parts=parts))
    return folder, params[network]


def edit_settings(folder: Path, file: str = "config.json", **changes: Any) -> None:
    """Change keys of a JSON file in a folder; None removes one."""
    settings = json.loads((folder / file).read_text()) | changes
    kept = {key: value for key, value in settings.items() if value is not None}
    (folder / file).write_text(json.dumps(kept))


def assert_same_bits(ours: Params, theirs: Params) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32)), ours, theirs)
