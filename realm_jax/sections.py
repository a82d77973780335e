"""The sections of a config, a frozen dataclass each: every key is declared once, with default, limit and help.

`schema.py` says how a key is declared, `config.py` how sections go together. A loss takes the dataclass of its task
(`TASK_SECTIONS`) with the values of the run.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from ml_collections import ConfigDict

from realm_jax.data.languages import LANGUAGES, PLAIN
from realm_jax.data.masking import KINDS
from realm_jax.schema import BELOW_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Limit, at_least, key, one_of, require

T = TypeVar("T")
SEARCHES = ("vectors", "bm25", "hybrid")  # what finds passages

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
READER_SIZES = ("layers", "width", "heads", "feed_forward")
READER_CHOICES = {"hidden_act": ("gelu", "gelu_new")}
READER = Limit(
    f"'' or like 'layers=12,width=768': of {', '.join(READER_SIZES)} (positive) and hidden_act=gelu or gelu_new, "
    "each at most once",
    lambda value: reader_changes(value) is not None,
)


@dataclass(frozen=True)
class Top:
    """What is trained, and where it starts."""

    tasks: str = key(
        "mlm,ict,realm,qa",
        "recipe: tasks in order, comma-separated, each with a section of its name below; closed_book, a reader without "
        "passages to compare with, stands alone or after mlm",
    )
    seed: int = key(0, "every random choice derives from it and from an example's index", SEED)
    init_from: str = key(
        "",
        "what a fresh run starts from: a run folder, whose final parameters it takes; a folder with model.safetensors "
        "of a BERT, or with one for each network, as `realm weights` writes them; hf:NAME, a model of the Hugging Face "
        "hub; py:NAME, that of an installed Python package; '' for none. A folder of sentence-transformers is taken "
        "with its pooling, projection, normalisation and prompts, where keys of `encoder` ask for the model's own",
        operations=True,
    )
    reader_from: str = key(
        "",
        "the same, for the reader alone: one that was trained on other questions, where there are none or few about "
        "these passages",
        operations=True,
    )


@dataclass(frozen=True)
class Data:
    """What is learned from, and how long texts are."""

    path: str = key("", "folder written by `realm prepare`; its content may not change (`data.json`)", operations=True)
    text: str = key(
        "pretraining",
        "X, the text that is learned from: that of the prepared folder, or its passages, so that X = Z",
        one_of("pretraining", "passages"),
    )
    predictions: int = key(0, "predicted positions of a masked sentence at most; 0: sized to the masking", NOT_NEGATIVE)
    query_length: int = key(96, "tokens of a sentence or question, [CLS] and [SEP] counted", at_least(8))
    document_length: int = key(288, "tokens of a passage, title and specials counted", at_least(16))


@dataclass(frozen=True)
class Model:
    """The three BERTs: both embedders are of one size, and so is the reader unless `reader` says otherwise."""

    layers: int = key(12, "Transformer layers", POSITIVE, inherit=True)
    width: int = key(768, "size of a hidden state", POSITIVE, inherit=True)
    heads: int = key(12, "attention heads, which must divide the width", POSITIVE, inherit=True)
    feed_forward: int = key(3072, "size of the feed-forward layers", POSITIVE, inherit=True)
    dropout: float = key(0.1, "dropout probability, also of attention's weights", BELOW_ONE)
    dtype: str = key(
        "float32",
        "of matrix products and stored vectors; LayerNorm, softmax, loss stay float32",
        one_of("float32", "bfloat16"),
    )
    hidden_act: str = key(
        "gelu_new",
        "'gelu_new' has tanh (google-research/bert), 'gelu' erf (Hugging Face's BERTs)",
        one_of("gelu", "gelu_new"),
        inherit=True,
    )
    remat: str = key(
        "none",
        "what the backward pass computes again, to save memory: 'dots': all but products with parameters and what is "
        "attended to; 'layer': all but what each layer was given. Layers are then one compiled loop (minutes less to "
        "compile twelve, and other dropout draws)",
        one_of("none", "dots", "layer"),
        operations=True,
    )
    reader: str = key(
        "",
        "in what the reader's BERT differs, such as 'layers=12,width=768,heads=12,feed_forward=3072': sizes and "
        "hidden_act. '': in nothing, or as the model of reader_from",
        READER,
    )
    span_width: int = key(10, "tokens of an answer at most", POSITIVE)
    shared_tower: bool = key(False, "one embedder for queries and passages instead of two")


@dataclass(frozen=True)
class Encoder:
    """How a text's hidden states become its vector."""

    pooling: str = key(
        "pooler",
        "what of the hidden states makes a vector: 'pooler': [CLS] through BERT's tanh layer (the paper); 'cls': [CLS] "
        "itself; 'mean': of all real tokens; 'last': the last real token",
        one_of("pooler", "cls", "mean", "last"),
        inherit=True,
    )
    projection: int = key(
        128, "width of a linear projection of it, so of a vector; 0: none", NOT_NEGATIVE, inherit=True
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
        "template for passages, such as '{title} {text}' or 'passage: {title} {text}'; '': title and body in two "
        "segments, as in the paper. The reader's input has no prompts",
        inherit=True,
    )


