"""Compiling in tests: tiny steps do not repay the compiler's work, and no program needs to be compiled twice."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from realm_jax.run import Run
from realm_jax.tasks.base import Task
from realm_jax.training import loop
from realm_jax.training.state import make_step


@contextmanager
def quick_compiler(folder: Path) -> Iterator[None]:
    """Compile without optimisations, and keep every program in `folder`, so that a second run finds it there."""
    settings = {
        "jax_disable_most_optimizations": (True, False),
        "jax_compilation_cache_dir": (str(folder), None),
        "jax_persistent_cache_min_compile_time_secs": (0.0, 1.0),
        "jax_persistent_cache_min_entry_size_bytes": (-1, 0),
    }
    _apply({name: inside for name, (inside, _) in settings.items()})
    try:
        yield
    finally:
        _apply({name: outside for name, (_, outside) in settings.items()})


@contextmanager
def shared_steps(folder: Path) -> Iterator[None]:
    """`quick_compiler`, and runs of one test after another share their compiled step."""
    steps: dict[Any, Any] = {}

    def make(run: Run, task: Task) -> Any:
        key = task.name, run.setting, run.config[task.name].to_json()
        return steps.setdefault(key, make_step(run, task))

    with quick_compiler(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_step", make)
        yield


def _apply(values: dict) -> None:
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
