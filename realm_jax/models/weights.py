"""Weights that Hugging Face's library understands: `model.safetensors` and `config.json`, in and out.

One folder holds one network, whose file may be cut into shards (`model.safetensors.index.json`). Its *parts* are the
encoder, and whatever there is of pooler, projection, MLM head and span head; what a file does not have stays as it was.
Names are those of `BertModel` and `BertForMaskedLM`, and of transformers' `RealmEmbedder` and `RealmReader` for the
parts that are REALM's own. Pickled weights (`pytorch_model.bin`) are never opened; the vocabulary beside them is not
read here. Read next: `bert.py`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from realm_jax.errors import UserError
from realm_jax.models.bert import LAYER_NORM_EPSILON, BertConfig, initializer_stddev
from realm_jax.models.realm import SPAN_NORM_EPSILON, Realm
from realm_jax.storage import read_settings

WEIGHTS, SETTINGS = "model.safetensors", "config.json"  # of a network, and of a module of sentence-transformers
SHARDS = f"{WEIGHTS}.index.json"  # in the place of WEIGHTS: name of a tensor → the file that it is in
PREFIXES = ("", "bert.", "realm.")  # of a bare encoder, of one with a head, and of REALM's networks in transformers
HEADS = ("cls.", "qa_outputs.", "classifier.")  # their tensors' names have no prefix
Params = dict[str, Any]

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
    """A parameter: its place in the network's tree, their name for it without the prefix, and its shape here.

    A kernel [input, output] is stored there the other way round.
    """

    path: tuple[str, ...]
    name: str
    shape: tuple[int, ...]

    @property
    def turned(self) -> bool:
        return self.path[-1] == "kernel"


class Part(NamedTuple):
    """Tensors that come and go together.

    settings: what their config.json has to say of them, since shapes do not: its key → (what sets ours, our value).
    """

    title: str
    tensors: tuple[Tensor, ...]
    settings: dict[str, tuple[str, Any]] = {}


# --- The parts of each network ----------------------------------------------------------------------------------------


def encoder(c: BertConfig) -> Part:
    """A `Bert`, at `bert` in the tree of its network."""
    tensors = [
        Tensor(("bert", "words", "embedding"), WORDS, (c.vocabulary_size, c.width)),
        Tensor(("bert", "positions", "embedding"), POSITIONS, (c.max_length, c.width)),
        Tensor(("bert", "segments", "embedding"), "embeddings.token_type_embeddings.weight", (2, c.width)),
        *_norm(("bert", "embedding_norm"), "embeddings.LayerNorm", c.width),
    ]
    sizes = {"intermediate": (c.width, c.feed_forward), "output": (c.feed_forward, c.width)}
    for number in range(c.layers):
        for part, name in LAYER.items():
            place, theirs = ("bert", f"layer_{number}", part), f"encoder.layer.{number}.{name}"
            if part.endswith("_norm"):
                tensors += _norm(place, theirs, c.width)
            else:
                tensors += _linear(place, theirs, sizes.get(part, (c.width, c.width)))
    settings = {BERT_SETTINGS[name]: (f"config.model.{name}", getattr(c, name)) for name in ("heads", "hidden_act")}
    fixed = {"layer_norm_eps": ("the epsilon of LayerNorm, which is fixed,", LAYER_NORM_EPSILON)}
    return Part("encoder", tuple(tensors), settings | fixed)


def bert_of(model: Realm, network: str) -> BertConfig:
    """The BERT of a network, by its name."""
    return model.reader.bert if network == "reader" else model.bert


def networks(model: Realm) -> dict[str, tuple[Part, ...]]:
    """Name of a network, at the top of the parameters → its parts, the encoder first."""
    c = model.reader.bert
    tower = encoder(model.bert), *_vector_parts(model)
    reader = encoder(c), _mlm_head(c), _span_head(c, model.reader.span_hidden)
    return {name: tower for name in model.embedder_names} | {"reader": reader}


def _vector_parts(model: Realm) -> Iterator[Part]:
    """What a tower has above its encoder."""
    width = model.bert.width
    if model.pooling == "pooler":
        yield Part("pooler", (*_linear(("pooler",), "pooler.dense", (width, width)),))
    tensors: list[Tensor] = []
    epsilon: dict[str, tuple[str, Any]] = {}
    if model.projection:
        tensors += _linear(("projection",), "cls.dense", (width, model.projection))
    if model.normalization == "layer":
        tensors += _norm(("projection_norm",), "cls.LayerNorm", model.vector_size)
        epsilon = {RETRIEVER_SETTINGS["norm_epsilon"]: ("config.encoder.norm_epsilon", model.norm_epsilon)}
    if tensors:
        yield Part(PROJECTION if model.projection else VECTOR_NORM, tuple(tensors), epsilon)


def _mlm_head(c: BertConfig) -> Part:
    tensors = (
        *_linear(("mlm_transform",), "cls.predictions.transform.dense", (c.width, c.width)),
        *_norm(("mlm_norm",), "cls.predictions.transform.LayerNorm", c.width),
        Tensor(("mlm_bias",), "cls.predictions.bias", (c.vocabulary_size,)),
    )
    return Part(MLM_HEAD, tensors)


def _span_head(c: BertConfig, hidden: int) -> Part:
    tensors = (
        *_linear(("span_projection",), "qa_outputs.dense_intermediate", (c.width, 2 * hidden)),
        *_norm(("span_norm",), "qa_outputs.layer_normalization", hidden),
        *_linear(("span_score",), "qa_outputs.dense_output", (hidden, 1)),
    )
    epsilon = {"reader_layer_norm_eps": ("the epsilon of the span head, which is fixed,", SPAN_NORM_EPSILON)}
    return Part(SPAN_HEAD, tensors, epsilon)


def token_classifier(c: BertConfig, labels: int) -> Part:
    """The head of `BertForTokenClassification`."""
    return Part("token classifier", (*_linear(("classifier",), "classifier", (c.width, labels)),))


def _linear(path: tuple[str, ...], name: str, shape: tuple[int, int]) -> Iterator[Tensor]:
    yield Tensor((*path, "kernel"), f"{name}.weight", shape)
    yield Tensor((*path, "bias"), f"{name}.bias", shape[1:])


def _norm(path: tuple[str, ...], name: str, width: int) -> Iterator[Tensor]:
    yield Tensor((*path, "scale"), f"{name}.weight", (width,))
    yield Tensor((*path, "bias"), f"{name}.bias", (width,))


# --- In ---------------------------------------------------------------------------------------------------------------


NO_BIAS = ""  # in the place of a name: the layer has none, which is a bias of 0


class StoredTensor(NamedTuple):
    """A parameter, the file that it is in, and its name there."""

    tensor: Tensor
    path: Path
    name: str


class NetworkFiles(NamedTuple):
    """What there is of a network, file by file, and the titles of the parts that there are and that there are not."""

    tensors: tuple[StoredTensor, ...]
    found: tuple[str, ...]
    missing: tuple[str, ...]


class Shards(NamedTuple):
    """Several files of tensors, read as one: name of a tensor → the opened file that it is in."""

    files: Mapping[str, Any]

    def keys(self) -> Sequence[str]:
        """The names of all tensors."""
        return [*self.files]

    def get_slice(self, name: str) -> Any:
        """A tensor's dtype and shape, without its numbers."""
        return self.files[name].get_slice(name)

    def get_tensor(self, name: str) -> Any:
        """A tensor's numbers."""
        return self.files[name].get_tensor(name)


