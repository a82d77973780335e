"""Plan an adaptation: choose the held-out documents, the tasks, and the number of their steps that fits the time.

Times are measured on this machine before the first step. They are estimates for a machine that runs nothing else.
Read `make_plan`; the functions below it are in the order of their use.
"""

import dataclasses
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from realm_jax.adaptation.evaluate import (
    MAX_SENTENCES,
    MIN_SENTENCES,
    QUESTIONS_SPLIT,
    WEIGHTS,
    AdaptEvaluator,
    find_sentences,
    indexed_vectors,
    trains_passage_encoder,
    users_pipeline,
)
from realm_jax.adaptation.record import OTHER, AdaptRequest, CorpusFacts, Estimate, Plan
from realm_jax.assemble import make_run
from realm_jax.config import task_names
from realm_jax.data.evidence import find_evidence
from realm_jax.data.examples import batches, salient_sentences
from realm_jax.data.held_out import HeldOutSentence, trained_rows
from realm_jax.data.sources import open_sources
from realm_jax.data.staging import PREPARED
from realm_jax.errors import UserError
from realm_jax.eval.format import duration
from realm_jax.indexing.control import ControlSignal, put_control
from realm_jax.indexing.vector_cache import share_to_embed
from realm_jax.models.layers import Params
from realm_jax.retrieval import bm25
from realm_jax.run import Run, local_rows, make_global_batch
from realm_jax.search_index import DATA
from realm_jax.storage import read_json
from realm_jax.tasks import make_task
from realm_jax.tasks.evidence_contrast import GROUP
from realm_jax.tasks.ict import Ict
from realm_jax.train.recipe import checked_run, missing_data, recipe_tasks, starting_params
from realm_jax.train.results import save_bm25_index
from realm_jax.train.step import make_step, start_state

logger = logging.getLogger(__name__)

WANTED_SENTENCES = 1500  # held-out sentences with a span to hide
MIN_SHARE, MAX_SHARE = 0.02, 0.2  # of the documents that are held out
MIN_HELD_OUT, MAX_SHARE_OF_FEW = 12, 1 / 3  # hold out so many documents, but no larger share
REQUIRED_SENTENCES, REQUIRED_DOCUMENTS = 8, 6  # held out; fewer cannot decide anything
MIN_STEPS = 20  # of a task
RESERVE = 0.1  # share of the time that is not planned
MAX_MEASURING = 0.2  # share of the time to compare encoders
NUM_SAMPLED_PASSAGES = 256  # passages that are embedded to measure the time
QUERIES = 3  # of a held-out sentence: without a span, complete, and complete for its passage without it
NUM_TIMED_STEPS = 3  # of each task, after the first


