"""What adaptation is judged by: sentences of documents that it did not learn from, and judged questions where given.

Three searches for each held-out sentence, all without a label: for its own document by the sentence without a hidden
span, for another passage that says what is hidden, and for its own passage by the whole sentence. One number has to
rise: the mean over the sentences of the average of the three recalls (`GAIN`), of those that a sentence has. They ask
in the very words of their passages, and an encoder that learned nothing but to match words is better at that, while it
may be worse at questions. So another must not fall: recall of a passage that lacks the sentence (`REMOVED`). The page
is `templates/adapt.html.j2`; what searches is `train/adaptation_gate.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.held_out import HeldOutSentence
from realm_jax.data.store import PassageStore
from realm_jax.eval.format import duration
from realm_jax.eval.html import render
from realm_jax.eval.retrieval import RANKED
from realm_jax.eval.significance import clustered_interval, paired_interval

Values = dict[str, NDArray[np.float64]]  # measure → its value for each query, NaN where it has no meaning

FIRST = 5  # passages in which one has to be
DEPTH = RANKED + 1  # passages that are searched for, one of which may be the sentence's own
MASKED, EVIDENCE, SENTENCE = "masked_recall@5", "evidence_recall@5", "sentence_recall@5"
SENTENCE_RANK, GAIN, REMOVED = "sentence_mrr@10", "mean_recall@5", "removed_recall@5"
START = "start"
SHOWN = 5  # sentences of each kind on the page
TITLES = {
    START: "start",
    "adapted": "adapted",
    "trained": "weight 1",
    "bm25": "BM25",
    "start_hybrid": "start with BM25",
    "hybrid": "adapted with BM25",
}
MEASURES = {
    GAIN: "mean of the three",
    MASKED: "sentence without a name, for its document: recall@5",
    EVIDENCE: "the same, for another passage that has the name and says it: recall@5",
    SENTENCE: "whole sentence, for its passage: recall@5",
    SENTENCE_RANK: "the same: MRR@10",
    REMOVED: "whole sentence, for its passage without that sentence: recall@5",
}


def sentence_values(
    store: PassageStore, sentences: Sequence[HeldOutSentence], masked: NDArray[np.int64], whole: NDArray[np.int64]
) -> Values:
    """The measures of sentences. masked, whole: rows that were found without the span and with it, [sentences, DEPTH],
    −1 for none."""
    found = [_recalls(store, *one) for one in zip(sentences, masked, whole, strict=True)]
    values = np.array(found, np.float64)
    names = (MASKED, EVIDENCE, SENTENCE, SENTENCE_RANK)
    return {GAIN: np.nanmean(values[:, :3], axis=1)} | dict(zip(names, values.T, strict=True))


def _recalls(
    store: PassageStore, sentence: HeldOutSentence, masked: NDArray[np.int64], whole: NDArray[np.int64]
) -> tuple[float, ...]:
    """MASKED, EVIDENCE, SENTENCE and SENTENCE_RANK of one sentence."""
    documents = {store.document_id(int(row)) for row in masked[:FIRST] if row >= 0}
    others = masked[masked != sentence.row][:FIRST]
    own = float(store.document_id(sentence.row) in documents) if sentence.masked else np.nan
    evidence = float(np.isin(others, sentence.evidence).any()) if sentence.evidence else np.nan
    places = np.flatnonzero(whole[:RANKED] == sentence.row)
    rank = 1 / (1 + places[0]) if len(places) else 0.0
    return own, evidence, float(rank >= 1 / FIRST), rank


# --- decisions --------------------------------------------------------------------------------------------------------


def compare(
    before: NDArray[np.float64], after: NDArray[np.float64], documents: NDArray[np.int64] | None = None
) -> dict[str, Any]:
    """{"start", "value", "change", "low", "high", "queries"} over the queries that have the measure; low, high: ends of
    the paired interval, None where all changes are equal.

    documents: of each query, as sentences of one document gain or lose together: then they are what is drawn from all
    that there might be, and "documents" is their number. None for queries that have nothing to do with one another.
    """
    known = ~(np.isnan(before) | np.isnan(after))
    if not known.any():
        return {"queries": 0}
    old, new = before[known], after[known]
    found = {"start": float(old.mean()), "value": float(new.mean()), "change": float((new - old).mean())}
    if documents is None:
        low, high = paired_interval(old, new)
    else:
        low, high = clustered_interval(new - old, documents[known])
        found["documents"] = len(np.unique(documents[known]))
    return found | {"low": low, "high": high, "queries": int(known.sum())}


def is_above(change: Mapping[str, Any]) -> bool:
    """Whether the interval of a change lies above zero."""
    return change.get("low") is not None and bool(change["low"] > 0)


def is_below(change: Mapping[str, Any]) -> bool:
    """Whether the interval of a change lies below zero."""
    return change.get("high") is not None and bool(change["high"] < 0)


def is_better(gain: Mapping[str, Any], *vetoes: Mapping[str, Any]) -> bool:
    """Whether held-out sentences say better beyond doubt, and nothing else says worse beyond doubt."""
    return is_above(gain) and not any(is_below(veto) for veto in vetoes)


def headline(record: Mapping[str, Any]) -> str:
    """The decision in one line, with its numbers."""
    gain, judged, weight = record["gain"], record["judged"], record["weight"]
    said = f"held-out sentences: {_change(gain)} of {GAIN}, {gain['queries']} of them in {gain['documents']} documents"
    said += f"; of passages without them: {_change(record['removed'])}" if record["removed"]["queries"] else ""
    said += f"; {judged['measure']} of judged questions: {_change(judged)}" if judged.get("queries") else ""
    if record["promoted"]:
        return f"Adapted: {1 - weight:g} × start + {weight:g} × trained ({said})"
    worse = is_below(record["removed"]) or is_below(judged)
    why = "finds more, but not all that the start finds" if is_above(gain) and worse else "is not better beyond doubt"
    return f"Start kept: the adapted encoder {why} ({said})"


def _change(found: Mapping[str, Any]) -> str:
    if not found["queries"]:
        return "unknown"
    ends = (
        "no interval, as all changed alike"
        if found["low"] is None
        else f"95 % interval {found['low']:+.3f} to {found['high']:+.3f}"
    )
    return f"{found['start']:.3f} → {found['value']:.3f} ({found['change']:+.3f}, {ends})"


# --- the page ---------------------------------------------------------------------------------------------------------


def render_report(record: Mapping[str, Any]) -> str:
    """The page of adapt.json as one string of HTML."""
    measured, plan = record["measured"], record["plan"]
    heads = ["", *(TITLES[name] for name in TITLES if name in measured["table"])]
    return render(
        "adapt.html.j2",
        headline=headline(measured),
        notes=plan["notes"],
        heads=heads,
        rows=titled_rows(measured["table"]),
        other=record.get("forgetting"),
        other_rows=titled_rows(record["forgetting"]["table"]) if "forgetting" in record else [],
        other_name=record["settings"].get("forgetting"),
        examples=[(title, measured["examples"][key]) for key, title in EXAMPLES.items()],
        facts=facts(record),
        command=record["command"],
    )


def titled_rows(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[list[str]]:
    """`table` as rows that begin with what a measure is called."""
    return [[MEASURES.get(name, name), *cells] for name, cells in table(found).items()]


EXAMPLES = {"gained": "Found after adaptation alone", "lost": "Found before adaptation alone"}


def examples(
    store: PassageStore, sentences: Sequence[HeldOutSentence], before: Values, after: Values
) -> dict[str, list[dict[str, str]]]:
    """Sentences of either kind of EXAMPLES: {"query", "what", "title", "text"}, with a passage that was to be found."""
    return {"gained": _found_by(store, sentences, after, before), "lost": _found_by(store, sentences, before, after)}


def _found_by(
    store: PassageStore, sentences: Sequence[HeldOutSentence], these: Values, those: Values
) -> list[dict[str, str]]:
    """What one finds and the other does not: another passage with the hidden name, or else the own document."""
    shown = []
    for measure in (EVIDENCE, MASKED):
        for place in np.flatnonzero((these[measure] == 1) & (those[measure] == 0)).tolist():
            one = sentences[place]
            what, row = ("one that tells it", one.evidence[0]) if measure == EVIDENCE else ("its own", one.row)
            shown.append({"query": one.masked, "what": what, "title": store.title(row), "text": store.text(row)})
    return shown[:SHOWN]


def table(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, list[str]]:
    """Measure → its value for each row of TITLES, with the paired interval of the change from the start."""
    rows = [found[name] for name in TITLES if name in found]
    return {measure: [_cell(row[measure]) for row in rows] for measure in found[START]}


def _cell(found: Mapping[str, Any]) -> str:
    if not found["queries"]:
        return "–"
    ends = "" if found["low"] is None else f" ({found['low']:+.3f} to {found['high']:+.3f})"
    return f"{found['value']:.3f}{ends}"


def facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was adapted to what, and how: name and value."""
    plan = record["plan"]
    left_out = {f"left out: {reason}": f"{count:,}" for reason, count in plan["left_out"].items()}
    taken = {f"steps of {name}": f"{steps:,}" for name, steps in plan["steps"].items()}
    spent = {f"time of {name}": duration(seconds) for name, seconds in record["seconds"].items()}
    known = {
        "base model": record["settings"]["from"],
        "documents": record["settings"]["documents"],
        "passages": f"{plan['passages']:,} of {plan['documents']:,} documents",
        "read": f"{plan['read']:,}",
        **left_out,
        "fingerprint of the passages": plan["fingerprint"],
        "spans with evidence": f"{plan['spans_with_evidence']:,} of {plan['spans']:,}",
        "documents held out": f"{plan['held_out']:.1%}",
    }
    return [*(known | taken | spent).items()]
