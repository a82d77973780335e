"""`realm inspect`: look at prepared data, or at how a trained model predicts a text.

`data` shows passages with their salient spans in color, queries masked from them, and numbers. `text` shows which
passages a model reads for a sentence with a blank, `___` or `[the word]`, or for a question, and how each affects the
prediction: the paper's table 3, computed in `realm_jax/inference/inspection.py`.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from realm_jax.cli.argument_types import nonempty, positive
from realm_jax.cli.arguments import add_run_arguments, config_changes
from realm_jax.cli.output import checked_output, print_json, stdout, write_output
from realm_jax.config import add_config_argument, default, load_config, validate
from realm_jax.console import printable
from realm_jax.data.evidence import find_evidence
from realm_jax.data.examples import lengths_from, masked_arrays, spans_of
from realm_jax.data.sources import open_sources
from realm_jax.data.store import PassageStore
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.errors import UserError
from realm_jax.eval.format import probability
from realm_jax.eval.html import Bar, Section, render_page
from realm_jax.inference.inspection import (
    InspectedPassage,
    Inspection,
    check_has_priors,
    inspect_question,
    inspect_sentence,
    inspected_task,
    masked_text,
    parse,
)
from realm_jax.mesh import replicated
from realm_jax.models.folders import READER
from realm_jax.train.exported_model import exported_model
from realm_jax.train.trained_run import check_question, open_run_for_inference, restore
from realm_jax.train.workdir import recorded_config

EXAMPLES = """examples:
  realm inspect data data/wiki                                three passages drawn at random, and numbers
  realm inspect data data/wiki --document=article-17          the passages of a document
  realm inspect data data/wiki --config=realm_ccnews --rows=5       its text, and queries masked as it says
  realm inspect data data/wiki --config.realm.masking=random_span
  realm inspect data data/wiki --html=wiki.html               histograms
  realm inspect text "3 is a [Fermat] prime." --workdir=runs/wiki --bert=runs/bert
  realm inspect text "The bridge was built in ____." --workdir=runs/wiki --html=bridge.html
  realm inspect text "Who built the bridge?" --workdir=runs/wiki --answer="John Smith"
