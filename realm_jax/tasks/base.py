"""The interface of a task to the config, the train loop, inference, plans, and the report.

A task is one file beside this one. No other code compares task names: what it has to know
of a task is an attribute here; defaults suit a task that needs nothing special. Read next: `mlm.py`, a short one.

A loss has the form `loss(params, batch, index, key) -> {name: WeightedSum}`: its entry 'loss' is minimised, the others
are reported. Means of the parts of a batch add up to those of the whole. `index` is None if nothing is retrieved and
`key` None turns dropout off. Retrieval happens inside the loss (`realm_jax/forward/`), so a step is one program.
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

from realm_jax.config import Config, TaskSection
from realm_jax.data.examples import Examples
from realm_jax.data.held_out import held_out_share, masked_sentences
from realm_jax.data.questions import Question, answered
from realm_jax.data.sources import Sources
from realm_jax.data.tokenizer import id_dtype
from realm_jax.errors import UserError
from realm_jax.eval.prediction import Evaluator
from realm_jax.forward import Batch, Index, PackingSpec, Rerank, StaticContext
from realm_jax.models.layers import Params
from realm_jax.models.losses import WeightedSum
from realm_jax.models.networks import Network, Realm
from realm_jax.processes import is_process_0, run_on_process_0
from realm_jax.run import Run
from realm_jax.storage import make_folder, read_json, write_json_atomic

Array = jax.Array
Metrics = dict[str, WeightedSum]
Shapes = dict[str, tuple[tuple[int, ...], Any]]  # name of an array → its shape in one example, and dtype
Measure = Callable[[Params, Index | None, bool], dict[str, Any]]
Embed = Callable[[], NDArray]  # the corpus by the parameters that a task starts with, [rows, width]
Monitor = Callable[[dict[str, Any]], str | None]  # gets every record, in order; says a warning, or None
LOG_PERPLEXITY = "log_perplexity"
MEASURED = 2000  # development questions at most: ± .02 of a share, and soon done; `realm evaluate` takes all


class Short(NamedTuple):
    """What a task does under `optimizer.preset=short`: steps of warm-up, and the learning rate of the embedders as a
    multiple of its own. Measured on two cores (`docs/results/real_text.md`)."""

    warmup: int = 20
    retriever: float = 1.0


class ContrastiveLoss(NamedTuple):
    """A loss that compares every example of a batch with every other, in parts (`train/step.py`).

    encode: the vectors of some examples; null: that of the null document, or None; loss: of all these together.
    """

    encode: Callable[[Params, Batch, Array | None], Any]
    null: Callable[[Params, Array | None], Any]
    loss: Callable[[Any, Any], Metrics]


class Task(abc.ABC):
    """A task of a run. Parameters are named by top-level keys of their tree."""

    name: ClassVar[str]
    stream: ClassVar[int]  # of random numbers, which examples and dropout follow from: another for every task, for ever
    title: ClassVar[str]
    settings: TaskSection  # its section of the config

    # --- data and evaluation
    learns_to_answer: ClassVar[bool] = False  # from questions, and ends with answers to them
    reads_passages: ClassVar[bool] = True  # answers stand in passages
    inspects_sentences: ClassVar[bool] = False  # a sentence with a blank can be explained with its parameters
    selects_by: ClassVar[str] = ""  # the measure that its best parameters are selected by; '': recall
    evaluate_every: int = 0  # steps between two measurements beside those of every new index; 0: none
    evaluates_start: bool = False  # before its first step too, where no index asks for it

    # --- the index
    retrieves: bool = False  # a step takes an index
    has_final_index: ClassVar[bool] = True  # its parameters are measured with one at the end
    follows_builder: ClassVar[bool] = False  # `realm build-index` may make it
    host_search: ClassVar[bool] = False  # retrieval.backend=scann applies to its step
    refresh_every: int = 0  # steps between two embeddings of the corpus; 0: once
    eval_search: str = "vectors"  # what finds passages while it is measured, one of `sections.SEARCHES`
    question_search: str = "vectors"  # what finds those of questions to its parameters, unless they say how
    bm25_depth: int = 0  # passages in BM25's list that comes with an example; 0: there is none
    rerank: Rerank | None = None  # what orders passages anew for questions to its parameters; `make_task` sets it

    # --- training
    trained: tuple[str, ...]  # the parameters that move
    short: ClassVar[Short] = Short()
    is_parted: bool = True  # `optimizer.microbatches` applies to it
    retriever_delay: int = 0  # steps before the retriever moves
    contrast: ContrastiveLoss | None = None  # its loss in parts, if it compares examples; None: losses add up

    def __init__(self, run: Run) -> None:
        """What depends on the run is set here."""
        self.run = run
        self.settings = run.config[self.name]
        self.question_search = run.config.qa.search

    @property
    def context(self) -> StaticContext:
        """The static context of its losses."""
        return self.run.context

    @classmethod
    def networks(cls, model: Realm) -> tuple[Network, ...]:
        """Networks that it brings along, beside those of `model`."""
        return ()

    @classmethod
    def reranks(cls, config: Config) -> Rerank | None:
        """What orders passages anew once it is trained, for questions to its parameters and to those of later tasks."""
        return None

    @classmethod
    def missing(cls, config: Config, sources: Sources) -> str:
        """What the data lack for it, which is then left out of the recipe; '' for nothing."""
        return "" if not cls.learns_to_answer or sources.answered("train") else "training questions with answers"

    @classmethod
    def teaches_reading(cls) -> bool:
        """Whether the reader learns to answer from passages."""
        return cls.learns_to_answer and cls.reads_passages

    @classmethod
    def teaches_pointing(cls, config: Config) -> bool:
        """Whether the reader learns, without questions, to point at what stands in a blank."""
        return False

    @classmethod
    def supervision(cls, config: Config) -> str:
        """What it learns from, in a sentence or two."""
        return ""

    @classmethod
    def learns_from_evidence(cls, config: Config) -> bool:
        """Whether it learns from names alone that another passage tells of (`data/evidence.py`)."""
        return False

    def check_data(self) -> None:
        """Raise UserError if config and data do not allow to train it."""
        return None

    def start(self, params: Params) -> Params:
        """What its first step starts from. params: all, as the task before left them or the run began."""
        return params

    @abc.abstractmethod
    def examples(self, params: Params, embed: Embed) -> Examples:
        """What it learns from. params: what it starts, or goes on, from; embed: the corpus by those."""

    @abc.abstractmethod
    def array_shapes(self) -> Shapes:
        """Every array of an example, as `examples` give them, at its longest."""

    @abc.abstractmethod
    def loss(self, params: Params, batch: Batch, index: Any, key: Array | None) -> Metrics:
        """See the top of this file."""

    @abc.abstractmethod
    def example_flops(self) -> dict[str, float]:
        """Operations of a step for each of its examples: {part of the model: operations} (`realm_jax/flops.py`)."""

    def flops(self) -> dict[str, float]:
        """Operations of a step: {part of the model: operations}."""
        return {part: self.settings.batch_size * value for part, value in self.example_flops().items()}

    @property
    def parts(self) -> int:
        """Parts of a batch whose gradients are added up one after another; they divide it."""
        return int(self.run.config.optimizer.microbatches) if self.is_parted else 1

    @property
    def microbatch(self) -> int:
        """Examples whose gradients are computed at once."""
        return int(self.settings.batch_size) // self.parts

    @cached_property
    def packed_context(self) -> StaticContext:
        """The context of its steps, with sequences packed where there are data to say how long they are."""
        return replace(self.context, packing=None if self.run.sources is None else self.packed_places())

    @property
    def packing_per_device(self) -> PackingSpec:
        """The places of a device's share of a microbatch; of one example and all 0 where nothing is packed."""
        return self.packed_context.packing or PackingSpec(1)

    def packed_places(self) -> PackingSpec | None:
        """Into how many places its steps pack sequences, by the lengths of its data; None: they stay padded."""
        return None

    @property
    def keeps_best(self) -> bool:
        """Whether it hands on the parameters that measured best."""
        return bool(self.run.config.evaluation.keep_best)

    @property
    def searches(self) -> set[str]:
        """What finds passages in its training and for questions to its parameters, of `sections.SEARCHES`."""
        return {self.question_search}

    def needs_vectors(self, search: str = "") -> bool:
        """Whether questions to its parameters need the passages' vectors: to search them, or for p(z|x).

        A reader that was trained on BM25's scores goes on with those. search: what finds passages, by default what does
        while it is measured.
        """
        bm25_alone = (search or self.eval_search) == "bm25"
        return not (bm25_alone and self.teaches_reading() and self.run.config.qa.uses_bm25_only)

    def measure(self) -> Measure | None:
        """What measures parameters on the development questions; None without any.

        It takes parameters, an index (None without one), and whether they are measured for the last time or halfway,
        rather than for a new index. It finds recall, and then exact match of the questions with answers where the task
        teaches to read them: at a new index nothing may have taught the reader which words answer a question.
        """
        questions = dev_questions(self.run)
        if not questions:
            return None
        evaluator = Evaluator(self.run, questions, self.eval_search, self.rerank)

        def measure(params: Params, index: Index | None, final: bool) -> dict[str, Any]:
            if index is None:
                return {}
            found = evaluator.recall(params, index)
            if final and self.teaches_reading() and answered(questions):
                found["exact_match"] = evaluator.exact_match(evaluator.predict(params, index))
            return found

        return measure

    def monitors(self) -> list[Monitor]:
        """What says warnings of the records of a training."""
        return []


