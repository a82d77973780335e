"""Prepare a folder and print counts of kept and skipped records, for the commands and the Python API."""

import time
from collections import Counter

from realm_jax.corpora.articles import Counts
from realm_jax.corpora.preparation import Options, prepare


def prepare_and_print(options: Options) -> None:
    """Write a prepared folder and print a summary: counts, and samples of skipped records.

    Raises:
        UserError: a fault in the inputs, or the output exists otherwise.
    """
    started = time.monotonic()
    output, prepared = options.output, prepare(options)
    if prepared is None:
        print(f"{output} was prepared from the same inputs with the same settings; nothing to do")
        return
    for name, summary in prepared.summaries.items():
        counts = prepared.counts[name]
        line = f"{name}: {summary.articles:,} articles -> {summary.passages:,} passages"
        changes = _with_reasons("", "", summary.notes)
        print(_with_reasons(line, "dropped", counts.dropped + counts.damaged) + changes)
        _print_samples(counts)
    splits = ", ".join(f"{split} {count:,}" for split, count in prepared.manifest["questions"].items()) or "none"
    print(_with_reasons(f"questions: {splits}", "dropped", prepared.questions.dropped + prepared.questions.damaged))
    _print_samples(prepared.questions)
    print(f"vocabulary: {prepared.vocabulary:,} word pieces; language: {prepared.manifest['language']}")
    print(f"{output} is ready after {time.monotonic() - started:.0f} seconds")


def _print_samples(counts: Counts) -> None:
    for kind, note in counts.common_notes().items():
        print(f"  {note['times']:,} × {kind}, such as {', '.join(list(note['names'])[:5])}")
    for reason, samples in sorted(counts.samples.items()):
        print(f"  {reason}, such as: " + " | ".join(sample[:100] for _, _, sample in samples))


def _with_reasons(line: str, verb: str, reasons: Counter[str]) -> str:
    """Return `line; dropped 4 of other sources, 3 without words`, with the most frequent reason first."""
    often = sorted(reasons.items(), key=lambda reason: (-reason[1], reason[0]))
    counted = ", ".join(f"{count:,} {reason}" for reason, count in often if count)
    return f"{line}; {verb} {counted}".replace("  ", " ") if counted else line
