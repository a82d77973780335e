"""Checkpoints of one task: the only module that uses Orbax. `Checkpoints` is for training, `SavedCheckpoint` for
reading.

One save holds the state, the index vectors in use (if the task retrieves) and a small record: the step those vectors
are from, seconds spent, and the environment. The input position needs no entry of its own: step × batch size examples
have been seen. Saves are asynchronous, and a folder that was cut off in the middle is never taken for a checkpoint.

The record also holds a checksum of every array, and reading compares it and names the arrays that differ: Orbax detects
missing data, but may load flipped bits without an error.
"""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from realm_jax.checksums import checksums, mismatched, named_arrays
from realm_jax.environment import environment
from realm_jax.errors import UserError, full_disk
from realm_jax.host import free_heap, releases_memory
from realm_jax.processes import allgather_flags, is_process_0, run_on_process_0
from realm_jax.storage import StorageError, read_json, record_digest

logger = logging.getLogger(__name__)

DAMAGED = ".damaged"  # what is set aside is called
METADATA = "_CHECKPOINT_METADATA"  # Orbax's name of the file that also holds our record
TRANSIENT_STATUS = re.compile(
    "RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|CANCELLED"
)
NONE = -1  # in place of a step
COPIED = 1 << 27  # bytes of arrays that are copied and written at a time where memory is short
_T = TypeVar("_T")


class Checkpoints:
    """The checkpoints under one folder, of which the newest `keep` stay.

    A context manager: leaving waits for saves.
    """

    def __init__(self, folder: Path, keep: int):
        self._folder = folder
        logging.getLogger("absl").addFilter(_is_told)
        self._checkpointer = ocp.training.Checkpointer(
            folder.absolute(),
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )
        self._is_saving = False

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            with self._writing():
                self._checkpointer.close()
        except StorageError as fault:
            if kind is None:
                raise
            logger.error("%s", fault)  # and the first exception propagates

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn a failed save, perhaps an earlier one in the background, into a StorageError."""
        try:
            yield
        except (OSError, ValueError) as fault:
            if isinstance(fault, ValueError) and not re.match("[A-Z]+(_[A-Z]+)*: ", str(fault)):
                raise  # not a status of TensorStore's
            reason = full_disk(fault) or f"{type(fault).__name__}: {' '.join(str(fault).split())[:200]}"
            raise StorageError(
                f"{self._folder}: a checkpoint could not be written ({reason}); make room, then run the command again: "
                "it resumes from the newest intact one"
            ) from fault

    @property
    def latest(self) -> int | None:
        """The newest complete step."""
        newest = self._checkpointer.latest
        return None if newest is None else newest.step

    def generations(self) -> dict[int, str]:
        """Step → index generation of the checkpoints under the folder, '' for an index of the trainer's own."""
        found = {}
        for entry in self._folder.absolute().glob("*"):
            if entry.name.isdigit():
                with contextlib.suppress(CheckpointRemoved, UserError):
                    found[int(entry.name)] = SavedCheckpoint(entry).record.get("generation") or ""
        return found

    def save(self, step: int, state: Any, index: dict[str, Any], record: dict[str, Any], wait: bool = False) -> None:
        """Save in the background; a save that is still running is finished first.

        index: what of the index has to be saved: vectors, the query tower that searches, searches under way.
        """
        if self.latest == step:
            return
        self.wait()
        items = {"state": state} | {name: {name: value} for name, value in index.items()}
        record = record | {"environment": environment(), "checksums": checksums(items)}
        record["digest"] = record_digest(record)
        with self._writing(), _limit_save_memory(items):
            self._checkpointer.save_checkpointables_async(step, items, custom_metadata=record, force=True)
        self._is_saving = True
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return when what is being saved is complete, and its copies' memory is returned. Raises StorageError when it
        could not be saved."""
        if self._is_saving:
            with self._writing():
                self._checkpointer.wait()
            self._is_saving = False
            free_heap()


def _is_told(record: logging.LogRecord) -> bool:
    """False for the errors that each of Orbax's threads prints with its traceback: a save raises them, too."""
    is_repeated = record.levelno >= logging.ERROR and f"{os.sep}orbax{os.sep}" in record.pathname
    if is_repeated:
        logger.debug("%s", record.getMessage())
    return not is_repeated


