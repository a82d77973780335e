"""A table of ablations: means and intervals over seeds, as Markdown and as HTML.

Intervals are Student's t over seeds, so they are about other seeds on the same corpus and questions; differences to the
first row are paired by seed. Not for uncertainty over questions: read `significance.py`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from realm_jax.eval.format import duration
from realm_jax.eval.html import Section, render_page
from realm_jax.eval.significance import LEVEL, Mean, mean_of, paired_mean

HEADS = (
    "", "exact match", "first − this", "answer in the first 5", "gold in the first 5",
    "paper: exact match", "paper: answer in the first 5", "seeds", "time",
)  # fmt: skip
NOTE = (
    "Exact match after fine-tuning, and zero-shot recall of the answer and of the gold passage before any question was "
    f"seen, in per cent of the development questions: mean over seeds, with the {LEVEL:.0%} interval of Student's t. "
    "The paper's numbers are of Natural Questions (Guu et al. 2020, table 2)."
)


class SeedResult(NamedTuple):
    """The results of one training run of a row.

    Attributes:
        exact_match: after fine-tuning, 0 to 1.
        answer_recall: answer recall@5 before any question, 0 to 1; None if nothing was retrieved.
        recall: recall@5 before any question, 0 to 1; None also if the questions have no gold passage.
        seconds: training time, including that of the run it starts from.
    """

    exact_match: float
    answer_recall: float | None
    recall: float | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration, trained with several seeds.

    Attributes:
        title: its name in the table.
        paper: the paper's exact match and recall, in per cent; () if it has none.
        seeds: seed → results.
    """

    title: str
    paper: tuple[float, ...]
    seeds: Mapping[int, SeedResult]


def paired_difference(first: Row, row: Row) -> Mean | None:
    """Return the first row's exact match minus that of a row, paired by seed.

    Args:
        first: the row to compare with.
        row: any row.

    Returns:
        The mean difference with its interval; None if they have no seed in common.
    """
    seeds = sorted(first.seeds.keys() & row.seeds.keys())
    if not seeds:
        return None
    return paired_mean(
        [row.seeds[seed].exact_match for seed in seeds], [first.seeds[seed].exact_match for seed in seeds]
    )


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table's cells below HEADS, without the rows that have no seed yet."""
    trained = [row for row in rows if row.seeds]
    table = []
    for row in trained:
        results = list(row.seeds.values())
        answer_recall = [result.answer_recall for result in results if result.answer_recall is not None]
        recall = [result.recall for result in results if result.recall is not None]
        lead = None if row is trained[0] else paired_difference(trained[0], row)
        table.append([
            row.title,
            _percent(mean_of([result.exact_match for result in results])),
            "" if lead is None else _percent(lead),
            _percent(mean_of(answer_recall)) if answer_recall else "",
            _percent(mean_of(recall)) if recall else "",
            *([f"{value:.1f}" for value in row.paper] or ["", ""]),
            str(len(results)),
            duration(float(np.mean([result.seconds for result in results]))),
        ])  # fmt: skip
    return table


def _percent(mean: Mean) -> str:
    ends = "" if mean.low is None or mean.high is None else f" ({100 * mean.low:.1f} … {100 * mean.high:.1f})"
    return f"{100 * mean.value:.1f}{ends}"


def markdown(rows: Sequence[Row], note: str) -> str:
    """Return the table as Markdown.

    Args:
        rows: rows of the table.
        note: the data that the table was measured on.
    """
    filled = [[cell.replace("|", r"\|") for cell in line] for line in cells(rows)]
    lines = [list(HEADS), ["---"] * len(HEADS), *filled]
    return "\n".join([f"{note}\n", *(f"| {' | '.join(line)} |" for line in lines), f"\n{NOTE}\n"])


def html(rows: Sequence[Row], note: str) -> str:
    """Return the table as a page of HTML. Arguments: see `markdown`."""
    table = Section("Results", "", HEADS, cells(rows), len(HEADS) - 1)
    return render_page("REALM: ablations", "Ablations", [table], notes=[f"{note} {NOTE}"])
