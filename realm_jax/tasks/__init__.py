"""Every task by its name. A new one is a file beside this one and its class below."""

from typing import Any

from realm_jax.tasks.base import Task
from realm_jax.tasks.closed_book import ClosedBook
from realm_jax.tasks.ict import Ict
from realm_jax.tasks.mlm import Mlm
from realm_jax.tasks.qa import Qa
from realm_jax.tasks.realm import Realm
from realm_jax.tasks.tagger import TaggerTask

TASKS: dict[str, type[Task]] = {task.name: task for task in (Mlm, Ict, Realm, Qa, ClosedBook, TaggerTask)}


def make_task(name: str, run: Any) -> Task:
    """The task of a run (`Task.__init__`) that is called `name`."""
    return TASKS[name](run)
