"""Controls: trainings that should not reach what REALM reaches, from the same start and of the same length.

* `no_retriever_gradient`: the REALM task with the retriever held still, so that its gradient changes nothing.
* `more_ict`: as many more steps of the inverse cloze task as REALM has.
* `closed_book`: a reader of the same size that fills in answers from the question alone, by masked words.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from realm_jax.config import task_names
from realm_jax.corpus.jsonl import Question
from realm_jax.data.closed_book import closed_book_answer, closed_book_examples, closed_book_query
from realm_jax.data.examples import document_arrays
from realm_jax.evaluation.answers import exact_match
from realm_jax.evaluation.measures import settings_file, write_record
from realm_jax.evaluation.predict import Evaluator
from realm_jax.index.candidates import Index
from realm_jax.jobs.opening import borrow_params
from realm_jax.jobs.predict import known_of
from realm_jax.mesh import to_host
from realm_jax.models.inputs import Documents, join
from realm_jax.models.realm import Params, flatten_joint
from realm_jax.processes import is_first, told
from realm_jax.run import Run, put_batch
from realm_jax.storage import write_atomic, write_json_atomic
from realm_jax.training.loop import train_task
from realm_jax.training.restore import restore_params

CLOSED_BOOK = "closed_book"


def run_controls(run: Run, evaluator: Evaluator) -> None:
    """All controls that the recipe allows, each in its own folder of the run, resumable like any task."""

    def measure(params: Params, index: Index | None, final: bool) -> dict[str, Any]:
        return {} if index is None else evaluator.recall(params, index)

    names = task_names(run.config)
    start = run.initial_params()
    if run.config.init_from:
        start = borrow_params(run, start)
    if "realm" in names and "ict" in names:
        before_realm = restore_params(run, run.workdir, "ict", start)
        never = _with(run, objective={"retriever_start": run.config.realm.steps})
        train_task(never, "realm", before_realm, measure, "no_retriever_gradient")
        train_task(_with(run, ict={"steps": run.config.realm.steps}, seed=run.config.seed + 1), "ict", before_realm,
                   measure, "more_ict")  # fmt: skip
    if "qa" in names:
        closed_book(run, evaluator, start)


def _with(run: Run, seed: int | None = None, **sections: dict[str, Any]) -> Run:
    """The run with some keys of its config changed."""
    config = type(run.config)(run.config.to_dict())
    for section, values in sections.items():
        config[section].update(values)
    if seed is not None:
        config.seed = seed
    return run.with_config(config)


def closed_book(run: Run, evaluator: Evaluator, params: Params) -> None:
    """Train and measure the reader without passages: masked sentences of X and training questions, half and half.

    As many steps as the recipe's reader has on masked words and on questions. Its answers to the development questions
    lie in `closed_book/predictions.jsonl`, for `realm evaluate` and `realm compare`.
    """
    sources, config = run.sources, run.config
    examples = closed_book_examples(
        sources.pretraining, sources.questions.get("train", []), sources.wordpiece, run.lengths
    )
    steps = {"steps": sum(config[name].steps for name in ("mlm", "qa") if name in task_names(config))}

    def measure(params: Params, index: Index | None, final: bool) -> dict[str, Any]:
        return {"exact_match": _exact_match(evaluator.questions, closed_book_answers(run, evaluator, params))}

    params = train_task(_with(run, mlm=steps), "mlm", params, measure, CLOSED_BOOK, lambda: examples)
    file = run.workdir / CLOSED_BOOK / "predictions.jsonl"
    if told(file.is_file()):
        return
    answers = closed_book_answers(run, evaluator, params)
    records = [
        known_of(question, number) | {"prediction": answer}
        for number, (question, answer) in enumerate(zip(evaluator.questions, answers, strict=True), 1)
    ]
    if is_first():
        write_json_atomic(settings_file(file), {"task": CLOSED_BOOK, "step": steps["steps"], "passages_read": 0})
        write_atomic(file, "".join(map(write_record, records)))


def _exact_match(questions: Sequence[Question], answers: Sequence[str]) -> float:
    right = [exact_match(a, q.answers, q.is_regex) for a, q in zip(answers, questions, strict=True)]
    return float(np.mean(right))


def closed_book_answers(run: Run, evaluator: Evaluator, params: Params) -> list[str]:
    """The likeliest word pieces in the places of each question's answer, up to the first [SEP]."""
    wordpiece, lengths = run.sources.wordpiece, run.lengths
    nothing = np.zeros(0, np.uint16)
    rows = [
        closed_book_query(question.question, wordpiece, lengths)
        | document_arrays(nothing, nothing, lengths.document, wordpiece)
        for question in evaluator.questions
    ]

    @jax.jit
    def guess(params: Params, batch: Any) -> jax.Array:
        documents = Documents(*(batch[f"document{part}"][:, None] for part in ("", "_length", "_title_length")))
        joint = flatten_joint(join(batch["query"], batch["query_length"], documents))
        return run.model.read_words(params, joint, batch["positions"]).argmax(axis=-1)

    size = run.config.evaluation.batch_size
    size += -size % run.mesh.size
    pieces: list[Any] = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        part = part + [part[0]] * (size - len(part))
        batch = {key: np.stack([row[key] for row in part]) for key in part[0]}
        pieces += list(to_host(guess(params, put_batch(run.mesh, batch))))
    return [closed_book_answer(row, wordpiece, lengths) for row in pieces[: len(rows)]]
