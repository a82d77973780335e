"""The marginal likelihood of REALM and of its fine-tuning: arrays in, arrays out, exact in log space.

p(y|x) = Σ_z p(z|x) p(y|z,x) over K candidates, the null document at index 0 (paper, equation 1 and section 3.3).
`retrieval/` finds candidates, `reader.py` computes their log-probabilities.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
LOG_P_UNSEEN_SPAN = -7.5  # log p(y|null, x) of a span that no passage shows: as likely as one of some 2,000 names
NEG_INF = -1e9  # log-probability or score of excluded entries; finite, so that gradients stay finite


class WeightedSum(NamedTuple):
    """A mean over the parts of a batch, as float32 scalars that are summed before the division.

    Attributes:
        total: weighted sum of the values.
        weight: sum of the weights.
    """

    total: Array
    weight: Array

    @property
    def mean(self) -> Array:
        """Return the mean; 0 if the weight is 0."""
        return self.total / jnp.maximum(self.weight, 1.0)


def at_least_float32(x: Array) -> Array:
    """Return `x` in float32; in float64 if it is, so that the mathematics can be checked to the last digit."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def log_sum_selected(log_p: Array, selected: Array, axis: int | tuple[int, ...]) -> Array:
    """Return log Σ exp(log_p) over selected entries.

    Args:
        log_p: log-probabilities of any shape.
        selected: bool, like `log_p`.
        axis: over which to sum.

    Returns:
        The shape of `log_p` without the summed axes; NEG_INF with zero gradient if no entry is selected.
    """
    masked = jnp.where(selected, log_p, NEG_INF)
    return jnp.where(selected.any(axis=axis), jax.nn.logsumexp(masked, axis=axis), NEG_INF)


# --- Masked words -----------------------------------------------------------------------------------------------------


def target_log_probabilities(scores: Array, targets: Array) -> tuple[Array, Array]:
    """Return log-probabilities of targets, and True if the target is the most probable entry.

    One maximum serves both; an argmax would take a CPU as long as the products before it.

    Args:
        scores: unnormalized, [..., n].
        targets: [...] int.

    Returns:
        [...] float32 and bool.
    """
    target = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]  # [...]
    return target - jax.nn.logsumexp(scores, axis=-1), target >= scores.max(axis=-1)


class Marginal(NamedTuple):
    """A batch of marginal likelihoods, all float32.

    Attributes:
        loss: to be minimized.
        log_likelihood: log p(y|x) over all of an example's masked positions, [batch].
        null_log_likelihood: log p(y|null, x), [batch].
        best_log_likelihood: max over the valid real candidates of log p(y|z,x), [batch]; that of the null document if
            there are none.
        log_prior: log p(z|x), [batch, candidates].
    """

    loss: WeightedSum
    log_likelihood: Array
    null_log_likelihood: Array
    best_log_likelihood: Array
    log_prior: Array


def log_prior(scores: Array, valid: Array) -> Array:
    """Return log p(z|x), the softmax of inner products over the valid candidates.

    Args:
        scores: inner products, [batch, candidates].
        valid: bool [batch, candidates].

    Returns:
        [batch, candidates] float32.
    """
    return jax.nn.log_softmax(jnp.where(valid, at_least_float32(scores), NEG_INF), axis=-1)


