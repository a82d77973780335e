"""Write the tables and the plot of docs/results/adaptation.md from the stored rank of each question.

    python benchmarks/protocol.py docs/results/adaptation                   print the tables
    python benchmarks/protocol.py docs/results/adaptation --add=med=runs/medquad
    cd docs/results && python ../../benchmarks/protocol.py adaptation --page=adaptation.md --plot=adaptation.svg

A table of the page is between the lines `<!-- table: NAME -->` and `<!-- end -->`. `benchmarks/adaptation.py` makes the
ranks, and --add copies those of a corpus. docs/results/protocol.md says what is measured and why.
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

RESAMPLES = 10_000  # of the clusters
LEVEL = 0.95
FEW_CLUSTERS = 20  # with fewer, resampled clusters vary too little: Student's t
DEPTH = 10  # of nDCG
START = "start"  # the public encoder
START_IN_FLOAT32 = "start_float32"  # on the machine that measured IN_FLOAT32, which has no bfloat16
IN_FLOAT32 = {"uniform", "realm", "shuffled", "terms", "words_fail", "questions"}  # methods
SYSTEMS = {  # name in the files → title
    "vectors": "vectors",
    "bm25": "BM25",
    "hybrid": "hybrid",
    "hybrid+tokens": "hybrid + stored tokens",
    "hybrid+384 dimensions": "hybrid + tokens",
}
PIPELINE = "hybrid+tokens"  # what a user of `realm index --store-tokens` gets


class QuestionSet(NamedTuple):
    """A set of questions.

    Attributes:
        title: on the page.
        is_tuned_on: true if methods were chosen by it, so that it is not evidence.
    """

    title: str
    is_tuned_on: bool = False


SETS = {
    "med_dev": QuestionSet("MedQuAD dev"),
    "med_synonyms": QuestionSet("MedQuAD synonyms"),
    "med_known_synonyms": QuestionSet("MedQuAD synonyms in the corpus"),
    "qed_dev": QuestionSet("QED dev"),
    "squad_held": QuestionSet("SQuAD held out"),
    "quoref": QuestionSet("Quoref"),
    "cisi": QuestionSet("CISI"),
    "med_train": QuestionSet("MedQuAD train", is_tuned_on=True),
    "squad44": QuestionSet("SQuAD train", is_tuned_on=True),
}
REPORTED = [name for name, each in SETS.items() if not each.is_tuned_on]


class Change(NamedTuple):
    """The change of a mean from one system to another, over the same questions.

    Attributes:
        value: of the mean.
        low: lower end of its 95 % interval.
        high: upper end.
        p: two-sided.
    """

    value: float
    low: float
    high: float
    p: float


class Results:
    """The stored ranks.

    Attributes:
        clusters: set → number of the cluster of each question.
        seconds: method → file of ranks → seconds of training, one per seed.
    """

    def __init__(self, folder: Path) -> None:
        self._values: dict[tuple[str, str, str], dict[int, NDArray]] = {}  # set, method, system → seed → [questions]
        self.clusters: dict[str, NDArray] = {}
        self.seconds: dict[str, dict[str, list[float]]] = {}
        subsets: dict[str, tuple[str, NDArray]] = {}
        for path in sorted(folder.glob("*.npz")):
            with np.load(path, allow_pickle=False) as arrays:
                for key, array in arrays.items():
                    match key.split("/"):
                        case [name, parent, "members"]:
                            subsets[name] = parent, array
                        case [name, "clusters"]:
                            self.clusters[name] = array
                        case ["seconds", method, _]:
                            self.seconds.setdefault(method, {}).setdefault(path.stem, []).append(float(array))
                        case [name, method, seed, system]:
                            self._values.setdefault((name, method, system), {})[int(seed)] = array
        for subset, (parent, members) in subsets.items():
            self.clusters[subset] = self.clusters[parent][members]
            for (name, method, system), by_seed in list(self._values.items()):
                if name == parent:
                    of_subset = {seed: values[members] for seed, values in by_seed.items()}
                    self._values[subset, method, system] = of_subset

    def seeds(self, name: str, method: str, system: str) -> list[int]:
        """Return the seeds that were measured."""
        return sorted(self._values.get((name, method, system), {}))

    def ndcg(self, name: str, method: str, system: str) -> NDArray[np.float64]:
        """Return nDCG@10 of each question, the mean over seeds, [questions]."""
        by_seed = self._values[name, method, system]
        return np.mean([ndcg(by_seed[seed]) for seed in sorted(by_seed)], axis=0)

    def gains(self, name: str, method: str, system: str) -> NDArray[np.float64]:
        """Return nDCG@10 of each question less that of the public encoder on the same machine, [questions]."""
        start = START_IN_FLOAT32 if method in IN_FLOAT32 else START
        return self.ndcg(name, method, system) - self.ndcg(name, start, system)

    def mean_seconds(self, method: str) -> float | None:
        """Return the mean over the large corpora, with the stage before; None if it was not measured."""
        by_corpus = [np.mean(each) for corpus, each in self.seconds.get(method, {}).items() if corpus != "cisi"]
        before = self.mean_seconds(STAGE_BEFORE) if method in SECOND_STAGES else 0.0
        return None if not by_corpus or before is None else float(np.mean(by_corpus)) + before


def ndcg(values: NDArray) -> NDArray[np.float64]:
    """Return nDCG@10 of each question.

    Args:
        values: rank of the only relevant document from 1, 0 for none, [questions] uint8; or nDCG itself, if questions
            have several, [questions] float.
    """
    if values.dtype != np.uint8:
        return values.astype(np.float64)
    ranks = values.astype(np.float64)
    return np.where((ranks > 0) & (ranks <= DEPTH), 1 / np.log2(1 + np.maximum(ranks, 1)), 0.0)


def add(stored: Path, output: Path) -> None:
    """Copy the ranks of all methods and seeds that `adaptation.py` has measured.

    Args:
        stored: file of a corpus, changed; other methods of it stay.
        output: folder with METHOD-SEED.npz.
    """
    with np.load(stored, allow_pickle=False) as arrays:
        content = dict(arrays)
    for path in sorted(output.glob("*-*.npz")):
        method, seed = path.stem.rsplit("-", 1)
        with np.load(path, allow_pickle=False) as arrays:
            for key, array in arrays.items():
                name, _, system = key.partition("/")
                if key == "seconds":
                    content[f"seconds/{method}/{seed}"] = array.astype(np.float32)
                elif system == "clusters":
                    content[key] = array
                else:
                    content[f"{name}/{method}/{seed}/{system}"] = array
    np.savez_compressed(stored, **content)


# --- Statistics -------------------------------------------------------------------------------------------------------


@cache
def _resamples(count: int) -> NDArray[np.float32]:
    """Return how often each cluster is drawn, [RESAMPLES, clusters]."""
    rng = np.random.default_rng(0)
    return rng.multinomial(count, np.full(count, 1 / count), RESAMPLES).astype(np.float32)


def change(before: NDArray, after: NDArray, clusters: NDArray) -> Change:
    """Compare two systems.

    The interval is a percentile bootstrap that draws whole clusters, because their questions succeed and fail together.
    p is twice the smaller share of resamples on one side of 0. With few clusters both are Student's t instead.

    Args:
        before: of the first system, [questions].
        after: of the second system, [questions].
        clusters: number of each question's cluster, [questions].
    """
    changes = after - before
    members = np.unique(clusters, return_inverse=True)[1]
    sums, sizes = np.bincount(members, changes), np.bincount(members)  # [clusters] each
    value, count = float(changes.mean()), len(sizes)
    if not changes.any():
        return Change(0.0, 0.0, 0.0, 1.0)
    if count < FEW_CLUSTERS:
        error = float(np.sqrt(count / (count - 1) * ((sums - value * sizes) ** 2).sum())) / len(changes)
        reach = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * error
        p = 2 * float(stats.t.sf(abs(value) / error, count - 1))
        return Change(value, value - reach, value + reach, p)
    draws = _resamples(count)
    means = (draws @ sums.astype(np.float32)) / (draws @ sizes.astype(np.float32))  # [RESAMPLES]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    p = 2 * (1 + min((means <= 0).sum(), (means >= 0).sum())) / (1 + RESAMPLES)
    return Change(value, float(low), float(high), min(1.0, float(p)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values after Holm's correction, in the same order."""
    order = np.argsort(p_values)
    corrected, largest = np.empty(len(order)), 0.0
    for position, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - position) * p_values[index]))
        corrected[index] = largest
    return corrected.tolist()


