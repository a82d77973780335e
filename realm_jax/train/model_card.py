"""The README.md of an adapted encoder: what it is, how to use it, what it was made of and what it is worth.

Nothing in it depends on when or how fast it was made, so that a resumed adaptation writes the same bytes.
"""

from collections.abc import Mapping
from typing import Any

from realm_jax.eval.adaptation import TITLES, headline, titled_rows
from realm_jax.models.folders import HUB
from realm_jax.run import Run

TAGS = ("sentence-transformers", "feature-extraction", "sentence-similarity", "retrieval")


def model_card(record: Mapping[str, Any], run: Run) -> str:
    """The whole card, with its YAML front matter. record: of adapt.json."""
    measured, plan, base = record["measured"], record["plan"], record["settings"]["from"]
    what = "An encoder adapted" if measured["promoted"] else "An encoder that is not adapted"
    parts = [
        front_matter(base),
        f"# {what} to {plan['documents']:,} documents\n",
        f"{headline(measured)}.\n",
        f"Base model: `{base}`. It learned from sentences of the documents alone, from no question and no label.\n",
        usage(measured["promoted"], run),
        "## Measures\n\nRecall and rank on documents that were not learned from; mean, and the 95 % interval of the "
        "change from the start.\n\n"
        f"{markdown(measured['table'])}\n",
        f"## Data and recipe\n\n{facts(record, run)}\n",
        f"Made by\n\n    {record['command']}\n",
    ]
    return "\n".join(parts)


def front_matter(base: str) -> str:
    """What model hubs read; a base model is named where it lies on one."""
    lines = ["library_name: sentence-transformers", "pipeline_tag: sentence-similarity"]
    lines += [f"base_model: {base.removeprefix(HUB).partition('@')[0]}"] if base.startswith(HUB) else []
    return "\n".join(["---", *lines, "tags:", *(f"- {tag}" for tag in TAGS), "---", ""])


def usage(is_router: bool, run: Run) -> str:
    """How to encode."""
    template, length = run.config.encoder.passage_prompt or "pairs of title and text", run.config.data.document_length
    lines = [
        "    model = SentenceTransformer(FOLDER)",
        "    queries = model.encode_query(questions)",
        "    passages = model.encode_document(texts)",
        "",
        f"Passages are texts as {template!r}, of at most {length} tokens.",
    ]
    if is_router:
        lines.append("Queries have weights of their own; plain `encode` is that of passages.")
    return "\n".join([*lines, ""])


def markdown(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of measures."""
    heads = [title for name, title in TITLES.items() if name in found]
    lines = [["", *heads], ["---"] * (1 + len(heads)), *titled_rows(found)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def facts(record: Mapping[str, Any], run: Run) -> str:
    """Counts, fingerprint and recipe."""
    plan = record["plan"]
    lines = [
        f"{plan['passages']:,} passages of {plan['documents']:,} documents, fingerprint `{plan['fingerprint']}`",
        f"{plan['held_out']:.1%} of the documents held out",
        f"{plan['spans_with_evidence']:,} of {plan['spans']:,} salient spans have evidence in another passage",
    ]
    for name, steps in plan["steps"].items():
        task = run.config[name]
        lines.append(f"{name}: {steps:,} steps of {task.batch_size}, learning rate {task.learning_rate:g}")
    return "\n".join(f"* {line}" for line in lines)
