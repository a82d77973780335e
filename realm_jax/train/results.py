"""Results of a finished run: `results.json` and `report.html`, from the records in its folder.

Everything comes from files that training wrote, and from one more reading of the development questions; so results can
be made again at any time. How the page looks is `realm_jax/eval/report.py`.
"""

import logging
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from realm_jax.config import flatten, task_names
from realm_jax.data.examples import dataset
from realm_jax.data.held_out import evenly_spaced
from realm_jax.data.questions import Question, answered
from realm_jax.eval.answers import exact_match, find_answer
from realm_jax.eval.prediction import GROUPED_BY, Evaluator, Prediction
from realm_jax.eval.report import UNTRAINED, write_report
from realm_jax.eval.retrieval import is_retrieval_measure
from realm_jax.forward.context import Index, reader_query
from realm_jax.forward.masked import read_masked
from realm_jax.host import usable_cores
from realm_jax.mesh import to_host
from realm_jax.models.likelihood import masked_word_marginal
from realm_jax.models.realm import Params
from realm_jax.processes import broadcast_from_process_0, is_process_0
from realm_jax.retrieval.bm25 import load_or_build, save_index
from realm_jax.run import Run, put_batch
from realm_jax.storage import read_json, write_json_atomic
from realm_jax.tasks import TASKS, make_task
from realm_jax.tasks.base import Task
from realm_jax.tasks.realm import RealmTask
from realm_jax.train.best import selection_metric
from realm_jax.train.checkpoints import SavedCheckpoint
from realm_jax.train.index_source import embed_with_cache
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
from realm_jax.train.restore import restore_params, saved_index
from realm_jax.train.workdir import begins_with_reader

logger = logging.getLogger(__name__)

BY_WORDS = "recall@5_by_replaced_words"
LARGEST = 1_000_000  # passages that BM25 is measured on beside a run
SHOWN_QUESTIONS = 6
SENTENCES = 64  # or a few more, to share them out evenly over the devices