def has_weights(folder: Path) -> bool:
    """Whether a folder holds a network's tensors, in one file or in shards."""
    return (folder / WEIGHTS).is_file() or (folder / SHARDS).is_file()


@contextmanager
def open_safetensors(path: Path, remedy: str = "fetch it again") -> Iterator[Any]:
    """A file of tensors, or the shards in its place, closed when the block ends. Raises UserError if there is none, or
    none that can be read."""
    if not path.is_file() and (index := path.with_name(f"{path.name}.index.json")).is_file():
        with ExitStack() as opened:
            yield _open_shards(index, opened)
        return
    if not path.is_file():
        raise UserError(f"{path.parent}: has no {path.name}; choose a model that was saved as safetensors")
    try:
        with safe_open(path, "numpy") as file:
            yield file
    except (SafetensorError, OSError, TypeError) as fault:
        raise UserError(f"{path}: cannot be read ({' '.join(str(fault).split())[:200]}); {remedy}") from None


def _open_shards(index: Path, opened: ExitStack) -> Shards:
    """The shards that an index names. Raises UserError for one that is missing or damaged, or lacks a tensor."""
    tensors: Any = read_settings(index, needed=True).get("weight_map")
    names = tensors.values() if isinstance(tensors, dict) else [None]
    if not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise UserError(f'{index}: has no "weight_map" of tensors and files beside it; fetch it again')
    files: dict[str, Any] = {}
    for name in sorted({*names}):
        shard = index.with_name(name)
        if not shard.is_file():
            raise UserError(f"{shard}: is missing, but {index.name} has tensors in it; fetch it again")
        files[name] = opened.enter_context(open_safetensors(shard))
        lacking = {tensor for tensor, file in tensors.items() if file == name} - {*files[name].keys()}
        if lacking:
            raise UserError(f"{shard}: has no {min(lacking)}, which {index.name} has there; fetch both again")
    return Shards({tensor: files[name] for tensor, name in tensors.items()})


