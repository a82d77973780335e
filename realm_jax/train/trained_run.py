"""A trained run, opened for inference; shared by `realm ask`, `predict`, `evaluate`, `inspect` and `serve`.

It is read from the run's exported model (`exported_model.py`). Nothing in the run folder is changed, so a run can
answer questions while it trains: with the model that its last finished task left.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.cache import cache_programs
from realm_jax.config import TASK_SECTIONS, default, flatten, task_names, training_keys, with_overrides
from realm_jax.data.questions import Question, read_questions
from realm_jax.data.staging import PREPARED, is_remote
from realm_jax.errors import UserError
from realm_jax.eval.prediction import Evaluator
from realm_jax.forward import Index, Rerank
from realm_jax.index.exporter import to_arrays, to_params
from realm_jax.index.files import (
    Manifest,
    export_of,
    generation_names,
    read_encoders,
    read_manifest,
    read_manifests,
    read_rejection,
)
from realm_jax.index.provider import shared_folder
from realm_jax.index.vector_cache import embed_with_cache
from realm_jax.index.watcher import generation_index
from realm_jax.mesh import replicated
from realm_jax.models.layers import Params
from realm_jax.run import Run
from realm_jax.storage import Damaged, read_json
from realm_jax.tasks.answering import (
    ANSWERING_TASKS,
    needs_vectors,
    question_search,
    reads_passages,
    reranker,
    trains_cloze_reader,
    trains_qa_reader,
)
from realm_jax.train.exported_model import ExportedModel, exported_model, find_exported_model
from realm_jax.train.records import RECALLS, primary_metric, read_lines
from realm_jax.train.workdir import begins_with_reader, check_data, load_run, recorded_config

logger = logging.getLogger(__name__)

NBEST = 5  # answers of a question that are shown or written, if nothing else is asked for
LONGEST = 20_000  # characters of a question
LOW_EXACT_MATCH, LOW_RECALL = 0.2, 0.5  # below these a user is warned


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run with the model that one of its tasks exported, and the corpus embedded.

    Attributes:
        run: its fixed parts.
        task: whose parameters these are.
        step: of that task.
        params: those that answering needs.
        index: the corpus by these parameters.
        search: what finds the passages of questions, one of `config.SEARCHES`.
        rerank: what reorders them; None: nothing.
        model: where the other parameters are; None for an index version that the run published.
    """

    run: Run
    task: str
    step: int
    params: Params
    index: Index
    search: str = "vectors"
    rerank: Rerank | None = None
    model: ExportedModel | None = None

    def evaluator(self, questions: Sequence[Question], batch_size: int | None = None) -> Evaluator:
        """What answers questions with it, `batch_size` at a time (default: `evaluation.batch_size`)."""
        return Evaluator(self.run, questions, self.search, self.rerank, self.reads_blanks, batch_size)

    @property
    def reads(self) -> bool:
        """Whether its reader learnt to answer from passages, by questions or by blanks."""
        return self.reads_blanks or reader_is_trained(self.run.workdir, self.task)

    @property
    def reads_blanks(self) -> bool:
        """Whether its reader has never seen a question, and learnt to point at what stands in a blank."""
        return points_at_blanks(self.run, self.task)


def float32_digits(value: float) -> float:
    """As many digits as a float32 has."""
    return float(f"{value:.9g}")


def load_questions(run: Run, name: str | None, need_right: bool) -> list[Question]:
    """The questions of a split, or of a file. Warns of those that cannot be answered, or found, as they stand."""
    questions = _questions(run, name or "dev", need_right)
    most = run.config.data.query_length - 2
    encoded = run.sources.tokenizer.encode_batch([question.question for question in questions])
    if cut := sum(len(encoding.ids) > most for encoding in encoded):
        logger.warning("%d questions are longer than the %d tokens that the run reads; they are cut", cut, most)
    gold = {name for question in questions for name in question.gold}
    if absent := [name for name in gold if not run.sources.passages.rows_of(name)]:
        logger.warning("%d gold passages, such as %r, are not in the corpus: misses", len(absent), min(absent))
    return questions


