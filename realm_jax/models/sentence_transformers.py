"""Folders of sentence-transformers, in and out: a tower as the library's chain of modules.

    modules.json                          the modules in order: Transformer, Pooling, those of LAYERS, Normalize
    config_sentence_transformers.json     prompts, and how vectors are compared
    sentence_bert_config.json             the longest input
    1_Pooling/config.json, 2_Dense/…      settings and weights of each module

In: which network a folder describes, as keys of the config's section `encoder`, and where its weights lie; what cannot
be represented here is refused by its name. Out: `SentenceTransformer(FOLDER).encode` gives the tower's vectors. The
library's LayerNorm has one epsilon, which is larger than BERT's; scaling what goes into it makes up for that exactly,
since LayerNorm takes any scale out again. A folder that is not an encoder of texts, the reader's, gets a list of
modules at which the library stops, where it would otherwise take the mean of hidden states and say nothing. Read next:
`weights.py`, for the BERT inside.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from realm_jax.errors import UserError
from realm_jax.models.bert import BertConfig
from realm_jax.models.prompts import from_prompt, parse
from realm_jax.models.realm import Params, Realm
from realm_jax.models.weights import (
    NO_BIAS,
    SETTINGS,
    WEIGHTS,
    NetworkFiles,
    Part,
    StoredTensor,
    check_tensor,
    find,
    has_weights,
    open_safetensors,
    read_bert_settings,
    write_json,
)
from realm_jax.storage import read_fetched_json, read_settings

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
INPUT = "sentence_bert_config.json"
LIBRARY = "sentence_transformers."
LIBRARY_EPSILON = 1e-5  # of its LayerNorm, which is PyTorch's and not to be set
POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}  # theirs → ours
FLAGS = {  # of Pooling's older form
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
QUERIES, PASSAGES = "query", "document"  # the library's names for prompts, and for the texts that a tower is for
TITLED = "{title} {text}"
NOT_AN_ENCODER = (
    "sentence_transformers.this_network_is_no_sentence_encoder"  # a module's type at which the library stops
)
NAMES: dict[type, str] = {int: "whole number", str: "text", dict: "table"}  # of the kinds of a value
Kind = TypeVar("Kind")
TRAINED_READER = "realm_reader_trained"  # in config.json of an exported reader: whether it was trained with questions
ENCODER_SECTION = "realm_encoder"  # in config.json of what `realm weights export` writes: its section `encoder`


class Module(NamedTuple):
    """The library's module for a layer of a tower: its class, how its tensors' names begin, what a Dense ends in."""

    kind: str
    layer: str
    activation: str = ""


LAYERS = {  # our layer → the library's module, in the order in which they follow the pooling
    "pooler": Module("Dense", "linear", "torch.nn.modules.activation.Tanh"),
    "projection": Module("Dense", "linear", "torch.nn.modules.linear.Identity"),
    "projection_norm": Module("LayerNorm", "norm"),
}


class SentenceModel(NamedTuple):
    """A folder. transformer: where the BERT lies; encoder: key of the config's section → value; modules: folders of
    those layers whose weights are to be read; max_seq_length: tokens of its longest input, None if it does not
    say; unused: names of prompts that nothing takes."""

    folder: Path
    transformer: Path
    encoder: dict[str, Any]
    modules: dict[str, Path]
    max_seq_length: int | None
    unused: tuple[str, ...]


# --- In ---------------------------------------------------------------------------------------------------------------


def is_sentence_model(folder: Path) -> bool:
    """Whether a folder is one of sentence-transformers, and not one that we write so that it refuses it."""
    path = folder / MODULES
    return path.is_file() and not any(entry.get("type") == NOT_AN_ENCODER for entry in _entries(path))


def transformer_folder(folder: Path) -> Path:
    """Where the BERT of a folder lies, with its tokenizer: itself, or its first module if it is one of
    sentence-transformers. Raises UserError for a damaged list of modules."""
    entries = _entries(folder / MODULES) if is_sentence_model(folder) else []
    return folder / entries[0]["path"] if entries else folder


def read_sentence_model(folder: Path) -> SentenceModel:
    """What a folder describes. Reads no weights.

    Vectors are those of the library's `encode_query` and `encode_document`, and their inner products those of its
    `similarity`: where that is the cosine and vectors are not normalised yet, they get length 1, as by `encode(…,
    normalize_embeddings=True)`. Behind a LayerNorm they stay as they are, nearly of one length.

    Raises UserError, naming the file, for one that cannot be read, for an unknown module, for a pooling, an activation
    or an order of modules that the towers do not have, and for prompts that are left out of the pooling.
    """
    entries = _entries(folder / MODULES)
    kinds = [_kind(entry, folder) for entry in entries]
    if kinds[:2] != ["Transformer", "Pooling"]:
        _refuse(folder / MODULES, f"begins with {', '.join(kinds[:2])}; choose a model of a Transformer and a Pooling")
    transformer = folder / entries[0]["path"]
    settings = read_bert_settings(transformer)
    encoder: dict[str, Any] = {"pooling": _pooling(folder / entries[1]["path"]), "projection": 0}
    encoder |= {"normalization": "none", "norm_epsilon": LIBRARY_EPSILON}
    modules: dict[str, Path] = {}
    for kind, entry in zip(kinds[2:], entries[2:], strict=True):
        place = folder / entry["path"]
        if encoder["normalization"] != "none":
            _refuse(folder / MODULES, f"has {kind} after its normalisation, which must be last; choose another model")
        if kind == "Dense":
            modules[_layer_of_dense(encoder, place, modules)] = place
        elif kind == "LayerNorm":
            encoder["normalization"] = "layer"
            modules["projection_norm"] = place
        elif kind == "Normalize":
            encoder["normalization"] = "l2"
    prompts, unused = _prompts(folder / PROMPTS, encoder)
    encoder |= prompts
    encoder["temperature"] = default_temperature(encoder["normalization"])
    if own := _recorded_encoder(transformer, settings.get(ENCODER_SECTION), encoder):
        encoder, modules = own, {}
    longest = _setting(transformer / INPUT, read_settings(transformer / INPUT), "max_seq_length", int)
    return SentenceModel(folder, transformer, encoder, modules, longest, unused)


def _recorded_encoder(transformer: Path, own: Any, encoder: dict[str, Any]) -> dict[str, Any]:
    """The section `own`, which an export of ours recorded, if its tensors still lie in the encoder's file; else {}.

    They are the same layers as the modules', but for the scale that the library's epsilon asks for, so that a run that
    starts from them has the same bits.
    """
    if not isinstance(own, dict) or not {*encoder} <= {*own} or not has_weights(transformer):
        return {}
    with open_safetensors(transformer / WEIGHTS) as file:
        names = {name.removeprefix("bert.") for name in file.keys()}
    layers = {
        "pooler.dense.weight": own["pooling"] == "pooler",
        "cls.dense.weight": bool(own["projection"]),
        "cls.LayerNorm.weight": own["normalization"] == "layer",
    }
    same = all((name in names) == wanted for name, wanted in layers.items())
    alike = all(own[key] == encoder[key] for key in ("pooling", "normalization"))
    return {key: own[key] for key in encoder} if same and alike else {}


def default_temperature(normalization: str) -> float:
    """Of vectors of length 1, whose scores lie so close together, .05, as public encoders are trained; else 1."""
    return 0.05 if normalization == "l2" else 1.0


def _kind(entry: dict[str, Any], folder: Path) -> str:
    """The module's class."""
    type_ = str(entry.get("type"))
    kind = type_.rpartition(".")[2]
    known = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize")
    if not type_.startswith(LIBRARY) or kind not in known:
        _refuse(folder / MODULES, f"has the module {type_}; modules that can be read are {', '.join(known)}")
    return kind


