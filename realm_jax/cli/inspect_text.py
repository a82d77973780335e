"""`realm inspect text`: which passages a trained model reads for a text, and how each affects the prediction.

A sentence has a blank, `___` or `[the word]`; a question has none. The numbers are those of the paper's table 3,
computed in `realm_jax/eval/inspection.py`. `--alignment` masks every salient span of a text in turn.
"""

import argparse
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from realm_jax.cli.argument_types import nonempty, positive
from realm_jax.cli.arguments import add_run_arguments, config_changes
from realm_jax.cli.output import checked_output, print_json, stdout, write_output
from realm_jax.console import printable
from realm_jax.data import sentences
from realm_jax.data.spans import finder
from realm_jax.errors import UserError
from realm_jax.eval.format import probability
from realm_jax.eval.html import Bar, Section, render_page
from realm_jax.eval.inspection import (
    Masked,
    masked_text,
    null_likelihood,
    parse,
)
from realm_jax.inference.inspection import (
    InspectedPassage,
    Inspection,
    check_has_priors,
    inspected_task,
    see_question,
    see_sentence,
    to_record,
)
from realm_jax.run import Run
from realm_jax.train.restore import restore_params
from realm_jax.train.trained_run import TrainedRun, check_question, latest_checkpoint, open_run_for_inference, restore
from realm_jax.train.workdir import recorded_config

logger = logging.getLogger(__name__)

HEADS = ("p(z|x)", "p(y|z,x)", "p(z|x,y)", "r(z)", "passage")
SNIPPET = 160  # characters of a passage in a line
NOWHERE = "the answer stands in none of the passages that were read"


def add_arguments(add: argparse.ArgumentParser) -> None:
    """The arguments of `realm inspect text`, but those of both kinds."""
    add_run_arguments(add)
    texts = {
        "task": ("TASK", "parameters at the end of this task (default: realm's for a sentence)"),
        "answer": ("TEXT", "of a question: the answer to inspect (default: the likeliest)"),
        "bert": ("DIR", "run whose reader was trained without passages, for comparison"),
        "alignment": ("FILE", "write which passages explain each salient span, as JSON Lines"),
        "spans": ("NAME", "how they are found (default: rules)"),
    }
    for name, (value, meaning) in texts.items():
        add.add_argument(f"--{name}", type=nonempty, metavar=value, help=meaning)
    add.add_argument("--pieces", type=positive, default=1, metavar="N", help="tokens of a blank ___ (default: 1)")
    add.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, html: Path | None) -> None:
    """Look at the text `args.subject`. html: a checked file for the page."""
    alignment = checked_output(args.alignment, "--alignment") if args.alignment else None
    text = None if alignment else parse(args.subject)
    _check(args, text)
    changes = config_changes(args)
    opened = open_run_for_inference(Path(args.workdir), {"evaluation.batch_size": 1} | changes)
    is_question = text is None and not alignment
    if is_question:
        check_question(opened, args.subject)
    if text:
        masked_text(text, args.pieces, opened.lengths, opened.sources.tokenizer)
    bert = _open_bert(args, changes, opened, text) if args.bert and text else None
    trained = restore(opened, args.task or inspected_task(opened.config, is_question), for_answers=is_question)
    check_has_priors(trained)
    if alignment:
        align(trained, args.subject, args.spans or "rules", alignment)
        print(f"{args.alignment} is written")
        return
    seen = (
        see_question(trained, args.subject, args.answer) if text is None else see_sentence(trained, text, args.pieces)
    )
    record = to_record(trained, args.subject, seen)
    if bert and text:
        params = restore_params(bert, *latest_checkpoint(bert))
        record["bert"] = null_likelihood(bert, params, text, seen.targets)
    if args.json:
        print_json(record)
    else:
        show(record, stdout())
    if html:
        write_output(html, page(record))


def _check(args: argparse.Namespace, text: Masked | None) -> None:
    """Raise UserError for invalid texts, and for flags that would have no effect."""
    for name, value in (("the text", args.subject), ("--answer", args.answer or "")):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{name}: is not valid UTF-8; type or save it as UTF-8 text") from None
    if text is None and args.bert:
        raise UserError("--bert: goes with a sentence that has a blank, such as '3 is a [Fermat] prime.'")
    if args.alignment:
        unused = [flag for flag in ("answer", "bert", "html", "json") if getattr(args, flag)]
        if unused:
            raise UserError(f"--{unused[0]}: has no effect with --alignment; leave it out")
        return
    if args.spans:
        raise UserError("--spans: goes with --alignment")
    if text is not None and args.answer:
        raise UserError("--answer: goes with a question; write what stands in the blank into it: [the word]")
    if (text is None or text.answer is not None) and args.pieces != 1:
        raise UserError("--pieces: goes with a blank that is to be filled: ___")


def _open_bert(args: argparse.Namespace, changes: dict[str, Any], opened: Run, text: Masked) -> Run:
    """The run of --bert. Raises UserError for one that cannot read the text, or not in the same tokens."""
    recorded_config(Path(args.bert), "--bert")
    try:
        other = open_run_for_inference(Path(args.bert), changes)
        latest_checkpoint(other)
        masked_text(text, args.pieces, other.lengths, other.sources.tokenizer)
    except UserError as fault:
        raise UserError(f"--bert: {fault}") from None
    theirs, own = (run.sources.tokenizer.fingerprint for run in (other, opened))
    if theirs != own:
        raise UserError(f"--bert={args.bert}: its vocabulary is not that of --workdir={args.workdir}; name another run")
    return other


