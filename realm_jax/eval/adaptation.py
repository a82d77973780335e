"""What adaptation is judged by: sentences of documents that it did not learn from, and judged questions where given.

Three searches for each held-out sentence, all without a label: for its own document by the sentence without a hidden
span, for another passage that says what is hidden, and for its own passage by the whole sentence. One number has to
rise: the mean over the sentences of the average of the three recalls (`GAIN`), of those that a sentence has. They ask
in the very words of their passages, and an encoder that learned nothing but to match words is better at that, while it
may be worse at questions. So another must not fall: recall of a passage that lacks the sentence (`REMOVED`). What
searches is `train/adaptation_gate.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.held_out import HeldOutSentence
from realm_jax.data.store import PassageStore
from realm_jax.eval.format import duration
from realm_jax.eval.html import Section, render_page
from realm_jax.eval.retrieval_metrics import RANKED
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
    rows = []
    for sentence, without, with_span in zip(sentences, masked, whole, strict=True):
        documents = {store.document_id(int(row)) for row in without[:FIRST] if row >= 0}
        others = without[without != sentence.row][:FIRST]
        own = float(store.document_id(sentence.row) in documents) if sentence.masked else np.nan
        evidence = float(np.isin(others, sentence.evidence).any()) if sentence.evidence else np.nan
        ranks = np.flatnonzero(with_span[:RANKED] == sentence.row)
        reciprocal = 1 / (1 + ranks[0]) if len(ranks) else 0.0
        rows.append((own, evidence, float(reciprocal >= 1 / FIRST), reciprocal))
    values = np.array(rows, np.float64)  # [sentences, 4]
    names = (MASKED, EVIDENCE, SENTENCE, SENTENCE_RANK)
    return {GAIN: np.nanmean(values[:, :3], axis=1)} | dict(zip(names, values.T, strict=True))


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
    """Render the page of adapt.json as one string of HTML."""
    measured, plan, settings = record["measured"], record["plan"], record["settings"]
    note = (
        "All sentences of held-out documents, and judged questions if there are any. In brackets the 95 % interval of "
        "the change from the start: of sentences over documents, of questions over questions."
    )
    heads, rows = table(measured["table"])
    sections = [Section("Measures", note, heads, rows, len(heads) - 1)]
    if "forgetting" in record:
        other = record["forgetting"]
        note = (
            f"{other['passages']:,} passages of {other['documents']:,} documents, none of which was trained on. This "
            "decides nothing; it shows what adaptation costs elsewhere."
        )
        _, rows = table(other["table"])
        heads = ["", "start", "promoted"]
        sections.append(Section(f"On other documents: {settings['forgetting']}", note, heads, rows, 2))
    for heading, key in (("Found after adaptation only", "gained"), ("Found before adaptation only", "lost")):
        rows = [[one["query"], one["what"], f"{one['title']}: {one['text']}"] for one in measured["examples"][key]]
        sections.append(Section(heading, "" if rows else "None.", ["Sentence", "Passage", ""] if rows else (), rows))
    left_out = {f"left out: {reason}": f"{count:,}" for reason, count in plan["left_out"].items()}
    steps = {f"steps of {name}": f"{count:,}" for name, count in plan["steps"].items()}
    seconds = {f"time of {name}": duration(spent) for name, spent in record["seconds"].items()}
    facts = {
        "base model": settings["from"],
        "documents": settings["documents"],
        "passages": f"{plan['passages']:,} of {plan['documents']:,} documents",
        "read": f"{plan['read']:,}",
        **left_out,
        "fingerprint of the passages": plan["fingerprint"],
        "spans with evidence": f"{plan['spans_with_evidence']:,} of {plan['spans']:,}",
        "documents held out": f"{plan['held_out']:.1%}",
        **steps,
        **seconds,
        "command": record["command"],
    }
    sections.append(Section("How it was made", rows=[*facts.items()]))
    return render_page("REALM: adaptation", headline(measured), sections, notes=plan["notes"])


def table(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Return the column names and the rows of the table of measures.

    Args:
      rows: key of TITLES → measure → its value and its change from the start, from `compare`.

    Returns:
      (titles of the encoders after an empty one, a row for each measure: its name and its values).
    """
    encoders = [name for name in TITLES if name in rows]
    cells = [[MEASURES.get(name, name), *(_cell(rows[one][name]) for one in encoders)] for name in rows[START]]
    return ["", *(TITLES[name] for name in encoders)], cells


def _cell(found: Mapping[str, Any]) -> str:
    if not found["queries"]:
        return "–"
    ends = "" if found["low"] is None else f" ({found['low']:+.3f} to {found['high']:+.3f})"
    return f"{found['value']:.3f}{ends}"


def examples(
    store: PassageStore, sentences: Sequence[HeldOutSentence], before: Values, after: Values
) -> dict[str, list[dict[str, str]]]:
    """Return up to SHOWN sentences that only the one or the other encoder finds a passage for.

    Args:
      store: the passages.
      sentences: the held-out sentences.
      before: measures of the start, from `sentence_values`.
      after: those of the adapted encoder.

    Returns:
      {"gained" or "lost": [{"query", "what": which passage was to be found, "title", "text"}]}.
    """
    examples_of = dict[str, list[dict[str, str]]]()
    for kind, finder, other in (("gained", after, before), ("lost", before, after)):
        entries = []
        for measure, passage in ((EVIDENCE, "one that tells it"), (MASKED, "its own")):
            for number in np.flatnonzero((finder[measure] == 1) & (other[measure] == 0)).tolist():
                sentence = sentences[number]
                row = sentence.evidence[0] if measure == EVIDENCE else sentence.row
                entry = {"query": sentence.masked, "what": passage, "title": store.title(row), "text": store.text(row)}
                entries.append(entry)
        examples_of[kind] = entries[:SHOWN]
    return examples_of
