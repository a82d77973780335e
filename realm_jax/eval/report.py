"""Write what a run learnt as one page of HTML: no network, no script, readable on a phone and by a screen reader.

This file makes what stands on the page from the data: texts, bars and curves, or nothing where the data do not have
it. The page itself is `templates/report.html.j2`. Sentences on what was learnt come from `findings.py`.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from realm_jax.eval import findings
from realm_jax.eval.charts import Band, Series, plot
from realm_jax.eval.findings import METHODS, READERS, metric_label
from realm_jax.eval.format import duration, probability, share
from realm_jax.eval.html import Bar, render
from realm_jax.eval.retrieval import group_order, is_retrieval_measure
from realm_jax.storage import write_atomic

Data = Mapping[str, Any]
View = dict[str, Any]  # what a part of the template is given

_KINDS = {"realm": "realm", "ict": "ict", "bm25": "bm25", "untrained": "plain", "retrieval": "realm"}
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
_PASSAGES_SHOWN = 4
_SNIPPET_CHARACTERS = 260
# A run of [MASK] or of words of underscores is one blank.
_BLANK = re.compile(r"(?:(?<!\S)(?:\[MASK\]|__+)(?!\S)\s*)+")
_SMALL_CHART, _HIGH_CHART = (300, 200), (520, 440)


def write_report(data: Data, path: str | os.PathLike[str]) -> None:
    """Write the page to `path`, whole or not at all.

    No key of `data` must be there, and any may be None; what needs it is left out. Shares are 0 to 1. The keys:

    * `title`, `command`, `created`, `hardware`: text.
    * `corpus`: the counts `passages`, `pretraining`, `train_questions`, `dev_questions`.
    * `results`: `recall@N`, `answer_recall@N`, `mrr@10` and `ndcg@10`, {method: share} with methods of
      `findings.METHODS`; `exact_match`, {reader: share} with readers of `findings.READERS`; `retrieval_utility`, nats;
      `seconds`, {stage: seconds}; `comparison`, the methods `before` and `after` it learnt from masked
      words.
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
    data = _without_none(data)
    results = data.get("results", {})
    return render(
        "report.html.j2",
        title=data.get("title", "REALM"),
        headline=findings.headline(data),
        takeaways=findings.takeaways(data),
        corpus=_corpus_sizes(data),
        recall=_recall(results),
        exact_match=_bars(results.get("exact_match", {}), READERS),
        supervision=_supervision(data),
        history=_recall_history(data),
        replaced_words=_replaced_words(data),
        adoptions=_adoptions(data),
        examples=[_example(example) for example in data.get("examples", ())],
        masked_sentence=_masked_sentence(data),
        stage_curves=_stage_curves(data),
        recall_table=_recall_table(results),
        other_numbers=_other_numbers(results, _titles(data)),
        settings=_settings(data),
    )


def _corpus_sizes(data: Data) -> str:
    corpus = data.get("corpus", {})
    counts = (
        ("passages", "passages"),
        ("pretraining", "pre-training passages"),
        ("train_questions", "training questions"),
        ("dev_questions", "questions to judge by"),
    )
    return ", ".join(f"{corpus[key]:,} {name}" for key, name in counts if corpus.get(key) is not None)


def _recall(results: Data) -> View | None:
    measure = findings.main_measure(results)
    if measure is None:
        return None
    return {"meaning": _MEASURES[measure], "label": metric_label(measure), "bars": _bars(results[measure], METHODS)}


def _bars(shares: Mapping[str, float], titles: Mapping[str, str]) -> list[Bar]:
    """A bar for each share, in the order of the titles."""
    return [
        Bar(title, shares[name], _KINDS.get(name, "control"), share(shares[name]))
        for name, title in titles.items()
        if name in shares
    ]


def _supervision(data: Data) -> list[tuple[str, ...]]:
    return [
        (_stage_title(stage), stage["supervision"], _count(stage.get("steps")), duration(stage.get("seconds")))
        for stage in data.get("stages", ())
        if stage.get("supervision")
    ]