def _questions(run: Run, name: str, need_right: bool) -> list[Question]:
    """Of a split, or of a file: what is no split, and is there or is written like no split."""
    splits = run.sources.questions
    if name in splits:
        return splits[name]
    if Path(name).exists() or not name.isidentifier():
        return read_questions(name, need_right=need_right)
    raise UserError(
        f"--questions={name}: {run.config.data.path} has no such questions (it has: {', '.join(splits) or 'none'}), "
        "and there is no such file; choose another split, or name a file"
    )


def run_changes(overrides: Sequence[str]) -> dict[str, Any]:
    """Dotted key → value of what `--config.key=value` changes in the config of a trained run.

    Raises UserError for a key that is fixed in it: only runtime and evaluation keys may change.
    """
    names = [override.partition("=")[0].removeprefix("--config.") for override in overrides]
    config = with_overrides(default(), overrides)
    for name in training_keys(config).keys() & {*names}:
        if not name.startswith("evaluation."):
            raise UserError(f"--config.{name}: fixed by the run; only runtime and evaluation keys may change")
    values = flatten(config.to_dict())
    return {name: values[name] for name in names}


def open_run_for_inference(workdir: Path, changes: dict[str, Any] | None = None, questions: bool = True) -> Run:
    """The run of a folder on the devices that are here, with its config changed as `changes` has it.

    questions: whether those of the prepared folder are read.
    Raises UserError when there is no run, or when its prepared folder is gone or another one.
    """
    changes = changes or {}
    recorded = recorded_config(workdir)
    _check_prepared(changes.get("data.path") or recorded.data.path, workdir)
    cache_programs()
    # Trained on one machine and asked on another: every device takes a share of the passages and all parameters. Batch
    # sizes of training must suit the devices, but nothing is trained here.
    here: dict[str, Any] = {"mesh.fsdp": 1, "mesh.model": 1, "optimizer.microbatches": 1}
    for name in TASK_SECTIONS:
        here[f"{name}.batch_size"] = jax.device_count()
    run = load_run(workdir, here | changes, questions)
    check_data(run, run.sources.passages.versions, questions)
    return run


def _check_prepared(folder: str, workdir: Path) -> None:
    if not is_remote(folder) and not (Path(folder) / PREPARED).is_file():
        raise UserError(
            f"{folder}: the prepared folder of the run in {workdir} is not there (looked from {Path.cwd()}); "
            "name the place that it was moved to with --config.data.path=DIR"
        )


def reader_is_trained(workdir: Path, task: str) -> bool:
    """Whether the reader at the end of a task of a run learnt to answer from passages: in fine-tuning there, or in the
    run or weights that it started from."""
    return trains_qa_reader(task) or begins_with_reader(workdir)


def points_at_blanks(run: Run, task: str) -> bool:
    """Whether the reader at the end of a task of a run learnt from blanks alone."""
    return trains_cloze_reader(task, run.config) and not reader_is_trained(run.workdir, task)


def check_reads_passages(trained: TrainedRun) -> None:
    """Raise UserError for a reader without passages: there is nothing to show beside its answers."""
    if not reads_passages(trained.task):
        raise UserError(
            f"{trained.run.workdir}: {trained.task} was trained there, which answers without passages; use `realm "
            "predict`"
        )


def restore(
    run: Run, task: str | None = None, for_answers: bool = True, search: str | None = None, warn: bool = True
) -> TrainedRun:
    """Read a run's exported model, and put it on the devices with the corpus.

    The corpus is embedded if the model has no vectors of these passages.

    Args:
        run: the opened run.
        task: whose parameters are wanted; None: those of the last task that ended.
        for_answers: whether questions will be answered with them.
        search: what finds the passages of questions; None: what the task says.
        warn: whether to warn of a reader that has not learned to answer.

    Raises:
        UserError: if the recipe has no such task, and if there is no exported model, or a damaged one.
    """
    while True:
        exported = find_task(run, task)
        method, rerank = search or question_search(exported.task, run.config), reranker(exported.task, run.config)
        takes_vectors = needs_vectors(exported.task, run.config, method)
        try:
            vectors = exported.vectors(run.sources.passages.fingerprint) if takes_vectors else None  # [passages, width]
            # The passage encoder is needed only to embed passages, which vectors make unnecessary.
            query, *others = run.model.embedder_names
            embeds = (takes_vectors and vectors is None) or not for_answers or run.config.qa.trains_passages
            names = [query, "reader", *(others if embeds else ())]
            names += [] if rerank is None else [rerank.network]
            params = jax.device_put(exported.params(run.model, names), replicated(run.mesh))
            break
        except UserError:
            if find_task(run, task).identity == exported.identity:
                raise
            # The run went on and replaced the folder while it was read.

    if not takes_vectors:
        index = run.index_without_vectors
    elif vectors is not None:
        index = run.index(vectors)
    else:
        published = published_index(run, params) if is_edited(run) else None
        index = published or run.index(embed_with_cache(run, params, bar=True))

    learned = exported.task in ANSWERING_TASKS or reader_is_trained(run.workdir, exported.task)
    if not learned and not points_at_blanks(run, exported.task) and for_answers and warn:
        logger.warning(
            "these are the parameters of task %s: answers come from a span head that was not fine-tuned", exported.task
        )
    if method != "vectors" and for_answers:
        run.bm25()  # raises where there are none
    return TrainedRun(run, exported.task, exported.step, params, index, method, rerank, exported)


