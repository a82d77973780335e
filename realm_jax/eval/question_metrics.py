"""Compute metrics of predictions: per-question values, means with intervals, paired differences. No model, no device.

Every metric is an array over the questions, NaN if a question does not have it. Read `prediction_files.py` for the
records, `answer_matching.py` for equality of answers, `significance.py` for intervals.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.questions import gold_of
from realm_jax.errors import UserError
from realm_jax.eval.answer_matching import exact_match, full_match, squad_match, token_f1
from realm_jax.eval.prediction_files import Record, check_same_questions
from realm_jax.eval.retrieval_metrics import hit_at_k, rank_measures
from realm_jax.eval.significance import METHODS, SEED_METHODS, difference, interval, mean_of, paired_mean

QueryMetrics = dict[str, NDArray[np.float64]]  # metric → its value for each query, NaN if the query does not have it

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
    """Return a short description of a metric, the same for every k of `recall@k`."""
    return DESCRIPTIONS[name.partition("@")[0]]


def compute_metrics(records: Sequence[Record]) -> QueryMetrics:
    """Return each metric that some of the questions have, float64 [questions], in the order of DESCRIPTIONS.

    BM25 may return fewer passages for one question than for another. The missing ranks are no hits, as in TREC's
    evaluation.

    Raises:
        UserError: no question has answers, or a gold passage that could have been retrieved.
    """
    golds = [gold_of(record) if "retrieved" in record else {} for record in records]
    if not any(golds) and not any(record.get("answers") for record in records):
        raise UserError("no question has answers or a gold passage to compare with; predict questions that have them")
    metrics = {name: np.full(len(records), np.nan) for name in ("exact_match", *_SCORES)}
    for number, record in enumerate(records):
        if answers := record.get("answers"):
            is_regex = record.get("match") == "regex"
            metrics["exact_match"][number] = exact_match(record["prediction"], answers, is_regex)
            for name, (is_of_patterns, score) in _SCORES.items():
                if is_of_patterns == is_regex:
                    metrics[name][number] = score(record["prediction"], answers)

    # --- recall@k, for k of DEPTHS up to the longest list of passages
    passages = [record.get("retrieved", []) for record in records]
    was_checked = not any(passages) or any("has_answer" in passage for group in passages for passage in group)
    has_answer = {
        number: [passage["has_answer"] for passage in record["retrieved"]]
        for number, record in enumerate(records)
        if record.get("answers")
        and "retrieved" in record
        and all("has_answer" in passage for passage in record["retrieved"])
    }
    is_gold = {n: [str(passage["id"]) in gold for passage in passages[n]] for n, gold in enumerate(golds) if gold}
    for name, hits in (("answer_recall", has_answer if was_checked else {}), ("recall", is_gold)):
        depth = max((len(hit) for hit in hits.values() if hit), default=min(1, len(hits)))
        matrix = np.array([hit + [False] * (depth - len(hit)) for hit in hits.values()], bool).reshape(len(hits), depth)
        for k, within in hit_at_k(matrix).items():
            metrics[f"{name}@{k}"] = _spread(within, [*hits], len(records))

    documents = [[str(passage["id"]) for passage in passages[number]] for number in is_gold]
    for name, values in rank_measures(documents, [golds[number] for number in is_gold]).items():
        metrics[name] = _spread(values, [*is_gold], len(records))
    metrics["reader_oracle"] = np.array([float(record.get("reader_oracle", np.nan)) for record in records])
    return {name: values for name, values in metrics.items() if not np.isnan(values).all()}


# Metric → True if it applies to answers that are patterns, and the score of a prediction.
_SCORES: dict[str, tuple[bool, Callable[[str, list[str]], float]]] = {
    "exact_match_squad": (False, squad_match),
    "f1": (False, token_f1),
    "regex_match": (True, partial(exact_match, is_regex=True)),
    "regex_full_match": (True, full_match),
}


def _spread(values: NDArray[Any], numbers: Sequence[int], size: int) -> NDArray[np.float64]:
    """Return float64 [size] with values at the questions of these numbers and NaN elsewhere."""
    spread = np.full(size, np.nan)
    spread[numbers] = values
    return spread


def summarize(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Return {metric: {"value": mean, "low", "high": its interval, "questions": how many have it}}."""
    summary = {}
    for name, values in compute_metrics(records).items():
        counted = values[~np.isnan(values)]
        low, high = interval(counted)
        summary[name] = {"value": float(counted.mean()), "low": low, "high": high, "questions": len(counted)}
    return summary


def compare(first: Sequence[Record], second: Sequence[Record], path: str) -> dict[str, Any]:
    """Compare two sets of predictions, over the questions on which both have a metric.

    Args:
        first: predictions a.
        second: predictions b of the same questions.
        path: the second file, for messages.

    Returns:
        {"questions", "methods", "measures": {metric: {"a", "b", "difference", "low", "high", "p", "mcnemar", "only_a",
        "only_b", "questions"}}}, see `significance.Difference`.

    Raises:
        UserError: the questions differ.
    """
    check_same_questions(first, second, path)
    first_metrics, second_metrics = compute_metrics(first), compute_metrics(second)
    measures = {}
    for name in (name for name in first_metrics if name in second_metrics):
        a, b = first_metrics[name], second_metrics[name]
        both = ~np.isnan(a) & ~np.isnan(b)
        a, b = a[both], b[both]
        if len(a):
            tests = difference(a, b)._asdict()
            means = {"a": float(a.mean()), "b": float(b.mean()), "difference": tests.pop("value")}
            measures[name] = means | tests | {"questions": len(a)}
    return {"questions": len(first), "methods": METHODS, "measures": measures}


def over_seeds(first: Sequence[Sequence[Record]], second: Sequence[Sequence[Record]] = ()) -> dict[str, Any]:
    """Return means over seeds of the metrics that all runs have.

    Args:
        first: predictions of a system, seed by seed, all of the same questions.
        second: predictions of another system with the same seeds; empty for none.

    Returns:
        {"methods", "measures": {metric: {"value", "low", "high", "seeds"}}}; with two systems, "a", "b" and
        "difference" replace "value".
    """
    groups = [[compute_metrics(run) for run in group] for group in (first, second) if group]
    rows = {}
    for name in groups[0][0]:
        if not all(name in run for group in groups for run in group):
            continue
        means = [[float(np.nanmean(run[name])) for run in group] for group in groups]
        if len(means) == 1:
            rows[name] = mean_of(means[0])._asdict()
        else:
            a, b = means
            paired = paired_mean(a, b)
            rows[name] = {"a": mean_of(a).value, "b": mean_of(b).value, "difference": paired.value}
            rows[name] |= {"low": paired.low, "high": paired.high}
        rows[name]["seeds"] = len(means[0])
    return {"methods": SEED_METHODS, "measures": rows}
