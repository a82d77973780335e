"""Whether an adapted encoder is better than its start: what both find, how much of what was trained is taken.

Read `measure`; what is measured, and what counts as better, is `realm_jax/eval/adaptation.py`. Not here: what is done
with the decision (`adaptation.py`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.data.evidence import Evidence, find_evidence
from realm_jax.data.held_out import HeldOutSentence, held_out_sentences, passages_without
from realm_jax.data.questions import Question
from realm_jax.eval import adaptation as judge
from realm_jax.eval.format import duration
from realm_jax.eval.prediction import Evaluator
from realm_jax.index.embed import embed_with_cache
from realm_jax.models.realm import Params
from realm_jax.retrieval.embed import CorpusRows
from realm_jax.run import Run
from realm_jax.sections import task_names
from realm_jax.tasks.base import Task
from realm_jax.tasks.evidence_contrast import number_names
from realm_jax.train.checkpoints import SavedCheckpoint
from realm_jax.train.init_from import recorded_start
from realm_jax.train.recipe import recipe_tasks
from realm_jax.train.records import primary_metric
from realm_jax.train.restore import restore_params, saved_vectors

logger = logging.getLogger(__name__)

JUDGED = "test"  # the split of given questions: as `dev` they would take the place of held-out documents
JUDGED_QUESTIONS = "judged questions: "  # before the names of their measures
SENTENCES, FEWEST = 1000, 200  # held-out sentences: an interval of ± .02 or less, and what little time leaves of it
WEIGHTS = (1.0, 0.5)  # of the trained towers beside the start's, in the order in which they are tried


def moves_documents(task: Task, run: Run) -> bool:
    """Whether a task moves what passages are embedded with."""
    return run.model.embedder_names[-1] in task.trained


def any_moves(run: Run) -> bool:
    """Whether a task of the recipe does."""
    return any(moves_documents(task, run) for task in recipe_tasks(run))


def evidence_of(run: Run) -> Evidence:
    """The spans that tasks hide, with what is evidence for them."""
    return find_evidence(run.sources.passages, *run.lengths.hidden)


def sentences_of(run: Run, evidence: Evidence, share: float, most: int = SENTENCES) -> list[HeldOutSentence]:
    """The held-out sentences that decide, at most so many."""
    sources = run.sources
    return held_out_sentences(sources.passages, sources.tokenizer, run.lengths.query, share, most, evidence)


@dataclass(frozen=True)
class Searches:
    """What parameters are compared by: held-out sentences, and judged questions, which may be none."""

    run: Run
    sentences: Sequence[HeldOutSentence]
    judged: Sequence[Question]

    @cached_property
    def documents(self) -> NDArray[np.int64]:
        """A number of each sentence's document, [sentences], from 0 in their order."""
        store = self.run.sources.passages
        return number_names(store.document_id(one.row) for one in self.sentences)

    @cached_property
    def _texts(self) -> tuple[list[Question], list[Question]]:
        masked, whole = ([one.masked or one.text for one in self.sentences], [one.text for one in self.sentences])
        return [Question(text, []) for text in masked], [Question(text, []) for text in whole]

    @cached_property
    def _removed(self) -> tuple[list[int], CorpusRows]:
        """The sentences that ask for passages which lack them, and these passages."""
        sources = self.run.sources
        given = sources.passages, sources.tokenizer, self.run.lengths.document, self.sentences
        places, made = passages_without(*given)
        names = ("document", "document_length", "document_title_length")
        parts = (
            np.array([one[name] for one in made], like.dtype).reshape(-1, *like.shape[1:])
            for name, like in zip(names, self.run.corpus, strict=True)
        )
        return places, CorpusRows(*parts)

    def values(self, params: Params, vectors: NDArray, how: str) -> judge.Values:
        """The measures of a search, one of `sections.SEARCHES`. vectors: of the passages, by the parameters."""
        values = self.sentence_values(params, vectors, how) | self._removed_values(params, vectors, how)
        if not self.judged:
            return values
        asked = Evaluator(self.run, self.judged, how)
        judged = asked.recall_values(asked.retrieve(params, self.run.index(vectors)))
        return values | {f"{JUDGED_QUESTIONS}{name}": found for name, found in judged.items()}

    def sentence_values(self, params: Params, vectors: NDArray, how: str) -> judge.Values:
        """Those of the sentences in the passages as they are."""
        index, store = self.run.index(vectors), self.run.sources.passages
        found = [Evaluator(self.run, some, how).retrieve(params, index, judge.DEPTH) for some in self._texts]
        return judge.sentence_values(store, self.sentences, *found)

    def _removed_values(self, params: Params, vectors: NDArray, how: str) -> judge.Values:
        """Recall of passages without the sentences that ask for them: of vectors alone, as words find none of them."""
        values, (places, passages) = np.full(len(self.sentences), np.nan), self._removed
        if how == "vectors" and places:
            rows, changed = np.array([self.sentences[place].row for place in places]), vectors.copy()
            changed[rows] = self.run.embed(params, rows=passages)
            asked = [self._texts[1][place] for place in places]
            found = Evaluator(self.run, asked, how).retrieve(params, self.run.index(changed), judge.FIRST)
            values[places] = (found == rows[:, None]).any(axis=1)
        return {judge.REMOVED: values}


