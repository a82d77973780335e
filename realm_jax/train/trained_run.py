"""Open a trained run for inference, for `realm ask`, `predict`, `evaluate`, `inspect` and `serve`.

We read the run's exported model (`exported_model.py`) and change nothing in the run directory. So a run can answer
questions while it trains, with the model of its last finished task.
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
from realm_jax.config import (
    INDEX,
    TASK_SECTIONS,
    default,
    flatten,
    last_task,
    task_names,
    training_keys,
    with_overrides,
)
from realm_jax.data.questions import Question, read_questions
from realm_jax.data.staging import PREPARED, is_remote
from realm_jax.errors import UserError
from realm_jax.eval.prediction import Evaluator
from realm_jax.forward import Index, SearchPipeline
from realm_jax.indexing.exporter import to_arrays, to_params
from realm_jax.indexing.files import (
    Manifest,
    export_of,
    generation_names,
    read_encoders,
    read_manifest,
    read_manifests,
    read_rejection,
)
from realm_jax.indexing.provider import shared_folder
from realm_jax.indexing.vector_cache import embed_with_cache
from realm_jax.indexing.watcher import generation_index
from realm_jax.mesh import replicated
from realm_jax.mirror import url_of
from realm_jax.models.layers import Params
from realm_jax.models.question_reader import QuestionReader, open_question_reader
from realm_jax.run import Run
from realm_jax.storage import Damaged, read_json
from realm_jax.tasks.answering import (
    ANSWERING_TASKS,
    needs_vectors,
    question_search,
    reads_passages,
    search_pipeline,
    trains_cloze_reader,
    trains_qa_reader,
)
from realm_jax.train.exported_model import ExportedModel, exported_model, find_exported_model
from realm_jax.train.records import RECALLS, primary_metric, read_lines
from realm_jax.train.workdir import begins_with_reader, check_data, load_run, recorded_config

logger = logging.getLogger(__name__)

NBEST = 5  # default number of answers for a question
MAX_QUESTION_CHARACTERS = 20_000
NAME_A_READER = "name a model that was trained on questions with --reader=hf:NAME"
LOW_EXACT_MATCH, LOW_RECALL = 0.2, 0.5  # below these we warn the user


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run with the exported model of a task, and the embedded corpus.

    Attributes:
        run: its fixed parts.
        task: name of the task that trained the parameters.
        step: number of steps of the task.
        params: parameters that answers need, on the devices.
        index: the corpus, embedded with these parameters.
        pipeline: how passages of questions are found.
        model: has the other parameters; None for a published generation.
        reader: reads passages in place of the run's own reader; None for the run's.
    """

    run: Run
    task: str
    step: int
    params: Params
    index: Index
    pipeline: SearchPipeline = SearchPipeline()
    model: ExportedModel | None = None
    reader: QuestionReader | None = None

    def evaluator(self, questions: Sequence[Question], batch_size: int | None = None) -> Evaluator:
        """Return an evaluator of questions.

        Args:
            questions: to answer.
            batch_size: questions at a time; None for `evaluation.batch_size`.
        """
        return Evaluator(self.run, questions, self.pipeline, self.reads_blanks, batch_size, self.reader)

    @property
    def reads(self) -> bool:
        """Return True if its reader learned to answer from passages, with questions or masked sentences."""
        return self.reader is not None or self.reads_blanks or reader_is_trained(self.run.workdir, self.task)

    @property
    def reads_blanks(self) -> bool:
        """Return True if its reader learned to answer only with masked sentences (blanks), not with questions."""
        return self.reader is None and points_at_blanks(self.run, self.task)

    @property
    def recorded(self) -> "RecordedMetrics | None":
        """Return `recorded_metrics`; exact match is of the run's own reader and left out if another one reads."""
        metrics = recorded_metrics(self.run, self.task)
        if metrics is None or self.reader is None:
            return metrics
        return None if metrics.recall is None else dataclasses.replace(metrics, exact_match=None)


