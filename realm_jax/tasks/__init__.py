"""The tasks by name, in the order of their streams. Each is a file of this package."""

from realm_jax.run import Run
from realm_jax.tasks.base import Task
from realm_jax.tasks.closed_book import ClosedBook
from realm_jax.tasks.evidence_contrast import EvidenceContrast
from realm_jax.tasks.ict import Ict
from realm_jax.tasks.mlm import Mlm
from realm_jax.tasks.qa import Qa
from realm_jax.tasks.realm import RealmTask
from realm_jax.tasks.rerank import RerankTask

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Mlm, Ict, RealmTask, Qa, ClosedBook, RerankTask, EvidenceContrast)
}


def make_task(name: str, run: Run) -> Task:
    """Return the task of a run that is called `name`."""
    return TASKS[name](run)
