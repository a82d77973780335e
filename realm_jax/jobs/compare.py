"""`realm compare`: two files of `realm predict` on the same questions, and whether they differ by more than chance.

The tests are in `realm_jax/evaluation/significance.py`. No model, no device.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from realm_jax.errors import UserError
from realm_jax.evaluation.measures import Record, measure, read_predictions, read_settings
from realm_jax.evaluation.significance import METHODS, difference

EXAMPLES = f"""examples:
  realm predict --workdir=runs/ict --output=ict.jsonl
  realm predict --workdir=runs/realm --output=realm.jsonl
  realm compare ict.jsonl realm.jsonl

{METHODS.replace("; ", chr(10))}.
Where there is no terminal a line is `measure A B difference low high p McNemar questions`.
"""
COLUMNS = ("a", "b", "difference", "low", "high", "p", "mcnemar", "questions")
FACTS = ("task", "step", "parameters", "passages", "passages_read")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm compare`."""
    parser.epilog = EXAMPLES
    for name, what in (("a", "a file of `realm predict`"), ("b", "another, of the same questions")):
        parser.add_argument(name, metavar=name.upper(), help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Compare and print."""
    files = {"a": args.a, "b": args.b}
    found = {name: _facts(path) for name, path in files.items()}
    found |= compare(read_predictions(args.a), read_predictions(args.b), args.b)
    if args.json:
        print(json.dumps(found, ensure_ascii=False, allow_nan=False))
    else:
        show(found, Console(highlight=False))


def compare(first: Sequence[Record], second: Sequence[Record], path: str) -> dict[str, Any]:
    """{"questions", "methods", "measures": {name: {"a", "b", "difference", "low", "high", "p", "mcnemar", "only_a",
    "only_b", "questions"}}} of two sets of predictions, over the questions on which both have a measure.

    path: the second file's name, for the message. Raises UserError unless both were asked the same.
    """
    _check_same(first, second, path)
    left, right = measure(first), measure(second)
    measures = {}
    for name in (name for name in left if name in right):
        both = ~np.isnan(left[name]) & ~np.isnan(right[name])
        a, b = left[name][both], right[name][both]
        if len(a):
            tests = difference(a, b)._asdict()
            means = {"a": float(a.mean()), "b": float(b.mean()), "difference": tests.pop("value")}
            measures[name] = means | tests | {"questions": len(a)}
    return {"questions": len(first), "methods": METHODS, "measures": measures}


def _check_same(first: Sequence[Record], second: Sequence[Record], path: str) -> None:
    """Raise UserError at the first question that is another, or has other answers or another gold passage."""
    if len(first) != len(second):
        raise UserError(
            f"{path}: has {len(second):,} predictions, the other file {len(first):,}; predict the same questions"
        )
    for number, pair in enumerate(zip(first, second, strict=True), start=1):
        asked, other = ([one["question"], one.get("answers"), one.get("match")] for one in pair)
        if asked != other:
            raise UserError(
                f"{path}: question {number} is {other[0][:60]!r}, in the other file {asked[0][:60]!r}, or its answers "
                "differ; predict the same questions in the same order"
            )
        golds = [str(one["gold_passage_id"]) for one in pair if one.get("gold_passage_id") is not None]
        if len(set(golds)) > 1:
            raise UserError(
                f"{path}: the gold passage of question {number} is {golds[1]!r}, in the other file {golds[0]!r}; "
                "predict the same questions over the same corpus"
            )


def _facts(path: str) -> dict[str, Any]:
    made = read_settings(path)
    return {"file": path} | {name: made[name] for name in FACTS if name in made}


# ---- telling


def show(found: dict[str, Any], to: Console) -> None:
    """A table on a terminal, with what was compared and how; elsewhere lines."""
    if not to.is_terminal:
        for name, one in found["measures"].items():
            print(name, *(_plain(one[column]) for column in COLUMNS))
        return
    for name in ("a", "b"):
        facts = [f"{key} {value:,}" if isinstance(value, int) else str(value) for key, value in found[name].items()]
        to.print(f"{name.upper()}: {'   '.join(facts)}", markup=False)
    to.print(_table(found["measures"]))
    to.print(found["methods"], style="dim", markup=False)


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(measures: dict[str, Any]) -> Table:
    table = Table("measure", box=None, pad_edge=False, header_style="bold")
    for head in ("A", "B", "B − A", "95 %", "p", "McNemar", "questions"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, one in measures.items():
        ends = "–" if one["low"] is None else f"{one['low']:+.1%} … {one['high']:+.1%}"
        shares = (f"{one['a']:.1%}", f"{one['b']:.1%}", f"{one['difference']:+.1%}", ends)
        tests = (f"{one['p']:.2g}", "–" if one["mcnemar"] is None else f"{one['mcnemar']:.2g}")
        table.add_row(name, *shares, *tests, f"{one['questions']:,}")
    return table
