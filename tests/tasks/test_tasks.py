"""Retrieval without the own passage, and the four losses against the networks' own outputs put together in NumPy."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    DOCUMENT,
    PREDICTIONS,
    QUERY,
    SPECIAL,
    document_rows,
    embed_corpus,
    loud_params,
    masked_batch,
    one_device_mesh,
    query_rows,
    random_corpus,
    random_words,
    task_of,
    tiny_context,
    tiny_realm,
)
from tiny_run import tiny_config

from realm_jax import forward
from realm_jax.assemble import make_run
from realm_jax.config import TASK_SECTIONS, QaConfig, RealmConfig, as_config, default
from realm_jax.data import layouts
from realm_jax.data.sources import open_sources
from realm_jax.forward import (
    Candidates,
    candidate_scores,
    gather_passages,
    masked_spans,
    point_at_targets,
    read_candidates,
    read_masked,
    read_question,
    retrieve,
)
from realm_jax.models.inputs import PassageBatch, flatten_passages, reader_inputs
from realm_jax.models.losses import LOG_P_UNSEEN_SPAN, log_prior, masked_word_marginal, pointing
from realm_jax.tasks import TASKS, make_task
from realm_jax.tasks.qa import batch_reader_input
from realm_jax.tasks.realm import realm_metrics
from realm_jax.tasks.step_flops import EXAMPLE_FLOPS
from realm_jax.train.results import STAGES
from realm_jax.train.step import loss_and_metrics, metric_values

ROWS, BATCH = 20, 4
MODEL = tiny_realm(layers=1)  # compiling takes nearly all of the time
RNG = np.random.default_rng(0)
CORPUS = random_corpus(RNG, ROWS)
MASKED = masked_batch(RNG, CORPUS, BATCH)
QUESTIONS = query_rows([random_words(RNG, 5) for _ in range(BATCH)])


def context():
    return tiny_context(one_device_mesh(), ROWS, MODEL)


def loss_of(task, changes=None):
    """The loss of a task with changes to its config, and what it reports."""
    return functools.partial(loss_and_metrics, task_of(task, context(), changes))


def graded(task):
    """The loss of a task and what it reports, with the gradients."""
    return jax.jit(jax.value_and_grad(functools.partial(loss_and_metrics, task), has_aux=True))


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, loud_params(MODEL, seed=1))


@pytest.fixture(scope="module")
def index(params):
    return jax.jit(lambda p: embed_corpus(MODEL, p, CORPUS, devices=1))(params)


@pytest.fixture(scope="module")
def query_vectors(params):
    embed = jax.jit(MODEL.embed_queries)
    return np.asarray(embed(params, MASKED["query"], MASKED["query_length"]))


# --- retrieval --------------------------------------------------------------------------------------------------------

COUNT = 3
REALM = RealmConfig(candidates=1 + COUNT)


def retrieve_with(params, index, own_row=-1, sentence_in=(), found=None, held_out=None, **changes):
    """What is retrieved, with the own row of each example, and the first example's sentence written into some rows."""
    batch = MASKED | {
        "own_row": np.broadcast_to(np.asarray(own_row, np.int32), BATCH),
        "sentence": np.zeros((BATCH, QUERY), np.uint16),
        "sentence_length": np.array([3 if len(sentence_in) else 0] + [0] * (BATCH - 1), np.int32),
    }
    sentence, ids = random_words(np.random.default_rng(5), 3), np.array(index.documents.ids)
    batch["sentence"][0, :3] = sentence
    for row in sentence_in:  # in the middle of its body
        start = 3 + int(index.documents.title_lengths[row])
        ids[row, start : start + 3] = sentence
    index = index._replace(documents=index.documents._replace(ids=ids))
    if held_out is not None:
        index = index._replace(held_out=np.isin(np.arange(len(index.vectors)), held_out))
    if found is not None:  # by hosts
        batch, index = batch | {"retrieved_rows": found}, index._replace(vectors=None)
    rows = changes.pop("rows", ROWS)
    return retrieve_now(params, batch, index, rows, tuple(changes.items()))


@functools.partial(jax.jit, static_argnames=("rows", "changes"))
def retrieve_now(params, batch, index, rows, changes):
    realm = dataclasses.replace(REALM, **dict(changes))
    return retrieve(realm, tiny_context(one_device_mesh(), rows, MODEL), params, batch, index)


