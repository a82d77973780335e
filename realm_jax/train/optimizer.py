"""BERT's optimiser and learning-rate schedule in optax (google-research/bert `optimization.py`).

Adam without bias correction, decoupled weight decay on matrices only, gradients clipped to a global norm, a linear
warm-up and a linear decay that is measured from step 0. For short runs from pretrained weights Adam can have its bias
correction, and parts of the model can have learning rates of their own (`RateScales`). optax is imported where it is
used: a third of a second that a question to a trained run does not wait for.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-6
WEIGHT_DECAY = 0.01  # decoupled, of matrices alone; this and the next are BERT's (google-research/bert)
CLIP = 1.0  # norm of all gradients together that they are clipped to
FRESH_HEADS = 5.0  # learning rate of heads that pretrained weights leave fresh, as a multiple of a task's
# optimizer.preset=short, by task: steps of warm-up (20), and the learning rate of the embedders as a multiple of the
# task's (1). Measured on two cores (`docs/results/real_text.md`).
SHORT_WARMUP = {"qa": 40, "closed_book": 40}
SHORT_RETRIEVER = {"realm": 1e-5 / 5e-5, "qa": 2e-5 / 1.5e-4}
READER, HEADS = "reader", ("span_", "mlm_")  # its key in the parameters, and what its heads' keys begin with


class BertAdamState(NamedTuple):
    """First and second moments, each shaped like the parameters."""

    first: Any
    second: Any


def scale_by_bert_adam() -> Any:
    """u = m / (√v + ε) with m ← β₁m + (1−β₁)g and v ← β₂v + (1−β₂)g², without bias correction."""
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
    """W = min(10000, max(100, ⌊total / 10⌋)), as in the released code."""
    return min(10_000, max(100, total // 10))


def learning_rate(step: Any, peak: float, total: int, warmup: int) -> Any:
    """peak · step / W for step < W, else peak · (1 − step / total): it jumps down by W / total when warm-up ends."""
    step = jnp.asarray(step, jnp.float32)
    return jnp.where(step < warmup, peak * step / warmup, peak * jnp.maximum(0.0, 1.0 - step / total))


def weight_decay_mask(params: Any) -> Any:
    """True on what weight decay applies to: everything but biases and LayerNorm parameters."""

    def rule(path: tuple[Any, ...], _leaf: Any) -> bool:
        names = path_names(path)
        return names[-1] not in ("bias", "scale") and not names[-1].endswith("_bias")

    return jax.tree_util.tree_map_with_path(rule, params)


class RateScales(NamedTuple):
    """Learning rates of parts of the model, as multiples of a task's.

    retriever: of everything but the reader. heads: of the reader's heads, which pretrained weights leave fresh. words:
    whether word embeddings are trained at all.
    """

    retriever: float = 1.0
    heads: float = 1.0
    words: bool = True

    def of(self, path: tuple[Any, ...]) -> float:
        """The multiple for a parameter at a path of the tree."""
        names = path_names(path)
        if is_frozen_word_embedding(names, self.words):
            return 0.0
        if names[0] != READER:
            return self.retriever
        return self.heads if names[1].startswith(HEADS) else 1.0


def path_names(path: tuple[Any, ...]) -> list[str]:
    """The keys on the way to a leaf, as text."""
    return [str(getattr(key, "key", key)) for key in path]


def is_frozen_word_embedding(names: list[str], words: bool) -> bool:
    """Whether a parameter is a table of word embeddings that is not trained."""
    return not words and names[-2:] == ["words", "embedding"]


def zero_frozen_gradients(gradients: Any, rates: RateScales) -> Any:
    """Gradients with zeros for what is not trained, so that it neither counts in the global norm nor is computed."""
    if rates.words:
        return gradients
    return jax.tree_util.tree_map_with_path(
        lambda path, g: jnp.zeros_like(g) if is_frozen_word_embedding(path_names(path), rates.words) else g, gradients
    )


def trainable_mask(rates: RateScales, params: Any) -> Any:
    """False on what is not trained at all."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not is_frozen_word_embedding(path_names(path), rates.words), params
    )


def scale_by_part(rates: RateScales) -> Any:
    """Each update times its part's multiple."""
    import optax

    return optax.stateless(
        lambda updates, _: jax.tree_util.tree_map_with_path(lambda path, u: u * rates.of(path), updates)
    )


def delay_retriever(start: int) -> Any:
    """No updates except for the reader before step `start`, then a linear rise to full updates at 2 · start.

    The moments are gathered meanwhile: without bias correction, a first step from empty moments is three times too
    long, which is enough to undo what the inverse cloze task has learnt.
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
    """The whole chain. `warmup` 0 takes BERT's rule; `retriever_start` 0 trains everything from the first step.

    bias_correction: Adam's own. Without it the first hundred steps are up to five times as long as the rate says.
    """
    import optax

    warmup = warmup or warmup_steps(total)
    rates = rates or RateScales()
    adam = optax.scale_by_adam(BETA1, BETA2, EPSILON) if bias_correction else scale_by_bert_adam()
    if not rates.words:
        adam = optax.masked(adam, partial(trainable_mask, rates))  # what has no gradient needs no moments
    parts = [] if rates == RateScales() else [scale_by_part(rates)]
    return optax.chain(
        optax.clip_by_global_norm(CLIP),
        adam,
        optax.add_decayed_weights(WEIGHT_DECAY, mask=weight_decay_mask),
        delay_retriever(retriever_start) if retriever_start else optax.identity(),
        *parts,
        optax.scale_by_learning_rate(lambda step: learning_rate(step, peak, total, warmup)),
    )
