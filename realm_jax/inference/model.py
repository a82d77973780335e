"""A trained run, opened: one object that answers, searches, embeds, explains and measures.

It is what `realm_jax.Model` is, and what `realm serve` answers with.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.config import SEARCHES
from realm_jax.data.examples import document_arrays, query_arrays
from realm_jax.data.questions import checked_questions
from realm_jax.data.staging import is_remote
from realm_jax.errors import UserError
from realm_jax.inference.answers import NEAREST, Answer, Nearest, answers, nearest
from realm_jax.inference.inspection import (
    Inspection,
    check_has_priors,
    inspect_question,
    inspect_sentence,
    inspected_task,
    masked_text,
    parse,
)
from realm_jax.inference.predictions import evaluate
from realm_jax.mesh import to_host
from realm_jax.models.layers import Params
from realm_jax.models.retriever import Retriever
from realm_jax.retrieval.embed import CorpusRows, pad_rows
from realm_jax.run import Run, put_batch
from realm_jax.train.trained_run import (
    TrainedRun,
    check_question,
    check_reads_passages,
    encoder_params,
    load_questions,
    open_generation,
    open_run_for_inference,
    restore,
    run_changes,
)

Made = TypeVar("Made", Answer, Nearest)
Texts = list[str] | tuple[str, ...]  # a string is a Sequence[str] as well
BATCH = 32  # texts of a batch, if nothing else is asked for


class Model:
    """A run of `realm train` or `realm quickstart`, or what `realm adapt` made, opened for inference.

    Nothing in its folder is changed, so a run can answer while it trains: it is opened with the model that its last
    finished task exported, and keeps it. Texts go through the devices in batches; one object is for one thread at a
    time.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        task: str | None = None,
        search: str | None = None,
        generation: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the run of a folder.

        task: whose parameters (default: of the last task that ended; for blanks, of pre-training). search: what
        finds passages, 'vectors', 'bm25' or 'hybrid' (default: the config's qa.search). generation: the index of this
        name, or the 'newest', which searches but does not answer. config: runtime and evaluation keys to change,
        such as {"answering.read": 50, "data.path": "moved/data"}.

        Raises UserError where there is no run, no exported model, or no such task or generation, and where the prepared
        folder is gone or another one.
        """
        if search not in (None, *SEARCHES):
            raise UserError(f"search={search}: choose among {', '.join(SEARCHES)}")
        if generation is not None and (task, search) != (None, None):
            raise UserError(f"generation={generation}: goes without task and search; leave them out")
        if is_remote(str(workdir)):
            raise UserError(f"workdir={workdir}: a model is opened from a folder; copy the run to a disk, or mount it")
        if not isinstance(config, Mapping | None):
            raise UserError(f"config={config!r}: takes the keys to change as a dict, such as {{'answering.read': 50}}")
        self.workdir = Path(workdir)
        self._changes = run_changes([f"--config.{key}={value}" for key, value in (config or {}).items()])
        opened = open_run_for_inference(self.workdir, self._changes, questions=False)
        if generation is None:
            self.trained = restore(opened, task, search=search, warn=False)
        else:
            self.trained = open_generation(opened, generation)
        self.generation, self._named = generation, task

    @property
    def run(self) -> Run:
        """The fixed parts of the run: its config, corpus, tokenizer and networks."""
        return self.trained.run

    @property
    def task(self) -> str:
        """The task whose parameters these are."""
        return self.trained.task

    @property
    def step(self) -> int:
        """The step of that task."""
        return self.trained.step

    @property
    def passages(self) -> int:
        """How many passages the corpus has."""
        return int(self.run.context.rows)

    @property
    def vector_size(self) -> int:
        """Numbers of a vector."""
        return self.run.model.vector_size

    def __repr__(self) -> str:
        return f"Model({str(self.workdir)!r}: task {self.task} at step {self.step}, {self.passages:,} passages)"

    # --- questions

    @overload
    def ask(self, question: str, *, top: int | None = None, batch_size: int = BATCH) -> Answer: ...
    @overload
    def ask(self, question: Texts, *, top: int | None = None, batch_size: int = BATCH) -> list[Answer]: ...

    def ask(self, question: str | Texts, *, top: int | None = None, batch_size: int = BATCH) -> Answer | list[Answer]:
        """The answer to a question, or to each of some: `inference.answers.Answer`.

        top: passages to give (default: all that were read). Raises UserError for an empty or overlong question, and for
        a run that answers without passages or was opened at a generation.
        """
        if self.generation is not None:
            raise UserError("this model was opened at a generation of the index: use search, or open it without")
        check_reads_passages(self.trained)
        most = None if top is None else _at_least_one(top, "top")
        return self._each(question, batch_size, lambda some, size: answers(self.trained, some, most, size))

    @overload
    def search(self, question: str, *, top: int = NEAREST, batch_size: int = BATCH) -> Nearest: ...
    @overload
    def search(self, question: Texts, *, top: int = NEAREST, batch_size: int = BATCH) -> list[Nearest]: ...

    def search(self, question: str | Texts, *, top: int = NEAREST, batch_size: int = BATCH) -> Nearest | list[Nearest]:
        """The `top` nearest passages of a question, or of each of some: `inference.answers.Nearest`.

        For each other `top` or `batch_size` a program is compiled.
        Raises UserError as `ask`.
        """
        check_reads_passages(self.trained)
        most = _at_least_one(top, "top")
        return self._each(question, batch_size, lambda some, size: nearest(self.trained, some, most, size))

    def _each(
        self, question: str | Texts, batch_size: int, make: Callable[[list[str], int], list[Made]]
    ) -> Made | list[Made]:
        """Return `make` of checked questions; of one, in a batch of its own."""
        single = isinstance(question, str)
        asked = [question] if isinstance(question, str) else _texts(question, "questions")
        checked = [check_question(self.run, one, self.trained.search) for one in asked]
        # Filled up to a power of two, so that a few programs serve any number of questions.
        size = min(_at_least_one(batch_size, "batch_size"), 1 << (max(len(checked), 1) - 1).bit_length())
        found = make(checked, size) if checked else []
        return found[0] if single else found

    # --- vectors

    def encode(
        self,
        texts: Sequence[str],
        kind: Literal["query", "document"] = "query",
        *,
        titles: Sequence[str] | None = None,
        batch_size: int = BATCH,
    ) -> NDArray[np.float32]:
        """Vectors of texts, float32 [texts, vector_size], cut to the lengths of the run.

        kind: whether the query or the document tower embeds them; titles: of documents, empty where not given;
        batch_size: of queries, as documents are embedded in the batches of the corpus. A
        document's vector is that of the index; a query's inner product with it, divided by the temperature of the run
        (1 in most), is the score of a search.
        """
        given, size = _texts(texts, "texts"), _at_least_one(batch_size, "batch_size")
        run, tokenizer = self.run, self.run.sources.tokenizer
        vectors = [np.empty((0, self.vector_size), np.float32)]
        if kind == "query":
            if titles is not None:
                raise UserError("titles: go with kind='document'; leave them out")
            tower = {name: self.trained.params[name] for name in run.model.embedder_names[:1]}
            size += -size % run.mesh.size
            for start in range(0, len(given), size):
                encoded = tokenizer.encode_batch(given[start : start + size])
                rows = [query_arrays(np.asarray(one.ids, np.int32), run.lengths.query, tokenizer) for one in encoded]
                batch = {name: pad_rows(np.stack([row[name] for row in rows]), size) for name in rows[0]}
                placed = put_batch(run.mesh, batch)
                found = _query_vectors(run.model, tower, placed["query"], placed["query_length"])  # [size, vector size]
                vectors.append(to_host(found)[: len(rows)])
            return np.concatenate(vectors)
        if kind != "document":
            raise UserError(f"kind={kind}: choose 'query' or 'document'")
        heads = [""] * len(given) if titles is None else _texts(titles, "titles")
        if len(heads) != len(given):
            raise UserError(f"{len(given)} texts have {len(heads)} titles; give one for each text, or none")
        if not given:
            return vectors[0]
        length, pairs = run.config.data.document_length, map(tokenizer.encode_batch, (heads, given))
        rows = [
            document_arrays(np.asarray(title.ids), np.asarray(body.ids), length, tokenizer)
            for title, body in zip(*pairs, strict=True)
        ]
        ids, *lengths = (
            np.stack([row[name] for row in rows]) for name in ("document", "document_length", "document_title_length")
        )
        return run.embed(self._towers, rows=CorpusRows(ids, *(array.astype(np.uint16) for array in lengths)))

    @cached_property
    def _towers(self) -> Params:
        """All towers; answering needs the query tower alone."""
        return encoder_params(self.trained)

    # --- explanations

    def inspect(self, text: str, *, answer: str | None = None, pieces: int = 1) -> Inspection:
        """Which passages are read for a text, and how each affects the prediction: `inference.inspection.Inspection`.

        text: a sentence with one blank, `___` of so many `pieces` (tokens) or `[what stands there]`, read by the
        parameters of pre-training; or a question, of which the `answer` is inspected (default: the likeliest). Raises
        UserError for a text that is too long, and for an answer that can be no span.
        """
        _texts([text], "text")
        _texts([] if answer is None else [answer], "answer")
        _at_least_one(pieces, "pieces")
        masked = parse(text)
        if masked is None:
            check_has_priors(self.trained)
            check_question(self.run, text)
            return inspect_question(self.trained, text, answer)
        if answer is not None:
            raise UserError("answer: goes with a question; write what stands in the blank into it: [the word]")
        masked_text(self.run, masked, pieces)
        check_has_priors(self._pretrained)
        return inspect_sentence(self._pretrained, text, masked, pieces)

    @cached_property
    def _pretrained(self) -> TrainedRun:
        """The run at the end of the task whose parameters fill blanks: the named one, else that of pre-training."""
        task = self._named or inspected_task(self.run.config, False)
        if task in (None, self.task):
            return dataclasses.replace(self.trained, params={**self.trained.params, **self._towers})
        return restore(self.run, task, for_answers=False)

    # --- measurements

    def evaluate(
        self, questions: str | Path | Sequence[Mapping[str, Any]] = "dev", *, bm25: bool = True
    ) -> dict[str, Any]:
        """All measures of the answers to questions: see `inference.predictions.evaluate`.

        questions: a split of the prepared folder, a file, or records {"question", "answers", "gold_passage_id"}; bm25:
        whether BM25's recall is measured beside, which holds the corpus in memory. Raises UserError for questions that
        cannot be read, and where there are none.
        """
        if isinstance(questions, str | Path):
            opened = open_run_for_inference(self.workdir, self._changes)
            asked = load_questions(opened, str(questions), need_right=True)
        elif isinstance(questions, Iterable):
            asked = checked_questions(questions)
        else:
            raise UserError(
                f"questions: takes a split of the prepared folder, a file or a list of records, not {questions!r}"
            )
        return evaluate(self.trained, asked, bm25)[0]


@partial(jax.jit, static_argnums=0)
def _query_vectors(model: Retriever, params: Params, query: jax.Array, lengths: jax.Array) -> jax.Array:
    """Vectors before the temperature: what other libraries know as such."""
    return model.query_vectors(params, query, lengths)


def _texts(given: Iterable[Any], name: str) -> list[str]:
    """Some texts as a list. Raises UserError for a single one, and for what is no text."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise UserError(f"{name}: takes a list of texts; put what you have into one")
    found = list(given)
    for number, text in enumerate(found):
        if not isinstance(text, str):
            raise UserError(f"{name}: number {number} is no text but a {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{name}: number {number} is not valid UTF-8; decode it as UTF-8") from None
    return found


def _at_least_one(given: Any, name: str) -> int:
    if not isinstance(given, int) or given < 1:
        raise UserError(f"{name}={given}: give a whole number from 1")
    return given
