"""Write the results of a finished run, `results.json` and `report.html`, from the records in its directory.

They need only files that training wrote, and predictions for some development questions. So a run can write them again
at any time. `realm_jax/eval/report.py` makes the page.
"""

import logging
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.config import flatten, task_names
from realm_jax.data.held_out import evenly_spaced
from realm_jax.data.questions import Question, answered
from realm_jax.eval.answer_matching import exact_match, find_answer
from realm_jax.eval.prediction import GROUPED_BY, Evaluator
from realm_jax.eval.report import UNTRAINED, write_report
from realm_jax.eval.retrieval_metrics import is_retrieval_measure
from realm_jax.forward import SearchPipeline
from realm_jax.host import usable_cores
from realm_jax.indexing.vector_cache import embed_with_cache
from realm_jax.models.layers import Params
from realm_jax.processes import broadcast_from_process_0, is_process_0
from realm_jax.retrieval.bm25 import load_or_build, save_index
from realm_jax.run import Run
from realm_jax.storage import read_json, write_json_atomic
from realm_jax.tasks.answering import (
    ANSWERING_TASKS,
    evaluation_pipeline,
    needs_vectors,
    question_search,
    trained_reranker,
    trains_qa_reader,
)
from realm_jax.train.best import keeps_best, selection_metric
from realm_jax.train.exported_model import exported_vectors
from realm_jax.train.records import (
    adoptions,
    describe_regression,
    primary_metric,
    read_lines,
    recall_history,
    retrieval_utility,
    seconds_spent,
    stage_summary,
)
from realm_jax.train.workdir import begins_with_reader

logger = logging.getLogger(__name__)

BY_REPLACED_WORDS = "recall@5_by_replaced_words"
MAX_BM25_PASSAGES = 1_000_000  # for the BM25 baseline of a run
NUM_EXAMPLES = 6  # questions in the report
# Task → its title and its training signal, for the report.
STAGES = {
    "mlm": (
        "Reader pre-training",
        "Masked names and dates of a sentence, read with other sentences of the same passage that mention them, with a "
        "random passage, or without text. No questions, no labels.",
    ),
    "ict": (
        "Inverse cloze task",
        "Sentences, and the passages that they come from. No questions, no labels.",
    ),
    "realm": (
        "REALM",
        "Masked names and dates of the pre-training text. No labels: the retriever learns which passages help the "
        "reader to predict them.",
    ),
    "qa": ("Fine-tuning", "Questions with answer strings, without a label for the right passage."),
    "closed_book": (
        "Without passages",
        "Questions with answer strings, and masked names and dates of sentences; no passages.",
    ),
    "rerank": ("Reranker", "Questions with answer strings, and how much each passage helps the trained reader."),
    "evidence_contrast": (
        "Evidence contrast",
        "Sentences without a name, their own passages, and passages that share the name and rare words with them. "
        "Passages only; no questions, no labels.",
    ),
}
POSITIVE_QUESTIONS = (  # of fine-tuning with qa.objective=positive
    "Questions with answer strings, each read with one passage that holds an answer: from its gold document if that "
    "is known, else the top retrieved one."
)


