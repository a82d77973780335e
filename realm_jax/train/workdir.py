"""Record config and data in the run directory, compare them at every start, and open the run from them."""

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from realm_jax.assemble import make_run
from realm_jax.config import Config, task_names, training_keys, with_defaults, with_values
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.mirror import url_of
from realm_jax.processes import is_process_0
from realm_jax.run import Run
from realm_jax.storage import Folder, open_folder, read_json, write_json_atomic
from realm_jax.train.checkpoints import SavedCheckpoint

START = "start.json"  # facts about the starting parameters
# Keys that may name a file or a folder.
PATH_KEYS = ("data.path", "init_from", "reader_from", "refresh.shared", "answering.reader")
# Keys, and sections with a dot, that a recipe must keep as the index has them.
_MODEL_KEYS = "architecture layers width heads feed_forward hidden_act norm_epsilon dtype shared_tower rotary."
INDEX_KEYS = (
    *("data.query_length", "data.document_length", "encoder.", "retrieval."),
    *(f"model.{name}" for name in _MODEL_KEYS.split()),
)
_SCHEME = re.compile(r"[a-z0-9]+:")  # begins a value that is no path: gs://, hf:, py:, tfds:


def has_checkpoint(config: Config, workdir: Path) -> bool:
    """Return True if the first task of a run has a checkpoint.

    Args:
        config: has the recipe, which may be empty.
        workdir: the run directory.
    """
    first = task_names(config)[:1]
    return any(SavedCheckpoint.newest(workdir / task / "checkpoints") is not None for task in first)


def begins_with_reader(workdir: Path) -> bool:
    """Return True if a run started from a reader that was trained with questions."""
    path = workdir / START
    return path.is_file() and bool(read_json(path)["reader"])


def check_workdir(run: Run) -> None:
    """Compare config and data with the record in the run directory, then record them, with absolute paths.

    Raises:
        UserError: a training key or the data differ; runtime keys may.
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
    """Return a config with absolute paths, so that a run can be opened from any current directory.

    URLs and names such as `hf:…` stay; a path need not exist yet.
    """
    absolute: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for key in PATH_KEYS:
        section, _, name = key.rpartition(".")
        holder = absolute.get(section, {}) if section else absolute
        if value := holder.get(name, ""):
            holder[name] = absolute_path(value)
    return absolute


def absolute_path(name: str) -> str:
    """Return an absolute path; a URL or a name such as `hf:…` stays. A path need not exist yet."""
    return os.path.abspath(name) if os.path.exists(name) or not _SCHEME.match(name) else name


def _check_training_keys(run: Run, path: Path) -> None:
    """Raise UserError if a training key differs from the config that `path` records.

    An index has trained nothing yet, so any recipe may follow that keeps the keys that determine its vectors and words.
    """
    recorded_config = with_defaults(read_json(path))
    recorded, current = training_keys(recorded_config), training_keys(run.config)
    if not task_names(recorded_config):
        current = {key: value for key, value in current.items() if key.startswith(INDEX_KEYS)}
    for key in sorted(current):  # other recorded keys belong to a task or backend that a differing key names
        if recorded.get(key) != current.get(key):
            raise UserError(
                f"config.{key} is {current.get(key)!r}, but the run in {url_of(run.workdir)} has "
                f"{recorded.get(key)!r}; set it back, or start in another --workdir"
            )


def check_data(run: Run, versions: Collection[str] = (), questions: bool = True) -> None:
    """Compare the data with the record in the run directory, if there is one.

    Args:
        run: has the data.
        versions: other fingerprints of passages that may be recorded.
        questions: false to skip the questions, because the run has not read them.

    Raises:
        UserError: the data differ.
    """
    path = run.workdir / "data.json"
    recorded = read_json(path) if path.is_file() else {}
    current = run.sources.fingerprints()
    for name in sorted({*recorded, *current} if recorded else ()):
        if name in ("passages", "pretraining") and recorded.get(name) in versions:
            continue
        if name == "questions" and not questions:
            continue
        if recorded.get(name) != current.get(name):
            difference = f"other {name} than {path} records"
            if name not in current:
                difference = f"no {name}, which {path} records"
            if name not in recorded:
                difference = f"{name}, which {path} does not record"
            raise UserError(
                f"{run.config.data.path}: not the data of the run: {difference}; "
                "name the folder that it was trained with, or start in another --workdir"
            )


def recorded_config(workdir: Path, name: str = "--workdir") -> Config:
    """Read the config that a run recorded.

    Args:
        workdir: the run directory.
        name: name of the flag or key that names it, for messages.

    Raises:
        UserError: there is no run, or its config.json is malformed.
    """
    if not (workdir / "config.json").is_file():
        advice = "make one with `realm index` or `realm train`"
        raise UserError(f"{name}={url_of(workdir)}: no run there (no config.json); {advice}")
    config: Any = read_json(workdir / "config.json")
    if not isinstance(config, dict) or not {"tasks", "data", "model"} <= {*config}:
        raise UserError(f"{name}={workdir}: config.json there is not the config of a run of `realm train`")
    return with_defaults(config, f"{name}={workdir}")


def load_run(workdir: Path, overrides: dict[str, Any] | None = None, questions: bool = True) -> Run:
    """Open a recorded run.

    Args:
        workdir: the run directory.
        overrides: dotted key → value of runtime keys to change.
        questions: false to leave out the questions of the prepared folder.

    Raises:
        UserError: there is no run, or its prepared folder is missing or damaged.
    """
    config = with_values(recorded_config(workdir), overrides or {})
    sources = open_sources(config.data.path, questions=questions)
    return make_run(config, workdir, sources)


def recorded_corpus(workdir: Path) -> str | None:
    """Return the fingerprint of the passages that a run started with and keeps after edits; None for a new run."""
    path = workdir / "data.json"
    return read_json(path).get("passages") if path.is_file() else None


def recorded_folder(workdir: Path) -> Folder:
    """Open the shared folder (`refresh.shared`) of a recorded run."""
    return open_folder(recorded_config(workdir).refresh.shared or url_of(workdir))