def compare(
    results: Results, names: Iterable[str], system: str, before: str, after: str
) -> dict[str, tuple[Change, float]]:
    """Return set → change, and its p after Holm's correction over the reported sets among them.

    Args:
        results: the ranks.
        names: of the sets.
        system: of search.
        before: method, or START.
        after: method.
    """
    measured = [name for name in names if results.seeds(name, before, system) and results.seeds(name, after, system)]
    changes = {
        name: change(results.gains(name, before, system), results.gains(name, after, system), results.clusters[name])
        for name in measured
    }
    reported = [name for name in measured if not SETS[name].is_tuned_on]
    corrected = dict(zip(reported, holm([changes[name].p for name in reported]), strict=True))
    return {name: (each, corrected.get(name, each.p)) for name, each in changes.items()}


# --- Tables -----------------------------------------------------------------------------------------------------------

METHODS = {  # name in the files → title
    "certain": "hidden name (the default)",
    "certain_excluded": "hidden name, source passage excluded",
    "own_only": "hidden name, only the source passage",
    "uniform": "hidden name, uniform posterior",
    "realm": "hidden name, trained reader",
    "shuffled": "hidden name, shuffled reader",
    "terms": "hidden term",
    "words_fail": "hidden term, BM25 in p(z|x)",
    "low_overlap": "hidden name, little overlap",
    "bm25_prior": "hidden name, BM25 in p(z|x)",
    "ict": "complete sentence (ICT)",
    "sentences_distilled": "hidden name, distilled",
    "questions": "generated questions",
    "questions_distilled": "generated questions, distilled",
    "evidence": "evidence contrast, both encoders",
    "evidence_certain": "evidence contrast, then hidden name",
    "evidence_realm": "evidence contrast, then trained reader",
    "evidence_uniform": "evidence contrast, then uniform posterior",
}
STAGE_BEFORE, SECOND_STAGES = "evidence", {"evidence_certain", "evidence_realm", "evidence_uniform"}
DEFAULT = "certain"
CONTROLS = ("certain_excluded", "own_only", "uniform", "realm", "shuffled", "terms", "words_fail", "ict")
Table = list[list[str]]  # head, then rows


