"""`realm build-index`: a job that runs alongside training, re-embeds the corpus and publishes index generations.

It follows the exports of the run in --workdir and needs nothing else of the trainer; either may start first, and either
may be killed and started again. Several processes share the work (`--process`, `--processes`); their number may change.
How a generation is built is `realm_jax/refresh/builder.py`; the files are explained in
`realm_jax/refresh/generations.py`.
"""

import argparse
import logging
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from realm_jax import processes
from realm_jax.assemble import make_run
from realm_jax.cache import cache_programs
from realm_jax.config import default, validate
from realm_jax.config_flags import add_config_argument, load_config
from realm_jax.console import StageProgress
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.host import Stop
from realm_jax.mesh import replicated
from realm_jax.refresh import generations
from realm_jax.refresh.builder import Builder, Corpus, Rejected, for_embedding
from realm_jax.refresh.exporter import export_record, to_params
from realm_jax.refresh.generations import (
    Export,
    Manifest,
    clear_rejections,
    current_name,
    export_step,
    export_steps,
    generation_names,
    read_export,
    read_manifest,
    read_queries,
    read_towers,
    rejection,
    remove_generation,
)  # fmt: skip
from realm_jax.refresh.status import BUILDER, TRAINER, Status, StatusWriter, process_name, read_status
from realm_jax.retrieval.scann import check_scann
from realm_jax.run import Run
from realm_jax.storage import Damaged, Folder, StorageError, make_folder
from realm_jax.train.index_source import shared_folder
from realm_jax.train.init_from import fill_from_pretrained
from realm_jax.train.workdir import recorded_config, recorded_corpus

logger = logging.getLogger(__name__)

SILENCE = 3600.0  # seconds without a heartbeat of the trainer after which a builder ends, unless it is to wait
GRACE = 60.0  # seconds to wait after the trainer is done, in case it resumes
LONGEST_PAUSE = 60.0  # seconds between two tries while storage fails
SAFE = "what was written is kept"  # when SIGTERM comes
EXAMPLES = """examples:
  realm build-index --config=realm_wiki --config.data.path=data/wiki --workdir=runs/wiki
  realm build-index --workdir=runs/wiki --process=1 --processes=4         the second of four; the run is there already
  realm build-index --workdir=runs/wiki --once                            the newest export, then end

The config is the trainer's. Run the same command again to resume.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm build-index`."""
    parser.epilog = EXAMPLES
    add_config_argument(parser, "the one that the run in --workdir has recorded, else the paper's sizes")
    parser.add_argument("--workdir", required=True, metavar="DIR", help="folder of the run that trains")
    processes.add_share_arguments(parser)
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait for the trainer until this command is stopped, not until an hour has passed without its heartbeat",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--once", action="store_true", help="build the generation of the newest export, then end")
    which.add_argument("--step", type=int, metavar="S", help="build the generation of export step S, then end")


def run(args: argparse.Namespace) -> None:
    """Build. Raises Preempted after SIGTERM."""
    share = processes.work_share(args)
    config = load_config(args.config, args.overrides, lambda: _recorded_or_default(Path(args.workdir)))
    validate(config)
    config = fill_from_pretrained(config, Path(args.workdir), with_reader=False)
    if config.retrieval.backend == "scann":
        check_scann()
    make_folder(Path(args.workdir), "--workdir")
    cache_programs()
    sources = open_sources(config.data.path, recorded_corpus(Path(args.workdir)))
    opened = make_run(for_embedding(config, jax.local_device_count()), Path(args.workdir), sources, jax.local_devices())
    job = Job(opened, shared_folder(opened), share, math.inf if args.wait else SILENCE)
    with Stop() as stop:
        job.work(stop, args.step, args.once or args.step is not None)


def _recorded_or_default(workdir: Path) -> ConfigDict:
    """The config of the run that is there already, so that the builder of a run needs its folder alone."""
    return recorded_config(workdir) if (workdir / "config.json").is_file() else default()


