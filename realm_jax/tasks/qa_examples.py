"""The questions of fine-tuning: with answers as strings, and each beside a positive passage where that is wanted.

Answers that are regular expressions (CuratedTREC): a span has to be compared with tokens on the devices, which no
regular expression can be. So before fine-tuning each such question searches with the parameters that fine-tuning starts
from, and what its patterns match in the passages found becomes its answers.

A positive passage (`qa.objective=positive`) holds an answer as a span. It is one of the gold document where that is
known, else the first that is retrieved.

Both depend on the parameters at the start and on the devices' rounding, so they are kept in TASK/answers.json and
TASK/positives.json: a run that is resumed trains on the same ones. Read `fine_tuning_examples`.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from realm_jax.data import layouts, patterns
from realm_jax.data.examples import (
    Example,
    Examples,
    Lengths,
    question_arrays,
    row_has_answer,
    truncated_body,
    truncated_title,
)
from realm_jax.data.questions import Question
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.errors import UserError
from realm_jax.eval.prediction import Evaluator
from realm_jax.models.inputs import DOCUMENT_SPECIALS
from realm_jax.models.layers import Params
from realm_jax.run import Run
from realm_jax.tasks.base import Embed, Task, load_or_create

logger = logging.getLogger(__name__)

ANSWERS, POSITIVES = "answers.json", "positives.json"
DEPTH = 20  # retrieved passages among which a positive one is looked for
NO_ROW = -1  # in place of a row: no passage is known to hold an answer


def fine_tuning_examples(task: Task, params: Params, embed: Embed) -> Examples:
    """The examples of fine-tuning from `params`; see `Task.examples`."""
    run: Run = task.run
    questions = training_questions(task, params, embed)
    if run.config.qa.objective == "positive":
        return examples_with_positives(task, params, embed, questions)
    return retrieved_examples(run, questions, run.config.qa.depth(run.context.rows))


def retrieved_examples(run: Run, questions: Sequence[Question], depth: int) -> Examples:
    """Questions with their answers, for a step that finds `depth` passages."""
    examples = question_examples(questions, run.sources.tokenizer, run.lengths)
    return with_search(run, examples, questions, depth, run.config.qa.search != "vectors")


def question_examples(questions: Sequence[Question], tokenizer: Tokenizer, lengths: Lengths) -> Examples:
    """Questions with their answers as tokens; an answer of more than `span_width` pieces can not be a span."""
    if not questions:
        raise UserError("no training questions in the prepared folder; give `realm prepare --questions train=FILE`")
    check_string_answers(questions)
    encoded = [encoding.ids for encoding in tokenizer.encode_batch([q.question for q in questions])]

    def make(index: int, rng: np.random.Generator) -> Example:
        return question_arrays(encoded[index], questions[index].answers, tokenizer, lengths)

    return Examples(len(questions), make)


def with_search(run: Run, examples: Examples, questions: Sequence[Question], depth: int, has_words: bool) -> Examples:
    """Examples of questions with BM25's list of `depth` passages where words take part in the search."""
    if not has_words:
        return examples
    hits = run.bm25_search([question.question for question in questions], depth)

    def make(index: int, rng: np.random.Generator) -> Example:
        return examples.make(index, rng) | hits.arrays(index)

    return examples._replace(make=make)


def check_string_answers(questions: Sequence[Question]) -> None:
    """Raise UserError if answers are regular expressions: there is no telling which pieces they are."""
    if patterns := sum(question.is_regex for question in questions):
        raise UserError(
            f"{patterns} of {len(questions)} training questions have regular expressions for answers, which cannot be "
            "learned from; prepare training questions with answers as strings"
        )


def retrieved_at_start(
    task: Task, params: Params, embed: Embed, questions: Sequence[Question], depth: int
) -> NDArray[np.int64]:
    """Rows of the best passages of questions, int64 [questions, depth], by the search of fine-tuning with the
    parameters that it starts from."""
    run: Run = task.run
    index = run.index(embed()) if task.needs_vectors() else run.index_without_vectors
    return Evaluator(run, questions, task.eval_search).retrieve(params, index, min(depth, run.context.rows))