def signed(each: Change) -> str:
    """Return a change with its interval, as text."""
    return f"{each.value:+.3f} [{each.low:+.3f}, {each.high:+.3f}]".replace("-", "−")


def short(each: Change, p: float) -> str:
    """Return a change without its interval, in bold if it is significant after Holm's correction."""
    text = f"{each.value:+.3f}".replace("-", "−")
    return f"**{text}**" if p < 1 - LEVEL else text


def starred(each: Change, p: float) -> str:
    """Return a change with its interval, in bold if it is significant after Holm's correction."""
    return f"**{signed(each)}**" if p < 1 - LEVEL else signed(each)


def table_of_stages(results: Results) -> Table:
    """Return nDCG@10 of the public encoder, a row per set and a column per system."""
    systems = [system for system in SYSTEMS if any(results.seeds(name, START, system) for name in SETS)]
    rows = [["question set", "questions", "clusters", *(SYSTEMS[system] for system in systems)]]
    for name, each in SETS.items():
        if name in results.clusters:
            counts = [f"{len(results.clusters[name]):,}", f"{len(np.unique(results.clusters[name])):,}"]
            means = [
                f"{results.ndcg(name, START, system).mean():.3f}" if results.seeds(name, START, system) else "–"
                for system in systems
            ]
            rows.append([("*tuned on:* " if each.is_tuned_on else "") + each.title, *counts, *means])
    return rows


