"""`realm ask`: answer questions with a trained run, and show the passages that the answers come from.

Results go to stdout, everything else to stderr. The run is opened by `train/trained_run.py`; questions are answered by
`realm_jax/inference/answers.py`.
"""

import argparse
import io
import logging
import sys
from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from realm_jax.cli.argument_types import nonempty, positive
from realm_jax.cli.arguments import (
    add_reader_argument,
    add_rerank_argument,
    add_run_arguments,
    add_search_argument,
    config_changes,
    run_directory,
)
from realm_jax.cli.output import print_json, stdout
from realm_jax.config import INDEX
from realm_jax.console import console as on_stderr
from realm_jax.console import printable
from realm_jax.errors import UserError
from realm_jax.inference.answers import NEAREST, Answer, Nearest, answers, nearest
from realm_jax.train.trained_run import (
    NAME_A_READER,
    check_question,
    check_reads_passages,
    open_generation,
    open_run_for_inference,
    restore,
)

logger = logging.getLogger(__name__)

EXAMPLES = """examples:
  realm ask --workdir=runs/wiki "Who built the bridge?"
  realm ask --workdir=runs/wiki                                  one question per line, until an empty one
  realm ask --workdir=runs/wiki --json < questions.txt > answers.jsonl
  realm ask --workdir=runs/wiki --config.answering.read=50 "Who built the bridge?"
  realm ask --workdir=runs/wiki --search=hybrid --rerank=tokens "Who built the bridge?"
  realm ask --workdir=runs/wiki --reader=hf:NAME "Who built the bridge?"
  realm ask --workdir=runs/wiki --generation=newest "the bridge over the river"
"""
# Characters of a passage, of its title, and at least of its ranks, in the list of passages.
SNIPPET, TITLE, RANKS = 60, 30, 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm ask`."""
    parser.epilog = EXAMPLES
    add_run_arguments(parser)
    group = parser.add_argument_group("search and reading")
    how = group.add_mutually_exclusive_group()
    add_search_argument(how)
    how.add_argument(
        "--generation",
        type=nonempty,
        metavar="NAME",
        help="search this index version (see `realm storage ls`), or the 'newest'; shows passages, but no answer",
    )
    add_rerank_argument(group)
    add_reader_argument(group)
    parser.add_argument(
        "question",
        nargs="*",
        metavar="QUESTION",
        help="question to answer (default: read one question per line from stdin)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per question")
    parser.add_argument(
        "--top",
        type=positive,
        metavar="N",
        help="number of passages to show (default: all passages read; 5 with --generation)",
    )


def run(args: argparse.Namespace) -> int:
    """Answer questions; return 2 if a line from a pipe was no valid question."""
    if args.generation and args.rerank:
        raise UserError(f"--rerank={args.rerank}: cannot be combined with --generation; leave one of them out")
    # --- the run, and one warning if its answers cannot be trusted
    opened = open_run_for_inference(run_directory(args.workdir), config_changes(args), questions=False)
    single = " ".join(args.question) if args.question else None
    if single is not None:
        check_question(opened, single)
    if args.generation:
        if args.reader:
            raise UserError(
                f"--reader={args.reader}: --generation shows passages without an answer; leave one of them out"
            )
        trained = open_generation(opened, args.generation)
    else:
        trained = restore(opened, search=args.search, rerank=args.rerank, warn=False)
        check_reads_passages(trained)
        metrics = trained.recorded
        if not trained.reads:
            after = "" if trained.task == INDEX else f" (task {trained.task})"
            logger.warning("no reader was trained%s: showing the retrieved passages; %s", after, NAME_A_READER)
        elif trained.reads_blanks:
            logger.warning(
                "the reader learned from blanks in your documents and never saw a question: showing the passages "
                "first, check its answer; %s",
                NAME_A_READER,
            )
        if metrics is not None and metrics.is_low:
            logger.warning("%s", metrics.advice())
        elif metrics is None and not trained.reads_blanks and trained.task != INDEX:
            logger.info("this run has no recorded metrics")
    to = stdout()
    to.soft_wrap = not to.is_terminal  # wrap words for people, but no lines for programs

    def reply(text: str) -> None:
        question = check_question(trained.run, text, trained.pipeline.search)
        answer: Answer | Nearest
        if args.generation:
            (answer,) = nearest(trained, [question], args.top or NEAREST)
        else:
            (answer,) = answers(trained, [question], args.top)
        if args.json:
            print_json(answer)
        else:
            show(answer, to, passages_first=trained.reads_blanks)

    # --- one question
    if single is not None:
        reply(single)
        return 0

    # --- one after another on a terminal, until an empty line or the end of input
    if sys.stdin.isatty():
        while True:
            try:
                line = on_stderr().input("[bold]question>[/bold] ")
            except EOFError:
                on_stderr().print()
                return 0
            if not line.strip():
                return 0
            try:
                reply(line)
            except UserError as error:
                logger.warning("%s", error)

    # --- one per line of a file or a pipe; an invalid line is reported and skipped
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # invalid bytes affect only their own line
    rejected = number = 0
    for number, line in enumerate(sys.stdin, start=1):
        try:
            reply(line)
        except UserError as error:
            logger.error("line %d: %s", number, error)
            rejected += 1
    if not number:
        raise UserError("there is no question; add one in quotes, or write one per line to stdin")
    return 2 if rejected else 0


def show(answer: Mapping[str, Any], to: Console, passages_first: bool = False) -> None:
    """Print an answer for people.

    Args:
        answer: an `Answer` or a `Nearest` of `inference/answers.py`.
        to: prints it.
        passages_first: print the first passage, and the answer after the passages, because it may be a bad one.
    """
    candidates, passage = answer["candidates"], answer.get("passage")
    if not candidates:
        to.print("no passage shares a word with the question; ask with other words, or with --search=vectors")
        return
    # --- the answer in its passage
    answer_line = None
    if passage is not None:
        text = Text(printable(answer["answer"]) or "no answer", style="bold green")
        no_answer = f", of no answer {answer['no_answer']:.3g}" if "no_answer" in answer else ""
        answer_line = Text.assemble(text, f"  (probability {answer['probability']:.3g}{no_answer})")
        if passages_first:
            passage = None
        else:
            to.print(answer_line)
            to.print()
    first = passage or candidates[0]  # printed in full
    to.print(Text(printable(f"{first['title'] or 'passage'} ({first['id']})"), style="bold"))
    to.print(highlight_span(first["text"], first.get("span", [0, 0]), to))
    to.print()
    # --- a line for each passage: p(z|x) or score, ranks by stage such as v3 b1 t2, title, text around the best answer
    titles = [printable(candidate["title"]) for candidate in candidates]
    width = min(TITLE, max(map(cell_len, ["title", *titles])))
    ranks = [" ".join(f"{stage[0]}{rank}" for stage, rank in candidate["ranks"].items()) for candidate in candidates]
    ranks_width = max(RANKS, *map(len, ranks))
    room = max(SNIPPET // 2, to.width - width - ranks_width - 14) if to.is_terminal else SNIPPET
    marks = ", its best answer marked" if all("span" in candidate for candidate in candidates) else ""
    number, head = ("score", " score") if "score" in candidates[0] else ("probability", "p(z|x)")
    found_by, title_head = set_cell_size("found by", ranks_width), set_cell_size("title", width)
    to.print(Text(f"{head}  {found_by}  {title_head}  passage{marks}", style="bold"))
    for candidate, title, placed in zip(candidates, titles, ranks, strict=True):
        snippet = highlight_span(candidate["text"], candidate.get("span", [0, 0]), to, room)
        cells = f"{candidate[number]:6.3f}  {set_cell_size(placed, ranks_width)}  {set_cell_size(title, width)}  "
        to.print(Text.assemble(cells, snippet))
    to.print()
    if answer_line is not None and passages_first:
        to.print(answer_line)
        to.print()


def highlight_span(text: str, span: list[int], to: Console, room: int | None = None) -> Text:
    """Return a text with a span marked: in reverse if the console has colors, in [[…]] otherwise.

    Args:
        text: the text.
        span: first character of the span and the one after its last; equal for no span.
        to: the console that will print it.
        room: characters to keep around the span; None for all.
    """
    start, end = span
    first, last = 0, len(text)
    if room is not None:
        around = max(0, room - (end - start))
        first = max(0, min(start - around // 2, len(text) - room))
        last = max(end, min(len(text), first + room))
    text = printable(text)
    before, inside, after = text[first:start], text[start:end], text[end:last]
    before, after = "…" * (first > 0) + before, after + "…" * (last < len(text))
    if not inside:
        return Text(before + after)
    if to.color_system is None or to.no_color:
        return Text(f"{before}[[{inside}]]{after}")
    return Text.assemble(before, (inside, "bold reverse"), after)
