"""A named-entity tagger: BERT, and a label for every word piece.

    params = {'tagger': {'bert': …, 'labels': …, 'shapes': …}}

REALM's salient spans came from such a tagger, trained on CoNLL-2003 (Guu et al. 2020, section 3.4). A vocabulary in
lower case hides what tells names best; `shapes` gives it back: embeddings of how each word and its neighbours are
written are added to those of its pieces. What the labels mean: `realm_jax/data/tags.py`. Read next:
`tasks/tagger.py`.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from realm_jax.data.tags import OUTSIDE, SHAPES
from realm_jax.models.bert import Bert, BertConfig, initializer
from realm_jax.models.dropout import Dropout
from realm_jax.models.inputs import token_mask

Array = jax.Array
Params = dict[str, Any]
FORBIDDEN = -1e9  # added to the score of a label that may not follow another; finite, so that sums stay finite


class TaggerNetwork(nn.Module):
    """`labels`: how many there are; `shapes`: whether shapes of words are embedded."""

    config: BertConfig
    labels: int
    shapes: bool = True

    @nn.compact
    def __call__(self, ids: Array, mask: Array, shapes: Array, deterministic: bool = True) -> Array:
        """ids, shapes [batch, length] int, mask [batch, length] bool → log-probabilities [batch, length, labels].

        The embedding of shapes starts at zero, so that imported weights start as they are.
        """
        c = self.config
        features = None
        if self.shapes:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros_init(), (None, "embed"))
            table = nn.Embed(3 * SHAPES, c.width, embedding_init=zeros, name="shapes")
            own, before, after = (shapes // SHAPES**place % SHAPES for place in range(3))
            features = table(own) + table(SHAPES + before) + table(2 * SHAPES + after)
        segments = jnp.zeros_like(ids)
        hidden = Bert(c, name="bert")(ids, segments, mask, deterministic=deterministic, features=features)
        hidden = Dropout(c.dropout)(hidden, deterministic=deterministic)
        scores = nn.Dense(
            self.labels,
            dtype=jnp.float32,
            kernel_init=nn.with_logical_partitioning(initializer(c.width), ("embed", None)),
            bias_init=nn.with_logical_partitioning(nn.initializers.zeros_init(), (None,)),
            name="labels",
        )(hidden.astype(jnp.float32))
        return jax.nn.log_softmax(scores)


@dataclasses.dataclass(frozen=True)
class Tagger:
    """The network as pure functions. kinds: of names; two labels each, and one for what is none."""

    bert: BertConfig
    kinds: tuple[str, ...]
    shapes: bool = True

    @property
    def network(self) -> TaggerNetwork:
        return TaggerNetwork(self.bert, 2 * len(self.kinds) + 1, self.shapes)

    def init_boxed(self, key: Array) -> Params:
        """Fresh parameters, boxed with their logical axis names."""
        ids = jnp.zeros((1, 8), jnp.int32)
        return {"tagger": self.network.init(key, ids, jnp.ones((1, 8), bool), ids)["params"]}

    def init(self, key: Array) -> Params:
        """Fresh float32 parameters."""
        return nn.unbox(self.init_boxed(key))

    def scores(self, params: Params, ids: Array, lengths: Array, shapes: Array, key: Array | None = None) -> Array:
        """log p(label) of every place of `[CLS] pieces [SEP]`.

        ids, shapes [batch, length] int, lengths [batch] → [batch, length, labels] float32. `key` turns dropout on.
        """
        inputs = ids.astype(jnp.int32), token_mask(lengths, ids.shape[1]), shapes.astype(jnp.int32)
        options: dict[str, Any] = {} if key is None else {"deterministic": False, "rngs": {"dropout": key}}
        return self.network.apply({"params": params["tagger"]}, *inputs, **options)  # type: ignore[return-value]


def transitions(labels: int) -> Array:
    """0 where a label may follow another, else FORBIDDEN, float32 [labels, labels]: I only after B or I of its kind."""
    before, after = jnp.arange(labels)[:, None], jnp.arange(labels)[None]
    inside = (after % 2 == 0) & (after != OUTSIDE)
    continues = (before == after) | (before == after - 1)
    return jnp.where(inside & ~continues, FORBIDDEN, 0.0)


def decode(scores: Array, first: Array) -> tuple[Array, Array]:
    """The most probable valid sequence of labels (Viterbi), over places where `first` is true.

    scores [batch, length, labels] log-probabilities, first [batch, length] bool → labels int32 and their probabilities
    float32, [batch, length] both; those of other places mean nothing.
    """
    batch, _, labels = scores.shape
    allowed, every = transitions(labels), jnp.arange(labels)

    def forward(best: Array, entry: tuple[Array, Array]) -> tuple[Array, Array]:
        score, counts = entry
        ways = best[:, :, None] + allowed
        reached = jnp.where(counts[:, None], ways.max(axis=1) + score, best)
        return reached, jnp.where(counts[:, None], ways.argmax(axis=1), every)

    def backward(label: Array, came: Array) -> tuple[Array, Array]:
        return jnp.take_along_axis(came, label[:, None], axis=1)[:, 0], label

    start = jnp.broadcast_to(jnp.where(every == OUTSIDE, 0.0, FORBIDDEN), (batch, labels))
    steps = jnp.moveaxis(scores, 1, 0), first.T
    last, came = jax.lax.scan(forward, start, steps)
    _, found = jax.lax.scan(backward, last.argmax(axis=1), came, reverse=True)
    found = found.T
    return found, jnp.exp(jnp.take_along_axis(scores, found[..., None], axis=-1)[..., 0])
