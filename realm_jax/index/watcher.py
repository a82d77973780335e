"""The index watcher: a thread of the trainer that polls for new generations, verifies them and loads them.

Training never waits for it unless it asks to (`wait`). Only what a manifest lists, and what proves to be what it says,
is ever handed over; anything else is logged once, and the last good generation stays. Read next:
`index/async_provider.py`, which decides when a generation is adopted.
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
from realm_jax.index.exporter import to_params
from realm_jax.index.files import (
    MANIFEST,
    Arrays,
    IncompatibleIndex,
    Manifest,
    current_name,
    export_of,
    export_step,
    generation_names,
    load_parts,
    load_vectors,
    read_export,
    read_manifest,
    read_queries,
    read_towers,
    reject,
    rejection,
)  # fmt: skip
from realm_jax.index.searchers import load_searcher
from realm_jax.mesh import put_with_sharding
from realm_jax.models.layers import Params
from realm_jax.run import Run
from realm_jax.storage import Damaged, Folder, StorageError

logger = logging.getLogger(__name__)


class IndexWatcher:
    """Loads the newest generation that is wanted. A context manager: inside, a thread looks again and again."""

    def __init__(self, folder: Folder, expected: dict[str, object], run: Run) -> None:
        """expected: entries that a manifest must have, such as its corpus."""
        self._folder, self._expected, self._run = folder, expected, run
        self._wanted, self._exactly = range(0), False  # see `want`
        self._ready: LoadedIndex | None = None
        self._logged: set[str] = set()
        self._incompatible: set[str] = set()  # generations that will not become usable while they are there
        self.missing_steps: set[int] = set()  # export steps whose generation, or its export, was wanted but not there
        self._lock, self._wake, self._closed = threading.Lock(), threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="index watcher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join()

    def want(self, first: int, last: int, exactly: bool = False) -> None:
        """Look for generations of export steps first … last; another one that is ready goes. exactly: for that of one
        step, whose absence is to be noted."""
        with self._lock:
            self._wanted, self._exactly = range(first, last + 1), exactly
            if self._ready is not None and self._ready.step not in self._wanted:
                self._ready = None

    @property
    def ready(self) -> LoadedIndex | None:
        """The newest wanted generation that is verified and loaded."""
        with self._lock:
            return self._ready

    def wait(self, seconds: float, asked: Callable[[], bool]) -> LoadedIndex | None:
        """`ready`, as soon as there is one; None after `seconds`, or when `asked` to stop waiting."""
        until = time.monotonic() + seconds
        self._wake.set()
        while (found := self.ready) is None and time.monotonic() < until and not asked():
            time.sleep(min(0.05, self._folder.poll_seconds))
        return found

    def load(self, generation: str) -> LoadedIndex:
        """A generation by name. Raises Damaged, StorageError."""
        manifest = read_manifest(self._folder, generation)
        if manifest is None:
            raise IncompatibleIndex(f"{self._folder.path('index/' + generation)} is not there")
        for name, value in self._expected.items():
            found = getattr(manifest, name)
            if found != value:
                raise IncompatibleIndex(
                    f"{self._folder.path('index/' + generation)}: its {name} is {found}, not {value}"
                )
        tower, queries = self._exported(manifest)
        if self._run.scann_config is None:
            index = generation_index(self._run, self._folder, manifest)._replace(tower=tower)
            return LoadedIndex(index, None, manifest.step, generation, queries=queries)
        passages, stored = self._run.sources.passages, load_vectors(self._folder, manifest)
        vectors = stored[passages.visible_rows]
        try:
            searcher = load_searcher(self._folder, manifest, stored, passages.stored_to_row)
        finally:  # loaded, it needs no room on this machine's disk
            self._folder.unstage(f"index/{generation}")
        index = self._run.index_without_vectors._replace(tower=tower)
        return LoadedIndex(index, vectors, manifest.step, generation, searcher, queries)

    def _exported(self, manifest: Manifest) -> tuple[Params | None, NDArray[np.float32] | None]:
        """What the trainer takes of a generation's export: the query embedder, where `retrieval.query_params` says that
        it searches, and the sample queries, if they are still there."""
        needs_tower = self._run.config.retrieval.query_params == "generation"
        try:
            export = export_of(self._folder, manifest)
            if export is not None:
                towers = read_towers(self._folder, export) if needs_tower else None
                return None if towers is None else self._query_tower(towers), read_queries(self._folder, export)
        except Damaged as fault:
            self._log_once(f"{fault}; generation {manifest.generation} is used without its export")
        if needs_tower:
            raise IncompatibleIndex(
                f"the export of generation {manifest.generation} is gone, with the query tower that searches it"
            )
        return None, None

    def _query_tower(self, towers: Arrays) -> Params:
        name = self._run.model.embedder_names[0]
        return jax.tree.map(put_with_sharding, to_params(towers)[name], self._run.param_shardings[name])

    def _watch(self) -> None:
        while not self._closed:
            try:
                self._look()
            except StorageError as fault:
                self._log_once(f"storage: {fault}; training continues with its current generation")
            except Exception:  # a thread that died silently would look like a late builder
                logger.exception("polling for generations failed; retrying")
            self._wake.wait(self._folder.poll_seconds)
            self._wake.clear()

    def _look(self) -> None:
        if (ready := self.ready) is not None and rejection(self._folder, ready.generation) is not None:
            self._drop(ready)
        with self._lock:
            wanted, exactly, have = self._wanted, self._exactly, self._ready.step if self._ready else -1
        names = [name for name in generation_names(self._folder) if export_step(name) in wanted]
        if exactly and not names:
            self.missing_steps.add(wanted[-1])
        names = [name for name in names if export_step(name) > have]
        for name in reversed(names):
            loaded = self._try(name)
            if loaded is not None:
                with self._lock:
                    if loaded.step in self._wanted:
                        self._ready = loaded
                return

    def _drop(self, refused: LoadedIndex) -> None:
        """Give up what is ready: another process, which loads other rows of it, found them damaged."""
        self._log_once(f"generation {refused.generation} was refused by another process; another is looked for")
        with self._lock:
            if self._ready is refused:
                self._ready = None

    def _try(self, name: str) -> LoadedIndex | None:
        """A generation if it is valid and of parameters that this run has had."""
        try:
            export = read_export(self._folder, export_step(name))
        except Damaged as fault:
            self._log_once(f"{fault}; it is skipped")
            return None
        if export is None:
            self.missing_steps.add(export_step(name))
            self._log_once(f"generation {name} has no export, perhaps not yet; it is skipped")
            return None
        if current_name(self._folder, export, str(self._expected["corpus"])) != name:
            return None  # of parameters that this run never had, or found damaged before
        if (refused := rejection(self._folder, name)) is not None:
            self._log_once(f"generation {name} is refused: {refused['reason']}; start its builder with other settings")
            return None
        try:
            if read_manifest(self._folder, name) is None:
                self._incompatible.discard(name)
                return None
            return None if name in self._incompatible else self.load(name)
        except IncompatibleIndex as fault:
            self._incompatible.add(name)
            self._log_once(f"{fault}; it is skipped")
            return None
        except Damaged as fault:
            if MANIFEST not in self._folder.names(f"index/{name}"):
                logger.warning("generation %s was removed while it was read", name)
                return None
            logger.error("generation %s is refused: %s; the last good one stays", name, fault)
            reject(self._folder, name, str(fault), again=True)
            return None

    def _log_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.warning(message)


def generation_index(run: Run, folder: Folder, manifest: Manifest) -> Index:
    """The index of a generation for exact search, from the rows that devices of this process hold, verified. Raises
    Damaged."""
    parts = [run.sources.passages.stored_range(rows) for rows in run.own_rows]
    vectors = load_parts(folder, manifest, [stored for stored, _ in parts])
    return run.index_of_parts(part[kept] for part, (_, kept) in zip(vectors, parts, strict=True))
