"""Find and publish pretrained models, and find the folder of each network in them.

    FOLDER/model.safetensors            one encoder, for all networks, with or without heads; it may be cut into shards
    FOLDER/<network>/model.safetensors  one file for each network, as `realm weights` writes them (`embedder`: both
                                        encoders)
    hf:NAME, hf:NAME@REVISION           a repository of the Hugging Face hub
    py:NAME                             an installed Python package with a model in its folder `model`

Each may be a folder of sentence-transformers (`modules.json`). Read next: `weights.py` for the files.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from realm_jax.data.tokenizer import TOKENIZER_CONFIG, TOKENIZER_FILE
from realm_jax.data.wordpiece import VOCABULARY_FILE
from realm_jax.errors import UserError, install_extra
from realm_jax.models.sentence_transformers import (
    INPUT,
    MODULES,
    PROMPTS,
    ROUTER,
    is_sentence_model,
    transformer_folder,
)
from realm_jax.models.weights import SETTINGS, SHARDS, WEIGHTS, has_weights
from realm_jax.version import __version__

HUB, PACKAGE, IN_PACKAGE = "hf:", "py:", "model"
SHARED, TOWERS, READER = "embedder", ("query_embedder", "document_embedder"), "reader"
FILES = WEIGHTS, SHARDS, "model-*-of-*.safetensors", SETTINGS, VOCABULARY_FILE, TOKENIZER_CONFIG, TOKENIZER_FILE, INPUT
OF_MODULES = "[0-9]*_*", "*_[0-9]*_*", "0_Router/*_[0-9]*_*"  # folders of modules, and of those in a Router
OF_A_NETWORK = (
    *(MODULES, PROMPTS, ROUTER, f"0_Router/{ROUTER}", *FILES),
    *(f"{folder}/{name}" for folder in OF_MODULES for name in FILES),
)
FETCHED = *OF_A_NETWORK, *(f"{network}/{name}" for network in (SHARED, *TOWERS, READER) for name in OF_A_NETWORK)


def resolve_model_path(name: str, flag: str = "config.init_from") -> Path:
    """Return the folder of a model. A model on the hub is fetched, or found in the hub's cache.

    Args:
        name: value of `config.init_from`, or of another flag.
        flag: for messages.

    Raises:
        UserError: if the hub is out of reach or has no such model, or if the package is not installed.
    """
    if name.startswith(HUB):
        return _fetch(name, flag)
    if not name.startswith(PACKAGE):
        return Path(name)
    package = name.removeprefix(PACKAGE).replace("-", "_")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None  # does not run the package
    folders = [Path(folder) / IN_PACKAGE for folder in (spec.submodule_search_locations or [] if spec else [])]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        problem = "has no folder `model`" if spec else "is not installed"
        raise UserError(
            f"{flag}={name}: the package {package} {problem}; run `pip install {package.replace('_', '-')}`, or "
            "name a folder"
        )
    return folder


@cache
def _fetch(name: str, flag: str) -> Path:
    """Fetch a model of the hub into its cache, once per process, so that a run keeps one revision of it."""
    hub = _hub(f"{flag}={name}", ", or name a folder")
    repository, _, revision = name.removeprefix(HUB).partition("@")
    try:
        return Path(hub.snapshot_download(repository, revision=revision or None, allow_patterns=list(FETCHED)))
    except Exception as error:  # the hub's own, and those of the libraries that it uses
        raise UserError(
            f"{flag}={name}: cannot be fetched ({_reason(error)}); "
            "check the name and the network, or fetch the model elsewhere and name its folder"
        ) from None


def open_hub(feature: str) -> Any:
    """Return the hub's `HfApi` with the user's token.

    Args:
        feature: feature that needs it, for messages.

    Raises:
        UserError: if library or token is missing.
    """
    hub = _hub(feature)
    if not (token := hub.get_token()):
        raise UserError(f"{feature}: no token of the hub is known; run `hf auth login`, or set HF_TOKEN")
    return hub.HfApi(token=token, library_name="realm_jax", library_version=__version__)


def upload_model(hub: Any, folder: Path, name: str, private: bool, flag: str, excluded: Sequence[str] = ()) -> str:
    """Upload a folder to a repository of the hub, create it if needed, and return its address.

    Args:
        hub: module of `open_hub`.
        folder: to upload.
        name: name of the repository.
        private: make a new repository private, and require an existing one to be; otherwise the hub's default holds.
        flag: flag that names the repository.
        excluded: names of files in `folder` that stay on this machine.

    Raises:
        UserError: if the hub is out of reach or rejects the upload, or if the repository is public despite `private`.
    """
    try:
        url = hub.create_repo(name, private=private or None, exist_ok=True)
        fits = not private or hub.repo_info(url.repo_id).private
        if fits:
            hub.upload_folder(
                repo_id=url.repo_id,
                folder_path=folder,
                commit_message="Upload a model of realm_jax",
                ignore_patterns=[*excluded],
            )
    except Exception as error:  # see `_fetch`
        raise UserError(
            f"{flag}={name}: cannot be uploaded ({_reason(error, hub.token)}); "
            "check the name, the network, and that the token may write"
        ) from None
    if not fits:
        raise UserError(f"{flag}={name}: exists and is public; make it private there first, or name another")
    return str(url)


def _hub(feature: str, alternative: str = "") -> ModuleType:
    """Import the hub's library. Raises UserError, naming `feature` and the alternative to it, if it is missing."""
    try:
        import huggingface_hub  # here, since it is optional
    except ImportError:
        advice = f"{install_extra('huggingface')}{alternative}"
        raise UserError(f"{feature}: needs Hugging Face's hub; {advice}") from None
    return huggingface_hub


def _reason(error: Exception, token: str = "") -> str:
    """Return an error of the library as one line, without the token, even if the server's answer repeats it."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {(text.replace(token, '…') if token else text)[:200]}"


def is_model(folder: Path) -> bool:
    """Return True if a folder holds the weights of one network."""
    return has_weights(folder) or is_sentence_model(folder)


def model_folders(folder: Path) -> list[Path]:
    """List the folders of weights in a model: one for each network, or the folder itself; a run directory has none."""
    of_networks = [folder / name for name in (SHARED, *TOWERS, READER) if is_model(folder / name)]
    return of_networks or ([folder] if is_model(folder) else [])


def tokenizer_folder(folder: Path) -> Path:
    """Return the folder of a model's tokenizer: its first network's, because all networks have the same."""
    return transformer_folder(next(iter(model_folders(folder)), folder))


def network_folder(folder: Path, network: str) -> Path | None:
    """Find the folder of a network's weights in a model.

    Args:
        folder: folder of the model.
        network: its name.

    Returns:
        None if there are no weights for it.

    Raises:
        UserError: if the config has one encoder for both texts and the model has two.
    """
    if model_folders(folder) == [folder]:
        return folder
    names = [network, SHARED] if network in TOWERS else [network]
    weights = next((folder / name for name in names if is_model(folder / name)), None)
    if weights is None and network == SHARED and any(is_model(folder / name) for name in TOWERS):
        raise UserError(f"config.init_from: {folder} has two encoders; set config.model.shared_tower=False")
    return weights
