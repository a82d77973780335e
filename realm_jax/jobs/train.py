"""`realm train`: run the tasks of a config, each from the parameters that the one before ends with.

Every task keeps its checkpoints in `WORKDIR/<task>`; a task that is done is not repeated, one that was cut off goes on
from its newest checkpoint. Read next: `realm_jax/training/loop.py`.
"""

import argparse
import logging
import os
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from realm_jax.config import default, task_names, validate
from realm_jax.corpus.jsonl import Question
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.evaluation.predict import Evaluator
from realm_jax.index.candidates import Index
from realm_jax.jobs.flags import add_config_argument, load_config
from realm_jax.models.realm import Params
from realm_jax.run import Run, make_run
from realm_jax.storage import read_json
from realm_jax.training.loop import Measure, Preempted, check_workdir, restore_params, train_task

logger = logging.getLogger(__name__)

PREEMPTED = 75  # exit code: saved, restart freely
EXAMPLES = """examples:
  realm train --config=configs/wiki_small.py --config.data.path=data --workdir=runs/wiki
  realm train --config=configs/wiki_small.py --config.tasks=ict --config.ict.steps=2000 --workdir=runs/ict

The same command goes on where a run was cut off.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm train`."""
    parser.epilog = EXAMPLES
    add_config_argument(parser, "the paper's sizes")
    parser.add_argument("--workdir", required=True, metavar="DIR", help="folder of the run: made, or gone on with")


def run(args: argparse.Namespace) -> int:
    """Train; exit code 75 after SIGTERM, once the state is saved."""
    config = load_config(args.config, args.overrides, default)
    set_up_jax()
    run = open_run(config, Path(args.workdir))
    try:
        train(run)
    except Preempted as reason:
        logger.warning("%s", reason)
        return PREEMPTED
    return 0


def set_up_jax() -> None:
    """A persistent compilation cache, unless JAX_COMPILATION_CACHE_DIR names one already."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "realm_jax" / "jax"))


def open_run(config: ConfigDict, workdir: Path) -> Run:
    """A validated run over its prepared folder; its config is recorded in `workdir`, or compared with the one there."""
    validate(config)
    run = make_run(config, workdir, open_sources(config.data.path))
    check_workdir(run)
    return run


def reopen_run(workdir: Path, overrides: dict[str, Any] | None = None) -> Run:
    """The run recorded in a folder, with operations keys changed by `overrides` (dotted keys)."""
    if not (workdir / "config.json").is_file():
        raise UserError(f"--workdir={workdir}: no run there (no config.json); train one with `realm train`")
    config = ConfigDict(read_json(workdir / "config.json"))
    config.update_from_flattened_dict(overrides or {})
    validate(config)
    return make_run(config, workdir, open_sources(config.data.path))


def dev_questions(run: Run) -> list[Question]:
    """The development questions that a run is measured on; empty when the prepared folder has none."""
    questions = run.sources.questions.get("dev", [])
    most = run.config.evaluation.questions
    return questions[:most] if most else questions


def make_measure(run: Run) -> Measure | None:
    """Recall on the development questions, as the loop wants it."""
    questions = dev_questions(run)
    if not questions:
        return None
    evaluator = Evaluator(run, questions)

    def measure(params: Params, index: Index | None) -> dict[str, Any]:
        return {} if index is None else evaluator.recall(params, index)

    return measure


def train(run: Run) -> Params:
    """All tasks of the recipe; returns the final parameters."""
    params = starting_params(run)
    measure = make_measure(run)
    for name in task_names(run.config):
        params = train_task(run, name, params, measure if name != "mlm" else None)
    return params


def starting_params(run: Run) -> Params:
    """Fresh parameters, or the final ones of the run that `init_from` names."""
    params = run.initial_params()
    if run.config.init_from:
        source = reopen_run(Path(run.config.init_from))
        params = restore_params(run, source.workdir, task_names(source.config)[-1], params)
    return params
