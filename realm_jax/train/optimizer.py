"""Build BERT's optimizer and learning-rate schedule with optax (google-research/bert `optimization.py`).

Adam without bias correction, decoupled weight decay on matrices only, gradients clipped to a global norm, a linear
warm-up, and a linear decay that counts from step 0. For short runs from pretrained weights Adam can have its bias
correction, and parts of the model can have other learning rates (`RateScales`). Functions import optax, because it
takes a third of a second that `realm ask` need not wait for.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-6
WEIGHT_DECAY = 0.01  # decoupled, of matrices only; this and the next are BERT's (google-research/bert)
CLIP = 1.0  # maximal global norm of the gradients
FRESH_HEADS = 5.0  # learning rate of heads that pretrained weights lack, as a multiple of a task's
# optimizer.preset=short, by task: steps of warm-up (default: 20), and the learning rate of both encoders as a multiple
# of the task's (default: 1). Measured on two cores (`docs/results/real_text.md`).
SHORT_WARMUP = {"qa": 40, "closed_book": 40}
SHORT_RETRIEVER = {"realm": 1e-5 / 5e-5, "qa": 2e-5 / 1.5e-4}
READER, HEADS = "reader", ("span_", "mlm_")  # its key in the parameters, and prefixes of the keys of its heads


class BertAdamState(NamedTuple):
    """State of Adam without bias correction.

    Attributes:
        first: exponential means of gradients, shaped like the parameters.
        second: second moments: averages of squared gradients, shaped like the parameters.
    """

    first: Any
    second: Any


def scale_by_bert_adam() -> Any:
    """Return Adam without bias correction: u = m / (√v + ε) with m ← β₁m + (1−β₁)g and v ← β₂v + (1−β₂)g²."""
    import optax

    def init(params: Any) -> BertAdamState:
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
        return BertAdamState(zeros(), zeros())

    def update(gradients: Any, state: BertAdamState, params: Any = None) -> tuple[Any, BertAdamState]:
        first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state.first, gradients)
        second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, state.second, gradients)
        step = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + EPSILON), first, second)
        return step, BertAdamState(first, second)

    return optax.GradientTransformation(init, update)


def warmup_steps(total: int) -> int:
    """Return the released code's number of warm-up steps, min(10000, max(100, ⌊total / 10⌋))."""
    return min(10_000, max(100, total // 10))


def learning_rate(step: Any, peak: float, total: int, warmup: int) -> Any:
    """Return peak · step / W for step < W, else peak · (1 − step / total).

    So the rate falls by peak · W / total at once when the warm-up ends, as in the released code.

    Args:
        step: number of updates that are done, a scalar.
        peak: learning rate of the task.
        total: number of steps of the task.
        warmup: W, a number of steps.
    """
    step = jnp.asarray(step, jnp.float32)
    return jnp.where(step < warmup, peak * step / warmup, peak * jnp.maximum(0.0, 1.0 - step / total))


def weight_decay_mask(params: Any) -> Any:
    """Return a tree of bools: true on parameters that decay, all but biases and LayerNorm's."""

    def rule(path: tuple[Any, ...], _leaf: Any) -> bool:
        names = path_names(path)
        return names[-1] not in ("bias", "scale") and not names[-1].endswith("_bias")

    return jax.tree_util.tree_map_with_path(rule, params)


class RateScales(NamedTuple):
    """Learning rates of parts of the model, as multiples of a task's.

    Attributes:
        retriever: learning rate of all networks except the reader.
        heads: learning rate of the reader's heads, which pretrained weights lack.
        words: false to freeze the word embeddings.
    """

    retriever: float = 1.0
    heads: float = 1.0
    words: bool = True

    def of(self, path: tuple[Any, ...]) -> float:
        """Return the multiple of a parameter at a path of the tree."""
        if self.freezes(path):
            return 0.0
        names = path_names(path)
        if names[0] != READER:
            return self.retriever
        return self.heads if names[1].startswith(HEADS) else 1.0

    def freezes(self, path: tuple[Any, ...]) -> bool:
        """Return True if a parameter at a path of the tree is a table of word embeddings that stays frozen."""
        return not self.words and path_names(path)[-2:] == ["words", "embedding"]


def path_names(path: tuple[Any, ...]) -> list[str]:
    """Return the keys on the way to a leaf of the parameters."""
    return [str(getattr(key, "key", key)) for key in path]


def zero_frozen_gradients(gradients: Any, rates: RateScales) -> Any:
    """Return gradients with zeros for frozen parameters, so that they do not count in the global norm.

    XLA then does not compute these gradients.

    Args:
        gradients: a tree like the trained parameters.
        rates: tells which parameters are frozen.
    """
    if rates.words:
        return gradients
    return jax.tree_util.tree_map_with_path(lambda path, g: jnp.zeros_like(g) if rates.freezes(path) else g, gradients)


def trainable_mask(rates: RateScales, params: Any) -> Any:
    """Return a tree of bools: false on frozen parameters.

    Args:
        rates: tells which parameters are frozen.
        params: a tree of parameters.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: not rates.freezes(path), params)


def scale_by_part(rates: RateScales) -> Any:
    """Return a transformation that multiplies each update by the rate of its part of the model."""
    import optax

    return optax.stateless(
        lambda updates, _: jax.tree_util.tree_map_with_path(lambda path, u: u * rates.of(path), updates)
    )


def delay_retriever(start: int) -> Any:
    """Return a transformation that zeroes the retriever's updates before step `start`.

    They rise linearly to full updates at 2 · start. The moments fill meanwhile: without bias correction, a first step
    from empty moments is three times too long, which is enough to undo what the inverse cloze task learned.
    """

    import optax

    def is_retriever(params: Any) -> Any:
        return {name: jax.tree.map(lambda _, moves=name != READER: moves, part) for name, part in params.items()}

    rise = optax.scale_by_schedule(lambda step: jnp.clip((step - start) / start, 0.0, 1.0))
    return optax.masked(rise, is_retriever)


def make_optimizer(
    peak: float, total: int, warmup: int, retriever_start: int = 0, rates: RateScales | None = None,
    bias_correction: bool = False,
) -> Any:  # fmt: skip
    """Return the optax optimizer of a task.

    Args:
        peak: learning rate at the end of the warm-up.
        total: number of steps of the task.
        warmup: steps of the warm-up; 0 for BERT's rule, `warmup_steps`.
        retriever_start: see `delay_retriever`; 0 to train the retriever from the first step.
        rates: multiples of the learning rate; None for 1 everywhere.
        bias_correction: Adam's; without it the first hundred steps are up to five times as long as the rate says.
    """
    import optax

    warmup = warmup or warmup_steps(total)
    rates = rates or RateScales()
    adam = optax.scale_by_adam(BETA1, BETA2, EPSILON) if bias_correction else scale_by_bert_adam()
    if not rates.words:
        adam = optax.masked(adam, partial(trainable_mask, rates))  # frozen parameters need no moments
    parts = [] if rates == RateScales() else [scale_by_part(rates)]
    return optax.chain(
        optax.clip_by_global_norm(CLIP),
        adam,
        optax.add_decayed_weights(WEIGHT_DECAY, mask=weight_decay_mask),
        delay_retriever(retriever_start) if retriever_start else optax.identity(),
        *parts,
        optax.scale_by_learning_rate(lambda step: learning_rate(step, peak, total, warmup)),
    )
