"""The positive passage of each training question, found once before fine-tuning and kept for the run.

What is retrieved depends on the parameters that fine-tuning starts from and on the devices' rounding, so the rows are
kept in TASK/positives.json: a run that goes on trains on the same ones. Read next: `realm_jax/data/positives.py`.
"""

import logging
from collections.abc import Sequence

from realm_jax.corpus.jsonl import Question
from realm_jax.data.examples import Examples, Found, with_found
from realm_jax.data.positives import NONE, first_row, gold_row, positive_examples
from realm_jax.errors import UserError
from realm_jax.index.candidates import question_depth
from realm_jax.jobs.matched_answers import made_once, retrieved_at_start
from realm_jax.models.realm import Params
from realm_jax.run import Run

logger = logging.getLogger(__name__)

POSITIVES = "positives.json"
DEPTH = 20  # retrieved passages among which a positive one is looked for


def examples_with_positives(run: Run, params: Params, questions: Sequence[Question]) -> Examples:
    """The examples of `objective.qa=positive`: the questions for which a passage is known that holds an answer.

    params: what fine-tuning starts from. Raises UserError where there is no such question, or where the kept rows are
    of other questions.
    """
    path = run.workdir / "qa" / POSITIVES
    rows = made_once(path, "rows", len(questions), lambda: find_positives(run, params, questions))
    known = [place for place, row in enumerate(rows) if row != NONE]
    logger.info("qa: %d of %d training questions have a passage that holds an answer", len(known), len(questions))
    if not known:
        raise UserError(
            f"no passage that holds an answer is known for any of {len(questions)} training questions: neither their "
            f"gold passages nor the first {DEPTH} that are retrieved have one; check questions and passages"
        )
    asked, positives = [questions[place] for place in known], [rows[place] for place in known]
    sources, titles = run.sources, run.setting.qa_titles
    examples = positive_examples(asked, positives, sources.passages, sources.wordpiece, run.lengths, titles)
    return with_found(examples, beam_by_words(run, asked)) if run.setting.qa_search == "hybrid" else examples


def beam_by_words(run: Run, questions: Sequence[Question]) -> Found:
    """BM25's list of each question of fine-tuning."""
    return run.found_by_words([question.question for question in questions], question_depth(run.setting))


def find_positives(run: Run, params: Params, questions: Sequence[Question]) -> list[int]:
    """A row for each question, NONE where none holds an answer: of its gold document, else the first retrieved."""
    store, wordpiece, lengths = run.sources.passages, run.sources.wordpiece, run.lengths
    rows = [gold_row(store, question, wordpiece, lengths) for question in questions]
    missing = [place for place, row in enumerate(rows) if row == NONE]
    if missing:
        asked = [questions[place] for place in missing]
        for place, found in zip(missing, retrieved_at_start(run, params, asked, DEPTH).tolist(), strict=True):
            rows[place] = first_row(store, questions[place], found, wordpiece, lengths)
    return rows
