"""How well and how fast text is cut into sentences: the rules of this package beside libraries that are installed.

Takes annotated text whose sentences are known (wikigold: 1,696 sentences of Wikipedia), with its tokens apart as it
stands and with the spaces before punctuation taken away, as prose is written. Prints precision, recall and F1 of the
ends of sentences inside documents, and megabytes a second on one core.

    pip install pysbd segtok sentencex blingfire syntok
    python benchmarks/sentence_splitters.py --path wikigold.conll.txt
"""

import argparse
import importlib
import re
import time
from collections.abc import Callable, Iterator

from realm_jax.data.sentences import split

Splitter = Callable[[str], list[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="annotated text in the format of CoNLL")
    args = parser.parse_args()
    documents = read_conll(args.path)
    texts = {"tokens apart": documents, "prose": [[prose(sentence) for sentence in own] for own in documents]}
    splitters = {name: splitter for name, make in MAKERS.items() if (splitter := made(make)) is not None}
    for form, sentences in texts.items():
        for name, splitter in splitters.items():
            print(form, "|", name, "|", measure(splitter, sentences), flush=True)


def read_conll(path: str) -> list[list[str]]:
    """The sentences of each document. A line is a token and its tag, a blank line ends a sentence, and `-DOCSTART-`
    begins a document."""
    with open(path, encoding="utf-8") as file:
        blocks = [[line.split()[0] for line in block.splitlines()] for block in file.read().split("\n\n")]
    documents: list[list[str]] = [[]]
    for tokens in blocks:
        if tokens[:1] == ["-DOCSTART-"]:
            documents.append([])
        elif tokens:
            documents[-1].append(" ".join(tokens))
    return [document for document in documents if document]


def prose(text: str) -> str:
    """Tokens with the spaces that a writer would leave."""
    text = re.sub(r" ([,.;:!?)\]%]|'s\b|n't\b|'(?:re|ve|ll|d|m)\b)", r"\1", text)
    text = re.sub(r"([(\[$]) ", r"\1", text)
    return re.sub(r'"\s*([^"]*?)\s*"', r'"\1"', re.sub(r"``\s*|\s*''", '"', text))


def measure(splitter: Splitter, documents: list[list[str]]) -> str:
    """Scores over all borders between two sentences of a document; a border is a number of visible characters."""
    right = found = wanted = 0
    seconds = 0.0
    texts = [" ".join(document) for document in documents]
    for text, document in zip(texts, documents, strict=True):
        began = time.perf_counter()
        parts = splitter(text)
        seconds += time.perf_counter() - began
        gold, guess = borders(document), borders(parts)
        right, found, wanted = right + len(gold & guess), found + len(guess), wanted + len(gold)
    precision, recall = right / found, right / wanted
    f1 = 2 * precision * recall / (precision + recall)
    speed = sum(map(len, texts)) / 1e6 / seconds
    return f"precision {precision:.3f}, recall {recall:.3f}, F1 {f1:.3f}, {speed:.2f} MB/s"


def borders(parts: list[str]) -> set[int]:
    """After how many visible characters a sentence ends, the last one left out."""
    ends, place = set(), 0
    for part in parts:
        place += len("".join(part.split()))
        ends.add(place)
    return ends - {place, 0}


def rules() -> Splitter:
    return lambda text: [text[start:end] for start, end in split(text)]


def pysbd() -> Splitter:
    return importlib.import_module("pysbd").Segmenter(language="en", clean=False).segment


def segtok() -> Splitter:
    return lambda text: list(importlib.import_module("segtok.segmenter").split_multi(text))


def sentencex() -> Splitter:
    library = importlib.import_module("sentencex")
    return lambda text: list(library.segment("en", text))


def blingfire() -> Splitter:
    return lambda text: importlib.import_module("blingfire").text_to_sentences(text).split("\n")


def syntok() -> Splitter:
    library = importlib.import_module("syntok.segmenter")

    def sentences(text: str) -> Iterator[str]:
        for paragraph in library.process(text):
            for sentence in paragraph:
                yield text[sentence[0].offset : sentence[-1].offset + len(sentence[-1].value)]

    return lambda text: list(sentences(text))


MAKERS = {
    "rules": rules,
    "pysbd": pysbd,
    "segtok": segtok,
    "sentencex": sentencex,
    "blingfire": blingfire,
    "syntok": syntok,
}


def made(make: Callable[[], Splitter]) -> Splitter | None:
    """A splitter that works, or None if its library is absent."""
    try:
        splitter = make()
        splitter("One. Two.")
    except Exception as fault:
        print(f"{make.__name__}: left out ({fault})")
        return None
    return splitter


if __name__ == "__main__":
    main()
