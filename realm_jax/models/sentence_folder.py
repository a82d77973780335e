"""Folders of sentence-transformers: which network they describe, as keys of the config's section `encoder`.

    modules.json                          the modules in order: Transformer, Pooling, then Dense, LayerNorm, Normalize
    config_sentence_transformers.json     prompts, and how vectors are compared
    sentence_bert_config.json             the longest input
    1_Pooling/config.json, 2_Dense/…      settings and weights of each module

What cannot be represented here is refused by its name. The encoder's own weights are read by `weights.py`; this module
only says where they lie. Read next: `realm_jax/jobs/models.py`, which puts what is found here into a config.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors import SafetensorError, safe_open

from realm_jax.errors import UserError
from realm_jax.storage import read_fetched_json, read_settings
from realm_jax.text.templates import from_prompt

WEIGHTS, SETTINGS = "model.safetensors", "config.json"  # of a module, and of a whole model
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
TANH, IDENTITY = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"
QUERY_PROMPTS, PASSAGE_PROMPTS = ("query",), ("document", "passage", "corpus")  # as `encode_query`, `encode_document`
TITLED = "{title} {text}"
REFUSING = "sentence_transformers.this_network_is_no_sentence_encoder"  # a module's type at which the library stops
NAMES: dict[type, str] = {int: "whole number", str: "text", dict: "table"}  # of the kinds of a value
Kind = TypeVar("Kind")
READS = "realm_reader_trained"  # in config.json of an exported reader: whether it was trained with questions
OWN = "realm_encoder"  # in config.json of what `realm weights export` writes: its section `encoder`


class Module(NamedTuple):
    """A module behind the pooling that has weights: its kind, and its folder."""

    kind: str  # 'pooler', 'projection' or 'norm'
    folder: Path


class SentenceModel(NamedTuple):
    """A folder. transformer: where the BERT lies; encoder: key of the config's section → value; modules: those whose
    weights are to be read; max_seq_length: word pieces of its longest input, None where it does not say; unused: names
    of prompts that nothing takes."""

    folder: Path
    transformer: Path
    encoder: dict[str, Any]
    modules: tuple[Module, ...]
    max_seq_length: int | None
    unused: tuple[str, ...]

    def module(self, kind: str) -> Path | None:
        """The folder of a module with weights; None where there is none of the kind."""
        return next((module.folder for module in self.modules if module.kind == kind), None)


def is_sentence_model(folder: Path) -> bool:
    """Whether a folder is one of sentence-transformers, and not one that we write so that it refuses it."""
    path = folder / MODULES
    return path.is_file() and not any(entry.get("type") == REFUSING for entry in _entries(path))


def transformer_folder(folder: Path) -> Path:
    """Where the BERT of a folder lies, with its tokenizer: itself, or its first module if it is one of
    sentence-transformers. Raises UserError for a damaged list of modules."""
    entries = _entries(folder / MODULES) if is_sentence_model(folder) else []
    return folder / entries[0]["path"] if entries else folder


def read_sentence_model(folder: Path) -> SentenceModel:
    """What a folder describes. Reads no weights.

    Vectors are those of the library's `encode`, and their inner products those of its `similarity`: where that is the
    cosine and vectors are not normalised yet, they get length 1, as by `encode(…, normalize_embeddings=True)`. Behind a
    LayerNorm they stay as they are, nearly of one length.

    Raises UserError, naming the file, for one that cannot be read, for an unknown module, for a pooling, an activation
    or an order of modules that the towers do not have, and for prompts that are left out of the pooling.
    """
    entries = _entries(folder / MODULES)
    kinds = [_kind(entry, folder) for entry in entries]
    if kinds[:2] != ["Transformer", "Pooling"]:
        _refuse(folder / MODULES, f"begins with {', '.join(kinds[:2])}; choose a model of a Transformer and a Pooling")
    transformer = folder / entries[0]["path"]
    encoder: dict[str, Any] = {"pooling": _pooling(folder / entries[1]["path"]), "projection": 0}
    encoder |= {"normalization": "none", "norm_epsilon": LIBRARY_EPSILON}
    modules: list[Module] = []
    for kind, entry in zip(kinds[2:], entries[2:], strict=True):
        place = folder / entry["path"]
        if encoder["normalization"] != "none":
            _refuse(folder / MODULES, f"has {kind} after its normalisation, which must be last; choose another model")
        if kind == "Dense":
            modules.append(_add_dense(encoder, place, [module.kind for module in modules]))
        elif kind == "LayerNorm":
            encoder["normalization"] = "layer"
            modules.append(Module("norm", place))
        elif kind == "Normalize":
            encoder["normalization"] = "l2"
    prompts, unused = _prompts(folder / PROMPTS, encoder)
    encoder |= prompts
    encoder["temperature"] = default_temperature(encoder["normalization"])
    if own := _own(transformer, encoder):
        encoder, modules = own, []
    longest = _one(transformer / INPUT, read_settings(transformer / INPUT), "max_seq_length", int)
    return SentenceModel(folder, transformer, encoder, tuple(modules), longest, unused)


def _own(transformer: Path, encoder: dict[str, Any]) -> dict[str, Any]:
    """The section as an export of ours recorded it, where its own tensors still lie in the encoder's file; else {}.

    They are the same layers as the modules', but for the scale that the library's epsilon asks for, so that a run that
    starts from them has the same bits.
    """
    own = read_settings(transformer / SETTINGS).get(OWN)
    path = transformer / WEIGHTS
    if not isinstance(own, dict) or not {*encoder} <= {*own} or not path.is_file():
        return {}
    try:
        with safe_open(path, "numpy") as file:
            names = {name.removeprefix("bert.") for name in file.keys()}
    except (SafetensorError, OSError) as fault:
        raise UserError(f"{path}: cannot be read ({' '.join(str(fault).split())[:200]}); fetch it again") from None
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


def _add_dense(encoder: dict[str, Any], folder: Path, before: list[str]) -> Module:
    """Take a Dense into the section: BERT's tanh layer behind [CLS], or the projection."""
    path = folder / SETTINGS
    settings = read_settings(path, needed=True)
    activation = str(settings.get("activation_function", TANH))
    name = activation.rpartition(".")[2]
    if settings.get("use_residual") or settings.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        _refuse(path, "is no plain layer (use_residual, module_input_name); choose another model")
    square = settings.get("in_features") == settings.get("out_features")
    if name == "Tanh" and square and encoder["pooling"] == "cls" and not before:
        encoder["pooling"] = "pooler"
        return Module("pooler", folder)
    if name != "Identity" or "projection" in before:
        what = "a second Dense" if "projection" in before else f"a Dense with {activation}"
        _refuse(path, f"is {what}; one is read with Identity, and before it one with Tanh as BERT's own behind [CLS]")
    encoder["projection"] = _one(path, settings, "out_features", int)
    return Module("projection", folder)


