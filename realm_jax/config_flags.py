"""Configs from the command line: `--config=NAME[:ARGUMENT]` and any number of `--config.section.key=value`.

NAME is one of the configs that travel with the package (`configs/`), or the path of a file: what has a folder in it or
ends with `.py`. A config file is Python with `get_config()` or `get_config(argument)` that returns an
`ml_collections.ConfigDict`. A value is parsed by the type of its key (`schema.parse`), written as other JAX projects
write them; `model` stands for None, "as the model of init_from". Errors are one line that names the file, the line or
the key. Read `realm_jax/config.py` next.
"""

import argparse
import copy
import functools
import inspect
import runpy
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from realm_jax.config import INHERITED, SECTIONS, check_shape, reference
from realm_jax.errors import UserError
from realm_jax.recipes import NAMED, config_names, is_name
from realm_jax.schema import flatten, parse, suggest
from realm_jax.schema import keys as declared_keys


def add_config_argument(parser: argparse.ArgumentParser, default: str = "the built-in one") -> None:
    """Adds `--config`; with it `args.config` is a path or None, and `realm_jax.cli.main` fills `args.overrides`."""
    parser.add_argument(
        "--config",
        metavar="NAME[:ARGUMENT]",
        help=f"one of {', '.join(config_names())}, or a Python file with get_config(), and what to hand to it; "
        f"if not given, {default}. Keys of it are set with --config.section.key=value",
    )
    add = parser.add_argument
    add("--help-config", action=PrintPage, nargs=0, const=reference, help="list all keys of configs, and exit")


class PrintPage(argparse.Action):
    """Prints the page returned by `const`, even if required arguments are missing, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(self.const(), end="")
        parser.exit()


def load_config(
    path: str | None,
    overrides: Sequence[str],
    default: Callable[[], ConfigDict],
    like: Callable[[ConfigDict], ConfigDict] | None = None,
    kind: str = "config",
) -> ConfigDict:
    """The config of `path` (`NAME` or `NAME:ARGUMENT`; None: of `default()`) with overrides applied, locked.

    kind: its name in flags (`--config.section.key`) and in files (`get_config`).

    `overrides` are whole arguments, `--config.train.steps=10`; the last of two for one key counts, but for a tuple each
    is one element. `like` gives the default config of the same kind, where a command takes several. Raises `UserError`
    for a file that is missing or breaks, for a config in it that does not have the keys of its default, for a key that
    the config does not have, and for a value that is not of the key's type.
    """
    config = default() if path is None else _load_file(path, kind)
    check_shape(config, default() if like is None else like(config), kind)
    return with_overrides(config, overrides, kind)


def with_overrides(config: ConfigDict, overrides: Sequence[str], kind: str = "config") -> ConfigDict:
    """A copy of the config with overrides applied, locked; see `load_config`."""
    found, values = copy.deepcopy(config), dict[str, Any]()
    for override in overrides:
        key, value = _parse_override(override, found, kind)
        values[key] = values.get(key, ()) + value if isinstance(value, tuple) else value
    found.update_from_flattened_dict(values)
    return found.lock()


def _load_file(path: str, kind: str) -> ConfigDict:
    """Runs a config file and its `get_config`; an exception is reported with its line in that file."""
    given, colon, argument = path.partition(":")
    name = _find_file(given, path, kind)
    try:
        get_config = runpy.run_path(name, run_name="realm_config").get(f"get_{kind}")
    except Exception as error:
        raise _config_file_error(name, error) from error
    if not callable(get_config):
        raise UserError(f"{name}: a {kind} file must define get_{kind}(), which returns a ConfigDict")
    arguments = [argument] if colon else []
    _check_arguments(get_config, arguments, path, kind)
    try:
        config = get_config(*arguments)
    except Exception as error:
        raise _config_file_error(name, error) from error
    if not isinstance(config, ConfigDict):
        raise UserError(f"{name}: get_{kind}() must return a ConfigDict, not {type(config).__name__}")
    return config


def _find_file(name: str, path: str, kind: str) -> str:
    """The file that a flag names. Only configs have names, specs are files."""
    if kind == "config" and is_name(name):
        if name not in config_names():
            known = ", ".join(config_names())
            file = f", or ./{name} for the file" if Path(name).is_file() else ", or the path of a file"
            raise UserError(f"--{kind}={path}: there is no config {name!r}; choose among {known}{file}")
        return str(NAMED / f"{name}.py")
    if not Path(name).is_file():
        raise UserError(f"--{kind}={path}: there is no file {name} (looked from {Path.cwd()})")
    return name


def _check_arguments(get_config: Callable[..., Any], arguments: list[str], path: str, kind: str) -> None:
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError:
        wanted = "takes no :ARGUMENT" if arguments else f"needs an argument; write --{kind}=FILE:ARGUMENT"
        raise UserError(f"--{kind}={path}: get_{kind}{inspect.signature(get_config)} {wanted}") from None


def _config_file_error(name: str, error: Exception) -> UserError:
    """One line for an exception out of a config file, with the last line of the file that took part in it."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, SyntaxError):
        return UserError(f"{error.filename or name}:{error.lineno}: {error.msg}")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    where = f"{name}:{lines[-1]}" if lines else name
    what = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
    return UserError(f"{where}: {type(error).__name__}: {what}")


def _parse_override(override: str, config: ConfigDict, kind: str) -> tuple[str, Any]:
    """The key of an override and its value. Raises UserError."""
    flag, equals, text = override.partition("=")
    key, keys = flag.removeprefix(f"--{kind}."), list(flatten(config.to_dict()))
    if not equals:
        raise UserError(f"{override}: no value; write {override}=VALUE")
    if key not in keys:
        if inside := next((known for known in keys if known.startswith(f"{key}.")), ""):
            raise UserError(f"{flag}: {key} is a section; set its keys, such as --{kind}.{inside}")
        raise UserError(f"{flag}: there is no such key in the {kind}; {suggest(key, keys)}")
    *sections, name = key.split(".")
    section = functools.reduce(ConfigDict.__getitem__, sections, config)
    if kind == "config" and key in INHERITED and text == "model":
        return key, None  # as the model of init_from
    wanted = section.get_type(name)
    if section[name] is None and key in INHERITED:  # its type is that of its default
        wanted = type(declared_keys(SECTIONS)[key].default)
    try:
        return key, parse(text, wanted)
    except ValueError:
        example = "" if section[name] is None else f", such as {section[name]!r}"
        raise UserError(f"{override}: this key takes a value of type {wanted.__name__}{example}") from None
    except TypeError:
        advice = f"a {wanted.__name__} cannot be set on the command line; set it in a config file"
        raise UserError(f"{flag}: {advice}") from None