def masked_word_marginal(scores: Array, word_log_p: Array, weights: Array, valid: Array, kind: str) -> Marginal:
    """Compute the marginal likelihood of masked words.

    An example without predictions counts for nothing.

    Args:
        scores: inner products, [batch, candidates]; candidate 0 is the null document.
        word_log_p: log p(y_j|z,x) of each target, [batch, candidates, m].
        weights: 1 on real predictions, 0 on padding, [batch, m].
        valid: false on excluded candidates, bool [batch, candidates].
        kind: 'example': p(y|x) = Σ_z p(z|x) Π_j p(y_j|z,x), loss is the mean over examples (the paper);
            'span', 'holds': the same, of whole spans;
            'token': Π_j Σ_z p(z|x) p(y_j|z,x), loss is the mean over predicted tokens (the released code).

    Raises:
        ValueError: for any other kind.
    """
    prior = log_prior(scores, valid)  # [batch, candidates]
    weights = at_least_float32(weights)
    word_log_p = word_log_p * weights[:, None, :]
    reading = word_log_p.sum(axis=-1)  # log p(y|z,x), [batch, candidates]
    if kind in ("example", "span", "holds"):
        log_likelihood = jax.nn.logsumexp(prior + reading, axis=-1)  # [batch]
        has_target = weights.max(axis=-1)  # [batch]
        loss = WeightedSum(-jnp.sum(log_likelihood * has_target), has_target.sum())
    elif kind == "token":
        per_word = jax.nn.logsumexp(prior[:, :, None] + word_log_p, axis=1) * weights  # [batch, m]
        log_likelihood = per_word.sum(axis=-1)  # [batch]
        loss = WeightedSum(-per_word.sum(), weights.sum())
    else:
        raise ValueError(f"marginal must be 'example', 'span', 'holds' or 'token', not {kind!r}")
    best = jnp.max(jnp.where(valid, reading, NEG_INF)[:, 1:], axis=-1)  # [batch]
    best = jnp.where(valid[:, 1:].any(axis=-1), best, reading[:, 0])
    return Marginal(loss, log_likelihood, reading[:, 0], best, prior)


def pointing(span_scores: Array, allowed: Array, correct: Array) -> tuple[Array, Array]:
    """Compute log p(y|z,x) by pointing at y in z, and True if y is more probable than other spans and than none.

    The reader points at a span or, as at [CLS] in SQuAD 2.0, at none; y is then guessed as without a passage:
    p(y|z,x) = Σ_{spans that are y} p(span|z,x) + p(none|z,x) p(y|null).

    Args:
        span_scores: [batch, k, length, width].
        allowed: spans that may be pointed at, like `span_scores`.
        correct: spans that are y, like `span_scores`.

    Returns:
        [batch, k] float32 and bool.
    """
    axes = (-2, -1)
    none = at_least_float32(span_scores[..., 0, 0])  # [batch, k]
    scores = jnp.where(allowed, at_least_float32(span_scores), NEG_INF)
    total = jnp.logaddexp(jax.nn.logsumexp(scores, axis=axes), none)  # [batch, k]
    pointed = log_sum_selected(scores, correct, axis=axes)  # [batch, k]
    best = jnp.where(correct, scores, NEG_INF).max(axis=axes)  # [batch, k]
    is_top1 = correct.any(axis=axes) & (best >= jnp.maximum(scores.max(axis=axes), none))
    return jnp.logaddexp(pointed, none + LOG_P_UNSEEN_SPAN) - total, is_top1


# --- Answers to questions ---------------------------------------------------------------------------------------------
#
# scores [batch, passages]; span_scores, allowed and correct [batch, passages, length, width].


def span_log_probabilities(span_scores: Array, allowed: Array) -> Array:
    """Return log p(span|z,x), normalized within each passage; NEG_INF for spans that are not allowed.

    Args:
        span_scores: [batch, passages, length, width].
        allowed: spans that may be answers, like `span_scores`.
    """
    total = jax.nn.logsumexp(jnp.where(allowed, span_scores, NEG_INF), axis=(-2, -1), keepdims=True)
    return jnp.where(allowed, span_scores - total, NEG_INF)


def answer_log_probabilities(scores: Array, span_scores: Array, allowed: Array, objective: str) -> tuple[Array, Array]:
    """Return (log p(z|x), log p(span|z,x)) of a model that was fine-tuned with `objective`.

    Args:
        scores: scores of the passages.
        span_scores: scores of the spans.
        allowed: spans that may be answers.
        objective: 'marginal': one softmax over the passages, and one over the spans of each. 'orqa' and 'positive': a
            single softmax over all spans of all passages, each with its passage's score; p(z|x) is then the sum over
            the spans of a passage.

    Returns:
        Arrays like `scores` and `span_scores`, float32; NEG_INF or less for spans that are not allowed.

    Raises:
        ValueError: for any other objective.
    """
    spans = span_log_probabilities(span_scores, allowed)
    if objective == "marginal":
        return jax.nn.log_softmax(at_least_float32(scores), axis=-1), spans
    if objective in ("orqa", "positive"):
        totals = jax.nn.logsumexp(jnp.where(allowed, span_scores, NEG_INF), axis=(-2, -1))  # [batch, passages]
        return jax.nn.log_softmax(at_least_float32(scores) + totals, axis=-1), spans
    raise ValueError(f"objective must be 'marginal', 'orqa' or 'positive', not {objective!r}")


