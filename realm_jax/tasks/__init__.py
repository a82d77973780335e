"""The training tasks by name. Each is a file of this package."""

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
    """Return a task of a run.

    Args:
        name: a key of TASKS.
        run: config, data, mesh and networks.
    """
    return TASKS[name](run)
