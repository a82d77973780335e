"""Read and write weights in the files of Hugging Face's transformers: `model.safetensors` and `config.json`.

One folder holds one network, whose file may be cut into shards (`model.safetensors.index.json`). A network consists of
*parts*: the encoder, and optionally pooler, projection, MLM head and span head. A part that a file lacks keeps its
values. Tensors have the names of the architecture's classes in transformers (`architectures/`), for example `BertModel`
and `BertForMaskedLM`. REALM's own parts have the names of `RealmEmbedder` and `RealmReader`. We never open pickled
weights (`pytorch_model.bin`). Read next: `architectures/base.py`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from realm_jax.data.tokenizer_files import read_tokenizer, tokenizer_file
from realm_jax.errors import UserError
from realm_jax.models.architectures.base import Architecture, Settings, Tensor, linear, norm
from realm_jax.models.architectures.modernbert import MODERNBERT
from realm_jax.models.architectures.table import (
    ARCHITECTURES,
    HF_REALM,
    model_values,
    read_architecture,
)
from realm_jax.models.layers import (
    ACTIVATIONS,
    LAYER_NORM_EPSILON,
    BertConfig,
    Params,
    Rotary,
    initializer_stddev,
)
from realm_jax.models.networks import Realm
from realm_jax.models.reader import SPAN_NORM_EPSILON
from realm_jax.models.retriever import POOLINGS
from realm_jax.storage import read_settings

WEIGHTS, SETTINGS = "model.safetensors", "config.json"  # of a network, and of a module of sentence-transformers
SHARDS = f"{WEIGHTS}.index.json"  # replaces WEIGHTS: name of a tensor → the file that has it
HEADS = ("cls.", "qa_outputs.", "classifier.", "lm_head.", "vocab_", "head.", "decoder.")  # names without a prefix
# Layers of an encoder after its transformer.
VECTOR_LAYERS = {"pooler": "pooler.dense", "projection": "cls.dense", "projection_norm": "cls.LayerNorm"}
TRANSFORM_ACTIVATION = "gelu"  # of the layer before a ModernBERT's classifier
MLM_HEAD, SPAN_HEAD, PROJECTION, VECTOR_NORM = "MLM head", "span head", "projection", "vector norm"
FLOATS = ("F32", "F16", "BF16", "F64")
SIZES = "vocabulary_size", "width", "layers", "heads", "feed_forward", "max_length"  # whole numbers of BertConfig
# Fields that tensors determine, or that files need not share.
FREE_SETTINGS = "vocabulary_size", "width", "layers", "feed_forward", "dropout", "max_length"
RETRIEVER_SETTINGS = {"projection": "retriever_proj_size", "norm_epsilon": "projection_layer_norm_eps"}  # of Retriever
READER_SETTINGS = {"span_hidden": "span_hidden_size", "span_width": "max_span_width"}  # of Reader
NAME_ALIASES = {  # the end of a name → its form in older files, and in some newer ones
    "LayerNorm.weight": "LayerNorm.gamma",
    "LayerNorm.bias": "LayerNorm.beta",
    "cls.predictions.bias": "cls.predictions.decoder.bias",
    "lm_head.bias": "lm_head.decoder.bias",
}


class Part(NamedTuple):
    """Tensors that are in a file together or not at all.

    Attributes:
        title: for messages.
        tensors: tensors of the part.
        settings: required values of config.json, because shapes do not determine them: its key → (our key, our value).
    """

    title: str
    tensors: tuple[Tensor, ...]
    settings: dict[str, tuple[str, Any]] = {}


# --- The parts of each network ----------------------------------------------------------------------------------------


def encoder(c: BertConfig) -> Part:
    """Return the part of an encoder without its pooling, at `bert` in the tree of its network."""
    architecture = ARCHITECTURES[c.architecture]
    settings = {
        key: (f"config.model.{name}", attrgetter(name)(c))
        for name, key in architecture.settings.items()
        if name not in FREE_SETTINGS
    }
    return Part("encoder", architecture.tensors(c), settings)


def bert_of(model: Realm, network: str) -> BertConfig:
    """Return the sizes of a network's encoder.

    Args:
        model: all networks.
        network: top-level key of its parameters.
    """
    return model.reader.bert if network == "reader" else model.bert


def networks(model: Realm) -> dict[str, tuple[Part, ...]]:
    """Return the parts of each network, the encoder first: top-level key of the parameters → parts."""
    width = model.bert.width
    encoder_parts = [encoder(model.bert)]
    if POOLINGS[model.pooling].has_tanh_layer:
        encoder_parts.append(Part("pooler", linear(("pooler",), VECTOR_LAYERS["pooler"], (width, width))))
    tensors: tuple[Tensor, ...] = ()
    epsilon: dict[str, tuple[str, Any]] = {}
    if model.projection:
        tensors += linear(("projection",), VECTOR_LAYERS["projection"], (width, model.projection))
    if model.normalization == "layer":
        tensors += norm(("projection_norm",), VECTOR_LAYERS["projection_norm"], model.full_size)
        epsilon = {RETRIEVER_SETTINGS["norm_epsilon"]: ("config.encoder.norm_epsilon", model.norm_epsilon)}
    if tensors:
        encoder_parts.append(Part(PROJECTION if model.projection else VECTOR_NORM, tensors, epsilon))

    c, hidden = model.reader.bert, model.reader.span_hidden
    head = ARCHITECTURES[c.architecture].head
    words = (
        *linear(("mlm_transform",), head.transform, (c.width, c.width)),
        *norm(("mlm_norm",), head.norm, c.width),
        Tensor(("mlm_bias",), head.bias, (c.vocabulary_size,), is_table=True),
    )
    if not head.has_biases:
        words = tuple(tensor._replace(is_optional=tensor.path[-1] == "bias") for tensor in words)
    spans = (
        *linear(("span_projection",), "qa_outputs.dense_intermediate", (c.width, 2 * hidden)),
        *norm(("span_norm",), "qa_outputs.layer_normalization", hidden),
        *linear(("span_score",), "qa_outputs.dense_output", (hidden, 1)),
    )
    fixed = {"reader_layer_norm_eps": ("the epsilon of the span head, which is fixed,", SPAN_NORM_EPSILON)}
    reader = encoder(c), Part(MLM_HEAD, words), Part(SPAN_HEAD, spans, fixed)
    return {name: tuple(encoder_parts) for name in model.embedder_names} | {"reader": reader}


def token_classifier(c: BertConfig, labels: int) -> Part:
    """Return the head of `BertForTokenClassification`.

    Args:
        c: sizes of its encoder.
        labels: number of labels.
    """
    return Part("token classifier", linear(("classifier",), "classifier", (c.width, labels)))


def question_head(c: BertConfig) -> Part:
    """Return the head of transformers' `…ForQuestionAnswering`, which scores each token as the start and as the end.

    ModernBERT's head has one more layer, without biases, and other names.
    """
    title, classifier = "question-answering head (qa_outputs)", ("classifier",)
    if c.architecture != MODERNBERT.model_type:
        return Part(title, linear(classifier, "qa_outputs", (c.width, 2)))
    tensors = (
        *linear(("transform",), "head.dense", (c.width, c.width), has_bias=False),
        *norm(("transform_norm",), "head.norm", c.width, has_bias=False),
        *linear(classifier, "classifier", (c.width, 2)),
    )
    fixed = {
        "classifier_bias": ("the reader's", False),
        "classifier_activation": ("the reader's", TRANSFORM_ACTIVATION),
    }
    return Part(title, tensors, fixed)


# --- Read -------------------------------------------------------------------------------------------------------------

NO_BIAS = ""  # instead of a name: the layer has no bias, so it is 0
Tensors = Mapping[str, Any]  # name of a tensor → the opened file that has it


class StoredTensor(NamedTuple):
    """A parameter in a file.

    Attributes:
        tensor: its path and shape.
        path: path of the file.
        name: in the file.
    """

    tensor: Tensor
    path: Path
    name: str


class NetworkFiles(NamedTuple):
    """The files of a network.

    Attributes:
        tensors: file by file.
        present: titles of the parts that the files have.
        missing: titles of the other parts.
    """

    tensors: tuple[StoredTensor, ...]
    present: tuple[str, ...]
    missing: tuple[str, ...]


def has_weights(folder: Path) -> bool:
    """Return True if a folder holds a network's tensors, in one file or in shards."""
    return (folder / WEIGHTS).is_file() or (folder / SHARDS).is_file()


