"""Sentences on what the metrics of a run show, including no change or a regression.

Pure functions from the report's data to sentences; `report.py` puts them on the page. A difference is only called one
if it is larger than two standard errors of the difference between two shares on the run's number of questions.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from realm_jax.eval.format import share
from realm_jax.eval.retrieval import group_order

# Used where the number of questions is unknown.
_DEFAULT_MARGIN = 0.02

UNTRAINED = "untrained"
METHODS = {
    UNTRAINED: "Before any training",
    "ict": "Inverse cloze task",
    "more_ict": "Inverse cloze task, longer",
    "no_retriever_gradient": "REALM, frozen retriever",
    "bm25": "BM25 (matching words)",
    "realm": "REALM",
    "hybrid": "Vectors and words together",
}
CONTROLS = {
    "no_retriever_gradient": "the same training with a frozen retriever",
    "more_ict": "the same number of additional steps of the inverse cloze task",
}
WITHOUT_PASSAGES = "closed_book"  # the reader that answers from the question alone
READERS = {
    "chance": "Chance",
    WITHOUT_PASSAGES: "Without passages",
    "retrieval": "With passages",
}


class Headline(NamedTuple):
    """One sentence or two, the figures that carry it, and what the figures were measured on."""

    sentence: str
    figures: str
    footnote: str


def main_measure(results: Mapping[str, Any]) -> str | None:
    """The recall to lead with: of the gold passage where there is one, else of any passage with the answer."""
    return next((name for name in ("recall@5", "answer_recall@5") if results.get(name)), None)


def headline(data: Mapping[str, Any]) -> Headline:
    """The main finding, for readers of nothing else."""
    results = data.get("results", {})
    measure = main_measure(results)
    recalls = results.get(measure, {}) if measure else {}
    named, trained = methods_compared(data)
    before_name = named if named in recalls else UNTRAINED
    if measure is None or trained not in recalls or before_name not in recalls:
        return _headline_without_comparison(data)
    before, after = recalls[before_name], recalls[trained]
    first = METHODS.get(before_name, before_name)
    stage = "before training" if before_name == UNTRAINED else f"after the {first[0].lower()}{first[1:]}"
    footnote = (
        f"{share(before)} is the retriever {stage}, {share(after)} after REALM{_questions(data)}. "
        f"{metric_label(measure)} is the share of questions with {_target(measure)} among the first five passages."
    )
    figures = f"{metric_label(measure)} {share(before)} → {share(after)}"
    return Headline(_change(data, recalls, before, after, _target(measure)), figures, footnote)


def methods_compared(data: Mapping[str, Any]) -> tuple[str, str]:
    """The methods before and after the retriever learnt from masked words; '' where that is not known."""
    found = data.get("results", {}).get("comparison") or {}
    return found.get("before", ""), found.get("after", "")


def takeaways(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What else to know, harm first: a question and its answer in a sentence or two; those that the data can carry."""
    findings = (
        ("Did a stage do harm?", _regressions(data)),
        ("Was it the retriever that learnt?", _controls(data)),
        ("Would BM25 do as well?", _word_matching(data)),
        ("Does it answer questions?", _reader(data)),
        ("Does reading help to predict?", _utility(data)),
    )
    return [(question, answer) for question, answer in findings if answer]


def _regressions(data: Mapping[str, Any]) -> str:
    """The stages that ended worse than they began."""
    stages = data.get("results", {}).get("stages", {})
    return " ".join(f"{stage['warning']}." for stage in stages.values() if "warning" in stage)


def margin(data: Mapping[str, Any], first: float, second: float) -> float:
    """Two standard errors of the difference of two shares; smaller differences are not called differences."""
    questions = data.get("corpus", {}).get("dev_questions")
    if not questions:
        return _DEFAULT_MARGIN
    return 2 * math.sqrt((first * (1 - first) + second * (1 - second)) / questions) + 0.5 / questions


def _change(data: Mapping[str, Any], recalls: Mapping[str, float], before: float, after: float, target: str) -> str:
    clear = margin(data, before, after)
    if after < before - clear:
        return f"Filling in masked words made the retriever worse at finding {target}."
    if after <= before + clear:
        return f"Filling in masked words did not teach the retriever to find {target}: what it finds hardly changed."
    for name, description in CONTROLS.items():
        if name in recalls and recalls[name] >= after - margin(data, recalls[name], after):
            return f"The retriever got better at finding {target}, but {description} did as well: REALM gets no credit."
    if target == "the right passage":
        return (
            "The retriever was never given the passage that answers a question. "
            "From filling in masked words alone it learnt to find it."
        )
    return (
        f"The retriever was never trained on questions. From filling in masked words alone it learnt to find {target}."
    )


