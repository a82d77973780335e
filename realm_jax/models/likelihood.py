"""The marginal likelihood of REALM and of its fine-tuning: arrays in, arrays out, exact in log space.

p(y|x) = Σ_z p(z|x) p(y|z,x) over K candidates, the null document at position 0 (paper, equation 1 and section 3.3).
Not here: how candidates are found (`retrieval/`), how log-probabilities are computed (`realm.py`).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
UNSEEN = -7.5  # log p(y|null, x) of a span that no passage shows: as likely as one of some two thousand names
NEGATIVE = -1e9  # stands in place of what may not be chosen; finite, so that gradients stay finite


class Mean(NamedTuple):
    """A mean that can be taken over the parts of a batch: sum and number of what it is over, float32 scalars."""

    total: Array
    number: Array

    @property
    def value(self) -> Array:
        """The mean; 0 of nothing."""
        return self.total / jnp.maximum(self.number, 1.0)


def target_log_probabilities(scores: Array, targets: Array) -> tuple[Array, Array]:
    """Log-probabilities of targets, and whether nothing is likelier: scores [..., n], targets [...] int → [...].

    One maximum serves both; looking for the place of the maximum would take a CPU as long as the products before it.
    """
    target = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    return target - jax.nn.logsumexp(scores, axis=-1), target >= scores.max(axis=-1)


class Marginal(NamedTuple):
    """What one batch of marginal likelihoods says. All float32.

    loss: to be minimised. log_likelihood [batch]: log p(y|x) over all of an example's masked positions.
    null_log_likelihood [batch]: log p(y|null, x). best_log_likelihood [batch]: max over the valid real candidates of
    log p(y|z,x), that of the null document where there are none. log_prior [batch, candidates]: log p(z|x).
    """

    loss: Mean
    log_likelihood: Array
    null_log_likelihood: Array
    best_log_likelihood: Array
    log_prior: Array


def at_least_float32(x: Array) -> Array:
    """`x` in float32; in float64 if it is, so that the mathematics can be checked to the last digit."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def log_prior(scores: Array, valid: Array) -> Array:
    """log p(z|x): softmax of inner products over the valid candidates only. scores, valid [batch, candidates]."""
    return jax.nn.log_softmax(jnp.where(valid, at_least_float32(scores), NEGATIVE), axis=-1)


def masked_word_marginal(scores: Array, word_log_p: Array, weights: Array, valid: Array, kind: str) -> Marginal:
    """Marginal likelihood of masked words.

    scores [batch, candidates]: inner products; word_log_p [batch, candidates, m]: log p(y_j|z,x) of each target;
    weights [batch, m]: 1 on real predictions, 0 on padding; valid [batch, candidates] bool: false on excluded
    candidates; candidate 0 is the null document.
    kind 'example': p(y|x) = Σ_z p(z|x) Π_j p(y_j|z,x), loss is the mean over examples (the paper);
    'span': the same, of whole spans (`pointing`);
    'token': Π_j Σ_z p(z|x) p(y_j|z,x), loss is the mean over predicted pieces (the released code).
    An example without predictions counts for nothing. Raises ValueError for any other kind.
    """
    prior = log_prior(scores, valid)
    weights = at_least_float32(weights)
    word_log_p = word_log_p * weights[:, None, :]
    reading = word_log_p.sum(axis=-1)
    if kind in ("example", "span"):
        log_likelihood = jax.nn.logsumexp(prior + reading, axis=-1)
        counted = weights.max(axis=-1)
        loss = Mean(-jnp.sum(log_likelihood * counted), counted.sum())
    elif kind == "token":
        per_word = jax.nn.logsumexp(prior[:, :, None] + word_log_p, axis=1) * weights
        log_likelihood = per_word.sum(axis=-1)
        loss = Mean(-per_word.sum(), weights.sum())
    else:
        raise ValueError(f"marginal must be 'example', 'span' or 'token', not {kind!r}")
    best = jnp.max(jnp.where(valid, reading, NEGATIVE)[:, 1:], axis=-1)
    best = jnp.where(valid[:, 1:].any(axis=-1), best, reading[:, 0])
    return Marginal(loss, log_likelihood, reading[:, 0], best, prior)


def log_sum_selected(log_p: Array, selected: Array, axis: int | tuple[int, ...]) -> Array:
    """log Σ of exp(log_p) where `selected`; NEGATIVE where nothing is selected, with zero gradient there."""
    masked = jnp.where(selected, log_p, NEGATIVE)
    return jnp.where(selected.any(axis=axis), jax.nn.logsumexp(masked, axis=axis), NEGATIVE)


