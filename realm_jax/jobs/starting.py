"""Weights of other programs that a fresh run starts from (`config.init_from`): a folder, or a model of a hub.

    FOLDER/model.safetensors            one BERT, for every network; with its heads, where it has them
    FOLDER/<network>/model.safetensors  one for each network, as `realm weights` writes them (`embedder`: both towers)
    hf:NAME, hf:NAME@REVISION           a repository of the Hugging Face hub

What a file does not have stays as it was: fresh. A run folder as source is `opening.py`'s. Read next:
`realm_jax/models/weights.py` for the files.
"""

import logging
from pathlib import Path

import jax

from realm_jax.errors import UserError
from realm_jax.mesh import put_whole
from realm_jax.models.realm import Params, Realm
from realm_jax.models.weights import WEIGHTS, Source, find, networks, read
from realm_jax.run import Run
from realm_jax.storage import read_json
from realm_jax.text.wordpiece import VOCABULARY_FILE, WordPiece

logger = logging.getLogger(__name__)

HUB = "hf:"
TOKENIZER = "tokenizer_config.json"  # Hugging Face's; says whether text is put in lower case
FETCHED = (WEIGHTS, "config.json", VOCABULARY_FILE, TOKENIZER)
SHARED, TOWERS = "embedder", ("query_embedder", "document_embedder")


def local_source(name: str) -> Path:
    """The folder that `config.init_from` names; a model of the hub is fetched first, or found in the hub's cache.

    Raises UserError where the hub cannot be asked, or has no such model.
    """
    if not name.startswith(HUB):
        return Path(name)
    try:
        import huggingface_hub  # here, since it is optional
    except ImportError:
        raise UserError(
            f"config.init_from={name}: needs Hugging Face's hub; run `pip install '.[huggingface]'`, or name a folder"
        ) from None
    repository, _, revision = name.removeprefix(HUB).partition("@")
    try:
        return Path(
            huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=list(FETCHED))
        )
    except Exception as fault:  # of its own kinds, and of the libraries that it speaks to the network with
        reason = " ".join(str(fault).split())[:200]
        raise UserError(
            f"config.init_from={name}: cannot be fetched ({type(fault).__name__}: {reason}); "
            "check the name and the network, or fetch the model elsewhere and name its folder"
        ) from None


def is_weights(folder: Path) -> bool:
    """Whether a folder holds weights, of one network or of several; a run folder does not."""
    return any((folder / name / WEIGHTS).is_file() for name in ("", SHARED, *TOWERS, "reader"))


def find_weights(folder: Path, model: Realm, wordpiece: WordPiece) -> dict[str, Source]:
    """Network → the file for it; no entry for one that the folder has nothing for. Reads no parameters.

    Raises UserError where a file does not fit the network or the vocabulary, naming both.
    """
    found = {}
    for network, parts in networks(model).items():
        place = _place(folder, network)
        if place is not None:
            found[network] = find(place, model.bert, parts)
            _check_vocabulary(place, wordpiece)
    return found


def has_span_head(folder: Path, model: Realm) -> bool:
    """Whether the weights in a folder have the reader's span head. Raises UserError for weights that do not fit."""
    place = _place(folder, "reader")
    return place is not None and "span head" in find(place, model.bert, networks(model)["reader"]).found


def _place(folder: Path, network: str) -> Path | None:
    """Where a network's file lies; None where there is none for it."""
    if (folder / WEIGHTS).is_file():
        return folder
    names = [network, SHARED] if network in TOWERS else [network]
    place = next((folder / name for name in names if (folder / name / WEIGHTS).is_file()), None)
    if place is None and network == SHARED and any((folder / name / WEIGHTS).is_file() for name in TOWERS):
        raise UserError(f"config.init_from: {folder} has two towers; set config.model.shared_tower=False")
    return place


def _check_vocabulary(folder: Path, wordpiece: WordPiece) -> None:
    """Raise UserError where the vocabulary beside the weights is not that of the prepared data. Nothing to compare
    without its files."""
    advice = "prepare the data with `realm prepare --vocab` and the vocab.txt of the weights, or name other weights"
    path = folder / VOCABULARY_FILE
    if path.is_file() and WordPiece.from_vocab(path, wordpiece.lower_case).fingerprint != wordpiece.fingerprint:
        raise UserError(f"{path}: not the word pieces of the prepared data; {advice}")
    settings = read_json(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else {}
    lower_case = settings.get("do_lower_case") if isinstance(settings, dict) else None
    if lower_case not in (None, wordpiece.lower_case):
        raise UserError(
            f"{folder / TOKENIZER}: do_lower_case is {lower_case}, but the data were prepared with "
            f"{wordpiece.lower_case}; {advice}"
        )


def with_weights(run: Run, params: Params, folder: Path) -> Params:
    """Parameters of a run, those that the folder has in place of fresh ones. Raises UserError where they do not fit."""
    found = find_weights(folder, run.model, run.sources.wordpiece)
    params = dict(params)
    for network, source in found.items():
        theirs = read(source)
        places = {key: run.param_shardings[network][key] for key in theirs}
        params[network] = params[network] | jax.tree.map(put_whole, theirs, places)
    logger.info("config.init_from=%s: %s", run.config.init_from, describe(found, list(networks(run.model))))
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