def find(folder: Path, config: BertConfig, parts: Sequence[Part]) -> NetworkFiles:
    """What there is of a network in a folder; the encoder, the first of its parts, has to be. Reads no parameters.

    Raises UserError for a folder without safe weights, for a file that cannot be read, for a tensor that is missing or
    of another shape, which it names with both shapes, for numbers that are no floats, for settings that differ, and for
    what a BERT does not have.
    """
    settings = read_bert_settings(folder)
    with open_safetensors(folder / WEIGHTS) as file:
        files = _find(file, folder / WEIGHTS, config, parts)
    compared = {key: value for part in parts if part.title in files.found for key, value in part.settings.items()}
    _check_settings(folder / SETTINGS, settings, compared)
    return files


def read(files: NetworkFiles) -> Params:
    """The network's parameters that its files have, as a tree of float32 arrays on the host.

    Positions beyond those of the network are left out. Raises UserError if a number is not finite.
    """
    params = {}
    for path, stored in groupby(files.tensors, lambda one: one.path):
        with open_safetensors(path) as file:
            for tensor, _, name in stored:
                array = np.zeros(tensor.shape, np.float32) if name == NO_BIAS else file.get_tensor(name)
                array = array.T if tensor.turned else array
                if tensor.name == POSITIONS:
                    array = array[: tensor.shape[0]]
                params[tensor.path] = np.asarray(array, np.float32, order="C")
                if not np.isfinite(params[tensor.path]).all():
                    raise UserError(f"{path}: {name} holds numbers that are not finite; fetch it again")
    return dict(unflatten_dict(params))


def _find(file: Any, path: Path, config: BertConfig, parts: Sequence[Part]) -> NetworkFiles:
    names = set(file.keys())
    prefix = next((prefix for prefix in PREFIXES if prefix + WORDS in names), None)
    if prefix is None:
        raise UserError(f"{path}: has no {WORDS}; it is not the file of a BERT")
    _check_extent(file, names, prefix, path, config)
    present = [part for part in parts if part == parts[0] or _has(file, names, prefix, part)]
    places = []
    for part in present:
        for tensor in part.tensors:
            name = _name(names, prefix, tensor, path)
            check_tensor(file.get_slice(name), name, tensor, path)
            places.append(StoredTensor(tensor, path, name))
    left = {name for name in names if name.startswith((f"{prefix}embeddings.", f"{prefix}encoder."))}
    left -= {stored.name for stored in places} | {f"{prefix}embeddings.position_ids"}  # 0, 1, 2, …, in older files
    for name in sorted(left):
        raise UserError(f"{path}: has {name}, which this BERT has no place for; choose a plain BERT")
    titles = tuple(part.title for part in present)
    return NetworkFiles(tuple(places), titles, tuple(part.title for part in parts if part.title not in titles))


def _has(file: Any, names: set[str], prefix: str, part: Part) -> bool:
    """Whether a file has a part. An output layer that is not tied to the word embeddings makes another MLM head."""
    if part.title == MLM_HEAD and TIED in names:
        return np.array_equal(file.get_tensor(TIED), file.get_tensor(prefix + WORDS))
    return any(_full(prefix, tensor.name) in names for tensor in part.tensors)


def _full(prefix: str, name: str) -> str:
    return name if name.startswith(HEADS) else prefix + name


def _name(names: set[str], prefix: str, tensor: Tensor, path: Path) -> str:
    """What a parameter is called in the file."""
    name = _full(prefix, tensor.name)
    others = [name.removesuffix(usual) + other for usual, other in NAME_ALIASES.items() if name.endswith(usual)]
    found = next((known for known in (name, *others) if known in names), None)
    if found is None:
        raise UserError(f"{path}: has no {name}; set config.model to the sizes of the file's BERT")
    return found


def check_tensor(stored: Any, name: str, tensor: Tensor, path: Path) -> None:
    """Raise UserError unless what is stored under a name is of the tensor's shape, in floats."""
    if stored.get_dtype() not in FLOATS:
        raise UserError(f"{path}: {name} is {stored.get_dtype()}; fetch the model in float32, float16 or bfloat16")
    shape = tuple(stored.get_shape())
    shape = shape[::-1] if tensor.turned else shape
    if tensor.name == POSITIONS:
        shape = (min(shape[0], tensor.shape[0]), *shape[1:])
    if shape != tensor.shape:
        raise UserError(f"{path}: {name} is {shape}, but the model needs {tensor.shape}; set config.model")


