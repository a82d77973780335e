"""Write the results of an adaptation: its headline, report.html and the model card, from adapt.json."""

from pathlib import Path

from ml_collections import ConfigDict

from realm_jax.adaptation.evaluate import BASELINE, MEAN_NDCG, METRICS
from realm_jax.adaptation.record import AdaptRecord, Change, ChangeTable, Decision
from realm_jax.eval.format import duration
from realm_jax.eval.html import Section, render_page
from realm_jax.models.folders import HUB, PACKAGE
from realm_jax.train.model_card import front_matter, recipe_lines

TITLES = {  # encoder in adapt.json → column of the table
    BASELINE: "base encoder",
    "adapted": "adapted",
    "trained": "weight 1",
    "start_vectors": "base encoder, vectors only",
    "vectors": "adapted, vectors only",
    "bm25": "BM25 only",
}


def headline(decision: Decision) -> str:
    """Return the decision in one line, with its numbers."""
    return f"{verdict(decision)} ({figures(decision)})"


def verdict(decision: Decision) -> str:
    """Return the decision without its numbers."""
    if decision.promoted:
        mean = f"{1 - decision.weight:g} × base + {decision.weight:g} × trained encoder"
        return f"Adapted: {mean if decision.weight < 1 else 'the trained encoder'} replaces the base encoder"
    reason = "is not significantly better"
    losses = (decision.without_sentence, decision.questions)
    if decision.mean_ndcg.is_significant_gain and any(change.is_significant_loss for change in losses):
        reason = "is better at held-out sentences, but significantly worse at another metric"
    return f"Base encoder kept: the adapted encoder {reason}"


def figures(decision: Decision) -> str:
    """Return the numbers of the decision, in one line."""
    gain, removed, questions = decision.mean_ndcg, decision.without_sentence, decision.questions
    numbers = (
        f"search {decision.search}, {MEAN_NDCG} of {gain.queries} held-out sentences in {gain.documents} documents: "
        f"{_change(gain)}"
    )
    if removed.queries:
        numbers += f"; passages without them: {_change(removed)}"
    if questions.queries:
        numbers += f"; {decision.question_metric} of judged questions: {_change(questions)}"
    return numbers


def additions(decision: Decision, *, has_new_vectors: bool, has_reader: bool) -> str:
    """Return what an adaptation added to an index, in one line.

    Args:
        decision: about its encoders.
        has_new_vectors: true if the passage encoder was trained.
        has_reader: true if a reader learned to point at answers.
    """
    encoders = "an adapted query encoder; the passages keep their vectors"
    if not decision.promoted:
        encoders = "no encoders: those of the index, and its vectors, stay"
    elif has_new_vectors:
        encoders = "adapted encoders, and the vectors of all passages by them"
    reader = "a reader that learned from hidden names and never saw a question" if has_reader else "no reader"
    return f"{encoders}; {reader}"


def _change(change: Change) -> str:
    """Return before → after of a metric, with the change and its interval."""
    if not change.queries:
        return "unknown"
    interval = "no interval, because all changed equally"
    if change.low is not None:
        interval = f"95 % interval {change.low:+.3f} to {change.high:+.3f}"
    return f"{change.start:.3f} → {change.value:.3f} ({change.change:+.3f}, {interval})"


def table_cells(table: ChangeTable) -> tuple[list[str], list[list[str]]]:
    """Return the column titles, the first of which is empty, and the rows: a metric's title and its values."""
    encoders = [name for name in TITLES if name in table]
    rows = []
    for metric in table[BASELINE]:
        row = [METRICS.get(metric, metric)]
        for change in (table[name][metric] for name in encoders):
            interval = "" if change.low is None else f" ({change.low:+.3f} to {change.high:+.3f})"
            row.append(f"{change.value:.3f}{interval}" if change.queries else "–")
        rows.append(row)
    return ["", *(TITLES[name] for name in encoders)], rows