def table_of_recipe(results: Results) -> Table:
    """Return what the default recipe changes, a row per set and a column per system."""
    systems = [system for system in SYSTEMS if any(results.seeds(name, DEFAULT, system) for name in SETS)]
    rows = [["question set", *(f"{SYSTEMS[system]}: after, change" for system in systems)]]
    columns = {system: compare(results, SETS, system, START, DEFAULT) for system in systems}
    for name, each in SETS.items():
        cells = []
        for system in systems:
            if name in columns[system]:
                cells.append(f"{results.ndcg(name, DEFAULT, system).mean():.3f}, {starred(*columns[system][name])}")
            else:
                cells.append("–")
        if set(cells) != {"–"}:
            rows.append([("*tuned on:* " if each.is_tuned_on else "") + each.title, *cells])
    return rows


def table_of_methods(results: Results, system: str) -> Table:
    """Return what each method changes by one system: a row per method and a column per set."""
    names = [name for name in SETS if name in results.clusters]
    rows = [["", "seconds", "seeds", *(SETS[name].title for name in names)]]
    for method, title in METHODS.items():
        changes = compare(results, names, system, START, method)
        if changes:
            mean = results.mean_seconds(method)
            seconds = "–" if mean is None else f"{mean:,.0f}"
            counts = {len(results.seeds(name, method, system)) for name in changes}
            seeds = str(max(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
            cells = [short(*changes[name]) if name in changes else "–" for name in names]
            rows.append([title, seconds, seeds, *cells])
    return rows


def table_of_controls(results: Results, system: str) -> Table:
    """Return the default less each of its controls by one system: a row per control and a column per set."""
    names = [name for name in SETS if name in results.clusters]
    rows = [["the default less", *(SETS[name].title for name in names)]]
    for control in CONTROLS:
        changes = compare(results, names, system, control, DEFAULT)
        if changes:
            cells = [short(*changes[name]) if name in changes else "–" for name in names]
            rows.append([METHODS[control], *cells])
    return rows


TESTED = {  # sentences of held-out documents → title, questions of the same corpus by the same encoders
    "med_sentences": ("MedQuAD", "med_held_out"),
    "wiki_sentences": ("Wikipedia", "squad_held_out"),
}
TEST_METRIC = "mean_ndcg@10"  # by which `realm adapt` decides


def table_of_test(results: Results) -> Table:
    """Return what `realm adapt` decides about the encoders of several methods, and what questions say."""
    rows = [["collection", "method", "sentences", "the test: change", "questions: change"]]
    for name, (title, questions) in TESTED.items():
        for method in (method for method in METHODS if results.seeds(name, method, TEST_METRIC)):
            of_sentences, of_questions = (
                change(results.ndcg(each, START, system), results.ndcg(each, method, system), results.clusters[each])
                for each, system in ((name, TEST_METRIC), (questions, PIPELINE))
            )
            count = f"{len(results.clusters[name]):,}"
            cells = (starred(each, each.p) for each in (of_sentences, of_questions))
            rows.append([title, METHODS[method], count, *cells])
    return rows


def markdown(table: Table) -> str:
    """Return a table in Markdown."""
    head, *rows = [[cell.replace("|", "\\|") for cell in cells] for cells in table]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def tables(results: Results) -> dict[str, Table]:
    """Return name → table, as the page includes them."""
    return {
        "stages": table_of_stages(results),
        "recipe": table_of_recipe(results),
        "methods by vectors": table_of_methods(results, "vectors"),
        "methods by hybrid + stored tokens": table_of_methods(results, PIPELINE),
        "controls by vectors": table_of_controls(results, "vectors"),
        "controls by hybrid + stored tokens": table_of_controls(results, PIPELINE),
        "test": table_of_test(results),
    }


# --- Plot -------------------------------------------------------------------------------------------------------------

ROW, LABEL, PANEL, GAP, TOP = 22, 250, 150, 14, 62  # pixels
PLOTTED = {"vectors": "#7b6bb0", PIPELINE: "#0b5fc4"}  # system → color


def forest_plot(results: Results, names: Sequence[str], reach: float) -> str:
    """Return a plot of all methods as the text of an SVG file: a panel per set, a row per method.

    Args:
        results: the ranks.
        names: of the sets.
        reach: largest change that is drawn.
    """
    methods = [method for method in METHODS if any(results.seeds(name, method, PIPELINE) for name in names)]
    width, bottom = LABEL + len(names) * (PANEL + GAP), TOP + len(methods) * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 42}"',
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{bottom + 42}" fill="#fff"/>',
    ]
    for number, (system, color) in enumerate(PLOTTED.items()):
        x = LABEL + 190 * number
        parts.append(f'<circle cx="{x + 6}" cy="14" r="4" fill="{color}"/>')
        parts.append(f'<text x="{x + 16}" y="18">change of nDCG@10, {SYSTEMS[system]}</text>')
    for row, method in enumerate(methods):
        parts.append(f'<text x="4" y="{TOP + row * ROW + 15}">{METHODS[method]}</text>')
    for panel, name in enumerate(names):
        left = LABEL + panel * (PANEL + GAP)

        def place(value: float, left: int = left) -> float:
            return left + PANEL / 2 * (1 + max(-1.0, min(1.0, value / reach)))

        parts.append(f'<text x="{left + PANEL / 2}" y="{TOP - 14}" text-anchor="middle">{SETS[name].title}</text>')
        parts.append(f'<rect x="{left}" y="{TOP - 6}" width="{PANEL}" height="{bottom - TOP + 8}" fill="#f5f6f8"/>')
        parts.append(f'<path d="M{place(0)} {TOP - 6}V{bottom + 2}" stroke="#586373"/>')
        for tick in (-reach, 0.0, reach):
            label = f"{tick:+g}".replace("-", "−") if tick else "0"
            parts.append(f'<text x="{place(tick)}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
        for number, (system, color) in enumerate(PLOTTED.items()):
            changes = {method: compare(results, [name], system, START, method) for method in methods}
            for row, method in enumerate(methods):
                if name in changes[method]:
                    each, y = changes[method][name][0], TOP + row * ROW + 7 + 8 * number
                    parts.append(f'<path d="M{place(each.low):.1f} {y}H{place(each.high):.1f}" stroke="{color}"/>')
                    parts.append(f'<circle cx="{place(each.value):.1f}" cy="{y}" r="3" fill="{color}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def filled_page(page: str, results: Results) -> str:
    """Return a page with its tables replaced by those of the ranks."""
    contents = {name: markdown(table) for name, table in tables(results).items()}
    pattern = re.compile(r"(?<=<!-- table: )(?P<name>[^>]+) -->\n.*?\n(?=<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found['name']} -->\n\n{contents[found['name']]}\n\n", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the stored ranks")
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="write the tables into a page, and print nothing")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="write a plot of the reported sets")
    parser.add_argument("--add", action="append", default=[], metavar="NAME=FOLDER", help="copy ranks into NAME.npz")
    args = parser.parse_args()
    for argument in args.add:
        name, _, output = argument.partition("=")
        add(args.folder / f"{name}.npz", Path(output))
    results = Results(args.folder)
    if args.page:
        args.page.write_text(filled_page(args.page.read_text("utf-8"), results), "utf-8")
    else:
        for name, table in tables(results).items():
            print(f"{name}\n\n{markdown(table)}\n")
    if args.plot:
        names = [name for name in REPORTED if name in results.clusters]
        args.plot.write_text(forest_plot(results, names, reach=0.1), "utf-8")


if __name__ == "__main__":
    main()
