"""The corpus as vectors: what they may not depend on, which shapes are compiled, and what is refused."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import document_rows, random_words, tiny_realm

from realm_jax.errors import UserError
from realm_jax.mesh import make_mesh
from realm_jax.models.inputs import PassageBatch
from realm_jax.retrieval.embed import BUCKET, GROUPS, CorpusRows, batches, embed_corpus, in_groups
from realm_jax.run import put_batch

LONGEST, ROWS, GROUP = 100, 30, GROUPS["cpu"]
MODEL = tiny_realm(layers=1, max_length=LONGEST)


@pytest.fixture(scope="module")
def corpus() -> CorpusRows:
    """Bodies of 2 to 97 pieces: two thirds of the rows fit the first bucket."""
    rng = np.random.default_rng(0)
    texts = [(random_words(rng, 2), random_words(rng, int(length))) for length in rng.integers(2, 95, ROWS)]
    documents = document_rows(texts, LONGEST)
    return CorpusRows(np.asarray(documents.ids), *(np.asarray(part, np.uint16) for part in documents[1:]))


@pytest.fixture(scope="module")
def params():
    return jax.jit(MODEL.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def embed_on(params) -> Callable[[CorpusRows, int, int], np.ndarray]:
    """`embed_on(corpus, batch size, devices)`, with a program a shape."""
    embed = jax.jit(MODEL.embed_documents)

    def run(corpus: CorpusRows, batch_size: int, devices: int) -> np.ndarray:
        mesh = make_mesh(-1, 1, 1, jax.devices()[:devices])
        return embed_corpus(lambda rows: embed(params, PassageBatch(*put_batch(mesh, rows))), corpus, batch_size)

    return run


@pytest.fixture(scope="module")
def vectors(corpus, embed_on) -> np.ndarray:
    return embed_on(corpus, 8, 1)


def test_vectors_are_those_of_each_passage_by_itself(corpus, params, vectors):
    """Read at full length, one at a time: padding is not seen."""
    one = jax.jit(lambda row: MODEL.embed_documents(params, PassageBatch(*(part[None] for part in row)))[0])
    alone = np.stack([one(CorpusRows(*(jnp.asarray(part[row]) for part in corpus))) for row in range(ROWS)])
    np.testing.assert_allclose(vectors, alone, atol=2e-6)
    assert vectors.dtype == np.float32 and np.ptp(vectors, axis=0).min() > 0.01


@pytest.mark.parametrize("batch_size, devices", [(24, 1), (8, 8)])
def test_batch_size_and_devices_change_nothing(corpus, vectors, embed_on, batch_size, devices):
    np.testing.assert_allclose(embed_on(corpus, batch_size, devices), vectors, atol=2e-6)


def test_order_changes_no_bit(corpus, vectors, embed_on):
    order = np.random.default_rng(1).permutation(ROWS)
    np.testing.assert_array_equal(embed_on(CorpusRows(*(part[order] for part in corpus)), 8, 1), vectors[order])


def some_corpus(lengths: list[int], longest: int) -> CorpusRows:
    """Rows that hold their own number: the first piece of each is it."""
    ids = np.zeros((len(lengths), longest), np.uint16)
    ids[:, 0] = np.arange(len(lengths))
    return CorpusRows(ids, np.array(lengths, np.uint16), np.zeros(len(lengths), np.uint16))


@pytest.mark.parametrize("group, skip_empty", [(8, True), (16, False), (7, False)])
def test_groups_have_the_vectors_of_a_whole_batch(corpus, group, skip_empty):
    """Of thirty-two passages; seven do not divide them, so that they are one group."""
    documents = PassageBatch(*(jnp.asarray(np.concatenate([part, part[:2]])) for part in corpus))
    params = MODEL.init(jax.random.key(0))
    whole = jax.jit(MODEL.embed_documents)(params, documents)
    embed = partial(MODEL.embed_documents, params)
    found = jax.jit(lambda rows: in_groups(embed, rows, group, skip_empty))(documents)
    np.testing.assert_allclose(found, whole, atol=2e-6)


def test_groups_that_only_fill_up_a_batch_are_not_embedded():
    embedded = []

    def embed(group: PassageBatch) -> jax.Array:
        jax.debug.callback(lambda ids: embedded.append(ids), group.ids[:, 0])
        return group.ids[:, :1] + 1.0

    corpus = some_corpus([5] * (GROUP + 1), 16)
    program = jax.jit(lambda rows: in_groups(embed, PassageBatch(*rows), GROUP))
    vectors = embed_corpus(lambda rows: program(CorpusRows(*map(jnp.asarray, rows))), corpus, 4 * GROUP)
    jax.effects_barrier()
    assert len(embedded) == 2
    np.testing.assert_array_equal(vectors[:, 0], np.arange(GROUP + 1) + 1)


LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=50)


@given(LENGTHS, st.integers(1, 20))
def test_every_row_is_in_one_batch_of_a_width_that_fits(lengths, batch_size):
    """Widths are multiples of the bucket, or the longest there is, and never a whole bucket too wide."""
    corpus = some_corpus(lengths, 300)
    found = list(batches(corpus, batch_size))
    assert sorted(np.concatenate([rows for rows, _ in found])) == list(range(len(lengths)))
    for rows, width in found:
        assert 1 <= len(rows) <= batch_size
        assert width % BUCKET == 0 or width == 300
        assert (corpus.lengths[rows] <= width).all() and (corpus.lengths[rows] > width - BUCKET).all()


@given(LENGTHS, st.integers(1, 20))
def test_batches_are_always_full_and_progress_counts_passages(lengths, batch_size):
    shapes, progress = set(), []

    def embed(rows: CorpusRows) -> jax.Array:
        shapes.add(rows.ids.shape)
        return rows.ids[:, :1].astype(np.float32)  # type: ignore[return-value]

    vectors = embed_corpus(embed, some_corpus(lengths, 300), batch_size, progress.append)
    np.testing.assert_array_equal(vectors[:, 0], np.arange(len(lengths)))
    assert shapes <= {(batch_size, width) for width in (*range(BUCKET, 300, BUCKET), 300)}
    assert progress == sorted(set(progress)) and progress[-1] == len(lengths)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_vectors_that_are_not_finite_are_refused(value):
    def embed(rows: CorpusRows) -> np.ndarray:
        return np.where(rows.ids[:, :1] == 2, value, 1.0)

    with pytest.raises(UserError, match="the passage encoder gives values that are not finite"):
        embed_corpus(embed, some_corpus([5, 5, 5], 16), 2)  # type: ignore[arg-type]
