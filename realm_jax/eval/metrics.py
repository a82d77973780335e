"""Metrics of predictions: per-question values, means with intervals, paired differences. No model, no device.

Every measure is an array over the questions, NaN where it has no meaning for one. Read `prediction_files.py` for the
records that are measured, `answers.py` for what is right, `significance.py` for intervals.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.questions import gold_of
from realm_jax.errors import UserError
from realm_jax.eval.answers import exact_match, full_match, squad_match, token_f1
from realm_jax.eval.prediction_files import Record, check_same_questions
from realm_jax.eval.retrieval import hit_at_k, rank_measures
from realm_jax.eval.significance import METHODS, SEED_METHODS, difference, interval, mean_of, paired_mean

Metrics = dict[str, NDArray[np.float64]]

DESCRIPTIONS = {
    "exact_match": "ORQA's and NQ-open's; patterns match from the start",
    "exact_match_squad": "SQuAD's and DPR's",
    "f1": "words shared with the best answer (SQuAD)",
    "regex_match": "patterns match from the start (CuratedTREC)",
    "regex_full_match": "patterns match the whole answer",
    "answer_recall": "answer in a passage (DPR)",
    "recall": "gold passage found",
    "mrr": "1 / rank of the first gold document",
    "ndcg": "gold documents by grade and rank (BEIR)",
    "reader_oracle": "right span in a passage that was read",
}


def describe_metric(name: str) -> str:
    """A short description of a metric; the same for every k of `recall@k`."""
    return DESCRIPTIONS[name.partition("@")[0]]


def compute_metrics(records: Sequence[Record]) -> Metrics:
    """Each measure that some of the questions have, float64 [questions], in the order of DESCRIPTIONS.

    Raises UserError if no question has answers, or a gold passage that could have been retrieved.
    """
    golds = any(gold_of(record) and "retrieved" in record for record in records)
    if not golds and not any(record.get("answers") for record in records):
        raise UserError("no question has answers or a gold passage to compare with; predict questions that have them")
    found: Metrics = {name: _each(records, of) for name, of in _ANSWERS.items()}
    found |= _at_depths("answer_recall", records, _has_answer) if _was_checked(records) else {}
    found |= _at_depths("recall", records, _is_gold) | _ranked(records)
    found["reader_oracle"] = np.array([float(record.get("reader_oracle", np.nan)) for record in records])
    return {name: values for name, values in found.items() if not np.isnan(values).all()}


def summarise(values: NDArray[np.float64]) -> dict[str, Any]:
    """{"value": mean, "low", "high": its interval, "questions": how many it is over} of a measure."""
    counted = values[~np.isnan(values)]
    low, high = interval(counted)
    return {"value": float(counted.mean()), "low": low, "high": high, "questions": len(counted)}


def _is_regex(record: Record) -> bool:
    return record.get("match") == "regex"


def _of_strings(score: Callable[[str, list[str]], float]) -> Callable[[Record], float]:
    return lambda record: np.nan if _is_regex(record) else score(record["prediction"], record["answers"])


def _of_patterns(score: Callable[[str, list[str]], float]) -> Callable[[Record], float]:
    return lambda record: score(record["prediction"], record["answers"]) if _is_regex(record) else np.nan


_ANSWERS: dict[str, Callable[[Record], float]] = {
    "exact_match": lambda record: exact_match(record["prediction"], record["answers"], _is_regex(record)),
    "exact_match_squad": _of_strings(squad_match),
    "f1": _of_strings(token_f1),
    "regex_match": _of_patterns(lambda prediction, answers: exact_match(prediction, answers, is_regex=True)),
    "regex_full_match": _of_patterns(full_match),
}


def _each(records: Sequence[Record], of: Callable[[Record], float]) -> NDArray[np.float64]:
    """A measure of every record that has answers."""
    return np.array([float(of(record)) if record.get("answers") else np.nan for record in records])


def _has_answer(record: Record) -> list[bool] | None:
    """Which of the retrieved passages have an answer; None if they were not checked."""
    if not record.get("answers") or "retrieved" not in record:
        return None
    retrieved = record["retrieved"]
    if any("has_answer" not in passage for passage in retrieved):
        return None
    return [passage["has_answer"] for passage in retrieved]


def _is_gold(record: Record) -> list[bool] | None:
    """Which of the retrieved passages are right for the question; None if no passage is known to be."""
    gold, retrieved = gold_of(record), record.get("retrieved")
    return None if not gold or retrieved is None else [str(passage["id"]) in gold for passage in retrieved]


def _was_checked(records: Sequence[Record]) -> bool:
    """Whether retrieved passages were checked for answers; true if none were retrieved."""
    retrieved = [passage for record in records for passage in record.get("retrieved", ())]
    return not retrieved or any("has_answer" in passage for passage in retrieved)


def _at_depths(name: str, records: Sequence[Record], hits_of: Callable[[Record], list[bool] | None]) -> Metrics:
    """Whether the first k passages have a hit, for k of DEPTHS as far as some question has passages.

    Beyond the last passage of a question nothing hits, as in TREC's evaluation: a search by words may find fewer for
    one question than for another.
    """
    hits = [hits_of(record) for record in records]
    counted = [number for number, one in enumerate(hits) if one is not None]
    room = max((len(one) for one in hits if one), default=min(1, len(counted)))
    matrix = np.array([one + [False] * (room - len(one)) for one in hits if one is not None], bool)
    within = hit_at_k(matrix.reshape(len(counted), room))
    return {f"{name}@{k}": _spread(found, counted, len(records)) for k, found in within.items()}


def _ranked(records: Sequence[Record]) -> Metrics:
    """`rank_measures` of the questions that have gold passages."""
    counted = [number for number, one in enumerate(records) if gold_of(one) and "retrieved" in one]
    documents = [[str(passage["id"]) for passage in records[number]["retrieved"]] for number in counted]
    found = rank_measures(documents, [gold_of(records[number]) for number in counted])
    return {name: _spread(values, counted, len(records)) for name, values in found.items()}


def _spread(values: NDArray[Any], places: Sequence[int], size: int) -> NDArray[np.float64]:
    """Values at some places, NaN at the others, float64 [size]."""
    spread = np.full(size, np.nan)
    spread[places] = values
    return spread


def compare(first: Sequence[Record], second: Sequence[Record], path: str) -> dict[str, Any]:
    """{"questions", "methods", "measures": {name: {"a", "b", "difference", "low", "high", "p", "mcnemar", "only_a",
    "only_b", "questions"}}} of two sets of predictions, over the questions on which both have a measure.

    path: the second file's name, for the message. Raises UserError unless both were asked the same.
    """
    check_same_questions(first, second, path)
    left, right = compute_metrics(first), compute_metrics(second)
    measures = {}
    for name in (name for name in left if name in right):
        both = ~np.isnan(left[name]) & ~np.isnan(right[name])
        a, b = left[name][both], right[name][both]
        if len(a):
            tests = difference(a, b)._asdict()
            means = {"a": float(a.mean()), "b": float(b.mean()), "difference": tests.pop("value")}
            measures[name] = means | tests | {"questions": len(a)}
    return {"questions": len(first), "methods": METHODS, "measures": measures}


def over_seeds(first: Sequence[Sequence[Record]], second: Sequence[Sequence[Record]] = ()) -> dict[str, Any]:
    """{"methods", "measures": {name: {"value", "low", "high", "seeds"}}} of a system's predictions under several seeds.

    second: another system's, seed by seed; then {"a", "b", "difference", …} in place of "value". All of the same
    questions; of the measures that all have.
    """
    means = [[_means(run) for run in group] for group in (first, second) if group]
    common = [name for name in means[0][0] if all(name in run for group in means for run in group)]
    rows = {name: _of_seeds(*([run[name] for run in group] for group in means)) for name in common}
    return {"methods": SEED_METHODS, "measures": rows}


def _means(records: Sequence[Record]) -> dict[str, float]:
    return {name: float(np.nanmean(values)) for name, values in compute_metrics(records).items()}


def _of_seeds(a: Sequence[float], b: Sequence[float] = ()) -> dict[str, Any]:
    if not b:
        return mean_of(a)._asdict() | {"seeds": len(a)}
    found = paired_mean(a, b)
    means = {"a": mean_of(a).value, "b": mean_of(b).value, "difference": found.value}
    return means | {"low": found.low, "high": found.high, "seeds": len(a)}
