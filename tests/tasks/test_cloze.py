"""The null document as a candidate of the inverse cloze task, by hand."""

import jax.numpy as jnp
import numpy as np

from realm_jax.tasks.ict import _ict_loss_with_null


def test_the_null_document_is_wrong_beside_the_own_passage_and_right_without_it():
    """Two sentences. All scores 0 but sentence 1's own, log 2.

    Found: sentence 1 picks its own with 2/(2+1+1), sentence 2 with 1/3. Own taken away: null has 1/2 in both.
    Loss: mean of (−log 1/2 − log 1/3) / 2, plus the weight times −log 1/2.
    """
    scores = jnp.array([[jnp.log(2.0), 0.0], [0.0, 0.0]])
    null = jnp.zeros((2, 1))
    found = -(np.log(1 / 2) + np.log(1 / 3)) / 2
    for weight in (0.0, 0.3, 1.0):
        losses = _ict_loss_with_null(scores, null, weight)
        np.testing.assert_allclose(losses.mean(), found - weight * np.log(1 / 2), rtol=1e-6)
