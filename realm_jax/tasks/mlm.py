"""Warm-up of the reader: masked language modelling given a passage, so that it reads before anything is retrieved.

Read `mlm_loss`, then what examples there are: `warmup_examples`.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

from realm_jax.data.evidence import recurring_spans
from realm_jax.data.examples import (
    Example,
    Examples,
    Lengths,
    SentenceRefs,
    document_arrays,
    masked_arrays,
    require_passages,
    salient_sentences,
    spans_of,
)  # fmt: skip
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.flops import reader_of, word_flops
from realm_jax.forward import Batch, PackingSpec, StaticContext, batch_candidates, read_targets, unplaced_share
from realm_jax.models.inputs import DOCUMENT_SPECIALS
from realm_jax.models.likelihood import Mean
from realm_jax.models.realm import Params
from realm_jax.run import Run
from realm_jax.sections import TaskSection, joint_length, task_names
from realm_jax.tasks.base import (
    Embed,
    Means,
    Measure,
    Monitor,
    Shapes,
    Task,
    document_shapes,
    masked_shapes,
    query_shapes,
)
from realm_jax.tasks.packed import SAMPLED, PlaceCounter, PlacesMonitor

Array = jax.Array
Numbers = TypeVar("Numbers", Array, NDArray)
WHOLE_RATE = 0.5  # excerpts that hold all other sentences; the rest are mostly short
NULL_RATE = 0.15  # examples that are a sentence of X with the empty document: plain masked words are learned too
UNRELATED_RATE = 0.15  # that are beside a passage drawn at random: most that is retrieved at first does not help
KEPT_RATE = 0.1  # excerpts that hold the masked sentence too, as in the inverse cloze task


class Mlm(Task):
    """The reader alone learns."""

    name = "mlm"
    stream = 1
    title = "Warm-up: masked words"
    section = TaskSection(100_000, 512, learning_rate=1e-4)
    has_final_index = False

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.trained = ("reader",)

    @property
    def parts(self) -> int:
        """As few as have no more joints each than a part of REALM's batch, which has all candidates of its sentences.

        A step in small parts takes a quarter longer on two cores (`benchmarks/README.md`).
        """
        config, most = self.run.config, super().parts
        if "realm" not in task_names(config):
            return most
        joints = config.realm.batch_size * config.realm.candidates // most
        divisors = (parts for parts in range(1, most) if most % parts == 0)
        return next((parts for parts in divisors if self.settings.batch_size // parts <= joints), most)

    @classmethod
    def supervision(cls, config: ConfigDict) -> str:
        return (
            "Names and dates hidden in a sentence, read beside other sentences of the same passage in which they occur "
            "again, beside a random passage, or beside nothing. No questions, no labels."
        )

    def examples(self, params: Params, embed: Embed) -> Examples:
        return self.fixed_examples

    @cached_property
    def fixed_examples(self) -> Examples:
        """Its examples, which depend on no parameters."""
        sources = self.run.sources
        kept = self.run.training_rows(sources.passages), self.run.training_rows(sources.pretraining)
        return warmup_examples(sources.passages, sources.pretraining, sources.tokenizer, self.run.lengths, kept=kept)

    def packed_places(self) -> PackingSpec:
        rng = np.random.default_rng(self.run.config.seed)
        numbers = rng.integers(self.fixed_examples.total, size=SAMPLED).tolist()
        lengths = np.array([joint_lengths(self.fixed_examples.make(number, rng)) for number in numbers], np.int64)
        count = PlaceCounter(self.run, self.microbatch)
        return PackingSpec(count.examples, joints=count.joined(lengths, joint_length(self.run.config)))

    def array_shapes(self) -> Shapes:
        return masked_shapes(self.run, query_shapes(self.run)) | document_shapes(self.run)

    def loss(self, params: Params, batch: Batch, index: None, key: Array | None) -> Means:
        return mlm_loss(self.packed_context, params, batch, key)

    def example_flops(self) -> dict[str, float]:
        config, predictions = self.run.config, self.run.lengths.predictions
        places = self.share_places.joints / self.share_places.examples
        read = reader_of(config).forward(joint_length(config), predictions, places)
        return {"reader": 3 * (read + word_flops(self.run))}

    def measure(self) -> Measure | None:
        return None

    def monitors(self) -> list[Monitor]:
        return [PlacesMonitor()]


def mlm_loss(context: StaticContext, params: Params, batch: Batch, key: Array | None) -> Means:
    """Cross-entropy of masked words, mean over predicted pieces; the passage, if any, comes with the batch."""
    slots = context.slots(len(batch["query"])).joints
    read = read_targets(context, params, batch, batch_candidates(batch), key, slots)
    log_p, right = (part[:, 0] for part in read)
    lengths = joint_lengths(batch)
    longest = batch["query"].shape[1] + batch["document"].shape[1]
    unplaced = unplaced_share(context, [(lengths, slots)], longest)
    return cross_entropy(log_p, right, batch["weights"]) | {"unplaced": unplaced}


def joint_lengths(arrays: Mapping[str, Numbers]) -> Numbers:
    """Pieces of texts with the passage that comes with each, as `reader_inputs` joins them: int32 [batch] of a batch,
    [] of one example."""
    passage = arrays["document_length"] - arrays["document_title_length"] - DOCUMENT_SPECIALS
    return arrays["query_length"] + passage


def cross_entropy(log_p: Array, right: Array, weights: Array) -> Means:
    """That of tokens, mean by weight: log p of each, and whether none is likelier; [batch, m] all."""
    weights = weights.astype(jnp.float32)
    loss, accuracy = -(log_p * weights).sum(), (right * weights).sum()
    return {"loss": Mean(loss, weights.sum()), "accuracy": Mean(accuracy, weights.sum())}


# --- examples ---------------------------------------------------------------------------------------------------------


def warmup_examples(
    passages: PassageStore,
    pretraining: PassageStore,
    tokenizer: Tokenizer,
    lengths: Lengths,
    null_rate: float = NULL_RATE,
    unrelated_rate: float = UNRELATED_RATE,
    kept: tuple[NDArray[np.bool_] | None, NDArray[np.bool_] | None] = (None, None),
) -> Examples:
    """The reader's warm-up: masked salient spans of three kinds, from pairs that any text provides.

    * A sentence of a passage beside an excerpt of that passage in which the span occurs again. The excerpt is a random
      choice of the other sentences, in order: short ones teach copying quickly, long ones teach what to copy.
    * A share `unrelated_rate`: such a sentence beside a passage drawn at random, so that the reader does not believe
      every passage: what retrieval offers at first is mostly wrong.
    * A share `null_rate`: a sentence of the pre-training text with the empty document (plain masked words). Beside
      unrelated passages these would teach that the pre-training text's style means that no passage helps.

    kept: rows of passages and of pre-training text that may be trained on, bool [rows]; None for all.
    """
    spans = recurring_spans(passages, lengths.query - 2)
    spans = spans if kept[0] is None else spans[kept[0][spans[:, 0]]]
    require_passages(len(spans), passages, "a name or date that it mentions in two sentences", "the warm-up", kept[0])
    sentences = salient_sentences(pretraining, lengths.query)
    if kept[1] is not None:
        sentences = SentenceRefs(*(part[kept[1][sentences.rows]] for part in sentences))
    require_passages(len(sentences.rows), pretraining, "a salient span", "the warm-up", kept[1])

    def make(index: int, rng: np.random.Generator) -> Example:
        draw = rng.random()
        if draw >= null_rate:
            unrelated = draw < null_rate + unrelated_rate
            return _excerpt_example(passages, spans[index], unrelated, rng, lengths, tokenizer)
        choice = int(rng.integers(len(sentences.rows)))
        sentence, salient = spans_of(pretraining, int(sentences.rows[choice]), int(sentences.numbers[choice]))
        arrays = masked_arrays(sentence, salient, "salient", rng, lengths, tokenizer)
        return arrays | document_arrays(sentence[:0], sentence[:0], lengths.document, tokenizer)

    return Examples(len(spans), make)


def _excerpt_example(
    store: PassageStore,
    entry: NDArray[np.int32],
    unrelated: bool,
    rng: np.random.Generator,
    lengths: Lengths,
    tokenizer: Tokenizer,
) -> Example:
    """A sentence with its recurring span masked, beside some of its passage's other sentences, one with the span.

    unrelated: beside an excerpt of a passage drawn at random instead, made in the same way, so that length tells
    nothing. A share KEPT_RATE of the excerpts holds the sentence itself too, so that whole passages occur.
    """
    row, number, place, other = map(int, entry)
    start, end = store.sentences(row)[number]
    span = store.spans(row)[place : place + 1, :2] - start
    arrays = masked_arrays(store.body_tokens(row)[start:end], span, "salient", rng, lengths, tokenizer)
    if unrelated:
        row = (row + 1 + int(rng.integers(max(1, len(store) - 1)))) % len(store)
        number, other = (int(rng.integers(len(store.sentences(row)))) for _ in range(2))
    sentences, body = store.sentences(row), store.body_tokens(row)
    kept = rng.random(len(sentences)) < (1.0 if rng.random() < WHOLE_RATE else rng.random() ** 2)
    kept[number] = rng.random() < KEPT_RATE
    kept[other] = True
    excerpt = np.concatenate([body[first:last] for first, last in sentences[kept]])
    return arrays | document_arrays(store.title_tokens(row), excerpt, lengths.document, tokenizer)
