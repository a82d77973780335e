"""Arguments shared by the commands that read a trained run: which run, config overrides, which questions.

They are used in `train/trained_run.py`.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

from realm_jax.cli.argument_types import nonempty
from realm_jax.config import RERANKERS, SEARCHES
from realm_jax.errors import UserError
from realm_jax.mirror import download, is_url, url_of
from realm_jax.retrieval import bm25
from realm_jax.run import Run
from realm_jax.tasks.answering import reads_passages
from realm_jax.train.exported_model import MODEL
from realm_jax.train.trained_run import find_task, run_changes

logger = logging.getLogger(__name__)

PASSAGE_KEYS = (  # keys of the config that only matter if passages are read
    "answering.retrieved", "answering.read", "answering.aggregate", "answering.rerank", "answering.rerank_depth",
    "answering.reader", "answering.answer_tokens",
)  # fmt: skip


def add_run_arguments(parser: argparse.ArgumentParser, required: bool = True, in_bucket: bool = True) -> None:
    """Add `--workdir`, and take `--config.section.key=value` to override its recorded config (see `config_changes`).

    Args:
        parser: parser of the command.
        required: True if the command needs a run.
        in_bucket: True if the run may be in a bucket, see `run_directory`.
    """
    locations = ": a path, or gs://BUCKET/FOLDER" if in_bucket else ""
    parser.set_defaults(config=None)  # tells `realm_jax.cli.main` that this command takes overrides
    parser.add_argument(
        "--workdir",
        type=nonempty,
        required=required,
        metavar="DIR",
        help=f"run directory of `realm index`, `adapt` or `train`{locations}. Override runtime and evaluation keys of "
        "its config with --config.section.key=value, for example --config.data.path=DIR if the prepared folder was "
        "moved (`realm train --help-config` lists the keys)",
    )


def run_directory(workdir: str, task: str | None = None) -> Path:
    """Return the directory of a run to read; if it is in a bucket, a copy of the files that answers need.

    Args:
        workdir: a path, or the URL of a bucket's folder.
        task: whose exported model is read; None for that of the last finished task.

    Raises:
        StorageError: the bucket cannot be read, or the disk is full.
    """
    if not is_url(workdir):
        return Path(workdir)
    folders = [f"{MODEL}/", f"{bm25.FOLDER}/"]
    folders += [] if task is None else [f"{task}/{MODEL}/"]

    def is_needed(name: str) -> bool:
        return "/" not in name or name.startswith(tuple(folders)) or name.endswith("/evaluations.jsonl")

    logger.info("copying %s to this machine", workdir)
    # A copy has only the files that one command needs, so commands that need others have their own.
    return download(workdir, "reader" if task is None else f"reader-{task}", is_needed)


def config_changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return dotted key → value for the overrides of the run's config, with that of `--reader`."""
    reader = vars(args).get("reader")
    return run_changes(args.overrides) | ({"answering.reader": reader} if reader else {})


def check_passages(run: Run, args: argparse.Namespace) -> None:
    """Check that the flags about passages fit the run.

    Args:
        run: the run.
        args: arguments of the command.

    Raises:
        UserError: a flag would have no effect, or fewer passages are retrieved than read.
    """
    changes = config_changes(args)
    task = find_task(run, args.task).task
    if not reads_passages(task):
        flags = [f"--{flag}" for flag in ("nbest", "search", "rerank") if vars(args).get(flag) is not None]
        flags += [f"--config.{key}" for key in changes if key in PASSAGE_KEYS]
        if flags:
            raise UserError(f"{flags[0]}: {url_of(run.workdir)} answers without passages ({task}); leave it out")
        return
    read, passages = min(run.answering_qa.passages, run.context.rows), changes.get("answering.retrieved")
    if passages is not None and passages < read:
        raise UserError(
            f"--config.answering.retrieved={passages}: is less than the {read} that are read; retrieve more, or read "
            "fewer with --config.answering.read"
        )


def add_search_argument(parser: argparse._ActionsContainer) -> None:
    """Add `--search`."""
    parser.add_argument("--search", choices=SEARCHES, help="search method: dense vectors, BM25, or both (default: "
        "qa.search of the config)")  # fmt: skip


def add_reader_argument(parser: argparse._ActionsContainer) -> None:
    """Add `--reader`."""
    parser.add_argument("--reader", type=nonempty, metavar="NAME", help="question-answering model that reads the "
        "passages instead of the run's reader: a folder, hf:NAME or py:NAME (default: answering.reader of the "
        "config)")  # fmt: skip


def add_rerank_argument(parser: argparse._ActionsContainer) -> None:
    """Add `--rerank`."""
    parser.add_argument("--rerank", choices=RERANKERS, help="reranker of the top passages before they are read: token "
        "vectors of the encoders, a trained cross-encoder, or none (default: answering.rerank of the "
        "config)")  # fmt: skip


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--questions` (see `load_questions`), `--task`, `--search`, `--rerank` and `--reader`."""
    parser.add_argument("--questions", type=nonempty, metavar="SPLIT|FILE", help="split of the prepared folder, or "
        "a file of questions (default: dev)")  # fmt: skip
    parser.add_argument("--task", type=nonempty, help="use the parameters from the end of this task (default: the last "
        "task with an exported model)")  # fmt: skip
    group = parser.add_argument_group("search and reading")
    add_search_argument(group)
    add_rerank_argument(group)
    add_reader_argument(group)
