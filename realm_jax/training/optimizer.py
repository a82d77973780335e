"""BERT's optimiser and learning-rate schedule in optax (google-research/bert `optimization.py`).

Adam without bias correction, decoupled weight decay on matrices only, gradients clipped to a global norm, a linear
warm-up and a linear decay that is measured from step 0.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from realm_jax.models.realm import LOG_TEMPERATURE

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-6


class BertAdamState(NamedTuple):
    """First and second moments, each shaped like the parameters."""

    first: Any
    second: Any


def scale_by_bert_adam(beta1: float = BETA1, beta2: float = BETA2, epsilon: float = EPSILON) -> Any:
    """u = m / (√v + ε) with m ← β₁m + (1−β₁)g and v ← β₂v + (1−β₂)g², without bias correction."""

    def init(params: Any) -> BertAdamState:
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
        return BertAdamState(zeros(), zeros())

    def update(gradients: Any, state: BertAdamState, params: Any = None) -> tuple[Any, BertAdamState]:
        first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.first, gradients)
        second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state.second, gradients)
        step = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), first, second)
        return step, BertAdamState(first, second)

    return optax.GradientTransformation(init, update)


def warmup_steps(total: int) -> int:
    """W = min(10000, max(100, ⌊total / 10⌋)), as in the released code."""
    return min(10_000, max(100, total // 10))


def learning_rate(step: Any, peak: float, total: int, warmup: int) -> Any:
    """peak · step / W for step < W, else peak · (1 − step / total): it jumps down by W / total when warm-up ends."""
    step = jnp.asarray(step, jnp.float32)
    return jnp.where(step < warmup, peak * step / warmup, peak * jnp.maximum(0.0, 1.0 - step / total))


def decayed(params: Any) -> Any:
    """True on what weight decay applies to: everything but biases, LayerNorm parameters and a temperature."""

    def rule(path: tuple[Any, ...], _leaf: Any) -> bool:
        names = [str(getattr(key, "key", key)) for key in path]
        return names[-1] not in ("bias", "scale", LOG_TEMPERATURE) and not names[-1].endswith("_bias")

    return jax.tree_util.tree_map_with_path(rule, params)


def hold_retriever(start: int) -> Any:
    """No updates for anything but the reader before step `start`, then a linear rise to full ones at 2 · start.

    The moments are gathered meanwhile: without bias correction, a first step from empty moments is three times too
    long, which is enough to undo what the inverse cloze task has learnt.
    """

    def is_retriever(params: Any) -> Any:
        return {name: jax.tree.map(lambda _, moves=name != "reader": moves, part) for name, part in params.items()}

    rise = optax.scale_by_schedule(lambda step: jnp.clip((step - start) / start, 0.0, 1.0))
    return optax.masked(rise, is_retriever)


def make_optimizer(
    peak: float, total: int, warmup: int, weight_decay: float, clip: float, retriever_start: int = 0
) -> Any:
    """The whole chain. `warmup` 0 takes BERT's rule; `retriever_start` 0 trains everything from the first step."""
    warmup = warmup or warmup_steps(total)
    return optax.chain(
        optax.clip_by_global_norm(clip),
        scale_by_bert_adam(),
        optax.add_decayed_weights(weight_decay, mask=decayed),
        hold_retriever(retriever_start) if retriever_start else optax.identity(),
        optax.scale_by_learning_rate(lambda step: learning_rate(step, peak, total, warmup)),
    )
