"""`realm completion`: print a script of shtab that completes commands, flags, choices and files in a shell."""

import argparse
import re

import shtab

from realm_jax.cli.main import JOBS, import_job, make_parser
from realm_jax.config import config_names

EXAMPLES = """examples:
  realm completion bash > ~/.local/share/bash-completion/completions/realm
  realm completion zsh > ~/.zfunc/_realm                 if fpath has ~/.zfunc
  realm completion tcsh > ~/.realm.tcsh                  and `source ~/.realm.tcsh` in ~/.tcshrc
"""
PATHS = {"FILE": shtab.FILE, "DOCUMENTS": shtab.FILE, "DIR": shtab.DIRECTORY}  # word of a metavar → completion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm completion`."""
    parser.epilog = EXAMPLES
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="shell to print the script for")


def run(args: argparse.Namespace) -> None:
    """Print the script."""
    parser = make_parser({name: import_job(name) for name in JOBS})
    _add_completions(parser, args.shell)
    print(shtab.complete(parser, args.shell))


def _add_completions(parser: argparse.ArgumentParser, shell: str) -> None:
    """Give every argument of a parser and of its commands its completion: names of configs, files or folders."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _add_completions(command, shell)
            continue
        words = re.findall("[A-Z]+", str(action.metavar))
        if "--config" in action.option_strings:
            action.choices = config_names()
        elif paths := [PATHS[word] for word in words if word in PATHS]:
            setattr(action, "complete", paths[0])  # noqa: B010  (an attribute that shtab looks for)
        if shell == "zsh":
            action.metavar = None  # zsh would read its colons and brackets