@dataclass(frozen=True)
class Retrieval:
    """How passages are found, whatever the task."""

    backend: str = key(
        "device", "'device': exact, inside the step; 'scann': approximate, on the hosts", one_of("device", "scann")
    )
    query_params: str = key(
        "current",
        "what searches: the current query tower, or that of the index's generation (the reference's)",
        one_of("current", "generation"),
    )
    language: str = key(
        "",
        "of the passages, whose stems and stop words BM25 uses; '' to look at the passages, 'none' for plain words",
        one_of("", PLAIN, *LANGUAGES),
    )


@dataclass(frozen=True)
class Refresh:
    """When the corpus is embedded anew, and by whom."""

    mode: str = key(
        "inline",
        "'inline': the trainer re-embeds the corpus itself; 'async': `realm build-index` does",
        one_of("inline", "async"),
    )
    every: int = key(
        500,
        "REALM steps between two re-embeddings (inline) or exports of the towers (async); 0: the document tower and "
        "the index stay as they are (inline)",
        NOT_NEGATIVE,
    )
    adopt_after: int = key(
        -1,
        "async: adopt the generation of export step s exactly at step s + adopt_after, waiting if it is late, which "
        "promises the same bits on resume; -1: as soon as every process has it",
        Limit("-1, or a number of steps", lambda value: value >= -1),
    )
    shared: str = key(
        "",
        "folder or URL that trainer and builder share; '': the run folder. gs:// needs gcsfs, and s3:// s3fs; files "
        "that are memory-mapped are copied to $REALM_STAGING first",
        operations=True,
    )
    wait_seconds: float = key(
        7200.0, "how long the trainer waits for a generation that it cannot do without", POSITIVE, operations=True
    )


@dataclass(frozen=True)
class Scann:
    """Approximate search; in configs with retrieval.backend=scann."""

    ahead: int = key(1, "the search for step t + ahead starts before step t, with its parameters", NOT_NEGATIVE)
    min_recall: float = key(
        0.9, "a generation whose recall against exact search is lower is not published", SHARE, operations=True
    )
    leaves_searched: int = key(
        0, "leaves of a shard's tree that a query searches; 0: by its size", NOT_NEGATIVE, operations=True
    )


@dataclass(frozen=True)
class TaskSection:
    """The training of a task; tasks outside of the recipe are not looked at."""

    steps: int = key(100_000, "optimizer steps", POSITIVE)
    batch_size: int = key(512, "examples of a step", POSITIVE)
    learning_rate: float = key(1e-4, "the largest, after warm-up", POSITIVE)


@dataclass(frozen=True)
class IctConfig(TaskSection):
    """The training of the inverse cloze task, and what a sentence's passage is held against."""

    negatives: str = key(
        "batch",
        "'batch': the passages of the batch, both towers trained (the paper); 'index': the qa.beam passages that the "
        "sentence retrieves, whose vectors stay, the query tower trained",
        one_of("batch", "index"),
    )
    null_weight: float = key(
        0.0,
        "'batch': weight of picking the null document when the own passage is taken away (the paper: 0)",
        NOT_NEGATIVE,
    )


