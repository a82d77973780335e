"""Compare adapted encoders with the base encoder, on sentences of held-out documents.

Each held-out sentence is a query of two searches that need no label. Without a name it searches its document; complete
it searches its passage, from which we removed the sentence. The mean over sentences of nDCG@10 of the two (`MEAN_NDCG`)
must rise. The first query shares words with its passage, so an encoder that learned only to match words is better at
it, while it may be worse at questions. Therefore the second search (`WITHOUT_SENTENCE`) must not become worse, nor
recall of evaluation questions, if there are any. `docs/results/adaptation.md` compares this rule with questions: other
passages that have the name (`EVIDENCE`) do not tell good encoders from bad ones, so they are for information only.

The searches are those that users get: hybrid search, with token rerank if it is the default for the encoder. An encoder
whose vectors are better is of no use if words and token vectors find the same passages without it. Read `measure`.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.adaptation.record import Change, ChangeTable, Decision, Measurement
from realm_jax.config import INDEX, task_names
from realm_jax.data.evidence import Evidence
from realm_jax.data.held_out import HeldOutSentence, held_out_sentences, passages_without
from realm_jax.data.questions import Question
from realm_jax.data.store import PassageStore
from realm_jax.eval.prediction import Evaluator
from realm_jax.eval.question_metrics import QueryMetrics
from realm_jax.eval.retrieval_metrics import RANKED
from realm_jax.eval.significance import clustered_interval, paired_interval
from realm_jax.forward import Index, SearchPipeline
from realm_jax.indexing.token_file import fit_compression, vectors_and_tokens
from realm_jax.indexing.vector_cache import embed_with_cache
from realm_jax.models.layers import Params
from realm_jax.retrieval.bm25 import Bm25, language_of
from realm_jax.retrieval.embed import CorpusRows, embedded_batches
from realm_jax.retrieval.token_rerank import STORED_BYTES, StoredTokens
from realm_jax.run import Run
from realm_jax.tasks.answering import search_pipeline
from realm_jax.tasks.base import Task
from realm_jax.tasks.evidence_contrast import number_names
from realm_jax.train.checkpoints import SavedCheckpoint
from realm_jax.train.exported_model import MODEL, find_exported_model
from realm_jax.train.init_from import recorded_start
from realm_jax.train.recipe import recipe_tasks
from realm_jax.train.records import primary_metric
from realm_jax.train.restore import restore_params, saved_vectors

logger = logging.getLogger(__name__)

# Split of the evaluation questions, because `dev` questions would replace held-out documents.
QUESTIONS_SPLIT = "test"
QUESTION_PREFIX = "judged questions: "  # before the names of their metrics
MAX_SENTENCES = 2000  # held-out sentences, which give an interval of about ± 0.003
MIN_SENTENCES = 200  # held-out sentences, however short the time
WEIGHTS = (1.0, 0.5)  # interpolation weights of the trained encoders, in the order in which they are tried
TOKEN_BATCH = 64  # passages that a device encodes at a time for token rerank
DEPTH = RANKED + 1  # retrieved passages, one of which may be the sentence's
MAX_EXAMPLES = 5  # sentences of each kind in the report
VECTOR_SEARCH = SearchPipeline("vectors")

BASELINE = "start"  # row of the base encoder
MEAN_NDCG, MASKED, WITHOUT_SENTENCE = "mean_ndcg@10", "masked_ndcg@10", "removed_ndcg@10"
EVIDENCE, SENTENCE = "evidence_ndcg@10", "sentence_ndcg@10"
METRICS = {  # of sentences: name → title in the report
    MEAN_NDCG: "mean of the next two, which decides",
    MASKED: "sentence without a name, for its document: nDCG@10",
    WITHOUT_SENTENCE: "complete sentence, for its passage without that sentence: nDCG@10",
    EVIDENCE: "sentence without a name, for another passage that supports the name: nDCG@10",
    SENTENCE: "complete sentence, for its passage: nDCG@10",
}


def measure(run: Run, sentences: Sequence[HeldOutSentence], merge: float | None) -> Measurement:
    """Decide whether the trained encoders are promoted, and at which interpolation weight.

    Args:
        run: the run, all of whose tasks are trained.
        sentences: held-out sentences to search with.
        merge: interpolation weight; None tries `WEIGHTS`.
    """
    trained, base = restore_params(run, *last_checkpoint(run)), recorded_start(run, run.workdir)
    evaluator = AdaptEvaluator(run, sentences, run.sources.questions.get(QUESTIONS_SPLIT, []))
    pipeline = users_pipeline(run)

    @lru_cache
    def evaluate_at(weight: float) -> EncoderResult:
        params = interpolate_encoders(run, trained, base, weight)
        vectors = passage_vectors(run, params, weight)
        return EncoderResult(params, vectors, evaluator.metrics(params, vectors, pipeline))

    # --- Decide by the search that users get
    baseline, documents = evaluate_at(0.0), evaluator.document_numbers
    decision = choose_weight(
        _decide(weight, baseline.metrics, evaluate_at(weight).metrics, documents, pipeline)
        for weight in ((merge,) if merge else WEIGHTS)
    )
    adapted = evaluate_at(decision.weight)

    # --- Rows for information only: the trained encoders without interpolation, and searches by one of the two lists
    rows = {BASELINE: baseline.metrics, "adapted": adapted.metrics}
    if decision.weight != 1.0:
        rows["trained"] = evaluate_at(1.0).metrics
    rows["start_vectors"] = evaluator.metrics(baseline.params, baseline.vectors, VECTOR_SEARCH)
    rows["vectors"] = evaluator.metrics(adapted.params, adapted.vectors, VECTOR_SEARCH)
    rows["bm25"] = evaluator.metrics(baseline.params, baseline.vectors, SearchPipeline("bm25"))
    examples = _changed_examples(run.sources.passages, sentences, baseline.metrics, adapted.metrics)
    return Measurement(decision, compare_with_baseline(rows, documents), examples)


def users_pipeline(run: Run) -> SearchPipeline:
    """Return how an index with the adapted encoders searches if nothing is set."""
    return search_pipeline(task_names(run.config)[-1], run.config)


class EncoderResult(NamedTuple):
    """An evaluation of encoders.

    Attributes:
        params: their parameters.
        vectors: of the passages, [rows, width].
        metrics: of the search that users get.
    """

    params: Params
    vectors: NDArray[np.float32]
    metrics: QueryMetrics


def choose_weight(decisions: Iterable[Decision]) -> Decision:
    """Return the first decision, or a later one if the mean rises and the search without the sentence becomes worse.

    Both changes must be significant. So a later weight can only avoid a loss; it is no second chance for a gain.

    Args:
        decisions: one for each weight, in an iterator, because each needs an evaluation.
    """
    for decision in decisions:
        if not (decision.mean_ndcg.is_significant_gain and decision.without_sentence.is_significant_loss):
            break
        logger.info("weight %g: mean nDCG@10 rises, but falls without the sentence", decision.weight)
    return decision


def _decide(
    weight: float, before: QueryMetrics, after: QueryMetrics, documents: NDArray[np.int64], pipeline: SearchPipeline
) -> Decision:
    """Decide by the metrics of the base encoder and of encoders at a weight.

    Args:
        weight: interpolation weight of these encoders.
        before: metrics of the base encoder.
        after: metrics of these encoders.
        documents: see `compare`.
        pipeline: the search of both.
    """
    mean_ndcg = compare(before[MEAN_NDCG], after[MEAN_NDCG], documents)
    without = compare(before[WITHOUT_SENTENCE], after[WITHOUT_SENTENCE], documents)
    # Questions are compared by the primary metric of retrievers.
    metric = primary_metric({name.removeprefix(QUESTION_PREFIX): True for name in before if name not in METRICS})
    name = f"{QUESTION_PREFIX}{metric}"
    questions = compare(before[name], after[name]) if metric else Change()
    promoted = passes_promotion_test(mean_ndcg, without, questions)
    search = pipeline.search if pipeline.rerank is None else f"{pipeline.search} + {pipeline.reranker}"
    return Decision(promoted, weight, mean_ndcg, without, metric, questions, search)


def passes_promotion_test(mean_ndcg: Change, *vetoes: Change) -> bool:
    """Return True if mean nDCG@10 rises significantly, and nothing else falls significantly."""
    return mean_ndcg.is_significant_gain and not any(veto.is_significant_loss for veto in vetoes)


def compare(
    before: NDArray[np.float64], after: NDArray[np.float64], documents: NDArray[np.int64] | None = None
) -> Change:
    """Compare the values of a metric, over the queries that have it.

    Args:
        before: values of the base encoder, float64 [queries]; NaN for queries without the metric.
        after: values of the other encoder, likewise.
        documents: number of the document of each query, int64 [queries]. Sentences of one document gain or lose
            together, so the interval is clustered by document. None for independent queries.
    """
    known = ~(np.isnan(before) | np.isnan(after))
    if not known.any():
        return Change()
    before, after = before[known], after[known]
    count, start, value, change = len(before), float(before.mean()), float(after.mean()), float((after - before).mean())
    if documents is None:
        return Change(count, start, value, change, *paired_interval(before, after))
    low, high = clustered_interval(after - before, documents[known])
    return Change(count, start, value, change, low, high, len(np.unique(documents[known])))


def compare_with_baseline(rows: Mapping[str, QueryMetrics], documents: NDArray[np.int64]) -> ChangeTable:
    """Compare all metrics of all encoders with those of the base encoder.

    Args:
        rows: encoder → its metrics; BASELINE is one of the keys.
        documents: number of the document of each sentence, [sentences].
    """
    before = rows[BASELINE]
    clusters = {name: documents if name in METRICS else None for name in before}
    return {
        encoder: {name: compare(before[name], after[name], clusters[name]) for name in before}
        for encoder, after in rows.items()
    }


# --- searches ---------------------------------------------------------------------------------------------------------


def find_sentences(
    run: Run, evidence: Evidence, share: float, max_sentences: int = MAX_SENTENCES
) -> list[HeldOutSentence]:
    """Return held-out sentences of a run.

    Args:
        run: has passages and tokenizer.
        evidence: the spans to hide.
        share: share of the documents that is held out.
        max_sentences: number of sentences at most, evenly spread over the corpus.
    """
    sources = run.sources
    return held_out_sentences(sources.passages, sources.tokenizer, run.lengths.query, share, max_sentences, evidence)


class TokenCache:
    """Token vectors of the passages that searches have found so far, by one passage encoder, as an index stores them.

    Most searches of an evaluation find the same passages, so each is encoded once.
    """

    def __init__(self, run: Run, params: Params) -> None:
        """Begin without any, compressed as the index of the run stores them, or as it would."""
        exported = find_exported_model(run.workdir / MODEL)
        stored = None if exported is None else exported.token_compression()
        self._run, self._encoders = run, {name: params[name] for name in run.model.embedder_names}
        self._compression = fit_compression(run, self._encoders) if stored is None else stored
        dimensions = self._compression.projection.shape[1]
        length = min(STORED_BYTES // dimensions, int(run.corpus.lengths.max()))
        self._vectors = np.zeros((run.context.rows, length, dimensions), np.int8)  # [rows, tokens, dimensions]
        self._is_known = np.zeros(run.context.rows, bool)  # [rows]

    def stored(self, rows: NDArray[np.integer], changed: "ShortenedPassages | None" = None) -> StoredTokens:
        """Return token vectors on the devices, in which only those of some passages are meaningful.

        Args:
            rows: these passages, −1 for none.
            changed: passages whose token vectors are those without a sentence; None for none.
        """
        new = np.setdiff1d(rows[rows >= 0], np.flatnonzero(self._is_known))
        self._vectors[new], self._is_known[new] = self._tokens(self._run.corpus.take(new)), True
        vectors = self._vectors
        if changed is not None:
            vectors = vectors.copy()
            vectors[changed.rows] = self._tokens(changed.passages)
        return self._run.stored_tokens(vectors, self._compression)

    def _tokens(self, passages: CorpusRows) -> NDArray[np.int8]:
        """Return the token vectors of passages, [passages, tokens, dimensions]; zeros after the last token."""
        vectors = np.zeros((len(passages.ids), *self._vectors.shape[1:]), np.int8)
        embed = self._run.embedder((self._encoders, self._compression), vectors_and_tokens)
        for numbers, (_, tokens) in embedded_batches(embed, passages, TOKEN_BATCH * self._run.mesh.size):
            count = min(tokens.shape[1], vectors.shape[1])
            vectors[numbers, :count] = tokens[:, :count]
        return vectors


class ShortenedPassages(NamedTuple):
    """Passages without one of their sentences.

    Attributes:
        positions: of the sentences, in the order of the passages.
        rows: of the passages, int64 [shortened].
        passages: their tokens.
        texts: row → text without the title.
    """

    positions: list[int]
    rows: NDArray[np.int64]
    passages: CorpusRows
    texts: dict[int, str]


@dataclass(frozen=True)
class AdaptEvaluator:
    """Measures nDCG@10 of held-out sentences, and recall of evaluation questions if there are any.

    Attributes:
        run: the run.
        sentences: held-out sentences.
        questions: evaluation questions.
    """

    run: Run
    sentences: Sequence[HeldOutSentence]
    questions: Sequence[Question] = ()

    @cached_property
    def document_numbers(self) -> NDArray[np.int64]:
        """Return the number of each sentence's document, from 0 in their order, int64 [sentences]."""
        store = self.run.sources.passages
        return number_names(store.document_id(sentence.row) for sentence in self.sentences)

    @cached_property
    def shortened_passages(self) -> ShortenedPassages:
        """Return the passages of sentences without them, if they are long enough."""
        sources, store = self.run.sources, self.run.sources.passages
        found = passages_without(store, sources.tokenizer, self.run.lengths.document, self.sentences)
        names = ("document", "document_length", "document_title_length")
        columns = (
            np.array([passage.arrays[name] for passage in found], column.dtype).reshape(-1, *column.shape[1:])
            for name, column in zip(names, self.run.corpus, strict=True)
        )
        positions = [passage.position for passage in found]
        rows = np.array([self.sentences[position].row for position in positions], np.int64)
        texts = {int(row): passage.text for row, passage in zip(rows, found, strict=True)}
        return ShortenedPassages(positions, rows, CorpusRows(*columns), texts)

    @cached_property
    def shortened_bm25(self) -> Bm25:
        """Return BM25 over the corpus with the shortened passages in their places."""
        store, texts = self.run.sources.passages, self.shortened_passages.texts
        corpus_texts = (f"{store.title(row)} {texts.get(row, store.text(row))}" for row in range(len(store)))
        return Bm25(corpus_texts, self.run.bm25_language or language_of(store))

    def metrics(self, params: Params, vectors: NDArray[np.floating], pipeline: SearchPipeline) -> QueryMetrics:
        """Return the metrics of a search, an array per metric with a value for each query.

        Args:
            params: parameters of the encoders.
            vectors: of the passages, [rows, width].
            pipeline: how passages are found.

        Returns:
            METRICS of the sentences, and recall metrics of the questions; NaN for queries without the metric.
        """
        metrics = self.sentence_metrics(params, vectors, pipeline)

        # Search for passages without the sentence, in a corpus with these in the places of the complete ones.
        without = np.full(len(self.sentences), np.nan)  # [sentences]
        shortened = self.shortened_passages
        if shortened.positions:
            changed_vectors = vectors.copy()  # [rows, width]
            changed_vectors[shortened.rows] = self.run.embed(params, rows=shortened.passages)
            queries = [Question(self.sentences[position].text, []) for position in shortened.positions]
            bm25 = None if pipeline.search == "vectors" else self.shortened_bm25
            evaluator = Evaluator(self.run, queries, pipeline, bm25=bm25)
            changed_index = self.run.index(changed_vectors)
            retrieved = self._retrieve(evaluator, params, changed_index, RANKED, shortened)  # [shortened, RANKED]
            without[shortened.positions] = first_hit_ndcg(retrieved == shortened.rows[:, None])
        metrics[WITHOUT_SENTENCE] = without

        # The mean of both searches, or the one that a sentence has; if it has none, that of the complete sentence.
        mean = np.ma.masked_invalid(np.stack([metrics[MASKED], without])).mean(axis=0)  # [sentences]
        metrics[MEAN_NDCG] = np.where(np.ma.getmaskarray(mean), metrics[SENTENCE], np.ma.getdata(mean))
        metrics = {name: metrics[name] for name in METRICS}

        if self.questions:
            evaluator = Evaluator(self.run, self.questions, pipeline)
            recalls = evaluator.recall_values(
                self._retrieve(evaluator, params, self.run.index(vectors), evaluator.depth)
            )
            metrics |= {f"{QUESTION_PREFIX}{name}": values for name, values in recalls.items()}
        return metrics

    def _retrieve(
        self, evaluator: Evaluator, params: Params, index: Index, depth: int, changed: ShortenedPassages | None = None
    ) -> NDArray[np.int64]:
        """Return the rows that a search finds, with each passage encoded once for token rerank.

        Args:
            evaluator: has queries and pipeline.
            params: parameters of the encoders.
            index: that is searched.
            depth: passages of each query.
            changed: passages of the index that lack a sentence; None for none.

        Returns:
            [queries, depth].
        """
        rerank = evaluator.pipeline.rerank
        if rerank is not None and rerank.name == "tokens":
            search = replace(evaluator, pipeline=SearchPipeline(evaluator.pipeline.search))
            first = search.ranking(params, index, rerank.passages).rows  # [queries, rerank.passages]
            index = index._replace(tokens=self._tokens_by(params).stored(first, changed))
        return evaluator.retrieve(params, index, depth)

    def _tokens_by(self, params: Params) -> TokenCache:
        """Return the token vectors by a passage encoder, which is the same for all if only queries' is trained."""
        passage_encoder = params[self.run.model.embedder_names[-1]]
        for known, tokens in self._token_caches:
            if all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), known, passage_encoder))):
                return tokens
        self._token_caches.append((passage_encoder, TokenCache(self.run, params)))
        return self._token_caches[-1][1]

    @cached_property
    def _token_caches(self) -> list[tuple[Params, TokenCache]]:
        """Return passage encoders that were used, and their token vectors."""
        return []

    def sentence_metrics(self, params: Params, vectors: NDArray[np.floating], pipeline: SearchPipeline) -> QueryMetrics:
        """Return the metrics of the sentences over unchanged passages.

        Args:
            params: parameters of the encoders.
            vectors: of the passages, [rows, width].
            pipeline: how passages are found.
        """
        index = self.run.index(vectors)
        masked_queries = [Question(sentence.masked or sentence.text, []) for sentence in self.sentences]
        unmasked_queries = [Question(sentence.text, []) for sentence in self.sentences]
        # Rows of passages, [sentences, DEPTH] each, −1 for none
        masked, unmasked = (
            self._retrieve(Evaluator(self.run, queries, pipeline), params, index, DEPTH)
            for queries in (masked_queries, unmasked_queries)
        )
        store = self.run.sources.passages
        hits = np.zeros((3, len(self.sentences), RANKED), bool)  # of document, of evidence, of passage
        for number, sentence in enumerate(self.sentences):
            document, rows = store.document_id(sentence.row), masked[number]  # rows: [DEPTH]
            other_rows = rows[rows != sentence.row][:RANKED]
            hits[0, number] = [row >= 0 and store.document_id(int(row)) == document for row in rows[:RANKED]]
            hits[1, number, : len(other_rows)] = np.isin(other_rows, sentence.evidence)
            hits[2, number] = unmasked[number, :RANKED] == sentence.row
        of_document, of_evidence, of_passage = map(first_hit_ndcg, hits)
        return {
            MASKED: np.where([bool(sentence.masked) for sentence in self.sentences], of_document, np.nan),
            EVIDENCE: np.where([bool(sentence.evidence) for sentence in self.sentences], of_evidence, np.nan),
            SENTENCE: of_passage,
        }


