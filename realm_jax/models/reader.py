"""The reader (knowledge-augmented encoder, section 3.2 of the paper): it reads a query joined with one passage.

It is one encoder with two heads: word prediction for pre-training (the MLM head, whose output is tied to the word
embeddings), and span scores for question answering (ORQA's: the sum of a start and an end representation through ReLU
and LayerNorm).

Read next: `losses.py` for the objective, `forward.py` for how the networks go together.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from realm_jax.models.architectures.table import encoder_network
from realm_jax.models.bert import apply
from realm_jax.models.inputs import ReaderInput
from realm_jax.models.layers import ACTIVATIONS, BertConfig, Params, dense, layer_norm
from realm_jax.models.losses import target_log_probabilities

Array = jax.Array
SPAN_NORM_EPSILON = 1e-3  # Keras's default, in the released reader
SPAN_SIZE = 256  # of a span's representation, in the released reader of BERT-base


def span_size(width: int) -> int:
    """Return the size of a span's representation: the released one, half of the width in narrower readers."""
    return SPAN_SIZE if width >= SPAN_SIZE else width // 2


class ReaderNetwork(nn.Module):
    """The network of a `Reader`.

    In all methods ids, segments and mask are [batch, length], as `Bert` takes them.

    Attributes:
        config: sizes of its encoder.
        span_hidden: size of a span's representation.
        span_width: longest span in tokens.
    """

    config: BertConfig
    span_hidden: int = SPAN_SIZE
    span_width: int = 10

    def setup(self) -> None:
        c = self.config
        self.bert = encoder_network(c, "bert")
        self.mlm_transform = dense(c.width, ("embed", "embed_out"), c, "mlm_transform")
        self.mlm_norm = layer_norm("mlm_norm", c.norm_epsilon)
        zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("vocab",))
        self.mlm_bias: Array = self.param("mlm_bias", zeros, (c.vocabulary_size,))  # type: ignore[assignment]
        self.span_projection = dense(2 * self.span_hidden, ("embed", "mlp"), c, "span_projection")
        self.span_norm = layer_norm("span_norm", SPAN_NORM_EPSILON)
        self.span_score = dense(1, ("span", None), c, "span_score", dtype=jnp.float32)

    def word_logits(
        self, ids: Array, segments: Array, mask: Array, positions: Array, sequence_numbers: Array | None = None
    ) -> Array:
        """Return logits of the vocabulary at some positions.

        Args:
            ids: tokens of the reader input.
            segments: 0 or 1.
            mask: false on padding.
            positions: [batch, m] int.
            sequence_numbers: number of each sequence in the batch, [batch] int, for dropout; None for no dropout.

        Returns:
            [batch, m, vocabulary] float32.
        """
        hidden = self.bert(
            ids, segments, mask, positions=positions, sequence_numbers=sequence_numbers
        )  # [batch, m, width]
        hidden = self.mlm_norm(ACTIVATIONS[self.config.hidden_act](self.mlm_transform(hidden)))
        return self.bert.tied_logits(hidden) + self.mlm_bias

    def target_log_probabilities(
        self,
        ids: Array,
        segments: Array,
        mask: Array,
        positions: Array,
        targets: Array,
        sequence_numbers: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return log-probabilities of targets.

        Args:
            ids: tokens of the reader input.
            segments: 0 or 1.
            mask: false on padding.
            positions: positions of the targets, [batch, m] int.
            targets: [batch, m] int.
            sequence_numbers: number of each sequence in the batch, [batch] int, for dropout; None for no dropout.

        Returns:
            [batch, m] float32; and True if the target is the most probable token, [batch, m] bool.
        """
        return target_log_probabilities(self.word_logits(ids, segments, mask, positions, sequence_numbers), targets)

    def span_scores(self, ids: Array, segments: Array, mask: Array, sequence_numbers: Array | None = None) -> Array:
        """Score every span by its start and width, before any masking.

        Args:
            ids: tokens of the reader input.
            segments: 0 or 1.
            mask: false on padding.
            sequence_numbers: number of each sequence in the batch, [batch] int, for dropout; None for no dropout.

        Returns:
            [batch, length, span_width] float32; entry [b, i, w] is the span of tokens i … i + w (w + 1 tokens).
        """
        length = ids.shape[1]
        hidden = self.bert(ids, segments, mask, sequence_numbers=sequence_numbers)  # [batch, length, width]
        start, end = jnp.split(self.span_projection(hidden), 2, axis=-1)  # [batch, length, span_hidden] both
        padded = jnp.pad(end, ((0, 0), (0, self.span_width - 1), (0, 0)))
        ends = jnp.stack([padded[:, w : w + length] for w in range(self.span_width)], axis=2)
        span = self.span_norm(jax.nn.relu(start[:, :, None] + ends))  # [batch, length, span_width, span_hidden]
        return self.span_score(span)[..., 0]

    def use_all(self, ids: Array, segments: Array, mask: Array) -> None:
        """Use every parameter once, for `init`. Arguments: see `span_scores`."""
        self.word_logits(ids, segments, mask, jnp.zeros((ids.shape[0], 1), jnp.int32))
        self.span_scores(ids, segments, mask)


@dataclasses.dataclass(frozen=True)
class Reader:
    """The reader as pure functions over a tree in which its parameters have the key 'reader'.

    In all methods arrays of `reader_input` are [batch, …] and `key` turns dropout on.

    Attributes:
        bert: its sizes, which may differ from those of the retriever.
        span_hidden: size of a span's representation.
        span_width: longest answer in tokens.
    """

    bert: BertConfig
    span_hidden: int = SPAN_SIZE
    span_width: int = 10

    @property
    def network(self) -> ReaderNetwork:
        """Return the network, without parameters."""
        return ReaderNetwork(self.bert, self.span_hidden, self.span_width)

    def init_boxed(self, key: Array) -> Params:
        """Return fresh parameters, boxed with their logical axis names."""
        ids, mask = jnp.zeros((1, 8), jnp.int32), jnp.ones((1, 8), bool)
        return {"reader": self.network.init(key, ids, ids, mask, method="use_all")["params"]}

    def read_words(
        self, params: Params, reader_input: ReaderInput, positions: Array, key: Array | None = None
    ) -> Array:
        """Return log p(·|z, x) at masked positions.

        Args:
            params: all parameters.
            reader_input: texts joined with passages.
            positions: positions of masked tokens, [batch, m].
            key: random key for dropout; None for none.

        Returns:
            [batch, m, vocabulary] float32.
        """
        inputs = (reader_input.ids, reader_input.segments, reader_input.mask, positions)
        return jax.nn.log_softmax(apply(self.network, params["reader"], inputs, "word_logits", key), axis=-1)

    def read_targets(
        self, params: Params, reader_input: ReaderInput, positions: Array, targets: Array, key: Array | None = None,
        packed_length: int = 0,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Return log p(target|z, x) at masked positions.

        Args:
            params: all parameters.
            reader_input: texts joined with passages.
            positions: positions of masked tokens, [batch, m].
            targets: [batch, m] int.
            key: random key for dropout; None for none.
            packed_length: see `layers.Compute`.

        Returns:
            Log-probabilities [batch, m] float32; and True if the target is the most probable token, [batch, m] bool.
        """
        inputs = (reader_input.ids, reader_input.segments, reader_input.mask, positions, targets)
        return apply(self.network, params["reader"], inputs, "target_log_probabilities", key, packed_length)

    def read_spans(
        self, params: Params, reader_input: ReaderInput, key: Array | None = None, packed_length: int = 0
    ) -> Array:
        """Return the scores of all spans.

        Args:
            params: all parameters.
            reader_input: texts joined with passages.
            key: random key for dropout; None for none.
            packed_length: see `layers.Compute`.

        Returns:
            [batch, length, span_width] float32.
        """
        inputs = (reader_input.ids, reader_input.segments, reader_input.mask)
        return apply(self.network, params["reader"], inputs, "span_scores", key, packed_length)
