"""Reranker: a cross-encoder that reorders the first retrieved passages, trained by the reader's posterior.

It reads a question together with a passage and adds its score to the passage's. It learns the trained reader's
posterior p(z|x,y) over the first passages, which says from which of them the answer is read. A retriever's inner
product cannot model that. Its score starts at 0, so the initial order is that of the search, and
`evaluation.keep_best` can keep it. The exported model includes it; `realm weights export` writes only encoders and
reader. Read `rerank_loss`.
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from realm_jax.config import QaConfig, RerankConfig
from realm_jax.data.examples import Examples
from realm_jax.forward import (
    Batch,
    Index,
    Rescored,
    StaticContext,
    bm25_list_length,
    falling_scores,
    gather_passages,
    read_question,
    reader_query,
)
from realm_jax.models.architectures.table import encoder_network
from realm_jax.models.bert import apply
from realm_jax.models.inputs import PassageBatch, ReaderInput, flatten_passages, reader_inputs
from realm_jax.models.layers import BertConfig, Dropout, Params, dense
from realm_jax.models.losses import WeightedSum, log_sum_selected
from realm_jax.models.networks import Network
from realm_jax.retrieval.fusion import FusedRanking
from realm_jax.run import Run
from realm_jax.tasks.base import EmbedCorpus, ExampleSpec, Metrics, Task, batch_mean, question_spec
from realm_jax.tasks.qa_examples import retrieved_examples, training_questions

Array = jax.Array
NAME = "reranker"  # top-level key of its parameters
CANDIDATES = 6  # passages of a question that it learns to order; in every step the reader reads all of them


class RerankTask(Task):
    """Train the cross-encoder."""

    name = "rerank"
    stream = 8
    settings: RerankConfig
    retrieves = True
    trained = (NAME,)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.candidates = min(CANDIDATES, run.context.rows)

    def start(self, params: Params) -> Params:
        """Return the parameters with its encoder copied from the reader's."""
        return params | {NAME: params[NAME] | {"bert": jax.tree.map(jnp.copy, params["reader"]["bert"])}}

    def examples(self, params: Params, embed: EmbedCorpus) -> Examples:
        return retrieved_examples(self.run, training_questions(self, params, embed), self.candidates)

    def example_spec(self) -> ExampleSpec:
        search = self.run.config.qa.search
        return question_spec(self.run, bm25_list_length(search, self.candidates, self.run.context.rows))

    def loss(self, params: Params, batch: Batch, index: Index, key: Array | None) -> Metrics:
        qa = dataclasses.replace(self.run.config.qa, passages=self.candidates)
        return rerank_loss(qa, self.run.context, params, batch, index, key)


def rerank_loss(
    qa: QaConfig, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None
) -> Metrics:
    """Return the cross-entropy between p(z|x,y) of the reader and the softmax of the new scores.

    Args:
        qa: settings of fine-tuning; `passages` is the number of passages to order.
        context: static arguments of the step.
        params: all parameters.
        batch: arrays of `question_examples`, [batch, …].
        index: the corpus.
        key: random key for dropout of the cross-encoder; None for none.

    Returns:
        loss: the loss that is minimized, a mean over the questions that have an answer in these passages.
        agreement: share of them whose passage of largest p(z|x,y) has the largest score.
        answer_in_passages: share of the questions that have an answer in these passages.
    """
    read = read_question(qa, context, params, batch, index, None, qa.passages)
    log_likelihood = log_sum_selected(read.spans, read.correct, (2, 3))  # log p(y|z,x), [batch, k]
    posterior = jax.lax.stop_gradient(jax.nn.softmax(read.prior + log_likelihood, axis=1))  # [batch, k]
    scores = falling_scores(read.beam.scores) + scores_of(context, params, read.reader_input, key)  # [batch, k]
    terms = -(posterior * jax.nn.log_softmax(scores, axis=1)).sum(axis=1)  # [batch]
    has_answer = read.correct.any(axis=(1, 2, 3)).astype(jnp.float32)  # [batch]
    agrees = scores.argmax(axis=1) == posterior.argmax(axis=1)  # [batch]
    return {
        "loss": WeightedSum((terms * has_answer).sum(), has_answer.sum()),
        "agreement": WeightedSum((agrees * has_answer).sum(), has_answer.sum()),
        "answer_in_passages": batch_mean(has_answer),
    }


