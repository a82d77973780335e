"""Every task by its name. A new one is a file beside this one and its class below."""

import dataclasses
from typing import Any

from realm_jax.run import Run
from realm_jax.sections import task_names
from realm_jax.tasks.base import Task
from realm_jax.tasks.closed_book import ClosedBook
from realm_jax.tasks.ict import Ict
from realm_jax.tasks.mlm import Mlm
from realm_jax.tasks.qa import Qa
from realm_jax.tasks.realm import Realm
from realm_jax.tasks.rerank import RerankTask
from realm_jax.tasks.tagger import TaggerTask

TASKS: dict[str, type[Task]] = {task.name: task for task in (Mlm, Ict, Realm, Qa, ClosedBook, RerankTask, TaggerTask)}


def make_task(name: str, run: Any) -> Task:
    """The task of a run (`Task.__init__`) that is called `name`. Passages are ordered anew by what it trains for that,
    else by what the last task before it has trained."""
    task, names = TASKS[name](run), task_names(run.config)
    done = names[: names.index(name) + 1] if name in names else []
    task.rerank = next((found for one in reversed(done) if (found := TASKS[one].reranks(run.config))), None)
    return task


def with_networks(run: Run) -> Run:
    """The run with the networks that the tasks of its recipe bring along."""
    brought = tuple(network for name in task_names(run.config) for network in TASKS[name].networks(run.model))
    return run.with_model(dataclasses.replace(run.model, networks=brought)) if brought else run