@pytest.fixture(scope="module")
def best(query_vectors, index) -> np.ndarray:
    """All rows for each query, best first."""
    return np.argsort(-(query_vectors @ np.asarray(index.vectors)[:ROWS].T), axis=1, kind="stable")


@pytest.mark.parametrize("rank", [None, 0, 1, 2, COUNT + 2])
def test_the_own_row_is_left_out_and_the_spare_takes_its_place(params, index, best, rank):
    """Wherever it ranks among the first: still as many passages as were asked for, in order."""
    found = retrieve_with(params, index, -1 if rank is None else best[:, rank])
    is_excluded = rank is not None and rank < COUNT
    wanted = np.delete(best[:, : COUNT + 1], rank, axis=1) if is_excluded else best[:, :COUNT]
    np.testing.assert_array_equal(found.rows, wanted)
    assert found.valid.all() and found.excluded.tolist() == [int(is_excluded)] * BATCH


def test_a_passage_that_holds_the_sentence_is_own_whatever_its_row(params, index, best):
    found = retrieve_with(params, index, sentence_in=best[0, [1]])
    np.testing.assert_array_equal(found.rows[0], best[0, [0, 2, 3]])
    np.testing.assert_array_equal(found.rows[1:], best[1:, :COUNT])
    assert found.valid.all() and found.excluded.tolist() == [1, 0, 0, 0]
    both = retrieve_with(params, index, [best[0, 1], -1, -1, -1], sentence_in=best[0, [1]])
    assert both.excluded.tolist() == [1, 0, 0, 0], "it counts once"


def test_beyond_the_one_spare_places_are_invalid_and_never_searched_again(params, index, best):
    """Three own passages, by row and by content, among the four that are looked at: one candidate is left."""
    found = retrieve_with(params, index, [best[0, 3], -1, -1, -1], sentence_in=best[0, [0, 2]])
    assert found.valid.tolist() == [[True, False, False]] + [[True] * 3] * 3
    assert found.rows[0, 0] == best[0, 1]
    assert found.excluded.tolist() == [3, 0, 0, 0]


def test_passages_that_are_held_out_are_no_candidates(params, index, best):
    """The spare takes the place of one; if there are more, places are invalid."""
    found = retrieve_with(params, index, held_out=best[0, [0, 2]])
    assert found.rows[0, :2].tolist() == best[0, [1, 3]].tolist() and found.valid[0].tolist() == [True, True, False]
    assert not np.isin(found.rows[np.asarray(found.valid)], best[0, [0, 2]]).any() and not found.excluded.any()


def test_a_place_without_a_passage_is_invalid_and_not_counted_as_excluded(params, index):
    """Where hosts search, or words find fewer passages than are asked for, the rest of the rows are −1."""
    rows = np.array([[4, 5, -1, -1], [1, -1, -1, -1], [2, 3, 6, -1], [-1] * 4], np.int32)
    found = retrieve_with(params, index, [5, -1, -1, -1], found=rows)
    assert found.valid.sum(axis=1).tolist() == [1, 1, 3, 0]
    assert found.excluded.tolist() == [1, 0, 0, 0]


def test_own_passages_stay_where_trivial_retrievals_are_allowed(params, index, best):
    found = retrieve_with(params, index, best[:, 0], sentence_in=best[0, [1]], exclude_own=False)
    np.testing.assert_array_equal(found.rows, best[:, :COUNT])
    assert found.valid.all() and not found.excluded.any()


def test_a_corpus_that_is_smaller_than_the_candidates_is_retrieved_whole(params, index):
    found = retrieve_with(params, index, [0, 1, -1, 0], rows=2)
    assert found.rows.shape == (BATCH, 2)
    assert found.valid.sum(axis=1).tolist() == [1, 1, 2, 1]
    assert (np.sort(found.rows, axis=1) == [0, 1]).all()


# --- candidates -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def candidates(params, index):
    """What a REALM step computes of its candidates: found, scores, log-probabilities and what is right."""

    def compute(params, batch, index):
        found = retrieve(REALM, context(), params, batch, index)
        documents = gather_passages(index, found.rows)
        scores = candidate_scores(context(), params, batch, documents, None)
        return found, scores, *read_candidates(context(), params, batch, documents, None)[:2]

    return jax.tree.map(np.asarray, jax.jit(compute)(params, MASKED, index))


