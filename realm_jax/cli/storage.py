"""`realm storage`: list, verify and remove checkpoints and index generations of a run.

The name of a checkpoint is TASK/STEP (`realm_jax/train/checkpoints.py`), that of a generation is its folder's under
`index` (`realm_jax/indexing/files.py`). The command uses no device, and trainer and builder need not run.
"""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from realm_jax.cli.output import print_json, print_records
from realm_jax.errors import UserError
from realm_jax.indexing.files import (
    export_step,
    generation_names,
    indexes_sharing_files,
    load_vectors,
    read_manifest,
    read_rejection,
    remove_generation,
)  # fmt: skip
from realm_jax.indexing.heartbeat import TRAINER, read_status
from realm_jax.mirror import download, is_url
from realm_jax.storage import Damaged, Folder, open_folder
from realm_jax.train.checkpoints import (
    DAMAGED,
    METADATA,
    CheckpointRemoved,
    SavedCheckpoint,
    damaged_folders,
    orbax_path,
    saved_folders,
)
from realm_jax.train.workdir import recorded_config, recorded_folder

EXAMPLES = """examples:
  realm storage ls --workdir=runs/wiki
  realm storage verify --workdir=runs/wiki                every array, vector and index file
  realm storage verify realm/2000 --workdir=runs/wiki
  realm storage rm 1500-3f09a2c1 --workdir=runs/wiki      an index version; checkpoint.keep removes checkpoints
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm storage`."""
    parser.epilog = EXAMPLES
    parser.add_argument("action", choices=("ls", "verify", "rm"), help="list, verify or remove")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="checkpoint (TASK/STEP) or index version; `verify` checks all by default",
    )
    parser.add_argument("--workdir", required=True, metavar="DIR", help="run directory: a path, or gs://BUCKET/FOLDER")
    parser.add_argument(
        "--force", action="store_true", help="rm: remove index versions even if the run needs them to resume"
    )
    parser.add_argument("--json", action="store_true", help="ls, verify: print one JSON object per line")


def run(args: argparse.Namespace) -> int:
    """Run the action; return 1 if `verify` finds damage."""
    workdir = Path(args.workdir)
    if is_url(args.workdir):
        workdir = download(args.workdir, "storage", lambda name: name == "config.json")
    recorded_config(workdir)  # raises UserError if there is no run
    items: dict[str, Checkpoint | Generation] = {}
    for folder in sorted(entry / "checkpoints" for entry in orbax_path(workdir).iterdir()):
        if folder.is_dir():
            for entry in (*reversed(saved_folders(folder)), *damaged_folders(folder)):
                items[f"{folder.parent.name}/{entry.name}"] = Checkpoint(entry)
    saved = {*items}
    if args.action == "rm":
        if not args.names:
            raise UserError("realm storage rm: name the generations to remove; `realm storage ls` lists them")
        for name in args.names:
            if DAMAGED in name:
                raise UserError(f"{name}: was quarantined because it is damaged; remove its folder by hand")
            if name in saved:
                raise UserError(f"{name}: is a checkpoint, which only training removes; set checkpoint.keep")
    # The shared folder, which may be a bucket, is read only when needed.
    if not args.names or not {*args.names} <= saved:
        shared = recorded_folder(workdir)
        items |= {name: Generation(shared, name) for name in generation_names(shared)}
    if args.action == "ls":
        entries = [item.describe() for item in items.values()]
        for kind in ("checkpoint", "generation"):
            print_records([entry for entry in entries if [*entry][0] == kind], args.json, f"no {kind}s")
        return 0
    for name in args.names:
        if name not in items:
            raise UserError(f"--workdir={args.workdir}: no {name} is stored; `realm storage ls` lists all names")
    if args.action == "verify":
        return int(any([verify(name, items[name], args.json) for name in args.names or items]))
    for name in args.names:  # check all before removing any
        generation = items[name].describe()
        if not args.force and (generation.get("in_use") or generation.get("pinned")):
            raise UserError(f"generation {name} is needed to resume the run; remove it anyway with --force")
    for name in args.names:
        remove_generation(shared, name)
        others = indexes_sharing_files(shared, name)
        print(f"{name}: {f'{others[0].generation} needs its vectors, which stay' if others else 'removed'}")
    return 0