# --- The network ------------------------------------------------------------------------------------------------------


class CrossEncoderNetwork(nn.Module):
    """An encoder, [CLS] through a tanh layer, and one score.

    Attributes:
        config: sizes of the encoder.
    """

    config: BertConfig

    @nn.compact
    def __call__(self, ids: Array, segments: Array, mask: Array, sequence_numbers: Array | None = None) -> Array:
        """Score reader inputs; 0 with fresh parameters.

        Args:
            ids: tokens, int [batch, length].
            segments: 0 or 1 for each token, int [batch, length].
            mask: False on padding, bool [batch, length].
            sequence_numbers: number of each sequence in the batch, [batch] int, for dropout; None for no dropout.

        Returns:
            float32 [batch].
        """
        c = self.config
        cls = jnp.zeros((ids.shape[0], 1), jnp.int32)
        hidden = encoder_network(c, "bert")(ids, segments, mask, positions=cls, sequence_numbers=sequence_numbers)[:, 0]
        pooled = jnp.tanh(dense(c.width, ("embed", "embed_out"), c, "pooler")(hidden))  # [batch, width]
        pooled = Dropout(c.dropout)(pooled, sequence_numbers=sequence_numbers)
        return dense(1, ("embed", None), c, "score", nn.initializers.zeros_init(), jnp.float32)(pooled)[..., 0]


@dataclasses.dataclass(frozen=True)
class CrossEncoder(Network):
    """The cross-encoder as pure functions over a tree in which its parameters have the key 'reranker'."""

    name: ClassVar[str] = NAME

    def init_boxed(self, key: Array) -> Params:
        ids, mask = jnp.zeros((1, 8), jnp.int32), jnp.ones((1, 8), bool)
        params: Params = CrossEncoderNetwork(self.bert).init(key, ids, ids, mask)["params"]
        return params

    def scores(self, params: Params, joint: ReaderInput, key: Array | None = None) -> Array:
        """Return the scores of reader inputs, float32 [batch].

        Args:
            params: all parameters.
            joint: reader inputs, arrays [batch, length].
            key: random key for dropout; None for none.
        """
        scores: Array = apply(
            CrossEncoderNetwork(self.bert), params[NAME], (joint.ids, joint.segments, joint.mask), "__call__", key
        )
        return scores


def scores_of(context: StaticContext, params: Params, joint: ReaderInput, key: Array | None = None) -> Array:
    """Return the scores of reader inputs by the cross-encoder of a run, float32 [batch, k].

    Args:
        context: has the networks.
        params: all parameters.
        joint: reader inputs, arrays [batch, k, length].
        key: random key for dropout; None for none.
    """
    network: Any = next(network for network in context.model.networks if network.name == NAME)
    return network.scores(params, flatten_passages(joint), key).reshape(joint.ids.shape[:2])


def rescore(
    qa: QaConfig, context: StaticContext, params: Params, batch: Batch, index: Index, ranking: FusedRanking
) -> Rescored:
    """Add the scores of the cross-encoder to those of passages.

    The sorted scores represent the order of the search, which stays the same if nothing is added.

    Args:
        qa: settings of fine-tuning.
        context: has the networks.
        params: all parameters.
        batch: arrays of questions, [batch, …].
        index: has the passages.
        ranking: ranking of the passages, [batch, k].
    """
    added_scores = added(qa, context, params, batch, gather_passages(index, ranking.rows))  # [batch, k]
    return Rescored(falling_scores(ranking.scores) + added_scores, ranking.scores + added_scores)


def added(qa: QaConfig, context: StaticContext, params: Params, batch: Batch, documents: PassageBatch) -> Array:
    """Return the scores that the cross-encoder adds to those of passages, float32 [batch, k].

    The passages of one rank are read at a time, so memory does not depend on k.

    Args:
        qa: settings of fine-tuning.
        context: has the networks.
        params: all parameters.
        batch: arrays of questions, [batch, …].
        documents: the passages, arrays [batch, k, …].
    """

    def score(passages: PassageBatch) -> Array:  # ids [batch, d] → [batch]
        candidates = PassageBatch(*(part[:, None] for part in passages))  # ids [batch, 1, d]
        return scores_of(context, params, reader_inputs(*reader_query(batch), candidates, qa.titles))[:, 0]

    return jax.lax.map(score, PassageBatch(*(part.swapaxes(0, 1) for part in documents))).T
