"""The order of passages between search and reading, and networks that a task brings along."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (  # fmt: skip
    embed_corpus,
    loud_params,
    one_device_mesh,
    query_rows,
    random_corpus,
    random_words,
    tiny_context,
    tiny_realm,
)

from realm_jax.config import QaConfig
from realm_jax.forward import Rerank, Rescored, SearchPipeline, falling_scores, gather_passages, retrieve_and_rerank
from realm_jax.models.networks import Network

ROWS, BEAM, FIRST = 12, 6, 4


@dataclasses.dataclass(frozen=True)
class Bias(Network):
    """One number."""

    name: ClassVar[str] = "bias"

    def init_boxed(self, key):
        return {"value": jax.random.normal(key, (1,))}


def last_piece(qa, context, params, batch, index, ranking):
    """Adds to each passage its last piece times a parameter: what no search knows."""
    documents = gather_passages(index, ranking.rows)
    last = jnp.take_along_axis(documents.ids, documents.lengths[..., None].astype(jnp.int32) - 2, axis=-1)[..., 0]
    scores = ranking.scores + params["bias"]["value"] * last.astype(jnp.float32)
    return Rescored(scores, scores)


@pytest.fixture(scope="module")
def found():
    """Corpus, and the beam without and with other orders: {weight: Fused}."""
    rng = np.random.default_rng(0)
    corpus = random_corpus(rng, ROWS)
    model = dataclasses.replace(tiny_realm(), networks=(Bias(tiny_realm().bert),))
    params, batch = loud_params(model, 0), query_rows([random_words(rng, 5) for _ in range(3)])
    index = embed_corpus(model, params, corpus, 1)
    context = tiny_context(one_device_mesh(), ROWS, model)
    changed = Rerank("cross-encoder", FIRST, ("bias",), last_piece)

    def beam(rerank, value, depth=BEAM):
        own = params | {"bias": {"value": jnp.float32([value])}}
        return jax.tree.map(
            np.asarray,
            retrieve_and_rerank(QaConfig(), context, own, batch, index, None, depth, SearchPipeline("vectors", rerank))[
                0
            ],
        )

    return corpus, beam(None, 0.0), {value: beam(changed, value) for value in (0.0, 1.0)}, beam(changed, 1.0, 2)


def test_nothing_added_leaves_rows_scores_and_ranks_as_they_were(found):
    _, plain, changed, _ = found
    np.testing.assert_array_equal(changed[0.0].ranks[..., 2], [[1, 2, 3, 4, 0, 0]] * len(plain.rows))
    for before, after in zip(plain, changed[0.0]._replace(ranks=changed[0.0].ranks[..., :2]), strict=True):
        np.testing.assert_array_equal(before, after)


def test_the_first_passages_are_ordered_by_the_sum_and_the_others_stay(found):
    corpus, plain, changed, _ = found
    rows, scores, ranks, _ = changed[1.0]
    for example in range(len(rows)):
        first = plain.rows[example, :FIRST]
        added = np.float32([corpus[row][1][-1] for row in first])
        order = np.argsort(-(plain.scores[example, :FIRST] + added), kind="stable")
        assert rows[example].tolist() == [*first[order], *plain.rows[example, FIRST:]]
        np.testing.assert_allclose(scores[example, :FIRST], (plain.scores[example, :FIRST] + added)[order], rtol=1e-6)
        assert ranks[example, :, 0].tolist() == [*order + 1, *range(FIRST + 1, BEAM + 1)]
    assert (rows != plain.rows).any()


def test_a_shorter_beam_is_cut_after_it_was_ordered(found):
    _, _, changed, short = found
    np.testing.assert_array_equal(short.rows, changed[1.0].rows[:, :2])


def test_places_count_where_words_had_a_part_in_the_order():
    np.testing.assert_array_equal(falling_scores(jnp.float32([[1, 3, 2]])), [[3, 2, 1]])


@pytest.mark.slow
def test_further_networks_leave_the_first_parameters_of_others_as_they_are():
    plain, key = tiny_realm(), jax.random.key(3)
    more = dataclasses.replace(plain, networks=(Bias(plain.bert),)).init(key)
    assert more.pop("bias")["value"].shape == (1,)
    jax.tree.map(np.testing.assert_array_equal, plain.init(key), more)


def test_how_they_attend_changes_for_all_networks():
    model = dataclasses.replace(tiny_realm(), networks=(Bias(tiny_realm().bert),)).with_compute(attention="cpu")
    assert {part.bert.compute.attention for part in (model, model.reader, *model.networks)} == {"cpu"}
