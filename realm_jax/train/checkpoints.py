"""Write and read the checkpoints of a task; the only module that uses Orbax.

`Checkpoints` is for training, `SavedCheckpoint` for reading. A checkpoint holds the state, the index vectors in use (if
the task retrieves) and a small record: the step of those vectors, seconds spent, and the environment. The input
position needs no entry, because step × batch size examples have been seen. Saves are asynchronous, and a failed one
does not end training, which tries again. Readers ignore a folder whose save did not finish.

The record also holds a checksum of every array. Readers compare it and name the arrays that differ, because Orbax
detects missing data, but may load flipped bits without an error.

Folders are paths in the run directory. If that is the copy of a bucket's run (`mirror.py`), its checkpoints are in the
bucket only: Orbax writes them to their URL, and a file `commit_success.txt` in a folder says that its save finished.
"""

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import fsspec.config
import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from realm_jax.checksums import checksums, mismatched, named_arrays
from realm_jax.environment import environment
from realm_jax.errors import UserError, full_disk
from realm_jax.host import delayed_signals, free_heap, releases_memory
from realm_jax.indexing.control import SaveState
from realm_jax.mirror import COMMIT, is_url, url_of
from realm_jax.processes import allgather_flags, any_process, is_process_0, run_on_process_0
from realm_jax.storage import StorageError, record_digest

logger = logging.getLogger(__name__)

DAMAGED = ".damaged"  # suffix of the folder of a damaged checkpoint, followed by a number from the second on
METADATA = "_CHECKPOINT_METADATA"  # Orbax's file, which also holds our record
TRANSIENT_STATUS = re.compile(
    "RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|CANCELLED"
)
STATUS = re.compile("[A-Z]+(_[A-Z]+)*: ")  # begins an error of TensorStore
NO_STEP = -1  # stands for None between processes
COPY_BYTES = 1 << 27  # of arrays that are copied and written at a time if memory is short
REMOTE = ("aiohttp", "gcsfs", "google", "requests")  # packages whose errors mean that a bucket failed
_T = TypeVar("_T")

# Orbax lists buckets by fsspec, and TensorStore writes to them without it. So no listing may come from a cache.
for _scheme in ("gs", "gcs"):
    fsspec.config.conf.setdefault(_scheme, {})["use_listings_cache"] = False


def orbax_path(folder: Path) -> epath.Path:
    """Return where Orbax finds a folder of the run directory: its absolute path, or its URL in a bucket."""
    return epath.Path(folder if is_url(str(folder)) else url_of(folder.absolute()))