def find_task(run: Run, task: str | None) -> ExportedModel:
    """Open the exported model of a task of a run; None: of the last task that ended. Raises as `restore`."""
    names = task_names(run.config)
    if task is not None and task not in names:
        raise UserError(f"--task={task}: the run in {run.workdir} has no such task; choose among {', '.join(names)}")
    return exported_model(run.workdir, task)


@dataclasses.dataclass(frozen=True)
class RecordedMetrics:
    """Metrics that a run recorded at the end of a task; None if it did not.

    found: share of the questions for which the gold passage was among the first five, or a passage with an answer where
    no question has a gold passage. on: on what, as results.json says it; None while there are no results.
    """

    exact_match: float | None
    found: float | None
    on: str | None = "development questions"

    @property
    def is_low(self) -> bool:
        """Whether most answers, or the passages that they come from, are wrong."""
        low = self.exact_match is not None and self.exact_match < LOW_EXACT_MATCH
        return low or self.found is not None and self.found < LOW_RECALL

    def advice(self) -> str:
        """One line about how far to trust an answer."""
        on = "what it was measured on" if self.on is None else f"its {self.on}"
        answers = "" if self.exact_match is None else f"answers {self.exact_match:.0%} of {on} right"
        found = "" if self.found is None else f"finds the right passage for {self.found:.0%}"
        if not answers and found:
            found += f" of {on}"
        return f"this run {' and '.join(filter(None, (answers, found)))}: check the passages below"


def _results(file: Path) -> dict[str, Any]:
    """What a run ended with; {} where there is nothing or, after a warning, where it cannot be read."""
    try:
        found: Any = read_json(file) if file.is_file() else {}
    except UserError:
        found = None
    if isinstance(found, dict):
        return found
    logger.warning("%s cannot be read as results; answers come without what was measured", file)
    return {}


def recorded_metrics(run: Run, task: str) -> RecordedMetrics | None:
    """The newest measurement of what a task trained; None if it was never measured.

    results.json has what the run ended with, evaluations.jsonl of the task what was measured on the way.
    """
    results = _results(run.workdir / "results.json")
    methods = (question_search(task, run.config), task)
    by = next((by for by in methods if any(by in results.get(name, {}) for name in RECALLS)), task)
    ended = {name: one[by] for name in RECALLS if by in (one := results.get(name, {}))}
    last = task == task_names(run.config)[-1]  # results are of the parameters at the end
    exact = results.get("exact_match", {}).get("retrieval") if last else None
    if not ended and exact is None:
        lines = [line for line in read_lines(run.workdir / task / "evaluations.jsonl") if primary_metric(line)]
        ended = lines[-1] if lines else {}
        exact = ended.get("exact_match")
    found = ended.get(primary_metric(ended))
    on = "development questions" if exact is not None else results.get("measured_on")  # sentences have no answers
    return None if exact is None and found is None else RecordedMetrics(exact, found, on)


