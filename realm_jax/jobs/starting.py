"""Weights of other programs that a fresh run starts from (`config.init_from`): a folder, or a model of a hub.

    FOLDER/model.safetensors            one BERT, for every network; with its heads, where it has them
    FOLDER/<network>/model.safetensors  one for each network, as `realm weights` writes them (`embedder`: both towers)
    hf:NAME, hf:NAME@REVISION           a repository of the Hugging Face hub
    py:NAME                             an installed Python package that carries a model in its folder `model`

Each may be a folder of sentence-transformers (`modules.json`), whose projection is then taken as well.

What a file does not have stays as it was: fresh. A run folder as source is `opening.py`'s. Read next:
`realm_jax/models/weights.py` for the files.
"""

import importlib.util
import logging
from collections.abc import Collection
from functools import cache
from pathlib import Path

import jax

from realm_jax.errors import UserError
from realm_jax.mesh import put_whole
from realm_jax.models.realm import Params, Realm
from realm_jax.models.sentence_folder import (
    INPUT,
    MODULES,
    PROMPTS,
    READS,
    SETTINGS,
    SentenceModel,
    is_sentence_model,
    read_sentence_model,
    transformer_folder,
)
from realm_jax.models.weights import WEIGHTS, Part, Source, find, module_places, networks, read, with_modules
from realm_jax.run import Run
from realm_jax.storage import read_settings
from realm_jax.text.tokenizer import TOKENIZER_CONFIG, TOKENIZER_FILE, Tokenizer
from realm_jax.text.tokenizer_files import lower_case_of, read_tokenizer, tokenizer_file
from realm_jax.text.wordpiece import VOCABULARY_FILE

logger = logging.getLogger(__name__)

HUB, PACKAGE, IN_PACKAGE = "hf:", "py:", "model"
ENCODER_FILES = (WEIGHTS, "config.json", VOCABULARY_FILE, TOKENIZER_CONFIG, TOKENIZER_FILE, INPUT)
FETCHED = (
    *ENCODER_FILES,
    MODULES,
    PROMPTS,
    *(f"[0-9]*_*/{name}" for name in ENCODER_FILES),
)
SHARED, TOWERS, READER = "embedder", ("query_embedder", "document_embedder"), "reader"


def local_source(name: str, flag: str = "config.init_from") -> Path:
    """The folder that `config.init_from`, or another flag, names. A model of the hub is fetched, or found in its cache.

    Raises UserError where the hub cannot be asked, or has no such model, and for a package that is not installed.
    """
    if name.startswith(PACKAGE):
        return _package_folder(name, flag)
    if not name.startswith(HUB):
        return Path(name)
    return _fetched(name, flag)


@cache
def _fetched(name: str, flag: str) -> Path:
    """The folder of a model of the hub, which is asked once: what a run starts from does not change on the way."""
    try:
        import huggingface_hub  # here, since it is optional
    except ImportError:
        raise UserError(
            f"{flag}={name}: needs Hugging Face's hub; run `pip install '.[huggingface]'`, or name a folder"
        ) from None
    repository, _, revision = name.removeprefix(HUB).partition("@")
    try:
        return Path(
            huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=list(FETCHED))
        )
    except Exception as fault:  # of its own kinds, and of the libraries that it speaks to the network with
        reason = " ".join(str(fault).split())[:200]
        raise UserError(
            f"{flag}={name}: cannot be fetched ({type(fault).__name__}: {reason}); "
            "check the name and the network, or fetch the model elsewhere and name its folder"
        ) from None


def _package_folder(name: str, flag: str) -> Path:
    """The model in an installed package, which is found and not run."""
    package = name.removeprefix(PACKAGE).replace("-", "_")
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = [Path(place) / IN_PACKAGE for place in (found.submodule_search_locations or [] if found else [])]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        what = "has no folder `model`" if found else "is not installed"
        raise UserError(
            f"{flag}={name}: the package {package} {what}; run `pip install {package.replace('_', '-')}`, or "
            "name a folder"
        )
    return folder


def is_model(folder: Path) -> bool:
    """Whether a folder holds the weights of one network."""
    return (folder / WEIGHTS).is_file() or is_sentence_model(folder)


def sentence_model(folder: Path) -> SentenceModel | None:
    """What a folder of sentence-transformers describes; None for a plain BERT. Raises UserError."""
    return read_sentence_model(folder) if is_sentence_model(folder) else None


def is_weights(folder: Path) -> bool:
    """Whether a folder holds weights, of one network or of several; a run folder does not."""
    return any(is_model(folder / name) for name in ("", SHARED, *TOWERS, READER))


def tokenizer_folder(folder: Path) -> Path:
    """Where the tokenizer of a model lies: beside the weights of the first of its networks, which all have the same."""
    found = (folder / name for name in ("", SHARED, *TOWERS, READER) if is_model(folder / name))
    return transformer_folder(next(found, folder))