# --- means ------------------------------------------------------------------------------------------------------------


def batch_mean(values: Array) -> WeightedSum:
    """The mean of one value an example, [batch]."""
    return WeightedSum(values.astype(jnp.float32).sum(), jnp.float32(values.shape[0]))


# --- what a run keeps of its first start ------------------------------------------------------------------------------


def load_or_create(
    task: Task, file: str, name: str, make: Callable[[], list[Any]], count: int | None = None
) -> list[Any]:
    """A list that is made at the first start of a task and kept in a file of its folder, so that a run that is resumed
    goes on with the same one.

    name: what the entries are; count: the number of questions that there is one for, None if there are no questions.
    Raises UserError if the kept list is of another number of questions.
    """
    path = task.run.workdir / task.name / file
    if run_on_process_0(lambda: int(path.is_file())):
        found: list[Any] = read_json(path)[name]
    else:
        found = make()
        if is_process_0():
            make_folder(path.parent, "--workdir")
            write_json_atomic(path, {name: found})
    if count is not None and len(found) != count:
        raise UserError(f"{path}: has {name} of {len(found)} questions, not {count}; remove it")
    return found


# --- shapes that several tasks have -----------------------------------------------------------------------------------


def query_shapes(run: Run, name: str = "query") -> Shapes:
    """Of `query_arrays`."""
    ids = id_dtype(run.model.bert.vocabulary_size)
    return {name: ((run.lengths.query,), ids), f"{name}_length": ((), np.int32)}