def _pooling(folder: Path) -> str:
    path = folder / SETTINGS
    settings = read_settings(path, needed=True)
    modes = settings.get("pooling_mode") or [mode for flag, mode in FLAGS.items() if settings.get(flag)] or ["mean"]
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        _refuse(path, f"pools by {' and '.join(map(str, modes))}; choose a model that pools by {', '.join(POOLINGS)}")
    if settings.get("include_prompt", True) is not True:
        _refuse(path, "has include_prompt=false, and here the prompt is pooled as well; choose another model")
    return POOLINGS[modes[0]]


def _layer_of_dense(encoder: dict[str, Any], folder: Path, before: Collection[str]) -> str:
    """Take a Dense into the section: BERT's tanh layer behind [CLS], or the projection."""
    path = folder / SETTINGS
    settings = read_settings(path, needed=True)
    activation = str(settings.get("activation_function", LAYERS["pooler"].activation))
    name = activation.rpartition(".")[2]
    if settings.get("use_residual") or settings.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        _refuse(path, "is not a plain layer (use_residual, module_input_name); choose another model")
    square = settings.get("in_features") == settings.get("out_features")
    if name == "Tanh" and square and encoder["pooling"] == "cls" and not before:
        encoder["pooling"] = "pooler"
        return "pooler"
    if name != "Identity" or "projection" in before:
        what = "a second Dense" if "projection" in before else f"a Dense with {activation}"
        _refuse(path, f"is {what}; one is read with Identity, and before it one with Tanh as BERT's own behind [CLS]")
    encoder["projection"] = _setting(path, settings, "out_features", int)
    return "projection"


