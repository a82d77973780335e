"""`realm quickstart`: run all stages of REALM on one machine, from text to answered questions.

encyclopedia → prepared folder → warm-up → inverse cloze task → REALM with refreshes → fine-tuning → results and report.
Finished stages are skipped and interrupted ones resumed, so the same command always gives the same result.
"""

import argparse
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from realm_jax.cache import cache_programs
from realm_jax.cli.argument_types import local_path
from realm_jax.cli.prepare import prepare
from realm_jax.config import add_config_argument, load_config, validate
from realm_jax.data import encyclopedia
from realm_jax.errors import UserError
from realm_jax.indexing.heartbeat import BUILDER, process_name
from realm_jax.launch.local import Process, Supervisor
from realm_jax.storage import make_folder, publish_folder, read_json, write_json_atomic
from realm_jax.train.recipe import open_run, run_recipe

DEFAULT_WORKDIR = "realm-quickstart"
ENTITIES = 3200
VOCABULARY = 2000
ASYNC = "--config.refresh.mode=async"
# Microbatches on a CPU: the memory for one then fits into a heap of malloc, which is not returned (`host.py`).
MICROBATCHES = 8
RESTARTS, GRACE_SECONDS = 10, 30  # of the index builder
SETTINGS = "settings.json"  # of the encyclopedia, in its folder
EXAMPLES = """examples:
  realm quickstart
  realm quickstart --async --workdir=runs/async
  realm quickstart --config.seed=1 --workdir=runs/seed1

Afterwards: open report.html in the run directory, or ask:  realm ask --workdir=realm-quickstart "question"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm quickstart`."""
    parser.epilog = EXAMPLES
    add_config_argument(parser, "quickstart: two layers of width 64, which train in four to six minutes on two cores")
    add = parser.add_argument
    add(
        "--workdir",
        default=DEFAULT_WORKDIR,
        metavar="DIR",
        help=f"run directory, created or resumed (default: {DEFAULT_WORKDIR})",
    )
    entities_help = f"number of articles of the encyclopedia (default: {ENTITIES})"
    add("--entities", type=int, default=ENTITIES, metavar="N", help=entities_help)
    add("--data-only", action="store_true", help="write WORKDIR/data, for `realm train` and `realm launch`, and stop")
    add("--async", action="store_true", dest="asynchronous", help="embed the corpus in a second process, "
        "`realm build-index`, while training continues")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Prepare the encyclopedia and train the recipe; return 75 after SIGTERM, once the state is saved."""
    if args.asynchronous and any(override.startswith("--config.refresh.mode=") for override in args.overrides):
        raise UserError(f"--async: implies {ASYNC}; omit one of them")
    config = load_config(args.config, [*args.overrides, *([ASYNC] if args.asynchronous else [])], recipe)
    workdir = local_path(args.workdir, "--workdir=")
    config.data.path = config.data.path or str(workdir / "data")
    validate(config)
    make_folder(workdir, "--workdir")
    if config.data.path == str(workdir / "data"):
        make_data(workdir, args.entities, config.seed)
    if args.data_only:
        return 0
    cache_programs()
    opened = open_run(config, workdir)
    if not args.asynchronous:
        return run_recipe(opened, args.command_line)
    # Run `realm build-index` in another process while this one trains; its log is in WORKDIR/logs.
    make_folder(workdir / "logs", "--workdir")
    name = process_name(BUILDER, 0)
    jobs = {name: [Process(name, ["realm", "build-index", f"--workdir={workdir}"], {})]}
    with Supervisor(lambda port: jobs, workdir, RESTARTS, GRACE_SECONDS, echo=False).in_background():
        return run_recipe(opened, args.command_line)


def recipe() -> ConfigDict:
    """Return the config of the quickstart for this machine's devices."""
    config = load_config("quickstart")
    if jax.default_backend() == "cpu" and jax.device_count() == 1:
        config.optimizer.microbatches = MICROBATCHES
    return config


def make_data(workdir: Path, entities: int, seed: int, **others: Any) -> None:
    """Write the encyclopedia as JSONL files to `workdir/text` and prepare `workdir/data` from them.

    Args:
        workdir: the run directory.
        entities: articles of the encyclopedia.
        seed: seed of the encyclopedia.
        **others: other fields of `EncyclopediaSettings`.

    Raises:
        UserError: `workdir/text` was made with other settings.
    """
    text = workdir / "text"
    sizes = {"held_out": max(1, entities // 16), "train_questions": min(4000, entities * 3)}
    settings = encyclopedia.EncyclopediaSettings(seed=seed, entities=entities, **(sizes | others))
    if text.is_dir():
        recorded = read_json(text / SETTINGS)
        for key, value in dataclasses.asdict(settings).items():
            if recorded.get(key) != value:
                raise UserError(
                    f"{text} was made with {key}={recorded.get(key)}, not {value}; use the same value, or another "
                    "--workdir"
                )
    else:
        unfinished = workdir / ".text.partial"
        shutil.rmtree(unfinished, ignore_errors=True)
        encyclopedia.write(encyclopedia.Encyclopedia(settings), unfinished)
        write_json_atomic(unfinished / SETTINGS, dataclasses.asdict(settings))
        publish_folder(unfinished, text)
    questions = [f"{split}={text / f'questions-{split}.jsonl'}" for split in ("train", "dev")]
    prepare(
        text / "passages.jsonl", workdir / "data", questions=questions, pretraining=text / "pretraining.jsonl",
        vocabulary_size=VOCABULARY,
    )  # fmt: skip
