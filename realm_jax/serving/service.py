"""What requests are answered with: a model, in batches of a few compiled sizes, and a newer one once there is one.

`Service.work` runs in one thread, `Service.renew` in another: it opens the run again when its exported model or its
corpus has changed, compiles what requests need, and puts the new model into the place of the old between two batches.
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
from realm_jax.index.files import generation_names
from realm_jax.index.provider import shared_folder
from realm_jax.inference.model import Model
from realm_jax.train.exported_model import MANIFEST, MODEL
from realm_jax.train.trained_run import check_question, check_reads_passages, is_edited
from realm_jax.train.workdir import recorded_config

logger = logging.getLogger(__name__)

EXAMPLE, BLANK = "What is it?", "It is ___."
DEPTH = 100  # passages of a search at most: one compiled program gives that many, and a reply has the first of them
SHORTEST, LONGEST = 30.0, 600.0  # seconds until what could not be opened is tried again; doubled each time


class ModelFacts(TypedDict):
    """The model that answers: name of its run, task and step of its parameters, and what finds passages.

    answers: True if `/ask` replies, False if only `/search` does; reader: the task that taught it to point at answers,
    None if it has not learned it.
    """

    run: str
    task: str
    step: int
    search: str
    passages: int
    vector_size: int
    answers: bool
    reader: Literal["questions", "blanks"] | None
    ready: bool


class Service:
    """A model that is kept up to date."""

    def __init__(self, workdir: Path, options: dict[str, Any], most: int) -> None:
        """Open the model. options: arguments of `Model`; most: texts of a batch at most.

        Raises UserError as `Model`, and for a run that answers without passages.
        """
        self._workdir, self._options = workdir, options
        # Batch sizes that are compiled: powers of two, and the largest.
        self._sizes = [size for size in (1 << power for power in range(most.bit_length())) if size < most] + [most]
        self._files = _files(workdir, options)
        self.model = self._open()
        self._generations = _generations(self.model)
        self._fault, self._pause, self._again = "", 0.0, math.inf
        self.ready = False
        self.renewed = self.failed = 0

    def _open(self) -> Model:
        model = Model(self._workdir, **self._options)
        check_reads_passages(model.trained)
        return model

    def warm_up(self, stop: threading.Event) -> None:
        """Compile what requests need, in all batch sizes; requests that come before wait for theirs alone."""
        self.ready = self._compile(self.model, stop)

    def facts(self) -> ModelFacts:
        """What the model is."""
        model, answers = self.model, self.model.generation is None
        learned: Literal["questions", "blanks"] = "blanks" if model.trained.reads_blanks else "questions"
        return ModelFacts(
            run=model.workdir.absolute().name,
            task=model.task,
            step=model.step,
            search=model.trained.search,
            passages=model.passages,
            vector_size=model.vector_size,
            answers=answers,
            reader=learned if answers and model.trained.reads else None,
            ready=self.ready,
        )

    def tokens(self, kind: str, texts: Sequence[str]) -> int:
        """How many tokens the tower of a kind reads of texts, special ones included."""
        run = self.model.run
        special, most = (2, run.lengths.query) if kind == "query" else (3, run.lengths.document)
        return sum(min(len(one.ids) + special, most) for one in run.sources.tokenizer.encode_batch(texts))

    def _compile(self, model: Model, stop: threading.Event) -> bool:
        """Answer an example in every batch size; returns whether it was not stopped."""
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
        """Take up what changed in the run or its corpus since the model was opened; returns whether anything did.

        Where that fails, whatever the reason, the model stays, and it is tried again later; a fault is logged once.
        """
        try:
            files, generations = _files(self._workdir, self._options), _generations(self.model)
            if (files, generations) == (self._files, self._generations) and time.monotonic() < self._again:
                return False
            self._files, self._generations = files, generations
            model = self._open()
            if not self._compile(model, stop):
                return False
        except Exception as fault:
            reason = str(fault) or type(fault).__name__
            if reason != self._fault:
                details = None if isinstance(fault, UserError | OSError) else fault
                logger.warning("the run cannot be opened anew (%s); the model before goes on", reason, exc_info=details)
                self.failed += 1
            self._fault, self._pause = reason, min(max(2 * self._pause, SHORTEST), LONGEST)
            self._again = time.monotonic() + self._pause
            return False
        # A generation that came meanwhile holds the vectors that were made for this model.
        self.model, self._generations = model, _generations(model)
        self._fault, self._pause, self._again = "", 0.0, math.inf
        self.renewed += 1
        return True

    def work(self, kind: str, payloads: list[Any]) -> list[Any]:
        """A result, or the exception of what is wrong with it, for each payload of a kind.

        ask, search: questions; query, document: texts to embed; inspect: keyword arguments of `Model.inspect`.
        """
        model, good, results = self.model, list[Any](), list[Any]()
        for payload in payloads:
            fault = None
            try:
                if kind in ("ask", "search"):
                    check_question(model.run, payload, model.trained.search)
                elif kind != "inspect":  # which checks a text as it explains it
                    payload.encode("utf-8")
            except UserError as error:
                fault = error
            except UnicodeEncodeError:
                fault = UserError("a text is not valid UTF-8; send it as UTF-8")
            results.append(fault)
            if fault is None:
                good.append(payload)
        size = next(size for size in self._sizes if size >= len(good))
        computed = iter(_computed(model, kind, good, size) if good else [])
        return [next(computed) if fault is None else fault for fault in results]


def _computed(model: Model, kind: str, payloads: list[Any], size: int) -> list[Any]:
    """Results of good payloads; of explanations each may be a UserError."""
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
        except UserError as fault:
            results.append(fault)
    return results


def _files(workdir: Path, options: dict[str, Any]) -> tuple[Any, ...]:
    """Identify the files that change with a run: its exported model, and the data that edits replace.

    They are put in place as a whole, so they have new inodes.
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
    """Names of the generations that the index of the model may be taken from; the others make no difference to it."""
    taken = model.generation == "newest" or is_edited(model.run)
    return tuple(generation_names(shared_folder(model.run))) if taken else ()
