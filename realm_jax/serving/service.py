"""Answer requests with a model, in batches of a few compiled sizes, and replace it by a newer model when there is one.

`Service.work` runs in one thread, `Service.renew` in another: it opens the run again when its exported model or its
corpus has changed, compiles the programs of all requests, and replaces the old model between two batches.
"""

import logging
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from realm_jax.data.staging import PREPARED, is_remote
from realm_jax.data.store import MANIFEST as STORE
from realm_jax.errors import UserError
from realm_jax.indexing.files import generation_names
from realm_jax.indexing.provider import shared_folder
from realm_jax.inference.model import Model
from realm_jax.train.exported_model import MANIFEST, MODEL
from realm_jax.train.trained_run import check_question, check_reads_passages, is_edited
from realm_jax.train.workdir import recorded_config

logger = logging.getLogger(__name__)

EXAMPLE, BLANK = "What is it?", "It is ___."
DEPTH = 100  # largest number of passages of a search: one compiled program returns them, and a reply has the first
MIN_PAUSE, MAX_PAUSE = 30.0, 600.0  # seconds until a model that could not be opened is tried again; doubled each time


class ModelFacts(TypedDict):
    """The model that answers.

    Attributes:
        run: name of the run directory.
        task: task that trained the parameters.
        step: step of the parameters.
        search: one of `config.SEARCHES`.
        rerank: one of `config.RERANKERS`.
        passages: number of passages in the corpus.
        vector_size: features of a vector.
        answers: True if `/ask` replies, False if only `/search` does.
        reader: the task that taught the reader to point at answers; None if it has not learned it.
        ready: examples of all requests were answered.
    """

    run: str
    task: str
    step: int
    search: str
    rerank: str
    passages: int
    vector_size: int
    answers: bool
    reader: Literal["questions", "blanks"] | None
    ready: bool