"""
COLORS = ("cyan", "green", "magenta", "yellow", "blue", "red")  # of kinds of spans, in their order
COMMON_SPANS = 20
SAMPLED_ROWS = 20_000  # evenly spread rows whose most common spans are counted
HEADS = ("p(z|x)", "p(y|z,x)", "p(z|x,y)", "r(z)", "passage")
SNIPPET = 160  # characters of a passage in a line
NOWHERE = "the answer stands in none of the passages that were read"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm inspect`: those of each kind are its own."""
    parser.epilog = EXAMPLES
    kinds = parser.add_subparsers(dest="what", metavar="data|text", required=True)
    subparsers = []
    for name, subject, text in (
        ("data", "DIR", "a folder written by `realm prepare`, or its URL"),
        ("text", "TEXT", "how a trained model predicts a sentence or a question"),
    ):
        kind = kinds.add_parser(name, help=text, description=f"See {text}.", allow_abbrev=parser.allow_abbrev)
        kind.add_argument("subject", metavar=subject, help=text)
        kind.add_argument("--html", type=nonempty, metavar="FILE", help="also write what is shown as a page")
        subparsers.append(kind)
    of_data, of_text = subparsers
    add_config_argument(of_data, "passages, and queries masked as by the built-in one")
    of_data.add_argument("--rows", type=int, default=3, metavar="N", help="passages to show (default: 3)")
    of_data.add_argument("--document", type=nonempty, metavar="ID", help="show the passages of this document instead")
    add_run_arguments(of_text)
    for name, value, meaning in (
        ("task", "TASK", "parameters at the end of this task (default: realm's for a sentence)"),
        ("answer", "TEXT", "of a question: the answer to inspect (default: the likeliest)"),
        ("bert", "DIR", "run whose reader was trained without passages, for comparison"),
    ):
        of_text.add_argument(f"--{name}", type=nonempty, metavar=value, help=meaning)
    of_text.add_argument("--pieces", type=positive, default=1, metavar="N", help="tokens of a blank ___ (default: 1)")
    of_text.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Look, and show."""
    html = None if args.html is None else checked_output(args.html, "--html")
    if args.what == "data":
        run_data(args, html)
    else:
        run_text(args, html)


# --- data -------------------------------------------------------------------------------------------------------------


def run_data(args: argparse.Namespace, html: Path | None) -> None:
    """Show passages of the folder `args.subject`, and numbers. html: a checked file for the page."""
    if args.rows < 0:
        raise UserError(f"--rows={args.rows}: must be at least 0")
    usual = default()
    usual.data.text = "passages"  # which every prepared folder has
    config = load_config(args.config, args.overrides, lambda: usual)
    config.data.path = args.subject
    validate(config)
    sources, data, masking = open_sources(args.subject, flag=""), config.data, config.realm.masking
    store, tokenizer = sources.passages if data.text == "passages" else sources.pretraining, sources.tokenizer
    lengths = lengths_from(data.query_length, store.limit, masking, data.predictions, 1, config.model.span_width)
    evidence = find_evidence(store, *lengths.hidden).spans if masking == "evidence" else None
    if args.document is None:
        rng = np.random.default_rng(config.seed)
        rows = sorted(rng.choice(len(store), min(args.rows, len(store)), replace=False).tolist())
    elif not (rows := [*store.rows_of(args.document)]):
        raise UserError(f"--document={args.document}: {store.folder} has no such document")

    screen = stdout()
    for row in rows:
        # --- the passage, with its spans in color
        head = Text(printable(store.title(row)) or "(no title)", style="bold")
        head.append(printable(f"   row {row} of {len(store):,}, document {store.document_id(row)}"), style="dim")
        screen.print(head)
        body = Text(printable(store.text(row)))
        for start, end, kind in spans_in_text(store, row, tokenizer):
            body.stylize(f"bold {COLORS[kind % len(COLORS)]}", start, end)
        screen.print(body)
        # --- a query as pre-training makes it: the first of its sentences, in random order, that can be masked
        rng = np.random.default_rng((config.seed, row))
        for number in rng.permutation(len(store.sentences(row))).tolist():
            sentence, spans = spans_of(store, row, number)
            spans = spans if evidence is None else evidence.of_sentence(store, row, number)
            query = masked_arrays(sentence, spans, masking, rng, lengths, tokenizer)
            if query["weights"].any():
                break
        else:
            screen.print("  no query: nothing in it can be masked\n", style="dim")
            continue
        line, ids, before = Text("  "), query["query"][: query["query_length"]].tolist(), ""
        for place in range(len(ids)):
            text = tokenizer.decode(ids[: place + 1])
            masked = place in query["positions"][query["weights"] > 0]
            line.append(printable(text[len(before) :]), style="bold red" if masked else "dim")
            before = text
        line.append(printable(f"   = {tokenizer.decode(query['targets'][query['weights'] > 0])}"), style="bold")
        screen.print(line)
        screen.print()

    # --- numbers, one a line, and as a page with histograms
    found = statistics(store, tokenizer)
    numbers = [(name, f"{n:,}" if isinstance(n, int) else f"{n:.2%}") for name, n in found.numbers.items()]
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in found.kinds.items())
    questions = ", ".join(f"{split} {len(asked):,}" for split, asked in sources.questions.items())
    lines = [f"{name:>24}  {value}" for name, value in (*numbers, ("of kinds", kinds or "none"))]
    most = max(found.kinds.values(), default=1) or 1
    sections = [
        Section("The corpus in numbers", rows=numbers, numbers=1),
        Section("Kinds of salient spans", bars=[Bar(kind, n, f"{n:,}", most) for kind, n in found.kinds.items()]),
    ]
    for name, values in found.counted.items():
        if not len(values):
            lines.append(f"{name:>29}  none")
            continue
        mean, median = f"mean {values.mean():.1f}", f"median {np.median(values):.0f}"
        lines.append(f"{name:>29}  {mean}, {median}, most {values.max()}")
        edges, counts = histogram(values)
        ends = [(first, after - 1) for first, after in zip(edges[:-1], edges[1:], strict=True)]
        labels = [f"{first}" if first == last else f"{first} – {last}" for first, last in ends]
        bars = [Bar(label, n, f"{n:,}", counts.max()) for label, n in zip(labels, counts.tolist(), strict=True)]
        sections.append(Section(name, f"{mean.capitalize()}, {median}.", bars=bars))
    for shown in (*lines, f"{'questions':>24}  {questions or 'none'}"):
        screen.print(Text(printable(shown)))
    if html:
        common = [(span, kind, f"{times:,}") for span, kind, times in found.spans]
        note = "As word pieces, in passages evenly spread over the corpus."
        sections.append(Section("Most common salient spans", note, ("span", "kind", "times"), common, 1))
        write_output(html, render_page(f"{data.text} of {Path(args.subject).name}", data.text.title(), sections))
        print(f"{args.html} is written")


def spans_in_text(store: PassageStore, row: int, tokenizer: Tokenizer) -> list[tuple[int, int, int]]:
    """The salient spans of a row: first character, the one behind the last, and kind.

    Found again by the characters that their tokens stand for. Raises UserError for a text that has other tokens.
    """
    offsets = tokenizer.offsets_of(store.text(row), store.body_tokens(row))
    if offsets is None:
        raise UserError(f"{store.folder}: the text of row {row} does not give its tokens; prepare the data again")
    return [(int(offsets[start, 0]), int(offsets[end - 1, 1]), int(kind)) for start, end, kind in store.spans(row)]


class Statistics(NamedTuple):
    """Numbers of a store. counted: values of all rows or spans, by name; spans: common ones (words, kind, times)."""

    numbers: dict[str, Any]
    counted: dict[str, NDArray[Any]]
    kinds: dict[str, int]
    spans: list[tuple[str, str, int]]


def statistics(store: PassageStore, tokenizer: Tokenizer) -> Statistics:
    """Count lengths, sentences, spans and unknown words of all rows; the common spans are those of sampled rows."""
    passages, titles, span_counts = store.counts("tokens"), store.column("title_lengths"), store.counts("spans")
    stored_tokens = [segment.columns["tokens"] for segment in store.segments]
    unknown = sum(int(np.count_nonzero(tokens == tokenizer.unk_id)) for tokens in stored_tokens)
    numbers = {
        "passages": len(store),
        "documents": store.documents,
        "tokens": int(passages.sum() - titles.sum(dtype=np.int64)),
        "unknown tokens": unknown / max(1, sum(map(len, stored_tokens))),
        "salient spans": int(span_counts.sum()),
        "passages without a span": float((span_counts == 0).mean()) if len(store) else 0.0,
    }
    starts, ends, kinds = store.column("spans").T.astype(np.int64)  # [spans] each
    counted = {
        "tokens of a passage": passages + 3,
        "sentences of a passage": store.counts("sentences"),
        "salient spans of a passage": span_counts,
        "tokens of a salient span": ends - starts,
        "tokens of a title": titles,
    }
    kind_counts = Counter(dict.fromkeys(store.span_kinds, 0))
    kind_counts.update(dict(zip(store.span_kinds, np.bincount(kinds).tolist(), strict=False)))
    span_tokens: Counter[tuple[bytes, int]] = Counter()
    for row in range(0, len(store), -(-len(store) // SAMPLED_ROWS) or 1):
        body = store.body_tokens(row)
        span_tokens.update((body[start:end].tobytes(), int(kind)) for start, end, kind in store.spans(row))
    common = sorted(span_tokens.items(), key=lambda item: (-item[1], item[0]))[:COMMON_SPANS]
    spans = [(tokenizer.decode(np.frombuffer(t, store.dtype)), store.span_kinds[k], times) for (t, k), times in common]
    return Statistics(numbers, counted, dict(kind_counts.most_common()), spans)


def histogram(values: NDArray[Any], bins: int = 16) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count whole numbers in at most `bins` bins of equal whole width: the first number of each bin and one past the
    last, [bins + 1], and the counts, [bins]."""
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // bins)
    edges = np.arange(low, high + 1 + width, width)
    return edges, np.histogram(values, edges - 0.5)[0]


