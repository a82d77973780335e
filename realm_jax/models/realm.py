"""REALM's networks over one tree of parameters: the two embedders of `encoder.py`, and the reader, which is here.

    params = {'query_embedder': …, 'document_embedder': …, 'reader': …}     (one 'embedder' when the tower is shared)

The reader (knowledge-augmented encoder, section 3.2 of the paper) reads a query joined with one passage. It is one BERT
with two heads: word prediction for pre-training (BERT's MLM head, output tied to the word embeddings), and span scores
for question answering (ORQA's: the sum of a start and an end representation through ReLU and LayerNorm). A task may
bring further networks (`Network`), each with a key of its own.

Read next: `likelihood.py` for the objective, `forward/` for how the networks go together.
"""

import abc
import dataclasses
import zlib
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from realm_jax.models.bert import ACTIVATIONS, Bert, BertConfig, Params, apply, dense, layer_norm
from realm_jax.models.encoder import Retriever
from realm_jax.models.inputs import ReaderInput
from realm_jax.models.likelihood import target_log_probabilities

Array = jax.Array
SPAN_NORM_EPSILON = 1e-3  # Keras's default, in the released reader
SPAN_SIZE = 256  # of a span's representation, in the released reader of BERT-base


def span_size(width: int) -> int:
    """Size of a span's representation in a reader of this width: the released one, half of a width below that."""
    return SPAN_SIZE if width >= SPAN_SIZE else width // 2


