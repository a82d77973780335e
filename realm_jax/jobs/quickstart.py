"""`realm quickstart`: the whole of REALM on one machine, from text to answered questions.

encyclopedia → prepared folder → warm-up → inverse cloze task → REALM with refreshes → fine-tuning → results and report.
Every stage is skipped when it is done and gone on with when it was cut off, so the same command always ends the same.
"""

import argparse
import dataclasses
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from realm_jax.config import validate
from realm_jax.corpus import encyclopedia
from realm_jax.errors import USER_ERROR, UserError
from realm_jax.jobs.flags import add_config_argument, load_config
from realm_jax.jobs.opening import open_run, recorded_config, set_up_jax
from realm_jax.jobs.prepare import prepare
from realm_jax.jobs.recipe import run_recipe
from realm_jax.recipes import quickstart
from realm_jax.storage import make_folder, publish_folder, read_json, write_json_atomic

logger = logging.getLogger(__name__)

DEFAULT_WORKDIR = "realm-quickstart"
ENTITIES = 3200
VOCABULARY = 2000
POLL_SECONDS = 0.2  # between two looks at the shared folder, since a generation takes a second
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between two starts of a builder that fails
SETTINGS = "settings.json"  # of the encyclopedia, beside its files
EXAMPLES = """examples:
  realm quickstart
  realm quickstart --async --workdir=runs/async
  realm quickstart --controls --config.seed=1 --workdir=runs/seed1

Afterwards: open report.html in the run folder, or ask:  realm ask --workdir=realm-quickstart "question"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm quickstart`."""
    parser.epilog = EXAMPLES
    add_config_argument(parser, "two layers of 64, seven to ten minutes on two cores")
    add = parser.add_argument
    add("--workdir", default=DEFAULT_WORKDIR, metavar="DIR", help=f"folder of the run (default: {DEFAULT_WORKDIR})")
    add("--entities", type=int, default=ENTITIES, metavar="N", help=f"articles of the encyclopedia ({ENTITIES})")
    add("--data-only", action="store_true", help="make WORKDIR/data and end: for `realm train` and `realm launch`")
    add("--async", action="store_true", dest="asynchronous", help="embed the corpus in a second process, "
        "`realm build-index`, while training goes on")  # fmt: skip
    add("--controls", action="store_true", help="also train what should not reach REALM: no gradient to the "
        "retriever, more ICT steps instead, no passages")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """The whole recipe; exit code 75 after SIGTERM, once the state is saved."""
    config = load_config(args.config, args.overrides, quickstart)
    workdir = Path(args.workdir)
    config.data.path = config.data.path or str(workdir / "data")
    validate(config)
    make_folder(workdir, "--workdir")
    _refresh_beside(config, args.overrides, workdir, args.asynchronous)
    if config.data.path == str(workdir / "data"):
        make_data(workdir, args.entities, config.seed)
    if args.data_only:
        return 0
    set_up_jax()
    if not args.asynchronous:
        return run_recipe(open_run(config, workdir), args.controls, args.command_line)
    opened = open_run(config, workdir)
    with builder_beside(workdir, [sys.executable, "-m", "realm_jax.cli", "build-index", f"--workdir={workdir}"]):
        return run_recipe(opened, args.controls, args.command_line)


def _refresh_beside(config: ConfigDict, overrides: list[str], workdir: Path, beside: bool) -> None:
    """Set what `--async` means in the config. Raises UserError where an override or the run itself says otherwise."""
    mode = "async" if beside else config.refresh.mode
    given = next((override for override in overrides if override.startswith("--config.refresh.mode=")), "")
    if given and config.refresh.mode != mode:
        raise UserError(f"--async: {given} says otherwise; leave one of them out")
    if (workdir / "config.json").is_file() and recorded_config(workdir).refresh.mode != mode:
        way = "without" if beside else "with"
        raise UserError(f"--async: the run in {workdir} began {way} it; go on as it began, or name another --workdir")
    config.refresh.mode = mode
    if beside and not any(override.startswith("--config.refresh.poll_seconds=") for override in overrides):
        config.refresh.poll_seconds = POLL_SECONDS


@contextmanager
def builder_beside(workdir: Path, command: list[str]) -> Iterator[None]:
    """The builder of a run as a process of its own, which is started again when it fails; its log lies in
    WORKDIR/jobs/builder.log."""
    (workdir / "jobs").mkdir(exist_ok=True)
    over = threading.Event()
    with open(workdir / "jobs" / "builder.log", "ab") as log:

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

        running = [start()]

        def watch() -> None:
            pause = FIRST_PAUSE
            while not over.wait(pause):
                code = running[0].poll()
                if code == USER_ERROR:
                    logger.error("the builder cannot work: %s says why; training waits for it in vain", log.name)
                    return
                if code not in (None, 0):
                    logger.warning("the builder ended with %s; starting it again (%s)", code, log.name)
                    running[0], pause = start(), min(2 * pause, LONGEST_PAUSE)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
            running[0].terminate()
            try:
                running[0].wait(30)
            except subprocess.TimeoutExpired:
                running[0].kill()


def make_data(workdir: Path, entities: int, seed: int, **others: Any) -> None:
    """The encyclopedia as ordinary JSONL files in `workdir/text`, prepared into `workdir/data`.

    others: of `EncyclopediaSettings`. Raises UserError when the files there were made with other settings.
    """
    text = workdir / "text"
    sizes = {"held_out": max(1, entities // 16), "train_questions": min(4000, entities * 3)}
    settings = encyclopedia.EncyclopediaSettings(seed=seed, entities=entities, **(sizes | others))
    if text.is_dir():
        _check_settings(text, dataclasses.asdict(settings))
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


def _check_settings(text: Path, settings: dict[str, Any]) -> None:
    made = read_json(text / SETTINGS)
    for key, value in settings.items():
        if made.get(key) != value:
            raise UserError(
                f"{text} was made with {key}={made.get(key)}, not {value}; ask for the same, or for another --workdir"
            )
