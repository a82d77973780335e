"""Configs from the command line: `--config=NAME[:ARGUMENT]` and any number of `--config.section.key=value`.

NAME is one of the configs that travel with the package (`configs/`), or the path of a file: what has a folder in it or
ends with `.py`. A config file is Python with `get_config()` or `get_config(argument)` that returns an
`ml_collections.ConfigDict`.
Values are parsed by ml_collections' `config_flags`, so that they are written as in other JAX projects; on top of it
come errors in one line that name the file, the line or the key. What the keys mean is not known here: read
`realm_jax/config.py` next.
"""

import argparse
import inspect
import runpy
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags import config_path

from realm_jax.config import check_shape, reference
from realm_jax.errors import UserError
from realm_jax.recipes import NAMED, config_names, is_name
from realm_jax.schema import advise, flatten

_REFUSALS = (flags.Error, TypeError, ValueError)  # what config_flags raises for a value that does not fit its key


def add_config_argument(parser: argparse.ArgumentParser, default: str = "the built-in one") -> None:
    """Adds `--config`; with it `args.config` is a path or None, and `realm_jax.cli` fills `args.overrides`."""
    parser.add_argument(
        "--config",
        metavar="NAME[:ARGUMENT]",
        help=f"one of {', '.join(config_names())}, or a Python file with get_config(), and what to hand to it; "
        f"if not given, {default}. Keys of it are set with --config.section.key=value",
    )
    parser.add_argument("--help-config", action=_HelpConfig, nargs=0, help="list all keys of configs, and exit")


class _HelpConfig(argparse.Action):
    """Prints the page of all keys, whatever other arguments are missing."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(reference(), end="")
        parser.exit()


def positive(text: str) -> int:
    """The type of an argument that is a whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return int(text)


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
    """The config with overrides applied, locked; see `load_config`."""
    keys = list(flatten(config.to_dict()))
    for override in overrides:
        _check_override(override, keys, kind)
    return _apply(config, list(overrides), kind)


def _load_file(path: str, kind: str) -> ConfigDict:
    """Runs a config file and its `get_config`; what breaks in there is reported with its line in that file."""
    given, colon, argument = path.partition(":")
    name = _find_file(given, path, kind)
    try:
        get_config = runpy.run_path(name, run_name="realm_config").get(f"get_{kind}")
    except Exception as error:
        raise _broken(name, error) from error
    if not callable(get_config):
        raise UserError(f"{name}: a {kind} file must define get_{kind}(), which returns a ConfigDict")
    arguments = [argument] if colon else []
    _check_arguments(get_config, arguments, path, kind)
    try:
        config = get_config(*arguments)
    except Exception as error:
        raise _broken(name, error) from error
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


def _broken(name: str, error: Exception) -> UserError:
    """One line for an exception out of a config file, with the last line of the file that took part in it."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, SyntaxError):
        return UserError(f"{error.filename or name}:{error.lineno}: {error.msg}")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    where = f"{name}:{lines[-1]}" if lines else name
    what = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
    return UserError(f"{where}: {type(error).__name__}: {what}")


def _check_override(override: str, keys: list[str], kind: str) -> None:
    name, equals, _ = override.partition("=")
    key = name.removeprefix(f"--{kind}.")
    if not equals:
        raise UserError(f"{override}: no value; write {override}=VALUE")
    if key in keys:
        return
    inside = [known for known in keys if known.startswith(f"{key}.")]
    if inside:
        raise UserError(f"{name}: {key} is a section; set its keys, such as --{kind}.{inside[0]}")
    raise UserError(f"{name}: there is no such key in the {kind}; {advise(key, keys)}")


def _apply(config: ConfigDict, overrides: list[str], kind: str) -> ConfigDict:
    """The config with overrides applied. Raises UserError that names the first one that does not fit its key."""
    try:
        return _parse(config, overrides, kind)
    except _REFUSALS as error:
        for override in overrides:
            if _refused(config, override, kind):
                raise UserError(_explain(override, config, kind)) from error
        raise UserError(" ".join(str(error).split())) from error


def _refused(config: ConfigDict, override: str, kind: str) -> bool:
    try:
        _parse(config, [override], kind)
    except _REFUSALS:
        return True
    return False


def _parse(config: ConfigDict, overrides: list[str], kind: str) -> ConfigDict:
    """Lets config_flags parse the overrides, on flag values of its own: absl's global ones are for programs."""
    values = flags.FlagValues()
    argv = ["realm", *overrides]
    config_flags.DEFINE_config_dict(kind, config, flag_values=values, sys_argv=argv)
    values(argv)
    return values[kind].value


def _explain(override: str, config: ConfigDict, kind: str) -> str:
    """What the key of an override takes."""
    name, _, text = override.partition("=")
    key = name.removeprefix(f"--{kind}.")
    wanted = config_path.get_type(key, config).__name__
    if wanted not in ("int", "float", "bool", "str", "tuple"):
        return f"{name}: a {wanted} cannot be set on the command line; set it in a config file"
    value = config_path.get_value(key, config)
    example = "" if value is None else f", such as {value!r}"
    return f"{name}={text}: this key takes a value of type {wanted}{example}"