@contextmanager
def open_tensors(path: Path) -> Iterator[Tensors]:
    """Open a file of tensors, or its shards if there is no such file.

    Raises:
        UserError: if a file is missing or damaged.
    """
    index = path.with_name(f"{path.name}.index.json")
    if not path.is_file() and index.is_file():
        with ExitStack() as opened:
            yield _open_shards(index, opened)
        return
    if not path.is_file():
        raise UserError(f"{path.parent}: has no {path.name}; choose a model that was saved as safetensors")
    try:
        with safe_open(path, "numpy") as file:
            yield dict.fromkeys(file.keys(), file)
    except (SafetensorError, OSError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]}); fetch it again") from None


def _open_shards(index: Path, opened: ExitStack) -> Tensors:
    tensors: Any = read_settings(index, needed=True).get("weight_map")
    names = tensors.values() if isinstance(tensors, dict) else [None]
    if not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise UserError(f'{index}: has no "weight_map" of tensors and files in its folder; fetch it again')
    files: dict[str, Any] = {}
    for name in sorted({*names}):
        shard = index.with_name(name)
        if not shard.is_file():
            raise UserError(f"{shard}: is missing, but {index.name} has tensors in it; fetch it again")
        shard_tensors = opened.enter_context(open_tensors(shard))
        listed = {tensor for tensor, file in tensors.items() if file == name}
        if missing := listed - {*shard_tensors}:
            raise UserError(f"{shard}: has no {min(missing)}, which {index.name} has there; fetch both again")
        files |= {tensor: shard_tensors[tensor] for tensor in listed}
    return files


