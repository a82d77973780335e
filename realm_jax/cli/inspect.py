"""`realm inspect`: look at prepared data, or at how a trained model predicts a text.

`data` is `inspect_data.py`, `text` is `inspect_text.py`.
"""

import argparse

from realm_jax.cli import inspect_data, inspect_text
from realm_jax.cli.argument_types import nonempty
from realm_jax.cli.output import checked_output

EXAMPLES = """examples:
  realm inspect data data/wiki                                three passages drawn at random, and numbers
  realm inspect data data/wiki --document=article-17          the passages of a document
  realm inspect data data/wiki --config=realm_ccnews --rows=5       its text, and queries masked as it says
  realm inspect data data/wiki --config.realm.masking=random_span
  realm inspect data data/wiki --html=wiki.html               histograms
  realm inspect text "3 is a [Fermat] prime." --workdir=runs/wiki --bert=runs/bert
  realm inspect text "The bridge was built in ____." --workdir=runs/wiki --html=bridge.html
  realm inspect text "Who built the bridge?" --workdir=runs/wiki --answer="John Smith"
  realm inspect text "$(cat article.txt)" --workdir=runs/wiki --alignment=article.jsonl
"""
KINDS = {
    "data": (inspect_data, "DIR", "a folder written by `realm prepare`, or its URL"),
    "text": (inspect_text, "TEXT", "how a trained model predicts a sentence or a question"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm inspect`: those of each kind are its own."""
    parser.epilog = EXAMPLES
    kinds = parser.add_subparsers(dest="what", metavar="data|text", required=True)
    for name, (job, subject, text) in KINDS.items():
        kind = kinds.add_parser(name, help=text, description=f"See {text}.", allow_abbrev=parser.allow_abbrev)
        kind.add_argument("subject", metavar=subject, help=text)
        kind.add_argument("--html", type=nonempty, metavar="FILE", help="also write what is shown as a page")
        job.add_arguments(kind)


def run(args: argparse.Namespace) -> None:
    """Look, and show."""
    html = None if args.html is None else checked_output(args.html, "--html")
    KINDS[args.what][0].run(args, html)