class Checkpoint(NamedTuple):
    """A checkpoint.

    Attributes:
        entry: the folder of its step.
    """

    entry: epath.Path

    def describe(self) -> dict[str, Any]:
        """Return its facts for `ls`, without reading its arrays."""
        entry = self.entry
        facts = {"checkpoint": f"{entry.parent.parent.name}/{entry.name}", "state": "damaged"}
        if DAMAGED in entry.name:
            return facts
        try:
            record = SavedCheckpoint(entry).record
        except (UserError, CheckpointRemoved) as error:
            return facts | {"reason": str(error)}
        return facts | {
            "state": "complete",
            "bytes": sum(file.bytes for file in open_folder(str(entry)).files().values()),
            "saved": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime((entry / METADATA).stat().mtime)),
            "index_step": record["index_step"],
            "generation": record.get("generation") or "",
        }

    def verify(self) -> str:
        """Read every array; return '', because there is nothing to report. Raises UserError if one is damaged."""
        if DAMAGED in self.entry.name:
            raise UserError(f"{self.entry}: is damaged and was quarantined; remove it")
        SavedCheckpoint(self.entry).verify()
        return ""


class Generation(NamedTuple):
    """A generation of the index.

    Attributes:
        folder: the shared folder.
        name: its name.
    """

    folder: Folder
    name: str

    def describe(self) -> dict[str, Any]:
        """Return its facts for `ls`, without reading its vectors."""
        trainer, step = read_status(self.folder, TRAINER), export_step(self.name)
        facts: dict[str, Any] = {"generation": self.name, "step": step, "state": "unfinished"}
        try:
            manifest = read_manifest(self.folder, self.name)
        except Damaged as error:
            return facts | {"state": "damaged", "reason": str(error)}
        if (rejected := read_rejection(self.folder, self.name)) is not None:
            facts |= {"state": "refused", "reason": rejected.reason}
        elif manifest is not None:
            facts["state"] = "published"
        elif indexes_sharing_files(self.folder, self.name):
            facts["state"] = "superseded"
        if manifest is not None:
            facts |= {
                "rows": manifest.rows,
                "bytes": sum(file.bytes for file in manifest.files),
                "age": None if trainer is None else max(trainer.step - manifest.step, 0),
                "recall": manifest.recall,
                "seconds": sum(manifest.seconds.values()),
            }
        facts["in_use"] = trainer is not None and trainer.index == step
        facts["pinned"] = trainer is not None and step in trainer.pins
        return facts

    def verify(self) -> str | None:
        """Compare every file with its size and checksum, and check that all vectors are finite and not zero.

        Returns:
            The number of vectors, in words; None for an unfinished or superseded generation.

        Raises:
            Damaged: a file is damaged.
        """
        manifest = read_manifest(self.folder, self.name)
        if manifest is None:
            return None
        load_vectors(self.folder, manifest)
        for file in manifest.files[len(manifest.chunks) :]:
            self.folder.read_verified(file)
        return f"{manifest.rows:,} vectors, "


def verify(name: str, item: Checkpoint | Generation, as_json: bool) -> bool:
    """Verify a checkpoint or generation and print the result.

    Args:
        name: its name.
        item: the checkpoint or generation.
        as_json: print {"name", "state", "reason", "seconds"} instead of a line.

    Returns:
        True if it is damaged.
    """
    began, state, reason, contents = time.monotonic(), "sound", "", None
    try:
        contents = item.verify()
        state = item.describe()["state"] if contents is None else "sound"
    except (UserError, CheckpointRemoved) as error:
        state, reason = "damaged", str(error)
    seconds = time.monotonic() - began
    if as_json:
        print_json({"name": name, "state": state, "reason": reason, "seconds": round(seconds, 3)})
    else:
        shown = {"damaged": f"DAMAGED: {reason}", "sound": f"sound ({contents}{seconds:.1f} s)"}
        print(f"{name}: {shown.get(state, state)}")
    return state == "damaged"
