"""`realm evaluate`: one table of all metrics of a trained run or of a file of `realm predict`; or compare two files.

The metrics are in `realm_jax/eval/question_metrics.py`; a run is evaluated through the same records that a file holds.
A run's table also has BM25's recall. The tests of `realm_jax/eval/significance.py` compare two files.
"""

import argparse
import dataclasses
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from realm_jax.cli.argument_types import nonempty
from realm_jax.cli.arguments import (
    add_question_arguments,
    add_run_arguments,
    check_passages,
    config_changes,
    run_directory,
)
from realm_jax.cli.output import checked_output, is_special, print_json, print_line, stdout, table, write_output
from realm_jax.config import with_values
from realm_jax.data.questions import answered, gold_of
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.eval.prediction_files import (
    FACTS,
    Record,
    check_same_questions,
    question_record,
    read_predictions,
    read_settings,
    trec_ids,
    trec_qrels,
    trec_run,
)
from realm_jax.eval.question_metrics import compare, describe_metric, over_seeds, summarize
from realm_jax.eval.significance import METHODS
from realm_jax.inference.predictions import evaluate
from realm_jax.tasks.answering import reads_passages
from realm_jax.train.trained_run import find_task, has_reader, load_questions, open_run_for_inference, restore

_T = TypeVar("_T")
EXAMPLES = f"""examples:
  realm evaluate --workdir=runs/wiki
  realm evaluate --workdir=runs/wiki --task=realm --json         before fine-tuning
  realm evaluate --workdir=runs/docs --reader=hf:NAME             with another reader
  realm evaluate --workdir=runs/wiki --questions=test.jsonl --config.answering.retrieved=100 --trec=run.txt
  realm evaluate predictions.jsonl --qrels=qrels.txt             a file of `realm predict`; needs no device
  realm evaluate predictions.jsonl --unseen=data/wiki
  realm evaluate ict.jsonl realm.jsonl                           test whether the second is significantly better
  realm evaluate --seeds ict-*.jsonl --seeds realm-*.jsonl       the same over seeds: one file per seed

Methods for two files:
{METHODS.replace("; ", chr(10))}
If stdout is no terminal, a line is `name value`, or `name value low high` with the ends of the interval; for two files
`name A B difference low high p McNemar questions`, for seeds `name value low high seeds` or `name A B difference …`.
"""
# Column of a comparison → its head on a terminal and its format there; the ends of an interval are one column.
COMPARED = {
    "value": ("value", ".1%"), "a": ("A", ".1%"), "b": ("B", ".1%"), "difference": ("B − A", "+.1%"),
    "low": ("95 %", ""), "high": ("", ""), "p": ("p", ".2g"), "mcnemar": ("McNemar", ".2g"),
    "seeds": ("seeds", ","), "questions": ("questions", ","),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm evaluate`."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "files",
        nargs="*",
        type=nonempty,
        metavar="FILE",
        help="predictions file of `realm predict`, or two files of the same questions to compare",
    )
    add_run_arguments(parser, required=False)
    add_question_arguments(parser)
    group = parser.add_argument_group("comparison and output")
    group.add_argument(
        "--unseen",
        type=nonempty,
        metavar="DIR",
        help="exclude questions whose gold passage also answers a training question of this prepared folder",
    )
    group.add_argument(
        "--trec", type=nonempty, metavar="FILE", help="write the retrieved passages to this TREC run file"
    )
    group.add_argument("--qrels", type=nonempty, metavar="FILE", help="write the gold passages to this TREC qrels file")
    group.add_argument(
        "--seeds",
        type=nonempty,
        nargs="+",
        action="append",
        metavar="FILE",
        help="predictions files of one system, one per seed; repeat the flag, with the same seeds, to compare two",
    )
    group.add_argument(
        "--no-bm25", action="store_true", help="skip the BM25 baseline, which keeps the corpus in memory"
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Measure, print the table and write the files of --trec and --qrels."""

    def report(measured: dict[str, Any], show: Callable[[dict[str, Any], Console], None]) -> None:
        if args.json:
            print_json(measured)
        else:
            show(measured, stdout())

    # --- several seeds, or two files
    if args.seeds:
        report(_evaluate_seeds(args), show_comparison)
        return
    _check(args)
    if len(args.files) == 2:
        first, second = args.files
        facts = {name: {"file": path} | _provenance(path) for name, path in (("a", first), ("b", second))}
        report(facts | compare(read_predictions(first), read_predictions(second), second), show_comparison)
        return
    outputs = {flag: checked_output(vars(args)[flag], f"--{flag}") for flag in ("trec", "qrels") if vars(args)[flag]}

    # --- a file
    if args.files:
        (path,) = args.files
        scored = read_predictions(path)
        if args.unseen:
            scored = _without_training_golds(scored, [*map(gold_of, scored)], args)
        _check_trec(args, scored, any(record.get("retrieved") for record in scored))
        measured = _provenance(path) | {"questions": len(scored), "measures": summarize(scored)}

    # --- or a run
    else:
        changes = config_changes(args)
        opened = open_run_for_inference(run_directory(args.workdir, args.task), changes)
        questions = load_questions(opened, args.questions, need_right=True)
        if args.unseen:
            questions = _without_training_golds(questions, [question.gold for question in questions], args)
        exported = find_task(opened, args.task)
        reads = has_reader(opened, exported.task)
        if "answering.read" not in changes and not (reads and answered(questions)):
            # Then only retrieval is measured, and reading takes minutes.
            opened = dataclasses.replace(opened, config=with_values(opened.config, {"answering.read": 1}))
        check_passages(opened, args)
        records = [question_record(question, number) for number, question in enumerate(questions, start=1)]
        _check_trec(args, records, reads_passages(exported.task))
        trained = restore(opened, args.task, search=args.search, rerank=args.rerank, warn=reads)
        measured, scored = evaluate(trained, questions, bm25=not args.no_bm25)

    report(measured, show)
    if args.trec:
        write_output(outputs["trec"], trec_run(scored, f"realm-{measured.get('task', 'run')}"))
    if args.qrels:
        write_output(outputs["qrels"], trec_qrels(scored))


def _check(args: argparse.Namespace) -> None:
    """Raise UserError unless there is one run or file or two files, with flags that apply and no file named twice."""
    if bool(args.workdir) == bool(args.files) or len(args.files) > 2:
        raise UserError("realm evaluate: name a run with --workdir, or one file of predictions, or two to compare")
    if args.files:
        reason = f"applies only to --workdir, because {args.files[0]} has finished predictions; leave it out"
        for flag in ("questions", "task", "search", "rerank", "reader", "no_bm25"):
            if vars(args)[flag]:
                raise UserError(f"--{flag.replace('_', '-')}: {reason}")
        if args.overrides:
            raise UserError(f"{args.overrides[0]}: {reason}")
    for flag in ("unseen", "trec", "qrels"):
        if len(args.files) == 2 and vars(args)[flag]:
            raise UserError(f"--{flag}: applies to one file of predictions, not to two; leave it out")
    named = [("the predictions", path) for path in args.files[:1]]
    named += [(f"--{flag}", vars(args)[flag]) for flag in ("questions", "trec", "qrels") if vars(args)[flag]]
    taken: dict[str, str] = {}
    for name, path in named:
        other = name if is_special(Path(path)) else taken.setdefault(os.path.realpath(path), name)
        if other != name:
            raise UserError(f"{name}={path}: is also the file of {other}; choose another")


def _check_trec(args: argparse.Namespace, records: Sequence[Record], retrieves: bool) -> None:
    """Raise UserError if the files for TREC would be empty, or two questions have one id."""
    if args.trec and not retrieves:
        raise UserError(f"--trec={args.trec}: no passages were retrieved; leave the flag out")
    if args.qrels and not any(map(gold_of, records)):
        raise UserError(f"--qrels={args.qrels}: no question has a gold passage; leave the flag out")
    if args.trec or args.qrels:
        trec_ids(records)


def _evaluate_seeds(args: argparse.Namespace) -> dict[str, Any]:
    """Return `over_seeds` of the files of --seeds. Raises UserError for other flags, or unequal numbers of files."""
    run_flags = ("workdir", "questions", "task", "search", "rerank", "reader", "overrides")
    others = ("files", *run_flags, "unseen", "trec", "qrels", "no_bm25")
    if extra := [name for name in others if vars(args)[name]]:
        raise UserError(f"--seeds: can only be combined with --json; leave out {', '.join(extra)}")
    sizes = {len(group) for group in args.seeds}
    if len(args.seeds) > 2 or len(sizes) > 1 or sizes == {1}:
        raise UserError("--seeds: needs two or more files; give a second system as many files, in the same seed order")
    groups = [[read_predictions(path) for path in group] for group in args.seeds]
    for paths, group in zip(args.seeds, groups, strict=True):
        for path, records in zip(paths, group, strict=True):
            check_same_questions(groups[0][0], records, path)
    return over_seeds(*groups)


def _provenance(path: str) -> dict[str, Any]:
    """Return the settings that a predictions file was made with, as far as they are known."""
    settings = read_settings(path)
    return {name: settings[name] for name in FACTS if name in settings}


def _without_training_golds(
    questions: Sequence[_T], golds: Sequence[Collection[str]], args: argparse.Namespace
) -> list[_T]:
    """Return the questions none of whose gold passages, `golds`, is also that of a training question."""
    if not any(golds):
        raise UserError(f"--unseen={args.unseen}: no measured question has a gold passage; leave the flag out")
    training = open_sources(args.unseen, flag="--unseen=").questions.get("train", [])
    seen = {name for question in training for name in question.gold}
    if not seen:
        raise UserError(f"--unseen={args.unseen}: no training question there has a gold passage; name another folder")
    unseen = [question for question, gold in zip(questions, golds, strict=True) if seen.isdisjoint(gold)]
    if not unseen:
        raise UserError(f"--unseen={args.unseen}: leaves no question; name the folder that the run was trained with")
    return unseen


# ---- showing


def show(report: dict[str, Any], to: Console) -> None:
    """Print the metrics: a table on a terminal, otherwise lines, those of BM25 prefixed with `bm25 `.

    Args:
        report: facts, "questions", "measures" and for a run "bm25".
        to: prints it.
    """
    facts = {name: report[name] for name in (*FACTS, "questions") if name in report}
    bm25, measures = report.get("bm25", {}), report["measures"]
    if not to.is_terminal:
        lines = {name: [value] for name, value in facts.items()}
        lines |= {name: [measure[key] for key in ("value", "low", "high")] for name, measure in measures.items()}
        lines |= {f"bm25 {name}": [value] for name, value in bm25.items()}
        for name, values in lines.items():
            print_line(name, values, ".4f")
        return
    heads = ("measure", f"after {report['task']}" if "task" in report else "value", "95 %", "BM25", "questions", "")
    rows = []
    for name, measure in measures.items():
        other = f"{bm25[name]:.1%}" if name in bm25 else "–"
        rows.append((name, f"{measure['value']:.1%}", _interval(measure, ".1%"), other, f"{measure['questions']:,}"))
    to.print(table(heads, [(*row, describe_metric(row[0])) for row in rows], numbers=True))
    to.print("   ".join(f"{name} {value:,}" for name, value in facts.items() if name != "task"), style="dim")


def show_comparison(report: dict[str, Any], to: Console) -> None:
    """Print a comparison: a table with facts and methods on a terminal, otherwise lines.

    Args:
        report: report of `compare` for two files, or of `over_seeds`.
        to: prints it.
    """
    measures = report["measures"]
    columns = [column for column in COMPARED if column in next(iter(measures.values()), {})]
    if not to.is_terminal:
        for name, measure in measures.items():
            print_line(name, [measure[column] for column in columns], ".4g")
        return
    for name in ("a", "b"):
        facts = [
            f"{key} {fact:,}" if isinstance(fact, int) else str(fact) for key, fact in report.get(name, {}).items()
        ]
        if facts:
            to.print(f"{name.upper()}: {'   '.join(facts)}", markup=False)
    shown = {column: COMPARED[column] for column in columns if column != "high"}
    rows = []
    for name, measure in measures.items():
        cells = {
            column: "–" if measure[column] is None else f"{measure[column]:{form}}"
            for column, (_, form) in shown.items()
        }
        cells["low"] = _interval(measure, "+.1%" if "difference" in measure else ".1%")
        rows.append((name, *cells.values()))
    to.print(table(("measure", *(head for head, _ in shown.values())), rows, numbers=True))
    to.print(report["methods"], style="dim", markup=False)


def _interval(measure: dict[str, Any], form: str) -> str:
    """Return the ends of a 95 % interval in a format; a dash for none."""
    return "–" if measure["low"] is None else f"{measure['low']:{form}} … {measure['high']:{form}}"