def pointing(span_scores: Array, allowed: Array, correct: Array) -> tuple[Array, Array]:
    """log p(y|z,x) by pointing at y in z, and whether no other span, nor none at all, is likelier.

    The reader points at a span or, as at [CLS] in SQuAD 2.0, at none; y is then guessed as without a passage:
    p(y|z,x) = Σ_{spans that are y} p(span|z,x) + p(none|z,x) p(y|null). Span scores, allowed and correct [batch, k,
    length, width] → [batch, k] float32 and bool.
    """
    none = at_least_float32(span_scores[..., 0, 0])
    scores = jnp.where(allowed, at_least_float32(span_scores), NEGATIVE)
    axes = (-2, -1)
    total = jnp.logaddexp(jax.nn.logsumexp(scores, axis=axes), none)
    found = log_sum_selected(scores, correct, axis=axes)
    best = jnp.where(correct, scores, NEGATIVE).max(axis=axes)
    right = correct.any(axis=axes) & (best >= jnp.maximum(scores.max(axis=axes), none))
    return jnp.logaddexp(found, none + UNSEEN) - total, right


def span_log_probabilities(span_scores: Array, allowed: Array) -> Array:
    """log p(span|z,x), normalised within each passage; NEGATIVE where a span is not allowed.

    span_scores, allowed [batch, passages, length, width]. A passage without an allowed span has none that is likely.
    """
    total = jax.nn.logsumexp(jnp.where(allowed, span_scores, NEGATIVE), axis=(-2, -1), keepdims=True)
    return jnp.where(allowed, span_scores - total, NEGATIVE)


def answer_log_probabilities(scores: Array, span_scores: Array, allowed: Array, objective: str) -> tuple[Array, Array]:
    """What a model that was fine-tuned with `objective` holds of passages and spans: (log p(z|x), log p(span|z,x)).

    scores [batch, passages]; span_scores, allowed [batch, passages, length, width] → [batch, passages] and
    [batch, passages, length, width] float32, NEGATIVE or less where a span is not allowed. 'marginal': one softmax over
    the passages, and one over the spans of each. 'orqa' and 'positive': a single softmax over all spans of all
    passages, each with its passage's score; p(z|x) is then what falls to a passage. Raises ValueError for any other
    objective.
    """
    spans = span_log_probabilities(span_scores, allowed)
    if objective == "marginal":
        return jax.nn.log_softmax(at_least_float32(scores), axis=-1), spans
    if objective in ("orqa", "positive"):
        totals = jax.nn.logsumexp(jnp.where(allowed, span_scores, NEGATIVE), axis=(-2, -1))
        return jax.nn.log_softmax(at_least_float32(scores) + totals, axis=-1), spans
    raise ValueError(f"objective must be 'marginal', 'orqa' or 'positive', not {objective!r}")


def answer_marginal(scores: Array, span_scores: Array, allowed: Array, correct: Array) -> tuple[Mean, Array]:
    """Loss of −log Σ_z p(z|x) Σ_{correct spans} p(span|z,x), mean over the examples that have a correct span.

    scores [batch, passages]; span_scores, allowed, correct [batch, passages, length, width].
    Returns (loss, log_likelihood [batch], NEGATIVE where no passage holds an answer).
    """
    prior = jax.nn.log_softmax(at_least_float32(scores), axis=-1)
    reading = span_log_probabilities(span_scores, allowed)
    joint = prior[:, :, None, None] + reading
    likelihood = log_sum_selected(joint, correct, axis=(1, 2, 3))
    answered = correct.any(axis=(1, 2, 3)).astype(jnp.float32)
    return Mean(jnp.sum(jnp.where(answered > 0, -likelihood, 0.0)), answered.sum()), likelihood


def retriever_terms(beam_scores: Array, beam_correct: Array) -> Array:
    """−log p(some passage that holds an answer) over a beam, [batch]; 0 where none does (ORQA's L_ret).

    beam_scores, beam_correct [batch, c].
    """
    beam = jax.nn.log_softmax(at_least_float32(beam_scores), axis=-1)
    return jnp.where(beam_correct.any(axis=1), -log_sum_selected(beam, beam_correct, axis=1), 0.0)


def reader_terms(scores: Array, span_scores: Array, allowed: Array, correct: Array) -> Array:
    """−log p(some correct span) in one softmax over all spans of all passages, [batch]; 0 where none is correct (ORQA's
    L_read).

    scores [batch, k]; span_scores, allowed, correct [batch, k, length, width]. With one passage its score cancels out.
    """
    final = jnp.where(allowed, span_scores + scores[:, :, None, None], NEGATIVE)
    final = final - jax.nn.logsumexp(final, axis=(1, 2, 3), keepdims=True)
    return jnp.where(correct.any(axis=(1, 2, 3)), -log_sum_selected(final, correct, axis=(1, 2, 3)), 0.0)


def orqa_loss(
    beam_scores: Array, beam_correct: Array, scores: Array, span_scores: Array, allowed: Array, correct: Array
) -> Mean:
    """ORQA's L_ret + L_read (Lee et al. 2019, section 6), as in the released fine-tuning code.

    beam_scores, beam_correct [batch, c]: the retriever's beam and which passages hold an answer;
    scores [batch, k], span_scores, allowed, correct [batch, k, length, width]: the reader's share of it. The mean is
    over all examples, those without a correct entry as well.
    """
    terms = retriever_terms(beam_scores, beam_correct) + reader_terms(scores, span_scores, allowed, correct)
    return Mean(terms.sum(), jnp.float32(len(terms)))
