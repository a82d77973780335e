"""How fast a piece of a Wikipedia dump becomes passages on one core, and what that means for a whole one.

Reads the piece, then reads and cleans it, then packs its articles with salient spans by rules, each in this process.
A whole dump is taken to be as many passages as the released index of the paper has (13,353,718), each with as much text
and XML behind it as those of the piece; hours are given for one machine and for 100 workers of two cores each.

    python benchmarks/dump.py --dump enwiki-…-pages-articles1.xml-p….bz2 --vocab vocab.txt [--cores 32]
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from realm_jax.corpora import wikipedia
from realm_jax.corpora.articles import Article
from realm_jax.corpora.packer import PassagePacker
from realm_jax.data.input_files import open_unpacked
from realm_jax.data.wordpiece import WordPiece

PASSAGES = 13_353_718  # of the index that was released with Guu et al. 2020
WORKERS, CORES = 100, 2

_T = TypeVar("_T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dump", required=True)
    parser.add_argument("--vocab", required=True)
    parser.add_argument("--cores", type=int, default=32, help="of the one machine (default: %(default)s)")
    args = parser.parse_args()
    with open_unpacked(args.dump) as stream:
        xml = len(stream.read())
    pages, reading = timed(
        lambda: [page for page in wikipedia.read_pages(args.dump) if isinstance(page, wikipedia.Page)]
    )
    notes: Counter[Any] = Counter()
    found, cleaning = timed(lambda: [wikipedia.clean_page(page, notes) for page in pages])
    articles = [article for article in found if isinstance(article, Article)]
    text = sum(len(article.text.encode()) for article in articles)
    packer = PassagePacker(WordPiece.from_vocab(args.vocab), 288, "rules")
    (_, summary), packing = timed(lambda: packer(articles))
    print(
        f"{xml / 1e6:.1f} MB of XML, {len(pages)} pages, {len(articles)} articles, {text / 1e6:.2f} MB of text, ",
        end="",
    )
    print(f"{summary.passages:,} passages")
    for name, seconds in {"read": reading, "cleaned": cleaning, "packed": packing}.items():
        speed, each = xml / 1e6 / seconds, 1e3 * seconds / summary.passages
        print(f"{name}: {seconds:.2f} s, {speed:.1f} MB of XML/s, {each:.3f} ms a passage")
    hours = PASSAGES * (reading + cleaning + packing) / summary.passages / 3600
    here, there = hours / args.cores, hours / WORKERS / CORES
    print(f"{PASSAGES:,} passages: {hours:.1f} hours of one core, {here:.2f} h on {args.cores} cores, ", end="")
    print(f"{there:.2f} h on {WORKERS} workers of {CORES}")


def timed(act: Callable[[], _T]) -> tuple[_T, float]:
    began = time.perf_counter()
    return act(), time.perf_counter() - began


if __name__ == "__main__":
    main()
