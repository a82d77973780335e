"""A generation of 13,353,718 passages: published, verified, loaded, searched with ScaNN; and how its cost grows.

Vectors: those of real passages (`real_vectors.py`), enlarged. Copy 0 of a passage is its vector x. Every further copy
is x + SPREAD · (a − b), scaled to the length of x, where a and b are two of the NEIGHBOURS passages nearest to x, drawn
at random: it moves within the plane that real passages span around x. Queries are real questions of the same embedder.
`check` shows how like the real thing that is: a part of the real passages, enlarged to as many as there are, beside all
of them.

Embedding is replaced by looking the vectors up; everything else is the builder's and the trainer's own way, each phase
in a process of its own. Memory is the peak of anonymous memory; pages of files, which the system can take back, apart.

    python benchmarks/full_scale.py check --vectors=vectors.npz
    python benchmarks/full_scale.py run --vectors=vectors.npz --workdir=DIR [--rows 100000 1000000 13353718]

After that the generation of a later step is built, whose vectors are these times a rotation that leaves each
at a cosine of about COSINE with what it was. Last, EDITED rows are added to the corpus, and the generation of
what it is then is built.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from realm_jax.indexing.build import Builder, Corpus
from realm_jax.indexing.files import CHUNK_ROWS, generation_names, load_vectors, read_manifest, write_export
from realm_jax.indexing.searchers import load_searcher
from realm_jax.retrieval.embed import CorpusRows
from realm_jax.retrieval.scann import ScannConfig, Searcher, exact_rows, recall
from realm_jax.storage import PosixFolder

WIKIPEDIA = 13_353_718  # passages of the paper's corpus
NEIGHBOURS, SPREAD = 64, 0.8
BATCH, DEPTH, REPEATS = 512, 8, 5
EDITED = 1000  # rows that an edit adds
COSINE = 0.95  # of a vector of a later step with what it was
SEARCHED = (16, 32, 64, 128, 256, 512, 1024)


class Enlarged:
    """Any number of vectors made from a few real ones; a row depends on nothing but its number."""

    def __init__(self, real: NDArray[np.float32], rows: int) -> None:
        self.rows, self._real = rows, real
        if rows > len(real):
            parts = [exact_rows(real[at : at + 2048], real, NEIGHBOURS + 1) for at in range(0, len(real), 2048)]
            self._near = np.concatenate(parts)[:, 1:]

    def __getitem__(self, part: slice) -> NDArray[np.float32]:
        count, found = len(self._real), []
        for copy in range(part.start // count, -(-part.stop // count)):
            low, high = max(part.start - copy * count, 0), min(part.stop - copy * count, count)
            found.append(self._copy(copy, slice(low, high)))
        return np.concatenate(found)

    def _copy(self, number: int, part: slice) -> NDArray[np.float32]:
        real = self._real[part]
        if number == 0:
            return real
        drawn = np.random.default_rng((1, number)).integers(0, NEIGHBOURS, (len(self._real), 2))[part]
        a, b = (self._real[near] for near in np.take_along_axis(self._near[part], drawn, axis=1).T)
        moved = real + SPREAD * (a - b)
        return moved * (np.linalg.norm(real, axis=1) / np.linalg.norm(moved, axis=1))[:, None]


def rotation(width: int) -> NDArray[np.float32]:
    """One drawn at random that turns vectors by the angle of COSINE: Cayley's of a skew matrix."""
    drawn = np.random.default_rng(2).normal(size=(width, width))
    skew = (drawn - drawn.T) / np.linalg.norm(drawn - drawn.T) * np.sqrt(width)
    half = skew * np.tan(np.arccos(COSINE) / 2)
    return np.linalg.solve(np.eye(width) + half, np.eye(width) - half).astype(np.float32)


def memory_in_use() -> tuple[float, float]:
    """This process's anonymous memory, and pages of files, in GB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, files, shared = (int(status[name].split()[0]) / 1e6 for name in ("RssAnon", "RssFile", "RssShmem"))
    return anonymous + shared, files


class Memory:
    """Peak of this process's anonymous memory, and of pages of files, in GB. A context manager."""

    def __enter__(self) -> Self:
        self.anonymous = self.files = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            anonymous, files = memory_in_use()
            self.anonymous, self.files = max(self.anonymous, anonymous), max(self.files, files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("check", "run", "build", "search", "turn", "edit"))
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000, WIKIPEDIA])
    args = parser.parse_args()
    arrays = np.load(args.vectors)
    real, queries = arrays["passages"], arrays["queries"]
    if args.action == "check":
        check(real, queries)
    elif args.action == "build":
        build(args.workdir, Enlarged(real, args.rows[0]), queries)
    elif args.action == "turn":
        turned = rotation(real.shape[1])
        cosine = float((real * (real @ turned)).sum() / (real * real).sum())
        report(rows=args.rows[0], cosine=cosine)
        build(args.workdir, Enlarged(real @ turned, args.rows[0]), queries @ turned, step=1)
    elif args.action == "edit":
        build(args.workdir, Enlarged(real, args.rows[0] + EDITED), queries, EDITED)
    elif args.action == "search":
        search(args.workdir, queries)
    else:
        for rows in args.rows:
            run(args.vectors, args.workdir / str(rows), rows)


