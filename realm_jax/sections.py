"""The sections of a config: every key that no single task owns, declared once with default, limits and help.

Not for the sections of tasks, which stand in their files (`tasks/`), nor for how sections go together: `config.py`,
which is the one thing to read next. How a key is declared: `schema.py`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ml_collections import ConfigDict

from realm_jax.data.languages import LANGUAGES, PLAIN
from realm_jax.schema import BELOW_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Limit, at_least, key, one_of, require

MODEL_PROMPT = "model"
SEARCHES = ("vectors", "bm25", "hybrid")  # what finds passages

SEED = Limit("from 0 to 2**32 - 1 (JAX drops the bits beyond)", lambda value: 0 <= value < 2**32)
DEVICES = Limit("positive, or -1 for what is left", lambda value: value > 0 or value == -1)
HELD_OUT = Limit(
    "0 for none, or from 0.001 to 1 (documents are held out in thousandths)",
    lambda value: value == 0 or 0.001 <= value <= 1,
)
READER_SIZES = ("layers", "width", "heads", "feed_forward")
READER_CHOICES = {"hidden_act": ("gelu", "gelu_new"), "tokenizer": ("own",)}
READER = Limit(
    f"'' or like 'layers=12,width=768': of {', '.join(READER_SIZES)} (positive), hidden_act=gelu or gelu_new, and "
    "tokenizer=own, each at most once",
    lambda value: reader_changes(value) is not None,
)


@dataclass(frozen=True)
class Top:
    """What is trained, and where it starts."""

    tasks: str = key(
        "mlm,ict,realm,qa",
        "recipe, in order, comma-separated: any of mlm, ict, realm, qa; or closed_book, a reader without passages to "
        "compare with (mlm may come before it)",
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
    masking: str = key("salient", "what REALM's queries hide", one_of("salient", "uniform", "random_span"))
    text: str = key(
        "pretraining",
        "X, the text that is learned from: that of the prepared folder, or its passages, so that X = Z",
        one_of("pretraining", "passages"),
    )
    predictions: int = key(0, "predicted positions of a masked sentence at most; 0: sized to the masking", NOT_NEGATIVE)
    null_rate: float = key(0.15, "warm-up: share of examples that are a sentence of X beside the empty document", SHARE)
    unrelated_rate: float = key(0.15, "warm-up: share that are a sentence of Z beside a passage drawn at random", SHARE)
    ict_mask_rate: float = key(0.9, "inverse cloze task: share of sentences that are taken out of their passage", SHARE)
    query_length: int = key(96, "word pieces of a sentence or question, [CLS] and [SEP] counted", at_least(8))
    document_length: int = key(288, "word pieces of a passage, title and specials counted", at_least(16))
    answers: int = key(8, "answers a question is trained with at most", POSITIVE)


@dataclass(frozen=True)
class Bert:
    """The BERTs of a run of any kind, at the sizes of BERT-base."""

    layers: int = key(12, "Transformer layers", POSITIVE, inherit=0)
    width: int = key(768, "size of a hidden state", POSITIVE, inherit=0)
    heads: int = key(12, "attention heads, which must divide the width", POSITIVE, inherit=0)
    feed_forward: int = key(3072, "size of the feed-forward layers", POSITIVE, inherit=0)
    max_length: int = key(0, "positions; 0: as many as the joint layout (a tagger: a window) needs")
    dropout: float = key(0.1, "dropout probability", BELOW_ONE)
    dtype: str = key("float32", "matrix products; LayerNorm, softmax, loss stay float32", one_of("float32", "bfloat16"))
    hidden_act: str = key(
        "gelu_new",
        "'gelu_new' has tanh (google-research/bert), 'gelu' erf (Hugging Face's BERTs)",
        one_of("gelu", "gelu_new"),
        inherit="",
    )
    remat: str = key(
        "none",
        "what the backward pass computes again, to save memory: 'dots': all but products with parameters; 'layer': all "
        "but what each layer was given",
        one_of("none", "dots", "layer"),
        operations=True,
    )
    scan: bool = key(
        False, "one compiled loop over layers: minutes less to compile twelve; other dropout draws", operations=True
    )


@dataclass(frozen=True)
class Model(Bert):
    """The three BERTs: both embedders are of one size, and so is the reader unless `reader` says otherwise."""

    reader: str = key(
        "",
        "in what the reader's BERT differs, such as 'layers=12,width=768,heads=12,feed_forward=3072': sizes and "
        "hidden_act; with tokenizer=own it reads the tokens of `realm prepare --reader-vocab`. '': in nothing, or as "
        "the model of reader_from",
        READER,
    )
    span_hidden: int = key(256, "size of a span's representation", POSITIVE)
    span_width: int = key(10, "word pieces of an answer at most", POSITIVE)
    shared_tower: bool = key(False, "one embedder for queries and passages instead of two")


@dataclass(frozen=True)
class Encoder:
    """How a text's hidden states become its vector."""

    pooling: str = key(
        "pooler",
        "what of the hidden states makes a vector: 'pooler': [CLS] through BERT's tanh layer (the paper); 'mean': of "
        "all real tokens; 'last': the last real token",
        one_of("pooler", "cls", "mean", "last"),
        inherit="",
    )
    projection: int = key(128, "width of a linear projection of it, so of a vector; 0: none", NOT_NEGATIVE, inherit=-1)
    projection_start: str = key(
        "fresh",
        "where a projection that init_from does not have begins: 'fresh': random, the same in both towers; 'pca': "
        "principal components of passages, through the weights of the start",
        one_of("fresh", "pca"),
    )
    normalization: str = key(
        "layer", "of vectors: 'layer': LayerNorm (the paper); 'l2': length 1", one_of("layer", "l2", "none"), inherit=""
    )
    norm_epsilon: float = key(
        1e-12, "of that LayerNorm (1e-12: released checkpoints; 1e-3: released ICT code)", POSITIVE, inherit=0.0
    )
    norm_scale: float = key(1.0, "its initial scale: the smaller, the closer fresh scores are (reference: 1)", POSITIVE)
    temperature: float = key(
        1.0,
        "scores are inner products of vectors divided by it (the paper: 1; a folder of sentence-transformers: 0.05 for "
        "vectors of length 1, else 1)",
        POSITIVE,
        inherit=0.0,
    )
    learn_temperature: bool = key(False, "train it too, as one number of the query tower, from that value on")
    query_prompt: str = key(
        "", "template for queries, such as 'query: {text}'; '': the text alone", inherit=MODEL_PROMPT
    )
    passage_prompt: str = key(
        "",
        "template for passages, such as '{title} {text}' or 'passage: {title} {text}'; '': title and body in two "
        "segments, as in the paper. The reader's input has no prompts",
        inherit=MODEL_PROMPT,
    )


