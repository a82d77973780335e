"""`realm evaluate`: recall and exact match of a trained run on questions, with BM25's recall beside it.

What a hit and a right answer are is defined in `realm_jax/evaluation/answers.py`; read `answering.py` for how a run is
opened.
"""

import argparse
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from realm_jax.corpus.jsonl import Question, read_questions
from realm_jax.errors import UserError
from realm_jax.evaluation.answers import exact_match
from realm_jax.evaluation.predict import Evaluator, Prediction
from realm_jax.evaluation.retrieval import Bm25, searchable_texts
from realm_jax.jobs.answering import Trained, add_run_arguments, open_run_to_ask, restore
from realm_jax.run import Run
from realm_jax.storage import make_folder, write_atomic

logger = logging.getLogger(__name__)

EXAMPLES = """examples:
  realm evaluate --workdir=runs/wiki
  realm evaluate --workdir=runs/wiki --task=realm --json         before fine-tuning
  realm evaluate --workdir=runs/wiki --questions=test.jsonl --output=predictions.jsonl
"""
DEPTHS = (1, 5, 20)
MEASURES = {"recall": "gold passage found", "answer_recall": "answer in a passage"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm evaluate`."""
    parser.epilog = EXAMPLES
    add_run_arguments(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--split", default="dev", help="questions of the prepared folder (default: %(default)s)")
    source.add_argument("--questions", metavar="FILE", help="file of questions, in place of a split")
    parser.add_argument("--task", help="parameters at the end of this task (default: the last with a checkpoint)")
    parser.add_argument("--output", metavar="FILE", help="write the predictions there, a JSON object a question")
    parser.add_argument("--no-bm25", action="store_true", help="leave out BM25, which holds the corpus in memory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    output = None if args.output is None else checked_output(Path(args.output))
    opened = open_run_to_ask(Path(args.workdir), args.data, {"evaluation.passages": max(DEPTHS)})
    questions = read_questions(args.questions) if args.questions else _split(opened, args.split)
    _look_at(opened, questions)
    trained = restore(opened, args.task)
    found, predictions = evaluate(trained, questions, bm25=not args.no_bm25)
    if output is not None:
        write_predictions(output, trained, questions, predictions)
    if args.json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        show(found, Console(highlight=False))


def evaluate(
    trained: Trained, questions: Sequence[Question], bm25: bool = True
) -> tuple[dict[str, Any], list[Prediction]]:
    """Everything that is measured, and the predictions.

    {"task", "step", "questions", "passages", "parameters", "exact_match", "retrieval": {"recall@1", …}, "bm25": {…}};
    a depth that the corpus does not have passages for is left out, and `recall@k` where no question has a gold passage.
    """
    evaluator = Evaluator(trained.run, questions)
    predictions = evaluator.predict(trained.params, trained.index)
    rows = evaluator.retrieve(trained.params, trained.index)
    found = {
        "task": trained.task,
        "step": trained.step,
        "questions": len(questions),
        "passages": trained.run.setting.rows,
        "parameters": sum(x.size for x in jax.tree.leaves(trained.params)),
        "exact_match": evaluator.exact_match(predictions),
        "retrieval": evaluator.recall_of(rows),
    }
    if bm25:
        index = Bm25(searchable_texts(trained.run.sources.passages))
        found["bm25"] = evaluator.recall_of(index.search([q.question for q in questions], rows.shape[1]))
    return found, predictions


def write_predictions(
    path: Path, trained: Trained, questions: Sequence[Question], predictions: Sequence[Prediction]
) -> None:
    """One JSON object a question: what was asked, what was answered, from which passage, and whether it is right."""
    store = trained.run.sources.passages
    records = [
        {
            "question": question.question,
            "answers": question.answers,
            "prediction": prediction.answer,
            "probability": prediction.probability,
            "correct": exact_match(prediction.answer, question.answers, question.is_regex),
            "passage_id": store.document_id(trained.answered_by(prediction).row),
            "gold_passage_id": question.gold_passage_id,
        }
        for question, prediction in zip(questions, predictions, strict=True)
    ]
    write_lines(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def write_lines(path: Path, text: str) -> None:
    """Write a file whole or not at all; a pipe or a device has nothing to replace and is written to as it is."""
    if _is_special(path):
        path.write_text(text, encoding="utf-8")
    else:
        write_atomic(path, text)


# ---- before any work


def checked_output(path: Path) -> Path:
    """The file that `path` leads to, through links. Raises UserError where nothing can be written."""
    if _is_special(path):
        if not os.access(path, os.W_OK):
            raise UserError(f"--output={path}: may not be written to; name another")
        return path
    file = Path(os.path.realpath(path))
    if file.is_dir() or not file.parent.is_dir():
        raise UserError(f"--output={path}: name a file in a folder that exists")
    make_folder(file.parent, "--output")
    return file


def _is_special(path: Path) -> bool:
    """Whether it is there and neither a file nor a folder."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _split(run: Run, split: str) -> list[Question]:
    questions = run.sources.questions.get(split)
    if not questions:
        known = ", ".join(run.sources.questions) or "none"
        raise UserError(
            f"--split={split}: {run.config.data.path} has no such questions (it has: {known}); "
            "choose another split, or give a file with --questions"
        )
    return questions


def _look_at(run: Run, questions: Sequence[Question]) -> None:
    """Warn of questions that cannot be answered as they stand."""
    most = run.config.data.query_length - 2
    encoded = run.sources.wordpiece.encode_batch([question.question for question in questions])
    if cut := sum(len(item.ids) > most for item in encoded):
        logger.warning("%d questions are longer than the %d word pieces that the run reads; they are cut", cut, most)
    gold = {question.gold_passage_id for question in questions if question.gold_passage_id is not None}
    if absent := [name for name in gold if not run.sources.passages.rows_of(name)]:
        logger.warning("%d gold passages, such as %r, are not in the corpus: misses", len(absent), min(absent))


# ---- telling


def show(found: dict[str, Any], to: Console) -> None:
    """A table on a terminal; elsewhere `name value` lines, with `bm25 ` before those of BM25."""
    facts = ("task", "step", "questions", "passages", "parameters")
    if not to.is_terminal:
        lines = {name: found[name] for name in (*facts, "exact_match")} | found["retrieval"]
        lines |= {f"bm25 {name}": value for name, value in found.get("bm25", {}).items()}
        for name, value in lines.items():
            print(name, f"{value:.4f}" if isinstance(value, float) else json.dumps(value).strip('"'))
        return
    to.print(_table(found))
    to.print("   ".join(f"{name} {found[name]:,}" for name in facts[1:]), style="dim")


def _table(found: dict[str, Any]) -> Table:
    table = Table("measure", f"after {found['task']}", box=None, pad_edge=False, header_style="bold")
    table.add_column("BM25")
    others = found.get("bm25", {})

    def cell(values: dict[str, Any], name: str) -> str:
        return f"{values[name]:.1%}" if name in values else "–"

    for measure, words in MEASURES.items():
        if f"{measure}@1" in found["retrieval"]:
            for k in DEPTHS:
                name = f"{measure}@{k}"
                table.add_row(f"{name}  {words}", cell(found["retrieval"], name), cell(others, name))
    table.add_row("exact match", cell(found, "exact_match"), "–", style="bold")
    return table
