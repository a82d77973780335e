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
  realm prepare --passages scifact.jsonl --questions scifact --output data      labeled queries in a folder of BEIR
  realm prepare --passages tfds:wikipedia/20230601.en --pretraining 'news:cc-news/*.jsonl.gz' --vocab vocab.txt \\
      --output data

A line of a passage file is {"id": …, "title": …, "text": …}. A line of a question file is {"question": …,
"answers": […]}, with "gold_passage_id" and "split" if known. A question with a gold passage needs no answers, but then
measures only retrieval. "gold_passages": {id: grade} lists several gold passages.
Files of DPR, Atlas, FiD, BEIR, Pyserini, FlashRAG, SQuAD, ORQA, DrQA and CuratedTREC are read in their own formats. The
questions of a BEIR folder are queries.jsonl and qrels/{train,dev,test}.tsv. Put queries.jsonl next to qrels of TREC.
Files may be packed as .gz, .xz, .bz2 or .zst. Unreadable documents of a folder or pattern are skipped and counted.
tfds:open_qa/nq_open, …/web_questions and …/curated_trec are the published questions with ORQA's splits train, dev and
test. We download them, or read them from TFDS_DATA_DIR/downloads/manual. Texts may also be hf:NAME, tfds:NAME or a dump
of Wikipedia. news:SOURCE is raw news (JSON Lines with text or maintext, title, url; or hf:cc_news): only English prose
of a usual length is kept, without near-duplicates.
Run the same command again to resume an interrupted run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `realm prepare`, one for each field of `Options`."""
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--passages", required=True, metavar="FILE", help="file, glob pattern or folder of documents to search")
    add("--output", required=True, metavar="DIR", help="prepared folder to write")
    add(
        "--pretraining",
        metavar="FILE",
        help="file, pattern or folder of texts for pre-training (default: the passages)",
    )
    questions = parser.add_argument_group("questions").add_argument
    questions(
        "--questions",
        default=[],
        nargs="+",
        action="extend",
        metavar="[SPLIT=]FILE",
        help="questions of a split such as train: a file, a folder of BEIR, or tfds:open_qa/NAME; without SPLIT= "
        'the field "split" of each question decides',
    )
    text = parser.add_argument_group("tokens, passages and spans")
    vocabulary = text.add_mutually_exclusive_group()
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
        help="maximum size, in word pieces, of a vocabulary learned from the texts (a sample, if they are large) "
        "(default: %(default)s)",
    )
    text.add_argument(
        "--limit",
        default=DEFAULT_LIMIT,
        type=positive,
        metavar="N",
        help="maximum length of a passage in tokens, with its title and three special tokens (default: %(default)s)",
    )
    text.add_argument(
        "--spans",
        default="rules",
        metavar="NAME",
        help=f"finder of salient spans, such as names and dates (default: %(default)s): {spans.CHOICES}",
    )
    add_language_argument(text)
    questions(
        "--question-sources",
        default=[],
        type=lambda names: [name for name in names.split(",") if name],
        metavar="NAME,NAME",
        help='keep only questions whose field "source" is one of these',
    )
    questions(
        "--max-answer-words",
        type=positive,
        metavar="N",
        help="drop answers of more than N words, and questions without any other answer (NQ-open: 5); regular "
        "expressions are kept (default: keep all answers)",
    )
    questions(
        "--ignore-gold",
        action="store_true",
        help="ignore the gold passages of questions, for example because they refer to another corpus",
    )
    processing = parser.add_argument_group("processing").add_argument
    processing("--workers", type=positive, metavar="N", help="number of worker processes (default: one per core)")
    processing(
        "--shards",
        type=positive,
        metavar="N",
        help="number of shards of a corpus, by hash of the id, packed separately (default: one per 2 MiB of input)",
    )
    processing(
        "--skip-damage",
        action="store_true",
        help="skip unreadable texts and questions, and report them (default: stop)",
    )
    processing(
        "--beam",
        metavar="OPTIONS",
        help="run on Apache Beam with these options instead of processes of this machine, for example "
        "--beam='--runner=DataflowRunner --project=… --region=… --temp_location=gs://…'; --output may then be a bucket",
    )


def add_language_argument(parser: argparse._ActionsContainer) -> None:
    """Add `--language`, also for `realm index`."""
    parser.add_argument(
        "--language",
        default="",
        metavar="CODE",
        help="language of the passages (ISO 639-1 code), for sentence splitting and BM25; 'none': no language in "
        "particular; 'bigrams': BM25 matches pairs of characters (default: detect the language)",
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
