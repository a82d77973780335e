"""The index builder's job: follow a run's exports and decide which generation to build, until the trainer is done.

Trainer and builder may start in any order, and may be killed and started again. Several processes share the work; their
number may change. How a generation is built is `build.py`. Read `Job.work` next.
"""

import logging
import time
from functools import partial
from typing import Any

import jax

from realm_jax.console import StageProgress
from realm_jax.errors import TransientFault, UserError
from realm_jax.host import Stop
from realm_jax.indexing import files
from realm_jax.indexing.build import Builder, Corpus, Rejected
from realm_jax.indexing.exporter import export_record, to_params
from realm_jax.indexing.files import (
    Export,
    clear_rejections,
    current_name,
    export_step,
    export_steps,
    generation_names,
    read_encoders,
    read_export,
    read_manifest,
    read_queries,
    read_rejection,
    remove_generation,
)  # fmt: skip
from realm_jax.indexing.heartbeat import BUILDER, TRAINER, Status, StatusWriter, process_name, read_status
from realm_jax.mesh import replicated
from realm_jax.processes import WorkerSlice
from realm_jax.run import Run
from realm_jax.storage import Damaged, Folder, StorageError

logger = logging.getLogger(__name__)

SILENCE = 3600.0  # seconds without a heartbeat of the trainer after which a builder ends, without --wait
GRACE = 60.0  # seconds to wait after the trainer is done, in case it resumes
LONGEST_PAUSE = 60.0  # seconds between two tries while storage fails
SAFE = "what was written is kept"  # what SIGTERM's message says


def run_builder(run: Run, folder: Folder, **options: Any) -> Builder:
    """Return the builder of a run's generations.

    Args:
        run: on the builder's devices.
        folder: the shared folder.
        **options: further fields of `Builder`.
    """
    config, passages = run.config, run.sources.passages
    segments = tuple((segment.fingerprint, segment.rows) for segment in passages.segments)
    corpus = Corpus(passages.fingerprint, run.sources.tokenizer.fingerprint, segments, run.read_stored)
    return Builder(
        folder, corpus, config.model.dtype, files.CHUNK_ROWS,
        searches=run.scann_config, min_recall=config.scann.min_recall if run.scann_config else 0.0, **options,
    )  # fmt: skip


