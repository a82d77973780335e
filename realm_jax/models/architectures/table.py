"""List the supported architectures by their name in config.json (`model_type`), and make their networks.

To add one, write its file and add it to `ARCHITECTURES`.
"""

import dataclasses
from pathlib import Path
from typing import Any

from realm_jax.errors import UserError
from realm_jax.models.architectures.base import Architecture, Settings
from realm_jax.models.architectures.bert import BERT
from realm_jax.models.architectures.distilbert import DISTILBERT
from realm_jax.models.architectures.modernbert import MODERNBERT
from realm_jax.models.architectures.mpnet import MPNET
from realm_jax.models.architectures.roberta import ROBERTA, XLM_ROBERTA
from realm_jax.models.layers import BertConfig, Rotary
from realm_jax.storage import read_settings

ARCHITECTURES = {entry.model_type: entry for entry in (BERT, ROBERTA, XLM_ROBERTA, DISTILBERT, MPNET, MODERNBERT)}
HF_REALM = "realm"  # model_type of REALM's networks in transformers, which are BERTs
SAME_ACTIVATION = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}  # their name → ours; all use tanh


def our_activation(name: Any) -> Any:
    """Return our name for an activation of config.json; unknown ones are returned unchanged."""
    return SAME_ACTIVATION.get(str(name), name)


def read_architecture(path: Path) -> tuple[Architecture, Settings]:
    """Read a config.json, and return its architecture and its content with the keys of `Architecture.settings`.

    If the file is missing or has no `model_type`, the architecture is BERT.

    Raises:
        UserError: the file cannot be read, or names an architecture or a setting that we do not support.
    """
    settings = read_settings(path)  # {} if there is no file
    name = settings.get("model_type", BERT.model_type)
    architecture = BERT if name == HF_REALM else ARCHITECTURES.get(str(name))
    if architecture is None:
        supported = ", ".join(map(repr, ARCHITECTURES))
        raise UserError(f"{path}: model_type is {name!r}; choose a model of one of the types {supported}")
    settings = architecture.fill(settings)
    for key, values in architecture.required.items():
        if settings.get(key, values[0]) not in values:
            supported = " or ".join(map(repr, values))
            raise UserError(f"{path}: {key} is {settings[key]!r}, not {supported}; choose another model")
    activation = architecture.settings["hidden_act"]
    if activation in settings:
        settings[activation] = our_activation(settings[activation])
    return architecture, settings


def model_values(architecture: Architecture, settings: Settings) -> dict[str, Any]:
    """Return the values of a config.json by field of BertConfig, None for a value that it lacks.

    Args:
        architecture: architecture of the network.
        settings: settings of `read_architecture`.
    """
    rotary = {f"rotary.{name}": value for name, value in dataclasses.asdict(Rotary()).items()}
    defaults = rotary | {name: None for name in architecture.settings} | architecture.defaults
    stated = {name: settings[key] for name, key in architecture.settings.items() if settings.get(key) is not None}
    return defaults | stated | {"architecture": architecture.model_type}


def encoder_network(config: BertConfig, name: str | None = None) -> Any:
    """Make the network of a config: a module with the fields and methods of `models.bert.Bert`.

    Args:
        config: sizes and architecture.
        name: key of the network's parameters, if it is part of another module.
    """
    return ARCHITECTURES[config.architecture].network(config, name=name)