def _prompts(path: Path, encoder: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The templates of queries and passages, with the names of the prompts that neither takes.

    A model that the library has loaded has prompts "query" and "document", empty unless the folder says otherwise. So
    `encode_query` and `encode_document` take these, and never "passage", "corpus" or that of `default_prompt_name`.
    Vectors that are compared by their cosine, as the library does with those of a folder that does not say how, get
    length 1 where they have no normalisation, so that scores are the library's.
    """
    settings = read_settings(path)
    if settings.get("truncate_dim"):
        _refuse(path, "has truncate_dim, which cuts vectors; choose a model without it")
    similarity = settings.get("similarity_fn_name") or "cosine"
    if similarity not in ("cosine", "dot"):
        _refuse(path, f"compares vectors by {similarity}; choose a model that does by cosine or dot")
    normalization = {"normalization": "l2"} if similarity == "cosine" and encoder["normalization"] == "none" else {}
    prompts = _setting(path, settings, "prompts", dict) or {}
    if not all(text is None or isinstance(text, str) for text in prompts.values()):
        _refuse(path, "has prompts that are no text; fetch it again")
    _setting(path, settings, "default_prompt_name", str)
    query, passage = (prompts.get(name) or "" for name in (QUERIES, PASSAGES))
    unused = tuple(name for name, text in prompts.items() if text and name not in (QUERIES, PASSAGES))
    templates = {
        "query_prompt": from_prompt(query, "{text}") if query else "",
        "passage_prompt": from_prompt(passage, TITLED),
    }
    return normalization | templates, unused


def _entries(path: Path) -> list[dict[str, Any]]:
    entries = read_fetched_json(path)
    if not isinstance(entries, list) or not all(map(_is_module, entries)):
        _refuse(path, "is not a list of modules; fetch it again")
    return entries


def _is_module(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("path"), str)


def _setting(path: Path, settings: dict[str, Any], key: str, kind: type[Kind]) -> Kind | None:
    """A value of a file of settings; None if it does not say. Raises UserError for one of another kind."""
    value = settings.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        _refuse(path, f"has {key}={json.dumps(value)[:50]}, which is no {NAMES[kind]}; fetch it again")
    return value


def _refuse(path: Path, what: str) -> None:
    raise UserError(f"{path}: {what}")


def find_tower(model: SentenceModel, config: BertConfig, parts: Sequence[Part]) -> NetworkFiles:
    """A tower's files, as `find` has them: its BERT's and those of the modules, which count where both have a part, as
    a BERT has its pooler. What a module lacks stays fresh.

    Raises UserError as `find` does, also where a module has no safe weights, or weights of another size.
    """
    layers = [sorted({tensor.path[0] for tensor in part.tensors} & {*model.modules}) for part in parts]
    files = find(model.transformer, config, [part for part, own in zip(parts, layers, strict=True) if not own])
    for part, own in zip(parts, layers, strict=True):
        if own:
            modules = chain.from_iterable(_find_module(model.modules[layer], layer, part) for layer in own)
            files = files._replace(tensors=(*files.tensors, *modules), found=(*files.found, part.title))
    return files


def _find_module(folder: Path, layer: str, part: Part) -> Iterator[StoredTensor]:
    path = folder / WEIGHTS
    with open_safetensors(path) as file:
        names = set(file.keys())
        for tensor in (tensor for tensor in part.tensors if tensor.path[0] == layer):
            name = f"{LAYERS[layer].layer}.{tensor.name.rpartition('.')[2]}"
            if name in names:
                check_tensor(file.get_slice(name), name, tensor, path)
                yield StoredTensor(tensor, path, name)
            elif name.endswith("bias"):
                yield StoredTensor(tensor, path, NO_BIAS)
            else:
                raise UserError(f"{path}: has no {name}; fetch it again")


# --- Out --------------------------------------------------------------------------------------------------------------

README = "README.md"
Written = tuple[str, dict[str, Any], dict[str, NDArray[np.float32]]]  # a module's class, settings and tensors


def write_modules(
    folder: Path, model: Realm, tower: Params, encoder: dict[str, Any], lengths: dict[str, int]
) -> None:  # fmt: skip
    """Make the library's files around a tower's BERT, which lies in `folder`.

    encoder: the config's section. lengths: 'query' or 'document', what the tower is for, both where it is shared → word
    pieces of its longest input.
    """
    modules = [("Transformer", "")]
    modules += [_write(folder, number, *module) for number, module in enumerate(_chain(model, tower), start=1)]
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": f"{LIBRARY}models.{kind}"}
        for number, (kind, path) in enumerate(modules)
    ]
    write_json(folder / MODULES, entries)
    longest = {"max_seq_length": max(lengths.values()), "do_lower_case": False}
    write_json(folder / INPUT, longest | {"model_args": {"add_pooling_layer": False}})
    prompts = {purpose: prompt for purpose in lengths if (prompt := _prompt(encoder, purpose))}
    write_json(
        folder / PROMPTS,
        {
            "prompts": prompts,
            "default_prompt_name": next(iter(prompts)) if len(lengths) == len(prompts) == 1 else None,
            "similarity_fn_name": "cosine" if model.normalization == "l2" else "dot",
        },
    )
    (folder / README).write_text(_readme(encoder, list(lengths)), "utf-8")


def mark_not_a_sentence_encoder(folder: Path) -> None:
    """Make sentence-transformers refuse a folder that is not a sentence encoder."""
    write_json(folder / MODULES, [{"idx": 0, "name": "0", "path": "", "type": NOT_AN_ENCODER}])


def _chain(model: Realm, tower: Params) -> list[Written]:
    """The modules behind the Transformer."""
    pooling = "cls" if model.pooling == "pooler" else model.pooling
    flags = {flag: POOLINGS.get(mode) == pooling for flag, mode in FLAGS.items()}
    chain: list[Written] = [
        ("Pooling", {"word_embedding_dimension": model.bert.width, "include_prompt": True} | flags, {})
    ]
    layers = {layer: tower[layer] for layer in LAYERS if layer in tower}
    if model.normalization == "layer":
        scale, size = (LIBRARY_EPSILON / model.norm_epsilon) ** 0.5, model.vector_size
        unscaled = layers.get("projection", {"kernel": np.eye(size), "bias": np.zeros(size)})
        layers["projection"] = {name: array * scale for name, array in unscaled.items()}
    chain += [_module(LAYERS[layer], layers[layer]) for layer in LAYERS if layer in layers]
    return [*chain, ("Normalize", {}, {})] if model.normalization == "l2" else chain


def _module(module: Module, layer: Params) -> Written:
    """One of a tower's layers as the library has it."""
    if module.kind == "Dense":
        weight = layer["kernel"].T
        sizes = {"in_features": weight.shape[1], "out_features": weight.shape[0]}
        settings = sizes | {"bias": True, "activation_function": module.activation}
    else:
        weight = layer["scale"]
        settings = {"dimension": weight.size}
    tensors = {f"{module.layer}.weight": weight, f"{module.layer}.bias": layer["bias"]}
    return module.kind, settings, {name: np.ascontiguousarray(array, np.float32) for name, array in tensors.items()}


def _write(folder: Path, number: int, kind: str, settings: dict[str, Any], tensors: dict[str, Any]) -> tuple[str, str]:
    """Write a module's folder. Returns its class and path."""
    path = f"{number}_{kind}"
    (folder / path).mkdir()
    if settings:
        write_json(folder / path / SETTINGS, settings)
    if tensors:
        save_file(tensors, folder / path / WEIGHTS, metadata={"format": "pt"})
    return kind, path


def _prompt(encoder: dict[str, Any], purpose: str) -> str:
    """The literal text before the first slot."""
    template = encoder["query_prompt" if purpose == QUERIES else "passage_prompt"]
    return parse(template, "config.encoder", titles=True)[0] if template else ""


def _readme(encoder: dict[str, Any], purposes: list[str]) -> str:
    """What to encode, and how to compare."""
    lines = ["# A retriever's tower for sentence-transformers", ""]
    for purpose in purposes:
        lines += _usage(encoder, purpose)
    lines += [
        f"Scores are inner products of the two towers' vectors divided by the temperature, {encoder['temperature']:g}.",
        "`model.safetensors` holds the tower's own layers once more, under names that transformers reports and leaves",
        "out; `realm train --config.init_from` reads them.",
    ]
    return "\n".join(lines) + "\n"


def _usage(encoder: dict[str, Any], purpose: str) -> list[str]:
    call = f"SentenceTransformer(FOLDER).encode_{purpose}"
    template = encoder["query_prompt" if purpose == QUERIES else "passage_prompt"]
    if purpose == PASSAGES and not template:
        text, what = "[(title, text), ...]", "pairs of title and text, since the tower reads them as two segments"
    else:
        prompt = _prompt(encoder, purpose)
        rest = (template or "{text}")[len(prompt.replace("{", "{{").replace("}", "}}")) :]
        text, what = f'[f"{rest}", ...]', f"texts as {rest!r}"
        what += f"; the prompt {prompt!r} is put before them" if prompt else ""
    name = "Queries" if purpose == QUERIES else "Passages"
    return [f"{name}: {what}.", "", f"    {call}({text})", ""]