# --- patterns for answers ---------------------------------------------------------------------------------------------


def training_questions(task: Task, params: Params, embed: Embed) -> list[Question]:
    """The training questions that have answers, as strings. params, embed: as of `Task.examples`.

    A question none of whose patterns matches keeps no answer, and teaches nothing. Raises UserError if that is so
    for all, or where the kept answers are of other questions.
    """
    run: Run = task.run
    questions = run.sources.answered("train")
    if without := len(run.sources.questions.get("train", [])) - len(questions):
        logger.info(
            "%s: %d training questions have a gold passage and no answers; the reader learns without them",
            task.name,
            without,
        )
    regular = [question for question in questions if question.is_regex]
    if not regular:
        return questions
    answers = load_or_create(
        task, ANSWERS, "answers", lambda: _regex_answers(task, params, embed, regular), len(regular)
    )
    strings = iter(answers)
    return [
        dataclasses.replace(question, answers=next(strings), fields=question.fields | {"match": "string"})
        if question.is_regex
        else question
        for question in questions
    ]


def _regex_answers(task: Task, params: Params, embed: Embed, questions: Sequence[Question]) -> list[list[str]]:
    run: Run = task.run
    store, depth = run.sources.passages, min(run.config.qa.beam, run.context.rows)
    found = retrieved_at_start(task, params, embed, questions, depth)
    tokenizer = run.sources.tokenizer
    answers = [
        matching_strings(question.answers, (store.text(row) for row in rows), tokenizer, run.lengths.span_width)
        for question, rows in zip(questions, found.tolist(), strict=True)
    ]
    without = sum(not strings for strings in answers)
    logger.info(
        "%s: %d questions have patterns for answers; in the first %d passages they match nothing for %d",
        task.name,
        len(questions),
        depth,
        without,
    )
    if without == len(questions):
        raise UserError(
            f"no pattern of {without} training questions matches in the {depth} passages that are found for it; train "
            "the retriever first, or set config.qa.beam higher"
        )
    return answers


