"""Arguments shared by the commands that read a trained run: which run, config overrides, which questions.

They are used in `train/trained_run.py`.
"""

import argparse
from typing import Any

from realm_jax.cli.argument_types import nonempty
from realm_jax.config import SEARCHES
from realm_jax.errors import UserError
from realm_jax.run import Run
from realm_jax.tasks.answering import reads_passages
from realm_jax.train.trained_run import find_task, run_changes

PASSAGE_FLAGS = ("answering.retrieved", "answering.read", "answering.aggregate")


def add_run_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """`--workdir`, and `--config.section.key=value` for its recorded config; see `config_changes`."""
    parser.set_defaults(config=None)  # tells `realm_jax.cli.main` that this command takes overrides
    parser.add_argument(
        "--workdir",
        type=nonempty,
        required=required,
        metavar="DIR",
        help="folder of a run of `realm train`. Runtime and evaluation keys of its config can be overridden with "
        "--config.section.key=value, such as --config.data.path=DIR for a prepared folder that was moved "
        "(`realm train --help-config` lists the keys)",
    )


def config_changes(args: argparse.Namespace) -> dict[str, Any]:
    """Dotted key → value of what the overrides of `add_run_arguments` change in the config of a run."""
    return run_changes(args.overrides)


def check_passages(run: Run, args: argparse.Namespace) -> None:
    """Raise UserError for passage flags that would have no effect, or that retrieve too few passages to read."""
    changes = config_changes(args)
    task = find_task(run, args.task).task
    if not reads_passages(task):
        given = [f"--{flag}" for flag in ("nbest", "search") if vars(args).get(flag) is not None]
        given += [f"--config.{key}" for key in changes if key in PASSAGE_FLAGS]
        if given:
            raise UserError(f"{given[0]}: {run.workdir} answers without passages ({task}); leave it out")
        return
    read, passages = min(run.answering_qa.passages, run.context.rows), changes.get("answering.retrieved")
    if passages is not None and passages < read:
        raise UserError(
            f"--config.answering.retrieved={passages}: fewer than the {read} that are read; retrieve more, or read "
            "fewer with --config.answering.read"
        )


def add_search_argument(parser: argparse._ActionsContainer) -> None:
    """`--search`."""
    parser.add_argument("--search", choices=SEARCHES, help="what finds the passages of questions (default: the "
        "config's qa.search)")  # fmt: skip


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Which questions, with which parameters, and how their passages are found; see `load_questions`."""
    parser.add_argument("--questions", type=nonempty, metavar="SPLIT|FILE", help="questions of the prepared folder, by "
        "their split, or a file of questions (default: dev)")  # fmt: skip
    parser.add_argument("--task", type=nonempty, help="parameters at the end of this task (default: the last with a "
        "exported model)")  # fmt: skip
    add_search_argument(parser)
