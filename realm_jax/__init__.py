"""Search documents, and train and adapt retrieval models without labels, in JAX.

The public names are loaded when you first use them, so importing the package does not import JAX:

    index          make documents searchable with a pretrained encoder, without training
    adapt          train the encoder of an index on its documents, without labels
    Model          open an index or a trained run: ask, search, encode, inspect, evaluate
    load_config    return a built-in config, or that of a file, with changes
    prepare        convert documents and questions to a folder to train from
    train_model    train a recipe, or resume it
    Progress       training record that a callback of train_model receives
    Resumable      error of interrupted work: the same call again resumes it
    UserError      error that the caller can correct, with a message of one line

Start reading at `realm_jax/cli/quickstart.py` (the whole recipe) and `realm_jax/train/loop.py` (the train loop).
"""

import importlib
from typing import TYPE_CHECKING, Any

from realm_jax.errors import UserError
from realm_jax.version import __version__

if TYPE_CHECKING:
    from realm_jax.api import Model, Progress, Resumable, adapt, index, load_config, prepare, train_model

__all__ = [
    "Model",
    "Progress",
    "Resumable",
    "UserError",
    "__version__",
    "adapt",
    "index",
    "load_config",
    "prepare",
    "train_model",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("realm_jax.api"), name)
    raise AttributeError(f"module 'realm_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