def matching_strings(
    expressions: Iterable[str], texts: Iterable[str], tokenizer: Tokenizer, span_width: int
) -> list[str]:
    """What patterns match in texts and can be a span, the most frequent first; of equals the one found first.

    Two strings of the same tokens are one.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    spelt: dict[tuple[int, ...], str] = {}
    expressions = list(expressions)
    for text in texts:
        for expression in expressions:
            for start, end in patterns.find_all(expression, text):
                pieces = tuple(tokenizer.encode(text[start:end]).ids)
                if 0 < len(pieces) <= span_width:
                    counts[pieces] += 1
                    spelt.setdefault(pieces, text[start:end])
    return [spelt[pieces] for pieces, _ in counts.most_common()]


# --- positive passages ------------------------------------------------------------------------------------------------


def examples_with_positives(task: Task, params: Params, embed: Embed, questions: Sequence[Question]) -> Examples:
    """The examples of `qa.objective=positive`: the questions for which a passage is known that holds an answer.

    params, embed: as of `Task.examples`. Raises UserError if there is no such question, or where the kept rows are
    of other questions.
    """
    run: Run = task.run
    rows = load_or_create(
        task, POSITIVES, "rows", lambda: find_positives(task, params, embed, questions), len(questions)
    )
    known = [place for place, row in enumerate(rows) if row != NO_ROW]
    counts = len(known), len(questions)
    logger.info("%s: %d of %d training questions have a passage that holds an answer", task.name, *counts)
    if not known:
        raise UserError(
            f"no passage that holds an answer is known for any of {len(questions)} training questions: neither their "
            f"gold passages nor the first {DEPTH} that are retrieved have one; check questions and passages"
        )
    asked, positives = [questions[place] for place in known], [rows[place] for place in known]
    sources, qa = run.sources, run.config.qa
    examples = positive_examples(asked, positives, sources.passages, sources.tokenizer, run.lengths, qa.titles)
    return with_search(run, examples, asked, qa.depth(run.context.rows), qa.search == "hybrid")


def find_positives(task: Task, params: Params, embed: Embed, questions: Sequence[Question]) -> list[int]:
    """A row for each question, NONE where none holds an answer: of its gold document, else the first retrieved."""
    run: Run = task.run
    tokenizer, store, lengths = run.sources.tokenizer, run.sources.passages, run.lengths
    rows = [gold_row(store, question, tokenizer, lengths) for question in questions]
    missing = [place for place, row in enumerate(rows) if row == NO_ROW]
    if missing:
        asked = [questions[place] for place in missing]
        retrieved = retrieved_at_start(task, params, embed, asked, DEPTH)
        for place, found in zip(missing, retrieved.tolist(), strict=True):
            rows[place] = first_row_with_answer(store, questions[place], found, tokenizer, lengths)
    return rows


def gold_row(store: PassageStore, question: Question, tokenizer: Tokenizer, lengths: Lengths) -> int:
    """The row of a question's gold documents that holds an answer; NONE where none does or there is no gold document.

    Of several the one with the most pieces of the question, then the first.
    """
    if not question.gold:
        return NO_ROW
    answers = answer_pieces(question, tokenizer, lengths)
    gold = chain.from_iterable(store.rows_of(name) for name in question.gold)
    rows = [row for row in gold if row_has_answer(store, row, answers, lengths)]
    asked = set(tokenizer.encode(question.question).ids)
    shared = [len(asked.intersection(store.body_tokens(row).tolist())) for row in rows]
    return rows[int(np.argmax(shared))] if rows else NO_ROW


def first_row_with_answer(
    store: PassageStore, question: Question, rows: Sequence[int], tokenizer: Tokenizer, lengths: Lengths
) -> int:
    """The first of some rows that holds an answer; NONE where none does."""
    answers = answer_pieces(question, tokenizer, lengths)
    return next((row for row in rows if row >= 0 and row_has_answer(store, row, answers, lengths)), NO_ROW)


def answer_pieces(question: Question, tokenizer: Tokenizer, lengths: Lengths) -> list[NDArray]:
    """The answers that can be spans, as the reader is trained with them."""
    arrays = question_arrays([], question.answers, tokenizer, lengths)
    return [
        pieces[:size].astype(tokenizer.dtype)
        for pieces, size in zip(arrays["answers"], arrays["answer_lengths"], strict=True)
        if size
    ]


def positive_examples(
    questions: Sequence[Question],
    rows: Sequence[int],
    store: PassageStore,
    tokenizer: Tokenizer,
    lengths: Lengths,
    titles: bool,
) -> Examples:
    """Questions with their answers, and each joined with its passage; batched by the length of that.

    rows: the passage of each. Arrays: those of `question_arrays`, and `joint` [query + document − 1 or 2], its
    places in use `joint_length`, and `body_start`; the layout is that of `realm_jax.models.inputs.reader_inputs`.
    """
    encoded = [encoding.ids for encoding in tokenizer.encode_batch([question.question for question in questions])]
    places = lengths.query + lengths.document - (1 if titles else DOCUMENT_SPECIALS)

    def used(number: int) -> int:
        row = rows[number]
        title = len(truncated_title(store, row, lengths)) + 1 if titles else 0
        query = min(len(encoded[number]), lengths.query - 2) + 2
        return query + title + len(truncated_body(store, row, lengths)) + 1

    def make(number: int, rng: np.random.Generator) -> Example:
        title, body = truncated_title(store, rows[number], lengths), truncated_body(store, rows[number], lengths)
        special, most = tokenizer.special, lengths.query - 2
        laid = layouts.joint(encoded[number], body, places, special, most, title if titles else None)
        return question_arrays(encoded[number], questions[number].answers, tokenizer, lengths) | {
            "joint": laid.ids.astype(tokenizer.dtype),
            "joint_length": np.int32(laid.used),
            "body_start": np.int32(laid.used - len(body) - 1),
        }

    return Examples(len(questions), make, np.array([used(number) for number in range(len(questions))], np.int64))
