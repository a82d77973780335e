"""The questions of fine-tuning, with answers as strings, and with a positive passage each if `qa.objective=positive`.

Answers may be regular expressions (CuratedTREC), but a step compares spans with tokens. So before fine-tuning we
retrieve passages for each such question, with the parameters that fine-tuning starts from, and the strings that its
patterns match in them become its answers.

A positive passage has an answer as a span. It belongs to the gold document if that is known; otherwise it is the first
retrieved one.

Both depend on the parameters at the start and on the devices' rounding, so we store them in TASK/answers.json and
TASK/positives.json, and a resumed run trains on the same ones. Read `fine_tuning_examples`.
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
from realm_jax.forward import SearchPipeline
from realm_jax.models.inputs import DOCUMENT_SPECIALS
from realm_jax.models.layers import Params
from realm_jax.run import Run
from realm_jax.tasks.base import EmbedCorpus, Task, load_or_create

logger = logging.getLogger(__name__)

ANSWERS, POSITIVES = "answers.json", "positives.json"
DEPTH = 20  # retrieved passages that are searched for a positive one
NO_ROW = -1  # instead of a row: no passage is known that has an answer


def fine_tuning_examples(task: Task, params: Params, embed: EmbedCorpus) -> Examples:
    """Return the examples of fine-tuning.

    Args:
        task: the task that trains on the questions.
        params: parameters that it starts from.
        embed: embeds the corpus by these, [rows, width].

    Raises:
        UserError: no question can be learned from.
    """
    run = task.run
    qa, questions = run.config.qa, training_questions(task, params, embed)
    if qa.objective == "positive":
        return examples_with_positives(task, params, embed, questions)
    return retrieved_examples(run, questions, qa.depth(run.context.rows))


def retrieved_examples(run: Run, questions: Sequence[Question], depth: int) -> Examples:
    """Return the examples of a step that retrieves passages itself: questions with their answers.

    Args:
        run: the run.
        questions: with answers as strings.
        depth: passages of BM25's list, if it is used.
    """
    examples = question_examples(questions, run.sources.tokenizer, run.lengths)
    return with_search(run, examples, questions, depth, run.config.qa.search != "vectors")


def question_examples(questions: Sequence[Question], tokenizer: Tokenizer, lengths: Lengths) -> Examples:
    """Return examples: questions with their answers as tokens, without answers of more than `span_width` tokens.

    Args:
        questions: with answers.
        tokenizer: the run's.
        lengths: sizes of the arrays.

    Raises:
        UserError: there are no questions, or answers are regular expressions.
    """
    if not questions:
        raise UserError("no training questions in the prepared folder; give `realm prepare --questions train=FILE`")
    check_string_answers(questions)
    encoded = [encoding.ids for encoding in tokenizer.encode_batch([q.question for q in questions])]

    def make(index: int, rng: np.random.Generator) -> Example:
        return question_arrays(encoded[index], questions[index].answers, tokenizer, lengths)

    return Examples(len(questions), make)


def with_search(run: Run, examples: Examples, questions: Sequence[Question], depth: int, uses_bm25: bool) -> Examples:
    """Add BM25's list of passages to the examples of questions.

    Args:
        run: whose passages are searched.
        examples: one for each question.
        questions: the queries.
        depth: passages of the list.
        uses_bm25: False to return the examples unchanged.
    """
    if not uses_bm25:
        return examples
    hits = run.bm25_search([question.question for question in questions], depth)

    def make(index: int, rng: np.random.Generator) -> Example:
        return examples.make(index, rng) | hits.arrays(index)

    return examples._replace(make=make)


def check_string_answers(questions: Sequence[Question]) -> None:
    """Raise UserError if answers are regular expressions, which have no tokens."""
    if patterns := sum(question.is_regex for question in questions):
        raise UserError(
            f"{patterns} of {len(questions)} training questions have regular expressions for answers, which cannot be "
            "learned from; prepare training questions with answers as strings"
        )


def retrieved_at_start(
    task: Task, params: Params, embed: EmbedCorpus, questions: Sequence[Question], depth: int
) -> NDArray[np.int64]:
    """Retrieve passages of questions by the search of fine-tuning, with the parameters that it starts from.

    Args:
        task: the task that trains on the questions.
        params: parameters that it starts from.
        embed: embeds the corpus by these, [rows, width].
        questions: the queries.
        depth: passages per question, at most all.

    Returns:
        Rows of the best passages, int64 [questions, depth].
    """
    run, qa = task.run, task.run.config.qa
    index = run.index_without_vectors if qa.uses_bm25_only else run.index(embed())
    return Evaluator(run, questions, SearchPipeline(qa.search)).retrieve(params, index, min(depth, run.context.rows))


# --- Patterns for answers ---------------------------------------------------------------------------------------------


def training_questions(task: Task, params: Params, embed: EmbedCorpus) -> list[Question]:
    """Return the training questions that have answers, as strings.

    If none of a question's patterns matches, it has no answer and nothing is learned from it.

    Args:
        task: the task that trains on the questions.
        params: parameters that it starts from.
        embed: embeds the corpus by these, [rows, width].

    Raises:
        UserError: no pattern matches, or the stored answers are of other questions.
    """
    run = task.run
    questions = run.sources.answered("train")
    if without := len(run.sources.questions.get("train", [])) - len(questions):
        logger.info(
            "%s: %d training questions have a gold passage and no answers; the reader learns without them",
            task.name,
            without,
        )
    regex_questions = [question for question in questions if question.is_regex]
    if not regex_questions:
        return questions
    answers = load_or_create(
        task, ANSWERS, "answers", lambda: _regex_answers(task, params, embed, regex_questions), len(regex_questions)
    )
    strings = iter(answers)
    return [
        dataclasses.replace(question, answers=next(strings), fields=question.fields | {"match": "string"})
        if question.is_regex
        else question
        for question in questions
    ]


def _regex_answers(task: Task, params: Params, embed: EmbedCorpus, questions: Sequence[Question]) -> list[list[str]]:
    """Return the strings that the patterns of each question match in the passages that are retrieved for it."""
    run = task.run
    store, depth = run.sources.passages, min(run.config.qa.beam, run.context.rows)
    retrieved = retrieved_at_start(task, params, embed, questions, depth)  # [questions, depth]
    tokenizer = run.sources.tokenizer
    answers = [
        matching_strings(question.answers, (store.text(row) for row in rows), tokenizer, run.lengths.span_width)
        for question, rows in zip(questions, retrieved.tolist(), strict=True)
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
            f"no pattern of {without} training questions matches in the {depth} passages that are retrieved for it; "
            "train the retriever first, or set config.qa.beam higher"
        )
    return answers


def matching_strings(
    expressions: Iterable[str], texts: Iterable[str], tokenizer: Tokenizer, span_width: int
) -> list[str]:
    """Return the strings that patterns match in texts and that can be spans, the most frequent first.

    Strings of the same tokens count as one, and ties go to the earlier one.

    Args:
        expressions: the patterns.
        texts: texts to search.
        tokenizer: the run's.
        span_width: maximum tokens of a span.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    strings: dict[tuple[int, ...], str] = {}  # token ids → how they are spelled
    expressions = list(expressions)
    for text in texts:
        for expression in expressions:
            for start, end in patterns.find_all(expression, text):
                token_ids = tuple(tokenizer.encode(text[start:end]).ids)
                if 0 < len(token_ids) <= span_width:
                    counts[token_ids] += 1
                    strings.setdefault(token_ids, text[start:end])
    return [strings[token_ids] for token_ids, _ in counts.most_common()]


