"""Control runs: baselines from the same start and of the same length as REALM.

Which they are, each task says for itself (`Task.controls`): REALM with a frozen retriever, the same number of
additional steps of the inverse cloze task as REALM has, and a reader of the same size that answers from the question
alone.
"""

from collections.abc import Mapping
from typing import Any

from realm_jax.config import add_sections
from realm_jax.run import Run
from realm_jax.sections import task_names
from realm_jax.tasks import make_task
from realm_jax.train.checkpoints import SavedCheckpoint
from realm_jax.train.init_from import INIT_KEYS, init_from_sources
from realm_jax.train.loop import train_task
from realm_jax.train.restore import restore_params


def run_controls(run: Run) -> None:
    """All controls that the recipe allows, each in its own folder of the run, resumable like any task."""
    controls = [control for name in task_names(run.config) for control in make_task(name, run).controls()]
    start = run.initial_params()
    from_start = [control.folder for control in controls if not control.start]
    begun = any(SavedCheckpoint.newest_on_process_0(run.workdir / folder / "checkpoints") for folder in from_start)
    if any(run.config[key] for key in INIT_KEYS) and not begun:  # afterwards its source may go
        start = init_from_sources(run, start)
    for control in controls:
        changed = _with(run, control.keys, control.task)
        params = restore_params(run, control.start) if control.start else start
        folder = None if control.folder == control.task else control.folder
        train_task(changed, control.task, params, make_task(control.task, changed).measure(), folder)


def _with(run: Run, keys: Mapping[str, Any], task: str) -> Run:
    """The run with some keys of its config changed, and the section of a task."""
    config = type(run.config)(run.config.to_dict())
    config.update_from_flattened_dict(keys)
    add_sections(config, [task])
    return run.with_config(config)