@dataclass(frozen=True)
class Objective:
    """What the losses are."""

    marginal: str = key(
        "example",
        "'example': `log Σ_z p(z|x) Π_j p(y_j|z,x)`, the paper's; 'token': the released code's",
        one_of("example", "token"),
    )
    ict: str = key(
        "batch",
        "the inverse cloze task: 'batch': against the passages of the batch, both towers trained (the paper); 'index': "
        "against the retrieval.qa_beam passages that the sentence retrieves, whose vectors stay, the query tower "
        "trained",
        one_of("batch", "index"),
    )
    ict_null_weight: float = key(
        0.0,
        "objective.ict=batch: weight of picking the null document when the own passage is taken away (the paper: 0)",
        NOT_NEGATIVE,
    )
    retriever_start: int = key(
        0,
        "REALM steps before the retriever moves, while the reader gets used to what is retrieved; after as many more "
        "it moves at the full learning rate (the paper: 0)",
        NOT_NEGATIVE,
    )
    qa: str = key(
        "marginal",
        "'marginal': `log Σ_z p(z|x) p(y|z,x)`; 'orqa': L_ret + L_read of the released code; 'positive': L_ret, and "
        "L_read of one passage a question that holds its answer: of its gold document where that is known, else the "
        "first that is retrieved",
        one_of("marginal", "orqa", "positive"),
    )