def first_hit_ndcg(hits: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return nDCG of each query with one relevant answer: 1 / log2(1 + rank of the first hit), 0 without a hit.

    Args:
        hits: True for passages that are right, the best first, [queries, depth].
    """
    return np.where(hits.any(axis=1), 1 / np.log2(2.0 + hits.argmax(axis=1)), 0.0)


def _changed_examples(
    store: PassageStore, sentences: Sequence[HeldOutSentence], before: QueryMetrics, after: QueryMetrics
) -> dict[str, list[dict[str, str]]]:
    """Return up to MAX_EXAMPLES sentences whose passage only the adapted, or only the base encoder retrieves."""
    examples = dict[str, list[dict[str, str]]]()
    for kind, finder, other in (("gained", after, before), ("lost", before, after)):
        entries = []
        for metric, passage in ((EVIDENCE, "one that tells it"), (MASKED, "its own")):
            for number in np.flatnonzero((finder[metric] > 0) & (other[metric] == 0)).tolist():
                sentence = sentences[number]
                row = sentence.evidence[0] if metric == EVIDENCE else sentence.row
                entry = {"query": sentence.masked, "what": passage, "title": store.title(row), "text": store.text(row)}
                entries.append(entry)
        examples[kind] = entries[:MAX_EXAMPLES]
    return examples


# --- encoders ---------------------------------------------------------------------------------------------------------


def interpolate_encoders(run: Run, trained: Params, base: Params, weight: float) -> Params:
    """Return the trained parameters with encoders (1 − weight) × base + weight × trained, array by array.

    Args:
        run: has the names of the encoders.
        trained: parameters after training.
        base: parameters of the base encoder.
        weight: 0 to 1.
    """

    def interpolate(a: jax.Array, b: jax.Array) -> jax.Array:
        return ((1 - weight) * a + weight * b).astype(a.dtype)

    encoders = {name: jax.tree.map(interpolate, base[name], trained[name]) for name in run.model.embedder_names}
    return trained | encoders


def passage_vectors(run: Run, params: Params, weight: float) -> NDArray[np.float32]:
    """Return the passages' vectors at an interpolation weight, [rows, width].

    Args:
        run: the run, all of whose tasks are trained.
        params: from `interpolate_encoders`.
        weight: of these parameters.

    Returns:
        The vectors of the index or of the last checkpoint if they are the same; otherwise new ones, which the cache
        stores.
    """
    trains_passages = any(trains_passage_encoder(task) for task in recipe_tasks(run))
    vectors = indexed_vectors(run) if weight == 0.0 else None
    if vectors is None and (weight == 1.0 or not trains_passages):
        vectors = saved_vectors(run, last_checkpoint(run)[1])
    return embed_with_cache(run, params, bar=True) if vectors is None else vectors


def indexed_vectors(run: Run) -> NDArray[np.float32] | None:
    """Return the passages' vectors by the base encoder, [rows, width]; None if the run has no index of its corpus."""
    exported = find_exported_model(run.workdir / MODEL)
    if exported is None or exported.task != INDEX:
        return None
    return exported.vectors(run.sources.passages.fingerprint)


def trains_passage_encoder(task: Task) -> bool:
    """Return True if a task changes the passages' vectors."""
    return task.run.model.embedder_names[-1] in task.trained


def last_checkpoint(run: Run) -> tuple[str, SavedCheckpoint]:
    """Return the last task, which is trained, and its newest checkpoint."""
    last = task_names(run.config)[-1]
    saved = SavedCheckpoint.newest(run.workdir / last / "checkpoints")
    assert saved is not None, "training is done"
    return last, saved