def majority_exact_match(train: Sequence[Question], dev: Sequence[Question], by: str = "relation") -> float:
    """Exact match of always giving the most common training answer, of the question's `by` field where there is one.

    Over the questions that have answers; 0 where none has.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    dev = answered(dev)
    for question in answered(train):
        counts[str(question.fields.get(by))].update(question.answers[:1])
    guesses = {group: counter.most_common(1)[0][0] for group, counter in counts.items()}
    guessed = [guesses.get(str(question.fields.get(by)), "") for question in dev]
    right = [exact_match(guess, q.answers, q.is_regex) for guess, q in zip(guessed, dev, strict=True)]
    return float(np.mean(right)) if right else 0.0


def measure_baselines(run: Run, evaluator: Evaluator) -> None:
    """Recall of BM25 and of fresh parameters, kept in `baselines.json` so that a resumed run has them too.

    BM25 by the first process alone, and of LARGEST passages at most: its index takes hours and all memory of a host
    where there are ten million.
    """
    path = run.workdir / "baselines.json"
    if broadcast_from_process_0(path.is_file()):
        return
    began = time.monotonic()
    found, count = dict[str, Any](), len(run.sources.passages)
    if count > LARGEST and is_process_0():
        logger.info("BM25 is not measured beside the run: %s passages, more than %s", f"{count:,}", f"{LARGEST:,}")
    elif is_process_0():
        save_bm25_index(run)
        found["bm25"] = evaluator.recall_of(bm25_question_rows(run, evaluator))
    if not run.config.init_from:  # else the first measurement of the first task says where the run began
        params = run.initial_params()
        found["untrained"] = evaluator.recall(params, run.index(embed_with_cache(run, params)))
    found["seconds"] = time.monotonic() - began
    if is_process_0():
        write_json_atomic(path, found)


def save_bm25_index(run: Run) -> None:
    """Save the BM25 index of the corpus in the run folder, where questions use it later."""
    if is_process_0():
        save_index(run.sources.passages, run.config.retrieval.language, run.workdir)


def bm25_question_rows(run: Run, evaluator: Evaluator) -> NDArray[np.int64]:
    """The rows that BM25 finds for questions, int64 [questions, answering.retrieved]; −1 for none."""
    store, settings = run.sources.passages, run.config
    words = load_or_build(store, settings.retrieval.language, run.workdir)
    return words.search([question.question for question in evaluator.questions], evaluator.depth)


def write_results(run: Run, params: Params, questions: Sequence[Question], command: str) -> dict[str, Any]:
    """Write `results.json` and `report.html`; returns the results, in the first process alone."""
    last = task_names(run.config)[-1]
    index = final_index(run, last, params)
    asked = evaluate_question_search(run, params, index, questions)
    asked_of = make_task(last, run)
    shown_questions = evenly_spaced(questions, SHOWN_QUESTIONS)
    shown = Evaluator(run, shown_questions, asked_of.question_search, asked_of.rerank)
    predictions = shown.predict(params, index)
    sentence = masked_sentence(run, params)
    if not is_process_0():
        return {}
    results = collect_results(run, questions, asked)
    write_json_atomic(run.workdir / "results.json", results)
    examples = report_examples(shown, predictions)
    report = describe_run(run, questions, results, command) | {"examples": examples, "masked_sentence": sentence}
    write_report(report, run.workdir / "report.html")
    return results


def evaluate_question_search(run: Run, params: Params, index: Index, questions: Sequence[Question]) -> dict[str, Any]:
    """Evaluation of the run's question search that the last task did not do: recall by hybrid search, exact match of a
    reader that came with the run. All processes have to call it."""
    last = make_task(task_names(run.config)[-1], run)
    how, found = last.question_search, dict[str, Any]()
    if how != last.eval_search:
        found |= Evaluator(run, questions, how, last.rerank).recall(params, index)
    if (
        not last.learns_to_answer
        and broadcast_from_process_0(begins_with_reader(run.workdir))
        and (asked := answered(questions))
    ):
        evaluator = Evaluator(run, asked, how, last.rerank)
        found["exact_match"] = evaluator.exact_match(evaluator.predict(params, index))
    return found


def final_index(run: Run, task: str, params: Params) -> Index:
    """The index of the parameters at the end of a task: as it was saved with them, or made anew."""
    saved = SavedCheckpoint.newest_on_process_0(run.workdir / task / "checkpoints")
    index = None if saved is None else saved_index(run, task, saved)
    return run.index(run.embed(params)) if index is None else index


def collect_results(run: Run, questions: Sequence[Question], asked: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a run: recall by method, exact match, retrieval utility, seconds by stage.

    asked: what `evaluate_question_search` found; its recall stands beside that of the tasks, by the name of the search.
    """
    measured = {"untrained": {}, "bm25": {}} | read_json(run.workdir / "baselines.json")
    baseline_seconds = measured.pop("seconds", 0.0)
    tasks = [make_task(name, run) for name in task_names(run.config)]
    seconds = {"baselines": baseline_seconds}
    exact: dict[str, float] = {}
    for task in tasks:
        name = task.name
        measures = read_lines(run.workdir / name / "evaluations.jsonl")
        last = measures[-1] if measures else {}
        if steps := read_lines(run.workdir / name / "metrics.jsonl"):
            seconds[name] = seconds_spent(steps, measures)
        if any("recall@" in key for key in last):
            measured[name] = last
    if primary_metric(asked):
        measured[tasks[-1].question_search] = asked
    keys = sorted({key for found in measured.values() for key in found if is_retrieval_measure(key)})
    results: dict[str, Any] = {
        key: {name: found[key] for name, found in measured.items() if key in found} for key in keys
    }
    for found in (*(measured.get(task.name, {}) for task in tasks), asked):
        exact |= {"retrieval": found["exact_match"]} if "exact_match" in found else {}
    if answered(questions):
        exact["chance"] = majority_exact_match(run.sources.questions.get("train", []), questions)
    by_group = {name: found[BY_WORDS] for name, found in measured.items() if BY_WORDS in found}
    results |= {BY_WORDS: by_group} if by_group else {}
    results["exact_match"] = exact
    results |= comparison(tasks, measured)
    dev = bool(run.sources.questions.get("dev"))
    results["measured_on"] = "development questions" if dev else "masked sentences of held-out documents"
    results["stages"] = {name: stage for name in task_names(run.config) if (stage := describe_end(run, name))}
    if (utility := retrieval_utility(records(run, "metrics"))) is not None:
        results["retrieval_utility"] = utility
    return results | {"seconds": seconds}