def find(folder: Path, config: BertConfig, parts: Sequence[Part]) -> NetworkFiles:
    """Find the parts of a network that a folder has, without reading numbers.

    Args:
        folder: folder of the network.
        config: sizes of its encoder.
        parts: parts of the network. The folder must have the first one, the encoder.

    Raises:
        UserError: if the folder has no safetensors or no readable files, if a tensor is missing, has another shape or
            is not a float, if the architecture or the settings differ, and if the encoder has more tensors than ours.
    """
    (architecture, settings), path = read_architecture(folder / SETTINGS), folder / WEIGHTS
    if architecture.model_type != config.architecture:
        raise UserError(
            f"{folder / SETTINGS}: model_type is {architecture.model_type!r}, but config.model.architecture is "
            f"{config.architecture!r}; they must be the same"
        )
    with open_tensors(path) as files:
        prefixes = "", architecture.prefix, f"{HF_REALM}."
        prefix = next((prefix for prefix in prefixes if prefix + architecture.words in files), None)
        if prefix is None:
            raise UserError(
                f"{path}: has no {architecture.words}, so it is not a {architecture.base_class}; choose another model"
            )
        _check_extent(files, prefix, path, config, settings)
        present = [part for part in parts if part == parts[0] or _has(files, prefix, part, architecture)]
        stored = []
        for tensor in (tensor for part in present for tensor in part.tensors):
            name = _stored_name(tensor.name, prefix)
            aliases = [name.removesuffix(end) + alias for end, alias in NAME_ALIASES.items() if name.endswith(end)]
            stored_name = next((stored_name for stored_name in (name, *aliases) if stored_name in files), None)
            if stored_name is None and tensor.is_optional:
                stored_name = NO_BIAS
            elif stored_name is None:
                raise UserError(f"{path}: has no {name}; set config.model to the sizes of the file's network")
            else:
                check_tensor(files, stored_name, tensor, path)
            stored.append(StoredTensor(tensor, path, stored_name))
        inside = f"{prefix}embeddings.", f"{prefix}{architecture.layers.partition('.')[0]}."
        unknown = {name for name in files if name.startswith(inside)}
    unknown -= {name for _, _, name in stored} | {f"{prefix}embeddings.position_ids"}  # 0, 1, 2, …, in older files
    if unknown:
        raise UserError(
            f"{path}: has {min(unknown)}, which our {config.architecture} does not have; choose another model"
        )

    # Shapes do not determine heads, activation and the epsilons of LayerNorm, so we compare those that are stated.
    if settings.get("model_type") == HF_REALM:  # transformers has one epsilon for an encoder
        settings.setdefault("projection_layer_norm_eps", settings.get("layer_norm_eps", LAYER_NORM_EPSILON))
    required = {name: value for part in present for name, value in part.settings.items()}
    for name, (key, ours) in required.items():
        if settings.get(name, ours) != ours:
            raise UserError(
                f"{folder / SETTINGS}: {name} is {settings[name]!r}, but {key} is {ours!r}; they must be the same"
            )
    titles = tuple(part.title for part in present)
    return NetworkFiles(tuple(stored), titles, tuple(part.title for part in parts if part.title not in titles))


