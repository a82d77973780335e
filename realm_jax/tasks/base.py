"""A task: one training objective, and the examples that it learns from. Read next: `mlm.py`, a short one.

`Task` has only the members that a training step needs. Other modules have a table or a function by the task's name: its
section of the config (`config.TASK_SECTIONS`), operations of a step (`step_flops.py`), answering questions with its
parameters (`answering.py`), missing data (`train/recipe.py`), its metrics and when they are measured
(`train/measure.py`, `train/best.py`), warnings (`train/monitors.py`), and its text in the report (`train/results.py`).

A loss has the form `loss(params, batch, index, key) -> {name: WeightedSum}`: its entry 'loss' is minimized, the others
are reported. Sums and weights of the microbatches add up to those of the batch. `index` is None if nothing is
retrieved, and `key` None turns dropout off. Retrieval happens inside the loss (`forward.py`), so a step is one program.
"""

import abc
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.config import TaskSection
from realm_jax.data.examples import Examples
from realm_jax.data.tokenizer import id_dtype
from realm_jax.errors import UserError
from realm_jax.forward import Batch, PackingSpec, StaticContext
from realm_jax.models.layers import Params
from realm_jax.models.losses import WeightedSum
from realm_jax.processes import is_process_0, run_on_process_0
from realm_jax.run import Run
from realm_jax.storage import make_folder, read_json, write_json_atomic

Array = jax.Array
Metrics = dict[str, WeightedSum]  # `loss`, which is minimized, and the reported metrics
ExampleSpec = dict[str, tuple[tuple[int, ...], Any]]  # name of an array → its shape in one example, and dtype
EmbedCorpus = Callable[[], NDArray]  # embeds the corpus by the parameters that a task starts with, [rows, width]
LOG_PERPLEXITY = "log_perplexity"


class ContrastiveLoss(NamedTuple):
    """A loss that compares every example of a batch with every other, in parts (`train/step.py`).

    Attributes:
        encode: (params, batch, key) → the vectors of some examples.
        null: (params, key) → the vector of the null document, or None.
        loss: (vectors of all examples, null vector) → the metrics.
    """

    encode: Callable[[Params, Batch, Array | None], Any]
    null: Callable[[Params, Array | None], Any]
    loss: Callable[[Any, Any], Metrics]


class Task(abc.ABC):
    """A training objective of a run.

    Attributes:
        name: in `config.tasks`; also its section of the config and its folder in the run directory.
        stream: seeds its examples and dropout; it never changes, and no two tasks share one.
        run: config, data, mesh and networks.
        settings: its section of the config.
        trained: top-level keys of the parameters that it trains.
        retrieves: True if a step takes an index.
        refresh_every: steps between two embeddings of the corpus for that index; 0: it is embedded once.
        contrast: its loss in parts, if it compares the examples of a batch; None if the losses of examples add up.
    """

    name: ClassVar[str]
    stream: ClassVar[int]
    settings: TaskSection
    trained: tuple[str, ...]
    retrieves: bool = False
    refresh_every: int = 0
    contrast: ContrastiveLoss | None = None

    def __init__(self, run: Run) -> None:
        """Read its settings; subclasses also set the attributes that depend on the run."""
        self.run = run
        self.settings = run.config[self.name]

    @cached_property
    def context(self) -> StaticContext:
        """Return the static arguments of its steps; sequences are packed if there are data, whose lengths are known."""
        return replace(self.run.context, packing=None if self.run.sources is None else self.packing())

    def packing(self) -> PackingSpec | None:
        """Return the token slots into which a step packs its sequences; None if they stay padded. See `packed.py`."""
        return None

    @property
    def num_microbatches(self) -> int:
        """Return the number of microbatches whose gradients are added up; it divides the batch."""
        return int(self.run.config.optimizer.microbatches)

    def start(self, params: Params) -> Params:
        """Return the parameters of its first step, given the final ones of the task before."""
        return params

    @abc.abstractmethod
    def examples(self, params: Params, embed: EmbedCorpus) -> Examples:
        """Return the examples that it learns from.

        Args:
            params: parameters that it starts or resumes from.
            embed: embeds the corpus by the parameters that the task started with, [rows, width].
        """

    @abc.abstractmethod
    def example_spec(self) -> ExampleSpec:
        """Return the shape and dtype of every array of an example, at its longest."""

    @abc.abstractmethod
    def loss(self, params: Params, batch: Batch, index: Any, key: Array | None) -> Metrics:
        """Return the loss and the reported metrics; see the top of this file.

        Args:
            params: all parameters.
            batch: arrays of `example_spec`, [batch, …].
            index: the corpus; None if the task retrieves nothing.
            key: random key for dropout; None for none.
        """