def make_plan(request: AdaptRequest, config: ConfigDict, began: float) -> Plan:
    """Plan the adaptation of the prepared documents.

    Args:
        request: the request.
        config: its recipe, with `data.path` and `init_from`. It is not changed.
        began: `time.monotonic()` at the start of the command, in seconds.

    Raises:
        UserError: there are too few documents or minutes.
    """
    # --- Limits of the corpus: the candidates of REALM, and the share to hold out
    config = ConfigDict(config.to_dict())
    num_passages = len(open_sources(config.data.path, questions=False).passages)
    config.realm.candidates = _num_candidates(config, num_passages)
    run = checked_run(config, request.workdir)
    store = run.sources.passages
    evidence = find_evidence(store, *run.lengths.hidden)
    num_sentences = len(salient_sentences(store, run.lengths.query).rows) or int(store.counts("sentences").sum())
    share = min(max(WANTED_SENTENCES / max(num_sentences, 1), MIN_SHARE), MAX_SHARE)
    share = max(share, min(MIN_HELD_OUT / store.documents, MAX_SHARE_OF_FEW))
    share = round(share, 3)  # `is_held_out` counts in thousandths
    config.evaluation.held_out = share
    sentences = find_sentences(run, evidence, share)
    _check_sentences(request.documents, run, sentences, share)

    # --- Tasks: those that learn from evidence need a group of documents with evidence
    notes: list[str] = []
    is_trained = trained_rows(store, share)
    assert is_trained is not None, "some documents are held out"
    evidence_rows = np.unique(evidence.among(is_trained).spans.rows)
    num_documents = len({store.document_id(row) for row in evidence_rows.tolist()})
    from_evidence = {"evidence_contrast"} | ({"realm"} if run.config.realm.masking == "evidence" else set())
    other_tasks = [name for name in task_names(run.config) if name not in from_evidence]
    config.tasks = run.config.tasks
    if num_documents < GROUP and len(other_tasks) < len(task_names(run.config)):
        few = (
            f"{num_documents} documents to learn from have a name that another passage supports, and {GROUP} are needed"
        )
        if not other_tasks:
            other_tasks = [Ict.name]
            if lacking := missing_data(Ict.name, config, run.sources):
                raise UserError(
                    f"{request.documents}: {few}, and there is no {lacking}; add documents, or use the base encoder"
                )
        config.tasks = ",".join(other_tasks)
        notes.append(f"{few}: nothing was learned from hidden names.")
        logger.warning("%s", notes[-1])
    run = checked_run(config, request.workdir)
    other_corpus = open_other_corpus(request, run.config) if request.forgetting else None
    save_bm25_index(run)

    # --- Time: embedding and searching before any step is compiled, then the time of a step
    logger.info("measuring the speed of this machine")
    seconds = request.minutes * 60
    params = starting_params(run)
    estimate, max_sentences = measure_searches(run, params, sentences, seconds * MAX_MEASURING)
    if other_corpus is not None:
        other_run, other_sentences = other_corpus
        encoders = 1 + any(trains_passage_encoder(task) for task in recipe_tasks(run))  # to embed its passages
        embed_other = estimate.passage * len(other_run.sources.passages) * encoders
        measure_other = estimate.query * 2 * QUERIES * len(other_sentences)  # two encoders
        estimate = dataclasses.replace(
            estimate, embed=estimate.embed + embed_other, measure=estimate.measure + measure_other
        )
    check_time(request.minutes, time.monotonic() - began, estimate, num_passages)
    compile_seconds, step_seconds = measure_steps(run, params, estimate.passage * num_passages)
    estimate = dataclasses.replace(estimate, compile=compile_seconds, step=step_seconds)
    elapsed_seconds = time.monotonic() - began
    notes += check_time(request.minutes, elapsed_seconds, estimate, num_passages)

    # --- Steps that fit the rest
    remaining_seconds = seconds * (1 - RESERVE) - elapsed_seconds
    remaining_seconds -= estimate.embed + estimate.measure + estimate.compile
    max_steps = {name: run.config[name].steps for name in task_names(run.config)}
    counts = read_json(Path(config.data.path) / PREPARED)["counts"]
    skipped_questions = count_skipped(counts["questions"]) if "questions" in counts else {}
    return Plan(
        candidates=config.realm.candidates,
        held_out=share,
        tasks=",".join(max_steps),
        steps=steps_that_fit(max_steps, estimate.step, remaining_seconds, MIN_STEPS),
        dtype=config.model.dtype,
        sentences=max_sentences,
        estimate=estimate,
        notes=tuple(notes),
        corpus=CorpusFacts(
            passages=num_passages,
            documents=store.documents,
            read=counts["passages"]["records"],
            left_out=count_skipped(counts["passages"])
            | {f"questions {reason}": count for reason, count in skipped_questions.items()},
            fingerprint=store.fingerprint,
            spans=int(store.counts("spans").sum()),
            spans_with_evidence=len(evidence.spans.rows),
        ),
    )


def open_other_corpus(request: AdaptRequest, config: ConfigDict) -> tuple[Run, list[HeldOutSentence]]:
    """Open the second corpus.

    Args:
        request: the request, with a second corpus.
        config: of the run.

    Returns:
        The run over it, and its sentences to search with, from all documents because no task trains on them.

    Raises:
        UserError: there are too few sentences.
    """
    folder, config = request.workdir / OTHER, ConfigDict(config.to_dict())
    config.data.path, config.evaluation.held_out = str(folder / DATA), 0.0
    sources = open_sources(config.data.path)
    config.realm.candidates = _num_candidates(config, len(sources.passages))
    run = make_run(config, folder, sources)  # unchecked, because no task is trained on it
    sentences = find_sentences(run, find_evidence(sources.passages, *run.lengths.hidden), 1.0)
    _check_sentences(str(request.forgetting), run, sentences, 1.0)
    return run, sentences