def float32_digits(value: float) -> float:
    """Round a number to the nine digits that tell float32 numbers apart."""
    return float(f"{value:.9g}")


def load_questions(run: Run, name: str | None, need_right: bool) -> list[Question]:
    """Read the questions of a split or a file, and warn of long questions and missing gold passages.

    Args:
        run: has the splits.
        name: name of a split, or path of a file; None for the split `dev`.
        need_right: true to reject questions with neither answers nor gold passages.

    Raises:
        UserError: there is no such split or file, or the file is malformed.
    """
    questions = _read_split_or_file(run, name or "dev", need_right)
    max_tokens = run.config.data.query_length - 2
    encoded = run.sources.tokenizer.encode_batch([question.question for question in questions])
    if cut := sum(len(encoding.ids) > max_tokens for encoding in encoded):
        logger.warning("truncating %d questions that have more than the %d tokens that the run reads", cut, max_tokens)
    gold = {name for question in questions for name in question.gold}
    if missing := [name for name in gold if not run.sources.passages.rows_of(name)]:
        logger.warning(
            "%d gold passages, such as %r, are not in the corpus and count as misses", len(missing), min(missing)
        )
    return questions


def _read_split_or_file(run: Run, name: str, need_right: bool) -> list[Question]:
    """Read questions; a name that is no split is a path if the file exists or if the name is no identifier."""
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
    """Return the changes of a trained run's config, dotted key → value, from `--config.key=value` flags.

    Raises:
        UserError: a key is neither a runtime nor an evaluation key, so the run fixes it.
    """
    names = [override.partition("=")[0].removeprefix("--config.") for override in overrides]
    config = with_overrides(default(), overrides)
    for name in training_keys(config).keys() & {*names}:
        if not name.startswith("evaluation."):
            raise UserError(f"--config.{name}: fixed by the run; only runtime and evaluation keys may change")
    values = flatten(config.to_dict())
    return {name: values[name] for name in names}


def open_run_for_inference(workdir: Path, changes: dict[str, Any] | None = None, questions: bool = True) -> Run:
    """Open a run on the devices of this machine.

    Args:
        workdir: the run directory.
        changes: dotted key of the config → value; None for no changes.
        questions: false to leave out the questions of the prepared folder.

    Raises:
        UserError: there is no run, or its prepared folder is missing or has other data.
    """
    changes = changes or {}
    recorded = recorded_config(workdir)
    folder = changes.get("data.path") or recorded.data.path
    if not is_remote(folder) and not (Path(folder) / PREPARED).is_file():
        raise UserError(
            f"{folder}: the prepared folder of the run in {url_of(workdir)} is not there (looked from {Path.cwd()}); "
            "name its new location with --config.data.path=DIR"
        )
    cache_programs()
    # This machine may have other devices than the one that trained. Each device gets a share of the passages and all
    # parameters. We do not train, but batch sizes of tasks have to be valid for the number of devices.
    here: dict[str, Any] = {"mesh.fsdp": 1, "mesh.model": 1, "optimizer.microbatches": 1}
    for name in TASK_SECTIONS:
        here[f"{name}.batch_size"] = jax.device_count()
    run = load_run(workdir, here | changes, questions)
    check_data(run, run.sources.passages.versions, questions)
    return run


def reader_is_trained(workdir: Path, task: str) -> bool:
    """Return True if the reader at the end of a task learned to answer questions, in this run or in its source.

    Args:
        workdir: the run directory.
        task: the task's name.
    """
    return trains_qa_reader(task) or begins_with_reader(workdir)


def has_reader(run: Run, task: str) -> bool:
    """Return True unless the run is an index without a trained reader, for which we measure only retrieval.

    Args:
        run: has config and run directory.
        task: task that trained the parameters.
    """
    return task != INDEX or bool(run.config.answering.reader) or reader_is_trained(run.workdir, task)


def points_at_blanks(run: Run, task: str) -> bool:
    """Return True if the reader at the end of a task learned to answer only with masked sentences.

    Args:
        run: has config and run directory.
        task: the task's name.
    """
    return trains_cloze_reader(task, run.config) and not reader_is_trained(run.workdir, task)


