"""Controls: trainings that should not reach what REALM reaches, from the same start and of the same length.

* `no_retriever_gradient`: the REALM task with the retriever held still, so that its gradient changes nothing.
* `more_ict`: as many more steps of the inverse cloze task as REALM has.
* `closed_book`: a reader of the same size that fills in answers from the question alone; a task like any other.
"""

from typing import Any

from realm_jax.config import task_names
from realm_jax.evaluation.predict import Evaluator
from realm_jax.index.candidates import Index
from realm_jax.jobs.init_from import BORROWING, borrow_params
from realm_jax.jobs.measuring import closed_book_measure
from realm_jax.models.realm import Params
from realm_jax.run import Run
from realm_jax.training.checkpoints import Saved
from realm_jax.training.loop import train_task
from realm_jax.training.restore import restore_params


def run_controls(run: Run, evaluator: Evaluator) -> None:
    """All controls that the recipe allows, each in its own folder of the run, resumable like any task."""

    def measure(params: Params, index: Index | None, final: bool) -> dict[str, Any]:
        return {} if index is None else evaluator.recall(params, index)

    names = task_names(run.config)
    start = run.initial_params()
    begun = Saved.newest_of_first(run.workdir / "closed_book" / "checkpoints") is not None
    if any(run.config[key] for key in BORROWING) and not begun:  # afterwards its source may go
        start = borrow_params(run, start)
    if "realm" in names and "ict" in names:
        never = _with(run, objective={"retriever_start": run.config.realm.steps})
        longer = _with(run, ict={"steps": run.config.realm.steps}, seed=run.config.seed + 1)
        for control, name, folder in ((never, "realm", "no_retriever_gradient"), (longer, "ict", "more_ict")):
            before_realm = restore_params(run, "ict")
            train_task(control, name, before_realm, measure, folder)
    if "qa" in names and "closed_book" not in names:
        train_task(run, "closed_book", start, closed_book_measure(run))


def _with(run: Run, seed: int | None = None, **sections: dict[str, Any]) -> Run:
    """The run with some keys of its config changed."""
    config = type(run.config)(run.config.to_dict())
    for section, values in sections.items():
        config[section].update(values)
    if seed is not None:
        config.seed = seed
    return run.with_config(config)