@dataclass(frozen=True)
class Retrieval:
    """How passages are found, and how many are read."""

    candidates: int = key(
        8, "K: passages in the marginal, the null document counted", at_least(2, " (the null document and one)")
    )
    null_document: bool = key(True, "whether the null document is in REALM's marginal; without it K − 1 passages are")
    exclude_own: bool = key(True, "whether a masked sentence may not retrieve the passage that it stands in")
    backend: str = key(
        "device", "'device': exact, inside the step; 'scann': approximate, on the hosts", one_of("device", "scann")
    )
    ahead: int = key(1, "scann: the search for step t + ahead starts before step t, with its parameters", NOT_NEGATIVE)
    query_params: str = key(
        "current",
        "what searches: the current query tower, or that of the index's generation (the reference's)",
        one_of("current", "generation"),
    )
    dtype: str = key("float32", "of the stored vectors", one_of("float32", "bfloat16"))
    search: str = key(
        "vectors",
        "what finds REALM's candidates: 'bm25': by the words that are not masked; 'hybrid': both lists as one. "
        "`p(z|x)` is the retriever's in every case",
        one_of(*SEARCHES),
    )
    qa_search: str = key(
        "vectors",
        "what finds the passages of a question; 'bm25': with the reader alone trained, and BM25's scores for `p(z|x)`",
        one_of(*SEARCHES),
    )
    language: str = key(
        "",
        "of the passages, whose stems and stop words BM25 uses; '' to look at the passages, 'none' for plain words",
        one_of("", PLAIN, *LANGUAGES),
    )
    qa_passages: int = key(5, "passages read for a question", POSITIVE)
    qa_titles: bool = key(False, "read them with their titles")
    qa_beam: int = key(
        5000, "passages that the retriever's term of 'orqa' and 'positive' ranks, and ict over the index", POSITIVE
    )
    embed_batch: int = key(256, "passages embedded at a time on each device", POSITIVE, operations=True)