def _headline_without_comparison(data: Mapping[str, Any]) -> Headline:
    exact = data.get("results", {}).get("exact_match", {})
    if "retrieval" in exact and WITHOUT_PASSAGES in exact:
        without, reading = exact[WITHOUT_PASSAGES], exact["retrieval"]
        better = reading - without > margin(data, reading, without)
        sentence = (
            "Reading retrieved passages, the model answers questions that it cannot answer alone."
            if better
            else "Retrieved passages did not help the model to answer questions."
        )
        figures = f"exact match {share(without)} → {share(reading)}"
        footnote = f"Share of questions answered exactly without and with passages{_questions(data)}."
        return Headline(sentence, figures, footnote)
    sentence = "This run cannot yet say whether the retriever learnt anything"
    return Headline(sentence + ".", "", "Recall was not measured both before and after REALM.")


def _recalls(data: Mapping[str, Any]) -> tuple[Mapping[str, float], float | None]:
    """The recall to lead with by method, and that of the trained retriever, None if it was not measured."""
    results = data.get("results", {})
    recalls = results.get(main_measure(results), {})
    return recalls, recalls.get(methods_compared(data)[1])


def _controls(data: Mapping[str, Any]) -> str:
    recalls, learnt = _recalls(data)
    controls = {name: recalls[name] for name in CONTROLS if name in recalls}
    if learnt is None or not controls:
        return ""
    compared = "; ".join(f"{CONTROLS[name]} {share(recall)}" for name, recall in controls.items())
    behind = all(learnt - recall > margin(data, learnt, recall) for recall in controls.values())
    verdict = "Yes." if behind else "Not shown: a control does as well or nearly so."
    return f"{verdict} REALM reaches {share(learnt)}; {compared}."


def _word_matching(data: Mapping[str, Any]) -> str:
    recalls, learnt = _recalls(data)
    if learnt is None or "bm25" not in recalls:
        return ""
    word_matching = recalls["bm25"]
    clear = margin(data, word_matching, learnt)
    if word_matching > learnt + clear:
        return f"They find more: BM25 {share(word_matching)}, REALM {share(learnt)}."
    if learnt <= word_matching + clear:
        return f"They find about as much: BM25 {share(word_matching)}, REALM {share(learnt)}."
    return f"No. BM25 finds {share(word_matching)}, REALM {share(learnt)}.{_where_words_fail(data)}"


def _where_words_fail(data: Mapping[str, Any]) -> str:
    groups = data.get("recall_by_replaced_words", {})
    words, learnt = groups.get("bm25", {}), groups.get(methods_compared(data)[1], {})
    both = sorted({*words} & {*learnt}, key=group_order)
    if len(both) < 2:
        return ""
    least, most = both[0], both[-1]
    lost_words = words[least] - words[most]
    lost_learnt = learnt[least] - learnt[most]
    if lost_words <= lost_learnt + _DEFAULT_MARGIN:
        return ""
    return (
        f" Where {most} of a name's words are replaced by others, BM25 finds {share(words[most])}"
        f" and REALM {share(learnt[most])}; with {least} replaced, {share(words[least])}"
        f" and {share(learnt[least])}."
    )


def _reader(data: Mapping[str, Any]) -> str:
    exact = data.get("results", {}).get("exact_match", {})
    if "retrieval" not in exact:
        return ""
    sentence = f"With retrieved passages it answers {share(exact['retrieval'])} of the questions exactly"
    if WITHOUT_PASSAGES in exact:
        sentence += f"; a model without passages answers {share(exact[WITHOUT_PASSAGES])}"
    if "chance" in exact:
        sentence += f"; always giving the commonest answer, {share(exact['chance'])}"
    return sentence + "."


def _utility(data: Mapping[str, Any]) -> str:
    utility = data.get("results", {}).get("retrieval_utility")
    if utility is None:
        return ""
    if utility <= 0:
        return f"No: a masked word gets no more probable by the passages (retrieval utility {utility:+.2f} nats)."
    factor = math.exp(min(utility, 50))
    times = f"{factor:,.0f}" if factor >= 10 else f"{factor:.1f}"
    return (
        f"A masked word is {times} times as probable with the retrieved passages as without, in the geometric mean"
        f" over the last steps of REALM (retrieval utility {utility:+.2f} nats)."
    )


def metric_label(measure: str) -> str:
    """A measure's key as it is written on the page."""
    return measure.replace("_", " ").replace("mrr", "MRR").replace("ndcg", "nDCG")


def _target(measure: str | None) -> str:
    return "the right passage" if measure == "recall@5" else "a passage with the answer"


def _questions(data: Mapping[str, Any]) -> str:
    questions = data.get("corpus", {}).get("dev_questions")
    return f", on {questions:,} questions kept apart from training" if questions else ""