class Service:
    """A model that is kept up to date."""

    def __init__(self, workdir: Path, options: dict[str, Any], most: int) -> None:
        """Open the model.

        Args:
            workdir: the run directory.
            options: arguments of `Model`.
            most: largest number of texts in a batch.

        Raises:
            UserError: as `Model`, and for a run that answers without passages.
        """
        self._workdir, self._options = workdir, options
        # Batch sizes that are compiled: powers of two, and the largest.
        self._sizes = [size for size in (1 << power for power in range(most.bit_length())) if size < most] + [most]
        self._files = _files(workdir, options)
        self.model = self._open()
        self._generations = _generations(self.model)
        self._last_error, self._pause, self._retry_at = "", 0.0, math.inf
        self.ready = False
        self.renewed = self.failed = 0

    def _open(self) -> Model:
        model = Model(self._workdir, **self._options)
        check_reads_passages(model.trained)
        return model

    def warm_up(self, stop: threading.Event) -> None:
        """Compile the programs of all requests, in all batch sizes; a request meanwhile waits only for its own."""
        self.ready = self._compile(self.model, stop)

    def facts(self) -> ModelFacts:
        """Describe the model."""
        model, answers = self.model, self.model.generation is None
        learned: Literal["questions", "blanks"] = "blanks" if model.trained.reads_blanks else "questions"
        return ModelFacts(
            run=model.workdir.absolute().name,
            task=model.task,
            step=model.step,
            search=model.trained.pipeline.search,
            rerank=model.trained.pipeline.reranker,
            passages=model.passages,
            vector_size=model.vector_size,
            answers=answers,
            reader=learned if answers and model.trained.reads else None,
            ready=self.ready,
        )

    def tokens(self, kind: str, texts: Sequence[str]) -> int:
        """Return how many tokens an encoder reads of texts, including special tokens.

        Args:
            kind: 'query' or 'document'.
            texts: to embed.
        """
        run = self.model.run
        special, max_length = (2, run.lengths.query) if kind == "query" else (3, run.lengths.document)
        encodings = run.sources.tokenizer.encode_batch(texts)
        return sum(min(len(encoding.ids) + special, max_length) for encoding in encodings)

    def _compile(self, model: Model, stop: threading.Event) -> bool:
        """Answer examples in every batch size; return False if `stop` was set."""
        began = time.monotonic()
        kinds = (*(["ask"] if model.generation is None else []), "search", "query")
        examples: list[tuple[str, list[Any]]] = [(kind, [EXAMPLE] * size) for size in self._sizes for kind in kinds]
        examples += [("document", [EXAMPLE]), ("inspect", [{"text": EXAMPLE}]), ("inspect", [{"text": BLANK}])]
        for kind, payloads in examples:
            if stop.is_set():
                return False
            _computed(model, kind, payloads, len(payloads))
        logger.info("ready after %.0f seconds: %s", time.monotonic() - began, model)
        return True

    def renew(self, stop: threading.Event) -> bool:
        """Open the model again if the run or its corpus has changed; return True if a new model is in use.

        If that fails for any reason, the old model stays, and we try again later; each error is logged once.
        """
        try:
            files, generations = _files(self._workdir, self._options), _generations(self.model)
            if (files, generations) == (self._files, self._generations) and time.monotonic() < self._retry_at:
                return False
            self._files, self._generations = files, generations
            model = self._open()
            if not self._compile(model, stop):
                return False
        except Exception as error:
            reason = str(error) or type(error).__name__
            if reason != self._last_error:
                details = None if isinstance(error, UserError | OSError) else error
                logger.warning(
                    "cannot open the run again (%s); the current model stays in use", reason, exc_info=details
                )
                self.failed += 1
            self._last_error, self._pause = reason, min(max(2 * self._pause, MIN_PAUSE), MAX_PAUSE)
            self._retry_at = time.monotonic() + self._pause
            return False
        # A generation that was published meanwhile holds the vectors of this model.
        self.model, self._generations = model, _generations(model)
        self._last_error, self._pause, self._retry_at = "", 0.0, math.inf
        self.renewed += 1
        return True

    def work(self, kind: str, payloads: list[Any]) -> list[Any]:
        """Compute payloads of one kind.

        Args:
            kind: kind of the payloads.
            payloads: questions for 'ask' and 'search'; texts to embed for 'query' and 'document'; keyword arguments of
                `Model.inspect` for 'inspect'.

        Returns:
            For each payload its result, or a UserError.
        """
        model, valid_payloads = self.model, list[Any]()
        errors: list[UserError | None] = []
        for payload in payloads:
            error = None
            try:
                if kind in ("ask", "search"):
                    check_question(model.run, payload, model.trained.pipeline.search)
                elif kind != "inspect":  # `Model.inspect` checks its text itself
                    payload.encode("utf-8")
            except UserError as invalid:
                error = invalid
            except UnicodeEncodeError:
                error = UserError("a text is not valid UTF-8; send it as UTF-8")
            errors.append(error)
            if error is None:
                valid_payloads.append(payload)
        size = next(size for size in self._sizes if size >= len(valid_payloads))
        results = iter(_computed(model, kind, valid_payloads, size) if valid_payloads else [])
        return [next(results) if error is None else error for error in errors]


def _computed(model: Model, kind: str, payloads: list[Any], size: int) -> list[Any]:
    """Return the results of valid payloads; those of 'inspect' may be UserErrors."""
    if kind == "ask":
        return model.ask(payloads, batch_size=size)
    if kind == "search":
        return model.search(payloads, top=DEPTH, batch_size=size)
    if kind != "inspect":
        return list(model.encode(payloads, "query" if kind == "query" else "document", batch_size=size))
    results = list[Any]()
    for payload in payloads:
        try:
            results.append(model.inspect(**payload))
        except UserError as error:
            results.append(error)
    return results


def _files(workdir: Path, options: dict[str, Any]) -> tuple[Any, ...]:
    """Identify the files that change with a run: its exported model, and the data that edits replace.

    They are replaced atomically, so they get new inodes.
    """
    data = (options.get("config") or {}).get("data.path", recorded_config(workdir).data.path)
    paths = [workdir / (options.get("task") or "") / MODEL / MANIFEST]
    paths += [] if is_remote(data) else [Path(data) / name for name in (PREPARED, f"passages/{STORE}")]
    files: list[Any] = []
    for path in paths:
        try:
            status = path.stat()
            files.append((status.st_ino, status.st_mtime_ns, status.st_size))
        except OSError:
            files.append(None)
    return tuple(files)


def _generations(model: Model) -> tuple[str, ...]:
    """Return the names of the generations if the model's index may come from one; else ()."""
    uses_generations = model.generation == "newest" or is_edited(model.run)
    return tuple(generation_names(shared_folder(model.run))) if uses_generations else ()