@dataclass(frozen=True)
class Refresh:
    """When the corpus is embedded anew, and by whom."""

    mode: str = key(
        "inline",
        "'inline': the trainer re-embeds the corpus itself; 'async': `realm build-index` does",
        one_of("inline", "async"),
    )
    every: int = key(500, "REALM steps between two re-embeddings (inline) or exports of the towers (async)", POSITIVE)
    qa_every: int = key(
        0,
        "steps of fine-tuning between two re-embeddings, the document tower trained as well; 0: it and the index stay "
        "as REALM left them (the paper)",
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
    idle_exit: float = key(
        3600.0, "seconds without a heartbeat of the trainer after which the builder ends", POSITIVE, operations=True
    )


@dataclass(frozen=True)
class Index:
    """Approximate search, of retrieval.backend=scann."""

    min_recall: float = key(
        0.9, "a generation whose recall against exact search is lower is not published", SHARE, operations=True
    )
    budget: int = key(200, "passages that every shard returns, then scored exactly", POSITIVE, operations=True)
    leaves_searched: int = key(
        0, "leaves of a shard's tree that a query searches; 0: by its size", NOT_NEGATIVE, operations=True
    )


@dataclass(frozen=True)
class AnyTask:
    """The training of a task of any kind."""

    steps: int = key(100_000, "optimizer steps", POSITIVE)
    batch_size: int = key(512, "examples of a step", POSITIVE)
    microbatches: int = key(
        1, "parts of a batch whose gradients are added up one after another, to save memory", POSITIVE, operations=True
    )
    learning_rate: float = key(1e-4, "the largest, after warm-up", POSITIVE)
    warmup: int = key(0, "steps of learning-rate warm-up; 0: min(10000, max(100, steps / 10))", NOT_NEGATIVE)


@dataclass(frozen=True)
class TaskSection(AnyTask):
    """The training of a task; tasks outside of the recipe are not looked at."""

    retriever_rate: float = key(
        0.0, "learning rate of the embedders; 0: the task's. mlm and closed_book train none", NOT_NEGATIVE
    )


@dataclass(frozen=True)
class AnyOptimizer:
    """The optimizer of a run of any kind."""

    weight_decay: float = key(0.01, "decoupled, of matrices alone", NOT_NEGATIVE)
    clip: float = key(1.0, "norm of all gradients together that they are clipped to", POSITIVE)


@dataclass(frozen=True)
class Optimizer(AnyOptimizer):
    """Adam, with gradients that are clipped."""

    bias_correction: bool = key(
        False,
        "whether Adam has its bias correction (BERT's has not: its first steps are up to five times as long, which a "
        "run of a few hundred steps from pretrained weights does not survive)",
    )
    head_rate: float = key(
        1.0, "learning rate of the reader's heads, as a multiple of the task's: imported weights have none", POSITIVE
    )
    train_words: bool = key(True, "whether word embeddings are trained")


@dataclass(frozen=True)
class Mesh:
    """Devices along each axis."""

    data: int = key(-1, "shares out the batch", DEVICES, operations=True)
    fsdp: int = key(1, "shares out the batch, and spreads parameters and moments", DEVICES, operations=True)
    model: int = key(1, "splits heads, feed-forward layers, vocabulary", DEVICES, operations=True)


@dataclass(frozen=True)
class Checkpoint:
    """When training is saved, and what stays."""

    every: int = key(1000, "steps between two saves", POSITIVE, operations=True)
    keep: int = key(3, "newest saves that stay", POSITIVE, operations=True)
    keep_every: int = key(0, "saves of every so many steps stay, too; 0: none", NOT_NEGATIVE, operations=True)


@dataclass(frozen=True)
class Log:
    """What is recorded of training."""

    every: int = key(10, "steps between two lines of metrics", POSITIVE, operations=True)
    hang_seconds: float = key(
        3600.0,
        "seconds without the end of a step, a refresh or a measurement after which the process ends with exit code 70 "
        "(waiting for a generation does not count); 0: never",
        NOT_NEGATIVE,
        operations=True,
    )
    profile_step: int = key(
        0, "first of five steps traced to TASK/profile; 0: none. SIGUSR1: the next five", NOT_NEGATIVE, operations=True
    )


@dataclass(frozen=True)
class Evaluation:
    """How answers and retrieval are measured."""

    questions: int = key(2000, "development questions that are measured at most; 0: all", NOT_NEGATIVE)
    batch_size: int = key(64, "questions read at a time", POSITIVE, operations=True)
    passages: int = key(20, "passages retrieved for recall", POSITIVE)
    qa_passages: int = key(0, "passages read to measure or to ask; 0: as in training", NOT_NEGATIVE, operations=True)
    spans: int = key(20, "likeliest spans of each passage that answers are made of", POSITIVE, operations=True)
    aggregate: str = key(
        "marginal",
        "probability of an answer that occurs several times: 'marginal': the sum over passages and occurrences; 'max': "
        "the likeliest occurrence (ORQA's decoding)",
        one_of("marginal", "max"),
        operations=True,
    )
    qa_every: int = key(
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
        "passages, where an index is measured; fine-tuning by exact match, at the end, every evaluation.qa_every "
        "steps, and at its start if its reader was trained before",
    )


def task_names(config: ConfigDict) -> list[str]:
    """The recipe of a config, in order."""
    return [name.strip() for name in config.tasks.split(",") if name.strip()]


def joint_length(config: ConfigDict) -> int:
    """Word pieces of a query joined with a passage: both layouts less the passage's [CLS] and its title's [SEP], which
    stays where titles are read."""
    return config.data.query_length + config.data.document_length - (1 if config.retrieval.qa_titles else 2)


def check_heads(config: ConfigDict, waiting: Collection[str] = ()) -> None:
    """Raise UserError unless attention heads fit the width. waiting: keys whose values a model is to say."""
    known = "model.width" not in waiting and "model.heads" not in waiting
    require(not known or config.model.width % config.model.heads == 0, "model.heads", "must divide model.width")
    reader = reader_section(config.model)
    advice = f"the reader's {reader.heads} heads must divide its width of {reader.width}"
    require(not known or reader.width % reader.heads == 0, "model.reader", advice)


def reader_changes(text: str) -> dict[str, Any] | None:
    """What `model.reader` says, {key: value}; None where it says nothing that can be."""
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
    found.update({name: value for name, value in changes.items() if name != "tokenizer"})
    return found


def has_reader_tokenizer(config: ConfigDict) -> bool:
    """Whether the reader reads other tokens than the retriever."""
    return "tokenizer" in (reader_changes(config.model.reader) or {})
