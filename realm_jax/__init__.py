"""realm_jax: train language models that retrieve before they predict (REALM, Guu et al. 2020).

What is public is listed here, and loaded when it is first asked for, so that importing the package needs no JAX:

    index          documents made searchable with a public encoder, in minutes and without training
    adapt          the encoder of an index, trained on its documents without labels
    Model          an index or a trained run, opened: ask, search, encode, inspect, evaluate
    load_config    a config that travels with the package, or of a file, with changes
    prepare        texts and questions to a folder to train from
    train_model    a recipe, run or resumed
    Progress       a record of a run in training, as a callback of train_model gets it
    Resumable      a UserError of work that was interrupted, and goes on where it is asked for again
    UserError      what is raised for what the caller can correct, in one line

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