# --- Positive passages ------------------------------------------------------------------------------------------------


def examples_with_positives(task: Task, params: Params, embed: EmbedCorpus, questions: Sequence[Question]) -> Examples:
    """Return the examples of `qa.objective=positive`: the questions that have a positive passage.

    Args:
        task: the task that trains on the questions.
        params: parameters that it starts from.
        embed: embeds the corpus by these, [rows, width].
        questions: with answers as strings.

    Raises:
        UserError: there is no such question, or the stored passages are of other questions.
    """
    run = task.run
    rows = load_or_create(
        task, POSITIVES, "rows", lambda: find_positives(task, params, embed, questions), len(questions)
    )
    known = [number for number, row in enumerate(rows) if row != NO_ROW]  # of the questions
    counts = len(known), len(questions)
    logger.info("%s: %d of %d training questions have a passage with an answer", task.name, *counts)
    if not known:
        raise UserError(
            f"no passage with an answer is known for any of {len(questions)} training questions: neither their gold "
            f"passages nor the first {DEPTH} that are retrieved have one; check questions and passages"
        )
    questions, positives = [questions[number] for number in known], [rows[number] for number in known]
    sources, qa = run.sources, run.config.qa
    examples = positive_examples(questions, positives, sources.passages, sources.tokenizer, run.lengths, qa.titles)
    return with_search(run, examples, questions, qa.depth(run.context.rows), qa.search == "hybrid")


