"""Masked words by the retriever's own encoder: ordinary domain-adaptive pre-training (Gururangan et al. 2020), without
labels and without an index. A baseline for REALM.

A passage is read by the encoder's BERT, which predicts 15 % of the tokens of its body (Devlin et al. 2019, section
3.1). A pretrained retriever has lost the head that it once did this with, so there is a fresh one, tied to its word
embeddings, that nothing needs afterwards. It is one encoder for queries and passages: the query tower is a copy.

Here stands, too, what the other baselines of this kind share: `EncoderTask` and `WordHead`. Read `encoder_mlm_loss`.
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

from realm_jax.checksums import checksums, mismatched
from realm_jax.data.examples import (
    MINIMUM_SENTENCE,
    Example,
    Examples,
    Lengths,
    document_arrays,
    require_passages,
    target_arrays,
    truncated_body,
    truncated_title,
)
from realm_jax.data.masking import mask, predictions_needed
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.errors import UserError
from realm_jax.flops import tower_of
from realm_jax.forward.context import Batch, StepContext, batch_passages
from realm_jax.models.bert import ACTIVATIONS, Bert, BertConfig, apply, dense, layer_norm
from realm_jax.models.inputs import body_starts, document_sequences
from realm_jax.models.likelihood import target_log_probabilities
from realm_jax.models.realm import Network, Params, Realm
from realm_jax.run import Run
from realm_jax.sections import TaskSection
from realm_jax.tasks.base import Embed, Means, Shapes, Task, document_shapes
from realm_jax.tasks.mlm import cross_entropy

Array = jax.Array
HEAD = "head"  # of the parameters of a network that predicts words
COUNTED = 100_000  # passages at most whose tokens are counted: frequencies need no more


# --- what such tasks share --------------------------------------------------------------------------------------------


class WordHead(nn.Module):
    """BERT's head of masked words with what it was given added to its transform, so that it begins near the identity:
    fresh, it has hundreds of steps to learn in, not a million."""

    config: BertConfig

    @nn.compact
    def __call__(self, hidden: Array, words: Array) -> Array:
        """hidden [..., width], word embeddings [vocabulary, width] → scores [..., vocabulary] float32."""
        c = self.config
        changed = ACTIVATIONS[c.hidden_act](dense(c.width, ("embed", "embed_out"), c, "transform")(hidden))
        hidden = layer_norm("norm")(hidden + changed)
        zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("vocab",))
        bias: Any = self.param("bias", zeros, (c.vocabulary_size,))
        return jnp.einsum("...d,vd->...v", hidden.astype(jnp.float32), words.astype(jnp.float32)) + bias


@dataclasses.dataclass(frozen=True)
class Head(Network):
    """A `WordHead` alone."""

    name: ClassVar[str] = "encoder_words"

    def init_boxed(self, key: Array) -> Params:
        return {HEAD: init_head(self.bert, key)}


def init_head(bert: BertConfig, key: Array) -> Params:
    """Fresh parameters of a `WordHead`."""
    hidden, words = jnp.zeros((1, bert.width)), jnp.zeros((bert.vocabulary_size, bert.width))
    params: Params = WordHead(bert).init(key, hidden, words)["params"]
    return params


def head_scores(bert: BertConfig, params: Params, hidden: Array, words: Array) -> Array:
    """As of `WordHead`. params: of a network that has one."""
    scores: Any = WordHead(bert).apply({"params": params[HEAD]}, hidden, words)
    return jnp.asarray(scores)


class EncoderTask(Task):
    """A task that moves the towers by predicting words through a network of its own, which nothing else needs."""

    network: ClassVar[type[Network]]

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.evaluates_start = bool(run.config.init_from)
        self.fresh = (self.network.name,)
        self.trained = (*run.context.model.embedder_names, *self.fresh)

    @classmethod
    def networks(cls, model: Realm) -> tuple[Network, ...]:
        return (cls.network(model.bert),)

    def start(self, params: Params) -> Params:
        """The bias of its head begins as the logarithm of how often each token occurs."""
        own = params[self.network.name]
        return params | {self.network.name: own | {HEAD: own[HEAD] | {"bias": log_frequencies(self.run)}}}

    def head_flops(self, places: int) -> float:
        """A `WordHead` at so many places, forward."""
        bert = self.run.model.bert
        return 2.0 * places * bert.width * (bert.width + bert.vocabulary_size)


class OneEncoderTask(EncoderTask):
    """Such a task of the document tower, of which the query tower is a copy."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        query, document = run.context.model.embedder_names[0], run.context.model.embedder_names[-1]
        self.copies = {} if query == document else {query: document}

    def start(self, params: Params) -> Params:
        """Raises UserError for towers that are apart."""
        for query, document in self.copies.items():
            if mismatched(checksums(params[query]), checksums(params[document])):
                raise UserError(
                    f"config.tasks: {self.name} trains one encoder for queries and passages, but what it starts from "
                    "has two that differ; put it before tasks that train them apart, or set config.init_from"
                )
        return super().start(params)


