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
from dataclasses import dataclass
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
    trains_passage_encoder,
    users_pipeline,
)
from realm_jax.adaptation.plan import count_skipped, make_plan, open_other_corpus
from realm_jax.adaptation.record import OTHER, RECORD, REPORT, AdaptRecord, AdaptRequest, Decision, Forgetting
from realm_jax.adaptation.report import model_card, render_report
from realm_jax.cache import cache_programs
from realm_jax.config import flatten, load_config
from realm_jax.corpora.preparation import PreparedOtherwise, replace_questions
from realm_jax.corpora.texts import open_texts
from realm_jax.data.evidence import find_evidence
from realm_jax.data.staging import PREPARED
from realm_jax.errors import UserError
from realm_jax.eval.format import duration
from realm_jax.indexing.heartbeat import trainer_status
from realm_jax.indexing.vector_cache import embed_with_cache
from realm_jax.models.folders import resolve_model_path
from realm_jax.models.sentence_transformers import README
from realm_jax.retrieval.vector_files import FILES as VECTOR_FILES
from realm_jax.retrieval.vector_files import VECTORS, write_vectors
from realm_jax.search_index import (
    CONFIG,
    DATA,
    check_decided,
    check_model,
    check_outside,
    check_settings,
    follow_corpus,
    has_empty_recipe,
    prepare_documents,
    read_index,
    write_index,
)
from realm_jax.search_index import DECIDED as INDEX_DECIDED
from realm_jax.storage import LOCK, exclusive_lock, open_folder, read_json, write_atomic
from realm_jax.tasks.answering import trains_cloze_reader
from realm_jax.train.exported_model import MODEL, find_exported_model, write_exported_model
from realm_jax.train.init_from import recorded_start
from realm_jax.train.loop import train_task
from realm_jax.train.recipe import open_run, preemptible, recipe_tasks, starting_params
from realm_jax.train.restore import restore_params
from realm_jax.train.workdir import INDEX_KEYS, has_checkpoint, recorded_config

logger = logging.getLogger(__name__)

_MEASURED_ONCE = "only the base and the adapted encoder are measured"
DECIDED = INDEX_DECIDED | {  # key of the config that the request sets, or that has no effect → why
    "evaluation.held_out": "the share is computed from the documents",
    "evaluation.every": _MEASURED_ONCE,
    "evaluation.keep_best": _MEASURED_ONCE,
    "refresh.mode": "this command has no index builder",
}


@dataclass(frozen=True)
class AdaptResult:
    """A finished adaptation.

    Attributes:
        decision: whether the base encoder was replaced, and why.
        model: folder of the exported model.
        report: path of the report.
        has_new_vectors: true if the passage encoder was trained, so that passages have other vectors if it is promoted.
        has_reader: true if a reader learned to point at answers, without questions.
    """

    decision: Decision
    model: Path
    report: Path
    has_new_vectors: bool
    has_reader: bool