def _check_extent(file: Any, names: set[str], prefix: str, path: Path, config: BertConfig) -> None:
    """Raise UserError for what is commonly wrong: another vocabulary, too few positions, too many layers."""

    def rows(name: str) -> int:
        return next(iter(file.get_slice(prefix + name).get_shape()), 0) if prefix + name in names else 0

    if (words := rows(WORDS)) != config.vocabulary_size:
        raise UserError(
            f"{path}: has {words} word pieces, but the vocabulary has {config.vocabulary_size}; the vocabulary file "
            "and the weights do not match"
        )
    if (positions := rows(POSITIONS)) < config.max_length:
        raise UserError(
            f"{path}: has {positions} positions, but the model {config.max_length}; set the lengths of config.data "
            f"to at most {positions}"
        )
    if any(name.startswith(f"{prefix}encoder.layer.{config.layers}.") for name in names):
        raise UserError(f"{path}: has more than the model's {config.layers} layers; set config.model.layers")


def read_bert_settings(folder: Path) -> dict[str, Any]:
    """The config.json of a BERT, {} if there is none. Raises UserError, with the type of model, for another network."""
    settings = read_settings(folder / SETTINGS)
    for name, plain in REQUIRED_SETTINGS.items():
        if settings.get(name, plain[0]) not in plain:
            supported = " or ".join(map(repr, plain))
            raise UserError(f"{folder / SETTINGS}: {name} is {settings[name]!r}, not {supported}; choose a plain BERT")
    return settings


def _check_settings(path: Path, settings: dict[str, Any], wanted: dict[str, tuple[str, Any]]) -> None:
    """What shapes do not tell: heads, activation and the epsilons of LayerNorm. Nothing to compare without settings."""
    if settings.get("model_type") == HF_REALM:  # transformers has one epsilon for a tower
        settings.setdefault("projection_layer_norm_eps", settings.get("layer_norm_eps", LAYER_NORM_EPSILON))
    if "hidden_act" in settings:
        settings["hidden_act"] = our_activation(settings["hidden_act"])
    for name, (key, own) in wanted.items():
        if settings.get(name, own) != own:
            raise UserError(f"{path}: {name} is {settings[name]!r}, but {key} is {own!r}; they must be the same")


def our_activation(name: Any) -> Any:
    """Our name for an activation of config.json; others stay as they are."""
    return SAME_ACTIVATION.get(str(name), name)


# --- Out --------------------------------------------------------------------------------------------------------------


def save(folder: Path, params: Params, parts: Sequence[Part], kind: str, settings: dict[str, Any]) -> None:
    """Write a network's parameters and settings into a new folder; `find` and `read` give the same bits again.

    kind: 'bert' or 'realm', whose names the encoder gets.
    """
    folder.mkdir()
    arrays, tensors = flatten_dict(params), {}
    for tensor in chain.from_iterable(part.tensors for part in parts):
        array = np.asarray(arrays[tensor.path], np.float32)
        tensors[_full(f"{kind}.", tensor.name)] = np.asarray(array.T if tensor.turned else array, order="C")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})  # without which transformers does not open it
    write_json(folder / SETTINGS, settings)


def write_json(path: Path, value: Any) -> None:
    """Write a file of settings as Hugging Face's library does."""
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def bert_settings(c: BertConfig) -> dict[str, Any]:
    """What the config.json of any network says of its BERT."""
    return {key: getattr(c, name) for name, key in BERT_SETTINGS.items()} | {
        "attention_probs_dropout_prob": c.dropout,
        "type_vocab_size": 2,
        "initializer_range": initializer_stddev(c.width),
        "layer_norm_eps": LAYER_NORM_EPSILON,
        "torch_dtype": "float32",
    }


def settings_of(model: Realm, network: str, kind: str) -> dict[str, Any]:
    """The config.json of a network. kind: 'bert' or 'realm', the library's model that it is for.

    Of the architectures it names, BERT's are without the parts that are REALM's own: their tensors lie in the file.
    """
    classes = {"bert": ("BertForMaskedLM", "BertModel"), "realm": ("RealmReader", "RealmEmbedder")}
    settings = {"architectures": [classes[kind][network != "reader"]], "model_type": kind}
    settings |= bert_settings(bert_of(model, network))
    settings |= {key: getattr(model, name) for name, key in RETRIEVER_SETTINGS.items()}
    settings |= {key: getattr(model.reader, name) for name, key in READER_SETTINGS.items()}
    return settings | {"reader_layer_norm_eps": SPAN_NORM_EPSILON}
