"""The run folder's record of its config and data: compared at every start, and what opens the run again."""

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from realm_jax.assemble import make_run
from realm_jax.config import Config, task_names, training_keys, validate, with_defaults, with_values
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.processes import is_process_0
from realm_jax.run import Run
from realm_jax.storage import Folder, open_folder, read_json, write_json_atomic
from realm_jax.train.checkpoints import SavedCheckpoint

START = "start.json"  # what is known of where a run began
# Keys that may name a file or a folder.
PLACES = ("data.path", "init_from", "reader_from", "refresh.shared")
_ELSEWHERE = re.compile(r"[a-z0-9]+:")  # begins what lies in no folder: gs://, hf:, py:, tfds:


def has_checkpoint(config: Config, workdir: Path) -> bool:
    """Whether a run has parameters of its own saved."""
    return SavedCheckpoint.newest(workdir / task_names(config)[0] / "checkpoints") is not None


def begins_with_reader(workdir: Path) -> bool:
    """Whether the run in a folder began with a reader that was trained with questions."""
    path = workdir / START
    return path.is_file() and bool(read_json(path)["reader"])


def check_workdir(run: Run) -> None:
    """Record config and data in the run folder, or compare them with what is recorded there.

    Raises UserError when a training key or the data differ; another value of a runtime key is recorded. Paths are
    recorded absolute.
    """
    path = run.workdir / "config.json"
    if path.is_file():
        _check_training_keys(run, path)
        check_data(run)
    if is_process_0():
        run.workdir.mkdir(parents=True, exist_ok=True)
        write_json_atomic(run.workdir / "data.json", run.sources.fingerprints())
        write_json_atomic(path, with_absolute_paths(run.config.to_dict()))


def with_absolute_paths(config: dict[str, Any]) -> dict[str, Any]:
    """A config with what it names on this machine as absolute paths, so that a run can be opened from any folder.

    URLs stay as they are, and names such as `hf:…`; a folder that is yet to be made does not.
    """
    found: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for key in PLACES:
        section, _, name = key.rpartition(".")
        holder = found.get(section, {}) if section else found
        value: str = holder.get(name, "")
        if value and (os.path.exists(value) or not _ELSEWHERE.match(value)):
            holder[name] = os.path.abspath(value)
    return found


def _check_training_keys(run: Run, path: Path) -> None:
    recorded = training_keys(with_defaults(read_json(path)))
    now = training_keys(run.config)
    for key in sorted(now):  # what else is recorded belongs to another task or backend, which these keys name
        if recorded.get(key) != now.get(key):
            raise UserError(
                f"config.{key} is {now.get(key)!r}, but the run in {run.workdir} has {recorded.get(key)!r}; "
                "set it back, or start in another --workdir"
            )


def check_data(run: Run, versions: Collection[str] = (), questions: bool = True) -> None:
    """Raise UserError when the data are not those that the run folder's `data.json` records, if it does.

    versions: fingerprints of passages that will do, too. questions: whether the run has read any, to be compared.
    """
    path = run.workdir / "data.json"
    recorded = read_json(path) if path.is_file() else {}
    now = run.sources.fingerprints()
    for name in sorted({*recorded, *now} if recorded else ()):
        if name in ("passages", "pretraining") and recorded.get(name) in versions:
            continue
        if name == "questions" and not questions:
            continue
        if recorded.get(name) != now.get(name):
            found = f"other {name} than {path} records"
            if name not in now:
                found = f"no {name}, which {path} records"
            if name not in recorded:
                found = f"{name}, which {path} does not record"
            raise UserError(
                f"{run.config.data.path}: not the data of the run: {found}; "
                "name the folder that it was trained with, or start in another --workdir"
            )


def recorded_config(workdir: Path, name: str = "--workdir") -> Config:
    """The config that a run recorded in its folder. `name`: of the flag or key that names the folder."""
    if not (workdir / "config.json").is_file():
        raise UserError(f"{name}={workdir}: no run there (no config.json); train one with `realm train`")
    config: Any = read_json(workdir / "config.json")
    if not isinstance(config, dict) or not {"tasks", "data", "model"} <= {*config}:
        raise UserError(f"{name}={workdir}: config.json there is not the config of a run of `realm train`")
    return with_defaults(config, f"{name}={workdir}")


def load_run(workdir: Path, overrides: dict[str, Any] | None = None, questions: bool = True) -> Run:
    """The run recorded in a folder, with runtime keys changed by `overrides` (dotted keys).

    questions: whether those of its prepared folder are read.
    """
    config = validate(with_values(recorded_config(workdir), overrides or {}))
    sources = open_sources(config.data.path, questions=questions)
    return make_run(config, workdir, sources)


def recorded_corpus(workdir: Path) -> str | None:
    """The version of the corpus that the run began with, if it has begun: it stays with it whatever is edited."""
    path = workdir / "data.json"
    return read_json(path).get("passages") if path.is_file() else None


def recorded_folder(workdir: Path) -> Folder:
    """The shared folder of the run that is recorded in `workdir`."""
    config = validate(recorded_config(workdir))
    return open_folder(config.refresh.shared or workdir)
