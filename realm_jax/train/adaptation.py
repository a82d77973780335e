"""Adapt a public encoder of sentences to documents without a label: the stages of `realm adapt` behind the preparation.

plan (what is held out, which tasks, how many steps fit) → train → measure and decide → promote → export → report. What
a stage decides is kept in adapt.json and not decided again, so the same command resumes after an interruption. Read
`run_adaptation` next, then `adaptation_gate.py` for the decision.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

from realm_jax.assemble import make_run
from realm_jax.data.evidence import Evidence
from realm_jax.data.examples import salient_sentences
from realm_jax.data.held_out import HeldOutSentence, trained_rows
from realm_jax.data.sources import open_sources
from realm_jax.data.staging import PREPARED
from realm_jax.data.store import PassageStore
from realm_jax.errors import UserError
from realm_jax.eval import adaptation as judge
from realm_jax.eval.format import duration
from realm_jax.index.embed import embed_with_cache, share_to_embed
from realm_jax.index.heartbeat import StatusWriter, trainer_status
from realm_jax.models.folders import resolve_model_path
from realm_jax.models.realm import Params
from realm_jax.models.sentence_transformers import (
    README,
    sentence_model,
    transformer_folder,
)
from realm_jax.models.weights import read_bert_settings
from realm_jax.retrieval.vector_files import FILES as VECTOR_FILES
from realm_jax.retrieval.vector_files import write_vectors
from realm_jax.run import Run
from realm_jax.sections import task_names
from realm_jax.storage import exclusive_lock, open_folder, read_json, write_atomic, write_json_atomic
from realm_jax.tasks.base import Task
from realm_jax.tasks.groups import GROUP
from realm_jax.tasks.ict import Ict
from realm_jax.train.adaptation_gate import (
    FEWEST,
    JUDGED,
    SENTENCES,
    WEIGHTS,
    Searches,
    any_moves,
    compared,
    evidence_of,
    last_checkpoint,
    measure,
    moves_documents,
    sentences_of,
    vectors_at,
    with_towers,
)
from realm_jax.train.exported_model import MODEL, write_exported_model
from realm_jax.train.init_from import recorded_start
from realm_jax.train.loop import train_task
from realm_jax.train.model_card import model_card
from realm_jax.train.recipe import checked_run, open_run, preemptible, recipe_tasks, starting_params
from realm_jax.train.restore import restore_params
from realm_jax.train.results import save_bm25_index
from realm_jax.train.time_plan import seconds_of, seconds_to_embed, step_time, steps_that_fit

logger = logging.getLogger(__name__)

RECORD, DATA, REPORT = "adapt.json", "data", "report.html"
OTHER = "other"  # folder of a second corpus, which is measured and never learned from
WANTED = 750  # sentences with a span to hide that the held-out share aims at
SHARES = 0.02, 0.2  # of documents that are held out, the least and the most
FEW_DOCUMENTS, LARGEST_SHARE = 12, 1 / 3  # documents that are held out of few, as far as that share goes
LEAST_SENTENCES, LEAST_DOCUMENTS = 8, 6  # that judge
LEAST_STEPS = 20  # of a task
RESERVE = 0.1  # of the minutes, for what the plan does not foresee
LONGEST_MEASURING = 0.2  # of the minutes, to compare what was learned with the start


@dataclass(frozen=True)
class Request:
    """What is wanted. settings: what may not change on resume, among it `forgetting`, the name of a second corpus, or
    None; config: the recipe, with `data.path` and `init_from`;
    merge: the weight of the trained towers, None to try WEIGHTS; spent: seconds that went by already."""

    workdir: Path
    settings: dict[str, Any]
    config: ConfigDict
    minutes: float
    merge: float | None
    command: str
    spent: float = 0.0


class Record:
    """adapt.json: what each stage found, which is not found again."""

    def __init__(self, path: Path, begun: dict[str, Any], status: StatusWriter) -> None:
        """begun: what stands there first. status: says which stage is under way."""
        self._path, self._status = path, status
        self.values: dict[str, Any] = read_json(path) if path.is_file() else begun

    def once(self, stage: str, make: Callable[[], Any]) -> Any:
        """What the stage found before, or finds now."""
        if stage not in self.values:
            self._status.update(stage=stage)
            began = time.monotonic()
            found = json.loads(json.dumps(make()))
            seconds = self.values["seconds"] | {stage: time.monotonic() - began}
            self.values |= {stage: found, "seconds": seconds}
            write_json_atomic(self._path, self.values)
        return self.values[stage]


def run_adaptation(request: Request) -> str:
    """All stages that are not done yet; returns the decision in one line.

    Raises UserError before anything is trained where the documents do not suffice, Preempted after SIGTERM.
    """
    shared = open_folder(request.config.refresh.shared or request.workdir)
    status = trainer_status(shared, request.workdir, needs_index=False)
    with exclusive_lock(request.workdir), preemptible(), status as writer:
        begun = {"settings": request.settings, "command": request.command, "seconds": {"preparation": request.spent}}
        record = Record(request.workdir / RECORD, begun, writer)
        plan = record.once("plan", lambda: make_plan(request))
        run = open_run(planned_config(request.config, plan), request.workdir)
        record.once("training", lambda: train(run, plan, writer))
        measured = record.once("measured", lambda: measure(run, plan, request.merge))
        params, vectors = promote(run, measured)
        if request.settings["forgetting"]:
            record.once("forgetting", lambda: measure_forgetting(request, run.config, params))
        record.once("export", lambda: export(run, params, vectors, record.values))
        write_atomic(request.workdir / REPORT, judge.render_report(record.values))
    return judge.headline(measured)


def check_settings(workdir: Path, settings: dict[str, Any]) -> None:
    """Raise UserError where a folder is another run, or one of other settings."""
    path = workdir / RECORD
    if not path.is_file():
        if (workdir / "config.json").is_file():
            raise UserError(f"--output={workdir}: another run lies there; choose another folder")
        for name in (MODEL, REPORT, *VECTOR_FILES):
            if (workdir / name).exists():
                raise UserError(f"--output={workdir}: has a {name} of something else; choose another folder")
        return
    recorded = read_json(path)["settings"]
    for name, value in settings.items():
        if recorded.get(name) != value:
            was = f"{name} {recorded.get(name)!r}, not {value!r}"
            raise UserError(f"--output={workdir}: was begun with {was}; give the same, or another --output")


def check_model(name: str) -> None:
    """Raise UserError for what is no folder of sentence-transformers that the towers can have."""
    folder = resolve_model_path(name, "--from")
    if not folder.is_dir():
        raise UserError(f"--from={name}: no such folder; write hf:NAME for a model of the hub, py:NAME for a package")
    read_bert_settings(transformer_folder(folder))  # says what it is, if it is no BERT
    if sentence_model(folder) is None:
        raise UserError(
            f"--from={name}: {folder} does not say how it makes a text a vector (no modules.json with a pooling); name "
            "a model of sentence-transformers"
        )


# --- plan -------------------------------------------------------------------------------------------------------------


def make_plan(request: Request) -> dict[str, Any]:
    """What is held out, which tasks are trained, and their steps, with the facts that the report gives."""
    began = time.monotonic()

    def spent() -> float:
        return request.spent + time.monotonic() - began

    rows = len(open_sources(request.config.data.path, questions=False).passages)
    plan: dict[str, Any] = {"candidates": fitting_candidates(request.config, rows)}
    run = checked_run(planned_config(request.config, plan), request.workdir)
    store, evidence = run.sources.passages, evidence_of(run)
    share = planned_share(store, run.lengths.query)
    sentences = sentences_of(run, evidence, share)
    check_sentences(request.settings["documents"], run, sentences, share)
    names, notes = possible_tasks(request.settings["documents"], run, evidence, share)
    plan |= {"held_out": share, "tasks": names, "notes": notes, "steps": {}, "dtype": request.config.model.dtype}
    run = checked_run(planned_config(request.config, plan), request.workdir)
    other = open_other(request, run.config) if request.settings["forgetting"] else None
    save_bm25_index(run)
    logger.info("measuring how fast this machine is")
    params = starting_params(run)
    times = measure_searches(run, params, sentences, request.minutes * 60 * LONGEST_MEASURING)
    if other is not None:
        second, others = other
        times["embed"] += times["passage"] * len(second.sources.passages) * (1 + any_moves(run))
        times["measure"] += times["query"] * 2 * 2 * len(others)
    check_time(request.minutes, spent(), times | {"compile": 0.0, "step": {}}, len(store))  # before steps are compiled
    times |= measure_steps(run, params, times["passage"] * len(store))
    notes += check_time(request.minutes, spent(), times, len(store))
    left = request.minutes * 60 * (1 - RESERVE) - spent()
    left -= times["embed"] + times["measure"] + times["compile"]
    most = {name: run.config[name].steps for name in task_names(run.config)}
    plan |= {"tasks": ",".join(most), "steps": steps_that_fit(most, times["step"], left, LEAST_STEPS)}
    return plan | {"sentences": times.pop("sentences"), "estimate": times} | facts_of(run, evidence)


def fitting_candidates(config: ConfigDict, rows: int) -> int:
    """K of REALM, or as many as there are passages; the null document and one at least."""
    return max(2, min(config.realm.candidates, rows))


def check_sentences(name: str, run: Run, sentences: Sequence[HeldOutSentence], share: float) -> None:
    """Raise UserError for so few held-out sentences, or documents that they are of, that nothing can be decided. name:
    of the documents."""
    documents = len({run.sources.passages.document_id(one.row) for one in sentences})
    if len(sentences) < LEAST_SENTENCES or documents < LEAST_DOCUMENTS:
        raise UserError(
            f"{name}: {len(sentences)} sentences of {share:.0%} of the documents stand in no other, in {documents} "
            f"documents; {LEAST_SENTENCES} in {LEAST_DOCUMENTS} are needed to see whether adaptation helps; add "
            "documents that differ, or split long ones"
        )


def planned_share(store: PassageStore, query_length: int) -> float:
    """The share of documents to hold out, in thousandths: as many as give WANTED sentences, within SHARES, and
    FEW_DOCUMENTS documents, within LARGEST_SHARE."""
    sentences = len(salient_sentences(store, query_length).rows) or int(store.counts("sentences").sum())
    least, most = SHARES
    share = min(max(WANTED / max(sentences, 1), least), most)
    return round(max(share, min(FEW_DOCUMENTS / store.documents, LARGEST_SHARE)), 3)


def possible_tasks(name: str, run: Run, evidence: Evidence, share: float) -> tuple[str, list[str]]:
    """The tasks that the documents allow, and a note where some are left out; without any, the inverse cloze task.
    name: of the documents. Raises UserError where they do not allow that either."""
    store = run.sources.passages
    kept = trained_rows(store, share)
    assert kept is not None, "some documents are held out"
    rows = np.unique(evidence.among(kept).spans.rows)
    documents = len({store.document_id(row) for row in rows.tolist()})
    left = [task.name for task in recipe_tasks(run) if not task.learns_from_evidence(run.config)]
    if documents >= GROUP or len(left) == len(task_names(run.config)):
        return run.config.tasks, []
    few = f"{documents} documents to learn from have a name that another passage tells of, and {GROUP} are needed"
    if not left and (lacking := Ict.missing(planned_config(run.config, {"held_out": share}), run.sources)):
        raise UserError(f"{name}: {few}, and there is no {lacking}: nothing to learn from; keep the start")
    note = f"{few}: nothing was learned from hidden names."
    logger.warning("%s", note)
    return ",".join(left or [Ict.name]), [note]


def planned_config(config: ConfigDict, plan: dict[str, Any]) -> ConfigDict:
    """The recipe with what a plan has decided so far. The dtype is that of the machine that it was made on."""
    found = ConfigDict(config.to_dict())
    found.model.dtype = plan.get("dtype", found.model.dtype)
    found.realm.candidates = plan.get("candidates", found.realm.candidates)
    found.tasks = plan.get("tasks", found.tasks)
    found.evaluation.held_out = plan.get("held_out", found.evaluation.held_out)
    for name, steps in plan.get("steps", {}).items():
        found[name].steps = steps
    return found


def measure_searches(run: Run, params: Params, sentences: Sequence[HeldOutSentence], longest: float) -> dict[str, Any]:
    """Seconds on this machine: of a passage, to embed all that is not known, of a query, to measure what is compared.
    And how many sentences are measured at most: fewer where they would take more than `longest`."""
    rows = run.context.rows
    some = sentences[:: max(1, len(sentences) // 64)]
    zeros = np.zeros((rows, run.model.vector_size), np.float32)
    searches = Searches(run, some, [])
    query = seconds_of(lambda: searches.sentence_values(params, zeros, "vectors")) / (2 * len(some))
    weights = 1 + len(WEIGHTS)  # with the start's
    searched = weights + 3  # by words, and by both together with the start and with what is exported
    judged = len(run.sources.questions.get(JUDGED, []))
    most = min(SENTENCES, max(FEWEST, int((longest / (query * searched) - judged) / 2)))
    asked = min(most, len(sentences))
    embed, moving = seconds_to_embed(run, params), sum(moves_documents(task, run) for task in recipe_tasks(run))
    further = float(moving > 0) + weights * min(asked / rows, 1.0)  # a second weight; passages without sentences
    return {
        "passage": embed / rows,
        "embed": embed * (share_to_embed(run, params) + moving + further),
        "query": query,
        "measure": query * searched * (2 * asked + judged),
        "sentences": most,
    }


def measure_steps(run: Run, params: Params, embed: float) -> dict[str, Any]:
    """Seconds on this machine to compile, and of a step of each task. embed: of all passages."""
    tasks = recipe_tasks(run)
    steps = {task.name: step_time(task, params) for task in tasks}
    return {
        "compile": sum(one.first for one in steps.values()),
        "step": {task.name: steps[task.name].later + seconds_to_refresh(task, run, embed) for task in tasks},
    }


def seconds_to_refresh(task: Task, run: Run, embed: float) -> float:
    """What each step of a task takes for the passages that are embedded anew every so many. embed: seconds for all."""
    return embed / task.refresh_every if moves_documents(task, run) and task.refresh_every else 0.0


def check_time(minutes: float, spent: float, times: Mapping[str, Any], rows: int) -> list[str]:
    """A note where hardly any time is left to train. Raises UserError where twice the minutes would not do. spent:
    seconds that went by already."""
    given, training = minutes * 60, times["compile"] + LEAST_STEPS * sum(times["step"].values())
    least = spent + times["embed"] + times["measure"] + training
    if least <= given * (1 - RESERVE):
        return []
    parts = f"{duration(times['embed'])} to embed {rows:,} passages and {duration(times['measure'])} to compare"
    what = f"--minutes={minutes:g}: {duration(least)} at least are needed here, {parts} among them"
    if least > 2 * given:
        raise UserError(f"{what}; give more minutes, or fewer documents")
    note = f"{what}: training is as short as can be."
    logger.warning("%s", note)
    return [note]


def facts_of(run: Run, evidence: Evidence) -> dict[str, Any]:
    """What the report says of the corpus."""
    store = run.sources.passages
    found = read_json(Path(run.config.data.path) / PREPARED)["counts"]
    counts, asked = found["passages"], found.get("questions", {"dropped": {}, "damaged": {}})
    lost = {f"questions {reason}": count for reason, count in left_out(asked).items()}
    return {
        "passages": len(store),
        "documents": store.documents,
        "read": counts["records"],
        "left_out": left_out(counts) | lost,
        "fingerprint": store.fingerprint,
        "spans": int(store.counts("spans").sum()),
        "spans_with_evidence": len(evidence.spans.rows),
    }


def left_out(counts: Mapping[str, Any]) -> dict[str, int]:
    """How many records of PREPARED.json were left out, by reason."""
    return dict(Counter(counts["dropped"]) + Counter(counts["damaged"]))


# --- train ------------------------------------------------------------------------------------------------------------


def train(run: Run, plan: dict[str, Any], status: StatusWriter) -> dict[str, int]:
    """The tasks of the plan; returns their steps. Nothing is measured on the way: start and end are compared once."""
    params = starting_params(run)
    left = sum(plan["estimate"][name] for name in ("embed", "compile", "measure"))
    left += sum(plan["estimate"]["step"][name] * steps for name, steps in plan["steps"].items())
    logger.info("steps: %s; about %s left", plan["steps"], duration(left))
    for task in recipe_tasks(run):
        status.update(stage=task.name)
        params = train_task(run, task.name, params)
    return dict(plan["steps"])


# --- a second corpus --------------------------------------------------------------------------------------------------


def open_other(request: Request, planned: ConfigDict) -> tuple[Run, list[HeldOutSentence]]:
    """The second corpus, and the sentences of it that ask: of all its documents, as none is learned from. planned: the
    config of the run. Raises UserError for one that has too few."""
    folder, config = request.workdir / OTHER, ConfigDict(planned.to_dict())
    config.data.path, config.evaluation.held_out = str(folder / DATA), 0.0
    sources = open_sources(config.data.path)
    config.realm.candidates = fitting_candidates(config, len(sources.passages))
    run = make_run(config, folder, sources)  # unchecked: no task is trained on it
    sentences = sentences_of(run, evidence_of(run), 1.0)
    check_sentences(request.settings["forgetting"], run, sentences, 1.0)
    return run, sentences


def measure_forgetting(request: Request, planned: ConfigDict, params: Params) -> dict[str, Any]:
    """What is promoted against the start on the second corpus: {"table", "documents", "passages"}."""
    run, sentences = open_other(request, planned)
    logger.info("measuring on %s what was forgotten", request.settings["forgetting"])
    start, searches = recorded_start(run, request.workdir), Searches(run, sentences, [])
    before, after = (
        searches.values(some, embed_with_cache(run, some, bar=True), "vectors") for some in (start, params)
    )
    store = run.sources.passages
    return {
        "table": compared({judge.START: before, "adapted": after}, searches.documents),
        "documents": store.documents,
        "passages": len(store),
    }


# --- promote and export -----------------------------------------------------------------------------------------------


def promote(run: Run, measured: dict[str, Any]) -> tuple[Params, NDArray]:
    """Return what the run answers with: the trained parameters with the encoders that were decided on, and the
    vectors of the passages by them, [rows, width]."""
    last, saved = last_checkpoint(run)
    trained, start = restore_params(run, last, saved), recorded_start(run, run.workdir)
    weight = measured["weight"] if measured["promoted"] else 0.0
    return with_towers(run, trained, start, weight), vectors_at(run, trained, start, weight)


def export(run: Run, params: Params, vectors: NDArray, record: dict[str, Any]) -> list[str]:
    """Write DIR/model and the files of vectors; returns their names."""
    last, saved = last_checkpoint(run)
    write_exported_model(run.workdir / MODEL, run, last, saved.step, params, vectors, trained_reader=False)
    (run.workdir / MODEL / README).write_text(model_card(record, run), "utf-8")
    return [MODEL, *write_vectors(run.workdir, run.sources.passages, vectors)]