class ReaderNetwork(nn.Module):
    """`span_hidden`: size of a span's representation; `span_width`: longest answer in tokens."""

    config: BertConfig
    span_hidden: int = SPAN_SIZE
    span_width: int = 10

    def setup(self) -> None:
        c = self.config
        self.bert = Bert(c, name="bert")
        self.mlm_transform = dense(c.width, ("embed", "embed_out"), c, "mlm_transform")
        self.mlm_norm = layer_norm("mlm_norm")
        zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("vocab",))
        self.mlm_bias: Array = self.param("mlm_bias", zeros, (c.vocabulary_size,))  # type: ignore[assignment]
        self.span_projection = dense(2 * self.span_hidden, ("embed", "mlp"), c, "span_projection")
        self.span_norm = layer_norm("span_norm", SPAN_NORM_EPSILON)
        self.span_score = dense(1, ("span", None), c, "span_score", dtype=jnp.float32)

    def word_log_probabilities(
        self, ids: Array, segments: Array, mask: Array, positions: Array, deterministic: bool = True
    ) -> Array:
        """Log-probabilities of the whole vocabulary at the masked positions.

        ids, segments, mask [batch, length]; positions [batch, m] int → [batch, m, vocabulary] float32.
        """
        return jax.nn.log_softmax(self._word_scores(ids, segments, mask, positions, deterministic), axis=-1)

    def target_log_probabilities(
        self, ids: Array, segments: Array, mask: Array, positions: Array, targets: Array, deterministic: bool = True,
        places: int = 0,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Log-probabilities of one piece at each masked position, and whether no other is likelier there.

        As above, and targets [batch, m] int → [batch, m] float32 and bool. places: as of `Bert`.
        """
        scores = self._word_scores(ids, segments, mask, positions, deterministic, places)
        return target_log_probabilities(scores, targets)

    def _word_scores(
        self, ids: Array, segments: Array, mask: Array, positions: Array, deterministic: bool, places: int = 0
    ) -> Array:
        """Before any normalisation."""
        hidden = self.bert(ids, segments, mask, positions=positions, deterministic=deterministic, places=places)
        hidden = self.mlm_norm(ACTIVATIONS[self.config.hidden_act](self.mlm_transform(hidden)))
        return self.bert.tied_logits(hidden) + self.mlm_bias

    def span_scores(
        self, ids: Array, segments: Array, mask: Array, deterministic: bool = True, places: int = 0
    ) -> Array:
        """Score of every span by its start and width, before any masking. places: as of `Bert`.

        Returns [batch, length, span_width] float32; entry [b, i, w] is the span of pieces i … i + w (w + 1 pieces).
        """
        hidden = self.bert(ids, segments, mask, deterministic=deterministic, places=places)
        start, end = jnp.split(self.span_projection(hidden), 2, axis=-1)
        ends = jnp.pad(end, ((0, 0), (0, self.span_width - 1), (0, 0)))
        length = ids.shape[1]
        ends = jnp.stack([ends[:, w : w + length] for w in range(self.span_width)], axis=2)
        span = self.span_norm(jax.nn.relu(start[:, :, None] + ends))
        return self.span_score(span)[..., 0]

    def initialise(self, ids: Array, segments: Array, mask: Array) -> None:
        """Touch every parameter once; used with `init` only."""
        self.word_log_probabilities(ids, segments, mask, jnp.zeros((ids.shape[0], 1), jnp.int32))
        self.span_scores(ids, segments, mask)


@dataclasses.dataclass(frozen=True)
class Reader:
    """The reader as pure functions over a tree in which its parameters have the key 'reader'.

    Its BERT may be of other sizes than the retriever's. span_hidden, span_width: as of the network.
    """

    bert: BertConfig
    span_hidden: int = SPAN_SIZE
    span_width: int = 10

    @property
    def network(self) -> ReaderNetwork:
        return ReaderNetwork(self.bert, self.span_hidden, self.span_width)

    def init_boxed(self, key: Array) -> Params:
        """Fresh parameters, boxed with their logical axis names."""
        ids, mask = jnp.zeros((1, 8), jnp.int32), jnp.ones((1, 8), bool)
        return {"reader": self.network.init(key, ids, ids, mask, method="initialise")["params"]}

    def read_words(self, params: Params, joint: ReaderInput, positions: Array, key: Array | None = None) -> Array:
        """log p(·|z, x) at masked positions. joint arrays [batch, …], positions [batch, m] → [batch, m, vocabulary]."""
        inputs = (joint.ids, joint.segments, joint.mask, positions)
        return apply(self.network, params["reader"], inputs, "word_log_probabilities", key)

    def read_targets(
        self, params: Params, joint: ReaderInput, positions: Array, targets: Array, key: Array | None = None,
        places: int = 0,
    ) -> tuple[Array, Array]:  # fmt: skip
        """log p(target|z, x) at masked positions, float32 [batch, m], and whether no piece is likelier, bool.

        places: as of `Bert`.
        """
        inputs = (joint.ids, joint.segments, joint.mask, positions, targets)
        return apply(self.network, params["reader"], inputs, "target_log_probabilities", key, places)

    def read_spans(self, params: Params, joint: ReaderInput, key: Array | None = None, places: int = 0) -> Array:
        """Span scores. joint arrays [batch, length] → [batch, length, span_width] float32. places: as of `Bert`."""
        return apply(
            self.network, params["reader"], (joint.ids, joint.segments, joint.mask), "span_scores", key, places
        )


@dataclasses.dataclass(frozen=True)
class Network(abc.ABC):
    """A network that a task brings along: its sizes, and pure functions over a tree in which its parameters have the
    key `name`."""

    bert: BertConfig
    name: ClassVar[str]

    @abc.abstractmethod
    def init_boxed(self, key: Array) -> Params:
        """Its fresh parameters, below `name`, boxed with their logical axis names."""


@dataclasses.dataclass(frozen=True)
class Realm(Retriever):
    """A retriever with a reader, and with what tasks bring along. Methods are pure functions of their arguments; `key`
    turns dropout on (None: off)."""

    reader: Reader = dataclasses.field(kw_only=True)
    networks: tuple[Network, ...] = dataclasses.field(default=(), kw_only=True)

    def with_bert(self, **changes: Any) -> "Realm":
        """The same networks with fields of their BERTs changed that are no sizes, such as how they attend."""

        def changed(part: Any) -> Any:
            return dataclasses.replace(part, bert=dataclasses.replace(part.bert, **changes))

        networks = tuple(map(changed, self.networks))
        return dataclasses.replace(changed(self), reader=changed(self.reader), networks=networks)

    def init_boxed(self, key: Array) -> Params:
        """Fresh parameters, boxed with their logical axis names. Those of a network depend on the key and its name, not
        on what other networks there are."""
        params = self.init_towers(jax.random.fold_in(key, 0)) | self.reader.init_boxed(jax.random.fold_in(key, 1))
        for network in self.networks:
            own = jax.random.fold_in(key, zlib.crc32(network.name.encode()))
            params[network.name] = network.init_boxed(own)
        return params

    def init(self, key: Array) -> Params:
        """Fresh float32 parameters."""
        return nn.unbox(self.init_boxed(key))


def flatten_passages(joint: ReaderInput) -> ReaderInput:
    """[batch, k, …] → [batch · k, …]."""
    return ReaderInput(*(x.reshape(-1, *x.shape[2:]) for x in joint))