def read(files: NetworkFiles) -> Params:
    """Read the parameters of a network, as a tree of float32 arrays on the host.

    Rows of tables beyond those of the network are skipped.

    Raises:
        UserError: if a number is not finite.
    """
    params = {}
    for path, stored in groupby(files.tensors, lambda tensor: tensor.path):
        with open_tensors(path) as opened:
            for tensor, _, name in stored:
                array = np.zeros(tensor.shape, np.float32) if name == NO_BIAS else opened[name].get_tensor(name)
                array = array.T if tensor.is_transposed else array
                if tensor.is_table and name != NO_BIAS:
                    array = array[tensor.first_row : tensor.first_row + tensor.shape[0]]
                params[tensor.path] = np.asarray(array, np.float32, order="C")
                if not np.isfinite(params[tensor.path]).all():
                    raise UserError(f"{path}: {name} holds numbers that are not finite; fetch it again")
    return dict(unflatten_dict(params))


def _has(files: Tensors, prefix: str, part: Part, architecture: Architecture) -> bool:
    """Return True if a file has a part; an MLM head with an output layer that is not tied does not count."""
    tied, words = architecture.head.tied, prefix + architecture.words
    if part.title == MLM_HEAD and tied in files:
        return np.array_equal(files[tied].get_tensor(tied), files[words].get_tensor(words))
    return any(_stored_name(tensor.name, prefix) in files for tensor in part.tensors)


def _stored_name(name: str, prefix: str) -> str:
    return name if name.startswith(HEADS) else prefix + name


def check_tensor(files: Tensors, name: str, tensor: Tensor, path: Path) -> None:
    """Check the dtype and shape of a tensor in a file.

    Args:
        files: the opened tensors.
        name: name of the tensor in the file.
        tensor: the expected parameter.
        path: path of the file, for messages.

    Raises:
        UserError: it is not a float, or has another shape.
    """
    stored = files[name].get_slice(name)
    if stored.get_dtype() not in FLOATS:
        raise UserError(f"{path}: {name} is {stored.get_dtype()}; fetch the model in float32, float16 or bfloat16")
    shape = tuple(stored.get_shape())
    shape = shape[::-1] if tensor.is_transposed else shape
    if tensor.is_table and shape:
        shape = (min(shape[0] - tensor.first_row, tensor.shape[0]), *shape[1:])
    if shape != tensor.shape:
        raise UserError(f"{path}: {name} is {shape}, but the model needs {tensor.shape}; set config.model")


def _check_extent(files: Tensors, prefix: str, path: Path, config: BertConfig, settings: Settings) -> None:
    """Raise UserError for common mistakes: another vocabulary, too few positions, too many layers."""
    architecture = ARCHITECTURES[config.architecture]
    words, positions = (
        next(iter(files[name].get_slice(name).get_shape()), 0) if name in files else 0
        for name in (prefix + architecture.words, prefix + architecture.positions)
    )
    positions -= architecture.first_position
    if not architecture.positions:
        positions = settings.get(architecture.settings["max_length"], config.max_length)
    if words < config.vocabulary_size or (words > config.vocabulary_size and not _is_padded(path.parent, config)):
        raise UserError(
            f"{path}: has {words} word embeddings, but the vocabulary has {config.vocabulary_size} tokens; name the "
            "vocabulary of this model"
        )
    if positions < config.max_length:
        raise UserError(
            f"{path}: has {positions} positions, but the model {config.max_length}; set the lengths of config.data "
            f"to at most {positions}"
        )
    if any(name.startswith(f"{prefix}{architecture.layers}{config.layers}.") for name in files):
        raise UserError(f"{path}: has more than the model's {config.layers} layers; set config.model.layers")