@dataclass(frozen=True)
class RealmConfig(TaskSection):
    """The training of REALM, and how its passages are found."""

    marginal: str = key(
        "example",
        "'example': `log Σ_z p(z|x) Π_j p(y_j|z,x)`, the paper's; 'token': the released code's; 'span': the paper's, "
        "with `p(y|z,x)` of pointing at the hidden span in the passage, for encoders that predict no words",
        one_of("example", "token", "span"),
    )
    retriever_start: int = key(
        0,
        "steps before the retriever moves, while the reader gets used to what is retrieved; after as many more it "
        "moves at the full learning rate (the paper: 0)",
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
        "what finds candidates: 'bm25': by the words that are not masked; 'hybrid': both lists as one. `p(z|x)` is the "
        "retriever's in every case",
        one_of(*SEARCHES),
    )
    candidates: int = key(
        8, "K: passages in the marginal, the null document counted", at_least(2, " (the null document and one)")
    )
    null_document: bool = key(True, "whether the null document is in the marginal; without it K − 1 passages are")
    exclude_own: bool = key(True, "whether a masked sentence may not retrieve the passage that it stands in")

    @property
    def uses_span_marginal(self) -> bool:
        """True if the reader points at what is hidden.

        The retriever then never sees [MASK]: an encoder of sentences does not know it, and no question has it.
        """
        return self.marginal == "span"