def test_scores_are_inner_products_with_the_null_document_first(params, index, query_vectors, candidates):
    found, scores, _, _ = candidates
    null = np.asarray(MODEL.embed_documents(params, document_rows([([], [])], length=3)))
    wanted = np.einsum("bd,bkd->bk", query_vectors, np.asarray(index.vectors)[found.rows])
    np.testing.assert_allclose(scores, np.concatenate([query_vectors @ null.T, wanted], axis=1), atol=1e-4)


def test_words_are_read_beside_each_candidate_and_beside_nothing(params, candidates):
    """Each pair laid out by `text.layouts` and read on its own, at another length and with other padding."""
    found, _, log_p, right = candidates
    bodies = [[[], *(CORPUS[row][1] for row in rows)] for rows in found.rows.tolist()]
    for place in range(1 + COUNT):
        texts = [(MASKED["query"][i, 1 : MASKED["query_length"][i] - 1], bodies[i][place]) for i in range(BATCH)]
        laid = [layouts.joint(query, body, QUERY + 14, SPECIAL) for query, body in texts]
        ids, segments = (np.array([getattr(one, name) for one in laid]) for name in ("ids", "segments"))
        mask = np.arange(QUERY + 14) < np.array([one.used for one in laid])[:, None]
        words = read_words(params, ids, segments, mask, MASKED["positions"])
        wanted = np.take_along_axis(words, MASKED["targets"][..., None], axis=2)[..., 0]
        np.testing.assert_allclose(log_p[:, place], wanted, atol=1e-4)
        np.testing.assert_array_equal(right[:, place], words.argmax(axis=2) == MASKED["targets"])


@jax.jit
def read_words(params, ids, segments, mask, positions):
    inputs = ids, segments, mask, positions
    return jax.nn.log_softmax(
        MODEL.reader.network.apply({"params": params["reader"]}, *inputs, method="word_logits"), axis=-1
    )


# --- REALM ------------------------------------------------------------------------------------------------------------


