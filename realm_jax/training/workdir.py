"""What a run folder was made for: config and data are recorded there, and compared at every start."""

import dataclasses
import hashlib
import json
from pathlib import Path

from realm_jax.config import completed, science
from realm_jax.errors import UserError
from realm_jax.processes import is_first
from realm_jax.run import Run
from realm_jax.storage import read_json, write_json_atomic


def check_workdir(run: Run) -> None:
    """Record config and data in the run folder, or compare them with what is recorded there.

    Raises UserError when a science key or the data differ; another value of an operations key is recorded.
    """
    path = run.workdir / "config.json"
    if path.is_file():
        _check_science(run, path)
        check_data(run)
    if is_first():
        run.workdir.mkdir(parents=True, exist_ok=True)
        write_json_atomic(run.workdir / "data.json", _fingerprints(run))
        write_json_atomic(path, run.config.to_dict())


def _check_science(run: Run, path: Path) -> None:
    recorded = science(completed(read_json(path)))
    now = science(run.config)
    for key in sorted({*recorded, *now}):
        if recorded.get(key) != now.get(key):
            raise UserError(
                f"config.{key} is {now.get(key)!r}, but the run in {run.workdir} has {recorded.get(key)!r}; "
                "set it back, or start in another --workdir"
            )


def check_data(run: Run, edited: bool = False) -> None:
    """Raise UserError when tokenizer, stores or questions are not those that the run folder's `data.json` records, if
    it does. edited: a later version of the passages will do, too."""
    path = run.workdir / "data.json"
    recorded = read_json(path) if path.is_file() else {}
    for name, fingerprint in _fingerprints(run).items():
        if edited and name in ("passages", "pretraining") and recorded.get(name) in run.sources.passages.versions:
            continue
        if recorded.get(name, fingerprint) != fingerprint:
            raise UserError(
                f"{run.config.data.path}: not the data of the run: other {name} than {path} records; "
                "name the folder that it was trained with, or start in another --workdir"
            )


def _fingerprints(run: Run) -> dict[str, str]:
    sources = run.sources
    stores = {"passages": sources.passages.fingerprint, "pretraining": sources.pretraining.fingerprint}
    asked = {split: [dataclasses.asdict(one) for one in questions] for split, questions in sources.questions.items()}
    questions = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return {"tokenizer": sources.wordpiece.fingerprint} | stores | {"questions": questions}
