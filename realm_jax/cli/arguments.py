"""Arguments shared by the commands that read a trained run: which run, config overrides, which questions.

They are used in `train/trained_run.py`.
"""

import argparse
from typing import Any

from realm_jax.cli.argument_types import nonempty
from realm_jax.config import RERANKERS, SEARCHES
from realm_jax.errors import UserError
from realm_jax.run import Run
from realm_jax.tasks.answering import reads_passages
from realm_jax.train.trained_run import find_task, run_changes

PASSAGE_FLAGS = (
    *("answering.retrieved", "answering.read", "answering.aggregate"),
    *("answering.rerank", "answering.rerank_depth", "answering.reader", "answering.answer_tokens"),
)


def add_run_arguments(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add `--workdir`, and take `--config.section.key=value` to override its recorded config (see `config_changes`).

    Args:
        parser: of the command.
        required: whether the command needs a run.
    """
    parser.set_defaults(config=None)  # tells `realm_jax.cli.main` that this command takes overrides
    parser.add_argument(
        "--workdir",
        type=nonempty,
        required=required,
        metavar="DIR",
        help="run directory of `realm index`, `adapt` or `train`. Runtime and evaluation keys of its config can be "
        "overridden with --config.section.key=value, such as --config.data.path=DIR for a prepared folder that was "
        "moved (`realm train --help-config` lists the keys)",
    )


def config_changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return dotted key → value for the overrides of the run's config, with that of `--reader`."""
    reader = vars(args).get("reader")
    return run_changes(args.overrides) | ({"answering.reader": reader} if reader else {})


def check_passages(run: Run, args: argparse.Namespace) -> None:
    """Check that the flags about passages fit the run.

    Args:
        run: the run.
        args: of the command.

    Raises:
        UserError: a flag would have no effect, or fewer passages are retrieved than read.
    """
    changes = config_changes(args)
    task = find_task(run, args.task).task
    if not reads_passages(task):
        flags = [f"--{flag}" for flag in ("nbest", "search", "rerank") if vars(args).get(flag) is not None]
        flags += [f"--config.{key}" for key in changes if key in PASSAGE_FLAGS]
        if flags:
            raise UserError(f"{flags[0]}: {run.workdir} answers without passages ({task}); leave it out")
        return
    read, passages = min(run.answering_qa.passages, run.context.rows), changes.get("answering.retrieved")
    if passages is not None and passages < read:
        raise UserError(
            f"--config.answering.retrieved={passages}: fewer than the {read} that are read; retrieve more, or read "
            "fewer with --config.answering.read"
        )


def add_search_argument(parser: argparse._ActionsContainer) -> None:
    """Add `--search`."""
    parser.add_argument("--search", choices=SEARCHES, help="how to search the passages of questions (default: the "
        "config's qa.search)")  # fmt: skip


def add_reader_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--reader`."""
    parser.add_argument("--reader", type=nonempty, metavar="NAME", help="read the passages with this model, a folder, "
        "hf:NAME or py:NAME with a question-answering head, in place of the run's reader (default: the config's "
        "answering.reader)")  # fmt: skip


def add_rerank_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--rerank`."""
    parser.add_argument("--rerank", choices=RERANKERS, help="rerank the first passages before they are read: by the "
        "encoders' token vectors, by a trained cross-encoder, or not (default: the config's "
        "answering.rerank)")  # fmt: skip


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--questions` (see `load_questions`), `--task`, `--search`, `--rerank` and `--reader`."""
    parser.add_argument("--questions", type=nonempty, metavar="SPLIT|FILE", help="questions of the prepared folder, by "
        "their split, or a file of questions (default: dev)")  # fmt: skip
    parser.add_argument("--task", type=nonempty, help="parameters at the end of this task (default: the last with an "
        "exported model)")  # fmt: skip
    add_search_argument(parser)
    add_rerank_argument(parser)
    add_reader_argument(parser)
