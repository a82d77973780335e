"""Answer questions: retrieve, read, and slice the answer out of the original text of its passage.

`Evaluator` holds a set of questions as arrays and measures retrieval and answers with any parameters and index. Not
here: what counts as right (`answers.py`) and how retrieval is scored (`retrieval.py`).
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.corpus.jsonl import Question
from realm_jax.data.examples import query_arrays
from realm_jax.evaluation.answers import exact_match, normalise
from realm_jax.evaluation.retrieval import answer_hits, by_group, found_within, gold_hits, recall_at_k
from realm_jax.index.candidates import Index, Setting, read_passages
from realm_jax.index.exact import search
from realm_jax.mesh import to_host
from realm_jax.models.inputs import find_answers
from realm_jax.models.likelihood import span_log_probabilities
from realm_jax.models.realm import Params
from realm_jax.run import Run, put_batch

GROUPED_BY = "replaced_words"  # a question field that recall is also given by, where questions have it


class Candidate(NamedTuple):
    """A passage read for a question. probability: p(z|x) among those read; span: characters of its best answer."""

    row: int
    probability: float
    span: tuple[int, int]
    span_probability: float


class Prediction(NamedTuple):
    """answer: text as it stands in its passage; probability: summed over the passages that give the same answer."""

    answer: str
    probability: float
    candidates: list[Candidate]


@partial(jax.jit, static_argnums=(0, 1))
def _find(setting: Setting, depth: int, params: Params, batch: Any, index: Index) -> jax.Array:
    """Rows of the `depth` best passages, int32 [batch, depth]. One program for all sets of questions of a run."""
    queries = setting.model.embed_queries(params, batch["query"], batch["query_length"])
    return search(setting.mesh, queries, index.vectors, setting.rows, depth, setting.search_block).rows


@partial(jax.jit, static_argnums=0)
def _read(setting: Setting, params: Params, batch: Any, index: Index) -> tuple[jax.Array, ...]:
    """For the passages read, [batch, passages] each: row, p(z|x), and the likeliest span.

    A span is its first piece of the body, its pieces beyond the first, and p(span|z,x).
    """
    passages = setting.qa_passages
    reading, _, _ = read_passages(setting, params, batch, index, None, passages, passages)
    nothing = jnp.zeros((reading.rows.shape[0], 1, 1), jnp.int32)
    allowed, _ = find_answers(reading.joint, nothing, nothing[:, :, 0], setting.model.span_width)
    log_p = span_log_probabilities(reading.span_scores, allowed)
    flat = log_p.reshape(*log_p.shape[:2], -1)
    best = flat.argmax(axis=-1)
    start = best // setting.model.span_width - reading.joint.body_start
    prior = jax.nn.softmax(reading.scores, axis=-1)
    return reading.rows, prior, start, best % setting.model.span_width, jnp.exp(flat.max(axis=-1))


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Questions against one run's corpus."""

    run: Run
    questions: Sequence[Question]

    @cached_property
    def _batches(self) -> list[dict[str, NDArray]]:
        """Query arrays of all questions; the last batch is filled up with its first question."""
        encoded = self.run.sources.wordpiece.encode_batch([question.question for question in self.questions])
        length, wordpiece = self.run.lengths.query, self.run.sources.wordpiece
        rows = [query_arrays(np.asarray(item.ids, np.int32), length, wordpiece) for item in encoded]
        size = self.run.config.evaluation.batch_size
        size += -size % self.run.mesh.size
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        parts = [part + [part[0]] * (size - len(part)) for part in parts]
        return [{key: np.stack([row[key] for row in part]) for key in part[0]} for part in parts]

    def retrieve(self, params: Params, index: Index, depth: int = 0) -> NDArray[np.int64]:
        """Rows of the `depth` best passages for every question, `evaluation.passages` of them by default.

        int64 [questions, depth].
        """
        setting = self.run.setting
        depth = min(depth or self.run.config.evaluation.passages, setting.rows)
        found = [_find(setting, depth, params, put_batch(self.run.mesh, batch), index) for batch in self._batches]
        return np.concatenate([to_host(rows).astype(np.int64) for rows in found])[: len(self.questions)]

    def recall(self, params: Params, index: Index) -> dict[str, Any]:
        """recall@k of the gold passage's id and answer_recall@k, for k = 1, 5, 20 as far as passages are retrieved."""
        return self.recall_of(self.retrieve(params, index))

    def recall_of(self, rows: NDArray[np.int64]) -> dict[str, Any]:
        """`recall` of rows that something else retrieved (BM25)."""
        store = self.run.sources.passages
        answers = [question.answers for question in self.questions]
        hits = {"answer_recall": answer_hits(store, rows, answers, [q.is_regex for q in self.questions])}
        gold_ids = [question.gold_passage_id for question in self.questions]
        if any(gold is not None for gold in gold_ids):
            hits["recall"] = gold_hits(store, rows, gold_ids)
        depths = [k for k in (1, 5, 20) if k <= rows.shape[1]]
        found: dict[str, Any] = {f"{name}@{k}": recall_at_k(hit, k) for name, hit in hits.items() for k in depths}
        groups = [question.fields.get(GROUPED_BY) for question in self.questions]
        if "recall" in hits and 5 in depths and None not in groups:
            found[f"recall@5_by_{GROUPED_BY}"] = by_group(found_within(hits["recall"], 5), groups)
        return found

    def predict(self, params: Params, index: Index) -> list[Prediction]:
        """An answer for every question, with the passages that were read."""
        predictions: list[Prediction] = []
        for batch in self._batches:
            outputs = _read(self.run.setting, params, put_batch(self.run.mesh, batch), index)
            predictions += [self._assemble(*parts) for parts in zip(*map(to_host, outputs), strict=True)]
        return predictions[: len(self.questions)]

    def exact_match(self, predictions: Sequence[Prediction]) -> float:
        """Share of the questions whose answer is right after normalisation."""
        right = [exact_match(p.answer, q.answers, q.is_regex) for p, q in zip(predictions, self.questions, strict=True)]
        return float(np.mean(right))

    def _assemble(self, rows: NDArray, prior: NDArray, starts: NDArray, widths: NDArray, spans: NDArray) -> Prediction:
        """One question's passages: p(answer|x) = Σ_z p(z|x) p(span|z,x) over passages that give the same answer."""
        candidates = []
        totals: dict[str, float] = {}
        texts: dict[str, tuple[float, str]] = {}
        for row, p, start, width, span in zip(rows.tolist(), prior, starts, widths, spans, strict=True):
            characters = self._characters(row, int(start), int(start + width))
            text = self.run.sources.passages.text(row)[slice(*characters)]
            candidates.append(Candidate(row, float(p), characters, float(span)))
            key, joint = normalise(text), float(p) * float(span)
            totals[key] = totals.get(key, 0.0) + joint
            texts[key] = max(texts.get(key, (-1.0, "")), (joint, text))
        best = max(totals, key=lambda key: totals[key])
        return Prediction(texts[best][1], totals[best], candidates)

    def _characters(self, row: int, first: int, last: int) -> tuple[int, int]:
        """Characters of body pieces first … last of a row, in its original text."""
        offsets = self.run.sources.wordpiece.encode(self.run.sources.passages.text(row)).offsets
        if not offsets or first < 0:
            return 0, 0
        last = min(last, len(offsets) - 1)
        return offsets[min(first, last)][0], offsets[last][1]
