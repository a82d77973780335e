"""Reranker: a cross-encoder that orders the first retrieved passages anew, taught by the reader.

It reads the question beside a passage and adds to the passage's score. What it learns is the trained reader's posterior
p(z|x,y) over the first passages: which of them the answer is read from, which a retriever's inner product cannot see.
Its score starts at 0, so the start is the order of the search, and `evaluation.keep_best` can hand that on. It stays in
checkpoints: `realm weights export` writes towers and reader. Read `rerank_loss`.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from realm_jax.config import Config, QaConfig, joint_length
from realm_jax.data.examples import Examples
from realm_jax.flops import embedding_flops, reader_of, score_flops
from realm_jax.forward import (
    Batch,
    Index,
    Rerank,
    StaticContext,
    bm25_list_length,
    falling_scores,
    read_question,
    reader_query,
)
from realm_jax.models.bert import Bert, apply
from realm_jax.models.inputs import PassageBatch, ReaderInput, flatten_passages, reader_inputs
from realm_jax.models.layers import BertConfig, Dropout, Params, dense
from realm_jax.models.losses import WeightedSum, log_sum_selected
from realm_jax.models.networks import Network, Realm
from realm_jax.run import Run
from realm_jax.tasks.base import Embed, Metrics, Shapes, Task, batch_mean, question_shapes
from realm_jax.tasks.qa_examples import retrieved_examples, training_questions

Array = jax.Array
NAME = "reranker"  # of its parameters
CANDIDATES = 6  # first passages of a question that it learns to order: the reader reads all of them in every step


class RerankTask(Task):
    """The cross-encoder alone learns."""

    name = "rerank"
    stream = 8
    title = "Reranker"
    retrieves = True
    learns_to_answer = True
    selects_by = "answer_recall@1"
    trained = (NAME,)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        qa, rows = run.config.qa, run.context.rows
        self.candidates = min(CANDIDATES, rows)
        self.eval_search = qa.search
        self.bm25_depth = bm25_list_length(qa.search, self.candidates, rows)

    @classmethod
    def supervision(cls, config: Config) -> str:
        return "Questions with answer strings, and what the trained reader makes of each passage."

    @classmethod
    def networks(cls, model: Realm) -> tuple[Network, ...]:
        return (CrossEncoder(model.reader.bert),)

    @classmethod
    def reranks(cls, config: Config) -> Rerank:
        return Rerank(config.rerank.passages, NAME, added)

    def start(self, params: Params) -> Params:
        """Its BERT begins as that of the reader."""
        return params | {NAME: params[NAME] | {"bert": jax.tree.map(jnp.copy, params["reader"]["bert"])}}

    def examples(self, params: Params, embed: Embed) -> Examples:
        return retrieved_examples(self.run, training_questions(self, params, embed), self.candidates)

    def array_shapes(self) -> Shapes:
        return question_shapes(self.run, self.bm25_depth)

    def loss(self, params: Params, batch: Batch, index: Index, key: Array | None) -> Metrics:
        qa = dataclasses.replace(self.run.config.qa, passages=self.candidates)
        return rerank_loss(qa, self.context, params, batch, index, key)

    def example_flops(self) -> dict[str, float]:
        config, count = self.run.config, self.candidates
        reader, length = reader_of(config), joint_length(config)
        read, scored = reader.forward(length), reader.forward(length, 1) + 2 * reader.width**2
        parts = {"reader": count * read, "reranker": 3 * count * scored}
        if not config.qa.uses_bm25_only:
            queries = embedding_flops(config, config.data.query_length)
            parts |= {"search": self.context.rows * score_flops(self.run), "queries": queries}
        return parts


def rerank_loss(
    qa: QaConfig, context: StaticContext, params: Params, batch: Batch, index: Index, key: Array | None
) -> Metrics:
    """Return the cross-entropy between p(z|x,y) of the reader and the softmax of the new scores, over the first
    `qa.passages`; mean over the questions of which one holds an answer."""
    read = read_question(qa, context, params, batch, index, None, qa.passages)
    likelihood = log_sum_selected(read.spans, read.correct, (2, 3))  # log p(y|z,x)
    posterior = jax.lax.stop_gradient(jax.nn.softmax(read.prior + likelihood, axis=1))
    scores = falling_scores(read.beam.scores) + scores_of(context, params, read.reader_input, key)
    terms = -(posterior * jax.nn.log_softmax(scores, axis=1)).sum(axis=1)
    answered = read.correct.any(axis=(1, 2, 3)).astype(jnp.float32)
    agrees = scores.argmax(axis=1) == posterior.argmax(axis=1)
    return {
        "loss": WeightedSum((terms * answered).sum(), answered.sum()),
        "agreement": WeightedSum((agrees * answered).sum(), answered.sum()),
        "answer_in_passages": batch_mean(answered),
    }


# --- the network ------------------------------------------------------------------------------------------------------


class CrossEncoderNetwork(nn.Module):
    """BERT, [CLS] through a tanh layer, and one score."""

    config: BertConfig

    @nn.compact
    def __call__(self, ids: Array, segments: Array, mask: Array, deterministic: bool = True) -> Array:
        """ids, segments [batch, length] int, mask [batch, length] bool → [batch] float32; 0 of fresh parameters."""
        c = self.config
        cls = jnp.zeros((ids.shape[0], 1), jnp.int32)
        hidden = Bert(c, name="bert")(ids, segments, mask, positions=cls, deterministic=deterministic)[:, 0]
        pooled = jnp.tanh(dense(c.width, ("embed", "embed_out"), c, "pooler")(hidden))
        pooled = Dropout(c.dropout)(pooled, deterministic=deterministic)
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
        """joint arrays [batch, length] → [batch] float32; `key` turns dropout on."""
        found: Array = apply(
            CrossEncoderNetwork(self.bert), params[NAME], (joint.ids, joint.segments, joint.mask), "__call__", key
        )
        return found


def scores_of(context: StaticContext, params: Params, joint: ReaderInput, key: Array | None = None) -> Array:
    """Of joint arrays [batch, k, length]: [batch, k]."""
    network: Any = next(network for network in context.model.networks if network.name == NAME)
    return network.scores(params, flatten_passages(joint), key).reshape(joint.ids.shape[:2])


def added(qa: QaConfig, context: StaticContext, params: Params, batch: Batch, documents: PassageBatch) -> Array:
    """See `Rerank`. The passages of a place in the list are read at a time, however long the list is."""
    score = partial(_added_in_place, qa, context, params, batch)
    return jax.lax.map(score, PassageBatch(*(part.swapaxes(0, 1) for part in documents))).T


def _added_in_place(
    qa: QaConfig, context: StaticContext, params: Params, batch: Batch, documents: PassageBatch
) -> Array:
    """documents.ids [batch, d] → [batch]."""
    alone = PassageBatch(*(part[:, None] for part in documents))
    return scores_of(context, params, reader_inputs(*reader_query(batch), alone, qa.titles))[:, 0]
