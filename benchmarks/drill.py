"""Trainer and builder at 13,353,718 passages on one machine: every phase of a first start, a kill and a second start.

The programs are `realm train` and `realm build-index` with the config of `realm_wiki`, but for networks of one layer of
32 and a batch of 32: what is real is all but their operations. Vectors are 64 float32, as many bytes as the paper's 128
in bfloat16, of which a CPU would make a copy in float32 to search them. The passages are those of a prepared folder,
copied until there are enough. Storage is this machine's disk, or a bucket that answers 50 ms after every operation:
data and what trainer and builder share then lie in it, through the same code as gs:// (the file system behind it is the
disk).

    realm prepare --passages articles.jsonl.xz --vocab vocab.txt --shards 4 --output data
    python benchmarks/drill.py --data=data --workdir=DIR [--rows=13353718] [--storage=bucket] [--search=scann]

In order: the builder waits; the trainer starts, exports, waits for the first generation, adopts it, takes STEPS steps,
saves, and is killed (SIGKILL) in the middle of a step; the same command starts again and takes as many. A phase's
seconds are those of the functions named in PHASES, as they are called; phases lie within one another and beside one
another. Memory is the peak of anonymous memory, sampled every quarter of a second.
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from full_scale import WIKIPEDIA, memory_in_use

from realm_jax.data.store import MANIFEST, new_version
from realm_jax.storage import read_json, write_json_atomic

DELAY = 0.05  # seconds before a bucket answers
OPERATIONS = ("read", "write", "names", "remove", "local_path")  # of a shared folder, which are counted

STEPS, SAVED = 12, 10  # steps of each start; a save every so many
TINY = (
    "model.width=32", "model.layers=1", "model.heads=1", "model.feed_forward=64", "model.dtype=float32",
    "encoder.projection=64", "realm.batch_size=32", "mesh.fsdp=1", "optimizer.microbatches=1",
    f"checkpoint.every={SAVED}", "log.every=1", "refresh.wait_seconds=100000", "init_from=",
)  # fmt: skip

# name: the functions that are timed; of several calls the seconds are added up.
PHASES = {
    "open the data": ["realm_jax.train.recipe:open_sources", "realm_jax.cli.build_index:open_sources"],
    "stage the data": ["realm_jax.data.sources:staged"],
    "find passages with a salient span": ["realm_jax.tasks.realm:salient_rows"],
    "initial parameters": ["realm_jax.train.recipe:starting_params"],
    "restore the checkpoint": ["realm_jax.train.loop:restore"],
    "lay out the corpus": ["realm_jax.run:Run._shard_corpus_arrays"],
    "write an export": ["realm_jax.indexing.exporter:Exporter.flush"],
    "load a generation": ["realm_jax.indexing.watcher:IndexWatcher.load"],
    "build a generation": ["realm_jax.indexing.build:Builder.build"],
    "trace, lower, compile": [],  # from JAX's own events
    "a step": [],
    "save": ["realm_jax.train.checkpoints:Checkpoints.save"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=WIKIPEDIA)
    parser.add_argument("--storage", choices=("disk", "bucket"), default="disk")
    parser.add_argument("--search", choices=("device", "scann"), default="device")
    args, rest = parser.parse_known_args()
    if rest and rest[0] != "--":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        run_program(args.workdir, args.storage == "bucket", rest[1], rest[2:])
    else:
        enlarge(args.data, args.workdir / "bucket" / "data", args.rows)
        drill(args)


# --- what is read -----------------------------------------------------------------------------------------------------


def enlarge(data: Path, folder: Path, rows: int) -> None:
    """A prepared folder with the segments of another one, copied until there are `rows` passages."""
    if (folder / "PREPARED.json").is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(data / "tokenizer", folder / "tokenizer")
    found = read_json(data / "passages" / MANIFEST)
    entries: list[dict[str, Any]] = []
    while (missing := rows - sum(entry["rows"] for entry in entries)) > 0:
        entry = found["segments"][len(entries) % len(found["segments"])]
        if entry["rows"] > missing + min(other["rows"] for other in found["segments"]):
            break
        name = f"segment-{len(entries):05d}"
        shutil.copytree(data / "passages" / entry["folder"], folder / "passages" / name)
        entries.append(entry | {"folder": name})
    settings = {"limit": found["limit"], "tokenizer": found["tokenizer"]}
    store = new_version(settings, entries)
    write_json_atomic(folder / "passages" / MANIFEST, store)
    prepared = read_json(data / "PREPARED.json")
    passages = {"rows": sum(entry["rows"] for entry in entries), "fingerprint": store["fingerprint"]}
    write_json_atomic(folder / "PREPARED.json", prepared | {"passages": prepared["passages"] | passages})


# --- the drill --------------------------------------------------------------------------------------------------------


def drill(args: argparse.Namespace) -> None:
    workdir = args.workdir / f"run-{args.storage}-{args.search}"
    shutil.rmtree(workdir, ignore_errors=True)
    shared = args.workdir / "bucket" / workdir.name
    shutil.rmtree(shared, ignore_errors=True)
    bucket = args.storage == "bucket"
    keys = [*TINY, f"data.path={'gs://drill/data' if bucket else args.workdir / 'bucket' / 'data'}"]
    keys += [f"refresh.shared=gs://drill/{workdir.name}"] if bucket else []
    config = ["--config=" + ("realm_wiki" if args.search == "device" else "realm_wiki_scann"), f"--workdir={workdir}"]
    config += [f"--config.{key}" for key in keys]
    builder = start(args, "builder", "build-index", [*config, "--wait"])
    try:
        for times in (1, 2):
            print(json.dumps({"start": times, "storage": args.storage, "search": args.search}), flush=True)
            trainer = start(args, f"trainer-{times}", "train", [*config, "--config.realm.steps=1000"])
            wait_for_step(events_of(args.workdir, f"trainer-{times}"), STEPS, trainer)
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
            report(args.workdir, f"trainer-{times}")
    finally:
        builder.send_signal(signal.SIGTERM)
        builder.wait()
    report(args.workdir, "builder")


def start(args: argparse.Namespace, name: str, command: str, arguments: list[str]) -> subprocess.Popen[bytes]:
    events_of(args.workdir, name).unlink(missing_ok=True)
    devices = 1 if command == "build-index" else 4
    set_here = {
        "DRILL_NAME": name,
        "DRILL_BEGAN": str(time.time()),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "MALLOC_ARENA_MAX": "8",  # freed memory goes back, as on a host of TPUs
        "REALM_STAGING": str(args.workdir / "staged"),
        "REALM_CACHE": str(args.workdir / "cache"),
    }
    own = [f"--data={args.data}", f"--workdir={args.workdir}", f"--storage={args.storage}"]
    with (args.workdir / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, __file__, *own, "--", command, *arguments], env=os.environ | set_here, stderr=log
        )


def events_of(workdir: Path, name: str) -> Path:
    return workdir / f"{name}.events.jsonl"


def read_events(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for_step(path: Path, steps: int, program: subprocess.Popen[bytes]) -> None:
    """Until so many steps were taken by this start."""
    while program.poll() is None:
        if path.is_file() and path.read_bytes().count(b'"phase": "a step"') >= steps:
            return
        time.sleep(0.5)
    raise SystemExit(f"the trainer ended with code {program.returncode}; see its log in {path.parent}")


def report(workdir: Path, name: str) -> None:
    """One line a phase: when it began, seconds, calls, peak of anonymous memory meanwhile; storage in all."""
    events = read_events(events_of(workdir, name))
    memory = [(event["at"], event["gb"]) for event in events if event["phase"] == "memory"]
    for phase in PHASES:
        calls = [event for event in events if event["phase"] == phase]
        if not calls:
            continue
        first, last = calls[0]["at"], max(event["at"] + event["seconds"] for event in calls)
        within = [gb for at, gb in memory if first <= at <= last]
        line = {"program": name, "phase": phase, "from": round(first, 1), "to": round(last, 1), "calls": len(calls)}
        line |= {"seconds": round(sum(event["seconds"] for event in calls), 2)}
        line |= {"median": round(sorted(event["seconds"] for event in calls)[len(calls) // 2], 3)}
        print(json.dumps(line | {"peak_gb": max(within, default=None)}), flush=True)
    storage = [event for event in events if event["phase"] == "storage"]
    ready = min((event["at"] + event["seconds"] for event in events if event["phase"] == "a step"), default=None)
    line = {"program": name, "first step after": ready, "peak_gb": max((gb for _, gb in memory), default=None)}
    print(json.dumps(line | {"storage": storage[-1]["operations"] if storage else {}}), flush=True)


# --- a program with a clock -------------------------------------------------------------------------------------------


class Clock:
    """Writes an event a line: the phase, seconds since the process was started, seconds that it took."""

    def __init__(self, path: Path, began: float) -> None:
        self._stream, self._began, self._lock = path.open("a"), began, threading.Lock()

    def write(self, phase: str, begun: float, **values: Any) -> None:
        with self._lock:
            self._stream.write(json.dumps({"phase": phase, "at": round(begun - self._began, 3)} | values) + "\n")
            self._stream.flush()

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        begun = time.time()
        try:
            yield
        finally:
            self.write(phase, begun, seconds=round(time.time() - begun, 4))


def run_program(workdir: Path, bucket: bool, command: str, arguments: list[str]) -> None:
    """`realm COMMAND …` with its phases timed."""
    name = os.environ["DRILL_NAME"]
    clock = Clock(events_of(workdir, name), float(os.environ["DRILL_BEGAN"]))
    count_operations(clock, workdir / "bucket" if bucket else None)
    importlib.import_module(f"realm_jax.cli.{command.replace('-', '_')}")
    clock.write("imports", float(os.environ["DRILL_BEGAN"]), seconds=time.time() - float(os.environ["DRILL_BEGAN"]))
    for phase, places in PHASES.items():
        for place in places:
            time_function(clock, phase, place)
    time_steps(clock)
    time_compiler(clock)
    threading.Thread(target=watch_memory, args=(clock,), daemon=True).start()
    from realm_jax.cli.main import main

    sys.exit(main([command, *arguments]))


def time_function(clock: Clock, phase: str, place: str) -> None:
    module_name, _, name = place.partition(":")
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module_name))
    act = getattr(owner, last)

    @functools.wraps(act)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with clock.timed(phase):
            return act(*args, **kwargs)

    setattr(owner, last, timed)


def time_steps(clock: Clock) -> None:
    """A step from its call until its values are there."""
    if "realm_jax.train.loop" not in sys.modules:
        return
    import jax

    from realm_jax.train import loop

    make_step = loop.make_step

    def timed_step(task: Any) -> Callable[..., Any]:
        step = make_step(task)

        class Step:
            def __call__(self, *args: Any) -> Any:
                with clock.timed("a step"):
                    return jax.block_until_ready(step(*args))

            def __getattr__(self, name: str) -> Any:
                return getattr(step, name)

        return Step()

    loop.make_step = timed_step


def time_compiler(clock: Clock) -> None:
    import jax

    def heard(event: str, seconds: float, **_: Any) -> None:
        if event.endswith(("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")):
            clock.write("trace, lower, compile", time.time() - seconds, seconds=round(seconds, 4))

    jax.monitoring.register_event_duration_secs_listener(heard)


def watch_memory(clock: Clock) -> None:
    while True:
        clock.write("memory", time.time(), gb=round(memory_in_use()[0], 3))
        time.sleep(0.25)


def count_operations(clock: Clock, root: Path | None) -> None:
    """Counts what is asked of shared storage; root: of the bucket, None for the disk."""
    from realm_jax import storage

    operations: dict[str, list[int]] = {}
    lock = threading.Lock()

    def count(name: str, size: int) -> None:
        with lock:
            done = operations.setdefault(name, [0, 0])
            done[0], done[1] = done[0] + 1, done[1] + size
            clock.write("storage", time.time(), operations=dict(operations))

    if root is None:
        count_disk(storage.PosixFolder, count)
    else:
        make_bucket(root, count)


def count_disk(folder: Any, count: Callable[[str, int], None]) -> None:
    for name in OPERATIONS:
        act = getattr(folder, name)

        def counted(self: Any, *args: Any, act: Callable[..., Any] = act, name: str = name) -> Any:
            found = act(self, *args)
            data = args[1] if name == "write" else found
            count(name, len(data) if isinstance(data, bytes | memoryview) else 0)
            return found

        setattr(folder, name, counted)


def make_bucket(root: Path, count: Callable[[str, int], None]) -> None:
    """gs://drill is a folder of the disk that answers late."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    class Slow(LocalFileSystem):
        protocol = ("gs", "gcs")
        cachable = False

        def __init__(self, **_: Any) -> None:
            super().__init__(auto_mkdir=True)

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            name = str(path).removeprefix("gs://drill").rstrip("/")
            return name if name.startswith(str(root)) else f"{root}{name}"

        def _wait(self, operation: str, size: int) -> None:
            time.sleep(DELAY)
            count(operation, size)

        def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
            data = Path(self._strip_protocol(path)).read_bytes()
            self._wait("read", len(data))
            return data

        def pipe_file(self, path: str, value: bytes, *args: Any, **kwargs: Any) -> None:
            target = Path(self._strip_protocol(path))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(value)
            self._wait("write", len(value))

        def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
            self._wait("look", 0)
            return super().info(path, **kwargs)

        def ls(self, path: str, detail: bool = False, **kwargs: Any) -> list[str]:
            self._wait("list", 0)
            return super().ls(path, detail=detail, **kwargs)

        def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
            self._wait("remove", 0)
            super().rm(path, recursive=recursive, maxdepth=maxdepth)

    fsspec.register_implementation("gs", Slow, clobber=True)


if __name__ == "__main__":
    main()