def comparison(tasks: Sequence[Task], measured: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The methods that say what the retriever learnt from masked words: {"comparison": {"before", "after"}}, if any."""
    after = next((number for number, task in enumerate(tasks) if task.inspects_sentences), None)
    if after is None:
        return {}
    before = [task.name for task in tasks[:after] if task.name in measured]
    return {"comparison": {"before": before[-1] if before else UNTRAINED, "after": tasks[after].name}}


def describe_end(run: Run, name: str) -> dict[str, Any] | None:
    """How a task ended against its own start, with the `warning` where it ended below; None if that is not known."""
    stage = stage_summary(run.workdir / name)
    if stage is None:
        return None
    end = read_lines(run.workdir / name / "evaluations.jsonl")[-1]
    task = make_task(name, run)
    measure = selection_metric(task.selects_by, end) if task.keeps_best else None
    loss = describe_regression(name, stage, measure)
    return stage | ({"warning": loss} if loss else {})


def describe_run(run: Run, questions: Sequence[Question], results: dict[str, Any], command: str) -> dict[str, Any]:
    """Everything on the page but the examples."""
    sources = run.sources
    return {
        "title": "REALM",
        "command": command,
        "created": time.strftime("%Y-%m-%d %H:%M"),
        "hardware": hardware(),
        "corpus": {
            "passages": len(sources.passages),
            "pretraining": len(sources.pretraining),
            "train_questions": len(sources.questions.get("train", [])),
            "dev_questions": len(questions),
        },
        "results": results,
        "stages": [stage for name in task_names(run.config) if (stage := describe_stage(run, name, results))],
        "recall_history": recall_history(records(run, "evaluations")),
        "adoptions": adoptions(records(run, "evaluations")),
        "recall_by_replaced_words": results.get(BY_WORDS, {}),
        "questions_by_replaced_words": Counter(str(question.fields.get(GROUPED_BY)) for question in questions),
        "settings": flatten(run.config.to_dict()),
    }


def describe_stage(run: Run, name: str, results: dict[str, Any]) -> dict[str, Any] | None:
    metrics = read_lines(run.workdir / name / "metrics.jsonl")
    if not metrics:
        return None
    seconds = results["seconds"].get(name)
    task = TASKS[name]
    stage = {"name": name, "title": task.title, "supervision": task.supervision(run.config), "seconds": seconds}
    return stage | {"steps": run.config[name].steps, "metrics": metrics}


def records(run: Run, kind: str) -> dict[str, list[dict[str, Any]]]:
    """Task of the recipe → its records, in order. kind: `metrics` or `evaluations`."""
    return {name: read_lines(run.workdir / name / f"{kind}.jsonl") for name in task_names(run.config)}


def report_examples(evaluator: Evaluator, predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """An evaluator's questions with the passages that were read.

    Without a prediction where no reader was fine-tuned, and without a judgment where nothing is known to be right.
    """
    run = evaluator.run
    store = run.sources.passages
    reads = any(TASKS[name].teaches_reading() for name in task_names(run.config)) or begins_with_reader(run.workdir)
    shown = []
    for question, prediction in zip(evaluator.questions, predictions, strict=True):
        candidates = [
            {
                "title": store.title(candidate.row),
                "text": store.text(candidate.row),
                "probability": candidate.probability,
                "is_gold": store.document_id(candidate.row) in question.gold,
                "answer_span": find_answer(store.text(candidate.row), [prediction.answer] if reads else []),
            }
            for candidate in prediction.candidates
        ]
        entry: dict[str, Any] = {"question": question.question, "answers": question.answers, "candidates": candidates}
        if reads:
            entry["prediction"] = prediction.answer
        if reads and question.answers:
            entry["correct"] = exact_match(prediction.answer, question.answers, question.is_regex)
        shown.append(entry)
    return shown


def masked_sentence(run: Run, params: Params) -> dict[str, Any] | None:
    """The paper's Table 3 for a sentence of the pre-training text: of SENTENCES the one that retrieval helps most.

    Read with the parameters at the end of the recipe's task that learnt from such sentences, so only where it has one.
    """
    name = next((name for name in task_names(run.config) if TASKS[name].inspects_sentences), None)
    if name is None:
        return None
    params = restore_params(run, name)
    index = final_index(run, name, params)
    sources, context = run.sources, run.context
    examples = RealmTask(run).masked_examples("salient")
    count = SENTENCES + -SENTENCES % run.mesh.size
    batch = dataset(examples, run.config.seed, TASKS[name].stream, count)[0]

    def read(params: Params, batch: Any, index: Index) -> tuple[jax.Array, ...]:
        read = read_masked(context, params, batch, index, None)
        result = masked_word_marginal(read.scores, read.log_p, batch["weights"], read.valid, "example")
        reading = (read.log_p * batch["weights"][:, None]).sum(axis=-1)
        reading = reading.at[:, 1:].set(jnp.where(read.found.valid, reading[:, 1:], -jnp.inf))
        return read.found.rows, reading, result.log_likelihood

    program, size = jax.jit(read), run.mesh.size  # a device has one at a time: all candidates of many take gigabytes
    parts = [{name: array[i : i + size] for name, array in batch.items()} for i in range(0, count, size)]
    found = [tuple(map(to_host, program(params, put_batch(run.mesh, part), index))) for part in parts]
    rows, reading, marginal = (np.concatenate(pieces) for pieces in zip(*found, strict=True))
    best, counted = int(np.argmax(marginal - reading[:, 0])), context.candidates - (not context.null_document)
    helper = int(reading[best, 1:].argmax())
    tokenizer, store = sources.tokenizer, sources.passages
    ids, lengths = reader_query(batch)
    used = int(lengths[best])
    targets = batch["targets"][best][batch["weights"][best] > 0]
    passage = f"{store.title(rows[best, helper])}: {store.text(rows[best, helper])}"
    entries = [
        ("Reader with the empty passage", "p(y|x, ∅)", reading[best, 0], None),
        ("Reader with the passage that helps most", "p(y|x, z)", reading[best, 1 + helper], passage),
        (
            f"REALM, summed over {counted} candidates",
            "p(y|x) = Σ p(z|x) p(y|x, z)",
            marginal[best],
            None,
        ),
    ]
    return {
        "sentences": count,
        "sentence": tokenizer.decode(ids[best][1 : used - 1]),
        "answer": tokenizer.decode(targets),
        "rows": [
            {"model": model, "expression": expression, "probability": float(np.exp(log_p)), "passage": passage}
            for model, expression, log_p, passage in entries
        ],
    }


def hardware() -> str:
    """One line about this machine."""
    device = jax.devices()[0]
    cores = usable_cores()
    return f"{jax.device_count()} × {device.device_kind} ({device.platform}), {cores} cores, {platform.machine()}"