def largest(tree) -> float:
    return max(float(jnp.abs(x).max()) for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("null_document", [True, False])
def test_the_realm_loss_is_the_marginal_of_its_parts(params, index, candidates, null_document):
    """That it trains all three networks is seen in `test_devices.py`."""
    found, scores, log_p, _ = candidates
    loss, metrics = jax.jit(loss_of("realm", {"realm.null_document": null_document}))(params, MASKED, index, None)
    valid = np.pad(found.valid, ((0, 0), (1, 0)), constant_values=null_document)
    wanted = masked_word_marginal(scores, log_p, MASKED["weights"], valid, "example")
    np.testing.assert_allclose(loss, wanted.loss.mean, rtol=1e-5)
    assert (metrics["null_probability"] > 0) == null_document
    gains = wanted.log_likelihood - log_likelihood_of(log_p, 0)
    np.testing.assert_allclose(metrics["retrieval_utility"], gains.mean(), rtol=1e-3, atol=1e-5)
    assert metrics["excluded"] == found.excluded.mean()


def test_pointing_reads_the_hidden_span_in_the_passages(params, index, candidates):
    """p(y|z,x) of `losses.pointing` over the spans of each candidate, and of no passage; the span head learns, and
    the head that predicts words does not."""
    documents = jax.tree.map(np.asarray, gather_passages(index, candidates[0].rows))
    by_span, batch = (
        dataclasses.replace(REALM, marginal="span"),
        MASKED | {"weights": np.eye(1, PREDICTIONS).repeat(BATCH, axis=0)},
    )
    body = documents.title_lengths[:, :1] + 2 + np.arange(PREDICTIONS)
    batch["targets"] = np.take_along_axis(documents.ids[:, 0], body, axis=1)  # the first of them is hidden
    read = jax.jit(functools.partial(read_masked, by_span, context(), frozen_passages=False))(
        params, batch, index, None
    )
    spans = jax.jit(functools.partial(masked_spans, context()))(params, batch, documents)
    wanted, _ = pointing(spans.scores, spans.allowed, spans.correct)
    np.testing.assert_allclose(read.log_p[:, 1:, 0], wanted, rtol=1e-4)
    assert (read.log_p[:, 0, 0] == LOG_P_UNSEEN_SPAN).all() and not np.asarray(read.log_p[:, :, 1:]).any()
    shown = [
        [hidden[0] in ids[ids.tolist().index(SPECIAL.sep) + 1 :] for ids in rows]
        for rows, hidden in zip(documents.ids, batch["targets"], strict=True)
    ]
    np.testing.assert_array_equal(spans.correct.any(axis=(2, 3)), shown)
    assert 0 < np.mean(shown) < 1
    gradients = jax.jit(jax.grad(lambda p: loss_of("realm", {"realm.marginal": "span"})(p, batch, index, None)[0]))(
        params
    )
    reader = gradients["reader"]
    assert largest(reader["span_score"]) > 0 and not largest(reader["mlm_transform"])
    assert largest(gradients["query_embedder"]) > 0 and largest(gradients["document_embedder"]) > 0


def test_passages_that_hold_the_span_are_read_first(params, index, candidates, monkeypatch):
    """Of a passage that is not read, the span is as hard to guess as without any."""
    documents = jax.tree.map(np.asarray, gather_passages(index, candidates[0].rows))
    batch = MASKED | {"weights": np.eye(1, PREDICTIONS).repeat(BATCH, axis=0)}
    last = documents.title_lengths[:, -1:] + 2 + np.arange(PREDICTIONS)
    batch["targets"] = np.take_along_axis(documents.ids[:, -1], last, axis=1)
    monkeypatch.setattr(forward, "MAX_POINTED", 1)
    log_p = jax.jit(functools.partial(point_at_targets, context()))(params, batch, documents).log_p
    read = np.asarray(log_p[:, 1:, 0]) != LOG_P_UNSEEN_SPAN
    assert (read.sum(axis=1) == 1).all() and read[:, -1].any()
    assert (np.asarray(log_p[:, 1:, 0])[read] > LOG_P_UNSEEN_SPAN).all()


def test_a_certain_reader_gives_one_to_passages_that_hold_the_span(params, index, candidates):
    """−log Σ p(z|x) over them, but for what is guessed without a passage; nothing is read, and no reader learns."""
    found, scores, _, _ = candidates
    documents = jax.tree.map(np.asarray, gather_passages(index, found.rows))
    batch = MASKED | {"weights": np.eye(1, PREDICTIONS).repeat(BATCH, axis=0)}
    body = documents.title_lengths[:, :1] + 2 + np.arange(PREDICTIONS)
    batch["targets"] = np.take_along_axis(documents.ids[:, 0], body, axis=1)  # the first of them is hidden
    certain = loss_of("realm", {"realm.marginal": "holds"})
    loss, metrics = jax.jit(certain)(params, batch, index, None)
    prior = np.exp(log_prior(scores, np.pad(found.valid, ((0, 0), (1, 0)), constant_values=True)))
    held = [
        [hidden[0] in ids[ids.tolist().index(SPECIAL.sep) + 1 :] for ids in rows]
        for rows, hidden in zip(documents.ids, batch["targets"], strict=True)
    ]
    assert 0 < np.mean(held) < 1
    likelihood = np.where(np.pad(held, ((0, 0), (1, 0))), 1.0, np.exp(LOG_P_UNSEEN_SPAN))
    np.testing.assert_allclose(loss, -np.log((prior * likelihood).sum(axis=1)).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["useful_candidates"], np.any(held, axis=1).mean())
    gradients = jax.jit(jax.grad(lambda p: certain(p, batch, index, None)[0]))(params)
    assert largest(gradients["query_embedder"]) > 0 and not largest(gradients["reader"])
    config = default()
    config.realm.marginal, config.refresh.every = "holds", 0
    run = SimpleNamespace(context=context(), config=as_config(config), sources=None)
    assert make_task("realm", run).trained == ("query_embedder",)


def test_frozen_documents_keep_their_vectors(params, index):
    """With the vectors of today's document tower the loss is the same, and that tower has no part in the passages."""
    losses = [loss_of("realm", {"refresh.every": every}) for every in (5, 0)]
    loss = [jax.jit(each)(params, MASKED, index, None)[0] for each in losses]
    np.testing.assert_allclose(*loss, rtol=1e-5)
    moved = params | {"document_embedder": jax.tree.map(lambda x: 1.5 * x, params["document_embedder"])}
    frozen = jax.jit(loss_of("realm", {"refresh.every": 0, "realm.null_document": False}))
    before, after = (frozen(each, MASKED, index, None)[0] for each in (params, moved))
    np.testing.assert_array_equal(before, after)
    config = default()
    for every, trained in ((0, ("query_embedder", "reader")), (5, ("query_embedder", "document_embedder", "reader"))):
        config.refresh.every = every
        run = SimpleNamespace(context=context(), config=as_config(config), sources=None)
        assert make_task("realm", run).trained == trained


def log_likelihood_of(log_p, place):
    return (log_p[:, place] * MASKED["weights"]).sum(axis=1)


def reported(log_p, weights, targets, right, valid, excluded):
    """What a REALM step reports of candidates that are equally likely a priori, the null document first."""
    valid = jnp.array(valid, bool)
    batch = {"weights": jnp.array(weights), "targets": jnp.array(targets)}
    found = Candidates(jnp.zeros(valid[:, 1:].shape, int), valid[:, 1:], jnp.array(excluded))
    result = masked_word_marginal(jnp.zeros(valid.shape), jnp.array(log_p), batch["weights"], valid, "example")
    values = metric_values(realm_metrics(result, jnp.array(right, bool), batch, found))
    return {name: float(value) for name, value in values.items()}


def test_what_a_realm_step_reports_by_hand():
    """Two examples of two predicted pieces and of one, a null document and two passages.

    Example 1: p(y|z,x) = 1/4 beside the null document, then 1/2 and 1/8: p(y|x) = 7/24, gain of the best: log 2.
    Example 2: 1/2 for all three: nothing gained. Right beside the likeliest candidate (the first of equals, the null
    document) are one of the first example's two pieces and the second's only one: two of three.
    """
    half = np.log(0.5)
    log_p = [[[half, half], [half, 0.0], [2 * half, half]], [[half, 9.0], [half, 9.0], [half, 9.0]]]
    right = [[[1, 0], [1, 1], [0, 0]], [[1, 1], [0, 0], [0, 0]]]
    metrics = reported(log_p, [[1.0, 1.0], [1.0, 0.0]], [[5, 6], [8, 0]], right, [[1, 1, 1]] * 2, [1, 0])
    wanted = {
        "loss": -(np.log(7 / 24) + half) / 2,
        "perplexity": np.exp(-(np.log(7 / 24) + half) / 3),
        "accuracy": 2 / 3,
        "retrieval_utility": np.log(7 / 6) / 2,
        "useful_candidates": 0.5,
        "best_candidate_gain": np.log(2) / 2,
        "null_probability": 1 / 3,
        "prior_entropy": np.log(3),
        "excluded": 0.5,
    }
    assert metrics == pytest.approx(wanted, rel=1e-5)


def test_an_example_whose_candidates_are_all_excluded_gains_nothing():
    """It is left with the null document, and must not upset the means of a batch."""
    metrics = reported(np.full((1, 3, 1), -2.0), [[1.0]], [[5]], np.zeros((1, 3, 1)), [[1, 0, 0]], [2])
    assert metrics["best_candidate_gain"] == metrics["retrieval_utility"] == metrics["useful_candidates"] == 0.0
    assert metrics["null_probability"] == 1.0 and metrics["prior_entropy"] == 0.0


# --- warm-up and inverse cloze ----------------------------------------------------------------------------------------


def as_batch(documents: PassageBatch) -> dict[str, np.ndarray]:
    return {f"document{part}": array for part, array in zip(("", "_length", "_title_length"), documents, strict=True)}


def test_the_warm_up_is_the_mean_over_predicted_pieces(params, candidates):
    """Beside the empty document it is what REALM reads beside its null document."""
    loss, metrics = jax.jit(loss_of("mlm"))(params, MASKED | as_batch(document_rows([([], [])] * BATCH)), None, None)
    _, _, log_p, right = candidates
    weights = MASKED["weights"]
    np.testing.assert_allclose(loss, -(log_p[:, 0] * weights).sum() / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], (right[:, 0] * weights).sum() / weights.sum(), rtol=1e-6)


