"""Dropout of hidden states: how much, and what it does not depend on. (Of attention: `test_tpu_attention.py`.)"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.models.attention import Dropout


def test_hidden_states_that_drop_out_do_not_depend_on_padding():
    """Rate and scale, other draws for every sequence and key, and none where nothing is asked for."""
    states = jnp.ones((4, 64, 128))

    def drop(states, seed=0, deterministic=False):
        return np.asarray(Dropout(0.25).apply({}, states, deterministic, rngs={"dropout": jax.random.key(seed)}))

    found = drop(states)
    assert set(np.unique(found)) == {0.0, np.float32(1 / 0.75)}
    assert (found == 0).mean() == pytest.approx(0.25, abs=0.01)
    assert not np.array_equal(found[0], found[1]) and not np.array_equal(found, drop(states, seed=1))
    np.testing.assert_array_equal(drop(jnp.pad(states, ((0, 0), (0, 16), (0, 0))))[:, :64], found)
    np.testing.assert_array_equal(drop(states, deterministic=True), states)
    assert drop(states.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert drop(states[:, 0]).shape == (4, 128)
