"""Token rerank: its equations beside NumPy, and the order in which an evaluator finds and reads passages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import loud_params

from realm_jax.data.questions import Question
from realm_jax.errors import UserError
from realm_jax.eval.prediction import Evaluator
from realm_jax.forward import SearchPipeline, gather_passages
from realm_jax.indexing.token_file import TokenFile, fit_compression
from realm_jax.models.inputs import PassageBatch
from realm_jax.retrieval.token_rerank import (
    LARGEST,
    STORED_BYTES,
    WEIGHT,
    combined_values,
    kept_tokens,
    max_sim,
    max_sims,
    principal_axes,
    quantized,
    query_words,
    stored_dimensions,
    stored_max_sims,
    z_scores,
)
from realm_jax.tasks.answering import search_pipeline

DEPTH = 10  # answering.rerank_depth


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def numpy_max_sim(query, passage):
    """query [q, width], passage [d, width] → one number."""
    return np.mean([max(np.dot(token, other) for other in passage) for token in query])


def numpy_order(values, similarities):
    """Positions of the passages of one question in their new order; values that are all equal say nothing."""
    total = np.zeros(len(values))
    for part, weight in ((np.float64(values), 1.0), (np.float64(similarities), WEIGHT)):
        total += weight * (part - part.mean()) / (part.std() or 1.0)
    return np.argsort(-total, kind="stable")


def test_max_sim_is_the_mean_over_query_tokens_of_the_largest_cosine():
    rng = np.random.default_rng(0)
    query, passage = (unit(rng.normal(size=(3, length, 8))).astype(np.float32) for length in (5, 7))
    query_mask, passage_mask = (np.arange(length) < np.array([[length], [2], [3]]) for length in (5, 7))
    found = max_sim(query, query_mask, passage, passage_mask)
    wanted = [numpy_max_sim(*pair) for pair in zip(
        [tokens[mask] for tokens, mask in zip(query, query_mask, strict=True)],
        [tokens[mask] for tokens, mask in zip(passage, passage_mask, strict=True)], strict=True,
    )]  # fmt: skip
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_max_sim_of_a_text_without_tokens_is_a_number():
    tokens, some, none = unit(np.ones((1, 2, 4), np.float32)), np.ones((1, 2), bool), np.zeros((1, 2), bool)
    assert max_sim(tokens, none, tokens, some).tolist() == [0.0]
    assert max_sim(tokens, some, tokens, none).tolist() == [-1.0]


def test_z_scores_leave_missing_passages_out():
    values = np.float32([[3.0, 1.0, 7.0, -1e9], [2.0, 5.0, 5.0, 0.0]])
    is_passage = np.array([[True, True, True, False], [True] * 4])
    found = z_scores(values, is_passage)
    known = values[0, :3]
    np.testing.assert_allclose(found[0], [*((known - known.mean()) / known.std()), 0.0], rtol=1e-5)
    np.testing.assert_allclose(found[1], (values[1] - values[1].mean()) / values[1].std(), rtol=1e-5)


def test_values_that_differ_by_rounding_only_have_no_z_scores():
    same = np.float32([[100.3] * 7, [0.1] * 7, [0.0] * 7])
    same[0, 3] = np.nextafter(same[0, 3], np.float32(200))
    assert not np.asarray(z_scores(same, np.ones(same.shape, bool))).any()
    assert not np.asarray(z_scores(same, np.zeros(same.shape, bool))).any()


def test_passages_are_ordered_by_the_sum_and_missing_ones_come_last():
    values, similarities = np.float32([[9.0, 8.0, 3.0, 0.0]]), np.float32([[0.2, 0.9, 0.8, 1.0]])
    found = combined_values(values, similarities, np.array([[True, True, True, False]]))[0]
    assert np.argsort(-found, stable=True).tolist() == [*numpy_order(values[0, :3], similarities[0, :3]), 3]
    equal = combined_values(np.ones((1, 3)), np.ones((1, 3)), np.array([[True, False, True]]))[0]
    assert np.argsort(-equal, stable=True).tolist() == [0, 2, 1]


# ---- stored token vectors


def test_kept_tokens_are_first_occurrences_then_the_rarest_in_their_order():
    ids = np.array([[1, 5, 6, 5, 7, 2, 0], [1, 6, 6, 6, 2, 0, 0]])
    mask = np.arange(7) < np.array([[6], [5]])
    frequencies = np.array([0, 9, 9, 0, 0, 2, 7, 3])
    assert kept_tokens(ids, mask, frequencies, 4).tolist() == [[0, 1, 2, 4], [0, 1, 2, 4]]
    assert kept_tokens(ids, mask, frequencies, 3).tolist() == [[1, 2, 4], [0, 1, 4]]
    assert kept_tokens(ids, mask, frequencies, 1).tolist() == [[1], [1]]
    assert kept_tokens(ids, mask, frequencies, 9).tolist() == [[0, 1, 2, 3, 4, 5, 7], [0, 1, 2, 3, 4, 7, 7]]


def test_long_passages_are_stored_in_fewer_dimensions_so_that_no_token_is_lost():
    tokens = (30, 128, 129, 256, 341, 512)
    dimensions = [stored_dimensions(count) for count in tokens]
    assert dimensions == [64, 64, 63, 32, 24, 24]
    fits = [count * size <= STORED_BYTES for count, size in zip(tokens, dimensions, strict=True)]
    assert fits == [True] * 5 + [False]


def test_quantized_vectors_differ_by_half_a_step_at_most():
    vectors = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    vectors[3] = 0
    stored, largest = np.asarray(quantized(vectors)), np.abs(vectors).max(axis=1, keepdims=True)
    assert stored.dtype == np.int8 and not stored[3].any()
    assert np.abs(stored / LARGEST * largest - vectors).max() <= largest.max() / LARGEST / 2 * (1 + 1e-5)
    assert (np.abs(stored).max(axis=1) == LARGEST).sum() == 49


def test_principal_axes_keep_the_length_of_vectors_in_their_plane():
    rng = np.random.default_rng(0)
    plane = np.linalg.qr(rng.normal(size=(8, 2)))[0]
    vectors = rng.normal(size=(40, 2)) * [3.0, 1.0] @ plane.T
    axes = principal_axes(vectors.T @ vectors, 2)
    np.testing.assert_allclose(axes.T @ axes, np.eye(2), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors @ axes, axis=1), np.linalg.norm(vectors, axis=1), rtol=1e-5)
    assert np.var(vectors @ axes, axis=0)[0] > np.var(vectors @ axes, axis=0)[1]


# ---- through an evaluator


@pytest.fixture(scope="module")
def loud(trained_run):
    """The tiny run, with parameters by which no two passages score alike, and its index."""
    params = loud_params(trained_run.model, 1)
    return trained_run, params, trained_run.index(trained_run.embed(params))


def token_rows(run, params, evaluator, rows):
    """Vectors of each question's words, and of its passages' tokens in the order of `rows`: arrays [tokens, width]."""
    names = "query", "query_length"
    query, lengths = (jnp.stack([jnp.asarray(one[name]) for one in evaluator.queries]) for name in names)
    queries = map(np.asarray, jax.jit(run.model.query_tokens)(params, query, lengths))
    corpus = PassageBatch(*(part[: run.context.rows] for part in run.documents))
    passages = [*map(np.asarray, jax.jit(run.model.document_tokens)(params, corpus))]
    tokenizer = run.sources.tokenizer
    for ids, vectors, mask, found in zip(query, *queries, rows, strict=True):
        pieces = tokenizer.pieces(ids[mask])
        words = [number for number, piece in enumerate(pieces) if piece not in ("[CLS]", "[SEP]", "?", "[UNK]")]
        yield vectors[mask][words or slice(None)], [passages[0][row][passages[1][row]] for row in found]


@pytest.mark.parametrize("search", ["vectors", "bm25", "hybrid"])
def test_the_first_passages_of_a_search_are_reordered_and_keep_their_scores(loud, search):
    run, params, index = loud
    texts = ("When was Boris Brandt born?", "Ada", "the house of Clara Dahl", *(["??"] if search == "vectors" else []))
    questions = [Question(text, []) for text in texts]
    pipeline = search_pipeline("qa", run.config, search, "tokens")
    assert (pipeline.search, pipeline.reranker, pipeline.rerank.passages) == (search, "tokens", DEPTH)
    plain = Evaluator(run, questions, SearchPipeline(search)).ranking(params, index, 16)
    evaluator = Evaluator(run, questions, pipeline)
    found = evaluator.ranking(params, index, 16)
    first = [row[:DEPTH][row[:DEPTH] >= 0] for row in plain.rows]
    for number, (query, passages) in enumerate(token_rows(run, params, evaluator, first)):
        count = len(passages)
        similarities = [numpy_max_sim(query, passage) for passage in passages]
        order = numpy_order(plain.values[number, :count], similarities)
        wanted = [*first[number][order], *plain.rows[number, count:]]
        assert found.rows[number].tolist() == wanted
        np.testing.assert_allclose(found.scores[number, :count], plain.scores[number, :count][order], rtol=1e-4)
        np.testing.assert_array_equal(found.ranks[number, :count, :2], plain.ranks[number, :count][order])
        assert found.ranks[number, :, 2].tolist() == [*range(1, count + 1), *[0] * (16 - count)]
    assert (found.rows != plain.rows).any()
    shallow = evaluator.ranking(params, index, 3)
    np.testing.assert_array_equal(shallow.rows, found.rows[:, :3])


@pytest.mark.parametrize("search", ["bm25", "hybrid"])
def test_stored_token_vectors_give_the_order_of_those_of_the_encoder(loud, search, tmp_path):
    """All tokens in all dimensions, so only rounding to 8 bits differs."""
    run, params, index = loud
    file = TokenFile(dataclasses.replace(run, workdir=tmp_path), params, "key")
    file.embed(np.arange(run.context.rows))
    compression = fit_compression(run, {name: params[name] for name in run.model.embedder_names})
    stored = index._replace(tokens=run.stored_tokens(np.load(file.folder / "tokens.npy"), compression))
    assert stored.tokens.vectors.shape[1:] == (int(run.corpus.lengths.max()), run.model.bert.width)
    texts = "When was Boris Brandt born?", "Where is Ada?", "the house of Clara Dahl"
    questions = [Question(text, []) for text in texts]
    evaluator = Evaluator(run, questions, search_pipeline("qa", run.config, search, "tokens"))
    wanted, found = (evaluator.ranking(params, one, 16) for one in (index, stored))
    np.testing.assert_array_equal(np.sort(found.rows, axis=1), np.sort(wanted.rows, axis=1))
    assert (found.rows == wanted.rows).mean() > 0.9, "only passages that are nearly equal swap"
    texts = jnp.stack([jnp.asarray(one["query"]) for one in evaluator.queries])
    queries = query_words(run.model, params, texts, jnp.full(len(texts), texts.shape[1]), index.words)
    passages = gather_passages(index, wanted.rows[:, :DEPTH])
    encoded = jax.jit(max_sims, static_argnums=0)(run.model, params, queries, passages)
    similarities = stored_max_sims(queries, stored.tokens, wanted.rows[:, :DEPTH])
    is_passage = wanted.rows[:, :DEPTH] >= 0
    np.testing.assert_allclose(similarities[is_passage], encoded[is_passage], atol=0.02)


def test_the_reader_reads_passages_in_the_new_order_with_the_probabilities_of_the_retriever(loud):
    run, params, index = loud
    questions = run.sources.questions["dev"]
    pipeline = search_pipeline("qa", run.config, "hybrid", "tokens")
    evaluator = Evaluator(run, questions, pipeline)
    predictions, rows = evaluator.predict(params, index), evaluator.retrieve(params, index)
    plain = Evaluator(run, questions, SearchPipeline("hybrid")).predict(params, index)
    np.testing.assert_array_equal([one.retrieved for one in predictions], rows)
    assert any([*one.retrieved[:3]] != [*other.retrieved[:3]] for one, other in zip(predictions, plain, strict=True))
    for prediction, other in zip(predictions, plain, strict=True):
        assert [one.row for one in prediction.candidates] == prediction.retrieved[:3].tolist()
        scores = dict(zip(other.retrieved.tolist(), other.scores.tolist(), strict=True))
        weights = np.exp([scores[row] - prediction.scores[:3].max() for row in prediction.retrieved[:3].tolist()])
        np.testing.assert_allclose(
            [one.probability for one in prediction.candidates], weights / weights.sum(), atol=1e-4
        )
        stages = [pipeline.ranks_by_stage(ranks) for ranks in prediction.ranks.tolist()]
        assert [one.get("tokens") for one in stages] == [*range(1, DEPTH + 1), *[None] * (16 - DEPTH)]


def test_a_shared_encoder_gives_the_tokens_of_both(loud):
    config = loud[0].config
    model = dataclasses.replace(config.model, shared_tower=True)
    shared = dataclasses.replace(config, tasks="ict", model=model)
    assert search_pipeline("ict", shared, rerank="tokens").rerank.networks == ("embedder",)
    assert search_pipeline("qa", config, rerank="tokens").rerank.networks == ("query_embedder", "document_embedder")
    assert search_pipeline("closed_book", config) == search_pipeline("closed_book", config, rerank="none")
    with pytest.raises(UserError, match="the task closed_book answers without passages; leave it out"):
        search_pipeline("closed_book", config, rerank="tokens")