def _recall_history(data: Data) -> View | None:
    history = data.get("recall_history", ())
    measure = next((name for name in _MEASURES if any(name in point for point in history)), None)
    if measure is None:
        return None
    label, stages = metric_label(measure), _stage_bands(data)
    bands = list(stages.values())
    points = [(stages[point["stage"]].start + point["step"], point) for point in history]
    recalls = [(x, point[measure]) for x, point in points if measure in point]
    refreshes = [x for x, point in points if point.get("refresh")]
    series, legend = [Series(recalls, "realm")], [(label, "realm")]
    word_matching = data.get("results", {}).get(measure, {}).get("bm25")
    if word_matching is not None:
        ends = (bands[0].start, word_matching), (bands[-1].end, word_matching)
        series.insert(0, Series(ends, "bm25", is_dashed=True))
        legend.append((f"{METHODS['bm25']}, {share(word_matching)}", "bm25"))
    if refreshes:
        legend.append(("all passages embedded anew", "refresh"))
    first, last = share(recalls[0][1]), share(recalls[-1][1])
    description = f"{label} over training, from {first} to {last}; {len(refreshes)} refreshes."
    x_label = "training steps, one stage after the other"
    return {
        "label": label,
        "stages": ", ".join(band.name for band in bands),
        "plot": plot(series, description, x_label, (0, 1), bands, refreshes, _HIGH_CHART),
        "legend": legend,
    }


def _replaced_words(data: Data) -> list[tuple[str, list[Bar]]]:
    """A heading and bars for each number of replaced words."""
    groups = data.get("recall_by_replaced_words", {})
    sizes = data.get("questions_by_replaced_words", {})
    parts = []
    for name in sorted({name for shares in groups.values() for name in shares}, key=group_order):
        heading = {"0": "No word", "1": "1 word"}.get(name, f"{name} words") + " of the name replaced"
        heading += f" ({sizes[name]:,} questions)" if name in sizes else ""
        shares = {method: of_method[name] for method, of_method in groups.items() if name in of_method}
        parts.append((heading, _bars(shares, METHODS)))
    return parts


def _adoptions(data: Data) -> list[tuple[str, ...]]:
    return [
        (
            adoption["generation"],
            _count(adoption["step"]),
            _count(adoption["step"] - adoption["index_step"]),
            duration(adoption["waited"]),
            "–" if adoption.get("drift") is None else f"{adoption['drift']:.2f}",
        )
        for adoption in data.get("adoptions", ())
    ]


# ---- questions with their passages, and one masked sentence


def _example(example: Data) -> View:
    candidates = sorted(example.get("candidates", ()), key=lambda candidate: -candidate["probability"])
    shown, rest = candidates[:_PASSAGES_SHOWN], candidates[_PASSAGES_SHOWN:]
    together = probability(sum(candidate["probability"] for candidate in rest))
    is_answered = "prediction" in example
    return {
        "question": example["question"],
        "prediction": example["prediction"] or "no answer" if is_answered else None,
        "correct": example.get("correct") if is_answered else None,
        "answers": " or ".join(example.get("answers", ())),
        "passages": [_passage(candidate) for candidate in shown],
        "rest": f"{len(rest)} more, together {together}" if rest else "",
    }


def _passage(candidate: Data) -> View:
    weight = candidate["probability"]
    return {
        "bar": Bar("p(z|x)", weight, "realm", probability(weight)),
        "is_empty": not candidate.get("title") and not candidate.get("text"),
        "is_gold": candidate.get("is_gold"),
        "title": candidate.get("title", ""),
        "snippet": _snippet(candidate.get("text", ""), candidate.get("answer_span")),
    }


