"""Answer questions: retrieve, read, and slice the answer out of the original text of its passage.

`Evaluator` holds a set of questions as arrays and measures retrieval and answers with any parameters and index. Not
here: what counts as right (`answer_matching.py`) and how retrieval is scored (`retrieval_metrics.py`).
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
from realm_jax.eval.answer_matching import contains_pattern, exact_match, normalise
from realm_jax.eval.retrieval_metrics import (
    answer_hits,
    documents_of,
    gold_hits,
    hit_at_k,
    mean_by_group,
    rank_measures,
)
from realm_jax.forward import Index, Rerank, StaticContext, read_question, retrieve_and_rerank
from realm_jax.mesh import to_host
from realm_jax.models.layers import Params
from realm_jax.retrieval.fusion import FusedRanking
from realm_jax.run import Run, put_batch

SPANS = 20  # likeliest spans of each passage that answers are made of; more change an answer's probability little
GROUPED_BY = "replaced_words"  # a question field that recall is also given by, where questions have it


class ReadPassage(NamedTuple):
    """A passage read for a question. probability: p(z|x) among those read; span: characters of its best answer."""

    row: int
    probability: float
    span: tuple[int, int]


class Answer(NamedTuple):
    """A text as it stands in the passage of a row, at `span` (characters), with its probability."""

    text: str
    probability: float
    row: int
    span: tuple[int, int]


class Prediction(NamedTuple):
    """nbest: different answers, the likeliest first, at least one, '' in row −1 where no passage was found; candidates:
    the passages that were read.

    retrieved, scores: rows and scores of the best passages, [answering.retrieved], those that were read first,
    −1 where words found no more; ranks [answering.retrieved, 2]: their places in the lists of vectors and of words, as
    of `retrieval.fusion.FusedRanking`.
    """

    nbest: list[Answer]
    candidates: list[ReadPassage]
    retrieved: NDArray[np.int32]
    scores: NDArray[np.float32]
    ranks: NDArray[np.int32]

    @property
    def answer(self) -> str:
        """The likeliest answer."""
        return self.nbest[0].text

    @property
    def probability(self) -> float:
        """That of the likeliest answer."""
        return self.nbest[0].probability


def merge(occurrences: Iterable[Answer], aggregate: str) -> list[Answer]:
    """One answer for all occurrences that are the same after `normalise`, the likeliest first.

    It has the text and the place of its likeliest occurrence; its probability is the sum over the occurrences
    ('marginal') or that of the likeliest ('max'). What normalises to nothing is the same only letter by letter.
    """
    same: dict[str, list[Answer]] = {}
    for occurrence in occurrences:
        same.setdefault(normalise(occurrence.text) or occurrence.text, []).append(occurrence)
    best = [max(group, key=lambda one: one.probability) for group in same.values()]
    if aggregate == "marginal":
        totals = [sum(one.probability for one in group) for group in same.values()]
        best = [one._replace(probability=total) for one, total in zip(best, totals, strict=True)]
    return sorted(best, key=lambda one: -one.probability)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _find(
    qa: QaConfig, context: StaticContext, rerank: Rerank | None, depth: int, params: Params, batch: Any, index: Index
) -> FusedRanking:
    """Return the `depth` best passages, [batch, depth]. One program for all sets of questions of a run."""
    return retrieve_and_rerank(qa, context, params, batch, index, None, depth, rerank)[0]


class _Read(NamedTuple):
    """What `_read` finds for each question of a batch; retrieved, scores [depth], ranks [depth, 2] (`FusedRanking`),
    prior [passages]: p(z|x).

    starts, widths, log_p [passages, spans]: a span's first piece of the body, its pieces beyond the first, and
    log p(span|z,x), the likeliest first; NEG_INF or less where a passage has no more.
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
    qa: QaConfig, context: StaticContext, rerank: Rerank | None, depth: int, spans: int, params: Params, batch: Any,
    index: Index,
) -> _Read:  # fmt: skip
    """Retrieve `depth` passages, read the first, and take the likeliest spans of each."""
    width = context.model.reader.span_width
    read = read_question(qa, context, params, batch, index, None, max(depth, qa.passages), rerank)
    flat = read.spans.reshape(*read.prior.shape, -1)
    best, places = jax.lax.top_k(flat, min(spans, flat.shape[-1]))
    starts = places // width - read.reader_input.body_start[..., None]
    return _Read(*read.beam, jnp.exp(read.prior), starts, places % width, best)


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Questions against one run's corpus. search: what finds the passages, one of `config.SEARCHES`; rerank: what
    orders them anew, if anything does; cloze: whether they are read as sentences with a blank (`cloze_pieces`);
    at_a_time: questions of a batch, None for `evaluation.batch_size`."""

    run: Run
    questions: Sequence[Question]
    search: str = "vectors"
    rerank: Rerank | None = None
    cloze: bool = False
    at_a_time: int | None = None

    @property
    def batch_size(self) -> int:
        """Questions read at a time: as many as were asked for, or a few more to share them out over the devices."""
        size: int = self.at_a_time or self.run.config.evaluation.batch_size
        return size + -size % self.run.mesh.size

    @cached_property
    def queries(self) -> list[Example]:
        """What the retriever and the reader take of each question, with what BM25 found where it takes part."""
        tokenizer, length = self.run.sources.tokenizer, self.run.lengths.query
        texts = [question.question for question in self.questions]
        encoded = tokenizer.encode_batch(texts)
        rows = [query_arrays(np.asarray(one.ids, np.int32), length, tokenizer) for one in encoded]
        if self.cloze:  # the reader's has a blank
            blanks = (query_arrays(cloze_pieces(text, tokenizer), length, tokenizer) for text in texts)
            rows = [row | with_reader_query(blank) for row, blank in zip(rows, blanks, strict=True)]
        if self.search != "vectors":
            rows = [row | self._words.arrays(number) for number, row in enumerate(rows)]
        return rows

    @cached_property
    def _batches(self) -> list[dict[str, NDArray]]:
        """Arrays of all questions; the last batch is filled up with its first question."""
        rows, size = self.queries, self.batch_size
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        parts = [part + [part[0]] * (size - len(part)) for part in parts]
        return [{key: np.stack([row[key] for row in part]) for key in part[0]} for part in parts]

    @cached_property
    def _words(self) -> Bm25Hits:
        """What BM25 finds for all questions, as far as passages are retrieved or read."""
        return self._search_words(max(self.depth, self.run.answering_qa.passages))

    def _search_words(self, depth: int) -> Bm25Hits:
        return self.run.bm25_search([question.question for question in self.questions], depth)

    @property
    def depth(self) -> int:
        """Passages retrieved for each question: `answering.retrieved`, or all."""
        return min(self.run.config.answering.retrieved, self.run.context.rows)

    def retrieve(self, params: Params, index: Index, depth: int = 0) -> NDArray[np.int64]:
        """Rows of the best passages for every question, `answering.retrieved` of them or `depth`.

        int64 [questions, depth].
        """
        depth = min(depth, self.run.context.rows) or self.depth
        if self.search == "bm25" and self.rerank is None:
            words = self._words if depth <= self._words.rows.shape[1] else self._search_words(depth)
            return words.rows[:, :depth].astype(np.int64)
        rows: NDArray[np.int64] = self.find(params, index, depth).rows.astype(np.int64)
        return rows

    def find(self, params: Params, index: Index, depth: int) -> FusedRanking:
        """The `depth` best passages for every question on the devices, [questions, depth or all]."""
        run, qa = self.run, dataclasses.replace(self.run.config.qa, search=self.search)
        batches = (put_batch(run.mesh, batch) for batch in self._batches)
        parts = [_find(qa, run.context, self.rerank, depth, params, batch, index) for batch in batches]
        columns = [np.concatenate([*map(to_host, column)]) for column in zip(*parts, strict=True)]
        return FusedRanking(*(column[: len(self.questions)] for column in columns))

    def recall(self, params: Params, index: Index) -> dict[str, Any]:
        """recall@k of a gold passage's id and `rank_measures`, over the questions that have one, and answer_recall@k,
        over those with answers, for k of DEPTHS as far as passages are retrieved."""
        return self.recall_of(self.retrieve(params, index))

    def recall_of(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """`recall` of rows that something else retrieved (BM25)."""
        values = self.recall_values(rows)
        recalls: dict[str, Any] = {name: float(found.mean()) for name, found in values.items()}
        groups = [question.fields.get(GROUPED_BY) for question in self.questions if question.gold]
        if "recall@5" in values and None not in groups:
            recalls[f"recall@5_by_{GROUPED_BY}"] = mean_by_group(values["recall@5"], groups)
        return recalls

    def recall_values(self, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """What `recall_of` gives means of: each measure over the questions that have it, in their order."""
        store = self.run.sources.passages
        answered = [place for place, question in enumerate(self.questions) if question.answers]
        gold = [place for place, question in enumerate(self.questions) if question.gold]
        hits: dict[str, NDArray[np.bool_]] = {}
        ranks: dict[str, NDArray[np.float64]] = {}
        if answered:
            asked = [self.questions[place] for place in answered]
            answers = [question.answers for question in asked]
            hits["answer_recall"] = answer_hits(store, rows[answered], answers, [q.is_regex for q in asked])
        if gold:
            golds = [self.questions[place].gold for place in gold]
            hits["recall"] = gold_hits(store, rows[gold], golds)
            ranks = rank_measures(documents_of(store, rows[gold]), golds)
        within = {f"{name}@{k}": found for name, hit in hits.items() for k, found in hit_at_k(hit).items()}
        return {name: found.astype(np.float64) for name, found in (within | ranks).items()}

    def predict(self, params: Params, index: Index) -> list[Prediction]:
        """Answers for every question, with the passages that were read."""
        return [prediction for batch in self.predict_batches(params, index) for prediction in batch]

    def predict_batches(self, params: Params, index: Index) -> Iterator[list[Prediction]]:
        """`predict`, `batch_size` questions at a time."""
        run, left = self.run, len(self.questions)
        qa = dataclasses.replace(run.answering_qa, search=self.search)
        for batch in self._batches:
            placed = put_batch(run.mesh, batch)
            outputs = _read(qa, run.context, self.rerank, self.depth, SPANS, params, placed, index)
            parts = zip(*map(to_host, outputs), strict=True)
            yield [self._assemble(_Read(*question)) for question in [*parts][:left]]
            left -= len(batch["query"])

    def exact_match(self, predictions: Sequence[Prediction]) -> float | None:
        """Share of the questions with answers that are answered right after normalisation; None if none has any."""
        right = [
            exact_match(prediction.answer, question.answers, question.is_regex)
            for prediction, question in zip(predictions, self.questions, strict=True)
            if question.answers
        ]
        return float(np.mean(right)) if right else None

    def reader_oracle(self, question: Question, prediction: Prediction) -> bool:
        """Whether any span that the reader could have chosen is right, by its tokens as ORQA has it.

        Of answers that are regular expressions: whether the text of a passage that was read matches anywhere.
        """
        store, lengths = self.run.sources.passages, self.run.lengths
        rows = [candidate.row for candidate in prediction.candidates]
        if question.is_regex:
            for row in rows:  # as far as it is read: with its title and three special pieces
                ends = self._offsets(row)[: len(truncated_body(store, row, lengths)), 1]
                if contains_pattern(store.text(row)[: int(ends.max(initial=0))], question.answers):
                    return True
            return False
        tokenizer, longest = self.run.sources.tokenizer, self.run.context.model.reader.span_width
        forms = (form for answer in question.answers for form in tokenizer.forms(answer))
        encoded = [np.asarray(form, tokenizer.dtype) for form in forms]
        wanted = [answer for answer in encoded if 0 < len(answer) <= longest]
        return any(row_has_answer(store, row, wanted, lengths) for row in rows)

    def _assemble(self, read: _Read) -> Prediction:
        """One question's passages, and its answers: p(answer|x) over the occurrences that were found."""
        candidates: list[ReadPassage] = []
        occurrences: list[Answer] = []
        within, prior = np.exp(read.log_p).tolist(), read.prior.tolist()
        for place, row in enumerate(read.retrieved.tolist()[: len(prior)]):
            if row < 0:
                continue
            text, offsets = self.run.sources.passages.text(row), self._offsets(row)
            spans = []
            for first, more in zip(read.starts[place].tolist(), read.widths[place].tolist(), strict=True):
                if not len(offsets) or first < 0:
                    spans.append((0, 0))
                    continue
                last = min(first + more, len(offsets) - 1)
                spans.append((int(offsets[min(first, last), 0]), int(offsets[last, 1])))
            candidates.append(ReadPassage(row, prior[place], spans[0]))
            scored = zip(spans, within[place], strict=True)
            occurrences += [Answer(text[slice(*span)], prior[place] * p, row, span) for span, p in scored if p > 0]
        nbest = merge(occurrences, self.run.config.answering.aggregate)
        nothing = Answer("", 0.0, candidates[0].row if candidates else -1, (0, 0))
        return Prediction(nbest or [nothing], candidates, read.retrieved, read.scores, read.ranks)

    @cached_property
    def _offsets(self) -> Callable[[int], NDArray[np.int64]]:
        """Start and end of each piece that is read of a row's body in its text, int64 [pieces, 2]. Rows come again."""
        tokenizer, store = self.run.sources.tokenizer, self.run.sources.passages

        def offsets(row: int) -> NDArray[np.int64]:
            found = tokenizer.offsets_of(store.text(row), store.body_tokens(row))
            # One that was cut within a word has other tokens at its ends, and the same between.
            return np.array(tokenizer.encode(store.text(row)).offsets).reshape(-1, 2) if found is None else found

        return lru_cache(4096)(offsets)
