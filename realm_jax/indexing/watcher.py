"""The index watcher: a thread of the trainer that polls for new generations, verifies them and loads them.

Training waits for it only in `wait`. It hands over only files that a manifest lists and that pass their checksums;
anything else is logged once, and the last good generation stays. Read next: `indexing/async_provider.py`, which decides
when a generation is adopted.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Self

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.forward import Index, LoadedIndex
from realm_jax.indexing.exporter import to_params
from realm_jax.indexing.files import (
    MANIFEST,
    IncompatibleIndex,
    Manifest,
    current_name,
    export_of,
    export_step,
    generation_names,
    load_parts,
    load_vectors,
    read_encoders,
    read_export,
    read_manifest,
    read_queries,
    read_rejection,
    reject,
)  # fmt: skip
from realm_jax.indexing.searchers import load_searcher
from realm_jax.mesh import put_with_sharding
from realm_jax.models.layers import Params
from realm_jax.run import Run
from realm_jax.storage import Damaged, Folder, StorageError

logger = logging.getLogger(__name__)


class IndexWatcher:
    """Load the newest requested generation. A context manager: inside, a thread polls for it."""

    def __init__(self, folder: Folder, expected: dict[str, object], run: Run) -> None:
        """Make a watcher that has not started.

        Args:
            folder: the shared folder.
            expected: fields that a manifest must have, such as its corpus.
            run: the run that adopts the generations.
        """
        self._folder, self._expected, self._run = folder, expected, run
        self._requested_steps, self._exactly = range(0), False  # see `request_steps`
        self._ready: LoadedIndex | None = None
        self._logged: set[str] = set()
        self._incompatible: set[str] = set()  # generations that will not become usable while they exist
        self.missing_steps: set[int] = set()  # export steps whose generation, or its export, was requested but missing
        self._lock, self._wake, self._closed = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="index watcher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join()

    def request_steps(self, first: int, last: int, exactly: bool = False) -> None:
        """Poll for generations of export steps first … last from now on, and drop a ready one of another step.

        Args:
            first: first export step.
            last: last export step.
            exactly: add the only step to `missing_steps` if it has no generation.
        """
        with self._lock:
            self._requested_steps, self._exactly = range(first, last + 1), exactly
            if self._ready is not None and self._ready.step not in self._requested_steps:
                self._ready = None

    @property
    def ready(self) -> LoadedIndex | None:
        """Return the newest requested generation that is verified and loaded, or None."""
        with self._lock:
            return self._ready

    def wait(self, seconds: float, should_stop: Callable[[], bool]) -> LoadedIndex | None:
        """Wait until a generation is ready.

        Args:
            seconds: to wait at most.
            should_stop: returns True to stop waiting.

        Returns:
            The generation, or None if none is ready in time.
        """
        deadline = time.monotonic() + seconds
        self._wake.set()
        while (loaded := self.ready) is None and time.monotonic() < deadline and not should_stop():
            time.sleep(min(0.05, self._folder.poll_seconds))
        return loaded

    def load(self, generation: str) -> LoadedIndex:
        """Load a generation by name. Raises Damaged, StorageError."""
        manifest = read_manifest(self._folder, generation)
        if manifest is None:
            raise IncompatibleIndex(f"{self._folder.path('index/' + generation)} is not there")
        for name, expected in self._expected.items():
            actual = getattr(manifest, name)
            if actual != expected:
                raise IncompatibleIndex(
                    f"{self._folder.path('index/' + generation)}: its {name} is {actual}, not {expected}"
                )
        query_encoder, queries = self._query_encoder_and_queries(manifest)
        if self._run.scann_config is None:
            index = generation_index(self._run, self._folder, manifest)._replace(query_encoder=query_encoder)
            return LoadedIndex(index, None, manifest.step, generation, queries=queries)
        passages, stored = self._run.sources.passages, load_vectors(self._folder, manifest)  # [stored rows, width]
        vectors = stored[passages.visible_rows]  # [rows, width]: without rows that an edit of the corpus removed
        try:
            searcher = load_searcher(self._folder, manifest, stored, passages.stored_to_row)
        finally:  # once it is loaded, its files need no space on this machine's disk
            self._folder.remove_local_copies(f"index/{generation}")
        index = self._run.index_without_vectors._replace(query_encoder=query_encoder)
        return LoadedIndex(index, vectors, manifest.step, generation, searcher, queries)

    def _query_encoder_and_queries(self, manifest: Manifest) -> tuple[Params | None, NDArray[np.float32] | None]:
        """Read a generation's export: the query encoder, if `retrieval.query_params` says that it searches, and the
        sample queries [count, width]; None for each that is not needed or gone."""
        needs_query_encoder = self._run.config.retrieval.query_params == "generation"
        try:
            export = export_of(self._folder, manifest)
            if export is not None:
                query_encoder = None
                if needs_query_encoder:
                    name = self._run.model.embedder_names[0]
                    host_params = to_params(read_encoders(self._folder, export))[name]
                    query_encoder = jax.tree.map(put_with_sharding, host_params, self._run.param_shardings[name])
                return query_encoder, read_queries(self._folder, export)
        except Damaged as error:
            self._log_once(f"{error}; generation {manifest.generation} is used without its export")
        if needs_query_encoder:
            raise IncompatibleIndex(
                f"the export of generation {manifest.generation} is gone, with the query encoder that searches it"
            )
        return None, None

    def _watch(self) -> None:
        while not self._closed:
            try:
                self._poll()
            except StorageError as error:
                self._log_once(f"storage: {error}; training continues with its current generation")
            except Exception:  # a thread that died silently would look like a late builder
                logger.exception("polling for generations failed; retrying")
            self._wake.wait(self._folder.poll_seconds)
            self._wake.clear()

    def _poll(self) -> None:
        if (ready := self.ready) is not None and read_rejection(self._folder, ready.generation) is not None:
            # Another process, which loads other rows of it, found them damaged.
            self._log_once(f"generation {ready.generation} was rejected by another process; looking for another")
            with self._lock:
                if self._ready is ready:
                    self._ready = None
        with self._lock:
            steps, exactly, ready_step = self._requested_steps, self._exactly, self._ready.step if self._ready else -1
        names = [name for name in generation_names(self._folder) if export_step(name) in steps]
        if exactly and not names:
            self.missing_steps.add(steps[-1])
        for name in reversed([name for name in names if export_step(name) > ready_step]):
            loaded = self._load_if_valid(name)
            if loaded is not None:
                with self._lock:
                    if loaded.step in self._requested_steps:
                        self._ready = loaded
                return

    def _load_if_valid(self, name: str) -> LoadedIndex | None:
        """Load a generation if it is valid and made by parameters that this run has had; else return None."""
        try:
            export = read_export(self._folder, export_step(name))
        except Damaged as error:
            self._log_once(f"{error}; skipping it")
            return None
        if export is None:
            self.missing_steps.add(export_step(name))
            self._log_once(f"generation {name} has no export yet; skipping it")
            return None
        if current_name(self._folder, export, str(self._expected["corpus"])) != name:
            return None  # made by parameters that this run never had, or found damaged before
        if (rejected := read_rejection(self._folder, name)) is not None:
            self._log_once(f"generation {name} is rejected: {rejected.reason}; start its builder with other settings")
            return None
        try:
            if read_manifest(self._folder, name) is None:
                self._incompatible.discard(name)
                return None
            return None if name in self._incompatible else self.load(name)
        except IncompatibleIndex as error:
            self._incompatible.add(name)
            self._log_once(f"{error}; skipping it")
            return None
        except Damaged as error:
            if MANIFEST not in self._folder.names(f"index/{name}"):
                logger.warning("generation %s was removed while it was read", name)
                return None
            logger.error("generation %s is rejected: %s; keeping the current one", name, error)
            reject(self._folder, name, str(error), retryable=True)
            return None

    def _log_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.warning(message)


def generation_index(run: Run, folder: Folder, manifest: Manifest) -> Index:
    """Return the index of a generation for exact search, of the rows that this process's devices hold.

    Args:
        run: the run that searches.
        folder: the shared folder.
        manifest: manifest of the generation.

    Raises:
        Damaged: a file is missing or damaged.
    """
    # Each slice of the corpus as a range of stored rows, and which of those are visible in the corpus version.
    parts = [run.sources.passages.stored_range(rows) for rows in run.local_corpus_slices]
    vectors = load_parts(folder, manifest, [stored for stored, _ in parts])
    return run.index_of_parts(part[visible] for part, (_, visible) in zip(vectors, parts, strict=True))
