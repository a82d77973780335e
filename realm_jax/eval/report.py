"""Write the report of a run, `report.html`: a headline, tables, and curves of recall, loss and retrieval utility."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from realm_jax.eval.format import duration, probability, share
from realm_jax.eval.html import Band, Cell, Section, chart, render_page
from realm_jax.eval.retrieval import group_order, is_retrieval_measure
from realm_jax.storage import write_atomic

Data = Mapping[str, Any]

UNTRAINED = "untrained"
METHODS = {
    UNTRAINED: "Before any training",
    "ict": "Inverse cloze task",
    "bm25": "BM25 (matching words)",
    "realm": "REALM",
    "hybrid": "Vectors and words together",
}
READERS = {"chance": "Most common answer", "closed_book": "Without passages", "retrieval": "With passages"}
DEFAULT_MARGIN = 0.02  # if the number of questions is unknown
PASSAGES_SHOWN = 4  # of a question
SNIPPET = 260  # characters of a passage


class Headline(NamedTuple):
    """The main finding: a sentence, the figures behind it, and what they were measured on."""

    sentence: str
    figures: str
    footnote: str


def write_report(data: Data, path: str | os.PathLike[str]) -> None:
    """Write the page atomically.

    Every key of `data` may be missing or None; the page then lacks what needs it. Shares are 0 to 1.

    Args:
      data: a dict with these keys:
        * `title`, `command`, `created`, `hardware`: text.
        * `corpus`: the counts `passages`, `pretraining`, `train_questions`, `dev_questions`.
        * `results`: `recall@N`, `answer_recall@N`, `mrr@10` and `ndcg@10`, {method: share}; `exact_match`, {reader:
          share}; `retrieval_utility`, nats; `comparison`, the methods `before` and `after` training on masked words;
          `stages`, {task: {"warning": text if it ended below its start}}.
        * `stages`: in order, each with its `name` and, if known, `title`, `supervision`, `steps`, `seconds` and
          `metrics`, records with a `step`, a `loss` and a `retrieval_utility`.
        * `recall_history`: in order, each with `stage`, `step`, `recall@5` or `answer_recall@5`, and `refresh`, true if
          the index was made new.
        * `adoptions`: in order, the index versions of an index builder, each with `step`, `generation`, `index_step`,
          `waited` in seconds and, if known, `drift`.
        * `recall_by_replaced_words`: {method: {number of replaced words, as text: recall@5}}, and
          `questions_by_replaced_words`: {number of replaced words, as text: number of questions}.
        * `examples`: each with its `question` and, if known, `answers`, `prediction`, `correct` and `candidates`, each
          of these with a `probability` and, if known, `title`, `text`, `is_gold` and `answer_span`, [start, end) in
          characters.
        * `masked_sentence`: `sentence`, with [MASK]; `sentences`, the number that it was chosen from; `answer`;
          `rows`, each with `model`, `expression`, `probability` and, if known, `passage`.
        * `settings`: {key: any value}.
      path: the file.
    """
    # Half of a surrogate pair has no UTF-8 form; it becomes a question mark.
    write_atomic(path, render_report(data).encode("utf-8", "replace"))


def render_report(data: Data) -> str:
    """Render the page as one string of HTML. data: as `write_report` takes it."""
    data = _without_none(data)
    results, stages = data.get("results", {}), data.get("stages", ())
    corpus, sections = data.get("corpus", {}), list[Section]()
    finding = headline(data)
    notes = [finding.footnote]
    notes += [f"{stage['warning']}." for stage in results.get("stages", {}).values() if "warning" in stage]
    if corpus:
        notes.append("; ".join(f"{name.replace('_', ' ')}: {count:,}" for name, count in corpus.items()))

    # --- tables: retrieval, answers, stages

    measures = [name for name in results if is_retrieval_measure(name) and results[name]]
    methods = dict.fromkeys([*METHODS, *(method for name in measures for method in results[name])])
    rows = [
        [METHODS.get(method, method), *(_cell(results[measure].get(method)) for measure in measures)]
        for method in methods
        if any(method in results[measure] for measure in measures)
    ]
    note = (
        "recall@5: share of questions with the right passage among the first five; answer recall@5: with a passage "
        "that has the answer among them."
    )
    sections.append(Section("Retrieval", note, ["", *map(metric_label, measures)], rows, len(measures)))

    exact = results.get("exact_match", {})
    rows = [[title, share(exact[name])] for name, title in READERS.items() if name in exact]
    sections.append(Section("Answers", "", ["Reader", "exact match"], rows, 1))

    titles = {stage["name"]: str(stage.get("title") or stage["name"]) for stage in stages}
    rows = [
        [
            titles[stage["name"]],
            stage.get("supervision", ""),
            _count(stage.get("steps")),
            duration(stage.get("seconds")),
        ]
        for stage in stages
    ]
    sections.append(Section("Stages of training", "", ["Stage", "Supervision", "Steps", "Time"], rows, 2))

    # --- curves, with the stages one after the other on the x axis

    history = data.get("recall_history", ())
    first_steps, bands, start = dict[str, int](), list[Band](), 0
    for name in dict.fromkeys([*titles, *(point["stage"] for point in history)]):
        lengths = [stage.get("steps", 0) for stage in stages if stage["name"] == name]
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
            for row in stage.get("metrics", ())
            if key in row
        ]
        described = f"{heading} during training, from {points[0][1]:.3g} to {points[-1][1]:.3g}" if points else ""
        if plot := chart(points, described, bands=bands):
            sections.append(Section(heading, note, curve=plot))

    # --- tables: groups of questions, index versions, examples, settings

    groups, sizes = data.get("recall_by_replaced_words", {}), data.get("questions_by_replaced_words", {})
    names = sorted({name for shares in groups.values() for name in shares}, key=group_order)
    heads = [f"{name} ({sizes[name]:,} questions)" if name in sizes else name for name in names]
    rows = [
        [METHODS.get(method, method), *(_cell(shares.get(name)) for name in names)] for method, shares in groups.items()
    ]
    note = "By how many words of a name the question replaces by synonyms, which no passage uses."
    sections.append(Section("recall@5 by replaced words", note, ["", *heads], rows, len(names)))

    rows = [
        [
            adoption["generation"],
            _count(adoption["step"]),
            _count(adoption["step"] - adoption["index_step"]),
            duration(adoption["waited"]),
            _cell(adoption.get("drift")),
        ]
        for adoption in data.get("adoptions", ())
    ]
    note = (
        "Overlap: how many of the first eight among the first hundred passages of the old index stay when the new one "
        "scores them; 1 is no drift."
    )
    heads = ["Index version", "Adopted at step", "Age then, steps", "Waited for", "Overlap"]
    sections.append(Section("Adopted indexes", note, heads, rows, 4))
    sections += [_example(example) for example in data.get("examples", ())]
    if masked := data.get("masked_sentence"):
        rows = [
            [row["model"], row["expression"], probability(row["probability"]), row.get("passage", "")]
            for row in masked["rows"]
        ]
        note = (
            f"Of {masked['sentences']} sentences, the one that retrieval helps most: {masked['sentence']} "
            f"The masked words: {masked['answer']}"
        )
        sections.append(Section("A masked sentence", note, ["", "Probability", "Value", "Passage"], rows))
    entries = {name.capitalize(): data[name] for name in ("command", "created", "hardware") if data.get(name)}
    rows = [[key, _plain(value)] for key, value in {**entries, **data.get("settings", {})}.items()]
    sections.append(Section("Settings", "", ["Setting", "Value"], rows, 1))
    shown = [section for section in sections if section.rows or not section.heads]  # no table without rows
    return render_page(data.get("title", "REALM"), finding.sentence, shown, finding.figures, notes)


def headline(data: Data) -> Headline:
    """Return the main finding, including no change and a regression.

    A difference counts if it is larger than two standard errors of the difference of two shares.
    """
    results = data.get("results", {})
    measure = next((name for name in ("recall@5", "answer_recall@5") if results.get(name)), None)
    recalls, comparison = results.get(measure, {}) if measure else {}, results.get("comparison") or {}
    questions = data.get("corpus", {}).get("dev_questions")
    measured_on = f", on {questions:,} held-out questions" if questions else ""
    before_name = comparison["before"] if comparison.get("before") in recalls else UNTRAINED
    if measure is None or before_name not in recalls or comparison.get("after") not in recalls:
        exact = results.get("exact_match", {})
        if not all(reader in exact for reader in ("retrieval", "closed_book")):
            return Headline(
                "This run cannot say whether the retriever learned.",
                "",
                "Recall was not measured before and after REALM.",
            )
        without, reading = exact["closed_book"], exact["retrieval"]
        helps = reading - without > margin(questions, reading, without)
        sentence = f"Retrieved passages {'helped' if helps else 'did not help'} the model to answer questions."
        footnote = f"Share of questions answered exactly without and with passages{measured_on}."
        return Headline(sentence, f"exact match {share(without)} → {share(reading)}", footnote)
    before, after = recalls[before_name], recalls[comparison["after"]]
    target = "the right passage" if measure == "recall@5" else "a passage with the answer"
    clear = margin(questions, before, after)
    if after < before - clear:
        sentence = f"Filling in masked words made the retriever worse at finding {target}."
    elif after <= before + clear:
        sentence = f"Filling in masked words did not teach the retriever to find {target}."
    else:
        sentence = f"From filling in masked words, the retriever learned to find {target}. It had seen no question."
    stage = METHODS.get(before_name, before_name)
    footnote = f"{share(before)}: {stage[0].lower()}{stage[1:]}; {share(after)}: after REALM{measured_on}."
    return Headline(sentence, f"{metric_label(measure)} {share(before)} → {share(after)}", footnote)


def margin(questions: int | None, first: float, second: float) -> float:
    """Return two standard errors of the difference of two shares of so many questions."""
    if not questions:
        return DEFAULT_MARGIN
    return 2 * math.sqrt((first * (1 - first) + second * (1 - second)) / questions) + 0.5 / questions


def metric_label(measure: str) -> str:
    """Return a measure's name as the page writes it."""
    return measure.replace("_", " ").replace("mrr", "MRR").replace("ndcg", "nDCG")