def adapt(request: AdaptRequest) -> AdaptResult:
    """Adapt an encoder. Finished stages, and those of `realm index`, are skipped; interrupted ones are resumed.

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
    indexed = read_index(workdir)
    has_begun = (workdir / RECORD).is_file()
    if has_begun:
        check_settings(workdir, read_json(workdir / RECORD)["settings"], request.settings())
    elif indexed is not None:
        settings = request.settings()
        check_settings(workdir, indexed["settings"], {name: settings[name] for name in ("documents", "from")})
    elif (workdir / "config.json").is_file():
        if has_empty_recipe(workdir):
            raise UserError(f"--output={workdir}: its index is not finished; run the same `realm index` command again")
        raise UserError(f"--output={workdir}: is the directory of another run; choose another one")
    else:
        for name in (MODEL, REPORT, *VECTOR_FILES):
            if (workdir / name).exists():
                raise UserError(f"--output={workdir}: contains a {name} of another run; choose another folder")
    check_model(request.model)
    check_decided(request.config, DECIDED, "leave it out, or use `realm train --config=adapt`")
    for source in filter(None, (request.documents, request.forgetting)):
        check_outside(workdir, source, "the folder of the documents")
    check_outside(workdir, str(resolve_model_path(request.model, "--from")), "the folder of the base encoder")
    if request.forgetting:
        open_texts(request.forgetting)  # reports its errors before the documents are read

    # --- Prepare the documents, or continue with the dataset directory and the config of the index --------------------
    config = ConfigDict(request.config.to_dict())
    questions = [f"{QUESTIONS_SPLIT}={request.questions}"] if request.questions else []
    if indexed is None:
        arguments = request.documents, request.model, workdir / DATA, config.data.document_length, questions
        try:
            prepare_documents(*arguments)
        except PreparedOtherwise:  # until there is a plan you can add documents, because there may have been too few
            if has_begun or not (workdir / LOCK).is_file():  # without a lock file the folder may be yours
                raise
            with exclusive_lock(workdir):
                shutil.rmtree(workdir / DATA)
            prepare_documents(*arguments)
    else:
        values, default_values = (flatten(each.to_dict()) for each in (config, load_config(CONFIG)))
        named_keys = {word.removeprefix("--config.").partition("=")[0] for word in request.config_arguments}
        recorded_values = flatten(recorded_config(workdir).to_dict())
        for key, value in values.items():
            if key != "tasks" and value == default_values[key] and key not in named_keys:
                config.update_from_flattened_dict({key: recorded_values[key]})
            elif key.startswith(INDEX_KEYS) and value != recorded_values[key]:
                raise UserError(
                    f"config.{key} is {value!r}, but the index in {workdir} has {recorded_values[key]!r}; leave it "
                    "out, or index the documents with it into another --output"
                )
        if not has_begun:
            with exclusive_lock(workdir):
                (workdir / "data.json").unlink(missing_ok=True)  # it also records the questions
                try:
                    replace_questions(workdir / DATA, questions)
                finally:
                    follow_corpus(workdir)  # `realm corpus` may have edited it
    config.data.path, config.init_from = str(workdir / DATA), request.model
    prepared = read_json(workdir / DATA / PREPARED)
    if request.questions and not prepared["questions"].get(QUESTIONS_SPLIT):
        reasons = count_skipped(prepared["counts"]["questions"])
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items()) or "there is none"
        raise UserError(f"--questions={request.questions}: no question can be evaluated ({skipped}); correct the file")
    if request.forgetting:
        prepare_documents(request.forgetting, request.model, workdir / OTHER / DATA, config.data.document_length)

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

        # --- Index: the run answers with the base encoder while it trains ---------------------------------------------
        if record.training is None and not has_checkpoint(run.config, workdir):
            with record.stage("index"):
                write_index(run, starting_params(run))

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
                logger.info("evaluating %d held-out sentences and %d questions; about %s left", *counts)
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
                    evaluator, pipeline = AdaptEvaluator(other_run, sentences), users_pipeline(other_run)
                    rows = {
                        encoder: evaluator.metrics(each, embed_with_cache(other_run, each, bar=True), pipeline)
                        for encoder, each in ((BASELINE, base), ("adapted", params))
                    }
                    table = compare_with_baseline(rows, evaluator.document_numbers)
                    store = other_run.sources.passages
                    record.forgetting = Forgetting(table, store.documents, len(store))

            with record.stage("export"):
                vectors = passage_vectors(run, params, weight)  # [passages, width]
                exported = find_exported_model(workdir / MODEL)
                has_tokens = exported is not None and exported.has_tokens_of(run, params)
                write_exported_model(
                    workdir / MODEL, run, last_task, saved.step, params, vectors, trained_reader=False,
                    token_folder=workdir / MODEL if has_tokens else None,
                )  # fmt: skip
                (workdir / MODEL / README).write_text(model_card(record, run.config), "utf-8")
                with contextlib.suppress(OSError):  # they are there already, or the file system has no hard links
                    os.link(workdir / MODEL / VECTORS, workdir / VECTORS)
                record.export = [MODEL, *write_vectors(workdir, run.sources.passages, vectors)]

        # --- Report ---------------------------------------------------------------------------------------------------
        write_atomic(workdir / REPORT, render_report(record))
    has_new_vectors = any(trains_passage_encoder(task) for task in recipe_tasks(run))
    has_reader = any(trains_cloze_reader(name, run.config) for name in plan.steps)
    return AdaptResult(decision, workdir / MODEL, workdir / REPORT, has_new_vectors, has_reader)
