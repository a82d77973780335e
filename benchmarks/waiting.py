"""How much of its time training waits for input and index, with a million passages and a cold page cache.

Makes a store of generated passages (`passage_store.py`), drops its files from the page cache, and trains REALM with two
layers of 64 on it in a fresh process, searching a million vectors in every step: on the devices, and with ScaNN on the
hosts `--ahead` steps before. The vectors are random, since embedding is not what is measured. Prints shares of the time
between the first and the last record, and how anonymous memory moves meanwhile.

    python benchmarks/waiting.py [--passages 1000000] [--steps 300] [--backends device scann] [--ahead 1]
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from passage_store import drop_from_page_cache, make

from realm_jax.assemble import make_run
from realm_jax.config import add_sections
from realm_jax.data.sources import FORMAT_VERSION, open_sources
from realm_jax.host import keep_freed_memory
from realm_jax.recipes import quickstart
from realm_jax.run import Run
from realm_jax.train.guards import Profiler
from realm_jax.train.loop import train_task
from realm_jax.train.metrics import WAITS
from realm_jax.train.records import read_lines
from realm_jax.train.workdir import check_workdir

FIRST = 20  # step whose record is the beginning: compiling and the first index lie before it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--backends", nargs="+", default=["device", "scann"])
    parser.add_argument("--ahead", type=int, default=1, help="steps that the hosts search ahead (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to make the store (default: a temporary folder)")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(Path(args.measure[0]), args.measure[1], args.steps, args.ahead)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        prepared(folder, args.passages)
        for backend in args.backends:
            drop_from_page_cache(folder)
            command = [
                sys.executable,
                __file__,
                f"--steps={args.steps}",
                f"--ahead={args.ahead}",
                "--measure",
                name,
                backend,
            ]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            print(backend, ", ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)


def prepared(folder: Path, passages: int) -> None:
    """A prepared folder without questions."""
    make(folder / "passages", passages, folder / "tokenizer")
    manifest = {"format_version": FORMAT_VERSION, "pretraining": None, "questions": {}}
    (folder / "PREPARED.json").write_text(json.dumps(manifest))


def measure(folder: Path, backend: str, steps: int, ahead: int) -> dict[str, float]:
    """Train, and say where the time went between step `FIRST` and the last."""
    keep_freed_memory()
    began = time.monotonic()
    config = quickstart()
    config.tasks = "realm"
    config.data.update(query_length=64, document_length=288, predictions=6)
    config.data.path = str(folder)
    config.realm.update(steps=steps, batch_size=8)
    config.realm.candidates = 5
    config.refresh.every = 10 * steps
    config.checkpoint.every = steps
    config.retrieval.backend = backend
    add_sections(config, ["scann"])
    config.scann.ahead = ahead
    memory: list[float] = []
    with tempfile.TemporaryDirectory() as workdir:
        run = with_random_vectors(make_run(config, Path(workdir), open_sources(folder)))
        check_workdir(run)
        watch_memory(memory)
        train_task(run, "realm", run.initial_params())
        lines = [line for line in read_lines(Path(workdir) / "realm" / "metrics.jsonl") if line["step"] >= FIRST]
    first, last = lines[0], lines[-1]
    seconds = last["seconds"] - first["seconds"]
    found = {"seconds before the first record": first["seconds"], "all seconds": time.monotonic() - began}
    found |= {"step (ms)": 1e3 * seconds / (last["step"] - first["step"])}
    for name in WAITS:
        waited = last[f"wait_{name}"] * last["seconds"] - first[f"wait_{name}"] * first["seconds"]
        found[f"waiting for {name} (%)"] = 100 * waited / seconds
    middle = len(memory) // 2
    return found | {"anonymous memory half-way (MB)": memory[middle], "at the end (MB)": memory[-1]}


def with_random_vectors(run: Run) -> Run:
    """The run, but that embedding gives numbers of the right shape at once."""

    class Random(Run):
        def embed(self, params: Any, progress: Any = None, rows: Any = None) -> Any:
            count = self.context.rows if rows is None else len(rows.ids)
            rng = np.random.default_rng(0)
            return rng.standard_normal((count, self.model.projection), dtype=np.float32)

    return Random(**{field.name: getattr(run, field.name) for field in dataclasses.fields(run)})


def watch_memory(found: list[float]) -> None:
    """Anonymous memory before each step, in MB: pages of files may come and go."""
    at = Profiler.at

    def watched(self: Profiler, *args: Any) -> None:
        status = Path("/proc/self/status").read_text()
        found.append(int(status.partition("RssAnon:")[2].split()[0]) / 1e3)
        at(self, *args)

    Profiler.at = watched  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
