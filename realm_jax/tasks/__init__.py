"""Every task by its name. A new task is a file beside this one."""

import pkgutil
from importlib import import_module
from typing import Any

from realm_jax.config import task_names
from realm_jax.tasks.base import Task


def _tasks() -> dict[str, type[Task]]:
    """The classes with a `name` in the modules of this package, by that name, in the order of their streams."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    found = {value for value in classes if issubclass(value, Task) and hasattr(value, "name")}
    return {task.name: task for task in sorted(found, key=lambda task: task.stream)}


TASKS = _tasks()


def make_task(name: str, run: Any) -> Task:
    """The task of a run (`Task.__init__`) that is called `name`. Passages are ordered anew by what it trains for that,
    else by what the last task before it has trained."""
    task, names = TASKS[name](run), task_names(run.config)
    done = names[: names.index(name) + 1] if name in names else []
    task.rerank = next((found for one in reversed(done) if (found := TASKS[one].reranks(run.config))), None)
    return task
