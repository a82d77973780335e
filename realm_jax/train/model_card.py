"""The README.md of an adapted encoder, or of a run's networks: what it is, how to use it, what it was made of and what
it is worth.

Nothing in it depends on when or how fast it was made, so that a resumed adaptation writes the same bytes.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

import realm_jax
from realm_jax.config import task_names
from realm_jax.eval.adaptation import TITLES, headline, titled_rows
from realm_jax.models.folders import HUB, PACKAGE, READER
from realm_jax.models.weights import HF_REALM
from realm_jax.run import Run
from realm_jax.train.trained_run import recorded_metrics
from realm_jax.train.workdir import recorded_config

USES = {  # names of `realm weights export` → what a tower opens with, and the reader
    "bert": (
        "`SentenceTransformer`; its README.md says what text to encode",
        "`BertForMaskedLM`; its span head lies in the same file",
    ),
    HF_REALM: ("`RealmEmbedder` of transformers 4", "`RealmReader` of transformers 4"),
}
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


def run_card(run: Run, task: str, step: int, networks: Collection[str], names: str = "bert") -> str:
    """The card of the networks of `realm weights export`. task, step: where their parameters are from; names: 'bert' or
    'realm', in which there is no front matter, as hubs know no library for it."""
    config = recorded_config(run.workdir)  # as it was trained, not as it is opened here
    tasks, base = task_names(config), config.init_from
    steps = {name: config[name].steps for name in tasks[: tasks.index(task)]} | {task: step}
    passages = run.sources.passages
    data = [f"* {len(passages):,} passages of {passages.documents:,} documents, fingerprint `{passages.fingerprint}`"]
    parts = [
        *([] if names == HF_REALM else [front_matter(base)]),
        "# A retriever and a reader of REALM\n",
        f"Trained with realm_jax {realm_jax.__version__}: the parameters of step {step:,} of `{task}`.\n",
        *([f"Base model: `{base}`.\n"] if base.startswith((HUB, PACKAGE)) else []),
        "## Networks\n",
        *(f"* `{name}/` opens with {USES[names][name == READER]}" for name in networks),
        f"\nEach is a folder. `realm train --config.init_from={HUB}NAME` starts another run from all of them.\n",
        *measures(run, task),
        "## Data and recipe\n",
        "\n".join([*data, *recipe(config, steps)]),
    ]
    return "\n".join(parts) + "\n"


def measures(run: Run, task: str) -> Iterator[str]:
    """What the run measured of the parameters of a task, if anything."""
    if (found := recorded_metrics(run, task)) is None:
        return
    yield f"## Measures\n\nOn {found.on or 'what the run was measured on'}:\n"
    if found.exact_match is not None:
        yield f"* exact match: {found.exact_match:.3f}"
    if found.found is not None:
        yield f"* right passage among the first five: {found.found:.3f}"
    yield ""


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
        f"* {plan['passages']:,} passages of {plan['documents']:,} documents, fingerprint `{plan['fingerprint']}`",
        f"* {plan['held_out']:.1%} of the documents held out",
        f"* {plan['spans_with_evidence']:,} of {plan['spans']:,} salient spans have evidence in another passage",
    ]
    return "\n".join([*lines, *recipe(run.config, plan["steps"])])


def recipe(config: ConfigDict, steps: Mapping[str, int]) -> Iterator[str]:
    """A line a task. steps: that it was trained for."""
    for name, number in steps.items():
        task = config[name]
        yield f"* {name}: {number:,} steps of {task.batch_size}, learning rate {task.learning_rate:g}"