class Checkpoints:
    """Context manager that writes the checkpoints of a task; leaving it waits for saves."""

    def __init__(self, folder: Path, keep: int):
        """Open a folder of checkpoints.

        Args:
            folder: made if it is missing.
            keep: number of newest checkpoints that stay.
        """
        self._folder, self._keep = orbax_path(folder), keep
        logging.getLogger("absl").addFilter(_is_not_orbax_error)
        self._checkpointer = self._open()
        self._is_saving = False
        self._error: StorageError | None = None  # of the newest save

    def _open(self) -> ocp.training.Checkpointer:
        """Open the folder, and remove what a save that did not finish has left there."""
        policy = ocp.training.preservation_policies.LatestN(self._keep)
        return ocp.training.Checkpointer(self._folder, preservation_policy=policy, cleanup_tmp_directories=True)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            with self._writing():
                self._checkpointer.close()
        except StorageError as error:
            if kind is None:
                raise
            logger.error("%s", error)  # and the first exception propagates

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn a failed save, perhaps an earlier one in the background, into a StorageError."""
        try:
            yield
        except Exception as error:
            is_status = isinstance(error, ValueError | RuntimeError) and STATUS.match(str(error))
            if not isinstance(error, OSError) and not is_status and not _is_remote(error):
                raise  # not a status of TensorStore, or of a barrier at which another process did not arrive
            reason = full_disk(error) or f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise StorageError(
                f"{self._folder}: a checkpoint could not be written ({reason}); check the storage, then run the "
                "command again: it resumes from the newest intact one"
            ) from error

    @property
    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint; None if there is none."""
        newest = self._checkpointer.latest
        return None if newest is None else newest.step

    def generations(self) -> dict[int, str]:
        """Return step → index generation of the intact checkpoints; '' for an index that the trainer embedded.

        Raises StorageError if they cannot be read.
        """
        generations = {}
        for entry in saved_folders(self._folder):
            with contextlib.suppress(CheckpointRemoved, DamagedCheckpoint):
                generations[int(entry.name)] = SavedCheckpoint(entry).record.get("generation") or ""
        return generations

    def save(self, step: int, state: Any, index: dict[str, Any], record: dict[str, Any]) -> None:
        """Save in the background, after an earlier save has finished; nothing if the step is saved already.

        A failure is logged, and `state` and `wait` report it. Every process has to call this.

        Args:
            step: number of steps that are done.
            state: a tree of arrays.
            index: trees of arrays by item: 'vectors', 'tower' (the query encoder that searches), 'in_flight'.
            record: a JSON object.
        """
        if any_process(self.finish() == SaveState.FAILED):
            with contextlib.suppress(StorageError), self._writing():
                self._checkpointer.close()  # raises the error of the failed save again
            try:
                with self._writing():
                    self._checkpointer = self._open()
                self._error = None
            except StorageError as error:
                self._report(error)
                return
        if self.latest == step:
            return
        items = {"state": state} | {name: {name: value} for name, value in index.items()}
        record = record | {"environment": environment(), "checksums": checksums(items)}
        record["digest"] = record_digest(record)
        try:
            with self._writing(), _limit_save_memory(items):
                self._checkpointer.save_checkpointables_async(step, items, custom_metadata=record, force=True)
            self._is_saving = True
        except StorageError as error:
            self._report(error)

    @property
    def state(self) -> SaveState:
        """Return the state of the newest save on this process, without waiting; a failure is logged when it is seen."""
        if self._is_saving and self._checkpointer.is_saving_in_progress():
            return SaveState.IN_PROGRESS
        return self.finish()

    def finish(self) -> SaveState:
        """Wait until the newest save has ended, and free the memory of its copies; a failure is logged."""
        if self._is_saving:
            self._is_saving = False
            try:
                with self._writing():
                    self._checkpointer.wait()
            except StorageError as error:
                self._report(error)
            free_heap()
        return SaveState.COMPLETE if self._error is None else SaveState.FAILED

    def wait(self) -> None:
        """Wait until the newest save has ended. Raises StorageError if it failed."""
        if self.finish() == SaveState.FAILED:
            assert self._error is not None
            raise self._error

    def _report(self, error: StorageError) -> None:
        """Remember and log that the newest save failed."""
        self._error = error
        logger.error("%s", error)


def _is_not_orbax_error(record: logging.LogRecord) -> bool:
    """Return False for errors that Orbax's threads print with tracebacks, because a save raises them too."""
    is_orbax_error = record.levelno >= logging.ERROR and f"{os.sep}orbax{os.sep}" in record.pathname
    if is_orbax_error:
        logger.debug("%s", record.getMessage())
    return not is_orbax_error