def run_builder(run: Run, folder: Folder, **options: Any) -> Builder:
    """The builder of a run's generations. options: further fields of `Builder`."""
    c, passages = run.config, run.sources.passages
    segments = tuple((segment.fingerprint, segment.rows) for segment in passages.segments)
    corpus = Corpus(passages.fingerprint, run.sources.tokenizer.fingerprint, segments, run.read_stored)
    return Builder(
        folder, corpus, c.model.dtype, generations.CHUNK_ROWS,
        searches=run.scann_config, min_recall=c.scann.min_recall if run.scann_config else 0.0, **options,
    )  # fmt: skip


class Job:
    """One builder process: follows exports until the trainer is done."""

    def __init__(self, run: Run, folder: Folder, share: processes.WorkShare, patience: float = SILENCE) -> None:
        """patience: seconds without a heartbeat of the trainer after which it ends."""
        self._run, self._folder, self._share, self._patience = run, folder, share, patience
        self._options = run.config.refresh
        self._passages = run.sources.passages
        self._status = StatusWriter(folder, process_name(BUILDER, share.process), Status(""))
        self._seen: tuple[str, int] | None = None  # the last status read from the trainer
        self._moved = False  # whether the trainer's counter moved since this process started
        self._damaged: set[int] = set()  # steps whose export was found damaged; the trainer may write it again
        self._quiet_since = time.monotonic()
        self._timed_out = False  # gave up waiting for the trainer, which may still start

    def work(self, stop: Stop, step: int | None, once: bool) -> None:
        """Build what is due until the trainer is done, or one generation."""
        with self._status:
            self._work(stop, step, once)
            self._status.update(stage="ended", step=-1, done=not self._timed_out)

    def _work(self, stop: Stop, step: int | None, once: bool) -> None:
        pause = self._folder.poll_seconds
        begun, logged = False, False
        while True:
            try:
                if not begun:
                    self._begin()
                    begun = True
                export = self._selected_export(step) if once else self._next_export()
                if export is not None:
                    self._build(export, stop)
                    pause, logged = self._folder.poll_seconds, False
                if once or (export is None and self._trainer_is_done()):
                    return
                self._status.update(stage="waiting" if export is None else "building", step=-1)
            except Rejected as fault:
                if once:
                    raise UserError(str(fault)) from None
                logger.error("%s", fault)
            except (StorageError, Damaged) as fault:
                if once:
                    raise UserError(f"{fault}; run the command again to resume") from None
                logger.warning("%s; trying again", fault)
                pause, export = min(pause * 2, LONGEST_PAUSE), None
            if export is None:
                if not logged:
                    logger.info("waiting for exports in %s", self._folder.path("exports"))
                    logged = True
                self._pause(pause, stop)

    def _begin(self) -> None:
        trainer = read_status(self._folder, TRAINER)
        if trainer is not None:
            self._status.update(run=trainer.run)
            self._seen = (trainer.run, trainer.counter)
        self._folder.unstage("index")
        # A generation that an earlier builder rejected may pass with this one's settings.
        clear_rejections(self._folder)

    def _pause(self, seconds: float, stop: Stop) -> None:
        until = time.monotonic() + seconds
        while True:
            stop.check(SAFE)
            if (left := until - time.monotonic()) <= 0:
                return
            time.sleep(min(left, 1.0))

    def _selected_export(self, step: int | None) -> Export:
        """The export of a step, or the newest one."""
        steps = [step] if step is not None else reversed(export_steps(self._folder))
        for candidate in steps:
            export = read_export(self._folder, candidate)
            if export is not None:
                return self._check_compatible(export)
        what = "nothing to build" if step is None else f"there is no export of step {step}"
        raise UserError(f"{self._folder.path('exports')}: {what}; start the trainer first")

    def _next_export(self) -> Export | None:
        """The export to build next: what a restarted trainer needs, else the next or the newest, as the mode says."""
        trainer = read_status(self._folder, TRAINER)
        pinned, used = (trainer.pins, trainer.index) if trainer else ((), 0)
        steps = [step for step in export_steps(self._folder) if step >= used or step in pinned]
        newest_first = self._options.adopt_after < 0

        def urgency(step: int) -> tuple[bool, bool, int]:
            return step in self._damaged, step not in pinned, -step if newest_first else step

        for candidate in sorted(steps, key=urgency):
            export = self._readable_export(candidate)
            if export is not None:
                name = current_name(self._folder, export, self._passages.fingerprint)
                if rejection(self._folder, name) is None and read_manifest(self._folder, name) is None:
                    return self._check_compatible(export)
            if newest_first and export is not None and candidate not in pinned:
                return None  # the newest one is built; older ones are no longer useful
        return None

    def _readable_export(self, step: int) -> Export | None:
        try:
            return read_export(self._folder, step)
        except Damaged as fault:  # others wait behind it
            if step not in self._damaged:
                logger.warning("%s; it is skipped", fault)
            self._damaged.add(step)
            return None

    def _check_compatible(self, export: Export) -> Export:
        """Raises UserError for an export of another tokenizer, corpus or tower than the config's."""
        for name, value in export_record(self._run, export.step).items():
            if getattr(export, name) != value:
                raise UserError(
                    f"{self._folder.path(f'exports/{export.step}')} was written by a run with other {name}; give this "
                    "command the trainer's --config and config.data.path, and start it again"
                )
        return export

    def _build(self, export: Export, stop: Stop) -> None:
        self._status.update(wait=True, stage="building", step=export.step)  # so that the trainer keeps it
        try:
            arrays, queries = read_towers(self._folder, export), read_queries(self._folder, export)
        except Damaged:
            self._damaged.add(export.step)
            raise
        self._damaged.discard(export.step)
        towers = jax.device_put(to_params(arrays), replicated(self._run.mesh))  # once, not at every batch
        with StageProgress(f"index {export.step}", self._passages.stored_rows) as bar:

            def on_progress(done: int, total: int) -> None:
                bar.update(self._passages.stored_rows * done // total)

            check = partial(stop.check, SAFE)
            builder = run_builder(self._run, self._folder, share=self._share, check=check, on_progress=on_progress)
            manifest = builder.build(export, lambda rows: self._run.embed(towers, rows=rows), queries)
        self._prune(manifest)

    def _prune(self, newest: Manifest) -> None:
        """Remove generations that nobody needs: all but the newest few, the one in use, those pinned, and those that
        will be adopted at their steps."""
        trainer = read_status(self._folder, TRAINER)
        if trainer is None:
            return
        last = newest.step if self._options.adopt_after < 0 else trainer.index
        names = [name for name in generation_names(self._folder) if export_step(name) <= newest.step]
        for name in names[: -generations.KEPT]:
            step = export_step(name)
            if step <= last and step not in (*trainer.pins, trainer.index) and name != newest.generation:
                remove_generation(self._folder, name)

    def _trainer_is_done(self) -> bool:
        """Whether the trainer needs no further index, or has sent no heartbeat for too long (by the local clock)."""
        trainer = read_status(self._folder, TRAINER)
        now = None if trainer is None else (trainer.run, trainer.counter)
        if now != self._seen:
            self._seen, self._moved, self._quiet_since = now, True, time.monotonic()
        quiet = time.monotonic() - self._quiet_since
        # A trainer that finished before this process started may be about to resume from an earlier checkpoint.
        done = trainer is not None and not trainer.needs_index
        if done and (self._moved or quiet > min(GRACE, self._patience)):
            logger.info("the trainer needs no further index")
            return True
        if quiet > self._patience:
            logger.warning("no heartbeat of the trainer for %g s; ending", self._patience)
            self._timed_out = True
            return True
        return False