def find_positives(task: Task, params: Params, embed: EmbedCorpus, questions: Sequence[Question]) -> list[int]:
    """Return the positive passage of each question: one of its gold document, else the first retrieved with an answer.

    Args:
        task: the task that trains on the questions.
        params: parameters that it starts from.
        embed: embeds the corpus by these, [rows, width].
        questions: with answers as strings.

    Returns:
        A row for each question; NO_ROW if none has an answer.
    """
    run = task.run
    tokenizer, store, lengths = run.sources.tokenizer, run.sources.passages, run.lengths
    rows = [gold_row(store, question, tokenizer, lengths) for question in questions]
    missing = [number for number, row in enumerate(rows) if row == NO_ROW]
    if missing:
        retrieved = retrieved_at_start(task, params, embed, [questions[number] for number in missing], DEPTH)
        for number, candidates in zip(missing, retrieved.tolist(), strict=True):
            rows[number] = first_row_with_answer(store, questions[number], candidates, tokenizer, lengths)
    return rows


def gold_row(store: PassageStore, question: Question, tokenizer: Tokenizer, lengths: Lengths) -> int:
    """Return the row of a question's gold documents that has an answer.

    Of several rows it is the one with the most tokens of the question; ties go to the first.

    Args:
        store: the corpus.
        question: with answers as strings.
        tokenizer: tokenizer of the corpus.
        lengths: tokens of a passage that are read.

    Returns:
        The row; NO_ROW if none has an answer, or there is no gold document.
    """
    if not question.gold:
        return NO_ROW
    answers = answer_ids(question, tokenizer, lengths)
    gold = chain.from_iterable(store.rows_of(name) for name in question.gold)
    rows = [row for row in gold if row_has_answer(store, row, answers, lengths)]
    question_ids = set(tokenizer.encode(question.question).ids)
    shared = [len(question_ids.intersection(store.body_tokens(row).tolist())) for row in rows]
    return rows[int(np.argmax(shared))] if rows else NO_ROW


def first_row_with_answer(
    store: PassageStore, question: Question, rows: Sequence[int], tokenizer: Tokenizer, lengths: Lengths
) -> int:
    """Return the first row that has an answer of a question; NO_ROW if none has.

    Args:
        store: the corpus.
        question: with answers as strings.
        rows: rows in order; negative ones are skipped.
        tokenizer: tokenizer of the corpus.
        lengths: tokens of a passage that are read.
    """
    answers = answer_ids(question, tokenizer, lengths)
    return next((row for row in rows if row >= 0 and row_has_answer(store, row, answers, lengths)), NO_ROW)


def answer_ids(question: Question, tokenizer: Tokenizer, lengths: Lengths) -> list[NDArray]:
    """Return the tokens of each answer that can be a span, as the reader is trained with them.

    Args:
        question: with answers as strings.
        tokenizer: the run's.
        lengths: sizes of the arrays.
    """
    arrays = question_arrays([], question.answers, tokenizer, lengths)
    return [
        token_ids[:size].astype(tokenizer.dtype)
        for token_ids, size in zip(arrays["answers"], arrays["answer_lengths"], strict=True)
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
    """Return examples: questions with their answers, each joined with its passage, and batched by the joint length.

    The arrays are those of `question_arrays`, and `joint` [query + document − 1 or 2], its number of tokens
    `joint_length`, and `body_start`; the layout is that of `models/inputs.py: reader_inputs`.

    Args:
        questions: with answers as strings.
        rows: row of the passage of each question.
        store: the corpus.
        tokenizer: tokenizer of the corpus.
        lengths: sizes of the arrays.
        titles: True if passages are read with their titles.
    """
    encoded = [encoding.ids for encoding in tokenizer.encode_batch([question.question for question in questions])]
    padded_length = lengths.query + lengths.document - (1 if titles else DOCUMENT_SPECIALS)

    joint_lengths = np.zeros(len(questions), np.int64)
    for number, row in enumerate(rows):
        title = len(truncated_title(store, row, lengths)) + 1 if titles else 0
        query = min(len(encoded[number]), lengths.query - 2) + 2
        joint_lengths[number] = query + title + len(truncated_body(store, row, lengths)) + 1

    def make(number: int, rng: np.random.Generator) -> Example:
        title, body = truncated_title(store, rows[number], lengths), truncated_body(store, rows[number], lengths)
        special, max_tokens = tokenizer.special, lengths.query - 2
        layout = layouts.joint(encoded[number], body, padded_length, special, max_tokens, title if titles else None)
        return question_arrays(encoded[number], questions[number].answers, tokenizer, lengths) | {
            "joint": layout.ids.astype(tokenizer.dtype),
            "joint_length": np.int32(layout.used),
            "body_start": np.int32(layout.used - len(body) - 1),
        }

    return Examples(len(questions), make, joint_lengths)
