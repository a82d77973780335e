"""The objectives against closed forms in float64, and against sums done by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.models import losses
from realm_jax.models.losses import NEG_INF

# Compiled as they are in a step; one at a time is slower to test.
masked_word_marginal = jax.jit(losses.masked_word_marginal, static_argnames="kind")
answer_log_probabilities = jax.jit(losses.answer_log_probabilities, static_argnames="objective")
answer_marginal = jax.jit(losses.answer_marginal)
orqa_loss = jax.jit(losses.orqa_loss)
span_log_probabilities = jax.jit(losses.span_log_probabilities)

BATCH, CANDIDATES, PREDICTIONS = 5, 8, 4


@pytest.fixture
def problem() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Scores, log-probabilities of words, weights and validity: K = 8 with the null document at 0, spans of 1 to 4
    pieces, an example without predictions, and excluded candidates in two examples."""
    rng = np.random.default_rng(0)
    scores = rng.normal(scale=2.0, size=(BATCH, CANDIDATES))
    words = np.log(rng.uniform(0.01, 0.9, size=(BATCH, CANDIDATES, PREDICTIONS)))
    weights = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]], np.float64)
    valid = np.ones((BATCH, CANDIDATES), bool)
    valid[1, 7] = valid[4, [3, 7]] = False
    return scores, words, weights, valid


