"""`realm completion`: a script that completes the command's words in a shell; the library shtab writes it.

The script knows what the parser of all commands knows: commands, flags, choices and which values are files or folders.
It imports nothing when it completes, so it is written anew after an update.
"""

import argparse
import re

import shtab

from realm_jax.cli.main import JOBS, import_job, make_parser
from realm_jax.recipes import config_names

EXAMPLES = """examples:
  realm completion bash > ~/.local/share/bash-completion/completions/realm
  realm completion zsh > ~/.zfunc/_realm                 where fpath has ~/.zfunc
  realm completion tcsh > ~/.realm.tcsh                  and `source ~/.realm.tcsh` in ~/.tcshrc
"""
PATHS = {"FILE": shtab.FILE, "DOCUMENTS": shtab.FILE, "DIR": shtab.DIRECTORY}  # words of metavars
# To bash `--flag=value` is three words, and two to the script.
BASH = """

_realm() {
  local word words=() index=0 at=0
  for word in "${COMP_WORDS[@]}"; do
    if [[ $word != = || ${words[-1]} != --* ]]; then
      words+=("$word")
    elif (( index == COMP_CWORD )); then
      words+=("")
    fi
    (( index++ == COMP_CWORD )) && at=$(( ${#words[@]} - 1 ))
  done
  local COMP_WORDS=("${words[@]}") COMP_CWORD=$at
  _shtab_realm
}

complete -o bashdefault -o default -F _realm realm"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm completion`."""
    parser.epilog = EXAMPLES
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="whose script to print")


def run(args: argparse.Namespace) -> None:
    """Print the script."""
    parser = make_parser({name: import_job(name) for name in JOBS})
    _say_what_completes(parser, args.shell)
    print(shtab.complete(parser, args.shell) + (BASH if args.shell == "bash" else ""))


def _say_what_completes(parser: argparse.ArgumentParser, shell: str) -> None:
    """Give each argument of a parser, and of those within it, its completion: names of configs, files or folders."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _say_what_completes(inner, shell)
            continue
        words = re.findall("[A-Z]+", str(action.metavar))
        if "--config" in action.option_strings:
            action.choices = config_names()
        elif found := next((PATHS[word] for word in words if word in PATHS), None):
            setattr(action, "complete", found)  # noqa: B010  (an attribute that shtab looks for)
        if shell == "zsh":
            action.metavar = None  # whose signs zsh takes for its own
            if action.nargs != 0:  # a value, after a space or `=`
                action.option_strings = [f"{flag}=" for flag in action.option_strings]
