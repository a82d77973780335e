"""Copy a prepared folder in a bucket to this machine's disk once, because nothing remote is memory-mapped.

We verify a copy before we put PREPARED.json into it. A copy of a store that was edited since gets only the new
segments. Processes of one machine wait for the one that copies.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

from realm_jax.data.store import MANIFEST as STORE
from realm_jax.data.store import PassageStore
from realm_jax.errors import UserError
from realm_jax.storage import (
    Folder,
    StorageError,
    exclusive_lock,
    open_folder,
    parallel_map,
    sha256_hex,
    staging_folder,
    write_atomic,
)

logger = logging.getLogger(__name__)

PREPARED = "PREPARED.json"
MARGIN = 1 << 30  # bytes of the disk that stay free


def is_remote(path: str) -> bool:
    """Return True if a path is the URL of a bucket."""
    return "://" in path and not path.startswith("file://")


def staged(url: str, flag: str = "config.data.path=") -> Path:
    """Copy a prepared folder to this machine's disk, if it is not there yet.

    Args:
        url: URL of the folder in a bucket.
        flag: precedes the URL in messages, as the user wrote it.

    Returns:
        The folder on this machine.

    Raises:
        UserError: there is no such folder.
        StorageError: it cannot be read, or the disk is too small.
    """
    folder = open_folder(url)
    copy = staging_folder() / f"data-{sha256_hex(folder.url.encode())[:16]}"
    copy.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(copy, wait=True):
        try:
            prepared = folder.read(PREPARED)
        except FileNotFoundError:
            raise UserError(
                f"{flag}{url}: not a prepared folder (no {PREPARED}); make it with `realm prepare`"
            ) from None
        manifest = folder.read_json(PREPARED)
        names = [name for name in ("passages", "pretraining") if manifest.get(name)]
        stores = {name: folder.read(f"{name}/{STORE}") for name in names}
        # The copy is current if its records are those of the bucket.
        records = {PREPARED: prepared} | {f"{name}/{STORE}": data for name, data in stores.items()}
        if not all((copy / name).is_file() and (copy / name).read_bytes() == data for name, data in records.items()):
            (copy / PREPARED).unlink(missing_ok=True)
            _copy(folder, copy, manifest, stores)
            write_atomic(copy / PREPARED, prepared)
    return copy


def _copy(folder: Folder, copy: Path, manifest: dict[str, Any], stores: dict[str, bytes]) -> None:
    """Copy the missing files of a prepared folder, and verify its stores. Raises StorageError for a full disk."""
    # Small files may have changed, so we always copy them; files of segments never change once they are written.
    small = [f"tokenizer/{name}" for name in folder.names("tokenizer")]
    small += [f"questions/{split}.jsonl" for split in manifest["questions"]]
    large = {
        f"{name}/{segment['folder']}/{file}": known["bytes"]
        for name in stores
        for segment in folder.read_json(f"{name}/{STORE}")["segments"]
        for file, known in segment["files"].items()
    }
    present = {name for name, size in large.items() if (copy / name).is_file() and (copy / name).stat().st_size == size}
    missing = {name: size for name, size in large.items() if name not in present}
    wanted, free = sum(missing.values()) + MARGIN, shutil.disk_usage(copy).free
    if free < wanted:
        raise StorageError(
            f"{folder.url} needs {wanted:,} bytes of {copy}, which has {free:,} free; set REALM_STAGING to a folder "
            "with more room"
        )
    logger.info("%s: copying %d files, %.1f GB, to %s", folder.url, len(missing), sum(missing.values()) / 1e9, copy)

    def fetch(name: str) -> None:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(copy / name, folder.read(name))

    parallel_map(fetch, [*small, *missing])
    # STORE.json makes a store complete, so it comes after the files of its segments.
    for name, record in stores.items():
        write_atomic(copy / name / STORE, record)
        try:
            PassageStore.open(copy / name).verify()
        except UserError:
            shutil.rmtree(copy / name)  # so that it is copied again
            raise