def run(vectors: Path, workdir: Path, rows: int) -> None:
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.mkdir(parents=True)
    for action in ("build", "search", "turn", "edit"):
        command = [
            sys.executable,
            __file__,
            action,
            f"--vectors={vectors}",
            f"--workdir={workdir}",
            "--rows",
            str(rows),
        ]
        subprocess.run(command, check=True)


def settings() -> ScannConfig:
    """The package's own."""
    return ScannConfig()


def build(workdir: Path, vectors: Enlarged, queries: NDArray[np.float32], edited: int = 0, step: int = 0) -> None:
    """The builder's part. edited: the rows, the last ones, that an edit of the corpus added; step: of the export."""
    folder = PosixFolder(workdir)

    def read(first: int, last: int) -> CorpusRows:
        return CorpusRows(np.arange(first, last)[:, None], *[np.ones(last - first, np.int32)] * 2)

    def embed(rows: CorpusRows) -> NDArray[np.float32]:
        numbers = rows.ids[:, 0]
        whole = len(numbers) == numbers[-1] - numbers[0] + 1
        if whole:
            return vectors[int(numbers[0]) : int(numbers[-1]) + 1]
        return np.concatenate([vectors[number : number + 1] for number in numbers.tolist()])

    segments = [("all", vectors.rows - edited)] + [("edit", edited)] * bool(edited)
    corpus = Corpus(f"enlarged {edited}", "none", tuple(segments), read)
    record = {"step": step, "tokenizer": "none", "corpus": corpus.fingerprint, "towers": {}, "index": {}}
    export = write_export(folder, record, {"none": np.zeros(1, np.float32)}, queries[:1024])
    builder = Builder(folder, corpus, "bfloat16", CHUNK_ROWS, searches=settings())
    began = time.monotonic()
    with Memory() as memory:
        manifest = builder.build(export, embed, queries[:1024])
    report(
        rows=vectors.rows, phase="edit" if edited else "turn" if step else "build", seconds=time.monotonic() - began,
        **manifest.seconds, **manifest.recall,
        anonymous_gb=memory.anonymous, file_gb=memory.files, shards=len(manifest.searcher["shards"]),
        leaves=manifest.searcher["shards"][0]["leaves"], searched=manifest.searcher["shards"][0]["leaves_searched"],
        disk_gb=sum(path.stat().st_size for path in workdir.rglob("*") if path.is_file()) / 1e9,
    )  # fmt: skip


def search(workdir: Path, queries: NDArray[np.float32]) -> None:
    """A trainer host's part: verify and load, then search batches."""
    folder = PosixFolder(workdir)
    manifest = read_manifest(folder, generation_names(folder)[0])
    assert manifest is not None and manifest.searcher is not None
    with Memory() as memory:
        began = time.monotonic()
        vectors = load_vectors(folder, manifest)
        loaded = time.monotonic()
        searcher = load_searcher(folder, manifest, vectors)
        ready = time.monotonic()
        batches = [queries[start : start + BATCH] for start in range(2048, 2048 + BATCH * REPEATS, BATCH)]
        exact = [exact_rows(batch, vectors, DEPTH) for batch in batches[:2]]
        curve = [measured(searcher, batches, exact, searched) for searched in (None, *SEARCHED)]
    report(
        rows=manifest.rows, phase="search", verify_and_load=loaded - began, load_searcher=ready - loaded,
        anonymous_gb=memory.anonymous, file_gb=memory.files,
    )  # fmt: skip
    for point in curve:
        report(rows=manifest.rows, **point)


def measured(
    searcher: Searcher, batches: list[NDArray[np.float32]], exact: list[NDArray[np.int32]], searched: int | None
) -> dict[str, Any]:
    """Recall and the median time of a batch; searched: leaves of every shard, None for the settings' own."""
    searcher.search(batches[0], DEPTH, searched)
    times, found = [], []
    for batch in batches:
        began = time.monotonic()
        found.append(searcher.search(batch, DEPTH, searched))
        times.append(time.monotonic() - began)
    share = statistics.fmean(recall(*pair) for pair in zip(found, exact, strict=False))
    seconds = statistics.median(times)
    return {"leaves_searched": searched, "recall@8": share, "batch_512_ms": seconds * 1e3}


def check(real: NDArray[np.float32], queries: NDArray[np.float32]) -> None:
    """ScaNN's recall by leaves searched over all real passages, and over a part of them, enlarged to as many."""
    own = settings()
    trees = ScannConfig(budget=own.budget, shard_rows=len(real), tree_from=1)
    asked = [queries[2048 : 2048 + 2 * BATCH]]
    order = np.random.default_rng(0).permutation(len(real))
    for part in (1, 4, 16, 64):
        vectors = Enlarged(real[np.sort(order[: len(real) // part])], len(real))[0 : len(real)]
        searcher, exact = Searcher.build(vectors, trees), [exact_rows(asked[0], vectors, DEPTH)]
        for searched in (1, 2, 4, 8, *SEARCHED[:4]):
            point = measured(searcher, asked, exact, searched)
            report(rows=len(real), real=len(real) // part, **point)


def report(**values: Any) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}), flush=True)


if __name__ == "__main__":
    main()
