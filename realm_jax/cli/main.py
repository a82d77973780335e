"""The `realm` command: import the module of a command, parse its arguments, and turn the outcome into an exit code.

Each command is a module of `realm_jax.cli` with `add_arguments(parser)` and `run(args) -> int | None`, imported only
when you use it, so that `realm --help` needs no JAX. A command that takes a config calls
`realm_jax.config.add_config_argument`; its `args.overrides` then holds the arguments of the form
`--config.key=value`, and `args.spec_overrides` those of the form `--spec.key=value`.
"""

import argparse
import importlib
import logging
import os
import select
import shlex
import sys
import threading
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import realm_jax
from realm_jax.errors import TRANSIENT_FAULT, USER_ERROR, TransientFault, UserError, full_disk, user_message
from realm_jax.host import (
    INTERRUPTED,
    PREEMPTED,
    CtrlC,
    Preempted,
    allow_open_files,
    enlarge_compiler_stacks,
    gc_disabled,
    keep_freed_memory,
)

OVERRIDES = {"config": "overrides", "spec": "spec_overrides"}  # --config.key=value → args.overrides

BROKEN_PIPE = 141  # exit code: as shells report a program that SIGPIPE ended

GROUPS = {  # title → command → summary; a command's module has the same name
    "search your documents": {
        "index": "make documents searchable with a pretrained encoder, without training",
        "ask": "answer questions from an index or a trained run",
        "serve": "answer questions over HTTP (web page and JSON API)",
        "corpus": "add, replace or remove documents of an index or a trained run",
    },
    "adapt and share an encoder": {
        "adapt": "train a pretrained encoder on your documents, without questions or labels",
        "weights": "export to Hugging Face format, push to the hub, or convert TensorFlow checkpoints",
    },
    "train": {
        "quickstart": "train the whole recipe on a synthetic encyclopedia, in about five minutes",
        "prepare": "convert documents and questions to a prepared folder",
        "train": "train the recipe of a config, or resume it",
        "ablate": "train and compare variants that differ in one setting, over several seeds",
    },
    "evaluate": {
        "predict": "answer a file of questions and write the predictions",
        "evaluate": "measure a run or a file of predictions, or compare two files with significance tests",
        "inspect": "show prepared data, or how passages change a prediction",
    },
    "operate": {
        "launch": "plan, start and manage jobs on this machine, TPU VMs or GKE",
        "build-index": "re-embed the corpus for a run that is training",
        "watch": "monitor a run: loss, recall, indexes and jobs",
        "storage": "list, verify or remove checkpoints and indexes of a run",
    },
    "set up": {
        "doctor": "check versions, devices, memory, disk and missing packages",
        "completion": "print a shell completion script",
    },
}
JOBS = {name: summary for group in GROUPS.values() for name, summary in group.items()}  # command → summary


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    An exception that is neither the user's mistake nor a preemption is a defect and propagates with its traceback.

    Args:
        argv: arguments; None for `sys.argv[1:]`.

    Raises:
        SystemExit: 2, if arguments cannot be parsed.
    """
    if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows "?"
    # No traceback of a thread that a full disk ends: the thread that waits for its file reports that in one line.
    original_hook = threading.excepthook
    threading.excepthook = lambda ended: None if full_disk(ended.exc_value) else original_hook(ended)
    with CtrlC() as ctrl_c:
        try:
            code = _run(list(sys.argv[1:] if argv is None else argv), ctrl_c)
            if sys.stdout is not None:  # a shell may have closed it
                sys.stdout.flush()  # a closed pipe shows up here rather than during interpreter shutdown
            return code
        except KeyboardInterrupt:
            return _interrupted()
        except Preempted as reason:
            logging.getLogger("realm_jax").warning("%s", reason)
            return PREEMPTED
        except Exception as error:
            if ctrl_c.received:  # a library may have swallowed the exception
                return _interrupted()
            if isinstance(error, BrokenPipeError) and _stdout_is_closed():
                return BROKEN_PIPE
            if not (message := user_message(error)):
                raise
            print(f"realm: error: {message}", file=sys.stderr)
            is_transient = isinstance(error, TransientFault) or full_disk(error) or _is_backend_error(error)
            return TRANSIENT_FAULT if is_transient else USER_ERROR
        finally:
            threading.excepthook = original_hook


def _interrupted() -> int:
    """Print that Ctrl-C ended the command, and return its exit code."""
    print("\nrealm: interrupted; run the same command again to continue", file=sys.stderr)
    return INTERRUPTED


def _is_backend_error(error: Exception) -> bool:
    """Return True if JAX cannot open existing devices, for example because another process still holds the TPU."""
    message = str(error)
    is_start = isinstance(error, RuntimeError) and message.startswith("Unable to initialize backend")
    return is_start and "not in the list of known backends" not in message


def _stdout_is_closed() -> bool:
    """Return True if the reader of stdout is gone; stdout then becomes /dev/null, so that Python ends quietly."""
    stdout = select.poll()
    stdout.register(sys.stdout.fileno(), 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in stdout.poll(0)):
        return False  # another pipe broke
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _run(argv: list[str], ctrl_c: CtrlC) -> int:
    """Parse `argv`, import the module of the command and run it."""
    name = next((argument for argument in argv if not argument.startswith("-")), None)
    with ctrl_c.held():
        jobs = {name: import_job(name)} if name in JOBS else {}
    parser, prefixes = make_parser(jobs), tuple(f"--{flag}." for flag in OVERRIDES)
    for word in argv:  # here, because argparse takes a value after a space for a positional argument
        if word.startswith(prefixes) and "=" not in word:
            raise UserError(f"{word}: no value; write {word}=VALUE")
    # Removed first: argparse would take one with a space in it for a positional argument.
    args = parser.parse_args([word for word in argv if not word.startswith(prefixes)])
    for flag, attribute in OVERRIDES.items():
        overrides = [word for word in argv if word.startswith(f"--{flag}.")]
        if overrides and not hasattr(args, flag):
            parser.error(f"unrecognized arguments: {' '.join(overrides)}")
        setattr(args, attribute, overrides)
    args.command_line = shlex.join(["realm", *argv])
    from realm_jax import console  # here, because `realm --help` does not need Rich

    console.set_up_logging()
    code = jobs[args.command].run(args)
    return 0 if code is None else code


def module_of(name: str) -> str:
    """Return the name of a command's module."""
    return f"realm_jax.cli.{name.replace('-', '_')}"


