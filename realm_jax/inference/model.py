"""An exported model, opened to answer, search, embed, explain and evaluate. `realm_jax.Model` is this class."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.config import RERANKERS, SEARCHES
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

Reply = TypeVar("Reply", Answer, Nearest)
Texts = list[str] | tuple[str, ...]  # a string is a Sequence[str] as well
BATCH = 32  # default texts of a batch


class Model:
    """A run of `realm index`, `realm adapt`, `realm train` or `realm quickstart`, opened for inference.

    It does not change the run directory, so a run can answer while it trains. It reads the model that the last
    finished task exported, and keeps it. Use an object in one thread at a time.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        task: str | None = None,
        search: str | None = None,
        rerank: str | None = None,
        generation: str | None = None,
        reader: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Open a run.

        Args:
            workdir: the run directory.
            task: task that trained the parameters (default: the last finished task; for blanks, pre-training).
            search: 'vectors', 'bm25' or 'hybrid' (default: the config's qa.search).
            rerank: 'tokens', 'cross-encoder' or 'none' (default: the config's answering.rerank).
            generation: name of an index version, or 'newest'; it searches but does not answer.
            reader: model with a question-answering head that reads the passages in place of the run's reader: a folder,
                'hf:NAME' or 'py:NAME' (default: the config's answering.reader).
            config: runtime and evaluation keys to change, such as {"answering.read": 50, "data.path": "moved/data"}.

        Raises:
            UserError: there is no run, exported model, task, cross-encoder, reader or generation of this name, or the
                prepared folder is missing or another one.
        """
        for name, value, choices in (("search", search, SEARCHES), ("rerank", rerank, RERANKERS)):
            if value not in (None, *choices):
                raise UserError(f"{name}={value}: choose among {', '.join(choices)}")
        if generation is not None and (task, search, rerank, reader) != (None, None, None, None):
            raise UserError(
                f"generation={generation}: cannot be combined with task, search, rerank or reader; leave them out"
            )
        if is_remote(str(workdir)):
            raise UserError(f"workdir={workdir}: a model is opened from a folder; copy the run to a disk")
        if not isinstance(config, Mapping | None):
            raise UserError(f"config={config!r}: takes the keys to change as a dict, such as {{'answering.read': 50}}")
        self.workdir = Path(workdir)
        self._changes = run_changes([f"--config.{key}={value}" for key, value in (config or {}).items()])
        if reader is not None:
            self._changes["answering.reader"] = str(reader)
        opened = open_run_for_inference(self.workdir, self._changes, questions=False)
        if generation is None:
            self.trained = restore(opened, task, search=search, rerank=rerank, warn=False)
        else:
            self.trained = open_generation(opened, generation)
        self.generation, self._named = generation, task

    @property
    def run(self) -> Run:
        """Return the fixed parts of the run: its config, corpus, tokenizer and networks."""
        return self.trained.run

    @property
    def task(self) -> str:
        """Return the task that trained the parameters."""
        return self.trained.task

    @property
    def step(self) -> int:
        """Return the training step of the parameters in that task."""
        return self.trained.step

    @property
    def passages(self) -> int:
        """Return the number of passages in the corpus."""
        return int(self.run.context.rows)

    @property
    def vector_size(self) -> int:
        """Return the number of features of a vector."""
        return self.run.model.vector_size

    def __repr__(self) -> str:
        return f"Model({str(self.workdir)!r}: task {self.task} at step {self.step}, {self.passages:,} passages)"

    # --- questions

    @overload
    def ask(self, question: str, *, top: int | None = None, batch_size: int = BATCH) -> Answer: ...
    @overload
    def ask(self, question: Texts, *, top: int | None = None, batch_size: int = BATCH) -> list[Answer]: ...

    def ask(self, question: str | Texts, *, top: int | None = None, batch_size: int = BATCH) -> Answer | list[Answer]:
        """Answer a question or a list of questions.

        Args:
            question: one, or a list.
            top: passages in each answer (default: all that were read).
            batch_size: questions of a batch.

        Returns:
            `inference.answers.Answer`, or a list of them.

        Raises:
            UserError: a question is empty or too long, or the run answers without passages or was opened at a
                generation.
        """
        if self.generation is not None:
            raise UserError(
                "this model was opened with a generation, so it only searches; use search, or open it without"
            )
        check_reads_passages(self.trained)
        top = None if top is None else _checked_positive(top, "top")
        return self._each(question, batch_size, lambda questions, size: answers(self.trained, questions, top, size))

    @overload
    def search(self, question: str, *, top: int = NEAREST, batch_size: int = BATCH) -> Nearest: ...
    @overload
    def search(self, question: Texts, *, top: int = NEAREST, batch_size: int = BATCH) -> list[Nearest]: ...

    def search(self, question: str | Texts, *, top: int = NEAREST, batch_size: int = BATCH) -> Nearest | list[Nearest]:
        """Find the nearest passages of a question or of each question of a list.

        Args:
            question: one, or a list.
            top: passages of each question; each new value compiles a program.
            batch_size: questions of a batch; each new value compiles a program.

        Returns:
            `inference.answers.Nearest`, or a list of them.

        Raises:
            UserError: a question is empty or too long, or the run answers without passages.
        """
        check_reads_passages(self.trained)
        top = _checked_positive(top, "top")
        return self._each(question, batch_size, lambda questions, size: nearest(self.trained, questions, top, size))

    def _each(
        self, question: str | Texts, batch_size: int, reply_to: Callable[[list[str], int], list[Reply]]
    ) -> Reply | list[Reply]:
        """Check questions and return the reply to each; the reply itself for a single question."""
        questions = [question] if isinstance(question, str) else _checked_texts(question, "questions")
        checked = [check_question(self.run, text, self.trained.pipeline.search) for text in questions]
        # Padded to a power of two, so that a few programs serve any number of questions.
        size = min(_checked_positive(batch_size, "batch_size"), 1 << (max(len(checked), 1) - 1).bit_length())
        replies = reply_to(checked, size) if checked else []
        return replies[0] if isinstance(question, str) else replies

    # --- vectors

    def encode(
        self,
        texts: Sequence[str],
        kind: Literal["query", "document"] = "query",
        *,
        titles: Sequence[str] | None = None,
        batch_size: int = BATCH,
    ) -> NDArray[np.float32]:
        """Return the vectors of texts, which are truncated to the lengths of the run.

        A document's vector equals its vector in the index. The score of a search is its inner product with a query's
        vector, divided by the temperature of the run (1 by default).

        Args:
            texts: queries or documents.
            kind: 'query' for the query encoder, 'document' for the passage encoder.
            titles: titles of documents (default: empty).
            batch_size: queries of a batch; documents are embedded in the batches of the corpus.

        Returns:
            float32 [texts, vector_size].
        """
        checked, size = _checked_texts(texts, "texts"), _checked_positive(batch_size, "batch_size")
        run, tokenizer = self.run, self.run.sources.tokenizer
        vectors = [np.empty((0, self.vector_size), np.float32)]
        if kind == "query":
            if titles is not None:
                raise UserError("titles: apply only to kind='document'; leave them out")
            encoder = {name: self.trained.params[name] for name in run.model.embedder_names[:1]}
            size += -size % run.mesh.size
            for start in range(0, len(checked), size):
                encoded = tokenizer.encode_batch(checked[start : start + size])
                rows = [query_arrays(np.asarray(text.ids, np.int32), run.lengths.query, tokenizer) for text in encoded]
                batch = {name: pad_rows(np.stack([row[name] for row in rows]), size) for name in rows[0]}
                placed = put_batch(run.mesh, batch)
                batch_vectors = _query_vectors(run.model, encoder, placed["query"], placed["query_length"])
                vectors.append(to_host(batch_vectors)[: len(rows)])  # [rows, vector_size]
            return np.concatenate(vectors)
        if kind != "document":
            raise UserError(f"kind={kind}: choose 'query' or 'document'")
        heads = [""] * len(checked) if titles is None else _checked_texts(titles, "titles")
        if len(heads) != len(checked):
            raise UserError(f"{len(checked)} texts have {len(heads)} titles; give one for each text, or none")
        if not checked:
            return vectors[0]
        length, of_passages = run.config.data.document_length, tokenizer.placed(behind_space=True)
        pairs = map(of_passages.encode_batch, (heads, checked))
        rows = [
            document_arrays(np.asarray(title.ids), np.asarray(body.ids), length, tokenizer)
            for title, body in zip(*pairs, strict=True)
        ]
        ids, *lengths = (
            np.stack([row[name] for row in rows]) for name in ("document", "document_length", "document_title_length")
        )
        return run.embed(self._encoders, rows=CorpusRows(ids, *(array.astype(np.uint16) for array in lengths)))

    @cached_property
    def _encoders(self) -> Params:
        """Return both encoders; answering needs only the query encoder."""
        return encoder_params(self.trained)

    # --- explanations

    def inspect(self, text: str, *, answer: str | None = None, pieces: int = 1) -> Inspection:
        """Inspect which passages are read for a text, and how each affects the prediction.

        Args:
            text: a question, or a sentence with one blank, `___` or `[the words]`. Blanks are filled with the
                parameters of pre-training.
            answer: to inspect for a question (default: the most probable).
            pieces: tokens of a blank `___`.

        Returns:
            `inference.inspection.Inspection`.

        Raises:
            UserError: the text is too long, or the answer cannot be a span.
        """
        _checked_texts([text], "text")
        _checked_texts([] if answer is None else [answer], "answer")
        _checked_positive(pieces, "pieces")
        masked = parse(text)
        if masked is None:
            check_has_priors(self.trained)
            check_question(self.run, text)
            return inspect_question(self.trained, text, answer)
        if answer is not None:
            raise UserError(
                "answer: applies to questions only; write the answer of a sentence into its blank: [the word]"
            )
        masked_text(self.run, masked, pieces)
        check_has_priors(self._pretrained)
        return inspect_sentence(self._pretrained, text, masked, pieces)

    @cached_property
    def _pretrained(self) -> TrainedRun:
        """Return the run with the parameters that fill blanks: those of the named task, else of pre-training."""
        task = self._named or inspected_task(self.run.config, False)
        if task in (None, self.task):
            return dataclasses.replace(self.trained, params={**self.trained.params, **self._encoders})
        return restore(self.run, task, for_answers=False)

    # --- measurements

    def evaluate(
        self, questions: str | Path | Sequence[Mapping[str, Any]] = "dev", *, bm25: bool = True
    ) -> dict[str, Any]:
        """Answer questions and return all metrics.

        Args:
            questions: a split of the prepared folder, a file, or records {"question", "answers", "gold_passage_id"}.
            bm25: measure BM25's recall too, which holds the corpus in memory.

        Returns:
            See `inference.predictions.evaluate`.

        Raises:
            UserError: the questions cannot be read, or there are none.
        """
        if isinstance(questions, str | Path):
            opened = open_run_for_inference(self.workdir, self._changes)
            loaded = load_questions(opened, str(questions), need_right=True)
        elif isinstance(questions, Iterable):
            loaded = checked_questions(questions)
        else:
            raise UserError(
                f"questions: takes a split of the prepared folder, a file or a list of records, not {questions!r}"
            )
        return evaluate(self.trained, loaded, bm25)[0]


@partial(jax.jit, static_argnums=0)
def _query_vectors(model: Retriever, params: Params, query: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return vectors before the temperature, as other libraries do."""
    return model.query_vectors(params, query, lengths)


def _checked_texts(values: Iterable[Any], name: str) -> list[str]:
    """Return texts as a list. Raises UserError for a single text, and for a value that is no text."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise UserError(f"{name}: takes a list of texts; put the value into a list")
    texts = list(values)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise UserError(f"{name}: number {number} is a {type(text).__name__}; give a text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{name}: number {number} is not valid UTF-8; decode it as UTF-8") from None
    return texts


def _checked_positive(value: Any, name: str) -> int:
    if not isinstance(value, int) or value < 1:
        raise UserError(f"{name}={value}: give a whole number from 1")
    return value
