"""Write what a run learnt as one page of HTML: no network, no script, readable on a phone and by a screen reader.

The page leads with the finding and ends with the numbers. Every part is optional: what the data do not have is left
out. Sentences come from `findings.py`, drawings from `charts.py`; this file says what stands where.
All text from the data goes through `page.text`, so markup in a passage shows as characters; on top of that the page
forbids itself scripts and outside content.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from realm_jax.evaluation import findings
from realm_jax.evaluation.charts import Band, Series, curves
from realm_jax.evaluation.findings import METHODS, READERS, share, spoken
from realm_jax.evaluation.page import Bar, bars, card, duration, grid, legend, page, table, text
from realm_jax.evaluation.report_passages import examples, masked_sentence
from realm_jax.storage import write_atomic

Data = Mapping[str, Any]

_KINDS = {"realm": "realm", "ict": "ict", "bm25": "bm25", "untrained": "plain"}
_MEASURES = {
    "recall@5": "The right passage is among the first five",
    "answer_recall@5": "A passage with the answer is among the first five",
}
_STAGE_CURVES = {
    "loss": ("Loss", "nats; lower is better"),
    "accuracy": ("Accuracy", "share of predictions that are right"),
    "retrieval_utility": ("Retrieval utility", "nats gained on a masked word over reading the empty passage"),
    "null_probability": ("p(null)", "probability that the retriever gives to the empty passage"),
    "index_age": ("Age of the index", "training steps since its towers were current"),
    "useful_candidates": ("Useful candidates", "share of sentences whose best candidate gains more than 0.1 nats"),
}
_SMALL_CHART, _HIGH_CHART = (300, 200), (520, 440)


def write_report(data: Data, path: str | os.PathLike[str]) -> None:
    """Write the page to `path`, whole or not at all.

    No key of `data` must be there, and any may be None; what needs it is left out. Shares are 0 to 1. The keys:

    * `title`, `command`, `created`, `hardware`: text.
    * `corpus`: the counts `passages`, `pretraining`, `train_questions`, `dev_questions`.
    * `results`: `recall@N` and `answer_recall@N`, {method: share} with methods of `findings.METHODS`; `exact_match`,
      {reader: share} with readers of `findings.READERS`; `retrieval_utility`, nats; `seconds`, {stage: seconds}.
    * `stages`: in order, each with its `name` and, if known, `title`, `supervision`, `steps`, `seconds` and `metrics`,
      records with a `step` and any of `_STAGE_CURVES`.
    * `recall_history`: in order, each with its `stage` and `step`, with `recall@5` or `answer_recall@5`, and with
      `refresh`, true where the index was made anew.
    * `adoptions`: in order, the generations of an index builder, each with its `step`, `generation`, `index_step`,
      `waited` in seconds and, if known, `drift`.
    * `recall_by_replaced_words`: {method: {number of replaced words, as text: recall@5}}, and
      `questions_by_replaced_words`: {number of replaced words, as text: number of questions}.
    * `examples`: each with its `question` and, if known, `answers`, `prediction`, `correct` and `candidates`; of these
      each has a `probability` and, if known, `title`, `text`, `is_gold` and `answer_span`, [start, end) in characters.
    * `masked_sentence`: `sentence`, with [MASK]; `sentences`, of how many it was chosen; `answer`; `rows`, each with
      `model`, `expression`, `probability` and, if known, `passage`. All but the last must be there.
    * `settings`: {key: any value}.
    """
    # A half of a surrogate pair has no UTF-8 form; it shows as a question mark.
    write_atomic(path, render_report(data).encode("utf-8", "replace"))


def render_report(data: Data) -> str:
    """The page as one string of HTML."""
    sections: Sequence[Callable[[Data], str]] = (
        _opening,
        lambda data: grid("pair", (_recall_bars(data), _exact_match_bars(data))),
        _supervision,
        lambda data: grid("pair", (_recall_over_time(data), _replaced_words(data))),
        _adoptions,
        examples,
        masked_sentence,
        _training_curves,
        _numbers,
        _settings,
    )
    data = _without_none(data)
    return page(data.get("title", "REALM"), "\n".join(section(data) for section in sections))


def _opening(data: Data) -> str:
    lead = findings.headline(data)
    figures = f' <span class="figures">{text(lead.figures)}</span>' if lead.figures else ""
    points = [
        f'<div class="point"><h3>{text(asked)}</h3>{text(found)}</div>' for asked, found in findings.takeaways(data)
    ]
    corpus = data.get("corpus", {})
    counts = (
        ("passages", "passages"),
        ("pretraining", "pre-training passages"),
        ("train_questions", "training questions"),
        ("dev_questions", "questions to judge by"),
    )
    sizes = ", ".join(f"{corpus[key]:,} {name}" for key, name in counts if corpus.get(key) is not None)
    return (
        f'<header><p class="kicker">{text(data.get("title", "REALM"))}</p>'
        f"<h1>{text(lead.sentence)}{figures}</h1>"
        f'<p class="note">{text(lead.footnote)}</p>'
        + grid("quarters", points)
        + (f'<p class="note corpus">Corpus: {text(sizes)}.</p>' if sizes else "")
        + "</header>"
    )


def _recall_bars(data: Data) -> str:
    results = data.get("results", {})
    measure = findings.main_measure(results)
    if measure is None:
        return ""
    recalls = results[measure]
    rows = [Bar(METHODS[name], recalls[name], _kind(name), share(recalls[name])) for name in METHODS if name in recalls]
    note = f"{_MEASURES[measure]}: share of the questions ({spoken(measure)})."
    return card("Does the retriever find the passage?", note, bars(rows))


def _exact_match_bars(data: Data) -> str:
    exact = data.get("results", {}).get("exact_match", {})
    rows = [
        Bar(READERS[name], exact[name], "realm" if name == "retrieval" else "control", share(exact[name]))
        for name in READERS
        if name in exact
    ]
    note = "The predicted answer is exactly one of the right answers: share of the questions (exact match)."
    return card("Does the model answer the question?", note, bars(rows)) if rows else ""


def _supervision(data: Data) -> str:
    stages = [stage for stage in data.get("stages", ()) if stage.get("supervision")]
    rows = [
        (_stage_title(stage), stage["supervision"], _count(stage.get("steps")), duration(stage.get("seconds")))
        for stage in stages
    ]
    told = f'<div class="told">{table(("Stage", "What it was told", "Steps", "Time"), rows, numbers=2)}</div>'
    note = "The supervision of each stage, in order. A stage starts from the parameters of the one before."
    return card("What was the model told?", note, told) if rows else ""


def _recall_over_time(data: Data) -> str:
    history = data.get("recall_history", ())
    measure = next((name for name in _MEASURES if any(name in point for point in history)), None)
    if measure is None:
        return ""
    stages = _stage_bands(data)
    bands = list(stages.values())
    points = [(stages[point["stage"]].start + point["step"], point) for point in history]
    series = [Series(_MEASURES[measure], [(x, point[measure]) for x, point in points if measure in point], "realm")]
    keys = [(spoken(measure), "realm")]
    word_matching = data.get("results", {}).get(measure, {}).get("bm25")
    if word_matching is not None:
        ends = (bands[0].start, word_matching), (bands[-1].end, word_matching)
        series.insert(0, Series(METHODS["bm25"], ends, "bm25", dashed=True))
        keys.append((f"{METHODS['bm25']}, {share(word_matching)}", "bm25"))
    refreshes = [x for x, point in points if point.get("refresh")]
    if refreshes:
        keys.append(("all passages embedded anew", "refresh"))
    values = [point[measure] for _, point in points if measure in point]
    description = (
        f"{spoken(measure)} over training, from {share(values[0])} to {share(values[-1])}; {len(refreshes)} refreshes."
    )
    chart = curves(
        series, description, "training steps, one stage after the other", (0, 1), bands, refreshes, _HIGH_CHART
    )
    shaded = ", ".join(band.name for band in bands)
    note = f"{spoken(measure)} on the questions, measured while training. The shades, in order: {shaded}."
    return card("How it came about", note, chart + legend(keys))


def _adoptions(data: Data) -> str:
    rows = [
        (
            adoption["generation"],
            _count(adoption["step"]),
            _count(adoption["step"] - adoption["index_step"]),
            duration(adoption["waited"]),
            "–" if adoption.get("drift") is None else f"{adoption['drift']:.2f}",
        )
        for adoption in data.get("adoptions", ())
    ]
    heads = ("Generation", "Adopted at step", "Its age then, steps", "Waited for", "Overlap")
    note = (
        "Another process embedded all passages anew while training went on. Overlap: how much of the first eight among "
        "the first hundred passages of the old index stays when these are scored by the new one; 1 is no drift."
    )
    return card("The indexes that were adopted", note, table(heads, rows, numbers=4)) if rows else ""


def _replaced_words(data: Data) -> str:
    groups = data.get("recall_by_replaced_words", {})
    names = sorted({name for shares in groups.values() for name in shares}, key=findings.group_order)
    parts = []
    for name in names:
        rows = [
            Bar(METHODS[method], groups[method][name], _kind(method), share(groups[method][name]))
            for method in METHODS
            if name in groups.get(method, {})
        ]
        heading = {"0": "No word", "1": "1 word"}.get(name, f"{name} words") + " of the name replaced"
        size = data.get("questions_by_replaced_words", {}).get(name)
        heading += f" ({size:,} questions)" if size is not None else ""
        parts.append(f"<h3>{text(heading)}</h3>{bars(rows)}")
    note = (
        "recall@5 by how many words of a name the question replaces by synonyms. No passage uses them; the "
        "pre-training text does, without saying which words belong together."
    )
    return card("When names are replaced", note, "".join(parts)) if parts else ""


def _training_curves(data: Data) -> str:
    charts = [
        _stage_chart(stage, key)
        for key in _STAGE_CURVES
        for stage in data.get("stages", ())
        if any(key in row for row in stage.get("metrics", ()))
    ]
    return f"<section><h2>The training, stage by stage</h2>{grid('quarters', charts)}</section>" if charts else ""


def _stage_chart(stage: Data, key: str) -> str:
    name, meaning = _STAGE_CURVES[key]
    points = [(row["step"], row[key]) for row in stage["metrics"] if key in row]
    description = f"{name} of the stage {_stage_title(stage)}"
    if points:
        description += f": from {points[0][1]:.3g} to {points[-1][1]:.3g}"
    # Only a loss may leave zero out of its picture: the level of the others means something.
    least = None if key == "loss" else (0.0, 0.0)
    chart = curves(
        [Series(name, points, _KINDS.get(stage["name"], "other"))], description, "steps", least, size=_SMALL_CHART
    )
    caption = f'<h3>{text(name)} · {text(_stage_title(stage))}</h3><p class="note">{text(meaning)}</p>'
    return f'<figure class="card"><figcaption>{caption}</figcaption>{chart}</figure>'


def _numbers(data: Data) -> str:
    tables = [f'<div class="card">{part}</div>' for part in (_recall_table(data), _other_numbers(data)) if part]
    return f"<section><h2>All numbers</h2>{grid('pair', tables)}</section>" if tables else ""


def _recall_table(data: Data) -> str:
    results = data.get("results", {})
    measures = [name for name in results if "recall@" in name and "_by_" not in name and results[name]]
    rows = [
        (title, *(share(results[measure][name]) if name in results[measure] else "–" for measure in measures))
        for name, title in METHODS.items()
        if any(name in results[measure] for measure in measures)
    ]
    return table(("Retriever", *map(spoken, measures)), rows, numbers=len(measures)) if rows else ""


def _other_numbers(data: Data) -> str:
    results = data.get("results", {})
    exact = results.get("exact_match", {})
    rows = [(f"Exact match: {title.lower()}", share(exact[name])) for name, title in READERS.items() if name in exact]
    if results.get("retrieval_utility") is not None:
        rows.append(("Retrieval utility", f"{results['retrieval_utility']:+.3f} nats"))
    titles = _titles(data)
    rows += [(f"Time: {titles.get(name, name)}", duration(taken)) for name, taken in results.get("seconds", {}).items()]
    return table(("Measure", "Value"), rows, numbers=1) if rows else ""


def _settings(data: Data) -> str:
    entries = {
        **{name.capitalize(): data[name] for name in ("command", "created", "hardware") if data.get(name)},
        **data.get("settings", {}),
    }
    if not entries:
        return ""
    items = "".join(
        f"<div><dt>{text(key)}</dt><dd><code>{text(_plain(value))}</code></dd></div>" for key, value in entries.items()
    )
    return card("Settings", "", f'<dl class="settings">{items}</dl>')


def _stage_bands(data: Data) -> dict[str, Band]:
    """The stages that have a recall history, laid end to end along the x axis in steps."""
    history = data["recall_history"]
    lengths = {stage["name"]: stage.get("steps", 0) for stage in data.get("stages", ())}
    names = [name for name in lengths if any(point["stage"] == name for point in history)]
    names += [name for name in dict.fromkeys(point["stage"] for point in history) if name not in lengths]
    bands, start = {}, 0
    for name in names:
        end = start + max([lengths.get(name, 0)] + [point["step"] for point in history if point["stage"] == name])
        bands[name] = Band(_titles(data).get(name, name), start, end)
        start = end
    return bands


def _titles(data: Data) -> dict[str, str]:
    return {stage["name"]: _stage_title(stage) for stage in data.get("stages", ())}


def _stage_title(stage: Data) -> str:
    return str(stage.get("title") or stage["name"])


def _kind(name: str) -> str:
    return _KINDS.get(name, "control")


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _without_none(value: Any) -> Any:
    """The data without the keys whose value is None: a measure that was not taken is left out."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