def _limit_save_memory(items: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Where memory is short, a save copies and writes a few arrays at a time instead of all at once, and training waits
    for it longer."""
    if not releases_memory():
        return contextlib.nullcontext()
    largest = max(array.nbytes for array in named_arrays(items).values())
    limit = max(COPIED, largest + 1)  # Orbax refuses an array that is not smaller
    context = ocp.Context()
    context.memory.write_concurrent_bytes = context.memory.transfer_concurrent_bytes = limit
    return context


def _quarantine(entry: Path, fault: object) -> None:
    logger.error("%s; falling back to the previous checkpoint", fault)
    if is_process_0():
        before = len([*entry.parent.glob(f"{entry.name}{DAMAGED}*")])  # the same step may be damaged again
        entry.rename(entry.with_name(f"{entry.name}{DAMAGED}{before + 1 if before else ''}"))


def saved_folders(folder: Path) -> list[Path]:
    """The folders of complete checkpoints, the newest first."""
    entries = sorted((e for e in folder.absolute().glob("*") if e.name.isdigit()), key=lambda e: -int(e.name))
    return [entry for entry in entries if ocp.is_orbax_checkpoint(entry)]


class DamagedCheckpoint(UserError):
    """A checkpoint is not what was saved."""


class CheckpointRemoved(Exception):
    """A checkpoint was removed while it was read: the run continued and kept only newer ones."""


class SavedCheckpoint:
    """One complete checkpoint, read-only: nothing in its folder is changed, so a run may be writing at the same time.

    What reads it raises `CheckpointRemoved` when it was removed meanwhile, and UserError when it is damaged.
    """

    def __init__(self, path: Path):
        self._path = path
        self.step = int(path.name)
        self._deferred: dict[str, Any] | None = None  # what was read and is compared later
        with self._reading():
            # Without the metadata of all arrays, which take Orbax most of a second.
            self._record = dict(read_json(path / METADATA)["custom_metadata"])
            if self.record["digest"] != record_digest(self.record):
                raise ValueError("its record is not as it was saved")

    @classmethod
    def newest(cls, folder: Path) -> Self | None:
        """The newest complete checkpoint under a folder, if there is one."""
        for _ in range(100):  # a run that keeps few and saves often may remove one between listing and reading
            try:
                return next((cls(entry) for entry in saved_folders(folder)), None)
            except CheckpointRemoved:
                continue
        raise UserError(f"{folder}: checkpoints vanish faster than they can be read; set config.checkpoint.keep higher")

    @classmethod
    def newest_on_process_0(cls, folder: Path) -> Self | None:
        """`newest`, as the first of several processes sees it; all of them have to call it."""

        def step() -> int:
            found = cls.newest(folder)
            return NONE if found is None else found.step

        newest = run_on_process_0(step)
        return None if newest == NONE else cls(folder.absolute() / str(newest))

    @classmethod
    def newest_intact(cls, folder: Path, load: Callable[[Self], _T]) -> _T | None:
        """What `load` makes of the newest checkpoint that it can read; None if there is no checkpoint.

        A damaged one is logged and renamed, so that training can save its step again; nobody else may be writing in the
        folder. All processes have to call this, and return or pass over the same checkpoint. Raises UserError if there
        are checkpoints and all are damaged.
        """
        found_damage = False
        while True:
            step = run_on_process_0(lambda: next((int(entry.name) for entry in saved_folders(folder)), NONE))
            if step == NONE and found_damage:
                raise UserError(f"{folder}: every checkpoint is damaged; start in another --workdir")
            if step == NONE:
                return None
            entry, error = folder.absolute() / str(step), None
            read_items: dict[str, Any] = {}
            try:
                saved = cls(entry)
                saved._deferred = read_items
                loaded = load(saved)
            except (DamagedCheckpoint, CheckpointRemoved) as fault:
                error = fault
            # One process may fail to read what others have read. Sums over devices are taken by all processes or none.
            if allgather_flags(error is None).all():
                try:
                    saved._compare(read_items)
                    return loaded
                except DamagedCheckpoint as fault:
                    error = fault
            found_damage = True
            _quarantine(entry, error or f"{entry} is damaged: another process cannot read it")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as fault:
            if not (self._path / METADATA).exists():
                raise CheckpointRemoved(str(self._path)) from fault
            reason = f"{type(fault).__name__}: {str(fault).strip().partition(chr(10))[0][:200]}"
            if _is_transient(fault):
                raise StorageError(f"{self._path} could not be read ({reason}); run the command again") from fault
            raise DamagedCheckpoint(f"{self._path} is damaged ({reason}); see `realm storage verify`") from fault

    @property
    def record(self) -> dict[str, Any]:
        """What was saved beside the arrays: `index_step`, `seconds`, `generation`, `environment`, checksums."""
        return dict(self._record)

    @cached_property
    def _metadata(self) -> Any:
        """Names, shapes and types of all arrays, by item."""
        with self._reading():
            found = ocp.checkpointables_metadata(self._path).metadata
            if found.get("state") is None:
                raise ValueError("the names of its arrays cannot be read")
            return found

    def read(self, item: str, like: Any = None) -> Any:
        """An item, of 'state', 'vectors', 'tower' and 'in_flight'; None if it was not saved.

        like: its shapes, with the shardings to load onto, and `...` in place of what to leave out; None: all of it, on
        the host.
        """
        if not any(path.startswith(f"{item}.") for path in self._record["checksums"]):
            return None
        if like is None:
            like = jax.tree.map(_like, self._metadata[item])
        elif item != "state":
            like = {item: like}
        with self._reading():
            found = ocp.load_checkpointables(self._path, {item: like})[item]
        if self._deferred is None:
            self._compare({item: found})
        else:
            self._deferred[item] = found
        return found if item == "state" else found[item]

    def params(self, names: Collection[str], shardings: Any = None) -> Any:
        """The parameters of some networks, by their top-level names, whichever of them the task trained.

        shardings: by network, what each array is loaded onto; None: all of them are on the host. Shapes are those that
        were saved.
        """

        def like(name: str, known: Any) -> Any:
            if name not in names:
                return jax.tree.map(lambda _: ..., known)
            return jax.tree.map(_like, known, *(() if shardings is None else (shardings[name],)))

        state = dict(self._metadata["state"])
        parts = {part: state[part] for part in ("frozen", "trained") if part in state}
        wanted = {part: {name: like(name, known) for name, known in parts[part].items()} for part in parts}
        found = self.read("state", jax.tree.map(lambda _: ..., state) | wanted)
        networks = {name: network for part in parts for name, network in found[part].items()}
        return {name: networks[name] for name in names}

    def trained(self, name: str) -> bool:
        """Whether the task trained a network, by its top-level name."""
        return any(path.startswith(f"state.trained.{name}.") for path in self._record["checksums"])

    def _compare(self, items: dict[str, Any]) -> None:
        """Raise DamagedCheckpoint, with the names of arrays, if items that were read are not as they were saved."""
        if wrong := mismatched(self._record["checksums"], checksums(items)):
            arrays = f"{wrong[0]} and {len(wrong) - 1} other arrays do" if len(wrong) > 1 else f"{wrong[0]} does"
            reason = f"{arrays} not match the checksums of the save"
            raise DamagedCheckpoint(f"{self._path} is damaged ({reason}); see `realm storage verify`")

    def verify(self) -> None:
        """Read every array, on the host. Raises UserError if one is damaged."""
        for item in self._metadata:
            self.read(item)


def _like(known: Any, sharding: jax.sharding.Sharding | None = None) -> Any:
    """What Orbax is given to load an array onto devices, or (None) onto the host."""
    if sharding is None:
        return np.empty(known.shape, known.dtype)
    return jax.ShapeDtypeStruct(known.shape, known.dtype, sharding=sharding)


def _is_transient(fault: Exception) -> bool:
    """Whether an error is transient (storage or memory), which says nothing about what was saved."""
    if isinstance(fault, FileNotFoundError | NotADirectoryError):
        return False
    return isinstance(fault, OSError | MemoryError) or TRANSIENT_STATUS.match(str(fault)) is not None
