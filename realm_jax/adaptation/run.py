"""Adapt a public sentence encoder to documents without questions or labels: `realm adapt`, from request to report.

Read `adapt` from top to bottom; then `plan.py` (held-out documents, tasks, steps), `evaluate.py` (metrics and decision)
and `record.py` (the request, and adapt.json).
"""

import contextlib
import logging
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ml_collections import ConfigDict

from realm_jax.adaptation.evaluate import (
    BASELINE,
    QUESTIONS_SPLIT,
    AdaptEvaluator,
    compare_with_baseline,
    find_sentences,
    interpolate_encoders,
    last_checkpoint,
    measure,
    passage_vectors,
)
from realm_jax.adaptation.plan import count_skipped, make_plan, open_other_corpus
from realm_jax.adaptation.record import (
    DATA,
    OTHER,
    RECORD,
    REPORT,
    AdaptRecord,
    AdaptRequest,
    Decision,
    Forgetting,
)
from realm_jax.adaptation.report import model_card, render_report
from realm_jax.cache import cache_programs
from realm_jax.config import flatten, load_config
from realm_jax.corpora.preparation import Options, PreparedOtherwise
from realm_jax.corpora.summary import prepare_and_print
from realm_jax.corpora.texts import open_texts
from realm_jax.data.evidence import find_evidence
from realm_jax.data.staging import PREPARED
from realm_jax.errors import UserError
from realm_jax.eval.format import duration
from realm_jax.indexing.heartbeat import trainer_status
from realm_jax.indexing.vector_cache import embed_with_cache
from realm_jax.models.folders import resolve_model_path
from realm_jax.models.sentence_transformers import (
    README,
    sentence_model,
    transformer_folder,
)
from realm_jax.models.weights import read_bert_settings
from realm_jax.retrieval.vector_files import FILES as VECTOR_FILES
from realm_jax.retrieval.vector_files import VECTORS, write_vectors
from realm_jax.storage import exclusive_lock, open_folder, read_json, write_atomic
from realm_jax.train.exported_model import MODEL, find_exported_model, write_exported_model
from realm_jax.train.init_from import recorded_start
from realm_jax.train.loop import train_task
from realm_jax.train.recipe import open_run, preemptible, recipe_tasks, starting_params
from realm_jax.train.restore import restore_params

logger = logging.getLogger(__name__)

_MEASURED_ONCE = "only the base encoder and the result are measured"
_AS_BASE = "the adapted encoder has the vector format of --from, because both are compared"
DECIDED = {  # key of the config that the request sets, or that has no effect → why
    "data.path": "the folder is prepared from DOCUMENTS",
    "init_from": "the encoder is that of --from",
    "evaluation.held_out": "the share follows from the documents",
    "evaluation.every": _MEASURED_ONCE,
    "evaluation.keep_best": _MEASURED_ONCE,
    "refresh.mode": "this command has no index builder",
    "model.shared_tower": "two encoders are exported",
    "encoder.pooling": _AS_BASE,
    "encoder.projection": _AS_BASE,
    "encoder.normalization": _AS_BASE,
}


@dataclass(frozen=True)
class AdaptResult:
    """A finished adaptation.

    Attributes:
        decision: whether the base encoder was replaced, and why.
        model: folder of the exported model.
        report: path of the report.
    """

    decision: Decision
    model: Path
    report: Path