class Job:
    """One builder process."""

    def __init__(self, run: Run, folder: Folder, worker: WorkerSlice, patience: float = SILENCE) -> None:
        """Make the job; `work` does it.

        Args:
            run: on the builder's devices.
            folder: the shared folder.
            worker: this process among the builder's processes.
            patience: seconds without a heartbeat of the trainer after which it ends.
        """
        self._run, self._folder, self._worker, self._patience = run, folder, worker, patience
        self._newest_first = run.config.refresh.adopt_after < 0
        self._status = StatusWriter(folder, process_name(BUILDER, worker.process), Status(""))
        self._damaged_exports: set[int] = set()  # steps whose export was found damaged; the trainer may write it again
        self._last_heartbeat: tuple[str, int] | None = None  # run and counter of the trainer
        self._heartbeat_moved = False  # the trainer's counter has moved since this process started
        self._quiet_since = time.monotonic()
        self._timed_out = False  # no longer waits for the trainer, which may still start

    def work(self, stop: Stop, step: int | None, once: bool) -> None:
        """Build the due generations until the trainer is done, or, if `once`, the generation of one export.

        Args:
            stop: SIGTERM, which raises Preempted between two chunks.
            step: step of the export; None for the newest.
            once: end after one generation.

        Raises:
            Preempted: after SIGTERM.
            UserError: an export is not the run's, or, if `once`, its generation cannot be built.
        """
        pause, is_prepared, logged = self._folder.poll_seconds, False, False
        with self._status:
            while True:
                try:
                    if not is_prepared:
                        if (trainer := read_status(self._folder, TRAINER)) is not None:
                            self._status.update(run=trainer.run)
                            self._last_heartbeat = (trainer.run, trainer.counter)
                        self._folder.remove_local_copies("index")
                        # A generation that an earlier builder rejected may pass with this one's settings.
                        clear_rejections(self._folder)
                        is_prepared = True
                    export = self._selected_export(step) if once else self._next_export()
                    if export is not None:
                        self._build(export, stop)
                        pause, logged = self._folder.poll_seconds, False
                    if once or (export is None and self._trainer_is_done()):
                        break
                    self._status.update(stage="waiting" if export is None else "building", step=-1)
                except Rejected as error:
                    if once:
                        raise UserError(str(error)) from None
                    logger.error("%s", error)
                except (StorageError, Damaged) as error:
                    if once:
                        fault = TransientFault if isinstance(error, StorageError) else UserError
                        raise fault(f"{error}; run the command again to resume") from None
                    logger.warning("%s; trying again", error)
                    pause, export = min(pause * 2, LONGEST_PAUSE), None
                if export is None:
                    if not logged:
                        logger.info("waiting for exports in %s", self._folder.path("exports"))
                        logged = True
                    deadline = time.monotonic() + pause
                    stop.check(SAFE)
                    while (remaining := deadline - time.monotonic()) > 0:
                        time.sleep(min(remaining, 1.0))
                        stop.check(SAFE)
            self._status.update(stage="ended", step=-1, done=not self._timed_out)

    def _selected_export(self, step: int | None) -> Export:
        """Return the export of a step, or the newest one. Raises UserError."""
        for candidate in reversed(export_steps(self._folder)) if step is None else [step]:
            if (export := read_export(self._folder, candidate)) is not None:
                return self._check_compatible(export)
        reason = "nothing to build" if step is None else f"there is no export of step {step}"
        raise UserError(f"{self._folder.path('exports')}: {reason}; start the trainer first")

    def _next_export(self) -> Export | None:
        """Return the export to build next, or None.

        The export that a restarted trainer needs comes first, then the newest one, or the oldest with `adopt_after`.
        """
        trainer = read_status(self._folder, TRAINER)
        pinned, used = (trainer.pins, trainer.index) if trainer else ((), 0)
        steps = [step for step in export_steps(self._folder) if step >= used or step in pinned]

        # Pinned exports first, damaged ones last.
        direction = -1 if self._newest_first else 1
        order = sorted(steps, key=lambda step: (step in self._damaged_exports, step not in pinned, direction * step))
        for candidate in order:
            try:
                export = read_export(self._folder, candidate)
            except Damaged as error:  # other exports must not wait for it
                if candidate not in self._damaged_exports:
                    logger.warning("%s; skipping it", error)
                self._damaged_exports.add(candidate)
                continue
            if export is None:
                continue
            name = current_name(self._folder, export, self._run.sources.passages.fingerprint)
            if read_rejection(self._folder, name) is None and read_manifest(self._folder, name) is None:
                return self._check_compatible(export)
            if self._newest_first and candidate not in pinned:
                return None  # the newest one is built; older ones are no longer useful
        return None

    def _check_compatible(self, export: Export) -> Export:
        """Return an export. Raises UserError if its tokenizer, corpus or encoder is not the config's."""
        for name, value in export_record(self._run, export.step).items():
            if getattr(export, name) != value:
                raise UserError(
                    f"{self._folder.path(f'exports/{export.step}')} was written by a run with other {name}; give this "
                    "command the trainer's --config and config.data.path, and start it again"
                )
        return export

    def _build(self, export: Export, stop: Stop) -> None:
        """Build the generation of an export, then remove generations that are no longer needed."""
        self._status.update(wait=True, stage="building", step=export.step)  # so that the trainer keeps the export
        try:
            arrays, queries = read_encoders(self._folder, export), read_queries(self._folder, export)
        except Damaged:
            self._damaged_exports.add(export.step)
            raise
        self._damaged_exports.discard(export.step)
        encoders = jax.device_put(to_params(arrays), replicated(self._run.mesh))  # once, not for every batch
        rows = self._run.sources.passages.stored_rows
        with StageProgress(f"index {export.step}", rows) as bar:
            builder = run_builder(
                self._run, self._folder, worker=self._worker, check=partial(stop.check, SAFE),
                on_progress=lambda done, total: bar.update(rows * done // total),
            )  # fmt: skip
            newest = builder.build(export, lambda rows: self._run.embed(encoders, rows=rows), queries)
        # The newest few stay, the one in use, pinned ones, and those that will be adopted at their steps.
        if (trainer := read_status(self._folder, TRAINER)) is None:
            return
        last = newest.step if self._newest_first else trainer.index
        names = [name for name in generation_names(self._folder) if export_step(name) <= newest.step]
        for name in names[: -files.RETAINED_GENERATIONS]:
            step = export_step(name)
            if step <= last and step not in (*trainer.pins, trainer.index) and name != newest.generation:
                remove_generation(self._folder, name)

    def _trainer_is_done(self) -> bool:
        """Return True if the trainer needs no further index, or sent no heartbeat for too long by the local clock."""
        trainer = read_status(self._folder, TRAINER)
        heartbeat = None if trainer is None else (trainer.run, trainer.counter)
        if heartbeat != self._last_heartbeat:
            self._last_heartbeat, self._heartbeat_moved, self._quiet_since = heartbeat, True, time.monotonic()
        quiet = time.monotonic() - self._quiet_since
        # A trainer that finished before this process started may be about to resume from an earlier checkpoint.
        done = trainer is not None and not trainer.needs_index
        if done and (self._heartbeat_moved or quiet > min(GRACE, self._patience)):
            logger.info("the trainer needs no further index")
            return True
        if quiet > self._patience:
            logger.warning("no heartbeat of the trainer for %g s; ending", self._patience)
            self._timed_out = True
            return True
        return False
