"""Regular expressions as a training signal (CuratedTREC): the strings that they match where their question leads.

A span has to be compared with word pieces on the devices, which no regular expression can be. So before fine-tuning
each question with patterns searches with the parameters that fine-tuning starts from, and what its patterns match in
the passages found becomes its answers. They are kept in TASK/answers.json, since a run that goes on must have the same.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realm_jax.corpus.jsonl import Question
from realm_jax.errors import UserError
from realm_jax.evaluation.predict import Evaluator
from realm_jax.models.realm import Params
from realm_jax.processes import is_process_0, run_on_process_0
from realm_jax.run import Run
from realm_jax.storage import make_folder, read_json, write_json_atomic
from realm_jax.text import patterns
from realm_jax.text.wordpiece import WordPiece
from realm_jax.training.embedding import start_vectors

logger = logging.getLogger(__name__)

ANSWERS = "answers.json"


def training_questions(run: Run, params: Params) -> list[Question]:
    """The training questions that have answers, as strings. params: what fine-tuning starts from.

    A question none of whose patterns matches keeps no answer, and teaches nothing. Raises UserError where that is so
    for all, or where the kept answers are of other questions.
    """
    questions = run.sources.answered("train")
    if without := len(run.sources.questions.get("train", [])) - len(questions):
        logger.info(
            "qa: %d training questions have a gold passage and no answers; the reader learns without them", without
        )
    regular = [question for question in questions if question.is_regex]
    if not regular:
        return questions
    path = run.workdir / "qa" / ANSWERS
    answers = made_once(path, "answers", len(regular), lambda: _matched(run, params, regular))
    strings = iter(answers)
    return [
        dataclasses.replace(question, answers=next(strings), fields=question.fields | {"match": "string"})
        if question.is_regex
        else question
        for question in questions
    ]


def made_once(path: Path, name: str, count: int, make: Callable[[], list[Any]]) -> list[Any]:
    """A list with an entry for each of `count` questions, made at the first start and kept in a file of the run folder.

    name: what the entries are. Raises UserError where the kept list is of another number of questions.
    """
    if run_on_process_0(lambda: int(path.is_file())):
        found: list[Any] = read_json(path)[name]
    else:
        found = make()
        if is_process_0():
            make_folder(path.parent, "--workdir")
            write_json_atomic(path, {name: found})
    if len(found) != count:
        raise UserError(f"{path}: has {name} of {len(found)} questions, not {count}; remove it")
    return found


def _matched(run: Run, params: Params, questions: Sequence[Question]) -> list[list[str]]:
    store, depth = run.sources.passages, min(run.config.retrieval.qa_beam, run.setting.rows)
    found = retrieved_at_start(run, params, questions, depth)
    answers = [
        strings_of(question.answers, (store.text(row) for row in rows), run.sources.wordpiece, run.lengths.span_width)
        for question, rows in zip(questions, found.tolist(), strict=True)
    ]
    without = sum(not strings for strings in answers)
    logger.info(
        "qa: %d questions have patterns for answers; in the first %d passages they match nothing for %d",
        len(questions),
        depth,
        without,
    )
    if without == len(questions):
        raise UserError(
            f"no pattern of {without} training questions matches in the {depth} passages that are found for it; train "
            "the retriever first, or set config.retrieval.qa_beam higher"
        )
    return answers


def retrieved_at_start(run: Run, params: Params, questions: Sequence[Question], depth: int) -> NDArray[np.int64]:
    """Rows of the best passages of questions, int64 [questions, depth], by the search of fine-tuning with the
    parameters that it starts from."""
    index = run.index(start_vectors(run, "qa", params)) if run.needs_vectors("qa") else run.bare_index
    return Evaluator(run, questions, run.measured_by("qa")).retrieve(params, index, min(depth, run.setting.rows))


def strings_of(expressions: Iterable[str], texts: Iterable[str], wordpiece: WordPiece, span_width: int) -> list[str]:
    """What patterns match in texts and can be a span, the most frequent first; of equals the one found first.

    Two strings of the same word pieces are one.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    spelt: dict[tuple[int, ...], str] = {}
    expressions = list(expressions)
    for text in texts:
        for expression in expressions:
            for start, end in patterns.every(expression, text):
                pieces = tuple(wordpiece.encode(text[start:end]).ids)
                if 0 < len(pieces) <= span_width:
                    counts[pieces] += 1
                    spelt.setdefault(pieces, text[start:end])
    return [spelt[pieces] for pieces, _ in counts.most_common()]