# --- a text -----------------------------------------------------------------------------------------------------------


def run_text(args: argparse.Namespace, html: Path | None) -> None:
    """Look at the text `args.subject`. html: a checked file for the page."""
    # --- invalid texts, and flags that would have no effect
    for name, value in (("the text", args.subject), ("--answer", args.answer or "")):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{name}: is not valid UTF-8; type or save it as UTF-8 text") from None
    masked = parse(args.subject)
    if masked is None and args.bert:
        raise UserError("--bert: goes with a sentence that has a blank, such as '3 is a [Fermat] prime.'")
    if masked is not None and args.answer:
        raise UserError("--answer: goes with a question; write what stands in the blank into it: [the word]")
    if (masked is None or masked.answer is not None) and args.pieces != 1:
        raise UserError("--pieces: goes with a blank that is to be filled: ___")

    # --- the run, and the other of --bert, which has to read the text in the same tokens
    changes = config_changes(args)
    opened = open_run_for_inference(Path(args.workdir), {"evaluation.batch_size": 1} | changes)
    bert = None
    if masked is None:
        check_question(opened, args.subject)
    else:
        masked_text(opened, masked, args.pieces)
    if masked and args.bert:
        recorded_config(Path(args.bert), "--bert")
        try:
            other = open_run_for_inference(Path(args.bert), changes)
            exported = exported_model(other.workdir)
            masked_text(other, masked, args.pieces)
        except UserError as fault:
            raise UserError(f"--bert: {fault}") from None
        if other.sources.tokenizer.fingerprint != opened.sources.tokenizer.fingerprint:
            raise UserError(
                f"--bert={args.bert}: its vocabulary is not that of --workdir={args.workdir}; name another run"
            )
        params = exported.params(other.model, [READER])
        bert = other, jax.device_put(params, replicated(other.mesh))
    task = args.task or inspected_task(opened.config, masked is None)
    trained = restore(opened, task, for_answers=masked is None)
    check_has_priors(trained)
    if masked is None:
        record = inspect_question(trained, args.subject, args.answer)
    else:
        record = inspect_sentence(trained, args.subject, masked, args.pieces, bert)
    if args.json:
        print_json(record)
    else:
        show(record, stdout())
    if html:
        write_output(html, page(record))


