"""Write the report of a run, `report.html`: a headline, tables, and curves of recall, loss and retrieval utility."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from realm_jax.eval.format import duration, probability, share
from realm_jax.eval.html import Band, Cell, Section, chart, render_page
from realm_jax.eval.retrieval_metrics import group_order, is_retrieval_measure
from realm_jax.storage import write_atomic

Data = Mapping[str, Any]

UNTRAINED = "untrained"
METHODS = {
    UNTRAINED: "Before any training",
    "ict": "Inverse cloze task",
    "bm25": "BM25 (matching words)",
    "realm": "REALM",
    "hybrid": "Hybrid search (vectors and BM25)",
}
READERS = {"chance": "Most common answer", "retrieval": "This run"}
DEFAULT_MARGIN = 0.02  # if the number of questions is unknown
PASSAGES_SHOWN = 4  # of a question
SNIPPET = 260  # characters of a passage


class Headline(NamedTuple):
    """The main finding.

    Attributes:
        sentence: the headline.
        figures: the numbers behind it.
        footnote: the data that they were measured on.
    """

    sentence: str
    figures: str
    footnote: str


def write_report(data: Data, path: str | os.PathLike[str]) -> None:
    """Write the page atomically.

    Args:
        data: from `train/results.py`. Shares are 0 to 1; the page lacks the parts whose lists are empty.
            * `title`, `command`, `created`, `hardware`: text.
            * `corpus`: the counts `passages`, `pretraining`, `train_questions`, `dev_questions`.
            * `results`: the content of results.json.
            * `stages`: in order, each with `name`, `title`, `supervision`, `steps`, `seconds` and `metrics`, records
              with a `step`, a `loss` and a `retrieval_utility`.
            * `recall_history`: in order, each with `stage`, `step`, `recall@5` or `answer_recall@5`, and `refresh`,
              true if a new index was adopted.
            * `adoptions`: in order, the index versions of an index builder, each with `step`, `generation`,
              `index_step`, `waited` in seconds and, if known, `drift`.
            * `recall_by_replaced_words`: {method: {number of replaced words, as text: recall@5}}, and
              `questions_by_replaced_words`: {number of replaced words, as text: number of questions}.
            * `examples`: each with its `question`, `answers`, `candidates`, each of these with `probability`, `title`,
              `text`, `is_gold` and `answer_span`, [start, end) in characters or None; if known `prediction` and
              `correct`.
            * `settings`: {key: any value}.
        path: the file.
    """
    # Half of a surrogate pair has no UTF-8 form; it becomes a question mark.
    write_atomic(path, render_report(data).encode("utf-8", "replace"))


def render_report(data: Data) -> str:
    """Return the page as HTML. data: see `write_report`."""
    results, stages, history, sections = data["results"], data["stages"], data["recall_history"], list[Section]()
    finding = headline(data)
    notes = [finding.footnote]
    notes += [f"{stage['warning']}." for stage in results.get("stages", {}).values() if "warning" in stage]
    notes.append("; ".join(f"{name.replace('_', ' ')}: {count:,}" for name, count in data["corpus"].items()))

    # --- tables: retrieval, answers, stages

    measures = [name for name in results if is_retrieval_measure(name) and results[name]]
    methods = dict.fromkeys([*METHODS, *(method for name in measures for method in results[name])])
    rows: list[Sequence[Cell]] = [
        [METHODS.get(method, method), *(_cell(results[measure].get(method)) for measure in measures)]
        for method in methods
        if any(method in results[measure] for measure in measures)
    ]
    note = (
        "recall@5: share of questions with the right passage in the top 5; answer recall@5: share with a passage "
        "in the top 5 that has the answer."
    )
    sections.append(Section("Retrieval", note, ["", *map(metric_label, measures)], rows, len(measures)))

    exact = results["exact_match"]
    rows = [[title, share(exact[name])] for name, title in READERS.items() if name in exact]
    sections.append(Section("Answers", "", ["Reader", "exact match"], rows, 1))

    titles = {stage["name"]: stage["title"] for stage in stages}
    rows = [
        [stage["title"], stage["supervision"], f"{stage['steps']:,}", duration(stage["seconds"])] for stage in stages
    ]
    sections.append(Section("Stages of training", "", ["Stage", "Supervision", "Steps", "Time"], rows, 2))

    # --- curves, with the stages one after the other on the x axis

    first_steps, bands, start = dict[str, int](), list[Band](), 0
    for name in dict.fromkeys([*titles, *(point["stage"] for point in history)]):
        lengths = [stage["steps"] for stage in stages if stage["name"] == name]
        end = start + max(lengths + [point["step"] for point in history if point["stage"] == name])
        first_steps[name] = start
        bands.append(Band(titles.get(name, name), start, end))
        start = end

    measure = next((name for name in ("recall@5", "answer_recall@5") if any(name in point for point in history)), None)
    if measure is not None:
        points = [
            (first_steps[point["stage"]] + point["step"], point[measure]) for point in history if measure in point
        ]
        refreshes = [first_steps[point["stage"]] + point["step"] for point in history if point.get("refresh")]
        label, bm25 = metric_label(measure), results.get(measure, {}).get("bm25")
        described = f"{label} during training, from {share(points[0][1])} to {share(points[-1][1])}"
        note = f"{described}. A triangle marks a new index."
        note += f" The dashed line is BM25 ({share(bm25)})." if bm25 is not None else ""
        plot = chart(points, described, y_range=(0, 1), bands=bands, marks=refreshes, level=bm25)
        sections.append(Section("Recall", note, curve=plot))
    utility = results.get("retrieval_utility")
    gained = "" if utility is None else f" At the end of REALM: {utility:+.2f} nats."
    for key, heading, note in (
        ("loss", "Loss", "In nats; each stage has a loss of its own."),
        ("retrieval_utility", "Retrieval utility", f"Nats gained on a masked word by reading passages.{gained}"),
    ):
        points = [
            (first_steps[stage["name"]] + row["step"], row[key])
            for stage in stages
            for row in stage["metrics"]
            if row.get(key) is not None
        ]
        described = f"{heading} during training, from {points[0][1]:.3g} to {points[-1][1]:.3g}" if points else ""
        if plot := chart(points, described, bands=bands):
            sections.append(Section(heading, note, curve=plot))

    # --- tables: groups of questions, index versions, examples, settings

    groups, sizes = data["recall_by_replaced_words"], data["questions_by_replaced_words"]
    names = sorted({name for shares in groups.values() for name in shares}, key=group_order)
    heads = [f"{name} ({sizes[name]:,} questions)" if name in sizes else name for name in names]
    rows = [
        [METHODS.get(method, method), *(_cell(shares.get(name)) for name in names)] for method, shares in groups.items()
    ]
    note = "By how many words of a name the question replaces by synonyms, which no passage uses."
    sections.append(Section("recall@5 by replaced words", note, ["", *heads], rows, len(names)))

    rows = []
    for adoption in data["adoptions"]:
        step, waited = adoption["step"], duration(adoption["waited"])
        age = f"{step - adoption['index_step']:,}"
        rows.append([adoption["generation"], f"{step:,}", age, waited, _cell(adoption.get("drift"))])
    note = (
        "Overlap: how many of the first eight among the first hundred passages of the old index stay when the new one "
        "scores them; 1 is no drift."
    )
    heads = ["Index version", "Adopted at step", "Age then, steps", "Waited for", "Overlap"]
    sections.append(Section("Adopted indexes", note, heads, rows, 4))
    sections += map(_example, data["examples"])
    settings = {name.capitalize(): data[name] for name in ("command", "created", "hardware")} | data["settings"]
    rows = [
        [key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)]
        for key, value in settings.items()
        if value is not None
    ]
    sections.append(Section("Settings", "", ["Setting", "Value"], rows, 1))
    shown = [section for section in sections if section.rows or not section.heads]  # no table without rows
    return render_page(data["title"], finding.sentence, shown, finding.figures, notes)


def headline(data: Data) -> Headline:
    """Return the main finding, including no change and a regression.

    A difference counts if it is larger than two standard errors of the difference of two shares.
    """
    results, questions = data["results"], data["corpus"]["dev_questions"]
    measure = next((name for name in ("recall@5", "answer_recall@5") if results.get(name)), "recall@5")
    recalls, comparison = results.get(measure, {}), results.get("comparison", {"before": "", "after": ""})
    before_name = comparison["before"] if comparison["before"] in recalls else UNTRAINED
    if not {before_name, comparison["after"]} <= recalls.keys():
        return Headline(
            "This run cannot say whether the retriever learned.", "", "Recall was not measured before and after REALM."
        )
    before, after = recalls[before_name], recalls[comparison["after"]]
    margin = DEFAULT_MARGIN
    if questions:
        margin = 2 * math.sqrt((before * (1 - before) + after * (1 - after)) / questions) + 0.5 / questions
    target = "the right passage" if measure == "recall@5" else "a passage with the answer"
    if after < before - margin:
        sentence = f"Training on masked words made the retriever worse at finding {target}."
    elif after <= before + margin:
        sentence = f"Training on masked words did not teach the retriever to find {target}."
    else:
        sentence = f"Training on masked words taught the retriever to find {target}, without any question."
    stage = METHODS.get(before_name, before_name)
    measured_on = f", on {questions:,} held-out questions" if questions else ""
    footnote = f"{share(before)}: {stage[0].lower()}{stage[1:]}; {share(after)}: after REALM{measured_on}."
    return Headline(sentence, f"{metric_label(measure)} {share(before)} → {share(after)}", footnote)


def metric_label(measure: str) -> str:
    """Return the label of a metric."""
    return measure.replace("_", " ").replace("mrr", "MRR").replace("ndcg", "nDCG")


def _example(example: Data) -> Section:
    """Lay out a question with its answer and the passages that were read, the most probable first."""
    correct, parts = example.get("correct"), []
    if "prediction" in example:
        mark = "" if correct is None else "✓ " if correct else "✗ "
        parts.append(f"{mark}{example['prediction'] or 'no answer'}")
    if example["answers"] and not correct:
        parts.append(f"right: {' or '.join(example['answers'])}")
    rows: list[Sequence[Cell]] = []
    for candidate in sorted(example["candidates"], key=lambda passage: -passage["probability"])[:PASSAGES_SHOWN]:
        # Show the text around the answer, or the first words if there is no answer.
        text, (start, end) = candidate["text"], candidate["answer_span"] or (0, 0)
        first = max(0, start - SNIPPET // 2) if start > SNIPPET * 0.7 else 0
        last = max(first + SNIPPET, end)
        before, after = "…" * (first > 0) + text[first:start], text[end:last] + "…" * (last < len(text))
        title = candidate["title"] + (" (right passage)" if candidate["is_gold"] else "")
        snippet = (before, text[start:end], after) if end else after
        rows.append([probability(candidate["probability"]), title, snippet])
    return Section(example["question"], " ".join(parts), ["p(z|x)", "Passage", "Text"] if rows else (), rows)


def _cell(value: float | None) -> str:
    return "–" if value is None else share(value)
