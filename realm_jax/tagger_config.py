"""Every configuration key of a named-entity tagger, declared once; `config.py` does the same for REALM.

A config whose `tasks` is `tagger` has these keys. `reference` makes the page of both kinds, `docs/config.md`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ml_collections import ConfigDict

from realm_jax import config as realm
from realm_jax import schema
from realm_jax.config import SEED, AnyOptimizer, AnyTask, Bert, Checkpoint, Log, Mesh, check_heads, check_shape
from realm_jax.schema import BELOW_ONE, NOT_NEGATIVE, POSITIVE, at_least, key, require

TAGGER = "tagger"


@dataclass(frozen=True)
class Top:
    """What is trained, and where it starts."""

    tasks: str = key(TAGGER, "what makes it the config of a tagger")
    seed: int = key(0, "every random choice derives from it and from an example's index", SEED)
    init_from: str = key(
        "",
        "folder with model.safetensors of a BERT that fresh parameters are taken from, or hf:NAME, a BERT of the "
        "Hugging Face hub; '' for none",
        operations=True,
    )


@dataclass(frozen=True)
class Data:
    """What is learned from."""

    path: str = key(
        "",
        "CoNLL files (a folder with one a split, or one file), or tfds:conll2003; the content may not change "
        "(`data.json`)",
        operations=True,
    )
    vocabulary: str = key(
        "",
        "vocab.txt of word pieces; '': that of `init_from`, else one learned from the training text; the content may "
        "not change",
        operations=True,
    )
    vocabulary_size: int = key(4000, "word pieces of a learned one at most", POSITIVE)
    lower_case: bool = key(True, "whether the vocabulary is one of text in lower case")
    length: int = key(128, "word pieces of a window of sentences, [CLS] and [SEP] counted", at_least(8))
    hidden: float = key(0.0, "share of an example's words shown as [UNK], to learn from what is around", BELOW_ONE)


@dataclass(frozen=True)
class Model(Bert):
    """The tagger's BERT."""

    shapes: bool = key(True, "add to a piece's embedding how its word is written: lower, Title, UPPER, digits, mixed")


@dataclass(frozen=True)
class Evaluation:
    """How tags are measured."""

    every: int = key(100, "steps between two measurements of dev; 0: at the end alone", NOT_NEGATIVE, operations=True)
    batch_size: int = key(32, "windows tagged at a time on each device", POSITIVE, operations=True)


# BERT-base, fine-tuned as for CoNLL-2003 (Devlin et al. 2019, section 5.3).
SECTIONS: dict[str, Any] = {
    "": Top(),
    "data": Data(),
    "model": Model(hidden_act="gelu"),
    TAGGER: AnyTask(400, 32, learning_rate=5e-5),
    "optimizer": AnyOptimizer(),
    "mesh": Mesh(),
    "checkpoint": Checkpoint(every=100, keep=2),
    "log": Log(),
    "evaluation": Evaluation(),
}

INTRODUCTION = """# Keys of a config

`realm train --help-config` prints this page; it is made from `realm_jax/config.py` and `realm_jax/tagger_config.py`.

A config file returns a config with some keys changed: `realm_jax.config.default()`, whose keys come first, or
`realm_jax.tagger_config.default()`, of a named-entity tagger. On the command line a key is set with
`--config.section.key=value`. After each key stand its default, what a value must be, and `operations` where it may
change on resume. All others are science: a run folder keeps them, and another value on resume is an error that names
the key. Values of tasks outside of the recipe (`tasks`) are not looked at.
"""


def default() -> ConfigDict:
    """BERT-base, fine-tuned as for CoNLL-2003 (Devlin et al. 2019, section 5.3); a fresh, unlocked config."""
    return schema.to_config_dict(SECTIONS)


def is_tagger(config: Mapping[str, Any]) -> bool:
    """Whether a config is one of a tagger and not of REALM."""
    return config.get("tasks") == TAGGER


def sections_like(config: Mapping[str, Any]) -> schema.Sections:
    """The sections of a config of the same kind."""
    return SECTIONS if is_tagger(config) else realm.SECTIONS


def default_like(config: Mapping[str, Any]) -> ConfigDict:
    """The default config of the same kind."""
    return schema.to_config_dict(sections_like(config))


def reference() -> str:
    """The page of all keys of both kinds, in Markdown."""
    both = {"REALM": schema.help_text(realm.SECTIONS), "Tagger": schema.help_text(SECTIONS, inherits=False)}
    return "\n".join([INTRODUCTION, *(f"## {kind}\n\n{text}" for kind, text in both.items())])


def validate(config: ConfigDict) -> None:
    """Raise UserError, with the key's name, for a value that cannot work. Touches no device."""
    check_shape(config, default())
    require(bool(config.data.path), "data.path", "name CoNLL files, or tfds:conll2003")
    schema.check_values(config, SECTIONS)
    check_heads(config)
    enough = config.model.max_length == 0 or config.model.max_length >= config.data.length
    require(enough, "model.max_length", f"a window needs {config.data.length} positions")