def render_report(record: AdaptRecord) -> str:
    """Return report.html of a measured adaptation."""
    assert record.plan is not None and record.measured is not None
    measured, plan, settings = record.measured, record.plan, record.settings
    note = (
        f"Sentences of held-out documents, and judged questions if there are any. Search: {measured.decision.search}, "
        "unless a column names another. Brackets have the 95 % interval of the change from the base encoder, for "
        "sentences clustered by document."
    )
    heads, rows = table_cells(measured.table)
    sections = [Section("Metrics", note, heads, rows, len(heads) - 1)]
    if (other := record.forgetting) is not None:
        note = (
            f"{other.passages:,} passages of {other.documents:,} documents, none of which was trained on. They have no "
            "influence on the decision; they show the cost of adaptation on other documents."
        )
        _, rows = table_cells(other.table)
        heads = ["", "base encoder", "promoted"]
        sections.append(Section(f"On other documents: {settings['forgetting']}", note, heads, rows, 2))
    for heading, kind in (("Retrieved only after adaptation", "gained"), ("Retrieved only before", "lost")):
        examples = measured.examples[kind]
        rows = [[example["query"], example["what"], f"{example['title']}: {example['text']}"] for example in examples]
        sections.append(Section(heading, "" if rows else "None.", ["Sentence", "Passage", ""] if rows else (), rows))
    corpus = plan.corpus
    facts = {
        "base encoder": settings["from"],
        "documents": settings["documents"],
        "passages": f"{corpus.passages:,} of {corpus.documents:,} documents",
        "read": f"{corpus.read:,}",
        **{f"skipped: {reason}": f"{count:,}" for reason, count in corpus.left_out.items()},
        "fingerprint of the passages": corpus.fingerprint,
        "spans with evidence": f"{corpus.spans_with_evidence:,} of {corpus.spans:,}",
        "documents held out": f"{plan.held_out:.1%}",
        **{f"steps of {name}": f"{count:,}" for name, count in plan.steps.items()},
        **{f"time of {name}": duration(seconds) for name, seconds in record.seconds.items()},
        "command": record.command,
    }
    sections.append(Section("Data, recipe and times", rows=[*facts.items()]))
    notes = [figures(measured.decision), *plan.notes]
    return render_page("REALM: adaptation", verdict(measured.decision), sections, notes=notes)


def model_card(record: AdaptRecord, config: ConfigDict) -> str:
    """Return README.md of the exported model, with its YAML front matter.

    It does not depend on times, so a resumed adaptation writes the same bytes.

    Args:
        record: of a measured adaptation.
        config: of the run.
    """
    assert record.plan is not None and record.measured is not None
    plan, decision, corpus, base = record.plan, record.measured.decision, record.plan.corpus, record.settings["from"]
    base_name = base if base.startswith((HUB, PACKAGE)) else Path(base).name  # the card may be published
    passage_format = config.encoder.passage_prompt or "pairs of title and text"
    heads, rows = table_cells(record.measured.table)
    lines = [
        front_matter(base),
        f"# An encoder {'' if decision.promoted else 'that is not '}adapted to {corpus.documents:,} documents",
        "",
        f"{headline(decision)}.",
        "",
        f"Base encoder: `{base_name}`. It was trained only on sentences of the documents, without questions or labels.",
        "",
        "    model = SentenceTransformer(FOLDER)",
        "    queries = model.encode_query(questions)",
        "    passages = model.encode_document(texts)",
        "",
        f"Passages are texts as {passage_format!r}, of at most {config.data.document_length} tokens.",
        *(["Queries have another encoder; plain `encode` uses that of passages."] if decision.promoted else []),
        "",
        "## Metrics",
        "",
        "nDCG@10 on held-out documents: mean, and the 95 % interval of the change from the base encoder.",
        "",
        *(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)),
        "",
        "## Data and recipe",
        "",
        f"* {corpus.passages:,} passages of {corpus.documents:,} documents, fingerprint `{corpus.fingerprint}`",
        f"* {plan.held_out:.1%} of the documents held out",
        f"* {corpus.spans_with_evidence:,} of {corpus.spans:,} salient spans have evidence in another passage",
        *recipe_lines(config, plan.steps),
        "",
        "Made by",
        "",
        f"    {record.command}",
    ]
    return "\n".join(lines) + "\n"