def adapt(request: AdaptRequest) -> AdaptResult:
    """Adapt an encoder. Finished stages are skipped and interrupted ones resumed.

    Raises:
        UserError: before any training, if the request is invalid, or there are too few documents or minutes.
        Preempted: after SIGTERM, once the state is saved.
    """
    began, workdir = time.monotonic(), request.workdir

    # --- Check the request, before anything is read or written --------------------------------------------------------
    if not 0 < request.minutes < math.inf:
        raise UserError(f"--minutes={request.minutes:g}: give a number above 0")
    if request.merge is not None and not 0 < request.merge <= 1:
        raise UserError(f"--merge={request.merge:g}: give a weight above 0 and at most 1")
    if (workdir / RECORD).is_file():
        recorded = read_json(workdir / RECORD)["settings"]
        for name, value in request.settings().items():
            if recorded.get(name) != value:
                was = f"{name} {recorded.get(name)!r}, not {value!r}"
                raise UserError(f"--output={workdir}: was started with {was}; use the same, or another --output")
    elif (workdir / "config.json").is_file():
        raise UserError(f"--output={workdir}: is the directory of another run; choose another one")
    else:
        for name in (MODEL, REPORT, *VECTOR_FILES):
            if (workdir / name).exists():
                raise UserError(f"--output={workdir}: has a {name} that is not of this run; choose another folder")
    check_model(request.model)
    default_values = flatten(load_config("adapt").to_dict())
    for key, value in flatten(request.config.to_dict()).items():
        if key in DECIDED and value != default_values[key]:
            raise UserError(f"config.{key}: {DECIDED[key]}; leave it out, or use `realm train --config=adapt`")
    for source in filter(None, (request.documents, request.forgetting)):
        check_outside(workdir, source, "whose files are documents")
    check_outside(workdir, str(resolve_model_path(request.model, "--from")), "which is the base encoder")
    if request.forgetting:
        open_texts(request.forgetting)  # reports its errors before the documents are read

    # --- Prepare the documents ----------------------------------------------------------------------------------------
    config = ConfigDict(request.config.to_dict())
    config.data.path, config.init_from = str(workdir / DATA), request.model
    questions = [f"{QUESTIONS_SPLIT}={request.questions}"] if request.questions else []
    _prepare(request, request.documents, workdir / DATA, questions)
    prepared = read_json(workdir / DATA / PREPARED)
    if request.questions and not prepared["questions"].get(QUESTIONS_SPLIT):
        reasons = count_skipped(prepared["counts"]["questions"])
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items()) or "there is none"
        raise UserError(f"--questions={request.questions}: none can be judged ({skipped}); correct them")
    if request.forgetting:
        _prepare(request, request.forgetting, workdir / OTHER / DATA)

    cache_programs()
    status_folder = open_folder(config.refresh.shared or workdir)
    with (
        exclusive_lock(workdir),
        preemptible(),
        trainer_status(status_folder, workdir, needs_index=False) as status,
    ):
        record = AdaptRecord.open(request, status, time.monotonic() - began)

        # --- Plan: once, because the steps follow from measured times -------------------------------------------------
        if record.plan is None:
            with record.stage("plan"):
                record.plan = make_plan(request, config, began)
        plan = record.plan
        config.model.dtype = plan.dtype  # of the machine that the plan was made on
        config.realm.candidates, config.tasks, config.evaluation.held_out = plan.candidates, plan.tasks, plan.held_out
        for name, steps in plan.steps.items():
            config[name].steps = steps
        run = open_run(config, workdir)

        # --- Train: no evaluations on the way, because only base encoder and result are compared ----------------------
        if record.training is None:
            with record.stage("training"):
                params = starting_params(run)
                times = plan.estimate
                remaining_seconds = times.embed + times.compile + times.measure
                remaining_seconds += sum(times.step[name] * steps for name, steps in plan.steps.items())
                logger.info("steps: %s; about %s left", dict(plan.steps), duration(remaining_seconds))
                for task in recipe_tasks(run):
                    status.update(stage=task.name)
                    params = train_task(run, task.name, params)
                del params  # measuring needs the memory, and restores the parameters from the checkpoint
                record.training = plan.steps

        # --- Measure and decide ---------------------------------------------------------------------------------------
        if record.measured is None:
            with record.stage("measured"):
                evidence = find_evidence(run.sources.passages, *run.lengths.hidden)
                sentences = find_sentences(run, evidence, plan.held_out, plan.sentences)
                eval_questions = run.sources.questions.get(QUESTIONS_SPLIT, [])
                counts = len(sentences), len(eval_questions), duration(plan.estimate.measure)
                logger.info("measuring on %d held-out sentences and %d questions; about %s left", *counts)
                record.measured = measure(run, sentences, request.merge)
        decision = record.measured.decision

        # --- Export: the run answers with the chosen encoders ---------------------------------------------------------
        if record.export is None or find_exported_model(workdir / MODEL) is None:
            last_task, saved = last_checkpoint(run)
            base = recorded_start(run, workdir)
            weight = decision.weight if decision.promoted else 0.0
            params = interpolate_encoders(run, restore_params(run, last_task, saved), base, weight)

            # Measure forgetting on a second corpus, for information only.
            if request.forgetting and record.forgetting is None:
                with record.stage("forgetting"):
                    other_run, sentences = open_other_corpus(request, run.config)
                    logger.info("measuring forgetting on %s", request.forgetting)
                    evaluator = AdaptEvaluator(other_run, sentences)
                    rows = {
                        BASELINE: evaluator.metrics(base, embed_with_cache(other_run, base, bar=True)),
                        "adapted": evaluator.metrics(params, embed_with_cache(other_run, params, bar=True)),
                    }
                    table = compare_with_baseline(rows, evaluator.document_numbers)
                    store = other_run.sources.passages
                    record.forgetting = Forgetting(table, store.documents, len(store))

            with record.stage("export"):
                vectors = passage_vectors(run, params, weight)  # [passages, width]
                write_exported_model(workdir / MODEL, run, last_task, saved.step, params, vectors, trained_reader=False)
                (workdir / MODEL / README).write_text(model_card(record, run.config), "utf-8")
                with contextlib.suppress(OSError):  # they are there already, or the file system has no hard links
                    os.link(workdir / MODEL / VECTORS, workdir / VECTORS)
                record.export = [MODEL, *write_vectors(workdir, run.sources.passages, vectors)]

        # --- Report ---------------------------------------------------------------------------------------------------
        write_atomic(workdir / REPORT, render_report(record))
    return AdaptResult(decision, workdir / MODEL, workdir / REPORT)


