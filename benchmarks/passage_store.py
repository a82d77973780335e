"""How fast a passage store of real size opens and reads, and how much memory that takes.

Makes a store of a million passages of about 135 words (generated text, about 1.2 GB on disk), then reads it in a fresh
process, first with its files dropped from the page cache, then again. Prints a table.

    python benchmarks/passage_store.py [--passages 1000000] [--folder DIR]

Memory is the process's resident set: pages of mapped files count as long as they stay mapped, and the system may take
them back at any time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from realm_jax.corpora.build import PassagePacker
from realm_jax.corpora.outcomes import Article
from realm_jax.data.segments import Passage
from realm_jax.data.store import PassageStore, append_segment
from realm_jax.data.wordpiece import WordPiece

WORDS = 135  # ORQA's blocks have about as many on average
DIFFERENT_TEXTS = 4000
READS = 10_000
MATRIX_ROWS, MATRIX_LENGTH = 25_000, 288
SYLLABLES = "ba be bi bo da de di do ka ke ki ko la le li lo ma me mi mo na ne ni no ra re ri ro sa se si so".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where to make the store (default: a temporary folder)")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        print(json.dumps(read(args.read)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        store = Path(folder) / "store"
        seconds = make(store, args.passages)
        size = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
        drop_from_page_cache(store)
        cold, warm = in_fresh_process(store), in_fresh_process(store)
    print(f"{args.passages:,} passages, {size / 1e9:.2f} GB, written in {seconds:.0f} s\n")
    print(f"{'':44}{'first run':>12}{'second run':>12}")
    for name in cold:
        print(f"{name:44}{cold[name]:>12,.4g}{warm[name]:>12,.4g}")


def make(folder: Path, passages: int, tokenizer: Path | None = None) -> float:
    """Write the store from a few thousand different texts under a million different ids; seconds of writing.

    tokenizer: where to save that, too.
    """
    rng = np.random.default_rng(0)
    vocabulary = ["".join(rng.choice(SYLLABLES, rng.integers(1, 4))) for _ in range(20_000)]
    texts = [text(rng, vocabulary) for _ in range(DIFFERENT_TEXTS)]
    tokenizer = WordPiece.train(texts, 8000)
    if tokenizer is not None:
        tokenizer.save(tokenizer)
    started = time.monotonic()
    rows = generated_rows(texts, tokenizer)
    with append_segment(folder, tokenizer, 288) as writer:
        for start in range(0, passages, len(rows)):
            batch = [replace_id(row, start + number) for number, row in enumerate(rows[: passages - start])]
            writer.write(batch)
    return time.monotonic() - started


def text(rng: np.random.Generator, vocabulary: list[str]) -> str:
    """Sentences of Zipf-distributed words, some of them capitalised, with a year now and then."""
    ranks = np.minimum(rng.zipf(1.2, WORDS) - 1, len(vocabulary) - 1)
    words = [vocabulary[rank].capitalize() if rank > 5000 else vocabulary[rank] for rank in ranks]
    words[:: len(words) // 3] = [str(year) for year in rng.integers(1800, 2020, len(words[:: len(words) // 3]))]
    sentences = [" ".join(words[start : start + 22]).capitalize() + "." for start in range(0, WORDS, 22)]
    return " ".join(sentences)


def generated_rows(texts: list[str], tokenizer: WordPiece) -> list[Passage]:
    """One row for each text, as `realm prepare` would make it."""
    articles = [Article(str(number), f"Title {number}", text) for number, text in enumerate(texts)]
    with tempfile.TemporaryDirectory() as folder:
        with append_segment(folder, tokenizer, 512) as writer:
            writer.write(PassagePacker(tokenizer, 512, "rules")(articles)[0])
        store = PassageStore.open(folder)
        return [as_passage(store, row) for row in range(len(store))]


def as_passage(store: PassageStore, row: int) -> Passage:
    spans = [(start, end, store.span_kinds[kind]) for start, end, kind in store.spans(row).tolist()]
    title, body = np.array(store.title_tokens(row)), np.array(store.body_tokens(row))
    return Passage("", store.title(row), store.text(row), title, body, np.array(store.sentences(row)), spans)


def replace_id(row: Passage, number: int) -> Passage:
    return Passage(
        f"document-{number:08d}", row.title, row.text, row.title_tokens, row.body_tokens, row.sentences, row.spans
    )


def drop_from_page_cache(folder: Path) -> None:
    """Let the next reader find nothing in memory, where the system offers that."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in folder.rglob("*.*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def in_fresh_process(store: Path) -> dict[str, float]:
    output = subprocess.run([sys.executable, __file__, "--read", store], check=True, capture_output=True, text=True)
    return json.loads(output.stdout)


def read(folder: Path) -> dict[str, float]:
    """Time everything a training job does with a store."""
    results: dict[str, float] = {}
    results["resident memory before (MB)"] = resident()
    store = timed(results, "open (s)", lambda: PassageStore.open(folder))
    results["resident memory after opening (MB)"] = resident()
    rows = np.random.default_rng(1).integers(0, len(store), READS).tolist()
    timed(results, f"{READS:,} random reads of tokens and text (s)", lambda: [read_row(store, row) for row in rows])
    results["resident memory after reading (MB)"] = resident()
    timed(results, "lengths of all rows (s)", store.lengths)
    timed(results, "first look-up of a document (s)", lambda: store.rows_of("document-00000007"))
    names = [f"document-{row:08d}" for row in rows]
    timed(results, f"{READS:,} look-ups of documents (s)", lambda: [store.rows_of(name) for name in names])
    special = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]).special
    part = slice(0, MATRIX_ROWS)
    timed(results, f"matrix {MATRIX_ROWS:,} x {MATRIX_LENGTH} (s)", lambda: store.document_matrix(288, special, part))
    return results


def read_row(store: PassageStore, row: int) -> tuple[int, str]:
    """Sum the tokens, so that their pages are really read."""
    return int(store.title_tokens(row).sum()) + int(store.body_tokens(row).sum()), store.text(row)


def timed(results: dict[str, float], name: str, action: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    value = action()
    results[name] = time.perf_counter() - started
    return value


def resident() -> float:
    return psutil.Process().memory_info().rss / 1e6


if __name__ == "__main__":
    main()