def towers_of(trained: TrainedRun) -> Params:
    """Both encoders of a run as it was opened. Raises UserError if another model was exported since."""
    names = trained.run.model.embedder_names
    missing = [name for name in names if name not in trained.params]
    if not missing:
        return {name: trained.params[name] for name in names}
    assert trained.model is not None, "an index version comes with both"
    now = find_exported_model(trained.model.folder)
    if now is None or now.identity != trained.model.identity:
        raise UserError(f"{trained.run.workdir}: was trained on since it was opened; open it again")
    read = jax.device_put(now.params(trained.run.model, missing), replicated(trained.run.mesh))
    return {name: trained.params.get(name, read.get(name)) for name in names}


def is_edited(run: Run) -> bool:
    """Whether the corpus was edited since the run was trained."""
    return bool(read_json(run.workdir / "data.json")["passages"] != run.sources.passages.fingerprint)


def published_index(run: Run, params: Params) -> Index | None:
    """The index of a generation of this version of the corpus and of the towers of `params`, if there is a good one."""
    name = run.model.embedder_names[-1]
    tower = to_arrays({name: params[name]})
    for manifest in _generations(run):
        with contextlib.suppress(Damaged):
            exported = _exported_towers(run, manifest)
            if exported and all(np.array_equal(exported[path], value) for path, value in tower.items()):
                return _stored_index(run, manifest)
    return None


def open_generation(run: Run, name: str) -> TrainedRun:
    """The index of a generation, by its name or the 'newest' of this version of the corpus, with the towers that made
    it and no reader. Raises UserError if there is none, and where its towers are gone."""
    folder = shared_folder(run)
    manifest = next(_generations(run), None) if name == "newest" else read_manifest(folder, name)
    if manifest is None and name == "newest":
        raise UserError(
            f"{folder.path('index')}: no generation of the corpus as it is now; train with refresh.mode=async, or "
            "publish one with `realm corpus`"
        )
    if manifest is None:
        raise UserError(f"{folder.path('index')}: there is no generation {name}; `realm storage ls` lists them")
    if manifest.corpus != run.sources.passages.fingerprint:
        raise UserError(f"generation {manifest.generation} is of another corpus than {run.config.data.path}")
    towers = _exported_towers(run, manifest)
    if towers is None:
        raise UserError(
            f"{folder.path('exports')}: the export of generation {manifest.generation} is gone; name another"
        )
    return TrainedRun(run, task_names(run.config)[-1], manifest.step, to_params(towers), _stored_index(run, manifest))


def _generations(run: Run) -> Iterator[Manifest]:
    """The good generations of this version of the corpus, the newest first."""
    folder = shared_folder(run)
    for manifest in read_manifests(folder, reversed(generation_names(folder))):
        if manifest.corpus == run.sources.passages.fingerprint and read_rejection(folder, manifest.generation) is None:
            yield manifest


def _exported_towers(run: Run, manifest: Manifest) -> dict[str, NDArray] | None:
    """The towers that a generation was built with; None if their export is gone."""
    export = export_of(shared_folder(run), manifest)
    return None if export is None else read_encoders(shared_folder(run), export)


def _stored_index(run: Run, manifest: Manifest) -> Index:
    return generation_index(run, shared_folder(run), manifest)


def check_question(run: Run, question: str, search: str = "vectors") -> str:
    """A question without the space around it. Raises UserError when it is empty or longer than the run reads,
    or where it has no word that BM25 alone could find it by."""
    question = question.strip()
    if len(question) > LONGEST:  # before it is cut into tokens, which takes its time
        raise UserError(f"the question has {len(question):,} characters; shorten it")
    try:
        question.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("the question is not valid UTF-8; type or save it as UTF-8 text") from None
    pieces = len(run.sources.tokenizer.encode(question).ids)
    if search == "bm25" and not run.bm25().has_terms(question):
        raise UserError(
            "the question has no word but stop words, which BM25 leaves out; ask with other words, or with "
            "--search=vectors"
        )
    if pieces == 0:
        raise UserError('the question is empty; write one, such as "When was the bridge built?"')
    most = run.config.data.query_length - 2
    if pieces > most:
        raise UserError(f"the question has {pieces:,} tokens, but this run reads at most {most}; shorten it")
    return question


def ranks_by_search(ranks: Sequence[int]) -> dict[str, int]:
    """The places of a passage by the searches that found it, from 1: {"vectors": 3, "bm25": 1}."""
    return {search: rank for search, rank in zip(("vectors", "bm25"), ranks, strict=True) if rank}