def _is_padded(folder: Path, config: BertConfig) -> bool:
    """Return True if the tokenizer in a folder has the tokens of the vocabulary, and the weights have unused rows."""
    path = tokenizer_file(folder)
    return path is not None and read_tokenizer(path, lower_case=True).size == config.vocabulary_size


def encoder_config(folder: Path) -> BertConfig:
    """Return the sizes of the encoder in a folder, without dropout, for texts as long as it has positions for.

    Raises:
        UserError: if we do not support the architecture, or if a size is missing or does not fit.
    """
    path = folder / SETTINGS
    architecture, settings = read_architecture(path)
    values = model_values(architecture, settings) | {"dropout": 0.0}
    for name in SIZES:
        if not (isinstance(values[name], int) and values[name] > 0):
            key = architecture.settings[name]
            raise UserError(f"{path}: {key} is {values[name]!r}, which is no size; fetch the model again")
    if values["width"] % values["heads"]:
        raise UserError(
            f"{path}: {values['heads']} {architecture.settings['heads']} do not divide a width of {values['width']}"
        )
    if values["hidden_act"] not in ACTIVATIONS:
        key = architecture.settings["hidden_act"]
        raise UserError(f"{path}: {key} is {values['hidden_act']!r}; choose a model with {', '.join(ACTIVATIONS)}")
    values["max_length"] -= architecture.first_position
    rotary = Rotary(**{name.removeprefix("rotary."): values.pop(name) for name in [*values] if "." in name})
    options: dict[str, Any] = {"segment_types": architecture.segment_types, "rotary": rotary}
    return BertConfig(**values, **options)


# --- Write ------------------------------------------------------------------------------------------------------------


def save(folder: Path, params: Params, parts: Sequence[Part], kind: str, settings: dict[str, Any]) -> None:
    """Write a network into a new folder; `find` and `read` give the same bits again.

    Args:
        folder: to create.
        params: parameters of the network.
        parts: to write.
        kind: 'bert' for the architecture's names of tensors, 'realm' for those of `RealmEmbedder` and `RealmReader`.
        settings: content of config.json.
    """
    folder.mkdir()
    prefix = f"{HF_REALM}." if kind == HF_REALM else ARCHITECTURES[settings["model_type"]].prefix
    arrays, tensors = flatten_dict(params), {}
    for tensor in (tensor for part in parts for tensor in part.tensors):
        array = np.asarray(arrays[tensor.path], np.float32)
        if tensor.first_row:
            array = np.pad(array, [(tensor.first_row, 0), (0, 0)])
        tensors[_stored_name(tensor.name, prefix)] = np.asarray(array.T if tensor.is_transposed else array, order="C")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})  # transformers needs the metadata
    write_json(folder / SETTINGS, settings)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file in the format of Hugging Face's library.

    Args:
        path: path of the file.
        value: settings.
    """
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def encoder_settings(c: BertConfig) -> dict[str, Any]:
    """Return the settings of an encoder for a config.json."""
    architecture = ARCHITECTURES[c.architecture]
    settings = {key: attrgetter(name)(c) for name, key in architecture.settings.items()}
    settings[architecture.settings["max_length"]] += architecture.first_position
    settings |= architecture.extra(c)
    return settings | {"initializer_range": initializer_stddev(c.width), "torch_dtype": "float32"}


def settings_of(model: Realm, network: str, kind: str) -> dict[str, Any]:
    """Return the config.json of a network.

    Args:
        model: all networks.
        network: its name.
        kind: 'bert' for the classes of the architecture, 'realm' for `RealmEmbedder` and `RealmReader`. The classes of
            the architecture ignore REALM's own parts, which the file has in both cases.
    """
    architecture = ARCHITECTURES[bert_of(model, network).architecture]
    model_type, reader_class, encoder_class = HF_REALM, "RealmReader", "RealmEmbedder"
    if kind != HF_REALM:
        model_type = architecture.model_type
        reader_class, encoder_class = architecture.masked_lm_class, architecture.base_class
    settings = {"architectures": [reader_class if network == "reader" else encoder_class], "model_type": model_type}
    settings |= encoder_settings(bert_of(model, network))
    settings |= {key: getattr(model, name) for name, key in RETRIEVER_SETTINGS.items()}
    settings |= {key: getattr(model.reader, name) for name, key in READER_SETTINGS.items()}
    return settings | {"reader_layer_norm_eps": SPAN_NORM_EPSILON}