def test_the_inverse_cloze_task_ranks_each_sentence_among_all_passages_of_the_batch(params, index, query_vectors):
    documents = PassageBatch(*(part[:BATCH] for part in index.documents))
    batch = {"query": MASKED["query"], "query_length": MASKED["query_length"]} | as_batch(documents)
    loss, metrics = jax.jit(loss_of("ict"))(params, batch, None, None)
    logits = query_vectors.astype(np.float64) @ np.asarray(index.vectors[:BATCH], np.float64).T
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(loss, -np.diagonal(log_p).mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["accuracy"], (log_p.argmax(axis=1) == np.arange(BATCH)).mean())


def test_the_inverse_cloze_task_can_rank_the_own_passage_among_what_is_retrieved(params, index, query_vectors, best):
    """The own passage counts once, whether it is retrieved or not; stored vectors and documents do not move."""
    own = np.array([best[0, 0], best[1, 2], best[2, -1], best[3, 5]])
    batch = {"query": MASKED["query"], "query_length": MASKED["query_length"], "own_row": own.astype(np.int32)}
    task = task_of("ict", context(), {"ict.negatives": "index", "qa.beam": 4})
    assert task.trained == ("query_embedder",) and task.retrieves
    (loss, metrics), gradient = graded(task)(params, batch, index, None)
    scores = query_vectors.astype(np.float64) @ np.asarray(index.vectors[:ROWS], np.float64).T
    wanted = []
    for example in range(BATCH):
        among = sorted({*best[example, :4].tolist(), int(own[example])})
        wanted.append(np.logaddexp.reduce(scores[example, among]) - scores[example, own[example]])
    np.testing.assert_allclose(loss, np.mean(wanted), rtol=1e-4)
    assert metrics["accuracy"] == 0.25
    assert largest(gradient["query_embedder"]) > 1e-5 and largest(gradient["document_embedder"]) == 0.0