def check_reads_passages(trained: TrainedRun) -> None:
    """Raise UserError if the reader answers without passages, so that there are none to show."""
    if not reads_passages(trained.task):
        raise UserError(
            f"{url_of(trained.run.workdir)}: its task {trained.task} answers without passages; use `realm predict`"
        )


def restore(
    run: Run, task: str | None = None, for_answers: bool = True, search: str | None = None, rerank: str | None = None,
    warn: bool = True,
) -> TrainedRun:  # fmt: skip
    """Read a run's exported model, and put it on the devices with the corpus.

    The corpus is embedded if the model has no vectors of these passages.

    Args:
        run: opened on this machine.
        task: name of the task that trained the parameters; None for the last finished task.
        for_answers: false to read encoders for vectors only.
        search: one of `config.SEARCHES`; None for the task's.
        rerank: one of `config.RERANKERS`; None for `answering.rerank`.
        warn: true to warn if the reader has not learned to answer.

    Raises:
        UserError: the recipe has no such task or trained no such reranker, its exported model is missing or damaged, or
            `answering.reader` cannot be opened.
    """
    reader = open_reader(run, find_task(run, task).task) if for_answers else None
    while True:
        exported = find_task(run, task)
        pipeline = search_pipeline(exported.task, run.config, search, rerank if for_answers else "none")
        takes_vectors = needs_vectors(exported.task, run.config, pipeline.search)
        try:
            vectors = exported.vectors(run.sources.passages.fingerprint) if takes_vectors else None  # [passages, width]
            reranks_by_tokens = pipeline.reranker == "tokens"
            tokens = exported.tokens(run.sources.passages.fingerprint) if reranks_by_tokens else None
            compression = None if tokens is None else exported.token_compression()
            # The passage encoder is needed only to embed passages, which vectors make unnecessary.
            query_name, *passage_names = run.model.embedder_names  # one name if both share a network
            embeds = (takes_vectors and vectors is None) or not for_answers or run.config.qa.trains_passages
            names = [query_name, "reader", *(passage_names if embeds else ())]
            names += pipeline.rerank.networks if pipeline.rerank and tokens is None else ()
            params = jax.device_put(exported.params(run.model, {*names}), replicated(run.mesh))
            break
        except UserError:
            if find_task(run, task).identity == exported.identity:
                raise
            # The run replaced the exported model while we read it, so we read it again.

    if not takes_vectors:
        index = run.index_without_vectors
    elif vectors is not None:
        index = run.index(vectors)
    else:
        published = published_index(run, params) if is_edited(run) else None
        index = published or run.index(embed_with_cache(run, params, bar=True))
    if tokens is not None and compression is not None:
        index = index._replace(tokens=run.stored_tokens(tokens, compression))

    learned = reader is not None or exported.task in ANSWERING_TASKS or reader_is_trained(run.workdir, exported.task)
    if not learned and not points_at_blanks(run, exported.task) and for_answers and warn:
        reason = f"these are the parameters of task {exported.task}"
        reason = "no reader was trained" if exported.task == INDEX else reason
        logger.warning("%s: answers come from a span head that was not fine-tuned; %s", reason, NAME_A_READER)
    if pipeline.search != "vectors" and for_answers:
        run.bm25()  # raises UserError if it cannot search
    return TrainedRun(run, exported.task, exported.step, params, index, pipeline, exported, reader)


def open_reader(run: Run, task: str) -> QuestionReader | None:
    """Open the model of `answering.reader`.

    Args:
        run: has the config and the mesh.
        task: task that trained the parameters.

    Returns:
        None if the run's own reader answers.

    Raises:
        UserError: the model cannot be opened, or the task answers without passages.
    """
    name = run.config.answering.reader
    if name and not reads_passages(task):
        raise UserError(f"--reader={name}: {url_of(run.workdir)} answers without passages ({task}); leave it out")
    return open_question_reader(name, run.mesh) if name else None


