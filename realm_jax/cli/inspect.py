"""`realm inspect`: show prepared data, or how a trained model predicts a text.

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
from realm_jax.cli.arguments import add_run_arguments, config_changes, run_directory
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
  realm inspect data data/wiki --config=realm_ccnews --rows=5       text and masking of that config
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
NOWHERE = "no passage that was read has the answer"


SUBJECTS = {
    "data": "folder written by `realm prepare`, or its URL",
    "text": "question, or sentence with a [masked span] or a blank ____",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm inspect`, for `data` and for `text`."""
    parser.epilog = EXAMPLES
    kinds = parser.add_subparsers(dest="kind", metavar="data|text", required=True)
    subparsers = []
    for name, subject, text in (
        ("data", "DIR", "show passages and masked queries of a prepared folder, with statistics"),
        ("text", "TEXT", "show how passages change the prediction for a sentence or a question"),
    ):
        description = f"{text[0].upper()}{text[1:]}."
        kind = kinds.add_parser(name, help=text, description=description, allow_abbrev=parser.allow_abbrev)
        kind.add_argument("subject", metavar=subject, help=SUBJECTS[name])
        kind.add_argument("--html", type=nonempty, metavar="FILE", help="write the output also as an HTML page")
        subparsers.append(kind)
    of_data, of_text = subparsers
    add_config_argument(of_data)
    of_data.add_argument("--rows", type=int, default=3, metavar="N", help="number of passages to show (default: 3)")
    of_data.add_argument("--document", type=nonempty, metavar="ID", help="show the passages of this document instead")
    add_run_arguments(of_text)
    for name, value, meaning in (
        (
            "task",
            "TASK",
            "use the parameters from the end of this task (default: realm for a sentence, the last for a question)",
        ),
        ("answer", "TEXT", "answer to explain, for a question (default: the most probable answer)"),
        ("bert", "DIR", "run directory of a reader trained without passages, for comparison"),
    ):
        of_text.add_argument(f"--{name}", type=nonempty, metavar=value, help=meaning)
    of_text.add_argument(
        "--pieces",
        type=positive,
        default=1,
        metavar="N",
        help="number of tokens to predict for a blank ____ (default: 1)",
    )
    of_text.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Show data or a prediction, and write the page of --html."""
    html = None if args.html is None else checked_output(args.html, "--html")
    if args.kind == "data":
        run_data(args, html)
    else:
        run_text(args, html)


# --- data -------------------------------------------------------------------------------------------------------------


def run_data(args: argparse.Namespace, html: Path | None) -> None:
    """Print passages of a prepared folder and statistics of its text.

    Args:
        args: arguments of the command; `subject` is the folder.
        html: checked file for the page; None for no page.

    Raises:
        UserError: the folder, the config or a flag is invalid.
    """
    if args.rows < 0:
        raise UserError(f"--rows={args.rows}: must be at least 0")
    default_config = default()
    default_config.data.text = "passages"  # which every prepared folder has
    config = load_config(args.config, args.overrides, lambda: default_config)
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
        raise UserError(f"--document={args.document}: {store.folder} has no such document; name another id")

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
        for position in range(len(ids)):
            text = tokenizer.decode(ids[: position + 1])
            masked = position in query["positions"][query["weights"] > 0]
            line.append(printable(text[len(before) :]), style="bold red" if masked else "dim")
            before = text
        line.append(printable(f"   = {tokenizer.decode(query['targets'][query['weights'] > 0])}"), style="bold")
        screen.print(line)
        screen.print()

    # --- statistics, one per line, and as a page with histograms
    stats = statistics(store, tokenizer)
    numbers = [(name, f"{n:,}" if isinstance(n, int) else f"{n:.2%}") for name, n in stats.numbers.items()]
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in stats.kinds.items())
    questions = ", ".join(f"{split} {len(split_questions):,}" for split, split_questions in sources.questions.items())
    lines = [f"{name:>24}  {value}" for name, value in (*numbers, ("of kinds", kinds or "none"))]
    largest = max(stats.kinds.values(), default=1) or 1
    sections = [
        Section("The corpus in numbers", rows=numbers, numbers=1),
        Section("Kinds of salient spans", bars=[Bar(kind, n, f"{n:,}", largest) for kind, n in stats.kinds.items()]),
    ]
    for name, values in stats.counted.items():
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
        common = [(span, kind, f"{times:,}") for span, kind, times in stats.spans]
        note = "As tokens, in passages evenly spread over the corpus."
        sections.append(Section("Most common salient spans", note, ("span", "kind", "times"), common, 1))
        write_output(html, render_page(f"{data.text} of {Path(args.subject).name}", data.text.title(), sections))
        print(f"{args.html} is written")


def spans_in_text(store: PassageStore, row: int, tokenizer: Tokenizer) -> list[tuple[int, int, int]]:
    """Return the salient spans of a row in its text, by the character offsets of their tokens.

    Args:
        store: the text.
        row: the passage.
        tokenizer: tokenizer of the text.

    Returns:
        For each span its first character, the one after its last, and its kind.

    Raises:
        UserError: the text has other tokens.
    """
    offsets = tokenizer.offsets_of(store.text(row), store.body_tokens(row))
    if offsets is None:
        raise UserError(f"{store.folder}: the text of row {row} does not match its tokens; prepare the data again")
    return [(int(offsets[start, 0]), int(offsets[end - 1, 1]), int(kind)) for start, end, kind in store.spans(row)]


class Statistics(NamedTuple):
    """Statistics of a store.

    Attributes:
        numbers: name → a count (int) or a share (float).
        counted: name → values of all rows, spans or titles, [n] int each.
        kinds: kind of salient spans → how many there are.
        spans: common salient spans: text, kind, how often in the sampled rows.
    """

    numbers: dict[str, Any]
    counted: dict[str, NDArray[Any]]
    kinds: dict[str, int]
    spans: list[tuple[str, str, int]]


def statistics(store: PassageStore, tokenizer: Tokenizer) -> Statistics:
    """Count lengths, sentences, spans and unknown tokens of all rows; common spans are those of sampled rows.

    Args:
        store: the text.
        tokenizer: tokenizer of the text.
    """
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
    """Count integers in bins of equal integer width.

    Args:
        values: integers, [n].
        bins: number of bins at most.

    Returns:
        The first integer of each bin and the one after the last bin, [bins + 1], and the counts, [bins].
    """
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // bins)
    edges = np.arange(low, high + 1 + width, width)
    return edges, np.histogram(values, edges - 0.5)[0]


# --- a text -----------------------------------------------------------------------------------------------------------


def run_text(args: argparse.Namespace, html: Path | None) -> None:
    """Print how a trained model predicts a text.

    Args:
        args: arguments of the command; `subject` is a sentence with a blank, or a question.
        html: checked file for the page; None for no page.

    Raises:
        UserError: the text, the run or a flag is invalid.
    """
    # --- invalid texts, and flags that would have no effect
    for name, value in (("the text", args.subject), ("--answer", args.answer or "")):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{name}: is not valid UTF-8; type or save it as UTF-8 text") from None
    masked = parse(args.subject)
    if masked is None and args.bert:
        raise UserError("--bert: needs a sentence with a blank, such as '3 is a [Fermat] prime.'")
    if masked is not None and args.answer:
        raise UserError(
            "--answer: applies to questions only; write the answer of a sentence into its blank: [the word]"
        )
    if (masked is None or masked.answer is not None) and args.pieces != 1:
        raise UserError("--pieces: needs a sentence with an empty blank: ___")

    # --- the run, and that of --bert, which has to read the text in the same tokens
    changes = config_changes(args)
    workdir = run_directory(args.workdir, args.task or ("realm" if masked else None))
    opened = open_run_for_inference(workdir, {"evaluation.batch_size": 1} | changes)
    bert = None
    if masked is None:
        check_question(opened, args.subject)
    else:
        masked_text(opened, masked, args.pieces)
    if masked and args.bert:
        bert_workdir = run_directory(args.bert)
        recorded_config(bert_workdir, "--bert")
        try:
            other = open_run_for_inference(bert_workdir, changes)
            exported = exported_model(other.workdir)
            masked_text(other, masked, args.pieces)
        except UserError as error:
            raise UserError(f"--bert: {error}") from None
        if other.sources.tokenizer.fingerprint != opened.sources.tokenizer.fingerprint:
            raise UserError(
                f"--bert={args.bert}: has another vocabulary than --workdir={args.workdir}; name another run"
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
    """Return the title, document and part of a passage."""
    if passage["id"] is None:
        return "the empty passage"
    return f"{passage['title'] or 'passage'} ({passage['id']}, part {passage['part']})"


def _numbers(passage: InspectedPassage) -> list[str]:
    """Return the cells of a passage below HEADS, except the last."""
    known = passage["posterior"] is not None
    posterior, gain = (f"{passage['posterior']:.3f}", f"{passage['gain']:+.3f}") if known else ("–", "–")
    return [f"{passage['prior']:.3f}", probability(passage["likelihood"]), posterior, gain]


def _facts(record: Inspection) -> list[tuple[str, str]]:
    """Return the rows of the paper's table 3 above its passages: description and number."""
    passages, facts = record["passages"], []
    if "bert" in record:
        facts.append(("(a) BERT, trained without passages: p(y|x)", probability(record["bert"])))
    if record["alone"] is not None:
        facts.append(("(a) this reader with the empty passage: p(y|x,∅)", probability(record["alone"])))
    if all(passage["posterior"] is None for passage in passages):
        facts.append((f"(b) {NOWHERE}", ""))
    else:
        best = max(passages, key=lambda passage: passage["likelihood"])
        facts.append((f"(b) with {_name(best)}: p(y|z,x)", probability(best["likelihood"])))
    marginal = f"(c) marginal over {len(passages)} passages: p(y|x), y = {record['answer']!r}"
    facts.append((marginal, probability(record["probability"])))
    facts.append(("    share of the whole corpus's probability that they hold", probability(record["held"])))
    facts += [(f"    instead: {other['answer']!r}", probability(other["probability"])) for other in record["others"]]
    return facts


