"""Every configuration key of a named-entity tagger; `config.py` does the same for REALM.

A config whose `tasks` is `tagger` has these sections and keys:

Science (a run folder keeps them; another value on resume is an error that names the key):
  tasks                    'tagger'
  seed                     every random choice derives from it and from an example's index
  data.vocabulary_size     word pieces of a learned one at most
  data.lower_case          whether the vocabulary is one of text in lower case
  data.length              word pieces of a window of sentences, [CLS] and [SEP] counted
  data.hidden              share of the words that a training example has as [UNK], to learn from what is around
  model.layers, width, heads, feed_forward, dropout
                           size of the BERT, and the dropout probability
  model.max_length         positions; 0: as many as `data.length`
  model.dtype              'float32' or 'bfloat16': matrix products; LayerNorm, softmax and loss stay float32
  model.hidden_act         'gelu' (with erf: Hugging Face's BERTs) or 'gelu_new' (with tanh)
  model.shapes             add to each piece's embedding how its word is written: lower, Title, UPPER, digits, mixed
  tagger.steps, batch_size, learning_rate
  tagger.warmup            steps of learning-rate warm-up; 0: min(10000, max(100, steps / 10))
  optimizer.weight_decay, optimizer.clip
Operations (may change on resume):
  data.path                CoNLL files (a folder with one a split, or one file), or tfds:conll2003; the content may not
                           change (`data.json`)
  data.vocabulary          vocab.txt of word pieces; '': that of `init_from`, else one learned from the training text;
                           the content may not change
  init_from                folder with model.safetensors of a BERT that fresh parameters are taken from, or hf:NAME, a
                           BERT of the Hugging Face hub; '' for none
  model.remat              what the backward pass computes again, to save memory: 'none', 'dots', 'layer'
  model.scan               layers as one compiled loop
  model.fused_attention    attend with one kernel that keeps no scores: on NVIDIA GPUs in bfloat16, by cuDNN
  tagger.microbatches      parts of a batch whose gradients are added up one after another, to save memory
  mesh.data, mesh.fsdp, mesh.model   devices along each axis; one may be -1
  checkpoint.every         steps between two saves
  checkpoint.keep          newest saves that stay
  checkpoint.keep_every    saves of every so many steps stay, too; 0: none
  log.every                steps between two lines of metrics
  log.hang_seconds         seconds without the end of a step or a measurement after which the process ends with exit
                           code 70; 0: never
  log.profile_step         first of five steps that are traced, into tagger/profile; 0: none
  evaluation.every         steps between two measurements of the dev set; 0: at the end alone
  evaluation.batch_size    windows tagged at a time on each device
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from realm_jax import config as realm
from realm_jax.config import bert_base, check_common, check_shape, require, require_not_negative, require_positive

TAGGER = "tagger"


def default() -> ConfigDict:
    """BERT-base, fine-tuned as for CoNLL-2003 (Devlin et al. 2019, section 5.3); a fresh, unlocked config."""
    return ConfigDict(
        {
            "tasks": TAGGER,
            "seed": 0,
            "init_from": "",
            "data": {
                "path": "",
                "vocabulary": "",
                "vocabulary_size": 4000,
                "lower_case": True,
                "length": 128,
                "hidden": 0.0,
            },
            "model": bert_base("gelu") | {"shapes": True},
            TAGGER: {"steps": 400, "batch_size": 32, "microbatches": 1, "learning_rate": 5e-5, "warmup": 0},
            "optimizer": {"weight_decay": 0.01, "clip": 1.0},
            "mesh": {"data": -1, "fsdp": 1, "model": 1},
            "checkpoint": {"every": 100, "keep": 2, "keep_every": 0},
            "log": {"every": 10, "hang_seconds": 3600.0, "profile_step": 0},
            "evaluation": {"every": 100, "batch_size": 32},
        }
    )


def is_tagger(config: Mapping[str, Any]) -> bool:
    """Whether a config is one of a tagger and not of REALM."""
    return config.get("tasks") == TAGGER


def default_like(config: Mapping[str, Any]) -> ConfigDict:
    """The default config of the same kind."""
    return default() if is_tagger(config) else realm.default()


def validate(config: ConfigDict) -> None:
    """Raise UserError, with the key's name, for a value that cannot work. Touches no device."""
    check_shape(config, default())
    require(bool(config.data.path), "data.path", "name CoNLL files, or tfds:conll2003")
    check_common(config)
    require_positive(config, "data.vocabulary_size")
    require_not_negative(config, "evaluation.every")
    require(0 <= config.data.hidden < 1, "data.hidden", "must be at least 0 and below 1")
    require(config.data.length >= 8, "data.length", "must be at least 8")
    enough = config.model.max_length in (0,) or config.model.max_length >= config.data.length
    require(enough, "model.max_length", f"a window needs {config.data.length} positions")
