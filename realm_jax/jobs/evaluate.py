"""`realm evaluate`: one table of all measures, of a trained run or of a file of `realm predict`, with intervals.

What is measured is `realm_jax/evaluation/measures.py`; a run is measured by way of the same records that a file holds.
BM25's recall stands beside a run's.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from realm_jax.corpus.jsonl import Question, answered
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.evaluation.measures import (
    Record,
    measure,
    read_predictions,
    read_settings,
    summarise,
    trec_ids,
    trec_qrels,
    trec_run,
    words_of,
)
from realm_jax.evaluation.predict import Evaluator
from realm_jax.jobs.answering import (
    Trained,
    add_question_arguments,
    add_run_arguments,
    check_passages,
    filled,
    newest,
    open_run_to_ask,
    overrides_of,
    questions_of,
    restore,
)
from realm_jax.jobs.predict import checked_output, describe, is_special, known_of, records
from realm_jax.jobs.results import by_words
from realm_jax.storage import write_atomic
from realm_jax.tasks import TASKS

_T = TypeVar("_T")
EXAMPLES = """examples:
  realm evaluate --workdir=runs/wiki
  realm evaluate --workdir=runs/wiki --task=realm --json         before fine-tuning
  realm evaluate --workdir=runs/wiki --questions=test.jsonl --passages=100 --trec=run.txt --qrels=qrels.txt
  realm evaluate --predictions=predictions.jsonl                 what `realm predict` wrote; needs no device
  realm evaluate --predictions=predictions.jsonl --unseen=data/wiki

