"""`realm prepare`: turn documents and questions into a prepared folder, which all other commands read.

This file has the flags; `prepare` of `realm_jax/corpora/preparation.py` does the work.
"""

import argparse
from dataclasses import fields
from typing import Any

from realm_jax.cli.argument_types import positive
from realm_jax.corpora.preparation import DEFAULT_VOCABULARY_SIZE, Options, Path_
from realm_jax.corpora.summary import prepare_and_print
from realm_jax.data import spans
from realm_jax.data.passage_packing import DEFAULT_LIMIT

EXAMPLES = """examples:
  realm prepare --passages passages.jsonl.gz --questions questions.jsonl.gz --output data
  realm prepare --passages wiki.jsonl.xz --pretraining news.jsonl.xz --questions train=NQ-open.train.jsonl \\
      --questions dev=NQ-open.dev.jsonl --vocab vocab.txt --max-answer-words 5 --output data
  realm prepare --passages docs/ --output data      a folder of .txt .md .rst .html .pdf .docx .csv .json .parquet
  realm prepare --passages 'enwiki-20261101/*.xml*.bz2' --vocab vocab.txt --output data
  realm prepare --passages psgs_w100.tsv.gz --questions train=nq-train.json dev=nq-dev.json --output data
  realm prepare --passages wiki.jsonl --questions tfds:open_qa/web_questions --output data
  realm prepare --passages scifact.jsonl --questions scifact --output data      judged questions in a folder of BEIR
  realm prepare --passages tfds:wikipedia/20230601.en --pretraining 'news:cc-news/*.jsonl.gz' --vocab vocab.txt \\
      --output data

A line of a passage file is {"id": …, "title": …, "text": …}, of a question file {"question": …, "answers": […]} with
"gold_passage_id" and "split" if known; with a gold passage it needs no answers, but then measures only retrieval.
"gold_passages": {id: grade} names several. Files of DPR, Atlas, FiD, BEIR, Pyserini, FlashRAG, SQuAD, ORQA, DrQA and
CuratedTREC are read in their format; of BEIR's folders queries.jsonl and qrels/{train,dev,test}.tsv are the questions,
of TREC's qrels queries.jsonl.
Files may be packed as .gz, .xz, .bz2 or .zst. Unreadable documents of a folder or pattern are skipped and counted.
tfds:open_qa/nq_open, …/web_questions and …/curated_trec are the published questions with ORQA's splits train, dev and
test; they are downloaded, or taken from TFDS_DATA_DIR/downloads/manual. Texts may also be hf:NAME, tfds:NAME or a dump
of Wikipedia; news:SOURCE is raw news (JSON Lines with text or maintext, title, url, or hf:cc_news), of which English
prose of a usual length is used, without near-duplicates.
Run the same command again to resume an interrupted run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `realm prepare`, one for each field of `Options`."""
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--passages", required=True, metavar="FILE", help="file, pattern or folder of the texts to retrieve from")
    add("--output", required=True, metavar="DIR", help="prepared folder to write")
    add("--pretraining", metavar="FILE", help="likewise for the texts to pre-train on (default: the passages)")
    add(
        "--questions",
        default=[],
        nargs="+",
        action="extend",
        metavar="[SPLIT=]FILE",
        help="file of questions for a split such as train or dev, BEIR's folder, or tfds:open_qa/NAME; without SPLIT= "
        'the field "split" of each question decides',
    )
    vocabulary = parser.add_mutually_exclusive_group()
    vocabulary.add_argument(
        "--vocab",
        metavar="FILE",
        help="tokenizer of a pretrained encoder: its vocab.txt, any tokenizer.json, its folder, hf:NAME, or py:NAME "
        "of an installed package",
    )
    vocabulary.add_argument(
        "--vocabulary-size",
        default=DEFAULT_VOCABULARY_SIZE,
        type=positive,
        metavar="N",
        help="maximum word pieces of a vocabulary learned from the texts, or from every n-th article of large ones "
        "(default: %(default)s)",
    )
    add(
        "--limit",
        default=DEFAULT_LIMIT,
        type=positive,
        metavar="N",
        help="maximum tokens of a passage, including its title and three special ones (default: %(default)s)",
    )
    add(
        "--spans",
        default="rules",
        metavar="NAME",
        help=f"finder of salient spans (default: %(default)s): {spans.CHOICES}",
    )
    add_language_argument(parser)
    add(
        "--question-sources",
        default=[],
        type=lambda names: [name for name in names.split(",") if name],
        metavar="NAME,NAME",
        help='keep only questions whose field "source" is one of these',
    )
    add(
        "--max-answer-words",
        type=positive,
        metavar="N",
        help="keep only answers of at most N words, and questions that have one; NQ-open has 5; regular expressions "
        "stay (default: keep all)",
    )
    add(
        "--ignore-gold",
        action="store_true",
        help="ignore the gold passages of the questions: for questions made with other passages than these",
    )
    add("--workers", type=positive, metavar="N", help="processes to use (default: one per core)")
    add(
        "--shards",
        type=positive,
        metavar="N",
        help="number of parts of a corpus, by hash of the id, packed separately (default: one for each 2 MiB of input)",
    )
    add(
        "--skip-damage",
        action="store_true",
        help="skip texts and questions that cannot be read, and report them (default: stop)",
    )
    add(
        "--beam",
        metavar="OPTIONS",
        help="use Apache Beam instead of processes of this machine, such as --beam='--runner=DataflowRunner "
        "--project=… --region=… --temp_location=gs://…'; --output may be a bucket then",
    )


def add_language_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--language`, which `realm index` has too."""
    parser.add_argument(
        "--language",
        default="",
        metavar="CODE",
        help="ISO 639-1 code of the language of the passages, whose sentences are split by its rules, and whose terms "
        "BM25 matches; none: no language in particular; bigrams: pairs of characters (default: detect it)",
    )


def run(args: argparse.Namespace) -> None:
    """Prepare the folder."""
    prepare(**{option.name: getattr(args, option.name) for option in fields(Options)})


def prepare(passages: Path_, output: Path_, **options: Any) -> None:
    """Write a prepared folder and print a summary with counts and samples.

    Args:
        passages: file, pattern or folder of the texts.
        output: the folder to write.
        **options: the other fields of `Options`.

    Raises:
        UserError: the inputs have errors, or `output` was made otherwise.
    """
    prepare_and_print(Options(passages, output, **options))