@dataclass(frozen=True)
class QaConfig(TaskSection):
    """Fine-tuning, and how the passages of questions are found and read."""

    objective: str = key(
        "marginal",
        "'marginal': `log Σ_z p(z|x) p(y|z,x)`; 'orqa': L_ret + L_read of the released code; 'positive': L_ret, and "
        "L_read of one passage a question that holds its answer: of its gold document where that is known, else the "
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
        "steps between two re-embeddings, the document tower trained as well; 0: it and the index stay as REALM left "
        "them (the paper)",
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

    passages: int = key(20, "first passages of a search that it orders anew", at_least(2), operations=True)


# The sections of tasks by name, with the paper's steps, batch sizes and learning rates if it has the task.
TASK_SECTIONS: dict[str, TaskSection] = {
    "mlm": TaskSection(100_000, 512, learning_rate=1e-4),
    "ict": IctConfig(100_000, 4096, learning_rate=1e-4),
    "realm": RealmConfig(200_000, 512, learning_rate=3e-5),
    "qa": QaConfig(160_000, 16, learning_rate=1e-5),
    "closed_book": TaskSection(160_000, 16, learning_rate=1e-5),
    "rerank": RerankConfig(1000, 16, learning_rate=5e-5),
    "evidence_contrast": TaskSection(1000, 16, learning_rate=1e-5),
}


@dataclass(frozen=True)
class Optimizer:
    """Adam, with gradients that are clipped."""

    warmup: int = key(0, "steps of learning-rate warm-up; 0: min(10000, max(100, steps / 10))", NOT_NEGATIVE)
    microbatches: int = key(
        1,
        "parts of a batch whose gradients are added up one after another, to save memory; mlm and closed_book take as "
        "few as have no more sequences each than realm's, and where the query tower alone is trained "
        "(ict.negatives=index) a batch stays whole",
        POSITIVE,
        operations=True,
    )
    preset: str = key(
        "bert",
        "'bert': as BERT was trained; 'short': for a few hundred steps from pretrained weights: Adam with its bias "
        "correction (the first steps of BERT's are up to five times as long, which such a run does not survive), "
        "heads that are fresh at five times the learning rate, embedders at 1/5 (realm) and 2/15 (qa) of it, word "
        "embeddings as they are, and a warm-up of 20 steps (40 for questions) where none is set",
        one_of("bert", "short"),
    )


@dataclass(frozen=True)
class Mesh:
    """Devices along each axis; those that are left share out the batch (`data`)."""

    fsdp: int = key(1, "shares out the batch, and spreads parameters and moments", POSITIVE, operations=True)
    model: int = key(1, "splits heads, feed-forward layers, vocabulary", POSITIVE, operations=True)


@dataclass(frozen=True)
class Checkpoint:
    """When training is saved, and what stays."""

    every: int = key(1000, "steps between two saves", POSITIVE, operations=True)
    keep: int = key(3, "newest saves that stay", POSITIVE, operations=True)


@dataclass(frozen=True)
class Log:
    """What is recorded of training."""

    every: int = key(10, "steps between two lines of metrics", POSITIVE, operations=True)
    to: str = key(
        "tensorboard",
        "where values go besides metrics.jsonl and evaluations.jsonl, comma-separated: 'tensorboard' (files in the run "
        "folder), 'wandb' (a run for each task, which a resumed task goes on with; its variables say where, such "
        "as WANDB_PROJECT). '': nowhere",
        LOGGED_TO,
        operations=True,
    )
    hang_seconds: float = key(
        3600.0,
        "seconds without the end of a step, a refresh or a measurement after which the process ends with exit code 70 "
        "(waiting for a generation does not count); 0: never",
        NOT_NEGATIVE,
        operations=True,
    )


@dataclass(frozen=True)
class Answering:
    """How questions are answered by a trained run: of `realm ask`, `predict` and `evaluate`."""

    read: int = key(0, "passages read for a question; 0: as in training", NOT_NEGATIVE, operations=True)
    retrieved: int = key(20, "passages retrieved for recall", POSITIVE, operations=True)
    aggregate: str = key(
        "marginal",
        "probability of an answer that occurs several times: 'marginal': the sum over passages and occurrences; 'max': "
        "the likeliest occurrence (ORQA's decoding)",
        one_of("marginal", "max"),
        operations=True,
    )


@dataclass(frozen=True)
class Evaluation:
    """How answers and retrieval are measured."""

    batch_size: int = key(64, "questions read at a time", POSITIVE, operations=True)
    every: int = key(
        0,
        "steps of fine-tuning between two measurements; it ends with the parameters of largest exact match among those "
        "measured; 0: with the last ones",
        NOT_NEGATIVE,
    )
    held_out: float = key(
        0.0,
        "share of documents, rounded to thousandths, out of which mlm, ict and realm take no sentence to learn from "
        "where there are no development questions: masked sentences of theirs, which ask for their document, are "
        "measured in place of questions. Their passages stay in Z, where any task may retrieve them, draw them as "
        "unrelated ones, or read them for training questions",
        HELD_OUT,
    )
    keep_best: bool = key(
        False,
        "whether a task hands on the parameters that measured best, its start among them: by recall of the first five "
        "passages, where an index is measured; fine-tuning by exact match, at the end, every evaluation.every "
        "steps, and at its start if its reader was trained before",
    )


def tracker_names(value: str) -> list[str]:
    """The names of `log.to`."""
    return [name.strip() for name in value.split(",") if name.strip()]


def task_names(config: ConfigDict) -> list[str]:
    """The recipe of a config, in order."""
    return [name.strip() for name in config.tasks.split(",") if name.strip()]


def section_of(kind: type[T], config: ConfigDict, name: str) -> T:
    """Return a section of a config as the frozen dataclass `kind`."""
    return kind(**config[name])


def task_section(config: ConfigDict, name: str) -> TaskSection:
    """Return the section of a task as its frozen dataclass."""
    return section_of(type(TASK_SECTIONS[name]), config, name)


def realm_config(config: ConfigDict) -> RealmConfig:
    """Return how REALM retrieves and reads."""
    return section_of(RealmConfig, config, "realm")


def qa_config(config: ConfigDict) -> QaConfig:
    """Return how the passages of questions are found and read."""
    return section_of(QaConfig, config, "qa")


def joint_length(config: ConfigDict) -> int:
    """Tokens of a query joined with a passage: both layouts less the passage's [CLS] and its title's [SEP], which
    stays where titles are read."""
    titles = config.qa.titles or config.realm.marginal == "span"
    return config.data.query_length + config.data.document_length - (1 if titles else 2)


def check_heads(config: ConfigDict, waiting: Collection[str] = ()) -> None:
    """Raise UserError unless attention heads fit the width. waiting: keys whose values a model is to say."""
    known = "model.width" not in waiting and "model.heads" not in waiting
    require(not known or config.model.width % config.model.heads == 0, "model.heads", "must divide model.width")
    reader = reader_section(config.model)
    advice = f"the reader's {reader.heads} heads must divide its width of {reader.width}"
    require(not known or reader.width % reader.heads == 0, "model.reader", advice)


def reader_changes(text: str) -> dict[str, Any] | None:
    """What `model.reader` says, {key: value}; None if it says nothing that can be."""
    pairs = [part.partition("=") for part in text.split(",") if text]
    found: dict[str, Any] = {}
    for name, _, value in pairs:
        is_size = name in READER_SIZES and value.isdecimal() and int(value) > 0
        if name in found or not (is_size or value in READER_CHOICES.get(name, ())):
            return None
        found[name] = int(value) if is_size else value
    return found


def reader_section(model: ConfigDict) -> ConfigDict:
    """The section `model` as it is for the reader's BERT: with the sizes that `model.reader` says."""
    changes = reader_changes(model.get("reader", "")) or {}
    found = ConfigDict(model.to_dict())
    found.update(changes)
    return found