Where there is no terminal a line is `name value`, or `name value low high` with the ends of the interval.
"""
FACTS = ("task", "step", "questions", "passages", "passages_read", "parameters")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm evaluate`."""
    parser.epilog = EXAMPLES
    what = parser.add_mutually_exclusive_group(required=True)
    add_run_arguments(parser, instead=what)
    what.add_argument("--predictions", type=filled, metavar="FILE", help="a file of `realm predict`, in place of a run")
    add_question_arguments(parser)
    parser.add_argument(
        "--unseen",
        type=filled,
        metavar="DIR",
        help="leave out questions whose gold passage is that of a training question of this prepared folder",
    )
    parser.add_argument("--trec", type=filled, metavar="FILE", help="write what was retrieved there, as a TREC run")
    parser.add_argument(
        "--qrels", type=filled, metavar="FILE", help="write the gold passages there, as TREC's judgements"
    )
    parser.add_argument("--no-bm25", action="store_true", help="leave out BM25, which holds the corpus in memory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Measure, write and print."""
    files = {flag: vars(args)[flag] for flag in ("trec", "qrels") if vars(args)[flag]}
    _check_apart(args)
    checked = {flag: checked_output(Path(path), f"--{flag}") for flag, path in files.items()}
    found, scored = _evaluate_file(args) if args.predictions else _evaluate_run(args)
    texts = {"trec": lambda: trec_run(scored, f"realm-{found.get('task', 'run')}"), "qrels": lambda: trec_qrels(scored)}
    if args.json:
        print(json.dumps(found, ensure_ascii=False, allow_nan=False))
    else:
        show(found, Console(highlight=False))
    for flag, path in checked.items():
        write_lines(path, texts[flag]())


def _check_apart(args: argparse.Namespace) -> None:
    """Raise UserError where a file would be written over another that is written or read."""
    taken: dict[str, str] = {}
    for flag in ("predictions", "questions", "trec", "qrels"):
        path = vars(args)[flag]
        if path is None or is_special(Path(path)):
            continue
        other = taken.setdefault(os.path.realpath(path), flag)
        if other != flag:
            raise UserError(f"--{flag}={path}: is the file of --{other}; name another")


def _check_trec(args: argparse.Namespace, asked: Sequence[Record], retrieves: bool) -> None:
    """Raise UserError where the files for TREC would be empty, or two questions have one id."""
    if args.trec and not retrieves:
        raise UserError(f"--trec={args.trec}: nothing was retrieved that could be written; leave the flag out")
    if args.qrels and all(one.get("gold_passage_id") is None for one in asked):
        raise UserError(f"--qrels={args.qrels}: no question has a gold passage; leave the flag out")
    if args.trec or args.qrels:
        trec_ids(asked)


def _evaluate_run(args: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    opened = open_run_to_ask(Path(args.workdir), args.data, overrides_of(args))
    questions = questions_of(opened, args, need_right=True)
    if args.unseen:
        questions = _unseen(questions, [one.gold_passage_id for one in questions], args)
    if not args.read and not answered(questions):
        opened.config.evaluation.qa_passages = 1  # what is retrieved is measured alone; reading more takes minutes
    check_passages(opened, args)
    asked = [known_of(question, number) for number, question in enumerate(questions, start=1)]
    _check_trec(args, asked, TASKS[newest(opened, args.task)[0]].reads_passages)
    return evaluate(restore(opened, args.task, search=args.search), questions, bm25=not args.no_bm25)


def _evaluate_file(args: argparse.Namespace) -> tuple[dict[str, Any], list[Record]]:
    for flag in ("data", "split", "questions", "task", "aggregate", "read", "passages", "search", "no_bm25"):
        if vars(args)[flag]:
            raise UserError(
                f"--{flag.replace('_', '-')}: goes with --workdir; what is in --predictions={args.predictions} is fixed"
            )
    scored, made = read_predictions(args.predictions), read_settings(args.predictions)
    if args.unseen:
        scored = _unseen(scored, [record.get("gold_passage_id") for record in scored], args)
    _check_trec(args, scored, any(record.get("retrieved") for record in scored))
    facts = {name: made[name] for name in FACTS if name in made} | {"questions": len(scored)}
    return facts | _measured(scored), scored


def gold_in_training(folder: str) -> set[str]:
    """The gold passages of the training questions of a prepared folder. Raises UserError where they have none."""
    questions = open_sources(folder, flag="--unseen=").questions.get("train", [])
    seen = {question.gold_passage_id for question in questions if question.gold_passage_id is not None}
    if not seen:
        raise UserError(f"--unseen={folder}: no training question there has a gold passage; name another folder")
    return seen


def _unseen(found: Sequence[_T], golds: Sequence[Any], args: argparse.Namespace) -> list[_T]:
    """What is left of the questions without those of which training had the gold passage; golds: of each, or None."""
    if all(gold is None for gold in golds):
        raise UserError(f"--unseen={args.unseen}: no measured question has a gold passage; leave the flag out")
    seen = gold_in_training(args.unseen)
    left = [one for one, gold in zip(found, golds, strict=True) if gold is None or str(gold) not in seen]
    if not left:
        raise UserError(f"--unseen={args.unseen}: leaves no question; name the folder that the run was trained with")
    return left


def evaluate(trained: Trained, questions: Sequence[Question], bm25: bool = True) -> tuple[dict[str, Any], list[Record]]:
    """Everything that is measured, and the records that it is measured on.

    {"task", "step", "parameters", "passages", "passages_read", "questions", "measures": {"exact_match": {"value",
    "low", "high", "questions"}, …}, "bm25": {"recall@1", …}}; a measure that no question has is left out.
    """
    scored = [record for batch in records(trained, questions) for record in batch]
    found = (
        describe(trained.run, trained.task, trained.step, trained.search)
        | {"questions": len(scored)}
        | _measured(scored)
    )
    if bm25 and TASKS[trained.task].reads_passages:
        evaluator = Evaluator(trained.run, questions)
        others = evaluator.recall_of(by_words(trained.run, evaluator))
        found["bm25"] = {name: value for name, value in others.items() if name in found["measures"]}
    return found, scored


def _measured(scored: Sequence[Record]) -> dict[str, Any]:
    return {"measures": {name: summarise(values) for name, values in measure(scored).items()}}


def write_lines(path: Path, text: str) -> None:
    """Write a file whole or not at all; a pipe or a device has nothing to replace and is written to as it is."""
    if is_special(path):
        path.write_text(text, encoding="utf-8")
    else:
        write_atomic(path, text)


# ---- telling


def show(found: dict[str, Any], to: Console) -> None:
    """A table on a terminal; elsewhere lines, with `bm25 ` before those of BM25."""
    facts = {name: found[name] for name in FACTS if name in found}
    if to.is_terminal:
        to.print(_table(found))
        to.print("   ".join(f"{name} {value:,}" for name, value in facts.items() if name != "task"), style="dim")
        return
    lines = {name: [value] for name, value in facts.items()}
    lines |= {name: [one[key] for key in ("value", "low", "high")] for name, one in found["measures"].items()}
    lines |= {f"bm25 {name}": [value] for name, value in found.get("bm25", {}).items()}
    for name, values in lines.items():
        print(name, *map(_plain, values))


def _plain(value: Any) -> str:
    """A value in a line for programs: four digits of a share, `-` for what is not there."""
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else json.dumps(value).strip('"')


def _table(found: dict[str, Any]) -> Table:
    table = Table("measure", box=None, pad_edge=False, header_style="bold")
    for head in (f"after {found['task']}" if "task" in found else "value", "95 %", "BM25", "questions"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", style="dim")
    others = found.get("bm25", {})
    for name, one in found["measures"].items():
        other = f"{others[name]:.1%}" if name in others else "–"
        style = "bold" if name == "exact_match" else None
        ends = "–" if one["low"] is None else f"{one['low']:.1%} … {one['high']:.1%}"
        table.add_row(name, f"{one['value']:.1%}", ends, other, f"{one['questions']:,}", words_of(name), style=style)
    return table