def import_job(name: str) -> ModuleType:
    """Import and return the module of a command. Raises UserError if a package is not installed."""
    module = module_of(name)
    keep_freed_memory()
    allow_open_files()
    enlarge_compiler_stacks()
    if module in sys.modules:
        return sys.modules[module]
    try:
        with gc_disabled():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "realm_jax":
            raise
        raise UserError(
            f"`realm {name}` needs the Python package {error.name!r}, which is not installed; "
            "run `pip install -e .` again in your clone of realm_jax, then `realm doctor`"
        ) from error


class CommandHelp(argparse.HelpFormatter):
    """List the commands in the groups of GROUPS."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        lines = {command.dest: self._format_action(command) for command in action._get_subactions()}
        return "".join(f"\n{title}:\n{''.join(lines[name] for name in group)}" for title, group in GROUPS.items())


def make_parser(jobs: Mapping[str, ModuleType]) -> argparse.ArgumentParser:
    """Return the parser of all commands, with arguments of those in `jobs`; the modules of others stay unimported."""
    options: dict[str, Any] = {"allow_abbrev": False}
    if sys.version_info >= (3, 14):
        options["suggest_on_error"] = True
    parser = argparse.ArgumentParser(
        prog="realm",
        description="Search documents, and train and adapt retrieval models without labels, in JAX.",
        formatter_class=CommandHelp,
        epilog="`realm COMMAND --help` shows a command's arguments, with examples.",
        **options,
    )
    parser.add_argument("--version", action="version", version=f"realm_jax {realm_jax.__version__}")
    commands = parser.add_subparsers(title=argparse.SUPPRESS, dest="command", metavar="COMMAND", required=True)
    for name, summary in JOBS.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        formatter = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=summary, description=description, formatter_class=formatter, **options)
        if name in jobs:
            jobs[name].add_arguments(command)
    return parser