def majority_exact_match(train: Sequence[Question], dev: Sequence[Question]) -> float:
    """Return the exact match of always giving the most common training answer.

    Args:
        train: training questions.
        dev: questions to measure on; those without answers do not count.

    Returns:
        A share, with the most common answer of each relation if questions name one; 0 if no question has answers.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    dev = answered(dev)
    for question in answered(train):
        counts[str(question.fields.get("relation"))].update(question.answers[:1])
    guesses = {group: counter.most_common(1)[0][0] for group, counter in counts.items()}
    guessed = [guesses.get(str(question.fields.get("relation")), "") for question in dev]
    right = [exact_match(guess, q.answers, q.is_regex) for guess, q in zip(guessed, dev, strict=True)]
    return float(np.mean(right)) if right else 0.0


def measure_baselines(run: Run, evaluator: Evaluator) -> None:
    """Measure recall of BM25 and of fresh parameters, and write it to `baselines.json` for resumed runs.

    Only process 0 measures BM25, and only up to MAX_BM25_PASSAGES: for ten million passages its index takes hours and
    all memory of a host.

    Args:
        run: has the passages and the run directory.
        evaluator: evaluator of the development questions.
    """
    path = run.workdir / "baselines.json"
    if broadcast_from_process_0(path.is_file()):
        return
    began = time.monotonic()
    baselines, count = dict[str, Any](), len(run.sources.passages)
    if count > MAX_BM25_PASSAGES and is_process_0():
        logger.info("skipping the BM25 baseline: %s passages, more than %s", f"{count:,}", f"{MAX_BM25_PASSAGES:,}")
    elif is_process_0():
        save_bm25_index(run)
        baselines["bm25"] = evaluator.recall_of(bm25_question_rows(run, evaluator))
    if not run.config.init_from:  # else the first evaluation of the first task measures the start
        params = run.initial_params()
        baselines["untrained"] = evaluator.recall(params, run.index(embed_with_cache(run, params)))
    baselines["seconds"] = time.monotonic() - began
    if is_process_0():
        write_json_atomic(path, baselines)


def save_bm25_index(run: Run) -> None:
    """Save the BM25 index of the corpus to the run directory, for questions."""
    if is_process_0():
        save_index(run.sources.passages, run.bm25_language, run.workdir)


def bm25_question_rows(run: Run, evaluator: Evaluator) -> NDArray[np.int64]:
    """Return the rows that BM25 retrieves for questions, [questions, depth] int64; −1 for none.

    Args:
        run: has the passages, and the saved index in its directory.
        evaluator: has the questions and the depth, `answering.retrieved`.
    """
    bm25 = load_or_build(run.sources.passages, run.bm25_language, run.workdir)
    return bm25.search([question.question for question in evaluator.questions], evaluator.depth)


def write_results(run: Run, params: Params, questions: Sequence[Question], command: str) -> dict[str, Any]:
    """Write `results.json` and `report.html`. Every process has to call this.

    Args:
        run: has the records in its directory.
        params: all parameters after the last task.
        questions: to measure.
        command: the command line, for the report.

    Returns:
        The results, see `collect_results`; {} except in process 0.
    """
    # --- Metrics that the last task did not evaluate: recall of hybrid search, exact match of a reader of `init_from`
    names, last = task_names(run.config), task_names(run.config)[-1]
    pipeline = SearchPipeline(question_search(last, run.config), trained_reranker(last, run.config))
    if needs_vectors(last, run.config):
        vectors = exported_vectors(run, last)
        index = run.index(run.embed(params) if vectors is None else vectors)
    else:
        index = run.index_without_vectors
    started_with_reader = broadcast_from_process_0(begins_with_reader(run.workdir))
    measured = dict[str, Any]()
    if pipeline != evaluation_pipeline(last, run.config):
        measured |= Evaluator(run, questions, pipeline).recall(params, index)
    if started_with_reader and last not in ANSWERING_TASKS and (with_answers := answered(questions)):
        evaluator = Evaluator(run, with_answers, pipeline)
        measured["exact_match"] = evaluator.exact_match(evaluator.predict(params, index))

    # --- Examples; only process 0 goes on after the predictions
    example_questions = evenly_spaced(questions, NUM_EXAMPLES)
    predictions = Evaluator(run, example_questions, pipeline).predict(params, index)
    if not is_process_0():
        return {}
    store = run.sources.passages
    reads = started_with_reader or any(map(trains_qa_reader, names))
    examples = []
    for question, prediction in zip(example_questions, predictions, strict=True):
        candidates = [
            {
                "title": store.title(row),
                "text": store.text(row),
                "probability": probability,
                "is_gold": store.document_id(row) in question.gold,
                "answer_span": find_answer(store.text(row), [prediction.answer] if reads else []),
            }
            for row, probability, _ in prediction.candidates
        ]
        example: dict[str, Any] = {"question": question.question, "answers": question.answers, "candidates": candidates}
        if reads:
            example["prediction"] = prediction.answer
        if reads and question.answers:
            example["correct"] = exact_match(prediction.answer, question.answers, question.is_regex)
        examples.append(example)

    # --- results.json and the report
    results = collect_results(run, questions, measured)
    write_json_atomic(run.workdir / "results.json", results)
    stages = []
    for name in names:
        if metrics := read_lines(run.workdir / name / "metrics.jsonl"):
            title, supervision = STAGES[name]
            if name == "qa" and run.config.qa.objective == "positive":
                supervision = POSITIVE_QUESTIONS
            stage = {"name": name, "title": title, "supervision": supervision, "steps": run.config[name].steps}
            stages.append(stage | {"seconds": results["seconds"].get(name), "metrics": metrics})
    evaluations = records(run, "evaluations")
    report = {
        "title": "REALM",
        "command": command,
        "created": time.strftime("%Y-%m-%d %H:%M"),
        "hardware": hardware(),
        "corpus": {
            "passages": len(store),
            "pretraining": len(run.sources.pretraining),
            "train_questions": len(run.sources.questions.get("train", [])),
            "dev_questions": len(questions),
        },
        "results": results,
        "stages": stages,
        "recall_history": recall_history(evaluations),
        "adoptions": adoptions(evaluations),
        "recall_by_replaced_words": results.get(BY_REPLACED_WORDS, {}),
        "questions_by_replaced_words": Counter(str(question.fields.get(GROUPED_BY)) for question in questions),
        "settings": flatten(run.config.to_dict()),
        "examples": examples,
    }
    write_report(report, run.workdir / "report.html")
    return results


def records(run: Run, kind: str) -> dict[str, list[dict[str, Any]]]:
    """Read the records of all tasks.

    Args:
        run: has recipe and run directory.
        kind: 'metrics' or 'evaluations'.

    Returns:
        Task → its records, in the order of the recipe.
    """
    return {name: read_lines(run.workdir / name / f"{kind}.jsonl") for name in task_names(run.config)}


def collect_results(run: Run, questions: Sequence[Question], by_question_search: dict[str, Any]) -> dict[str, Any]:
    """Return recall by method, exact match, retrieval utility, and seconds by stage.

    Args:
        run: has the records in its directory.
        questions: questions that were measured.
        by_question_search: metrics that the last task did not evaluate; their method is the name of the search.
    """
    measured = {UNTRAINED: {}, "bm25": {}} | read_json(run.workdir / "baselines.json")
    names = task_names(run.config)
    metrics, evaluations = records(run, "metrics"), records(run, "evaluations")
    seconds = {"baselines": measured.pop("seconds", 0.0)}
    stages = {}
    for name in names:
        lines = evaluations[name]
        if metrics[name]:
            seconds[name] = seconds_spent(metrics[name], lines)
        if lines and any("recall@" in key for key in lines[-1]):
            measured[name] = lines[-1]
        # The end of the task compared with its start, with a warning if it is worse.
        if stage := stage_summary(run.workdir / name):
            measure = selection_metric(name, lines[-1]) if keeps_best(name, run.config) else None
            warning = describe_regression(name, stage, measure)
            stages[name] = stage | ({"warning": warning} if warning else {})
    if primary_metric(by_question_search):
        measured[question_search(names[-1], run.config)] = by_question_search

    keys = sorted({key for values in measured.values() for key in values if is_retrieval_measure(key)})
    results: dict[str, Any] = {
        key: {name: values[key] for name, values in measured.items() if key in values} for key in keys
    }
    if by_words := {
        name: values[BY_REPLACED_WORDS] for name, values in measured.items() if BY_REPLACED_WORDS in values
    }:
        results[BY_REPLACED_WORDS] = by_words
    exact = results["exact_match"] = dict[str, float]()
    for values in (*(measured.get(name, {}) for name in names), by_question_search):
        if "exact_match" in values:
            exact["retrieval"] = values["exact_match"]
    if answered(questions):
        exact["chance"] = majority_exact_match(run.sources.questions.get("train", []), questions)
    # Two methods whose difference is the effect of masked words on the retriever.
    if "realm" in names:
        before = [name for name in names[: names.index("realm")] if name in measured]
        results["comparison"] = {"before": before[-1] if before else UNTRAINED, "after": "realm"}
    dev = bool(run.sources.questions.get("dev"))
    results["measured_on"] = "development questions" if dev else "masked sentences of held-out documents"
    results["stages"] = stages
    steps = {name: run.config[name].steps for name in names}
    if (utility := retrieval_utility(metrics, steps)) is not None:
        results["retrieval_utility"] = utility
    return results | {"seconds": seconds}


def hardware() -> str:
    """Describe this machine in one line."""
    device = jax.devices()[0]
    cores = usable_cores()
    return f"{jax.device_count()} × {device.device_kind} ({device.platform}), {cores} cores, {platform.machine()}"