def find_task(run: Run, task: str | None) -> ExportedModel:
    """Open the exported model of a run.

    Args:
        run: has recipe and run directory.
        task: name of the task that trained the parameters; None for the last finished task.

    Raises:
        UserError: the recipe has no such task, or it has exported no model.
    """
    names = task_names(run.config) or [INDEX]
    if task is not None and task not in names:
        raise UserError(
            f"--task={task}: the run in {url_of(run.workdir)} has no such task; choose among {', '.join(names)}"
        )
    return exported_model(run.workdir, task)


@dataclasses.dataclass(frozen=True)
class RecordedMetrics:
    """Metrics that a run recorded at the end of a task; None for a metric that it did not record.

    Attributes:
        exact_match: share of the answers that are right.
        recall: recall@5, or answer_recall@5 if no question has a gold passage.
        on: name of the questions in results.json; None if that file does not exist yet.
    """

    exact_match: float | None
    recall: float | None
    on: str | None = "development questions"

    @property
    def is_low(self) -> bool:
        """Return True if most answers, or most retrieved passages, are wrong."""
        low = self.exact_match is not None and self.exact_match < LOW_EXACT_MATCH
        return low or self.recall is not None and self.recall < LOW_RECALL

    def advice(self) -> str:
        """Return a line that tells how far to trust an answer."""
        on = "the questions that it was measured on" if self.on is None else f"its {self.on}"
        answers = "" if self.exact_match is None else f"answers {self.exact_match:.0%} of {on} right"
        passages = "" if self.recall is None else f"finds the right passage for {self.recall:.0%}"
        if not answers and passages:
            passages += f" of {on}"
        return f"this run {' and '.join(filter(None, (answers, passages)))}: check the passages below"


def _results(file: Path) -> dict[str, Any]:
    """Read results.json; {} if it is missing, or with a warning if it is malformed."""
    try:
        results: Any = read_json(file) if file.is_file() else {}
    except UserError:
        results = None
    if isinstance(results, dict):
        return results
    logger.warning("%s cannot be read as results; answers come without metrics of the run", file)
    return {}


def recorded_metrics(run: Run, task: str) -> RecordedMetrics | None:
    """Return the newest metrics of a task's parameters: those in results.json, else its last evaluation.

    Args:
        run: has recipe and run directory.
        task: the task's name.

    Returns:
        None if the parameters were never evaluated.
    """
    results = _results(run.workdir / "results.json")
    methods = (question_search(task, run.config), task)
    method = next((method for method in methods if any(method in results.get(name, {}) for name in RECALLS)), task)
    measures = {name: values[method] for name in RECALLS if method in (values := results.get(name, {}))}
    last = task == last_task(run.config)  # exact match there is of the last parameters of the run
    exact = results.get("exact_match", {}).get("retrieval") if last else None
    if not measures and exact is None:
        lines = [line for line in read_lines(run.workdir / task / "evaluations.jsonl") if primary_metric(line)]
        measures = lines[-1] if lines else {}
        exact = measures.get("exact_match")
    recall = measures.get(primary_metric(measures))
    on = "development questions" if exact is not None else results.get("measured_on")  # sentences have no answers
    return None if exact is None and recall is None else RecordedMetrics(exact, recall, on)


def encoder_params(trained: TrainedRun) -> Params:
    """Return the parameters of both encoders. Raises UserError if another model was exported since."""
    names = trained.run.model.embedder_names
    missing = [name for name in names if name not in trained.params]
    if not missing:
        return {name: trained.params[name] for name in names}
    assert trained.model is not None, "a generation comes with both encoders"
    current = find_exported_model(trained.model.folder)
    if current is None or current.identity != trained.model.identity:
        raise UserError(f"{url_of(trained.run.workdir)}: the run continued after it was opened; open it again")
    read = jax.device_put(current.params(trained.run.model, missing), replicated(trained.run.mesh))
    return {name: trained.params.get(name, read.get(name)) for name in names}