def _example(example: Data) -> Section:
    """A question with the answer and the passages that the reader used, the most probable first."""
    verdict = ""
    if "prediction" in example:
        prediction, correct = example["prediction"] or "no answer", example.get("correct")
        verdict = prediction if correct is None else f"{'✓' if correct else '✗'} {prediction}"
    answers = " or ".join(example.get("answers", ()))
    right = f"right: {answers}" if answers and not example.get("correct") else ""
    candidates = sorted(example.get("candidates", ()), key=lambda candidate: -candidate["probability"])[:PASSAGES_SHOWN]
    rows = [
        [
            probability(candidate["probability"]),
            candidate.get("title", "") + (" (right passage)" if candidate.get("is_gold") else ""),
            _snippet(candidate.get("text", ""), candidate.get("answer_span")),
        ]
        for candidate in candidates
    ]
    note = " ".join(filter(None, (verdict, right)))
    return Section(example["question"], note, ["p(z|x)", "Passage", "Text"] if rows else (), rows)


def _snippet(passage: str, span: Sequence[int] | None) -> Cell:
    """The part of a passage around its answer; its first words if it has none."""
    start, end = span if span and 0 <= span[0] < span[1] <= len(passage) else (0, 0)
    first = max(0, start - SNIPPET // 2) if start > SNIPPET * 0.7 else 0
    last = max(first + SNIPPET, end)
    before, after = "…" * (first > 0) + passage[first:start], passage[end:last] + "…" * (last < len(passage))
    return (before, passage[start:end], after) if end else after


def _cell(value: float | None) -> str:
    return "–" if value is None else share(value)


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _without_none(value: Any) -> Any:
    """The data without keys whose value is None."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