def _num_candidates(config: ConfigDict, num_passages: int) -> int:
    """Return K of REALM, at most the number of passages, and at least 2 (the null document and one passage)."""
    return max(2, min(config.realm.candidates, num_passages))


def _check_sentences(documents: str, run: Run, sentences: Sequence[HeldOutSentence], share: float) -> None:
    """Raise UserError if there are too few held-out sentences to decide anything."""
    number = len({run.sources.passages.document_id(sentence.row) for sentence in sentences})
    if len(sentences) < REQUIRED_SENTENCES or number < REQUIRED_DOCUMENTS:
        raise UserError(
            f"{documents}: {share:.0%} of the documents have {len(sentences)} sentences that no other has, in {number} "
            f"documents, but {REQUIRED_SENTENCES} in {REQUIRED_DOCUMENTS} are needed to measure whether adaptation "
            "helps; add documents that differ, or split long ones"
        )


def count_skipped(counts: Mapping[str, Any]) -> dict[str, int]:
    """Return reason → number of skipped records, for a part of PREPARED.json."""
    return dict(Counter(counts["dropped"]) + Counter(counts["damaged"]))


# --- time -------------------------------------------------------------------------------------------------------------


def check_time(minutes: float, elapsed_seconds: float, estimate: Estimate, num_passages: int) -> list[str]:
    """Check that there is enough time.

    Args:
        minutes: time for everything.
        elapsed_seconds: time since the command began.
        estimate: time of all stages.
        num_passages: for the message.

    Returns:
        A note for the report if there is time only for MIN_STEPS of each task.

    Raises:
        UserError: twice the minutes would be too short.
    """
    training = estimate.compile + MIN_STEPS * sum(estimate.step.values())
    needed = elapsed_seconds + estimate.embed + estimate.measure + training
    if needed <= minutes * 60 * (1 - RESERVE):
        return []
    embedding, measuring = duration(estimate.embed), duration(estimate.measure)
    parts = f"{embedding} to embed {num_passages:,} passages, {measuring} to compare encoders"
    message = f"--minutes={minutes:g}: is too short: this machine needs {duration(needed)} ({parts})"
    if needed > 2 * minutes * 60:
        raise UserError(f"{message}; increase it, or use fewer documents")
    note = f"{message}; training takes the fewest steps."
    logger.warning("%s", note)
    return [note]