def _snippet(passage: str, span: Sequence[int] | None) -> tuple[str, str, str]:
    """The part of a passage around the answer: what stands before it, the answer, what stands after it.

    The start of the passage where it has no answer.
    """
    if not span or not 0 <= span[0] < span[1] <= len(passage):
        cut = _word_end(passage, _SNIPPET_CHARACTERS)
        return passage[:cut] + ("…" if cut < len(passage) else ""), "", ""
    start, end = span
    # A start that is nearly the passage's start is moved there: the first words say what the passage is about.
    first = _word_start(passage, start - _SNIPPET_CHARACTERS // 2) if start > _SNIPPET_CHARACTERS * 0.7 else 0
    last = max(_word_end(passage, first + _SNIPPET_CHARACTERS), end)
    before, after = ("…" if first > 0 else ""), ("…" if last < len(passage) else "")
    return before + passage[first:start], passage[start:end], passage[end:last] + after


def _word_start(passage: str, place: int) -> int:
    return 0 if place <= 0 else passage.rfind(" ", 0, place) + 1


def _word_end(passage: str, place: int) -> int:
    space = passage.find(" ", place)
    return len(passage) if place >= len(passage) or space < 0 else space


def _masked_sentence(data: Data) -> View | None:
    """Table 3 of the paper: p(y|x) without retrieval, p(y|z,x) with the right passage z, and the marginal."""
    masked = data.get("masked_sentence")
    if not masked:
        return None
    readings = [
        {
            "model": row["model"],
            "bar": Bar(row["expression"], row["probability"], "realm", probability(row["probability"])),
            "passage": row.get("passage"),
        }
        for row in masked["rows"]
    ]
    parts = _BLANK.split(masked["sentence"].replace("[MASK]", " [MASK] "))
    return {"sentences": masked["sentences"], "parts": parts, "answer": masked["answer"], "readings": readings}


# ---- curves and tables


def _stage_curves(data: Data) -> list[View]:
    return [
        {"metric": name, "stage": _stage_title(stage), "meaning": meaning, "plot": _stage_plot(stage, key, name)}
        for key, (name, meaning) in _STAGE_CURVES.items()
        for stage in data.get("stages", ())
        if any(key in row for row in stage.get("metrics", ()))
    ]


def _stage_plot(stage: Data, key: str, name: str) -> View | None:
    points = [(row["step"], row[key]) for row in stage["metrics"] if key in row]
    description = f"{name} of the stage {_stage_title(stage)}: from {points[0][1]:.3g} to {points[-1][1]:.3g}"
    # Only a loss may leave zero out of its picture: the level of the others means something.
    least = None if key == "loss" else (0.0, 0.0)
    series = Series(points, _KINDS.get(stage["name"], "other"))
    return plot([series], description, "steps", least, size=_SMALL_CHART)


def _recall_table(results: Data) -> View | None:
    measures = [name for name in results if is_retrieval_measure(name) and results[name]]
    rows = [
        (title, *(share(results[measure][name]) if name in results[measure] else "–" for measure in measures))
        for name, title in METHODS.items()
        if any(name in results[measure] for measure in measures)
    ]
    return {"measures": [metric_label(measure) for measure in measures], "rows": rows} if rows else None


def _other_numbers(results: Data, titles: Mapping[str, str]) -> list[tuple[str, str]]:
    exact = results.get("exact_match", {})
    rows = [(f"Exact match: {title.lower()}", share(exact[name])) for name, title in READERS.items() if name in exact]
    if results.get("retrieval_utility") is not None:
        rows.append(("Retrieval utility", f"{results['retrieval_utility']:+.3f} nats"))
    taken = results.get("seconds", {}).items()
    return rows + [(f"Time: {titles.get(name, name)}", duration(seconds)) for name, seconds in taken]


def _settings(data: Data) -> list[tuple[str, str]]:
    entries = {
        **{name.capitalize(): data[name] for name in ("command", "created", "hardware") if data.get(name)},
        **data.get("settings", {}),
    }
    return [(key, _plain(value)) for key, value in entries.items()]


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


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _without_none(value: Any) -> Any:
    """The data without the keys whose value is None: a measure that was not taken is left out."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
