"""Warm-up of the reader: masked language modeling given a passage, so that it reads before anything is retrieved.

Read `mlm_loss`, then `warmup_examples`.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.config import joint_length, task_names
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
from realm_jax.forward import Batch, PackingSpec, StaticContext, batch_candidates, read_targets, truncated_fraction
from realm_jax.models.inputs import DOCUMENT_SPECIALS
from realm_jax.models.layers import Params
from realm_jax.models.losses import WeightedSum
from realm_jax.tasks.base import EmbedCorpus, ExampleSpec, Metrics, Task, document_spec, masked_spec, query_spec
from realm_jax.tasks.packed import SAMPLED, PackingEstimator

Array = jax.Array
Numbers = TypeVar("Numbers", Array, NDArray)
ALL_SENTENCES_RATE = 0.5  # share of excerpts with all other sentences; the rest are mostly short
NULL_RATE = 0.15  # share of examples with the null document, so that the reader also learns plain masked words
UNRELATED_RATE = 0.15  # share of examples with a random passage, because most retrieved passages do not help at first
SAME_SENTENCE_RATE = 0.1  # share of excerpts with the masked sentence too, as in the inverse cloze task


class Mlm(Task):
    """Train the reader."""

    name = "mlm"
    stream = 1
    trained = ("reader",)

    @property
    def num_microbatches(self) -> int:
        """Return the smallest number whose microbatches have no more reader inputs than those of REALM.

        REALM reads all candidates of its sentences. A step in small microbatches takes a quarter longer on two cores
        (`benchmarks/README.md`).
        """
        config, maximum = self.run.config, super().num_microbatches
        if "realm" not in task_names(config):
            return maximum
        realm = config.realm
        max_inputs = realm.batch_size * realm.candidates // maximum  # reader inputs of a microbatch of REALM
        divisors = (parts for parts in range(1, maximum) if maximum % parts == 0)
        return next((parts for parts in divisors if self.settings.batch_size // parts <= max_inputs), maximum)

    @cached_property
    def fixed_examples(self) -> Examples:
        """Return its examples, which depend on no parameters."""
        run, sources = self.run, self.run.sources
        training_rows = run.training_rows(sources.passages), run.training_rows(sources.pretraining)
        return warmup_examples(
            sources.passages, sources.pretraining, sources.tokenizer, run.lengths, training_rows=training_rows
        )

    def examples(self, params: Params, embed: EmbedCorpus) -> Examples:
        return self.fixed_examples

    def example_spec(self) -> ExampleSpec:
        return masked_spec(self.run, query_spec(self.run)) | document_spec(self.run)

    def loss(self, params: Params, batch: Batch, index: None, key: Array | None) -> Metrics:
        return mlm_loss(self.context, params, batch, key)

    def packing(self) -> PackingSpec:
        rng = np.random.default_rng(self.run.config.seed)
        numbers = rng.integers(self.fixed_examples.total, size=SAMPLED).tolist()
        sample = [joint_lengths(self.fixed_examples.make(number, rng)) for number in numbers]
        estimator = PackingEstimator(self.run, self.settings.batch_size // self.num_microbatches)
        joints = estimator.joined(np.array(sample, np.int64), joint_length(self.run.config))
        return PackingSpec(estimator.examples, reader_inputs=joints)


def mlm_loss(context: StaticContext, params: Params, batch: Batch, key: Array | None) -> Metrics:
    """Return the cross-entropy of masked words given the passage that comes with the batch.

    Args:
        context: static arguments of the step.
        params: all parameters.
        batch: arrays of `warmup_examples`, [batch, …].
        key: random key for dropout; None for none.

    Returns:
        loss: mean over the masked tokens.
        accuracy: mean over the masked tokens.
        unplaced: share of tokens that packing dropped.
    """
    slots = context.packing_for(len(batch["query"])).reader_inputs
    read = read_targets(context, params, batch, batch_candidates(batch), key, slots)
    log_p, is_top1 = (part[:, 0] for part in read)  # [batch, m] both
    weights = batch["weights"].astype(jnp.float32)  # [batch, m]
    longest = batch["query"].shape[1] + batch["document"].shape[1]
    return {
        "loss": WeightedSum(-(log_p * weights).sum(), weights.sum()),
        "accuracy": WeightedSum((is_top1 * weights).sum(), weights.sum()),
        "unplaced": truncated_fraction(context, [(joint_lengths(batch), slots)], longest),
    }


def joint_lengths(arrays: Mapping[str, Numbers]) -> Numbers:
    """Return the tokens of texts with their passages, as `reader_inputs` joins them: [batch], or [] for one example."""
    passage = arrays["document_length"] - arrays["document_title_length"] - DOCUMENT_SPECIALS
    return arrays["query_length"] + passage


# --- Examples ---------------------------------------------------------------------------------------------------------


def warmup_examples(
    passages: PassageStore,
    pretraining: PassageStore,
    tokenizer: Tokenizer,
    lengths: Lengths,
    null_rate: float = NULL_RATE,
    unrelated_rate: float = UNRELATED_RATE,
    training_rows: tuple[NDArray[np.bool_] | None, NDArray[np.bool_] | None] = (None, None),
) -> Examples:
    """Return the examples of the warm-up: masked salient spans of three kinds, which any text provides.

    * A sentence of a passage with an excerpt of that passage in which the span occurs again. The excerpt is a random
      choice of the other sentences, in order: short ones teach to copy, long ones teach what to copy.
    * A share `unrelated_rate`: such a sentence with an excerpt of a random passage, so that the reader does not trust
      every passage, because most retrieved passages are wrong at first.
    * A share `null_rate`: a sentence of the pre-training text with the null document (plain masked words). With an
      unrelated passage it would teach that no passage helps a text of the pre-training text's style.

    Args:
        passages: the corpus.
        pretraining: the pre-training text.
        tokenizer: tokenizer of both.
        lengths: sizes of the arrays.
        null_rate: share of examples with the null document.
        unrelated_rate: share of examples with a random passage.
        training_rows: for passages and for pre-training text, True for rows that may be trained on, bool [rows]; None
            for all.

    Raises:
        UserError: one of the two has no such sentence.
    """
    spans = recurring_spans(passages, lengths.query - 2)  # [n, 4]
    spans = spans if training_rows[0] is None else spans[training_rows[0][spans[:, 0]]]
    recurring = "a name or date that it mentions in two sentences"
    require_passages(len(spans), passages, recurring, "the warm-up", training_rows[0])
    sentences = salient_sentences(pretraining, lengths.query)
    if training_rows[1] is not None:
        sentences = SentenceRefs(*(part[training_rows[1][sentences.rows]] for part in sentences))
    require_passages(len(sentences.rows), pretraining, "a salient span", "the warm-up", training_rows[1])

    def make(index: int, rng: np.random.Generator) -> Example:
        draw = rng.random()
        if draw >= null_rate:
            unrelated = draw < null_rate + unrelated_rate
            return _excerpt_example(passages, spans[index], unrelated, rng, lengths, tokenizer)
        number = int(rng.integers(len(sentences.rows)))
        sentence, salient = spans_of(pretraining, int(sentences.rows[number]), int(sentences.numbers[number]))
        arrays = masked_arrays(sentence, salient, "salient", rng, lengths, tokenizer)
        return arrays | document_arrays(sentence[:0], sentence[:0], lengths.document, tokenizer)

    return Examples(len(spans), make)


def _excerpt_example(
    store: PassageStore,
    recurring: NDArray[np.int32],
    unrelated: bool,
    rng: np.random.Generator,
    lengths: Lengths,
    tokenizer: Tokenizer,
) -> Example:
    """Return a sentence with its recurring span masked, and some of its passage's other sentences, one with the span.

    A share SAME_SENTENCE_RATE of the excerpts has the sentence itself too, so that complete passages occur.

    Args:
        store: the corpus.
        recurring: row, sentence, span and the other sentence that has it, as `recurring_spans` lists them, [4].
        unrelated: True for an excerpt of a random passage, made in the same way, so that its length reveals nothing.
        rng: draws all choices.
        lengths: sizes of the arrays.
        tokenizer: tokenizer of the corpus.
    """
    row, number, span_number, other = map(int, recurring)
    start, end = store.sentences(row)[number]
    span = store.spans(row)[span_number : span_number + 1, :2] - start  # [1, 2]
    arrays = masked_arrays(store.body_tokens(row)[start:end], span, "salient", rng, lengths, tokenizer)
    if unrelated:
        row = (row + 1 + int(rng.integers(max(1, len(store) - 1)))) % len(store)
        number, other = (int(rng.integers(len(store.sentences(row)))) for _ in range(2))
    sentences, body = store.sentences(row), store.body_tokens(row)
    draws = rng.random(len(sentences))  # [sentences]
    is_shown = draws < (1.0 if rng.random() < ALL_SENTENCES_RATE else rng.random() ** 2)  # [sentences]
    is_shown[number] = rng.random() < SAME_SENTENCE_RATE
    is_shown[other] = True
    excerpt = np.concatenate([body[first:last] for first, last in sentences[is_shown]])
    return arrays | document_arrays(store.title_tokens(row), excerpt, lengths.document, tokenizer)