def _name(passage: InspectedPassage) -> str:
    if passage["id"] is None:
        return "the empty passage"
    return f"{passage['title'] or 'passage'} ({passage['id']}, part {passage['part']})"


def _numbers(passage: InspectedPassage) -> list[str]:
    """The cells of a passage below HEADS, but the last."""
    known = passage["posterior"] is not None
    posterior, gain = (f"{passage['posterior']:.3f}", f"{passage['gain']:+.3f}") if known else ("–", "–")
    return [f"{passage['prior']:.3f}", probability(passage["likelihood"]), posterior, gain]


def _facts(record: Inspection) -> list[tuple[str, str]]:
    """The rows of the paper's table above its passages: what is meant, and the number."""
    passages, facts = record["passages"], []
    if "bert" in record:
        facts.append(("(a) BERT, trained without passages: p(y|x)", probability(record["bert"])))
    if record["alone"] is not None:
        facts.append(("(a) this reader with the empty passage: p(y|x,∅)", probability(record["alone"])))
    if all(passage["posterior"] is None for passage in passages):
        facts.append((f"(b) {NOWHERE}", ""))
    else:
        best = max(passages, key=lambda passage: passage["likelihood"])
        facts.append((f"(b) beside {_name(best)}: p(y|z,x)", probability(best["likelihood"])))
    marginal = f"(c) marginal over {len(passages)} passages: p(y|x), y = {record['answer']!r}"
    facts.append((marginal, probability(record["probability"])))
    facts.append(("    share of the whole corpus's probability that they hold", probability(record["held"])))
    return facts + [(f"    instead: {one['answer']!r}", probability(one["probability"])) for one in record["others"]]


def show(record: Inspection, to: Console) -> None:
    """The facts, then one passage per line, cut to the terminal's width; numbers are never cut."""
    to.soft_wrap = not to.is_terminal
    to.print(Text(printable(record["text"]), style="bold"))
    facts = [(printable(meant), number) for meant, number in _facts(record)]
    width = max(cell_len(number) for _, number in facts)
    for meant, number in facts:
        to.print(Text(f"{number.rjust(width)}  {meant}"))
    rows = [
        [*_numbers(passage), f"{_name(passage)}: {' '.join(passage['text'].split())[:SNIPPET]}"]
        for passage in record["passages"]
    ]
    widths = [max(map(cell_len, column)) for column in zip(HEADS, *rows, strict=True)]
    for *numbers, passage in (HEADS, *rows):
        cells = [number.rjust(width) for number, width in zip(numbers, widths, strict=False)]
        line = Text("  ".join([*cells, printable(passage)]))
        to.print(line, no_wrap=True, overflow="ellipsis" if to.is_terminal else "ignore")


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