def _prompts(path: Path, encoder: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The templates of queries and passages, with the names of the prompts that neither takes.

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
    prompts = _one(path, settings, "prompts", dict) or {}
    if not all(text is None or isinstance(text, str) for text in prompts.values()):
        _refuse(path, "has prompts that are no text; fetch it again")
    default = _one(path, settings, "default_prompt_name", str)
    texts, taken = [], set()
    for names in (QUERY_PROMPTS, PASSAGE_PROMPTS):
        name = next((name for name in (*names, default) if prompts.get(name)), None)
        if any(key in prompts and not prompts[key] for key in names):  # said to be empty
            name = next((key for key in names if prompts.get(key)), None)
        taken.add(name)
        texts.append(prompts[name] if name else "")
    unused = tuple(name for name, text in prompts.items() if text and name not in taken)
    query = from_prompt(texts[0], "{text}") if texts[0] else ""
    return normalization | {"query_prompt": query, "passage_prompt": from_prompt(texts[1], TITLED)}, unused


def _entries(path: Path) -> list[dict[str, Any]]:
    entries = read_fetched_json(path)
    if not isinstance(entries, list) or not all(map(_is_module, entries)):
        _refuse(path, "is no list of modules; fetch it again")
    return entries


def _is_module(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("path"), str)


def _one(path: Path, settings: dict[str, Any], key: str, kind: type[Kind]) -> Kind | None:
    """A value of a file of settings; None where it does not say. Raises UserError for one of another kind."""
    value = settings.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        _refuse(path, f"has {key}={json.dumps(value)[:50]}, which is no {NAMES[kind]}; fetch it again")
    return value


def _refuse(path: Path, what: str) -> None:
    raise UserError(f"{path}: {what}")