def question_shapes(run: Run, bm25_depth: int) -> Shapes:
    """Of `question_arrays`, for a search with so many passages in BM25's list."""
    lengths = run.lengths
    answers: Shapes = {
        "answers": ((lengths.answers, lengths.span_width), np.int32),
        "answer_lengths": ((lengths.answers,), np.int32),
    }
    return query_shapes(run) | answers | bm25_shapes(bm25_depth)


def document_shapes(run: Run) -> Shapes:
    """Of `document_arrays`."""
    lengths: Shapes = {name: ((), np.int32) for name in ("document_length", "document_title_length")}
    return {"document": ((run.lengths.document,), id_dtype(run.model.bert.vocabulary_size))} | lengths


def masked_shapes(run: Run, query: Shapes) -> Shapes:
    """Of `masked_arrays`. query: of the text."""
    places = (run.lengths.predictions,)
    own: Shapes = {"positions": (places, np.int32), "targets": (places, np.int32), "weights": (places, np.float32)}
    return query | own


def bm25_shapes(depth: int) -> Shapes:
    """Of `Bm25Hits.arrays`; none where no list comes with an example."""
    found: Shapes = {"bm25_rows": ((depth,), np.int32), "bm25_scores": ((depth,), np.float32)}
    return found if depth else {}


# --- measuring --------------------------------------------------------------------------------------------------------


def dev_questions(run: Run) -> list[Question]:
    """What a run is measured on: its development questions, else masked sentences of held-out documents.

    Empty where the prepared folder has no such questions and `evaluation.held_out` holds out nothing.
    """
    sources = run.sources
    if questions := evaluation_questions(sources):
        return questions
    share = held_out_share(run.config.evaluation.held_out, sources.questions)
    return masked_sentences(sources.passages, sources.tokenizer, run.lengths.query, share, MEASURED) if share else []


def evaluation_questions(sources: Sources) -> list[Question]:
    """The development questions that are measured, `MEASURED` at most."""
    return sources.questions.get("dev", [])[:MEASURED]