def find_weights(
    folder: Path, model: Realm, wordpiece: Tokenizer, names: Collection[str] | None = None
) -> dict[str, Source]:
    """Network → the file for it; no entry for one that the folder has nothing for. Reads no parameters.

    names: of the networks that are asked for; None for all. Raises UserError where a file does not fit the network or
    the vocabulary, naming both.
    """
    found = {}
    for network, parts in networks(model).items():
        place = _place(folder, network) if names is None or network in names else None
        if place is not None:
            found[network] = _source(place, model, network, parts)
            _check_vocabulary(transformer_folder(place), wordpiece)
    return found


def has_trained_reader(folder: Path, model: Realm) -> bool:
    """Whether the weights in a folder have the span head of a reader that was trained with questions, as every released
    one was. Raises UserError for weights that do not fit."""
    place = _place(folder, READER)
    if place is None or "span head" not in _source(place, model, READER, networks(model)[READER]).found:
        return False
    return bool(read_settings(transformer_folder(place) / SETTINGS).get(READS, True))


def _source(place: Path, model: Realm, network: str, parts: tuple[Part, ...]) -> Source:
    """The files of one network in a folder: of a tower also the modules of sentence-transformers, which count where a
    file has the same part once more, as a BERT has its pooler."""
    sentence = sentence_model(place)
    if sentence is None:
        return find(place, model.bert, parts)
    if network == READER:
        return find(sentence.transformer, model.bert, parts)
    width = sentence.encoder["projection"]
    if width not in (0, model.projection):
        raise UserError(
            f"{place}: has a projection of {width} features, but config.encoder.projection is {model.projection}; set "
            "it to -1"
        )
    elsewhere = [part for part in parts if module_places(part, sentence)]
    source = find(sentence.transformer, model.bert, [part for part in parts if part not in elsewhere])
    for part in elsewhere:
        source = with_modules(source, part, sentence)
    return source


def place_of(folder: Path, tower: int) -> Path | None:
    """Where the query tower (0) or the document tower (1) lies; None where there is none."""
    return next((folder / name for name in ("", TOWERS[tower], SHARED) if is_model(folder / name)), None)


def _place(folder: Path, network: str) -> Path | None:
    """Where a network's file lies; None where there is none for it."""
    if is_model(folder):
        return folder
    names = [network, SHARED] if network in TOWERS else [network]
    place = next((folder / name for name in names if is_model(folder / name)), None)
    if place is None and network == SHARED and any(is_model(folder / name) for name in TOWERS):
        raise UserError(f"config.init_from: {folder} has two towers; set config.model.shared_tower=False")
    return place


def _check_vocabulary(folder: Path, wordpiece: Tokenizer) -> None:
    """Raise UserError where the vocabulary beside the weights is not that of the prepared data. Nothing to compare
    without its files."""
    advice = f"prepare the data with `realm prepare --vocab={folder}`, or name other weights"
    path, said = tokenizer_file(folder), lower_case_of(folder)
    if path is not None and read_tokenizer(path, wordpiece.lower_case).fingerprint != wordpiece.fingerprint:
        raise UserError(f"{path}: not the tokens of the prepared data; {advice}")
    if said is not None and said.value != wordpiece.lower_case:
        prepared = f"the data were prepared with {wordpiece.lower_case}"
        raise UserError(f"{said.path}: do_lower_case is {said.value}, but {prepared}; {advice}")
    if read_settings(folder / INPUT).get("do_lower_case") and not wordpiece.lower_case:
        raise UserError(
            f"{folder / INPUT}: do_lower_case is true with a tokenizer that keeps capitals; name other weights"
        )


def with_weights(run: Run, params: Params, folder: Path, key: str = "init_from") -> Params:
    """Some networks' parameters, those that the folder has in place of fresh ones. Raises UserError where they do not
    fit. key: that names the folder."""
    found = find_weights(folder, run.model, run.sources.wordpiece, list(params))
    names, params = [name for name in networks(run.model) if name in params], dict(params)
    for network, source in found.items():
        theirs = read(source)
        places = {key: run.param_shardings[network][key] for key in theirs}
        params[network] = params[network] | jax.tree.map(put_whole, theirs, places)
    logger.info("config.%s=%s: %s", key, run.config[key] or folder, describe(found, names))
    return params


def describe(found: dict[str, Source], names: list[str]) -> str:
    """What every network starts with, in one line."""
    told = []
    for network in names:
        source = found.get(network)
        parts = ", ".join(source.found) if source else "nothing"
        fresh = f"; fresh: {', '.join(source.missing)}" if source and source.missing else ""
        told.append(f"{network}: {parts}{fresh}")
    return " | ".join(told)