def show(record: Inspection, to: Console) -> None:
    """Print the facts, then one passage per line, cut to the terminal's width; numbers are never cut.

    Args:
        record: the inspection.
        to: prints it.
    """
    to.soft_wrap = not to.is_terminal
    to.print(Text(printable(record["text"]), style="bold"))
    facts = [(printable(description), number) for description, number in _facts(record)]
    width = max(cell_len(number) for _, number in facts)
    for description, number in facts:
        to.print(Text(f"{number.rjust(width)}  {description}"))
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
    """Return the inspection as an HTML page, with the full passages."""
    passages = record["passages"]
    posteriors = [(_name(passage), passage["posterior"]) for passage in passages if passage["posterior"] is not None]
    bars = [Bar(name, posterior, f"{posterior:.3f}") for name, posterior in posteriors]
    rows = [(*_numbers(passage), _name(passage), passage["text"]) for passage in passages]
    sections = [
        Section("Probabilities", rows=list(_facts(record)), numbers=1),
        Section("Which passage explains it", "p(z|x,y): the posterior." if bars else f"{NOWHERE}: –", bars=bars),
        Section("Passages", "r(z) = p(z|x,y) − p(z|x).", (*HEADS, "text"), rows),
    ]
    note = f"Parameters after step {record['step']} of {record['task']}."
    return render_page("REALM: a prediction", record["text"], sections, notes=[note])