# --- the request ------------------------------------------------------------------------------------------------------


def check_model(name: str) -> None:
    """Check that a name is a model of sentence-transformers that the encoders can start from. Raises UserError."""
    folder = resolve_model_path(name, "--from")
    if not folder.is_dir():
        raise UserError(f"--from={name}: no such folder; write hf:NAME for a model of the hub, py:NAME for a package")
    read_bert_settings(transformer_folder(folder))  # raises UserError if it is no BERT
    if sentence_model(folder) is None:
        raise UserError(
            f"--from={name}: {folder} has no modules.json with a pooling, so it is no encoder of texts; name a model "
            "of sentence-transformers"
        )


def check_outside(workdir: Path, source: str, description: str) -> None:
    """Check that the files of a run directory are not among those of a source.

    Args:
        workdir: the run directory.
        source: a folder, or a pattern of files.
        description: relative clause about the source, for the message.

    Raises:
        UserError: the run directory is inside the source.
    """
    path, run_parts = Path(source).absolute(), workdir.resolve().parts
    first_wildcard = next((number for number, part in enumerate(path.parts) if set("*?[") & {*part}), None)
    if first_wildcard is None:
        is_inside = path.is_dir() and workdir.resolve().is_relative_to(path.resolve())
    else:
        # The pattern has to match the folders down to the run directory, or down to its "**", and then go deeper.
        parts = [*Path(*path.parts[:first_wildcard]).resolve().parts, *path.parts[first_wildcard:]]
        is_deeper = "**" in parts or len(parts) > len(run_parts)
        parts = parts[: parts.index("**")] if "**" in parts else parts[: len(run_parts)]
        is_inside = is_deeper and len(parts) <= len(run_parts) and all(map(fnmatchcase, run_parts, parts))
    if is_inside:
        raise UserError(f"--output={workdir}: is inside {source}, {description}; name a folder outside")


def _prepare(request: AdaptRequest, documents: str, folder: Path, questions: Sequence[str] = ()) -> None:
    """Write a prepared folder of the run and print a summary.

    Until there is a plan, a folder that was prepared from other documents is written again, so that you can add
    documents if there were too few.
    """
    limit = request.config.data.document_length
    # Unreadable documents are skipped, and the report has their number.
    options = Options(documents, folder, questions=questions, vocab=request.model, limit=limit, skip_damage=True)
    try:
        prepare_and_print(options)
    except PreparedOtherwise:
        if (request.workdir / RECORD).is_file():
            raise
        shutil.rmtree(folder)
        prepare_and_print(options)
