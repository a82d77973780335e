"""How fast text becomes passages, against `tokenizers.encode_batch` alone on the same text and as many cores.

Reads some megabytes of articles into memory, and then, in turns: only encodes them; sentences, tokens and packing;
the same with salient spans by rules. First on one core, then on all: the tokenizer alone in threads of its own, ours in
processes that run already. Prints the median of the rounds.

    python benchmarks/preparing.py --passages articles.jsonl.xz --vocab vocab.txt [--megabytes 40] [--rounds 5]
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from realm_jax.corpora.articles import Article
from realm_jax.corpora.packer import PassagePacker
from realm_jax.corpora.texts import read_passages
from realm_jax.data.spans import Span
from realm_jax.data.wordpiece import WordPiece

BATCH = 64  # articles, about a million characters
FINDERS = {"sentences, tokens, packing": "preparing:nothing", "the same with salient spans by rules": "rules"}

_packers: dict[str, PassagePacker] = {}  # of a worker process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", required=True)
    parser.add_argument("--vocab", required=True)
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    articles = first_articles(args.passages, args.megabytes * 1e6)
    batches = [articles[start : start + BATCH] for start in range(0, len(articles), BATCH)]
    megabytes = sum(len(article.text.encode()) for article in articles) / 1e6
    print(f"{len(articles):,} articles, {megabytes:.1f} MB")
    for cores in sorted({1, os.cpu_count() or 1}):
        for name, seconds, ratio in measured(args.vocab, batches, cores, args.rounds):
            print(f"{cores} cores: {name}: {seconds:.2f} s, {megabytes / seconds:.2f} MB/s, {ratio:.2f}x", flush=True)


def first_articles(path: str, characters: float) -> list[Article]:
    """Articles from the beginning of a file until they have so many characters."""
    articles: list[Article] = []
    for article in read_passages(path):
        articles.append(article)
        characters -= len(article.text)
        if characters <= 0:
            break
    return articles


def measured(vocab: str, batches: list[list[Article]], cores: int, rounds: int) -> list[tuple[str, float, float]]:
    """(what, median seconds, speed by that of the tokenizer alone)."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if cores > 1 else "false"
    tokenizer = WordPiece.from_vocab(vocab)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, context, start, (vocab,)) as pool:
        jobs: dict[str, Callable[[], None]] = {"encode_batch alone": lambda: encode(tokenizer, batches)}
        for name, finder in FINDERS.items():
            jobs[name] = lambda finder=finder: pack(pool, finder, batches)  # type: ignore[misc]
        seconds: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(rounds + 1):
            for name, job in jobs.items():
                began = time.perf_counter()
                job()
                seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first warms up
    return [(name, value, medians["encode_batch alone"] / value) for name, value in medians.items()]


def encode(tokenizer: WordPiece, batches: list[list[Article]]) -> None:
    for batch in batches:
        tokenizer.encode_batch([article.text for article in batch])


def pack(pool: ProcessPoolExecutor, finder: str, batches: list[list[Article]]) -> None:
    """Articles go to the processes and rows come back, as in `realm prepare`."""
    for future in [pool.submit(pack_here, finder, batch) for batch in batches]:
        future.result()


def start(vocab: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = WordPiece.from_vocab(vocab)
    _packers.update({finder: PassagePacker(tokenizer, 288, finder) for finder in FINDERS.values()})


def pack_here(finder: str, batch: list[Article]):
    return _packers[finder](batch)


def nothing(text: str) -> list[Span]:
    """A finder of salient spans that finds none."""
    return []


if __name__ == "__main__":
    main()