# --- question answering -----------------------------------------------------------------------------------------------

PASSAGES, BEAM, WIDTH = 3, 6, MODEL.reader.span_width


def asked(rows: np.ndarray) -> dict[str, np.ndarray]:
    """The questions; an answer of two pieces from the body of each of these rows, none for a row of −1."""
    answers, lengths = np.zeros((BATCH, 2, WIDTH), np.int32), np.zeros((BATCH, 2), np.int32)
    for place, row in enumerate(rows):
        if row >= 0:
            answers[place, 1, :2], lengths[place, 1] = CORPUS[row][1][1:3], 2
    return QUESTIONS | {"answers": answers, "answer_lengths": lengths}


@pytest.fixture(scope="module")
def reading(params, index):
    """Rows and scores of the beam, and the span scores of the passages that are read."""

    @jax.jit
    def read(params, index):
        read = read_question(QaConfig(passages=PASSAGES), context(), params, QUESTIONS, index, None, BEAM)
        return read.beam.rows, read.beam.scores, read.span_scores

    return jax.tree.map(np.asarray, read(params, index))


def spans_of(rows, batch, example):
    """Of each passage that is read: the place of its body in the joint, and all spans with whether they are right."""
    answers = [a[:n].tolist() for a, n in zip(batch["answers"][example], batch["answer_lengths"][example], strict=True)]
    for row in rows[example, :PASSAGES]:
        start, body = int(QUESTIONS["query_length"][example]), CORPUS[row][1]
        spans = [(i, w) for i in range(len(body)) for w in range(WIDTH) if i + w < len(body)]
        yield [((start + i, w), body[i : i + w + 1] in [a for a in answers if a]) for i, w in spans]


def marginal_by_loops(rows, scores, span_scores, batch) -> list[float]:
    """log Σ_z p(z|x) Σ_{right spans} p(span|z,x) for each question, −∞ where no span is right."""
    found = []
    for example in range(BATCH):
        prior = np.exp(scores[example, :PASSAGES] - np.logaddexp.reduce(scores[example, :PASSAGES]))
        total = 0.0
        for p, table, spans in zip(prior, span_scores[example], spans_of(rows, batch, example), strict=True):
            weights = np.array([np.exp(table[span]) for span, _ in spans])
            total += p * weights[[right for _, right in spans]].sum() / weights.sum()
        with np.errstate(divide="ignore"):
            found.append(np.log(total))
    return found


@functools.cache
def qa_gradients(objective: str, refresh_every: int = 0):
    changes = {"qa.objective": objective, "qa.refresh_every": refresh_every, "qa.beam": BEAM, "qa.passages": PASSAGES}
    return graded(task_of("qa", context(), changes))


def test_answering_is_the_marginal_over_passages_and_spans(params, index, reading):
    """Answers in the best passage, in the third, in one that is retrieved but not read, and none at all."""
    rows, scores, span_scores = reading
    batch = asked(np.array([rows[0, 0], rows[1, 2], rows[2, 4], -1]))
    (loss, metrics), gradients = qa_gradients("marginal")(params, batch, index, None)
    likelihoods = marginal_by_loops(rows, scores.astype(np.float64), span_scores.astype(np.float64), batch)
    assert np.isfinite(likelihoods).tolist() == [True, True, False, False]
    np.testing.assert_allclose(loss, -np.mean(likelihoods[:2]), rtol=1e-4)
    np.testing.assert_allclose(metrics["log_likelihood"], np.mean(likelihoods[:2]), rtol=1e-4)
    assert metrics["answer_in_passages"] == 0.5
    assert largest(gradients["query_embedder"]) > 1e-4 and largest(gradients["reader"]) > 1e-4
    assert largest(gradients["document_embedder"]) == 0.0


