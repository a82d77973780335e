"""Weights of a BERT that was trained elsewhere: Hugging Face's `model.safetensors`, into this package's tree.

Only the encoder: embeddings and layers. A folder also holds `config.json`, which is compared where it is there, and the
vocabulary, which is not read here. Pickled weights (`pytorch_model.bin`) are never opened. Read next: `bert.py`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from realm_jax.errors import UserError
from realm_jax.models.bert import LAYER_NORM_EPSILON, BertConfig

WEIGHTS, SETTINGS = "model.safetensors", "config.json"
PREFIXES = ("", "bert.")  # of a bare encoder, and of one with a head
Params = dict[str, Any]

# Ours → theirs. A kernel [input, output] is stored there the other way round; old files call LayerNorm's parts by
# TensorFlow's names.
EMBEDDINGS = {
    ("words", "embedding"): "embeddings.word_embeddings.weight",
    ("positions", "embedding"): "embeddings.position_embeddings.weight",
    ("segments", "embedding"): "embeddings.token_type_embeddings.weight",
    ("embedding_norm", "scale"): "embeddings.LayerNorm.weight",
    ("embedding_norm", "bias"): "embeddings.LayerNorm.bias",
}
LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}
FLOATS = ("float32", "float16", "bfloat16", "float64")
SAME_ACTIVATION = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}  # theirs → ours: all with tanh
PLAIN = {"model_type": "bert", "position_embedding_type": "absolute", "is_decoder": False}  # in their settings
OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def load_bert(folder: Path, config: BertConfig) -> Params:
    """The parameters of a `Bert` of this config, float32 on the host.

    Positions beyond `config.max_length` are left out. Raises UserError for a folder without safe weights, for a file
    that cannot be read, for a tensor that is missing or of another shape, which it names with both shapes, for numbers
    that are none, and for parts that a BERT does not have.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"{folder}: has no {WEIGHTS}; name a folder with a BERT that was saved as safetensors")
    _check_settings(folder / SETTINGS, config)
    try:
        with safe_open(path, "numpy") as file:
            return _read(file, path, config)
    except (SafetensorError, OSError, TypeError) as fault:
        raise UserError(f"{path}: cannot be read ({' '.join(str(fault).split())[:200]}); fetch it again") from None


def _read(file: Any, path: Path, config: BertConfig) -> Params:
    names = set(file.keys())
    prefix = next((prefix for prefix in PREFIXES if prefix + EMBEDDINGS["words", "embedding"] in names), None)
    if prefix is None:
        raise UserError(f"{path}: has no {EMBEDDINGS['words', 'embedding']}; it is not the file of a BERT")
    _check_extent(file, names, prefix, path, config)
    params: Params = {}
    left = {name for name in names if name.startswith((f"{prefix}embeddings.", f"{prefix}encoder."))}
    left.discard(f"{prefix}embeddings.position_ids")  # 0, 1, 2, …, in files of older releases
    for (*parents, leaf), name, shape in _wanted(config):
        found = _name(names, prefix + name, path)
        left.discard(found)
        array = file.get_tensor(found)
        if array.dtype.name not in FLOATS:
            raise UserError(f"{path}: {found} is {array.dtype}; fetch the model in float32, float16 or bfloat16")
        if leaf == "kernel":
            array = array.T
        if name == EMBEDDINGS["positions", "embedding"]:
            array = array[: config.max_length]
        if array.shape != shape:
            raise UserError(f"{path}: {found} is {array.shape}, but the model needs {shape}; set config.model")
        place = params
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = np.ascontiguousarray(array, np.float32)
        if not np.isfinite(place[leaf]).all():
            raise UserError(f"{path}: {found} holds numbers that are not finite; fetch it again")
    for name in sorted(left):
        raise UserError(f"{path}: has {name}, which this BERT has no place for; choose a plain BERT")
    return params


def _check_extent(file: Any, names: set[str], prefix: str, path: Path, config: BertConfig) -> None:
    """Raise UserError for what is commonly wrong: another vocabulary, too few positions, too many layers."""

    def rows(key: str) -> int:
        name = prefix + EMBEDDINGS[key, "embedding"]
        return next(iter(file.get_slice(name).get_shape()), 0) if name in names else 0

    if (words := rows("words")) != config.vocabulary_size:
        raise UserError(
            f"{path}: has {words} word pieces, but the vocabulary has {config.vocabulary_size}; the vocabulary file "
            "and the weights do not match"
        )
    if (positions := rows("positions")) < config.max_length:
        raise UserError(
            f"{path}: has {positions} positions, but the model {config.max_length}; set config.data.length, and "
            f"config.model.max_length if it is not 0, to at most {positions}"
        )
    if any(name.startswith(f"{prefix}encoder.layer.{config.layers}.") for name in names):
        raise UserError(f"{path}: has more than the model's {config.layers} layers; set config.model.layers")


def _wanted(config: BertConfig) -> Iterator[tuple[tuple[str, ...], str, tuple[int, ...]]]:
    """(our path, their name, our shape) of every parameter."""
    width, hidden = config.width, config.feed_forward
    rows = {"words": config.vocabulary_size, "positions": config.max_length, "segments": 2}
    for ours, theirs in EMBEDDINGS.items():
        yield ours, theirs, (rows[ours[0]], width) if ours[0] in rows else (width,)
    sizes = {"intermediate": (width, hidden), "output": (hidden, width)}
    for number in range(config.layers):
        for part, theirs in LAYER.items():
            leaves: dict[str, tuple[str, tuple[int, ...]]] = {}
            if part.endswith("_norm"):
                leaves = {"scale": ("weight", (width,)), "bias": ("bias", (width,))}
            else:
                size = sizes.get(part, (width, width))
                leaves = {"kernel": ("weight", size), "bias": ("bias", size[1:])}
            for leaf, (name, shape) in leaves.items():
                yield (f"layer_{number}", part, leaf), f"encoder.layer.{number}.{theirs}.{name}", shape


def _name(names: set[str], name: str, path: Path) -> str:
    """What a parameter is called in the file."""
    for new, old in OLD_NAMES.items():
        if name not in names and name.endswith(new):
            name = name.removesuffix(new) + old
    if name not in names:
        raise UserError(f"{path}: has no {name}; set config.model to the sizes of the file's BERT")
    return name


def _check_settings(path: Path, config: BertConfig) -> None:
    """What shapes do not tell: heads, the activation, the epsilon of LayerNorm, and whether it is a plain BERT. Nothing
    to compare without the file."""
    if not path.is_file():
        return
    try:
        settings = dict(json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError, OSError) as fault:
        raise UserError(f"{path}: cannot be read ({fault}); fetch it again, or remove it") from None
    activation = settings.get("hidden_act", config.hidden_act)
    settings["hidden_act"] = SAME_ACTIVATION.get(str(activation), activation)
    for name, wanted in PLAIN.items():
        if settings.get(name, wanted) != wanted:
            raise UserError(f"{path}: {name} is {settings[name]!r}, not {wanted!r}; choose a plain BERT")
    ours = {
        "num_attention_heads": ("config.model.heads", config.heads),
        "hidden_act": ("config.model.hidden_act", config.hidden_act),
        "layer_norm_eps": ("the epsilon of LayerNorm, which is fixed,", LAYER_NORM_EPSILON),
    }
    for name, (key, own) in ours.items():
        if settings.get(name, own) != own:
            raise UserError(f"{path}: {name} is {settings[name]!r}, but {key} is {own!r}; they must be the same")
