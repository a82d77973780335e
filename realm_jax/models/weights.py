"""Weights that Hugging Face's library understands: `model.safetensors` and `config.json`, in and out.

One folder holds one network, whose file may be cut into shards (`model.safetensors.index.json`). Its *parts* are the
encoder, and pooler, projection, MLM head and span head if it has them; a missing part stays as it was.
Names are those of `BertModel` and `BertForMaskedLM`, and of transformers' `RealmEmbedder` and `RealmReader` for the
parts that are REALM's own. Pickled weights (`pytorch_model.bin`) are never opened; the vocabulary in the folder is not
read here. Read next: `bert.py`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from realm_jax.errors import UserError
from realm_jax.models.layers import LAYER_NORM_EPSILON, BertConfig, Params, initializer_stddev
from realm_jax.models.networks import Realm
from realm_jax.models.reader import SPAN_NORM_EPSILON
from realm_jax.models.retriever import POOLINGS
from realm_jax.storage import read_settings

WEIGHTS, SETTINGS = "model.safetensors", "config.json"  # of a network, and of a module of sentence-transformers
SHARDS = f"{WEIGHTS}.index.json"  # in the place of WEIGHTS: name of a tensor → the file that it is in
PREFIXES = ("", "bert.", "realm.")  # of a bare encoder, of one with a head, and of REALM's networks in transformers
HEADS = ("cls.", "qa_outputs.", "classifier.")  # their tensors' names have no prefix

LAYER = {  # ours → theirs
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}
# Layers of an encoder after its BERT.
VECTOR_LAYERS = {"pooler": "pooler.dense", "projection": "cls.dense", "projection_norm": "cls.LayerNorm"}
WORDS, POSITIONS = "embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"
MLM_HEAD, SPAN_HEAD, PROJECTION, VECTOR_NORM = "MLM head", "span head", "projection", "vector norm"
TIED = "cls.predictions.decoder.weight"  # the word embeddings once more, in some files
HF_REALM = "realm"  # the type of model of transformers that has REALM's networks
FLOATS = ("F32", "F16", "BF16", "F64")
SAME_ACTIVATION = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}  # theirs → ours: all with tanh
REQUIRED_SETTINGS = {  # in their settings
    "model_type": ("bert", HF_REALM),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
}
BERT_SETTINGS = {  # field of BertConfig, most of them of config.model as well → key of config.json
    "vocabulary_size": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "hidden_act": "hidden_act",
    "dropout": "hidden_dropout_prob",
    "max_length": "max_position_embeddings",
}
RETRIEVER_SETTINGS = {"projection": "retriever_proj_size", "norm_epsilon": "projection_layer_norm_eps"}  # of Retriever
READER_SETTINGS = {"span_hidden": "span_hidden_size", "span_width": "max_span_width"}  # of Reader
NAME_ALIASES = {  # the end of a name → what files of older releases, and some of newer ones, have in its place
    "LayerNorm.weight": "LayerNorm.gamma",
    "LayerNorm.bias": "LayerNorm.beta",
    "cls.predictions.bias": "cls.predictions.decoder.bias",
}


class Tensor(NamedTuple):
    """A parameter.

    Attributes:
        path: in the network's tree.
        name: Hugging Face's, without the prefix.
        shape: here.
    """

    path: tuple[str, ...]
    name: str
    shape: tuple[int, ...]

    @property
    def is_transposed(self) -> bool:
        """Return True for a kernel [input, output], which their files store as [output, input]."""
        return self.path[-1] == "kernel"


class Part(NamedTuple):
    """Tensors that are in a file together or not at all.

    Attributes:
        title: for messages.
        tensors: of the part.
        settings: required values of config.json, which shapes do not tell: its key → (the key of ours, our value).
    """

    title: str
    tensors: tuple[Tensor, ...]
    settings: dict[str, tuple[str, Any]] = {}


# --- The parts of each network ----------------------------------------------------------------------------------------


def encoder(c: BertConfig) -> Part:
    """Return the part of a `Bert`, at `bert` in the tree of its network."""
    tensors = [
        Tensor(("bert", "words", "embedding"), WORDS, (c.vocabulary_size, c.width)),
        Tensor(("bert", "positions", "embedding"), POSITIONS, (c.max_length, c.width)),
        Tensor(("bert", "segments", "embedding"), "embeddings.token_type_embeddings.weight", (2, c.width)),
        *_norm(("bert", "embedding_norm"), "embeddings.LayerNorm", c.width),
    ]
    sizes = {"intermediate": (c.width, c.feed_forward), "output": (c.feed_forward, c.width)}
    for number in range(c.layers):
        for part, name in LAYER.items():
            path, theirs = ("bert", f"layer_{number}", part), f"encoder.layer.{number}.{name}"
            if part.endswith("_norm"):
                tensors += _norm(path, theirs, c.width)
            else:
                tensors += _linear(path, theirs, sizes.get(part, (c.width, c.width)))
    settings = {BERT_SETTINGS[name]: (f"config.model.{name}", getattr(c, name)) for name in ("heads", "hidden_act")}
    fixed = {"layer_norm_eps": ("the epsilon of LayerNorm, which is fixed,", LAYER_NORM_EPSILON)}
    return Part("encoder", tuple(tensors), settings | fixed)


def bert_of(model: Realm, network: str) -> BertConfig:
    """Return the sizes of a network's BERT.

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
        encoder_parts.append(Part("pooler", _linear(("pooler",), VECTOR_LAYERS["pooler"], (width, width))))
    tensors: tuple[Tensor, ...] = ()
    epsilon: dict[str, tuple[str, Any]] = {}
    if model.projection:
        tensors += _linear(("projection",), VECTOR_LAYERS["projection"], (width, model.projection))
    if model.normalization == "layer":
        tensors += _norm(("projection_norm",), VECTOR_LAYERS["projection_norm"], model.vector_size)
        epsilon = {RETRIEVER_SETTINGS["norm_epsilon"]: ("config.encoder.norm_epsilon", model.norm_epsilon)}
    if tensors:
        encoder_parts.append(Part(PROJECTION if model.projection else VECTOR_NORM, tensors, epsilon))

    c, hidden = model.reader.bert, model.reader.span_hidden
    words = (
        *_linear(("mlm_transform",), "cls.predictions.transform.dense", (c.width, c.width)),
        *_norm(("mlm_norm",), "cls.predictions.transform.LayerNorm", c.width),
        Tensor(("mlm_bias",), "cls.predictions.bias", (c.vocabulary_size,)),
    )
    spans = (
        *_linear(("span_projection",), "qa_outputs.dense_intermediate", (c.width, 2 * hidden)),
        *_norm(("span_norm",), "qa_outputs.layer_normalization", hidden),
        *_linear(("span_score",), "qa_outputs.dense_output", (hidden, 1)),
    )
    fixed = {"reader_layer_norm_eps": ("the epsilon of the span head, which is fixed,", SPAN_NORM_EPSILON)}
    reader = encoder(c), Part(MLM_HEAD, words), Part(SPAN_HEAD, spans, fixed)
    return {name: tuple(encoder_parts) for name in model.embedder_names} | {"reader": reader}