def answer_marginal(scores: Array, span_scores: Array, allowed: Array, correct: Array) -> tuple[WeightedSum, Array]:
    """Compute −log Σ_z p(z|x) Σ_{correct spans} p(span|z,x), mean over the examples that have a correct span.

    Args:
        scores: scores of the passages, [batch, passages].
        span_scores: [batch, passages, length, width].
        allowed: spans that may be answers, like `span_scores`.
        correct: spans that are answers, like `span_scores`.

    Returns:
        The loss, and the log-likelihood [batch], NEG_INF if no passage holds an answer.
    """
    prior = jax.nn.log_softmax(at_least_float32(scores), axis=-1)  # [batch, passages]
    log_p = prior[:, :, None, None] + span_log_probabilities(span_scores, allowed)  # log p(z, span|x)
    likelihood = log_sum_selected(log_p, correct, axis=(1, 2, 3))  # [batch]
    answered = correct.any(axis=(1, 2, 3)).astype(jnp.float32)  # [batch]
    return WeightedSum(jnp.sum(jnp.where(answered > 0, -likelihood, 0.0)), answered.sum()), likelihood


def orqa_retriever_loss(beam_scores: Array, beam_correct: Array) -> Array:
    """Return −log p(some passage that holds an answer) over a beam; 0 if none does (ORQA's L_ret).

    Args:
        beam_scores: [batch, c].
        beam_correct: True for passages that hold an answer, bool [batch, c].

    Returns:
        [batch].
    """
    beam = jax.nn.log_softmax(at_least_float32(beam_scores), axis=-1)
    return jnp.where(beam_correct.any(axis=1), -log_sum_selected(beam, beam_correct, axis=1), 0.0)


def orqa_reader_loss(scores: Array, span_scores: Array, allowed: Array, correct: Array) -> Array:
    """Return −log p(some correct span) in one softmax over all spans of all passages; 0 if none is correct (L_read).

    With one passage its score cancels out.

    Args:
        scores: scores of the passages, [batch, passages].
        span_scores: [batch, passages, length, width].
        allowed: spans that may be answers, like `span_scores`.
        correct: spans that are answers, like `span_scores`.

    Returns:
        [batch].
    """
    log_p = jnp.where(allowed, span_scores + scores[:, :, None, None], NEG_INF)
    log_p = log_p - jax.nn.logsumexp(log_p, axis=(1, 2, 3), keepdims=True)
    return jnp.where(correct.any(axis=(1, 2, 3)), -log_sum_selected(log_p, correct, axis=(1, 2, 3)), 0.0)


def orqa_loss(
    beam_scores: Array, beam_correct: Array, scores: Array, span_scores: Array, allowed: Array, correct: Array
) -> WeightedSum:
    """Compute ORQA's L_ret + L_read (Lee et al. 2019, section 6), as in the released fine-tuning code.

    The mean is over all examples, those without a correct entry as well.

    Args:
        beam_scores: scores of the retriever's beam, [batch, c].
        beam_correct: True for passages of the beam that hold an answer, bool [batch, c].
        scores: scores of the passages that the reader reads.
        span_scores: scores of their spans.
        allowed: spans that may be answers.
        correct: spans that are answers.
    """
    losses = orqa_retriever_loss(beam_scores, beam_correct) + orqa_reader_loss(scores, span_scores, allowed, correct)
    return WeightedSum(losses.sum(), jnp.float32(len(losses)))
