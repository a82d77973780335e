"""Named-entity tagger: a BERT with a label for every word piece, for salient spans (Guu et al. 2020, section 3.4).

Its config is of its own kind, with annotated text in place of passages; the train loop is that of all tasks. Read
`TaggerTask`, then `tagger_examples`; the network is `models/tagger.py`, and how it tags `eval/tagging.py`. Where
the text is from: `data/conll.py`.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

from realm_jax import schema
from realm_jax.data import layouts
from realm_jax.data.conll import Document
from realm_jax.data.examples import Example, Examples
from realm_jax.data.layouts import SpecialTokens
from realm_jax.data.spans import Span
from realm_jax.data.tags import (
    IGNORED,
    OTHER,
    OUTSIDE,
    SPECIAL_PIECES,
    Entity,
    TaggerTokenizer,
    TaggerTokens,
    labels,
    windows,
    with_neighbours,
)
from realm_jax.data.tokenizer import Tokenizer, id_dtype
from realm_jax.eval.entities import Scores, entity_scores
from realm_jax.eval.tagging import WindowTagger
from realm_jax.flops import tower_of
from realm_jax.forward.context import Batch, Index
from realm_jax.mesh import logical_sharding
from realm_jax.models.likelihood import Mean
from realm_jax.models.tagger import Params, Tagger
from realm_jax.run import BaseRun, device_options, make_bert, mesh_for
from realm_jax.schema import BELOW_ONE, NOT_NEGATIVE, POSITIVE, at_least, key, require
from realm_jax.sections import SEED, AnyOptimizer, Bert, Checkpoint, Log, Mesh, TaskSection
from realm_jax.storage import digest
from realm_jax.tasks.base import Embed, Means, Measure, Shapes, Task

Array = jax.Array
NAME = "tagger"  # of the task, of its section of the config, and of its parameters
# Keys of config.model without which parameters mean nothing, or something else.
NETWORK = ("layers", "width", "heads", "feed_forward", "dtype", "hidden_act", "shapes")


@dataclass(frozen=True)
class Top:
    """What is trained, and where it starts."""

    tasks: str = key(NAME, "what makes it the config of a tagger")
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


class TaggerTask(Task):
    """The whole network learns."""

    name = NAME
    stream = 6
    title = "Named-entity tagger"
    section = TaskSection(400, 32, learning_rate=5e-5)
    # BERT-base, fine-tuned as for CoNLL-2003 (Devlin et al. 2019, section 5.3).
    sections = {
        "": Top(),
        "data": Data(),
        "model": Model(hidden_act="gelu"),
        NAME: section,
        "optimizer": AnyOptimizer(),
        "mesh": Mesh(),
        "checkpoint": Checkpoint(every=100, keep=2),
        "log": Log(),
        "evaluation": Evaluation(),
    }
    partners = frozenset[str]()
    reads_passages = False
    has_corpus = False
    has_final_index = False

    def __init__(self, run: BaseRun) -> None:
        super().__init__(run)
        self.trained = (NAME,)
        self.evaluate_every = run.config.evaluation.every

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        require(bool(config.data.path), "data.path", "name CoNLL files, or tfds:conll2003")

    def examples(self, params: Params, embed: Embed) -> Examples:
        text, data = self.run.sources, self.run.config.data
        cutter = TaggerTokenizer(text.tokenizer)
        return tagger_examples(text.splits["train"], cutter, self.run.model.kinds, data.length, data.hidden)

    def array_shapes(self) -> Shapes:
        places = (self.run.config.data.length,)
        shapes: Shapes = {
            "ids": (places, id_dtype(self.run.model.bert.vocabulary_size)),
            "shapes": (places, np.uint8),
            "labels": (places, np.int16),
        }
        return shapes | {"length": ((), np.int32)}

    def loss(self, params: Params, batch: Batch, index: None, key: Array | None) -> Means:
        return tagger_loss(self.run.model, params, batch, key)

    def example_flops(self) -> dict[str, float]:
        model, length = self.run.config.model, self.run.config.data.length
        labels = 2.0 * length * model.width * (2 * len(self.run.model.kinds) + 1)
        return {NAME: 3 * (tower_of(self.run.config).forward(length) + labels)}

    def measure(self) -> Measure:
        """Scores on the development split."""
        tagger, documents = WindowTagger(self.run), self.run.sources.splits["dev"]

        def measure(params: Params, index: Index | None, final: bool) -> dict[str, Any]:
            return score(tagger, params, documents)

        return measure


def default() -> ConfigDict:
    """The config of a tagger at the sizes of BERT-base; fresh and unlocked."""
    return schema.to_config_dict(TaggerTask.sections)


def tagger_loss(tagger: Tagger, params: Params, batch: Batch, key: Array | None) -> Means:
    """Cross-entropy of the labels of first pieces; the mean over them."""
    log_p = tagger.scores(params, batch["ids"], batch["length"], batch["shapes"], key)
    wanted = batch["labels"].astype(jnp.int32)
    weights = (wanted != IGNORED).astype(jnp.float32)
    found = jnp.take_along_axis(log_p, jnp.maximum(wanted, 0)[..., None], axis=-1)[..., 0]
    right = found >= log_p.max(axis=-1)
    count = weights.sum()
    return {"loss": Mean(-(found * weights).sum(), count), "accuracy": Mean((right * weights).sum(), count)}


# --- a run ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AnnotatedText:
    """What a tagger's run reads. splits: documents by split, none where a trained tagger is used and no more; meaning:
    what its parameters mean nothing without."""

    tokenizer: Tokenizer
    splits: dict[str, list[Document]]
    meaning: dict[str, Any]

    def fingerprints(self) -> dict[str, str]:
        """Name → fingerprint of each of them."""
        hashes = {name: digest(json.dumps(part).encode()) for name, part in (self.meaning | self.splits).items()}
        return {"tokenizer": self.tokenizer.fingerprint} | hashes


def make_tagger_run(
    config: ConfigDict, workdir: Path, tokenizer: Tokenizer, kinds: tuple[str, ...], splits: dict[str, list[Document]],
    devices: list[jax.Device] | None = None,
) -> BaseRun:  # fmt: skip
    """Everything that a validated config decides. Raises UserError if the mesh does not fit."""
    mesh = mesh_for(config, devices)
    bert = make_bert(config.model, tokenizer.size, config.data.length, logical_sharding(mesh, "batch", None, None))
    bert = dataclasses.replace(bert, **device_options(mesh, bert.dtype))
    tagger = Tagger(bert, kinds, config.model.shapes)
    network = {name: config.model[name] for name in NETWORK} | {"length": config.data.length}
    text = AnnotatedText(tokenizer, splits, {"kinds": kinds, "network": network})
    return BaseRun(config, workdir, mesh, tagger, text)


# --- examples ---------------------------------------------------------------------------------------------------------


class Annotated(NamedTuple):
    """A document as one text: ranges of its sentences, and its entities, in characters."""

    text: str
    sentences: list[tuple[int, int]]
    entities: list[Entity]


def annotated(document: Document) -> Annotated:
    """Tokens and sentences with a space between them."""
    text, sentences, found = "", [], []
    for sentence in document:
        starts = [len(text)]
        for token in sentence.tokens:
            text += f"{token} "
            starts.append(len(text))  # an entity ends at the space before the next token
        sentences.append((starts[0], len(text) - 1))
        found += [Entity(starts[first], starts[behind] - 1, kind) for first, behind, kind in sentence.entities]
    return Annotated(text[:-1], sentences, found)


def kinds_of(documents: Sequence[Document]) -> tuple[str, ...]:
    """All kinds of entities, in alphabetical order."""
    sentences = (sentence for document in documents for sentence in document)
    return tuple(sorted({entity.kind for sentence in sentences for entity in sentence.entities}))


def tagger_examples(
    documents: Sequence[Document], cutter: TaggerTokenizer, kinds: Sequence[str], length: int, hidden: float = 0.0
) -> Examples:
    """Every window of every document. Arrays of [length]: ids, shapes uint8, labels int16; `length` int32.

    hidden: the share of units whose pieces are [UNK], others every time, so that a tagger looks at what is around.
    """
    whole = [annotated(document) for document in documents]
    made: list[Example] = []
    for text, pieces in zip(whole, cutter([text.text for text in whole]), strict=True):
        wanted = labels(pieces, text.entities, kinds)
        for start, stop in windows(text.text, pieces, text.sentences, length - SPECIAL_PIECES):
            made.append(_example(pieces, wanted, slice(start, stop), length, cutter.tokenizer.special))
    unknown = cutter.tokenizer.unk_id

    def make(index: int, rng: np.random.Generator) -> Example:
        example = made[index]
        if not hidden:
            return example
        units = np.cumsum(example["labels"] != IGNORED)  # 0 at [CLS]
        gone = rng.random(len(units) + 1) < hidden
        inside = (units > 0) & (np.arange(len(units)) < example["length"] - 1)
        return example | {"ids": np.where(gone[units] & inside, example["ids"].dtype.type(unknown), example["ids"])}

    return Examples(len(made), make)


def _example(
    pieces: TaggerTokens, wanted: NDArray[np.int16], window: slice, length: int, special: SpecialTokens
) -> Example:
    """One window. A name that it was cut out of begins in it: its first label is a B, as `decode` would have it."""
    layout = layouts.query(pieces.ids[window], length, special)
    inside = slice(1, layout.used - 1)
    shapes, first = np.full(length, OTHER, np.uint8), np.zeros(length, bool)
    shapes[inside], first[inside] = pieces.shapes[window], pieces.first[window]
    tags = np.full(length, IGNORED, np.int16)
    tags[inside] = wanted[window]
    begin = int(first.argmax())
    if tags[begin] > OUTSIDE and tags[begin] % 2 == 0:
        tags[begin] -= 1
    used = np.int32(layout.used)
    shapes = with_neighbours(shapes, first, used)
    return {"ids": layout.ids.astype(pieces.ids.dtype), "length": used, "shapes": shapes, "labels": tags}


# --- measuring --------------------------------------------------------------------------------------------------------


def score(windows: WindowTagger, params: Params, documents: Sequence[Document]) -> Scores:
    """How well the names of annotated documents are found; their own sentences are read."""
    texts = [annotated(document) for document in documents]
    found = windows(params, [text.text for text in texts], [text.sentences for text in texts])
    return score_spans(texts, found)


def score_spans(texts: Sequence[Annotated], found: Sequence[Sequence[Span]]) -> Scores:
    """How well the spans found in each text are its names."""
    guesses = [[Entity(span.start, span.end, span.kind) for span in spans] for spans in found]
    return entity_scores([text.entities for text in texts], guesses)
