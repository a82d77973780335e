"""`realm quickstart`: the whole of REALM on one machine, from text to answered questions.

encyclopedia → prepared folder → warm-up → inverse cloze task → REALM with refreshes → fine-tuning → results and report.
Every stage is skipped when it is done and gone on with when it was cut off, so the same command always ends the same.
"""

import argparse
import logging
import shutil
from pathlib import Path
from typing import Any

from rich.table import Table

from realm_jax.config import validate
from realm_jax.console import console
from realm_jax.corpus import encyclopedia
from realm_jax.evaluation.predict import Evaluator
from realm_jax.jobs.controls import run_controls
from realm_jax.jobs.flags import add_config_argument, load_config
from realm_jax.jobs.prepare import prepare
from realm_jax.jobs.results import measure_baselines, write_results
from realm_jax.jobs.train import PREEMPTED, dev_questions, open_run, set_up_jax, train
from realm_jax.recipes import quickstart
from realm_jax.storage import publish_folder
from realm_jax.training.loop import Preempted

logger = logging.getLogger(__name__)

DEFAULT_WORKDIR = "realm-quickstart"
ENTITIES = 3200
VOCABULARY = 2000
EXAMPLES = """examples:
  realm quickstart
  realm quickstart --controls --config.seed=1 --workdir=runs/seed1

Afterwards: open report.html in the run folder, or ask:  realm ask --workdir=realm-quickstart "question"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm quickstart`."""
    parser.epilog = EXAMPLES
    add_config_argument(parser, "two layers of 64 and about eight minutes on two cores")
    add = parser.add_argument
    add("--workdir", default=DEFAULT_WORKDIR, metavar="DIR", help=f"folder of the run (default: {DEFAULT_WORKDIR})")
    add("--entities", type=int, default=ENTITIES, metavar="N", help=f"articles of the encyclopedia ({ENTITIES})")
    add("--controls", action="store_true", help="also train what should not reach REALM: no gradient to the "
        "retriever, more ICT steps instead, no passages")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """The whole recipe; exit code 75 after SIGTERM, once the state is saved."""
    config = load_config(args.config, args.overrides, quickstart)
    workdir = Path(args.workdir)
    config.data.path = config.data.path or str(workdir / "data")
    validate(config)
    if config.data.path == str(workdir / "data"):
        make_data(workdir, args.entities, config.seed)
    set_up_jax()
    run = open_run(config, workdir)
    command = f"realm quickstart --workdir={workdir}" + " --controls" * args.controls
    try:
        results = run_all(run, args.controls, command)
    except Preempted as reason:
        logger.warning("%s", reason)
        return PREEMPTED
    show(results, workdir)
    return 0


def make_data(workdir: Path, entities: int, seed: int) -> None:
    """The encyclopedia as ordinary JSONL files in `workdir/text`, prepared into `workdir/data`."""
    text = workdir / "text"
    settings = encyclopedia.EncyclopediaSettings(
        seed=seed, entities=entities, held_out=max(1, entities // 20), train_questions=min(4000, entities * 3)
    )
    if not text.is_dir():
        unfinished = workdir / ".text.partial"
        shutil.rmtree(unfinished, ignore_errors=True)
        encyclopedia.write(encyclopedia.lazily(settings), unfinished)
        publish_folder(unfinished, text)
    questions = [f"{split}={text / f'questions-{split}.jsonl'}" for split in ("train", "dev")]
    prepare(
        text / "passages.jsonl", workdir / "data", questions=questions, pretraining=text / "pretraining.jsonl",
        vocabulary_size=VOCABULARY,
    )  # fmt: skip


def run_all(run: Any, controls: bool, command: str) -> dict[str, Any]:
    """Baselines, the recipe, the controls if wanted, and the results."""
    evaluator = Evaluator(run, dev_questions(run))
    measure_baselines(run, evaluator, run.initial_params())
    params = train(run)
    if controls:
        run_controls(run, evaluator)
    return write_results(run, params, evaluator, command)


def show(results: dict[str, Any], workdir: Path) -> None:
    """The results as a table, and where to look next."""
    table = Table(title="Results", title_justify="left", show_header=False)
    for name, value in results.get("recall@5", {}).items():
        table.add_row("recall@5", name, f"{value:.3f}")
    for name, value in results["exact_match"].items():
        table.add_row("exact match", name, f"{value:.3f}")
    if "retrieval_utility" in results:
        table.add_row("retrieval utility", "nats", f"{results['retrieval_utility']:.2f}")
    for name, value in results["seconds"].items():
        table.add_row("seconds", name, f"{value:.0f}")
    console().print(table)
    console().print(
        f'report: {workdir / "report.html"}\nask:    realm ask --workdir={workdir} "question"', soft_wrap=True
    )
