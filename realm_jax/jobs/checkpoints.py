"""`realm checkpoints`: what a run has saved: list it, or read all of it and compare checksums."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from realm_jax.errors import UserError
from realm_jax.jobs.opening import recorded_config
from realm_jax.training.checkpoints import DAMAGED, Gone, Saved, saved_folders

EXAMPLES = """examples:
  realm checkpoints ls --workdir=runs/wiki
  realm checkpoints verify --workdir=runs/wiki            every array of every checkpoint against its checksum
  realm checkpoints verify realm/2000 --workdir=runs/wiki
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm checkpoints`."""
    parser.epilog = EXAMPLES
    parser.add_argument("action", choices=("ls", "verify"), help="what to do")
    parser.add_argument("which", nargs="*", metavar="TASK/STEP", help="verify: these alone")
    parser.add_argument("--workdir", required=True, metavar="DIR", help="folder of a run")
    parser.add_argument("--json", action="store_true", help="ls: one JSON object a line")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when `verify` finds damage."""
    workdir = Path(args.workdir)
    recorded_config(workdir, tagger=None)  # says so where there is no run
    found = {name(workdir, entry): entry for entry in checkpoints(workdir)}
    if args.action == "ls":
        return _list(found, args.json)
    for wanted in args.which:
        if wanted not in found:
            raise UserError(f"--workdir={workdir}: there is no checkpoint {wanted}; `realm checkpoints ls` lists them")
    return _verify({key: entry for key, entry in found.items() if not args.which or key in args.which})


def checkpoints(workdir: Path) -> list[Path]:
    """The folders of all checkpoints of a run, those set aside as damaged too, by task and step."""
    found: list[Path] = []
    for folder in sorted(workdir.glob("*/checkpoints")):
        found += [*reversed(saved_folders(folder)), *sorted(folder.glob(f"*{DAMAGED}*"))]
    return found


def name(workdir: Path, entry: Path) -> str:
    """How a person calls a checkpoint: task/step."""
    return f"{entry.parent.parent.relative_to(workdir.absolute())}/{entry.name}"


def describe(entry: Path) -> dict[str, Any]:
    """What there is to know of a checkpoint without reading its arrays."""
    if DAMAGED in entry.name:
        return {"state": "damaged"}
    try:
        record = Saved(entry).record
    except (UserError, Gone) as fault:
        return {"state": "damaged", "reason": str(fault)}
    return {
        "state": "complete",
        "bytes": sum(file.stat().st_size for file in entry.rglob("*") if file.is_file()),
        "saved": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry.stat().st_mtime)),
        "index_step": record["index_step"],
        "generation": record.get("generation") or "",
    }


def _list(found: dict[str, Path], as_json: bool) -> int:
    entries = [{"checkpoint": key} | describe(entry) for key, entry in found.items()]
    if as_json:
        for entry in entries:
            print(json.dumps(entry))
        return 0
    table = Table("checkpoint", "state", "MB", "saved (UTC)", "index of step", "generation", box=None, pad_edge=False)
    for entry in entries:
        size, step = entry.get("bytes"), entry.get("index_step", -1)
        table.add_row(
            entry["checkpoint"],
            entry["state"],
            f"{size / 1e6:,.1f}" if size is not None else "–",
            entry.get("saved", "–"),
            str(step) if step >= 0 else "–",
            entry.get("generation") or "–",
        )
    Console(highlight=False).print(table if entries else "no checkpoints")
    return 0


def _verify(found: dict[str, Path]) -> int:
    damaged = 0
    for key, entry in found.items():
        began = time.monotonic()
        try:
            if DAMAGED in entry.name:
                raise UserError(f"{entry} was found damaged and set aside; remove it")
            Saved(entry).verify()
            print(f"{key}: sound ({time.monotonic() - began:.1f} s)")
        except (UserError, Gone) as fault:
            damaged += 1
            print(f"{key}: DAMAGED: {fault}")
    return 1 if damaged else 0