def _limit_save_memory(items: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Let a save copy and write few arrays at a time if memory is short; training then waits longer for it."""
    if not releases_memory():
        return contextlib.nullcontext()
    largest = max(array.nbytes for array in named_arrays(items).values())
    limit = max(COPY_BYTES, largest + 1)  # Orbax refuses an array that is not smaller
    context = ocp.Context()
    context.memory.write_concurrent_bytes = context.memory.transfer_concurrent_bytes = limit
    return context


def saved_folders(folder: Path | epath.Path) -> list[epath.Path]:
    """Return the folders of complete checkpoints, the newest first; [] for a missing folder.

    Raises StorageError if they cannot be listed.
    """
    location = orbax_path(folder)
    try:
        entries: list[epath.Path] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            entries = [entry for entry in location.iterdir() if entry.name.isdigit()]
        entries.sort(key=lambda entry: -int(entry.name))
        if is_url(str(location)):  # not by Orbax, which takes an error of a bucket for an unfinished save
            return [entry for entry in entries if (entry / COMMIT).exists()]
        return [entry for entry in entries if ocp.is_orbax_checkpoint(entry)]
    except Exception as error:
        if not isinstance(error, OSError) and not _is_remote(error):
            raise
        raise StorageError(f"{location} cannot be listed ({error}); run the command again") from error


def damaged_folders(folder: epath.Path, step: str = "") -> list[epath.Path]:
    """Return the folders of damaged checkpoints, sorted.

    Args:
        folder: folder of the checkpoints.
        step: number of the step; '' for all steps.
    """
    entries = ((entry, *entry.name.partition(DAMAGED)) for entry in folder.iterdir())
    return sorted(entry for entry, number, mark, _ in entries if mark and step in ("", number))


class DamagedCheckpoint(UserError):
    """A checkpoint differs from the saved data."""


class CheckpointRemoved(Exception):
    """A checkpoint was removed while it was read, because the run continued and kept only newer ones."""


class SavedCheckpoint:
    """Reads a complete checkpoint. It changes nothing in the folder, so a run may write at the same time.

    All methods that read files raise `CheckpointRemoved` if the checkpoint was removed meanwhile, `DamagedCheckpoint`,
    a UserError, if it differs from the saved data, and `StorageError` if the storage failed, perhaps not for long.

    Attributes:
        step: number of steps that are done.
    """

    def __init__(self, path: epath.Path):
        self._path = path
        self.step = int(path.name)
        self._unchecked_items: dict[str, Any] | None = None  # to be compared later; None: `read` compares at once
        with self._reading():
            # Not the metadata of all arrays, which take Orbax most of a second.
            self._record = dict(json.loads((path / METADATA).read_bytes())["custom_metadata"])
            if self.record["digest"] != record_digest(self.record):
                raise ValueError("its record does not match its checksum")

    @classmethod
    def newest(cls, folder: Path) -> Self | None:
        """Open the newest complete checkpoint in a folder; None if there is none."""
        for _ in range(100):  # a run that keeps few and saves often may remove one between listing and reading
            try:
                return next((cls(entry) for entry in saved_folders(folder)), None)
            except CheckpointRemoved:
                continue
        raise UserError(f"{folder}: checkpoints vanish faster than they can be read; set config.checkpoint.keep higher")

    @classmethod
    def newest_on_process_0(cls, folder: Path) -> Self | None:
        """Open the newest complete checkpoint that process 0 finds. Every process has to call this."""

        def newest_step() -> int:
            newest = cls.newest(folder)
            return NO_STEP if newest is None else newest.step

        step = run_on_process_0(newest_step)
        return None if step == NO_STEP else cls(orbax_path(folder) / str(step))

    @classmethod
    def newest_intact(cls, folder: Path, load: Callable[[Self], _T]) -> _T | None:
        """Load the newest checkpoint that is intact.

        Damaged checkpoints are logged and renamed, so that training can save their steps again. Every process has to
        call this, and all load the same checkpoint. No other program may write in the folder.

        Args:
            folder: folder of the checkpoints.
            load: reads the items that are needed.

        Returns:
            The result of `load`; None if there is no checkpoint.

        Raises:
            UserError: there are checkpoints and all are damaged.
            StorageError: the storage failed, perhaps not for long.
        """
        any_damaged = False
        while True:
            step = run_on_process_0(lambda: next((int(entry.name) for entry in saved_folders(folder)), NO_STEP))
            if step == NO_STEP and any_damaged:
                raise UserError(f"{folder}: every checkpoint is damaged; start in another --workdir")
            if step == NO_STEP:
                return None
            entry, error = orbax_path(folder) / str(step), None
            read_items: dict[str, Any] = {}
            try:
                saved = cls(entry)
                saved._unchecked_items = read_items
                loaded = load(saved)
            except (DamagedCheckpoint, CheckpointRemoved) as load_error:
                error = load_error
            # One process may fail to read a file that others have read, but comparing takes sums over the devices of
            # all processes. So they agree first.
            if allgather_flags(error is None).all():
                try:
                    saved._compare(read_items)
                    return loaded
                except DamagedCheckpoint as comparison_error:
                    error = comparison_error
            any_damaged = True
            reason = error or f"{entry} is damaged: another process cannot read it"
            logger.error("%s; falling back to the previous checkpoint", reason)
            if is_process_0():
                # A bucket copies the files and then removes them. If that is cut off, the step is damaged again, or
                # has no marker.
                earlier = len(damaged_folders(entry.parent, entry.name))  # the same step may be damaged again
                entry.rename(entry.with_name(f"{entry.name}{DAMAGED}{earlier + 1 if earlier else ''}"))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn any error of reading into one of the three that the class documents."""
        try:
            with delayed_signals():  # Orbax swallows even BaseExceptions, and the checkpoint would look damaged
                yield
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            is_transient = _is_transient(error)
            try:
                is_removed = not (self._path / METADATA).exists()
            except Exception:  # the bucket fails
                is_removed, is_transient = False, True
            if is_removed:
                raise CheckpointRemoved(str(self._path)) from error
            if is_transient:
                raise StorageError(f"{self._path} could not be read ({reason}); run the command again") from error
            raise DamagedCheckpoint(f"{self._path} is damaged ({reason}); see `realm storage verify`") from error

    @property
    def record(self) -> dict[str, Any]:
        """Return the JSON object of the save: `index_step`, `seconds`, `generation`, `environment`, `checksums`."""
        return dict(self._record)

    @cached_property
    def _metadata(self) -> Any:
        """Return names, shapes and dtypes of all arrays, by item."""
        with self._reading():
            metadata = ocp.checkpointables_metadata(self._path).metadata
            if metadata.get("state") is None:
                raise ValueError("the names of its arrays cannot be read")
            return metadata

    def read(self, item: str, like: Any = None) -> Any:
        """Read an item.

        Args:
            item: 'state', 'vectors', 'tower' or 'in_flight'.
            like: a tree of abstract arrays with shardings, and `...` for arrays to leave out; None to read all arrays
                onto the host.

        Returns:
            A tree of arrays; None if the item was not saved.
        """
        if not any(path.startswith(f"{item}.") for path in self._record["checksums"]):
            return None
        if like is None:
            like = jax.tree.map(_like, self._metadata[item])
        elif item != "state":
            like = {item: like}
        with self._reading():
            arrays = ocp.load_checkpointables(self._path, {item: like})[item]
        if self._unchecked_items is None:
            self._compare({item: arrays})
        else:
            self._unchecked_items[item] = arrays
        return arrays if item == "state" else arrays[item]

    def params(self, names: Collection[str], shardings: Any = None) -> Any:
        """Read the parameters of networks, whether the task trained or froze them.

        Args:
            names: keys of networks in the parameters.
            shardings: network → tree of shardings to load onto; None to read onto the host.

        Returns:
            A tree of arrays by network, with the shapes of the save.
        """

        def like(name: str, metadata: Any) -> Any:
            if name not in names:
                return jax.tree.map(lambda _: ..., metadata)
            return jax.tree.map(_like, metadata, *(() if shardings is None else (shardings[name],)))

        state = dict(self._metadata["state"])
        parts = {part: state[part] for part in ("frozen", "trained") if part in state}
        wanted = {part: {name: like(name, metadata) for name, metadata in parts[part].items()} for part in parts}
        arrays = self.read("state", jax.tree.map(lambda _: ..., state) | wanted)
        networks = {name: network for part in parts for name, network in arrays[part].items()}
        return {name: networks[name] for name in names}

    def trained(self, name: str) -> bool:
        """Return True if the task trained a network, by its key in the parameters."""
        return any(path.startswith(f"state.trained.{name}.") for path in self._record["checksums"])

    def _compare(self, items: dict[str, Any]) -> None:
        """Raise DamagedCheckpoint if arrays of items differ from those of the save."""
        if wrong := mismatched(self._record["checksums"], checksums(items)):
            arrays = f"{wrong[0]} and {len(wrong) - 1} other arrays do" if len(wrong) > 1 else f"{wrong[0]} does"
            reason = f"{arrays} not match the checksums of the save"
            raise DamagedCheckpoint(f"{self._path} is damaged ({reason}); see `realm storage verify`")

    def verify(self) -> None:
        """Read every array onto the host. Raises UserError if an array is damaged."""
        for item in self._metadata:
            self.read(item)


def _like(metadata: Any, sharding: jax.sharding.Sharding | None = None) -> Any:
    """Return the arguments with which Orbax loads an array onto devices, or for None onto the host."""
    if sharding is None:
        return np.empty(metadata.shape, metadata.dtype)
    return jax.ShapeDtypeStruct(metadata.shape, metadata.dtype, sharding=sharding)


def _is_transient(error: Exception) -> bool:
    """Return True for an error of storage or memory, which does not mean that the checkpoint is damaged."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return False
    is_transient = isinstance(error, OSError | MemoryError) or _is_remote(error)
    return is_transient or TRANSIENT_STATUS.match(str(error)) is not None


def _is_remote(error: Exception) -> bool:
    """Return True for an error of a bucket's client."""
    return type(error).__module__.partition(".")[0] in REMOTE
