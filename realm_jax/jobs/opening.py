"""Open a run: its config checked, its folder compared, its data, mesh and networks built."""

import os
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from realm_jax.config import validate
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.run import Run, make_run
from realm_jax.storage import read_json
from realm_jax.training.loop import check_workdir


def set_up_jax() -> None:
    """A persistent compilation cache, unless JAX_COMPILATION_CACHE_DIR names one already."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "realm_jax" / "jax"))


def open_run(config: ConfigDict, workdir: Path) -> Run:
    """A validated run over its prepared folder; its config is recorded in `workdir`, or compared with the one there."""
    validate(config)
    run = make_run(config, workdir, open_sources(config.data.path))
    check_workdir(run)
    return run


def reopen_run(workdir: Path, overrides: dict[str, Any] | None = None) -> Run:
    """The run recorded in a folder, with operations keys changed by `overrides` (dotted keys)."""
    if not (workdir / "config.json").is_file():
        raise UserError(f"--workdir={workdir}: no run there (no config.json); train one with `realm train`")
    config = ConfigDict(read_json(workdir / "config.json"))
    config.update_from_flattened_dict(overrides or {})
    validate(config)
    return make_run(config, workdir, open_sources(config.data.path))
