"""The Python API: what `realm_jax` makes public.

    import realm_jax

    realm_jax.prepare("docs/", "data")
    config = realm_jax.load_config("real_text", {"data.path": "data", "init_from": "hf:NAME"})
    realm_jax.train_model(config, "runs/docs")
    model = realm_jax.Model("runs/docs")
    model.ask("Who built the bridge?")["answer"]

Names here and the keys of what they return follow semantic versioning; all other modules may change.
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
    """A config: of a NAME that travels with the package ('quickstart', 'real_text', 'real_text:argument', …), or of a
    Python file with get_config(); None: the paper's sizes. changes: {"section.key": value}.

    Raises UserError for a config or a key that does not exist, and for a value that is not of the key's type.
    """
    overrides = [f"--config.{key}={value}" for key, value in (changes or {}).items()]
    return configs.load_config(None if name is None else os.fspath(name), overrides)


def prepare(passages: Path_, output: Path_, **options: Any) -> None:
    """Turn texts, and questions about them, into a folder to train from; prints a summary.

    passages: file, pattern or folder of the texts to retrieve from; output: folder to make, left as it is where it was
    made from the same inputs with the same settings. options: the flags of `realm prepare` with underscores, such as
    questions=["train=nq-train.json", "dev=nq-dev.json"] and vocab="hf:NAME". Raises UserError for faults in the inputs,
    and where `output` exists otherwise.

    More texts than a few are prepared by several processes, which import the script that calls this: put what it does
    under `if __name__ == "__main__":`, as always with multiprocessing, or give workers=1. A notebook needs neither.
    """
    if isinstance(options.get("questions"), str | os.PathLike):
        raise UserError("questions: takes a list of files; put the one into it")
    if unknown := sorted({*options} - {*Options.__dataclass_fields__}):
        raise UserError(f"prepare has no option {unknown[0]}; `realm prepare --help` lists them")
    prepare_folder(passages, output, **options)


def train_model(
    config: ConfigDict,
    workdir: str | os.PathLike[str],
    *,
    callback: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Run the recipe of a config in a folder, or resume it; returns the content of its results.json, {} where the data
    have no questions to measure.

    callback: called with each `Progress`, {task, kind, step, values}, as it is recorded: 'metrics' of logged steps, and
    'evaluations'; what it raises ends the training, and the same call goes on from the last save. Raises
    UserError for a config or data that do not fit, and `Resumable` after SIGTERM, once the state is saved.
    """
    cache_programs()
    command = f"realm_jax.train_model(config, {os.fspath(workdir)!r})"
    with listening(callback):
        code = run_recipe(open_run(config, Path(workdir)), command)
    if code:
        raise Resumable(f"{workdir}: SIGTERM; the state is saved, call train_model again to resume")
    results = Path(workdir) / "results.json"
    return dict(read_json(results)) if results.is_file() else {}
