"""Write the model card (README.md) of a run's networks; `adaptation/report.py` uses parts of it for its own."""

from collections.abc import Collection, Iterator, Mapping

from realm_jax.config import INDEX, Config, task_names
from realm_jax.models.architectures.table import ARCHITECTURES, HF_REALM
from realm_jax.models.folders import HUB, PACKAGE, READER
from realm_jax.run import Run
from realm_jax.train.trained_run import recorded_metrics
from realm_jax.train.workdir import recorded_config
from realm_jax.version import __version__

USES = {  # names of `realm weights export` → how to open an encoder, and the reader
    "bert": (
        "`SentenceTransformer`; its README.md says what text to encode",
        "`{reader}`; its span head is in the same file",
    ),
    HF_REALM: ("`RealmEmbedder` of transformers 4", "`RealmReader` of transformers 4"),
}
TAGS = ("sentence-transformers", "feature-extraction", "sentence-similarity", "retrieval")


def run_card(run: Run, task: str, step: int, networks: Collection[str], names: str = "bert") -> str:
    """Return the card of the networks of `realm weights export`.

    Args:
        run: run that trained the networks.
        task: task that trained the parameters.
        step: number of steps of the task.
        networks: names of their folders.
        names: 'bert' or 'realm'; cards of the latter have no front matter, because hubs know no library for it.
    """
    config = recorded_config(run.workdir)  # as it was trained, not as it is opened here
    tasks, base, passages = task_names(config), config.init_from, run.sources.passages
    steps: dict[str, int] = {}
    title, origin = "# The encoder of an index", f"Exported by realm_jax {__version__}, which trained nothing."
    if task != INDEX:
        steps = {name: config[name].steps for name in tasks[: tasks.index(task)]} | {task: step}
        title = "# A retriever and a reader of REALM"
        origin = f"Trained with realm_jax {__version__}: the parameters of step {step:,} of `{task}`."
    reader = ARCHITECTURES[run.model.reader.bert.architecture].masked_lm_class
    lines = [
        *([] if names == HF_REALM else [front_matter(base)]),
        title,
        "",
        origin,
        *(["", f"Base model: `{base}`."] if base.startswith((HUB, PACKAGE)) else []),
        "",
        "## Networks",
        "",
        *(f"* `{name}/` opens with {USES[names][name == READER].format(reader=reader)}" for name in networks),
        "",
        f"Each is a folder. `realm train --config.init_from={HUB}NAME` starts another run from all of them.",
        "",
    ]
    if metrics := recorded_metrics(run, task):
        lines += ["## Measures", "", f"On {metrics.on or 'the questions of the run'}:", ""]
        lines += [] if metrics.exact_match is None else [f"* exact match: {metrics.exact_match:.3f}"]
        lines += [] if metrics.recall is None else [f"* right passage in the top 5: {metrics.recall:.3f}"]
        lines += [""]
    source = f"{len(passages):,} passages of {passages.documents:,} documents, fingerprint `{passages.fingerprint}`"
    lines += ["## Data and recipe", "", f"* {source}", *recipe_lines(config, steps)]
    return "\n".join(lines) + "\n"


def front_matter(base: str) -> str:
    """Return the YAML that model hubs read, with the base model if it is on a hub."""
    lines = ["library_name: sentence-transformers", "pipeline_tag: sentence-similarity"]
    lines += [f"base_model: {base.removeprefix(HUB).partition('@')[0]}"] if base.startswith(HUB) else []
    return "\n".join(["---", *lines, "tags:", *(f"- {tag}" for tag in TAGS), "---", ""])


def recipe_lines(config: Config, steps: Mapping[str, int]) -> Iterator[str]:
    """Yield a Markdown line for each task.

    Args:
        config: has batch sizes and learning rates.
        steps: task → number of steps.
    """
    for name, number in steps.items():
        task = config[name]
        yield f"* {name}: {number:,} steps of {task.batch_size}, learning rate {task.learning_rate:g}"
