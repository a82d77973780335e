"""The index builder's job: follow a run's exports and decide which generation to build, until the trainer is done.

Either of trainer and builder may start first, and either may be killed and started again. Several processes share the
work; their number may change. How a generation is built is `build.py`. Read `Job.work` next.
"""

import logging
import time
from functools import partial
from typing import Any

import jax

from realm_jax.console import StageProgress
from realm_jax.errors import UserError
from realm_jax.host import Stop
from realm_jax.index import files
from realm_jax.index.build import Builder, Corpus, Rejected
from realm_jax.index.exporter import export_record, to_params
from realm_jax.index.files import (
    Export,
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
from realm_jax.index.heartbeat import BUILDER, TRAINER, Status, StatusWriter, process_name, read_status
from realm_jax.mesh import replicated
from realm_jax.processes import WorkShare
from realm_jax.run import Run
from realm_jax.storage import Damaged, Folder, StorageError

logger = logging.getLogger(__name__)

SILENCE = 3600.0  # seconds without a heartbeat of the trainer after which a builder ends, unless it is to wait
GRACE = 60.0  # seconds to wait after the trainer is done, in case it resumes
LONGEST_PAUSE = 60.0  # seconds between two tries while storage fails
SAFE = "what was written is kept"  # when SIGTERM comes


def run_builder(run: Run, folder: Folder, **options: Any) -> Builder:
    """The builder of a run's generations. options: further fields of `Builder`."""
    c, passages = run.config, run.sources.passages
    segments = tuple((segment.fingerprint, segment.rows) for segment in passages.segments)
    corpus = Corpus(passages.fingerprint, run.sources.tokenizer.fingerprint, segments, run.read_stored)
    return Builder(
        folder, corpus, c.model.dtype, files.CHUNK_ROWS,
        searches=run.scann_config, min_recall=c.scann.min_recall if run.scann_config else 0.0, **options,
    )  # fmt: skip


class Job:
    """One builder process.

    patience: seconds without a heartbeat of the trainer after which it ends.
    """

    def __init__(self, run: Run, folder: Folder, share: WorkShare, patience: float = SILENCE) -> None:
        self._run, self._folder, self._share, self._patience = run, folder, share, patience
        self._newest_first = run.config.refresh.adopt_after < 0
        self._status = StatusWriter(folder, process_name(BUILDER, share.process), Status(""))
        self._damaged: set[int] = set()  # steps whose export was found damaged; the trainer may write it again
        self._seen: tuple[str, int] | None = None  # the last status read from the trainer
        self._moved = False  # whether the trainer's counter moved since this process started
        self._quiet_since = time.monotonic()
        self._timed_out = False  # gave up waiting for the trainer, which may still start

    def work(self, stop: Stop, step: int | None, once: bool) -> None:
        """Build what is due until the trainer is done, or, if `once`, the generation of an export.

        Args:
          stop: SIGTERM, which raises Preempted between two chunks.
          step: that of the export; None for the newest.
          once: end after one generation, and raise UserError if it cannot be built.
        """
        pause, begun, logged = self._folder.poll_seconds, False, False
        with self._status:
            while True:
                try:
                    if not begun:
                        if (trainer := read_status(self._folder, TRAINER)) is not None:
                            self._status.update(run=trainer.run)
                            self._seen = (trainer.run, trainer.counter)
                        self._folder.unstage("index")
                        # A generation that an earlier builder rejected may pass with this one's settings.
                        clear_rejections(self._folder)
                        begun = True
                    export = self._selected_export(step) if once else self._next_export()
                    if export is not None:
                        self._build(export, stop)
                        pause, logged = self._folder.poll_seconds, False
                    if once or (export is None and self._trainer_is_done()):
                        break
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
                    until = time.monotonic() + pause
                    stop.check(SAFE)
                    while (left := until - time.monotonic()) > 0:
                        time.sleep(min(left, 1.0))
                        stop.check(SAFE)
            self._status.update(stage="ended", step=-1, done=not self._timed_out)

    def _selected_export(self, step: int | None) -> Export:
        """The export of a step, or the newest one."""
        for candidate in reversed(export_steps(self._folder)) if step is None else [step]:
            if (export := read_export(self._folder, candidate)) is not None:
                return self._check_compatible(export)
        reason = "nothing to build" if step is None else f"there is no export of step {step}"
        raise UserError(f"{self._folder.path('exports')}: {reason}; start the trainer first")

    def _next_export(self) -> Export | None:
        """The export to build next: what a restarted trainer needs, else the next or the newest, as the mode says."""
        trainer = read_status(self._folder, TRAINER)
        pinned, used = (trainer.pins, trainer.index) if trainer else ((), 0)
        steps = [step for step in export_steps(self._folder) if step >= used or step in pinned]

        def urgency(step: int) -> tuple[bool, bool, int]:
            return step in self._damaged, step not in pinned, -step if self._newest_first else step

        for candidate in sorted(steps, key=urgency):
            try:
                export = read_export(self._folder, candidate)
            except Damaged as fault:  # others wait behind it
                if candidate not in self._damaged:
                    logger.warning("%s; it is skipped", fault)
                self._damaged.add(candidate)
                continue
            if export is None:
                continue
            name = current_name(self._folder, export, self._run.sources.passages.fingerprint)
            if rejection(self._folder, name) is None and read_manifest(self._folder, name) is None:
                return self._check_compatible(export)
            if self._newest_first and candidate not in pinned:
                return None  # the newest one is built; older ones are no longer useful
        return None

    def _check_compatible(self, export: Export) -> Export:
        """Raise UserError for an export of another tokenizer, corpus or tower than the config's."""
        for name, value in export_record(self._run, export.step).items():
            if getattr(export, name) != value:
                raise UserError(
                    f"{self._folder.path(f'exports/{export.step}')} was written by a run with other {name}; give this "
                    "command the trainer's --config and config.data.path, and start it again"
                )
        return export

    def _build(self, export: Export, stop: Stop) -> None:
        """Build the generation of an export, then remove those that nobody needs."""
        self._status.update(wait=True, stage="building", step=export.step)  # so that the trainer keeps it
        try:
            arrays, queries = read_towers(self._folder, export), read_queries(self._folder, export)
        except Damaged:
            self._damaged.add(export.step)
            raise
        self._damaged.discard(export.step)
        towers = jax.device_put(to_params(arrays), replicated(self._run.mesh))  # once, not at every batch
        rows = self._run.sources.passages.stored_rows
        with StageProgress(f"index {export.step}", rows) as bar:
            builder = run_builder(
                self._run, self._folder, share=self._share, check=partial(stop.check, SAFE),
                on_progress=lambda done, total: bar.update(rows * done // total),
            )  # fmt: skip
            newest = builder.build(export, lambda rows: self._run.embed(towers, rows=rows), queries)
        # What stays: the newest few, the one in use, those pinned, and those that will be adopted at their steps.
        if (trainer := read_status(self._folder, TRAINER)) is None:
            return
        last = newest.step if self._newest_first else trainer.index
        names = [name for name in generation_names(self._folder) if export_step(name) <= newest.step]
        for name in names[: -files.KEPT]:
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
