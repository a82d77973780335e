"""`realm inspect data`: prepared passages with their salient spans in colour, queries masked from them, and numbers.

    realm inspect data data/wiki --rows=3
    realm inspect data data/wiki --html=wiki.html

Not for a trained model.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from realm_jax.cli.argument_types import nonempty
from realm_jax.cli.output import stdout, write_output
from realm_jax.config import default, validate
from realm_jax.config_flags import add_config_argument, load_config
from realm_jax.console import printable
from realm_jax.data.evidence import EvidenceSpans, find_evidence
from realm_jax.data.examples import Example, Lengths, lengths_from, masked_arrays, spans_of
from realm_jax.data.sources import Sources, open_sources
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.errors import UserError
from realm_jax.eval.html import Bar, Section, render_page

COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")  # of kinds of spans, in their order
COMMON_SPANS = 20
SAMPLED_ROWS = 20_000  # evenly spread rows whose most common spans are counted


class Histogram(NamedTuple):
    """Counts of a whole number. edges: the first number of each bin, and one past the last, [bins + 1]."""

    edges: NDArray[np.int64]
    counts: NDArray[np.int64]
    mean: float
    median: float
    most: int


class Statistics(NamedTuple):
    """Numbers of a store. histograms: by name of what is counted; spans: most common spans (words, kind, times)."""

    numbers: dict[str, Any]
    histograms: dict[str, Histogram]
    kinds: dict[str, int]
    spans: list[tuple[str, str, int]]


def add_arguments(add: argparse.ArgumentParser) -> None:
    """The arguments of `realm inspect data`, but those of both kinds."""
    add_config_argument(add, "passages, and queries masked as by the built-in one")
    add.add_argument("--rows", type=int, default=3, metavar="N", help="passages to show (default: 3)")
    add.add_argument("--document", type=nonempty, metavar="ID", help="show the passages of this document instead")


def run(args: argparse.Namespace, html: Path | None) -> None:
    """Show passages of the folder `args.subject`, and numbers. html: a checked file for the page."""
    if args.rows < 0:
        raise UserError(f"--rows={args.rows}: must be at least 0")
    config = load_config(args.config, args.overrides, _default_config)
    config.data.path = args.subject
    validate(config)
    sources = open_sources(args.subject, flag="")
    store = sources.passages if config.data.text == "passages" else sources.pretraining
    data, masking, width = config.data, config.realm.masking, config.model.span_width
    lengths = lengths_from(data.query_length, store.limit, masking, data.predictions, 1, width)
    screen = stdout()
    evidence = find_evidence(store, *lengths.hidden).spans if masking == "evidence" else None
    for row in chosen_rows(store, args.document, args.rows, config.seed):
        show_passage(screen, store, row, sources.tokenizer)
        query = masked_query(store, row, sources.tokenizer, lengths, masking, config.seed, evidence)
        show_query(screen, sources.tokenizer, query)
    found = statistics(store, sources.tokenizer)
    show_numbers(screen, found, sources)
    if html:
        write_output(html, page(args.subject, config.data.text, found))
        print(f"{args.html} is written")


def _default_config() -> ConfigDict:
    """The default: show the passages, which every prepared folder has."""
    config = default()
    config.data.text = "passages"
    return config


def chosen_rows(store: PassageStore, document: str | None, count: int, seed: int) -> list[int]:
    """The rows of a document, or some drawn at random. Raises UserError for a document that is not there."""
    if document is not None:
        rows = store.rows_of(document)
        if not rows:
            raise UserError(f"--document={document}: {store.folder} has no such document")
        return list(rows)
    rng = np.random.default_rng(seed)
    return sorted(rng.choice(len(store), min(count, len(store)), replace=False).tolist())


def spans_in_text(store: PassageStore, row: int, tokenizer: Tokenizer) -> list[tuple[int, int, int]]:
    """The salient spans of a row: first character, the one behind the last, and kind.

    Found again by the characters that their tokens stand for. Raises UserError for a text that has other tokens.
    """
    offsets = tokenizer.offsets_of(store.text(row), store.body_tokens(row))
    if offsets is None:
        raise UserError(f"{store.folder}: the text of row {row} does not give its tokens; prepare the data again")
    return [(int(offsets[start, 0]), int(offsets[end - 1, 1]), int(kind)) for start, end, kind in store.spans(row)]


def statistics(store: PassageStore, tokenizer: Tokenizer) -> Statistics:
    """Count lengths, sentences, spans and unknown words of all rows; the common spans are those of sampled rows."""
    passages, titles, span_counts = store.counts("tokens"), store.column("title_lengths"), store.counts("spans")
    stored_tokens = [segment.columns["tokens"] for segment in store.segments]
    unknown = sum(int(np.count_nonzero(tokens == tokenizer.unk_id)) for tokens in stored_tokens)
    numbers = {
        "passages": len(store),
        "documents": store.documents,
        "tokens": int(passages.sum() - titles.sum(dtype=np.int64)),
        "unknown tokens": unknown / max(1, sum(map(len, stored_tokens))),
        "salient spans": int(span_counts.sum()),
        "passages without a span": float((span_counts == 0).mean()) if len(store) else 0.0,
    }
    starts, ends, kinds = store.column("spans").T.astype(np.int64)  # [spans] each
    histograms = {
        "tokens of a passage": histogram(passages + 3),
        "sentences of a passage": histogram(store.counts("sentences")),
        "salient spans of a passage": histogram(span_counts),
        "tokens of a salient span": histogram(ends - starts),
        "tokens of a title": histogram(titles),
    }
    kind_counts = Counter(dict.fromkeys(store.span_kinds, 0))
    kind_counts.update(dict(zip(store.span_kinds, np.bincount(kinds).tolist(), strict=False)))
    span_tokens: Counter[tuple[bytes, int]] = Counter()
    for row in range(0, len(store), -(-len(store) // SAMPLED_ROWS) or 1):
        body = store.body_tokens(row)
        span_tokens.update((body[start:end].tobytes(), int(kind)) for start, end, kind in store.spans(row))
    common = sorted(span_tokens.items(), key=lambda item: (-item[1], item[0]))[:COMMON_SPANS]
    spans = [(tokenizer.decode(np.frombuffer(t, store.dtype)), store.span_kinds[k], times) for (t, k), times in common]
    return Statistics(numbers, histograms, dict(kind_counts.most_common()), spans)


def histogram(values: NDArray[Any], bins: int = 16) -> Histogram:
    """Count values in at most `bins` bins of equal whole width."""
    if not len(values):
        return Histogram(np.arange(2), np.zeros(1, np.int64), 0.0, 0.0, 0)
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // bins)
    edges = np.arange(low, high + 1 + width, width)  # [bins + 1]
    counts = np.histogram(values, edges - 0.5)[0]  # [bins]
    return Histogram(edges, counts.astype(np.int64), float(values.mean()), float(np.median(values)), high)


def show_passage(screen: Console, store: PassageStore, row: int, tokenizer: Tokenizer) -> None:
    """A passage with its spans in colour."""
    head = Text(printable(store.title(row)) or "(no title)", style="bold")
    head.append(printable(f"   row {row} of {len(store):,}, document {store.document_id(row)}"), style="dim")
    screen.print(head)
    body = Text(printable(store.text(row)))
    for start, end, kind in spans_in_text(store, row, tokenizer):
        body.stylize(f"bold {COLOURS[kind % len(COLOURS)]}", start, end)
    screen.print(body)


def show_query(screen: Console, tokenizer: Tokenizer, query: Example | None) -> None:
    """A query as pre-training makes it from a passage, and what is to be predicted."""
    if query is None:
        screen.print("  no query: nothing in it can be masked\n", style="dim")
        return
    line = Text("  ")
    ids, before = query["query"][: query["query_length"]].tolist(), ""
    for number in range(len(ids)):
        masked = number in query["positions"][query["weights"] > 0]
        text = tokenizer.decode(ids[: number + 1])
        line.append(printable(text[len(before) :]), style="bold red" if masked else "dim")
        before = text
    targets = query["targets"][query["weights"] > 0]
    line.append(printable(f"   = {tokenizer.decode(targets)}"), style="bold")
    screen.print(line)
    screen.print()


def masked_query(
    store: PassageStore, row: int, tokenizer: Tokenizer, lengths: Lengths, masking: str, seed: int,
    evidence: EvidenceSpans | None = None,
) -> Example | None:  # fmt: skip
    """A masked sentence of a row; None if nothing can be masked. evidence: the spans that may be hidden, if not all."""
    rng = np.random.default_rng((seed, row))
    for number in rng.permutation(len(store.sentences(row))):
        sentence, spans = spans_of(store, row, int(number))
        spans = spans if evidence is None else evidence.of_sentence(store, row, int(number))
        found = masked_arrays(sentence, spans, masking, rng, lengths, tokenizer)
        if found["weights"].any():
            return found
    return None


def show_numbers(screen: Console, found: Statistics, sources: Sources) -> None:
    """Numbers, one a line, and what the folder holds beside the texts."""
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in found.kinds.items())
    counts = ", ".join(f"{split} {len(questions):,}" for split, questions in sources.questions.items())
    lines = [
        *(f"{name:>24}  {_number(value)}" for name, value in found.numbers.items()),
        f"{'of kinds':>24}  {kinds or 'none'}",
        *(
            f"{name:>29}  mean {one.mean:.1f}, median {one.median:.0f}, most {one.most}"
            for name, one in found.histograms.items()
        ),
        f"{'questions':>24}  {counts or 'none'}",
    ]
    for line in lines:
        screen.print(Text(printable(line)))


def page(folder: str, which: str, found: Statistics) -> str:
    """The numbers and histograms as a page."""
    most = max(found.kinds.values(), default=1) or 1
    numbers = [(name, _number(value)) for name, value in found.numbers.items()]
    spans = [(span, kind, f"{times:,}") for span, kind, times in found.spans]
    sections = [
        Section("The corpus in numbers", rows=numbers, numbers=1),
        Section("Kinds of salient spans", bars=[Bar(kind, n, f"{n:,}", most) for kind, n in found.kinds.items()]),
        *(
            Section(name, f"Mean {one.mean:.1f}, median {one.median:.0f}.", bars=list(_bars(one)))
            for name, one in found.histograms.items()
        ),
        Section(
            "Most common salient spans",
            "As word pieces, in passages evenly spread over the corpus.",
            ("span", "kind", "times"),
            spans,
            1,
        ),
    ]
    return render_page(f"{which} of {Path(folder).name}", which.title(), sections)


def _bars(one: Histogram) -> Iterator[Bar]:
    most = max(1.0, float(one.counts.max()))
    for first, after, count in zip(one.edges[:-1], one.edges[1:], one.counts, strict=True):
        label = f"{first}" if after - first == 1 else f"{first} – {after - 1}"
        yield Bar(label, float(count), f"{count:,}", most)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2%}"
