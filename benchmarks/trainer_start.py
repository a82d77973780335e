"""What a host of a trainer does before its first step at 13,353,718 passages: as one of 16, and as the only one.

The passages are those of a prepared folder, whose segments are listed again and again until there are enough; so they
lie in the page cache, and times are those of the processor. Four segments of 103,053 passages make 520, which is what
13 million have. The generation is random vectors of 128 bfloat16 in files as a builder writes them; reading one waits
50 ms first, as a bucket lets one wait. Every phase runs in a process of its own. Memory is the peak of anonymous memory
beyond that of a process that did nothing.

    realm prepare --passages articles.jsonl.xz --vocab vocab.txt --shards 4 --output data
    python benchmarks/trainer_start.py run --data=data --workdir=DIR [--rows=13353718]

A host of 16 has four of 64 devices, a square of two by two in a mesh of eight by eight, as on v5e.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from full_scale import WIKIPEDIA, Memory

from realm_jax.data.sources import open_sources
from realm_jax.data.store import MANIFEST, PassageStore
from realm_jax.refresh.generations import CHUNK_ROWS, ChunkFile, Manifest, load_parts, rows_name
from realm_jax.retrieval.exact import padded_rows
from realm_jax.storage import FileEntry, PosixFolder, read_json, write_json_atomic

WIDTH, LENGTH, QUERY = 128, 288, 64  # of vectors, of document rows, of queries
DEVICES, OWN = 64, (0, 1, 8, 9)  # of all hosts, and those of one
DELAY = 0.05  # seconds before a bucket answers


class SlowFolder(PosixFolder):
    """A folder that answers as late as a bucket."""

    reads = received = 0

    def read_verified(self, entry: FileEntry) -> bytes:
        time.sleep(DELAY)
        self.reads += 1
        self.received += entry.bytes
        return super().read_verified(entry)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=("run", *PHASES))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=WIKIPEDIA)
    args = parser.parse_args()
    if args.phase != "run":
        PHASES[args.phase](args)
        return
    args.workdir.mkdir(parents=True, exist_ok=True)
    enlarge(args)
    write_generation(args)
    for phase in PHASES:
        command = [sys.executable, __file__, phase, f"--data={args.data}", f"--workdir={args.workdir}"]
        subprocess.run([*command, f"--rows={args.rows}"], check=True)


# --- what there is to read --------------------------------------------------------------------------------------------


def enlarge(args: argparse.Namespace) -> None:
    """A store in the work directory that lists the segments of the prepared one until it has `rows` or more."""
    store, folder = args.data / "passages", args.workdir / "passages"
    folder.mkdir(exist_ok=True)
    found = read_json(store / MANIFEST)
    for entry in found["segments"]:
        link = folder / entry["folder"]
        if not link.exists():
            link.symlink_to((store / entry["folder"]).resolve())
    times = -(-args.rows // sum(entry["rows"] for entry in found["segments"]))
    write_json_atomic(folder / MANIFEST, found | {"segments": found["segments"] * times, "versions": None})


def open_store(args: argparse.Namespace) -> PassageStore:
    return PassageStore.open(args.workdir / "passages", open_sources(args.data).tokenizer.size)


def write_generation(args: argparse.Namespace) -> None:
    folder, rng = PosixFolder(args.workdir), np.random.default_rng(0)
    if (args.workdir / "generation.json").is_file():
        return
    chunks = []
    for first in range(0, args.rows, CHUNK_ROWS):
        last = min(first + CHUNK_ROWS, args.rows)
        values = rng.standard_normal((last - first, WIDTH), np.float32).view(np.uint32) >> 16  # bfloat16, cut off
        file = folder.put(f"index/0-0/{rows_name(first, last)}.bin", values.astype(np.uint16).tobytes())
        chunks.append(ChunkFile("all", first, last, file))
    made = Manifest("0-0", 0, "", "", "", args.rows, WIDTH, "bfloat16", tuple(chunks), None, {}, {})
    write_json_atomic(args.workdir / "generation.json", made.to_json())


# --- the phases -------------------------------------------------------------------------------------------------------


def own_rows(rows: int) -> list[slice]:
    """The passages on each device of one host of 16."""
    share = padded_rows(rows, DEVICES) // DEVICES
    return [slice(min(rows, one * share), min(rows, (one + 1) * share)) for one in OWN]


def lay_out(args: argparse.Namespace) -> None:
    store, special = open_store(args), open_sources(args.data).tokenizer.special
    for hosts, parts in ((16, own_rows(args.rows)), (1, [slice(0, args.rows)])):
        measured("document rows", hosts, args.rows, lambda parts=parts: [
            store.document_matrix(LENGTH, special, part) for part in parts
        ])  # fmt: skip


def adopt(args: argparse.Namespace) -> None:
    manifest = Manifest.from_json({
        name: value for name, value in read_json(args.workdir / "generation.json").items() if name != "format_version"
    })  # fmt: skip
    for hosts, parts in ((16, own_rows(args.rows)), (1, [slice(0, args.rows)])):
        folder = SlowFolder(args.workdir)
        measured("generation read and verified", hosts, args.rows, lambda parts=parts, folder=folder: load_parts(
            folder, manifest, parts
        ))  # fmt: skip
        print(json.dumps({"files": folder.reads, "gigabytes": round(folder.received / 1e9, 3)}), flush=True)


def list_sentences(args: argparse.Namespace) -> None:
    store = open_store(args)
    measured("passages with a salient span", 1, len(store), lambda: store.salient_rows(QUERY - 2))


def list_recurring(args: argparse.Namespace) -> None:
    store = open_store(args)
    measured("spans that recur", 1, len(store), lambda: store.recurring_spans(QUERY - 2))


def measured(phase: str, hosts: int, rows: int, act: Callable[[], object]) -> None:
    with Memory() as idle:
        time.sleep(0.2)
    with Memory() as memory:
        began = time.monotonic()
        act()
        seconds = time.monotonic() - began
    gigabytes = memory.anonymous - idle.anonymous
    found = {"phase": phase, "hosts": hosts, "rows": rows, "seconds": round(seconds, 2), "gb": round(gigabytes, 2)}
    print(json.dumps(found), flush=True)


PHASES = {"layout": lay_out, "adopt": adopt, "sentences": list_sentences, "recurring": list_recurring}

if __name__ == "__main__":
    main()