def log_frequencies(run: Run) -> NDArray[np.float32]:
    """The logarithm of each token's share of the passages' tokens, each counted once more: [vocabulary]."""
    ids, tokenizer = run.corpus.ids, run.sources.tokenizer
    counts = np.bincount(ids[:: -(-len(ids) // COUNTED)].ravel(), minlength=tokenizer.size)
    counts[list(tokenizer.special_ids)] = 0
    return np.log((counts + 1) / (counts + 1).sum()).astype(np.float32)


def words_of(tower: Params) -> Array:
    """The word embeddings of a tower, [vocabulary, width]."""
    words: Array = tower["bert"]["words"]["embedding"]
    return words


def passages_to_read(store: PassageStore, lengths: Lengths, kept: NDArray[np.bool_] | None, task: str) -> NDArray:
    """The rows whose bodies have a few tokens within reach, int64. kept: that may be learned from, None for all."""
    bodies, titles = store.lengths()
    found = np.minimum(bodies, lengths.document - 3 - titles) >= MINIMUM_SENTENCE
    rows = np.flatnonzero(found if kept is None else found & kept)
    require_passages(len(rows), store, f"{MINIMUM_SENTENCE} tokens after its title", task, kept)
    return rows


# --- the task ---------------------------------------------------------------------------------------------------------


class EncoderMlm(OneEncoderTask):
    """The encoder learns, and the head."""

    name = "encoder_mlm"
    stream = 9
    title = "Masked words of the encoder"
    section = TaskSection(1000, 32, learning_rate=5e-5)
    network = Head

    @classmethod
    def supervision(cls, config: ConfigDict) -> str:
        return "Words hidden in the passages, each read alone. No questions, no labels."

    @property
    def places(self) -> int:
        """Hidden tokens of a passage at most."""
        return predictions_needed("uniform", self.run.lengths.document - 3)

    def examples(self, params: Params, embed: Embed) -> Examples:
        passages, tokenizer = self.run.sources.passages, self.run.sources.tokenizer
        return masked_passages(passages, tokenizer, self.run.lengths, self.places, self.run.learned_rows(passages))

    def array_shapes(self) -> Shapes:
        places = (self.places,)
        own: Shapes = {"positions": (places, np.int32), "targets": (places, np.int32), "weights": (places, np.float32)}
        return document_shapes(self.run) | own

    def loss(self, params: Params, batch: Batch, index: None, key: Array | None) -> Means:
        return encoder_mlm_loss(self.context, params, batch, key)

    def example_flops(self) -> dict[str, float]:
        read = tower_of(self.run.config).forward(self.run.lengths.document, self.places)
        return {"documents": 3 * read, "words": 3 * self.head_flops(self.places)}


def encoder_mlm_loss(context: StepContext, params: Params, batch: Batch, key: Array | None) -> Means:
    """Cross-entropy of hidden tokens, mean over them."""
    model, documents = context.model, batch_passages(batch)
    tower, template = params[model.embedder_names[-1]], model.passage_template
    positions = batch["positions"] + body_starts(documents, template)[:, None]
    texts = document_sequences(documents, template)
    hidden = apply(Bert(model.bert), tower["bert"], (*texts, positions), "__call__", key)
    scores = head_scores(model.bert, params[Head.name], hidden, words_of(tower))
    return cross_entropy(*target_log_probabilities(scores, batch["targets"]), batch["weights"])


def masked_passages(
    store: PassageStore, tokenizer: Tokenizer, lengths: Lengths, places: int, kept: NDArray[np.bool_] | None = None
) -> Examples:
    """Passages with 15 % of the tokens of their bodies hidden, `places` at most, whose positions count from the body's
    first; titles are shown. kept: rows that may be trained on, bool [rows]; None for all."""
    rows = passages_to_read(store, lengths, kept, "masked words of the encoder")

    def make(index: int, rng: np.random.Generator) -> Example:
        row = int(rows[index])
        title, body = truncated_title(store, row, lengths), truncated_body(store, row, lengths)
        masked = mask("uniform", body, [], rng, tokenizer, places)
        assert masked is not None, "there are tokens to hide"
        return document_arrays(title, masked.ids, lengths.document, tokenizer) | target_arrays(masked, places)

    return Examples(len(rows), make)
