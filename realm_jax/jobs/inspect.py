"""`realm inspect`: look at prepared data, or at how a trained model predicts a text.

`data` is `inspect_data.py`, `text` is `inspect_text.py`.
"""

import argparse
from pathlib import Path

from realm_jax.jobs import inspect_data, inspect_text
from realm_jax.jobs.predict import checked_output

EXAMPLES = """examples:
  realm inspect data data/wiki                                three passages drawn at random, and numbers
  realm inspect data data/wiki --document=article-17          the passages of a document
  realm inspect data data/wiki --text=pretraining --masking=random_span --rows=5
  realm inspect data data/wiki --html=wiki.html               histograms
  realm inspect text "3 is a [Fermat] prime." --workdir=runs/wiki --bert=runs/bert
  realm inspect text "The bridge was built in ____." --workdir=runs/wiki --html=bridge.html
  realm inspect text "Who built the bridge?" --workdir=runs/wiki --answer="John Smith"
  realm inspect text "$(cat article.txt)" --workdir=runs/wiki --alignment=article.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm inspect`."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "what", choices=("data", "text"), help="a prepared folder, or how a trained model predicts a text"
    )
    parser.add_argument(
        "subject", metavar="DIR|TEXT", help="folder written by `realm prepare`, or its URL; a sentence or a question"
    )
    parser.add_argument("--html", metavar="FILE", help="also write what is shown as a page")
    inspect_data.add_arguments(parser.add_argument_group("data"))
    inspect_text.add_arguments(parser.add_argument_group("text"))


def run(args: argparse.Namespace) -> None:
    """Look, and show."""
    if args.html:
        checked_output(Path(args.html), "--html")
    (inspect_data if args.what == "data" else inspect_text).run(args)