def test_orqa_adds_the_retriever_s_own_term_over_the_whole_beam(params, index, reading):
    """The third question's answer is in the beam but not read: it counts for the retriever alone."""
    rows, scores, span_scores = (x.astype(np.float64) if x.dtype == np.float32 else x for x in reading)
    batch = asked(np.array([rows[0, 0], rows[1, 2], rows[2, 4], -1]))
    (loss, _), _ = qa_gradients("orqa")(params, batch, index, None)
    retriever, reader = 0.0, 0.0
    for example, answer_row in enumerate((rows[0, 0], rows[1, 2], rows[2, 4])):
        place = rows[example].tolist().index(answer_row)
        retriever += np.logaddexp.reduce(scores[example]) - scores[example, place]
        read = zip(span_scores[example], scores[example], spans_of(rows, batch, example), strict=False)
        entries = [(table[span] + score, flag) for table, score, spans in read for span, flag in spans]
        values, right = map(np.array, zip(*entries, strict=True))
        if right.any():
            reader += np.logaddexp.reduce(values) - np.logaddexp.reduce(values[right])
    np.testing.assert_allclose(loss, (retriever + reader) / BATCH, rtol=1e-4)


@pytest.mark.parametrize("objective", ["marginal", "orqa"])
def test_a_trained_document_tower_scores_what_is_read(params, index, reading, objective):
    """With vectors of the tower as it is the loss is the same; with others it follows the tower, not the vectors."""
    batch = asked(np.array([reading[0][0, 0], reading[0][1, 2], -1, -1]))
    trained = task_of("qa", context(), {"qa.refresh_every": 1}).trained
    assert set(trained) == {"query_embedder", "document_embedder", "reader"}
    (loss, _), gradients = qa_gradients(objective, 1)(params, batch, index, None)
    np.testing.assert_allclose(loss, qa_gradients(objective)(params, batch, index, None)[0][0], rtol=1e-5)
    assert largest(gradients["document_embedder"]) > 1e-4


def joined(rows: np.ndarray, titles: bool) -> dict[str, np.ndarray]:
    """The questions joined with these rows on the host, as their examples are."""
    parts = []
    for example, row in enumerate(rows):
        title, body = CORPUS[row]
        title = title[: DOCUMENT - 3]
        body = body[: DOCUMENT - 3 - len(title)]
        query = QUESTIONS["query"][example][1 : QUESTIONS["query_length"][example] - 1]
        length = QUERY + DOCUMENT - (1 if titles else 2)
        laid = layouts.joint(query, body, length, SPECIAL, title=title if titles else None)
        arrays = {"joint": laid.ids.astype(np.uint16), "joint_length": np.int32(laid.used)}
        parts.append(arrays | {"body_start": np.int32(laid.used - len(body) - 1)})
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("titles", [True, False])
def test_a_joint_that_comes_with_the_batch_is_the_one_that_the_step_makes(index, titles):
    rows = np.arange(BATCH)
    made = reader_inputs(QUESTIONS["query"], QUESTIONS["query_length"], gather_passages(index, rows[:, None]), titles)
    given = batch_reader_input({**QUESTIONS, **joined(rows, titles)})
    for ours, theirs in zip(given, made, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_one_positive_passage_teaches_the_reader_and_the_beam_the_retriever(params, index, reading):
    """The reader's term is a softmax over the spans of the given passage, wherever that is retrieved."""
    rows, scores, _ = reading
    positives = np.array([rows[0, 0], rows[1, 4], rows[2, 1], rows[3, 2]])
    batch = asked(positives) | joined(positives, titles=False)
    task = task_of("qa", context(), {"qa.objective": "positive", "qa.beam": BEAM})
    (loss, metrics), gradient = graded(task)(params, batch, index, None)
    places = [rows[example].tolist().index(row) for example, row in enumerate(positives)]
    retriever = [np.logaddexp.reduce(scores[e].astype(np.float64)) - scores[e, place] for e, place in enumerate(places)]
    np.testing.assert_allclose(metrics["retriever_loss"], np.mean(retriever), rtol=1e-4)
    reader_input = flatten_passages(batch_reader_input(batch))
    table = np.asarray(MODEL.reader.read_spans(params, reader_input), np.float64)
    reader = []
    for example, row in enumerate(positives):
        spans = next(spans_of(np.tile(row, (BATCH, 1)), batch, example))
        values, right = np.array([table[example][span] for span, _ in spans]), [flag for _, flag in spans]
        reader.append(np.logaddexp.reduce(values) - np.logaddexp.reduce(values[right]))
    np.testing.assert_allclose(metrics["reader_loss"], np.mean(reader), rtol=1e-4)
    np.testing.assert_allclose(loss, np.mean(retriever) + np.mean(reader), rtol=1e-4)
    assert largest(gradient["query_embedder"]) > 1e-5 and largest(gradient["reader"]) > 1e-5
    assert largest(gradient["document_embedder"]) == 0.0 and metrics["answer_in_beam"] == 1.0


@pytest.mark.parametrize("objective", ["marginal", "orqa"])
def test_questions_without_an_answer_in_reach_teach_nothing(params, index, objective):
    (loss, metrics), gradients = qa_gradients(objective)(params, asked(np.full(BATCH, -1)), index, None)
    assert loss == 0.0 and largest(gradients) == 0.0
    assert metrics["accuracy"] == metrics["answer_in_passages"] == metrics["log_likelihood"] == 0.0


# --- the table of tasks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, separate, shared, retrieves",
    [
        ("mlm", {"reader"}, {"reader"}, False),
        ("ict", {"query_embedder", "document_embedder"}, {"embedder"}, False),
        ("realm", {"query_embedder", "document_embedder", "reader"}, {"embedder", "reader"}, True),
        ("qa", {"query_embedder", "reader"}, {"embedder", "reader"}, True),
    ],
)
def test_each_task_names_what_it_trains(name, separate, shared, retrieves):
    one_tower = tiny_context(one_device_mesh(), ROWS, tiny_realm(shared_tower=True))
    task = task_of(name, context())
    assert task.name == name and task.retrieves == retrieves
    assert set(task.trained) == separate
    assert set(task_of(name, one_tower).trained) == shared