# ---- alignment


def align(trained: TrainedRun, text: str, spans: str, output: Path) -> None:
    """Write a line for each salient span of a text: its sentence, and every passage with p(z|x) and p(z|x,y)."""
    lines = []
    for sentence, (start, end) in _masked_spans(text, spans):
        try:
            seen = see_sentence(trained, Masked(sentence[:start], sentence[start:end], sentence[end:]), 1)
        except UserError as fault:  # one sentence that is too long does not end the others
            logger.warning("%r is left out: %s", sentence, fault)
            continue
        record = to_record(trained, sentence, seen)
        record["passages"].sort(key=lambda one: -(one["posterior"] or 0.0))
        lines.append(json.dumps({**record, "span": [start, end]}, ensure_ascii=False) + "\n")
        best, y = record["passages"][0], record["answer"]
        explained = f"best explained by {_name(best)} ({best['posterior'] or 0.0:.3f})"
        print(printable(f"{y}: p(y|x) {seen.probability:.3g}, {explained}"))
    if not lines:
        raise UserError("--alignment: the text has no salient span; choose other --spans, or write a [blank]")
    write_output(output, "".join(lines))


def _masked_spans(text: str, spans: str) -> Iterator[tuple[str, tuple[int, int]]]:
    find = finder(spans)
    for start, end in sentences.split(text):
        sentence = " ".join(text[start:end].split())
        for span in find(sentence):
            yield sentence, (span.start, span.end)


# ---- showing


def _name(passage: InspectedPassage) -> str:
    if passage["id"] is None:
        return "the empty passage"
    return f"{passage['title'] or 'passage'} ({passage['id']}, part {passage['part']})"


def _facts(record: Inspection) -> list[tuple[str, str]]:
    """The rows of the paper's table above its passages: what is meant, and the number."""
    answer = f"y = {record['answer']!r}"
    facts = [("(a) BERT, trained without passages: p(y|x)", probability(record["bert"]))] if "bert" in record else []
    if record["alone"] is not None:
        facts.append(("(a) this reader with the empty passage: p(y|x,∅)", probability(record["alone"])))
    if _is_nowhere(record):
        facts.append((f"(b) {NOWHERE}", ""))
    else:
        best = max(record["passages"], key=lambda one: one["likelihood"])
        facts.append((f"(b) beside {_name(best)}: p(y|z,x)", probability(best["likelihood"])))
    facts.append(
        (f"(c) marginal over {len(record['passages'])} passages: p(y|x), {answer}", probability(record["probability"]))
    )
    facts.append(("    share of the whole corpus's probability that they hold", probability(record["held"])))
    facts += [(f"    instead: {one['answer']!r}", probability(one["probability"])) for one in record["others"]]
    return facts


def _is_nowhere(record: Inspection) -> bool:
    return all(one["posterior"] is None for one in record["passages"])


def _numbers(one: InspectedPassage) -> list[str]:
    known = one["posterior"] is not None
    posterior, gain = (f"{one['posterior']:.3f}", f"{one['gain']:+.3f}") if known else ("–", "–")
    return [f"{one['prior']:.3f}", probability(one["likelihood"]), posterior, gain]


def show(record: Inspection, to: Console) -> None:
    """The facts, then one passage per line, cut to the terminal's width; numbers are never cut."""
    to.soft_wrap = not to.is_terminal
    to.print(Text(printable(record["text"]), style="bold"))
    facts = [(printable(meant), number) for meant, number in _facts(record)]
    width = max(cell_len(number) for _, number in facts)
    for meant, number in facts:
        to.print(Text(f"{number.rjust(width)}  {meant}"))
    for line in _table(record["passages"]):
        to.print(line, no_wrap=True, overflow="ellipsis" if to.is_terminal else "ignore")


def _table(passages: list[InspectedPassage]) -> Iterator[Text]:
    """A line of names, and one for each passage: its numbers below each other, then where it is from and its text."""
    rows = [[*_numbers(one), f"{_name(one)}: {' '.join(one['text'].split())[:SNIPPET]}"] for one in passages]
    *columns, last = zip(HEADS, *rows, strict=True)
    widths = [max(map(cell_len, column)) for column in columns]
    for numbers, passage in zip(zip(*columns, strict=True), last, strict=True):
        cells = [number.rjust(width) for number, width in zip(numbers, widths, strict=True)]
        yield Text("  ".join([*cells, printable(passage)]))


def page(record: Inspection) -> str:
    """The same as a page, with the passages whole."""
    passages = record["passages"]
    explained = [(_name(one), one["posterior"]) for one in passages if one["posterior"] is not None]
    bars = [Bar(name, posterior, f"{posterior:.3f}") for name, posterior in explained]
    rows = [(*_numbers(one), _name(one), one["text"]) for one in passages]
    sections = [
        Section("Probabilities", rows=list(_facts(record)), numbers=1),
        Section("Which passage explains it", "p(z|x,y): the posterior." if bars else f"{NOWHERE}: –", bars=bars),
        Section("Passages", "r(z) = p(z|x,y) − p(z|x).", (*HEADS, "text"), rows),
    ]
    note = f"Parameters after step {record['step']} of {record['task']}."
    return render_page("REALM: a prediction", record["text"], sections, notes=[note])
