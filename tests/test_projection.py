"""A projection that starts as principal components, and a temperature that is learned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import query_rows, tiny_realm
from tiny_run import tiny_config

from realm_jax.assemble import make_run
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.models.encoder import LOG_TEMPERATURE
from realm_jax.train.optimizer import weight_decay_mask
from realm_jax.train.projection import FILE, principal_components
from realm_jax.train.recipe import starting_params


def test_principal_components_keep_the_directions_of_largest_variance():
    rng = np.random.default_rng(0)
    vectors = (rng.normal(size=(500, 6)) * [9, 1, 4, 0.1, 0.1, 0.1] + 3).astype(np.float32)
    kernel, bias, share = principal_components(vectors, 2)
    found = vectors @ kernel + bias
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(found.std(axis=0), vectors.std(axis=0)[[0, 2]], rtol=0.01)
    assert (np.abs(kernel).argmax(axis=0) == [0, 2]).all() and (kernel[[0, 2], [0, 1]] > 0).all()
    assert 0.98 < share < 1


def pca_run(people, folder, **encoder):
    config = tiny_config(people)
    config.encoder.update({"projection": 4, "projection_start": "pca", "pooling": "mean"} | encoder)
    folder.mkdir(exist_ok=True)
    return make_run(config, folder, open_sources(config.data.path), jax.devices()[:1])


def test_both_towers_start_from_components_that_the_run_folder_keeps(people, tmp_path):
    run = pca_run(people, tmp_path / "run")
    params = starting_params(run)
    fresh = run.initial_params()
    query, document = (params[name]["projection"] for name in run.model.embedder_names)
    jax.tree.map(np.testing.assert_array_equal, query, document)
    np.testing.assert_allclose(query["kernel"].T @ query["kernel"], np.eye(4), atol=1e-5)
    assert not np.array_equal(query["kernel"], fresh["query_embedder"]["projection"]["kernel"])
    jax.tree.map(np.testing.assert_array_equal, params["query_embedder"]["bert"], fresh["query_embedder"]["bert"])

    kept = (run.workdir / FILE).read_bytes()
    (run.workdir / FILE).unlink()
    jax.tree.map(np.testing.assert_array_equal, starting_params(run), params)
    assert (run.workdir / FILE).read_bytes() == kept


def test_components_of_another_size_are_refused(people, tmp_path):
    starting_params(pca_run(people, tmp_path / "run"))
    with pytest.raises(UserError, match="projection.safetensors: is of another size"):
        starting_params(pca_run(people, tmp_path / "run", projection=5))
    with pytest.raises(UserError, match="config.encoder.projection: is 17, and .* features have fewer"):
        starting_params(pca_run(people, tmp_path / "other", projection=17))


def test_a_torn_file_of_components_is_named(people, tmp_path):
    run = pca_run(people, tmp_path / "run")
    starting_params(run)
    (run.workdir / FILE).write_bytes((run.workdir / FILE).read_bytes()[:40])
    with pytest.raises(UserError, match="projection.safetensors: cannot be read .*; remove it, and it is made again"):
        starting_params(run)


@pytest.mark.slow
def test_a_temperature_divides_the_queries_and_is_learned_without_decay():
    plain = tiny_realm()
    params = jax.jit(plain.init)(jax.random.key(0))
    query = query_rows([[5, 6, 7], [8, 9]])
    rows = query["query"], query["query_length"]
    whole = plain.embed_queries(params, *rows)
    fixed = dataclasses.replace(plain, temperature=0.05)
    np.testing.assert_array_equal(fixed.query_vectors(params, *rows), whole)
    np.testing.assert_allclose(fixed.embed_queries(params, *rows), whole / 0.05, rtol=1e-6)

    learned = dataclasses.replace(fixed, learn_temperature=True)
    own = jax.jit(learned.init)(jax.random.key(0))
    rest = {name: value for name, value in own["query_embedder"].items() if name != LOG_TEMPERATURE}
    jax.tree.map(np.testing.assert_array_equal, own | {"query_embedder": rest}, params)
    assert learned.current_temperature(own) == pytest.approx(0.05)
    assert not weight_decay_mask(own)["query_embedder"][LOG_TEMPERATURE]
    gradient = jax.jit(jax.grad(lambda p: jnp.abs(learned.embed_queries(p, *rows)).sum()))(own)
    assert gradient["query_embedder"][LOG_TEMPERATURE] < 0  # a higher temperature makes scores smaller
