"""Answer questions: retrieve, read, and slice the answer out of the original text of its passage.

`Evaluator` holds a set of questions as arrays and measures retrieval and answers with any parameters and index. Read
next: `answer_matching.py`, which compares answers, and `retrieval_metrics.py`, which scores retrieval.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.config import QaConfig
from realm_jax.data.examples import (
    Bm25Hits,
    Example,
    cloze_pieces,
    query_arrays,
    row_has_answer,
    truncated_body,
    with_reader_query,
)
from realm_jax.data.questions import Question
from realm_jax.eval.answer_matching import contains_pattern, exact_match, find_answer, normalize
from realm_jax.eval.retrieval_metrics import (
    answer_hits,
    documents_of,
    gold_hits,
    hit_at_k,
    mean_by_group,
    rank_measures,
)
from realm_jax.forward import Index, SearchPipeline, StaticContext, read_question, retrieve_and_rerank
from realm_jax.mesh import to_host
from realm_jax.models.layers import Params
from realm_jax.models.question_reader import NoReader, PassageReading, QuestionReader, ReaderText
from realm_jax.retrieval.bm25 import Bm25
from realm_jax.retrieval.fusion import FUSION_DEPTH, FusedRanking
from realm_jax.run import Run, put_batch

SPANS = 20  # most probable spans of each passage; more change an answer's probability little
GROUPED_BY = "replaced_words"  # a question field by which recall is also grouped, if questions have it


class ReadPassage(NamedTuple):
    """A passage that was read for a question.

    Attributes:
        row: row of the corpus.
        probability: p(z|x) among the passages that were read.
        span: [start, end) of its best answer in characters.
    """

    row: int
    probability: float
    span: tuple[int, int]


class Answer(NamedTuple):
    """An answer, sliced out of its passage.

    Attributes:
        text: text of the answer.
        probability: p(y|x).
        row: row of the corpus; -1 if no passage was retrieved.
        span: [start, end) in the passage's characters.
    """

    text: str
    probability: float
    row: int
    span: tuple[int, int]


class Prediction(NamedTuple):
    """The answers to a question and the passages that were retrieved and read.

    Attributes:
        nbest: different answers, the most probable first, at least one; '' in row -1 if no passage was retrieved.
        candidates: the passages that were read.
        retrieved: rows of the best passages, [answering.retrieved] int32, those that were read first; -1 if BM25
            returned fewer.
        scores: scores of these passages, [answering.retrieved] float32.
        ranks: their ranks by vectors, by BM25 and, if there is one, by the reranker, [answering.retrieved, 2 or 3]
            int32, see `SearchPipeline.ranks_by_stage`.
        no_answer: p(no answer|x), by a reader that gives one.
    """

    nbest: list[Answer]
    candidates: list[ReadPassage]
    retrieved: NDArray[np.int32]
    scores: NDArray[np.float32]
    ranks: NDArray[np.int32]
    no_answer: float = 0.0

    @property
    def answer(self) -> str:
        """Return the most probable answer."""
        return self.nbest[0].text

    @property
    def probability(self) -> float:
        """Return the probability of the most probable answer."""
        return self.nbest[0].probability


def answer_key(text: str) -> str:
    """Return a text that occurrences of one answer have in common: normalized, or as it is if nothing is left."""
    return normalize(text) or text


def merge(occurrences: Iterable[Answer], aggregate: str) -> list[Answer]:
    """Merge the occurrences of each answer, which have the same `answer_key`.

    Args:
        occurrences: spans of the passages.
        aggregate: 'marginal' sums the probabilities of the occurrences; 'max' takes the highest.

    Returns:
        The most probable occurrence of each answer with the probability of all, the most probable answer first.
    """
    same: dict[str, list[Answer]] = {}
    for occurrence in occurrences:
        same.setdefault(answer_key(occurrence.text), []).append(occurrence)
    best = [max(group, key=lambda answer: answer.probability) for group in same.values()]
    if aggregate == "marginal":
        totals = [sum(answer.probability for answer in group) for group in same.values()]
        best = [answer._replace(probability=total) for answer, total in zip(best, totals, strict=True)]
    return sorted(best, key=lambda answer: -answer.probability)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _find(
    qa: QaConfig, context: StaticContext, pipeline: SearchPipeline, depth: int, params: Params, batch: Any, index: Index
) -> FusedRanking:
    """Return the `depth` best passages, [batch, depth]. One compiled program serves all question sets of a run."""
    return retrieve_and_rerank(qa, context, params, batch, index, None, depth, pipeline)[0]


class _Read(NamedTuple):
    """The result of `_read` for each question of a batch.

    Attributes:
        retrieved: rows, [batch, depth].
        scores: [batch, depth].
        ranks: [batch, depth, 2 or 3], see `FusedRanking`.
        prior: p(z|x), [batch, passages].
        starts: first token of each span in the passage's body, the most probable span first, [batch, passages, spans].
        widths: tokens of each span after the first, [batch, passages, spans].
        log_p: log p(span|z,x), [batch, passages, spans]; NEG_INF or less if a passage has fewer spans.
    """

    retrieved: Any
    scores: Any
    ranks: Any
    prior: Any
    starts: Any
    widths: Any
    log_p: Any


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _read(
    qa: QaConfig, context: StaticContext, pipeline: SearchPipeline, depth: int, spans: int, params: Params, batch: Any,
    index: Index,
) -> _Read:  # fmt: skip
    """Retrieve `depth` passages, read the first, and take the most probable spans of each."""
    width = context.model.reader.span_width
    read = read_question(qa, context, params, batch, index, None, max(depth, qa.passages), pipeline)
    flat = read.spans.reshape(*read.prior.shape, -1)  # [batch, passages, length · width]
    log_p, positions = jax.lax.top_k(flat, min(spans, flat.shape[-1]))  # [batch, passages, spans]
    starts = positions // width - read.reader_input.body_start[..., None]
    beam = read.beam
    return _Read(beam.rows, beam.scores, beam.ranks, jnp.exp(read.prior), starts, positions % width, log_p)


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Answer a set of questions from a run's corpus, and measure the results.

    Attributes:
        run: with corpus, networks and mesh.
        questions: in the order of all results.
        pipeline: how passages are found.
        cloze: the reader gets questions as sentences with a blank (`cloze_pieces`).
        at_a_time: questions of a batch; None for `evaluation.batch_size`.
        reader: reads the passages in place of the run's own; None for the run's.
        bm25: the index by words of other passages; None for that of the run.
    """

    run: Run
    questions: Sequence[Question]
    pipeline: SearchPipeline = SearchPipeline()
    cloze: bool = False
    at_a_time: int | None = None
    reader: QuestionReader | NoReader | None = None
    bm25: Bm25 | None = None

    @property
    def batch_size(self) -> int:
        """Return the number of questions in a batch, rounded up to a multiple of the devices."""
        size: int = self.at_a_time or self.run.config.evaluation.batch_size
        return size + -size % self.run.mesh.size

    @cached_property
    def queries(self) -> list[Example]:
        """Return the arrays of each question, with BM25's list if it takes part in the search."""
        tokenizer, length = self.run.sources.tokenizer, self.run.lengths.query
        texts = [question.question for question in self.questions]
        encoded = tokenizer.encode_batch(texts)
        rows = [query_arrays(np.asarray(pieces.ids, np.int32), length, tokenizer) for pieces in encoded]
        if self.cloze:  # only the reader's query has a blank
            blanks = (query_arrays(cloze_pieces(text, tokenizer), length, tokenizer) for text in texts)
            rows = [row | with_reader_query(blank) for row, blank in zip(rows, blanks, strict=True)]
        if self.pipeline.search != "vectors":
            rows = [row | self._bm25_hits.arrays(number) for number, row in enumerate(rows)]
        return rows

    @cached_property
    def _batches(self) -> list[dict[str, NDArray]]:
        """Return the arrays of all questions; the last batch is padded with its first question."""
        rows, size = self.queries, self.batch_size
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        parts = [part + [part[0]] * (size - len(part)) for part in parts]
        return [{key: np.stack([row[key] for row in part]) for key in part[0]} for part in parts]

    @cached_property
    def _bm25_hits(self) -> Bm25Hits:
        """Search with BM25 for all questions, as deep as passages are retrieved or read."""
        return self._search_bm25(max(self.depth, self.run.answering_qa.passages))

    def _search_bm25(self, depth: int) -> Bm25Hits:
        texts = [question.question for question in self.questions]
        if self.bm25 is not None:
            return Bm25Hits(*self.bm25.scored(texts, max(depth, FUSION_DEPTH)))
        return self.run.bm25_search(texts, depth)

    @property
    def depth(self) -> int:
        """Return the number of passages retrieved for each question: `answering.retrieved`, or all."""
        return min(self.run.config.answering.retrieved, self.run.context.rows)

    def retrieve(self, params: Params, index: Index, depth: int = 0) -> NDArray[np.int64]:
        """Retrieve the best passages for every question.

        Args:
            params: all parameters.
            index: index that is searched.
            depth: passages for each question; 0 for `answering.retrieved`.

        Returns:
            Rows [questions, depth] int64.
        """
        depth = min(depth, self.run.context.rows) or self.depth
        if self.pipeline == SearchPipeline("bm25"):
            hits = self._bm25_hits if depth <= self._bm25_hits.rows.shape[1] else self._search_bm25(depth)
            return hits.rows[:, :depth].astype(np.int64)
        rows: NDArray[np.int64] = self.ranking(params, index, depth).rows.astype(np.int64)
        return rows

    def ranking(self, params: Params, index: Index, depth: int) -> FusedRanking:
        """Search on the devices for every question.

        Args:
            params: all parameters.
            index: index that is searched.
            depth: passages for each question.

        Returns:
            Arrays [questions, depth or all rows, …].
        """
        run, qa = self.run, self.run.config.qa
        batches = (put_batch(run.mesh, batch) for batch in self._batches)
        parts = [_find(qa, run.context, self.pipeline, depth, params, batch, index) for batch in batches]
        columns = [np.concatenate([*map(to_host, column)]) for column in zip(*parts, strict=True)]
        return FusedRanking(*(column[: len(self.questions)] for column in columns))

    def recall(self, params: Params, index: Index) -> dict[str, Any]:
        """Return means of the retrieval metrics of `retrieve`: see `recall_of`.

        Args:
            params: all parameters.
            index: index that is searched.
        """
        return self.recall_of(self.retrieve(params, index))

    def recall_of(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """Return metric → mean for rows [questions, depth] that any search retrieved.

        recall@k and `rank_measures` are over the questions with a gold passage, answer_recall@k is over those with
        answers. k is in DEPTHS, up to the depth.
        """
        values = self.recall_values(rows)
        recalls: dict[str, Any] = {name: float(scores.mean()) for name, scores in values.items()}
        groups = [question.fields.get(GROUPED_BY) for question in self.questions if question.gold]
        if "recall@5" in values and None not in groups:
            recalls[f"recall@5_by_{GROUPED_BY}"] = mean_by_group(values["recall@5"], groups)
        return recalls

    def recall_values(self, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """Return metric → values of the questions that have it, in their order, for rows [questions, depth]."""
        store = self.run.sources.passages
        answered = [number for number, question in enumerate(self.questions) if question.answers]
        gold = [number for number, question in enumerate(self.questions) if question.gold]
        hits: dict[str, NDArray[np.bool_]] = {}
        ranks: dict[str, NDArray[np.float64]] = {}
        if answered:
            questions = [self.questions[number] for number in answered]
            answers, is_regex = [q.answers for q in questions], [q.is_regex for q in questions]
            hits["answer_recall"] = answer_hits(store, rows[answered], answers, is_regex)
        if gold:
            golds = [self.questions[number].gold for number in gold]
            hits["recall"] = gold_hits(store, rows[gold], golds)
            ranks = rank_measures(documents_of(store, rows[gold]), golds)
        recalls = {f"{name}@{k}": has_hit for name, hit in hits.items() for k, has_hit in hit_at_k(hit).items()}
        return {name: values.astype(np.float64) for name, values in (recalls | ranks).items()}

    def predict(self, params: Params, index: Index) -> list[Prediction]:
        """Answer every question.

        Args:
            params: all parameters.
            index: index that is searched.
        """
        return [prediction for batch in self.predict_batches(params, index) for prediction in batch]

    def predict_batches(self, params: Params, index: Index) -> Iterator[list[Prediction]]:
        """Answer `batch_size` questions at a time. Arguments: see `predict`."""
        run, remaining = self.run, len(self.questions)
        for batch in self._batches:
            placed = put_batch(run.mesh, batch)
            if self.reader is None:
                outputs = _read(run.answering_qa, run.context, self.pipeline, self.depth, SPANS, params, placed, index)
                parts = zip(*map(to_host, outputs), strict=True)
                yield [self._assemble(_Read(*question)) for question in [*parts][:remaining]]
            else:
                depth = max(self.depth, run.answering_qa.passages)
                ranking = _find(run.config.qa, run.context, self.pipeline, depth, params, placed, index)
                rankings = zip(*map(to_host, ranking), strict=True)
                questions = self.questions[-remaining:]
                yield self._read_texts(self.reader, questions, [FusedRanking(*ranks) for ranks in rankings])
            remaining -= len(batch["query"])

    def exact_match(self, predictions: Sequence[Prediction]) -> float | None:
        """Return the share of right predictions among the questions with answers; None if no question has answers."""
        right = [
            exact_match(prediction.answer, question.answers, question.is_regex)
            for prediction, question in zip(predictions, self.questions, strict=True)
            if question.answers
        ]
        return float(np.mean(right)) if right else None

    def reader_oracle(self, question: Question, prediction: Prediction) -> bool:
        """Return True if the reader could have chosen a right span, by its tokens as in ORQA.

        If answers are regular expressions, it is True if one matches anywhere in the text of a passage that was read.

        Args:
            question: with answers.
            prediction: with the passages that were read.
        """
        store, lengths, reader = self.run.sources.passages, self.run.lengths, self.reader
        rows = [candidate.row for candidate in prediction.candidates]
        if isinstance(reader, QuestionReader):  # it reads all of the text
            if question.is_regex:
                return any(contains_pattern(store.text(row), question.answers) for row in rows)
            longest = self.run.config.answering.answer_tokens
            pointable_texts = [answer for answer in question.answers if 0 < reader.token_count(answer) <= longest]
            return any(find_answer(store.text(row), pointable_texts) for row in rows)
        if question.is_regex:
            for row in rows:  # only the text that is read, after truncation
                ends = self._offsets(row)[: len(truncated_body(store, row, lengths)), 1]
                if contains_pattern(store.text(row)[: int(ends.max(initial=0))], question.answers):
                    return True
            return False
        tokenizer, longest = self.run.sources.tokenizer, self.run.context.model.reader.span_width
        forms = (form for answer in question.answers for form in tokenizer.forms(answer))
        encoded = [np.asarray(form, tokenizer.dtype) for form in forms]
        pointable = [answer for answer in encoded if 0 < len(answer) <= longest]
        return any(row_has_answer(store, row, pointable, lengths) for row in rows)

    def _assemble(self, read: _Read) -> Prediction:
        """Return a question's passages and its answers, from the spans of the run's own reader."""
        passages: list[tuple[int, float, PassageReading]] = []
        within, prior = np.exp(read.log_p).tolist(), read.prior.tolist()
        for rank, row in enumerate(read.retrieved.tolist()[: len(prior)]):
            if row < 0:
                continue
            offsets = self._offsets(row)
            spans = []
            for first, more in zip(read.starts[rank].tolist(), read.widths[rank].tolist(), strict=True):
                if not len(offsets) or first < 0:
                    spans.append((0, 0))
                    continue
                last = min(first + more, len(offsets) - 1)
                spans.append((int(offsets[min(first, last), 0]), int(offsets[last, 1])))
            passages.append((row, prior[rank], PassageReading(spans, within[rank])))
        return self._prediction(read.retrieved, read.scores, read.ranks, passages)

    def _read_texts(
        self, reader: QuestionReader | NoReader, questions: Sequence[Question], rankings: Sequence[FusedRanking]
    ) -> list[Prediction]:
        """Return the predictions of a reader of texts, for as many questions as have a ranking."""
        store, answering, count = self.run.sources.passages, self.run.config.answering, self.run.answering_qa.passages
        rankings_with_rows: list[tuple[FusedRanking, list[tuple[int, float]]]] = []  # ranking, and rows with p(z|x)
        inputs: list[ReaderText] = []
        for question, ranking in zip(questions, rankings, strict=False):  # a padded batch has more rankings
            scores = ranking.scores[:count].astype(np.float64)
            prior = np.exp(scores - np.logaddexp.reduce(scores)).tolist()
            rows = [(row, p) for row, p in zip(ranking.rows[:count].tolist(), prior, strict=True) if row >= 0]
            inputs += [ReaderText(question.question, store.title(row), store.text(row)) for row, _ in rows]
            rankings_with_rows.append((ranking, rows))
        readings = iter(reader.read(inputs, answering.answer_tokens, SPANS))
        predictions = []
        for ranking, rows in rankings_with_rows:
            passages = [(row, prior, next(readings)) for row, prior in rows]
            predictions.append(self._prediction(ranking.rows, ranking.scores, ranking.ranks, passages))
        return predictions

    def _prediction(
        self, retrieved: NDArray[np.int32], scores: NDArray[np.float32], ranks: NDArray[np.int32],
        passages: list[tuple[int, float, PassageReading]],
    ) -> Prediction:  # fmt: skip
        """Return a prediction, p(y|x) summed over the spans that were read.

        Args:
            retrieved: see `Prediction`.
            scores: see `Prediction`.
            ranks: see `Prediction`.
            passages: row, p(z|x) and spans of the passages that were read.
        """
        candidates = [ReadPassage(row, prior, (*spans, (0, 0))[0]) for row, prior, (spans, _, _) in passages]
        occurrences: list[Answer] = []
        for row, prior, (spans, within, _) in passages:
            text = self.run.sources.passages.text(row)
            scored = zip(spans, within, strict=True)
            occurrences += [Answer(text[slice(*span)], prior * p, row, span) for span, p in scored if p > 0]
        nbest = merge(occurrences, self.run.config.answering.aggregate)
        empty = Answer("", 0.0, candidates[0].row if candidates else -1, (0, 0))
        no_answer = sum(prior * reading.no_answer for _, prior, reading in passages)
        return Prediction(nbest or [empty], candidates, retrieved, scores, ranks, no_answer)

    @cached_property
    def _offsets(self) -> Callable[[int], NDArray[np.int64]]:
        """Return a cached function: row → start and end of each body token in the text, int64 [tokens, 2]."""
        tokenizer, store = self.run.sources.tokenizer, self.run.sources.passages

        def offsets(row: int) -> NDArray[np.int64]:
            text = store.text(row)
            stored = tokenizer.offsets_of(text, store.body_tokens(row))
            # A body that was cut within a word has other tokens at its ends only.
            return np.array(tokenizer.encode(text).offsets).reshape(-1, 2) if stored is None else stored

        return lru_cache(4096)(offsets)