def batch_mean(values: Array) -> WeightedSum:
    """Return the mean of one value per example, [batch]."""
    return WeightedSum(values.astype(jnp.float32).sum(), jnp.float32(values.shape[0]))


def load_or_create(
    task: Task, file: str, name: str, make: Callable[[], list[Any]], count: int | None = None
) -> list[Any]:
    """Make a list at the first start of a task, and read it from the task's folder at every later one.

    So a resumed run continues with the same list.

    Args:
        task: whose folder holds the file.
        file: name of the file.
        name: key of the list in the file.
        make: makes the list, of values that JSON has.
        count: number of questions, one entry each; None if entries are not of questions.

    Raises:
        UserError: the file has another number of entries.
    """
    path = task.run.workdir / task.name / file
    if run_on_process_0(lambda: int(path.is_file())):
        entries: list[Any] = read_json(path)[name]
    else:
        entries = make()
        if is_process_0():
            make_folder(path.parent, "--workdir")
            write_json_atomic(path, {name: entries})
    if count is not None and len(entries) != count:
        raise UserError(f"{path}: has {name} of {len(entries)} questions, not {count}; remove it")
    return entries


# --- The arrays that `data/examples.py` makes -------------------------------------------------------------------------


def query_spec(run: Run, name: str = "query") -> ExampleSpec:
    """Return the spec of `query_arrays`.

    Args:
        run: whose lengths and vocabulary are used.
        name: name of the array of tokens; that of the lengths is `<name>_length`.
    """
    ids = id_dtype(run.model.bert.vocabulary_size)
    return {name: ((run.lengths.query,), ids), f"{name}_length": ((), np.int32)}


def question_spec(run: Run, bm25_depth: int) -> ExampleSpec:
    """Return the spec of `question_arrays`.

    Args:
        run: whose lengths and vocabulary are used.
        bm25_depth: passages of BM25's list; 0 for no list.
    """
    lengths = run.lengths
    answers: ExampleSpec = {
        "answers": ((lengths.answers, lengths.span_width), np.int32),
        "answer_lengths": ((lengths.answers,), np.int32),
    }
    return query_spec(run) | answers | bm25_spec(bm25_depth)


def document_spec(run: Run) -> ExampleSpec:
    """Return the spec of `document_arrays`."""
    lengths: ExampleSpec = {name: ((), np.int32) for name in ("document_length", "document_title_length")}
    return {"document": ((run.lengths.document,), id_dtype(run.model.bert.vocabulary_size))} | lengths


def masked_spec(run: Run, query: ExampleSpec) -> ExampleSpec:
    """Return the spec of `masked_arrays`.

    Args:
        run: whose lengths are used.
        query: spec of the masked text.
    """
    positions = (run.lengths.predictions,)
    masked: ExampleSpec = {
        "positions": (positions, np.int32),
        "targets": (positions, np.int32),
        "weights": (positions, np.float32),
    }
    return query | masked


def bm25_spec(depth: int) -> ExampleSpec:
    """Return the spec of `Bm25Hits.arrays`; empty for depth 0, if examples have no list."""
    hits: ExampleSpec = {"bm25_rows": ((depth,), np.int32), "bm25_scores": ((depth,), np.float32)}
    return hits if depth else {}
