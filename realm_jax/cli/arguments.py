"""Arguments of the commands that read a trained run, said once: which run, what of its config changes, which questions.

What is done with them is `train/trained_run.py`.
"""

import argparse
from typing import Any

from realm_jax.cli.argument_types import filled
from realm_jax.cli.config_flags import with_overrides
from realm_jax.config import default, science
from realm_jax.errors import UserError
from realm_jax.run import Run
from realm_jax.schema import flatten
from realm_jax.sections import SEARCHES
from realm_jax.tasks import TASKS
from realm_jax.train.trained_run import newest

ABOUT_PASSAGES = ("answering.retrieved", "answering.read", "answering.aggregate")


def add_run_arguments(parser: argparse._ActionsContainer, required: bool = True) -> None:
    """`--workdir`, and `--config.section.key=value` for its recorded config; see `changes_of`."""
    parser.set_defaults(config=None)  # by this `realm_jax.cli.main` knows that overrides are taken
    parser.add_argument(
        "--workdir",
        type=filled,
        required=required,
        metavar="DIR",
        help="folder of a run of `realm train`. What its config says of operations and of evaluation is changed with "
        "--config.section.key=value, such as --config.data.path=DIR for a prepared folder that was moved "
        "(`realm train --help-config` lists the keys)",
    )


def changes_of(args: argparse.Namespace) -> dict[str, Any]:
    """Dotted key → value of what the overrides of `add_run_arguments` change in the config of a run.

    Raises UserError for a key that a trained run keeps: only those of operations and of evaluation may change.
    """
    names = [override.partition("=")[0].removeprefix("--config.") for override in args.overrides]
    config = with_overrides(default(), args.overrides)
    for name in science(config).keys() & {*names}:
        if not name.startswith("evaluation."):
            raise UserError(f"--config.{name}: the run keeps it; only keys of operations and of evaluation may change")
    values = flatten(config.to_dict())
    return {name: values[name] for name in names}


def check_passages(run: Run, args: argparse.Namespace) -> None:
    """Raise UserError for arguments about passages that would do nothing, or that leave too few to read."""
    changes = changes_of(args)
    task, _ = newest(run, args.task)
    if not TASKS[task].reads_passages:
        given = [f"--{flag}" for flag in ("nbest", "search") if vars(args).get(flag) is not None]
        given += [f"--config.{key}" for key in changes if key in ABOUT_PASSAGES]
        if given:
            raise UserError(f"{given[0]}: {run.workdir} answers without passages ({task}); leave it out")
        return
    read, passages = min(run.answering.qa_passages, run.setting.rows), changes.get("answering.retrieved")
    if passages is not None and passages < read:
        raise UserError(
            f"--config.answering.retrieved={passages}: fewer than the {read} that are read; retrieve more, or read "
            "fewer with --config.answering.read"
        )


def add_search_argument(parser: argparse._ActionsContainer) -> None:
    """`--search`."""
    parser.add_argument(
        "--search",
        choices=SEARCHES,
        help="what finds the passages of questions (default: the config's qa.search)",
    )


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Which questions, with which parameters, and how their passages are found; see `questions_of`."""
    parser.add_argument(
        "--questions",
        type=filled,
        metavar="SPLIT|FILE",
        help="questions of the prepared folder, by their split, or a file of questions (default: dev)",
    )
    parser.add_argument(
        "--task", type=filled, help="parameters at the end of this task (default: the last with a checkpoint)"
    )
    add_search_argument(parser)