def is_edited(run: Run) -> bool:
    """Return True if the corpus was edited after the run started."""
    return bool(read_json(run.workdir / "data.json")["passages"] != run.sources.passages.fingerprint)


def published_index(run: Run, params: Params) -> Index | None:
    """Load a generation of this version of the corpus.

    Args:
        run: has the corpus and the shared folder.
        params: has the passage encoder that embedded the generation.

    Returns:
        None if there is no intact generation.
    """
    name = run.model.embedder_names[-1]
    passage_encoder = to_arrays({name: params[name]})
    for manifest in _generations(run):
        with contextlib.suppress(Damaged):
            exported = _exported_encoders(run, manifest)
            if exported and all(np.array_equal(exported[path], value) for path, value in passage_encoder.items()):
                return generation_index(run, shared_folder(run), manifest)
    return None


def open_generation(run: Run, name: str) -> TrainedRun:
    """Load a generation with the encoders that embedded it, and without a reader.

    Args:
        run: has the corpus and the shared folder.
        name: name of the generation, or 'newest' for the newest one of this version of the corpus.

    Raises:
        UserError: there is no such generation, or its export was removed.
    """
    folder = shared_folder(run)
    manifest = next(_generations(run), None) if name == "newest" else read_manifest(folder, name)
    if manifest is None and name == "newest":
        raise UserError(
            f"{folder.path('index')}: no index of the current corpus; train with refresh.mode=async, or "
            "publish one with `realm corpus`"
        )
    if manifest is None:
        raise UserError(f"{folder.path('index')}: there is no generation {name}; `realm storage ls` lists them")
    if manifest.corpus != run.sources.passages.fingerprint:
        raise UserError(
            f"generation {manifest.generation} was built for another corpus than {run.config.data.path}; name another"
        )
    encoders = _exported_encoders(run, manifest)
    if encoders is None:
        raise UserError(
            f"{folder.path('exports')}: the export of generation {manifest.generation} is gone; name another"
        )
    index = generation_index(run, folder, manifest)
    return TrainedRun(run, last_task(run.config), manifest.step, to_params(encoders), index)


def _generations(run: Run) -> Iterator[Manifest]:
    """Yield the generations of this version of the corpus that were not rejected, the newest first."""
    folder = shared_folder(run)
    for manifest in read_manifests(folder, reversed(generation_names(folder))):
        if manifest.corpus == run.sources.passages.fingerprint and read_rejection(folder, manifest.generation) is None:
            yield manifest


def _exported_encoders(run: Run, manifest: Manifest) -> dict[str, NDArray] | None:
    """Read the encoders that embedded a generation; None if their export was removed."""
    export = export_of(shared_folder(run), manifest)
    return None if export is None else read_encoders(shared_folder(run), export)


def check_question(run: Run, question: str, search: str = "vectors") -> str:
    """Return a question without the white space around it.

    Args:
        run: has tokenizer and lengths.
        question: text of the user.
        search: one of `config.SEARCHES`.

    Raises:
        UserError: the question is empty or too long, or BM25 is the only search and would ignore all of its words.
    """
    question = question.strip()
    if len(question) > MAX_QUESTION_CHARACTERS:  # before tokenizing, which is slow for long texts
        raise UserError(f"the question has {len(question):,} characters; shorten it")
    try:
        question.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("the question is not valid UTF-8; type or save it as UTF-8 text") from None
    num_tokens = len(run.sources.tokenizer.encode(question).ids)
    if search == "bm25" and not run.bm25().has_terms(question):
        raise UserError(
            "the question has no word but stop words, which BM25 leaves out; ask with other words, or with "
            "--search=vectors"
        )
    if num_tokens == 0:
        raise UserError('the question is empty; write one, such as "When was the bridge built?"')
    max_tokens = run.config.data.query_length - 2
    if num_tokens > max_tokens:
        raise UserError(f"the question has {num_tokens:,} tokens, but this run reads at most {max_tokens}; shorten it")
    return question