def measure_searches(
    run: Run, params: Params, sentences: Sequence[HeldOutSentence], longest: float
) -> tuple[Estimate, int]:
    """Measure how long embedding and searching take.

    Args:
        run: the run.
        params: the base encoder.
        sentences: held-out sentences.
        longest: maximum seconds to compare encoders.

    Returns:
        The estimate, without steps, and the maximum number of sentences to measure, which is lower if time is short.
    """
    num_passages = run.context.rows
    sample = sentences[:: max(1, len(sentences) // 64)]
    evaluator = AdaptEvaluator(run, sample)
    zeros = np.zeros((num_passages, run.model.vector_size), np.float32)  # the values do not change the time
    pipeline = users_pipeline(run)
    query_seconds = _seconds_of(lambda: evaluator.sentence_metrics(params, zeros, pipeline)) / (2 * len(sample))
    num_weights = 1 + len(WEIGHTS)  # with the base encoder; searches by one list only are much faster
    num_questions = len(run.sources.questions.get(QUESTIONS_SPLIT, []))
    affordable = int((longest / (query_seconds * num_weights) - num_questions) / QUERIES)
    max_sentences = min(MAX_SENTENCES, max(MIN_SENTENCES, affordable))
    num_sentences = min(max_sentences, len(sentences))
    measure_seconds = query_seconds * num_weights * (QUERIES * num_sentences + num_questions)

    embed_seconds = seconds_to_embed(run, params)
    num_passage_tasks = sum(trains_passage_encoder(task) for task in recipe_tasks(run))
    # All passages: by the base encoder, by each task that trains the passage encoder, and at a second weight. Passages
    # without their sentence: by each measured encoder.
    times_embedded = share_to_embed(run, params) if indexed_vectors(run) is None else 0.0
    times_embedded += num_passage_tasks + float(num_passage_tasks > 0)
    times_embedded += num_weights * min(num_sentences / num_passages, 1.0)
    if pipeline.rerank is not None:  # a sentence's queries find many of the same passages; each is encoded once
        share_encoded = min(2 * pipeline.rerank.passages * num_sentences / num_passages, 1.0)
        times_embedded += share_encoded * (num_weights if num_passage_tasks else 1)
    estimate = Estimate(
        passage=embed_seconds / num_passages,
        embed=embed_seconds * times_embedded,
        query=query_seconds,
        measure=measure_seconds,
    )
    return estimate, max_sentences


def seconds_to_embed(run: Run, params: Params) -> float:
    """Return the seconds that embedding the corpus takes, measured on passages that are spread evenly over it.

    Args:
        run: the run.
        params: parameters of the passage encoder.
    """
    count = min(NUM_SAMPLED_PASSAGES, run.context.rows)
    sample = run.corpus.take(np.linspace(0, run.context.rows - 1, count).astype(int))
    return _seconds_of(lambda: run.embed(params, rows=sample)) * run.context.rows / count


def _seconds_of(work: Callable[[], Any]) -> float:
    """Return the seconds that a function takes once it is compiled."""
    jax.block_until_ready(work())
    began = time.monotonic()
    jax.block_until_ready(work())
    return time.monotonic() - began


def measure_steps(run: Run, params: Params, embed_seconds: float) -> tuple[float, dict[str, float]]:
    """Measure a few steps of each task, without changing any file of the run.

    Args:
        run: the run.
        params: parameters that each task starts from.
        embed_seconds: time to embed all passages.

    Returns:
        Seconds to compile the steps of all tasks, which a change of their number requires again; and task → seconds of
        a step, with its share of refreshing the index.
    """
    compile_seconds, step_seconds = 0.0, dict[str, float]()
    zeros = np.zeros((run.context.rows, run.model.vector_size), np.float32)  # the values do not change the time
    for task in recipe_tasks(run):
        # A temporary run directory, so that training makes the lists of its examples again.
        with tempfile.TemporaryDirectory() as folder:
            if (run.workdir / bm25.FOLDER).is_dir():
                (Path(folder) / bm25.FOLDER).symlink_to((run.workdir / bm25.FOLDER).absolute())
            copy = make_task(task.name, dataclasses.replace(run, workdir=Path(folder)))
            examples = copy.examples(params, lambda: zeros)
        size = task.settings.batch_size
        rows = local_rows(run.mesh, size)
        step, index, control = make_step(task), run.index(zeros), put_control(run.mesh, ControlSignal())
        state, seconds = start_state(task, jax.tree.map(jnp.copy, params)), list[float]()
        for batch in batches(examples, run.config.seed, task.stream, size, 0, 1 + NUM_TIMED_STEPS, rows):
            began = time.monotonic()
            state, _ = step(state, make_global_batch(run.mesh, batch, rows, size), index, control)
            jax.block_until_ready(state)
            seconds.append(time.monotonic() - began)
        compile_seconds += seconds[0]
        refresh = embed_seconds / task.refresh_every if trains_passage_encoder(task) and task.refresh_every else 0.0
        step_seconds[task.name] = float(np.median(seconds[1:])) + refresh
        del state, index  # the next task needs the memory
    return compile_seconds, step_seconds


def steps_that_fit(
    max_steps: Mapping[str, int], step_seconds: Mapping[str, float], seconds: float, min_steps: int
) -> dict[str, int]:
    """Return the steps of each task: the same share of its maximum, as large as the time allows.

    Args:
        max_steps: task → steps of the recipe.
        step_seconds: task → seconds of a step.
        seconds: time for all steps.
        min_steps: fewest steps of a task, even if they take longer.
    """
    total = sum(max_steps[name] * step_seconds[name] for name in max_steps)
    share = min(1.0, max(0.0, seconds) / total) if total else 1.0
    return {name: max(min(min_steps, steps), int(steps * share)) for name, steps in max_steps.items()}