def with_towers(run: Run, params: Params, start: Params, weight: float) -> Params:
    """Parameters whose towers are (1 − weight) × those of the start + weight × their own, array by array."""

    def merged(a: jax.Array, b: jax.Array) -> jax.Array:
        return ((1 - weight) * a + weight * b).astype(a.dtype)

    return params | {name: jax.tree.map(merged, start[name], params[name]) for name in run.model.embedder_names}


def measure(run: Run, plan: dict[str, Any], merge: float | None) -> dict[str, Any]:
    """The decision and all that the report tables. merge: the weight of the trained towers, None for one of WEIGHTS."""
    last, saved = last_checkpoint(run)
    trained, start = restore_params(run, last, saved), recorded_start(run, run.workdir)
    sentences = sentences_of(run, evidence_of(run), plan["held_out"], plan.get("sentences", SENTENCES))
    searches = Searches(run, sentences, run.sources.questions.get(JUDGED, []))
    counts, left = (len(sentences), len(searches.judged)), duration(plan["estimate"]["measure"])
    logger.info("measuring on %d held-out sentences and %d questions; about %s left", *counts, left)

    @lru_cache
    def at(weight: float) -> tuple[Params, NDArray, judge.Values]:
        """Parameters, the passages' vectors and what vectors find, at a weight."""
        params, vectors = with_towers(run, trained, start, weight), vectors_at(run, trained, start, weight)
        return params, vectors, searches.values(params, vectors, "vectors")

    weights = (merge,) if merge else WEIGHTS
    decision = first_decision(weights, lambda weight: decide(at(0.0)[2], at(weight)[2], searches.documents))
    weight = decision["weight"]
    rows = {judge.START: at(0.0)[2], "adapted": at(weight)[2]} | ({} if weight == 1.0 else {"trained": at(1.0)[2]})
    rows |= {"bm25": searches.values(*at(0.0)[:2], "bm25"), "start_hybrid": searches.values(*at(0.0)[:2], "hybrid")}
    rows |= {"hybrid": searches.values(*at(weight)[:2], "hybrid")}
    examples = judge.examples(run.sources.passages, sentences, rows[judge.START], rows["adapted"])
    return decision | {"table": compared(rows, searches.documents), "examples": examples}


def first_decision(weights: Sequence[float], decided: Callable[[float], dict[str, Any]]) -> dict[str, Any]:
    """The decision at the first weight, or at a later one where sentences gain by those before and passages without
    them are lost, each beyond doubt; with its "weight"."""
    for weight in weights:
        decision = decided(weight) | {"weight": weight}
        if not (judge.is_above(decision["gain"]) and judge.is_below(decision["removed"])):
            break
        logger.info("weight %g finds more sentences, and fewer passages without them", weight)
    return decision


def vectors_at(run: Run, trained: Params, start: Params, weight: float) -> NDArray:
    """The passages by the document tower at a weight, [rows, width]: of the last checkpoint, or embedded. Those of the
    start and of what is chosen are kept in the cache."""
    saved = saved_vectors(run, *last_checkpoint(run)) if weight == 1.0 or not any_moves(run) else None
    return embed_with_cache(run, with_towers(run, trained, start, weight), bar=True) if saved is None else saved


def decide(before: judge.Values, after: judge.Values, documents: NDArray[np.int64]) -> dict[str, Any]:
    """Whether an encoder is promoted: {"promoted", "gain", "removed", "judged"}. documents [sentences]: of each."""
    gain, removed = (judge.compare(before[name], after[name], documents) for name in (judge.GAIN, judge.REMOVED))
    judged = compare_judged(before, after)
    return {"promoted": judge.is_better(gain, removed, judged), "gain": gain, "removed": removed, "judged": judged}


def compare_judged(before: judge.Values, after: judge.Values) -> dict[str, Any]:
    """What judged questions say of the change, by the recall that a retriever is judged by; {} without any."""
    known = {name.removeprefix(JUDGED_QUESTIONS): name for name in before if name.startswith(JUDGED_QUESTIONS)}
    measure = primary_metric(known)
    return {"measure": measure} | judge.compare(before[known[measure]], after[known[measure]]) if measure else {}


def last_checkpoint(run: Run) -> tuple[str, SavedCheckpoint]:
    """The last task, once it is trained, and its newest checkpoint."""
    last = task_names(run.config)[-1]
    saved = SavedCheckpoint.newest(run.workdir / last / "checkpoints")
    assert saved is not None, "training is done"
    return last, saved


def compared(rows: Mapping[str, judge.Values], documents: NDArray[np.int64]) -> dict[str, dict[str, Any]]:
    """Each row's measures against those of the start, which is one of them. documents: of the sentences."""
    before = rows[judge.START]
    owners = {measure: documents if measure in judge.MEASURES else None for measure in before}
    return {
        name: {measure: judge.compare(before[measure], values[measure], owners[measure]) for measure in before}
        for name, values in rows.items()
    }