def token_classifier(c: BertConfig, labels: int) -> Part:
    """Return the head of `BertForTokenClassification`.

    Args:
        c: sizes of its BERT.
        labels: how many.
    """
    return Part("token classifier", _linear(("classifier",), "classifier", (c.width, labels)))


def question_head(c: BertConfig) -> Part:
    """Return the head of `BertForQuestionAnswering`, which scores every token as the start and as the end."""
    return Part("question-answering head (qa_outputs)", _linear(("classifier",), "qa_outputs", (c.width, 2)))


def _linear(path: tuple[str, ...], name: str, shape: tuple[int, int]) -> tuple[Tensor, ...]:
    return Tensor((*path, "kernel"), f"{name}.weight", shape), Tensor((*path, "bias"), f"{name}.bias", shape[1:])


def _norm(path: tuple[str, ...], name: str, width: int) -> tuple[Tensor, ...]:
    return Tensor((*path, "scale"), f"{name}.weight", (width,)), Tensor((*path, "bias"), f"{name}.bias", (width,))


# --- In ---------------------------------------------------------------------------------------------------------------

NO_BIAS = ""  # instead of a name: the layer has no bias, so it is 0
Tensors = Mapping[str, Any]  # name of a tensor → the opened file that it is in


class StoredTensor(NamedTuple):
    """A parameter in a file.

    Attributes:
        tensor: its path and shape.
        path: of the file.
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
        folder: of the network.
        config: sizes of its BERT.
        parts: of the network; the encoder, the first of them, has to be there.

    Raises:
        UserError: for a folder without safe weights, for a file that cannot be read, for a tensor that is missing or of
            another shape, for numbers that are not floats, for settings that differ, and for tensors that a BERT does
            not have.
    """
    settings, path = read_bert_settings(folder), folder / WEIGHTS
    with open_tensors(path) as files:
        prefix = next((prefix for prefix in PREFIXES if prefix + WORDS in files), None)
        if prefix is None:
            raise UserError(f"{path}: has no {WORDS}; it is not the file of a BERT")
        _check_extent(files, prefix, path, config)
        present = [part for part in parts if part == parts[0] or _has(files, prefix, part)]
        stored = []
        for tensor in (tensor for part in present for tensor in part.tensors):
            name = _stored_name(tensor.name, prefix)
            aliases = [name.removesuffix(end) + alias for end, alias in NAME_ALIASES.items() if name.endswith(end)]
            stored_name = next((stored_name for stored_name in (name, *aliases) if stored_name in files), None)
            if stored_name is None:
                raise UserError(f"{path}: has no {name}; set config.model to the sizes of the file's BERT")
            check_tensor(files, stored_name, tensor, path)
            stored.append(StoredTensor(tensor, path, stored_name))
        unknown = {name for name in files if name.startswith((f"{prefix}embeddings.", f"{prefix}encoder."))}
    unknown -= {name for _, _, name in stored} | {f"{prefix}embeddings.position_ids"}  # 0, 1, 2, …, in older files
    if unknown:
        raise UserError(f"{path}: has {min(unknown)}, which this BERT has no place for; choose a plain BERT")

    # Shapes do not determine heads, activation and the epsilons of LayerNorm. Without settings we cannot compare them.
    if settings.get("model_type") == HF_REALM:  # transformers has one epsilon for an encoder
        settings.setdefault("projection_layer_norm_eps", settings.get("layer_norm_eps", LAYER_NORM_EPSILON))
    if "hidden_act" in settings:
        settings["hidden_act"] = our_activation(settings["hidden_act"])
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

    Positions beyond those of the network are skipped.

    Raises:
        UserError: if a number is not finite.
    """
    params = {}
    for path, stored in groupby(files.tensors, lambda tensor: tensor.path):
        with open_tensors(path) as opened:
            for tensor, _, name in stored:
                array = np.zeros(tensor.shape, np.float32) if name == NO_BIAS else opened[name].get_tensor(name)
                array = array.T if tensor.is_transposed else array
                if tensor.name == POSITIONS:
                    array = array[: tensor.shape[0]]
                params[tensor.path] = np.asarray(array, np.float32, order="C")
                if not np.isfinite(params[tensor.path]).all():
                    raise UserError(f"{path}: {name} holds numbers that are not finite; fetch it again")
    return dict(unflatten_dict(params))


def _has(files: Tensors, prefix: str, part: Part) -> bool:
    """Return True if a file has a part; an MLM head with an output layer that is not tied does not count."""
    if part.title == MLM_HEAD and TIED in files:
        return np.array_equal(files[TIED].get_tensor(TIED), files[prefix + WORDS].get_tensor(prefix + WORDS))
    return any(_stored_name(tensor.name, prefix) in files for tensor in part.tensors)


def _stored_name(name: str, prefix: str) -> str:
    return name if name.startswith(HEADS) else prefix + name


def check_tensor(files: Tensors, name: str, tensor: Tensor, path: Path) -> None:
    """Check the dtype and shape of a tensor in a file.

    Args:
        files: the opened tensors.
        name: of the tensor in the file.
        tensor: the expected parameter.
        path: of the file, for messages.

    Raises:
        UserError: it is not a float, or has another shape.
    """
    stored = files[name].get_slice(name)
    if stored.get_dtype() not in FLOATS:
        raise UserError(f"{path}: {name} is {stored.get_dtype()}; fetch the model in float32, float16 or bfloat16")
    shape = tuple(stored.get_shape())
    shape = shape[::-1] if tensor.is_transposed else shape
    if tensor.name == POSITIONS:
        shape = (min(shape[0], tensor.shape[0]), *shape[1:])
    if shape != tensor.shape:
        raise UserError(f"{path}: {name} is {shape}, but the model needs {tensor.shape}; set config.model")


def _check_extent(files: Tensors, prefix: str, path: Path, config: BertConfig) -> None:
    """Raise UserError for common mistakes: another vocabulary, too few positions, too many layers."""
    words, positions = (
        next(iter(files[name].get_slice(name).get_shape()), 0) if name in files else 0
        for name in (prefix + WORDS, prefix + POSITIONS)
    )
    if words != config.vocabulary_size:
        raise UserError(
            f"{path}: has {words} word pieces, but the vocabulary has {config.vocabulary_size}; the vocabulary file "
            "and the weights do not match"
        )
    if positions < config.max_length:
        raise UserError(
            f"{path}: has {positions} positions, but the model {config.max_length}; set the lengths of config.data "
            f"to at most {positions}"
        )
    if any(name.startswith(f"{prefix}encoder.layer.{config.layers}.") for name in files):
        raise UserError(f"{path}: has more than the model's {config.layers} layers; set config.model.layers")


def read_bert_settings(folder: Path) -> dict[str, Any]:
    """Read the config.json of a BERT, {} if there is none.

    Raises:
        UserError: for another network.
    """
    settings = read_settings(folder / SETTINGS)
    for name, values in REQUIRED_SETTINGS.items():
        if settings.get(name, values[0]) not in values:
            supported = " or ".join(map(repr, values))
            raise UserError(f"{folder / SETTINGS}: {name} is {settings[name]!r}, not {supported}; choose a plain BERT")
    return settings


def our_activation(name: Any) -> Any:
    """Return our name for an activation of config.json; unknown ones are returned unchanged."""
    return SAME_ACTIVATION.get(str(name), name)


# --- Out --------------------------------------------------------------------------------------------------------------


def save(folder: Path, params: Params, parts: Sequence[Part], kind: str, settings: dict[str, Any]) -> None:
    """Write a network into a new folder; `find` and `read` give the same bits again.

    Args:
        folder: that is created.
        params: of the network.
        parts: that are written.
        kind: 'bert' or 'realm', the prefix of the encoder's names.
        settings: its config.json.
    """
    folder.mkdir()
    arrays, tensors = flatten_dict(params), {}
    for tensor in (tensor for part in parts for tensor in part.tensors):
        array = np.asarray(arrays[tensor.path], np.float32)
        tensors[_stored_name(tensor.name, f"{kind}.")] = np.asarray(
            array.T if tensor.is_transposed else array, order="C"
        )
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})  # transformers needs the metadata
    write_json(folder / SETTINGS, settings)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file in the format of Hugging Face's library.

    Args:
        path: of the file.
        value: settings.
    """
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def bert_settings(c: BertConfig) -> dict[str, Any]:
    """Return the settings of a BERT for a config.json."""
    return {key: getattr(c, name) for name, key in BERT_SETTINGS.items()} | {
        "attention_probs_dropout_prob": c.dropout,
        "type_vocab_size": 2,
        "initializer_range": initializer_stddev(c.width),
        "layer_norm_eps": LAYER_NORM_EPSILON,
        "torch_dtype": "float32",
    }


def settings_of(model: Realm, network: str, kind: str) -> dict[str, Any]:
    """Return the config.json of a network.

    Args:
        model: all networks.
        network: its name.
        kind: 'bert' or 'realm', the library's model that it is for. BERT's architectures lack the parts that are
            REALM's own; their tensors are in the file all the same.
    """
    classes = {"bert": ("BertForMaskedLM", "BertModel"), "realm": ("RealmReader", "RealmEmbedder")}
    settings = {"architectures": [classes[kind][network != "reader"]], "model_type": kind}
    settings |= bert_settings(bert_of(model, network))
    settings |= {key: getattr(model, name) for name, key in RETRIEVER_SETTINGS.items()}
    settings |= {key: getattr(model.reader, name) for name, key in READER_SETTINGS.items()}
    return settings | {"reader_layer_norm_eps": SPAN_NORM_EPSILON}