def prior_of(scores: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """p(z|x) in float64."""
    exponentials = np.where(valid, np.exp(scores - scores.max(axis=1, keepdims=True)), 0.0)
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def closed_form(scores, words, weights, valid, kind: str) -> tuple[float, np.ndarray]:
    """The loss and its gradient in the scores, −r(z) with r(z) = p(z|x) · [p(y|z,x) / p(y|x) − 1] (paper, appendix A).

    'example' has one r an example, y being all its pieces; 'token' has the sum of one r a piece.
    """
    prior = prior_of(scores, valid)
    if kind == "example":
        reading = np.exp((words * weights[:, None]).sum(axis=2))
        marginal = (prior * reading).sum(axis=1)
        r = prior * (reading / marginal[:, None] - 1.0)
        counted = weights.max(axis=1)
        return -(np.log(marginal) * counted).sum() / counted.sum(), -r * counted[:, None] / counted.sum()
    reading = np.exp(words)
    marginal = (prior[:, :, None] * reading).sum(axis=1)
    r = prior[:, :, None] * (reading / marginal[:, None] - 1.0)
    loss = -(np.log(marginal) * weights).sum() / weights.sum()
    return loss, -(r * weights[:, None]).sum(axis=2) / weights.sum()


@pytest.mark.parametrize("dtype, of_loss, tolerance", [("float64", 1e-12, 1e-9), ("float32", 1e-4, 1e-4)])
@pytest.mark.parametrize("kind", ["example", "token"])
def test_gradient_of_the_loss_is_minus_r(problem, kind, dtype, of_loss, tolerance):
    """What trains the retriever: a passage's score rises iff it predicts the words better than the mixture does."""
    scores, words, weights, valid = problem
    loss, gradient = closed_form(scores, words, weights, valid, kind)
    with jax.enable_x64(dtype == "float64"):
        arrays = [jnp.asarray(x) for x in (words, weights, valid)]
        program = jax.value_and_grad(lambda scores: masked_word_marginal(scores, *arrays, kind).loss.mean)
        found, slope = program(jnp.asarray(scores))
        assert slope.dtype == dtype
    np.testing.assert_allclose(float(found), loss, rtol=of_loss)
    np.testing.assert_allclose(np.asarray(slope), gradient, rtol=tolerance, atol=of_loss / 100)
    assert np.abs(gradient).max() > 0.01
    assert not np.asarray(slope)[~valid].any() and not np.asarray(slope)[3].any()


def test_a_marginal_by_hand():
    """Two candidates with scores 0 and log 3: p(z|x) = 1/4, 3/4. Two pieces, 1/2 and 1/5 beside the null document,
    2/3 and 3/4 beside the passage: p(y|x) = 1/4 · 1/10 + 3/4 · 1/2 = 0.4; by piece it is
    (1/4 · 1/2 + 3/4 · 2/3) · (1/4 · 1/5 + 3/4 · 3/4) = 0.625 · 0.6125."""
    scores = jnp.log(jnp.array([[1.0, 3.0]]))
    words = jnp.log(jnp.array([[[1 / 2, 1 / 5], [2 / 3, 3 / 4]]]))
    weights, valid = jnp.ones((1, 2)), jnp.ones((1, 2), bool)
    example = masked_word_marginal(scores, words, weights, valid, "example")
    np.testing.assert_allclose(example.loss.mean, -np.log(0.4), rtol=1e-6)
    np.testing.assert_allclose(example.null_log_likelihood, np.log([0.1]), rtol=1e-6)
    np.testing.assert_allclose(example.best_log_likelihood, np.log([0.5]), rtol=1e-6)
    np.testing.assert_allclose(np.exp(example.log_prior), [[0.25, 0.75]], rtol=1e-6)
    token = masked_word_marginal(scores, words, weights, valid, "token")
    np.testing.assert_allclose(token.loss.mean, -np.log(0.625 * 0.6125) / 2, rtol=1e-6)  # mean over the two pieces


def test_an_excluded_candidate_is_as_if_it_were_not_there(problem):
    scores, words, weights, valid = problem
    inputs = [jnp.asarray(x[4:5]) for x in (scores, words, weights, valid)]
    kept = [inputs[0][:, valid[4]], inputs[1][:, valid[4]], inputs[2], inputs[3][:, valid[4]]]
    whole, without = masked_word_marginal(*inputs, "example"), masked_word_marginal(*kept, "example")
    np.testing.assert_allclose(whole.loss.mean, without.loss.mean, rtol=1e-6)
    np.testing.assert_allclose(whole.best_log_likelihood, without.best_log_likelihood, rtol=1e-6)


@pytest.mark.parametrize("kind", ["example", "token"])
def test_a_batch_without_predictions_is_zero_and_finite(kind):
    def loss(scores):
        words = jnp.full((2, 3, 2), -1.0)
        return masked_word_marginal(scores, words, jnp.zeros((2, 2)), jnp.ones((2, 3), bool), kind).loss.mean

    value, slope = jax.value_and_grad(loss)(jnp.arange(6.0).reshape(2, 3))
    assert value == 0.0 and not slope.any()


def test_extreme_scores_stay_finite():
    """128-dimensional vectors after LayerNorm have inner products of about ±128; far more must not overflow."""
    scores = jnp.array([[0.0, 3e4, -3e4]])
    words = jnp.full((1, 3, 2), -200.0)
    inputs = (words, jnp.ones((1, 2)), jnp.ones((1, 3), bool))
    for kind in ("example", "token"):
        value, slope = jax.value_and_grad(lambda s, kind=kind: masked_word_marginal(s, *inputs, kind).loss.mean)(scores)
        assert np.isfinite(value) and np.isfinite(slope).all()


def test_bfloat16_scores_still_give_a_float32_loss(problem):
    scores, words, weights, valid = map(jnp.asarray, problem)
    result = masked_word_marginal(scores.astype(jnp.bfloat16), words, weights, valid, "example")
    assert {x.dtype for x in jax.tree.leaves(result)} == {jnp.dtype("float32")}


def test_another_kind_of_marginal_is_refused(problem):
    with pytest.raises(ValueError, match="'example', 'span', 'holds' or 'token', not 'other'"):
        masked_word_marginal(*map(jnp.asarray, problem), "other")


# Two passages of two places and spans of one or two pieces: entry [passage, start, width − 1]. A span of two pieces
# from the second place would leave the passage, so three spans a passage are allowed.
ALLOWED = np.array([[[1, 1], [1, 0]], [[1, 1], [1, 0]]], bool)
SPANS = np.log(np.array([[[1.0, 2.0], [1.0, 99.0]], [[3.0, 3.0], [2.0, 99.0]]]))  # exp: sums 4 and 8 over the allowed
CORRECT = np.array([[[0, 1], [0, 0]], [[0, 0], [1, 0]]], bool)  # 2 of 4 and 2 of 8
PASSAGES = np.log(np.array([3.0, 1.0]))  # p(z|x) = 3/4, 1/4


def answer_batch(*answered: bool):
    """One copy of the example above for each argument, without any correct span where it is False."""
    tile = lambda x: jnp.asarray(np.stack([x] * len(answered)), x.dtype if x.dtype == bool else jnp.float32)  # noqa: E731
    return tile(PASSAGES), tile(SPANS), tile(ALLOWED), tile(CORRECT) & jnp.array(answered)[:, None, None, None]


def test_the_answer_marginal_by_hand():
    """p(y|x) = 3/4 · 2/4 + 1/4 · 2/8 = 7/16."""
    loss, log_likelihood = answer_marginal(*answer_batch(True))
    np.testing.assert_allclose(loss.mean, -np.log(7 / 16), rtol=1e-6)
    np.testing.assert_allclose(log_likelihood, [np.log(7 / 16)], rtol=1e-6)


def test_the_answer_marginal_is_the_mean_over_answered_examples():
    loss, log_likelihood = answer_marginal(*answer_batch(True, False, True))
    np.testing.assert_allclose(loss.mean, -np.log(7 / 16), rtol=1e-6)
    assert log_likelihood[1] == NEG_INF


def test_the_answer_marginal_moves_passages_by_r():
    """p(answer|z,x) = 1/2 and 1/4, p(y|x) = 7/16: r = 3/4 · (8/7 − 1) = 3/28 and 1/4 · (4/7 − 1) = −3/28."""
    scores, *rest = answer_batch(True)
    slope = jax.grad(lambda s: answer_marginal(s, *rest)[0].mean)(scores)
    np.testing.assert_allclose(slope, [[-3 / 28, 3 / 28]], rtol=1e-5)


def test_orqa_by_hand():
    """A beam of four with weights 1, 2, 3, 2 of which the last two hold an answer: L_ret = −log(5/8).

    The reader's softmax is over all spans of both passages at once: weights 3 · (1, 2, 1) and 1 · (3, 3, 2), sum 20,
    of which 3 · 2 and 2 are right: L_read = −log(8/20).
    """
    beam = jnp.log(jnp.array([[1.0, 2.0, 3.0, 2.0]]))
    beam_correct = jnp.array([[False, False, True, True]])
    scores, *rest = answer_batch(True)
    np.testing.assert_allclose(
        orqa_loss(beam, beam_correct, scores, *rest).mean, -np.log(5 / 8) - np.log(8 / 20), rtol=1e-6
    )


def test_orqa_drops_a_term_without_a_correct_entry_but_divides_by_all_examples():
    beam = jnp.log(jnp.array([[1.0, 2.0, 3.0, 2.0]] * 2))
    beam_correct = jnp.array([[False, False, True, True], [False] * 4])
    loss = orqa_loss(beam, beam_correct, *answer_batch(False, False))
    np.testing.assert_allclose(loss.mean, -np.log(5 / 8) / 2, rtol=1e-6)


def test_what_is_held_of_passages_and_spans_by_hand():
    """'marginal': 3/4 and 1/4, spans by themselves. 'orqa': weights 3 · (1, 2, 1) and 1 · (3, 3, 2) of 20 in all."""
    scores, spans, allowed, _ = answer_batch(True)
    for objective, passages in {"marginal": [3 / 4, 1 / 4], "orqa": [12 / 20, 8 / 20]}.items():
        prior, within = answer_log_probabilities(scores, spans, allowed, objective)
        np.testing.assert_allclose(np.exp(prior[0]), passages, rtol=1e-5)
        np.testing.assert_allclose(np.exp(within[0, :, 0]), [[1 / 4, 2 / 4], [3 / 8, 3 / 8]], rtol=1e-5)
    with pytest.raises(ValueError, match="'marginal', 'orqa' or 'positive', not 'max'"):
        answer_log_probabilities(scores, spans, allowed, "max")


def test_no_answer_in_any_passage_gives_no_loss_and_no_gradient():
    scores, spans, allowed, correct = answer_batch(False)
    beam = jnp.array([[5.0, 1.0, 0.0]])

    def marginal(scores, spans):
        return answer_marginal(scores, spans, allowed, correct)[0].mean

    def orqa(scores, spans, beam):
        return orqa_loss(beam, jnp.zeros((1, 3), bool), scores, spans, allowed, correct).mean

    for loss, arrays in ((marginal, (scores, spans)), (orqa, (scores, spans, beam))):
        value, slopes = jax.value_and_grad(loss, argnums=tuple(range(len(arrays))))(*arrays)
        assert value == 0.0
        assert all(not slope.any() for slope in slopes)  # an array of NaN would count as any


def test_an_unanswered_example_beside_an_answered_one_gets_no_gradient():
    scores, spans, allowed, correct = answer_batch(True, False)
    slopes = jax.grad(lambda s, p: answer_marginal(s, p, allowed, correct)[0].mean, argnums=(0, 1))(scores, spans)
    assert all(np.isfinite(slope).all() and slope[0].any() and not slope[1].any() for slope in slopes)


def test_a_span_that_is_not_allowed_is_never_likely():
    """Not even in a passage without a body, where no span is allowed."""
    allowed = jnp.zeros((1, 2, 2, 2), bool).at[0, 0].set(jnp.asarray(ALLOWED[0]))
    log_p = span_log_probabilities(jnp.asarray(SPANS, jnp.float32)[None], allowed)
    np.testing.assert_allclose(np.exp(log_p[0, 0]), [[1 / 4, 2 / 4], [1 / 4, 0]], rtol=1e-6)
    assert log_p[0, 1].max() < -1e6


# --- Pointing ---------------------------------------------------------------------------------------------------------

pointing = jax.jit(losses.pointing)


def pointing_problem() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Span scores of two passages of six pieces, the body from the third on; the second passage lacks the span."""
    scores = np.random.default_rng(3).normal(size=(1, 2, 6, 2)).astype(np.float32)
    allowed = np.zeros(scores.shape, bool)
    allowed[:, :, 2:, 0] = allowed[:, :, 2:5, 1] = True
    correct = np.zeros(scores.shape, bool)
    correct[0, 0, 2, 1] = correct[0, 0, 4, 0] = True
    return scores, allowed, correct


def test_pointing_shares_its_probability_among_spans_and_none():
    scores, allowed, correct = pointing_problem()
    log_p, _ = pointing(scores, allowed, correct)
    unseen = np.exp(losses.LOG_P_UNSEEN_SPAN)
    for passage in range(2):
        weights, none = np.exp(scores[0, passage]), np.exp(scores[0, passage, 0, 0])
        total = weights[allowed[0, passage]].sum() + none
        wanted = (weights[correct[0, passage]].sum() + none * unseen) / total
        np.testing.assert_allclose(np.exp(log_p[0, passage]), wanted, rtol=1e-5)
    assert log_p[0, 1] < losses.LOG_P_UNSEEN_SPAN < log_p[0, 0]


def test_pointing_is_right_where_no_other_span_and_not_none_is_likelier():
    scores, allowed, correct = pointing_problem()
    scores[0, 0, 4, 0] = scores[0, 1, 4, 0] = 9.0
    assert pointing(scores, allowed, correct)[1].tolist() == [[True, False]]
    scores[0, 0, 0, 0] = 10.0  # none
    assert pointing(scores, allowed, correct)[1].tolist() == [[False, False]]
    scores[0, 0, 0, 0], scores[0, 0, 3, 0] = 0.0, 10.0  # another span
    assert pointing(scores, allowed, correct)[1].tolist() == [[False, False]]


def test_pointing_without_the_span_teaches_to_point_at_none():
    scores, allowed, correct = pointing_problem()
    gradient = jax.grad(lambda s: pointing(s, allowed, correct)[0][0, 1])(scores)
    assert gradient[0, 1, 0, 0] > 0 and (gradient[0, 1][allowed[0, 1]] < 0).all()
