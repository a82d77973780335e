"""The Python API: the public names of `realm_jax`.

    import realm_jax

    realm_jax.prepare("docs/", "data")
    config = realm_jax.load_config("real_text", {"data.path": "data", "init_from": "hf:NAME"})
    realm_jax.train_model(config, "runs/docs")
    model = realm_jax.Model("runs/docs")
    model.ask("Who built the bridge?")["answer"]

Names here and the keys of their results follow semantic versioning; all other modules may change.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

import realm_jax.config as configs
from realm_jax.cache import cache_programs
from realm_jax.cli.prepare import Options, Path_
from realm_jax.cli.prepare import prepare as prepare_folder
from realm_jax.errors import Resumable, UserError
from realm_jax.inference.model import Model
from realm_jax.storage import read_json
from realm_jax.train.metrics import Progress, listening
from realm_jax.train.recipe import open_run, run_recipe

__all__ = ["Model", "Progress", "Resumable", "UserError", "load_config", "prepare", "train_model"]


def load_config(name: str | os.PathLike[str] | None = None, changes: Mapping[str, Any] | None = None) -> ConfigDict:
    """Return a config.

    Args:
        name: name of a built-in config ('quickstart', 'real_text', 'real_text:argument', …), or path of a Python file
            with get_config(); None for the paper's sizes.
        changes: {"section.key": value}.

    Raises:
        UserError: there is no such config or key, or a value does not have the key's type.
    """
    overrides = [f"--config.{key}={value}" for key, value in (changes or {}).items()]
    return configs.load_config(None if name is None else os.fspath(name), overrides)


def prepare(passages: Path_, output: Path_, **options: Any) -> None:
    """Write a prepared folder of texts, and of questions about them, and print a summary.

    Several processes prepare all but a few texts, and each imports the script that calls this. So put the script's code
    under `if __name__ == "__main__":`, as always with multiprocessing, or set workers=1. A notebook needs neither.

    Args:
        passages: file, pattern or folder of the texts to retrieve from.
        output: the folder to write. If the same inputs and settings made it before, nothing is done.
        **options: the flags of `realm prepare` with underscores, such as vocab="hf:NAME" and
            questions=["train=nq-train.json", "dev=nq-dev.json"].

    Raises:
        UserError: the inputs have errors, or `output` was made otherwise.
    """
    if isinstance(options.get("questions"), str | os.PathLike):
        raise UserError("questions: takes a list of files; put the file into a list")
    if unknown := sorted({*options} - {*Options.__dataclass_fields__}):
        raise UserError(f"prepare has no option {unknown[0]}; `realm prepare --help` lists them")
    prepare_folder(passages, output, **options)


def train_model(
    config: ConfigDict,
    workdir: str | os.PathLike[str],
    *,
    callback: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Run the recipe of a config, or resume it.

    Args:
        config: from `load_config`.
        workdir: run directory, created or resumed.
        callback: called with each recorded `Progress`: metrics of logged steps, and evaluations. An exception
            in it ends training; the same call then continues from the last save.

    Returns:
        The content of results.json; {} if the data have no questions to measure.

    Raises:
        UserError: config and data do not fit together.
        Resumable: after SIGTERM, once the state is saved.
    """
    cache_programs()
    command = f"realm_jax.train_model(config, {os.fspath(workdir)!r})"
    with listening(callback):
        code = run_recipe(open_run(config, Path(workdir)), command)
    if code:
        raise Resumable(f"{workdir}: SIGTERM; the state is saved, call train_model again to resume")
    results = Path(workdir) / "results.json"
    return dict(read_json(results)) if results.is_file() else {}