def test_every_task_has_a_section_and_operations_and_a_text_in_the_report():
    assert list(TASKS) == list(TASK_SECTIONS) and {*TASKS} == {*EXAMPLE_FLOPS} == {*STAGES}


def test_streams_of_random_numbers_stay_as_they_are():
    """Examples and dropout follow from them: another number is another training. Of 5 other code draws; 6 and 9 to 12
    were drawn from by code that is gone."""
    streams = {"mlm": 1, "ict": 2, "realm": 3, "qa": 4, "closed_book": 7, "rerank": 8, "evidence_contrast": 13}
    found = {name: task.stream for name, task in TASKS.items()}
    assert found.items() >= streams.items() and len({*found.values()}) == len(found)
    assert not {*found.values()} & {5, 6, 9, 10, 11, 12}


@pytest.mark.parametrize(
    ("tasks", "batch", "parts"),
    [("mlm,realm", 48, 1), ("mlm,realm", 96, 2), ("mlm,realm", 4096, 8), ("mlm", 48, 8)],
)
def test_a_part_of_the_warm_up_is_no_larger_than_a_part_of_realm(tasks, batch, parts):
    config = default()
    config.tasks, config.optimizer.microbatches, config.mlm.batch_size = tasks, 8, batch
    config.realm.batch_size, config.realm.candidates = 24, 16  # 48 sequences a part
    run = SimpleNamespace(config=as_config(config), context=None)
    assert TASKS["mlm"](run).num_microbatches == parts


@pytest.mark.parametrize("name", ["ict", "mlm"])
def test_dropout_follows_the_key(params, name):
    loud = tiny_realm(layers=1, dropout=0.3)
    loss = jax.jit(functools.partial(loss_and_metrics, task_of(name, tiny_context(one_device_mesh(), ROWS, loud))))
    batch = MASKED | as_batch(document_rows(CORPUS[:BATCH]))
    one, again, other = (float(loss(params, batch, None, jax.random.key(seed))[0]) for seed in (1, 1, 2))
    assert one == again != other


def test_the_text_to_learn_from_is_set_by_the_config(people, tmp_path):
    def made(key, value):
        config = tiny_config(people)
        config.update_from_flattened_dict({key: value})
        return make_run(config, tmp_path, open_sources(people), jax.devices()[:1])

    assert made("seed", 0).sources.pretraining is not None
    sources = made("data.text", "passages").sources
    assert sources.pretraining_is_corpus and sources.pretraining is sources.passages
