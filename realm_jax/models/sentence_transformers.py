"""Read and write folders of sentence-transformers, which store an encoder as a chain of modules.

    modules.json                          the modules in order: Transformer, Pooling, those of LAYERS, Normalize
    config_sentence_transformers.json     prompts, and how vectors are compared
    sentence_bert_config.json             the longest input
    1_Pooling/config.json, 2_Dense/…      settings and weights of each module

Reading gives the keys of the config's section `encoder` and the files of the weights. A module that we cannot represent
is an error. `SentenceTransformer(FOLDER).encode` of a folder that we wrote gives the encoder's vectors. The library's
LayerNorm has another epsilon than ours. Scaling its input compensates exactly, because LayerNorm removes any scale.
The reader is not an encoder of texts. We write a list of modules into its folder at which the library stops, because it
would otherwise take the mean of hidden states without a warning.

One folder can hold both encoders, with the library's Router:

    modules.json, router_config.json          a Router with the routes `query` and `document`
    config_sentence_transformers.json         the prompts of both
    query_embedder/, document_embedder/       the modules of each route: query_embedder/1_Pooling …

`encode_query` and `encode_document` take the routes of these names. Plain `encode` takes the route of documents,
because it mostly embeds a corpus. We read Routers of other programs the same way. Modules after a Router belong to both
routes. Read next: `weights.py`, for the transformer inside.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from safetensors.numpy import save_file

from realm_jax.errors import UserError
from realm_jax.models.architectures.table import ARCHITECTURES, read_architecture
from realm_jax.models.layers import BertConfig, Params
from realm_jax.models.networks import Realm
from realm_jax.models.prompts import from_prompt, parse
from realm_jax.models.retriever import POOLINGS
from realm_jax.models.weights import (
    NO_BIAS,
    SETTINGS,
    VECTOR_LAYERS,
    WEIGHTS,
    NetworkFiles,
    Part,
    StoredTensor,
    check_tensor,
    find,
    has_weights,
    open_tensors,
    write_json,
)
from realm_jax.storage import read_fetched_json, read_settings

MODULES, README = "modules.json", "README.md"
PROMPTS = "config_sentence_transformers.json"
INPUT = "sentence_bert_config.json"
ROUTER = "router_config.json"
LIBRARY = "sentence_transformers."
KINDS = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize")  # modules that can be read
LIBRARY_EPSILON = 1e-5  # of its LayerNorm: PyTorch's default, which the library has no setting for
OUR_POOLINGS = {  # the library's name → ours
    pooling.library: name for name, pooling in POOLINGS.items() if not pooling.has_tanh_layer
}
FLAGS = {  # of Pooling's older form
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
QUERIES, PASSAGES = "query", "document"  # the library's names for prompts, and for the texts of an encoder
TITLED = "{title} {text}"
NOT_AN_ENCODER = (
    "sentence_transformers.this_network_is_no_sentence_encoder"  # a module's type at which the library stops
)
NAMES: dict[type, str] = {int: "whole number", str: "text", dict: "table"}  # of the kinds of a value
Kind = TypeVar("Kind")
TRAINED_READER = "realm_reader_trained"  # in config.json of an exported reader: true if it was trained with questions
ENCODER_SECTION = "realm_encoder"  # in config.json of an exported encoder: the config's section `encoder`


class Module(NamedTuple):
    """The library's module for a layer of an encoder.

    Attributes:
        kind: its class.
        layer: prefix of its tensors' names.
        activation: activation of a Dense.
    """

    kind: str
    layer: str
    activation: str = ""


LAYERS = {  # our layer → the library's module, in the order in which they follow the pooling
    "pooler": Module("Dense", "linear", "torch.nn.modules.activation.Tanh"),
    "projection": Module("Dense", "linear", "torch.nn.modules.linear.Identity"),
    "projection_norm": Module("LayerNorm", "norm"),
}


class SentenceModel(NamedTuple):
    """A folder of sentence-transformers.

    Attributes:
        folder: folder of the model.
        transformer: folder of the transformer, which is the first module.
        encoder: key of the config's section → value.
        modules: layer → the folder of its weights.
        max_seq_length: tokens of its longest input; None if it is not set.
        unused: names of prompts that neither `encode_query` nor `encode_document` uses.
    """

    folder: Path
    transformer: Path
    encoder: dict[str, Any]
    modules: dict[str, Path]
    max_seq_length: int | None
    unused: tuple[str, ...]


# --- Read -------------------------------------------------------------------------------------------------------------


def is_sentence_model(folder: Path) -> bool:
    """Return True for a folder of sentence-transformers, except one that we marked so that the library rejects it."""
    path = folder / MODULES
    return path.is_file() and not any(entry.get("type") == NOT_AN_ENCODER for entry in _entries(path))


def transformer_folder(folder: Path, route: str = "document") -> Path:
    """Return the folder of the transformer and its tokenizer: a folder itself, or its first module if it has modules.

    Args:
        folder: folder of the model.
        route: QUERIES or PASSAGES, for a Router.

    Raises:
        UserError: if the list of modules is damaged.
    """
    entries = _chain(folder, route) if is_sentence_model(folder) else []
    return folder / entries[0]["path"] if entries else folder


def has_two_encoders(folder: Path) -> bool:
    """Return True for a Router with different modules for queries and passages. Raises UserError if it is damaged."""
    return is_sentence_model(folder) and _chain(folder, QUERIES) != _chain(folder, PASSAGES)


def default_temperature(normalization: str) -> float:
    """Return 0.05 for vectors of length 1, whose scores are close together, as public encoders are trained; else 1."""
    return 0.05 if normalization == "l2" else 1.0


def sentence_model(folder: Path, route: str = "document") -> SentenceModel | None:
    """Read the description of a folder of sentence-transformers, without its weights; None for a plain transformer.

    Our vectors are those of the library's `encode_query` and `encode_document`, and their inner products those of its
    `similarity`.

    Args:
        folder: folder of the model.
        route: QUERIES or PASSAGES, for a Router.

    Raises:
        UserError: if a file cannot be read, if our encoders lack the module, its pooling, its activation or the order
            of modules, and if the pooling excludes the prompt.
    """
    if not is_sentence_model(folder):
        return None

    # --- The list of modules, which begins with the transformer and its pooling
    entries = _chain(folder, route)
    kinds = []
    for entry in entries:
        module = str(entry.get("type"))
        kinds.append(module.rpartition(".")[2])
        if not module.startswith(LIBRARY) or kinds[-1] not in KINDS:
            _reject(folder / MODULES, f"has the module {module}; modules that can be read are {', '.join(KINDS)}")
    if kinds[:2] != ["Transformer", "Pooling"]:
        _reject(folder / MODULES, f"begins with {', '.join(kinds[:2])}; choose a model of a Transformer and a Pooling")
    transformer = folder / entries[0]["path"]
    architecture, transformer_settings = read_architecture(transformer / SETTINGS)

    # --- The pooling
    path = folder / entries[1]["path"] / SETTINGS
    settings = read_settings(path, needed=True)
    modes = settings.get("pooling_mode") or [mode for flag, mode in FLAGS.items() if settings.get(flag)] or ["mean"]
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or modes[0] not in OUR_POOLINGS:
        poolings = ", ".join(OUR_POOLINGS)
        _reject(path, f"pools by {' and '.join(map(str, modes))}; choose a model that pools by {poolings}")
    if settings.get("include_prompt", True) is not True:
        _reject(path, "has include_prompt=false, and here the prompt is pooled as well; choose another model")
    encoder: dict[str, Any] = {"pooling": OUR_POOLINGS[modes[0]], "projection": 0}
    encoder |= {"normalization": "none", "norm_epsilon": LIBRARY_EPSILON}

    # --- The layers after it: a Dense is the pooler (BERT's tanh layer after [CLS]) or the projection
    modules: dict[str, Path] = {}
    for kind, entry in zip(kinds[2:], entries[2:], strict=True):
        if encoder["normalization"] != "none":
            _reject(folder / MODULES, f"has {kind} after its normalization, which must be last; choose another model")
        if kind == "LayerNorm":
            encoder["normalization"] = "layer"
            modules["projection_norm"] = folder / entry["path"]
        elif kind == "Normalize":
            encoder["normalization"] = "l2"
        elif kind == "Dense":
            path = folder / entry["path"] / SETTINGS
            settings = read_settings(path, needed=True)
            activation = str(settings.get("activation_function", LAYERS["pooler"].activation))
            name, source = activation.rpartition(".")[2], settings.get("module_input_name", "sentence_embedding")
            if settings.get("use_residual") or source != "sentence_embedding":
                _reject(path, "is not a plain layer (use_residual, module_input_name); choose another model")
            is_square = settings.get("in_features") == settings.get("out_features")
            if name == "Tanh" and is_square and encoder["pooling"] == "cls" and not modules:
                encoder["pooling"] = layer = "pooler"
            elif name != "Identity" or "projection" in modules:
                wrong = "a second Dense" if "projection" in modules else f"a Dense with {activation}"
                advice = "one is read with Identity, and before it one with Tanh as BERT's own behind [CLS]"
                _reject(path, f"is {wrong}; {advice}")
            else:
                layer = "projection"
                encoder["projection"] = _setting(path, settings, "out_features", int)
            modules[layer] = folder / entry["path"]

    # The library compares by cosine unless told otherwise. We then normalize vectors to length 1, as its
    # `encode(…, normalize_embeddings=True)` does, so that our scores are the library's. After a LayerNorm we do not,
    # because these vectors have nearly the same length.
    path = folder / PROMPTS
    settings = read_settings(path)
    similarity = settings.get("similarity_fn_name") or "cosine"
    if similarity not in ("cosine", "dot"):
        _reject(path, f"compares vectors by {similarity}; choose a model that does by cosine or dot")
    if similarity == "cosine" and encoder["normalization"] == "none":
        encoder["normalization"] = "l2"

    # The library cuts vectors last. Cosines do not depend on their length, so ours are cut first and then get length 1.
    features = encoder["projection"] or transformer_settings.get(architecture.settings["width"]) or 0
    dimensions = _setting(path, settings, "truncate_dim", int) or 0
    encoder["dimensions"] = dimensions if dimensions < features else 0
    if encoder["dimensions"] and similarity == "dot" and encoder["normalization"] == "l2":
        _reject(path, "cuts vectors of length 1 and compares them by dot; choose a model that compares by cosine")

    # A model that the library has loaded has prompts "query" and "document", empty if the folder lacks them. So
    # `encode_query` and `encode_document` never take "passage", "corpus" or the prompt of `default_prompt_name`.
    prompts = _setting(path, settings, "prompts", dict) or {}
    if not all(text is None or isinstance(text, str) for text in prompts.values()):
        _reject(path, "has prompts that are no text; fetch it again")
    _setting(path, settings, "default_prompt_name", str)
    query, passage = (prompts.get(name) or "" for name in (QUERIES, PASSAGES))
    encoder["query_prompt"] = from_prompt(query, "{text}") if query else ""
    encoder["passage_prompt"] = from_prompt(passage, TITLED)
    encoder["temperature"] = default_temperature(encoder["normalization"])
    unused = tuple(name for name, text in prompts.items() if text and name not in (QUERIES, PASSAGES))
    longest = _setting(transformer / INPUT, read_settings(transformer / INPUT), "max_seq_length", int)

    # Our exports record their section `encoder`, and the encoder's file also has the layers as they were before scaling
    # for the library's epsilon. If the modules still agree with the record, a run gets the same bits from that file.
    section = transformer_settings.get(ENCODER_SECTION)
    if isinstance(section, dict):
        section = {"dimensions": 0} | section  # earlier versions did not record it
    if isinstance(section, dict) and {*encoder} <= {*section} and has_weights(transformer):
        with open_tensors(transformer / WEIGHTS) as files:
            names = {name.removeprefix(architecture.prefix) for name in files}
        has = {layer: f"{name}.weight" in names for layer, name in VECTOR_LAYERS.items()}
        wanted = {"pooler": POOLINGS[encoder["pooling"]].has_tanh_layer, "projection": bool(section["projection"])}
        wanted["projection_norm"] = section["normalization"] == "layer"
        if has == wanted and all(section[key] == encoder[key] for key in ("pooling", "normalization", "dimensions")):
            encoder, modules = {key: section[key] for key in encoder}, {}
    return SentenceModel(folder, transformer, encoder, modules, longest, unused)


def _chain(folder: Path, route: str) -> list[dict[str, Any]]:
    """Return the list of modules of a route: all of them without a Router, else its own and those after the Router."""
    entries = _entries(folder / MODULES)
    if not entries or str(entries[0].get("type")).rpartition(".")[2] != "Router":
        return entries
    router = Path(entries[0]["path"])
    path = folder / router / ROUTER
    settings = read_settings(path, needed=True)
    types, structure = (_setting(path, settings, key, dict) or {} for key in ("types", "structure"))
    names = structure.get(route)
    if not isinstance(names, list) or not names or not {*map(str, names)} <= {*types}:
        _reject(
            path, f"has no modules for the route {route!r}; choose a model with the routes {QUERIES} and {PASSAGES}"
        )
    return [*({"path": str(router / name), "type": types[name]} for name in names), *entries[1:]]


def _entries(path: Path) -> list[dict[str, Any]]:
    entries: Any = read_fetched_json(path)
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("path"), str) for entry in entries
    ):
        _reject(path, "is not a list of modules; fetch it again")
    return entries


def _setting(path: Path, settings: dict[str, Any], key: str, kind: type[Kind]) -> Kind | None:
    """Return a value of a file of settings, None if it is missing. Raises UserError for another type."""
    value = settings.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        _reject(path, f"has {key}={json.dumps(value)[:50]}, which is no {NAMES[kind]}; fetch it again")
    return value


def _reject(path: Path, advice: str) -> NoReturn:
    raise UserError(f"{path}: {advice}")


def find_encoder(model: SentenceModel, config: BertConfig, parts: Sequence[Part]) -> NetworkFiles:
    """Find an encoder's files: those of its transformer (`weights.find`) and of its modules.

    If both have a part, for example a pooler, we take the module's. A bias that a module lacks is 0.

    Args:
        model: the folder.
        config: sizes of the transformer.
        parts: parts of the encoder.

    Raises:
        UserError: like `weights.find`, and if a module has no safetensors, or tensors of another size.
    """
    layers = [sorted({tensor.path[0] for tensor in part.tensors} & {*model.modules}) for part in parts]
    files = find(model.transformer, config, [part for part, names in zip(parts, layers, strict=True) if not names])
    for part, names in zip(parts, layers, strict=True):
        stored: list[StoredTensor] = []
        for layer in names:
            path = model.modules[layer] / WEIGHTS
            with open_tensors(path) as opened:
                for tensor in (tensor for tensor in part.tensors if tensor.path[0] == layer):
                    name = f"{LAYERS[layer].layer}.{tensor.name.rpartition('.')[2]}"
                    if name in opened:
                        check_tensor(opened, name, tensor, path)
                    elif not name.endswith("bias"):
                        raise UserError(f"{path}: has no {name}; fetch it again")
                    stored.append(StoredTensor(tensor, path, name if name in opened else NO_BIAS))
        if stored:
            files = files._replace(tensors=(*files.tensors, *stored), present=(*files.present, part.title))
    return files


# --- Write ------------------------------------------------------------------------------------------------------------


def write_modules(
    folder: Path, model: Realm, params: Params, encoder: dict[str, Any], lengths: dict[str, int]
) -> None:  # fmt: skip
    """Write the library's files around an encoder's transformer, which is in `folder`.

    Args:
        folder: folder of the transformer.
        model: all networks.
        params: parameters of the encoder.
        encoder: the config's section.
        lengths: purposes of the encoder ('query', 'document', or both if it is shared) → tokens of its longest input.
    """
    flags: dict[str, Any] = {flag: mode == POOLINGS[model.pooling].library for flag, mode in FLAGS.items()}
    modules = [("", "Transformer")]
    _add_module(
        folder, modules, "Pooling", {"word_embedding_dimension": model.bert.width, "include_prompt": True} | flags
    )
    layers = {layer: params[layer] for layer in LAYERS if layer in params}
    if model.normalization == "layer":
        scale, size = (LIBRARY_EPSILON / model.norm_epsilon) ** 0.5, model.vector_size
        unscaled = layers.get("projection", {"kernel": np.eye(size), "bias": np.zeros(size)})
        layers["projection"] = {name: array * scale for name, array in unscaled.items()}
    for layer, module in LAYERS.items():
        if layer not in layers:
            continue
        if module.kind == "Dense":
            weight = layers[layer]["kernel"].T  # [outputs, inputs]
            settings = {"in_features": weight.shape[1], "out_features": weight.shape[0]}
            settings |= {"bias": True, "activation_function": module.activation}
        else:
            weight = layers[layer]["scale"]
            settings = {"dimension": weight.size}
        tensors = {f"{module.layer}.weight": weight, f"{module.layer}.bias": layers[layer]["bias"]}
        _add_module(folder, modules, module.kind, settings, tensors)
    if model.normalization == "l2":
        _add_module(folder, modules, "Normalize")
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": f"{LIBRARY}models.{kind}"}
        for number, (path, kind) in enumerate(modules)
    ]
    write_json(folder / MODULES, entries)
    longest = {"max_seq_length": max(lengths.values()), "do_lower_case": False}
    options = {"model_args": {"add_pooling_layer": False}} if ARCHITECTURES[model.bert.architecture].has_pooler else {}
    write_json(folder / INPUT, longest | options)
    prompts = {purpose: prompt for purpose in lengths if (prompt := _prompt(encoder, purpose))}
    cut = {"truncate_dim": model.dimensions} if model.dimensions else {}
    write_json(
        folder / PROMPTS,
        cut
        | {
            "prompts": prompts,
            "default_prompt_name": next(iter(prompts)) if len(lengths) == len(prompts) == 1 else None,
            "similarity_fn_name": "cosine" if model.normalization == "l2" else "dot",
        },
    )
    (folder / README).write_text(_readme(encoder, list(lengths)), "utf-8")


def _add_module(
    folder: Path, modules: list[tuple[str, str]], kind: str, settings: Any = None, tensors: Params | None = None
) -> None:
    """Write the folder of the next module, and append its path and class."""
    path = f"{len(modules)}_{kind}"
    (folder / path).mkdir()
    if settings:
        write_json(folder / path / SETTINGS, settings)
    if tensors:
        arrays = {name: np.ascontiguousarray(array, np.float32) for name, array in tensors.items()}
        save_file(arrays, folder / path / WEIGHTS, metadata={"format": "pt"})
    modules.append((path, kind))


def mark_not_a_sentence_encoder(folder: Path) -> None:
    """Make sentence-transformers reject a folder that is not a sentence encoder."""
    write_json(folder / MODULES, [{"idx": 0, "name": "0", "path": "", "type": NOT_AN_ENCODER}])


def _prompt(encoder: dict[str, Any], purpose: str) -> str:
    """Return the literal text before the first slot of a template."""
    template = encoder["query_prompt" if purpose == QUERIES else "passage_prompt"]
    return parse(template, "config.encoder", titles=True)[0] if template else ""


def _readme(encoder: dict[str, Any], purposes: list[str]) -> str:
    """Return a README that tells how to encode texts and compare vectors."""
    lines = ["# A retriever's encoder for sentence-transformers", ""]
    for purpose in purposes:
        template = encoder["query_prompt" if purpose == QUERIES else "passage_prompt"]
        if purpose == PASSAGES and not template:
            call, texts = (
                "[(title, text), ...]",
                "pairs of title and text, because the encoder reads them as two segments",
            )
        else:
            prompt = _prompt(encoder, purpose)
            rest = (template or "{text}")[len(from_prompt(prompt, "")) :]
            call, texts = f'[f"{rest}", ...]', f"texts as {rest!r}"
            texts += f"; the prompt {prompt!r} is put before them" if prompt else ""
        name = "Queries" if purpose == QUERIES else "Passages"
        lines += [f"{name}: {texts}.", "", f"    SentenceTransformer(FOLDER).encode_{purpose}({call})", ""]
    lines += [
        f"Scores are inner products of both encoders' vectors divided by the temperature, {encoder['temperature']:g}.",
        "`model.safetensors` also holds the layers after the transformer, which transformers reports and skips;",
        "`realm train --config.init_from` reads them.",
    ]
    return "\n".join(lines) + "\n"


def write_sentence_transformer(folder: Path, encoders: Mapping[str, str]) -> None:
    """Combine both encoders, or a shared one, into one model of sentence-transformers.

    Args:
        folder: holds the folders of the encoders, as `write_modules` leaves them.
        encoders: QUERIES and PASSAGES → name of the encoder's folder. Both compare vectors the same way.
    """
    routes: dict[str, dict[str, str]] = {}  # route → folder of each module → its class, in order
    for route, name in encoders.items():
        entries = _entries(folder / name / MODULES)
        routes[route] = {f"{name}/{entry['path']}".removesuffix("/"): entry["type"] for entry in entries}
    queries, passages = (read_settings(folder / encoders[route] / PROMPTS) for route in (QUERIES, PASSAGES))
    if encoders[QUERIES] == encoders[PASSAGES]:
        modules, prompts = routes[QUERIES], queries
    else:
        modules = {"": f"{LIBRARY}models.Router"}
        router = {
            "types": {path: kind for route in routes.values() for path, kind in route.items()},
            "structure": {route: list(paths) for route, paths in routes.items()},
            "parameters": {"default_route": PASSAGES, "allow_empty_key": True},
        }
        write_json(folder / ROUTER, router)
        texts = {QUERIES: queries["prompts"].get(QUERIES, ""), PASSAGES: passages["prompts"].get(PASSAGES, "")}
        prompts = {
            "prompts": texts,
            "default_prompt_name": PASSAGES if texts[PASSAGES] else None,
            **{key: queries[key] for key in ("similarity_fn_name", "truncate_dim") if key in queries},
        }
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": kind}
        for number, (path, kind) in enumerate(modules.items())
    ]
    write_json(folder / MODULES, listed)
    write_json(folder / PROMPTS, prompts)
