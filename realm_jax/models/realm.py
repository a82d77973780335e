"""REALM's three networks as one object of pure functions: two embedders and a reader over one parameter tree.

    params = {'query_embedder': …, 'document_embedder': …, 'reader': …}     (one 'embedder' when the tower is shared)

Read next: `likelihood.py` for the objective, `forward.py` for how they go together.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from realm_jax.models.bert import BertConfig
from realm_jax.models.embedder import Embedder, vector_size
from realm_jax.models.inputs import Documents, Joint, Sequences, document_sequences, query_sequences
from realm_jax.models.reader import Reader
from realm_jax.text.templates import Template

Array = jax.Array
Params = dict[str, Any]
LOG_TEMPERATURE = "log_temperature"  # of the query tower's parameters


@dataclasses.dataclass(frozen=True)
class Realm:
    """The networks. Every method is a pure function of its arguments; `key` turns dropout on (None: off).

    pooling, projection, normalization, norm_epsilon, norm_scale: of the towers (`Embedder`). temperature: scores are
    inner products of passages' vectors with queries' divided by it; learn_temperature: it is a parameter of the query
    tower, its logarithm, that starts there. query_template, passage_template: what goes around
    the texts; a passage without one is read in two segments, title and body.
    """

    bert: BertConfig
    projection: int = 128
    norm_epsilon: float = 1e-12
    norm_scale: float = 1.0
    pooling: str = "pooler"
    normalization: str = "layer"
    temperature: float = 1.0
    learn_temperature: bool = False
    query_template: Template | None = None
    passage_template: Template | None = None
    span_hidden: int = 256
    span_width: int = 10
    shared_tower: bool = False

    @property
    def embedder(self) -> Embedder:
        c = self
        return Embedder(c.bert, c.projection, c.norm_epsilon, c.norm_scale, c.pooling, c.normalization)

    @property
    def vector_size(self) -> int:
        """Features of a retrieval vector."""
        return vector_size(self.projection, self.bert.width)

    @property
    def reader(self) -> Reader:
        return Reader(self.bert, self.span_hidden, self.span_width)

    @property
    def embedder_names(self) -> tuple[str, ...]:
        """Top-level keys of the retriever's parameters."""
        return ("embedder",) if self.shared_tower else ("query_embedder", "document_embedder")

    def init_boxed(self, key: Array) -> Params:
        """Fresh parameters, boxed with their logical axis names.

        Both towers start from the same numbers, as in the released code: the inner product of equal functions begins
        as a similarity, which training need only sharpen. Each has its own copy, so that both can be donated.
        """
        ids = jnp.zeros((1, 8), jnp.int32)
        mask = jnp.ones((1, 8), bool)
        tower = self.embedder.init(jax.random.fold_in(key, 0), ids, ids, mask)["params"]
        reader = self.reader.init(jax.random.fold_in(key, 1), ids, ids, mask, method="initialise")["params"]
        towers = {name: jax.tree.map(jnp.copy, tower) for name in self.embedder_names}
        if self.learn_temperature:
            towers[self.embedder_names[0]][LOG_TEMPERATURE] = jnp.log(jnp.float32(self.temperature))
        return towers | {"reader": reader}

    def init(self, key: Array) -> Params:
        """Fresh float32 parameters."""
        return nn.unbox(self.init_boxed(key))

    def embed_queries(self, params: Params, query: Array, lengths: Array, key: Array | None = None) -> Array:
        """Embed_input, divided by the temperature, so that an inner product with a passage's vector is a score.

        query [batch, q] int, lengths [batch] → [batch, vector_size] float32.
        """
        vectors = self.query_vectors(params, query, lengths, key)
        if self.learn_temperature:
            return vectors / jnp.exp(params[self.embedder_names[0]][LOG_TEMPERATURE])
        return vectors if self.temperature == 1.0 else vectors / self.temperature

    def current_temperature(self, params: Params) -> float:
        """The temperature of the scores with these parameters."""
        if not self.learn_temperature:
            return self.temperature
        return float(jnp.exp(jnp.asarray(params[self.embedder_names[0]][LOG_TEMPERATURE])))

    def query_vectors(self, params: Params, query: Array, lengths: Array, key: Array | None = None) -> Array:
        """`embed_queries` before the temperature: what other libraries know as the vector of a query."""
        tower = params[self.embedder_names[0]]
        return self._embed(tower, query_sequences(query, lengths, self.query_template), key)

    def embed_documents(self, params: Params, documents: Documents, key: Array | None = None) -> Array:
        """Embed_doc. documents.ids [batch, d] → [batch, vector_size] float32."""
        tower = params[self.embedder_names[-1]]
        return self._embed(tower, document_sequences(documents, self.passage_template), key)

    def _embed(self, tower: Params, texts: Sequences, key: Array | None) -> Array:
        return _apply(self.embedder, tower, tuple(texts), "__call__", key)

    def read_words(self, params: Params, joint: Joint, positions: Array, key: Array | None = None) -> Array:
        """log p(·|z, x) at masked positions. joint arrays [batch, …], positions [batch, m] → [batch, m, vocabulary]."""
        inputs = (joint.ids, joint.segments, joint.mask, positions)
        return _apply(self.reader, params["reader"], inputs, "word_log_probabilities", key)

    def read_targets(
        self, params: Params, joint: Joint, positions: Array, targets: Array, key: Array | None = None
    ) -> tuple[Array, Array]:
        """log p(target|z, x) at masked positions, float32 [batch, m], and whether no piece is likelier, bool."""
        inputs = (joint.ids, joint.segments, joint.mask, positions, targets)
        return _apply(self.reader, params["reader"], inputs, "target_log_probabilities", key)

    def read_spans(self, params: Params, joint: Joint, key: Array | None = None) -> Array:
        """Span scores. joint arrays [batch, length] → [batch, length, span_width] float32."""
        inputs = (joint.ids, joint.segments, joint.mask)
        return _apply(self.reader, params["reader"], inputs, "span_scores", key)


def _apply(module: nn.Module, params: Params, inputs: tuple[Array, ...], method: str, key: Array | None) -> Any:
    dropout: dict[str, Any] = {"deterministic": True}
    if key is not None:
        dropout = {"deterministic": False, "rngs": {"dropout": key}}
    return module.apply({"params": params}, *inputs, method=method, **dropout)


def flatten_joint(joint: Joint) -> Joint:
    """[batch, k, …] → [batch · k, …]."""
    return Joint(*(x.reshape(-1, *x.shape[2:]) for x in joint))
